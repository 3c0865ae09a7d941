"""timm's Vision Transformers, to be read: the same network under other names.

Query, key and value are one matrix there. A trained scale on each branch (LayerScale) is multiplied
into the matrix before it, and a missing bias is a bias of zero: neither changes any result. The
class token and its position are only ever added to each other, so a model without the position
(`no_embed_class`) is one whose position is zero.
"""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regard.interop.format import Imported
from regard.interop.tensors import Pair, Tensors, fill, load, settings, size
from regard.interop.vit import HEADLESS, add_zeros, classify, embedding, empty, numbered
from regard.model.block import Activation
from regard.model.embedding import Size, image_size
from regard.model.vit import VisionConfig, VisionTransformer

# Heads are not seen in tensors. Names that are not among these stand for other networks, some of
# which differ in nothing that tensors show (another activation, say).
_HEADS = {
    "tiny": 3,
    "small": 6,
    "little": 5,
    "medium": 8,
    "betwixt": 10,
    "base": 12,
    "large": 16,
    "huge": 16,
    "giant": 16,
    "gigantic": 16,
}
# A name that promises other heads than it has, and one with a gated feed-forward network.
_OTHERS = {"vit_base_patch16_gap_224": 16, "vit_giant_patch14_dinov2": None}
_NAME = re.compile(
    r"(?:vit|deit|deit3|flexivit)_([a-z]+)(_patch\d+)?(_gap)?(_dinov2|_dino)?(_\d+)?(\..*)?"
)
_ARGUMENTS = {"img_size", "num_heads", "global_pool", "num_classes"}
_SHOWN = {  # by the tensors
    *("patch_size", "in_chans", "embed_dim", "depth", "mlp_ratio", "qkv_bias", "proj_bias"),
    *("init_values", "class_token", "no_embed_class", "fc_norm", "reg_tokens", "pos_embed"),
}


def read(source: Path) -> Imported:
    """A folder as timm puts it on the hub; its config.json names an architecture."""
    said = settings(source)
    arguments = dict(said.get("model_args") or {})
    about = dict(said.get("pretrained_cfg") or {})
    model = from_timm(
        load(source),
        heads=_heads(str(said["architecture"]), arguments),
        image=_image(arguments, about),
        pool=arguments.get("global_pool") or said.get("global_pool") or None,
        source=source,
    )
    headed = arguments.get("num_classes", said.get("num_classes")) != 0
    task = classify(model.config, _labels(said, model.config) if headed else None) | {
        "mean": about.get("mean"),
        "std": about.get("std"),
        "interpolation": about.get("interpolation") or "bicubic",
        "resize": "squash" if about.get("crop_mode") == "squash" else "shortest",
        "crop": about.get("crop_pct") or 1.0,
    }
    notes: tuple[str, ...] = () if headed else (HEADLESS,)
    if task["mean"] is None or task["std"] is None:
        notes += ("its config.json does not say how pixels are scaled (mean and std)",)
    return Imported(model, task=task, origin=f"timm's {said['architecture']}.", notes=notes)


def from_timm(
    tensors: Mapping[str, Tensor],
    *,
    heads: int,
    image: Size | None = None,
    pool: str | None = None,
    activation: Activation = "gelu",
    epsilon: float = 1e-6,
    source: Path | str = "timm's state dict",
) -> VisionTransformer:
    """The model in a state dict of timm's VisionTransformer; without a head, one class of zeros.

    Sizes are the tensors'. What they don't tell is given: the heads, the size of an image that is
    not square, and whether the class token ("token") or the average over the patches ("avg") is
    read, where it isn't what the tensors suggest.
    """
    tensors = dict(tensors)
    config = _config(tensors, heads, image, pool, activation, epsilon, source)
    model, pairs = empty(config), _pairs(config)
    if "pos_embed" in tensors and "cls_token" in tensors:
        tensors["pos_embed"] = _with_class_position(tensors["pos_embed"], model)
    _multiply_scales(tensors, config.layers)
    inside = [name for name in tensors if name.startswith("blocks.")]
    for biases in (("attn.qkv.bias",), ("attn.proj.bias", "mlp.fc1.bias", "mlp.fc2.bias")):
        if not any(name.endswith(biases) for name in inside):
            add_zeros(tensors, model, pairs, biases)
    if not any(name.startswith("head.") for name in tensors):
        add_zeros(tensors, model, pairs, ("head.weight", "head.bias"))
    fill(model, tensors, pairs, source)
    return model


def _config(
    tensors: Tensors,
    heads: int,
    image: Size | None,
    pool: str | None,
    activation: Activation,
    epsilon: float,
    source: Path | str,
) -> VisionConfig:
    kernel = tensors.get("patch_embed.proj.weight", torch.empty(0))
    if kernel.ndim != 4 or kernel.shape[2] != kernel.shape[3]:
        raise ValueError(
            f"{source}: patch_embed.proj.weight must be the kernel of square patches, (width, "
            f"channels, side, side), not {tuple(kernel.shape)}"
        )
    patch, tokens = kernel.shape[-1], "cls_token" in tensors
    if pool is None:
        pool = "avg" if "fc_norm.weight" in tensors or not tokens else "token"
    if pool not in ("token", "avg"):
        raise ValueError(f"{source}: global_pool ({pool!r}) is none of ours; use token or avg")
    blocks = [int(m[1]) for name in tensors if (m := re.match(r"blocks\.(\d+)\.", name))]
    return VisionConfig(
        len(tensors["head.weight"]) if "head.weight" in tensors else 1,
        _side(tensors, patch, tokens, source) if image is None else image,
        patch,
        channels=kernel.shape[1],
        layers=max(blocks, default=-1) + 1,
        width=size(tensors, ("*norm.weight", 0), ("cls_token", 2), ("pos_embed", 2)),
        heads=heads,
        feed_forward=size(tensors, ("blocks.*.fc1.weight", 0), ("blocks.*.fc2.weight", 1)),
        activation=activation,
        position="learned" if "pos_embed" in tensors else "none",
        pool="class" if pool == "token" else "mean",
        class_token=tokens,
        pool_norm="fc_norm.weight" in tensors,
        head_width=len(fc) if (fc := tensors.get("pre_logits.fc.weight")) is not None else None,
        epsilon=epsilon,
    )


