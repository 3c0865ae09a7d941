"""Printing to a terminal with rich, as all of the lab does it."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console, RenderableType
from rich.padding import Padding

INDENT = 3


@contextmanager
def printing(width: int | None = None) -> Iterator[Console]:
    """A console whose output is printed at the end, without trailing spaces.

    Rich pads lines with spaces, which are in the way of copying and comparing. `width` applies
    where the output is not a terminal and COLUMNS is not set.
    """
    console = Console(highlight=False)
    if width is not None and not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = width
    with console.capture() as captured:
        yield console
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))


def indented(what: RenderableType) -> Padding:
    return Padding(what, (0, 0, 0, INDENT), expand=False)
