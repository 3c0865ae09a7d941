"""The loop: what a step computes, when it evaluates, saves and stops, and how it goes on."""

import itertools
import json
import math
import os
import shutil
import signal
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from regard import checkpoint
from regard.config import from_json
from regard.model.block import Block
from regard.train import checkpointer, meter, precision, report, state
from regard.train.config import TrainingConfig
from regard.train.display import Display, Progress, duration
from regard.train.fit import Result, fit
from regard.train.optimizer import split
from regard.train.task import Sample
from tests.processes import HANG
from tests.train.samples import Backwards, Batch, settings

pytestmark = pytest.mark.usefixtures("unchecked")


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _no_curves(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take longer to draw than such a run."""
    monkeypatch.setattr(report, "draw", lambda *_: False)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing has disturbed."""
    folder = tmp_path_factory.mktemp("whole")
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "draw", lambda *_: False)
        train(folder)
    return folder


def train(folder: Path, task: Backwards | None = None, **changed: Any) -> Result:
    return fit(task or Backwards(), settings(**changed), folder, display=Display())


def weights(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(one[name].equal(other[name]) for name in one)


def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def losses(run: Path) -> list[float]:
    return [line["loss"] for line in metrics(run) if "loss" in line]


class Told(Display):
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.words: list[str] = []
        self.moments: list[Progress] = []
        self.evaluations: list[tuple[int, Mapping[str, float], bool]] = []

    def progress(self, now: Progress) -> None:
        self.moments.append(now)

    def scores(self, step: int, scores: Mapping[str, float], best: bool) -> None:
        self.evaluations.append((step, scores, best))

    def say(self, words: str) -> None:
        self.words.append(words)


def test_a_run_and_its_folder(tmp_path: Path) -> None:
    run, told = tmp_path / "run", Told()
    result = fit(Backwards(), settings(), run, display=told)
    assert (result.step, result.reason, result.folder) == (11, "steps", run)
    assert [step for step, _, _ in told.evaluations] == [4, 8, 11]
    best = max(scores["accuracy"] for _, scores, _ in told.evaluations)
    assert result.best == best
    assert "begins at step 0 on cpu, in float32, not compiled" in told.words[0]
    assert [moment.step for moment in told.moments] == list(range(1, 12))
    assert told.moments[-1].left == 0

    config = json.loads((run / "config.json").read_text())
    assert (config["kind"], config["task"]) == ("run", {"kind": "backwards", "size": 7})
    assert from_json(TrainingConfig, config["training"]) == settings()
    lines = metrics(run)
    assert [line["step"] for line in lines if "loss" in line] == [2, 4, 6, 8, 10]
    assert lines[0].keys() == {"step", "epoch", "loss", "lr", "norm", "speed", "seconds"}
    assert losses(run)[-1] < losses(run)[0]
    assert (
        f"best: accuracy {best:.4g} at step {result.best_step}" in (run / "report.md").read_text()
    )
    for name in ("best", "last"):
        saved = checkpoint.load(run / name)
        assert saved.task == {"kind": "backwards", "size": 7}
        assert saved.files["tokenizer.json"].read_bytes() == b"{}"
    # The best is what it was when it was judged.
    kept = checkpoint.load(run / "best").model
    with torch.no_grad():
        assert Backwards().evaluate(kept)["accuracy"] == best


def test_a_step_by_hand(tmp_path: Path) -> None:
    """Three steps of Adam on the mean loss, with the gradient clipped, in plain torch."""
    config = settings(steps=3, clip=0.5, accumulate=3)
    train(tmp_path, Backwards(dropout=0.0), steps=3, clip=0.5, accumulate=3)
    task = Backwards(dropout=0.0)
    decayed, others = split(task.model)
    adam = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}],
        betas=config.betas,
        eps=config.epsilon,
    )
    for step, indices in enumerate(task.plan(0)[:3], 1):
        loss, count = task.loss(task.batch(indices, step))
        adam.zero_grad()
        (loss / count).backward()
        nn.utils.clip_grad_norm_(task.model.parameters(), 0.5)
        for group in adam.param_groups:
            group["lr"] = config.lr * step / config.warmup
        adam.step()
    have = weights(tmp_path / "last")
    for name, parameter in task.model.named_parameters():
        if name.endswith("key.bias"):
            continue  # Its gradient is zero but for rounding, which Adam makes as large as others.
        torch.testing.assert_close(have[name], parameter.detach(), rtol=1e-4, atol=1e-5)


