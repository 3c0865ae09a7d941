"""The spec of a task, from which commands, `load`, model cards and help derive."""

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from inspect import signature
from typing import Any

import torch

from regard.checkpoint import Saved
from regard.config import Object, to_json
from regard.task.classes import Confusion
from regard.task.predictor import Predictor
from regard.task.settings import Preset


@dataclass(frozen=True)
class Evaluation:
    """A model's scores, and how they were measured."""

    scores: dict[str, float]
    signatures: dict[str, str] = field(default_factory=dict)
    """Signatures of scorers that have one, such as sacreBLEU's, by the name of the score."""
    problems: list[str] = field(default_factory=list)
    """Examples left out of the data, and the reason, one line each."""
    remarks: list[str] = field(default_factory=list)
    """What to know about the scores, one line each."""
    confusion: Confusion | None = None
    """The confusion matrix of a classifier."""


@dataclass(frozen=True)
class TaskSpec:
    """All that is known of a task from outside."""

    name: str
    summary: str
    """The data that it is trained on, in a few words."""
    config: type[Any]
    """Its settings, of which each becomes a flag."""
    preset: Callable[[Preset], Any]
    """The settings of a size."""
    build: Callable[..., Any]
    """From settings, a run's folder and progress to a `train.task.Task`."""
    predictor: Callable[[Saved], Predictor]
    """From a model's folder to the object that its users get."""
    evaluate: Callable[..., Evaluation]
    """Scores a folder's model; all but `folder`, `device` and `progress` are options."""
    example: str
    """A command that uses a trained model, with {run} for its folder."""
    on_device: Callable[[Any, torch.device], Any] = lambda config, device: config
    """What becomes of the tiny preset on a device: what two cores take is too little for a GPU."""

    def preset_on(self, size: Preset, device: torch.device) -> Any:
        """The settings of a size on a device."""
        config = self.preset(size)
        return self.on_device(config, device) if size == "tiny" else config

    @property
    def options(self) -> tuple[str, ...]:
        """The options of an evaluation."""
        others = ("folder", "device", "progress")
        return tuple(name for name in signature(self.evaluate).parameters if name not in others)

    def use(self, run: object) -> str:
        """The example for a model of one's own, ready to be run."""
        return self.example.replace("{run}", shlex.quote(str(run)))

    def about(self, config: Any, more: Mapping[str, Any] | None = None) -> Object:
        """The task section of a model's folder, without the settings of the training."""
        settings = to_json(config)
        del settings["training"]
        return {"name": self.name, "example": self.example, "config": settings, **(more or {})}


def on_gpu(**changes: Any) -> Callable[[Any, torch.device], Any]:
    """Other settings of training on a GPU, and none elsewhere."""

    def changed(config: Any, device: torch.device) -> Any:
        if device.type != "cuda":
            return config
        return replace(config, training=replace(config.training, **changes))

    return changed
