"""The commands `train` and `evaluate`: from words to a task, from a task to a run.

    regard train translate RUN --source train.en --target train.de
    regard train --again RUN NEW        the same once more, from the run's own config.json
    regard evaluate RUN

Every setting of a task's config is a flag, and its docstring the flag's help.
"""

import contextlib
import io
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar, cast

from regard import checkpoint
from regard.config import from_json
from regard.task.load import TASKS, model_folder, run_config
from regard.task.settings import Preset, check_preset
from regard.train.display import duration

Settings = TypeVar("Settings")

OVERVIEW = f"""usage: regard train TASK RUN [--size tiny|base|big] [settings]
       regard train --again RUN NEW

Trains a model and keeps it in the folder RUN; started again, a run that was interrupted goes on.

tasks:
{chr(10).join(f"  {name:<11}{words}" for name, words in TASKS.items())}

regard train TASK --help explains every setting. --again repeats a run from its config.json.
"""


# Training


def train(words: Sequence[str]) -> None:
    """`regard train …`."""
    if not words or words[0] in ("-h", "--help"):
        print(OVERVIEW, end="")
        return
    if words[0] == "--again":
        if len(words) != 3:
            raise ValueError("--again takes a run and a new folder: regard train --again RUN NEW")
        name, config = repeated(Path(words[1]))
        run = words[2]
    else:
        name, rest = words[0], list(words[1:])
        task = module(name)
        size = _size(rest)
        helped = any(word in ("-h", "--help") for word in rest)
        if not helped and (not rest or rest[0].startswith("-")):
            raise ValueError(f"train needs a folder for the run: regard train {name} RUN …")
        run = "RUN" if not rest or rest[0].startswith("-") else rest.pop(0)
        config = parse(task.Config, task.preset(size), rest, f"regard train {name} RUN")
    print("\n".join(carry_out(name, config, Path(run))))


def carry_out(name: str, config: Any, run: Path) -> list[str]:
    """Trains, and says how it went and what can be done with it."""
    from regard.train.fit import fit

    task = module(name).build(config, run, Progress())
    for note in getattr(task, "notes", ()):
        print("regard:", note, file=sys.stderr)
    result = fit(task, config.training, run)
    lines = [f"{run}: {result.step:,} steps in {duration(result.seconds)} ({result.reason})"]
    if result.best is not None:
        lines.append(f"{run / 'best'}: {task.score} {result.best:.4g} at step {result.best_step:,}")
    return [*lines, *_next(name, run)]


def repeated(run: Path) -> tuple[str, Any]:
    """The task and the whole config of a run, from its config.json."""
    said = run_config(run)
    if said is None:
        raise ValueError(f"{run} is not a run: it has no config.json that train wrote")
    about = cast(dict[str, Any], said["task"])
    settings = {**about["config"], "training": said["training"]}
    where = str(run / checkpoint.CONFIG)
    return about["name"], from_json(module(about["name"]).Config, settings, where)


def _next(name: str, run: Path) -> list[str]:
    match name:
        case "translate" | "dates":
            return [f'try: echo "…" | regard translate {run}']
        case "classify" | "read":
            return [f"try: regard {name} {run} picture.png"]
        case "language":
            return [f'try: echo "…" | regard generate {run}']
    return [f"try: regard evaluate {run}"]


def _size(words: list[str]) -> Preset:
    """Takes --size out: it decides what all other settings begin with."""
    for n, word in enumerate(words):
        if word == "--size" or word.startswith("--size="):
            value = word.partition("=")[2] or "".join(words[n + 1 : n + 2])
            del words[n : n + (1 if "=" in word else 2)]
            check_preset(value)
            return cast(Preset, value)
    return "tiny"


# Evaluation


@dataclass(frozen=True)
class Evaluate:
    """Scores of a trained model: on what it was validated on, or on data of one's own."""

    source: tuple[str, ...] = ()
    """Translation: files to translate."""
    target: tuple[str, ...] = ()
    """Translation: what they should become."""
    pairs: tuple[str, ...] = ()
    """Translation: instead, files with tabs that hold both."""
    columns: tuple[int, int] | None = None
    """Translation: which columns of those files, counted from 0, are source and target; labels:
    which are label and text."""
    texts: tuple[str, ...] = ()
    """Language models: files of text. Labels: files with a label and a text in each line."""
    images: str | None = None
    """Images: a folder, or an archive, as train takes it."""
    labels: str | None = None
    """Images in classes: the labels of an idx file."""
    captions: str | None = None
    """Images to read: the file of their texts."""
    count: int | None = None
    """Dates: how many to write."""
    beams: int | None = None
    """Translation, reading: hypotheses that stay open; by default as the model was trained for."""
    device: str = "cpu"
    """Where to compute: cpu or cuda."""
    json: bool = False
    """Print one JSON object, for programs."""


