"""Word alignments from the cross-attention of one head.

    a_tw = Σ_{i in t} Σ_{j in w} A_ij        what target word t looks at in source word w
    link(t) = argmax_w a_tw                  written w-t, the form of Moses and fast_align

Heads differ: some follow the words, others rest on EOS or on a neighbour. Which one to
trust is asked of the model itself, by leaving out (Li et al. 2019): with word w taken out of the
source, the log p of target word t falls by

    d_tw = log p(t | x) − log p(t | x without w)

A head aligns as well as the words that it links are needed: Σ_t d_t,link(t), as a share of
Σ_t max_w d_tw, which the best links there are would reach. No alignment made by a person is wanted,
a few sentences are enough, and a head that looks at punctuation gets nothing for it.

Weights are read at the step that writes a token or at the next one, which has read it (Chen et al.
2020, found better there); both are tried. Position and number of the best head differ from model
to model (Garg et al. 2019 found the last layer but one), so none is assumed.
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
"""Sources with a word left out that are enough to tell heads apart."""
MAX_TOKENS = 32
"""Tokens of an example, on each side, by which heads are told apart; the rest is cut off."""


@dataclass(frozen=True)
class Head:
    """A head of the cross-attention, and when to look at it."""

    layer: int
    head: int
    shift: int = 0
    """1 where a token's weights are those of the step after it, which has read it."""

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
    """The head that aligns best, and how well all of them do."""

    best: Head
    shares: Float[Tensor, "layers H 2"]
    """Of what leaving words out can cost, what the words linked by each head and shift cost."""
    words: int
    """Target words that were asked about."""


def words(pieces: Sequence[str]) -> list[int]:
    """The number of the white-space separated word of each token; -1 where it is white space.

    Pieces are as tokenizers show them: ▁ is a space, <0xE2> a byte of a letter.
    """
    data, owners = bytearray(), []
    for token, piece in enumerate(pieces):
        for part in re.split(r"(<0x[0-9A-F]{2}>)", piece.replace("▁", " ")):
            byte = re.fullmatch(r"<0x([0-9A-F]{2})>", part)
            new = bytes([int(byte[1], 16)]) if byte else part.encode(errors="surrogateescape")
            data += new
            owners += [token] * len(new)
    found, word, inside, at = [-1] * len(pieces), -1, False, 0
    for letter in data.decode(errors="surrogateescape"):
        size = len(letter.encode(errors="surrogateescape"))
        if letter.isspace():
            inside = False
        else:
            word += not inside
            inside = True
            for token in owners[at : at + size]:
                found[token] = word
        at += size
    return found


def links(
    weights: Float[Tensor, "L S"], source_words: Sequence[int], target_words: Sequence[int]
) -> Links:
    """Each target word with the source word that it looks at most; white space is left out.

    Columns beyond the source's tokens, such as EOS's, count for no word.
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
    """The cross-attention of each pair, all layers or one, as it was while the target was written.

    Row n is of the step that wrote token n, the last one of the step that wrote EOS; the
    last column is the source's EOS. The model is given the target all at once, which makes the
    same weights as the search made one by one.
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
    with record(model, lambda module: module.endswith(name)) as seen:
        memory = model.encode(pad(sources, True, end).to(device), lengths)
        model.states(pad(targets, True, end).to(device), memory, None, lengths)
    together = torch.stack([asked.weights() for asked in seen.values()], 1).float().cpu()
    return [
        one[:, :, : len(target), : len(source)].clone()
        for one, source, target in zip(together, sources, targets)
    ]


def find(model: Transformer, examples: Sequence[Example], start: int, end: int) -> Found | None:
    """The head whose links are the most needed, over as many examples as it takes.

    None where no example has two words, so that no head could be wrong.
    """
    enough: list[Example] = []
    tried = 0
    for example in map(_divided, map(_shortened, examples)):
        units = max(example.source_words, default=-1) + 1
        if units > 1 and example.target and tried < TRIED:
            enough.append(example)
            tried += units
    reached: Tensor | None = None
    possible, asked = 0.0, 0
    attended = cross(model, [(one.source, one.target) for one in enough], start, end)
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
        asked += len(cost)
    if reached is None or possible <= 0:
        return None
    _, heads, shifts = reached.shape
    place = int(reached.flatten().argmax())
    best = Head(place // (heads * shifts), place // shifts % heads, place % shifts)
    return Found(best, reached / possible, asked)


def _shortened(example: Example) -> Example:
    """The beginning of a long example, with the same share of source and target, and with words
    counted from 0. Leaving out each of n words takes n copies, so all of a long text takes n²."""
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


def _divided(example: Example) -> Example:
    """Where source or target is one word, tokens are asked about: any head would link the word."""
    if min(max(words, default=-1) for words in (example.source_words, example.target_words)) > 0:
        return example
    return Example(
        example.source, example.target, range(len(example.source)), range(len(example.target))
    )


@torch.inference_mode()
def _costs(
    model: Transformer, example: Example, units: int, start: int, end: int
) -> Float[Tensor, "units L"]:
    """By how much the log p of each target token falls without each of the source's words."""
    device = model.target.table.weight.device
    kept = [
        [token for token, word in zip(example.source, example.source_words) if word != out]
        for out in range(-2, units)
        if out != -1
    ]
    batch = text_batch([(one, example.target) for one in kept], start, end, source_end=end)
    batch = batch.to(device)
    logits = model(
        batch.source,
        batch.target,
        source_lengths=batch.source_lengths,
        target_lengths=batch.target_lengths,
    )
    logs = logits[0].float().log_softmax(-1).gather(1, batch.labels.view(-1, 1))
    whole, *without = logs.view(len(kept), -1)[:, :-1].cpu()
    return whole - torch.stack(without)


def _by_words(
    values: Float[Tensor, "... L S"], source_words: Sequence[int], target_words: Sequence[int]
) -> Float[Tensor, "... T W"]:
    """Summed over the tokens of each word, on both sides."""
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
