"""Load a trained model with all that it needs to be used: `regard.load(folder)`.

    load("run").translate(["Guten Morgen."])        translate, dates
    load("run").classify(["photo.jpg"])             classify
    load("run").read(["scan.png"])                  read
    load("run").generate(["Once upon a time"])      language
    load("run").label(["What a day!"])              label
    load("run").encode(["What a day!"])             encoder
    load("run", "run2").translate(["Guten Tag."])   an ensemble; of language models too

The result also has `.model`, and its tokenizer or its labels. The folder is that of a model, of an
imported model, or of a run, whose best model is loaded.
"""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar, runtime_checkable

import torch
from torch import nn

from regard import checkpoint
from regard.decode.engine.ensemble import Weights
from regard.decode.engine.int8.linear import int8
from regard.synonyms import suggest_names
from regard.task.folder import model_folder
from regard.task.precision import Choice, load_saved, stores_int8
from regard.task.settings import Precision
from regard.task.specs import NAMES, spec

if TYPE_CHECKING:
    from regard.task.classify import Classifier
    from regard.task.encoder import TrainedEncoder
    from regard.task.label import Labeler
    from regard.task.language import Generator
    from regard.task.read import Reader
    from regard.task.translator import Translator

    Predictor: TypeAlias = Translator | Classifier | Reader | Generator | Labeler | TrainedEncoder
else:
    Predictor = object  # no task is imported before it is used

Ready = TypeVar("Ready")


@suggest_names
def load(
    folder: str | os.PathLike[str],
    *others: str | os.PathLike[str],
    weights: Weights | None = None,
    model: nn.Module | None = None,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    verify: bool = True,
) -> Predictor:
    """The predictor of a folder's model, ready for use; see `checkpoint.load` for the rest.

    `model` is a model with user-defined parts, into which the folder's weights are loaded. With
    `others`, all of them form an ensemble with these `weights`. Weights that `regard quantize` has
    stored in 8 bits stay so on a CPU, unless a `dtype` is given.
    """
    if others and model is not None:
        raise ValueError(
            "model is for one folder; load each, and join them by regard.task.load.ensemble"
        )
    options: dict[str, Any] = {"model": model, "device": device, "dtype": dtype, "verify": verify}
    return ensemble([_load_one(name, **options) for name in (folder, *others)], weights)


def ensemble(predictors: Sequence[Ready], weights: Weights | None = None) -> Ready:
    """An ensemble of translators or of language models; a single predictor is returned as it is."""
    first, *others = predictors
    if not others and not weights:
        return first
    if names := [type(member).__name__ for member in predictors if not isinstance(member, _Member)]:
        raise ValueError(
            f"a {names[0]} cannot be in an ensemble; translators and language models can"
        )
    if len({type(member) for member in predictors}) > 1:
        kinds = ", ".join(type(member).__name__ for member in predictors)
        raise ValueError(f"an ensemble must be of one kind, not of {kinds}")
    assert isinstance(first, _Member)
    combined: Ready = first.ensemble(others, weights)
    return combined


def _for_kernels(dtype: torch.dtype | None, device: Any, model: Any, **others: Any) -> bool:
    """True if stored 8-bit weights stay so: on a CPU, unless a dtype is given."""
    return dtype is None and model is None and torch.device(device).type == "cpu"


@runtime_checkable
class _Member(Protocol):
    def ensemble(self, others: Sequence[Any], weights: Weights | None) -> Any: ...


def _load_one(
    folder: str | os.PathLike[str], *, dtype: torch.dtype | None, **options: Any
) -> Predictor:
    place = model_folder(folder)
    saved = checkpoint.load(place, dtype=dtype, **options, keep_int8=_for_kernels(dtype, **options))
    if stores_int8(saved.model):
        int8(saved.model)
    return _predictor(saved)


def load_in(
    folder: str | os.PathLike[str], device: str, precision: Precision
) -> tuple[Predictor, Choice]:
    """The predictor of a folder's model in a precision, and why in this one."""
    saved, choice = load_saved(folder, device, precision)
    return _predictor(saved), choice


def _predictor(saved: checkpoint.Saved) -> Predictor:
    name = (saved.task or {}).get("name")
    if name in NAMES:
        predictor: Predictor = spec(name).predictor(saved)
        return predictor
    purpose = "does not say what its model is for" if name is None else f"is for {name!r}"
    raise ValueError(
        f"{saved.folder} {purpose}; known are {', '.join(NAMES)}; for the model alone use "
        "regard.checkpoint.load"
    )
