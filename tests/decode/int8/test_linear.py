"""One 8-bit layer: what it costs in precision, and that a row is its own, whatever computes it."""

from typing import Any

import pytest
import torch
from jaxtyping import TypeCheckError
from torch import nn

from regard.decode.engine.int8 import library as native
from regard.decode.engine.int8.linear import (
    EXACT,
    WIDEST,
    Int8Linear,
    int8,
    pack,
    product,
)
from regard.model.quantized import round_rows
from tests.decode.int8.samples import kernels, made

# Where there is no compiler, the same has to hold through torch.
pytestmark = pytest.mark.filterwarnings("ignore:8-bit layers run through torch")


@pytest.fixture(params=[True, False], ids=["kernels", "torch"], autouse=True)
def with_kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param and native.library() is None:
        pytest.skip(native.missing())
    if not request.param:
        monkeypatch.setattr(native, "library", lambda: None)


@pytest.mark.parametrize(("out", "inner"), [(97, 53), (64, 64), (1, 3), (131, 257)])
def test_products_are_exact_but_for_the_rounding_of_inputs(out: int, inner: int) -> None:
    linear = nn.Linear(inner, out)
    x = torch.randn(13, 2, inner) * torch.logspace(-3, 3, 13)[:, None, None]
    y = Int8Linear(linear)(x)
    (q, s), (w, t) = round_rows(x.flatten(0, 1)), round_rows(linear.weight.detach())
    exact = (q.double() @ w.double().T) * s.double()[:, None] * t.double() + linear.bias.double()
    torch.testing.assert_close(y.flatten(0, 1).double(), exact, rtol=1e-5, atol=1e-6)


def test_the_error_is_at_most_half_a_unit_of_each_factor() -> None:
    linear = nn.Linear(59, 31)
    x = torch.randn(17, 59)
    error = (Int8Linear(linear)(x) - linear(x)).abs()
    most_x, most_w = x.abs().amax(1), linear.weight.abs().amax(1)
    bound = 59 * (most_x[:, None] * most_w) * (1 / 127 + 1 / 254**2)
    assert (error <= bound).all()
    assert error.norm() / linear(x).norm() < 0.02


def test_a_loud_neighbour_changes_nothing() -> None:
    layer = Int8Linear(nn.Linear(61, 37))
    x = torch.randn(29, 61) * torch.logspace(-4, 4, 29)[:, None]
    assert torch.equal(layer(x), torch.cat([layer(row[None]) for row in x]))


def test_rows_of_zeros() -> None:
    linear = nn.Linear(7, 5)
    assert torch.equal(Int8Linear(linear)(torch.zeros(3, 7)), linear.bias.expand(3, 5))


def test_no_rows() -> None:
    assert Int8Linear(nn.Linear(7, 5))(torch.zeros(0, 7)).shape == (0, 5)


