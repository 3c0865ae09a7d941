"""How things look in a notebook: HTML, with the plain text as what it falls back to.

Styles are inline and colours have an opacity, so that both light and dark pages show them.
"""

from collections.abc import Mapping
from html import escape

from torch import Tensor

CELLS = 32
"""Rows and columns of a picture, at most."""


def facts(title: str, rows: Mapping[str, object], below: str = "") -> str:
    """A title, and a table of names and values."""
    cells = "".join(
        f'<tr><td style="text-align:left;opacity:.65">{escape(str(name))}</td>'
        f'<td style="text-align:left">{escape(str(value))}</td></tr>'
        for name, value in rows.items()
    )
    table = f"<table>{cells}</table>" if cells else ""
    return f"<div><b>{escape(title)}</b>{table}{below}</div>"


def picture(allowed: Tensor, text: str, batch: int = 1, heads: int = 1) -> str:
    """A mask (L, S): a row for each query, a filled square where it may attend."""
    L, S = allowed.shape
    shown = allowed[:CELLS, :CELLS]
    rows, columns = shown.shape
    side = 10
    squares = "".join(
        f'<rect x="{side * j}" y="{side * i}" width="{side - 1}" height="{side - 1}" '
        f'fill="currentColor" fill-opacity="{0.85 if seen else 0.08}"/>'
        for i, row in enumerate(shown.tolist())
        for j, seen in enumerate(row)
    )
    told = [f"{L} queries, {S} keys"]
    if (rows, columns) != (L, S):
        told.append(f"the first {rows} and {columns} are shown")
    if batch > 1 or heads > 1:
        told.append(f"sentence 1 of {batch}, head 1 of {heads}")
    below = (
        f'<svg role="img" aria-label="{escape(text)}" width="{side * columns}" '
        f'height="{side * rows}" style="display:block;margin:.4em 0">{squares}</svg>'
        f'<small style="opacity:.65">{escape("; ".join(told))}</small>'
    )
    return facts(text, {}, below)
