"""The lines of a file or of standard input, plain or compressed, of any size.

Compression is recognised by the first bytes, and so are files that are not text. Lines end with LF,
with CR LF, or all of them with CR. Files are hashed while they are read, so that a text is read
only once.
"""

import bz2
import codecs
import contextlib
import gzip
import hashlib
import io
import lzma
import os
import re
import select
import stat
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

from regard.data.diagnosis import foreign
from regard.data.problems import reason
from regard.machine.extras import install

LINE = 2**20
"""Maximum bytes of a line; longer ones are skipped."""

BUFFER = 2**18
"""Bytes that are read at a time; the first of them decide what a file is."""

POLL_S = 0.01
"""How long a pipe may be empty before `LineFile.line` returns, so that a busy writer's lines are
answered together."""

_LINE_END = re.compile(rb"\n|\r.", re.DOTALL)


def check_file(path: Path, name: str = "") -> None:
    """A ValueError where this is no file that can be read as often as is needed."""
    name = name or str(path)
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        raise ValueError(f"{name} does not exist; check the name") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{name} cannot be read ({reason(error)}); check the name") from error
    if stat.S_ISDIR(mode):
        raise ValueError(f"{name} is a folder; name a file")
    if not stat.S_ISREG(mode):
        raise ValueError(f"{name} is a pipe or a device, which cannot be read twice; name a file")


def beginning(path: Path, name: str = "") -> bytes:
    """The first lines of a file, whatever it is compressed with."""
    with contextlib.ExitStack() as stack:
        return LineFile(path, Reading(), stack, name).start


class Reading:
    """What has been read of a text's files, as they lie on the disk."""

    def __init__(self, hashed: bool = False):
        self.bytes = 0
        self.hashed = hashed
        self.inputs: list[dict[str, Any]] = []


class LineFile:
    """A file's lines, one at a time, decompressed. `file` is an open one to read, such as a pipe,
    instead of the one at `path`."""

    def __init__(
        self,
        path: Path,
        reading: Reading,
        stack: contextlib.ExitStack,
        name: str = "",
        file: io.RawIOBase | io.BufferedIOBase | None = None,
    ):
        self.path, self.name = path, name or str(path)
        self.lines = self.offset = 0
        self.overlong: int | None = None
        self.reading = reading
        self._begun = b""
        try:
            if file is None:
                file = stack.enter_context(open(path, "rb", buffering=0))  # noqa: SIM115
            self.raw = _Raw(file, reading)
        except OSError as error:
            raise ValueError(f"{self.name} cannot be read ({reason(error)})") from error
        with self._whole():
            self.stream = stack.enter_context(_opened(self.name, self.raw))
            is_compressed = self.stream.raw is not self.raw
            self.start = self.stream.peek(BUFFER)
        if what := foreign(self.start):
            raise ValueError(f"{self.name} {what}")
        if b"\r" in self.start[:-1] and b"\n" not in self.start:
            self.start = self.start.replace(b"\r", b"\n")
            newlines = _Newlines(self.stream, self.raw)
            self.stream = stack.enter_context(io.BufferedReader(newlines, BUFFER))
        if self.start.startswith(codecs.BOM_UTF8):  # a mark some editors write
            self.offset += len(self.stream.read(len(codecs.BOM_UTF8)))
        self.raw.polls = self.raw.is_pipe and not is_compressed
        self._readline = self.stream.readline

    def line(self) -> bytes | None:
        """The next line with its newline; None after the last; b"" while a pipe is empty."""
        self.overlong = None
        try:
            line = self._readline(LINE + 1 - len(self._begun))
        except _DAMAGE as error:
            raise self._damaged(error) from error
        if self._begun:
            line, self._begun = self._begun + line, b""
        if self.raw.is_idle and line[-1:] != b"\n" and len(line) <= LINE:
            self._begun = line
            return b""
        if not line:
            return None
        self.lines += 1
        self.offset += len(line)
        if line[-1] != 10:
            if len(line) <= LINE:
                return line + b"\n"
            begin = self.offset - len(line)
            with self._whole():
                while (line or self.raw.is_idle) and line[-1:] != b"\n":
                    line = self._readline(LINE)
                    self.offset += len(line)
            self.overlong = self.offset - begin
            return b"\n"
        return line

    def rest(self) -> int:
        """How many lines there are still."""
        begun, last = self.lines, b"\n"
        with self._whole():
            while block := self.stream.read1(BUFFER):
                self.lines += block.count(b"\n")
                last = block[-1:]
        self.lines += last != b"\n"
        return self.lines - begun

    def finish(self) -> None:
        while self.raw.read(2**20):
            pass
        size = self.raw.count
        if size != self.raw.size:
            raise ValueError(
                f"{self.name} changed while it was read; try again when it is complete"
            )
        digest = self.raw.sha256.hexdigest() if self.raw.sha256 else None
        self.reading.inputs.append({"name": str(self.path), "bytes": size, "sha256": digest})

    @contextlib.contextmanager
    def _whole(self) -> Iterator[None]:
        try:
            yield
        except _DAMAGE as error:
            raise self._damaged(error) from error

    def _damaged(self, error: Exception) -> ValueError:
        return ValueError(
            f"{self.name} is damaged after line {self.lines:,} ({reason(error)}); fetch it again"
        )


