"""What the lab's commands do with experiments: perform them in order, and give them as JSON."""

import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

from regard.lab.experiment import Experiment, Measured
from regard.lab.perform import Failure, Result, perform, perform_all, reason

PROCESSES = 2
"""For many experiments; each has one thread."""
WIDTH = 120
"""Columns of a listing that goes to a file."""


def perform_chosen(chosen: Sequence[Experiment]) -> tuple[list[Result], list[Failure]]:
    """Runs experiments, many of them in processes, and gives results in the order asked for."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    outcomes: list[Result | Failure] = []
    columns = (
        TextColumn("   {task.description:<24}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    console = Console(stderr=True)
    bar = Progress(*columns, console=console, transient=True)
    # Not `disable`: before rich 14.3 a bar so disabled still ends with an empty line.
    with bar if console.is_terminal else nullcontext():
        if len(chosen) < 2 * PROCESSES:
            task = bar.add_task("", total=len(chosen))
            for experiment in chosen:
                bar.update(task, description=experiment.name)
                outcomes.append(_performed(experiment))
                bar.update(task, advance=1)
        else:
            task = bar.add_task("the first ones", total=len(chosen))
            for outcome in perform_all(chosen, PROCESSES):
                bar.update(task, advance=1, description=outcome.experiment.name)
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
