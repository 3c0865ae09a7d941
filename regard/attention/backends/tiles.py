"""Attention of packed sequences in Triton, for short ones: several of them share a tile.

FlashAttention's kernel for variable lengths has a tile of 128 x 128 scores for each sequence, of
which sentences of 30 tokens use a twentieth. Here a tile holds neighbouring queries, whatever
sequences they belong to, and goes over the keys that any of them sees: each query has one range of
them. The backward pass goes over the keys' tiles in the same way.
"""

import math
from typing import Any, NamedTuple, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from regard.attention.backends import Call
from regard.attention.backends.flash import edges, sequences
from regard.attention.mask import Mask

LOG2E = math.log2(math.e)
NOTHING = tl.constexpr(-1e30)
"""The score of masked keys: finite, because it is subtracted from itself."""
FORWARD = {"ROWS": 64, "COLUMNS": 32, "num_warps": 4, "num_stages": 2}
QUERY_GRADIENT = FORWARD
KEY_GRADIENT = {"ROWS": 32, "COLUMNS": 32, "num_warps": 4, "num_stages": 2}
"""Queries and keys of a tile: the fastest of ten on an H200, for 70 and for 1,024 sentences."""


class Seen(NamedTuple):
    """For each query its range of keys, and for each key its range of queries; int32."""

    first: Tensor
    last: Tensor
    query_first: Tensor
    query_last: Tensor


def packed(call: Call) -> Tensor:
    """Sequences laid end to end, each attending to its own keys, causally if the mask says so."""
    query, key, value, mask, beta, bias, dropout = call
    assert mask is not None
    attended: Tensor = _Attention.apply(  # type: ignore[no-untyped-call]
        query.squeeze(0).transpose(0, 1),
        key.squeeze(0).transpose(0, 1),
        value.squeeze(0).transpose(0, 1),
        _seen(mask, query.device),
        beta,
    )
    return attended.transpose(0, 1).unsqueeze(0)


def _seen(mask: Mask, device: torch.device) -> Seen:
    def build() -> Seen:
        queries, sources = sequences(mask, 1, device)
        of_query, of_key = queries.sequence(), sources.sequence()
        begins, starts = queries.offsets, sources.offsets
        first, last = starts[of_query], starts[of_query + 1]
        query_first, query_last = begins[of_key], begins[of_key + 1]
        if edges(mask)[1] == 0:
            # The last query stands at the last key, and sees all.
            shift = starts.diff() - begins.diff()
            row = torch.arange(queries.total, device=device, dtype=torch.int32)
            column = torch.arange(sources.total, device=device, dtype=torch.int32)
            last = torch.minimum(last, first + row - begins[of_query] + shift[of_query] + 1)
            own = query_first + column - starts[of_key] - shift[of_key]
            query_first = torch.maximum(query_first, own)
        return Seen(*(edge.to(torch.int32) for edge in (first, last, query_first, query_last)))

    return mask.cached("tiles", device, build)


