"""HTTP for the studio: a fixed table of files, and questions in JSON.

Only the server's own pages on this machine may ask. The Host must be the address that is served
(so that no other name leads here), an Origin must be the server itself, questions are JSON of
limited size, and a content security policy keeps pages from loading anything else. No path from a
request reaches the file system: files are looked up in a table that is read at the start.

The standard library's server is enough for one reader and listens within milliseconds: torch is
imported only for questions about models.
"""

import json
import re
import socket
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from typing import Any

from regard.machine.extras import remedy

MAX_QUESTION_BYTES = 3 << 20
"""Bytes of a question; the picture in a question is much smaller."""

MAX_DISCARDED_BYTES = 16 << 20
"""Bytes read of a refused request, so that the client finishes sending and reads the answer."""

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)

HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}

TYPES = {
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "svg": "image/svg+xml",
}

PAGES = (
    *("byhand", "geometry", "as", "positions", "masks", "translate", "text", "vision", "read"),
    *("cost", "training", "course"),
)
"""The pages, each a module in static/."""

Ask = Callable[[Mapping[str, Any]], Any]


def file_table() -> dict[str, tuple[bytes, str]]:
    """Every file that is served, by its address."""
    names = [
        "index.html",
        "app.js",
        "core.js",
        "ui.js",
        "models.js",
        "picture.js",
        "studio.css",
        "icon.svg",
    ]
    static, look, lab = files("regard.studio") / "static", files("regard.look"), files("regard.lab")
    sources = {
        **{name: static / name for name in (*names, *(f"{page}.js" for page in PAGES))},
        "view.js": look / "view.js",
        "view.css": look / "view.css",
        "report.css": lab / "report.css",
        "answers.css": lab / "answers.css",
    }
    table = {
        f"/{name}": (source.read_bytes(), TYPES[name.rpartition(".")[2]])
        for name, source in sources.items()
    }
    return {**table, "/": table["/index.html"]}


