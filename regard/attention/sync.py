"""What can be done without waiting for a device.

A check that read a value from a device would make every call of attention wait for it. So values
are read only where `on_host` says so; everything else is known from shapes and types.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_capture: object | None = None


def on_host(tensor: Tensor) -> bool:
    """Whether values can be read without synchronising a device (or breaking a compiled graph)."""
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling()


def capturing() -> bool:
    """Whether a CUDA graph is being captured: new tensors have no values until its replay."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


@contextmanager
def capture() -> Iterator[None]:
    """Within it one CUDA graph is captured: what is derived from a mask is shared until its end."""
    global _capture
    _capture = object()
    try:
        yield
    finally:
        _capture = None


def current_capture() -> object | None:
    """What stands for the graph that is being captured, where `capture` says so."""
    return _capture
