"""The handout's two tables: what four kinds of layers cost, and how many parameters they have."""

import math
from collections.abc import Callable

from torch import Tensor, nn

from regard import attend
from regard.lab.answers.answer import Answer, Demonstration, Mistake, Point, Step
from regard.lab.claims.costs import multiply_adds
from regard.lab.claims.sample import alive, normal, parameters
from regard.lab.cost.layers import pairs_in_window
from regard.lab.experiment import Table
from regard.lab.place import Place


class SelfAttention(nn.Module):
    """The handout's layer: three projections and no W_O."""

    def __init__(self, d: int, d_k: int, d_v: int):
        super().__init__()
        self.query, self.key, self.value = (
            nn.Linear(d, width, bias=False) for width in (d_k, d_k, d_v)
        )

    def forward(self, x: Tensor) -> Tensor:
        return attend(self.query(x), self.key(x), self.value(x), backend="formula")


KERNEL = 3
Make = Callable[[int, int, int, int], nn.Module]
LAYERS: dict[str, Make] = {
    "self-attention": lambda L, d, d_k, d_v: SelfAttention(d, d_k, d_v),
    "RNN": lambda L, d, d_k, d_v: nn.RNN(d, d_v, bias=False),
    "convolution": lambda L, d, d_k, d_v: nn.Conv1d(d, d_v, KERNEL, padding=1, bias=False),
    "dense": lambda L, d, d_k, d_v: nn.Linear(L * d, L * d_v, bias=False),
}
"""Each for L positions of width d, and outputs of width d_v."""


def _multiply_adds(name: str, L: int, d: int, d_k: int, d_v: int) -> int:
    module = alive(LAYERS[name](L, d, d_k, d_v), 0)
    x = normal(1, L, d)
    if name == "convolution":
        return multiply_adds(lambda: module(x.T[None]))
    return multiply_adds(lambda: module(x.flatten() if name == "dense" else x))


def _formulas(L: int, d: int, d_k: int, d_v: int) -> dict[str, tuple[str, int]]:
    return {
        "self-attention": (
            "L²(d_k + d_v) + L·d·(2d_k + d_v)",
            L * L * (d_k + d_v) + L * d * (2 * d_k + d_v),
        ),
        "RNN": ("L·d·d_v + L·d_v²", L * d * d_v + L * d_v * d_v),
        "convolution": ("L·k·d·d_v", L * KERNEL * d * d_v),
        "dense": ("L²·d·d_v", L * L * d * d_v),
    }


SIZES = (16, 24, 3, 8)
"""L, d, d_k = d/8 and d_v."""


def _costs() -> Demonstration:
    rows = []
    for name, (formula, number) in _formulas(*SIZES).items():
        counted = _multiply_adds(name, *SIZES)
        rows.append((name, formula, number, counted, _growth(name, 4, 8), _growth(name, 64, 128)))
    return Demonstration(
        all(row[2] == row[3] for row in rows)
        and abs(_growth("self-attention", 2048, 4096, SIZES[1:]) - 2) < 0.1,
        {"pairs within a window of 2 to each side, 16 positions": pairs_in_window(16, 2)},
        (
            Table(
                "L = 16, d = 24, d_k = 3, d_v = 8, k = 3: multiply-adds; growth as L doubles",
                ("layer", "formula", "by the formula", "counted", "L: 4 to 8", "L: 64 to 128"),
                tuple(rows),
            ),
        ),
    )


def _growth(name: str, short: int, long: int, rest: tuple[int, ...] = SIZES[1:]) -> float:
    """The exponent of L: 1 for linear growth, 2 for quadratic."""
    d, d_k, d_v = rest
    small, large = (_formulas(L, d, d_k, d_v)[name][1] for L in (short, long))
    return math.log2(large / small)


def _only_the_scores() -> Demonstration:
    L, d, d_k, d_v = SIZES
    counted = _multiply_adds("self-attention", *SIZES)
    return Demonstration(
        counted == L * L * d_k,
        {
            "L²·d_k": L * L * d_k,
            "the values, L²·d_v": L * L * d_v,
            "the projections, L·d·(2d_k + d_v)": L * d * (2 * d_k + d_v),
            "counted": counted,
        },
    )


def _stateless() -> Demonstration:
    counts = [_multiply_adds("RNN", 16, 8, 1, d_v) for d_v in (8, 16, 32)]
    linear = [16 * 8 * d_v for d_v in (8, 16, 32)]
    return Demonstration(
        counts == linear,
        {"L·d·d_v for d_v = 8, 16 and 32": linear, "counted, with the state's matrix": counts},
    )


def _parameters(name: str, L: int, d: int, d_k: int, d_v: int) -> int:
    return parameters(LAYERS[name](L, d, d_k, d_v))


