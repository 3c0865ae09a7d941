"""The questions of the studio's pages: the fields of each, and the function that answers it.

Questions about a model go through the service, whose single thread answers one after the other:
changes inside a model must not affect another question. Heavy modules are imported by the questions
that need them.
"""

import base64
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import reduce
from operator import and_, or_
from typing import TYPE_CHECKING, Any

from regard.studio.fields import (
    Fields,
    Question,
    check,
    choice,
    field,
    flag,
    items,
    mapping,
    number,
    optional,
    picture,
    refusal,
    row,
    string,
    whole,
    words,
)
from regard.studio.runs import COMMANDS, Run, Runs, metrics

if TYPE_CHECKING:
    from regard.service.service import Service

ANSWER_TIMEOUT_S = 600.0
"""A question about a model fails after so long a wait."""

MAX_WEIGHT_BYTES = 8 << 30
"""Beyond these bytes of weights in memory the least recently used model is dropped."""

MAX_SMALL_PARAMETERS = 10_000_000
"""Models below this number of parameters compute on one thread."""

MAX_SOURCE_CHARACTERS = 2000
"""Characters of a text to be translated."""

MAX_TEXT_CHARACTERS = 100_000
"""Characters of a text to be read, of 16,384 tokens and more."""

MAX_IMAGE_CHARACTERS = 3 << 20
"""Characters of a picture in base64."""

MAX_INDEX = 1 << 20
"""The largest position, token or length that is accepted."""

MAX_SIDE = 64
"""Queries or keys of a mask."""

_size = whole(0, MAX_SIDE)
MASKS = {
    "causal": row(),
    "window": row(_size),
    "padding": row(_size),
    "prefix": row(_size),
    "documents": row(items(_size, MAX_SIDE)),
    "drawn": row(items(items(whole(0, 1), MAX_SIDE), MAX_SIDE)),
}
"""The operands of each mask."""

_mask_name = choice("and", "or", "not", *MASKS)


def mask_tree(name: str, value: Any, depth: int = 0) -> Any:
    """A mask as nested lists: ["and", a, b], ["window", 2], ["causal"]; None for no mask."""
    if value is None and depth == 0:
        return None
    if not isinstance(value, list) or not value or depth > 12:
        raise refusal(name, value, "a list that begins with a mask's name")
    kind, *operands = value
    if kind in ("and", "or", "not"):
        least, most = (1, 1) if kind == "not" else (2, 8)
        if not least <= len(operands) <= most:
            raise ValueError(f"{name}: {kind} needs masks, {least} to {most} of them")
        parts = (mask_tree(f"{name}[{n}]", x, depth + 1) for n, x in enumerate(operands, 1))
        return kind, *parts
    return _mask_name(name, kind), *MASKS[kind](name, operands)


_head = (string(), whole(0, 1000))
_lists = {
    "off": items(row(*_head), 4096),
    "beta": items(row(*_head, number(0.0, 100.0)), 4096),
    "hidden": items(whole(0, MAX_INDEX), 4096),
    "forced": items(whole(0, MAX_INDEX), 4096),
}
_changes_fields: Fields = {name: optional(kind, ()) for name, kind in _lists.items()}
_effect: Fields = {**_changes_fields, "effect": optional(flag, False)}
_run: Fields = {"run": field(string())}
_image: Fields = {**_run, "image": field(picture(MAX_IMAGE_CHARACTERS)), **_effect}
_source: Fields = {
    **_run,
    "text": field(words(MAX_SOURCE_CHARACTERS)),
    "beams": optional(whole(1, 12)),
}

FIELDS: dict[str, Fields] = {
    "runs": {},
    "training": {"runs": field(mapping(whole(0, 1 << 53), 20))},
    "translate": {**_source, **_effect},
    "classify": _image,
    "read": _image,
    "text": {**_run, "text": field(words(MAX_TEXT_CHARACTERS)), **_effect},
    "head": {
        **_source,
        "attention": field(string()),
        "head": field(whole(0, 1000)),
        **_changes_fields,
    },
    "samples": {"kind": field(choice("digit", "strip"))},
    "mask": {
        "queries": field(whole(1, MAX_SIDE)),
        "keys": field(whole(1, MAX_SIDE)),
        "mask": field(mask_tree),
    },
    "architecture": {"model": field(string())},
    "cost": {"models": field(items(string(), 8)), "length": field(whole(1, MAX_INDEX))},
    "course": {},
    "answer": {
        "document": field(string()),
        "section": field(string()),
        "mistake": optional(whole(0, 100)),
    },
}
"""The fields of each question."""


def questions(runs: Runs) -> dict[str, Callable[[Question], Any]]:
    """The functions that answer questions, by name; each checks the fields first."""
    models = Models(runs)
    table: dict[str, Callable[[Question], Any]] = {
        "runs": lambda question: known_runs(runs),
        "training": lambda question: training(runs, question),
        "translate": models.translate,
        "classify": models.classify,
        "read": models.read,
        "text": models.text,
        "head": models.head,
        "samples": samples,
        "mask": mask,
        "architecture": lambda question: architecture(runs, question),
        "cost": lambda question: model_costs(runs, question),
        "course": lambda question: course(),
        "answer": answer,
    }
    return {name: _with_checked_fields(FIELDS[name], ask) for name, ask in table.items()}


