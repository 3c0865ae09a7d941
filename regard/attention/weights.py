"""Attention weights and their statistics, without giving up the fused kernel.

`attend` does not store the weights. This module recomputes them from queries and keys: exactly, for
the selected rows only (`attention_weights`), or as statistics over all rows, streamed without the
L x S matrix (`attention_statistics`).

    entropy   -Σ_j A_ij log A_ij, in nats: 0 if row i attends to one key, log S if to all equally
    received   Σ_i A_ij, how much of all rows' attention falls on key j
    top        the largest weights of each row, and the keys they fall on
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from regard.attention.arguments import Arguments, arguments, without_autocast
from regard.attention.attend import distribution, for_each_head
from regard.attention.backends import flex
from regard.attention.checks import check_integer, integer_tensor, shown
from regard.attention.mask import Mask
from regard.attention.notebook import facts
from regard.attention.sync import on_host
from regard.synonyms import suggest_names

CHUNK = 2**21
"""Weights held at a time while streaming: 8 MiB in float32, a few times over."""

MAX_PADDED_TOPK = 1024
"""The largest `topk` where there are fewer keys."""

Edges = tuple[Tensor, Tensor]


class AttentionStatistics(NamedTuple):
    """Statistics over all attention weights of each head, as `attention_statistics` returns them.

    Shapes: entropy (..., L), received (..., S), and the `topk` largest weights of each row with
    the keys they fall on.

    >>> import torch
    >>> from regard import attention_statistics, causal
    >>> statistics = attention_statistics(torch.zeros(4, 8), torch.zeros(4, 8), causal(), topk=2)
    >>> statistics.received  # 1 + 1/2 + 1/3 + 1/4, …
    tensor([2.0833, 1.0833, 0.5833, 0.2500])
    >>> statistics.top_positions[0]  # row 0 attends to key 0 alone
    tensor([ 0, -1])
    """

    entropy: Float[Tensor, "... L"]
    """Entropy of each row's weights, in nats; 0 for a row that attends to nothing."""
    received: Float[Tensor, "... S"]
    """Weight received by each key, summed over the rows of each query head."""
    top_weights: Float[Tensor, "... L k"]
    """The largest weights of each row, in falling order; 0 where there are no more."""
    top_positions: Int[Tensor, "... L k"]
    """The keys they fall on; -1 where there are no more."""

    def __repr__(self) -> str:
        """Sizes instead of tensors."""
        shapes = ", ".join(f"{name} {tuple(part.shape)}" for name, part in self._asdict().items())
        return f"AttentionStatistics({shapes})"

    def _repr_html_(self) -> str:
        """For a notebook: each figure over all rows and keys, with their numbers."""
        places = self.received.double().sum(tuple(range(self.received.ndim - 1)))
        top_key = int(places.argmax()) if places.numel() else -1
        mean = float(self.entropy.double().mean()) if self.entropy.numel() else 0.0
        top = float(self.top_weights[..., 0].double().mean()) if self.top_weights.numel() else 0.0
        return facts(
            "statistics",
            {
                "rows": " × ".join(map(str, self.entropy.shape)),
                "keys": str(self.received.shape[-1]),
                "mean entropy": f"{mean:.3f} nats",
                "mean largest weight": f"{top:.3f}",
                "most is received by": f"key {top_key}",
            },
        )


@suggest_names
def attention_weights(
    query: Float[Tensor, "... L K"],
    key: Float[Tensor, "... S K"],
    mask: Mask | Bool[Tensor, "..."] | None = None,
    beta: float | int | Tensor | None = None,
    bias: Float[Tensor, "..."] | None = None,
    rows: int | slice | Sequence[int] | Tensor | None = None,
    *,
    scale: float | int | Tensor | None = None,
) -> Float[Tensor, "... R S"]:
    """Returns the weights that `attend` uses for the selected rows (None: all), for each head.

        A = softmax(β q·k + bias), where the mask allows

    Shapes: query (..., L, K), key (..., S, K) → (..., R, S). `mask`, `beta` and `bias` are those of
    `attend`. Half precision is computed and returned in float32. Negative rows count from the end.

    >>> import torch
    >>> from regard import attention_weights, causal
    >>> query = torch.tensor([[2.0, 0.0], [0.0, 2.0], [1.0, 1.0]])
    >>> attention_weights(query, query, causal())
    tensor([[1.0000, 0.0000, 0.0000],
            [0.0558, 0.9442, 0.0000],
            [0.3333, 0.3333, 0.3333]])
    >>> attention_weights(query, query, causal(), rows=1)
    tensor([[0.0558, 0.9442, 0.0000]])
    """
    inputs = arguments(query, key, key, mask, beta, bias, scale=scale)
    chosen = _rows(rows, inputs.query)
    out = _weights(inputs, chosen)
    return out.reshape(*inputs.lead, *out.shape[-2:])


