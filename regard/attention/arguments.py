"""The arguments of attention, checked and brought into one form: (B, H, length, width).

Every public function of this package starts here, so each rule about shapes, dtypes and β is
stated once. Only shapes and host values are looked at: nothing waits for a device.
"""

import math
import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.attention.checks import (
    FLOATS,
    INTEGERS,
    broadcast_shape,
    broadcasts,
    check_dense,
    check_vectors,
    shown,
)
from regard.attention.mask import Mask, four_axes
from regard.attention.sync import on_host


class Arguments(NamedTuple):
    query: Tensor
    """(B, H, L, K)"""
    key: Tensor
    """(B, G, S, K), where the number of key heads G divides H"""
    value: Tensor
    """(B, G, S, V)"""
    mask: Mask | None
    beta: float | Tensor
    """Inverse temperature: a number, or a tensor that broadcasts to (B, H, L, S)"""
    bias: Tensor | None
    """Broadcasts to (B, H, L, S)"""
    lead: tuple[int, ...]
    """Leading axes of the caller's result"""


def arguments(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask | Tensor | None,
    beta: float | int | Tensor | None,
    bias: Tensor | None,
    dropout: float | int = 0.0,
    scale: float | int | Tensor | None = None,
) -> Arguments:
    """Check what attention was given, and lay it out in four axes."""
    for name, vectors in (("query", query), ("key", key), ("value", value)):
        check_vectors(name, vectors)
    query, key, value = (_autocast(tensor) for tensor in (query, key, value))
    _check_tensors(query, key, value)
    check_dropout(dropout)
    q_shape, k_shape, v_shape = query.shape, key.shape, value.shape
    if q_shape[-1] != k_shape[-1]:
        raise ValueError(
            f"query width ({q_shape[-1]}) and key width ({k_shape[-1]}) differ; "
            "project both to one width"
        )
    if k_shape[-2] != v_shape[-2]:
        raise ValueError(f"{k_shape[-2]} keys but {v_shape[-2]} values; each key needs one value")
    lead = q_shape[:-2]
    if not (
        len(q_shape) == len(k_shape) == len(v_shape) == 4 and lead == k_shape[:2] == v_shape[:2]
    ):
        query, key, value, lead = _four_axes(query, key, value)
    B, H, L, K = query.shape
    S = key.shape[2]
    if mask is not None:
        if isinstance(mask, Tensor) and mask.ndim == 3 and len(q_shape) > 3 and B == H > 1:
            raise ValueError(
                f"mask of shape {tuple(mask.shape)} could be (B, L, S) or (H, L, S), since both B "
                f"and H are {B}; pass mask[:, None] or mask[None]"
            )
        mask = _fit_mask(as_mask(mask), B, H, L, S, query.device)
    if bias is not None:
        bias = _fit_bias(bias, query, S)
    if scale is not None:
        if beta is not None:
            raise ValueError(
                f"beta ({shown(beta)}) and scale ({shown(scale)}) are two names for one number; "
                "pass one of them"
            )
        beta = scale
    beta = check_beta(beta, H, K, query.device)
    beta = beta.reshape(-1, 1, 1) if isinstance(beta, Tensor) else beta
    return Arguments(query, key, value, mask, beta, bias, lead)


