"""Devices, as tests see them."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray


def round_in_the_interpreter() -> None:
    """Lets Triton's interpreter round float32 to the nearest bfloat16, as a GPU does.

    It cuts the lower bits off instead (3.6 to 3.9), which doubles the error of every conversion
    and gives all of them the same sign. float16 is NumPy's, and rounded.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def rounded(values: NDArray, source: tl.dtype, target: tl.dtype, mode: object) -> NDArray:
        if (source, target) != (tl.float32, tl.bfloat16):
            return convert(values, source, target, mode)
        wide = np.ascontiguousarray(values).view(np.float32)
        return torch.from_numpy(wide).bfloat16().view(torch.uint16).numpy()

    interpreter._convert_float = rounded


@contextmanager
def no_waiting() -> Iterator[None]:
    """In here, whatever makes the host wait for the device is an error."""
    torch.cuda.synchronize()
    try:
        with warnings.catch_warnings(action="ignore"):  # that the mode is a prototype
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
