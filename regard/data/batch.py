"""Batches without padding: which examples make a step, and their tensors.

    plan(lengths, budget, seed, epoch)      the epoch's global batches, by (seed, epoch) alone
    share(batch, rank, world, accumulate)   what one process takes of one of them
    text_batch(pairs, start, end)           its tensors: source, start + y, y + end
    batch.fill(capacity)                    the same in tensors of a fixed size

A batch holds about as many tokens as the budget says (dynamic batching). Examples of similar
length are bucketed together: attention over short sequences costs little. A captured step wants
tensors that never change their size: the rest of them is filled up, and counts nothing.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, TypeVar, cast, get_args

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, Int64, Integer, UInt8
from torch import Tensor

from regard.attention.packed import PackedLengths
from regard.data.seeding import rng

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


# Sizes

SLACK, ROUND = 1.02, 64
"""A capacity is that much larger than the batches it was measured on, and divisible."""


class Side(NamedTuple):
    """Tokens of one side of a batch: in all, and of the longest sequence."""

    tokens: int
    longest: int

    @classmethod
    def of(cls, lengths: Integer[np.ndarray, "n"], extra: int = 0) -> "Side":
        """Of these sequences, each with `extra` special tokens."""
        if not len(lengths):
            return cls(0, 0)
        return cls(int(lengths.sum()) + extra * len(lengths), int(lengths.max()) + extra)


class Sizes(NamedTuple):
    """How large a batch is, or how large batches may be (a capacity)."""

    sequences: int
    sides: tuple[Side, ...]
    """Source and target, or the one side there is; none for images."""

    @property
    def even(self) -> bool:
        """Whether every sequence has room for the longest: rows of one tensor."""
        full = [self.sequences * side.longest == side.tokens for side in self.sides]
        return bool(full) and all(full)


def capacity(batches: Iterable[Sizes], *, images: bool = False) -> Sizes:
    """What holds each of these batches, and most that are like them.

    What fills a side up is cut into sequences like the others. Where each sequence has an image,
    which costs more than tokens do, it is one sequence.
    """
    counts, sides = zip(*batches)
    held = [(max(s.tokens for s in one), max(s.longest for s in one)) for one in zip(*sides)]
    if images:
        whole = tuple(Side(_rounded(tokens), _rounded(tokens)) for tokens, _ in held)
        return Sizes(max(counts) + 2 * len(whole), whole)
    rounded = tuple(Side(_rounded(tokens), max(1, longest)) for tokens, longest in held)
    filling = max(side.tokens // side.longest + 1 for side in rounded)
    return Sizes(int(max(counts) * SLACK) + filling, rounded)


def rows(batches: Sequence[Sizes]) -> Sizes | None:
    """The same as one row for each sequence; None where much more than a packed batch would be
    filled up."""
    count = max(batch.sequences for batch in batches)
    sides = [Side(*map(max, zip(*side))) for side in zip(*(batch.sides for batch in batches))]
    held = Sizes(count, tuple(Side(count * longest, longest) for _, longest in sides))
    spare = all(one.tokens <= SLACK * side.tokens for one, side in zip(held.sides, sides))
    return held if spare else None


def _rounded(size: int) -> int:
    return -(-int(size * SLACK) // ROUND) * ROUND


# Tensors

T = TypeVar("T", bound="Tensors")

IGNORED = -100
"""The label of what only fills a batch up: no loss counts it."""


class Tensors:
    """Tensors that go to a device together."""

    def fill(self: T, size: Sizes) -> T | None:
        """The same batch in tensors of a fixed size; None where it does not fit."""
        return self

    def copy(self: T) -> T:
        """The same in tensors of its own."""
        return self._each(Tensor.clone, PackedLengths.copy)

    def to(self: T, device: torch.device | str) -> T:
        """The same on a device; copied from pinned memory without waiting."""
        return self._each(
            lambda tensor: tensor.to(device, non_blocking=True), lambda packed: packed.to(device)
        )

    def pin(self: T) -> T:
        """The same in pinned memory where there is a CUDA device."""
        if not torch.cuda.is_available():
            return self
        return self._each(Tensor.pin_memory, PackedLengths.pin)

    def _each(
        self: T, move: Callable[[Tensor], Tensor], pack: Callable[[PackedLengths], PackedLengths]
    ) -> T:
        moved: dict[str, Any] = {}
        for field in fields(cast(Any, self)):
            value = getattr(self, field.name)
            if isinstance(value, Tensor):
                moved[field.name] = move(value)
            elif isinstance(value, PackedLengths):
                moved[field.name] = pack(value)
        return cast(T, replace(cast(Any, self), **moved))

    def tensors(self) -> list[Tensor]:
        """All tensors, in their order; of packed lengths their offsets."""
        values = [getattr(self, field.name) for field in fields(cast(Any, self))]
        values = [value.offsets if isinstance(value, PackedLengths) else value for value in values]
        return [value for value in values if isinstance(value, Tensor)]


@dataclass(frozen=True)
class Batch(Tensors):
    """Sources and targets for a Transformer: `model(source, target, source_lengths=…, …)`."""

    source: Int[Tensor, "1 S"] | UInt8[Tensor, "B C Y X"] | Float[Tensor, "B C Y X"]
    """Ids end to end, or images: pixels, or as the model wants them."""
    source_lengths: PackedLengths | None
    """None for images."""
    target: Int[Tensor, "1 L"]
    """The decoder's input: the start token, and the target."""
    target_lengths: PackedLengths
    labels: Int[Tensor, "1 L"]
    """The decoder's labels: the target, and the end token."""
    tokens: Int[Tensor, ""]
    """Number of labels in the loss."""

    def __len__(self) -> int:
        return len(self.target_lengths)

    def fill(self, size: Sizes) -> "Batch | None":
        lengths = self.source_lengths
        sides = [self.target_lengths] if lengths is None else [lengths, self.target_lengths]
        if _full(size, *sides):
            return self
        if not _fit(size, *sides):
            return None
        if lengths is None:
            source, lengths = _rows(self.source, size.sequences, 0), None
        else:
            source, lengths = _filled(self.source, lengths, size, 0)
        return Batch(
            source,
            lengths,
            *_filled(self.target, self.target_lengths, size, -1),
            _extended(self.labels, size.sides[-1].tokens, IGNORED),
            self.tokens,
        )


