"""Columns of tables: TSV, CSV, JSON lines and Parquet, by position or by name.

    TSV, CSV     cells between separators; the first line has their names where columns have names
    JSON lines   an object in each line (.jsonl, .ndjson); `translation.en` is a key within another
    Parquet      known by its first bytes; read by pyarrow, as if it were JSON lines

Columns may also be tags: what they say is put before the source, as `<de>`, so that one model can
be told the language, or the register, to write.
"""

import contextlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias, get_args

from regard.data.cache import PathLike, sha256
from regard.data.diagnosis import SEPARATORS, Separator, columns, separated
from regard.data.files import LineFile, Reading, beginning
from regard.data.problems import Problems, reason
from regard.data.reading import Chunk, Fault, Text, given, shown
from regard.machine.extras import install

Column: TypeAlias = int | str
"""A position, counted from 0, or a name."""

_PARQUET = b"PAR1"
_JSON = (".jsonl", ".ndjson")
_BREAKS = re.compile(r"[\t\n\v\f\r\x1c-\x1e\x85\u2028\u2029]+")


class Table(Text):
    """Columns of files, as many sides as columns are chosen.

    Between tabs all is text. Other separators are CSV's: cells that hold one stand in quotes.
    """

    def __init__(
        self,
        *paths: PathLike,
        columns: Sequence[Column] = (0, 1),
        separator: Separator = "tab",
        tags: Sequence[Column] = (),
        flag: str = "",
    ):
        super().__init__([(path,) for path in paths], len(columns), given(flag))
        self.columns, self.separator, self.tags = tuple(columns), separator, tuple(tags)
        if not columns or any(isinstance(one, int) and one < 0 for one in (*columns, *tags)):
            raise ValueError(
                f"columns ({self.columns}) must be numbers from 0 on, or names; try (0, 1)"
            )
        if separator not in get_args(Separator):
            known = ", ".join(get_args(Separator))
            raise ValueError(f"separator ({separator!r}) is unknown; choose from {known}")
        self._sign = SEPARATORS[separator]
        self._kinds = {str(path): _kind(path) for path in self.paths}
        self._places = {
            str(path): self._found(path, name)
            for path, name in zip(self.paths, self.names)
            if self.is_text(path)
        }
        """Where the chosen columns are in each file with separators."""

    @property
    def wanted(self) -> tuple[Column, ...]:
        return (*self.columns, *self.tags)

    @property
    def _headed(self) -> bool:
        """Whether names are asked for, which a file with separators has in its first line."""
        return any(isinstance(column, str) for column in self.wanted)

    def is_text(self, path: Path) -> bool:
        return self._kinds[str(path)] == "separated"

    def form(self) -> list[object]:
        quoted = [] if self.separator == "tab" else [self.separator]
        tagged = [["tags", *self.tags]] if self.tags else []
        kinds = sorted(set(self._kinds.values()) - {"separated"})
        return [*super().form(), list(self.columns), *quoted, *tagged, *kinds]

    def open(
        self, path: Path, reading: Reading, stack: contextlib.ExitStack, name: str
    ) -> LineFile:
        if self._kinds[str(path)] == "parquet":
            return ParquetFile(path, reading, stack, name, self.wanted)
        return super().open(path, reading, stack, name)

    def examples(self, chunk: Chunk) -> tuple[list[tuple[str, ...]], list[int], Problems]:
        if self._headed and chunk.line == 1 and self._kinds[chunk.names[0]] == "separated":
            header, _, rest = chunk.blobs[0].partition(b"\n")
            offset = chunk.offsets[0] + len(header) + 1
            chunk = replace(chunk, blobs=(rest,), line=2, offsets=(offset,))
        return super().examples(chunk)

    def _cells(self, lines: tuple[str, ...], chunk: Chunk, i: int) -> tuple[str, ...] | Fault:
        (line,) = lines
        if not line.strip():
            return ("",) * self.sides
        separated = self._kinds[chunk.names[0]] == "separated"
        found = (self._split if separated else self._parsed)(line, chunk, i)
        if isinstance(found, Fault) or not self.tags:
            return found
        sides, tags = found[: self.sides], found[self.sides :]
        return (tagged(sides[0], tags), *sides[1:])

    def _split(self, line: str, chunk: Chunk, i: int) -> tuple[str, ...] | Fault:
        quoted = self.separator != "tab" and '"' in line
        cells = self._unquoted(line, chunk, i) if quoted else line.split(self._sign)
        places = self._places[chunk.names[0]]
        if len(cells) > max(places):
            return tuple(cells[place] for place in places)
        return Fault("columns", f"{chunk.place(i)} has {len(cells)}: {shown(line)}")

    def _unquoted(self, line: str, chunk: Chunk, i: int) -> list[str]:
        if (cells := _unquoted(line, self._sign)) is None:
            # Where a cell goes on in the next line, nobody could tell which lines are rows.
            raise ValueError(
                f"{chunk.place(i)}: its quotes do not pair up: {shown(line)}; a cell must begin "
                'and end with a quote, in one line, and a quote within is written as ""'
            )
        return cells

    def _parsed(self, line: str, chunk: Chunk, i: int) -> tuple[str, ...] | Fault:
        """The cells of a line of JSON, in one line each."""
        try:
            row = json.loads(line)
        except ValueError:
            return Fault("json", f"{chunk.place(i)}: {shown(line)}")
        cells = []
        for column in self.wanted:
            cell = _cell(row, column)
            if cell is None:
                return Fault("columns", f"{chunk.place(i)} has no {column!r}: {shown(line)}")
            cells.append(_BREAKS.sub(" ", cell))
        return tuple(cells)

    def _found(self, path: Path, name: str) -> tuple[int, ...]:
        """Where the chosen columns are, by the first line's names if some have names."""
        if not self._headed:
            return tuple(int(column) for column in self.wanted)
        first = beginning(path, name).split(b"\n")[0].decode(errors="replace").rstrip("\r")
        cells = first.split(self._sign) if self.separator == "tab" else _unquoted(first, self._sign)
        names = [cell.strip() for cell in cells or [first]]
        for column in self.wanted:
            if isinstance(column, str) and column not in names:
                raise ValueError(
                    f"{name} has no column {column!r}; its first line names {', '.join(names)}"
                )
        return tuple(
            names.index(column) if isinstance(column, str) else column for column in self.wanted
        )

    @property
    def _judges(self) -> dict[str, Callable[[bytes], str | None]]:
        return {**super()._judges, "columns": self._advice}

    def _advice(self, start: bytes) -> str | None:
        last = max(max(places) for places in self._places.values())
        number = columns(start, self.separator)
        if number > last:
            return None
        if other := separated(start, last + 1):
            name, number = other
            return (
                f"has {number:,} columns separated by {SEPARATORS[name]!r}; add --separator {name}"
            )
        if number == 1:
            return (
                f"has one column, without a {self.separator}; put one between the columns, or name "
                "another with --separator"
            )
        asked = " ".join(map(str, self.columns))
        return (
            f"has {number:,} columns, of which the first is 0, and --columns {asked} asks for "
            f"{last}; name others"
        )


