"""Normalisation, residual sums and dropout in single kernels, for training on CUDA.

    norm       LayerNorm(x), in the dtype of the matrix product that follows, and x itself
    residual   x + Dropout(y)
    add_norm   LayerNorm(x + Dropout(y))
    narrow     x, and x in the dtype of the matrix product that follows

Between matrix products a layer only moves data, so each of these goes over it once, forwards and
backwards. Where one result is the residual itself, its gradient is added in the same pass. Dropout
is drawn again in the backward pass from its seed instead of being stored.
"""

from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from regard.attention.fusing import compute_dtype

PROGRAMS = 264
"""Programs that go over the rows where sums over all rows are wanted: two for each processor."""
ELEMENTS = 1024
"""Elements that a program of an elementwise kernel computes."""


def norm(x: Tensor, module: nn.LayerNorm) -> tuple[Tensor, Tensor]:
    """LayerNorm(x), and x."""
    made: tuple[Tensor, Tensor] = _Norm.apply(  # type: ignore[no-untyped-call]
        x, module.weight, module.bias, module.eps, compute_dtype(x)
    )
    return made


def residual(x: Tensor, y: Tensor, dropout: float) -> Tensor:
    """x + Dropout(y)."""
    made: Tensor = _Residual.apply(x, y, dropout)  # type: ignore[no-untyped-call]
    return made


def add_norm(x: Tensor, y: Tensor, dropout: float, module: nn.LayerNorm) -> Tensor:
    """LayerNorm(x + Dropout(y)), in float32 where that is autocast's way."""
    made: Tensor = _AddNorm.apply(  # type: ignore[no-untyped-call]
        x, y, dropout, module.weight, module.bias, module.eps
    )
    return made


def narrow(x: Tensor) -> tuple[Tensor, Tensor]:
    """x for the residual, and x in the dtype of matrix products."""
    if compute_dtype(x) == x.dtype:
        return x, x
    made: tuple[Tensor, Tensor] = _Narrow.apply(x, compute_dtype(x))  # type: ignore[no-untyped-call]
    return made


def _seed(x: Tensor) -> Tensor:
    """Drawn on the device, by the generator that a captured step replays."""
    return torch.empty(1, dtype=torch.int64, device=x.device).random_()


def _kept(dropout: float) -> tuple[int, float]:
    """The least of 32 random bits that keeps an entry, and what it is multiplied by."""
    return round(dropout * 2**32) - 2**31, 1 / (1 - dropout)


# LayerNorm


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, epsilon: float, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        rows = x.reshape(-1, x.shape[-1])
        out = torch.empty_like(rows, dtype=dtype)
        moments = rows.new_empty(2, len(rows), dtype=torch.float32)
        _norm_rows(rows, None, None, 0.0, None, out, moments, weight, bias, epsilon)
        ctx.save_for_backward(rows, moments, weight)
        ctx.set_materialize_grads(False)
        return out.view(x.shape), x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        rows, moments, weight = ctx.saved_tensors
        grad, residual = grads
        if grad is None:
            return residual, None, None, None, None
        d_x, _, d_weight, d_bias = _norm_gradient(
            grad, residual, rows, moments, weight, None, 0.0, rows.dtype, None
        )
        return d_x.view(grad.shape), d_weight, d_bias, None, None


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        y: Tensor,
        dropout: float,
        weight: Tensor,
        bias: Tensor,
        epsilon: float,
    ) -> Tensor:
        rows, added = x.reshape(-1, x.shape[-1]), y.reshape(-1, x.shape[-1])
        seed = _seed(x) if dropout else None
        out, sums = torch.empty_like(rows), torch.empty_like(rows)
        moments = rows.new_empty(2, len(rows), dtype=torch.float32)
        _norm_rows(rows, added, seed, dropout, sums, out, moments, weight, bias, epsilon)
        ctx.save_for_backward(sums, moments, weight, *([] if seed is None else [seed]))
        ctx.dropout, ctx.dtype = dropout, y.dtype
        return out.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        sums, moments, weight, *seeds = ctx.saved_tensors
        shape = grads[0].shape
        d_x, d_y, d_weight, d_bias = _norm_gradient(
            grads[0],
            None,
            sums,
            moments,
            weight,
            seeds[0] if seeds else None,
            ctx.dropout,
            sums.dtype,
            ctx.dtype,
        )
        assert d_y is not None
        return d_x.view(shape), d_y.view(shape), None, d_weight, d_bias, None


