"""Every backend under every mask gives what the formula gives in float64, backwards too."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from regard.attention.attend import attend
from regard.attention.mask import Mask
from tests.attention.strategies import MASKS, Problem, problem

TOLERANCE = {
    torch.float64: 1e-11,
    torch.float32: 2e-5,
    torch.bfloat16: 3e-2,
    torch.float16: 4e-3,
}
BACKENDS = ("auto", "formula", "sdpa", "packed", "flex")


def expresses(backend: str, mask: Mask | None) -> bool:
    return backend != "packed" or (mask is not None and bool(mask.runs))


def compare(problem: Problem, backend: str, dtype: torch.dtype, training: bool) -> None:
    inputs = problem.inputs(dtype)
    arguments = {"mask": problem.mask, "beta": problem.beta, "bias": problem.bias}
    with torch.set_grad_enabled(training):
        out = attend(*inputs, **arguments, backend=backend)
    seed = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    expected = problem.expected(inputs, seed)
    actual = [out, *torch.autograd.grad(out, inputs, seed)] if training else [out]
    for have, want in zip(actual, expected):
        assert have.dtype == dtype
        scale = max(1.0, want.abs().max().item()) if want.numel() else 1.0
        torch.testing.assert_close(
            have.double(), want, atol=TOLERANCE[dtype] * scale, rtol=0, msg=None
        )


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("backend", ["auto", "formula", "sdpa", "packed"])
@pytest.mark.parametrize("name", sorted(MASKS))
def test_every_backend_mask_and_dtype(
    name: str, backend: str, dtype: torch.dtype, training: bool
) -> None:
    B = 1 if "packed" in name else 3
    for L, S in ((11, 13), (13, 11), (1, 7), (7, 1)):
        if "documents" in name and L > S:
            continue
        case = problem(name, B, 2, 6, L, S, 5, 3, seed=L)
        if expresses(backend, case.mask):
            compare(case, backend, dtype, training)


@settings(max_examples=250)
@given(
    problems(),
    st.sampled_from(["auto", "sdpa", "packed", "formula"]),
    st.sampled_from([*TOLERANCE]),
)
def test_any_shape(case: Problem, backend: str, dtype: torch.dtype) -> None:
    if expresses(backend, case.mask):
        compare(case, backend, dtype, training=True)
