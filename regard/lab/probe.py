"""Small questions put to small models, to see what a part is good for.

    order      does A come before B?            the same tokens, another order, another answer
    bag        are there more A than B?         the order does not matter
    winner     who plays better?                the same words, another order, another answer
    distance   what was the first token?        asked at the end, so far away
    number     what do some of the bits write?  several places, read at once
    ones       how many of some bits are set?   the same places, another question

Each is a function that makes a batch from (seed, step): the same pair gives the same batch. A model
is whatever takes tokens (B, L) and gives logits (B, N): a `TextClassifier`, with or without
positions, with few heads or many, with another layer in the place of attention.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Int
from torch import Tensor, nn

from regard.data.seeding import rng, seeded

FIRST, SECOND = 0, 1
"""The tokens A and B."""

WORDS = ("plays", "better", ",", "not")
"""What is said of two teams; their tokens come after the teams'."""

PLACES = (1, 4, 6, 9)
"""Where the bits stand that a question is about."""


@dataclass(frozen=True)
class Asked:
    """Sequences, and the answer to each."""

    tokens: Int[Tensor, "B L"]
    labels: Int[Tensor, "B"]


Task: TypeAlias = Callable[[int, int], Asked]
"""From (seed, step) to a batch: `lambda seed, step: order(seed, step, length=20)`."""

Model = TypeVar("Model", bound=nn.Module)


def order(
    seed: int,
    step: int,
    *,
    batch: int = 64,
    length: int = 11,
    vocabulary: int = 13,
    noise: float = 0.0,
) -> Asked:
    """Among other tokens one A and one B: 1 where A comes first, else 0."""
    _check(length, vocabulary, least=2)
    chance = rng(seed, step)
    tokens = chance.integers(2, vocabulary, (batch, length))
    places = np.argsort(chance.random((batch, length)), 1)[:, :2]
    rows = np.arange(batch)
    tokens[rows, places[:, 0]], tokens[rows, places[:, 1]] = FIRST, SECOND
    labels = (places[:, 0] < places[:, 1]).astype(np.int64)
    return _asked(_noisy(tokens, noise, vocabulary, chance), labels)


def bag(
    seed: int,
    step: int,
    *,
    batch: int = 64,
    length: int = 11,
    vocabulary: int = 13,
    noise: float = 0.0,
) -> Asked:
    """1 where there are more A than B, else 0; never as many of both."""
    _check(length, vocabulary, least=1)
    chance = rng(seed, step)
    tokens = chance.integers(2, vocabulary, (batch, length))
    # How many of both, how many of them A, and where: ties are broken by one more.
    both = chance.integers(1, length + 1, batch)
    ones = np.floor(chance.random(batch) * (both + 1)).astype(np.int64)
    ones = np.where(2 * ones == both, ones + chance.choice([-1, 1], batch), ones)
    order = np.argsort(chance.random((batch, length)), 1)
    tokens[order < both[:, None]] = SECOND
    tokens[order < ones[:, None]] = FIRST
    return _asked(_noisy(tokens, noise, vocabulary, chance), (2 * ones > both).astype(np.int64))


def winner(seed: int, step: int, *, batch: int = 64, teams: int = 5) -> Asked:
    """Sentences that say which of two teams plays better; the answer is that team.

    All sentences about two teams have the same words: whoever does not see their order can do no
    more than choose one of the two.
    """
    if teams < 2:
        raise ValueError(f"teams ({teams}) must be 2 or more")
    chance = rng(seed, step)
    pairs = np.argsort(chance.random((batch, teams)), 1)[:, :2]
    turned = chance.random(batch) < 0.5
    sentences = [
        sentence(a, b, teams, turn) for (a, b), turn in zip(pairs.tolist(), turned.tolist())
    ]
    return _asked(np.array(sentences), pairs[:, 0])


def sentence(better: int, worse: int, teams: int, turned: bool = False) -> list[int]:
    """The tokens of "A plays better, not B", or, turned, of "not B, A plays better"."""
    plays, well, comma, no = range(teams, teams + len(WORDS))
    if turned:
        return [no, worse, comma, better, plays, well]
    return [better, plays, well, comma, no, worse]


