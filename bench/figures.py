"""Figures of measurements, as SVG: letters as text, and the same file for the same numbers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from regard.machine import atomic


def figure(rows: int, columns: int, size: tuple[float, float]) -> tuple[Any, Any]:
    """A figure and its axes, rows by columns, each so many inches wide and high."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    made = Figure(figsize=(size[0] * columns, size[1] * rows), layout="constrained")
    FigureCanvasSVG(made)
    return made, made.subplots(rows, columns, squeeze=False)


def finish(axes: Any, title: str, below: str) -> None:
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_xlabel(below, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)


def save(made: Any, path: Path) -> None:
    from matplotlib import rc_context

    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "0"}), atomic.file(path) as draft:
        made.savefig(draft, format="svg", metadata={"Date": None})


def plain_ticks(axes: Any, places: Sequence[int]) -> None:
    """Numbers instead of powers of ten on both axes of a logarithmic plot."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axes.set_xticks(places, [f"{place:,}" for place in places])
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_ylim(bottom=axes.get_ylim()[0] / 2)
    axes.yaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
