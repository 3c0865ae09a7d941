"""Other libraries' models: the same numbers come out here, and go back.

    imported = read("opus-mt-en-de")      a folder, a file in it, or a name on the hub
    write(model, "folder", "marian")      refused, with the reason, where Marian has no such model

A format is one module of this package with a function `read`, or `write`, or both: see `format.py`.
One that renames tensors describes itself by a list of `Pair`s, of `tensors.py`, that serves both
ways. What was written is compared with the model, by `verify.py`, in the engine it was written for.
"""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

if TYPE_CHECKING:
    from torch import nn

    from regard.interop.format import Imported, Reader, Task, Writer
    from regard.interop.verify import Verified

Kind: TypeAlias = Literal["marian", "vit"]
Target: TypeAlias = Literal["ctranslate2", "onnx", "torch-export", "marian", "vit"]
_TIMM = ("vit_", "deit", "flexivit")  # how its names of plain ViTs begin


def read(source: str | os.PathLike[str]) -> "Imported":
    """Whatever model there is in a folder, in a file, or under a name on the hub."""
    path = find(source)
    imported = _reader(detect(path)).read(path)
    if path == Path(source):
        return imported
    return replace(imported, origin=f"{source}, from the hub.")  # not the place it was put


def write(
    model: "nn.Module",
    folder: str | os.PathLike[str],
    kind: str,
    *,
    files: Mapping[str, bytes | str | os.PathLike[str]] | None = None,
    task: "Task | None" = None,
    precision: str = "fp32",
) -> "Verified":
    """Writes the model into a new folder, as the library named by `kind` wants it.

    What that library's own engine computes is compared with the model first: how it compares is
    returned, and a folder that computes something else is never written. Other precisions than
    float32 are CTranslate2's.
    """
    if kind == "ctranslate2":
        from regard.interop import ctranslate2

        return ctranslate2.write(
            model, Path(folder), files=_as_paths(files), task=task, precision=precision
        )
    if precision != "fp32":
        raise ValueError(f"precision ({precision!r}) is for CTranslate2; write --to {kind} in fp32")
    return _writer(kind).write(model, Path(folder), files=_as_paths(files), task=task)


def _as_paths(
    files: Mapping[str, bytes | str | os.PathLike[str]] | None,
) -> dict[str, bytes | Path]:
    return {
        name: content if isinstance(content, bytes) else Path(content)
        for name, content in (files or {}).items()
    }


def shape_for(kind: str, task: str) -> dict[str, object]:
    """What a model's shape must be, so that what a task trains can be written for this library."""
    match kind:
        case "ctranslate2" | "onnx" | "torch-export":
            return {}  # as every task trains it
        case "marian":
            from regard.interop.marian import SHAPE, TASKS
        case "vit":
            from regard.interop.vit import SHAPE, TASKS
        case _:
            known = ", ".join(get_args(Target))
            raise ValueError(f"--for ({kind}) is unknown; choose from {known}")
    if task not in TASKS:
        raise ValueError(
            f"--for {kind} is for {' and '.join(TASKS)}: {task} trains no model that it has"
        )
    return dict(SHAPE)


def detect(source: str | os.PathLike[str]) -> str:
    """Which format a folder is of: ctranslate2, marian, vit (Hugging Face's) or timm."""
    from regard.interop.tensors import settings

    source = Path(source)
    if ((source if source.is_dir() else source.parent) / "model.bin").is_file():
        return "ctranslate2"
    config = settings(source)
    kind = config.get("model_type")
    if kind is None and str(config.get("architecture", "")).startswith(_TIMM):
        return "timm"
    if kind in get_args(Kind):
        return str(kind)
    if config.get("regard") is not None:
        raise ValueError(f"{source} is a Regard folder already; use it as it is")
    name = json.dumps(kind if kind is not None else config.get("architecture"))
    raise ValueError(
        f"{source} holds a model that cannot be imported (model_type {name}); "
        f"known are {', '.join(get_args(Kind))}, CTranslate2's folders, and timm's vit_*, deit* "
        "and flexivit*"
    )


def find(source: str | os.PathLike[str]) -> Path:
    """A path as it is; a name such as Helsinki-NLP/opus-mt-en-de is fetched from the hub."""
    path = Path(source)
    if path.exists():
        return path
    if not isinstance(source, str) or not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", source):
        raise ValueError(f"{source} does not exist; name a folder, a file or a model of the hub")
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise ValueError(
            f"{source} does not exist here, and fetching it from the hub needs huggingface_hub; "
            "pip install huggingface_hub, or download the model's folder and name that"
        ) from None
    wanted = ["*.json", "*.spm", "*.safetensors"]
    try:
        folder = Path(snapshot_download(source, allow_patterns=wanted))
        if not any(folder.glob("*.safetensors")):
            folder = Path(snapshot_download(source, allow_patterns=[*wanted, "*.bin"]))
    except Exception as error:  # the hub, the network and its libraries each have their own
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(
            f"{source} does not exist here, and the hub did not give it ({reason}); "
            "download the model's folder and name that"
        ) from error
    return folder


def _reader(kind: str) -> "Reader":
    match kind:
        case "ctranslate2":
            from regard.interop import ctranslate2_folder

            return ctranslate2_folder
        case "marian":
            from regard.interop import marian

            return marian
        case "timm":
            from regard.interop import timm

            return timm
        case "vit":
            from regard.interop import vit

            return vit
    raise AssertionError(kind)


def _writer(kind: str) -> "Writer":
    match kind:
        case "marian":
            from regard.interop import marian

            return marian
        case "onnx":
            from regard.interop import onnx

            return onnx
        case "torch-export":
            from regard.interop import torch_export

            return torch_export
        case "vit":
            from regard.interop import vit

            return vit
    raise ValueError(f"format ({kind!r}) is unknown; choose from {', '.join(get_args(Target))}")
