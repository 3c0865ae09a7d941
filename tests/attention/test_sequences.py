"""The C++ kernel for packed sequences: equal to the formula in float64, forwards and backwards,
with any number of threads, on every instruction set; what it does not compute goes elsewhere."""

import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from regard.attention.attend import attend, explain_attention
from regard.attention.backends import sequences
from regard.attention.mask import Mask, causal, packed, prefix, window
from regard.native import build
from tests.processes import HANG

pytestmark = pytest.mark.skipif(
    sequences.SOURCE.library() is None, reason=sequences.SOURCE.missing()
)

Shape = tuple[int, int, int, int]
"""H query heads, G key heads, key width, value width."""

# Lengths that end within a vector, at its end and after it, within a block of rows and beyond.
QUERIES, SOURCES = [3, 16, 1, 0, 29, 53], [17, 5, 2, 7, 0, 67]
MASKS: dict[str, tuple[list[int], list[int], Callable[[], Mask] | None]] = {
    "self": (QUERIES, QUERIES, None),
    "causal": (QUERIES, QUERIES, causal),
    "cross": (QUERIES, SOURCES, None),
    "causal, fewer or more keys than queries": (QUERIES, SOURCES, causal),
    "window": (QUERIES, QUERIES, lambda: window(4, 2)),
    "causal window": (QUERIES, QUERIES, lambda: causal() & window(19)),
    "prefix": (QUERIES, QUERIES, lambda: causal() | prefix(5)),
}


def problem(queries: list[int], sources: list[int], shape: Shape) -> list[Tensor]:
    """Queries, keys, values and the gradient above: (1, heads, tokens, width)."""
    H, G, K, V = shape
    sizes = (sum(queries), H, K), (sum(sources), G, K), (sum(sources), G, V), (sum(queries), H, V)
    return [torch.randn(T, heads, width).transpose(0, 1)[None] for T, heads, width in sizes]


def mask_of(name: str) -> Mask:
    queries, sources, other = MASKS[name]
    inside = packed(queries) if queries is sources else packed(queries, sources)
    return inside if other is None else inside & other()


def gradients(inputs: list[Tensor], mask: Mask, **more: object) -> list[Tensor]:
    """The output, and the gradients of queries, keys and values."""
    *tensors, above = inputs
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    out = attend(*leaves, mask=mask, **more)  # type: ignore[arg-type]
    return [out.detach(), *torch.autograd.grad(out, leaves, above)]


@pytest.mark.parametrize("shape", [(5, 5, 16, 16), (6, 2, 32, 48), (3, 3, 80, 16)])
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("beta", [None, 0.4])
def test_equals_the_formula(name: str, shape: Shape, beta: float | None) -> None:
    torch.manual_seed(7)
    queries, sources, _ = MASKS[name]
    inputs, mask = problem(queries, sources, shape), mask_of(name)
    assert (
        explain_attention(*inputs[:3], mask=mask, beta=beta).kernel
        == "a C++ kernel of Regard's own"
    )
    wide = [tensor.double() for tensor in inputs]
    wanted = gradients(wide, mask, beta=beta, backend="formula")
    for have, want in zip(gradients(inputs, mask, beta=beta), wanted):
        assert have.dtype == torch.float32
        torch.testing.assert_close(have.double(), want, rtol=1e-5, atol=1e-5)
    # Who sees nothing receives zeros, and gives none but zeros.
    empty = ~mask.tensor(sum(queries), sum(sources))[0, 0].any(-1)
    have = gradients(inputs, mask, beta=beta)
    assert not have[0][:, :, empty].any()
    assert not have[1][:, :, empty].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_at_the_end_alone(dtype: torch.dtype) -> None:
    torch.manual_seed(7)
    inputs = [tensor.to(dtype) for tensor in problem(QUERIES, QUERIES, (4, 4, 32, 32))]
    mask = mask_of("causal")
    halves, wholes = gradients(inputs, mask), gradients([x.float() for x in inputs], mask)
    for have, want in zip(halves, wholes):
        assert torch.equal(have, want.to(dtype))


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def test_threads_change_no_bit(threads: Callable[[int], None]) -> None:
    torch.manual_seed(7)
    inputs, mask = problem(QUERIES, SOURCES, (6, 2, 32, 48)), mask_of("cross")
    found = []
    for count in (1, 2, 5):
        threads(count)
        found.append(gradients(inputs, mask))
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


