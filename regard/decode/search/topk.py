"""The likeliest tokens of each row, and their log p.

    log p_n = logit_n - log Σ_m e^logit_m

A search needs log p of a few tokens, not of all. Of equal logits the first counts, in every engine.
"""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.decode.search.constraints import Constraints

Best = tuple[Float[Tensor, "R k"], Int[Tensor, "R k"]]


def log_sums(logits: Float[Tensor, "R N"]) -> Float[Tensor, "R"]:
    """log Σ_n e^logit_rn."""
    return logits.logsumexp(-1)


def largest(logits: Float[Tensor, "R N"], count: int) -> Best:
    """The `count` largest logits of each row, largest first, and of equals the first."""
    if count == 1:
        values, tokens = logits.max(-1, keepdim=True)
        return values, tokens
    if logits.is_cuda:
        values, tokens = logits.sort(dim=-1, descending=True, stable=True)
        return values[:, :count], tokens[:, :count]
    # Sorting all would take ten times as long. What topk gives is in any order among equals, and
    # any of those that equal the last.
    values, tokens = logits.topk(count)
    tokens, order = tokens.sort(dim=-1)
    values, order = values.gather(1, order).sort(dim=-1, descending=True, stable=True)
    tokens = tokens.gather(1, order)
    last = values[:, -1:]
    tied = ((logits == last).sum(-1) > (values == last).sum(-1)).nonzero()[:, 0]
    if len(tied):
        tokens[tied] = logits[tied].sort(dim=-1, descending=True, stable=True).indices[:, :count]
    return values, tokens


def best(logits: Float[Tensor, "R N"], count: int, constraints: Constraints, t: int) -> Best:
    """log p of the likeliest tokens allowed at step t, best first, and their ids.

    At least in float32; fewer than `count` where there are no more tokens, and -∞ where fewer are
    allowed. The logits may be overwritten. An engine may have a `best` of its own.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    sums = None if constraints.renormalize else log_sums(logits)
    constraints.hide(logits, t)
    values, tokens = largest(logits, min(count, logits.shape[1]))
    sums = log_sums(logits) if sums is None else sums
    # Where nothing is possible, -∞ minus -∞ must not become NaN.
    return (values - sums[:, None]).where(values != -math.inf, values), tokens
