"""The steps of attention in words: what each is, and the arithmetic of any entry.

There are two conventions. With rows, every query, key and value is a row, and C = A V. With
columns, H = V softargmax_β(Kᵀ Q), each is a column: all matrices are transposed, and the softmax
runs down the columns.
"""

import math
import re
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple, TypeAlias

from torch import Tensor

from regard.lab.matrix import Cell, Matrix, decimal, shown, signed
from regard.lab.steps import Steps

Convention: TypeAlias = Literal["rows", "columns"]


class Stage(NamedTuple):
    """One matrix of `Steps`, and its description."""

    name: str
    letter: str
    """The name of its entries, as in A[1,2]"""
    equation: str
    latex: str
    sentence: str
    matrix: Tensor
    figures: Matrix
    """The same, exact where possible"""
    rows: str = "q"
    """The letter that names the rows, or none"""
    columns: str = "k"
    """The letter that names the columns, or none"""
    shares: bool = False
    """Whether the entries are shares of 1, and get bars"""


def stages(steps: Steps, convention: Convention = "rows", digits: int = 3) -> list[Stage]:
    """The steps in words, in order."""
    by_rows = _stages(steps, digits)
    if convention == "rows":
        return by_rows
    rule = steps.scoring
    along = {"Scores": (rule.equation[1], rule.latex[1]), "Output": ("H = V A", "H = V A")}
    turned = []
    for stage in by_rows:
        equation, latex = along.get(stage.name, (stage.equation, stage.latex))
        turned.append(
            stage._replace(
                letter="H" if stage.letter == "C" else stage.letter,
                equation=equation,
                latex=latex.replace("row", "column"),
                sentence=stage.sentence.replace("its row", "its column").replace(
                    "Along each row", "Down each column"
                ),
                matrix=stage.matrix.T,
                figures=stage.figures.transposed,
                rows=stage.columns,
                columns="h" if stage.rows == "c" else stage.rows,
            )
        )
    return turned


def _stages(steps: Steps, digits: int) -> list[Stage]:
    K, beta, exactly = steps.key.shape[1], shown(steps.factor, digits), steps.exactly
    if steps.beta == math.inf:
        scaling = (
            "β = ∞",
            r"Z = \lim_{\beta \to \infty} \beta \left(S - \max S\right)",
            "Only the best key of each query counts; ties share the weight.",
        )
    elif steps.natural:
        reason = "so that scores of random vectors have variance 1 at any width d."
        scaling = (
            f"Z = S / √{K}",
            rf"Z = \frac{{S}}{{\sqrt{{{K}}}}}",
            f"Divided by √d = √{K}, {reason}",
        )
    elif steps.beta == 1:
        scaling = "Z = S", "Z = S", "The scores are not scaled: β = 1."
    else:
        scaling = (
            f"Z = {beta} S",
            rf"Z = {beta} \, S",
            f"β = {beta} sets how sharp the weights are: at 0 uniform, at ∞ hard.",
        )
    masking = [
        Stage(
            "Mask matrix",
            "M",
            f"M: {steps.mask}",
            r"M = \text{mask}",
            "0 where a query may attend to a key, −∞ where it may not.",
            steps.mask_matrix,
            Matrix.of(steps.mask_matrix),
        ),
        Stage(
            "Masked",
            "Y",
            "Y = Z + M",
            "Y = Z + M",
            "The mask is added to the scores: −∞ makes a weight exactly 0.",
            steps.masked,
            exactly.masked,
        ),
    ]
    letter = "Z" if steps.mask is None else "Y"
    empty = [f"q{n + 1}" for n, row in enumerate(steps.weights) if not row.any()]
    nothing = f"; {', '.join(empty)} may attend to nothing, and gets zeros" if empty else ""
    return [
        Stage(
            "Scores",
            "S",
            steps.scoring.equation[0],
            steps.scoring.latex[0],
            steps.scoring.sentence,
            steps.scores,
            exactly.scores,
        ),
        Stage("Scaled", "Z", *scaling, steps.scaled, exactly.scaled),
        *(masking if steps.mask is not None else []),
        Stage(
            "Exponentials",
            "E",
            f"E = exp({letter} - max)",
            rf"E = \exp\left({letter} - \max_{{\text{{row}}}} {letter}\right)",
            "Minus the maximum of its row, so that no exponential overflows.",
            steps.exponentials,
            exactly.exponentials,
        ),
        Stage(
            "Weights",
            "A",
            "A = E / Σ E",
            r"A = E \,/\, \textstyle\sum_{\text{row}} E",
            f"Along each row, divided by its sum: a query's weights add up to 1{nothing}.",
            steps.weights,
            exactly.weights,
            shares=True,
        ),
        Stage(
            "Output",
            "C",
            "C = A V",
            "C = A V",
            "Each query takes the mean of the values, by these weights.",
            steps.output,
            exactly.output,
            rows="c",
            columns="",
        ),
    ]


