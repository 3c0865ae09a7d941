"""The GPU's driver, which starts while torch is imported: two cores' work at the same time."""

import ctypes
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

ANSWERING = ("translate", "score", "classify", "read", "generate", "label")
"""Commands whose answers are waited for."""


def wanted(words: Sequence[str], devices: Path = Path("/dev")) -> bool:
    """Whether a command will compute on the first GPU, as far as its words say."""
    if not words or words[0] not in ANSWERING or "LOCAL_RANK" in os.environ:
        return False
    parts = [part for word in words for part in word.split("=", 1)]
    named = dict(pairwise(parts))
    on_gpu = named.get("--device", "auto") in ("auto", "cuda")
    return on_gpu and named.get("--precision") != "int8" and (devices / "nvidiactl").exists()


@contextmanager
def starting(words: Sequence[str]) -> Iterator[None]:
    """Starts it meanwhile, where it will be wanted; torch finds it started."""
    if not wanted(words):
        yield
        return
    thread = threading.Thread(target=_start, daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join()  # nobody leaves while a driver starts


def _start() -> None:
    """Initializes the driver and the context that torch will use; whatever fails, torch reports."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return
    device, context = ctypes.c_int(), ctypes.c_void_p()
    if cuda.cuInit(0) == 0 and cuda.cuDeviceGet(ctypes.byref(device), 0) == 0:
        cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
