"""Cells of a table, and ratios that a reader gets by dividing the cells."""

import math
from collections.abc import Iterable


def cell(value: float) -> str:
    """Three significant digits: 0.421, 11.0, 177,000."""
    value = float(f"{value:.3g}")
    digits = 2 - math.floor(math.log10(abs(value))) if value else 0
    return f"{value:,.{max(0, digits)}f}"


def ratio(numerator: str, denominator: str) -> str:
    """The quotient of two cells as they are printed, not of what was measured."""
    return cell(_number(numerator) / _number(denominator))


def markdown(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [list(head), *map(list, rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _number(text: str) -> float:
    return float(text.replace(",", ""))
