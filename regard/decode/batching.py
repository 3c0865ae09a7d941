"""Many sentences: sorted into batches by length, decoded, and given back in the order they came.

A batch costs as much as its longest sentence, so sentences of like length belong together. They
are read and sorted a window at a time: an endless stream needs no more memory than a window.
Where items come from somebody who waits for an answer, None among them says that there are no more
for now, and what is there is decoded.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from regard.attention.checks import check_integer

Item = TypeVar("Item")
Result = TypeVar("Result")


def in_order(
    items: Iterable[Item | None],
    decode: Callable[[list[Item]], Sequence[Result]],
    *,
    length: Callable[[Any], int] = len,
    sentences: int = 64,
    tokens: int = 4096,
    window: int = 4096,
    soon: bool = True,
) -> Iterator[Result]:
    """Decode all items in batches, and give each result as soon as all before it are there.

    A batch holds at most `sentences` of them and, padded to its longest, at most `tokens` tokens;
    one that is longer has a batch of its own. `length` is what an item is sorted by. At most
    `window` items are held. With `soon` the first window is one batch, and each is twice as large
    as the one before, so that the first results come soon. None is no item: it ends a window early.
    """
    for name, size in (("sentences", sentences), ("tokens", tokens), ("window", window)):
        check_integer(name, size)
    for some in windows(items, min(sentences, window) if soon else window, window):
        yield from _window(some, decode, [length(one) for one in some], sentences, tokens)


def windows(items: Iterable[Item | None], first: int, most: int) -> Iterator[list[Item]]:
    """Items in lists, each twice as long as the one before; None ends one early."""
    held: list[Item] = []
    size = first
    for item in items:
        if item is not None:
            held.append(item)
        if len(held) == size or (item is None and held):
            # Who has to wait for items is not made to wait for more of them next time.
            size = min(2 * size, most) if item is not None else first
            yield held
            held = []
    if held:
        yield held


def batches(lengths: Sequence[int], sentences: int, tokens: int) -> list[list[int]]:
    """Places of sentences of like length; the batch of the first of them comes first."""
    found: list[list[int]] = []
    # The longest first: they set the size of the batch that others join.
    for place in sorted(range(len(lengths)), key=lambda n: (-lengths[n], n)):
        last = found[-1] if found else []
        if last and len(last) < sentences and (len(last) + 1) * lengths[last[0]] <= tokens:
            last.append(place)
        else:
            found.append([place])
    return sorted(found, key=min)


def _window(
    items: list[Item],
    decode: Callable[[list[Item]], Sequence[Result]],
    lengths: list[int],
    sentences: int,
    tokens: int,
) -> Iterator[Result]:
    ready: dict[int, Result] = {}
    due = 0
    for places in batches(lengths, sentences, tokens):
        results = decode([items[n] for n in places])
        if len(results) != len(places):
            raise ValueError(
                f"decode gave {len(results)} results for {len(places)} items; give one for each"
            )
        ready.update(zip(places, results))
        while due in ready:
            yield ready.pop(due)
            due += 1
