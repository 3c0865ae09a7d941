"""An experiment: something that is taught, a computation, and the verdict that follows from it.

    taught → run() → measurements → verdict

A verdict is never written down; it is computed from what was measured, by one of the four functions
below, so that another implementation, or a wrong one, may change it.
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
"""What JSON can hold."""


@dataclass(frozen=True)
class Table:
    """A few numbers side by side."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[Measured, ...], ...]


@dataclass(frozen=True)
class Curve:
    """Points of a plot that belong together."""

    name: str
    x: Sequence[float | int]
    y: Sequence[float | int]


@dataclass(frozen=True)
class Plot:
    """Curves over one axis."""

    title: str
    x: str
    y: str
    curves: tuple[Curve, ...]
    log_x: bool = False
    log_y: bool = False


@dataclass(frozen=True)
class Finding:
    """What came out."""

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
    """What one types: words with dashes, unlike every other's."""
    source: str
    """Where it is taught: exercises, slides, exercise sheet, homework or handout."""
    taught: str
    """What is taught, in a sentence."""
    method: str
    """What is computed here, in a few sentences."""
    correct: str
    """What is true."""
    run: Callable[[], Finding]
    """Computes; takes nothing, so that it gives the same each time."""
    equations: tuple[str, ...] = ()
    """In LaTeX, without dollars."""
    trained: bool = False
    """Whether it trains models, and so takes seconds."""


def holds(taught: bool) -> Verdict:
    """For what is either so or not."""
    return "holds" if taught else "wrong as stated"


def conditional(inside: bool, outside: bool) -> Verdict:
    """For what is said of everything and tried under the conditions that it needs, and without."""
    if inside:
        return "holds" if outside else "holds under conditions"
    return "wrong as stated"


def corrected(taught: bool, correct: bool) -> Verdict:
    """For what is said wrongly: both statements are tried, and one has to come true."""
    if taught:
        return "holds"
    return "wrong as stated" if correct else "undecided"


def by_seeds(differences: Sequence[float], margin: float) -> Verdict:
    """For what rests on training: each seed's difference, positive where the claim is right, has to
    be beyond the margin, on the same side."""
    if len(differences) < 3:
        raise ValueError(f"{len(differences)} seeds decide nothing; train with 3 or more")
    if min(differences) > margin:
        return "holds"
    return "wrong as stated" if max(differences) < -margin else "undecided"
