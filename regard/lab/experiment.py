"""An experiment: a statement that is taught, a computation, and the verdict that follows from it.

    taught → run() → measurements → verdict, and what is true

A verdict is never a literal. One of the functions below computes it from the measurements, so that
a wrong implementation changes it. What is true is written from the same measurements.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from regard.lab.place import Place

Verdict: TypeAlias = Literal[
    "holds",
    "holds under conditions",
    "true in context, to be said more exactly",
    "wrong as stated",
    "undecided",
]
"""What an experiment finds.

holds                    as it stands
holds under conditions   which are stated and varied
true in context, …       right as it is meant; an omission or a loose word would mislead a student
wrong as stated          in the reading that the document itself suggests
undecided                seeds disagree, or neither the statement nor its correction is confirmed
"""

MARKS: dict[Verdict, str] = {
    "holds": "✓",
    "holds under conditions": "◐",
    "true in context, to be said more exactly": "≈",
    "wrong as stated": "✗",
    "undecided": "?",
}
"""The character that stands for a verdict."""

Kind: TypeAlias = Literal["taught", "asked", "added"]
"""taught: the document says it. asked: a task of the document. added: ours, beside what it says."""

Measured: TypeAlias = bool | int | float | str | Sequence["Measured"]
"""Whatever JSON can represent."""


@dataclass(frozen=True)
class Table:
    """A table of numbers."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[Measured, ...], ...]


@dataclass(frozen=True)
class Curve:
    """One line of a plot."""

    name: str
    x: Sequence[float | int]
    y: Sequence[float | int]


@dataclass(frozen=True)
class Plot:
    """Curves over a common axis."""

    title: str
    x: str
    y: str
    curves: tuple[Curve, ...]
    log_x: bool = False
    log_y: bool = False


@dataclass(frozen=True)
class Finding:
    """The result of an experiment."""

    verdict: Verdict
    measurements: Mapping[str, Measured]
    """The numbers that the verdict rests on, by name."""
    tables: tuple[Table, ...] = ()
    plots: tuple[Plot, ...] = ()
    conclusion: str = ""
    """What is true, written from the measurements."""


@dataclass(frozen=True)
class Experiment:
    """One item of what the course documents teach."""

    item: int
    """Its number in the list of items."""
    name: str
    """Unique, of words with dashes; what one types."""
    place: Place
    """Where it is taught."""
    taught: str
    """What is taught, in our own words, with every clause that limits it."""
    method: str
    """What is computed here, in a few sentences."""
    run: Callable[[], Finding]
    """Computes the finding, deterministically."""
    equations: tuple[str, ...] = ()
    """In LaTeX, without dollar signs."""
    trained: bool = False
    """Whether it trains models, which takes seconds."""
    kind: Kind = "taught"
    """Whether the document says it, asks for it, or whether it is added here."""
    correct: str = ""


def holds(taught: bool) -> Verdict:
    """For a statement that is either true or false."""
    return "holds" if taught else "wrong as stated"


def conditional(inside: bool, outside: bool) -> Verdict:
    """For a general statement, tested inside and outside the conditions that it needs."""
    if inside:
        return "holds" if outside else "holds under conditions"
    return "wrong as stated"


def more_exactly(meant: bool, literal: bool) -> Verdict:
    """For a loose statement, tested as it is meant and as a student may take it."""
    if meant:
        return "holds" if literal else "true in context, to be said more exactly"
    return "wrong as stated"


def corrected(taught: bool, correct: bool) -> Verdict:
    """For a wrong statement: it and its correction are tested, and one has to hold."""
    if taught:
        return "holds"
    return "wrong as stated" if correct else "undecided"


def by_seeds(differences: Sequence[float], margin: float) -> Verdict:
    """For a statement about training. Each seed gives a difference, positive where the statement
    is right; all of them have to exceed the margin, on the same side."""
    if len(differences) < 3:
        raise ValueError(f"{len(differences)} seeds are too few; train with 3 or more")
    if min(differences) > margin:
        return "holds"
    return "wrong as stated" if max(differences) < -margin else "undecided"
