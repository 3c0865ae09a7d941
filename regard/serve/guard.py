"""What every request goes through before anything is done for it.

An id, an API key, a body of bounded size that comes in time; afterwards a line in the log and in
the metrics. If the client leaves, whatever was begun for it is cancelled. Whatever goes wrong is
an answer, and never a traceback.
"""

import asyncio
import hashlib
import hmac
import json
import logging
import re
import secrets
import time
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any

from regard.serve.metrics import Metrics
from regard.service.requests import Busy, Late, Lost, Refused, TooLarge, Unknown

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

log = logging.getLogger("regard.serve")

OPEN = ("/health",)
"""What is answered without a key."""


class Keys:
    """API keys; with none, everybody may ask."""

    def __init__(self, keys: Sequence[str] = ()):
        self._digests = [_digest(key) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def fit(self, key: str) -> bool:
        """Whether it is one of them, found out in the same time for every wrong one."""
        digest = _digest(key)
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return any(matches)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogatepass")).digest()


class Forbidden(Refused):
    """Without a key, or with a wrong one."""


class Slow(Refused):
    """A body that does not come."""


class Unsupported(Refused):
    """A body of another kind than is read here."""


STATUS: tuple[tuple[type[Exception], int], ...] = (
    (Forbidden, 401),
    (Unknown, 404),
    (Slow, 408),
    (TooLarge, 413),
    (Unsupported, 415),
    (Busy, 429),
    (Lost, 503),
    (Late, 504),
    (Refused, 422),
)
"""Every refusal, the more general ones last."""


def answer_to(error: Exception) -> tuple[int, str, dict[str, str]]:
    """The status of a refusal, its words, and headers."""
    status = next((code for kind, code in STATUS if isinstance(error, kind)), 500)
    words = str(error) if status != 500 else "this is a fault of the server's own"
    headers = {}
    if status in (429, 503):
        headers["Retry-After"] = str(getattr(error, "retry_after", 1))
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return status, words, headers


class Guard:
    """ASGI middleware."""

    def __init__(
        self,
        app: Callable[[Scope, Receive, Send], Awaitable[None]],
        *,
        metrics: Metrics,
        keys: Keys,
        largest: int,
        seconds: float,
        routes: Callable[[Scope], str],
    ):
        """`largest` bounds the bytes of a body, `seconds` the time in which it comes, and in which
        a part of an answer is taken."""
        self.app, self.metrics, self.keys = app, metrics, keys
        self.largest, self.seconds, self.routes = largest, seconds, routes
        self.draining = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        begun, status, sent = time.monotonic(), 0, 0
        headers = dict(scope["headers"])
        number = _id(headers.get(b"x-request-id", b""))
        scope.setdefault("state", {})["id"] = number
        self.metrics.running += 1

        async def said(message: MutableMapping[str, Any]) -> None:
            nonlocal status, sent
            if message["type"] == "http.response.start":
                status = message["status"]
                more = [(b"x-request-id", number.encode())]
                if self.draining:
                    more.append((b"connection", b"close"))
                message = {**message, "headers": [*message.get("headers", ()), *more]}
            else:
                sent += len(message.get("body", b""))
            if message.get("more_body"):
                # A reader that has stopped reading is not waited for.
                await asyncio.wait_for(send(message), self.seconds)
            else:
                await send(message)

        route = self.routes(scope)
        left = False
        try:
            self._check_key(scope, headers)
            body = await self._body(headers, receive)
            left = await self._run(scope, body, receive, said)
        except _Left:
            left = True
        except asyncio.CancelledError:
            left = True
            raise
        except TimeoutError:  # it has stopped reading
            left = True
            raise
        except Exception as error:
            if not isinstance(error, Refused):
                log.exception("fault", extra={"about": {"id": number, "route": route}})
            if status == 0:
                await respond(said, *answer_to(error))
            elif status != 500:
                raise  # in the midst of an answer: the connection is closed
        finally:
            self.metrics.running -= 1
            seconds = time.monotonic() - begun
            if left:
                self.metrics.cancelled += 1
                status = 499
            self.metrics.answered(route, status, seconds)
            about = {
                "id": number,
                "method": scope["method"],
                "route": route,
                "status": status,
                "seconds": round(seconds, 4),
                "bytes": sent,
                **scope["state"].get("about", {}),
            }
            log.info("request", extra={"about": about})

    def _check_key(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        if not self.keys or scope["path"] in OPEN:
            return
        key = headers.get(b"x-api-key", b"").decode("latin-1")
        kind, _, token = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
        if kind.lower() == "bearer":
            key = token.strip()
        if self.keys.fit(key):
            scope["state"]["known"] = True
        elif scope["path"] != "/translate" or key:  # LibreTranslate's clients have it in the body
            raise Forbidden("this needs an API key: Authorization: Bearer KEY")

    async def _body(self, headers: dict[bytes, bytes], receive: Receive) -> bytes:
        """All of it, before anything else is done: who sends slowly holds nothing but a socket."""
        words = TooLarge(f"the body is larger than {self.largest:,} bytes")
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length[:20]) > self.largest:
            raise words
        parts, size = [], 0
        try:
            async with asyncio.timeout(self.seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise _Left
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    if size > self.largest:
                        raise words
                    if not message.get("more_body"):
                        return b"".join(parts)
        except TimeoutError:
            raise Slow(f"the body did not come within {self.seconds:g} s") from None

    async def _run(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> bool:
        """Runs the application; True if its client left, and it was cancelled."""
        work = asyncio.current_task()
        assert work is not None
        given = left = False

        async def leave() -> MutableMapping[str, Any]:
            nonlocal left
            message = await receive()
            left = True
            work.cancel()
            return message

        gone = asyncio.ensure_future(leave())

        async def again() -> MutableMapping[str, Any]:
            nonlocal given
            if not given:
                given = True
                return {"type": "http.request", "body": body, "more_body": False}
            return await asyncio.shield(gone)

        try:
            await self.app(scope, again, send)
        except asyncio.CancelledError:
            if not left:
                raise
            work.uncancel()
        finally:
            gone.cancel()
        return left


class _Left(Exception):  # noqa: N818
    """The client is gone."""


def _id(given: bytes) -> str:
    """The client's own id, if it is a plain one, so that logs can be joined."""
    if re.fullmatch(rb"[A-Za-z0-9_.:-]{1,64}", given):
        return given.decode()
    return secrets.token_hex(8)


async def respond(send: Send, status: int, words: str, headers: dict[str, str]) -> None:
    body = json.dumps({"error": words}, ensure_ascii=False, separators=(",", ":")).encode()
    fields = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    fields += [(name.lower().encode(), text.encode()) for name, text in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": fields})
    await send({"type": "http.response.body", "body": body})
