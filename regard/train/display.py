"""Progress of training: a live progress bar on a terminal, plain lines in a log.

Both go to standard error, so that a command's output can be piped.
"""

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TextIO, runtime_checkable

if TYPE_CHECKING:
    from rich.progress import TaskID


@dataclass(frozen=True)
class Progress:
    """How far a training is."""

    step: int
    total: int | None
    """The last step, where it is known."""
    epoch: int
    loss: float
    lr: float
    speed: float
    """Units per second since the last report."""
    unit: str
    left: float | None
    """Estimated seconds until the end."""


class Display:
    """Reports progress. This one shows nothing: for all processes but the first.

    A live display is on the screen within `with`.
    """

    def __enter__(self) -> "Display":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def progress(self, now: Progress) -> None:
        """How far it is."""

    def scores(self, step: int, scores: Mapping[str, float], best: bool) -> None:
        """An evaluation."""

    def say(self, words: str) -> None:
        """Anything else."""


def default_display(stream: TextIO | None = None) -> Display:
    """A live display on a terminal, lines otherwise."""
    stream = sys.stderr if stream is None else stream
    return Terminal(stream) if stream.isatty() else Log(stream)


@runtime_checkable
class Stream(Protocol):
    """What lines can be written to."""

    def write(self, text: str, /) -> object: ...

    def flush(self) -> object: ...


class Log(Display):
    """A line now and then, each complete in itself."""

    PAUSE = 10.0
    """Seconds between lines of progress; scores and messages come at once."""

    def __init__(self, stream: Stream):
        self.stream = stream
        self._last = -self.PAUSE

    def progress(self, now: Progress) -> None:
        if time.monotonic() - self._last >= self.PAUSE:
            self._last = time.monotonic()
            self.say(described(now))

    def scores(self, step: int, scores: Mapping[str, float], best: bool) -> None:
        self.say(f"step {step:,}: {listed(scores)}{', the best so far' if best else ''}")

    def say(self, words: str) -> None:
        print(words, file=self.stream, flush=True)


class Terminal(Display):
    """A progress bar with the latest figures, under the scores so far."""

    def __init__(self, stream: TextIO):
        from rich import progress
        from rich.console import Console

        self.console = Console(file=stream, highlight=False, soft_wrap=True)
        self._bar = progress.Progress(
            progress.BarColumn(bar_width=24),
            progress.TextColumn("{task.description}", markup=False),
            console=self.console,
            refresh_per_second=4,
            transient=True,
        )
        self._task: TaskID = self._bar.add_task("the first steps …", total=None)

    def __enter__(self) -> "Terminal":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def progress(self, now: Progress) -> None:
        self._bar.update(
            self._task, completed=now.step, total=now.total, description=described(now)
        )

    def scores(self, step: int, scores: Mapping[str, float], best: bool) -> None:
        self.say(f"step {step:,}: {listed(scores)}{'  ★' if best else ''}")

    def say(self, words: str) -> None:
        self.console.print(words, markup=False)


def described(now: Progress) -> str:
    """`step 1,200 of 5,000 · loss 2.31 · 12,300 tokens/s · lr 0.00082 · epoch 3 · 4 min left`."""
    parts = [
        f"step {now.step:,}" + (f" of {now.total:,}" if now.total else ""),
        f"loss {now.loss:.3f}",
        f"{now.speed:,.0f} {now.unit}/s",
        f"lr {now.lr:.2g}",
        f"epoch {now.epoch + 1}",
    ]
    if now.left is not None:
        parts.append(f"{duration(now.left)} left")
    return " · ".join(parts)


def listed(scores: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in scores.items())


def duration(seconds: float) -> str:
    """For people: 40 s, 12 min, 3 h 20 min."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 90:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min"
