"""Every setting of training. The docstrings of the fields are the command line's help."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from regard.synonyms import suggest_names
from regard.train.tracker import Name

Schedule: TypeAlias = Literal["noam", "inverse_sqrt", "cosine", "linear", "constant"]
Precision: TypeAlias = Literal["auto", "fp32", "bf16", "fp16"]


_EVERY = ("evaluate_every", "save_every", "log_every")


@suggest_names
@dataclass(frozen=True)
class TrainingConfig:
    """Settings of training, which ends at the first limit of steps, epochs, minutes and patience.

    On the command line a limit takes the place of the preset's.

    >>> from dataclasses import replace
    >>> from regard import TrainingConfig
    >>> config = TrainingConfig(minutes=5.0, lr=3e-4, schedule="cosine", patience=3)
    >>> replace(config, seed=1).lr
    0.0003
    """

    steps: int | None = None
    """Stop after this many training steps (updates)."""
    epochs: int | None = None
    """Stop after this many epochs (passes over the data)."""
    minutes: float | None = None
    """Stop after this many minutes, evaluation included."""
    batch: int = 4096
    """Batch size of a step over all processes, in tokens (source and target together) or images."""
    accumulate: int = 1
    """Gradient accumulation: micro-batches into which each process splits its batch, to save
    memory."""
    optimizer: Literal["adamw", "adam", "muon"] = "adamw"
    """Optimizer: AdamW has decoupled weight decay; Adam is the paper's; Muon orthogonalizes the
    updates of the matrices within blocks, and AdamW takes the rest."""
    lr: float = 1e-3
    """Peak learning rate; with the noam schedule a factor, 1 in the paper. On the command line
    a changed optimizer has a rate that suits it by default."""
    schedule: Schedule = "inverse_sqrt"
    """Learning-rate schedule (scheduler) after the warm-up; noam is the paper's."""
    warmup: int = 400
    """Warm-up steps, in which the learning rate rises linearly to its peak. On the command line a
    run that is shorter than its preset has fewer by default."""
    betas: tuple[float, float] = (0.9, 0.98)
    """Adam's betas: decay rates of the running means of gradients and of squared gradients."""
    epsilon: float = 1e-9
    """Adam's epsilon, added to the denominator."""
    weight_decay: float = 0.01
    """Weight decay, for matrices alone: not for biases, norms and embeddings."""
    clip: float | None = 1.0
    """Gradient clipping: the maximum gradient norm."""
    smoothing: float = 0.1
    """Label smoothing: the share of each target's probability spread over all classes."""
    ema: float = 0.0
    """Exponential moving average (EMA) of the weights: its decay, such as 0.999. The averaged model
    is evaluated and saved."""
    average: int = 1
    """Checkpoint averaging: average the weights of this many last evaluations, such as 5. The
    averaged model is evaluated and saved."""
    keep_best: int = 1
    """Best checkpoints to keep: best/ is the best of them, and bests/ has all where they are more
    than one. regard average makes one model of them."""
    precision: Precision = "auto"
    """Mixed precision of matrix products: auto is bf16 on a GPU that has it and, when training
    to translate, on a CPU with instructions for it (AVX-512 BF16); otherwise fp32."""
    capture: Literal["auto", "no"] = "auto"
    """Capture whole steps in CUDA graphs: auto does so on a GPU where it can."""
    compile: Literal["auto", "yes", "no"] = "auto"
    """torch.compile the blocks: auto does so on a GPU where steps are not captured."""
    parallel: Literal["data", "sharded"] = "data"
    """With torchrun: data parallel (DDP), or with model and optimizer state sharded (FSDP2)."""
    evaluate_every: int = 500
    """Steps between evaluations on the validation set; there is one at the end as well."""
    save_every: int = 500
    """Steps between checkpoints, from which an interrupted run resumes."""
    log_every: int = 10
    """Steps between log lines in metrics.jsonl."""
    patience: int | None = None
    """Early stopping: stop after this many evaluations without a better score."""
    tensorboard: bool = True
    """Write TensorBoard event files."""
    tracker: Name = "none"
    """Send the curves to Weights & Biases (wandb) or MLflow too, where it is installed."""
    verify_data: bool = False
    """Compare all bytes of the training data when a run resumes, also of files and folders above
    1 GiB, of which otherwise samples are compared."""
    device: str = "auto"
    """Device: auto is a GPU where there is one, and else the CPU; or cpu, cuda, cuda:1."""
    seed: int = 0
    """Random seed: the same seed gives the same run."""

    def __post_init__(self) -> None:
        for name in ("batch", "accumulate", "average", "keep_best", *_EVERY):
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
        if self.optimizer == "muon" and (self.precision == "fp16" or self.parallel == "sharded"):
            raise ValueError(
                "optimizer (muon) is for precision bf16 or fp32 and parallel data, not "
                f"{self.precision} and {self.parallel}; use adamw"
            )
        if self.ema and self.average > 1:
            raise ValueError(
                f"ema ({self.ema}) and average ({self.average}) both average the weights; "
                "choose one"
            )


USUAL_RATES = {"adamw": 1.5e-3, "adam": 1.5e-3, "muon": 1e-2}
"""Peak learning rates of small models, by optimizer."""

MAY_CHANGE = frozenset(
    {"steps", "epochs", "minutes", "patience", "evaluate_every", "save_every", "log_every"}
    | {"keep_best", "tensorboard", "tracker", "device", "capture", "compile", "parallel"}
    | {"accumulate", "precision", "verify_data"}
)
"""Settings that may change when a run resumes: when it ends, and where and how it computes."""


def _check(config: TrainingConfig, name: str, least: int) -> None:
    value = getattr(config, name)
    if value < least:
        raise ValueError(f"{name} ({value}) must be at least {least}")
