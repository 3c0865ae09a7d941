"""Embeddings of tokens, of an image's patches and of frames of audio.

    tokens    x_n = √D · E[id_n] + r_n          Vaswani et al. (2017), sections 3.4 and 3.5
    patches   x_n = W vec(patch_n) + b + r_n    Dosovitskiy et al. (2021), equation 1
    frames    x_n = W frame_n + b + r_n

r is the position's vector. All three return (B, S, D), and a decoder reads all of them through the
same cross-attention.
"""

import math
from typing import TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.attention.arguments import check_input
from regard.attention.checks import check_dense, check_integer, shown
from regard.attention.fusing import are_linear, compute_dtype, fuses
from regard.attention.mask import At, Mask
from regard.attention.position import Concatenated, InputPosition, Positions
from regard.model.dropout import Dropout

Size: TypeAlias = int | tuple[int, int]
"""Rows and columns of an image; an int means a square."""


class Embedded(nn.Module):
    """Adds positions to vectors, and applies dropout."""

    def __init__(self, width: int, position: InputPosition | None, dropout: float | int):
        super().__init__()
        check_integer("width", width)
        self.width = width
        self.position = position
        self.dropout = Dropout(dropout)

    @property
    def inner(self) -> int:
        """Width of the vectors before positions are concatenated."""
        if not isinstance(self.position, Concatenated):
            return self.width
        if self.position.width >= self.width:
            raise ValueError(
                f"concatenated positions ({self.position.width} wide) must leave room in width "
                f"({self.width}); make them narrower"
            )
        return self.width - self.position.width

    def add_position(self, x: Float[Tensor, "B S E"], at: Positions) -> Float[Tensor, "B S D"]:
        return self.dropout(x if self.position is None else self.position(x, at))


class Tokens(Embedded):
    """Token embeddings, times √D.

    With tied weights the table is also the output layer's matrix, whose entries should be of the
    size 1/√D; the factor brings the vectors to the size of the positions.
    """

    def __init__(
        self,
        vocabulary: int,
        width: int,
        *,
        position: InputPosition | None = None,
        scale: bool = True,
        dropout: float | int = 0.0,
        name: str = "tokens",
    ):
        super().__init__(width, position, dropout)
        check_integer("vocabulary", vocabulary)
        self.name = name
        """What errors call the ids."""
        self.scale = math.sqrt(width) if scale else 1.0
        self.table = nn.Embedding(vocabulary, self.inner)

    def forward(self, ids: Int[Tensor, "B S"], at: Positions = 0) -> Float[Tensor, "B S D"]:
        name = self.name
        _check_tensor(name, ids)
        if ids.dtype not in (torch.int64, torch.int32) or ids.ndim != 2:
            remedy = f"one sentence is {name}[None]" if ids.ndim != 2 else f"pass {name}.long()"
            raise ValueError(
                f"{name} must be token ids, int64 or int32, of shape (batch, length), got "
                f"{ids.dtype} of shape {tuple(ids.shape)}; {remedy}"
            )
        try:
            x = self.table(ids)
        except IndexError as error:
            raise ValueError(
                f"{name} has ids from {int(ids.min())} to {int(ids.max())}, which must lie from 0 "
                f"to {self.table.num_embeddings - 1}; use the tokenizer of the model"
            ) from error
        return self.add_position(x if self.scale == 1.0 else x * self.scale, at)

    def extra_repr(self) -> str:
        return f"scale={self.scale:g}"


class Patches(Embedded):
    """An image cut into squares, each flattened and mapped by one matrix, row by row.

    The map of all patches at once is a convolution whose kernel and stride are the patch: the
    matrix (D, C·P·P), read as (D, C, P, P), is its kernel.
    """

    def __init__(
        self,
        image: Size,
        patch: int,
        channels: int,
        width: int,
        *,
        position: InputPosition | None = None,
        dropout: float | int = 0.0,
    ):
        super().__init__(width, position, dropout)
        self.image, self.grid = image_size(image), grid(image, patch)
        check_integer("channels", channels)
        self.patch, self.channels = patch, channels
        self.projection = nn.Linear(channels * patch * patch, self.inner)

    def forward(
        self, images: Float[Tensor, "B C Y X"], at: Positions = 0
    ) -> Float[Tensor, "B S D"]:
        want = (self.channels, *self.image)
        _check_tensor("images", images)
        if images.ndim != 4 or images.shape[1:] != want:
            remedy = "resize them, or the model: resize_images((rows, columns))"
            if images.ndim != 4:
                remedy = "one image is images[None]"
            elif images.shape[1] != self.channels:
                remedy = "convert them, or build the model with channels=…"
            raise ValueError(
                f"images of shape {tuple(images.shape)} must be (batch, {want[0]}, {want[1]}, "
                f"{want[2]}); {remedy}"
            )
        # Autocast would cast them in a separate pass.
        narrows = fuses(images) and are_linear(self.projection)
        dtype = compute_dtype(images) if narrows else None
        patches, weight = flat_patches(images, self.patch, dtype), self.projection.weight
        check_input("images", patches, "numbers", weight.shape[1], weight.dtype)
        return self.add_position(self.projection(patches), at)

    def extra_repr(self) -> str:
        rows, columns = self.image
        return f"{rows} × {columns}, patch={self.patch}, channels={self.channels}"


