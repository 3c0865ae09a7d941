"""Text in files as examples: lines, pairs of lines, documents; `table.py` has columns of tables.

Lines end with a newline, whatever else Unicode takes for one; blanks around them are dropped. The
work is in two halves: the files are cut into chunks of bytes, and any process makes examples of a
chunk.

Messages name a file as the command line does, with its flag: `--source train.en does not exist`.
"""

import contextlib
import os
import re
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, cast

from regard.data.cache import PathLike
from regard.data.diagnosis import encoding, endings
from regard.data.files import LineFile, Reading, beginning, check_file
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

    def __init__(
        self, groups: Sequence[tuple[PathLike, ...]], sides: int, flags: Sequence[str] = ()
    ):
        self.groups = [tuple(Path(path) for path in group) for group in groups]
        self.sides, self.flags = sides, tuple(flags)
        """`flags` name the files of a group, such as `--source`, in messages."""
        self.problems = Problems()
        self._counted = False
        if not self.groups:
            raise ValueError("there is no file to read; name at least one")
        for path, name in zip(self.paths, self.names):
            check_file(path, name)

    @property
    def paths(self) -> list[Path]:
        return [path for group in self.groups for path in group]

    @property
    def names(self) -> list[str]:
        """Each file with its flag, as on the command line."""
        flags = [f"{flag} " for flag in self.flags] or [""] * len(self.groups[0])
        return [f"{flag}{path}" for group in self.groups for flag, path in zip(flags, group)]

    def form(self) -> list[object]:
        """How the files are read: a part of what a store is known by."""
        return [type(self).__name__, len(self.groups), self.sides]

    def __iter__(self) -> Iterator[tuple[str, ...]]:
        for _, example in self.numbered():
            yield example

    def numbered(
        self, told: Callable[[float], None] | None = None
    ) -> Generator[tuple[int, tuple[str, ...]], None, None]:
        """Every example with the number of its line, which counts bad lines too.

        `told` is told now and then which share of the files is read.
        """
        self.problems = Problems()
        reading, total = Reading(), sum(path.stat().st_size for path in self.paths)
        for chunk in self.chunks(reading):
            examples, numbers, problems = self.examples(chunk)
            self.problems.merge(problems)
            yield from zip(numbers, examples)
            if told:
                told(reading.bytes / max(1, total))
        self.advise(self.problems)

    def read(self, told: Callable[[float], None] | None = None) -> Iterator[tuple[str, ...]]:
        """Every example; a ValueError where there is none."""
        empty = True
        for _, example in self.numbered(told):
            empty = False
            yield example
        if empty:
            raise self.refusal(self.problems)

    def refusal(self, problems: Problems) -> ValueError:
        """Of a text that has these problems, and no good example."""
        names = ", ".join(self.names)
        if not problems:
            return ValueError(f"there is no text in {names}; give at least one line")
        return ValueError(f"no {self.unit} of {names} can be used{problems.why}")

    def advise(self, problems: Problems) -> None:
        """Adds what can be done about whole files, judged by how they begin."""
        for path in filter(self.is_text, self.paths):
            judges = self._judges(path)
            for kind in judges.keys() & problems.counts.keys():
                if advice := judges[kind](beginning(path)):
                    problems.advise(kind, f"{path.name} {advice}")

    def is_text(self, path: Path) -> bool:
        """Whether a file's own lines are read, so that how it begins can be judged."""
        return True

    def _judges(self, path: Path) -> dict[str, Callable[[bytes], str | None]]:
        """For kinds of problems: what a file seems to be that begins so, and the remedy."""
        return {"undecodable": encoding, "control": endings}

    def chunks(self, reading: "Reading") -> Iterator[Chunk]:
        """The files' lines, in pieces that a worker may be given."""
        names = iter(self.names)
        for group in self.groups:
            with contextlib.ExitStack() as stack:
                files = [self.open(path, reading, stack, next(names)) for path in group]
                yield from self._chunks(files)
                for file in files:
                    file.finish()

    def check_lines(self) -> None:
        """Refuses files side by side with unequal numbers of lines: to count them is cheap beside
        what is then done with them."""
        if self._counted or len(self.groups[0]) == 1:
            return
        names = iter(self.names)
        for group in self.groups:
            with contextlib.ExitStack() as stack:
                files = [self.open(path, Reading(), stack, next(names)) for path in group]
                for file in files:
                    file.rest()
                _check_counts(files)
        self._counted = True

    def open(
        self, path: Path, reading: Reading, stack: contextlib.ExitStack, name: str
    ) -> LineFile:
        """One of the files, as lines."""
        return LineFile(path, reading, stack, name)

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
        for file, ended in zip(files, (line is None for line in row)):
            if not ended:
                file.rest()
        _check_counts(files)

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
            if i == last and (fault := _overlong(chunk, i)):
                problems.add(*fault)
                continue
            row = self._cells(lines, chunk, i)
            if isinstance(row, Fault):
                problems.add(*row)
                continue
            sides = tuple(map(str.strip, row))
            printable = all(side and side.isprintable() for side in sides)
            if not printable and (fault := _fault(chunk, i, lines, sides)):
                problems.add(*fault)
            else:
                kept.append(sides)
                numbers.append(chunk.line + i)
        return kept, numbers, problems

    def _cells(self, lines: tuple[str, ...], chunk: Chunk, i: int) -> "tuple[str, ...] | Fault":
        """The sides of an example that stands in these lines."""
        return lines


