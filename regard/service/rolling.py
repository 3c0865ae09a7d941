"""Searches in which every sentence is at a step of its own, so that it can join and leave at any.

    slots = search.add(sentences)                room for each
    last, rows = search.extend(slots, logits)    one more token for every row of these
    search.over(slot)                            whether it has found what it looks for
    search.hypotheses(slot)                      what it has found
    search.settled(slot)                         tokens that can change no more, for streaming

`decode.search.greedy`, `beam` and `sample` take the same step for all sentences at once, and what
they find is what is found here, to the last bit. The model's step is for whoever has the session.

State is in NumPy: a step has a few hundred numbers, for which torch's calls take longer.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from regard.decode.search.beam import Penalty, hypotheses, penalties
from regard.decode.search.constraints import Constraints
from regard.decode.search.hypothesis import Hypothesis
from regard.decode.search.sample import draw, log_probabilities, uniforms
from regard.decode.search.topk import Best

Integers: TypeAlias = NDArray[np.int64]
Floats: TypeAlias = NDArray[Any]
Chooser: TypeAlias = Callable[..., Best]
"""A session's `best`."""


@runtime_checkable
class Rolling(Protocol):
    """A search, as a batch sees it."""

    width: int
    """Rows of a sentence after its first step, at which it has one."""

    def add(self, most: int, index: int) -> int:
        """A slot for a sentence of at most so many tokens, which draws from (seed, index)."""

    def remove(self, slot: int) -> None: ...

    def extend(
        self, slots: Integers, logits: Float[Tensor, "R N"], best: Chooser
    ) -> tuple[Integers, Integers]:
        """From logits of these sentences' rows, their next tokens, and the row that each continues.

        A sentence's rows stand one after the other: one at its first step, then `width`.
        """

    def over(self, slot: int) -> bool: ...

    def hypotheses(self, slot: int) -> list[Hypothesis]: ...

    def settled(self, slot: int) -> list[int]: ...


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn; a temperature of 0 takes the likeliest."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0


GREEDY = Sampling()


@dataclass
class _Path:
    most: int
    dice: Floats | None
    tokens: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    over: bool = False


class RollingPaths:
    """One path for each sentence: greedy search, or sampling."""

    width = 1

    def __init__(self, rule: Constraints, sampling: Sampling = GREEDY):
        self.rule, self.sampling = rule, sampling
        self._paths: dict[int, _Path] = {}

    def add(self, most: int, index: int) -> int:
        slot = next(n for n in range(len(self._paths) + 1) if n not in self._paths)
        dice = None
        if self.sampling.temperature > 0:
            dice = uniforms(self.sampling.seed, [index], most)[0]
        self._paths[slot] = _Path(most, dice)
        return slot

    def remove(self, slot: int) -> None:
        del self._paths[slot]

    def extend(
        self, slots: Integers, logits: Float[Tensor, "R N"], best: Chooser
    ) -> tuple[Integers, Integers]:
        paths = [self._paths[slot] for slot in slots.tolist()]
        if self.sampling.temperature > 0:
            logs = log_probabilities(logits, self.rule, 0)
            dice = [path.dice[len(path.tokens)] for path in paths if path.dice is not None]
            how = (self.sampling.temperature, self.sampling.top_k, self.sampling.top_p)
            chosen = draw(logs, torch.tensor(dice, device=logs.device), *how)
            scores = logs.gather(1, chosen[:, None])[:, 0]
        else:
            scores, chosen = (column[:, 0] for column in best(logits, 1, self.rule, 0))
        for path, token, score in zip(paths, chosen.tolist(), scores.double().tolist()):
            path.tokens.append(token)
            path.scores.append(score)
            path.over = token == self.rule.end or len(path.tokens) >= path.most
        return chosen.cpu().numpy(), np.arange(len(slots))

    def over(self, slot: int) -> bool:
        return self._paths[slot].over

    def settled(self, slot: int) -> list[int]:
        tokens = self._paths[slot].tokens
        return tokens[:-1] if tokens and tokens[-1] == self.rule.end else list(tokens)

    def hypotheses(self, slot: int) -> list[Hypothesis]:
        scores = self._paths[slot].scores
        return [Hypothesis(self.settled(slot), math.fsum(scores), scores)]


