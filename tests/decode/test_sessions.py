"""The eager engine: a search through it finds what whole models say, in any batch."""

import itertools
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from regard import LanguageModel, PackedLengths, Transformer
from regard.decode.engine import eager
from regard.decode.engine.pick import open_session
from regard.decode.engine.session import Attentive, Session
from regard.decode.search.beam import PAPER, beam, power
from regard.decode.search.greedy import greedy
from regard.decode.search.hypothesis import Hypothesis
from regard.decode.search.sample import sample
from regard.model.baseline import Convolution, Dense, Recurrent
from tests.decode.tables import Logs, exhaustive, plain_beam, same
from tests.model.samples import (
    OWN,
    POSITIONS,
    SOURCES,
    D,
    close,
    frames,
    images,
    language,
    lively,
    pack,
    tokens,
    transformer,
)

B, S, START, END, WIDTH = 5, 7, 1, 2, 3
LENGTHS = torch.tensor([7, 3, 1, 7, 5])
PROMPTS = [[START], [START, 7], [START], [START, 5, 11], [START, 2]]
MOST = [9, 3, 1, 7, 5]

Search = Callable[[Session, list[list[int]], list[int], Sequence[int]], list[list[Hypothesis]]]


def by_greed(
    session: Session, prompts: list[list[int]], most: list[int], numbers: Sequence[int]
) -> list[list[Hypothesis]]:
    return [[one] for one in greedy(session, prompts, end=END, max_length=most)]


def by_chance(
    session: Session, prompts: list[list[int]], most: list[int], numbers: Sequence[int]
) -> list[list[Hypothesis]]:
    given: dict[str, Any] = {"end": END, "max_length": most, "top_p": 0.9, "temperature": 1.3}
    return [[one] for one in sample(session, prompts, **given, seed=3, indices=numbers)]


def by_beam(
    session: Session, prompts: list[list[int]], most: list[int], numbers: Sequence[int]
) -> list[list[Hypothesis]]:
    coverage = 0.2 if isinstance(session, Attentive) else 0.0
    given: dict[str, Any] = {"end": END, "max_length": most, "width": WIDTH, "n_best": 2}
    return beam(session, prompts, **given, coverage=coverage)


every_search = pytest.mark.parametrize("search", [by_greed, by_chance, by_beam])


def whole(model: nn.Module, *source: Tensor) -> Logs:
    """log p by the model without a cache."""

    @cache
    @torch.no_grad()
    def logs(prefix: tuple[int, ...]) -> list[float]:
        read = [one[None] for one in source]
        return model(*read, torch.tensor([prefix]))[0, -1].log_softmax(-1).tolist()

    return logs


def chosen(rows: Sequence[Any], order: Sequence[int]) -> list[Any]:
    return [rows[n] for n in order]


# The same as without a cache

# Thousands of calls, whose annotations the other tests check.
often = pytest.mark.usefixtures("unchecked")


@often
@pytest.mark.parametrize("position", ["sinusoidal", "rotary"])
def test_beams_of_a_transformer(position: str) -> None:
    model, source = transformer(position), tokens(B, S)
    given: dict[str, Any] = {"end": END, "banned": [0], "width": WIDTH, "penalty": power(0.7)}
    session = open_session(model, source, LENGTHS)
    found = beam(session, PROMPTS, max_length=5, n_best=2, **given)
    for n, have in enumerate(found):
        logs = whole(model, source[n, : LENGTHS[n]])
        same(have, plain_beam(logs, tuple(PROMPTS[n]), most=5, **given)[:2])


@often
def test_all_sequences_of_a_transformer() -> None:
    model, source = transformer(vocabulary=5), tokens(2, S, most=5)
    session = open_session(model, source)
    found = beam(session, [[START]] * 2, end=END, max_length=3, width=125, n_best=9)
    for n, have in enumerate(found):
        every = exhaustive(whole(model, source[n]), (START,), 5, end=END, most=3, penalty=PAPER)
        same(have, every[:9])


