"""A cache changes nothing: decoding in steps equals the whole, at every position."""

import itertools
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from regard import LanguageModel, Transformer
from tests.model.samples import (
    OWN,
    POSITIONS,
    SOURCES,
    close,
    frames,
    images,
    language,
    tokens,
    transformer,
)

B, L, S = 3, 11, 7
LENGTHS = torch.tensor([S, 4, 1])
SPLITS = {"one by one": [1] * L, "in chunks": [2, 1, 5, 3]}

every_position = pytest.mark.parametrize("position", [*POSITIONS, *OWN])
both_norms = pytest.mark.parametrize(
    ("norm", "capacity"),
    [
        ("post", 13),
        ("pre", None),
        pytest.param("post", None, marks=pytest.mark.slow),
        pytest.param("pre", 13, marks=pytest.mark.slow),
    ],
)
with_capacity = pytest.mark.parametrize("capacity", [None, 13])
# Thousands of calls, whose annotations the other tests check.
unchecked = pytest.mark.usefixtures("unchecked")
heads = pytest.mark.parametrize("key_heads", [None, 2, 1], ids="key_heads={}".format)


def translated(
    model: Transformer,
    source: Tensor,
    target: Tensor,
    split: Sequence[int],
    capacity: int | None,
    lengths: Tensor | None = LENGTHS,
) -> Tensor:
    """All logits, computed step by step; only the first one needs the memory."""
    cache = model.cache(capacity)
    memory: Tensor | None = model.encode(source, lengths)
    steps = []
    for new in target.split(list(split), 1):
        steps.append(model.decode(new, memory, source_lengths=lengths, cache=cache))
        memory = None
    assert int(cache.length) == target.shape[1]
    return torch.cat(steps, 1)


def continued(
    model: LanguageModel, ids: Tensor, split: Sequence[int], capacity: int | None
) -> Tensor:
    cache = model.cache(capacity)
    return torch.cat([model(new, cache=cache) for new in ids.split(list(split), 1)], 1)


@unchecked
@every_position
@both_norms
@torch.no_grad()
def test_translation(position: str, norm: str, capacity: int | None) -> None:
    model = transformer(position, norm=norm, key_heads=2)
    source, target = tokens(B, S), tokens(B, L)
    want = model(source, target, source_lengths=LENGTHS)
    for split in SPLITS.values():
        close(translated(model, source, target, split, capacity), want)


@unchecked
@every_position
@both_norms
@torch.no_grad()
def test_continuation(position: str, norm: str, capacity: int | None) -> None:
    model, ids = language(position, norm=norm, key_heads=2), tokens(B, L)
    close(continued(model, ids, SPLITS["in chunks"], capacity), model(ids))


@heads
@with_capacity
@torch.no_grad()
def test_heads_in_groups(key_heads: int | None, capacity: int | None) -> None:
    model = transformer("linear-bias", key_heads=key_heads)
    source, target = tokens(B, S), tokens(B, L)
    want = model(source, target, source_lengths=LENGTHS)
    close(translated(model, source, target, [4, 1, 6], capacity), want)


# Twice the largest error of a whole forward in that precision, measured against float64; a step
# that lost a position would be off by about 1.
PRECISIONS = {torch.float32: 1e-5, torch.bfloat16: 0.15}


@unchecked
@pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
@every_position
@torch.no_grad()
def test_lower_precision(dtype: torch.dtype, position: str) -> None:
    for norm, capacity in (("post", 13), ("pre", None)):
        model = transformer(position, dtype, norm=norm, key_heads=2)
        source, target = tokens(B, S), tokens(B, L)
        want = model(source, target, source_lengths=LENGTHS)
        have = translated(model, source, target, [1, 1, 3, 6], capacity)
        assert have.dtype == dtype
        close(have, want, PRECISIONS[dtype])
        other, ids = language(position, dtype, norm=norm), tokens(B, L)
        close(continued(other, ids, [3, 1, 7], capacity), other(ids), PRECISIONS[dtype])


@pytest.mark.parametrize("kind", SOURCES)
@torch.no_grad()
def test_images_and_sound(kind: str) -> None:
    model, target = transformer(source=SOURCES[kind]), tokens(B, L)
    source, lengths = (images(B), None) if kind == "image" else (frames(B, S), LENGTHS)
    want = model(source, target, source_lengths=lengths)
    close(translated(model, source, target, [2, 9], None, lengths), want)


@with_capacity
@torch.no_grad()
def test_rows_are_kept_dropped_repeated_and_reordered(capacity: int | None) -> None:
    rows = [2, 0, 2, 2]
    source, target, later = tokens(B, S), tokens(B, 5), tokens(len(rows), 4)
    whole = torch.cat((target[rows], later), 1)
    model = transformer("rotary")
    cache = model.cache(capacity)
    model.decode(target, model.encode(source, LENGTHS), source_lengths=LENGTHS, cache=cache)
    cache.select(rows)
    have = [
        model.decode(new, None, source_lengths=LENGTHS[rows], cache=cache)
        for new in later.split(1, 1)
    ]
    want = model(source[rows], whole, source_lengths=LENGTHS[rows])
    close(torch.cat(have, 1), want[:, 5:])

    other = language("learned")
    cache = other.cache(capacity)
    other(target, cache=cache)
    cache.select(torch.tensor(rows))
    close(other(later, cache=cache), other(whole)[:, 5:])


def test_gradients_reach_back_through_the_steps() -> None:
    model, source, target = transformer(), tokens(B, S), tokens(B, L)
    own, seeds = list(model.parameters()), torch.randn(B, L, 19, dtype=torch.float64)
    want = torch.autograd.grad(model(source, target, source_lengths=LENGTHS), own, seeds)
    for capacity in (None, 13):
        out = translated(model, source, target, [1, 4, 6], capacity)
        for one, two in zip(torch.autograd.grad(out, own, seeds), want):
            close(one, two, 1e-10)


@torch.no_grad()
def test_a_step_computes_its_own_tokens_alone() -> None:
    """Attention's projections see one row; the memory's are not computed again."""
    model, seen = transformer(), []
    for block, name in itertools.product(model.decoder.blocks, ("attention", "cross")):
        attention = getattr(block, name)
        attention.key.register_forward_hook(
            lambda module, given, result, name=name: seen.append((name, given[0].shape[1]))
        )
    cache, memory = model.cache(), model.encode(tokens(B, S))
    for new in tokens(B, 4).split(1, 1):
        model.decode(new, memory, cache=cache)
    assert sorted(seen) == [("attention", 1)] * 8 + [("cross", S)] * 2
