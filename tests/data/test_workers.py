"""Work in other processes: in order, and with no process left behind."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from regard.data.workers import completed, prefetch, processors, spread
from tests.processes import HANG, lives, wait_until

# What workers do must be found in a module that they can import.
SCRIPT = """
import operator, sys
from regard.data.workers import spread

# Without `if __name__ == "__main__"`, as people write.
print(list(spread(operator.mul, 3, range(7), 2)))
"""


def _do(state: str, task: int) -> object:
    """Imported by workers from this very file."""
    if state == "die" and task == 3:
        os._exit(7)
    if state == "fail" and task == 3:
        raise ValueError("three")
    if state == "print":
        print("printed, but not among the results")
    return state, task, os.getpid()


@pytest.fixture
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.setattr(_do, "__module__", "test_workers")
    monkeypatch.setitem(sys.modules, "test_workers", sys.modules[__name__])


@pytest.mark.usefixtures("importable")
@pytest.mark.parametrize("workers", [0, 1, 3])
def test_in_order(workers: int, capfd: pytest.CaptureFixture[str]) -> None:
    results = list(spread(_do, "print", range(7), workers))
    assert [task for _, task, _ in results] == list(range(7))  # type: ignore[misc]
    pids = {pid for *_, pid in results}  # type: ignore[misc]
    assert len(pids) == max(1, workers)
    assert (os.getpid() in pids) == (workers == 0)
    assert "printed" in "".join(capfd.readouterr())


@pytest.mark.usefixtures("importable")
def test_no_more_workers_than_tasks() -> None:
    assert len({pid for *_, pid in spread(_do, "x", range(1), 5)}) == 1  # type: ignore[misc]
    assert list(spread(_do, "x", [], 5)) == []


@pytest.mark.usefixtures("importable")
@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_comes_out(workers: int) -> None:
    results = spread(_do, "fail", range(7), workers)
    with pytest.raises(ValueError, match="three"):
        list(results)


@pytest.mark.usefixtures("importable")
def test_a_dead_worker_is_noticed() -> None:
    with pytest.raises(ValueError, match=r"worker process ended \(exit status 7\)"):
        list(spread(_do, "die", range(7), 2))


def test_a_plain_script(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, path],
        capture_output=True,
        text=True,
        timeout=HANG,
        env={**os.environ, "PYTHONPATH": root},
    )
    assert done.stdout == "[0, 3, 6, 9, 12, 15, 18]\n"
    assert done.stderr == ""


def test_processors() -> None:
    assert 1 <= processors() <= (os.cpu_count() or 1)


@pytest.mark.usefixtures("importable")
@pytest.mark.parametrize("state", ["die", "fail"])
def test_what_goes_wrong_with_one_task_is_no_other_ones_matter(state: str) -> None:
    outcomes = dict(completed(_do, state, range(7), 2))
    error = outcomes.pop(3)
    assert isinstance(error, ValueError)
    assert ("exit status 7" if state == "die" else "three") in str(error)
    assert {task: result[1] for task, result in outcomes.items()} == {  # type: ignore[index]
        task: task for task in (0, 1, 2, 4, 5, 6)
    }


@pytest.mark.usefixtures("importable")
def test_workers_end_with_who_wants_no_more() -> None:
    results = completed(_do, "x", range(100), 2)
    _, (_, _, pid) = next(results)  # type: ignore[misc]
    results.close()
    assert not lives(pid)


# Ahead of time


@pytest.mark.parametrize("ahead", [0, 1, 2, 19])
def test_prefetch_keeps_the_order(ahead: int) -> None:
    assert list(prefetch(lambda n: n * n, range(7), ahead=ahead)) == [n * n for n in range(7)]


def test_prefetch_works_ahead_but_not_far() -> None:
    made: list[int] = []
    batches = prefetch(lambda n: made.append(n) or n, range(100), ahead=3)
    assert next(batches) == 0
    wait_until(lambda: len(made) >= 4)
    time.sleep(0.05)
    assert made == [0, 1, 2, 3]
    batches.close()  # type: ignore[attr-defined]
    assert not [one for one in threading.enumerate() if one.name.startswith("prefetch")]


def test_prefetch_passes_errors_on() -> None:
    batches = prefetch(lambda n: 1 // (n - 2), range(5))
    assert [next(batches), next(batches)] == [-1, -1]
    with pytest.raises(ZeroDivisionError):
        next(batches)
    assert not [one for one in threading.enumerate() if one.name.startswith("prefetch")]


def test_prefetch_wants_a_count() -> None:
    with pytest.raises(ValueError, match=r"ahead \(-1\)"):
        list(prefetch(abs, [1], ahead=-1))