class _Raw(io.RawIOBase):
    """The bytes of an open file, before decompression, hashed and counted."""

    def __init__(self, file: io.RawIOBase | io.BufferedIOBase, reading: Reading):
        self._file: Any = file
        try:
            status = os.fstat(file.fileno())
        except (OSError, ValueError):  # in memory, without a descriptor
            self.size, self.is_pipe = 0, False
        else:
            self.size = status.st_size
            self.is_pipe = os.name == "posix" and not stat.S_ISREG(status.st_mode)
        self.polls = False
        """Whether reads of an empty pipe return None instead of waiting."""
        self.is_idle = False
        """Whether the last read returned None."""
        self._ended = False
        self.reading = reading
        self.sha256 = hashlib.sha256() if reading.hashed else None
        self.count = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        self.is_idle = self.polls and not select.select([self._file], [], [], POLL_S)[0]
        if self.is_idle:
            return None
        view, count = memoryview(buffer), 0
        while not self._ended and count < len(view):
            size = self._file.readinto(view[count:])
            self._ended = not size
            count += size
            # How lines end is decided by the first one, which a pipe may give in pieces.
            if self.count or _LINE_END.search(view[:count]):
                break
        if self.sha256:
            self.sha256.update(view[:count])
        self.count += count
        self.reading.bytes += count
        return count


class _Newlines(io.RawIOBase):
    """A file whose lines end with CR, with LF instead."""

    def __init__(self, file: io.BufferedReader, raw: _Raw):
        self._file, self._raw = file, raw

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        data = self._file.read1(len(buffer)).replace(b"\r", b"\n")
        if not data and self._raw.is_idle:
            return None
        buffer[: len(data)] = data
        return len(data)


class _Zstandard(io.RawIOBase):
    """The content of a zstandard file; unlike the library's own reader it notices a missing end."""

    def __init__(self, file: io.BufferedReader, make: Callable[[], Any]):
        self._file, self._make = file, make
        self._one = make()
        self._fed = False
        self._left = self._ready = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            data = self._left or self._file.read(2**17)
            self._left = b""
            if not data:
                if self._fed:
                    raise EOFError("the compressed data end too early")
                return 0
            self._fed = True
            self._ready = self._one.decompress(data)
            if self._one.eof:
                self._left = self._one.unused_data
                self._one, self._fed = self._make(), False
        count = min(len(buffer), len(self._ready))
        buffer[:count], self._ready = self._ready[:count], self._ready[count:]
        return count


class _DamageError(Exception):
    """A damaged file of a library's own kind."""


_DAMAGE = (EOFError, OSError, zlib.error, lzma.LZMAError, _DamageError)


def _opened(name: str, raw: _Raw) -> io.BufferedReader:
    buffered = cast(io.BufferedReader, io.BufferedReader(raw, BUFFER))
    start = buffered.peek(6)[:6]
    inner: Any
    if start[:2] == b"\x1f\x8b":
        inner = gzip.GzipFile(fileobj=buffered)
    elif start == b"\xfd7zXZ\0":
        inner = lzma.LZMAFile(buffered)  # noqa: SIM115
    elif start[:3] == b"BZh":
        inner = bz2.BZ2File(buffered)
    elif start[:4] == b"\x28\xb5\x2f\xfd":
        inner = _Zstandard(buffered, _zstandard(name))
    else:
        return buffered
    return io.BufferedReader(inner, BUFFER)


def _zstandard(name: str) -> Callable[[], Any]:
    try:
        import zstandard
    except ImportError:
        raise ValueError(f"{name} needs zstandard: {install('text')}") from None

    class Decompressor:
        def __init__(self) -> None:
            self._inner = zstandard.ZstdDecompressor().decompressobj()

        def decompress(self, data: bytes) -> bytes:
            try:
                return self._inner.decompress(data)
            except zstandard.ZstdError as error:
                raise _DamageError(error) from error

        @property
        def eof(self) -> bool:
            return bool(self._inner.eof)

        @property
        def unused_data(self) -> bytes:
            return self._inner.unused_data

    return Decompressor
