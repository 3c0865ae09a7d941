"""The number of operations of attention, executed one by one and counted."""

import math
from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from regard import attend
from regard.lab.byhand import exercise
from regard.lab.claims.formula import SIZES, inputs
from regard.lab.claims.sample import SAME, apart
from regard.lab.experiment import Curve, Experiment, Finding, Plot, Table, holds, more_exactly
from regard.lab.numbers import figure
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
        conclusion=f"Executed one by one, exercise 3 takes {count['mul']} multiplications, "
        f"{count['div']} divisions and {count['add']} additions. These counts, and those of "
        f"{len(SIZES)} other sizes, are {'what' if agree else 'not what'} the formulas give. "
        f"Exponentials, which the exercise leaves out of account, are {count['exp']}, one for each "
        "pair.",
    )


def operation_total() -> Finding:
    gaps: list[float] = []

    def executed(n_q: int, n_k: int, d_k: int, d_v: int) -> int:
        some = inputs(n_q, n_k, d_k, d_v)
        output, count = _counted(*some)
        gaps.append(apart(output, attend(*some)))
        return sum(count[kind] for kind in KINDS)

    def grows(count: Callable[[int, int, int, int], int]) -> dict[str, float]:
        """By which factor a count grows where one size doubles, or both widths do."""
        start = count(16, 16, 8, 8)
        return {
            "n_q": count(32, 16, 8, 8) / start,
            "n_k": count(16, 32, 8, 8) / start,
            "d_k": count(16, 16, 16, 8) / start,
            "d_v": count(16, 16, 8, 16) / start,
            "d_k and d_v": count(16, 16, 16, 16) / start,
        }

    twice = grows(executed)
    single = {name: grows(step) for name, step in _STEPS.items()}
    like_total = [
        name for name, by in single.items() if all(abs(by[s] - twice[s]) < 0.1 for s in twice)
    ]
    lengths = (2, 4, 8, 16, 32)
    totals = [executed(n, n, 8, 8) for n in lengths]
    order = [2 * n * n * (8 + 8) for n in lengths]
    exact = all(total == n * (2 * n * (8 + 8 + 1) - 8 - 1) for n, total in zip(lengths, totals))
    linear = all(abs(twice[size] - 2) < 0.1 for size in ("n_q", "n_k", "d_k and d_v"))
    return Finding(
        more_exactly(
            meant=exact and linear and max(gaps) < SAME,
            literal=bool(like_total),
        ),
        {
            "executed at n = 32, d = 8": totals[-1],
            "over twice queries × keys × both widths": totals[-1] / order[-1],
            "single steps that grow as the total does": len(like_total),
        },
        tables=(
            Table(
                "how a count grows where one size doubles",
                ("doubled", "total", *single),
                tuple((size, twice[size], *(by[size] for by in single.values())) for size in twice),
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
                ),
                log_x=True,
                log_y=True,
            ),
        ),
        conclusion="The counts add up to n_q (2 n_k (d_k + d_v + 1) - d_v - 1), which is O(n_q "
        f"n_k (d_k + d_v)): twice as many queries take {figure(twice['n_q'], 3)} times as much, "
        f"twice as many keys {figure(twice['n_k'], 3)}, twice both widths "
        f"{figure(twice['d_k and d_v'], 3)}. Of the single steps {len(like_total)} grow like that, "
        "so the sum has to be named.",
    )


_STEPS: dict[str, Callable[[int, int, int, int], int]] = {
    "scores": lambda n_q, n_k, d_k, d_v: n_q * n_k * (2 * d_k - 1),
    "scale": lambda n_q, n_k, d_k, d_v: n_q * n_k,
    "softmax": lambda n_q, n_k, d_k, d_v: n_q * (2 * n_k - 1),
    "values": lambda n_q, n_k, d_k, d_v: n_q * d_v * (2 * n_k - 1),
}
"""The operations of each step by the exercise's formulas."""


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
        "Without exponentials and with plain matrix products: n_q n_k d_k multiplications and n_q "
        "n_k (d_k - 1) additions for the scores, n_q n_k divisions by √d_k, n_q n_k divisions and "
        "n_q (n_k - 1) additions for the softmax, n_q d_v n_k and n_q d_v (n_k - 1) for the "
        "values.",
        "Attention is executed number by number, with a count of what was done, and the counts "
        "are compared with the formulas. The result is compared with attend().",
        operation_counts,
        (
            r"n_q n_k d_k + n_q d_v n_k \text{ multiplications}, \quad 2 n_q n_k \text{ divisions}",
            r"n_q n_k (d_k - 1) + n_q (n_k - 1) + n_q d_v (n_k - 1) \text{ additions}",
        ),
    ),
    Experiment(
        6,
        "operation-total",
        Place("exercises", "2(c)"),
        "To the question for the complexity, the counts of the single steps are given, but no sum "
        "and no order.",
        "All operations executed are added up, for growing lengths and while each size is doubled "
        "in turn; the single steps are compared with the total.",
        operation_total,
        (r"n_q \bigl(2 n_k (d_k + d_v + 1) - d_v - 1\bigr) = O\bigl(n_q n_k (d_k + d_v)\bigr)",),
    ),
)
