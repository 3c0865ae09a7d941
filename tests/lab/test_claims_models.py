"""What the experiments about order, layers, positions and models measure, number by number."""

from collections.abc import Sequence
from itertools import pairwise

import pytest

from regard.lab import run
from regard.lab.experiment import Curve, Measured
from regard.lab.perform import Result

Results = dict[str, Result]


def measured(results: Results, name: str) -> dict[str, Measured]:
    return dict(results[name].finding.measurements)


def numbers(results: Results, name: str) -> list[float]:
    """What is measured, in its order."""
    return [float(value) for value in measured(results, name).values()]  # type: ignore[arg-type]


def starting(results: Results, name: str, words: str) -> list[Measured]:
    return [value for key, value in measured(results, name).items() if key.startswith(words)]


def curves(results: Results, name: str) -> tuple[Curve, ...]:
    (plot,) = results[name].finding.plots
    return plot.curves


def falls(values: Sequence[float]) -> bool:
    return all(b < a for a, b in pairwise(values))


@pytest.mark.parametrize("name", ["shuffled-source", "convolution-by-heads", "skip-connections"])
def test_it_gives_the_same_each_time(name: str, results: Results) -> None:
    again = run(name).finding.measurements
    for key, value in results[name].finding.measurements.items():
        assert again[key] == pytest.approx(value, abs=1e-9)  # rounding may differ by alignment


# Order


def test_shuffled_rows(results: Results) -> None:
    moved, changed, single = numbers(results, "equivariance")
    assert moved < 1e-14
    assert changed > 1
    assert single < 1e-14
    free, masked = numbers(results, "equivariance-causal")
    assert free < 1e-14 < 1 < masked


def test_a_causal_mask_tells_the_order_from_the_second_layer_on(results: Results) -> None:
    first, second, third = numbers(results, "order-under-a-mask")
    assert first < 1e-14
    assert min(second, third) > 0.1


def test_what_moves_along_with_its_input(results: Results) -> None:
    (table,) = results["vit-shift"].finding.tables
    pixel, patch, two = table.rows
    assert pixel[1] == patch[1] == two[1] == 0
    assert pixel[2] > 0.1
    assert max(patch[2], two[2]) < 1e-12
    assert min(pixel[3], patch[3], two[3]) > 0.1
    (table,) = results["tied-weights"].finding.tables
    (_, few, still), (_, many, changed) = table.rows
    assert (few, many) == (3 * 12**2 + 12, (16 * 12) ** 2 + 16 * 12)
    assert still < 1e-14 < 1 < changed


# Layers


def test_how_near_the_identity_is(results: Results) -> None:
    at_one, at_ten, *_ = numbers(results, "identity")
    assert round(at_one, 3) == 0.576
    assert round(at_ten, 5) == 0.99991
    for curve, rows in zip(curves(results, "identity"), (3, 5, 17)):
        assert curve.y[0] == pytest.approx(1 / rows)
        assert falls(list(curve.y)[::-1])


def test_a_permutations_errors_stand_in_the_printed_proportions(results: Results) -> None:
    one, five, twenty = starting(results, "permutation", "largest ‖c − v‖")
    assert round(1.4 * five / one, 2) == 0.06
    assert round(1.4 * twenty / one, 8) == 2e-8


def test_heads_become_a_convolution(results: Results) -> None:
    at_one, at_ten, at_hundred = starting(results, "convolution-by-heads", "error of three heads")
    assert at_one > 1
    assert 1e-4 < at_ten < 1e-3
    assert at_hundred < 1e-13
    real, neighbour = curves(results, "convolution-by-heads")
    # The error is a neighbour's weight, up to a factor that the draw decides.
    ratios = [e / n for b, e, n in zip(real.x, real.y, neighbour.y) if 2 <= b <= 15]
    assert max(ratios) < 3 * min(ratios)
    lowest, off, error = numbers(results, "one-head-taps")
    assert lowest > 0
    assert max(off, error) < 1e-12


def test_the_keras_example_counted(results: Results) -> None:
    assert starting(results, "keras-example", "W_") == [[2, 12, 2], [2, 12, 2], [2, 12, 3]]
    found = measured(results, "concatenated-heads")
    assert found["parameters"] == 266
    assert found["numbers side by side for each token"] == 6
    assert found["numbers for each token after W_O"] == found["width of the input"] == 12


