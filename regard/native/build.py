"""C++ kernels, compiled for this CPU where they are first used: once, in a few seconds.

One source serves three instruction sets:

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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from regard.machine import atomic
from regard.machine.caches import default_cache

SHARED = Path(__file__).parent
INCLUDE = f"-I{SHARED}"
"""For headers that kernels share."""
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

# How C's structures and arguments are written.
Int, Float, Pointer = ctypes.c_int64, ctypes.c_double, ctypes.c_void_p


def fields(*kinds: tuple[Any, str]) -> list[tuple[str, Any]]:
    """Of a structure: types, and the names of those that have one."""
    return [(name, kind) for kind, names in kinds for name in names.split()]


def address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


class Kernels(NamedTuple):
    library: ctypes.CDLL | None
    isa: str
    """The instruction set; nothing without a library."""
    reason: str
    """Why there is no library, or why it is not for a better instruction set."""


_one_at_a_time = threading.Lock()


class Source:
    """A C++ file and the headers that it includes."""

    def __init__(
        self,
        file: Path,
        headers: Sequence[Path],
        purpose: str,
        declare: Callable[[ctypes.CDLL], None],
    ):
        """`declare` says what arguments its functions take; `purpose` is told to who waits."""
        self.file, self.headers, self.purpose, self.declare = file, headers, purpose, declare

    def library(self) -> ctypes.CDLL | None:
        """The compiled kernels, or None: `missing` says why."""
        return self.kernels().library

    def loaded(self) -> ctypes.CDLL:
        """The same where it is known that there are kernels."""
        library = self.library()
        assert library is not None
        return library

    def missing(self) -> str:
        """Why there are no kernels; nothing where there are."""
        found = self.kernels()
        return "" if found.library else found.reason

    def kernels(self) -> Kernels:
        with _one_at_a_time:
            return _load(self)

    def open(self, isa: str) -> ctypes.CDLL:
        """For one instruction set, from the cache or from a compiler."""
        folder = _folder()
        words = shlex.split(os.environ.get("CXX", "")) or ["g++"]
        command = [*words, *compile_flags(isa)]
        read = b"".join(path.read_bytes() for path in (self.file, *self.headers))
        key = hashlib.sha256(read + " ".join(command).encode()).hexdigest()[:16]
        file = folder / f"{isa}-{key}.so"
        if _own(file):
            try:
                return ctypes.CDLL(str(file))
            except OSError:
                pass  # damaged, or of a machine that shares this folder: made again
        if shutil.which(words[0]) is None:
            raise ValueError(
                f"there is no C++ compiler {words[0]}; install g++, or name one in CXX"
            )
        if sys.stderr is not None and sys.stderr.isatty():
            what = f"compiling kernels of {self.purpose} for this CPU, once; this takes seconds"
            print(f"regard: {what}", file=sys.stderr, flush=True)
        _compile(command, self.file, file)
        return ctypes.CDLL(str(file))


@functools.cache
def _load(source: Source) -> Kernels:
    reasons = []
    try:
        for isa in _candidates():
            if lacking := [name for name in ISAS[isa] if name not in cpu()]:
                reasons.append(f"{isa}: this CPU has no {', '.join(lacking)}")
                continue
            try:
                library = source.open(isa)
                source.declare(library)
                return Kernels(library, isa, "; ".join(reasons))
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


def cpu() -> set[str]:
    """What the CPU has."""
    if (sys.platform, platform.machine()) == ("darwin", "arm64"):
        return {"asimddp"}
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines()
    except OSError as error:
        raise ValueError("the kernels are for Linux, or macOS on ARM") from error
    named = (line.split(":")[1].split() for line in lines if line[:5] in ("flags", "Featu"))
    return set(next(named, ()))


def compile_flags(isa: str) -> list[str]:
    names = [f"-m{name.replace('_', '')}" for name in ISAS[isa]]
    return [*FLAGS, *(["-march=armv8.2-a+dotprod"] if isa == "neon" else names)]


def _folder() -> Path:
    """The cache folder of kernels: who can write there can have this process run anything."""
    folder = default_cache() / "kernels"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"{folder} cannot be made ({error.strerror}); name another folder in XDG_CACHE_HOME"
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


def _compile(command: list[str], source: Path, file: Path) -> None:
    file.unlink(missing_ok=True)  # a replaced file would keep its mode, which may be unsafe
    # Another process that compiles it now puts the same file in the same place.
    with atomic.file(file) as draft:
        subprocess.run(
            [*command, INCLUDE, "-o", str(draft), str(source)],
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
        words = error.strerror or " ".join(str(error).split())
        return f"{error.filename}: {words}" if error.filename else words
    output = error.stderr if isinstance(error, subprocess.CalledProcessError) else ""
    lines = (output.strip() or str(error)).splitlines()
    return next((line for line in lines if "error" in line), lines[0] if lines else repr(error))