def tagged(source: str, tags: Sequence[str]) -> str:
    """A source as a model with tags reads it; an empty tag is none."""
    marks = [f"<{'_'.join(tag.split())}>" for tag in tags if tag.strip()]
    return " ".join([*marks, source.strip()])


TAGS = re.compile(r"<(\S+)>(?: |$)")


def tags_of(source: str) -> tuple[str, ...]:
    """The tags that a source begins with."""
    found, at = [], 0
    while match := TAGS.match(source, at):
        found.append(match[1])
        at = match.end()
    return tuple(found)


class ParquetFile(LineFile):
    """The rows of a Parquet file as lines of JSON, a few thousand in memory at a time."""

    def __init__(
        self,
        path: Path,
        reading: Reading,
        stack: contextlib.ExitStack,
        name: str,
        wanted: Sequence[Column],
    ):
        self.path, self.name, self.reading = path, name, reading
        self.lines = self.offset = 0
        self.overlong = None
        try:
            from pyarrow import ArrowException, parquet
        except ImportError:
            raise ValueError(
                f"{name} is a Parquet file, which pyarrow reads: {install('text')}"
            ) from None
        self._damage: tuple[type[Exception], ...] = (ArrowException, OSError)
        try:
            self._file: Any = stack.enter_context(parquet.ParquetFile(path))
        except self._damage as error:
            raise self._broken(error) from error
        known = self._file.schema_arrow.names
        self._rows = self._lines(
            list(dict.fromkeys(self._top(one, known) for one in wanted)), known
        )

    def _top(self, column: Column, known: list[str]) -> str:
        """The name of a column, or of the one that it is within."""
        if isinstance(column, int):
            if column < len(known):
                return known[column]
            raise ValueError(
                f"{self.name} has {len(known)} columns, of which the first is 0, and {column} is "
                "asked for; name others with --columns"
            )
        top = column if column in known else column.partition(".")[0]
        if top not in known:
            raise ValueError(f"{self.name} has no column {column!r}; it has {', '.join(known)}")
        return top

    def _lines(self, names: list[str], known: list[str]) -> Iterator[bytes]:
        total, size = max(1, self._file.metadata.num_rows), self.path.stat().st_size
        try:
            for batch in self._file.iter_batches(4096, columns=names):
                for row in batch.to_pylist():
                    # Positions count all columns of the file.
                    whole = {name: row.get(name) for name in known}
                    yield json.dumps(whole, ensure_ascii=False, default=str).encode() + b"\n"
                self.reading.bytes += size * batch.num_rows // total
        except self._damage as error:
            raise self._broken(error) from error

    def line(self) -> bytes | None:
        line = next(self._rows, None)
        if line is not None:
            self.lines += 1
            self.offset += len(line)
        return line

    def finish(self) -> None:
        size = self.path.stat().st_size
        digest = sha256(self.path) if self.reading.hashed else None
        self.reading.inputs.append({"name": str(self.path), "bytes": size, "sha256": digest})

    def _broken(self, error: Exception) -> ValueError:
        return ValueError(
            f"{self.name} is damaged after row {self.lines:,} ({reason(error)}); fetch it again"
        )


