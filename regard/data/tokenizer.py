"""Text to token ids and back: byte-pair encoding, characters, or anybody's tokenizer.json.

Byte-pair encoding (Sennrich et al. 2016) over UTF-8 bytes knows every text: what is decoded is
what was encoded, in Unicode's composed form (NFC). A space is put before the text and belongs to
the word that follows, so that a word is the same token wherever it stands. Digits are tokens of
their own, because numbers are copied digit by digit.

Specials are never made from text: `</s>` in a sentence is four ordinary characters.
"""

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, SupportsIndex, TypeAlias, cast

import numpy as np
import tokenizers
from jaxtyping import Integer
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers

from regard.data.files import check_file
from regard.data.problems import reason
from regard.data.workers import interruptible
from regard.machine.extras import install

SPECIALS = ("<pad>", "<s>", "</s>", "<unk>")
"""Special tokens: padding, start, end, unknown; ids 0 to 3 of every tokenizer trained here."""

_NAMES = {
    "pad": ("<pad>", "[PAD]", "<PAD>", "<|pad|>", "<blank>"),
    "start": ("<s>", "[BOS]", "<bos>", "<BOS>", "<sos>", "<start>", "<|begin_of_text|>", "[CLS]"),
    "end": ("</s>", "[EOS]", "<eos>", "<EOS>", "<end>", "<|end_of_text|>", "[SEP]"),
    "unknown": ("<unk>", "[UNK]", "<UNK>", "<|unk|>"),
}

# Words with their marks (as Indic scripts need), single digits, runs of signs; each with the space
# before it. White space beyond that one space stays by itself.
_PARTS = r" ?[\p{L}\p{M}]+| ?\p{N}| ?[^\s\p{L}\p{M}\p{N}]+|\s+(?!\S)|\s+"

_LONGEST = 1000  # characters of a word; the time to learn from longer ones grows with their square
_RUNS = re.compile(rf"(?<!\S)\S{{{_LONGEST + 1},}}|(?<!\s)\s{{{_LONGEST + 1},}}")

_KEPT = 2**18  # words remembered; texts rarely have more that come again


