"""A run's folder, which one process at a time trains in.

config.json     task, model and training: the run can be repeated from it; hashes of its data
best/           the model with the best score
bests/          several of the best, where they are kept
last/           the latest checkpoint: the model, and what training needs to resume (state.py)
metrics.jsonl, events/, curves.svg, report.md
snapshots/, shards/   weights to be averaged; a sharded run's state
"""

import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from torch import nn

from regard import __version__, checkpoint
from regard.config import Object, differences, dumps, loads, plain, to_json
from regard.machine import atomic
from regard.train import inputs, report, state
from regard.train.config import MAY_CHANGE, TrainingConfig
from regard.train.display import duration
from regard.train.distributed import World
from regard.train.state import State
from regard.train.task import Task
from regard.train.tracker import Tracker

CONFIG, FORMAT, LOCK = "config.json", 1, ".lock"
FEW = 5
"""Differences that a message names."""
REDRAW = 60.0
"""Seconds between redraws of the curves."""


def check_folder(folder: Path) -> None:
    """A run begins in a folder that is new or empty, and goes on in its own: in no other.

    A run killed while its first file was written has left a draft, and begins again.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file; a run needs a folder of its own")
    if not folder.is_dir() or (folder / CONFIG).is_file():
        return  # `describe` checks the content of config.json
    names = sorted(path.name for path in folder.iterdir())
    if others := [name for name in names if name != LOCK and not atomic.draft_target(name)]:
        raise ValueError(
            f"{folder} is not a run, and not empty (it has {others[0]}); name a new folder, and "
            "nothing in this one is overwritten"
        )


class Run:
    """The folder, locked while it is entered; only the first process writes."""

    def __init__(self, folder: str | os.PathLike[str], world: World):
        self.folder, self.world = Path(folder), world
        self.metrics = report.Metrics(self.folder / report.METRICS)
        self._logs: list[report.Events | Tracker] = []
        """Further receivers of the lines of metrics.jsonl."""
        self._lock = -1
        self._drawn = time.monotonic()

    def __enter__(self) -> "Run":
        if self.world.first:
            check_folder(self.folder)
            self.folder.mkdir(parents=True, exist_ok=True)
            self._claim()
        return self

    def __exit__(self, *_: object) -> None:
        for log in self._logs:
            log.close()
        if self._lock >= 0:
            os.close(self._lock)

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    def describe(
        self,
        about: Mapping[str, Any],
        model: nn.Module,
        config: TrainingConfig,
        files: Mapping[str, bytes],
    ) -> str | None:
        """Writes config.json, and files that belong to the run from its beginning on.

        Where a run was begun, it must have the same settings and the same data. Returns which data
        were compared by samples.
        """
        if not self.world.first:
            return None
        path = self.folder / CONFIG
        data: Object = {
            "format": FORMAT,
            "kind": "run",
            "regard": __version__,
            "task": plain(dict(about), "task"),
            "model": checkpoint.config_of(model),
            "parts": checkpoint.custom_parts(model) or {},
            "training": to_json(config),
            "data": inputs.fingerprints(about.get("config"), config.verify_data),
        }
        notice = inputs.describe_samples(data["data"])
        if path.exists():
            have = cast(Object, loads(path.read_bytes(), str(path)))
            self._check(have, data)
            before = inputs.read_record(have)
            data["data"] = {
                name: before.get(name, {}) | hashes for name, hashes in data["data"].items()
            }
        atomic.write(path, dumps(data))
        for name, content in files.items():
            if not (self.folder / name).exists():
                atomic.write(self.folder / name, content)
        return notice

    def resume(self, model: nn.Module) -> tuple[State, checkpoint.Saved | None]:
        """The state to resume from; the model receives its weights."""
        if not state.begun(self.folder):
            return State(), None
        saved = checkpoint.load(self.folder / "last", model=model)
        return state.read_numbers(saved), saved

    def record(self, line: Mapping[str, float | int | None]) -> None:
        """One line of metrics.jsonl, for TensorBoard and a tracker as well."""
        if self.world.first:
            self.metrics.append(line)
            for log in self._logs:
                log.append(line)

    def rewind(self, step: int, config: TrainingConfig) -> None:
        """Cuts the logs back to the step from which the run resumes."""
        if self.world.first:
            self.metrics.rewind(step)
            if config.tensorboard:
                self._logs.append(report.Events(self.folder / report.EVENTS, step))
            if config.tracker != "none":
                self._logs.append(Tracker(config.tracker, self.folder, to_json(config)))

    def intact(self) -> str:
        """The last saved step, for the message of a failure."""
        if not state.begun(self.folder):
            return "nothing was saved yet"
        return f"{self.folder / 'last'} holds the last step that was saved"

    def report(self, task: Task, now: State, config: TrainingConfig, ended: str | None) -> None:
        """Writes curves.svg and report.md; during training, not too often."""
        fresh = time.monotonic() - self._drawn < REDRAW
        if not self.world.first or (ended is None and fresh):
            return
        self._drawn = time.monotonic()
        lines = self.metrics.read()
        curves = report.draw(lines, task.score, self.folder / report.CURVES)
        parameters = sum(parameter.numel() for parameter in task.model.parameters())
        facts = {
            "model": f"{type(task.model).__name__} of {parameters:,} parameters",
            "trained": f"{now.step:,} steps, {now.count:,.0f} {task.unit}, {duration(now.seconds)}"
            f", in {now.precision}",
            "ended": ended or "not yet",
        }
        if best := report.best(task, now):
            facts["best"] = f"{best}, in best/"
        facts |= task.signatures
        default = to_json(TrainingConfig())
        settings = {
            name: value for name, value in to_json(config).items() if value != default[name]
        }
        report.write(
            self.folder / report.REPORT,
            title=f"Run {self.name}",
            facts=facts,
            lines=lines,
            settings=settings,
            curves=curves,
        )

    def _check(self, have: Object, want: Object) -> None:
        if not isinstance(have, dict) or have.get("kind") != "run":
            raise ValueError(
                f"{self.folder} holds something else than a run (see its {CONFIG}); "
                "choose another folder"
            )
        if have.get("format") != FORMAT:
            raise ValueError(
                f"{self.folder / CONFIG} has format {have.get('format')}, but Regard {__version__} "
                f"knows {FORMAT}; choose another folder, or upgrade regard"
            )
        names = [run["task"].get("name") for run in (have, want)]
        if names[0] != names[1]:
            raise ValueError(
                f"{self.folder} is a run of the task {names[0]}, not {names[1]}; choose another "
                "folder"
            )
        saved_parts = have["parts"] if "parts" in have else want["parts"]
        if other := checkpoint.unlike_parts(want["parts"], saved_parts):
            raise ValueError(
                f"{self.folder} is a run of another model: {other}; continue it in Python with a "
                "model that has the saved parts, or name another folder for a new run"
            )
        if names := inputs.find_changes(inputs.read_record(have), want["data"]):
            raise ValueError(
                f"{self.folder}: the data have changed since the run began: "
                f"{', '.join(sorted(names))}; restore what it began with, or name another folder "
                "for a new run"
            )
        if unlike := differences(_fixed(want), _fixed(have)):
            more = f"; and {len(unlike) - FEW} more" if len(unlike) > FEW else ""
            remedy = "continue it with the settings it has, or name another folder for a new run"
            if repeatable(have["task"]):
                remedy = (
                    f"regard train --resume {self.folder} continues it as it was, and regard train "
                    f"--again {self.folder} NEW … begins another with changed settings"
                )
            raise ValueError(
                f"{self.folder} is a run with other settings: {'; '.join(unlike[:FEW])}{more}; "
                f"{remedy}"
            )

    def _claim(self) -> None:
        """Locks the folder until the process ends; child processes do not inherit the lock."""
        if sys.platform == "win32":
            return
        import fcntl

        self._lock = os.open(self.folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            os.close(self._lock)
            self._lock = -1
            raise ValueError(
                f"{self.folder} is being trained by another process; wait for it, or choose "
                "another folder"
            ) from None
        except OSError:
            pass  # A filesystem without locks.


def repeatable(about: Mapping[str, Any]) -> bool:
    """True if the command line can continue a run from its config.json; its data and its model
    may also have come from Python."""
    return "name" in about and "config" in about


def _fixed(data: Object) -> Object:
    """Settings that must not change when a run resumes."""
    training = {n: value for n, value in data["training"].items() if n not in MAY_CHANGE}
    task = {name: value for name, value in data["task"].items() if name != "example"}
    return {"task": task, "model": data["model"], "training": training}
