"""The int8 engine: what it computes is what the modules compute, whoever else is in the session."""

import copy
import multiprocessing
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from regard.attention.mask import PackedLengths
from regard.decode.engine.int8 import library as native
from regard.decode.engine.int8.cache import Buffers
from regard.decode.engine.int8.engine import Int8Engine
from regard.decode.engine.int8.linear import Int8Linear, int8
from regard.decode.engine.pick import pick
from regard.decode.search import topk
from regard.decode.search.constraints import Constraints
from regard.model.baseline import Dense
from regard.model.language import LanguageModel
from regard.model.transformer import Transformer
from tests.decode.int8.samples import KINDS, N, formula, halved, kernels, made, source
from tests.processes import HANG

pytestmark = kernels


class Rows:
    """A session, and what each of its rows has read."""

    def __init__(self, model: Any, rows: int = 5, skip: int = 0, engine: Int8Engine | None = None):
        self.model, self.engine = model, engine or Int8Engine(model)
        self.source, self.lengths = source(model, rows, skip)
        self.session = self.engine.open(model, self.source, self.lengths, rows=rows)
        self.read: list[list[int]] = [[] for _ in range(rows)]
        self.of = list(range(rows))
        """The source of each row."""

    def prefill(self, *rows: list[int]) -> None:
        tokens = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int64)
        for r, row in enumerate(rows):
            tokens[r, : len(row)] = torch.tensor(row, dtype=torch.int64)
            self.read[r] += row
        self.session.prefill(tokens, torch.tensor([len(row) for row in rows]))

    def step(self, tokens: list[int]) -> Tensor:
        for row, token in zip(self.read, tokens):
            row.append(token)
        return self.session.step(torch.tensor(tokens))

    def select(self, rows: list[int]) -> None:
        self.session.select(torch.tensor(rows))
        self.read, self.of = [[*self.read[r]] for r in rows], [self.of[r] for r in rows]

    def formula(self, model: Any) -> Tensor:
        """The same logits by the model itself, a row at a time."""
        images, lengths = source(self.model, 7)
        found = []
        for tokens, n in zip(self.read, self.of):
            image = None if images is None else images[n]
            found.append(formula(model, tokens, image, None if lengths is None else lengths[n]))
        return torch.stack(found)


def random(count: int) -> list[int]:
    return torch.randint(3, N, (count,)).tolist()


def moves(model: Any) -> Iterator[tuple[Tensor, Rows]]:
    """All that a search does: prompts of different lengths, beams, reordering, leaving, joining."""
    rows = Rows(model)
    torch.manual_seed(2)
    rows.prefill(random(3), [], random(7), random(1), random(2))
    yield rows.step(random(5)), rows
    for chosen in ([0, 0, 2, 1, 4, 4, 3], [6, 5, 4, 4, 2, 1, 0], [0, 2, 6]):
        rows.select(chosen)
        yield rows.step(random(len(chosen))), rows
    other = Rows(model, rows=2, skip=5, engine=rows.engine)
    other.prefill(random(4), random(1))
    rows.session.join(other.session)
    rows.read, rows.of = rows.read + other.read, [*rows.of, 5, 6]
    yield rows.step(random(5)), rows


def logits(model: Any) -> Tensor:
    return torch.cat([found for found, _ in moves(model)])


def errors(some: Tensor, others: Tensor) -> Tensor:
    return (some - others).norm(dim=-1) / others.norm(dim=-1)


# What is computed


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_the_modules(kind: str) -> None:
    exact = made(kind)
    model = int8(copy.deepcopy(exact))
    modules = halved(model)
    found = []
    for logits, rows in moves(model):
        found.append(errors(logits, rows.formula(modules)))
        assert errors(logits, rows.formula(exact)).max() < 0.06
    each = torch.cat(found)
    # Where sums of floats differ in their last bits, an integer may be rounded the other way.
    assert (each < 1e-5).float().mean() > 0.6
    assert each.max() < 0.02


@pytest.mark.parametrize("kind", KINDS)
def test_a_prefill_is_as_good_as_steps(kind: str) -> None:
    model = int8(made(kind))
    at_once, by_steps = Rows(model), Rows(model)
    prompts = [random(n) for n in (3, 0, 7, 1, 2)]
    at_once.prefill(*prompts)
    for n in range(7):
        by_steps.prefill(*[prompt[n : n + 1] for prompt in prompts])
    last = random(5)
    assert torch.equal(at_once.step(last), by_steps.step(last))


