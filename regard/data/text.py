"""Text of any size: read in one pass, bad lines counted, tokens kept in a file for every epoch.

    Pairs("train.en.gz", "train.de.gz")     two files, line by line
    Table("pairs.tsv", columns=(0, 1))      one file with tabs
    Lines("text.txt")                       one side: a line is an example
    Documents("text.txt")                   one side: blank lines part examples

    store(text, (source, target))  ->  Store, whose examples are views into mapped files

Files may be plain or compressed (gzip, xz, bzip2, zstandard), which is known by their first bytes.
Lines end with a newline, whatever else Unicode takes for one; blanks around them are dropped.
A store is found again by its content: the sha256 of the files, the tokenizers and the rules.
"""

import contextlib
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
from jaxtyping import Int32, UInt16, UInt32

from regard.data.files import Reading
from regard.data.problems import Problems
from regard.data.reading import Chunk, Documents, Lines, Pairs, PathLike, Table, Text, shown
from regard.data.tokenizer import AnyTokenizer
from regard.data.workers import processors, spread

__all__ = [
    "Documents",
    "Lines",
    "Pairs",
    "Problems",
    "Rules",
    "Store",
    "Table",
    "Text",
    "default_cache",
    "store",
]

Tokens: TypeAlias = UInt16[np.ndarray, "_"] | UInt32[np.ndarray, "_"]
OnBad: TypeAlias = Literal["skip", "refuse"]
Progress: TypeAlias = Callable[[int, int, int], None]
"""Told now and then: bytes read, bytes in all, examples kept."""

FORMAT = 1
_KEY = 24  # hexadecimal digits that stand for a content
_SMALL = 2**24  # bytes of text that are not worth starting workers


@dataclass(frozen=True)
class Rules:
    """Which lines are bad. Empty, undecodable and garbled ones always are."""

    longest: int | None = 1000
    """Tokens that a side may have."""
    ratio: float | int | None = 9
    """How many times longer than the other one side may be, in tokens."""
    short: int = 5
    """A side with fewer tokens counts as having so many when sides are compared."""

    def __post_init__(self) -> None:
        if self.longest is not None and self.longest < 1:
            raise ValueError(f"longest ({self.longest}) must be 1 or more, or None for no end")
        if self.ratio is not None and self.ratio < 1:
            raise ValueError(f"ratio ({self.ratio}) must be 1 or more, or None for any; try 9")


# The store


class Store:
    """Examples as token ids in mapped files: any of them at once, none of them in memory."""

    def __init__(self, folder: PathLike, verify: bool = False):
        self.folder = Path(folder)
        header = _header(self.folder)
        _check_files(self.folder, header["files"], verify)
        self.header = header
        self.problems = Problems(**header["problems"])
        """What was left out when the text was read."""
        self.sides: int = header["sides"]
        self._examples: int = header["examples"]
        # Plain views of the maps: their slices cost less than a map's.
        self._tokens = [
            np.asarray(np.memmap(self.folder / f"tokens.{side}", header["dtype"], "r"))
            for side in range(self.sides)
        ]
        self._offsets = [
            np.asarray(np.memmap(self.folder / f"offsets.{side}", "<i8", "r"))
            for side in range(self.sides)
        ]
        lengths = np.memmap(self.folder / "lengths", "<i4", "r")
        self.lengths: Int32[np.ndarray, "n sides"] = np.asarray(lengths).reshape(-1, self.sides)
        """How many tokens each side of each example has."""

    def __len__(self) -> int:
        return self._examples

    def tokens(self, i: int, side: int = 0) -> Tokens:
        """One side of one example, a view into the file."""
        offsets = self._offsets[side]
        if not 0 <= i < self._examples:
            raise IndexError(f"example {i} of {self._examples}")
        return self._tokens[side][offsets[i] : offsets[i + 1]]

    def pair(self, i: int) -> tuple[Tokens, Tokens]:
        """An example with two sides: source and target."""
        if self.sides != 2:
            raise ValueError(f"examples here have sides ({self.sides}), not 2; use tokens(i)")
        return self.tokens(i, 0), self.tokens(i, 1)

    def __repr__(self) -> str:
        return f"Store({self._examples:,} examples, {self.sides} sides, {str(self.folder)!r})"


