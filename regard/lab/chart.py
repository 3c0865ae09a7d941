"""Plots: in Braille characters for a terminal, and as SVG that follows the page's colour scheme.

Both share `Axis`: where a value lies, and the ticks. Matplotlib, which draws a run's curves, can do
neither: its SVG has fixed colours, unreadable on a dark page, and it has no terminal output.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from string import ascii_lowercase

from rich.text import Text

from regard.lab.experiment import Curve, Plot
from regard.lab.numbers import figure, power

COLOURS = ("magenta", "cyan", "yellow", "green", "blue", "red")
"""For a terminal; an SVG has the classes c0 … c5 instead."""


LETTERS = 3
"""How often a curve's letter stands on it, in a terminal."""


@dataclass(frozen=True)
class Axis:
    """One direction of a plot."""

    low: float
    high: float
    log: bool
    ticks: tuple[float, ...]

    def place(self, value: float | int) -> float:
        """0 at the low end, 1 at the high end."""
        low, high, at = (_log(v) if self.log else v for v in (self.low, self.high, value))
        return (at - low) / (high - low)

    def label(self, tick: float | int) -> str:
        """A tick as text."""
        exponent = round(_log(tick)) if self.log else 0
        if self.log and abs(exponent) > 3 and math.isclose(tick, 10.0**exponent):
            return power(exponent)
        return figure(round(tick, 12), 3)


def axis(values: Sequence[float | int], log: bool, ticks: int, wide: bool) -> Axis:
    """An axis over the values; a `wide` one extends to the next tick on both sides."""
    low, high = float(min(values)), float(max(values))
    if low == high:
        low, high = (low / 2, high * 2) if log else (low - 0.5, high + 0.5)
    if log and not wide and all(math.log2(value).is_integer() for value in values):
        marks = _doublings(low, high, ticks)
    else:
        marks = _decades(low, high, ticks) if log else _steps(low, high, ticks)
    if wide:
        low, high = min(low, marks[0]), max(high, marks[-1])
    slack = 1e-9 * (high - low)
    shown = tuple(mark for mark in marks if low - slack <= mark <= high + slack)
    return Axis(low, high, log, shown or (low, high))


