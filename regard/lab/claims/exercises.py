"""Worked exercises: attention by hand, and common mistakes.

    C = softmax(Q Kᵀ / √d) V

Every number comes from `attend` or `attention_weights`, and again from plain arithmetic written out
here.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from regard import attend, attention_weights
from regard.attention.score import DotScore
from regard.lab.byhand import exercise
from regard.lab.claims.sample import SAME, apart, normal
from regard.lab.experiment import Experiment, Finding, Table, holds, more_exactly
from regard.lab.numbers import figure, within
from regard.lab.place import Place

FOUR_WORDS = torch.tensor([[1, 0, 0], [0, 1, 0], [1, 1, 0], [0, 0, 1]], dtype=torch.float64)
"""The handout's words: the third is the sum of the first two."""
ROUNDED = 0.005
"""The most by which a number printed with two decimals may differ."""


def exercise_1() -> Finding:
    query, states = _one_query()
    shares, context = (
        attention_weights(query, states, beta=1.0),
        attend(query, states, states, beta=1.0),
    )
    by_arithmetic, mean = by_hand(query, states, states, 1.0)
    scores = DotScore()(query, states)
    scaled = attention_weights(query, states)
    names = ("h₁", "h₂", "h₃")
    printed = shares.new_tensor([[0.88, 0.12, 0.00]]), shares.new_tensor([[1.00, 2.00, 2.76]])
    return Finding(
        holds(
            scores.tolist() == [[8, 6, 1]]
            and max(apart(shares, by_arithmetic), apart(context, mean)) < SAME
            and max(apart(shares, printed[0]), apart(context, printed[1])) < ROUNDED
        ),
        {
            "scores": scores[0].tolist(),
            "weights": shares[0].tolist(),
            "context": context[0].tolist(),
            "difference from arithmetic": apart(context, mean),
        },
        tables=(
            Table(
                "one query over three states",
                ("state", "score", "weight", "weight if scaled by 1/√3"),
                tuple(zip(names, scores[0].tolist(), shares[0].tolist(), scaled[0].tolist())),
            ),
        ),
        conclusion=f"The scores are {figure(scores[0].tolist())}, the weights "
        f"{figure(shares[0].tolist())} and the context {figure(context[0].tolist())}; plain "
        f"arithmetic differs by {figure(apart(context, mean))}. Scaled by 1/√3, as in a "
        f"Transformer, the first weight would be {figure(float(scaled[0, 0]))}.",
    )


def exercise_1_in_torch() -> Finding:
    query, states = _one_query()
    # As the listing does: dot products of whole numbers, then float32.
    exponentials = (states.long() @ query[0].long()).float().exp()
    shares = exponentials / exponentials.sum()
    listing = sum((a * h for a, h in zip(shares, states.long())), torch.zeros(3))
    context = attend(query, states, states, beta=1.0)[0]
    difference = apart(listing.double(), context)
    return Finding(
        holds(difference < 1e-6),
        {"listing": listing.tolist(), "attend": context.tolist(), "difference": difference},
        conclusion="The listing, in float32, and attend(), in float64, differ by "
        f"{figure(difference)}.",
    )


def softmax_along_rows() -> Finding:
    shares = attention_weights(*exercise()[:2])
    rows, columns = shares.sum(1), shares.sum(0)
    return Finding(
        holds(apart(rows, torch.ones(2)) < SAME and apart(columns, torch.ones(3)) > 0.1),
        {"sums of rows": rows.tolist(), "sums of columns": columns.tolist()},
        tables=(
            Table(
                "weights of exercise 3",
                ("", "k₁", "k₂", "k₃", "sum"),
                (
                    ("q₁", *shares[0].tolist(), float(rows[0])),
                    ("q₂", *shares[1].tolist(), float(rows[1])),
                    ("sum", *columns.tolist(), float(shares.sum())),
                ),
            ),
        ),
        conclusion=f"The rows of exercise 3's weights sum to {figure(rows.tolist())}, its columns "
        f"to {figure(columns.tolist())}: a query shares out all of its attention, and a key "
        "receives whatever falls to it.",
    )


