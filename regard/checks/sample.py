"""The examples that a model is checked on: the user's own, wherever there are any.

1. inputs of the model, or `--data`: lines of text, or images
2. the run's training data, as long as its files are there
3. random tokens, or noise
"""

import inspect
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.attention.packed import PackedLengths
from regard.checkpoint import Saved
from regard.checks.compute import Example
from regard.data.batch import Batch, LabelBatch, LanguageBatch, MaskedBatch, MixedBatch
from regard.data.reading import Lines
from regard.interop.programs import AnyModel
from regard.interop.verify import texts as random_texts
from regard.model.classifier import TextClassifier
from regard.model.embedding import image_size
from regard.model.encoder import TextEncoder
from regard.model.language import LanguageModel
from regard.model.transformer import AudioSource, ImageSource, TextSource, Transformer
from regard.task.classify import Classifier
from regard.task.encoder import TextEmbedder
from regard.task.label import Labeler, encode_texts
from regard.task.language import Generator
from regard.task.read import Reader
from regard.task.settings import recorded
from regard.task.specs import NAMES, spec
from regard.task.translator import Translator
from regard.train.task import Prepares

COUNT = 12
"""Examples of a check."""

LONGEST = 60
"""Tokens of each side of an example; of a longer one the beginning is read."""


def examples(
    saved: Saved, folder: Path, data: Sequence[str], count: int = COUNT
) -> tuple[list[Example], str]:
    """At most `count` examples, and their origin in words."""
    if data:
        return _short(_from_data(saved, data, count)), ", ".join(data)
    training = _trained_on(saved, folder, count)
    if training:
        return _short(training), "the run's own data"
    model: Any = saved.model
    return _random(model, saved.task or {}, count), "random inputs; --data names your own"


def from_inputs(
    model: AnyModel, args: Sequence[object], kwargs: Mapping[str, object], count: int = COUNT
) -> tuple[list[Example], str]:
    """The examples in a padded batch, as the model's forward takes it; random ones without any."""
    if not args and not kwargs:
        return _random(model, {}, count), "random inputs"
    try:
        inputs = inspect.signature(model.forward).bind(*args, **kwargs).arguments
    except TypeError as error:
        raise ValueError(f"{type(model).__name__}.forward: {error}; see its help") from None
    if "cache" in inputs or any(isinstance(part, PackedLengths) for part in inputs.values()):
        raise ValueError("the examples to check must be a padded batch with lengths, and no cache")
    batch, *target = (_rows(name, inputs) for name in inputs if not name.endswith("lengths"))
    if isinstance(model, LanguageModel):
        examples = [Example(None, row) for row in batch]
    elif target:
        examples = [Example(*pair) for pair in zip(batch, target[0])]
    else:
        examples = [Example(row, None) for row in batch]
    return examples, "the inputs given"


def _rows(name: str, inputs: Mapping[str, Any]) -> list[Tensor]:
    """The examples of a padded batch, without their padding."""
    rows, lengths = inputs[name], inputs.get(f"{name}_lengths", inputs.get("lengths"))
    if lengths is None:
        return list(rows)
    return [row[:length] for row, length in zip(rows, torch.as_tensor(lengths).tolist())]


def _short(examples: Sequence[Example]) -> list[Example]:
    def cut(part: Tensor | None) -> Tensor | None:
        return part if part is None or part.ndim > 1 else part[:LONGEST]

    return [Example(cut(example.source), cut(example.target)) for example in examples]


# Named by the user


def _from_data(saved: Saved, data: Sequence[str], count: int) -> list[Example]:
    name = (saved.task or {}).get("name")
    if name not in NAMES:
        raise ValueError(f"{saved.folder} names no task; check it without --data")
    predictor = spec(name).predictor(saved)
    if isinstance(predictor, Classifier | Reader):
        return _images(predictor, data[:count])
    lines = [line for (line,) in islice(Lines(*data, flag="--data").read(), count) if line]
    if not lines:
        raise ValueError(f"--data ({', '.join(data)}) has no lines to check the model on")
    match predictor:
        case Translator():
            settings, read = predictor.search, predictor.source_tokenizer
            sources = [[*read.encode(line)[: LONGEST - 1], settings.end] for line in lines]
            written = [best[0].tokens for best in predictor.translations(lines, beams=1)]
            return [_pair(s, [settings.start, *t]) for s, t in zip(sources, written)]
        case Generator():
            start = predictor.search.start
            return [_pair(None, [start, *predictor.tokenizer.encode(line)]) for line in lines]
        case Labeler() | TextEmbedder():
            return [
                _pair(ids, None) for ids in encode_texts(predictor.tokenizer, lines, LONGEST - 1)
            ]
    raise AssertionError(predictor)


