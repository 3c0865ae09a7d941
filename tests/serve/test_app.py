"""What is asked over HTTP, and how it is answered or refused."""

import asyncio
import base64
import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from regard import load
from regard.serve import wire
from regard.serve.app import Options, create
from regard.serve.backend import InProcess
from regard.serve.guard import Keys
from regard.serve.logs import JsonLines
from regard.service import Limits, Service
from regard.service.requests import Busy, Lost
from tests.processes import wait_until
from tests.serve.asgi import Answer, call, request
from tests.service.samples import (
    TEXTS,
    classifier,
    generator,
    labeler,
    picture,
    reader,
    translator,
)

pytestmark = pytest.mark.usefixtures("unchecked")

LIMITS = Limits(characters=2000, seconds=600.0, image_bytes=20_000, pixels=10_000)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    root = tmp_path_factory.mktemp("models")
    with Service(LIMITS) as service:
        service.add(translator(root / "en-de"))
        service.add(generator(root / "stories"))
        service.add(reader(root / "scans"))
        service.add(classifier(root / "kinds"))
        service.add(labeler(root / "moods"))
        yield service


@pytest.fixture(scope="module")
def app(service: Service) -> Any:
    return create(InProcess(service), Options(limits=LIMITS))


@pytest.fixture(scope="module")
def direct(service: Service) -> Any:
    return {name: load(place.folder) for name, place in service._places.items()}


def test_translate(app: Any, direct: Any) -> None:
    answer = call(app, "POST", "/v1/translate", {"text": TEXTS[:3], "n_best": 2, "model": "en-de"})
    assert answer.status == 200
    found = answer.json["translations"]
    assert [one["text"] for one in found] == direct["en-de"].translate(TEXTS[:3])
    assert all(len(one["alternatives"]) == 1 for one in found)
    assert re.fullmatch(r"[0-9a-f]{16}", answer.headers["x-request-id"])
    alone = call(app, "POST", "/v1/translate", {"text": TEXTS[0]}, {"X-Request-ID": "my-1"})
    assert alone.json["translations"][0]["text"] == found[0]["text"]
    assert alone.headers["x-request-id"] == "my-1"


def test_what_goes_around_fastapi_is_answered_alike(app: Any, service: Service) -> None:
    through = create(InProcess(service), Options(limits=LIMITS, cors=("https://example.org",)))
    asked: list[tuple[str, object, dict[str, str]]] = [
        ("/v1/translate", {"text": TEXTS[:2], "model": "en-de", "beams": 1}, {}),
        ("/v1/translate", {"text": "a", "model": "nobody's"}, {}),
        ("/v1/translate", {"text": "a", "beams": 10**6, "model": "en-de"}, {}),
        ("/v1/translate", b"{", {"content-type": "application/json"}),
        ("/v1/translate", b"a", {"content-type": "text/plain"}),
        ("/v1/translate/", {"text": "a"}, {}),
        ("/v1/label", {"text": TEXTS[0]}, {}),
        ("/v1/attention", {}, {}),
    ]
    for path, body, headers in asked:
        ours, theirs = (call(one, "POST", path, body, headers) for one in (app, through))
        assert (ours.status, ours.body) == (theirs.status, theirs.body)
        assert ours.headers.get("content-type") == theirs.headers.get("content-type")
    assert call(app, "GET", "/v1/translate").status == 405


