"""Steps on a CPU that other programs use too: as many threads as are fastest, and the same bits.

Two threads meet after every operation. Where another program has one of their cores, each meeting
takes as long as the scheduler's turns, and one thread by itself is many times faster. So steps are
timed, and now and then one is tried with fewer threads or more (`regard/machine/threads.py`).

The number of threads must not show in the weights, or a resumed run would not end as an
uninterrupted one does. Of all that a step computes, torch adds up one thing in as many parts as
there are threads: the gradients of LayerNorm, which therefore take one thread, always. Whether that
is all on this machine is tested before a number of threads is used for the first time: a
micro-batch is computed twice, and where any bit of a gradient differs, the number stays as it is.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from regard.machine.threads import Choice
from regard.train.config import TrainingConfig
from regard.train.loader import MicroBatch
from regard.train.step import Numbers, Parts, Step

COST, FEW, MANY, FIRST = 0.005, 16, 500, 3
"""The share of the time that trials take, steps between two of them, and steps before the first."""


class SharedStep(Step):
    """Computes each step with as many threads as are fastest at the time."""

    def __init__(self, parts: Parts, clock: Callable[[], float] = time.perf_counter):
        super().__init__(parts)
        self._clock, self._begun = clock, 0.0
        self._most = torch.get_num_threads()
        self._choice = Choice(self._most, cost=COST, few=FEW, many=MANY, first=FIRST)
        self._count = self._most
        self._exact = {self._most: True}
        """By the number of threads, whether gradients have the same bits."""
        self._spent = 0.0
        """Seconds of this step that were taken by a test."""

    @contextmanager
    def running(self) -> Iterator[Any]:
        with one_thread_for_norms(self.parts.task.model):
            try:
                yield
            finally:
                torch.set_num_threads(self._most)

    def begin(self, numbers: Numbers) -> None:
        self._count = self._choice.next()
        if not self._exact.get(self._count, True):
            self._count = self._choice.count
        torch.set_num_threads(self._count)
        self._begun, self._spent = self._clock(), 0.0
        super().begin(numbers)

    def backward(self, part: MicroBatch, n: int, last: bool) -> None:
        if n == 0 and self._count not in self._exact:
            begun = self._clock()
            self._exact[self._count] = self._same(part, last)
            self._spent = self._clock() - begun
            if not self._exact[self._count]:
                self._count = self._choice.count
                torch.set_num_threads(self._count)
        super().backward(part, n, last)

    def update(self) -> Tensor:
        row = super().update()
        self._choice.took(self._count, self._clock() - self._begun - self._spent)
        torch.set_num_threads(self._most)
        return row

    def _same(self, part: MicroBatch, last: bool) -> bool:
        """Whether a micro-batch has the same gradients, and the optimizer makes the same of them,
        with these threads as with all of them."""
        before = torch.get_rng_state()
        found = []
        for count in (self._most, self._count):
            torch.set_num_threads(count)
            torch.set_rng_state(before)
            super().backward(part, 0, last)
            grads = (p.grad for p in self.parts.parameters.values())
            copies = [None if g is None else g.detach().clone() for g in grads]
            found.append([*copies, *self.parts.optimizer.products()])
        torch.set_rng_state(before)
        return all(map(_equal, *found))


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b if a is None or b is None else torch.equal(a, b)


@contextmanager
def one_thread_for_norms(model: nn.Module) -> Iterator[None]:
    """Within it the gradients of every LayerNorm are computed by one thread."""

    def watch(module: nn.Module, inputs: Any, output: Tensor) -> None:
        if output.grad_fn is not None:
            thread = _OneThread()
            output.grad_fn.register_prehook(thread.begin)
            output.grad_fn.register_hook(thread.end)

    with ExitStack() as hooks:
        for module in model.modules():
            if isinstance(module, nn.LayerNorm):
                hooks.callback(module.register_forward_hook(watch).remove)
        yield


class _OneThread:
    """Around a node of the backward pass."""

    def __init__(self) -> None:
        self._threads = 1

    def begin(self, *_: Any) -> None:
        self._threads = torch.get_num_threads()
        torch.set_num_threads(1)

    def end(self, *_: Any) -> None:
        torch.set_num_threads(self._threads)


def shares(config: TrainingConfig, device: torch.device, processes: int) -> bool:
    """Whether steps may change their number of threads: on a CPU, unless blocks are compiled."""
    alone = device.type == "cpu" and processes == 1
    return alone and config.compile != "yes" and torch.get_num_threads() > 1