def test_prompts_begin_a_session() -> None:
    model = int8(made())
    one, two = Rows(model), Rows(model)
    prompts = [random(n) for n in (3, 1, 7, 1, 2)]
    two.prefill(*[prompt[:-1] for prompt in prompts])
    last = one.session.begin(prompts)
    assert last.tolist() == [prompt[-1] for prompt in prompts]
    assert torch.equal(one.session.step(last), two.session.step(last))


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_equals_one_by_one(kind: str) -> None:
    model = int8(made(kind))
    engine = Int8Engine(model)
    images, lengths = source(model, 7)
    together = engine.open(model, images, lengths, rows=7)
    alone = [
        engine.open(
            model,
            None if images is None else images[[n]],
            None if lengths is None else lengths[[n]],
            rows=1,
        )
        for n in range(7)
    ]
    for tokens in torch.randint(3, N, (3, 7)):
        found = together.step(tokens)
        assert torch.equal(found, torch.cat([s.step(tokens[[n]]) for n, s in enumerate(alone)]))


def test_packed_sources_are_the_same_sources() -> None:
    model = int8(made())
    engine = Int8Engine(model)
    ids, lengths = source(model)
    assert ids is not None
    assert lengths is not None
    real = ids[torch.arange(ids.shape[1]) < lengths[:, None]]
    tokens = torch.randint(3, N, (5,))
    found = [
        engine.open(model, ids, lengths).step(tokens),
        engine.open(model, ids, lengths.tolist()).step(tokens),
        engine.open(model, real[None], PackedLengths(lengths)).step(tokens),
    ]
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize("kind", ["the paper's", "gated, grouped heads", "language"])
def test_bits_do_not_depend_on_the_number_of_threads(kind: str) -> None:
    model, found = int8(made(kind)), []
    for threads in (1, 2, 3, 7):
        torch.set_num_threads(threads)  # conftest.py puts it back
        found.append(logits(model))
    assert all(torch.equal(found[0], other) for other in found[1:])


def test_flushing_subnormal_numbers_changes_nothing() -> None:
    model = int8(made())
    with torch.no_grad():
        model.decoder.blocks[0].add_cross.norm.weight.mul_(1e-38)
        model.decoder.blocks[0].add_cross.norm.bias.zero_()
    found = logits(model)
    torch.set_flush_denormal(True)
    try:
        assert torch.tensor(1e-40) * 1 == 0
        assert torch.equal(logits(model), found)
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("kind", ["the paper's", "pre-norm, gelu", "language"])
@pytest.mark.parametrize("where", ["a token", "a weight"])
def test_nans_propagate_in_their_rows(kind: str, where: str) -> None:
    model = int8(made(kind))
    tokens = torch.tensor([7, 11, 7, 5, 3])
    before = Rows(model).session.step(tokens)
    part = model.tokens if isinstance(model, LanguageModel) else model.target
    with torch.no_grad():
        if where == "a token":
            part.table.weight = nn.Parameter(part.table.weight.detach().clone())
            part.table.weight[7, 31] = torch.nan
        else:
            model.decoder.blocks[1].add_feed_forward.norm.bias[31] = torch.nan
    rows = Rows(model)
    found = rows.session.step(tokens)
    spoiled = tokens == 7 if where == "a token" else torch.ones(5, dtype=torch.bool)
    if where == "a token" and not isinstance(model, LanguageModel):
        ids = rows.source == 7
        assert rows.lengths is not None
        assert rows.source is not None
        ids &= torch.arange(rows.source.shape[1]) < rows.lengths[:, None]
        if model.source.table.weight is part.table.weight:
            spoiled |= ids.any(1)
    assert torch.equal(found.isnan().all(1), spoiled)
    assert torch.equal(found[~spoiled], before[~spoiled])


