"""Attention drawn in a terminal: a row for each query, a column for each key, darker for more."""

import unicodedata
from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor

SHADES = " ░▒▓█"


def grid(
    weights: Float[Tensor, "L S"], rows: Sequence[str], columns: Sequence[str], indent: int = 0
) -> str:
    """Weights as shaded cells under the columns' names; a full block is a weight of 1.

    Names should be short: single characters stand over their cells, longer names make wide ones.
    """
    L, S = weights.shape
    if len(rows) != L or len(columns) != S:
        raise ValueError(
            f"weights of {L} × {S} need as many names, got {len(rows)} rows and "
            f"{len(columns)} columns"
        )
    widths = [max(1, cells(name)) for name in columns]
    side = max((cells(name) for name in rows), default=0)
    margin = " " * indent
    lines = [f"{margin}{'':{side}} {''.join(_fill(n, w) for n, w in zip(columns, widths))}"]
    for name, row in zip(rows, weights.detach().float().cpu().tolist()):
        shaded = "".join(_shade(weight) * width for weight, width in zip(row, widths))
        lines.append(f"{margin}{_fill(name, side)} {shaded}")
    return "\n".join(line.rstrip() for line in lines)


def cells(text: str) -> int:
    """How many columns of a terminal a text takes."""
    return sum(_cells(character) for character in text)


def _cells(character: str) -> int:
    if unicodedata.combining(character) or unicodedata.category(character) in ("Cf", "Mn", "Me"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def _fill(name: str, width: int) -> str:
    shown = (
        name if cells(name) or not name else " " + name
    )  # a mark alone needs something to stand on
    return shown + " " * (width - cells(shown))


def _shade(weight: float) -> str:
    return SHADES[min(len(SHADES) - 1, max(0, round(weight * (len(SHADES) - 1))))]
