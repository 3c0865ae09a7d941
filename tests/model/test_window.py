"""A window as a setting of models: what is further away changes nothing."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from regard import (
    AdditiveScore,
    ClassifierConfig,
    ImageSource,
    LanguageConfig,
    LanguageModel,
    MultiHeadAttention,
    PackedLengths,
    TextClassifier,
    Transformer,
    TransformerConfig,
    VisionConfig,
    VisionTransformer,
)
from regard.model.embedding import nearby_patches
from tests.model.samples import N, close, lively, pack, tokens

W, S, L, B = 2, 11, 7, 3
SIZES: dict[str, Any] = {"width": 12, "heads": 3, "feed_forward": 17, "dropout": 0.0}
TEXT = TransformerConfig(N, encoder_layers=1, decoder_layers=1, window=W, **SIZES)
LANGUAGE = LanguageConfig(N, layers=1, window=W, position="none", **SIZES)
CLASSES = ClassifierConfig(5, N, layers=1, window=W, **SIZES)
IMAGE = VisionConfig(5, (8, 12), 2, layers=1, window=1, **SIZES)
ROWS, COLUMNS = 4, 6


def reach(states: Callable[[Tensor], Tensor], ids: Tensor) -> Tensor:
    """Whether token m, exchanged for another one, changes the state at n: (L, L)."""
    before = states(ids)
    changed = []
    for m in range(ids.shape[1]):
        other = ids.clone()
        other[:, m] = (other[:, m] + 1) % N
        changed.append((states(other) - before).abs().amax((0, 2)) > 1e-9)
    return torch.stack(changed, 1)


def near(length: int, window: int = W) -> Tensor:
    place = torch.arange(length)
    return (place[:, None] - place).abs() <= window


def test_an_encoder_sees_both_sides() -> None:
    model, ids = lively(Transformer(TEXT)), tokens(1, S)
    assert torch.equal(reach(model.encode, ids), near(S))
    classifier = lively(TextClassifier(CLASSES))
    assert torch.equal(reach(lambda ids: classifier.features(ids), ids), near(S))


def test_a_decoder_sees_what_came_before() -> None:
    model, source, ids = lively(Transformer(TEXT)), tokens(1, S), tokens(1, L)
    memory = model.encode(source)
    assert torch.equal(reach(lambda ids: model.states(ids, memory), ids), near(L).tril())
    # Cross-attention reads the whole source.
    assert reach(lambda ids: model.states(tokens(1, L), model.encode(ids)), source).all()
    language = lively(LanguageModel(LANGUAGE))
    assert torch.equal(reach(lambda ids: language.states(ids), ids), near(L).tril())


def test_two_layers_reach_twice_as_far() -> None:
    language = lively(LanguageModel(replace(LANGUAGE, layers=2)))
    assert torch.equal(reach(language.states, tokens(1, S)), near(S, 2 * W).tril())


def test_a_window_as_long_as_the_text_is_none() -> None:
    model = lively(Transformer(replace(TEXT, window=S)))
    plain = Transformer(replace(TEXT, window=None)).double().eval()
    plain.load_state_dict(model.state_dict())
    source, target = tokens(B, S), tokens(B, L)
    close(model(source, target), plain(source, target))


@pytest.mark.usefixtures("unchecked")
def test_packed_is_padded() -> None:
    model = lively(Transformer(TEXT))
    source, target = tokens(B, S), tokens(B, L)
    read, written = torch.tensor([S, 4, 8]), torch.tensor([3, L, 1])
    want = model(source, target, source_lengths=read, target_lengths=written)
    have = model(
        pack(source, read),
        pack(target, written),
        source_lengths=PackedLengths(read),
        target_lengths=PackedLengths(written),
    )
    close(have, pack(want, written))


@pytest.mark.parametrize("capacity", [None, 13])
def test_cached_is_uncached(capacity: int | None) -> None:
    model = lively(LanguageModel(replace(LANGUAGE, position="rotary", layers=2)))
    ids, cache = tokens(B, S), model.cache(capacity)
    steps = [model(part, cache=cache) for part in ids.split([3, 1, 4, 1, 2], 1)]
    close(torch.cat(steps, 1), model(ids))


# Images


def around(first: bool) -> Tensor:
    """Which patches are a row and a column away at most, by their coordinates."""
    places = [(y, x) for y in range(ROWS) for x in range(COLUMNS)]
    close_by = torch.tensor(
        [[abs(y - v) <= 1 and abs(x - u) <= 1 for v, u in places] for y, x in places]
    )
    if not first:
        return close_by
    whole = torch.ones(len(places) + 1, len(places) + 1, dtype=torch.bool)
    whole[1:, 1:] = close_by
    return whole


@pytest.mark.parametrize("first", [False, True])
def test_patches_see_the_rows_and_columns_around(first: bool) -> None:
    mask = nearby_patches(ROWS, COLUMNS, 1, first)
    n = ROWS * COLUMNS + first
    assert torch.equal(mask.tensor(n, n)[0, 0], around(first))


@pytest.mark.parametrize("pool", ["class", "mean"])
def test_a_vit_with_a_window(pool: Any) -> None:
    config = replace(IMAGE, pool=pool)
    model, images = lively(VisionTransformer(config)), torch.randn(1, 3, 8, 12).double()
    pool_first = pool == "class"
    before, reached = model.features(images), []
    for y in range(ROWS):
        for x in range(COLUMNS):
            other = images.clone()
            other[:, :, 2 * y : 2 * y + 2, 2 * x : 2 * x + 2] += 1
            reached.append((model.features(other) - before).abs().amax((0, 2)) > 1e-9)
    assert torch.equal(torch.stack(reached, 1), around(pool_first)[:, int(pool_first) :])
    # Only the class token's row of the last block is computed: it sees what it saw before.
    whole = model.features(images)
    pooled = whole[:, 0] if pool_first else whole.mean(1)
    close(model.represent(images), pooled)


def test_a_decoder_of_images_with_a_window() -> None:
    source = ImageSource(image=(8, 12), patch=2)
    model = lively(Transformer(replace(TEXT, window=1, source=source)))
    images, target = torch.randn(2, 3, 8, 12).double(), tokens(2, L)
    other = images.clone()
    other[:, :, :2, :2] += 1
    moved = (model.encode(other) - model.encode(images)).abs().amax((0, 2)) > 1e-9
    assert torch.equal(moved, around(False)[:, 0])
    assert model(images, target).shape == (2, L, N)


def test_another_size_of_images_has_another_window() -> None:
    model = lively(VisionTransformer(IMAGE)).resize_images((12, 8))
    assert model(torch.randn(2, 3, 12, 8).double()).shape == (2, 5)


# What cannot be


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"window": 0}, r"window \(0\)"),
        ({"window": -3}, r"window \(-3\)"),
        ({"mixer": "lstm"}, r"window \(2\) limits self-attention, but mixer is lstm"),
    ],
)
def test_refused(changed: dict[str, Any], words: str) -> None:
    for make in (
        lambda: Transformer(replace(TEXT, **changed)),
        lambda: LanguageModel(replace(LANGUAGE, **changed)),
        lambda: TextClassifier(replace(CLASSES, **changed)),
    ):
        with pytest.raises(ValueError, match=words):
            make()


def test_parts_of_ones_own_receive_the_window() -> None:
    def own(position: Any) -> nn.Module:
        return MultiHeadAttention(12, 3, score=AdditiveScore(4, 4, 5))

    model, ids = lively(Transformer(TEXT, attention=own)), tokens(1, S)
    assert torch.equal(reach(model.encode, ids), near(S))
