"""Small models of every kind, in folders, that have learned nothing and have opinions."""

import io
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn

from regard import checkpoint
from regard.data.tokenizer import Tokenizer, files
from regard.model.classifier import ClassifierConfig, TextClassifier
from regard.model.encoder import EncoderConfig, TextEncoder
from regard.model.language import LanguageConfig, LanguageModel
from regard.model.transformer import ImageSource, Transformer, TransformerConfig
from regard.model.vit import VisionConfig, VisionTransformer
from regard.task.search import SearchSettings
from tests.task.samples import sentences

BPE = Tokenizer.bpe(sentences(60), 300)
TEXTS = sentences(40, seed=3)
SIZES: dict[str, Any] = {"width": 16, "heads": 2, "feed_forward": 24, "dropout": 0.0}
PICTURE = {"mean": [0.5], "std": [0.25], "size": [12, 20]}


def opinionated(model: nn.Module, seed: int, end: int | None = None) -> nn.Module:
    """With weights that make it say different things, and end now and then."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))
        if end is not None and getattr(model.output, "bias", None) is not None:
            model.output.bias[end] = 4.0
    return model.eval()


def searching(**changed: Any) -> dict[str, Any]:
    about = vars(SearchSettings.of(BPE, **{"beams": 3, "length": 15, **changed}))
    return {**about, "banned": list(about["banned"])}


def translator(folder: Path, seed: int = 0, positions: int | None = None, **changed: Any) -> Path:
    """With as many learned positions, or with sinusoidal ones."""
    config = TransformerConfig(BPE.size, encoder_layers=1, decoder_layers=2, **SIZES)
    if positions is not None:
        config = replace(config, position="learned", length=positions)
    model = opinionated(Transformer(config), seed, BPE.end)
    task = {"name": "translate", **searching(**changed)}
    checkpoint.save(folder, model, files=files(BPE, BPE), task=task)
    return folder


def generator(folder: Path, seed: int = 0) -> Path:
    model = opinionated(LanguageModel(LanguageConfig(BPE.size, layers=2, **SIZES)), seed)
    task = {"name": "language", **searching(length=40)}
    checkpoint.save(folder, model, files=files(BPE, BPE), task=task)
    return folder


def reader(folder: Path, seed: int = 0) -> Path:
    source = ImageSource(image=(12, 20), patch=4, channels=1)
    config = TransformerConfig(
        BPE.size, encoder_layers=1, decoder_layers=1, source=source, share="target", **SIZES
    )
    task = {"name": "read", **searching(), **PICTURE}
    checkpoint.save(
        folder, opinionated(Transformer(config), seed), files=files(BPE, BPE), task=task
    )
    return folder


def classifier(folder: Path, seed: int = 0, labels: Sequence[str] = "vwxyz") -> Path:
    config = VisionConfig(len(labels), (12, 20), 4, channels=1, layers=1, **SIZES)
    task = {"name": "classify", "labels": list(labels), **PICTURE}
    checkpoint.save(folder, opinionated(VisionTransformer(config), seed), task=task)
    return folder


def labeler(folder: Path, seed: int = 0) -> Path:
    model = opinionated(TextClassifier(ClassifierConfig(3, BPE.size, layers=1, **SIZES)), seed)
    task = {"name": "label", "labels": ["bad", "fair", "good"], "length": 40}
    checkpoint.save(folder, model, files=files(BPE, BPE), task=task)
    return folder


def picture(seed: int, size: tuple[int, int] = (14, 23), kind: str = "png") -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, size, np.uint8)
    content = io.BytesIO()
    Image.fromarray(pixels).save(content, kind)
    return content.getvalue()


def embedder(folder: Path, seed: int = 0) -> Path:
    model = opinionated(TextEncoder(EncoderConfig(BPE.size, layers=1, **SIZES)), seed)
    task = {"name": "encoder", "length": 40}
    checkpoint.save(folder, model, files=files(BPE, BPE), task=task)
    return folder
