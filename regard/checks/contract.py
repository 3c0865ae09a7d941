"""Measures every property of one model, one after the other."""

import copy
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from difflib import get_close_matches
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn

from regard import checkpoint
from regard.checks import compute, sample
from regard.checks import module as own_module
from regard.checks import properties as contract
from regard.checks.finding import Finding, Measured, Property, SkipError, Status
from regard.checks.isolation import copy_model, isolate
from regard.checks.report import Report
from regard.checks.subject import Subject
from regard.interop.programs import AnyModel
from regard.machine.device import device as named_device
from regard.machine.processes import one_line
from regard.task.folder import model_folder


def check(
    model_or_folder: nn.Module | str | os.PathLike[str],
    /,
    *inputs: object,
    data: Sequence[str] = (),
    model: nn.Module | None = None,
    device: str | None = None,
    batch_axis: int | None = None,
    properties: Iterable[str] | None = None,
    progress: Callable[[str], None] | None = None,
    **named_inputs: object,
) -> Report:
    """Checks that all ways to compute a model agree, such as fused kernels and their formula.

    For each property the report has the largest difference, the tolerance and a remedy. Three
    things can be checked:

    - any PyTorch module, with example inputs as its `forward` takes them. Two examples or more
      let it compare a batch with single examples; their axis is `batch_axis`, by default 0.
    - one of Regard's models, with inputs or with random ones that fit its config.
    - a folder of a run or a model, on its training data or on the files `data`. `model` is
      a model with custom parts, as in `load(folder, model=…)`, and `device` where it runs.

    `properties` names those to measure, by default all but the compilation of modules of your own.
    `progress` is called with the name of each property before it is measured. The model is copied:
    its weights, gradients, hooks and mode stay as they are.

    >>> import torch
    >>> from regard import check
    >>> layer = torch.nn.TransformerEncoderLayer(32, nhead=4, batch_first=True)
    >>> report = check(layer, torch.randn(3, 5, 32))
    >>> report.holds
    True
    >>> [finding.name for finding in report][:2]
    ['fused = formula', 'recorded = unrecorded']
    """
    subject: Subject | own_module.ModuleSubject
    with isolate():
        if isinstance(model_or_folder, nn.Module):
            if isinstance(data, torch.Tensor) or data or model is not None or device is not None:
                raise ValueError(
                    "data, model and device are for a folder; a model is checked where it is, on "
                    "inputs: check(model, *inputs)"
                )
            original = checkpoint.unwrapped(model_or_folder)
            if any(part.is_meta for part in chain(original.parameters(), original.buffers())):
                raise ValueError(
                    f"{type(original).__name__} is on the meta device, where it has no values; "
                    "build it on a real one"
                )
            name = type(original).__name__
            if isinstance(original, AnyModel):
                duplicate: Any = copy_model(original).float()
                examples, origin = sample.from_inputs(duplicate, inputs, named_inputs)
                where = compute.place(duplicate)
                subject = Subject(duplicate, [example.to(where) for example in examples])
            else:
                subject = own_module.ModuleSubject(original, inputs, named_inputs, batch_axis)
                origin = subject.origin
        elif isinstance(model_or_folder, str | os.PathLike):
            if named_inputs:
                raise TypeError(
                    f"check has no argument {next(iter(named_inputs))!r} for a folder; its "
                    "arguments are data, model, device, properties and progress"
                )
            if inputs:
                raise ValueError("a folder is checked on files, not inputs; name them by data=[…]")
            name = os.fspath(model_or_folder)
            subject, origin = _load(Path(name), model, data, device or "auto")
        else:
            kind = type(model_or_folder).__name__
            raise ValueError(
                f"check takes a model or the folder of one, not {kind}; of a predictor pass the "
                "folder, or its .model"
            )
        whole = isinstance(subject, Subject)
        chosen = _choose(contract.PROPERTIES if whole else own_module.PROPERTIES, properties)
        findings = tuple(_findings(subject, chosen, progress or (lambda name: None)))
        return Report(name, subject.count, origin, findings)


def _load(
    folder: Path, model: nn.Module | None, data: Sequence[str], device: str
) -> tuple[Subject, str]:
    where = named_device(device)
    saved = checkpoint.load(model_folder(folder), model=copy.deepcopy(model), device=where)
    examples, origin = sample.examples(saved, folder, data)
    files = {name: path for name, path in saved.files.items() if name != checkpoint.WEIGHTS}
    # The properties are those of float32, and some compare it with narrower numbers.
    placed = [example.to(where) for example in examples]
    return Subject(saved.model.float(), placed, saved.task or {}, files), origin


def _choose(table: Sequence[Property], names: Iterable[str] | None) -> list[Property]:
    if names is None:
        return [prop for prop in table if prop.default]
    names = [names] if isinstance(names, str) else list(names)
    choices = [prop.name for prop in table]
    for name in names:
        if name not in choices:
            close = get_close_matches(name, choices, n=1)
            guess = f"did you mean {close[0]!r}? " if close else ""
            raise ValueError(f"{name!r} is no property; {guess}there are {', '.join(choices)}")
    return [prop for prop in table if prop.name in names]


def _findings(
    subject: Any, properties: Iterable[Property], progress: Callable[[str], None]
) -> Iterator[Finding]:
    for prop in properties:
        progress(prop.name)
        begun = time.perf_counter()
        status: Status
        try:
            with torch.no_grad():
                measured = prop.measure(subject)
        except SkipError as reason:
            status, measured = "skipped", Measured(math.nan, str(reason))
        except Exception as error:  # one of the two ways raised
            message = f"{type(error).__name__}: {one_line(error)}"
            status, measured = "fails", Measured(math.inf, message[:300])
        else:
            status = "holds" if measured.difference <= prop.tolerance else "fails"  # NaN fails
        yield Finding(
            prop.name,
            status,
            None if status == "skipped" else measured.difference,
            prop.tolerance,
            measured.of,
            prop.remedy,
            time.perf_counter() - begun,
        )
