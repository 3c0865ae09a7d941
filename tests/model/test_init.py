"""Initial values are those that init.py's words promise, measured."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from regard import (
    AudioSource,
    LanguageConfig,
    LanguageModel,
    Transformer,
    TransformerConfig,
    VisionConfig,
    VisionTransformer,
)
from regard.model.embedding import Frames, Patches

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
    model = VisionTransformer(config).with_classes(11)
    out = model(torch.randn(3, 3, 16, 16))
    assert (out == 0).all()
    nn.functional.cross_entropy(out, torch.tensor([1, 2, 3])).backward()
    for name, parameter in model.named_parameters():
        assert bool(parameter.grad.abs().sum() > 0) == name.startswith("head.output"), name
