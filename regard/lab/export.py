"""Attention by hand, exported: LaTeX, Markdown, HTML for notebooks, JSON.

Each is complete: no row or column is left out, whatever the size.
"""

import math
import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from regard.lab.layer import Layer, layer_operations, outputs, projections
from regard.lab.matrix import Cell, Matrix, exact, latex, plain
from regard.lab.scoring import Dot, Operations, Scoring, size
from regard.lab.stages import Arithmetic, Convention, Stage, stages
from regard.lab.steps import NOT_COUNTED, Steps, operations


def _inputs(steps: Steps, convention: Convention) -> dict[str, Matrix]:
    matrices = {**dict(zip("QKV", steps.written)), **steps.scoring.matrices}
    if convention == "rows":
        return matrices
    return {name: matrix.transposed for name, matrix in matrices.items()}


def equation(convention: Convention, scoring: Scoring = Dot()) -> str:  # noqa: B008, no state
    """Attention in one line of LaTeX."""
    score = scoring.latex[convention == "columns"].partition(" = ")[2]
    if convention == "rows":
        return rf"C = \operatorname{{softmax}}\left(\beta\, {score}\right) V"
    return rf"H = V \operatorname{{softargmax}}_\beta\left({score}\right)"


def _letters(name: str, convention: Convention) -> tuple[str, str]:
    """The letters that name rows and columns: those of vectors, and none of other matrices."""
    letter = name.lower() if name in "QKVXYZ" else ""
    return (letter, "") if convention == "rows" else ("", letter)


# LaTeX


def to_latex(
    steps: Steps,
    convention: Convention = "rows",
    digits: int = 3,
    explained: Sequence[Arithmetic] = (),
) -> str:
    """A fragment to paste into a document that uses amsmath."""
    every, inputs = stages(steps, convention, digits), _inputs(steps, convention)
    head = _preamble([*inputs.values(), *(stage.figures for stage in every)])
    lines = [rf"{name} &= {_bmatrix(matrix, digits)}" for name, matrix in inputs.items()]
    for stage in every:
        left, _, right = stage.latex.partition(" = ")
        lines.append(rf"{left} &= {right} {_result(stage.figures, digits)}")
    text = [
        *head,
        rf"\[ {equation(convention, steps.scoring)}, \qquad \beta = {_beta(steps, digits)} \]",
        _aligned(lines),
        *([_aligned([_arithmetic_latex(one) for one in explained])] if explained else []),
        _tabular(operations(steps)),
    ]
    return "\n".join(text)


def _preamble(matrices: Sequence[Matrix]) -> list[str]:
    widest = max(matrix.shape[1] for matrix in matrices)
    more = (
        [rf"\setcounter{{MaxMatrixCols}}{{{widest}}}"] if widest > 10 else []
    )  # amsmath's default
    return ["% needs \\usepackage{amsmath}", *more]


def _tabular(counted: Mapping[str, Operations]) -> str:
    rows = [("", *counted["total"].figures)]
    rows += [(name, *map(str, count.figures.values())) for name, count in counted.items()]
    lines = [f"{' & '.join(row)} \\\\" for row in rows]
    return "\n".join((r"\begin{tabular}{lrrrrr}", *lines, r"\end{tabular}", NOT_COUNTED))


def layer_to_latex(
    whole: Layer,
    convention: Convention = "rows",
    digits: int = 3,
    explained: Sequence[Sequence[Arithmetic]] = (),
) -> str:
    """A layer: its inputs and projections, each head, and the output."""
    given = [f"{_symbol(n)} &= {_bmatrix(m, digits)}" for n, m in _given(whole, convention).items()]
    before, after = (
        [f"{part.latex.replace(' = ', ' &= ')} {_result(part.figures, digits)}" for part in parts]
        for parts in (projections(whole, convention), outputs(whole, convention))
    )
    matrices = [*whole.inputs.values(), *whole.weights.values(), whole.joined]
    text = [*_preamble([*matrices, *whole.projected.values()]), _aligned([*given, *before])]
    for n, head in enumerate(whole.heads):
        entries = explained[n] if explained else ()
        text += [f"% head {n + 1}", to_latex(head, convention, digits, entries)]
    text += [_aligned(after)] if after else []
    return "\n".join((*text, _tabular(layer_operations(whole))))


def _given(whole: Layer, convention: Convention) -> dict[str, Matrix]:
    """The inputs and weights of a layer, by their letters."""
    inputs = {letter: whole.inputs[name] for name, letter in whole.sources.items()}
    matrices = {**inputs, **whole.weights}
    return {n: m if convention == "rows" else m.transposed for n, m in matrices.items()}


