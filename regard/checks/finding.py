"""The measurement of one property."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

Status: TypeAlias = Literal["holds", "fails", "skipped"]


class SkipError(Exception):
    """A property that this model does not have, or that cannot be measured here, and why."""


@dataclass(frozen=True)
class Measured:
    """The largest difference, and the values compared."""

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
    measure: Callable[[Any], Measured]
    """Receives the subject of the check."""
    default: bool = True
    """False if it is measured only where it is named."""


@dataclass(frozen=True)
class Finding:
    """The result for one property."""

    name: str
    status: Status
    difference: float | None
    """None where nothing was measured."""
    tolerance: float
    of: str
    """The values compared, or the reason why none were."""
    remedy: str
    seconds: float
