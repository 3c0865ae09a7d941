"""A README.md for each exported folder: the few lines of Python by which its engine runs it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from regard.interop.graph import empty_past
from regard.interop.vocabulary import target_names
from regard.model.classifier import TextClassifier
from regard.model.embedding import image_size
from regard.model.encoder import TextEncoder
from regard.model.language import LanguageModel
from regard.model.transformer import AudioSource, ImageSource, TextSource, Transformer
from regard.model.vit import VisionTransformer

Files: TypeAlias = Mapping[str, bytes | Path]
Task: TypeAlias = Mapping[str, Any]
AnyModel: TypeAlias = Transformer | LanguageModel | TextClassifier | TextEncoder | VisionTransformer


def ctranslate2(name: str, model: Transformer | LanguageModel, task: Task, files: Files) -> str:
    """Text to tokens, the engine, and tokens to text."""
    code = _code(name, files)
    names = target_names(files, model.config.vocabulary)
    if isinstance(model, LanguageModel):
        lines = [
            f'generator = ctranslate2.Generator("{name}")',
            f"tokens = [{names[task['start']]!r}, *{code.tokens}]",
            "result = generator.generate_batch([tokens], max_length=100, sampling_topk=50)[0]",
            f"print({code.from_tokens.format('result.sequences[0]')})",
        ]
    else:
        lines = [
            f'translator = ctranslate2.Translator("{name}")',
            f"search = {_search(task, names)}",
            f"result = translator.translate_batch([{code.tokens}], **search)[0]",
            f"print({code.from_tokens.format('result.hypotheses[0]')})",
        ]
    return _page(name, model, "CTranslate2", ["import ctranslate2", *code.setup, *lines])


def _search(task: Task, names: Sequence[str]) -> dict[str, Any]:
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


def onnx(name: str, model: AnyModel, task: Task, files: Files) -> str:
    """One call, or a greedy search with the cache."""
    code = _code(name, files)
    start, end = (task.get(role, n) for n, role in ((1, "start"), (2, "end")))
    lines = ["import numpy as np", "import onnxruntime"]
    match model:
        case VisionTransformer():
            size = (model.config.channels, *image_size(model.config.image))
            lines += [*_image("images", size), *_classified(name, "images")]
        case TextClassifier():
            lines += [
                *code.setup,
                f"source = np.array([[*{code.ids}, {end}]])",
                "lengths = np.array([source.shape[1]])",
                *_classified(name, "source", "lengths"),
            ]
        case TextEncoder():
            lines += [
                *code.setup,
                f"source = np.array([[*{code.ids}]])",
                "lengths = np.array([source.shape[1]])",
                f'model = onnxruntime.InferenceSession("{name}/model.onnx")',
                f"logits, features = model.run(None, {_named('source', 'lengths')})",
                "print(features.shape)",
            ]
        case LanguageModel():
            lines += [
                *code.setup,
                f"tokens = [{start}, *{code.ids}]",
                *_decoded(name, model, task, "np.array([tokens])", ()),
                f"print({code.from_ids.format('tokens')})",
            ]
        case Transformer():
            read = ["source"]
            match model.config.source:
                case ImageSource() as image:
                    lines += [
                        *code.setup,
                        *_image("source", (image.channels, *image_size(image.image))),
                    ]
                case TextSource():
                    lines += [*code.setup, f"source = np.array([[*{code.ids}, {end}]])"]
                case AudioSource() as audio:
                    shape = (1, 100, audio.features)
                    lines += [*code.setup, f"source = np.zeros({shape}, np.float32)"]
            if not isinstance(model.config.source, ImageSource):
                lines.append("lengths = np.array([source.shape[1]])")
                read.append("lengths")
            lines += [
                f'encoder = onnxruntime.InferenceSession("{name}/encoder.onnx")',
                f"(memory,) = encoder.run(None, {_named(*read)})",
                f"tokens = [{start}]",
                *_decoded(name, model, task, "np.array([tokens])", ("memory", *read[1:])),
                f"print({code.from_ids.format('tokens[1:]')})",
            ]
    return _page(name, model, "onnxruntime", lines)


def torch_export(name: str, model: AnyModel, programs: Mapping[str, Sequence[str]]) -> str:
    """How to load each program, and what it takes."""
    lines = ["import torch", ""]
    for program, inputs in programs.items():
        lines += [
            f'{program} = torch.export.load("{name}/{program}.pt2").module()',
            f"# {program}({', '.join(inputs)})",
        ]
    return _page(name, model, "torch.export", lines)


def _image(variable: str, size: tuple[int, ...]) -> list[str]:
    """The picture is one of zeros, so that the code runs as it is."""
    shape = (1, *size)
    return [f"{variable} = np.zeros({shape}, np.float32)  # (pixels from 0 to 1 - mean) / std"]


def _classified(name: str, *inputs: str) -> list[str]:
    return [
        f'model = onnxruntime.InferenceSession("{name}/model.onnx")',
        f"(logits,) = model.run(None, {_named(*inputs)})",
        "print(logits[0].argmax())  # the place among the labels",
    ]


def _decoded(
    name: str, model: Transformer | LanguageModel, task: Task, tokens: str, others: Sequence[str]
) -> list[str]:
    """Greedy search: the past is what the last call gave, and each call reads what is new."""
    past = tuple(empty_past(model, 1).shape)
    banned = [f"    logits[..., {list(task['banned'])}] = -np.inf"] if task.get("banned") else []
    return [
        f'decoder = onnxruntime.InferenceSession("{name}/decoder.onnx")',
        f"past, new = np.zeros({past}, np.float32), {tokens}",
        f"for _ in range({min(100, task.get('length', 100))}):",
        '    inputs = {"tokens": new, "past": past'
        + "".join(f', "{one}": {one}' for one in others)
        + "}",
        "    logits, past = decoder.run(None, inputs)",
        *banned,
        "    new = logits[:, -1:].argmax(-1)",
        f"    if new[0, 0] == {task.get('end', 2)}:",
        "        break",
        "    tokens.append(int(new[0, 0]))",
    ]


def _named(*inputs: str) -> str:
    return "{" + ", ".join(f'"{one}": {one}' for one in inputs) + "}"


def _page(name: str, model: AnyModel, engine: str, code: Sequence[str]) -> str:
    about = f"A {type(model).__name__} for {engine}, written by Regard."
    return "\n".join([f"# {name}", "", about, "", "```python", *code, "```", ""])


@dataclass(frozen=True)
class _Code:
    """Python for a tokenizer: what comes first, from a text to tokens, and back."""

    setup: Sequence[str]
    tokens: str
    ids: str
    from_tokens: str
    from_ids: str


def _code(name: str, files: Files) -> _Code:
    if "source.spm" in files:
        return _Code(
            [
                "import json, sentencepiece",
                "",
                *(
                    f'{side}_text = sentencepiece.SentencePieceProcessor("{name}/{side}.spm")'
                    for side in ("source", "target")
                ),
                f'names = json.load(open("{name}/vocab.json"))',
            ],
            'source_text.encode("…", out_type=str)',
            '(names[piece] for piece in source_text.encode("…", out_type=str))',
            "target_text.decode({})",
            "target_text.decode([piece for i in {} for piece in names if names[piece] == i])",
        )
    paths = dict.fromkeys(("source", "target"), "tokenizer.json")
    if "source.tokenizer.json" in files:
        paths = {side: f"{side}.tokenizer.json" for side in paths}
    elif "tokenizer.json" not in files:
        return _Code([""], '["<id 5>", "<id 7>"]', "[5, 7]", "{}", "{}")  # tokens are numbers
    return _Code(
        [
            "import tokenizers",
            "",
            *(
                f'{side}_text = tokenizers.Tokenizer.from_file("{name}/{path}")'
                for side, path in paths.items()
            ),
        ],
        'source_text.encode("…", add_special_tokens=False).tokens',
        'source_text.encode("…", add_special_tokens=False).ids',
        "target_text.decode([target_text.token_to_id(token) for token in {}])",
        "target_text.decode({})",
    )
