"""Every backend under every mask gives what the formula gives in float64, backwards too."""

import math
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from regard.attention import plan
from regard.attention.arguments import arguments
from regard.attention.attend import attend, distribution, explain_attention, formula
from regard.attention.backends import flex
from regard.attention.mask import Mask, causal, documents, packed, padding, prefix, window
from regard.attention.weights import attention_statistics, attention_weights
from tests.attention.problems import MASKS, TOLERANCE, close, expresses, problem

BACKENDS = ["auto", "formula", "sdpa", "packed"]


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", sorted(MASKS))
def test_every_mask_and_dtype(name: str, backend: str, training: bool) -> None:
    for dtype in TOLERANCE:
        # More queries than keys in two of the dtypes, fewer in the others.
        L, S = (13, 11) if dtype in (torch.float64, torch.bfloat16) else (11, 13)
        case = problem(name, 3, 2, 6, L, S, 5, 3, seed=L)
        if expresses(backend, case.mask):
            case.compare(backend, dtype, training=training)


sizes = st.tuples(
    st.sampled_from(sorted(MASKS)),
    st.sampled_from([1, 2, 3]),
    st.sampled_from([(1, 1), (2, 2), (1, 3), (2, 4)]),
    st.integers(1, 13),
    st.integers(1, 13),
    st.sampled_from([1, 3, 5, 8]),
    st.sampled_from([1, 2, 5, 8]),
    st.integers(0, 2**20),
)


@settings(max_examples=300)
@given(sizes, st.sampled_from(BACKENDS), st.sampled_from([*TOLERANCE]))
def test_any_shape(
    size: tuple[str, int, tuple[int, int], int, int, int, int, int],
    backend: str,
    dtype: torch.dtype,
) -> None:
    name, B, (G, H), L, S, K, V, seed = size
    case = problem(name, B, G, H, L, S, K, V, seed)
    if expresses(backend, case.mask):
        case.compare(backend, dtype)


@pytest.mark.parametrize("name", ["causal", "causal & padding", "window", "packed & causal"])
def test_long_enough_to_be_cut_into_rectangles(name: str) -> None:
    case = problem(name, 2, 1, 2, 307, 311, 8, 8)
    for dtype in (torch.float64, torch.float32):
        case.compare("auto", dtype)
        case.compare("packed", dtype)
    if name in ("window", "packed & causal"):
        assert explain_attention(case.query, case.key, case.value, case.mask).backend == "packed"


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradcheck(backend: str) -> None:
    for mask in (causal() & padding([3, 0]), window(1), causal() | prefix(2)):
        inputs = [torch.randn(2, 1, 4, 2, dtype=torch.float64) for _ in range(3)]
        for tensor in inputs:
            tensor.requires_grad_()
        assert torch.autograd.gradcheck(lambda *t, m=mask: attend(*t, m, backend=backend), inputs)


# Shapes.


def test_plain_matrices() -> None:
    q, k, v = torch.randn(3, 5), torch.randn(7, 5), torch.randn(7, 2)
    expected = torch.softmax(q @ k.T / math.sqrt(5), -1) @ v
    torch.testing.assert_close(attend(q, k, v), expected)


def test_leading_axes_broadcast_and_come_back() -> None:
    q, k, v = torch.randn(3, 1, 2, 5, 7), torch.randn(11, 2, 13, 7), torch.randn(13, 3)
    out = attend(q, k, v)
    assert out.shape == (3, 11, 2, 5, 3)
    one = attend(q[1, 0, 1], k[4, 1], v)
    torch.testing.assert_close(out[1, 4, 1], one)


def test_three_axes_are_a_batch() -> None:
    q = torch.randn(3, 5, 7)
    out = attend(q, q, q, padding([5, 2, 1]))
    torch.testing.assert_close(out[1], attend(q[1], q[1, :2], q[1, :2]))