class Tokenizer:
    """A tokenizer.json, and which of its tokens mean padding, start, end and unknown."""

    def __init__(
        self,
        inner: tokenizers.Tokenizer,
        *,
        pad: int,
        start: int,
        end: int,
        unknown: int | None = None,
    ):
        # Whoever cuts or pads does so where it is seen; and text never turns into specials.
        inner.no_truncation()
        inner.no_padding()
        inner.encode_special_tokens = True
        self.inner = inner
        self.pad, self.start, self.end, self.unknown = pad, start, end, unknown
        self._specials = {pad, start, end, unknown}
        self.size: int = 1 + max(inner.get_vocab(with_added_tokens=True).values())
        """Vocabulary size: the largest id plus one."""
        self._description: dict[str, Any] = json.loads(inner.to_str())
        self._named = {token["content"] for token in self._description["added_tokens"]}
        self._words = _Words(inner)
        self._between = self._joint()

    @classmethod
    def bpe(cls, texts: Iterable[str], size: int, *, least: int = 2) -> "Tokenizer":
        """Byte-pair encoding learned from texts: the pairs that occur most, `least` times at least.

        The same texts in any order give the same tokenizer. Texts with little in them give fewer
        tokens than `size`. Words of more than a thousand characters are learned from in parts.
        """
        smallest = len(SPECIALS) + 256
        if size < smallest:
            raise ValueError(
                f"vocabulary ({size}) must be at least {smallest}: 256 bytes and {len(SPECIALS)} "
                "specials; try 8000"
            )
        inner = _over_bytes(models.BPE())
        trainer = trainers.BpeTrainer(
            vocab_size=size,
            min_frequency=least,
            special_tokens=list(SPECIALS),
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        count = 0

        def counted() -> Iterator[str]:
            nonlocal count
            for text in _texts(texts):
                count += 1
                yield from _bounded(text)

        interruptible(lambda parts: inner.train_from_iterator(parts, trainer), counted())
        if not count:
            raise ValueError("there is no text to learn a tokenizer from; give at least one line")
        return cls(inner, pad=0, start=1, end=2, unknown=3)

    @classmethod
    def characters(cls, texts: Iterable[str]) -> "Tokenizer":
        """One token for every character of the texts; all others are unknown."""
        composed = normalizers.NFC()
        found: set[str] = set()
        for text in _texts(texts):
            found.update(composed.normalize_str(text))
        if not found:
            raise ValueError("there is no text to take characters from; give at least one line")
        vocabulary = {name: i for i, name in enumerate((*SPECIALS, *sorted(found)))}
        inner = _over_characters(models.WordLevel(vocabulary, unk_token=SPECIALS[3]))
        inner.add_special_tokens(list(SPECIALS))
        return cls(inner, pad=0, start=1, end=2, unknown=3)

    @classmethod
    def read(
        cls,
        path: str | os.PathLike[str],
        *,
        pad: str | int | None = None,
        start: str | int | None = None,
        end: str | int | None = None,
        unknown: str | int | None = None,
    ) -> "Tokenizer":
        """Any tokenizer.json; specials are known by their usual names, or named here."""
        path = Path(path)
        check_file(path)
        try:
            inner = tokenizers.Tokenizer.from_buffer(path.read_bytes())
        except OSError as error:
            raise ValueError(f"{path} cannot be read ({reason(error)})") from error
        except Exception as error:  # the library raises a plain Exception
            raise ValueError(f"{path} is not a tokenizer.json: {reason(error)}") from error
        given = {"pad": pad, "start": start, "end": end, "unknown": unknown}
        found = {role: _find(inner, role, name, path) for role, name in given.items()}
        if absent := [role for role in ("pad", "start", "end") if found[role] is None]:
            sought = "; ".join(f"{role}: {' '.join(_NAMES[role])}" for role in absent)
            raise ValueError(
                f"{path} has no token known to mean {' or '.join(absent)} (looked for {sought}); "
                f'name it: Tokenizer.read(path, {absent[0]}="…")'
            )
        return cls(inner, **cast(dict[str, int], found))

    @classmethod
    def from_files(cls, folder: str | os.PathLike[str]) -> "Tokenizer":
        """The tokenizer.json of a model's folder."""
        return cls.read(Path(folder) / "tokenizer.json")

    def to_bytes(self) -> bytes:
        """The tokenizer.json, the same bytes for the same tokenizer."""
        return (self.inner.to_str(pretty=True) + "\n").encode()

    def encode(self, text: str) -> list[int]:
        """The text's tokens, without specials."""
        (ids,) = self.encode_batch([text])
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        ids, lengths = self.encode_packed(texts)
        ends = np.cumsum(lengths).tolist()
        whole = ids.tolist()
        return [whole[begin:end] for begin, end in zip([0, *ends], ends)]

    def encode_packed(
        self, texts: Sequence[str]
    ) -> tuple[Integer[np.ndarray, "T"], Integer[np.ndarray, "B"]]:
        """All texts' tokens end to end, and how many each of them has."""
        try:
            parts: list[bytes | None] = [self._quickly(text) for text in texts]
        except (TypeError, AttributeError) as error:
            raise _not_text(texts, error) from error
        slow = [i for i, part in enumerate(parts) if part is None]
        for i, part in zip(slow, self._words.several([texts[i] for i in slow])):
            parts[i] = part
        whole = cast(list[bytes], parts)
        lengths = np.fromiter(map(len, whole), np.int64, len(whole)) // _ID.itemsize
        return np.frombuffer(b"".join(whole), _ID), lengths

    def decode(self, ids: Iterable[SupportsIndex]) -> str:
        """The text of the tokens; specials are dropped."""
        return self.inner.decode(self._shown(ids), skip_special_tokens=True)

    def decode_batch(self, batch: Iterable[Iterable[SupportsIndex]]) -> list[str]:
        kept = [self._shown(ids) for ids in batch]
        return self.inner.decode_batch(kept, skip_special_tokens=True)

    def _shown(self, ids: Iterable[SupportsIndex]) -> list[int]:
        return [i for i in map(int, ids) if i not in self._specials]

    def pieces(self, ids: Iterable[SupportsIndex]) -> list[str]:
        """Each token as a person reads it: ▁ is a space, <0xE2> a byte that is no whole letter."""
        names = [self.inner.id_to_token(int(i)) or f"<{i}>" for i in ids]
        if "ByteLevel" not in json.dumps(self._description["decoder"]):
            return [name.replace(" ", "▁") for name in names]
        return [name if name in self._named else _readable(name) for name in names]

    @property
    def merges(self) -> list[tuple[tuple[int, int], int]]:
        """Byte-pair encoding: two tokens, and the one they are merged to. Other kinds have none."""
        ids = self.inner.get_vocab(with_added_tokens=True)
        pairs = (
            pair.split(" ") if isinstance(pair, str) else pair
            for pair in self._description["model"].get("merges", ())
        )
        return [((ids[left], ids[right]), ids[left + right]) for left, right in pairs]

    def __getstate__(self) -> dict[str, Any]:
        roles = {"pad": self.pad, "start": self.start, "end": self.end, "unknown": self.unknown}
        return {"file": self.to_bytes(), **roles}

    def __setstate__(self, state: dict[str, Any]) -> None:
        file = state.pop("file")
        Tokenizer.__init__(self, tokenizers.Tokenizer.from_buffer(file), **state)

    def __repr__(self) -> str:
        return f"Tokenizer({self._description['model']['type']}, {self.size} tokens)"

    # A text is a list of words, and words come again: those met before need not be tokenized
    # again. That is exact where no token spans a space, which is known of the two kinds above.

    def _joint(self) -> bytes | None:
        """What stands between the tokens of two words, or None where words are not independent."""
        cut, model = _cut(self._description), self._description["model"]
        if cut == _cut_by(_over_bytes(models.BPE())) and not model.get("dropout"):
            return b""
        if cut == _cut_by(_over_characters(models.BPE())) and model["type"] == "WordLevel":
            (space,) = self._words.several([" "])
            return space
        return None

    def _quickly(self, text: str) -> bytes | None:
        if self._between is None:
            return None
        if self._between == b"":
            # Single spaces between words and no other white space: `isprintable` knows of none
            # but the space.
            if not text:
                return b""
            if text[0] == " " or text[-1] == " " or "  " in text or not text.isprintable():
                return None
        return self._between.join(map(self._words.__getitem__, text.split(" ")))


_ID = np.dtype("<u4")


class _Words(dict[str, bytes]):
    """The ids of words, as bytes, which join faster than anything else."""

    def __init__(self, inner: tokenizers.Tokenizer):
        super().__init__()
        self.inner = inner

    def __missing__(self, word: str) -> bytes:
        (ids,) = self.several([word])
        if len(self) < _KEPT and len(word) < 64:
            self[word] = ids
        return ids

    def several(self, texts: list[str]) -> list[bytes]:
        if not texts:
            return []
        try:
            encoded = self.inner.encode_batch_fast(texts, add_special_tokens=False)
        except TypeError as error:
            raise _not_text(texts, error) from error
        return [np.array(one.ids, _ID).tobytes() for one in encoded]


def _bounded(text: str) -> Iterator[str]:
    """The text, cut where one of its words is overlong."""
    begin = 0
    for run in _RUNS.finditer(text) if len(text) > _LONGEST else ():
        # Scripts without spaces have such runs too, but of several words.
        for _, (first, last) in _split().pre_tokenize_str(run[0]):
            for cut in range(run.start() + first + _LONGEST, run.start() + last, _LONGEST):
                yield text[begin:cut]
                begin = cut
    yield text[begin:]


def _split() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Split(Regex(_PARTS), "isolated")


def _over_bytes(model: models.Model) -> tokenizers.Tokenizer:
    inner = tokenizers.Tokenizer(model)
    inner.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Prepend(" ")])
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [_split(), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    inner.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    return inner


def _over_characters(model: models.Model) -> tokenizers.Tokenizer:
    inner = tokenizers.Tokenizer(model)
    inner.normalizer = normalizers.NFC()
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    inner.decoder = decoders.Fuse()
    return inner


def _cut(description: Mapping[str, Any]) -> list[Any]:
    """How a tokenizer.json cuts text before its model sees it."""
    return [description["normalizer"], description["pre_tokenizer"]]


def _cut_by(inner: tokenizers.Tokenizer) -> list[Any]:
    return _cut(json.loads(inner.to_str()))


def _find(
    inner: tokenizers.Tokenizer, role: str, given: str | int | None, path: Path
) -> int | None:
    if isinstance(given, int):
        if inner.id_to_token(given) is None:
            raise ValueError(f"{path} has no token {given} to mean {role}")
        return given
    names = _NAMES[role] if given is None else (given,)
    ids = [inner.token_to_id(name) for name in names]
    found = next((i for i in ids if i is not None), None)
    if given is not None and found is None:
        raise ValueError(f"{path} has no token {given!r} to mean {role}; look into its vocabulary")
    return found


def _texts(texts: Iterable[str]) -> Iterator[str]:
    if isinstance(texts, str):
        raise ValueError("texts must be several strings, not one; pass [text]")
    for text in texts:
        if not isinstance(text, str) or not _encodable(text):
            raise _not_text([text], None)
        yield text


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _not_text(texts: Sequence[object], error: Exception | None) -> ValueError:
    for i, text in enumerate(texts):
        if not isinstance(text, str):
            return ValueError(f"text {i} is a {type(text).__name__}; pass strings")
        if not _encodable(text):
            return ValueError(f"text {i} ({text!a:.60}) has half a letter; decode it as UTF-8")
    return ValueError(f"the texts cannot be encoded: {reason(error) if error else 'no text'}")


def _byte_letters() -> dict[str, int]:
    """The letters by which byte-level tokenizers write bytes (GPT-2): most are the byte's own."""
    own = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in own]
    return {chr(byte): byte for byte in own} | {chr(256 + i): b for i, b in enumerate(others)}