@often
@pytest.mark.parametrize("kind", ["image", "audio"])
def test_beams_of_other_sources(kind: str) -> None:
    model = transformer(source=SOURCES[kind])
    source = images(2) if kind == "image" else frames(2, S)
    given: dict[str, Any] = {"end": END, "width": WIDTH, "penalty": PAPER}
    session = open_session(model, source)
    found = beam(session, [[START]] * 2, max_length=5, n_best=3, **given)
    for n, have in enumerate(found):
        same(have, plain_beam(whole(model, source[n]), (START,), most=5, **given)[:3])


@often
def test_beams_of_a_language_model() -> None:
    model = language()
    given: dict[str, Any] = {"end": END, "width": WIDTH, "penalty": PAPER}
    found = beam(open_session(model, rows=B), PROMPTS, max_length=7, n_best=3, **given)
    for prompt, have in zip(PROMPTS, found):
        same(have, plain_beam(whole(model), tuple(prompt), most=7, **given)[:3])


# Rows of different lengths


def mixing(make: Callable[[int], nn.Module]) -> Callable[[], LanguageModel]:
    """A language model with such a layer in attention's place."""
    return lambda: lively(LanguageModel(language().config, attention=lambda position: make(D)))


KINDS: dict[str, Callable[[], LanguageModel]] = {
    **{kind: partial(language, kind) for kind in (*POSITIONS, *OWN)},
    "grouped heads": partial(language, key_heads=2),
    "lstm": mixing(partial(Recurrent, kind="lstm")),
    "gru": mixing(partial(Recurrent, kind="gru")),
    "convolution": mixing(partial(Convolution, kernel=3, causal=True)),
    "dense": mixing(partial(Dense, length=17)),
}


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_rows_join_and_leave_between_steps(kind: str) -> None:
    model = KINDS[kind]()
    read = [[5, 7, 3, 4, 6], [8], [3, 9, 4], [2, 5], [6, 6, 6, 6]]

    def opened(rows: Sequence[int]) -> Session:
        session = open_session(model, rows=len(rows))
        session.step(session.begin([read[n] for n in rows]))
        return session

    session, here = opened([0, 1, 2]), [0, 1, 2]

    def check() -> None:
        new = [int(token) for token in tokens(1, len(here))[0]]
        logits = session.step(torch.tensor(new))
        for row, (n, token) in enumerate(zip(here, new)):
            read[n] = [*read[n], token]
            close(logits[row], model(torch.tensor([read[n]]))[0, -1])

    check()
    session.join(opened([3, 4]))
    here += [3, 4]
    check()
    session.select(torch.tensor([4, 0, 2]))
    here = [4, 0, 2]
    check()
    check()


@torch.no_grad()
def test_rows_with_sources_join_and_leave_between_steps() -> None:
    model, source = transformer(), tokens(4, 11)
    lengths = torch.tensor([3, 7, 11, 2])
    read: list[list[int]] = [[START, 5], [START], [START], [START, 6, 4]]

    def opened(rows: list[int]) -> Session:
        longest = int(lengths[rows].max())
        session = open_session(model, source[rows, :longest], lengths[rows])
        session.step(session.begin([read[n] for n in rows]))
        return session

    session, here = opened([0, 1]), [0, 1]
    session.select(torch.tensor([0, 0, 1, 1]))  # two beams each, which share a source
    here, read = [0, 0, 1, 1], [list(one) for one in read]
    paths = [read[n] for n in here]

    def check() -> None:
        new = [int(token) for token in tokens(1, len(here))[0]]
        logits = session.step(torch.tensor(new))
        for row, (n, token) in enumerate(zip(here, new)):
            paths[row] = [*paths[row], token]
            whole = model(source[n : n + 1, : lengths[n]], torch.tensor([paths[row]]))
            close(logits[row], whole[0, -1])

    check()
    session.join(opened([2, 3]))
    here, paths = [*here, 2, 3], [*paths, read[2], read[3]]
    check()
    rows = [5, 5, 2, 4]
    session.select(torch.tensor(rows))
    here, paths = chosen(here, rows), chosen(paths, rows)
    check()
    check()


