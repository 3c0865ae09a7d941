"""What a search may say: how sentences begin, which tokens are allowed, and when to end.

Prompts may differ in length. What all of them have is handed to the first step at once; the rest
of the longer ones is forced, token by token, and neither scored nor counted: scores, lengths and
random draws are those of the tokens found after the prompt, whoever else is in the batch.
"""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.attention.host import shown, whole
from regard.decode.search import topk as choice

Length = int | Sequence[int]
"""One for all sentences, or one for each."""


class Limits:
    """For B sentences: their prompts, the end sign, lengths and tokens that are never said."""

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        end: int,
        max_length: Length,
        min_length: Length = 0,
        banned: Sequence[int] = (),
    ):
        B = len(prompts)
        shortest = min(map(len, prompts), default=1)
        if not shortest:
            empty = next(n for n, prompt in enumerate(prompts) if not len(prompt))
            raise ValueError(f"prompt {empty} is empty; it needs at least the start sign")
        whole("end", end, least=0)
        most, least = (
            _lengths("max_length", max_length, B, 1),
            _lengths("min_length", min_length, B, 0),
        )
        for low, high in zip(least, most):
            if low > high:
                raise ValueError(
                    f"min_length ({low}) must not exceed max_length ({high}); lower one of them"
                )
        given = [len(prompt) - shortest for prompt in prompts]
        self.end, self.banned = end, sorted(set(banned))
        self.prompt = torch.tensor([list(prompt[:shortest]) for prompt in prompts]).long()
        self.steps = max((a + b for a, b in zip(given, most)), default=0)
        """The most steps that any sentence can take."""
        self._early = max((a + b for a, b in zip(given, least)), default=0)
        rest = [list(prompt[shortest:]) for prompt in prompts]
        width = max(given, default=0)
        self._forced = torch.tensor([row + [-1] * (width - len(row)) for row in rest]).long()
        self._given, self.most, self._least = map(torch.tensor, (given, most, least))
        self._tokens = max((max(prompt) for prompt in prompts), default=0)
        self._banned = torch.tensor(self.banned).long()

    def fit(self, logits: Float[Tensor, "B N"]) -> None:
        """Go where the logits are; refuse what their vocabulary does not have."""
        B, N = logits.shape
        if len(self.prompt) != B:
            raise ValueError(
                f"the step gave {B} rows for {len(self.prompt)} prompts; "
                "make the state for as many sentences as there are prompts"
            )
        for name, token in (
            ("end", self.end),
            ("banned", max(self.banned, default=0)),
            ("banned", min(self.banned, default=0)),
            ("prompt", self._tokens),
        ):
            if not 0 <= token < N:
                raise ValueError(f"{name} ({token}) must be a token, from 0 to {N - 1}")
        if len(self.banned) == N or (len({*self.banned, self.end}) == N and self._early):
            raise ValueError(f"all {N} tokens are banned; leave one that may be said")
        for name in ("most", "_given", "_least", "_forced", "_banned"):
            setattr(self, name, getattr(self, name).to(logits.device))

    @property
    def plain(self) -> bool:
        """Whether all steps are alike, so that one that was captured serves for all."""
        return self._forced.shape[1] == 0 == self.prompt.shape[1] - 1 and len(self.banned) <= 16

    @property
    def kind(self) -> tuple[object, ...]:
        """What differs between searches of one size but is no tensor."""
        return self.end, tuple(self.banned), self._early > 0

    def found(self, t: int) -> Int[Tensor, "B"]:
        """How many tokens each sentence has found before step t; negative while it is forced."""
        return t - self._given

    def ended(self, tokens: Int[Tensor, "B W"], t: int) -> Tensor:
        """Which of the tokens of step t end their sequence; a prompt may hold end signs too."""
        return (tokens == self.end) & (self.found(t) >= 0)[:, None]

    def full(self, t: int) -> Tensor:
        """Which sentences have found all that they may, with step t."""
        return self.found(t) + 1 >= self.most

    def apply(self, logs: Float[Tensor, "B W N"], t: int) -> Float[Tensor, "B W N"]:
        """log p, with -∞ for what may not be said at step t and 0 for what must; in place."""
        if self.banned:
            logs.index_fill_(-1, self._banned, -math.inf)
        if t < self._early:
            early = self.found(t) < self._least
            logs[..., self.end].masked_fill_(early[:, None], -math.inf)
        if t < self._forced.shape[1]:
            token = self._forced[:, t, None, None].expand(-1, logs.shape[1], 1)
            only = torch.full_like(logs, -math.inf).scatter_(-1, token.clamp(min=0), 0.0)
            logs = torch.where(token >= 0, only, logs)
        return logs

    def best(
        self, logits: Float[Tensor, "B W N"], t: int, count: int
    ) -> tuple[Float[Tensor, "B W k"], Int[Tensor, "B W k"]]:
        """The likeliest tokens of step t, and log p of each: -∞ for what may not be said.

        As many as asked for, or all where there are fewer.
        """
        if len(self.banned) > 16 or t < self._forced.shape[1]:
            logs = log_probabilities(logits.flatten(0, 1)).view_as(logits)
            logs, tokens = self.apply(logs, t).topk(min(count, logits.shape[-1]))
            return logs, tokens
        early = t < self._early
        # Among so many there are enough that may be said, if there are any.
        found = choice.best(logits.flatten(0, 1), count + len(self.banned) + early)
        logs, tokens = (x.unflatten(0, logits.shape[:2]) for x in found)
        for token in self.banned:
            logs.masked_fill_(tokens == token, -math.inf)
        if early:
            soon = (self.found(t) < self._least)[:, None, None]
            logs.masked_fill_((tokens == self.end) & soon, -math.inf)
        if early or self.banned:
            # A stable sort keeps the first of equals.
            logs, order = logs.sort(dim=-1, descending=True, stable=True)
            logs, tokens = logs[..., :count], tokens.gather(-1, order[..., :count])
        return logs, tokens

    def select(self, sentences: Tensor) -> None:
        """Keep these alone."""
        sentences = sentences.to(self.most.device)
        for name in ("most", "_given", "_least", "_forced"):
            setattr(self, name, getattr(self, name).index_select(0, sentences))


def staying(done: Sequence[bool]) -> Tensor | None:
    """Who stays when the finished leave: None while those are too few to be worth the copying."""
    kept = [n for n, over in enumerate(done) if not over]
    return torch.tensor(kept).long() if 4 * (len(done) - len(kept)) >= len(done) else None


def log_probabilities(logits: Float[Tensor, "R N"]) -> Float[Tensor, "R N"]:
    """log p, at least in float32."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)


def _lengths(name: str, given: Length, B: int, least: int) -> list[int]:
    lengths = [given] * B if isinstance(given, int) else list(given)
    if len(lengths) != B:
        raise ValueError(f"{name} ({shown(given)}) must be one number, or one for each of {B}")
    for length in lengths:
        whole(name, length, least)
    return lengths
