"""Loads models for the commands, on a device and in a precision.

load_model(folder, options, Translator)       the model of a run
load_ensemble(folder, options, Translator)    its ensemble with the models of --ensemble
"""

import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from regard.machine.processes import Processes
from regard.task.settings import Precision

if TYPE_CHECKING:
    from regard.task.predictor import Predictor

    Ready = TypeVar("Ready", bound=Predictor)
else:
    Ready = TypeVar("Ready")  # torch is imported when a model is loaded

COMMANDS = {
    "Translator": "regard translate",
    "Classifier": "regard classify",
    "Reader": "regard read",
    "Generator": "regard generate",
    "Labeler": "regard label",
    "TextEmbedder": "regard train label NEW --start",
}
"""The command that uses each kind of model."""


@dataclass(frozen=True, kw_only=True)
class InferenceOptions:
    """The device and the precision of a model."""

    device: str = "auto"
    """Device: auto is a GPU where there is one; or cpu, cuda, cuda:1."""
    precision: Precision = "auto"
    """Precision of weights and activations. int8 quantizes the weights; it is for a cpu, where it
    generates text several times faster than fp32. auto is bf16 on a GPU; on a cpu it is fp32, or
    int8 if the folder stores 8-bit weights (regard quantize)."""
    verbose: bool = False
    """Print precision and engine on standard error, and why they were picked."""


@dataclass(frozen=True, kw_only=True)
class EnsembleOptions(InferenceOptions):
    """Other models that write together with the first."""

    ensemble: tuple[str, ...] = ()
    """Ensemble: other runs that write together with RUN. Every token is chosen by the mean of all
    their probabilities. They must have RUN's target tokenizer; alignments are RUN's."""
    ensemble_weights: tuple[float, ...] = ()
    """Weights of that mean, RUN's first. By default all runs count the same."""


def load_ensemble(
    folder: Path, options: EnsembleOptions, kind: type[Ready], here: Processes | None = None
) -> Ready:
    """The model of a folder, or its ensemble with those of --ensemble."""
    from regard.task.load import ensemble

    folders = [folder, *map(Path, options.ensemble)]
    members = [load_model(member, options, kind, here) for member in folders]
    return ensemble(members, options.ensemble_weights or None)


def load_model(
    folder: Path, options: InferenceOptions, kind: type[Ready], here: Processes | None = None
) -> Ready:
    """The model of a folder, on the device and in the precision of the options."""
    from regard.machine.device import device as named_device
    from regard.task.load import load_in

    device, precision = options.device, options.precision
    spread = here is not None and here.size > 1 and precision != "int8"
    if here is not None and spread and str(named_device(device)) == "cuda":
        device = f"cuda:{here.local}"  # one GPU for each process
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        predictor, choice = load_in(folder, device, precision)
    if not isinstance(predictor, kind):
        actual = type(predictor).__name__
        raise ValueError(
            f"{folder} holds a {actual}, not a {kind.__name__}; its command is {COMMANDS[actual]}"
        )
    lines = [str(warning.message) for warning in caught]
    if options.verbose:
        lines += [f"precision: {choice}", _engine(predictor.model)]
    if here is None or here.first:
        for line in lines:
            print("regard:", line, file=sys.stderr, flush=True)
    return predictor


def report_fallback(model: Any, options: InferenceOptions, here: Processes | None = None) -> None:
    """Prints the engine with --verbose if the picked one could not run the latest batch."""
    from regard.decode.engine.eager import EagerEngine
    from regard.decode.engine.pick import pick

    if options.verbose and (here is None or here.first):
        engine = pick(model)
        if engine.name == EagerEngine.name and not isinstance(engine, EagerEngine):
            print("regard:", _engine(model), file=sys.stderr, flush=True)


def _engine(model: Any) -> str:
    from regard.decode.engine.pick import pick
    from regard.model.language import LanguageModel
    from regard.model.transformer import Transformer

    if isinstance(model, Transformer | LanguageModel):
        engine = pick(model)
        return f"engine: {engine.name} ({engine.reason})"
    weight = next(model.parameters())
    return f"engine: the model's own modules, {weight.dtype} on {weight.device}"
