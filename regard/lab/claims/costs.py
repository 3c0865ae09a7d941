"""The cost of layers: multiplications counted while they run, beside what is taught."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import nn

from regard import MultiHeadAttention
from regard.lab.claims.sample import alive, normal, parameters
from regard.lab.cost.count import counted
from regard.lab.cost.documents import Entry, count, entries
from regard.lab.cost.layers import Measured, Sizes, layer, measure
from regard.lab.cost.orders import Widths
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
from regard.lab.numbers import figure
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
        conclusion=f"{x.numel()} numbers go in, and "
        f"{' and '.join(map(str, sorted({shape.numel() for shape in shapes.values()})))} come out "
        "of attention, a convolution, an LSTM and a dense layer alike.",
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
        conclusion="Doubling N multiplies the parameters by 2 to the power "
        f"{figure(of_parameters[0])}, doubling D by 2 to the power {figure(of_parameters[1])}; the "
        f"multiply-adds by {figure(of_cost[0])} and {figure(of_cost[1])}. There are N²D² of each.",
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
        conclusion=f"The layer has {weights} weights at D = {D}, D² = {D * D}, the same for every "
        f"token; its multiply-adds grow with N to the power {figure(power[0])} and with D to the "
        f"power {figure(power[1])}.",
    )


def _per_layer() -> Finding:
    convolution, depthwise, recurrence, attention = entries(Place("sheet", "6-2(d)"))
    counts, exact = compared(entries(Place("sheet", "6-2(d)")), Widths(N, D, D, D, K))
    return Finding(
        corrected(
            taught=convolution.whole,
            correct=exact and depthwise.whole and recurrence.whole,
        ),
        {
            "convolution: left out of O(k n d)": convolution.left_out,
            "recurrence: left out of O(n d²)": recurrence.left_out,
            "attention: left out of O(n² d)": attention.left_out,
            "complete formulas equal what is counted": exact,
        },
        (counts,),
        conclusion=f"A full convolution takes {convolution.exact}, one factor d more than "
        f"{convolution.order}, which is a depthwise one. Recurrence is right as an order "
        f"({recurrence.exact} for a plain one). For attention {attention.order} covers its two "
        f"products, as in the paper's table; the projections add {attention.left_out}. The "
        f"formulas {'are' if exact else 'are not'} what is counted while the layers run.",
    )


def compared(some: Sequence[Entry], *shapes: Widths) -> tuple[Table, bool]:
    """A document's entries, their orders beside complete formulas, and whether counts agree."""
    exact = all(count(entry, s) == entry.complete.at(s) for entry in some for s in shapes)
    first = shapes[0]
    rows = tuple(
        (
            entry.layer,
            entry.order,
            entry.left_out,
            entry.exact,
            entry.complete.at(first),
            count(entry, first) or "",
        )
        for entry in some
    )
    at = ", ".join(f"{name} = {size}" for name, size in first._asdict().items())
    head = ("layer", "order taught", "it leaves out", "complete", "at these sizes", "counted")
    return Table(f"{some[0].what}: {at}".capitalize(), head, rows), exact


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
    width, timed_at = 64, (16, 64, 256, 1024)
    times = {
        name: [_milliseconds(name, Sizes(n, width, heads=1)) for n in timed_at]
        for name in names[1:]
    }
    faster = [sum(a < b for a, b in zip(times[names[1]], times[name])) for name in recurrences]
    # More from d + 1 on means equal at d.
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
            "timed at d": width,
            "timed at n": timed_at,
            **{f"{name}, milliseconds": values for name, values in times.items()},
        },
        (
            Table(
                f"Length at which attention takes as many multiply-adds, at d = {d}",
                ("as", "products alone", "with projections"),
                rows,
            ),
            Table(
                f"Milliseconds on this machine, one thread, d = {width}",
                ("n", *times),
                tuple((n, *(each[i] for each in times.values())) for i, n in enumerate(timed_at)),
            ),
        ),
        (_scaling(64),),
        conclusion="Counted, attention's products take as much as plain recurrence at "
        f"{rows[0][1]}; with its projections attention {rows[0][2]} than plain recurrence, and "
        f"takes as much as a GRU at {rows[1][2]} and as an LSTM at {rows[2][2]}. Timed at d = "
        f"{width} and n = {figure(timed_at)}, on one thread of this machine, the layer with "
        f"projections is faster than plain recurrence at {faster[0]} of {len(timed_at)} lengths, "
        f"than a GRU at {faster[1]} and than an LSTM at {faster[2]}.",
    )