@suggest_names
def attention_statistics(
    query: Float[Tensor, "... L K"],
    key: Float[Tensor, "... S K"],
    mask: Mask | Bool[Tensor, "..."] | None = None,
    beta: float | int | Tensor | None = None,
    bias: Float[Tensor, "..."] | None = None,
    topk: int = 4,
    *,
    scale: float | int | Tensor | None = None,
) -> AttentionStatistics:
    """Returns entropy, top weights and received mass over all rows, in O(L + S) memory.

        entropy_i = -Σ_j A_ij log A_ij,   received_j = Σ_i A_ij

    Shapes: query (..., L, K), key (..., S, K) → entropy (..., L), received (..., S), and the `topk`
    largest weights of each row with the keys they fall on. Entropy is in nats, 0 for a row that
    attends to one key or to nothing, log S for a row that attends to all equally. On CUDA a Triton
    kernel streams over the keys, for masks that give each row one range of keys; elsewhere, and for
    other masks, whole rows are computed a chunk at a time.

    >>> import torch
    >>> from regard import attention_statistics
    >>> statistics = attention_statistics(torch.zeros(6, 4), torch.zeros(8, 4))  # weights of 1/8
    >>> statistics.entropy[0], statistics.received[0]  # log 8, 6/8
    (tensor(2.0794), tensor(0.7500))
    >>> statistics.top_weights.shape, statistics.top_positions.shape
    (torch.Size([6, 4]), torch.Size([6, 4]))
    """
    inputs = arguments(query, key, key, mask, beta, bias, scale=scale)
    check_integer("topk", topk, most=max(inputs.key.shape[2], MAX_PADDED_TOPK))
    with torch.no_grad():
        parts = _by_kernel(inputs, topk) if _streams(inputs, topk) else _by_chunks(inputs, topk)
    return AttentionStatistics(*(t.reshape(*inputs.lead, *t.shape[2:]) for t in parts))


def _weights(inputs: Arguments, rows: Tensor) -> Tensor:
    query, key, _, mask, beta, bias, _ = inputs
    L, S = query.shape[2], key.shape[2]
    wide = torch.promote_types(query.dtype, torch.float32)
    allowed = None
    if mask is not None:
        allowed = mask.block(rows, torch.arange(S, device=rows.device), L, S)
    if bias is not None:
        bias = (bias[:, :, rows] if bias.shape[2] > 1 else bias).to(wide)
    beta = beta.to(wide) if isinstance(beta, Tensor) else beta
    key = for_each_head(key.to(wide), query.shape[1])
    with without_autocast(query.device):
        return distribution(query[:, :, rows].to(wide), key, allowed, beta, bias)


def _rows(rows: int | slice | Sequence[int] | Tensor | None, query: Tensor) -> Tensor:
    L, device = query.shape[2], query.device
    if rows is None:
        return torch.arange(L, device=device)
    if isinstance(rows, slice):
        try:
            chosen = range(L)[rows]
        except (TypeError, ValueError) as error:
            raise ValueError(f"rows ({rows}): {error}; try slice(0, {L})") from None
        end = chosen.start + len(chosen) * chosen.step
        return torch.arange(chosen.start, end, chosen.step, device=device)
    which = integer_tensor([rows] if isinstance(rows, int) else rows, "rows").long()
    if on_host(which) and bool(((which < -L) | (which >= L)).any()):
        reach = f"lie from {-L} to {L - 1}" if L else "be none"
        raise ValueError(f"rows ({shown(which)}) must {reach}: the number of queries is {L}")
    return which.to(device) % max(L, 1)


