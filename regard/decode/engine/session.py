"""A session: the interface between search and model.

    last = session.begin(prompts)        reads all of each prompt but its last token
    logits = session.step(last)          one token of every row in, logits of the next out
    session.select(rows)                 row r continues what row rows[r] has been
    session.join(other)                  rows of another session follow
    session.run(search)                  steps of both, until the search is over
    session.roll(search, places, last)   a step of both, of sentences at steps of their own

Rows may have different lengths. Logits belong to the caller: no later step overwrites them. A
search is data and a pure function of logits (`Paths`, `Beams`), so that an engine can take several
of its steps at once; results do not depend on the engine.
"""

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Protocol, TypeAlias, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor

from regard.attention.checks import integer_tensor, shown
from regard.attention.sync import on_host
from regard.decode.search.constraints import Constraints
from regard.decode.search.hypothesis import Hypothesis
from regard.decode.search.topk import Best, best

Integers: TypeAlias = NDArray[np.int64]
Chooser: TypeAlias = Callable[..., Best]
"""A session's `best`."""


@runtime_checkable
class Search(Protocol):
    """A search, as a session sees it."""

    last: Int[Tensor, "R"]
    """The tokens that the next step reads."""
    rows: Int[Tensor, "R"] | None
    """The row that each row continues from there on; None where all continue themselves."""
    over: Bool[Tensor, "B"]
    """True for sentences whose search has ended."""

    def extend(self, logits: Float[Tensor, "R N"], best: Callable[..., Best]) -> None:
        """Adds a token to every row; `best` is the session's."""

    def select(self, sentences: Int[Tensor, "b"]) -> None:
        """Drops all other sentences."""


@runtime_checkable
class Rolling(Protocol):
    """A search in which sentences join and leave at any step: see `search.rolling`."""

    width: int
    """Rows of a sentence after its first step, at which it has one."""

    def add(self, most: int, index: int) -> int:
        """A place for a sentence of at most `most` tokens, which draws from (seed, index)."""

    def remove(self, place: int) -> None: ...

    def extend(
        self, places: Integers, logits: Float[Tensor, "R N"], best: Chooser
    ) -> tuple[Integers, Integers]:
        """The next token of each row of these sentences, and the row that it continues.

        The rows of a sentence are consecutive: one at its first step, then `width`.
        """

    def over(self, place: int) -> bool: ...

    def hypotheses(self, place: int) -> list[Hypothesis]: ...

    def stable_prefix(self, place: int) -> list[int]: ...


@runtime_checkable
class Attentive(Protocol):
    """A session that also has the attention weights of the last step, for a coverage penalty."""

    attention: Float[Tensor, "R S"]
    """Attention weights of each row over its source; each row sums to 1."""
    real: Tensor
    """True for real source positions, False in padding; broadcasts to (R, S)."""


class Session:
    """Rows that are decoded together, and their KV cache.

    It belongs to its caller, and is used by one thread at a time. Any number of sessions of an
    engine may be open at once, in any threads.
    """

    rows: int
    vocabulary: int
    device: torch.device
    scores: torch.dtype = torch.float32
    """The dtype of sums of log p."""
    shrinks = True
    """True if steps are faster with fewer rows, so that finished sentences should leave."""
    cache_bytes = 0
    """Bytes of the KV cache for each position of a row; 0 if unknown."""

    # Defined by engines

    def prefill(self, tokens: Int[Tensor, "R n"], counts: Int[Tensor, "R"]) -> None:
        """Reads the first counts[r] tokens of row r, before its first step; none may be read."""
        raise NotImplementedError

    def step(self, tokens: Int[Tensor, "R"]) -> Float[Tensor, "R N"]:
        """Reads one token of every row."""
        raise NotImplementedError

    def select(self, rows: Int[Tensor, "R"]) -> None:
        """Keeps, drops, repeats or reorders rows.

        The tensor must be on the host if their number changes; otherwise nothing synchronises.
        """
        raise NotImplementedError

    def check_join(self, other: "Session") -> None:
        """Raises if the other session cannot join; changes nothing."""
        raise NotImplementedError

    def join(self, other: "Session") -> None:
        """Appends the rows of another session of the same engine, which is then used up.

        If `check_join` raises, both sessions stay as they were.
        """
        raise NotImplementedError

    def best(self, logits: Float[Tensor, "R N"], count: int, rule: Constraints, t: int) -> Best:
        return best(logits, count, rule, t)

    def advance(self, search: Search) -> None:
        """One step of model and search, or as many as can be taken without synchronising."""
        if search.rows is not None:
            self.select(search.rows)
        search.extend(self.step(search.last), self.best)

    def roll(
        self, search: Rolling, places: Integers, last: Integers, steps: int = 1
    ) -> tuple[Integers, Integers]:
        """One step of model and search, or up to `steps` where the engine can take them at once.

        A sentence at its first step has one row and takes one step; the others have all rows.
        `last` is the token that each row reads; returns the next one and the row it continues.
        """
        return search.extend(places, self.step(torch.from_numpy(last)), self.best)

    def close(self) -> None:
        """Frees the session's resources."""

    # Common to all

    def begin(self, prompts: Sequence[Sequence[int]]) -> Int[Tensor, "R"]:
        """Reads the prompts, one for each row, and gives the last token of each."""
        if len(prompts) != self.rows:
            raise ValueError(
                f"{len(prompts)} prompts for a session of {self.rows} rows; open it for as many "
                "sentences as there are prompts"
            )
        for n, prompt in enumerate(prompts):
            if not len(prompt):
                raise ValueError(f"prompt {n} is empty; it needs at least BOS")
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
        """Takes steps until all sentences have ended."""
        while True:
            self.advance(search)
            over = search.over.tolist()  # the only synchronisation of a step
            if all(over):
                return
            unfinished = [n for n, done in enumerate(over) if not done]
            # While few have finished, compacting the rows would cost more than it saves.
            if self.shrinks and 4 * len(unfinished) <= 3 * len(over):
                search.select(torch.tensor(unfinished))

    def _chosen(self, rows: Int[Tensor, "R"]) -> Int[Tensor, "R"]:
        """Rows as integers; those on the host are checked."""
        rows = integer_tensor(rows, "rows")
        if on_host(rows) and rows.numel():
            low, high = int(rows.min()), int(rows.max())
            if low < 0 or high >= self.rows:
                raise ValueError(
                    f"rows ({shown(rows)}) must lie from 0 to {self.rows - 1}: the session has "
                    f"{self.rows} rows"
                )
        return rows

    def _check(self, tokens: Tensor | Integers) -> None:
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