def distance(
    seed: int,
    step: int,
    *,
    batch: int = 64,
    gap: int = 20,
    classes: int = 5,
    vocabulary: int = 13,
    alike: bool = False,
) -> Asked:
    """One of the first tokens begins, others follow, and the answer is which one it was.

    Between them and the end, where a model with `pool="last"` answers, lie `gap` tokens that mean
    nothing. They come from the rest of the vocabulary, so that the answer is the only token of its
    kind; or, `alike`, from the same tokens, so that only its place tells it from the others.
    """
    if gap < 0:
        raise ValueError(f"gap ({gap}) must be 0 or more")
    if not 2 <= classes < vocabulary:
        raise ValueError(
            f"classes ({classes}) must be 2 or more, and below vocabulary ({vocabulary})"
        )
    chance = rng(seed, step)
    labels = chance.integers(0, classes, batch)
    fillers = (0, classes) if alike else (classes, vocabulary)
    tokens = chance.integers(*fillers, (batch, 1 + gap + 1))
    tokens[:, 0] = labels
    return _asked(tokens, labels)


def number(
    seed: int, step: int, *, batch: int = 64, length: int = 11, places: Sequence[int] = PLACES
) -> Asked:
    """Bits; the answer is the number that those at the given places write, the lowest first."""
    bits, chosen = _bits(seed, step, batch, length, places)
    return _asked(bits, chosen @ 2 ** np.arange(len(places)))


def ones(
    seed: int, step: int, *, batch: int = 64, length: int = 11, places: Sequence[int] = PLACES
) -> Asked:
    """Bits; the answer is how many of those at the given places are 1."""
    bits, chosen = _bits(seed, step, batch, length, places)
    return _asked(bits, chosen.sum(1))


def fresh(make: Callable[[], Model], seed: int) -> Model:
    """What `make` makes, with first weights that depend on the seed alone."""
    with seeded(seed):
        return make()


def train(
    model: nn.Module,
    task: Task,
    steps: int,
    *,
    lr: float = 3e-3,
    warmup: int = 20,
    seed: int = 0,
    judged: int = 20,
) -> float:
    """Trains a model as `learn` does, and gives its accuracy on fresh batches."""
    learn(model, task, steps, lr=lr, warmup=warmup, seed=seed)
    return accuracy(model, task, range(steps + 1, steps + 1 + judged), seed)


def learn(
    model: nn.Module,
    task: Task,
    steps: int,
    *,
    lr: float = 3e-3,
    warmup: int = 20,
    seed: int = 0,
    clip: float = 1.0,
) -> list[float]:
    """Trains a model with Adam on batches 1, 2, …, and gives each step's loss.

    Gradients longer than `clip` are shortened to it; what is frozen stays as it is.
    """
    device = next(model.parameters()).device
    learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.Adam(learned, lr=lr, betas=(0.9, 0.98), fused=True)
    losses = []
    model.train()
    with seeded(seed, device):  # dropout
        for step in range(1, steps + 1):
            asked = task(seed, step)
            loss = F.cross_entropy(model(asked.tokens.to(device)), asked.labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(learned, clip)
            for group in optimizer.param_groups:
                group["lr"] = lr * min(1.0, step / max(1, warmup), 2 * (1 - (step - 1) / steps))
            optimizer.step()
            losses.append(loss.item())
    return losses


@torch.no_grad()
def accuracy(model: nn.Module, task: Task, steps: range, seed: int = 0) -> float:
    """The share of right answers in these batches."""
    device, right, count = next(model.parameters()).device, 0, 0
    model.eval()
    for step in steps:
        asked = task(seed, step)
        found = model(asked.tokens.to(device)).argmax(-1).cpu()
        right, count = right + int((found == asked.labels).sum()), count + len(asked.labels)
    return right / max(1, count)


def _bits(
    seed: int, step: int, batch: int, length: int, places: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Random bits, and those of them that stand at the places."""
    if not all(0 <= place < length for place in places):
        raise ValueError(f"places {tuple(places)} must lie from 0 to {length - 1}")
    bits = rng(seed, step).integers(0, 2, (batch, length))
    return bits, bits[:, list(places)]


def _asked(tokens: np.ndarray, labels: np.ndarray) -> Asked:
    return Asked(torch.from_numpy(tokens.astype(np.int64)), torch.from_numpy(labels))


def _noisy(
    tokens: np.ndarray, noise: float, vocabulary: int, chance: np.random.Generator
) -> np.ndarray:
    """With this probability a token is another, which means nothing."""
    if not 0 <= noise <= 1:
        raise ValueError(f"noise ({noise}) must be a probability, from 0 to 1")
    spoilt = chance.random(tokens.shape) < noise
    return np.where(spoilt, chance.integers(2, vocabulary, tokens.shape), tokens)


def _check(length: int, vocabulary: int, least: int) -> None:
    if length < least:
        raise ValueError(f"length ({length}) must be {least} or more")
    if vocabulary < 3:
        raise ValueError(f"vocabulary ({vocabulary}) must be 3 or more: A, B and another")
