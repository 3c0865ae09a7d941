"""GPUs, as the main process sees them, and workers beside them.

torch, which would know more, is the workers' alone.
"""

import os
from collections.abc import Sequence
from pathlib import Path

SMALL = 2**30
"""Bytes of weights. A GPU takes a step of a smaller model in less time than Python needs for what
is around it, so that other workers have work for it meanwhile."""
SHARING, CORES = 4, 4
"""Workers that share a GPU, and cores for each of them."""


def gpus(devices: Path = Path("/dev")) -> list[str]:
    """Their names, as CUDA_VISIBLE_DEVICES has them."""
    there = [path for path in devices.glob("nvidia*") if path.name[6:].isdigit()]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [str(n) for n in range(len(there))]
    return [name.strip() for name in visible.split(",") if name.strip()] if there else []


def default_workers(
    folders: Sequence[str], device: str, precision: str, cores: int, there: Sequence[str]
) -> int:
    """One; and for each of the GPUs that are there one, or several where models are small."""
    if device not in ("auto", "cuda") or precision == "int8" or not there:
        return 1
    small = sum(map(_weights, folders)) <= SMALL
    each = min(SHARING, cores // (CORES * len(there))) if small else 1
    return max(1, each) * len(there)


def placed(number: int, count: int, device: str, there: Sequence[str]) -> tuple[str | None, int]:
    """The GPU of one of so many workers, which take GPUs in turn, and how many of them share it.

    None leaves it to torch: where it is named, or there is no choice.
    """
    if device == "cpu":
        return None, 1
    if device not in ("auto", "cuda") or len(there) < 2:
        return None, count
    place = number % len(there)
    return there[place], len(range(place, count, len(there)))


def _weights(folder: str) -> int:
    """Bytes of a model's weights, or of a run's best model."""
    places = (Path(folder) / "best", Path(folder) / "last", Path(folder))
    found = next((place for place in places if place.is_dir()), Path(folder))
    return sum(path.stat().st_size for path in found.glob("*.safetensors"))
