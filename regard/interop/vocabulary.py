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

NEVER = -1e4
"""A logit of a token that is never written."""

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


def hugging_face(tokenizer: bytes | Path, size: int, end: int) -> dict[str, bytes | Path]:
    """Files by which transformers' AutoTokenizer opens a tokenizer.json of ours.

    Texts end with EOS there, and padding is the last token, with the number `size`; the first
    tokenizer's own padding, which no text holds, gets another name.
    """
    content = tokenizer if isinstance(tokenizer, bytes) else tokenizer.read_bytes()
    said = json.loads(content)
    numbers = _tokens(content)
    names = {number: name for name, number in numbers.items()}
    pad, start, closing, unknown_token = SPECIALS
    for token in said["added_tokens"]:
        if token["content"] == pad:
            token["content"] = _UNUSED.format(token["id"])
    known = said["model"]["vocab"]
    if pad in known:
        said["model"]["vocab"] = {
            _UNUSED.format(number) if name == pad else name: number
            for name, number in known.items()
        }
    for number in range(size + 1):
        if number not in names or number == size:
            name = pad if number == size else _UNUSED.format(number)
            said["added_tokens"].append(_special(number, name))
    last = names.get(end, closing)
    said["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [_part("Sequence", "A"), _part("SpecialToken", last)],
        "pair": [_part("Sequence", "A"), _part("Sequence", "B"), _part("SpecialToken", last)],
        "special_tokens": {last: {"id": last, "ids": [end], "tokens": [last]}},
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": start,
        "eos_token": last,
        "pad_token": pad,
        "unk_token": unknown_token,
        "clean_up_tokenization_spaces": False,
    }
    present = {**numbers, pad: size}
    settings = {k: v for k, v in settings.items() if not k.endswith("_token") or v in present}
    return {
        "tokenizer.json": json.dumps(said, ensure_ascii=False, indent=2).encode(),
        "tokenizer_config.json": (json.dumps(settings, indent=2) + "\n").encode(),
    }


_UNUSED = "<unused{}>"


def _special(number: int, name: str) -> dict[str, object]:
    return {
        "id": number,
        "content": name,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }


def _part(kind: str, name: str) -> dict[str, object]:
    return {kind: {"id": name, "type_id": 0}}
