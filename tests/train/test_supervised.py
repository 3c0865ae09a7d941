"""Training from Python: any model and tensors through `fit`, and curves for other trackers."""

import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard import checkpoint
from regard.train.config import TrainingConfig
from regard.train.display import Display
from regard.train.fit import fit
from regard.train.supervised import Supervised

SHORT = TrainingConfig(epochs=4, lr=0.03, warmup=2, tensorboard=False, device="cpu", log_every=5)


def accuracy(output: Tensor, target: Tensor) -> Tensor:
    return (output.argmax(-1) == target).float().mean()


def task(**options: Any) -> Supervised:
    x = torch.randn(120, 7, generator=torch.Generator().manual_seed(0))
    y = (x.sum(1) > 0).long()
    torch.manual_seed(0)
    return Supervised(
        nn.Linear(7, 2), (x[:97], y[:97]), (x[97:], y[97:]), loss=F.cross_entropy,
        score=accuracy, batch=10, **options,
    )  # fmt: skip


def test_any_module_learns_and_is_loaded_back(tmp_path: Path) -> None:
    made = task()
    result = fit(made, SHORT, tmp_path / "run", display=Display())
    assert result.step == 4 * 10  # the last batch of an epoch has seven
    assert result.best is not None
    assert result.best > 0.8
    loaded = checkpoint.load(tmp_path / "run" / "best", model=nn.Linear(7, 2)).model
    loaded.eval()
    with torch.no_grad():
        assert made.evaluate(loaded)["accuracy"] == pytest.approx(result.best)


