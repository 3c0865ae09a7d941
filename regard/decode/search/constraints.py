"""Constraints on search: minimum and maximum length, and banned tokens.

All of it is data, which every engine receives as it is. Lengths count the tokens after the prompt,
without EOS: step t chooses token t of every sentence.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from regard.attention.checks import check_integer, shown
from regard.machine.memory import Size, check, limit

if TYPE_CHECKING:
    from regard.decode.engine.session import Session

Length = int | Sequence[int]
"""One for all sentences, or one for each."""


class Constraints:
    """For B sentences. Tensors are where the search is, and have a row for each sentence."""

    def __init__(
        self,
        sentences: int,
        vocabulary: int,
        *,
        end: int,
        max_length: Length,
        min_length: Length = 0,
        banned: Sequence[int] = (),
        renormalize: bool = False,
        device: torch.device | str | None = None,
    ):
        """`renormalize` makes the probabilities of the allowed tokens sum to 1."""
        self.end, self.renormalize = end, renormalize
        self.banned = sorted(set(banned))
        for name, tokens in (("end", [end]), ("banned", self.banned)):
            for token in tokens:
                check_integer(name, token, least=0)
                if token >= vocabulary:
                    raise ValueError(
                        f"{name} ({token}) must be a token, from 0 to {vocabulary - 1}"
                    )
        most = _lengths("max_length", max_length, sentences, 1)
        least = _lengths("min_length", min_length, sentences, 0)
        for low, high in zip(least, most):
            if low > high:
                raise ValueError(
                    f"min_length ({low}) must not exceed max_length ({high}); lower one of them"
                )
        self.steps = max(most, default=0)
        """The maximum length of any sentence."""
        self.early = max(least, default=0)
        """Before this step, some sentence may not end yet."""
        allowed = vocabulary - len({*self.banned, end} if self.early else self.banned)
        if not allowed:
            raise ValueError(f"all {vocabulary} tokens are banned; allow at least one")
        self.longest = torch.tensor(most).long()
        """The most tokens of each, on the host."""
        self.most, self.least = torch.tensor((most, least)).long().to(device).unbind()
        self._banned = torch.tensor(self.banned).long().to(device)

    def hide(self, logits: Float[Tensor, "R N"], t: int | Tensor) -> None:
        """Sets the logits of tokens not allowed at step t to -∞, in place. A sentence's rows are
        adjacent."""
        if self.banned:
            logits.index_fill_(1, self._banned, -math.inf)
        if self.early and (isinstance(t, Tensor) or t < self.early):
            too_early = (t < self.least).repeat_interleave(len(logits) // len(self.least))
            logits[:, self.end].masked_fill_(too_early, -math.inf)

    def full(self, t: int | Tensor) -> Bool[Tensor, "B"]:
        """True for sentences that reach their maximum length with the token of step t."""
        return t + 1 >= self.most

    def select(self, sentences: Int[Tensor, "b"]) -> None:
        """Keeps these alone."""
        sentences = sentences.to(self.most.device)
        self.most, self.least = self.most[sentences], self.least[sentences]


TABLE_BYTES = 32
"""Bytes of a search's own tables for each position of a row: tokens, back pointers, scores and
random numbers of 8 bytes at most."""


def check_memory(session: "Session", sentences: int, max_length: Length, width: int = 1) -> None:
    """Raises if the KV cache and the tables of a search cannot fit into memory."""
    steps = max(_lengths("max_length", max_length, sentences, 1), default=0)

    def total(rows: int, width: int, steps: int) -> int:
        return rows * width * (steps * (session.cache_bytes + TABLE_BYTES) + TABLE_BYTES)

    sizes = (
        Size("max_length", steps, 200, lambda other: total(sentences, width, other)),
        Size("width", width, 4, lambda other: total(sentences, other, steps)),
        Size("prompts", sentences, 64, lambda other: total(other, width, steps)),
    )
    check("the search", sizes, limit(session.device))


def _lengths(name: str, length: Length, sentences: int, least: int) -> list[int]:
    if not isinstance(length, Sequence):
        check_integer(name, length, least)
    lengths = list(length) if isinstance(length, Sequence) else [length] * sentences
    if len(lengths) != sentences:
        raise ValueError(
            f"{name} ({shown(length)}) must be one number, or one for each of {sentences}"
        )
    if not all(type(length) is int and length >= least for length in lengths):
        for length in lengths:
            check_integer(name, length, least)
    return lengths