def _by_chunks(inputs: Arguments, topk: int) -> tuple[Tensor, ...]:
    B, H, L, _ = inputs.query.shape
    S, device, mask = inputs.key.shape[2], inputs.query.device, inputs.mask
    wide = torch.promote_types(inputs.query.dtype, torch.float32)
    inputs = inputs._replace(key=for_each_head(inputs.key.to(wide), H).contiguous())
    # The rule of a mask computes with indices of eight bytes for each pair of positions.
    step = max(1, CHUNK // max(max(B * H, 4) * S, 1))
    if torch._C._are_functorch_transforms_active():  # torch.vmap allows no out=
        chunks = torch.arange(L, device=device).split(step)
        columns = list(zip(*(_summarize(_weights(inputs, rows), topk) for rows in chunks)))
        columns[1] = (torch.stack(columns[1]).sum(0),)
        return tuple(torch.cat(column, 2) for column in columns)
    # Tensors that outlive a chunk are allocated before the first: a small tensor left between two
    # large ones that are freed keeps the heap from shrinking, and it grows to the whole matrix.
    entropy = torch.zeros(B, H, L, dtype=wide, device=device)
    received = torch.zeros(B, H, S, dtype=wide, device=device)
    top = torch.zeros(B, H, L, topk, dtype=wide, device=device)
    where = torch.full((B, H, L, topk), -1, device=device)
    if not entropy.numel() or not S:
        return entropy, received, top, where
    edges = None if mask is None or not mask.ranges else _edges(mask, L, S, device)
    workspace = torch.empty(B * H * min(step, L) * S, dtype=wide, device=device)
    for start in range(0, L, step):
        rows = slice(start, min(start + step, L))
        work = workspace[: B * H * (rows.stop - start) * S].view(B, H, -1, S)
        _write_weights(work, inputs, rows, edges)
        entropy[:, :, rows], mass, top[:, :, rows], where[:, :, rows] = _summarize(work, topk, work)
        received += mass
    return entropy, received, top, where


def _write_weights(work: Tensor, inputs: Arguments, rows: slice, edges: Edges | None) -> None:
    """`distribution` of some rows, in place: the only other tensors of this size are masks."""
    query, key, _, mask, beta, bias, _ = inputs
    L, S, device = query.shape[2], key.shape[2], query.device
    least = torch.finfo(work.dtype).min
    hidden = None
    if bias is not None and bias.shape[2] > 1:
        bias = bias[:, :, rows]
    if mask is not None:
        columns = torch.arange(S, device=device)
        if edges is not None:
            first, last = (edge[:, None, rows, None] for edge in edges)
            hidden = (columns < first).logical_or_(columns >= last)
        else:
            index = torch.arange(rows.start, rows.stop, device=device)
            hidden = mask.block(index, columns, L, S).logical_not()
    with without_autocast(device):
        torch.matmul(query[:, :, rows].to(work.dtype), key.mT, out=work)
    if isinstance(beta, Tensor) or beta == math.inf:
        beta = torch.as_tensor(beta, dtype=work.dtype, device=device)
        if bias is not None:
            hidden = bias == -math.inf if hidden is None else hidden | (bias == -math.inf)
        if hidden is not None:
            work.masked_fill_(hidden, least)
        hard = beta.isinf()
        lower = (work < work.amax(-1, keepdim=True)) & hard
        work.masked_fill_(hard, 0).mul_(beta.masked_fill(hard, 1)).masked_fill_(lower, -math.inf)
    else:
        work.mul_(beta)
    if bias is not None:
        work.add_(bias)
    if hidden is not None:
        work.masked_fill_(hidden, -math.inf)
    work.sub_(work.amax(-1, keepdim=True).clamp_min_(least)).exp_()
    work.div_(work.sum(-1, keepdim=True).clamp_min_(1))


def _summarize(weights: Tensor, topk: int, work: Tensor | None = None) -> tuple[Tensor, ...]:
    """Entropy, mass received, largest weights and their keys; `work` is overwritten."""
    received = weights.sum(2)
    top, where = weights.topk(min(topk, weights.shape[-1]), dim=-1)
    where = where.masked_fill(top == 0, -1)
    missing = (0, topk - top.shape[-1])
    entropy = torch.special.entr(weights, out=work).sum(-1)
    return entropy, received, F.pad(top, missing), F.pad(where, missing, value=-1)


def _streams(inputs: Arguments, topk: int) -> bool:
    """True if the Triton kernel can compute it."""
    query, mask = inputs.query, inputs.mask
    return (
        query.device.type == "cuda"
        and not torch._C._are_functorch_transforms_active()  # a kernel cannot be mapped over
        and flex.missing("cuda") is None
        and query.dtype in (torch.bfloat16, torch.float16, torch.float32)
        and query.shape[-1] <= 256
        and topk <= 16
        and (mask is None or bool(mask.ranges))
        and not isinstance(inputs.beta, Tensor)
        and 0 < inputs.beta < float("inf")
        and min(*query.shape, *inputs.key.shape) > 0
    )


def _by_kernel(inputs: Arguments, topk: int) -> tuple[Tensor, ...]:
    from regard.attention import streaming

    query, key, _, mask, beta, bias, _ = inputs
    assert isinstance(beta, float)
    edges = None if mask is None else _edges(mask, query.shape[2], key.shape[2], query.device)
    return streaming.statistics(query, key, edges, beta, bias, topk)


def _edges(mask: Mask, L: int, S: int, device: torch.device) -> Edges:
    """The first and past-the-last key of each row, for a mask that has `ranges`."""
    edges = mask.cached("intervals", (L, S, device), lambda: mask.intervals(L, S, device))
    assert edges is not None
    return edges
