"""Batches in their order, from wherever a run is, made ahead of time in a thread.

Which examples a step sees follows from (seed, epoch, position) alone, whatever the number of
processes and of parts; so a run can go on from any position, on any number of processes.
"""

import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np

from regard.train.config import TrainingConfig
from regard.train.distributed import World
from regard.train.state import State

T = TypeVar("T")
AHEAD = 2
"""Steps whose batches are made before they are wanted."""


class Source(Protocol):
    """Where batches come from: a task."""

    def plan(self, epoch: int) -> list[np.ndarray]: ...

    def batch(self, indices: np.ndarray, step: int) -> Any: ...


@dataclass(frozen=True)
class Part:
    """What a process computes at once."""

    batch: Any
    counts: bool
    """False for an example that is there only because processes wait for each other, and one of
    them has nothing left to do."""


@dataclass(frozen=True)
class Fed:
    """A step's batch, as one process sees it."""

    epoch: int
    position: int
    parts: list[Part]


def feed(source: Source, config: TrainingConfig, world: World, state: State) -> Iterator[Fed]:
    """The batches from where a run is to its last step, or its last epoch."""
    return ahead(_steps(source, config, world, state.step, state.epoch, state.position))


def _steps(
    source: Source, config: TrainingConfig, world: World, step: int, epoch: int, position: int
) -> Iterator[Fed]:
    while config.epochs is None or epoch < config.epochs:
        plan = source.plan(epoch)
        if not plan:
            raise ValueError(f"epoch {epoch} has no batch; there must be data to train on")
        for at in range(position, len(plan)):
            if config.steps is not None and step >= config.steps:
                return
            step += 1
            parts = [
                Part(source.batch(own if len(own) else plan[at][:1], step), len(own) > 0)
                for own in share(plan[at], world.rank, world.size, config.accumulate)
            ]
            yield Fed(epoch, at, parts)
        epoch, position = epoch + 1, 0


def share(indices: np.ndarray, rank: int, world: int, accumulate: int) -> list[np.ndarray]:
    """What one of `world` processes takes of a batch, in `accumulate` parts; some may be empty."""
    parts = np.array_split(indices, world * accumulate)
    return parts[rank * accumulate : (rank + 1) * accumulate]


def ahead(items: Iterator[T], count: int = AHEAD) -> Iterator[T]:
    """The same items, made in a thread while the last ones are still in use."""
    ready: queue.Queue[tuple[T | None, BaseException | None]] = queue.Queue(count)
    left = threading.Event()

    def put(item: T | None, error: BaseException | None = None) -> bool:
        while not left.is_set():
            try:
                ready.put((item, error), timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def work() -> None:
        try:
            for item in items:
                if not put(item):
                    return
            put(None)
        except BaseException as error:
            put(None, error)

    worker = threading.Thread(target=work, name="batches", daemon=True)
    worker.start()
    try:
        while True:
            item, error = ready.get()
            if error is not None:
                raise error
            if item is None:
                return
            yield item
    finally:
        left.set()
        worker.join()
