"""The training loop: there is one, and every task goes through it.

    for each step n:
        seed with (seed, n)
        for each micro-batch: loss, backward                summed over micro-batches and processes
        gradient ← gradient / count, norm clipped           the count is the whole batch's
        Adam with lr · schedule(n), then the moving average of the weights
        now and then: evaluate, keep the best, save a checkpoint

A run is a folder (run.py). Started again it resumes from its last checkpoint, and on a CPU ends
with the same bits as if it had never been interrupted. The loop knows no task: a task
defines its batches, its loss and its score.
"""

import os
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from safetensors import SafetensorError

from regard.data.seeding import combined
from regard.synonyms import suggest_names
from regard.train import capture, distributed, optimizer, precision, report, schedule, sharing
from regard.train.checkpointer import Checkpointer
from regard.train.config import TrainingConfig
from regard.train.display import Display, default_display, duration
from regard.train.distributed import World
from regard.train.interrupt import Interrupts
from regard.train.loader import StepBatch, batches
from regard.train.meter import Meter
from regard.train.run import Run, repeatable
from regard.train.step import Numbers, Objective, Parts, Step
from regard.train.task import Fillable, Task
from regard.train.tracker import check_tracker


@dataclass(frozen=True, repr=False)
class Result:
    """The outcome of `fit`; it prints as one line."""

    step: int
    """The last step."""
    reason: str
    """The limit that ended the training: steps, epochs, minutes or patience."""
    best: float | None
    """The best score while training; None if no score was finite."""
    best_step: int
    """The step of the best score."""
    seconds: float
    folder: Path
    """The run's folder; `best/` in it holds the model with the best score."""
    summary: str | None = None
    """The best score in words: on the whole validation set, or on a part."""

    def __repr__(self) -> str:
        return (
            f"{self.folder}: {self.summary or 'no finite score'}; ended at step {self.step:,} "
            f"after {duration(self.seconds)} ({self.reason})"
        )


