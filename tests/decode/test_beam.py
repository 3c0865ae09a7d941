"""Beam search finds what a plain search finds, and everything where it is wide enough."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from regard.decode.search.beam import PAPER, Penalty, beam, gnmt, power
from regard.decode.search.greedy import greedy
from tests.decode.tables import Looking, Table, exhaustive, logs_of, looks, plain_beam, same

END = 2

penalties = st.one_of(
    st.floats(-0.5, 1.5).map(gnmt), st.floats(-0.5, 1.5).map(power), st.just(lambda n: 1 + n % 3)
)
spreads = st.sampled_from([0.1, 1.0, 3.0])


@given(seed=st.integers(0, 999), penalty=penalties, spread=spreads, data=st.data())
@settings(max_examples=60)
def test_wide_enough_it_finds_everything(
    seed: int, penalty: Penalty, spread: float, data: st.DataObject
) -> None:
    N, most = data.draw(st.sampled_from([(3, 4), (5, 2), (4, 3)]))
    least = data.draw(st.integers(0, most))
    banned = data.draw(st.lists(st.integers(0, N - 1), max_size=1).filter(lambda b: END not in b))
    width = 1 + N**most
    session = Table(seed, N, [0, 1], spread)
    limits = {"end": END, "banned": banned, "penalty": penalty}
    n_best = data.draw(st.integers(1, width))
    found = beam(
        session, [[1], [1]],
        max_length=most, min_length=least, width=width, n_best=n_best, **limits,
    )  # fmt: skip
    for sentence, have in enumerate(found):
        logs = logs_of(seed, N, sentence, spread)
        want = exhaustive(logs, (1,), N, most=most, least=least, **limits)
        assert len(have) == min(n_best, len(want))
        same(have, want[:n_best])


@given(seed=st.integers(0, 999), penalty=penalties, spread=spreads, data=st.data())
@settings(max_examples=150)
def test_it_finds_what_a_plain_search_finds(
    seed: int, penalty: Penalty, spread: float, data: st.DataObject
) -> None:
    N = data.draw(st.integers(4, 11))
    width = data.draw(st.integers(2, 7))
    n_best = data.draw(st.integers(1, width))
    B = data.draw(st.integers(1, 5))
    most = data.draw(st.lists(st.integers(1, 9), min_size=B, max_size=B))
    least = [data.draw(st.integers(0, longest)) for longest in most]
    prompts = data.draw(
        st.lists(st.lists(st.integers(0, N - 1), min_size=1, max_size=4), min_size=B, max_size=B)
    )
    banned = data.draw(st.lists(st.integers(0, N - 1).filter(lambda t: t != END), max_size=2))
    horizon = data.draw(st.one_of(st.none(), st.integers(0, 4)))
    session = Table(seed, N, range(B), spread)
    limits = {"end": END, "banned": banned, "penalty": penalty, "width": width}
    limits |= {"n_best": n_best, "horizon": horizon}
    found = beam(session, prompts, max_length=most, min_length=least, **limits)
    for n, have in enumerate(found):
        logs = logs_of(seed, N, n, spread)
        want = plain_beam(logs, tuple(prompts[n]), most=most[n], least=least[n], **limits)
        same(have, want[:n_best])


@given(seed=st.integers(0, 999), penalty=penalties, coverage=st.floats(0.01, 2))
@settings(max_examples=50)
def test_coverage(seed: int, penalty: Penalty, coverage: float) -> None:
    N, lengths, prompts = 7, [5, 2, 3], [[1], [1, 3, 4], [1, 6]]
    given: dict[str, Any] = {"end": END, "penalty": penalty, "width": 3, "coverage": coverage}
    found = beam(Looking(seed, N, lengths), prompts, max_length=6, n_best=2, **given)
    for n, have in enumerate(found):

        def look(prefix: tuple[int, ...], n: int = n) -> list[float]:
            return looks(seed, n, prefix, lengths[n])

        want = plain_beam(logs_of(seed, N, n), tuple(prompts[n]), most=6, look=look, **given)
        same(have, want[:2])


@given(seed=st.integers(0, 999), penalty=penalties, spread=spreads, most=st.integers(1, 9))
@settings(max_examples=50)
def test_width_1_is_greedy(seed: int, penalty: Penalty, spread: float, most: int) -> None:
    prompts = [[1], [1, 4, 2], [1, 3]]
    given_ = {"end": END, "max_length": most, "banned": [0]}
    found = beam(Table(seed, 7, range(3), spread), prompts, width=1, penalty=penalty, **given_)
    wanted = greedy(Table(seed, 7, range(3), spread), prompts, **given_)
    for (one,), two in zip(found, wanted):
        assert one.tokens == two.tokens
        assert one.ended == two.ended
        torch.testing.assert_close(one.token_scores, two.token_scores)
        assert math.isclose(two.score, sum(two.token_scores))
        assert math.isclose(one.score, two.score / penalty(len(two.token_scores)))


def test_the_search_stops_as_soon_as_nothing_better_can_come() -> None:
    """A model that is sure of its end is not asked again until the greatest length."""

    class Sure(Table):
        def step(self, tokens: Tensor) -> Tensor:
            logits = torch.zeros_like(super().step(tokens))
            logits[:, END if len(self.sizes) > 3 else 5] = 20.0
            return logits

    session = Sure(0, 7, [0])
    ((best,),) = beam(session, [[1]], end=END, max_length=1000, penalty=PAPER)
    assert best.tokens == [5, 5, 5]
    assert best.ended
    assert session.sizes == [1, 4, 4, 4]


def test_within_a_horizon_those_that_trail_are_not_waited_for() -> None:
    """A sentence ends here or never: the open hypotheses have next to no chance."""

    class Doubtful(Table):
        def step(self, tokens: Tensor) -> Tensor:
            logits = torch.zeros_like(super().step(tokens))
            logits[:, END if len(self.sizes) > 3 else 5] = 4.0
            return logits

    steps = {}
    for horizon in (0, 2, None):
        session = Doubtful(0, 7, [0])
        limits = {"end": END, "max_length": 100, "penalty": power(1.0)}
        ((best,),) = beam(session, [[1]], horizon=horizon, **limits)
        assert best.tokens == [5, 5, 5]
        steps[horizon] = len(session.sizes)
    assert steps[0] == 4
    assert steps[0] <= steps[2] < steps[None]


def test_finished_sentences_leave() -> None:
    most = [2, 9, 4, 3]
    session = Table(0, 11, range(4))
    beam(session, [[1]] * 4, end=END, max_length=most, min_length=most, width=3)
    assert session.sizes == [4, 12, 9, 6, 3, 3, 3, 3, 3]
    session = Table(0, 11, range(4))
    greedy(session, [[1]] * 4, end=END, max_length=most, min_length=most)
    assert session.sizes == [4, 4, 3, 2, 1, 1, 1, 1, 1]


def test_the_penalties_are_the_papers() -> None:
    assert gnmt(0.6)(1) == 1
    assert math.isclose(PAPER(7), 2**0.6)
    assert power(0)(5) == 1
    assert power(1)(5) == 5


def test_no_prompts_no_results() -> None:
    assert beam(Table(0, 5, []), [], end=END, max_length=3) == []
    assert greedy(Table(0, 5, []), [], end=END, max_length=3) == []


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"horizon": -1}, r"horizon \(-1\) must be a whole number, 0 or more"),
        ({"width": 0}, r"width \(0\) must be a whole number"),
        ({"n_best": 5}, r"n_best \(5\) must not exceed width \(4\)"),
        ({"coverage": -1}, r"coverage \(-1\) must not be negative"),
        ({"coverage": 0.2}, r"coverage \(0.2\) needs a session .* a Table does not"),
        ({"end": 7}, r"end \(7\) must be a token, from 0 to 6"),
        ({"end": -1}, r"end \(-1\) must be a whole number, 0 or more"),
        ({"banned": [9]}, r"banned \(9\) must be a token, from 0 to 6"),
        ({"banned": range(7)}, r"all 7 tokens are banned"),
        ({"max_length": 0}, r"max_length \(0\) must be a whole number, 1 or more"),
        ({"max_length": [3]}, r"max_length \(\[3\]\) must be one number, or one for each of 2"),
        ({"min_length": 4}, r"min_length \(4\) must not exceed max_length \(3\)"),
        ({"prompts": [[1], []]}, r"prompt 1 is empty; it needs at least BOS"),
        ({"prompts": [[1]]}, r"1 prompts for a session of 2 rows"),
        ({"penalty": lambda n: 0.0}, r"the penalty of 1 tokens \(0.0\) must be positive"),
    ],
)
def test_errors(options: dict[str, object], said: str) -> None:
    options = {"prompts": [[1], [1]], "end": END, "max_length": 3} | options
    with pytest.raises(ValueError, match=said):
        beam(Table(0, 7, range(2)), **options)


def test_logits_that_are_no_numbers_are_said_to_be() -> None:
    class Broken(Table):
        def step(self, tokens: Tensor) -> Tensor:
            return torch.full((len(tokens), 7), math.nan)

    for search in (greedy, beam):
        with pytest.raises(ValueError, match="the logits were not finite"):
            search(Broken(0, 7, [0]), [[1]], end=END, max_length=3)
