"""An experiment: a statement that is taught, a computation, and the verdict that follows from it.

    taught → run() → measurements → verdict

A verdict is never a literal. One of the four functions below computes it from the measurements, so
that a wrong implementation changes it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

Verdict: TypeAlias = Literal["holds", "holds under conditions", "wrong as stated", "undecided"]

MARKS: dict[Verdict, str] = {
    "holds": "✓",
    "holds under conditions": "◐",
    "wrong as stated": "✗",
    "undecided": "?",
}
"""The character that stands for a verdict."""

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


@dataclass(frozen=True)
class Experiment:
    """One item of what the course documents teach."""

    item: int
    """Its number in the list of items."""
    name: str
    """Unique, of words with dashes; what one types."""
    source: str
    """Where it is taught: exercises, slides, exercise sheet, homework or handout."""
    taught: str
    """What is taught, in a sentence."""
    method: str
    """What is computed here, in a few sentences."""
    correct: str
    """What is true."""
    run: Callable[[], Finding]
    """Computes the finding, deterministically."""
    equations: tuple[str, ...] = ()
    """In LaTeX, without dollar signs."""
    trained: bool = False
    """Whether it trains models, which takes seconds."""


def holds(taught: bool) -> Verdict:
    """For a statement that is either true or false."""
    return "holds" if taught else "wrong as stated"


def conditional(inside: bool, outside: bool) -> Verdict:
    """For a general statement, tested inside and outside the conditions that it needs."""
    if inside:
        return "holds" if outside else "holds under conditions"
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
