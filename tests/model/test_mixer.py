"""What mixes tokens, as a setting: the same model with recurrence or convolution for attention."""

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from regard import (
    ClassifierConfig,
    LanguageConfig,
    LanguageModel,
    MultiHeadAttention,
    PackedLengths,
    TextClassifier,
    Transformer,
    TransformerConfig,
    VisionConfig,
    VisionTransformer,
    checkpoint,
)
from regard.decode.engine.int8.linear import int8
from regard.decode.engine.pick import open_session, pick
from regard.decode.search.beam import beam
from regard.decode.search.greedy import greedy
from regard.model.baseline import Convolution, Recurrent
from regard.model.block import Block
from tests.model.samples import N, close, lively, pack, tokens

B, S, L = 3, 11, 7
SIZES: dict[str, Any] = {"width": 12, "heads": 3, "feed_forward": 17, "dropout": 0.0}
TEXT = TransformerConfig(N, encoder_layers=2, decoder_layers=2, **SIZES)
LANGUAGE = LanguageConfig(N, layers=2, **SIZES)
OTHERS = ["lstm", "gru", "convolution"]
others = pytest.mark.parametrize("mixer", OTHERS)


def blocks(stack: Any) -> list[Block]:
    return list(stack.blocks)


@others
def test_each_takes_attentions_place_and_cross_attention_stays(mixer: Any) -> None:
    model = Transformer(replace(TEXT, mixer=mixer, kernel=3))
    for block in blocks(model.encoder):
        match block.attention:
            case Recurrent() as layer:
                assert layer.backwards is not None
                assert type(layer.forwards).__name__.lower() == mixer
            case Convolution() as layer:
                assert (layer.kernel, layer.causal) == (3, False)
    for block in blocks(model.decoder):
        assert isinstance(block.cross, MultiHeadAttention)
        match block.attention:
            case Recurrent() as layer:
                assert layer.backwards is None
            case Convolution() as layer:
                assert layer.causal
    assert not any(
        isinstance(block.attention, MultiHeadAttention)
        for block in (*blocks(model.encoder), *blocks(model.decoder))
    )


@others
@pytest.mark.usefixtures("unchecked")
def test_packed_is_padded_and_cached_is_uncached(mixer: Any) -> None:
    model = lively(Transformer(replace(TEXT, mixer=mixer)))
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
    memory, cache = model.encode(source, read), model.cache()
    steps = [
        model.decode(part, memory if n == 0 else None, source_lengths=read, cache=cache)
        for n, part in enumerate(target.split([2, 1, 3, 1], 1))
    ]
    close(torch.cat(steps, 1), model.decode(target, memory, source_lengths=read))


@others
def test_nothing_comes_from_later_tokens_in_a_decoder(mixer: Any) -> None:
    model, ids = lively(LanguageModel(replace(LANGUAGE, mixer=mixer))), tokens(B, L)
    other = ids.clone()
    other[:, 4] = (other[:, 4] + 1) % N
    close(model(other)[:, :4], model(ids)[:, :4])
    assert (model(other)[:, 4:] - model(ids)[:, 4:]).abs().amax() > 1e-6


@others
def test_searches_run_in_8_bits_too_by_the_modules(mixer: Any) -> None:
    model = lively(Transformer(replace(TEXT, mixer=mixer)), torch.float32)
    source, prompts = tokens(B, S), [[1]] * B
    assert pick(model).name == "eager"
    with open_session(model, source) as session:
        found = beam(session, prompts, end=2, max_length=5, width=3)
    assert len(found) == B
    with warnings.catch_warnings(action="ignore"):
        small = int8(model)
    assert pick(small).name == "eager"
    with open_session(small, source) as session:
        assert len(greedy(session, prompts, end=2, max_length=5)) == B


@others
def test_saved_and_loaded(mixer: Any, tmp_path: Path) -> None:
    config = ClassifierConfig(5, N, layers=1, mixer=mixer, **SIZES)
    model, ids = lively(TextClassifier(config), torch.float32), tokens(B, S)
    checkpoint.save(tmp_path / "model", model)
    again = checkpoint.load(tmp_path / "model").model
    assert isinstance(again, TextClassifier)
    assert again.config == config
    close(again(ids), model(ids))


@others
@pytest.mark.parametrize("pool", ["class", "mean"])
def test_images(mixer: Any, pool: Any) -> None:
    config = VisionConfig(5, (8, 12), 4, layers=2, mixer=mixer, pool=pool, **SIZES)
    model, images = lively(VisionTransformer(config)), torch.randn(2, 3, 8, 12).double()
    whole = model.features(images)
    close(model.represent(images), whole[:, 0] if pool == "class" else whole.mean(1))


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"mixer": "mamba"}, r"mixer \('mamba'\) is unknown; choose from attention, lstm"),
        ({"mixer": "lstm", "width": 9}, r"width \(9\), which must be even; try 10"),
        ({"mixer": "convolution", "kernel": 0}, r"kernel \(0\)"),
    ],
)
def test_refused(changed: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Transformer(replace(TEXT, **changed))
