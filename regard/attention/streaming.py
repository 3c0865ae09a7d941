"""Statistics of attention weights on CUDA, streamed in Triton: three kernels, no L x S matrix.

`_rows` goes over the keys once and keeps, for each query, the logarithm of the softmax's sum, the
entropy, and the groups of DEPTH keys with the largest scores. The k largest weights lie in the k
best groups, so `_top` looks only into those. `_columns` goes over the queries once and adds up what
each key receives. That is two score products in all, as many products as attention itself.

Scores are kept in units of log 2, because the hardware's exponential is 2^x.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2E = math.log2(math.e)


@triton.jit
def _scores(q, k_ptr, k_stride, bias_ptr, bias_row, bias_column, rows, columns, width, scale,
            L, S, WIDTH: tl.constexpr, BIAS: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Scores of a tile: q·k as it is, to be scaled later, or with a bias in units of log 2."""
    across = tl.arange(0, WIDTH)
    k = tl.load(
        k_ptr + columns[None, :] * k_stride + across[:, None],
        mask=(columns[None, :] < S) & (across[:, None] < width),
        other=0.0,
    )
    scores = tl.dot(q, k, input_precision=PRECISION)
    if BIAS:
        inside = (rows[:, None] < L) & (columns[None, :] < S)
        place = bias_ptr + rows[:, None] * bias_row + columns[None, :] * bias_column
        added = tl.load(place, mask=inside, other=0.0).to(tl.float32)
        scores = scores * scale + added * 1.4426950408889634
    return scores


@triton.jit
def _pass(q, k_ptr, k_stride, bias_ptr, bias_row, bias_column, rows, start, stop, first, last,
          width, scale, L, S, peak, total, spread, peaks,
          WIDTH: tl.constexpr, COLUMNS: tl.constexpr, MASKED: tl.constexpr, BIAS: tl.constexpr,
          PRECISION: tl.constexpr):  # fmt: skip
    """Go over the keys from `start` to `stop`, keeping the running softmax and each lane's best."""
    unit = 1.0 if BIAS else scale
    for begin in tl.range(start, stop, COLUMNS):
        columns = begin + tl.arange(0, COLUMNS)
        scores = _scores(q, k_ptr, k_stride, bias_ptr, bias_row, bias_column, rows, columns, width,
                         scale, L, S, WIDTH, BIAS, PRECISION)  # fmt: skip
        if MASKED:
            seen = (columns[None, :] >= first[:, None]) & (columns[None, :] < last[:, None])
            scores = tl.where(seen, scores, float("-inf"))
        peaks = tl.maximum(peaks, scores)
        higher = tl.maximum(peak, tl.max(scores, 1))
        level = tl.where(higher == float("-inf"), 0.0, higher)
        shrink = tl.exp2((peak - level) * unit)
        below = scores * unit - (level * unit)[:, None]
        p = tl.exp2(below)
        if MASKED:
            below = tl.where(seen, below, 0.0)
        # Σ p·(score - peak) moves with the peak: all earlier scores lie lower by the difference.
        sunk = tl.where(peak == float("-inf"), 0.0, (peak - level) * unit)
        spread = shrink * (spread + total * sunk) + tl.sum(p * below, 1)
        total = shrink * total + tl.sum(p, 1)
        peak = higher
    return peak, total, spread, peaks


