"""A model that is served: how it reads requests, and what it is writing now.

folder ─▶ Served ─▶ take(job): sentences or examples that wait ─▶ turn(): one step for all
"""

import math
import os
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

import numpy as np
import torch

from regard.checkpoint import WEIGHTS
from regard.decode.engine.pick import open_session, pick
from regard.decode.engine.session import Session
from regard.decode.search.hypothesis import Hypothesis
from regard.device import device as named_device
from regard.service.batch import ROWS, Batch, Rules, Sentence
from regard.service.images import check_image, pixels_of
from regard.service.requests import (
    About,
    Attend,
    Attention,
    Candidate,
    Classify,
    Delta,
    Generate,
    Label,
    Late,
    Limits,
    Read,
    Refused,
    Request,
    Scored,
    TooLarge,
    Translate,
    Translation,
    Unknown,
)
from regard.service.rolling import Sampling
from regard.service.split import Piece, marked_up, pieces, plain
from regard.task.folder import model_folder
from regard.task.load import load
from regard.task.search import SearchSettings, check_beams, open_reading
from regard.task.translator import NOTHING, Part, Translator, Written, longest

if TYPE_CHECKING:
    from regard.task.classify import Classifier
    from regard.task.label import Labeler
    from regard.task.language import Generator
    from regard.task.read import Reader

Precision: TypeAlias = Literal["fp32", "bf16", "fp16", "int8"]
Stream: TypeAlias = Callable[[Delta], None]

SOME = ROWS // 4
"""Rows that are free when the next join a batch for which more wait than there is room for."""
SWEEP = 0.25
"""Seconds."""
EXAMPLES = 64
"""Images or texts that are classified at once."""


@dataclass(eq=False)
class Job:
    """A request that is being answered."""

    request: Request
    future: "Future[Any]"
    deadline: float
    stream: Stream | None = None

    def wanted(self) -> bool:
        """False once it is answered, cancelled or late."""
        if self.future.done():
            return False
        if time.monotonic() > self.deadline:
            self.fail(Late("the request was not answered in time; ask for less, or later"))
            return False
        return True

    def fail(self, error: Exception) -> None:
        with suppress(InvalidStateError):  # cancelled meanwhile
            if not self.future.done():
                self.future.set_exception(error)

    def answer(self, result: object) -> None:
        with suppress(InvalidStateError):
            if not self.future.done():
                self.future.set_result(result)


@dataclass(eq=False)
class Example:
    """An image or a text that is classified."""

    source: Any
    job: Job
    answer: Callable[[list[float]], None]


def load_served(
    name: str, folder: str | os.PathLike[str], *, device: str, precision: Precision, version: int
) -> "Served":
    """A folder's model, ready to be asked."""
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    quantized = precision == "int8"
    if device == "auto":
        device = "cpu" if quantized else named_device("auto").type
    if quantized and device != "cpu":
        raise ValueError(f"precision (int8) is for device cpu, not {device}; try bf16")
    predictor: Any = load(folder, device=device, dtype=dtypes.get(precision, torch.float32))
    if quantized:
        from regard.decode.engine.int8.linear import int8

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # said by the engine's reason
            int8(predictor.model)
    return Served.of(name, Path(folder), predictor, version)


def weights_size(folder: str | os.PathLike[str]) -> int:
    """Bytes of a folder's weights, without reading them."""
    return (model_folder(folder) / WEIGHTS).stat().st_size


