"""What each kind of model is exported as: one program, or an encoder and a decoder.

A `Program` is a module of `graph.py` with an example of its inputs and the names of the axes that
are free. `onnx.py` and `torch_export.py` write them down, each in its own way; `verified` runs what
was written as a user would, token by token where there is a cache, beside the native model.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from regard.interop import graph
from regard.interop.refusal import other_mixing, own_parts, refuse
from regard.interop.verify import Verified, compare, texts
from regard.model.classifier import TextClassifier
from regard.model.embedding import image_size
from regard.model.encoder import TextEncoder
from regard.model.language import LanguageModel
from regard.model.transformer import AudioSource, ImageSource, TextSource, Transformer
from regard.model.vit import VisionTransformer

AnyModel: TypeAlias = Transformer | LanguageModel | TextClassifier | TextEncoder | VisionTransformer
Axes: TypeAlias = dict[str, dict[int, str]]
Run: TypeAlias = Callable[[str, Mapping[str, Tensor]], list[Tensor]]
"""Runs the program of this name, and gives its results."""


@dataclass(frozen=True)
class Program:
    """One thing to write down."""

    name: str
    module: nn.Module
    inputs: Mapping[str, Tensor]
    axes: Axes
    outputs: tuple[str, ...]


def check(model: nn.Module, library: str) -> AnyModel:
    """The model, if it can be written down."""
    if not isinstance(model, AnyModel):
        raise ValueError(f"{library} has no {type(model).__name__}; export a model of Regard's own")
    refuse(library, other_mixing(model.config) + own_parts(model))
    return model


def programs(model: AnyModel) -> list[Program]:
    """All programs of a model, which must be in float32."""
    match model:
        case Transformer():
            return _transformer(model)
        case LanguageModel():
            past = _past(model)
            return [
                Program(
                    "decoder",
                    graph.Language(model),
                    {"tokens": _ids(5), "past": past},
                    {"tokens": {0: "batch", 1: "tokens"}, "past": {2: "batch", 4: "past"}},
                    ("logits", "present"),
                )
            ]
        case TextEncoder():
            outputs = ("logits", "features")
            return [Program("model", graph.Texts(model), *_text("source"), outputs=outputs)]
        case TextClassifier():
            return [
                Program("model", graph.Classifier(model), *_text("source"), outputs=("logits",))
            ]
        case VisionTransformer():
            config = model.config
            images = torch.zeros(3, config.channels, *image_size(config.image))
            axes: Axes = {"images": {0: "batch"}}
            return [Program("model", graph.Images(model), {"images": images}, axes, ("logits",))]


def _transformer(model: Transformer) -> list[Program]:
    source = model.config.source
    read: dict[str, Tensor]
    axes: Axes
    match source:
        case TextSource():
            read, axes = _text("source")
        case ImageSource():
            images = torch.zeros(3, source.channels, *image_size(source.image))
            read, axes = {"source": images}, {"source": {0: "batch"}}
        case AudioSource():
            read, axes = _text("source")
            read["source"] = torch.zeros(3, 7, source.features)
    encoder = Program("encoder", graph.Encoder(model), read, axes, ("memory",))
    with torch.no_grad():
        memory = encoder.module(**read)
    lengths = {name: value for name, value in read.items() if name == "lengths"}
    # Of an image, the decoder reads as many patches each time.
    sizes = {2: "batch", 4: "source"} if lengths else {2: "batch"}
    decoder = Program(
        "decoder",
        graph.Decoder(model),
        {"tokens": _ids(5), "past": _past(model), "memory": memory, **lengths},
        {
            "tokens": {0: "batch", 1: "tokens"},
            "past": {2: "batch", 4: "past"},
            "memory": sizes,
            **{name: axes[name] for name in lengths},
        },
        ("logits", "present"),
    )
    return [encoder, decoder]


def _ids(length: int) -> Tensor:
    return torch.zeros(3, length, dtype=torch.long)


def _past(model: Transformer | LanguageModel) -> Tensor:
    """A past of two positions: a size of 0 or 1 would be taken for a constant."""
    empty = graph.empty_past(model, 3)
    return empty.new_zeros(*empty.shape[:4], 2, empty.shape[-1])


def _text(name: str) -> tuple[dict[str, Tensor], Axes]:
    return (
        {name: _ids(7), "lengths": torch.tensor([7, 5, 2])},
        {name: {0: "batch", 1: name}, "lengths": {0: "batch"}},
    )


# Side by side with the native model


def verified(native: AnyModel, run: Run, engine: str) -> Verified:
    """Batches of inputs of several lengths, which neither the programs nor we have seen before."""
    with torch.no_grad():
        match native:
            case Transformer():
                pairs = _written(native, run)
            case LanguageModel():
                tokens = _padded(texts(native.config.vocabulary))[0]
                past = graph.empty_past(native, len(tokens))
                pairs = [(native(tokens), _step_by_step(run, tokens, {}, past))]
            case TextEncoder():
                ids, lengths = _padded(texts(native.config.vocabulary))
                logits, _ = run("model", {"source": ids, "lengths": lengths})
                expected = native(ids, lengths=lengths)
                real = [range(count) for count in lengths.tolist()]  # padding is nobody's
                pairs = [(a[rows], b[rows]) for a, b, rows in zip(expected, logits, real)]
            case TextClassifier():
                ids, lengths = _padded(texts(native.config.vocabulary))
                (logits,) = run("model", {"source": ids, "lengths": lengths})
                pairs = [(native(ids, lengths=lengths), logits)]
            case VisionTransformer():
                config = native.config
                images = _normal(5, config.channels, *image_size(config.image))
                (logits,) = run("model", {"images": images})
                pairs = [(native(images), logits)]
    ours, theirs = ([_rows(logits) for logits in side] for side in zip(*pairs))
    return compare(ours, theirs, engine)


def _written(native: Transformer, run: Run) -> list[tuple[Tensor, Tensor]]:
    config = native.config
    target = _padded(texts(config.vocabulary)[::-1])[0]
    lengths: dict[str, Tensor] = {}
    match config.source:
        case TextSource():
            source, counts = _padded(texts(config.source.vocabulary or config.vocabulary))
            lengths["lengths"] = counts
        case ImageSource():
            size = image_size(config.source.image)
            source = _normal(len(target), config.source.channels, *size)
        case AudioSource():
            counts = _padded(texts(2))[1]
            source = _normal(len(target), int(counts.max()), config.source.features)
            lengths["lengths"] = counts
    (memory,) = run("encoder", {"source": source, **lengths})
    past = graph.empty_past(native, len(target))
    logits = _step_by_step(run, target, {"memory": memory, **lengths}, past)
    return [(native(source, target, source_lengths=lengths.get("lengths")), logits)]


def _step_by_step(run: Run, tokens: Tensor, others: Mapping[str, Tensor], past: Tensor) -> Tensor:
    """A few tokens at once, then one at a time."""
    parts = []
    for some in (tokens[:, :3], *tokens[:, 3:].split(1, 1)):
        logits, past = run("decoder", {"tokens": some, "past": past, **others})
        parts.append(logits)
    return torch.cat(parts, 1)


def _rows(logits: Tensor) -> Tensor:
    return logits.reshape(-1, logits.shape[-1])


def _padded(lists: list[list[int]]) -> tuple[Tensor, Tensor]:
    rows = [torch.tensor(one) for one in lists]
    return pad_sequence(rows, batch_first=True), torch.tensor([len(one) for one in lists])


def _normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))
