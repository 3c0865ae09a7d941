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
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import nn

from regard import checkpoint
from regard.task.folder import model_folder
from regard.task.specs import NAMES, spec

if TYPE_CHECKING:
    from regard.task.classify import Classifier
    from regard.task.label import Labeler
    from regard.task.language import Generator
    from regard.task.read import Reader
    from regard.task.translator import Translator

    Predictor: TypeAlias = Translator | Classifier | Reader | Generator | Labeler
else:
    Predictor = object  # none is imported that is not asked for


def load(
    folder: str | os.PathLike[str],
    *,
    model: nn.Module | None = None,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    verify: bool = True,
) -> Predictor:
    """What a folder's model was trained for, ready for use; see `checkpoint.load` for the rest.

    `model` is a model with parts of one's own, which is filled with the folder's weights.
    """
    place = model_folder(folder)
    saved = checkpoint.load(place, model=model, device=device, dtype=dtype, verify=verify)
    name = (saved.task or {}).get("name")
    if name in NAMES:
        predictor: Predictor = spec(name).predictor(saved)
        return predictor
    purpose = "does not say what its model is for" if name is None else f"is for {name!r}"
    raise ValueError(
        f"{place} {purpose}; known are {', '.join(NAMES)}; for the model alone use "
        "regard.checkpoint.load"
    )
