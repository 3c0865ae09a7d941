"""Models that are tables of logits, and searches so plain that nobody doubts them."""

import itertools
import math
from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

from regard.decode.engine.session import Session
from regard.decode.search.hypothesis import Hypothesis


@cache
def logits(seed: int, sentence: int, prefix: tuple[int, ...], tokens: int, spread: float) -> Tensor:
    """Logits that depend on all of the prefix, and on nothing else."""
    key = hash((seed, sentence, prefix)) % 2**63
    generator = torch.Generator().manual_seed(key)
    return spread * torch.randn(tokens, generator=generator, dtype=torch.float64)


class Table(Session):
    """A session of one's own: what each row has read, and which sentence it is."""

    scores = torch.float64
    device = torch.device("cpu")

    def __init__(self, seed: int, tokens: int, sentences: Sequence[int], spread: float = 1.0):
        self.seed, self.vocabulary, self.spread = seed, tokens, spread
        self.sentences = list(sentences)
        self.read: list[tuple[int, ...]] = [() for _ in sentences]
        self.sizes: list[int] = []

    @property
    def rows(self) -> int:  # type: ignore[override]
        return len(self.sentences)

    def prefill(self, tokens: Tensor, counts: Tensor) -> None:
        self.read = [tuple(row[:n]) for row, n in zip(tokens.tolist(), counts.tolist())]

    def step(self, tokens: Tensor) -> Tensor:
        self.sizes.append(len(tokens))
        self.read = [(*old, new) for old, new in zip(self.read, tokens.tolist(), strict=True)]
        rows = zip(self.sentences, self.read)
        return torch.stack([logits(self.seed, *row, self.vocabulary, self.spread) for row in rows])

    def select(self, rows: Tensor) -> None:
        self.sentences = [self.sentences[row] for row in rows.tolist()]
        self.read = [self.read[row] for row in rows.tolist()]


class Looking(Table):
    """The same, of which each row attends to a source of S places, of which some are padding."""

    def __init__(self, seed: int, tokens: int, lengths: Sequence[int]):
        super().__init__(seed, tokens, range(len(lengths)))
        self.lengths = lengths

    @property
    def attention(self) -> Tensor:
        S = max(self.lengths)
        rows = [
            looks(self.seed, sentence, read, self.lengths[sentence])
            for sentence, read in zip(self.sentences, self.read)
        ]
        return torch.tensor([row + [0.0] * (S - len(row)) for row in rows])

    @property
    def real(self) -> Tensor:
        lengths = torch.tensor([self.lengths[sentence] for sentence in self.sentences])
        return torch.arange(max(self.lengths)) < lengths[:, None]


def looks(seed: int, sentence: int, prefix: tuple[int, ...], places: int) -> list[float]:
    """What a row attends to after a prefix."""
    return logits(seed + 1, sentence, prefix, places, 2.0).softmax(-1).float().tolist()


Logs = Callable[[tuple[int, ...]], list[float]]


def logs_of(seed: int, tokens: int, sentence: int, spread: float = 1.0) -> Logs:
    """log p after a prefix, which begins with the prompt."""
    return lambda prefix: logits(seed, sentence, prefix, tokens, spread).log_softmax(-1).tolist()


def exhaustive(
    logs: Logs,
    prompt: tuple[int, ...],
    tokens: int,
    *,
    end: int,
    most: int,
    least: int = 0,
    banned: Sequence[int] = (),
    penalty: Callable[[int], float],
) -> list[Hypothesis]:
    """Every sequence that there is, best first."""
    found = []
    words = [token for token in range(tokens) if token != end and token not in banned]
    for length in range(least, most + 1):
        for sequence in itertools.product(words, repeat=length):
            scores = [logs(prompt + sequence[:n])[token] for n, token in enumerate(sequence)]
            if length < most:
                if end in banned:
                    continue
                scores.append(logs(prompt + sequence)[end])
            score = math.fsum(scores) / penalty(len(scores)) if scores else 0.0
            found.append(Hypothesis(list(sequence), score, scores))
    return sorted(found, key=lambda hypothesis: -hypothesis.score)


def plain_beam(
    logs: Logs,
    prompt: tuple[int, ...],
    *,
    end: int,
    most: int,
    least: int = 0,
    banned: Sequence[int] = (),
    width: int,
    penalty: Callable[[int], float],
    coverage: float = 0.0,
    look: Callable[[tuple[int, ...]], list[float]] | None = None,
    n_best: int = 1,
    horizon: int | None = None,
) -> list[Hypothesis]:
    """Beam search with lists, one sentence at a time, that never stops early without a horizon."""

    def covered(words: list[int]) -> float:
        """The coverage penalty of all but the last of these words, and of what led to that."""
        if look is None:
            return 0.0
        rows = [look((*prompt, *words[:n])) for n in range(len(words))]
        return coverage * sum(math.log(min(sum(column), 1.0)) for column in zip(*rows))

    alive: list[tuple[float, list[int], list[float]]] = [(0.0, [], [])]
    finished = []
    for n in range(1, most + 1):
        candidates = [
            (total + log, [*words, token], [*scores, log])
            for total, words, scores in alive
            for token, log in enumerate(logs((*prompt, *words)))
            if token not in banned and not (token == end and n <= least)
        ]
        ranked = [
            (total / penalty(n) + covered(words), words, scores, total)
            for total, words, scores in candidates
        ]
        ranked.sort(key=lambda candidate: -candidate[0])
        for score, words, scores, _ in ranked[:width]:
            if words[-1] == end:
                finished.append(Hypothesis(words[:-1], score, scores))
            elif n == most:
                finished.append(Hypothesis(words, score, scores))
        going = [candidate for candidate in ranked if candidate[1][-1] != end][:width]
        alive = [(total, words, scores) for _, words, scores, total in going]
        if horizon is not None and n < most and len(finished) >= n_best:
            ahead = range(n + 1, min(n + 1 + horizon, most) + 1)
            hope = max(total for total, _, _ in alive) / max(map(penalty, ahead))
            if sorted(one.score for one in finished)[-n_best] >= hope:
                break
    return sorted(finished, key=lambda hypothesis: -hypothesis.score)


def same(have: Sequence[Hypothesis], want: Sequence[Hypothesis]) -> None:
    assert [one.tokens for one in have] == [one.tokens for one in want]
    for one, two in zip(have, want):
        torch.testing.assert_close(one.score, two.score, atol=1e-10, rtol=1e-10)
        torch.testing.assert_close(one.token_scores, two.token_scores, atol=1e-10, rtol=1e-10)
