"""What a page may ask: for each question its fields, and the function that answers it in JSON.

What needs a model goes through the service, whose one thread computes for one question after the
other: a change inside a model would be a change for everybody. Heavy modules are imported by the
questions that need them.
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
    flag,
    items,
    mapping,
    number,
    optional,
    picture,
    refused,
    required,
    row,
    string,
    whole,
    words,
)
from regard.studio.runs import COMMANDS, Run, Runs, metrics

if TYPE_CHECKING:
    from regard.service.service import Service

PATIENCE = 600.0
"""Seconds after which a question is given up."""

MEMORY = 8 << 30
"""Bytes of weights that are kept; beyond, the model goes that was not asked for the longest."""

SMALL = 10_000_000
"""Parameters of a model that is small."""

LONGEST = 2000
"""Characters of a text that is translated."""

BOOK = 100_000
"""Characters of a text that is only read: of 16,384 tokens and more."""


PICTURE = 3 << 20
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
        raise refused(name, value, "a list that begins with a mask's name")
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
_run: Fields = {"run": required(string())}
_image: Fields = {**_run, "image": required(picture(PICTURE)), **_effect}
_source: Fields = {**_run, "text": required(words(LONGEST)), "beams": optional(whole(1, 12))}

FIELDS: dict[str, Fields] = {
    "runs": {},
    "training": {"runs": required(mapping(whole(0, 1 << 53), 20))},
    "translate": {**_source, **_effect},
    "classify": _image,
    "read": _image,
    "text": {**_run, "text": required(words(BOOK)), **_effect},
    "head": {
        **_source,
        "attention": required(string()),
        "head": required(whole(0, 1000)),
        **_changes_fields,
    },
    "samples": {"kind": required(choice("digit", "strip"))},
    "mask": {
        "queries": required(whole(1, MAX_SIDE)),
        "keys": required(whole(1, MAX_SIDE)),
        "mask": required(mask_tree),
    },
    "architecture": {"model": required(string())},
    "cost": {"models": required(items(string(), 8)), "length": required(whole(1, MAX_INDEX))},
    "course": {},
    "answer": {
        "document": required(string()),
        "section": required(string()),
        "mistake": optional(whole(0, 100)),
    },
}
"""The fields of each question."""


def questions(runs: Runs) -> dict[str, Callable[[Question], Any]]:
    """Every question, by the name that a page asks it by; its fields are checked first."""
    models = Models(runs)
    table: dict[str, Callable[[Question], Any]] = {
        "runs": lambda asked: known_runs(runs),
        "training": lambda asked: training(runs, asked),
        "translate": models.translate,
        "classify": models.classify,
        "read": models.read,
        "text": models.text,
        "head": models.head,
        "samples": samples,
        "mask": mask,
        "architecture": lambda asked: architecture(runs, asked),
        "cost": lambda asked: model_costs(runs, asked),
        "course": lambda asked: course(),
        "answer": answer,
    }
    return {name: _with_checked_fields(FIELDS[name], ask) for name, ask in table.items()}


def _with_checked_fields(
    fields: Fields, ask: Callable[[Question], Any]
) -> Callable[[Question], Any]:
    return lambda question: ask(check(question, fields))


def warm_up(runs: Runs) -> None:
    """Imports torch while the reader looks at the first page, which does not need it."""
    import torch

    import regard.service.service
    import regard.task.inspect.views

    del torch, regard


class Models:
    """The models that have been asked for, in a service that computes for one after the other."""

    def __init__(self, runs: Runs):
        self.runs = runs
        self.service: Service | None = None
        self.served: dict[str, tuple[str, float]] = {}
        """By folder, the name that the service knows it by, and when it was written."""
        self.lock = threading.Lock()

    def translate(self, asked: Question) -> Any:
        from regard.task.inspect.translation import translated
        from regard.task.translator import Translator

        text, changes, effect = asked["text"], _changes(asked), asked["effect"]

        def look(translator: Translator) -> Any:
            if effect and translator.found is None:
                translator.find_head([text])
            return translated(
                translator, text, changes, beams=asked["beams"], effect=effect
            ).view.to_json()

        return self._ask(asked, Translator, "translates", look)

    def classify(self, asked: Question) -> Any:
        from regard.task.classify import Classifier
        from regard.task.inspect.images import classified

        image, changes, effect = asked["image"], _changes(asked), asked["effect"]
        return self._ask(
            asked,
            Classifier,
            "classifies images",
            lambda model: classified(model, image, changes, effect=effect).to_json(),
        )

    def read(self, asked: Question) -> Any:
        from regard.task.inspect import images
        from regard.task.read import Reader

        image, changes, effect = asked["image"], _changes(asked), asked["effect"]
        return self._ask(
            asked,
            Reader,
            "reads images",
            lambda model: images.read(model, image, changes, effect=effect).to_json(),
        )

    def text(self, asked: Question) -> Any:
        """A text read by a language model or by a text classifier."""
        from regard.task.inspect.views import view
        from regard.task.label import Labeler
        from regard.task.language import Generator

        text, changes, effect = asked["text"], _changes(asked), asked["effect"]
        return self._ask(
            asked,
            (Generator, Labeler),
            "reads text alone",
            lambda model: view(model, text, changes=changes, effect=effect).to_json(),
        )

    def head(self, asked: Question) -> Any:
        """The queries, keys and values of one head, as they were: to be opened in By hand."""
        from regard.task.inspect.views import numbers_of_head
        from regard.task.label import Labeler
        from regard.task.language import Generator
        from regard.task.translator import Translator

        text, changes = asked["text"], _changes(asked)
        name, head, beams = asked["attention"], asked["head"], asked["beams"]
        return self._ask(
            asked,
            (Translator, Generator, Labeler),
            "reads text",
            lambda model: numbers_of_head(model, text, name, head, changes, beams=beams),
        )

    def _ask(
        self,
        asked: Question,
        kind: type[Any] | tuple[type[Any], ...],
        does: str,
        look: Callable[[Any], Any],
    ) -> Any:
        run = self.runs.named(asked["run"])

        def checked(predictor: Any) -> Any:
            if not isinstance(predictor, kind):
                raise ValueError(f"run ({run.name}) is not one that {does}")
            with _threads(predictor.model):
                return look(predictor)

        service, name = self._served(run)
        return service.inspect(name, checked).result()

    def _served(self, run: Run) -> "tuple[Service, str]":
        """The service, and the run's name in it; a run that has saved anew is loaded again."""
        from regard.service.requests import Limits
        from regard.service.service import Service
        from regard.task.folder import model_folder

        place = str(run.folder.resolve())
        written = (model_folder(run.folder) / "config.json").stat().st_mtime
        with self.lock:
            if self.service is None:
                self.service = Service(Limits(seconds=PATIENCE), memory_limit=MEMORY)
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
    """One thread for one sentence of a small model, which is over before a second has begun."""
    import torch

    before = torch.get_num_threads()
    small = sum(parameter.numel() for parameter in model.parameters()) < SMALL
    torch.set_num_threads(1 if small else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _changes(asked: Question) -> Any:
    from regard.task.inspect.changes import Changes

    return Changes(**{name: asked[name] for name in _lists})


def known_runs(runs: Runs) -> Any:
    return {"runs": [run.to_json() for run in runs.all().values()], "commands": COMMANDS}


def training(runs: Runs, asked: Question) -> Any:
    known = runs.all()
    return {name: metrics(known[name], end) for name, end in asked["runs"].items() if name in known}


def samples(asked: Question) -> Any:
    """Pictures of handwritten digits, or strips of them, as base64 PNG."""
    import io

    import numpy as np
    from PIL import Image
    from sklearn.datasets import load_digits  # type: ignore[import-untyped]

    loaded = load_digits()
    digits, names = loaded.images[-200:], loaded.target[-200:]
    made = []
    for n in range(10):
        if asked["kind"] == "strip":
            some = [digits[(7 * n + 31 * k) % 200] for k in range(2 + n % 3)]
            canvas = np.zeros((12, 44))
            for k, one in enumerate(some):
                canvas[2 : 2 + 8, 3 + 10 * k : 11 + 10 * k] = one
        else:
            canvas = digits[names == n][0]
        pixels = (canvas * 255 / 16).astype("uint8")
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, "png")
        made.append(base64.b64encode(file.getvalue()).decode())
    return made


