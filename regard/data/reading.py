"""Text in files as examples: lines, pairs of lines, columns of tables, documents.

Lines end with a newline, whatever else Unicode takes for one; blanks around them are dropped. The
work is in two halves: the files are cut into chunks of bytes, and any process makes examples of a
chunk.
"""

import contextlib
import os
import re
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from regard.data.cache import PathLike
from regard.data.files import LineFile, Reading
from regard.data.problems import Problems

DOCUMENT = 2**24
"""Bytes after which a document goes on as another."""

_LINES, _BYTES = 4096, 2**20  # what a worker is given at a time


@dataclass(frozen=True)
class Chunk:
    """Some lines of one file, or of files that are read side by side, as they were found."""

    names: tuple[str, ...]
    blobs: tuple[bytes, ...]
    line: int
    """The number of the first line, counted from 1."""
    offsets: tuple[int, ...]
    """Where it begins in each file, in bytes of its uncompressed content."""
    overlong: tuple[int | None, ...]
    """Bytes of the last line where it is too long to be read; it is empty here."""

    def place(self, i: int, side: int = 0) -> str:
        return f"line {self.line + i:,} of {Path(self.names[side]).name}"


class Text:
    """Text in files, to be read as often as one likes; see Pairs, Table, Lines and Documents.

    Iterating gives a tuple of strings for each example, one for each side. What was wrong in the
    last iteration is in `problems`.
    """

    unit = "line"

    def __init__(self, groups: Sequence[tuple[PathLike, ...]], sides: int):
        self.groups = [tuple(Path(path) for path in group) for group in groups]
        self.sides = sides
        self.problems = Problems()
        if not self.groups:
            raise ValueError("there is no file to read; name at least one")
        for path in self.paths:
            if path.is_dir():
                raise ValueError(f"{path} is a folder; name a file")
            if not path.is_file():
                raise ValueError(f"{path} does not exist, or is not a plain file")

    @property
    def paths(self) -> list[Path]:
        return [path for group in self.groups for path in group]

    def form(self) -> list[object]:
        """How the files are read: a part of what a store is known by."""
        return [type(self).__name__, len(self.groups), self.sides]

    def __iter__(self) -> Iterator[tuple[str, ...]]:
        for _, example in self.numbered():
            yield example

    def numbered(self) -> Generator[tuple[int, tuple[str, ...]], None, None]:
        """Every example with the number of its line, which counts bad lines too."""
        self.problems = Problems()
        for chunk in self.chunks(Reading()):
            examples, numbers, problems = self.examples(chunk)
            self.problems.merge(problems)
            yield from zip(numbers, examples)

    def chunks(self, reading: "Reading") -> Iterator[Chunk]:
        """The files' lines, in pieces that a worker may be given."""
        for group in self.groups:
            with contextlib.ExitStack() as stack:
                files = [LineFile(path, reading, stack) for path in group]
                yield from self._chunks(files)
                for file in files:
                    file.finish()

    def _chunks(self, files: list["LineFile"]) -> Iterator[Chunk]:
        names = tuple(str(file.path) for file in files)
        row: list[bytes | None] = []
        while None not in row:
            offsets, number = tuple(file.offset for file in files), files[0].lines + 1
            parts: list[list[bytes]] = [[] for _ in files]
            size, overlong = 0, False
            while not self._full(len(parts[0]), size, row) and not overlong:
                row = [file.line() for file in files]
                if None in row:
                    break
                for part, line in zip(parts, cast(list[bytes], row)):
                    part.append(line)
                    size += len(line)
                overlong = any(file.overlong for file in files)
            if parts[0]:
                blobs = tuple(map(b"".join, parts))
                lengths = tuple(file.overlong for file in files)
                yield Chunk(names, blobs, number, offsets, lengths)
        surplus = [0 if line is None else 1 + file.rest() for file, line in zip(files, row)]
        if any(surplus):
            counts = " but ".join(f"{file.lines:,} lines in {file.path}" for file in files)
            raise ValueError(
                f"{counts}: line n belongs to line n, so that from where one is missing on, all "
                "pairs would be wrong; give them equally many lines"
            )

    def _full(self, lines: int, size: int, last: list[bytes | None]) -> bool:
        return lines >= _LINES or size >= _BYTES

    def examples(self, chunk: Chunk) -> tuple[list[tuple[str, ...]], list[int], Problems]:
        """A chunk's good examples, the number of each one's line, and what is wrong with others."""
        problems = Problems()
        columns = [blob.decode(errors="surrogateescape").split("\n") for blob in chunk.blobs]
        kept, numbers = [], []
        last = len(columns[0]) - 2
        for i, lines in enumerate(zip(*columns)):
            if i > last:
                break
            row = self._cells(lines)
            if row is None:
                cells = lines[0].count("\t") + 1
                problems.add("columns", f"{chunk.place(i)} has {cells}: {shown(lines[0])}")
                continue
            sides = tuple(map(str.strip, row))
            if all(side and side.isprintable() for side in sides) and (
                i < last or not any(chunk.overlong)
            ):
                kept.append(sides)
                numbers.append(chunk.line + i)
            elif fault := _fault(chunk, i, lines, sides, i == last):
                problems.add(*fault)
            else:
                kept.append(sides)
                numbers.append(chunk.line + i)
        return kept, numbers, problems

    def _cells(self, lines: tuple[str, ...]) -> tuple[str, ...] | None:
        """The sides of an example that stands in these lines."""
        return lines


