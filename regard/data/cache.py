"""The cache of tokenized text and decoded images: folders that are written atomically.

folder/KEY-CONTENT/header.json …    a store; its header says how long its files are
folder/.KEY.saving-RANDOM/          one that is being made, or whose maker was killed
folder/.KEY                         whose lock its maker holds

Where the folder cannot be written to, a process goes on with a temporary one, and says so.
"""

import atexit
import contextlib
import errno
import functools
import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import numpy as np

from regard.data.problems import reason
from regard.machine import atomic
from regard.machine.caches import default_cache

PathLike: TypeAlias = str | os.PathLike[str]
Progress: TypeAlias = Callable[[int, int, int], None]
"""Told now and then: how much is done, how much there is, examples kept."""

_FORMAT = 1
_STORAGE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)
"""Errors of writing, which have no file's name."""
_HEADER = "header.json"
_KEY = 24  # hexadecimal digits that stand for a content

T = TypeVar("T")


def keep(
    cache: PathLike | None,
    key: str,
    find: Callable[[Path], T | None],
    make: Callable[[Path], T],
) -> T:
    """What `find` finds in the cache folder, or else what `make` writes there.

    Processes that want the same at once wait for the one that makes it.
    """
    folder: PathLike = "the default cache" if cache is None else cache
    try:
        folder = default_cache() if cache is None else cache
        return _kept(Path(folder), key, find, make)
    except OSError as error:
        if not _concerns(error, Path(folder)):
            raise ValueError(
                f"{error.filename or 'a file'} could not be read or written ({reason(error)})"
            ) from error
        unusable = f"{folder} cannot be used as a cache ({reason(error)})"
    try:
        return _kept(_temporary(unusable), key, find, make)
    except OSError as error:
        raise ValueError(
            f"{unusable}, and a temporary folder neither ({reason(error)}); make room, or name "
            "another folder with --cache"
        ) from error


def _concerns(error: OSError, cache: Path) -> bool:
    """Whether an error is one of the cache, rather than of the data that it is made from."""
    if isinstance(error.filename, str | os.PathLike):
        path = Path(error.filename).absolute()
        cache = cache.absolute()
        return path == cache or cache in path.parents or path in cache.parents
    return error.errno in (None, *_STORAGE)


def _kept(folder: Path, key: str, find: Callable[[Path], T | None], make: Callable[[Path], T]) -> T:
    if folder.is_file():
        raise ValueError(f"{folder} is a file; name a folder for the cache with --cache")
    folder.mkdir(parents=True, exist_ok=True)
    atomic.clear_all(folder)
    with _alone(folder, key):
        found = find(folder)
        return make(folder) if found is None else found


@functools.cache
def _temporary(unusable: str) -> Path:
    """Instead of a cache that is unusable, as is said once; removed when the process ends."""
    folder = tempfile.mkdtemp(prefix="regard-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    print(f"regard: {unusable}; going on without one", file=sys.stderr, flush=True)
    return Path(folder)


class Draft:
    """A store that is being written: values are appended to its files and hashed."""

    def __init__(self, folder: Path, key: str, names: Sequence[str]):
        self.folder, self.names = folder, tuple(names)
        self._making = atomic.draft(folder / key)

    def __enter__(self) -> "Draft":
        self.draft = self._making.__enter__()
        self.files = {name: open(self.draft / name, "wb") for name in self.names}  # noqa: SIM115
        self.hashes = {name: hashlib.sha256() for name in self.names}
        return self

    def __exit__(self, *error: object) -> None:
        for file in self.files.values():
            with contextlib.suppress(OSError):  # what it could not write is discarded
                file.close()
        self._making.__exit__(None, None, None)

    def write(self, name: str, values: Any) -> None:
        data = np.ascontiguousarray(values).data
        self.files[name].write(data)
        self.hashes[name].update(data)

    def finish(self, name: str, header: dict[str, Any]) -> Path:
        """Syncs the store to the disk, and renames it into place."""
        files = {}
        for file_name, file in self.files.items():
            file.close()
            path = self.draft / file_name
            files[file_name] = {
                "bytes": path.stat().st_size,
                "sha256": self.hashes[file_name].hexdigest(),
            }
        content = json.dumps({"format": _FORMAT, **header, "files": files}, indent=2)
        (self.draft / _HEADER).write_text(content, encoding="utf-8")
        for path in self.draft.iterdir():
            atomic.sync(path)
        atomic.sync_folder(self.draft)
        final = self.folder / name
        # One that is there is damaged, or somebody else's where there are no locks.
        atomic.replace(self.draft, final)
        return final


def header(folder: Path, verify: bool = False) -> dict[str, Any]:
    """A store's header, if its files have the sizes it says; with `verify`, and the checksums."""
    try:
        said = json.loads((folder / _HEADER).read_bytes())
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder} is no store ({reason(error)}); make it again") from error
    if not isinstance(said, dict) or said.get("format") != _FORMAT:
        raise ValueError(f"{folder} is no store of format {_FORMAT}; make it again")
    for name, file in said["files"].items():
        path = folder / name
        size = path.stat().st_size if path.is_file() else -1
        if size != file["bytes"]:
            raise ValueError(f"{path} has {size} bytes instead of {file['bytes']}; make it again")
        if verify and sha256(path) != file["sha256"]:
            raise ValueError(f"{path} has changed since it was written; make it again")
    return said


def digest(*parts: object) -> str:
    """A hash of the parts, as JSON."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:_KEY]


def sha256(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({reason(error)})") from error


@contextlib.contextmanager
def _alone(folder: Path, key: str) -> Iterator[None]:
    """Waits until no other process makes the same store, where there are locks."""
    with contextlib.ExitStack() as stack:
        # Not every system has such locks, nor every file system; who cannot write makes nothing.
        with contextlib.suppress(ImportError, OSError):
            import fcntl

            file = stack.enter_context(open(folder / f".{key}", "wb"))
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
