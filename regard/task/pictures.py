"""A user's pictures as a trained model wants them: files, Pillow's images, arrays or tensors.

What is done to them is a part of the model's task, in its folder's config.json, under the words
that imported models have too:

    size            rows and columns
    resize          shortest: the picture covers the size, and its middle is cut out;
                    squash: it is pressed into it; pad: it lies within, and the rest is filled
    crop            how much of the covering picture is cut out; 1 for all that fits
    interpolation   bicubic, bilinear, …
    mean, std       of each channel, with pixels from 0 to 1
"""

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeGuard, TypeVar, cast

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from regard.attention.checks import check_integer
from regard.data import cache
from regard.data.image import Images, normalize
from regard.data.pixels import Decoding, Fit, channels_first, decode, fitted, upright
from regard.machine import memory
from regard.machine.memory import Size
from regard.task.settings import section
from regard.task.text import Progress

if TYPE_CHECKING:
    from PIL import Image

    Single: TypeAlias = str | PathLike[str] | bytes | Image.Image
    """A file, its content, or an image of Pillow's: what cannot be several pictures."""
    Picture: TypeAlias = Single | np.ndarray | Tensor
    """A picture, or its pixels: arrays (Y, X) or (Y, X, C), tensors (C, Y, X)."""
else:
    Single = Picture = object  # Pillow is imported only where there are pictures
Resize: TypeAlias = Literal["shortest", "squash", "pad"]
C = TypeVar("C", bound=Any)


@dataclass(frozen=True)
class Preparation:
    """Turns a picture into the input of a model."""

    size: tuple[int, int]
    channels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    resize: Resize = "shortest"
    crop: float = 1.0
    interpolation: str = "bicubic"
    background: int = 255

    def __post_init__(self) -> None:
        (rows, columns), channels = self.size, self.channels
        check_integer("size", min(rows, columns))
        size = Size("size", rows, 224, lambda other: 4 * channels * other * columns)
        memory.check(f"an image of {rows} × {columns}", [size], memory.limit())
        if not len(self.mean) == len(self.std) == channels:
            raise ValueError(
                f"mean ({len(self.mean)}) and std ({len(self.std)}) must have a number for each "
                f"channel ({channels})"
            )
        if not 0 < self.crop <= 1:
            raise ValueError(f"crop ({self.crop}) must be above 0 and at most 1")

    @classmethod
    def of(cls, task: Mapping[str, Any], channels: int, where: object) -> "Preparation":
        """As the task's section of a model's folder says."""
        mean, std = task.get("mean"), task.get("std")
        if mean is None or std is None:
            raise ValueError(
                f"{where} does not say how its pixels are scaled; add mean and std, one number "
                f"for each of {channels} channels, to the task in its config.json"
            )
        said = {name: value for name, value in task.items() if value is not None}
        return section(cls, {**said, "size": list(task["size"]), "channels": channels}, where)

    @classmethod
    def trained(
        cls, decoding: Decoding, mean: tuple[float, ...], std: tuple[float, ...]
    ) -> "Preparation":
        """As images of this decoding have been trained on."""
        way: Resize = "pad" if decoding.fit == "pad" else "shortest"
        return cls(decoding.size, decoding.channels, mean, std, way, background=decoding.background)

    def section(self) -> dict[str, Any]:
        """Its words in config.json."""
        return {
            "size": list(self.size),
            "resize": self.resize,
            "crop": self.crop,
            "interpolation": self.interpolation,
            "background": self.background,
            "mean": list(self.mean),
            "std": list(self.std),
        }

    def inputs(self, pixels: UInt8[Tensor, "B C Y X"], weight: Tensor) -> Float[Tensor, "B C Y X"]:
        """Normalized pixels in the dtype and on the device of this weight of the model."""
        return self.normalized(pixels.to(weight.device)).to(weight.dtype)

    def normalized(self, pixels: Tensor) -> Float[Tensor, "B C Y X"]:
        return normalize(pixels, self.mean, self.std)

    def batches(self, pictures: Iterable[Picture], size: int) -> Iterator[UInt8[Tensor, "B C Y X"]]:
        """All pictures in their order, so many at a time."""
        if isinstance(pictures, str | bytes | PathLike):
            raise ValueError(f"pictures ({pictures!r}) must be a list of them; put it into one")
        if _is_one(pictures):
            shape = tuple(pictures.shape)
            raise ValueError(
                f"pictures of shape {shape} are one picture; pass a list of pictures: [picture]"
            )
        waiting = iter(pictures)
        while some := list(islice(waiting, size)):
            yield torch.from_numpy(np.stack([self.pixels(picture) for picture in some]))

    def pixels(self, picture: Picture) -> UInt8[np.ndarray, "C Y X"]:
        """One picture at the model's size; raises ValueError if it cannot be read."""
        if isinstance(picture, Tensor | np.ndarray):
            return self._fitted(_shown(picture, self.channels))
        fit: Fit = "pad" if self.resize == "pad" else "crop"
        channels = cast(Literal[1, 3], self.channels)
        decoding = Decoding(self.size, channels, fit, self.background)
        if self._usual:
            return decode(picture, decoding)
        return self._fitted(upright(picture, decoding))

    @property
    def _usual(self) -> bool:
        """True if images are prepared as in training."""
        return self.resize != "squash" and self.crop == 1.0 and self.interpolation == "bicubic"

    def _fitted(self, image: "Image.Image") -> UInt8[np.ndarray, "C Y X"]:
        from PIL import Image

        if self.interpolation.upper() not in Image.Resampling.__members__:
            known = ", ".join(name.lower() for name in Image.Resampling.__members__)
            raise ValueError(
                f"interpolation ({self.interpolation!r}) is unknown; known are {known}"
            )
        resampling = Image.Resampling[self.interpolation.upper()]
        rows, columns = self.size
        if image.size != (columns, rows) or self.crop != 1.0:
            match self.resize:
                case "squash":
                    image = image.resize((columns, rows), resampling)
                case "shortest" if self._usual:
                    image = fitted(image, self.size, "crop", self.background, resampling)
                case "shortest":
                    image = _covering(image, rows, columns, self.crop, resampling)
                case "pad":
                    image = fitted(image, self.size, "pad", self.background, resampling)
        return channels_first(image)


