"""Which worker has which GPU, and how many there are with nothing set."""

from pathlib import Path

import pytest

from regard.serve import workers
from regard.serve.gpus import SMALL, default_workers, gpus, placed
from regard.serve.workers import Settings, Workers
from regard.service.requests import LIMITS


@pytest.mark.parametrize(
    ("files", "visible", "want"),
    [
        (["nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "null"], None, ["0", "1"]),
        (["nvidia3"], None, ["0"]),
        (["nvidia0", "nvidia1", "nvidia2"], "2, 0", ["2", "0"]),
        (["nvidia0"], "", []),
        (["null"], "0", []),
    ],
)
def test_gpus_are_those_that_cuda_may_see(
    files: list[str],
    visible: str | None,
    want: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    for name in files:
        (tmp_path / name).touch()
    assert gpus(tmp_path) == want


def weighing(folder: Path, size: int) -> str:
    folder.mkdir(parents=True)
    with (folder / "model.safetensors").open("wb") as file:
        file.truncate(size)
    return str(folder)


def test_small_models_have_several_workers_on_a_gpu(tmp_path: Path) -> None:
    small, half = weighing(tmp_path / "small", 1000), weighing(tmp_path / "half", SMALL // 2 + 1)
    weighing(tmp_path / "run" / "best", SMALL + 1)
    run = str(tmp_path / "run")

    def count(*folders: str, device: str = "auto", cores: int = 16, there: int = 1) -> int:
        return default_workers(folders, device, "auto", cores, ["0"] * there)

    assert count(small) == count(small, device="cuda") == count(small, half) == 4
    assert count(small, cores=8) == 2
    assert count(small, cores=64, there=4) == 16
    assert count(small, cores=7) == count(small, cores=1) == 1  # too few cores
    assert count(small, cores=7, there=4) == 4
    assert count(half, half) == count(run) == 1  # too large to be held by several
    assert count(run, there=3) == 3
    assert count(small, there=0) == 1
    assert count(small, device="cpu") == count(small, device="cuda:1") == 1
    assert default_workers([small], "auto", "int8", 16, ["0"]) == 1  # which is for CPUs


def test_workers_take_gpus_in_turn() -> None:
    assert [placed(n, 5, "cuda", ["2", "7"]) for n in range(5)] == [
        ("2", 3),
        ("7", 2),
        ("2", 3),
        ("7", 2),
        ("2", 3),
    ]
    assert placed(1, 2, "auto", ["0"]) == (None, 2)
    assert placed(1, 2, "cuda:1", ["0", "1"]) == (None, 2)
    assert placed(1, 2, "cpu", ["0", "1"]) == (None, 1)


def test_a_worker_sees_its_gpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "gpus", lambda: ["2", "7"])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for device, want in (("cuda", ["2", "7", "2"]), ("cpu", [None] * 3)):
        three = Workers(Settings((), LIMITS, device), 3)._workers
        assert [one._environment.get("CUDA_VISIBLE_DEVICES") for one in three] == want
