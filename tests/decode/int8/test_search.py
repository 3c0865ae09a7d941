"""Searches in the kernels find what they find step by step in Python, to the last bit."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from regard.decode.engine.int8 import search as searches
from regard.decode.engine.int8.engine import Int8Engine, Int8Session
from regard.decode.engine.int8.linear import int8
from regard.decode.engine.session import Session
from regard.decode.search.beam import beam, gnmt, power
from regard.decode.search.constraints import Constraints
from regard.decode.search.greedy import greedy
from regard.decode.search.rolling import RollingBeams, RollingPaths
from regard.decode.search.sample import sample
from tests.decode.int8.samples import KINDS, N, kernels, made, source

pytestmark = kernels

END = 2
ROWS = 7
PROMPTS = [[1], [1, 5, 9], [1], [4, 4], [1, 3, 3, 8], [1], [6]]
MOST = [23, 40, 3, 31, 19, 1, 40]


def both(
    monkeypatch: pytest.MonkeyPatch, find: Callable[[Session], Any], model: Any, rows: int = ROWS
) -> tuple[Any, Any]:
    """What is found in the kernels, and step by step."""
    engine = Int8Engine(model)
    results = []
    for known in (searches.known, lambda _: False):
        monkeypatch.setattr(searches, "known", known)
        given, lengths = source(model, rows)
        with engine.open(model, given, lengths, rows=rows, beams=4) as session:
            results.append(find(session))
    return results[0], results[1]


def ready(kind: str = "the paper's", ends: float = 3.0, **settings: Any) -> Any:
    """A model that ends its sentences now and then."""
    model = int8(made(kind, **settings))
    model.output.bias[END] += ends
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_beam_search(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rules: dict[str, Any] = {"end": END, "max_length": MOST, "banned": [0, 11, 3]}
    one, two = both(
        monkeypatch,
        lambda session: beam(session, PROMPTS, width=4, n_best=3, penalty=power(1.0), **rules),
        ready(kind),
    )
    assert one == two
    assert len({len(best.tokens) for found in one for best in found}) > 4


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_search(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = both(
        monkeypatch,
        lambda session: greedy(session, PROMPTS, end=END, max_length=MOST, banned=[0]),
        ready(kind),
    )
    assert one == two
    assert len({len(best.tokens) for best in one}) > 2


@pytest.mark.parametrize(
    "rules",
    [
        {"renormalize": True, "banned": [5, 6, 7], "width": 3},
        {"min_length": [3, 0, 1, 20, 0, 1, 7], "banned": [5], "width": 5, "n_best": 5},
        {"min_length": 1, "banned": [END], "width": 2},
        {"penalty": gnmt(0.6), "width": 1},
        {"penalty": power(-0.5), "horizon": 1, "width": 4, "n_best": 2},
        {"penalty": power(1.0), "horizon": 0, "width": 17, "n_best": 17},
    ],
)
@pytest.mark.parametrize("threads", [1, 2])
def test_rules(rules: dict[str, Any], threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        one, two = both(
            monkeypatch,
            lambda session: beam(session, PROMPTS, end=END, max_length=MOST, **rules),
            ready(ends=2.0),
        )
    finally:
        torch.set_num_threads(before)
    assert one == two


def test_more_beams_than_there_are_tokens_to_go_on_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where fewer extensions are possible than are kept, impossible ones fill the rest."""
    rules: dict[str, Any] = {"end": END, "max_length": 6, "banned": range(3, N), "width": 7}
    one, two = both(
        monkeypatch,
        lambda session: beam(session, [[1]] * ROWS, n_best=7, penalty=power(1.0), **rules),
        ready(ends=0.0),
    )
    assert one == two
    assert {token for found in one for best in found for token in best.tokens} == {0, 1}


def test_equal_ones_are_taken_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    model = made()
    torch.nn.init.zeros_(model.target.table.weight)  # and with it the output
    one, two = both(
        monkeypatch,
        lambda session: beam(session, [[1]] * ROWS, end=END, max_length=5, n_best=4),
        int8(model),
    )
    assert one == two


def test_many_rows_are_chosen_from_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """So many that their logits do not fit into a core's cache."""
    rows = 41
    model = made(vocabulary=7001)
    for search, limits in ((greedy, {}), (beam, {"width": 4})):
        one, two = both(
            monkeypatch,
            lambda session, search=search, limits=limits: search(
                session, [[1]] * rows, end=END, max_length=4, **limits
            ),
            int8(model),
            rows,
        )
        assert one == two


