"""Hugging Face's Vision Transformers, both ways: the same network under other names.

Files have the names that tensors had before version 5 of transformers, models in memory those since
then: both are read, the files' are written. A model without a head gets one class of zeros, and its
pooler, where it has one, is our head's hidden tanh layer.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.checkpoint import unfilled
from regard.config import from_json
from regard.interop.format import Imported, Task
from regard.interop.refusal import Obstacle, other_mixing, own_parts, refuse
from regard.interop.tensors import Pair, Tensors, fill, give, load, new_folder, settings, store
from regard.interop.transformers import verified
from regard.interop.verify import Verified, reference
from regard.model.block import Activation
from regard.model.embedding import image_size
from regard.model.vit import VisionConfig, VisionTransformer

TASKS: tuple[str, ...] = ("classify",)
SHAPE: Mapping[str, object] = {
    "norm": "pre",
    "final_norm": None,
    "activation": "gelu",
    "position": "learned",
    "pool": "class",
    "pool_norm": False,
    "head_width": None,
    "key_heads": None,
    "window": None,
    "mixer": "attention",
}
"""What a model is trained with, and by which tasks, that is to be written here."""

HEADLESS = "it has no head: model.replace_head(n) gives it one, to be trained"


def read(source: Path) -> Imported:
    """A folder of Hugging Face's."""
    said = settings(source)
    tensors = load(source)
    prefix = "vit." if any(name.startswith("vit.") for name in tensors) else ""
    headed = "classifier.weight" in tensors or _classifies(said)
    tanh = not headed and any(name.startswith(f"{prefix}pooler.") for name in tensors)
    config = _config(said, tensors, headed, tanh)

    with unfilled(config, tensors, f"{source}: config.json"):
        model, pairs = empty(config), _pairs(config, prefix, tanh)
    if not said.get("qkv_bias", True):
        add_zeros(tensors, model, pairs, ("query.bias", "key.bias", "value.bias"))
    if not headed:
        add_zeros(tensors, model, pairs, ("classifier.weight", "classifier.bias"))
    fill(model, tensors, pairs, source)

    labels = _labels(said, config, source) if headed else None
    task = classify(config, labels) | _processing(source, config)
    name = (source if source.is_dir() else source.parent).resolve().name
    origin = f"The ViT {name}, of Hugging Face's transformers."
    return Imported(model, task=task, origin=origin, notes=() if headed else (HEADLESS,))


def write(
    model: nn.Module,
    folder: Path,
    *,
    files: Mapping[str, bytes | Path],
    task: Task | None,
) -> Verified:
    """A folder for Hugging Face's ViTForImageClassification and its image processor.

    Dropout inside the feed-forward networks, which that model lacks, acts in training alone and is
    left out.
    """
    if not isinstance(model, VisionTransformer):
        raise ValueError(
            f"a {type(model).__name__} cannot become a ViT; export a VisionTransformer"
        )
    _check_writable(model)
    said = {"config.json": _config_json(model, task)}
    if task is not None and task.get("mean") is not None:
        said["preprocessor_config.json"] = _processor_json(model.config, task)
    pairs = _pairs(model.config, "vit.", tanh=False)
    with new_folder(folder) as draft:
        store(draft, give(model, pairs), said)
        return _verified(model, draft)


def _verified(model: VisionTransformer, folder: Path) -> Verified:
    images = random_images(model.config)
    return verified(
        model,
        folder,
        "ViTForImageClassification",
        lambda ours: [ours(images)],
        lambda theirs: [theirs(images).logits],
        lambda place: [reference(read(place).model)(images)],
    )


