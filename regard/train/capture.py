"""Training steps captured in CUDA graphs: Python launches a handful of graphs instead of hundreds
of kernels.

    first    forward, loss, backward of a step's first micro-batch, which writes the gradients
    more     the same for further ones, which add to them
    update   everything else

Batches are padded to one capacity, so that one capture serves the whole run; a batch that does not
fit is computed without a graph. The first steps are computed one operation at a time, as kernels
are chosen and compiled then. Random numbers are those of uncaptured steps: a replay begins at the
seed that was set before it.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from regard.attention import sync
from regard.attention.fusing import has_hooks
from regard.data.batch import Sizes, Tensors, share
from regard.machine.processes import one_line
from regard.model.stack import Stack
from regard.train.config import TrainingConfig
from regard.train.distributed import World
from regard.train.loader import MicroBatch
from regard.train.step import Parts, Step
from regard.train.task import Fillable, Task

WARM_UP = 3
"""Steps before the first capture."""
EPOCHS = 2
"""Epochs whose batches are measured for the capacity."""
AHEAD = 8
"""Steps that may wait for the device: enough to keep it busy, and few enough to stop soon."""
PREPARED = 2
"""Of these, steps whose batches are on the device already, and augmented."""


def refusal(task: Task, config: TrainingConfig, world: World) -> str | None:
    """The reason why steps cannot be captured, or None."""
    if config.capture == "no":
        return "capture no"
    if world.device.type != "cuda":
        return f"not on a {world.device.type.upper()}"
    if world.size > 1:
        return "several processes"
    if not isinstance(task, Fillable):
        return "the task's batches have no capacity"
    modules = list(task.model.modules())
    if any(module.checkpointing for module in modules if isinstance(module, Stack)):
        return "gradient checkpointing"
    if has_hooks(*modules):
        return "a module has a hook, or a forward of its own"
    return None


def capacity(task: Fillable, config: TrainingConfig, world: World) -> Sizes:
    """Sizes that fit the micro-batches of the first epochs; the same when a run resumes."""
    plans = chain.from_iterable(task.plan(epoch) for epoch in range(EPOCHS))
    parts = (share(batch, world.rank, world.size, config.accumulate) for batch in plans)
    return task.capacity(part for split in parts for part in split if len(part))


class CapturedStep(Step):
    """Captures a step after the first few, and replays it from then on."""

    def __init__(self, parts: Parts, size: Sizes, say: Callable[[str], None]):
        super().__init__(parts)
        self.size, self._say = size, say
        self.refused = False
        self._stream = torch.cuda.Stream(parts.world.device)
        self._ahead = torch.cuda.Stream(parts.world.device)
        self._graphs: dict[str, torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._batch: Tensors | None = None
        """The tensors that the graphs read."""
        self._row: Tensor | None = None
        """The figures that the update writes."""
        self._steps = 0
        self._parameters = list(parts.parameters.values())
        self._modules = list(parts.objective.modules())
        self._under_way: deque[torch.cuda.Event] = deque()

    @contextmanager
    def running(self) -> Iterator[None]:
        # Captures need a stream other than the default one, and the same one before them.
        before = torch.cuda.current_stream(self.parts.world.device)
        self._stream.wait_stream(before)
        with torch.cuda.stream(self._stream):
            yield
        before.wait_stream(self._stream)

    def backward(self, part: MicroBatch, n: int, last: bool) -> None:
        batch = self._prepare(part)
        filled = batch.fill(self.size) if part.filled else None
        early = self._steps < WARM_UP
        # A replay calls no modules, so a hook that was registered meanwhile would not fire.
        if self.refused or filled is None or not part.counts or early or has_hooks(*self._modules):
            self._backward(filled or batch, n == 0, part.counts)
            return
        if self._batch is None:
            self._batch = filled.copy()
        for target, source in zip(self._batch.tensors(), filled.tensors(), strict=True):
            target.copy_(source, non_blocking=True)
        if not self._replay("more" if n else "first", lambda: self._backward(self._batch, n == 0)):
            self._backward(filled, n == 0)

    def _prepare(self, part: MicroBatch) -> Any:
        """Copies and augments the batch on a separate stream, while the device computes earlier
        steps: many small kernels, which leave most of it idle."""
        if len(self._under_way) >= PREPARED:
            self._ahead.wait_event(self._under_way[-PREPARED])
        with torch.cuda.stream(self._ahead):
            batch = super()._prepare(part)
        self._stream.wait_stream(self._ahead)
        for tensor in batch.tensors():
            tensor.record_stream(self._stream)
        return batch

    def update(self) -> Tensor:
        self._steps += 1

        def compute() -> None:
            self._row = self._update()

        if "first" not in self._graphs or not self._replay("update", compute):
            return self._update()
        assert self._row is not None
        # Decoding engines refresh their copies of weights when these versions change.
        increment_version(self._parameters)
        self._under_way.append(torch.cuda.Event())
        self._under_way[-1].record()
        if len(self._under_way) > AHEAD:
            self._under_way.popleft().synchronize()
        return self._row.clone()

    def _clear(self) -> None:
        """Zeroes gradients in place once the graphs use their memory."""
        if not self._graphs:
            super()._clear()
            return
        grads = [p.grad for p in self.parts.parameters.values() if p.grad is not None]
        torch._foreach_zero_(grads)

    def _replay(self, name: str, compute: Callable[[], None]) -> bool:
        """Replays a graph, which is captured at the first call; False if that fails."""
        if name not in self._graphs:
            graph = torch.cuda.CUDAGraph()
            # Other threads make batches meanwhile, and may allocate.
            mode = "thread_local"
            try:
                with (
                    sync.capture(),
                    torch.cuda.graph(
                        graph, pool=self._pool, stream=self._stream, capture_error_mode=mode
                    ),
                ):
                    compute()
            except RuntimeError as error:
                self._give_up(error)
                return False
            self._graphs[name] = graph
        self._graphs[name].replay()
        return True

    def _give_up(self, error: Exception) -> None:
        self.refused = True
        self._graphs.clear()
        # A capture that failed leaves the generator within it.
        device = self.parts.world.device
        fresh = torch.Generator(device).graphsafe_get_state()
        index = torch.cuda.current_device() if device.index is None else device.index
        torch.cuda.default_generators[index].graphsafe_set_state(fresh)
        torch.manual_seed(torch.initial_seed())
        while isinstance(error.__context__, Exception):
            error = error.__context__
        self._say(f"steps are not captured: {one_line(error).split(' Search for ')[0]}")
