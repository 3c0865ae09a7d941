"""Positions: they give attention, which is blind to order, the order of its rows.

An input position gives the row at position n a vector r_n, and the model reads x̃_n = x_n + r_n,
or [x_n; r_n] through `Concatenated`. `SinusoidalPositions` is the fixed encoding of "Attention Is
All You Need" (Vaswani et al. 2017), `LearnedPositions` a table; `GridPositions` and
`LearnedGridPositions` number the patches of an image.

An attention position acts inside the attention instead: `RotaryEmbedding` turns queries and keys,
`ALiBi` lowers the score of distant pairs. `MultiHeadAttention` applies both methods of each.

The positions of the rows are passed as `at`, in the same way everywhere:

    an int, or an integer tensor without axes   row l stands at position at + l (a cache's length)
    an integer tensor of shape (L,)             row l stands at position at[l]
    an integer tensor of shape (B, L)           the same in each sequence (packed batches)

A tensor is never read back to the host, so decoding neither synchronises nor recompiles.
"""

import copy
import inspect
import math
from typing import Literal, TypeAlias, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.attention import rotation_cpu
from regard.attention.checks import broadcasts, shown
from regard.attention.fusing import fuses
from regard.synonyms import suggest_names

Positions: TypeAlias = int | Int[Tensor, ""] | Int[Tensor, " L"] | Int[Tensor, "B L"]
Layout: TypeAlias = Literal["interleaved", "halves"]


def _check_signature(kind: type, name: str, parameters: str) -> None:
    """Raises at the class definition: inside a model, Python's error would only count arguments."""
    method = vars(kind).get(name)
    if method is None:
        return
    signature = inspect.signature(method)
    try:
        signature.bind("self", *parameters.split(", "))
    except TypeError:
        actual = ", ".join(map(str, list(signature.parameters.values())[1:]))
        raise ValueError(
            f"{kind.__name__}.{name}({actual}) must take {parameters}; write "
            f"def {name}(self, {parameters})"
        ) from None


class InputPosition(nn.Module):
    """A position that adds a vector r_n to row n of the input: x̃_n = x_n + r_n.

    Shapes: x (..., L, D) → (..., L, D). A custom position overrides `encoding` alone. `length` is
    the number of positions; None if every position has a vector.
    """

    def __init__(self, width: int, length: int | None = None) -> None:
        super().__init__()
        _check_count("width", width)
        if length is not None:
            _check_count("length", length)
        self.width = width
        self.length = length

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        _check_signature(cls, "encoding", "positions, dtype=None")

    def encoding(
        self, positions: Int[Tensor, "*P"], dtype: torch.dtype | None = None
    ) -> Float[Tensor, "*P D"]:
        """Returns the vector of each position: (...) → (..., D)."""
        raise NotImplementedError(f"{type(self).__name__} does not define encoding")

    def forward(self, x: Float[Tensor, "*B L D"], at: Positions = 0) -> Float[Tensor, "*B L D"]:
        """Adds the vectors of the positions `at` to the rows of x: (..., L, D) → (..., L, D)."""
        if x.shape[-1] != self.width:
            raise ValueError(
                f"the last axis of x ({x.shape[-1]}) must be the position's width ({self.width}); "
                "build the position with x's width, or concatenate it: Concatenated(position)"
            )
        return x + self.vectors(x, at)

    def vectors(self, x: Float[Tensor, "*B L X"], at: Positions) -> Float[Tensor, "*R L P"]:
        """Returns the vectors of the rows of x, (..., L, P), in its dtype; they broadcast to x."""
        positions = places(x, at)
        if self.length is not None:
            _check_reach(self.length, at, x.shape[-2])
        return self.encoding(positions, x.dtype)