class Served:
    """A loaded model, what waits for it, and what it is doing."""

    task = ""
    asked: tuple[type[Request], ...] = ()
    """Requests that it can answer."""

    def __init__(self, name: str, folder: Path, predictor: Any, version: int):
        self.name, self.folder, self.version = name, folder, version
        self.model: Any = predictor.model
        self.whole = predictor
        """The model with its tokenizer or labels, for whoever looks inside."""
        self.calls: deque[tuple[Job, Callable[[], object]]] = deque()

    @staticmethod
    def of(name: str, folder: Path, predictor: Any, version: int) -> "Served":
        kinds = (ServedTranslator, ServedReader, ServedGenerator, ServedClassifier, ServedLabeler)
        for kind in kinds:
            if type(predictor).__name__ == kind.predictor:
                return kind(name, folder, predictor, version)
        raise ValueError(
            f"{folder} holds a {type(predictor).__name__}, which answers nothing by itself; serve "
            f"what starts from it: regard train label NEW --texts FILE --start {folder}"
        )

    def about(self) -> About:
        engine = "the model's modules"
        if isinstance(self, Writer):
            picked = pick(self.model)
            engine = f"{picked.name}: {picked.reason}"
        return About(
            name=self.name,
            task=self.task,
            engine=engine,
            parameters=sum(parameter.numel() for parameter in self.model.parameters()),
            loaded=True,
            version=self.version,
            labels=tuple(getattr(self, "labels", ())),
        )

    @property
    def waiting(self) -> int:
        """Sentences or examples that have not begun."""
        return 0

    @property
    def busy(self) -> bool:
        return bool(self.calls) or self.waiting > 0

    def check(self, request: Request, limits: Limits) -> None:
        """Refuses what it cannot answer."""
        if not isinstance(request, self.asked):
            raise Unknown(
                f"model {self.name!r} is for {self.task}; it cannot "
                f"{type(request).__name__.lower()}"
            )
        beams = max(getattr(request, "beams", None) or 1, getattr(request, "n_best", 1))
        if beams > limits.beams:
            raise TooLarge(f"beams ({beams}) must be at most {limits.beams}")
        if isinstance(self, Writer):
            check_beams(beams, self.model.config.vocabulary)

    def before(self, request: Request) -> Callable[[], object] | None:
        """What has to be found out before such a request, and takes long; nothing mostly."""
        return None

    def take(self, job: Job, limits: Limits) -> None:
        """Makes of a request what waits; it may be refused."""
        raise NotImplementedError

    def turn(self) -> int:
        """One step; gives the number of sentences or examples that began."""
        while self.calls:
            job, call = self.calls.popleft()
            if job.wanted():
                try:
                    job.answer(call())
                except Exception as error:
                    job.fail(error)
                break
        return 0

    def give_up(self, error: Exception) -> None:
        """Fails all that waits or runs."""
        while self.calls:
            self.calls.popleft()[0].fail(error)


# Models that write


class Writer(Served):
    """A model that is asked for sentences, which are written in one batch."""

    search: SearchSettings

    def __init__(self, name: str, folder: Path, predictor: Any, version: int):
        super().__init__(name, folder, predictor, version)
        self.batch = Batch(self._open, self._longest())
        # A request's sentences wait together, and requests take turns: one of a thousand sentences
        # does not keep the others waiting.
        self._queues: deque[deque[Sentence]] = deque()
        self._inbox: deque[Sequence[Sentence]] = deque()
        """What was asked meanwhile, in any thread."""
        self._swept = time.monotonic()

    def _open(self, sentences: Sequence[Sentence], *, beams: int, length: int) -> Session:
        raise NotImplementedError

    def _longest(self) -> int:
        """Tokens of anything it writes."""
        return self.search.length

    @property
    def waiting(self) -> int:
        return sum(map(len, (*tuple(self._queues), *tuple(self._inbox))))

    @property
    def busy(self) -> bool:
        return super().busy or bool(self.batch.rows)

    def enqueue(self, sentences: Sequence[Sentence]) -> None:
        self._inbox.append(sentences)

    def turn(self) -> int:
        super().turn()
        if (now := time.monotonic()) > self._swept + SWEEP:
            # Who has left or is late is not found only when it would be their turn.
            self._swept = now
            self._queues = deque(queue for queue in self._queues if queue and queue[0].wanted())
        entering = list(self._entering())
        if entering:
            self.batch.join(entering)
        if self.batch.rows:
            try:
                self.batch.step()
            except Exception as error:
                self.batch.clear(error)
        return len(entering)

    def _entering(self) -> Iterator[Sentence]:
        """As many as there is room for, in turns of their requests."""
        rows = self.batch.rows
        while self._inbox:
            self._queues.append(deque(self._inbox.popleft()))
        # To read a few costs almost as much as to read many. Where not all who wait can join, the
        # next do when there is room for some.
        if rows > ROWS - SOME and self.waiting > ROWS - rows:
            return
        while self._queues:
            queue = self._queues.popleft()
            if not queue:
                continue
            sentence = queue[0]
            if not sentence.wanted():
                continue
            if rows and rows + sentence.rules.beams > ROWS:
                self._queues.appendleft(queue)
                return
            rows += sentence.rules.beams
            queue.popleft()
            self._queues.append(queue)
            yield sentence

    def give_up(self, error: Exception) -> None:
        super().give_up(error)
        self.batch.clear(error)
        for waiting in (self._queues, self._inbox):
            while waiting:
                for sentence in waiting.popleft():
                    sentence.fail(error)

    def _rules(self, beams: int | None, n_best: int = 1) -> Rules:
        settings = self.search
        width = max(settings.beams if beams is None else beams, n_best)
        return Rules(
            settings.end,
            settings.banned,
            settings.renormalize,
            width,
            n_best,
            settings.length_penalty,
        )