def _with_checked_fields(
    fields: Fields, ask: Callable[[Question], Any]
) -> Callable[[Question], Any]:
    return lambda question: ask(check(question, fields))


def warm_up(runs: Runs) -> None:
    """Imports torch during the first page, which does not need it."""
    import torch

    import regard.service.service
    import regard.task.inspect.views

    del torch, regard


class Models:
    """The models in use, in a service with a single compute thread."""

    def __init__(self, runs: Runs):
        self.runs = runs
        self.service: Service | None = None
        self.served: dict[str, tuple[str, float]] = {}
        """By folder, the name of the model in the service and the time its config was written."""
        self.lock = threading.Lock()

    def translate(self, question: Question) -> Any:
        from regard.task.inspect.translation import translated
        from regard.task.translator import Translator

        text, changes, effect = question["text"], _changes(question), question["effect"]

        def look(translator: Translator) -> Any:
            if effect and translator.head is None:
                translator.find_head([text])
            return translated(
                translator, text, changes, beams=question["beams"], effect=effect
            ).view.to_json()

        return self._ask(question, Translator, "translates", look)

    def classify(self, question: Question) -> Any:
        from regard.task.classify import Classifier
        from regard.task.inspect.images import inspect_classifier

        image, changes, effect = question["image"], _changes(question), question["effect"]
        return self._ask(
            question,
            Classifier,
            "classifies images",
            lambda model: inspect_classifier(model, image, changes, effect=effect).to_json(),
        )

    def read(self, question: Question) -> Any:
        from regard.task.inspect import images
        from regard.task.read import Reader

        image, changes, effect = question["image"], _changes(question), question["effect"]
        return self._ask(
            question,
            Reader,
            "reads images",
            lambda model: images.read(model, image, changes, effect=effect).to_json(),
        )

    def text(self, question: Question) -> Any:
        """The view of a text by a language model or a text classifier."""
        from regard.task.inspect.views import view
        from regard.task.label import Labeler
        from regard.task.language import Generator

        text, changes, effect = question["text"], _changes(question), question["effect"]
        return self._ask(
            question,
            (Generator, Labeler),
            "reads text alone",
            lambda model: view(model, text, changes=changes, effect=effect).to_json(),
        )

    def head(self, question: Question) -> Any:
        """The queries, keys and values of one head, for the page By hand."""
        from regard.task.inspect.views import numbers_of_head
        from regard.task.label import Labeler
        from regard.task.language import Generator
        from regard.task.translator import Translator

        text, changes = question["text"], _changes(question)
        name, head, beams = question["attention"], question["head"], question["beams"]
        return self._ask(
            question,
            (Translator, Generator, Labeler),
            "reads text",
            lambda model: numbers_of_head(model, text, name, head, changes, beams=beams),
        )

    def _ask(
        self,
        question: Question,
        kind: type[Any] | tuple[type[Any], ...],
        does: str,
        look: Callable[[Any], Any],
    ) -> Any:
        run = self.runs.named(question["run"])

        def inspect(predictor: Any) -> Any:
            if not isinstance(predictor, kind):
                raise ValueError(f"run ({run.name}) is not one that {does}")
            with _threads(predictor.model):
                return look(predictor)

        service, name = self._service_of(run)
        return service.inspect(name, inspect).result()

    def _service_of(self, run: Run) -> "tuple[Service, str]":
        """The service and the run's name in it; a run with a newer checkpoint is loaded again."""
        from regard.service.requests import Limits
        from regard.service.service import Service
        from regard.task.folder import model_folder

        place = str(run.folder.resolve())
        written = (model_folder(run.folder) / "config.json").stat().st_mtime
        with self.lock:
            if self.service is None:
                self.service = Service(
                    Limits(seconds=ANSWER_TIMEOUT_S), memory_limit=MAX_WEIGHT_BYTES
                )
            if place not in self.served:
                name = f"{len(self.served)} {run.name}"
                self.service.add(run.folder, name)
            else:
                name, before = self.served[place]
                if before != written:
                    self.service.reload(name).result()
            self.served[place] = name, written
            return self.service, name


@contextmanager
def _threads(model: Any) -> Iterator[None]:
    """One thread for a small model, whose answer is faster than starting a second thread."""
    import torch

    before = torch.get_num_threads()
    small = sum(parameter.numel() for parameter in model.parameters()) < MAX_SMALL_PARAMETERS
    torch.set_num_threads(1 if small else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _changes(question: Question) -> Any:
    from regard.task.inspect.changes import Changes

    return Changes(**{name: question[name] for name in _lists})


def known_runs(runs: Runs) -> Any:
    return {"runs": [run.to_json() for run in runs.all().values()], "commands": COMMANDS}


def training(runs: Runs, question: Question) -> Any:
    known = runs.all()
    return {
        name: metrics(known[name], end) for name, end in question["runs"].items() if name in known
    }


def samples(question: Question) -> Any:
    """Images of handwritten digits, or of strips of them, as base64 PNG."""
    import io

    import numpy as np
    from PIL import Image
    from sklearn.datasets import load_digits  # type: ignore[import-untyped]

    loaded = load_digits()
    digits, names = loaded.images[-200:], loaded.target[-200:]
    images = []
    for n in range(10):
        if question["kind"] == "strip":
            strip = [digits[(7 * n + 31 * k) % 200] for k in range(2 + n % 3)]
            canvas = np.zeros((12, 44))
            for k, digit in enumerate(strip):
                canvas[2 : 2 + 8, 3 + 10 * k : 11 + 10 * k] = digit
        else:
            canvas = digits[names == n][0]
        pixels = (canvas * 255 / 16).astype("uint8")
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, "png")
        images.append(base64.b64encode(file.getvalue()).decode())
    return images