class Lines(Text):
    """One side: every line is an example."""

    def __init__(self, *paths: PathLike):
        super().__init__([(path,) for path in paths], 1)


class Pairs(Text):
    """Two sides, in two files or in two equally long lists of files: line n belongs to line n."""

    def __init__(
        self, source: PathLike | Sequence[PathLike], target: PathLike | Sequence[PathLike]
    ):
        sources, targets = _several(source), _several(target)
        if len(sources) != len(targets):
            raise ValueError(
                f"source files ({len(sources)}) and target files ({len(targets)}) must be as many; "
                "name them in the same order"
            )
        super().__init__(list(zip(sources, targets)), 2)


class Table(Text):
    """Columns of files with tabs, as many sides as columns are chosen; counted from 0."""

    def __init__(self, *paths: PathLike, columns: Sequence[int] = (0, 1)):
        super().__init__([(path,) for path in paths], len(columns))
        self.columns = tuple(columns)
        if not columns or min(columns) < 0:
            raise ValueError(f"columns ({self.columns}) must be numbers from 0 on; try (0, 1)")

    def form(self) -> list[object]:
        return [*super().form(), list(self.columns)]

    def _cells(self, lines: tuple[str, ...]) -> tuple[str, ...] | None:
        cells = lines[0].split("\t")
        if len(cells) <= max(self.columns):
            return None
        return tuple(cells[column] for column in self.columns)


class Documents(Text):
    """One side: documents that are parted by blank lines, and by the ends of files."""

    unit = "document"

    def __init__(self, *paths: PathLike):
        super().__init__([(path,) for path in paths], 1)

    def _full(self, lines: int, size: int, last: list[bytes | None]) -> bool:
        between = bool(last) and last[0] is not None and not last[0].strip()
        return size >= DOCUMENT or (between and super()._full(lines, size, last))

    def examples(self, chunk: Chunk) -> tuple[list[tuple[str, ...]], list[int], Problems]:
        problems = Problems()
        lines = chunk.blobs[0].decode(errors="surrogateescape").split("\n")[:-1]
        kept: list[tuple[str, ...]] = []
        numbers: list[int] = []
        begin = 0
        for i, line in enumerate((*lines, "")):
            if line.strip():
                continue
            if i > begin:
                text = "\n".join(line.rstrip("\r") for line in lines[begin:i])
                if fault := _garbled(chunk, begin, 0, text, _CONTROL):
                    problems.add(*fault)
                else:
                    kept.append((text,))
                    numbers.append(chunk.line + begin)
            begin = i + 1
        if length := chunk.overlong[0]:
            problems.add("long", f"{chunk.place(len(lines) - 1)} has {length:,} bytes")
        return kept, numbers, problems


# Control characters but the tab, and those that a document may have but a line may not.
_CONTROL = re.compile(r"[\x00-\x08\x0e-\x1f\x7f-\x9f]")
_IN_LINES = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_NOT_UTF8 = re.compile("[\udc80-\udcff]")


def _fault(
    chunk: Chunk, i: int, lines: tuple[str, ...], sides: tuple[str, ...], last: bool
) -> tuple[str, str] | None:
    for side, length in enumerate(chunk.overlong):
        if last and length:
            return "long", f"{chunk.place(i, side)} has {length:,} bytes"
    for side, text in enumerate(sides):
        column = min(side, len(lines) - 1)
        if not text:
            other = next((text for text in sides if text), "")
            beside = f" beside {shown(other)}" if other else ""
            return "empty", f"{chunk.place(i, column)}{beside}"
        if fault := _garbled(chunk, i, column, text, _IN_LINES):
            return fault
    return None


def _garbled(
    chunk: Chunk, i: int, side: int, text: str, control: re.Pattern[str]
) -> tuple[str, str] | None:
    if bad := _NOT_UTF8.search(text):
        # The first such byte from this line on is the one in this text.
        before = sum(len(line) + 1 for line in chunk.blobs[side].split(b"\n", i + 1)[:i])
        rest = chunk.blobs[side][before:]
        at = len(
            rest.decode(errors="surrogateescape").split(bad[0])[0].encode(errors="surrogateescape")
        )
        return "undecodable", (
            f"{chunk.place(i, side)}, byte {chunk.offsets[side] + before + at:,} "
            f"(0x{rest[at]:02X}): {shown(text)}"
        )
    if bad := control.search(text):
        return "control", f"{chunk.place(i, side)} has U+{ord(bad[0]):04X}: {shown(text)}"
    return None


def shown(text: str) -> str:
    text = ascii(text) if _NOT_UTF8.search(text) else repr(text)
    return text if len(text) <= 60 else f"{text[:58]}…{text[-1]}"


def _several(paths: PathLike | Sequence[PathLike]) -> list[PathLike]:
    return [paths] if isinstance(paths, str | os.PathLike) else list(paths)
