"""Alternatives to attention: recurrence, convolution, one dense layer.

    recurrent     h_n = cell(x_n, h_{n-1})           one step after the other
    convolution   y_n = Σ_δ W_δ x_{n+δ} + b          a weight for each distance
    dense         y_n = Σ_m W_{nm} x_m + b_n         a weight for each pair of positions

Each takes the place of self-attention in a block, so that nothing but the mixing of tokens differs:

    Transformer(config, attention=lambda position: Recurrent(config.width))

They obey a model's masks as attention does: under `causal()` nothing comes from the right, under
`padding(lengths)` nothing from the padding, under `packed(lengths)` nothing from another sequence.
Cross-attention and other masks are refused: only attention can do those.
"""

from typing import Literal, NamedTuple, TypeAlias, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.attention.arguments import check_input, check_mask
from regard.attention.cache import Cache, SelfCache
from regard.attention.checks import check_divides, check_integer, shown
from regard.attention.mask import Band, Mask, Padding
from regard.attention.packed import Packed

Kind: TypeAlias = Literal["lstm", "gru"]


class Order(NamedTuple):
    """A mask, for a layer that has no weights for pairs."""

    causal: bool = False
    lengths: Tensor | None = None
    packed: Packed | None = None


class Baseline(nn.Module):
    """A layer with the interface of self-attention; subclasses define `mix` and `step`."""

    def __init__(self, width: int):
        super().__init__()
        check_integer("width", width)
        self.width = width

    def forward(
        self,
        x: Float[Tensor, "B L D"],
        source: Float[Tensor, "B S E"] | None = None,
        *,
        mask: Mask | None = None,
        cache: Cache | None = None,
    ) -> Float[Tensor, "B L D"]:
        name = type(self).__name__
        check_input("x", x, "width", self.width, next(self.parameters()).dtype)
        if source is not None:
            raise ValueError(
                f"{name} mixes one sequence, but a source of shape {tuple(source.shape)} was "
                "given; use MultiHeadAttention to read another"
            )
        order = _order(name, mask, x)
        if cache is not None:
            self._check_cache(name, order, cache, mask)
            return self.step(x, order.causal, cache) if x.numel() else x
        if not x.numel():
            return x
        if order.packed is None:
            return self.mix(_emptied(x, order.lengths), order.causal, order.lengths)
        at = order.packed.sequence(), order.packed.positions()[0]
        rows = x.new_zeros(len(order.packed), order.packed.longest, self.width)
        rows = rows.index_put(at, x[0])
        lengths = order.packed.offsets.diff().long()
        return self.mix(rows, order.causal, lengths)[at][None]

    def mix(
        self, x: Float[Tensor, "B L D"], causal: bool, lengths: Int[Tensor, " B"] | None
    ) -> Float[Tensor, "B L D"]:
        """Every row from the rows it may see; what follows a sequence's length is zero."""
        raise NotImplementedError(f"{type(self).__name__} does not say how it mixes rows")

    def step(self, x: Float[Tensor, "B L D"], causal: bool, cache: Cache) -> Tensor:
        """The new rows' result, after those that the cache has."""
        raise NotImplementedError(f"{type(self).__name__} does not decode step by step")

    def _check_cache(self, name: str, order: Order, cache: Cache, mask: Mask | None) -> None:
        if not isinstance(cache, SelfCache):
            raise ValueError(f"cache ({shown(cache)}) of a {name} must be a SelfCache()")
        if order.lengths is not None or order.packed is not None:
            raise ValueError(
                f"{mask} says where sequences end, but those in a cache still grow; pass causal() "
                "alone, with one row for each sequence"
            )