# Masks and the map

PRESETS = ("tiny", "base", "big", "vit-b/16")


def mask(question: Question) -> Any:
    """A composed mask: its cells, the backend that runs, and the reason."""
    import torch

    from regard.attention.attend import explain_attention

    L, S = question["queries"], question["keys"]
    composed = _mask(question["mask"], L, S)
    query, key = torch.zeros(1, 2, L, 8), torch.zeros(1, 2, S, 8)
    plan = explain_attention(query, key, key, mask=composed)
    allowed = torch.ones(L, S, dtype=torch.bool)
    if composed is not None:
        allowed = composed.tensor(L, S)[0, 0]
    return {
        "text": "no mask" if composed is None else str(composed),
        "backend": plan.backend,
        "kernel": plan.kernel,
        "reason": plan.reason,
        "allowed": allowed.expand(L, S).int().tolist(),
    }


def _mask(tree: Any, L: int, S: int) -> Any:
    """The mask of a checked tree."""
    import torch

    from regard.attention import mask as make

    match tree:
        case None:
            return None
        case ("not", part):
            return ~_mask(part, L, S)
        case ("and", *parts):
            return reduce(and_, (_mask(part, L, S) for part in parts))
        case ("or", *parts):
            return reduce(or_, (_mask(part, L, S) for part in parts))
        case ("padding", length):
            return make.padding([length])
        case ("documents", numbers):
            return make.documents(list(numbers))
        case ("drawn", rows):
            if len(rows) != L or any(len(line) != S for line in rows):
                raise ValueError(f"mask: a drawn mask must have {L} × {S} cells")
            return make.Mask.from_tensor(torch.tensor(rows, dtype=torch.bool))
        case (name, *sizes):  # causal(), window(n), prefix(n)
            return getattr(make, name)(*sizes)


def architecture(runs: Runs, question: Question) -> Any:
    """The boxes of a model with their parameter counts and shapes."""
    from regard.studio.boxes import boxes

    name = question["model"]
    return boxes(name, None if name in PRESETS else runs.named(name).folder)


def model_costs(runs: Runs, question: Question) -> Any:
    """Parameters and multiply-adds of models, part by part, from their configs alone."""
    from regard.model.formula import model_formula
    from regard.studio.boxes import config_of, positions

    length = question["length"]
    costs = {}
    for name in question["models"]:
        config = config_of(name, None if name in PRESETS else runs.named(name).folder)
        parts = model_formula(config, length)
        costs[name] = {
            "parameters": sum(part.parameters for part in parts.values()),
            "multiplyAdds": sum(part.multiply_adds for part in parts.values()),
            "length": positions(config, length),
            "parts": {name: [part.parameters, part.multiply_adds] for name, part in parts.items()},
        }
    return costs


# The course


def course() -> Any:
    """Documents, sections and questions, without running anything."""
    from regard.lab.answers import FILES, answers
    from regard.lab.answers.prose import html
    from regard.lab.place import TITLES

    return [
        {
            "document": name,
            "title": TITLES[name],
            "questions": [
                {
                    "section": item.place.section,
                    "about": item.place.about,
                    "question": html(item.question),
                    "marks": sum(point.marks for point in item.points),
                    "mistakes": [html(mistake.answer) for mistake in item.mistakes],
                }
                for item in answers(name)
            ],
        }
        for name in FILES
    ]


_lab = threading.Lock()


def answer(question: Question) -> Any:
    """Runs the model answer of a course question, or with `mistake` one of its wrong answers."""
    import torch

    from regard.lab.answers import answers, document, report
    from regard.lab.answers.answer import Page

    section, mistake = question["section"], question["mistake"]
    matches = [
        item for item in answers(document(question["document"])) if item.place.section == section
    ]
    if not matches:
        raise ValueError(f"section ({section!r}) is not in this document")
    item = matches[0]
    with _lab, torch.random.fork_rng():
        torch.manual_seed(0)
        if mistake is not None:
            if mistake >= len(item.mistakes):
                raise ValueError(
                    f"mistake ({mistake}) is unknown; section {section} has {len(item.mistakes)}"
                )
            run = item.mistakes[mistake].run()
            return {"html": report.mistake(item.mistakes[mistake], run), "stands": run.stands}
        page = Page(item, item.run(), (), ())
    return {"html": report.section(page), "stands": page.shown.stands}
