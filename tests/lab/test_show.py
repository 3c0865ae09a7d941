"""Numbers, equations, plots and experiments as characters."""

import io
import math
import re

import pytest
from rich.console import Console, RenderableType

from regard.lab import show
from regard.lab.chart import axis, terminal
from regard.lab.claims import FAMILIES, experiments
from regard.lab.equation import plain
from regard.lab.experiment import Curve, Measured, Plot, Table
from regard.lab.numbers import column, figure
from regard.lab.perform import Result


def printed(what: RenderableType, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(what)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())


# Numbers


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (True, "yes"),
        (0.0, "0"),
        (1234567, "1,234,567"),
        (-3, "−3"),
        (0.57612, "0.5761"),
        (2.0, "2"),
        (12345.678, "12,346"),
        (2e-15, "2.0×10⁻¹⁵"),
        (-5.8e7, "−5.8×10⁷"),
        (math.inf, "∞"),
        (-math.inf, "−∞"),
        (math.nan, "NaN"),
        ("soft", "soft"),
        ([0.25, 1], "[0.25, 1]"),
        ([[1, 2], [3, 4]], "[[1, 2]; [3, 4]]"),
    ],
)
def test_a_figure(value: Measured, written: str) -> None:
    assert figure(value) == written


@pytest.mark.parametrize(
    ("values", "written"),
    [
        ((0.5761, 0.28402, 1.0), ["0.576", "0.284", "1.000"]),
        ((1.0, 2.0, 10.0), ["1", "2", "10"]),
        ((0.5, 0.25), ["0.50", "0.25"]),
        ((1.4, 2e-8), ["1.4", "2.0×10⁻⁸"]),
        ((0.5, "none"), ["0.5", "none"]),
        ((0.5, math.inf), ["0.5", "∞"]),
    ],
)
def test_a_column_lines_up(values: tuple[Measured, ...], written: list[str]) -> None:
    assert column(values) == written


# Equations


@pytest.mark.parametrize(
    ("latex", "written"),
    [
        (
            r"C = \operatorname{softmax}\left(\frac{QK^\top}{\sqrt{d_k}}\right)V",
            "C = softmax(QKᵀ/√dₖ)V",
        ),
        (r"a'_j = \frac{a_j e^{\delta}}{1 + a_j (e^{\delta} - 1)}", "a′ⱼ = aⱼeᵟ/(1 + aⱼ(eᵟ − 1))"),
        (r"\mathrm{Var}(q \cdot k) = d_k \text{ for all } d_k", "Var(q·k) = dₖ for all dₖ"),
        (r"\sum_k \cos \omega_k (i-j) \geq -1", "Σₖ cos ωₖ(i − j) ≥ −1"),
        (r"O(n_q n_k (d_k + d_v))", "O(n_q nₖ(dₖ + dᵥ))"),
    ],
)
def test_a_plain_equation(latex: str, written: str) -> None:
    assert plain(latex) == written


def test_every_equation_can_be_written_plainly() -> None:
    for experiment in experiments():
        for equation in experiment.equations:
            assert not set(plain(equation)) & set("\\{}$"), equation


# Plots


def test_an_axis_has_round_ticks() -> None:
    assert axis([0.03, 0.97], False, 5, True).ticks == pytest.approx((0, 0.2, 0.4, 0.6, 0.8, 1))
    assert axis([1e-8, 3.0], True, 4, True).ticks == pytest.approx((1e-6, 1e-3, 1))
    assert axis([1, 2, 4, 8], True, 5, False).ticks == (1, 2, 4, 8)
    assert axis([3, 3], False, 4, False).place(3) == pytest.approx(0.5)


@pytest.mark.parametrize("width", [40, 76])
def test_a_plot_keeps_to_its_width(width: int) -> None:
    curves = Curve("rising", range(11), range(11)), Curve("falling", range(11), range(10, -1, -1))
    drawn = terminal(Plot("title", "x", "y", curves), width)
    lines = drawn.plain.splitlines()
    assert max(map(len, lines)) <= width
    assert lines[0] == "y"
    assert "rising" in lines[-2]
    # Both curves reach both ends: their dots are in the first row and in the last.
    assert all(line.strip("│┤└ 0123456789") for line in (lines[1], lines[12]))


def test_curves_are_told_apart_without_colours() -> None:
    """Those that coincide too: their letters stand at different places."""
    x = (1.0, 2.0, 3.0)
    curves = tuple(Curve(name, x, (1.0, 2.0, last)) for name, last in (("one", 3), ("other", 3)))
    above, _, legend = terminal(Plot("title", "x", "y", curves), 60).plain.rpartition("   x\n")
    assert [above.count(letter) for letter in "ab"] == [3, 3]
    assert [line.split() for line in legend.splitlines()] == [["━a━", "one"], ["━b━", "other"]]
    alone = terminal(Plot("title", "x", "y", curves[:1]), 60).plain
    assert not re.search("[ab]", alone)


def test_what_has_no_place_on_a_plot_is_left_out() -> None:
    odd = Curve("odd", [0, 1, 2, 3], [1.0, math.inf, 0.0, math.nan])
    assert "nothing to draw" in terminal(Plot("", "x", "y", (odd,), log_x=True, log_y=True)).plain
    assert "⠀" not in terminal(Plot("", "x", "y", (odd,))).plain


# Experiments


def test_a_table_is_set_in_columns() -> None:
    table = Table("t", ("β", "weight"), ((0.1, 0.367), (10.0, 1.0)))
    assert printed(show.table(table)).splitlines() == [
        "   β   weight",
        "─────────────",
        " 0.1    0.367",
        "10.0    1.000",
    ]


def test_a_table_that_is_narrow_cuts_nothing_off() -> None:
    numbers = Table("", ("layer", "multiply-adds"), (("convolutions", "parameters"),))
    drawn = printed(show.table(numbers), 16)
    assert "…" not in drawn
    assert max(map(len, drawn.splitlines())) <= 16
    letters = "layermultiply-addsconvolutionsparameters"
    assert sorted(re.sub(r"[\s─]", "", drawn)) == sorted(letters)


def test_a_summary_counts_verdicts(results: dict[str, Result]) -> None:
    console = Console(file=io.StringIO(), width=110)
    some = [results["exercise-1"], results["equivariance"]]
    # A title stands in the column of names, and may be the longest of them.
    longest = max(FAMILIES, key=lambda family: len(family.title))
    show.summary([(longest, some)], 3.2, console)
    said = console.file.getvalue()
    assert "2 experiments in 3 s: 1 holds, 1 wrong as stated" in said
    assert re.search(r"✗ wrong as stated +15 +equivariance +Permuted rows give", said)
    assert max(len(line.rstrip()) for line in said.splitlines()) <= 110


@pytest.mark.parametrize("width", [50, 80, 140])
def test_an_experiment_fits_the_terminal(width: int, results: dict[str, Result]) -> None:
    console = Console(file=io.StringIO(), width=width)
    show.result(results["position-kernel"], console)
    assert max(len(line.rstrip()) for line in console.file.getvalue().splitlines()) <= width
