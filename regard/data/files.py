"""A file's lines, plain or compressed, whatever its size.

Compression is recognised by a file's first bytes, and so are files that are no text. Lines end with
LF, with CR LF, or all of them with CR. Files are hashed while they are read, so that a text is read
once only.
"""

import bz2
import codecs
import contextlib
import gzip
import hashlib
import io
import lzma
import os
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
"""Bytes that are read at a time; a file is judged by the first so many."""


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
    """A file's lines, one at a time, whatever it is compressed with."""

    def __init__(self, path: Path, reading: Reading, stack: contextlib.ExitStack, name: str = ""):
        self.path, self.name = path, name or str(path)
        self.lines = self.offset = 0
        self.overlong: int | None = None
        self.reading = reading
        try:
            self.raw = stack.enter_context(_Raw(path, reading))
        except OSError as error:
            raise ValueError(f"{self.name} cannot be read ({reason(error)})") from error
        with self._whole():
            self.stream = stack.enter_context(_opened(path, self.raw))
            self.start = self.stream.peek(BUFFER)
        if what := foreign(self.start):
            raise ValueError(f"{self.name} {what}")
        if b"\r" in self.start[:-1] and b"\n" not in self.start:
            self.start = self.start.replace(b"\r", b"\n")
            self.stream = stack.enter_context(io.BufferedReader(_Newlines(self.stream), BUFFER))
        if self.start.startswith(codecs.BOM_UTF8):  # a mark some editors write
            self.offset += len(self.stream.read(len(codecs.BOM_UTF8)))
        self._readline = self.stream.readline

    def line(self) -> bytes | None:
        """The next line with its newline; None after the last."""
        self.overlong = None
        try:
            line = self._readline(LINE + 1)
        except _DAMAGE as error:
            raise self._damaged(error) from error
        if not line:
            return None
        self.lines += 1
        self.offset += len(line)
        if line[-1] != 10:
            if len(line) <= LINE:
                return line + b"\n"
            begin = self.offset - len(line)
            with self._whole():
                while line and line[-1] != 10:
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
    """A file as it lies on the disk, hashed and counted on the way."""

    def __init__(self, path: Path, reading: Reading):
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115
        self.size = os.fstat(self._file.fileno()).st_size
        self.reading = reading
        self.sha256 = hashlib.sha256() if reading.hashed else None
        self.count = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = self._file.readinto(buffer) or 0
        if self.sha256:
            self.sha256.update(memoryview(buffer)[:count])
        self.count += count
        self.reading.bytes += count
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


class _Newlines(io.RawIOBase):
    """A file whose lines end with CR, with LF instead."""

    def __init__(self, file: io.BufferedReader):
        self._file = file

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._file.read1(len(buffer)).replace(b"\r", b"\n")
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


def _opened(path: Path, raw: _Raw) -> io.BufferedReader:
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
        inner = _Zstandard(buffered, _zstandard(path))
    else:
        return buffered
    return io.BufferedReader(inner, BUFFER)


def _zstandard(path: Path) -> Callable[[], Any]:
    try:
        import zstandard
    except ImportError:
        raise ValueError(f"{path} needs zstandard: {install('text')}") from None

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
