"""Refuses models, batches and caches that memory cannot hold, before it is asked for.

The figures are formula.py's, and the least that is needed: what is refused cannot work.
"""

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import torch

from regard.machine.memory import Size, check, limit
from regard.model.embedding import grid, image_size
from regard.model.formula import Config, cached, parameters, saved
from regard.model.transformer import ImageSource, TransformerConfig
from regard.model.vit import VisionConfig

TRAINING = 16
"""Bytes of a parameter in training: in float32 its value, its gradient and Adam's two means."""

USUAL = {
    "width": 512,
    "feed_forward": 2048,
    "decoder_feed_forward": 2048,
    "vocabulary": 32_000,
    "length": 1024,
    "layers": 12,
    "encoder_layers": 6,
    "decoder_layers": 6,
    "head_width": 768,
}
"""Sizes of a model that memory depends on, and what is usual for them."""


def check_training(
    config: Config, batch: int, device: torch.device | str, *, each: int = TRAINING, number: int = 4
) -> None:
    """Refuses a model that cannot be trained with batches of so many tokens, or images.

    `each` and `number` are bytes: of a parameter with all that training keeps of it, and of a
    number that is saved for the backward pass.
    """

    def needed(config: Config, batch: int) -> int:
        return each * parameters(config) + number * batch * _saved(config)

    def size(name: str, value: int) -> Size:
        def with_another(other: int) -> int:
            changed: dict[str, Any] = {name: other}
            return needed(replace(config, **changed), batch)

        label = name if name == "vocabulary" else f"model.{name}"
        step = 2 * config.heads if name == "width" else 1
        return Size(label, value, USUAL[name], with_another, step)

    values = {field.name: getattr(config, field.name) for field in fields(config)}
    known = {name: value for name, value in values.items() if name in USUAL and value is not None}
    if config.heads < 1 or any(value < 0 for value in known.values()):
        return  # the model's parts say what is wrong with these
    sizes = [size(name, value) for name, value in known.items() if value]
    sizes += _image_sizes(config, lambda other: needed(other, batch))
    sizes.append(Size("training.batch", batch, 4096, lambda other: needed(config, other)))
    check("training", sizes, limit(device))


def check_cache(
    config: Config,
    rows: int,
    beams: int,
    length: int,
    device: torch.device | str,
    number: int = 4,
) -> None:
    """Refuses a search whose KV cache cannot fit: so many rows, each of `beams`, as they grow."""
    cache = cached(config)
    if cache is None:
        return
    vocabulary = getattr(config, "vocabulary", 0)

    def needed(rows: int, beams: int, length: int) -> int:
        return rows * beams * (number * length * cache.each + 4 * vocabulary)

    sizes = (
        Size("beams", beams, 4, lambda other: needed(rows, other, length)),
        Size("length", length, 200, lambda other: needed(rows, beams, other)),
        Size("batch", rows, 64, lambda other: needed(other, beams, length)),
    )
    check("the search", sizes, limit(device))


# Images


def _image(config: Config) -> VisionConfig | ImageSource | None:
    """What says how large images are, where there are any."""
    if isinstance(config, VisionConfig):
        return config
    source = getattr(config, "source", None)
    return source if isinstance(source, ImageSource) else None


def _saved(config: Config) -> int:
    """Numbers that are kept for a token, or for an image."""
    source, target = saved(config)
    image = _image(config)
    if image is not None:
        (rows, columns), (Y, X) = grid(image.image, image.patch), image_size(image.image)
        return rows * columns * source + image.channels * Y * X
    return (source + target) // 2 if isinstance(config, TransformerConfig) else source


def _image_sizes(config: Config, needed: Callable[[Config], int]) -> list[Size]:
    image = _image(config)
    if image is None:
        return []

    def changed(**values: Any) -> int:
        part = replace(image, **values)
        if isinstance(part, VisionConfig):
            return needed(part)
        assert isinstance(config, TransformerConfig)
        return needed(replace(config, source=part))

    rows, columns = image_size(image.image)

    def at(side: int) -> int:
        """With the longer side changed, or both of a square."""
        return changed(
            image=(side if rows >= columns else rows, side if columns >= rows else columns)
        )

    # No single patch size is proposed: it must divide the image.
    unchanged = needed(config)
    return [
        Size("pixels", max(rows, columns), 224, at, image.patch),
        Size("patch", image.patch, 16, lambda patch: unchanged),
    ]
