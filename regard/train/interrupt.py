"""Ctrl-C and SIGTERM: a training finishes its step, saves, and only then stops."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class Interrupted(Exception):  # noqa: N818
    """Raised within `at_once`."""


class Interrupts:
    """Notes the first signal; a second one is not made to wait."""

    def __init__(self) -> None:
        self.caught = 0
        """The signal's number, or 0."""
        self._at_once = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Interrupts":
        # Python delivers signals to the main thread alone, and lets no other ask for them.
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Within, a signal raises Interrupted instead of waiting: nothing would be lost."""
        if self.caught:
            raise Interrupted
        self._at_once = True
        try:
            yield
        finally:
            self._at_once = False

    def pass_on(self) -> None:
        """Ends as the signal would have ended a program that knows nothing of it."""
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