def _images(predictor: Classifier | Reader, data: Sequence[str]) -> list[Example]:
    (pixels,) = predictor.preparation.batches(data, len(data))
    images = predictor.preparation.normalized(pixels)
    if isinstance(predictor, Classifier):
        return [Example(image, None) for image in images]
    settings, encode = predictor.search, predictor.tokenizer.encode
    targets = [[settings.start, *encode(text)] for text in predictor.read(data, beams=1)]
    return [Example(image, torch.tensor(ids)) for image, ids in zip(images, targets)]


def _pair(source: Sequence[int] | None, target: Sequence[int] | None) -> Example:
    read, written = (None if ids is None else torch.tensor(ids) for ids in (source, target))
    return Example(read, written)


# A run's own


def _trained_on(saved: Saved, folder: Path, count: int) -> list[Example]:
    """Examples of the first epoch; none where the data is not at hand."""
    name = (saved.task or {}).get("name")
    if name not in NAMES:
        return []
    task_spec = spec(name)
    try:
        config = recorded(task_spec.config, saved.task, saved.folder)
        if config is None:
            return []
        task = task_spec.build(config, folder)
    except (OSError, ValueError):
        return []
    # From many batches, since one holds examples of one length.
    batches = task.plan(0)[:count]
    each = -(-count // len(batches))
    batch = task.batch(np.concatenate([batch[:each] for batch in batches])[:count], 0)
    if isinstance(task, Prepares):
        batch = task.prepare(batch)
    match batch:
        case Batch():
            targets = _split(batch.target, batch.target_lengths)
            if batch.source_lengths is None:
                return [Example(image, ids) for image, ids in zip(batch.source, targets)]
            sources = _split(batch.source, batch.source_lengths)
            return [Example(source, target) for source, target in zip(sources, targets)]
        case LanguageBatch():
            return [Example(None, ids) for ids in _split(batch.inputs, batch.lengths)]
        case LabelBatch() | MaskedBatch():
            return [Example(ids, None) for ids in _split(batch.inputs, batch.lengths)]
        case MixedBatch():
            return [Example(image, None) for image in batch.inputs]
    raise AssertionError(batch)


def _split(ids: Tensor, lengths: Any) -> list[Tensor]:
    return list(ids[0].split(lengths.lengths.tolist()))


# Random


def _random(model: AnyModel, task: Any, count: int) -> list[Example]:
    start, end = task.get("start", 1), task.get("end", 2)
    generator = torch.Generator().manual_seed(0)

    def ids(vocabulary: int) -> list[list[int]]:
        lists = random_texts(vocabulary, {start, end, task.get("pad", 0)})
        return [lists[n % len(lists)] for n in range(count)]

    def images(*size: int) -> Tensor:
        return torch.randn(count, *size, generator=generator)

    match model:
        case LanguageModel():
            return [_pair(None, [start, *one]) for one in ids(model.config.vocabulary)]
        case TextClassifier() | TextEncoder():
            return [_pair([*one, end], None) for one in ids(model.config.vocabulary)]
        case Transformer():
            targets = [[start, *one] for one in reversed(ids(model.config.vocabulary))]
            match model.config.source:
                case TextSource(vocabulary=vocabulary):
                    sources = ids(vocabulary or model.config.vocabulary)
                    return [_pair([*s, end], t) for s, t in zip(sources, targets)]
                case ImageSource() as source:
                    pictures = images(source.channels, *image_size(source.image))
                case AudioSource(features=features):
                    pictures = images(17, features)
            return [Example(one, torch.tensor(ids)) for one, ids in zip(pictures, targets)]
    config = model.config
    return [Example(one, None) for one in images(config.channels, *image_size(config.image))]
