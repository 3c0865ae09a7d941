"""The server answers its own pages, and nobody else; no path reaches the file system."""

import http.client
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from regard.studio.fields import check, field, items, whole
from regard.studio.runs import Runs, metrics
from regard.studio.server import MAX_QUESTION_BYTES, Server, file_table


def echo(asked: Any) -> Any:
    if "fail" in asked:
        raise {"value": ValueError("x (3) is wrong"), "other": RuntimeError("odd")}[asked["fail"]]
    return {"got": asked}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    fields = {"x": field(items(whole(0, 9), 3))}
    asks = {"echo": echo, "checked": lambda question: check(question, fields)}
    with Server("127.0.0.1", 0, asks) as made:
        threading.Thread(target=made.serve_forever, daemon=True).start()
        yield made
        made.shutdown()


def answered(
    server: Server, method: str, path: str, body: str | None = None, **headers: str
) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method, path, body, named)
    response = connection.getresponse()
    content = response.read()
    connection.close()
    return response.status, dict(response.getheaders()), content


JSON = {"Content_Type": "application/json"}


def test_pages_come_with_a_policy(server: Server) -> None:
    for path in file_table():
        status, headers, content = answered(server, "GET", path)
        assert status == 200, path
        assert content
        assert "default-src 'none'" in headers["Content-Security-Policy"]
        assert headers["X-Content-Type-Options"] == "nosniff"
    status, _, content = answered(server, "HEAD", "/")
    assert (status, content) == (200, b"")


@pytest.mark.parametrize(
    "path",
    [
        "/../pyproject.toml",
        "/%2e%2e/pyproject.toml",
        "/static/index.html",
        "//etc/passwd",
        "/view.js/../core.js",
        "/index.html/",
        "/api/echo",
    ],
)
def test_what_is_not_in_the_table_is_not_there(server: Server, path: str) -> None:
    assert answered(server, "GET", path)[0] == 404


def test_questions(server: Server) -> None:
    status, _, content = answered(server, "POST", "/api/echo", '{"a": [1]}', **JSON)
    assert (status, json.loads(content)) == (200, {"got": {"a": [1]}})
    status, _, content = answered(server, "POST", "/api/echo", '{"fail": "value"}', **JSON)
    assert (status, json.loads(content)) == (422, {"error": "x (3) is wrong"})
    assert answered(server, "POST", "/api/echo", '{"fail": "other"}', **JSON)[0] == 500


@pytest.mark.parametrize(
    ("headers", "body", "status"),
    [
        ({"Host": "evil.example"}, "{}", 421),
        ({"Host": "127.0.0.1"}, "{}", 421),
        ({"Origin": "http://evil.example"}, "{}", 403),
        ({"Origin": "null"}, "{}", 403),
        ({"Sec_Fetch_Site": "cross-site"}, "{}", 403),
        ({"Content_Type": "text/plain"}, "{}", 415),
        ({"Content_Length": str(MAX_QUESTION_BYTES + 1)}, "", 413),
        ({}, "[1]", 400),
        ({}, "{", 400),
        ({}, "[" * 100_000, 400),
    ],
    ids=str,
)
def test_others_are_refused(
    server: Server, headers: dict[str, str], body: str, status: int
) -> None:
    assert answered(server, "POST", "/api/echo", body, **{**JSON, **headers})[0] == status


