"""The slides on what a dense layer and attention cost."""

import torch

from regard import MultiHeadAttention
from regard.lab.answers.answer import Answer, Demonstration, Mistake, Point, Step
from regard.lab.claims.costs import cost
from regard.lab.cost.layers import Sizes
from regard.lab.experiment import Table
from regard.lab.place import Place
from regard.model.baseline import Dense


def _dense() -> Demonstration:
    rows = []
    for tokens, width in ((4, 6), (8, 6), (4, 12)):
        found = cost("dense over all positions", Sizes(tokens, width, heads=1))
        rows.append((tokens, width, tokens * width, found.parameters, found.multiply_adds))
    return Demonstration(
        all(row[4] == row[2] ** 2 and row[3] == row[2] ** 2 + row[2] for row in rows),
        tables=(
            Table(
                "One dense layer over all tokens, with a bias",
                ("N", "D", "numbers in and out", "parameters", "multiply-adds"),
                tuple(rows),
            ),
        ),
    )


def _another_length() -> Demonstration:
    dense = Dense(6, 4)
    try:
        taken, said = dense(torch.zeros(1, 5, 6)).shape[1] == 5, "nothing"
    except ValueError as error:
        taken, said = False, str(error)
    return Demonstration(
        taken,
        {
            "a dense layer for 4 tokens, given 5, says": said,
            "attention, given 5": MultiHeadAttention(6, 1)(torch.zeros(1, 5, 6)).shape[1],
        },
    )


def _shared() -> Demonstration:
    rows = []
    for tokens, width in ((8, 16), (16, 16), (32, 16), (16, 32)):
        pairs = cost("attention alone", Sizes(tokens, width, heads=1))
        whole = cost("attention, with projections", Sizes(tokens, width, heads=1))
        rows.append(
            (
                tokens,
                width,
                whole.parameters - 4 * width,
                pairs.multiply_adds,
                whole.multiply_adds - pairs.multiply_adds,
                tokens * width**2,
            )
        )
    return Demonstration(
        all(p == 4 * d * d and dots == 2 * n * n * d for n, d, p, dots, *_ in rows)
        and all(rest == 4 * next_ for *_, rest, next_ in rows),
        tables=(
            Table(
                "Self-attention, counted while it runs; biases left out",
                (
                    "N",
                    "D",
                    "parameters, W_O too",
                    "multiply-adds of all pairs, 2N²D",
                    "of the four projections, 4ND²",
                    "of the next layer D to D, ND²",
                ),
                tuple(rows),
            ),
        ),
    )


def _grows_with_tokens() -> Demonstration:
    counts = [
        cost("attention, with projections", Sizes(n, 16, heads=1)).parameters for n in (8, 16, 32)
    ]
    return Demonstration(
        counts[0] < counts[-1], {"parameters for 8, 16 and 32 tokens of width 16": counts}
    )


def _pairs_only() -> Demonstration:
    tokens, width = 8, 64
    whole = cost("attention, with projections", Sizes(tokens, width, heads=1)).multiply_adds
    pairs = cost("attention alone", Sizes(tokens, width, heads=1)).multiply_adds
    return Demonstration(
        whole == pairs,
        {
            "N": tokens,
            "D": width,
            "multiply-adds of the whole layer": whole,
            "of all pairs, which the O(N²D) counts": pairs,
        },
    )


ANSWERS: tuple[Answer, ...] = (
    Answer(
        Place("slides", "dense layer"),
        question="A layer takes $N$ tokens of width $D$ and gives as many. What would one dense "
        "layer over all of it cost?",
        answer="There are $ND$ numbers on each side, so that the matrix has $N^2 D^2$ parameters, "
        "and one forward pass multiplies each of them once: $O(N^2 D^2)$ for both. Moreover it "
        "fits one $N$ only.",
        derivation=(
            Step(
                "Every output number has a weight for every input number.",
                r"(ND) \cdot (ND) = N^2 D^2",
            ),
        ),
        run=_dense,
        mistakes=(
            Mistake(
                "The same dense layer serves for sequences of any length.",
                "Its matrix has a row and a column for every position.",
                _another_length,
            ),
        ),
        points=(
            Point(1, "$ND$ numbers in and out"),
            Point(1, r"$O(N^2 D^2)$ parameters and operations"),
        ),
    ),
    Answer(
        Place("slides", "shared weights"),
        question="What do attention and the layer after it cost, given that all tokens share "
        "$W_Q$, $W_K$ and $W_V$?",
        answer="The parameters do not depend on $N$: $O(D^2)$. The dot products of all pairs cost "
        "$O(N^2 D)$, and so do the means of the values. The projections cost $O(N D^2)$, which is "
        "more wherever $N < D$. A following layer from $D$ to $D$ has $O(D^2)$ parameters and "
        "costs $O(N D^2)$.",
        derivation=(
            Step("Three matrices, and $W_O$.", r"3 D^2 + D^2"),
            Step("Two products over all pairs.", r"N^2 D + N^2 D"),
            Step("Every token through every matrix.", r"N \cdot 4 D^2"),
        ),
        run=_shared,
        mistakes=(
            Mistake(
                "The number of parameters grows with the number of tokens.",
                "All tokens share the matrices.",
                _grows_with_tokens,
            ),
            Mistake(
                "The whole layer costs $O(N^2 D)$.",
                "That is the part of the pairs. For short sequences most of the work is in the "
                "projections.",
                _pairs_only,
            ),
        ),
        points=(
            Point(1, r"$O(D^2)$ parameters"),
            Point(1, r"$O(N^2 D)$ for the pairs, $O(N D^2)$ for the projections"),
            Point(1, r"$O(N D^2)$ for the layer after it"),
        ),
    ),
)
