"""The cost tables of the course documents beside complete ones, and lengths of equal cost.

Documents give orders, O(n² d_k), and never constants: what is taught is compared by its growth.
Complete formulas are exact, and compared with counts.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from regard.attention.attend import attend
from regard.lab.cost.count import counted, without_memory
from regard.lab.cost.layers import LAYERS, MUCH, Plain, Sizes, layer
from regard.lab.cost.orders import Formula, Widths, formula
from regard.lab.experiment import Curve, Plot, Table
from regard.lab.place import Document, Place

LETTERS: dict[Document, dict[str, str]] = {"slides": {"n": "N", "d": "D"}, "handout": {"n": "L"}}
"""What documents call the sizes, where it is something else."""


class Entry(NamedTuple):
    """One entry of a document's table."""

    place: Place
    layer: str
    what: Literal["multiply-adds", "parameters"]
    taught: Formula
    """The order, as it is printed."""
    complete: Formula
    """All of it, with its factors; biases left out."""
    make: Callable[[Widths], nn.Module]
    """The layer that the document means, without biases."""
    recurrent: bool = False

    @property
    def whole(self) -> bool:
        """Whether the order that is taught covers all of it."""
        return not self.complete.beyond(self.taught).terms

    # In the document's own letters

    @property
    def order(self) -> str:
        return f"O({self.taught.written(self._letters)})"

    @property
    def exact(self) -> str:
        return self.complete.written(self._letters)

    @property
    def left_out(self) -> str:
        """What grows faster than the order that is taught."""
        return self.complete.beyond(self.taught).written(self._letters)

    @property
    def _letters(self) -> dict[str, str]:
        return LETTERS.get(self.place.document, {})


class Projections(nn.Module):
    """Attention with its three projections, as in the handout: one head, and no W_O."""

    def __init__(self, s: Widths):
        super().__init__()
        self.query, self.key, self.value = (
            nn.Linear(s.d, width, bias=False) for width in (s.d_k, s.d_k, s.d_v)
        )

    def forward(self, x: Tensor) -> Tensor:
        # The CPU's fused kernel would widen narrow keys to the values' width, and count that.
        return attend(self.query(x), self.key(x), self.value(x), backend="formula")


