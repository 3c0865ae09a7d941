"""Models that classify: all that waits at once."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from regard.service.images import pixels_of
from regard.service.requests import (
    Classify,
    Label,
    Limits,
    Request,
    Scored,
)
from regard.service.served import Job, Served

if TYPE_CHECKING:
    from regard.task.classify import Classifier
    from regard.task.label import Labeler
EXAMPLES = 64
"""Images or texts that are classified at once."""


@dataclass(eq=False)
class Example:
    """An image or a text that is classified."""

    source: Any
    job: Job
    answer: Callable[[list[float]], None]


class Sorter(Served):
    """A model that gives labels, to all waiting examples at once."""

    def __init__(self, name: str, folder: Path, predictor: Any, version: int):
        super().__init__(name, folder, predictor, version)
        self.labels: list[str] = predictor.labels
        self._examples: deque[Example] = deque()

    @property
    def waiting(self) -> int:
        return len(self._examples)

    def _probabilities(self, sources: list[Any]) -> torch.Tensor:
        raise NotImplementedError

    def _sources(self, request: Request, limits: Limits) -> list[Any]:
        raise NotImplementedError

    def take(self, job: Job, limits: Limits) -> None:
        request: Any = job.request
        sources = self._sources(request, limits)
        top = max(1, min(request.top, len(self.labels)))
        found: list[tuple[Scored, ...] | None] = [None] * len(sources)

        def answer(n: int, row: list[float]) -> None:
            best = sorted(range(len(row)), key=lambda label: (-row[label], label))[:top]
            found[n] = tuple(Scored(self.labels[label], row[label]) for label in best)
            if all(one is not None for one in found):
                job.answer(tuple(found))

        for n, source in enumerate(sources):
            self._examples.append(
                Example(source, job, lambda row, n=n: answer(n, row))  # type: ignore[misc]
            )
        if not sources:
            job.answer(())

    def turn(self) -> int:
        super().turn()
        some: list[Example] = []
        while self._examples and len(some) < EXAMPLES:
            example = self._examples.popleft()
            if example.job.wanted():
                some.append(example)
        if some:
            self._classify(some)
        return len(some)

    def _classify(self, some: list[Example]) -> None:
        try:
            rows = self._probabilities([example.source for example in some]).tolist()
        except Exception as error:
            if len(some) == 1:
                some[0].job.fail(error)
                return
            for example in some:
                self._classify([example])
            return
        for example, row in zip(some, rows):
            example.answer(row)

    def give_up(self, error: Exception) -> None:
        super().give_up(error)
        while self._examples:
            self._examples.popleft().job.fail(error)


class ServedClassifier(Sorter):
    task, predictor = "classify", "Classifier"
    asked = (Classify,)

    def __init__(self, name: str, folder: Path, predictor: "Classifier", version: int):
        self.classifier = predictor
        super().__init__(name, folder, predictor, version)

    def _sources(self, request: Request, limits: Limits) -> list[Any]:
        assert isinstance(request, Classify)
        prepare = self.classifier.preparation
        return [pixels_of(image, prepare, limits) for image in request.images]

    @torch.inference_mode()
    def _probabilities(self, sources: list[Any]) -> torch.Tensor:
        weight = next(self.model.parameters())
        pixels = torch.from_numpy(np.stack(sources))
        x = self.classifier.preparation.inputs(pixels, weight)
        return cast(torch.Tensor, self.model(x)).float().softmax(-1).cpu()


class ServedLabeler(Sorter):
    task, predictor = "label", "Labeler"
    asked = (Label,)

    def __init__(self, name: str, folder: Path, predictor: "Labeler", version: int):
        self.labeler = predictor
        super().__init__(name, folder, predictor, version)

    def _sources(self, request: Request, limits: Limits) -> list[Any]:
        assert isinstance(request, Label)
        return list(request.texts)

    def _probabilities(self, sources: list[Any]) -> torch.Tensor:
        return self.labeler.probabilities(sources)
