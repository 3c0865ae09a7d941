"""The server as a process: many clients, clients that leave, workers that crash, and its end."""

import http.client
import json
import os
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from regard import load
from regard.cli.main import main
from tests.processes import HANG, lives, wait_until
from tests.serve.processes import Server, closing, post, serving
from tests.service.samples import TEXTS, translator

pytestmark = pytest.mark.usefixtures("unchecked")

if not Path("/proc/self/task").exists():
    pytest.skip("needs /proc", allow_module_level=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return translator(tmp_path_factory.mktemp("models") / "en-de")


@pytest.fixture(scope="module")
def want(folder: Path) -> list[str]:
    return load(folder).translate(TEXTS)


def test_windows_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("regard.cli.serve.sys", SimpleNamespace(platform="win32"))
    assert main(["serve", "RUN"]) == 2
    expected = "regard: serve needs the signals of Linux or macOS; run it in WSL2\n"
    assert capsys.readouterr().err == expected


@pytest.fixture(scope="module", params=[1, 3], ids=["one HTTP process", "three"])
def server(folder: Path, request: pytest.FixtureRequest) -> Iterator[Server]:
    with serving(folder, "--seconds", "60", "--http-processes", request.param) as server:
        assert len(server.fronts) == request.param - 1
        yield server


def ask(server: Server, n: int, want: list[str], found: list[object]) -> None:
    """A client that asks for several texts, one after the other, on one connection."""
    with closing(server.connect()) as connection:
        for k in range(5):
            m = (7 * n + k) % len(TEXTS)
            status, answer = post(connection, "/v1/translate", {"text": TEXTS[m]})
            found.append((status, answer["translations"][0]["text"] == want[m]))


def test_many_clients_get_their_own_answers(server: Server, want: list[str]) -> None:
    found: list[object] = []
    clients = [threading.Thread(target=ask, args=(server, n, want, found)) for n in range(20)]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    assert found == [(200, True)] * 100


def test_slow_and_half_open_connections_block_nobody(server: Server, want: list[str]) -> None:
    held = []
    for begin in (b"", b"POST /v1/translate HTT", b"POST /v1/translate HTTP/1.1\r\nHost: a\r\n"):
        one = socket.create_connection(("127.0.0.1", server.port))
        one.sendall(begin)
        held.append(one)
    slow = socket.create_connection(("127.0.0.1", server.port))
    slow.sendall(
        b"POST /v1/translate HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
        b"Content-Length: 1000\r\n\r\n{"
    )
    status, answer = server.post("/v1/translate", {"text": TEXTS[0]})
    assert (status, answer["translations"][0]["text"]) == (200, want[0])
    for one in (*held, slow):
        one.close()


def test_a_worker_that_crashes_is_started_again(server: Server, want: list[str]) -> None:
    restarts = server.metric("regard_worker_restarts_total")
    (worker,) = server.workers
    os.kill(worker, signal.SIGSTOP)  # so that it cannot answer before it is killed
    found: list[tuple[int, object]] = []
    asking = threading.Thread(
        target=lambda: found.append(server.post("/v1/translate", {"text": TEXTS[0]}))
    )
    asking.start()
    wait_until(lambda: server.metric("regard_running") == 2)  # it, and who asks for metrics
    os.kill(worker, signal.SIGKILL)
    asking.join()
    assert found[0][0] == 503
    wait_until(lambda: {server.get("/health")[0] for _ in range(9)} == {200})
    assert server.post("/v1/translate", {"text": TEXTS[1]})[1]["translations"][0]["text"] == want[1]
    wait_until(lambda: server.metric("regard_worker_restarts_total") == restarts + 1)


def test_who_leaves_is_counted(server: Server) -> None:
    before = server.metric("regard_cancelled_total")
    (worker,) = server.workers
    os.kill(worker, signal.SIGSTOP)
    leaving = server.connect()
    content = json.dumps({"text": TEXTS}).encode()
    leaving.request("POST", "/v1/translate", content, {"Content-Type": "application/json"})
    wait_until(lambda: server.metric("regard_running") == 2)
    leaving.close()
    wait_until(lambda: server.metric("regard_cancelled_total") == before + 1)
    os.kill(worker, signal.SIGCONT)
    assert server.post("/v1/translate", {"text": TEXTS[0]})[0] == 200


def test_an_http_process_that_crashes_is_started_again(folder: Path, want: list[str]) -> None:
    with serving(folder, "--http-processes", 3) as server:
        found: list[object] = []
        for n in range(10):
            ask(server, n, want, found)
        first, second = server.fronts
        # Every process counts its own, and says what all have counted.
        answered = 'regard_requests_total{route="/v1/translate",status="200"}'
        wait_until(lambda: [server.metric(answered) for _ in range(9)] == [50] * 9)
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: len(server.fronts) == 2 and first not in server.fronts)
        assert second in server.fronts
        for n in range(10):
            ask(server, n, want, found)
        assert found == [(200, True)] * 100
        wait_until(lambda: [server.metric(answered) for _ in range(9)] == [100] * 9)
        assert len(server.events("HTTP process ended")) == 1
        (worker,) = server.workers
        front = server.fronts[0]
        os.kill(server.process.pid, signal.SIGKILL)
        wait_until(lambda: not lives(front) and not lives(worker))