class AllPositions(nn.Module):
    """One dense layer from all n·d numbers to n·d_v."""

    def __init__(self, s: Widths):
        super().__init__()
        self.dense = nn.Linear(s.n * s.d, s.n * s.d_v, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.dense(x.flatten(-2))


class Channels(nn.Module):
    """A convolution, over positions that stand in rows; with groups = channels, depthwise."""

    def __init__(self, s: Widths, depthwise: bool = False):
        super().__init__()
        groups = s.d if depthwise else 1
        out = s.d if depthwise else s.d_v
        self.convolution = nn.Conv1d(s.d, out, s.k, padding=s.k // 2, bias=False, groups=groups)

    def forward(self, x: Tensor) -> Tensor:
        return self.convolution(x.mT)


class DotProducts(nn.Module):
    """Q Kᵀ of n positions with themselves, and nothing else."""

    def forward(self, x: Tensor) -> Tensor:
        return x @ x.mT


def _linear(s: Widths) -> nn.Module:
    return nn.Linear(s.d, s.d, bias=False)


def _recurrence(s: Widths) -> nn.Module:
    return Plain(s.d, s.d_v, bias=False)


_DENSE, _SHARED = Place("slides", "dense layer"), Place("slides", "shared weights")
_SHEET = Place("sheet", "6-2(d)")
_COST, _WEIGHTS = Place("handout", "cost table"), Place("handout", "parameter table")


def _entry(
    place: Place,
    name: str,
    taught: str,
    complete: str,
    make: Callable[[Widths], nn.Module],
    what: Literal["multiply-adds", "parameters"] = "multiply-adds",
    recurrent: bool = False,
) -> Entry:
    return Entry(place, name, what, formula(taught), formula(complete), make, recurrent)


ENTRIES: tuple[Entry, ...] = (
    _entry(_DENSE, "dense over all positions", "n² d²", "n² d²", AllPositions),
    _entry(_DENSE, "dense over all positions", "n² d²", "n² d²", AllPositions, "parameters"),
    _entry(_SHARED, "W_Q, W_K and W_V", "d²", "3 d²", Projections, "parameters"),
    _entry(_SHARED, "the dot products", "n² d", "n² d", lambda s: DotProducts()),
    _entry(_SHARED, "the layer that follows", "n d²", "n d²", _linear),
    _entry(_SHEET, "convolution", "k n d", "k n d²", Channels),
    _entry(_SHEET, "depthwise convolution", "k n d", "k n d", lambda s: Channels(s, True)),
    _entry(_SHEET, "recurrence", "n d²", "2 n d²", _recurrence, recurrent=True),
    _entry(_SHEET, "attention", "n² d", "3 n d² + 2 n² d", Projections),
    _entry(_COST, "attention", "n² d_k", "2 n d d_k + n d d_v + n² d_k + n² d_v", Projections),
    _entry(_COST, "recurrence", "n d d_v", "n d d_v + n d_v²", _recurrence, recurrent=True),
    _entry(_COST, "convolution", "k n d d_v", "k n d d_v", Channels),
    _entry(_COST, "dense over all positions", "n² d d_v", "n² d d_v", AllPositions),
    _entry(_WEIGHTS, "attention", "2 d d_k + d d_v", "2 d d_k + d d_v", Projections, "parameters"),
    _entry(_WEIGHTS, "convolution", "k d d_v", "k d d_v", Channels, "parameters"),
    _entry(_WEIGHTS, "recurrence", "d d_v + d_v²", "d d_v + d_v²", _recurrence, "parameters"),
    _entry(_WEIGHTS, "dense over all positions", "n d d_v", "n² d d_v", AllPositions, "parameters"),
)
"""What the documents' tables say of layers, in orders, for n positions of width d."""


def entries(place: Place) -> list[Entry]:
    """The entries of one place."""
    return [entry for entry in ENTRIES if entry.place == place]


def widths(entry: Entry, s: Sizes) -> Widths:
    """The sizes of an entry's layer: in the handout d_k = d/8, elsewhere there is one width."""
    narrow = max(1, s.width // 8) if entry.place.document == "handout" else s.width
    return Widths(s.length, s.width, narrow, s.width, s.kernel)


def count(entry: Entry, sizes: Widths, batch: int = 1) -> int | None:
    """Multiply-adds while the layer runs, or its parameters; None where that would take long."""
    if entry.what == "parameters":
        return parameters(entry, sizes)
    shape = batch, sizes.n, sizes.d
    if not entry.recurrent:
        with without_memory(), torch.no_grad():
            return _multiply_adds(entry.make(sizes), torch.zeros(shape))
    # In float64 recurrence runs step by step; in float32 one fused operator hides the steps.
    if batch * entry.complete.at(sizes) > MUCH:
        return None
    with torch.no_grad():
        return _multiply_adds(entry.make(sizes).double(), torch.zeros(shape, dtype=torch.float64))


def parameters(entry: Entry, sizes: Widths) -> int:
    """The parameters of an entry's layer."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in entry.make(sizes).parameters())


def _multiply_adds(made: nn.Module, x: Tensor) -> int:
    return counted(lambda: made(x)).total.multiply_adds


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


def comparison(s: Sizes) -> list[tuple[Entry, int, int | None]]:
    """The entries, their complete formulas' values at these sizes, and counts."""
    found = []
    for entry in ENTRIES:
        sizes = widths(entry, s)
        batch = 1 if entry.what == "parameters" else s.batch
        found.append((entry, batch * entry.complete.at(sizes), count(entry, sizes, batch)))
    return found


def comparison_table(compared: list[tuple[Entry, int, int | None]]) -> Table:
    """`comparison` as a table: orders beside orders, counts beside counts."""
    head = ("place", "layer", "of", "order taught", "it leaves out", "complete", "", "counted")
    rows = tuple(
        (
            str(entry.place),
            entry.layer,
            entry.what,
            entry.order,
            entry.left_out,
            entry.exact,
            short(value),
            mark(value, counted),
        )
        for entry, value, counted in compared
    )
    return Table("Beside the course documents; in the handout d_k = d/8", head, rows)


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
