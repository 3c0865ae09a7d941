"""Attention drawn in a terminal, darker for more.

grid       a row for each query, a column for each key
patches    a picture's patches, where they lie
"""

import unicodedata
from collections.abc import Iterator, Sequence

from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import avg_pool2d

SHADES = " ░▒▓█"


def grid(
    weights: Float[Tensor, "L S"],
    rows: Sequence[str],
    columns: Sequence[str],
    indent: int = 0,
    width: int | None = None,
) -> str:
    """Weights as shaded cells under the columns' names; a full block is a weight of 1.

    Names should be short: single characters stand over their cells, longer names make wide ones.
    Columns beyond a line of `width` go on below.
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
    values = weights.detach().float().cpu().tolist()
    drawn = []
    for band in _bands(widths, None if width is None else width - indent - side - 1):
        head = "".join(fill(columns[n], widths[n]) for n in band)
        lines = [f"{margin}{'':{side}} {head}"]
        for name, row in zip(rows, values):
            shaded = "".join(_shade(row[n]) * widths[n] for n in band)
            lines.append(f"{margin}{fill(name, side)} {shaded}")
        drawn.append("\n".join(line.rstrip() for line in lines))
    return "\n\n".join(drawn)


def _bands(widths: Sequence[int], room: int | None) -> Iterator[range]:
    """Columns that fit side by side; at least one."""
    first, used = 0, 0
    for n, width in enumerate(widths):
        used += width
        if room is not None and used > room and n > first:
            yield range(first, n)
            first, used = n, width
    yield range(first, len(widths))


def patches(weights: Float[Tensor, "Y X"], width: int) -> list[str]:
    """A shaded cell for each patch, two characters wide where there is room: those are taller than
    wide. Where even one is too much, a cell is the mean of several patches."""
    columns = weights.shape[1]
    wide = 2 if 2 * columns <= width else 1
    several = -(-columns // max(1, width))
    shown = avg_pool2d(weights.detach().float().cpu()[None], several, ceil_mode=True)[0]
    lines = ("".join(_shade(weight) * wide for weight in row) for row in shown.tolist())
    return [line.rstrip() for line in lines]


def cells(text: str) -> int:
    """How many columns of a terminal a text takes."""
    return sum(_cells(character) for character in text)


def _cells(character: str) -> int:
    if unicodedata.combining(character) or unicodedata.category(character) in ("Cf", "Mn", "Me"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def fill(name: str, width: int) -> str:
    """A name, and spaces up to so many columns."""
    shown = (
        name if cells(name) or not name else " " + name
    )  # a mark alone needs something to stand on
    return shown + " " * (width - cells(shown))


def _shade(weight: float) -> str:
    return SHADES[min(len(SHADES) - 1, max(0, round(weight * (len(SHADES) - 1))))]
