"""The command `train`: trains the model of a task in the folder of a run.

regard train translate RUN --source train.en --target train.de
regard train --resume RUN           continues from the last checkpoint
regard train --again RUN NEW        the same once more, with the run's own settings
regard train --from RUN NEW         fine-tunes its model, with the run's own settings
regard train --config FILE NEW      a new run with the settings of a file, JSON or YAML
regard train --recipe NAME RUN --data FOLDER    a run with a known score, and its test sets

After these, flags change single settings.
"""

import sys
import textwrap
import time
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, cast

from regard.checkpoint import CONFIG, listed_parts
from regard.cli.arguments import Progress, parse, setting_names, spelled_out
from regard.cli.help import described, flag_lines, help_lines, with_default
from regard.config import from_json, read, to_json
from regard.machine.command_line import unknown_flag, unknown_name
from regard.machine.device import device
from regard.machine.shell import typed
from regard.task.folder import run_config
from regard.task.settings import Preset, check_preset
from regard.task.size import check_batches, check_settings
from regard.task.spec import TaskSpec
from regard.task.specs import NAMES, spec
from regard.train.config import MAY_CHANGE, USUAL_RATES, TrainingConfig
from regard.train.display import duration
from regard.train.fit import Result, fit
from regard.train.run import check_folder
from regard.train.warm import warm_up

OVERVIEW = """usage: regard train TASK RUN [--size tiny|base|big] [--for LIBRARY] [settings]
       regard train --resume RUN [settings]
       regard train --again RUN NEW [settings]
       regard train --from RUN NEW [settings]
       regard train --config FILE NEW [settings]
       regard train --recipe NAME RUN [--data FOLDER] [settings]

Trains a model and keeps it in the folder RUN.

  --size      preset of all settings: tiny (default) for two CPU cores, base and big for a GPU
  --for       settings of a model that regard export can write for a library: marian or vit;
              for ctranslate2, onnx and torch-export every model will do
  --resume    continue an interrupted run from its last checkpoint. When it ends and where it
              computes may change: {may_change}
  --again     repeat a run in a new folder
  --from      fine-tune a run's model in a new folder, with the run's settings
  --config    a new run with the settings of a file, JSON or YAML: a run's config.json, or one of
              your own, which begins with task: TASK and names settings as the flags do
  --recipe    a run with a known score: regard recipes lists them. The test sets are scored once,
              at the end, and their scores kept in RUN/scores.json. Interrupted, the same
              command goes on

tasks:
{tasks}

regard train TASK --help explains the settings that matter most, --help-all every one. Where a
name is clear, its section may be left out: --minutes is --training.minutes.
"""

SHORT = {
    "translate": "source target pairs columns valid_source valid_target start vocabulary beams",
    "dates": "languages first last examples",
    "classify": "images validation held_out pixels patch start freeze",
    "read": "images captions validation validation_captions pixels start vocabulary beams",
    "language": "text valid context start words vocabulary",
    "label": "texts columns valid held_out start freeze vocabulary",
    "encoder": "text valid context start words vocabulary",
}
"""The most important settings of each task."""
COMMON = "minutes steps batch lr precision device seed"
"""The most important settings of every training."""


BEFORE = {
    "--size {tiny,base,big}": "Preset of all settings: tiny for two CPU cores, base and big for a "
    "GPU. (default: tiny)",
    "--for {marian,vit}": "Settings of a model that regard export can write for this library.",
}
"""Flags that choose the initial settings."""

FROM_RUN = {"--resume": "RUN", "--again": "RUN NEW", "--from": "RUN NEW", "--config": "FILE NEW"}
"""Flags that take the settings from a run or a file, and the arguments of each."""


def train(words: Sequence[str]) -> None:
    """`regard train …`."""
    asks = any(word in ("-h", "--help", "--help-all") for word in words)
    ways = (*FROM_RUN, "--recipe")
    if not words or words[0] in ("-h", "--help") or (words[0] in ways and asks):
        tasks = "\n".join(f"  {name:<11}{spec(name).summary}" for name in NAMES)
        names = f"training.{{{', '.join(sorted(MAY_CHANGE))}}}"
        may_change = textwrap.fill(names, 84, subsequent_indent=" " * 14, initial_indent=" " * 35)
        may_change = may_change.strip()
        print(OVERVIEW.format(tasks=tasks, may_change=may_change), end="")
        return
    if words[0] == "--recipe":
        _train_recipe(list(words[1:]))
        return
    if words[0] in FROM_RUN:
        task, config, run = _from_run(words[0], list(words[1:]))
    else:
        task, flags = _task(words[0]), list(words[1:])
        size, shape = _size(flags), _shape(task, flags)
        if not asks and (not flags or flags[0].startswith("-")):
            raise ValueError(f"train needs a folder for the run: regard train {task.name} RUN …")
        run = "RUN" if not flags or flags[0].startswith("-") else flags.pop(0)
        if asks and "--help-all" not in words:
            print("\n".join(short_help(task, size)))
            return
        if asks:
            usage = f"regard train {task.name} RUN"
            print("\n".join(help_lines(task.config, task.preset(size), usage, BEFORE)))
            return
        config = _parse_config(task, size, flags, shape)
    if not run:
        raise ValueError("the run's folder has no name; name one: regard train TASK RUN")
    print("\n".join(run_training(task, config, Path(run))[1]))