@pytest.mark.parametrize("kind", ["rotary", "the paper's", "language"])
def test_more_and_longer_than_anything_was_made_for(kind: str) -> None:
    model = int8(made(kind))
    engine = Int8Engine(model)
    ids = None if kind == "language" else torch.randint(3, N, (2, 701))
    session = engine.open(model, ids, rows=2, length=3)
    tokens = torch.randint(3, N, (131, 2))
    for column in tokens:
        found = session.step(column)
    other = engine.open(model, ids, rows=2)
    other.prefill(tokens[:-1].T, torch.tensor([130, 130]))
    assert found.isfinite().all()
    assert torch.equal(other.step(tokens[-1]), found)


def test_very_many_rows() -> None:
    model = int8(made("rotary"))
    engine = Int8Engine(model)
    ids, lengths = torch.randint(3, N, (3001, 5)), torch.randint(1, 6, (3001,))
    tokens = torch.randint(3, N, (3001,))
    found = engine.open(model, ids, lengths).step(tokens)
    for n in (0, 1499, 3000):
        one = engine.open(model, ids[[n]], lengths[[n]]).step(tokens[[n]])
        assert torch.equal(one[0], found[n])


def test_learned_positions_reach_to_their_end() -> None:
    model = int8(made("learned, silu", length=17))
    rows, tokens = Rows(model), torch.randint(3, N, (5, 17))
    rows.session.prefill(tokens, torch.tensor([16, 3, 5, 7, 11]))
    with pytest.raises(ValueError, match=r"17.*leave the learned table \(0 to 16\)"):
        rows.session.prefill(tokens, torch.tensor([2, 0, 0, 0, 0]))
    # What was refused has changed nothing.
    assert rows.session.cache.lengths.tolist() == [16, 3, 5, 7, 11]
    rows.session.step(tokens[:, 0])
    with pytest.raises(ValueError, match="17"):
        rows.session.step(tokens[:, 0])


# What a session refuses


@pytest.mark.parametrize("token", [-1, N])
def test_tokens_that_do_not_exist_are_refused(token: int) -> None:
    for kind in ("the paper's", "language"):
        session = Rows(int8(made(kind))).session
        with pytest.raises(ValueError, match=f"must lie from 0 to {N - 1}"):
            session.step(torch.tensor([7, 3, 5, token, 5]))
        assert session.cache.lengths.tolist() == [0] * 5


def test_sources_that_do_not_exist_are_refused() -> None:
    model = int8(made())
    engine = Int8Engine(model)
    with pytest.raises(ValueError, match=f"must lie from 0 to {N - 1}"):
        engine.open(model, torch.tensor([[3, N]]))
    with pytest.raises(ValueError, match="longer than the rows of tokens"):
        engine.open(model, torch.tensor([[3, 5]]), torch.tensor([3]))
    with pytest.raises(ValueError, match="needs a source"):
        engine.open(model)


def test_rows_that_are_not_there_are_refused() -> None:
    session = Rows(int8(made())).session
    with pytest.raises(ValueError, match="must lie from 0 to 4"):
        session.select(torch.tensor([0, 5]))
    with pytest.raises(ValueError, match="tokens of 2 rows for a session of 5"):
        session.step(torch.ones(2, dtype=torch.int64))


def test_sessions_of_others_are_refused() -> None:
    model = int8(made())
    one, other = Rows(model), Rows(model)
    with pytest.raises(ValueError, match="only sessions of one engine"):
        one.session.join(other.session)


def test_no_rows() -> None:
    for kind in ("the paper's", "language"):
        rows = Rows(int8(made(kind)))
        rows.step(random(5))
        rows.session.select(torch.zeros(0, dtype=torch.int64))
        assert rows.session.step(torch.zeros(0, dtype=torch.int64)).shape == (0, N)
        assert rows.session.rows == 0


@pytest.mark.gpu
def test_rows_are_selected_from_any_device() -> None:
    one, other = Rows(int8(made())), Rows(int8(made()))
    for rows, device in ((one, "cpu"), (other, "cuda")):
        rows.step([7, 3, 5, 11, 13])
        rows.session.select(torch.tensor([4, 4, 1], device=device))
    tokens = torch.tensor([3, 5, 7])
    assert torch.equal(one.session.step(tokens), other.session.step(tokens.cuda()))


# What a session keeps


