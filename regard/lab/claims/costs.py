"""The cost of layers: multiplications counted while they run, beside what is taught."""

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

from regard import MultiHeadAttention
from regard.lab.claims.sample import alive, normal, parameters
from regard.lab.cost.count import counted
from regard.lab.cost.layers import Measured, Sizes, layer, measure
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
from regard.lab.place import Place
from regard.model.baseline import Convolution, Dense, Recurrent

N, D, K = 11, 14, 3
"""Positions, width and kernel size, no two the same."""
SMALL = Sizes(N, D, K, 7)


def cost(name: str, sizes: Sizes) -> Measured:
    """The cost of one of the library's layers, counted while it runs."""
    measured = measure(layer(name), sizes)
    assert measured is not None
    return measured


def multiply_adds(run: Callable[[], object]) -> int:
    """Multiply-adds, counted while it runs."""
    with torch.no_grad():
        return counted(run).total.multiply_adds


def growth(count: Callable[[Sizes], int], sizes: Sizes = SMALL) -> tuple[float, float]:
    """The exponents of n and of d: log₂ of the growth when either doubles."""
    at = count(sizes)
    longer = count(replace(sizes, length=2 * sizes.length))
    wider = count(replace(sizes, width=2 * sizes.width))
    return math.log2(longer / at), math.log2(wider / at)


def _numbers() -> Finding:
    x = normal(0, 1, N, D)
    layers: dict[str, nn.Module] = {
        "attention": MultiHeadAttention(D, 7),
        "convolution": Convolution(D, K),
        "LSTM": Recurrent(D),
        "dense layer": Dense(D, N),
    }
    shapes = {name: alive(made, 1)(x).shape for name, made in layers.items()}
    return Finding(
        holds(all(shape == x.shape for shape in shapes.values())),
        {"numbers in": x.numel()}
        | {f"numbers out, {name}": shape.numel() for name, shape in shapes.items()},
    )


def _dense() -> Finding:
    of_parameters = growth(
        lambda s: parameters(Dense(s.width, s.length).dense) - s.length * s.width
    )
    of_cost = growth(lambda s: cost("dense over all positions", s).multiply_adds)
    return Finding(
        holds(of_parameters == of_cost == (2.0, 2.0)),
        {
            "power of N in the parameters": of_parameters[0],
            "power of D in the parameters": of_parameters[1],
            "power of N in the multiply-adds": of_cost[0],
            "power of D in the multiply-adds": of_cost[1],
        },
    )


def _following() -> Finding:
    def linear(s: Sizes) -> int:
        x = torch.zeros(s.length, s.width)
        return multiply_adds(lambda: nn.Linear(s.width, s.width)(x))

    power = growth(linear)
    weights = nn.Linear(D, D).weight.numel()
    return Finding(
        holds(power == (1.0, 2.0) and weights == D * D),
        {
            "power of N in the multiply-adds": power[0],
            "power of D in the multiply-adds": power[1],
            "weights": weights,
            "D²": D * D,
        },
    )


def _per_layer() -> Finding:
    n, d, k = N, D, K
    says = {
        "convolution": ("k n d", k * n * d),
        "depthwise convolution": ("k n d", k * n * d),
        "plain recurrence": ("n d²", n * d * d),
        "attention, with projections": ("n² d", n * n * d),
    }
    is_so = {
        "convolution": ("k n d²", k * n * d * d),
        "depthwise convolution": ("k n d", k * n * d),
        "plain recurrence": ("2 n d²", 2 * n * d * d),
        "attention, with projections": ("4 n d² + 2 n² d", 4 * n * d * d + 2 * n * n * d),
    }
    counts = {name: cost(name, SMALL).multiply_adds for name in says}
    rows = tuple((name, *says[name], *is_so[name], counts[name]) for name in says)
    head = ("layer", "taught", "gives", "complete", "gives", "counted")
    return Finding(
        corrected(
            taught=counts["convolution"] == says["convolution"][1],
            correct=all(counts[name] == is_so[name][1] for name in says),
        ),
        {
            "convolution, counted": counts["convolution"],
            "k n d": k * n * d,
            "k n d²": k * n * d * d,
            "depthwise convolution, counted": counts["depthwise convolution"],
        },
        (Table(f"Multiply-adds at n = {n}, d = {d}, k = {k}", head, rows),),
    )


def _costlier(one: list[int], other: list[int]) -> int | None:
    """The first length, counted from 1, at which `one` costs more than the other."""
    return next((n for n, (a, b) in enumerate(zip(one, other), 1) if a > b), None)


def _multiplied(name: str, sizes: Sizes) -> int:
    made = layer(name).make(sizes).double()
    x = torch.zeros(1, sizes.length, sizes.width, dtype=torch.float64)
    return multiply_adds(lambda: made(x))


