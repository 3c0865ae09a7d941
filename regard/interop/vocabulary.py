"""The names of tokens, from whatever tokenizer files a model's folder has."""

import json
from collections.abc import Mapping
from pathlib import Path

from regard.data.tokenizer import SPECIALS

TOKENIZERS = (
    "tokenizer.json",
    "source.tokenizer.json",
    "target.tokenizer.json",
    "source.spm",
    "target.spm",
    "vocab.json",
    "target_vocab.json",
    "tokenizer_config.json",
)
"""What a tokenizer consists of; every other library is given all of them that there are."""

_SOURCE = ("vocab.json", "tokenizer.json", "source.tokenizer.json")
_TARGET = ("target_vocab.json", "vocab.json", "tokenizer.json", "target.tokenizer.json")


def kept(files: Mapping[str, bytes | Path]) -> dict[str, bytes | Path]:
    """The tokenizer's files among others."""
    return {name: files[name] for name in TOKENIZERS if name in files}


def source_names(files: Mapping[str, bytes | Path], size: int) -> list[str]:
    """A name for every id of the source; where nobody named it, one that says its number."""
    return _names(files, _SOURCE, size)


def target_names(files: Mapping[str, bytes | Path], size: int) -> list[str]:
    """The same of the target; a language model's only side."""
    return _names(files, _TARGET, size)


def unknown(names: list[str], otherwise: int) -> str:
    """The unknown token's name, or that of another token where there is none."""
    return SPECIALS[3] if SPECIALS[3] in names else names[otherwise]


def _names(files: Mapping[str, bytes | Path], known: tuple[str, ...], size: int) -> list[str]:
    name = next((name for name in known if name in files), None)
    numbers: dict[str, int] = {}
    if name is not None:
        held = files[name]
        content = held if isinstance(held, bytes) else held.read_bytes()
        numbers = json.loads(content) if name.endswith("vocab.json") else _tokens(content)
    by_number = {number: token for token, number in numbers.items()}
    return [by_number.get(number, f"<id {number}>") for number in range(size)]


def _tokens(content: bytes) -> dict[str, int]:
    import tokenizers

    return tokenizers.Tokenizer.from_buffer(content).get_vocab(with_added_tokens=True)
