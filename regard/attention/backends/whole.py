"""Training attention of short sequences in Triton, without a mask: the patches of images.

FlashAttention's kernels are made for long sequences. They write the gradient of the queries in
float32, bit by bit, and narrow it in another pass. Here a program of the backward pass has all
queries of a head, so that it goes over the keys once and writes each gradient once; and the last
tile of keys is as narrow as what is left of them, as 197 patches leave 5.

The gradients of queries, keys and values lie side by side, as the projections do that are one
matrix product.
"""

from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from regard.attention.backends import Call
from regard.attention.backends.tiles import LOG2E, NOTHING, dense

FORWARD = {"ROWS": 64, "COLUMNS": 32, "num_warps": 4, "num_stages": 3}
BACKWARD = {"COLUMNS": 64, "num_warps": 8, "num_stages": 3}
"""Queries and keys of a tile: the fastest of ten on an H200, for 197 patches. There, forwards and
backwards, it takes 0.81 times as long as cuDNN's, and 0.84 with 65; 0.6 to 0.7 times as long as the
memory-efficient one with 33 and 50."""
SHORTEST, LONGEST = 32, {16: 128, 32: 128, 64: 256}
"""Positions of a sequence, at least, and by the width of heads at most: beyond, cuDNN's kernel is
faster."""


