"""The HTTP application: what is asked over HTTP, as requests to a backend, and the answers as JSON.

POST /v1/translate /v1/generate /v1/classify /v1/read /v1/label /v1/attention
GET  /v1/models    POST /v1/models/{name}/reload
GET  /health /metrics /docs /openapi.json
POST /translate    GET /languages                as LibreTranslate has them
"""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, TypeAlias
from urllib.parse import parse_qs

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, StreamingResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.routing import Match
from starlette.types import ASGIApp, Receive, Scope, Send

from regard import __version__
from regard.serve import schema
from regard.serve.backend import Backend
from regard.serve.guard import Forbidden, Guard, Keys, Unsupported, answer_to
from regard.serve.metrics import Metrics
from regard.serve.schema import decoded, parse, several, validate
from regard.service import requests
from regard.service.requests import LIMITS, Limits, Refused, TooLarge, Unknown

TEXT = "text/plain; version=0.0.4; charset=utf-8"
"""Prometheus' text format."""

_Post: TypeAlias = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a server allows."""

    limits: Limits = LIMITS
    keys: tuple[str, ...] = ()
    """API keys; with none, everybody may ask."""
    cors: tuple[str, ...] = ()
    """Origins whose pages may ask."""
    log_text: bool = False
    """Whether texts are in the log."""

    @property
    def largest(self) -> int:
        """Bytes of a body: characters may be escaped, and images are in base64."""
        return max(12 * self.limits.characters, 4 * self.limits.image_bytes // 3) + 2**16


def create(backend: Backend, options: Options | None = None) -> FastAPI:
    """The application, for any ASGI server."""
    options = options or Options()
    app = FastAPI(
        title="Regard",
        version=__version__,
        description="Models over HTTP: translation, language models, images and labels.",
        docs_url=None,
        redoc_url=None,
    )
    metrics = Metrics()
    api = _Api(backend, options, Keys(options.keys), metrics)
    api.add_to(app)
    if options.cors:
        from fastapi.middleware.cors import CORSMiddleware

        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(options.cors),
            allow_methods=["GET", "POST"],
            allow_headers=["authorization", "content-type", "x-api-key", "x-request-id"],
        )
    _answer_errors(app)
    inner = app.build_middleware_stack()
    if not options.cors:  # which adds to every answer
        inner = _straight({f"/v1/{path}": function for path, function, *_ in api.posts()}, inner)
    # Outside of everything, so that it sees all that happens.
    guard = Guard(
        inner,
        metrics=metrics,
        keys=api.keys,
        largest=options.largest,
        seconds=options.limits.seconds,
        routes=_routes(app),
    )
    app.middleware_stack = guard
    app.state.guard, app.state.metrics = guard, metrics
    return app


def _straight(posts: dict[str, _Post], others: ASGIApp) -> ASGIApp:
    """Straight to the functions that models are asked by: they read the request themselves, and
    FastAPI, which looks for parameters and dependencies, would take half of its time."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        asks = scope["type"] == "http" and scope["method"] == "POST"
        function = posts.get(scope["path"]) if asks else None
        if function is None:
            await others(scope, receive, send)
        else:
            response = await function(Request(scope, receive, send))
            await response(scope, receive, send)

    return app


