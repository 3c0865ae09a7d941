"""The interface between the training loop and a task."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from torch import Tensor, nn

from regard.data.batch import Sizes


@runtime_checkable
class Task(Protocol):
    """A model and its training data. Methods depend on their arguments alone, so that any step can
    be repeated."""

    @property
    def model(self) -> nn.Module:
        """The model that is trained."""

    @property
    def score(self) -> str:
        """The name of the score that selects the best model; higher is better."""

    @property
    def unit(self) -> str:
        """The unit in which the loss counts: tokens, images."""

    @property
    def signatures(self) -> Mapping[str, str]:
        """Signatures of scores that have one, such as sacreBLEU's; known after an evaluation."""

    def plan(self, epoch: int) -> list[np.ndarray]:
        """The examples of each batch of an epoch, over all processes."""

    def batch(self, indices: np.ndarray, step: int) -> Any:
        """Examples as one batch, on the host, with a method `to(device)`; called in a thread."""

    def loss(self, batch: Any) -> tuple[Tensor, Tensor | int]:
        """The loss summed over tokens (or images), and their number."""

    def evaluate(self, model: nn.Module) -> Mapping[str, float]:
        """All scores of a model, which is in evaluation mode, without gradients."""

    def files(self) -> Mapping[str, bytes | Path]:
        """Files of the model's folder beside the weights: the tokenizer."""

    def run_files(self) -> Mapping[str, bytes]:
        """Files of the run's folder from its first step on: the held-out examples."""

    def about(self) -> Mapping[str, object]:
        """The purpose of the model, as JSON, for config.json."""


@dataclass(frozen=True)
class Sample:
    """The part of the validation set that is scored while training."""

    count: int
    total: int
    unit: str
    """What is counted: sentences, tokens."""
    how: str = ""
    """What the scores are of, where that is less than the model can do: greedy search."""

    def __str__(self) -> str:
        return self.words(self.count)

    def words(self, count: int) -> str:
        """`greedy search, 500 of 1,000 validation sentences`."""
        part = f"all {count:,}" if count == self.total else f"{count:,} of {self.total:,}"
        return f"{self.how}{', ' if self.how else ''}{part} validation {self.unit}"


@runtime_checkable
class Sampled(Task, Protocol):
    """A task that scores a part of the validation set while training, and all of it at the end."""

    sample: Sample

    def evaluate_all(self, model: nn.Module) -> dict[str, float]:
        """As `evaluate`, on the whole validation set."""


@runtime_checkable
class Mixed(Task, Protocol):
    """A task that says whether precision auto is bf16 on a CPU, too: where it learns as much in
    the steps of bfloat16, and more in the same time."""

    bfloat16_on_cpu: bool


@runtime_checkable
class Prepares(Protocol):
    """A task whose batches are augmented on the device, with random numbers of the host."""

    def prepare(self, batch: Any) -> Any:
        """The batch that the loss is of; called without gradients."""


@runtime_checkable
class Fillable(Task, Protocol):
    """A task whose batches can be filled up to one size, so that its steps can be captured.

    Its batches are `Tensors`, and its loss counts with a tensor.
    """

    def capacity(self, batches: Iterable[np.ndarray]) -> Sizes:
        """A size that holds each of these batches."""
