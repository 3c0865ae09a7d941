"""Curves for Weights & Biases or MLflow, beside metrics.jsonl and TensorBoard.

Neither is a dependency: what a run records is handed to whichever is asked for and installed. Where
it goes is theirs to say (WANDB_MODE=offline, MLFLOW_TRACKING_URI); nothing is sent unless a run is
told to.
"""

import hashlib
import importlib
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias

from regard.machine.extras import install_package

Name: TypeAlias = Literal["none", "wandb", "mlflow"]
Line: TypeAlias = Mapping[str, float | int | None]


def check_tracker(name: Name) -> None:
    """Refuses one that is not installed, before anything is trained."""
    if name != "none":
        _imported(name)


class Tracker:
    """One of them, for one run; a run that resumes goes on where it was."""

    def __init__(self, name: Name, folder: Path, settings: Mapping[str, Any]):
        place = folder.resolve()
        self._log, self._end = {"wandb": _wandb, "mlflow": _mlflow}[name](place, settings)

    def append(self, line: Line) -> None:
        values = {
            name: float(value)
            for name, value in line.items()
            if name != "step" and value is not None and math.isfinite(value)
        }
        if values:
            self._log(values, int(line["step"] or 0))

    def close(self) -> None:
        self._end()


Opened: TypeAlias = tuple[Callable[[dict[str, float], int], Any], Callable[[], Any]]


def _wandb(folder: Path, settings: Mapping[str, Any]) -> Opened:
    wandb = _imported("wandb")
    run = wandb.init(
        project="regard",
        name=folder.name,
        id=_mark(folder),
        resume="allow",
        dir=str(folder),
        config=dict(settings),
    )
    return lambda values, step: run.log(values, step=step), run.finish


def _mlflow(folder: Path, settings: Mapping[str, Any]) -> Opened:
    mlflow = _imported("mlflow")
    mlflow.set_experiment("regard")
    known = folder / "mlflow.txt"
    run = known.read_text().strip() if known.is_file() else None
    begun = mlflow.start_run(run_id=run, run_name=None if run else folder.name)
    if run is None:
        known.write_text(begun.info.run_id)
        mlflow.log_params({name: str(value)[:500] for name, value in settings.items()})
    return lambda values, step: mlflow.log_metrics(values, step=step), mlflow.end_run


def _mark(folder: Path) -> str:
    """The same for a run that resumes."""
    return hashlib.blake2b(str(folder).encode(), digest_size=8).hexdigest()


def _imported(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ValueError(f"tracker ({name}) needs its package: {install_package(name)}") from None
