"""How many of torch's threads a step on the CPU gets, of decoding or of training.

More threads are not always faster. A small step is over before a second one has begun; and on a
busy machine all of them wait, after every operation, for one that another process has preempted,
which takes milliseconds where the operation took microseconds.

So a small call begins with one thread, and others with all. Calls are timed, and now and then one
is tried with half as many threads, or with twice as many. The slower that was, the later the next
trial: together they take a few per cent of the time.
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

COST = 0.02
"""The share of the time that trials may take."""
FEW, MANY = 16, 2000
"""Calls between two trials."""
BETTER, SLOW = 0.9, 1.5
"""Multiples of the usual time: below the first a trial is followed, above the second fewer threads
are tried at once. Where all are so much slower than fewer, the machine is busy."""


SMALL = 40_000_000
"""Multiplications of a call, which one thread does in a few milliseconds."""


class Threads:
    """For calls that come again and again, such as the steps of a model of so many `weights`."""

    def __init__(
        self, clock: Callable[[], float] = time.perf_counter, weights: float | int = math.inf
    ):
        self._clock, self._weights = clock, weights
        self._choices: dict[tuple[int, int], Choice] = {}
        self._latest: Choice | None = None

    @contextmanager
    def shared(self, rows: int) -> Iterator[None]:
        """A call that computes so many rows, with as many threads as such calls have use for."""
        if (most := torch.get_num_threads()) == 1:
            yield
            return
        key = most, rows.bit_length()
        if key not in self._choices:
            self._choices[key] = Choice(most, count=1 if self._small(rows) else most)
        choice = self._choices[key]
        self._latest, count = choice, choice.next()
        with limited(count):
            begun = self._clock()
            yield
            choice.took(count, self._clock() - begun)

    @contextmanager
    def spared(self, rows: int) -> Iterator[None]:
        """A call that comes once: all threads, unless it is small, or the machine was busy."""
        most, latest = torch.get_num_threads(), self._latest
        fewer = latest.count if latest is not None and latest.crowded else most
        with limited(1 if self._small(rows) else min(most, fewer)):
            yield

    def _small(self, rows: int) -> bool:
        return rows * self._weights < SMALL


class Choice:
    """The number of threads of calls that take about equally long."""

    def __init__(
        self,
        most: int,
        *,
        count: int | None = None,
        cost: float = COST,
        few: int = FEW,
        many: int = MANY,
        first: int = FEW,
    ):
        """Begins with `count` threads, by default with the most. Trials take a share of `cost`,
        `few` to `many` calls apart; `first` is before them."""
        self.most, self.count = most, most if count is None else count
        self._cost, self._few, self._many = cost, few, many
        self.crowded = False
        self._last = self._now = self._usual = math.inf
        """Seconds: the last call, the faster of the last two, and calls before."""
        self._calls, self._wait = 0, first
        """Since the last trial, and until the next."""
        self._fewer = True
        """Whether the next one has half as many threads, where it may also have twice as many."""

    def next(self) -> int:
        """The number of threads of the next call."""
        slow = self._calls >= self._few and self._now > SLOW * self._usual
        if self._calls < self._wait and not (slow and self.count > 1):
            return self.count
        if self.count == self.most or (self.count > 1 and (slow or self._fewer)):
            return self.count // 2
        return min(2 * self.count, self.most)

    def took(self, count: int, seconds: float) -> None:
        if count != self.count:
            self._tried(count, seconds)
            return
        # What happens once says nothing: of two calls in a row, the faster one counts.
        self._now, self._last = min(seconds, self._last), seconds
        self._usual = self._now if self._calls < 2 else 0.9 * self._usual + 0.1 * self._now
        self._calls += 1

    def _tried(self, count: int, seconds: float) -> None:
        if self.most in (count, self.count):
            all_, fewer = (seconds, self._now) if count == self.most else (self._now, seconds)
            self.crowded = all_ > SLOW * fewer
        self._fewer = not self._fewer
        self._calls, self._wait = 0, self._few
        if seconds < BETTER * self._now:
            self.count, self._now, self._last = count, seconds, seconds
        else:
            wait = (seconds / self._now - 1) / self._cost
            self._wait = round(min(self._many, max(self._few, wait)))


@contextmanager
def limited(count: int) -> Iterator[None]:
    """With so many of torch's threads, and afterwards as many as before."""
    if count == (most := torch.get_num_threads()):
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(most)
