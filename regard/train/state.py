"""The state of training beside the weights, from which it resumes as if never interrupted.

    training.json          where it is: step, epoch, position, best score, running sums
    training.safetensors   Adam's moments of each parameter, and the moving average if there is one

Both lie in the run's `last/` beside the weights, and are replaced atomically with them. A sharded
run's tensors lie in `shards/STEP/` instead, which training.json names, so that they become valid at
the same moment. No random state is saved: step n draws from (seed, n).
"""

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from regard import checkpoint
from regard.config import dumps, from_json, loads, to_json
from regard.machine import atomic
from regard.train import distributed
from regard.train.config import Precision
from regard.train.distributed import World
from regard.train.optimizer import Adam, MovingAverage

NUMBERS, TENSORS, SHARDS = "training.json", "training.safetensors", "shards"


@dataclass
class Window:
    """Sums since the last line of metrics."""

    loss: float = 0.0
    count: float = 0.0
    seconds: float = 0.0


@dataclass(frozen=True)
class Kept:
    """A model that is kept, with its score."""

    step: int
    score: float


@dataclass
class State:
    """Where a training is, in numbers."""

    step: int = 0
    epoch: int = 0
    position: int = 0
    """Batches of this epoch that are done."""
    count: float = 0.0
    """Tokens, or whatever the loss counts, so far."""
    seconds: float = 0.0
    evaluated: int = 0
    """The step of the last evaluation."""
    best: float | None = None
    best_step: int = 0
    kept: tuple[Kept, ...] = ()
    """Evaluations whose models are kept in bests/, the best first."""
    waited: int = 0
    """Evaluations since the best one."""
    best_on_all: float | None = None
    """The best model's score on the whole validation set, where a part is scored while training."""
    precision: Precision | None = None
    """What matrix products were computed in at last; not known of older runs."""
    scale: float = 256.0
    """fp16: the loss scale, which keeps small gradients from underflowing. It grows."""
    growth: int = 0
    """fp16: steps since the scale has changed."""
    window: Window = field(default_factory=Window)
    shards: str | None = None
    """Where a sharded run's tensors are, from the run's folder."""


def tensors(
    parameters: Mapping[str, nn.Parameter],
    optimizer: Adam,
    ema: MovingAverage | None,
) -> dict[str, Tensor]:
    """The optimizer's state and the moving average, by name; not copies."""
    found = {
        f"{what}.{name}": value
        for name, parameter in parameters.items()
        for what, value in optimizer.state.get(parameter, {}).items()
    }
    if ema is not None:
        found |= {f"ema.{name}": value for name, value in ema.means.items()}
    return found


def begun(folder: Path) -> bool:
    """Whether a run has a checkpoint, even where a save was killed between two renames."""
    return (folder / "last").exists() or any(folder.glob(".last.replaced-*"))


def read_numbers(saved: checkpoint.Saved) -> State:
    if NUMBERS not in saved.files:
        raise ValueError(
            f"{saved.folder} holds a model but no {NUMBERS}, so that its training cannot resume; "
            "choose another folder for the run"
        )
    path = saved.files[NUMBERS]
    return from_json(State, loads(path.read_bytes(), str(path)), str(path))


@torch.no_grad()
def read_tensors(
    run: Path, saved: checkpoint.Saved, state: State, into: Mapping[str, Tensor], world: World
) -> None:
    """Restores the tensors, whatever number of processes has written them."""
    folder = saved.folder if state.shards is None else run / state.shards
    if state.shards is not None and not folder.is_dir():
        raise ValueError(
            f"{folder} is missing, which holds the optimizer's state; copy the whole run, or "
            f"fine-tune its model: regard train --from {run} NEW"
        )
    if world.sharded or state.shards is not None:
        distributed.read(folder, into)
        return
    with safe_open(saved.files[TENSORS], framework="pt") as file:
        stored = set(file.keys())
        if stored != into.keys():
            unlike = sorted(stored ^ into.keys())
            raise ValueError(
                f"{saved.files[TENSORS]} is another optimizer's: {', '.join(unlike[:3])}"
                f"{', …' if len(unlike) > 3 else ''}; the same settings are wanted"
            )
        for name, tensor in into.items():
            tensor.copy_(file.get_tensor(name))


def write(
    run: Path,
    model: nn.Module | None,
    state: State,
    kept: Mapping[str, Tensor],
    world: World,
    *,
    files: Mapping[str, bytes | Path],
    task: Mapping[str, object],
    origin: str,
) -> None:
    """Replaces `last/` atomically; `model` is the whole one, needed in the first process alone."""
    state.shards = f"{SHARDS}/{state.step}" if world.sharded else None
    if state.shards is not None:
        distributed.write(run / state.shards, kept, world)
    if not world.first or model is None:
        return
    with _draft(run, {} if world.sharded else kept) as draft:
        numbers = {NUMBERS: dumps(to_json(state))}
        checkpoint.save(
            run / "last", model, files={**files, **numbers, **draft}, task=task, origin=origin
        )
    for old in (run / SHARDS).glob("*"):
        if f"{SHARDS}/{old.name}" != state.shards:
            shutil.rmtree(old, ignore_errors=True)


@contextmanager
def _draft(run: Path, kept: Mapping[str, Tensor]) -> Iterator[dict[str, bytes | Path]]:
    """The tensors in a temporary file; one that a killed run has left is removed."""
    atomic.clear(run / TENSORS)
    if not kept:
        yield {}
        return
    with atomic.draft(run / TENSORS) as folder:
        path = folder / TENSORS
        save_file({name: value.detach().contiguous() for name, value in kept.items()}, path)
        yield {TENSORS: path}
