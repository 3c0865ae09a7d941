"""A worker: a process with the models, which answers what HTTP processes ask through sockets.

python -m regard.serve.worker FD [MEETING]     its settings are the first message

FD is its line to the main process; at MEETING, which listens, other HTTP processes connect. It ends
when it is told to, after everything is answered, or at once when the main process is gone.
"""

import contextlib
import gc
import json
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

from regard.machine import GC_THRESHOLD
from regard.serve import wire
from regard.serve.wire import Message

OFTEN = 1.0
"""Seconds between two reports."""
TOGETHER = 0.001
"""Seconds within which answers are sent together: to wake a thread and a process for each would
take as long as to make it."""


class Line:
    """A connection to somebody who asks."""

    def __init__(self, connection: socket.socket, lost: Callable[[], None]):
        self.asked: dict[int, Future[Any]] = {}
        self._connection, self._lost = connection, lost
        self._input = connection.makefile("rb")
        self._output: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        # The thread that computes never waits for a reader.
        self._writer = threading.Thread(target=self._write, daemon=True)
        self._writer.start()

    def say(self, message: Message) -> None:
        self._output.put(wire.encode(message))

    def hear(self) -> tuple[Message, list[bytes]]:
        return wire.decode(self._read)

    def end(self) -> None:
        """When all is said."""
        self._output.put(None)
        self._writer.join()

    def _write(self) -> None:
        going = True
        while going:
            parts = [self._output.get()]
            time.sleep(TOGETHER)
            while not self._output.empty():
                parts.append(self._output.get())
            going = None not in parts
            try:
                self._connection.sendall(b"".join(part for part in parts if part is not None))
            except OSError:
                self._lost()
                return

    def _read(self, count: int) -> bytes:
        try:
            data = self._input.read(count)
        except ConnectionError:  # closed there before all that was said here was read
            raise EOFError from None
        if len(data) < count:
            raise EOFError
        return data


class Worker:
    def __init__(self, line: socket.socket, meeting: socket.socket | None = None):
        """`line` is the main process's, without which it ends; at `meeting` others connect."""
        self._main = Line(line, lambda: os._exit(1))
        self._meeting = meeting
        self._others: list[Line] = []

    def run(self) -> None:
        settings, _ = self._main.hear()
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
            if settings["sharing"] > 1 and settings["precision"] != "int8":
                _share_gpu(settings["device"], settings["sharing"])
            for name, folder in settings["models"]:
                self.service.add(folder, name)
        except (ValueError, OSError) as error:
            self._main.say({"failed": " ".join(str(error).split())})
            self._main.end()
            return
        # Loaded models stay alive: exclude them from garbage collection.
        gc.collect()
        gc.freeze()
        gc.set_threshold(GC_THRESHOLD)
        self._greet(self._main)
        threading.Thread(target=self._report, daemon=True).start()
        if self._meeting is not None:
            threading.Thread(target=self._meet, args=(self._meeting,), daemon=True).start()
        while True:
            message, blobs = self._main.hear()
            if "close" in message:
                self.service.close(drain=True)
                self._main.end()
                return
            self._handle(self._main, message, blobs)

    def _greet(self, line: Line) -> None:
        line.say({"ready": wire.plain(self.service.models())})

    def _meet(self, meeting: socket.socket) -> None:
        """Answers other processes too, each in a thread of its own."""
        while True:
            connection, _ = meeting.accept()
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        def lost() -> None:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)  # its reader hears of it, too

        line = Line(connection, lost)
        self._greet(line)
        self._others.append(line)
        with contextlib.suppress(EOFError, OSError, json.JSONDecodeError):
            while True:
                self._handle(line, *line.hear())
        self._others.remove(line)
        for future in tuple(line.asked.values()):
            future.cancel()
        line.end()
        connection.close()

    def _handle(self, line: Line, message: Message, blobs: list[bytes]) -> None:
        if "reload" in message:
            self._answer(line, message["id"], lambda: self.service.reload(message["reload"]))
        elif "cancel" in message:
            if (future := line.asked.pop(message["id"], None)) is not None:
                future.cancel()
        else:
            number = message["id"]
            stream = None
            if message.get("stream"):

                def stream(delta: Any) -> None:
                    line.say({"id": number, "delta": [delta.index, delta.text]})

            request = partial(wire.unpack, message, blobs)
            self._answer(line, number, lambda: self.service.submit(request(), stream))

    def _answer(self, line: Line, number: int, ask: Any) -> None:
        try:
            future: Future[Any] = ask()
        except Exception as error:
            line.say({"id": number, "error": wire.pack_error(error)})
            return
        line.asked[number] = future

        def done(future: "Future[Any]") -> None:
            line.asked.pop(number, None)
            if future.cancelled():
                return
            error = future.exception()
            if error is not None:
                line.say({"id": number, "error": wire.pack_error(error)})
            else:
                line.say({"id": number, "answer": wire.plain(future.result())})

        future.add_done_callback(done)

    def _report(self) -> None:
        while True:
            counts = self.service.counts
            report = {
                "stats": {
                    "waiting": self.service.waiting,
                    "sentences": counts.sentences,
                    "steps": counts.steps,
                    "bytes": resident(),
                },
                "models": wire.plain(self.service.models()),
            }
            for line in (self._main, *self._others):
                line.say(report)
            time.sleep(OFTEN)


def _share_gpu(device: str, sharing: int) -> None:
    """Takes its share of the memory alone; a part stays for what CUDA has in every process."""
    import torch

    from regard.machine.device import device as named_device

    if (gpu := named_device(device)).type == "cuda":
        torch.cuda.set_per_process_memory_fraction(0.95 / sharing, gpu.index)


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
    line, *meeting = (socket.socket(fileno=int(number)) for number in sys.argv[1:])
    try:
        Worker(line, *meeting).run()
    except (EOFError, json.JSONDecodeError):
        os._exit(1)


if __name__ == "__main__":
    main()
