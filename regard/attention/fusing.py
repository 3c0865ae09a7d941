"""Where Triton kernels of our own train: in mixed precision on CUDA.

There matrix products are so fast that what lies between them decides. Elsewhere, under
torch.compile and under torch.func's transformations, the same is computed by torch's operations.
"""

import importlib.util
import os
from functools import lru_cache

import torch
from torch import Tensor, nn

HALF = (torch.bfloat16, torch.float16)


def fuses(x: Tensor) -> bool:
    """Whether what follows from x is computed by fused kernels."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled() or not _available(x.device):
        return False
    return compute_dtype(x) in HALF and not torch._C._are_functorch_transforms_active()


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
