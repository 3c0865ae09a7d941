"""Beam search: the best few hypotheses stay open, and each step extends all of them.

    score(y) = log p(y | x) / lp(|y|) + cp(x, y)
    lp(n) = ((5 + n) / 6)^α                          else short sentences would always win
    cp(x, y) = β Σ_i log(min(Σ_j a_ij, 1))           the coverage of source token i by attention a

Wu et al. (2016), section 7; α = 0.6 in Vaswani et al. (2017). |y| counts the end sign.

Of all extensions of a sentence's open hypotheses the best `width` that go on stay open; those that
end are finished if they are among the best `width` of all. An open hypothesis can only lose
probability, so its future score is at most log p / max lp. Where that is no better than the worst
of the hypotheses wanted, the search of this sentence is over, and nothing has been missed.

Everything is a tensor of fixed shape on the device. An open hypothesis is one column of back
pointers, which are followed once, when its sentence leaves.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from regard.attention.host import whole
from regard.decode.engine.eager import Attentive, State, Step, Whole
from regard.decode.search.constraints import Length, Limits, staying
from regard.decode.search.hypothesis import Hypothesis

Penalty = Callable[[int], float]
"""lp: what log p is divided by, from the number of tokens, the end sign counted."""


def gnmt(alpha: float | int) -> Penalty:
    """((5 + n) / 6)^α, of Google's translator and of "Attention Is All You Need"."""
    return lambda n: ((5 + n) / 6) ** alpha


def power(alpha: float | int) -> Penalty:
    """n^α: with α = 1 the mean of the tokens' scores, with 0 their sum."""
    return lambda n: float(n) ** alpha


PAPER = gnmt(0.6)


@torch.inference_mode()
def beam(
    step: Step,
    state: State,
    prompts: Sequence[Sequence[int]],
    *,
    end: int,
    max_length: Length,
    min_length: Length = 0,
    banned: Sequence[int] = (),
    width: int = 4,
    n_best: int = 1,
    penalty: Penalty = PAPER,
    coverage: float | int = 0.0,
) -> list[list[Hypothesis]]:
    """The `n_best` hypotheses for each prompt, best first; fewer where there are no more.

    A hypothesis that reaches its greatest length counts as it is, without an end. With a width of
    1 the first end is the result: greedy search. `coverage` is β, and needs an Attentive state.
    """
    whole("width", width)
    whole("n_best", n_best)
    if n_best > width:
        raise ValueError(f"n_best ({n_best}) must not exceed width ({width}); widen the beam")
    if not 0 <= coverage < math.inf:
        raise ValueError(f"coverage ({coverage}) must not be negative; try 0.2")
    limits = Limits(prompts, end, max_length, min_length, banned)
    results: list[list[Hypothesis]] = [[] for _ in prompts]
    if not results:
        return results
    if isinstance(state, Whole) and limits.plain and not coverage:
        whole_search = state.beam(limits, width, n_best, penalty)
        if whole_search is not None:
            return whole_search
    current: Any = state
    logits, current = step(limits.prompt, current)
    limits.fit(logits)
    if coverage and not isinstance(current, Attentive):
        raise ValueError(
            f"coverage ({coverage}) needs a state that says what was attended to, which a "
            f"{type(current).__name__} does not; use translation(..., attention=True)"
        )
    beams = Beams(limits, width, n_best, penalty, coverage, logits)
    for t in range(limits.steps):
        if coverage:
            beams.look(current.attention, current.real, t)
        rows = beams.advance(logits, t)
        done = beams.over.tolist()  # all that a step waits for
        kept = staying(done)
        if kept is not None:
            gone = torch.tensor([n for n, over in enumerate(done) if over])
            for sentence, hypotheses in beams.read(gone, t):
                results[sentence] = hypotheses
            if all(done):
                break
            rows = rows[kept.to(rows.device)].cpu()
            beams.select(kept)
        current.select(rows.flatten())
        logits, current = step(beams.last.flatten()[:, None], current)
    return results


