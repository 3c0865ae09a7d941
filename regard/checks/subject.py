"""The subject of a check: a model and examples."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from regard.checks import compute
from regard.checks.compute import Example, Rows
from regard.config import Object


@dataclass
class Subject:
    """One of Regard's models, and the examples that it is checked on."""

    model: Any
    examples: list[Example]
    task: Object = field(default_factory=dict)
    """The model's purpose, as config.json has it."""
    files: Mapping[str, Path] = field(default_factory=dict)
    """The tokenizer's files."""

    @cached_property
    def logits(self) -> Rows:
        """The reference for the other ways: the padded batch."""
        with torch.no_grad():
            return compute.padded(self.model, self.examples)

    @property
    def count(self) -> int:
        return len(self.examples)

    @property
    def positions(self) -> int:
        return sum(map(len, self.logits))
