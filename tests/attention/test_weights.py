"""Weights for chosen rows, and statistics over all of them, against the whole matrix."""

import math
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from regard import (
    AttentionStatistics,
    Mask,
    attend,
    attention_statistics,
    attention_weights,
    causal,
    padding,
    window,
)
from regard.attention import weights as module
from regard.attention.mask import four_axes
from tests.attention.problems import MASKS, problem

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-5, torch.float16: 1e-5}
"""Half precision is widened before anything is computed, so it is as exact as float32."""


def matrix(
    query: Tensor,
    key: Tensor,
    mask: Mask | None = None,
    beta: Any = None,
    bias: Tensor | None = None,
) -> Tensor:
    """All weights at once, in float64, from the definition."""
    group = query.shape[1] // key.shape[1]
    scores = query.double() @ key.double().repeat_interleave(group, 1).mT
    L, S = scores.shape[-2:]
    allowed = torch.ones(1, 1, L, S, dtype=torch.bool) if mask is None else mask.tensor(L, S)
    allowed = allowed.expand(scores.shape)
    betas = torch.as_tensor(query.shape[-1] ** -0.5 if beta is None else beta, dtype=torch.float64)
    logits = torch.zeros_like(scores) if bias is None else four_axes(bias.double(), "bias")
    logits = logits.expand(scores.shape).clone()
    for h, each in enumerate(betas.expand(scores.shape[1]).tolist()):
        if math.isinf(each):
            best = scores[:, h].masked_fill(~allowed[:, h], -math.inf).amax(-1, keepdim=True)
            logits[:, h][scores[:, h] < best] = -math.inf
        else:
            logits[:, h] += each * scores[:, h]
    # A row that may attend to nothing weighs nothing.
    return logits.masked_fill(~allowed, -math.inf).softmax(-1).nan_to_num(0)


def close(have: Tensor, want: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(have.double(), want.double(), atol=tolerance, rtol=tolerance)


def normal(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64).to(dtype)


# --- Weights


@pytest.mark.parametrize("name", sorted(MASKS))
def test_weights_are_the_formula(name: str) -> None:
    case = problem(name, 2, 3, 6, 5, 7, 4, 3)
    for dtype, tolerance in TOLERANCE.items():
        query, key = case.query.to(dtype), case.key.to(dtype)
        have = attention_weights(query, key, case.mask)
        assert have.dtype == torch.promote_types(dtype, torch.float32)
        close(have, matrix(query, key, case.mask), tolerance)


def test_weights_are_those_of_attend() -> None:
    query, key, value = normal(2, 6, 5, 4), normal(2, 3, 7, 4), normal(2, 3, 7, 11)
    bias, mask = normal(2, 6, 5, 7), causal() & padding([7, 2])
    for beta in (None, 0, 0.3, math.inf, torch.tensor([0.0, 1, 2, 0.5, math.inf, 3])):
        grid = attention_weights(query, key, mask, beta, bias)
        want = grid @ value.repeat_interleave(2, 1)
        close(attend(query, key, value, mask, beta, bias), want, 1e-12)


ROWS: dict[str, tuple[Any, Sequence[int]]] = {
    "all": (None, range(5)),
    "one": (3, [3]),
    "one from the end": (-1, [4]),
    "list": ([3, 0, 3], [3, 0, 3]),
    "list from the end": ([-5, -1], [0, 4]),
    "tuple": ((1, 2), [1, 2]),
    "none of them": ([], []),
    "tensor": (torch.tensor([4, -4]), [4, 1]),
    "small integers": (torch.tensor([4, 1], dtype=torch.uint8), [4, 1]),
    "slice": (slice(1, 4), [1, 2, 3]),
    "slice with a step": (slice(None, None, 2), [0, 2, 4]),
    "slice backwards": (slice(None, None, -1), [4, 3, 2, 1, 0]),
    "slice backwards by two": (slice(3, None, -2), [3, 1]),
    "slice from the end": (slice(-2, None), [3, 4]),
    "slice beyond the end": (slice(3, 99), [3, 4]),
    "empty slice": (slice(4, 2), []),
    "empty slice backwards": (slice(2, 4, -1), []),
}


@pytest.mark.parametrize(("rows", "which"), ROWS.values(), ids=ROWS.keys())
def test_rows_in_every_form(rows: Any, which: Sequence[int]) -> None:
    query, key = normal(2, 6, 5, 4), normal(2, 3, 7, 4)
    index = torch.tensor(list(which), dtype=torch.int64)
    for mask in (None, causal() & padding([7, 2]), Mask.from_tensor(torch.ones(5, 7) > 0)):
        for bias in (None, normal(2, 1, 5, 7), normal(6, 1, 7)[:1]):
            have = attention_weights(query, key, mask, bias=bias, rows=rows)
            assert have.shape == (2, 6, len(which), 7)
            close(have, matrix(query, key, mask, bias=bias)[:, :, index], 1e-12)


def test_only_the_rows_asked_for_are_computed() -> None:
    with Largest() as largest:
        attention_weights(normal(1, 1, 1009, 2), normal(1, 1, 1013, 2), causal(), rows=[5, -1])
    assert largest.numel <= 2 * 1013 * 2  # two rows of scores, or the keys


def test_leading_axes_are_free() -> None:
    query, key = normal(5, 4), normal(7, 4)
    want = matrix(query[None, None], key[None, None], causal())[0, 0]
    close(attention_weights(query, key, causal()), want, 1e-12)
    close(attention_weights(query[None], key, causal()), want[None], 1e-12)
    many = attention_weights(normal(2, 1, 3, 5, 4), normal(11, 3, 7, 4), rows=[0, 2])
    assert many.shape == (2, 11, 3, 2, 7)


def test_gradients_reach_queries_and_keys() -> None:
    query, key = normal(1, 2, 3, 4).requires_grad_(), normal(1, 1, 5, 4).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda q, k: attention_weights(q, k, causal(), rows=[2, 0]), (query, key)
    )


