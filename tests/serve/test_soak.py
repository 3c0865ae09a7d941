"""Mixed traffic for ten minutes: no wrong answer, and no memory that grows.

REGARD_SOAK_MINUTES is for other lengths, such as 120.
"""

import base64
import json
import os
import random
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from regard import load
from tests.processes import HANG
from tests.serve.processes import Server, closing, post, serving
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

MINUTES = float(os.environ.get("REGARD_SOAK_MINUTES", "10"))
GROWTH = 2**20
"""Bytes a minute."""

if not Path("/proc/self/statm").exists():
    pytest.skip("needs /proc", allow_module_level=True)


def resident(server: Server) -> int:
    pids = [server.process.pid, *server.workers]
    pages = sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids)
    return pages * os.sysconf("SC_PAGE_SIZE")


def traffic(server: Server, seed: int, end: float, want: list[str], wrong: list[Any]) -> None:
    """One client, who asks for all kinds of things, and leaves in the midst of some."""
    chance = random.Random(seed)
    image = base64.b64encode(picture(seed)).decode()
    asked: list[tuple[str, Any, int]] = [
        ("/v1/generate", {"prompt": TEXTS[0], "length": 9}, 200),
        ("/v1/label", {"text": TEXTS[:3]}, 200),
        ("/v1/classify", {"image": image}, 200),
        ("/v1/read", {"image": image}, 200),
        ("/v1/attention", {"text": TEXTS[1], "model": "en-de"}, 200),
        ("/v1/translate", {"text": 5}, 422),
        ("/v1/translate", {"text": "a", "model": "none"}, 404),
        ("/v1/classify", {"image": "AAAA"}, 422),
    ]
    while time.monotonic() < end:
        with closing(server.connect()) as connection:
            for _ in range(chance.randint(1, 5)):
                if chance.random() < 0.6:
                    n = chance.randrange(len(TEXTS))
                    status, answer = post(connection, "/v1/translate", {"text": TEXTS[n]})
                    if status != 200 or answer["translations"][0]["text"] != want[n]:
                        wrong.append((status, answer))
                else:
                    path, body, expected = chance.choice(asked)
                    status, answer = post(connection, path, body)
                    if status != expected:
                        wrong.append((path, status, answer))
            if chance.random() < 0.2:
                body = json.dumps({"text": TEXTS, "stream": True}).encode()
                kind = {"Content-Type": "application/json"}
                connection.request("POST", "/v1/translate", body, kind)  # and leaves


def test_mixed_traffic(tmp_path: Path) -> None:
    folders = [
        translator(tmp_path / "en-de"),
        generator(tmp_path / "stories"),
        labeler(tmp_path / "moods"),
        classifier(tmp_path / "kinds"),
        reader(tmp_path / "scans"),
    ]
    want = load(folders[0]).translate(TEXTS)
    wrong: list[Any] = []
    with serving(*folders, "--log", "error", "--seconds", "300") as server:
        seconds = 60 * MINUTES
        end = time.monotonic() + seconds
        clients = [
            threading.Thread(target=traffic, args=(server, seed, end, want, wrong))
            for seed in range(8)
        ]
        for client in clients:
            client.start()
        time.sleep(seconds / 3)  # caches fill
        begun, before = time.monotonic(), resident(server)
        for client in clients:
            client.join()
        grown = (resident(server) - before) / (time.monotonic() - begun) * 60
        restarts = server.metric("regard_worker_restarts_total")
    assert wrong == []
    assert restarts == 0
    # Of a short run, noise is more than growth.
    assert grown < max(GROWTH, 16 * 2**20 / (seconds / 60)), f"{grown / 2**20:.2f} MiB a minute"


def test_readers_that_stop_reading_block_nobody(tmp_path: Path) -> None:
    folder = generator(tmp_path / "stories")
    direct: Any = load(folder)
    want = direct.generate([TEXTS[0]], length=5)
    with serving(folder, "--seconds", "5") as server:
        held = []
        body = json.dumps({"prompt": TEXTS[:20], "length": 900, "stream": True}).encode()
        for _ in range(8):
            one = socket.socket()
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            one.connect(("127.0.0.1", server.port))
            one.sendall(
                b"POST /v1/generate HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
                b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
            )
            held.append(one)
        for _ in range(5):
            status, answer = server.post("/v1/generate", {"prompt": TEXTS[0], "length": 5})
            assert status in (200, 504)  # late, where the machine is slow
            if status == 200:
                assert answer["texts"] == want
        end = time.monotonic() + HANG
        while server.metric("regard_running") > 1 and time.monotonic() < end:
            time.sleep(0.1)
        assert server.metric("regard_running") == 1  # who asks
        for one in held:
            one.close()
