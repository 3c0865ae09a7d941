"""The service: several models, and one thread that computes for all requests.

    service = Service()
    service.add("runs/en-de")
    service.ask(Translate(texts=("A dog runs.",)))[0].text
    future = service.submit(Translate(texts=("A dog runs.",)), stream=print)

Thread-safe: `submit` returns a future. One thread takes the steps of all models in turn, since two
would wait for each other's cores. Models are loaded in another.
"""

import atexit
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from regard.machine import memory
from regard.machine.device import use
from regard.machine.processes import one_line
from regard.service.models import load_served, weights_size
from regard.service.requests import (
    LIMITS,
    About,
    Busy,
    Limits,
    Lost,
    Refused,
    Request,
    TooLarge,
    Unknown,
)
from regard.service.served import Job, Served, Stream
from regard.task.settings import Precision

RATE = 20.0
"""Sentences a second, before any have been counted."""

CLOSED = "the service has been closed"


@dataclass(eq=False)
class _Place:
    """A folder that is served; its model is loaded when a request needs it."""

    name: str
    folder: Path
    bytes: int
    served: Served | None = None
    loading: "Future[Served] | None" = None
    used: float = 0.0
    version: int = 0
    about: About | None = None


@dataclass
class Counts:
    """Counts since the start."""

    requests: int = 0
    answered: int = 0
    failed: int = 0
    sentences: int = 0
    """Sentences, images and texts that a model has begun."""
    steps: int = 0


