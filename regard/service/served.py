"""A model that is served: what waits for it, and its turns, each of one step for all."""

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from regard.service.requests import (
    About,
    Delta,
    Late,
    Limits,
    Request,
    TooLarge,
    Unknown,
)
from regard.task.predictor import parameter_count

Stream: TypeAlias = Callable[[Delta], None]


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


class Served:
    """A loaded model, what waits for it, and what it is doing."""

    task = ""
    asked: tuple[type[Request], ...] = ()
    """Requests that it can answer."""

    def __init__(self, name: str, folder: Path, predictor: Any, version: int):
        self.name, self.folder, self.version = name, folder, version
        self.parameters = parameter_count(predictor.model)
        self.model: Any = predictor.model
        self.whole = predictor
        """The model with its tokenizer or labels, for whoever looks inside."""
        self.calls: deque[tuple[Job, Callable[[], object]]] = deque()

    def about(self) -> About:
        return About(
            name=self.name,
            task=self.task,
            engine=self._engine(),
            parameters=self.parameters,
            loaded=True,
            version=self.version,
            labels=tuple(getattr(self, "labels", ())),
        )

    def _engine(self) -> str:
        """What computes, in a few words."""
        return "the model's modules"

    @property
    def waiting(self) -> int:
        """Sentences, examples and calls that have not begun."""
        return len(self.calls)

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