def test_searches_of_other_kinds_take_their_own_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []
    plain = Session.advance
    monkeypatch.setattr(
        Session, "advance", lambda self, search: (taken.append(1), plain(self, search))
    )
    model = ready()
    engine = Int8Engine(model)
    for find, many in (
        (lambda session: sample(session, PROMPTS, end=END, max_length=3, seed=1), True),
        (lambda session: greedy(session, PROMPTS, end=END, max_length=3), False),
    ):
        taken.clear()
        with engine.open(model, *source(model, ROWS)) as session:
            find(session)
        assert bool(taken) == many


def test_beyond_the_last_position_it_is_said_as_ever() -> None:
    model = int8(made("learned, silu", length=9))
    engine = Int8Engine(model)
    for search in (greedy, beam):
        with (
            pytest.raises(ValueError, match="positions 9 to 9 leave"),
            engine.open(model, *source(model, ROWS)) as session,
        ):
            search(session, [[1]] * ROWS, end=END, max_length=20, min_length=20)
        with engine.open(model, *source(model, ROWS)) as session:
            search(session, [[1]] * ROWS, end=END, max_length=9, min_length=9)


@pytest.mark.parametrize("search", [greedy, beam, sample])
@pytest.mark.parametrize("rules", [{}, {"banned": (0, 1)}, {"banned": (0,), "renormalize": True}])
def test_logits_that_are_not_finite_are_an_error(
    search: Callable[..., Any], rules: dict[str, Any]
) -> None:
    """Also if the first tokens, with which others are compared, are banned."""
    model = made()
    with torch.no_grad():
        model.decoder.blocks[1].add_cross.norm.bias[7] = torch.nan
    model = int8(model)
    engine = Int8Engine(model)
    with (
        pytest.raises(ValueError, match="the logits were not finite"),
        engine.open(model, *source(model, ROWS)) as session,
    ):
        search(session, [[1]] * ROWS, end=END, max_length=4, **rules)


@pytest.mark.parametrize("width", [1, 4])
def test_sentences_that_join_and_leave(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At steps of their own, in a session whose rows others have had before."""
    model = ready("rotary")
    engine = Int8Engine(model)

    def opened(skip: int, rows: int) -> Session:
        return engine.open(model, *source(model, rows, skip))

    def found(known: Callable[[Any], bool]) -> list[Any]:
        monkeypatch.setattr(searches, "known", known)
        rule = Constraints(1, N, end=END, max_length=40, banned=[0, 7])
        search = RollingPaths(rule)
        if width > 1:
            search = RollingBeams(rule, width, 2, power(1.0), 40, 2)
        results: list[Any] = []

        def going(places: Any, tokens: Any, rows: Any) -> tuple[Any, Any, Any]:
            """Those that are not over, of all three."""
            stay = np.array([not search.over(place) for place in places.tolist()])
            for place in places[~stay].tolist():
                results.append(search.hypotheses(place))
                search.remove(place)
            kept = stay.repeat(width)
            return places[stay], tokens[kept], rows[kept]

        session = opened(40, 1)
        session.step(session.begin([[1]]))
        session.select(torch.zeros(0, dtype=torch.int64))
        places = last = np.zeros(0, np.int64)
        for step in range(60):
            if step % 3 == 0 and step < 12:
                joining = opened(step, 3)
                more = np.array([search.add(most, 0) for most in (40, 9 + step, 5)])
                read = joining.begin([[1]] * 3).numpy()
                more, tokens, rows = going(more, *joining.roll(search, more, read))
                joining.select(torch.from_numpy(rows))
                session.join(joining)
                places, last = np.concatenate((places, more)), np.concatenate((last, tokens))
            if len(places):
                places, last, rows = going(places, *session.roll(search, places, last))
                session.select(torch.from_numpy(rows))
        assert len(results) == 12
        return results

    one, two = found(searches.known), found(lambda _: False)
    assert one == two


def test_a_session_goes_on_after_a_search() -> None:
    """What the kernels have listed in its tables is what steps would have listed."""
    model = ready()
    sessions: list[Int8Session] = []
    for advance in (Int8Session.advance, Session.advance):
        engine = Int8Engine(model)
        session = engine.open(model, *source(model, ROWS))
        search = searches.Beams(
            session.begin(PROMPTS),
            Constraints(ROWS, N, end=END, max_length=30, min_length=30),
            3,
            1,
            power(1.0),
        )
        while search.t < 17:
            advance(session, search)
        session.select(search.rows)
        sessions.append(session)
        tokens = search.last
    one, two = (session.step(tokens) for session in sessions)
    assert torch.equal(one, two)
