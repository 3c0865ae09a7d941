"""Batches without padding: which examples make a step, and their tensors.

    plan(lengths, budget, seed, epoch)      the epoch's global batches, by (seed, epoch) alone
    share(batch, rank, world, accumulate)   what one process takes of one of them
    text_batch(pairs, start, end)           its tensors: source, start + y, y + end

A batch holds about as many tokens as the budget says (dynamic batching). Examples of similar
length are bucketed together: attention over short sequences costs little.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, TypeAlias, TypeVar, cast, get_args

import numpy as np
import torch
from jaxtyping import Int, Int64, Integer, UInt8
from torch import Tensor

from regard.attention.packed import Packed
from regard.seeding import rng

Indices: TypeAlias = Int64[np.ndarray, "_"]
Over: TypeAlias = Literal["alone", "refuse"]


def plan(
    lengths: Integer[np.ndarray, "n"] | Integer[np.ndarray, "n sides"],
    budget: int,
    seed: int,
    epoch: int,
    *,
    bucket: int = 100,
    over: Over = "alone",
) -> list[Indices]:
    """Which examples make global batch 0, 1, 2, … of this epoch: each exactly once.

    A batch's tokens, all sides together, are `budget` at most; an example longer than that has a
    batch of its own, or is refused. Examples are shuffled, sorted by length within pools of about
    `bucket` batches, cut into batches, and the batches shuffled: `bucket=1` ignores lengths. Images
    have length 1, and their budget is the number of images.
    """
    if over not in get_args(Over):
        raise ValueError(f"over ({over!r}) must be {' or '.join(get_args(Over))}")
    for name, value in (("budget", budget), ("bucket", bucket)):
        if value < 1:
            raise ValueError(f"{name} ({value}) must be 1 or more")
    if not len(lengths):
        raise ValueError("there are no examples to make batches of")
    tokens = lengths if lengths.ndim == 1 else lengths.sum(1, dtype=lengths.dtype)
    longest = int(tokens.argmax())
    if over == "refuse" and tokens[longest] > budget:
        raise ValueError(
            f"example {longest} has more tokens ({tokens[longest]}) than a batch may "
            f"(budget {budget}); raise the budget, or leave it out: Rules(longest=…)"
        )
    chance = rng(seed, epoch)
    order = chance.permutation(len(tokens))
    pool = max(1, int(bucket * budget / max(1.0, float(tokens.mean()))))
    for n, begin in enumerate(range(0, len(order), pool)):
        part = order[begin : begin + pool]
        part = part[np.argsort(tokens[part], kind="stable")]
        # Ascending and descending in turn, so that lengths are similar across two pools too.
        order[begin : begin + pool] = part[::-1] if n % 2 else part
    batches = np.split(order, _cuts(tokens[order], budget))
    return [batches[i] for i in chance.permutation(len(batches))]


def _cuts(tokens: Integer[np.ndarray, "n"], budget: int) -> list[int]:
    """Where the second batch and later ones begin, filled greedily."""
    ends = np.cumsum(tokens, dtype=np.int64)
    cuts = [0]
    while cuts[-1] < len(ends):
        begin = cuts[-1]
        before = int(ends[begin - 1]) if begin else 0
        cuts.append(max(begin + 1, int(np.searchsorted(ends, before + budget, side="right"))))
    return cuts[1:-1]


def share(indices: Indices, rank: int, world: int, accumulate: int = 1) -> list[Indices]:
    """The micro-batches that one process of `world` takes of a global batch, `accumulate` of them.

    Over all processes they are the batch, whatever their number. Neighbours, which are of similar
    length, go to different processes, so that all have about as much to do. Where examples are
    few, some micro-batches are empty.
    """
    if not 0 <= rank < world:
        raise ValueError(f"rank ({rank}) must be at least 0 and below world ({world})")
    if accumulate < 1:
        raise ValueError(f"accumulate ({accumulate}) must be 1 or more")
    parts = world * accumulate
    return [indices[part::parts] for part in range(rank, parts, world)]


def windows(lengths: Integer[np.ndarray, "n"], most: int) -> Int64[np.ndarray, "m 3"]:
    """Documents cut into pieces of at most `most` predictions: (document, first, how many).

    A document of n tokens has n + 1 predictions, the last one its end; each is in one window.
    """
    if most < 1:
        raise ValueError(f"most ({most}) must be 1 or more; try the model's length")
    predictions = lengths.astype(np.int64) + 1
    counts = -(-predictions // most)
    document = np.repeat(np.arange(len(predictions)), counts)
    first = (np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)) * most
    return np.stack([document, first, np.minimum(most, predictions[document] - first)], 1)


# Tensors

T = TypeVar("T", bound="Tensors")


class Tensors:
    """Tensors that go to a device together."""

    def to(self: T, device: torch.device | str) -> T:
        """The same on a device; copied from pinned memory without waiting."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=True), device)

    def pin(self: T) -> T:
        """The same in pinned memory where there is a CUDA device."""
        if not torch.cuda.is_available():
            return self
        return self._each(lambda tensor: tensor.pin_memory(), "cpu")

    def _each(self: T, move: Callable[[Tensor], Tensor], device: torch.device | str) -> T:
        moved: dict[str, Any] = {}
        for field in fields(cast(Any, self)):
            value = getattr(self, field.name)
            if isinstance(value, Tensor):
                moved[field.name] = move(value)
            elif isinstance(value, Packed):
                moved[field.name] = value.to(device)
        return cast(T, replace(cast(Any, self), **moved))


