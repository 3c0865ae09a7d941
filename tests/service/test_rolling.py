"""Sentences that join and leave at any step find what they find alone, to the last bit."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from torch import Tensor

from regard.decode.engine.session import Session
from regard.decode.search.beam import beam, power
from regard.decode.search.greedy import greedy
from regard.decode.search.hypothesis import Hypothesis
from regard.decode.search.rolling import Sampling
from regard.decode.search.sample import sample
from regard.service.batch import Batch, Rules, Sentence

N, START, END = 23, 1, 2


class Oracle(Session):
    """Logits are a function of the source and of all tokens so far."""

    device = torch.device("cpu")
    vocabulary = N

    def __init__(self, sources: Sequence[int]):
        self.pasts: list[tuple[int, ...]] = [(source,) for source in sources]
        self.closed = False

    @property
    def rows(self) -> int:
        return len(self.pasts)

    def prefill(self, tokens: Tensor, counts: Tensor) -> None:
        for row, count in enumerate(counts.tolist()):
            self.pasts[row] += tuple(tokens[row, :count].tolist())

    def step(self, tokens: Tensor) -> Tensor:
        self.pasts = [(*past, token) for past, token in zip(self.pasts, tokens.tolist())]
        rows = [np.random.default_rng(list(past)).normal(0, 2, N) for past in self.pasts]
        return torch.tensor(np.array(rows), dtype=torch.float32)

    def select(self, rows: Tensor) -> None:
        self.pasts = [self.pasts[row] for row in rows.tolist()]

    def join(self, other: Session) -> None:
        assert isinstance(other, Oracle)
        self.pasts += other.pasts
        other.close()

    def close(self) -> None:
        self.pasts, self.closed = [], True


def alone(sentence: Sentence) -> list[Hypothesis]:
    """What the batch searches find for one."""
    rules, how = sentence.rules, sentence.rules.sampling
    given: dict[str, Any] = {
        "end": END,
        "max_length": sentence.most,
        "banned": rules.banned,
        "renormalize": rules.renormalize,
    }
    session, prompts = Oracle([sentence.source]), [sentence.prompt]
    if rules.beams > 1:
        penalty = power(rules.length_penalty)
        wide: dict[str, Any] = {"width": rules.beams, "n_best": rules.n_best, "penalty": penalty}
        wide["horizon"] = rules.horizon
        return beam(session, prompts, **given, **wide)[0]
    if how.temperature > 0:
        drawn: dict[str, Any] = {
            "temperature": how.temperature,
            "top_k": how.top_k,
            "top_p": how.top_p,
            "seed": how.seed,
            "indices": [sentence.index],
        }
        return sample(session, prompts, **given, **drawn)
    return greedy(session, prompts, **given)


KINDS = [
    Rules(END),
    Rules(END, (0, 5), True),
    Rules(END, (0,), False, 4, 1, 1.0),
    Rules(END, (), True, 3, 3, 0.0),
    Rules(END, (7,), False, 5, 2, -0.7),
    Rules(END, (), False, 2, 2, 0.6),
    Rules(END, (0,), False, 4, 2, 1.0, horizon=1),
    Rules(END, (), False, 3, 1, -0.5, horizon=0),
    Rules(END, (0,), sampling=Sampling(1.3, None, 0.9, 5)),
    Rules(END, sampling=Sampling(0.7, 4, None, 0)),
]


def collected(
    sentences: Sequence[tuple[int, list[int], int, Rules]],
) -> tuple[list[Sentence], list[list[Hypothesis]]]:
    found: list[list[Hypothesis]] = [[] for _ in sentences]

    def receive(n: int) -> Callable[[list[Hypothesis]], None]:
        return lambda best: found[n].extend(best)

    def fail(error: Exception) -> None:
        raise error

    made = [
        Sentence(source, prompt, most, rules, receive(n), fail, lambda: True, index=n)
        for n, (source, prompt, most, rules) in enumerate(sentences)
    ]
    return made, found


@settings(max_examples=15)
@given(some.integers(0, 10**6))
def test_whoever_joins_when(seed: int) -> None:
    chance = random.Random(seed)
    kinds = chance.sample(KINDS, chance.randint(1, 3))
    sentences, found = collected(
        [
            (
                n,
                [START, *chance.choices(range(3, N), k=chance.randint(0, 3))],
                chance.randint(1, 9),
                rules,
            )
            for n, rules in enumerate(chance.choices(kinds, k=11))
        ]
    )
    batch = Batch(lambda some, beams, length: Oracle([one.source for one in some]), 9)
    waiting = list(sentences)
    while waiting or batch.busy:
        count = chance.randint(0, 4)
        if joining := waiting[:count]:
            batch.join(joining)
        waiting = waiting[count:]
        batch.step()
    for sentence, have in zip(sentences, found):
        assert have == alone(sentence)
    assert batch._session is None


@pytest.mark.parametrize("rules", KINDS[:4])
def test_one_that_is_given_up_leaves_the_others_alone(rules: Rules) -> None:
    sentences, found = collected([(n, [START], 9, rules) for n in range(5)])
    wanted = True
    sentences[2].wanted = lambda: wanted
    batch = Batch(lambda some, beams, length: Oracle([one.source for one in some]), 9)
    batch.join(sentences)
    batch.step()
    wanted = False
    while batch.busy:
        batch.step()
    for n, sentence in enumerate(sentences):
        if n != 2:
            assert found[n] == alone(sentence)
    assert not found[2] or found[2] == alone(sentences[2])


@pytest.mark.parametrize("rules", KINDS)
def test_what_is_settled_only_grows_and_ends_as_the_answer_begins(rules: Rules) -> None:
    sentences, found = collected([(n, [START], 9, rules) for n in range(7)])
    heard: list[list[list[int]]] = [[] for _ in sentences]
    for n, sentence in enumerate(sentences):
        sentence.stream = heard[n].append
    batch = Batch(lambda some, beams, length: Oracle([one.source for one in some]), 9)
    batch.join(sentences)
    while batch.busy:
        batch.step()
    assert any(heard)
    for told, best in zip(heard, found):
        for before, after in zip(told, [*told[1:], best[0].tokens]):
            assert after[: len(before)] == before


def test_one_that_cannot_be_read_fails_alone() -> None:
    sentences, found = collected([(n, [START], 5, KINDS[2]) for n in range(4)])
    errors: list[Exception] = []
    sentences[1].fail = errors.append

    def opened(some: Sequence[Sentence], beams: int, length: int) -> Session:
        if any(one.source == 1 for one in some):
            raise ValueError("no")
        return Oracle([one.source for one in some])

    batch = Batch(opened, 9)
    batch.join(sentences)
    while batch.busy:
        batch.step()
    assert [str(error) for error in errors] == ["no"]
    for n in (0, 2, 3):
        assert found[n] == alone(sentences[n])


def test_a_step_that_fails_fails_all_and_the_next_begin_anew() -> None:
    sentences, _ = collected([(n, [START], 5, KINDS[2]) for n in range(3)])
    errors: list[Exception] = []
    for sentence in sentences:
        sentence.fail = errors.append
    batch = Batch(lambda some, beams, length: Oracle([one.source for one in some]), 9)
    batch.join(sentences)
    batch.clear(RuntimeError("broken"))
    assert len(errors) == 3
    assert not batch.rows
    again, found = collected([(8, [START], 5, KINDS[2])])
    batch.join(again)
    while batch.busy:
        batch.step()
    assert found[0] == alone(again[0])


NOT_FINITE = (
    "the logits were not finite; look for NaN in the weights and in the source, or use a wider "
    "dtype"
)


class HalfJoined(Oracle):
    """Its join takes one row, and then fails."""

    def join(self, other: Session) -> None:
        assert isinstance(other, Oracle)
        self.pasts += other.pasts[:1]
        raise ValueError("broken")


def test_a_session_that_could_not_join_is_dropped_with_all_that_is_in_it() -> None:
    sentences, found = collected([(n, [START], 5, KINDS[2]) for n in range(5)])
    errors: list[Exception] = []
    for sentence in sentences[:4]:
        sentence.fail = errors.append
    batch = Batch(lambda some, beams, length: HalfJoined([one.source for one in some]), 9)
    batch.join(sentences[:2])
    batch.step()
    batch.join(sentences[2:4])
    assert [str(error) for error in errors] == ["broken"] * 4
    assert not batch.busy
    batch.join(sentences[4:])
    while batch.busy:
        batch.step()
    assert found[4] == alone(sentences[4])


@pytest.mark.parametrize("rules", [KINDS[0], KINDS[2]])
def test_a_stream_that_fails_fails_its_sentence_alone(rules: Rules) -> None:
    sentences, found = collected([(n, [START], 9, rules) for n in (0, 7, 2)])
    errors: list[Exception] = []
    sentences[1].fail = errors.append
    sentences[1].wanted = lambda: not errors

    streamed: list[list[int]] = []

    def broken(tokens: list[int]) -> None:
        streamed.append(tokens)
        if len(streamed) == 3:
            raise ValueError("broken")

    sentences[1].stream = broken
    batch = Batch(lambda some, beams, length: Oracle([one.source for one in some]), 9)
    batch.join(sentences)
    while batch.busy:
        batch.step()
    assert [str(error) for error in errors] == ["broken"]
    for n in (0, 2):
        assert found[n] == alone(sentences[n])


@pytest.mark.parametrize("rules", KINDS)
@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("step", [1, 2])
def test_logits_that_are_not_finite_fail_their_sentence_alone(
    rules: Rules, captured: bool, step: int
) -> None:
    class Undefined(Oracle):
        shrinks = not captured

        def step(self, tokens: Tensor) -> Tensor:
            logits = super().step(tokens)
            undefined = [past[0] == 3 and len(past) > step for past in self.pasts]
            logits[torch.tensor(undefined)] = torch.nan
            return logits

    sentences, found = collected([(n, [START], 7, rules) for n in (3, 5, 7, 2)])
    errors: list[Exception] = []
    sentences[0].fail = errors.append
    batch = Batch(lambda some, beams, length: Undefined([one.source for one in some]), 9)
    batch.join(sentences[:3])
    batch.join(sentences[3:])
    while batch.busy:
        batch.step()
    assert [str(error) for error in errors] == [NOT_FINITE]
    for n in (1, 2, 3):
        assert found[n] == alone(sentences[n])


class Captured(Oracle):
    """A session that is not stepped from outside, as those of captured graphs."""

    shrinks = False


@pytest.mark.parametrize("rules", KINDS)
def test_sessions_that_run_searches_by_themselves_take_turns(rules: Rules) -> None:
    sentences, found = collected([(n, [START], 3 + n, rules) for n in range(6)])
    batch = Batch(lambda some, beams, length: Captured([one.source for one in some]), 9)
    batch.join(sentences[:4])
    assert batch.rows == 4 * rules.beams
    batch.step()
    batch.join(sentences[4:])
    while batch.busy:
        batch.step()
    for sentence, have in zip(sentences, found):
        assert have == alone(sentence)


def test_half_of_a_session_is_answered_while_the_others_run() -> None:
    sentences, found = collected([(n, [START], 1 if n < 3 else 9, KINDS[0]) for n in range(5)])
    happened: list[str] = []

    class Noted(Captured):
        def advance(self, search: Any) -> None:
            happened.append("launched")
            super().advance(search)

    def noted(answer: Callable[[list[Hypothesis]], None]) -> Callable[[list[Hypothesis]], None]:
        def tell(best: list[Hypothesis]) -> None:
            happened.append("told")
            answer(best)

        return tell

    for sentence in sentences:
        sentence.answer = noted(sentence.answer)
    batch = Batch(lambda some, beams, length: Noted([one.source for one in some]), 9)
    batch.join(sentences)
    assert batch.cohorts == 1
    batch.step()
    assert happened == ["launched"]  # what it found is told once the next steps are on their way
    assert (batch.cohorts, batch.rows) == (1, 5)
    batch.step()
    assert happened == ["launched", "launched", "told", "told", "told"]
    while batch.busy:
        batch.step()
    assert happened.count("told") == 5
    assert found == [alone(sentence) for sentence in sentences]
    assert (batch.cohorts, batch.rows) == (0, 0)


def test_an_answer_that_fails_fails_by_itself() -> None:
    sentences, found = collected([(n, [START], 3, KINDS[0]) for n in range(3)])
    errors: list[Exception] = []

    def refuse(best: list[Hypothesis]) -> None:
        raise ValueError("no")

    sentences[1].answer, sentences[1].fail = refuse, errors.append
    batch = Batch(lambda some, beams, length: Captured([one.source for one in some]), 9)
    batch.join(sentences)
    while batch.busy:
        batch.step()
    assert [str(error) for error in errors] == ["no"]
    assert [found[0], found[2]] == [alone(sentences[0]), alone(sentences[2])]


def test_slots_are_used_again() -> None:
    batch = Batch(lambda some, beams, length: Oracle([one.source for one in some]), 9)
    for begin in range(0, 60, 3):
        sentences, found = collected([(begin + n, [START], 4, KINDS[3]) for n in range(3)])
        batch.join(sentences)
        lane = next(iter(batch._lanes.values()), None)
        while batch.busy:
            batch.step()
        assert all(found)
        if lane is not None:
            assert len(lane.search.t) <= 8  # type: ignore[attr-defined]
