"""Runs the contract: every property on one model, one after the other."""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import torch
from torch import nn

from regard import checkpoint
from regard.checks import properties as contract
from regard.checks import sample
from regard.checks.finding import Finding, Measured, Property, SkipError, Status
from regard.checks.subject import Subject
from regard.device import device as named_device
from regard.processes import one_line
from regard.task.folder import model_folder


def check(
    folder: str | Path,
    *,
    model: nn.Module | None = None,
    data: Sequence[str] = (),
    device: str = "auto",
    properties: Iterable[Property] | None = None,
    told: Callable[[str], None] | None = None,
) -> tuple[Subject, list[Finding]]:
    """Measures every property of a run's best model, or of the model in a folder.

    `model` is a model with custom parts, as for `checkpoint.load`. `told` is called with the name
    of each property before it is measured.
    """
    chosen = contract.PROPERTIES if properties is None else properties
    where = named_device(device)
    saved = checkpoint.load(model_folder(folder), model=model, device=where)
    examples, origin = sample.examples(saved, Path(folder), data)
    weight = next(saved.model.parameters())
    if weight.dtype != torch.float32:  # the contract is that of float32; narrower ones are in it
        saved.model.float()
    subject = Subject(saved, [example.to(where) for example in examples], origin)
    return subject, list(_findings(subject, chosen, told or (lambda name: None)))


def _findings(
    subject: Subject, properties: Iterable[Property], told: Callable[[str], None]
) -> Iterator[Finding]:
    for promise in properties:
        told(promise.name)
        begun = time.perf_counter()
        status: Status
        try:
            with torch.no_grad():
                measured = promise.measure(subject)
        except SkipError as reason:
            status, measured = "skipped", Measured(math.nan, str(reason))
        except Exception as error:  # one of both ways did not even work
            message = f"{type(error).__name__}: {one_line(error)}"
            status, measured = "fails", Measured(math.inf, message[:300])
        else:
            status = "holds" if measured.difference <= promise.tolerance else "fails"  # NaN fails
        yield Finding(
            promise.name,
            status,
            None if status == "skipped" else measured.difference,
            promise.tolerance,
            measured.of,
            promise.remedy,
            time.perf_counter() - begun,
        )
