"""From a folder to something that works: `regard.load(folder)`.

    load("run").translate(["Guten Morgen."])        translate, dates
    load("run").classify(["photo.jpg"])             classify
    load("run").read(["scan.png"])                  read
    load("run").generate(["Once upon a time"])      language
    load("run").label(["What a day!"])              label

What comes back also has `.model`, and its tokenizer or its labels. A folder is a model's, one that
was imported, or a run's, whose best model counts.
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, cast

import torch
from torch import nn

from regard import checkpoint
from regard.config import Object, loads

if TYPE_CHECKING:
    from regard.task.classify import Classifier
    from regard.task.label import Labeler
    from regard.task.language import Generator
    from regard.task.read import Reader
    from regard.task.translator import Translator

    Loaded: TypeAlias = Translator | Classifier | Reader | Generator | Labeler
else:
    Loaded = object  # none is imported that is not asked for

TASKS = {
    "translate": "any parallel text: two files, or a table with two columns",
    "dates": "dates in many languages to ISO 8601; nothing to download",
    "classify": "images, one folder for each class; by default handwritten digits",
    "read": "images to text; by default strips of handwritten digits",
    "language": "a language model of any text",
    "label": "texts, each in one class, on a trained encoder or from scratch",
}
"""Every task, and what it is for."""


def load(
    folder: str | os.PathLike[str],
    *,
    model: nn.Module | None = None,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    verify: bool = True,
) -> Loaded:
    """What a folder's model was trained for, ready for use; see `checkpoint.load` for the rest.

    `model` is a model with parts of one's own, which is filled with the folder's weights.
    """
    place = model_folder(folder)
    saved = checkpoint.load(place, model=model, device=device, dtype=dtype, verify=verify)
    match (saved.task or {}).get("name"):
        case "translate" | "dates":
            from regard.task.translator import Translator

            return Translator.of(saved)
        case "classify":
            from regard.task.classify import Classifier

            return Classifier(saved)
        case "read":
            from regard.task.read import Reader

            return Reader(saved)
        case "language":
            from regard.task.language import Generator

            return Generator(saved)
        case "label":
            from regard.task.label import Labeler

            return Labeler(saved)
        case name:
            said = "does not say what its model is for" if name is None else f"is for {name!r}"
            raise ValueError(
                f"{place} {said}; known are {', '.join(TASKS)}; for the model alone use "
                "regard.checkpoint.load"
            )


def model_folder(folder: str | os.PathLike[str]) -> Path:
    """Where the model is: in a run's folder its best one, or before there is one the last."""
    place = Path(folder)
    if run_config(place) is None:
        return place
    for name in ("best", "last"):
        if (place / name).is_dir():
            return place / name
    raise ValueError(f"{place} is a run that has saved no model yet; train it first")


def run_config(folder: Path) -> Object | None:
    """A run's config.json; None where the folder is not a run's."""
    path = folder / checkpoint.CONFIG
    try:
        text = path.read_bytes()
    except OSError:
        return None  # what is wrong is said when the model is loaded
    said = loads(text, str(path))
    is_run = isinstance(said, dict) and said.get("kind") == "run"
    return cast(Object, said) if is_run else None