def _covering(
    image: "Image.Image", rows: int, columns: int, crop: float, resampling: "Image.Resampling"
) -> "Image.Image":
    # A little more than the quotient, which may come out just below a whole number.
    least = math.floor(rows / crop + 1e-6), math.floor(columns / crop + 1e-6)
    scale = max(least[0] / image.height, least[1] / image.width)
    size = max(columns, round(image.width * scale)), max(rows, round(image.height * scale))
    image = image.resize(size, resampling)
    left, top = (size[0] - columns) // 2, (size[1] - rows) // 2
    return image.crop((left, top, left + columns, top + rows))


def _is_one(pictures: object) -> TypeGuard[np.ndarray | Tensor]:
    """True for the pixels of one picture, whose rows or channels are no pictures."""
    if isinstance(pictures, np.ndarray):
        return pictures.ndim < 3 or (pictures.ndim == 3 and pictures.shape[-1] in (1, 3, 4))
    return isinstance(pictures, Tensor) and pictures.ndim < 4


def _shown(picture: np.ndarray | Tensor, channels: int) -> "Image.Image":
    """Pixels as an image of Pillow's, grey or in colour."""
    from PIL import Image

    shape, where = tuple(picture.shape), type(picture).__name__.lower()
    if isinstance(picture, Tensor):
        picture = picture.detach().cpu()
        array = np.asarray(picture.permute(1, 2, 0) if picture.ndim == 3 else picture)
    else:
        array = picture
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[..., 0]
    if not (array.ndim == 2 or (array.ndim == 3 and array.shape[2] == 3)) or not array.size:
        wanted = "(channels, rows, columns)" if where == "tensor" else "(rows, columns[, channels])"
        raise ValueError(f"a picture of shape {shape} must be {wanted}, with 1 or 3 channels")
    if array.dtype.kind == "f" and array.min() >= 0 and array.max() <= 1:
        array = np.round(array * 255)
    elif array.dtype != np.uint8:
        raise ValueError(
            f"pixels ({array.dtype}, {array.min()} to {array.max()}) must be bytes, or numbers "
            "from 0 to 1; convert them"
        )
    image = Image.fromarray(np.ascontiguousarray(array, np.uint8))
    return image.convert("L" if channels == 1 else "RGB")


# What tasks with images have in common


def split(images: Images, share: float) -> tuple[Images, Images]:
    """Images for training, and images that are held out: of each class the share whose pixels have
    the least hashes, at least one.

    It depends on what the images show alone: equal images are on one side, and other names of the
    files change nothing.
    """
    classes = np.zeros(len(images), np.int64) if images.labels is None else images.labels
    marks: list[bytes] = []
    own: dict[int, set[bytes]] = {}
    for begin in range(0, len(images), 256):
        some = np.arange(begin, min(begin + 256, len(images)))
        for pixels, label in zip(images.batch(some).numpy(), classes[some].tolist()):
            marks.append(hashlib.blake2b(pixels.tobytes(), digest_size=8).digest())
            own.setdefault(label, set()).add(marks[-1])
    held: set[bytes] = set()
    for found in own.values():
        if len(found) > 1:
            held.update(sorted(found)[: max(1, round(share * len(found)))])
    chosen = np.array([mark in held for mark in marks], bool)
    if not chosen.any() or chosen.all():
        raise ValueError(
            f"{len(images)} images are too few to train on and to hold some out ({share}); add "
            "some, or name others as validation"
        )
    return images.part(np.flatnonzero(~chosen)), images.part(np.flatnonzero(chosen))


def told(progress: Progress | None) -> cache.Progress | None:
    """Converts the progress of decoding files for tasks."""
    if progress is None:
        return None
    return lambda done, total, kept: progress("decoding images", done / total)