def takes(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether the kernel can compute these: self-attention, as many key heads as query heads."""
    S, K = query.shape[2:]
    return query.shape == key.shape == value.shape and SHORTEST <= S <= LONGEST.get(K, 0)


def unmasked(call: Call) -> Tensor:
    """softmax(β·Q Kᵀ) V of (B, H, S, K)."""
    query, key, value = (dense(tensor) for tensor in (call.query, call.key, call.value))
    out: Tensor = _Attention.apply(query, key, value, call.beta)  # type: ignore[no-untyped-call]
    return out


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, beta: float) -> Tensor:
        B, H, S, K = query.shape
        out = query.new_empty(B, S, H, K).transpose(1, 2)
        level = query.new_empty(B, H, S, dtype=torch.float32)
        _forward[(triton.cdiv(S, FORWARD["ROWS"]), H, B)](
            query, key, value, out, level,
            *query.stride()[:3], *key.stride()[:3], *value.stride()[:3],
            S, H, beta * LOG2E, WIDTH=K, **_tiles(S, FORWARD["COLUMNS"]), **FORWARD,
        )  # fmt: skip
        ctx.save_for_backward(query, key, value, out, level)
        ctx.beta = beta
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, level = ctx.saved_tensors
        B, H, S, K = query.shape
        grad = dense(grads[0])
        joint = query.new_empty(B, S, 3, H, K)
        _backward[(H, B)](
            query, key, value, out, grad, level, joint,
            *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *grad.stride()[:3],
            S, H, ctx.beta, ctx.beta * LOG2E, WIDTH=K, ROWS=max(16, triton.next_power_of_2(S)),
            **_tiles(S, BACKWARD["COLUMNS"]), **BACKWARD,
        )  # fmt: skip
        d_query, d_key, d_value = (part.transpose(1, 2) for part in joint.unbind(2))
        return d_query, d_key, d_value, None


def _tiles(S: int, columns: int) -> dict[str, int]:
    """Whole tiles of keys, and the width of the last one where some keys are left."""
    left = S % columns
    return {"TILES": S // columns, "TAIL": max(16, triton.next_power_of_2(left)) if left else 0}


@triton.jit
@no_type_check
def _place(ptr, rows, row, WIDTH: tl.constexpr):
    return ptr + rows[:, None] * row + tl.arange(0, WIDTH)[None, :]


@triton.jit
@no_type_check
def _forward(q_ptr, k_ptr, v_ptr, out_ptr, level_ptr,
             q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
             S, H, scale, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
             TILES: tl.constexpr, TAIL: tl.constexpr):  # fmt: skip
    h, b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    real = rows < S
    k_ptr += b * k_batch + h * k_head
    v_ptr += b * v_batch + h * v_head
    q = tl.load(
        _place(q_ptr + b * q_batch + h * q_head, rows, q_row, WIDTH), mask=real[:, None], other=0.0
    )
    peak = tl.full((ROWS,), NOTHING, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    sums = tl.zeros((ROWS, WIDTH), tl.float32)
    for n in range(TILES):
        columns = n * COLUMNS + tl.arange(0, COLUMNS)
        k = tl.load(_place(k_ptr, columns, k_row, WIDTH))
        v = tl.load(_place(v_ptr, columns, v_row, WIDTH))
        scores = tl.dot(q, tl.trans(k)) * scale
        peak, total, sums = _online(scores, v, peak, total, sums)
    if TAIL:
        columns = TILES * COLUMNS + tl.arange(0, TAIL)
        there = columns < S
        k = tl.load(_place(k_ptr, columns, k_row, WIDTH), mask=there[:, None], other=0.0)
        v = tl.load(_place(v_ptr, columns, v_row, WIDTH), mask=there[:, None], other=0.0)
        scores = tl.where(there[None, :], tl.dot(q, tl.trans(k)) * scale, NOTHING)
        peak, total, sums = _online(scores, v, peak, total, sums)
    out = (sums / total[:, None]).to(out_ptr.dtype.element_ty)
    out_ptr += b * S * H * WIDTH + h * WIDTH
    tl.store(_place(out_ptr, rows, H * WIDTH, WIDTH), out, mask=real[:, None])
    tl.store(level_ptr + (b * H + h) * S + rows, peak + tl.log2(total), mask=real)


@triton.jit
@no_type_check
def _online(scores, v, peak, total, sums):
    """The online softmax: one more tile of keys."""
    higher = tl.maximum(peak, tl.max(scores, 1))
    p = tl.exp2(scores - higher[:, None])
    shrink = tl.exp2(peak - higher)
    sums = sums * shrink[:, None] + tl.dot(p.to(v.dtype), v)
    return higher, total * shrink + tl.sum(p, 1), sums


@triton.jit
@no_type_check
def _backward(q_ptr, k_ptr, v_ptr, out_ptr, grad_ptr, level_ptr, joint_ptr,
              q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
              grad_batch, grad_head, grad_row, S, H, beta, scale,
              WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
              TILES: tl.constexpr, TAIL: tl.constexpr):  # fmt: skip
    h, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    rows = tl.arange(0, ROWS)
    real = rows < S
    width = H * WIDTH
    k_ptr += b * k_batch + h * k_head
    v_ptr += b * v_batch + h * v_head
    out_ptr += b * S * width + h * WIDTH
    joint_ptr += b * S * 3 * width + h * WIDTH
    q_ptr += b * q_batch + h * q_head
    grad_ptr += b * grad_batch + h * grad_head
    q = tl.load(_place(q_ptr, rows, q_row, WIDTH), mask=real[:, None], other=0.0)
    g = tl.load(_place(grad_ptr, rows, grad_row, WIDTH), mask=real[:, None], other=0.0)
    out = tl.load(_place(out_ptr, rows, width, WIDTH), mask=real[:, None], other=0.0)
    delta = tl.sum(g.to(tl.float32) * out.to(tl.float32), 1)
    level = tl.load(level_ptr + (b * H + h) * S + rows, mask=real, other=0.0)
    dq = tl.zeros((ROWS, WIDTH), tl.float32)
    for n in range(TILES):
        columns = n * COLUMNS + tl.arange(0, COLUMNS)
        k = tl.load(_place(k_ptr, columns, k_row, WIDTH))
        v = tl.load(_place(v_ptr, columns, v_row, WIDTH))
        p = tl.exp2(tl.dot(q, tl.trans(k)) * scale - level[:, None])
        dq, dk, dv = _gradients(q, k, v, g, p, delta, dq, beta)
        place = _place(joint_ptr + width, columns, 3 * width, WIDTH)
        tl.store(place, dk.to(joint_ptr.dtype.element_ty))
        tl.store(place + width, dv.to(joint_ptr.dtype.element_ty))
    if TAIL:
        columns = TILES * COLUMNS + tl.arange(0, TAIL)
        there = columns < S
        k = tl.load(_place(k_ptr, columns, k_row, WIDTH), mask=there[:, None], other=0.0)
        v = tl.load(_place(v_ptr, columns, v_row, WIDTH), mask=there[:, None], other=0.0)
        p = tl.exp2(tl.dot(q, tl.trans(k)) * scale - level[:, None])
        p = tl.where(there[None, :], p, 0.0)
        dq, dk, dv = _gradients(q, k, v, g, p, delta, dq, beta)
        place = _place(joint_ptr + width, columns, 3 * width, WIDTH)
        tl.store(place, dk.to(joint_ptr.dtype.element_ty), mask=there[:, None])
        tl.store(place + width, dv.to(joint_ptr.dtype.element_ty), mask=there[:, None])
    dq = (dq * beta).to(joint_ptr.dtype.element_ty)
    tl.store(_place(joint_ptr, rows, 3 * width, WIDTH), dq, mask=real[:, None])


@triton.jit
@no_type_check
def _gradients(q, k, v, g, p, delta, dq, beta):
    """Of all queries so far, and of one tile of keys and values."""
    dv = tl.dot(tl.trans(p.to(g.dtype)), g)
    ds = (p * (tl.dot(g, tl.trans(v)) - delta[:, None])).to(q.dtype)
    dk = tl.dot(tl.trans(ds), q) * beta
    return dq + tl.dot(ds, k), dk, dv