def test_the_other_kinds(app: Any, direct: Any) -> None:
    images = [picture(0), picture(1)]
    encoded = [base64.b64encode(image).decode() for image in images]
    read = call(app, "POST", "/v1/read", {"image": encoded})
    assert read.json == {"texts": direct["scans"].read(images)}
    labels = call(app, "POST", "/v1/classify", {"image": encoded, "top": 3})
    assert [one[0]["label"] for one in labels.json["labels"]] == direct["kinds"].classify(images)
    raw = call(app, "POST", "/v1/classify?top=3", images[0], {"content-type": "image/png"})
    for have, want in zip(raw.json["labels"][0], labels.json["labels"][0]):
        assert have["label"] == want["label"]
        assert have["probability"] == pytest.approx(want["probability"], abs=1e-5)
    url = f"data:image/png;base64,{encoded[0]}"
    assert call(app, "POST", "/v1/read", {"image": url}).json["texts"] == read.json["texts"][:1]
    moods = call(app, "POST", "/v1/label", {"text": TEXTS[0]})
    assert moods.json["labels"][0][0]["label"] == direct["moods"].label([TEXTS[0]])[0]
    story = call(app, "POST", "/v1/generate", {"prompt": TEXTS[0], "length": 7, "seed": 2})
    assert story.json["texts"] == direct["stories"].generate([TEXTS[0]], length=7, seed=2)
    seen = call(app, "POST", "/v1/attention", {"text": TEXTS[0], "model": "en-de"})
    assert len(seen.json["weights"][0][0]) == len(seen.json["target"])


def events(answer: Answer) -> list[tuple[str, Any]]:
    found = re.findall(r"event: (\w+)\ndata: (.*)\n\n", answer.body.decode())
    return [(kind, json.loads(data)) for kind, data in found]


