"""Worker processes, as the main process has them: a few for each GPU, or one for each group of
cores.

One that ends without being told to is started again; what it was answering is lost, and says so.
"""

import asyncio
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from regard.serve.gpus import gpus, placed
from regard.serve.lines import LATER, SOON, Line, Lines
from regard.service.requests import Limits

log = logging.getLogger("regard.serve")


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


class Workers(Lines):
    """The backend of `regard serve`."""

    def __init__(self, settings: Settings, count: int, meeting: Path | None = None):
        """In the folder `meeting`, other processes find sockets at which workers listen too."""
        there = gpus()
        self._workers = [
            _Worker(
                settings, *placed(n, count, settings.device, there), meeting and meeting / str(n)
            )
            for n in range(count)
        ]
        super().__init__(self._workers)

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
    def restarts(self) -> int:  # type: ignore[override]
        return sum(worker.restarts for worker in self._workers)

    @property
    def pids(self) -> list[int]:
        return [worker.process.pid for worker in self._workers if worker.process is not None]


class _Worker(Line):
    def __init__(self, settings: Settings, gpu: str | None, sharing: int, address: Path | None):
        """It sees this GPU alone, which so many share."""
        super().__init__()
        self.settings, self.sharing = settings, sharing
        self._environment = {"GOMP_SPINCOUNT": "4000", **os.environ}
        if gpu is not None:
            self._environment["CUDA_VISIBLE_DEVICES"] = gpu
        self.process: subprocess.Popen[bytes] | None = None
        self.restarts = 0
        self._closing = False
        self._keeper: asyncio.Task[None] | None = None
        # It stays when the worker ends: whoever connects meanwhile waits for the next one.
        self._meeting = None if address is None else _meeting(address)

    async def start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            files = [theirs.fileno()]
            if self._meeting is not None:
                files.append(self._meeting.fileno())
            self.process = subprocess.Popen(
                [sys.executable, "-m", "regard.serve.worker", *map(str, files)],
                pass_fds=files,
                stdin=subprocess.DEVNULL,
                env=self._environment,
            )
        self._open(*await asyncio.open_connection(sock=ours, limit=2**20))
        settings = self.settings
        self._say(
            {
                "models": settings.models,
                "limits": asdict(settings.limits),
                "device": settings.device,
                "sharing": self.sharing,
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
            if await self.hear():
                pause = SOON
            code = await self._ended()
            lost = self.lose()
            if self._closing:
                return
            log.error("worker ended", extra={"about": {"status": code, "lost": lost}})
            while not self.ready:
                await asyncio.sleep(pause)
                pause = min(2 * pause, LATER)
                try:
                    await self.start()
                    self.restarts += 1
                    log.warning("worker started again")
                except (ValueError, OSError) as error:
                    log.error("worker cannot start", extra={"about": {"reason": str(error)}})

    async def close(self) -> None:
        self._closing = True
        if self._meeting is not None:
            self._meeting.close()
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


def _meeting(address: Path) -> socket.socket:
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listening.bind(str(address))
    except OSError as error:
        listening.close()
        raise ValueError(
            f"{address} cannot be a socket ({error}); set TMPDIR to a folder with a shorter name, "
            "or --http-processes 1"
        ) from None
    listening.listen()
    return listening


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