@suggest_names
class SinusoidalPositions(InputPosition):
    """Adds sines and cosines of the position to the input, as the original Transformer does.

        r_{n,i} = sin(n / base^{i/D}) for even i,  cos(n / base^{(i-1)/D}) for odd i,  i from 0

    Shapes: x (..., L, D) → (..., L, D). Vaswani et al. (2017), section 3.5. r_{n+k} is a rotation
    of r_n that depends on k alone, and r_n·r_m = Σ cos(ω(n-m)) on the distance alone. There is a
    vector for every position, negative ones too, no parameter, and nothing in the state dict.

    `layout="halves"` puts all sines first and all cosines after them, as Marian's models have it.
    (Marian itself spaces its frequencies over D/2 - 1 steps: base = 10000 ** (D / (D - 2)).)
    An odd width ends without the last cosine.

    The angles are computed in float64 and only the result is rounded, once, to the dtype of x: in
    float32 it is within 3e-8 of the formula at any position (with float32 angles it would be off by
    7e-3 at position 100,000).

    >>> import torch
    >>> from regard import SinusoidalPositions
    >>> position = SinusoidalPositions(4)
    >>> position(torch.zeros(3, 4))  # rows 0, 1, 2: sin n, cos n, sin n/100, cos n/100
    tensor([[ 0.0000,  1.0000,  0.0000,  1.0000],
            [ 0.8415,  0.5403,  0.0100,  0.9999],
            [ 0.9093, -0.4161,  0.0200,  0.9998]])
    >>> position(torch.zeros(1, 4), at=2)  # one row, at position 2
    tensor([[ 0.9093, -0.4161,  0.0200,  0.9998]])
    """

    def __init__(
        self, width: int, base: int | float = 10000, layout: Layout = "interleaved"
    ) -> None:
        super().__init__(width)
        _check_base(base)
        self.base = base
        self.pair_axis = _pair_axis(layout)
        self.layout = layout

    def encoding(
        self, positions: Int[Tensor, "*P"], dtype: torch.dtype | None = None
    ) -> Float[Tensor, "*P D"]:
        angles = _angles(positions, self.width, self.base)
        dtype = dtype or torch.get_default_dtype()
        pairs = torch.stack((angles.sin().to(dtype), angles.cos().to(dtype)), self.pair_axis)
        return pairs.flatten(-2)[..., : self.width]

    def extra_repr(self) -> str:
        return f"{self.width}, base={self.base}, layout={self.layout!r}"


