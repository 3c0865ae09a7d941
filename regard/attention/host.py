"""Values as the host sees them: what may be read without waiting for a device, and how they show.

A check that asked a device for a value would make every call of attention wait for it. So values
are looked at only where `on_host` says so; everything else is known from shapes and types.
"""

from types import FunctionType
from typing import Any

import torch
from torch import Tensor


def on_host(tensor: Tensor) -> bool:
    """Whether values can be looked at without waiting for a device (or for a compiler)."""
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling()


def capturing() -> bool:
    """Whether a CUDA graph is being captured: what is made now has no values until its replay."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def shown(value: Any, most: int = 6) -> str:
    """A value for a text of one line: short, and without asking a device for it."""
    if not isinstance(value, Tensor):
        if isinstance(value, type | FunctionType):
            return f"{'class' if isinstance(value, type) else 'function'} {value.__name__}"
        text = repr(value)
        return text if len(text) <= 80 and "\n" not in text else f"a {type(value).__name__}"
    if not on_host(value):
        return f"{'x'.join(map(str, value.shape)) or 'one'} on {value.device.type}"
    if value.ndim == 0:
        return str(value.item())
    head = ", ".join(map(str, value[:most].tolist()))
    return f"[{head}]" if len(value) <= most else f"[{head}, ... {len(value)} in all]"


def whole(name: str, value: Any, least: int = 1) -> None:
    """Refuse what is not a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} ({shown(value)}) must be a whole number, {least} or more")


_FORMS = ("an integer", "a list such as [3, 5]", "rows such as [[0, 0], [0, 1]]")


def integers(values: Any, name: str, axes: tuple[int, ...] = (1,)) -> Tensor:
    """`values` as an integer tensor of an allowed number of axes, or a ValueError."""
    forms = " or ".join(_FORMS[n] for n in axes)
    try:
        tensor = values if isinstance(values, Tensor) else torch.tensor(values)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"{name} must be integers, got {shown(values)}; pass {forms}") from None
    if not isinstance(values, Tensor) and tensor.numel() == 0:
        tensor = tensor.long()
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex or tensor.dtype == torch.bool:
        raise ValueError(f"{name} must be integers, got {tensor.dtype}; convert with .long()")
    if tensor.ndim not in axes:
        wanted = " or ".join(map(str, axes)) + (" axis" if axes[-1] < 2 else " axes")
        shape = tuple(tensor.shape)
        raise ValueError(f"{name} must have {wanted}, got shape {shape}; pass {forms}")
    return tensor
