"""The device that a setting names, checked before anything is computed."""

from functools import lru_cache

import torch

KINDS = ("cpu", "cuda", "mps")
"""What everything runs on; Apple's GPUs (mps) where they are asked for by name, untested."""
CHOICES = "choose auto, cpu, cuda, or one of several GPUs, such as cuda:1"


def device(name: str | torch.device) -> torch.device:
    """The device of this name; "auto" is a GPU where there is one, and the CPU otherwise."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        named = torch.device(name)
    except (RuntimeError, TypeError):
        raise ValueError(f'device ("{name}") is not one that torch knows; {CHOICES}') from None
    if named.type not in KINDS:
        raise ValueError(f'device ("{name}") is not supported; {CHOICES}')
    count = _count(named.type)
    if not count:
        raise ValueError(f'device ("{name}") needs a GPU, and torch finds none; try "cpu"')
    if (named.index or 0) >= count:
        last = f"cuda:{count - 1}" if named.type == "cuda" else named.type
        raise ValueError(f'device ("{name}") is not there; the last is "{last}"')
    return named


def use(name: str | torch.device) -> torch.device:
    """The device of this name; one of several GPUs is then the current one of this thread, where
    Triton launches kernels, wherever their tensors are."""
    used = device(name)
    if used.type == "cuda" and used.index is not None:
        torch.cuda.set_device(used)
    return used


@lru_cache
def multiplies_bfloat16(kind: str) -> bool:
    """Whether a kind of device has instructions for products of bfloat16 (on a CPU AVX-512 BF16),
    which are then faster than those of float32."""
    if kind == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    wide = torch.backends.cpu.get_cpu_capability().startswith("AVX512")
    return kind == "cpu" and wide and torch.cpu._is_avx512_bf16_supported()


def _count(kind: str) -> int:
    """How many of a kind there are."""
    match kind:
        case "cuda":
            return torch.cuda.device_count() if torch.cuda.is_available() else 0
        case "mps":
            return int(torch.backends.mps.is_available())
    return 1
