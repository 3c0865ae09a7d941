"""Greedy search: the likeliest token, again and again.

    y_t = argmax_y p(y | y_<t, x)

The best first token need not begin the best sentence; `beam` keeps several open, `sample` draws.
All of them know a model only as a session (see `engine`).
"""

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.decode.engine.session import Session
from regard.decode.search.constraints import Constraints, Length, check_memory
from regard.decode.search.hypothesis import Hypothesis
from regard.decode.search.topk import Best


@torch.inference_mode()
def greedy(
    session: Session,
    prompts: Sequence[Sequence[int]],
    *,
    end: int,
    max_length: Length,
    min_length: Length = 0,
    banned: Sequence[int] = (),
    renormalize: bool = False,
) -> list[Hypothesis]:
    """One hypothesis for each prompt, which is BOS and any tokens after it.

    `score` is log p.
    """
    if not prompts:
        return []
    check_memory(session, len(prompts), max_length)
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
    paths = Paths(session.begin(prompts), constraints)
    session.run(paths)
    return paths.hypotheses()


class Paths:
    """One path for each sentence, by the likeliest tokens."""

    def __init__(self, last: Int[Tensor, "B"], constraints: Constraints):
        B, T, device = len(last), constraints.steps, last.device
        self.constraints = constraints
        self.last = last
        self.rows: Tensor | None = None
        self.t = 0
        self.over = torch.zeros(B, dtype=torch.bool, device=device)
        self.sentences = torch.arange(B, device=device)
        """Which each row is."""
        # Of all sentences, whether they are still among the rows or not.
        self.tokens = torch.full((B, T), constraints.end, device=device)
        self.scores = torch.zeros(B, T, dtype=torch.float64, device=device)
        self.most = constraints.most

    def choose(self, logits: Float[Tensor, "R N"], best: Callable[..., Best]) -> Best:
        """log p of each row's next token, and which it is."""
        return best(logits, 1, self.constraints, self.t)

    def extend(self, logits: Float[Tensor, "R N"], best: Callable[..., Best]) -> None:
        logs, tokens = (column[:, 0] for column in self.choose(logits, best))
        self.tokens[self.sentences, self.t] = tokens
        self.scores[self.sentences, self.t] = logs.double()
        # A row that has ended may stay for a while; tokens after its end are not read.
        self.over = self.over | (tokens == self.constraints.end) | self.constraints.full(self.t)
        self.last, self.rows = tokens, None
        self.t += 1

    def select(self, sentences: Int[Tensor, "b"]) -> None:
        """Continues with these rows alone."""
        here = sentences.to(self.last.device)
        self.rows = sentences
        self.constraints.select(here)
        self.last, self.over, self.sentences = (
            x[here] for x in (self.last, self.over, self.sentences)
        )

    def hypotheses(self) -> list[Hypothesis]:
        return [read()[0] for read in self.readers()]

    def readers(self) -> list[Callable[[], list[Hypothesis]]]:
        """A function for each sentence, which gives its hypothesis; it raises if that is NaN."""
        rows = zip(self.tokens.tolist(), self.scores.tolist(), self.most.tolist())
        return [partial(_hypotheses, *row, self.constraints.end) for row in rows]


def _hypotheses(tokens: list[int], scores: list[float], most: int, end: int) -> list[Hypothesis]:
    """One sentence's only hypothesis, up to its end."""
    tokens, scores = tokens[:most], scores[:most]
    if end in tokens:
        length = tokens.index(end)
        tokens, scores = tokens[:length], scores[: length + 1]
    return [Hypothesis(tokens, math.fsum(scores), scores)]