def _side(tensors: Tensors, patch: int, tokens: bool, source: Path | str) -> int:
    """Pixels along a square image: as many positions as it has patches, or one more."""
    if "pos_embed" not in tensors:
        raise ValueError(f"{source} has no positions to tell the image's size; give image=224, say")
    count = tensors["pos_embed"].shape[-2]
    for patches in (count - 1, count) if tokens else (count,):
        if patches > 0 and math.isqrt(patches) ** 2 == patches:
            return math.isqrt(patches) * patch
    raise ValueError(
        f"{source}: {count} positions are not those of a square image; give image=(rows, columns)"
    )


def _with_class_position(positions: Tensor, model: VisionTransformer) -> Tensor:
    rows, columns = model.patches.grid
    if positions.ndim != 3 or positions.shape[1] != rows * columns:
        return positions
    return torch.cat((positions.new_zeros(1, 1, positions.shape[2]), positions), 1)


def _multiply_scales(tensors: Tensors, layers: int) -> None:
    """γ ⊙ (W x + b) = (γ W) x + γ ⊙ b."""
    for n in range(layers):
        for scale, linear in (("ls1", "attn.proj"), ("ls2", "mlp.fc2")):
            gamma = tensors.get(f"blocks.{n}.{scale}.gamma")
            names = [f"blocks.{n}.{linear}.{leaf}" for leaf in ("weight", "bias")]
            if gamma is None or any(len(tensors.get(name, gamma)) != len(gamma) for name in names):
                continue
            del tensors[f"blocks.{n}.{scale}.gamma"]
            for name in names:
                if (tensor := tensors.get(name)) is not None:
                    wide = tensor.double() * gamma.double().view(-1, *[1] * (tensor.ndim - 1))
                    tensors[name] = wide.to(tensor.dtype)


def _pairs(config: VisionConfig) -> list[Pair]:
    pairs = embedding(config, "cls_token", "pos_embed", "patch_embed.proj")
    names = [("fc_norm", "norm") if config.pool_norm else ("norm", "encoder.norm")]
    names += [("pre_logits.fc", "head.hidden")] if config.head_width is not None else []
    names += [("head", "head.output")]
    for n in range(config.layers):
        theirs, ours = f"blocks.{n}", f"encoder.blocks.{n}"
        names += [(f"{theirs}.{a}", f"{ours}.{b}") for a, b in _BLOCK]
    for theirs, ours in names:
        pairs += [Pair(f"{theirs}.{leaf}", f"{ours}.{leaf}") for leaf in ("weight", "bias")]
    for n in range(config.layers):
        for leaf in ("weight", "bias"):
            three = [f"encoder.blocks.{n}.attention.{x}.{leaf}" for x in ("query", "key", "value")]
            pairs.append(Pair(f"blocks.{n}.attn.qkv.{leaf}", tuple(three), _thirds, _stacked))
    return pairs


_BLOCK = (
    ("norm1", "add_attention.norm"),
    ("attn.proj", "attention.output"),
    ("norm2", "add_feed_forward.norm"),
    ("mlp.fc1", "feed_forward.expand"),
    ("mlp.fc2", "feed_forward.reduce"),
)


def _thirds(tensor: Tensor) -> Sequence[Tensor]:
    return tensor.chunk(3)


def _stacked(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(tensors))


# What a folder's config.json says


def _heads(architecture: str, arguments: Mapping[str, Any]) -> int:
    match = _NAME.fullmatch(architecture)
    heads = _OTHERS.get(architecture.partition(".")[0], _HEADS.get(match[1]) if match else None)
    if heads is None:
        raise ValueError(
            f"architecture ({architecture!r}) is not one of timm's plain ViTs, and tensors do not "
            "tell all; where it is plain: regard.interop.timm.from_timm(tensors, heads=…)"
        )
    other = sorted(set(arguments) - _ARGUMENTS - _SHOWN)
    if other:
        raise ValueError(f"model_args of {architecture} change what tensors hide: {other}")
    return int(arguments.get("num_heads", heads))


def _image(arguments: Mapping[str, Any], about: Mapping[str, Any]) -> Size | None:
    size = arguments.get("img_size") or (about.get("input_size") or ())[1:]
    if isinstance(size, int):
        return size
    return image_size((int(size[0]), int(size[1]))) if size else None


def _labels(said: Mapping[str, Any], config: VisionConfig) -> list[str]:
    names = said.get("label_names") or numbered(config)
    if len(names) != config.classes:
        raise ValueError(f"label_names ({len(names)}) must be as many as classes, {config.classes}")
    described = said.get("label_descriptions") or {}
    return [str(described.get(name, name)) for name in names]
