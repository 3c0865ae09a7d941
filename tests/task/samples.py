"""Small texts, small models and short trainings for the tests of tasks."""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from regard.model.transformer import TransformerShape
from regard.train.config import TrainingConfig
from regard.train.display import Display
from regard.train.fit import Result, fit
from regard.train.task import Task

WORDS = ["ab", "cd", "efg", "hij", "klm", "nop", "qrs", "tu"]
SHAPE = TransformerShape(
    width=16, heads=2, feed_forward=16, encoder_layers=1, decoder_layers=1, norm="pre"
)
TRAINING = TrainingConfig(
    steps=3,
    batch=300,
    warmup=2,
    evaluate_every=3,
    save_every=3,
    tensorboard=False,
    device="cpu",
)


def sentences(count: int, seed: int = 0) -> list[str]:
    """Different ones, of one to seven words."""
    chance = random.Random(seed)
    found: dict[str, None] = {}
    while len(found) < count:
        found[" ".join(chance.choices(WORDS, k=chance.randint(1, 7)))] = None
    return list(found)


def backwards(text: str) -> str:
    return " ".join(reversed(text.split()))


def lines(path: Path, texts: Sequence[str]) -> str:
    path.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    return str(path)


def trained(task: Task, training: TrainingConfig, run: Path, **changed: object) -> Result:
    return fit(task, replace(training, **changed), run, display=Display())  # type: ignore[arg-type]