def test_what_cannot_join() -> None:
    model = transformer()
    one, two = (open_session(model, tokens(2, S)) for _ in range(2))
    with pytest.raises(ValueError, match="joins after its first step"):
        one.join(two)


# The same in any batch


@every_search
@pytest.mark.parametrize("attention", [False, True])
def test_a_batch_equals_one_by_one_in_any_order(search: Search, attention: bool) -> None:
    model, source = transformer(), tokens(B, S)

    def find(order: Sequence[int]) -> list[list[Hypothesis]]:
        longest = max(LENGTHS[n] for n in order)
        session = open_session(model, source[order, :longest], LENGTHS[order], attention=attention)
        return search(session, chosen(PROMPTS, order), chosen(MOST, order), order)

    together = find(range(B))
    for order in ([0], [1], [2], [3], [4], [4, 2, 0, 1, 3], [3, 1]):
        for have, want in zip(find(order), chosen(together, order), strict=True):
            same(have, want)


@every_search
def test_packed_sources_are_read_alike(search: Search) -> None:
    model, source = transformer(), tokens(B, S)
    padded = open_session(model, source, LENGTHS)
    packed = open_session(model, pack(source, LENGTHS), PackedLengths(LENGTHS))
    have, want = (search(each, PROMPTS, MOST, range(B)) for each in (packed, padded))
    for one, two in zip(have, want, strict=True):
        same(one, two)


# Sharing


def counted(model: Transformer) -> list[tuple[int, int]]:
    """How many sources and queries each later call of the last cross-attention works on."""
    calls: list[tuple[int, int]] = []
    core = model.decoder.blocks[-1].cross.core
    core.register_forward_pre_hook(
        lambda _, given: calls.append((len(given[1]), given[0].shape[2]))
    )
    return calls


def test_beams_share_the_keys_and_values_of_their_source(monkeypatch: pytest.MonkeyPatch) -> None:
    model = transformer()
    session = open_session(model, tokens(4, S), [S, 5, 3, 1])
    calls, most = counted(model), [2, 6, 4, 3]
    held: list[int] = []
    step = session.step

    def watched(new: Tensor) -> Tensor:
        logits = step(new)
        held.append(session.cache.blocks[0].cross.held[0].data_ptr())
        return logits

    monkeypatch.setattr(session, "step", watched)
    beam(session, [[START]] * 4, end=END, max_length=most, min_length=most, width=WIDTH)
    assert calls == [(4, 1), (4, 3), (3, 3), (2, 3), (1, 3), (1, 3)]
    # They are copied when sentences leave, and never for beams that change places.
    moved = [one != two for one, two in itertools.pairwise(held)]
    assert moved == [False, True, True, True, False]


@torch.no_grad()
@pytest.mark.parametrize("attention", [False, True])
def test_rows_may_be_chosen_in_any_way(attention: bool) -> None:
    """Shared or not, before the first step or after, a row goes on with what it was."""
    model, source = transformer(), tokens(B, S)
    choices = [
        [[0, 0, 3, 3]],
        [[0, 0, 0, 1, 1, 1], [1, 0, 2, 5, 5, 3], [3, 4, 5], [2, 2, 1]],
        [[4, 4, 4, 4, 1, 1], [0, 5, 2], [1, 1, 0, 0, 2, 2], [5, 4, 1, 0]],
        [[2], [0, 0], [1]],
        [[], []],
    ]
    for early, rows_of_each in itertools.product((False, True), choices):
        session = open_session(model, source, LENGTHS, attention=attention)
        target, who = torch.full((B, 1), START), torch.arange(B)
        if not early:
            session.step(target[:, 0])
        for n, rows in enumerate(rows_of_each):
            chosen = torch.tensor(rows).long()
            session.select(chosen)
            target, who = target[chosen], who[chosen]
            new = target if early and n == 0 else tokens(len(rows), 1)
            target = new if early and n == 0 else torch.cat((target, new), 1)
            if not rows:
                continue
            logits = session.step(new[:, 0])
            close(logits, model(source[who], target, source_lengths=LENGTHS[who])[:, -1])
            if attention:
                assert isinstance(session, Attentive)
                close(session.attention.sum(-1), torch.ones(len(rows), dtype=torch.float64))
                real = torch.arange(S) < LENGTHS[who, None]
                assert torch.equal(session.real, real)
                assert not session.attention[~real].any()


