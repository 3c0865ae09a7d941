"""The server: sockets, the HTTP application, fronts beside it, and workers behind it.

bind → start the workers → serve → SIGTERM → answer what has been accepted → end

SIGHUP loads all models again.
"""

import asyncio
import logging
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import uvicorn

from regard.serve.app import Options, create
from regard.serve.fronts import Fronts
from regard.serve.workers import Settings, Workers

log = logging.getLogger("regard.serve")

GRACE = 0.5
"""Seconds after SIGTERM in which connections that are kept alive are still answered, and told to
close: a request that is on its way is not lost."""


BACKLOG = 2048
"""Connections that wait to be accepted."""


class Server(uvicorn.Server):
    """uvicorn's, which drains before it closes connections, and then ends well."""

    def __init__(
        self,
        config: uvicorn.Config,
        *,
        signals: Sequence[signal.Signals] = (signal.SIGINT, signal.SIGTERM),
        draining: Callable[[], None] = lambda: None,
    ):
        """`draining` is called when it is told to end by one of the signals."""
        super().__init__(config)
        self._signals, self._draining = signals, draining

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in self._signals:
            loop.add_signal_handler(number, self.handle_exit, number, None)
        yield
        for number in self._signals:
            loop.remove_signal_handler(number)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        guard = self.config.app.state.guard  # type: ignore[union-attr]
        guard.draining = True
        self._draining()
        await asyncio.sleep(0)  # connections that wait to be accepted are
        for server in self.servers:
            server.close()
        await asyncio.sleep(GRACE)
        await super().shutdown(sockets)


def bound(host: str, port: int) -> socket.socket:
    """A socket that listens at this address, or a ValueError that says why not."""
    (listening,) = _bound(host, port, 1)
    return listening


def bound_together(host: str, port: int, count: int) -> list[socket.socket]:
    """Sockets that listen at one address, each for a process: the system shares connections out."""
    if count > 1:
        # Whoever else listens there would share, too; alone, a socket is refused.
        with bound(host, port) as alone:
            port = alone.getsockname()[1]
    return _bound(host, port, count)


def _bound(host: str, port: int, count: int) -> list[socket.socket]:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sockets = []
    try:
        for _ in range(count):
            listening = socket.socket(family, socket.SOCK_STREAM)
            sockets.append(listening)
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if count > 1:
                listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            listening.bind((host, port))
            listening.listen(BACKLOG)  # whoever comes before the workers are ready waits
            listening.set_inheritable(False)
    except (OSError, OverflowError) as error:
        for listening in sockets:
            listening.close()
        if isinstance(error, OverflowError):
            words = f"port ({port}) must be from 0 to 65535; 0 is any that is free"
            raise ValueError(words) from None
        reason = error.strerror or str(error)
        raise ValueError(
            f"{host}:{port} cannot be listened at ({reason}); choose another --port or --host"
        ) from None
    return sockets


def loop() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """What makes an event loop: uvloop, where there is one."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def uvicorn_config(app: Any, drain: float) -> uvicorn.Config:
    return uvicorn.Config(
        app,
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


async def serve(
    listening: Sequence[socket.socket],
    settings: Settings,
    options: Options,
    *,
    workers: int = 1,
    drain: float = 60.0,
    level: str = "info",
    ready: Callable[[Workers], Any] = lambda workers: None,
) -> None:
    """Serves until it is told to end, and then for at most `drain` seconds more.

    Each of the sockets is listened at by an HTTP process, of which this is the first.
    """
    with ExitStack() as stack:
        meeting = None
        if len(listening) > 1:
            meeting = Path(stack.enter_context(TemporaryDirectory(prefix="regard-")))
        backend = Workers(settings, workers, meeting)
        # Until there are workers, to be told to end is to end at once.
        await backend.start()
        addresses = [meeting / str(n) for n in range(workers)] if meeting else []
        fronts = Fronts(listening[1:], addresses, options, drain, level)
        app = create(backend, options)
        server = Server(uvicorn_config(app, drain), draining=fronts.drain)
        try:
            await fronts.start(app.state.metrics, lambda: backend.restarts)
            if hasattr(signal, "SIGHUP"):  # Windows has none
                asyncio.get_running_loop().add_signal_handler(
                    signal.SIGHUP, lambda: asyncio.ensure_future(_reload(backend))
                )
            ready(backend)
            await server.serve(sockets=[listening[0]])
        finally:
            # Told twice, it does not wait.
            await fronts.close(0 if server.force_exit else drain)
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