def store(
    text: Text,
    tokenizers: AnyTokenizer | Sequence[AnyTokenizer],
    *,
    rules: Rules | None = None,
    on_bad: OnBad = "skip",
    cache: PathLike | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
) -> Store:
    """The text's tokens, from the cache folder if they are there, else made in one pass.

    One tokenizer serves all sides, or there is one for each. Processes that want the same store at
    once wait for the one that makes it. One that is killed leaves nothing that would be taken for
    a store. `rules` are usual ones for lines; documents may be of any length.
    """
    if on_bad not in get_args(OnBad):
        raise ValueError(f"on_bad ({on_bad!r}) must be {' or '.join(get_args(OnBad))}")
    if rules is None:
        rules = Rules() if text.unit == "line" else Rules(longest=None)
    several = tuple(tokenizers) if isinstance(tokenizers, Sequence) else (tokenizers,) * text.sides
    if len(several) != text.sides:
        raise ValueError(
            f"tokenizers ({len(several)}) must be one, or as many as sides ({text.sides})"
        )
    wide = max(tokenizer.size for tokenizer in several) > 2**16
    job = _Job(text, several, rules, "<u4" if wide else "<u2")
    folder = Path(cache) if cache is not None else default_cache()
    key = job.key()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _sweep(folder)
        with _alone(folder, key):
            made = _found(folder, key, text) or _make(folder, key, job, on_bad, workers, progress)
    except OSError as error:
        raise ValueError(
            f"{folder} cannot keep the tokens ({error.strerror or error}); make room there, or "
            "name another cache folder"
        ) from error
    if made.problems and on_bad == "refuse":
        raise made.problems.refuse(_REMEDY)
    return made


_REMEDY = "mend the files, or pass on_bad='skip' to go on without these"


def default_cache() -> Path:
    """Where stores are kept unless a run says otherwise."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "regard"


@dataclass(frozen=True)
class _Job:
    """All that a worker needs to know."""

    text: Text
    tokenizers: tuple[AnyTokenizer, ...]
    rules: Rules
    dtype: str

    def key(self) -> str:
        """What is known of a store before its text is read."""
        return _digest(
            FORMAT,
            self.text.form(),
            [path.stat().st_size for path in self.text.paths],
            [hashlib.sha256(tokenizer.to_bytes()).hexdigest() for tokenizer in self.tokenizers],
            asdict(self.rules),
        )


def _digest(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:_KEY]


@dataclass(frozen=True)
class _Done:
    """A chunk's tokens for each side, the lengths of its examples, and what was left out."""

    tokens: list[Any]
    lengths: Any
    problems: Problems
    bytes: int = 0


def _tokenize(job: _Job, task: tuple[int, Chunk]) -> _Done:
    read, chunk = task
    examples, numbers, problems = job.text.examples(chunk)
    sides = list(zip(*examples)) if examples else [()] * job.text.sides
    packed = [tokenizer.encode_packed(texts) for tokenizer, texts in zip(job.tokenizers, sides)]
    lengths = np.stack([length for _, length in packed], 1)
    good = np.ones(len(lengths), bool)
    if len(lengths):
        good = _check_lengths(job.rules, lengths, numbers, examples, chunk, problems)
    tokens = [
        (ids if good.all() else ids[np.repeat(good, length)]).astype(job.dtype)
        for ids, length in packed
    ]
    return _Done(tokens, lengths[good].astype("<i4"), problems, read)


def _check_lengths(
    rules: Rules,
    lengths: Any,
    numbers: list[int],
    examples: list[tuple[str, ...]],
    chunk: Chunk,
    problems: Problems,
) -> Any:
    """Which examples have acceptable lengths."""
    longest, shortest = lengths.max(1), lengths.min(1)
    # A tokenizer may leave nothing of a text.
    faults = {"empty": shortest == 0}
    if rules.longest is not None:
        faults["long"] = longest > rules.longest
    if rules.ratio is not None:
        faults["ratio"] = longest > rules.ratio * np.maximum(shortest, rules.short)
    good = np.ones(len(lengths), bool)
    for kind, bad in faults.items():
        for i in np.flatnonzero(bad & good):
            counts = " and ".join(map(str, lengths[i]))
            where = chunk.place(numbers[i] - chunk.line, int(lengths[i].argmax()))
            problems.add(kind, f"{where} ({counts} tokens): {shown(examples[i][0])}")
        good &= ~bad
    return good


