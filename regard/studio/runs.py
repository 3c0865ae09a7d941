"""The runs that a studio knows: those it was started with, and those in runs/.

A page names a run by a name of this list, so that no path from a request reaches the file system.
Reading it needs no torch: a name, what the run is for, and how far it has come.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

COMMANDS = {
    "translate": "regard demo dates",
    "vision": "regard demo digits",
    "read": "regard demo read",
    "text": "regard train language runs/book --text book.txt --minutes 5",
}
"""For each page of models, the command that makes one for it; a text is the reader's own."""

KINDS = {
    "dates": "translate",
    "translate": "translate",
    "classify": "vision",
    "read": "read",
    "language": "text",
    "label": "text",
}
"""The page that shows a task's models."""

LARGEST = 1 << 20
"""Bytes of a config that is read."""

LINES = 4000
"""Lines of a run's metrics that a page receives at once."""


@dataclass(frozen=True)
class Run:
    """A run, or a model's folder."""

    name: str
    folder: Path
    task: str
    ready: bool
    """Whether it has saved a model."""
    training: bool
    """Whether it is a run, which has metrics."""
    steps: int | None

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "task": self.task,
            "page": KINDS.get(self.task),
            "ready": self.ready,
            "training": self.training,
            "steps": self.steps,
        }


class Runs:
    """All of them, by name; runs/ is read again each time, since training adds to it."""

    def __init__(self, given: list[Path], around: Path = Path("runs")):
        self.given, self.around = given, around
        for folder in given:
            if _read(folder, folder.name) is None:
                raise ValueError(
                    f"{folder} is neither a run nor a model's folder; train one: regard demo, or "
                    "regard train"
                )

    def all(self) -> dict[str, Run]:
        found: dict[str, Run] = {}
        for folder in [*self.given, *self._around()]:
            name = folder.resolve().name
            while name in found:
                if found[name].folder.resolve() == folder.resolve():
                    break
                name += "′"
            else:
                run = _read(folder, name)
                if run is not None:
                    found[name] = run
        return found

    def named(self, name: object) -> Run:
        found = self.all()
        if not isinstance(name, str) or name not in found:
            known = ", ".join(found) or "none"
            raise ValueError(f"run ({name!r}) is unknown; there are {known}")
        return found[name]

    def _around(self) -> list[Path]:
        try:
            return sorted(Path(entry.path) for entry in os.scandir(self.around) if entry.is_dir())
        except OSError:
            return []


def _read(folder: Path, name: str) -> Run | None:
    config = _json(folder / "config.json")
    if config is None:
        return None
    if config.get("kind") == "run":
        ready = any((folder / each / "config.json").is_file() for each in ("best", "last"))
        training = config.get("training")
        steps = training.get("steps") if isinstance(training, dict) else None
        return Run(name, folder, _task(config.get("task")), ready, True, steps)
    task = config.get("task")
    return Run(name, folder, _task(task), True, False, None)


def _task(said: Any) -> str:
    if isinstance(said, dict):
        said = said.get("name")
    return said if isinstance(said, str) else "unknown"


def _json(path: Path) -> dict[str, Any] | None:
    try:
        if path.stat().st_size > LARGEST:
            return None
        read = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return read if isinstance(read, dict) else None


def metrics(run: Run, after: int = 0) -> dict[str, Any]:
    """What a run has written since so many bytes: complete lines alone, and where they end."""
    path = run.folder / "metrics.jsonl"
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            begin = after if 0 <= after <= size else 0  # a run that began anew is shorter
            file.seek(begin)
            data = file.read(4 << 20)
    except OSError:
        return {"lines": [], "end": 0, "begin": 0}
    whole = data[: data.rfind(b"\n") + 1]
    lines = []
    for line in whole.splitlines()[-LINES:]:
        try:
            one = json.loads(line)
        except ValueError:
            continue
        if isinstance(one, dict):
            lines.append(one)
    return {"lines": lines, "end": begin + len(whole), "begin": begin}
