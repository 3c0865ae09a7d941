"""The command `train`: from words to a task, from a task to a run.

regard train translate RUN --source train.en --target train.de
regard train --again RUN NEW        the same once more, from the run's own config.json
"""

import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, cast

from regard.checkpoint import CONFIG
from regard.cli.arguments import Progress, parse
from regard.config import from_json, loads
from regard.task.folder import run_config
from regard.task.settings import Preset, check_preset
from regard.task.spec import TaskSpec
from regard.task.specs import NAMES, spec
from regard.train.display import duration
from regard.train.fit import fit
from regard.train.run import check_folder

OVERVIEW = """usage: regard train TASK RUN [--size tiny|base|big] [settings]
       regard train --resume RUN [settings]
       regard train --again RUN NEW [settings]
       regard train --from RUN NEW [settings]
       regard train --config FILE NEW [settings]

Trains a model and keeps it in the folder RUN. --resume continues a run that was interrupted.
--again repeats one in a new folder. --from fine-tunes its model. --config takes the settings of a
run's config.json.

tasks:
{tasks}

regard train TASK --help explains every setting.
"""


def train(words: Sequence[str]) -> None:
    """`regard train …`."""
    if not words or words[0] in ("-h", "--help"):
        tasks = "\n".join(f"  {name:<11}{spec(name).summary}" for name in NAMES)
        print(OVERVIEW.format(tasks=tasks), end="")
        return
    if words[0] in KNOWN:
        task, config, run = _known(words[0], list(words[1:]))
    else:
        task, flags = spec(words[0]), list(words[1:])
        size = _size(flags)
        wants_help = any(flag in ("-h", "--help") for flag in flags)
        if not wants_help and (not flags or flags[0].startswith("-")):
            raise ValueError(f"train needs a folder for the run: regard train {task.name} RUN …")
        run = "RUN" if not flags or flags[0].startswith("-") else flags.pop(0)
        config = parse(task.config, task.preset(size), flags, f"regard train {task.name} RUN")
    if not run:
        raise ValueError("the run's folder has no name; name one: regard train TASK RUN")
    print("\n".join(carry_out(task, config, Path(run))))


KNOWN = {"--resume": "RUN", "--again": "RUN NEW", "--from": "RUN NEW", "--config": "FILE NEW"}
"""How a run begins with settings that another one has, and the names that it needs."""


def _known(way: str, words: list[str]) -> tuple[TaskSpec, Any, str]:
    """Task, settings and folder of a run that begins with those of another one."""
    names = [word for word in words[:2] if not word.startswith("-")]
    wanted = KNOWN[way].split()
    if len(names) < len(wanted):
        raise ValueError(f"{way} needs {' and '.join(wanted)}: regard train {way} {KNOWN[way]}")
    names, flags = names[: len(wanted)], words[len(wanted) :]
    old, run = Path(names[0]), names[-1]
    if way == "--config":
        task, config = _settings(old)
    else:
        task, config = repeated(old)
        if len(names) == 2 and old.resolve() == Path(run).resolve():
            raise ValueError(f"{way} needs a new folder, and {run} is the run itself; name another")
    if way == "--from":
        config = replace(config, **_start(task, old))
    return task, parse(task.config, config, flags, f"regard train {way} {KNOWN[way]}"), run


def _start(task: TaskSpec, run: Path) -> dict[str, Any]:
    """The settings that begin with a run's model, which brings its tokenizer."""
    known = {field.name for field in fields(task.config)}
    if "start" not in known:
        raise ValueError(f"{run} is for {task.name!r}, which does not begin with a trained model")
    return {"start": str(run), **({"tokenizer": None} if "tokenizer" in known else {})}


def carry_out(spec: TaskSpec, config: Any, run: Path) -> list[str]:
    """Trains, and says how it went and what can be done with it."""
    check_folder(run)
    task = spec.build(config, run, Progress())
    for note in getattr(task, "notes", ()):
        print("regard:", note, file=sys.stderr)
    result = fit(task, config.training, run)
    lines = [f"{run}: {result.step:,} steps in {duration(result.seconds)} ({result.reason})"]
    if result.best is not None:
        lines.append(f"{run / 'best'}: {task.score} {result.best:.4g} at step {result.best_step:,}")
    return [*lines, f"try: {spec.use(run)}"]


def repeated(run: Path) -> tuple[TaskSpec, Any]:
    """The task and the whole config of a run, from its config.json."""
    if run_config(run) is None:
        raise ValueError(f"{run} is not a run: it has no config.json that train wrote")
    return _settings(run / CONFIG)


def _settings(file: Path) -> tuple[TaskSpec, Any]:
    config = loads(file.read_bytes(), str(file))
    if not isinstance(config, dict) or config.get("kind") != "run":
        raise ValueError(f"{file} is not a run's config.json")
    about = cast(dict[str, Any], config["task"])
    settings = {**about["config"], "training": config["training"]}
    task = spec(about["name"])
    return task, from_json(task.config, settings, str(file))


def _size(flags: list[str]) -> Preset:
    """Takes --size out: it decides what all other settings begin with."""
    for n, flag in enumerate(flags):
        if flag == "--size" or flag.startswith("--size="):
            value = flag.partition("=")[2] or "".join(flags[n + 1 : n + 2])
            del flags[n : n + (1 if "=" in flag else 2)]
            check_preset(value)
            return cast(Preset, value)
    return "tiny"
