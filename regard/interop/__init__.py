"""Other libraries' models: the same numbers come out here, and go back.

    imported = read("opus-mt-en-de")      a folder, a file in it, or a name on the hub
    write(model, "folder", "marian")      refused, with the reason, where Marian has no such model

A format is one module of this package with two functions, `read` and `write`: see `Format`. It
reads files with `tensors.py`, and describes itself by a list of `Pair`s that serves both ways.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, get_args, runtime_checkable

if TYPE_CHECKING:
    from torch import nn

Kind: TypeAlias = Literal["marian", "vit"]
_TIMM = ("vit_", "deit", "flexivit")  # how its names of plain ViTs begin
Task: TypeAlias = dict[str, Any]
"""What the model is for, and what it takes to use it: a section of the folder's config.json."""


@dataclass(frozen=True)
class Imported:
    """A model from elsewhere, as `checkpoint.save` wants it."""

    model: "nn.Module"
    files: Mapping[str, bytes | Path] = field(default_factory=dict)
    """Tokenizer files and the like, kept as they are."""
    task: Task | None = None
    origin: str | None = None
    """Where the weights came from, in words for the model card."""
    notes: tuple[str, ...] = ()
    """What the user should know, one line each: what is missing, say."""


@runtime_checkable
class Format(Protocol):
    """One library's way of keeping a model."""

    def read(self, source: Path) -> Imported:
        """The model in a folder, or in a file whose config.json lies beside it."""

    def write(
        self,
        model: "nn.Module",
        folder: Path,
        *,
        files: Mapping[str, bytes | Path],
        task: Task | None,
    ) -> None:
        """Writes a new folder; a ValueError says why where that library has no such model."""


def read(source: str | Path) -> Imported:
    """Whatever model there is in a folder, in a file, or under a name on the hub."""
    path = find(source)
    imported = _format(detect(path)).read(path)
    if path == Path(source):
        return imported
    return replace(imported, origin=f"{source}, from the hub.")  # not the place it was put


def write(
    model: "nn.Module",
    folder: str | Path,
    kind: str,
    *,
    files: Mapping[str, bytes | Path] | None = None,
    task: Task | None = None,
) -> None:
    """Writes the model into a new folder, as the library named by `kind` wants it."""
    _format(kind).write(model, Path(folder), files=files or {}, task=task)


def detect(source: Path) -> str:
    """Which format a folder's config.json speaks of."""
    from regard.interop.tensors import settings

    config = settings(source)
    kind = config.get("model_type")
    if kind is None and str(config.get("architecture", "")).startswith(_TIMM):  # timm's
        return "vit"
    if kind in get_args(Kind):
        return str(kind)
    if config.get("regard") is not None:
        raise ValueError(f"{source} is a Regard folder already; use it as it is")
    said = json.dumps(kind if kind is not None else config.get("architecture"))
    raise ValueError(
        f"{source} holds a model that cannot be imported (model_type {said}); "
        f"known are {', '.join(get_args(Kind))} and timm's vit_*, deit* and flexivit*"
    )


def find(source: str | Path) -> Path:
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


def _format(kind: str) -> Format:
    match kind:
        case "marian":
            import regard.interop.marian as marian

            return marian
        case "vit":
            import regard.interop.vit as vit

            return vit
    raise ValueError(f"format ({kind!r}) is unknown; choose from {', '.join(get_args(Kind))}")
