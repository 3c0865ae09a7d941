"""Losses over a vocabulary and their gradients from logits in one kernel, which writes the one over
the other.

    cross-entropy   log Σ e^x - (1 - ε) x_target - ε/N Σ x       gradient p - q, p = softmax(x)
    divergence      ½ Σ (p - q) s,  s = log p - log q            gradient ½ (p (s - Σ p s) + p - q)

Logits are read two or three times and written once, in their own dtype; everything between is
float32.
"""

from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

COLUMNS = 4096


def losses(logits: Tensor, bias: Tensor | None, targets: Tensor, smoothing: float) -> Tensor:
    """The loss of each row; logits (T, N) become their gradients. Negative targets are ignored."""
    T, N = logits.shape
    found = torch.empty(T, dtype=torch.float32, device=logits.device)
    _softmax[(T,)](logits, bias, targets, found, N, smoothing, **_tiles(N, bias))
    return found


def divergences(one: Tensor, two: Tensor, bias: Tensor | None, targets: Tensor) -> Tensor:
    """½ KL(p ‖ q) + ½ KL(q ‖ p) of each row; both logits (T, N) become their gradients. Rows with
    negative targets count nothing."""
    T, N = one.shape
    found = torch.empty(T, dtype=torch.float32, device=one.device)
    _divergence[(T,)](one, two, bias, targets, found, N, **_tiles(N, bias))
    return found


def _tiles(N: int, bias: Tensor | None) -> dict[str, Any]:
    columns = min(COLUMNS, triton.next_power_of_2(N))
    return {"COLUMNS": columns, "BIAS": bias is not None, "num_warps": 8}


@triton.jit
@no_type_check
def _softmax(logits_ptr, bias_ptr, targets_ptr, loss_ptr, N, smoothing,
             COLUMNS: tl.constexpr, BIAS: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * N
    target = tl.load(targets_ptr + row)
    if target < 0:
        for begin in range(0, N, COLUMNS):
            columns = begin + tl.arange(0, COLUMNS)
            nothing = tl.zeros((COLUMNS,), logits_ptr.dtype.element_ty)
            tl.store(logits_ptr + columns, nothing, mask=columns < N)
        tl.store(loss_ptr + row, 0.0)
        return
    peak = -float("inf")
    total, sum_x, at_target = 0.0, 0.0, 0.0
    for begin in range(0, N, COLUMNS):
        columns = begin + tl.arange(0, COLUMNS)
        x = _logits(logits_ptr, bias_ptr, columns, N, BIAS)
        higher = tl.maximum(peak, tl.max(x))
        total = total * tl.exp(peak - higher) + tl.sum(tl.exp(x - higher))
        real = tl.where(columns < N, x, 0.0)
        sum_x += tl.sum(real)
        at_target += tl.sum(tl.where(columns == target, real, 0.0))
        peak = higher
    level = peak + tl.log(total)
    for begin in range(0, N, COLUMNS):
        columns = begin + tl.arange(0, COLUMNS)
        x = _logits(logits_ptr, bias_ptr, columns, N, BIAS)
        wanted = tl.where(columns == target, 1.0 - smoothing, 0.0) + smoothing / N
        slope = tl.exp(x - level) - wanted
        tl.store(logits_ptr + columns, slope.to(logits_ptr.dtype.element_ty), mask=columns < N)
    tl.store(loss_ptr + row, level - (1.0 - smoothing) * at_target - smoothing / N * sum_x)


@triton.jit
@no_type_check
def _logits(logits_ptr, bias_ptr, columns, N, BIAS: tl.constexpr):
    x = tl.load(logits_ptr + columns, mask=columns < N, other=-float("inf")).to(tl.float32)
    if BIAS:
        x += tl.load(bias_ptr + columns, mask=columns < N, other=0.0).to(tl.float32)
    return x


@triton.jit
@no_type_check
def _divergence(one_ptr, two_ptr, bias_ptr, targets_ptr, found_ptr, N,
                COLUMNS: tl.constexpr, BIAS: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    one_ptr += row * N
    two_ptr += row * N
    real = tl.where(tl.load(targets_ptr + row) >= 0, 0.5, 0.0)
    peak_1, peak_2 = -float("inf"), -float("inf")
    total_1, total_2 = 0.0, 0.0
    for begin in range(0, N, COLUMNS):
        columns = begin + tl.arange(0, COLUMNS)
        x = _logits(one_ptr, bias_ptr, columns, N, BIAS)
        y = _logits(two_ptr, bias_ptr, columns, N, BIAS)
        higher_1, higher_2 = tl.maximum(peak_1, tl.max(x)), tl.maximum(peak_2, tl.max(y))
        total_1 = total_1 * tl.exp(peak_1 - higher_1) + tl.sum(tl.exp(x - higher_1))
        total_2 = total_2 * tl.exp(peak_2 - higher_2) + tl.sum(tl.exp(y - higher_2))
        peak_1, peak_2 = higher_1, higher_2
    level_1, level_2 = peak_1 + tl.log(total_1), peak_2 + tl.log(total_2)
    mean_1, mean_2 = 0.0, 0.0
    for begin in range(0, N, COLUMNS):
        columns = begin + tl.arange(0, COLUMNS)
        p, q, s = _compared(one_ptr, two_ptr, bias_ptr, columns, N, level_1, level_2, BIAS)
        mean_1 += tl.sum(p * s)
        mean_2 += tl.sum(q * s)
    for begin in range(0, N, COLUMNS):
        columns = begin + tl.arange(0, COLUMNS)
        p, q, s = _compared(one_ptr, two_ptr, bias_ptr, columns, N, level_1, level_2, BIAS)
        slope_1 = real * (p * (s - mean_1) + p - q)
        slope_2 = real * (q * (mean_2 - s) + q - p)
        tl.store(one_ptr + columns, slope_1.to(one_ptr.dtype.element_ty), mask=columns < N)
        tl.store(two_ptr + columns, slope_2.to(two_ptr.dtype.element_ty), mask=columns < N)
    tl.store(found_ptr + row, real * (mean_1 - mean_2))


@triton.jit
@no_type_check
def _compared(one_ptr, two_ptr, bias_ptr, columns, N, level_1, level_2, BIAS: tl.constexpr):
    """p, q and log p - log q."""
    real = columns < N
    x = _logits(one_ptr, bias_ptr, columns, N, BIAS) - level_1
    y = _logits(two_ptr, bias_ptr, columns, N, BIAS) - level_2
    return tl.exp(x), tl.exp(y), tl.where(real, x, 0.0) - tl.where(real, y, 0.0)
