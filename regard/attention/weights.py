"""Attention weights and their statistics, without giving up the fused kernel.

`attend` never keeps the weights. When they are wanted, they are recomputed from queries and keys:
exactly and only for the rows asked for (`weights`), or as statistics over all rows, streamed
without the L x S matrix (`statistics`).

    entropy   -Σ_j A_ij log A_ij, in nats: 0 if row i looks at one key, log S if at all alike
    received   Σ_i A_ij, how much of all rows' attention falls on key j
    top        the largest weights of each row, and the keys they fall on
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from regard.attention.arguments import Arguments, arguments, without_autocast
from regard.attention.attend import distribution, for_each_head
from regard.attention.backends import flex
from regard.attention.checks import check_integer, integer_tensor, shown
from regard.attention.mask import Mask
from regard.attention.notebook import facts
from regard.attention.sync import on_host

CHUNK = 2**21
"""Weights held at a time while streaming: 8 MiB in float32, a few times over."""


class Statistics(NamedTuple):
    entropy: Float[Tensor, "... L"]
    """Of each row's weights, in nats; 0 for a row that attends to nothing."""
    received: Float[Tensor, "... S"]
    """Weight that falls on each key, summed over the rows of each query head."""
    top_weights: Float[Tensor, "... L k"]
    """The largest weights of each row, in falling order; 0 where there are no more."""
    top_positions: Int[Tensor, "... L k"]
    """The keys they fall on; -1 where there are no more."""

    def _repr_html_(self) -> str:
        """For a notebook: each figure over all rows and keys, with the sizes of what there is."""
        places = self.received.double().sum(tuple(range(self.received.ndim - 1)))
        most = int(places.argmax()) if places.numel() else -1
        mean = float(self.entropy.double().mean()) if self.entropy.numel() else 0.0
        top = float(self.top_weights[..., 0].double().mean()) if self.top_weights.numel() else 0.0
        return facts(
            "statistics",
            {
                "rows": " × ".join(map(str, self.entropy.shape)),
                "keys": str(self.received.shape[-1]),
                "mean entropy": f"{mean:.3f} nats",
                "mean largest weight": f"{top:.3f}",
                "most is received by": f"key {most}",
            },
        )


def weights(
    query: Float[Tensor, "... L K"],
    key: Float[Tensor, "... S K"],
    mask: Mask | None = None,
    beta: float | int | Tensor | None = None,
    bias: Float[Tensor, "..."] | None = None,
    rows: int | slice | Sequence[int] | Tensor | None = None,
) -> Float[Tensor, "... R S"]:
    """The weights that `attend` uses for the chosen rows (all, if None), exactly, per head.

    Half precision is computed and returned in float32. Rows may be counted from the end.
    """
    given = arguments(query, key, key, mask, beta, bias)
    chosen = _rows(rows, given.query)
    out = _weights(given, chosen)
    return out.reshape(*given.lead, *out.shape[-2:])


@torch.no_grad()
def statistics(
    query: Float[Tensor, "... L K"],
    key: Float[Tensor, "... S K"],
    mask: Mask | None = None,
    beta: float | int | Tensor | None = None,
    bias: Float[Tensor, "..."] | None = None,
    topk: int = 4,
) -> Statistics:
    """Entropy, top weights and mass received over all rows, in O(L + S) memory.

    On CUDA a Triton kernel streams over the keys, for masks that give each row one range of keys;
    elsewhere, and for other masks, whole rows are computed a chunk at a time.
    """
    check_integer("topk", topk)
    given = arguments(query, key, key, mask, beta, bias)
    found = _streamed(given, topk) if _streams(given, topk) else _chunked(given, topk)
    return Statistics(*(t.reshape(*given.lead, *t.shape[2:]) for t in found))


def _weights(given: Arguments, rows: Tensor) -> Tensor:
    query, key, _, mask, beta, bias, _ = given
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


def _chunked(given: Arguments, topk: int) -> tuple[Tensor, ...]:
    query, key = given.query, given.key
    B, H, L, _ = query.shape
    S = key.shape[2]
    wide = torch.promote_types(query.dtype, torch.float32)
    given = given._replace(key=for_each_head(key.to(wide), H))
    received = query.new_zeros(B, H, S, dtype=wide)
    pieces = []
    step = max(1, CHUNK // max(B * H * S, 1))
    # Nothing is written in place, so that torch.vmap can map over it.
    for start in range(0, L, step):
        rows = torch.arange(start, min(start + step, L), device=query.device)
        chunk = _weights(given, rows)
        received = received + chunk.sum(2)
        best, at = chunk.topk(min(topk, S), dim=-1)
        at = at.masked_fill(best == 0, -1)
        more = (0, topk - best.shape[-1])
        entropy = torch.special.entr(chunk).sum(-1)
        pieces.append((entropy, F.pad(best, more), F.pad(at, more, value=-1)))
    if not pieces:
        none = query.new_zeros(B, H, 0, topk, dtype=wide)
        return none.sum(-1), received, none, none.long()
    entropy, top, where = (torch.cat(parts, 2) for parts in zip(*pieces))
    return entropy, received, top, where


def _streams(given: Arguments, topk: int) -> bool:
    """Whether the Triton kernel can do it."""
    query, mask = given.query, given.mask
    return (
        query.device.type == "cuda"
        and not torch._C._are_functorch_transforms_active()  # a kernel cannot be mapped over
        and flex.missing("cuda") is None
        and query.dtype in (torch.bfloat16, torch.float16, torch.float32)
        and query.shape[-1] <= 256
        and topk <= 16
        and (mask is None or bool(mask.ranges))
        and not isinstance(given.beta, Tensor)
        and 0 < given.beta < float("inf")
        and min(*query.shape, *given.key.shape) > 0
    )


def _streamed(given: Arguments, topk: int) -> tuple[Tensor, ...]:
    from regard.attention import streaming

    query, key, _, mask, beta, bias, _ = given
    assert isinstance(beta, float)
    edges = None
    if mask is not None:
        L, S, device = query.shape[2], key.shape[2], query.device
        edges = mask.cached("intervals", (L, S, device), lambda: mask.intervals(L, S, device))
    return streaming.statistics(query, key, edges, beta, bias, topk)
