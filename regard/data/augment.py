"""Data augmentation of a batch on its device, each image by a chance of its own.

    augment(images, how, seed, step)            crop, flip, a policy's operations, erasing
    mix(images, labels, how, seed, step)        MixUp and CutMix

Everything random is drawn on the host from (seed, step, rank), a few numbers for each image, so
that nothing waits for the device. Whatever moves pixels (crop, flip, shear, translation, rotation)
is one affine map for each image, and pixels are interpolated once.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, TypeAlias, get_args

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Float64, Int, Int64, UInt8
from torch import Tensor

from regard.data.seeding import combined, rng

Policy: TypeAlias = Literal["none", "rand"]

_RATIO = math.log(4 / 3)  # of width to height of a crop, either way
_ERASED, _ERASED_RATIO = (0.02, 0.33), math.log(1 / 0.3)
_MIXUP, _CUTMIX = 0.8, 1.0  # of the Beta distributions, as Touvron et al. (2021) have them


@dataclass(frozen=True)
class Augmentation:
    """Data augmentation of training images."""

    flip: bool = False
    """Random horizontal flips."""
    crop: tuple[float, float] | None = None
    """Random resized crops: the least and the most of the area to keep."""
    policy: Policy = "none"
    """Augmentation policy: rand is RandAugment (Cubuk et al. 2020)."""
    operations: int = 2
    """RandAugment's number of operations."""
    magnitude: int = 9
    """RandAugment's magnitude, below 30."""
    erase: float = 0.0
    """Random erasing: its probability (Zhong et al. 2020)."""
    mixup: bool = False
    """MixUp: blend each image, and its label, with another (Zhang et al. 2018)."""
    cutmix: bool = False
    """CutMix: paste a rectangle of another image, and its share of the label (Yun et al. 2019)."""

    def __post_init__(self) -> None:
        if self.policy not in get_args(Policy):
            raise ValueError(
                f"policy ({self.policy!r}) is unknown; choose from {', '.join(get_args(Policy))}"
            )
        if not 0 < self.magnitude < 30:
            raise ValueError(f"magnitude ({self.magnitude}) must be between 0 and 30; try 9")
        if self.operations < 1:
            raise ValueError(f"operations ({self.operations}) must be 1 or more; try 2")
        if self.crop is not None and not 0 < self.crop[0] <= self.crop[1] <= 1:
            raise ValueError(f"crop {self.crop} must be shares from 0 to 1, the least first")
        if not 0 <= self.erase <= 1:
            raise ValueError(f"erase ({self.erase}) must be a probability, from 0 to 1")


def augment(
    images: UInt8[Tensor, "B C Y X"] | Float[Tensor, "B C Y X"],
    how: Augmentation,
    seed: int,
    step: int,
    *,
    rank: int = 0,
) -> Float[Tensor, "B C Y X"]:
    """Augmented images from 0 to 1, on their device; random by (seed, step, rank) alone."""
    x = images.float() / 255 if images.dtype == torch.uint8 else images
    if not len(x):
        return x
    chance = rng(combined(seed, step, rank))
    B, _, Y, X = x.shape
    drawn = _POLICIES[how.policy](how, chance, B)
    maps = _framed(how, chance, B, Y, X)
    moved = _moved(drawn, Y, X)
    if moved is not None:
        maps = moved if maps is None else maps @ moved
    if maps is not None:
        x = _warped(x, maps)
    for name, rows, value in drawn.of(COLOURS):
        at = _on(rows, x)
        changed = COLOURS[name](x[at], _on(value.astype(np.float32), x)[:, None, None, None])
        x = x.index_copy(0, at, changed)
    if how.erase:
        x = x.masked_fill(_rectangles(*_erased(how, chance, B, Y, X), x), 0.0)
    return x.clamp(0, 1)


# Where pixels come from


