"""Text to learn from without labels: documents, windows of their tokens, and what is held out.

    files → documents (or lines) → tokens in a store → windows (document, first, how many)

A document of n tokens counts n + 1 places, the last one its end. `language` predicts each of them
from those before it, `encoder` some from all others.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar

import numpy as np
from jaxtyping import Int64

from regard import checkpoint
from regard.data.batch import Ids, windows
from regard.data.text import Documents, Lines, OnBad, Rules, Store, Text, store
from regard.data.tokenizer import AnyTokenizer, Tokenizer, read_pair
from regard.model.encoder import EncoderShape
from regard.model.language import LanguageShape
from regard.task.settings import check_start, describe_reuse
from regard.task.text import Progress
from regard.train.task import Sample

Words: TypeAlias = Literal["pairs", "characters", "bytes"]
Examples: TypeAlias = Literal["joined", "documents", "lines"]

_JOINED = 2**14  # tokens of documents that are read at once where windows run on over their ends
_FEW = 20  # documents of which none is held out whole


@dataclass(frozen=True)
class CorpusConfig:
    """What a task without labels says of its text. Tasks say more exactly what some settings mean
    to them."""

    text: tuple[str, ...] = ()
    """Files of text; plain, or compressed: gz, xz, bz2, zst."""
    valid: tuple[str, ...] = ()
    """Validation set: files of text. Without any, some of the text is held out."""
    held_out: float = 0.05
    """Fraction of the text that is held out."""
    judged: int = 50_000
    """Validation tokens that are read at each evaluation. The best model reads all at the end,
    unless that would take over a twentieth of the training's time."""
    examples: Examples = "joined"
    """What a token may attend to."""
    context: int = 256
    """Sequence length in tokens."""
    start: str | None = None
    """Fine-tune: a trained model's folder, or a run's."""
    words: Words = "pairs"
    """Tokenization: subwords (BPE) learned from the text, characters, or bytes."""
    vocabulary: int = 4000
    """Vocabulary size of BPE; fewer where the text has no more to learn."""
    tokenizer: str | None = None
    """A tokenizer.json to use instead of learning one."""
    on_bad: OnBad | None = None
    """Bad lines: count, show and leave them out (skip), or stop (refuse). By default they are left
    out, unless more than a tenth of the lines cannot be read."""
    cache: str | None = None
    """Cache folder for tokenized text; by default in the user's own cache."""

    def __post_init__(self) -> None:
        for name in ("judged", "context"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} ({getattr(self, name)}) must be 1 or more")
        if not 0 < self.held_out < 1:
            raise ValueError(f"held_out ({self.held_out}) must be above 0 and below 1; try 0.05")
        check_start(self.start, self.tokenizer)


