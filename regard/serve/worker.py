"""A worker: a process with the models, which answers what the HTTP process asks through a socket.

python -m regard.serve.worker FD     its settings are the first message

It ends when it is told to, after everything is answered, or at once when nobody is there any more.
"""

import gc
import json
import os
import queue
import signal
import socket
import sys
import threading
import time
from concurrent.futures import Future
from typing import Any

from regard.serve import wire
from regard.serve.wire import Message

OFTEN = 1.0
"""Seconds between two reports."""


class Worker:
    def __init__(self, line: socket.socket):
        self._line = line
        self._input = line.makefile("rb")
        self._output: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._asked: dict[int, Future[Any]] = {}
        # The thread that computes never waits for a reader.
        self._writer = threading.Thread(target=self._write, daemon=True)
        self._writer.start()

    def say(self, message: Message) -> None:
        self._output.put(wire.encode(message))

    def _write(self) -> None:
        going = True
        while going:
            parts = [self._output.get()]
            while not self._output.empty():
                parts.append(self._output.get())
            going = None not in parts
            try:
                self._line.sendall(b"".join(part for part in parts if part is not None))
            except OSError:
                os._exit(1)  # nobody is there any more

    def _read(self, count: int) -> bytes:
        data = self._input.read(count)
        if len(data) < count:
            os._exit(1)
        return data

    def run(self) -> None:
        settings, _ = wire.decode(self._read)
        if settings["threads"]:
            import torch

            torch.set_num_threads(settings["threads"])
        from regard.service.requests import Limits
        from regard.service.service import Service

        self.service = Service(
            Limits(**settings["limits"]),
            device=settings["device"],
            precision=settings["precision"],
            memory_limit=settings["memory"],
        )
        try:
            for name, folder in settings["models"]:
                self.service.add(folder, name)
        except (ValueError, OSError) as error:
            self.say({"failed": " ".join(str(error).split())})
            self._end()
            return
        # Whatever is loaded stays: no search for garbage has to look at it again and again.
        gc.collect()
        gc.freeze()
        self.say({"ready": wire.plain(self.service.models())})
        threading.Thread(target=self._report, daemon=True).start()
        while True:
            message, blobs = wire.decode(self._read)
            if "close" in message:
                self.service.close(drain=True)
                self._end()
                return
            self._handle(message, blobs)

    def _end(self) -> None:
        self._output.put(None)
        self._writer.join()

    def _handle(self, message: Message, blobs: list[bytes]) -> None:
        if "reload" in message:
            self._answer(message["id"], lambda: self.service.reload(message["reload"]))
        elif "cancel" in message:
            if (future := self._asked.pop(message["id"], None)) is not None:
                future.cancel()
        else:
            number = message["id"]
            stream = None
            if message.get("stream"):

                def stream(delta: Any) -> None:
                    self.say({"id": number, "delta": [delta.index, delta.text]})

            self._answer(number, lambda: self.service.submit(wire.unpack(message, blobs), stream))

    def _answer(self, number: int, ask: Any) -> None:
        try:
            future: Future[Any] = ask()
        except Exception as error:
            self.say({"id": number, "error": wire.pack_error(error)})
            return
        self._asked[number] = future

        def done(future: "Future[Any]") -> None:
            self._asked.pop(number, None)
            if future.cancelled():
                return
            error = future.exception()
            if error is not None:
                self.say({"id": number, "error": wire.pack_error(error)})
            else:
                self.say({"id": number, "answer": wire.plain(future.result())})

        future.add_done_callback(done)

    def _report(self) -> None:
        while True:
            counts = self.service.counts
            self.say(
                {
                    "stats": {
                        "waiting": self.service.waiting,
                        "sentences": counts.sentences,
                        "steps": counts.steps,
                        "bytes": resident(),
                    },
                    "models": wire.plain(self.service.models()),
                }
            )
            time.sleep(OFTEN)


def resident() -> int:
    """Bytes of memory that this process has now; 0 where nobody says."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def main() -> None:
    # Ctrl-C is for the HTTP process, which tells its workers when everything is answered.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        Worker(socket.socket(fileno=int(sys.argv[1]))).run()
    except json.JSONDecodeError:
        os._exit(1)


if __name__ == "__main__":
    main()
