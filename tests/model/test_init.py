"""Initial values are those that init.py's words promise, measured."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from regard import (
    AudioSource,
    LanguageConfig,
    LanguageModel,
    LearnedPositions,
    MultiHeadAttention,
    TextClassifier,
    TextEncoder,
    Transformer,
    TransformerConfig,
    VisionConfig,
    VisionTransformer,
)
from regard.model import init
from regard.model.block import Block
from regard.model.classifier import ClassifierConfig
from regard.model.embedding import Frames, Patches
from regard.model.encoder import EncoderConfig

SIZES = {"width": 128, "heads": 4, "feed_forward": 384}


def glorot(weight: Tensor) -> None:
    bound = math.sqrt(6 / sum(weight.shape))
    assert weight.abs().max() <= bound
    deviates(weight, bound / math.sqrt(3))


def deviates(weight: Tensor, std: float) -> None:
    """Mean 0 and this deviation, within four standard errors."""
    error = 4 / math.sqrt(weight.numel())
    assert abs(weight.mean()) < error * std
    assert abs(weight.std() / std - 1) < error


def plain(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            assert (module.weight == 1).all()
            assert (module.bias == 0).all()
        elif isinstance(module, nn.Linear) and module.bias is not None:
            assert (module.bias == 0).all()


def test_transformer() -> None:
    config = TransformerConfig(
        331, encoder_layers=1, decoder_layers=1, position="learned", length=61, **SIZES
    )
    model = Transformer(config)
    plain(model)
    for stack in (model.encoder, model.decoder):
        for module in stack.modules():
            if isinstance(module, nn.Linear):
                glorot(module.weight)
    deviates(model.target.table.weight, 128**-0.5)
    deviates(model.target.position.table, 0.02)
    glorot(Transformer(replace(config, share="none")).output.weight)


def test_tokens_are_as_large_as_positions_and_logits_of_order_one() -> None:
    model = Transformer(TransformerConfig(331, encoder_layers=1, decoder_layers=1, **SIZES)).eval()
    ids = torch.randint(331, (7, 31))
    vectors = model.target.table(ids) * model.target.scale
    positions = model.target.position.encoding(torch.arange(31))
    assert 0.5 < positions.square().mean() / vectors.square().mean() < 1
    assert 0.8 < model(ids, ids).std() < 1.2


def test_a_source_of_unit_variance_gives_vectors_of_unit_variance() -> None:
    audio = TransformerConfig(31, source=AudioSource(features=37), position="none", **SIZES)
    frames = Transformer(audio).source
    assert isinstance(frames, Frames)
    deviates(frames.projection.weight, 37**-0.5)
    assert 0.9 < frames.eval()(torch.randn(7, 31, 37)).std() < 1.1


@pytest.mark.parametrize("head_width", [None, 64])
def test_vision(head_width: int | None) -> None:
    config = VisionConfig(7, image=48, patch=8, layers=2, head_width=head_width, **SIZES)
    model = VisionTransformer(config)
    plain(model)
    assert isinstance(model.patches, Patches)
    deviates(model.patches.projection.weight, (3 * 8 * 8) ** -0.5)
    for module in model.encoder.modules():
        if isinstance(module, nn.Linear):
            glorot(module.weight)
    for zero in (model.class_token, model.head.output.weight):
        assert (zero == 0).all()
    deviates(model.patches.position.table, 0.02)
    deviates(model.class_position, 0.02)
    if head_width is not None:
        glorot(model.head.hidden.weight)
    images = torch.randn(3, 3, 48, 48)
    assert (model(images) == 0).all()
    assert 0.9 < (model.patches(images) - model.patches.position.table).std() < 1.1


def test_language() -> None:
    layers = 3
    model = LanguageModel(LanguageConfig(331, layers=layers, activation="gelu", **SIZES))
    plain(model)
    deviates(model.tokens.table.weight, 0.02)
    for block in model.decoder.blocks:
        for weight in (block.attention.query, block.attention.key, block.feed_forward.expand):
            deviates(weight.weight, 0.02)
        for last in (block.attention.output, block.feed_forward.reduce):
            deviates(last.weight, 0.02 / math.sqrt(2 * layers))
    gated = LanguageModel(LanguageConfig(31, layers=layers, **SIZES)).decoder.blocks[0].feed_forward
    deviates(gated.reduce.weight, 0.02 / math.sqrt(2 * layers))


def test_a_new_head_starts_at_zero_and_the_first_gradient_reaches_it_alone() -> None:
    config = VisionConfig(7, image=16, patch=8, layers=1, head_width=64, **SIZES)
    model = VisionTransformer(config).replace_head(11)
    out = model(torch.randn(3, 3, 16, 16))
    assert (out == 0).all()
    nn.functional.cross_entropy(out, torch.tensor([1, 2, 3])).backward()
    for name, parameter in model.named_parameters():
        assert bool(parameter.grad.abs().sum() > 0) == name.startswith("head.output"), name


class Zero(nn.Module):
    """A feed-forward network that starts as a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.expand, self.norm, self.reduce = nn.Linear(12, 17), nn.LayerNorm(17), nn.Linear(17, 12)
        nn.init.zeros_(self.reduce.weight)
        nn.init.constant_(self.reduce.bias, 0.5)
        nn.init.constant_(self.norm.weight, 0.25)

    def forward(self, x: Tensor) -> Tensor:
        return self.reduce(self.norm(self.expand(x)))


