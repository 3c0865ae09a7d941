"""Statistics of attention weights on CUDA, streamed in Triton: three kernels, no L x S matrix.

`_rows` goes over the keys once and keeps, for each query, the logarithm of the softmax's sum, the
entropy, and the groups of DEPTH keys with the largest scores. The k largest weights lie in the k
best groups, so `_top` looks only into those. `_columns` goes over the queries once and adds up what
each key receives. That is two score products in all, as many products as attention itself.

Scores are kept in units of log 2, because the hardware's exponential is 2^x. The running maximum of
the online softmax moves once in a stretch of tiles, not in each: exponentials are taken relative to
the highest score before the stretch, which is recomputed where that was too far from its own.
"""

import math
from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2E = tl.constexpr(math.log2(math.e))
NOTHING = tl.constexpr(-1e30)
"""The score of masked keys: finite, because 0 times it must be 0."""
FAR = tl.constexpr(60.0)
"""How far scores may lie from the level of their exponentials: float32 holds 2^±126."""


@triton.jit
@no_type_check
def _stretch(q, k_ptr, k_row, bias_ptr, bias_row, bias_column, rows, left, right, first, last,
             inner, outer, width, scale, L, S, level,
             WIDTH: tl.constexpr, COLUMNS: tl.constexpr, EVEN: tl.constexpr, BIAS: tl.constexpr,
             PRECISION: tl.constexpr):  # fmt: skip
    """Σ p, Σ p log2 p and each lane's best score, for keys from left to right; p = 2^(s - level).

    The sums keep eight columns: so much is added up within a thread, the rest after the stretch.
    """
    ROWS: tl.constexpr = rows.shape[0]
    across = tl.arange(0, WIDTH)
    total = tl.zeros((ROWS, 8), tl.float32)
    spread = tl.zeros((ROWS, 8), tl.float32)
    peaks = tl.full((ROWS, COLUMNS), NOTHING, tl.float32)
    for begin in tl.range(left, right, COLUMNS):
        columns = begin + tl.arange(0, COLUMNS)
        real = tl.minimum(columns, S - 1)  # cheaper than to load under a mask
        place = k_ptr + real[None, :] * k_row + across[:, None]
        k = tl.load(place) if EVEN else tl.load(place, mask=across[:, None] < width, other=0.0)
        scores = tl.dot(q, k, input_precision=PRECISION)
        if BIAS:
            place = bias_ptr + rows[:, None] * bias_row + real[None, :] * bias_column
            bias = tl.load(place, mask=rows[:, None] < L, other=0.0).to(tl.float32)
            scores = tl.maximum(scores * scale + bias * LOG2E, NOTHING)
        # From `inner` to `outer` every row of the tile sees every key.
        if (begin < inner) | (begin + COLUMNS > outer):
            seen = (columns[None, :] >= first[:, None]) & (columns[None, :] < last[:, None])
            scores = tl.where(seen, scores, NOTHING)
        peaks = tl.maximum(peaks, scores)
        power = scores * (1.0 if BIAS else scale) - level[:, None]
        p = tl.exp2(power)
        total += tl.sum(tl.reshape(p, (ROWS, COLUMNS // 8, 8)), 1)
        spread += tl.sum(tl.reshape(p * power, (ROWS, COLUMNS // 8, 8)), 1)
    return total, spread, peaks


@triton.jit
@no_type_check
def _rows(q_ptr, k_ptr, bias_ptr, first_ptr, last_ptr, sums_ptr, entropy_ptr, where_ptr,
          reach_ptr, q_batch, q_head, q_row, k_batch, k_head, k_row,
          bias_batch, bias_head, bias_row, bias_column, edge_batch,
          H, group, L, S, width, scale,
          WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
          TOP: tl.constexpr, KEPT: tl.constexpr, EVEN: tl.constexpr, SPAN: tl.constexpr,
          BIAS: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    b = (tl.program_id(1) // H).to(tl.int64)
    h = (tl.program_id(1) % H).to(tl.int64)
    # Under a causal mask the last rows have most to do: they go first.
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    rows = block * ROWS + tl.arange(0, ROWS)
    across = tl.arange(0, WIDTH)
    real = rows < L
    q = tl.load(
        q_ptr + b * q_batch + h * q_head + rows[:, None] * q_row + across[None, :],
        mask=real[:, None] & (across[None, :] < width),
        other=0.0,
    )
    k_ptr += b * k_batch + (h // group) * k_head
    bias_ptr += b * bias_batch + h * bias_head
    if SPAN:
        first = tl.load(first_ptr + b * edge_batch + rows, mask=real, other=0)
        last = tl.load(last_ptr + b * edge_batch + rows, mask=real, other=S)
        start = tl.min(tl.where(real, first, S)) // COLUMNS * COLUMNS
        stop = tl.max(tl.where(real, last, 0))
        inner, outer = tl.max(first), tl.min(last)
    else:
        first = tl.zeros_like(rows)
        last = tl.zeros_like(rows) + S
        start, stop, inner, outer = 0, S, 0, S

    unit = 1.0 if BIAS else scale
    peak = tl.full((ROWS,), NOTHING, tl.float32)
    level = tl.zeros((ROWS,), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    spread = tl.zeros((ROWS,), tl.float32)
    slots = tl.arange(0, TOP)[None, :]
    best = tl.where(slots < KEPT, tl.full((ROWS, TOP), NOTHING, tl.float32), float("inf"))
    where = tl.full((ROWS, TOP), -1, tl.int32)
    lanes = tl.arange(0, COLUMNS)[None, :]
    # A stretch of DEPTH tiles at a time: a lane, every COLUMNS-th key, is a group of DEPTH keys.
    for stretch in range(start // (COLUMNS * DEPTH), tl.cdiv(stop, COLUMNS * DEPTH)):
        left = tl.maximum(start, stretch * COLUMNS * DEPTH)
        right = tl.minimum(stop, (stretch + 1) * COLUMNS * DEPTH)
        added = tl.zeros((ROWS, 8), tl.float32)
        spreading = tl.zeros((ROWS, 8), tl.float32)
        peaks = tl.full((ROWS, COLUMNS), NOTHING, tl.float32)
        highest, rise = peak, level
        again = True
        while again:
            added, spreading, peaks = _stretch(
                q, k_ptr, k_row, bias_ptr, bias_row, bias_column, rows, left, right, first, last,
                inner, outer, width, scale, L, S, level,
                WIDTH, COLUMNS, EVEN, BIAS, PRECISION)  # fmt: skip
            highest = tl.max(peaks, 1)
            higher = tl.maximum(peak, highest)
            rise = tl.where(higher == NOTHING, 0.0, higher * unit - level)
            far = tl.abs(rise) > FAR
            again = tl.max(far.to(tl.int32), 0) > 0
            # A level can only fall before anything was added up.
            total, spread, level = _lift(total, spread, level, tl.where(far, rise, 0.0), 0.0)
        total += tl.sum(added, 1)
        spread += tl.sum(spreading, 1)
        total, spread, level = _lift(total, spread, level, rise, FAR)
        peak = tl.maximum(peak, highest)
        # While some row's best group is better than the weakest it has kept, it takes that place.
        weakest = tl.min(best, 1)
        while tl.max((highest > weakest).to(tl.int32), 0) > 0:
            lane = tl.min(tl.where(peaks == highest[:, None], lanes, COLUMNS), 1)
            place = (highest > weakest)[:, None] & (slots == tl.argmin(best, 1)[:, None])
            best = tl.where(place, highest[:, None], best)
            where = tl.where(place, stretch * COLUMNS + lane[:, None], where)
            peaks = tl.where(lanes == lane[:, None], NOTHING, peaks)
            highest = tl.max(peaks, 1)
            weakest = tl.min(best, 1)

    some = total > 0
    safe = tl.where(some, total, 1.0)
    out = tl.program_id(1).to(tl.int64) * L + rows
    # For a row that sees nothing, an infinite sum makes every weight 0 later on.
    tl.store(sums_ptr + out, tl.where(some, level + tl.log2(safe), float("inf")), mask=real)
    nats = (tl.log2(safe) - spread / safe) / LOG2E
    tl.store(entropy_ptr + out, tl.where(some, nats, 0.0), mask=real)
    tl.store(where_ptr + out[:, None] * TOP + slots, where, mask=real[:, None])
    reach_ptr += (tl.program_id(1).to(tl.int64) * tl.num_programs(0) + block) * 4
    tl.store(reach_ptr, start)
    tl.store(reach_ptr + 1, stop)
    tl.store(reach_ptr + 2, inner)
    tl.store(reach_ptr + 3, outer)


@triton.jit
@no_type_check
def _lift(total, spread, level, rise, fall):
    """Sums of p and p log2 p as of a level that is higher by `rise`, or lower by `fall` at most."""
    shrink = tl.exp2(tl.minimum(-rise, fall))
    return shrink * total, shrink * (spread - total * rise), level + rise


@triton.jit
@no_type_check
def _top(q_ptr, k_ptr, bias_ptr, first_ptr, last_ptr, sums_ptr, where_ptr,
         weight_ptr, position_ptr, q_batch, q_head, q_row, k_batch, k_head, k_row,
         bias_batch, bias_head, bias_row, bias_column, edge_batch,
         H, group, L, S, width, scale,
         WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
         TOP: tl.constexpr, KEPT: tl.constexpr, SPAN: tl.constexpr,
         BIAS: tl.constexpr):  # fmt: skip
    b = (tl.program_id(1) // H).to(tl.int64)
    h = (tl.program_id(1) % H).to(tl.int64)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    real = rows < L
    out = tl.program_id(1).to(tl.int64) * L + rows
    slots = tl.arange(0, TOP)[None, :]
    chosen = tl.load(where_ptr + out[:, None] * TOP + slots, mask=real[:, None], other=-1)
    # The keys of those groups, one score each.
    base = chosen // COLUMNS * (COLUMNS * DEPTH) + chosen % COLUMNS
    steps = tl.arange(0, DEPTH)[None, None, :]
    columns = tl.reshape(base[:, :, None] + steps * COLUMNS, (ROWS, TOP * DEPTH))
    valid = tl.reshape((chosen[:, :, None] >= 0) & (steps >= 0), (ROWS, TOP * DEPTH))
    valid = valid & (columns < S) & real[:, None]
    if SPAN:
        first = tl.load(first_ptr + b * edge_batch + rows, mask=real, other=0)
        last = tl.load(last_ptr + b * edge_batch + rows, mask=real, other=0)
        valid = valid & (columns >= first[:, None]) & (columns < last[:, None])
    across = tl.arange(0, WIDTH)
    q = tl.load(q_ptr + b * q_batch + h * q_head + rows[:, None] * q_row + across[None, :],
                mask=real[:, None] & (across[None, :] < width), other=0.0)  # fmt: skip
    k_ptr += b * k_batch + (h // group) * k_head
    k = tl.load(k_ptr + columns[:, :, None] * k_row + across[None, None, :],
                mask=valid[:, :, None] & (across[None, None, :] < width), other=0.0)  # fmt: skip
    scores = tl.sum(q.to(tl.float32)[:, None, :] * k.to(tl.float32), 2) * scale
    if BIAS:
        place = bias_ptr + b * bias_batch + h * bias_head
        place += rows[:, None] * bias_row + columns * bias_column
        scores += tl.load(place, mask=valid, other=0.0).to(tl.float32) * LOG2E
    scores = tl.where(valid, scores, float("-inf"))
    sums = tl.load(sums_ptr + out, mask=real, other=float("inf"))
    index = tl.arange(0, TOP * DEPTH)[None, :]
    for r in tl.static_range(KEPT):
        peak = tl.max(scores, 1)
        at = tl.min(tl.where(scores == peak[:, None], index, TOP * DEPTH - 1), 1)
        scores = tl.where(index == at[:, None], float("-inf"), scores)
        weight = tl.exp2(peak - sums)
        lane = tl.sum(tl.where(slots == (at // DEPTH)[:, None], base, 0), 1)
        column = lane + at % DEPTH * COLUMNS
        tl.store(weight_ptr + out * KEPT + r, weight, mask=real)
        tl.store(position_ptr + out * KEPT + r, tl.where(weight > 0, column, -1), mask=real)


@triton.jit
@no_type_check
def _columns(q_ptr, k_ptr, bias_ptr, first_ptr, last_ptr, sums_ptr, reach_ptr, received_ptr,
             q_batch, q_head, q_row, k_batch, k_head, k_row,
             bias_batch, bias_head, bias_row, bias_column, edge_batch,
             H, group, L, S, width, scale,
             WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILES: tl.constexpr,
             SPAN: tl.constexpr, BIAS: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    b = (tl.program_id(1) // H).to(tl.int64)
    h = (tl.program_id(1) % H).to(tl.int64)
    begin = tl.program_id(0) * COLUMNS
    columns = begin + tl.arange(0, COLUMNS)
    across = tl.arange(0, WIDTH)
    k = tl.load(
        k_ptr + b * k_batch + (h // group) * k_head + columns[None, :] * k_row + across[:, None],
        mask=(columns[None, :] < S) & (across[:, None] < width),
        other=0.0,
    )
    q_ptr += b * q_batch + h * q_head
    bias_ptr += b * bias_batch + h * bias_head
    sums_ptr += tl.program_id(1).to(tl.int64) * L
    low, high = 0, tl.cdiv(L, ROWS)
    if SPAN:
        # From the first to the last tile of rows that reaches these columns.
        tiles = tl.arange(0, TILES)
        reach_ptr += tl.program_id(1).to(tl.int64) * high * 4
        start = tl.load(reach_ptr + tiles * 4, mask=tiles < high, other=S)
        stop = tl.load(reach_ptr + tiles * 4 + 1, mask=tiles < high, other=0)
        met = (start < begin + COLUMNS) & (stop > begin)
        low = tl.min(tl.where(met, tiles, TILES))
        high = tl.max(tl.where(met, tiles + 1, 0))
    # A thread holds rows i and i + 8: added up at once, they take half the registers.
    received = tl.zeros((ROWS // 16, 8, COLUMNS), tl.float32)
    for tile in tl.range(low, high):
        rows = tile * ROWS + tl.arange(0, ROWS)
        q = tl.load(
            q_ptr + rows[:, None] * q_row + across[None, :],
            mask=(rows[:, None] < L) & (across[None, :] < width),
            other=0.0,
        )
        scores = tl.dot(q, k, input_precision=PRECISION) * scale
        if BIAS:
            inside = (rows[:, None] < L) & (columns[None, :] < S)
            place = bias_ptr + rows[:, None] * bias_row + columns[None, :] * bias_column
            scores += tl.load(place, mask=inside, other=0.0).to(tl.float32) * LOG2E
        sums = tl.load(sums_ptr + rows, mask=rows < L, other=float("inf"))
        p = tl.exp2(scores - sums[:, None])
        if SPAN:
            inner, outer = tl.load(reach_ptr + tile * 4 + 2), tl.load(reach_ptr + tile * 4 + 3)
            some_hidden = (begin < inner) | (begin + COLUMNS > outer)
            if some_hidden:
                first = tl.load(first_ptr + b * edge_batch + rows, mask=rows < L, other=0)
                last = tl.load(last_ptr + b * edge_batch + rows, mask=rows < L, other=0)
                seen = (columns[None, :] >= first[:, None]) & (columns[None, :] < last[:, None])
                p = tl.where(seen, p, 0.0)
        received += tl.sum(tl.reshape(p, (ROWS // 16, 2, 8, COLUMNS)), 1)
    out = received_ptr + tl.program_id(1).to(tl.int64) * S + columns
    tl.store(out, tl.sum(tl.sum(received, 0), 0), mask=columns < S)


def statistics(
    query: Tensor,
    key: Tensor,
    edges: tuple[Tensor, Tensor] | None,
    beta: float,
    bias: Tensor | None,
    topk: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(entropy, received, top weights, top positions) for query (B, H, L, K), key (B, G, S, K).

    `edges` gives each row's first and past-the-last key, (B or 1, L).
    """
    B, H, L, K = query.shape
    G, S = key.shape[1], key.shape[2]
    query, key = (t if t.stride(-1) == 1 else t.contiguous() for t in (query, key))
    width = max(16, triton.next_power_of_2(K))
    # Tiles, stages and depths are the fastest of those tried on an H200. Keys in a group: more
    # make `_rows` cheaper, fewer `_top`.
    small = query.dtype == torch.float32 or width > 128
    rows, columns = 64, 64 if small else 128
    stages = 2 if small or width > 64 else 3
    depth = 16 if width <= 64 else 8
    top = triton.next_power_of_2(topk)
    if edges is None:
        first = last = torch.empty(1, 1, device=query.device, dtype=torch.int32)
    else:
        first, last = (edge.to(torch.int32).contiguous() for edge in edges)
    if bias is None:
        bias_ptr, bias_strides = query, (0, 0, 0, 0)
    else:
        bias_ptr = bias
        wide = bias.expand(B, H, L, S).stride()
        bias_strides = (wide[0], wide[1], wide[2], wide[3])
    new = query.new_empty
    sums, entropy = new(B, H, L, dtype=torch.float32), new(B, H, L, dtype=torch.float32)
    where = new(B, H, L, top, dtype=torch.int32)
    reach = new(B, H, triton.cdiv(L, rows), 4, dtype=torch.int32)
    received = new(B, H, S, dtype=torch.float32)
    top_weights = new(B, H, L, topk, dtype=torch.float32)
    top_positions = new(B, H, L, topk, dtype=torch.int64)
    strides: tuple[Any, ...] = (
        *query.stride()[:3],
        *key.stride()[:3],
        *bias_strides,
        first.stride(0) if first.shape[0] > 1 else 0,
    )
    sizes = (H, H // G, L, S, K, beta * LOG2E.value)
    kinds: dict[str, Any] = {"SPAN": edges is not None, "BIAS": bias is not None, "WIDTH": width}
    precision = "ieee" if query.dtype == torch.float32 else "tf32"
    common = (query, key, bias_ptr, first, last)
    _rows[(triton.cdiv(L, rows), B * H)](
        *common, sums, entropy, where, reach, *strides, *sizes,
        ROWS=rows, COLUMNS=columns, DEPTH=depth, TOP=top, KEPT=topk, EVEN=width == K,
        PRECISION=precision, num_warps=4, num_stages=stages, **kinds,
    )  # fmt: skip
    # As many numbers as a warp holds well.
    few = max(1, 8192 // (top * depth * width))
    _top[(triton.cdiv(L, few), B * H)](
        *common, sums, where, top_weights, top_positions, *strides, *sizes,
        ROWS=few, COLUMNS=columns, DEPTH=depth, TOP=top, KEPT=topk,
        num_warps=max(1, top * depth * width // 8192), **kinds,
    )  # fmt: skip
    _columns[(triton.cdiv(S, 64), B * H)](
        *common, sums, reach, received, *strides, *sizes,
        ROWS=rows, COLUMNS=64, PRECISION=precision,
        TILES=triton.next_power_of_2(triton.cdiv(L, rows)),
        num_warps=4, num_stages=2 if small else 3, **kinds,
    )  # fmt: skip
    return entropy, received, top_weights, top_positions
