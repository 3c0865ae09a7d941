"""`scaled_dot_product_attention` with PyTorch's signature and meaning, computed by `attend`.

    from regard import scaled_dot_product_attention      # instead of torch.nn.functional's

With this one line a model written for torch runs as before, and `regard.look` can record it:
weights, statistics and the reason for a kernel are computed on demand. `from_torch` maps torch's
arguments to Regard's:

    attn_mask, boolean   Mask.from_tensor   True may attend, in both
    attn_mask, float     bias               added to the scores, in both
    is_causal            causal(offset=0)   at the top left; `causal()` is at the bottom right
    scale                beta               1/√K unless given, in both
    enable_gqa           nothing            fewer key heads are seen from the shapes
    dropout_p            dropout

A call is seen by a `TorchFunctionMode`, as torch's own function is, so that one recorder serves
both.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from regard.attention.attend import attend
from regard.attention.checks import (
    broadcast_shape,
    broadcasts,
    check_dense,
    check_vectors,
    shown,
)
from regard.attention.mask import Mask, causal
from regard.synonyms import suggest_names


class FromTorch(NamedTuple):
    """The arguments of `attend` and `explain_attention`, in their order."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Mask | None
    beta: float | None
    bias: Tensor | None
    dropout: float


@suggest_names
def scaled_dot_product_attention(
    query: Float[Tensor, "... L K"],
    key: Float[Tensor, "... S K"],
    value: Float[Tensor, "... S V"],
    attn_mask: Tensor | None = None,
    dropout_p: float | int = 0.0,
    is_causal: bool = False,
    *,
    scale: float | int | None = None,
    enable_gqa: bool = False,
) -> Float[Tensor, "... L V"]:
    """Computes `torch.nn.functional.scaled_dot_product_attention` by `attend`.

        softmax(scale · query · keyᵀ + attn_mask) · value

    Shapes: query (..., H, L, K), key (..., H, S, K), value (..., H, S, V) → (..., H, L, V). A
    boolean `attn_mask` is True where a query may attend, a floating-point one is added to the
    scores; both broadcast to (..., H, L, S). `is_causal` is aligned at the top left. With
    `enable_gqa` there may be fewer key heads. A query that may attend to nothing receives zeros and
    gives zero gradients. `record` records the call.

    >>> import torch
    >>> from regard import scaled_dot_product_attention
    >>> x = torch.randn(2, 3, 5, 4)
    >>> scaled_dot_product_attention(x, x, x, is_causal=True).shape
    torch.Size([2, 3, 5, 4])
    """
    if isinstance(query, Tensor) and query.is_nested:  # torch has an attention for these
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    tensors = (query, key, value) if attn_mask is None else (query, key, value, attn_mask)
    if has_torch_function(tensors):
        out: Tensor = handle_torch_function(
            scaled_dot_product_attention,
            tensors,
            query,
            key,
            value,
            attn_mask,
            dropout_p,
            is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
        )
        return out
    arguments = from_torch(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )
    if arguments.dropout == 1:  # nothing is left, which `attend` does not call attention
        return F.dropout(attend(*arguments[:6]), 1.0)
    out = attend(*arguments)
    return out.squeeze(0) if enable_gqa and query.ndim == 3 else out


@suggest_names
def from_torch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float | int = 0.0,
    is_causal: bool = False,
    *,
    scale: float | int | None = None,
    enable_gqa: bool = False,
) -> FromTorch:
    """Returns arguments of torch's `scaled_dot_product_attention` as those of `attend`.

    Shapes: query (..., L, K), key (..., S, K), value (..., S, V). A boolean `attn_mask` and
    `is_causal` become a mask, a floating-point `attn_mask` the bias, and `scale` β.

    >>> import torch
    >>> from regard import explain_attention, from_torch
    >>> x = torch.randn(2, 3, 5, 4)
    >>> explain_attention(*from_torch(x, x, x, is_causal=True)).reason
    'the causal mask is a kernel flag; no mask is built'
    """
    for name, vectors in (("query", query), ("key", key), ("value", value)):
        check_vectors(name, vectors)
    if enable_gqa:
        query, key, value = _repeat_heads(query, key, value)
    else:
        _check_heads(query, key, value)
    mask, bias = None, None
    if is_causal:
        # At the bottom right it is the same where L = S, and a flag of every kernel.
        mask = causal() if query.shape[-2] == key.shape[-2] else causal(0)
    if attn_mask is not None:
        fitted = _four_axes(attn_mask, query, key, value)
        if attn_mask.dtype == torch.bool:
            mask = Mask.from_tensor(fitted) if mask is None else mask & Mask.from_tensor(fitted)
        else:
            bias = fitted
    beta = None if scale is None else float(scale)
    if beta is not None and not math.isfinite(beta):
        raise ValueError(f"scale ({beta}) must be finite; hard attention is attend(…, beta=inf)")
    if beta is not None and beta < 0:
        query, beta = -query, -beta
    return FromTorch(query, key, value, mask, beta, bias, float(dropout_p))


