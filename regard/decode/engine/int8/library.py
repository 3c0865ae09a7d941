"""The kernels, compiled for this CPU where they are first used: once, in a few seconds.

One source serves three instruction sets, and gives the same bits on all of them:

    avx512_vnni    x86 with AVX-512 and its dot products of 8-bit integers
    avx2           x86 with AVX2, FMA and F16C, as most have had since 2013
    neon           64-bit ARM with dot products, as most have had since 2018

$REGARD_CPU_ISA names one of them; otherwise the first that this CPU has is used. They need Linux
or macOS and a C++ compiler ($CXX, or g++). Where one of these is missing there is no library, and
torch does the same work, more slowly. They are called as plain C: nothing in them depends on the
version of torch or Python.
"""

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from regard import atomic
from regard.data.cache import default_cache
from regard.data.problems import reason

SOURCE = Path(__file__).with_name("kernels.cpp")
HEADERS = tuple(map(SOURCE.with_name, ("pool.h", "search.h", "simd.h")))
# What a CPU must have, as Linux calls it.
ISAS = {
    "avx512_vnni": ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni", "fma", "f16c"),
    "avx2": ("avx2", "fma", "f16c"),
    "neon": ("asimddp",),
}
# Contraction would make a result depend on the instruction set.
FLAGS = ("-O3", "-std=c++17", "-shared", "-fPIC", "-pthread", "-ffp-contract=off")
PATIENCE = 600
"""Timeout of the compiler, in seconds, even on a very busy machine."""

_int, _float, _pointer = ctypes.c_int64, ctypes.c_double, ctypes.c_void_p


# The structures of kernels.cpp and search.h, where their fields are explained.


class Told(ctypes.Structure):
    held: object
    """What must not be freed meanwhile."""


def _fields(*kinds: tuple[Any, str]) -> list[tuple[str, Any]]:
    return [(name, kind) for kind, names in kinds for name in names.split()]


class Linear(Told):
    _fields_ = _fields((_int, "inner out"), (_pointer, "weight start scale bias"))


class Norm(Told):
    _fields_ = _fields((_pointer, "gain bias"), (_float, "epsilon"))


class Attention(Told):
    _fields_ = _fields(
        (_int, "heads key_heads key_width value_width"),
        (_float, "beta"),
        (Linear, "query key value output"),
    )


class Block(Told):
    _fields_ = _fields(
        (Attention, "self_attention cross_attention"),
        (Linear, "expand gate reduce"),
        (Norm, "self_norm cross_norm feed_forward_norm"),
        (_int, "pre_norm activation"),
    )


class Embedding(Told):
    _fields_ = _fields((_pointer, "id table place"), (_float, "scale"))


class Rotary(Told):
    _fields_ = _fields((_pointer, "table"), (_int, "pairs halves"))


class Cache(Told):
    _fields_ = _fields(
        (_pointer, "data"),
        (_int, "slots"),
        (_pointer, "table"),
        (_int, "width"),
        (_pointer, "length"),
    )


class Tokens(Told):
    _fields_ = _fields(
        (_int, "count width causal window"),
        (_pointer, "x sequence position"),
        (Embedding, "embedding"),
        (Rotary, "rotary"),
        (Cache, "cache memory"),
    )


class Rule(Told):
    _fields_ = _fields((_int, "end renormalize count"), (_pointer, "banned most least"))


class Beams(Told):
    _fields_ = _fields(
        (_int, "width kept columns horizon"),
        (_pointer, "penalty open parents tokens gains scores ends lengths slots cut"),
    )


class Paths(Told):
    _fields_ = _fields((_int, "columns"), (_pointer, "sentence tokens scores"))


class Search(Told):
    _fields_ = _fields(
        (_int, "sentences each"),
        (_pointer, "place"),
        (Rule, "rule"),
        (ctypes.POINTER(Beams), "beams"),
        (ctypes.POINTER(Paths), "paths"),
        (_pointer, "last rows t over"),
    )


class Kernels(NamedTuple):
    library: ctypes.CDLL | None
    isa: str
    """The instruction set; nothing without a library."""
    reason: str
    """Why there is no library, or why it is not for a better instruction set."""


def address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def library() -> ctypes.CDLL | None:
    """The compiled kernels, or None: `missing` says why."""
    return kernels().library


def missing() -> str:
    """Why there are no kernels; nothing where there are."""
    return "" if kernels().library else kernels().reason