class Beams:
    """For B sentences: W open hypotheses each, and the K best of the finished ones."""

    # One row for each sentence, in all of these.
    rows = (
        *("over", "open", "last", "parents", "tokens", "gains", "largest"),
        *("scores", "ends", "lengths", "slots", "cut"),
    )

    def __init__(
        self,
        limits: Limits,
        width: int,
        n_best: int,
        penalty: Penalty,
        coverage: float,
        logits: Tensor,
    ):
        B, T, device = len(logits), limits.steps, logits.device
        number = torch.promote_types(logits.dtype, torch.float32)
        self.limits, self.width, self.coverage = limits, width, coverage
        self.sentences = list(range(B))
        self.given = (-limits.found(0)).tolist()
        self.over = torch.zeros(B, dtype=torch.bool, device=device)

        # Open: log p, the token last added, and the way back from there.
        self.open = torch.zeros(B, 1, dtype=number, device=device)  # the prompt, at first
        self.last = torch.zeros(B, width, dtype=torch.int64, device=device)
        self.parents = torch.zeros(B, T, width, dtype=torch.int64, device=device)
        self.tokens = torch.zeros_like(self.parents)
        self.gains = torch.zeros(B, T, width, dtype=number, device=device)
        self.covered: Tensor | None = None

        # Finished: the score, log p of the end sign, the length and slot of the open hypothesis
        # that ended, and whether it was cut instead.
        self.scores = torch.full((B, n_best), -math.inf, dtype=number, device=device)
        self.ends = torch.zeros_like(self.scores)
        self.lengths = torch.zeros(B, n_best, dtype=torch.int64, device=device)
        self.slots = torch.zeros_like(self.lengths)
        self.cut = torch.zeros_like(self.lengths, dtype=torch.bool)

        longest = int(limits.most.max())
        table = [1.0, *penalties(penalty, longest), 1.0]
        self.penalty = torch.tensor(table, dtype=number, device=device)
        # For each sentence and n, the largest penalty of n and more tokens.
        lengths = torch.arange(longest + 2, device=device)
        possible = (lengths > 0) & (lengths <= limits.most[:, None])
        self.largest = self.penalty.where(possible, 0.0).flip(1).cummax(1).values.flip(1)

    def look(self, attention: Tensor, real: Tensor, t: int) -> None:
        """Coverage grows by what the last step attended to, once the prompt is over."""
        B, w = self.open.shape
        seen = attention.to(self.open.dtype).view(B, w, -1)
        seen = seen.where((self.limits.found(t) >= 0)[:, None, None], 0.0)
        self.covered = seen if self.covered is None else self.covered + seen
        self.real = real.expand_as(attention).view(B, w, -1)

    def advance(self, logits: Float[Tensor, "R N"], t: int) -> Int[Tensor, "B W"]:
        """Extend every open hypothesis by every token; the rows that those kept open continue."""
        (B, w), W, N = self.open.shape, self.width, logits.shape[-1]
        count = (self.limits.found(t) + 1).clamp(0, len(self.penalty) - 2)
        divisor = self.penalty[count][:, None]

        # The best 2W of all are among the best 2W of each.
        gain, token = self.limits.best(logits.view(B, w, N), t, 2 * W)
        total = gain + self.open[:, :, None]
        value = total
        if self.covered is not None:
            value = total + (divisor * self._coverage_penalty())[:, :, None]
        # At most W of them end, so that W of 2W go on, unless there are not as many.
        k = gain.shape[-1]
        # Of equals, the first.
        ranked = _pad(value.flatten(1), 2 * W).sort(dim=1, descending=True, stable=True)
        value, index = (x[:, : 2 * W] for x in ranked)
        index = index.clamp(max=w * k - 1)
        gain, total, token = (x.flatten(1).gather(1, index) for x in (gain, total, token))
        parent = index // k
        ended = self.limits.ended(token, t)

        self._finish(value / divisor, gain, parent, ended, t)

        # A stable sort keeps them best first.
        going = ended.byte().argsort(dim=1, stable=True)[:, :W]
        total = total.masked_fill(ended | (value == -math.inf), -math.inf)
        self.open, gain, parent, self.last = (
            x.gather(1, going) for x in (total, gain, parent, token)
        )
        for history, new in (
            (self.parents, parent),
            (self.tokens, self.last),
            (self.gains, gain),
        ):
            history[:, t] = new
        if self.covered is not None:
            places = parent[:, :, None].expand(-1, -1, self.covered.shape[-1])
            self.covered = self.covered.gather(1, places)

        best = self.open.amax(1) / self.largest.gather(1, count[:, None] + 1)[:, 0]
        self.over = self.over | self.limits.full(t) | (self.scores[:, -1] >= best)
        if W == 1:
            self.over = self.over | (self.scores[:, 0] > -math.inf)
        if w != W:  # where rows change in number, the host knows them
            return torch.arange(B)[:, None].expand(B, W)
        return parent + w * torch.arange(B, device=parent.device)[:, None]

    def _coverage_penalty(self) -> Float[Tensor, "B w"]:
        assert self.covered is not None
        # A place never looked at costs much, but not everything.
        least = torch.finfo(self.covered.dtype).tiny
        logs = self.covered.clamp(least, 1.0).log().where(self.real, 0.0)
        return self.coverage * logs.sum(-1)

    def _finish(self, score: Tensor, gain: Tensor, parent: Tensor, ended: Tensor, t: int) -> None:
        """Keep the best of what was finished before and of what ends, or is cut, with step t."""
        K = self.scores.shape[1]
        final = (ended | self.limits.full(t)[:, None]) & ~self.over[:, None]
        final[:, self.width :] = False
        new = {
            "scores": score.masked_fill(~final, -math.inf),
            "ends": gain,
            "lengths": torch.where(ended, t, t + 1),
            "slots": torch.where(ended, parent, (~ended).cumsum(1) - 1),
            "cut": ~ended,
        }
        both = {name: torch.cat((getattr(self, name), x), 1) for name, x in new.items()}
        # Of equals, the one found first.
        order = both["scores"].sort(dim=1, descending=True, stable=True).indices[:, :K]
        for name, x in both.items():
            setattr(self, name, x.gather(1, order))

    def select(self, sentences: Tensor) -> None:
        """Keep these alone."""
        self.sentences = [self.sentences[n] for n in sentences.tolist()]
        self.limits.select(sentences)
        here = sentences.to(self.open.device)
        for name in self.rows:
            setattr(self, name, getattr(self, name).index_select(0, here))
        if self.covered is not None:
            self.covered = self.covered.index_select(0, here)

    def read(self, sentences: Tensor, t: int) -> Iterator[tuple[int, list[Hypothesis]]]:
        """The finished hypotheses of these, after step t, and which sentences they are."""
        here = sentences.to(self.open.device)
        given = (self.scores, self.ends, self.lengths, self.slots, self.cut)
        score, end, lengths, slot, cut = (x[here].cpu().numpy() for x in given)
        parents, tokens, gains = (
            x[here, : t + 1].cpu().numpy() for x in (self.parents, self.tokens, self.gains)
        )
        # All ways back at once: a hypothesis joins where it ends.
        words, logs = (np.zeros((*slot.shape, t + 1), x.dtype) for x in (tokens, gains))
        rows = np.arange(len(slot))[:, None]
        for place in range(int(lengths.max(initial=0)) - 1, -1, -1):
            words[..., place], logs[..., place] = (x[rows, place, slot] for x in (tokens, gains))
            slot = np.where(place < lengths, parents[rows, place, slot], slot)
        columns = [x.tolist() for x in (score, end, lengths, cut, words, logs)]
        for sentence, one in zip(sentences.tolist(), zip(*columns)):
            yield (name := self.sentences[sentence]), hypotheses(one, self.given[name])


def hypotheses(columns: Sequence[Sequence[Any]], begin: int = 0) -> list[Hypothesis]:
    """Of one sentence, from scores, log p of ends, lengths, cuts, words and log p of each."""
    found = []
    for score, last, length, cut, words, logs in zip(*columns):
        if score != -math.inf:
            scores = logs[begin:length] if cut else [*logs[begin:length], last]
            found.append(Hypothesis(words[begin:length], score, scores))
    return found


def penalties(penalty: Penalty, longest: int) -> list[float]:
    """lp of 1 token and of more."""
    table = [penalty(n) for n in range(1, longest + 1)]
    for n, value in enumerate(table, 1):
        if not 0 < value < math.inf:
            raise ValueError(
                f"the penalty of {n} tokens ({value}) must be positive and finite; "
                "take an exponent nearer to 0, or a lower max_length"
            )
    return [float(value) for value in table]


def _pad(values: Tensor, least: int) -> Tensor:
    """With columns of -∞ where there are too few."""
    missing = least - values.shape[1]
    return values if missing <= 0 else F.pad(values, (0, missing), value=-math.inf)