def test_streams(app: Any, direct: Any) -> None:
    answer = call(app, "POST", "/v1/translate", {"text": TEXTS[:2], "beams": 1, "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    *deltas, (kind, last) = events(answer)
    assert {kind for kind, _ in deltas} == {"delta"}
    assert kind == "done"
    assert [one["text"] for one in last["translations"]] == direct["en-de"].translate(
        TEXTS[:2], beams=1
    )
    story = call(app, "POST", "/v1/generate", {"prompt": TEXTS[0], "length": 9, "stream": True})
    assert events(story)[-1][1]["texts"] == direct["stories"].generate([TEXTS[0]], length=9)
    refused = call(app, "POST", "/v1/translate", {"text": "a", "beams": 99, "stream": True})
    assert refused.status == 413


def test_libretranslate(app: Any, direct: Any) -> None:
    want = direct["en-de"].translate(TEXTS[:2])
    body = {"q": TEXTS[0], "source": "en", "target": "de", "format": "text", "api_key": ""}
    assert call(app, "POST", "/translate", body).json == {"translatedText": want[0]}
    form = {"content-type": "application/x-www-form-urlencoded"}
    assert call(app, "POST", "/translate", urlencode(body).encode(), form).json == {
        "translatedText": want[0]
    }
    several = call(
        app, "POST", "/translate", {**body, "q": TEXTS[:2], "source": "auto", "alternatives": 1}
    ).json
    assert several["translatedText"] == want
    assert [len(others) for others in several["alternatives"]] == [1, 1]
    assert several["detectedLanguage"]["language"] == "en"
    assert call(app, "POST", "/translate", {**body, "target": "fr"}).status == 404
    assert call(app, "GET", "/languages").json == [
        {"code": "de", "name": "German", "targets": []},
        {"code": "en", "name": "English", "targets": ["de"]},
    ]


WRONG: list[tuple[str, object, dict[str, str], int]] = [
    ("/v1/translate", b"{", {}, 422),
    ("/v1/translate", b"\xff\xfe", {}, 422),
    ("/v1/translate", b"[" * 50_000, {}, 422),
    ("/v1/translate", b'{"text": "\\ud800"}', {}, 422),
    ("/v1/translate", {"text": 5}, {}, 422),
    ("/v1/translate", {"text": None}, {}, 422),
    ("/v1/translate", {}, {}, 422),
    ("/v1/translate", {"text": "a", "beans": 4}, {}, 422),
    ("/v1/translate", {"text": "a", "beams": 0}, {}, 422),
    ("/v1/translate", {"text": "a", "beams": "4"}, {}, 422),
    ("/v1/translate", {"text": "a", "seconds": float("nan")}, {}, 422),
    ("/v1/translate", {"text": "a" * 2001}, {}, 413),
    ("/v1/translate", {"text": ["a"] * 1001}, {}, 413),
    ("/v1/translate", b"x" * 200_000, {}, 413),
    ("/v1/translate", {"text": "a", "model": "none"}, {}, 404),
    ("/v1/translate", {"text": "a", "model": "moods"}, {}, 404),
    ("/v1/translate", b"text=a", {"content-type": "text/plain"}, 415),
    ("/v1/generate", {"prompt": "a", "temperature": 1e999}, {}, 422),
    ("/v1/generate", {"prompt": "a", "seed": 2**64}, {}, 422),
    ("/v1/generate", {"prompt": "a", "length": 10**6}, {}, 413),
    ("/v1/classify", {"image": "???"}, {}, 422),
    ("/v1/classify", {"image": "QUJD"}, {}, 422),
    ("/v1/classify", b"GIF89a", {"content-type": "image/gif"}, 422),
    ("/v1/classify?top=x", picture(0), {"content-type": "image/png"}, 422),
    ("/v1/classify", picture(0, (101, 101)), {"content-type": "image/png"}, 413),
    ("/v1/read", {"image": [base64.b64encode(picture(0, (101, 101))).decode()]}, {}, 413),
    ("/v1/attention", {"text": "ab cd " * 333, "model": "en-de"}, {}, 413),
    ("/v1/attention", {}, {}, 422),
    ("/v1/attention", {"text": "a", "image": "b"}, {}, 422),
    ("/v1/models/none/reload", b"", {}, 404),
    ("/v1/models/..%2f..%2fetc/reload", b"", {}, 404),
    ("/v1/nothing", b"", {}, 404),
    ("/v1/models", b"", {}, 405),
    ("/translate", b"q=%ff", {"content-type": "application/x-www-form-urlencoded"}, 422),
]


@pytest.mark.parametrize(("path", "body", "headers", "status"), WRONG)
def test_what_is_wrong_is_said(
    app: Any, path: str, body: object, headers: dict[str, str], status: int
) -> None:
    headers = {"content-type": "application/json", **headers}
    answer = call(app, "POST", path, body, headers)
    assert answer.status == status, answer.body
    assert list(answer.json) == ["error"]
    assert "Traceback" not in answer.json["error"]
    assert len(answer.json["error"]) < 300


def test_other_servers_may_begin_by_lifespan(app: Any) -> None:
    """Which uvicorn is told to leave out, and Ray Serve is not."""
    said: list[str] = []
    told = iter(["lifespan.startup", "lifespan.shutdown"])

    async def receive() -> dict[str, str]:
        return {"type": next(told)}

    async def send(message: dict[str, str]) -> None:
        said.append(message["type"])

    asyncio.run(app({"type": "lifespan", "asgi": {"version": "3.0"}}, receive, send))
    assert said == ["lifespan.startup.complete", "lifespan.shutdown.complete"]


def test_an_unknown_field_is_answered_by_the_known_ones(app: Any) -> None:
    said = call(app, "POST", "/v1/translate", {"text": "a", "beam": 4}).json["error"]
    assert "did you mean beams?" in said
    assert "text, beams, n_best" in said


def test_no_answer_repeats_what_was_sent(app: Any) -> None:
    for body in (
        {"text": {"secret": 1}},
        {"secret": 1, "text": "a"},
        {"text": "a", "model": "secret"},
    ):
        answer = call(app, "POST", "/v1/translate", body)
        assert answer.status in (404, 422)
        assert b"secret" not in answer.body


def test_health_models_metrics_and_documents(app: Any) -> None:
    assert call(app, "GET", "/health").json == {"status": "ok"}
    names = [one["name"] for one in call(app, "GET", "/v1/models").json["models"]]
    assert names == ["en-de", "kinds", "moods", "scans", "stories"]
    text = call(app, "GET", "/metrics").body.decode()
    assert 'regard_requests_total{route="/health",status="200"}' in text
    for line in text.splitlines():
        assert re.fullmatch(
            r"# (HELP|TYPE) \w+ .+|\w+(\{\w+=\"[^\"]*\"(,\w+=\"[^\"]*\")*\})? [0-9.e+-]+", line
        ), line
    paths = call(app, "GET", "/openapi.json").json["paths"]
    for path, streams in (
        ("translate", True),
        ("generate", True),
        ("read", True),
        ("label", False),
    ):
        content = paths[f"/v1/{path}"]["post"]["responses"]["200"]["content"]
        assert "application/json" in content
        assert ("text/event-stream" in content) == streams
    page = call(app, "GET", "/docs").body.decode()
    assert "http://" not in page
    assert "https://" not in page
    paths = call(app, "GET", "/openapi.json").json["paths"]
    assert {"/v1/translate", "/v1/attention", "/translate", "/metrics"} <= set(paths)


def test_a_model_is_loaded_again(app: Any) -> None:
    before = {one["name"]: one["version"] for one in call(app, "GET", "/v1/models").json["models"]}
    after = call(app, "POST", "/v1/models/moods/reload").json["models"]
    versions = {one["name"]: one["version"] for one in after}
    assert versions == {**before, "moods": before["moods"] + 1}


# Who may ask


def test_keys(service: Service) -> None:
    app = create(InProcess(service), Options(limits=LIMITS, keys=("one", "zwei")))
    body = {"text": "ab", "model": "en-de"}
    assert call(app, "POST", "/v1/translate", body).status == 401
    assert call(app, "GET", "/metrics").status == 401
    assert call(app, "GET", "/health").status == 200
    for wrong in ("", "on", "one ", "onee", "ü"):
        given = {"Authorization": f"Bearer {wrong}x"}
        assert call(app, "POST", "/v1/translate", body, given).status == 401
    for headers in ({"Authorization": "Bearer zwei"}, {"X-API-Key": "one"}):
        assert call(app, "POST", "/v1/translate", body, headers).status == 200
    libre = {"q": "ab", "source": "en", "target": "de"}
    assert call(app, "POST", "/translate", libre).status == 401
    assert call(app, "POST", "/translate", {**libre, "api_key": "no"}).status == 401
    assert call(app, "POST", "/translate", {**libre, "api_key": "zwei"}).status == 200
    assert not Keys().fit("")


def test_cors_is_off_unless_it_is_asked_for(app: Any, service: Service) -> None:
    origin = {"Origin": "https://example.org"}
    preflight = {**origin, "Access-Control-Request-Method": "POST"}
    assert "access-control-allow-origin" not in call(app, "GET", "/health", None, origin).headers
    open_ = create(InProcess(service), Options(limits=LIMITS, cors=("https://example.org",)))
    answer = call(open_, "OPTIONS", "/v1/translate", None, preflight)
    assert answer.headers["access-control-allow-origin"] == "https://example.org"
    other = call(open_, "GET", "/health", None, {"Origin": "https://example.com"})
    assert "access-control-allow-origin" not in other.headers


# What goes wrong


class Broken:
    """A backend that raises."""

    ready, restarts = False, 0

    def __init__(self, error: Exception):
        self.error = error

    async def ask(self, request: Any, stream: Any = None) -> Any:
        raise self.error

    def models(self) -> list[dict[str, Any]]:
        return []

    async def reload(self, name: str) -> None:
        raise self.error

    def stats(self) -> list[dict[str, int]]:
        return []


@pytest.mark.parametrize("stream", [False, True])
def test_refusals_and_faults(stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    body = {"text": "secret", "stream": stream}
    busy = call(create(Broken(Busy("later", 7))), "POST", "/v1/translate", body)
    assert (busy.status, busy.headers["retry-after"]) == (429, "7")
    lost = call(create(Broken(Lost("gone"))), "POST", "/v1/translate", body)
    assert (lost.status, lost.headers["retry-after"]) == (503, "1")
    fault = call(create(Broken(KeyError("secret"))), "POST", "/v1/translate", body)
    assert fault.status == 500
    assert fault.json == {"error": "this is a fault of the server's own"}
    assert call(create(Broken(KeyError())), "GET", "/health").status == 503


def test_an_error_in_a_worker_is_logged_with_its_lines_of_code(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Whatever its kind is: only a `Refused` is an answer of 4xx."""

    def fail() -> None:
        raise ValueError("secret: along dimension 1 …")

    with pytest.raises(ValueError, match="secret") as raised:
        fail()
    sent = json.loads(json.dumps(wire.pack_error(raised.value)))
    with caplog.at_level(logging.INFO, "regard.serve"):
        headers = {"x-request-id": "abc"}
        app = create(Broken(wire.unpack_error(sent)))
        answer = call(app, "POST", "/v1/translate", {"text": "a"}, headers)
    assert (answer.status, answer.json) == (500, {"error": "this is a fault of the server's own"})
    lines = [json.loads(JsonLines().format(record)) for record in caplog.records]
    (fault,) = [line for line in lines if line["event"] == "fault"]
    assert (fault["id"], fault["kind"]) == ("abc", "ValueError")
    assert fault["exception"][-1].endswith(" fail")
    assert "secret" not in str(lines)


def test_logs_have_no_words_of_users(
    app: Any, service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "regard.serve"):
        call(app, "POST", "/v1/translate", {"text": "ab secret", "model": "en-de"})
        call(app, "POST", "/v1/translate/secret", {"text": "secret"})
        call(create(Broken(KeyError("secret"))), "POST", "/v1/translate", {"text": "secret"})
    lines = [json.loads(JsonLines().format(record)) for record in caplog.records]
    assert "secret" not in json.dumps(lines)
    assert lines[0]["characters"] == 9
    assert lines[0]["route"] == "/v1/translate"
    assert lines[1]["route"] == "other"
    assert any(line["event"] == "fault" and line["kind"] == "KeyError" for line in lines)
    caplog.clear()
    told = create(InProcess(service), Options(limits=LIMITS, log_text=True))
    with caplog.at_level(logging.INFO, "regard.serve"):
        call(told, "POST", "/v1/translate", {"text": "ab cd", "model": "en-de"})
    assert "ab cd" in JsonLines().format(caplog.records[-1])


def test_who_leaves_is_not_worked_for(service: Service) -> None:
    class Waiting(Broken):
        cancelled = False
        asked = asyncio.Event()

        async def ask(self, request: Any, stream: Any = None) -> Any:
            self.asked.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.cancelled = True
                raise

    async def leave() -> Waiting:
        backend, leaves = Waiting(KeyError()), asyncio.Event()
        app = create(backend)
        body = json.dumps({"text": "ab"}).encode()
        given = {"content-type": "application/json"}
        asking = asyncio.ensure_future(request(app, "POST", "/v1/translate", body, given, leaves))
        await backend.asked.wait()
        leaves.set()
        await asking
        assert app.state.guard.metrics.cancelled == 1
        return backend

    assert asyncio.run(leave()).cancelled


def test_a_service_cancels_what_nobody_waits_for(service: Service) -> None:
    async def cancel() -> None:
        from regard.service import Translate

        asking = asyncio.ensure_future(
            InProcess(service).ask(Translate(model="en-de", texts=tuple(TEXTS)))
        )
        await asyncio.sleep(0)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking

    asyncio.run(cancel())
    wait_until(lambda: not service._active)


def test_a_body_that_does_not_come(service: Service) -> None:
    limits = Limits(seconds=0.05)
    app = create(InProcess(service), Options(limits=limits))

    async def slow() -> list[Any]:
        sent: list[Any] = []

        async def receive() -> dict[str, Any]:
            await asyncio.sleep(10)
            raise AssertionError

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": "/v1/translate", "headers": []}
        await app(scope, receive, send)
        return sent

    assert asyncio.run(slow())[0]["status"] == 408


def test_files_of_the_page_are_packaged() -> None:
    from importlib.resources import files

    assert files("regard.serve").joinpath("docs.html").is_file()
    assert "serve/*.html" in Path("pyproject.toml").read_text(encoding="utf-8")
