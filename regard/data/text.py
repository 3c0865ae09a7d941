"""Text of any size: tokenized in one pass, bad lines counted, tokens cached for every epoch.

    Pairs("train.en.gz", "train.de.gz")     two files, line by line
    Table("pairs.tsv", columns=(0, 1))      one file with tabs
    Lines("text.txt")                       one side: a line is an example
    Documents("text.txt")                   one side: blank lines part examples

    store(text, (source, target))  ->  Store, whose examples are views into memory-mapped files

Files may be plain or compressed (gzip, xz, bzip2, zstandard), which is known by their first bytes.
Lines end with a newline, whatever else Unicode takes for one; blanks around them are dropped.
A store's key is its content: the sha256 of the files, the tokenizers and the rules.
"""

import contextlib
import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
from jaxtyping import Int32, UInt16, UInt32

from regard.data.batch import EndToEnd, Indices, gathered
from regard.data.cache import Draft, PathLike, Progress, digest, header, keep, sha256
from regard.data.files import Reading
from regard.data.problems import Problems
from regard.data.reading import Chunk, Documents, Lines, Pairs, Text, shown
from regard.data.table import Table
from regard.data.tokenizer import AnyTokenizer
from regard.data.workers import processors, spread
from regard.machine.caches import default_cache

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

_SMALL = 2**24  # bytes of text that are not worth starting workers


@dataclass(frozen=True)
class Rules:
    """Which lines are bad. Empty, undecodable and garbled ones always are."""

    longest: int | None = 1000
    """Maximum length of a side, in tokens."""
    ratio: float | int | None = 9
    """Maximum length ratio of the two sides, in tokens."""
    short: int = 5
    """Shorter sides count as this long in the length ratio."""

    def __post_init__(self) -> None:
        if self.longest is not None and self.longest < 1:
            raise ValueError(f"longest ({self.longest}) must be 1 or more, or None for no end")
        if self.ratio is not None and self.ratio < 1:
            raise ValueError(f"ratio ({self.ratio}) must be 1 or more, or None for any; try 9")


# The store


class Store:
    """Examples as token ids in memory-mapped files, with random access."""

    def __init__(self, folder: PathLike, verify: bool = False):
        self.folder = Path(folder)
        self.header = said = header(self.folder, verify)
        self.problems = Problems(**said["problems"])
        """What was left out when the text was read."""
        self.sides: int = said["sides"]
        self._examples: int = said["examples"]
        # Plain views of the maps: their slices cost less than a map's.
        self._tokens = [
            np.asarray(np.memmap(self.folder / f"tokens.{side}", said["dtype"], "r"))
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

    def packed(self, indices: Indices, side: int) -> EndToEnd:
        """One side of these examples, end to end."""
        return gathered(self._tokens[side], self._offsets[side], indices)

    def __repr__(self) -> str:
        return f"Store({self._examples:,} examples, {self.sides} sides, {str(self.folder)!r})"


def store(
    text: Text,
    tokenizers: AnyTokenizer | Sequence[AnyTokenizer],
    *,
    rules: Rules | None = None,
    on_bad: OnBad | None = "skip",
    cache: PathLike | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
) -> Store:
    """The text's tokens, from the cache folder if they are there, else made in one pass.

    One tokenizer serves all sides, or there is one for each. Processes that want the same store at
    once wait for the one that makes it. One that is killed leaves nothing that would be taken for
    a store. `rules` are usual ones for lines; documents may be of any length. `on_bad` None leaves
    out bad lines, unless more than a tenth of the lines cannot be read.
    """
    if on_bad not in (None, *get_args(OnBad)):
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
    key = job.key()
    made = keep(
        cache,
        key,
        lambda folder: _found(folder, key, text),
        lambda folder: _make(folder, key, job, on_bad, workers, progress),
    )
    made.problems.check(on_bad, len(made))
    return made


@dataclass(frozen=True)
class _Job:
    """All that a worker needs to know."""

    text: Text
    tokenizers: tuple[AnyTokenizer, ...]
    rules: Rules
    dtype: str

    def key(self) -> str:
        """What is known of a store before its text is read."""
        return digest(
            self.text.form(),
            [path.stat().st_size for path in self.text.paths],
            [hashlib.sha256(tokenizer.to_bytes()).hexdigest() for tokenizer in self.tokenizers],
            asdict(self.rules),
        )


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
    on_bad: OnBad | None,
    workers: int | None,
    progress: Progress | None,
) -> Store:
    job.text.check_lines()
    total = sum(path.stat().st_size for path in job.text.paths)
    if workers is None:
        # Compressed text is about three times as long.
        workers = 0 if 3 * total < _SMALL else processors()
    reading, problems = Reading(hashed=True), Problems()
    sides = range(job.text.sides)
    names = [f"{part}.{side}" for side in sides for part in ("tokens", "offsets")]
    examples, ends = 0, [0 for _ in sides]
    with Draft(folder, key, ["lengths", *names]) as draft:
        for side in sides:
            draft.write(f"offsets.{side}", np.zeros(1, "<i8"))
        tasks = ((reading.bytes, chunk) for chunk in job.text.chunks(reading))
        with contextlib.closing(spread(_tokenize, job, tasks, workers)) as results:
            for done in results:
                problems.merge(done.problems)
                if problems and on_bad == "refuse":
                    raise problems.refusal()
                examples += len(done.lengths)
                draft.write("lengths", done.lengths)
                for side, tokens in enumerate(done.tokens):
                    after = ends[side] + np.cumsum(done.lengths[:, side], dtype="<i8")
                    draft.write(f"tokens.{side}", tokens)
                    draft.write(f"offsets.{side}", after)
                    ends[side] += len(tokens)
                if progress:
                    progress(done.bytes, total, examples)
        job.text.advise(problems)
        if not examples:
            raise job.text.refusal(problems)
        about = {
            "sides": job.text.sides,
            "examples": examples,
            "tokens": ends,
            "dtype": job.dtype,
            "inputs": reading.inputs,
            "rules": asdict(job.rules),
            "problems": problems.to_json(),
        }
        hashes = [one["sha256"] for one in reading.inputs]
        final = draft.finish(f"{key}-{digest(hashes)}", about)
    if progress:
        progress(total, total, examples)
    return Store(final)


def _found(folder: Path, key: str, text: Text) -> Store | None:
    """The store of just these files; they are hashed only where one of their sizes is there."""
    candidates = list(folder.glob(f"{key}-*"))
    if not candidates:
        return None
    final = folder / f"{key}-{digest([sha256(path) for path in text.paths])}"
    if final not in candidates:
        return None
    try:
        return Store(final, verify=True)  # damage would change what is learned
    except ValueError:  # damaged: it is made again
        return None
