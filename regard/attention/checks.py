"""Checks of arguments, none of which waits for a device, and values as their messages show them."""

import math
from collections.abc import Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from regard.attention.sync import on_host

MAX_LENGTH = 2**31 - 1
"""The longest sequence: kernels count positions in int32."""
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def shown(value: Any, most: int = 6) -> str:
    """A value in one short line, without reading it from a device."""
    if not isinstance(value, Tensor):
        if isinstance(value, type | FunctionType):
            return f"{'class' if isinstance(value, type) else 'function'} {value.__name__}"
        text = repr(value)
        return text if len(text) <= 80 and "\n" not in text else f"a {type(value).__name__}"
    if kind := _special_kind(value):
        return f"a {kind} tensor"
    if not on_host(value):
        return f"{'x'.join(map(str, value.shape)) or 'one'} on {value.device.type}"
    if value.ndim == 0:
        return str(value.item())
    head = ", ".join(map(str, value[:most].tolist()))
    return f"[{head}]" if len(value) <= most else f"[{head}, ... {len(value)} in all]"


def broadcasts(have: int, need: int) -> bool:
    """True if an axis of length `have` broadcasts to length `need`.

    By comparisons: torch's compiler takes `have in (1, need)` for False where a size is dynamic.
    """
    return have == 1 or have == need


def broadcast_shape(*shapes: Sequence[int]) -> torch.Size:
    """The shape that all of these broadcast to.

    `torch.broadcast_shapes` gives the same, but its first call imports sympy, for which a command
    would wait half a second.
    """
    common = [1] * max(map(len, shapes))
    for shape in shapes:
        for n in range(-1, -1 - len(shape), -1):
            if common[n] == 1:
                common[n] = shape[n]
            elif not broadcasts(shape[n], common[n]):
                listed = ", ".join(str(tuple(size)) for size in shapes)
                raise ValueError(f"shapes {listed} do not broadcast; make them equal or 1")
    return torch.Size(common)


def check_integer(name: str, value: Any, least: int = 1, most: int | None = None) -> None:
    """Raises ValueError unless the value is an integer from `least` to `most`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} ({shown(value)}) must be a whole number, {least} or more")
    if most is not None and value > most:
        raise ValueError(f"{name} ({shown(value)}) must be at most {most}")


def check_dense(name: str, tensor: Tensor) -> None:
    """Raises ValueError for a nested, quantized or sparse tensor."""
    if kind := _special_kind(tensor):
        remedies = {
            "nested": "lay its sequences end to end and pass mask=packed(lengths)",
            "quantized": "pass its dequantize()",
        }
        remedy = remedies.get(kind, "pass its to_dense()")
        raise ValueError(f"{name} is a {kind} tensor; {remedy}")


def check_vectors(name: str, vectors: Any) -> None:
    """Raises ValueError for other than a dense tensor of vectors."""
    if not isinstance(vectors, Tensor):
        raise ValueError(
            f"{name} must be a tensor of shape (..., length, width), got {shown(vectors)}; "
            "make one with torch.tensor(...)"
        )
    check_dense(name, vectors)
    if vectors.ndim < 2:
        raise ValueError(
            f"{name} of shape {tuple(vectors.shape)} has no length axis; "
            "pass (..., length, width), a single vector as vector[None]"
        )


def _special_kind(tensor: Tensor) -> str | None:
    """Nested, quantized or the layout, of a tensor that is not strided; else None."""
    if tensor.is_nested:
        return "nested"
    if tensor.is_quantized:
        return "quantized"
    return None if tensor.layout == torch.strided else str(tensor.layout).removeprefix("torch.")


def check_divides(name: str, part: int, whole_name: str, whole: int, each: int = 1) -> None:
    """Raises ValueError where `whole` is not made of `part` pieces, each a multiple of `each`."""
    if whole % (part * each) == 0:
        return
    fits = [n for n in _divisors(whole) if whole % (n * each) == 0]
    larger = [n for n in fits if n > part][:2]
    fits = larger if len(larger) == 2 else fits[-2:]
    least = max(1, round(whole / (part * each))) * part * each
    remedy = " or ".join(map(str, fits)) if fits else f"{whole_name} {least}"
    raise ValueError(f"{name} ({part}) must divide {whole_name} ({whole}); try {remedy}")


def _divisors(number: int) -> list[int]:
    """All of them, or of a number beyond reason some, in order."""
    low = [n for n in range(1, min(math.isqrt(number), 10**6) + 1) if number % n == 0]
    return sorted({*low, *(number // n for n in low)})


_FORMS = ("an integer", "a list such as [3, 5]", "rows such as [[0, 0], [0, 1]]")


def integer_tensor(
    values: Any, name: str, axes: tuple[int, ...] = (1,), booleans: int | None = None
) -> Tensor:
    """`values` as an integer tensor with an allowed number of axes; else a ValueError.

    A boolean tensor with `booleans` axes is returned as it is.
    """
    forms = " or ".join(_FORMS[n] for n in axes)
    try:
        tensor = values if isinstance(values, Tensor) else torch.tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        kind = "integers of 64 bits" if "verflow" in str(error) else "integers"
        raise ValueError(f"{name} must be {kind}, got {shown(values)}; pass {forms}") from None
    check_dense(name, tensor)
    if not isinstance(values, Tensor) and tensor.numel() == 0:
        tensor = tensor.long()
    if tensor.dtype == torch.bool and tensor.ndim == booleans:
        return tensor
    if tensor.dtype not in INTEGERS:
        remedy = "convert with .long()"
        if tensor.dtype == torch.bool and booleans is not None:
            remedy = f"a mask of real tokens has {booleans} axes"
            remedy += ": mask[None]" if tensor.ndim == booleans - 1 else ""
        raise ValueError(f"{name} must be integers, got {tensor.dtype}; {remedy}")
    if tensor.ndim not in axes:
        counts = " or ".join(map(str, axes)) + (" axis" if axes[-1] < 2 else " axes")
        shape = tuple(tensor.shape)
        raise ValueError(f"{name} must have {counts}, got shape {shape}; pass {forms}")
    return tensor