def _parameter_table() -> Demonstration:
    L, d, d_k, d_v = 16, 24, 3, 24
    formulas = {
        "self-attention": ("2·d·d_k + d·d_v", 2 * d * d_k + d * d_v),
        "convolution": ("k·d·d_v", KERNEL * d * d_v),
        "RNN": ("d·d_v + d_v²", d * d_v + d_v**2),
        "dense": ("L²·d·d_v", L * L * d * d_v),
    }
    rows = [
        (name, formula, number, _parameters(name, L, d, d_k, d_v))
        for name, (formula, number) in formulas.items()
    ]
    return Demonstration(
        all(row[2] == row[3] for row in rows) and rows[0][3] < rows[1][3],
        tables=(
            Table(
                "L = 16, d = d_v = 24, d_k = d/8 = 3, k = 3",
                ("layer", "formula", "by the formula", "counted"),
                tuple(rows),
            ),
        ),
    )


def _dense_linear() -> Demonstration:
    d, d_v = 6, 4
    counts = [_parameters("dense", L, d, 1, d_v) for L in (4, 8)]
    return Demonstration(
        counts == [L * d * d_v for L in (4, 8)],
        {"L·d·d_v for L = 4 and 8": [L * d * d_v for L in (4, 8)], "counted": counts},
    )


def _always_fewer() -> Demonstration:
    d = 24
    attention = _parameters("self-attention", 16, d, d, d)
    kernels = [parameters(nn.Conv1d(d, d, k, bias=False)) for k in (1, 3, 5)]
    return Demonstration(
        all(attention < convolution for convolution in kernels),
        {
            "self-attention with d_k = d_v = d": attention,
            "convolutions of kernel 1, 3 and 5": kernels,
            "self-attention with d_k = d/8": _parameters("self-attention", 16, d, d // 8, d),
        },
    )


ANSWERS: tuple[Answer, ...] = (
    Answer(
        Place("handout", "cost table"),
        question="What do self-attention, recurrence, convolution and a dense layer cost, for "
        "length $L$, inputs of width $d$ and outputs of width $d_v$?",
        answer="Self-attention with three projections costs $L^2(d_k + d_v) + L d (2 d_k + d_v)$: "
        "quadratic in $L$ once $L$ is large, linear while the projections dominate. Recurrence "
        "costs $L d d_v + L d_v^2$, a convolution $L k d d_v$, a dense layer $L^2 d d_v$. A small "
        "$d_k$, such as $d/8$, makes the scores cheap but not the values; a local window makes "
        "the pairs linear in $L$.",
        derivation=(
            Step(
                "Projections, scores, means of the values.",
                r"L d (2 d_k + d_v) + L^2 d_k + L^2 d_v",
            ),
            Step(
                "Every recurrent step multiplies the input and the state.", r"L (d\, d_v + d_v^2)"
            ),
            Step(
                "Every output of a convolution reads $k$ positions, of a dense layer all $L$.",
                r"L \cdot k\, d\, d_v, \qquad L \cdot L\, d\, d_v",
            ),
        ),
        run=_costs,
        mistakes=(
            Mistake(
                "Self-attention costs $O(L^2 d_k)$.",
                "That is the scores alone. The values cost $L^2 d_v$, which is more wherever $d_k "
                "< d_v$, and the projections are left out.",
                _only_the_scores,
            ),
            Mistake(
                "Recurrence costs $O(L d d_v)$.",
                r"The state is multiplied too, by a matrix of $d_v \times d_v$.",
                _stateless,
            ),
        ),
        points=(
            Point(1, "self-attention, quadratic in $L$"),
            Point(1, "recurrence and convolution, linear"),
            Point(1, "dense layer, quadratic with $d d_v$"),
        ),
    ),
    Answer(
        Place("handout", "parameter table"),
        question="How many parameters do these layers have?",
        answer="Self-attention $2 d d_k + d d_v$, a convolution $k d d_v$, an RNN $d d_v + d_v^2$, "
        "a dense layer over all positions $L^2 d d_v$. Only the last depends on the length. "
        "Self-attention has fewer than a convolution of kernel 3 if $d_k$ is small, such as "
        "$d/8$; with $d_k = d_v = d$ it has as many.",
        derivation=(
            Step("Three matrices.", r"d\, d_k + d\, d_k + d\, d_v"),
            Step(r"A dense layer maps $L d$ numbers to $L d_v$.", r"(L d)(L d_v) = L^2 d\, d_v"),
            Step(
                "Beside a convolution, for $d_v = d$.",
                r"2 d\, d_k + d^2 < k d^2 \quad \iff \quad d_k < \frac{k - 1}{2}\, d",
            ),
        ),
        run=_parameter_table,
        mistakes=(
            Mistake(
                r"A dense layer has $L d d_v$ parameters.",
                "One factor $L$ is missing: it has outputs for all $L$ positions.",
                _dense_linear,
            ),
            Mistake(
                "Self-attention has fewer parameters than even a convolution, in any case.",
                "That depends on $d_k$ and on the kernel.",
                _always_fewer,
            ),
        ),
        points=(Point(1, "three matrices, whatever $L$ is"), Point(1, "the dense layer's $L^2$")),
    ),
)
