"""Experiments in a terminal: the list of all, one with its results, and the summary of many."""

from collections import Counter
from collections.abc import Mapping, Sequence
from textwrap import shorten

from rich.box import Box
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from regard.lab import chart
from regard.lab.claims import Family, Line
from regard.lab.claims.stated import Stated
from regard.lab.equation import plain
from regard.lab.experiment import MARKS, Measured, Verdict
from regard.lab.experiment import Table as Numbers
from regard.lab.numbers import columns, figure
from regard.lab.perform import Result
from regard.lab.terminal import INDENT, indented
from regard.machine.shell import program

COLOURS: dict[Verdict, str] = {
    "holds": "green",
    "holds under conditions": "yellow",
    "true in context, to be said more exactly": "cyan",
    "wrong as stated": "red",
    "undecided": "blue",
}

_READABLE = 96
"""No line of words is longer, however wide the terminal."""


def listing(
    lines: Mapping[Family, Sequence[Line]],
    stated: Sequence[Stated],
    console: Console,
) -> None:
    """Every experiment in one line, by family; then what is only stated."""
    count = 0
    for family, some in lines.items():
        count += len(some)
        console.print(heading(family.title, family.name))
        console.print(indented(Text(family.about, "dim")))
        rows = [(str(line.item), line.name, line.taught) for line in some]
        console.print(indented(_lines(rows, console)), "")
    console.print(heading("Stated, not computed", "history, opinion, and descriptions"))
    rows = [(str(entry.item), entry.part, entry.words) for entry in stated]
    console.print(indented(_lines(rows, console)), "")
    usage = Text.assemble(
        (f"{count} experiments", "bold"),
        ". The number on the left is the item of the course documents.\n",
        (f"{program()} lab NAME", "bold"),
        " runs one, ",
        (f"{program()} lab --all", "bold"),
        " all of them. NAME can also be the number of an item or a family. ",
        (f"{program()} lab --find WORDS", "bold"),
        " searches.",
    )
    console.print(indented(usage))


def results(every: Sequence[Result], stated: Sequence[Stated], console: Console) -> None:
    """Experiments one after the other, and items that are only stated."""
    for one in every:
        result(one, console)
    for entry in stated:
        stated_entry(entry, console)


def result(one: Result, console: Console) -> None:
    """One experiment: what is taught, what was computed, the results, and what is true."""
    experiment, finding = one.experiment, one.finding
    console.print(heading(experiment.name, f"item {experiment.item}, {experiment.place}"))
    paragraph(console, experiment.kind.capitalize(), experiment.taught)
    paragraph(console, "Computed", experiment.method)
    for equation in experiment.equations:
        console.print(Padding(Text(plain(equation), "magenta"), (0, 0, 0, INDENT + 10)))
    console.print()
    for numbers in finding.tables:
        if numbers.title:
            console.print(indented(Text(numbers.title, "bold")))
        console.print(indented(table(numbers)), "")
    for plot in finding.plots:
        console.print(indented(Text(plot.title, "bold")))
        drawn = chart.terminal(plot, min(console.width, 80) - INDENT - 1)
        console.print(indented(drawn), "")
    if finding.measurements:
        console.print(indented(Text("What the verdict rests on", "bold")))
        console.print(indented(measurements(finding.measurements)), "")
    verdict = Text.assemble(verdict_mark(finding.verdict), f"  ({one.seconds:.1f} s)")
    verdict.stylize("dim", len(verdict_mark(finding.verdict)))
    console.print(row("Verdict", verdict))
    paragraph(console, "True", one.conclusion)
    console.print()


def stated_entry(entry: Stated, console: Console) -> None:
    """An item, or a part of one, that is only stated."""
    part = f" ({entry.part})" if entry.part else ""
    console.print(heading(f"item {entry.item}{part}", f"{entry.place}; stated, not computed"))
    paragraph(console, "Taught", entry.words)
    console.print(row("Verdict", verdict_mark(entry.verdict)))
    paragraph(console, "Settled", entry.source)
    console.print()


