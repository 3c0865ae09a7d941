"""Experiments performed: one here and now, or many in processes of their own.

A process has one thread and one experiment at a time. Whatever goes wrong in an experiment, be it
an exception or the end of its process, is a `Failure` of that experiment, and the others go on.
"""

import multiprocessing
import signal
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TypeAlias

from regard.lab.claims import Family, lines
from regard.lab.experiment import Experiment, Finding


@dataclass(frozen=True)
class Result:
    """An experiment and its finding."""

    experiment: Experiment
    finding: Finding
    seconds: float


@dataclass(frozen=True)
class Failure:
    """An experiment that came to no end."""

    experiment: Experiment
    reason: str

    def __str__(self) -> str:
        return f"{self.experiment.name} failed: {self.reason}"


Found: TypeAlias = tuple[Finding, float] | str
"""What a process sends back: the finding and its seconds, or the reason why there is none."""


def perform(experiment: Experiment) -> Result:
    """Runs one experiment here."""
    start = time.perf_counter()
    finding = experiment.run()
    return Result(experiment, finding, time.perf_counter() - start)


def by_family(results: Sequence[Result]) -> list[tuple[Family, list[Result]]]:
    """Results beside the family that they belong to; families without any are left out."""
    found = {result.experiment.name: result for result in results}
    grouped = [
        (family, [found[line.name] for line in some if line.name in found])
        for family, some in lines().items()
    ]
    return [(family, some) for family, some in grouped if some]


def perform_all(experiments: Sequence[Experiment], processes: int) -> Iterator[Result | Failure]:
    """Runs experiments of `claims` in so many processes; gives results back as they come.

    What trains begins first, because it ends last. Processes end with the iterator, also where
    it is left early.
    """
    waiting = sorted(experiments, key=lambda experiment: not experiment.trained)
    # Spawned, not forked: torch's threads do not survive a fork.
    context = multiprocessing.get_context("spawn")
    working: dict[Connection, tuple[BaseProcess, Experiment]] = {}

    def start(experiment: Experiment) -> None:
        here, there = context.Pipe()
        process = context.Process(target=_work, args=(there,), daemon=True)
        process.start()
        # Only the process may hold the other end: it is closed by its end.
        there.close()
        give(here, process, experiment)

    def give(pipe: Connection, process: BaseProcess, experiment: Experiment) -> None:
        working[pipe] = process, experiment
        pipe.send(experiment.name)

    try:
        while waiting or working:
            while waiting and len(working) < processes:
                start(waiting.pop(0))
            for pipe in wait(list(working)):
                assert isinstance(pipe, Connection)
                process, experiment = working[pipe]
                try:
                    found: Found = pipe.recv()
                except (EOFError, OSError):
                    process.join()
                    del working[pipe]
                    found = f"its process ended with status {process.exitcode}"
                else:
                    if waiting:
                        give(pipe, process, waiting.pop(0))
                    else:
                        del working[pipe]
                        pipe.close()
                if isinstance(found, str):
                    yield Failure(experiment, found)
                else:
                    yield Result(experiment, *found)
    finally:
        for process, _ in working.values():
            process.terminate()
        for process, _ in working.values():
            process.join()


def _work(pipe: Connection) -> None:
    """A process: experiments' names come in, what was found goes out, until nobody asks."""
    # Ctrl-C reaches every process of a terminal; the one that started this one ends it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    import torch

    from regard.lab.claims import find

    torch.set_num_threads(1)
    while True:
        try:
            name = pipe.recv()
        except EOFError:
            return
        found: Found
        try:
            result = perform(*find(name))
            found = result.finding, result.seconds
        except Exception as error:
            found = reason(error)
        pipe.send(found)


def reason(error: Exception) -> str:
    """An exception in one line, with the place it came from."""
    frames = traceback.extract_tb(error.__traceback__)
    inside = [frame for frame in frames if "/claims/" in Path(frame.filename).as_posix()]
    place = (inside or frames)[-1]
    said = " ".join(str(error).split())
    return f"{type(error).__name__}: {said} ({Path(place.filename).name}, line {place.lineno})"
