"""Models of many kinds, and what they compute token by token without an engine."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from regard.attention.core import Core
from regard.decode.engine.int8 import library as native
from regard.model.language import LanguageConfig, LanguageModel
from regard.model.transformer import (
    AudioSource,
    ImageSource,
    TextSource,
    Transformer,
    TransformerConfig,
)

N = 97
SIZES: dict[str, Any] = {"width": 44, "heads": 4, "feed_forward": 83, "dropout": 0.0}
TEXT = TransformerConfig(N, encoder_layers=2, decoder_layers=3, **SIZES)
LANGUAGE = LanguageConfig(N, layers=3, **{**SIZES, "width": 48})
KINDS: dict[str, TransformerConfig | LanguageConfig] = {
    "the paper's": TEXT,
    "pre-norm, gelu": replace(TEXT, norm="pre", activation="gelu"),
    "learned, silu": replace(TEXT, activation="silu", position="learned", output_bias=True),
    "rotary": replace(TEXT, position="rotary", width=48),
    "gated, grouped heads": replace(TEXT, activation="swiglu", key_heads=2, norm="pre"),
    "two vocabularies": replace(TEXT, share="target", source=TextSource(vocabulary=31)),
    "images": replace(TEXT, source=ImageSource(image=(6, 10), patch=2, channels=1)),
    "audio": replace(TEXT, source=AudioSource(features=5)),
    "language": LANGUAGE,
    "language, the paper's blocks": replace(
        LANGUAGE, norm="post", activation="relu", position="sinusoidal", key_heads=1
    ),
}
TRANSFORMERS = [kind for kind, config in KINDS.items() if isinstance(config, TransformerConfig)]

kernels = pytest.mark.skipif(native.library() is None, reason=native.missing())


def made(kind: str = "the paper's", **settings: Any) -> Any:
    torch.manual_seed(0)
    config = replace(KINDS[kind], **settings)
    model = Transformer(config) if isinstance(config, TransformerConfig) else LanguageModel(config)
    for part in model.modules():
        if isinstance(part, nn.Embedding):
            nn.init.normal_(part.weight, std=0.3)
        if isinstance(part, nn.LayerNorm):
            nn.init.normal_(part.weight, mean=1, std=0.3)
            nn.init.normal_(part.bias, std=0.3)
    return model.eval()


def source(model: Any, rows: int = 5, skip: int = 0) -> tuple[Tensor | None, Tensor | None]:
    """Some of many sources of different lengths, and these; None for a language model."""
    if isinstance(model, LanguageModel):
        return None, None
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, 12, (41,), generator=generator)
    some = slice(skip, skip + rows)
    match model.config.source:
        case ImageSource(image=(y, x), channels=channels):
            return torch.randn(41, channels, y, x, generator=generator)[some], None
        case AudioSource(features=features):
            given = torch.randn(41, 11, features, generator=generator)
        case text:
            given = torch.randint(3, text.vocabulary or N, (41, 11), generator=generator)
    return given[some], lengths[some]


def halved(model: Any) -> Any:
    """The same model with keys and values rounded to IEEE halves, as the KV cache holds them."""

    def narrow(core: Core, given: tuple[Tensor, ...], named: Any) -> tuple[Any, Any]:
        query, key, value = given
        return (query, key.half().float(), value.half().float()), named

    model = copy.deepcopy(model)
    for part in model.modules():
        if isinstance(part, Core):
            part.register_forward_pre_hook(narrow, with_kwargs=True)
    return model


@torch.no_grad()
def formula(model: Any, tokens: Sequence[int], source: Any = None, length: Any = None) -> Tensor:
    """The logits after these tokens, of one row, by the model itself."""
    ids = torch.tensor([list(tokens)])
    if source is None:
        return model(ids)[0, -1]
    one = source[None] if length is None else source[None, : int(length)]
    return model(one, ids)[0, -1]