def summary(
    families: Sequence[tuple[Family, Sequence[Result]]], seconds: float, console: Console
) -> None:
    """All verdicts in one table, and the number of each."""
    results = [one for _, some in families for one in some]
    body = Table(box=_RULED, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0))
    body.add_column("verdict", no_wrap=True)
    body.add_column("item", justify="right", style="dim", no_wrap=True)
    body.add_column("experiment", no_wrap=True, style="bold")
    body.add_column("what is true", no_wrap=True, style="dim")
    names = [family.title for family, _ in families] + [r.experiment.name for r in results]
    longest = max(map(len, names), default=0)
    room = max(24, console.width - INDENT - len("≈ to be said more exactly") - longest - 16)
    for family, some in families:
        if some:
            body.add_section()
            body.add_row("", "", Text(family.title, "not bold magenta"), "")
        for one in some:
            experiment = one.experiment
            body.add_row(
                verdict_mark(one.finding.verdict, brief=True),
                str(experiment.item),
                experiment.name,
                shorten(one.conclusion, room, placeholder=" …"),
            )
    console.print(indented(body), "")
    counts = Counter(one.finding.verdict for one in results)
    totals = Text(f"{len(results)} experiments in {seconds:.0f} s: ")
    for number, verdict in enumerate(verdict for verdict in MARKS if counts[verdict]):
        totals.append(", " if number else "").append(f"{counts[verdict]} ")
        totals.append(verdict, COLOURS[verdict])
    console.print(indented(totals))


def table(numbers: Numbers) -> Table:
    """A table of numbers, aligned in columns."""
    drawn = Table(box=_RULED, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0))
    aligned = columns(numbers)
    for name, right, _ in aligned:
        # A word that is too long goes on below: nothing is cut off.
        head = Text(name, "dim", overflow="fold")
        drawn.add_column(head, justify="right" if right else "left")
    for row in zip(*(cells for _, _, cells in aligned)):
        drawn.add_row(*(Text(cell, overflow="fold") for cell in row))
    return drawn


def verdict_mark(verdict: Verdict, brief: bool = False) -> Text:
    """The verdict in its colour; briefly, the part after its comma."""
    words = verdict.rpartition(", ")[2] if brief else verdict
    return Text(f"{MARKS[verdict]} {words}", COLOURS[verdict])


_RULED = Box("    \n    \n ── \n    \n ── \n ── \n    \n    \n")
"""A thin line under the head and between sections, and nothing else."""


def measurements(measured: Mapping[str, Measured]) -> Table:
    """Measured values by name."""
    grid = Table.grid(padding=(0, 3, 0, 0))
    grid.add_column(style="dim")
    grid.add_column(overflow="fold")
    for name, value in measured.items():
        grid.add_row(Text(name), Text(figure(value)))
    return grid


def _lines(rows: Sequence[tuple[str, str, str]], console: Console) -> Table:
    """Item, name and text, one line each, cut off at the console's width."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(justify="right", style="dim", no_wrap=True)
    names = max((len(name) for _, name, _ in rows), default=0)
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(no_wrap=True, overflow="ellipsis")
    room = console.width - INDENT - 3 - names - 4
    for item, name, words in rows:
        grid.add_row(item, name, shorten(words, max(20, room), placeholder=" …"))
    return grid


def paragraph(console: Console, name: str, words: str) -> None:
    """A text beside its name."""
    console.print(row(name, Text(" ".join(words.split()))))


def row(name: str, what: RenderableType) -> RenderableType:
    """Anything beside its name."""
    grid = Table.grid(padding=(0, 1, 0, 0))
    grid.add_column(width=9, style="bold")
    grid.add_column(max_width=_READABLE - INDENT - 10)
    grid.add_row(name, what)
    return indented(grid)


def heading(name: str, where: str) -> Text:
    """A title, and where it belongs."""
    return Text.assemble((name, "bold magenta"), "  ", (where, "dim"))
