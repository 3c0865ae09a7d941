"""Every setting of a training, each with its words for the command line's help."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

Schedule: TypeAlias = Literal["noam", "inverse_sqrt", "cosine", "linear", "constant"]
Precision: TypeAlias = Literal["auto", "fp32", "bf16", "fp16"]


@dataclass(frozen=True)
class TrainingConfig:
    """How a model is trained. What comes first of steps, epochs, minutes and patience ends it."""

    steps: int | None = None
    """Stop after this many steps."""
    epochs: int | None = None
    """Stop after this many passes over the data."""
    minutes: float | None = None
    """Stop after this much time, evaluation included."""
    batch: int = 4096
    """Size of a step's batch over all processes: tokens of source and target, or images."""
    accumulate: int = 1
    """Parts into which each process cuts its share of a batch, to save memory."""
    optimizer: Literal["adamw", "adam"] = "adamw"
    """AdamW decays weights apart from the gradient; Adam is the paper's."""
    lr: float = 1e-3
    """Learning rate at its peak; with the noam schedule a factor, 1 in the paper."""
    schedule: Schedule = "inverse_sqrt"
    """How the learning rate goes on after the warm-up; noam is the paper's."""
    warmup: int = 400
    """Steps in which the learning rate rises to its peak."""
    betas: tuple[float, float] = (0.9, 0.98)
    """How slowly Adam's means of gradients and of their squares change."""
    epsilon: float = 1e-9
    """Added to the root of the squares' mean."""
    weight_decay: float = 0.01
    """Pull of matrices towards zero; biases, norms and embeddings have none."""
    clip: float | None = 1.0
    """Longest gradient; a longer one is shortened to this."""
    smoothing: float = 0.1
    """Label smoothing: the share of each target that is spread over all classes."""
    ema: float = 0.0
    """Evaluate and keep an exponential moving average of the weights with this decay: 0.999."""
    average: int = 1
    """Evaluate and keep the mean of the weights at the last so many evaluations: 5."""
    precision: Precision = "auto"
    """Numbers in products of matrices: auto is bf16 on a GPU that has it, fp32 on a CPU."""
    compile: Literal["auto", "yes", "no"] = "auto"
    """torch.compile for the blocks: auto where it pays, which is on a GPU."""
    parallel: Literal["data", "sharded"] = "data"
    """With torchrun: a whole model in every process, or a part of it (FSDP2)."""
    evaluate_every: int = 500
    """Steps between evaluations; there is one at the end as well."""
    save_every: int = 500
    """Steps between saves, from which a killed run goes on."""
    log_every: int = 10
    """Steps between lines of metrics.jsonl."""
    patience: int | None = None
    """Stop after this many evaluations without a better score."""
    tensorboard: bool = True
    """Write events for TensorBoard."""
    device: str = "auto"
    """Where to compute: auto is a GPU where there is one."""
    seed: int = 0
    """What all that is random is drawn from: the same seed gives the same run."""

    def __post_init__(self) -> None:
        for name in ("batch", "accumulate", "average", "evaluate_every", "save_every", "log_every"):
            _check(self, name, 1)
        for name in ("steps", "epochs", "patience"):
            if getattr(self, name) is not None:
                _check(self, name, 1)
        for name in ("warmup", "weight_decay", "seed"):
            _check(self, name, 0)
        for name in ("lr", "minutes", "clip", "epsilon"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} ({value}) must be above 0")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas ({self.betas}) must be two numbers from 0 to below 1")
        for name in ("smoothing", "ema"):
            if not 0 <= (value := getattr(self, name)) < 1:
                raise ValueError(f"{name} ({value}) must be at least 0 and below 1")
        if self.ema and self.average > 1:
            raise ValueError(
                f"ema ({self.ema}) and average ({self.average}) are two means of one thing; "
                "choose one"
            )


MAY_CHANGE = frozenset(
    {"steps", "epochs", "minutes", "patience", "evaluate_every", "save_every", "log_every"}
    | {"tensorboard", "device", "compile", "parallel", "accumulate"}
)
"""Settings that a run may go on with changed: when it ends, and where and how it computes."""


def _check(config: TrainingConfig, name: str, least: int) -> None:
    value = getattr(config, name)
    if value < least:
        raise ValueError(f"{name} ({value}) must be at least {least}")
