"""Whoever answers what HTTP asks: models in this process, or in workers.

answer = await backend.ask(request, stream)
"""

import asyncio
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from regard.serve import wire
from regard.service.requests import Delta, Request

Stream = Callable[[int, str], None]
"""Receives the number of a text, and what is new of it."""


@runtime_checkable
class Backend(Protocol):
    async def ask(self, request: Request, stream: Stream | None = None) -> Any:
        """The answer as JSON has it. Cancelled, it withdraws the request."""

    def models(self) -> list[dict[str, Any]]: ...

    async def reload(self, name: str) -> None:
        """Loads a model's folder again; the old one answers meanwhile, and stays if that fails."""

    @property
    def ready(self) -> bool:
        """Whether requests can be answered now."""

    def stats(self) -> list[dict[str, int]]:
        """Of every worker: what waits, what it has done, its memory."""

    @property
    def restarts(self) -> int: ...


class InProcess:
    """A service in this process."""

    ready, restarts = True, 0

    def __init__(self, service: Any):
        self.service = service

    async def ask(self, request: Request, stream: Stream | None = None) -> Any:
        loop, send = asyncio.get_running_loop(), None
        if stream is not None:

            def send(delta: Delta) -> None:
                loop.call_soon_threadsafe(stream, delta.index, delta.text)

        return wire.plain(await asyncio.wrap_future(self.service.submit(request, send)))

    def models(self) -> list[dict[str, Any]]:
        return list(map(wire.plain, self.service.models()))

    async def reload(self, name: str) -> None:
        await asyncio.wrap_future(self.service.reload(name))

    def stats(self) -> list[dict[str, int]]:
        counts = self.service.counts
        return [
            {
                "waiting": self.service.waiting,
                "sentences": counts.sentences,
                "steps": counts.steps,
                "bytes": 0,
            }
        ]
