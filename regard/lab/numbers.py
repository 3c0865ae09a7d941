"""Formats numbers: significant digits, powers of ten, columns that align."""

import math
from collections.abc import Sequence

from regard.lab.experiment import Measured, Table

_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def figure(value: Measured, digits: int = 4) -> str:
    """A number with this many significant digits; a list in brackets."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return value
    if isinstance(value, int):
        return _signed(f"{value:,}")
    if isinstance(value, float):
        return _real(value, digits)
    between = "; " if any(_is_list(part) for part in value) else ", "
    return f"[{between.join(figure(part, digits) for part in value)}]"


def within(error: float) -> str:
    """How closely two results agree, in words."""
    return f"up to {figure(error)}" if error else "exactly"


def column(values: Sequence[Measured], digits: int = 4) -> list[str]:
    """A table's column, with equally many decimals in each row where magnitudes allow it."""
    reals = [value for value in values if isinstance(value, float) and math.isfinite(value)]
    sizes = [abs(value) for value in reals if value]
    even = bool(sizes) and max(sizes) < 10**digits and min(sizes) >= 10 ** (1 - digits)
    if not even:
        return [figure(value, digits - 1) for value in values]
    before = max(1, math.floor(math.log10(max(sizes))) + 1)
    decimals = max(0, digits - before)
    # Floats that are whole numbers need no decimals.
    while decimals and all(value == round(value, decimals - 1) for value in reals):
        decimals -= 1
    return [
        _signed(f"{value:,.{decimals}f}")
        if isinstance(value, float) and math.isfinite(value)
        else figure(value, digits)
        for value in values
    ]


def columns(table: Table) -> list[tuple[str, bool, list[str]]]:
    """The name of each column, whether it is right-aligned, and its cells."""
    values = [[row[place] for row in table.rows] for place in range(len(table.head))]
    return [
        (name, any(_numeric(value) for value in some), column(some))
        for name, some in zip(table.head, values)
    ]


def power(exponent: int) -> str:
    """10 to this power, with a superscript."""
    return f"10{str(exponent).translate(_RAISED)}"


def _numeric(value: Measured) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _real(value: float, digits: int) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if value == 0:
        return "0"
    if 1e-3 <= abs(value) < 1e6:
        rounded = f"{value:.{digits}g}"
        if "e" in rounded:
            rounded = f"{value:,.0f}"
        return _signed(rounded)
    mantissa, exponent = f"{value:.1e}".split("e")
    return _signed(f"{mantissa}×{power(int(exponent))}")


def _signed(written: str) -> str:
    """With a typographic minus."""
    return written.replace("-", "−", 1) if written.startswith("-") else written


def _is_list(value: Measured) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)
