"""`regard lab answers`: answers to the questions of the course documents, run while you look.

regard lab answers                            every document and its questions
regard lab answers homework                   all answers, and what to correct in the document
regard lab answers homework 1.1c              one; 1.1 for all of 1.1
regard lab answers handout --errata           what to correct, and nothing else
regard lab answers sheet 6-2 --report FILE    as an HTML page
regard lab answers sheet 6-2 --latex FILE     to paste into a solution sheet
regard lab answers sheet 6-2 --plot FILE      its figures as an SVG
regard lab answers sheet 6-2 --json           for other programs
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from regard.lab.answers.answer import Demonstration, Erratum, Page
from regard.lab.claims import experiments
from regard.lab.commands.parser import Parser, check_output
from regard.lab.commands.results import WIDTH, as_entry, finite, perform_chosen, progress
from regard.lab.perform import Result
from regard.lab.place import Document, Place
from regard.lab.terminal import printing
from regard.machine import atomic

EXAMPLE = """\
For example:
  regard lab answers                            lists the questions of all documents
  regard lab answers homework 1.1c
  regard lab answers sheet 6-2
  regard lab answers exercises 2
  regard lab answers handout cost table         a section by its name, or the beginning of it
  regard lab answers slides --errata            what to correct in the document
  regard lab answers homework --report answers.html --latex answers.tex
  regard lab answers slides sinusoids --plot positions.svg
"""


def parser() -> argparse.ArgumentParser:
    words = Parser(
        "lab answers",
        "Model answers to the questions of the course documents, with derivation, demonstration,\n"
        "common mistakes and marking points. All numbers are measured when the command runs.",
        EXAMPLE,
    )
    add = words.add_argument
    add("document", nargs="?", help="exercises, slides, sheet, homework or handout")
    add("places", nargs="*", metavar="PLACE", help="a question or section; by default all")
    add("--errata", action="store_true", help="only what to correct in the document")
    add("--json", action="store_true", help="print JSON, and nothing else")
    add("--report", metavar="FILE.html", help="write an HTML page")
    add("--latex", metavar="FILE.tex", help="write LaTeX to paste into a solution sheet")
    add("--plot", metavar="FILE.svg", help="write the figures of the answers")
    return words


def answers(words: Sequence[str]) -> int:
    """Runs `regard lab answers`; the exit status is 1 where a demonstration disagrees."""
    from regard.lab.answers import document, errata, places, show

    options = parser().parse_args(words)
    _check(options)
    if options.document is None:
        with printing(WIDTH) as console:
            show.listing(console)
        return 0
    name = document(options.document)
    chosen = places(name, options.places)
    results, failures = _results(chosen)
    for failure in failures:
        print(f"regard: {failure}", file=sys.stderr)
    pages = [] if options.errata else _pages(name, chosen, results)
    whole = options.errata or not options.places
    wrong = errata(name, results) if whole else []
    if options.json:
        print(as_text(name, pages, wrong))
    elif not (options.report or options.latex or options.plot):
        with printing(WIDTH) as console:
            for page in pages:
                show.page(page, console)
            if whole:
                show.errata(name, wrong, console)
            if len(pages) > 1:
                show.summary(pages, console)
    _write(options, name, pages, wrong)
    return 1 if failures or not all(page.stands for page in pages) else 0


def _check(options: argparse.Namespace) -> None:
    check_output(options, "report", "latex", "plot")
    every = "report", "latex", "plot", "json", "errata"
    asked = [name for name in every if getattr(options, name)]
    if asked and options.document is None:
        raise ValueError(f"--{asked[0]} needs a document; for example homework")


def _results(chosen: Sequence[Place]) -> tuple[list[Result], list[Any]]:
    """The lab's experiments on these places."""
    return perform_chosen([each for each in experiments() if each.place in chosen])


def _pages(name: Document, chosen: Sequence[Place], results: Sequence[Result]) -> list[Page]:
    from regard.lab.answers import answers as every
    from regard.lab.answers import perform

    asked = [answer for answer in every(name) if answer.place in chosen]
    pages = []
    with progress(len(asked)) as tell:
        for answer in asked:
            tell(answer.place.section, 0)
            pages.append(perform(answer, results))
            tell(answer.place.section, 1)
    return pages


def _write(
    options: argparse.Namespace,
    name: Document,
    pages: Sequence[Page],
    wrong: Sequence[Erratum],
) -> None:
    from regard.lab.answers import latex, report, show
    from regard.lab.answers.figure import picture

    for path, make in ((options.report, report.page), (options.latex, latex.sheet)):
        if path is not None:
            atomic.write(Path(path), make(name, pages, wrong))
            if not options.json:
                count = show.counted(len(pages), "answer")
                print(f"{path}: {count}, {len(wrong)} errata")
    if options.plot is not None:
        figures = [drawn for page in pages for drawn in page.shown.figures]
        if not figures:
            raise ValueError(
                f"--plot {options.plot}: there is no figure in what was asked for; there is in "
                "homework 1.1e, sheet 6-2b and slides sinusoids"
            )
        atomic.write(Path(options.plot), picture(figures))
        if not options.json:
            print(f"{options.plot}: {show.counted(len(figures), 'figure')}")


def as_text(name: Document, pages: Sequence[Page], wrong: Sequence[Erratum]) -> str:
    """Answers and errata as JSON, for other programs."""
    data = {
        "document": name,
        "answers": [_entry(page) for page in pages],
        "errata": [_erratum(erratum) for erratum in wrong],
    }
    return json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False)


def _erratum(erratum: Erratum) -> dict[str, Any]:
    return {
        "place": {"document": erratum.place.document, "section": erratum.place.section},
        "said": erratum.said,
        "verdict": erratum.verdict,
        "true": erratum.true,
        "experiment": as_entry(erratum.result) if erratum.result else None,
    }


def _entry(page: Page) -> dict[str, Any]:
    answer = page.answer
    return {
        "place": {"document": answer.place.document, "section": answer.place.section},
        "question": answer.question,
        "answer": answer.answer,
        "derivation": [step._asdict() for step in answer.derivation],
        "demonstration": _run(page.shown),
        "mistakes": [
            {"answer": mistake.answer, "why": mistake.why, "demonstration": _run(run)}
            for mistake, run in zip(answer.mistakes, page.mistakes)
        ],
        "points": [point._asdict() for point in answer.points],
        "claims": [as_entry(result) for result in page.results],
    }


def _run(run: Demonstration) -> dict[str, Any]:
    return {
        "stands": run.stands,
        "measured": {name: finite(value) for name, value in run.measured.items()},
        "tables": [
            {
                "title": table.title,
                "head": list(table.head),
                "rows": [[finite(cell) for cell in row] for row in table.rows],
            }
            for table in run.tables
        ],
    }