class ServedTranslator(Writer):
    task, predictor = "translate", "Translator"
    asked = (Translate, Attend)

    def __init__(self, name: str, folder: Path, predictor: Translator, version: int):
        self.translator, self.search = predictor, predictor.search
        super().__init__(name, folder, predictor, version)

    def _open(self, sentences: Sequence[Sentence], *, beams: int, length: int) -> Session:
        sources = [cast(Part, sentence.source) for sentence in sentences]
        return self.translator.open(sources, beams=beams, length=length)

    def before(self, request: Request) -> Callable[[], object] | None:
        """Which head aligns words is asked of a copy, while this one answers the others."""
        if not isinstance(request, Attend) or request.text is None or request.written is not None:
            return None
        text = request.text

        def find() -> None:
            if self.translator.head is None:
                copy = cast(Translator, load(self.folder))
                copy.find_head([text])
                self.translator.head = copy.head

        return find if self.translator.head is None else None

    def take(self, job: Job, limits: Limits) -> None:
        request = job.request
        if isinstance(request, Attend):
            self.calls.append((job, lambda: self._attention(request)))
            return
        assert isinstance(request, Translate)
        texts = [
            _Text(self, job, n, pieces(text, markup=request.markup))
            for n, text in enumerate(request.texts)
        ]
        left = len(texts)

        def ready() -> None:
            nonlocal left
            left -= 1
            if not left:
                job.answer(tuple(text.translation() for text in texts))

        sentences = [sentence for text in texts for sentence in text.sentences(ready)]
        if len(sentences) > limits.queue:
            raise TooLarge(f"the texts have {len(sentences)} sentences, more than may wait")
        for text in texts:
            if not text.left:
                ready()
        if not texts:
            job.answer(())
        self.enqueue(sentences)

    def _attention(self, request: Attend) -> Attention:
        if request.text is None:
            raise Refused("a translator attends to a text; give one")
        translator = self.translator
        if request.written is not None:
            seen = translator.attention(request.text, request.written)
            return Attention(
                request.written, tuple(seen.source), tuple(seen.target), _lists(seen.weights)
            )
        (best,) = translator.translations([request.text], attention=True, align=True)
        seen_ = best[0].attention
        if seen_ is None:
            return Attention("", (), (), ())
        return Attention(
            best[0].text,
            tuple(seen_.source),
            tuple(seen_.target),
            _lists(seen_.weights),
            tuple(best[0].alignment or ()),
        )


