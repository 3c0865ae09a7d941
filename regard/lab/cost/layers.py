"""Layers that mix the positions of a sequence: their cost by formula, and counted.

n positions of width d; a convolution's kernel size k; h heads; a window of w positions each side.

    attention        4nd² + 2n²d        projections, and two products over all pairs
    convolution      knd²               depthwise knd
    recurrence       8nd², 6nd², 2nd²   LSTM, GRU and Elman, one step after another
    dense            n²d²               one weight for each pair of numbers

Vaswani et al. (2017), table 1, with constant factors and projections.
"""

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from regard.attention.attend import attend
from regard.attention.checks import check_divides, check_integer
from regard.attention.mask import window
from regard.attention.multihead import MultiHeadAttention
from regard.lab.cost.count import Counts, counted, saved_tensors, without_memory
from regard.lab.cost.path import longest_path
from regard.model.baseline import Convolution, Dense, Recurrent


@dataclass(frozen=True)
class Sizes:
    """The sizes of one layer and its input."""

    length: int = 512
    """n, the number of positions."""
    width: int = 512
    """d, the width of each position."""
    kernel: int = 3
    """k, the kernel size of a convolution."""
    heads: int = 8
    """h, the number of attention heads."""
    window: int = 64
    """w, positions that windowed attention sees on each side."""
    batch: int = 1

    def __post_init__(self) -> None:
        for name in ("length", "width", "kernel", "heads", "window", "batch"):
            check_integer(name, getattr(self, name))
        check_divides("heads", self.heads, "width", self.width)


@dataclass(frozen=True)
class Cost:
    """A layer's cost by formula."""

    parameters: int
    multiply_adds: int
    additions: int | None
    steps: int
    """Sequential steps: products of which each needs the result of the one before."""
    path: int | None
    """The fewest products between the first position and the last; steps, where it is recurrent.
    None where no number of layers connects them."""
    cache: int
    """Numbers in the cache (KV cache, recurrent state) when positions come one by one."""


@dataclass(frozen=True)
class Measured:
    """What was counted while the layer ran."""

    parameters: int
    multiply_adds: int
    additions: int
    others: int
    steps: int
    path: int | None
    """None where no number of layers connects the ends, or the sequence is too long to follow."""
    activations: int
    """Numbers saved for the backward pass."""


class Layer(NamedTuple):
    name: str
    parameters: str
    """The formula, as are the following."""
    multiply_adds: str
    steps: str
    path: str
    cost: Callable[[Sizes], Cost]
    make: Callable[[Sizes], nn.Module]
    real: bool = False
    """Whether it runs on real tensors. A window's blocks depend on values, and recurrence on fake
    tensors is slower than on real ones."""


class Attention(nn.Module):
    """Attention without projections: every row is query, key and value."""

    def __init__(self, heads: int):
        super().__init__()
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        split = x.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        return attend(split, split, split).transpose(1, 2).flatten(2)


class Windowed(Attention):
    """The same in a window: pairs outside it are not computed."""

    def __init__(self, heads: int, around: int):
        super().__init__(heads)
        self.around = around

    def forward(self, x: Tensor) -> Tensor:
        split = x.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        out = attend(split, split, split, mask=window(self.around), backend="packed")
        return out.transpose(1, 2).flatten(2)


