"""What can be done without waiting for a device.

A check that read a value from a device would make every call of attention wait for it. So values
are read only where `on_host` says so; everything else is known from shapes and types.
"""

import torch
from torch import Tensor


def on_host(tensor: Tensor) -> bool:
    """Whether values can be read without synchronising a device (or breaking a compiled graph)."""
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling()


def capturing() -> bool:
    """Whether a CUDA graph is being captured: new tensors have no values until its replay."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
