"""Checkpoints: evaluates the averaged weights, keeps the best model, and saves the last state."""

import copy
import math
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from regard import checkpoint
from regard.machine.processes import one_line
from regard.train import state
from regard.train.config import TrainingConfig
from regard.train.distributed import World
from regard.train.interrupt import Interrupted, Interrupts
from regard.train.optimizer import Adam, MovingAverage, Snapshots
from regard.train.run import Run
from regard.train.state import Kept, State
from regard.train.task import Sampled, Task

FINAL_SHARE = 0.05
"""The share of a training's time that scores on the whole validation set may take at its end."""

BESTS = "bests"
"""In a run's folder: the best models, by their step, where several are kept."""


class Checkpointer:
    """Writes `best/` and `last/`. All processes call its methods; the first one writes."""

    def __init__(self, task: Task, config: TrainingConfig, run: Run, world: World):
        """Called before the model is compiled or distributed."""
        self.task, self.config, self.run, self.world = task, config, run, world
        # A copy to evaluate and save, where weights are averaged or sharded.
        apart = world.first and bool(config.ema or config.average > 1 or world.sharded)
        self.model = copy.deepcopy(task.model).requires_grad_(False) if apart else task.model
        self.snapshots = Snapshots(run.folder / "snapshots", config.average)
        self.ema: MovingAverage | None = None
        self.saved: tuple[int, int] | None = None
        self._evaluation_seconds = math.inf
        """Seconds that the last evaluation took."""
        self.notice: str | None = None
        """A message to the user of a run that resumes."""

    def begin(
        self,
        now: State,
        saved: checkpoint.Saved | None,
        parameters: Mapping[str, nn.Parameter],
        optimizer: Adam,
    ) -> None:
        """Called when model and optimizer are ready; restores the saved state."""
        self.now, self.parameters, self.optimizer = now, parameters, optimizer
        if self.config.ema:
            self.ema = MovingAverage(parameters, self.config.ema)
        if saved is not None:
            state.read_tensors(self.run.folder, saved, now, self._tensors(), self.world)
            self.saved = now.step, now.evaluated
        if self.world.first:
            self.snapshots.rewind(now.step)
            self._keep(now.kept)
        self._check_best()

    def evaluate(
        self, interrupts: Interrupts, autocast: AbstractContextManager[Any]
    ) -> tuple[dict[str, float], bool] | None:
        """All scores, and whether they are the best; None where a signal interrupted it."""
        now, first = self.now, self.world.first
        self._gather(self.parameters if self.ema is None else self.ema.means)
        if first and self.config.average > 1:
            self.snapshots.add(now.step, self.model)
            self.snapshots.average(self.model)
        scores: dict[str, float] = {}
        if first:
            try:
                with interrupts.at_once(), torch.no_grad(), autocast:
                    begun = time.monotonic()
                    scores = self._scores(self.task.evaluate)
                    self._evaluation_seconds = time.monotonic() - begun
            except Interrupted:
                pass
        score = scores.get(self.task.score, math.nan)
        score, interrupted = self.world.broadcast([score, float(not scores)])
        if interrupted:
            return None
        better = math.isfinite(score) and (now.best is None or score > now.best)
        now.evaluated, now.waited = now.step, 0 if better else now.waited + 1
        if better:
            now.best, now.best_step, now.best_on_all = score, now.step, None
        if self.config.keep_best > 1 and math.isfinite(score):
            ranked = sorted([*now.kept, Kept(now.step, score)], key=lambda kept: -kept.score)
            now.kept = tuple(ranked[: self.config.keep_best])
        if first:
            if better:
                checkpoint.save(self.run.folder / "best", self.model, **self._beside())
            if any(best.step == now.step for best in now.kept):
                checkpoint.save(self._best_folder(now.step), self.model, **self._beside())
        return scores, better

    def evaluate_all(self, interrupts: Interrupts, autocast: AbstractContextManager[Any]) -> None:
        """Scores the best model on the whole validation set, where that takes little time."""
        now, task = self.now, self.task
        if self.world.first and isinstance(task, Sampled) and self._affordable(task):
            try:
                with self._best(), interrupts.at_once(), torch.no_grad(), autocast:
                    score = self._scores(task.evaluate_all)[task.score]
                now.best_on_all = score if math.isfinite(score) else None
            except Interrupted:
                pass
        self.world.broadcast([0.0])  # The others wait.

    def _affordable(self, task: Sampled) -> bool:
        now, sample = self.now, task.sample
        if now.best is None or now.best_on_all is not None or sample.count == sample.total:
            return False
        return self._evaluation_seconds * sample.total / sample.count <= FINAL_SHARE * now.seconds

    @contextmanager
    def _best(self) -> Iterator[None]:
        """The model has the best weights inside, and its own again afterwards."""
        weights = self.model.state_dict()
        current = {name: weight.clone() for name, weight in weights.items()}
        try:
            for name, weight in load_file(self.run.folder / "best" / checkpoint.WEIGHTS).items():
                weights[name].copy_(weight)
            yield
        finally:
            for name, weight in current.items():
                weights[name].copy_(weight)

    def _scores(self, evaluate: Callable[[nn.Module], Mapping[str, float]]) -> dict[str, float]:
        # Blocks are compiled for the shapes of training.
        compiled = any(module._compiled_call_impl for module in self.model.modules())
        try:
            with torch.compiler.set_stance("force_eager") if compiled else nullcontext():
                scores = dict(evaluate(self.model.eval()))
        finally:
            self.task.model.train()
        if self.task.score not in scores:
            names = ", ".join(scores) or "none"
            raise ValueError(f'the task gave no score "{self.task.score}", but: {names}')
        return scores

    def save(self) -> None:
        """Replaces `last/`."""
        now, world = self.now, self.world
        if world.first:
            self.run.metrics.sync()
        if world.sharded:
            self._gather(self.parameters)
        model = self.model if world.sharded else self.task.model
        state.write(self.run.folder, model, now, self._tensors(), world, **self._beside())
        self.saved = now.step, now.evaluated
        if world.first:
            self.snapshots.forget(now.step)
            self._keep(now.kept)

    def _check_best(self) -> None:
        """A best model that is lost or damaged is not spoken of any more, and chosen anew."""
        now, lost = self.now, 0.0
        if self.world.first and now.best is not None:
            try:
                checkpoint.check(self.run.folder / "best")
            except (ValueError, OSError) as error:
                self.notice = f"{one_line(error)}; the best model is chosen anew"
                lost = 1.0
        if self.world.broadcast([lost])[0]:
            now.best, now.best_step, now.waited, now.evaluated = None, 0, 0, -1
            now.best_on_all = None

    def _keep(self, kept: tuple[Kept, ...]) -> None:
        """Removes models that a run resumed from here would not have."""
        names = {self._best_folder(best.step).name for best in kept}
        for path in (self.run.folder / BESTS).glob("*"):
            if path.name not in names:
                shutil.rmtree(path, ignore_errors=True)

    def _best_folder(self, step: int) -> Path:
        return self.run.folder / BESTS / f"{step:09}"

    @torch.no_grad()
    def _gather(self, weights: Mapping[str, Tensor]) -> None:
        """Copies weights, which may be sharded, into the model that is evaluated and saved."""
        if self.model is self.task.model and not self.world.sharded:
            return
        into = dict(self.model.named_parameters())
        for name, weight in weights.items():
            whole = self.world.whole(weight)
            if self.world.first:
                into[name].copy_(whole)

    def _tensors(self) -> dict[str, Tensor]:
        return state.tensors(self.parameters, self.optimizer, self.ema)

    def _beside(self) -> dict[str, Any]:
        """The other content of a model's folder, beside the weights."""
        origin = f"Trained here: {self.now.step} steps of the run {self.run.name}."
        return {"files": self.task.files(), "task": self.task.about(), "origin": origin}