@torch.no_grad()
def test_rows_on_a_device_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """There, beams are taken to stay with their sentence, and checked without waiting."""
    model, source, target = transformer(), tokens(2, S), torch.full((2, 1), START)
    session = open_session(model, source)
    session.step(target[:, 0])
    session.select(torch.tensor([0, 0, 0, 1, 1, 1]))
    monkeypatch.setattr(eager, "on_host", lambda rows: False)
    calls = counted(model)
    new = tokens(6, 1)
    session.step(new[:, 0])
    session.select(torch.tensor([2, 2, 0, 4, 3, 3]))
    have = session.step(new[:, 0])
    whole = torch.cat((target[[0, 0, 0, 1, 1, 1]], new[[2, 2, 0, 4, 3, 3]], new), 1)
    close(have, model(source[[0, 0, 0, 1, 1, 1]], whole)[:, -1])
    with pytest.raises(RuntimeError):
        session.select(torch.tensor([3, 1, 2, 0, 4, 5]))
    session.select(torch.tensor([4, 0]))  # in another number, each has a source of its own
    have = session.step(new[:2, 0])
    close(have, model(source[[1, 0]], torch.cat((whole[[4, 0]], new[:2]), 1))[:, -1])
    assert calls[:2] == [(2, 3), (2, 3)]


@torch.no_grad()
def test_a_cache_that_is_shared_can_be_parted() -> None:
    model, source, rows = transformer(), tokens(2, S), [5, 0, 2]
    cache, target = model.cache(), tokens(2, 3)
    model.decode(target, model.encode(source), cache=cache)
    cache.share([0, 0, 0, 1, 1, 1], None, 3)
    new = tokens(6, 1)
    model.decode(new, None, cache=cache)
    cache.select(rows)
    last, owners = tokens(3, 1), [1, 0, 0]
    want = model(source[owners], torch.cat((target[owners], new[rows], last), 1))
    close(model.decode(last, None, cache=cache), want[:, -1:])


@torch.no_grad()
def test_attention_is_the_last_blocks() -> None:
    model, source, target = transformer(), tokens(2, S), tokens(2, 3)
    session = open_session(model, source, attention=True)
    for column in target.T:
        session.step(column)
    kept: list[Tensor] = []
    block = model.decoder.blocks[-1]
    block.cross.core.register_forward_pre_hook(lambda _, given: kept.extend(given))
    model(source, target)
    query, key, _ = kept
    weights = (query @ key.mT / key.shape[-1] ** 0.5).softmax(-1)
    assert isinstance(session, Attentive)
    close(session.attention, weights.mean(1)[:, -1])
    assert len(block.cross.core._forward_pre_hooks) == 1  # the one above


def test_a_plain_session_has_no_attention() -> None:
    assert not isinstance(open_session(transformer(), tokens(2, S)), Attentive)


# Errors


def test_a_model_in_training_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Transformer is in training.* call model.eval\(\)"):
        open_session(transformer().train(), tokens(2, S))
    with pytest.raises(ValueError, match="LanguageModel is in training"):
        open_session(language().train(), rows=2)


def test_a_source_where_none_is_read_and_none_where_one_is() -> None:
    with pytest.raises(ValueError, match="a LanguageModel reads no source"):
        open_session(language(), tokens(2, S))
    with pytest.raises(ValueError, match="a Transformer needs a source to read"):
        open_session(transformer())


def test_rows_that_are_not_there_are_refused() -> None:
    session = open_session(transformer(), tokens(2, S))
    with pytest.raises(ValueError, match=r"rows \(\[0, 2\]\) must lie from 0 to 1"):
        session.select(torch.tensor([0, 2]))
    with pytest.raises(ValueError, match=r"tokens of 3 rows for a session of 2; select\(\) them"):
        session.step(torch.ones(3, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"prompt 1 \(\[1, 99\]\) must hold tokens from 0 to"):
        session.begin([[1], [1, 99]])
