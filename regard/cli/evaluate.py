"""The command `evaluate`: a trained model's scores.

regard evaluate RUN                                    on its validation set
regard evaluate RUN --source test.en --target test.de  on other data
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

from regard import checkpoint
from regard.cli.arguments import Progress, with_folder
from regard.data.diagnosis import Separator
from regard.data.table import Column
from regard.machine.device import use
from regard.task.folder import model_folder
from regard.task.settings import Precision, check_positive
from regard.task.size import check_held
from regard.task.spec import Evaluation
from regard.task.specs import NAMES, spec


@dataclass(frozen=True)
class Evaluate:
    """Evaluates a trained model: on its validation set, or on a test set."""

    source: tuple[str, ...] = ()
    """translate: source files."""
    target: tuple[str, ...] = ()
    """translate: reference translations."""
    pairs: tuple[str, ...] = ()
    """translate: instead, tables with both sides."""
    columns: tuple[Column, Column] | None = None
    """translate: which columns of the tables, numbers from 0 on or names, are source and target.
    label: which are label and text. By default as in training."""
    tags: tuple[Column, ...] | None = None
    """translate: columns whose values are tags. By default as in training."""
    tag: tuple[str, ...] = ()
    """translate: tags of all sources, such as the language to write."""
    separator: Separator | None = None
    """translate, label, read: what separates the columns of tables. By default as in training."""
    bleu: Literal["13a", "intl", "zh", "char", "none"] | None = None
    """translate: sacreBLEU's tokenizer (--tokenize). By default as in training."""
    lowercase: bool = False
    """translate: ignore case when scoring, as published scores often do."""
    references: tuple[str, ...] = ()
    """translate: files with more reference translations, a line for each pair."""
    texts: tuple[str, ...] = ()
    """language: files of text. label: tables with a label and a text in each line."""
    images: str | None = None
    """classify, read: test images, in the form that --images of train takes."""
    labels: str | None = None
    """classify: the idx file of labels."""
    captions: str | None = None
    """read: the file of reference texts."""
    count: int | None = None
    """dates, read: number of test dates, or of test strips of digits."""
    beams: int | None = None
    """translate, read: beam size. By default that of the model's config.json."""
    ensemble: tuple[str, ...] = ()
    """translate, dates: other runs that translate together with RUN (an ensemble)."""
    ensemble_weights: tuple[float, ...] = ()
    """translate, dates: how much each run counts, RUN first. By default all count the same."""
    precision: Precision | None = None
    """Precision of weights and activations: fp32 by default, so that scores are comparable. auto is
    bf16 on a GPU, and int8 on a cpu if the folder stores 8-bit weights; int8 is for a cpu."""
    device: str = "auto"
    """Device: auto is a GPU where there is one; or cpu, cuda, cuda:1."""
    json: bool = False
    """Print one JSON object, for programs."""

    def __post_init__(self) -> None:
        check_positive(self, "beams", "count")
        if self.count is not None:
            check_held(count=self.count)


def evaluate(words: Sequence[str]) -> None:
    """`regard evaluate RUN …`."""
    folder, options = with_folder("evaluate", Evaluate, Evaluate(), words)
    result = _evaluate(folder, options)
    scores, notes = result.scores, result.signatures
    for problem in result.problems:
        print("regard: left out:", problem, file=sys.stderr)
    for remark in result.remarks:
        print("regard:", remark, file=sys.stderr)
    if options.json:
        everything: dict[str, object] = {"folder": str(folder), "scores": scores, "notes": notes}
        everything["problems"] = result.problems
        everything["remarks"] = result.remarks
        if result.confusion is not None:
            everything["classes"] = result.confusion.scores()
            everything["confusion"] = result.confusion.to_json()
        print(json.dumps(everything, ensure_ascii=False))
        return
    for score, value in scores.items():
        print(f"{score} {value:.4g}" + (f"  {notes[score]}" if score in notes else ""))
    if result.confusion is not None:
        print("", *result.confusion.lines(), sep="\n")


def _evaluate(folder: Path, options: Evaluate) -> Evaluation:
    saved = checkpoint.load(model_folder(folder), verify=False)
    name = (saved.task or {}).get("name")
    if name not in NAMES:
        raise ValueError(f"{folder} holds no task to evaluate; known are {', '.join(NAMES)}")
    task = spec(name)
    for field in fields(Evaluate):
        allowed = field.name in ("device", "json", *task.options)
        if not allowed and getattr(options, field.name) != field.default:
            flag, *others = (f"--{word.replace('_', '-')}" for word in (field.name, *task.options))
            raise ValueError(
                f"{flag} is not an option of the task {name}, which {folder} is for; its options "
                f"are {', '.join(others)}"
            )
    values = {option: getattr(options, option) for option in task.options}
    chosen = {option: value for option, value in values.items() if value not in (None, ())}
    use(options.device)
    return task.evaluate(folder, **chosen, device=options.device, progress=Progress())
