"""Cross-entropy and its gradient from logits on a CPU, by a C++ kernel of our own (`softmax.cpp`).

It is to a CPU what `softmax.py` is to a GPU: one pass over the logits, where torch takes several.
"""

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from regard.attention.fusing import compute_dtype
from regard.native.build import SHARED, Float, Int, Pointer, Source, address
from regard.native.tensors import DTYPES, serves

FILE = Path(__file__).with_name("softmax.cpp")
HEADERS = (SHARED / "openmp.h", SHARED / "simd.h")


def _declare(kernels: ctypes.CDLL) -> None:
    kernels.losses.argtypes = (*[Pointer] * 4, *[Int] * 2, Float, ctypes.c_int)


SOURCE = Source(FILE, HEADERS, "the loss", _declare)


def takes(states: Tensor) -> bool:
    """Whether the kernel computes the loss of what follows from these."""
    return compute_dtype(states) in DTYPES and serves(SOURCE, states)


def losses(logits: Tensor, bias: Tensor | None, targets: Tensor, smoothing: float) -> Tensor:
    """The loss of each row; logits (T, N) become their gradients. Negative targets are ignored."""
    wide = logits.float()
    found = wide.new_empty(len(wide))
    floats = None if bias is None else bias.detach().float().contiguous()
    targets = targets.contiguous()
    pointers = map(address, (wide, floats, targets, found))
    SOURCE.loaded().losses(*pointers, *wide.shape, smoothing, torch.get_num_threads())
    if wide is not logits:
        logits.copy_(wide)
    return found