def test_grouped_heads_share_keys_in_order() -> None:
    q, k, v = torch.randn(2, 6, 5, 7), torch.randn(2, 2, 11, 7), torch.randn(2, 2, 11, 3)
    out = attend(q, k, v)
    for h in range(6):
        torch.testing.assert_close(out[:, h], attend(q[:, h], k[:, h // 3], v[:, h // 3]))


@pytest.mark.parametrize("shape", [(2, 3, 0, 5), (2, 0, 4, 5), (0, 3, 4, 5)])
def test_nothing_to_compute(shape: tuple[int, ...]) -> None:
    q = torch.randn(shape)
    assert attend(q, q, q).shape == shape


NO_SENTENCE: dict[str, Callable[[], Mask]] = {
    "causal": causal,
    "padding & causal": lambda: causal() & padding([]),
    "padding or prefixes": lambda: padding(torch.tensor([], dtype=torch.long)) | prefix(2),
    "one prefix, no length": lambda: prefix([3]) & padding([]),
    "offsets": lambda: causal(torch.tensor([], dtype=torch.long)),
    "documents": lambda: causal() & documents(torch.zeros(0, 7, dtype=torch.long)),
    "tensor": lambda: ~causal() & Mask.from_tensor(torch.ones(0, 1, 5, 7) > 0),
    "own rule": lambda: Mask(lambda at: at.batch == at.key, "own") & padding([]),
}


@pytest.mark.parametrize("make", NO_SENTENCE.values(), ids=NO_SENTENCE.keys())
def test_an_empty_batch_has_an_empty_result(make: Callable[[], Mask]) -> None:
    query, key, value = (
        torch.randn(0, 3, *sizes, requires_grad=True) for sizes in ((5, 4), (7, 4), (7, 2))
    )
    for backend in ("auto", *plan.BACKENDS):
        out = attend(query, key, value, make(), backend=backend)
        assert out.shape == (0, 3, 5, 2)
        assert torch.autograd.grad(out.sum(), query)[0].shape == query.shape
    assert attention_weights(query, key, make()).shape == (0, 3, 5, 7)
    shapes = [(0, 3, 5), (0, 3, 7), (0, 3, 5, 4), (0, 3, 5, 4)]
    assert [tensor.shape for tensor in attention_statistics(query, key, make())] == shapes
    assert explain_attention(query, key, value, make()).backend == "formula"
    row = torch.randn(1, 3, 0, 4)
    assert attend(row, row, row, packed([]) & causal()).shape == row.shape


def test_no_keys_give_zeros() -> None:
    q, k, v = torch.randn(2, 3, 5, 7), torch.randn(2, 3, 0, 7), torch.randn(2, 3, 0, 2)
    assert torch.equal(attend(q, k, v, causal()), torch.zeros(2, 3, 5, 2))


# β, the inverse temperature.


def test_beta_zero_is_uniform_over_what_is_allowed() -> None:
    q, v = torch.randn(2, 3, 5, 7), torch.randn(2, 3, 5, 2)
    for backend in BACKENDS[:3]:
        out = attend(q, q, v, causal(), beta=0, backend=backend)
        means = v.cumsum(2) / torch.arange(1, 6)[:, None]
        torch.testing.assert_close(out, means)


def test_beta_infinite_is_hard_and_ties_share() -> None:
    key = torch.tensor([[1.0, 0], [0, 1], [1, 0], [-1, 0]])
    query = torch.tensor([[2.0, 0], [0, 3], [1, 1]])
    value = torch.eye(4)
    third = 1 / 3
    expected = [[0.5, 0, 0.5, 0], [0, 1, 0, 0], [third, third, third, 0]]
    out = attend(query, key, value, beta=math.inf)
    torch.testing.assert_close(out, torch.tensor(expected))
    biased = attend(query[:1], key, value, beta=math.inf, bias=torch.tensor([[1.0, 9, 0, 9]]))
    torch.testing.assert_close(biased[0, 0], torch.tensor(1.0).sigmoid())
    masked = attend(query, key, value, window(0, 0, offset=3), beta=math.inf)
    torch.testing.assert_close(masked, torch.tensor([[0.0, 0, 0, 1], [0] * 4, [0] * 4]))


def test_beta_infinite_gives_gradients_to_values_alone() -> None:
    q, k, v = (torch.randn(1, 2, 3, 5, dtype=torch.float64).requires_grad_() for _ in range(3))
    out = attend(q, k, v, beta=math.inf)
    dq, dk, dv = torch.autograd.grad(
        out.sum(), (q, k, v), allow_unused=True, materialize_grads=True
    )
    assert not dq.any()
    assert not dk.any()
    torch.testing.assert_close(dv.sum((2, 3)), torch.full((1, 2), 15.0, dtype=torch.float64))


@pytest.mark.parametrize("betas", [[0.0, 0.5, 3.0], [0.0, 1.0, math.inf]])
def test_one_beta_per_head(betas: list[float]) -> None:
    q, k, v = torch.randn(2, 3, 5, 7), torch.randn(2, 3, 11, 7), torch.randn(2, 3, 11, 2)
    out = attend(q, k, v, causal(), beta=torch.tensor(betas))
    for h, beta in enumerate(betas):
        torch.testing.assert_close(
            out[:, h], attend(q[:, h], k[:, h], v[:, h], causal(), beta=beta)
        )


def test_beta_can_be_learned() -> None:
    q, k, v = (torch.randn(2, 3, 5, 7, dtype=torch.float64) for _ in range(3))
    beta = torch.rand(3, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda b: attend(q, k, v, causal(), beta=b), beta)


# Bias and dropout.


@pytest.mark.parametrize("shape", [(5, 7), (2, 5, 7), (2, 3, 5, 7), (1, 3, 1, 7), (7,)])
def test_bias_broadcasts_to_batch_heads_queries_keys(shape: tuple[int, ...]) -> None:
    case = problem("causal & padding", 2, 3, 3, 5, 7, 3, 2)
    case.bias = torch.randn(shape, dtype=torch.float64)
    for dtype in TOLERANCE:
        case.compare("auto", dtype)


def test_bias_takes_gradients() -> None:
    q, k, v = (torch.randn(2, 3, 5, 7, dtype=torch.float64) for _ in range(3))
    bias = torch.randn(3, 5, 5, dtype=torch.float64)[None].requires_grad_()
    assert torch.autograd.gradcheck(lambda b: attend(q, k, v, causal(), bias=b), bias)


@pytest.mark.parametrize("backend", BACKENDS)
def test_dropout_drops_weights_and_keeps_their_mean(backend: str) -> None:
    q, v = torch.zeros(1, 1, 400, 4), torch.ones(1, 1, 400, 4)
    out = attend(q, q, v, window(400), dropout=0.25, backend=backend)
    assert out.std() > 0
    assert abs(out.mean() - 1) < 0.01


# Numbers that are hard to hold.


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_scores_do_not_overflow(dtype: torch.dtype, backend: str) -> None:
    signs = torch.tensor([1.0, -1, 1, -1, 1, -1, -1])
    q = torch.full((1, 1, 7, 4), 50.0, dtype=dtype)
    k = (signs[:, None] * 50.0).expand(1, 1, 7, 4).to(dtype)
    v = torch.arange(7.0)[:, None].expand(1, 1, 7, 4).to(dtype)
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    out = attend(*leaves, mask=window(7), beta=1.0, backend=backend)
    torch.testing.assert_close(out, torch.full_like(out, 2.0))
    out.sum().backward()
    assert all(torch.isfinite(t.grad).all() for t in leaves)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("mask", [None, causal(), padding([5, 3])])
def test_half_precision_trains_in_float32_on_a_cpu(autocast: bool, mask: Mask | None) -> None:
    """Short sequences are computed in float32, and rounded once."""
    q, k, v = (torch.randn(2, 3, 5, 8).bfloat16().requires_grad_() for _ in range(3))
    wide = [t.detach().float().requires_grad_() for t in (q, k, v)]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = attend(q, k, v, mask)
    expected = attend(*wide, mask)
    assert torch.equal(out, expected.bfloat16())
    out.float().square().sum().backward()
    expected.bfloat16().float().square().sum().backward()
    for mine, theirs in zip((q, k, v), wide):
        assert mine.grad is not None
        assert theirs.grad is not None
        assert torch.equal(mine.grad, theirs.grad.bfloat16())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=lambda d: str(d)[6:])
def test_who_may_attend_to_nothing_gets_zeros_and_touches_nobody(
    dtype: torch.dtype, backend: str
) -> None:
    mask = padding([5, 0, 3]) & causal(offset=-2)
    q, k, v = (torch.randn(3, 2, 5, 7, dtype=dtype).requires_grad_() for _ in range(3))
    out = attend(q, k, v, mask, backend=backend)
    alone = mask.tensor(5, 5).any(-1)
    dq, dk, dv = torch.autograd.grad(out.float().square().sum(), (q, k, v))
    for tensor in (out, dq):
        assert not tensor[~alone.expand(3, 2, 5)].any()
        assert tensor[alone.expand(3, 2, 5)].any()
    seen = mask.tensor(5, 5).any(-2).expand(3, 2, 5)
    for tensor in (dk, dv):
        assert torch.isfinite(tensor).all()
        assert not tensor[~seen].any()
    one = attend(q[2:], k[2:, :, :3], v[2:, :, :3], causal(offset=-2))
    close(out[2:], one.double(), dtype)


# The choice, and what is said of it.


def plan_of(L: int, S: int, mask: Mask | None, **more: object) -> str:
    q, k = torch.randn(2, 3, L, 8), torch.randn(2, 3, S, 8)
    return explain_attention(q, k, k, mask, **more)


EMPTY_MASKS: dict[str, Callable[[], Mask | None]] = {
    "no mask": lambda: None,
    "own rule": lambda: padding([7, 0]) & Mask(lambda at: (at.query + at.key) % 3 > 0, "own"),
}
EMPTY_BETAS = {
    "default": None,
    "zero": 0,
    "hard": math.inf,
    "per head": torch.tensor([0.5, math.inf, 2.0]),
}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("beta", EMPTY_BETAS.values(), ids=EMPTY_BETAS.keys())
@pytest.mark.parametrize("make", EMPTY_MASKS.values(), ids=EMPTY_MASKS.keys())
def test_a_bias_that_hides_every_key_gives_zeros_and_zero_gradients(
    make: Callable[[], Mask | None], beta: float | Tensor | None, dtype: torch.dtype
) -> None:
    numbers = torch.Generator().manual_seed(1)
    query, key, value, bias = (
        torch.randn(2, 3, *sizes, generator=numbers).to(dtype).requires_grad_()
        for sizes in ((5, 4), (7, 4), (7, 4), (5, 7))
    )
    hidden = torch.zeros(2, 3, 5, 7, dtype=torch.bool)
    hidden[:, :, 1], hidden[..., 2], hidden[0, 1], hidden[1, 2, 3, :6] = True, True, True, True
    allowed = torch.ones(5, 7) > 0 if (mask := make()) is None else mask.tensor(5, 7)
    empty = ~(allowed & ~hidden).any(-1)

    def check(out: Tensor, leaves: list[Tensor]) -> None:
        assert bool((out[empty] == 0).all())
        total = 1000 * out.double().sum()
        gradients = torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)
        assert all(bool(gradient.isfinite().all()) for gradient in gradients)
        assert bool((gradients[0][empty] == 0).all())
        assert bool((gradients[1][hidden] == 0).all())

    for dropout in (0.0, 0.5):
        for backend in ("auto", "formula"):  # of which "auto" takes sdpa, but for hard attention
            added = bias.masked_fill(hidden, -math.inf)
            options = {"bias": added, "dropout": dropout, "backend": backend}
            out = attend(query, key, value, make(), beta, **options)
            check(out, [query, bias, key, value])
            if not dropout:
                near = attention_weights(query, key, make(), beta, added).double() @ value.double()
                torch.testing.assert_close(out.double(), near, atol=0.05, rtol=0.05)
    rows = torch.tensor([3, 1])
    chosen = attention_weights(
        query, key, make(), beta, bias.masked_fill(hidden, -math.inf), rows=rows
    )
    whole = chosen.new_zeros(2, 3, 5, 7).index_copy(2, rows, chosen)
    check(whole, [query, bias, key])
    entropy = attention_statistics(
        query, key, make(), beta, bias.masked_fill(hidden, -math.inf)
    ).entropy
    assert bool((entropy[empty] == 0).all())


def test_hard_attention_skips_what_a_bias_hides() -> None:
    query, key = torch.ones(1, 1), torch.tensor([[3.0], [2.0], [1.0]])
    bias = torch.tensor([-math.inf, 0.0, 0.0])
    assert attention_weights(query, key, beta=math.inf, bias=bias).tolist() == [[0, 1, 0]]
    assert attention_weights(query, key, beta=1e4, bias=bias).tolist() == [[0, 1, 0]]  # its limit


def test_flags_serve_where_they_can() -> None:
    assert "nothing is masked" in plan_of(5, 7, None)
    assert "kernel flag" in plan_of(7, 7, causal())
    assert "kernel flag" in plan_of(7, 7, causal(offset=0))
    assert "sees every key" in plan_of(1, 7, causal())
    assert "sees every key" in plan_of(1, 7, causal(offset=6))
    assert "formula" in plan_of(5, 7, causal(), beta=math.inf)
    assert "bias" in plan_of(5, 7, causal(), bias=torch.zeros(5, 7))


def test_no_tensor_is_built_where_a_flag_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> Tensor:
        raise AssertionError("a mask tensor was built")

    monkeypatch.setattr(Mask, "block", refuse)
    q = torch.randn(1, 2, 307, 8)
    attend(q, q, q, causal())
    attend(q[:, :, -1:], q, q, causal())
    attend(q, q, q, packed([7, 300]) & causal())
    attend(q, q, q, window(3))
    attend(q, q, q, documents([0] * 100 + [1] * 100 + [2] * 107))


def test_different_widths_keep_the_fused_kernel() -> None:
    q, v = torch.randn(2, 3, 5, 8), torch.randn(2, 3, 5, 13)
    assert explain_attention(q, q, v).kernel == "FlashAttention"
    assert explain_attention(q, q, v, padding([1, 2])).kernel == "FlashAttention"


def test_without_a_compiler_it_runs_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex, "missing", lambda device: "a C++ compiler")
    assert "a C++ compiler was not found" in plan_of(5, 7, causal())
    case = problem("documents in pieces", 2, 2, 2, 11, 13, 16, 16)
    case.compare("auto", torch.float32)


