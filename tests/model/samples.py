"""Small models of odd sizes, with every parameter alive, on which the tests of models agree."""

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor, nn

from regard import (
    AudioSource,
    Concatenated,
    ImageSource,
    LanguageConfig,
    LanguageModel,
    LearnedPositions,
    SinusoidalPositions,
    Transformer,
    TransformerConfig,
    VisionConfig,
    VisionTransformer,
)

Model = TypeVar("Model", bound=nn.Module)

N, M, D = 19, 23, 12
"""Target tokens, source tokens, width."""
SIZES = {"width": D, "heads": 6, "feed_forward": 17, "dropout": 0.0}
IMAGE, PATCH, CHANNELS = (6, 10), 2, 3
FEATURES = 5

POSITIONS = ["sinusoidal", "sinusoidal-halves", "learned", "rotary", "linear-bias", "none"]
OWN: dict[str, Callable[[], nn.Module]] = {
    "concatenated": lambda: Concatenated(SinusoidalPositions(5)),
    "concatenated learned": lambda: Concatenated(LearnedPositions(29, 5)),
}
"""Positions that a config has no word for."""

SOURCES = {
    "image": ImageSource(image=IMAGE, patch=PATCH, channels=CHANNELS),
    "audio": AudioSource(features=FEATURES),
}


def lively(model: Model, dtype: torch.dtype = torch.float64) -> Model:
    """Biases and norms that do something, heads that are not zero."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            if parameter.ndim < 2:
                parameter.copy_(0.3 * noise + ("norm" in name and "weight" in name))
            else:
                parameter.copy_(noise / parameter.shape[-1] ** 0.5)
    return model.to(dtype).eval()


def transformer(position: str = "sinusoidal", dtype: torch.dtype = torch.float64, **options):
    config = TransformerConfig(N, encoder_layers=2, decoder_layers=2, length=29, **SIZES)
    own = OWN.get(position)
    config = replace(config, **({"share": "none"} if own else {"position": position}))
    return lively(Transformer(replace(config, **options), position=own), dtype)


def language(position: str = "rotary", dtype: torch.dtype = torch.float64, **options):
    config = LanguageConfig(N, layers=2, length=29, **SIZES)
    own = OWN.get(position)
    config = replace(config, **({"share": False} if own else {"position": position}))
    return lively(LanguageModel(replace(config, **options), position=own), dtype)


def vision(dtype: torch.dtype = torch.float64, **options):
    given = {"image": IMAGE, "patch": PATCH, "channels": CHANNELS, "layers": 2} | SIZES | options
    return lively(VisionTransformer(VisionConfig(7, **given)), dtype)


def tokens(*shape: int, most: int = N) -> Tensor:
    return torch.randint(most, shape)


def images(batch: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(batch, CHANNELS, *IMAGE, dtype=dtype)


def frames(batch: int, length: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(batch, length, FEATURES, dtype=dtype)


def pack(rows: Tensor, lengths: Tensor) -> Tensor:
    """A padded batch's real rows, end to end."""
    return torch.cat([row[:length] for row, length in zip(rows, lengths.tolist())])[None]


def close(have: Tensor, want: Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(have, want, atol=tolerance, rtol=tolerance)


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())
