"""The command `doctor`: what this machine has, what that means for speed, and what to do.

regard doctor            a line for each thing, with ✓ where all is well and → where something helps
regard doctor --json     the same for programs
"""

import argparse
import importlib.util
import json
import os
import platform
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from regard import __version__
from regard.machine.command_line import Parser
from regard.machine.extras import EXTRAS, install, install_package


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    what: str
    found: str
    means: str = ""
    """For speed, or for what works."""
    remedy: str = ""
    """What to do; empty where nothing needs to be done."""

    @property
    def line(self) -> str:
        mark = "→" if self.remedy else "✓"
        rest = "; ".join(filter(None, (self.found, self.means)))
        return f"{mark} {self.what:<12} {rest}"


def doctor(words: Sequence[str]) -> None:
    parser = Parser(
        prog="regard doctor",
        description="Says what this machine has (torch, GPU, compiler, instruction set, threads, "
        "caches, terminal, extras), what that means for speed, and what to do.",
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="one JSON object, for programs")
    options: argparse.Namespace = parser.parse_args(list(words))
    findings = list(examined())
    if options.json:
        print(json.dumps([asdict(one) for one in findings], ensure_ascii=False))
        return
    for one in findings:
        print(one.line)
        if one.remedy:
            print(f"  {'':<12} {one.remedy}")


def examined() -> Iterator[Finding]:
    """Everything, in the order in which it matters."""
    yield _python()
    yield _torch()
    yield _gpu()
    yield _cores()
    yield _memory()
    yield _compiler()
    yield _kernels()
    yield _cache()
    yield _terminal()
    yield from _extras()


def _python() -> Finding:
    return Finding(
        "Regard",
        f"{__version__} on Python {platform.python_version()}, {platform.system()} "
        f"{platform.machine()}",
    )


def _torch() -> Finding:
    import torch

    return Finding("torch", str(torch.__version__))


def _gpu() -> Finding:
    import torch

    if torch.cuda.is_available():
        about = torch.cuda.get_device_properties(0)
        count = torch.cuda.device_count()
        more = f", the first of {count}" if count > 1 else ""
        found = f"{about.name}, {about.total_memory / 2**30:.0f} GiB{more}"
        if importlib.util.find_spec("triton") is None:
            return Finding(
                "GPU",
                found,
                "without Triton, training steps and decoding run eagerly",
                install_package("triton"),
            )
        return Finding("GPU", found, "everything takes it by itself, in bf16 and captured steps")
    smi = shutil.which("nvidia-smi")
    if smi and torch.version.cuda is None:
        return Finding(
            "GPU",
            "there seems to be one, but this torch is built for the CPU alone",
            "everything runs on the CPU",
            "install a torch for CUDA: https://pytorch.org/get-started/locally",
        )
    if smi:
        return Finding(
            "GPU",
            "there seems to be one, but torch cannot use it",
            "everything runs on the CPU",
            "see what nvidia-smi says: the driver may be too old for this torch",
        )
    return Finding("GPU", "none", "small models train in minutes on the CPU; --size base wants one")


def _cores() -> Finding:
    import torch

    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    threads = torch.get_num_threads()
    found = f"{allowed} of {os.cpu_count()} may be used; torch takes {threads} threads"
    variable = os.environ.get("OMP_NUM_THREADS")
    if variable and threads < (allowed or 1):
        return Finding(
            "cores",
            found,
            f"OMP_NUM_THREADS is {variable}, which leaves some idle",
            "unset OMP_NUM_THREADS, unless other processes need them",
        )
    if hasattr(os, "getloadavg"):
        load = os.getloadavg()[0]
        if load > (allowed or 1):
            return Finding(
                "cores",
                f"{found}; {load:.1f} processes want to run",
                "this machine is busy, and everything is slower",
                "wait for the others, or give Regard fewer threads: OMP_NUM_THREADS=1",
            )
    return Finding("cores", found)


def _memory() -> Finding:
    from regard.machine.memory import limit, shown

    return Finding("memory", f"{shown(limit())} for one process")


def _compiler() -> Finding:
    named = os.environ.get("CXX", "").split()[:1]
    found = next(filter(shutil.which, (*named, "c++", "g++", "clang++")), None)
    if found:
        return Finding("compiler", f"{shutil.which(found)}", "our kernels and torch.compile work")
    return Finding(
        "compiler",
        "no C++ compiler",
        "everything works; int8 and training run through torch, and slower, and there is no "
        "torch.compile",
        "install g++ or clang: apt install g++, dnf install gcc-c++, xcode-select --install",
    )


def _kernels() -> Finding:
    from regard.decode.engine.int8 import library

    why = library.missing()
    if why:
        return Finding("int8", "no kernels", why)
    isa = library.kernels().isa
    speed = {
        "avx512_vnni": "the best for x86",
        "avx2": "the second best for x86; the same bits as with AVX-512",
        "neon": "ARM's dot products",
    }
    return Finding("int8", f"kernels for {isa}", speed.get(isa, ""))


def _cache() -> Finding:
    from regard.machine.caches import default_cache
    from regard.machine.memory import shown

    place = default_cache()
    exists = next(path for path in (place, *place.parents) if path.exists())
    if not os.access(exists, os.W_OK):
        return Finding(
            "cache",
            f"{place} cannot be written",
            "text is tokenized, and kernels are compiled, every time",
            "name another folder: export XDG_CACHE_HOME=FOLDER",
        )
    used = sum(path.stat().st_size for path in place.rglob("*") if path.is_file())
    free = shutil.disk_usage(exists).free
    found = f"{place}, {shown(used)} used, {shown(free)} free on its disk"
    if free < 2**30:
        return Finding("cache", found, "", f"make room; all in it can be made again: rm -r {place}")
    return Finding("cache", found)


def _terminal() -> Finding:
    size = shutil.get_terminal_size()
    encoding = (getattr(sys.stdout, "encoding", None) or "ascii").lower()
    kind = "a terminal" if sys.stdout.isatty() else "no terminal"
    found = f"{kind}, {size.columns} columns, {encoding}"
    if "utf" not in encoding:
        return Finding(
            "output",
            found,
            "signs such as ░▒▓ and β are shown as ?",
            "export PYTHONUTF8=1, or a locale such as LC_ALL=C.UTF-8",
        )
    return Finding("output", found)


def _extras() -> Iterator[Finding]:
    uses = {
        "vision": "images",
        "demo": "the demonstrations",
        "plots": "figures, curves of training",
        "lab": "the course's pages",
        "train": "TensorBoard, configs in YAML",
        "text": "Marian's tokenizers, .zst, Parquet",
        "serve": "models over HTTP",
        "export": "exports to other engines",
    }
    for extra, modules in EXTRAS.items():
        wanted = [name for name in modules if not (name == "uvloop" and os.name == "nt")]
        absent = [name for name in wanted if importlib.util.find_spec(name) is None]
        if absent:
            yield Finding(
                f"[{extra}]", f"{', '.join(absent)} not installed", uses[extra], install(extra)
            )
        else:
            yield Finding(f"[{extra}]", "installed", uses[extra])
