"""What only a CUDA machine can show: all kernels, no waiting, captured graphs, Triton."""

import pytest
import torch
from torch import Tensor

from regard.attention.attend import attend, explain_attention
from regard.attention.mask import Mask, PackedLengths, causal, documents, packed, padding, window
from regard.attention.weights import _by_chunks, arguments, attention_statistics, attention_weights
from tests.attention.problems import MASKS, close, expresses, problem
from tests.devices import no_waiting

# FlexAttention is compiled, which the checks of annotations would prevent.
pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("unchecked")]

HALF = [torch.bfloat16, torch.float16]
FLEX = [
    "none",
    "causal & padding",
    "window",
    "causal | prefixes",
    "documents in pieces",
    "tensor",
    "packed & causal",
    "a rule of one's own",
]


@pytest.mark.parametrize("name", sorted(MASKS))
@pytest.mark.parametrize("backend", ["auto", "sdpa", "packed"])
def test_every_mask_and_dtype(name: str, backend: str) -> None:
    for dtype in (*HALF, torch.float32, torch.float64):
        for L, S, K, V in ((67, 71, 16, 24), (131, 127, 40, 40), (1, 37, 64, 64), (37, 1, 13, 5)):
            case = problem(name, 3, 2, 4, L, S, K, V, seed=L)
            if expresses(backend, case.mask):
                case.compare(backend, dtype, "cuda")
                case.compare(backend, dtype, "cuda", training=False)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch's own compiler looks at it
@pytest.mark.parametrize("name", FLEX)
def test_flex_backwards_too(name: str) -> None:
    problem(name, 2, 2, 4, 131, 137, 32, 32).compare("flex", torch.bfloat16, "cuda")


@pytest.mark.parametrize("name", ["causal & padding", "window", "documents", "packed & causal"])
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_sizes_at_which_the_choice_changes(name: str, training: bool) -> None:
    for B, L in ((4, 256), (2, 1031)):
        case = problem(name, B, 16, 16, L, L, 64, 64)
        case.compare("auto", torch.bfloat16, "cuda", training)


@pytest.mark.parametrize("dtype", [*HALF, torch.float32, torch.float64], ids=str)
def test_a_bias_that_hides_every_key_gives_zero_gradients(dtype: torch.dtype) -> None:
    options = {"dtype": dtype, "device": "cuda", "requires_grad": True}
    query, key, value = (torch.randn(2, 3, n, 16, **options) for n in (37, 41, 41))
    bias = torch.randn(2, 3, 37, 41, **options)
    hidden = torch.zeros(37, 41, dtype=torch.bool, device="cuda")
    hidden[5], hidden[:, 7] = True, True
    for backend, mask in (("auto", None), ("sdpa", causal()), ("formula", padding([41, 0]))):
        added = bias.masked_fill(hidden, float("-inf"))
        out = attend(query, key, value, mask, bias=added, dropout=0.1, backend=backend)
        gradients = torch.autograd.grad(1000 * out.double().sum(), (query, key, value, bias))
        assert all(bool(gradient.isfinite().all()) for gradient in gradients)
        assert not out[:, :, 5].any()
        assert not gradients[0][:, :, 5].any()


@pytest.mark.parametrize(("length", "width"), [(33, 64), (65, 32), (197, 64)])
def test_many_short_sequences_train_in_a_kernel_of_our_own(length: int, width: int) -> None:
    case = problem("none", 67, 4, 4, length, length, width, width)
    case.compare("auto", torch.bfloat16, "cuda")
    case.compare("whole", torch.bfloat16, "cuda")
    x = torch.randn(67, 4, length, width, device="cuda", dtype=torch.bfloat16)
    assert explain_attention(x, x, x).backend == "sdpa"
    x.requires_grad_()
    assert explain_attention(x, x, x).backend == "whole"
    assert explain_attention(x, x, x, causal()).backend == "sdpa"


