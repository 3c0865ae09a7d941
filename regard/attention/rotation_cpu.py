"""RotaryEmbedding positions in one pass each way on a CPU (`rotation.cpp`), for packed sequences.

Cosines and sines are computed in float64, once for each position, and rounded to float32.
"""

import ctypes
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.native.build import SHARED, Float, Int, Pointer, Source, fields
from regard.native.tensors import DTYPES, Tokens, dense, empty, serves

FARTHEST = 2**16
"""Positions of which a table may be made."""

FILE = Path(__file__).with_name("rotation.cpp")
HEADERS = (SHARED / "openmp.h", SHARED / "tokens.h")


class Rotation(ctypes.Structure):
    """As in rotation.cpp, where the fields are explained."""

    _fields_ = fields(
        (Int, "tokens heads width pairs halves"), (Float, "sign"), (Pointer, "table position")
    )


def _declare(kernels: ctypes.CDLL) -> None:
    rotation, tokens = map(ctypes.POINTER, (Rotation, Tokens))
    kernels.rotate.argtypes = (rotation, tokens, tokens, ctypes.c_int)


SOURCE = Source(FILE, HEADERS, "rotary positions", _declare)


class Pairs(NamedTuple):
    """The first `width` columns rotate in pairs of neighbours, or of halves, by position over
    base^{2k/width}."""

    width: int
    base: int | float
    halves: bool


def takes(x: Tensor, at: Tensor) -> bool:
    """Whether the kernel rotates these; x is (1, H, L, K), and `at` (1, L)."""
    if not (x.dtype in DTYPES and len(x) == 1 and at.numel() and serves(SOURCE, x, at)):
        return False
    first, last = at.aminmax()
    return int(first) >= 0 and int(last) < FARTHEST


def rotate(x: Tensor, at: Tensor, pairs: Pairs) -> Tensor:
    """Rotated by the angles at positions (L,)."""
    return _rotated(x.float(), at.long().contiguous(), pairs, 1.0).to(x.dtype)


def _rotated(x: Tensor, at: Tensor, pairs: Pairs, sign: float) -> Tensor:
    out: Tensor = _Rotate.apply(x, at, pairs, sign)  # type: ignore[no-untyped-call]
    return out


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, at: Tensor, pairs: Pairs, sign: float) -> Tensor:
        ctx.save_for_backward(at)
        ctx.pairs, ctx.sign = pairs, sign
        return _compute(x, at, pairs, sign)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (at,) = ctx.saved_tensors
        return _rotated(grads[0], at, ctx.pairs, -ctx.sign), None, None, None


def _compute(x: Tensor, at: Tensor, pairs: Pairs, sign: float) -> Tensor:
    x = dense(x)
    _, H, L, K = x.shape
    out = empty(x, K)
    table = _table(pairs.width, pairs.base, 1 << int(at.max()).bit_length())
    sizes = L, H, K, pairs.width // 2, pairs.halves
    rotation = Rotation(*sizes, sign, table.data_ptr(), at.data_ptr())
    SOURCE.loaded().rotate(rotation, *map(Tokens.of, (x, out)), torch.get_num_threads())
    return out


@lru_cache(maxsize=8)
def _table(width: int, base: int | float, length: int) -> Tensor:
    """Cosines and sines, (length, 2, width / 2)."""
    with torch.inference_mode(False):
        pairs = torch.arange(0, width, 2, dtype=torch.float64)
        angles = torch.arange(length).double()[:, None] / base ** (pairs / width)
        return torch.stack((angles.cos(), angles.sin()), 1).float()
