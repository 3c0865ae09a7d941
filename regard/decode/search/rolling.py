"""Searches in which every sentence has its own step count, and can join and leave at any step.

    place = search.add(most, index)                     room for a sentence
    last, rows = session.roll(search, places, last)     one more token for every row of these
    search.over(place)                                  True once the search has ended
    search.hypotheses(place)                            its results
    search.stable_prefix(place)                         tokens that can no longer change

`greedy`, `beam` and `sample` take the same step for all sentences at once. The results are
identical.

State is in NumPy: a step has a few hundred numbers, for which torch's calls are slower.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from regard.decode.engine.session import Chooser, Integers
from regard.decode.search.beam import Penalty, hypotheses, penalties
from regard.decode.search.constraints import Constraints
from regard.decode.search.hypothesis import Hypothesis
from regard.decode.search.sample import draw, log_probabilities, uniforms

Floats: TypeAlias = NDArray[Any]


@dataclass(frozen=True)
class Sampling:
    """Sampling settings; a temperature of 0 takes the most likely token."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0


GREEDY = Sampling()


class _Places:
    """Arrays with a place for each sentence; they grow when all places are in use."""

    GROWING: tuple[str, ...]
    """Arrays whose first axis is places."""
    HISTORIES: tuple[str, ...]
    """Arrays among these whose second axis is steps."""

    def __init__(self) -> None:
        self._free: list[int] = []
        self.t: Integers = np.zeros(0, np.int64)
        self.most: Integers = np.zeros(0, np.int64)
        self.done = np.zeros(0, bool)

    def add(self, most: int, index: int) -> int:
        if not self._free:
            size = len(self.t)
            self._free = list(range(2 * size + 7, size - 1, -1))
            for name in ("t", "most", "done", *self.GROWING):
                array = getattr(self, name)
                more = np.zeros((size + 8, *array.shape[1:]), array.dtype)
                setattr(self, name, np.concatenate((array, more)))
        place = self._free.pop()
        self.t[place], self.most[place], self.done[place] = 0, most, False
        return place

    def remove(self, place: int) -> None:
        self._free.append(place)

    def over(self, place: int) -> bool:
        return bool(self.done[place])

    def fit(self, steps: int) -> None:
        """Makes room for `steps` steps."""
        while steps > getattr(self, self.HISTORIES[0]).shape[1]:
            for name in self.HISTORIES:
                array = getattr(self, name)
                setattr(self, name, np.concatenate((array, np.zeros_like(array)), 1))


class RollingPaths(_Places):
    """One path for each sentence: greedy search, or sampling."""

    width = 1
    GROWING = HISTORIES = "tokens", "scores"

    def __init__(self, rule: Constraints, sampling: Sampling = GREEDY):
        super().__init__()
        self.rule, self.sampling = rule, sampling
        self.tokens = np.zeros((0, 32), np.int64)
        self.scores = np.zeros((0, 32), np.float64)
        self._dice: dict[int, Floats] = {}

    def add(self, most: int, index: int) -> int:
        place = super().add(most, index)
        if self.sampling.temperature > 0:
            self._dice[place] = uniforms(self.sampling.seed, [index], most)[0]
        return place

    def extend(
        self, places: Integers, logits: Float[Tensor, "R N"], best: Chooser
    ) -> tuple[Integers, Integers]:
        t = self.t[places]
        if self.sampling.temperature > 0:
            logs = log_probabilities(logits, self.rule, 0)
            dice = [self._dice[place][n] for place, n in zip(places.tolist(), t.tolist())]
            how = (self.sampling.temperature, self.sampling.top_k, self.sampling.top_p)
            drawn = draw(logs, torch.tensor(dice, device=logs.device), *how)
            scores = logs.gather(1, drawn[:, None])[:, 0]
        else:
            scores, drawn = (column[:, 0] for column in best(logits, 1, self.rule, 0))
        chosen = drawn.cpu().numpy()
        self.fit(int(t.max()) + 1)
        self.tokens[places, t], self.scores[places, t] = chosen, scores.double().cpu().numpy()
        self.t[places] += 1
        undefined = np.isnan(self.scores[places, t])  # its Hypothesis raises
        self.done[places] = (chosen == self.rule.end) | (t + 1 >= self.most[places]) | undefined
        return chosen, np.arange(len(places))

    def stable_prefix(self, place: int) -> list[int]:
        tokens: list[int] = self.tokens[place, : self.t[place]].tolist()
        return tokens[:-1] if tokens and tokens[-1] == self.rule.end else tokens

    def hypotheses(self, place: int) -> list[Hypothesis]:
        scores: list[float] = self.scores[place, : self.t[place]].tolist()
        return [Hypothesis(self.stable_prefix(place), math.fsum(scores), scores)]


