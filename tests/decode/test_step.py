"""The models' steps: a search through them finds what whole models say, in any batch."""

import itertools
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from regard import Packed, Transformer
from regard.decode.engine.eager import Attentive, State, language, translation
from regard.decode.search.beam import PAPER, beam, power
from regard.decode.search.greedy import greedy
from regard.decode.search.hypothesis import Hypothesis
from regard.decode.search.sample import sample
from tests.decode.tables import Logs, exhaustive, plain_beam, same
from tests.model.samples import SOURCES, close, frames, images, pack, tokens, transformer
from tests.model.samples import language as language_model

B, S, START, END, WIDTH = 5, 7, 1, 2, 3
LENGTHS = torch.tensor([7, 3, 1, 7, 5])
PROMPTS = [[START], [START, 7], [START], [START, 5, 11], [START, 2]]
MOST = [9, 3, 1, 7, 5]

Search = Callable[[Any, Any, list[list[int]], list[int], Sequence[int]], list[list[Hypothesis]]]


def by_greed(
    step: Any, state: Any, prompts: list[list[int]], most: list[int], numbers: Sequence[int]
) -> list[list[Hypothesis]]:
    return [[one] for one in greedy(step, state, prompts, end=END, max_length=most)]


def by_chance(
    step: Any, state: Any, prompts: list[list[int]], most: list[int], numbers: Sequence[int]
) -> list[list[Hypothesis]]:
    given: dict[str, Any] = {"end": END, "max_length": most, "top_p": 0.9, "temperature": 1.3}
    return [[one] for one in sample(step, state, prompts, **given, seed=3, indices=numbers)]


def by_beam(
    step: Any, state: Any, prompts: list[list[int]], most: list[int], numbers: Sequence[int]
) -> list[list[Hypothesis]]:
    coverage = 0.2 if isinstance(state, Attentive) else 0.0
    given: dict[str, Any] = {"end": END, "max_length": most, "width": WIDTH, "n_best": 2}
    return beam(step, state, prompts, **given, coverage=coverage)


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
@pytest.mark.parametrize("capacity", [None, 13])
@pytest.mark.parametrize("position", ["sinusoidal", "rotary"])
def test_beams_of_a_transformer(capacity: int | None, position: str) -> None:
    model, source = transformer(position), tokens(B, S)
    given: dict[str, Any] = {"end": END, "banned": [0], "width": WIDTH, "penalty": power(0.7)}
    step, state = translation(model, source, LENGTHS, capacity=capacity)
    found = beam(step, state, PROMPTS, max_length=5, n_best=2, **given)
    for n, have in enumerate(found):
        logs = whole(model, source[n, : LENGTHS[n]])
        same(have, plain_beam(logs, tuple(PROMPTS[n]), most=5, **given)[:2])


@often
def test_all_sequences_of_a_transformer() -> None:
    model, source = transformer(vocabulary=5), tokens(2, S, most=5)
    step, state = translation(model, source)
    found = beam(step, state, [[START]] * 2, end=END, max_length=3, width=125, n_best=9)
    for n, have in enumerate(found):
        every = exhaustive(whole(model, source[n]), (START,), 5, end=END, most=3, penalty=PAPER)
        same(have, every[:9])


@often
@pytest.mark.parametrize("kind", ["image", "audio"])
def test_beams_of_other_sources(kind: str) -> None:
    model = transformer(source=SOURCES[kind])
    source = images(2) if kind == "image" else frames(2, S)
    given: dict[str, Any] = {"end": END, "width": WIDTH, "penalty": PAPER}
    found = beam(*translation(model, source), [[START]] * 2, max_length=5, n_best=3, **given)
    for n, have in enumerate(found):
        same(have, plain_beam(whole(model, source[n]), (START,), most=5, **given)[:3])


@often
@pytest.mark.parametrize("capacity", [None, 13])
def test_beams_of_a_language_model(capacity: int | None) -> None:
    model = language_model()
    given: dict[str, Any] = {"end": END, "width": WIDTH, "penalty": PAPER}
    step, state = language(model, capacity=capacity)
    found = beam(step, state, PROMPTS, max_length=7, n_best=3, **given)
    for prompt, have in zip(PROMPTS, found):
        same(have, plain_beam(whole(model), tuple(prompt), most=7, **given)[:3])


# The same in any batch


@every_search
@pytest.mark.parametrize("attention", [False, True])
def test_a_batch_equals_one_by_one_in_any_order(search: Search, attention: bool) -> None:
    model, source = transformer(), tokens(B, S)

    def find(order: Sequence[int]) -> list[list[Hypothesis]]:
        longest = max(LENGTHS[n] for n in order)
        step, state = translation(
            model, source[order, :longest], LENGTHS[order], attention=attention
        )
        return search(step, state, chosen(PROMPTS, order), chosen(MOST, order), order)

    together = find(range(B))
    for order in ([0], [1], [2], [3], [4], [4, 2, 0, 1, 3], [3, 1]):
        for have, want in zip(find(order), chosen(together, order), strict=True):
            same(have, want)


