"""Kernels of a decoding step on CUDA, in Triton. One program is one row, or one row and head.

A step has little to compute and much to launch: what torch does in several kernels, these do in
one. They are worth their lines: on an H200 a captured step of the base Transformer's modules alone
takes 1.9 times as long with one sentence, 2.6 times with 512, a language model's 3.5 times with 64.

Keys and values of a block lie in slots: (slots, G (K + V)), the keys of all key heads and then
the values. `table` (R, columns) says which slot holds position s of row r, so that reordering beams
moves no keys or values.
"""

import math
from typing import Any, no_type_check

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor, nn

LOG2E = math.log2(math.e)


# Attention


@triton.jit
@no_type_check
def _self_attention(qkv, cached, table, filled, out, turns, partners, R, columns, window, beta,
                    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
                    ROTARY: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Caches a row's new key and value, and attends to them and to `window` before."""
    r, h = tl.program_id(0), tl.program_id(1)
    g = h // (H // G)
    KV: tl.constexpr = G * (K + V)
    t = tl.load(filled + r)
    i, j = tl.arange(0, K), tl.arange(0, V)
    row = qkv + r.to(tl.int64) * (H * K + KV)
    keys = row + H * K + g * K
    value = tl.load(row + H * K + G * K + g * V + j)
    q = tl.load(row + h * K + i).to(tl.float32)
    k = tl.load(keys + i).to(tl.float32)
    if ROTARY:
        other = tl.load(partners + i)
        cos, sin = tl.load(turns + t * 2 * K + i), tl.load(turns + (t * 2 + 1) * K + i)
        q = q * cos + tl.load(row + h * K + other).to(tl.float32) * sin
        k = k * cos + tl.load(keys + other).to(tl.float32) * sin
    key = k.to(value.dtype)
    slot = t * R + r
    if h % (H // G) == 0:
        to = cached + slot.to(tl.int64) * KV
        tl.store(to + g * K + i, key)
        tl.store(to + G * K + g * V + j, value)
    if h == 0:
        tl.store(table + r * columns + t, slot.to(tl.int32))
    q = q.to(value.dtype).to(tl.float32) * beta
    most = tl.sum(q * key.to(tl.float32), 0)
    total = 1.0
    sums = value.to(tl.float32)
    first = tl.maximum(0, t - window)
    for begin in range(first, t, BLOCK):
        s = begin + tl.arange(0, BLOCK)
        real = s < t
        at = tl.load(table + r * columns + s, mask=real, other=0).to(tl.int64)[:, None] * KV
        some = tl.load(cached + at + g * K + i[None, :], mask=real[:, None], other=0.0)
        values = tl.load(cached + at + G * K + g * V + j[None, :], mask=real[:, None], other=0.0)
        scores = tl.where(real, tl.sum(q[None, :] * some.to(tl.float32), 1), float("-inf"))
        high = tl.maximum(most, tl.max(scores, 0))
        p, fade = tl.exp2(scores - high), tl.exp2(most - high)
        sums = sums * fade + tl.sum(p[:, None] * values.to(tl.float32), 0)
        total = total * fade + tl.sum(p, 0)
        most = high
    tl.store(out + r.to(tl.int64) * H * V + h * V + j, (sums / total).to(value.dtype))


@triton.jit
@no_type_check
def _cross_attention(query, memory, start, count, out, beta, H: tl.constexpr, G: tl.constexpr,
                     K: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Attends to `count` places of the memory, from `start` on."""
    r, h = tl.program_id(0), tl.program_id(1)
    g = h // (H // G)
    KV: tl.constexpr = G * (K + V)
    i, j = tl.arange(0, K), tl.arange(0, V)
    given = tl.load(query + r.to(tl.int64) * H * K + h * K + i)
    q = given.to(tl.float32) * beta
    first, n = tl.load(start + r), tl.load(count + r)
    most = float("-inf")
    total = 0.0
    sums = tl.zeros((V,), tl.float32)
    for begin in range(0, n, BLOCK):
        s = begin + tl.arange(0, BLOCK)
        real = s < n
        at = (first + s).to(tl.int64)[:, None] * KV
        key = tl.load(memory + at + g * K + i[None, :], mask=real[:, None], other=0.0)
        value = tl.load(memory + at + G * K + g * V + j[None, :], mask=real[:, None], other=0.0)
        scores = tl.where(real, tl.sum(q[None, :] * key.to(tl.float32), 1), float("-inf"))
        high = tl.maximum(most, tl.max(scores, 0))
        p, fade = tl.exp2(scores - high), tl.exp2(most - high)
        sums = sums * fade + tl.sum(p[:, None] * value.to(tl.float32), 0)
        total = total * fade + tl.sum(p, 0)
        most = high
    # A source of no places is read as zeros.
    sums = tl.where(n > 0, sums / total, 0.0)
    tl.store(out + r.to(tl.int64) * H * V + h * V + j, sums.to(given.dtype))


@triton.jit
@no_type_check
def _cross_attention_of_beams(query, memory, start, count, out, beams, beta, H: tl.constexpr,
                              G: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
                              BLOCK: tl.constexpr, BEAMS: tl.constexpr):  # fmt: skip
    """The same for `beams` rows one after the other that read one source: a matrix product."""
    m, h = tl.program_id(0), tl.program_id(1)
    g = h // (H // G)
    KV: tl.constexpr = G * (K + V)
    i, j, e = tl.arange(0, K), tl.arange(0, V), tl.arange(0, BEAMS)
    rows = (m * beams + e).to(tl.int64)
    mine = e[:, None] < beams
    q = tl.load(query + rows[:, None] * H * K + h * K + i[None, :], mask=mine, other=0.0)
    first, n = tl.load(start + m * beams), tl.load(count + m * beams)
    most = tl.full((BEAMS,), float("-inf"), tl.float32)
    total = tl.zeros((BEAMS,), tl.float32)
    sums = tl.zeros((BEAMS, V), tl.float32)
    for begin in range(0, n, BLOCK):
        s = begin + tl.arange(0, BLOCK)
        real = s < n
        at = (first + s).to(tl.int64)[:, None] * KV
        key = tl.load(memory + at + g * K + i[None, :], mask=real[:, None], other=0.0)
        value = tl.load(memory + at + G * K + g * V + j[None, :], mask=real[:, None], other=0.0)
        scores = tl.dot(q, tl.trans(key), input_precision="ieee") * beta
        scores = tl.where(real[None, :], scores, float("-inf"))
        high = tl.maximum(most, tl.max(scores, 1))
        p, fade = tl.exp2(scores - high[:, None]), tl.exp2(most - high)
        more = tl.dot(p.to(value.dtype), value, input_precision="ieee")
        sums = sums * fade[:, None] + more
        total = total * fade + tl.sum(p, 1)
        most = high
    sums = tl.where(n > 0, sums / total[:, None], 0.0)
    tl.store(out + rows[:, None] * H * V + h * V + j[None, :], sums.to(q.dtype), mask=mine)


def self_attention(
    qkv: Tensor,
    cached: Tensor,
    table: Tensor,
    filled: Tensor,
    sizes: tuple[int, int, int, int],
    beta: float,
    rotary: tuple[Tensor, Tensor] | None,
    window: int | None,
) -> Tensor:
    """Of one new token in each row; `sizes` are heads, key heads, key width and value width."""
    R, H, V = len(qkv), sizes[0], sizes[3]
    out = torch.empty(R, H * V, dtype=qkv.dtype, device=qkv.device)
    turns, partners = (qkv, qkv) if rotary is None else rotary
    columns = table.shape[1]
    reach = columns if window is None else window
    given = (qkv, cached, table, filled, out, turns, partners, R, columns, reach, beta * LOG2E)
    _self_attention[(R, H)](*given, *sizes, ROTARY=rotary is not None, BLOCK=16, num_warps=1)
    return out


def cross_attention(
    query: Tensor,
    memory: Tensor,
    start: Tensor,
    count: Tensor,
    sizes: tuple[int, int, int, int],
    beta: float,
    beams: int,
) -> Tensor:
    """Of each row to its places of the memory, which `beams` rows in turn have in common."""
    R, H, V = len(query), sizes[0], sizes[3]
    out = torch.empty(R, H * V, dtype=query.dtype, device=query.device)
    given = (query, memory, start, count, out)
    if beams == 1:
        _cross_attention[(R, H)](*given, beta * LOG2E, *sizes, BLOCK=32, num_warps=2)
    else:
        least = max(16, triton.next_power_of_2(beams))  # of a product's rows
        grid = (R // beams, H)
        _cross_attention_of_beams[grid](
            *given, beams, beta * LOG2E, *sizes, BLOCK=16, BEAMS=least, num_warps=1
        )
    return out


# Around attention


@triton.jit
@no_type_check
def _add_norm(x, y, gain, shift, out, epsilon, D, BLOCK: tl.constexpr):
    r = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    real = d < D
    given = tl.load(x + r * D + d, mask=real, other=0.0)
    # Rounded as torch's own sum would be.
    both = (given + tl.load(y + r * D + d, mask=real, other=0.0)).to(given.dtype)
    z = both.to(tl.float32)
    z = tl.where(real, z - tl.sum(z, 0) / D, 0.0)
    z = z * tl.rsqrt(tl.sum(z * z, 0) / D + epsilon)
    g = tl.load(gain + d, mask=real, other=0.0).to(tl.float32)
    b = tl.load(shift + d, mask=real, other=0.0).to(tl.float32)
    tl.store(out + r * D + d, (z * g + b).to(given.dtype), mask=real)


def add_norm(x: Tensor, y: Tensor, norm: nn.LayerNorm) -> Tensor:
    """LayerNorm(x + y)."""
    out, D = torch.empty_like(x, memory_format=torch.contiguous_format), x.shape[-1]
    given = (x.contiguous(), y.contiguous(), norm.weight, norm.bias, out, norm.eps, D)
    _add_norm[(x.numel() // D,)](*given, BLOCK=triton.next_power_of_2(D), num_warps=4)
    return out


@triton.jit
@no_type_check
def _swiglu(x, out, F, BLOCK: tl.constexpr):
    r = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = f < F
    given = tl.load(x + r * 2 * F + f, mask=real, other=0.0)
    gate = given.to(tl.float32)
    # Rounded as torch rounds the activation before the product.
    gate = (gate / (1.0 + tl.exp(-gate))).to(given.dtype).to(tl.float32)
    value = tl.load(x + r * 2 * F + F + f, mask=real, other=0.0).to(tl.float32)
    tl.store(out + r * F + f, (gate * value).to(given.dtype), mask=real)


def swiglu(x: Tensor) -> Tensor:
    """silu(a) ⊙ b of rows [a; b]."""
    F = x.shape[-1] // 2
    out = torch.empty(*x.shape[:-1], F, dtype=x.dtype, device=x.device)
    _swiglu[(x.numel() // (2 * F), triton.cdiv(F, 1024))](x, out, F, BLOCK=1024)
    return out


@triton.jit
@no_type_check
def _embed(tokens, vectors, places, filled, out, scale, D, BLOCK: tl.constexpr):
    r = tl.program_id(0)
    d = tl.arange(0, BLOCK)
    real = d < D
    vector = tl.load(vectors + tl.load(tokens + r) * D + d, mask=real, other=0.0)
    scaled = (vector.to(tl.float32) * scale).to(vector.dtype)
    place = tl.load(places + tl.load(filled + r) * D + d, mask=real, other=0.0)
    tl.store(out + r.to(tl.int64) * D + d, (scaled + place).to(vector.dtype), mask=real)


def embed(tokens: Tensor, vectors: Tensor, places: Tensor, filled: Tensor, scale: float) -> Tensor:
    """√D E[token] + r_n, for the one token of each row and its position n."""
    D = vectors.shape[1]
    out = torch.empty(len(tokens), D, dtype=vectors.dtype, device=vectors.device)
    block = triton.next_power_of_2(D)
    _embed[(len(tokens),)](tokens, vectors, places, filled, out, scale, D, BLOCK=block)
    return out


# Search


@triton.jit
@no_type_check
def _allowed(v, n, hidden, end, early, N, BANNED: tl.constexpr, EARLY: tl.constexpr):
    if BANNED:
        v = tl.where(tl.load(hidden + n, mask=n < N, other=1) != 0, float("-inf"), v)
    if EARLY:
        v = tl.where((n == end) & early, float("-inf"), v)
    return v


@triton.jit
@no_type_check
def _best(x, values, tokens, N, count, hidden, end, least, times, each, BANNED: tl.constexpr,
          EARLY: tl.constexpr, RENORMALIZE: tl.constexpr, CHUNKS: tl.constexpr,
          LANES: tl.constexpr, EACH: tl.constexpr, AHEAD: tl.constexpr):  # fmt: skip
    """Every lane knows the largest of its logits; only the winner's has to look for its next.

    Of equals, the one further left. A lane has EACH logits side by side in every chunk.
    """
    r = tl.program_id(0).to(tl.int64)
    CHUNK: tl.constexpr = LANES * EACH
    NONE: tl.constexpr = CHUNKS * CHUNK
    early = tl.load(times + r // each) < tl.load(least + r // each) if EARLY else False
    lane, step, chunk = tl.arange(0, LANES), tl.arange(0, EACH), tl.arange(0, CHUNKS)
    peak = tl.full((LANES,), float("-inf"), tl.float32)
    place = tl.full((LANES,), NONE, tl.int32)
    level = tl.full((LANES,), float("-inf"), tl.float32)
    total = tl.zeros((LANES,), tl.float32)
    for c in tl.range(0, CHUNKS, loop_unroll_factor=AHEAD):
        n = c * CHUNK + lane[:, None] * EACH + step[None, :]
        given = tl.load(x + r * N + n, mask=n < N, other=float("-inf")).to(tl.float32)
        v = _allowed(given, n, hidden, end, early, N, BANNED, EARLY)
        high = tl.max(v, 1)
        first = tl.min(tl.where((v == high[:, None]) & (n < N), n, NONE), 1)
        place = tl.where((high > peak) | (place == NONE), first, place)
        peak = tl.maximum(peak, high)
        summed = v if RENORMALIZE else given
        more = tl.maximum(level, tl.max(summed, 1))
        safe = tl.where(more == float("-inf"), 0.0, more)
        total = total * tl.exp(level - safe) + tl.sum(tl.exp(summed - safe[:, None]), 1)
        level = more
    most = tl.max(level, 0)
    log = most + tl.log(tl.sum(total * tl.exp(level - most), 0))
    whole = tl.sum(total, 0)  # NaN if a logit is, which no maximum shows
    defined = whole == whole
    for i in range(count):
        best = tl.max(peak, 0)
        at = tl.minimum(tl.min(tl.where(peak == best, place, NONE), 0), N - 1)
        # Where nothing is possible, -∞ minus -∞ must not become NaN.
        impossible = defined & (best == float("-inf"))
        tl.store(values + r * count + i, tl.where(impossible, best, best - log))
        tl.store(tokens + r * count + i, at.to(tl.int64))
        winner = at % CHUNK // EACH
        m = chunk[:, None] * CHUNK + winner * EACH + step[None, :]
        w = tl.load(x + r * N + m, mask=m < N, other=float("-inf")).to(tl.float32)
        w = _allowed(w, m, hidden, end, early, N, BANNED, EARLY)
        # What was given already is larger, or as large and further left.
        left = ((w < best) | ((w == best) & (m > at))) & (m < N)
        rest = tl.max(tl.max(tl.where(left, w, float("-inf")), 1), 0)
        following = tl.min(tl.min(tl.where(left & (w == rest), m, NONE), 1), 0)
        peak = tl.where(lane == winner, rest, peak)
        place = tl.where(lane == winner, following, place)


def best(
    logits: Tensor,
    count: int,
    hidden: Tensor | None,
    end: int,
    least: Tensor | None,
    times: Tensor,
    renormalize: bool,
) -> tuple[Tensor, Tensor]:
    """As `topk.best`, in one pass.

    `hidden` (N,) marks what is banned; sentence b may not end before step least[b], and is at step
    times[b].
    """
    (R, N), sentences = logits.shape, len(times)
    values = torch.empty(R, count, dtype=torch.float32, device=logits.device)
    tokens = torch.empty(R, count, dtype=torch.int64, device=logits.device)
    block, each = max(64, triton.next_power_of_2(N)), 8
    lanes = min(256, block // each)
    chunks = block // (lanes * each)
    # So few that registers leave room for many rows at once.
    sizes = {"CHUNKS": chunks, "LANES": lanes, "EACH": each, "AHEAD": min(chunks, 4)}
    flags = {"BANNED": hidden is not None, "EARLY": least is not None, "RENORMALIZE": renormalize}
    masks = (times if hidden is None else hidden, end, times if least is None else least, times)
    given = (logits.contiguous(), values, tokens, N, count, *masks, R // sentences)
    _best[(R,)](*given, **flags, **sizes, num_warps=8)
    return values, tokens


@triton.jit
@no_type_check
def _follow(values, found, last, tokens, scores, over, most, times, B, columns, end,
            BLOCK: tl.constexpr):  # fmt: skip
    b = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = b < B
    t = tl.load(times + b, mask=real, other=0)
    token = tl.load(found + b, mask=real, other=0)
    open_ = real & (t < columns)
    tl.store(tokens + b * columns + t, token, mask=open_)
    tl.store(scores + b * columns + t, tl.load(values + b, mask=real).to(tl.float64), mask=open_)
    was = tl.load(over + b, mask=real, other=1) != 0
    done = was | (token == end) | (t + 1 >= tl.load(most + b, mask=real, other=0))
    tl.store(over + b, done, mask=real)
    tl.store(last + b, token, mask=real)
    tl.store(times + b, t + 1, mask=real)


def follow(found: tuple[Tensor, Tensor], paths: Any, times: Tensor) -> None:
    """One step of `Paths`, in place, from the best token of each row."""
    (B, columns), end = paths.tokens.shape, paths.constraints.end
    state = (paths.last, paths.tokens, paths.scores, paths.over, paths.constraints.most, times)
    _follow[(triton.cdiv(B, 128),)](*found, *state, B, columns, end, BLOCK=128)


@triton.jit
@no_type_check
def _extend(values, tokens, k, opened, last, parents, said, gains, steps, scores, ends, lengths,
            slots, cut, over, most, penalty, largest, columns, end, times, table, positions, filled,
            W: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, RANKS: tl.constexpr,
            KEPT: tl.constexpr):  # fmt: skip
    """`Beams.extend` for one sentence, and the table of its rows."""
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
    total += tl.load(opened + b * W + row, mask=left, other=float("-inf"))
    total = tl.where(total == total, total, float("inf"))  # NaNs propagate

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

    # Ended where no open hypothesis can beat the worst of the n-best.
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
    n = tl.load(filled + b * W)
    for begin in range(0, n, 32):
        column = begin + tl.arange(0, 32)
        both = real[:, None] & (column[None, :] < n)
        theirs = (b * W + from_row)[:, None] * positions + column[None, :]
        numbers = tl.load(table + theirs, mask=both, other=0)
        tl.debug_barrier()
        ours = (b * W + s)[:, None] * positions + column[None, :]
        tl.store(table + ours, numbers, mask=both)


def extend(
    found: tuple[Tensor, Tensor], beams: Any, times: Tensor, table: Tensor, filled: Tensor
) -> None:
    """One step of `Beams`, in place, from the best tokens of each row; the table goes along.

    `times`: each sentence's step, which goes on. `filled`: how many positions each row has.
    """
    values, tokens = found
    W, K, k = beams.width, beams.scores.shape[1], values.shape[1]
    path = (beams.open, beams.last, beams.parents, beams.tokens, beams.gains, beams.tokens.shape[1])
    pool = (beams.scores, beams.ends, beams.lengths, beams.slots, beams.cut, beams.over)
    rules = (beams.constraints.most, beams.penalty, beams.largest, beams.largest.shape[1])
    rows, ranks = triton.next_power_of_2(W), triton.next_power_of_2(k)
    sizes = {"W": W, "K": K, "ROWS": rows, "RANKS": ranks, "KEPT": triton.next_power_of_2(K)}
    given = (values, tokens, k, *path, *pool, *rules, beams.constraints.end)
    at = (times, table, table.shape[1], filled)
    warps = 1 if rows * ranks <= 256 else 4
    _extend[(len(times),)](*given, *at, **sizes, num_warps=warps)


@triton.jit
@no_type_check
def _backtrace(parents, said, gains, steps, scores, ends, lengths, slots, cut, out, W, K):
    """The way back of one finished hypothesis, in a row with all else that is known of it."""
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


def backtrace(beams: Any, sentences: int) -> list[list[Any]]:
    """`Beams.backtrace` of the first sentences, in one kernel and one copy."""
    (_, T, W), K = beams.parents.shape, beams.scores.shape[1]
    out = torch.zeros(sentences, K, 4 + 2 * T, dtype=torch.int32, device=beams.scores.device)
    path, pool = (beams.parents, beams.tokens, beams.gains, T), (beams.scores, beams.ends)
    given = (*path, *pool, beams.lengths, beams.slots, beams.cut, out, W, K)
    _backtrace[(sentences * K,)](*given, num_warps=1)
    whole = out.cpu().numpy()
    real = whole.view(np.float32)
    most = int(whole[..., 2].max(initial=0))  # no more of the columns have anything
    words, logs = whole[..., 4 : 4 + most], real[..., 4 + T : 4 + T + most]
    columns = (real[..., 0], real[..., 1], whole[..., 2], whole[..., 3], words, logs)
    return [column.tolist() for column in columns]