class Server(ThreadingHTTPServer):
    """Serves one table of files, and answers questions by name."""

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 1024  # connections that wait to be accepted; the kernel may allow fewer

    def __init__(self, host: str, port: int, asks: Mapping[str, Ask]):
        if host in ("0.0.0.0", "::", ""):
            raise ValueError(
                f"host ({host!r}) must be one address, such as 192.168.1.5: the studio recognizes "
                "its own pages by it"
            )
        if ":" in host:
            self.address_family = socket.AF_INET6
        super().__init__((host, port), Handler)
        self.asks, self.files = asks, file_table()
        self.host, self.port = host, int(self.server_address[1])
        loopback = ("127.0.0.1", "localhost", "[::1]")
        shown = f"[{host}]" if ":" in host else host
        self.hosts = {f"{name}:{self.port}" for name in {shown, *loopback}}

    @property
    def address(self) -> str:
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignores connections that break; every other error is answered by the handler."""


class RefusedError(Exception):
    """The status and the reason of a refused request."""

    def __init__(self, status: HTTPStatus, reason: str):
        super().__init__(reason)
        self.status = status


class Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "Regard", ""
    timeout = 60
    wbufsize = 1 << 16  # head and body in one packet, which waits for no acknowledgement
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        self._respond(self._file)

    do_HEAD = do_GET  # noqa: N815

    def do_POST(self) -> None:
        self._respond(self._answer)

    def _respond(self, answer: Callable[[], tuple[bytes, str]]) -> None:
        status = HTTPStatus.OK
        try:
            self._check_sender()
            body, kind = answer()
        except RefusedError as refusal:
            status = refusal.status
            body, kind = _json({"error": str(refusal)}), "application/json"
            self.close_connection = True
        self.send_response(status)
        for name, value in {**HEADERS, "Content-Type": kind, "Content-Length": len(body)}.items():
            self.send_header(name, str(value))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
        if status is not HTTPStatus.OK:
            self._discard_body()

    def _discard_body(self) -> None:
        """Reads the rest of a request: closing with unread bytes would reset the connection."""
        self.wfile.flush()
        self.connection.shutdown(socket.SHUT_WR)
        self.connection.settimeout(1)
        unread = MAX_DISCARDED_BYTES
        while unread > 0 and (part := self.rfile.read1(1 << 16)):
            unread -= len(part)

    def _check_sender(self) -> None:
        host = self.headers.get_all("Host") or []
        if len(host) != 1 or host[0].lower() not in self.server.hosts:
            raise RefusedError(
                HTTPStatus.MISDIRECTED_REQUEST, "this is not the host that is served"
            )
        origin = self.headers.get("Origin")
        if origin is not None and origin.lower() != f"http://{host[0].lower()}":
            raise RefusedError(HTTPStatus.FORBIDDEN, "only the studio's own pages may ask")
        if self.headers.get("Sec-Fetch-Site", "same-origin") not in ("same-origin", "none"):
            raise RefusedError(HTTPStatus.FORBIDDEN, "only the studio's own pages may ask")

    def _file(self) -> tuple[bytes, str]:
        if "Transfer-Encoding" in self.headers or self.headers.get("Content-Length", "0") != "0":
            raise RefusedError(HTTPStatus.BAD_REQUEST, "a request for a page has no body")
        file = self.server.files.get(self.path.partition("?")[0])
        if file is None:
            raise RefusedError(HTTPStatus.NOT_FOUND, "there is no such page")
        return file

    def _answer(self) -> tuple[bytes, str]:
        name = self.path.removeprefix("/api/") if self.path.startswith("/api/") else ""
        ask = self.server.asks.get(name)
        if ask is None:
            raise RefusedError(HTTPStatus.NOT_FOUND, "there is no such question")
        kind = self.headers.get_content_type()
        if kind != "application/json":
            raise RefusedError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "questions are application/json")
        question = self._question()
        try:
            answer = _json(ask(question))
        except (ValueError, OSError) as error:
            text = " ".join(str(error).split()) or type(error).__name__
            raise RefusedError(HTTPStatus.UNPROCESSABLE_ENTITY, text[:2000]) from None
        except ImportError as error:
            text = remedy(error) or str(error)
            raise RefusedError(HTTPStatus.UNPROCESSABLE_ENTITY, text) from None
        except Exception as error:
            text = f"this is a fault of the studio's own ({type(error).__name__}: {error})"
            raise RefusedError(HTTPStatus.INTERNAL_SERVER_ERROR, text[:2000]) from None
        return answer, "application/json"

    def _question(self) -> Mapping[str, Any]:
        body = self.rfile.read(self._length())
        try:
            question = json.loads(body, parse_int=_integer)
        except (ValueError, RecursionError):
            raise RefusedError(HTTPStatus.BAD_REQUEST, "this is not JSON") from None
        if not isinstance(question, dict):
            raise RefusedError(HTTPStatus.BAD_REQUEST, "a question is a JSON object")
        return question

    def _length(self) -> int:
        lengths = self.headers.get_all("Content-Length") or []
        if "Transfer-Encoding" in self.headers or not lengths:
            raise RefusedError(
                HTTPStatus.LENGTH_REQUIRED, "a question needs a Content-Length, and is not chunked"
            )
        if len(lengths) > 1 or not re.fullmatch("[0-9]{1,15}", lengths[0]):
            text = ", ".join(lengths)[:40]
            raise RefusedError(
                HTTPStatus.BAD_REQUEST, f"Content-Length ({text!r}) must be one whole number"
            )
        if int(lengths[0]) > MAX_QUESTION_BYTES:
            raise RefusedError(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                f"a question has at most {MAX_QUESTION_BYTES:,} bytes",
            )
        return int(lengths[0])

    def log_message(self, format: str, *args: Any) -> None:
        """Logs nothing: the terminal shows only the address."""


def _integer(digits: str) -> int | float:
    """A JSON integer; with more digits than any field allows it is a float, or an infinity."""
    return int(digits) if len(digits) <= 24 else float(digits)


def _json(answer: object) -> bytes:
    """JSON in UTF-8, which has no infinity."""
    return json.dumps(answer, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