def _answer_errors(app: FastAPI) -> None:
    async def refused(_: Request, error: Exception) -> Response:
        status, words, headers = answer_to(error)
        return JSONResponse({"error": words}, status, headers)

    async def http(_: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return JSONResponse({"error": str(error.detail)}, error.status_code, error.headers)

    async def invalid(_: Request, error: Exception) -> Response:
        return JSONResponse({"error": "a parameter is wrong"}, 422)

    app.add_exception_handler(Refused, refused)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(Exception, refused)


def _routes(app: FastAPI) -> Callable[[Any], str]:
    """The template of the route that a request takes, for logs and metrics: paths are users'."""
    known = {getattr(route, "path", ""): True for route in app.routes}

    def name(scope: Any) -> str:
        if scope["path"] in known:
            return str(scope["path"])
        for route in app.routes:
            if route.matches(scope)[0] is not Match.NONE:
                return str(getattr(route, "path", "other"))
        return "other"

    return name


# The document


def _body(kind: type[BaseModel], *more: str) -> dict[str, Any]:
    """The body of a request as the document describes it; `more` are kinds of raw bodies."""
    content: dict[str, Any] = {"application/json": {"schema": kind.model_json_schema()}}
    for name in more:
        inner = {"type": "string", "format": "binary"}
        if name == "application/x-www-form-urlencoded":
            inner = kind.model_json_schema()
        content[name] = {"schema": inner}
    return {"requestBody": {"required": True, "content": content}}


def _answer(body: dict[str, Any], kind: type[BaseModel]) -> dict[str, Any]:
    """The answer to such a body; where it may ask for a stream, as server-sent events too."""
    asked = body["requestBody"]["content"]["application/json"]["schema"]["properties"]
    if "stream" not in asked:
        return {"model": kind}
    words = {"type": "string"}
    event = {"type": "object", "properties": {"event": words, "data": words}, "required": ["data"]}
    return {"model": kind, "content": {"text/event-stream": {"schema": event}}}


_PROBLEMS: dict[int | str, dict[str, Any]] = {
    status: {"model": schema.Problem, "description": words}
    for status, words in (
        (400, "The request cannot be read."),
        (401, "Without an API key, or with a wrong one."),
        (404, "There is no such model, or none that can answer this."),
        (408, "The body did not come in time."),
        (413, "More than the limits allow."),
        (415, "A body of another kind."),
        (422, "The body is wrong; the error says where."),
        (429, "Too many are waiting; Retry-After says how long to wait."),
        (503, "The model is not there now; try again."),
        (504, "Not answered in time."),
    )
}

_IMAGES = ("image/*", "application/octet-stream")


class _Api:
    def __init__(self, backend: Backend, options: Options, keys: Keys, metrics: Metrics):
        self.backend, self.options, self.keys, self.metrics = backend, options, keys, metrics

    def posts(self) -> Sequence[tuple[str, _Post, dict[str, Any], type[BaseModel], str]]:
        """How models are asked: path, function, and for the document body, answer and summary."""
        return (
            ("translate", self.translate, _body(schema.TranslateBody), schema.TranslateAnswer,
             "Translate texts; long ones in sentences, with lines and markup kept."),
            ("generate", self.generate, _body(schema.GenerateBody), schema.TextsAnswer,
             "Continue texts with a language model."),
            ("label", self.label, _body(schema.LabelBody), schema.LabelsAnswer,
             "Classify texts."),
            ("classify", self.classify, _body(schema.ClassifyBody, *_IMAGES), schema.LabelsAnswer,
             "Classify images."),
            ("read", self.read, _body(schema.ReadBody, *_IMAGES), schema.TextsAnswer,
             "Read the text in images."),
            ("attention", self.attention, _body(schema.AttentionBody), schema.AttentionAnswer,
             "Where a model looks while it writes: cross-attention, and words aligned by it."),
        )  # fmt: skip

    def add_to(self, app: FastAPI) -> None:
        for path, function, body, answer, about in self.posts():
            app.post(
                f"/v1/{path}",
                summary=about,
                responses={**_PROBLEMS, 200: _answer(body, answer)},
                openapi_extra=body,
            )(function)
        app.get("/v1/models", responses={200: {"model": schema.ModelsAnswer}})(self.models)
        app.post(
            "/v1/models/{name}/reload",
            responses={**_PROBLEMS, 200: {"model": schema.ModelsAnswer}},
            summary="Load a model's folder again, while the old one answers.",
        )(self.reload)
        app.get(
            "/health", responses={200: {"model": schema.Health}, 503: {"model": schema.Health}}
        )(self.health)
        app.get("/metrics", response_class=PlainTextResponse)(self.prometheus)
        app.get("/docs", include_in_schema=False)(self.docs)
        app.get("/", include_in_schema=False)(self.docs)
        app.post(
            "/translate",
            summary="Translate, as LibreTranslate does.",
            responses={**_PROBLEMS, 200: {"model": schema.LibreAnswer}},
            openapi_extra=_body(schema.LibreBody, "application/x-www-form-urlencoded"),
        )(self.libre_translate)
        app.get("/languages", summary="Languages, as LibreTranslate lists them.")(self.languages)

    # Text

    async def translate(self, request: Request) -> Response:
        body = parse(schema.TranslateBody, await _json(request))
        ask = requests.Translate(
            model=body.model,
            seconds=body.seconds,
            texts=several(body.text),
            beams=body.beams,
            n_best=body.n_best,
            markup=body.format == "html",
        )
        return await self._answer(request, ask, "translations", body.stream)

    async def generate(self, request: Request) -> Response:
        body = parse(schema.GenerateBody, await _json(request))
        ask = requests.Generate(
            model=body.model,
            seconds=body.seconds,
            prompts=several(body.prompt),
            length=body.length,
            temperature=body.temperature,
            top_k=body.top_k,
            top_p=body.top_p,
            seed=body.seed,
        )
        return await self._answer(request, ask, "texts", body.stream)

    async def label(self, request: Request) -> Response:
        body = parse(schema.LabelBody, await _json(request))
        ask = requests.Label(
            model=body.model, seconds=body.seconds, texts=several(body.text), top=body.top
        )
        return await self._answer(request, ask, "labels")

    async def attention(self, request: Request) -> Response:
        body = parse(schema.AttentionBody, await _json(request))
        if (body.text is None) == (body.image is None):
            raise Refused("give a text or an image, and not both")
        ask = requests.Attend(
            model=body.model,
            seconds=body.seconds,
            text=body.text,
            image=None if body.image is None else self._image(body.image),
            written=body.written,
        )
        return await self._answer(request, ask)

    # Images

    async def classify(self, request: Request) -> Response:
        images, body = await self._images(request, schema.ClassifyBody)
        ask = requests.Classify(model=body.model, seconds=body.seconds, images=images, top=body.top)
        return await self._answer(request, ask, "labels")

    async def read(self, request: Request) -> Response:
        images, body = await self._images(request, schema.ReadBody)
        ask = requests.Read(model=body.model, seconds=body.seconds, images=images, beams=body.beams)
        return await self._answer(request, ask, "texts", body.stream)

    async def _images(
        self, request: Request, kind: type[schema.Kind]
    ) -> tuple[tuple[bytes, ...], Any]:
        """Images in JSON; or one that is the body, with its settings in the query."""
        content = _content_type(request)
        if content == "application/json":
            body: Any = parse(kind, await request.body())
            return tuple(self._image(image) for image in several(body.image)), body
        if not content.startswith("image/") and content != "application/octet-stream":
            raise Unsupported("send JSON, or an image as image/png, image/jpeg, …")
        settings: dict[str, Any] = {"image": "", **request.query_params}
        for name in ("top", "beams"):
            if name in settings and str(settings[name]).isascii() and settings[name].isdigit():
                settings[name] = int(settings[name][:12])
        return (await request.body(),), validate(kind, settings)

    def _image(self, image: str) -> bytes:
        if len(image) > 4 * self.options.limits.image_bytes // 3 + 100:
            raise TooLarge(f"an image may have {self.options.limits.image_bytes:,} bytes")
        return decoded(image)

    # LibreTranslate

    async def libre_translate(self, request: Request) -> Response:
        content = _content_type(request)
        if content == "application/x-www-form-urlencoded":
            body = validate(schema.LibreBody, _form(await request.body()))
        else:
            body = parse(schema.LibreBody, await _json(request))
        if (
            self.keys
            and not request.state._state.get("known")
            and not self.keys.fit(body.api_key or "")
        ):
            raise Forbidden("this needs an API key: api_key, or Authorization: Bearer KEY")
        name = self._for_languages(body.source, body.target)
        ask = requests.Translate(
            model=name,
            texts=several(body.q),
            n_best=1 + body.alternatives,
            beams=None,
            markup=body.format == "html",
        )
        found = await self._ask(request, ask)
        texts = [one["text"] for one in found]
        others = [[other["text"] for other in one["alternatives"]] for one in found]
        single = isinstance(body.q, str)
        answer: dict[str, Any] = {"translatedText": texts[0] if single else texts}
        if body.alternatives:
            answer["alternatives"] = others[0] if single else others
        if body.source == "auto" and (language := _languages(name or "")[0]):
            answer["detectedLanguage"] = {"language": language, "confidence": 0.0}
        return _reply(answer)

    def _for_languages(self, source: str, target: str) -> str | None:
        """The model for these languages, by its name, such as en-de; or the only one there is."""
        names = [one["name"] for one in self.backend.models() if one["task"] == "translate"]
        if f"{source}-{target}" in names:
            return f"{source}-{target}"
        ending = [name for name in names if name.endswith(f"-{target}")]
        if source == "auto" and len(ending) == 1:
            return ending[0]
        if len(names) == 1 and not all(_languages(names[0])):
            return names[0]  # its name says nothing of languages
        raise Unknown("no model translates between these languages; GET /languages lists them")

    async def languages(self) -> Response:
        pairs = [
            _languages(one["name"]) for one in self.backend.models() if one["task"] == "translate"
        ]
        codes = sorted({code for pair in pairs for code in pair if code})
        return _reply(
            [
                {
                    "code": code,
                    "name": _language_name(code),
                    "targets": sorted({two for one, two in pairs if one == code}),
                }
                for code in codes
            ]
        )

    # The server itself

    async def models(self) -> Response:
        return _reply({"models": self.backend.models()})

    async def reload(self, name: str) -> Response:
        await self.backend.reload(name)
        return _reply({"models": self.backend.models()})

    async def health(self, request: Request) -> Response:
        draining = request.app.state.guard.draining
        status = "draining" if draining else "ok" if self.backend.ready else "starting"
        return _reply({"status": status}, 200 if status == "ok" else 503)

    async def prometheus(self) -> Response:
        text = self.metrics.text(self.backend.stats(), self.backend.restarts)
        return Response(text, media_type=TEXT)

    async def docs(self) -> Response:
        return HTMLResponse(
            files("regard.serve").joinpath("docs.html").read_text(encoding="utf-8"),
            headers={
                "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; "
                "script-src 'unsafe-inline'; connect-src 'self'"
            },
        )

    # Answers

    async def _ask(self, request: Request, ask: requests.Request) -> Any:
        self._note(request, ask)
        return await self.backend.ask(ask)

    async def _answer(
        self, request: Request, ask: requests.Request, name: str = "", stream: bool = False
    ) -> Response:
        if not stream:
            found = await self._ask(request, ask)
            return _reply({name: found} if name else found)
        self._note(request, ask)
        events = _events(self.backend, ask, name)
        first = await anext(events)  # what is refused at once has a status of its own
        return StreamingResponse(
            _following(first, events),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
        )

    def _note(self, request: Request, ask: requests.Request) -> None:
        """What the log says of it."""
        about: dict[str, Any] = {"model": ask.model}
        texts: Sequence[str] = getattr(ask, "texts", None) or getattr(ask, "prompts", None) or ()
        if texts:
            about["texts"] = len(texts)
            about["characters"] = sum(map(len, texts))
            if self.options.log_text:
                about["text"] = list(texts)
        request.state._state["about"] = about


async def _events(backend: Backend, ask: requests.Request, name: str) -> AsyncIterator[bytes]:
    """Server-sent events: pieces of text, and at the end all of the answer."""
    queue: asyncio.Queue[tuple[int, str] | None] = asyncio.Queue()
    work = asyncio.ensure_future(
        backend.ask(ask, lambda index, text: queue.put_nowait((index, text)))
    )
    work.add_done_callback(lambda _: queue.put_nowait(None))
    begun = False
    try:
        while (piece := await queue.get()) is not None:
            begun = True
            yield _event({"index": piece[0], "delta": piece[1]})
        if (error := work.exception()) is None:
            yield _event({name: work.result()}, "done")
        elif begun and isinstance(error, Refused):
            yield _event({"error": str(error)}, "error")
        else:
            raise error
    finally:
        work.cancel()


async def _following(first: bytes, events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    try:
        yield first
        async for event in events:
            yield event
    finally:
        await events.aclose()  # type: ignore[attr-defined]


def _event(data: Any, kind: str = "delta") -> bytes:
    return f"event: {kind}\ndata: {json.dumps(data, ensure_ascii=False)}\n\n".encode(
        errors="replace"
    )


def _reply(answer: Any, status: int = 200) -> Response:
    content = json.dumps(answer, ensure_ascii=False, separators=(",", ":"))
    return Response(content.encode(errors="replace"), status, media_type="application/json")


async def _json(request: Request) -> bytes:
    if _content_type(request) != "application/json":
        raise Unsupported("send JSON, with Content-Type: application/json")
    return await request.body()


def _content_type(request: Request) -> str:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


def _form(body: bytes) -> dict[str, Any]:
    try:
        fields = parse_qs(
            body.decode(), keep_blank_values=True, max_num_fields=2000, errors="strict"
        )
    except ValueError:
        raise Refused("the form cannot be read") from None
    found: dict[str, Any] = {
        name: values[0] if len(values) == 1 else values for name, values in fields.items()
    }
    return found


def _languages(name: str) -> tuple[str, str]:
    """The codes in a model's name, such as en-de; empty where it has none."""
    source, _, target = name.partition("-")
    known = all(
        2 <= len(code) <= 3 and code.isascii() and code.islower() for code in (source, target)
    )
    return (source, target) if known else ("", "")


def _language_name(code: str) -> str:
    from babel import Locale, UnknownLocaleError

    try:
        return Locale.parse(code).get_display_name("en") or code
    except (UnknownLocaleError, ValueError):
        return code
