"""Problems in the user's files: counted, with examples, never ignored in silence."""

from typing import Any

_KINDS = {
    "empty": "an empty side",
    "undecodable": "bytes that are not UTF-8",
    "control": "control characters",
    "columns": "too few columns",
    "long": "too long",
    "ratio": "sides of very unequal length",
    "broken": "images that cannot be decoded",
    "large": "images of too many pixels",
    "foreign": "files that are no images",
    "missing": "images that are named, but not there",
}

EXAMPLES = 3


class Problems:
    """What was skipped and why: a count for each kind, and the first examples of it."""

    def __init__(
        self,
        counts: dict[str, int] | None = None,
        examples: dict[str, list[str]] | None = None,
    ):
        self.counts = counts or {}
        self.examples = examples or {}

    def add(self, kind: str, example: str, count: int = 1) -> None:
        self.counts[kind] = self.counts.get(kind, 0) + count
        if len(kept := self.examples.setdefault(kind, [])) < EXAMPLES:
            kept.append(example)

    def merge(self, other: "Problems") -> None:
        for kind, count in other.counts.items():
            self.counts[kind] = self.counts.get(kind, 0) + count
            kept = self.examples.setdefault(kind, [])
            kept.extend(other.examples[kind][: EXAMPLES - len(kept)])

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    def lines(self) -> list[str]:
        """A line for each kind, the most frequent first."""
        kinds = sorted(self.counts, key=lambda kind: -self.counts[kind])
        return [
            f"{self.counts[kind]:,} × {_KINDS[kind]}: {'; '.join(self.examples[kind])}"
            + ("; …" if self.counts[kind] > EXAMPLES == len(self.examples[kind]) else "")
            for kind in kinds
        ]

    def refuse(self, remedy: str) -> ValueError:
        return ValueError(f"{' | '.join(self.lines())}; {remedy}")

    def to_json(self) -> dict[str, Any]:
        return {"counts": self.counts, "examples": self.examples}

    def __bool__(self) -> bool:
        return bool(self.counts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Problems) and self.to_json() == other.to_json()

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def __repr__(self) -> str:
        return f"Problems({self.counts})"
