"""Where Triton kernels of our own compute: in half precision on CUDA.

There matrix products are so fast that what lies between them decides. Elsewhere, under
torch.compile and under torch.func's transformations, the same is computed by torch's operations.
"""

import importlib.util
import os
from functools import lru_cache

import torch
from torch import Tensor, nn

HALF = (torch.bfloat16, torch.float16)
LARGE = 2**20
"""Elements from which kernels of our own pay without gradients; a few rows are done before."""


def fuses(x: Tensor) -> bool:
    """Whether what is trained, and follows from x, is computed by fused kernels."""
    return torch.is_grad_enabled() and _runs(x) and compute_dtype(x) in HALF


def infers(x: Tensor) -> bool:
    """Whether what follows from x without gradients is, where weights are in half precision too."""
    return (
        not torch.is_grad_enabled()
        and _runs(x)
        and x.numel() >= LARGE
        and compute_dtype(x) == x.dtype
        and x.dtype in HALF
    )


def _runs(x: Tensor) -> bool:
    """Whether kernels of our own can run where x is."""
    if torch.compiler.is_compiling() or not _available(x.device):
        return False
    return not torch._C._are_functorch_transforms_active()


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype of a matrix product with x."""
    on = torch.is_autocast_enabled(x.device.type)
    return torch.get_autocast_dtype(x.device.type) if on else x.dtype


def plain(*linears: nn.Module) -> bool:
    """Whether these are linear layers that nobody has changed, all with a bias or none."""
    return (
        all(
            type(linear) is nn.Linear and not (linear._forward_hooks or linear._forward_pre_hooks)
            for linear in linears
        )
        and len({getattr(linear, "bias", None) is None for linear in linears}) == 1
    )


@lru_cache
def _available(device: torch.device) -> bool:
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    return (device.type == "cuda" or interpreted) and importlib.util.find_spec("triton") is not None
