"""Schedules: the formulas of the papers, continuous, and with their peak where they should."""

import itertools
import math
from functools import partial

import pytest

from regard.train.config import Schedule
from regard.train.schedule import constant, cosine, factor, inverse_sqrt, linear, noam


def test_noam_is_the_papers() -> None:
    for step in (1, 7, 4000, 4001, 100_000):
        want = 512**-0.5 * min(step**-0.5, step * 4000**-1.5)
        assert noam(step, width=512, warmup=4000) == pytest.approx(want, rel=1e-12)


def test_inverse_sqrt_is_noam_with_its_peak_at_one() -> None:
    peak = noam(41, width=7, warmup=41)
    for step in (1, 40, 41, 42, 997):
        assert inverse_sqrt(step, warmup=41) == pytest.approx(noam(step, width=7, warmup=41) / peak)


@pytest.mark.parametrize("fall", [cosine, linear])
def test_rise_and_fall(fall: object) -> None:
    assert callable(fall)
    values = [fall(step, total=101, warmup=11) for step in range(1, 103)]
    assert values[0] == pytest.approx(1 / 11)
    assert max(values) == values[10] == 1
    assert values[55] == pytest.approx(0.5)
    assert values[100] == values[101] == pytest.approx(0, abs=1e-12)
    assert all(a >= b for a, b in itertools.pairwise(values[10:]))


def test_without_warmup() -> None:
    assert constant(1, warmup=0) == cosine(0, total=7, warmup=0) == inverse_sqrt(1, warmup=0) == 1
    assert linear(7, total=7, warmup=0) == 0
    assert inverse_sqrt(4, warmup=0) == 0.5
    assert cosine(5, total=3, warmup=7) == pytest.approx(5 / 7)  # shorter than its warm-up


def test_by_name() -> None:
    given = {"total": 31, "warmup": 3, "width": 5}
    assert factor("noam", 7, **given) == noam(7, width=5, warmup=3)
    assert factor("inverse_sqrt", 7, **given) == math.sqrt(3 / 7)
    assert factor("cosine", 7, **given) == cosine(7, total=31, warmup=3)
    assert factor("linear", 7, **given) == linear(7, total=31, warmup=3)
    assert factor("constant", 2, **given) == constant(2, warmup=3) == 2 / 3
    with pytest.raises(ValueError, match=r"schedule \(cosine\) decays until the end; set"):
        factor("cosine", 7, total=None, warmup=3, width=5)


@pytest.mark.parametrize("name", ["cosine", "linear"])
def test_time_ends_a_schedule_as_steps_do(name: Schedule) -> None:
    by_time = partial(factor, name, warmup=10, width=8)
    # Whichever is further counts.
    assert by_time(30, total=None, elapsed=0.5) == pytest.approx(0.5)
    assert by_time(60, total=110, elapsed=0.25) == pytest.approx(by_time(60, total=110))
    assert by_time(60, total=1010, elapsed=0.75) == pytest.approx(by_time(760, total=1010))
    assert by_time(30, total=10**6, elapsed=1.0) == pytest.approx(0.0)
    assert by_time(5, total=None, elapsed=0.0) == pytest.approx(0.5)