@suggest_names
class LearnedPositions(InputPosition):
    """Adds row n of a trained table to row n of the input: r_n = table[n].

    Shapes: x (..., L, D) → (..., L, D), table (P, D) with P = `length`. The table starts from a
    normal distribution of deviation 0.02, as BERT (Devlin et al. 2019) and ViT (Dosovitskiy et al.
    2021) do. There is no vector beyond `length`. A position outside the table raises a ValueError
    if it is on the host (an int, the number of rows, a tensor on the CPU); in a CUDA tensor it
    fails the device's own bounds check. No index is clamped.

    >>> import torch
    >>> from regard import LearnedPositions
    >>> position = LearnedPositions(512, 64)
    >>> x = torch.zeros(2, 10, 64)
    >>> torch.equal(position(x, at=5)[0], position.table[5:15])
    True
    """

    def __init__(self, length: int, width: int) -> None:
        super().__init__(width, length)
        self.table = nn.Parameter(torch.empty(length, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the table from a normal distribution of deviation 0.02, in place."""
        nn.init.normal_(self.table, std=0.02)

    def encoding(
        self, positions: Int[Tensor, "*P"], dtype: torch.dtype | None = None
    ) -> Float[Tensor, "*P D"]:
        try:
            # Not table[positions], which would read a negative position from the end.
            vectors = F.embedding(positions.long(), self.table)
        except IndexError as error:
            lowest, highest = int(positions.min()), int(positions.max())
            raise ValueError(
                f"positions {lowest} to {highest} leave the learned table (0 to "
                f"{self.table.shape[0] - 1}); use LearnedPositions({highest + 1}, {self.width}), "
                "shorter sequences, or SinusoidalPositions, which has no end"
            ) from error
        return vectors.to(dtype or self.table.dtype)

    def extra_repr(self) -> str:
        return f"{self.length}, {self.width}"


@suggest_names
class GridPositions(InputPosition):
    """Adds a vector of the row and one of the column, side by side, to the cells of a grid.

        r_n = [row_{n // columns}; column_{n % columns}]        cells are numbered row by row

    Shapes: x (B, L, D) → (B, L, D), where L is at most rows · columns, and D is the width of both
    parts together. Each part is any input position.

    >>> import torch
    >>> from regard import GridPositions, LearnedPositions, SinusoidalPositions
    >>> fixed = GridPositions(2, 3, SinusoidalPositions(8), SinusoidalPositions(8))
    >>> cells = fixed(torch.zeros(6, 16))
    >>> torch.equal(cells[1, :8], cells[2, :8]), torch.equal(cells[1, 8:], cells[4, 8:])
    (True, True)
    >>> learned = GridPositions(2, 3, LearnedPositions(2, 8), LearnedPositions(3, 8))
    >>> learned(torch.zeros(5, 6, 16)).shape
    torch.Size([5, 6, 16])
    """

    def __init__(self, rows: int, columns: int, row: InputPosition, column: InputPosition) -> None:
        _check_count("rows", rows)
        _check_count("columns", columns)
        for name, count, part in (("rows", rows, row), ("columns", columns, column)):
            if part.length is not None and part.length < count:
                raise ValueError(
                    f"{name} ({count}) must not exceed the positions of its part ({part.length}); "
                    f"give the part {count} positions, or a part without an end such as "
                    "SinusoidalPositions"
                )
        super().__init__(row.width + column.width, rows * columns)
        self.rows = rows
        self.columns = columns
        self.row = row
        self.column = column

    def encoding(
        self, positions: Int[Tensor, "*P"], dtype: torch.dtype | None = None
    ) -> Float[Tensor, "*P D"]:
        row = self.row.encoding(positions // self.columns, dtype)
        column = self.column.encoding(positions % self.columns, dtype)
        return torch.cat((row, column), -1)

    def resize(self, rows: int, columns: int) -> "GridPositions":
        """Returns a copy for images of another size; its parts must reach that far."""
        return GridPositions(rows, columns, copy.deepcopy(self.row), copy.deepcopy(self.column))

    def extra_repr(self) -> str:
        return f"{self.rows}, {self.columns}"


@suggest_names
class LearnedGridPositions(LearnedPositions):
    """Adds a trained vector to every cell of a grid, numbered row by row: r_n = table[n].

    Shapes: x (B, L, D) → (B, L, D), table (P, D) with P = rows · columns. Dosovitskiy et al.
    (2021).

    >>> import torch
    >>> from regard import LearnedGridPositions
    >>> position = LearnedGridPositions(14, 14, 64)
    >>> position(torch.zeros(2, 196, 64)).shape
    torch.Size([2, 196, 64])
    >>> position.resize(24, 24)  # a copy for larger images
    LearnedGridPositions(24, 24, 64)
    """

    def __init__(self, rows: int, columns: int, width: int) -> None:
        _check_count("rows", rows)
        _check_count("columns", columns)
        super().__init__(rows * columns, width)
        self.rows = rows
        self.columns = columns

    def resize(self, rows: int, columns: int) -> "LearnedGridPositions":
        """Returns a copy for images of another size, with a bicubically resized table.

        Shrinking averages over the cells that fall together (antialiasing) and skips none.
        """
        with torch.device("meta"):  # nothing is drawn: the values come from this table
            resized = LearnedGridPositions(rows, columns, self.width)
        with torch.no_grad():
            dtype = torch.promote_types(self.table.dtype, torch.float32)
            image_1DYX = self.table.to(dtype).T.unflatten(-1, (self.rows, self.columns))[None]
            image_1DYX = F.interpolate(
                image_1DYX, (rows, columns), mode="bicubic", align_corners=False, antialias=True
            )
            table = image_1DYX[0].flatten(1).T.to(self.table.dtype).contiguous()
        resized.table = nn.Parameter(table, requires_grad=self.table.requires_grad)
        return resized.train(self.training)

    def extra_repr(self) -> str:
        return f"{self.rows}, {self.columns}, {self.width}"


@suggest_names
class Concatenated(InputPosition):
    """Puts another position's vectors beside the input instead of adding them: [x_n; r_n].

    Shapes: x (..., L, D) → (..., L, E) with E = D + position.width. Every matrix that reads the
    result is as much wider. Adding is concatenating with tied weights, W (x + r) = [W W] [x; r], so
    concatenating can only gain by the freedom of the second matrix, and pays for it.

    >>> import torch
    >>> from regard import Concatenated, SinusoidalPositions
    >>> position = Concatenated(SinusoidalPositions(4))
    >>> position(torch.full((2, 3), 7.0))
    tensor([[7.0000, 7.0000, 7.0000, 0.0000, 1.0000, 0.0000, 1.0000],
            [7.0000, 7.0000, 7.0000, 0.8415, 0.5403, 0.0100, 0.9999]])
    """

    def __init__(self, position: InputPosition) -> None:
        if not isinstance(position, InputPosition):
            raise ValueError(
                f"Concatenated ({shown(position)}) needs positions; for example "
                "Concatenated(SinusoidalPositions(32))"
            )
        super().__init__(position.width, position.length)
        self.position = position

    def encoding(
        self, positions: Int[Tensor, "*P"], dtype: torch.dtype | None = None
    ) -> Float[Tensor, "*P D"]:
        return self.position.encoding(positions, dtype)

    def forward(self, x: Float[Tensor, "*B L D"], at: Positions = 0) -> Float[Tensor, "*B L E"]:
        """Appends the vectors of the positions `at` to the rows of x: (..., L, D) → (..., L, E)."""
        return torch.cat((x, self.vectors(x, at).expand(*x.shape[:-1], -1)), -1)


class AttentionPosition(nn.Module):
    """A position that acts inside the attention; `MultiHeadAttention(position=…)` takes one.

    The layer calls `rotate` on queries and on keys, each with their own positions, and adds `bias`
    to the scores. By default both do nothing: a position overrides the one it needs.
    """

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        _check_signature(cls, "rotate", "x, at=0")
        _check_signature(cls, "bias", "L, S, offset=None, device=None, dtype=None")

    def rotate(self, x: Float[Tensor, "*B L K"], at: Positions = 0) -> Float[Tensor, "*B L K"]:
        """Returns queries or keys x at the positions `at`: (..., L, K) → (..., L, K)."""
        return x

    def bias(
        self,
        L: int,
        S: int,
        offset: int | Int[Tensor, ""] | Int[Tensor, "B"] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> Float[Tensor, "#B H L S"] | None:
        """Returns the bias of the scores, (B, H, L, S) or (1, H, L, S); None adds nothing.

        Query i stands at source position i + offset. The offset is one for all sequences, or one
        for each, (B,). None, the default, means S - L: the last query stands at the last source
        position.
        """
        return None


@suggest_names
class RotaryEmbedding(AttentionPosition):
    """Rotates queries and keys by angles proportional to their positions (RoPE).

        (a, b) ↦ (a cos θ - b sin θ, a sin θ + b cos θ),  θ = n / base^{2k/width}

    for the pair k of columns at position n. The score of a query at i and a key at j depends on
    i - j alone: (R_i q)·(R_j k) = q·R_{j-i} k. Shapes: x (..., L, K) → (..., L, K). RoFormer, Su et
    al. (2021). `MultiHeadAttention(position=…)` and `Transformer` take it.

    Only the first `width` columns turn; queries and keys may be wider. Column 2k pairs with 2k + 1
    as in the paper, or with `layout="halves"` column k with k + width/2, as GPT-NeoX and Llama have
    it. Angles are computed in float64, so that cosines and sines are exact up to float32's rounding
    at any position, in every kernel; half-precision inputs are rotated in float32.

    >>> import torch
    >>> from regard import MultiHeadAttention, RotaryEmbedding
    >>> rotary = RotaryEmbedding(2)
    >>> rotary.rotate(torch.tensor([[1.0, 0.0]]), at=1)  # cos 1, sin 1
    tensor([[0.5403, 0.8415]])
    >>> query, key = torch.tensor([[[3.0, 1.0]], [[2.0, 5.0]]])
    >>> for i, j in (4, 1), (104, 101):  # the same distance, the same score
    ...     score = rotary.rotate(query, at=i) @ rotary.rotate(key, at=j).T
    ...     print(f"{score.item():.4f}")
    -9.0554
    -9.0554
    >>> layer = MultiHeadAttention(512, 8, position=RotaryEmbedding(64))
    """

    def __init__(
        self, width: int, base: int | float = 10000, layout: Layout = "interleaved"
    ) -> None:
        super().__init__()
        _check_count("width", width)
        _check_base(base)
        if width % 2:
            raise ValueError(
                f"width ({width}) must be even, since columns turn in pairs; "
                f"try {width + 1}, or {width - 1} of wider queries and keys"
            )
        self.width = width
        self.base = base
        self.pair_axis = _pair_axis(layout)
        self.layout = layout

    def rotate(self, x: Float[Tensor, "*B L K"], at: Positions = 0) -> Float[Tensor, "*B L K"]:
        if x.shape[-1] < self.width:
            raise ValueError(
                f"width ({self.width}) must not exceed the key width ({x.shape[-1]}); "
                f"try RotaryEmbedding({x.shape[-1] // 2 * 2})"
            )
        if isinstance(at, Tensor) and at.shape == (1, x.shape[-2]) and x.ndim == 4 and len(x) == 1:
            halves = self.pair_axis == -2
            if fuses(x):
                from regard.attention.rotation import rotate  # needs Triton

                return rotate(x, at[0], self.width, self.base, halves)
            if rotation_cpu.takes(x, at):
                these = rotation_cpu.Pairs(self.width, self.base, halves)
                return rotation_cpu.rotate(x, at[0], these)
        dtype = torch.promote_types(x.dtype, torch.float32)
        angles = _angles(places(x, at), self.width, self.base)
        cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
        sizes = (-1, 2) if self.pair_axis == -1 else (2, -1)
        a, b = x[..., : self.width].to(dtype).unflatten(-1, sizes).unbind(self.pair_axis)
        pairs = torch.stack((a * cos - b * sin, a * sin + b * cos), self.pair_axis)
        rotated = pairs.flatten(-2).to(x.dtype)
        if x.shape[-1] == self.width:
            return rotated
        return torch.cat((rotated, x[..., self.width :]), -1)

    def extra_repr(self) -> str:
        return f"{self.width}, base={self.base}, layout={self.layout!r}"


Rotary = RotaryEmbedding


@suggest_names
class ALiBi(AttentionPosition):
    """Lowers the score of a query and a key in proportion to their distance.

        bias_h(i, j) = -slope_h |i - j|,  slope_h = 2^{-8h/H} for h = 1…H

    where H is a power of two. Otherwise the slopes of the next lower power p come first, and then
    every other one, from the first, of those of 2p. "Attention with Linear Biases", Press et al.
    (2022). Shapes: bias (1, H, L, S). It has no parameters and no end. In a packed batch of
    self-attention the plain distance is already the one within the sequence.

    >>> from regard import ALiBi, MultiHeadAttention
    >>> alibi = ALiBi(2)
    >>> alibi.slopes()
    tensor([0.0625, 0.0039])
    >>> alibi.bias(L=1, S=4)[0, 0]  # the query stands at the last key
    tensor([[-0.1875, -0.1250, -0.0625, -0.0000]])
    >>> layer = MultiHeadAttention(512, 8, position=ALiBi(8))
    """

    def __init__(self, heads: int) -> None:
        super().__init__()
        _check_count("heads", heads)
        self.heads = heads

    def slopes(self, device: torch.device | str | None = None) -> Float[Tensor, " H"]:
        """Returns the slope of each head, (H,)."""
        # Computed on the device at every call: a buffer would be rounded by .to(torch.bfloat16)
        # and left unset by to_empty() after construction on the meta device.
        power = 1 << (self.heads.bit_length() - 1)
        first = torch.arange(1, power + 1, dtype=torch.float32, device=device) / power
        others = torch.arange(self.heads - power, dtype=torch.float32, device=device)
        return torch.exp2(-8 * torch.cat((first, (2 * others + 1) / (2 * power))))

    def bias(
        self,
        L: int,
        S: int,
        offset: int | Int[Tensor, ""] | Int[Tensor, "B"] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> Float[Tensor, "#B H L S"]:
        for name, length in (("L", L), ("S", S)):
            if length < 0:
                raise ValueError(f"{name} ({length}) must not be negative; give a number of rows")
        if isinstance(offset, Tensor):
            _check_integers("offset", offset)
            if offset.ndim > 1:
                raise ValueError(
                    f"offset of shape {tuple(offset.shape)} must be an int, or a tensor without "
                    "axes or with one; give one offset for the batch, or one for each sequence"
                )
            device = offset.device if device is None else device
            offset = offset.view(-1, 1)
        queries_BL = torch.arange(L, device=device)[None] + (S - L if offset is None else offset)
        distance_BLS = (queries_BL[:, :, None] - torch.arange(S, device=device)).abs()
        bias_BHLS = -self.slopes(device)[:, None, None] * distance_BLS[:, None]
        return bias_BHLS.to(dtype or torch.get_default_dtype())

    def extra_repr(self) -> str:
        return f"{self.heads}"


def places(x: Float[Tensor, "*B L X"], at: Positions) -> Int[Tensor, "*R L"]:
    """The position of each row of x, in a shape that broadcasts against x without its last axis."""
    if x.ndim < 2:
        raise ValueError(f"x of shape {tuple(x.shape)} needs rows and columns; give it (..., L, D)")
    length = x.shape[-2]
    if isinstance(at, int):
        return torch.arange(at, at + length, device=x.device)
    _check_integers("at", at)
    if at.ndim == 0:
        return at + torch.arange(length, device=x.device)
    if at.device != x.device:
        raise ValueError(
            f"positions on {at.device} must be where x is; use at.to({str(x.device)!r})"
        )
    if at.ndim > 2 or at.shape[-1] != length:
        raise ValueError(
            f"positions of shape {tuple(at.shape)} do not match {length} rows; give an offset, or "
            f"positions of shape ({length},) or (batch, {length})"
        )
    if at.ndim == 1:
        return at
    if x.ndim < 3 or not broadcasts(at.shape[0], x.shape[0]):
        raise ValueError(
            f"positions of shape {tuple(at.shape)} do not match x of shape {tuple(x.shape)}; the "
            "first axis of both must be the batch"
        )
    # (B, L) against (B, H, L, K): the batch leads, the axes between are shared.
    return at.view(at.shape[0], *[1] * (x.ndim - 3), length)


def _angles(positions: Int[Tensor, "*P"], width: int, base: int | float) -> Float[Tensor, "*P W"]:
    """n / base^{i/width} for i = 0, 2, 4, …, in float64.

    The frequencies are computed at every call rather than kept in a buffer, which .to(bfloat16)
    would round and to_empty() after construction on the meta device would leave unset.
    """
    i = torch.arange(0, width, 2, dtype=torch.float64, device=positions.device)
    return positions.double().unsqueeze(-1) / base ** (i / width)


def _pair_axis(layout: Layout) -> Literal[-1, -2]:
    """The axis on which the two numbers of a pair lie, once the width is split into pairs."""
    match layout:
        case "interleaved":
            return -1
        case "halves":
            return -2
    raise ValueError(f"layout ({layout!r}) is unknown; choose from {', '.join(get_args(Layout))}")


def _check_reach(length: int, at: Positions, rows: int) -> None:
    # Explicit positions may repeat, so their number has no limit.
    first = 0 if isinstance(at, Tensor) else at
    if first < 0:
        raise ValueError(f"position {first} must not be negative; the positions start at 0")
    if first + rows > length and not (isinstance(at, Tensor) and at.ndim):
        raise ValueError(
            f"position {first + rows - 1} is beyond the {length} positions there are; use one with "
            f"{first + rows} positions, shorter sequences, or SinusoidalPositions, which has no end"
        )


def _check_integers(name: str, tensor: Tensor) -> None:
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        raise ValueError(f"{name} ({tensor.dtype}) must hold integers; use {name}.long()")


def _check_count(name: str, count: int) -> None:
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise ValueError(f"{name} ({count!r}) must be a positive integer; try 1 or more")


def _check_base(base: int | float) -> None:
    if not 0 < base < math.inf:
        raise ValueError(f"base ({base}) must be a positive number; the paper's is 10000")