def random_images(config: VisionConfig) -> Float[Tensor, "B C Y X"]:
    """Images to compare two models on, the same each time."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(3, config.channels, *image_size(config.image), generator=generator)


_ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
_RESAMPLE = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic", 4: "box", 5: "hamming"}


def _classifies(said: Mapping[str, Any]) -> bool:
    return "ViTForImageClassification" in str(said.get("architectures"))


def _config(said: Mapping[str, Any], tensors: Tensors, headed: bool, tanh: bool) -> VisionConfig:
    """What its config.json says, or leaves to Hugging Face's defaults."""
    activation, pooled = said.get("hidden_act", "gelu"), said.get("pooler_act", "tanh")
    if not isinstance(activation, str) or activation not in _ACTIVATIONS:
        known = ", ".join(_ACTIVATIONS)
        raise ValueError(f"hidden_act ({activation!r}) is none that we have; known are {known}")
    if tanh and pooled != "tanh":
        raise ValueError(f"pooler_act ({pooled!r}) must be 'tanh', as the hidden layer of our head")
    width, heads = said.get("hidden_size", 768), said.get("num_attention_heads", 12)
    head = said.get("head_dim")
    numbers = isinstance(head, int) and isinstance(heads, int)
    if head is not None and not (numbers and head * heads == width):
        raise ValueError(
            f"head_dim ({head}) times num_attention_heads ({heads}) must be hidden_size ({width})"
        )
    image = said.get("image_size", 224)
    return from_json(
        VisionConfig,
        {
            "classes": _classes(said, tensors) if headed else 1,
            "image": image,
            "patch": side(said.get("patch_size", 16)),
            "channels": said.get("num_channels", 3),
            "layers": said.get("num_hidden_layers", 12),
            "width": width,
            "heads": heads,
            "feed_forward": said.get("intermediate_size", 3072),
            "activation": _ACTIVATIONS[activation],
            "head_width": (said.get("pooler_output_size") or width) if tanh else None,
            "dropout": said.get("hidden_dropout_prob", 0.0),
            "attention_dropout": said.get("attention_probs_dropout_prob", 0.0),
            "epsilon": said.get("layer_norm_eps", 1e-12),
        },
    )


def _classes(said: Mapping[str, Any], tensors: Tensors) -> int:
    labels = said.get("id2label")
    if labels:
        if not isinstance(labels, dict):
            raise ValueError(f"id2label must name the labels by number, and is {labels!r:.60}")
        return len(labels)
    head = tensors.get("classifier.weight")
    return int(said.get("num_labels", 2)) if head is None else len(head)


def _pairs(config: VisionConfig, prefix: str, tanh: bool) -> list[Pair]:
    def linear(theirs: str, ours: str, again: str = "") -> Iterable[Pair]:
        for leaf in ("weight", "bias"):
            other = (f"{prefix}{again}.{leaf}",) if again else ()
            yield Pair(f"{prefix}{theirs}.{leaf}", f"{ours}.{leaf}", again=other)

    at = f"{prefix}embeddings"
    pairs = embedding(
        config,
        f"{at}.cls_token",
        f"{at}.position_embeddings",
        f"{at}.patch_embeddings.projection",
    )
    for n in range(config.layers):
        new, old, ours = f"layers.{n}", f"encoder.layer.{n}", f"encoder.blocks.{n}"
        for old_name, new_name, our_name in _BLOCK:
            pairs += linear(f"{old}.{old_name}", f"{ours}.{our_name}", f"{new}.{new_name}")
    pairs += linear("layernorm", "norm" if config.pool_norm else "encoder.norm")
    if tanh:
        pairs += linear("pooler.dense", "head.hidden")
    for leaf in ("weight", "bias"):
        pairs.append(Pair(f"classifier.{leaf}", f"head.output.{leaf}"))
    return pairs


# In files, in memory, and here.
_BLOCK = (
    ("layernorm_before", "layernorm_before", "add_attention.norm"),
    ("attention.attention.query", "attention.q_proj", "attention.query"),
    ("attention.attention.key", "attention.k_proj", "attention.key"),
    ("attention.attention.value", "attention.v_proj", "attention.value"),
    ("attention.output.dense", "attention.o_proj", "attention.output"),
    ("layernorm_after", "layernorm_after", "add_feed_forward.norm"),
    ("intermediate.dense", "mlp.fc1", "feed_forward.expand"),
    ("output.dense", "mlp.fc2", "feed_forward.reduce"),
)


