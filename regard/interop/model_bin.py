"""CTranslate2's model.bin, to be read: variables by name.

    version, name and revision of the specification
    for each variable: name, shape, type, bytes            all little-endian
    for each alias: its name, and the variable that it is

Weights of 8 and 16 bits are integers with a scale for each row, or for all: w = q / scale. They are
given back as float32.
"""

import struct
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from regard.data.files import check_file

_KINDS = (
    torch.float32,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.float16,
    torch.bfloat16,
)
_VERSIONS = (5, 6)


class Stored(NamedTuple):
    """What a model.bin holds."""

    specification: str
    variables: dict[str, Tensor]


def read(path: Path) -> Stored:
    """All variables, aliases too, which share their tensor."""
    check_file(path)
    try:
        return _read(_Bytes(path.read_bytes()))
    except (struct.error, UnicodeDecodeError, IndexError, KeyError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{path} is damaged ({reason}); fetch it again") from None


def _read(content: "_Bytes") -> Stored:
    version = content.number("I")
    if version not in _VERSIONS:
        known = " and ".join(map(str, _VERSIONS))
        raise RuntimeError(f"version {version}; known are {known}")
    name = content.text()
    content.number("I")  # the specification's revision; missing and unexpected variables tell
    variables: dict[str, Tensor] = {}
    for _ in range(content.number("I")):
        key = content.text()
        shape = [content.number("I") for _ in range(content.number("B"))]
        kind = _KINDS[content.number("B")]
        variables[key] = content.tensor(content.number("I"), kind, shape)
    for _ in range(content.number("I")):
        alias, key = content.text(), content.text()
        variables[alias] = variables[key]
    return Stored(name, variables)


def dequantized(variables: dict[str, Tensor]) -> dict[str, Tensor]:
    """Integers times their scales; the scales are gone. What was one tensor stays one."""
    done: dict[int, Tensor] = {}
    result = {}
    for name, tensor in variables.items():
        if name.endswith("_scale"):
            continue
        scale = variables.get(f"{name}_scale")
        if scale is not None and id(tensor) not in done:
            rows = scale.float().reshape(-1, *[1] * (tensor.ndim - 1)) if scale.ndim else scale
            if scale.ndim and len(scale) != len(tensor):
                raise ValueError(
                    f"{name}_scale has {len(scale)} rows for {len(tensor)}; restore it"
                )
            done[id(tensor)] = tensor.float() / rows
        result[name] = done.get(id(tensor), tensor)
    return result


class _Bytes:
    """Takes a file apart; what is not there is an error, before anything is asked for."""

    def __init__(self, content: bytes):
        self.content, self.at = memoryview(content), 0

    def number(self, kind: str) -> int:
        size = struct.calcsize(f"<{kind}")
        (value,) = struct.unpack(f"<{kind}", self._take(size))
        return int(value)

    def text(self) -> str:
        return str(bytes(self._take(self.number("H"))).rstrip(b"\0"), "utf-8")

    def tensor(self, size: int, kind: torch.dtype, shape: list[int]) -> Tensor:
        data = bytearray(self._take(size))
        if not size:
            return torch.empty(shape, dtype=kind) if 0 in shape else self._short()
        return torch.frombuffer(data, dtype=kind).view(shape)

    def _take(self, size: int) -> memoryview:
        part = self.content[self.at : self.at + size]
        if len(part) != size:
            self._short()
        self.at += size
        return part

    def _short(self) -> Tensor:
        raise RuntimeError(f"it ends after {len(self.content):,} bytes")