def raw(server: Server, request: bytes) -> tuple[int, dict[str, Any]]:
    """The status and the JSON of an answer, after which the connection is closed."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        connection.sendall(request)
        response = http.client.HTTPResponse(connection)
        response.begin()
        answer = json.loads(response.read())
        assert connection.recv(1) == b""
    return response.status, answer


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ("", 411),
        *((f"Content-Length: {length}", 400) for length in ("9" * 5000, "-1", "+2", "2_0", "")),
        *((f"Content-Length: {length}", 400) for length in ("²", "٢", "2, 2", "0x2", "2.0")),
        ("Content-Length: 2\r\nContent-Length: 2", 400),
        ("Transfer-Encoding: chunked", 411),
        ("Content-Length: 2\r\nTransfer-Encoding: chunked", 411),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_length_that_is_no_number_is_refused(server: Server, headers: str, status: int) -> None:
    head = f"POST /api/echo HTTP/1.1\r\nHost: localhost:{server.port}\r\n"
    lines = f"{headers}\r\n" if headers else ""
    request = f"{head}Content-Type: application/json\r\n{lines}\r\n{{}}".encode()
    found, answer = raw(server, request)
    assert found == status
    assert "Content-Length" in answer["error"]
    assert len(answer["error"]) < 200


def test_a_body_where_none_belongs_is_refused(server: Server) -> None:
    """Else the next request of the connection would begin with it."""
    request = f"GET / HTTP/1.1\r\nHost: localhost:{server.port}\r\nContent-Length: 2\r\n\r\n{{}}"
    assert raw(server, request.encode())[0] == 400


def test_a_refused_question_is_answered_after_it_was_sent(server: Server) -> None:
    body = b" " * (8 << 20)
    head = f"POST /api/echo HTTP/1.1\r\nHost: localhost:{server.port}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    assert raw(server, head.encode() + body)[0] == 413


@pytest.mark.parametrize("number", ["1e999", "-1e999", "NaN", "Infinity", "1" * 5000, "9" * 30])
def test_numbers_out_of_range_are_refused(server: Server, number: str) -> None:
    body = f'{{"x": [{number}]}}'
    status, _, content = answered(server, "POST", "/api/checked", body, **JSON)
    assert status == 422
    assert json.loads(content)["error"].startswith("x[0] (")


def test_half_a_surrogate_pair_is_refused_in_json(server: Server) -> None:
    for body in ('{"x": ["\\ud800"]}', '{"\\ud800": 1}'):
        status, _, content = answered(server, "POST", "/api/checked", body, **JSON)
        assert status == 422
        assert json.loads(content)["error"]


def test_150_connections_at_once_are_answered_and_kept() -> None:
    with Server("127.0.0.1", 0, {"echo": echo}) as server, ExitStack() as stack:
        connections = []
        for _ in range(150):  # before the server accepts any
            address = ("127.0.0.1", server.port)
            connections.append(stack.enter_context(socket.create_connection(address, timeout=1)))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            for _ in range(2):
                for connection in connections:
                    connection.settimeout(20)
                    host = f"Host: localhost:{server.port}\r\n"
                    connection.sendall(f"HEAD / HTTP/1.1\r\n{host}\r\n".encode())
                for connection in connections:
                    response = http.client.HTTPResponse(connection, method="HEAD")
                    response.begin()
                    assert response.status == 200
        finally:
            server.shutdown()


def test_its_own_origin_is_let_in(server: Server) -> None:
    for host in ("127.0.0.1", "localhost"):
        name = f"{host}:{server.port}"
        found = answered(
            server, "POST", "/api/echo", "{}", **JSON, Host=name, Origin=f"http://{name}"
        )
        assert found[0] == 200


def test_it_listens_on_this_machine_alone(server: Server) -> None:
    assert server.socket.getsockname()[0] == "127.0.0.1"
    with socket.create_connection(("127.0.0.1", server.port)) as raw:  # somebody who hangs up
        raw.sendall(b"POST /api/echo HTTP/1.1\r\n")
    assert answered(server, "GET", "/")[0] == 200


def test_all_addresses_at_once_are_refused() -> None:
    with pytest.raises(ValueError, match=r"host \('0.0.0.0'\) must be one address"):
        Server("0.0.0.0", 0, {})


# Runs


def run(folder: Path, **config: Any) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def test_runs_are_known_by_name_alone(tmp_path: Path) -> None:
    around = tmp_path / "runs"
    given = run(tmp_path / "mine", kind="run", task={"name": "translate"}, training={"steps": 7})
    run(tmp_path / "mine" / "best", kind="transformer")
    run(around / "mine", kind="run", task={"name": "classify"})
    run(around / "broken").joinpath("config.json").write_text("{", encoding="utf-8")
    runs = Runs([given], around)
    found = runs.all()
    assert list(found) == ["mine", "mine′"]
    assert (found["mine"].task, found["mine"].ready, found["mine"].steps) == ("translate", True, 7)
    assert not found["mine′"].ready
    for name in ("../mine", str(given), "", None, ["mine"], "other"):
        with pytest.raises(ValueError, match="is unknown; there are mine, mine′"):
            runs.named(name)


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is neither a run nor a model's folder"):
        Runs([tmp_path])


def test_metrics_are_read_line_by_line(tmp_path: Path) -> None:
    folder = run(tmp_path / "mine", kind="run", task={"name": "translate"})
    runs = Runs([folder], tmp_path / "none")
    one = runs.named("mine")
    assert metrics(one)["lines"] == []
    path = folder / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\nnonsense\n{"step": 2}\n{"st')
    first = metrics(one)
    assert [line["step"] for line in first["lines"]] == [1, 2]
    with path.open("ab") as file:
        file.write(b'ep": 3}\n')
    assert [line["step"] for line in metrics(one, first["end"])["lines"]] == [3]
    path.write_bytes(b'{"step": 9}\n')  # begun anew
    assert [line["step"] for line in metrics(one, 10_000)["lines"]] == [9]
