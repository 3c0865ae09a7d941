"""Attention by hand, exported: LaTeX, Markdown, HTML for notebooks, JSON.

Each is complete: no row or column is left out, whatever the size.
"""

import math
import re
from collections.abc import Sequence
from html import escape
from typing import Any

from regard.lab.matrix import Cell, Matrix, exact, latex, plain
from regard.lab.stages import Arithmetic, Convention, Stage, stages
from regard.lab.steps import Steps, operations


def _inputs(steps: Steps, convention: Convention) -> dict[str, Matrix]:
    matrices = dict(zip("QKV", steps.written))
    if convention == "rows":
        return matrices
    return {name: matrix.transposed for name, matrix in matrices.items()}


def equation(convention: Convention) -> str:
    """Attention in one line of LaTeX."""
    if convention == "rows":
        return r"C = \operatorname{softmax}\left(\beta\, Q K^\top\right) V"
    return r"H = V \operatorname{softargmax}_\beta\left(K^\top Q\right)"


# LaTeX


def to_latex(
    steps: Steps,
    convention: Convention = "rows",
    digits: int = 3,
    explained: Sequence[Arithmetic] = (),
) -> str:
    """A fragment to paste into a document that uses amsmath."""
    every, inputs = stages(steps, convention, digits), _inputs(steps, convention)
    widest = max(len(m.rows[0]) for m in (*inputs.values(), *(s.figures for s in every)))
    head = ["% needs \\usepackage{amsmath}"]
    if widest > 10:  # amsmath's default
        head.append(rf"\setcounter{{MaxMatrixCols}}{{{widest}}}")
    lines = [rf"{name} &= {_bmatrix(matrix, digits)}" for name, matrix in inputs.items()]
    for stage in every:
        left, _, right = stage.latex.partition(" = ")
        lines.append(rf"{left} &= {right} {_result(stage.figures, digits)}")
    counted = operations(steps)
    counts = " & ".join(("", *counted["total"].figures))
    rows = [
        " & ".join((name, *map(str, count.figures.values()))) for name, count in counted.items()
    ]
    text = [
        *head,
        rf"\[ {equation(convention)}, \qquad \beta = {_beta(steps, digits)} \]",
        _aligned(lines),
        *([_aligned([_arithmetic_latex(one) for one in explained])] if explained else []),
        r"\begin{tabular}{lrrrrr}",
        f"{counts} \\\\",
        *(f"{row} \\\\" for row in rows),
        r"\end{tabular}",
    ]
    return "\n".join(text)


def _aligned(lines: Sequence[str]) -> str:
    joined = " \\\\\n".join(lines)
    return f"\\begin{{align*}}\n{joined}\n\\end{{align*}}"


def _result(matrix: Matrix, digits: int) -> str:
    """The exact matrix, its decimals, or both."""
    rounded = _bmatrix(matrix, digits, decimals=True)
    if not matrix.exact:
        return rf"\approx {rounded}"
    known = f"= {_bmatrix(matrix, digits)}"
    return known if matrix.whole else rf"{known} \approx {rounded}"


def _bmatrix(matrix: Matrix, digits: int, decimals: bool = False) -> str:
    if decimals or not matrix.exact:
        cells = [[x.replace("∞", r"\infty") for x in row] for row in matrix.decimals(digits)]
    else:
        cells = [[latex(cell, digits) for cell in row] for row in matrix.rows]
    rows = r" \\ ".join(" & ".join(row) for row in cells)
    return rf"\begin{{bmatrix}} {rows} \end{{bmatrix}}"


def _beta(steps: Steps, digits: int) -> str:
    K = steps.key.shape[1]
    if steps.natural and not isinstance(steps.factor, float) and steps.beta != 1:
        return rf"\frac{{1}}{{\sqrt{{{K}}}}}"
    return latex(steps.factor, digits)


_SIGNS = {
    "·": r" \cdot ",
    "∞": r"\infty",
    "…": r"\dots",
    "exp(": r"\exp(",
}


def _math(text: str) -> str:
    """A line of arithmetic in LaTeX."""
    text = re.sub(r"√(\d+)", r"\\sqrt{\1}", text)
    text = re.sub(r"\b([a-zA-Z])(\d+)\b", r"\1_{\2}", text)
    text = re.sub(r"\b([A-Z])\[(\d+),(\d+)\]", r"\1_{\2,\3}", text)
    for sign, command in _SIGNS.items():
        text = text.replace(sign, command)
    return re.sub(r"  +", " ", text)


def _arithmetic_latex(entry: Arithmetic) -> str:
    # A number with decimals is rounded.
    parts = [(r" \approx " if "." in part else " = ") + _math(part) for part in entry.equals]
    reason = re.sub(r"([qk]\d+|-?∞|√\d+)", lambda m: f"${_math(m[0])}$", entry.because)
    because = rf" \qquad\text{{({reason})}}" if reason else ""
    return f"{_math(entry.cell)} &{''.join(parts).strip()}{because}"


# Markdown