def _framed(
    how: Augmentation, chance: np.random.Generator, B: int, Y: int, X: int
) -> Float64[np.ndarray, "B 3 3"] | None:
    """Crops and flips, as maps from a pixel of the result to one of the image.

    Pixels are counted from the centre.
    """
    if how.crop is None and not how.flip:
        return None
    maps = _stay(B)
    if how.crop is not None:
        area = chance.uniform(*how.crop, B)
        ratio = np.exp(chance.uniform(-_RATIO, _RATIO, B))
        for axis, side, share in (
            (0, X, np.sqrt(area * ratio)),
            (1, Y, np.sqrt(area / ratio)),
        ):
            share = np.minimum(share, 1)
            maps[:, axis, axis] = share
            maps[:, axis, 2] = chance.uniform(-0.5, 0.5, B) * (1 - share) * side
    if how.flip:
        maps[:, 0, 0] *= np.where(chance.random(B) < 0.5, -1, 1)
    return maps


def _warped(
    x: Float[Tensor, "B C Y X"], maps: Float64[np.ndarray, "B 3 3"]
) -> Float[Tensor, "B C Y X"]:
    """The images' pixels at other places, interpolated; black where there are none."""
    Y, X = x.shape[-2:]
    # affine_grid counts each axis from -1 to 1.
    half = np.array([X / 2, Y / 2, 1.0])
    maps = maps * half / half[:, None]
    grid = F.affine_grid(_on(maps[:, :2].astype(np.float32), x), list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, "bilinear", "zeros", align_corners=False)


def _stay(count: int) -> Float64[np.ndarray, "n 3 3"]:
    """Maps that leave every pixel where it is."""
    return np.tile(np.eye(3), (count, 1, 1))


def _shear(axis: int) -> Callable[[np.ndarray, int, int], np.ndarray]:
    def maps(value: np.ndarray, Y: int, X: int) -> np.ndarray:
        out = _stay(len(value))
        out[:, axis, 1 - axis] = value
        return out

    return maps


def _translate(axis: int) -> Callable[[np.ndarray, int, int], np.ndarray]:
    def maps(value: np.ndarray, Y: int, X: int) -> np.ndarray:
        out = _stay(len(value))
        out[:, axis, 2] = value * (X, Y)[axis]
        return out

    return maps


def _rotate(value: np.ndarray, Y: int, X: int) -> np.ndarray:
    cos, sin = np.cos(np.radians(value)), np.sin(np.radians(value))
    out = _stay(len(value))
    out[:, 0, 0], out[:, 0, 1], out[:, 1, 0], out[:, 1, 1] = cos, -sin, sin, cos
    return out


MOVES: Mapping[str, Callable[[np.ndarray, int, int], np.ndarray]] = MappingProxyType(
    {
        "shear x": _shear(0),
        "shear y": _shear(1),
        "translate x": _translate(0),
        "translate y": _translate(1),
        "rotate": _rotate,
    }
)
"""Geometric operations, from a value for each image and the size to maps. Values are slopes,
shares of the side, degrees."""


# What colours become


def _grey(x: Float[Tensor, "B C Y X"]) -> Float[Tensor, "B 1 Y X"]:
    if x.shape[1] == 1:
        return x
    red, green, blue = x.split(1, 1)
    return 0.299 * red + 0.587 * green + 0.114 * blue


def _blend(
    base: Callable[[Tensor], Tensor],
) -> Callable[[Tensor, Tensor], Tensor]:
    """Away from, or towards, what `base` makes of the images: 0 is there, 1 where they are."""

    def blended(x: Tensor, factor: Tensor) -> Tensor:
        other = base(x)
        return (other + factor * (x - other)).clamp(0, 1)

    return blended


def _smooth(x: Float[Tensor, "B C Y X"]) -> Float[Tensor, "B C Y X"]:
    """Each pixel with its eight neighbours, itself five times; the border stays."""
    if min(x.shape[-2:]) < 3:
        return x
    near = F.avg_pool2d(x, 3, 1) * (9 / 13) + x[..., 1:-1, 1:-1] * (4 / 13)
    out = x.clone()
    out[..., 1:-1, 1:-1] = near
    return out


def _posterize(x: Tensor, bits: Tensor) -> Tensor:
    step = 2 ** (8 - bits)
    return ((x * 255).round() / step).floor() * step / 255


def _solarize(x: Tensor, threshold: Tensor) -> Tensor:
    return torch.where(x >= threshold, 1 - x, x)