def _milliseconds(name: str, sizes: Sizes) -> float:
    """The time of one forward pass, the least of five."""
    made, x = layer(name).make(sizes), torch.zeros(1, sizes.length, sizes.width)
    taken = []
    with torch.no_grad():
        for _ in range(6):
            start = time.perf_counter()
            made(x)
            taken.append(time.perf_counter() - start)
    return 1000 * min(taken[1:])


def _cost_table() -> Finding:
    some = entries(Place("handout", "cost table"))
    attention, recurrence, convolution, dense = some
    counts, exact = compared(some, Widths(N, 16, 2, 6, K), Widths(5, 8, 3, 7, 5))
    whole = [entry.layer for entry in some if entry.whole]
    in_length = sum(entry.complete.power("n") == entry.taught.power("n") for entry in some)
    return Finding(
        corrected(
            taught=all(entry.whole for entry in some),
            correct=exact and convolution.whole and dense.whole,
        ),
        {f"left out of {entry.order}, {entry.layer}": entry.left_out for entry in some}
        | {"complete formulas equal what is counted": exact},
        (counts,),
        conclusion=f"{len(whole)} of {len(some)} orders are complete: {' and '.join(whole)}. "
        "Attention leaves out its three projections and the product with the values, "
        f"{attention.left_out}; recurrence leaves out {recurrence.left_out}, for its state. As the "
        f"length alone grows, {in_length} of {len(some)} are right. The complete formulas "
        f"{'are' if exact else 'are not'} what is counted.",
    )


def _equal(first: int | None, most: int, d: int) -> str:
    if first is None:
        return f"above {most}"
    times = (first - 1) / d
    return "costs more at any n" if first == 1 else f"n = {'' if times == 1 else f'{times:g}'}d"


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
        "An attention layer takes N tokens and gives N tokens, each of D dimensions: N·D numbers "
        "each way.",
        "One sequence goes through attention, a convolution, an LSTM and a dense layer.",
        _numbers,
    ),
    Experiment(
        11,
        "dense-parameters",
        Place("slides", "dense layer"),
        "A single fully-connected layer over all of it would have O(N²D²) independent parameters, "
        "and cost O(N²D²).",
        "The length and the width are doubled, and weights and executed multiply-adds are "
        "counted. The exponents are the base-2 logarithms of the growth.",
        _dense,
        (r"N^2 D^2",),
    ),
    Experiment(
        14,
        "following-layer",
        Place("slides", "shared weights"),
        "The layer that follows, with D inputs and D outputs, has O(D²) parameters and costs "
        "O(ND²).",
        "A linear layer runs on N tokens, at twice the length and at twice the width.",
        _following,
    ),
    Experiment(
        33,
        "layer-costs",
        Place("sheet", "6-2(d)"),
        "In orders, with kernel size k, length n and dimension d: convolutional O(k·n·d), "
        "recurrent O(n·d²), attention O(n²·d).",
        "Each order is compared with the complete formula of its layer, term by term; the "
        "formulas are compared with the multiplications that are executed when the layers run.",
        _per_layer,
        (r"k n d^2", r"2 n d^2", r"3 n d^2 + 2 n^2 d"),
    ),
    Experiment(
        56,
        "crossover",
        Place("homework", "1.4(b)"),
        "Self-attention layers are faster than recurrent layers in most cases, namely when the "
        "sequence length n is smaller than the dimensionality d.",
        "Multiply-adds are counted at every length up to four times the width, for attention with "
        "and without its projections and for three kinds of recurrence. Then the layers are "
        "timed, below n = d and above it.",
        _crossover,
        (r"2 n^2 d = 2 n d^2 \Leftrightarrow n = d",),
    ),
    Experiment(
        90,
        "cost-table",
        Place("handout", "cost table"),
        "In orders, with L positions: self-attention O(L²·d_k), recurrent O(L·d·d_v), convolution "
        "O(L·k·d·d_v), dense O(L²·d·d_v); typically d_k is much smaller than d.",
        "Each of the four orders is compared with the complete formula of its layer, term by "
        "term: attention with three projections and no W_O, a plain recurrence. The formulas are "
        "compared with counts at two sizes.",
        _cost_table,
        equations=(r"L d (2 d_k + d_v) + L^2 (d_k + d_v)", r"L d d_v + L d_v^2"),
    ),
)