_one_at_a_time = threading.Lock()


def kernels() -> Kernels:
    with _one_at_a_time:
        return _load()


@functools.cache
def _load() -> Kernels:
    reasons = []
    try:
        for isa in _candidates():
            if lacking := [name for name in ISAS[isa] if name not in _cpu()]:
                reasons.append(f"{isa}: this CPU has no {', '.join(lacking)}")
                continue
            try:
                return Kernels(_declared(_open(isa)), isa, "; ".join(reasons))
            except subprocess.CalledProcessError as error:  # a compiler may not know the best yet
                reasons.append(f"{isa}: {_reason(error)}")
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        reasons.append(_reason(error))
    return Kernels(None, "", reasons[-1])


def _candidates() -> list[str]:
    """Instruction sets of this architecture, best first, or the one that is asked for."""
    if wanted := os.environ.get("REGARD_CPU_ISA"):
        if wanted not in ISAS:
            raise ValueError(f"REGARD_CPU_ISA ({wanted}) is unknown; choose from {', '.join(ISAS)}")
        return [wanted]
    match platform.machine():
        case "x86_64" | "AMD64":
            return ["avx512_vnni", "avx2"]
        case "aarch64" | "arm64":
            return ["neon"]
    raise ValueError(f"there are no kernels for {platform.machine()}, but for x86_64 and aarch64")


def _cpu() -> set[str]:
    """What the CPU has."""
    if (sys.platform, platform.machine()) == ("darwin", "arm64"):
        return {"asimddp"}
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines()
    except OSError as error:
        raise ValueError("the kernels for 8-bit layers are for Linux, or macOS on ARM") from error
    named = (line.split(":")[1].split() for line in lines if line[:5] in ("flags", "Featu"))
    return set(next(named, ()))


def _flags(isa: str) -> list[str]:
    names = [f"-m{name.replace('_', '')}" for name in ISAS[isa]]
    return [*FLAGS, *(["-march=armv8.2-a+dotprod"] if isa == "neon" else names)]


def _declared(kernels: ctypes.CDLL) -> ctypes.CDLL:
    kinds = (Linear, Norm, Attention, Block, Tokens, Rule, Search)
    linear, norm, attention, block, tokens, rule, search = map(ctypes.POINTER, kinds)
    threads = ctypes.c_int
    kernels.slot_width.argtypes, kernels.slot_width.restype = (attention,), _int
    kernels.linear.argtypes = (linear, _pointer, _int, _pointer, threads)
    kernels.run.argtypes = (block, _int, tokens, norm, linear, _pointer, threads)
    kernels.project_memory.argtypes = (block, _int, tokens, threads)
    row = (_int, _int, _int, _pointer, _pointer)
    kernels.best_tokens.argtypes = (_pointer, _int, _int, rule, *row, threads)
    kernels.advance.restype = _int
    taking = (search, _int, _pointer, ctypes.POINTER(_int), threads)
    kernels.advance.argtypes = (block, _int, tokens, norm, linear, *taking)
    return kernels


def _open(isa: str) -> ctypes.CDLL:
    folder = _folder()
    words = shlex.split(os.environ.get("CXX", "")) or ["g++"]
    command = [*words, *_flags(isa)]
    read = b"".join(path.read_bytes() for path in (SOURCE, *HEADERS))
    key = hashlib.sha256(read + " ".join(command).encode()).hexdigest()[:16]
    file = folder / f"{isa}-{key}.so"
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
    """The cache folder of kernels: who can write there can have this process run anything."""
    folder = default_cache() / "kernels"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"{folder} cannot be made ({reason(error)}); name another folder in XDG_CACHE_HOME"
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
    # Another process that compiles it now puts the same file in the same place.
    with atomic.file(file) as draft:
        subprocess.run(
            [*command, "-o", str(draft), str(SOURCE)],
            check=True,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=PATIENCE,
            env={**os.environ, "TMPDIR": str(draft.parent)},
        )
        draft.chmod(0o700)


def _reason(error: Exception) -> str:
    """One line: of a compiler's words, the first that names an error."""
    if isinstance(error, OSError):
        return f"{error.filename}: {reason(error)}" if error.filename else reason(error)
    output = error.stderr if isinstance(error, subprocess.CalledProcessError) else ""
    lines = (output.strip() or str(error)).splitlines()
    return next((line for line in lines if "error" in line), lines[0] if lines else repr(error))
