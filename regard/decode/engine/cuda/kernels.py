"""Kernels of a decoding step on CUDA, in Triton. One program is one row, or one row and head.

A step has little to compute and much to launch: what torch does in several kernels, these do in
one. Keys and values are read where they lie: `table` (rows, columns) says which row of all that
were ever computed holds a row's position s.
"""

import math
from typing import Any, no_type_check

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2E = math.log2(math.e)


@triton.jit
@no_type_check
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
        values = tl.load(kept + D + at[:, None] + d[None, :], mask=real[:, None], other=0.0)
        scores = tl.where(real, tl.sum(q[None, :] * keys.to(tl.float32), 1), float("-inf"))
        high = tl.maximum(most, tl.max(scores, 0))
        p, fade = tl.exp2(scores - high), tl.exp2(most - high)
        sums = sums * fade + tl.sum(p[:, None] * values.to(tl.float32), 0)
        total = total * fade + tl.sum(p, 0)
        most = high
    tl.store(out + r.to(tl.int64) * D + h * K + d, (sums / total).to(v.dtype))


@triton.jit
@no_type_check
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
        value = tl.load(keys + D + at[:, None] + d[None, :], mask=real[:, None], other=0.0)
        scores = tl.where(real, tl.sum(q[None, :] * key.to(tl.float32), 1), float("-inf"))
        high = tl.maximum(most, tl.max(scores, 0))
        p, fade = tl.exp2(scores - high), tl.exp2(most - high)
        sums = sums * fade + tl.sum(p[:, None] * value.to(tl.float32), 0)
        total = total * fade + tl.sum(p, 0)
        most = high
    tl.store(out + r.to(tl.int64) * D + h * K + d, (sums / total).to(given.dtype))


@triton.jit
@no_type_check
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
        value = tl.load(keys + D + at[:, None] + d[None, :], mask=real[:, None], other=0.0)
        scores = tl.dot(q, tl.trans(key), input_precision="ieee") * beta
        scores = tl.where(real[None, :], scores, float("-inf"))
        high = tl.maximum(most, tl.max(scores, 1))
        p, fade = tl.exp2(scores - high[:, None]), tl.exp2(most - high)
        more = tl.dot(p.to(value.dtype), value, input_precision="ieee")
        sums = sums * fade[:, None] + more
        total = total * fade + tl.sum(p, 1)
        most = high
    to = out + rows[:, None] * D + h * K + d[None, :]
    tl.store(to, (sums / total[:, None]).to(q.dtype), mask=mine)


@triton.jit
@no_type_check
def _read_near(query, q_row, keys, kv_row, start, count, out, R, beta, D: tl.constexpr,
               K: tl.constexpr, BLOCK: tl.constexpr, EACH: tl.constexpr):  # fmt: skip
    """The same for EACH rows one after the other, whose stretches lie near to one another."""
    m, h = tl.program_id(0), tl.program_id(1)
    d, e = tl.arange(0, K), tl.arange(0, EACH)
    rows = (m * EACH + e).to(tl.int64)
    mine = rows < R
    at = rows[:, None] * q_row + h * K + d[None, :]
    q = tl.load(query + at, mask=mine[:, None], other=0.0)
    first = tl.load(start + rows, mask=mine, other=2**31)
    end = first + tl.load(count + rows, mask=mine, other=0)
    until = tl.max(tl.where(mine, end, 0), 0)
    most = tl.full((EACH,), float("-inf"), tl.float32)
    total = tl.zeros((EACH,), tl.float32)
    sums = tl.zeros((EACH, K), tl.float32)
    for begin in range(tl.min(first, 0), until, BLOCK):
        s = begin + tl.arange(0, BLOCK)
        place = s.to(tl.int64)[:, None] * kv_row + h * K + d[None, :]
        key = tl.load(keys + place, mask=s[:, None] < until, other=0.0)
        value = tl.load(keys + D + place, mask=s[:, None] < until, other=0.0)
        real = (s[None, :] >= first[:, None]) & (s[None, :] < end[:, None])
        scores = tl.dot(q, tl.trans(key), input_precision="ieee") * beta
        scores = tl.where(real, scores, float("-inf"))
        high = tl.maximum(most, tl.max(scores, 1))
        level = tl.where(high == float("-inf"), 0.0, high)  # nothing to read here yet
        p, fade = tl.exp2(scores - level[:, None]), tl.exp2(most - level)
        more = tl.dot(p.to(value.dtype), value, input_precision="ieee")
        sums = sums * fade[:, None] + more
        total = total * fade + tl.sum(p, 1)
        most = high
    to = out + rows[:, None] * D + h * K + d[None, :]
    total = tl.where(mine, total, 1.0)
    tl.store(to, (sums / total[:, None]).to(q.dtype), mask=mine[:, None])


