"""Models as the commands use them: by themselves or as an ensemble, on a device, in a precision.

loaded(folder, options, Translator)       a run's model
ensembled(folder, options, Translator)    the same with those of --ensemble
settling(model, folder, options)          with --precision auto: picked by the first inputs
"""

import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from regard.processes import Processes
from regard.task.settings import Precision

if TYPE_CHECKING:
    from regard.task.load import Predictor

Ready = TypeVar("Ready")


USES = {
    "Translator": "translate",
    "Classifier": "classify",
    "Reader": "read",
    "Generator": "generate",
    "Labeler": "label",
}
"""What loaded models are used by."""


@dataclass(frozen=True, kw_only=True)
class InferenceOptions:
    """Where, and in which precision, a model computes."""

    device: str = "auto"
    """Device: auto is a GPU where there is one; or cpu, cuda, cuda:1."""
    precision: Precision = "auto"
    """Precision of weights and activations. int8 quantizes the weights: the fastest on a cpu. auto
    is bf16 on a GPU. On a cpu it is int8 for models that write text, if they then choose the same
    tokens as in fp32 for at least 99% of a few hundred of the input's; otherwise fp32."""
    verbose: bool = False
    """Print on standard error which precision and which engine were picked, and why."""


@dataclass(frozen=True, kw_only=True)
class EnsembleOptions(InferenceOptions):
    """Other models that write together with the first."""

    ensemble: tuple[str, ...] = ()
    """Ensemble: other runs that write together with RUN. Every token is chosen by the mean of all
    their probabilities. They must have RUN's target tokenizer; alignments are RUN's."""
    ensemble_weights: tuple[float, ...] = ()
    """Weights of that mean, RUN's first. By default all runs count the same."""


def ensembled(
    folder: Path, options: EnsembleOptions, kind: type[Ready], here: Processes | None = None
) -> Ready:
    """The run's model by itself, or together with others."""
    from regard.task.load import ensemble

    folders = [folder, *map(Path, options.ensemble)]
    ready = [loaded(one, options, kind, here) for one in folders]
    return ensemble(ready, options.ensemble_weights or None)


def loaded(
    folder: Path, options: InferenceOptions, kind: type[Ready], here: Processes | None = None
) -> Ready:
    from regard.device import device as named_device
    from regard.device import use
    from regard.task.load import load
    from regard.task.precision import DTYPES, Writes, on_gpu

    name, precision = options.device, options.precision
    if name == "auto":
        name = "cpu" if precision == "int8" else named_device("auto").type
    if name == "cuda" and here is not None and here.size > 1:
        name = f"cuda:{here.local}"
    device = use(name)
    if precision == "int8" and device.type != "cpu":
        raise ValueError(f"precision (int8) is for device cpu, not {device}; try bf16")
    if precision == "auto" and device.type != "cpu":
        choice = on_gpu(device)
        precision = choice.precision
        _tell(f"precision: {choice}", options, here)
    # None keeps weights of 8 bits as they are.
    ready: Predictor = load(folder, device=device, dtype=DTYPES.get(precision))
    if not isinstance(ready, kind):
        found = type(ready).__name__
        raise ValueError(
            f"{folder} holds a {found}, not a {kind.__name__}; its command is regard {USES[found]}"
        )
    if device.type == "cpu" and precision in ("auto", "int8"):
        ready.model.float()
    if precision == "int8":
        from regard.decode.engine.int8.linear import int8

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            int8(ready.model)
        if here is None or here.first:
            for warning in caught:
                print("regard:", warning.message, file=sys.stderr, flush=True)
    if precision != "auto" or not isinstance(ready, Writes):
        _tell(_engine(ready.model), options, here)
    return cast(Ready, ready)


def settling(
    ready: Any, folder: Path, options: InferenceOptions, here: Processes | None = None
) -> Callable[[Sequence[str]], None]:
    """Picks a precision by the first inputs that it is shown, where none was asked for."""
    from regard.task.folder import model_folder
    from regard.task.precision import Writes, settle

    open_question = options.precision == "auto" and next(ready.model.parameters()).is_cpu
    open_question = open_question and isinstance(ready, Writes)
    if open_question and isinstance(options, EnsembleOptions) and options.ensemble:
        _tell("precision: fp32 (an ensemble)", options, here)
        open_question = False

    def prepare(inputs: Sequence[str]) -> None:
        nonlocal open_question
        if open_question:
            open_question = False
            choice = settle(ready, inputs, model_folder(folder))
            _tell(f"precision: {choice}", options, here, always=choice.worth_saying)
            _tell(_engine(ready.model), options, here)

    return prepare


def _tell(
    words: str, options: InferenceOptions, here: Processes | None, always: bool = False
) -> None:
    if (options.verbose or always) and (here is None or here.first):
        print("regard:", words, file=sys.stderr, flush=True)


def _engine(model: Any) -> str:
    from regard.decode.engine.pick import pick
    from regard.model.language import LanguageModel
    from regard.model.transformer import Transformer

    if isinstance(model, Transformer | LanguageModel):
        engine = pick(model)
        return f"engine: {engine.name} ({engine.reason})"
    weight = next(model.parameters())
    return f"engine: the model's own modules, {weight.dtype} on {weight.device}"