# --- Statistics


def check(have: AttentionStatistics, grid: Tensor, topk: int, tolerance: float) -> None:
    """The statistics against those of the whole matrix (B, H, L, S)."""
    S = grid.shape[-1]
    close(have.entropy, -torch.special.xlogy(grid, grid).sum(-1), 10 * tolerance)
    close(have.received, grid.sum(-2), 10 * tolerance)
    assert have.top_weights.shape == have.top_positions.shape == (*grid.shape[:-1], topk)
    best = grid.topk(min(topk, S), -1).values if S else grid
    best = torch.nn.functional.pad(best, (0, topk - best.shape[-1]))
    close(have.top_weights, best, 10 * tolerance)
    # Each position holds the weight that is named beside it; of equal ones any may come first.
    missing = have.top_positions < 0
    assert torch.equal(missing, have.top_weights == 0)
    if S:
        named = grid.gather(-1, have.top_positions.clamp_min(0)).masked_fill(missing, 0)
        close(have.top_weights, named, 10 * tolerance)
    distinct = have.top_positions.sort(-1).values.diff(dim=-1)
    assert bool(((distinct > 0) | missing.flip(-1)[..., :-1]).all())


@pytest.mark.parametrize("name", sorted(MASKS))
def test_statistics_are_those_of_the_matrix(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = problem(name, 2, 3, 6, 11, 13, 4, 3)
    # Row by row, a few rows at a time, or all at once.
    for dtype, chunk in zip(TOLERANCE, (1, 300, 700, module.CHUNK)):
        monkeypatch.setattr(module, "CHUNK", chunk)
        query, key = case.query.to(dtype), case.key.to(dtype)
        have = attention_statistics(query, key, case.mask)
        assert have.entropy.dtype == torch.promote_types(dtype, torch.float32)
        assert have.top_positions.dtype == torch.int64
        check(have, matrix(query, key, case.mask), 4, TOLERANCE[dtype])


@settings(max_examples=50)
@given(
    st.sampled_from(sorted(MASKS)),
    st.integers(1, 3),
    st.sampled_from([(1, 1), (2, 2), (1, 3), (2, 4)]),
    st.integers(1, 9),
    st.integers(1, 9),
    st.sampled_from([None, 0, 0.7, math.inf]),
    st.integers(1, 11),
    st.integers(0, 2**20),
)
def test_statistics_of_any_shape(
    name: str, B: int, heads: tuple[int, int], L: int, S: int, beta: Any, topk: int, seed: int
) -> None:
    G, H = heads
    case = problem(name, B, G, H, L, S, 3, 3, seed)
    have = attention_statistics(case.query, case.key, case.mask, beta, topk=topk)
    check(have, matrix(case.query, case.key, case.mask, beta), topk, 1e-12)


BETAS: dict[str, Any] = {
    "zero": 0,
    "number": 1.7,
    "infinite": math.inf,
    "tensor": torch.tensor(0.3),
    "per head": torch.tensor([0.0, 0.4, 1.0, math.inf, 2.5, 0.1]),
}


@pytest.mark.parametrize("beta", BETAS.values(), ids=BETAS.keys())
@pytest.mark.parametrize("biased", [False, True], ids=["", "bias"])
def test_statistics_with_beta_and_bias(beta: Any, biased: bool) -> None:
    query, key = normal(2, 6, 5, 4), normal(2, 3, 7, 4)
    for shape in [(2, 6, 5, 7), (5, 7), (7,)] if biased else [None]:
        bias = None if shape is None else normal(*shape)
        for mask in (None, window(2, 1), causal() & padding([7, 0])):
            have = attention_statistics(query, key, mask, beta, bias)
            check(have, matrix(query, key, mask, beta, bias), 4, 1e-7)


def test_uniform_rows() -> None:
    have = attention_statistics(normal(2, 3, 5, 4), normal(2, 3, 7, 4), beta=0, topk=9)
    close(have.entropy, torch.full((2, 3, 5), math.log(7)), 1e-7)
    close(have.received, torch.full((2, 3, 7), 5 / 7), 1e-7)
    close(have.top_weights[..., :7], torch.full((2, 3, 5, 7), 1 / 7), 1e-7)
    assert torch.equal(
        have.top_positions.sort(-1).values, torch.tensor([-1, -1, *range(7)]).expand(2, 3, 5, 9)
    )


def test_ties_are_shared() -> None:
    query, key = torch.ones(1, 1), torch.tensor([[1.0], [3.0], [2.0], [3.0]])
    have = attention_statistics(query, key, beta=math.inf)
    assert have.top_weights.tolist() == [[0.5, 0.5, 0.0, 0.0]]
    assert sorted(have.top_positions[0, :2].tolist()) == [1, 3]
    assert have.top_positions[0, 2:].tolist() == [-1, -1]
    assert have.received.tolist() == [0, 0.5, 0, 0.5]
    close(have.entropy, torch.tensor([math.log(2)]), 1e-7)


def test_rows_that_see_nothing() -> None:
    have = attention_statistics(normal(2, 3, 5, 4), normal(2, 3, 7, 4), padding([0, 7]))
    for name, empty in (("entropy", 0), ("received", 0), ("top_weights", 0), ("top_positions", -1)):
        assert bool((getattr(have, name)[0] == empty).all())
        assert not bool((getattr(have, name)[1] == empty).all())


@pytest.mark.parametrize(("L", "S"), [(0, 7), (5, 0), (0, 0)])
def test_nothing_to_look_at(L: int, S: int) -> None:
    have = attention_statistics(normal(2, 6, L, 4), normal(2, 3, S, 4))
    check(have, torch.zeros(2, 6, L, S), 4, 1e-12)
    assert attention_weights(normal(2, 6, L, 4), normal(2, 3, S, 4)).shape == (2, 6, L, S)


def test_statistics_keep_the_leading_axes() -> None:
    query, key = normal(5, 4), normal(7, 4)
    for axes in range(4):
        lead = (1,) * axes
        have = attention_statistics(query.view(*lead, 5, 4), key.view(*lead, 7, 4), topk=2)
        assert [t.shape for t in have] == [(*lead, 5), (*lead, 7), (*lead, 5, 2), (*lead, 5, 2)]


def test_statistics_hold_no_graph() -> None:
    have = attention_statistics(normal(3, 4).requires_grad_(), normal(5, 4).requires_grad_())
    assert not any(tensor.requires_grad for tensor in have)


# --- Memory


class Largest(TorchDispatchMode):
    """The most numbers that any tensor made inside holds in memory of its own."""

    numel = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                held = tensor.untyped_storage().nbytes() // tensor.element_size()
                self.numel = max(self.numel, held)
        return out


MANY: dict[str, Callable[[int, int], Mask | None]] = {
    "none": lambda L, S: None,
    "causal & padding": lambda L, S: causal() & padding([S, S // 2]),
    "own rule": lambda L, S: Mask(lambda at: (at.query - at.key) % 3 == 0, "own"),
}


@pytest.mark.parametrize("make", MANY.values(), ids=MANY.keys())
def test_statistics_never_hold_the_matrix(
    make: Callable[[int, int], Mask | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    B, G, H, L, S, K, chunk = 2, 1, 2, 149, 151, 3, 2048
    monkeypatch.setattr(module, "CHUNK", chunk)
    query, key = normal(B, H, L, K), normal(B, G, S, K)
    mask = make(L, S)
    with Largest() as largest:
        have = attention_statistics(query, key, mask)
    # A chunk, or what the result and the inputs hold; the matrix would be thirty times as much.
    limit = max(chunk, B * H * S * K, B * H * L * 4)
    assert largest.numel <= limit < B * H * L * S / 30
    check(have, matrix(query, key, mask), 4, 1e-12)


PEAK = """
import resource
import torch
from regard import Mask, attention_statistics as statistics, causal

H, L = {H}, {L}
query, key = torch.randn(1, H, L, 32), torch.randn(1, H, L, 32)
own = Mask(lambda at: (at.query - at.key) % 3 == 0, "own")
statistics(query[:, :, :5], key[:, :, :5], own)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
statistics(query, key, {mask})
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


@pytest.mark.parametrize(
    ("H", "L", "mask", "times"),
    [
        (3, 2048, "None", 1),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                (4, 4096, "None", 5),
                (4, 4096, "causal()", 5),
                (1, 4096, "own", 5),
                (8, 8192, "None", 2),
            ]
        ),
    ],
)
def test_the_memory_of_statistics_is_bounded(H: int, L: int, mask: str, times: int) -> None:
    """In a process of its own, since the peak of a process never falls."""
    rows_and_keys = 4 * H * L * (32 + 2 + 3 * 4)  # a copy of the keys, and the result
    for _ in range(times):
        run = subprocess.run(
            [sys.executable, "-c", PEAK.format(H=H, L=L, mask=mask)],
            capture_output=True,
            text=True,
            check=True,
        )
        # A rule of one's own computes with indices, four chunks of eight bytes in all.
        chunks = 6 if mask == "own" else 2
        assert int(run.stdout) < rows_and_keys + chunks * 4 * module.CHUNK


def test_statistics_can_be_mapped_over() -> None:
    """torch.vmap gives what a loop gives, over queries and keys, or over queries alone."""
    query, key = torch.randn(3, 2, 6, 5, 8), torch.randn(3, 2, 2, 7, 8)
    mask = causal() & padding([7, 4])
    both = torch.vmap(lambda q, k: attention_statistics(q, k, mask=mask, topk=9))(query, key)
    each = [attention_statistics(q, k, mask=mask, topk=9) for q, k in zip(query, key)]
    alone = torch.vmap(lambda q: attention_statistics(q, key[0], mask=mask), in_dims=0)(query)
    each_alone = [attention_statistics(q, key[0], mask=mask) for q in query]
    for mapped, loop in ((both, each), (alone, each_alone)):
        for found, expected in zip(mapped, zip(*loop)):
            torch.testing.assert_close(found, torch.stack(expected))
