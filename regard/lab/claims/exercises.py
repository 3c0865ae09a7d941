"""Worked exercises: attention by hand, its shapes, and how many operations it takes.

    C = softmax(Q Kᵀ / √d) V

Every number comes from `attend` or `weights`, and again from plain arithmetic written out here.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from regard import MultiHeadAttention, attend, weights
from regard.attention.score import Dot
from regard.lab.byhand import exercise
from regard.lab.claims.sample import alive, apart, normal
from regard.lab.experiment import (
    Curve,
    Experiment,
    Finding,
    Plot,
    Table,
    conditional,
    corrected,
    holds,
)

ROUNDING = 1e-12
"""What float64 may lose on the way, and much less than any mistake would make."""


def exercise_1() -> Finding:
    query, states = _one_query()
    shares, context = weights(query, states, beta=1.0), attend(query, states, states, beta=1.0)
    by_hand, mean = _by_hand(query, states, states, 1.0)
    scores = Dot()(query, states)
    scaled = weights(query, states)
    names = ("h₁", "h₂", "h₃")
    return Finding(
        holds(
            scores.tolist() == [[8, 6, 1]]
            and apart(shares, by_hand) < ROUNDING
            and apart(context, mean) < ROUNDING
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
        holds(apart(listing, context) < ROUNDING),
        {
            "listing": listing.tolist(),
            "attend": context.tolist(),
            "difference": apart(listing, context),
        },
    )


def attention_formula() -> Finding:
    rows, worst, fits = [], 0.0, True
    for n_q, n_k, d_k, d_v in SIZES:
        query, key, value = _given(n_q, n_k, d_k, d_v)
        output = attend(query, key, value)
        gap = apart(output, _by_hand(query, key, value, 1 / math.sqrt(d_k))[1])
        worst, fits = max(worst, gap), fits and output.shape == (n_q, d_v)
        rows.append((_by(n_q, d_k), _by(n_k, d_k), _by(n_k, d_v), _by(*output.shape), gap))
    return Finding(
        holds(fits and worst < ROUNDING),
        {"largest difference from arithmetic": worst, "shapes fit": fits},
        tables=(Table("matrices of random numbers", ("Q", "K", "V", "C", "difference"), (*rows,)),),
    )


def output_shape() -> Finding:
    rows, taught, correct = [], True, True
    for n_q, n_k, d_k, d_v in SIZES:
        query, key, value = _given(n_q, n_k, d_k, d_v)
        A, C = weights(query, key), attend(query, key, value)
        taught &= C.shape == (n_q, n_k)
        correct &= A.shape == (n_q, n_k) and C.shape == (n_q, d_v)
        rows.append((n_q, n_k, d_v, _by(*A.shape), _by(*C.shape)))
    return Finding(
        corrected(taught, correct),
        {
            "output has a column for each key": taught,
            "weights have one, the output those of the values": correct,
        },
        tables=(
            Table("shapes measured", ("n_q", "n_k", "d_v", "weights A", "output C"), (*rows,)),
        ),
    )


def softmax_along_rows() -> Finding:
    shares = weights(*exercise()[:2])
    rows, columns = shares.sum(1), shares.sum(0)
    return Finding(
        holds(apart(rows, torch.ones(2)) < ROUNDING and apart(columns, torch.ones(3)) > 0.1),
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


def operation_counts() -> Finding:
    query, key, value = exercise()
    output, count = _counted(query, key, value)
    agree = apart(output, attend(query, key, value)) < ROUNDING
    rows = []
    for sizes in SIZES:
        given = _given(*sizes)
        result, executed = _counted(*given)
        agree = agree and apart(result, attend(*given)) < ROUNDING
        agree = agree and all(executed[kind] == n for kind, n in _listed(*sizes).items())
        rows.append((*sizes, *(executed[kind] for kind in KINDS), sum(_listed(*sizes).values())))
    three = {kind: count[kind] for kind in KINDS}
    return Finding(
        holds(agree and three == _listed(2, 3, 2, 3)),
        {**three, "exp": count["exp"]},
        tables=(
            Table(
                "operations executed, and their sum by the formulas",
                ("n_q", "n_k", "d_k", "d_v", *KINDS, "mul + div + add by formula"),
                (*rows,),
            ),
        ),
    )


def operation_total() -> Finding:
    gaps: list[float] = []

    def executed(n_q: int, n_k: int, d_k: int, d_v: int) -> int:
        given = _given(n_q, n_k, d_k, d_v)
        output, count = _counted(*given)
        gaps.append(apart(output, attend(*given)))
        return sum(count[kind] for kind in KINDS)

    lengths = (2, 4, 8, 16, 32)
    totals = [executed(n, n, 8, 8) for n in lengths]
    order = [2 * n * n * (8 + 8) for n in lengths]
    start = executed(16, 16, 8, 8)
    twice = {
        "n_q": executed(32, 16, 8, 8) / start,
        "n_k": executed(16, 32, 8, 8) / start,
        "d_k": executed(16, 16, 16, 8) / start,
        "d_v": executed(16, 16, 8, 16) / start,
        "d_k and d_v": executed(16, 16, 16, 16) / start,
    }
    first = [n * n * 8 + n * n * 7 for n in lengths]
    exact = all(total == n * (2 * n * (8 + 8 + 1) - 8 - 1) for n, total in zip(lengths, totals))
    linear = all(abs(twice[size] - 2) < 0.1 for size in ("n_q", "n_k", "d_k and d_v"))
    return Finding(
        holds(exact and linear and max(gaps) < ROUNDING),
        {
            "executed at n = 32, d = 8": totals[-1],
            "over twice queries × keys × both widths": totals[-1] / order[-1],
            "the product Q Kᵀ alone": first[-1],
        },
        tables=(
            Table(
                "how the total grows where one size doubles",
                ("doubled", "total grows by"),
                tuple(twice.items()),
            ),
        ),
        plots=(
            Plot(
                "operations of n queries over n keys, width 8",
                "n",
                "operations",
                (
                    _curve("executed", lengths, totals),
                    _curve("2 n_q n_k (d_k + d_v)", lengths, order),
                    _curve("Q Kᵀ alone", lengths, first),
                ),
                log_x=True,
                log_y=True,
            ),
        ),
    )


def exercise_3() -> Finding:
    query, key, value = exercise()
    shares, output = weights(query, key), attend(query, key, value)
    by_hand, mean = _by_hand(query, key, value, 1 / math.sqrt(2))
    return Finding(
        holds(apart(shares, by_hand) < ROUNDING and apart(output, mean) < ROUNDING),
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
    natural = _by_hand(query, key, value, 1 / math.sqrt(2))[1]
    least = min(apart(right, unscaled), apart(right, down), apart(unscaled, down))
    return Finding(
        holds(
            apart(right, natural) < ROUNDING
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
        holds(max(apart(listing, peer), apart(ours, peer)) < ROUNDING),
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
            "largest score that the listing bears": low,
            "logarithm of float32's largest number": math.log(torch.finfo(torch.float32).max),
            "attend is right at 10,000": right(ours, 1e4),
        },
        tables=(
            Table(
                "weight of a key with this score beside one of 0, in float32",
                ("score", "listing", "less the maximum first"),
                tuple(
                    (score, _shown(listing(score)), _shown(ours(score))) for score in below + above
                ),
            ),
        ),
    )


def weights_are_shares() -> Finding:
    query, key = normal(0, 1, 3), normal(1, 4, 3)
    scores = [float(query[0] @ k) / math.sqrt(3) for k in key]
    exponentials = [math.exp(s) for s in scores]
    shares = weights(query, key)
    recipe = shares.new_tensor([[e / math.fsum(exponentials) for e in exponentials]])
    many = weights(30 * normal(2, 101, 17, 5), normal(3, 101, 13, 5))
    error = apart(many.sum(-1), torch.ones(101, 17))
    inside = float(many.min()) >= 0 and float(many.max()) <= 1
    return Finding(
        holds(apart(shares, recipe) < ROUNDING and error < ROUNDING and inside),
        {
            "furthest sum from 1": error,
            "least weight": float(many.min()),
            "largest weight": float(many.max()),
        },
        tables=(
            Table(
                "one query over four keys: score, exponential, share",
                ("key", "score", "exponential", "weight"),
                tuple(
                    (f"k{n + 1}", scores[n], exponentials[n], float(shares[0, n])) for n in range(4)
                ),
            ),
        ),
    )


def shapes() -> Finding:
    rows, fits = [], True
    for L_q, L_k, d_q, d_v in ((1, 4, 3, 3), (5, 5, 2, 7), (11, 3, 7, 2), (3, 11, 2, 5)):
        query, key, value = _given(L_q, L_k, d_q, d_v)
        output = attend(query, key, value)
        fits &= output.shape == (L_q, d_v) and weights(query, key).shape == (L_q, L_k)
        # One output for each query, whatever the others ask.
        alone = torch.cat([attend(row[None], key, value) for row in query])
        fits &= apart(output, alone) < ROUNDING
        rows.append((_by(L_q, d_q), _by(L_k, d_q), _by(L_k, d_v), _by(*output.shape)))
    return Finding(
        holds(fits),
        {"shapes fit, and each query is answered alone": fits},
        tables=(Table("shapes tried", ("queries", "keys", "values", "output"), (*rows,)),),
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
        holds(max(scores_gap) < ROUNDING and max(weights_gap) < ROUNDING),
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


def audio_and_text() -> Finding:
    text, audio = normal(0, 1, 7, 12), normal(1, 1, 31, 20)
    layer = alive(MultiHeadAttention(12, 3, source_width=20), 2)
    order = torch.randperm(31, generator=torch.Generator().manual_seed(92))
    read = layer(text, audio)
    moved = apart(layer(text, audio[:, order]), read)
    cut = apart(layer(text, audio[:, :-1]), read)
    return Finding(
        holds(read.shape == (1, 7, 12) and moved < ROUNDING and cut > 1e-3),
        {
            "words": 7,
            "frames": 31,
            "output": list(read.shape),
            "frames shuffled": moved,
            "last frame left out": cut,
        },
    )


SIZES = ((2, 3, 2, 3), (5, 7, 11, 13), (7, 5, 3, 2), (1, 1, 1, 1))
"""n_q, n_k, d_k and d_v that are tried."""

KINDS = ("mul", "div", "add")


def _counted(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Counter[str]]:
    """softmax(Q Kᵀ / √d) V number by number, and how often each operation was executed."""
    count: Counter[str] = Counter()
    root, columns = math.sqrt(key.shape[1]), value.T.tolist()
    outputs = []
    for q in query.tolist():
        exponentials = []
        for k in key.tolist():
            score = _dot(q, k, count) / root
            count["div"] += 1
            exponentials.append(math.exp(score))
            count["exp"] += 1
        total = exponentials[0]
        for exponential in exponentials[1:]:
            total += exponential
            count["add"] += 1
        shares = []
        for exponential in exponentials:
            shares.append(exponential / total)
            count["div"] += 1
        outputs.append([_dot(shares, column, count) for column in columns])
    return torch.tensor(outputs, dtype=torch.float64), count


def _dot(a: list[float], b: list[float], count: Counter[str]) -> float:
    """A sum of products, which takes one addition less than multiplications."""
    total = a[0] * b[0]
    count["mul"] += 1
    for x, y in zip(a[1:], b[1:]):
        product = x * y
        count["mul"] += 1
        total += product
        count["add"] += 1
    return total


def _listed(n_q: int, n_k: int, d_k: int, d_v: int) -> dict[str, int]:
    """The same counts by the formulas of the exercise."""
    return {
        "mul": n_q * n_k * d_k + n_q * d_v * n_k,
        "div": n_q * n_k + n_q * n_k,
        "add": n_q * n_k * (d_k - 1) + n_q * (n_k - 1) + n_q * d_v * (n_k - 1),
    }


def _by_hand(query: Tensor, key: Tensor, value: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """Weights and output, one query after the other, in plain numbers."""
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


def _given(n_q: int, n_k: int, d_k: int, d_v: int) -> tuple[Tensor, Tensor, Tensor]:
    """Random queries, keys and values."""
    return normal(0, n_q, d_k), normal(1, n_k, d_k), normal(2, n_k, d_v)


def _curve(name: str, lengths: Sequence[int], counts: Sequence[int]) -> Curve:
    return Curve(name, [float(n) for n in lengths], [float(n) for n in counts])


def _by(rows: int, columns: int) -> str:
    return f"{rows}×{columns}"


def _shown(number: float) -> str:
    return f"{number:.6f}"


EXPERIMENTS: tuple[Experiment, ...] = (
    Experiment(
        1,
        "exercise-1",
        "exercises",
        "The state (1, 2, 1) looks at three others; the scores are 8, 6 and 1, and the context is "
        "their mean by the weights of a softmax.",
        "The weights and the context come from weights() and attend() at β = 1, with the states as "
        "keys and as values, and again from exponentials written out one by one.",
        "Nearly nine tenths of the attention fall on the first state, so the context is close to "
        "it. Scaled by 1/√3, as Transformers do, the choice would be less decided.",
        exercise_1,
        (r"c = \sum_j \frac{e^{s \cdot h_j}}{\sum_k e^{s \cdot h_k}} h_j",),
    ),
    Experiment(
        2,
        "exercise-1-in-torch",
        "exercises",
        "A few lines of torch compute exercise 1.",
        "softmax(H s) H, written with torch's own functions, is compared with attend() at β = 1.",
        "They are the same up to rounding.",
        exercise_1_in_torch,
    ),
    Experiment(
        3,
        "attention-formula",
        "exercises",
        "For all queries at once, attention is a softmax of Q Kᵀ over √d, times V.",
        "attend() is compared with loops over plain numbers, for matrices of four different "
        "shapes.",
        "It is, where Q is n_q×d_k, K is n_k×d_k and V is n_k×d_v; attend() scales by 1/√d_k when "
        "nothing else is asked for.",
        attention_formula,
        (r"C = \operatorname{softmax}\!\left(\frac{Q K^\top}{\sqrt{d_k}}\right) V",),
    ),
    Experiment(
        4,
        "output-shape",
        "exercises",
        "The result of attention has one row for each query and one column for each key.",
        "The shapes of the weights and of the output are read off for four choices of n_q, n_k, "
        "d_k and d_v.",
        "That is the shape of the weights A. The output C = A V has a row for each query and as "
        "many columns as the values have, n_q×d_v.",
        output_shape,
        (r"A \in \mathbb{R}^{n_q \times n_k}, \quad C = A V \in \mathbb{R}^{n_q \times d_v}",),
    ),
    Experiment(
        4,
        "softmax-along-rows",
        "exercises",
        "The softmax is taken along the rows.",
        "The weights of exercise 3 are added up along rows, and down columns.",
        "Each row sums to 1, because a query shares out all of its attention. A column sums to "
        "what a key happens to receive, which may be anything from 0 to n_q.",
        softmax_along_rows,
        (r"\sum_j A_{ij} = 1",),
    ),
    Experiment(
        6,
        "operation-counts",
        "exercises",
        "Each step's multiplications, divisions and additions are given by a formula.",
        "Attention is executed number by number, with a count of what was done, and the counts are "
        "compared with the formulas. The result is compared with attend().",
        "The formulas are right; exercise 3 takes 30 multiplications, 12 divisions and 22 "
        "additions. They leave out n_q n_k exponentials.",
        operation_counts,
        (
            r"n_q n_k d_k + n_q d_v n_k \text{ multiplications}, \quad 2 n_q n_k \text{ divisions}",
            r"n_q n_k (d_k - 1) + n_q (n_k - 1) + n_q d_v (n_k - 1) \text{ additions}",
        ),
    ),
    Experiment(
        6,
        "operation-total",
        "exercises",
        "The counts of the single steps add up to what attention costs; the sum is left out.",
        "All operations executed are added up while each size is doubled in turn, and beside "
        "growing lengths.",
        "The total is n_q (2 n_k (d_k + d_v + 1) - d_v - 1), or O(n_q n_k (d_k + d_v)): twice as "
        "many queries, or keys, or twice the widths, take about twice as much.",
        operation_total,
        (r"n_q \bigl(2 n_k (d_k + d_v + 1) - d_v - 1\bigr) = O\bigl(n_q n_k (d_k + d_v)\bigr)",),
    ),
    Experiment(
        8,
        "exercise-3",
        "exercises",
        "Two queries, three keys and three values of given numbers are worked through to the end.",
        "weights() and attend() compute it, and so do loops over plain numbers.",
        "The first query spreads its attention, the second puts nearly all of it on the first key, "
        "and so its output is nearly the first value.",
        exercise_3,
        (r"C = \operatorname{softmax}\!\left(\frac{Q K^\top}{\sqrt{2}}\right) V",),
    ),
    Experiment(
        8,
        "exercise-3-slips",
        "exercises",
        "The answer to exercise 3 is told from those that one gets by forgetting the scale, or by "
        "taking the softmax down the columns.",
        "All three are computed with weights() and attend(), and their first rows compared.",
        "All three have the right shape and look plausible. Without the scale the weights are too "
        "sharp; down the columns a query's weights don't add up to 1.",
        exercise_3_slips,
    ),
    Experiment(
        9,
        "listing-is-the-library",
        "exercises",
        "The listing, with its plain exponentials, does what torch's own attention function does.",
        "The listing, F.scaled_dot_product_attention and attend() are given the same random "
        "queries, keys and values in float64.",
        "All three agree up to rounding, as long as the scores are moderate.",
        listing_is_the_library,
    ),
    Experiment(
        9,
        "overflow",
        "exercises",
        "A softmax is the exponentials of the scores divided by their sum.",
        "In float32, a key of a growing score stands beside one of score 0. The largest score with "
        "a finite answer is found by halving an interval, for exponentials taken as they are.",
        "In float32 that only works up to a score of about 88.7, whose exponential is the largest "
        "number there is; beyond it the quotient is NaN. Less the row's maximum, which changes "
        "nothing, no exponential exceeds 1.",
        overflow,
        (
            r"\frac{e^{s_i}}{\sum_j e^{s_j}} = \frac{e^{s_i - m}}{\sum_j e^{s_j - m}}, \quad "
            r"m = \max_j s_j",
        ),
    ),
    Experiment(
        84,
        "weights-are-shares",
        "handout",
        "Score, exponential, division by the sum: the weights lie between 0 and 1 and sum to 1.",
        "One query over four keys is taken through the three steps. Then 1,717 rows of weights "
        "with very unequal scores are added up.",
        "They do, however large the scores are.",
        weights_are_shares,
        (r"a_j = \frac{e^{s_j}}{\sum_k e^{s_k}} \in [0, 1], \quad \sum_j a_j = 1",),
    ),
    Experiment(
        85,
        "attention-shapes",
        "handout",
        "Queries and keys are equally wide, keys and values equally many, and queries may be of "
        "any number.",
        "attend() is given four such triples, and each query is also asked alone.",
        "The output has a row for each query and is as wide as the values. The queries don't see "
        "each other.",
        shapes,
        (r"(L_q \times d_q), \ (L_k \times d_q), \ (L_k \times d_v) \mapsto L_q \times d_v",),
    ),
    Experiment(
        89,
        "four-words",
        "handout",
        "Four words, of which the third is the sum of the first two, are mapped by random 3×2 "
        "matrices and attend to each other.",
        "For 50 draws of the matrices, the score of the third word is compared with the sum of "
        "those of the first and the second, and the weights are checked for what follows.",
        "Whatever the matrices are, projections and scores are linear, so s₁₃ = s₁₁ + s₁₂. An "
        "answer can be checked by it without knowing the random numbers.",
        four_words,
        (r"s_{13} = s_{11} + s_{12}, \quad \frac{a_{13}}{a_{11} a_{12}} = \sum_j e^{s_{1j}}",),
    ),
    Experiment(
        92,
        "audio-and-text",
        "handout",
        "Words may attend to the frames of a recording, of which there are more.",
        "Multi-head attention with 7 words and 31 wider frames; then with the frames shuffled, and "
        "with one left out.",
        "There is an output for each word, whatever the number of frames. Without positions the "
        "frames' order isn't seen, but which frames there are is.",
        audio_and_text,
    ),
)
