"""Two processes compute what one computes, and a run goes on with more or fewer of them."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from regard import checkpoint
from tests.processes import HANG, wait_until
from tests.train.starts import start, together, train

TASK = {"dropout": 0.0}
SHORT = {"steps": 6, "save_every": 2, "evaluate_every": 3, "log_every": 1}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one process comes to."""
    folder = tmp_path_factory.mktemp("alone")
    _with(1, folder, SHORT)
    return folder


def _with(processes: int, folder: Path, changed: dict[str, Any]) -> None:
    if processes > 1:
        together(train, processes, folder, TASK, changed)
        return
    process = start(train, folder, TASK, changed)
    process.join()
    assert process.exitcode == 0


def _agree(one: Path, other: Path) -> None:
    lines = [
        [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        for run in (one, other)
    ]
    assert [line["step"] for line in lines[0]] == [line["step"] for line in lines[1]]
    for name in ("loss", "norm"):
        a, b = ([line[name] for line in run if name in line] for run in lines)
        np.testing.assert_allclose(a, b, rtol=2e-4)
    for name in ("best", "last"):
        a, b = (load_file(run / name / "model.safetensors") for run in (one, other))
        assert a.keys() == b.keys()
        for key in a:
            # The gradient of a key's bias is rounding alone, which Adam enlarges.
            if not key.endswith("key.bias"):
                torch.testing.assert_close(a[key], b[key], rtol=1e-3, atol=1e-3)
        checkpoint.load(other / name)


@pytest.mark.parametrize("parallel", ["data", "sharded"])
def test_two_are_as_one(tmp_path: Path, alone: Path, parallel: str) -> None:
    _with(2, tmp_path, SHORT | {"parallel": parallel, "accumulate": 2})
    _agree(alone, tmp_path)
    shards = sorted(path.name for path in tmp_path.glob("shards/*/*"))
    if parallel == "sharded":
        assert [path.name for path in (tmp_path / "shards").iterdir()] == ["6"]
        assert len(shards) == 2
        assert all(name.endswith(".safetensors") for name in shards)
        assert not (tmp_path / "last" / "training.safetensors").exists()
    else:
        assert not shards


@pytest.mark.parametrize(
    "stages",
    [
        pytest.param([(1, "data"), (2, "sharded"), (1, "data")], id="1-2-1"),
        pytest.param([(2, "data"), (1, "data")], id="2-1", marks=pytest.mark.slow),
        pytest.param([(2, "sharded"), (3, "sharded")], id="2-3", marks=pytest.mark.slow),
        pytest.param([(2, "sharded"), (2, "data")], id="shards-data", marks=pytest.mark.slow),
    ],
)
def test_goes_on_with_another_number(tmp_path: Path, stages: list[tuple[int, str]]) -> None:
    """Also from a whole state to a sharded one, and back."""
    kept = {"ema": 0.9, "evaluate_every": 6}
    for n, (processes, parallel) in enumerate(stages, 1):
        steps = 6 * n // len(stages)
        changed = SHORT | {"parallel": parallel, "steps": steps} | kept
        _with(processes, tmp_path / "parts", changed)
    _with(1, tmp_path / "whole", SHORT | kept)
    one, other = (_losses(tmp_path / name) for name in ("whole", "parts"))
    np.testing.assert_allclose(one, other, rtol=2e-4)
    a, b = (load_file(tmp_path / name / "best/model.safetensors") for name in ("whole", "parts"))
    for key in a:
        if not key.endswith("key.bias"):
            torch.testing.assert_close(a[key], b[key], rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_torchrun_and_its_end(tmp_path: Path) -> None:
    """Started by torchrun itself; when that is told to stop, all processes save and stop."""
    script = tmp_path / "script.py"
    script.write_text(
        f"from pathlib import Path\nfrom tests.train.starts import train\n"
        f"train(Path({str(tmp_path / 'run')!r}), {{}}, {{'steps': 10**6, 'parallel': 'sharded'}})\n"
    )
    root = Path(__file__).parents[2]
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    process = subprocess.Popen(
        [*words, str(script)], env=os.environ | {"PYTHONPATH": str(root)}, cwd=root
    )
    metrics = tmp_path / "run" / "metrics.jsonl"
    wait_until(
        lambda: (
            process.poll() is not None
            or (metrics.exists() and metrics.read_bytes().count(b"lr") > 3)
        )
    )
    process.terminate()
    assert process.wait(HANG) != 0
    steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
    saved = json.loads((tmp_path / "run" / "last" / "training.json").read_text())
    assert saved["step"] >= steps[-1] > 0
    assert saved["shards"] == f"shards/{saved['step']}"


def _losses(run: Path) -> list[float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]