# The arithmetic of one entry


class Arithmetic(NamedTuple):
    """How one entry is computed."""

    cell: str
    """Its name: A[1,2]"""
    equals: tuple[str, ...]
    """What it equals, from the formula to the number"""
    because: str = ""
    """The reason, where there is no formula"""

    def __str__(self) -> str:
        line = " = ".join((self.cell, *self.equals))
        return f"{line}   ({self.because})" if self.because else line


def arithmetic(
    steps: Steps,
    stage: Stage,
    row: int,
    column: int,
    convention: Convention = "rows",
    digits: int = 3,
    most: int | None = None,
) -> Arithmetic:
    """The arithmetic of entry (row, column) of a stage's matrix, counted from 0.

    At most `most` terms of a sum are written; by default all.
    """
    cell = f"{stage.letter}[{row + 1},{column + 1}]"
    q, k = (row, column) if convention == "rows" else (column, row)
    known, weights = steps.exactly, steps.weights[q]

    def figure(matrix: Matrix, one: int, other: int) -> str:
        return shown(matrix.rows[one][other], digits)

    match stage.name:
        case "Scores":
            formula = steps.scoring.formula[convention == "columns"]
            for letter, place in (("q", q), ("k", k)):
                formula = re.sub(rf"\b{letter}\b", f"{letter}{place + 1}", formula)
            terms = steps.scoring.terms(known.query.rows[q], known.key.rows[k], digits)
            return Arithmetic(cell, (formula, _sum(terms, most), figure(known.scores, q, k)))
        case "Scaled":
            score, number = figure(known.scores, q, k), known.scaled.rows[q][k]
            results = _both(number, digits)
            if steps.beta == math.inf:
                word = "is" if steps.scaled[q, k] == 0 else "is not"
                reason = f"{score} {word} the largest that q{q + 1} may attend to"
                return Arithmetic(cell, results, reason)
            if steps.natural:
                return Arithmetic(cell, (f"{score} / √{steps.key.shape[1]}", *results))
            beta = shown(steps.factor, digits)
            return Arithmetic(cell, (f"{beta} · {signed(score)}", *results))
        case "Mask matrix":
            allowed = bool(steps.mask_matrix[q, k] == 0)
            reason = f"q{q + 1} {'may' if allowed else 'may not'} attend to k{k + 1}"
            return Arithmetic(cell, ("0" if allowed else "-∞",), reason)
        case "Masked":
            added = "0" if steps.mask_matrix[q, k] == 0 else "(-∞)"
            result = figure(known.masked, q, k)
            return Arithmetic(cell, (f"{figure(known.scaled, q, k)} + {added}", result))
        case "Exponentials":
            own, largest = float(steps.masked[q, k]), float(steps.masked[q].max())
            if largest == -math.inf:
                return Arithmetic(cell, ("0",), f"q{q + 1} may attend to nothing")
            shifted = f"exp({decimal(own, digits)} - {signed(decimal(largest, digits))})"
            return Arithmetic(cell, (shifted, figure(known.exponentials, q, k)))
        case "Weights":
            some = [n for n, weight in enumerate(weights.tolist()) if weight > 0]
            if not some:
                return Arithmetic(cell, ("0",), f"q{q + 1} may attend to nothing")
            summed = _sum((figure(known.exponentials, q, n) for n in some), most)
            quotient = f"{figure(known.exponentials, q, k)} / ({summed})"
            return Arithmetic(cell, (quotient, figure(known.weights, q, k)))
        case _:
            some = [n for n, weight in enumerate(weights.tolist()) if weight > 0]
            mean = _products(
                [known.weights.rows[q][n] for n in some],
                [known.value.rows[n][k] for n in some],
                digits,
                most,
            )
            return Arithmetic(cell, (mean, figure(known.output, q, k)))