@pytest.mark.parametrize("processes", [1, 3])
def test_its_end_loses_no_request_that_was_accepted(
    processes: int, folder: Path, want: list[str]
) -> None:
    wrong: list[object] = []
    answered = 0
    begun = threading.Event()
    lock = threading.Lock()

    def client(n: int) -> None:
        nonlocal answered
        while True:
            connection = server.connect()
            try:
                connection.connect()
            except OSError:
                return  # it listens no more
            try:
                status, answer = post(connection, "/v1/translate", {"text": TEXTS[n]})
            except (ConnectionResetError, http.client.RemoteDisconnected, BrokenPipeError):
                return  # never accepted: it waited for a server that was closing
            finally:
                connection.close()
            with lock:
                answered += 1
                if status != 200 or answer["translations"][0]["text"] != want[n]:
                    wrong.append((status, answer))
            if answered > 20:
                begun.set()

    with serving(folder, "--http-processes", processes) as server:
        clients = [threading.Thread(target=client, args=(n,)) for n in range(16)]
        for one in clients:
            one.start()
        begun.wait(HANG)
        assert server.stop() == 0
        for one in clients:
            one.join()
    assert wrong == []
    logged = [line for line in server.events("request") if line["route"] == "/v1/translate"]
    # Whatever was accepted has an answer, and its client has it.
    assert {line["status"] for line in logged} == {200}
    assert len(logged) == answered
    assert server.events("ended")


def test_what_cannot_be_served_is_one_line(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*words: object) -> tuple[int, str]:
        status = main(["serve", *map(str, words)])
        return status, capsys.readouterr().err

    (tmp_path / "empty").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for more in ((), ("--http-processes", 2)):
            status, said = run(folder, "--port", port, *more)
            assert (status, said.count("\n")) == (2, 1)
            assert f"127.0.0.1:{port} cannot be listened at" in said
    status, said = run(tmp_path / "empty", "--port", 0)
    assert status == 2
    assert said.startswith("regard: ")
    assert said.count("\n") == 1
    for words, expected in (
        ((), "needs runs' or models' folders"),
        ((tmp_path / "none",), "cannot be found"),
        ((folder, f"en-de={folder}"), "two models named en-de"),
        ((folder, "--workers", -1), "workers (-1) must be 0 or more"),
        ((folder, "--port", 70000), "port (70000) must be from 0"),
        ((folder, "--port", 70000, "--http-processes", 2), "port (70000) must be from 0"),
        ((folder, "--http-processes", -1), "http_processes (-1) must be 0 or more"),
        ((folder, "--keys", tmp_path / "none"), "cannot be read"),
    ):
        status, said = run(*words)
        assert (status, said.count("\n")) == (2, 1), said
        assert expected in said
