"""Matrices as written by hand: read from text or a file, and exact where possible.

    "1 2; 3 1"    "1/2 0, 1 -3"    "[[1, 2], [3, 1]]"    scores.csv    keys.npy

An entry is a fraction, a fraction times a square root (3√2/2), or else a float. Whole numbers and
fractions are exact; decimals are floats.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple, TypeAlias

import torch
from jaxtyping import Float64, Num
from torch import Tensor

LONG = 9
"""Characters of an exact entry beyond which its decimals are easier to read."""


@dataclass(frozen=True)
class Root:
    """factor · √radicand, with a square-free radicand and a factor that is not 0."""

    factor: Fraction
    radicand: int

    def __float__(self) -> float:
        return float(self.factor) * math.sqrt(self.radicand)


Cell: TypeAlias = Fraction | Root | float
"""A float is rounded, or infinite."""


def times(a: Cell, b: Cell) -> Cell:
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        return a * b
    if isinstance(a, Root) and isinstance(b, Fraction):
        return Root(a.factor * b, a.radicand) if b else Fraction(0)
    if isinstance(a, Fraction) and isinstance(b, Root):
        return times(b, a)
    return float(a) * float(b)


def inverse_root(number: int) -> Cell:
    """1/√number, as in 1/√d."""
    square = max(n for n in range(1, math.isqrt(number) + 1) if number % (n * n) == 0)
    radicand = number // (square * square)
    factor = Fraction(1, square * radicand)
    return factor if radicand == 1 else Root(factor, radicand)


def exact(cell: Cell) -> bool:
    return not isinstance(cell, float) or math.isinf(cell)


def plain(cell: Cell, digits: int = 3) -> str:
    """The cell as text: 3, 1/2, 3√2/2, -∞, or with `digits` decimals."""
    if isinstance(cell, Fraction):
        return str(cell)
    if isinstance(cell, Root):
        top, bottom = cell.factor.numerator, cell.factor.denominator
        times = {1: "", -1: "-"}.get(top, str(top))
        return f"{times}√{cell.radicand}" + (f"/{bottom}" if bottom > 1 else "")
    return decimal(cell, digits)


def latex(cell: Cell, digits: int = 3) -> str:
    """The same in LaTeX's math mode."""
    if isinstance(cell, float):
        return decimal(cell, digits).replace("∞", r"\infty")
    factor, root = (
        (cell.factor, rf"\sqrt{{{cell.radicand}}}") if isinstance(cell, Root) else (cell, "")
    )
    sign, top, bottom = "-" * (factor < 0), abs(factor.numerator), factor.denominator
    above = root if root and top == 1 else f"{top}{root}"
    return f"{sign}{above}" if bottom == 1 else rf"{sign}\frac{{{above}}}{{{bottom}}}"


def decimal(x: float, digits: int = 3, whole: bool | None = None) -> str:
    """With `digits` decimals, or without any for a whole number."""
    if math.isinf(x):
        return "∞" if x > 0 else "-∞"
    if abs(x) >= 1e9:
        return f"{x:.{digits}e}"
    if x == round(x) if whole is None else whole:
        return f"{x:.0f}"
    rounded = f"{x:.{digits}f}"
    return rounded.lstrip("-") if float(rounded) == 0 else rounded


def dot(a: Sequence[Cell], b: Sequence[Cell]) -> Cell:
    """A dot product: exact where all of its entries are fractions."""
    exact = total([times(x, y) for x, y in zip(a, b)])
    return math.fsum(float(x) * float(y) for x, y in zip(a, b)) if exact is None else exact


def shown(cell: Cell, digits: int) -> str:
    """A cell as it stands in a line of arithmetic."""
    return plain(cell) if exact(cell) and len(plain(cell)) <= LONG else decimal(float(cell), digits)


def signed(number: str) -> str:
    """A number after another: a negative one stands in parentheses."""
    return f"({number})" if number.startswith("-") else number


class Matrix(NamedTuple):
    """Rows of entries, all of one length."""

    rows: tuple[tuple[Cell, ...], ...]

    @classmethod
    def of(cls, tensor: Num[Tensor, "R C"]) -> "Matrix":
        """A tensor's entries; whole numbers are taken to be exact."""
        return cls(tuple(tuple(map(_cell, row)) for row in tensor.tolist()))

    def tensor(self) -> Float64[Tensor, "R C"]:
        rows = [[float(cell) for cell in row] for row in self.rows]
        return torch.tensor(rows, dtype=torch.float64)

    @property
    def transposed(self) -> "Matrix":
        return Matrix(tuple(zip(*self.rows)))

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.rows), len(self.rows[0]) if self.rows else 0

    def times(self, other: "Matrix") -> "Matrix":
        """The product of two matrices, exact where possible."""
        columns = other.transposed.rows
        return Matrix(tuple(tuple(dot(row, column) for column in columns) for row in self.rows))

    def columns(self, start: int, end: int) -> "Matrix":
        """Some of its columns."""
        return Matrix(tuple(row[start:end] for row in self.rows))

    @property
    def exact(self) -> bool:
        """Whether every entry is exact, and short enough to read."""
        cells = [cell for row in self.rows for cell in row]
        return all(exact(cell) and len(plain(cell)) <= LONG for cell in cells)

    @property
    def whole(self) -> bool:
        """Whether all entries are whole numbers or infinite."""
        return all(math.isinf(x) or x == round(x) for row in self.rows for x in map(float, row))

    def decimals(self, digits: int = 3) -> list[list[str]]:
        """All entries with the same number of decimals."""
        return [[decimal(float(cell), digits, self.whole) for cell in row] for row in self.rows]

    def figures(self, digits: int = 3) -> list[list[str]]:
        """Exact entries if all of them are; otherwise decimals."""
        if not self.exact:
            return self.decimals(digits)
        return [[plain(cell) for cell in row] for row in self.rows]