@triton.jit
@no_type_check
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
@no_type_check
def _embed(tokens, table, places, time, out, scale, D, BLOCK: tl.constexpr):
    r = tl.program_id(0)
    d = tl.arange(0, BLOCK)
    real = d < D
    vector = tl.load(table + tl.load(tokens + r) * D + d, mask=real, other=0.0)
    scaled = (vector.to(tl.float32) * scale).to(vector.dtype)
    place = tl.load(places + tl.load(time) * D + d, mask=real, other=0.0)
    tl.store(out + r.to(tl.int64) * D + d, (scaled + place).to(vector.dtype), mask=real)


@triton.jit
@no_type_check
def _best(x, values, tokens, N, count, CHUNKS: tl.constexpr, LANES: tl.constexpr,
          EACH: tl.constexpr, AHEAD: tl.constexpr):  # fmt: skip
    """Every lane knows the largest of its logits; only the winner's has to look for its next.

    Of equals, the one further left. A lane has EACH logits side by side in every chunk.
    """
    r = tl.program_id(0).to(tl.int64)
    CHUNK: tl.constexpr = LANES * EACH
    NONE: tl.constexpr = CHUNKS * CHUNK
    lane, each, chunk = tl.arange(0, LANES), tl.arange(0, EACH), tl.arange(0, CHUNKS)
    peak = tl.full((LANES,), float("-inf"), tl.float32)
    place = tl.full((LANES,), NONE, tl.int32)
    total = tl.zeros((LANES,), tl.float32)
    for c in tl.range(0, CHUNKS, loop_unroll_factor=AHEAD):
        n = c * CHUNK + lane[:, None] * EACH + each[None, :]
        v = tl.load(x + r * N + n, mask=n < N, other=float("-inf")).to(tl.float32)
        high = tl.max(v, 1)
        first = tl.min(tl.where((v == high[:, None]) & (n < N), n, NONE), 1)
        place = tl.where((high > peak) | (place == NONE), first, place)
        more = tl.maximum(peak, high)
        level = tl.where(more == float("-inf"), 0.0, more)
        total = total * tl.exp(peak - level) + tl.sum(tl.exp(v - level[:, None]), 1)
        peak = more
    most = tl.max(peak, 0)
    log = most + tl.log(tl.sum(total * tl.exp(peak - most), 0))
    for i in range(count):
        best = tl.max(peak, 0)
        at = tl.minimum(tl.min(tl.where(peak == best, place, NONE), 0), N - 1)
        tl.store(values + r * count + i, best - log)
        tl.store(tokens + r * count + i, at.to(tl.int64))
        winner = at % CHUNK // EACH
        m = chunk[:, None] * CHUNK + winner * EACH + each[None, :]
        w = tl.load(x + r * N + m, mask=m < N, other=float("-inf")).to(tl.float32)
        # What was given already is larger, or as large and further left.
        left = ((w < best) | ((w == best) & (m > at))) & (m < N)
        rest = tl.max(tl.max(tl.where(left, w, float("-inf")), 1), 0)
        following = tl.min(tl.min(tl.where(left & (w == rest), m, NONE), 1), 0)
        peak = tl.where(lane == winner, rest, peak)
        place = tl.where(lane == winner, following, place)