def test_strides_do_not_matter() -> None:
    torch.manual_seed(7)
    inputs, mask = problem(QUERIES, QUERIES, (3, 3, 16, 16)), mask_of("causal")
    wanted = gradients(inputs, mask)
    together = torch.cat(inputs[:3], -1)  # as one product for all three leaves them
    views = [*together.split(16, -1), inputs[3]]
    gaps = [x.repeat_interleave(2, -1)[..., ::2] for x in inputs]
    for other in (views, [x.contiguous() for x in inputs], gaps):
        assert all(map(torch.equal, wanted, gradients(other, mask)))


def test_large_scores_and_what_is_not_a_number() -> None:
    torch.manual_seed(7)
    inputs, mask = problem([5, 19], [5, 19], (2, 2, 16, 16)), packed([5, 19]) & causal()
    inputs[0] *= 1e4
    wide = [tensor.double() for tensor in inputs]
    for have, want in zip(gradients(inputs, mask), gradients(wide, mask, backend="formula")):
        torch.testing.assert_close(have.double(), want, rtol=1e-3, atol=1e-3)
    inputs[1][0, 0, 9] = math.nan  # the fifth key of the second sequence
    spoiled = attend(*inputs[:3], mask=mask)[0, 0].isnan().any(-1)
    assert spoiled.tolist() == [False] * 9 + [True] * 15


@pytest.mark.parametrize(
    ("why", "shape", "longest", "dtype", "dropout"),
    [
        ("widths that are no multiple of its vectors", (2, 2, 24, 16), 9, torch.float32, 0.0),
        ("values too", (2, 2, 16, 20), 9, torch.float32, 0.0),
        ("float64", (2, 2, 16, 16), 9, torch.float64, 0.0),
        ("dropout", (2, 2, 16, 16), 9, torch.float32, 0.1),
        ("long sequences", (1, 1, 16, 16), sequences.LONGEST + 1, torch.float32, 0.0),
    ],
)
def test_what_others_compute(
    why: str, shape: Shape, longest: int, dtype: torch.dtype, dropout: float
) -> None:
    inputs = [x.to(dtype) for x in problem([longest, 2], [longest, 2], shape)[:3]]
    found = explain_attention(*inputs, mask=packed([longest, 2]), dropout=dropout)
    assert found.backend == "packed"
    assert found.kernel.endswith("on ranges of keys")


def test_without_a_compiler_torch_computes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(7)
    inputs, mask = problem(QUERIES, QUERIES, (3, 3, 16, 16)), mask_of("causal")
    wanted = gradients(inputs, mask)
    monkeypatch.setattr(sequences.SOURCE, "library", lambda: None)
    assert explain_attention(*inputs[:3], mask=mask).kernel.endswith("on ranges of keys")
    for have, want in zip(gradients(inputs, mask), wanted):
        torch.testing.assert_close(have, want, rtol=1e-4, atol=1e-5)


OTHER = """
import sys, torch
from regard.attention.backends import sequences
from tests.attention.test_sequences import MASKS, gradients, mask_of, problem
assert sequences.SOURCE.kernels().isa == sys.argv[1], sequences.SOURCE.missing()
torch.manual_seed(7)
for name, (queries, sources, _) in MASKS.items():
    inputs, mask = problem(queries, sources, (6, 2, 32, 48)), mask_of(name)
    wanted = gradients([x.double() for x in inputs], mask, backend="formula")
    for have, want in zip(gradients(inputs, mask), wanted):
        torch.testing.assert_close(have.double(), want, rtol=1e-5, atol=1e-5)
print("equal")
"""


@pytest.mark.parametrize("isa", ["avx512_vnni", "avx2"])
def test_instruction_sets(isa: str) -> None:
    if not set(build.ISAS[isa]) <= build.cpu():
        pytest.skip(f"this CPU has no {isa}")
    done = subprocess.run(
        [sys.executable, "-c", OTHER, isa],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "REGARD_CPU_ISA": isa},
        capture_output=True,
        text=True,
        timeout=HANG,
    )
    assert done.stdout == "equal\n", done.stderr