@pytest.mark.parametrize("length", [32, 512])
def test_a_plan_depends_on_the_mean_length_of_documents(length: int) -> None:
    """The same documents, whether one row of ids serves the batch or each sentence has its own."""
    ids = torch.arange(2048)[None] // length
    with FakeTensorMode():
        x = torch.empty(64, 2, 2048, 128, dtype=torch.bfloat16, device="cuda")
    plans = [
        plan.choose(arguments(x, x, x, documents(rows), None, None), 0.0, "auto")
        for rows in (ids, ids.expand(64, -1))
    ]
    assert plans[0] == plans[1]
    assert plans[0].route == ("lengths" if length == 512 else "tensor")


def test_the_formula_is_the_formula() -> None:
    q, k, v = torch.randn(5, 7), torch.randn(3, 7), torch.randn(3, 2)
    torch.testing.assert_close(distribution(q, k), torch.softmax(q @ k.T, -1))
    torch.testing.assert_close(
        formula(q, k, v, beta=7**-0.5), F.scaled_dot_product_attention(q, k, v)
    )


# Compiled, in a process of its own: torch.compile cannot see through the checks of annotations.

COMPILED = """
import torch
from regard import attend, causal, documents, packed, padding, window

masks = [None, causal(), causal() & padding([3, 300]), window(3), packed([100, 205]) & causal(),
         documents([0] * 100 + [1] * 205), ~causal()]
compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
for mask in masks:
    B = 1 if mask is not None and mask.packing is not None else 2
    inputs = [torch.randn(B, 2, 305, 8).requires_grad_() for _ in range(3)]
    pair = compiled(*inputs, mask), attend(*inputs, mask)
    torch.testing.assert_close(*pair)
    seed = torch.randn_like(pair[0])
    for have, want in zip(*(torch.autograd.grad(out, inputs, seed) for out in pair)):
        torch.testing.assert_close(have, want, atol=1e-5, rtol=1e-4)
    print("compiled", mask)
"""


