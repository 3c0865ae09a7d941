"""A task of one's own, from tensors: any model, any loss, through the one training loop.

    task = Supervised(model, (x, y), (x_valid, y_valid), loss=F.cross_entropy, score=accuracy)
    fit(task, TrainingConfig(minutes=5, batch=64), "runs/mine")

Row n of every tensor belongs to example n; the model is called with all of them but the last, which
is what its output is compared with. What text, images and their batches need beyond that is a task
in `regard/task/`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from regard.seeding import rng


@dataclass(frozen=True)
class Rows:
    """Some rows of every tensor."""

    tensors: tuple[Tensor, ...]

    def to(self, device: torch.device | str) -> "Rows":
        return Rows(tuple(tensor.to(device, non_blocking=True) for tensor in self.tensors))


class Supervised:
    """Examples as rows of tensors, as `fit` wants them."""

    unit = "examples"
    signatures: Mapping[str, str] = MappingProxyType({})

    def __init__(
        self,
        model: nn.Module,
        train: Sequence[Tensor],
        valid: Sequence[Tensor],
        *,
        loss: Callable[[Tensor, Tensor], Tensor],
        score: Callable[[Tensor, Tensor], Tensor],
        batch: int = 64,
        seed: int = 0,
        name: str = "score",
    ):
        """`loss` and `score` are means over examples, of outputs and targets; a higher score is
        better. `batch` is in examples."""
        for tensors in (train, valid):
            if len(tensors) < 2 or len({len(tensor) for tensor in tensors}) != 1:
                sizes = ", ".join(str(len(tensor)) for tensor in tensors)
                raise ValueError(
                    f"inputs and targets have {sizes or 'no'} rows; give two tensors or more with "
                    "a row for each example"
                )
        if batch < 1:
            raise ValueError(f"batch ({batch}) must be 1 or more")
        self.model, self.score = model, name
        self._train, self._valid = tuple(train), tuple(valid)
        self._loss, self._score = loss, score
        self._batch, self._seed = batch, seed

    def plan(self, epoch: int) -> list[np.ndarray]:
        order = rng(self._seed, epoch).permutation(len(self._train[0]))
        return [order[begin : begin + self._batch] for begin in range(0, len(order), self._batch)]

    def batch(self, indices: np.ndarray, step: int) -> Rows:
        chosen = torch.from_numpy(indices)
        return Rows(tuple(tensor[chosen] for tensor in self._train))

    def loss(self, batch: Rows) -> tuple[Tensor, int]:
        *inputs, targets = batch.tensors
        return self._loss(self.model(*inputs), targets) * len(targets), len(targets)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        device = next(model.parameters()).device
        total, count = dict.fromkeys((self.score, "validation_loss"), 0.0), len(self._valid[0])
        for begin in range(0, count, self._batch):
            rows = Rows(tuple(tensor[begin : begin + self._batch] for tensor in self._valid))
            *inputs, targets = rows.to(device).tensors
            output = model(*inputs)
            share = len(targets) / count
            total[self.score] += share * float(self._score(output, targets))
            total["validation_loss"] += share * float(self._loss(output, targets))
        return total

    def files(self) -> dict[str, bytes | Path]:
        return {}

    def run_files(self) -> dict[str, bytes]:
        return {}

    def about(self) -> dict[str, Any]:
        return {}
