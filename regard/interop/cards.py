"""A README.md for each exported folder: the few lines by which its engine runs it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from regard.interop.vocabulary import target_names
from regard.model.language import LanguageModel
from regard.model.transformer import Transformer

Files = Mapping[str, bytes | Path]


def ctranslate2(
    name: str, model: Transformer | LanguageModel, task: Mapping[str, Any], files: Files
) -> str:
    """Text to tokens, the engine, and tokens to text."""
    before, encode, decode = _tokenizing(name, files)
    names = target_names(files, model.config.vocabulary)
    if isinstance(model, LanguageModel):
        lines = [
            f'generator = ctranslate2.Generator("{name}")',
            f"tokens = [{names[task['start']]!r}, *{encode}]",
            "result = generator.generate_batch([tokens], max_length=100, sampling_topk=50)[0]",
            f"print({decode.format('result.sequences[0]')})",
        ]
    else:
        lines = [
            f'translator = ctranslate2.Translator("{name}")',
            f"search = {_search(task, names)}",
            f"result = translator.translate_batch([{encode}], **search)[0]",
            f"print({decode.format('result.hypotheses[0]')})",
        ]
    return page(
        name, f"A {type(model).__name__}, for CTranslate2.", ["import ctranslate2", *before, *lines]
    )


def _search(task: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """The settings of a search, under the engine's names."""
    there = {
        "beams": "beam_size",
        "length": "max_decoding_length",
        "length_penalty": "length_penalty",
    }
    settings = {there[here]: value for here, value in task.items() if here in there}
    if banned := task.get("banned"):
        settings["suppress_sequences"] = [[names[token]] for token in banned]
    return settings


def page(name: str, about: str, code: list[str]) -> str:
    return "\n".join(
        [f"# {name}", "", f"{about} Written by Regard.", "", "```python", *code, "```", ""]
    )


def _tokenizing(name: str, files: Files) -> tuple[list[str], str, str]:
    """Code: what comes first, from a text to names of tokens, and back."""
    if "source.spm" in files:
        return (
            [
                "import sentencepiece",
                "",
                *(
                    f'{side} = sentencepiece.SentencePieceProcessor("{name}/{side}.spm")'
                    for side in ("source", "target")
                ),
            ],
            'source.encode("…", out_type=str)',
            "target.decode({})",
        )
    paths = dict.fromkeys(("source", "target"), "tokenizer.json")
    if "source.tokenizer.json" in files:
        paths = {side: f"{side}.tokenizer.json" for side in paths}
    elif "tokenizer.json" not in files:
        return [""], '["<id 5>", "<id 7>"]', "{}"  # without a tokenizer, tokens are numbers
    return (
        [
            "import tokenizers",
            "",
            *(
                f'{side} = tokenizers.Tokenizer.from_file("{name}/{path}")'
                for side, path in paths.items()
            ),
        ],
        'source.encode("…", add_special_tokens=False).tokens',
        "target.decode([target.token_to_id(token) for token in {}])",
    )