@dataclass(frozen=True)
class LanguageBatch(Tensors):
    """Text for a language model: `model(inputs, lengths=lengths)`."""

    inputs: Int[Tensor, "B L"]
    lengths: PackedLengths | None
    """None where each row is a window: what fills up its end is behind all that counts."""
    labels: Int[Tensor, "B L"]
    tokens: Int[Tensor, ""]
    """Number of labels in the loss."""

    def __len__(self) -> int:
        return len(self.inputs if self.lengths is None else self.lengths)

    def fill(self, size: Sizes) -> "LanguageBatch | None":
        if self.lengths is None:
            return self
        if size.even:
            return self._in_rows(self.lengths, size.sequences, size.sides[0].longest)
        if _full(size, self.lengths):
            return self
        if not _fit(size, self.lengths):
            return None
        return LanguageBatch(
            *_filled(self.inputs, self.lengths, size, 0),
            _extended(self.labels, size.sides[0].tokens, IGNORED),
            self.tokens,
        )

    def _in_rows(self, lengths: PackedLengths, count: int, longest: int) -> "LanguageBatch | None":
        if len(lengths) > count or lengths.longest > longest:
            return None
        each = lengths.lengths
        row = torch.repeat_interleave(each)
        column = torch.arange(lengths.total) - (each.cumsum(0) - each)[row]
        shape = (count, longest)
        inputs, labels = self.inputs.new_zeros(shape), self.labels.new_full(shape, IGNORED)
        inputs[row, column], labels[row, column] = self.inputs[0], self.labels[0]
        return LanguageBatch(inputs, None, labels, self.tokens)


