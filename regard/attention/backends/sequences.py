"""Attention within packed sequences on a CPU, by a C++ kernel of our own (`sequences.cpp`).

Sequences of text are short: what torch's kernel spends on each call, and what it costs to gather
tokens into rectangles and back, is then most of the time. This kernel reads each token where it
lies. It computes in float32, half precision too, as torch's does within.
"""

import ctypes
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from regard.attention.backends import Call
from regard.attention.mask import Mask
from regard.native.build import SHARED, Float, Int, Pointer, Source, fields
from regard.native.tensors import DTYPES, Tokens, dense, empty, serves

LANES = 16
"""Widths are multiples of it: those of the kernel's vectors."""
LONGEST = 1024
"""Tokens of a sequence at the most: long ones are for torch, whose kernel shares each of them out
among threads."""

FILE = Path(__file__).with_name("sequences.cpp")
HEADERS = (SHARED / "openmp.h", SHARED / "simd.h", SHARED / "tokens.h")


class Sequences(ctypes.Structure):
    """As in sequences.cpp, where the fields are explained."""

    _fields_ = fields(
        (Int, "count heads key_heads key_width value_width"),
        (Float, "beta"),
        (Pointer, "queries keys first last logsum"),
    )


def _declare(kernels: ctypes.CDLL) -> None:
    sequences, tokens = ctypes.POINTER(Sequences), ctypes.POINTER(Tokens)
    kernels.attend.argtypes = (sequences, *[tokens] * 4, ctypes.c_int)
    kernels.attend_backward.argtypes = (sequences, *[tokens] * 7, ctypes.c_int)


SOURCE = Source(FILE, HEADERS, "attention", _declare)


class Layout(NamedTuple):
    """Which keys each query sees, as the kernel reads it."""

    queries: Tensor
    keys: Tensor
    first: Tensor
    last: Tensor


def takes(query: Tensor, value: Tensor, mask: Mask, dropout: float) -> bool:
    """Whether the kernel computes this; the mask gives every query one range of keys."""
    packing = mask.packing
    return (
        packing is not None
        and query.shape[0] == 1
        and query.dtype in DTYPES
        and dropout == 0
        and query.shape[3] % LANES == value.shape[3] % LANES == 0
        and max(packing.query.longest, packing.source.longest) <= LONGEST
        and serves(SOURCE, query)
    )


def packed(call: Call) -> Tensor:
    query, key, value, mask, beta, bias, dropout = call
    assert mask is not None
    layout = _layout(mask, query.shape[2], key.shape[2])
    wide = (tensor.float() for tensor in (query, key, value))
    out: Tensor = _Attention.apply(*wide, layout, beta)  # type: ignore[no-untyped-call]
    return out.to(query.dtype)


def _layout(mask: Mask, L: int, S: int) -> Layout:
    packing = mask.packing
    assert packing is not None

    def build() -> Layout:
        edges = mask.intervals(L, S, "cpu")
        assert edges is not None
        first, last = (edge[0].int().contiguous() for edge in edges)
        return Layout(packing.query.offsets.cpu(), packing.source.offsets.cpu(), first, last)

    return mask.cached("sequences", (L, S), build)


class _Attention(torch.autograd.Function):
    """The kernel's two halves."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, layout: Layout, beta: float
    ) -> Tensor:
        query, key, value = map(dense, (query, key, value))
        out, logsum = empty(query, value.shape[3]), query.new_empty(query.shape[1:3])
        sequences = _sequences(query, key, value, layout, beta, logsum)
        tokens = map(Tokens.of, (query, key, value, out))
        SOURCE.loaded().attend(sequences, *tokens, torch.get_num_threads())
        ctx.save_for_backward(query, key, value, logsum)
        ctx.layout, ctx.beta = layout, beta
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *above: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, logsum = ctx.saved_tensors
        grad = dense(above[0])
        grads = tuple(empty(x, x.shape[3]) for x in (query, key, value))
        sequences = _sequences(query, key, value, ctx.layout, ctx.beta, logsum)
        tokens = map(Tokens.of, (query, key, value, grad, *grads))
        SOURCE.loaded().attend_backward(sequences, *tokens, torch.get_num_threads())
        return *grads, None, None


def _sequences(
    query: Tensor, key: Tensor, value: Tensor, layout: Layout, beta: float, logsum: Tensor
) -> Sequences:
    sizes = len(layout.queries) - 1, query.shape[1], key.shape[1], key.shape[3], value.shape[3]
    return Sequences(*sizes, beta, *(x.data_ptr() for x in (*layout, logsum)))
