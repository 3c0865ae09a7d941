"""One image file as pixels: decoded, upright, at one size, or refused with the reason.

It does not import torch, so that worker processes start quickly.
"""

import contextlib
import functools
import io
import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import numpy as np
from jaxtyping import UInt8

from regard.data.cache import PathLike
from regard.data.problems import Problems, reason

if TYPE_CHECKING:
    from PIL import Image

Fit: TypeAlias = Literal["crop", "pad"]


@dataclass(frozen=True)
class Decoding:
    """How a file becomes a tensor."""

    size: tuple[int, int]
    """Image size: rows and columns."""
    channels: Literal[1, 3] = 3
    """Channels: 3 for colour, 1 for grey."""
    fit: Fit = "crop"
    """Other aspect ratios: centre crop, or padding."""
    background: int = 255
    """Background of transparent pixels and of padding: 0 black to 255 white."""
    most: int = 50_000_000
    """Most pixels of an image; larger ones are refused."""

    def __post_init__(self) -> None:
        if len(self.size) != 2 or min(self.size) < 1:
            raise ValueError(f"size {self.size} must be rows and columns; try (32, 32)")
        if self.channels not in (1, 3):
            raise ValueError(f"channels ({self.channels}) must be 1 for grey or 3 for colour")
        if self.fit not in get_args(Fit):
            raise ValueError(f"fit ({self.fit!r}) must be {' or '.join(get_args(Fit))}")
        if not 0 <= self.background <= 255:
            raise ValueError(f"background ({self.background}) must be 0 (black) to 255 (white)")


class TooLargeError(ValueError):
    """An image of more pixels than are decoded."""


def decode(picture: "PathLike | bytes | Image.Image", how: Decoding) -> UInt8[np.ndarray, "C Y X"]:
    """The pixels of a picture, upright and at the size wanted; a ValueError says why not."""
    with _quiet():
        return _decode(picture, how)


def upright(picture: "PathLike | bytes | Image.Image", how: Decoding) -> "Image.Image":
    """A picture with 8 bits for each channel, turned as its EXIF orientation says, at its own
    size."""
    with _quiet():
        return _upright(picture, how, None)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Ignores Pillow's warnings about damage that it can work around, and about sizes, which
    `Decoding.most` limits. Filters of warnings belong to all threads."""
    from PIL import Image

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        warnings.filterwarnings("ignore", category=UserWarning, module=r"PIL\.")
        yield


def _decode(picture: "PathLike | bytes | Image.Image", how: Decoding) -> UInt8[np.ndarray, "C Y X"]:
    image = _upright(picture, how, (2 * max(how.size), 2 * max(how.size)))
    return channels_first(fitted(image, how.size, how.fit, how.background))


def _upright(
    picture: "PathLike | bytes | Image.Image", how: Decoding, least: tuple[int, int] | None
) -> "Image.Image":
    """`least` allows photographs to be decoded at a smaller size, if their format can."""
    from PIL import Image, ImageOps

    name = "the image" if isinstance(picture, bytes | Image.Image) else str(picture)
    try:
        with contextlib.ExitStack() as stack:
            if isinstance(picture, Image.Image):
                image = picture
            elif isinstance(picture, bytes):
                image = stack.enter_context(Image.open(io.BytesIO(picture)))
            else:
                # Given the name, Pillow 13 maps an uncompressed TIFF, and mixes up the rows of one
                # that lies on its side.
                file = stack.enter_context(open(picture, "rb"))
                image = stack.enter_context(Image.open(file))
            if math.prod(image.size) > how.most:
                columns, rows = image.size
                raise TooLargeError(
                    f"{name} has too many pixels ({rows} × {columns}) to be decoded; make it "
                    f"smaller, or raise the limit ({how.most})"
                )
            if image is picture:
                image = image.copy()  # the caller's own stays as it is
            elif least is not None:
                image.draft(None, least)
            image.load()
            with contextlib.suppress(Exception):  # damaged metadata
                image = ImageOps.exif_transpose(image)
            return _eight_bits(image, how)
    except (TooLargeError, UserWarning):
        raise
    except Image.DecompressionBombError:
        raise TooLargeError(f"{name} has far too many pixels; make it smaller") from None
    except Exception as error:  # a damaged file may raise anything at all
        raise ValueError(f"{name} cannot be decoded: {reason(error)}") from error


def channels_first(image: "Image.Image") -> UInt8[np.ndarray, "C Y X"]:
    pixels = np.asarray(image)
    return np.ascontiguousarray(pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1))


def _eight_bits(image: "Image.Image", how: Decoding) -> "Image.Image":
    from PIL import Image

    wanted = "L" if how.channels == 1 else "RGB"
    if image.mode.startswith("I;16"):
        image = Image.fromarray(_scaled(np.asarray(image)))
    elif image.mode == "La":
        image = image.convert("LA")  # Pillow converts this mode to no other one
    elif image.mode == "LAB":
        image = image.convert("RGB")  # nor this one to grey
    elif image.mode in ("I", "F"):
        raise ValueError(f"its pixels are of 32 bits (mode {image.mode}); save it with 8 or 16")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        behind = Image.new("RGBA", image.size, (how.background,) * 3 + (255,))
        image = Image.alpha_composite(behind, image)
    return image if image.mode == wanted else image.convert(wanted)


def _scaled(pixels: np.ndarray) -> UInt8[np.ndarray, "Y X"]:
    """Pixels of 16 bits as bytes. Scanners and microscopes often use 10, 12 or 14 of the 16 bits,
    as the brightest pixel shows."""
    bits = max(8, int(pixels.max(initial=0)).bit_length() + 1 & ~1)
    _note(bits)
    return (pixels >> (bits - 8)).astype(np.uint8)


@functools.cache
def _note(bits: int) -> None:
    """Warns once that pictures of 16 bits use only `bits` of them."""
    warnings.warn(
        f"a picture of 16 bits uses {bits} of them, so {2**bits - 1} becomes 255; save pictures "
        "with 8 bits where this is not meant",
        stacklevel=2,
    )


def fitted(
    image: "Image.Image",
    size: tuple[int, int],
    fit: Fit,
    background: int,
    resampling: "Image.Resampling | None" = None,
) -> "Image.Image":
    """An image at another size, its aspect ratio kept: cropped at the centre, or padded."""
    from PIL import Image, ImageOps

    rows, columns = size
    resampling = Image.Resampling.BICUBIC if resampling is None else resampling
    if image.size == (columns, rows):
        return image
    if fit == "crop":
        return ImageOps.fit(image, (columns, rows), resampling)
    scale = min(columns / image.width, rows / image.height)
    inner = max(1, round(image.width * scale)), max(1, round(image.height * scale))
    whole = Image.new(image.mode, (columns, rows), (background,) * len(image.getbands()))
    corner = (columns - inner[0]) // 2, (rows - inner[1]) // 2
    whole.paste(image.resize(inner, resampling), corner)
    return whole


def decode_some(how: Decoding, files: list[Path]) -> tuple[Any, Any, Problems]:
    """The pixels of the files that can be decoded, which these are, and why others cannot."""
    problems, good = Problems(), list[int]()
    pixels = np.empty((len(files), how.channels, *how.size), np.uint8)
    for i, file in enumerate(files):
        try:
            pixels[len(good)] = decode(file, how)
            good.append(i)
        except TooLargeError as error:
            problems.add("large", str(error))
        except ValueError as error:
            problems.add("broken", str(error))
    return pixels[: len(good)], np.array(good, "<i8"), problems
