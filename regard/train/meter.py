"""Loss, speed and time of the steps; figures are read from the device now and then."""

import math
import time

import torch
from torch import Tensor

from regard.train.config import TrainingConfig
from regard.train.display import Progress
from regard.train.state import State, Window


class Meter:
    """Adds up steps, loss and time in a training's state."""

    def __init__(self, state: State, config: TrainingConfig, total: int | None, unit: str):
        self.state, self.config, self.total, self.unit = state, config, total, unit
        self.norm = 0.0
        """The last gradient norm."""
        self.caught = self.late = False
        """Whether a signal has reached any process, and whether the time limit has."""
        self._rows: list[Tensor] = []
        self._steps, self._seconds, self._clock = 0, 0.0, time.monotonic()

    def flags(self, caught: int) -> Tensor:
        """What this process tells the others at a step: a signal, and that time is up."""
        limit = self.config.minutes
        seconds = self.state.seconds + time.monotonic() - self._clock
        return torch.tensor([float(caught), float(limit is not None and seconds >= limit * 60)])

    def add(self, row: Tensor) -> None:
        """A step's loss, count, signal, time limit and gradient norm, still on the device."""
        self._rows.append(row)

    def read(self, lr: float, scaled: bool) -> Progress | None:
        """Reads the steps since the last time; a NaN or infinite loss or gradient is an error.

        With `scaled` (fp16), steps whose gradient overflowed were skipped.
        """
        if not self._rows:
            return None
        now, window = self.state, self.state.window
        rows = torch.stack(self._rows).tolist()
        self._rows.clear()
        took = self.tick()
        window.seconds += took
        self._steps, self._seconds = self._steps + len(rows), self._seconds + took
        for step, row in enumerate(rows, now.step - len(rows) + 1):
            loss, count, caught, late, self.norm = row
            for what, value in (("loss", loss), ("gradient", 0.0 if scaled else self.norm)):
                if not math.isfinite(value):
                    raise ValueError(f"the {what} is {value} at step {step}: training diverged")
            window.loss += loss
            window.count += count
            now.count += count
            self.caught, self.late = self.caught or caught > 0, self.late or late > 0
        return Progress(
            step=now.step,
            total=self.total,
            epoch=now.epoch,
            loss=window.loss / max(window.count, 1),
            lr=lr,
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

    def _left(self) -> float | None:
        left = []
        if self.total is not None:
            left.append((self.total - self.state.step) * self._seconds / self._steps)
        if self.config.minutes is not None:
            left.append(max(0.0, self.config.minutes * 60 - self.state.seconds))
        return min(left, default=None)
