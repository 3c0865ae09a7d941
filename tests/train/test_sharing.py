"""Steps on a busy CPU: as many threads as are fastest, and the bits of one."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from regard.model.transformer import Transformer
from regard.train import sharing
from regard.train.display import Display
from regard.train.fit import fit
from regard.train.sharing import SharedStep, one_thread_for_norms
from regard.train.step import Step
from tests.train.samples import CONFIG, NUMBERS, Backwards, settings


class Long(Backwards):
    """With so many tokens that torch shares the work among threads."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = Transformer(replace(CONFIG, width=64, heads=4, feed_forward=131))
        rng = np.random.default_rng(0)
        self.examples = [rng.integers(0, NUMBERS, 90 + n) for n in range(31)]

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return {"accuracy": 0.0}


@pytest.fixture(autouse=True)
def two_threads() -> None:
    torch.set_num_threads(2)  # conftest.py puts it back


def trained(
    run: Path, make: Callable[..., Step], monkeypatch: pytest.MonkeyPatch, **changed: Any
) -> Long:
    monkeypatch.setattr(sharing, "SharedStep", make)
    task = Long()
    fit(task, settings(steps=12, **changed), run, display=Display())
    return task


class Timed(SharedStep):
    """Steps that seem to take as long as they are said to, and the threads that they had."""

    def __init__(self, parts: Any, cost: Callable[[int], float]):
        super().__init__(parts, clock=lambda: self.now)
        self.now, self.cost, self.used = 0.0, cost, list[int]()

    def update(self) -> Tensor:
        self.used.append(torch.get_num_threads())
        self.now += self.cost(self._count)
        return super().update()


def same(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.state_dict().values(), other.state_dict().values())
    return all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_number_of_threads_does_not_show(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optimizer: str
) -> None:
    made: list[Timed] = []

    def busy(parts: Any) -> Step:
        made.append(Timed(parts, lambda count: float(count)))
        return made[-1]

    shared = trained(tmp_path / "shared", busy, monkeypatch, optimizer=optimizer)
    assert set(made[0].used) == {1, 2}
    assert made[0].used[-1] == 1
    torch.set_num_threads(2)

    def all_threads(parts: Any) -> Step:
        made.append(Timed(parts, lambda count: 1 / count))
        return made[-1]

    quiet = trained(tmp_path / "quiet", all_threads, monkeypatch, optimizer=optimizer)
    assert made[1].used.count(2) >= 10
    assert same(shared.model, quiet.model)
    assert torch.get_num_threads() == 2


def test_a_number_that_shows_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Timed] = []

    def busy(parts: Any) -> Step:
        made.append(Timed(parts, lambda count: float(count)))
        return made[-1]

    # Whatever torch does on this machine: one thread gives another last bit.
    real = Step._backward

    def other_bits(self: Step, *given: Any) -> None:
        real(self, *given)
        if torch.get_num_threads() == 1:
            for parameter in self.parts.parameters.values():
                if parameter.grad is not None:
                    parameter.grad.mul_(1 + 2**-20)

    monkeypatch.setattr(Step, "_backward", other_bits)
    trained(tmp_path / "run", busy, monkeypatch)
    assert set(made[0].used) == {2}


def test_gradients_of_a_norm_have_one_thread() -> None:
    norm = nn.LayerNorm(257)
    x, upstream = torch.randn(1031, 257), torch.randn(1031, 257)

    def gradients(threads: int) -> list[Tensor]:
        torch.set_num_threads(threads)
        norm.zero_grad()
        norm(x).backward(upstream)
        assert torch.get_num_threads() == threads
        return [p.grad.clone() for p in norm.parameters() if p.grad is not None]

    with one_thread_for_norms(norm):
        assert all(map(torch.equal, gradients(1), gradients(2)))
        norm(x)  # without gradients nothing is watched
    assert not norm._forward_hooks


@pytest.mark.parametrize(
    ("threads", "changed", "shared"),
    [(1, {}, False), (2, {}, True), (2, {"compile": "yes"}, False)],
)
def test_where_steps_share(threads: int, changed: dict[str, Any], shared: bool) -> None:
    torch.set_num_threads(threads)
    assert sharing.shares(settings(**changed), torch.device("cpu"), 1) == shared
    assert not sharing.shares(settings(**changed), torch.device("cpu"), 2)
    assert not sharing.shares(settings(**changed), torch.device("cuda"), 1)
