"""Normalisation, residual sums and dropout in single kernels, on CUDA.

    norm       LayerNorm(x), in the dtype of the matrix product that follows, and x itself; or both
               of x + Dropout(y)
    residual   x + Dropout(y)
    add_norm   LayerNorm(x + Dropout(y))
    narrow     x, and x in the dtype of the matrix product that follows
    feed_forward   W₂ a(W₁ x + b₁) + b₂

Between matrix products a layer only moves data, so each of these goes over it once, forwards and
backwards. Where one result is the residual itself, its gradient is added in the same pass. Dropout
is drawn again in the backward pass from its seed instead of being stored, and of a LayerNorm's
input the normalised values are kept, in half precision.
"""

from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from regard.attention.fusing import compute_dtype
from regard.attention.linear import column_sums, product, shares, wide_product

PROGRAMS = 528
"""Programs that go over the rows where sums over all rows are wanted: four for each processor."""
TILE = 2048
"""Elements that a program has of its rows at a time."""
ELEMENTS = 1024
"""Elements that a program of an elementwise kernel computes."""
HIDDEN = 4096
"""Elements that a program has of the hidden layer at a time: four rows, where it is wide."""


def norm(
    x: Tensor, module: nn.LayerNorm, y: Tensor | None = None, dropout: float = 0.0
) -> tuple[Tensor, Tensor]:
    """LayerNorm(x), and x; or of x + Dropout(y)."""
    affine = module.weight, module.bias, module.eps, compute_dtype(x)
    if not torch.is_grad_enabled():
        seed = _seed(x) if dropout else None
        out, total, *_ = _normalized(x, y, dropout, seed, *affine, total=True)
        return out, total
    made: tuple[Tensor, Tensor] = _Norm.apply(  # type: ignore[no-untyped-call]
        x, y, dropout, *affine
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
        ctx: Any,
        x: Tensor,
        y: Tensor | None,
        dropout: float,
        weight: Tensor,
        bias: Tensor,
        epsilon: float,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        seed = _seed(x) if dropout else None
        out, total, *kept = _normalized(
            x, y, dropout, seed, weight, bias, epsilon, dtype, total=True, kept=dtype
        )
        ctx.save_for_backward(*kept, weight, *([] if seed is None else [seed]))
        ctx.dropout, ctx.dtypes = dropout, (x.dtype, None if y is None else y.dtype)
        ctx.set_materialize_grads(False)
        return out, total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        grad, residual = grads
        normed, scale, weight, *seeds = ctx.saved_tensors
        if grad is None:
            grad = torch.zeros_like(normed)
        d_x, d_y, d_weight, d_bias = _norm_gradient(
            grad, residual, normed, scale, weight, seeds[0] if seeds else None, ctx.dropout,
            *ctx.dtypes,
        )  # fmt: skip
        return d_x, d_y, None, d_weight, d_bias, None, None


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
        seed = _seed(x) if dropout else None
        out, _, *kept = _normalized(
            x, y, dropout, seed, weight, bias, epsilon, x.dtype, kept=y.dtype
        )
        ctx.save_for_backward(*kept, weight, *([] if seed is None else [seed]))
        ctx.dropout, ctx.dtypes = dropout, (x.dtype, y.dtype)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        normed, scale, weight, *seeds = ctx.saved_tensors
        seed = seeds[0] if seeds else None
        d_x, d_y, d_weight, d_bias = _norm_gradient(
            grads[0], None, normed, scale, weight, seed, ctx.dropout, *ctx.dtypes
        )
        return d_x, d_y, None, d_weight, d_bias, None


def _normalized(
    x: Tensor,
    y: Tensor | None,
    dropout: float,
    seed: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    epsilon: float,
    dtype: torch.dtype,
    *,
    total: bool = False,
    kept: torch.dtype | None = None,
) -> tuple[Tensor, ...]:
    """LayerNorm(x + Dropout(y)); x + Dropout(y) itself, if `total`; and, if it is `kept`, what the
    gradient needs: the value before weight and bias, in half precision, and the factor that made
    its variance 1."""
    whole = x.view_as(x)
    x, y = x.contiguous(), None if y is None else y.contiguous()
    D, T = x.shape[-1], x.numel() // x.shape[-1]
    out = torch.empty_like(x, dtype=dtype)
    normed = scale = None
    if kept is not None:
        normed = torch.empty_like(x, dtype=kept)
        scale = torch.empty(T, dtype=torch.float32, device=x.device)
    if y is not None:
        whole = torch.empty_like(x, dtype=torch.promote_types(x.dtype, y.dtype)) if total else x
    rows, width = _tile(D)
    _norm_forward[(triton.cdiv(T, rows),)](
        x, y, seed, whole, normed, out, scale, weight, bias, T, D, epsilon, *_kept(dropout),
        ROWS=rows, WIDTH=width, ADD=y is not None, DROP=seed is not None,
        TOTAL=total and y is not None, KEEP=kept is not None, num_warps=4,
    )  # fmt: skip
    return (out, whole) if normed is None or scale is None else (out, whole, normed, scale)


def _norm_gradient(
    grad: Tensor,
    residual: Tensor | None,
    normed: Tensor,
    scale: Tensor,
    weight: Tensor,
    seed: Tensor | None,
    dropout: float,
    dtype: torch.dtype,
    added: torch.dtype | None,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """Gradients of the sum (and of what was added to it), of weight and of bias."""
    T, D = len(scale), normed.shape[-1]
    grad = grad.contiguous()
    residual = None if residual is None else residual.contiguous()
    d_x = torch.empty_like(normed, dtype=dtype)
    d_y = None if added is None else torch.empty_like(normed, dtype=added)
    rows, width = _tile(D)
    programs = min(triton.cdiv(T, rows), PROGRAMS)
    parts = scale.new_empty(programs, 2 * D)
    _norm_backward[(programs,)](
        grad, residual, normed, scale, weight, seed, d_x, d_y, parts, T, D, *_kept(dropout),
        ROWS=rows, WIDTH=width, RESIDUAL=residual is not None, ADD=d_y is not None,
        DROP=seed is not None, num_warps=4,
    )  # fmt: skip
    d_weight, d_bias = column_sums(parts).to(weight.dtype).split(D)
    return d_x, d_y, d_weight, d_bias


def _tile(width: int) -> tuple[int, int]:
    """Rows that a program has at a time, and their width."""
    padded = max(16, triton.next_power_of_2(width))
    return max(1, TILE // padded), padded


@triton.jit
@no_type_check
def _dropped(values, seed_ptr, first, limit, factor, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Rows after dropout: Philox with 7 rounds (Salmon et al. 2011), four columns to a draw."""
    quarter: tl.constexpr = WIDTH // 4
    rows = first.to(tl.int32) + tl.arange(0, ROWS)
    place = rows[:, None] * quarter + tl.arange(0, quarter)[None, :]
    a, b, c, d = tl.randint4x(tl.load(seed_ptr), place, 7)
    drawn = tl.join(tl.join(a, b), tl.join(c, d)).reshape(ROWS, WIDTH)
    return tl.where(drawn.to(tl.int32, bitcast=True) >= limit, values * factor, 0.0)


@triton.jit
@no_type_check
def _norm_forward(x_ptr, y_ptr, seed_ptr, total_ptr, normed_ptr, out_ptr, scale_ptr, weight_ptr,
                  bias_ptr, T, D, epsilon, limit, factor, ROWS: tl.constexpr,
                  WIDTH: tl.constexpr, ADD: tl.constexpr, DROP: tl.constexpr,
                  TOTAL: tl.constexpr, KEEP: tl.constexpr):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * ROWS
    rows, across = first + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    within = across[None, :] < D
    real = within & (rows[:, None] < T)
    place = rows[:, None] * D + across[None, :]
    x = tl.load(x_ptr + place, mask=real, other=0.0).to(tl.float32)
    if ADD:
        y = tl.load(y_ptr + place, mask=real, other=0.0).to(tl.float32)
        if DROP:
            y = _dropped(y, seed_ptr, first, limit, factor, ROWS, WIDTH)
        x += y
    if TOTAL:
        x = x.to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + place, x, mask=real)
        x = x.to(tl.float32)
    mean = tl.sum(x, 1) / D
    centred = tl.where(within, x - mean[:, None], 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, 1) / D + epsilon)
    weight = tl.load(weight_ptr + across, mask=across < D, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + across, mask=across < D, other=0.0).to(tl.float32)
    normed = centred * scale[:, None]
    out = normed * weight[None, :] + bias[None, :]
    tl.store(out_ptr + place, out.to(out_ptr.dtype.element_ty), mask=real)
    if KEEP:
        tl.store(normed_ptr + place, normed.to(normed_ptr.dtype.element_ty), mask=real)
        tl.store(scale_ptr + rows, scale, mask=rows < T)


@triton.jit
@no_type_check
def _norm_backward(grad_ptr, residual_ptr, normed_ptr, scale_ptr, weight_ptr, seed_ptr,
                   dx_ptr, dy_ptr, parts_ptr, T, D, limit, factor, ROWS: tl.constexpr,
                   WIDTH: tl.constexpr, RESIDUAL: tl.constexpr, ADD: tl.constexpr,
                   DROP: tl.constexpr):  # fmt: skip
    across = tl.arange(0, WIDTH)
    within = across[None, :] < D
    weight = tl.load(weight_ptr + across, mask=across < D, other=0.0).to(tl.float32)
    d_weight = tl.zeros((ROWS, WIDTH), tl.float32)
    d_bias = tl.zeros((ROWS, WIDTH), tl.float32)
    start, programs = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    for turn in range(tl.cdiv(T, programs * ROWS)):
        first = (start + turn * programs) * ROWS
        rows = first + tl.arange(0, ROWS)
        real = within & (rows[:, None] < T)
        place = rows[:, None] * D + across[None, :]
        g = tl.load(grad_ptr + place, mask=real, other=0.0).to(tl.float32)
        normed = tl.load(normed_ptr + place, mask=real, other=0.0).to(tl.float32)
        scale = tl.load(scale_ptr + rows, mask=rows < T, other=0.0)
        d_weight += g * normed
        d_bias += g
        g *= weight[None, :]
        along = tl.sum(g * normed, 1) / D
        dx = scale[:, None] * (g - (tl.sum(g, 1) / D)[:, None] - normed * along[:, None])
        if RESIDUAL:
            dx += tl.load(residual_ptr + place, mask=real, other=0.0).to(tl.float32)
        tl.store(dx_ptr + place, dx.to(dx_ptr.dtype.element_ty), mask=real)
        if ADD:
            if DROP:
                dx = _dropped(dx, seed_ptr, first, limit, factor, ROWS, WIDTH)
            tl.store(dy_ptr + place, dx.to(dy_ptr.dtype.element_ty), mask=real)
    place = parts_ptr + start * 2 * D + across
    tl.store(place, tl.sum(d_weight, 0), mask=across < D)
    tl.store(place + D, tl.sum(d_bias, 0), mask=across < D)


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
        rows = tl.reshape(y, (1, SIZE))
        y = tl.reshape(_dropped(rows, seed_ptr, block, limit, factor, 1, SIZE), (SIZE,))
    if SUM:
        y += tl.load(x_ptr + place, mask=real, other=0.0).to(tl.float32)
    tl.store(out_ptr + place, y.to(out_ptr.dtype.element_ty), mask=real)


# Feed-forward networks


def feed_forward(x: Tensor, expand: nn.Linear, reduce: nn.Linear, gelu: bool) -> Tensor:
    """W₂ a(W₁ x + b₁) + b₂, where a is ReLU or GELU."""
    made: Tensor = _FeedForward.apply(  # type: ignore[no-untyped-call]
        x, expand.weight, expand.bias, reduce.weight, reduce.bias, gelu, compute_dtype(x)
    )
    return made


class _FeedForward(torch.autograd.Function):
    """The activation's gradient and the sum for b₁ are one pass over the hidden layer."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        weight_2: Tensor,
        bias_2: Tensor | None,
        gelu: bool,
        dtype: torch.dtype,
    ) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]).to(dtype)
        one, two = weight.to(dtype), weight_2.to(dtype)
        if gelu:
            hidden = product(rows, one, bias)
            active = _gelu(hidden)
        elif bias is None:
            active = hidden = product(rows, one, None).relu_()
        else:  # the matrix product's epilogue
            active = hidden = torch._addmm_activation(bias.to(dtype), rows, one.T)
        out = product(active, two, bias_2)
        ctx.save_for_backward(rows, one, two, hidden, active)
        ctx.gelu, ctx.dtype, ctx.wide, ctx.biases = gelu, x.dtype, weight.dtype, bias is not None
        return out.view(*x.shape[:-1], len(two))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, one, two, hidden, active = ctx.saved_tensors
        grad = grads[0].reshape(-1, len(two))
        d_two = wide_product(grad.T, active, ctx.wide)
        slope = grad @ two
        d_bias = _through_activation(slope, hidden, ctx.gelu)
        d_one = wide_product(slope.T, rows, ctx.wide)
        d_x = (slope @ one).to(ctx.dtype).view(*grads[0].shape[:-1], one.shape[1])
        if not ctx.biases:
            return d_x, d_one, None, d_two, None, None, None
        return d_x, d_one, d_bias.to(ctx.wide), d_two, column_sums(grad).to(ctx.wide), None, None


def _gelu(x: Tensor) -> Tensor:
    out, n = torch.empty_like(x), x.numel()
    _activation[(triton.cdiv(n, 8 * ELEMENTS),)](x, out, n, SIZE=8 * ELEMENTS, num_warps=8)
    return out


def _through_activation(slope: Tensor, hidden: Tensor, gelu: bool) -> Tensor:
    """Multiplies by the activation's derivative, in place; returns the sum of all rows."""
    T, N = slope.shape
    columns = min(HIDDEN // 4, triton.next_power_of_2(N))
    rows, across = HIDDEN // columns, triton.cdiv(N, columns)
    parts = shares(T, rows, across)
    sums = torch.empty(parts, N, dtype=torch.float32, device=slope.device)
    _activation_gradient[(across, parts)](
        slope, hidden, sums, T, N, triton.cdiv(T, parts), ROWS=rows, COLUMNS=columns, GELU=gelu
    )
    return sums[0] if parts == 1 else column_sums(sums)


@triton.jit
@no_type_check
def _normal(x):
    """Density and distribution of the normal distribution.

    The error function is that of Abramowitz & Stegun (1964), 7.1.26, to 1.5e-7: half precision
    keeps three digits, and libraries' takes longer than reading and writing.
    """
    density = tl.exp2(x * x * -0.7213475204444817)
    t = 1.0 / (1.0 + 0.23164189 * tl.abs(x))
    tail = t * (0.7107068705 + t * (-0.7265760135 + t * 0.5307027145))
    tail = density * t * (0.127414796 + t * (-0.142248368 + tail))
    return density * 0.3989422804014327, tl.where(x > 0, 1.0 - tail, tail)


@triton.jit
@no_type_check
def _activation(x_ptr, out_ptr, n, SIZE: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    x = tl.load(x_ptr + place, mask=place < n, other=0.0).to(tl.float32)
    _, share = _normal(x)
    tl.store(out_ptr + place, (x * share).to(out_ptr.dtype.element_ty), mask=place < n)


@triton.jit
@no_type_check
def _activation_gradient(slope_ptr, hidden_ptr, sums_ptr, T, N, share,
                         ROWS: tl.constexpr, COLUMNS: tl.constexpr,
                         GELU: tl.constexpr):  # fmt: skip
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    part = tl.program_id(1)
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    stop = tl.minimum(T, (part + 1) * share)
    for begin in range(part * share, stop, ROWS):
        rows = begin + tl.arange(0, ROWS)
        real = (rows[:, None] < stop) & (columns[None, :] < N)
        place = rows[:, None].to(tl.int64) * N + columns[None, :]
        slope = tl.load(slope_ptr + place, mask=real, other=0.0).to(tl.float32)
        x = tl.load(hidden_ptr + place, mask=real, other=0.0).to(tl.float32)
        if GELU:
            density, below = _normal(x)
            slope *= below + x * density
        else:
            slope = tl.where(x > 0, slope, 0.0)
        tl.store(slope_ptr + place, slope.to(slope_ptr.dtype.element_ty), mask=real)
        sums += slope
    tl.store(sums_ptr + part * N + columns, tl.sum(sums, 0), mask=columns < N)