def _autocontrast(x: Tensor, _: Tensor) -> Tensor:
    low, high = x.amin((2, 3), keepdim=True), x.amax((2, 3), keepdim=True)
    return torch.where(high > low, (x - low) / (high - low), x)


def _equalize(x: Float[Tensor, "B C Y X"], _: Tensor) -> Float[Tensor, "B C Y X"]:
    """Histogram equalization of each channel in 256 levels, as Pillow rounds it."""
    level = (x * 255).round().long().flatten(2)
    count = level.new_zeros(*level.shape[:2], 256).scatter_add_(2, level, torch.ones_like(level))
    # The highest level that occurs maps to 255.
    step = (level.shape[2] - count.gather(2, level.amax(2, keepdim=True))) // 255
    table = (step // 2 + count.cumsum(2) - count) // step.clamp(min=1)
    table = torch.where(step > 0, table.clamp(max=255), torch.arange(256, device=x.device))
    return (table.gather(2, level) / 255.0).view_as(x)


COLOURS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = MappingProxyType(
    {
        "brightness": _blend(torch.zeros_like),
        "colour": _blend(_grey),
        "contrast": _blend(lambda x: _grey(x).mean((2, 3), keepdim=True)),
        "sharpness": _blend(_smooth),
        "posterize": _posterize,
        "solarize": _solarize,
        "autocontrast": _autocontrast,
        "equalize": _equalize,
    }
)
"""Photometric operations, from images and a value for each. Values are factors, with 1 for
no change; bits; a threshold."""


# Which operations, and how much


@dataclass(frozen=True)
class Drawn:
    """What a policy drew: for each image and turn an operation, by number, and its value."""

    operations: Int64[np.ndarray, "B n"]
    """-1 for none."""
    values: Float64[np.ndarray, "B n"]

    def of(
        self, names: Iterable[str]
    ) -> Iterator[tuple[str, Int64[np.ndarray, "k"], Float64[np.ndarray, "k"]]]:
        """Operations of these names in their order: which, of which images, by how much."""
        for operation, value in zip(self.operations.T, self.values.T):
            for name in names:
                rows = np.flatnonzero(operation == _NUMBER[name])
                if len(rows):
                    yield name, rows, value[rows]


def _moved(drawn: Drawn, Y: int, X: int) -> Float64[np.ndarray, "B 3 3"] | None:
    """All moves of each image, as one map."""
    maps = None
    for name, rows, value in drawn.of(MOVES):
        if maps is None:
            maps = _stay(len(drawn.values))
        maps[rows] = maps[rows] @ MOVES[name](value, Y, X)
    return maps


_NAMES = (*MOVES, *COLOURS)
_NUMBER = {name: i for i, name in enumerate(_NAMES)}
_FACTORS = ("brightness", "colour", "contrast", "sharpness")

_MOST: Mapping[str, float] = MappingProxyType(
    {
        **dict.fromkeys(("shear x", "shear y"), 0.3),
        **dict.fromkeys(("translate x", "translate y"), 150 / 331),
        "rotate": 30.0,
        **dict.fromkeys(_FACTORS, 0.9),
        "posterize": 4.0,
        "solarize": 1.0,
    }
)
"""The strongest of each: the slope, the share of a side, the degrees, the change of a
factor, the bits lost, how far the threshold falls."""

_RAND = np.arange(-1, len(_NAMES))
"""The operations of RandAugment; one in fourteen is none."""


def _values(
    operations: Int64[np.ndarray, "B n"],
    strength: float,
    chance: np.random.Generator,
) -> Drawn:
    """What operations do at a strength from 0 to 1: half of what has a direction in the other."""
    scale = np.array([_MOST.get(name, 0.0) for name in _NAMES])[operations]
    signs = np.where(chance.random(operations.shape) < 0.5, -1, 1)
    amount = strength * scale

    def among(names: Sequence[str]) -> Bool[np.ndarray, "B n"]:
        return np.isin(operations, [_NUMBER[name] for name in names])

    values = np.select(
        [among([*MOVES]), among(_FACTORS), among(["posterize"]), among(["solarize"])],
        [signs * amount, 1 + signs * amount, 8 - np.round(amount), 1 - amount],
        0.0,
    )
    return Drawn(operations, values)


def _none(how: Augmentation, chance: np.random.Generator, B: int) -> Drawn:
    return Drawn(np.empty((B, 0), np.int64), np.empty((B, 0)))


def _rand(how: Augmentation, chance: np.random.Generator, B: int) -> Drawn:
    """RandAugment: `how.operations` operations, equally likely, all of one strength."""
    operations = _RAND[chance.integers(len(_RAND), size=(B, how.operations))]
    return _values(operations, how.magnitude / 30, chance)


_POLICIES: Mapping[Policy, Callable[[Augmentation, np.random.Generator, int], Drawn]] = (
    MappingProxyType({"none": _none, "rand": _rand})
)


# Rectangles


_Sides: TypeAlias = Int64[np.ndarray, "2 B"]


def _erased(
    how: Augmentation, chance: np.random.Generator, B: int, Y: int, X: int
) -> tuple[_Sides, _Sides]:
    """First and last rows, first and last columns of what is erased; nothing of most images."""
    area = chance.uniform(*_ERASED, B) * Y * X * (chance.random(B) < how.erase)
    ratio = np.exp(chance.uniform(-_ERASED_RATIO, _ERASED_RATIO, B))
    return (
        _placed(np.minimum(np.sqrt(area * ratio).round(), Y), Y, chance),
        _placed(np.minimum(np.sqrt(area / ratio).round(), X), X, chance),
    )


def _placed(lengths: np.ndarray, side: int, chance: np.random.Generator) -> _Sides:
    """Stretches of these lengths somewhere within a side."""
    first = np.floor(chance.random(len(lengths)) * (side - lengths + 1))
    return np.stack([first, first + lengths]).astype(np.int64)


def _rectangles(rows: _Sides, columns: _Sides, x: Tensor) -> Bool[Tensor, "B 1 Y X"]:
    """True within each image's rectangle."""

    def within(sides: _Sides, length: int) -> Bool[Tensor, "B n"]:
        first, last = _on(sides, x)[..., None]
        place = torch.arange(length, device=x.device)
        return (place >= first) & (place < last)

    Y, X = x.shape[-2:]
    return (within(rows, Y)[:, :, None] & within(columns, X)[:, None, :])[:, None]


def _on(values: np.ndarray, x: Tensor) -> Tensor:
    """Numbers of the host on a tensor's device, which the host does not wait for."""
    return torch.from_numpy(values).to(x.device, non_blocking=True)


# Two images in one


@dataclass(frozen=True)
class Mixed:
    """Images of two classes each: loss = weight · loss(labels) + (1 - weight) · loss(others)."""

    images: Float[Tensor, "B C Y X"]
    labels: Int[Tensor, "B"]
    others: Int[Tensor, "B"]
    weight: Float[Tensor, "B"]


def mix(
    images: Float[Tensor, "B C Y X"],
    labels: Int[Tensor, "B"],
    how: Augmentation,
    seed: int,
    step: int,
    *,
    rank: int = 0,
) -> Mixed:
    """MixUp or CutMix of each image with another of the batch; where both are asked for, each image
    gets one or the other."""
    B, _, Y, X = images.shape
    if not (how.mixup or how.cutmix) or not B:
        return Mixed(images, labels, labels, torch.ones_like(labels, dtype=torch.float32))
    chance = rng(combined(seed, step, rank), 1)
    pasted = chance.random(B) < 0.5 if how.mixup and how.cutmix else np.full(B, how.cutmix)
    blended = np.where(pasted, 1.0, chance.beta(_MIXUP, _MIXUP, B))
    share = np.where(pasted, np.sqrt(1 - chance.beta(_CUTMIX, _CUTMIX, B)), 0.0)
    rows, columns = (_placed((share * side).round(), side, chance) for side in (Y, X))
    cut = np.prod([last - first for first, last in (rows, columns)], axis=0) / (Y * X)
    partner = _on(chance.permutation(B), images)
    keep = _on(blended.astype(np.float32), images)[:, None, None, None].to(images.dtype)
    others = images[partner]
    mixed = torch.where(_rectangles(rows, columns, images), others, others.lerp(images, keep))
    weight = _on((blended - cut).astype(np.float32), images)
    return Mixed(mixed, labels, labels[partner], weight)
