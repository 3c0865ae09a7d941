"""Answers as the commands write them: each as soon as it is there; what was left out, and why."""

import io
import json
import os
import stat
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from regard.cli.stream import Bar, Lines, Unreadable, tried

Ready = TypeVar("Ready")


class LeftOut:
    """What could not be read or answered: reported as it comes, and counted."""

    SHOWN = 10

    def __init__(self) -> None:
        self.count = 0

    def add(self, reason: str) -> None:
        self.count += 1
        if self.count <= self.SHOWN:
            print("regard: left out:", reason, file=sys.stderr, flush=True)

    def status(self) -> int:
        """The exit code, at the end."""
        if self.count > self.SHOWN:
            print(f"regard: left out: {self.count - self.SHOWN:,} more", file=sys.stderr)
        return 1 if self.count else 0


def each(
    pictures: Iterable[str | None],
    answer: Callable[[list[str]], Iterable[Ready]],
    as_json: bool,
    left_out: LeftOut,
    batch: int = 64,
) -> Iterator[tuple[str, Ready]]:
    """Pictures with their answers; one without is left out, and as JSON an object says why."""
    for some in _batches(pictures, batch):
        for picture, found in zip(some, tried(some, answer)):
            if not isinstance(found, Unreadable):
                yield picture, found
                continue
            left_out.add(found.reason)
            if as_json:
                say(as_object(picture=picture, error=found.reason))


def _batches(items: Iterable[str | None], most: int) -> Iterator[list[str]]:
    """So many at a time, or fewer where no more are there for now."""
    some: list[str] = []
    for item in items:
        if item is not None:
            some.append(item)
        if some and (item is None or len(some) == most):
            yield some
            some = []
    if some:
        yield some


def write(
    lines: Lines,
    answers: Iterable[str | Unreadable],
    without: Callable[[int, str], str] = lambda number, reason: "",
    note: Callable[[], str | None] = lambda: None,
) -> int:
    """Each answer as it comes, and the note on standard error once there is one.

    `without` is what stands in the place of line `number` if it has no answer.
    """
    bar, told, left_out = Bar(lines), False, LeftOut()
    for number, answer in enumerate(answers):
        if not told and (words := note()) is not None:
            print("regard:", words, file=sys.stderr, flush=True)
            told = True
        if isinstance(answer, Unreadable):
            left_out.add(answer.reason)
            answer = without(number, answer.reason)
        say(answer)
        bar.answered()
    bar.close()
    return left_out.status()


def as_object(**said: object) -> str:
    """An answer for programs, in one line."""
    return json.dumps(said, ensure_ascii=False)


def without_answer(as_json: bool) -> Callable[[int, str], str]:
    """What stands in the place of a line that has no answer."""
    return lambda number, reason: as_object(line=number, error=reason) if as_json else ""


def awaited() -> bool:
    """Whether somebody may wait for each answer: a terminal or a pipe does, a file does not."""
    try:
        return not stat.S_ISREG(os.fstat(sys.stdout.fileno()).st_mode)
    except (OSError, ValueError):  # no file at all
        return True


def say(text: str) -> None:
    """Always UTF-8, whatever a terminal's settings; a file's name comes out as it came in."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors != "surrogateescape":
        sys.stdout.reconfigure(encoding="utf-8", errors="surrogateescape")
    print(text, flush=awaited())
