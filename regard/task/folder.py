"""Finds a model: in a folder of its own, or the best one of a run's folder."""

import os
from pathlib import Path
from typing import cast

from regard.checkpoint import CONFIG
from regard.config import Object, read


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


def run_config(folder: Path) -> Object | None:
    """A run's config.json; None where the folder is not a run's."""
    try:
        config = read(folder / CONFIG)
    except OSError:
        return None  # loading the model reports the error
    is_run = isinstance(config, dict) and config.get("kind") == "run"
    return cast(Object, config) if is_run else None


def check_new(folder: str | os.PathLike[str]) -> None:
    """Refuses a folder to write a model to that is not new or empty, or lies within a run."""
    place = Path(os.path.realpath(folder))
    if os.path.lexists(place) and not (place.is_dir() and not any(place.iterdir())):
        raise ValueError(f"{folder} exists and is not an empty folder; name a new one")
    if run := next((parent for parent in place.parents if _is_run(parent)), None):
        raise ValueError(f"{folder} is within the run {run}; name a new folder outside of it")


def _is_run(folder: Path) -> bool:
    try:
        return run_config(folder) is not None
    except ValueError:  # another program's config.json
        return False