def _symbol(name: str) -> str:
    return re.sub(r"_(\w)$", r"_{\1}", name)


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
    formula = f"${equation(convention, steps.scoring)}$, $\\beta = {_beta(steps, digits)}$"
    parts = [f"## Attention by hand\n\n{formula}"]
    for name, matrix in _inputs(steps, convention).items():
        letters = _letters(name, convention)
        parts.append(f"**{name}**\n\n{_pipes(matrix.figures(digits), *letters)}")
    for number, stage in enumerate(stages(steps, convention, digits), 1):
        parts.append(f"### {number}. {stage.name}: ${stage.latex}$\n\n{stage.sentence}")
        parts += [
            _pipes(cells, stage.rows, stage.columns) for cells in _versions(stage.figures, digits)
        ]
    parts.append(_counts(operations(steps)))
    if explained:
        parts.append("### Entry by entry\n\n" + "\n".join(f"- `{one}`" for one in explained))
    return "\n\n".join(parts)


def _counts(counted: Mapping[str, Operations]) -> str:
    head = "| | " + " | ".join(counted["total"].figures) + " |\n|---|" + "--:|" * 5
    rows = [
        f"| {name} | " + " | ".join(f"{n:,}" for n in count.figures.values()) + " |"
        for name, count in counted.items()
    ]
    return "### Operations\n\n" + "\n".join([head, *rows, "", NOT_COUNTED])


def layer_to_markdown(
    whole: Layer,
    convention: Convention = "rows",
    digits: int = 3,
    explained: Sequence[Sequence[Arithmetic]] = (),
) -> str:
    """A layer: its inputs and projections, each head, and the output."""
    parts = [
        f"**{name}**\n\n{_pipes(matrix.figures(digits), *_letters(name, convention))}"
        for name, matrix in _given(whole, convention).items()
    ]
    before, after = (
        [
            f"## {part.name}: ${part.latex}$\n\n"
            + "\n\n".join(
                _pipes(cells, part.rows, part.columns) for cells in _versions(part.figures, digits)
            )
            for part in made
        ]
        for made in (projections(whole, convention), outputs(whole, convention))
    )
    for n, head in enumerate(whole.heads):
        entries = explained[n] if explained else ()
        written = to_markdown(head, convention, digits, entries)
        before.append(written.replace("## Attention by hand", f"## Head {n + 1}", 1))
    counted = _counts(layer_operations(whole)).replace("###", "##", 1)
    return "\n\n".join((*parts, *before, *after, counted))


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
        table = _html_table(matrix.figures(digits), *_letters(name, convention))
        boxes.append(_box(name, size(matrix.shape), [table]))
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
        **{f"score_{name}": matrix for name, matrix in steps.scoring.matrices.items()},
        **{
            stage.name.lower().replace(" ", "_"): stage.figures
            for stage in stages(steps, convention)
        },
    }
    data: dict[str, Any] = {
        "convention": convention,
        "beta": _number(steps.beta),
        "mask": None if steps.mask is None else str(steps.mask),
        **{name: _numbers(matrix) for name, matrix in named.items()},
        "exact": {
            "beta": _exact(steps.factor),
            **{name: [[_exact(c) for c in row] for row in m.rows] for name, m in named.items()},
        },
        "operations": {name: count.figures for name, count in operations(steps).items()},
    }
    if explained:
        data["explained"] = {one.cell: str(one) for one in explained}
    return data


def layer_to_json(
    whole: Layer,
    convention: Convention = "rows",
    explained: Sequence[Sequence[Arithmetic]] = (),
) -> dict[str, Any]:
    """A layer: what is given, what is made of it, and every head."""
    parts = (*projections(whole, convention), *outputs(whole, convention))
    matrices = {
        **_given(whole, convention),
        **{part.equation.partition(" = ")[0]: part.figures for part in parts},
    }
    final = whole.output if convention == "rows" else whole.output.transposed
    return {
        "convention": convention,
        **{name: _numbers(matrix) for name, matrix in matrices.items()},
        "heads": [
            to_json(head, convention, explained[n] if explained else ())
            for n, head in enumerate(whole.heads)
        ],
        "output": _numbers(final),
        "exact": {n: [[_exact(c) for c in row] for row in m.rows] for n, m in matrices.items()},
        "operations": {name: count.figures for name, count in layer_operations(whole).items()},
    }


def _numbers(matrix: Matrix) -> list[list[float | str]]:
    return [[_number(float(cell)) for cell in row] for row in matrix.rows]


def _number(x: float) -> float | str:
    return x if math.isfinite(x) else str(x)


def _exact(cell: Cell) -> str | None:
    return plain(cell) if exact(cell) else None