@suggest_names
def fit(
    task: Task,
    config: TrainingConfig,
    folder: str | os.PathLike[str],
    *,
    display: Display | None = None,
) -> Result:
    """Trains the model of a task until the first limit of the config is reached.

    The task defines the batches, the loss and the score: `Supervised` for tensors, or an object of
    your own with the methods of `regard.train.task.Task`. The run is written to `folder`: the
    model with the best score in `best/`, the last checkpoint, the metrics and the config. The same
    call resumes an interrupted run, on a CPU with the same bits. Ctrl-C and SIGTERM save a
    checkpoint first. `display` shows progress; the default is a progress bar on a terminal, and
    lines elsewhere.

    >>> import torch
    >>> from regard import Supervised, TrainingConfig, fit
    >>> x = torch.randn(200, 3)
    >>> y = (x.sum(1) > 0).long()
    >>> def accuracy(logits, y):
    ...     return (logits.argmax(-1) == y).float().mean()
    >>> task = Supervised(
    ...     torch.nn.Linear(3, 2), (x[50:], y[50:]), (x[:50], y[:50]),
    ...     loss=torch.nn.functional.cross_entropy, score=accuracy,
    ... )
    >>> config = TrainingConfig(epochs=3, lr=0.1, warmup=1, device="cpu", tensorboard=False)
    >>> result = fit(task, config, "runs/sums")
    >>> result.step, result.reason, result.best > 0.7
    (9, 'epochs', True)
    """
    if not isinstance(task, Task):
        raise ValueError(
            "fit takes a task, such as Supervised(model, train, valid, loss=…, score=…), not "
            f"{type(task).__name__}"
        )
    if not isinstance(config, TrainingConfig):
        raise ValueError(f"config must be a TrainingConfig, not {type(config).__name__}")
    check_tracker(config.tracker)
    with distributed.processes(config) as world, Run(Path(folder), world) as run:
        try:
            return _Fit(task, config, run, world, display).train()
        except (OSError, SafetensorError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ValueError(f"{run.folder}: {reason}; {run.intact()}") from error


class _Fit:
    def __init__(
        self, task: Task, config: TrainingConfig, run: Run, world: World, display: Display | None
    ):
        self.task, self.config, self.run, self.world = task, config, run, world
        self.total = _last_step(task, config)
        self.dtype = precision.dtype(config, world, task)
        sampled = run.describe(task.about(), task.model, config, task.run_files())
        self.state, saved = run.resume(task.model)
        self.notices = [precision.changed(config, self.dtype, self.state), sampled]
        self.state.precision = precision.NAMES[self.dtype]
        model = task.model.to(world.device).train()
        self.checkpointer = Checkpointer(task, config, run, world)
        self.display: Display = (display or default_display()) if world.first else Display()
        refused = capture.refusal(task, config, world)
        self.size = None if refused else capture.capacity(cast(Fillable, task), config, world)
        compiled = precision.compiled(model, config, world.device, captured=refused is None)
        objective = distributed.spread(Objective(task), world)
        parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self.optimizer = optimizer.make(model, config)
        self.scaler = precision.scaler(self.dtype, world, self.state)
        self.checkpointer.begin(self.state, saved, parameters, self.optimizer)
        self.notices.append(self.checkpointer.notice)
        self.ema = self.checkpointer.ema
        parts = Parts(
            task,
            objective,
            parameters,
            self.optimizer,
            self.scaler,
            self.ema,
            config,
            world,
            self.dtype,
        )
        self.step = self._made_step(parts)
        self.autocast = parts.autocast
        run.rewind(self.state.step, config)
        self.meter = Meter(self.state, config, self.total, task.unit, world)
        self.interrupts = Interrupts()
        self.stop: str | None = None
        how = [str(self.dtype).removeprefix("torch."), compiled]
        if world.device.type == "cuda":
            how.append(f"not captured ({refused})" if refused else "captured in CUDA graphs")
        self.opening = (
            f"{run.folder}: {'resumes at' if saved else 'begins at'} step {self.state.step} on "
            f"{world}, in {', '.join(how)}"
        )

    def _made_step(self, parts: Parts) -> Step:
        if self.size is not None:
            return capture.CapturedStep(parts, self.size, self.display.say)
        shared = sharing.shares(self.config, self.world.device, self.world.size)
        return sharing.SharedStep(parts) if shared else Step(parts)

    def train(self) -> Result:
        config, now, checkpointer = self.config, self.state, self.checkpointer
        steps = batches(self.task, config, self.world, now, self.size)
        with self.interrupts, self.display, closing(steps), self.step.running():
            self.display.say(self.opening)
            if config.minutes is not None and now.step and now.seconds >= config.minutes * 60:
                self.stop = "minutes"  # a finished run stays finished
            for notice in filter(None, self.notices):
                self.display.say(notice)
            if checkpointer.saved is None and _fine_tunes(self.task):
                self.display.say("the score before the first step:")
                self._evaluate()
            if checkpointer.saved is None:
                self._save()  # A folder that cannot be written should fail now, not after the work.
            while True:
                upcoming = next(steps, None)
                if upcoming is None:
                    self.stop = self.stop or ("steps" if now.step == config.steps else "epochs")
                due = self.stop is not None or now.step % config.evaluate_every == 0
                if due and now.evaluated < now.step and self.stop != "interrupted":
                    self._evaluate()
                if config.patience is not None and now.waited >= config.patience:
                    self.stop = self.stop or "patience"
                if self.stop is not None and self.stop != "interrupted":
                    checkpointer.evaluate_all(self.interrupts, self.autocast())
                    self.meter.pause()
                due = self.stop is not None or now.step % config.save_every == 0
                if due and checkpointer.saved != (now.step, now.evaluated):
                    self._save()
                if self.stop is not None or upcoming is None:
                    break
                self._step(upcoming)
            self.run.report(self.task, now, config, self.stop)
            if ending := self.meter.summary():
                self.display.say(f"{self.run.folder}: {ending}")
            if self.stop == "interrupted":
                folder, resume = self.run.folder, "the same call of fit"
                if repeatable(self.task.about()):
                    resume = f"regard train --resume {folder}"
                self.display.say(f"{folder}: saved at step {now.step}; go on with: {resume}")
        self.interrupts.pass_on()
        reason = self.stop or "interrupted"
        return Result(
            now.step,
            reason,
            now.best,
            now.best_step,
            now.seconds,
            self.run.folder,
            report.best(self.task, now),
        )

    def _step(self, batch: StepBatch) -> None:
        now, world, last = self.state, self.world, len(batch.parts) - 1
        self.step.begin(self._numbers(now.step + 1))
        for n, part in enumerate(batch.parts):
            torch.manual_seed(combined(self.config.seed, now.step + 1, world.rank, n))
            self.step.backward(part, n, n == last)
        row = self.step.update()
        now.step, now.epoch, now.position = now.step + 1, batch.epoch, batch.position + 1
        self.meter.add(row)
        # Reading figures synchronises the device, so it is done now and then.
        if world.device.type == "cpu" or now.step % self.config.log_every == 0:
            self._tell(wait=world.device.type == "cpu")
        self._check_stop()

    def _numbers(self, step: int) -> Numbers:
        caught, late, elapsed = self.meter.flags(self.interrupts.caught)
        ema = 0.0 if self.ema is None else self.ema.weight(step)
        return Numbers(self._lr(step), ema, caught, late, elapsed)

    def _check_stop(self) -> None:
        self.meter.look(self.interrupts.caught)
        if self.meter.caught or self.meter.late:
            self.stop = "interrupted" if self.meter.caught else "minutes"

    def _tell(self, wait: bool = True) -> None:
        """Reads the figures of the steps since the last time, and reports them.

        Without `wait`, of those that the device has done by now.
        """
        try:
            progress = self.meter.read(self._lr, self.scaler.is_enabled(), wait)
        except ValueError as error:
            raise ValueError(
                f"{error}; {self.run.intact()}; try a lower training.lr, a longer training.warmup "
                "or a smaller training.clip"
            ) from None
        if progress is not None:
            self.display.progress(progress)
            if progress.step % self.config.log_every == 0:
                self.run.record(self.meter.line(progress))

    def _evaluate(self) -> None:
        self._tell()
        self._check_stop()
        judged = self.checkpointer.evaluate(self.interrupts, self.autocast())
        if judged is None:  # The run evaluates again when it resumes.
            self.stop = "interrupted"
            return
        scores, better = judged
        self.run.record({"step": self.state.step, **scores})
        self.display.scores(self.state.step, scores, better)
        self.run.report(self.task, self.state, self.config, None)
        self.meter.pause()

    def _save(self) -> None:
        self._tell()
        precision.save_scaler(self.scaler, self.state)
        self.checkpointer.save()
        self.meter.pause()

    def _lr(self, step: int) -> float:
        config = self.config
        width: int = getattr(getattr(self.task.model, "config", None), "width", 1)
        return config.lr * schedule.factor(
            config.schedule,
            step,
            total=self.total,
            elapsed=None if config.minutes is None else self.meter.elapsed,
            warmup=config.warmup,
            width=width,
        )


def _fine_tunes(task: Task) -> bool:
    """True if a training begins with a trained model, whose score is of interest."""
    settings = task.about().get("config")
    return isinstance(settings, dict) and settings.get("start") is not None


def _last_step(task: Task, config: TrainingConfig) -> int | None:
    """The last step; None if minutes or patience end the training."""
    if config.steps is None and config.epochs is None and config.minutes is None:
        raise ValueError("the training has no end; set steps, epochs or minutes")
    ends = [] if config.steps is None else [config.steps]
    if config.epochs is not None:
        ends.append(config.epochs * len(task.plan(0)))
    return min(ends, default=None)
