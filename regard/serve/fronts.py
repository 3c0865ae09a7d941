"""Other HTTP processes at the same port, as the main process has them.

One process of Python answers some thousands of requests a second over HTTP, and a GPU several
times as many sentences. Fronts listen at the port as the main process does, and ask its workers
through sockets of their own. One that ends without being told to is started again.
"""

import asyncio
import json
import logging
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from regard.serve.app import Options
from regard.serve.lines import LATER, SOON
from regard.serve.metrics import Metrics

log = logging.getLogger("regard.serve")

OFTEN = 1.0
"""Seconds between what processes tell each other of their metrics."""


class Fronts:
    def __init__(
        self,
        listening: Sequence[socket.socket],
        addresses: Sequence[Path],
        options: Options,
        drain: float,
        level: str,
    ):
        """One for each of the sockets that listen; `addresses` are those of the workers."""
        settings = {
            "workers": list(map(str, addresses)),
            "options": asdict(options),
            "drain": drain,
            "log": level,
        }
        self._fronts = [_Front(one, settings) for one in listening]
        self._exchange: asyncio.Task[None] | None = None

    async def start(self, metrics: Metrics, restarts: Callable[[], int]) -> None:
        """Starts all; the main process's `metrics` are then those of all processes."""
        await asyncio.gather(*(front.start() for front in self._fronts))
        for front in self._fronts:
            front.keep_alive()
        if self._fronts:
            self._exchange = asyncio.create_task(self._tell(metrics, restarts))

    async def _tell(self, metrics: Metrics, restarts: Callable[[], int]) -> None:
        while True:
            known = [metrics.state(), *(front.state() for front in self._fronts)]
            metrics.others = known[1:]
            for n, front in enumerate(self._fronts, 1):
                front.say({"others": known[:n] + known[n + 1 :], "restarts": restarts()})
            await asyncio.sleep(OFTEN)

    def drain(self) -> None:
        """Tells all to answer what they have accepted, and then to end."""
        for front in self._fronts:
            front.stop()

    async def close(self, seconds: float) -> None:
        """Waits for them, so long at most."""
        self.drain()
        await asyncio.gather(*(front.close(seconds) for front in self._fronts))
        if self._exchange is not None:
            self._exchange.cancel()


class _Front:
    def __init__(self, listening: socket.socket, settings: dict[str, Any]):
        self._listening, self._settings = listening, settings
        self._process: subprocess.Popen[bytes] | None = None
        self._closing = False
        self._keeper: asyncio.Task[None] | None = None
        self._last: dict[str, Any] | None = None
        self._gone = Metrics()
        """What was counted by processes that have ended."""

    async def start(self) -> None:
        ours, theirs = socket.socketpair()
        files = (theirs.fileno(), self._listening.fileno())
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "regard.serve.front", *map(str, files)],
                pass_fds=files,
                stdin=subprocess.DEVNULL,
            )
        self._reader, self._writer = await asyncio.open_connection(sock=ours, limit=2**24)
        self.say(self._settings)
        if not await self._reader.readline():
            raise ValueError(
                f"an HTTP process ended while it was starting (status {await self._ended()})"
            )

    def keep_alive(self) -> None:
        self._keeper = asyncio.create_task(self._keep())

    async def _keep(self) -> None:
        pause = SOON
        while not self._closing:
            try:
                while line := await self._reader.readline():
                    self._last, pause = json.loads(line), SOON
            except (ConnectionError, json.JSONDecodeError):
                pass
            code = await self._ended()
            if self._last is not None:
                self._gone.add({**self._last, "running": 0})
                self._last = None
            if self._closing:
                break
            log.error("HTTP process ended", extra={"about": {"status": code}})
            started = False
            while not started and not self._closing:
                await asyncio.sleep(pause)
                pause = min(2 * pause, LATER)
                started = not self._closing and await self._started_again()

    async def _started_again(self) -> bool:
        try:
            await self.start()
        except (ValueError, OSError) as error:
            log.error("HTTP process cannot start", extra={"about": {"reason": str(error)}})
            return False
        log.warning("HTTP process started again")
        return True

    def state(self) -> dict[str, Any]:
        """What it has counted, with those before it."""
        whole = Metrics()
        whole.add(self._gone.state())
        if self._last is not None:
            whole.add(self._last)
        return whole.state()

    def say(self, message: dict[str, Any]) -> None:
        if not self._writer.is_closing():
            self._writer.write(json.dumps(message).encode() + b"\n")

    def stop(self) -> None:
        if self._closing or self._process is None:
            return
        self._closing = True
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    async def close(self, seconds: float) -> None:
        if self._keeper is None:
            return
        done, _ = await asyncio.wait([self._keeper], timeout=seconds)
        if not done:
            assert self._process is not None
            self._process.kill()
            self._keeper.cancel()

    async def _ended(self) -> int:
        assert self._process is not None
        self._writer.close()
        return await asyncio.get_running_loop().run_in_executor(None, self._process.wait)
