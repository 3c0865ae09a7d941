"""Logs as JSON, a line for each event, with the id of the request and without what users wrote."""

import json
import logging
import sys
import time
from typing import Any

from regard.serve import wire


class JsonLines(logging.Formatter):
    """time, level, event; and what `extra={"about": {…}}` adds."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}"
            f".{int(record.msecs):03}Z",
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **getattr(record, "about", {}),
        }
        if record.exc_info:
            # Only names and lines of code: the words of an exception may quote a user's.
            kind, error, traceback = record.exc_info
            line["exception"] = wire.frames(traceback)
            line["kind"] = kind.__name__ if kind else ""
            if isinstance(error, wire.WorkerError):
                line["exception"], line["kind"] = error.frames, error.kind
        return json.dumps(line)


def start(level: str) -> None:
    """Sends the server's logs to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    for name in ("regard.serve", "uvicorn", "uvicorn.error", "asyncio"):
        logger = logging.getLogger(name)
        logger.handlers = [handler] if "." not in name or name == "regard.serve" else []
        logger.propagate = name == "uvicorn.error"
        # Our own events replace uvicorn's; its warnings are logged.
        logger.setLevel(level.upper() if name == "regard.serve" else logging.WARNING)
