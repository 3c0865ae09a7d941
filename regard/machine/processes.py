"""The processes that torchrun has started, and messages between them.

Training extends `Processes` by a device and collectives (train/distributed.py); commands send each
other messages. These are JSON: nothing is unpickled. An error in any process ends all of them, and
is reported once.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

Made = TypeVar("Made")

FOREVER = timedelta(days=30)
"""Whoever types the input may take a long time over a line."""


@dataclass(frozen=True)
class Processes:
    """All processes, as one of them sees them."""

    rank: int = 0
    size: int = 1
    local: int = 0
    """The rank on its own machine."""

    @property
    def first(self) -> bool:
        """Whether this is the process that reads, writes and reports."""
        return self.rank == 0

    def agreed(self, make: Callable[[], Made]) -> Made:
        """What `make` makes in every process, if it does in all."""
        made, fault = None, None
        try:
            made = make()
        except (ValueError, OSError) as error:
            if self.size == 1:
                raise
            fault = one_line(error)
        if self.size > 1:
            if self.first:
                faults = [fault, *(self.receive(rank) for rank in range(1, self.size))]
                fault = next((one for one in faults if one is not None), None)
                for rank in range(1, self.size):
                    self.send(rank, fault)
                if fault is not None:
                    raise ValueError(fault)
            else:
                self.send(0, fault)
                if self.receive(0) is not None:
                    raise SystemExit(2)  # the first says why
        assert made is not None
        return made

    def send(self, rank: int, message: Any) -> None:
        import torch
        import torch.distributed as dist

        data = torch.frombuffer(bytearray(json.dumps(message).encode()), dtype=torch.uint8)
        with self._lost(rank):
            dist.send(torch.tensor([len(data)]), rank)
            dist.send(data, rank)

    def receive(self, rank: int) -> Any:
        import torch
        import torch.distributed as dist

        with self._lost(rank):
            size = torch.zeros(1, dtype=torch.int64)
            dist.recv(size, rank)
            data = torch.zeros(int(size), dtype=torch.uint8)
            dist.recv(data, rank)
        return json.loads(bytes(data.tolist()))

    @contextmanager
    def _lost(self, rank: int) -> Iterator[None]:
        try:
            yield
        except RuntimeError:
            if not self.first:
                raise SystemExit(1) from None  # the first has said why, or cannot any more
            raise ValueError(f"process {rank} ended before its work did; see its output") from None


@contextmanager
def launched(backend: str = "gloo", timeout: timedelta = FOREVER) -> Iterator[Processes]:
    """Those that torchrun has started, or one process alone."""
    begun = "torch.distributed" in sys.modules and _initialized()
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 and not begun:
        yield Processes()
        return
    import torch.distributed as dist

    if not begun:
        dist.init_process_group(backend, timeout=timeout)
    try:
        local = int(os.environ.get("LOCAL_RANK", "0"))
        yield Processes(dist.get_rank(), dist.get_world_size(), local)
    finally:
        if not begun:
            with suppress(RuntimeError):  # another process has ended before
                dist.destroy_process_group()


def _initialized() -> bool:
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized()


def one_line(error: Exception) -> str:
    """What an exception says, without line breaks; of an OSError the file and the reason."""
    text = str(error)
    if isinstance(error, OSError) and error.strerror:
        text = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return " ".join(text.split())