class Frames(Embedded):
    """Frames of a spectrogram, (batch, time, features), each mapped by one matrix."""

    def __init__(
        self,
        features: int,
        width: int,
        *,
        position: InputPosition | None = None,
        dropout: float | int = 0.0,
    ):
        super().__init__(width, position, dropout)
        check_integer("features", features)
        self.projection = nn.Linear(features, self.inner)

    def forward(self, frames: Float[Tensor, "B S F"], at: Positions = 0) -> Float[Tensor, "B S D"]:
        weight = self.projection.weight
        _check_tensor("frames", frames)
        if frames.ndim != 3 or frames.shape[-1] != weight.shape[1]:
            raise ValueError(
                f"frames of shape {tuple(frames.shape)} must be (batch, time, {weight.shape[1]}); "
                "a frame is one row"
            )
        check_input("frames", frames, "features", weight.shape[1], weight.dtype)
        return self.add_position(self.projection(frames), at)


def _check_tensor(name: str, x: object) -> None:
    if not isinstance(x, Tensor):
        raise ValueError(
            f"{name} must be a tensor, got {shown(x)}; make one with torch.tensor(...)"
        )
    check_dense(name, x)


def flat_patches(
    images: Float[Tensor, "B C Y X"], patch: int, dtype: torch.dtype | None = None
) -> Float[Tensor, "B S P"]:
    """Patches row by row; each patch's numbers by channel, row and column, as a kernel has them."""
    cut = images.unflatten(-1, (-1, patch)).unflatten(-3, (-1, patch))  # B C rows P columns P
    cut = cut.permute(0, 2, 4, 1, 3, 5)
    if dtype is not None:
        cut = cut.to(dtype, memory_format=torch.contiguous_format)
    return cut.flatten(3).flatten(1, 2)


def image_size(image: Size) -> tuple[int, int]:
    """(rows, columns), in pixels or in patches."""
    if not isinstance(image, int) and len(image) != 2:
        raise ValueError(
            f"image {tuple(image)} must be one number or (rows, columns); channels are separate"
        )
    rows, columns = (image, image) if isinstance(image, int) else image
    check_integer("image rows", rows)
    check_integer("image columns", columns)
    return rows, columns


def nearby_patches(rows: int, columns: int, reach: int, first: bool = False) -> Mask:
    """For self-attention of an image: patches up to `reach` rows and columns away.

    A token that comes first, such as the class token, sees all patches and is seen by all.
    """

    def rule(at: At) -> Tensor:
        query, key = at.query - int(first), at.key - int(first)
        down = (query // columns - key // columns).abs()
        across = (query % columns - key % columns).abs()
        near = (down <= reach) & (across <= reach)
        return near | (query < 0) | (key < 0) if first else near

    return Mask(rule, f"nearby_patches({rows} × {columns}, {reach})")


LARGE = 64
"""Pixels of a patch's side; a larger one is probably a mistake."""


def grid(image: Size, patch: int) -> tuple[int, int]:
    """The numbers of rows and columns of patches in an image."""
    rows, columns = image_size(image)
    check_integer("patch", patch)
    if rows % patch or columns % patch:
        Y, X = (max(patch, round(side / patch) * patch) for side in (rows, columns))
        smaller = max(n for n in range(1, 33) if rows % n == columns % n == 0)
        remedy = f"an image of {Y} × {X}" if patch <= LARGE else f"a patch of {smaller}"
        raise ValueError(
            f"patch ({patch}) must divide the image ({rows} × {columns}); try {remedy}"
        )
    return rows // patch, columns // patch
