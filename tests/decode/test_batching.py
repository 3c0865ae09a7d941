"""A corpus comes back in its order, whatever the batches, and is never held whole."""

import threading
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regard.decode.batching import batches, in_order, windows
from tests.processes import HANG


@given(
    lengths=st.lists(st.integers(0, 30), max_size=80),
    sentences=st.integers(1, 9),
    tokens=st.integers(1, 60),
    window=st.integers(1, 90),
)
@settings(max_examples=60)
def test_order_and_limits(lengths: list[int], sentences: int, tokens: int, window: int) -> None:
    items = [(n, "x" * length) for n, length in enumerate(lengths)]
    seen: list[list[int]] = []

    def decode(batch: list[tuple[int, str]]) -> list[tuple[int, int]]:
        seen.append([len(text) for _, text in batch])
        return [(n, len(text)) for n, text in batch]

    found = in_order(
        iter(items),
        decode,
        length=lambda item: len(item[1]),
        sentences=sentences,
        tokens=tokens,
        window=window,
    )
    assert list(found) == list(enumerate(lengths))
    assert sum(map(len, seen)) == len(items)
    for batch in seen:
        assert len(batch) <= sentences
        assert len(batch) == 1 or len(batch) * max(batch) <= tokens


def test_like_lengths_go_together() -> None:
    assert batches([5, 1, 5, 2, 5, 1], 3, 99) == [[0, 2, 4], [3, 1, 5]]
    assert batches([9, 1, 1], 3, 4) == [[0], [1, 2]]
    assert batches([], 3, 4) == []


def test_results_come_soon_and_nothing_piles_up() -> None:
    taken = 0

    def endless() -> Iterator[str]:
        nonlocal taken
        while True:
            taken += 1
            yield "x" * (taken % 7)

    results = in_order(endless(), list, sentences=4, window=16)
    next(results)
    assert taken == 4
    ahead = 0
    for n, _ in zip(range(1, 1000), results):
        ahead = max(ahead, taken - n)
    assert ahead <= 16


def test_none_says_that_no_more_is_there_for_now() -> None:
    batches_: list[list[str]] = []

    def decode(some: list[str]) -> list[str]:
        batches_.append(some)
        return some

    items = [None, "a", "b", None, None, *"cdefgh", None, "i"]
    assert list(in_order(items, decode, sentences=4, window=16)) == list("abcdefghi")
    assert batches_ == [["a", "b"], list("cdef"), ["g", "h"], ["i"]]


def test_a_batch_is_finished_while_the_next_is_decoded() -> None:
    begun = [threading.Event() for _ in range(5)]

    def decode(some: list[int]) -> list[int]:
        begun[some[0] // 4].set()
        return some

    def finish(some: list[int]) -> list[str]:
        assert begun[min(4, some[0] // 4 + 1)].wait(HANG)  # the next one, but for the last
        return [f"{n}" for n in some]

    found = in_order(
        range(20), decode, length=lambda n: 1, sentences=4, low_latency=False, finish=finish
    )
    assert list(found) == [f"{n}" for n in range(20)]


def test_what_fails_while_it_is_finished_fails_for_whoever_asked() -> None:
    def finish(some: list[int]) -> list[int]:
        if 9 in some:
            raise ValueError("nine")
        return some

    found = in_order(range(20), list, length=lambda n: 1, sentences=4, window=8, finish=finish)
    assert [next(found) for _ in range(4)] == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="nine"):
        list(found)


@pytest.mark.usefixtures("unchecked")
def test_errors() -> None:
    with pytest.raises(ValueError, match=r"window \(0\) must be a whole number"):
        list(in_order(["a"], list, window=0))
    with pytest.raises(ValueError, match="decode gave 0 results for 1 items"):
        list(in_order(["a"], lambda batch: []))


def test_windows_grow_and_end_where_nothing_more_is_there() -> None:
    items: list[int | None] = list(range(1000))
    assert list(map(len, windows(items, 128, 4096))) == [128, 256, 512, 104]
    items[3:3] = [None]
    assert list(map(len, windows(items, 128, 300))) == [3, 128, 256, 300, 300, 13]