@every_search
def test_packed_sources_are_read_alike(search: Search) -> None:
    model, source = transformer(), tokens(B, S)
    padded = translation(model, source, LENGTHS)
    packed = translation(model, pack(source, LENGTHS), Packed(LENGTHS))
    have, want = (search(*each, PROMPTS, MOST, range(B)) for each in (packed, padded))
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


def test_beams_share_the_keys_and_values_of_their_source() -> None:
    model = transformer()
    step, state = translation(model, tokens(4, S), [S, 5, 3, 1])
    calls, most = counted(model), [2, 6, 4, 3]
    held: list[int] = []

    def watched(new: Tensor, state: Any) -> tuple[Tensor, Any]:
        result = step(new, state)
        held.append(state.cache.blocks[0].cross.held[0].data_ptr())
        return result

    beam(watched, state, [[START]] * 4, end=END, max_length=most, min_length=most, width=WIDTH)
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
        step, state = translation(model, source, LENGTHS, attention=attention)
        target, who = torch.full((B, 1), START), torch.arange(B)
        if not early:
            step(target, state)
        for n, rows in enumerate(rows_of_each):
            chosen = torch.tensor(rows).long()
            state.select(chosen)
            target, who = target[chosen], who[chosen]
            new = target if early and n == 0 else tokens(len(rows), 2)
            target = new if early and n == 0 else torch.cat((target, new), 1)
            if not rows:
                continue
            logits, state = step(new, state)
            close(logits, model(source[who], target, source_lengths=LENGTHS[who])[:, -1])
            if attention:
                assert isinstance(state, Attentive)
                close(state.attention.sum(-1), torch.ones(len(rows), dtype=torch.float64))
                real = torch.arange(S) < LENGTHS[who, None]
                assert torch.equal(state.real, real)
                assert not state.attention[~real].any()


@torch.no_grad()
def test_rows_on_a_device_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """There, beams are taken to stay with their sentence, and checked without waiting."""
    model, source, target = transformer(), tokens(2, S), torch.full((2, 1), START)
    step, state = translation(model, source)
    step(target, state)
    state.select(torch.tensor([0, 0, 0, 1, 1, 1]))
    monkeypatch.setattr("regard.decode.step.on_host", lambda rows: False)
    calls = counted(model)
    new = tokens(6, 1)
    step(new, state)
    state.select(torch.tensor([2, 2, 0, 4, 3, 3]))
    have, _ = step(new, state)
    whole = torch.cat((target[[0, 0, 0, 1, 1, 1]], new[[2, 2, 0, 4, 3, 3]], new), 1)
    close(have, model(source[[0, 0, 0, 1, 1, 1]], whole)[:, -1])
    with pytest.raises(RuntimeError):
        state.select(torch.tensor([3, 1, 2, 0, 4, 5]))
    state.select(torch.tensor([4, 0]))  # in another number, each has a source of its own
    have, _ = step(new[:2], state)
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
    step, state = translation(model, source, attention=True)
    step(target, state)
    kept: list[Tensor] = []
    block = model.decoder.blocks[-1]
    block.cross.core.register_forward_pre_hook(lambda _, given: kept.extend(given))
    model(source, target)
    query, key, _ = kept
    weights = (query @ key.mT / key.shape[-1] ** 0.5).softmax(-1)
    close(state.attention, weights.mean(1)[:, -1])
    assert len(block.cross.core._forward_pre_hooks) == 1  # the one above


def test_a_plain_state_has_no_attention() -> None:
    _, plain = translation(transformer(), tokens(2, S))
    assert isinstance(plain, State)
    assert not isinstance(plain, Attentive)


# Errors


def test_a_model_in_training_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Transformer is in training.* call model.eval\(\)"):
        translation(transformer().train(), tokens(2, S))
    with pytest.raises(ValueError, match="LanguageModel is in training"):
        language(language_model().train())


def test_rows_that_are_not_there_are_refused() -> None:
    _, state = translation(transformer(), tokens(2, S))
    with pytest.raises(ValueError, match=r"rows \(\[0, 2\]\) must lie from 0 to 1"):
        state.select(torch.tensor([0, 2]))


@pytest.mark.gpu
@every_search
def test_on_a_device(search: Search) -> None:
    model, source = transformer(), tokens(B, S)
    want = search(*translation(model, source, LENGTHS), PROMPTS, MOST, range(B))
    model, source = model.cuda(), source.cuda()
    for attention in (False, True):
        steps = translation(model, source, LENGTHS, capacity=13, attention=attention)
        have = search(*steps, PROMPTS, MOST, range(B))
        if not attention:
            for one, two in zip(have, want, strict=True):
                same(one, two)
