"""Messages between the HTTP process and its workers: JSON, and bytes as they are.

length of the header · header as JSON · bytes, whose sizes the header has

to a worker     {"id": 7, "ask": "Translate", "fields": {…}, "stream": false}
                {"id": 7, "cancel": true}       {"reload": "en-de", "id": 8}       {"close": true}
from a worker   {"ready": […]}  {"failed": "…"}  {"stats": {…}}
                {"id": 7, "delta": [0, "Ein"]}  {"id": 7, "answer": …}  {"id": 7, "error": […]}
"""

import dataclasses
import json
import struct
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeAlias

from regard.service import requests
from regard.service.requests import Busy, Refused, Request

Message: TypeAlias = dict[str, Any]

_SIZE = struct.Struct("<I")
FRAMES = 8
"""Lines of a traceback that are logged."""

KINDS: dict[str, type[Request]] = {
    kind.__name__: kind
    for kind in (
        requests.Translate,
        requests.Generate,
        requests.Read,
        requests.Classify,
        requests.Label,
        requests.Attend,
    )
}

REFUSALS: dict[str, type[Refused]] = {
    kind.__name__: kind
    for kind in (
        requests.Refused,
        requests.TooLarge,
        requests.Unknown,
        requests.Busy,
        requests.Late,
        requests.Lost,
    )
}


def encode(message: Message, blobs: tuple[bytes, ...] = ()) -> bytes:
    if blobs:
        message = {**message, "blobs": [len(blob) for blob in blobs]}
    header = json.dumps(message, separators=(",", ":")).encode()
    return b"".join((_SIZE.pack(len(header)), header, *blobs))


def decode(read: Callable[[int], bytes]) -> tuple[Message, list[bytes]]:
    """The next message, from a function that reads as many bytes as it is called with."""
    (size,) = _SIZE.unpack(read(_SIZE.size))
    message: Message = json.loads(read(size))
    return message, [read(count) for count in message.get("blobs", ())]


def pack(request: Request) -> tuple[Message, tuple[bytes, ...]]:
    """A request as a message."""
    fields = dict(vars(request))
    blobs: tuple[bytes, ...] = fields.pop("images", ())
    if (image := fields.pop("image", None)) is not None:
        blobs = (image,)
    return {"ask": type(request).__name__, "fields": fields}, blobs


def unpack(message: Message, blobs: list[bytes]) -> Request:
    kind, fields = KINDS[message["ask"]], dict(message["fields"])
    for name in ("texts", "prompts"):
        if name in fields:
            fields[name] = tuple(fields[name])
    if kind is requests.Attend:
        fields["image"] = blobs[0] if blobs else None
    elif kind in (requests.Read, requests.Classify):
        fields["images"] = tuple(blobs)
    return kind(**fields)


class WorkerError(RuntimeError):
    """An error in a worker that is no refusal: its kind, and the lines of code that raised it."""

    def __init__(self, kind: str, frames: list[str]):
        super().__init__(kind)
        self.kind, self.frames = kind, frames


def pack_error(error: BaseException) -> list[Any]:
    """A refusal with its words; of any other error, whose words may quote a user's, only code."""
    if isinstance(error, Refused):
        return [type(error).__name__, str(error), getattr(error, "retry_after", 1)]
    return ["Fault", type(error).__name__, frames(error.__traceback__)]


def unpack_error(error: list[Any]) -> Exception:
    kind, words, more = error
    if kind == "Fault":
        return WorkerError(words, more)
    return Busy(words, more) if kind == "Busy" else REFUSALS[kind](words)


def frames(traceback: TracebackType | None) -> list[str]:
    """The innermost lines of code of a traceback."""
    lines = []
    while traceback is not None:
        code = traceback.tb_frame.f_code
        lines.append(f"{code.co_filename}:{traceback.tb_lineno} {code.co_name}")
        traceback = traceback.tb_next
    return lines[-FRAMES:]


def plain(answer: object) -> Any:
    """An answer as JSON has it."""
    if isinstance(answer, str | float | int):
        return answer
    if isinstance(answer, list | tuple):
        return [plain(item) for item in answer]
    # `vars` is many times as fast as asking for fields, and answers are many.
    if dataclasses.is_dataclass(answer) and not isinstance(answer, type):
        return {name: plain(value) for name, value in vars(answer).items()}
    return answer
