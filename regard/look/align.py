"""Word alignments from the cross-attention of one head.

    a_tw = Σ_{i in t} Σ_{j in w} A_ij        attention of target word t to source word w
    link(t) = argmax_w a_tw                  written w-t, the form of Moses and fast_align

Heads differ: some follow the words, others rest on EOS or on a neighbour. The model itself selects
the head, by leaving words out (Li et al. 2019): without word w in the source, the log p of target
word t falls by

    d_tw = log p(t | x) − log p(t | x without w)

The score of a head is Σ_t d_t,link(t) as a share of Σ_t max_w d_tw, which the best possible links
reach. This takes no human alignments and only a few sentences, and gives no credit to a head that
attends to punctuation.

Both the weights of the step that writes a token and those of the next step, which reads it, are
tried (the latter were better in Chen et al. 2020). The best layer and head differ from model to
model (the last layer but one in Garg et al. 2019), so none is assumed.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from regard.data.batch import text_batch
from regard.look.record import record
from regard.model.transformer import Transformer

Tokens: TypeAlias = Sequence[int]
Links: TypeAlias = list[tuple[int, int]]
"""Pairs of words, source and target, counted from 0."""

TRIED = 400
"""Number of sources with a word left out that suffices to compare heads."""
MAX_TOKENS = 32
"""Maximum number of tokens of an example, on each side, for comparing heads."""


@dataclass(frozen=True)
class Head:
    """A head of the cross-attention, and the step whose weights count."""

    layer: int
    head: int
    shift: int = 0
    """1 if a token's weights are those of the next step, which reads it."""

    def __str__(self) -> str:
        when = "after" if self.shift else "before"
        return f"head {self.head + 1} of layer {self.layer + 1}, {when} the word is written"


@dataclass(frozen=True)
class Example:
    """A source and its translation as tokens, and the word that each token belongs to."""

    source: Tokens
    target: Tokens
    source_words: Sequence[int]
    target_words: Sequence[int]


@dataclass(frozen=True)
class Found:
    """The head that aligns best, and the scores of all heads."""

    best: Head
    shares: Float[Tensor, "layers H 2"]
    """Score of each head and shift: the cost without linked words, as a share of the maximum."""
    words: int
    """Number of target words that were scored."""

    def __repr__(self) -> str:
        return f"Found({self.best}, shares {tuple(self.shares.shape)}, {self.words} words)"


def words(pieces: Sequence[str]) -> list[int]:
    """The index of the white-space separated word of each token; -1 for white space.

    Pieces are as tokenizers show them: ▁ is a space, <0xE2> a byte of a letter.
    """
    data, owners = bytearray(), []
    for token, piece in enumerate(pieces):
        for part in re.split(r"(<0x[0-9A-F]{2}>)", piece.replace("▁", " ")):
            byte = re.fullmatch(r"<0x([0-9A-F]{2})>", part)
            new = bytes([int(byte[1], 16)]) if byte else part.encode(errors="surrogateescape")
            data += new
            owners += [token] * len(new)
    indices, word, inside, at = [-1] * len(pieces), -1, False, 0
    for letter in data.decode(errors="surrogateescape"):
        size = len(letter.encode(errors="surrogateescape"))
        if letter.isspace():
            inside = False
        else:
            word += not inside
            inside = True
            for token in owners[at : at + size]:
                indices[token] = word
        at += size
    return indices


def links(
    weights: Float[Tensor, "L S"], source_words: Sequence[int], target_words: Sequence[int]
) -> Links:
    """Links each target word to the source word that it attends to most, without white space.

    Columns beyond the source's tokens, such as that of EOS, belong to no word.
    """
    if not any(word >= 0 for word in source_words):
        return []
    mass = _by_words(weights[: len(target_words), : len(source_words)], source_words, target_words)
    numbers = sorted({word for word in target_words if word >= 0})
    return sorted((int(mass[word].argmax()), word) for word in numbers)


@torch.inference_mode()
def cross(
    model: Transformer,
    pairs: Sequence[tuple[Tokens, Tokens]],
    start: int,
    end: int,
    layer: int | None = None,
) -> list[Float[Tensor, "layers H L S"]]:
    """The cross-attention weights of each pair, of all layers or of one.

    Row n belongs to the step that wrote token n, and the last row to the step that wrote EOS; the
    last column is the source's EOS. One forward pass over the target gives the same weights as
    decoding it step by step.
    """
    if not pairs:
        return []
    device = model.target.table.weight.device
    sources = [torch.tensor([*source, end]) for source, _ in pairs]
    targets = [torch.tensor([start, *target]) for _, target in pairs]
    pad = torch.nn.utils.rnn.pad_sequence
    lengths = torch.tensor([len(source) for source in sources])
    if model.memory_lengths(lengths) is not lengths:
        raise ValueError(
            "cross-attention cannot be shown over source tokens: a custom part changes the lengths"
        )
    name = "cross" if layer is None else f"decoder.blocks.{layer}.cross"
    with record(model, lambda module: module.endswith(name)) as records:
        memory = model.encode(pad(sources, True, end).to(device), lengths)
        model.states(pad(targets, True, end).to(device), memory, None, lengths)
    together = torch.stack([call.weights() for call in records.values()], 1).float().cpu()
    return [
        weights[:, :, : len(target), : len(source)].clone()
        for weights, source, target in zip(together, sources, targets)
    ]