def some_masks(B: int, L: int) -> list[Mask | None]:
    """Masks whose tensors are on the device, one for each way to compute."""
    lengths = torch.randint(1, L + 1, (B,), device="cuda")
    ids = torch.arange(L, device="cuda")[None].expand(B, L) // 40
    return [
        None,
        causal(),
        causal(torch.tensor(3, device="cuda")),
        padding(lengths),
        causal() & padding(lengths),
        window(9),
        documents(ids),
        documents(ids.cpu()),
        packed(PackedLengths([L // 3, L - L // 3], "cuda")) & causal(),
    ]


@pytest.mark.parametrize("L", [61, 251])
def test_nothing_waits_for_the_device_and_graphs_capture(L: int) -> None:
    for mask in some_masks(2, L):
        B = 1 if mask is not None and mask.packing is not None else 2
        q, k, v = (torch.randn(B, 4, L, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        attend(q, k, v, mask)  # what is compiled or moved once may wait
        with no_waiting():
            out = attend(q, k, v, mask)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            replayed = attend(q, k, v, mask)
        replayed.zero_()
        graph.replay()
        torch.testing.assert_close(replayed, out, atol=1e-2, rtol=1e-2)


def test_different_widths_keep_a_fused_kernel() -> None:
    for K, V in ((64, 32), (32, 64), (41, 13)):
        q = torch.randn(2, 4, 256, K, device="cuda", dtype=torch.bfloat16)
        v = torch.randn(2, 4, 256, V, device="cuda", dtype=torch.bfloat16)
        for mask in (None, causal(), padding([256, 3]), window(9)):
            assert "plain matrix" not in explain_attention(q, q, v, mask)


@pytest.mark.parametrize("name", FLEX)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_statistics(name: str, dtype: torch.dtype) -> None:
    for L, S, K, topk in ((131, 2061, 40, 4), (67, 71, 64, 3)):
        case = problem(name, 3, 2, 4, L, S, K, K)
        q, k = (2 * t.to("cuda", dtype) for t in (case.query, case.key))
        have = attention_statistics(q, k, case.mask, topk=topk)
        want = _by_chunks(
            arguments(q.double(), k.double(), k.double(), case.mask, None, None), topk
        )
        tolerance = 2e-5 if dtype == torch.float32 else 2e-3
        for mine, right in zip(have[:3], want[:3]):
            torch.testing.assert_close(mine.double(), right, atol=tolerance * 5, rtol=tolerance)
        found = have.top_positions
        assert bool(((found == -1) == (want[3] == -1)).all())
        full = attention_weights(q.double(), k.double(), case.mask)
        at = full.gather(-1, found.clamp_min(0)).masked_fill(found == -1, 0)
        torch.testing.assert_close(at, have.top_weights.double(), atol=1e-3, rtol=1e-2)


def test_statistics_stream_and_take_a_bias() -> None:
    q, k = (torch.randn(2, 4, 300, 32, device="cuda") for _ in range(2))
    bias = torch.randn(1, 4, 300, 300, device="cuda")
    have = attention_statistics(q, k, causal(), bias=bias, topk=1)
    want = _by_chunks(arguments(q, k, k, causal(), None, bias), 1)
    for mine, right in zip(have, want):
        torch.testing.assert_close(mine, right, atol=1e-4, rtol=1e-4)
    del bias
    q, k = (torch.randn(1, 8, 8192, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    attention_statistics(q, k, causal())
    assert torch.cuda.max_memory_allocated() - before < 64e6  # the matrix would be 2.1 GB


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("mask", [None, causal(), window(300)], ids=["none", "causal", "window"])
def test_statistics_of_scores_that_leave_the_level(mask: Mask | None, dtype: torch.dtype) -> None:
    """Exponentials are taken from the best of earlier keys, wherever the later ones lie."""
    S = 3001
    way = torch.linspace(0, 1e4, S)
    noise = 1000 * torch.randn(S)
    for scores in (way, -way, way - 1e4, way * torch.sin(way), noise, torch.full((S,), -1e4)):
        q = torch.zeros(1, 1, S, 64, device="cuda", dtype=dtype)
        k = torch.zeros_like(q)
        q[..., 0], k[..., 0] = 1, scores.to("cuda", dtype)
        have = attention_statistics(q, k, mask, beta=1.0)
        wide = (t.double() for t in (q, k, k))
        want = _by_chunks(arguments(*wide, mask, 1.0, None), 4)
        # In units of log 2, float32 holds scores of 1e4 to 2^-10.
        for mine, right in zip(have[:3], want[:3]):
            torch.testing.assert_close(mine.double(), right, atol=5e-3, rtol=5e-3)


def test_statistics_keep_ties_and_what_a_bias_hides() -> None:
    q, k = torch.ones(1, 2, 67, 32, device="cuda"), torch.ones(1, 2, 3001, 32, device="cuda")
    found = attention_statistics(q, k, topk=16).top_positions
    assert bool((found.sort(-1).values.diff(dim=-1) > 0).all())
    assert bool(((found >= 0) & (found < 3001)).all())
    bias = torch.zeros(1, 1, 67, 3001, device="cuda")
    bias[..., 100:2900], bias[:, :, 7] = -torch.inf, -torch.inf
    have = attention_statistics(q, k, bias=bias, topk=3)
    want = _by_chunks(arguments(q, k, k, None, None, bias), 3)
    for mine, right in zip(have[:3], want[:3]):
        torch.testing.assert_close(mine, right, atol=1e-4, rtol=1e-4)
    assert bool((have.top_positions[:, :, 7] == -1).all())


def test_large_scores_do_not_overflow() -> None:
    def compare(dtype: torch.dtype) -> None:
        signs = torch.tensor([1.0, -1, 1, -1, 1, -1, -1, -1], device="cuda")
        k = (signs[:, None] * 50.0).expand(1, 1, 8, 8).to(dtype)
        v = torch.arange(8.0, device="cuda")[:, None].expand(1, 1, 8, 8).to(dtype)
        q = torch.full_like(k, 25.0).requires_grad_()
        out = attend(q, k, v, beta=1.0)
        want: Tensor = torch.full_like(out, 2.0)
        close(out, want.double(), dtype)
        out.sum().backward()
        assert q.grad is not None
        assert torch.isfinite(q.grad).all()

    compare(torch.float32)
    compare(torch.bfloat16)