@dataclass(frozen=True)
class MaskedBatch(Tensors):
    """Text in which some tokens are hidden: `model.features(inputs, lengths=lengths)`."""

    inputs: Int[Tensor, "1 S"]
    lengths: PackedLengths
    hidden: Int[Tensor, "M"]
    """Places of the hidden tokens among the inputs."""
    labels: Int[Tensor, "M"]
    """What they were."""
    tokens: Int[Tensor, ""]
    """Number of labels in the loss."""

    def __len__(self) -> int:
        return len(self.lengths)

    def fill(self, size: Sizes) -> "MaskedBatch | None":
        text, hidden = Sizes(size.sequences, size.sides[:1]), size.sides[1].tokens
        if _full(text, self.lengths) and len(self.labels) == hidden:
            return self
        if not _fit(text, self.lengths) or len(self.labels) > hidden:
            return None
        return MaskedBatch(
            *_filled(self.inputs, self.lengths, text, 0),
            _rows(self.hidden, hidden, 0),
            _rows(self.labels, hidden, IGNORED),
            self.tokens,
        )


@dataclass(frozen=True)
class LabelBatch(Tensors):
    """Images, or texts end to end, and the number of each one's class."""

    inputs: UInt8[Tensor, "B C Y X"] | Int[Tensor, "1 S"]
    lengths: PackedLengths | None
    """None for images."""
    labels: Int[Tensor, "B"]
    tokens: Int[Tensor, ""]
    """Number of labels in the loss."""

    def __len__(self) -> int:
        return len(self.labels)

    def fill(self, size: Sizes) -> "LabelBatch | None":
        if self.lengths is None:
            return self  # images are filled up when they are augmented and mixed
        if _full(size, self.lengths):
            return self
        if not _fit(size, self.lengths):
            return None
        return LabelBatch(
            *_filled(self.inputs, self.lengths, size, 0),
            _rows(self.labels, size.sequences, IGNORED),
            self.tokens,
        )


@dataclass(frozen=True)
class MixedBatch(Tensors):
    """Augmented images, each with two classes: `weight` is the share of the first."""

    inputs: Float[Tensor, "B C Y X"]
    labels: Int[Tensor, "B"]
    others: Int[Tensor, "B"]
    weight: Float[Tensor, "B"]
    tokens: Int[Tensor, ""]
    """Number of labels in the loss."""

    def fill(self, size: Sizes) -> "MixedBatch | None":
        B = size.sequences
        if len(self.labels) == B:
            return self
        return MixedBatch(
            _rows(self.inputs, B, 0),
            _rows(self.labels, B, IGNORED),
            _rows(self.others, B, IGNORED),
            _rows(self.weight, B, 1),
            self.tokens,
        )


def _full(size: Sizes, *sides: PackedLengths) -> bool:
    """Whether these sequences fill a capacity already."""
    return len(sides[0]) == size.sequences and all(
        given.total == side.tokens for given, side in zip(sides, size.sides, strict=True)
    )


def _fit(size: Sizes, *sides: PackedLengths) -> bool:
    """Whether these sequences, and what fills them up, are within a capacity."""
    within = [
        given.total <= side.tokens and given.longest <= side.longest
        for given, side in zip(sides, size.sides, strict=True)
    ]
    pieces = [
        (side.tokens - given.total) // max(1, side.longest) + 1
        for given, side in zip(sides, size.sides)
    ]
    return all(within) and len(sides[0]) + max(pieces) <= size.sequences


def _filled(
    ids: Tensor, lengths: PackedLengths, size: Sizes, side: int
) -> tuple[Tensor, PackedLengths]:
    tokens, longest = size.sides[side]
    return _extended(ids, tokens, 0), lengths.filled(tokens, size.sequences, longest)


def _extended(ids: Tensor, length: int, value: int) -> Tensor:
    return F.pad(ids, (0, length - ids.shape[1]), value=value)


def _rows(rows: Tensor, count: int, value: int) -> Tensor:
    return F.pad(rows, (0, 0) * (rows.ndim - 1) + (0, count - len(rows)), value=value)


Ids: TypeAlias = Integer[np.ndarray, "_"] | Sequence[int]


