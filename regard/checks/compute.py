"""A model's logits, computed in each of the ways that must agree.

Each function gives one matrix for each example: a row for every token that the model writes, or one
row for a model that classifies.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from regard.attention.packed import PackedLengths
from regard.checks.finding import SkipError
from regard.interop.programs import AnyModel, programs
from regard.model.classifier import TextClassifier
from regard.model.encoder import TextEncoder
from regard.model.language import LanguageModel
from regard.model.transformer import Transformer

Rows: TypeAlias = list[Float[Tensor, "_ N"]]


@dataclass(frozen=True)
class Example:
    """An input of a model, and its output."""

    source: Tensor | None
    """Token ids, which end with EOS, or an image; None for a language model."""
    target: Tensor | None
    """Token ids, which begin with BOS; None for a model that classifies."""

    def to(self, device: torch.device) -> "Example":
        source, target = (
            None if part is None else part.to(device) for part in (self.source, self.target)
        )
        return Example(source, target)


def place(model: AnyModel) -> torch.device:
    return next(model.parameters()).device


def alone(model: Any, examples: Sequence[Example]) -> Rows:
    """One by one."""
    return [rows for example in examples for rows in padded(model, [example])]


def padded(model: Any, examples: Sequence[Example]) -> Rows:
    """In one batch, the shorter ones padded."""
    match model:
        case Transformer():
            source, lengths = sources(examples)
            targets, counts = _pad([_target(example) for example in examples])
            return _cut(model(source, targets, source_lengths=lengths), counts)
        case LanguageModel():
            targets, counts = _pad([_target(example) for example in examples])
            return _cut(model(targets), counts)
        case TextEncoder():
            source, lengths = sources(examples)
            assert lengths is not None
            return _cut(model(source, lengths=lengths), lengths)
        case TextClassifier():
            source, lengths = sources(examples)
            return list(model(source, lengths=lengths).split(1))
    return list(model(sources(examples)[0]).split(1))


def packed(model: Any, examples: Sequence[Example]) -> Rows:
    """In one batch, end to end."""
    match model:
        case Transformer():
            targets, counts = _pack([_target(example) for example in examples])
            if _reads_text(examples):
                source, lengths = _pack([_source(example) for example in examples])
                logits = model(source, targets, source_lengths=lengths, target_lengths=counts)
            else:
                logits = model(sources(examples)[0], targets, target_lengths=counts)
            return list(logits[0].split(counts.lengths.tolist()))
        case LanguageModel():
            targets, counts = _pack([_target(example) for example in examples])
            return list(model(targets, lengths=counts)[0].split(counts.lengths.tolist()))
        case TextEncoder():
            source, lengths = _pack([_source(example) for example in examples])
            return list(model(source, lengths=lengths)[0].split(lengths.lengths.tolist()))
        case TextClassifier():
            source, lengths = _pack([_source(example) for example in examples])
            return list(model(source, lengths=lengths).split(1))
    raise SkipError("images have one size, and nothing to be padded")


def cached(model: Any, examples: Sequence[Example]) -> Rows:
    """Token by token, with a KV cache."""
    if not isinstance(model, Transformer | LanguageModel):
        raise SkipError("it writes no text, and has no cache")
    targets, counts = _pad([_target(example) for example in examples])
    cache = model.cache()
    steps = []
    if isinstance(model, Transformer):
        source, lengths = sources(examples)
        memory: Tensor | None = model.encode(source, lengths)
        for token in targets.split(1, 1):
            steps.append(model.decode(token, memory, None, lengths, cache))
            memory = None
    else:
        steps = [model(token, cache=cache) for token in targets.split(1, 1)]
    return _cut(torch.cat(steps, 1), counts)


def formula(model: Any, examples: Sequence[Example]) -> Rows:
    """By the equations alone, softmax(β q·k) v, as exports have them: on the CPU, in float32."""
    named = {program.name: program.module for program in programs(model)}
    results = []
    for example in examples:
        source = None if example.source is None else example.source[None].cpu()
        length = {} if source is None or source.is_floating_point() else {"lengths": _one(source)}
        match model:
            case Transformer():
                memory = named["encoder"](source, **length)
                inputs = {"memory": memory, **length}
            case LanguageModel():
                inputs = {}
            case TextEncoder():
                results.append(named["model"](source, **length)[0][0])
                continue
            case _:
                results.append(named["model"](source, **length))
                continue
        target = _target(example)[None].cpu()
        past = next(p.inputs["past"] for p in programs(model) if p.name == "decoder")
        empty = past[:, :, :1, :, :0]
        results.append(named["decoder"](target, empty, **inputs)[0][0])
    return results


def _one(source: Tensor) -> Tensor:
    return torch.tensor([source.shape[1]])


def _reads_text(examples: Sequence[Example]) -> bool:
    return not _source(examples[0]).is_floating_point()


def _source(example: Example) -> Tensor:
    assert example.source is not None
    return example.source


def _target(example: Example) -> Tensor:
    assert example.target is not None
    return example.target


def sources(examples: Sequence[Example]) -> tuple[Tensor, Tensor | None]:
    """A padded batch with its lengths, or a batch of images."""
    sources = [_source(example) for example in examples]
    if _reads_text(examples):
        return _pad(sources)
    return torch.stack(sources), None


def _pad(rows: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    lengths = torch.tensor([len(row) for row in rows], device=rows[0].device)
    return pad_sequence(list(rows), batch_first=True), lengths


def _pack(rows: Sequence[Tensor]) -> tuple[Tensor, PackedLengths]:
    lengths = PackedLengths([len(row) for row in rows])
    return torch.cat(list(rows))[None], lengths.to(rows[0].device)


def _cut(logits: Tensor, counts: Tensor) -> Rows:
    return [rows[:count] for rows, count in zip(logits, counts.tolist())]
