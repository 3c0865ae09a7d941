"""`regard lab`: lists experiments, runs them, and shows what came out.

regard lab                          all experiments, a line each
regard lab NAME …                   runs some: names, items' numbers, or families
regard lab --all                    runs all, and ends with a table of the verdicts
regard lab [NAME …] --json          the same for other programs
regard lab [NAME …] --report FILE   the same as a page
regard lab NAME --plot FILE         its plots as an SVG
regard lab exercise NAME [FOLDER]   a notebook to fill in
"""

import json
import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from regard.lab.experiment import Experiment, Measured
from regard.lab.perform import Failure, Result, by_family, perform, perform_all, reason

if TYPE_CHECKING:
    from rich.console import Console

PROCESSES = 2
"""For many experiments; each has one thread."""


def lab(
    words: Sequence[str],
    *,
    everything: bool = False,
    as_json: bool = False,
    report: str | None = None,
    plot: str | None = None,
) -> int:
    """Runs the command and returns its exit status: 1 where an experiment failed."""
    if words and words[0] == "exercise":
        return _exercise(words[1:])
    if everything and words:
        raise ValueError(f"--all and {words[0]!r}: name some experiments, or ask for all of them")
    for name, path in (("--report", report), ("--plot", plot)):
        if path is not None and not Path(path).resolve().parent.is_dir():
            raise ValueError(f"{name} {path}: no folder {Path(path).resolve().parent}; make it")
    if plot is not None and not words:
        raise ValueError("--plot draws named experiments; for example regard lab cold-limit --plot")
    if not (words or everything or as_json or report):
        _list()
        return 0
    chosen, stated = _chosen(words)
    start = time.perf_counter()
    results, failures = _perform(chosen)
    seconds = time.perf_counter() - start
    for failure in failures:
        print(f"regard: {failure}", file=sys.stderr)
    if as_json:
        print(as_text(results))
    elif words:
        _show(results, stated)
    elif everything:
        _summarise(results, seconds)
    if report is not None:
        from regard.lab.report import page

        _write(Path(report), page(results, seconds))
        if not as_json:
            print(f"{report}: {len(results)} experiments")
    if plot is not None:
        _plot(results, Path(plot), not as_json)
    return 1 if failures else 0


def as_text(results: Sequence[Result]) -> str:
    """Results as JSON, for other programs."""
    entries = [
        {
            "item": result.experiment.item,
            "name": result.experiment.name,
            "verdict": result.finding.verdict,
            "measurements": {
                name: _finite(value) for name, value in result.finding.measurements.items()
            },
        }
        for result in results
    ]
    return json.dumps({"experiments": entries}, indent=1, ensure_ascii=False, allow_nan=False)


def _finite(value: Measured) -> Measured:
    """JSON has no infinities: they become words."""
    if isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return [_finite(part) for part in value]


def _chosen(words: Sequence[str]) -> tuple[list[Experiment], list[int]]:
    """The experiments that words ask for, once each, and the numbers of items only stated."""
    from regard.lab.claims import experiments, lines, names
    from regard.lab.claims.stated import STATED

    if not words:
        return list(experiments()), []
    stated = {str(entry.item): entry.item for entry in STATED}
    computed = {str(line.item) for some in lines().values() for line in some}
    only = stated.keys() - computed
    wanted = dict.fromkeys(name for word in words if word not in only for name in names(word))
    by_name = {experiment.name: experiment for experiment in experiments()} if wanted else {}
    return [by_name[name] for name in wanted], [stated[word] for word in words if word in stated]


def _perform(chosen: Sequence[Experiment]) -> tuple[list[Result], list[Failure]]:
    """Runs them, many in processes, with a bar on a terminal; results in the order asked for."""
    results: list[Result] = []
    failures: list[Failure] = []

    def sort(found: Result | Failure) -> None:
        if isinstance(found, Result):
            results.append(found)
        else:
            failures.append(found)

    if len(chosen) < 2 * PROCESSES:
        for experiment in chosen:
            try:
                sort(perform(experiment))
            except Exception as error:
                sort(Failure(experiment, reason(error)))
    else:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        columns = TextColumn("   {task.description:<24}"), BarColumn(), MofNCompleteColumn()
        console = Console(stderr=True)
        with Progress(
            *columns, console=console, transient=True, disable=not console.is_terminal
        ) as bar:
            task = bar.add_task("the first ones", total=len(chosen))
            for found in perform_all(chosen, PROCESSES):
                bar.update(task, advance=1, description=found.experiment.name)
                sort(found)
    order = {experiment.name: place for place, experiment in enumerate(chosen)}
    return sorted(results, key=lambda result: order[result.experiment.name]), failures


def _list() -> None:
    from regard.lab import show
    from regard.lab.claims import lines
    from regard.lab.claims.stated import STATED

    with _printing() as console:
        show.listing(lines(), STATED, console)


def _show(results: Sequence[Result], items: Sequence[int]) -> None:
    from regard.lab import show
    from regard.lab.claims.stated import STATED

    with _printing() as console:
        for result in results:
            show.result(result, console)
        for entry in STATED:
            if entry.item in items:
                show.stated_entry(entry, console)


def _summarise(results: Sequence[Result], seconds: float) -> None:
    from regard.lab import show

    with _printing() as console:
        show.summary(by_family(results), seconds, console)


@contextmanager
def _printing() -> Iterator["Console"]:
    """A console whose lines end with their last word, not with the spaces that rich fills in."""
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = 120
    with console.capture() as page:
        yield console
    print("\n".join(line.rstrip() for line in page.get().splitlines()))


def _plot(results: Sequence[Result], path: Path, tell: bool) -> None:
    from regard.lab.chart import drawing
    from regard.lab.report import STYLE

    plots = [plot for result in results for plot in result.finding.plots]
    if not plots:
        names = ", ".join(result.experiment.name for result in results)
        raise ValueError(f"--plot {path}: there is no plot in {names or 'what ran'}")
    _write(path, drawing(plots, STYLE))
    if tell:
        print(f"{path}: {len(plots)} plot{'s' * (len(plots) > 1)}")


def _exercise(words: Sequence[str]) -> int:
    from regard.lab.exercise import write

    if not 1 <= len(words) <= 2:
        raise ValueError("regard lab exercise takes a name and, if you like, a folder")
    written = write(words[0], Path(words[1] if len(words) == 2 else "."))
    print(f"{written}: a notebook to fill in, which says what is wrong and where")
    return 0


def _write(path: Path, text: str) -> None:
    """A whole file or none: a draft beside it takes its place in one step."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_text(text, encoding="utf-8")
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