class _Text:
    """A text of a request for translation, while its pieces are written."""

    def __init__(self, served: ServedTranslator, job: Job, index: int, parts: list[Piece]):
        assert isinstance(job.request, Translate)
        self.served, self.job, self.index, self.pieces = served, job, index, parts
        self.request = job.request
        self.found: dict[int, list[Written]] = {}
        """The translations of each piece, best first."""
        self.left = 0
        """Pieces that are not ready."""
        self._sent = ""
        self._so_far: dict[int, str] = {}

    def sentences(self, ready: Callable[[], None]) -> Iterator[Sentence]:
        translator, request = self.served.translator, self.request
        rules = self.served._rules(request.beams, request.n_best)
        settings = replace(translator.search, beams=rules.beams)
        for n, piece in enumerate(self.pieces):
            if not piece.translated:
                continue
            parts = translator.cut(plain(piece, request.markup))
            if not any(part.ids for part in parts):
                self.found[n] = [NOTHING]
                continue
            self.left += 1
            yield from self._of_piece(n, parts, rules, settings, ready)

    def _of_piece(
        self,
        n: int,
        parts: list[Part],
        rules: Rules,
        settings: SearchSettings,
        ready: Callable[[], None],
    ) -> Iterator[Sentence]:
        translator = self.served.translator
        written: list[list[Written] | None] = [None] * len(parts)

        def answer(place: int, found: list[Hypothesis]) -> None:
            best = [translator.written(one, settings) for one in found] or [NOTHING]
            written[place] = best
            if self.job.stream is not None and len(parts) == 1:
                self._stream(n, best[0].text, True)
            if all(one is not None for one in written):
                whole = cast(list[list[Written]], written)
                self.found[n] = whole[0] if len(whole) == 1 else translator.joined(whole)
                if self.job.stream is not None and len(parts) > 1:
                    self._stream(n, self.found[n][0].text, True)
                self.left -= 1
                if not self.left:
                    ready()

        def stream(tokens: list[int]) -> None:
            self._stream(n, " ".join(translator.tokenizer.decode(tokens).splitlines()), False)

        streams = self.job.stream is not None and len(parts) == 1
        for place, part in enumerate(parts):
            most = min(longest(len(part.ids)), settings.length)
            yield Sentence(
                part,
                [settings.start],
                most,
                rules,
                lambda found, place=place: answer(place, found),  # type: ignore[misc]
                self.job.fail,
                self.job.wanted,
                stream if streams else None,
            )

    def _stream(self, n: int, text: str, whole: bool) -> None:
        """Sends what is new, as far as all pieces before it are there."""
        if not whole:
            # The last word may go on, and the last letter may be half of one.
            text = text[: max(0, len(text.rstrip("�")) if text.endswith("�") else len(text))]
        self._so_far[n] = text
        if whole:
            self.found.setdefault(n, [replace(NOTHING, text=text)])
        ready = ""
        for place, piece in enumerate(self.pieces):
            if not piece.translated:
                ready += piece.text
            elif place in self.found:
                ready += marked_up(self.found[place][0].text, self.request.markup)
            else:
                ready += marked_up(self._so_far.get(place, ""), self.request.markup)
                break
        if self.job.stream is not None and ready.startswith(self._sent) and ready != self._sent:
            self.job.stream(Delta(self.index, ready[len(self._sent) :]))
            self._sent = ready

    def translation(self) -> Translation:
        ranks = max((len(best) for best in self.found.values()), default=1)
        found = [self._ranked(rank) for rank in range(min(ranks, self.request.n_best))]
        return Translation(found[0].text, found[0].score, tuple(found[1:]))

    def _ranked(self, rank: int) -> Candidate:
        """The pieces together, each by its translation of this rank, or its last."""
        text, scores = "", []
        for n, piece in enumerate(self.pieces):
            if piece.translated:
                best = self.found[n]
                chosen = best[min(rank, len(best) - 1)]
                text += marked_up(chosen.text, self.request.markup)
                scores.append(chosen.score)
            else:
                text += piece.text
        return Candidate(text, math.fsum(scores) / max(1, len(scores)))


