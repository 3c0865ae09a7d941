"""Keys and values kept between decoding steps, so that each step computes only its own.

`SelfCache` grows by the new positions of each step; `CrossCache` is filled once from the source
and then needs it no more. Both are reordered by `select(rows)`, as beam search asks: row r of the
result continues what row rows[r] has been.
"""

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.attention.mask import Mask, causal

Pair = tuple[Float[Tensor, "*b S K"], Float[Tensor, "*b S V"]]


@runtime_checkable
class Cache(Protocol):
    """What MultiHeadAttention asks of a cache."""

    @property
    def length(self) -> int | Tensor:
        """Positions of the query's own sequence that came before."""

    def extend(self, project: Callable[[], Pair]) -> tuple[Tensor, Tensor, Mask | None]:
        """All keys and values now to attend to, and what of them is to stay hidden.

        `project` computes keys and values of what is new; it is called only where they are wanted.
        """


class SelfCache:
    """Keys and values of the positions decoded so far.

    Without a capacity it grows, by doubling, and attention sees just what is filled. With one it
    is allocated once and never changes its shape: attention runs over all of it with the rest
    masked, and the filled length is a tensor on the device, so that a step can be captured in a
    CUDA graph or compiled once.
    """

    def __init__(self, capacity: int | None = None):
        if capacity is not None and (isinstance(capacity, bool) or capacity < 1):
            raise ValueError(
                f"capacity ({capacity!r}) must be a whole number of positions, or None"
            )
        self.capacity = capacity
        self._keys: Tensor | None = None
        self._values: Tensor | None = None
        self._filled = 0
        self._length: Tensor | None = None

    @property
    def length(self) -> int | Tensor:
        """Positions filled so far: an int, or a tensor on the device where there is a capacity."""
        if self.capacity is None or self._length is None:
            return self._filled
        return self._length.clone()  # `extend` moves it on in place, so that a graph can too

    def extend(self, project: Callable[[], Pair]) -> tuple[Tensor, Tensor, Mask | None]:
        key, value = project()
        new = key.shape[-2]
        start, end = self._filled, self._filled + new
        if self.capacity is not None and end > self.capacity:
            raise ValueError(
                f"the cache holds {self.capacity} positions, but {end} are needed; "
                f"make it with SelfCache({end}) or more, or without a capacity"
            )
        self._reserve(key, value, end)
        assert self._keys is not None
        assert self._values is not None
        self._filled = end
        if self.capacity is None:
            keys, values = self._keys[..., :end, :], self._values[..., :end, :]
            keys[..., start:end, :] = key
            values[..., start:end, :] = value
            return keys, values, None
        assert self._length is not None
        before = self._length.clone()
        at = before + torch.arange(new, device=key.device)
        self._keys.index_copy_(-2, at, key)
        self._values.index_copy_(-2, at, value)
        self._length += new
        return self._keys, self._values, causal(before)

    def _reserve(self, key: Tensor, value: Tensor, end: int) -> None:
        """Room for `end` positions, with what is there kept."""
        have = 0 if self._keys is None else self._keys.shape[-2]
        if self._keys is not None and self._keys.shape[:-2] != key.shape[:-2]:
            raise ValueError(
                f"the cache holds sequences of shape {tuple(self._keys.shape[:-2])}, but got "
                f"{tuple(key.shape[:-2])}; use one cache per batch, and select(rows) to change it"
            )
        if end <= have:
            return
        size = self.capacity or max(end, 2 * have)
        keys, values = (t.new_zeros(*t.shape[:-2], size, t.shape[-1]) for t in (key, value))
        if self._keys is not None and self._values is not None:
            keys[..., : self._filled, :] = self._keys[..., : self._filled, :]
            values[..., : self._filled, :] = self._values[..., : self._filled, :]
        self._keys, self._values = keys, values
        if self.capacity is not None:
            self._length = torch.zeros((), dtype=torch.int64, device=key.device)

    def select(self, rows: Int[Tensor, "R"]) -> None:
        """Keep, drop, repeat or reorder sequences."""
        if self._keys is not None and self._values is not None:
            self._keys = self._keys.index_select(0, rows)
            self._values = self._values.index_select(0, rows)


class CrossCache:
    """Keys and values of the source, computed at the first step."""

    def __init__(self) -> None:
        self._pair: Pair | None = None

    @property
    def length(self) -> int:
        return 0

    def extend(self, project: Callable[[], Pair]) -> tuple[Tensor, Tensor, Mask | None]:
        if self._pair is None:
            self._pair = project()
        return (*self._pair, None)

    def select(self, rows: Int[Tensor, "R"]) -> None:
        """Keep, drop, repeat or reorder sources."""
        if self._pair is not None:
            key, value = self._pair
            self._pair = key.index_select(0, rows), value.index_select(0, rows)
