"""How much memory there is, and what fits into it.

    limit(device)                    bytes of a GPU, or of the machine as far as this process may go
    check(what, sizes, have)         refuses what cannot fit, and says which value would

What is too large is refused before memory is asked for: a machine that runs out of it ends
processes without a word.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

UNKNOWN = 2**62
"""Where nobody says how much there is."""

SHARE = 0.9
"""Of all memory; the rest is for the system, the program and what the figures leave out."""


@dataclass(frozen=True)
class Size:
    """A setting that memory depends on."""

    name: str
    value: int
    usual: int
    """By which is told how far out of proportion a value is."""
    bytes: Callable[[int], int]
    """How many are needed with this value, or with another; more for a greater one."""
    step: int = 1
    """Possible values are multiples of this."""

    def largest(self, have: int) -> int:
        """The largest possible value for which there is memory; 0 if there is none."""
        low, high = 0, self.value // self.step
        while low < high:
            middle = (low + high + 1) // 2
            if self.bytes(middle * self.step) <= have:
                low = middle
            else:
                high = middle - 1
        return low * self.step


def check(what: str, sizes: Sequence[Size], have: int) -> None:
    """A ValueError where there is too little memory, with what would fit.

    All sizes are of one thing: each tells how many bytes it needs if this one alone is changed.
    """
    need = sizes[0].bytes(sizes[0].value)
    if need <= have:
        return
    reason = f"{what} needs about {shown(need)} of memory, and there are {shown(have)}"
    by_excess = sorted(sizes, key=lambda size: size.value / size.usual, reverse=True)
    for size in by_excess:
        if fits := size.largest(have):
            raise ValueError(
                f"{size.name} ({size.value}) is too large: {reason}; the largest that fits is "
                f"{fits}"
            )
    names = " and ".join(f"{size.name} ({size.value})" for size in by_excess[:2])
    raise ValueError(f"{names} are too large: {reason}; lower both")


def shown(count: int) -> str:
    """Bytes for people."""
    for power, unit in enumerate(("bytes", "kB", "MB", "GB", "TB", "PB")):
        if count < 1000 ** (power + 1):
            return f"{count / 1000**power:.3g} {unit}"
    return f"{count / 1000**5:.2g} PB"


def limit(device: torch.device | str = "cpu") -> int:
    """Bytes that can be filled: of a GPU's memory, or of the machine's as far as is allowed."""
    place = torch.device(device)
    if place.type == "cuda":
        return int(SHARE * torch.cuda.get_device_properties(place).total_memory)
    return int(SHARE * _machine())


@cache
def _machine() -> int:
    return min(_limits(), default=UNKNOWN)


def _limits() -> Iterator[int]:
    with suppress(AttributeError, ValueError, OSError):  # not every system has these names
        yield os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(ImportError):
        import resource

        soft, _ = resource.getrlimit(resource.RLIMIT_AS)
        if soft != resource.RLIM_INFINITY:
            yield soft
    yield from _cgroups()


def _cgroups(root: Path = Path("/")) -> Iterator[int]:
    """What the control groups of a container, a service or a batch system allow."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        # Version 2 has one tree, version 1 one for memory; a container may see its own as the root.
        tree, name = root / "sys/fs/cgroup", "memory.max"
        if controllers:
            tree, name = tree / controllers, "memory.limit_in_bytes"
        here = tree / path.lstrip("/")
        for folder in (here, *here.parents):
            with suppress(OSError, ValueError):  # "max", or no such file here
                yield int((folder / name).read_text(encoding="utf-8"))
            if folder == tree:
                break