def exercise_3() -> Finding:
    query, key, value = exercise()
    shares, output = attention_weights(query, key), attend(query, key, value)
    by_arithmetic, mean = by_hand(query, key, value, 1 / math.sqrt(2))
    printed = output.new_tensor([[0.86, 1.58, -0.72], [0.99, 1.88, -1.56]])
    return Finding(
        holds(
            max(apart(shares, by_arithmetic), apart(output, mean)) < SAME
            and apart(output, printed) < ROUNDED
        ),
        {
            "weights": shares.tolist(),
            "output": output.tolist(),
            "difference from arithmetic": apart(output, mean),
        },
        tables=(
            Table(
                "exercise 3",
                ("", "A₁", "A₂", "A₃", "C₁", "C₂", "C₃"),
                tuple((f"q{n}", *shares[n - 1].tolist(), *output[n - 1].tolist()) for n in (1, 2)),
            ),
        ),
        conclusion=f"The weights of the two queries are {figure(shares.tolist(), 3)}, the output "
        f"{figure(output.tolist(), 3)}. The second query puts {float(shares[1, 0]):.0%} of its "
        "attention on the first key, so that its output is close to the first value.",
    )


def exercise_3_slips() -> Finding:
    query, key, value = exercise()
    right, unscaled = attend(query, key, value), attend(query, key, value, beta=1.0)
    # A softmax down the columns is one over the queries: keys and queries change places.
    columns = attention_weights(key, query).T
    down = columns @ value
    natural = by_hand(query, key, value, 1 / math.sqrt(2))[1]
    least = min(apart(right, unscaled), apart(right, down), apart(unscaled, down))
    return Finding(
        holds(
            apart(right, natural) < SAME
            and right.shape == unscaled.shape == down.shape
            and least > 0.05
        ),
        {
            "right": right[0].tolist(),
            "not scaled": unscaled[0].tolist(),
            "softmax down the columns": down[0].tolist(),
            "least difference between two of them": least,
        },
        tables=(
            Table(
                "first row of the output",
                ("", "C₁", "C₂", "C₃", "weights add up to"),
                (
                    ("right", *right[0].tolist(), float(attention_weights(query, key)[0].sum())),
                    (
                        "not scaled",
                        *unscaled[0].tolist(),
                        float(attention_weights(query, key, beta=1.0)[0].sum()),
                    ),
                    ("softmax down the columns", *down[0].tolist(), float(columns[0].sum())),
                ),
            ),
        ),
        conclusion=f"All three answers have the same shape, and differ by {figure(least)} at "
        "least. Without the scale the first weight grows from "
        f"{figure(float(attention_weights(query, key)[0, 0]), 3)} to "
        f"{figure(float(attention_weights(query, key, beta=1.0)[0, 0]), 3)}; down the columns the "
        f"first query's weights add up to {figure(float(columns[0].sum()), 3)}.",
    )


def listing_is_the_library() -> Finding:
    random = normal(0, 2, 5, 7, 11), normal(1, 2, 5, 13, 11), normal(2, 2, 5, 13, 3)
    listed, ours = [], []
    for query, key, value in (exercise(), random):
        exponentials = torch.exp(query @ key.mT / math.sqrt(key.shape[-1]))
        listing = exponentials / exponentials.sum(-1, keepdim=True) @ value
        peer = F.scaled_dot_product_attention(query, key, value)
        listed.append(apart(listing, peer))
        ours.append(apart(attend(query, key, value), peer))
    return Finding(
        holds(max(*listed, *ours) < SAME),
        {
            "listing and torch's own, exercise 3": listed[0],
            "listing and torch's own, random numbers": listed[1],
            "attend and torch's own, at most": max(ours),
        },
        conclusion=f"For the matrices of exercise 3 they differ by {figure(listed[0])}, for random "
        f"ones by {figure(listed[1])}, in float64; attend() and torch's own function by "
        f"{figure(max(ours))} at most.",
    )


def overflow() -> Finding:
    def listing(score: float) -> float:
        exponentials = torch.exp(torch.tensor([score, 0.0]))
        return float((exponentials / exponentials.sum())[0])

    def ours(score: float) -> float:
        return float(
            attention_weights(torch.tensor([[score]]), torch.tensor([[1.0], [0.0]]), beta=1.0)[0, 0]
        )

    low, high = 0.0, 200.0
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (middle, high) if math.isfinite(listing(middle)) else (low, middle)
    below, above = (1.0, 20.0, 80.0, 88.7), (88.8, 100.0, 1e4)

    def right(function: Callable[[float], float], score: float) -> bool:
        return abs(function(score) - 1 / (1 + math.exp(-score))) < 1e-6

    return Finding(
        more_exactly(
            meant=all(right(listing, score) for score in below)
            and all(right(ours, score) for score in below + above),
            literal=all(right(listing, score) for score in above),
        ),
        {
            "largest score without overflow in the listing": low,
            "logarithm of float32's largest number": math.log(torch.finfo(torch.float32).max),
            "attend is right at 10,000": right(ours, 1e4),
        },
        tables=(
            Table(
                "weight of a key with this score beside one of 0, in float32",
                ("score", "listing", "minus the maximum first"),
                tuple(
                    (score, _shown(listing(score)), _shown(ours(score))) for score in below + above
                ),
            ),
        ),
        conclusion="Right for the exercise's scores, and in float32 up to a score of "
        f"{figure(low)}; beyond it an exponential is infinite and the quotient NaN. With the row's "
        "maximum subtracted first, which changes nothing else, the weight at 10,000 is "
        f"{_shown(ours(1e4))}.",
    )


