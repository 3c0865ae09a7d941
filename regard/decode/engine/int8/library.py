"""The kernels of kernels.cpp, compiled where they are used: once, in a few seconds, and then kept.

They need Linux, a CPU with AVX-512 VNNI and a C++ compiler ($CXX, else g++). Where one of these is
missing there is no library, and torch does the same work, more slowly. They are called as plain C:
nothing in them depends on the version of torch or Python.
"""

import ctypes
import functools
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from torch import Tensor

from regard.data.cache import default_cache

SOURCE = Path(__file__).with_name("kernels.cpp")
NEEDED = ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni", "fma")
FLAGS = (
    *("-O3", "-std=c++17", "-shared", "-fPIC", "-fopenmp"),
    *(f"-m{name.replace('_', '')}" for name in NEEDED),
)
PATIENCE = 600
"""Seconds after which a compiler is given up, even on a machine that is very busy."""

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


_one_at_a_time = threading.Lock()


def _loaded() -> tuple[ctypes.CDLL | None, str]:
    with _one_at_a_time:
        return _load()


@functools.cache
def _load() -> tuple[ctypes.CDLL | None, str]:
    try:
        kernels = _open()
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        return None, _reason(error)
    linear, norm, block, rows = map(ctypes.POINTER, (Linear, Norm, Block, Rows))
    threads = ctypes.c_int
    kernels.linear.argtypes = (linear, _pointer, _int, _pointer, threads)
    kernels.remember.argtypes = (block, _int, _pointer, _int, _pointer, threads)
    kernels.log_sums.argtypes = (_pointer, _int, _int, _pointer, threads)
    kernels.best.argtypes = (_pointer, *(_int,) * 3, _pointer, _pointer, threads)
    kernels.run.argtypes = (block, _int, rows, norm, linear, _pointer, threads)
    return kernels, ""


def _open() -> ctypes.CDLL:
    if lacking := [name for name in NEEDED if name not in _cpu()]:
        raise ValueError(f"this CPU has no {', '.join(lacking)}")
    folder = _folder()
    words = shlex.split(os.environ.get("CXX", "")) or ["g++"]
    command = [*words, *FLAGS]
    key = hashlib.sha256(SOURCE.read_bytes() + " ".join(command).encode()).hexdigest()[:16]
    file = folder / f"kernels-{key}.so"
    if _own(file):
        try:
            return ctypes.CDLL(str(file))
        except OSError:
            pass  # damaged, or of a machine that shares this folder: made again
    if shutil.which(words[0]) is None:
        raise ValueError(f"there is no C++ compiler {words[0]}; install g++, or name one in CXX")
    _compile(command, file)
    return ctypes.CDLL(str(file))


def _folder() -> Path:
    """Where kernels are kept: whoever could write there could have this process run anything."""
    try:
        folder = default_cache() / "kernels"
    except RuntimeError as error:  # a user without a home
        raise ValueError(f"{error}; name a folder in XDG_CACHE_HOME") from error
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        said = error.strerror or str(error)
        raise ValueError(
            f"{folder} cannot be made ({said}); name another folder in XDG_CACHE_HOME"
        ) from error
    if not _own(folder):
        raise ValueError(
            f"{folder} must belong to this user, and nobody else may write there, since compiled "
            "kernels are kept in it; remove it, or name another folder in XDG_CACHE_HOME"
        )
    return folder


def _own(path: Path) -> bool:
    """Whether it is there, and nobody but this user can have written it."""
    try:
        about = path.stat()
    except FileNotFoundError:
        return False
    return about.st_uid == os.geteuid() and not about.st_mode & 0o022


def _compile(command: list[str], file: Path) -> None:
    if sys.stderr is not None and sys.stderr.isatty():
        words = "regard: compiling decoding kernels for this CPU, once; this takes a few seconds"
        print(words, file=sys.stderr, flush=True)
    # Whoever else is compiling it now puts the same file in the same place.
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        made = Path(folder) / file.name
        subprocess.run(
            [*command, "-o", str(made), str(SOURCE)],
            check=True,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=PATIENCE,
            env={**os.environ, "TMPDIR": folder},
        )
        made.chmod(0o700)
        made.replace(file)


def _reason(error: Exception) -> str:
    """One line: of a compiler's words, the first that names an error."""
    said = error.stderr if isinstance(error, subprocess.CalledProcessError) else ""
    lines = (said.strip() or str(error)).splitlines()
    return next((line for line in lines if "error" in line), lines[0] if lines else repr(error))


def _cpu() -> set[str]:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError as error:
        raise ValueError("the kernels for 8-bit layers are for Linux") from error
    return next(
        (set(line.split(":")[1].split()) for line in text.splitlines() if line[:5] == "flags"),
        set(),
    )
