"""ONNX: a model's programs for onnxruntime, on whatever it runs on.

    encoder.onnx, decoder.onnx     a Transformer: text, images or audio in, logits out, with a cache
    decoder.onnx                   a language model, with a cache
    model.onnx                     a Vision Transformer or a text classifier

torch.onnx translates what torch.export has traced. Batch and lengths are free.
"""

import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from regard.interop import cards
from regard.interop.format import Task
from regard.interop.programs import Program, check, programs, verified
from regard.interop.tensors import new_folder, put, write_json
from regard.interop.torch_export import traced
from regard.interop.verify import Verified, reference
from regard.interop.vocabulary import kept
from regard.machine.extras import install


def write(
    model: nn.Module,
    folder: Path,
    *,
    files: Mapping[str, bytes | Path],
    task: Task | None,
) -> Verified:
    """A folder of .onnx files, with what it takes to use them: the task and the tokenizer."""
    model = check(model, "ONNX")
    engine = library()
    native: Any = reference(model)
    with new_folder(folder) as draft:
        for program in programs(native):
            _write(program, draft / f"{program.name}.onnx")
        put(draft, kept(files))
        write_json(draft / "task.json", task or {})
        (draft / "README.md").write_text(cards.onnx(folder.name, model, task or {}, files), "utf-8")

        sessions: dict[str, Any] = {}

        def run(name: str, inputs: Mapping[str, Tensor]) -> list[Tensor]:
            if name not in sessions:
                sessions[name] = engine.InferenceSession(
                    draft / f"{name}.onnx", _options(engine), providers=["CPUExecutionProvider"]
                )
            given = {key: value.numpy() for key, value in inputs.items()}
            return [torch.from_numpy(result) for result in sessions[name].run(None, given)]

        return verified(native, run, "onnxruntime")


def library() -> Any:
    """onnxruntime; what torch.onnx needs beside it is in the same extra."""
    try:
        import onnx  # noqa: F401
        import onnxruntime
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise ValueError(f"exporting to ONNX needs {error.name}: {install('export')}") from None
    return onnxruntime


def _options(engine: Any) -> Any:
    options = engine.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3  # errors alone
    return options


def _write(program: Program, path: Path) -> None:
    with _quiet():
        written = torch.onnx.export(
            traced(program),
            dynamo=True,
            verbose=False,
            input_names=list(program.inputs),
            output_names=list(program.outputs),
            dynamic_shapes=tuple(program.axes.values()),
        )
    assert written is not None
    written.save(path)


@contextmanager
def _quiet() -> Iterator[None]:
    """torch.onnx remarks on packages that nobody needs here, and on itself."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
