"""An experiment: a statement that is taught, a computation, and the verdict that follows from it.

    taught → run() → measurements → verdict, and what is true

A verdict is never a literal. One of the functions below computes it from the measurements, so that
a wrong implementation changes it. What is true is written from the same measurements.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

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
    conclusion: str = field(kw_only=True)
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


class Estimate(NamedTuple):
    """What several seeds give: the mean of a difference, and its standard error."""

    mean: float
    error: float

    def __str__(self) -> str:
        return f"{self.mean:+.{self._decimals}f} ± {self.error:.{self._decimals}f}".replace(
            "-", "−"
        )

    @property
    def level(self) -> str:
        """Without a sign, for something that is not a difference."""
        return str(self).lstrip("+")

    @property
    def _decimals(self) -> int:
        """As many as show two digits of the error, and no more than three."""
        return min(3, max(0, 1 - math.floor(math.log10(self.error)))) if self.error else 3

    def exceeds(self, margin: float) -> bool:
        """Whether the mean is beyond the margin by three standard errors."""
        return self.mean - 3 * self.error > margin


def estimate(differences: Sequence[float]) -> Estimate:
    """The mean of each seed's difference, and its standard error."""
    if len(differences) < 5:
        raise ValueError(f"{len(differences)} seeds are too few; train with 5 or more")
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    return Estimate(statistics.fmean(differences), error)


def by_seeds(differences: Sequence[float], margin: float = 0.0) -> Verdict:
    """For a statement about training. Each seed gives a difference, positive where the statement
    is right; their mean has to be beyond the margin by three standard errors."""
    found = estimate(differences)
    if found.exceeds(margin):
        return "holds"
    return "wrong as stated" if Estimate(-found.mean, found.error).exceeds(margin) else "undecided"


def in_cases(cases: Iterable[Sequence[float]]) -> Verdict:
    """For a statement about training, tested in several cases: in all, in some, or in none."""
    verdicts = [by_seeds(differences) for differences in cases]
    if "holds" not in verdicts:
        return verdicts[0] if len(set(verdicts)) == 1 else "undecided"
    return "holds" if set(verdicts) == {"holds"} else "holds under conditions"


def on_condition(inside: Sequence[float], outside: Sequence[float], margin: float) -> Verdict:
    """From each seed's gain, where one is expected and where none is."""
    expected = by_seeds(inside, margin)
    if expected != "holds":
        return expected
    further = by_seeds([gain - margin for gain in outside])
    return further if further == "undecided" else conditional(True, further == "holds")