def test_parts_change_nothing(tmp_path: Path) -> None:
    """Not even where there are more parts than examples."""
    for name, parts in (("one", 1), ("parts", 9)):
        train(tmp_path / name, Backwards(dropout=0.0), steps=3, accumulate=parts, log_every=1)
    np.testing.assert_allclose(losses(tmp_path / "one"), losses(tmp_path / "parts"), rtol=1e-5)


@pytest.mark.parametrize(
    "changed", [{"ema": 0.9}, {"average": 2}, {"precision": "fp16"}, {"optimizer": "muon"}]
)
def test_goes_on_exactly(tmp_path: Path, changed: dict[str, Any]) -> None:
    # It stops in the middle of a window of metrics.
    for steps in (5, 11):
        result = train(tmp_path / "parts", steps=steps, **changed)
        assert result.step == steps
    train(tmp_path / "whole", **changed)
    one, other = tmp_path / "whole" / "last", tmp_path / "parts" / "last"
    assert same(weights(one), weights(other))
    assert same(*(load_file(last / "training.safetensors") for last in (one, other)))
    assert losses(tmp_path / "whole") == losses(tmp_path / "parts")


def test_another_seed_is_another_run(tmp_path: Path) -> None:
    train(tmp_path / "a", steps=3)
    train(tmp_path / "b", steps=3)
    train(tmp_path / "c", steps=3, seed=1)
    a, b, c = (weights(tmp_path / name / "last") for name in "abc")
    assert same(a, b)
    assert not same(a, c)


def test_dropout_differs_from_step_to_step(tmp_path: Path) -> None:
    seen = []

    class Same(Backwards):
        def plan(self, epoch: int) -> list[np.ndarray]:
            return [np.arange(7)] * 3

        def loss(self, batch: Batch) -> tuple[Tensor, int]:
            seen.append(torch.initial_seed())
            return super().loss(batch)

    train(tmp_path, Same(), steps=5, accumulate=2)
    assert len(set(seen)) == len(seen) == 10


def test_finished_is_finished(tmp_path: Path) -> None:
    first = train(tmp_path)
    before = weights(tmp_path / "last"), (tmp_path / "metrics.jsonl").read_bytes()
    task = Backwards()
    again = train(tmp_path, task)
    assert (again.step, again.best, again.best_step) == (11, first.best, first.best_step)
    assert task.evaluations == 0
    assert same(weights(tmp_path / "last"), before[0])
    assert (tmp_path / "metrics.jsonl").read_bytes() == before[1]