class RollingBeams(_Places):
    """The W best open hypotheses of each sentence, and the K best of its finished ones.

    The arrays are those of `beam.Beams`, with places as the first axis.
    """

    FINISHED = "scores", "ends", "lengths", "slots", "cut"
    HISTORIES = "parents", "tokens", "gains"
    GROWING = ("open", *HISTORIES, *FINISHED)

    def __init__(
        self,
        rule: Constraints,
        width: int,
        n_best: int,
        penalty: Penalty,
        longest: int,
        horizon: int | None = None,
    ):
        super().__init__()
        self.rule, self.width, self.n_best = rule, width, n_best
        self.horizon = longest if horizon is None else horizon
        table = [1.0, *penalties(penalty, longest), 1.0]
        self.penalty = np.array(table, np.float32)
        self.open = np.zeros((0, width), np.float32)
        self.parents = np.zeros((0, 32, width), np.int64)
        self.tokens = np.zeros((0, 32, width), np.int64)
        self.gains = np.zeros((0, 32, width), np.float32)
        self.scores = np.zeros((0, n_best), np.float32)
        self.ends = np.zeros((0, n_best), np.float32)
        self.lengths = np.zeros((0, n_best), np.int64)
        self.slots = np.zeros((0, n_best), np.int64)
        self.cut = np.zeros((0, n_best), bool)

    def add(self, most: int, index: int) -> int:
        place = super().add(most, index)
        self.open[place], self.scores[place] = 0.0, -math.inf
        return place

    def extend(
        self, places: Integers, logits: Float[Tensor, "R N"], best: Chooser
    ) -> tuple[Integers, Integers]:
        B, W, t = len(places), self.width, self.t[places]
        w = len(logits) // B
        gain, token = (
            x.float().cpu().numpy() if x.is_floating_point() else x.cpu().numpy()
            for x in best(logits, 2 * W, self.rule, 0)
        )
        undefined = np.isnan(gain).reshape(B, -1).any(1)
        gain = np.where(np.isnan(gain), np.float32(-math.inf), gain)
        k = gain.shape[1]
        total = (gain.reshape(B, w, k) + self.open[places, :w, None]).reshape(B, w * k)
        if (missing := 2 * W - w * k) > 0:
            total = np.pad(total, ((0, 0), (0, missing)), constant_values=-math.inf)
        index = np.argsort(-total, axis=1, kind="stable")[:, : 2 * W]
        total = np.take_along_axis(total, index, 1)
        index = np.minimum(index, w * k - 1)
        gain, token = (np.take_along_axis(x.reshape(B, -1), index, 1) for x in (gain, token))
        parent, ended, full = index // k, token == self.rule.end, t + 1 >= self.most[places]

        self._finish(places, total / self.penalty[t + 1][:, None], gain, parent, ended, full)

        going = np.argsort(ended, axis=1, kind="stable")[:, :W]
        total = np.where(ended, np.float32(-math.inf), total)
        open_, gain, parent, token = (
            np.take_along_axis(x, going, 1) for x in (total, gain, parent, token)
        )
        self.fit(int(t.max()) + 1)
        self.open[places] = open_
        self.parents[places, t], self.tokens[places, t], self.gains[places, t] = parent, token, gain
        with np.errstate(divide="ignore", invalid="ignore"):
            future = open_.max(1) / self._largest(t + 2, self.most[places])
        self.done[places] = full | (self.scores[places, -1] >= future) | undefined
        self.scores[places[undefined]] = math.nan  # its Hypothesis raises
        self.t[places] += 1
        rows = parent + w * np.arange(B)[:, None]
        return token.reshape(-1), rows.reshape(-1)

    def _largest(self, n: Integers, most: Integers) -> Floats:
        """The largest lp from n tokens to the horizon; 0 beyond the maximum length."""
        grows = self.penalty[-2] >= self.penalty[1]
        at = np.minimum(most, n + self.horizon) if grows else n
        return np.where(n <= most, self.penalty[np.minimum(at, len(self.penalty) - 1)], 0.0)

    def _finish(
        self,
        places: Integers,
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
        t = self.t[places][:, None]
        new = {
            "scores": np.where(final, score, np.float32(-math.inf)),
            "ends": gain,
            "lengths": np.where(ended, t, t + 1),
            "slots": np.where(ended, parent, np.cumsum(~ended, 1) - 1),
            "cut": ~ended,
        }
        both = {
            name: np.concatenate((getattr(self, name)[places], x), 1) for name, x in new.items()
        }
        order = np.argsort(-both["scores"], axis=1, kind="stable")[:, : self.n_best]
        for name, x in both.items():
            getattr(self, name)[places] = np.take_along_axis(x, order, 1)

    def stable_prefix(self, place: int) -> list[int]:
        """The common prefix of all hypotheses, open or finished, and so of the result."""
        ends = [
            *(
                (end, int(self.t[place]))
                for end, log in enumerate(self.open[place])
                if log > -math.inf
            ),
            *(
                (int(end), int(length))
                for end, length, score in zip(
                    self.slots[place], self.lengths[place], self.scores[place]
                )
                if score > -math.inf
            ),
        ]
        paths = [self._path(place, *end)[0] for end in ends] if self.t[place] else []
        # The common prefix of the first and the last in alphabetical order is that of all.
        first, last = min(paths, default=[]), max(paths, default=[])
        same = next((n for n, (a, b) in enumerate(zip(first, last)) if a != b), len(first))
        return first[:same]

    def hypotheses(self, place: int) -> list[Hypothesis]:
        ends = zip(self.slots[place].tolist(), self.lengths[place].tolist())
        paths = [self._path(place, *end) for end in ends]
        columns: Sequence[Sequence[Any]] = [
            *(getattr(self, name)[place].tolist() for name in ("scores", "ends", "lengths", "cut")),
            [tokens for tokens, _ in paths],
            [gains for _, gains in paths],
        ]
        return hypotheses(columns)

    def _path(self, place: int, end: int, length: int) -> tuple[list[int], list[float]]:
        """The tokens of an open hypothesis of `length` steps, and their log p."""
        tokens, gains = [], []
        for step in range(length - 1, -1, -1):
            tokens.append(int(self.tokens[place, step, end]))
            gains.append(float(self.gains[place, step, end]))
            end = int(self.parents[place, step, end])
        return tokens[::-1], gains[::-1]