def _make(
    folder: Path,
    key: str,
    job: _Job,
    on_bad: OnBad,
    workers: int | None,
    progress: Progress | None,
) -> Store:
    total = sum(path.stat().st_size for path in job.text.paths)
    if workers is None:
        # Compressed text is about three times as long.
        workers = 0 if 3 * total < _SMALL else processors()
    draft = folder / f".{key}.{secrets.token_hex(4)}"
    draft.mkdir()
    try:
        reading = Reading(hashed=True)
        tasks = ((reading.bytes, chunk) for chunk in job.text.chunks(reading))
        writer = _Writer(draft, job)
        with writer, contextlib.closing(spread(_tokenize, job, tasks, workers)) as results:
            for done in results:
                writer.add(done)
                if writer.problems and on_bad == "refuse":
                    raise writer.problems.refuse(_REMEDY)
                if progress:
                    progress(done.bytes, total, writer.examples)
        names = ", ".join(str(path) for path in job.text.paths)
        if not writer.examples:
            raise ValueError(
                f"no {job.text.unit} of {names} can be used"
                + (f": {' | '.join(writer.problems.lines())}" if writer.problems else "")
            )
        writer.finish(reading.inputs)
        final = folder / f"{key}-{_content(reading.inputs)}"
        if final.exists():  # damaged, or somebody's where there are no locks
            shutil.rmtree(final)
        draft.rename(final)
        _sync(folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    if progress:
        progress(total, total, writer.examples)
    return Store(final)


def _found(folder: Path, key: str, text: Text) -> Store | None:
    """The store of just these files; they are hashed only where one of their sizes is there."""
    candidates = list(folder.glob(f"{key}-*"))
    if not candidates:
        return None
    inputs = [{"sha256": _sha256(path)} for path in text.paths]
    final = folder / f"{key}-{_content(inputs)}"
    if final not in candidates:
        return None
    try:
        return Store(final)
    except ValueError:  # damaged: it is made again
        return None


def _content(inputs: Sequence[dict[str, Any]]) -> str:
    return _digest([one["sha256"] for one in inputs])


class _Writer:
    """A store's files, appended to and hashed as the tokens come."""

    def __init__(self, draft: Path, job: _Job):
        self.draft, self.job = draft, job
        sides = range(job.text.sides)
        names = ["lengths", *(f"{part}.{side}" for side in sides for part in ("tokens", "offsets"))]
        self.files = {name: open(draft / name, "wb") for name in names}  # noqa: SIM115
        self.hashes = {name: hashlib.sha256() for name in names}
        self.ends = [0 for _ in sides]
        self.examples = 0
        self.problems = Problems()
        for side in sides:
            self._write(f"offsets.{side}", np.zeros(1, "<i8"))

    def __enter__(self) -> "_Writer":
        return self

    def __exit__(self, *error: object) -> None:
        for file in self.files.values():
            file.close()

    def _write(self, name: str, values: Any) -> None:
        data = np.ascontiguousarray(values).data
        self.files[name].write(data)
        self.hashes[name].update(data)

    def add(self, done: _Done) -> None:
        self.problems.merge(done.problems)
        self.examples += len(done.lengths)
        self._write("lengths", done.lengths)
        for side, tokens in enumerate(done.tokens):
            ends = self.ends[side] + np.cumsum(done.lengths[:, side], dtype="<i8")
            self._write(f"tokens.{side}", tokens)
            self._write(f"offsets.{side}", ends)
            self.ends[side] += len(tokens)

    def finish(self, inputs: list[dict[str, Any]]) -> None:
        files = {}
        for name, file in self.files.items():
            with open(file.name, "rb") as written:
                os.fsync(written.fileno())
                size = os.fstat(written.fileno()).st_size
            files[name] = {"bytes": size, "sha256": self.hashes[name].hexdigest()}
        header = {
            "format": FORMAT,
            "sides": self.job.text.sides,
            "examples": self.examples,
            "tokens": self.ends,
            "dtype": self.job.dtype,
            "inputs": inputs,
            "rules": asdict(self.job.rules),
            "problems": self.problems.to_json(),
            "files": files,
        }
        with open(self.draft / _HEADER, "w", encoding="utf-8") as said:
            json.dump(header, said, indent=2)
            said.flush()
            os.fsync(said.fileno())
        _sync(self.draft)


_HEADER = "header.json"


def _header(folder: Path) -> dict[str, Any]:
    try:
        header = json.loads((folder / _HEADER).read_bytes())
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder} is no store of tokens: {error}") from error
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise ValueError(f"{folder} is no store of tokens of format {FORMAT}; make it again")
    return header


def _check_files(folder: Path, files: dict[str, dict[str, Any]], verify: bool) -> None:
    for name, said in files.items():
        path = folder / name
        size = path.stat().st_size if path.is_file() else -1
        if size != said["bytes"]:
            raise ValueError(f"{path} has {size} bytes instead of {said['bytes']}; make it again")
        if verify and _sha256(path) != said["sha256"]:
            raise ValueError(f"{path} has changed since it was written; make it again")


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(folder: Path) -> None:
    with contextlib.suppress(OSError):  # some systems cannot
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def _alone(folder: Path, key: str, wait: bool = True) -> Iterator[bool]:
    """Nobody else makes the same store meanwhile; False where that cannot be had."""
    try:
        import fcntl
    except ImportError:  # a system without such locks
        yield False
        return
    with open(folder / f".{key}", "wb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # held by another; or a network's file system without locks
            yield False
        else:
            yield True


def _sweep(folder: Path) -> None:
    """Removes what killed processes left of stores that they were making."""
    for draft in folder.glob("." + _KEY * "[0-9a-f]" + ".*"):
        with _alone(folder, draft.name.split(".")[1], wait=False) as alone:
            if alone:
                shutil.rmtree(draft, ignore_errors=True)
