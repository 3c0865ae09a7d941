"""Rows of two int8 sessions in one: all of both, or none."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from regard.decode.engine.int8.cache import Buffers, Cache
from regard.decode.engine.int8.engine import Int8Session

pytestmark = pytest.mark.usefixtures("unchecked")

ENGINE: Any = SimpleNamespace(output=SimpleNamespace(out=7))
LENGTHS = range(1, 140, 4)


def cache(tokens: int, mark: int) -> Cache:
    """One row, whose keys are numbers that count up from `mark`."""
    filled = Cache(Buffers(), 1, 1, 1)
    filled.extend(filled.places(np.array([tokens])))
    filled.data[0, filled.table[0, :tokens], 0] = mark + torch.arange(tokens).half()
    return filled


def session(own: int, read: int, mark: int) -> Int8Session:
    return Int8Session(ENGINE, cache(own, mark), cache(read, mark + 1000))


def keys(one: Cache) -> list[list[float]]:
    """The keys of each row."""
    return [one.data[0, row[:length], 0].tolist() for row, length in zip(one.table, one.lengths)]


def test_rows_of_any_two_lengths_join() -> None:
    """2,450 pairs of lengths: both sides grow beyond each other, and beyond 128."""
    for mine in LENGTHS:
        for its in LENGTHS:
            one, two = session(mine, its, 0), session(its, mine, 200)
            assert one.memory is not None
            assert two.memory is not None
            expected = [keys(one.cache) + keys(two.cache), keys(one.memory) + keys(two.memory)]
            one.join(two)
            assert [keys(one.cache), keys(one.memory)] == expected
            assert (one.rows, two.rows) == (2, 0)


def test_joined_rows_go_on_and_join_again() -> None:
    one = session(33, 65, 0)
    for tokens in (65, 5, 139):
        one.join(session(tokens, 140 - tokens, 300))
        for _ in range(7):
            one.cache.extend(one.cache.places())
    listed = [row[:length].tolist() for row, length in zip(one.cache.table, one.cache.lengths)]
    assert list(map(len, listed)) == [33 + 21, 65 + 21, 5 + 14, 139 + 7]
    slots = [slot for row in listed for slot in row]
    assert len(set(slots)) == len(slots)


def test_a_join_that_fails_changes_neither_session(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = session(37, 41, 0), session(43, 47, 200)
    assert one.memory is not None

    def fail(*shape: object) -> None:
        raise MemoryError

    monkeypatch.setattr(one.memory.buffers, "take", fail)  # the second of its caches
    with pytest.raises(MemoryError):
        one.join(two)
    assert (one.rows, two.rows) == (1, 1)
    assert keys(one.cache) == [list(range(37))]
    assert keys(one.memory) == [list(range(1000, 1041))]
    assert keys(two.cache) == [list(range(200, 243))]
    monkeypatch.undo()
    one.join(two)
    assert keys(one.cache) == [list(range(37)), list(range(200, 243))]