def _task(word: str) -> TaskSpec:
    """The task that the first word names."""
    if word.startswith("-"):
        raise ValueError(unknown_flag(word, [*FROM_RUN, "--recipe"], "regard train"))
    if word not in NAMES:
        raise ValueError(unknown_name("task", word, NAMES))
    return spec(word)


def _train_recipe(words: list[str]) -> None:
    """Trains a recipe, and scores its test sets with the model that validates best."""
    from regard.recipes.book import recipe
    from regard.recipes.recipe import score

    names = [word for word in words[:2] if not word.startswith("-")]
    if len(names) < 2:
        raise ValueError(
            "--recipe needs its name and a folder for the run: regard train --recipe NAME RUN; "
            "regard recipes lists the names"
        )
    (name, run), flags = names, words[2:]
    make, data = recipe(name), _take_flag(flags, "--data") or "."
    experiment = make(Path(data))
    task = spec(experiment.task)
    flags = spelled_out(task.config, flags)
    preset = _without_limits(experiment.config, _training_flags(flags))
    config = _apply_flags(task, preset, flags, f"regard train --recipe {name} RUN", ("--data",))
    begun = time.monotonic()
    result, lines = run_training(task, config, Path(run))
    print("\n".join(lines))
    # A run that was resumed trained before this process began.
    seconds = max(time.monotonic() - begun, result.seconds)
    about = {"recipe": name, "seed": config.training.seed, "seconds": round(seconds, 1)}
    score(experiment, Path(run), config.training.device, about)


def short_help(task: TaskSpec, size: Preset) -> list[str]:
    """The help of the most important settings, with the values of the preset."""
    preset = task.preset(size)
    specific, common = SHORT[task.name].split(), COMMON.split()
    lines = [
        f"usage: regard train {task.name} RUN [--size tiny|base|big] [settings]",
        "",
        *textwrap.wrap(task.summary[0].upper() + task.summary[1:] + ".", 96),
        "",
        "The settings that matter most:",
        "",
    ]
    for section, names, before in ((preset, specific, ""), (preset.training, common, "training.")):
        texts = described(type(section))
        for name in names:
            text = with_default(texts[name], getattr(section, name))
            lines += flag_lines(f"--{before}{name.replace('_', '-')}", text)
    count = sum(1 for _ in setting_names(task.config))
    return [
        *lines,
        "",
        "The section may be left out where a name is clear: --minutes is --training.minutes.",
        f"regard train {task.name} --help-all explains all {count} settings.",
    ]


def _parse_config(task: TaskSpec, size: Preset, flags: list[str], shape: dict[str, Any]) -> Any:
    """Applies flags to a preset, which depends on the device that they name."""
    flags = spelled_out(task.config, flags)
    program = f"regard train {task.name} RUN"
    config = parse(task.config, task.preset(size), flags, program, ("--size", "--for"))
    preset = task.preset_on(size, device(config.training.device))
    preset = replace(preset, model=replace(preset.model, **shape))
    named = _training_flags(flags)
    config = _apply_flags(task, _without_limits(preset, named), flags, program)
    if "warmup" in named:
        return config
    return replace(config, training=_with_warmup(config.training, preset.training))


def _apply_flags(
    task: TaskSpec, config: Any, flags: list[str], program: str, more: Sequence[str] = ()
) -> Any:
    """Applies flags to settings. Another optimizer takes steps of another size, and gets a learning
    rate that suits it unless a flag sets one."""
    changed = parse(task.config, config, flags, program, more)
    before, after = config.training, changed.training
    # The rate of noam is a factor.
    if "lr" in _training_flags(flags) or "noam" in (before.schedule, after.schedule):
        return changed
    ratio = USUAL_RATES[after.optimizer] / USUAL_RATES[before.optimizer]
    return replace(changed, training=replace(after, lr=after.lr * ratio))


def _training_flags(flags: Sequence[str]) -> set[str]:
    """The training settings that flags name."""
    named = (flag.partition("=")[0] for flag in flags if flag.startswith("--training."))
    return {flag.removeprefix("--training.") for flag in named}


def _without_limits(preset: Any, named: set[str]) -> Any:
    """Removes the limits of a preset if flags limit the training."""
    limits = ("steps", "epochs", "minutes")
    if not named & {*limits}:
        return preset
    return replace(preset, training=replace(preset.training, **dict.fromkeys(limits)))


