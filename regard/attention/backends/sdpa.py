"""Attention through `torch.nn.functional.scaled_dot_product_attention` and its kernels."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.attention.backends import Call
from regard.attention.fusing import HALF

WIDENED = 256
"""Queries up to which half precision is computed in float32 on a CPU, if gradients are wanted."""


def flag(call: Call) -> Tensor:
    """No mask, or the causal one as a flag. A single query sees every key: no flag needed."""
    query, key, value, mask, beta, bias, dropout = call
    # A branch for each, because a comparison of a dynamic length is no bool while compiling.
    if mask is not None and query.shape[2] > 1:
        return _sdpa(query, key, value, None, True, beta, dropout)
    return _sdpa(query, key, value, None, False, beta, dropout)


def short(call: Call) -> Tensor:
    """As `flag`, by the memory-efficient CUDA kernel, which wins on short narrow sequences."""
    query, key, value, mask, beta, bias, dropout = call
    if mask is not None and query.shape[2] > 1:
        return _efficient(query, key, value, None, True, beta, dropout)
    return _efficient(query, key, value, None, False, beta, dropout)


def short_masked(call: Call) -> Tensor:
    """As `masked`, by the memory-efficient CUDA kernel."""
    query, key, value, mask, beta, bias, dropout = call
    assert mask is not None
    L, S, dtype = query.shape[2], key.shape[2], query.dtype

    def build() -> Tensor:
        allowed = mask.compact(L, S, query.device)
        # The kernel reads the mask in aligned steps of 16: rows are padded, and then cut.
        room = allowed.new_zeros((*allowed.shape[:3], -(-S // 16) * 16), dtype=dtype)
        additive = room[..., :S]
        return additive.masked_fill_(~allowed, -math.inf)

    additive = mask.cached("additive", (L, S, dtype, query.device), build)
    additive = additive.expand(*query.shape[:3], S)
    return _efficient(query, key, value, additive, False, beta, dropout)


def masked(call: Call) -> Tensor:
    """Any mask, as a tensor; any bias."""
    query, key, value, mask, beta, bias, dropout = call
    L, S, device = query.shape[2], key.shape[2], query.device
    guarded = device.type == "cuda"
    if bias is not None:
        additive = bias.to(query.dtype)
        if mask is not None:
            additive = additive.masked_fill(~mask.compact(L, S, device), -math.inf)
        if not guarded:
            return _sdpa(query, key, value, additive, False, beta, dropout)
        empty = ~(additive > -math.inf).any(-1, keepdim=True)
        additive = additive.masked_fill(empty, 0)
        return _sdpa(query, key, value, additive, False, beta, dropout).masked_fill(empty, 0)
    assert mask is not None
    if not guarded:
        allowed = mask.cached("tensor", (L, S, device), lambda: mask.compact(L, S, device))
        return _sdpa(query, key, value, allowed, False, beta, dropout)

    # cuDNN's kernel spreads an empty row over all keys. Such a row may look at everything here,
    # and its result is then dropped, which also leaves it without gradients.
    def build() -> tuple[Tensor, Tensor | None]:
        allowed = mask.compact(L, S, device)
        if mask.never_empty(L, S):
            return allowed, None
        dead = ~allowed.any(-1, keepdim=True)
        return allowed | dead, dead

    allowed, dead = mask.cached("guarded", (L, S, device), build)
    out = _sdpa(query, key, value, allowed, False, beta, dropout)
    return out if dead is None else out.masked_fill(dead, 0)


def _sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    allowed: Tensor | None,
    causal: bool,
    beta: float,
    dropout: float,
) -> Tensor:
    V = value.shape[-1]
    query, key, value = fit(query, key, value)
    out = fused(query, key, value, allowed, causal, beta, dropout)
    return out if out.shape[-1] == V else out[..., :V]


def fused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    allowed: Tensor | None,
    causal: bool,
    beta: float,
    dropout: float,
) -> Tensor:
    """torch's own choice of kernel, for widths that `fit` has made equal."""
    if _widens(query):
        bias = None if allowed is None or allowed.dtype == torch.bool else allowed.float()
        wide = (query.float(), key.float(), value.float(), allowed if bias is None else bias)
        with torch.autocast("cpu", enabled=False):
            return fused(*wide, causal, beta, dropout).to(query.dtype)
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=allowed,
        dropout_p=dropout,
        is_causal=causal,
        scale=beta,
        enable_gqa=shares_heads(query, key),
    )


def _widens(query: Tensor) -> bool:
    """Whether float32 is faster than the CPU's half precision, whose backward pass packs each short
    sequence anew: 5 times as fast with 16 queries, as fast with 512."""
    return (
        query.device.type == "cpu"
        and query.dtype in HALF
        and query.shape[-2] <= WIDENED
        and torch.is_grad_enabled()
        and query.requires_grad
    )


def _efficient(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    additive: Tensor | None,
    causal: bool,
    beta: float,
    dropout: float,
) -> Tensor:
    V = value.shape[-1]
    query, key, value = fit(query, key, value)
    group = query.shape[1] // key.shape[1]
    if group > 1:
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    needs_sums = torch.is_grad_enabled()
    out: Tensor = torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, additive, needs_sums, dropout, causal, scale=beta
    )[0]
    return out if out.shape[-1] == V else out[..., :V]


def shares_heads(query: Tensor, key: Tensor) -> bool:
    """Whether key heads are fewer than query heads.

    A branch makes a bool of it, which is all that torch's function takes: while a size is traced, a
    comparison is something else.
    """
    if query.shape[1] != key.shape[1]:  # noqa: SIM103
        return True
    return False


def fit(
    query: Tensor, key: Tensor, value: Tensor, same: bool | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Widen with zeros to the widths that fused kernels take, which changes no score.

    CUDA kernels need multiples of 8; the CPU's, and those asked for with `same`, need values as
    wide as keys.
    """
    K, V = query.shape[-1], value.shape[-1]
    cuda = query.device.type == "cuda"
    if K == V and not (cuda and K % 8):
        return query, key, value
    step = 8 if cuda else 1
    wide_k, wide_v = -(-K // step) * step, -(-V // step) * step
    if not cuda or same:
        wide_k = wide_v = max(wide_k, wide_v)
    if wide_k != K:
        query, key = F.pad(query, (0, wide_k - K)), F.pad(key, (0, wide_k - K))
    if wide_v != V:
        value = F.pad(value, (0, wide_v - V))
    return query, key, value