def _check_counts(files: Sequence[LineFile]) -> None:
    """Of files that were read to their ends."""
    if len({file.lines for file in files}) > 1:
        counts = " but ".join(f"{file.lines:,} lines in {file.name}" for file in files)
        raise ValueError(
            f"{counts}: line n belongs to line n, so that from where one is missing on, all pairs "
            "would be wrong; give them equally many lines"
        )


class Lines(Text):
    """One side: every line is an example."""

    def __init__(self, *paths: PathLike, flag: str = ""):
        super().__init__([(path,) for path in paths], 1, given(flag))


class Pairs(Text):
    """Two sides, in two files or in two equally long lists of files: line n belongs to line n."""

    def __init__(
        self,
        source: PathLike | Sequence[PathLike],
        target: PathLike | Sequence[PathLike],
        flags: Sequence[str] = (),
    ):
        sources, targets = _several(source), _several(target)
        if len(sources) != len(targets):
            raise ValueError(
                f"source files ({len(sources)}) and target files ({len(targets)}) must be as many; "
                "name them in the same order"
            )
        super().__init__(list(zip(sources, targets)), 2, flags)


class Documents(Text):
    """One side: documents that are parted by blank lines, and by the ends of files."""

    unit = "document"

    def __init__(self, *paths: PathLike, flag: str = ""):
        super().__init__([(path,) for path in paths], 1, given(flag))

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
        if overlong := _overlong(chunk, len(lines) - 1):
            problems.add(*overlong)
        return kept, numbers, problems


# Control characters but the tab, and those that a document may have but a line may not.
_CONTROL = re.compile(r"[\x00-\x08\x0e-\x1f\x7f-\x9f]")
_IN_LINES = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_NOT_UTF8 = re.compile("[\udc80-\udcff]")


class Fault(NamedTuple):
    """What is wrong with a line."""

    kind: str
    example: str


def _overlong(chunk: Chunk, i: int) -> Fault | None:
    """Of a chunk's last line."""
    for side, length in enumerate(chunk.overlong):
        if length:
            return Fault("long", f"{chunk.place(i, side)} has {length:,} bytes")
    return None


def _fault(chunk: Chunk, i: int, lines: tuple[str, ...], sides: tuple[str, ...]) -> Fault | None:
    for side, text in enumerate(sides):
        column = min(side, len(lines) - 1)
        if not text:
            other = next((text for text in sides if text), "")
            beside = f" beside {shown(other)}" if other else ""
            return Fault("empty", f"{chunk.place(i, column)}{beside}")
        if fault := _garbled(chunk, i, column, text, _IN_LINES):
            return fault
    return None


def _garbled(chunk: Chunk, i: int, side: int, text: str, control: re.Pattern[str]) -> Fault | None:
    if bad := _NOT_UTF8.search(text):
        # The first such byte from this line on is the one in this text.
        before = sum(len(line) + 1 for line in chunk.blobs[side].split(b"\n", i + 1)[:i])
        rest = chunk.blobs[side][before:]
        at = len(
            rest.decode(errors="surrogateescape").split(bad[0])[0].encode(errors="surrogateescape")
        )
        place = f"{chunk.place(i, side)}, byte {chunk.offsets[side] + before + at:,}"
        return Fault("undecodable", f"{place} (0x{rest[at]:02X}): {shown(text)}")
    if bad := control.search(text):
        place = chunk.place(i, side)
        return Fault("control", f"{place} has U+{ord(bad[0]):04X}: {shown(text)}")
    return None


def shown(text: str) -> str:
    text = ascii(text) if _NOT_UTF8.search(text) else repr(text)
    return text if len(text) <= 60 else f"{text[:58]}…{text[-1]}"


def given(flag: str) -> tuple[str, ...]:
    return (flag,) if flag else ()


def _several(paths: PathLike | Sequence[PathLike]) -> list[PathLike]:
    return [paths] if isinstance(paths, str | os.PathLike) else list(paths)