class _Attention(torch.autograd.Function):
    """Of tokens (T, H, K)."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, seen: Seen, beta: float
    ) -> Tensor:
        query, key, value = (dense(t) for t in (query, key, value))
        (T, H, K), (S, G, V) = query.shape, value.shape
        out = query.new_empty(T, H, V)
        sums = query.new_empty(H, T, dtype=torch.float32)
        _forward[(triton.cdiv(T, FORWARD["ROWS"]), H)](
            query, key, value, out, sums, seen.first, seen.last,
            *query.stride()[:2], *key.stride()[:2], *value.stride()[:2], *out.stride()[:2],
            T, S, H // G, beta * LOG2E, K, V,
            WIDTH=_power(K), DEPTH=_power(V), **FORWARD,
        )  # fmt: skip
        ctx.save_for_backward(query, key, value, out, sums, *seen)
        ctx.beta = beta
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, sums, *edges = ctx.saved_tensors
        seen, beta, grad = Seen(*edges), ctx.beta, dense(grads[0])
        (T, H, K), (S, G, V) = query.shape, value.shape
        d_query = query.new_empty(T, H, K)
        d_key, d_value = key.new_empty(S, G, K), value.new_empty(S, G, V)
        delta = torch.empty_like(sums)
        widths = {"WIDTH": _power(K), "DEPTH": _power(V)}
        _query_gradient[(triton.cdiv(T, QUERY_GRADIENT["ROWS"]), H)](
            query, key, value, out, grad, sums, delta, d_query, seen.first, seen.last,
            *query.stride()[:2], *key.stride()[:2], *value.stride()[:2], *grad.stride()[:2],
            T, S, H, H // G, beta, beta * LOG2E, K, V, **widths, **QUERY_GRADIENT,
        )  # fmt: skip
        _key_gradient[(triton.cdiv(S, KEY_GRADIENT["COLUMNS"]), G)](
            query, key, value, grad, sums, delta, d_key, d_value,
            seen.first, seen.last, seen.query_first, seen.query_last,
            *query.stride()[:2], *key.stride()[:2], *value.stride()[:2], *grad.stride()[:2],
            T, S, G, H // G, beta, beta * LOG2E, K, V, **widths, **KEY_GRADIENT,
        )  # fmt: skip
        return d_query, d_key, d_value, None, None


def _power(width: int) -> int:
    return max(16, triton.next_power_of_2(width))


def dense(tokens: Tensor) -> Tensor:
    """Tokens whose last axis is contiguous."""
    return tokens if tokens.stride(-1) == 1 else tokens.contiguous()


@triton.jit
@no_type_check
def _load(pointer, rows, row, across, real, width):
    """Rows of a matrix, zeros where they are not real or wider than it."""
    place = pointer + rows[:, None].to(tl.int64) * row + across[None, :]
    return tl.load(place, mask=real[:, None] & (across[None, :] < width), other=0.0)


@triton.jit
@no_type_check
def _forward(q_ptr, k_ptr, v_ptr, out_ptr, sums_ptr, first_ptr, last_ptr,
             q_row, q_head, k_row, k_head, v_row, v_head, out_row, out_head,
             T, S, group, scale, width, depth,
             WIDTH: tl.constexpr, DEPTH: tl.constexpr, ROWS: tl.constexpr,
             COLUMNS: tl.constexpr):  # fmt: skip
    h = tl.program_id(1)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    wide, deep = tl.arange(0, WIDTH), tl.arange(0, DEPTH)
    real = rows < T
    first = tl.load(first_ptr + rows, mask=real, other=S)
    last = tl.load(last_ptr + rows, mask=real, other=0)
    q = _load(q_ptr + h * q_head, rows, q_row, wide, real, width)
    k_ptr += (h // group) * k_head
    v_ptr += (h // group) * v_head
    peak = tl.full((ROWS,), NOTHING, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    sums = tl.zeros((ROWS, DEPTH), tl.float32)
    for begin in range(tl.min(first), tl.max(last), COLUMNS):
        columns = begin + tl.arange(0, COLUMNS)
        k = _load(k_ptr, columns, k_row, wide, columns < S, width)
        v = _load(v_ptr, columns, v_row, deep, columns < S, depth)
        seen = (columns[None, :] >= first[:, None]) & (columns[None, :] < last[:, None])
        scores = tl.where(seen, tl.dot(q, tl.trans(k)) * scale, NOTHING)
        higher = tl.maximum(peak, tl.max(scores, 1))
        p = tl.where(seen, tl.exp2(scores - higher[:, None]), 0.0)
        shrink = tl.exp2(peak - higher)
        total = total * shrink + tl.sum(p, 1)
        sums = sums * shrink[:, None] + tl.dot(p.to(v.dtype), v)
        peak = higher
    some = tl.where(total > 0, total, 1.0)
    place = out_ptr + rows[:, None].to(tl.int64) * out_row + h * out_head + deep[None, :]
    out = (sums / some[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(place, out, mask=real[:, None] & (deep[None, :] < depth))
    tl.store(sums_ptr + h * T + rows, peak + tl.log2(some), mask=real)


@triton.jit
@no_type_check
def _query_gradient(q_ptr, k_ptr, v_ptr, out_ptr, grad_ptr, sums_ptr, delta_ptr, dq_ptr,
                    first_ptr, last_ptr,
                    q_row, q_head, k_row, k_head, v_row, v_head, grad_row, grad_head,
                    T, S, H, group, beta, scale, width, depth,
                    WIDTH: tl.constexpr, DEPTH: tl.constexpr, ROWS: tl.constexpr,
                    COLUMNS: tl.constexpr):  # fmt: skip
    h = tl.program_id(1)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    wide, deep = tl.arange(0, WIDTH), tl.arange(0, DEPTH)
    real = rows < T
    first = tl.load(first_ptr + rows, mask=real, other=S)
    last = tl.load(last_ptr + rows, mask=real, other=0)
    level = tl.load(sums_ptr + h * T + rows, mask=real, other=0.0)
    q = _load(q_ptr + h * q_head, rows, q_row, wide, real, width)
    g = _load(grad_ptr + h * grad_head, rows, grad_row, deep, real, depth)
    out = _load(out_ptr + h * depth, rows, H * depth, deep, real, depth)
    delta = tl.sum(g.to(tl.float32) * out.to(tl.float32), 1)
    tl.store(delta_ptr + h * T + rows, delta, mask=real)
    k_ptr += (h // group) * k_head
    v_ptr += (h // group) * v_head
    dq = tl.zeros((ROWS, WIDTH), tl.float32)
    for begin in range(tl.min(first), tl.max(last), COLUMNS):
        columns = begin + tl.arange(0, COLUMNS)
        k = _load(k_ptr, columns, k_row, wide, columns < S, width)
        v = _load(v_ptr, columns, v_row, deep, columns < S, depth)
        seen = (columns[None, :] >= first[:, None]) & (columns[None, :] < last[:, None])
        scores = tl.dot(q, tl.trans(k)) * scale
        p = tl.where(seen, tl.exp2(tl.where(seen, scores, level[:, None]) - level[:, None]), 0.0)
        ds = p * (tl.dot(g, tl.trans(v)) - delta[:, None])
        dq += tl.dot(ds.to(k.dtype), k)
    place = dq_ptr + rows[:, None].to(tl.int64) * (H * width) + h * width + wide[None, :]
    dq = (dq * beta).to(dq_ptr.dtype.element_ty)
    tl.store(place, dq, mask=real[:, None] & (wide[None, :] < width))


@triton.jit
@no_type_check
def _key_gradient(q_ptr, k_ptr, v_ptr, grad_ptr, sums_ptr, delta_ptr, dk_ptr, dv_ptr,
                  first_ptr, last_ptr, query_first_ptr, query_last_ptr,
                  q_row, q_head, k_row, k_head, v_row, v_head, grad_row, grad_head,
                  T, S, G, group, beta, scale, width, depth,
                  WIDTH: tl.constexpr, DEPTH: tl.constexpr, ROWS: tl.constexpr,
                  COLUMNS: tl.constexpr):  # fmt: skip
    head = tl.program_id(1)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    wide, deep = tl.arange(0, WIDTH), tl.arange(0, DEPTH)
    real = columns < S
    start = tl.min(tl.load(query_first_ptr + columns, mask=real, other=T))
    stop = tl.max(tl.load(query_last_ptr + columns, mask=real, other=0))
    k = _load(k_ptr + head * k_head, columns, k_row, wide, real, width)
    v = _load(v_ptr + head * v_head, columns, v_row, deep, real, depth)
    dk = tl.zeros((COLUMNS, WIDTH), tl.float32)
    dv = tl.zeros((COLUMNS, DEPTH), tl.float32)
    for h in range(head * group, (head + 1) * group):
        for begin in range(start, stop, ROWS):
            rows = begin + tl.arange(0, ROWS)
            inside = rows < T
            first = tl.load(first_ptr + rows, mask=inside, other=S)
            last = tl.load(last_ptr + rows, mask=inside, other=0)
            level = tl.load(sums_ptr + h * T + rows, mask=inside, other=0.0)
            delta = tl.load(delta_ptr + h * T + rows, mask=inside, other=0.0)
            q = _load(q_ptr + h * q_head, rows, q_row, wide, inside, width)
            g = _load(grad_ptr + h * grad_head, rows, grad_row, deep, inside, depth)
            seen = (columns[:, None] >= first[None, :]) & (columns[:, None] < last[None, :])
            scores = tl.dot(k, tl.trans(q)) * scale
            p = tl.where(
                seen, tl.exp2(tl.where(seen, scores, level[None, :]) - level[None, :]), 0.0
            )
            dv += tl.dot(p.to(g.dtype), g)
            ds = p * (tl.dot(v, tl.trans(g)) - delta[None, :])
            dk += tl.dot(ds.to(q.dtype), q)
    rows = columns[:, None].to(tl.int64)
    place = dk_ptr + rows * (G * width) + head * width + wide[None, :]
    dk = (dk * beta).to(dk_ptr.dtype.element_ty)
    tl.store(place, dk, mask=real[:, None] & (wide[None, :] < width))
    place = dv_ptr + rows * (G * depth) + head * depth + deep[None, :]
    tl.store(
        place,
        dv.to(dv_ptr.dtype.element_ty),
        mask=real[:, None] & (deep[None, :] < depth),
    )
