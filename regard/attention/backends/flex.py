"""FlexAttention: any mask, compiled into the kernel, with blocks that are all False skipped."""

import functools
import os
import shutil
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from regard.attention.backends import Call
from regard.attention.backends.sdpa import shares_heads
from regard.attention.mask import Mask


@functools.cache
def missing(device: str) -> str | None:
    """The tool that compiling kernels for a device lacks, or None."""
    if device == "cuda":
        from torch.utils._triton import has_triton

        return None if has_triton() else "Triton"
    compiler = any(
        shutil.which(name) for name in (os.environ.get("CXX", ""), "c++", "g++", "clang++")
    )
    return None if compiler else "a C++ compiler"


def blocks(call: Call) -> Tensor:
    """Attention under a block mask, which is made once for each mask and shape."""
    query, key, value, mask, beta, bias, dropout = call
    L, S, device = query.shape[2], key.shape[2], query.device
    exact = _is_exact(query, key, value, mask)
    block_mask = None
    if mask is not None:
        key_of = (L, S, device, exact)
        block_mask = mask.cached("blocks", key_of, lambda: _block_mask(mask, L, S, device, exact))
    out: Tensor = _flex(device.type, exact)(
        query,
        key,
        value,
        block_mask=block_mask,
        scale=beta,
        enable_gqa=shares_heads(query, key),
    )
    return out


EXACT = 8
"""How many problems get a kernel compiled for their very sizes. Those took .59 to 1 of the time,
but take seconds each to make; all further ones share kernels that take any size."""

RECOMPILATIONS = 64
"""Kernels that torch may compile during calls of `attend`; past its limit, 8 unless the user sets
another, it would run the rest uncompiled, holding whole L x S matrices. Each kind of mask, each
dtype, and training beside evaluation, counts as one."""

_seen: set[Hashable] = set()


def _is_exact(query: Tensor, key: Tensor, value: Tensor, mask: Mask | None) -> bool:
    if torch.compiler.is_compiling():
        return False
    sizes = (query.shape, key.shape, value.shape, query.dtype, query.device)
    this = (*sizes, torch.is_grad_enabled() and query.requires_grad, _constants(mask))
    if this not in _seen and len(_seen) < EXACT:
        _seen.add(this)
    return this in _seen


def _constants(mask: Mask | None) -> Hashable:
    """The values of a mask that are compiled into an exact kernel."""
    if mask is None:
        return None
    numbers = (getattr(mask, name) for name in mask.numbers)
    plain = tuple(number for number in numbers if not isinstance(number, Tensor))
    inner = tuple(_constants(each) for each in mask.inner)
    return (type(mask).__name__, *plain, *inner, str(mask) if type(mask) is Mask else "")


@functools.cache
def _compiled_flex(exact: bool) -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    compiled = torch.compile(flex_attention, dynamic=False if exact else None)

    @functools.wraps(compiled)
    def attend(*arguments: Any, **options: Any) -> Any:
        config = torch._dynamo.config
        limit = config.recompile_limit
        config.recompile_limit = max(limit, RECOMPILATIONS)
        try:
            return compiled(*arguments, **options)
        finally:
            config.recompile_limit = limit

    return attend


def _flex(device: str, exact: bool) -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    if torch.compiler.is_compiling() or missing(device):
        return flex_attention
    return _compiled_flex(exact)


@functools.cache
def _compiled_block_mask() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import create_block_mask

    return torch.compile(create_block_mask)


def _block_mask(mask: Mask, L: int, S: int, device: torch.device, exact: bool) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    # Uncompiled, the rule is evaluated on the whole L x S grid. Only CUDA compiles it reliably.
    large = L * S > 2**22 and device.type == "cuda" and missing("cuda") is None
    compiles = large and not torch.compiler.is_compiling()
    create = _compiled_block_mask() if compiles else create_block_mask
    B = None if mask.batch == 1 else mask.batch
    H = None if mask.heads == 1 else mask.heads
    # Unless exact, numbers are passed as tensors: the kernel then serves other numbers too.
    there = mask.to(device, numbers=not exact)
    shift = S - L if exact else torch.full((), S - L, device=device)
    if not torch.compiler.is_compiling():
        there.compact(1, S, device)  # whatever the rule looks up must exist before it is traced
    rule = lambda b, h, i, j: there.rule(there.frame(b, h, i, j, shift))  # noqa: E731
    return create(rule, B, H, L, S, device=str(device))
