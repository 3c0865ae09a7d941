"""A training step on its device; nothing in it waits for the host.

    backward   forward, loss, backward of a micro-batch; gradients and sums are added up
    update     gradients divided by the count and clipped, Adam, the moving average of the weights

What changes from step to step (the learning rate, a signal) reaches the device as numbers in a
buffer, so that a captured step (capture.py) can be replayed.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import astuple, dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from regard.train import distributed
from regard.train.config import TrainingConfig
from regard.train.distributed import World
from regard.train.loader import MicroBatch
from regard.train.optimizer import Adam, MovingAverage
from regard.train.task import Prepares, Task


class Objective(nn.Module):
    """A task's loss as a module, which is what DDP and FSDP wrap."""

    def __init__(self, task: Task):
        super().__init__()
        self.model, self._loss = task.model, task.loss

    def forward(self, batch: Any) -> tuple[Tensor, Tensor | int]:
        return self._loss(batch)


@dataclass(frozen=True)
class Numbers:
    """What the host says of a step; the last three are summed over all processes."""

    lr: float
    ema: float
    """The weight of the new parameters in their moving average."""
    caught: float
    """Signals that this process has received."""
    late: float
    """1 where the time limit is reached."""
    elapsed: float
    """Share of the time limit that is over, as the first process measures it."""


@dataclass(frozen=True)
class Parts:
    """What a step works with."""

    task: Task
    objective: nn.Module
    parameters: Mapping[str, nn.Parameter]
    optimizer: Adam
    scaler: torch.amp.GradScaler
    ema: MovingAverage | None
    config: TrainingConfig
    world: World
    dtype: torch.dtype

    def autocast(self) -> torch.autocast:
        on = self.dtype is not torch.float32
        return torch.autocast(self.world.device.type, self.dtype if on else None, enabled=on)


class Step:
    """Computes steps one operation at a time."""

    def __init__(self, parts: Parts):
        self.parts, device = parts, parts.world.device
        self.numbers = torch.zeros(5, device=device)
        self.sums = torch.zeros(2, device=device)
        self._given = Numbers(0.0, 0.0, 0.0, 0.0, 0.0)
        if device.type == "cuda":
            for group in parts.optimizer.param_groups:
                group["lr"] = self.numbers[0]

    def running(self) -> AbstractContextManager[Any]:
        """Within it steps are computed."""
        return nullcontext()

    def begin(self, numbers: Numbers) -> None:
        """Before the first micro-batch of a step."""
        self._given = numbers
        host = torch.tensor(astuple(numbers))
        cuda = self.numbers.device.type == "cuda"
        self.numbers.copy_(host.pin_memory() if cuda else host, non_blocking=True)

    def backward(self, part: MicroBatch, n: int, last: bool) -> None:
        """Adds micro-batch n to the step's gradients; the last one synchronises processes."""
        distributed.synchronise(self.parts.objective, self.parts.world, last)
        self._backward(self._prepare(part), n == 0, part.counts)

    def update(self) -> Tensor:
        """Changes the weights; returns loss, count, signals, limit, elapsed and gradient norm."""
        return self._update()

    def _prepare(self, part: MicroBatch) -> Any:
        batch = part.batch.to(self.parts.world.device)
        if not isinstance(self.parts.task, Prepares):
            return batch
        with torch.no_grad():
            return self.parts.task.prepare(batch)

    def _clear(self) -> None:
        self.parts.optimizer.zero_grad()

    def _backward(self, batch: Any, first: bool, counts: bool = True) -> None:
        parts = self.parts
        if first:
            self._clear()
            self.sums.zero_()
        with parts.autocast():
            loss, count = parts.objective(batch)
        if not counts:
            loss, count = loss * 0, count * 0
        parts.scaler.scale(loss).backward()
        sums = (loss.detach(), torch.as_tensor(count))
        self.sums += torch.stack([value.to(self.sums) for value in sums])

    def _update(self) -> Tensor:
        parts, world, clip = self.parts, self.parts.world, self.parts.config.clip
        sums = world.sum(torch.cat([self.sums, self.numbers[2:]]))
        optimizer = cast(torch.optim.Optimizer, parts.optimizer)  # as far as a scaler cares
        parts.scaler.unscale_(optimizer)
        grads = [world.part(p.grad) for p in parts.parameters.values() if p.grad is not None]
        norm = nn.utils.get_total_norm(grads)
        if world.sharded:
            norm = world.sum(norm.square()).sqrt()
        # DDP and FSDP average over processes; the mean over tokens is wanted.
        scale = world.size / sums[1].clamp(min=1)
        norm = norm * scale
        if clip is not None:
            scale = scale * (clip / (norm + 1e-6)).clamp(max=1)
        torch._foreach_mul_(grads, scale)
        on_device = world.device.type == "cuda"
        if not on_device:
            for group in parts.optimizer.param_groups:
                group["lr"] = self._given.lr
        parts.scaler.step(optimizer)
        parts.scaler.update()
        if parts.ema is not None:
            parts.ema.update(parts.parameters, self.numbers[1] if on_device else self._given.ema)
        return torch.cat([sums, norm[None]])
