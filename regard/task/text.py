"""What tasks that learn to write text have in common: examples, the loss and their scores.

    texts → ids, end → encoder                                      sources close with EOS
            start, ids → decoder → ids, end → text                  targets

`translate` and `dates` train a `Transduction`; `read` has the same loss.
"""

import math
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
import torch
from jaxtyping import Int32
from torch import Tensor, nn

from regard.config import to_json
from regard.data.batch import (
    Batch,
    EndToEnd,
    Side,
    Sizes,
    capacity,
    gathered,
    packed_batch,
    plan,
)
from regard.data.merges import Merges, grown
from regard.data.reading import shown
from regard.data.seeding import seeded
from regard.data.tokenizer import AnyTokenizer, files
from regard.model.transformer import TextSource, Transformer, TransformerConfig, TransformerShape
from regard.task.search import SearchSettings
from regard.task.translator import Pair, Translator
from regard.train.config import TrainingConfig
from regard.train.loss import cross_entropy, divergence
from regard.train.task import Sample

About: TypeAlias = dict[str, Any]
"""A task's section of config.json."""

Progress: TypeAlias = Callable[[str, float], None]
"""Told now and then: what is being done, and which share of it, from 0 to 1."""

Judge: TypeAlias = Callable[[Sequence[str], Sequence[str]], dict[str, float]]
"""Scores of what was written beside what should have been."""


@runtime_checkable
class Examples(Protocol):
    """Pairs of token ids, by number; a `data.text.Store` is one."""

    @property
    def lengths(self) -> Int32[np.ndarray, "n sides"]:
        """How many tokens each side of each example has."""

    def __len__(self) -> int: ...

    def packed(self, indices: np.ndarray, side: int) -> EndToEnd:
        """One side of these examples, end to end."""


class Listed:
    """Examples in memory."""

    def __init__(self, pairs: Sequence[Pair], source: AnyTokenizer, target: AnyTokenizer):
        sides = [
            tokenizer.encode_packed([pair[side] for pair in pairs])
            for side, tokenizer in enumerate((source, target))
        ]
        self.lengths = np.stack([lengths for _, lengths in sides], 1).astype(np.int32)
        self._ids = [ids for ids, _ in sides]
        self._offsets = [np.append(0, np.cumsum(lengths)) for _, lengths in sides]

    def __len__(self) -> int:
        return len(self.lengths)

    def packed(self, indices: np.ndarray, side: int) -> EndToEnd:
        return gathered(self._ids[side], self._offsets[side], indices)


class Chosen:
    """Some of the examples."""

    def __init__(self, examples: Examples, indices: np.ndarray):
        self.examples, self.indices = examples, indices
        self.lengths = examples.lengths[indices]

    def __len__(self) -> int:
        return len(self.indices)

    def packed(self, indices: np.ndarray, side: int) -> EndToEnd:
        return self.examples.packed(self.indices[indices], side)


# Training


class Transduction:
    """Text to text, as `train.fit` wants a task: sequence transduction, in the paper's words."""

    unit = "tokens"
    written = "sentences"
    """What the examples are called."""
    signatures: Mapping[str, str] = MappingProxyType({})

    def __init__(
        self,
        model: Transformer,
        tokenizers: tuple[AnyTokenizer, AnyTokenizer],
        examples: Examples,
        held_out: Sequence[Pair],
        *,
        score: str,
        judge: Judge,
        settings: SearchSettings,
        training: TrainingConfig,
        about: About,
        judged: int | None = None,
        notes: Sequence[str] = (),
        r_drop: float = 0.0,
        bpe_dropout: float = 0.0,
    ):
        """`judged` is how many of those held out are written while training; by default all."""
        self.model, self.score, self.r_drop = model, score, r_drop
        self.tokenizers, self.examples, self.held_out = tokenizers, examples, list(held_out)
        self.judge, self.search, self.training = judge, settings, training
        count = len(held_out) if judged is None else min(judged, len(held_out))
        self.sample = Sample(count, len(held_out), self.written, "greedy search")
        self.notes = list(notes)
        """What the user should know of the data, one line each."""
        self._about = about
        self.bpe_dropout = bpe_dropout
        self._merges: list[Merges] = []
        if bpe_dropout:
            source, target = tokenizers
            first = Merges(source)
            self._merges = [first, first if target is source else Merges(target)]

    def plan(self, epoch: int) -> list[np.ndarray]:
        lengths = self.examples.lengths
        return list(plan(lengths, self.training.batch, self.training.seed, epoch))

    def capacity(self, batches: Iterable[np.ndarray]) -> Sizes:
        lengths = self.examples.lengths

        def size(indices: np.ndarray) -> Sizes:
            sides = (Side.of(side, 1) for side in lengths[indices].T)
            if self.bpe_dropout:
                sides = (Side(*(grown(n, self.bpe_dropout) for n in side)) for side in sides)
            return Sizes(len(indices), tuple(sides))

        return capacity(map(size, batches))

    def batch(self, indices: np.ndarray, step: int) -> Batch:
        sides = [self.examples.packed(indices, side) for side in (0, 1)]
        for side, merges in enumerate(self._merges):
            seeds = self.training.seed, step, side
            sides[side] = merges.split(
                sides[side], self.bpe_dropout, self.search.length, indices, *seeds
            )
        return self._packed(*sides)

    def _packed(self, source: EndToEnd, target: EndToEnd) -> Batch:
        start, end = self.search.start, self.search.end
        return packed_batch(source, target, start, end, source_end=end)

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        return transduction_loss(self.model, batch, self.training.smoothing, self.r_drop)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return self._scores(model, self.held_out[: self.sample.count])

    def evaluate_all(self, model: nn.Module) -> dict[str, float]:
        return self._scores(model, self.held_out)

    def _scores(self, model: nn.Module, held_out: Sequence[Pair]) -> dict[str, float]:
        """The judge's scores of greedy search, and the perplexity, both on held-out examples."""
        assert isinstance(model, Transformer)
        settings = replace(self.search, beams=1)
        translator = Translator(model, self.tokenizers, settings)
        # Without autocast, whose casts cannot be captured, the search is many times faster.
        with torch.autocast(model.output.weight.device.type, enabled=False):
            written = translator.translate([source for source, _ in held_out], batch=256)
        scores = self.judge(written, [target for _, target in held_out])
        return {**scores, "perplexity": self._perplexity(model, held_out)}

    @torch.no_grad()
    def _perplexity(self, model: Transformer, held_out: Sequence[Pair]) -> float:
        """e to the mean loss of a token, without smoothing."""
        pairs = Listed(held_out, *self.tokenizers)
        total, count = 0.0, 0
        for indices in plan(pairs.lengths, self.training.batch, 0, 0):
            batch = self._packed(pairs.packed(indices, 0), pairs.packed(indices, 1))
            loss, tokens = transduction_loss(model, batch.to(model.output.weight.device), 0.0)
            total, count = total + float(loss), count + int(tokens)
        return math.exp(min(total / count, 700.0))

    def files(self) -> dict[str, bytes | Path]:
        return dict(files(*self.tokenizers))

    def run_files(self) -> dict[str, bytes]:
        return {}

    def about(self) -> About:
        return {**self._about, **to_json(self.search)}