SMALL: dict[str, Any] = {"width": 12, "heads": 3, "feed_forward": 17}
MODELS: list[Callable[..., nn.Module]] = [
    partial(Transformer, TransformerConfig(11, encoder_layers=1, decoder_layers=1, **SMALL)),
    partial(LanguageModel, LanguageConfig(11, layers=1, **SMALL)),
    partial(TextEncoder, EncoderConfig(11, layers=1, **SMALL)),
    partial(TextClassifier, ClassifierConfig(5, 11, layers=1, **SMALL)),
    partial(VisionTransformer, VisionConfig(5, image=6, patch=3, layers=1, **SMALL)),
]


@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.func.__name__)
def test_custom_parts_keep_their_initial_values(make: Callable[..., nn.Module]) -> None:
    trained = [MultiHeadAttention(12, 3) for _ in range(2)]
    for part in trained:
        nn.init.constant_(part.query.weight, 3.0)
        nn.init.constant_(part.query.bias, 0.5)
    remaining = iter(trained)
    model = make(attention=lambda position: next(remaining), feed_forward=Zero)
    blocks = [part for part in model.modules() if isinstance(part, Block)]
    assert blocks
    for block in blocks:
        assert (block.feed_forward.reduce.weight == 0).all()
        assert (block.feed_forward.reduce.bias == 0.5).all()
        assert (block.feed_forward.norm.weight == 0.25).all()
        assert (block.attention.query.weight == 3).all()
        assert (block.attention.query.bias == 0.5).all()


def test_a_custom_position_keeps_its_initial_values() -> None:
    def position() -> LearnedPositions:
        learned = LearnedPositions(29, 12)
        nn.init.constant_(learned.table, 3.0)
        return learned

    for make in MODELS[:4]:
        tables = [
            part.table
            for part in make(position=position).modules()
            if type(part) is LearnedPositions
        ]
        assert tables
        assert all((table == 3).all() for table in tables)


def test_a_custom_part_takes_the_values_of_a_scheme_when_asked() -> None:
    part = Zero()
    init.transformer(part)
    glorot(part.reduce.weight)
    assert (part.reduce.bias == 0).all()
    assert (part.norm.weight == 1).all()


@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.func.__name__)
def test_a_function_that_makes_no_module_is_refused(make: Callable[..., nn.Module]) -> None:
    with pytest.raises(
        ValueError, match=r"^attention made None; .* must return a torch.nn.Module$"
    ):
        make(attention=lambda position: None)
    with pytest.raises(ValueError, match=r"^feed_forward made class Zero; .* must return"):
        make(feed_forward=lambda: Zero)
