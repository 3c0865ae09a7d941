"""The KV cache: keys and values in slots, and reused memory.

Each row of a session has a list of the slots that hold its own keys and values. Rows with a common
past list the same slots, so that beams are reordered without moving any. Slots that no row lists
any more are reused.
"""

import math
import weakref
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from regard.decode.engine.int8 import library as native

Integers = NDArray[np.int64]


class Buffers:
    """An allocator that reuses memory: fresh pages at every step would cost more than the step."""

    KEPT = 8

    def __init__(self) -> None:
        self._free: list[NDArray[np.uint8]] = []

    def take(self, shape: tuple[int, ...], dtype: type[np.generic] = np.float32) -> Tensor:
        """An uninitialised tensor; its memory is reused when no tensor shares it any more."""
        size = math.prod(shape) * np.dtype(dtype).itemsize
        fits = (n for n, free in enumerate(self._free) if size <= free.size <= 2 * size)
        buffer = np.empty(size, np.uint8) if (n := next(fits, None)) is None else self._free.pop(n)
        view = buffer[:size].view(dtype).reshape(shape)
        weakref.finalize(view, self._give_back, buffer).atexit = False
        return torch.from_numpy(view)

    def _give_back(self, buffer: NDArray[np.uint8]) -> None:
        self._free.append(buffer)
        del self._free[: -self.KEPT]


class Places(NamedTuple):
    """The row of each token, and its position in that row."""

    row: Integers
    position: Integers

    @property
    def longest(self) -> int:
        return int(self.position.max(initial=-1)) + 1


class Rows(NamedTuple):
    """Rows of a cache."""

    table: NDArray[np.int32]
    lengths: Integers
    slots: int
    """How many of the free slots the table lists."""


class Cache:
    """Keys and values of a stack: (blocks, slots, width), in half precision."""

    def __init__(self, buffers: Buffers, blocks: int, width: int, rows: int):
        self.buffers = buffers
        self.data = torch.empty(blocks, 0, width, dtype=torch.float16)
        self.table = np.zeros((rows, 32), np.int32)
        """The slot of each row's every position."""
        self.lengths: Integers = np.zeros(rows, np.int64)
        self._free = np.zeros(0, np.int32)

    def places(self, counts: Integers | None = None) -> Places:
        """The places of the next counts[r] tokens of row r, or of one token of each row."""
        if counts is None:
            return Places(np.arange(len(self.lengths)), self.lengths.copy())
        row = np.repeat(np.arange(len(counts)), counts)
        first = self.lengths - (np.cumsum(counts) - counts)
        return Places(row, np.arange(len(row)) + first[row])

    def extend(self, at: Places) -> None:
        """Lists a slot for each new token."""
        self._fit(at.longest)
        self.table[at.row, at.position] = self._take(len(at.row))
        np.add.at(self.lengths, at.row, 1)

    def reserve(self, count: int) -> None:
        """Makes sure that `count` slots are free."""
        if count <= len(self._free):
            return
        blocks, slots, width = self.data.shape
        if not slots:
            self.data = self.buffers.take((blocks, count, width), np.float16)
            self._free = np.arange(count, dtype=np.int32)
            return
        used = np.zeros(slots, bool)
        used[self.table[self._listing()]] = True
        # Searching for free slots again and again would cost more than having more of them.
        if (needed := int(used.sum()) + count) > slots * 3 // 4:
            data = self.buffers.take((blocks, max(needed, 2 * slots), width), np.float16)
            data[:, :slots] = self.data
            self.data, used = data, np.pad(used, (0, data.shape[1] - slots))
        self._free = np.flatnonzero(~used).astype(np.int32)

    def ahead(self, steps: int) -> NDArray[np.int32]:
        """Free slots for `steps` more tokens of every row."""
        self._fit(int(self.lengths.max(initial=0)) + steps)
        self.reserve(len(self.lengths) * steps)
        return self._free

    def used(self, count: int) -> None:
        """Takes the first `count` free slots, which are listed now."""
        self._free = self._free[count:]

    def select(self, rows: Integers) -> None:
        self.table, self.lengths = self.table[rows], self.lengths[rows]

    def merge(self, other: "Cache") -> Rows:
        """The rows of both caches, for `assign`; until then neither cache changes.

        The other cache's slots are copied into slots of this one, which stay free until then.
        """
        theirs = np.unique(other.table[other._listing()])
        self.reserve(len(theirs))
        ours = self._free[: len(theirs)]
        to, of = (torch.from_numpy(slots).long() for slots in (ours, theirs))
        self.data[:, to] = other.data[:, of]
        number = np.zeros(other.data.shape[1] + 1, np.int32)
        number[theirs] = ours
        (rows, width), (more, other_width) = self.table.shape, other.table.shape
        table = np.zeros((rows + more, max(width, other_width)), np.int32)
        table[:rows, :width] = self.table
        table[rows:, :other_width] = np.where(other._listing(), number[other.table], 0)
        return Rows(table, np.concatenate((self.lengths, other.lengths)), len(theirs))

    def assign(self, rows: Rows) -> None:
        self.table, self.lengths = rows.table, rows.lengths
        self.used(rows.slots)

    def clear(self) -> None:
        """No rows, and no memory."""
        self.select(np.zeros(0, np.int64))
        self.data, self._free = self.data[:, :0].clone(), self._free[:0]

    def address(self) -> native.Cache:
        """The struct that the kernels receive."""
        return native.Cache(
            *(self.data.data_ptr(), self.data.shape[1]),
            *(self.table.ctypes.data, self.table.shape[1], self.lengths.ctypes.data),
        )

    def _take(self, count: int) -> NDArray[np.int32]:
        self.reserve(count)
        taken, self._free = self._free[:count], self._free[count:]
        return taken

    def _listing(self) -> NDArray[np.bool_]:
        return np.arange(self.table.shape[1]) < self.lengths[:, None]

    def _fit(self, positions: int) -> None:
        """Makes sure that the table has a column for each of `positions`."""
        if (short := positions - self.table.shape[1]) > 0:
            self.table = np.pad(self.table, ((0, 0), (0, max(short, self.table.shape[1]))))
