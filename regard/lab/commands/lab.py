"""`regard lab`: lists experiments, runs them, and shows their results.

regard lab                          the list of all experiments, one line each
regard lab NAME …                   runs some: names, numbers of items, or families
regard lab --all                    runs all, and ends with a table of the verdicts
regard lab [NAME …] --json          the results for other programs
regard lab [NAME …] --report FILE   the results as an HTML page
regard lab NAME --plot FILE         its plots as an SVG
regard lab --find WORD …            experiments, questions and exercises that have these words
regard lab exercise NAME [FOLDER]   a notebook to fill in
regard lab answers DOCUMENT …       answers to a document's questions (commands/answers.py)
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from regard.lab import claims, show
from regard.lab.claims import lines
from regard.lab.claims.stated import STATED, Stated
from regard.lab.commands.find import find
from regard.lab.commands.parser import Parser, check_output
from regard.lab.commands.results import WIDTH, as_entry, perform_chosen
from regard.lab.experiment import Experiment
from regard.lab.perform import Result, by_family
from regard.lab.terminal import printing
from regard.machine import atomic
from regard.machine.shell import typed

EXAMPLE = """\
For example:
  regard lab                                  lists all experiments
  regard lab cold-limit                       runs one
  regard lab symmetry 48 --json               a family and an item, as JSON
  regard lab --all --report lab.html          all of them, as one page
  regard lab position-kernel --plot plot.svg
  regard lab --find causal mask               what has to do with it, and how to run it
  regard lab exercise multihead FOLDER        a notebook to fill in; or vit, words
  regard lab answers homework 1.1c            a question's answer, run; see lab answers --help
"""


def parser() -> argparse.ArgumentParser:
    words = Parser(
        "lab",
        "Experiments on what course documents teach about attention. Each shows what is taught,\n"
        "what is computed, the measurements, the verdict that follows from them, and what is true.",
        EXAMPLE,
    )
    add = words.add_argument
    add("names", nargs="*", metavar="NAME", help="an experiment, the number of an item, a family")
    add("--all", action="store_true", help="run every experiment")
    add("--json", action="store_true", help="print the results as JSON, and nothing else")
    add("--report", metavar="FILE.html", help="write the results as one HTML page")
    add("--plot", metavar="FILE.svg", help="write the plots of the named experiments")
    add("--find", nargs="+", metavar="WORD", help="search experiments, answers and exercises")
    return words


def lab(words: Sequence[str]) -> int:
    """Runs `regard lab` and returns its exit status: 1 where an experiment failed."""
    if words[:1] == ["exercise"] and {"-h", "--help"} & {*words}:
        print(_exercises())
        return 0
    if words[:1] == ["answers"]:
        from regard.lab.commands.answers import answers

        return answers(words[1:])
    options = parser().parse_args(words)
    names: list[str] = options.names
    if options.find is not None:
        return find(options.find)
    if names and names[0] == "exercise":
        return _exercise(names[1:])
    if options.all and names:
        raise ValueError(f"--all and {names[0]!r}: name some experiments, or ask for all of them")
    check_output(options, "report", "plot")
    if options.plot is not None and not names:
        raise ValueError(
            "--plot draws named experiments; for example regard lab position-kernel --plot plot.svg"
        )
    if not (names or options.all or options.json or options.report):
        with printing(WIDTH) as console:
            show.listing(lines(), STATED, console)
        return 0
    chosen, stated = _chosen(names)
    start = time.perf_counter()
    results, failures = perform_chosen(chosen)
    seconds = time.perf_counter() - start
    for failure in failures:
        print(f"regard: {failure}", file=sys.stderr)
    if options.json:
        print(as_text(results))
    elif names or options.all:
        with printing(WIDTH) as console:
            if options.all:
                show.summary(by_family(results), seconds, console)
            else:
                show.results(results, stated, console)
    if options.report is not None:
        from regard.lab.report import page

        atomic.write(Path(options.report), page(results, seconds))
        if not options.json:
            print(f"{options.report}: {len(results)} experiments")
    if options.plot is not None:
        plots = [plot for result in results for plot in result.finding.plots]
        if not plots:
            ran = ", ".join(result.experiment.name for result in results)
            raise ValueError(f"--plot {options.plot}: there is no plot in {ran or 'what ran'}")
        from regard.lab.report import write_plots

        written = write_plots(Path(options.plot), plots)
        if not options.json:
            print(written)
    return 1 if failures else 0


def as_text(results: Sequence[Result]) -> str:
    """Results as JSON, for other programs."""
    entries = [as_entry(result) for result in results]
    return json.dumps({"experiments": entries}, indent=1, ensure_ascii=False, allow_nan=False)


def _chosen(words: Sequence[str]) -> tuple[list[Experiment], list[Stated]]:
    """The experiments that words name, once each, and the items that are only stated."""
    if not words:
        return list(claims.experiments()), []
    stated = {str(entry.item): entry for entry in STATED}
    computed = {str(line.item) for some in lines().values() for line in some}
    only = stated.keys() - computed
    wanted = dict.fromkeys(
        name for word in words if word not in only for name in claims.names(word)
    )
    by_name = {experiment.name: experiment for experiment in claims.experiments()} if wanted else {}
    return [by_name[name] for name in wanted], [
        stated[word] for word in dict.fromkeys(words) if word in stated
    ]


def _exercises() -> str:
    from regard.lab.exercise import EXERCISES

    lines = (f"  {name:<10} {about}" for name, about in EXERCISES.items())
    return "\n".join(
        [
            "usage: regard lab exercise NAME [FOLDER]",
            "",
            "Writes a notebook to fill in, whose checks say what is wrong and where.",
            "",
            *lines,
            "",
            typed("regard lab answers shows model answers to the questions of the documents."),
        ]
    )


def _exercise(words: Sequence[str]) -> int:
    from regard.lab.exercise import write

    if not words:
        print(_exercises())
        return 0
    if len(words) > 2:
        raise ValueError("regard lab exercise takes a name and, if you like, a folder")
    written = write(words[0], Path(words[1] if len(words) == 2 else "."))
    print(f"{written}: a notebook to fill in; its checks say what is wrong and where")
    return 0
