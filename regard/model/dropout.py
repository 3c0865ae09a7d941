"""Dropout (Srivastava et al. 2014), fast on the CPU as well.

    y = x m / (1 - p),   m = 0 with probability p, else 1

Torch draws one random number for each entry, one after the other, which on the CPU takes a tenth of
a small model's training. Here 64 bits are drawn at a time and decide on four entries: p is rounded
to a 65,536th, and the factor with it, so that the mean of m / (1 - p) is 1. Half precision has no
number near most factors (bfloat16 has 1.102 and 1.109 around 1 / 0.9): there the same bits choose
between the two neighbours, in the proportion that keeps the mean.
"""

import math
from functools import lru_cache

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.attention.fusing import HALF

LEVELS = 2**16


class Dropout(nn.Dropout):
    """`nn.Dropout` with faster random numbers on the CPU.

    On other devices, compiled, and under torch.func's transformations it is torch's own.
    """

    def forward(self, x: Float[Tensor, "*b D"]) -> Float[Tensor, "*b D"]:
        dropped = round(self.p * LEVELS)
        if (
            not self.training
            or x.device.type != "cpu"
            or not 0 < dropped < LEVELS
            or torch.compiler.is_compiling()
            or torch._C._are_functorch_transforms_active()
        ):
            return super().forward(x)
        words = torch.empty(-(-x.numel() // 4), dtype=torch.int64, device=x.device)
        levels = words.random_(-(2**63), None).view(torch.int16)[: x.numel()].view(x.shape)
        mask = levels >= dropped - LEVELS // 2
        if x.dtype not in HALF:
            return x * mask.to(x.dtype).mul_(LEVELS / (LEVELS - dropped))
        bits, raised = _half_factor(dropped, x.dtype)
        # Counting up the bits of a positive number gives the next one.
        scale = mask.to(torch.int16).mul_(bits).add_(levels > LEVELS // 2 - 1 - raised)
        return x * scale.view(x.dtype)


@lru_cache
def _half_factor(dropped: int, dtype: torch.dtype) -> tuple[int, int]:
    """The bits of the largest number up to the factor, and at how many levels the next one
    replaces it."""
    rest = LEVELS - dropped
    factor = LEVELS / rest
    step = torch.finfo(dtype).eps * 2.0 ** math.floor(math.log2(factor))
    lower = math.floor(factor / step) * step
    bits = torch.tensor(lower, dtype=dtype).view(torch.int16)
    return int(bits), round((factor - lower) / step * rest)
