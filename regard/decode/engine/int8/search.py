"""Searches as the kernels know them: their tensors, which `search.h` changes in place."""

import ctypes

import torch
from torch import Tensor

from regard.decode.engine.int8 import library as native
from regard.decode.engine.session import Search
from regard.decode.search.beam import Beams
from regard.decode.search.constraints import Constraints
from regard.decode.search.greedy import Paths

Known = Beams | Paths


def known(search: Search) -> bool:
    """Whether the kernels take this search's steps: what is derived from one does more."""
    if type(search) is Beams:
        return search.coverage is None and search.dtype == torch.float32
    return type(search) is Paths


def steps_left(search: Known, most: int) -> int:
    """How many can be taken at once: a beam search has other rows after its first one."""
    first = isinstance(search, Beams) and search.t == 0
    return 1 if first else min(most, search.constraints.steps - search.t)


def rule(constraints: Constraints, t: int) -> native.Rule:
    early = constraints.early and t < constraints.early
    least = constraints.least if early else None
    tensors = (constraints._banned, constraints.most, least)
    struct = native.Rule(
        constraints.end,
        constraints.renormalize,
        len(constraints.banned),
        *map(native.address, tensors),
    )
    struct.held = tensors
    return struct


def begin(search: Known) -> native.Search:
    """A struct of its tensors, with those that it has after a step."""
    struct = native.Search(len(search.over), search.t, rule(search.constraints, search.t))
    rows: Tensor | None = None
    state: tuple[Tensor, ...]
    if isinstance(search, Beams):
        B, W = len(search.over), search.width
        rows = torch.arange(B * W)
        if search.t == 0:
            search.begin()
            search.open = search.open.repeat(1, W)
            last = search.last.new_zeros(B * W)
            last[:B] = search.last
            search.last, rows = last, torch.arange(B).repeat_interleave(W)
        state = (
            *(search.penalty, search.largest, search.open),
            *(search.parents, search.tokens, search.gains),
            *(search.scores, search.ends, search.lengths, search.slots, search.cut),
        )
        shape = (W, search.n_best, search.constraints.steps)
        beams = native.Beams(*shape, *(x.data_ptr() for x in state))
        struct.beams = ctypes.pointer(beams)
    else:
        state = (search.sentences, search.tokens, search.scores)
        paths = native.Paths(search.tokens.shape[1], *(x.data_ptr() for x in state))
        struct.paths = ctypes.pointer(paths)
    search.rows, search.last = rows, search.last.contiguous()
    assert all(x.is_contiguous() for x in state)
    struct.last, struct.rows = search.last.data_ptr(), native.address(rows)
    struct.over = search.over.data_ptr()
    return struct