def _cell(x: float | int) -> Cell:
    return Fraction(x) if math.isfinite(x) and x == round(x) else float(x)


# Reading

MOST_DIGITS = 300
"""Of a whole number; float64 ends at 308."""

FORMS = 'write rows as "1 2; 3 1", or name a .csv or .npy file'


def read(text: str, name: str, infinite: bool = False) -> Matrix:
    """The matrix in a text or a file; error messages call it `name`. With `infinite` it may have
    entries of -inf."""
    path = Path(text)
    if path.suffix in (".csv", ".tsv", ".txt", ".npy") and not path.is_file():
        raise ValueError(f"{name}: there is no file {path}; {FORMS}")
    if path.suffix == ".npy":
        return _read_array(path, name, infinite)
    if path.suffix in (".csv", ".tsv", ".txt") or (not like_numbers(text) and path.is_file()):
        lines = path.read_text(encoding="utf-8-sig", errors="replace").splitlines()
        written = [line for line in lines if line.strip() and line[0] != "#"]
        return _parse(written, name, str(path), infinite)
    return _parse(_rows(text), name, None, infinite)


def number(text: str, name: str) -> Cell:
    """One number: 3, 1/2, 0.5, or inf, infinity or ∞."""
    if text.strip().lower() in ("inf", "infinity", "∞"):
        return math.inf
    try:
        return _parse_number(text)
    except (ValueError, ZeroDivisionError):
        raise ValueError(f"{name} ({text!r}) is not a number; write 0.5, 1/2 or inf") from None


def like_numbers(text: str) -> bool:
    """Whether a text is a matrix rather than a file name."""
    return re.fullmatch(r"([\s\d.,;/eE+\-−\[\]()∞]|\binf(inity)?\b)*", text) is not None


def _rows(text: str) -> list[str]:
    """The rows of a matrix in one text, with or without brackets."""
    rows = re.split(r"[;\n]|\]\s*,?\s*\[", text.strip().rstrip(";"))
    return [row.strip(" \t[]()") for row in rows]


def _parse(rows: Sequence[str], name: str, file: str | None, infinite: bool) -> Matrix:
    where = name if file is None else f"{name} ({file})"
    parsed: list[tuple[Cell, ...]] = []
    for n, row in enumerate(rows, 1):
        # Numbers are separated by commas or spaces; between two commas a number is missing.
        words = re.split(r"\s*[,;\t]\s*|\s+", row.strip())
        cells = []
        for word in words:
            try:
                hidden = infinite and re.fullmatch(r"[-−](inf|infinity|∞)", word.lower())
                cells.append(-math.inf if hidden else _parse_number(word))
            except ZeroDivisionError:
                raise ValueError(f"{where}: {word} in row {n} divides by 0") from None
            except ValueError:
                wrong = f"{word!r} in row {n} is not a finite number" if word else _missing(n, row)
                raise ValueError(f"{where}: {wrong}; {FORMS}") from None
        parsed.append(tuple(cells))
        if len(parsed[0]) != len(cells):
            raise ValueError(
                f"{where}: row {n} has {_count(len(cells))} but row 1 has {len(parsed[0])}; "
                "give every row as many"
            )
    if not parsed:
        raise ValueError(f"{where} is empty; {FORMS}")
    return Matrix(tuple(parsed))


def _missing(n: int, row: str) -> str:
    return f"row {n} is empty" if not row.strip() else f"row {n} ({row.strip()}) lacks a number"


def _count(numbers: int) -> str:
    return f"{numbers} number{'s' * (numbers != 1)}"


def _parse_number(word: str) -> Cell:
    word = word.replace("−", "-")  # a typographic minus
    if len(word) > MOST_DIGITS:
        raise ValueError("more digits than any number here has")
    exact = re.fullmatch(r"[+-]?\d+(/\d+)?", word)
    # Not as a fraction: that of 1e1000000000 would have a billion digits.
    value = Fraction(word) if exact else float(word)
    if not math.isfinite(float(value)):
        raise ValueError("beyond the numbers of float64")
    return value


def _read_array(path: Path, name: str, infinite: bool) -> Matrix:
    import numpy as np

    try:
        array = np.load(path, allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(
            f"{name} ({path}) is no array of numbers; save it with numpy.save"
        ) from error
    if array.ndim == 1:
        array = array[None]
    if array.ndim != 2 or not array.size or array.dtype.kind not in "biuf":
        raise ValueError(
            f"{name} ({path}) holds {array.dtype} of shape {array.shape}; save one matrix of "
            "numbers, for example array[0]"
        )
    if not (np.isfinite(array) | (infinite & np.isneginf(array))).all():
        raise ValueError(f"{name} ({path}) has entries that are infinite or NaN; replace them")
    return Matrix.of(torch.from_numpy(array.astype(np.float64)))


def total(cells: Sequence[Cell]) -> Fraction | None:
    """The sum of fractions; None where a cell is not a fraction."""
    fractions = [cell for cell in cells if isinstance(cell, Fraction)]
    return sum(fractions, Fraction(0)) if len(fractions) == len(cells) else None
