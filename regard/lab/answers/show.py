"""Answers in a terminal: the list of questions, a page for each, and a document's errata."""

from collections.abc import Sequence

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from regard.lab.answers.answer import Answer, Demonstration, Erratum, Page
from regard.lab.answers.figure import terminal
from regard.lab.answers.prose import equation, plain
from regard.lab.perform import Result
from regard.lab.place import SECTIONS, TITLES, Document
from regard.lab.show import heading, measurements, paragraph, row, table, verdict_mark
from regard.lab.terminal import INDENT, indented
from regard.machine.shell import program


def listing(console: Console) -> None:
    """Every document, and its questions in one line each."""
    for document, sections in SECTIONS.items():
        console.print(heading(TITLES[document], f"regard lab answers {document}"))
        grid = Table.grid(padding=(0, 2, 0, 0))
        for section, about in sections.items():
            grid.add_row(Text(section, "bold"), about)
        console.print(indented(grid), "")
    usage = (
        f"{program()} lab answers homework 1.1c shows one answer, {program()} lab answers homework "
        "all of them and the errata."
    )
    console.print(indented(Text(usage)))


def page(one: Page, console: Console) -> None:
    """One question: its answer and derivation, what was measured, mistakes, marking points."""
    answer = one.answer
    place = answer.place
    console.print(heading(str(place), f"{place.about}, {counted(answer.marks, 'point')}"))
    paragraph(console, "Question", plain(answer.question))
    paragraph(console, "Answer", plain(answer.answer))
    for number, step in enumerate(answer.derivation):
        paragraph(console, "" if number else "Because", plain(step.words))
        shown = Padding(Text(equation(step.equation), "magenta"), (0, 0, 0, INDENT + 12))
        console.print(shown)
    console.print()
    _demonstration(one.shown, console)
    for mistake, run in zip(answer.mistakes, one.mistakes):
        paragraph(console, "Mistake", plain(mistake.answer))
        paragraph(console, "Why not", plain(mistake.why))
        console.print()
        _demonstration(run, console)
    for point in answer.points:
        paragraph(console, f"{point.marks:g} pt", plain(point.words))
    console.print()
    if one.results:
        console.print(row("Claims", _verdicts(one.results)), "")


def counted(number: float, name: str) -> str:
    """A number of things, in words: 1 point, 2 points."""
    return f"{number:g} {name}{'s' * (number != 1)}"


def _demonstration(run: Demonstration, console: Console) -> None:
    for numbers in run.tables:
        console.print(indented(Text(numbers.title, "bold")))
        console.print(indented(table(numbers)), "")
    for drawn in run.figures:
        console.print(indented(Text(drawn.title, "bold")))
        console.print(indented(terminal(drawn, min(console.width, 80) - INDENT - 1)), "")
    if run.measured:
        console.print(indented(measurements(run.measured)))
    verdict = ("✓ stands", "green") if run.stands else ("✗ fails", "red")
    console.print(indented(Text(*verdict)), "")


def _verdicts(results: Sequence[Result]) -> Table:
    """What the document says here, with the lab's verdicts."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    for result in results:
        grid.add_row(
            verdict_mark(result.finding.verdict, brief=True),
            Text(f"regard lab {result.experiment.name}", "dim"),
        )
    return grid


def errata(document: Document, wrong: Sequence[Erratum], console: Console) -> None:
    """What to correct in a document, with the place, the verdict and what is true."""
    count = counted(len(wrong), "statement")
    console.print(heading(f"Errata: {TITLES[document]}", count))
    for erratum in wrong:
        where = Text.assemble((erratum.place.section, "bold"), "  ")
        where.append(verdict_mark(erratum.verdict))
        where.append(f"  {erratum.result.experiment.name if erratum.result else ''}", "dim")
        console.print(indented(where))
        paragraph(console, "Says", erratum.said)
        paragraph(console, "True", erratum.true)
        console.print()


def summary(pages: Sequence[Page], console: Console) -> None:
    """How many questions were answered, and whether every demonstration agrees."""
    off: list[Answer] = [one.answer for one in pages if not one.stands]
    runs = sum(1 + len(one.mistakes) for one in pages)
    marks = counted(sum(one.answer.marks for one in pages), "point")
    if off:
        text = "do not agree: " + ", ".join(answer.place.section for answer in off)
    else:
        text = "every model answer stands, and every mistake fails"
    console.print(
        indented(Text(f"{counted(len(pages), 'answer')}, {marks}, {runs} demonstrations: {text}"))
    )