def test_rows_that_join_go_on_as_they_were() -> None:
    for kind in ("the paper's", "language"):
        model = int8(made(kind))
        engine = Int8Engine(model)
        parts = [Rows(model, n, skip, engine) for n, skip in ((2, 0), (3, 2), (1, 5))]
        apart = [Rows(model, n, skip, engine) for n, skip in ((2, 0), (3, 2), (1, 5))]
        for steps, some in enumerate(zip(parts, apart)):
            for tokens in torch.randint(3, N, (3 * steps + 1, len(some[0].read))).tolist():
                for rows in some:
                    rows.step(tokens)
        for rows in parts[1:]:
            parts[0].session.join(rows.session)
            assert rows.session.rows == 0
        for _ in range(40):
            tokens = random(6)
            found = parts[0].session.step(torch.tensor(tokens))
            each = torch.split(torch.tensor(tokens), [2, 3, 1])
            one_by_one = [rows.session.step(some) for rows, some in zip(apart, each)]
            assert torch.equal(found, torch.cat(one_by_one))


def test_logits_are_the_callers() -> None:
    rows = Rows(int8(made()))
    found = [rows.step(random(5)) for _ in range(13)]
    copies = [one.clone() for one in found]
    for _ in range(13):
        rows.step(random(5))
    assert all(map(torch.equal, found, copies))
    part, whole = rows.step(random(5))[1:3], None
    kept = part.clone()
    for _ in range(13):
        whole = rows.step(random(5))
    assert torch.equal(part, kept)
    assert whole is not None


def test_memory_is_used_again_when_nobody_holds_it() -> None:
    buffers, places = Buffers(), set()
    for _ in range(101):
        x = buffers.take((7, 1009))
        y = buffers.take((7, 1009))
        assert x.data_ptr() != y.data_ptr()
        places |= {x.data_ptr(), y.data_ptr()}
    assert len(places) <= 4
    many = [buffers.take((7, 1009)) for _ in range(101)]
    assert len({x.data_ptr() for x in many}) == 101
    del many, x, y
    assert len(buffers._free) <= buffers.KEPT
    # A small tensor does not keep a large buffer.
    large = buffers.take((1009, 1009)).data_ptr()
    assert buffers.take((3, 5)).data_ptr() != large
    assert buffers.take((1009, 1000)).data_ptr() == large
    assert buffers.take((3, 5), np.float16).dtype == torch.float16


def test_slots_of_rows_that_have_left_are_used_again() -> None:
    for kind in ("the paper's", "language"):
        model = int8(made(kind))
        engine = Int8Engine(model)
        rows, slots = Rows(model, 5, engine=engine), []
        alone = Rows(model, 1, engine=engine)
        for n in range(101):
            tokens = random(rows.session.rows)
            tokens[0] = 7 + n % 5
            found = rows.session.step(torch.tensor(tokens))
            assert torch.equal(found[:1], alone.session.step(torch.tensor(tokens[:1])))
            # The first stays for good; the others leave one by one, and others come.
            rows.session.select(torch.tensor([0, 2, 3, 4]))
            other = Rows(model, 1, 3, engine)
            other.prefill(random(n % 11 + 1))
            rows.session.join(other.session)
            slots.append([cache.data.shape[1] for cache in rows.session._caches()])
        assert slots[-1] == slots[40]
        assert slots[-1][0] < 4 * (101 + 5 * 16)


def test_what_a_session_holds_is_given_back() -> None:
    model = int8(made())
    rows = Rows(model)
    rows.step(random(5))
    held = rows.session.cache.data.data_ptr()
    with rows.session:
        rows.step(random(5))
    assert rows.session.rows == 0
    assert all(cache.data.numel() == 0 for cache in rows.session._caches())
    assert held in [free.ctypes.data for free in rows.engine.buffers._free]


# Several at once


