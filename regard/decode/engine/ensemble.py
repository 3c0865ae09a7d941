"""An ensemble: several models that generate one text together, as one session.

    p(y_t | y_<t, x) = Σ_m w_m p_m(y_t | y_<t, x),     Σ_m w_m = 1

Probabilities are averaged, as fairseq does, and Sockeye by default: the mean is a distribution, and
its log p compares with a single model's. A mean of log p, as Marian and OpenNMT-py take it, is no
distribution, and lets one model veto a token that all others expect.

Each member is a session with its own engine: members may differ in architecture, size and source,
but share the target vocabulary. To a search, an ensemble is like any other session.
"""

import math
from collections.abc import Sequence
from functools import reduce
from typing import TypeAlias, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.decode.engine.session import Attentive, Session
from regard.decode.search.constraints import Constraints
from regard.decode.search.topk import Best

Weights: TypeAlias = Sequence[float | int]
"""The relative weight of each member."""


def ensemble(members: Sequence[Session], weights: Weights | None = None) -> Session:
    """One session of several members, which it owns from then on; a single member is returned.

    `weights` are relative, and equal by default. The constraints of a search apply to the mean
    distribution, not to each member.
    """
    normalized = shares(weights, len(members))
    if len(members) == 1:
        return members[0]
    for name in ("vocabulary", "rows"):
        if len({getattr(member, name) for member in members}) > 1:
            sizes = ", ".join(str(getattr(member, name)) for member in members)
            raise ValueError(
                f"{name} must be the same in all members of an ensemble, not {sizes}; open them "
                "for the same sentences, of models with the same target vocabulary"
            )
    attentive = all(isinstance(member, Attentive) for member in members)
    return (AttentiveEnsemble if attentive else EnsembleSession)(members, normalized)


def shares(weights: Weights | None, count: int) -> list[float]:
    """Normalizes the weights of `count` members to a sum of 1; None means equal weights."""
    if weights is None:
        weights = [1.0] * count
    if len(weights) != count:
        raise ValueError(
            f"weights ({', '.join(map(str, weights))}) must be one for each model of the ensemble, "
            f"which has {count}"
        )
    for weight in weights:
        if not 0 < weight < math.inf:
            raise ValueError(f"weight ({weight}) must be above 0 and finite; leave the model out")
    return [weight / math.fsum(weights) for weight in weights]


class EnsembleSession(Session):
    """The rows of several sessions, step by step."""

    def __init__(self, members: Sequence[Session], weights: Sequence[float]):
        first = members[0]
        self.members, self.weights = list(members), list(weights)
        self.rows, self.vocabulary, self.device = first.rows, first.vocabulary, first.device
        self.scores = reduce(torch.promote_types, (member.scores for member in members))
        self.shrinks = any(member.shrinks for member in members)
        self.cache_bytes = sum(member.cache_bytes for member in members)

    def prefill(self, tokens: Int[Tensor, "R n"], counts: Int[Tensor, "R"]) -> None:
        for member in self.members:
            member.prefill(tokens, counts)

    def step(self, tokens: Int[Tensor, "R"]) -> Float[Tensor, "R N"]:
        """log p of the mean distribution, which serve as logits."""
        logs = (
            member.step(tokens).to(self.device, self.scores).log_softmax(-1) + math.log(weight)
            for member, weight in zip(self.members, self.weights)
        )
        return reduce(torch.logaddexp, logs)

    def select(self, rows: Int[Tensor, "R"]) -> None:
        for member in self.members:
            member.select(rows)
        self.rows = len(rows)

    def check_join(self, other: Session) -> None:
        if not isinstance(other, EnsembleSession) or len(other.members) != len(self.members):
            raise ValueError("an ensemble can be joined by one of the same models alone")
        for mine, its in zip(self.members, other.members):
            mine.check_join(its)

    def join(self, other: Session) -> None:
        self.check_join(other)
        for mine, its in zip(self.members, cast(EnsembleSession, other).members):
            mine.join(its)
        self.rows += other.rows

    def best(self, logits: Float[Tensor, "R N"], count: int, rule: Constraints, t: int) -> Best:
        return self.members[0].best(logits, count, rule, t)

    def close(self) -> None:
        for member in self.members:
            member.close()


class AttentiveEnsemble(EnsembleSession):
    """An ensemble with the mean of its members' attention; they must read the same source."""

    @property
    def attention(self) -> Float[Tensor, "R S"]:
        attentions = [
            cast(Attentive, member).attention.to(self.device, self.scores)
            for member in self.members
        ]
        if len({rows.shape for rows in attentions}) > 1:
            places = ", ".join(str(rows.shape[1]) for rows in attentions)
            raise ValueError(
                f"sources of {places} tokens have no mean attention; for a coverage penalty, all "
                "models must share the source tokenizer"
            )
        return torch.stack([w * rows for w, rows in zip(self.weights, attentions)]).sum(0)

    @property
    def real(self) -> Tensor:
        return cast(Attentive, self.members[0]).real
