"""A few steps of training, at once and in two halves."""

import copy
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard import checkpoint
from regard.checks import compute
from regard.checks.compute import Example
from regard.train.config import TrainingConfig
from regard.train.display import Display
from regard.train.fit import fit

STEPS = 4


@dataclass(frozen=True)
class _Batch:
    examples: list[Example]

    def to(self, device: torch.device) -> "_Batch":
        return self

    def __len__(self) -> int:
        return len(self.examples)


class _Task:
    """The examples as a task of `train.fit`: the model learns to write its input, or the
    first class."""

    score = "loss"
    unit = "rows"

    def __init__(self, model: nn.Module, examples: Sequence[Example]):
        self.model, self.examples = model, list(examples)
        self.signatures: Mapping[str, str] = {}

    def plan(self, epoch: int) -> list[np.ndarray]:
        return np.array_split(np.arange(len(self.examples)), 2)

    def batch(self, indices: np.ndarray, step: int) -> _Batch:
        return _Batch([self.examples[i] for i in indices.tolist()])

    def loss(self, batch: _Batch) -> tuple[Tensor, int]:
        rows = torch.cat(compute.padded(self.model, batch.examples))
        labels = [example.target for example in batch.examples if example.target is not None]
        targets = torch.cat(labels) if labels else rows.new_zeros(len(rows), dtype=torch.long)
        return F.cross_entropy(rows, targets, reduction="sum"), len(rows)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return {"loss": 0.0}

    def files(self) -> dict[str, bytes | Path]:
        return {}

    def run_files(self) -> dict[str, bytes]:
        return {}

    def about(self) -> dict[str, Any]:
        return {"name": "check"}


def twice(
    model: nn.Module, examples: Sequence[Example]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The weights after some steps, and after as many with an interruption in the middle.

    With dropout, gradient clipping and a moving average, all of which have a state or draw numbers.
    """
    config = TrainingConfig(
        steps=STEPS,
        lr=1e-3,
        warmup=2,
        ema=0.5,
        evaluate_every=STEPS,
        save_every=STEPS // 2,
        tensorboard=False,
        device="cpu",
    )
    with tempfile.TemporaryDirectory() as folder:

        def train(name: str, steps: int) -> None:
            task = _Task(copy.deepcopy(model), examples)
            fit(task, replace(config, steps=steps), Path(folder) / name, display=Display())

        def weights(name: str) -> dict[str, Tensor]:
            saved = checkpoint.load(Path(folder) / name / "last", model=copy.deepcopy(model))
            return saved.model.state_dict()

        train("whole", STEPS)
        train("halves", STEPS // 2)
        train("halves", STEPS)
        return weights("whole"), weights("halves")
