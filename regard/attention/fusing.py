"""Decides whether fused Triton kernels compute: in half precision on CUDA.

There matrix products are so fast that the operations between them decide. Elsewhere, under
torch.compile and under torch.func's transformations, torch's operations compute the same; so they
do for a module with a hook, because a kernel calls no modules.
"""

import importlib.util
import os
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.nn.modules import module as registry

HALF = (torch.bfloat16, torch.float16)
LARGE = 2**20
"""Elements from which normalisation kernels are worthwhile without gradients."""


def fuses(x: Tensor) -> bool:
    """True if training computes what depends on x by fused kernels."""
    return torch.is_grad_enabled() and _runs(x) and compute_dtype(x) in HALF


def infers(x: Tensor) -> bool:
    """True if x and the weights are in half precision on CUDA, and no gradient is needed."""
    return (
        not torch.is_grad_enabled() and x.dtype in HALF and _runs(x) and compute_dtype(x) == x.dtype
    )


def infers_large(x: Tensor) -> bool:
    """As `infers`, for an x that is large enough for normalisation kernels.

    They compute what torch computes, up to rounding: the size decides on speed alone.
    """
    return x.numel() >= LARGE and infers(x)


def _runs(x: Tensor) -> bool:
    """True if Triton kernels can run on x's device, and no tracer or transformation is active."""
    if torch.compiler.is_compiling() or not _available(x.device):
        return False
    return not torch._C._are_functorch_transforms_active()


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype of a matrix product with x."""
    on = torch.is_autocast_enabled(x.device.type)
    return torch.get_autocast_dtype(x.device.type) if on else x.dtype


def has_hooks(*modules: nn.Module) -> bool:
    """True if calling one of these modules runs more, or other code, than its class's `forward`.

    That is a forward or backward hook of its own, one registered for all modules, a `forward`
    replaced on the instance, or one compiled by `module.compile()`. Code that reads a module's
    parameters instead of calling it must check this first.
    """
    if (
        registry._global_forward_hooks
        or registry._global_forward_pre_hooks
        or registry._global_backward_hooks
        or registry._global_backward_pre_hooks
    ):
        return True
    for module in modules:
        if (
            module._forward_hooks
            or module._forward_pre_hooks
            or module._backward_hooks
            or module._backward_pre_hooks
            or module._compiled_call_impl is not None
            or "forward" in module.__dict__
        ):
            return True
    return False


def are_linear(*modules: nn.Module) -> bool:
    """True if all are exactly nn.Linear, without hooks, and all have a bias or none."""
    return (
        all(type(module) is nn.Linear for module in modules)
        and not has_hooks(*modules)
        and (len(modules) == 1 or len({module.bias is None for module in modules}) == 1)
    )


@lru_cache
def _available(device: torch.device) -> bool:
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    return (device.type == "cuda" or interpreted) and importlib.util.find_spec("triton") is not None