def _labels(said: Mapping[str, Any], config: VisionConfig, source: Path) -> list[str]:
    names = said.get("id2label")
    if not names:
        return numbered(config)
    labels = {int(n): str(name) for n, name in names.items() if str(n).isdecimal()}
    if sorted(labels) != list(range(len(names))):
        raise ValueError(f"{source}: id2label must number its labels from 0 to {len(names) - 1}")
    return [labels[n] for n in range(len(labels))]


@dataclass(frozen=True)
class _Processor:
    """What preprocessor_config.json says of pixels, under its names and with its defaults."""

    image_mean: tuple[float, ...] | None = None
    image_std: tuple[float, ...] | None = None
    do_normalize: bool = True
    do_rescale: bool = True
    rescale_factor: float = 1 / 255
    do_center_crop: bool = False
    resample: int = 2


def _processing(source: Path, config: VisionConfig) -> Task:
    """What preprocessor_config.json does to an image; without one, what its processor would.

    Pixels are taken from 0 to 1 here, whatever they are multiplied by there.
    """
    folder, name = source if source.is_dir() else source.parent, "preprocessor_config.json"
    every = settings(folder, name) if (folder / name).is_file() else {}
    known = {key: every[key] for key in get_type_hints(_Processor) if every.get(key) is not None}
    said = from_json(_Processor, known, str(folder / name))
    C = config.channels
    mean, std = said.image_mean or [0.5] * C, said.image_std or [0.5] * C
    if not said.do_normalize:
        mean, std = [0.0] * C, [1.0] * C
    scale = 255 * (said.rescale_factor if said.do_rescale else 1)
    if not scale > 0:
        raise ValueError(f"{folder / name}: rescale_factor ({said.rescale_factor}) must be above 0")
    size = every.get("size")
    shortest = size.get("shortest_edge") if isinstance(size, dict) else None
    if shortest is not None and (not isinstance(shortest, int) or shortest < 1):
        raise ValueError(f"{folder / name}: shortest_edge ({shortest!r}) must be 1 or more")
    crop = 1.0
    if shortest and every.get("crop_size") and said.do_center_crop:
        crop = min(image_size(config.image)) / shortest
    return {
        "mean": [number / scale for number in mean],
        "std": [number / scale for number in std],
        "interpolation": _RESAMPLE.get(said.resample, "bilinear"),
        "resize": "shortest" if shortest else "squash",
        "crop": crop,
    }


def _check_writable(model: VisionTransformer) -> None:
    config = model.config
    final = config.norm == "pre" if config.final_norm is None else config.final_norm
    obstacles = []
    if config.norm != "pre" or not final:
        text = "its norms come before each sublayer, and at the end (norm='pre')"
        obstacles.append(Obstacle(text, "--model.norm pre --model.final-norm None"))
    if config.activation == "swiglu":
        text = "its feed-forward networks have no swiglu"
        obstacles.append(Obstacle(text, "--model.activation gelu"))
    if config.pool != "class":
        text = f"it reads a class token, not pool={config.pool!r}"
        obstacles.append(Obstacle(text, "--model.pool class"))
    if config.position != "learned":
        text = f"its positions are learned, not {config.position}"
        obstacles.append(Obstacle(text, "--model.position learned"))
    if config.key_heads not in (None, config.heads):
        text = f"it has as many key heads ({config.key_heads}) as heads ({config.heads})"
        obstacles.append(Obstacle(text, "--model.key-heads None"))
    if config.head_width is not None:
        text = f"its head has no tanh layer (head_width {config.head_width})"
        obstacles.append(Obstacle(text, "--model.head-width None"))
    obstacles += [*other_mixing(config), *own_parts(model)]
    refuse("Hugging Face's ViT", obstacles, "--for vit")


def _config_json(model: VisionTransformer, task: Task | None) -> dict[str, Any]:
    config = model.config
    labels = (task or {}).get("labels") or [f"LABEL_{n}" for n in range(config.classes)]
    if len(labels) != config.classes:
        raise ValueError(f"labels ({len(labels)}) must be as many as classes ({config.classes})")
    return {
        "architectures": ["ViTForImageClassification"],
        "model_type": "vit",
        "hidden_size": config.width,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "intermediate_size": config.feed_forward,
        "hidden_act": config.activation,
        "hidden_dropout_prob": config.dropout,
        "attention_probs_dropout_prob": config.attention_dropout,
        "layer_norm_eps": config.epsilon,
        "image_size": config.image if isinstance(config.image, int) else list(config.image),
        "patch_size": config.patch,
        "num_channels": config.channels,
        "qkv_bias": True,
        "id2label": {str(n): label for n, label in enumerate(labels)},
        "label2id": {label: n for n, label in enumerate(labels)},
        "dtype": str(model.head.output.weight.dtype).removeprefix("torch."),
    }