def test_sessions_in_threads_are_as_good_as_one_after_the_other() -> None:
    torch.set_num_threads(2)  # conftest.py puts it back
    model = int8(made())
    engine = Int8Engine(model)

    def search(skip: int) -> list[Tensor]:
        rows = Rows(model, 5, skip, engine)
        tokens = torch.randint(3, N, (37, 5), generator=torch.Generator().manual_seed(skip))
        found = []
        for column in tokens:
            found.append(rows.session.step(column))
            rows.session.select(torch.tensor([4, 0, 3, 3, 1]))
        return found

    one_by_one = [search(skip) for skip in range(5)]
    at_once: dict[int, list[Tensor]] = {}
    threads = [
        threading.Thread(target=lambda n=n: at_once.update({n: search(n)})) for n in range(5)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for n, found in enumerate(one_by_one):
        assert all(map(torch.equal, found, at_once[n]))


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="nobody moves threads but Linux")
def test_other_processes_change_neither_bits_nor_where_threads_may_run() -> None:
    """Where threads are preempted they give each other their cores, and keep none."""
    torch.set_num_threads(2)  # conftest.py puts it back
    layer, x = Int8Linear(nn.Linear(509, 2053)), torch.randn(31, 509)
    quiet, cores = layer(x), os.sched_getaffinity(0)
    words = [sys.executable, "-c", "while True: pass"]
    # In a session of its own each has as much of a core as all threads of this one.
    others = [subprocess.Popen(words, start_new_session=True) for _ in cores]
    try:
        until = time.monotonic() + 0.7
        while time.monotonic() < until:
            assert torch.equal(layer(x), quiet)
            assert os.sched_getaffinity(0) == cores
    finally:
        for other in others:
            other.kill()
            other.wait()
    threads = [int(name) for name in os.listdir("/proc/self/task")]
    assert len(threads) > 1

    def free() -> bool:
        return all(os.sched_getaffinity(thread) == cores for thread in threads)

    # One may have been preempted while it moves another: its own turn must come first.
    until = time.monotonic() + 30
    while not free() and time.monotonic() < until:
        time.sleep(0.01)
    assert free()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_kernels_survive_a_fork() -> None:
    torch.set_num_threads(2)  # conftest.py puts it back
    session = Rows(int8(made()), 31).session
    tokens = torch.randint(3, N, (3, 31))
    session.step(tokens[0])  # by two threads, of which the child has one
    context: Any = multiprocessing.get_context("fork")
    pipe, other = context.Pipe()
    child = context.Process(target=lambda: other.send(session.step(tokens[1]).numpy()))
    child.start()
    assert pipe.poll(HANG)
    assert np.array_equal(pipe.recv(), session.step(tokens[1]).numpy())
    child.join(HANG)
    assert child.exitcode == 0


# Models that change


