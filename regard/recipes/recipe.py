"""What a recipe is: the settings of a run, and the test sets that are scored once, at its end.

No setting is chosen on a test set. Which of a run's models counts is decided on its validation set,
and the scores of the test sets are written to the run's folder, where they stay.
"""

import json
import os
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from inspect import getdoc
from pathlib import Path
from typing import Any, TypeAlias, cast

from regard import __version__
from regard.config import read
from regard.machine import atomic
from regard.task.spec import Evaluation
from regard.task.specs import spec

SCORES = "scores.json"
"""In a run's folder: what the test sets gave."""


@dataclass(frozen=True)
class Recipe:
    """A run, and what it is tested on."""

    task: str
    config: Any
    """All settings of the task."""
    tests: Mapping[str, Mapping[str, Any]]
    """By name, what the task's evaluation is called with."""
    also: Mapping[str, Callable[[Any], Evaluation]] = field(default_factory=dict)
    """Other scorers of the same answers, by what they are called."""


Folder: TypeAlias = str | os.PathLike[str]
Make: TypeAlias = Callable[[Folder], Recipe]
"""From the folder of the data to a recipe; its docstring says what it needs and what it gives."""


def summary(make: Make) -> str:
    """The first line of what is said of a recipe."""
    return (getdoc(make) or "").split("\n")[0]


def needs_data(make: Make) -> bool:
    """Whether a recipe reads a folder, as the line on its data says."""
    return "\nData: none" not in (getdoc(make) or "")


def files(data: Folder, *names: str) -> tuple[str, ...]:
    """Files of a folder by their names, plain or compressed."""
    return tuple(str(_file(data, name)) for name in names)


def _file(data: Folder, name: str) -> Path:
    data = Path(data)
    if not data.is_dir():
        raise ValueError(f"--data {data} does not exist; name the folder that has {name}")
    for ending in ("", ".gz", ".xz", ".bz2", ".zst"):
        if (path := data / f"{name}{ending}").is_file():
            return path
    raise ValueError(
        f"--data {data} has no {name}, plain or compressed; regard recipes NAME says which files "
        "a recipe needs and where they are found"
    )


def score(
    recipe: Recipe,
    run: Folder,
    device: str,
    about: Mapping[str, Any],
    tell: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Evaluates the test sets with the run's best model, once, and keeps what they gave.

    `about` is kept beside it: the recipe's name, the seed, how long the training took.
    """
    path = Path(run) / SCORES
    if path.is_file():
        tell(f"{path}: the test sets were scored already")
        return cast(dict[str, Any], read(path))
    scores: dict[str, Any] = {}
    for name, options in recipe.tests.items():
        begun = time.monotonic()
        answers = spec(recipe.task).evaluate(run, **options, device=device)
        found = {name: answers}
        found |= {f"{name}, {other}": scorer(answers) for other, scorer in recipe.also.items()}
        seconds = round(time.monotonic() - begun, 2)
        for named, one in found.items():
            scores[named] = {
                "scores": one.scores,
                "signatures": one.signatures,
                "problems": one.problems,
                "seconds": seconds,
            }
            for key, value in one.scores.items():
                tell(f"{named}: {key} {value:.4g}  {one.signatures.get(key, '')}".rstrip())
    machine = {"system": platform.platform(), "processor": _processor(device)}
    kept = {**about, "regard": __version__, "machine": machine, "tests": scores}
    atomic.write(path, json.dumps(kept, indent=2, ensure_ascii=False) + "\n")
    return kept


def _processor(device: str) -> str:
    import torch

    from regard.machine.device import device as named

    if named(device).type == "cuda":
        return torch.cuda.get_device_name(named(device))
    return f"{platform.machine()}, {torch.get_num_threads()} threads"