def _norm_rows(
    x: Tensor,
    y: Tensor | None,
    seed: Tensor | None,
    dropout: float,
    sums: Tensor | None,
    out: Tensor,
    moments: Tensor,
    weight: Tensor,
    bias: Tensor,
    epsilon: float,
) -> None:
    T, D = x.shape
    _norm_forward[(T,)](
        x, y, seed, sums, out, moments, weight, bias, T, D, epsilon, *_kept(dropout),
        WIDTH=triton.next_power_of_2(D), ADD=y is not None, DROP=seed is not None,
        num_warps=_warps(D),
    )  # fmt: skip


def _norm_gradient(
    grad: Tensor,
    residual: Tensor | None,
    x: Tensor,
    moments: Tensor,
    weight: Tensor,
    seed: Tensor | None,
    dropout: float,
    dtype: torch.dtype,
    added: torch.dtype | None,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """Gradients of the sum (and what was added to it), and of weight and bias."""
    T, D = x.shape
    grad = grad.reshape(T, D)
    grad = grad if grad.is_contiguous() else grad.contiguous()
    if residual is not None:
        residual = residual.reshape(T, D).contiguous()
    d_x = torch.empty_like(x, dtype=dtype)
    d_y = None if added is None else torch.empty_like(x, dtype=added)
    programs = min(T, PROGRAMS)
    parts = x.new_empty(2, programs, D, dtype=torch.float32)
    _norm_backward[(programs,)](
        grad, residual, x, moments, weight, seed, d_x, d_y, parts, T, D, *_kept(dropout),
        WIDTH=triton.next_power_of_2(D), RESIDUAL=residual is not None, ADD=d_y is not None,
        DROP=seed is not None, num_warps=_warps(D),
    )  # fmt: skip
    d_weight, d_bias = parts.sum(1).to(weight.dtype)
    return d_x, d_y, d_weight, d_bias


def _warps(width: int) -> int:
    return min(8, max(1, triton.next_power_of_2(width) // 256))


@triton.jit
@no_type_check
def _dropped(values, seed_ptr, row, limit, factor, WIDTH: tl.constexpr):
    """A row after dropout: Philox with 7 rounds (Salmon et al. 2011), four columns to a draw."""
    quarter: tl.constexpr = WIDTH // 4
    place = row.to(tl.int32) * quarter + tl.arange(0, quarter)
    a, b, c, d = tl.randint4x(tl.load(seed_ptr), place, 7)
    drawn = tl.join(tl.join(a, b), tl.join(c, d)).reshape(WIDTH)
    return tl.where(drawn.to(tl.int32, bitcast=True) >= limit, values * factor, 0.0)


@triton.jit
@no_type_check
def _norm_forward(x_ptr, y_ptr, seed_ptr, sums_ptr, out_ptr, moments_ptr, weight_ptr, bias_ptr,
                  T, D, epsilon, limit, factor,
                  WIDTH: tl.constexpr, ADD: tl.constexpr, DROP: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    across = tl.arange(0, WIDTH)
    real = across < D
    x = tl.load(x_ptr + row * D + across, mask=real, other=0.0).to(tl.float32)
    if ADD:
        y = tl.load(y_ptr + row * D + across, mask=real, other=0.0).to(tl.float32)
        if DROP:
            y = _dropped(y, seed_ptr, row, limit, factor, WIDTH)
        x += y
        tl.store(sums_ptr + row * D + across, x.to(sums_ptr.dtype.element_ty), mask=real)
    mean = tl.sum(x) / D
    centred = tl.where(real, x - mean, 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred) / D + epsilon)
    weight = tl.load(weight_ptr + across, mask=real, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + across, mask=real, other=0.0).to(tl.float32)
    out = centred * scale * weight + bias
    tl.store(out_ptr + row * D + across, out.to(out_ptr.dtype.element_ty), mask=real)
    tl.store(moments_ptr + row, mean)
    tl.store(moments_ptr + T + row, scale)


@triton.jit
@no_type_check
def _norm_backward(grad_ptr, residual_ptr, x_ptr, moments_ptr, weight_ptr, seed_ptr,
                   dx_ptr, dy_ptr, parts_ptr, T, D, limit, factor,
                   WIDTH: tl.constexpr, RESIDUAL: tl.constexpr, ADD: tl.constexpr,
                   DROP: tl.constexpr):  # fmt: skip
    across = tl.arange(0, WIDTH)
    weight = tl.load(weight_ptr + across, mask=across < D, other=0.0).to(tl.float32)
    d_weight = tl.zeros((WIDTH,), tl.float32)
    d_bias = tl.zeros((WIDTH,), tl.float32)
    start, programs = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    for turn in range(tl.cdiv(T, programs)):
        row = start + turn * programs
        real = (across < D) & (row < T)
        g = tl.load(grad_ptr + row * D + across, mask=real, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + row * D + across, mask=real, other=0.0).to(tl.float32)
        mean = tl.load(moments_ptr + row, mask=row < T, other=0.0)
        scale = tl.load(moments_ptr + T + row, mask=row < T, other=0.0)
        normed = tl.where(real, (x - mean) * scale, 0.0)
        d_weight += g * normed
        d_bias += g
        g *= weight
        dx = scale * (g - tl.sum(g) / D - normed * (tl.sum(g * normed) / D))
        if RESIDUAL:
            dx += tl.load(residual_ptr + row * D + across, mask=real, other=0.0).to(tl.float32)
        tl.store(dx_ptr + row * D + across, dx.to(dx_ptr.dtype.element_ty), mask=real)
        if ADD:
            if DROP:
                dx = _dropped(dx, seed_ptr, row, limit, factor, WIDTH)
            tl.store(dy_ptr + row * D + across, dx.to(dy_ptr.dtype.element_ty), mask=real)
    place = parts_ptr + start * D + across
    tl.store(place, d_weight, mask=across < D)
    tl.store(place + programs * D, d_bias, mask=across < D)


# Residuals


class _Residual(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, dropout: float) -> Tensor:
        x, y = x.contiguous(), y.contiguous()
        seed = _seed(x) if dropout else None
        out = torch.empty_like(x, dtype=torch.promote_types(x.dtype, y.dtype))
        n = x.numel()
        _add[(triton.cdiv(n, ELEMENTS),)](
            x, y, seed, out, n, *_kept(dropout), SIZE=ELEMENTS, SUM=True, DROP=seed is not None
        )
        ctx.save_for_backward(*([] if seed is None else [seed]))
        ctx.dropout, ctx.dtypes = dropout, (x.dtype, y.dtype)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad, (d_x, d_y) = grads[0].contiguous(), ctx.dtypes
        narrow = torch.empty_like(grad, dtype=d_y)
        n = grad.numel()
        _add[(triton.cdiv(n, ELEMENTS),)](
            grad, grad, *(ctx.saved_tensors or (None,)), narrow, n, *_kept(ctx.dropout),
            SIZE=ELEMENTS, SUM=False, DROP=bool(ctx.saved_tensors),
        )  # fmt: skip
        return grad.to(d_x), narrow, None


class _Narrow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        return x.view_as(x), x.to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None]:
        wide, small = grads
        if wide is None or small is None:
            return (small.float() if wide is None and small is not None else wide), None
        wide, small = wide.contiguous(), small.contiguous()
        out, n = torch.empty_like(wide), wide.numel()
        _add[(triton.cdiv(n, ELEMENTS),)](
            wide, small, None, out, n, *_kept(0.0), SIZE=ELEMENTS, SUM=True, DROP=False
        )
        return out, None


@triton.jit
@no_type_check
def _add(x_ptr, y_ptr, seed_ptr, out_ptr, n, limit, factor,
         SIZE: tl.constexpr, SUM: tl.constexpr, DROP: tl.constexpr):  # fmt: skip
    """x + Dropout(y), or Dropout(y) alone."""
    block = tl.program_id(0).to(tl.int64)
    place = block * SIZE + tl.arange(0, SIZE)
    real = place < n
    y = tl.load(y_ptr + place, mask=real, other=0.0).to(tl.float32)
    if DROP:
        y = _dropped(y, seed_ptr, block, limit, factor, SIZE)
    if SUM:
        y += tl.load(x_ptr + place, mask=real, other=0.0).to(tl.float32)
    tl.store(out_ptr + place, y.to(out_ptr.dtype.element_ty), mask=real)
