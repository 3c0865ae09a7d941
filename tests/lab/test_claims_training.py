"""What training shows: its verdicts rest on what was trained."""

import pytest

from regard.lab import probe
from regard.lab.claims import ablation, training
from regard.lab.experiment import estimate, in_cases, on_condition

OURS = training.EXPERIMENTS + ablation.EXPERIMENTS
BY_NAME = {experiment.name: experiment for experiment in OURS}


def test_all_of_them_say_that_they_train() -> None:
    assert {16, 35, 48, 60, 61, 65, 94, 98, 100, 101, 107} == {e.item for e in BY_NAME.values()}
    assert all(experiment.trained for experiment in OURS)


@pytest.mark.usefixtures("unchecked")
def test_the_order_of_words_is_learned_with_positions_alone() -> None:
    finding = BY_NAME["sentence-order"].run()
    assert finding.verdict == "holds"
    apart = finding.measurements["two sentences' logits differ, without positions, by"]
    assert isinstance(apart, float)
    assert apart < 1e-12


@pytest.mark.parametrize("name", BY_NAME)
def test_where_nothing_is_learned_nothing_holds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "train", lambda *given, **settings: 0.5)
    monkeypatch.setattr(probe, "learn", lambda *given, **settings: [0.7] * 10)
    monkeypatch.setattr(probe, "accuracy", lambda *given: 0.5)
    assert BY_NAME[name].run().verdict in ("undecided", "wrong as stated")


def test_a_verdict_on_conditions_needs_seeds_that_agree() -> None:
    more = [0.3, 0.4, 0.5, 0.4, 0.4]
    less, same = [-gain for gain in more], [0.0, 0.05, -0.02, 0.01, -0.01]
    assert on_condition(more, more, margin=0.1) == "holds"
    assert on_condition(more, same, margin=0.1) == "holds under conditions"
    assert on_condition(less, same, margin=0.1) == "wrong as stated"
    assert on_condition(same, same, margin=0.1) == "undecided"
    assert on_condition(more, [0.3, 0.0, 0.3, 0.0, 0.3], margin=0.1) == "undecided"
    with pytest.raises(ValueError, match=r"2 seeds are too few"):
        on_condition(more, same[:2], margin=0.1)


def test_an_estimate_has_a_mean_and_its_error() -> None:
    found = estimate([0.01, 0.03, 0.02, 0.04, 0.0])
    assert str(found) == "+0.020 ± 0.007"
    assert found.level == "0.020 ± 0.007"
    assert str(estimate([-9.0, -13.0, -12.0, -17.0, -11.0])) == "−12.4 ± 1.3"
    assert not found.exceeds(0.0)
    assert estimate([0.02, 0.03, 0.02, 0.03, 0.02]).exceeds(0.0)


def test_a_statement_may_hold_in_some_cases() -> None:
    more, same = [0.3, 0.4, 0.5, 0.4, 0.4], [0.0, 0.05, -0.02, 0.01, -0.01]
    less = [-gain for gain in more]
    assert in_cases((more, more)) == "holds"
    assert in_cases((more, same)) == in_cases((less, more)) == "holds under conditions"
    assert in_cases((less, less)) == "wrong as stated"
    assert in_cases((same, less)) == in_cases((same, same)) == "undecided"