def _with_warmup(training: TrainingConfig, preset: TrainingConfig) -> TrainingConfig:
    """Shortens the warm-up of a run shorter than its preset, so that it ends after its peak."""
    if training.schedule == "noam":  # its peak depends on the warm-up
        return training
    warmup = training.warmup
    if training.minutes is not None and preset.minutes is not None:
        warmup = min(warmup, max(30, round(warmup * training.minutes / preset.minutes)))
    if training.steps is not None:
        warmup = min(warmup, training.steps // 5)
    return replace(training, warmup=warmup)


def _from_run(way: str, words: list[str]) -> tuple[TaskSpec, Any, str]:
    """The task, settings and folder of a new run with the settings of a run or a file."""
    names = [word for word in words[:2] if not word.startswith("-")]
    needed = FROM_RUN[way].split()
    if len(names) < len(needed):
        raise ValueError(f"{way} needs {' and '.join(needed)}: regard train {way} {FROM_RUN[way]}")
    names, flags = names[: len(needed)], words[len(needed) :]
    old, run = Path(names[0]), names[-1]
    if way == "--config":
        task, config = _settings(old)
    else:
        task, config = run_settings(old)
        if len(names) == 2 and old.resolve() == Path(run).resolve():
            raise ValueError(f"{way} needs a new folder, and {run} is the run itself; name another")
    if way == "--from":
        config = replace(config, **_start(task, old))
    flags = spelled_out(task.config, flags)
    return task, _apply_flags(task, config, flags, f"regard train {task.name} RUN"), run


def _start(task: TaskSpec, run: Path) -> dict[str, Any]:
    """The settings that start from a run's model, which brings its tokenizer."""
    settings = {field.name for field in fields(task.config)}
    if "start" not in settings:
        raise ValueError(f"{run}: the task {task.name} cannot be fine-tuned (--from)")
    return {"start": str(run), **({"tokenizer": None} if "tokenizer" in settings else {})}


def run_training(spec: TaskSpec, config: Any, run: Path) -> tuple[Result, list[str]]:
    """Trains a model; returns the result and lines that describe it and how to use it."""
    check_folder(run)
    check_settings(config)
    warm_up(device(config.training.device))
    task = spec.build(config, run, Progress())
    check_batches(config, task)
    for note in getattr(task, "notes", ()):
        print("regard:", note, file=sys.stderr)
    result = fit(task, config.training, run)
    lines = [f"{run}: {result.step:,} steps in {duration(result.seconds)} ({result.reason})"]
    if result.summary is not None:
        lines.append(f"{run / 'best'}: {result.summary}")
    return result, [*lines, f"try: {typed(spec.use(run))}"]


def run_settings(run: Path) -> tuple[TaskSpec, Any]:
    """The task and the whole config of a run, from its config.json."""
    if not run.is_dir():
        raise ValueError(f"{run} does not exist; name the folder of a run")
    if run_config(run) is None:
        raise ValueError(
            f"{run} is not a run; a model by itself is fine-tuned by regard train TASK NEW "
            f"--start {run}"
        )
    return _settings(run / CONFIG)


def _settings(file: Path) -> tuple[TaskSpec, Any]:
    """The task and the settings of a file: a run's config.json, or a user's own file."""
    data: Any = read(file)
    match data:
        case {"kind": "run", "parts": dict(parts)} if parts:
            raise ValueError(
                f"{file} is that of a model with parts that its config does not name: "
                f"{listed_parts(parts)}; continue or repeat the run in Python, with fit"
            )
        case {"kind": "run", "task": {"name": str(name), "config": dict(recorded)}}:
            task, settings = spec(name), {**recorded, "training": data.get("training")}
        case {"task": str(name)}:
            task, size = spec(name), data.get("size", "tiny")
            check_preset(size)
            changes = {key: value for key, value in data.items() if key not in ("task", "size")}
            settings = _over(to_json(task.preset(size)), changes)
        case _:
            raise ValueError(
                f"{file} is not a run's config.json, and names no task, such as task: translate"
            )
    return task, from_json(task.config, settings, str(file))


def _over(below: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Merges `changes` into the settings `below`."""
    merged = dict(below)
    for name, value in changes.items():
        inner = merged.get(name)
        both = isinstance(inner, dict) and isinstance(value, dict)
        merged[name] = _over(cast(dict[str, Any], inner), value) if both else value
    return merged


def _size(flags: list[str]) -> Preset:
    """Removes --size, which chooses the preset, and returns its value."""
    value = _take_flag(flags, "--size")
    if value is None:
        return "tiny"
    check_preset(value)
    return cast(Preset, value)


def _shape(task: TaskSpec, flags: list[str]) -> dict[str, Any]:
    """Removes --for, and returns the shape that the model needs for another library."""
    library = _take_flag(flags, "--for")
    if library is None:
        return {}
    from regard.interop import shape_for

    return shape_for(library, task.name)


def _take_flag(flags: list[str], name: str) -> str | None:
    """Removes a flag that is not a setting, and returns its value."""
    for n, flag in enumerate(flags):
        if flag == name or flag.startswith(f"{name}="):
            value = flag.partition("=")[2] or "".join(flags[n + 1 : n + 2])
            del flags[n : n + (1 if "=" in flag else 2)]
            return value
    return None
