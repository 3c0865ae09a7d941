"""The KV cache: keys and values of earlier decoding steps, so that a step computes only new ones.

`SelfCache` grows by the new positions of each step; `CrossCache` is filled once from the source.
Both are reordered by `select(rows)`, for beam search: row r of the result continues row rows[r].
Rows may have different lengths: `trim` shortens each to its own, and `join` appends the rows of
another cache. All of these change the cache in place.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Int
from torch import Tensor

from regard.attention.checks import MAX_LENGTH, check_integer, integer_tensor, shown
from regard.attention.mask import Mask, Prefix
from regard.attention.position import Positions
from regard.attention.sync import capturing, on_host
from regard.synonyms import suggest_names

Pair = tuple[Tensor, Tensor]
"""Keys (B, G, S, K) and values (B, G, S, V)."""


STEP = 16
"""Positions by which a cache is larger than its longest row, so that not every step copies it."""


_CONTENTS = "{} heads, keys {} and values {} wide, {} on {}"


class Cache:
    """The interface of a KV cache; a custom one overrides `length` and `extend`.

    Its methods change it in place, and return nothing unless they say so.
    """

    across: ClassVar[bool] = False
    """True if the keys belong to another sequence than the queries, in cross-attention."""

    def __init__(self) -> None:
        self.held: Pair | None = None

    @property
    def length(self) -> int | Tensor:
        """The number of earlier positions of the query's own sequence, one or one for each row."""
        return 0

    def places(self, count: int) -> Positions:
        """Returns the next `count` positions of the query's own sequence: an offset, or (B, L)."""
        length = self.length
        if isinstance(length, int) or length.ndim == 0:
            return length
        return length[:, None] + torch.arange(count, device=length.device)

    def check(self, query: Tensor, heads: int, key_width: int, value_width: int) -> None:
        """Raises ValueError for a module of other sizes than the keys and values in the cache."""
        if self.held is None:
            return
        have = _contents(self.held)
        need = (heads, key_width, value_width, query.dtype, query.device)
        if have != need:
            raise ValueError(
                f"the cache holds {_CONTENTS.format(*have)}, but this module has "
                f"{_CONTENTS.format(*need)}; use one cache for each module"
            )

    def extend(
        self, project: Callable[[], Pair], mask: Mask | None = None
    ) -> tuple[Tensor, Tensor, Mask | None]:
        """Appends new positions in place, and returns all keys and values, and their mask.

        `project` computes keys (B, G, L, K) and values (B, G, L, V) of the new positions; a filled
        `CrossCache` skips it. Returns keys (B, G, S, K), values (B, G, S, V) and the mask as it
        applies to them. `MultiHeadAttention` calls this.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define extend")

    def select(self, rows: Sequence[int] | Int[Tensor, "R"]) -> None:
        """Keeps, drops, repeats or reorders rows, in place.

        Row r continues the old row rows[r]; rows (R,).
        """
        chosen = integer_tensor(rows, "rows")
        if self.held is None:
            return
        key, value = self.held
        _check_rows(chosen, len(key))
        chosen = chosen.to(key.device, torch.int64)
        with _lasting():
            self.held = key.index_select(0, chosen), value.index_select(0, chosen)

    def join(self, other: "Cache") -> None:
        """Appends the rows of another cache of the same module, in place.

        The shorter one is padded with zeros, for a mask to hide.
        """
        if self.held is None or other.held is None:
            raise ValueError("an empty cache has no rows to join; take a step with both first")
        both = _contents(self.held), _contents(other.held)
        if both[0] != both[1]:
            have, others = (_CONTENTS.format(*contents) for contents in both)
            raise ValueError(
                f"a cache of {have} cannot join one of {others}; join caches of one module"
            )
        size = max(self.held[0].shape[-2], other.held[0].shape[-2])
        key, value = (
            torch.cat([F.pad(x, (0, 0, 0, size - x.shape[-2])) for x in both])
            for both in zip(self.held, other.held)
        )
        self.held = key, value


@suggest_names
class SelfCache(Cache):
    """The keys and values of the positions decoded so far, for self-attention.

    A step passes new positions alone, x (B, L, D), and attends to all earlier ones too; one cache
    serves one `MultiHeadAttention`, and the models' `cache()` makes those of all layers.

    Without a capacity it grows, by doubling, and attention sees only the filled part. With one it
    is allocated once and never changes its shape: attention runs over all of it with the rest
    masked, and the filled length is a tensor on the device, so that a step can be captured in a
    CUDA graph or compiled once.

    While gradients are recorded, buffers are not overwritten: gradients reach back through all
    steps.

    >>> import torch
    >>> from regard import MultiHeadAttention, SelfCache, causal
    >>> layer, cache = MultiHeadAttention(64, 4), SelfCache()
    >>> x = torch.randn(2, 5, 64)
    >>> steps = [layer(x[:, n : n + 1], mask=causal(), cache=cache) for n in range(5)]
    >>> torch.allclose(torch.cat(steps, 1), layer(x, mask=causal()), atol=1e-6)
    True
    >>> cache.length
    5
    >>> cache.select([1, 1, 0])  # in place: now three rows
    """

    def __init__(self, capacity: int | None = None):
        super().__init__()
        if capacity is not None:
            check_integer("capacity", capacity, 1, MAX_LENGTH)
        self.capacity = capacity
        self._filled = 0  # in the longest row
        self._length: Tensor | None = None
        self._lengths: Tensor | None = None

    @property
    def length(self) -> int | Tensor:
        """The number of positions filled so far.

        An int; with a capacity a tensor on the device; (B,) where the rows differ.
        """
        if self._lengths is not None:
            return self._lengths
        # `extend` increments the tensor in place, so that a CUDA graph can too.
        return self._filled if self._length is None else self._length.clone()

    def trim(self, lengths: Int[Tensor, "B"]) -> None:
        """Keeps the first lengths[r] positions of row r, in place; lengths (B,).

        >>> import torch
        >>> from regard import MultiHeadAttention, SelfCache, causal
        >>> layer, cache = MultiHeadAttention(64, 4), SelfCache()
        >>> y = layer(torch.randn(2, 5, 64), mask=causal(), cache=cache)
        >>> cache.trim(torch.tensor([5, 3]))  # takes back two positions of row 1
        >>> cache.length
        tensor([5, 3])
        """
        self._check_growing("trim")
        if self.held is None:
            raise ValueError("an empty cache has no rows to trim; take a step first")
        lengths = integer_tensor(lengths, "lengths").to(torch.int64, copy=True)
        filled = self._row_lengths()
        if len(lengths) != len(filled):
            raise ValueError(
                f"{len(lengths)} lengths for a cache of {len(filled)} rows; pass one for each"
            )
        host = on_host(lengths) and on_host(filled)
        if host and bool(((lengths < 0) | (lengths > filled)).any()):
            raise ValueError(
                f"lengths ({shown(lengths)}) must lie from 0 to the lengths in the cache "
                f"({shown(filled)})"
            )
        self._lengths = lengths.to(filled.device)

    def select(self, rows: Sequence[int] | Int[Tensor, "R"]) -> None:
        super().select(rows)
        if self._lengths is None:
            return
        lengths = self._lengths[integer_tensor(rows, "rows").long().to(self._lengths.device)]
        self._lengths = lengths
        if self.held is not None and on_host(lengths) and len(lengths):
            # Rows may come and go without end; the room of the longest is freed with them.
            self._filled = int(lengths.max())
            size = (self._filled // STEP + 1) * STEP
            key, value = (held[..., :size, :] for held in self.held)
            self.held = key, value

    def join(self, other: Cache) -> None:
        if not isinstance(other, SelfCache):
            raise ValueError(f"a SelfCache joins another SelfCache, got a {type(other).__name__}")
        for cache in (self, other):
            cache._check_growing("join")
        first, second = (cache._row_lengths() for cache in (self, other))
        super().join(other)
        self._lengths = torch.cat((first, second))
        self._filled = max(self._filled, other._filled)

    def _row_lengths(self) -> Tensor:
        if self._lengths is not None:
            return self._lengths
        if self.held is None:
            return torch.empty(0)
        key = self.held[0]
        return torch.full((len(key),), self._filled, device=key.device)

    def _check_growing(self, what: str) -> None:
        if self.capacity is not None:
            raise ValueError(
                f"a SelfCache({self.capacity}) has one length for all rows and cannot {what}; "
                "make it without a capacity"
            )

    def extend(
        self, project: Callable[[], Pair], mask: Mask | None = None
    ) -> tuple[Tensor, Tensor, Mask | None]:
        new = project()
        start, end = self._filled, self._filled + new[0].shape[-2]
        self._check_room(new, end)
        if self._lengths is not None:
            return self._extend_each(new, mask)
        if self.capacity is None:
            keys, values = self._append(new, start, end)
            self._filled = end
            return keys[..., :end, :], values[..., :end, :], mask
        if self._length is None:
            self.held = self._room(new, self.capacity)
            with _lasting():
                self._length = torch.zeros((), dtype=torch.int64, device=new[0].device)
        before = self._length.clone()
        keys, values = self._fill(new, before + torch.arange(end - start, device=before.device))
        self._filled = end
        self._length += end - start
        filled = Prefix(before + (end - start))
        # The mask is the sequence's, which ends where the keys do and not where the buffer does.
        return keys, values, filled if mask is None else mask.at(before) & filled

    def _extend_each(self, new: Pair, mask: Mask | None) -> tuple[Tensor, Tensor, Mask | None]:
        """Rows of different lengths, each extended at its own end."""
        assert self._lengths is not None
        before, n = self._lengths, new[0].shape[-2]
        end = self._filled + n
        if self.held is None or end > self.held[0].shape[-2] or torch.is_grad_enabled():
            self.held = self._room(new, max(end, 2 * self._filled))
        at = before[:, None] + torch.arange(n, device=before.device)
        for held, tensor in zip(self.held, new):
            held.scatter_(-2, at[:, None, :, None].expand_as(tensor), tensor)
        keys, values = (held[..., :end, :] for held in self.held)
        self._filled, self._lengths = end, before + n
        filled = Prefix(self._lengths)
        return keys, values, filled if mask is None else mask.at(before) & filled

    def _check_room(self, new: Pair, end: int) -> None:
        if self.capacity is not None and end > self.capacity:
            raise ValueError(
                f"the cache holds {self.capacity} positions, but {end} are needed; "
                f"make it with SelfCache({end}) or more, or without a capacity"
            )
        got = new[0].shape[:-2]
        have = got if self.held is None else self.held[0].shape[:-2]
        if have != got:
            raise ValueError(
                f"the cache holds sequences of shape {tuple(have)}, but got {tuple(got)}; "
                "use one cache per batch, and select(rows) to change it"
            )

    def _append(self, new: Pair, start: int, end: int) -> Pair:
        """Without a capacity: the buffer doubles, or is exact where gradients may be wanted."""
        if self.held is None or torch.is_grad_enabled():
            self.held = self._room(new, end)
        elif end > self.held[0].shape[-2]:
            self.held = self._room(new, max(end, 2 * start))
        for held, tensor in zip(self.held, new):
            held[..., start:end, :] = tensor
        return self.held

    def _fill(self, new: Pair, at: Tensor) -> Pair:
        """With a capacity: the place to write is a tensor, so that a CUDA graph can replay it."""
        assert self.held is not None
        compiling = torch.compiler.is_compiling()
        if torch.is_grad_enabled() and (compiling or not capturing()):
            key, value = (h.index_copy(-2, at, t) for h, t in zip(self.held, new))
            self.held = key, value
            return self.held
        if self.held[0].requires_grad:  # what earlier steps read stays as it was
            self.held = self._room(new, self.held[0].shape[-2])
        for held, tensor in zip(self.held, new):
            held.index_copy_(-2, at, tensor)
        return self.held

    def _room(self, new: Pair, size: int) -> Pair:
        """A new buffer, with the old one's content copied into it."""
        with _lasting():
            keys, values = (t.new_zeros(*t.shape[:-2], size, t.shape[-1]) for t in new)
        for fresh, held in zip((keys, values), self.held or ()):
            old = min(size, held.shape[-2])
            fresh[..., :old, :] = held[..., :old, :]
        return keys, values


