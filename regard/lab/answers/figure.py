"""Figures of answers: plots, heat maps and drawings, as SVG for a page and as text for a terminal.

Like plots, they take their colours from the page's CSS.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from typing import TypeAlias

from rich.text import Text

from regard.lab import chart, report
from regard.lab.experiment import Plot


@dataclass(frozen=True)
class Heat:
    """A matrix as a heat map; numbers are between -1 and 1."""

    title: str
    x: str
    y: str
    rows: Sequence[Sequence[float]]


@dataclass(frozen=True)
class Drawing:
    """A drawing that was made by hand: an SVG element, and the same in characters."""

    title: str
    svg: str
    text: str


Figure: TypeAlias = Plot | Heat | Drawing

STYLE = (files("regard.lab") / "answers.css").read_text(encoding="utf-8")
"""The CSS of answers and their figures, beside that of the lab's report."""

LEVELS = 8
"""Shades of each sign."""
SHADES = {True: " ░▒▓█", False: " ·∘•●"}
"""In a terminal, for numbers above and below 0, which need no colour to be told apart."""


def svg(figure: Figure) -> str:
    """The figure as an SVG element."""
    match figure:
        case Plot():
            return chart.svg(figure)
        case Heat():
            return _heat(figure)
        case Drawing():
            return figure.svg


class Drawn:
    """A figure that a notebook shows."""

    def __init__(self, figure: Figure):
        self.figure = figure

    def _repr_svg_(self) -> str:
        return picture([self.figure])

    def __repr__(self) -> str:
        return str(terminal(self.figure, 80))


def picture(figures: Sequence[Figure]) -> str:
    """Figures below one another as one SVG file."""
    titled = [(figure.title, svg(figure)) for figure in figures]
    return chart.stacked(titled, report.STYLE + STYLE)


def terminal(figure: Figure, width: int) -> Text:
    """The figure in characters."""
    match figure:
        case Plot():
            return chart.terminal(figure, width)
        case Heat():
            return _shaded(figure)
        case Drawing():
            return Text(figure.text)


def _heat(heat: Heat) -> str:
    """Cells of one shade are one path, which keeps the page small."""
    rows, columns = len(heat.rows), len(heat.rows[0])
    left, top, size = 34.0, 22.0, (chart.WIDTH - 34.0) / columns
    tall = max(size, 5.0)
    cells: dict[int, list[str]] = {}
    for y, row in enumerate(heat.rows):
        for x, value in enumerate(row):
            place = f"M{left + x * size:.1f} {top + y * tall:.1f}h{size:.2f}v{tall:.2f}h-{size:.2f}"
            cells.setdefault(round(LEVELS * value), []).append(place)
    bottom = top + rows * tall
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="plot" '
        f'viewBox="0 0 {chart.WIDTH:g} {bottom + 40:g}" role="img" '
        f'aria-label="{escape(heat.title)}"><title>{escape(heat.title)}</title>',
        f'<text class="label" x="0" y="12">{escape(heat.y)}</text>',
        *(
            f'<path class="cell c{0 if level > 0 else 2}" shape-rendering="crispEdges" '
            f'opacity="{abs(level) / LEVELS:.2f}" d="{"z".join(places)}z"/>'
            for level, places in sorted(cells.items())
            if level
        ),
    ]
    for y in range(0, rows, max(1, rows // 4)):
        parts.append(
            f'<text class="tick" x="{left - 6:g}" y="{top + (y + 0.5) * tall + 4:.1f}" '
            f'text-anchor="end">{y}</text>'
        )
    for x in range(0, columns, max(1, columns // 4)):
        parts.append(
            f'<text class="tick" x="{left + (x + 0.5) * size:.1f}" y="{bottom + 15:.1f}" '
            f'text-anchor="middle">{x}</text>'
        )
    parts.append(
        f'<text class="label" x="{chart.WIDTH:g}" y="{bottom + 34:g}" text-anchor="end">'
        f"{escape(heat.x)}: +1 violet, −1 orange</text></svg>"
    )
    return "".join(parts)


def _shaded(heat: Heat) -> Text:
    """A character for each number."""
    drawn = Text(f"{heat.y}\n", "dim")
    for y, row in enumerate(heat.rows):
        drawn.append(f"{y:>4} ", "dim")
        for value in row:
            shades = SHADES[value > 0]
            shade = shades[round(abs(value) * (len(shades) - 1))]
            drawn.append(shade, "magenta" if value > 0 else "yellow")
        drawn.append("\n")
    above, below = (SHADES[sign][-1] for sign in (True, False))
    drawn.append(f"     {heat.x}: {above} is +1, {below} is −1", "dim")
    return drawn
