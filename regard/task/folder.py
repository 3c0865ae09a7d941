"""Where a model is: in a folder of its own, or in a run's, of which the best model counts."""

import os
from pathlib import Path
from typing import cast

import torch

from regard.checkpoint import CONFIG, Saved, load
from regard.config import Object, read
from regard.device import device as named_device
from regard.task.settings import Precision


def model_folder(folder: str | os.PathLike[str]) -> Path:
    """In a run's folder its best model, or before there is one the last."""
    place = Path(folder)
    if place.is_file():
        raise ValueError(f"{place} is a file; name the folder of a run or of a model")
    if run_config(place) is None:
        within = sorted(str(path.parent) for path in place.glob("*/config.json"))
        if within:
            raise ValueError(f"{place} is no run and no model; name one in it: {', '.join(within)}")
        return place
    for name in ("best", "last"):
        if (place / name).is_dir():
            return place / name
    raise ValueError(f"{place} is a run that has saved no model yet; train it first")


def load_saved(
    folder: str | os.PathLike[str],
    device: str | torch.device = "cpu",
    precision: Precision = "fp32",
) -> Saved:
    """What a model's folder, or a run's, holds, to be scored in a precision; auto is bf16 on a GPU
    and fp32 on a CPU, whatever the input."""
    where = named_device(device)
    if precision == "int8" and where.type != "cpu":
        raise ValueError(f"precision (int8) is for device cpu, not {where}; try bf16")
    if precision == "auto":
        precision = "bf16" if where.type == "cuda" else "fp32"
    saved = load(model_folder(folder), device=where, dtype=_DTYPES.get(precision))
    if precision == "int8":
        from regard.decode.engine.int8.linear import int8

        int8(saved.model)
    return saved


_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def run_config(folder: Path) -> Object | None:
    """A run's config.json; None where the folder is not a run's."""
    try:
        config = read(folder / CONFIG)
    except OSError:
        return None  # what is wrong is said when the model is loaded
    is_run = isinstance(config, dict) and config.get("kind") == "run"
    return cast(Object, config) if is_run else None
