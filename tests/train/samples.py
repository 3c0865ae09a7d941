"""A small task with everything that a real one has: to say a few numbers backwards."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from regard.attention.mask import PackedLengths
from regard.model.transformer import Transformer, TransformerConfig
from regard.train.config import TrainingConfig
from regard.train.loss import cross_entropy

NUMBERS, START, END = 11, 11, 12
CONFIG = replace(
    TransformerConfig.tiny(13),
    width=16,
    heads=2,
    feed_forward=17,
    encoder_layers=1,
    decoder_layers=1,
    dropout=0.1,
)


@dataclass
class Batch:
    source: Tensor
    target: Tensor
    labels: Tensor
    source_lengths: PackedLengths
    target_lengths: PackedLengths

    def to(self, device: torch.device) -> "Batch":
        return Batch(*(part.to(device) for part in vars(self).values()))


class Backwards:
    """Examples 0 … 30: numbers, and the same numbers backwards."""

    score = "accuracy"
    unit = "tokens"
    signatures: Mapping[str, str] = MappingProxyType({})

    def __init__(self, dropout: float = 0.1, seed: int = 0, batch: int = 7):
        torch.manual_seed(seed)
        self.model: nn.Module = Transformer(replace(CONFIG, dropout=dropout))
        rng = np.random.default_rng(seed)
        self.examples = [rng.integers(0, NUMBERS, 1 + n % 3) for n in range(31)]
        self.seed, self.size = seed, batch
        self.evaluations = 0

    def plan(self, epoch: int) -> list[np.ndarray]:
        order = np.random.default_rng([self.seed, epoch]).permutation(len(self.examples))
        return [order[at : at + self.size] for at in range(0, len(order), self.size)]

    def batch(self, indices: np.ndarray, step: int) -> Batch:
        rows = [self.examples[index] for index in indices]
        lengths = [len(row) for row in rows]
        more = [length + 1 for length in lengths]
        return Batch(
            _row(rows),
            _row([np.concatenate([[START], row[::-1]]) for row in rows]),
            _row([np.concatenate([row[::-1], [END]]) for row in rows]),
            PackedLengths(lengths),
            PackedLengths(more),
        )

    def loss(self, batch: Batch) -> tuple[Tensor, int]:
        states = self._states(self.model, batch)
        return cross_entropy(states, self.model.output, batch.labels, 0.1), batch.labels.numel()

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        assert not model.training
        assert not torch.is_grad_enabled()
        self.evaluations += 1
        batch = self.batch(np.arange(len(self.examples)), 0)
        batch = batch.to(next(model.parameters()).device)
        found = model.output(self._states(model, batch)).argmax(-1)
        return {"accuracy": (found == batch.labels).double().mean().item(), "worse": 1.0}

    def files(self) -> dict[str, bytes | Path]:
        return {"tokenizer.json": b"{}"}

    def run_files(self) -> dict[str, bytes]:
        return {}

    def about(self) -> dict[str, Any]:
        return {"kind": "backwards", "size": self.size}

    @staticmethod
    def _states(model: Any, batch: Batch) -> Tensor:
        memory = model.encode(batch.source, batch.source_lengths)
        return model.states(batch.target, memory, batch.target_lengths, batch.source_lengths)


def settings(**changed: Any) -> TrainingConfig:
    """Short, on one core, without the files that take time."""
    short = TrainingConfig(
        steps=11,
        lr=3e-3,
        warmup=5,
        evaluate_every=4,
        save_every=3,
        log_every=2,
        tensorboard=False,
        device="cpu",
    )
    return replace(short, **changed)


def _row(rows: list[np.ndarray]) -> Tensor:
    return torch.from_numpy(np.concatenate(rows)).long()[None]