def test_a_run_resumes_with_the_same_bits(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    fit(task(), SHORT, whole, display=Display())
    fit(task(), TrainingConfig(**{**vars(SHORT), "epochs": None, "steps": 17}), parts,
        display=Display())  # fmt: skip
    fit(task(), SHORT, parts, display=Display())
    first, second = (folder / "last" / "model.safetensors" for folder in (whole, parts))
    assert first.read_bytes() == second.read_bytes()


class Constant(nn.Module):
    """Rises from 0, so that a score of its fall is best at first."""

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.value + 0 * x


def test_a_module_of_ones_own_resumes_with_its_best(tmp_path: Path) -> None:
    def train(name: str, steps: int) -> float | None:
        rows = torch.zeros(23, 1), torch.ones(23, 1)
        score = lambda output, target: -output.mean()  # noqa: E731
        made = Supervised(Constant(), rows, rows, loss=F.mse_loss, score=score)
        config = TrainingConfig(
            **{**vars(SHORT), "epochs": None, "steps": steps, "evaluate_every": 5}
        )
        return fit(made, config, tmp_path / name, display=Display()).best

    best = train("parts", 15)
    assert train("parts", 30) == best == train("whole", 30)
    parts, whole = (tmp_path / name / "best/model.safetensors" for name in ("parts", "whole"))
    assert parts.read_bytes() == whole.read_bytes()


def test_every_example_has_its_turn() -> None:
    made = task()
    for epoch in (0, 1):
        order = [int(n) for batch in made.plan(epoch) for n in batch]
        assert sorted(order) == list(range(97))
    assert [batch.tolist() for batch in made.plan(0)] != [batch.tolist() for batch in made.plan(1)]


@pytest.mark.usefixtures("unchecked")
def test_tensors_that_do_not_belong_together_are_refused() -> None:
    x, y = torch.randn(9, 7), torch.zeros(9).long()
    model: Any = nn.Linear(7, 2)
    for given, train, valid, message in (
        (model, (x, y[:8]), (x, y), "train has tensors of 9, 8 rows; give inputs and targets"),
        (model, (x, y), (x,), "valid has tensors of 9 rows"),
        (model, (x[:0], y[:0]), (x, y), "train has tensors of 0, 0 rows"),
        (model, x, (x, y), r"train must be a tuple \(inputs, targets\) of tensors, not Tensor"),
        (model, (x, y.numpy()), (x, y), r"train\[1\] must be a tensor, not ndarray; convert"),
        (model, (x, y), (x, x, y), "train has 2 tensors and valid has 3"),
        (accuracy, (x, y), (x, y), "model must be a torch.nn.Module, not function"),
        (nn.ReLU(), (x, y), (x, y), "ReLU has no parameter to train"),
    ):
        with pytest.raises(ValueError, match=message):
            Supervised(given, train, valid, loss=F.cross_entropy, score=accuracy)


def test_a_loss_for_each_example_is_refused(tmp_path: Path) -> None:
    made = task()
    made._loss = lambda output, target: F.cross_entropy(output, target, reduction="none")
    with pytest.raises(ValueError, match=r"loss returned \(10,\) numbers, and must return their m"):
        fit(made, SHORT, tmp_path / "run", display=Display())


@pytest.mark.usefixtures("unchecked")
def test_fit_takes_a_task_and_says_so(tmp_path: Path) -> None:
    model: Any = nn.Linear(7, 2)
    with pytest.raises(ValueError, match=r"fit takes a task, such as Supervised\(.*, not Linear"):
        fit(model, SHORT, tmp_path)
    with pytest.raises(ValueError, match="config must be a TrainingConfig, not dict"):
        fit(task(), vars(SHORT), tmp_path)


def test_what_fit_returns_prints_in_one_line(tmp_path: Path) -> None:
    result = fit(task(), SHORT, str(tmp_path / "run"), display=Display())
    assert re.fullmatch(
        rf"{tmp_path}/run: accuracy 0\.\d+ at step \d+; ended at step 40 after \d+ s \(epochs\)",
        str(result),
    )


# Trackers


def test_a_tracker_that_is_not_installed_is_refused_before_training(tmp_path: Path) -> None:
    for name in ("wandb", "mlflow"):
        if name in sys.modules:
            pytest.skip(f"{name} is installed")
        with pytest.raises(ValueError, match=f"-m pip install {name}"):
            fit(task(), TrainingConfig(**{**vars(SHORT), "tracker": name}), tmp_path / "run")
    assert not (tmp_path / "run").exists()


class FakeWandb:
    """What is called of wandb, and with what."""

    def __init__(self) -> None:
        self.begun: list[dict[str, Any]] = []
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.finished = 0

    def init(self, **options: Any) -> "FakeWandb":
        self.begun.append(options)
        return self

    def log(self, values: dict[str, float], step: int) -> None:
        self.logged.append((step, values))

    def finish(self) -> None:
        self.finished += 1


def test_curves_go_to_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    tracked = TrainingConfig(**{**vars(SHORT), "tracker": "wandb"})
    fit(task(), tracked, tmp_path / "run", display=Display())
    (options,) = wandb.begun
    assert options["name"] == "run"
    assert options["config"]["lr"] == SHORT.lr
    steps = [step for step, _ in wandb.logged]
    assert steps == sorted(steps)
    assert steps[-1] == 40
    assert any("loss" in values for _, values in wandb.logged)
    assert any("accuracy" in values for _, values in wandb.logged)
    assert wandb.finished == 1
    # A run that goes on is the same run there.
    longer = TrainingConfig(**{**vars(tracked), "epochs": 5})
    fit(task(), longer, tmp_path / "run", display=Display())
    assert [options["id"] for options in wandb.begun] == [wandb.begun[0]["id"]] * 2


def test_curves_go_to_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[tuple[str, Any]] = []
    info = SimpleNamespace(info=SimpleNamespace(run_id="number 7"))

    def start(run_id: str | None, run_name: str | None) -> Any:
        said.append(("start", (run_id, run_name)))
        return info

    fake = SimpleNamespace(
        set_experiment=lambda name: said.append(("experiment", name)),
        start_run=start,
        log_params=lambda params: said.append(("params", params)),
        log_metrics=lambda values, step: said.append(("metrics", (step, values))),
        end_run=lambda: said.append(("end", None)),
    )
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    tracked = TrainingConfig(**{**vars(SHORT), "tracker": "mlflow"})
    fit(task(), tracked, tmp_path / "run", display=Display())
    kinds = [kind for kind, _ in said]
    assert kinds[:3] == ["experiment", "start", "params"]
    assert kinds[-1] == "end"
    assert said[1] == ("start", (None, "run"))
    fit(task(), TrainingConfig(**{**vars(tracked), "epochs": 5}), tmp_path / "run",
        display=Display())  # fmt: skip
    assert ("start", ("number 7", None)) in said
