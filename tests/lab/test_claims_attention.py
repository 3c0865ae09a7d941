"""The numbers in the findings about exercises, scores, temperature and masks.

Printed numbers are compared at their printed precision. Where one is the mean of random draws it
is compared with what more draws than an experiment takes gave, within their deviation.
"""

import math
from itertools import pairwise

import pytest

from regard.lab.experiment import Curve, Table
from regard.lab.perform import Result

Results = dict[str, Result]


def measured(results: Results, name: str, what: str) -> float:
    value = results[name].finding.measurements[what]
    assert isinstance(value, int | float)
    return value


def listed(results: Results, name: str, what: str) -> list[float]:
    value = results[name].finding.measurements[what]
    assert isinstance(value, list)
    return value


def rounded(numbers: list[float], digits: int) -> list[float]:
    return [round(x, digits) for x in numbers]


def table(results: Results, name: str) -> Table:
    (only,) = results[name].finding.tables
    return only


def curves(results: Results, name: str) -> dict[str, Curve]:
    (plot,) = results[name].finding.plots
    return {curve.name: curve for curve in plot.curves}


# Exercises


def test_exercise_1(results: Results) -> None:
    assert listed(results, "exercise-1", "scores") == [8, 6, 1]
    assert rounded(listed(results, "exercise-1", "weights"), 4) == [0.8801, 0.1191, 0.0008]
    assert rounded(listed(results, "exercise-1", "context"), 4) == [0.9992, 1.9992, 2.7586]
    assert rounded(listed(results, "exercise-1-in-torch", "listing"), 4) == [0.9992, 1.9992, 2.7586]


def test_exercise_3_and_its_slips(results: Results) -> None:
    first, second = results["exercise-3"].finding.measurements["weights"]
    assert rounded(first, 3) == [0.576, 0.284, 0.140]
    assert rounded(second, 3) == [0.882, 0.106, 0.013]
    first, second = results["exercise-3"].finding.measurements["output"]
    assert rounded(first, 3) == [0.860, 1.576, -0.724]
    assert rounded(second, 3) == [0.987, 1.882, -1.565]
    assert rounded(listed(results, "exercise-3-slips", "not scaled"), 3) == [0.910, 1.665, -0.931]
    down = listed(results, "exercise-3-slips", "softmax down the columns")
    assert rounded(down, 3) == [0.437, 1.214, -0.223]


def test_operations_were_counted(results: Results) -> None:
    counts = results["operation-counts"].finding.measurements
    assert counts == {"mul": 30, "div": 12, "add": 22, "exp": 6}
    for n_q, n_k, d_k, d_v, *executed, formula in table(results, "operation-counts").rows:
        assert sum(executed) == formula == n_q * (2 * n_k * (d_k + d_v + 1) - d_v - 1)
    assert 1 < measured(results, "operation-total", "over twice queries × keys × both widths") < 1.1
    doubled = {row[0]: row[1:] for row in table(results, "operation-total").rows}
    assert doubled["n_q"] == (2, 2, 2, 2, 2)
    # A single step depends on one of the widths at most; the total on both.
    total, *steps = doubled["d_k and d_v"]
    assert total > 1.9
    assert [round(step) for step in steps] == [2, 1, 1, 2]


def test_exponentials_overflow_where_float32_ends(results: Results) -> None:
    most = measured(results, "overflow", "largest score without overflow in the listing")
    assert round(most, 1) == 88.7
    assert most == pytest.approx(math.log(3.4028235e38), abs=1e-5)
    by_listing = {score: plain for score, plain, _ in table(results, "overflow").rows}
    assert by_listing[88.7] == "1.000000"
    assert by_listing[88.8] == "nan"
    assert {safe for *_, safe in table(results, "overflow").rows if safe != "0.731059"} == {
        "1.000000"
    }


# Scores


def test_the_slope_of_the_softmax(results: Results) -> None:
    """.00487 and .05422 are the means of 600,000 draws."""
    unscaled = measured(results, "scale-and-gradient", "mean a(1-a), unscaled, d = 512")
    assert unscaled == pytest.approx(0.00487, abs=0.0002)
    scaled = measured(results, "scale-and-gradient", "mean a(1-a), scaled, d = 512")
    assert scaled == pytest.approx(0.0542, abs=0.0003)
    falling = curves(results, "scale-and-gradient")["unscaled"].y
    assert all(a > b for a, b in pairwise(falling))
    # Saturated, the slope falls as the scores grow: as 1/√d.
    assert falling[-1] / falling[-3] == pytest.approx(0.5, abs=0.05)


