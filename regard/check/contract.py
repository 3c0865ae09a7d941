"""Runs the contract: every property on one model, one after the other."""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from regard import checkpoint
from regard.check import compute, sample
from regard.check.compute import Example, Rows
from regard.check.finding import Finding, Measured, Property, SkipError, Status
from regard.checkpoint import Saved
from regard.device import device as named_device
from regard.task.folder import model_folder


@dataclass
class Subject:
    """A model, and the examples that it is checked on."""

    saved: Saved
    examples: list[Example]
    origin: str
    """Where the examples come from."""

    @property
    def model(self) -> Any:
        return self.saved.model

    @cached_property
    def logits(self) -> Rows:
        """What the others are compared with: the padded batch."""
        with torch.no_grad():
            return compute.padded(self.model, self.examples)

    @property
    def positions(self) -> int:
        return sum(map(len, self.logits))


def check(
    folder: str | Path,
    *,
    data: Sequence[str] = (),
    device: str = "auto",
    properties: Iterable[Property] | None = None,
    told: Callable[[str], None] | None = None,
) -> tuple[Subject, list[Finding]]:
    """Every property of a run's best model, or of a model's folder; `told` hears which is next."""
    if properties is None:
        from regard.check.properties import PROPERTIES

        properties = PROPERTIES
    where = named_device(device)
    saved = checkpoint.load(model_folder(folder), device=where)
    examples, origin = sample.examples(saved, Path(folder), data)
    weight = next(saved.model.parameters())
    if weight.dtype != torch.float32:  # the contract is that of float32; narrower ones are in it
        saved.model.float()
    subject = Subject(saved, [one.to(where) for one in examples], origin)
    return subject, list(_findings(subject, properties, told or (lambda name: None)))


def _findings(
    subject: Subject, properties: Iterable[Property], told: Callable[[str], None]
) -> Iterator[Finding]:
    for one in properties:
        told(one.name)
        begun = time.perf_counter()
        status: Status
        try:
            with torch.no_grad():
                measured = one.measure(subject)
        except SkipError as reason:
            status, measured = "skipped", Measured(math.nan, str(reason))
        else:
            status = "holds" if measured.difference <= one.tolerance else "fails"  # NaN fails
        yield Finding(
            one.name,
            status,
            None if status == "skipped" else measured.difference,
            one.tolerance,
            measured.of,
            one.remedy,
            time.perf_counter() - begun,
        )