class ServedReader(Writer):
    task, predictor = "read", "Reader"
    asked = (Read, Attend)

    def __init__(self, name: str, folder: Path, predictor: "Reader", version: int):
        self.reader, self.search = predictor, predictor.search
        super().__init__(name, folder, predictor, version)

    def _open(self, sentences: Sequence[Sentence], *, beams: int, length: int) -> Session:
        pixels = torch.from_numpy(np.stack([sentence.source for sentence in sentences]))
        return open_reading(
            self.model, self.reader.prepared(pixels), None, beams=beams, length=length
        )

    def take(self, job: Job, limits: Limits) -> None:
        request = job.request
        if isinstance(request, Attend):
            if request.image is None:
                raise Refused("a reader attends to an image; give one")
            check_image(request.image, limits)
            self.calls.append((job, lambda: self._attention(request)))
            return
        assert isinstance(request, Read)
        rules = self._rules(request.beams)
        texts: list[str | None] = [None] * len(request.images)

        def answer(n: int, found: list[Hypothesis]) -> None:
            texts[n] = self.reader.tokenizer.decode(found[0].tokens) if found else ""
            if all(text is not None for text in texts):
                job.answer(tuple(cast(list[str], texts)))

        self.enqueue(
            [
                Sentence(
                    pixels_of(image, self.reader.preparation, limits),
                    [self.search.start],
                    self.search.length,
                    rules,
                    lambda found, n=n: answer(n, found),  # type: ignore[misc]
                    job.fail,
                    job.wanted,
                    self._streamed(job, n),
                )
                for n, image in enumerate(request.images)
            ]
        )

    def _streamed(self, job: Job, n: int) -> Callable[[list[int]], None] | None:
        return _streaming(job, n, self.reader.tokenizer.decode)

    def _attention(self, request: Attend) -> Attention:
        assert request.image is not None
        looked = self.reader.attention(request.image, request.written)
        text = request.written or "".join(looked.text[:-1]).replace("▁", " ").strip()
        return Attention(text, (), tuple(looked.text), _lists(looked.weights))


class ServedGenerator(Writer):
    task, predictor = "generate", "Generator"
    asked = (Generate,)

    def __init__(self, name: str, folder: Path, predictor: "Generator", version: int):
        self.generator, self.search = predictor, predictor.search
        super().__init__(name, folder, predictor, version)

    def _open(self, sentences: Sequence[Sentence], *, beams: int, length: int) -> Session:
        return open_session(self.model, rows=len(sentences), length=length)

    def _longest(self) -> int:
        return 1  # nothing is penalized

    def take(self, job: Job, limits: Limits) -> None:
        request = job.request
        assert isinstance(request, Generate)
        if not 1 <= request.length <= limits.tokens:
            raise TooLarge(f"length ({request.length}) must be from 1 to {limits.tokens}")
        how = Sampling(request.temperature, request.top_k, request.top_p, request.seed)
        rules = Rules(self.search.end, self.search.banned, sampling=how)
        decode = self.generator.tokenizer.decode
        texts: list[str | None] = [None] * len(request.prompts)
        before = [self.generator.tokenizer.encode(prompt) for prompt in request.prompts]

        def answer(n: int, found: list[Hypothesis]) -> None:
            texts[n] = decode([*before[n], *found[0].tokens])
            if all(text is not None for text in texts):
                job.answer(tuple(cast(list[str], texts)))

        self.enqueue(
            [
                Sentence(
                    None,
                    [self.search.start, *ids][-self.search.length :],
                    request.length,
                    rules,
                    lambda found, n=n: answer(n, found),  # type: ignore[misc]
                    job.fail,
                    job.wanted,
                    _streaming(job, n, decode, ids),
                    index=n,
                )
                for n, ids in enumerate(before)
            ]
        )


# Models that classify