@triton.jit
@no_type_check
def _search(values, tokens, k, opened, last, parents, said, gains, steps, scores, ends, lengths,
            slots, cut, over, most, least, penalty, largest, columns, banned, end, times, table,
            W: tl.constexpr, K: tl.constexpr, BANNED: tl.constexpr, EARLY: tl.constexpr,
            ROWS: tl.constexpr, RANKS: tl.constexpr, KEPT: tl.constexpr):  # fmt: skip
    """`Beams.advance` for one sentence, and the table of its rows."""
    b = tl.program_id(0).to(tl.int64)
    t = tl.load(times + b)
    count = tl.minimum(t + 1, columns - 2)
    full = t + 1 >= tl.load(most + b)
    was_over = tl.load(over + b) != 0

    # Every open hypothesis with each of its best tokens.
    ALL: tl.constexpr = ROWS * RANKS
    c = tl.arange(0, ALL)
    row, rank = c // RANKS, c % RANKS
    left = (row < W) & (rank < k)
    at = (b * W + row) * k + rank
    total = tl.load(values + at, mask=left, other=float("-inf"))
    token = tl.load(tokens + at, mask=left, other=-1)
    for n in tl.static_range(BANNED):
        total = tl.where(token == tl.load(banned + n), float("-inf"), total)
    if EARLY:
        total = tl.where((token == end) & (t < tl.load(least + b)), float("-inf"), total)
    total += tl.load(opened + b * W + row, mask=left, other=float("-inf"))
    total = tl.where(total == total, total, float("inf"))  # NaN is found, not overlooked

    # The best 2W of them; of equals, the first.
    i = tl.arange(0, 2 * ROWS)
    value = tl.full((2 * ROWS,), float("-inf"), tl.float32)
    index = tl.full((2 * ROWS,), ALL, tl.int32)
    for n in range(2 * W):
        high = tl.max(tl.where(left, total, float("-inf")), 0)
        first = tl.min(tl.where(left & (total == high), c, ALL), 0)
        value = tl.where(i == n, high, value)
        index = tl.where(i == n, first, index)
        left = left & (c != first)
    some = index < ALL
    index = tl.where(some, index, 0)
    parent = index // RANKS
    at = (b * W + parent) * k + index % RANKS
    gain = tl.load(values + at)
    token = tl.load(tokens + at)
    ended = some & (token == end)
    stays = ~ended & (i < 2 * W)
    slot = tl.cumsum(stays.to(tl.int32), 0) - 1

    # Those finished before, best first, and those that end or are cut now; of equals, the first.
    final = (ended | full) & ~was_over & (i < W)
    new = tl.where(final, tl.div_rn(value, tl.load(penalty + count)), float("-inf"))
    o = tl.arange(0, KEPT)
    kept, to = o < K, b * K + o
    old = tl.load(scores + to, mask=kept, other=float("-inf"))
    old = tl.where(old == old, old, float("inf"))
    old_end = tl.load(ends + to, mask=kept, other=0.0)
    old_length = tl.load(lengths + to, mask=kept, other=0)
    old_slot = tl.load(slots + to, mask=kept, other=0)
    old_cut = tl.load(cut + to, mask=kept, other=0)
    new_rank = tl.sum((kept[:, None] & (old[:, None] >= new[None, :])).to(tl.int32), 0)
    before = (new[:, None] > new[None, :]) | (
        (new[:, None] == new[None, :]) & (i[:, None] < i[None, :])
    )
    new_rank += tl.sum(before.to(tl.int32), 0)
    old_rank = o + tl.sum((new[:, None] > old[None, :]).to(tl.int32), 0)
    old_stays, new_stays = kept & (old_rank < K), new_rank < K

    # The best W that go on.
    s = tl.arange(0, ROWS)
    real = s < W
    here = stays[None, :] & (slot[None, :] == s[:, None])
    opens = tl.sum(tl.where(here, value[None, :], 0.0), 1)
    from_row = tl.sum(tl.where(here, parent[None, :], 0), 1)
    next_token = tl.sum(tl.where(here, token[None, :], 0), 1)
    next_gain = tl.sum(tl.where(here, gain[None, :], 0.0), 1)

    # Over where no open one can come before the last of those wanted.
    future = tl.max(tl.where(real, opens, float("-inf")), 0)
    future = tl.div_rn(future, tl.load(largest + b * columns + count + 1))
    worst = tl.sum(tl.where(kept & (old_rank == K - 1), old, 0.0), 0)
    worst += tl.sum(tl.where(new_rank == K - 1, new, 0.0), 0)
    is_over = was_over | full | (worst >= future)
    if W == 1:
        is_over = is_over | (worst > float("-inf"))

    tl.debug_barrier()  # all has been read
    old = tl.where(old == float("inf"), float("nan"), old)
    new = tl.where(new == float("inf"), float("nan"), new)
    opens = tl.where(opens == float("inf"), float("nan"), opens)
    to = b * K + old_rank
    tl.store(scores + to, old, mask=old_stays)
    tl.store(ends + to, old_end, mask=old_stays)
    tl.store(lengths + to, old_length, mask=old_stays)
    tl.store(slots + to, old_slot, mask=old_stays)
    tl.store(cut + to, old_cut, mask=old_stays)
    to = b * K + new_rank
    tl.store(scores + to, new, mask=new_stays)
    tl.store(ends + to, gain, mask=new_stays)
    tl.store(lengths + to, tl.where(ended, t, t + 1), mask=new_stays)
    tl.store(slots + to, tl.where(ended, parent, slot).to(tl.int64), mask=new_stays)
    tl.store(cut + to, ~ended, mask=new_stays)
    tl.store(over + b, is_over)
    tl.store(opened + b * W + s, opens, mask=real)
    tl.store(last + b * W + s, next_token, mask=real)
    to = (b * steps + t) * W + s
    tl.store(parents + to, from_row.to(tl.int64), mask=real)
    tl.store(said + to, next_token, mask=real)
    tl.store(gains + to, next_gain, mask=real)
    tl.store(times + b, t + 1)
    for begin in range(0, t + 1, 32):
        column = begin + tl.arange(0, 32)
        both = real[:, None] & (column[None, :] <= t)
        theirs = (b * W + from_row)[:, None] * steps + column[None, :]
        numbers = tl.load(table + theirs, mask=both, other=0)
        tl.debug_barrier()
        ours = (b * W + s)[:, None] * steps + column[None, :]
        tl.store(table + ours, numbers, mask=both)


