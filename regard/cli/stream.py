"""Lines in, answers out, in the order of the lines, however many and whoever waits for them.

    Lines(files)            standard input, or files, as text; None where no more is there for now
    answers(lines, answer)  an answer for each line, by all processes that there are
    Bar(lines)              how far it is, on a terminal

A pipe is read as it fills: what is there is worked on together, and a line that comes alone is
answered alone. Memory is that of a window of lines.

Under torchrun the first process reads and writes, and hands a share of each window to the others:
line n goes to process n modulo their number. Whatever goes wrong in any of them ends all of them,
and is said once.
"""

import lzma
import os
import select
import stat
import sys
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, TypeAlias

from regard.data.files import LineFile, Reading
from regard.decode.batching import windows
from regard.processes import Processes, one_line
from regard.train.display import duration

Line: TypeAlias = tuple[int, str]
"""A line and its number, counted from 0."""

SOON = 0.01
"""Seconds for which a busy writer is waited for, so that its lines are worked on together."""

WINDOW = 64, 2048
"""Lines that a process is handed at first, and at most."""


# Reading


class Lines:
    """The lines of standard input, or of files, without their ends.

    Lines end with a line feed alone. Bytes that are no UTF-8 become the sign for what is unknown.
    """

    def __init__(self, files: Sequence[str] = ()):
        self.files = [Path(name) for name in files]
        if absent := [str(path) for path in self.files if not path.is_file()]:
            raise ValueError(
                f"{', '.join(absent)} cannot be found; name text files, plain or compressed, or "
                "none to read standard input"
            )
        self.size = self._size()
        """Bytes in all; None where nobody knows."""
        self.marks: deque[int] = deque()
        """The byte at which each line ended that was read, for somebody who counts answers."""

    def _size(self) -> int | None:
        if self.files:
            return sum(path.stat().st_size for path in self.files)
        try:
            about = os.fstat(sys.stdin.fileno())
        except (OSError, ValueError):  # no file at all
            return None
        return about.st_size if stat.S_ISREG(about.st_mode) else None

    def __iter__(self) -> Iterator[str | None]:
        if self.files:
            return self._from_files()
        try:
            fd = sys.stdin.fileno()
        except (OSError, ValueError):
            fd = -1
        if fd < 0 or self.size is not None or os.name != "posix":
            return self._from(sys.stdin.buffer)
        return _live(fd)

    def _from(self, stream: Iterable[bytes]) -> Iterator[str]:
        at = 0
        for line in stream:
            at += len(line)
            if self.size is not None:
                self.marks.append(at)
            yield _text(line)

    def _from_files(self) -> Iterator[str]:
        reading = Reading()
        for path in self.files:
            with ExitStack() as stack:
                before, offset = reading.bytes, 0
                file = LineFile(path, reading, stack)
                plain = file.stream.raw is file.raw
                try:
                    for line in file.stream:
                        offset += len(line)
                        # A compressed file is measured as it is read, which is somewhat ahead.
                        self.marks.append(before + offset if plain else reading.bytes)
                        yield _text(line)
                except (EOFError, zlib.error, lzma.LZMAError, OSError) as error:
                    raise ValueError(f"{path} is damaged ({error}); fetch it again") from error


def _live(fd: int) -> Iterator[str | None]:
    begun: list[bytes] = []  # of a line whose end has not come yet
    while True:
        if not select.select([fd], [], [], SOON)[0]:
            yield None
        data = os.read(fd, 2**16)
        if not data:
            break
        first, *others = data.split(b"\n")
        begun.append(first)
        if others:
            yield _text(b"".join(begun))
            yield from map(_text, others[:-1])
            begun = others[-1:]
    if last := b"".join(begun):
        yield _text(last)


def _text(line: bytes) -> str:
    return line.decode("utf-8", "replace").rstrip("\r\n")


class Bar:
    """How many lines are answered: one line on a terminal, where the answers go elsewhere."""

    def __init__(self, lines: Lines):
        self.lines = lines
        self.shown = sys.stderr.isatty() and not sys.stdout.isatty()
        self.count, self.at = 0, 0
        self.begun = self.last = time.monotonic()

    def answered(self) -> None:
        self.count += 1
        if self.lines.marks:
            self.at = self.lines.marks.popleft()
        now = time.monotonic()
        if self.shown and now - self.last > 0.2:
            self.last = now
            self._show(now - self.begun)

    def _show(self, seconds: float) -> None:
        line = f"{self.count:,} lines, {self.count / seconds:,.0f} a second"
        if self.lines.size and self.at:
            share = min(1.0, self.at / self.lines.size)
            line += f", {share:.0%}, {duration(seconds * (1 - share) / share)} left"
        print(f"\r{line}\x1b[K", end="", file=sys.stderr, flush=True)

    def close(self) -> None:
        if self.shown and self.last > self.begun:
            self._show(time.monotonic() - self.begun)
            print(file=sys.stderr)


# Answering


def answers(
    lines: Iterable[str | None],
    answer: Callable[[list[Line]], Iterable[str]],
    here: Processes,
    prepare: Callable[[list[str]], None] = lambda sample: None,
) -> Iterator[str]:
    """An answer for each line, in order. Processes other than the first yield none.

    `prepare` is shown some lines of every window before it is answered, the same in every process,
    for whatever all of them must agree on.
    """
    if not here.first:
        _help(answer, here, prepare)
        return
    others = range(1, here.size)
    try:
        for window in windows(_numbered(lines), *(count * here.size for count in WINDOW)):
            sample = [text for _, text in window[: WINDOW[0]]]
            for rank in others:
                here.send(rank, {"lines": window[rank :: here.size], "sample": sample})
            prepare(sample)
            if here.size == 1:
                yield from answer(window)
                continue
            shares = [list(answer(window[:: here.size]))]
            for rank in others:
                reply = here.receive(rank)
                if "error" in reply:
                    raise ValueError(reply["error"])
                shares.append(reply["answers"])
            for n in range(len(window)):
                yield shares[n % here.size][n // here.size]
    finally:
        for rank in others:
            with suppress(ValueError):  # one that has ended needs no telling
                here.send(rank, None)


def _help(
    answer: Callable[[list[Line]], Iterable[str]],
    here: Processes,
    prepare: Callable[[list[str]], None],
) -> None:
    """Answers what the first process sends, until it sends nothing."""
    while (message := here.receive(0)) is not None:
        try:
            prepare(message["sample"])
            lines = [(number, text) for number, text in message["lines"]]
            reply: dict[str, Any] = {"answers": list(answer(lines))}
        except Exception as error:  # whatever it is, the first process has to know
            reply = {"error": one_line(error) or type(error).__name__}
        here.send(0, reply)


def _numbered(lines: Iterable[str | None]) -> Iterator[Line | None]:
    number = 0
    for line in lines:
        if line is None:
            yield None
        else:
            yield number, line
            number += 1
