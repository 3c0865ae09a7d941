"""The numbers in the findings about exercises, scores, temperature and masks.

Printed numbers are compared at their printed precision. Where one is the mean of random draws it
is compared with what more draws than an experiment takes gave, within their deviation.
"""

import json
import math
from functools import cache
from itertools import pairwise

import pytest

from regard.lab.claims import exercises, masks, scores, temperature
from regard.lab.experiment import Curve, Experiment, Finding, Table

EXPERIMENTS = {
    experiment.name: experiment
    for family in (exercises, scores, temperature, masks)
    for experiment in family.EXPERIMENTS
}


@cache
def finding(name: str) -> Finding:
    return EXPERIMENTS[name].run()


def measured(name: str, what: str) -> float:
    value = finding(name).measurements[what]
    assert isinstance(value, int | float)
    return value


def listed(name: str, what: str) -> list[float]:
    value = finding(name).measurements[what]
    assert isinstance(value, list)
    return value


def rounded(numbers: list[float], digits: int) -> list[float]:
    return [round(x, digits) for x in numbers]


def table(name: str) -> Table:
    (only,) = finding(name).tables
    return only


def curves(name: str) -> dict[str, Curve]:
    (plot,) = finding(name).plots
    return {curve.name: curve for curve in plot.curves}


# What all findings have in common


def test_every_item_has_an_experiment() -> None:
    wanted = {1, 2, 3, 4, 5, 6, 7, 8, 9, 23, 27, 28, 32, *range(36, 45), 54, 55}
    wanted |= {82, 83, 84, 85, 86, 87, 88, 89, 92}
    assert {experiment.item for experiment in EXPERIMENTS.values()} == wanted
    assert len(EXPERIMENTS) == sum(
        len(family.EXPERIMENTS) for family in (exercises, scores, temperature, masks)
    )


@pytest.mark.parametrize("experiment", EXPERIMENTS.values(), ids=EXPERIMENTS)
def test_findings_can_be_written_drawn_and_set(experiment: Experiment) -> None:
    found = finding(experiment.name)
    assert found.verdict != "undecided"
    assert found.measurements
    json.dumps(dict(found.measurements), allow_nan=False)
    for some in found.tables:
        assert some.rows
        assert all(len(row) == len(some.head) for row in some.rows)
        json.dumps(some.rows, allow_nan=False)
    for plot in found.plots:
        for curve in plot.curves:
            assert len(curve.x) == len(curve.y) > 1
            assert all(math.isfinite(number) for number in (*curve.x, *curve.y))
            assert not plot.log_x or min(curve.x) > 0
            assert not plot.log_y or min(curve.y) > 0


@pytest.mark.parametrize(
    ("name", "verdict"),
    [
        ("output-shape", "wrong as stated"),
        ("overflow", "holds under conditions"),
        ("score-indices", "wrong as stated"),
        ("value-product", "wrong as stated"),
        ("beside-a-dense-layer", "wrong as stated"),
        ("argument-order", "wrong as stated"),
        ("cold-limit", "wrong as stated"),
        ("preserving-a-value", "wrong as stated"),
        ("one-hot-suffices", "wrong as stated"),
        ("spreading", "wrong as stated"),
        ("moved-key-linear", "wrong as stated"),
        ("split-softmax", "wrong as stated"),
        ("longer-key", "holds under conditions"),
        ("causal-mask", "holds under conditions"),
        ("masked-row", "holds under conditions"),
        ("large-negative", "holds under conditions"),
        ("counting-by-mask", "wrong as stated"),
        ("variable-lengths", "wrong as stated"),
    ],
)
def test_what_is_taught_wrongly(name: str, verdict: str) -> None:
    assert finding(name).verdict == verdict


# Exercises


def test_exercise_1() -> None:
    assert listed("exercise-1", "scores") == [8, 6, 1]
    assert rounded(listed("exercise-1", "weights"), 4) == [0.8801, 0.1191, 0.0008]
    assert rounded(listed("exercise-1", "context"), 4) == [0.9992, 1.9992, 2.7586]
    assert rounded(listed("exercise-1-in-torch", "listing"), 4) == [0.9992, 1.9992, 2.7586]


def test_exercise_3_and_its_slips() -> None:
    first, second = finding("exercise-3").measurements["weights"]
    assert rounded(first, 3) == [0.576, 0.284, 0.140]
    assert rounded(second, 3) == [0.882, 0.106, 0.013]
    first, second = finding("exercise-3").measurements["output"]
    assert rounded(first, 3) == [0.860, 1.576, -0.724]
    assert rounded(second, 3) == [0.987, 1.882, -1.565]
    assert rounded(listed("exercise-3-slips", "not scaled"), 3) == [0.910, 1.665, -0.931]
    down = listed("exercise-3-slips", "softmax down the columns")
    assert rounded(down, 3) == [0.437, 1.214, -0.223]


def test_operations_were_counted() -> None:
    counts = finding("operation-counts").measurements
    assert counts == {"mul": 30, "div": 12, "add": 22, "exp": 6}
    for n_q, n_k, d_k, d_v, *executed, formula in table("operation-counts").rows:
        assert sum(executed) == formula == n_q * (2 * n_k * (d_k + d_v + 1) - d_v - 1)
    assert 1 < measured("operation-total", "over twice queries × keys × both widths") < 1.1
    assert dict(table("operation-total").rows)["n_q"] == 2


