"""The steps of attention in words: what each is, and the arithmetic of any entry.

Two conventions are in use. With rows, every query, key and value is a row, and C = A V. With
columns, as in H = V softargmax_β(Kᵀ Q), each is a column; all matrices are then the transposes of
the others, and the softmax runs down the columns.
"""

import math
import re
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple, TypeAlias

from torch import Tensor

from regard.lab.matrix import LONG, Cell, Matrix, decimal, exact, plain
from regard.lab.steps import Steps

Convention: TypeAlias = Literal["rows", "columns"]


class Stage(NamedTuple):
    """One matrix of `Steps`, and what there is to say about it."""

    name: str
    letter: str
    """What its entries are called: A[1,2]"""
    equation: str
    latex: str
    sentence: str
    matrix: Tensor
    figures: Matrix
    """The same, exact where it can be"""
    rows: str = "q"
    """Letter that names the rows, where they have a name"""
    columns: str = "k"
    """Letter that names the columns, where they have a name"""
    shares: bool = False
    """Whether the entries are parts of 1, to be drawn as such"""


def stages(steps: Steps, convention: Convention = "rows", digits: int = 3) -> list[Stage]:
    """The steps in words, in the order in which one takes them."""
    found = _stages(steps, digits)
    if convention == "rows":
        return found
    along = {
        "Scores": ("S = Kᵀ Q", r"S = K^\top Q"),
        "Output": ("H = V A", "H = V A"),
    }
    turned = []
    for stage in found:
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
    K, beta, exactly = steps.key.shape[1], _shown(steps.factor, digits), steps.exactly
    if steps.beta == math.inf:
        scaling = (
            "β = ∞",
            r"Z = \lim_{\beta \to \infty} \beta \left(S - \max S\right)",
            "Only the best key of each query stays in the race; equals stay together.",
        )
    elif steps.natural:
        reason = "scores of random vectors keep variance 1 at any width d."
        scaling = (
            f"Z = S / √{K}",
            rf"Z = \frac{{S}}{{\sqrt{{{K}}}}}",
            f"Divided by √d = √{K}, {reason}",
        )
    elif steps.beta == 1:
        scaling = "Z = S", "Z = S", "Nothing is divided: β = 1."
    else:
        scaling = (
            f"Z = {beta} S",
            rf"Z = {beta} \, S",
            f"β = {beta} sets how sharp the choice is: 0 not at all, ∞ hard.",
        )
    masked = Stage(
        "Masked",
        "M",
        f"M: {steps.mask}",
        r"M = Z \text{ with } {-\infty} \text{ where the mask forbids}",
        "What the mask forbids becomes -∞, which no score of another can make up for.",
        steps.masked,
        exactly.masked,
    )
    letter = "Z" if steps.mask is None else "M"
    return [
        Stage(
            "Scores",
            "S",
            "S = Q Kᵀ",
            r"S = Q K^\top",
            "Every query meets every key in a dot product: how well does the key fit?",
            steps.scores,
            exactly.scores,
        ),
        Stage("Scaled", "Z", *scaling, steps.scaled, exactly.scaled),
        *([masked] if steps.mask is not None else []),
        Stage(
            "Exponentials",
            "E",
            f"E = exp({letter} - max)",
            rf"E = \exp\left({letter} - \max_{{\text{{row}}}} {letter}\right)",
            "All become positive. Less the largest of its row, none can overflow.",
            steps.exponentials,
            exactly.exponentials,
        ),
        Stage(
            "Weights",
            "A",
            "A = E / Σ E",
            r"A = E \,/\, \textstyle\sum_{\text{row}} E",
            "Along each row, divided by its sum: a query's weights add up to 1.",
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
    """How one entry comes about."""

    cell: str
    """Its name: A[1,2]"""
    equals: tuple[str, ...]
    """What it equals, from what one writes down to the number"""
    because: str = ""
    """What no arithmetic says"""

    def __str__(self) -> str:
        said = " = ".join((self.cell, *self.equals))
        return f"{said}   ({self.because})" if self.because else said


def arithmetic(
    steps: Steps,
    stage: Stage,
    row: int,
    column: int,
    convention: Convention = "rows",
    digits: int = 3,
    most: int | None = None,
) -> Arithmetic:
    """Entry (row, column) of a stage's matrix, counted from 0, in figures.

    Of a sum, `most` terms are written, or all.
    """
    cell = f"{stage.letter}[{row + 1},{column + 1}]"
    q, k = (row, column) if convention == "rows" else (column, row)
    known, weights = steps.exactly, steps.weights[q]

    def figure(matrix: Matrix, one: int, other: int) -> str:
        return _shown(matrix.rows[one][other], digits)

    match stage.name:
        case "Scores":
            dot = _products(known.query.rows[q], known.key.rows[k], digits, most)
            pair = (f"q{q + 1}·k{k + 1}", f"k{k + 1}·q{q + 1}")[convention == "columns"]
            return Arithmetic(cell, (pair, dot, figure(known.scores, q, k)))
        case "Scaled":
            score, number = figure(known.scores, q, k), known.scaled.rows[q][k]
            results = _both(number, digits)
            if steps.beta == math.inf:
                word = "is" if steps.scaled[q, k] == 0 else "is not"
                said = f"{score} {word} the largest that q{q + 1} may attend to"
                return Arithmetic(cell, results, said)
            if steps.natural:
                return Arithmetic(cell, (f"{score} / √{steps.key.shape[1]}", *results))
            beta = _shown(steps.factor, digits)
            return Arithmetic(cell, (f"{beta} · {_signed(score)}", *results))
        case "Masked":
            allowed = steps.mask is None or bool(steps.mask.tensor(*steps.scores.shape)[0, 0, q, k])
            word = "may" if allowed else "may not"
            said = f"q{q + 1} {word} attend to k{k + 1}"
            return Arithmetic(cell, (figure(known.masked, q, k),), said)
        case "Exponentials":
            own, largest = float(steps.masked[q, k]), float(steps.masked[q].max())
            if largest == -math.inf:
                return Arithmetic(cell, ("0",), f"q{q + 1} may attend to nothing")
            less = f"exp({decimal(own, digits)} - {_signed(decimal(largest, digits))})"
            return Arithmetic(cell, (less, figure(known.exponentials, q, k)))
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
    """One entry of a stage's matrix in figures, by the stage's name.

    It follows the second largest weight of the first row that has any, which shows most.
    """
    rows = steps.weights.any(-1).nonzero()
    if not len(rows) or not steps.value.shape[1]:
        return {}
    row = int(rows[0])
    order = steps.weights[row].argsort(descending=True, stable=True)
    column = int(order[min(1, len(order) - 1)])
    examples = {}
    for stage in stages(steps, digits=digits):
        if stage.name == "Masked" or (stage.name == "Scaled" and steps.beta == math.inf):
            continue
        at = 0 if stage.name == "Output" else column
        said = " = ".join(arithmetic(steps, stage, row, at, digits=digits, most=4).equals)
        letter = "c" if convention == "rows" else "h"
        entry = f"{letter}{row + 1}, first entry: " if stage.name == "Output" else ""
        examples[stage.name] = entry + said
    return examples


_CELL = re.compile(r"([A-Za-z]+)(?:\[\s*(\d+)\s*,\s*(\d+)\s*\])?")


def chosen(found: Sequence[Stage], words: Sequence[str]) -> list[tuple[Stage, int, int]]:
    """The entries that these words name, A[1,2] or weights[1,2], or all of A; without words all."""
    if not words:
        return [
            (stage, row, column)
            for stage in found
            for row in range(stage.matrix.shape[0])
            for column in range(stage.matrix.shape[1])
        ]
    cells = []
    for word in words:
        match = _CELL.fullmatch(word.strip())
        if match is None:
            raise ValueError(f"explain ({word!r}) names no entry; {_names(found)}")
        name, *place = match.groups()
        stage = next((s for s in found if name.lower() in (s.letter.lower(), s.name.lower())), None)
        if stage is None:
            raise ValueError(f"explain ({word!r}): there is no {name}; {_names(found)}")
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


def _names(found: Sequence[Stage]) -> str:
    names = ", ".join(f"{stage.letter} ({stage.name.lower()})" for stage in found)
    return f'write "A[1,2]" or A, with one of {names}'


def _shown(cell: Cell, digits: int) -> str:
    """A cell as it stands in a line of arithmetic."""
    return plain(cell) if exact(cell) and len(plain(cell)) <= LONG else decimal(float(cell), digits)


def _both(cell: Cell, digits: int) -> tuple[str, ...]:
    """Exactly, and in decimals too where that is something else."""
    said, rounded = _shown(cell, digits), decimal(float(cell), digits)
    return (said,) if said == rounded else (said, rounded)


def _products(a: Sequence[Cell], b: Sequence[Cell], digits: int, most: int | None) -> str:
    """The sum of products that a dot product is, in figures."""
    pairs = [(_signed(_shown(x, digits)), _signed(_shown(y, digits))) for x, y in zip(a, b)]
    return _sum((f"{x}·{y}" for x, y in pairs), most)


def _signed(number: str) -> str:
    return f"({number})" if number.startswith("-") else number


def _sum(terms: Iterable[str], most: int | None) -> str:
    """Terms with plus signs between them; where there are too many, the first ones."""
    given = list(terms)
    shown = given if most is None or len(given) <= most else [*given[: most - 1], "…"]
    return " + ".join(shown) or "0"
