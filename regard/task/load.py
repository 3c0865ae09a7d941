"""Load a trained model with all that it needs to be used: `regard.load(folder)`."""

import os
from collections.abc import Sequence
from typing import TypeVar, cast

import torch
from torch import nn

from regard import checkpoint
from regard.attention.checks import shown
from regard.decode.engine.ensemble import Weights
from regard.decode.engine.int8.linear import int8
from regard.machine.device import device as named_device
from regard.synonyms import suggest_names
from regard.task.folder import model_folder
from regard.task.precision import Choice, load_saved
from regard.task.predictor import Predictor, has_8_bits
from regard.task.settings import Precision
from regard.task.specs import NAMES, spec

Ready = TypeVar("Ready", bound=Predictor)


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
    """Loads a trained model with its tokenizer or its labels, ready for use.

    The folder is that of a run, whose best model is loaded, of a model, or of an imported model.
    The task that it was trained for decides the class:

    | `regard train …` | returned | its methods |
    |---|---|---|
    | `translate`, `dates` | `Translator` | `translate(texts)`, `hypotheses`, `score`, … |
    | `classify` | `Classifier` | `classify(images)`, `probabilities` |
    | `read` | `Reader` | `read(images)`, `attention` |
    | `label` | `Labeler` | `label(texts)`, `probabilities` |
    | `language` | `Generator` | `generate(prompts)` |
    | `encoder` | `TextEmbedder` | `encode(texts)`, `fill(texts)` |

    Each also has `model`, `device`, `to(device)`, and `tokenizer` or `labels`, and can be called:
    `predictor(texts)`. `Translator.load(folder)` and the like return that class, for editors and
    type checkers, and raise if the folder holds another.

    With `others` all of them form an ensemble, with these `weights`. `model` is a model with
    user-defined parts, into which the folder's weights are loaded. `device` is "cpu", "cuda",
    "cuda:1", or "auto" for a GPU if there is one; `dtype` converts the weights, as
    `torch.bfloat16` does. `verify=False` skips the checksums. Weights that `regard quantize` has
    stored in 8 bits stay so on a CPU, unless a `dtype` is given.

    >>> import regard
    >>> translator = regard.load("runs/en-de")
    >>> len(translator.translate(["A dog.", "A cat."]))
    2
    >>> labels = regard.load("runs/pets").classify(["cat.png"])
    >>> regard.load("runs/pets").translate(["A dog."])
    Traceback (most recent call last):
    ...
    ValueError: runs/pets holds a Classifier, not a Translator; call .classify(images)
    """
    for name in (folder, *others):
        if not isinstance(name, str | os.PathLike):
            raise ValueError(
                f"folder ({shown(name)}) must be a path; an ensemble is load(*folders)"
            )
    if others and model is not None:
        raise ValueError("model is for one folder; load each, and call .ensemble on the first")
    members = [
        _load_one(name, model=model, device=device, dtype=dtype, verify=verify)
        for name in (folder, *others)
    ]
    return ensemble(members, weights)


def ensemble(predictors: Sequence[Ready], weights: Weights | None = None) -> Ready:
    """An ensemble of translators or of language models; a single predictor is returned as it is."""
    first, *others = predictors
    if not others and not weights:
        return first
    if len({type(member) for member in predictors}) > 1:
        kinds = ", ".join(type(member).__name__ for member in predictors)
        raise ValueError(f"an ensemble must be of one kind, not of {kinds}")
    return cast(Ready, first.ensemble(others, weights))


def _load_one(
    folder: str | os.PathLike[str],
    *,
    model: nn.Module | None,
    device: str | torch.device,
    dtype: torch.dtype | None,
    verify: bool,
) -> Predictor:
    # Stored 8-bit weights stay so where there are kernels for them.
    keep_int8 = dtype is None and model is None and named_device(device).type == "cpu"
    saved = checkpoint.load(
        model_folder(folder),
        model=model,
        device=device,
        dtype=dtype,
        verify=verify,
        keep_int8=keep_int8,
    )
    if has_8_bits(saved.model):
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
        return spec(name).predictor(saved)
    purpose = "names no task" if name is None else f"names the unknown task {name!r}"
    raise ValueError(
        f"{saved.folder} {purpose} (such as {', '.join(NAMES)}), so there is no predictor; load "
        "the model alone by regard.checkpoint.load(folder).model"
    )
