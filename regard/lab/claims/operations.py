"""The number of operations of attention, executed one by one and counted."""

import math
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from regard import attend
from regard.lab.byhand import exercise
from regard.lab.claims.formula import SIZES, inputs
from regard.lab.claims.sample import SAME, apart
from regard.lab.experiment import Curve, Experiment, Finding, Plot, Table, holds
from regard.lab.place import Place

KINDS = ("mul", "div", "add")


def operation_counts() -> Finding:
    query, key, value = exercise()
    output, count = _counted(query, key, value)
    agree = apart(output, attend(query, key, value)) < SAME
    rows = []
    for sizes in SIZES:
        some = inputs(*sizes)
        result, executed = _counted(*some)
        agree = agree and apart(result, attend(*some)) < SAME
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
        some = inputs(n_q, n_k, d_k, d_v)
        output, count = _counted(*some)
        gaps.append(apart(output, attend(*some)))
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
        holds(exact and linear and max(gaps) < SAME),
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


def _counted(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Counter[str]]:
    """softmax(Q Kᵀ / √d) V number by number, and the count of each operation."""
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
    """A sum of products, with one addition fewer than multiplications."""
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


def _curve(name: str, lengths: Sequence[int], counts: Sequence[int]) -> Curve:
    return Curve(name, [float(n) for n in lengths], [float(n) for n in counts])


EXPERIMENTS: tuple[Experiment, ...] = (
    Experiment(
        6,
        "operation-counts",
        Place("exercises", "2(c)"),
        "Each step's multiplications, divisions and additions are given by a formula.",
        "Attention is executed number by number, with a count of what was done, and the counts are "
        "compared with the formulas. The result is compared with attend().",
        operation_counts,
        (
            r"n_q n_k d_k + n_q d_v n_k \text{ multiplications}, \quad 2 n_q n_k \text{ divisions}",
            r"n_q n_k (d_k - 1) + n_q (n_k - 1) + n_q d_v (n_k - 1) \text{ additions}",
        ),
        correct="The formulas are right. They leave out one exponential for each pair of a query and a "
        "key.",
    ),
    Experiment(
        6,
        "operation-total",
        Place("exercises", "2(c)"),
        "The counts of the single steps add up to what attention costs.",
        "All operations executed are added up, for growing lengths and while each size is doubled "
        "in turn.",
        operation_total,
        (r"n_q \bigl(2 n_k (d_k + d_v + 1) - d_v - 1\bigr) = O\bigl(n_q n_k (d_k + d_v)\bigr)",),
        correct="The total is n_q (2 n_k (d_k + d_v + 1) - d_v - 1), or O(n_q n_k (d_k + d_v)): twice as "
        "many queries, or keys, or twice the widths, take about twice as much.",
    ),
)