def test_what_ends_it(tmp_path: Path) -> None:
    assert train(tmp_path / "epochs", steps=None, epochs=2).reason == "epochs"
    assert len({line["epoch"] for line in metrics(tmp_path / "epochs") if "loss" in line}) == 2
    assert json.loads((tmp_path / "epochs/last/training.json").read_text())["step"] == 10
    late = train(tmp_path / "minutes", steps=None, minutes=1e-6)
    assert (late.reason, late.step) == ("minutes", 1)
    before = (tmp_path / "minutes" / "best" / "model.safetensors").read_bytes()
    again = train(tmp_path / "minutes", steps=None, minutes=1e-6)
    assert (again.reason, again.step) == ("minutes", 1)  # a finished run stays finished
    assert (tmp_path / "minutes" / "best" / "model.safetensors").read_bytes() == before

    class Stuck(Backwards):
        def evaluate(self, model: nn.Module) -> dict[str, float]:
            return {"accuracy": 0.5}

    stuck = train(tmp_path / "patience", Stuck(), patience=1)
    assert (stuck.reason, stuck.step, stuck.best_step) == ("patience", 8, 4)
    assert train(tmp_path / "patience", Stuck(), patience=1).step == 8
    assert train(tmp_path / "patience", Stuck(), patience=2).step == 11
    with pytest.raises(ValueError, match="the training has no end; set steps, epochs or minutes"):
        train(tmp_path / "never", steps=None)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_lower_precision_learns(tmp_path: Path, precision: str) -> None:
    train(tmp_path, precision=precision)
    assert losses(tmp_path)[-1] < losses(tmp_path)[0]
    assert all(tensor.dtype == torch.float32 for tensor in weights(tmp_path / "last").values())


def test_blocks_are_compiled_where_it_pays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []
    monkeypatch.setattr(Block, "compile", lambda block, **how: compiled.append(how))
    for choice, blocks in (("no", 0), ("auto", 0), ("yes", 2)):
        fit(Backwards(), settings(compile=choice, steps=1), tmp_path / choice, display=Display())
        assert compiled == [{"dynamic": True}] * blocks
    cuda = torch.device("cuda")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    compile = partial(precision.compiled, Backwards().model, TrainingConfig(), cuda)
    assert compile(captured=False) == "2 blocks compiled"
    assert "not where steps are captured" in compile(captured=True)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "Triton is not installed" in compile(captured=False)


def test_averages_are_what_is_kept(tmp_path: Path) -> None:
    train(tmp_path / "raw", steps=8)
    train(tmp_path / "mean", steps=8, average=2)
    train(tmp_path / "ema", steps=8, ema=0.9)
    last = weights(tmp_path / "raw" / "last")
    assert same(weights(tmp_path / "mean" / "last"), last)
    assert same(weights(tmp_path / "ema" / "last"), last)
    stored = [load_file(path) for path in sorted((tmp_path / "mean/snapshots").iterdir())]
    assert len(stored) == 2
    best = weights(tmp_path / "mean" / "best")
    for name in best:
        torch.testing.assert_close(best[name], (stored[0][name] + stored[1][name]) / 2)
    assert not same(weights(tmp_path / "ema" / "best"), last)


# What goes wrong


def test_a_loss_that_is_no_number(tmp_path: Path, whole: Path) -> None:
    class Bad(Backwards):
        bad = True

        def loss(self, batch: Batch) -> tuple[Tensor, int]:
            loss, count = super().loss(batch)
            self.steps = getattr(self, "steps", 0) + 1
            return (loss * torch.nan if self.bad and self.steps == 8 else loss), count

    with pytest.raises(ValueError, match=r"the loss is nan at step 8.*last holds .*; try a low"):
        train(tmp_path, Bad())
    saved = json.loads((tmp_path / "last" / "training.json").read_text())
    assert saved["step"] == 6
    Bad.bad = False
    train(tmp_path, Bad())
    assert same(weights(tmp_path / "last"), weights(whole / "last"))


@pytest.mark.parametrize("place", ["checkpoint", "state", "metrics"])
def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    train(tmp_path, steps=3)
    before = weights(tmp_path / "last")

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        match place:
            case "checkpoint":
                patch.setattr(checkpoint, "save_file", full)
            case "state":
                patch.setattr(state, "save_file", full)
            case "metrics":
                patch.setattr(report.Metrics, "append", full)
        with pytest.raises(ValueError, match="No space left on device") as caught:
            train(tmp_path)
    assert "\n" not in str(caught.value)
    assert str(tmp_path / "last") in str(caught.value) or "best was not saved" in str(caught.value)
    assert same(weights(tmp_path / "last"), before)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith((".last", ".training"))]


