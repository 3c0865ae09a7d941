"""The small questions: fair, repeatable, and answered by the models that can."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from regard.lab import probe
from regard.lab.probe import (
    FIRST,
    PLACES,
    SECOND,
    WORDS,
    Task,
    bag,
    distance,
    number,
    ones,
    order,
    sentence,
    winner,
)
from regard.model.baseline import Recurrent
from regard.model.classifier import ClassifierConfig, TextClassifier

SMALL = ClassifierConfig(2, 13, width=16, heads=2, feed_forward=32, layers=1, dropout=0.0)


@pytest.mark.parametrize("task", [order, bag, distance, winner, number, ones])
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


def test_a_sentence_says_who_plays_better() -> None:
    words = dict(enumerate(("CSK", "MI", *WORDS)))
    assert " ".join(words[n] for n in sentence(0, 1, 2)) == "CSK plays better , not MI"
    assert " ".join(words[n] for n in sentence(0, 1, 2, True)) == "not MI , CSK plays better"


def test_winner_asks_for_the_team_that_is_not_denied() -> None:
    teams = 7
    asked = winner(0, 1, batch=97, teams=teams)
    assert asked.tokens.shape == (97, 6)
    turned = 0
    for row, label in zip(asked.tokens.tolist(), asked.labels.tolist()):
        denied = row[row.index(teams + WORDS.index("not")) + 1]
        playing = row[row.index(teams + WORDS.index("plays")) - 1]
        assert playing == label != denied
        assert sorted(row)[2:] == list(range(teams, teams + 4))
        assert sorted(row)[:2] == sorted((playing, denied))
        turned += row[0] >= teams
    assert 30 < turned < 67
    assert set(asked.labels.tolist()) == set(range(teams))


@pytest.mark.parametrize("places", [PLACES, (3,), (10, 0)])
def test_bits_at_some_places_write_a_number_and_some_are_ones(places: tuple[int, ...]) -> None:
    written, counted = number(0, 1, batch=97, places=places), ones(0, 1, batch=97, places=places)
    assert torch.equal(written.tokens, counted.tokens)
    for row, value, count in zip(
        written.tokens.tolist(), written.labels.tolist(), counted.labels.tolist()
    ):
        bits = [row[place] for place in places]
        assert set(row) <= {0, 1}
        assert value == int("".join(map(str, reversed(bits))), 2)
        assert count == bits.count(1)


def test_noise_spoils_tokens_and_not_answers() -> None:
    clean, noisy = order(0, 1), order(0, 1, noise=0.5)
    assert torch.equal(clean.labels, noisy.labels)
    changed = (clean.tokens != noisy.tokens).double().mean()
    assert 0.3 < changed < 0.6


@pytest.mark.usefixtures("unchecked")
def test_without_positions_order_cannot_be_told_but_a_bag_can() -> None:
    without = replace(SMALL, position="none")
    small = {"batch": 32, "length": 5, "vocabulary": 7}
    ordered, counted = partial(order, **small), partial(bag, **small)
    assert probe.train(TextClassifier(without), ordered, 40, lr=1e-2) < 0.6
    assert probe.train(TextClassifier(without), counted, 40, lr=1e-2) > 0.9
    assert probe.train(TextClassifier(SMALL), ordered, 60, lr=1e-2) > 0.9


@pytest.mark.usefixtures("unchecked")
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


def test_first_weights_depend_on_the_seed_alone() -> None:
    before = torch.get_rng_state()
    made = [probe.fresh(lambda: TextClassifier(SMALL), seed) for seed in (3, 3, 5)]
    assert torch.equal(torch.get_rng_state(), before)
    first, again, other = (model.tokens.table.weight for model in made)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_every_step_has_a_loss_and_what_is_frozen_stays() -> None:
    model = probe.fresh(lambda: TextClassifier(SMALL), 0).freeze_backbone()
    table, head = model.tokens.table.weight.clone(), model.head.weight.clone()
    losses = probe.learn(model, order, 7)
    assert len(losses) == 7
    assert losses[0] == pytest.approx(0.6931, abs=1e-4)  # a new head guesses
    assert torch.equal(model.tokens.table.weight, table)
    assert not torch.equal(model.head.weight, head)


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
    with pytest.raises(ValueError, match=r"teams \(1\) must be 2 or more"):
        winner(0, 1, teams=1)
    with pytest.raises(ValueError, match=r"places \(2, 11\) must lie from 0 to 10"):
        number(0, 1, places=(2, 11))


def test_fillers_may_be_of_the_answers_kind() -> None:
    apart, alike = (probe.distance(3, 1, gap=11, classes=5, alike=same) for same in (False, True))
    for asked in (apart, alike):
        assert torch.equal(asked.tokens[:, 0], asked.labels)
    assert int(apart.tokens[:, 1:].min()) >= 5
    assert int(alike.tokens.max()) < 5