def _crossover() -> Finding:
    d = 2
    recurrences = ("plain recurrence", "GRU", "LSTM")
    names = ("attention alone", "attention, with projections", *recurrences)
    lengths = range(1, 4 * d + 2)
    counts = {name: [_multiplied(name, Sizes(n, d, heads=1)) for n in lengths] for name in names}
    alone = {name: _costlier(counts[names[0]], counts[name]) for name in recurrences}
    whole = {name: _costlier(counts[names[1]], counts[name]) for name in recurrences}
    rows = tuple(
        (name, _equal(alone[name], 4 * d + 1, d), _equal(whole[name], 4 * d + 1, d))
        for name in recurrences
    )
    # Dearer from d + 1 on means equal at d.
    return Finding(
        conditional(
            inside=alone["plain recurrence"] == d + 1,
            outside=whole["plain recurrence"] == d + 1,
        ),
        {
            "width d": d,
            "attention's products cost as much as plain recurrence at n =": rows[0][1],
            "with projections, as much as plain recurrence at n =": rows[0][2],
            "with projections, as much as a GRU at n =": rows[1][2],
            "with projections, as much as an LSTM at n =": rows[2][2],
        },
        (
            Table(
                f"Length at which attention costs as much, at d = {d}",
                ("as", "products alone", "with projections"),
                rows,
            ),
        ),
        (_scaling(64),),
    )


def _cost_table() -> Finding:
    length, d = N, 16
    narrow, d_v = d // 8, 6
    head = MultiHeadAttention(d, 1, key_width=narrow, value_width=narrow, bias=False)
    x = torch.zeros(1, length, d)
    attention = multiply_adds(lambda: head(x))
    products = 2 * length * length * narrow
    projections = 4 * length * d * narrow
    recurrent = nn.RNN(d, d_v, batch_first=True).double()
    recurrence = multiply_adds(lambda: recurrent(x.double()))
    half = length * d * d_v
    rows = (
        ("attention, d_k = d_v = d/8", products, products + projections, attention),
        ("recurrence", half, half + length * d_v * d_v, recurrence),
    )
    names = ("layer", "taught", "complete", "counted")
    return Finding(
        corrected(
            taught=attention == products and recurrence == half,
            correct=attention == products + projections and recurrence == half + length * d_v * d_v,
        ),
        {
            "attention, left out: projections": attention - products,
            "recurrence, left out: L d_v²": recurrence - half,
        },
        (Table(f"Multiply-adds at L = {length}, d = {d}, d_v = {d_v}", names, rows),),
    )


def _equal(first: int | None, most: int, d: int) -> str:
    if first is None:
        return f"above {most}"
    return "costs more at any n" if first == 1 else f"{first - 1} = {(first - 1) / d:g} d"


def _scaling(width: int) -> Plot:
    lengths = [2**e for e in range(2, 11)]
    names = ("attention, with projections", "attention alone", "plain recurrence", "LSTM")
    curves = tuple(
        Curve(name, lengths, [layer(name).cost(Sizes(n, width)).multiply_adds for n in lengths])
        for name in names
    )
    return Plot(f"Multiply-adds at d = {width}", "positions n", "multiply-adds", curves, True, True)


EXPERIMENTS: tuple[Experiment, ...] = (
    Experiment(
        10,
        "numbers-in-out",
        Place("slides", "dense layer"),
        "A layer takes N tokens of width D and gives N tokens of width D: N·D numbers each way.",
        "One sequence goes through attention, a convolution, an LSTM and a dense layer.",
        _numbers,
        correct="So it is, for each of them.",
    ),
    Experiment(
        11,
        "dense-parameters",
        Place("slides", "dense layer"),
        "One dense layer over all tokens has O(N²D²) parameters and costs as much.",
        "The length and the width are doubled, and weights and executed multiply-adds are "
        "counted. The exponents are the base-2 logarithms of the growth.",
        _dense,
        (r"N^2 D^2",),
        correct="Exactly N²D² of each: both exponents are 2.",
    ),
    Experiment(
        14,
        "following-layer",
        Place("slides", "shared weights"),
        "The layer from D to D that follows has O(D²) parameters and costs O(ND²).",
        "A linear layer runs on N tokens, at twice the length and at twice the width.",
        _following,
        correct="So it is: the same D² weights for every token, ND² multiply-adds.",
    ),
    Experiment(
        33,
        "layer-costs",
        Place("sheet", "6-2(d)"),
        "For each layer a convolution costs k·n·d, recurrence n·d² and self-attention n²·d.",
        "Each layer of the library is run on the same input, and the multiplications that are "
        "executed are counted, in fused kernels as well.",
        _per_layer,
        (r"k n d^2", r"2 n d^2", r"4 n d^2 + 2 n^2 d"),
        correct="k·n·d is a depthwise convolution; a full one costs k·n·d². Plain recurrence has two "
        "products, 2n·d², and attention has its projections, 4n·d² + 2n²·d.",
    ),
    Experiment(
        56,
        "crossover",
        Place("homework", "1.4(b)"),
        "Self-attention is faster than recurrence where the sequence is shorter than the width.",
        "Multiply-adds are counted at every length up to four times the width, for attention "
        "with and without its projections and for three kinds of recurrence.",
        _crossover,
        (r"2 n^2 d = 2 n d^2 \Leftrightarrow n = d",),
        correct="The products alone break even with plain recurrence at n = d. With its projections "
        "attention always costs more than plain recurrence; it breaks even with a GRU at n = d "
        "and with an LSTM at n = 2d.",
    ),
    Experiment(
        90,
        "cost-table",
        Place("handout", "cost table"),
        "Attention costs what its two products cost, and recurrence L·d·d_v.",
        "A head of width d/8 and a plain recurrence are run, and their multiplications counted.",
        _cost_table,
        correct="Attention's projections cost another 4L·d·d_k, and recurrence another L·d_v², for its "
        "state.",
    ),
)
