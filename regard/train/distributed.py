"""More than one process, started by torchrun: PyTorch's own engine, in one place.

    data      every process has the whole model and a share of each batch; gradients are summed
              while the backward pass still runs (DistributedDataParallel)
    sharded   parameters, gradients and the optimizer's state are cut into as many parts as there
              are processes, and put together block by block where they are needed (FSDP2)

The loss is divided by what the whole batch counts, so that the number of processes changes
nothing but the order of sums. A process alone goes through here too, and meets no collective.
"""

import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from regard.device import device
from regard.model.block import Block
from regard.processes import Processes, launched
from regard.train.config import TrainingConfig

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

PATIENCE = timedelta(hours=6)
"""How long processes wait for the first one, which evaluates and saves alone."""


@dataclass(frozen=True, kw_only=True)
class World(Processes):
    """The processes that train together, as one of them sees it."""

    device: torch.device
    sharded: bool = False

    def __str__(self) -> str:
        if self.size == 1:
            return self.device.type
        return f"{self.size} × {self.device.type}, {'sharded' if self.sharded else 'data parallel'}"

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over all processes, in place."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def first_says(self, values: list[float]) -> list[float]:
        """The numbers that the first process has."""
        if self.size == 1:
            return values
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.broadcast(tensor, src=0)
        return cast(list[float], tensor.tolist())

    def wait(self) -> None:
        """Until all processes are here."""
        self.first_says([0.0])

    def part(self, tensor: Tensor) -> Tensor:
        """What this process has of a tensor of the model's."""
        return cast(Any, tensor).to_local() if self.sharded else tensor

    def whole(self, tensor: Tensor) -> Tensor:
        """A tensor of the model's, put together; all processes must ask for it."""
        return cast(Any, tensor).full_tensor() if self.sharded else tensor


@contextmanager
def processes(config: TrainingConfig) -> Iterator[World]:
    """The world that torchrun has started, or one process alone."""
    where = device(config.device)
    with launched("nccl" if where.type == "cuda" else "gloo", PATIENCE) as here:
        if where.type == "cuda" and here.size > 1:
            where = torch.device("cuda", here.local)
            torch.cuda.set_device(where)
        sharded = config.parallel == "sharded" and here.size > 1
        yield World(**asdict(here), device=where, sharded=sharded)


def spread(objective: nn.Module, world: World) -> nn.Module:
    """A module whose backward pass leaves the mean gradient over all processes in every one.

    Where the model is sharded this happens in place, and must come before the optimizer is made.
    """
    if world.size == 1:
        return objective
    if not world.sharded:
        from torch.nn.parallel import DistributedDataParallel

        return DistributedDataParallel(
            objective, broadcast_buffers=False, gradient_as_bucket_view=True
        )
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(world.device.type, (world.size,))
    for module in objective.modules():
        if isinstance(module, Block):
            fully_shard(module, mesh=mesh)
    fully_shard(objective, mesh=mesh)
    return objective


def synchronise(objective: nn.Module, world: World, now: bool) -> None:
    """Whether the next backward pass sums gradients over the processes: only a step's last."""
    if world.sharded:
        cast("FSDPModule", objective).set_requires_gradient_sync(now)
    elif world.size > 1:
        cast(Any, objective).require_backward_grad_sync = now


# Sharded checkpoints


def write(folder: Path, tensors: Mapping[str, Tensor], world: World) -> None:
    """Every process writes its parts, as safetensors; all must call it."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    if world.first:
        # Files of another number of processes would be read along with the new ones.
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    world.wait()
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    save(dict(tensors), storage_writer=writer)
    world.wait()


def read(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Fills tensors, sharded or not, with what any number of processes has written."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    with warnings.catch_warnings():
        # Told that one process may read as well, which is what is wanted.
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        load(dict(tensors), storage_reader=HuggingFaceStorageReader(str(folder)))
