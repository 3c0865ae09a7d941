"""Whether a training fits into memory, told from its settings before anything is read or built.

check_settings(config)          the model, with one token or one image
check_batches(config, task)     with the batches of its data, once these are known
"""

import os
from dataclasses import asdict, replace
from typing import Any

from regard.checkpoint import without_values
from regard.machine import memory
from regard.machine.device import device
from regard.machine.memory import Size
from regard.model.classifier import ClassifierConfig, ClassifierShape, TextClassifier
from regard.model.encoder import EncoderConfig, EncoderShape, TextEncoder
from regard.model.fits import TRAINING, check_training
from regard.model.formula import Config
from regard.model.language import LanguageConfig, LanguageModel, LanguageShape
from regard.model.transformer import (
    ImageSource,
    TextSource,
    Transformer,
    TransformerConfig,
    TransformerShape,
)
from regard.model.vit import VisionConfig, VisionShape, VisionTransformer
from regard.task.search import check_penalty, check_search
from regard.train import precision
from regard.train.config import TrainingConfig
from regard.train.task import Task

EXAMPLE = 1000
"""Bytes of a short text in memory, with its tokens and all that Python adds."""


def check_held(**counts: int) -> None:
    """Refuses more examples than memory can hold."""
    for name, count in counts.items():
        size = Size(name, count, 50_000, lambda other: EXAMPLE * other)
        memory.check("holding so many", [size], memory.limit())


def check_settings(config: Any) -> None:
    """Refuses what this machine cannot train or search with; a model to go on from has a shape."""
    counts = {name: getattr(config, name, None) for name in ("examples", "judged")}
    check_held(**{name: count for name, count in counts.items() if isinstance(count, int)})
    if hasattr(config, "length_penalty"):
        check_penalty(config.length_penalty)
    if getattr(config, "start", None) is None:
        kind, model = _model(config)
        _check(model, 1, config.training, None)
        _check_shape(kind, model)
        if hasattr(config, "beams"):
            check_search(model, config.beams, device(config.training.device))


def _check_shape(kind: type[Any], model: Config) -> None:
    """Refuses what does not fit together, such as heads that do not divide width, by building the
    model without its values; of blocks that are alike, one."""
    layers = ("layers", "encoder_layers", "decoder_layers")
    counts = {name: getattr(model, name) for name in layers if hasattr(model, name)}
    with without_values():
        kind(replace(model, **{name: min(1, count) for name, count in counts.items()}))


def check_batches(config: Any, task: Task) -> None:
    """Refuses batches that are too large for memory, or for their parts to have examples."""
    training: TrainingConfig = config.training
    most = training.batch
    if training.accumulate > 1 or most > _FEW:
        examples = max(map(len, task.plan(0)))
        if training.accumulate > examples:
            raise ValueError(
                f"training.accumulate ({training.accumulate}) must be at most {examples}, the "
                "examples of the largest batch; each part needs one"
            )
        most = min(most, examples * _longest(config))
    model = getattr(task.model, "config", None)
    if model is not None:
        _check(model, -(-most // (training.accumulate * _processes())), training, task)


_FEW = 2**16
"""Tokens, or images, of batches that need no second look."""


def _check(model: Config, batch: int, training: TrainingConfig, task: Task | None) -> None:
    each = TRAINING + (4 if training.ema else 0)
    if training.parallel == "sharded":
        each = -(-each // _processes())
    where = device(training.device)
    named = {name: dtype for dtype, name in precision.NAMES.items()}
    dtype = named.get(training.precision) or precision.automatic(where, task)
    check_training(model, batch, where, each=each, number=dtype.itemsize)


def _processes() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def _longest(config: Any) -> int:
    """Tokens that an example has at most, on both sides; an image is counted as one."""
    if hasattr(config, "pixels"):
        return 1
    return 2 * int(getattr(config, "longest", None) or getattr(config, "context", None) or 100) + 2


def _model(config: Any) -> tuple[type[Any], Config]:
    """The model and its whole config, as far as it is known without the data."""
    shape = asdict(config.model)
    vocabulary = max(1, getattr(config, "vocabulary", 1))
    match config.model:
        case TransformerShape():
            source: TextSource | ImageSource = TextSource()
            if hasattr(config, "pixels"):
                source = ImageSource(**_image(config), position=config.place)
            return Transformer, TransformerConfig(vocabulary, source=source, **shape)
        case LanguageShape():
            return LanguageModel, LanguageConfig(vocabulary, **shape)
        case ClassifierShape():
            return TextClassifier, ClassifierConfig(2, vocabulary, **shape)
        case EncoderShape():
            return TextEncoder, EncoderConfig(vocabulary, **shape)
        case VisionShape():
            return VisionTransformer, VisionConfig(2, **_image(config), **shape)
    raise TypeError(f"{type(config.model).__name__} is of no known model")


def _image(config: Any) -> dict[str, Any]:
    """Images of the size that is set, or the smallest."""
    patch = config.patch or _PATCH
    size = config.pixels
    strip = getattr(config, "strip", None)
    if size is None and strip is not None and config.images is None:
        size = strip.rows, strip.columns
    if size is None:
        size = patch
    elif config.patch is None:
        # Patches will be of this size at most, and divide the image, which may be made larger.
        sides = (size, size) if isinstance(size, int) else size
        size = tuple(max(1, side // patch) * patch for side in sides)
    return {"image": size, "patch": patch, "channels": config.channels or 1}


_PATCH = 16
