"""What was measured of one property."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from regard.check.subject import Subject

Status: TypeAlias = Literal["holds", "fails", "skipped"]


class SkipError(Exception):
    """A property that this model does not have, or that cannot be measured here, and why."""


@dataclass(frozen=True)
class Measured:
    """The largest difference, and what it is of."""

    difference: float
    of: str


@dataclass(frozen=True)
class Property:
    """A promise: two ways to the same result."""

    name: str
    tolerance: float
    """The largest difference that is allowed; 0 means the same bits."""
    remedy: str
    """What to do where it is exceeded."""
    measure: "Callable[[Subject], Measured]"


@dataclass(frozen=True)
class Finding:
    """How far a promise is kept."""

    name: str
    status: Status
    difference: float | None
    """None where nothing was measured."""
    tolerance: float
    of: str
    """What the difference is of, or why there is none."""
    remedy: str
    seconds: float