@pytest.mark.parametrize(
    ("number", "error", "where"),
    [(signal.SIGINT, KeyboardInterrupt, "step"), (signal.SIGTERM, SystemExit, "evaluation")],
)
def test_signals_save(
    tmp_path: Path, whole: Path, number: int, error: type[BaseException], where: str
) -> None:
    class Stopped(Backwards):
        def loss(self, batch: Batch) -> tuple[Tensor, int]:
            self.steps = getattr(self, "steps", 0) + 1
            if where == "step" and self.steps == 5:
                os.kill(os.getpid(), number)
            return super().loss(batch)

        def evaluate(self, model: nn.Module) -> dict[str, float]:
            if where == "evaluation" and self.steps == 8:
                os.kill(os.getpid(), number)
                time.sleep(HANG)
            return super().evaluate(model)

    before = signal.getsignal(number)
    with pytest.raises(error) as caught:
        train(tmp_path / "stopped", Stopped())
    if number == signal.SIGTERM:
        assert caught.value.args == (143,)
    assert signal.getsignal(number) == before
    saved = json.loads((tmp_path / "stopped/last/training.json").read_text())
    assert saved["step"] == (5 if where == "step" else 8)
    assert saved["evaluated"] == 4
    train(tmp_path / "stopped")
    for name in ("best", "last"):
        assert same(weights(tmp_path / "stopped" / name), weights(whole / name))
    times = ("speed", "seconds")
    one, other = (
        [{k: v for k, v in line.items() if k not in times} for line in metrics(run)]
        for run in (tmp_path / "stopped", whole)
    )
    assert one == other


def test_a_run_begun_otherwise(tmp_path: Path) -> None:
    train(tmp_path, steps=3)
    with pytest.raises(
        ValueError,
        match=r"run with other settings: training.lr is 0.1 instead of 0.003; continue it with the "
        "settings it has, or name another folder",
    ):
        train(tmp_path, lr=0.1)
    with pytest.raises(ValueError, match=r"task.size is 5 instead of 7"):
        train(tmp_path, Backwards(batch=5))
    assert train(tmp_path, steps=4).step == 4
    with pytest.raises(ValueError, match="holds something else than a run"):
        train(tmp_path / "best", steps=3)


def test_a_run_of_the_command_line_is_continued_by_a_command(tmp_path: Path) -> None:
    class Named(Backwards):
        def about(self) -> dict[str, Any]:
            return {"name": "backwards", "config": {}}

    train(tmp_path, Named(), steps=3)
    with pytest.raises(ValueError, match=f"; regard train --resume {tmp_path} continues it"):
        train(tmp_path, Named(), lr=0.1)


# Precision