FLEX = """
import torch
from regard import attend
from tests.attention.problems import problem

before = torch._dynamo.config.recompile_limit
names = ["causal & padding", "documents in pieces", "packed & causal", "a rule of one's own"]
for name in names:
    problem(name, 2, 2, 4, 37, 41, 16, 16).compare("flex", torch.float32, training=False)
    print("compared", name)

# Once kernels are made for any size, neither new lengths nor new masks of a kind make another.
from torch._dynamo.utils import counters
from regard import padding, window
from regard.attention.backends import flex

flex.EXACT = 0
flex._seen.clear()
torch.set_grad_enabled(False)

def graphs(L, left):
    x = torch.randn(2, 2, L, 16)
    for mask in (window(left), padding([L, left])):
        attend(x, x, x, mask, backend="flex")
    return counters["stats"]["unique_graphs"]

made = [graphs(L, left) for L, left in ((64, 3), (48, 4), (56, 9), (80, 5))]
assert made[1] == made[3], made
assert torch._dynamo.config.recompile_limit == before
"""


@pytest.mark.parametrize(
    ("script", "done"),
    [(COMPILED, "compiled"), pytest.param(FLEX, "compared", marks=pytest.mark.slow)],
    ids=["whole graphs", "flex"],
)
def test_compiled(script: str, done: str) -> None:
    # torch itself still uses its own torch.jit, which it deprecates, and speaks of Python 3.13.0.
    warnings = ["-W", "error", "-W", "ignore:`torch.jit:DeprecationWarning"]
    warnings += ["-W", "ignore:Guards may run slower:RuntimeWarning"]
    run = subprocess.run(
        [sys.executable, *warnings, "-c", script], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr[-2000:]
    assert run.stdout.count(done) >= 4
