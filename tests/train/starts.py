"""Trainings in processes of their own, which begin at once: a server that has everything imported
makes them. This module is imported by that server, and holds what runs in the processes."""

import multiprocessing
import os
import signal
import socket
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from regard.machine import atomic
from regard.train.display import Display
from regard.train.fit import fit
from tests.processes import HANG
from tests.train.samples import Backwards, settings

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.train.preload"])


def start(work: Callable[..., None], *arguments: Any) -> BaseProcess:
    process = _context.Process(target=work, args=arguments)
    process.start()
    return process


def together(work: Callable[..., None], count: int, *arguments: Any) -> None:
    """Runs `work` in processes as torchrun would start them, until all have ended well."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    running = [start(_ranked, rank, count, port, work, arguments) for rank in range(count)]
    for process in running:
        process.join(HANG)
    assert [process.exitcode for process in running] == [0] * count


def train(folder: Path, task: dict[str, Any], changed: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    fit(Backwards(**task), settings(**changed), folder, display=Display())


def die_saving(folder: Path, changed: dict[str, Any], saves: int) -> None:
    """Trains until so many folders were saved, of which the last is never put in its place."""
    put, left = atomic._swap_in, saves

    def dying(draft: Path, target: Path) -> Path | None:
        nonlocal left
        left -= 1
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)
        return put(draft, target)

    atomic._swap_in = dying
    train(folder, {}, changed)


def die_writing(folder: Path, changed: dict[str, Any], files: int) -> None:
    """Trains until so many files were written, of which the last is never put in its place."""
    put, left = os.replace, files

    def dying(*names: Any) -> None:
        nonlocal left
        left -= 1
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)
        put(*names)

    os.replace = dying
    train(folder, {}, changed)


def _ranked(
    rank: int, count: int, port: int, work: Callable[..., None], arguments: tuple[Any, ...]
) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    work(*arguments)
