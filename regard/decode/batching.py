"""Dynamic batching: sentences are sorted by length into batches, and results come in input order.

A batch costs as much as its longest sentence, so sentences of similar length belong together. They
are read and sorted a window at a time: an endless stream needs no more memory than a window.
In an interactive stream, None says that there are no more items for now, and those read so far are
decoded.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import torch

from regard.attention.checks import check_integer

Item = TypeVar("Item")
Result = TypeVar("Result")


FIRST = 64
"""Items of the first window, for somebody who waits."""
TOKENS = 64
"""Of a sentence of a full batch; of longer ones it has fewer."""
WINDOW = 4096
"""Items that are sorted together."""


def usual(device: torch.device) -> int:
    """Sentences of a batch where nothing is asked for: as many as keep the device busy."""
    return 512 if device.type == "cuda" else 64


def in_order(
    items: Iterable[Item | None],
    decode: Callable[[list[Item]], Any],
    *,
    length: Callable[[Any], int] = len,
    sentences: int = 64,
    tokens: int | None = None,
    window: int = WINDOW,
    low_latency: bool = True,
    finish: Callable[[Any], Sequence[Result]] | None = None,
) -> Iterator[Result]:
    """Decodes all items in batches; yields each result as soon as all before it are there.

    A batch holds at most `sentences` of them and, padded to its longest, at most `tokens` tokens,
    64 for each by default; a longer one has a batch of its own. `length` is the sort key. At most
    `window` items are held. With `low_latency` the first window is a small batch, and windows
    double in size, so that the first results come soon. None is no item: it ends a window early.

    Where there is `finish`, it makes the results of a batch from what `decode` gives, in another
    thread, while the next batch of the window is decoded.
    """
    tokens = TOKENS * sentences if tokens is None else tokens
    for name, size in (("sentences", sentences), ("tokens", tokens), ("window", window)):
        check_integer(name, size)
    first = min(FIRST, sentences, window) if low_latency else window
    for some in windows(items, first, window):
        found = _decoded(some, batches([length(one) for one in some], sentences, tokens), decode)
        yield from _sorted(found if finish is None else _finished(found, finish))


def windows(items: Iterable[Item | None], first: int, most: int) -> Iterator[list[Item]]:
    """Items in lists, each twice as long as the one before; None ends one early."""
    held: list[Item] = []
    size = first
    for item in items:
        if item is not None:
            held.append(item)
        if len(held) == size or (item is None and held):
            # A stream that had to wait for items starts again with a small window.
            size = min(2 * size, most) if item is not None else first
            yield held
            held = []
    if held:
        yield held


def batches(lengths: Sequence[int], sentences: int, tokens: int) -> list[list[int]]:
    """Indices of sentences of similar length; the batch with the first sentence comes first."""
    batched: list[list[int]] = []
    # The longest first, since padding to it decides how many others fit.
    for place in sorted(range(len(lengths)), key=lambda n: (-lengths[n], n)):
        last = batched[-1] if batched else []
        if last and len(last) < sentences and (len(last) + 1) * lengths[last[0]] <= tokens:
            last.append(place)
        else:
            batched.append([place])
    return sorted(batched, key=min)


def _decoded(
    items: list[Item], batched: list[list[int]], decode: Callable[[list[Item]], Any]
) -> Iterator[tuple[list[int], Any]]:
    for places in batched:
        yield places, decode([items[n] for n in places])


def _finished(
    found: Iterable[tuple[list[int], Any]], finish: Callable[[Any], Sequence[Result]]
) -> Iterator[tuple[list[int], Sequence[Result]]]:
    with ThreadPoolExecutor(1) as pool:
        before: tuple[list[int], Future[Sequence[Result]]] | None = None
        for places, one in found:
            after = places, pool.submit(finish, one)
            if before is not None:
                yield before[0], before[1].result()
            before = after
        if before is not None:
            yield before[0], before[1].result()


def _sorted(found: Iterable[tuple[list[int], Sequence[Result]]]) -> Iterator[Result]:
    """Results by their places, each as soon as all before it are there."""
    ready: dict[int, Result] = {}
    due = 0
    for places, results in found:
        if len(results) != len(places):
            raise ValueError(
                f"decode gave {len(results)} results for {len(places)} items; give one for each"
            )
        ready.update(zip(places, results))
        while due in ready:
            yield ready.pop(due)
            due += 1
