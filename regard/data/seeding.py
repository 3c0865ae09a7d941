"""Random numbers that depend on a seed and a few counters alone: step, epoch, process.

with seeded(combined(seed, step)):      torch's own generator, inside
rng(seed, epoch)                        a generator of numpy's
uniform(places, seed, step)             a number from 0 to 1 for each place, by itself
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from jaxtyping import Float64, UInt64


@contextmanager
def seeded(seed: int, device: torch.device | str = "cpu") -> Iterator[None]:
    """Inside, torch draws from the seed on the CPU and a device; outside, nothing has changed."""
    cuda = [torch.device(device)] if torch.device(device).type == "cuda" else []
    with torch.random.fork_rng(devices=cuda):
        torch.default_generator.manual_seed(seed)
        for each in cuda:
            with torch.cuda.device(each):
                torch.cuda.manual_seed(seed)
        yield


def combined(*numbers: int) -> int:
    """One seed from several numbers; close numbers give unrelated seeds."""
    digest = hashlib.blake2b(" ".join(map(str, numbers)).encode(), digest_size=8)
    return int.from_bytes(digest.digest(), "big") >> 1


def rng(*numbers: int) -> np.random.Generator:
    """A generator of numpy's for these numbers."""
    if min(numbers) < 0:
        raise ValueError(f"seed and counters {numbers} must be 0 or more")
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(numbers)))


def uniform(places: UInt64[np.ndarray, "n"], *numbers: int) -> Float64[np.ndarray, "n"]:
    """A number from [0, 1) for each place, whatever others are asked for with it.

    Made by the finalizer of SplitMix64 (Steele et al. 2014), which scatters neighbouring places.
    """
    x = places * np.uint64(0x9E3779B97F4A7C15) + np.uint64(combined(*numbers))
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return (x >> np.uint64(11)) * 2.0**-53
