"""What a page may ask: a function for each question, from JSON to JSON.

What needs a model goes through the service, whose one thread computes for one question after the
other: a change inside a model would be a change for everybody. Heavy modules are imported by the
questions that need them.
"""

import base64
import binascii
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from regard.studio.runs import COMMANDS, Run, Runs, metrics

if TYPE_CHECKING:
    from regard.service.service import Service

Question = Mapping[str, Any]

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


def questions(runs: Runs) -> dict[str, Callable[[Question], Any]]:
    """Every question, by the name that a page asks it by."""
    models = Models(runs)
    return {
        "runs": lambda asked: {
            "runs": [run.to_json() for run in runs.all().values()],
            "commands": COMMANDS,
        },
        "training": lambda asked: _training(runs, asked),
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

        text, changes, effect = _text(asked), _changes(asked), bool(asked.get("effect"))
        beams = _beams(asked)

        def look(translator: Translator) -> Any:
            if effect and translator.found is None:
                translator.find_head([text])
            return translated(translator, text, changes, beams=beams, effect=effect).view.to_json()

        return self._ask(asked, Translator, "translates", look)

    def classify(self, asked: Question) -> Any:
        from regard.task.classify import Classifier
        from regard.task.inspect.images import classified

        image, changes, effect = _image(asked), _changes(asked), bool(asked.get("effect"))
        return self._ask(
            asked,
            Classifier,
            "classifies images",
            lambda model: classified(model, image, changes, effect=effect).to_json(),
        )

    def read(self, asked: Question) -> Any:
        from regard.task.inspect import images
        from regard.task.read import Reader

        image, changes, effect = _image(asked), _changes(asked), bool(asked.get("effect"))
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

        text, changes, effect = _text(asked, BOOK), _changes(asked), bool(asked.get("effect"))
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

        text, changes = _text(asked), _changes(asked)
        name, head = str(asked.get("attention")), _whole(asked, "head", 0, 1000)
        beams = _beams(asked)
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
        run = self.runs.named(asked.get("run"))

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


def _text(asked: Question, longest: int = LONGEST) -> str:
    text = asked.get("text")
    if not isinstance(text, str) or not text.strip():
        raise ValueError("text (nothing) must have a word in it")
    if len(text) > longest:
        raise ValueError(f"text ({len(text):,} characters) must have at most {longest:,}")
    return text


def _whole(asked: Question, name: str, least: int, most: int) -> int:
    number = asked.get(name)
    if not isinstance(number, int) or isinstance(number, bool) or not least <= number <= most:
        raise ValueError(f"{name} ({number!r}) must be a whole number from {least} to {most}")
    return number


def _beams(asked: Question) -> int | None:
    return _whole(asked, "beams", 1, 12) if "beams" in asked else None


def _image(asked: Question) -> bytes:
    """A picture, as base64."""
    try:
        return base64.b64decode(str(asked.get("image")), validate=True)
    except (binascii.Error, ValueError):
        raise ValueError("image must be a picture in base64") from None


def _changes(asked: Question) -> Any:
    from regard.task.inspect.changes import Changes

    def items(name: str) -> list[Any]:
        some = asked.get(name, [])
        if not isinstance(some, list) or len(some) > 4096:
            raise ValueError(f"{name} must be a list of at most 4,096")
        return some

    try:
        return Changes(
            off=tuple((str(name), int(head)) for name, head in items("off")),
            beta=tuple((str(name), int(head), _factor(x)) for name, head, x in items("beta")),
            hidden=tuple(int(place) for place in items("hidden")),
            forced=tuple(int(token) for token in items("forced")),
        )
    except (TypeError, ValueError) as error:
        raise ValueError(f"what is to be changed is not understood: {error}") from None


def _factor(x: Any) -> float:
    factor = float(x)
    if not (math.isfinite(factor) and 0 <= factor <= 100):
        raise ValueError(f"β times {factor} must be from 0 to 100")
    return factor


def _training(runs: Runs, asked: Question) -> Any:
    wanted = asked.get("runs")
    if not isinstance(wanted, dict) or len(wanted) > 20:
        raise ValueError("runs must be an object of at most 20 names and where they were read to")
    known = runs.all()
    return {
        name: metrics(known[name], end if isinstance(end, int) else 0)
        for name, end in wanted.items()
        if name in known
    }


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
        if asked.get("kind") == "strip":
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


def mask(asked: Question) -> Any:
    """A composed mask: which backend runs, and why; where it may attend."""
    import torch

    from regard.attention.attend import explain

    L, S = _whole(asked, "queries", 1, 64), _whole(asked, "keys", 1, 64)
    made = _mask(asked.get("mask"), L, S)
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


def _mask(said: Any, L: int, S: int, depth: int = 0) -> Any:
    """A mask from lists: ["and", a, b], ["window", 2], ["causal"]."""
    import torch

    from regard.attention import mask as make

    if said is None:
        return None
    if not isinstance(said, list) or not said or depth > 12:
        raise ValueError("a mask is a list that begins with its name")
    kind, *given = said
    if kind in ("and", "or", "not"):
        parts = [_mask(part, L, S, depth + 1) for part in given]
        if not parts or any(part is None for part in parts):
            raise ValueError(f"{kind} needs masks")
        if kind == "not":
            return ~parts[0]
        whole = parts[0]
        for part in parts[1:]:
            whole = whole & part if kind == "and" else whole | part
        return whole
    match kind:
        case "causal":
            return make.causal()
        case "window":
            return make.window(int(given[0]))
        case "padding":
            return make.padding([int(given[0])])
        case "prefix":
            return make.prefix(int(given[0]))
        case "documents":
            return make.documents([int(x) for x in given[0]])
        case "drawn":
            cells = torch.tensor(given[0], dtype=torch.bool)
            if tuple(cells.shape) != (L, S):
                raise ValueError(f"a drawn mask must have {L} × {S} cells")
            return make.Mask.from_tensor(cells)
    raise ValueError(
        f"mask ({kind!r}) is unknown; choose from causal, window, padding, prefix, documents, drawn"
    )


def architecture(runs: Runs, asked: Question) -> Any:
    """A model's boxes: parameters of each, counted, and the shapes between them."""
    from regard.studio.boxes import boxes

    name = asked.get("model")
    folder = None
    if name not in ("tiny", "base", "big", "vit-b/16"):
        folder = runs.named(name).folder
    return boxes(str(name), folder)


def model_costs(runs: Runs, asked: Question) -> Any:
    """Parameters and multiply-adds of models, part by part, from their configs alone."""
    from regard.model.formula import model_formula
    from regard.studio.boxes import config_of, positions

    length, names = _whole(asked, "length", 1, 1 << 20), asked.get("models")
    if not isinstance(names, list) or len(names) > 8:
        raise ValueError("models must be a list of at most 8 names")
    found = {}
    for name in names:
        known = name in ("tiny", "base", "big", "vit-b/16")
        config = config_of(str(name), None if known else runs.named(name).folder)
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

    section = asked.get("section")
    found = [
        one for one in answers(document(str(asked.get("document")))) if one.place.section == section
    ]
    if not found:
        raise ValueError(f"section ({section!r}) is not in this document")
    one = found[0]
    with _lab, torch.random.fork_rng():
        torch.manual_seed(0)
        if "mistake" in asked:
            number = _whole(asked, "mistake", 0, len(one.mistakes) - 1)
            run = one.mistakes[number].run()
            return {"html": report.mistake(one.mistakes[number], run), "stands": run.stands}
        page = Page(one, one.run(), (), ())
    return {"html": report.section(page), "stands": page.shown.stands}
