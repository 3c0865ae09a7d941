"""The command `train`: from words to a task, from a task to a run.

regard train translate RUN --source train.en --target train.de
regard train --again RUN NEW        the same once more, from the run's own config.json
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from regard.checkpoint import CONFIG
from regard.cli.arguments import Progress, parse
from regard.config import from_json
from regard.task.folder import run_config
from regard.task.settings import Preset, check_preset
from regard.task.spec import TaskSpec
from regard.task.specs import NAMES, spec
from regard.train.display import duration
from regard.train.fit import fit

OVERVIEW = """usage: regard train TASK RUN [--size tiny|base|big] [settings]
       regard train --again RUN NEW

Trains a model and keeps it in the folder RUN. Started again, a run that was interrupted resumes.

tasks:
{tasks}

regard train TASK --help explains every setting. --again repeats a run from its config.json.
"""


def train(words: Sequence[str]) -> None:
    """`regard train …`."""
    if not words or words[0] in ("-h", "--help"):
        tasks = "\n".join(f"  {name:<11}{spec(name).summary}" for name in NAMES)
        print(OVERVIEW.format(tasks=tasks), end="")
        return
    if words[0] == "--again":
        if len(words) != 3:
            raise ValueError("--again takes a run and a new folder: regard train --again RUN NEW")
        task, config = repeated(Path(words[1]))
        run = words[2]
    else:
        task, flags = spec(words[0]), list(words[1:])
        size = _size(flags)
        wants_help = any(flag in ("-h", "--help") for flag in flags)
        if not wants_help and (not flags or flags[0].startswith("-")):
            raise ValueError(f"train needs a folder for the run: regard train {task.name} RUN …")
        run = "RUN" if not flags or flags[0].startswith("-") else flags.pop(0)
        config = parse(task.config, task.preset(size), flags, f"regard train {task.name} RUN")
    print("\n".join(carry_out(task, config, Path(run))))


def carry_out(spec: TaskSpec, config: Any, run: Path) -> list[str]:
    """Trains, and says how it went and what can be done with it."""
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
    config = run_config(run)
    if config is None:
        raise ValueError(f"{run} is not a run: it has no config.json that train wrote")
    about = cast(dict[str, Any], config["task"])
    settings = {**about["config"], "training": config["training"]}
    task = spec(about["name"])
    return task, from_json(task.config, settings, str(run / CONFIG))


def _size(flags: list[str]) -> Preset:
    """Takes --size out: it decides what all other settings begin with."""
    for n, flag in enumerate(flags):
        if flag == "--size" or flag.startswith("--size="):
            value = flag.partition("=")[2] or "".join(flags[n + 1 : n + 2])
            del flags[n : n + (1 if "=" in flag else 2)]
            check_preset(value)
            return cast(Preset, value)
    return "tiny"