def worked(steps: Steps, convention: Convention = "rows", digits: int = 3) -> dict[str, str]:
    """The arithmetic of one entry of each stage, by the stage's name.

    It follows the second largest weight of the first row that has any: the largest one is trivial.
    """
    rows = steps.weights.any(-1).nonzero()
    if not len(rows) or not steps.value.shape[1]:
        return {}
    row = int(rows[0])
    order = steps.weights[row].argsort(descending=True, stable=True)
    column = int(order[min(1, len(order) - 1)])
    examples = {}
    for stage in stages(steps, convention, digits):
        masking = stage.name in ("Mask matrix", "Masked")
        if masking or (stage.name == "Scaled" and steps.beta == math.inf):
            continue
        place = row, 0 if stage.name == "Output" else column
        place = place if convention == "rows" else place[::-1]
        line = " = ".join(arithmetic(steps, stage, *place, convention, digits, most=4).equals)
        letter = "c" if convention == "rows" else "h"
        entry = f"{letter}{row + 1}, first entry: " if stage.name == "Output" else ""
        examples[stage.name] = entry + line
    return examples


_CELL = re.compile(r"([A-Za-z]+)(?:\[\s*(\d+)\s*,\s*(\d+)\s*\])?")


def chosen(every: Sequence[Stage], words: Sequence[str]) -> list[tuple[Stage, int, int]]:
    """The entries that words name: A[1,2] or weights[1,2], or all of A; without words all."""
    if not words:
        return [
            (stage, row, column)
            for stage in every
            for row in range(stage.matrix.shape[0])
            for column in range(stage.matrix.shape[1])
        ]
    cells = []
    for word in words:
        match = _CELL.fullmatch(word.strip())
        if match is None:
            raise ValueError(f"explain ({word!r}) names no entry; {_names(every)}")
        name, *place = match.groups()
        stage = next((s for s in every if name.lower() in (s.letter.lower(), s.name.lower())), None)
        if stage is None:
            raise ValueError(f"explain ({word!r}): there is no {name}; {_names(every)}")
        if place[0] is None:
            cells += chosen([stage], ())
            continue
        row, column = (int(number) for number in place)
        rows, columns = stage.matrix.shape
        if not (1 <= row <= rows and 1 <= column <= columns):
            near = f"{stage.letter}[{min(max(row, 1), rows)},{min(max(column, 1), columns)}]"
            raise ValueError(
                f"explain ({word!r}): {stage.letter} is {rows} × {columns}, counted from 1; "
                f"try {near}"
            )
        cells.append((stage, row - 1, column - 1))
    return cells


def _names(every: Sequence[Stage]) -> str:
    names = ", ".join(f"{stage.letter} ({stage.name.lower()})" for stage in every)
    return f'write "A[1,2]" or A, with one of {names}'


def _both(cell: Cell, digits: int) -> tuple[str, ...]:
    """The exact value, and its decimals where they differ."""
    written, rounded = shown(cell, digits), decimal(float(cell), digits)
    return (written,) if written == rounded else (written, rounded)


def _products(a: Sequence[Cell], b: Sequence[Cell], digits: int, most: int | None) -> str:
    """A dot product, written as a sum of products."""
    pairs = [(signed(shown(x, digits)), signed(shown(y, digits))) for x, y in zip(a, b)]
    return _sum((f"{x}·{y}" for x, y in pairs), most)


def _sum(terms: Iterable[str], most: int | None) -> str:
    """Terms with plus signs between them; where there are too many, the first ones."""
    every = list(terms)
    kept = every if most is None or len(every) <= most else [*every[: most - 1], "…"]
    return " + ".join(kept) or "0"
