"""torch.export programs: a model's computation without its code, for whatever runs .pt2 files.

    program = torch.export.load("folder/encoder.pt2").module()

The programs are those of `programs.py`, in float32 and with free batches and lengths.
"""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from regard.interop import cards
from regard.interop.format import Task
from regard.interop.programs import Program, check, programs, verified
from regard.interop.tensors import new_folder, put, write_json
from regard.interop.verify import Verified, reference
from regard.interop.vocabulary import kept


def write(
    model: nn.Module,
    folder: Path,
    *,
    files: Mapping[str, bytes | Path],
    task: Task | None,
) -> Verified:
    """A folder of .pt2 files, with what it takes to use them: the task and the tokenizer."""
    model = check(model, "torch.export")
    native: Any = reference(model)
    with new_folder(folder) as draft:
        inputs = {}
        for program in programs(native):
            torch.export.save(traced(program), draft / f"{program.name}.pt2")
            inputs[program.name] = list(program.inputs)
        put(draft, kept(files))
        write_json(draft / "task.json", task or {})
        (draft / "README.md").write_text(cards.torch_export(folder.name, model, inputs), "utf-8")

        loaded: dict[str, nn.Module] = {}

        def run(name: str, inputs: Mapping[str, Tensor]) -> list[Tensor]:
            if name not in loaded:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # of torch 2.11, about its own buffers
                    loaded[name] = torch.export.load(draft / f"{name}.pt2").module()
            results = loaded[name](*inputs.values())
            return [results] if isinstance(results, Tensor) else list(results)

        return verified(native, run, "torch.export")


def traced(program: Program) -> torch.export.ExportedProgram:
    """The program as a graph whose named axes are free."""
    names = {name for axes in program.axes.values() for name in axes.values()}
    free: dict[str, Any] = {name: torch.export.Dim(name) for name in names}
    free["past"] = torch.export.Dim.DYNAMIC  # from 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of its pytrees
        return torch.export.export(
            program.module,
            tuple(program.inputs.values()),
            dynamic_shapes=tuple(
                {axis: free[name] for axis, name in axes.items()} for axes in program.axes.values()
            ),
        )