class Recurrent(Baseline):
    """An LSTM (Hochreiter & Schmidhuber 1997) or a GRU (Cho et al. 2014).

    One way it never sees what comes after. With `both` a second one reads from the end, each half
    as wide, and their states stand side by side.
    """

    def __init__(self, width: int, kind: Kind = "lstm", both: bool = False):
        super().__init__(width)
        if kind not in get_args(Kind):
            raise ValueError(f"kind ({kind!r}) is unknown; choose from {', '.join(get_args(Kind))}")
        if both and width % 2:
            raise ValueError(
                f"both directions share the width ({width}), which must be even; try {width + 1}"
            )
        hidden = width // 2 if both else width
        make = {"lstm": nn.LSTM, "gru": nn.GRU}[kind]
        self.forwards = make(width, hidden, batch_first=True)
        self.backwards = make(width, hidden, batch_first=True) if both else None

    def mix(
        self, x: Float[Tensor, "B L D"], causal: bool, lengths: Int[Tensor, " B"] | None
    ) -> Float[Tensor, "B L D"]:
        after, _ = self.forwards(x)
        if self.backwards is None:
            return after
        self._check_causal(causal)
        # The real rows from last to first and the filling behind them, so that none of it is read
        # before a real row; the same index brings the result back.
        L = x.shape[1]
        ends = (
            torch.full((len(x),), L, device=x.device) if lengths is None else lengths.to(x.device)
        )
        index = torch.arange(L, device=x.device)
        turned = torch.where(index < ends[:, None], ends[:, None] - 1 - index, index)[..., None]
        before, _ = self.backwards(x.take_along_dim(turned, 1))
        return torch.cat((after, before.take_along_dim(turned, 1)), -1)

    def step(self, x: Float[Tensor, "B L D"], causal: bool, cache: Cache) -> Float[Tensor, "B L D"]:
        """From the last state, which is kept where attention keeps keys and values.

        A cell's own state stands beside each output, so rows are read one by one: any of them may
        turn out to be the last.
        """
        self._check_causal(self.backwards is not None)
        gru = isinstance(self.forwards, nn.GRU)
        cache.check(x, 1, self.width, 0 if gru else self.width)
        state: Tensor | tuple[Tensor, ...] | None = None
        if cache.held is not None:
            last = _positions(cache, 1, x)[:, None, :, None] - 1
            # (B, 1, 1, D) to the (1, B, D) of torch's layers; what has just begun has a state of 0.
            kept = (t.take_along_dim(last.clamp_min(0), 2).where(last >= 0, 0) for t in cache.held)
            h, c = (t[:, 0].transpose(0, 1).contiguous() for t in kept)
            state = h if gru else (h, c)
        outputs, cells = [], []
        for row in x.split(1, 1):
            output, state = self.forwards(row, state)
            outputs.append(output)
            cells.append(output[..., :0] if gru else state[1].transpose(0, 1))
        after, inside = torch.cat(outputs, 1), torch.cat(cells, 1)
        cache.extend(lambda: (after[:, None], inside[:, None]))
        return after

    def _check_causal(self, causal: bool) -> None:
        if causal and self.backwards is not None:
            raise ValueError(
                "Recurrent(both=True) reads from the end, but causal() hides what comes after; "
                "use both=False"
            )


class Convolution(Baseline):
    """Each row from `kernel` rows around it, or, where it is causal, from those up to it.

    The first tap belongs to the leftmost row. A causal mask makes any convolution causal; `causal`
    makes it so without one. `groups` split the width into parts that do not mix: with `groups` as
    many as the width it is depthwise (LeCun et al. 1989; van den Oord et al. 2016 for causal ones).
    """

    def __init__(self, width: int, kernel: int, causal: bool = False, groups: int = 1):
        super().__init__(width)
        check_integer("kernel", kernel)
        check_integer("groups", groups)
        check_divides("groups", groups, "width", width)
        self.kernel, self.causal = kernel, causal
        self.convolution = nn.Conv1d(width, width, kernel, groups=groups)

    def mix(
        self, x: Float[Tensor, "B L D"], causal: bool, lengths: Int[Tensor, " B"] | None
    ) -> Float[Tensor, "B L D"]:
        around = self.kernel - 1
        left = around if causal or self.causal else around // 2
        return self._taps(F.pad(x, (0, 0, left, around - left)))

    def step(self, x: Float[Tensor, "B L D"], causal: bool, cache: Cache) -> Float[Tensor, "B L D"]:
        """From the last rows of the input, which are kept where attention keeps its keys."""
        _check_asked("Convolution", causal or self.causal)
        first = _positions(cache, 1, x)
        rows = _kept(x, cache)
        index = first + torch.arange(1 - self.kernel, x.shape[1], device=x.device)
        near = rows.take_along_dim(index.clamp_min(0)[..., None], 1)
        return self._taps(near.masked_fill((index < 0)[..., None], 0))

    def extra_repr(self) -> str:
        return f"{self.width}, {self.kernel}, causal={self.causal}"

    def _taps(self, x: Tensor) -> Tensor:
        return self.convolution(x.transpose(1, 2)).transpose(1, 2)


