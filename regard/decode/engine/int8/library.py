"""The kernels of 8-bit decoding as Python sees them: their structures and functions.

They give the same bits on every instruction set (`native/build.py` lists those).
"""

import ctypes
from pathlib import Path

from regard.native.build import SHARED, Float, Int, Kernels, Pointer, Source, fields

FILE = Path(__file__).with_name("kernels.cpp")
HEADERS = (FILE.with_name("pool.h"), FILE.with_name("search.h"), SHARED / "simd.h")


# The structures of kernels.cpp and search.h, where their fields are explained.


class Told(ctypes.Structure):
    held: object
    """What must not be freed meanwhile."""


class Linear(Told):
    _fields_ = fields((Int, "inner out"), (Pointer, "weight start scale bias"))


class Norm(Told):
    _fields_ = fields((Pointer, "gain bias"), (Float, "epsilon"))


class Attention(Told):
    _fields_ = fields(
        (Int, "heads key_heads key_width value_width"),
        (Float, "beta"),
        (Linear, "query key value output"),
    )


class Block(Told):
    _fields_ = fields(
        (Attention, "self_attention cross_attention"),
        (Linear, "expand gate reduce"),
        (Norm, "self_norm cross_norm feed_forward_norm"),
        (Int, "pre_norm activation"),
    )


class Embedding(Told):
    _fields_ = fields((Pointer, "id table place"), (Float, "scale"))


class RotaryEmbedding(Told):
    _fields_ = fields((Pointer, "table"), (Int, "pairs halves"))


class Cache(Told):
    _fields_ = fields(
        (Pointer, "data"),
        (Int, "slots"),
        (Pointer, "table"),
        (Int, "width"),
        (Pointer, "length"),
    )


class Tokens(Told):
    _fields_ = fields(
        (Int, "count width causal window"),
        (Pointer, "x sequence position"),
        (Embedding, "embedding"),
        (RotaryEmbedding, "rotary"),
        (Cache, "cache memory"),
    )


class Rule(Told):
    _fields_ = fields((Int, "end renormalize count"), (Pointer, "banned most least"))


class Beams(Told):
    _fields_ = fields(
        (Int, "width kept columns horizon"),
        (Pointer, "penalty open parents tokens gains scores ends lengths slots cut"),
    )


class Paths(Told):
    _fields_ = fields((Int, "columns"), (Pointer, "sentence tokens scores"))


class Search(Told):
    _fields_ = fields(
        (Int, "sentences each"),
        (Pointer, "place"),
        (Rule, "rule"),
        (ctypes.POINTER(Beams), "beams"),
        (ctypes.POINTER(Paths), "paths"),
        (Pointer, "last rows t over"),
    )


def _declare(kernels: ctypes.CDLL) -> None:
    kinds = (Linear, Norm, Attention, Block, Tokens, Rule, Search)
    linear, norm, attention, block, tokens, rule, search = map(ctypes.POINTER, kinds)
    threads = ctypes.c_int
    kernels.slot_width.argtypes, kernels.slot_width.restype = (attention,), Int
    kernels.linear.argtypes = (linear, Pointer, Int, Pointer, threads)
    kernels.run.argtypes = (block, Int, tokens, norm, linear, Pointer, threads)
    kernels.project_memory.argtypes = (block, Int, tokens, threads)
    row = (Int, Int, Int, Pointer, Pointer)
    kernels.best_tokens.argtypes = (Pointer, Int, Int, rule, *row, threads)
    kernels.advance.restype = Int
    taking = (search, Int, Pointer, ctypes.POINTER(Int), threads)
    kernels.advance.argtypes = (block, Int, tokens, norm, linear, *taking)


SOURCE = Source(FILE, HEADERS, "8-bit decoding", _declare)


def library() -> ctypes.CDLL | None:
    """The compiled kernels, or None: `missing` says why."""
    return SOURCE.library()


def missing() -> str:
    """Why there are no kernels; nothing where there are."""
    return SOURCE.missing()


def kernels() -> Kernels:
    return SOURCE.kernels()
