"""Lines in, answers out, in the order of the lines, however many and whoever waits for them.

    Lines(files)            standard input, or files, as text; None where no more is there for now
    answers(lines, answer)  an answer for each line, by all processes that there are
    Bar(lines)              how far it is, on a terminal

A pipe is read as it fills: what is there is worked on together, and a line that comes alone is
answered alone. Memory is that of a window of lines. A line that cannot be read, or answered, is an
`Unreadable` in its place, and the others go on.

Under torchrun the first process reads and writes, and hands a share of each window to the others:
line n goes to process n modulo their number. Whatever else goes wrong in any of them ends all of
them, and is said once.
"""

import io
import os
import stat
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, cast

from regard.data.files import LINE, LineFile, Reading
from regard.decode.batching import FIRST, windows
from regard.machine.processes import Processes, one_line
from regard.train.display import duration

Item = TypeVar("Item")
Found = TypeVar("Found")


@dataclass(frozen=True)
class Unreadable:
    """In place of a line, or of its answer, where there is none."""

    reason: str


Line: TypeAlias = tuple[int, str]
"""A line and its number, counted from 0."""

MOST = 2048
"""Lines that a process is handed, at most; at first they are fewer."""


# Reading


class Lines:
    """The lines of standard input, or of files, without their ends.

    A folder stands for the files in it, and in folders within, by their names. Lines of more than
    `longest` characters, and bytes that are not UTF-8, are unreadable.
    """

    def __init__(self, files: Sequence[str] = (), longest: int = LINE):
        self.files = [] if list(files) == [STDIN] else list(_files(files))
        for path in self.files:
            if {".csv", ".jsonl"} & set(path.suffixes):
                print(
                    f"regard: {path} is a table, of which each line is read as one text; put its "
                    "column of texts into a file of its own",
                    file=sys.stderr,
                )
        self.longest = longest
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

    def __iter__(self) -> Iterator[str | Unreadable | None]:
        reading = Reading()
        for path in self.files or [Path(STDIN)]:
            with ExitStack() as stack:
                before = reading.bytes
                if self.files:
                    file, place = LineFile(path, reading, stack), f"{path}, line"
                else:
                    file = LineFile(path, reading, stack, "standard input", _standard_input())
                    place = "line"
                is_plain = file.stream.raw is file.raw
                while (line := file.line()) is not None:
                    if not line:
                        yield None
                        continue
                    if self.size is not None:
                        # A compressed file is measured as it is read, which is somewhat ahead.
                        self.marks.append(before + file.offset if is_plain else reading.bytes)
                    content = None if file.overlong else line
                    yield self._text(content, f"{place} {file.lines:,}")

    def _text(self, line: bytes | None, where: str) -> str | Unreadable:
        if line is not None:
            try:
                text = line.decode("utf-8").rstrip("\r\n")
            except UnicodeDecodeError as error:
                byte = f"byte {error.start + 1:,} (0x{line[error.start]:02x})"
                return Unreadable(f"{where}: {byte} is not UTF-8; convert it, as iconv does")
            if len(text) <= self.longest:
                return text
        return Unreadable(
            f"{where} has more than {self.longest:,} characters (--longest); split it at sentences"
        )


STDIN = "-"
"""The name of standard input, where files can be named."""


def _standard_input() -> io.RawIOBase | io.BufferedIOBase:
    """Standard input without a buffer, which would hide whether a pipe is empty."""
    try:
        return open(sys.stdin.fileno(), "rb", buffering=0, closefd=False)
    except (OSError, ValueError):  # replaced by a file in memory
        return cast(io.BufferedIOBase, sys.stdin.buffer)


def _files(names: Sequence[str]) -> Iterator[Path]:
    """The files that these names are, or that are in their folders."""
    for name in names:
        path = Path(name)
        if path.is_dir():
            found = list(within(path))
            if not found:
                raise ValueError(f"{name} is a folder without files; name text files")
            yield from found
        elif path.is_file():
            yield path
        elif name == STDIN:
            raise ValueError("- is standard input, which cannot be read among files; name it alone")
        else:
            raise ValueError(
                f"{name} cannot be found; name text files, plain or compressed, or none to read "
                "standard input"
            )


def within(folder: Path) -> Iterator[Path]:
    """The files in a folder and in those within, by name; hidden ones are left alone."""
    for path in sorted(folder.rglob("*")):
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if not hidden and path.is_file():
            yield path


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


def tried(
    items: Sequence[Item], answer: Callable[[list[Item]], Iterable[Found]]
) -> Iterator[Found | Unreadable]:
    """An answer for each item. Where one fails, those after it are tried one by one."""
    done = 0
    try:
        for found in answer(list(items)):
            yield found
            done += 1
    except (ValueError, OSError) as error:
        if len(items) == 1:
            yield Unreadable(one_line(error))
            return
        for item in items[done:]:
            yield from tried([item], answer)


def answers(
    lines: Iterable[str | Unreadable | None],
    answer: Callable[[list[Line]], Iterable[str]],
    here: Processes,
    prepare: Callable[[list[str]], None] = lambda sample: None,
    most: int = MOST,
    low_latency: bool = True,
) -> Iterator[str | Unreadable]:
    """An answer for each line, in order. Processes other than the first yield none.

    A process is handed `most` lines at a time, and fewer of those that come slowly; with
    `low_latency` also fewer at first, for somebody who waits. `prepare` is shown some lines of
    every window before it is answered, the same in every process, for whatever all of them must
    agree on.
    """
    if not here.first:
        _help(answer, here, prepare)
        return
    most = max(FIRST, most) * here.size
    first = FIRST * here.size if low_latency else most
    try:
        for window in windows(_numbered(lines), first, most):
            texts = [(number, text) for number, text in window if isinstance(text, str)]
            found = _shared(texts, answer, here, prepare)
            for _, text in window:
                yield text if isinstance(text, Unreadable) else next(found)
    finally:
        for rank in range(1, here.size):
            with suppress(ValueError):  # one that has ended needs no telling
                here.send(rank, None)


def _shared(
    lines: list[Line],
    answer: Callable[[list[Line]], Iterable[str]],
    here: Processes,
    prepare: Callable[[list[str]], None],
) -> Iterator[str | Unreadable]:
    """The answers to a window, of which every process gives its share."""
    sample = [text for _, text in lines[:FIRST]]
    for rank in range(1, here.size):
        here.send(rank, {"lines": lines[rank :: here.size], "sample": sample})
    prepare(sample)
    if here.size == 1:
        yield from tried(lines, answer)
        return
    shares = [list(tried(lines[:: here.size], answer))]
    for rank in range(1, here.size):
        reply = here.receive(rank)
        if "error" in reply:
            raise ValueError(reply["error"])
        shares.append(
            [Unreadable(*one) if isinstance(one, list) else one for one in reply["answers"]]
        )
    for n in range(len(lines)):
        yield shares[n % here.size][n // here.size]


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
            found = tried(lines, answer)
            # A reason travels as a list, which no answer is.
            reply: dict[str, Any] = {
                "answers": [[one.reason] if isinstance(one, Unreadable) else one for one in found]
            }
        except Exception as error:  # whatever it is, the first process has to know
            reply = {"error": one_line(error) or type(error).__name__}
        here.send(0, reply)


def _numbered(
    lines: Iterable[str | Unreadable | None],
) -> Iterator[tuple[int, str | Unreadable] | None]:
    number = 0
    for line in lines:
        if line is None:
            yield None
        else:
            yield number, line
            number += 1