def four_words() -> Finding:
    words = FOUR_WORDS
    by_listing, scores_gap = [], []
    for draw in range(50):
        w_q, w_k, w_v = (normal(3 * draw + n, 3, 2) for n in range(3))
        query, key, value = words @ w_q, words @ w_k, words @ w_v
        first = [float(query[0] @ k) / math.sqrt(2) for k in key]
        exponentials = [math.exp(score) for score in first]
        shares = [e / math.fsum(exponentials) for e in exponentials]
        listing = sum((a * v for a, v in zip(shares, value)), torch.zeros(2).double())
        by_listing.append(apart(attend(query, key, value)[0], listing))
        scores = DotScore()(query, key)
        scores_gap.append(apart(scores[:, 2], scores[:, 0] + scores[:, 1]))
    return Finding(
        holds(max(*by_listing, *scores_gap) < SAME),
        {
            "largest difference of the first output, 50 draws": max(by_listing),
            "largest |s₁₃ - s₁₁ - s₁₂| of 50 draws": max(scores_gap),
        },
        tables=(
            Table(
                "scores of the last draw, unscaled",
                ("", "k₁", "k₂", "k₃", "k₄"),
                tuple((f"q{n + 1}", *scores[n].tolist()) for n in range(4)),
            ),
        ),
        conclusion="For 50 draws of the matrices, the listing's first output and attend() differ "
        f"by {figure(max(by_listing))} at most. Whatever the draw, s₁₃ = s₁₁ + s₁₂ ("
        f"{within(max(scores_gap))}), since projections and scores are linear and the third word "
        "is the sum of the first two: a check that needs no random numbers.",
    )


def softmax_of_a_matrix() -> Finding:
    query, key = (FOUR_WORDS @ normal(n, 3, 2) for n in range(2))
    scores = DotScore()(query, key) / math.sqrt(2)
    shares = attention_weights(query, key)

    def listing(x: Tensor) -> Tensor:
        """Exponentials over the sum of everything."""
        return x.exp() / x.exp().sum()

    row, whole = apart(listing(scores[0]), shares[0]), listing(scores)
    sums = whole.sum(-1)
    return Finding(
        more_exactly(meant=row < SAME, literal=apart(whole, shares) < SAME),
        {
            "one row of scores: difference from the weights": row,
            "all rows at once: difference from the weights": apart(whole, shares),
            "all rows at once: sums of the rows": sums.tolist(),
        },
        conclusion="For one row of scores, as in the listing, it gives the weights (difference "
        f"{figure(row)}). Given the 4×4 matrix of all scores it divides by the sum of everything, "
        f"and the rows add up to {figure(sums.tolist(), 3)} instead of 1: the sum has to be taken "
        "along the last axis.",
    )