def test_exponentials_overflow_where_float32_ends() -> None:
    most = measured("overflow", "largest score that the listing bears")
    assert round(most, 1) == 88.7
    assert most == pytest.approx(math.log(3.4028235e38), abs=1e-5)
    by_listing = {score: plain for score, plain, _ in table("overflow").rows}
    assert by_listing[88.7] == "1.000000"
    assert by_listing[88.8] == "nan"
    assert {safe for *_, safe in table("overflow").rows if safe != "0.731059"} == {"1.000000"}


# Scores


def test_the_slope_of_the_softmax() -> None:
    """.00487 and .05422 are the means of 600,000 draws."""
    unscaled = measured("scale-and-gradient", "mean a(1-a), unscaled, d = 512")
    assert unscaled == pytest.approx(0.00487, abs=0.0002)
    scaled = measured("scale-and-gradient", "mean a(1-a), scaled, d = 512")
    assert scaled == pytest.approx(0.0542, abs=0.0003)
    falling = curves("scale-and-gradient")["unscaled"].y
    assert all(a > b for a, b in pairwise(falling))
    # Saturated, the slope falls as the scores grow: as 1/√d.
    assert falling[-1] / falling[-3] == pytest.approx(0.5, abs=0.05)


def test_the_variance_of_scores_is_the_width() -> None:
    found = curves("score-variance")
    for d, variance in zip(found["q·k"].x, found["q·k"].y, strict=True):
        assert variance == pytest.approx(d, rel=0.1)
    assert measured("score-variance", "β that attend uses, d = 512") == pytest.approx(512**-0.5)


def test_what_the_value_product_adds() -> None:
    found = curves("value-product")
    assert found["executed"].y == found["L_q L_k (d_k + d_v)"].y
    assert measured("value-product", "executed, all 8 wide") == 7 * 11 * 16
    assert curves("beside-a-dense-layer")["executed"].y == [1, 2, 4, 8, 16, 32]


def test_scores_have_the_parameters_that_they_should() -> None:
    assert dict(table("no-parameters").rows) == {
        "dot": 0,
        "scaled dot": 0,
        "general": 6 * 6,
        "additive": 6 * 5 + 6 * 5 + 5,
    }
    assert measured("no-parameters", "parameters of the projections around it") == 4 * 12 * 13


# Temperature


def test_weights_from_hot_to_cold() -> None:
    first = listed("preserving-a-value", "A₁₁ at β = 0, 0.1, 0.707, 2, 10")
    assert rounded(first, 3) == [0.333, 0.367, 0.576, 0.867, 1.000]
    assert measured("sharpness", "entropy at β = 0.01, in nats") < math.log(3)
    assert measured("sharpness", "entropy at β = 100") < 1e-40
    assert listed("cold-limit", "two best scores") == [0.5, 0.5, 0]


def test_errors_of_the_linear_formula() -> None:
    """Other 4,001 draws had medians of 1.6e-4, 1.6%, 16% and 55%."""
    medians = listed("moved-key-linear", "relative error of the linear formula, median")
    for median, other in zip(medians, (1.6e-4, 0.016, 0.16, 0.55), strict=True):
        assert median == pytest.approx(other, rel=0.1)
    # A change a hundred times as large has a hundred times the relative error, so no one draw,
    # scaled, gives both 6e-5 at 0.001 and 5.6% at 0.1.
    assert medians[1] / medians[0] == pytest.approx(100, rel=0.05)
    (plot,) = finding("moved-key-linear").plots
    found, expected = plot.curves
    small = [n for n, sigma in enumerate(found.x) if sigma < 0.2]
    for n in small:
        assert found.y[n] == pytest.approx(expected.y[n], rel=0.05)
    assert measured("moved-key-line", "output by the formula, off by") < 2e-15


def test_three_directions_of_a_longer_key() -> None:
    assert listed("longer-key", "q·k > 0")[1] == 1
    assert listed("longer-key", "q·k < 0")[1] == 0
    before, after = listed("longer-key", "q·k = 0")
    assert before == after


# Masks


def test_who_sees_nothing() -> None:
    assert measured("causal-mask", "pairs hidden") == 7 * 6 / 2
    assert measured("causal-mask", "queries with nothing to see, diagonal hidden") == 1
    found = finding("masked-row").measurements
    assert found["empty row by the listing is NaN"]
    assert found["gradients of all values by the listing are NaN"]
    assert found["empty row by attend"] == [0, 0]
    assert found["gradient of its query by attend"] == [0] * 5
    # Lowered alike, hidden scores are as good as those of no mask, but for rounding at 10⁹.
    assert measured("large-negative", "the same row, less that without any mask") < 1e-6


def test_the_future_is_exactly_unseen() -> None:
    assert measured("no-future", "largest ∂yᵢ/∂xⱼ, j > i") == 0
    assert measured("no-future", "logits before a change") == 0
    outputs = listed("counting-by-mask", "outputs, causal mask")
    assert outputs == pytest.approx([1 / n for n in range(1, 17)])


def test_only_a_padding_mask_keeps_the_filling_out() -> None:
    for _, mask, gap in table("variable-lengths").rows:
        assert (gap < 1e-12) == (mask == "yes")
