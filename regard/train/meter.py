"""Loss, speed and time of the steps; figures are read from the device now and then."""

import math
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from regard.train.config import TrainingConfig
from regard.train.display import Progress, duration
from regard.train.distributed import World
from regard.train.state import State, Window


class _Rows(NamedTuple):
    """Steps on their way from the device."""

    step: int
    """The last one."""
    values: Tensor
    done: torch.cuda.Event | None

    def ready(self) -> bool:
        return self.done is None or self.done.query()


class Meter:
    """Adds up steps, loss and time in a training's state."""

    def __init__(
        self, state: State, config: TrainingConfig, total: int | None, unit: str, world: World
    ):
        self.state, self.config, self.total, self.unit = state, config, total, unit
        self.norm = 0.0
        """The last gradient norm."""
        self.caught = self.late = False
        """Whether a signal has reached any process, and whether the time limit has."""
        self.elapsed = 0.0
        """Share of the time limit that is over, the same in all processes."""
        self._world = world
        self._rows: list[Tensor] = []
        self._under_way: list[_Rows] = []
        self._clock = time.monotonic()
        # Of this process: the first steps, which take longer, are not counted.
        self._steps, self._units, self._seconds, self._apart = 0, 0.0, 0.0, 0.0
        self._warm = False
        self._resumed = state.step, state.seconds

    def flags(self, caught: int) -> tuple[float, float, float]:
        """What this process tells the others at a step: a signal, that time is up, and how much of
        it is over by the first one's clock."""
        limit = self.config.minutes
        seconds = self.state.seconds + time.monotonic() - self._clock
        share = 0.0 if limit is None else seconds / (limit * 60)
        return float(caught), float(share >= 1), share if self._world.first else 0.0

    def look(self, caught: int) -> None:
        """A process that is alone need not wait for what the device says."""
        if self._world.size == 1:
            signals, late, _ = self.flags(caught)
            self.caught, self.late = self.caught or signals > 0, self.late or late > 0

    def add(self, row: Tensor) -> None:
        """A step's loss, count, signal, limit, elapsed time and gradient norm, on the device."""
        self._rows.append(row)

    def read(self, lr: Callable[[int], float], scaled: bool, wait: bool) -> Progress | None:
        """Reads the steps since the last time; a NaN or infinite loss or gradient is an error.

        Without `wait`, steps that the device is still busy with are left for the next time, so
        that it has always something to do. With `scaled` (fp16), steps whose gradient overflowed
        were skipped.
        """
        self._send()
        rows: list[list[float]] = []
        step = 0
        while self._under_way and (wait or self._under_way[0].ready()):
            sent = self._under_way.pop(0)
            if sent.done is not None:
                sent.done.synchronize()
            rows += sent.values.tolist()
            step = sent.step
        if not rows:
            return None
        now, window = self.state, self.state.window
        took = self.tick()
        window.seconds += took
        units = 0.0
        for n, row in enumerate(rows, step - len(rows) + 1):
            loss, count, caught, late, elapsed, self.norm = row
            for what, value in (("loss", loss), ("gradient", 0.0 if scaled else self.norm)):
                if not math.isfinite(value):
                    raise ValueError(f"the {what} is {value} at step {n}: training diverged")
            window.loss += loss
            window.count += count
            units += count
            self.caught, self.late = self.caught or caught > 0, self.late or late > 0
            self.elapsed = elapsed
        now.count += units
        if self._warm:
            self._steps, self._units = self._steps + len(rows), self._units + units
            self._seconds += took
        self._warm = True
        return Progress(
            step=step,
            total=self.total,
            epoch=now.epoch,
            loss=window.loss / max(window.count, 1),
            lr=lr(step),
            speed=window.count / max(window.seconds, 1e-9),
            unit=self.unit,
            left=self._left(),
        )

    def line(self, progress: Progress) -> dict[str, float | int | None]:
        """A line of metrics, of the steps since the last one."""
        self.state.window = Window()
        return {
            "step": progress.step,
            "epoch": progress.epoch,
            "loss": progress.loss,
            "lr": progress.lr,
            "norm": self.norm if math.isfinite(self.norm) else None,
            "speed": progress.speed,
            "seconds": self.state.seconds,
        }

    def tick(self) -> float:
        """Counts the time since the last call."""
        before, self._clock = self._clock, time.monotonic()
        self.state.seconds += self._clock - before
        return self._clock - before

    def pause(self) -> None:
        """Counts the time since the last call as evaluation and saving."""
        self._apart += self.tick()

    def summary(self) -> str | None:
        """How fast the training was, for people."""
        if not self._steps:
            return None
        per_second = max(self._seconds, 1e-9)
        step, before = self._resumed
        whole = self.state.seconds - before
        since = f" since step {step:,}" if step else ""
        return (
            f"{self._steps / per_second:,.1f} steps and {self._units / per_second:,.0f} "
            f"{self.unit} a second while training; {self._apart / whole:.0%} of "
            f"{duration(whole)}{since} went into evaluation and checkpoints"
        )

    def _send(self) -> None:
        """Copies the rows on the device to the host, in the background."""
        if not self._rows:
            return
        values, done = torch.stack(self._rows), None
        self._rows.clear()
        if values.device.type == "cuda":
            values = values.to("cpu", non_blocking=True)
            done = torch.cuda.Event()
            done.record()
        self._under_way.append(_Rows(self.state.step, values, done))

    def _left(self) -> float | None:
        left = []
        if self.total is not None and self._steps:
            left.append((self.total - self.state.step) * self._seconds / self._steps)
        if self.config.minutes is not None:
            left.append(max(0.0, self.config.minutes * 60 - self.state.seconds))
        return min(left, default=None)
