"""The server: a socket, the HTTP application, and workers behind it.

bind → start the workers → serve → SIGTERM → answer what has been accepted → end

SIGHUP loads all models again.
"""

import asyncio
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

from regard.serve.app import Options, create
from regard.serve.workers import Settings, Workers

log = logging.getLogger("regard.serve")

GRACE = 0.5
"""Seconds after SIGTERM in which connections that are kept alive are still answered, and told to
close: a request that is on its way is not lost."""


BACKLOG = 2048
"""Connections that wait to be accepted."""


class Server(uvicorn.Server):
    """uvicorn's, which drains before it closes connections, and then ends well."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop, numbers = asyncio.get_running_loop(), (signal.SIGINT, signal.SIGTERM)
        for number in numbers:
            loop.add_signal_handler(number, self.handle_exit, number, None)
        yield
        for number in numbers:
            loop.remove_signal_handler(number)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        guard = self.config.app.state.guard  # type: ignore[union-attr]
        guard.draining = True
        await asyncio.sleep(0)  # connections that wait to be accepted are
        for server in self.servers:
            server.close()
        await asyncio.sleep(GRACE)
        await super().shutdown(sockets)


def bound(host: str, port: int) -> socket.socket:
    """A socket at this address, or a ValueError that says why not."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
        listening.listen(BACKLOG)  # whoever comes before the workers are ready waits
    except OSError as error:
        listening.close()
        reason = error.strerror or str(error)
        raise ValueError(
            f"{host}:{port} cannot be listened at ({reason}); choose another --port or --host"
        ) from None
    except OverflowError:
        listening.close()
        raise ValueError(f"port ({port}) must be from 0 to 65535; 0 is any that is free") from None
    listening.set_inheritable(False)
    return listening


async def serve(
    listening: socket.socket,
    settings: Settings,
    options: Options,
    *,
    workers: int = 1,
    drain: float = 60.0,
    ready: Callable[[Workers], Any] = lambda workers: None,
) -> None:
    """Serves until it is told to end, and then for at most `drain` seconds more."""
    backend = Workers(settings, workers)
    # Until there are workers, to be told to end is to end at once.
    await backend.start()
    try:
        config = uvicorn.Config(
            create(backend, options),
            log_config=None,
            backlog=BACKLOG,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=30,
            timeout_graceful_shutdown=max(1, round(drain)),
            lifespan="off",
            ws="none",
        )
        loop = asyncio.get_running_loop()
        if hasattr(signal, "SIGHUP"):  # Windows has none
            loop.add_signal_handler(signal.SIGHUP, lambda: asyncio.ensure_future(_reload(backend)))
        ready(backend)
        await Server(config).serve(sockets=[listening])
    finally:
        await backend.close()
        log.info("ended")


async def _reload(backend: Workers) -> None:
    for model in backend.models():
        try:
            await backend.reload(model["name"])
            log.info("reloaded", extra={"about": {"model": model["name"]}})
        except Exception as error:
            about = {"model": model["name"], "reason": str(error)}
            log.error("not reloaded; the old model answers", extra={"about": about})
