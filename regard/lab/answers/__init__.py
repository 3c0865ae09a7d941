"""Answers to every question of the course documents, and to what their sections explain.

    answer.py                                          what an answer consists of
    exercises.py slides/ sheet.py homework/ handout/   the answers, a tuple in each file
    figure.py plots.py architecture.py                 what they draw
    show.py report.py latex.py prose.py                a terminal, a page, a solution sheet

A document's sections are those of `regard.lab.place`. The lab's experiments on a section belong to
its page by their place; errata are what these, and sources, find not to hold as it stands.
"""

from collections.abc import Sequence
from functools import cache
from importlib import import_module
from typing import get_args

from regard.lab.answers.answer import Answer, Erratum, Page
from regard.lab.claims.stated import STATED
from regard.lab.perform import Result, one_thread
from regard.lab.place import SECTIONS, Document, Place
from regard.machine.command_line import unknown_name

FILES: dict[Document, tuple[str, ...]] = {
    "exercises": ("exercises",),
    "slides": ("slides.cost", "slides.order", "slides.stacks"),
    "sheet": ("sheet",),
    "homework": (
        "homework.temperature",
        "homework.perturbation",
        "homework.heads",
        "homework.self_attention",
        "homework.transformer",
        "homework.vision",
    ),
    "handout": (
        "handout.layers",
        "handout.mechanism",
        "handout.costs",
        "handout.uses",
        "handout.transformer",
    ),
}
"""Where the answers to each document are."""


@cache
def answers(document: Document) -> tuple[Answer, ...]:
    """The answers to a document, in the order of its sections."""
    found = [
        answer for file in FILES[document] for answer in import_module(f"{__name__}.{file}").ANSWERS
    ]
    order = list(SECTIONS[document])
    return tuple(sorted(found, key=lambda answer: order.index(answer.place.section)))


def document(word: str) -> Document:
    """The document of this name."""
    for known in get_args(Document):
        if word == known:
            return known
    raise ValueError(unknown_name("document", word, get_args(Document)))


def places(of: Document, words: Sequence[str]) -> list[Place]:
    """The places that words name, in the document's order; all of them without words.

    1.1c is 1.1(c), 1.1 every question of 1.1; a section without a number goes by its name, or by
    the beginning of it.
    """
    if not words:
        return [Place(of, section) for section in SECTIONS[of]]
    # A name may consist of several words.
    chosen = _named(of, " ".join(words)) or [
        section for word in words for section in _known(of, word)
    ]
    return [Place(of, section) for section in SECTIONS[of] if section in chosen]


def _known(of: Document, word: str) -> list[str]:
    found = _named(of, word)
    if not found:
        known = ", ".join(map(section_word, SECTIONS[of]) if of != "handout" else SECTIONS[of])
        raise ValueError(f"{of} has no {word!r}; choose from {known}")
    return found


def _named(of: Document, word: str) -> list[str]:
    """The sections that a word names: one, or those below it."""
    wanted = section_word(word)
    return [
        section
        for section in SECTIONS[of]
        if (short := section_word(section)).startswith(wanted)
        and wanted
        and not (wanted[-1:].isdigit() and short[len(wanted) : len(wanted) + 1].isdigit())
    ]


def section_word(section: str) -> str:
    """A section as one types it: without parentheses and spaces, in small letters."""
    return "".join(letter for letter in section.lower() if letter not in "() ")


def perform(answer: Answer, results: Sequence[Result]) -> Page:
    """Runs an answer's demonstrations, and adds the lab's results on its place."""
    with one_thread():
        shown, mistakes = answer.run(), tuple(mistake.run() for mistake in answer.mistakes)
    return Page(
        answer,
        shown,
        mistakes,
        tuple(result for result in results if result.experiment.place == answer.place),
    )


def errata(of: Document, results: Sequence[Result]) -> list[Erratum]:
    """What the document says and what does not hold as it stands, in the document's order."""
    tested = [
        Erratum(
            result.experiment.place,
            result.experiment.taught,
            result.finding.verdict,
            result.conclusion,
            result,
        )
        for result in results
        if result.experiment.place.document == of and result.experiment.kind == "taught"
    ]
    stated = [
        Erratum(entry.place, entry.words, entry.verdict, entry.source, None)
        for entry in STATED
        if entry.place.document == of
    ]
    order = list(SECTIONS[of])
    wrong = [erratum for erratum in tested + stated if erratum.verdict != "holds"]
    return sorted(wrong, key=lambda erratum: order.index(erratum.place.section))
