"""Attention: every query takes a weighted mean of the values.

    A = softmax(β·Q Kᵀ + bias)        L x S, each row sums to 1
    C = A V                            L x V

Each row of Q is compared with each row of K; the weights then average the rows of V. β is an
inverse temperature: 0 averages all values, ∞ picks the best key ("hard" attention); 1/√K
keeps the scores of random vectors at variance 1, because Var(q·k) = K, and so keeps the softmax
from saturating (Vaswani et al. 2017, "Attention Is All You Need").

`distribution` and `formula` are these two lines; every other path is tested against them. `attend`
computes the same through the fastest kernel that can, and `explain_attention` names it and why.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from regard.attention.arguments import Arguments, arguments, without_autocast
from regard.attention.backends import Call, flash, flex, ranges, sdpa, sequences
from regard.attention.mask import Mask
from regard.attention.plan import Explanation, choose
from regard.synonyms import suggest_names


def distribution(
    query: Float[Tensor, "*b L K"],
    key: Float[Tensor, "*b S K"],
    allowed: Bool[Tensor, "..."] | None = None,
    beta: float | Tensor = 1.0,
    bias: Float[Tensor, "..."] | None = None,
) -> Float[Tensor, "*b L S"]:
    """The weights A: the softmax over the keys of β·q·k + bias."""
    if bias is not None:  # -∞ hides a key, as a mask does
        visible = bias != -math.inf
        allowed = visible if allowed is None else allowed & visible
    scores = query @ key.transpose(-1, -2)
    scores = _sharpen(scores, beta, allowed)
    if bias is not None:
        scores = scores + bias
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -math.inf)
    if scores.shape[-1] == 0:
        return scores
    # The row's maximum is subtracted, so that no exponential overflows and the largest is 1. A row
    # of -∞ keeps a finite maximum: a query that may attend to nothing gets a sum of 0, not NaN.
    least = torch.finfo(scores.dtype).min
    exponentials = torch.exp(scores - scores.detach().amax(-1, keepdim=True).clamp_min(least))
    return exponentials / exponentials.sum(-1, keepdim=True).clamp_min(1)


def formula(
    query: Float[Tensor, "*b L K"],
    key: Float[Tensor, "*b S K"],
    value: Float[Tensor, "*b S V"],
    allowed: Bool[Tensor, "..."] | None = None,
    beta: float | Tensor = 1.0,
    bias: Float[Tensor, "..."] | None = None,
    dropout: float | int = 0.0,
) -> Float[Tensor, "*b L V"]:
    """C = A V, with dropout on the weights."""
    weights = distribution(query, key, allowed, beta, bias)
    return F.dropout(weights, dropout) @ value


def _sharpen(scores: Tensor, beta: float | Tensor, allowed: Tensor | None) -> Tensor:
    """β·q·k. At β = ∞ that is 0 at the best allowed keys (all of them, if tied), -∞ elsewhere."""
    if not isinstance(beta, Tensor) and beta != math.inf:
        return beta * scores
    visible = scores.detach()
    if allowed is not None:
        visible = visible.masked_fill(~allowed, -math.inf)
    best = visible.amax(-1, keepdim=True) if visible.shape[-1] else visible
    hard = torch.zeros_like(scores).masked_fill(visible < best, -math.inf)
    if not isinstance(beta, Tensor):
        return hard
    infinite = torch.isinf(beta)
    return torch.where(infinite, hard, beta.masked_fill(infinite, 0) * scores)


@suggest_names
def attend(
    query: Float[Tensor, "... L K"],
    key: Float[Tensor, "... S K"],
    value: Float[Tensor, "... S V"],
    mask: Mask | Bool[Tensor, "..."] | None = None,
    beta: float | int | Tensor | None = None,
    bias: Float[Tensor, "..."] | None = None,
    dropout: float | int = 0.0,
    backend: str = "auto",
    *,
    scale: float | int | Tensor | None = None,
) -> Float[Tensor, "... L V"]:
    """Returns the average of the values for each query, weighted by attention.

        A = softmax(β·Q Kᵀ + bias) over the pairs that the mask allows,   C = A V

    Shapes: query (..., L, K), key (..., S, K), value (..., S, V) → (..., L, V). Leading axes
    broadcast; plain matrices work. Queries (B, H, L, K) may have fewer key and value heads, (B, G,
    S, K), if G divides H. `mask` and `bias` broadcast to (B, H, L, S); a boolean tensor is a mask
    as well (True = may attend). `beta`, also called `scale`, defaults to 1/√K; 0 gives
    softmax(bias), `math.inf` hard attention, and a tensor (H,) one β for each head. `dropout` acts
    on the weights. A query that may attend to nothing receives zeros, and gives zero gradients.
    `backend` is "auto", or requires one of "formula", "sdpa", "packed", "whole" and "flex". Vaswani
    et al. (2017).

    >>> import torch
    >>> from regard import attend, causal
    >>> query = key = torch.tensor([[2.0, 0.0], [0.0, 2.0]])
    >>> attend(query, key, value=torch.eye(2), mask=causal())  # the weights: 1; 1/(1+e^2.83), …
    tensor([[1.0000, 0.0000],
            [0.0558, 0.9442]])
    >>> x, memory = torch.randn(2, 8, 5, 64), torch.randn(2, 2, 7, 64)  # 8 heads share 2
    >>> attend(x, memory, memory).shape
    torch.Size([2, 8, 5, 64])
    """
    given = arguments(query, key, value, mask, beta, bias, dropout, scale)
    plan = choose(given, dropout, backend)
    if plan.route == "formula":
        out = _by_formula(given, dropout)
    else:
        q, k, v, allowed, beta, bias, _ = given
        # Kernels take one positive scale for all heads: a β per head, or of 0, joins the query.
        if isinstance(beta, Tensor):
            q, beta = (q * beta).to(q.dtype), 1.0
        elif beta == 0:
            q, beta = q * 0, 1.0
        out = KERNELS[plan.route](Call(q, k, v, allowed, beta, bias, dropout))
    lead = given.lead
    return out if out.shape[:-2] == lead else out.reshape(*lead, *out.shape[-2:])


@suggest_names
def explain_attention(
    query: Float[Tensor, "... L K"],
    key: Float[Tensor, "... S K"],
    value: Float[Tensor, "... S V"],
    mask: Mask | Bool[Tensor, "..."] | None = None,
    beta: float | int | Tensor | None = None,
    bias: Float[Tensor, "..."] | None = None,
    dropout: float | int = 0.0,
    backend: str = "auto",
    *,
    scale: float | int | Tensor | None = None,
) -> Explanation:
    """Names the backend and the kernel that `attend` uses for these arguments, and the reason.

    Shapes: query (..., L, K), key (..., S, K), value (..., S, V), as for `attend`; nothing is
    computed. The result has `backend`, `kernel` and `reason`, and prints as a table in notebooks.

    >>> import torch
    >>> from regard import causal, explain_attention, window
    >>> x = torch.randn(2, 8, 512, 64)
    >>> explain_attention(x, x, x, causal()).reason
    'the causal mask is a kernel flag; no mask is built'
    >>> explain_attention(x, x, x, causal(), backend="formula").backend
    'formula'
    """
    given = arguments(query, key, value, mask, beta, bias, dropout, scale)
    return Explanation.of(choose(given, dropout, backend), given, dropout)


def for_each_head(shared: Tensor, H: int) -> Tensor:
    """Keys or values (B, G, S, K) of grouped heads, once for each of the H query heads."""
    G = shared.shape[1]
    return shared if H == G or G == 0 else shared.repeat_interleave(H // G, 1)


def _by_formula(given: Arguments, dropout: float) -> Tensor:
    """The formula on whole tensors: grouped heads repeated, half precision widened."""
    query, key, value, mask, beta, bias, _ = given
    B, H, L, K = query.shape
    S = key.shape[2]
    wide = torch.promote_types(query.dtype, torch.float32)
    key, value = (for_each_head(t.to(wide), H) for t in (key, value))
    allowed = None if mask is None else mask.compact(L, S, query.device)
    bias = None if bias is None else bias.to(wide)
    beta = beta.to(wide) if isinstance(beta, Tensor) else beta
    with without_autocast(query.device):
        out = formula(query.to(wide), key, value, allowed, beta, bias, dropout)
    return out.to(query.dtype)


def _whole(call: Call) -> Tensor:
    from regard.attention.backends import whole  # needs Triton

    return whole.unmasked(call)


def _tiles(call: Call) -> Tensor:
    from regard.attention.backends import tiles  # needs Triton

    return tiles.packed(call)


KERNELS: dict[str, Callable[[Call], Tensor]] = {
    "flag": sdpa.flag,
    "tensor": sdpa.masked,
    "short": sdpa.short,
    "short_tensor": sdpa.short_masked,
    "whole": _whole,
    "band": flash.band,
    "padding": flash.padded,
    "lengths": flash.packed,
    "tiles": _tiles,
    "sequences": sequences.packed,
    "ranges": ranges.grouped,
    "blocks": flex.blocks,
}
"""The kernel of each route of a plan but the formula."""