# Masks and the map

PRESETS = ("tiny", "base", "big", "vit-b/16")


def mask(asked: Question) -> Any:
    """A composed mask: which backend runs, and why; where it may attend."""
    import torch

    from regard.attention.attend import explain

    L, S = asked["queries"], asked["keys"]
    made = _mask(asked["mask"], L, S)
    query, key = torch.zeros(1, 2, L, 8), torch.zeros(1, 2, S, 8)
    plan = explain(query, key, key, mask=made)
    allowed = torch.ones(L, S, dtype=torch.bool)
    if made is not None:
        allowed = made.tensor(L, S)[0, 0]
    return {
        "text": "no mask" if made is None else str(made),
        "backend": plan.backend,
        "kernel": plan.kernel,
        "reason": plan.reason,
        "allowed": allowed.expand(L, S).int().tolist(),
    }


def _mask(tree: Any, L: int, S: int) -> Any:
    """The mask of a tree that has been checked."""
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


def architecture(runs: Runs, asked: Question) -> Any:
    """A model's boxes: parameters of each, counted, and the shapes between them."""
    from regard.studio.boxes import boxes

    name = asked["model"]
    return boxes(name, None if name in PRESETS else runs.named(name).folder)


def model_costs(runs: Runs, asked: Question) -> Any:
    """Parameters and multiply-adds of models, part by part, from their configs alone."""
    from regard.model.formula import model_formula
    from regard.studio.boxes import config_of, positions

    length = asked["length"]
    found = {}
    for name in asked["models"]:
        config = config_of(name, None if name in PRESETS else runs.named(name).folder)
        parts = model_formula(config, length)
        found[name] = {
            "parameters": sum(part.parameters for part in parts.values()),
            "multiplyAdds": sum(part.multiply_adds for part in parts.values()),
            "length": positions(config, length),
            "parts": {part: [one.parameters, one.multiply_adds] for part, one in parts.items()},
        }
    return found


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
                    "section": one.place.section,
                    "about": one.place.about,
                    "question": html(one.question),
                    "marks": sum(point.marks for point in one.points),
                    "mistakes": [html(mistake.answer) for mistake in one.mistakes],
                }
                for one in answers(name)
            ],
        }
        for name in FILES
    ]


_lab = threading.Lock()


def answer(asked: Question) -> Any:
    """A question's model answer, run; or, with `mistake`, a wrong answer tried."""
    import torch

    from regard.lab.answers import answers, document, report
    from regard.lab.answers.answer import Page

    section, mistake = asked["section"], asked["mistake"]
    found = [one for one in answers(document(asked["document"])) if one.place.section == section]
    if not found:
        raise ValueError(f"section ({section!r}) is not in this document")
    one = found[0]
    with _lab, torch.random.fork_rng():
        torch.manual_seed(0)
        if mistake is not None:
            if mistake >= len(one.mistakes):
                raise ValueError(
                    f"mistake ({mistake}) is unknown; section {section} has {len(one.mistakes)}"
                )
            run = one.mistakes[mistake].run()
            return {"html": report.mistake(one.mistakes[mistake], run), "stands": run.stands}
        page = Page(one, one.run(), (), ())
    return {"html": report.section(page), "stands": page.shown.stands}
