"""Beam search: the best few hypotheses stay open, and each step extends all of them.

    score(y) = log p(y | x) / lp(|y|) + cp(x, y)
    lp(n) = ((5 + n) / 6)^α, or n^α                  else short sentences would always win
    cp(x, y) = β Σ_i log(min(Σ_j a_ij, 1))           the coverage of source token i by attention a

The first lp is that of Wu et al. (2016), section 7, with α = 0.6 in Vaswani et al. (2017). Tasks
use the second, as fairseq, HF and Marian do. |y| counts EOS.

Of all extensions of a sentence's open hypotheses the best `width` that go on stay open; those that
end are finished if they are among the best `width` of all. An open hypothesis can only lose
probability, so its future score is at most log p / max lp. Once that is no better than the worst
of the n-best hypotheses, the search of this sentence is over, and no better one was missed.

That bound is loose where lp grows: a hypothesis that trails by far could still win, if it went on
to the maximum length and were certain of every token. With a `horizon` of h tokens, the bound only
considers hypotheses that end within h more tokens and an EOS.

Everything is a tensor of fixed shape on the device. An open hypothesis is one column of back
pointers, which are followed once, when its sentence leaves.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from regard.attention.checks import check_integer
from regard.decode.engine.session import Attentive, Session
from regard.decode.search.constraints import Constraints, Length, check_memory
from regard.decode.search.hypothesis import Hypothesis
from regard.decode.search.topk import Best

Penalty = Callable[[int], float]
"""Length penalty lp: what log p is divided by, from the number of tokens, EOS included."""


def gnmt(alpha: float | int) -> Penalty:
    """((5 + n) / 6)^α, of GNMT and of "Attention Is All You Need"."""
    return lambda n: ((5 + n) / 6) ** alpha


def power(alpha: float | int) -> Penalty:
    """n^α: with α = 1 the mean log p of the tokens, with 0 their sum."""
    return lambda n: float(n) ** alpha


PAPER = gnmt(0.6)


@torch.inference_mode()
def beam(
    session: Session,
    prompts: Sequence[Sequence[int]],
    *,
    end: int,
    max_length: Length,
    min_length: Length = 0,
    banned: Sequence[int] = (),
    renormalize: bool = False,
    width: int = 4,
    n_best: int = 1,
    penalty: Penalty = PAPER,
    coverage: float | int = 0.0,
    horizon: int | None = None,
) -> list[list[Hypothesis]]:
    """The `n_best` hypotheses for each prompt, best first; fewer if fewer were finished.

    A hypothesis that reaches its maximum length counts as it is, without an end. `width` is the
    beam size; with 1 the first end is the result: greedy search. `coverage` is the weight β of the
    coverage penalty, and needs an Attentive session. `horizon` is the number of further tokens
    considered in the stopping bound; None means all, so that no better hypothesis is missed.
    """
    check_integer("width", width)
    check_integer("n_best", n_best)
    if horizon is not None:
        check_integer("horizon", horizon, least=0)
    if n_best > width:
        raise ValueError(f"n_best ({n_best}) must not exceed width ({width}); widen the beam")
    if not 0 <= coverage < math.inf:
        raise ValueError(f"coverage ({coverage}) must not be negative; try 0.2")
    if coverage and not isinstance(session, Attentive):
        raise ValueError(
            f"coverage ({coverage}) needs a session with attention weights, which a "
            f"{type(session).__name__} does not have; use open_session(..., attention=True)"
        )
    if not prompts:
        return []
    check_memory(session, len(prompts), max_length, width)
    constraints = Constraints(
        len(prompts),
        session.vocabulary,
        end=end,
        max_length=max_length,
        min_length=min_length,
        banned=banned,
        renormalize=renormalize,
        device=session.device,
    )
    last, kind = session.begin(prompts), session.scores
    beams = Beams(last, constraints, width, n_best, penalty, kind, horizon)
    if isinstance(session, Attentive) and coverage:
        beams.coverage = Coverage(session, coverage, session.scores)
    session.run(beams)
    return beams.hypotheses()


class Beams:
    """The state of B sentences: W open hypotheses each, and the K best of the finished ones."""

    PER_SENTENCE = (
        *("over", "open", "parents", "tokens", "gains", "largest"),
        *("scores", "ends", "lengths", "slots", "cut"),
    )

    def __init__(
        self,
        last: Int[Tensor, "B"],
        constraints: Constraints,
        width: int,
        n_best: int,
        penalty: Penalty,
        dtype: torch.dtype = torch.float32,
        horizon: int | None = None,
    ):
        B, T = len(last), constraints.steps
        self.constraints, self.width, self.n_best, self.dtype = constraints, width, n_best, dtype
        self.horizon = T + 1 if horizon is None else min(horizon, T + 1)
        self.coverage: Coverage | None = None
        self.sentences = list(range(B))
        self.results: list[list[Hypothesis]] = [[] for _ in range(B)]
        self.t = 0
        self.last: Tensor = last
        self.rows: Tensor | None = None
        self.over = torch.zeros(B, dtype=torch.bool, device=last.device)
        # lp(n), and for each sentence and n the largest lp of n and more tokens, EOS among them.
        self.penalty = torch.tensor([1.0, *penalties(penalty, T), 1.0], dtype=dtype)
        n = torch.arange(T + 2)
        limits, place = constraints.longest.unique(return_inverse=True)
        possible = (n > 0) & (n <= limits[:, None])
        table = self.penalty.where(possible, 0.0)
        if horizon is None:
            largest = table.flip(1).cummax(1).values.flip(1)
        else:
            ahead = self.horizon
            largest = F.pad(table, (0, ahead)).unfold(1, ahead + 1, 1).amax(-1)
        self.largest = largest[place]

    def begin(self) -> None:
        """Allocates tensors before the first step; skipped by an engine that has its own."""
        B, T, W, K = len(self.sentences), self.constraints.steps, self.width, self.n_best
        device, dtype = self.last.device, self.dtype
        self.penalty, self.largest = self.penalty.to(device), self.largest.to(device)
        # Open: log p, and back pointers. At first there is only the prompt.
        self.open = torch.zeros(B, 1, dtype=dtype, device=device)
        self.parents = torch.zeros(B, T, W, dtype=torch.int64, device=device)
        self.tokens = torch.zeros_like(self.parents)
        self.gains = torch.zeros(B, T, W, dtype=dtype, device=device)
        # Finished: the score, log p of EOS, the length and slot of the open hypothesis
        # that ended, and whether it was cut instead.
        self.scores = torch.full((B, K), -math.inf, dtype=dtype, device=device)
        self.ends = torch.zeros_like(self.scores)
        self.lengths = torch.zeros(B, K, dtype=torch.int64, device=device)
        self.slots = torch.zeros_like(self.lengths)
        self.cut = torch.zeros_like(self.lengths, dtype=torch.bool)

    def extend(self, logits: Float[Tensor, "R N"], best: Callable[..., Best]) -> None:
        """Extends every open hypothesis by every token, and keeps the best."""
        if self.t == 0:
            self.begin()
        (B, w), W, t = self.open.shape, self.width, self.t
        if self.coverage is not None:
            self.coverage.add_attention(B)
        # The best 2W of all are among the best 2W of each hypothesis.
        gain, token = (x.unflatten(0, (B, w)) for x in best(logits, 2 * W, self.constraints, t))
        divisor = self.penalty[t + 1]
        total = gain + self.open[:, :, None]
        value = total
        if self.coverage is not None:
            value = total + (divisor * self.coverage.penalty())[:, :, None]
        # At most W of them end, so that W of 2W go on, unless there are fewer.
        # Ties go to the first.
        k = gain.shape[-1]
        ranked = _pad(value.flatten(1), 2 * W).sort(dim=1, descending=True, stable=True)
        value, index = (x[:, : 2 * W] for x in ranked)
        index = index.clamp(max=w * k - 1)
        gain, total, token = (x.flatten(1).gather(1, index) for x in (gain, total, token))
        parent = index // k
        ended = token == self.constraints.end

        self._finish(value / divisor, gain, parent, ended)

        # A stable sort keeps them best first.
        going = ended.byte().argsort(dim=1, stable=True)[:, :W]
        total = total.masked_fill(ended | (value == -math.inf), -math.inf)
        self.open, gain, parent, token = (x.gather(1, going) for x in (total, gain, parent, token))
        for history, new in (
            (self.parents, parent),
            (self.tokens, token),
            (self.gains, gain),
        ):
            history[:, t] = new
        if self.coverage is not None:
            self.coverage.follow(parent)

        future = self.open.amax(1) / self.largest[:, t + 2]
        self.over = self.over | self.constraints.full(t) | (self.scores[:, -1] >= future)
        if W == 1:
            self.over = self.over | (self.scores[:, 0] > -math.inf)
        self.last = token.flatten()
        self.t += 1
        if w != W:  # rows that change in number must be on the host
            self.rows = torch.arange(B).repeat_interleave(W)
        else:
            self.rows = (parent + w * torch.arange(B, device=parent.device)[:, None]).flatten()

    def _finish(self, score: Tensor, gain: Tensor, parent: Tensor, ended: Tensor) -> None:
        """Keeps the best of those finished before and of those that end, or are cut, now."""
        K, t = self.scores.shape[1], self.t
        final = (ended | self.constraints.full(t)[:, None]) & ~self.over[:, None]
        final[:, self.width :] = False
        new = {
            "scores": score.masked_fill(~final, -math.inf),
            "ends": gain,
            "lengths": torch.where(ended, t, t + 1),
            "slots": torch.where(ended, parent, (~ended).cumsum(1) - 1),
            "cut": ~ended,
        }
        both = {name: torch.cat((getattr(self, name), x), 1) for name, x in new.items()}
        # Ties go to the hypothesis that was finished first.
        order = both["scores"].sort(dim=1, descending=True, stable=True).indices[:, :K]
        for name, x in both.items():
            setattr(self, name, x.gather(1, order))

    def select(self, sentences: Int[Tensor, "b"]) -> None:
        """Drops all other sentences, after reading their results."""
        stay = sentences.tolist()
        self._read(sorted(set(range(len(self.sentences))) - set(stay)))
        self.sentences = [self.sentences[n] for n in stay]
        here = sentences.to(self.open.device)
        self.constraints.select(here)
        for name in self.PER_SENTENCE:
            setattr(self, name, getattr(self, name).index_select(0, here))
        self.last = self.last.unflatten(0, (-1, self.width))[here].flatten()
        if self.rows is not None:
            rows = self.rows.unflatten(0, (-1, self.width))
            self.rows = rows[sentences.to(rows.device)].flatten().cpu()
        if self.coverage is not None:
            self.coverage.select(here)

    def hypotheses(self) -> list[list[Hypothesis]]:
        """The n-best hypotheses of every sentence, best first."""
        self._read(list(range(len(self.sentences))))
        return self.results

    def _read(self, sentences: list[int]) -> None:
        for n, columns in zip(sentences, zip(*self.backtrace(sentences))):
            self.results[self.sentences[n]] = hypotheses(columns)

    def readers(self) -> list[Callable[[], list[Hypothesis]]]:
        """A function for each sentence that returns its hypotheses; it raises if one is NaN."""
        columns = self.backtrace(list(range(len(self.sentences))))
        return [partial(hypotheses, sentence) for sentence in zip(*columns)]

    def backtrace(self, sentences: list[int]) -> Sequence[Sequence[Any]]:
        """Scores, log p of ends, lengths, cuts, tokens and their log p of finished hypotheses."""
        here = torch.tensor(sentences, device=self.open.device).long()
        finished = (self.scores, self.ends, self.lengths, self.slots, self.cut)
        score, end, lengths, slot, cut = (x[here].cpu().numpy() for x in finished)
        parents, tokens, gains = (
            x[here, : self.t].cpu().numpy() for x in (self.parents, self.tokens, self.gains)
        )
        # For so few numbers, lists are faster to index than arrays.
        words, logs = [], []
        for n, ends in enumerate(zip(slot.tolist(), lengths.tolist())):
            steps = [x[n].tolist() for x in (parents, tokens, gains)]
            paths = [_path(steps[0], steps[1], steps[2], *end) for end in zip(*ends)]
            words.append([path[0] for path in paths])
            logs.append([path[1] for path in paths])
        return [*(x.tolist() for x in (score, end, lengths, cut)), words, logs]


class Coverage:
    """The coverage penalty, from the total attention of open hypotheses to each source position."""

    def __init__(self, session: Attentive, weight: float, dtype: torch.dtype):
        self.session, self.weight, self.dtype = session, weight, dtype
        self.covered: Tensor | None = None

    def add_attention(self, sentences: int) -> None:
        """Adds the attention weights of the last step."""
        weights = self.session.attention.to(self.dtype).unflatten(0, (sentences, -1))
        self.real = self.session.real.expand_as(self.session.attention).view_as(weights)
        self.covered = weights if self.covered is None else self.covered + weights

    def penalty(self) -> Float[Tensor, "B w"]:
        assert self.covered is not None
        # The penalty of a position without any attention is large, but finite.
        least = torch.finfo(self.covered.dtype).tiny
        logs = self.covered.clamp(least, 1.0).log().where(self.real, 0.0)
        return self.weight * logs.sum(-1)

    def follow(self, parents: Int[Tensor, "B W"]) -> None:
        assert self.covered is not None
        places = parents[:, :, None].expand(-1, -1, self.covered.shape[-1])
        self.covered = self.covered.gather(1, places)

    def select(self, sentences: Int[Tensor, "b"]) -> None:
        assert self.covered is not None
        self.covered = self.covered[sentences]


def hypotheses(columns: Sequence[Sequence[Any]]) -> list[Hypothesis]:
    """The hypotheses of one sentence, from its entries of `Beams.backtrace`."""
    finished = []
    for score, last, length, cut, words, logs in zip(*columns):
        if score != -math.inf:
            scores = logs[:length] if cut else [*logs[:length], last]
            finished.append(Hypothesis(words[:length], score, scores))
    return finished


def _path(
    parents: list[list[int]],
    tokens: list[list[int]],
    gains: list[list[float]],
    slot: int,
    length: int,
) -> tuple[list[int], list[float]]:
    """Tokens of the hypothesis open in this slot after `length` steps, and their log p."""
    words, logs = [0] * length, [0.0] * length
    for step in range(length - 1, -1, -1):
        words[step], logs[step] = tokens[step][slot], gains[step][slot]
        slot = parents[step][slot]
    return words, logs


def penalties(penalty: Penalty, longest: int) -> list[float]:
    """lp of 1 to `longest` tokens."""
    table = [penalty(n) for n in range(1, longest + 1)]
    for n, value in enumerate(table, 1):
        if not 0 < value < math.inf:
            raise ValueError(
                f"the penalty of {n} tokens ({value}) must be positive and finite; "
                "take an exponent nearer to 0, or a lower max_length"
            )
    return [float(value) for value in table]


def _pad(values: Tensor, least: int) -> Tensor:
    """Appends columns of -∞ up to a width of `least`."""
    missing = least - values.shape[1]
    return values if missing <= 0 else F.pad(values, (0, missing), value=-math.inf)