@pytest.mark.parametrize("odd", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("place", [0, 17, 60])
def test_what_is_not_finite_spoils_its_row_alone(odd: float, place: int) -> None:
    layer = Int8Linear(nn.Linear(61, 37))
    x = torch.randn(5, 61)
    y, x[3, place] = layer(x), odd
    found = layer(x)
    assert found[3].isnan().all()
    rest = [0, 1, 2, 4]
    assert torch.equal(found[rest], y[rest])


def test_very_large_and_very_small_rows() -> None:
    linear = nn.Linear(61, 37)
    x = torch.randn(61) * torch.tensor([1e36, 1e-36, 1e-40])[:, None]
    y = Int8Linear(linear)(x)
    torch.testing.assert_close(y[1:], linear.bias.expand(2, -1), rtol=0, atol=1e-30)
    near, exact = y[0] / 1e36, linear(x[0]) / 1e36
    assert (near - exact).norm() / exact.norm() < 0.02


@pytest.mark.parametrize("inner", [1, 2, 63, EXACT, EXACT + 1, 4099])
def test_sums_are_those_of_integers_at_the_extremes(inner: int) -> None:
    """Neighbours of 127 × 127 and -127 × 127 exceed 16 bits, in which some CPUs add pairs."""
    signs = torch.tensor([[1, 1], [-1, -1], [1, -1], [-1, 1]]).repeat(1, inner // 2 + 1)[:, :inner]
    odd = torch.randint(-127, 128, (7, inner))
    odd[:, 0] = 127
    whole = torch.cat((127 * signs, odd))
    linear = nn.Linear(inner, len(whole), bias=False)
    linear.weight.data = whole.float()
    # Of whole numbers up to 127 the scale is 1: products come out as they are.
    expected = (whole @ whole.T).double()
    assert torch.equal(Int8Linear(linear)(whole.float()).double(), expected.float().double())
    assert torch.equal(product(whole.to(torch.int8), whole.to(torch.int8)).double(), expected)


def test_sums_do_not_overflow() -> None:
    linear = nn.Linear(WIDEST, 2, bias=False)
    with torch.no_grad():
        linear.weight.copy_(torch.tensor([[1.0], [-1.0]]).expand(2, WIDEST))
    y = Int8Linear(linear)(torch.tensor([[1.0], [-1.0]]).expand(2, WIDEST))
    torch.testing.assert_close(y, WIDEST * torch.tensor([[1.0, -1.0], [-1.0, 1.0]]))
    with pytest.raises(ValueError, match=f"at most {WIDEST} numbers, not {WIDEST + 1}"):
        Int8Linear(nn.Linear(WIDEST + 1, 1))


@kernels
def test_kernels_and_torch_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    linear, x = nn.Linear(61, 37), torch.randn(11, 61)
    one = Int8Linear(linear)(x)
    monkeypatch.setattr(native, "library", lambda: None)
    torch.testing.assert_close(Int8Linear(linear)(x), one, rtol=1e-6, atol=1e-6)


@kernels
@pytest.mark.parametrize("rows", [1, 7, 131, 1009])
def test_bits_do_not_depend_on_the_number_of_threads(rows: int) -> None:
    layer = Int8Linear(nn.Linear(211, 307))
    x = torch.randn(rows, 211)
    found = []
    for threads in (1, 2, 3, 7):
        torch.set_num_threads(threads)  # conftest.py puts it back
        found.append(layer(x))
    assert all(torch.equal(found[0], other) for other in found[1:])


@pytest.mark.parametrize(("columns", "depth"), [(16, 2), (64, 4)])
def test_packing(columns: int, depth: int) -> None:
    weight = torch.randint(-127, 128, (131, 53), dtype=torch.int8)
    packed = pack(weight, columns, depth)
    for n, k in ((0, 0), (130, 52), (17, 3), (77, 50)):
        assert packed[n // columns, k // depth, n % columns, k % depth] == weight[n, k]
    assert packed.sum(dtype=torch.int64) == weight.sum(dtype=torch.int64)  # the rest are zeros


def test_what_does_not_fit_is_refused() -> None:
    layer = Int8Linear(nn.Linear(7, 5))
    with pytest.raises(ValueError, match="must be 7 wide, float32"):
        layer(torch.zeros(3, 6))
    with pytest.raises((ValueError, TypeCheckError)):
        layer(torch.zeros(3, 7, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"float32 weights on the cpu, not of torch\.bfloat16"):
        Int8Linear(nn.Linear(7, 5).bfloat16())


# A model's layers


@pytest.mark.parametrize("kind", ["the paper's", "gated, grouped heads", "language"])
def test_a_model_of_8_bits_is_near_the_one_of_32(kind: str) -> None:
    model, ids = made(kind), torch.randint(3, 97, (5, 11))
    given = (ids,) if kind == "language" else (ids, ids[:, :7])
    with torch.no_grad():
        exact = model(*given)
        near = int8(model)(*given)
    layers = [part for part in model.modules() if isinstance(part, nn.Linear)]
    assert not layers
    assert 0 < (near - exact).norm() / exact.norm() < 0.05


def test_other_numbers_are_refused() -> None:
    model = int8(made())
    with pytest.raises((ValueError, TypeCheckError, RuntimeError)):
        model.double()(*[torch.randint(3, 97, (3, 5))] * 2)


def test_weights_for_other_layers_are_refused() -> None:
    model = made()
    state = model.state_dict()
    with pytest.raises(RuntimeError, match="load them first, and then call int8"):
        int8(model).load_state_dict(state, strict=False)


@pytest.mark.parametrize("kind", ["the paper's", "language"])
def test_training_is_refused(kind: str) -> None:
    with pytest.raises(ValueError, match="cannot be trained; call"):
        int8(made(kind).train())
    model: Any = int8(made(kind))
    with pytest.raises(ValueError, match="8-bit layers cannot be trained"):
        model.train()
