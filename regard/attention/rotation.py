"""RotaryEmbedding positions in one kernel each way, for training on CUDA in half precision.

Position times frequency is computed in float64 and reduced to one turn before it is rounded, so
that cosines and sines have float32's precision at any position. Only sine and cosine themselves
are float32: a handful of float64 operations for each pair, none of which takes as long as reading
the heads.
"""

import math
from functools import partial
from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable


def rotate(x: Tensor, at: Tensor, width: int, base: int | float, halves: bool) -> Tensor:
    """x (1, H, L, K) at positions (L,); pairs of its first `width` columns rotate by the position
    over base^{2k/width}."""
    out: Tensor = _Rotate.apply(x, at, width, base, halves)  # type: ignore[no-untyped-call]
    return out


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, at: Tensor, width: int, base: int | float, halves: bool
    ) -> Tensor:
        ctx.save_for_backward(at)
        ctx.launch = partial(_launch, width=width, base=base, halves=halves)
        out: Tensor = ctx.launch(x, at, sign=1.0)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.launch(grads[0], *ctx.saved_tensors, sign=-1.0), None, None, None, None


def _launch(
    x: Tensor, at: Tensor, *, width: int, base: int | float, halves: bool, sign: float
) -> Tensor:
    x = x if x.stride(-1) == 1 else x.contiguous()
    _, H, L, K = x.shape
    out = x.new_empty(1, L, H, K).transpose(1, 2)
    pairs = width // 2
    # A number reaches the kernel in float32: the logarithm is passed in two parts.
    power = math.log2(base) / pairs
    high = float(torch.tensor(power, dtype=torch.float32))
    _rotate[(L,)](
        x, at, out, x.stride(1), x.stride(2), H, K, pairs, high, power - high, sign,
        HEADS=triton.next_power_of_2(H), PAIRS=triton.next_power_of_2(max(1, K // 2)),
        HALVES=halves, REST=2 * pairs < K, num_warps=1 if H * K <= 512 else 4,
    )  # fmt: skip
    return out


@triton.jit
@no_type_check
def _rotate(x_ptr, at_ptr, out_ptr, x_head, x_row, H, K, pairs, high, low, sign,
            HEADS: tl.constexpr, PAIRS: tl.constexpr, HALVES: tl.constexpr,
            REST: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    heads, pair = tl.arange(0, HEADS), tl.arange(0, PAIRS)
    power = tl.full((1,), high, tl.float64) + tl.full((1,), low, tl.float64)
    turns = tl.load(at_ptr + row).to(tl.float64) * tl.exp2(-power * pair)
    turns *= tl.full((1,), 0.15915494309189535, tl.float64)  # over 2π
    turns -= tl.floor(turns + 0.5)
    angle = (turns * tl.full((1,), 6.283185307179586, tl.float64)).to(tl.float32)
    cos, sin = tl.cos(angle)[None, :], tl.sin(angle)[None, :] * sign
    first = pair if HALVES else 2 * pair
    second = pair + pairs if HALVES else 2 * pair + 1
    real = (heads[:, None] < H) & (pair[None, :] < pairs)
    x_ptr += row * x_row + heads[:, None] * x_head
    out_ptr += row * H * K + heads[:, None] * K
    a = tl.load(x_ptr + first[None, :], mask=real, other=0.0).to(tl.float32)
    b = tl.load(x_ptr + second[None, :], mask=real, other=0.0).to(tl.float32)
    kind = out_ptr.dtype.element_ty
    tl.store(out_ptr + first[None, :], (a * cos - b * sin).to(kind), mask=real)
    tl.store(out_ptr + second[None, :], (a * sin + b * cos).to(kind), mask=real)
    if REST:
        for begin in range(2 * pairs, K, PAIRS):
            column = begin + pair
            real = (heads[:, None] < H) & (column[None, :] < K)
            rest = tl.load(x_ptr + column[None, :], mask=real, other=0.0)
            tl.store(out_ptr + column[None, :], rest, mask=real)
