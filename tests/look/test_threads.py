"""One model in several threads: recording and changing it are a thread's own."""

import copy
import pickle
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard import load
from regard.decode.engine.int8.linear import int8
from regard.decode.engine.pick import open_session, pick
from regard.decode.search.beam import beam
from regard.look.effect import changed
from regard.look.record import Recording, record
from regard.model.transformer import Transformer, TransformerConfig
from tests.decode.int8.samples import kernels
from tests.service.samples import TEXTS, translator

DEADLINE = 30
"""Seconds after which a thread that waits has failed."""

CROSS = "decoder.blocks.1.cross"


def small() -> Transformer:
    torch.manual_seed(0)
    config = TransformerConfig(
        31, width=24, heads=4, feed_forward=40, encoder_layers=2, decoder_layers=2
    )
    return Transformer(config).eval()


def ids(length: int, seed: int) -> Tensor:
    return torch.randint(31, (2, length), generator=torch.Generator().manual_seed(seed))


def in_thread(function: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result(DEADLINE)


def in_step(*functions: Callable[[threading.Barrier], Any]) -> list[Any]:
    """The results of functions that run at the same time, and meet at one barrier."""
    barrier = threading.Barrier(len(functions), timeout=DEADLINE)
    with ThreadPoolExecutor(len(functions)) as pool:
        futures = [pool.submit(function, barrier) for function in functions]
        return [future.result(DEADLINE) for future in futures]


def hooks_of(model: nn.Module) -> list[Any]:
    return [hook for part in model.modules() for hook in hooks_of_one(part)]


def hooks_of_one(part: nn.Module) -> list[Any]:
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return [hook for kind in kinds for hook in getattr(part, kind).values()]


def assert_same(recording: Recording, other: Recording) -> None:
    """Up to rounding: threads may sum in another order."""
    assert list(recording) == list(other)
    for name, asked in recording.items():
        torch.testing.assert_close(asked.query, other[name].query)
        torch.testing.assert_close(asked.weights(), other[name].weights())


class Own(nn.Module):
    """An attention that calls torch's function."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(12, 36)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.project(x)[:, None].chunk(3, -1)
        return F.scaled_dot_product_attention(query, key, value)[:, 0]


def foreign() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 12), Own(), Own()).eval()


def vectors(seed: int) -> Tensor:
    return torch.randn(2, 5, 12, generator=torch.Generator().manual_seed(seed))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], tuple[Tensor, ...]]]] = {
    "ours": (small, lambda seed: (ids(7, seed), ids(5, seed + 1))),
    "foreign": (foreign, lambda seed: (vectors(seed),)),
}


@pytest.mark.parametrize("kind", MODELS)
def test_a_call_from_another_thread_is_not_recorded(kind: str) -> None:
    make, inputs = MODELS[kind]
    model = make()
    with record(model) as alone:
        model(*inputs(1))
    with record(model) as recording:
        model(*inputs(1))
        in_thread(lambda: model(*inputs(3)))
    assert_same(recording, alone)
    with pytest.warns(UserWarning, match="nothing was recorded"), record(model) as empty:
        in_thread(lambda: model(*inputs(3)))
    assert not empty


@pytest.mark.parametrize("kind", MODELS)
def test_two_threads_that_record_at_once_each_see_their_own_call(kind: str) -> None:
    make, inputs = MODELS[kind]
    model = make()
    expected = []
    for seed in (1, 3):
        with record(model) as alone:
            model(*inputs(seed))
        expected.append(alone)

    def recording(seed: int) -> Callable[[threading.Barrier], Recording]:
        def run(barrier: threading.Barrier) -> Recording:
            with record(model) as mine:
                barrier.wait()
                model(*inputs(seed))
                barrier.wait()
            return mine

        return run

    for mine, alone in zip(in_step(recording(1), recording(3)), expected):
        assert_same(mine, alone)


class Pause(nn.Module):
    """Waits in the middle of a call, while the main thread enters and leaves its block."""

    def __init__(self) -> None:
        super().__init__()
        self.reached, self.resume = threading.Event(), threading.Event()

    def forward(self, x: Tensor) -> Tensor:
        if threading.current_thread() is not threading.main_thread():
            self.reached.set()
            assert self.resume.wait(DEADLINE)
        return x


@pytest.mark.parametrize("begins", [True, False])
def test_a_call_in_progress_is_not_disturbed_by_another_threads_recording(begins: bool) -> None:
    pause = Pause()
    model = nn.Sequential(foreign(), nn.Sequential(pause), Own()).eval()
    with record(model) as alone:
        expected = model(vectors(1))

    def call() -> tuple[Tensor, Recording]:
        with record(model) as mine:
            return model(vectors(1)), mine

    with ThreadPoolExecutor(1) as pool, ExitStack() as stack:
        if not begins:  # the block ends during the call instead
            other = stack.enter_context(record(model))
            model(vectors(2))
        future = pool.submit(call)
        try:
            assert pause.reached.wait(DEADLINE)
            if begins:
                other = stack.enter_context(record(model))
                model(vectors(2))
            else:
                stack.close()
        finally:
            pause.resume.set()
        output, mine = future.result(DEADLINE)
    torch.testing.assert_close(output, expected)
    assert_same(mine, alone)
    assert other


def test_what_one_thread_changes_is_unchanged_in_another() -> None:
    model, inputs = small(), (ids(7, 1), ids(5, 2))
    plain = model(*inputs)
    settings: list[dict[str, Any]] = [
        {"off": [(CROSS, 2)]},
        {"hidden": [1, 4]},
        {"beta": {(CROSS, 1): 0.0}},
        {},
    ]

    def answer(change: dict[str, Any], barrier: threading.Barrier) -> Tensor:
        with changed(model, **change):
            barrier.wait()
            logits = model(*inputs)
            barrier.wait()
        return logits

    alone = [answer(change, threading.Barrier(1)) for change in settings]
    for change, logits in zip(settings[:-1], alone):
        assert not torch.allclose(logits, plain), change
    together = in_step(
        *(lambda barrier, change=change: answer(change, barrier) for change in settings)
    )
    for one, other in zip(together, alone):
        torch.testing.assert_close(one, other)
    torch.testing.assert_close(together[-1], plain)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_a_recorded_model_is_an_ordinary_model(
    copied: Callable[[nn.Module], nn.Module],
) -> None:
    model, inputs = small(), (ids(7, 1), ids(5, 2))
    plain = model(*inputs)
    with record(model) as recording, changed(model, off=[(CROSS, 0)]):
        model(*inputs)
        before = {name: asked.query for name, asked in recording.items()}
        other = copied(model)
        assert hooks_of(other) == []
        torch.testing.assert_close(other(*inputs), plain)
        other(ids(7, 5), ids(5, 6))
    assert all(asked.query is before[name] for name, asked in recording.items())


@contextmanager
def both(model: nn.Module) -> Iterator[None]:
    with record(model), changed(model, off=[(CROSS, 0)], beta={(CROSS, 1): 2.0}, hidden=[0]):
        yield


def test_nothing_is_left_behind() -> None:
    model, inputs = small(), (ids(7, 1), ids(5, 2))
    plain = model(*inputs)
    with both(model), both(model):
        model(*inputs)
        assert hooks_of(model) == []
    with pytest.raises(RuntimeError, match="on purpose"), both(model):
        raise RuntimeError("on purpose")
    with pytest.raises(ValueError, match="target has ids"), both(model):
        model(ids(7, 1), ids(5, 2) + 100)
    assert hooks_of(model) == []
    torch.testing.assert_close(model(*inputs), plain)


def test_blocks_may_end_in_any_order() -> None:
    model = small()
    first, second = record(model), record(model)
    one = first.__enter__()
    model(ids(7, 1), ids(5, 2))
    two = second.__enter__()
    model(ids(7, 3), ids(5, 4))
    first.__exit__(None, None, None)
    queries = one[CROSS].query
    assert torch.equal(queries, two[CROSS].query)
    model(ids(7, 5), ids(5, 6))
    assert one[CROSS].query is queries
    assert not torch.equal(two[CROSS].query, queries)
    second.__exit__(None, None, None)


# Translating


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("precision", ["fp32", "bf16", pytest.param("int8", marks=kernels)])
def test_translating_is_not_disturbed_by_attention_in_another_thread(
    precision: str, tmp_path: Path
) -> None:
    whole: Any = load(translator(tmp_path / "run", length=5), device="cpu")
    if precision == "bf16":
        whole.model.bfloat16()
    if precision == "int8":
        int8(whole.model)
    texts = sorted(TEXTS, key=len)[:2]
    whole.find_head(texts[:1])
    expected = whole.translate(texts, beams=1)
    shown = whole.attention(texts[1], "ein")
    engine = pick(whole.model)
    with record(whole.model) as recording, changed(whole.model, off=[(CROSS, 0), (CROSS, 1)]):
        assert pick(whole.model).name == "eager"
        assert in_thread(lambda: pick(whole.model)).name == engine.name
        assert in_thread(lambda: whole.translate(texts, beams=1)) == expected
        assert not recording
        whole.translate(texts, beams=1)
        assert recording
        in_progress = recording[CROSS].query
        attended = in_thread(lambda: whole.attention(texts[1], "ein"))
        assert torch.equal(attended.weights, shown.weights)
        assert recording[CROSS].query is in_progress
    assert whole.translate(texts, beams=1) == expected
    if precision == "int8":
        assert pick(whole.model) is engine

    def translate(barrier: threading.Barrier) -> Any:
        barrier.wait()
        return whole.translate(texts, beams=1)

    def align(barrier: threading.Barrier) -> Any:
        barrier.wait()
        return str(list(whole.translations(texts, beams=1, attention=True, align=True)))

    alone = align(threading.Barrier(1))
    assert in_step(translate, align, translate, align) == [expected, alone] * 2


def test_sessions_with_attention_are_a_threads_own() -> None:
    model = small()

    def penalized(seed: int, barrier: threading.Barrier) -> Any:
        with open_session(model, ids(7, seed), beams=2, length=9, attention=True) as session:
            barrier.wait()
            assert hooks_of(model) == []
            prompts = [[1], [1]]
            return beam(session, prompts, width=2, end=2, max_length=7, coverage=0.4)

    alone = [penalized(seed, threading.Barrier(1)) for seed in (1, 2)]
    found = in_step(*(lambda barrier, seed=seed: penalized(seed, barrier) for seed in (1, 2)))
    assert found == alone


@pytest.mark.gpu
def test_a_captured_engine_stays_in_other_threads() -> None:
    model, source = small().cuda().bfloat16(), ids(7, 1).cuda()

    def answer() -> Any:
        with open_session(model, source, beams=2, length=9) as session:
            return beam(session, [[1], [1]], width=2, end=2, max_length=7)

    expected, engine = answer(), pick(model)
    assert engine.name == "cuda"
    with record(model) as recording, changed(model, off=[(CROSS, 0), (CROSS, 1)]):
        assert pick(model).name == "eager"
        assert in_thread(lambda: pick(model)) is engine
        assert in_thread(answer) == expected
        assert not recording
        answer()
        assert len(recording) == 6
    assert pick(model) is engine
    assert answer() == expected
