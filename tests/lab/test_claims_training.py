"""What training shows: the verdicts, and that they rest on what was trained."""

import pytest

from regard.lab.claims import ablation, training
from regard.lab.experiment import Experiment
from regard.task import probe

EXPECTED = {
    "sentence-order": "holds",
    "order-and-bag": "holds",
    "positions-and-range": "wrong as stated",
    "positions-ignored": "holds",
    "memory-and-distance": "holds",
    "reusable-encoder": "holds under conditions",
    "transfer": "holds",
    "heads-at-once": "holds under conditions",
    "heads-and-noise": "undecided",
    "layer-norm": "holds under conditions",
    "scale-and-training": "holds under conditions",
    "heads-and-filters": "holds under conditions",
}
BY_NAME = {experiment.name: experiment for experiment in training.EXPERIMENTS}


def test_all_of_them_are_expected_and_say_that_they_train() -> None:
    assert set(BY_NAME) == set(EXPECTED)
    assert {16, 35, 48, 60, 61, 65, 94, 98, 99, 100, 101} == {e.item for e in BY_NAME.values()}
    assert all(experiment.trained for experiment in training.EXPERIMENTS)


@pytest.mark.usefixtures("unchecked")
def test_the_order_of_words_is_learned_with_positions_alone() -> None:
    finding = BY_NAME["sentence-order"].run()
    assert finding.verdict == EXPECTED["sentence-order"]
    assert finding.measurements["two sentences' logits differ, without positions, by"] < 1e-12


@pytest.mark.slow
@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("experiment", training.EXPERIMENTS, ids=lambda e: str(e.name))
def test_the_verdict_is_what_three_seeds_show(experiment: Experiment) -> None:
    assert experiment.run().verdict == EXPECTED[experiment.name]


@pytest.mark.parametrize(
    "name", [n for n in EXPECTED if n not in ("positions-ignored", "layer-norm", "heads-and-noise")]
)
def test_where_nothing_is_learned_nothing_holds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "train", lambda *given, **settings: 0.5)
    assert BY_NAME[name].run().verdict in ("undecided", "wrong as stated")


def test_three_seeds_are_trained() -> None:
    assert len(set(ablation.SEEDS)) >= 3