def find(model: Transformer, examples: Sequence[Example], start: int, end: int) -> Found | None:
    """Chooses the head whose links have the highest score, on as many examples as needed.

    None if no example has two words, so that no head could be wrong.
    """
    enough: list[Example] = []
    tried = 0
    for example in map(_split_single_words, map(_truncate, examples)):
        units = max(example.source_words, default=-1) + 1
        if units > 1 and example.target and tried < TRIED:
            enough.append(example)
            tried += units
    reached: Tensor | None = None
    possible, count = 0.0, 0
    attended = cross(model, [(example.source, example.target) for example in enough], start, end)
    for example, weights in zip(enough, attended):
        units = max(example.source_words) + 1
        cost = _by_words(
            _costs(model, example, units, start, end).mT,
            range(units),
            example.target_words,
        )
        L, S = len(example.target), len(example.source)
        gained = []
        for shift in (0, 1):
            rows = weights[:, :, shift : L + shift, :S]
            mass = _by_words(rows, example.source_words, example.target_words)
            chosen = mass.argmax(-1, keepdim=True)
            gained.append(cost.expand(*mass.shape).gather(-1, chosen).sum((-1, -2)))
        gain = torch.stack(gained, -1)
        reached = gain if reached is None else reached + gain
        possible += float(cost.amax(-1).sum())
        count += len(cost)
    if reached is None or possible <= 0:
        return None
    _, heads, shifts = reached.shape
    place = int(reached.flatten().argmax())
    best = Head(place // (heads * shifts), place // shifts % heads, place % shifts)
    return Found(best, reached / possible, count)


def _truncate(example: Example) -> Example:
    """Truncates a long example, by the same share of source and target, with words counted from 0.
    Leaving out each of n words takes n copies, so a whole long text would take n²."""
    S, L = len(example.source), len(example.target)
    share = min(1.0, MAX_TOKENS / max(S, L, 1))
    source, target = math.ceil(share * S), math.ceil(share * L)
    words = example.source_words[:source]
    first = min((word for word in words if word >= 0), default=0)
    return Example(
        example.source[:source],
        example.target[:target],
        [max(-1, word - first) for word in words],
        example.target_words[:target],
    )


def _split_single_words(example: Example) -> Example:
    """Treats tokens as words if source or target is one word, which any head would link."""
    if min(max(words, default=-1) for words in (example.source_words, example.target_words)) > 0:
        return example
    return Example(
        example.source, example.target, range(len(example.source)), range(len(example.target))
    )


@torch.inference_mode()
def _costs(
    model: Transformer, example: Example, units: int, start: int, end: int
) -> Float[Tensor, "units L"]:
    """The fall of log p of each target token without each source word."""
    device = model.target.table.weight.device
    sources = [
        [token for token, word in zip(example.source, example.source_words) if word != out]
        for out in range(-2, units)
        if out != -1
    ]
    batch = text_batch([(source, example.target) for source in sources], start, end, source_end=end)
    batch = batch.to(device)
    logits = model(
        batch.source,
        batch.target,
        source_lengths=batch.source_lengths,
        target_lengths=batch.target_lengths,
    )
    logs = logits[0].float().log_softmax(-1).gather(1, batch.labels.view(-1, 1))
    whole, *without = logs.view(len(sources), -1)[:, :-1].cpu()
    return whole - torch.stack(without)


def _by_words(
    values: Float[Tensor, "... L S"], source_words: Sequence[int], target_words: Sequence[int]
) -> Float[Tensor, "... T W"]:
    """Sums values over the tokens of each word, on both sides."""
    values = values.to(torch.float64)
    for axis, numbers in ((-1, source_words), (-2, target_words)):
        places = torch.tensor(list(numbers)).long()
        real = places >= 0
        count = int(places.max()) + 1 if len(places) else 0
        shape = list(values.shape)
        shape[axis] = count
        values = values.new_zeros(shape).index_add(
            axis, places[real], values.index_select(axis, real.nonzero()[:, 0])
        )
    return values
