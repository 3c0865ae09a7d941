"""Ctrl-C, SIGTERM and SIGHUP: training finishes its step, saves a checkpoint, and then stops."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_NAMES = ("SIGINT", "SIGTERM", "SIGHUP")  # of which Windows lacks the last
_SIGNALS = [getattr(signal, name) for name in _NAMES if hasattr(signal, name)]


class Interrupted(Exception):  # noqa: N818
    """Raised within `at_once`."""


class Interrupts:
    """Notes the first signal; a second one takes effect at once."""

    def __init__(self) -> None:
        self.caught = 0
        """The signal's number, or 0."""
        self._at_once = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Interrupts":
        # Python allows signal handlers in the main thread alone.
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                # Under nohup a terminal that closes is no reason to stop.
                if number == signal.SIGINT or signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Inside, a signal raises Interrupted at once: for work that loses nothing."""
        if self.caught:
            raise Interrupted
        self._at_once = True
        try:
            yield
        finally:
            self._at_once = False

    def pass_on(self) -> None:
        """Raises what the signal would have raised without this handler."""
        if self.caught == signal.SIGINT:
            raise KeyboardInterrupt
        if self.caught:
            raise SystemExit(128 + self.caught)

    def _note(self, number: int, frame: FrameType | None) -> None:
        again, self.caught = self.caught, number
        if again:
            self.pass_on()
        if self._at_once:
            raise Interrupted
