"""Performs experiments: one in this process, or many in worker processes.

A worker has one thread and one experiment at a time. An exception, or the death of the worker, is
a `Failure` of that experiment alone; the others continue.
"""

import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from regard.data.workers import completed
from regard.lab.claims import Family, find, lines
from regard.lab.experiment import Experiment, Finding


@dataclass(frozen=True)
class Result:
    """An experiment and its finding."""

    experiment: Experiment
    finding: Finding
    seconds: float

    @property
    def conclusion(self) -> str:
        """What is true, as the finding says it."""
        return self.finding.conclusion


@dataclass(frozen=True)
class Failure:
    """An experiment that did not finish, and the reason."""

    experiment: Experiment
    reason: str

    def __str__(self) -> str:
        return f"{self.experiment.name} failed: {self.reason}"


Outcome: TypeAlias = tuple[Finding, float] | str
"""What a worker sends back: the finding and its seconds, or the reason why there is none."""


def one_thread() -> AbstractContextManager[None]:
    """The lab's problems are small: a second thread would wait for the first after every operation,
    and on a busy machine for another process."""
    from regard.machine.threads import (
        limited,  # imports torch, which the list of experiments does without
    )

    return limited(1)


def perform(experiment: Experiment) -> Result:
    """Runs one experiment in this process."""
    start = time.perf_counter()
    with one_thread():
        finding = experiment.run()
    return Result(experiment, finding, time.perf_counter() - start)


def by_family(results: Sequence[Result]) -> list[tuple[Family, list[Result]]]:
    """Results grouped by family; families without any are left out."""
    by_name = {result.experiment.name: result for result in results}
    grouped = [
        (family, [by_name[line.name] for line in some if line.name in by_name])
        for family, some in lines().items()
    ]
    return [(family, some) for family, some in grouped if some]


def perform_all(experiments: Sequence[Experiment], processes: int) -> Iterator[Result | Failure]:
    """Runs experiments of `claims` in worker processes, and gives results as they come.

    Those that train models start first, because they take longest. The workers end with the
    iterator, even if it is closed early.
    """
    by_name = {experiment.name: experiment for experiment in experiments}
    names = sorted(by_name, key=lambda name: not by_name[name].trained)
    with closing(completed(_work, None, names, processes)) as outcomes:
        for name, outcome in outcomes:
            if isinstance(outcome, tuple):
                yield Result(by_name[name], *outcome)
            else:
                yield Failure(by_name[name], str(outcome))


def _work(_: None, name: str) -> Outcome:
    """Runs one experiment in a worker; the reason is found here, where the traceback is."""
    try:
        result = perform(*find(name))
        return result.finding, result.seconds
    except Exception as error:
        return reason(error)


def reason(error: Exception) -> str:
    """An exception in one line, with file and line number."""
    frames = traceback.extract_tb(error.__traceback__)
    inside = [frame for frame in frames if "/claims/" in Path(frame.filename).as_posix()]
    place = (inside or frames)[-1]
    message = " ".join(str(error).split())
    return f"{type(error).__name__}: {message} ({Path(place.filename).name}, line {place.lineno})"