class Service:
    """Models that answer requests."""

    def __init__(
        self,
        limits: Limits = LIMITS,
        *,
        device: str = "auto",
        precision: Precision = "fp32",
        memory_limit: int | None = None,
    ):
        """`memory_limit` bounds the bytes of all weights: beyond it the models without requests
        are unloaded, and loaded again when a request needs them."""
        self.limits, self.device, self.precision = limits, device, precision
        self.memory_limit = memory_limit
        self.counts = Counts()
        self._places: dict[str, _Place] = {}
        self._active: list[Served] = []
        """Models with work, which may have been replaced by newer ones."""
        self._changed = threading.Condition()
        self._closing = False
        """New requests are refused."""
        self._abandoned = False
        """Requests in flight fail."""
        self._prepared = False
        """No request is being prepared any more."""
        self._ended = False
        """The compute thread takes no more turns."""
        self._own_threads: set[int] = set()
        self._loader = ThreadPoolExecutor(1, "regard-load", self._begin_thread)
        self._preparer = ThreadPoolExecutor(2, "regard-images", self._begin_thread)
        self._speed, self._since, self._begun = RATE, time.monotonic(), 0
        self._thread = threading.Thread(target=self._run, name="regard-compute", daemon=True)
        self._thread.start()
        # A thread in the midst of a computation would abort Python's own end.
        atexit.register(self.close, drain=False)

    # Models

    def add(self, folder: str | os.PathLike[str], name: str | None = None) -> str:
        """Serves a folder's model, under the name of its folder unless another is given."""
        path = Path(folder)
        name = name or path.resolve().name
        if name in self._places:
            raise ValueError(f"there are two models named {name}; give one another: NAME=FOLDER")
        size = weights_size(path)
        if self.memory_limit is not None and size > self.memory_limit:
            raise ValueError(
                f"{path} has {memory.shown(size)} of weights, more than the limit for all models "
                f"({memory.shown(self.memory_limit)}); raise it"
            )
        place = _Place(name, path, size)
        self._places[name] = place
        try:
            self._load(place).result()
        except Busy:
            pass  # the first request loads it
        except Exception:
            del self._places[name]
            raise
        return name

    def models(self) -> list[About]:
        """The models that are served, in the order of names."""
        with self._changed:
            places = sorted(self._places.values(), key=lambda place: place.name)
            loaded = [place.served for place in places]
        unknown = (About(place.name, "unknown", "", 0, False, 0) for place in places)
        return [
            served.about() if served is not None else place.about or about
            for place, served, about in zip(places, loaded, unknown)
        ]

    def reload(self, name: str) -> "Future[About]":
        """Loads a folder again. Until that is done, and if it fails, the old model answers; it
        also finishes the requests that it has begun."""
        place = self._place(name)
        done: Future[About] = Future()

        def use_result(found: "Future[Served]") -> None:
            error = found.exception()
            if isinstance(error, ValueError | OSError) and not isinstance(error, Refused):
                error = Refused(one_line(error))  # the folder is at fault
            if error is not None:
                done.set_exception(error)
            else:
                assert place.about is not None
                done.set_result(place.about)

        self._load(place, again=True).add_done_callback(use_result)
        return done

    def _place(self, name: str | None, request: Request | None = None) -> _Place:
        with self._changed:  # models are let go in another thread
            places = {place: place.served for place in self._places.values()}
        if name is not None:
            for place in places:
                if place.name == name:
                    return place
            names = ", ".join(sorted(place.name for place in places))
            raise Unknown(f"there is no such model; there are {names}")
        able = [
            place
            for place, served in places.items()
            if request is None or served is None or isinstance(request, served.asked)
        ]
        if len(able) == 1:
            return able[0]
        what = type(request).__name__.lower() if request is not None else "be asked"
        if not able:
            raise Unknown(f"there is no model that can {what}")
        names = ", ".join(sorted(place.name for place in able))
        raise Unknown(f"several models can {what}; name one of them: {names}")

    def _load(self, place: _Place, again: bool = False) -> "Future[Served]":
        with self._changed:
            if place.loading is not None:
                return place.loading
            future = self._run_in(self._loader, self._load_model, place, again)
            if not future.done():
                place.loading = future
        future.add_done_callback(lambda _: setattr(place, "loading", None))
        return future

    def _load_model(self, place: _Place, again: bool) -> Served:
        """In the loader's thread."""
        with self._changed:
            if place.served is not None and not again:
                return place.served
        size = weights_size(place.folder)
        self._make_room(place, size)
        served = load_served(
            place.name,
            place.folder,
            device=self.device,
            precision=self.precision,
            version=place.version + 1,
        )
        with self._changed:
            place.served, place.version, place.bytes = served, place.version + 1, size
            place.about = served.about()
            place.used = time.monotonic()
        return served

    def _make_room(self, wanted: _Place, size: int) -> None:
        """Unloads the least recently used models."""
        if self.memory_limit is None:
            return
        with self._changed:
            loaded = [
                place
                for place in self._places.values()
                if place.served is not None and place is not wanted
            ]
            loaded.sort(key=lambda place: place.used)
            total = size + sum(place.bytes for place in loaded)
            for place in loaded:
                if total <= self.memory_limit:
                    return
                assert place.served is not None
                assert place.about is not None
                if place.served.busy:
                    continue
                place.about = _without_model(place.about)
                place.served = None
                total -= place.bytes
            if total > self.memory_limit:
                raise Busy("all models that are loaded are at work; try again soon", 2)

    # Requests

    def ask(self, request: Request, stream: Stream | None = None) -> Any:
        """The answer, when it is there."""
        return self.submit(request, stream).result()

    def submit(self, request: Request, stream: Stream | None = None) -> "Future[Any]":
        """A future of the answer, or of a `Refused` with the reason. Cancelling it withdraws the
        request. `stream` receives texts while they are written, in another thread."""
        future: Future[Any] = Future()
        seconds = min(request.seconds or self.limits.seconds, self.limits.seconds)
        job = Job(request, future, time.monotonic() + seconds, stream)
        with self._changed:
            self.counts.requests += 1
        future.add_done_callback(self._count)
        try:
            self._check(request)
            place = self._place(request.model, request)
        except Refused as error:
            job.fail(error)
            return future
        place.used = time.monotonic()
        self._use_model(place, job, lambda served: self._take(served, job))
        return future

    def _use_model(self, place: _Place, job: Job, use: Callable[[Served], object]) -> None:
        """Calls `use` with a place's model, and at once if that is loaded."""

        def use_result(found: "Future[Served]") -> None:
            try:
                use(found.result())
            except Exception as error:
                job.fail(error if isinstance(error, Refused) else Lost(str(error)))

        try:
            if (served := place.served) is not None:
                use(served)
            else:
                self._load(place).add_done_callback(use_result)
        except Refused as error:
            job.fail(error)

    def inspect(self, name: str, look: Callable[[Any], Any]) -> "Future[Any]":
        """Calls a function with a model and its tokenizer or labels, as `load` gives them.

        The thread that computes calls it between two steps, so that it may change something inside
        the model, as `regard.look.effect` does, if it has put it back when it returns.
        """
        future: Future[Any] = Future()
        job = Job(Request(model=name), future, time.monotonic() + self.limits.seconds, None)
        with self._changed:
            self.counts.requests += 1
        future.add_done_callback(self._count)

        def call(served: Served) -> None:
            served.calls.append((job, lambda: look(served.whole)))
            self._activate(served)

        try:
            self._check_open()
            place = self._place(name)
        except Refused as error:
            job.fail(error)
            return future
        place.used = time.monotonic()
        self._use_model(place, job, call)
        return future

    def _count(self, future: "Future[Any]") -> None:
        failed = future.cancelled() or future.exception() is not None
        with self._changed:
            self.counts.failed += failed
            self.counts.answered += not failed

    def _check(self, request: Request) -> None:
        """Refuses requests that are too large for any model."""
        self._check_open()
        limits, fields = self.limits, cast(Any, request)
        texts: Sequence[str] = getattr(fields, "texts", ()) or getattr(fields, "prompts", ())
        several = (*texts, *getattr(fields, "images", ()))
        if len(several) > limits.texts:
            raise TooLarge(f"{len(several):,} at once are too many; ask for {limits.texts:,}")
        single = [getattr(fields, "text", None) or "", getattr(fields, "written", None) or ""]
        count = sum(map(len, (*texts, *single)))
        if count > limits.characters:
            raise TooLarge(f"{count:,} characters are too many; ask for {limits.characters:,}")
        for text in (*texts, *single):
            if not text.isprintable() and any("\ud800" <= sign <= "\udfff" for sign in text):
                raise Refused("a text has half of a surrogate pair, which is no character")
        if (waiting := self.waiting) >= limits.queue:
            raise Busy(f"{waiting:,} sentences are waiting; try again soon", self.retry_after())

    def _check_open(self) -> None:
        if self._closing:
            raise Busy("the service is closing", 5)

    @property
    def waiting(self) -> int:
        return sum(served.waiting for served in tuple(self._active))

    def retry_after(self) -> int:
        """Seconds until what waits now will have begun."""
        return max(1, min(60, math.ceil(self.waiting / self._speed)))

    def _take(self, served: Served, job: Job) -> None:
        if (before := served.before(job.request)) is not None:

            def prepare() -> None:
                try:
                    before()
                except Exception as error:
                    job.fail(error)
                    return
                self._enqueue(served, job)

            self._run_in(self._loader, prepare)
        elif getattr(job.request, "images", None) or getattr(job.request, "image", None):
            self._run_in(self._preparer, self._enqueue, served, job)
        else:
            self._enqueue(served, job)

    def _enqueue(self, served: Served, job: Job) -> None:
        try:
            served.check(job.request, self.limits)
            served.take(job, self.limits)
        except Exception as error:
            job.fail(error)
            return
        self._activate(served)

    def _activate(self, served: Served) -> None:
        """Gives a model its turns, now that it has work."""
        with self._changed:
            if served not in self._active:
                self._active.append(served)
            self._changed.notify()
            if self._ended:
                served.give_up(Lost(CLOSED))

    @staticmethod
    def _run_in(executor: Executor, work: Callable[..., Any], *arguments: Any) -> "Future[Any]":
        try:
            return executor.submit(work, *arguments)
        except RuntimeError:  # it was shut down meanwhile
            raise Busy("the service is closing", 5) from None

    # Computing

    def _begin_thread(self) -> None:
        self._own_threads.add(threading.get_ident())
        with suppress(ValueError):  # said when a model is loaded
            use(self.device)

    def _run(self) -> None:
        self._begin_thread()
        while True:
            with self._changed:
                self._active = [served for served in self._active if served.busy]
                if not self._active:
                    if self._prepared:
                        self._ended = True
                        return
                    self._changed.wait()
                    self._since, self._begun = time.monotonic(), 0
                    continue
                active = list(self._active)
            for served in active:
                if self._abandoned:
                    served.give_up(Lost(CLOSED))
                    continue
                try:
                    begun = served.turn()
                except Exception as error:
                    served.give_up(error)
                    continue
                self.counts.sentences += begun
                self.counts.steps += 1
                self._measure(begun)

    def _measure(self, begun: int) -> None:
        """Updates the number of sentences that begin in a second."""
        self._begun += begun
        now = time.monotonic()
        if (passed := now - self._since) > 1:
            self._speed = max(1.0, 0.5 * self._speed + 0.5 * self._begun / passed)
            self._since, self._begun = now, 0

    def close(self, drain: bool = True) -> None:
        """Refuses new requests, answers those there are, or without `drain` fails them, and waits
        until the compute thread has ended.

        It may be called from any thread, again, and at any time. In one of the service's own
        threads, such as a stream's, it returns at once.
        """
        with self._changed:
            self._closing = True
            self._abandoned |= not drain
            self._changed.notify_all()
        if threading.get_ident() in self._own_threads:
            threading.Thread(target=self.close, args=(drain,), name="regard-close").start()
            return
        self._loader.shutdown(wait=True)
        self._preparer.shutdown(wait=True)
        with self._changed:
            self._prepared = True
            self._changed.notify_all()
        self._thread.join()
        atexit.unregister(self.close)

    def __enter__(self) -> "Service":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _without_model(about: About) -> About:
    return About(
        about.name,
        about.task,
        about.engine,
        about.parameters,
        False,
        about.version,
        about.labels,
    )