def test_the_variance_of_scores_is_the_width(results: Results) -> None:
    found = curves(results, "score-variance")
    for d, variance in zip(found["q·k"].x, found["q·k"].y, strict=True):
        assert variance == pytest.approx(d, rel=0.1)
    assert measured(results, "score-variance", "β that attend uses, d = 512") == pytest.approx(
        512**-0.5
    )


def test_what_the_value_product_adds(results: Results) -> None:
    found = curves(results, "value-product")
    assert found["counted"].y == [7 * 11 * (8 + d_v) for d_v in (1, 2, 4, 8, 16, 32)]
    assert {row[3] for row in table(results, "like-a-dense-layer").rows} == {2}
    assert [row[4] for row in table(results, "like-a-dense-layer").rows] == [1, 2, 4, 8, 16, 32]


def test_scores_have_the_parameters_that_they_should(results: Results) -> None:
    assert dict(table(results, "no-parameters").rows) == {
        "dot": 0,
        "scaled dot": 0,
        "general": 6 * 6,
        "additive": 6 * 5 + 6 * 5 + 5,
    }
    assert (
        measured(results, "no-parameters", "parameters of the projections around it") == 4 * 12 * 13
    )


# Temperature


def test_weights_from_hot_to_cold(results: Results) -> None:
    first = listed(results, "preserving-a-value", "A₁₁ at β = 0, 0.1, 0.707, 2, 10")
    assert rounded(first, 3) == [0.333, 0.367, 0.576, 0.867, 1.000]
    assert measured(results, "sharpness", "entropy at β = 0.01, in nats") < math.log(3)
    assert measured(results, "sharpness", "entropy at β = 100") < 1e-40
    assert listed(results, "cold-limit", "two best scores") == [0.5, 0.5, 0]


def test_a_dense_layer_spreads_as_attention_does_at_no_other_beta(results: Results) -> None:
    even = "β = 0, output minus that of a dense layer of weights 1/3"
    assert measured(results, "spreading", even) < 1e-15
    assert measured(results, "spreading", "β = 1/√2, output minus that of the same layer") > 0.1


def test_errors_of_the_linear_formula(results: Results) -> None:
    """Other 4,001 draws had medians of 1.6e-4, 1.6%, 16% and 55%."""
    medians = listed(results, "moved-key-linear", "relative error of the linear formula, median")
    for median, other in zip(medians, (1.6e-4, 0.016, 0.16, 0.55), strict=True):
        assert median == pytest.approx(other, rel=0.1)
    # A change a hundred times as large has a hundred times the relative error, so no one draw,
    # scaled, gives both 6e-5 at 0.001 and 5.6% at 0.1.
    assert medians[1] / medians[0] == pytest.approx(100, rel=0.05)
    (plot,) = results["moved-key-linear"].finding.plots
    found, expected = plot.curves
    small = [n for n, sigma in enumerate(found.x) if sigma < 0.2]
    for n in small:
        assert found.y[n] == pytest.approx(expected.y[n], rel=0.05)
    assert measured(results, "moved-key-line", "output by the formula, error") < 2e-15


def test_three_directions_of_a_longer_key(results: Results) -> None:
    along, across, against = results["longer-key"].finding.measurements.values()
    assert along[1] == 1
    assert against[1] == 0
    assert across[0] == across[1]


# Masks


def test_who_sees_nothing(results: Results) -> None:
    assert measured(results, "causal-mask", "pairs hidden") == 7 * 6 / 2
    assert measured(results, "causal-mask", "queries with nothing to see, diagonal hidden") == 1
    found = results["masked-row"].finding.measurements
    assert found["empty row by the listing is NaN"]
    assert found["gradients of all values by the listing are NaN"]
    assert found["empty row by attend"] == [0, 0]
    assert found["gradient of its query by attend"] == [0] * 5
    # Lowered alike, hidden scores are as good as those of no mask, but for rounding at 10⁹.
    assert measured(results, "large-negative", "the same row, minus that without any mask") < 1e-6


def test_the_future_is_exactly_unseen(results: Results) -> None:
    assert measured(results, "no-future", "largest ∂yᵢ/∂xⱼ, j > i") == 0
    assert measured(results, "no-future", "logits before a change") == 0
    outputs = listed(results, "counting-by-mask", "outputs, causal mask")
    assert outputs == pytest.approx([1 / n for n in range(1, 17)])


def test_only_a_padding_mask_keeps_the_filling_out(results: Results) -> None:
    for _, mask, gap in table(results, "variable-lengths").rows:
        assert (gap < 1e-12) == (mask == "yes")