@dataclass(frozen=True)
class Batch(Tensors):
    """Sources and targets for a Transformer: `model(source, target, source_lengths=…, …)`."""

    source: Int[Tensor, "1 S"] | UInt8[Tensor, "B C Y X"]
    """Ids end to end, or images."""
    source_lengths: Packed | None
    """None for images."""
    target: Int[Tensor, "1 L"]
    """The decoder's input: the start token, and the target."""
    target_lengths: Packed
    labels: Int[Tensor, "1 L"]
    """The decoder's labels: the target, and the end token."""
    tokens: int
    """Number of labels in the loss."""

    def __len__(self) -> int:
        return len(self.target_lengths)


@dataclass(frozen=True)
class LanguageBatch(Tensors):
    """Text for a language model: `model(inputs, lengths=lengths)`."""

    inputs: Int[Tensor, "1 L"]
    lengths: Packed
    labels: Int[Tensor, "1 L"]
    tokens: int
    """Number of labels in the loss."""

    def __len__(self) -> int:
        return len(self.lengths)


@dataclass(frozen=True)
class LabelBatch(Tensors):
    """Images, or texts end to end, and the number of each one's class."""

    inputs: UInt8[Tensor, "B C Y X"] | Int[Tensor, "1 S"]
    lengths: Packed | None
    """None for images."""
    labels: Int[Tensor, "B"]
    tokens: int
    """Number of labels in the loss."""

    def __len__(self) -> int:
        return len(self.labels)


Ids: TypeAlias = Integer[np.ndarray, "_"] | Sequence[int]


def text_batch(
    pairs: Sequence[tuple[Ids, Ids]], start: int, end: int, *, source_end: int | None = None
) -> Batch:
    """Pairs of token ids as one packed batch; `source_end` closes sources, as Marian's are."""
    source, source_lengths = _packed([source for source, _ in pairs], after=source_end)
    return _with_targets(source, source_lengths, [target for _, target in pairs], start, end)


def image_text_batch(
    images: UInt8[Tensor, "B C Y X"], targets: Sequence[Ids], start: int, end: int
) -> Batch:
    """Images and the texts to be read from them."""
    if len(images) != len(targets):
        raise ValueError(f"images ({len(images)}) and texts ({len(targets)}) must be as many")
    return _with_targets(images, None, targets, start, end)


def _with_targets(
    source: Tensor, lengths: Packed | None, targets: Sequence[Ids], start: int, end: int
) -> Batch:
    target, target_lengths = _packed(targets, before=start)
    labels, _ = _packed(targets, after=end)
    return Batch(source, lengths, target, target_lengths, labels, labels.numel())


def language_batch(
    documents: Callable[[int], Ids],
    windows: Integer[np.ndarray, "B 3"],
    start: int,
    end: int,
) -> LanguageBatch:
    """Windows of documents: `documents(i)` gives the tokens of one, as `Store.tokens` does."""
    inputs, labels = [], []
    for document, first, count in windows.tolist():
        last = first + count
        # The whole of it is start, tokens, end; a window's labels are one ahead of its inputs.
        tokens = np.asarray(documents(document), np.int64)
        whole = np.concatenate([[start], tokens[max(0, first - 1) : last], [end]])
        begin = 0 if first == 0 else 1
        inputs.append(whole[begin : begin + count])
        labels.append(whole[begin + 1 : begin + count + 1])
    packed, lengths = _packed(inputs)
    return LanguageBatch(packed, lengths, _packed(labels)[0], packed.numel())


def label_batch(
    texts: Sequence[Ids], labels: Integer[np.ndarray, "B"] | Sequence[int]
) -> LabelBatch:
    """Texts and the number of each one's class."""
    if len(texts) != len(labels):
        raise ValueError(f"texts ({len(texts)}) and labels ({len(labels)}) must be as many")
    inputs, lengths = _packed(texts)
    return LabelBatch(inputs, lengths, _classes(labels), len(texts))


def image_batch(
    images: UInt8[Tensor, "B C Y X"], labels: Integer[np.ndarray, "B"] | Sequence[int]
) -> LabelBatch:
    """Images and the number of each one's class."""
    if len(images) != len(labels):
        raise ValueError(f"images ({len(images)}) and labels ({len(labels)}) must be as many")
    return LabelBatch(images, None, _classes(labels), len(images))


def _classes(labels: Any) -> Tensor:
    return torch.from_numpy(np.array(labels, np.int64))


def _packed(
    texts: Sequence[Ids], before: int | None = None, after: int | None = None
) -> tuple[Tensor, Packed]:
    """All texts end to end, (1, T), each with a special before or after it."""
    extra = (before is not None) + (after is not None)
    lengths = np.fromiter((len(text) + extra for text in texts), np.int64, len(texts))
    ids = np.empty(int(lengths.sum()), np.int64)
    begin = 0
    for text, length in zip(texts, lengths.tolist()):
        stop = begin + length
        if before is not None:
            ids[begin] = before
        if after is not None:
            ids[stop - 1] = after
        ids[begin + (before is not None) : stop - (after is not None)] = text
        begin = stop
    return torch.from_numpy(ids)[None], Packed(torch.from_numpy(lengths))