def _kind(path: Path) -> str:
    with path.open("rb") as file:
        if file.read(len(_PARQUET)) == _PARQUET:
            return "parquet"
    ending = next((one for one in reversed(path.suffixes) if one not in _COMPRESSED), "")
    return "json" if ending.lower() in _JSON else "separated"


_COMPRESSED = (".gz", ".xz", ".bz2", ".zst")


def _cell(row: Any, column: Column) -> str | None:
    """What a row of JSON has in a column, as text; None where it has none."""
    if isinstance(column, int):
        cells = list(row.values()) if isinstance(row, dict) else row
        found = cells[column] if isinstance(cells, list) and column < len(cells) else None
    elif isinstance(row, dict) and column not in row and "." in column:
        first, _, rest = column.partition(".")
        return _cell(row.get(first), rest)
    else:
        found = row.get(column) if isinstance(row, dict) else None
    return None if found is None or isinstance(found, dict | list) else str(found)


def _unquoted(line: str, sign: str) -> list[str] | None:
    """The cells of a line of CSV; None where its quotes do not pair up."""
    cells: list[str] = []
    parts, odd = list[str](), 0
    for part in line.split(sign):
        parts.append(part)
        odd ^= part.count('"') % 2
        if odd:
            continue
        cell, parts = sign.join(parts).strip(), []
        if '"' in cell:
            within = cell[1:-1]
            if cell[0] + cell[-1] != '""' or '"' in within.replace('""', ""):
                return None
            cell = within.replace('""', '"')
        cells.append(cell)
    return None if odd else cells
