"""The cost tables of the course documents beside complete ones, and lengths of equal cost."""

from regard.lab.cost.layers import LAYERS, Measured, Sizes, layer
from regard.lab.experiment import Curve, Plot, Table


def comparison(
    s: Sizes, counted: dict[str, Measured | None]
) -> list[tuple[str, str, str, int, str, int, int | None, str]]:
    """(document, layer, as taught, its value, complete, its value, counted, what is left out)."""
    n, d, k = s.batch * s.length, s.width, s.kernel
    m = s.length

    def row(
        where: str, name: str, taught: str, gives: int, missing: str, parameters: bool = False
    ) -> tuple[str, str, str, int, str, int, int | None, str]:
        measured, one = counted[name], layer(name)
        cost = one.cost(s)
        if parameters:
            count = None if measured is None else measured.parameters
            return where, name, taught, gives, one.parameters, cost.parameters, count, missing
        count = None if measured is None else measured.multiply_adds
        return where, name, taught, gives, one.multiply_adds, cost.multiply_adds, count, missing

    whole, alone = "attention, with projections", "attention alone"
    return [
        row("slides", "dense over all positions", "n²d²", n * m * d * d, "nothing"),
        row("slides", whole, "n²d", n * m * d, "projections; the second product"),
        row("exercise sheet", "convolution", "knd", k * n * d, "the factor d: depthwise only"),
        row("exercise sheet", "depthwise convolution", "knd", k * n * d, "nothing"),
        row("exercise sheet", "plain recurrence", "nd²", n * d * d, "one of the two products"),
        row("exercise sheet", whole, "n²d", n * m * d, "projections; the second product"),
        row("handout", alone, "n²d", n * m * d, "the product with the values"),
        row("handout", whole, "2n²d", 2 * n * m * d, "projections"),
        row("handout", "plain recurrence", "nd²", n * d * d, "nd², for the state"),
        row("handout, parameters", whole, "3d²", 3 * d * d, "d² of W_O, and biases", True),
        row("handout, parameters", "convolution", "kd²", k * d * d, "biases", True),
    ]


def crossovers(s: Sizes) -> list[tuple[str, str, str, float | None]]:
    """(attention, other layer, n by formula, n): from this length on attention costs more.

    a·nd² + 2n²d = b·nd² at n = (b - a)·d/2; None where attention costs more at any length.
    """
    d, k = s.width, s.kernel
    others = {"plain recurrence": 2, "GRU": 6, "LSTM": 8, f"convolution, {k} taps": k}
    rows: list[tuple[str, str, str, float | None]] = []
    for name, a in (("attention alone", 0), ("attention, with projections", 4)):
        for other, b in others.items():
            half = (b - a) / 2
            words = "none: it always costs more" if half <= 0 else f"n = {_times(half)}d"
            rows.append((name, other, words, half * d if half > 0 else None))
    rows.append(("the two products", "the projections", "n = 2d", 2.0 * d))
    return rows


def _times(factor: float) -> str:
    return "" if factor == 1 else f"{factor:g}"


def scaling(s: Sizes) -> Plot:
    """Multiply-adds against the length, by formula."""
    top = max(12, (2 * s.length).bit_length())
    lengths = [2**e for e in range(3, top + 1)]
    names = [each.name for each in LAYERS if each.name not in ("GRU", "attention in a window")]
    curves = [
        Curve(
            name,
            lengths,
            [
                layer(name)
                .cost(Sizes(n, s.width, s.kernel, s.heads, s.window, s.batch))
                .multiply_adds
                for n in lengths
            ],
        )
        for name in names
    ]
    title = f"Multiply-adds at d = {s.width}, k = {s.kernel}"
    return Plot(title, "positions n", "multiply-adds", tuple(curves), log_x=True, log_y=True)


def comparison_table(s: Sizes, counted: dict[str, Measured | None]) -> Table:
    """`comparison` as a table."""
    head = ("document", "layer", "as taught", "", "complete", "", "counted", "left out")
    rows = tuple(
        (where, name, taught, short(gives), whole, short(is_so), mark(is_so, count), missing)
        for where, name, taught, gives, whole, is_so, count, missing in comparison(s, counted)
    )
    return Table("Beside the course documents", head, rows)


def short(number: int | float | None) -> str:
    """A number with four significant digits and an SI prefix."""
    if number is None:
        return "—"
    size = float(number)
    for letter in ("", " k", " M", " G", " T", " P"):
        if abs(size) < 1000:
            return f"{size:.4g}{letter}" if letter or size != int(size) else f"{int(size)}"
        size /= 1000
    return f"{size:.4g} E"


def mark(formula: int | None, count: int | None) -> str:
    """A count, and whether it equals the formula."""
    if count is None:
        return "—"
    return f"{short(count)} {'✓' if formula == count else '≠'}"
