"""A front: an HTTP process beside the main one, at the same port and with the same workers.

python -m regard.serve.front FD LISTENING     its settings are the first line

FD is its line to the main process, without which it ends. It is told to end by SIGTERM, after what
it has accepted is answered.
"""

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from regard.serve import logs
from regard.serve.app import Options, create
from regard.serve.fronts import OFTEN
from regard.serve.lines import SOON, Line, Lines
from regard.serve.metrics import Metrics
from regard.serve.server import Server, loop, uvicorn_config
from regard.service.requests import Limits


class Connected(Lines):
    """Workers that belong to the main process."""

    def __init__(self, addresses: Sequence[str]):
        self._connected = [_Connection(address) for address in addresses]
        self.restarts = 0
        super().__init__(self._connected)

    async def start(self) -> None:
        """Until one of them can be asked."""
        self._tasks = [asyncio.create_task(one.keep()) for one in self._connected]
        while not self.ready:
            await asyncio.sleep(SOON)


class _Connection(Line):
    def __init__(self, address: str):
        super().__init__()
        self._address = address

    async def keep(self) -> None:
        """Connects, and again when the worker has ended; its successor greets when it is there."""
        while True:
            with suppress(OSError, asyncio.IncompleteReadError, json.JSONDecodeError):
                self._open(*await asyncio.open_unix_connection(self._address, limit=2**20))
                self.models = (await self._receive())["ready"]
                self.ready = True
                await self.hear()
                self._writer.close()
            self.lose()
            await asyncio.sleep(SOON)


async def run(control: socket.socket, listening: socket.socket) -> None:
    reader, writer = await asyncio.open_connection(sock=control, limit=2**24)
    settings = json.loads(await reader.readline())
    logs.start(settings["log"])
    given = settings["options"]
    options = Options(
        limits=Limits(**given["limits"]),
        keys=tuple(given["keys"]),
        cors=tuple(given["cors"]),
        log_text=given["log_text"],
    )
    backend = Connected(settings["workers"])
    await backend.start()
    app = create(backend, options)
    server = Server(uvicorn_config(app, settings["drain"]), signals=(signal.SIGTERM,))
    telling = asyncio.create_task(_tell(writer, app.state.metrics))
    hearing = asyncio.create_task(_hear(reader, app.state.metrics, backend))
    await server.serve(sockets=[listening])
    for task in (telling, hearing):
        task.cancel()
    _report(writer, app.state.metrics)
    with suppress(ConnectionError):
        await writer.drain()


def _report(writer: asyncio.StreamWriter, metrics: Metrics) -> None:
    writer.write(json.dumps(metrics.state()).encode() + b"\n")


async def _tell(writer: asyncio.StreamWriter, metrics: Metrics) -> None:
    while True:
        _report(writer, metrics)
        await asyncio.sleep(OFTEN)


async def _hear(reader: asyncio.StreamReader, metrics: Metrics, backend: Connected) -> None:
    while line := await reader.readline():
        message: dict[str, Any] = json.loads(line)
        metrics.others, backend.restarts = message["others"], message["restarts"]
    os._exit(1)  # the main process is gone


def main() -> None:
    # Ctrl-C is for the main process, which tells the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control, listening = (socket.socket(fileno=int(number)) for number in sys.argv[1:])
    with asyncio.Runner(loop_factory=loop()) as runner:
        runner.run(run(control, listening))


if __name__ == "__main__":
    main()
