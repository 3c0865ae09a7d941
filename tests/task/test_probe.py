"""The small questions: fair, repeatable, and answered by the models that can."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from regard.model.baseline import Recurrent
from regard.model.classifier import ClassifierConfig, TextClassifier
from regard.task import probe
from regard.task.probe import FIRST, SECOND, Task, bag, distance, order

SMALL = ClassifierConfig(2, 13, width=16, heads=2, feed_forward=32, layers=1, dropout=0.0)


@pytest.mark.parametrize("task", [order, bag, distance])
def test_a_batch_is_a_function_of_seed_and_step(task: Task) -> None:
    first, again, later, other = task(3, 5), task(3, 5), task(3, 6), task(4, 5)
    assert torch.equal(first.tokens, again.tokens)
    assert torch.equal(first.labels, again.labels)
    assert not torch.equal(first.tokens, later.tokens)
    assert not torch.equal(first.tokens, other.tokens)


def test_order_asks_which_of_two_comes_first() -> None:
    asked = order(0, 1, batch=97)
    for row, label in zip(asked.tokens.tolist(), asked.labels.tolist()):
        assert row.count(FIRST) == row.count(SECOND) == 1
        assert label == (row.index(FIRST) < row.index(SECOND))
    assert 30 < int(asked.labels.sum()) < 67


def test_bag_asks_what_there_is_more_of() -> None:
    asked = bag(0, 1, batch=97)
    for row, label in zip(asked.tokens.tolist(), asked.labels.tolist()):
        assert row.count(FIRST) != row.count(SECOND)
        assert label == (row.count(FIRST) > row.count(SECOND))
    assert 30 < int(asked.labels.sum()) < 67


def test_distance_asks_for_what_is_far_away() -> None:
    asked = distance(0, 1, gap=7, classes=5)
    assert asked.tokens.shape == (64, 9)
    assert torch.equal(asked.tokens[:, 0], asked.labels)
    assert int(asked.tokens[:, 1:].min()) >= 5


def test_noise_spoils_tokens_and_not_answers() -> None:
    clean, noisy = order(0, 1), order(0, 1, noise=0.5)
    assert torch.equal(clean.labels, noisy.labels)
    changed = (clean.tokens != noisy.tokens).double().mean()
    assert 0.3 < changed < 0.6


def test_without_positions_order_cannot_be_told_but_a_bag_can() -> None:
    without = replace(SMALL, position="none")
    small = {"batch": 32, "length": 5, "vocabulary": 7}
    ordered, counted = partial(order, **small), partial(bag, **small)
    assert probe.train(TextClassifier(without), ordered, 40, lr=1e-2) < 0.6
    assert probe.train(TextClassifier(without), counted, 40, lr=1e-2) > 0.9
    assert probe.train(TextClassifier(SMALL), ordered, 60, lr=1e-2) > 0.9


def test_anything_that_gives_logits_can_be_asked() -> None:
    config = replace(SMALL, classes=5, pool="last", position="none")
    model = TextClassifier(config, attention=lambda position: Recurrent(config.width))
    near = partial(distance, gap=1)
    assert probe.train(model, near, 60, lr=1e-2) > 0.9
    assert probe.accuracy(model, near, range(1000, 1003)) > 0.9


def test_training_repeats_itself() -> None:
    model = TextClassifier(replace(SMALL, dropout=0.1))
    twin = TextClassifier(replace(SMALL, dropout=0.1))
    twin.load_state_dict(model.state_dict())
    before = torch.get_rng_state()
    assert probe.train(model, order, 5) == probe.train(twin, order, 5)
    assert torch.equal(torch.get_rng_state(), before)
    for mine, its in zip(model.parameters(), twin.parameters()):
        assert torch.equal(mine, its)


def test_one_line_says_what_is_wrong() -> None:
    with pytest.raises(ValueError, match=r"vocabulary \(2\) must be 3 or more"):
        order(0, 1, vocabulary=2)
    with pytest.raises(ValueError, match=r"length \(1\) must be 2 or more"):
        order(0, 1, length=1)
    with pytest.raises(ValueError, match=r"noise \(1.5\) must be a probability"):
        bag(0, 1, noise=1.5)
    with pytest.raises(ValueError, match=r"classes \(13\) must be 2 or more, and below vocabulary"):
        distance(0, 1, classes=13)
    with pytest.raises(ValueError, match=r"gap \(-1\) must be 0 or more"):
        distance(0, 1, gap=-1)