def test_weights_that_have_changed_in_place_are_the_ones_used() -> None:
    model = int8(made("pre-norm, gelu", position="learned"))
    engine, before = Int8Engine(model), logits(model)
    with torch.no_grad():
        model.target.position.table.add_(1.0)
        model.decoder.norm.bias.add_(1.0)
    assert engine.current(model)
    changed = logits(model)
    assert not torch.equal(before, changed)
    assert torch.equal(changed, logits(copy.deepcopy(model)))


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a parameter": lambda model: setattr(
        model.decoder.blocks[1].add_attention.norm, "weight", nn.Parameter(torch.full((44,), 0.5))
    ),
    "a parameter's data": lambda model: setattr(
        model.decoder.blocks[1].add_cross.norm.weight, "data", torch.full((44,), 2.0)
    ),
    "the table of tokens": lambda model: setattr(
        model.target.table.weight, "data", torch.ones(N, 44)
    ),
    "a layer": lambda model: setattr(model, "output", Int8Linear(nn.Linear(44, N))),
    "a block": lambda model: model.encoder.blocks.pop(1),
    "a hook": lambda model: model.decoder.blocks[0].register_forward_hook(lambda *_: None),
    "other numbers": lambda model: model.double(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_not_current_any_more(change: str) -> None:
    model = int8(made())
    engine, rows = Int8Engine(model), Rows(model)
    session = engine.open(model, *source(model))
    copied = copy.deepcopy(model)
    assert engine.current(model)
    CHANGES[change](model)
    assert not engine.current(model)
    # A session goes on with what it was opened with.
    tokens = torch.tensor([3, 5, 7, 11, 13])
    assert torch.equal(session.step(tokens), Rows(copied).session.step(tokens))
    assert rows.engine.current(copied) is False


def test_engines_do_not_hold_their_models() -> None:
    model = int8(made())
    engine = Int8Engine(model)
    seen = weakref.ref(model)
    del model
    assert seen() is None
    assert engine.name == "int8"


# Models that the kernels do not know


def _network(model: Any) -> None:
    class Twice(type(model.decoder.blocks[1].feed_forward)):  # type: ignore[misc]
        pass

    model.decoder.blocks[1].feed_forward = Twice(44, 7, nn.ReLU())


def _attention(model: Any) -> None:
    other = made(key_heads=2)
    model.decoder.blocks[1].attention = int8(other).decoder.blocks[1].attention


REFUSALS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "fewer key heads": (
        _attention,
        "in the decoder, blocks differ",
    ),
    "another norm": (
        lambda model: setattr(model.decoder.blocks[1].add_cross, "norm", nn.RMSNorm(44)),
        "in the decoder, block 1 has residuals other than",
    ),
    "no bias": (
        lambda model: setattr(
            model.encoder.blocks[0].add_attention, "norm", nn.LayerNorm(44, bias=False)
        ),
        "in the encoder, block 0 has residuals other than",
    ),
    "another activation": (
        lambda model: setattr(
            model.decoder.blocks[1].feed_forward, "activation", nn.GELU(approximate="tanh")
        ),
        "in the decoder, block 1 has another activation, GELU",
    ),
    "another network": (_network, "block 1 has another feed-forward network, Twice"),
    "another beta": (
        lambda model: setattr(model.decoder.blocks[2].cross.core, "beta", -1.0),
        "block 2 has a beta",
    ),
    "a layer of 32 bits": (
        lambda model: setattr(model.decoder.blocks[2].cross, "query", nn.Linear(44, 44)),
        "block 2 has a Linear where a Int8Linear is wanted",
    ),
    "no blocks": (lambda model: model.encoder.blocks.pop(0) and model.encoder.blocks.pop(0), ""),
    "a hook": (
        lambda model: model.encoder.blocks[0].register_forward_pre_hook(lambda *_: None),
        "encoder.blocks.0 has a hook",
    ),
    "a forward of its own": (
        lambda model: setattr(model.decoder.blocks[1].attention, "forward", lambda x, **_: x),
        "decoder.blocks.1.attention has a forward of its own",
    ),
    "a norm with a forward of its own": (
        lambda model: setattr(model.decoder.blocks[1].add_cross.norm, "forward", lambda x: x),
        "decoder.blocks.1.add_cross.norm has a forward of its own",
    ),
    "another method": (
        lambda model: setattr(model.decoder.blocks[1].attention, "_rotate", lambda x, at: x),
        "decoder.blocks.1.attention has another _rotate than its class",
    ),
    "another encode": (
        lambda model: setattr(model, "encode", lambda *inputs: 3 * Transformer.encode(*inputs)),
        "Transformer has another encode than Transformer",
    ),
    "other numbers": (
        lambda model: model.target.double(),
        "table.weight is torch.float64 on cpu, not",
    ),
    "an output of 32 bits": (
        lambda model: setattr(model, "output", nn.Linear(44, N)),
        "the output layer is not of 8 bits; call int8",
    ),
    "a class of one's own": (
        lambda model: setattr(model, "__class__", type("Own", (type(model),), {})),
        "a Own is neither a Transformer nor a LanguageModel",
    ),
    "another embedding": (
        lambda model: setattr(model.target, "__class__", type("Own", (type(model.target),), {})),
        "tokens are embedded by a Own",
    ),
}


@pytest.mark.parametrize("change", REFUSALS)
def test_others_are_refused(change: str) -> None:
    model = int8(made())
    assert Int8Engine.refusal(model) == ""
    make, said = REFUSALS[change]
    make(model)
    reason = Int8Engine.refusal(model)
    assert reason
    assert said in reason
    assert len(reason.splitlines()) == 1
    with pytest.raises(ValueError, match="cannot run this model: "):
        Int8Engine(model)


class Linear(nn.Module):
    """Linear attention with elu(x) + 1, which reads its layers' weights."""

    def __init__(self, width: int):
        super().__init__()
        self.query, self.value = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor, *_: object, **__: object) -> Tensor:
        query, value = (x @ part.weight.T for part in (self.query, self.value))
        return nn.functional.elu(query) * value


