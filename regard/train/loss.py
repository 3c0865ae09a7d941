"""Chunked cross-entropy over a vocabulary, which never holds all logits.

    loss = - Σ_n Σ_c q_n(c) log p_n(c),   q_n = (1 - ε) one-hot(target_n) + ε / N

ε is label smoothing (Szegedy et al. 2016; ε = 0.1 in Vaswani et al. 2017). Logits of T tokens over
N classes take far more memory than everything else in a small model. Here a few rows at a time are
computed, reduced to their loss and their gradients, and dropped.
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

CHUNK = 2**26  # logits held at a time: 256 MB in float32


def cross_entropy(
    states: Float[Tensor, "*b D"],
    output: nn.Linear,
    targets: Int[Tensor, "*b"],
    smoothing: float | int = 0.0,
) -> Float[Tensor, ""]:
    """The loss summed over all targets, in float32; negative targets are ignored."""
    if not 0 <= smoothing < 1:
        raise ValueError(f"label smoothing ({smoothing}) must be at least 0 and below 1; try 0.1")
    if states.shape[:-1] != targets.shape:
        raise ValueError(
            f"states of shape {tuple(states.shape)} need targets of shape "
            f"{tuple(states.shape[:-1])}, got {tuple(targets.shape)}"
        )
    rows, places = states.flatten(0, -2), targets.flatten()
    return _Chunked.apply(  # type: ignore[no-untyped-call]
        rows, output.weight, output.bias, places, float(smoothing)
    )


class _Chunked(torch.autograd.Function):
    """The loss is a sum, so the forward pass computes its gradients too, up to one factor."""

    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        smoothing: float,
    ) -> Tensor:
        T, N = len(states), len(weight)
        dtype = weight.dtype
        if torch.is_autocast_enabled(states.device.type):
            dtype = torch.get_autocast_dtype(states.device.type)
        matrix, rows = weight.to(dtype), states.to(dtype)
        wide = torch.promote_types(dtype, torch.float32)
        wanted = ctx.needs_input_grad[:3]
        d_states = torch.empty_like(rows) if wanted[0] else None
        d_weight = torch.zeros_like(weight, dtype=wide) if wanted[1] else None
        d_bias = torch.zeros_like(weight[:, 0], dtype=wide) if wanted[2] else None
        loss = torch.zeros((), dtype=wide, device=states.device)
        step = max(1, CHUNK // N)
        for begin in range(0, T, step):
            part = slice(begin, begin + step)
            logits = nn.functional.linear(rows[part], matrix).to(wide)
            if bias is not None:
                logits = logits + bias
            real = targets[part, None] >= 0
            place = targets[part, None].clamp(min=0)
            logs = logits.log_softmax(-1)
            pieces = (1 - smoothing) * logs.gather(-1, place)
            if smoothing:
                pieces = pieces + smoothing / N * logs.sum(-1, keepdim=True)
            loss = loss - torch.where(real, pieces, 0).sum()
            if not any(wanted):
                continue
            # ∂loss/∂logit_c = p(c) - q(c). The uniform part of q is subtracted at the end, where it
            # costs a vector instead of a pass over all logits; so is the masking of ignored
            # targets.
            slope = logs.exp_().scatter_add_(-1, place, logs.new_full(place.shape, smoothing - 1))
            narrow, counted = slope.to(dtype), rows[part] * real
            if d_states is not None:
                d_states[part] = (narrow @ matrix - smoothing / N * matrix.sum(0)) * real
            if d_weight is not None:
                d_weight += narrow.T @ counted
                d_weight -= smoothing / N * counted.sum(0, dtype=wide)
            if d_bias is not None:
                d_bias += (slope.T @ real.to(wide))[:, 0] - smoothing / N * real.sum(dtype=wide)
        ctx.save_for_backward(d_states, d_weight, d_bias)
        ctx.dtypes = states.dtype, weight.dtype, None if bias is None else bias.dtype
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        (slope,) = slopes
        grads = [
            None if grad is None else (grad * slope).to(dtype)
            for grad, dtype in zip(ctx.saved_tensors, ctx.dtypes)
        ]
        return (*grads, None, None)