_BYTES = _byte_letters()


def _readable(name: str) -> str:
    data = bytes(_BYTES[letter] for letter in name) if set(name) <= _BYTES.keys() else name.encode()
    # A byte that belongs to no whole letter comes through as half of one.
    text = data.decode(errors="surrogateescape").replace(" ", "▁")
    return "".join(
        f"<0x{ord(letter) - 0xDC00:02X}>" if "\udc80" <= letter <= "\udcff" else letter
        for letter in text
    )


# Marian's folders


Side: TypeAlias = Literal["source", "target"]

_MARIAN = ("source.spm", "target.spm", "vocab.json", "target_vocab.json", "tokenizer_config.json")


class SentencePieceTokenizer:
    """One side of a Marian folder: SentencePiece cuts the text, vocab.json numbers the pieces.

    Kudo & Richardson 2018. A code such as >>deu<< at the beginning names the language to translate
    into, and is one token. Decoding starts from the padding token.
    """

    def __init__(self, files: Mapping[str, bytes], side: Side):
        try:
            from sentencepiece import SentencePieceProcessor
        except ImportError:
            raise ValueError(f"{side}.spm needs sentencepiece: {install('text')}") from None
        self.files = dict(files)
        self.side = side
        separate = side == "target" and "target_vocab.json" in files
        self._vocabulary = "target_vocab.json" if separate else "vocab.json"
        numbers = json.loads(files[self._vocabulary])
        if absent := [name for name in ("<pad>", "</s>", "<unk>") if name not in numbers]:
            raise ValueError(f"{self._vocabulary} lacks {' and '.join(absent)}; it is not Marian's")
        self.pad, self.end, self.unknown = (
            int(numbers[name]) for name in ("<pad>", "</s>", "<unk>")
        )
        self.start = self.pad
        self.size = 1 + max(numbers.values())
        self._numbers: dict[str, int] = numbers
        self._pieces = {i: piece for piece, i in numbers.items()}
        self._processor = SentencePieceProcessor()
        self._processor.LoadFromSerializedProto(files[f"{side}.spm"])

    @classmethod
    def read(cls, folder: str | os.PathLike[str], side: Side) -> "SentencePieceTokenizer":
        """One side of a folder with source.spm, target.spm and vocab.json."""
        paths = {name: Path(folder) / name for name in _MARIAN}
        if absent := [name for name in _MARIAN[:3] if not paths[name].is_file()]:
            raise ValueError(
                f"{folder} lacks {', '.join(absent)}, of which Marian's folders consist"
            )
        return cls(
            {name: path.read_bytes() for name, path in paths.items() if path.is_file()}, side
        )

    def to_bytes(self) -> bytes:
        """All that decides how text is cut and numbered."""
        return self.files[f"{self.side}.spm"] + self.files[self._vocabulary]

    def encode(self, text: str) -> list[int]:
        """The text's tokens, without specials."""
        (ids,) = self.encode_batch([text])
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        if not all(isinstance(text, str) and _encodable(text) for text in texts):
            raise _not_text(texts, None)
        codes, plain = zip(*map(_language, texts)) if texts else ((), ())
        cut = self._processor.encode(list(plain), out_type=str)
        return [
            [self._numbers.get(piece, self.unknown) for piece in (*code, *pieces)]
            for code, pieces in zip(codes, cut)
        ]

    def encode_packed(
        self, texts: Sequence[str]
    ) -> tuple[Integer[np.ndarray, "T"], Integer[np.ndarray, "B"]]:
        """All texts' tokens end to end, and how many each of them has."""
        encoded = self.encode_batch(texts)
        lengths = np.fromiter(map(len, encoded), np.int64, len(encoded))
        ids = np.fromiter((i for one in encoded for i in one), _ID, int(lengths.sum()))
        return ids, lengths

    def decode(self, ids: Iterable[SupportsIndex]) -> str:
        """The text of the tokens; specials are dropped."""
        dropped = {self.pad, self.end, self.unknown}
        pieces = [self._pieces.get(i, "") for i in map(int, ids) if i not in dropped]
        return str(self._processor.decode_pieces(pieces)).replace("▁", " ").strip()

    def decode_batch(self, batch: Iterable[Iterable[SupportsIndex]]) -> list[str]:
        return [self.decode(ids) for ids in batch]

    def pieces(self, ids: Iterable[SupportsIndex]) -> list[str]:
        """Each token as a person reads it: ▁ is a space."""
        return [self._pieces.get(int(i), f"<{i}>") for i in ids]

    def __getstate__(self) -> dict[str, Any]:
        return {"files": self.files, "side": self.side}

    def __setstate__(self, state: dict[str, Any]) -> None:
        SentencePieceTokenizer.__init__(self, **state)

    def __repr__(self) -> str:
        return f"SentencePieceTokenizer({self.side}, {self.size} tokens)"


