"""An ensemble finds what a search over averaged probabilities finds, by every search."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from regard.decode.engine.ensemble import EnsembleSession, ensemble
from regard.decode.engine.pick import open_session
from regard.decode.engine.session import Attentive, Session
from regard.decode.search.beam import PAPER, beam, power
from regard.decode.search.greedy import greedy
from regard.decode.search.hypothesis import Hypothesis
from regard.decode.search.sample import sample
from tests.decode.tables import (
    Logs,
    Looking,
    Table,
    exhaustive,
    logits,
    logs_of,
    looks,
    plain_beam,
    same,
)

N, END, SEEDS = 7, 2, (11, 23, 5)
weightings = st.lists(st.floats(0.1, 9), min_size=3, max_size=3)


def tables(sentences: Sequence[int], weights: Sequence[float] | None = None) -> Session:
    return ensemble([Table(seed, N, sentences, 2.0) for seed in SEEDS], weights)


def mean_of(sentence: int, weights: Sequence[float] = (1, 1, 1), tokens: int = N) -> Logs:
    """log Σ_m w_m p_m after a prefix, by plain arithmetic."""
    each = [logs_of(seed, tokens, sentence, 2.0) for seed in SEEDS]

    def logs(prefix: tuple[int, ...]) -> list[float]:
        columns = zip(*(one(prefix) for one in each))
        total = sum(weights)
        return [
            math.log(sum(w * math.exp(log) for w, log in zip(weights, column)) / total)
            for column in columns
        ]

    return logs


@given(weights=weightings, most=st.integers(1, 3))
@settings(max_examples=15)
def test_wide_enough_a_beam_finds_every_sequence(weights: list[float], most: int) -> None:
    tokens, rules = 4, {"end": END, "penalty": PAPER}
    members = [Table(seed, tokens, [0, 1], 2.0) for seed in SEEDS]
    found = beam(
        ensemble(members, weights), [[1], [1]],
        max_length=most, width=9 + tokens**most, n_best=11, **rules,
    )  # fmt: skip
    for sentence, have in enumerate(found):
        want = exhaustive(mean_of(sentence, weights, tokens), (1,), tokens, most=most, **rules)
        same(have, want[:11])


@given(weights=weightings, width=st.integers(2, 5))
@settings(max_examples=15)
def test_a_narrow_beam_finds_what_a_plain_one_finds(weights: list[float], width: int) -> None:
    prompts, most = [[1], [1, 4, 3], [1, 6]], [5, 3, 6]
    rules: dict[str, Any] = {"end": END, "banned": [0], "width": width, "penalty": power(0.7)}
    found = beam(tables(range(3), weights), prompts, max_length=most, min_length=2, **rules)
    for n, have in enumerate(found):
        logs = mean_of(n, weights)
        same(have, plain_beam(logs, tuple(prompts[n]), most=most[n], least=2, **rules)[:1])


def test_members_that_are_equal_are_one() -> None:
    prompts = [[1], [1, 3], [1, 5, 4]]
    rules: dict[str, Any] = {"end": END, "max_length": 6, "min_length": 2, "banned": [0, 4]}
    searches: list[Callable[[Session], Any]] = [
        lambda session: [[one] for one in greedy(session, prompts, **rules)],
        lambda session: [[one] for one in sample(session, prompts, seed=3, top_p=0.8, **rules)],
        lambda session: [[one] for one in sample(session, prompts, temperature=2, **rules)],
        lambda session: beam(session, prompts, width=3, n_best=3, **rules),
        lambda session: beam(session, prompts, width=3, renormalize=True, **rules),
    ]
    for search in searches:
        alone = search(Table(5, N, range(3)))
        twice = search(ensemble([Table(5, N, range(3)) for _ in range(2)], [3, 1]))
        for have, want in zip(twice, alone, strict=True):
            same(have, want)


def test_sampling_draws_from_the_mean() -> None:
    """Among so many first tokens each comes as often as the mean says."""
    members = [Table(seed, N, [0] * 4000, 2.0) for seed in SEEDS]
    found = sample(ensemble(members), [[1]] * 4000, end=END, max_length=1, seed=1)
    tokens = [one.tokens[0] if one.tokens else END for one in found]
    shares = torch.tensor(tokens).bincount(minlength=N) / len(tokens)
    wanted = torch.tensor(mean_of(0)((1,))).exp()
    torch.testing.assert_close(shares, wanted, atol=0.03, rtol=0)


def test_a_sentence_finds_the_same_in_any_batch() -> None:
    prompts, most = [[1], [1, 4], [1, 3], [1]], [6, 2, 4, 7]

    def find(order: Sequence[int]) -> list[list[Hypothesis]]:
        session = tables(order)
        chosen = [prompts[n] for n in order], [most[n] for n in order]
        return beam(session, chosen[0], end=END, max_length=chosen[1], width=3, n_best=2)

    together = find(range(4))
    for order in ([0], [1], [2], [3], [2, 0, 3, 1]):
        for have, n in zip(find(order), order, strict=True):
            same(have, together[n])


def test_a_token_that_one_member_excludes_is_still_possible() -> None:
    """The mean of probabilities has no veto, and nothing underflows."""

    class Sure(Table):
        def step(self, tokens: torch.Tensor) -> torch.Tensor:
            sure = torch.full((len(tokens), N), -400.0, dtype=torch.float64)
            sure[:, self.seed] = 0.0
            return sure

    session = ensemble([Sure(3, N, [0]), Sure(4, N, [0])], [1, 3])
    (logs,) = session.step(torch.tensor([1])).tolist()
    assert logs[3] == pytest.approx(math.log(1 / 4))
    assert logs[4] == pytest.approx(math.log(3 / 4))
    assert logs[5] == pytest.approx(-400)


def test_coverage_is_that_of_the_mean_attention() -> None:
    lengths, prompts = [5, 2, 3], [[1], [1, 3, 4], [1, 6]]
    rules: dict[str, Any] = {"end": END, "penalty": PAPER, "width": 3, "coverage": 0.7}
    session = ensemble([Looking(seed, N, lengths) for seed in SEEDS[:2]], [1, 3])
    assert isinstance(session, Attentive)
    found = beam(session, prompts, max_length=5, **rules)
    for n, have in enumerate(found):

        def logs(prefix: tuple[int, ...], n: int = n) -> list[float]:
            both = [logits(seed, n, prefix, N, 1.0).softmax(-1) for seed in SEEDS[:2]]
            return ((both[0] + 3 * both[1]) / 4).log().tolist()

        def look(prefix: tuple[int, ...], n: int = n) -> list[float]:
            both = (looks(seed, n, prefix, lengths[n]) for seed in SEEDS[:2])
            return [(one + 3 * two) / 4 for one, two in zip(*both)]

        (want, *_) = plain_beam(logs, tuple(prompts[n]), most=5, look=look, **rules)
        same(have, [want])
    with pytest.raises(ValueError, match="sources of 5, 4 tokens have no mean attention"):
        beam(ensemble([Looking(1, N, [5]), Looking(1, N, [4])]), [[1]], max_length=3, **rules)
    with pytest.raises(ValueError, match="EnsembleSession does not"):
        beam(tables([0]), [[1]], max_length=3, **rules)


def test_finished_sentences_leave_every_member() -> None:
    most, members = [2, 9, 4, 3], [Table(seed, 11, range(4)) for seed in SEEDS]
    greedy(ensemble(members), [[1]] * 4, end=END, max_length=most, min_length=most)
    assert [member.sizes for member in members] == [[4, 4, 3, 2, 1, 1, 1, 1, 1]] * 3


def test_a_single_member_is_itself() -> None:
    alone = Table(0, N, [0])
    assert ensemble([alone]) is alone


def test_what_cannot_be_joined() -> None:
    from tests.model.samples import tokens, transformer

    model = transformer()
    one = ensemble([open_session(model, tokens(2, 5)) for _ in range(2)])
    for other in (open_session(model, tokens(2, 5)), tables([0])):
        with pytest.raises(ValueError, match="of the same models alone"):
            one.join(other)


def test_an_ensemble_that_cannot_join_is_as_it_was() -> None:
    from tests.model.samples import tokens, transformer

    models = [transformer(), transformer(), transformer()]
    one, other = (
        ensemble([open_session(model, tokens(2, 5)) for model in pair])
        for pair in (models[:2], models[::2])
    )
    for session in (one, other):
        session.step(session.begin([[1], [1]]))
    with pytest.raises(ValueError, match="sessions of one model"):
        one.join(other)
    assert [member.rows for member in one.members] == [2, 2]  # type: ignore[attr-defined]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("sizes", "rows", "weights", "line"),
    [
        ((7, 7), (2, 2), [1], r"weights \(1\) must be one for each model .*, which has 2"),
        ((7,), (2,), [1, 2], r"weights \(1, 2\) must be one for each .*, which has 1"),
        ((7, 7), (2, 2), [1, 0], r"weight \(0\) must be above 0 and finite"),
        ((7, 7), (2, 2), [math.inf, 1], r"weight \(inf\) must be above 0 and finite"),
        ((7, 7), (2, 2), [1, math.nan], r"weight \(nan\) must be above 0 and finite"),
        ((7, 11), (2, 2), None, "vocabulary must be the same in all members .*, not 7, 11;"),
        ((7, 7, 7), (2, 3, 2), None, "rows must be the same in all members .*, not 2, 3, 2;"),
    ],
)
def test_errors(
    sizes: Sequence[int], rows: Sequence[int], weights: Sequence[float] | None, line: str
) -> None:
    members = [Table(0, size, range(count)) for size, count in zip(sizes, rows)]
    with pytest.raises(ValueError, match=line):
        ensemble(members, weights)


def test_it_owns_its_members() -> None:
    class Closed(Table):
        closed = False

        def close(self) -> None:
            self.closed = True

    members = [Closed(0, N, [0]), Closed(1, N, [0])]
    with ensemble(members) as session:
        assert isinstance(session, EnsembleSession)
    assert all(member.closed for member in members)
