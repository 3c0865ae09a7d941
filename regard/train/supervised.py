"""A task of your own, from tensors: any model and any loss, through the one training loop."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor, nn

from regard.attention.checks import shown
from regard.data.seeding import rng
from regard.synonyms import suggest_names


@dataclass(frozen=True)
class Rows:
    """Some rows of every tensor."""

    tensors: tuple[Tensor, ...]

    def to(self, device: torch.device | str) -> "Rows":
        return Rows(tuple(tensor.to(device, non_blocking=True) for tensor in self.tensors))


@suggest_names
class Supervised:
    """A supervised task made of tensors, for any PyTorch module; `fit` trains it.

    `train` and `valid` are tuples (inputs, ..., targets) of tensors, whose row n belongs to example
    n. The model receives the inputs; its output and the targets go to `loss` and `score`, which
    return means over the examples. The checkpoint with the highest score is kept. Each step takes
    `batch` examples, in an order that `seed` and the epoch determine; `TrainingConfig.batch` is for
    the tasks of the command line.

    >>> import torch
    >>> from regard import Supervised, TrainingConfig, fit
    >>> x, y = torch.randn(100, 3), torch.randn(100, 1)
    >>> def score(output, target):
    ...     return -(output - target).abs().mean()
    >>> task = Supervised(
    ...     torch.nn.Linear(3, 1), (x[20:], y[20:]), (x[:20], y[:20]),
    ...     loss=torch.nn.functional.mse_loss, score=score,
    ... )
    >>> task
    Supervised(Linear, 80 examples for training, 20 for validation, score)
    """

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
        score_name: str | None = None,
    ):
        if not isinstance(model, nn.Module):
            raise ValueError(f"model must be a torch.nn.Module, not {type(model).__name__}")
        if not any(part.requires_grad for part in model.parameters()):
            raise ValueError(f"{type(model).__name__} has no parameter to train")
        for name, tensors in (("train", train), ("valid", valid)):
            _check_rows(name, tensors)
        if len(train) != len(valid):
            raise ValueError(
                f"train has {len(train)} tensors and valid has {len(valid)}; give both the same "
                "inputs and targets"
            )
        for name, function in (("loss", loss), ("score", score)):
            if not callable(function) or isinstance(function, type):
                raise ValueError(
                    f"{name} ({shown(function)}) must be a function of outputs and targets, such "
                    "as torch.nn.functional.cross_entropy"
                )
        if batch < 1:
            raise ValueError(f"batch ({batch}) must be 1 or more")
        self.model = model
        named = getattr(score, "__name__", "score")
        self.score = score_name or ("score" if named == "<lambda>" else named)
        """The name of the score in reports."""
        self._train, self._valid = tuple(train), tuple(valid)
        self._loss, self._score = loss, score
        self._batch, self._seed = batch, seed

    def __repr__(self) -> str:
        sizes = f"{len(self._train[0]):,} examples for training, {len(self._valid[0]):,}"
        return f"Supervised({type(self.model).__name__}, {sizes} for validation, {self.score})"

    def plan(self, epoch: int) -> list[np.ndarray]:
        """Returns the row numbers of each batch of an epoch."""
        order = rng(self._seed, epoch).permutation(len(self._train[0]))
        return [order[begin : begin + self._batch] for begin in range(0, len(order), self._batch)]

    def batch(self, indices: np.ndarray, step: int) -> Rows:
        """Returns the given rows of the training tensors."""
        chosen = torch.from_numpy(indices)
        return Rows(tuple(tensor[chosen] for tensor in self._train))

    def loss(self, batch: Rows) -> tuple[Tensor, int]:
        """Returns the loss summed over the examples of a batch, and their number."""
        *inputs, targets = batch.tensors
        loss = self._loss(self.model(*inputs), targets)
        if loss.numel() != 1:
            raise ValueError(
                f"loss returned {tuple(loss.shape)} numbers, and must return their mean; "
                'in PyTorch pass reduction="mean"'
            )
        return loss * len(targets), len(targets)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Returns the mean score and loss of a model over the validation examples."""
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
        """Returns no files: a checkpoint holds the weights alone."""
        return {}

    def run_files(self) -> dict[str, bytes]:
        """Returns no files beyond those that `fit` writes."""
        return {}

    def about(self) -> dict[str, object]:
        """Returns an empty dictionary: no command uses the model."""
        return {}


def _check_rows(name: str, tensors: Sequence[Tensor]) -> None:
    """Refuses anything but two tensors or more with a row for each example."""
    if not isinstance(tensors, tuple | list):
        raise ValueError(
            f"{name} must be a tuple (inputs, targets) of tensors, not {type(tensors).__name__}"
        )
    for n, tensor in enumerate(tensors):
        if not isinstance(tensor, Tensor):
            raise ValueError(
                f"{name}[{n}] must be a tensor, not {type(tensor).__name__}; convert it with "
                "torch.as_tensor"
            )
    rows = [len(tensor) if tensor.ndim else 0 for tensor in tensors]
    if len(rows) < 2 or len(set(rows)) != 1 or not rows[0]:
        raise ValueError(
            f"{name} has tensors of {', '.join(map(str, rows)) or 'no'} rows; give inputs and "
            "targets with one row for each example"
        )
