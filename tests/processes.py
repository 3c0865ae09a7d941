"""Other processes, as tests see them."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

HANG = 900
"""Seconds after which something is taken to hang. No test waits for it, and none fails sooner
because the machine is slow or busy."""


def wait_until(happened: Callable[[], object]) -> None:
    end = time.monotonic() + HANG
    while not happened():
        assert time.monotonic() < end, f"nothing happened for {HANG} s"
        time.sleep(0.01)


def children(pid: int) -> list[int]:
    path = Path(f"/proc/{pid}/task/{pid}/children")
    if not path.exists():
        pytest.skip("needs /proc")
    return [int(word) for word in path.read_text().split()]


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False


def die(state: object, task: object) -> None:
    """The work of a worker process that ends before it is done."""
    os._exit(7)
