"""Columns of tables: TSV, CSV, JSON lines and Parquet, by position or by name.

    TSV, CSV     cells between separators; a first line with the names of columns is left out
    JSON lines   an object in each line (.jsonl, .ndjson); `translation.en` is a key within another
    Parquet      known by its first bytes; read by pyarrow, as if it were JSON lines

Columns may also be tags: what they say is put before the source, as `<de>`, so that one model can
be told the language, or the register, to write.
"""

import codecs
import contextlib
import csv
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeAlias, get_args

from regard.data.cache import PathLike, sha256
from regard.data.diagnosis import SEPARATORS, Separator, separated
from regard.data.files import LINE, LineFile, Reading, beginning
from regard.data.problems import Problems, reason
from regard.data.reading import Chunk, Fault, Text, given, shown
from regard.machine.extras import install

Column: TypeAlias = int | str
"""A position, counted from 0, or a name."""

_PARQUET = b"PAR1"
_JSON = (".jsonl", ".ndjson")
_WITHIN = b"\x1d"
"""What a line break within a cell becomes while a row is read."""
csv.field_size_limit(max(LINE, csv.field_size_limit()))
_BREAKS = re.compile(r"[\t\n\v\f\r\x1c-\x1e\x85\u2028\u2029]+")


class Table(Text):
    """Columns of files, as many sides as columns are chosen.

    Without a `separator`, that of .csv files is found in their first lines, and that of others is
    the tab. Between tabs all is text. Other separators are CSV's: cells that contain one, or a
    line break, stand in quotes.
    """

    def __init__(
        self,
        *paths: PathLike,
        columns: Sequence[Column] = (0, 1),
        separator: Separator | None = None,
        tags: Sequence[Column] = (),
        flag: str = "",
    ):
        super().__init__([(path,) for path in paths], len(columns), given(flag))
        self.columns, self.tags = tuple(columns), tuple(tags)
        if not columns or any(isinstance(one, int) and one < 0 for one in (*columns, *tags)):
            raise ValueError(
                f"columns ({self.columns}) must be numbers from 0 on, or names; try (0, 1)"
            )
        if separator not in (None, *get_args(Separator)):
            known = ", ".join(get_args(Separator))
            raise ValueError(f"separator ({separator!r}) is unknown; choose from {known}")
        self._kinds = {str(path): _kind(path) for path in self.paths}
        self._layouts = {
            str(path): self._layout(path, name, separator)
            for path, name in zip(self.paths, self.names)
            if self.is_text(path)
        }

    @property
    def wanted(self) -> tuple[Column, ...]:
        return (*self.columns, *self.tags)

    def is_text(self, path: Path) -> bool:
        return self._kinds[str(path)] == "separated"

    def form(self) -> list[object]:
        layouts = [[one.separator, one.header] for one in self._layouts.values()]
        tagged = [["tags", *self.tags]] if self.tags else []
        kinds = sorted(set(self._kinds.values()) - {"separated"})
        return [*super().form(), list(self.columns), layouts, *tagged, *kinds]

    def open(
        self, path: Path, reading: Reading, stack: contextlib.ExitStack, name: str
    ) -> LineFile:
        if self._kinds[str(path)] == "parquet":
            return ParquetFile(path, reading, stack, name, self.wanted)
        if self.is_text(path) and self._layouts[str(path)].separator != "tab":
            return CsvFile(path, reading, stack, name, self._layouts[str(path)].separator)
        return super().open(path, reading, stack, name)

    def examples(self, chunk: Chunk) -> tuple[list[tuple[str, ...]], list[int], Problems]:
        layout = self._layouts.get(chunk.names[0])
        if layout is None:
            return super().examples(chunk)
        noticed = ""
        if layout.header and chunk.line == 1:
            header, _, rest = chunk.blobs[0].partition(b"\n")
            offset, line = chunk.offsets[0] + len(header) + 1, 2 + header.count(_WITHIN)
            chunk = replace(chunk, blobs=(rest,), line=line, offsets=(offset,))
            if layout.noticed:
                names = header.decode(errors="replace").strip()
                noticed = f"line 1 of {Path(chunk.names[0]).name}: {shown(names)}"
        if layout.separator == "tab":
            kept, numbers, problems = super().examples(chunk)
        else:
            rows = _Rows(*(getattr(chunk, field.name) for field in fields(chunk)))
            kept, numbers, problems = super().examples(rows)
            if _WITHIN in chunk.blobs[0]:
                before = accumulate(row.count(_WITHIN) for row in chunk.blobs[0].split(b"\n"))
                more = [0, *before]
                numbers = [number + more[number - chunk.line] for number in numbers]
        if noticed:
            problems.add("header", noticed)
        return kept, numbers, problems

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
        layout = self._layouts[chunk.names[0]]
        cells = _csv(line, layout.separator)
        if len(cells) > max(layout.places):
            return tuple(cells[place] for place in layout.places)
        return Fault("columns", f"{chunk.place(i)} has {len(cells)}: {shown(line.strip())}")

    def _parsed(self, line: str, chunk: Chunk, i: int) -> tuple[str, ...] | Fault:
        """The cells of a line of JSON, in one line each."""
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            return Fault("json", f"{chunk.place(i)}: {shown(line)}")
        cells = []
        for column in self.wanted:
            cell = _cell(row, column)
            if cell is None:
                return Fault("columns", f"{chunk.place(i)} has no {column!r}: {shown(line)}")
            cells.append(_BREAKS.sub(" ", cell))
        return tuple(cells)

    def _layout(self, path: Path, name: str, separator: Separator | None) -> "_Layout":
        """How a file with separators is read, judged by how it begins."""
        start = beginning(path, name).removeprefix(codecs.BOM_UTF8)
        if separator is None:
            separator = separator_of(start) if _ending(path) == ".csv" else "tab"
        rows = _first_rows(start, separator)
        names = [cell.strip() for cell in rows[0]]
        for column in self.wanted:
            if isinstance(column, str) and column not in names:
                other = separated(start, 2) if len(names) == 1 else None
                advice = f"; add --separator {other[0]}" if other else ""
                raise ValueError(
                    f"{name} has no column {column!r}; its first line names "
                    f"{', '.join(names)}{advice}"
                )
        places = tuple(names.index(one) if isinstance(one, str) else one for one in self.wanted)
        named = any(isinstance(column, str) for column in self.wanted)
        noticed = not named and has_header(rows, places)
        return _Layout(separator, places, named or noticed, noticed)

    def _judges(self, path: Path) -> dict[str, Callable[[bytes], str | None]]:
        advice = partial(self._advice, layout=self._layouts[str(path)])
        return {**super()._judges(path), "columns": advice}

    def _advice(self, start: bytes, layout: "_Layout") -> str | None:
        last = max(layout.places)
        rows = _first_rows(start, layout.separator)
        number = Counter(map(len, rows)).most_common(1)[0][0]
        if number > last:
            return None
        if other := separated(start, last + 1):
            name, number = other
            return (
                f"has {number:,} columns separated by {SEPARATORS[name]!r}; add --separator {name}"
            )
        if number == 1:
            return (
                f"has one column, without a {layout.separator}; put one between the columns, or "
                "name another with --separator"
            )
        asked = " ".join(map(str, self.columns))
        return (
            f"has {number:,} columns, of which the first is 0, and --columns {asked} asks for "
            f"{last}; name others"
        )


