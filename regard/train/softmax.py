"""Cross-entropy and its gradient from logits in one kernel, which writes the one over the other.

    loss = log Σ e^x - (1 - ε) x_target - ε/N Σ x        gradient = softmax(x) - q

Logits are read twice and written once, in their own dtype; everything between is float32.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

COLUMNS = 4096


def losses(logits: Tensor, bias: Tensor | None, targets: Tensor, smoothing: float) -> Tensor:
    """The loss of each row; logits (T, N) become their gradients. Negative targets are ignored."""
    T, N = logits.shape
    found = torch.empty(T, dtype=torch.float32, device=logits.device)
    _softmax[(T,)](
        logits, bias, targets, found, N, smoothing,
        COLUMNS=min(COLUMNS, triton.next_power_of_2(N)), BIAS=bias is not None, num_warps=8,
    )  # fmt: skip
    return found


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
