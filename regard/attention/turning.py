"""Rotary positions in one pass each way on a CPU (`turning.cpp`), for packed sequences.

Cosines and sines are computed in float64, once for each position, and rounded to float32.
"""

import ctypes
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from regard.attention.fusing import HALF
from regard.native.build import SHARED, Float, Int, Pointer, Source, fields

DTYPES = (torch.float32, *HALF)
FARTHEST = 2**16
"""Positions of which a table may be made."""

FILE = Path(__file__).with_name("turning.cpp")
HEADERS = (SHARED / "openmp.h",)


# The structures of turning.cpp, where their fields are explained.


class Tokens(ctypes.Structure):
    _fields_ = fields((Pointer, "data"), (Int, "token head"))


class Turn(ctypes.Structure):
    _fields_ = fields(
        (Int, "tokens heads width pairs halves"), (Float, "sign"), (Pointer, "table position")
    )


def _declare(kernels: ctypes.CDLL) -> None:
    turn, tokens = map(ctypes.POINTER, (Turn, Tokens))
    kernels.turn.argtypes = (turn, tokens, tokens, ctypes.c_int)


SOURCE = Source(FILE, HEADERS, "positions", _declare)


class Angles(NamedTuple):
    """How columns turn: `width` of them, by position over base^{2k/width}, in pairs of neighbours
    or of halves."""

    width: int
    base: int | float
    halves: bool


def takes(x: Tensor, at: Tensor) -> bool:
    """Whether the kernel turns these; x is (1, H, L, K), and `at` (1, L)."""
    if (
        x.device.type != "cpu"
        or at.device.type != "cpu"
        or x.dtype not in DTYPES
        or x.shape[0] != 1
        or not at.numel()
        or torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or SOURCE.library() is None
    ):
        return False
    first, last = at.aminmax()
    return int(first) >= 0 and int(last) < FARTHEST


def rotate(x: Tensor, at: Tensor, angles: Angles) -> Tensor:
    """Turned by the angles at positions (L,)."""
    out: Tensor = _Rotate.apply(x.float(), at.long().contiguous(), angles)  # type: ignore[no-untyped-call]
    return out.to(x.dtype)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, at: Tensor, angles: Angles) -> Tensor:
        ctx.save_for_backward(at)
        ctx.angles = angles
        return _turned(x, at, angles, 1.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (at,) = ctx.saved_tensors
        return _turned(grads[0], at, ctx.angles, -1.0), None, None


def _turned(x: Tensor, at: Tensor, angles: Angles, sign: float) -> Tensor:
    x = x if x.stride(3) == 1 else x.contiguous()
    _, H, L, K = x.shape
    out = x.new_empty(1, L, H, K).transpose(1, 2)
    table = _table(angles.width, angles.base, 1 << int(at.max()).bit_length())
    sizes = L, H, K, angles.width // 2, angles.halves
    by = Turn(*sizes, sign, table.data_ptr(), at.data_ptr())
    tokens = (Tokens(t.data_ptr(), t.stride(2), t.stride(1)) for t in (x, out))
    library = SOURCE.library()
    assert library is not None
    library.turn(by, *tokens, torch.get_num_threads())
    return out


@lru_cache(maxsize=8)
def _table(width: int, base: int | float, length: int) -> Tensor:
    """Cosines and sines, (length, 2, width / 2)."""
    with torch.inference_mode(False):
        pairs = torch.arange(0, width, 2, dtype=torch.float64)
        angles = torch.arange(length).double()[:, None] / base ** (pairs / width)
        return torch.stack((angles.cos(), angles.sin()), 1).float()
