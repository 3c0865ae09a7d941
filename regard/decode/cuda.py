"""Kernels of a decoding step on CUDA, in Triton. One program is one row, or one row and head.

A step has little to compute and much to launch: what torch does in several kernels, these do in
one. Keys and values are read where they lie: `table` (rows, columns) says which row of all that
were ever computed holds a row's position s.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2E = math.log2(math.e)


@triton.jit
def _own(qkv, kept, table, time, out, turn, R, columns, beta, D: tl.constexpr, K: tl.constexpr,
         BLOCK: tl.constexpr, PARTNER: tl.constexpr):  # fmt: skip
    """Keeps a row's new key and value, and attends to them and to those before."""
    r, h = tl.program_id(0), tl.program_id(1)
    t = tl.load(time)
    d = tl.arange(0, K)
    row = qkv + r.to(tl.int64) * 3 * D + h * K
    q = tl.load(row + d).to(tl.float32)
    k = tl.load(row + D + d).to(tl.float32)
    v = tl.load(row + 2 * D + d)
    if PARTNER > 0:
        other = d ^ 1 if PARTNER == 1 else (d + K // 2) % K
        cos, sin = tl.load(turn + t * 2 * K + d), tl.load(turn + (t * 2 + 1) * K + d)
        q = q * cos + tl.load(row + other).to(tl.float32) * sin
        k = k * cos + tl.load(row + D + other).to(tl.float32) * sin
    k = k.to(v.dtype)
    number = t * R + r
    to = kept + number.to(tl.int64) * 2 * D + h * K
    tl.store(to + d, k)
    tl.store(to + D + d, v)
    if h == 0:
        tl.store(table + r * columns + t, number.to(tl.int32))
    q = q.to(v.dtype).to(tl.float32) * beta
    most = tl.sum(q * k.to(tl.float32), 0)
    total = 1.0
    sums = v.to(tl.float32)
    for begin in range(0, t, BLOCK):
        s = begin + tl.arange(0, BLOCK)
        real = s < t
        at = tl.load(table + r * columns + s, mask=real, other=0).to(tl.int64) * 2 * D + h * K
        keys = tl.load(kept + at[:, None] + d[None, :], mask=real[:, None], other=0.0)
        scores = tl.where(real, tl.sum(q[None, :] * keys.to(tl.float32), 1), float("-inf"))
        high = tl.maximum(most, tl.max(scores, 0))
        p, fade = tl.exp2(scores - high), tl.exp2(most - high)
        values = tl.load(kept + D + at[:, None] + d[None, :], mask=real[:, None], other=0.0)
        sums = sums * fade + tl.sum(p[:, None] * values.to(tl.float32), 0)
        total = total * fade + tl.sum(p, 0)
        most = high
    tl.store(out + r.to(tl.int64) * D + h * K + d, (sums / total).to(v.dtype))


@triton.jit
def _read(query, q_row, keys, kv_row, start, count, out, beta, D: tl.constexpr, K: tl.constexpr,
          BLOCK: tl.constexpr):  # fmt: skip
    """Attends to `count` rows from `start` on."""
    r, h = tl.program_id(0), tl.program_id(1)
    d = tl.arange(0, K)
    given = tl.load(query + r.to(tl.int64) * q_row + h * K + d)
    q = given.to(tl.float32) * beta
    first, n = tl.load(start + r), tl.load(count + r)
    most = float("-inf")
    total = 0.0
    sums = tl.zeros((K,), tl.float32)
    for begin in range(0, n, BLOCK):
        s = begin + tl.arange(0, BLOCK)
        real = s < n
        at = (first + s).to(tl.int64) * kv_row + h * K
        key = tl.load(keys + at[:, None] + d[None, :], mask=real[:, None], other=0.0)
        scores = tl.where(real, tl.sum(q[None, :] * key.to(tl.float32), 1), float("-inf"))
        high = tl.maximum(most, tl.max(scores, 0))
        p, fade = tl.exp2(scores - high), tl.exp2(most - high)
        value = tl.load(keys + D + at[:, None] + d[None, :], mask=real[:, None], other=0.0)
        sums = sums * fade + tl.sum(p[:, None] * value.to(tl.float32), 0)
        total = total * fade + tl.sum(p, 0)
        most = high
    tl.store(out + r.to(tl.int64) * D + h * K + d, (sums / total).to(given.dtype))


@triton.jit
def _read_together(query, q_row, keys, kv_row, start, count, out, each, beta, D: tl.constexpr,
                   K: tl.constexpr, BLOCK: tl.constexpr, EACH: tl.constexpr):  # fmt: skip
    """The same for `each` rows one after the other, which read the same: a product of matrices."""
    m, h = tl.program_id(0), tl.program_id(1)
    d, e = tl.arange(0, K), tl.arange(0, EACH)
    rows = (m * each + e).to(tl.int64)
    mine = e[:, None] < each
    q = tl.load(query + rows[:, None] * q_row + h * K + d[None, :], mask=mine, other=0.0)
    first, n = tl.load(start + m), tl.load(count + m)
    most = tl.full((EACH,), float("-inf"), tl.float32)
    total = tl.zeros((EACH,), tl.float32)
    sums = tl.zeros((EACH, K), tl.float32)
    for begin in range(0, n, BLOCK):
        s = begin + tl.arange(0, BLOCK)
        real = s < n
        at = (first + s).to(tl.int64) * kv_row + h * K
        key = tl.load(keys + at[:, None] + d[None, :], mask=real[:, None], other=0.0)
        scores = tl.dot(q, tl.trans(key), input_precision="ieee") * beta
        scores = tl.where(real[None, :], scores, float("-inf"))
        high = tl.maximum(most, tl.max(scores, 1))
        p, fade = tl.exp2(scores - high[:, None]), tl.exp2(most - high)
        value = tl.load(keys + D + at[:, None] + d[None, :], mask=real[:, None], other=0.0)
        more = tl.dot(p.to(value.dtype), value, input_precision="ieee")
        sums = sums * fade[:, None] + more
        total = total * fade + tl.sum(p, 1)
        most = high
    to = out + rows[:, None] * D + h * K + d[None, :]
    tl.store(to, (sums / total[:, None]).to(q.dtype), mask=mine)


@triton.jit
def _add_norm(x, y, gain, shift, summed, normed, epsilon, D, BLOCK: tl.constexpr):
    r = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    real = d < D
    given = tl.load(x + r * D + d, mask=real, other=0.0)
    # Rounded as torch's own sum would be.
    both = (given + tl.load(y + r * D + d, mask=real, other=0.0)).to(given.dtype)
    tl.store(summed + r * D + d, both, mask=real)
    z = both.to(tl.float32)
    z = tl.where(real, z - tl.sum(z, 0) / D, 0.0)
    z = z * tl.rsqrt(tl.sum(z * z, 0) / D + epsilon)
    g = tl.load(gain + d, mask=real, other=0.0).to(tl.float32)
    b = tl.load(shift + d, mask=real, other=0.0).to(tl.float32)
    tl.store(normed + r * D + d, (z * g + b).to(given.dtype), mask=real)


@triton.jit
def _embed(tokens, table, places, time, out, scale, D, BLOCK: tl.constexpr):
    r = tl.program_id(0)
    d = tl.arange(0, BLOCK)
    real = d < D
    vector = tl.load(table + tl.load(tokens + r) * D + d, mask=real, other=0.0)
    scaled = (vector.to(tl.float32) * scale).to(vector.dtype)
    place = tl.load(places + tl.load(time) * D + d, mask=real, other=0.0)
    tl.store(out + r.to(tl.int64) * D + d, (scaled + place).to(vector.dtype), mask=real)


@triton.jit
def _best(x, values, tokens, N, count, BLOCK: tl.constexpr, LANES: tl.constexpr):
    """Each of the LANES holds a stretch of the row; only the winner's has to look for its next."""
    r = tl.program_id(0).to(tl.int64)
    DEPTH: tl.constexpr = BLOCK // LANES
    lane, depth = tl.arange(0, LANES), tl.arange(0, DEPTH)
    n = lane[:, None] * DEPTH + depth[None, :]
    v = tl.load(x + r * N + n, mask=n < N, other=float("-inf")).to(tl.float32)
    peaks = tl.max(v, 1)
    most = tl.max(peaks, 0)
    log = most + tl.log(tl.sum(tl.sum(tl.exp(v - most), 1), 0))
    before, last = float("inf"), -1
    for i in range(count):
        high = tl.max(peaks, 0)
        best_lane = tl.min(tl.where(peaks == high, lane, LANES - 1), 0)
        place = best_lane * DEPTH + depth
        inside = tl.load(x + r * N + place, mask=place < N, other=float("-inf")).to(tl.float32)
        # What was given already is larger, or as large and further left.
        left = (inside < before) | ((inside == before) & (place > last))
        at = tl.min(tl.where((inside == high) & left, place, N - 1), 0)
        tl.store(values + r * count + i, high - log)
        tl.store(tokens + r * count + i, at.to(tl.int64))
        gone = (inside > high) | ((inside == high) & (place <= at))
        rest = tl.max(tl.where(gone, float("-inf"), inside), 0)
        peaks = tl.where(lane == best_lane, rest, peaks)
        before, last = high, at


def best(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """log p of the likeliest tokens of each row, best first, and which they are."""
    R, N = logits.shape
    values = torch.empty(R, count, dtype=torch.float32, device=logits.device)
    tokens = torch.empty(R, count, dtype=torch.int64, device=logits.device)
    block = triton.next_power_of_2(N)
    sizes = {"BLOCK": block, "LANES": min(128, block)}
    _best[(R,)](logits.contiguous(), values, tokens, N, count, **sizes, num_warps=8)
    return values, tokens


def embed(tokens: Tensor, table: Tensor, places: Tensor, time: Tensor, scale: float) -> Tensor:
    """√D E[token] + r_t for each row's one token."""
    D = table.shape[1]
    out = torch.empty(len(tokens), D, dtype=table.dtype, device=table.device)
    block = triton.next_power_of_2(D)
    _embed[(len(tokens),)](tokens, table, places, time, out, scale, D, BLOCK=block)
    return out


def add_norm(x: Tensor, y: Tensor, norm: Any) -> tuple[Tensor, Tensor]:
    """x + y, and its LayerNorm."""
    summed, normed = torch.empty_like(x), torch.empty_like(x)
    R, D = x.shape
    block = triton.next_power_of_2(D)
    given = (x, y, norm.weight, norm.bias, summed, normed, norm.eps, D)
    _add_norm[(R,)](*given, BLOCK=block, num_warps=4)
    return summed, normed


def own(
    qkv: Tensor,
    kept: Tensor,
    table: Tensor,
    time: Tensor,
    heads: int,
    beta: float,
    turn: Tensor | None,
    partner: int,
) -> Tensor:
    """Self-attention of one new token in each row."""
    R, D = len(qkv), qkv.shape[1] // 3
    out = torch.empty(R, D, dtype=qkv.dtype, device=qkv.device)
    given = (qkv, kept, table, time, out, qkv if turn is None else turn, R, table.shape[1])
    sizes = {"D": D, "K": D // heads, "BLOCK": 32, "PARTNER": partner}
    _own[(R, heads)](*given, beta * LOG2E, **sizes, num_warps=2)
    return out


def read(
    query: Tensor,
    keys: Tensor,
    start: Tensor,
    count: Tensor,
    heads: int,
    beta: float,
    each: int,
    width: int,
) -> Tensor:
    """Attention of each row to a stretch of rows, which hold keys and then values."""
    R = len(query)
    out = torch.empty(R, width, dtype=query.dtype, device=query.device)
    given = (query, query.stride(0), keys, keys.stride(0), start, count, out)
    sizes = {"D": width, "K": width // heads, "BLOCK": 32}
    if each == 1:
        _read[(R, heads)](*given, beta * LOG2E, **sizes, num_warps=2)
    else:
        sizes["EACH"] = max(16, triton.next_power_of_2(each))  # no fewer rows in a product
        _read_together[(R // each, heads)](*given, each, beta * LOG2E, **sizes, num_warps=2)
    return out
