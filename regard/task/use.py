"""The commands that use a trained model: words or pictures in, words out.

echo "…" | regard translate RUN        a line for each line, in order, as they are ready
regard classify RUN picture.png …      a label and its probability for each picture
regard read RUN picture.png …          the text in each picture
echo "…" | regard generate RUN         each line gone on with
echo "…" | regard label RUN            a label for each line
"""

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

from regard.task.command import parse

if TYPE_CHECKING:
    from regard.task.load import Loaded

Settings = TypeVar("Settings")
Ready = TypeVar("Ready")


@dataclass(frozen=True, kw_only=True)
class Where:
    """Where, and in which precision, a model computes."""

    device: str = "cpu"
    """Where to compute: cpu or cuda."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """The numbers of weights and activations."""


@dataclass(frozen=True)
class Translate(Where):
    """Translates standard input, or files, line by line."""

    files: tuple[str, ...] = ()
    """Files to translate, one after the other, instead of standard input."""
    beams: int | None = None
    """Hypotheses that stay open; 1 is greedy; by default as the model was trained to be used."""
    batch: int = 64
    """Sentences at a time."""


def translate(words: Sequence[str]) -> None:
    from regard.task.text import Translator

    folder, options = _options("translate", Translate, Translate(), words)
    model = _loaded(folder, options, Translator)
    if not options.files and sys.stdin.isatty():
        for line in _lines(()):  # somebody types, and waits for each
            print(*model.translate([line], beams=options.beams), flush=True)
        return
    for text in model.stream(_lines(options.files), beams=options.beams, batch=options.batch):
        print(text, flush=True)


@dataclass(frozen=True)
class Classify(Where):
    """Says what is in pictures."""

    top: int = 1
    """How many labels of each, the likeliest first."""
    json: bool = False
    """One JSON object for each picture, for programs."""


def classify(words: Sequence[str]) -> None:
    from regard.task.classify import Classifier

    folder, pictures, options = _pictures("classify", Classify, Classify(), words)
    model = _loaded(folder, options, Classifier)
    if options.top < 1:
        raise ValueError(f"top ({options.top}) must be 1 or more")
    values, places = model.probabilities(pictures).sort(stable=True, dim=-1, descending=True)
    for picture, row, numbers in zip(pictures, values.tolist(), places.tolist()):
        best = [(model.labels[n], p) for n, p in zip(numbers, row)][: options.top]
        if options.json:
            labels = [{"label": label, "probability": p} for label, p in best]
            print(json.dumps({"picture": picture, "labels": labels}, ensure_ascii=False))
        else:
            print(picture, *(f"{label} {p:.1%}" for label, p in best), sep="\t")


@dataclass(frozen=True)
class Read(Where):
    """Reads the text in pictures."""

    beams: int | None = None
    """Hypotheses that stay open; 1 is greedy; by default as the model was trained to be used."""


def read(words: Sequence[str]) -> None:
    from regard.task.read import Reader

    folder, pictures, options = _pictures("read", Read, Read(), words)
    model = _loaded(folder, options, Reader)
    for picture, text in zip(pictures, model.read(pictures, beams=options.beams)):
        print(picture, text, sep="\t")


@dataclass(frozen=True)
class Generate(Where):
    """Goes on with each line of standard input, or of files."""

    files: tuple[str, ...] = ()
    """Files with a prompt in each line, instead of standard input."""
    length: int = 200
    """Most tokens to add."""
    temperature: float = 0.8
    """Below 1 the likelier tokens are taken more often; 0 takes the likeliest each time."""
    top_k: int | None = None
    """Draw from so many of the likeliest tokens."""
    top_p: float | None = 0.95
    """Draw from the likeliest tokens that have this probability together."""
    seed: int = 0
    """Prompt n draws from (seed, n)."""


def generate(words: Sequence[str]) -> None:
    from regard.task.language import Generator

    folder, options = _options("generate", Generate, Generate(), words)
    model = _loaded(folder, options, Generator)
    texts = model.generate(
        list(_lines(options.files)),
        length=options.length,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        seed=options.seed,
    )
    for text in texts:
        print(" ".join(text.splitlines()))


@dataclass(frozen=True)
class Label(Where):
    """Says which class each line of standard input, or of files, is in."""

    files: tuple[str, ...] = ()
    """Files with a text in each line, instead of standard input."""


def label(words: Sequence[str]) -> None:
    from regard.task.label import Labeler

    folder, options = _options("label", Label, Label(), words)
    model = _loaded(folder, options, Labeler)
    texts = list(_lines(options.files))
    for row in model.probabilities(texts):
        best = int(row.argmax())
        print(model.labels[best], f"{float(row[best]):.1%}", sep="\t")


# Words


def _options(
    name: str, kind: type[Settings], default: Settings, words: Sequence[str]
) -> tuple[str, Settings]:
    folder, rest = ("", words) if not words or words[0].startswith("-") else (words[0], words[1:])
    options = parse(kind, default, rest, f"regard {name} RUN")
    if not folder:
        raise ValueError(f"{name} needs a run's or a model's folder: regard {name} RUN")
    return folder, options


def _pictures(
    name: str, kind: type[Settings], default: Settings, words: Sequence[str]
) -> tuple[str, list[str], Settings]:
    names = []
    for word in words:
        if word.startswith("-"):
            break
        names.append(word)
    folder, options = _options(name, kind, default, [*names[:1], *words[len(names) :]])
    pictures = names[1:]
    if not pictures:
        raise ValueError(f"{name} needs pictures: regard {name} {folder} picture.png …")
    if absent := [picture for picture in pictures if not Path(picture).is_file()]:
        raise ValueError(f"{', '.join(absent)} cannot be found; name image files")
    return folder, pictures, options


def _loaded(folder: str, options: Where, kind: type[Ready]) -> Ready:
    import torch

    from regard.task.load import load

    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    ready: Loaded = load(folder, device=options.device, dtype=dtypes[options.precision])
    if not isinstance(ready, kind):
        name = type(ready).__name__
        raise ValueError(f"{folder} holds a {name}, not a {kind.__name__}; see its config.json")
    return ready


def _lines(files: Sequence[str]) -> Iterator[str]:
    """Lines without their ends; bytes that are no UTF-8 become the sign for what is unknown."""
    if not files:
        yield from _decoded(sys.stdin.buffer)
    for name in files:
        with open(name, "rb") as stream:
            yield from _decoded(stream)


def _decoded(stream: Iterable[bytes]) -> Iterator[str]:
    for line in stream:
        yield line.decode("utf-8", "replace").rstrip("\r\n")
