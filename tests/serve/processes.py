"""A server as a process of its own, and clients that talk to it over sockets."""

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.processes import HANG, lives

READY = re.compile(r"http://127\.0\.0\.1:(\d+)/docs")


class Server:
    """`regard serve …`."""

    def __init__(self, words: Sequence[str]):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "regard", "serve", *words, "--port", "0"],
            stderr=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            text=True,
        )
        self.lines: list[str] = []
        self.port = 0
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            if found := READY.search(line):
                self.port = int(found[1])
                break
        assert self.port, self.lines
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        self.lines += self.process.stderr

    def events(self, name: str) -> list[dict[str, Any]]:
        """What it has logged."""
        found = [json.loads(line) for line in tuple(self.lines) if line.startswith("{")]
        return [line for line in found if line["event"] == name]

    @property
    def workers(self) -> list[int]:
        return self._children("regard.serve.worker")

    @property
    def fronts(self) -> list[int]:
        return self._children("regard.serve.front")

    def _children(self, module: str) -> list[int]:
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        found = [pid for pid in map(int, path.read_text().split()) if lives(pid)]
        words = {pid: Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0") for pid in found}
        return [pid for pid in found if module.encode() in words[pid]]

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=HANG)

    def get(self, path: str) -> tuple[int, str]:
        with closing(self.connect()) as connection:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()

    def post(self, path: str, body: object) -> tuple[int, Any]:
        with closing(self.connect()) as connection:
            return post(connection, path, body)

    def metric(self, name: str) -> float:
        found = re.search(rf"^{re.escape(name)} (\S+)$", self.get("/metrics")[1], re.MULTILINE)
        return float(found[1]) if found else 0.0

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        status = self.process.wait(HANG)
        self._reader.join()
        assert self.process.stderr is not None
        self.process.stderr.close()
        return status


@contextmanager
def closing(connection: http.client.HTTPConnection) -> Iterator[http.client.HTTPConnection]:
    try:
        yield connection
    finally:
        connection.close()


def post(connection: http.client.HTTPConnection, path: str, body: object) -> tuple[int, Any]:
    content = json.dumps(body).encode()
    connection.request("POST", path, content, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    return answer.status, json.loads(answer.read())


@contextmanager
def serving(*words: object) -> Iterator[Server]:
    server = Server([str(word) for word in words])
    try:
        yield server
    finally:
        server.stop()
