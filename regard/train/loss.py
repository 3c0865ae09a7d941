"""Chunked cross-entropy over a vocabulary, which never holds all logits.

    loss = - Σ_n Σ_c q_n(c) log p_n(c),   q_n = (1 - ε) one-hot(target_n) + ε / N

ε is label smoothing (Szegedy et al. 2016; ε = 0.1 in Vaswani et al. 2017). Logits of T tokens over
N classes take far more memory than everything else in a small model. Here a few rows at a time are
computed, reduced to their loss and their gradients, and dropped.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from regard.attention.fusing import HALF, are_linear, compute_dtype, fuses
from regard.attention.sync import on_host
from regard.train import softmax_cpu

CHUNK = 2**26  # logits computed at a time: 256 MB in float32
CACHED = 2**22  # in half precision on a CPU, whose caches hold them between one cast and the next


def cross_entropy(
    states: Float[Tensor, "*b D"],
    output: nn.Module,
    target: Int[Tensor, "*b"],
    smoothing: float | int = 0.0,
) -> Float[Tensor, ""]:
    """The loss summed over all targets, in float32; negative targets are ignored."""
    if not 0 <= smoothing < 1:
        raise ValueError(f"label smoothing ({smoothing}) must be at least 0 and below 1; try 0.1")
    if states.shape[:-1] != target.shape:
        raise ValueError(
            f"states of shape {tuple(states.shape)} need targets of shape "
            f"{tuple(states.shape[:-1])}, got {tuple(target.shape)}"
        )
    rows, places = states.flatten(0, -2), target.flatten()
    if not are_linear(output):  # other modules are called, for all logits at once
        logits = _wide(output(rows))
        _check_targets(places, logits.shape[-1])
        ignored = places.masked_fill(places < 0, -100)
        return nn.functional.cross_entropy(
            logits, ignored, reduction="sum", label_smoothing=float(smoothing)
        )
    assert isinstance(output, nn.Linear)
    _check_targets(places, output.out_features)
    fused = fuses(states) or softmax_cpu.takes(states)
    return _Chunked.apply(  # type: ignore[no-untyped-call]
        rows, output.weight, output.bias, places, float(smoothing), fused
    )


def _check_targets(targets: Tensor, classes: int) -> None:
    if on_host(targets) and targets.numel() and int(targets.max()) >= classes:
        raise ValueError(
            f"a target ({int(targets.max())}) must be below the number of logits ({classes}); "
            "negative targets are ignored"
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
        fused: bool,
    ) -> Tensor:
        dtype = compute_dtype(weight)
        matrix, rows = weight.to(dtype), states.to(dtype)
        wide = torch.promote_types(dtype, torch.float32)
        needs = ctx.needs_input_grad[:3]
        grads = _Gradients(
            torch.empty_like(rows) if needs[0] else None,
            torch.zeros_like(weight, dtype=wide) if needs[1] else None,
            torch.zeros_like(weight[:, 0], dtype=wide) if needs[2] else None,
        )
        chunk = _fused_chunk if fused and any(needs) else _chunk
        loss = torch.zeros((), dtype=wide, device=states.device)
        for part in _parts(states, matrix):
            loss = loss + chunk(rows[part], matrix, bias, targets[part], smoothing, grads.of(part))
        ctx.save_for_backward(*grads)
        ctx.dtypes = states.dtype, weight.dtype, None if bias is None else bias.dtype
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        return (*_scale(ctx, *slopes), None, None, None)


def divergence(
    one: Float[Tensor, "*b D"],
    two: Float[Tensor, "*b D"],
    output: nn.Module,
    targets: Int[Tensor, "*b"],
) -> Float[Tensor, ""]:
    """½ KL(p ‖ q) + ½ KL(q ‖ p) of the predictions of two passes, summed over all targets.

    The loss of R-Drop (Liang et al. 2021): p and q differ by dropout alone.
    """
    rows = one.flatten(0, -2), two.flatten(0, -2)
    if not are_linear(output):
        counts = (targets.flatten() >= 0)[:, None]
        p, q = (_wide(output(x)).log_softmax(-1) for x in rows)
        return 0.5 * torch.where(counts, (p.exp() - q.exp()) * (p - q), 0).sum()
    return _Divergence.apply(  # type: ignore[no-untyped-call]
        *rows, output.weight, output.bias, targets.flatten(), fuses(one)
    )


def _wide(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


class _Divergence(torch.autograd.Function):
    """With s = log p - log q it is ½ Σ (p - q) s, and its gradient of p's logits is

    ½ (p (s - Σ p s) + p - q)

    for q's the same with p and q exchanged. Both are computed forwards, a few rows at a time.
    """

    @staticmethod
    def forward(
        ctx: Any,
        one: Tensor,
        two: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        fused: bool,
    ) -> Tensor:
        dtype = compute_dtype(weight)
        matrix = weight.to(dtype)
        wide = torch.promote_types(dtype, torch.float32)
        states = torch.empty_like(one, dtype=dtype), torch.empty_like(two, dtype=dtype)
        slope = torch.zeros_like(weight, dtype=wide)
        shift = None if bias is None else torch.zeros_like(bias, dtype=wide)
        total = torch.zeros((), dtype=wide, device=weight.device)
        compare = _fused_compare if fused else _compare
        for part in _parts(one, matrix):
            rows = [x[part].to(dtype) for x in (one, two)]
            first, second = (nn.functional.linear(x, matrix) for x in rows)
            loss, slopes = compare(first, second, bias, targets[part])
            total = total + loss
            for n, one_slope in enumerate(slopes):
                narrow = one_slope.to(dtype)
                states[n][part] = narrow @ matrix
                _add_product(slope, narrow.T, rows[n])
                if shift is not None:
                    shift.add_(one_slope.sum(0, dtype=wide))
        ctx.save_for_backward(*states, slope, shift)
        ctx.dtypes = one.dtype, two.dtype, weight.dtype, None if bias is None else bias.dtype
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        return (*_scale(ctx, *slopes), None, None)


def _compare(
    one: Tensor, two: Tensor, bias: Tensor | None, targets: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """The divergence of some rows, and its gradients of both logits."""
    wide = [x.to(torch.promote_types(x.dtype, torch.float32)) for x in (one, two)]
    if bias is not None:
        wide = [x + bias for x in wide]
    logs = [x.log_softmax(-1) for x in wide]
    p, q = (x.exp() for x in logs)
    real = (targets >= 0)[:, None]
    s = (logs[0] - logs[1]) * real
    slopes = []
    for mine, other, sign in ((p, q, s), (q, p, -s)):
        mean = (mine * sign).sum(-1, keepdim=True)
        slopes.append(0.5 * (mine * (sign - mean) + (mine - other) * real))
    return 0.5 * ((p - q) * s).sum(), slopes


def _fused_compare(
    one: Tensor, two: Tensor, bias: Tensor | None, targets: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """`_compare` in one kernel, which turns the logits into their gradients."""
    from regard.train import softmax

    return softmax.divergences(one, two, bias, targets).sum(), [one, two]


def _add_product(sums: Tensor, a: Tensor, b: Tensor) -> None:
    """sums += a b, without rounding the product to half precision where a kernel allows it."""
    if sums.device.type == "cuda" and sums.dtype != a.dtype:
        torch.addmm(sums, a, b, out_dtype=sums.dtype, out=sums)
    elif sums.dtype == a.dtype:
        sums.addmm_(a, b)
    else:
        sums.add_(a @ b)


def _scale(ctx: Any, slope: Tensor) -> list[Tensor | None]:
    """The gradients that the forward pass stored, times that of the loss."""
    return [
        None if grad is None else (grad * slope).to(dtype)
        for grad, dtype in zip(ctx.saved_tensors, ctx.dtypes)
    ]


def _parts(rows: Tensor, matrix: Tensor) -> Iterator[slice]:
    """Slices of rows whose logits fit into the limit of a chunk."""
    limit = CACHED if matrix.device.type == "cpu" and matrix.dtype in HALF else CHUNK
    step = max(1, limit // len(matrix))
    return (slice(begin, begin + step) for begin in range(0, len(rows), step))


class _Gradients(NamedTuple):
    """Buffers for the gradients, which are written (states) or added up; None if not needed."""

    states: Tensor | None
    weight: Tensor | None
    bias: Tensor | None

    def of(self, part: slice) -> "_Gradients":
        return self._replace(states=None if self.states is None else self.states[part])


def _chunk(
    rows: Tensor,
    matrix: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    smoothing: float,
    into: _Gradients,
) -> Tensor:
    """The loss of some rows."""
    N, wide = len(matrix), torch.promote_types(matrix.dtype, torch.float32)
    logits = nn.functional.linear(rows, matrix).to(wide)
    if bias is not None:
        logits = logits + bias
    real = targets[:, None] >= 0
    place = targets[:, None].clamp(min=0)
    logs = logits.log_softmax(-1)
    pieces = (1 - smoothing) * logs.gather(-1, place)
    if smoothing:
        pieces = pieces + smoothing / N * logs.sum(-1, keepdim=True)
    loss = -torch.where(real, pieces, 0).sum()
    if not any(grad is not None for grad in into):
        return loss
    # ∂loss/∂logit_c = p(c) - q(c). The uniform part of q is subtracted at the end, where it costs a
    # vector instead of a pass over all logits; so is the masking of ignored targets.
    slope = logs.exp_().scatter_add_(-1, place, logs.new_full(place.shape, smoothing - 1))
    narrow, counted = slope.to(matrix.dtype), rows * real
    if into.states is not None:
        into.states.copy_((narrow @ matrix - smoothing / N * matrix.sum(0)) * real)
    if into.weight is not None:
        _add_product(into.weight, narrow.T, counted)
        into.weight.sub_(smoothing / N * counted.sum(0, dtype=wide))
    if into.bias is not None:
        into.bias.add_((slope.T @ real.to(wide))[:, 0] - smoothing / N * real.sum(dtype=wide))
    return loss


def _fused_chunk(
    rows: Tensor,
    matrix: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    smoothing: float,
    into: _Gradients,
) -> Tensor:
    """`_chunk` in one kernel, which turns the logits into their gradients."""
    slope = nn.functional.linear(rows, matrix)
    if slope.device.type == "cpu":
        loss = softmax_cpu.losses(slope, bias, targets, smoothing).sum()
    else:
        from regard.train import softmax  # needs Triton

        loss = softmax.losses(slope, bias, targets, smoothing).sum()
    if into.states is not None:
        torch.mm(slope, matrix, out=into.states)
    if into.weight is not None:
        _add_product(into.weight, slope.T, rows)
    if into.bias is not None:
        into.bias.add_(slope.sum(0, dtype=into.bias.dtype))
    return loss
