"""How a step is computed: mixed precision, torch.compile, loss scaling."""

import importlib.util

import torch
from torch import nn

from regard.machine.device import multiplies_bfloat16
from regard.model.block import Block
from regard.train.config import Precision, TrainingConfig
from regard.train.distributed import World
from regard.train.state import State
from regard.train.task import Mixed, Task

NAMES: dict[torch.dtype, Precision] = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
}


def dtype(config: TrainingConfig, world: World, task: Task) -> torch.dtype:
    """The dtype of matrix products (autocast); weights and sums stay float32."""
    match config.precision:
        case "bf16":
            return torch.bfloat16
        case "fp16":
            if world.sharded:
                raise ValueError(
                    "precision (fp16) needs a whole gradient in every process, but parallel is "
                    "sharded; use bf16"
                )
            return torch.float16
        case "fp32":
            return torch.float32
    return automatic(world.device, task)


def automatic(device: torch.device, task: Task | None) -> torch.dtype:
    """What `auto` is on a device, for a task or before there is one."""
    wanted = device.type == "cuda" or (isinstance(task, Mixed) and task.bfloat16_on_cpu)
    return torch.bfloat16 if wanted and multiplies_bfloat16(device.type) else torch.float32


def changed(config: TrainingConfig, dtype: torch.dtype, state: State) -> str | None:
    """What the user should know where a run resumes in another precision than it had."""
    before, now = state.precision, NAMES[dtype]
    if before is None or before == now:
        return None
    why = "precision auto on this machine" if config.precision == "auto" else "as is set"
    return (
        f"the first {state.step:,} steps were computed in {before}, and those to come are in "
        f"{now} ({why}); set training.precision to {before} to go on as before"
    )


def compiled(model: nn.Module, config: TrainingConfig, device: torch.device, captured: bool) -> str:
    """Compiles every block of a model in place, where it pays; returns what was done, and why.

    Blocks are alike, and share one compilation. The loss is not compiled: its loop over chunks
    would be recompiled for every number of tokens. `captured` steps have one size, and less to
    gain from it.
    """
    if config.compile == "no":
        return "not compiled (compile no)"
    if config.compile == "auto" and device.type != "cuda":
        # Packed attention on a CPU goes sentence by sentence: every batch would be recompiled,
        # which takes longer than hundreds of steps.
        return f"not compiled (auto: not on a {device.type.upper()})"
    if config.compile == "auto" and importlib.util.find_spec("triton") is None:
        return "not compiled (Triton is not installed)"
    if config.compile == "auto" and captured:
        return "not compiled (auto: not where steps are captured)"
    blocks = [module for module in model.modules() if isinstance(module, Block)]
    for block in blocks:
        block.compile(dynamic=not captured)
    return f"{len(blocks)} blocks compiled"


def scaler(dtype: torch.dtype, world: World, state: State) -> torch.amp.GradScaler:
    """Loss scaling for fp16 (GradScaler); does nothing for other dtypes."""
    made = torch.amp.GradScaler(world.device.type, state.scale, enabled=dtype is torch.float16)
    if made.is_enabled():
        made.load_state_dict({**made.state_dict(), "_growth_tracker": state.growth})
    return made


def save_scaler(scaler: torch.amp.GradScaler, state: State) -> None:
    """Saves the scaler's state, from which `scaler` restores it."""
    if scaler.is_enabled():
        state.scale, state.growth = scaler.get_scale(), scaler.state_dict()["_growth_tracker"]
