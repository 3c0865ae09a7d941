"""What a module for another library's format has: a function `read`, or `write`, or both."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from torch import nn

from regard.interop.verify import Verified

Task: TypeAlias = dict[str, Any]
"""What the model is for, and what it takes to use it: a section of the folder's config.json."""


@dataclass(frozen=True)
class Imported:
    """A model from elsewhere, as `checkpoint.save` wants it."""

    model: nn.Module
    files: Mapping[str, bytes | Path] = field(default_factory=dict)
    """Tokenizer files and the like, kept as they are."""
    task: Task | None = None
    origin: str | None = None
    """Where the weights came from, in words for the model card."""
    notes: tuple[str, ...] = ()
    """What the user should know, one line each: what is missing, say."""


class Reader(Protocol):
    """Reads one library's way of keeping a model."""

    def read(self, source: Path) -> Imported:
        """The model in a folder, or in a file whose config.json lies beside it."""


class Writer(Protocol):
    """Writes it."""

    def write(
        self,
        model: nn.Module,
        folder: Path,
        *,
        files: Mapping[str, bytes | Path],
        task: Task | None,
    ) -> Verified:
        """Writes a new folder; a ValueError says why where that library has no such model."""