def _processor_json(config: VisionConfig, task: Task) -> dict[str, Any]:
    rows, columns = image_size(config.image)
    named = {name: number for number, name in _RESAMPLE.items()}
    said: dict[str, Any] = {
        "image_processor_type": "ViTImageProcessor",
        "do_resize": True,
        "size": {"height": rows, "width": columns},
        "resample": named[task.get("interpolation", "bilinear")],
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": task["mean"],
        "image_std": task["std"],
    }
    if task.get("resize") == "shortest":  # CLIP's processor is the one that crops
        said |= {
            "image_processor_type": "CLIPImageProcessor",
            "size": {"shortest_edge": math.floor(min(rows, columns) / task.get("crop", 1.0))},
            "do_center_crop": True,
            "crop_size": {"height": rows, "width": columns},
        }
    return said


# What timm's reader needs as well


def empty(config: VisionConfig) -> VisionTransformer:
    """A model without values, to be filled."""
    with torch.device("meta"):
        return VisionTransformer(config).eval()


def embedding(config: VisionConfig, token: str, positions: str, projection: str) -> list[Pair]:
    """The class token, the positions with its own in front, and the patches' map as a kernel."""
    square = (config.channels, config.patch, config.patch)

    def kernel(tensors: Sequence[Tensor]) -> Tensor:
        return tensors[0].unflatten(1, square)

    def table(tensors: Sequence[Tensor]) -> Tensor:
        return torch.cat([tensor.view(-1, config.width) for tensor in tensors])[None]

    def rows(tensor: Tensor) -> Sequence[Tensor]:
        return (tensor[0, 0], tensor[0, 1:]) if beside else (tensor[0],)

    beside = config.pool == "class" if config.class_token is None else config.class_token
    pairs = [
        Pair(f"{projection}.weight", "patches.projection.weight", _flat, kernel),
        Pair(f"{projection}.bias", "patches.projection.bias"),
    ]
    if beside:
        pairs.append(Pair(token, "class_token", _bare, _two_axes_more))
    if config.position == "learned":
        ours = ("class_position",) * beside + ("patches.position.table",)
        pairs.append(Pair(positions, ours, rows, table))
    return pairs


def _flat(kernel: Tensor) -> Sequence[Tensor]:
    return (kernel.flatten(1),)


def _bare(token: Tensor) -> Sequence[Tensor]:
    return (token[0, 0],)


def _two_axes_more(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0][None, None]


def add_zeros(
    tensors: Tensors, model: nn.Module, pairs: Iterable[Pair], names: tuple[str, ...]
) -> None:
    """Zeros for what the other model does without and ours has; `names` are ends of theirs."""
    ours, like = model.state_dict(), next(iter(tensors.values()), torch.empty(0))
    for pair in pairs:
        if pair.theirs.endswith(names):
            shape = pair.join([ours[name] for name in pair.names]).shape
            tensors.setdefault(pair.theirs, like.new_zeros(shape))


def classify(config: VisionConfig, labels: list[str] | None) -> Task:
    """The task's section, but for what is done to pixels; without a head there are no labels."""
    return {"name": "classify", "labels": labels, "size": list(image_size(config.image))}


def numbered(config: VisionConfig) -> list[str]:
    """Labels where nobody named the classes."""
    return [str(n) for n in range(config.classes)]


def side(patch: object) -> object:
    """A patch's side from a number or from a pair of equal ones."""
    if not isinstance(patch, list | tuple):
        return patch
    if len(set(patch)) != 1:
        raise ValueError(f"patch_size ({tuple(patch)}) must be square; ours have one side")
    return patch[0]
