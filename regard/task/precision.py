"""The precision that a model computes in where none is asked for: the fastest that can be trusted.

    a GPU    bf16
    a CPU    int8, where its kernels run and choose the same next token as float32 for nearly all of
             a few hundred tokens of the user's own input; otherwise float32

That comparison takes a moment, and is kept in the cache: the next time its result is known.
"""

import copy
import hashlib
import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from regard import atomic
from regard.caches import default_cache
from regard.checkpoint import CONFIG
from regard.decode.engine.int8 import library as native
from regard.decode.engine.int8.engine import Int8Engine
from regard.decode.engine.int8.linear import Int8Linear, int8
from regard.device import multiplies_bfloat16
from regard.task.search import Choices
from regard.task.settings import Precision

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

AGREEMENT = 0.99
"""Share of tokens for which int8 must choose what float32 chooses."""
ENOUGH = 200
"""Tokens without which there is no saying."""
FEW = 8
"""Inputs that hardly have so many: who asks for one sentence does not wait for a comparison."""
SAMPLE = 48
"""Inputs that are compared at most."""
VERSION = 1
"""Of what is kept in the cache."""


@runtime_checkable
class Writes(Protocol):
    """A predictor whose model writes token by token."""

    model: Any

    def choices(self, inputs: Sequence[Any]) -> Choices:
        """Along what greedy search writes for these inputs."""


@dataclass(frozen=True)
class Choice:
    """A precision and why it was picked."""

    precision: Precision
    reason: str
    worth_saying: bool = False
    """Whether the user should know: it was found out just now, or is slower than need be."""

    def __str__(self) -> str:
        return f"{self.precision} ({self.reason})"


@dataclass(frozen=True)
class Compared:
    """Next tokens of int8 beside those of float32."""

    same: int
    tokens: int

    @property
    def agrees(self) -> bool:
        return self.same >= AGREEMENT * self.tokens

    def __str__(self) -> str:
        return f"the same next token as float32 for {self.same:,} of {self.tokens:,}"


def on_gpu(device: torch.device) -> Choice:
    if multiplies_bfloat16("cuda"):
        return Choice("bf16", f"on {device.type}")
    return Choice("fp32", "this GPU has no bfloat16")


def beforehand(model: nn.Module, folder: Path) -> Choice | None:
    """On a CPU, what can be said without any input; None where that must be compared first."""
    if isinstance(getattr(model, "output", None), Int8Linear):
        return Choice("int8", "the folder's weights are")
    if (known := _known(folder)) is None:
        return None
    if reason := native.missing():
        return Choice("fp32", f"there are no int8 kernels: {reason}")
    return _settled(known)


def settle(ready: Writes, inputs: Sequence[Any], folder: Path) -> Choice:
    """Decides between int8 and float32 by some inputs, and quantizes the model if that is int8."""
    compared = None
    if (choice := beforehand(ready.model, folder)) is None:
        if len(inputs) < FEW:
            return Choice("fp32", f"{len(inputs)} inputs are too few to compare int8 by")
        if reason := native.missing():
            return Choice("fp32", f"there are no int8 kernels: {reason}")
        quantized = int8(copy.deepcopy(ready.model))
        if refusal := Int8Engine.refusal(quantized):
            return Choice("fp32", f"int8 kernels: {refusal}")
        compared = compare(ready, quantized, inputs)
        if compared.tokens < ENOUGH:
            return Choice("fp32", f"{compared.tokens} tokens are too few to compare int8 by")
        _keep(folder, compared)
        choice = replace(_settled(compared), worth_saying=True)
    if choice.precision == "int8" and not isinstance(ready.model.output, Int8Linear):
        ready.model = int8(ready.model) if compared is None else quantized
    return choice


def compare(ready: Writes, quantized: nn.Module, inputs: Sequence[Any]) -> Compared:
    with torch.inference_mode():
        choices = ready.choices(list(inputs)[:SAMPLE])
        before, after = choices(ready.model), choices(quantized)
    return Compared(int((before == after).sum()), before.numel())


def _settled(compared: Compared) -> Choice:
    if compared.agrees:
        return Choice("int8", str(compared))
    return Choice(
        "fp32",
        f"int8 chooses {compared} tokens, which is less than {AGREEMENT:.0%}; --precision int8 "
        "takes it all the same, and is several times faster",
        worth_saying=True,
    )


# What is known already


def _path(folder: Path) -> Path:
    """By the content of the model's folder: its config.json has the checksums of all the rest."""
    content = hashlib.sha256((folder / CONFIG).read_bytes()).hexdigest()
    return default_cache() / "precision" / f"{content[:32]}.json"


def _known(folder: Path) -> Compared | None:
    try:
        found = json.loads(_path(folder).read_bytes())
        if found["version"] == VERSION and 0 <= found["same"] <= found["tokens"]:
            return Compared(int(found["same"]), int(found["tokens"]))
    except (OSError, ValueError, KeyError, TypeError):
        pass  # nothing, or something else: it is compared again
    return None


def _keep(folder: Path, compared: Compared) -> None:
    with suppress(OSError):
        path = _path(folder)
        path.parent.mkdir(parents=True, exist_ok=True)
        about = {"version": VERSION, "same": compared.same, "tokens": compared.tokens}
        atomic.write(path, json.dumps(about))