class RollingBeams:
    """The W best open hypotheses of each sentence, and the K best of its finished ones.

    What each array holds is said in `decode.search.beam.Beams`; here the first axis is slots.
    """

    def __init__(
        self,
        rule: Constraints,
        width: int,
        n_best: int,
        penalty: Penalty,
        longest: int,
        horizon: int | None = None,
    ):
        self.rule, self.width, self.n_best = rule, width, n_best
        self.horizon = longest if horizon is None else horizon
        table = [1.0, *penalties(penalty, longest), 1.0]
        self.penalty = np.array(table, np.float32)
        self._free: list[int] = []
        self.t = np.zeros(0, np.int64)
        self.most = np.zeros(0, np.int64)
        self.done = np.zeros(0, bool)
        self.open = np.zeros((0, width), np.float32)
        self.parents = np.zeros((0, 32, width), np.int32)
        self.tokens = np.zeros((0, 32, width), np.int64)
        self.gains = np.zeros((0, 32, width), np.float32)
        self.scores = np.zeros((0, n_best), np.float32)
        self.ends = np.zeros((0, n_best), np.float32)
        self.lengths = np.zeros((0, n_best), np.int64)
        self.slots = np.zeros((0, n_best), np.int64)
        self.cut = np.zeros((0, n_best), bool)

    FINISHED = "scores", "ends", "lengths", "slots", "cut"
    HISTORIES = "parents", "tokens", "gains"

    def add(self, most: int, index: int) -> int:
        if not self._free:
            have = len(self.t)
            self._free = list(range(2 * have + 7, have - 1, -1))
            for name in ("t", "most", "done", "open", *self.HISTORIES, *self.FINISHED):
                array = getattr(self, name)
                more = np.zeros((have + 8, *array.shape[1:]), array.dtype)
                setattr(self, name, np.concatenate((array, more)))
        slot = self._free.pop()
        self.t[slot], self.most[slot], self.done[slot] = 0, most, False
        self.open[slot], self.scores[slot] = 0.0, -math.inf
        return slot

    def remove(self, slot: int) -> None:
        self._free.append(slot)

    def extend(
        self, slots: Integers, logits: Float[Tensor, "R N"], best: Chooser
    ) -> tuple[Integers, Integers]:
        B, W, t = len(slots), self.width, self.t[slots]
        w = len(logits) // B
        gain, token = (
            x.float().cpu().numpy() if x.is_floating_point() else x.cpu().numpy()
            for x in best(logits, 2 * W, self.rule, 0)
        )
        if np.isnan(gain).any():
            raise ValueError(
                "the logits were not finite; look for NaN in the weights and in the source, or "
                "use a wider dtype"
            )
        k = gain.shape[1]
        total = (gain.reshape(B, w, k) + self.open[slots, :w, None]).reshape(B, w * k)
        if (missing := 2 * W - w * k) > 0:
            total = np.pad(total, ((0, 0), (0, missing)), constant_values=-math.inf)
        index = np.argsort(-total, axis=1, kind="stable")[:, : 2 * W]
        total = np.take_along_axis(total, index, 1)
        index = np.minimum(index, w * k - 1)
        gain, token = (np.take_along_axis(x.reshape(B, -1), index, 1) for x in (gain, token))
        parent, ended, full = index // k, token == self.rule.end, t + 1 >= self.most[slots]

        self._finish(slots, total / self.penalty[t + 1][:, None], gain, parent, ended, full)

        going = np.argsort(ended, axis=1, kind="stable")[:, :W]
        total = np.where(ended, np.float32(-math.inf), total)
        open_, gain, parent, token = (
            np.take_along_axis(x, going, 1) for x in (total, gain, parent, token)
        )
        self._fit(int(t.max()) + 1)
        self.open[slots] = open_
        self.parents[slots, t], self.tokens[slots, t], self.gains[slots, t] = parent, token, gain
        with np.errstate(divide="ignore", invalid="ignore"):
            future = open_.max(1) / self._largest(t + 2, self.most[slots])
        self.done[slots] = full | (self.scores[slots, -1] >= future)
        self.t[slots] += 1
        rows = parent + w * np.arange(B)[:, None]
        return token.reshape(-1), rows.reshape(-1)

    def _largest(self, n: Integers, most: Integers) -> Floats:
        """The largest lp of n tokens, and of as many more as may be; 0 where there are none."""
        grows = self.penalty[-2] >= self.penalty[1]
        at = np.minimum(most, n + self.horizon) if grows else n
        return np.where(n <= most, self.penalty[np.minimum(at, len(self.penalty) - 1)], 0.0)

    def _finish(
        self,
        slots: Integers,
        score: Floats,
        gain: Floats,
        parent: Integers,
        ended: NDArray[np.bool_],
        full: NDArray[np.bool_],
    ) -> None:
        """Keeps the best of those finished before and of those that end, or are cut, now."""
        final = ended | full[:, None]
        final[:, self.width :] = False
        if not final.any():
            return
        t = self.t[slots][:, None]
        new = {
            "scores": np.where(final, score, np.float32(-math.inf)),
            "ends": gain,
            "lengths": np.where(ended, t, t + 1),
            "slots": np.where(ended, parent, np.cumsum(~ended, 1) - 1),
            "cut": ~ended,
        }
        both = {name: np.concatenate((getattr(self, name)[slots], x), 1) for name, x in new.items()}
        order = np.argsort(-both["scores"], axis=1, kind="stable")[:, : self.n_best]
        for name, x in both.items():
            getattr(self, name)[slots] = np.take_along_axis(x, order, 1)

    def _fit(self, steps: int) -> None:
        """Has room for so many steps."""
        if steps > self.parents.shape[1]:
            for name in self.HISTORIES:
                array = getattr(self, name)
                setattr(self, name, np.concatenate((array, np.zeros_like(array)), 1))

    def over(self, slot: int) -> bool:
        return bool(self.done[slot])

    def settled(self, slot: int) -> list[int]:
        """What all hypotheses begin with, open or finished: whichever wins, it does too."""
        ends = [
            *(
                (end, int(self.t[slot]))
                for end, log in enumerate(self.open[slot])
                if log > -math.inf
            ),
            *(
                (int(end), int(length))
                for end, length, score in zip(
                    self.slots[slot], self.lengths[slot], self.scores[slot]
                )
                if score > -math.inf
            ),
        ]
        paths = [self._path(slot, *end)[0] for end in ends] if self.t[slot] else []
        # In alphabetical order, what the first and the last have in common all have.
        first, last = min(paths, default=[]), max(paths, default=[])
        same = next((n for n, (a, b) in enumerate(zip(first, last)) if a != b), len(first))
        return first[:same]

    def hypotheses(self, slot: int) -> list[Hypothesis]:
        ends = zip(self.slots[slot].tolist(), self.lengths[slot].tolist())
        paths = [self._path(slot, *end) for end in ends]
        columns: Sequence[Sequence[Any]] = [
            *(getattr(self, name)[slot].tolist() for name in ("scores", "ends", "lengths", "cut")),
            [tokens for tokens, _ in paths],
            [gains for _, gains in paths],
        ]
        return hypotheses(columns)

    def _path(self, slot: int, end: int, length: int) -> tuple[list[int], list[float]]:
        """The tokens of an open hypothesis of so many steps, and their log p."""
        tokens, gains = [], []
        for place in range(length - 1, -1, -1):
            tokens.append(int(self.tokens[slot, place, end]))
            gains.append(float(self.gains[slot, place, end]))
            end = int(self.parents[slot, place, end])
        return tokens[::-1], gains[::-1]