def terminal(plot: Plot, width: int = 64, height: int = 12) -> Text:
    """The plot in Braille characters of 2 × 4 dots, with axes and legend.

    Several curves have letters besides colours, of which a file has none.
    """
    curves = _drawable(plot)
    if not curves:
        return Text("nothing to draw: no finite points", "dim")
    across, up = _axes(plot, curves, 5, 4)
    marks = {round((height - 1) * (1 - up.place(tick))): up.label(tick) for tick in up.ticks}
    margin = max(len(mark) for mark in marks.values())
    columns = max(16, width - margin - 2)
    dots: dict[tuple[int, int], int] = {}
    colours: dict[tuple[int, int], int] = {}
    letters: dict[tuple[int, int], int] = {}
    for number, curve in enumerate(curves):
        spots = [
            (across.place(x) * (2 * columns - 1), (1 - up.place(y)) * (4 * height - 1))
            for x, y in zip(curve.x, curve.y)
        ]
        rows: dict[int, int] = {}
        for x, y in _traced(spots):
            cell = y // 4, x // 2
            dots[cell] = dots.get(cell, 0) | _BRAILLE[y % 4][x % 2]
            colours.setdefault(cell, number)
            rows.setdefault(x // 2, y // 4)
        if len(curves) > 1:
            # Each at places of its own, so that curves that coincide are seen to.
            for turn in range(LETTERS):
                wanted = columns * (turn + (number + 1) / (len(curves) + 1)) / LETTERS
                place = min(rows, key=lambda one: abs(one - wanted))
                letters.setdefault((rows[place], place), number)
    drawn = Text()
    drawn.append(f"{plot.y}\n", "dim")
    for row in range(height):
        mark = marks.get(row, "")
        drawn.append(f"{mark:>{margin}} {'┤' if mark else '│'}", "dim")
        for place in range(columns):
            cell = row, place
            if cell in letters:
                number = letters[cell]
                drawn.append(_letter(number), COLOURS[number % len(COLOURS)])
            elif cell in dots:
                drawn.append(chr(0x2800 + dots[cell]), COLOURS[colours[cell] % len(COLOURS)])
            else:
                drawn.append(" ")
        drawn.append("\n")
    drawn.append(f"{'':{margin}} └{_ruler(across, columns, '─', '┴')}\n", "dim")
    drawn.append(f"{'':{margin}}  {_names(across, columns)}\n", "dim")
    drawn.append(f"{plot.x:>{margin + 2 + columns}}", "dim")
    if len(curves) > 1:
        for number, curve in enumerate(curves):
            drawn.append("\n" + " " * (margin + 2))
            drawn.append(f"━{_letter(number)}━ ", COLOURS[number % len(COLOURS)])
            drawn.append(curve.name)
    return drawn


def _letter(number: int) -> str:
    return ascii_lowercase[number % len(ascii_lowercase)]


def svg(plot: Plot) -> str:
    """The plot as an SVG element, coloured by CSS classes and `currentColor`."""
    curves = _drawable(plot)
    legend, below = _legend(curves)
    top, left, right, bottom = 26.0 + below, 52.0, 14.0, 44.0
    width, height = WIDTH, 252.0 + below
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="plot" viewBox="0 0 {width:g} {height:g}" '
        f'role="img" aria-label="{escape(plot.title)}">',
        f"<title>{escape(plot.title)}</title>",
        *legend,
        f'<text class="label" x="0" y="{below + 12:g}">{escape(plot.y)}</text>',
    ]
    if not curves:
        parts.append(f'<text x="{left}" y="{height / 2:g}">no finite points</text></svg>')
        return "".join(parts)
    across, up = _axes(plot, curves, 6, 5)

    def x_of(value: float) -> float:
        return left + across.place(value) * (width - left - right)

    def y_of(value: float) -> float:
        return height - bottom - up.place(value) * (height - top - bottom)

    for tick in up.ticks:
        y = y_of(tick)
        parts.append(
            f'<path class="rule" d="M{left:g} {y:.1f}H{width - right:g}"/>'
            f'<text class="tick" x="{left - 6:g}" y="{y + 4:.1f}" text-anchor="end">'
            f"{up.label(tick)}</text>"
        )
    floor = height - bottom
    for tick in across.ticks:
        x = x_of(tick)
        parts.append(
            f'<path class="axis" d="M{x:.1f} {floor:g}v4"/>'
            f'<text class="tick" x="{x:.1f}" y="{floor + 17:g}" text-anchor="middle">'
            f"{across.label(tick)}</text>"
        )
    parts.append(f'<path class="axis" d="M{left:g} {floor:g}H{width - right:g}"/>')
    parts.append(
        f'<text class="label" x="{width - right:g}" y="{height - 8:g}" text-anchor="end">'
        f"{escape(plot.x)}</text>"
    )
    for number, curve in enumerate(curves):
        spots = [(x_of(x), y_of(y)) for x, y in zip(curve.x, curve.y)]
        line = "L".join(f"{x:.1f} {y:.1f}" for x, y in spots)
        kind = f"c{number % len(COLOURS)}"
        parts.append(f'<path class="curve {kind}" d="M{line}"/>')
        if len(spots) <= 24:
            parts += [
                f'<circle class="dot {kind}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in spots
            ]
    parts.append("</svg>")
    return "".join(parts)


WIDTH = 400.0


def drawing(plots: Sequence[Plot], style: str) -> str:
    """Plots below one another as one SVG file, with the CSS of their classes."""
    return stacked([(plot.title, svg(plot)) for plot in plots], style)


def stacked(titled: Sequence[tuple[str, str]], style: str) -> str:
    """SVG elements below one another, each under its title, as one SVG file."""
    parts, y = [], 16.0
    for title, one in titled:
        height = float(one.split('viewBox="0 0 ', 1)[1].split('"', 1)[0].split()[1])
        parts.append(f'<text class="title" x="16" y="{y + 14:g}">{escape(title)}</text>')
        y += 30
        placed = f'<svg x="16" y="{y:g}" width="{WIDTH:g}" height="{height:g}" '
        parts.append(one.replace("<svg ", placed, 1))
        y += height + 20
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="regard-lab" '
        f'viewBox="0 0 {WIDTH + 32:g} {y:g}" width="{WIDTH + 32:g}" height="{y:g}">'
        f'<style>{style}</style><rect class="paper" width="100%" height="100%"/>'
        f"{''.join(parts)}</svg>\n"
    )