def _language(text: str) -> tuple[list[str], str]:
    end = text.find("<<") + 2 if text.startswith(">>") else 1
    return ([], text) if end == 1 else ([text[:end]], text[end:])


# A model's folder


AnyTokenizer: TypeAlias = Tokenizer | SentencePieceTokenizer
"""Either kind: they have the same methods."""


def files(source: AnyTokenizer, target: AnyTokenizer) -> dict[str, bytes]:
    """What a model's folder keeps of two tokenizers, which may be one."""
    if isinstance(source, SentencePieceTokenizer):
        return dict(source.files)
    if source is target or source.to_bytes() == target.to_bytes():
        return {"tokenizer.json": source.to_bytes()}
    return {
        "source.tokenizer.json": source.to_bytes(),
        "target.tokenizer.json": target.to_bytes(),
    }


def read_pair(
    folder: str | os.PathLike[str], **specials: str | int | None
) -> tuple[AnyTokenizer, AnyTokenizer]:
    """The tokenizers for source and target that `files` put into a folder: one twice, or two."""
    folder = Path(folder)
    # First, since a tokenizer.json that some put beside them serves other programs.
    if (folder / "source.spm").is_file():
        return (
            SentencePieceTokenizer.read(folder, "source"),
            SentencePieceTokenizer.read(folder, "target"),
        )
    if (folder / "tokenizer.json").is_file():
        joint = Tokenizer.read(folder / "tokenizer.json", **specials)
        return joint, joint
    if (folder / "source.tokenizer.json").is_file():
        source, target = (
            Tokenizer.read(folder / f"{side}.tokenizer.json", **specials)
            for side in ("source", "target")
        )
        return source, target
    raise ValueError(
        f"{folder} has no tokenizer: neither tokenizer.json, nor source.tokenizer.json and "
        "target.tokenizer.json, nor source.spm, target.spm and vocab.json"
    )
