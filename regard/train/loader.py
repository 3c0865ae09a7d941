"""The data loader: batches in their order, from any step on, made ahead of time in pinned memory.

Which examples a step sees follows from (seed, epoch, position) alone, whatever the number of
processes and of micro-batches. So a run can resume at any position, on any number of processes.
"""

from collections.abc import Generator, Iterator
from dataclasses import dataclass
from itertools import tee
from typing import Any

import numpy as np

from regard.data.batch import Sizes, Tensors, share
from regard.data.workers import prefetch
from regard.train.config import TrainingConfig
from regard.train.distributed import World
from regard.train.state import State
from regard.train.task import Task

AHEAD = 2
"""Steps whose batches are made ahead of time."""


@dataclass(frozen=True)
class MicroBatch:
    """What a process computes at once; with `accumulate`, a step has several."""

    batch: Any
    counts: bool
    """False for an example that is there only because processes wait for each other, and this one
    has nothing left to do."""
    filled: bool = False
    """Whether it has the size of all others."""


@dataclass(frozen=True)
class StepBatch:
    """A step's batch, as one process sees it."""

    epoch: int
    position: int
    parts: list[MicroBatch]


@dataclass(frozen=True)
class _Planned:
    step: int
    epoch: int
    position: int
    indices: list[np.ndarray]
    counts: list[bool]


def batches(
    task: Task, config: TrainingConfig, world: World, state: State, size: Sizes | None = None
) -> Generator[StepBatch, None, None]:
    """The batches from where a run is to its last step, or its last epoch.

    With a `size`, those that fit are filled up to it.
    """

    def make(part: tuple[np.ndarray, int]) -> tuple[Any, bool]:
        batch = task.batch(*part)
        if not isinstance(batch, Tensors):
            return batch, False
        filled = None if size is None else batch.fill(size)
        return (filled or batch).pin(), filled is not None

    steps, again = tee(_planned(task, config, world, state.step, state.epoch, state.position))
    wanted = ((indices, planned.step) for planned in again for indices in planned.indices)
    made = prefetch(make, wanted, ahead=AHEAD * config.accumulate)
    for now in steps:
        parts = []
        for counts in now.counts:
            batch, filled = next(made)
            parts.append(MicroBatch(batch, counts, filled))
        yield StepBatch(now.epoch, now.position, parts)


def _planned(
    task: Task, config: TrainingConfig, world: World, step: int, epoch: int, position: int
) -> Iterator[_Planned]:
    while config.epochs is None or epoch < config.epochs:
        plan = task.plan(epoch)
        if not plan:
            raise ValueError(f"epoch {epoch} has no batch; there must be data to train on")
        for at in range(position, len(plan)):
            if config.steps is not None and step >= config.steps:
                return
            step += 1
            parts = share(plan[at], world.rank, world.size, config.accumulate)
            indices = [part if len(part) else plan[at][:1] for part in parts]
            yield _Planned(step, epoch, at, indices, [len(part) > 0 for part in parts])
        epoch, position = epoch + 1, 0
