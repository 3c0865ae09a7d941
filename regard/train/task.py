"""What the training loop wants of a task, and all that it knows of one."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from torch import Tensor, nn


@runtime_checkable
class Task(Protocol):
    """What is trained, and on what. Its methods depend on their arguments alone, so that any step
    can be repeated."""

    model: nn.Module
    score: str
    """The name of the score that says which model is best; higher is better."""
    unit: str
    """What the loss counts: tokens, images."""
    signatures: Mapping[str, str]
    """How scores are computed, of those that have a way to say so; known after an evaluation."""

    def plan(self, epoch: int) -> list[np.ndarray]:
        """The examples of each batch of an epoch, over all processes."""

    def batch(self, indices: np.ndarray, step: int) -> Any:
        """Examples as one batch, on the host, with a method `to(device)`; called in a thread."""

    def loss(self, batch: Any) -> tuple[Tensor, Tensor | int]:
        """The loss, summed, and how many things it is a sum of."""

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """All scores of a model, which is in evaluation mode; no gradients are wanted."""

    def files(self) -> dict[str, bytes | Path]:
        """What belongs into the model's folder beside the weights: the tokenizer."""

    def about(self) -> dict[str, Any]:
        """What the model is for, as JSON, for config.json."""