class Joined:
    """Documents end to end, with EOS between them, some thousands of tokens at a time."""

    def __init__(self, documents: Store, indices: np.ndarray, end: int):
        self.documents, self.indices, self.end = documents, indices, end
        sizes = documents.lengths[indices, 0].astype(np.int64) + 1
        self.begins = np.cumsum(sizes) - sizes
        """Where each document begins if all of them are end to end."""
        # Those that begin in the same stretch belong together.
        cuts = np.flatnonzero(np.diff(self.begins // _JOINED)) + 1
        self.first = np.concatenate([[0], cuts])
        """The first document of each stretch."""
        self.lengths = np.add.reduceat(sizes, self.first) - 1

    def tokens(self, i: int) -> "Stretch":
        return Stretch(self, int(self.begins[self.first[i]]), int(self.lengths[i]))


@dataclass(frozen=True)
class Stretch:
    """Documents end to end, of which a slice is read where it is asked for: a document may be as
    long as a file, and a window of it is short."""

    text: Joined
    begin: int
    length: int

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, part: slice) -> Int64[np.ndarray, "n"]:
        first, last, _ = part.indices(self.length)
        parts: list[np.ndarray] = [np.empty(0, np.int64)]
        at, stop = self.begin + first, self.begin + last
        while at < stop:
            n = int(np.searchsorted(self.text.begins, at, "right")) - 1
            document = self.text.documents.tokens(int(self.text.indices[n]))
            begin = int(self.text.begins[n])
            if at < begin + len(document):
                parts.append(document[at - begin : stop - begin].astype(np.int64))
            else:
                parts.append(np.array([self.text.end], np.int64))
            at += len(parts[-1])
        return np.concatenate(parts)


class Apart:
    """Documents, each by itself."""

    def __init__(self, documents: Store, indices: np.ndarray):
        self.documents, self.indices = documents, indices
        self.lengths = documents.lengths[indices, 0].astype(np.int64)

    def tokens(self, i: int) -> Ids:
        return self.documents.tokens(int(self.indices[i]))


W = TypeVar("W", bound="Windows")


@dataclass(frozen=True)
class Windows:
    """Windows of text, by number: what is trained on, or what is held out."""

    text: Joined | Apart
    places: np.ndarray
    """(document, first place, how many) of each."""

    def bytes(self, tokenizer: AnyTokenizer) -> int:
        """How long the text is that the windows hold; an end counts as a line's."""
        total = 0
        begin = 0
        documents = self.places[:, 0]
        for stop in [*(np.flatnonzero(np.diff(documents)) + 1), len(documents)]:
            first, last = int(self.places[begin, 1]), int(self.places[stop - 1, 1:].sum())
            part = np.asarray(self.text.tokens(int(documents[begin]))[first:last])
            ends = last - first - len(part) + int((part == tokenizer.end).sum())
            total += len(tokenizer.decode(part.tolist()).encode()) + ends
            begin = int(stop)
        return total

    def first(self: W, tokens: int) -> W:
        """So many as hold about this many tokens."""
        enough = int(np.searchsorted(np.cumsum(self.places[:, 2]), tokens)) + 1
        return replace(self, places=self.places[:enough])


def sample(judged: Windows, held: Windows) -> Sample:
    """What is scored while training, of what is held out."""
    count, total = (int(part.places[:, 2].sum()) for part in (judged, held))
    return Sample(count, total, "tokens")


@dataclass(frozen=True)
class Corpus:
    """What a task without labels is trained on, and what is held out."""

    tokenizer: AnyTokenizer
    train: Windows
    held: Windows
    notes: list[str]
    """What was wrong with the files, one line each."""


def read(
    config: CorpusConfig,
    run: Path | None,
    saved: checkpoint.Saved | None,
    progress: Progress | None,
) -> Corpus:
    """Reads and tokenizes the text, and holds some out.

    The tokenizer is that of a run which was begun, of a model to go on from, the one that is named,
    or learned from the text.
    """
    text = named(config.text, config.examples, "--text")
    validation = named(config.valid, config.examples, "--valid") if config.valid else None
    if run is not None and (run / "last").is_dir():
        tokenizer, _ = read_pair(run / "last")
    elif saved is not None:
        tokenizer, _ = read_pair(saved.folder)
    elif config.tokenizer is not None:
        tokenizer = Tokenizer.read(config.tokenizer)
    else:
        tokenizer = _learned(config, text, progress)
    documents = stored(config, text, tokenizer, progress)
    notes = documents.problems.lines()
    if validation is not None:
        valid = stored(config, validation, tokenizer, progress)
        notes += valid.problems.lines()
        notes += describe_reuse(config.text, config.valid)
        train, held = (cut(config, part, tokenizer.end) for part in (documents, valid))
    else:
        train, held = split(config, documents, tokenizer.end)
    if not len(train.places) or not len(held.places):
        raise ValueError(
            f"{', '.join(text.names)}: usable {text.unit}s ({len(documents)}) are too few to train "
            f"and to validate on{documents.problems.why}; add text, or name files with --valid"
        )
    return Corpus(tokenizer, train, held, notes)


def check_positions(shape: LanguageShape | EncoderShape, context: int) -> None:
    """Every token of a window needs a position."""
    if shape.position == "learned" and shape.length < context:
        raise ValueError(
            f"learned positions ({shape.length}) must be at least context ({context}); raise the "
            "model's length"
        )


def named(paths: Sequence[str], examples: Examples, flag: str) -> Text:
    """The text of these files, which a flag has named."""
    if not paths:
        raise ValueError(f"there is no text to learn from; name at least one file with {flag}")
    return Lines(*paths, flag=flag) if examples == "lines" else Documents(*paths, flag=flag)


def cut(
    config: CorpusConfig, documents: Store, end: int, indices: np.ndarray | None = None
) -> Windows:
    """These documents, or all, in windows of the context's length."""
    chosen = np.arange(len(documents)) if indices is None else indices
    text: Joined | Apart
    if config.examples == "joined":
        text = Joined(documents, chosen, end)
    else:
        text = Apart(documents, chosen)
    return Windows(text, windows(text.lengths, config.context))


def split(config: CorpusConfig, documents: Store, end: int) -> tuple[Windows, Windows]:
    """What is trained on, and what is held out: documents by their hash, or the end of a few."""
    if len(documents) < _FEW:
        whole = cut(config, documents, end)
        held = max(1, round(config.held_out * len(whole.places)))
        return (
            replace(whole, places=whole.places[:-held]),
            replace(whole, places=whole.places[-held:]),
        )
    every = np.arange(len(documents))
    marks = [
        hashlib.blake2b(documents.tokens(i).tobytes(), digest_size=8).digest()
        for i in range(len(documents))
    ]
    share = np.array([int.from_bytes(mark, "big") / 2**64 for mark in marks])
    # The least hashes, equal documents on one side, and at least one of them.
    out = share <= max(config.held_out, float(share.min()))
    return cut(config, documents, end, every[~out]), cut(config, documents, end, every[out])


def stored(
    config: CorpusConfig, text: Text, tokenizer: AnyTokenizer, progress: Progress | None
) -> Store:
    """All documents as tokens, in a store that is kept."""
    told: Any = None
    if progress is not None:
        told = lambda done, total, kept: progress("tokens", done / max(1, total))  # noqa: E731
    return store(
        text,
        tokenizer,
        rules=Rules(longest=None),
        on_bad=config.on_bad,
        cache=config.cache,
        progress=told,
    )


def _learned(config: CorpusConfig, text: Text, progress: Progress | None) -> Tokenizer:
    def texts() -> Iterator[str]:
        told = None if progress is None else partial(progress, "tokenizer")
        return (document for (document,) in text.read(told))

    match config.words:
        case "pairs":
            return Tokenizer.bpe(texts(), config.vocabulary)
        case "characters":
            return Tokenizer.characters(texts())
        case "bytes":
            return Tokenizer.bpe([""], 260)