EVALUATED = {
    "translate": ("source", "target", "pairs", "columns", "beams"),
    "dates": ("count",),
    "classify": ("images", "labels"),
    "read": ("images", "captions", "beams"),
    "language": ("texts",),
    "label": ("texts", "columns"),
}
"""What of `Evaluate` each task has a use for; its `evaluate` has arguments of the same names."""


def evaluate(words: Sequence[str]) -> None:
    """`regard evaluate RUN …`."""
    folder, options = with_folder("evaluate", Evaluate, Evaluate(), words)
    scores, notes = _scores(folder, options)
    if options.json:
        said = {"folder": str(folder), "scores": scores, "notes": notes}
        print(json.dumps(said, ensure_ascii=False))
        return
    for score, value in scores.items():
        print(f"{score} {value:.4g}" + (f"  {notes[score]}" if score in notes else ""))


def _scores(folder: Path, options: Evaluate) -> tuple[dict[str, float], dict[str, str]]:
    """The scores, and what is to be said of some: sacrebleu's signatures."""
    saved = checkpoint.load(model_folder(folder), verify=False)
    name = (saved.task or {}).get("name")
    if name not in EVALUATED:
        raise ValueError(f"{folder} is for {name!r}; known are {', '.join(EVALUATED)}")
    ours = {"device", "json", *EVALUATED[name]}
    for field in fields(Evaluate):
        if field.name not in ours and getattr(options, field.name) != field.default:
            raise ValueError(
                f"{folder} is for {name!r}, which has no use for --{field.name}; it takes "
                + ", ".join(f"--{other}" for other in EVALUATED[name])
            )
    given = {key: getattr(options, key) for key in EVALUATED[name]}
    chosen = {key: value for key, value in given.items() if value not in (None, ())}
    found = module(name).evaluate(folder, **chosen, device=options.device, progress=Progress())
    return (found.scores, found.signatures) if name == "translate" else (found, {})


# Words


class Progress:
    """What is being prepared: a line that grows on a terminal, its beginning elsewhere."""

    def __init__(self) -> None:
        self._last = ""

    def __call__(self, what: str, share: float) -> None:
        if sys.stderr.isatty():
            end = "\n" if share >= 1 else ""
            print(f"\r{what} {share:4.0%}", end=end, file=sys.stderr, flush=True)
        elif what != self._last:
            print(f"{what} …", file=sys.stderr, flush=True)
        self._last = what


def module(name: str) -> ModuleType:
    """A task's file; none is imported that is not asked for."""
    match name:
        case "translate":
            from regard.task import translate

            return translate
        case "dates":
            from regard.task import dates

            return dates
        case "classify":
            from regard.task import classify

            return classify
        case "read":
            from regard.task import read

            return read
        case "language":
            from regard.task import language

            return language
        case "label":
            from regard.task import label

            return label
    raise ValueError(f"task ({name!r}) is unknown; choose from {', '.join(TASKS)}")


def with_folder(
    name: str, kind: type[Settings], default: Settings, words: Sequence[str]
) -> tuple[Path, Settings]:
    """The folder that comes first, and what the flags say; `--help` needs no folder."""
    folder = words[0] if words and not words[0].startswith("-") else None
    rest = words if folder is None else words[1:]
    options = parse(kind, default, rest, f"regard {name} RUN")
    if folder is None:
        raise ValueError(f"{name} needs a run's or a model's folder: regard {name} RUN")
    return Path(folder), options


def parse(kind: type[Settings], default: Settings, words: Sequence[str], name: str) -> Settings:
    """A config from flags. What is wrong with them is one line; `--help` explains all."""
    import tyro

    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return tyro.cli(kind, prog=name, args=list(words), default=default)
    except SystemExit as end:
        if not end.code:
            raise
        raise ValueError(
            f"{_one_line(said.getvalue())} (see {name.replace(' RUN', '')} --help)"
        ) from None


def _one_line(box: str) -> str:
    """tyro frames what it has to say, over several lines, and adds the help of each flag."""
    lines = [re.sub(r"[│╭╮╰╯─]+|[+-]{4,}", " ", line).strip(" |") for line in box.splitlines()]
    text = re.sub(r"\s+", " ", " ".join(lines[1:]))
    text = re.split(r" ?(?:Argument helptext:|For full helptext)", text)[0]
    problem, _, near = text.partition(" Perhaps you meant: ")
    meant = f"; did you mean {near.split()[0]}?" if near else ""
    return f"{problem.strip().rstrip('.')}{meant}"