@triton.jit
def _rows(q_ptr, k_ptr, bias_ptr, first_ptr, last_ptr, sums_ptr, entropy_ptr, where_ptr,
          reach_ptr, q_batch, q_head, q_row, k_batch, k_head, k_row,
          bias_batch, bias_head, bias_row, bias_column, edge_batch,
          H, group, L, S, width, scale,
          WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
          TOP: tl.constexpr, KEPT: tl.constexpr, SPAN: tl.constexpr, BIAS: tl.constexpr,
          PRECISION: tl.constexpr):  # fmt: skip
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
        inner = tl.cdiv(tl.max(first), COLUMNS) * COLUMNS
        outer = tl.min(last) // COLUMNS * COLUMNS
    else:
        first = tl.zeros_like(rows)
        last = tl.zeros_like(rows) + S
        start, stop, inner = 0, S, 0
        outer = S // COLUMNS * COLUMNS
    # Between `inner` and `outer` every row of the tile sees every key.
    inner = tl.maximum(tl.minimum(inner, stop), start)
    outer = tl.maximum(outer, inner)

    peak = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    spread = tl.zeros((ROWS,), tl.float32)
    slots = tl.arange(0, TOP)[None, :]
    best = tl.where(slots < KEPT, tl.full((ROWS, TOP), float("-inf"), tl.float32), float("inf"))
    where = tl.full((ROWS, TOP), -1, tl.int32)
    lanes = tl.arange(0, COLUMNS)[None, :]
    # A stretch of DEPTH tiles at a time: a lane, every COLUMNS-th key, is a group of DEPTH keys.
    for stretch in range(start // (COLUMNS * DEPTH), tl.cdiv(stop, COLUMNS * DEPTH)):
        left = tl.maximum(start, stretch * COLUMNS * DEPTH)
        right = tl.minimum(stop, (stretch + 1) * COLUMNS * DEPTH)
        peaks = tl.full((ROWS, COLUMNS), float("-inf"), tl.float32)
        if SPAN:
            peak, total, spread, peaks = _pass(
                q, k_ptr, k_row, bias_ptr, bias_row, bias_column, rows, left,
                tl.minimum(inner, right), first, last, width, scale, L, S,
                peak, total, spread, peaks, WIDTH, COLUMNS, True, BIAS, PRECISION)  # fmt: skip
        peak, total, spread, peaks = _pass(
            q, k_ptr, k_row, bias_ptr, bias_row, bias_column, rows, tl.maximum(left, inner),
            tl.minimum(outer, right), first, last, width, scale, L, S,
            peak, total, spread, peaks, WIDTH, COLUMNS, False, BIAS, PRECISION)  # fmt: skip
        peak, total, spread, peaks = _pass(
            q, k_ptr, k_row, bias_ptr, bias_row, bias_column, rows, tl.maximum(left, outer),
            right, first, last, width, scale, L, S,
            peak, total, spread, peaks, WIDTH, COLUMNS, True, BIAS, PRECISION)  # fmt: skip
        # The best groups of this stretch displace the weakest of those kept.
        for _ in tl.static_range(KEPT):
            highest, lane = tl.max(peaks, 1, return_indices=True)
            peaks = tl.where(lanes == lane[:, None], float("-inf"), peaks)
            weakest, slot = tl.min(best, 1, return_indices=True)
            replace = (highest > weakest)[:, None] & (slots == slot[:, None])
            best = tl.where(replace, highest[:, None], best)
            where = tl.where(replace, stretch * COLUMNS + lane[:, None], where)

    some = total > 0
    safe = tl.where(some, total, 1.0)
    out = tl.program_id(1).to(tl.int64) * L + rows
    # For a row that sees nothing, an infinite sum makes every weight 0 later on.
    unit = 1.0 if BIAS else scale
    tl.store(sums_ptr + out, tl.where(some, peak * unit + tl.log2(safe), float("inf")), mask=real)
    nats = (tl.log2(safe) - spread / safe) * 0.6931471805599453
    tl.store(entropy_ptr + out, tl.where(some, nats, 0.0), mask=real)
    place = out[:, None] * TOP + slots
    tl.store(where_ptr + place, where, mask=real[:, None])
    tile = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + block
    tl.store(reach_ptr + tile * 2, start)
    tl.store(reach_ptr + tile * 2 + 1, stop)


@triton.jit
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
        scores += tl.load(place, mask=valid, other=0.0).to(tl.float32) * 1.4426950408889634
    scores = tl.where(valid, scores, float("-inf"))
    sums = tl.load(sums_ptr + out, mask=real, other=float("inf"))
    index = tl.arange(0, TOP * DEPTH)[None, :]
    for r in tl.static_range(KEPT):
        peak, at = tl.max(scores, 1, return_indices=True)
        hit = index == at[:, None]
        weight = tl.exp2(peak - sums)
        column = tl.sum(tl.where(hit, columns, 0), 1)
        tl.store(weight_ptr + out * KEPT + r, weight, mask=real)
        tl.store(position_ptr + out * KEPT + r, tl.where(weight > 0, column, -1), mask=real)
        scores = tl.where(hit, float("-inf"), scores)


@triton.jit
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
        reach_ptr += tl.program_id(1).to(tl.int64) * high * 2 + tiles * 2
        start = tl.load(reach_ptr, mask=tiles < high, other=S)
        stop = tl.load(reach_ptr + 1, mask=tiles < high, other=0)
        met = (start < begin + COLUMNS) & (stop > begin)
        low = tl.min(tl.where(met, tiles, TILES))
        high = tl.max(tl.where(met, tiles + 1, 0))
    received = tl.zeros((ROWS, COLUMNS), tl.float32)
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
            scores += tl.load(place, mask=inside, other=0.0).to(tl.float32) * 1.4426950408889634
        sums = tl.load(sums_ptr + rows, mask=rows < L, other=float("inf"))
        p = tl.exp2(scores - sums[:, None])
        if SPAN:
            first = tl.load(first_ptr + b * edge_batch + rows, mask=rows < L, other=0)
            last = tl.load(last_ptr + b * edge_batch + rows, mask=rows < L, other=0)
            seen = (columns[None, :] >= first[:, None]) & (columns[None, :] < last[:, None])
            p = tl.where(seen, p, 0.0)
        received += p
    out = received_ptr + tl.program_id(1).to(tl.int64) * S + columns
    tl.store(out, tl.sum(received, 0), mask=columns < S)


def statistics(
    query: Tensor,
    key: Tensor,
    edges: tuple[Tensor, Tensor] | None,
    beta: float,
    bias: Tensor | None,
    topk: int,
    tile: tuple[int, int, int, int] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(entropy, received, top weights, top positions) for query (B, H, L, K), key (B, G, S, K).

    `edges` gives each row's first and past-the-last key, (B or 1, L); `tile` the rows and columns
    of a tile, its warps and pipeline stages.
    """
    B, H, L, K = query.shape
    G, S = key.shape[1], key.shape[2]
    query, key = (t if t.stride(-1) == 1 else t.contiguous() for t in (query, key))
    width = max(16, triton.next_power_of_2(K))
    if tile is None:
        tile = (64, 64, 4, 3) if width <= 64 else (64, 128, 4, 3)
    if query.dtype == torch.float32 or width > 128:
        tile = (64, 64, 4, 2)
    rows, columns, warps, stages = tile
    depth = 16 if width <= 64 else 8  # keys in a group: more make `_rows` cheaper, fewer `_top`
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
    reach = new(B, H, triton.cdiv(L, rows), 2, dtype=torch.int32)
    received = new(B, H, S, dtype=torch.float32)
    top_weights = new(B, H, L, topk, dtype=torch.float32)
    top_positions = new(B, H, L, topk, dtype=torch.int64)
    strides: tuple[Any, ...] = (
        *query.stride()[:3],
        *key.stride()[:3],
        *bias_strides,
        first.stride(0) if first.shape[0] > 1 else 0,
    )
    sizes = (H, H // G, L, S, K, beta * LOG2E)
    kinds: dict[str, Any] = {"SPAN": edges is not None, "BIAS": bias is not None, "WIDTH": width}
    precision = "ieee" if query.dtype == torch.float32 else "tf32"
    common = (query, key, bias_ptr, first, last)
    _rows[(triton.cdiv(L, rows), B * H)](
        *common, sums, entropy, where, reach, *strides, *sizes,
        ROWS=rows, COLUMNS=columns, DEPTH=depth, TOP=top, KEPT=topk, PRECISION=precision,
        num_warps=warps, num_stages=stages, **kinds,
    )  # fmt: skip
    few = max(1, 512 // (top * depth))
    _top[(triton.cdiv(L, few), B * H)](
        *common, sums, where, top_weights, top_positions, *strides, *sizes,
        ROWS=few, COLUMNS=columns, DEPTH=depth, TOP=top, KEPT=topk,
        num_warps=4, **kinds,
    )  # fmt: skip
    _columns[(triton.cdiv(S, columns), B * H)](
        *common, sums, reach, received, *strides, *sizes,
        ROWS=rows, COLUMNS=columns, PRECISION=precision,
        TILES=triton.next_power_of_2(triton.cdiv(L, rows)),
        num_warps=warps, num_stages=stages, **kinds,
    )  # fmt: skip
    return entropy, received, top_weights, top_positions