def _drawable(plot: Plot) -> list[Curve]:
    """The curves without infinities, NaNs, and what is not positive on a logarithmic axis."""
    curves = []
    for curve in plot.curves:
        points = [
            (float(x), float(y))
            for x, y in zip(curve.x, curve.y)
            if math.isfinite(x)
            and math.isfinite(y)
            and (x > 0 or not plot.log_x)
            and (y > 0 or not plot.log_y)
        ]
        if points:
            curves.append(Curve(curve.name, *zip(*points)))
    return curves


def _axes(plot: Plot, curves: Sequence[Curve], across: int, up: int) -> tuple[Axis, Axis]:
    xs = [x for curve in curves for x in curve.x]
    ys = [y for curve in curves for y in curve.y]
    return axis(xs, plot.log_x, across, False), axis(ys, plot.log_y, up, True)


def _steps(low: float, high: float, ticks: int) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten that enclose the range."""
    rough = (high - low) / ticks
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [number * step for number in range(first, last + 1)]


def _doublings(low: float, high: float, ticks: int) -> list[float]:
    """Powers of two, for values that are powers of two."""
    first, last = round(math.log2(low)), round(math.log2(high))
    return [2.0**e for e in range(first, last + 1, -(-(last - first) // ticks) or 1)]


def _decades(low: float, high: float, ticks: int) -> list[float]:
    """Powers of ten; within two decades also 2 and 5 times these."""
    first, last = math.floor(_log(low) + 1e-9), math.ceil(_log(high) - 1e-9)
    if last - first <= 2:
        fine = [f * 10.0**e for e in range(first, last + 1) for f in (1, 2, 5)]
        below = [mark for mark in fine if mark <= low * (1 + 1e-9)]
        above = [mark for mark in fine if mark >= high * (1 - 1e-9)]
        return [mark for mark in fine if below[-1] <= mark <= above[0]]
    every = -(-(last - first) // ticks)
    return [10.0**e for e in range(first, last + 1) if e % every == 0]


def _log(value: float | int) -> float:
    return math.log10(value)


_BRAILLE = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""The bit of each dot, by row and column within a character."""


def _traced(spots: Sequence[tuple[float, float]]) -> set[tuple[int, int]]:
    """The dots on straight lines from each point to the next."""
    dots = {(round(x), round(y)) for x, y in spots}
    for (x, y), (to_x, to_y) in pairwise(spots):
        count = max(1, math.ceil(max(abs(to_x - x), abs(to_y - y))))
        for number in range(count + 1):
            share = number / count
            dots.add((round(x + share * (to_x - x)), round(y + share * (to_y - y))))
    return dots


def _ruler(across: Axis, columns: int, plain: str, marked: str) -> str:
    line = [plain] * columns
    for tick in across.ticks:
        line[round(across.place(tick) * (columns - 1))] = marked
    return "".join(line)


def _names(across: Axis, columns: int) -> str:
    """Labels under their ticks, as many as fit."""
    line = [" "] * columns
    free = 0
    for tick in across.ticks:
        name = across.label(tick)
        centre = round(across.place(tick) * (columns - 1))
        start = min(max(0, centre - len(name) // 2), columns - len(name))
        if start >= free:
            line[start : start + len(name)] = name
            free = start + len(name) + 1
    return "".join(line).rstrip()


def _legend(curves: Sequence[Curve]) -> tuple[list[str], float]:
    """The legend above the plot, and its height."""
    if len(curves) < 2:
        return [], 0.0
    parts, x, y = [], 0.0, 12.0
    for number, curve in enumerate(curves):
        room = 28 + 6.4 * len(curve.name)
        if x and x + room > WIDTH:
            x, y = 0.0, y + 18
        parts.append(
            f'<path class="curve c{number % len(COLOURS)}" d="M{x:g} {y - 4:g}h18"/>'
            f'<text class="name" x="{x + 23:g}" y="{y:g}">{escape(curve.name)}</text>'
        )
        x += room + 8
    return parts, y + 12