def _autocast(tensor: Tensor) -> Tensor:
    """The tensor as autocast hands it to torch's kernels: in its dtype, but float64 as it is."""
    if not _autocasts(tensor.device.type):
        return tensor
    cast = tensor.is_floating_point() and tensor.dtype != torch.float64
    return tensor.to(torch.get_autocast_dtype(tensor.device.type)) if cast else tensor


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Within it the formula is computed in the dtypes that it is given."""
    return torch.autocast(device.type, enabled=False) if _autocasts(device.type) else nullcontext()


def _autocasts(kind: str) -> bool:
    return kind != "meta" and torch.is_autocast_enabled(kind)


def _check_tensors(query: Tensor, key: Tensor, value: Tensor) -> None:
    dtype, device = query.dtype, query.device
    if dtype not in FLOATS:
        raise ValueError(
            f"query is {dtype}; attention needs floating-point vectors of 16 bits or more: "
            "query.float()"
        )
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dtype != dtype:
            raise ValueError(f"query is {dtype} but {name} is {tensor.dtype}; convert one of them")
        if tensor.device != device:
            raise ValueError(f"query is on {device} but {name} is on {tensor.device}; move one")


def _four_axes(
    query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor, Tensor, torch.Size]:
    """Broadcast the leading axes, fold all but the heads into one batch axis."""
    axes = max(query.ndim, key.ndim, value.ndim)
    if axes > 2:  # as NumPy does: missing axes stand at the left
        query, key, value = (t[(None,) * (axes - t.ndim)] for t in (query, key, value))
    has_heads = axes > 3
    tensors = [t if has_heads else t.unsqueeze(-3) for t in (query, key, value)]
    H, G, GV = (t.shape[-3] for t in tensors)
    if G != GV and 1 not in (G, GV):
        raise ValueError(f"{G} key heads but {GV} value heads; each key needs one value")
    groups = max(G, GV)
    if H % max(groups, 1) and H != 1:
        fits = [str(n) for n in range(1, H + 1) if H % n == 0]
        raise ValueError(
            f"key heads ({groups}) must divide query heads ({H}); try {' or '.join(fits)}"
        )
    try:
        batch = broadcast_shape(*(t.shape[:-3] for t in tensors))
    except (RuntimeError, ValueError):
        shapes = ", ".join(str(tuple(t.shape)) for t in (query, key, value))
        raise ValueError(
            f"leading axes of {shapes} do not broadcast; make them equal or 1"
        ) from None
    heads = (groups if H == 1 else H, groups, groups)
    four = [
        t.expand(*batch, h, *t.shape[-2:]).reshape(math.prod(batch), h, *t.shape[-2:])
        for t, h in zip(tensors, heads)
    ]
    lead = torch.Size((*batch, heads[0])) if has_heads else batch
    return four[0], four[1], four[2], lead


def check_input(
    name: str, given: Tensor, width_name: str, width: int, dtype: torch.dtype | None
) -> None:
    """Raise ValueError for other than rows of this width and dtype; autocast converts dtypes."""
    if isinstance(given, Mask):
        raise ValueError(f"{name} is the mask {given}; pass it by name: mask={given}")
    if not isinstance(given, Tensor):
        raise ValueError(
            f"{name} must be a tensor of shape (..., length, {width}), got {shown(given)}"
        )
    check_dense(name, given)
    if given.ndim < 2 or given.shape[-1] != width:
        raise ValueError(
            f"{name} of shape {tuple(given.shape)} must be (..., length, {width_name} = {width})"
        )
    if dtype is None or given.dtype == dtype:
        return
    if not (given.is_floating_point() and torch.is_autocast_enabled(given.device.type)):
        raise ValueError(
            f"{name} is {given.dtype} but the module is {dtype}; convert one: {name}.to({dtype})"
        )


def as_mask(mask: Mask | Tensor | None) -> Mask | None:
    """The mask; of a boolean tensor (True = may attend) `Mask.from_tensor`."""
    if mask is None or isinstance(mask, Mask):
        return mask
    if isinstance(mask, Tensor):
        if mask.dtype == torch.bool:
            return Mask.from_tensor(mask)
        remedy = (
            "pass values that are added to scores as bias=tensor, and 1 and 0 as tensor.bool()"
            if mask.is_floating_point()
            else "pass a boolean one (True = may attend): tensor.bool()"
        )
        raise ValueError(f"mask is a {mask.dtype} tensor; {remedy}")
    raise ValueError(f"mask must be a Mask, got {shown(mask)}; for example mask=causal()")


def _fit_mask(
    mask: Mask | None, B: int, H: int, L: int, S: int, device: torch.device
) -> Mask | None:
    if mask is None:
        return None
    if mask.own:  # as it is now, it would be asked about one sentence and one head
        rule = mask
        mask = rule.cached("sized", (B, H, device), lambda: rule.sized(B, H, L, S, device))
    if not broadcasts(mask.heads, H):
        fits = "1" if H == 1 else f"1 or {H}"
        raise ValueError(f"mask {mask} has {mask.heads} heads, the query has {H}; use {fits}")
    mask.check(B, L, S)
    return mask


def _fit_bias(bias: Tensor, query: Tensor, S: int) -> Tensor:
    if isinstance(bias, Mask):
        raise ValueError(f"bias is the mask {bias}; pass it as mask={bias}")
    wide = four_axes(bias, "bias")
    if bias.dtype not in FLOATS:
        raise ValueError(
            f"bias is {bias.dtype}; it is added to scores, so pass floating-point values "
            "(a boolean mask: mask=Mask.from_tensor(tensor))"
        )
    if bias.device != query.device:
        raise ValueError(f"query is on {query.device} but bias is on {bias.device}; move one")
    need = (*query.shape[:3], S)
    for axis, have, size in zip("BHLS", wide.shape, need):
        if not broadcasts(have, size):
            raise ValueError(
                f"bias of shape {tuple(bias.shape)} does not broadcast to (B, H, L, S) = {need}: "
                f"its {axis} is {have}"
            )
    return wide


def check_beta(
    beta: float | int | Tensor | None, H: int, K: int, device: torch.device | None = None
) -> float | Tensor:
    """The inverse temperature, if it is one; None stands for 1/√K."""
    if beta is None:
        return 1 / math.sqrt(K) if K else 1.0
    if isinstance(beta, Tensor):
        check_dense("beta", beta)
        if beta.ndim > 1 or (beta.ndim == 1 and not broadcasts(len(beta), H)):
            raise ValueError(
                f"beta of shape {tuple(beta.shape)} for {H} heads; pass one number, or one per head"
            )
        if beta.dtype not in FLOATS + INTEGERS:
            raise ValueError(f"beta is {beta.dtype}; pass floating-point values: beta.float()")
        if device is not None and beta.device != device:
            raise ValueError(f"query is on {device} but beta is on {beta.device}; move one")
        refused = on_host(beta) and not bool((beta >= 0).all())
    elif isinstance(beta, bool) or not isinstance(beta, int | float):
        raise ValueError(
            f"beta must be a number or a tensor, got {shown(beta)}; None means 1/sqrt(K)"
        )
    else:
        refused = not 0 <= beta <= sys.float_info.max and beta != math.inf
    if refused:
        raise ValueError(
            f"beta ({shown(beta)}) must not be negative or NaN: it is an inverse temperature, "
            "0 (uniform) to infinity (hard)"
        )
    return beta if isinstance(beta, Tensor) else float(beta)


def check_dropout(dropout: float | int) -> None:
    """Raise ValueError for other than a probability below 1."""
    if not isinstance(dropout, int | float) or not 0 <= dropout < 1:
        raise ValueError(f"dropout ({shown(dropout)}) must be a number, at least 0 and below 1")
