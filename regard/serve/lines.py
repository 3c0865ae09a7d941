"""Lines to workers, as whoever asks has them: a socket, and what waits for answers at it.

A request goes to the worker of whom the fewest answers are awaited here.
"""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

from regard.serve import wire
from regard.serve.backend import Stream
from regard.service.requests import Lost, Request, Unknown

SOON, LATER = 0.1, 30.0
"""Seconds until a process that has ended is started again: at first, and at most."""


class Line:
    """A connection to one worker."""

    def __init__(self) -> None:
        self.asked: dict[int, tuple[asyncio.Future[Any], Stream | None]] = {}
        self.models: list[dict[str, Any]] = []
        self.stats: dict[str, int] = {}
        self.ready = False
        self._unsaid: list[bytes] = []

    async def hear(self) -> bool:
        """Passes on what it says, until its end; whether it said anything."""
        heard = False
        try:
            while True:
                self._pass_on(await self._receive())
                heard = True
        except (asyncio.IncompleteReadError, ConnectionError, json.JSONDecodeError):
            self.ready = False
            return heard

    def lose(self) -> int:
        """Says to all who wait for answers that there will be none; how many they are."""
        asked, self.asked = self.asked, {}
        for future, _ in asked.values():
            if not future.done():
                future.set_exception(Lost("the worker has ended; try again"))
        return len(asked)

    async def send(
        self,
        number: int,
        message: wire.Message,
        blobs: tuple[bytes, ...] = (),
        stream: Stream | None = None,
    ) -> Any:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.asked[number] = future, stream
        self._say({**message, "id": number}, blobs)
        try:
            return await future
        except asyncio.CancelledError:
            if self.asked.pop(number, None) is not None and self.ready:
                self._say({"id": number, "cancel": True})
            raise

    def _open(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    def _say(self, message: wire.Message, blobs: tuple[bytes, ...] = ()) -> None:
        # What is said in one turn of the event loop is one write.
        if not self._unsaid:
            asyncio.get_running_loop().call_soon(self._write)
        self._unsaid.append(wire.encode(message, blobs))

    def _write(self) -> None:
        said, self._unsaid = self._unsaid, []
        if not self._writer.is_closing():
            self._writer.write(b"".join(said))

    async def _receive(self) -> wire.Message:
        size = int.from_bytes(await self._reader.readexactly(4), "little")
        message: wire.Message = json.loads(await self._reader.readexactly(size))
        return message

    def _pass_on(self, message: wire.Message) -> None:
        if "stats" in message:
            self.stats, self.models = message["stats"], message["models"]
            return
        number = message["id"]
        if "delta" in message:
            _, stream = self.asked.get(number, (None, None))
            if stream is not None:
                stream(*message["delta"])
            return
        future, _ = self.asked.pop(number, (None, None))
        if future is None or future.done():
            return
        if "error" in message:
            future.set_exception(wire.unpack_error(message["error"]))
        else:
            future.set_result(message["answer"])


class Lines:
    """Lines to all workers: a backend."""

    restarts = 0

    def __init__(self, lines: Sequence[Line]):
        self._lines = lines
        self._number = 0

    @property
    def ready(self) -> bool:
        return any(line.ready for line in self._lines)

    def models(self) -> list[dict[str, Any]]:
        return next((line.models for line in self._lines if line.ready), [])

    def stats(self) -> list[dict[str, int]]:
        return [line.stats for line in self._lines]

    async def ask(self, request: Request, stream: Stream | None = None) -> Any:
        message, blobs = wire.pack(request)
        message["stream"] = stream is not None
        return await self._least_busy().send(self._next(), message, blobs, stream)

    async def reload(self, name: str) -> None:
        if name not in {model["name"] for model in self.models()}:
            raise Unknown("there is no such model; GET /v1/models lists them")
        ready = [line for line in self._lines if line.ready]
        await asyncio.gather(*(line.send(self._next(), {"reload": name}) for line in ready))

    def _least_busy(self) -> Line:
        ready = [line for line in self._lines if line.ready]
        if not ready:
            raise Lost("the models are being loaded again; try again soon")
        return min(ready, key=lambda line: len(line.asked))

    def _next(self) -> int:
        self._number += 1
        return self._number