class EndToEnd(NamedTuple):
    """Token ids of several texts, one after the other, and how many each has."""

    ids: Integer[np.ndarray, "T"]
    lengths: Integer[np.ndarray, "n"]

    @classmethod
    def of(cls, texts: Sequence[Ids]) -> "EndToEnd":
        lengths = np.fromiter(map(len, texts), np.int64, len(texts))
        ids = [np.asarray(text, np.int64) for text in texts]
        return cls(np.concatenate(ids) if ids else np.empty(0, np.int64), lengths)


def gathered(
    tokens: Integer[np.ndarray, "T"], offsets: Integer[np.ndarray, "m"], indices: Indices
) -> EndToEnd:
    """Some of many texts that lie end to end, each from its offset to the next one."""
    begins = offsets[indices]
    lengths = offsets[indices + 1] - begins
    moved = begins - (np.cumsum(lengths) - lengths)
    return EndToEnd(tokens[np.arange(lengths.sum()) + np.repeat(moved, lengths)], lengths)


def text_batch(
    pairs: Sequence[tuple[Ids, Ids]], start: int, end: int, *, source_end: int | None = None
) -> Batch:
    """Pairs of token ids as one packed batch; `source_end` closes sources, as Marian's are."""
    source, target = (EndToEnd.of([pair[side] for pair in pairs]) for side in (0, 1))
    return packed_batch(source, target, start, end, source_end=source_end)


def text_source(texts: Sequence[Ids], end: int) -> tuple[Int[Tensor, "1 T"], PackedLengths]:
    """Sources alone, closed by EOS, for whoever will write the targets."""
    return _packed(EndToEnd.of(texts), after=end)


def packed_batch(
    source: EndToEnd, target: EndToEnd, start: int, end: int, *, source_end: int | None = None
) -> Batch:
    """The same from texts that lie end to end already."""
    return _with_targets(*_packed(source, after=source_end), target, start, end)


def image_text_batch(
    images: UInt8[Tensor, "B C Y X"], targets: Sequence[Ids], start: int, end: int
) -> Batch:
    """Images and the texts to be read from them."""
    if len(images) != len(targets):
        raise ValueError(f"images ({len(images)}) and texts ({len(targets)}) must be as many")
    return _with_targets(images, None, EndToEnd.of(targets), start, end)


def _with_targets(
    source: Tensor, lengths: PackedLengths | None, targets: EndToEnd, start: int, end: int
) -> Batch:
    target, target_lengths = _packed(targets, before=start)
    labels, _ = _packed(targets, after=end)
    return Batch(source, lengths, target, target_lengths, labels, torch.tensor(labels.numel()))


class Sliced(Protocol):
    """Tokens of which a slice is asked for; the whole may be as long as a file."""

    def __getitem__(self, part: slice, /) -> Ids: ...


def language_batch(
    documents: Callable[[int], Sliced],
    windows: Integer[np.ndarray, "B 3"],
    start: int,
    end: int,
) -> LanguageBatch:
    """Windows of documents: `documents(i)` gives the tokens of one, as `Store.tokens` does."""
    inputs, labels = [], []
    for document, first, count in windows.tolist():
        last = first + count
        # The whole of it is start, tokens, end; a window's labels are one ahead of its inputs.
        tokens = np.asarray(documents(document)[max(0, first - 1) : last], np.int64)
        whole = np.concatenate([[start], tokens, [end]])
        begin = 0 if first == 0 else 1
        inputs.append(whole[begin : begin + count])
        labels.append(whole[begin + 1 : begin + count + 1])
    packed, lengths = _packed(EndToEnd.of(inputs))
    return LanguageBatch(
        packed, lengths, _packed(EndToEnd.of(labels))[0], torch.tensor(packed.numel())
    )


