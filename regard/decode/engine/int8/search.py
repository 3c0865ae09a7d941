"""Searches as the kernels know them: their tensors, which `search.h` changes in place."""

import ctypes
from typing import Any

import numpy as np
import torch

from regard.decode.engine.int8 import library as native
from regard.decode.engine.session import Integers, Rolling, Search
from regard.decode.search.beam import Beams
from regard.decode.search.constraints import Constraints
from regard.decode.search.greedy import Paths
from regard.decode.search.rolling import RollingBeams, RollingPaths

Known = Beams | Paths


def known(search: Search | Rolling) -> bool:
    """Whether the kernels take this search's steps: what is derived from one does more."""
    if type(search) is Beams:
        return search.coverage is None and search.dtype == torch.float32
    if type(search) is RollingPaths:
        return search.sampling.temperature == 0
    return type(search) in (Paths, RollingBeams)


def steps_left(search: Known, most: int) -> int:
    """How many can be taken at once: a beam search has other rows after its first one."""
    first = isinstance(search, Beams) and search.t == 0
    return 1 if first else min(most, search.constraints.steps - search.t)


def rule(constraints: Constraints, t: int, most: Any = None) -> native.Rule:
    """At step t; `most` instead of the constraints' own."""
    least = constraints.least if t < constraints.early else None
    tokens = (constraints._banned, constraints.most if most is None else most, least)
    count = len(constraints.banned)
    return native.Rule(constraints.end, constraints.renormalize, count, *map(_address, tokens))


def of(search: Known) -> native.Search:
    """A struct of its tensors, with those that it has after a step."""
    B, t = len(search.over), search.t
    rows, each = None, 1
    state: dict[str, Any] = {"rule": rule(search.constraints, t)}
    if isinstance(search, Beams):
        W = search.width
        rows, each = torch.arange(B * W), W
        if t == 0:
            search.begin()
            search.open = search.open.repeat(1, W)
            last = search.last.new_zeros(B * W)
            last[:B] = search.last
            search.last, rows, each = last, torch.arange(B).repeat_interleave(W), 1
        state["beams"] = _beams(search, search.constraints.steps)
    else:
        paths = (search.sentences, search.tokens, search.scores)
        state["paths"] = ctypes.pointer(native.Paths(search.tokens.shape[1], *map(_address, paths)))
    search.rows = rows
    steps = np.full(B, t)
    pointers = {"last": search.last, "rows": rows, "t": steps, "over": search.over}
    state |= {name: _address(array) for name, array in pointers.items()}
    struct = native.Search(B, each, **state)
    struct.held = steps
    return struct


def of_rolling(
    search: RollingBeams | RollingPaths,
    places: Integers,
    each: int,
    last: Integers,
    rows: Integers,
    steps: int,
) -> native.Search:
    """The same of sentences that are at steps of their own, in these places of its arrays, with so
    many rows for each."""
    search.fit(int(search.t[places].max(initial=0)) + steps)
    state: dict[str, Any] = {"rule": rule(search.rule, 0, search.most)}
    if isinstance(search, RollingBeams):
        state["beams"] = _beams(search, search.parents.shape[1])
    else:
        paths = (None, search.tokens, search.scores)
        state["paths"] = ctypes.pointer(native.Paths(search.tokens.shape[1], *map(_address, paths)))
    pointers = {"place": places, "last": last, "rows": rows, "t": search.t, "over": search.done}
    state |= {name: _address(array) for name, array in pointers.items()}
    return native.Search(len(places), each, **state)


def _beams(search: Beams | RollingBeams, columns: int) -> Any:
    names = "penalty open parents tokens gains scores ends lengths slots cut"
    arrays = (_address(getattr(search, name)) for name in names.split())
    shape = (search.width, search.n_best, columns, search.horizon)
    return ctypes.pointer(native.Beams(*shape, *arrays))


def _address(array: Any) -> int | None:
    if array is None:
        return None
    if isinstance(array, np.ndarray):
        assert array.flags.c_contiguous
        return int(array.ctypes.data)
    assert array.is_contiguous()
    return int(array.data_ptr())