class Plain(nn.Module):
    """h_n = tanh(W x_n + U h_{n-1} + b): recurrence without gates (Elman 1990)."""

    def __init__(self, width: int, hidden: int | None = None, bias: bool = True):
        super().__init__()
        self.forwards = nn.RNN(width, hidden or width, bias=bias, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.forwards(x)[0]


# The formulas


def _products(pairs: int, s: Sizes) -> Counts:
    """Two products and a softmax over this many pairs of positions, in all heads."""
    n, d, h = s.batch * s.length, s.width, s.heads
    scores = pairs * (d - h)
    softmax = h * (pairs - n)
    return Counts(2 * pairs * d, scores + softmax + d * (pairs - n))


def _attention_alone(s: Sizes) -> Cost:
    products = _products(s.batch * s.length**2, s)
    cache = 2 * s.length * s.width
    return Cost(0, products.multiply_adds, products.additions, 2, 1, cache)


def _attention(s: Sizes) -> Cost:
    n, d = s.batch * s.length, s.width
    alone = _attention_alone(s)
    projections = 4 * n * d * d
    assert alone.additions is not None
    return Cost(
        4 * d * d + 4 * d,
        projections + alone.multiply_adds,
        projections + alone.additions,
        4,
        3,
        alone.cache,
    )


def pairs_in_window(length: int, around: int) -> int:
    """Pairs of positions that are at most `around` apart."""
    w = min(around, length - 1)
    return length * (2 * w + 1) - w * (w + 1)


def _windowed(s: Sizes) -> Cost:
    products = _products(s.batch * pairs_in_window(s.length, s.window), s)
    layers = max(1, math.ceil((s.length - 1) / s.window))
    cache = 2 * min(s.length, s.window + 1) * s.width
    return Cost(0, products.multiply_adds, products.additions, 2, layers, cache)


def _convolution(s: Sizes, groups: int) -> Cost:
    n, d, k = s.batch * s.length, s.width, s.kernel
    weights = k * d * d // groups
    near = (k - 1) // 2
    path = 1 if s.length == 1 else math.ceil((s.length - 1) / near) if near else None
    cache = min(s.length, k - 1) * d
    return Cost(weights + d, n * weights, n * weights, 1, path, cache)


def _recurrent(s: Sizes, gates: int, elementwise: int, states: int) -> Cost:
    """`elementwise` additions for each number of the state, beside those of the products."""
    n, d = s.batch * s.length, s.width
    weights = 2 * gates * d * d
    return Cost(
        weights + 2 * gates * d,
        n * weights,
        n * weights + n * elementwise * d,
        s.length,
        s.length,
        states * d,
    )


def _dense(s: Sizes) -> Cost:
    whole_width = s.length * s.width
    square = whole_width**2
    products = s.batch * square
    return Cost(square + whole_width, products, products, 1, 1, whole_width)


LAYERS: tuple[Layer, ...] = (
    Layer("attention, with projections", "4d² + 4d", "4nd² + 2n²d", "4", "3",
          _attention, lambda s: MultiHeadAttention(s.width, s.heads)),
    Layer("attention alone", "0", "2n²d", "2", "1",
          _attention_alone, lambda s: Attention(s.heads)),
    Layer("attention in a window", "0", "2(n(2w+1) − w(w+1))d", "2", "⌈(n−1)/w⌉",
          _windowed, lambda s: Windowed(s.heads, s.window), real=True),
    Layer("convolution", "kd² + d", "knd²", "1", "⌈(n−1)/⌊(k−1)/2⌋⌉",
          lambda s: _convolution(s, 1), lambda s: Convolution(s.width, s.kernel)),
    Layer("depthwise convolution", "kd + d", "knd", "1", "⌈(n−1)/⌊(k−1)/2⌋⌉",
          lambda s: _convolution(s, s.width),
          lambda s: Convolution(s.width, s.kernel, groups=s.width)),
    Layer("plain recurrence", "2d² + 2d", "2nd²", "n", "n",
          lambda s: _recurrent(s, 1, 1, 1), lambda s: Plain(s.width), real=True),
    Layer("GRU", "6d² + 6d", "6nd²", "n", "n",
          lambda s: _recurrent(s, 3, 5, 1), lambda s: Recurrent(s.width, "gru"), real=True),
    Layer("LSTM", "8d² + 8d", "8nd²", "n", "n",
          lambda s: _recurrent(s, 4, 5, 2), lambda s: Recurrent(s.width), real=True),
    Layer("dense over all positions", "n²d² + nd", "n²d²", "1", "1",
          _dense, lambda s: Dense(s.width, s.length)),
)  # fmt: skip


def layer(name: str) -> Layer:
    """The layer of this name."""
    named = [each for each in LAYERS if each.name == name]
    if not named:
        known = ", ".join(each.name for each in LAYERS)
        raise ValueError(f"layer ({name!r}) is unknown; choose from {known}")
    return named[0]


# The counts

LITTLE, MUCH = 10**7, 3 * 10**9
"""Multiply-adds up to which a layer runs on real tensors, and up to which those do that must.
All others run on fake tensors, which take no time but to start."""

FARTHEST = 2048
"""Positions up to which the longest path is measured."""


def measure(layer: Layer, sizes: Sizes) -> Measured | None:
    """Runs the layer forward and counts; None where that would take long."""
    work = layer.cost(sizes).multiply_adds
    real = layer.real or work <= LITTLE
    if real and work > MUCH:
        return None
    # In float64 recurrence runs step by step; in float32 one fused operator hides the steps.
    with nullcontext() if real else without_memory():
        module = layer.make(sizes)
        if real:
            module = module.double()
        dtype = torch.float64 if real else torch.float32
        shape = sizes.batch, sizes.length, sizes.width
        x = torch.zeros(shape, dtype=dtype, requires_grad=True)
        with saved_tensors(module) as saved:
            counter = counted(lambda: module(x))
    far = sizes.length > FARTHEST
    return Measured(
        sum(parameter.numel() for parameter in module.parameters()),
        counter.total.multiply_adds,
        counter.total.additions,
        counter.total.others,
        counter.chain,
        None if far else measured_path(layer, sizes),
        saved.numbers,
    )


def measured_path(layer: Layer, sizes: Sizes) -> int | None:
    """Products between the first position and the last; the width makes no difference."""
    narrow = Sizes(sizes.length, 2, sizes.kernel, 1, sizes.window)
    return longest_path(layer.make(narrow), sizes.length, 2)
