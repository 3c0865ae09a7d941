"""The kernels of kernels.cpp, compiled where they are used: once, in a few seconds, and then kept.

They need Linux, a CPU with AVX-512 VNNI and a C++ compiler ($CXX, else g++). Where one of these is
missing there is no library, and torch does the same work, more slowly.
"""

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from torch import Tensor

SOURCE = Path(__file__).with_name("kernels.cpp")
NEEDED = ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni", "fma")
FLAGS = (
    *("-O3", "-std=c++17", "-shared", "-fPIC", "-fopenmp"),
    *(f"-m{name.replace('_', '')}" for name in NEEDED),
)

_int, _float, _pointer = ctypes.c_int64, ctypes.c_double, ctypes.c_void_p


def _fields(kind: Any, *names: str) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names]


class Linear(ctypes.Structure):
    _fields_ = [
        *_fields(_int, "inner", "out"),
        *_fields(_pointer, "weight", "start", "scale", "bias"),
    ]


class Norm(ctypes.Structure):
    _fields_ = [*_fields(_pointer, "gain", "shift"), ("epsilon", _float)]


class Attention(ctypes.Structure):
    _fields_ = [
        *_fields(_int, "heads", "key_heads", "key_width", "value_width"),
        ("beta", _float),
        *_fields(Linear, "query", "key", "value", "output"),
        ("turn", _pointer),
        *_fields(_int, "turned", "halves"),
    ]


class Block(ctypes.Structure):
    _fields_ = [
        *_fields(Attention, "own", "cross"),
        *_fields(Linear, "expand", "gate", "reduce"),
        *_fields(Norm, "own_norm", "cross_norm", "last_norm"),
        *_fields(_int, "has_cross", "pre", "activation", "gated"),
    ]


class Rows(ctypes.Structure):
    _fields_ = [
        *_fields(_int, "rows", "width"),
        *_fields(_pointer, "x", "kept"),
        *_fields(_int, "room", "base"),
        ("table", _pointer),
        *_fields(_int, "columns", "filled"),
        *_fields(_pointer, "start", "count", "place", "memory"),
        ("places", _int),
        *_fields(_pointer, "memory_start", "memory_count"),
    ]


def address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def library() -> ctypes.CDLL | None:
    """The compiled kernels, or None: `missing` says why."""
    return _loaded()[0]


def missing() -> str:
    """Why there are no kernels; nothing where there are."""
    return _loaded()[1]


@functools.cache
def _loaded() -> tuple[ctypes.CDLL | None, str]:
    try:
        kernels = ctypes.CDLL(str(_compiled()))
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        said = getattr(error, "stderr", None) or str(error)
        return None, said.strip().splitlines()[0]
    linear, norm, block, rows = map(ctypes.POINTER, (Linear, Norm, Block, Rows))
    threads = ctypes.c_int
    kernels.linear.argtypes = (linear, _pointer, _int, _pointer, threads)
    kernels.remember.argtypes = (block, _int, _pointer, _int, _pointer, threads)
    kernels.log_sums.argtypes = (_pointer, _int, _int, _pointer, threads)
    kernels.best.argtypes = (_pointer, *(_int,) * 3, _pointer, _pointer, threads)
    kernels.run.argtypes = (block, _int, rows, norm, linear, _pointer, threads)
    return kernels, ""


def _compiled() -> Path:
    if lacking := [name for name in NEEDED if name not in _cpu()]:
        raise ValueError(f"this CPU has no {', '.join(lacking)}")
    name = os.environ.get("CXX", "g++")
    compiler = shutil.which(name)
    if compiler is None:
        raise ValueError(f"there is no C++ compiler {name}; install g++, or name one in CXX")
    command = [compiler, *FLAGS]
    key = hashlib.sha256(SOURCE.read_bytes() + " ".join(command).encode()).hexdigest()[:16]
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "regard"
    found = home / f"kernels-{key}.so"
    if not found.exists():
        home.mkdir(parents=True, exist_ok=True)
        # Whoever else is compiling it now puts the same file in the same place.
        with tempfile.TemporaryDirectory(dir=home) as folder:
            made = Path(folder) / found.name
            subprocess.run(
                [*command, "-o", str(made), str(SOURCE)], check=True, capture_output=True, text=True
            )
            made.replace(found)
    return found


def _cpu() -> set[str]:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError as error:
        raise ValueError("the kernels for 8-bit layers are for Linux") from error
    return next(
        (set(line.split(":")[1].split()) for line in text.splitlines() if line[:5] == "flags"),
        set(),
    )