class Sorter(Served):
    """A model that is asked for labels, of all that waits at once."""

    def __init__(self, name: str, folder: Path, predictor: Any, version: int):
        super().__init__(name, folder, predictor, version)
        self.labels: list[str] = predictor.labels
        self._examples: deque[Example] = deque()

    @property
    def waiting(self) -> int:
        return len(self._examples)

    def _probabilities(self, sources: list[Any]) -> torch.Tensor:
        raise NotImplementedError

    def _sources(self, request: Request, limits: Limits) -> list[Any]:
        raise NotImplementedError

    def take(self, job: Job, limits: Limits) -> None:
        request: Any = job.request
        sources = self._sources(request, limits)
        top = max(1, min(request.top, len(self.labels)))
        found: list[tuple[Scored, ...] | None] = [None] * len(sources)

        def answer(n: int, row: list[float]) -> None:
            best = sorted(range(len(row)), key=lambda label: (-row[label], label))[:top]
            found[n] = tuple(Scored(self.labels[label], row[label]) for label in best)
            if all(one is not None for one in found):
                job.answer(tuple(found))

        for n, source in enumerate(sources):
            self._examples.append(
                Example(source, job, lambda row, n=n: answer(n, row))  # type: ignore[misc]
            )
        if not sources:
            job.answer(())

    def turn(self) -> int:
        super().turn()
        some: list[Example] = []
        while self._examples and len(some) < EXAMPLES:
            example = self._examples.popleft()
            if example.job.wanted():
                some.append(example)
        if some:
            self._classify(some)
        return len(some)

    def _classify(self, some: list[Example]) -> None:
        try:
            rows = self._probabilities([example.source for example in some]).tolist()
        except Exception as error:
            if len(some) == 1:
                some[0].job.fail(error)
                return
            for example in some:
                self._classify([example])
            return
        for example, row in zip(some, rows):
            example.answer(row)

    def give_up(self, error: Exception) -> None:
        super().give_up(error)
        for example in self._examples:
            example.job.fail(error)
        self._examples.clear()


class ServedClassifier(Sorter):
    task, predictor = "classify", "Classifier"
    asked = (Classify,)

    def __init__(self, name: str, folder: Path, predictor: "Classifier", version: int):
        self.classifier = predictor
        super().__init__(name, folder, predictor, version)

    def _sources(self, request: Request, limits: Limits) -> list[Any]:
        assert isinstance(request, Classify)
        prepare = self.classifier.preparation
        return [pixels_of(image, prepare, limits) for image in request.images]

    @torch.inference_mode()
    def _probabilities(self, sources: list[Any]) -> torch.Tensor:
        weight = next(self.model.parameters())
        pixels = torch.from_numpy(np.stack(sources))
        x = self.classifier.preparation.normalized(pixels.to(weight.device)).to(weight.dtype)
        return cast(torch.Tensor, self.model(x)).float().softmax(-1).cpu()


class ServedLabeler(Sorter):
    task, predictor = "label", "Labeler"
    asked = (Label,)

    def __init__(self, name: str, folder: Path, predictor: "Labeler", version: int):
        self.labeler = predictor
        super().__init__(name, folder, predictor, version)

    def _sources(self, request: Request, limits: Limits) -> list[Any]:
        assert isinstance(request, Label)
        return list(request.texts)

    def _probabilities(self, sources: list[Any]) -> torch.Tensor:
        return self.labeler.probabilities(sources)


# Texts while they are written


def _streaming(
    job: Job, n: int, decode: Callable[[list[int]], str], before: Sequence[int] = ()
) -> Callable[[list[int]], None] | None:
    """Sends what is new of a text that is written from left to right."""
    send = job.stream
    if send is None:
        return None
    sent = decode(list(before)) if before else ""

    def stream(tokens: list[int]) -> None:
        nonlocal sent
        text = decode([*before, *tokens])
        if not text.endswith("�") and text.startswith(sent) and text != sent:
            send(Delta(n, text[len(sent) :]))
            sent = text

    return stream


def _lists(weights: torch.Tensor) -> tuple[Any, ...]:
    return tuple(weights.tolist())
