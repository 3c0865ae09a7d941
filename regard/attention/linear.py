"""Linear layers for training in mixed precision on CUDA: few kernels each way.

    forwards    y = x Wᵀ + b in half precision
    backwards   ∂x = ∂y W,  ∂W = ∂yᵀ x straight into float32,  ∂b = Σ ∂y
    parts       y in pieces, whose gradients are not copied where they lie side by side

Autograd would write ∂W in half precision and widen it in another pass, and its sum over a hundred
thousand rows is several times slower than reading them.
"""

from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from regard.attention.fusing import compute_dtype

ROWS, COLUMNS = 64, 64
PROGRAMS = 1056
"""Programs among which many rows are divided, to be summed side by side: eight a processor."""
FEW = 2048
"""Rows that are summed in one part."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x Wᵀ + b, as autocast computes it."""
    made: Tensor = _Linear.apply(x, weight, bias, compute_dtype(x))  # type: ignore[no-untyped-call]
    return made


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        rows, matrix = x.reshape(-1, x.shape[-1]).to(dtype), weight.to(dtype)
        out = product(rows, matrix, bias)
        ctx.save_for_backward(rows, matrix)
        ctx.dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
        return out.view(*x.shape[:-1], len(matrix))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, matrix = ctx.saved_tensors
        x, weight, bias = ctx.dtypes
        grad = grads[0].reshape(-1, len(matrix))
        wanted = ctx.needs_input_grad
        d_x = d_weight = d_bias = None
        if wanted[0]:
            d_x = (grad @ matrix).to(x).view(*grads[0].shape[:-1], matrix.shape[1])
        if wanted[1]:
            d_weight = wide_product(grad.T, rows, weight)
        if wanted[2]:
            d_bias = column_sums(grad).to(bias)
        return d_x, d_weight, d_bias, None


def parts(joint: Tensor, widths: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Pieces of these widths."""
    made: tuple[Tensor, ...] = _Parts.apply(joint, widths)  # type: ignore[no-untyped-call]
    return made


class _Parts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, joint: Tensor, widths: tuple[int, ...]) -> tuple[Tensor, ...]:
        return joint.split(widths, -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        joint = _joint(grads)
        return torch.cat(grads, -1) if joint is None else joint, None


def _joint(pieces: tuple[Tensor, ...]) -> Tensor | None:
    """The tensor that these are cut from, if they are all of it."""
    first, width = pieces[0], sum(piece.shape[-1] for piece in pieces)
    memory, place = first.untyped_storage().data_ptr(), first.storage_offset()
    for piece in pieces:
        where = piece.untyped_storage().data_ptr(), piece.storage_offset(), piece.stride()
        if where != (memory, place, first.stride()):
            return None
        place += piece.shape[-1]
    whole = first.stride()[-2:] == (width, 1)
    return first.as_strided((*first.shape[:-1], width), first.stride()) if whole else None


def product(rows: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
    if bias is None:
        return rows @ matrix.T
    return torch.addmm(bias.to(rows.dtype), rows, matrix.T)


def wide_product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a b, whose sums are not rounded to half precision before they are widened."""
    if dtype is torch.float32 and a.device.type == "cuda":
        return torch.mm(a, b, out_dtype=dtype)
    return (a @ b).to(dtype)


def column_sums(rows: Tensor) -> Tensor:
    """The sum of all rows, in float32."""
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    T, N = rows.shape
    across = triton.cdiv(N, COLUMNS)
    parts = 1 if T <= FEW else shares(T, ROWS, across)
    sums = torch.empty(parts, N, dtype=torch.float32, device=rows.device)
    _sum[(across, parts)](
        rows, sums, T, N, rows.stride(0), triton.cdiv(T, parts), ROWS=ROWS, COLUMNS=COLUMNS
    )
    return sums[0] if parts == 1 else column_sums(sums)


def shares(T: int, rows: int, across: int) -> int:
    """Parts of T rows, a few at a time, where so many programs are side by side already."""
    return max(1, min(triton.cdiv(T, rows), PROGRAMS // across))


@triton.jit
@no_type_check
def _sum(rows_ptr, sums_ptr, T, N, row, share, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    part = tl.program_id(1)
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    stop = tl.minimum(T, (part + 1) * share)
    for begin in range(part * share, stop, ROWS):
        rows = begin + tl.arange(0, ROWS)
        real = (rows[:, None] < stop) & (columns[None, :] < N)
        place = rows_ptr + rows[:, None].to(tl.int64) * row + columns[None, :]
        sums += tl.load(place, mask=real, other=0.0).to(tl.float32)
    tl.store(sums_ptr + part * N + columns, tl.sum(sums, 0), mask=columns < N)
