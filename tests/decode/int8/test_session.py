"""The int8 engine: what it computes is what the modules compute, whoever else is in the session."""

import copy
import gc
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from regard.attention.mask import Packed
from regard.attention.multihead import MultiHeadAttention
from regard.decode.engine.int8 import library as native
from regard.decode.engine.int8.engine import Int8Engine, Int8Session
from regard.decode.engine.int8.linear import Int8Linear, int8
from regard.decode.search import topk
from regard.decode.search.constraints import Constraints
from regard.model.language import LanguageModel
from tests.decode.int8.samples import KINDS, TRANSFORMERS, N, formula, halved, kernels, made, source

pytestmark = kernels


class Rows:
    """A session, and what each of its rows has read."""

    def __init__(self, model: Any, engine: Int8Engine | None = None, rows: int = 5, skip: int = 0):
        self.model, self.engine = model, engine or Int8Engine(model)
        self.source, self.lengths = source(model, rows + skip)
        if self.source is not None:
            self.source = self.source[skip:]
            self.lengths = None if self.lengths is None else self.lengths[skip:]
        self.session = self.engine.open(model, self.source, self.lengths, rows=rows)
        self.read: list[list[int]] = [[] for _ in range(rows)]
        self.of = list(range(rows))

    def prefill(self, *rows: list[int]) -> None:
        counts = torch.tensor([len(row) for row in rows])
        tokens = torch.randint(3, N, (len(rows), max(map(len, rows))))
        for r, row in enumerate(rows):
            tokens[r, : len(row)] = torch.tensor(row, dtype=torch.int64)
            self.read[r] += row
        self.session.prefill(tokens, counts)

    def step(self, tokens: list[int]) -> Tensor:
        for row, token in zip(self.read, tokens):
            row.append(token)
        return self.session.step(torch.tensor(tokens))

    def select(self, rows: list[int]) -> None:
        self.session.select(torch.tensor(rows))
        self.read, self.of = [[*self.read[r]] for r in rows], [self.of[r] for r in rows]

    def formula(self, model: Any = None) -> Tensor:
        found = []
        for tokens, n in zip(self.read, self.of):
            length = None if self.lengths is None else self.lengths[n]
            image = None if self.source is None else self.source[n]
            found.append(formula(model or self.model, tokens, image, length))
        return torch.stack(found)


def random(count: int) -> list[int]:
    return torch.randint(3, N, (count,)).tolist()


def moves(model: Any) -> Iterator[tuple[Tensor, Rows]]:
    """All that a search does: prompts of different lengths, beams, reordering, leaving, joining."""
    rows = Rows(model)
    torch.manual_seed(2)
    rows.prefill(random(3), [], random(7), random(1), random(2))
    yield rows.step(random(5)), rows
    for chosen in ([0, 0, 2, 1, 4, 4, 3], [6, 5, 4, 4, 2, 1, 0], [0, 2, 5]):
        rows.select(chosen)
        yield rows.step(random(len(chosen))), rows
    other = Rows(model, rows.engine, rows=2, skip=5)
    if rows.source is not None:
        assert other.source is not None
        rows.source = torch.cat((rows.source, other.source))
        if rows.lengths is not None:
            rows.lengths = torch.cat((rows.lengths, other.lengths))
    other.prefill(random(4), random(1))
    rows.session.join(other.session)
    rows.read, rows.of = rows.read + other.read, [*rows.of, 5, 6]
    yield rows.step(random(5)), rows


def near(some: Tensor, others: Tensor) -> float:
    return float((some - others).norm() / others.norm())


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_the_modules(kind: str) -> None:
    exact = made(kind)
    model = int8(copy.deepcopy(exact))
    modules = halved(model)
    for logits, rows in moves(model):
        print(near(logits, rows.formula(modules)), near(logits, rows.formula(exact)))
        assert near(logits, rows.formula(modules)) < 0.01
        assert near(logits, rows.formula(exact)) < 0.06
