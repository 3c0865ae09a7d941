"""Models that write: sentences of all requests are in one batch."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from regard.decode.engine.pick import pick
from regard.decode.engine.session import Session
from regard.service.batch import ROWS, ROWS_ON_GPU, Batch, Rules, Sentence
from regard.service.requests import Delta, Limits, Request, TooLarge
from regard.service.served import Job, Served
from regard.task.search import SearchSettings, check_beams, check_length

SWEEP = 0.25
"""Seconds between looks for who has left, or is late, among those who wait."""
GATHER = 0.05
"""Maximum time in seconds that new sentences wait for a batch to end where they cannot join it: a
step for many takes hardly longer than one for a few, and answered clients can send again."""


class Writer(Served):
    """A generative model: the sentences of all requests are decoded in one batch."""

    search: SearchSettings

    def __init__(self, name: str, folder: Path, predictor: Any, version: int):
        super().__init__(name, folder, predictor, version)
        self.batch = Batch(self._open, self._longest())
        # A request's sentences wait together, and requests take turns: one of a thousand sentences
        # does not keep the others waiting.
        self._queues: deque[deque[Sentence]] = deque()
        self._inbox: deque[Sequence[Sentence]] = deque()
        """Sentences that other threads have added."""
        self._waiting, self._counting = 0, threading.Lock()
        self._known: dict[tuple[int | None, int], Rules] = {}
        self._swept = self._admitted = time.monotonic()
        on_gpu = next(self.model.parameters()).device.type == "cuda"
        most = pick(self.model).rows(self._longest())
        self._rows = min(ROWS_ON_GPU if on_gpu else ROWS, most or ROWS_ON_GPU)

    def _open(self, sentences: Sequence[Sentence], *, beams: int, length: int) -> Session:
        raise NotImplementedError

    def _longest(self) -> int:
        """Tokens of anything it writes."""
        return self.search.length

    @property
    def waiting(self) -> int:
        return super().waiting + self._waiting

    @property
    def busy(self) -> bool:
        return super().busy or self.batch.busy

    def _engine(self) -> str:
        picked = pick(self.model)
        return f"{picked.name}: {picked.reason}"

    def check(self, request: Request, limits: Limits) -> None:
        super().check(request, limits)
        beams = max(getattr(request, "beams", None) or 1, getattr(request, "n_best", 1))
        try:
            check_beams(beams, self.model.config.vocabulary)
        except ValueError as error:
            raise TooLarge(str(error)) from None

    def _check_attention(self, what: str, tokens: int) -> None:
        """Refuses a text that is read or written as a whole, but is too long for that."""
        config = self.model.config
        try:
            check_length(what, tokens, self.search.length)
        except ValueError as error:
            raise TooLarge(str(error)) from None
        if config.position == "learned" and tokens >= config.length:
            raise TooLarge(
                f"the {what} has {tokens} tokens, and the model has {config.length} positions; "
                "send a shorter one"
            )

    def enqueue(self, sentences: Sequence[Sentence]) -> None:
        self._count(len(sentences))
        self._inbox.append(sentences)

    def _count(self, more: int) -> None:
        with self._counting:
            self._waiting += more

    def turn(self) -> int:
        super().turn()
        if (now := time.monotonic()) > self._swept + SWEEP:
            # Who has left or is late is not found only when it would be their turn.
            self._swept = now
            for _ in range(len(self._queues)):
                self._keep(self._queues.popleft())
        entering = list(self._entering())
        if entering:
            self._count(-len(entering))
            self.batch.join(entering)
        if self.batch.busy:
            try:
                self.batch.step()
            except Exception as error:
                self.batch.clear(error)
        return len(entering)

    def _keep(self, queue: deque[Sentence]) -> None:
        """Keeps a queue if any of its requests is still wanted."""
        if queue and queue[0].wanted():
            self._queues.append(queue)
        else:
            self._count(-len(queue))

    def _entering(self) -> Iterator[Sentence]:
        """As many as there is room for, in turns of their requests."""
        rows = self.batch.rows
        while self._inbox:
            self._queues.append(deque(self._inbox.popleft()))
        # To read a few costs almost as much as to read many. Where not all who wait can join, the
        # next do when half of the rows are free.
        if rows > self._rows // 2 and self._waiting > self._rows - rows:
            return
        now = time.monotonic()
        if self.batch.cohorts and now < self._admitted + GATHER:
            return
        self._admitted = now
        while self._queues:
            queue = self._queues.popleft()
            if not queue or not queue[0].wanted():
                self._count(-len(queue))
                continue
            sentence = queue[0]
            if rows and rows + sentence.rules.beams > self._rows:
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
                given_up = waiting.popleft()
                self._count(-len(given_up))
                for sentence in given_up:
                    sentence.fail(error)

    def _rules(self, beams: int | None, n_best: int = 1) -> Rules:
        if (beams, n_best) not in self._known:
            self._known[beams, n_best] = self._new_rules(beams, n_best)
        return self._known[beams, n_best]

    def _new_rules(self, beams: int | None, n_best: int) -> Rules:
        settings = self.search
        width = max(settings.beams if beams is None else beams, n_best)
        return Rules(
            settings.end,
            settings.banned,
            settings.renormalize,
            width,
            n_best,
            settings.length_penalty,
            horizon=settings.horizon,
        )


def streaming(
    job: Job, n: int, decode: Callable[[list[int]], str], before: Sequence[int] = ()
) -> Callable[[list[int]], None] | None:
    """Sends each new piece of a text that is generated from left to right."""
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


def check_weights(model: Any, queries: int, keys: int, limits: Limits) -> None:
    """Raises if the attention weights of a text are too many for one answer."""
    layers, heads = len(model.decoder.blocks), model.config.heads
    count = layers * heads * queries * keys
    if count > limits.weights:
        raise TooLarge(
            f"attention of {queries:,} to {keys:,} tokens, or patches, in {layers} layers of "
            f"{heads} heads has {count:,} weights, and an answer at most {limits.weights:,}; "
            "send a shorter text"
        )


def lists(weights: torch.Tensor) -> tuple[Any, ...]:
    return tuple(weights.tolist())
