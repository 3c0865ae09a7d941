"""Alternatives to attention: recurrence, convolution, one dense layer.

    recurrent     h_n = cell(x_n, h_{n-1})           one step after the other
    convolution   y_n = Σ_δ W_δ x_{n+δ} + b          a weight for each distance
    dense         y_n = Σ_m W_{nm} x_m + b_n         a weight for each pair of positions

Each replaces self-attention in a block, so that only the mixing of tokens differs:

    Transformer(config, attention=lambda position: Recurrent(config.width))

They obey a model's masks as attention does: under `causal()` nothing comes from the right, under
`padding(lengths)` nothing from the padding, under `packed(lengths)` nothing from another sequence.
Cross-attention and other masks raise an error: they need attention.
"""

from typing import Literal, NamedTuple, TypeAlias, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from regard.attention.arguments import as_mask, check_input
from regard.attention.cache import Cache, SelfCache
from regard.attention.checks import check_divides, check_integer, shown
from regard.attention.mask import Band, Mask, Padding
from regard.attention.packed import PackedLengths

Kind: TypeAlias = Literal["lstm", "gru"]


class Order(NamedTuple):
    """A mask as a layer without weights for pairs understands it."""

    causal: bool = False
    lengths: Tensor | None = None
    packed: PackedLengths | None = None


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
        mask: Mask | Bool[Tensor, "..."] | None = None,
        cache: Cache | None = None,
    ) -> Float[Tensor, "B L D"]:
        name = type(self).__name__
        check_input("x", x, "width", self.width, next(self.parameters()).dtype)
        if source is not None:
            raise ValueError(
                f"{name} mixes one sequence, but a source of shape {tuple(source.shape)} was "
                "given; use MultiHeadAttention to read another"
            )
        rule = as_mask(mask)
        order = _order(name, rule, x)
        if cache is not None:
            self._check_cache(name, order, cache, rule)
            return self.step(x, order.causal, cache) if x.numel() else x
        if not x.numel():
            return x
        if order.packed is None:
            return self.mix(_clear_padding(x, order.lengths), order.causal, order.lengths)
        at = order.packed.sequence(), order.packed.positions()[0]
        rows = x.new_zeros(len(order.packed), order.packed.longest, self.width)
        rows = rows.index_put(at, x[0])
        lengths = order.packed.offsets.diff().long()
        return self.mix(rows, order.causal, lengths)[at][None]

    def mix(
        self, x: Float[Tensor, "B L D"], causal: bool, lengths: Int[Tensor, " B"] | None
    ) -> Float[Tensor, "B L D"]:
        """Every row from the rows it may see; rows after a sequence's length are zero."""
        raise NotImplementedError(f"{type(self).__name__} does not define mix")

    def step(self, x: Float[Tensor, "B L D"], causal: bool, cache: Cache) -> Tensor:
        """The result of new rows, which follow those in the cache."""
        raise NotImplementedError(f"{type(self).__name__} does not decode step by step")

    def _check_cache(self, name: str, order: Order, cache: Cache, mask: Mask | None) -> None:
        if not isinstance(cache, SelfCache):
            raise ValueError(f"cache ({shown(cache)}) of a {name} must be a SelfCache()")
        if order.lengths is not None or order.packed is not None:
            raise ValueError(
                f"{mask} limits sequences to their lengths, but those in a cache still grow; pass "
                "causal() alone, with one row for each sequence"
            )


class Recurrent(Baseline):
    """An LSTM (Hochreiter & Schmidhuber 1997) or a GRU (Cho et al. 2014).

    It reads from the start and never sees later rows. With `both` a second one reads from the end;
    each is half as wide, and their states are concatenated.
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
        # The real rows from last to first, with the padding after them, so that no padding is read
        # before a real row; the same index restores the order.
        L = x.shape[1]
        ends = torch.full((len(x),), L, device=x.device) if lengths is None else lengths
        ends = ends.to(x.device)[:, None]
        index = torch.arange(L, device=x.device)
        reverse = torch.where(index < ends, ends - 1 - index, index)[..., None]
        before, _ = self.backwards(x.take_along_dim(reverse, 1))
        return torch.cat((after, before.take_along_dim(reverse, 1)), -1)

    def step(self, x: Float[Tensor, "B L D"], causal: bool, cache: Cache) -> Float[Tensor, "B L D"]:
        """Continues from the last state, which is stored in place of keys and values.

        The state of a cell is stored with each output, so rows are read one by one: any of them may
        become the last.
        """
        self._check_causal(self.backwards is not None)
        gru = isinstance(self.forwards, nn.GRU)
        cache.check(x, 1, self.width, 0 if gru else self.width)
        state: Tensor | tuple[Tensor, ...] | None = None
        if cache.held is not None:
            last = _positions(cache, 1, x)[:, None, :, None] - 1
            # (B, 1, 1, D) to the (1, B, D) of torch's layers; a new sequence has a state of 0.
            states = (
                t.take_along_dim(last.clamp_min(0), 2).where(last >= 0, 0) for t in cache.held
            )
            h, c = (t[:, 0].transpose(0, 1).contiguous() for t in states)
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
    """Computes each row from `kernel` rows around it, or up to it if the layer is causal.

    The first tap belongs to the leftmost row. A causal mask makes any convolution causal; `causal`
    makes it so without one. `groups` split the width into parts that do not mix; as many groups as
    the width make it depthwise (LeCun et al. 1989; van den Oord et al. 2016 for causal ones).
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
        """Continues from the last rows of the input, which are stored in place of keys."""
        _check_step("Convolution", causal or self.causal)
        first = _positions(cache, 1, x)
        rows = _append(x, cache)
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
        """Continues from all previous rows, which are stored in place of keys."""
        _check_step("Dense", causal)
        at = _positions(cache, x.shape[1], x)
        rows = _append(x, cache)
        self._check_length("a cache", rows.shape[1])
        return self._rows(rows, at, causal)

    def _rows(self, x: Tensor, at: Tensor, causal: bool) -> Tensor:
        """The result at the positions `at`, (1, L) or (B, L), from all rows x of the sequence."""
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
                f"{name} has no weights for pairs and cannot obey {part}; it supports causal(), "
                "padding(lengths) and packed(lengths), and MultiHeadAttention every mask"
            )
    return order


def _clear_padding(x: Tensor, lengths: Tensor | None) -> Tensor:
    """Sets rows after each sequence's length to zero."""
    if lengths is None:
        return x
    index = torch.arange(x.shape[1], device=x.device)
    return x.masked_fill((index >= lengths.to(x.device)[:, None])[..., None], 0)


def _positions(cache: Cache, count: int, x: Tensor) -> Tensor:
    """The positions of the next rows of x, (1, count), or (B, count) if lengths differ."""
    at = cache.places(count)
    if isinstance(at, Tensor) and at.ndim:
        return at
    return (torch.as_tensor(at, device=x.device) + torch.arange(count, device=x.device))[None]


def _append(x: Tensor, cache: Cache) -> Tensor:
    """Appends x to the cache as keys, without values, and returns all rows so far, (B, S, D)."""
    cache.check(x, 1, x.shape[-1], 0)
    rows, _, _ = cache.extend(lambda: (x[:, None], x[:, None, :, :0]))
    return rows[:, 0]


def _check_step(name: str, causal: bool) -> None:
    if not causal:
        raise ValueError(
            f"a cache holds only earlier rows, but {name} would read later ones as well; pass "
            "mask=causal()"
        )