def _check_heads(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Without `enable_gqa` heads broadcast, and are not grouped."""
    counts = [t.shape[-3] for t in (query, key, value) if t.ndim >= 3]
    several = [count for count in counts if count != 1]
    if any(count != several[0] for count in several):
        raise ValueError(
            f"query, key and value have {', '.join(map(str, counts))} heads, which do not "
            "broadcast; make them equal, or pass enable_gqa=True where key heads divide query heads"
        )


def _repeat_heads(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Four axes at least, as many value heads as key heads."""
    if min(query.ndim, key.ndim, value.ndim) < 3:
        raise ValueError(
            f"enable_gqa needs (..., heads, length, width), got {_shapes(query, key, value)}; "
            "leave it out"
        )
    H, G, GV = (t.shape[-3] for t in (query, key, value))
    for name, heads in (("key", G), ("value", GV)):
        if heads == 0 or H % heads:
            raise ValueError(
                f"{name} heads ({heads}) must divide query heads ({H}); see enable_gqa"
            )
    if G != GV:
        key, value = (t.repeat_interleave(H // t.shape[-3], -3) for t in (key, value))
    if max(query.ndim, key.ndim, value.ndim) == 3:  # the axis is the heads', not the batch's
        query, key, value = (t.unsqueeze(0) for t in (query, key, value))
    return query, key, value


def _four_axes(attn_mask: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """A mask that broadcasts to (*lead, L, S), as one that broadcasts to (B, H, L, S)."""
    if not isinstance(attn_mask, Tensor):
        raise ValueError(f"attn_mask must be a tensor, got {shown(attn_mask)}")
    check_dense("attn_mask", attn_mask)
    if attn_mask.dtype not in (torch.bool, torch.float32, query.dtype) and not _autocasts(
        attn_mask
    ):
        raise ValueError(
            f"attn_mask is {attn_mask.dtype}; pass a boolean one (True = may attend), or one of "
            f"{query.dtype} that is added to the scores"
        )
    counts = [t.shape[-3] for t in (query, key, value) if t.ndim >= 3]
    heads = next((count for count in counts if count != 1), 1)
    batch = broadcast_shape(*(t.shape[:-3] for t in (query, key, value)))
    axes = max(query.ndim, key.ndim, value.ndim)
    lead = (*batch, heads) if axes >= 3 else ()
    shape = (*lead, query.shape[-2], key.shape[-2])
    fits = 2 <= attn_mask.ndim <= len(shape) and all(
        broadcasts(have, need) for have, need in zip(attn_mask.shape[::-1], shape[::-1])
    )
    if not fits:
        raise ValueError(
            f"attn_mask of shape {tuple(attn_mask.shape)} does not broadcast to {tuple(shape)}, "
            f"which is what {_shapes(query, key, value)} make"
        )
    wide = attn_mask[(None,) * (len(shape) - attn_mask.ndim)]
    match len(shape):
        case 2:
            return wide[None, None]
        case 3:  # one leading axis, which `attend` takes for the batch
            return wide[:, None]
        case 4:
            return wide
    if all(size == 1 for size in wide.shape[:-3]):
        return wide.reshape(1, *wide.shape[-3:])
    return wide.expand(*batch, *wide.shape[-3:]).reshape(math.prod(batch), *wide.shape[-3:])


def _autocasts(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and torch.is_autocast_enabled(tensor.device.type)


def _shapes(*tensors: Tensor) -> str:
    return ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
