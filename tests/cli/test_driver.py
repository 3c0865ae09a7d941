"""A GPU's driver starts early for the commands that will use it, and for no others."""

import sys
import threading
from pathlib import Path

import pytest

from regard.cli import driver


@pytest.fixture
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "nvidiactl").touch()
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    return tmp_path


@pytest.mark.parametrize(
    ("words", "want"),
    [
        (["translate", "run"], True),
        (["classify", "run", "a.png", "--device", "cuda"], True),
        (["label", "run", "--device=auto", "--precision", "bf16"], True),
        (["translate", "run", "--device", "cpu"], False),
        (["translate", "run", "--device=cuda:1"], False),  # not the first one
        (["translate", "run", "--precision=int8"], False),
        (["train", "dates", "run"], False),
        ([], False),
    ],
)
def test_who_wants_it(words: list[str], want: bool, gpu: Path) -> None:
    assert driver.wanted(words, gpu) == want
    assert not driver.wanted(words, gpu / "nothing")


def test_processes_of_torchrun_have_other_gpus(gpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert not driver.wanted(["translate", "run"], gpu)


def test_it_has_started_when_torch_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []
    importing = threading.Event()

    def start() -> None:
        assert importing.wait(60.0)  # at the same time
        started.append("driver")

    monkeypatch.setattr(driver, "_start", start)
    for wanted in (False, True):
        monkeypatch.setattr(driver, "wanted", lambda words, wanted=wanted: wanted)
        with driver.starting([]):
            importing.set()
        assert started == ["driver"] * wanted


@pytest.mark.skipif(sys.platform == "win32", reason="has no libcuda.so.1")
def test_without_a_driver_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(name: str) -> None:
        raise OSError(f"{name}: no such file")

    monkeypatch.setattr(driver.ctypes, "CDLL", none)
    driver._start()
