"""Problems in the user's files: counted, with examples, never ignored in silence."""

import re
from typing import Any

_KINDS = {
    "empty": "an empty side",
    "undecodable": "bytes that are not UTF-8",
    "control": "control characters",
    "columns": "too few columns",
    "header": "a first line that names the columns",
    "json": "lines that are not JSON",
    "long": "too long",
    "ratio": "sides of very unequal length",
    "broken": "images that cannot be decoded",
    "large": "images of too many pixels",
    "foreign": "files that are no images",
    "missing": "images that are named, but not there",
    "unreadable": "files that cannot be read",
}

_UNREADABLE = ("undecodable", "control", "columns", "json")

EXAMPLES = 3


class Problems:
    """What was skipped and why: a count for each kind, and the first examples of it.

    `remedies` say what is wrong with files as a whole, and what to do about it.
    """

    def __init__(
        self,
        counts: dict[str, int] | None = None,
        examples: dict[str, list[str]] | None = None,
        remedies: dict[str, list[str]] | None = None,
    ):
        self.counts = counts or {}
        self.examples = examples or {}
        self.remedies = remedies or {}

    def add(self, kind: str, example: str, count: int = 1) -> None:
        self.counts[kind] = self.counts.get(kind, 0) + count
        if len(kept := self.examples.setdefault(kind, [])) < EXAMPLES:
            kept.append(example)

    def advise(self, kind: str, remedy: str) -> None:
        known = self.remedies.setdefault(kind, [])
        if remedy not in known and len(known) < EXAMPLES:
            known.append(remedy)

    def merge(self, other: "Problems") -> None:
        for kind, count in other.counts.items():
            self.counts[kind] = self.counts.get(kind, 0) + count
            kept = self.examples.setdefault(kind, [])
            kept.extend(other.examples[kind][: EXAMPLES - len(kept)])
        for kind, remedies in other.remedies.items():
            for remedy in remedies:
                self.advise(kind, remedy)

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    def lines(self) -> list[str]:
        """A line for each kind, the most frequent first."""
        return [
            self._line(kind) for kind in sorted(self.counts, key=lambda kind: -self.counts[kind])
        ]

    def _line(self, kind: str) -> str:
        count, examples = self.counts[kind], self.examples[kind]
        more = ["…"] if count > EXAMPLES == len(examples) else []
        shown = "; ".join([*examples, *more, *self.remedies.get(kind, [])])
        return f"{count:,} × {_KINDS[kind]}: {shown}"

    @property
    def why(self) -> str:
        """All of it at the end of a clause; nothing where there is none."""
        return f": {' | '.join(self.lines())}" if self.counts else ""

    def check(self, on_bad: str | None, examples: int) -> None:
        """Raises where these may not be left out beside so many good examples.

        Without `on_bad`, up to a tenth may be unreadable.
        """
        if self and on_bad == "refuse":
            raise self.refusal()
        bad = sum(self.counts.get(kind, 0) for kind in _UNREADABLE)
        if on_bad is None and 9 * bad > examples:
            raise ValueError(
                f"{bad:,} of {bad + examples:,} lines cannot be read, which is more than a tenth"
                f"{self.why}; mend the files, or add --on-bad skip to go on without these"
            )

    def refusal(self) -> ValueError:
        """Where nothing may be left out."""
        remedy = "mend the files, or add --on-bad skip to go on without these"
        return ValueError(f"bad data{self.why}; {remedy}")

    def to_json(self) -> dict[str, Any]:
        return {"counts": self.counts, "examples": self.examples, "remedies": self.remedies}

    def __bool__(self) -> bool:
        return bool(self.counts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Problems) and self.to_json() == other.to_json()

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def __repr__(self) -> str:
        return f"Problems({self.counts})"


def reason(error: BaseException) -> str:
    """What a system or a library says of an error, in one line, without its number."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    text = re.sub(r"^(\[Errno -?\d+\]|Error -?\d+[^:]*:)", "", " ".join(text.split()))
    return text.strip() or type(error).__name__