@pytest.mark.parametrize("fast", [True, False])
def test_auto_is_bf16_on_a_cpu_for_tasks_that_say_so(
    tmp_path: Path, fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Mixed(Backwards):
        bfloat16_on_cpu = True

    monkeypatch.setattr(precision, "multiplies_bfloat16", lambda kind: fast)
    for task, name, words in (
        (Mixed(), "mixed", "bfloat16" if fast else "float32"),
        (Backwards(), "plain", "float32"),
    ):
        told = Told()
        fit(task, settings(steps=2), tmp_path / name, display=told)
        assert f"on cpu, in {words}, " in told.words[0]
        # The setting stays what it was, and what ran is kept beside it.
        config = json.loads((tmp_path / name / "config.json").read_text())
        assert config["training"]["precision"] == "auto"
        ran = "fp32" if words == "float32" else "bf16"
        numbers = json.loads((tmp_path / name / "last/training.json").read_text())
        assert numbers["precision"] == ran
        assert f", in {ran}\n" in (tmp_path / name / "report.md").read_text()


def test_a_run_that_resumes_in_another_precision_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Mixed(Backwards):
        bfloat16_on_cpu = True

    monkeypatch.setattr(precision, "multiplies_bfloat16", lambda kind: True)
    train(tmp_path, Mixed(), steps=2)
    monkeypatch.setattr(precision, "multiplies_bfloat16", lambda kind: False)
    told = Told()
    fit(Mixed(), settings(steps=3), tmp_path, display=told)
    assert told.words[1] == (
        "the first 2 steps were computed in bf16, and those to come are in fp32 (precision auto on "
        "this machine); set training.precision to bf16 to go on as before"
    )
    told = Told()
    fit(Mixed(), settings(steps=4, precision="fp32"), tmp_path, display=told)
    assert not any("were computed in" in words for words in told.words)


# The whole validation set


class Worse(Backwards):
    """Each evaluation is worse than the one before."""

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        super().evaluate(model)
        return {"accuracy": 1 / self.evaluations}


class Parts(Worse):
    """Scores a part of its validation set while training."""

    sample = Sample(3, 7, "numbers", "greedy search")

    def evaluate_all(self, model: nn.Module) -> dict[str, float]:
        assert not model.training
        self.seen = {name: value.clone() for name, value in model.state_dict().items()}
        return {"accuracy": 0.123}


@pytest.mark.parametrize("ema", [0.0, 0.5])
def test_the_best_model_is_scored_on_the_whole_validation_set_at_the_end(
    tmp_path: Path, ema: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(tmp_path / "plain", Worse(), steps=8, ema=ema)
    monkeypatch.setattr(checkpointer, "FINAL_SHARE", math.inf)
    task, run = Parts(), tmp_path / "run"
    result = fit(task, settings(steps=8, ema=ema), run, display=Display())
    kept = weights(run / "best")
    assert result.best_step == 4
    assert same({name: task.seen[name] for name in kept}, kept)
    # Training goes on with its own weights.
    assert same(weights(run / "last"), weights(tmp_path / "plain/last"))
    assert not same(weights(run / "last"), kept)
    words = (
        f"accuracy 0.123 at step {result.best_step} (greedy search, all 7 validation numbers; it "
        f"was chosen by {result.best:.4g} on 3 of them)"
    )
    assert result.summary == words
    assert f"- best: {words}, in best/\n" in (run / "report.md").read_text()
    # A finished run knows it.
    assert fit(task, settings(steps=8, ema=ema), run, display=Display()).summary == words


def test_a_whole_validation_set_that_takes_too_long_is_not_scored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpointer, "FINAL_SHARE", 0.0)
    result = fit(Parts(), settings(steps=8), tmp_path, display=Display())
    assert result.summary == (
        f"accuracy {result.best:.4g} at step {result.best_step} (greedy search, 3 of 7 validation "
        "numbers)"
    )


def test_one_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing curves takes time, too, after the last step."""
    monkeypatch.setattr(report, "draw", lambda *_: bool(time.sleep(1.5)))
    told = Told()
    result = fit(Backwards(), settings(steps=8), tmp_path / "run", display=told)
    assert f" of {duration(result.seconds)} went into evaluation" in told.words[-1]
    again = Told()
    fit(Backwards(), settings(steps=11), tmp_path / "run", display=again)
    assert " since step 8 went into evaluation" in again.words[-1]


def test_one_at_a_time(tmp_path: Path) -> None:
    read, write = os.pipe()
    tmp_path.joinpath(".lock").touch()
    if not (child := os.fork()):
        import fcntl

        lock = os.open(tmp_path / ".lock", os.O_RDWR)
        fcntl.lockf(lock, fcntl.LOCK_EX)
        os.write(write, b"!")
        time.sleep(HANG)
        os._exit(0)
    try:
        os.read(read, 1)
        with pytest.raises(ValueError, match="is being trained by another process; wait for it"):
            train(tmp_path)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_task_without_its_score(tmp_path: Path) -> None:
    class Odd(Backwards):
        score = "BLEU"

    with pytest.raises(ValueError, match='the task gave no score "BLEU", but: accuracy, worse'):
        train(tmp_path, Odd())


def test_what_a_task_raises_comes_out(tmp_path: Path) -> None:
    class Broken(Backwards):
        def batch(self, indices: np.ndarray, step: int) -> Batch:
            if step == 4:
                raise ValueError("line 4 is broken")
            return super().batch(indices, step)

    with pytest.raises(ValueError, match="line 4 is broken"):
        train(tmp_path, Broken())

    class Empty(Backwards):
        def plan(self, epoch: int) -> list[np.ndarray]:
            return []

    with pytest.raises(ValueError, match="epoch 0 has no batch; there must be data to train on"):
        train(tmp_path / "empty", Empty())


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"lr": 0.0}, r"lr \(0.0\) must be above 0"),
        ({"accumulate": 0}, r"accumulate \(0\) must be at least 1"),
        ({"warmup": -1}, r"warmup \(-1\) must be at least 0"),
        ({"patience": 0}, r"patience \(0\) must be at least 1"),
        ({"betas": (0.9, 1.0)}, r"betas \(\(0.9, 1.0\)\) must be two numbers from 0 to below 1"),
        ({"smoothing": 1.0}, r"smoothing \(1.0\) must be at least 0 and below 1"),
        ({"ema": 0.9, "average": 3}, r"ema \(0.9\) and average \(3\) both average the weights"),
    ],
)
def test_settings_are_checked(changed: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        settings(**changed)


def test_a_device_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r'device \("toaster"\) is not one that torch knows'):
        train(tmp_path, device="toaster")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match=r'device \("cuda"\) needs a GPU'):
            train(tmp_path, device="cuda")


def test_a_time_limit_ends_the_schedule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = itertools.count()
    monkeypatch.setattr(meter.time, "monotonic", lambda: float(next(now)))
    train(tmp_path, steps=None, minutes=2.0, schedule="cosine", warmup=1, log_every=1)
    rates = [line["lr"] for line in metrics(tmp_path) if "lr" in line]
    assert len(rates) > 5
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] < 0.1 * rates[0]


def test_several_best_models_are_kept(tmp_path: Path) -> None:
    class Scored(Backwards):
        def evaluate(self, model: nn.Module) -> dict[str, float]:
            self.evaluations += 1
            return {"accuracy": [0.3, 0.5, 0.4, 0.1][self.evaluations - 1]}

    train(tmp_path, Scored(), steps=8, evaluate_every=2, keep_best=2)
    assert sorted(path.name for path in (tmp_path / "bests").iterdir()) == [
        "000000004",
        "000000006",
    ]
    assert same(weights(tmp_path / "bests/000000004"), weights(tmp_path / "best"))
    state = json.loads((tmp_path / "last/training.json").read_text())
    assert [kept["score"] for kept in state["kept"]] == [0.5, 0.4]


@pytest.mark.parametrize("lost", ["missing", "damaged"])
def test_a_lost_best_model_is_chosen_anew(tmp_path: Path, lost: str) -> None:
    whole = train(tmp_path, steps=8)
    assert whole.best is not None
    if lost == "missing":
        shutil.rmtree(tmp_path / "best")
    else:
        file = tmp_path / "best/model.safetensors"
        file.write_bytes(bytes(reversed(file.read_bytes())))
    told = Told()
    result = fit(Backwards(), settings(steps=8), tmp_path, display=told)
    assert any("the best model is chosen anew" in words for words in told.words)
    assert result.best_step == 8
    assert same(weights(tmp_path / "best"), weights(tmp_path / "last"))


def test_fine_tuning_says_the_score_it_begins_with(tmp_path: Path) -> None:
    class Begun(Backwards):
        def about(self) -> dict[str, Any]:
            return {**super().about(), "config": {"start": "/a/model"}}

    told = Told()
    fit(Begun(), settings(steps=4), tmp_path / "run", display=told)
    assert [step for step, _, _ in told.evaluations] == [0, 4]
    assert [line["step"] for line in metrics(tmp_path / "run") if "accuracy" in line] == [0, 4]
