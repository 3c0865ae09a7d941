"""A model's architecture as boxes: what stands where, with its shapes and its parameters, counted.

The model is built on torch's meta device, so that one of any size is counted at once.
"""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from regard.attention.multihead import MultiHeadAttention
from regard.lab.cost.models import build
from regard.model.classifier import TextClassifier
from regard.model.embedding import grid
from regard.model.encoder import TextEncoder
from regard.model.language import LanguageModel
from regard.model.transformer import Transformer, TransformerConfig
from regard.model.vit import VisionConfig, VisionTransformer

VOCABULARY = 37_000
"""Of the paper's English-German models."""


def boxes(name: str, folder: Path | None) -> dict[str, Any]:
    """The boxes of a preset, or of the model in a folder."""
    model = _model(name, folder)
    made: list[dict[str, Any]] = []
    if isinstance(model, Transformer):
        made += _source(model)
        made += _stack("encoder", model.encoder, "S", model.config.width)
        made.append(_box("decoder", "Embedding", "embedding", model.target, "B × L × {d}", model))
        made += _stack("decoder", model.decoder, "L", model.config.width)
        made.append(_box("decoder", "Output", "output", model.output, "B × L × {N}", model))
    elif isinstance(model, VisionTransformer):
        made.append(_box("encoder", "Patches", "embedding", model.patches, "B × S × {d}", model))
        made += _stack("encoder", model.encoder, "S", model.config.width)
        made.append(_box("encoder", "Head", "output", model.head, "B × {N}", model))
    elif isinstance(model, LanguageModel):
        made.append(_box("decoder", "Embedding", "embedding", model.tokens, "B × L × {d}", model))
        made += _stack("decoder", model.decoder, "L", model.config.width)
        made.append(_box("decoder", "Output", "output", model.output, "B × L × {N}", model))
    elif isinstance(model, TextClassifier | TextEncoder):
        made.append(_box("encoder", "Embedding", "embedding", model.tokens, "B × S × {d}", model))
        made += _stack("encoder", model.encoder, "S", model.config.width)
        if isinstance(model, TextClassifier):
            made.append(_box("encoder", "Head", "output", model.head, "B × {N}", model))
        else:
            made.append(_box("encoder", "Output", "output", model.output, "B × S × {N}", model))
    else:
        raise ValueError(f"a {type(model).__name__} has no map")
    return {
        "name": name,
        "boxes": made,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "width": model.config.width,
        "heads": model.config.heads,
    }


def config_of(name: str, folder: Path | None) -> Any:
    """The config of a preset, or of the model in a folder."""
    if folder is not None:
        from regard.task.load import load

        return load(folder).model.config
    if name == "vit-b/16":
        return VisionConfig.base(1000)
    return getattr(TransformerConfig, name)(VOCABULARY)


def positions(config: Any, length: int) -> int:
    """The positions that a model's encoder has: those of an image do not depend on a length."""
    if isinstance(config, VisionConfig):
        rows, columns = grid(config.image, config.patch)
        return rows * columns + (config.pool == "class")
    return length


def _model(name: str, folder: Path | None) -> nn.Module:
    with torch.device("meta"):
        return build(config_of(name, folder))


def _source(model: Transformer) -> list[dict[str, Any]]:
    title = type(model.source).__name__
    title = {"Tokens": "Embedding", "Frames": "Audio frames"}.get(title, title)
    return [_box("encoder", title, "embedding", model.source, "B × S × {d}", model)]


def _stack(side: str, stack: Any, length: str, width: int) -> list[dict[str, Any]]:
    """One block of a stack, and how often it is repeated."""
    block, times = stack.blocks[0], len(stack.blocks)
    masked = side == "decoder"
    shape = f"B × {length} × {width}"
    own = ("masked", "Masked self-attention") if masked else ("self", "Self-attention")
    scores = f"scores B × H × {length} × {length}"
    if not isinstance(block.attention, MultiHeadAttention):
        own, scores = ("mixer", type(block.attention).__name__), "in attention's place"
    parts = [(*own, block.attention, block.add_attention, scores)]
    if block.cross is not None:
        scores = "scores B × H × L × S"
        parts.append(("cross", "Cross-attention", block.cross, block.add_cross, scores))
    hidden = "per position"
    parts.append(
        ("feed-forward", "Feed-forward", block.feed_forward, block.add_feed_forward, hidden)
    )
    made = []
    for kind, title, module, norm, inside in parts:
        made.append(
            {
                "side": side,
                "title": title,
                "kind": kind,
                "times": times,
                "parameters": _count(module),
                "shape": shape,
                "inside": inside,
                "parts": _named(module),
            }
        )
        made.append(
            {
                "side": side,
                "title": "Add & norm",
                "kind": "norm",
                "times": times,
                "parameters": _count(norm),
                "shape": shape,
                "inside": "x + sublayer(x)",
                "parts": _named(norm),
            }
        )
    return made


def _box(
    side: str, title: str, kind: str, module: nn.Module, shape: str, model: Any
) -> dict[str, Any]:
    classes = getattr(model.config, "classes", None) or getattr(model.config, "vocabulary", 0)
    return {
        "side": side,
        "title": title,
        "kind": kind,
        "times": 1,
        "parameters": _count(module),
        "shape": shape.format(d=model.config.width, N=f"{classes:,}"),
        "inside": "",
        "parts": _named(module),
    }


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _named(module: nn.Module) -> list[list[Any]]:
    """Each parameter of a box, its shape and its size."""
    return [
        [name, " × ".join(map(str, parameter.shape)), parameter.numel()]
        for name, parameter in module.named_parameters()
    ]
