"""Whatever is sent, nothing breaks, leaks or touches a file."""

import asyncio
import base64
import json
import random
import socket
import zlib
from pathlib import Path
from typing import Any

import pytest

from regard.serve.app import Options, create
from regard.serve.backend import InProcess
from regard.service import Limits, Service
from tests.processes import HANG
from tests.serve.asgi import Answer, request
from tests.serve.processes import serving
from tests.service.samples import (
    TEXTS,
    classifier,
    generator,
    labeler,
    picture,
    reader,
    translator,
)

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("unchecked")]

LIMITS = Limits(
    characters=500, texts=20, tokens=20, pixels=5000, image_bytes=5000, beams=6, seconds=float(HANG)
)
SECRET = "xyzzy"
"""A word of a user's, which no error repeats."""

PATHS = [
    *(
        f"/v1/{name}"
        for name in ("translate", "generate", "label", "classify", "read", "attention")
    ),
    *(
        "/translate",
        "/languages",
        "/v1/models",
        "/health",
        "/metrics",
        "/openapi.json",
        "/docs",
        "/",
    ),
    *("/v1/models/en-de/reload", f"/v1/models/{SECRET}/reload", "/v1/models/..%2F..%2Fetc/reload"),
    *(
        "/../../etc/passwd",
        "/%2e%2e/%2e%2e/etc/passwd",
        "/v1//translate",
        "/v1/translate/",
        "/\x00",
    ),
    *(f"/{SECRET}", "/v1/translate?model=../../x", "/docs/../../pyproject.toml", "//etc/passwd"),
]
FIELDS = [
    *("text", "prompt", "image", "model", "beams", "n_best", "format", "stream", "seconds", "top"),
    *("length", "temperature", "top_k", "top_p", "seed", "written", "q", "source", "target"),
    *("alternatives", "api_key", SECRET),
]
KINDS = [
    *(
        "application/json",
        "application/json; charset=utf-16",
        "text/plain",
        "image/png",
        "",
        "a/b/c",
    ),
    *("application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "image/svg+xml"),
]


def bomb() -> bytes:
    """A PNG of a few bytes that says it has a billion pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        check = zlib.crc32(kind + data).to_bytes(4, "big")
        return len(data).to_bytes(4, "big") + kind + data + check

    size = (30_000).to_bytes(4, "big")
    header = chunk(b"IHDR", size + size + b"\x08\x00\x00\x00\x00")
    return (
        b"\x89PNG\r\n\x1a\n"
        + header
        + chunk(b"IDAT", zlib.compress(b"\0" * 1000))
        + chunk(b"IEND", b"")
    )


IMAGES = [
    picture(0),
    picture(1, kind="jpeg"),
    picture(2, (99, 99)),
    bomb(),
    picture(0)[:40],
    b"GIF89a",
]


def value(chance: random.Random, depth: int = 0) -> Any:
    choices: list[Any] = [
        *(None, True, 0, -1, 10**30, 1e308, float("nan"), float("inf"), "", "a", "\ud800", "\0"),
        *(SECRET, chance.choice(TEXTS), "a" * 501, 1, 2, 0.5, "html", "auto", "en", "de", "en-de"),
        *("../../etc/passwd", "{{7*7}}", "'; DROP TABLE", "‮", "💥" * 50, "<script>a</script>"),
        base64.b64encode(chance.choice(IMAGES)).decode(),
    ]
    if depth < 3 and chance.random() < 0.15:
        inner = [value(chance, depth + 1) for _ in range(chance.randint(0, 4))]
        return inner if chance.random() < 0.6 else {str(n): one for n, one in enumerate(inner)}
    return chance.choice(choices)


def body(chance: random.Random) -> bytes:
    kind = chance.random()
    if kind < 0.06:
        return chance.randbytes(chance.randint(0, 300))
    if kind < 0.10:
        return chance.choice([b"[", b'{"text":']) * chance.randint(1, 2000)
    if kind < 0.16:
        return chance.choice(IMAGES)
    if kind < 0.20:
        return b"&".join(
            b"%s=%s" % (name.encode(), chance.choice([b"a", b"%ff", b"%00", b"5", b"en"]))
            for name in chance.sample(FIELDS, 4)
        )
    fields = chance.sample(FIELDS, chance.randint(0, 5))
    wanted = chance.choice(["text", "prompt", "image", "q"])
    given = {name: value(chance) for name in fields}
    if chance.random() < 0.7:
        given[wanted] = value(chance)
    content = json.dumps(given).encode()
    if chance.random() < 0.15:  # a byte is lost, or another
        at = chance.randrange(len(content))
        content = content[:at] + chance.choice([b"", chance.randbytes(1)]) + content[at + 1 :]
    return content


def files(root: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.stat().st_mtime_ns, path.stat().st_size) for path in root.rglob("*")}


def check(answer: Answer) -> None:
    assert answer.status, "no answer"
    assert answer.status < 500, (answer.status, answer.body)
    if answer.status >= 400:
        assert list(answer.json) == ["error"]
        assert SECRET.encode() not in answer.body
    assert b"Traceback" not in answer.body
    assert b"root:" not in answer.body


def test_twenty_thousand_requests(tmp_path: Path) -> None:
    makers: dict[str, Any] = {
        "en-de": translator,
        "stories": generator,
        "moods": labeler,
        "kinds": classifier,
        "scans": reader,
    }
    with Service(LIMITS) as service:
        for name, make in makers.items():
            service.add(make(tmp_path / name))
        before = files(tmp_path)
        app = create(InProcess(service), Options(limits=LIMITS))
        counts: dict[int, int] = {}

        async def run(seed: int) -> None:
            chance = random.Random(seed)
            path = chance.choice(PATHS[:9] if chance.random() < 0.8 else PATHS)
            if path == "/v1/models/en-de/reload" and chance.random() < 0.98:
                path = "/v1/translate"  # to load a model a thousand times would tell nothing more
            method = chance.choice(["POST"] * 12 + ["GET", "PUT", "DELETE", "OPTIONS", "HEAD", "X"])
            headers = {"content-type": chance.choice(KINDS[:1] * 6 + KINDS)}
            if chance.random() < 0.1:
                headers["content-length"] = chance.choice(["-1", "9" * 30, "x", "5"])
            if chance.random() < 0.1:
                headers["x-request-id"] = chance.choice(["a\r\nb", SECRET, "é", "a" * 1000])
            try:
                answer = await request(app, method, path, body(chance), headers)
                if method != "HEAD":
                    check(answer)
            except BaseException as error:
                raise AssertionError(f"seed {seed}, {method} {path}") from error
            counts[answer.status] = counts.get(answer.status, 0) + 1

        async def every() -> None:
            for begin in range(0, 20_000, 50):
                await asyncio.gather(*(run(seed) for seed in range(begin, begin + 50)))

        asyncio.run(every())
        assert files(tmp_path) == before
    assert sum(counts.values()) == 20_000
    # It got everywhere: some were answered, and others refused for each kind of reason.
    assert {200, 404, 405, 413, 415, 422} <= set(counts), counts


def test_bytes_that_are_no_http(tmp_path: Path) -> None:
    chance = random.Random(0)
    lines = [
        b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
        b"POST /v1/translate HTTP/1.1\r\nHost: a\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/translate HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 10_000 + b"\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ]
    with serving(translator(tmp_path / "en-de")) as server:
        for _ in range(500):
            data = bytearray(chance.choice(lines))
            for _ in range(chance.randint(0, 3)):
                data[chance.randrange(len(data))] = chance.randrange(256)
            with socket.create_connection(("127.0.0.1", server.port), timeout=HANG) as one:
                try:
                    one.sendall(data)
                    one.shutdown(socket.SHUT_WR)
                    while said := one.recv(65536):
                        assert b"Traceback" not in said
                        assert not said.startswith(b"HTTP/1.1 5"), (bytes(data[:200]), said)
                except (ConnectionResetError, BrokenPipeError):
                    pass  # it has had enough
        assert server.post("/v1/translate", {"text": TEXTS[0]})[0] == 200
    assert not server.events("fault")