def by_hand(query: Tensor, key: Tensor, value: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """Weights and output, one query after the other, in Python floats."""
    shares, outputs = [], []
    for q in query.tolist():
        scores = [beta * math.fsum(a * b for a, b in zip(q, k)) for k in key.tolist()]
        exponentials = [math.exp(score - max(scores)) for score in scores]
        total = math.fsum(exponentials)
        share = [e / total for e in exponentials]
        shares.append(share)
        outputs.append(
            [math.fsum(a * v for a, v in zip(share, column)) for column in zip(*value.tolist())]
        )
    return torch.tensor(shares, dtype=torch.float64), torch.tensor(outputs, dtype=torch.float64)


def _one_query() -> tuple[Tensor, Tensor]:
    """Exercise 1: a decoder's state, and three states of an encoder that are keys and values."""
    states = torch.tensor([[1, 2, 3], [1, 2, 1], [0, 1, -1]], dtype=torch.float64)
    return torch.tensor([[1, 2, 1]], dtype=torch.float64), states


def _shown(number: float) -> str:
    return f"{number:.6f}"


EXPERIMENTS: tuple[Experiment, ...] = (
    Experiment(
        1,
        "exercise-1",
        Place("exercises", "1"),
        "The dot products of s = (1, 2, 1) with three vectors, a softmax of them and the weighted "
        "sum of the vectors: the weights are about 0.88, 0.12 and 0.00, the context about (1.00, "
        "2.00, 2.76).",
        "Weights and context come from weights() and attend() at β = 1, with the vectors as keys "
        "and as values, and again from exponentials one by one; both are compared with the "
        "printed numbers.",
        exercise_1,
        (r"c = \sum_j \frac{e^{s \cdot h_j}}{\sum_k e^{s \cdot h_k}} h_j",),
    ),
    Experiment(
        2,
        "exercise-1-in-torch",
        Place("exercises", "1"),
        "A few lines of torch compute exercise 1: dot products of whole numbers, exponentials "
        "divided by their sum, three weighted vectors.",
        "The same operations are executed on the same types of numbers, and the result is "
        "compared with attend() at β = 1.",
        exercise_1_in_torch,
    ),
    Experiment(
        4,
        "softmax-along-rows",
        Place("exercises", "2(a)"),
        "The softmax runs along the rows, because the weights are to be normalised for each query.",
        "The weights of exercise 3 are added up along rows, and down columns.",
        softmax_along_rows,
        (r"\sum_j A_{ij} = 1",),
    ),
    Experiment(
        8,
        "exercise-3",
        Place("exercises", "3"),
        "For given Q (2×2), K (3×2) and V (3×3) the output, rounded to two decimals, is (0.86, "
        "1.58, -0.72) and (0.99, 1.88, -1.56).",
        "weights() and attend() compute it, and so do loops over plain numbers; the output is "
        "compared with the printed one.",
        exercise_3,
        (r"C = \operatorname{softmax}\!\left(\frac{Q K^\top}{\sqrt{2}}\right) V",),
    ),
    Experiment(
        8,
        "exercise-3-slips",
        Place("exercises", "3"),
        "Two likely mistakes in exercise 3, forgetting the scale and taking the softmax down the "
        "columns, give answers that look plausible and are wrong.",
        "The right answer and both mistakes are computed with weights() and attend(), and their "
        "first rows compared.",
        exercise_3_slips,
        kind="added",
    ),
    Experiment(
        9,
        "listing-is-the-library",
        Place("exercises", "3"),
        "A listing with plain exponentials solves exercise 3, and torch has a function for the "
        "same.",
        "The listing's formula, F.scaled_dot_product_attention and attend() are given the "
        "matrices of exercise 3, and random ones, in float64.",
        listing_is_the_library,
    ),
    Experiment(
        9,
        "overflow",
        Place("exercises", "3"),
        "The listing's softmax takes the exponentials of the scores as they are, and divides them "
        "by the sum of their row.",
        "In float32, one key has a growing score and another the score 0. Bisection finds the "
        "largest score for which plain exponentials give a finite result.",
        overflow,
        (
            r"\frac{e^{s_i}}{\sum_j e^{s_j}} = \frac{e^{s_i - m}}{\sum_j e^{s_j - m}}, \quad "
            r"m = \max_j s_j",
        ),
    ),
    Experiment(
        89,
        "four-words",
        Place("handout", "Numpy example"),
        "Four words, of which the third is the sum of the first two, are projected by random 3×2 "
        "matrices; the scores of the first query over √2, their softmax and the weighted values "
        "give the first output.",
        "For 50 draws of the matrices, the listing's steps are executed number by number and "
        "compared with attend(). The score of the third word is compared with the sum of those of "
        "the first and the second.",
        four_words,
        (r"s_{13} = s_{11} + s_{12}",),
    ),
    Experiment(
        89,
        "softmax-of-a-matrix",
        Place("handout", "Numpy example"),
        "The listing's softmax divides the exponentials of an array by the sum of the whole "
        "array; it is called with the scores of one query.",
        "That function is given one row of scores, and the matrix of all four rows; both are "
        "compared with weights().",
        softmax_of_a_matrix,
        (r"\operatorname{softmax}(S)_{ij} = \frac{e^{S_{ij}}}{\sum_k e^{S_{ik}}}",),
    ),
)
