"""A session: all that a search knows of a model.

    last = session.begin(prompts)        reads all of each prompt but its last token
    logits = session.step(last)          one token of every row in, logits of the next out
    session.select(rows)                 row r continues what row rows[r] has been
    session.join(other)                  rows of another session follow
    session.run(search)                  steps of both, until the search is over

Rows may have come to different lengths. Logits are the caller's: no later step overwrites them. A
search is data and a pure function of logits (`Paths`, `Beams`), so that an engine can take several
of its steps at once; what is found does not depend on the engine.
"""

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from regard.attention.checks import integer_tensor, shown
from regard.attention.sync import on_host
from regard.decode.search.constraints import Constraints
from regard.decode.search.topk import Best, best


@runtime_checkable
class Search(Protocol):
    """What a session has to know of a search."""

    last: Int[Tensor, "R"]
    """The tokens that the next step reads."""
    rows: Int[Tensor, "R"] | None
    """The row that each row continues from there on; None where all continue themselves."""
    over: Bool[Tensor, "B"]
    """Which sentences are."""

    def extend(self, logits: Float[Tensor, "R N"], best: Callable[..., Best]) -> None:
        """One more token for every row; `best` is the session's."""

    def select(self, kept: Int[Tensor, "b"]) -> None:
        """Goes on with these sentences alone."""


@runtime_checkable
class Attentive(Protocol):
    """A session that also says what the last step attended to, as a coverage penalty wants."""

    attention: Float[Tensor, "R S"]
    """How much each row attended to each place of its source; the rows sum to 1."""
    real: Tensor
    """Which places there are: booleans that broadcast to (R, S), False in padding."""


class Session:
    """Rows that are decoded together, and what they keep between steps.

    It belongs to whoever opened it, and is used by one thread at a time. Any number of sessions of
    an engine may be open at once, in any threads.
    """

    rows: int
    vocabulary: int
    device: torch.device
    scores: torch.dtype = torch.float32
    """Of sums of log p."""
    shrinks = True
    """Whether steps are faster with fewer rows, so that finished sentences should leave."""

    # What engines say

    def prefill(self, tokens: Int[Tensor, "R n"], counts: Int[Tensor, "R"]) -> None:
        """Reads the first counts[r] tokens of row r, before its first step; none may be read."""
        raise NotImplementedError

    def step(self, tokens: Int[Tensor, "R"]) -> Float[Tensor, "R N"]:
        """Reads one token of every row."""
        raise NotImplementedError

    def select(self, rows: Int[Tensor, "R"]) -> None:
        """Keeps, drops, repeats or reorders rows.

        They are on the host where they change in number; otherwise nobody waits for them.
        """
        raise NotImplementedError

    def join(self, other: "Session") -> None:
        """The other session, of the same engine, is then used up."""
        raise NotImplementedError

    def best(self, logits: Float[Tensor, "R N"], count: int, rule: Constraints, t: int) -> Best:
        return best(logits, count, rule, t)

    def advance(self, search: Search) -> None:
        """One step of model and search, or as many as can be taken before somebody has to look."""
        if search.rows is not None:
            self.select(search.rows)
        search.extend(self.step(search.last), self.best)

    def close(self) -> None:
        """Gives back what it holds."""

    # What all have in common

    def begin(self, prompts: Sequence[Sequence[int]]) -> Int[Tensor, "R"]:
        """Reads the prompts, one for each row, and gives the last token of each."""
        if len(prompts) != self.rows:
            raise ValueError(
                f"{len(prompts)} prompts for a session of {self.rows} rows; open it for as many "
                "sentences as there are prompts"
            )
        for n, prompt in enumerate(prompts):
            if not len(prompt):
                raise ValueError(f"prompt {n} is empty; it needs at least the start sign")
            if not 0 <= min(prompt) <= max(prompt) < self.vocabulary:
                raise ValueError(
                    f"prompt {n} ({shown(list(prompt))}) must hold tokens from 0 to "
                    f"{self.vocabulary - 1}"
                )
        counts = torch.tensor([len(prompt) - 1 for prompt in prompts]).long()
        if most := int(counts.max()) if len(counts) else 0:
            padded = [[*prompt[:-1], *[0] * (most + 1 - len(prompt))] for prompt in prompts]
            self.prefill(torch.tensor(padded, device=self.device), counts)
        return torch.tensor([prompt[-1] for prompt in prompts], device=self.device).long()

    def run(self, search: Search) -> None:
        """Takes steps until all sentences are over."""
        while True:
            self.advance(search)
            over = search.over.tolist()  # all that a step waits for
            if all(over):
                return
            kept = [n for n, done in enumerate(over) if not done]
            # While few have finished, moving the others would cost more than it saves.
            if self.shrinks and 4 * len(kept) <= 3 * len(over):
                search.select(torch.tensor(kept))

    def _chosen(self, rows: Int[Tensor, "R"]) -> Int[Tensor, "R"]:
        """Rows as integers; those that the host knows must be there."""
        rows = integer_tensor(rows, "rows")
        if on_host(rows) and rows.numel():
            low, high = int(rows.min()), int(rows.max())
            if low < 0 or high >= self.rows:
                raise ValueError(
                    f"rows ({shown(rows)}) must lie from 0 to {self.rows - 1}: the session has "
                    f"{self.rows} rows"
                )
        return rows

    def _check(self, tokens: Tensor) -> None:
        if len(tokens) != self.rows:
            raise ValueError(
                f"tokens of {len(tokens)} rows for a session of {self.rows}; select() them first"
            )

    def __enter__(self) -> "Session":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
