"""The command `evaluate`: a trained model's scores.

regard evaluate RUN                                    on what it was validated on
regard evaluate RUN --source test.en --target test.de  on data of one's own
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

from regard import checkpoint
from regard.cli.arguments import Progress, with_folder
from regard.task.folder import model_folder
from regard.task.spec import Evaluation
from regard.task.specs import NAMES, spec


@dataclass(frozen=True)
class Evaluate:
    """Scores of a trained model: on what it was validated on, or on data of one's own."""

    source: tuple[str, ...] = ()
    """Translation: files to translate."""
    target: tuple[str, ...] = ()
    """Translation: the reference translations."""
    pairs: tuple[str, ...] = ()
    """Translation: instead, tab-separated files that hold both."""
    columns: tuple[int, int] | None = None
    """Translation: which columns of those files, counted from 0, are source and target. Labels:
    which are label and text."""
    bleu: Literal["13a", "intl", "zh", "char", "none"] | None = None
    """Translation: sacreBLEU's tokenizer. By default as in training."""
    texts: tuple[str, ...] = ()
    """Language models: files of text. Labels: files with a label and a text in each line."""
    images: str | None = None
    """Images: a folder, or an archive, as train takes it."""
    labels: str | None = None
    """Image classes: the labels of an idx file."""
    captions: str | None = None
    """Images to read: the file of their texts."""
    count: int | None = None
    """Dates: how many to write."""
    beams: int | None = None
    """Translation, reading: beam size. By default as the model was trained for."""
    device: str = "cpu"
    """Where to compute: cpu or cuda."""
    json: bool = False
    """Print one JSON object, for programs."""


def evaluate(words: Sequence[str]) -> None:
    """`regard evaluate RUN …`."""
    folder, options = with_folder("evaluate", Evaluate, Evaluate(), words)
    result = _evaluated(folder, options)
    scores, notes = result.scores, result.signatures
    for problem in result.problems:
        print("regard: left out:", problem, file=sys.stderr)
    if options.json:
        everything = {"folder": str(folder), "scores": scores, "notes": notes}
        print(json.dumps({**everything, "problems": result.problems}, ensure_ascii=False))
        return
    for score, value in scores.items():
        print(f"{score} {value:.4g}" + (f"  {notes[score]}" if score in notes else ""))


def _evaluated(folder: Path, options: Evaluate) -> Evaluation:
    saved = checkpoint.load(model_folder(folder), verify=False)
    name = (saved.task or {}).get("name")
    if name not in NAMES:
        raise ValueError(f"{folder} is for {name!r}; known are {', '.join(NAMES)}")
    task = spec(name)
    for field in fields(Evaluate):
        known = field.name in ("device", "json", *task.options)
        if not known and getattr(options, field.name) != field.default:
            raise ValueError(
                f"{folder} is for {name!r}, which has no use for --{field.name}; it takes "
                + ", ".join(f"--{option}" for option in task.options)
            )
    values = {option: getattr(options, option) for option in task.options}
    chosen = {option: value for option, value in values.items() if value not in (None, ())}
    return task.evaluate(folder, **chosen, device=options.device, progress=Progress())