def test_heads_share_the_width_and_filters_do_not(results: Results) -> None:
    assert numbers(results, "heads-share-width") == [1, 16, 16]


def test_a_dense_identity(results: Results) -> None:
    orthonormal, other, own = numbers(results, "hard-identity")
    assert orthonormal == 0
    assert other > 0.1
    assert own < 7


# Positions


def test_random_directions(results: Results) -> None:
    (table,) = results["high-dimension"].finding.tables
    exact = {row[0]: round(float(row[2]), 3) for row in table.rows}  # type: ignore[arg-type]
    assert (exact[3], exact[64], exact[512]) == (0.5, 0.1, 0.035)


def test_the_probe_by_layer(results: Results) -> None:
    kept, lost = curves(results, "skip-connections")
    assert kept.y[0] == lost.y[0] < 0.2
    assert max(kept.y) < 0.5
    assert lost.y[-1] > 0.9


def test_the_sinusoids_kernel(results: Results) -> None:
    off, gaussian, lowest, rises, spread = numbers(results, "position-kernel")
    assert max(off, spread) < 1e-12
    assert gaussian > 0.1
    assert round(lowest, 2) == 0.22
    assert rises == 5
    kernel, _ = curves(results, "position-kernel")
    assert falls(kernel.y[:6])
    assert kernel.y[6] > kernel.y[5]
    of_numbers, of_sinusoids, *_ = numbers(results, "number-as-position")
    assert (of_numbers, of_sinusoids) == (1, 20)


def test_frequencies_counted_from_zero(results: Results) -> None:
    right, wrong, *_ = measured(results, "frequency-index").values()
    assert [round(x, 2) for x in right] == [0.84, 0.54, 0.01, 1]  # type: ignore[union-attr, arg-type]
    assert wrong == [0.01, 1, 0.0001, 1]


def test_learned_positions_counted(results: Results) -> None:
    patches, table, own, everything = numbers(results, "class-position")
    assert (patches, table, own, everything) == (196, 196, 1, 197 * 768)
    assert starting(results, "fixed-and-learned", "position parameters") == [0, 0, 196 * 768]


# Models


def test_who_depends_on_whom(results: Results) -> None:
    assert numbers(results, "encoder-and-decoder") == [49, 28, 0, 77]
    assert numbers(results, "both-directions") == [0, 21, 21]
    beside, own, near = numbers(results, "feed-forward-neighbours")
    assert beside == 0 < min(own, near)
    assert numbers(results, "position-and-reach") == [22, 22, 1, 1]


def test_the_base_model_counted(results: Results) -> None:
    found = measured(results, "solely-attention")
    millions = [round(float(n) / 1e6, 1) for n in list(found.values())[:3]]  # type: ignore[arg-type]
    assert millions == [18.9, 25.2, 18.9]
    assert starting(results, "residual-path", "pre-norm") == [0]
    assert starting(results, "residual-path", "blocks") == [[6, 6]]
    assert starting(results, "post-norm", "sublayers") == [[2] * 6 + [3] * 6]


def test_vision_transformers_beside_the_formula(results: Results) -> None:
    assert numbers(results, "patch-convolution")[0] < 1e-14
    assert numbers(results, "vit-by-hand")[0] < 1e-13
    assert numbers(results, "flattened-patches") == [0, 196, 768]
    assert list(measured(results, "vit-feed-forward").values()) == [
        [3072, 4096, 5120],
        [2048, 4096],
    ]
    assert all(measured(results, "vit-structure").values())


def test_sizes_that_layers_take(results: Results) -> None:
    taken = starting(results, "variable-size", "sizes taken")
    assert taken == ["4 of 4", "3 of 3", "1 of 3", "1 of 4"]


def test_attention_beside_other_layers(results: Results) -> None:
    (table,) = results["fewer-parameters"].finding.tables
    shares = {row[0]: row[2] for row in table.rows}
    assert shares == {
        "attention with W_O": 4,
        "a block with it": 12,
        "dense over 50 rows": 2500,
        "LSTM": 8,
        "GRU": 6,
        "convolution of 3": 3,
        "depthwise convolution of 3": 0.05,
    }