@triton.jit
@no_type_check
def _told(parents, said, gains, steps, scores, ends, lengths, slots, cut, out, W, K):
    """The way back of one finished hypothesis, in a row with all else that is to be told of it."""
    p = tl.program_id(0).to(tl.int64)
    n, slot = tl.load(lengths + p), tl.load(slots + p)
    to = out + p * (4 + 2 * steps)
    tl.store(to, tl.load(scores + p).to(tl.int32, bitcast=True))
    tl.store(to + 1, tl.load(ends + p).to(tl.int32, bitcast=True))
    tl.store(to + 2, n.to(tl.int32))
    tl.store(to + 3, tl.load(cut + p).to(tl.int32))
    for i in range(n):
        place = n - 1 - i
        at = (p // K * steps + place) * W + slot
        tl.store(to + 4 + place, tl.load(said + at).to(tl.int32))
        tl.store(to + 4 + steps + place, tl.load(gains + at).to(tl.int32, bitcast=True))
        slot = tl.load(parents + at)


def best(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """log p of the likeliest tokens of each row, best first, and which they are."""
    R, N = logits.shape
    values = torch.empty(R, count, dtype=torch.float32, device=logits.device)
    tokens = torch.empty(R, count, dtype=torch.int64, device=logits.device)
    block, each = max(64, triton.next_power_of_2(N)), 8
    lanes = min(256, block // each)
    chunks = block // (lanes * each)
    # So few that registers leave room for many rows at once.
    sizes = {"CHUNKS": chunks, "LANES": lanes, "EACH": each, "AHEAD": min(chunks, 4)}
    _best[(R,)](logits.contiguous(), values, tokens, N, count, **sizes, num_warps=8)
    return values, tokens


def search(
    found: tuple[Tensor, Tensor], beams: Any, least: Tensor | None, times: Tensor, table: Tensor
) -> None:
    """One step of `Beams`, in place, from the best tokens of each row; the table goes along.

    `least`: before how many tokens none may end. `times`: each sentence's step, which goes on.
    """
    values, tokens = found
    limits, W, K = beams.limits, beams.width, beams.scores.shape[1]
    k, steps = values.shape[1], table.shape[1]
    rows, ranks = triton.next_power_of_2(W), triton.next_power_of_2(k)
    path = (beams.open, beams.last, beams.parents, beams.tokens, beams.gains, steps)
    pool = (beams.scores, beams.ends, beams.lengths, beams.slots, beams.cut, beams.over)
    bounds = (limits.most, limits.most if least is None else least)
    lengths = (beams.penalty, beams.largest, beams.largest.shape[1])
    given = (values, tokens, k, *path, *pool, *bounds, *lengths, limits._banned, limits.end)
    sizes = {"W": W, "K": K, "BANNED": len(limits.banned), "EARLY": least is not None}
    sizes |= {"ROWS": rows, "RANKS": ranks, "KEPT": triton.next_power_of_2(K)}
    warps = 1 if rows * ranks <= 256 else 4
    _search[(len(times),)](*given, times, table, **sizes, num_warps=warps)


def told(beams: Any, sentences: int) -> list[list[Any]]:
    """Of what the first sentences have finished: scores, ends, lengths, cuts, words, and log p."""
    (_, T, W), K = beams.parents.shape, beams.scores.shape[1]
    out = torch.zeros(sentences, K, 4 + 2 * T, dtype=torch.int32, device=beams.scores.device)
    path, pool = (beams.parents, beams.tokens, beams.gains, T), (beams.scores, beams.ends)
    given = (*path, *pool, beams.lengths, beams.slots, beams.cut, out, W, K)
    _told[(sentences * K,)](*given, num_warps=1)
    whole = out.cpu().numpy()  # in one copy
    real = whole.view(np.float32)
    words, logs = whole[..., 4 : 4 + T], real[..., 4 + T :]
    parts = (real[..., 0], real[..., 1], whole[..., 2], whole[..., 3], words, logs)
    return [part.tolist() for part in parts]


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
    sizes = {"D": D, "K": D // heads, "BLOCK": 16, "PARTNER": partner}
    _own[(R, heads)](*given, beta * LOG2E, **sizes, num_warps=1)
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
    sizes = {"D": width, "K": width // heads}
    if each == 1:
        _read[(R, heads)](*given, beta * LOG2E, **sizes, BLOCK=32, num_warps=2)
    else:
        sizes |= {"BLOCK": 16, "EACH": max(16, triton.next_power_of_2(each))}  # a product's least
        _read_together[(R // each, heads)](*given, each, beta * LOG2E, **sizes, num_warps=1)
    return out


def read_near(
    query: Tensor, keys: Tensor, start: Tensor, count: Tensor, heads: int, beta: float, width: int
) -> Tensor:
    """The same where rows that follow one another read nearly the same stretches, if not equal."""
    R = len(query)
    out = torch.empty(R, width, dtype=query.dtype, device=query.device)
    given = (query, query.stride(0), keys, keys.stride(0), start, count, out, R, beta * LOG2E)
    sizes = {"D": width, "K": width // heads, "BLOCK": 32, "EACH": 32}
    _read_near[(triton.cdiv(R, 32), heads)](*given, **sizes, num_warps=4)
    return out
