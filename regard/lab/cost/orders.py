"""Costs as polynomials, so that growth is compared with growth and counts with counts.

    2 n d d_k + n d d_v + n² d_k + n² d_v        attention with three projections

An order O(n² d_k) covers a term if none of the term's sizes has a higher power: then no size can
grow, by itself or with others, so that the term outgrows the order.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

Powers: TypeAlias = dict[str, int]

_RAISED = {1: "", 2: "²", 3: "³"}


class Widths(NamedTuple):
    """The sizes of one layer that maps n positions of width d to n positions of width d_v."""

    n: int
    d: int
    d_k: int
    """The width of queries and keys."""
    d_v: int
    k: int = 3
    """The kernel size of a convolution."""


@dataclass(frozen=True)
class Term:
    """A coefficient times powers of sizes: 2 n² d_k."""

    coefficient: int
    powers: Powers

    def written(self, letters: Mapping[str, str]) -> str:
        """With other letters for some sizes."""
        sizes = " ".join(
            f"{letters.get(name, name)}{_RAISED[power]}" for name, power in self.powers.items()
        )
        return sizes if self.coefficient == 1 else f"{self.coefficient} {sizes}"

    def at(self, sizes: Widths) -> int:
        values = sizes._asdict()
        return self.coefficient * math.prod(values[n] ** power for n, power in self.powers.items())

    def within(self, order: "Term") -> bool:
        """Whether it grows no faster than the order, whichever sizes grow."""
        return all(power <= order.powers.get(name, 0) for name, power in self.powers.items())


@dataclass(frozen=True)
class Formula:
    """A sum of terms."""

    terms: tuple[Term, ...]

    def written(self, letters: Mapping[str, str]) -> str:
        """With other letters for some sizes; "nothing" where there are no terms."""
        return " + ".join(term.written(letters) for term in self.terms) or "nothing"

    def at(self, sizes: Widths) -> int:
        return sum(term.at(sizes) for term in self.terms)

    def power(self, size: str) -> int:
        """The highest power of one size."""
        return max((term.powers.get(size, 0) for term in self.terms), default=0)

    def beyond(self, order: "Formula") -> "Formula":
        """The terms that the order does not cover."""
        return Formula(
            tuple(t for t in self.terms if not any(t.within(o) for o in order.terms)),
        )


def formula(text: str) -> Formula:
    """The formula in a text such as "2 n d d_k + n² d_v"."""
    return Formula(tuple(map(_term, text.split(" + "))))


def _term(text: str) -> Term:
    coefficient, powers = 1, {}
    for word in text.split():
        if word.isdigit():
            coefficient = int(word)
            continue
        name = word.rstrip("²³")
        powers[name] = {"": 1, "²": 2, "³": 3}[word[len(name) :]]
    return Term(coefficient, powers)
