"""Killed at any moment, a run goes on, and ends with the same bits as one that never was."""

import json
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor

from regard import checkpoint
from tests.train.starts import die_saving, die_writing, start, train


def weights(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def same(one: Path, other: Path) -> None:
    """Everything but times."""
    for name in ("best", "last"):
        a, b = weights(one / name), weights(other / name)
        assert a.keys() == b.keys()
        assert all(a[key].equal(b[key]) for key in a)
        checkpoint.load(other / name)
    a, b = (load_file(run / "last" / "training.safetensors") for run in (one, other))
    assert a.keys() == b.keys()
    assert all(a[key].equal(b[key]) for key in a)
    assert _metrics(one) == _metrics(other)


def _metrics(run: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in ("speed", "seconds")} for line in lines]


def killed(folder: Path, kills: int, steps: int, changed: dict[str, Any]) -> int:
    """Trains with so many kills on the way; gives how many hit a save."""
    rng = random.Random(0)
    during = 0
    for kill, step in enumerate(sorted(rng.choices(range(steps * 3 // 4), k=kills))):
        if kill % 2:  # in a save, when all is written and nothing in its place
            process = start(die_saving, folder, changed, rng.randint(1, 4))
        else:  # at any moment after it has come to a step
            process = start(train, folder, {}, changed)
            while process.is_alive() and _steps(folder) < step:
                time.sleep(0.002)
            time.sleep(rng.uniform(0, 0.05))
            process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        during += _saving(folder)
    process = start(train, folder, {}, changed)
    process.join()
    assert process.exitcode == 0
    assert not _saving(folder)
    return during


def _steps(folder: Path) -> int:
    metrics = folder / "metrics.jsonl"
    return metrics.read_bytes().count(b'"lr"') if metrics.exists() else 0


def _saving(folder: Path) -> bool:
    return any(folder.glob(".*saving-*"))


@pytest.mark.parametrize(
    ("kills", "steps", "changed"),
    [
        pytest.param(3, 21, {"ema": 0.9}, id="few"),
        pytest.param(24, 120, {"average": 3}, id="many", marks=pytest.mark.slow),
        pytest.param(24, 120, {"accumulate": 2}, id="parts", marks=pytest.mark.slow),
    ],
)
def test_killed_is_as_never_killed(
    tmp_path: Path, kills: int, steps: int, changed: dict[str, Any]
) -> None:
    changed |= {"steps": steps, "save_every": 3, "evaluate_every": 4, "log_every": 1}
    process = start(train, tmp_path / "whole", {}, changed)
    process.join()
    assert process.exitcode == 0
    during = killed(tmp_path / "killed", kills, steps, changed)
    print(f"{kills} kills, {during} of them during a save")
    assert during
    same(tmp_path / "whole", tmp_path / "killed")


@pytest.mark.parametrize("files", [1, 2])
def test_a_run_killed_at_its_beginning_starts_again(tmp_path: Path, files: int) -> None:
    """Also in its first file."""
    process = start(die_writing, tmp_path / "run", {"steps": 2}, files)
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert _saving(tmp_path / "run")
    process = start(train, tmp_path / "run", {}, {"steps": 2})
    process.join()
    assert process.exitcode == 0
    assert not _saving(tmp_path / "run")