def transduction_loss(
    model: Transformer, batch: Batch, smoothing: float, r_drop: float = 0.0
) -> tuple[Tensor, Tensor]:
    """The loss of a batch, summed over its labels.

    With R-Drop (Liang et al. 2021) it is the mean of two passes, whose dropout differs, and half of
    `r_drop` times the divergence of what they predict.
    """
    states = _states(model, batch)
    loss = cross_entropy(states, model.output, batch.labels, smoothing)
    if not (r_drop and model.training):
        return loss, batch.tokens
    again = _states(model, batch)
    loss = 0.5 * (loss + cross_entropy(again, model.output, batch.labels, smoothing))
    apart = divergence(states, again, model.output, batch.labels)
    return loss + 0.5 * r_drop * apart, batch.tokens


def _states(model: Transformer, batch: Batch) -> Tensor:
    memory = model.encode(batch.source, batch.source_lengths)
    return model.states(batch.target, memory, batch.target_lengths, batch.source_lengths)


def build_transformer(
    shape: TransformerShape, tokenizers: tuple[AnyTokenizer, AnyTokenizer], seed: int
) -> Transformer:
    """A new model of this shape for these tokenizers; the seed decides its first weights."""
    source, target = tokenizers
    joint = source is target
    check_share(shape, joint)
    config = TransformerConfig(
        target.size, source=TextSource(vocabulary=None if joint else source.size), **asdict(shape)
    )
    with seeded(seed):
        return Transformer(config)


def check_share(shape: TransformerShape, joint: bool) -> None:
    """Source and target can have one embedding where they have one vocabulary."""
    if not joint and shape.share == "all":
        raise ValueError(
            "share (all) needs one vocabulary for source and target, but there are two tokenizers; "
            "choose --model.share target, which ties target embeddings and output, or none"
        )


def compose(texts: Sequence[str]) -> list[str]:
    """Texts in Unicode's composed form (NFC), which tokenizers write: é is then always equal."""
    return [unicodedata.normalize("NFC", text) for text in texts]


def describe_unwritable(tokenizer: AnyTokenizer, references: Sequence[str]) -> list[str]:
    """A note about the references that no output can equal, if there are any."""
    composed = compose(references)
    written = compose(tokenizer.decode_batch(tokenizer.encode_batch(composed)))
    places = [n for n, text in enumerate(composed) if written[n] != text]
    if not places:
        return []
    first = places[0]
    return [
        f"{len(places):,} of {len(references):,} references have what the tokenizer cannot write, "
        f"so no output can equal them: reference {first + 1:,} is {shown(composed[first])} and can "
        f"only be written {shown(written[first])}"
    ]


def exact(written: Sequence[str], wanted: Sequence[str]) -> dict[str, float]:
    """The share of texts that are right to the last character, in composed form (NFC)."""
    right = sum(map(str.__eq__, compose(written), compose(wanted)))
    return {"exact_match": right / max(1, len(wanted))}
