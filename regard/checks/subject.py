"""The subject of a check: a model and examples."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from regard.checkpoint import Saved
from regard.checks import compute
from regard.checks.compute import Example, Rows


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
        """The reference for the other ways: the padded batch."""
        with torch.no_grad():
            return compute.padded(self.model, self.examples)

    @property
    def positions(self) -> int:
        return sum(map(len, self.logits))
