"""How many threads a step gets: what is fastest at the time, and trials cost little."""

import math
import os
from collections.abc import Callable

import pytest
import torch

from regard.cli.main import main
from regard.decode.engine import eager
from regard.decode.engine.eager import EagerEngine
from regard.machine.threads import FEW, MANY, SMALL, Threads
from tests.model.samples import language

Cost = Callable[[int, int], float]
"""Seconds of a call, from its number and the number of threads."""


@pytest.fixture(autouse=True)
def two_threads() -> None:
    torch.set_num_threads(2)  # conftest.py puts it back


class Timed:
    """Calls that take as long as they are said to, and the threads that they had."""

    def __init__(self, cost: Cost, weights: float = math.inf):
        self.cost, self.now, self.used = cost, 0.0, list[int]()
        self.threads = Threads(lambda: self.now, weights)

    def run(self, calls: int, rows: int = 3) -> float:
        """How long so many calls took."""
        begun = self.now
        for _ in range(calls):
            with self.threads.shared(rows):
                self.used.append(torch.get_num_threads())
                self.now += self.cost(len(self.used), self.used[-1])
        return self.now - begun

    def spared(self, rows: int = 3) -> int:
        with self.threads.spared(rows):
            return torch.get_num_threads()


def test_all_threads_where_they_are_faster() -> None:
    timed = Timed(lambda call, count: 1.0 if count == 2 else 1.6)
    assert timed.run(1000) < 1000 * 1.03
    assert timed.used[:FEW] == [2] * FEW
    assert 1 in timed.used
    assert timed.spared() == 2


def test_one_where_two_do_not_pay() -> None:
    timed = Timed(lambda call, count: 1.0 if count == 1 else 1.2)
    assert timed.run(1000) < 1000 * 1.03
    assert timed.used[-1] == 1
    assert timed.spared() == 2  # nobody is in the way


@pytest.mark.parametrize("two", [0.6, 1.2])
def test_small_calls_begin_with_one(two: float) -> None:
    """An answer of a few steps, on a busy machine too, is over before anything is tried."""
    timed = Timed(lambda call, count: 1.0 if count == 1 else two, weights=SMALL / 8)
    assert timed.run(1000) < 1000 * min(1.0, two) * 1.05
    assert timed.used[:FEW] == [1] * FEW
    assert timed.used[-1] == (2 if two < 1 else 1)
    assert (timed.spared(7), timed.spared(8)) == (1, 2)


@pytest.mark.parametrize("worse", [2.5, 20.0])
def test_a_machine_that_becomes_busy_and_quiet_again(worse: float) -> None:
    busy = range(300, 2000)

    def cost(call: int, count: int) -> float:
        if count == 1:
            return 1.5
        return worse if call in busy else 1.0

    timed = Timed(cost)
    timed.run(299)
    assert timed.run(20) < 20 * 1.5 + 3 * worse  # it is noticed at once
    assert timed.spared() == 1
    assert timed.run(1680) < 1680 * 1.5 * 1.05
    timed.run(MANY)
    assert timed.used[-1] == 2
    assert timed.spared() == 2
    assert torch.get_num_threads() == 2


def test_a_single_slow_call_changes_nothing() -> None:
    timed = Timed(lambda call, count: 50.0 if call % 37 == 0 else 1.0 if count == 2 else 1.6)
    timed.run(1000)
    assert timed.used.count(1) < 40


def test_calls_of_other_sizes_are_another_matter() -> None:
    sizes: list[int] = []
    timed = Timed(lambda call, count: 1.0 if (count == 1) == (sizes[-1] < 8) else 3.0)
    for n in range(200):
        sizes.append(3 if n % 2 else 61)
        timed.run(1, sizes[-1])
    assert timed.used[-20:] == [2, 1] * 10


def test_half_of_many_may_be_best(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [8]
    monkeypatch.setattr(torch, "get_num_threads", lambda: now[0])
    monkeypatch.setattr(torch, "set_num_threads", lambda count: now.__setitem__(0, count))
    timed = Timed(lambda call, count: {8: 4.0, 4: 2.0, 2: 1.0, 1: 1.9}[count])
    assert timed.run(2000) < 2000 * 1.1
    assert timed.used[-1] == 2
    assert set(timed.used) == {8, 4, 2, 1}
    assert now == [8]


def test_one_thread_is_left_alone() -> None:
    torch.set_num_threads(1)
    timed = Timed(lambda call, count: 1.0)
    timed.run(100)
    assert set(timed.used) == {1}
    assert not timed.threads._choices


def test_an_error_puts_the_number_back() -> None:
    timed = Timed(lambda call, count: 1.0 if count == 1 else 3.0)
    timed.run(50)
    assert timed.used[-1] == 1

    def fail() -> None:
        with timed.threads.shared(3):
            assert torch.get_num_threads() == 1
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        fail()
    assert torch.get_num_threads() == 2


def test_a_model_s_steps_are_timed_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions come and go; what was found out stays with the model, and goes with it."""
    sizes: list[int] = []
    shared = Threads.shared
    monkeypatch.setattr(
        Threads, "shared", lambda self, rows: (sizes.append(rows), shared(self, rows))[1]
    )
    model = language()
    for rows in (2, 3):
        session = EagerEngine().open(model, rows=rows)
        session.step(torch.full((rows,), 5))
    assert sizes == [2, 3]

    assert eager.threads(model) is eager.threads(model)
    held = len(eager._threads)
    del model, session
    assert len(eager._threads) == held - 1


@pytest.mark.parametrize(
    ("given", "spins"),
    [
        ({}, "4000"),
        ({"GOMP_SPINCOUNT": "7"}, "7"),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, None),
    ],
)
def test_commands_have_waiting_threads_sleep_unless_told_otherwise(
    given: dict[str, str], spins: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, given.get(name, ""))  # which is put back
        if name not in given:
            monkeypatch.delenv(name)
    with pytest.raises(SystemExit):
        main(["--version"])
    assert os.environ.get("GOMP_SPINCOUNT") == spins