@dataclass(frozen=True)
class _Layout:
    """How a file with separators is read."""

    separator: Separator
    places: tuple[int, ...]
    """Where the chosen columns are."""
    header: bool
    """Whether the first line names the columns."""
    noticed: bool
    """Whether it was judged to be one, without names that were asked for."""


class CsvFile(LineFile):
    """The rows of a CSV file as lines, where quoted cells may contain line breaks.

    A line break within a cell becomes `_WITHIN`, so that lines can be counted.
    """

    def __init__(
        self,
        path: Path,
        reading: Reading,
        stack: contextlib.ExitStack,
        name: str,
        separator: Separator,
    ):
        super().__init__(path, reading, stack, name)
        self._separator = separator

    def line(self) -> bytes | None:
        line = super().line()
        if line is None or b'"' not in line:
            return line
        number, parts = self.lines, [line]
        try:
            next(_reader(self._physical(parts), self._separator))
        except csv.Error:
            raise ValueError(
                f"line {number:,} of {self.path.name}: its quotes do not pair up: "
                f"{shown(line.decode(errors='surrogateescape').strip())}; a quoted cell must begin "
                'and end with a quote, and a quote within is written as ""'
            ) from None
        return b"".join(parts)[:-1].replace(b"\n", _WITHIN) + b"\n"

    def _physical(self, parts: list[bytes]) -> Iterator[str]:
        """The lines of one row, collected in `parts`."""
        yield parts[0].decode("latin-1")  # one character for each byte; separators are ASCII
        while (line := super().line()) is not None:
            parts.append(line)
            yield line.decode("latin-1")
        raise csv.Error


