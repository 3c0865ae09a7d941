"""Worker processes, as the HTTP process sees them: one for each GPU or group of cores.

A request goes to the worker with the fewest. One that ends without being told to is started again;
what it was answering is lost, and says so.
"""

import asyncio
import json
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from regard.serve import wire
from regard.serve.backend import Stream
from regard.service.requests import Limits, Lost, Request, Unknown

log = logging.getLogger("regard.serve")

SOON, LATER = 0.1, 30.0
"""Seconds until a worker that has ended is started again: at first, and at most."""


@dataclass(frozen=True)
class Settings:
    """What a worker is started with."""

    models: tuple[tuple[str, str], ...]
    """Names and folders."""
    limits: Limits
    device: str = "auto"
    precision: str = "fp32"
    memory: int | None = None
    """Bytes of all weights of one worker."""
    threads: int = 0
    """Of each worker; 0 leaves it to torch."""


class Workers:
    """The backend of `regard serve`."""

    def __init__(self, settings: Settings, count: int):
        self._workers = [
            _Worker(settings, _device(settings.device, n, count)) for n in range(count)
        ]
        self._number = 0

    async def start(self) -> None:
        """Starts all; a ValueError says why one cannot be."""
        started = await asyncio.gather(
            *(worker.start() for worker in self._workers), return_exceptions=True
        )
        if errors := [one for one in started if isinstance(one, BaseException)]:
            await self.close()
            raise errors[0]
        for worker in self._workers:
            worker.keep_alive()

    async def close(self) -> None:
        await asyncio.gather(*(worker.close() for worker in self._workers))

    @property
    def ready(self) -> bool:
        return any(worker.ready for worker in self._workers)

    @property
    def restarts(self) -> int:
        return sum(worker.restarts for worker in self._workers)

    @property
    def pids(self) -> list[int]:
        return [worker.process.pid for worker in self._workers if worker.process is not None]

    def models(self) -> list[dict[str, Any]]:
        return next((worker.models for worker in self._workers if worker.ready), [])

    def stats(self) -> list[dict[str, int]]:
        return [worker.stats for worker in self._workers]

    async def ask(self, request: Request, stream: Stream | None = None) -> Any:
        message, blobs = wire.pack(request)
        message["stream"] = stream is not None
        return await self._least_busy().send(self._next(), message, blobs, stream)

    async def reload(self, name: str) -> None:
        if name not in {model["name"] for model in self.models()}:
            raise Unknown("there is no such model; GET /v1/models lists them")
        ready = [worker for worker in self._workers if worker.ready]
        await asyncio.gather(*(worker.send(self._next(), {"reload": name}) for worker in ready))

    def _least_busy(self) -> "_Worker":
        ready = [worker for worker in self._workers if worker.ready]
        if not ready:
            raise Lost("the models are being loaded again; try again soon")
        return min(ready, key=lambda worker: len(worker.asked))

    def _next(self) -> int:
        self._number += 1
        return self._number


class _Worker:
    def __init__(self, settings: Settings, device: str):
        self.settings, self.device = settings, device
        self.process: subprocess.Popen[bytes] | None = None
        self.asked: dict[int, tuple[asyncio.Future[Any], Stream | None]] = {}
        self.models: list[dict[str, Any]] = []
        self.stats: dict[str, int] = {}
        self.ready = False
        self.restarts = 0
        self._closing = False
        self._keeper: asyncio.Task[None] | None = None

    async def start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "regard.serve.worker", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, "GOMP_SPINCOUNT": os.environ.get("GOMP_SPINCOUNT", "4000")},
            )
        self._reader, self._writer = await asyncio.open_connection(sock=ours, limit=2**20)
        settings = self.settings
        self._say(
            {
                "models": settings.models,
                "limits": asdict(settings.limits),
                "device": self.device,
                "precision": settings.precision,
                "memory": settings.memory,
                "threads": settings.threads,
            }
        )
        try:
            message = await self._receive()
        except asyncio.IncompleteReadError:
            code = await self._ended()
            raise ValueError(
                f"a worker process ended while it was starting (status {code})"
            ) from None
        if "failed" in message:
            await self._ended()
            raise ValueError(message["failed"])
        self.models, self.ready = message["ready"], True

    def keep_alive(self) -> None:
        self._keeper = asyncio.create_task(self._keep())

    async def _keep(self) -> None:
        """Hears what it says, and starts it again when it has ended."""
        pause = SOON
        while True:
            try:
                while True:
                    self._hear(await self._receive())
                    pause = SOON
            except (asyncio.IncompleteReadError, ConnectionError, json.JSONDecodeError):
                pass
            self.ready = False
            code = await self._ended()
            asked, self.asked = self.asked, {}
            for future, _ in asked.values():
                if not future.done():
                    future.set_exception(Lost("the worker has ended; try again"))
            if self._closing:
                return
            log.error("worker ended", extra={"about": {"status": code, "lost": len(asked)}})
            while not self.ready:
                await asyncio.sleep(pause)
                pause = min(2 * pause, LATER)
                try:
                    await self.start()
                    self.restarts += 1
                    log.warning("worker started again")
                except (ValueError, OSError) as error:
                    log.error("worker cannot start", extra={"about": {"reason": str(error)}})

    async def _receive(self) -> wire.Message:
        size = int.from_bytes(await self._reader.readexactly(4), "little")
        message: wire.Message = json.loads(await self._reader.readexactly(size))
        return message

    def _hear(self, message: wire.Message) -> None:
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

    def _say(self, message: wire.Message, blobs: tuple[bytes, ...] = ()) -> None:
        self._writer.write(wire.encode(message, blobs))

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

    async def close(self) -> None:
        self._closing = True
        if self.process is None:
            return
        if self.ready:
            self._say({"close": True})
        if self._keeper is not None and self.ready:
            await self._keeper
            return
        if self._keeper is not None:
            self._keeper.cancel()
        if self.process.poll() is None:
            self._writer.close()  # which ends it
            await self._ended()

    async def _ended(self) -> int:
        """Its exit status, once it has one."""
        assert self.process is not None
        self._writer.close()
        return await asyncio.get_running_loop().run_in_executor(None, self.process.wait)


def _device(name: str, n: int, count: int) -> str:
    """Of several workers, each has a GPU of its own."""
    return f"cuda:{n}" if name == "cuda" and count > 1 else name


def cores() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1


def named(words: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Names and folders, from FOLDER or NAME=FOLDER."""
    found: dict[str, str] = {}
    for word in words:
        name, equals, folder = word.partition("=")
        if not equals or not name or "/" in name:
            name, folder = os.path.basename(os.path.abspath(word)), word
        if name in found:
            raise ValueError(f"there are two models named {name}; name them: NAME={folder}")
        found[name] = folder
    return tuple(found.items())
