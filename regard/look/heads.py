"""A few numbers for each head of an attention, by which heads can be ranked.

    entropy     -Σ_j p_j log p_j of p_j = |A_ij| / Σ_j |A_ij|, the mean over rows, in nats:
                0 looks at one key
    same        Σ_i A_ii / L: the position itself
    previous    the position before it; next the one after
    first       the first key, where idle heads rest; last the last one, often EOS

Query i stands at key i + S - L, as in decoding with a cache. Rows are computed a few at a time, so
that 16,384 tokens take no more memory than a few rows do.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from regard.look.record import AttentionCall

ROWS = 128
"""Rows of weights in memory at a time."""


@dataclass(frozen=True)
class Habits:
    """The habits of each head, averaged over its rows."""

    entropy: Float[Tensor, "H"]
    same: Float[Tensor, "H"]
    previous: Float[Tensor, "H"]
    next: Float[Tensor, "H"]
    first: Float[Tensor, "H"]
    last: Float[Tensor, "H"]

    def of(self, head: int) -> dict[str, float]:
        return {field.name: float(getattr(self, field.name)[head]) for field in fields(self)}


@torch.no_grad()
def habits(call: AttentionCall, sequence: int = 0, rows: Sequence[int] | None = None) -> Habits:
    """The habits of an attention's heads in one sequence of a batch; over these rows, or all."""
    L, S = call.query.shape[2], call.key.shape[2]
    H = call.query.shape[1]
    sums = {field.name: torch.zeros(H, dtype=torch.float64) for field in fields(Habits)}
    chosen = torch.arange(L) if rows is None else torch.tensor(rows, dtype=torch.long)
    for numbers in chosen.to(call.query.device).split(ROWS):
        part = call.weights(numbers)[sequence].double()
        shares = F.normalize(part, 1, -1).abs()
        sums["entropy"] += torch.special.entr(shares).sum((-1, -2)).cpu()
        for name, step in (("same", 0), ("previous", -1), ("next", 1)):
            at = numbers + S - L + step
            real = (at >= 0) & (at < S)
            places = at[real].expand(H, -1)[..., None]
            sums[name] += part[:, real].gather(-1, places).sum((-1, -2)).cpu()
        sums["first"] += part[..., 0].sum(-1).cpu()
        sums["last"] += part[..., -1].sum(-1).cpu()
    return Habits(**{name: total / max(len(chosen), 1) for name, total in sums.items()})


def by_words(
    weights: Float[Tensor, "... L S"], source_words: list[int], target_words: list[int]
) -> Float[Tensor, "... T W"]:
    """Subwords merged to words: summed over the pieces of a key, averaged over those of a query.

    Words are numbered from 0 in order; a piece with a negative number belongs to none. Rows sum to
    what they summed to before, less what fell on pieces of no word.
    """
    rows, columns = (
        F.one_hot(torch.tensor([word + 1 if word >= 0 else 0 for word in numbers]).long())[
            :, 1:
        ].to(weights)
        for numbers in (target_words, source_words)
    )
    shares = rows / rows.sum(0).clamp(min=1)
    return shares.mT @ weights @ columns
