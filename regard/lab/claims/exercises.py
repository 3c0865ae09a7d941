"""Worked exercises: attention by hand, and common mistakes.

    C = softmax(Q Kᵀ / √d) V

Every number comes from `attend` or `weights`, and again from plain arithmetic written out here.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from regard import attend, weights
from regard.attention.score import Dot
from regard.lab.byhand import exercise
from regard.lab.claims.sample import SAME, apart, normal
from regard.lab.experiment import Experiment, Finding, Table, conditional, holds
from regard.lab.place import Place


def exercise_1() -> Finding:
    query, states = _one_query()
    shares, context = weights(query, states, beta=1.0), attend(query, states, states, beta=1.0)
    by_arithmetic, mean = by_hand(query, states, states, 1.0)
    scores = Dot()(query, states)
    scaled = weights(query, states)
    names = ("h₁", "h₂", "h₃")
    return Finding(
        holds(
            scores.tolist() == [[8, 6, 1]]
            and apart(shares, by_arithmetic) < SAME
            and apart(context, mean) < SAME
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
    )


def exercise_1_in_torch() -> Finding:
    query, states = _one_query()
    listing = torch.softmax(states @ query[0], 0) @ states
    context = attend(query, states, states, beta=1.0)[0]
    return Finding(
        holds(apart(listing, context) < SAME),
        {
            "listing": listing.tolist(),
            "attend": context.tolist(),
            "difference": apart(listing, context),
        },
    )


def softmax_along_rows() -> Finding:
    shares = weights(*exercise()[:2])
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
    )


def exercise_3() -> Finding:
    query, key, value = exercise()
    shares, output = weights(query, key), attend(query, key, value)
    by_arithmetic, mean = by_hand(query, key, value, 1 / math.sqrt(2))
    return Finding(
        holds(apart(shares, by_arithmetic) < SAME and apart(output, mean) < SAME),
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
    )


def exercise_3_slips() -> Finding:
    query, key, value = exercise()
    right, unscaled = attend(query, key, value), attend(query, key, value, beta=1.0)
    # A softmax down the columns is one over the queries: keys and queries change places.
    columns = weights(key, query).T
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
                    ("right", *right[0].tolist(), float(weights(query, key)[0].sum())),
                    (
                        "not scaled",
                        *unscaled[0].tolist(),
                        float(weights(query, key, beta=1.0)[0].sum()),
                    ),
                    ("softmax down the columns", *down[0].tolist(), float(columns[0].sum())),
                ),
            ),
        ),
    )


def listing_is_the_library() -> Finding:
    query, key = normal(0, 2, 5, 7, 11), normal(1, 2, 5, 13, 11)
    value = normal(2, 2, 5, 13, 3)
    exponentials = torch.exp(query @ key.mT / math.sqrt(11))
    listing = exponentials / exponentials.sum(-1, keepdim=True) @ value
    peer, ours = F.scaled_dot_product_attention(query, key, value), attend(query, key, value)
    return Finding(
        holds(max(apart(listing, peer), apart(ours, peer)) < SAME),
        {
            "listing and torch's own": apart(listing, peer),
            "attend and torch's own": apart(ours, peer),
        },
    )


def overflow() -> Finding:
    def listing(score: float) -> float:
        exponentials = torch.exp(torch.tensor([score, 0.0]))
        return float((exponentials / exponentials.sum())[0])

    def ours(score: float) -> float:
        return float(weights(torch.tensor([[score]]), torch.tensor([[1.0], [0.0]]), beta=1.0)[0, 0])

    low, high = 0.0, 200.0
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (middle, high) if math.isfinite(listing(middle)) else (low, middle)
    below, above = (1.0, 20.0, 80.0, 88.7), (88.8, 100.0, 1e4)

    def right(function: Callable[[float], float], score: float) -> bool:
        return abs(function(score) - 1 / (1 + math.exp(-score))) < 1e-6

    return Finding(
        conditional(
            all(right(listing, score) for score in below)
            and all(right(ours, score) for score in below + above),
            all(right(listing, score) for score in above),
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
    )


def four_words() -> Finding:
    words = torch.tensor([[1, 0, 0], [0, 1, 0], [1, 1, 0], [0, 0, 1]], dtype=torch.float64)
    scores_gap, weights_gap = [], []
    for w_q, w_k in zip(normal(0, 50, 3, 2), normal(1, 50, 3, 2)):
        query, key = words @ w_q, words @ w_k
        scores, shares = Dot()(query, key), weights(query, key, beta=1.0)
        scores_gap.append(apart(scores[:, 2], scores[:, 0] + scores[:, 1]))
        # As e^{s₁₃} = e^{s₁₁} e^{s₁₂}, dividing each by the sum of its row leaves that sum.
        rows = shares.new_tensor([math.fsum(math.exp(q @ k) for k in key) for q in query])
        quotient = shares[:, 2] / (shares[:, 0] * shares[:, 1])
        weights_gap.append(float((quotient / rows - 1).abs().max()))
    return Finding(
        holds(max(scores_gap) < SAME and max(weights_gap) < SAME),
        {
            "largest |s₁₃ - s₁₁ - s₁₂| of 50 draws": max(scores_gap),
            "largest relative error of a₁₃ / (a₁₁ a₁₂) = Σ exp(s₁ⱼ)": max(weights_gap),
        },
        tables=(
            Table(
                "scores of the last draw",
                ("", "k₁", "k₂", "k₃", "k₄"),
                tuple((f"q{n + 1}", *scores[n].tolist()) for n in range(4)),
            ),
        ),
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
        "The state (1, 2, 1) looks at three others; their scores are 8, 6 and 1, and the context "
        "is the mean of the three states, weighted by a softmax of the scores.",
        "The weights and the context come from weights() and attend() at β = 1, with the states as "
        "keys and as values, and again from exponentials written out one by one.",
        "It is. Most of the attention falls on the first state, so the context is close to it; "
        "scaled by 1/√3, as in a Transformer, the weights would be less sharp.",
        exercise_1,
        (r"c = \sum_j \frac{e^{s \cdot h_j}}{\sum_k e^{s \cdot h_k}} h_j",),
    ),
    Experiment(
        2,
        "exercise-1-in-torch",
        Place("exercises", "1"),
        "A few lines of torch compute exercise 1.",
        "softmax(H s) H, written with torch's own functions, is compared with attend() at β = 1.",
        "They do, up to rounding.",
        exercise_1_in_torch,
    ),
    Experiment(
        4,
        "softmax-along-rows",
        Place("exercises", "2(a)"),
        "The softmax is taken along the rows.",
        "The weights of exercise 3 are added up along rows, and down columns.",
        "Each row sums to 1, because a query shares out all of its attention. A column sums to "
        "what a key happens to receive, which may be anything from 0 to n_q.",
        softmax_along_rows,
        (r"\sum_j A_{ij} = 1",),
    ),
    Experiment(
        8,
        "exercise-3",
        Place("exercises", "3"),
        "Two queries, three keys and three values of given numbers are worked through to the end.",
        "weights() and attend() compute it, and so do loops over plain numbers.",
        "The first query spreads its attention. The second puts nearly all of it on the first "
        "key, so its output is nearly the first value.",
        exercise_3,
        (r"C = \operatorname{softmax}\!\left(\frac{Q K^\top}{\sqrt{2}}\right) V",),
    ),
    Experiment(
        8,
        "exercise-3-slips",
        Place("exercises", "3"),
        "Forgetting the scale, or taking the softmax down the columns, gives another answer to "
        "exercise 3.",
        "The right answer and both mistakes are computed with weights() and attend(), and their "
        "first rows compared.",
        "It does, and all three answers look plausible, since they have the same shape. Without "
        "the scale the weights are too sharp; down the columns a query's weights don't add up to "
        "1.",
        exercise_3_slips,
        kind="added",
    ),
    Experiment(
        9,
        "listing-is-the-library",
        Place("exercises", "3"),
        "The listing, with its plain exponentials, does what torch's own attention function does.",
        "The listing, F.scaled_dot_product_attention and attend() are given the same random "
        "queries, keys and values in float64.",
        "All three agree up to rounding, as long as the scores are moderate.",
        listing_is_the_library,
    ),
    Experiment(
        9,
        "overflow",
        Place("exercises", "3"),
        "A softmax is the exponentials of the scores divided by their sum.",
        "In float32, one key has a growing score and another the score 0. Bisection finds the "
        "largest score for which plain exponentials give a finite result.",
        "In float32 that works only while no exponential overflows; beyond it the quotient is "
        "NaN. Subtracting the row's maximum from all scores first changes nothing, and then no "
        "exponential exceeds 1.",
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
        "Four words attend to each other through random 3×2 matrices; the third word is the sum "
        "of the first two, and so are its scores.",
        "For 50 draws of the matrices, the score of the third word is compared with the sum of "
        "those of the first and the second, and a consequence for the weights is checked.",
        "Whatever the matrices are, projections and scores are linear, so s₁₃ = s₁₁ + s₁₂. An "
        "answer can be checked by it without knowing the random numbers.",
        four_words,
        (r"s_{13} = s_{11} + s_{12}, \quad \frac{a_{13}}{a_{11} a_{12}} = \sum_j e^{s_{1j}}",),
    ),
)
