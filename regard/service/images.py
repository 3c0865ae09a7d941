"""Images of users: looked at by their headers, and only then decoded."""

import io
import warnings
from typing import Any

from regard.service.requests import Limits, Refused, TooLarge

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""Kinds of image files that are opened."""


def check_image(content: bytes, limits: Limits) -> None:
    """Refuses what is no image, or too large a one, by its header alone."""
    from PIL import Image

    if len(content) > limits.image_bytes:
        raise TooLarge(f"the image has {len(content):,} bytes, and may have {limits.image_bytes:,}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(io.BytesIO(content), formats=FORMATS) as image:
                columns, rows = image.size
    except Image.DecompressionBombError:
        raise TooLarge("the image has far too many pixels; make it smaller") from None
    except Exception:  # a damaged file may raise anything at all
        raise Refused(f"the image is none of {', '.join(FORMATS)}, or damaged") from None
    if rows * columns > limits.pixels:
        raise TooLarge(
            f"the image has {rows} × {columns} pixels, and may have {limits.pixels:,} in all"
        )


def pixels_of(content: bytes, preparation: Any, limits: Limits) -> Any:
    """An image as the model reads it."""
    check_image(content, limits)
    try:
        return preparation.pixels(content)
    except ValueError as error:
        raise Refused(str(error)) from None