class _Rows(Chunk):
    """Rows of CSV, some of which take several lines."""

    def place(self, i: int, side: int = 0) -> str:
        within = b"".join(self.blobs[0].split(b"\n", i)[:i]).count(_WITHIN)
        return super().place(i + within, side)


def _csv(line: str, separator: Separator) -> list[str]:
    """The cells of a row; between tabs, quotes are text."""
    if separator == "tab" or '"' not in line:
        return line.split(SEPARATORS[separator])
    return [_BREAKS.sub(" ", cell) for cell in next(_reader([line.rstrip()], separator))]


def _reader(lines: Iterable[str], separator: Separator) -> Iterator[list[str]]:
    sign = SEPARATORS[separator]
    return csv.reader(lines, delimiter=sign, skipinitialspace=True, strict=True)


def _first_rows(start: bytes, separator: Separator) -> list[list[str]]:
    """The rows that a file begins with; the first line alone where they are no valid CSV."""
    lines = start.decode(errors="replace").strip("\r\n").split("\n")
    if separator == "tab":
        return [line.split("\t") for line in lines]
    rows: list[list[str]] = []
    with contextlib.suppress(csv.Error):
        rows.extend(row for row in _reader((f"{line}\n" for line in lines), separator) if row)
    return rows or [lines[0].split(SEPARATORS[separator])]


def separator_of(start: bytes) -> Separator:
    """The separator of a CSV file that begins so: of most lines, as often as in the first one."""
    lines = re.sub(rb'"[^"]*"', b"", start).splitlines()[:1000] or [b""]

    def lines_alike(separator: Separator) -> tuple[int, int]:
        sign = SEPARATORS[separator].encode()
        count = lines[0].count(sign)
        return sum(line.count(sign) == count > 0 for line in lines), count

    return max(("comma", "semicolon", "tab", "pipe"), key=lines_alike)


_NAME = re.compile(r"[^\W\d]\w*(?:[ ._-]\w+){0,2}")
_USUAL_NAMES = """
answer category class comment content description document english french german id index
input label labels language line message name number original output question review sentence
sentiment source source_text src summary tag target target_text text texts tgt title
translation trg tweet bezeichnung deutsch englisch kategorie klasse quelle satz sprache
übersetzung ziel anglais allemand catégorie étiquette français langue phrase texte
traduction ar cs da de el en es fi fr he hi hu it ja ko nl pl pt ro ru sv tr uk vi zh
"""


def has_header(rows: Sequence[Sequence[str]], places: Sequence[int]) -> bool:
    """Whether the first row names the columns, of which those at `places` are chosen.

    Its cells must be names that do not recur in their columns; and they must be usual names of
    columns, or stand above ten longer texts and be in lower case or beside labels, or one cell must
    stand above numbers.
    """
    first, *others = ([cell.strip() for cell in row] for row in rows)
    others = [row for row in others if len(row) == len(first)]
    if not others or len(first) <= max(places):
        return False
    names = [first[place] for place in places]
    if not all(map(_NAME.fullmatch, names)):
        return False
    columns = list(zip(*others))
    if any(name in columns[place] for name, place in zip(names, places)):
        return False
    if {name.lower() for name in names} <= set(_USUAL_NAMES.split()):
        return True
    if any(not _number(name) and all(map(_number, column)) for name, column in zip(first, columns)):
        return True
    spaced = [sum(" " in cell for cell in columns[place]) for place in places]
    repeated = any(2 * len(set(columns[place])) <= len(others) for place in places)  # labels
    return (
        len(others) >= 10
        and (all(map(str.islower, first)) or repeated)
        and max(spaced) >= 0.9 * len(others)
        and not any(" " in name for name in names)
    )


def _number(cell: str) -> bool:
    return re.fullmatch(r"[+-]?\d+(?:[.,]\d+)?", cell) is not None


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
    return "json" if _ending(path) in _JSON else "separated"


def _ending(path: Path) -> str:
    """A file's suffix without that of its compression, in lower case."""
    return next((one for one in map(str.lower, reversed(path.suffixes)) if one not in _PACKED), "")


_PACKED = (".gz", ".xz", ".bz2", ".zst")


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