@pytest.mark.parametrize("own", [lambda: Linear(44), lambda: Dense(44, 13)])
def test_custom_parts_stay_float32_and_are_named(own: Callable[[], nn.Module]) -> None:
    model = made()
    model.encoder.blocks[1].attention = own()
    x, y = torch.randint(3, N, (2, 11)), torch.randint(3, N, (2, 5))
    before = model(x, y)
    int8(model)
    assert type(model.encoder.blocks[1].feed_forward.expand) is Int8Linear
    assert all(type(part) is not Int8Linear for part in model.encoder.blocks[1].attention.modules())
    difference = (model(x, y) - before).norm() / before.norm()
    assert 0 < difference < 0.1
    assert pick(model).name == "eager"
    assert "stays in encoder.blocks.1.attention (" in pick(model).reason


def test_an_attention_with_a_forward_of_its_own_is_run() -> None:
    """Its forward reads a weight, and so its layers stay as they are."""
    model = made()
    attention = model.decoder.blocks[0].attention
    attention.forward = lambda x, *_, **__: x @ attention.query.weight.T
    layer = model.decoder.blocks[1].feed_forward.expand
    layer.register_forward_hook(lambda module, inputs, output: output + 1)
    x, y = torch.randint(3, N, (2, 11)), torch.randint(3, N, (2, 5))
    before = model(x, y)
    int8(model)
    assert type(attention.query) is nn.Linear
    assert model.decoder.blocks[1].feed_forward.expand is layer
    assert (model(x, y) - before).norm() < 0.1 * before.norm()
    assert "decoder.blocks.0.attention has a forward of its own" in pick(model).reason


def test_linear_biases_are_refused() -> None:
    model = int8(made(position="linear-bias"))
    assert "block 0 has another position, ALiBi" in Int8Engine.refusal(model)


def test_without_kernels_everything_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = int8(made())
    monkeypatch.setattr(native, "missing", lambda: "there is no C++ compiler")
    assert Int8Engine.refusal(model) == "there is no C++ compiler"


# What a search asks of logits


def best(logits: Tensor, count: int, **rules: Any) -> topk.Best:
    rule = Constraints(len(logits), logits.shape[1], end=0, max_length=7, **rules)
    return Rows(int8(made())).session.best(logits.clone(), count, rule, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("size", [2, 16, 101])
def test_the_best_of_each_row(dtype: torch.dtype, size: int) -> None:
    logits = torch.randn(7, size).to(dtype) * 9
    logits[3, : size // 2] = -torch.inf
    values, tokens = best(logits, 5)
    wide = logits.to(torch.promote_types(dtype, torch.float32)).log_softmax(-1)
    assert values.shape == tokens.shape == (7, min(5, size))
    torch.testing.assert_close(values, wide.topk(min(5, size)).values)
    torch.testing.assert_close(wide.gather(1, tokens), values)


def test_the_best_that_may_be_said() -> None:
    logits = torch.randn(7, 101)
    rules: dict[str, Any] = {"banned": [3, 5], "min_length": 2}
    plain = Constraints(7, 101, end=0, max_length=7, **rules)
    expected = topk.best(logits.clone(), 101, plain, 0)
    values, tokens = best(logits, 101, **rules)
    torch.testing.assert_close(values, expected[0])
    assert torch.equal(tokens[:, :98], expected[1][:, :98])  # the others are impossible
    assert (values[:, 98:] == -torch.inf).all()


def test_of_equals_the_first() -> None:
    logits = torch.zeros(2, 37)
    logits[1, 23:25] = 1
    _, tokens = best(logits, 2)
    assert tokens.tolist() == [[0, 1], [23, 24]]
    many = torch.randint(0, 3, (7, 101)).float()
    assert torch.equal(best(many, 5)[1], many.sort(descending=True, stable=True).indices[:, :5])


def test_what_is_not_a_number_stays_seen() -> None:
    logits = torch.zeros(3, 37)
    logits[1, 30] = torch.nan
    logits[2, 30] = torch.inf
    values, _ = best(logits, 2)
    assert values.isnan().any(1).tolist() == [False, True, True]


def test_nothing_is_possible() -> None:
    values, tokens = best(torch.full((3, 37), -torch.inf), 2)
    assert (values == -torch.inf).all()
    assert tokens.tolist() == [[0, 1]] * 3