class Dense(Baseline):
    """One dense layer over all rows at once: `length`·`width` numbers in, as many out.

    Its weights are tied to absolute positions and their number grows with the square of the length.
    A shorter sequence uses the weights of the first positions.
    """

    def __init__(self, width: int, length: int):
        super().__init__(width)
        check_integer("length", length)
        self.length = length
        self.dense = nn.Linear(length * width, length * width)

    def mix(
        self, x: Float[Tensor, "B L D"], causal: bool, lengths: Int[Tensor, " B"] | None
    ) -> Float[Tensor, "B L D"]:
        self._check_length("a sequence", x.shape[1])
        return self._rows(x, torch.arange(x.shape[1], device=x.device)[None], causal)

    def step(self, x: Float[Tensor, "B L D"], causal: bool, cache: Cache) -> Float[Tensor, "B L D"]:
        """From all rows so far, which are kept where attention keeps its keys."""
        _check_asked("Dense", causal)
        at = _positions(cache, x.shape[1], x)
        rows = _kept(x, cache)
        self._check_length("a cache", rows.shape[1])
        return self._rows(rows, at, causal)

    def _rows(self, x: Tensor, at: Tensor, causal: bool) -> Tensor:
        """The result at the positions `at`, (1, L) or (B, L), of the rows x from the first on."""
        S, n, D = x.shape[1], self.length, self.width
        weight_BLDSD = self.dense.weight.view(n, D, n, D)[at, :, :S]
        if causal:
            later_BLS = torch.arange(S, device=x.device) > at[..., None]
            weight_BLDSD = weight_BLDSD.masked_fill(later_BLS[:, :, None, :, None], 0)
        bias_BLD = self.dense.bias.view(n, D)[at]
        return torch.einsum("bsd,blesd->ble", x, weight_BLDSD.expand(len(x), *[-1] * 4)) + bias_BLD

    def _check_length(self, what: str, rows: int) -> None:
        if rows > self.length:
            raise ValueError(
                f"{what} of {rows} positions is longer than Dense's length ({self.length}); use "
                f"Dense({self.width}, {rows}), or shorter sequences"
            )


def _order(name: str, mask: Mask | None, x: Tensor) -> Order:
    """The mask as these layers understand it."""
    check_mask(mask)
    order = Order()
    for part in () if mask is None else mask.parts:
        part.check(len(x), x.shape[1], x.shape[1])
        packing = part.packing
        if isinstance(part, Band) and (part.left, part.right, part.offset) == (None, 0, None):
            order = order._replace(causal=True)
        elif isinstance(part, Padding):
            order = order._replace(lengths=part.lengths)
        elif packing is not None and packing.query is packing.source:
            order = order._replace(packed=packing.query.to(x.device))
        else:
            raise ValueError(
                f"{name} has no weights for pairs and cannot obey {part}; it knows causal(), "
                "padding(lengths) and packed(lengths), and MultiHeadAttention every mask"
            )
    return order


def _emptied(x: Tensor, lengths: Tensor | None) -> Tensor:
    """Sets rows after each sequence's length to zero."""
    if lengths is None:
        return x
    index = torch.arange(x.shape[1], device=x.device)
    return x.masked_fill((index >= lengths.to(x.device)[:, None])[..., None], 0)


def _positions(cache: Cache, count: int, x: Tensor) -> Tensor:
    """Where the next rows of x stand, (1, count), or (B, count) where sequences differ."""
    at = cache.places(count)
    if isinstance(at, Tensor) and at.ndim:
        return at
    return (torch.as_tensor(at, device=x.device) + torch.arange(count, device=x.device))[None]


def _kept(x: Tensor, cache: Cache) -> Tensor:
    """All rows so far, (B, S, D), in the room for keys; nothing is kept for values."""
    cache.check(x, 1, x.shape[-1], 0)
    rows, _, _ = cache.extend(lambda: (x[:, None], x[:, None, :, :0]))
    return rows[:, 0]


def _check_asked(name: str, causal: bool) -> None:
    if not causal:
        raise ValueError(
            f"a cache holds what came before, but {name} would read what comes after as well; "
            "pass mask=causal()"
        )
