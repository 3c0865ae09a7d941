"""What the lab's commands do with experiments: perform them in order, and give them as JSON."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from regard.lab.experiment import Experiment, Measured
from regard.lab.perform import Failure, Result, perform, perform_all, reason

PROCESSES = 2
"""For many experiments; each has one thread."""
WIDTH = 120
"""Columns of a listing that goes to a file."""


@contextmanager
def progress(total: int) -> Iterator[Callable[[str, int], None]]:
    """A line on a terminal, and nothing elsewhere: what is at work, and how many are done.

    Called with a name, and with by how many more are done.
    """
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        SpinnerColumn,
        TextColumn,
        TimeElapsedColumn,
    )

    console = Console(stderr=True)
    if not console.is_terminal or total == 0:
        yield lambda name, done: None
        return
    columns = (
        SpinnerColumn("line"),
        TextColumn("{task.description:<24}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda name, done: bar.update(task, description=name, advance=done)


def perform_chosen(chosen: Sequence[Experiment]) -> tuple[list[Result], list[Failure]]:
    """Runs experiments, many of them in processes, and gives results in the order asked for."""
    outcomes: list[Result | Failure] = []
    with progress(len(chosen)) as tell:
        if len(chosen) < 2 * PROCESSES:
            for experiment in chosen:
                tell(experiment.name, 0)
                outcomes.append(_performed(experiment))
                tell(experiment.name, 1)
        else:
            tell("the first ones", 0)
            for outcome in perform_all(chosen, PROCESSES):
                tell(outcome.experiment.name, 1)
                outcomes.append(outcome)
    order = {experiment.name: place for place, experiment in enumerate(chosen)}
    outcomes.sort(key=lambda outcome: order[outcome.experiment.name])
    return (
        [outcome for outcome in outcomes if isinstance(outcome, Result)],
        [outcome for outcome in outcomes if isinstance(outcome, Failure)],
    )


def _performed(experiment: Experiment) -> Result | Failure:
    try:
        return perform(experiment)
    except Exception as error:
        return Failure(experiment, reason(error))


def as_entry(result: Result) -> dict[str, Any]:
    """One result for JSON: its texts, its place, its verdict and its measurements."""
    return {
        "item": result.experiment.item,
        "name": result.experiment.name,
        "place": {
            "document": result.experiment.place.document,
            "section": result.experiment.place.section,
        },
        "kind": result.experiment.kind,
        "taught": result.experiment.taught,
        "computed": result.experiment.method,
        "verdict": result.finding.verdict,
        "true": result.conclusion,
        "measurements": {
            name: finite(value) for name, value in result.finding.measurements.items()
        },
    }


def finite(value: Measured) -> Measured:
    """JSON has no infinities and no NaN: they become strings."""
    if isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return [finite(part) for part in value]