class Hiding(NamedTuple):
    """How tokens are hidden (Devlin et al. 2019, section 3.1).

    Of those chosen most are replaced by `mask`; one in ten by any token, and one in ten stays, so
    that the model has a use for what it sees.
    """

    share: float
    """Of a text's tokens that are chosen; at least one is."""
    mask: int
    """The token that stands for a hidden one."""
    others: Int64[np.ndarray, "_"]
    """Tokens that may stand in their place: all but special ones."""

    def counts(self, tokens: Integer[np.ndarray, "n"]) -> Int64[np.ndarray, "n"]:
        """How many are chosen of texts of so many tokens."""
        some = np.rint(self.share * tokens).astype(np.int64)
        return np.minimum(tokens, np.maximum(1, some))

    def hide(
        self, tokens: Int64[np.ndarray, "n"], chance: np.random.Generator
    ) -> tuple[Int64[np.ndarray, "n"], Int64[np.ndarray, "k"]]:
        """The text with some of its tokens hidden, and which these are."""
        count = int(self.counts(np.array([len(tokens)]))[0])
        chosen = np.sort(chance.permutation(len(tokens))[:count])
        kind = chance.random(count)
        other = self.others[chance.integers(len(self.others), size=count)]
        seen = tokens.copy()
        seen[chosen] = np.where(kind < 0.8, self.mask, np.where(kind < 0.9, other, tokens[chosen]))
        return seen, chosen


def masked_batch(
    documents: Callable[[int], Sliced],
    windows: Integer[np.ndarray, "B 3"],
    end: int,
    hiding: Hiding,
    chances: Iterable[np.random.Generator],
) -> MaskedBatch:
    """Windows of documents with some tokens hidden, each by its own random numbers.

    The end that follows a document's last token is never hidden.
    """
    inputs, places, labels, begin = list[Ids](), list[np.ndarray](), list[np.ndarray](), 0
    for (document, first, count), chance in zip(windows.tolist(), chances):
        tokens = np.asarray(documents(document)[first : first + count], np.int64)
        seen, chosen = hiding.hide(tokens, chance)
        inputs.append(np.concatenate([seen, [end]]) if len(tokens) < count else seen)
        places.append(chosen + begin)
        labels.append(tokens[chosen])
        begin += count
    packed, lengths = _packed(EndToEnd.of(inputs))
    hidden, wanted = (torch.from_numpy(np.concatenate(each)) for each in (places, labels))
    return MaskedBatch(packed, lengths, hidden, wanted, torch.tensor(len(wanted)))


def label_batch(
    texts: Sequence[Ids], labels: Integer[np.ndarray, "B"] | Sequence[int]
) -> LabelBatch:
    """Texts and the number of each one's class."""
    if len(texts) != len(labels):
        raise ValueError(f"texts ({len(texts)}) and labels ({len(labels)}) must be as many")
    inputs, lengths = _packed(EndToEnd.of(texts))
    return LabelBatch(inputs, lengths, _classes(labels), torch.tensor(len(texts)))


def image_batch(
    images: UInt8[Tensor, "B C Y X"], labels: Integer[np.ndarray, "B"] | Sequence[int]
) -> LabelBatch:
    """Images and the number of each one's class."""
    if len(images) != len(labels):
        raise ValueError(f"images ({len(images)}) and labels ({len(labels)}) must be as many")
    return LabelBatch(images, None, _classes(labels), torch.tensor(len(images)))


def _classes(labels: Any) -> Tensor:
    return torch.from_numpy(np.array(labels, np.int64))


def _packed(
    texts: EndToEnd, before: int | None = None, after: int | None = None
) -> tuple[Tensor, PackedLengths]:
    """All texts end to end, (1, T), each with a special token before or after it."""
    ids, lengths = texts
    extra = (before is not None) + (after is not None)
    ends = np.cumsum(lengths + extra)
    whole = np.empty(len(ids) + extra * len(lengths), np.int64)
    # Each text is moved by the specials before it.
    moved = np.arange(len(lengths)) * extra + (before is not None)
    whole[np.arange(len(ids)) + np.repeat(moved, lengths)] = ids
    if before is not None:
        whole[ends - lengths - extra] = before
    if after is not None:
        whole[ends - 1] = after
    return torch.from_numpy(whole)[None], PackedLengths(torch.from_numpy(lengths + extra))
