"""The precision in which a model computes: the requested one, or a default of the device.

    GPU    bf16; fp32 if the GPU cannot multiply bfloat16
    CPU    fp32; int8 if the folder stores 8-bit weights

The default depends on the device and the folder alone, never on inputs or earlier runs.
"""

import os
from dataclasses import dataclass

import torch

from regard.checkpoint import Saved, load
from regard.decode.engine.int8.linear import int8
from regard.machine.device import multiplies_bfloat16, use
from regard.task.folder import model_folder
from regard.task.predictor import has_8_bits
from regard.task.settings import Precision

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Choice:
    """A precision and why it was picked."""

    precision: Precision
    reason: str

    def __str__(self) -> str:
        return f"{self.precision} ({self.reason})"


def load_saved(
    folder: str | os.PathLike[str], device: str | torch.device, precision: Precision
) -> tuple[Saved, Choice]:
    """Loads the model of a run's or a model's folder in a precision."""
    if device == "auto" and precision == "int8":
        device = "cpu"
    place = use(device)
    if precision == "int8" and place.type != "cpu":
        raise ValueError(f"precision (int8) is for device cpu, not {place}; try bf16")
    choice = Choice(precision, "requested") if precision != "auto" else default(place)
    saved = load(
        model_folder(folder),
        device=place,
        dtype=DTYPES.get(choice.precision),
        keep_int8=precision in ("auto", "int8") and place.type == "cpu",
    )
    if precision == "auto" and has_8_bits(saved.model):
        choice = Choice("int8", "the folder stores 8-bit weights")
    if choice.precision == "int8":
        int8(saved.model.float())
    return saved, choice


def default(device: torch.device) -> Choice:
    """The precision of float weights if none is requested."""
    if device.type == "cpu":
        return Choice("fp32", "the default on a CPU")
    if multiplies_bfloat16("cuda"):
        return Choice("bf16", f"the default on {device.type}")
    return Choice("fp32", "this GPU has no bfloat16")
