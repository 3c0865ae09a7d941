"""A page of answers: a question, its model answer, and what people get wrong, all of it run.

    question → answer, derivation → demonstration
             → mistakes, each with a demonstration that it fails
             → marking points

Texts have mathematics in LaTeX between dollar signs and code between backticks. A demonstration
computes whether its answer stands: the model answer has to, and a mistake must not.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from regard.lab.answers.figure import Figure
from regard.lab.experiment import Measured, Table, Verdict
from regard.lab.perform import Result
from regard.lab.place import Place


@dataclass(frozen=True)
class Demonstration:
    """What came out when an answer was tried."""

    stands: bool
    """Whether the measurements are as the answer says."""
    measured: Mapping[str, Measured] = field(default_factory=dict)
    tables: tuple[Table, ...] = ()
    figures: tuple[Figure, ...] = ()


@dataclass(frozen=True)
class Mistake:
    """A wrong answer that people give."""

    answer: str
    why: str
    """The reason why it fails."""
    run: Callable[[], Demonstration]


class Step(NamedTuple):
    """A step of a derivation: a sentence, and the equation that follows it."""

    words: str
    equation: str
    """In LaTeX, without dollar signs."""


class Point(NamedTuple):
    """What earns marks."""

    marks: float
    words: str


@dataclass(frozen=True)
class Answer:
    """One question of a document, or one section, which asks what it explains."""

    place: Place
    question: str
    """In our own words."""
    answer: str
    derivation: tuple[Step, ...]
    run: Callable[[], Demonstration]
    mistakes: tuple[Mistake, ...]
    points: tuple[Point, ...]

    @property
    def marks(self) -> float:
        return float(sum(point.marks for point in self.points))


@dataclass(frozen=True)
class Page:
    """An answer whose demonstrations have run, and the lab's results on the same place."""

    answer: Answer
    shown: Demonstration
    mistakes: tuple[Demonstration, ...]
    results: tuple[Result, ...]

    @property
    def stands(self) -> bool:
        """Whether the model answer stands and every mistake fails."""
        return self.shown.stands and not any(mistake.stands for mistake in self.mistakes)


class Erratum(NamedTuple):
    """A statement of a document that does not hold as it stands."""

    place: Place
    said: str
    verdict: Verdict
    true: str
    result: Result | None
    """The experiment that found it; None where a source settles what no computation can."""
