"""The files that a run learns from, by their hashes: a run resumes with the data it began with.

Above `LIMIT` bytes a hash is of samples: of `BLOCKS` blocks at equal distances, and in folders of
all names and sizes. `--verify-data` reads everything.
"""

import hashlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from regard.data.image import images_in
from regard.data.problems import Problems

LIMIT = 2**30
BLOCKS, BLOCK = 1024, 2**16
KEPT = ("start", "tokenizer", "cache")
"""Paths in the settings of which a run has a copy of its own, or that hold no data."""


def fingerprints(settings: object, verify: bool = False) -> dict[str, Any]:
    """The size and the hashes of every file and folder of data that a task's settings name."""
    named = _paths(settings) if isinstance(settings, Mapping) else ()
    return {str(path): _fingerprint(path, verify) for path in named}


def read_record(run: Mapping[str, Any]) -> dict[str, Any]:
    """What a run's config.json says of its data."""
    data = run.get("data")
    known = data if isinstance(data, dict) else {}
    return {path: about for path, about in known.items() if isinstance(about, dict)}


def find_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The files and folders whose content has changed."""
    return [
        path
        for path in before.keys() & now.keys()
        if any(before[path][key] != now[path][key] for key in before[path].keys() & now[path])
    ]


def describe_samples(prints: Mapping[str, Any]) -> str | None:
    """What was not read whole, in words."""
    names = [
        f"{path} ({about['bytes'] / 2**30:,.1f} GiB)"
        for path, about in prints.items()
        if "sha256" not in about
    ]
    if not names:
        return None
    return f"data compared by a sampled hash: {', '.join(names)}; --verify-data reads all of it"


def _paths(settings: Mapping[str, Any]) -> Iterator[Path]:
    for name, value in settings.items():
        for path in value if isinstance(value, list | tuple) else [value]:
            if name in KEPT or not isinstance(path, str) or not os.path.isabs(path):
                continue
            if os.path.isfile(path) or os.path.isdir(path):  # not a pipe
                yield Path(path)


def _fingerprint(path: Path, verify: bool) -> dict[str, Any]:
    files = sorted(_files(path)) if path.is_dir() else [path]
    names = [str(file.relative_to(path)) for file in files]
    sizes = [file.stat().st_size for file in files]
    total = sum(sizes)
    about: dict[str, Any] = {"bytes": total}
    listed = repr(list(zip(names, sizes))).encode()
    if total > LIMIT:
        about["sampled"] = _sample(listed, files, sizes)
    if verify or total <= LIMIT:
        digest = hashlib.sha256(listed)
        for file in files:
            with file.open("rb") as opened:
                digest.update(hashlib.file_digest(opened, "sha256").digest())
        about["sha256"] = digest.hexdigest()
    return about


def _files(folder: Path) -> list[Path]:
    """A folder's images, or where it has none all files."""
    if images := list(images_in(folder, Problems())):
        return images
    return [
        file
        for file in folder.rglob("*")
        if file.is_file() and not any(p.startswith(".") for p in file.relative_to(folder).parts)
    ]


def _sample(listed: bytes, files: list[Path], sizes: list[int]) -> str:
    """The hash of blocks at equal distances in the files laid end to end."""
    digest, begin, step = hashlib.sha256(listed), 0, sum(sizes) // BLOCKS
    for file, size in zip(files, sizes):
        places = range(-(-begin // step) * step, begin + size, step)
        if places:
            with file.open("rb") as opened:
                for place in places:
                    opened.seek(place - begin)
                    digest.update(opened.read(BLOCK))
        begin += size
    return digest.hexdigest()
