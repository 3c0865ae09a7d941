"""Distributed training with torchrun: all that knows of PyTorch's DDP and FSDP2.

    data      every process has the whole model and a share of each batch; gradients are summed
              while the backward pass still runs (DistributedDataParallel)
    sharded   parameters, gradients and the optimizer's state are sharded over the processes, and
              gathered block by block where they are needed (FSDP2)

The loss is divided by the token count of the whole batch, so that the number of processes changes
nothing but the order of sums. A single process goes through here too, without any collective.
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
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from regard.data.problems import reason
from regard.machine.device import device, use
from regard.machine.processes import Processes, launched
from regard.model.block import Block
from regard.train.config import TrainingConfig

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

PATIENCE = timedelta(hours=6)
"""Timeout of collectives: processes wait for the first one, which evaluates and saves alone."""


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

    def broadcast(self, values: list[float]) -> list[float]:
        """The first process's numbers, broadcast to all."""
        if self.size == 1:
            return values
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.broadcast(tensor, src=0)
        return cast(list[float], tensor.tolist())

    def wait(self) -> None:
        """A barrier: waits until all processes are here."""
        self.broadcast([0.0])

    def part(self, tensor: Tensor) -> Tensor:
        """This process's shard of a tensor of the model."""
        return cast(Any, tensor).to_local() if self.sharded else tensor

    def whole(self, tensor: Tensor) -> Tensor:
        """A whole tensor of the model, gathered from its shards; all processes must call it."""
        return cast(Any, tensor).full_tensor() if self.sharded else tensor


@contextmanager
def processes(config: TrainingConfig) -> Iterator[World]:
    """The processes that torchrun has started, or one alone, each with its device."""
    where = device(config.device)
    with launched("nccl" if where.type == "cuda" else "gloo", PATIENCE) as here:
        if where.type == "cuda" and here.size > 1:
            where = torch.device("cuda", here.local)
        where = use(where)
        sharded = config.parallel == "sharded" and here.size > 1
        yield World(**asdict(here), device=where, sharded=sharded)


def spread(objective: nn.Module, world: World) -> nn.Module:
    """Wraps a module so that its backward pass averages gradients over all processes.

    Sharding happens in place, and must come before the optimizer is made.
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
    """Switches gradient synchronisation on for a step's last backward pass, and off for others."""
    if world.sharded:
        cast("FSDPModule", objective).set_requires_gradient_sync(now)
    elif world.size > 1:
        cast(Any, objective).require_backward_grad_sync = now


# Sharded checkpoints


def write(folder: Path, tensors: Mapping[str, Tensor], world: World) -> None:
    """Every process writes its shards, as safetensors; all must call it."""
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
    """Fills tensors, sharded or not, from the shards of any number of processes."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    for path in folder.glob("*.safetensors"):  # of damaged ones torch prints a traceback
        try:
            with safe_open(path, framework="pt"):
                pass
        except SafetensorError as error:
            raise ValueError(f"{path} is damaged ({reason(error)}); restore it") from error
    with warnings.catch_warnings():
        # torch warns that a single process reads, which is intended.
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        try:
            load(dict(tensors), storage_reader=HuggingFaceStorageReader(str(folder)))
        except CheckpointException as failed:
            fault, _ = next(iter(failed.failures.values()))
            raise ValueError(f"{folder} is damaged ({reason(fault)}); restore it") from fault
