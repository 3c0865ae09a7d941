"""Parameter counts: the published ones, to the last parameter."""

import pytest
import torch
from torch import nn

from regard import Transformer, TransformerConfig, VisionTransformer
from tests.model.samples import parameters

VISION = {
    "tiny": 5_717_416,
    "small": 22_050_664,
    "base": 86_567_656,
    "large": 304_326_632,
    "huge": 632_045_800,
}


@pytest.mark.parametrize("size", VISION)
def test_vision_transformers(size: str) -> None:
    with torch.device("meta"):
        model = getattr(VisionTransformer, size)(1000)
    assert parameters(model) == VISION[size]


@pytest.mark.parametrize("size", VISION)
def test_vision_transformers_as_hugging_face_has_them(size: str) -> None:
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        config = getattr(VisionTransformer, size)(1000).config
        peer = transformers.ViTForImageClassification(
            transformers.ViTConfig(
                hidden_size=config.width,
                num_hidden_layers=config.layers,
                num_attention_heads=config.heads,
                intermediate_size=config.feed_forward,
                image_size=config.image,
                patch_size=config.patch,
                num_labels=config.classes,
            )
        )
    assert parameters(peer) == VISION[size]


def test_torchs_transformer() -> None:
    """nn.Transformer has a norm at the end of both stacks though its blocks are post-norm."""
    with torch.device("meta"):
        model = Transformer(TransformerConfig(37_000, final_norm=True))
        peer = nn.Transformer(batch_first=True)
    ours = parameters(model.encoder) + parameters(model.decoder)
    assert ours == parameters(peer) == 44_140_544


def test_hugging_faces_marian() -> None:
    """Embeddings, positions and the logits' bias included."""
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        model = Transformer(TransformerConfig(31_000, output_bias=True))
        peer = transformers.MarianMTModel(
            transformers.MarianConfig(
                vocab_size=31_000,
                d_model=512,
                encoder_layers=6,
                decoder_layers=6,
                encoder_attention_heads=8,
                decoder_attention_heads=8,
                encoder_ffn_dim=2048,
                decoder_ffn_dim=2048,
                max_position_embeddings=64,
                pad_token_id=30_999,
                eos_token_id=0,
                decoder_start_token_id=30_999,
                forced_eos_token_id=None,
            )
        )
    tables = 2 * 64 * 512  # sinusoids, which Marian keeps as parameters that are not trained
    bias = 31_000  # which Marian keeps as a buffer
    assert parameters(model) == parameters(peer) - tables + bias


@pytest.mark.parametrize(
    ("size", "total", "stacks"),
    [
        ("base", 63_082_496, 44_138_496),
        ("big", 214_245_376, 176_357_376),
        ("tiny", 6_061_056, 1_325_056),
    ],
)
def test_transformers(size: str, total: int, stacks: int) -> None:
    with torch.device("meta"):
        model = getattr(Transformer, size)(37_000)
    assert parameters(model) == total
    assert parameters(model.encoder) + parameters(model.decoder) == stacks