@suggest_names
class CrossCache(Cache):
    """The keys and values of the source, computed at the first step, for cross-attention.

    Later steps pass x (B, L, D) without a source. In a model's decoder the keys of one source can
    serve several rows, such as the beams of a sentence, without a copy for each: see `share`.

    >>> import torch
    >>> from regard import CrossCache, MultiHeadAttention
    >>> layer, cache = MultiHeadAttention(64, 4), CrossCache()
    >>> x, source = torch.randn(2, 1, 64), torch.randn(2, 7, 64)
    >>> first = layer(x, source, cache=cache)
    >>> torch.allclose(layer(x, cache=cache), first, atol=1e-6)  # the source is not needed again
    True
    """

    across = True

    def __init__(self) -> None:
        super().__init__()
        self.beams = 1
        """Rows that read each source; they stand one after the other."""

    def select(self, rows: Sequence[int] | Int[Tensor, "R"]) -> None:
        """Keeps, drops, repeats or reorders rows, in place.

        Row r continues the old row rows[r], and has a source of its own; rows (R,).
        """
        chosen = integer_tensor(rows, "rows")
        if self.held is not None:
            _check_rows(chosen, len(self.held[0]) * self.beams)
        super().select(chosen if self.beams == 1 else chosen // self.beams)
        self.beams = 1

    def share(self, sources: Sequence[int] | Int[Tensor, "M"] | None, beams: int) -> None:
        """Keeps these sources, (R,), in place, each for `beams` successive rows; None keeps all.

        The decoder blocks of a model read `beams`, and let those rows attend together.
        """
        check_integer("beams", beams)
        if sources is not None:
            super().select(sources)
        self.beams = beams

    def extend(
        self, project: Callable[[], Pair], mask: Mask | None = None
    ) -> tuple[Tensor, Tensor, Mask | None]:
        if self.held is None:
            self.held = project()
            if _inferring():
                with _lasting():
                    self.held = self.held[0].clone(), self.held[1].clone()
        return *self.held, mask


def _contents(held: Pair) -> tuple[int, int, int, torch.dtype, torch.device]:
    key, value = held
    return key.shape[-3], key.shape[-1], value.shape[-1], key.dtype, key.device


def _check_rows(rows: Tensor, count: int) -> None:
    if on_host(rows) and bool(((rows < 0) | (rows >= count)).any()):
        reach = f"lie from 0 to {count - 1}" if count else "be none"
        raise ValueError(f"rows ({shown(rows)}) must {reach}: the cache holds {count} sequences")


def _inferring() -> bool:
    return not torch.compiler.is_compiling() and torch.is_inference_mode_enabled()


def _lasting() -> AbstractContextManager[object]:
    """Tensors made inside also serve outside of inference mode."""
    return torch.inference_mode(False) if _inferring() else nullcontext()