def to_markdown(
    steps: Steps,
    convention: Convention = "rows",
    digits: int = 3,
    explained: Sequence[Arithmetic] = (),
) -> str:
    """Tables under headings, with equations between dollar signs."""
    parts = [f"## Attention by hand\n\n${equation(convention)}$, $\\beta = {_beta(steps, digits)}$"]
    for name, matrix in _inputs(steps, convention).items():
        letters = (name.lower(), "") if convention == "rows" else ("", name.lower())
        parts.append(f"**{name}**\n\n{_pipes(matrix.figures(digits), *letters)}")
    for number, stage in enumerate(stages(steps, convention, digits), 1):
        parts.append(f"### {number}. {stage.name}: ${stage.latex}$\n\n{stage.sentence}")
        parts += [
            _pipes(cells, stage.rows, stage.columns) for cells in _versions(stage.figures, digits)
        ]
    counted = operations(steps)
    head = "| | " + " | ".join(counted["total"].figures) + " |\n|---|" + "--:|" * 5
    rows = [
        f"| {name} | " + " | ".join(f"{n:,}" for n in count.figures.values()) + " |"
        for name, count in counted.items()
    ]
    parts.append("### Operations\n\n" + "\n".join([head, *rows]))
    if explained:
        parts.append("### Entry by entry\n\n" + "\n".join(f"- `{one}`" for one in explained))
    return "\n\n".join(parts)


def _versions(matrix: Matrix, digits: int) -> list[list[list[str]]]:
    """The exact matrix, its decimals, or both."""
    if not matrix.exact:
        return [matrix.decimals(digits)]
    return [matrix.figures(digits)] + [matrix.decimals(digits)] * (not matrix.whole)


def _pipes(cells: list[list[str]], rows: str, columns: str) -> str:
    names = [f"{columns}{n}" if columns else " " for n in range(1, len(cells[0]) + 1)]
    head = f"| | {' | '.join(names)} |\n|---|{'--:|' * len(names)}"
    lines = [
        f"| {f'**{rows}{n}**' if rows else ' '} | {' | '.join(row)} |"
        for n, row in enumerate(cells, 1)
    ]
    return "\n".join([head, *lines])


# HTML, for notebooks


class Shown(Steps):
    """Steps that a notebook shows as tables."""

    def _repr_html_(self) -> str:
        return html(self)


def html(steps: Steps, convention: Convention = "rows", digits: int = 3) -> str:
    """Small tables side by side, in the colours of the page around them."""
    boxes = []
    for name, matrix in _inputs(steps, convention).items():
        letters = (name.lower(), "") if convention == "rows" else ("", name.lower())
        size = f"{len(matrix.rows)} × {len(matrix.rows[0])}"
        boxes.append(_box(name, size, [_html_table(matrix.figures(digits), *letters)]))
    for stage in stages(steps, convention, digits):
        boxes.append(_box(stage.name, stage.equation, _stage_tables(stage, digits)))
    style = "display:flex;flex-wrap:wrap;gap:1em 2em;align-items:flex-start"
    return f'<div style="{style}">{"".join(boxes)}</div>'


def _stage_tables(stage: Stage, digits: int) -> list[str]:
    shares = stage.figures if stage.shares else None
    return [
        _html_table(cells, stage.rows, stage.columns, shares)
        for cells in _versions(stage.figures, digits)
    ]


def _box(title: str, aside: str, tables: list[str]) -> str:
    head = f'<b>{escape(title)}</b> <span style="opacity:.65">{escape(aside)}</span>'
    inside = '<div style="display:flex;gap:1.2em">' + "".join(tables) + "</div>"
    return f"<div>{head}{inside}</div>"


def _html_table(
    cells: list[list[str]], rows: str, columns: str, shares: Matrix | None = None
) -> str:
    label = "padding:.1em .5em;font-weight:normal;opacity:.65;background:none"
    lines = []
    if columns:
        heads = "".join(
            f'<th style="{label};text-align:right">{columns}{n}</th>'
            for n in range(1, len(cells[0]) + 1)
        )
        lines.append(f"<tr>{'<th></th>' if rows else ''}{heads}</tr>")
    for n, row in enumerate(cells):
        first = f'<th style="{label}">{rows}{n + 1}</th>' if rows else ""
        entries = "".join(
            f'<td style="padding:.1em .5em;text-align:right{_shade(shares, n, m)}">{escape(x)}</td>'
            for m, x in enumerate(row)
        )
        lines.append(f'<tr style="background:none">{first}{entries}</tr>')
    style = "border-collapse:collapse;margin:.3em 0;font-variant-numeric:tabular-nums"
    return f'<table style="{style}">{"".join(lines)}</table>'


def _shade(shares: Matrix | None, row: int, column: int) -> str:
    if shares is None:
        return ""
    # A medium colour, on which black and white text are both readable.
    return f";background:rgba(170,90,200,{0.6 * float(shares.rows[row][column]):.2f})"


# JSON


def to_json(
    steps: Steps, convention: Convention = "rows", explained: Sequence[Arithmetic] = ()
) -> dict[str, Any]:
    """All numbers, and in `exact` those known exactly; infinities are strings."""
    named = {
        **dict(zip(("query", "key", "value"), _inputs(steps, convention).values())),
        **{stage.name.lower(): stage.figures for stage in stages(steps, convention)},
    }
    data: dict[str, Any] = {
        "convention": convention,
        "beta": _number(steps.beta),
        "mask": None if steps.mask is None else str(steps.mask),
        **{
            name: [[_number(float(cell)) for cell in row] for row in matrix.rows]
            for name, matrix in named.items()
        },
        "exact": {
            "beta": _exact(steps.factor),
            **{name: [[_exact(c) for c in row] for row in m.rows] for name, m in named.items()},
        },
        "operations": {name: count.figures for name, count in operations(steps).items()},
    }
    if explained:
        data["explained"] = {one.cell: str(one) for one in explained}
    return data


def _number(x: float) -> float | str:
    return x if math.isfinite(x) else str(x)


def _exact(cell: Cell) -> str | None:
    return plain(cell) if exact(cell) else None
