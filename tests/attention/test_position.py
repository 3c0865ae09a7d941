"""Positions against the formulas in plain loops, at every kind of offset, and their errors."""

import copy
import math
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from regard.attention import rotation_cpu
from regard.attention.packed import PackedLengths
from regard.attention.position import (
    ALiBi,
    AttentionPosition,
    Concatenated,
    GridPositions,
    InputPosition,
    Layout,
    LearnedGridPositions,
    LearnedPositions,
    RotaryEmbedding,
    SinusoidalPositions,
)
from tests.devices import no_waiting

# Built anew by each test; all 7 wide, with at least 53 positions.
INPUTS: dict[str, Callable[[], InputPosition]] = {
    "sinusoidal": lambda: SinusoidalPositions(7),
    "sinusoidal halves": lambda: SinusoidalPositions(7, base=100.0, layout="halves"),
    "learned": lambda: LearnedPositions(53, 7),
    "grid": lambda: GridPositions(5, 11, SinusoidalPositions(4), SinusoidalPositions(3)),
    "grid learned": lambda: GridPositions(5, 11, LearnedPositions(5, 3), LearnedPositions(13, 4)),
    "learned grid": lambda: LearnedGridPositions(5, 11, 7),
}
inputs = pytest.mark.parametrize("build", INPUTS.values(), ids=INPUTS.keys())

ROTARIES: dict[str, Callable[[], RotaryEmbedding]] = {
    "interleaved": lambda: RotaryEmbedding(6),
    "halves": lambda: RotaryEmbedding(6, base=100.0, layout="halves"),
}
rotaries = pytest.mark.parametrize("build", ROTARIES.values(), ids=ROTARIES.keys())


class Graphs:
    """A backend for torch.compile that runs the graphs as they are and counts them."""

    def __init__(self) -> None:
        torch.compiler.reset()
        self.count = 0

    def __call__(self, graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., object]:
        self.count += 1
        return graph.forward


def sinusoid(n: int, width: int, base: float = 10000) -> list[float]:
    """Item 21 by the letter."""
    return [
        math.sin(n / base ** (i / width)) if i % 2 == 0 else math.cos(n / base ** ((i - 1) / width))
        for i in range(width)
    ]


def sinusoids(positions: list[int], width: int, base: float = 10000) -> Tensor:
    return torch.tensor([sinusoid(n, width, base) for n in positions], dtype=torch.float64)


# --- SinusoidalPositions


def test_the_worked_numbers_at_width_four() -> None:
    first = SinusoidalPositions(4).encoding(torch.tensor(1), torch.float64)
    assert [round(v, 2) for v in first.tolist()] == [0.84, 0.54, 0.01, 1.0]
    assert first.tolist() == pytest.approx(
        [math.sin(1), math.cos(1), math.sin(0.01), math.cos(0.01)]
    )
    # Counting the frequencies from 1 would give these instead.
    late = [math.sin(0.01), math.cos(0.01), math.sin(1e-4), math.cos(1e-4)]
    assert [round(v, 4) for v in late] == [0.01, 1.0, 0.0001, 1.0]


@pytest.mark.parametrize("width", [1, 2, 3, 7, 8])
@pytest.mark.parametrize("base", [10000, 37.5])
def test_sinusoidal_is_its_formula(width: int, base: float) -> None:
    positions = [0, 1, 2, 3, 29, 1009, 99991, 2**24 + 1]  # the last is none of float32's
    got = SinusoidalPositions(width, base).encoding(torch.tensor(positions), torch.float64)
    torch.testing.assert_close(got, sinusoids(positions, width, base), rtol=0, atol=1e-9)


@pytest.mark.parametrize("width", [1, 2, 3, 7, 8])
def test_halves_are_the_sines_and_then_the_cosines(width: int) -> None:
    positions = torch.tensor([0, 1, 5, 31])
    plain = SinusoidalPositions(width).encoding(positions)
    halves = SinusoidalPositions(width, layout="halves").encoding(positions)
    assert torch.equal(halves, torch.cat((plain[:, 0::2], plain[:, 1::2]), -1))


def test_far_positions_are_as_exact_as_near_ones() -> None:
    positions = torch.cat((torch.arange(97), torch.arange(99_900, 100_101)))
    exact = sinusoids(positions.tolist(), 63)
    single = SinusoidalPositions(63).encoding(positions, torch.float32).double()
    assert (single - exact).abs().max() < 3.1e-8
    half = SinusoidalPositions(63).encoding(positions, torch.bfloat16)
    assert (half.double() - exact).abs().max() <= 2**-9
    # The bound has something to say: angles in float32 break it.
    naive = torch.sin(positions.float()[:, None] / 10000 ** (torch.arange(0, 63, 2) / 63))
    assert (naive.double() - exact[:, 0::2]).abs().max() > 1e-3


def test_a_half_precision_model_keeps_exact_angles() -> None:
    position = SinusoidalPositions(7).to(torch.bfloat16)
    got = position(torch.zeros(3, 7, dtype=torch.bfloat16), at=100_003)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(
        got.double(), sinusoids([100_003, 100_004, 100_005], 7), rtol=0, atol=2**-9
    )


def test_a_shift_is_a_rotation_that_knows_only_its_distance() -> None:
    r = SinusoidalPositions(8).encoding(torch.arange(41), torch.float64)
    shift = torch.zeros(8, 8, dtype=torch.float64)
    for i in range(0, 8, 2):
        angle = 3 / 10000 ** (i / 8)
        shift[i, i] = shift[i + 1, i + 1] = math.cos(angle)
        shift[i, i + 1], shift[i + 1, i] = math.sin(angle), -math.sin(angle)
    torch.testing.assert_close(r[:-3] @ shift.T, r[3:])


def test_the_kernel_of_sinusoids_is_no_bell() -> None:
    """Item 96: Σ cos ω(i-j) never falls far and is not monotone."""
    r = SinusoidalPositions(64).encoding(torch.arange(200), torch.float64)
    kernel = r @ r.T
    expected = [
        sum(math.cos(d / 10000 ** (2 * k / 64)) for k in range(32)) / 32 for d in range(200)
    ]
    torch.testing.assert_close(kernel[0] / 32, torch.tensor(expected, dtype=torch.float64))
    torch.testing.assert_close(kernel[17, 17:], kernel[0, :183])
    assert round(kernel.min().item() / kernel.max().item(), 2) == 0.22
    rises = [d for d in range(1, 200) if expected[d] > expected[d - 1]]
    assert rises[0] - 1 == 5


def test_heads_that_look_one_step_aside_are_a_convolution() -> None:
    """Item 52: a query moved by δ finds position i + δ, so that k heads are k taps."""
    r = SinusoidalPositions(64).encoding(torch.arange(23), torch.float64)
    x = torch.randn(23, 5, dtype=torch.float64)
    taps = torch.randn(3, 5, 4, dtype=torch.float64)
    wanted = torch.stack(
        [sum(x[i + delta] @ taps[delta + 1] for delta in (-1, 0, 1)) for i in range(1, 22)]
    )
    errors = []
    for beta in (10.0, 100.0):
        heads = torch.zeros(21, 4, dtype=torch.float64)
        for delta in (-1, 0, 1):
            query = SinusoidalPositions(64).encoding(torch.arange(1, 22) + delta, torch.float64)
            heads += (beta * query @ r.T).softmax(-1) @ x @ taps[delta + 1]
        errors.append((heads - wanted).abs().max().item())
    assert 1e-6 < errors[0] < 1e-2
    assert errors[1] < 1e-12


def test_sinusoidal_has_no_parameters_and_no_state() -> None:
    position = SinusoidalPositions(7)
    assert list(position.parameters()) == []
    assert list(position.buffers()) == []
    assert position.state_dict() == {}


def test_negative_positions_have_sinusoids_too() -> None:
    got = SinusoidalPositions(7)(torch.zeros(3, 7, dtype=torch.float64), at=-2)
    torch.testing.assert_close(got, sinusoids([-2, -1, 0], 7))


# --- What every input position does


@inputs
def test_the_vectors_are_added(build: Callable[[], InputPosition]) -> None:
    position = build()
    x = torch.randn(2, 3, 5, 7)
    r = position.encoding(torch.arange(5))
    assert r.shape == (5, 7)
    torch.testing.assert_close(position(x), x + r)


@inputs
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_dtype_of_the_input_stays(
    build: Callable[[], InputPosition], dtype: torch.dtype
) -> None:
    position = build()
    x = torch.randn(2, 5, 7, dtype=dtype)
    got = position(x, at=31)
    assert got.dtype == dtype
    exact = x.double() + position.encoding(torch.arange(31, 36), torch.float64)
    torch.testing.assert_close(got.double(), exact, rtol=0, atol=8 * torch.finfo(dtype).eps)


@inputs
def test_every_way_to_say_where_is_the_same(build: Callable[[], InputPosition]) -> None:
    position = build()
    x = torch.randn(3, 5, 7)
    whole = position(torch.cat((torch.zeros(3, 37, 7), x), 1))[:, 37:]
    for at in (
        37,
        torch.tensor(37),
        torch.tensor(37, dtype=torch.int32),
        torch.arange(37, 42),
        torch.arange(37, 42, dtype=torch.int32),
        torch.arange(37, 42).expand(3, 5),
        torch.arange(37, 42)[None],
    ):
        assert torch.equal(position(x, at), whole)
        assert torch.equal(position(x.unsqueeze(1).expand(3, 2, 5, 7), at)[:, 1], whole)


@inputs
def test_positions_of_each_sequence(build: Callable[[], InputPosition]) -> None:
    position = build()
    x = torch.randn(3, 2, 5, 7)
    at = torch.randint(53, (3, 5))
    got = position(x, at)
    for b in range(3):
        for head in range(2):
            for row in range(5):
                r = position.encoding(at[b, row])
                torch.testing.assert_close(got[b, head, row], x[b, head, row] + r)


@inputs
def test_a_packed_batch_restarts(build: Callable[[], InputPosition]) -> None:
    position = build()
    x = torch.randn(1, 2 + 3 + 5, 7)
    at = torch.tensor([[0, 1, 0, 1, 2, 0, 1, 2, 3, 4]])
    parts = [position(part) for part in x.split((2, 3, 5), 1)]
    assert torch.equal(position(x, at), torch.cat(parts, 1))


@inputs
@pytest.mark.parametrize("at", [0, torch.tensor(3), torch.tensor([], dtype=torch.long)])
def test_no_rows_at_all(build: Callable[[], InputPosition], at: int | Tensor) -> None:
    assert build()(torch.randn(2, 0, 7), at).shape == (2, 0, 7)


@inputs
def test_a_plain_matrix(build: Callable[[], InputPosition]) -> None:
    position = build()
    x = torch.randn(5, 7)
    assert torch.equal(position(x, 2), position(x[None], 2)[0])


@inputs
def test_the_gradient_passes_to_the_input(build: Callable[[], InputPosition]) -> None:
    x = torch.randn(2, 5, 7, requires_grad=True)
    upstream = torch.randn(2, 5, 7)
    build()(x, 3).backward(upstream)
    assert x.grad is not None
    assert torch.equal(x.grad, upstream)


@inputs
def test_construction_on_the_meta_device(build: Callable[[], InputPosition]) -> None:
    with torch.device("meta"):
        position = build()
        assert position(torch.empty(2, 5, 7)).shape == (2, 5, 7)
    position.to_empty(device="cpu").load_state_dict(build().state_dict())
    assert position(torch.zeros(2, 5, 7)).isfinite().all()


@inputs
def test_positions_are_never_read_back(build: Callable[[], InputPosition]) -> None:
    # A tensor on the meta device has no values, so that reading one is an error.
    with torch.device("meta"):
        position, x = build(), torch.empty(2, 5, 7)
        for shape in ((), (5,), (2, 5)):
            at = torch.empty(shape, dtype=torch.long)
            assert position(x, at).shape == (2, 5, 7)
            assert Concatenated(position)(x, at).shape == (2, 5, 14)


def test_positions_inside_attention_are_never_read_back() -> None:
    with torch.device("meta"):
        at = torch.empty((), dtype=torch.long)
        assert RotaryEmbedding(6).rotate(torch.empty(2, 3, 5, 7), at).shape == (2, 3, 5, 7)
        assert ALiBi(3).bias(5, 11, at).shape == (1, 3, 5, 11)


@inputs
@pytest.mark.usefixtures("unchecked")
def test_one_graph_serves_every_offset(build: Callable[[], InputPosition]) -> None:
    position = build()
    graphs = Graphs()
    compiled = torch.compile(position, backend=graphs, fullgraph=True)
    x = torch.randn(2, 5, 7)
    for offset in (0, 3, 41):
        at = torch.tensor(offset)
        assert torch.equal(compiled(x, at), position(x, offset))
    assert graphs.count == 1


@inputs
def test_copying_and_printing(build: Callable[[], InputPosition]) -> None:
    position = build()
    x = torch.randn(5, 7)
    assert torch.equal(copy.deepcopy(position)(x), position(x))
    assert type(position).__name__ in repr(position)


# --- LearnedPositions


def test_learned_is_a_table_of_small_normal_numbers() -> None:
    position = LearnedPositions(997, 101)
    assert position.table.shape == (997, 101)
    assert position.table.mean().abs() < 3e-4
    assert position.table.std().item() == pytest.approx(0.02, rel=0.02)
    assert set(position.state_dict()) == {"table"}


def test_the_gradient_reaches_the_rows_that_were_read() -> None:
    position = LearnedPositions(11, 3)
    position(torch.zeros(2, 5, 3), torch.tensor([2, 3, 3, 7, 2])).sum().backward()
    expected = torch.zeros(11, 3)
    for n in (2, 3, 3, 7, 2):
        expected[n] += 2
    assert position.table.grad is not None
    assert torch.equal(position.table.grad, expected)


def test_learned_serves_up_to_its_end() -> None:
    position = LearnedPositions(11, 3)
    x = torch.zeros(5, 3)
    assert torch.equal(position(x, 6), position.table[6:])
    assert torch.equal(position(x, torch.tensor(6)), position.table[6:])


def test_more_rows_than_the_table_when_positions_repeat() -> None:
    position = LearnedPositions(3, 2)
    at = torch.arange(3).repeat(4)
    assert torch.equal(position(torch.zeros(12, 2), at), position.table.repeat(4, 1))


# --- Grids


def test_a_grid_is_its_row_and_its_column() -> None:
    got = GridPositions(3, 5, SinusoidalPositions(4), SinusoidalPositions(7, base=100)).encoding(
        torch.arange(15), torch.float64
    )
    for y in range(3):
        for x in range(5):
            cell = sinusoid(y, 4) + sinusoid(x, 7, 100)
            assert got[y * 5 + x].tolist() == pytest.approx(cell)


def test_a_grid_of_learned_parts_learns_rows_and_columns() -> None:
    grid = GridPositions(3, 5, LearnedPositions(3, 2), LearnedPositions(5, 4))
    grid(torch.zeros(15, 6)).sum().backward()
    assert isinstance(grid.row, LearnedPositions)
    assert isinstance(grid.column, LearnedPositions)
    assert grid.row.table.grad is not None
    assert grid.column.table.grad is not None
    assert (grid.row.table.grad == 5).all()
    assert (grid.column.table.grad == 3).all()


def test_a_fixed_grid_at_another_size() -> None:
    grid = GridPositions(3, 5, SinusoidalPositions(4), SinusoidalPositions(2)).resize(7, 2)
    assert (grid.rows, grid.columns, grid.length) == (7, 2, 14)
    assert grid.encoding(torch.tensor(13), torch.float64).tolist() == pytest.approx(
        sinusoid(6, 4) + sinusoid(1, 2)
    )


def test_a_learned_grid_has_one_vector_for_each_cell() -> None:
    grid = LearnedGridPositions(3, 5, 7)
    assert grid.table.shape == (15, 7)
    assert torch.equal(grid(torch.zeros(15, 7)), grid.table)


def bicubic(t: float) -> float:
    """Keys' kernel with a = -1/2."""
    t = abs(t)
    if t < 1:
        return 1.5 * t**3 - 2.5 * t**2 + 1
    return -0.5 * t**3 + 2.5 * t**2 - 4 * t + 2 if t < 2 else 0.0


def resampling(old: int, new: int) -> Tensor:
    """The weights of the old cells in each new one, in plain loops."""
    scale = old / new
    stretch = max(scale, 1.0)
    rows = []
    for n in range(new):
        centre = (n + 0.5) * scale
        row = [bicubic((o + 0.5 - centre) / stretch) for o in range(old)]
        rows.append([w / sum(row) for w in row])
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.parametrize("size", [(3, 5), (7, 11), (2, 13), (5, 2), (1, 1)])
def test_a_learned_grid_at_another_size(size: tuple[int, int]) -> None:
    grid = LearnedGridPositions(3, 5, 7).double().eval()
    before = torch.get_rng_state()
    resized = grid.resize(*size)
    assert torch.equal(torch.get_rng_state(), before)
    assert resized.table.shape == (size[0] * size[1], 7)
    expected = torch.einsum(
        "yr, xc, rcd -> yxd",
        resampling(3, size[0]),
        resampling(5, size[1]),
        grid.table.detach().view(3, 5, 7),
    )
    torch.testing.assert_close(resized.table.detach(), expected.reshape(-1, 7))
    assert not resized.training
    assert resized.table.requires_grad
    assert resized.table.data_ptr() != grid.table.data_ptr()
    assert (resized.rows, resized.columns, resized.length) == (*size, size[0] * size[1])


def test_a_frozen_half_precision_grid_stays_so() -> None:
    grid = LearnedGridPositions(3, 5, 7).bfloat16().requires_grad_(False)
    resized = grid.resize(5, 5)
    assert resized.table.dtype == torch.bfloat16
    assert not resized.table.requires_grad
    exact = copy.deepcopy(grid).double().resize(5, 5).table
    torch.testing.assert_close(resized.table.double(), exact, rtol=2**-8, atol=1e-6)


# --- Concatenated


@inputs
def test_concatenated_puts_the_vectors_beside(build: Callable[[], InputPosition]) -> None:
    position = build()
    x = torch.randn(2, 3, 5, 11)
    for at in (31, torch.tensor(31), torch.arange(31, 36), torch.randint(53, (2, 5))):
        got = Concatenated(position)(x, at)
        assert got.shape == (2, 3, 5, 18)
        assert torch.equal(got[..., :11], x)
        zeros = torch.zeros(2, 3, 5, 7)
        assert torch.equal(got[..., 11:], position(zeros, at))


def test_adding_is_concatenating_with_tied_weights() -> None:
    """Item 95: W (x + p) = [W W] [x; p]."""
    position = SinusoidalPositions(7)
    x = torch.randn(5, 7, dtype=torch.float64)
    weight = torch.randn(3, 7, dtype=torch.float64)
    both = torch.cat((weight, weight), 1)
    torch.testing.assert_close(position(x, 2) @ weight.T, Concatenated(position)(x, 2) @ both.T)


def test_concatenated_keeps_dtype_state_and_length() -> None:
    position = Concatenated(LearnedPositions(11, 3))
    assert position(torch.randn(5, 7, dtype=torch.bfloat16)).dtype == torch.bfloat16
    assert set(position.state_dict()) == {"position.table"}
    assert (position.width, position.length) == (3, 11)


# --- RotaryEmbedding


def turned(x: list[float], n: int, position: RotaryEmbedding) -> list[float]:
    """Su et al.'s rotation of the first columns, in plain loops."""
    out = list(x)
    half = position.width // 2
    for k in range(half):
        a, b = (2 * k, 2 * k + 1) if position.layout == "interleaved" else (k, k + half)
        angle = n / position.base ** (2 * k / position.width)
        out[a] = x[a] * math.cos(angle) - x[b] * math.sin(angle)
        out[b] = x[a] * math.sin(angle) + x[b] * math.cos(angle)
    return out


@rotaries
@pytest.mark.parametrize("width", [6, 11])
def test_rotary_is_its_formula(build: Callable[[], RotaryEmbedding], width: int) -> None:
    position = build()
    x = torch.randn(2, 3, 5, width, dtype=torch.float64)
    at = torch.tensor([[0, 1, 2, 3, 4], [99991, 7, 7, 0, 31]])
    got = position.rotate(x, at)
    for b in range(2):
        for head in range(3):
            for row in range(5):
                expected = turned(x[b, head, row].tolist(), int(at[b, row]), position)
                assert got[b, head, row].tolist() == pytest.approx(expected, abs=1e-9)


@rotaries
@settings(max_examples=30)
@given(
    i=st.integers(-1000, 1000),
    j=st.integers(-1000, 1000),
    step=st.integers(-1000, 1000),
    width=st.integers(6, 9),
)
def test_the_score_depends_on_the_distance_alone(
    build: Callable[[], RotaryEmbedding], i: int, j: int, step: int, width: int
) -> None:
    position = build()
    query, key = torch.randn(2, 1, width, dtype=torch.float64)
    near = position.rotate(query, i) @ position.rotate(key, j).mT
    far = position.rotate(query, i + step) @ position.rotate(key, j + step).mT
    torch.testing.assert_close(near, far, rtol=0, atol=1e-9)


@rotaries
def test_the_score_does_depend_on_the_distance(build: Callable[[], RotaryEmbedding]) -> None:
    position = build()
    query, key = torch.randn(2, 1, 7, dtype=torch.float64)
    scores = [(position.rotate(query, n) @ key.mT).item() for n in range(5)]
    assert len({round(score, 6) for score in scores}) == 5


@rotaries
def test_rotation_keeps_lengths_and_the_columns_beyond(
    build: Callable[[], RotaryEmbedding],
) -> None:
    x = torch.randn(3, 5, 11, dtype=torch.float64)
    got = build().rotate(x, 29)
    torch.testing.assert_close(got.norm(dim=-1), x.norm(dim=-1))
    assert torch.equal(got[..., 6:], x[..., 6:])
    assert not torch.equal(got[..., :6], x[..., :6])


@rotaries
def test_rotary_at_every_kind_of_offset(build: Callable[[], RotaryEmbedding]) -> None:
    position = build()
    x = torch.randn(3, 2, 5, 7)
    whole = position.rotate(torch.cat((torch.zeros(3, 2, 37, 7), x), 2))[:, :, 37:]
    for at in (37, torch.tensor(37), torch.arange(37, 42), torch.arange(37, 42).expand(3, 5)):
        assert torch.equal(position.rotate(x, at), whole)


@rotaries
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_once(
    build: Callable[[], RotaryEmbedding], dtype: torch.dtype
) -> None:
    position = build().to(dtype)
    x = torch.randn(3, 5, 7, dtype=dtype)
    got = position.rotate(x, 100_003)
    assert got.dtype == dtype
    exact = position.rotate(x.double(), 100_003)
    torch.testing.assert_close(got.double(), exact, rtol=0.51 * torch.finfo(dtype).eps, atol=1e-6)


@rotaries
def test_rotary_gradients(build: Callable[[], RotaryEmbedding]) -> None:
    position = build()
    x = torch.randn(2, 3, 7, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: position.rotate(x, 31), x)


@rotaries
@pytest.mark.usefixtures("unchecked")
def test_one_graph_rotates_at_every_offset(build: Callable[[], RotaryEmbedding]) -> None:
    position = build()
    graphs = Graphs()
    compiled = torch.compile(position.rotate, backend=graphs, fullgraph=True)
    x = torch.randn(2, 3, 5, 7)
    for offset in (0, 3, 41):
        assert torch.equal(compiled(x, torch.tensor(offset)), position.rotate(x, offset))
    assert graphs.count == 1


@rotaries
def test_rotary_without_rows_state_or_bias(build: Callable[[], RotaryEmbedding]) -> None:
    with torch.device("meta"):
        position = build()
    assert position.rotate(torch.randn(2, 0, 7), 3).shape == (2, 0, 7)
    assert position.state_dict() == {}
    assert position.bias(3, 5) is None


# --- ALiBi


@pytest.mark.parametrize(
    ("heads", "exponents"),
    [
        (1, [8]),
        (2, [4, 8]),
        (8, [1, 2, 3, 4, 5, 6, 7, 8]),
        (3, [4, 8, 2]),
        (7, [2, 4, 6, 8, 1, 3, 5]),
        (12, [1, 2, 3, 4, 5, 6, 7, 8, 0.5, 1.5, 2.5, 3.5]),
    ],
)
def test_the_published_slopes(heads: int, exponents: list[float]) -> None:
    slopes = ALiBi(heads).slopes()
    assert slopes.tolist() == pytest.approx([2**-e for e in exponents], rel=1e-6)


@pytest.mark.parametrize(("L", "S"), [(5, 5), (2, 7), (7, 2), (1, 11), (0, 3), (3, 0)])
@pytest.mark.parametrize("offset", [None, 0, 4, -3])
def test_the_bias_falls_with_the_distance(L: int, S: int, offset: int | None) -> None:
    position = ALiBi(3)
    got = position.bias(L, S, offset, dtype=torch.float64)
    assert got.shape == (1, 3, L, S)
    shift = S - L if offset is None else offset
    for h, slope in enumerate((2**-4, 2**-8, 2**-2)):
        for i in range(L):
            for j in range(S):
                assert got[0, h, i, j].item() == pytest.approx(
                    -slope * abs(i + shift - j), abs=1e-9
                )
    if offset is not None:
        assert torch.equal(position.bias(L, S, torch.tensor(offset), dtype=torch.float64), got)
        each = position.bias(L, S, torch.tensor([1, offset, 5]), dtype=torch.float64)
        assert torch.equal(each[1:2], got)
        assert each.shape == (3, 3, L, S)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_distances_are_exact_before_they_are_rounded(dtype: torch.dtype) -> None:
    position = ALiBi(8).to(dtype)
    got = position.bias(1, 1009, 100_000, dtype=dtype)
    assert got.dtype == dtype
    exact = torch.tensor([[-(2.0**-h) * (100_000 - j) for j in range(1009)] for h in range(1, 9)])
    torch.testing.assert_close(got[0, :, 0], exact.to(dtype), rtol=0, atol=0)


def test_linear_bias_defaults_and_state() -> None:
    with torch.device("meta"):
        position = ALiBi(5)
    assert position.state_dict() == {}
    assert position.bias(3, 7, device="cpu").dtype == torch.get_default_dtype()
    assert position.bias(3, 7, device="meta").device.type == "meta"
    x = torch.randn(2, 5, 3, 7)
    assert position.rotate(x, 3) is x


@pytest.mark.usefixtures("unchecked")
def test_one_graph_gives_the_bias_at_every_offset() -> None:
    position = ALiBi(5)
    graphs = Graphs()
    compiled = torch.compile(position.bias, backend=graphs, fullgraph=True)
    for offset in (0, 3, 41):
        assert torch.equal(compiled(2, 7, torch.tensor(offset)), position.bias(2, 7, offset))
    assert graphs.count == 1


# --- Positions of one's own


def test_a_position_of_ones_own_overrides_one_method() -> None:
    class Ramp(InputPosition):
        def encoding(self, positions: Tensor, dtype: torch.dtype | None = None) -> Tensor:
            return positions.to(dtype).unsqueeze(-1).expand(*positions.shape, self.width)

    assert torch.equal(Ramp(3)(torch.zeros(2, 3), 5), torch.tensor([[5.0] * 3, [6.0] * 3]))
    with pytest.raises(NotImplementedError, match="InputPosition does not define encoding"):
        InputPosition(3).encoding(torch.arange(2))
    x = torch.randn(2, 3)
    plain = AttentionPosition()
    assert plain.rotate(x, 5) is x
    assert plain.bias(2, 3, None, None, None) is None
    assert isinstance(plain, nn.Module)


# --- Errors

X = torch.zeros(2, 5, 7)
WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "no width": (lambda: SinusoidalPositions(0), r"width \(0\) must be a positive integer"),
    "half a width": (lambda: SinusoidalPositions(3.5), r"width \(3.5\) must be a positive integer"),
    "a width that is true": (
        lambda: SinusoidalPositions(True),
        r"width \(True\) must be a positive",
    ),
    "no base": (lambda: SinusoidalPositions(4, base=0), r"base \(0\) must be a positive number"),
    "base nan": (lambda: SinusoidalPositions(4, base=math.nan), r"base \(nan\) must be a positive"),
    "endless base": (lambda: RotaryEmbedding(4, base=math.inf), r"base \(inf\) must be a positive"),
    "layout": (
        lambda: SinusoidalPositions(4, layout="split"),
        r"layout \('split'\) is unknown; choose from interleaved, halves",
    ),
    "rotary layout": (lambda: RotaryEmbedding(4, layout="neox"), r"layout \('neox'\) is unknown"),
    "no length": (lambda: LearnedPositions(0, 4), r"length \(0\) must be a positive integer"),
    "negative width": (lambda: LearnedPositions(4, -3), r"width \(-3\) must be a positive integer"),
    "no rows": (lambda: LearnedGridPositions(0, 3, 4), r"rows \(0\) must be a positive integer"),
    "no columns": (
        lambda: LearnedGridPositions(3, 0, 4),
        r"columns \(0\) must be a positive integer",
    ),
    "resized to nothing": (
        lambda: LearnedGridPositions(3, 5, 4).resize(3, 0),
        r"columns \(0\) must be",
    ),
    "grid without rows": (
        lambda: GridPositions(-1, 3, SinusoidalPositions(2), SinusoidalPositions(2)),
        r"rows \(-1\) must be a positive integer",
    ),
    "grid with short rows": (
        lambda: GridPositions(5, 3, LearnedPositions(4, 2), LearnedPositions(3, 2)),
        r"rows \(5\) must not exceed the positions of its part \(4\); give the part 5",
    ),
    "grid with short columns": (
        lambda: GridPositions(5, 3, LearnedPositions(5, 2), LearnedPositions(2, 2)),
        r"columns \(3\) must not exceed the positions of its part \(2\)",
    ),
    "grid resized beyond its parts": (
        lambda: GridPositions(5, 3, LearnedPositions(5, 2), LearnedPositions(3, 2)).resize(6, 3),
        r"rows \(6\) must not exceed the positions of its part \(5\)",
    ),
    "odd rotary": (lambda: RotaryEmbedding(7), r"width \(7\) must be even.*try 8, or 6"),
    "no heads": (lambda: ALiBi(0), r"heads \(0\) must be a positive integer"),
    "another width": (
        lambda: SinusoidalPositions(8)(X),
        r"last axis of x \(7\) must be the position's width \(8\).*Concatenated",
    ),
    "a vector": (lambda: SinusoidalPositions(7)(torch.zeros(7)), r"x of shape \(7,\) needs rows"),
    "too long": (
        lambda: LearnedPositions(3, 7)(X),
        r"position 4 is beyond the 3 positions there are; use one with 5 positions.*Sinusoidal",
    ),
    "too far": (lambda: LearnedPositions(11, 7)(X, 7), r"position 11 is beyond the 11 positions"),
    "too long for any offset": (
        lambda: LearnedPositions(3, 7)(X, torch.tensor(0)),
        r"position 4 is beyond the 3 positions",
    ),
    "beyond the grid": (
        lambda: GridPositions(2, 2, SinusoidalPositions(3), SinusoidalPositions(4))(X),
        r"position 4 is beyond the 4 positions",
    ),
    "beyond, concatenated": (
        lambda: Concatenated(LearnedPositions(3, 2))(X),
        r"position 4 is beyond the 3",
    ),
    "before the start": (
        lambda: LearnedPositions(11, 7)(X, -2),
        r"position -2 must not be negative",
    ),
    "a tensor too far": (
        lambda: LearnedPositions(11, 7)(X, torch.tensor(7)),
        r"positions 7 to 11 leave the learned table \(0 to 10\); use LearnedPositions\(12, 7\)",
    ),
    "a negative tensor": (
        lambda: LearnedPositions(11, 7)(X, torch.tensor([-1, 0, 1, 2, 3])),
        r"positions -1 to 3 leave the learned table \(0 to 10\)",
    ),
    "float positions": (
        lambda: SinusoidalPositions(7)(X, torch.tensor(2.0)),
        r"at \(torch.float32\) must hold integers; use at.long\(\)",
    ),
    "boolean positions": (
        lambda: RotaryEmbedding(4).rotate(X, torch.ones(5, dtype=torch.bool)),
        r"at \(torch.bool\) must hold integers",
    ),
    "positions of other rows": (
        lambda: SinusoidalPositions(7)(X, torch.arange(4)),
        r"positions of shape \(4,\) do not match 5 rows; .* shape \(5,\) or \(batch, 5\)",
    ),
    "positions with three axes": (
        lambda: SinusoidalPositions(7)(X, torch.zeros(2, 1, 5, dtype=torch.long)),
        r"positions of shape \(2, 1, 5\) do not match 5 rows",
    ),
    "positions of another batch": (
        lambda: RotaryEmbedding(4).rotate(X, torch.zeros(3, 5, dtype=torch.long)),
        r"positions of shape \(3, 5\) do not match x of shape \(2, 5, 7\)",
    ),
    "positions of a batch for a matrix": (
        lambda: SinusoidalPositions(7)(X[0], torch.zeros(1, 5, dtype=torch.long)),
        r"positions of shape \(1, 5\) do not match x of shape \(5, 7\)",
    ),
    "positions elsewhere": (
        lambda: SinusoidalPositions(7)(X, torch.zeros(5, dtype=torch.long, device="meta")),
        r"positions on meta must be where x is; use at.to\('cpu'\)",
    ),
    "narrow keys": (
        lambda: RotaryEmbedding(8).rotate(X),
        r"width \(8\) must not exceed the key width \(7\); try RotaryEmbedding\(6\)",
    ),
    "negative length": (lambda: ALiBi(2).bias(-1, 3), r"L \(-1\) must not be negative"),
    "a float offset": (
        lambda: ALiBi(2).bias(2, 3, torch.tensor(1.0)),
        r"offset \(torch.float32\) must hold integers",
    ),
    "many offsets": (
        lambda: ALiBi(2).bias(2, 3, torch.tensor([[1, 2]])),
        r"offset of shape \(1, 2\) must be an int, or a tensor without axes or with one",
    ),
}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("call", "message"), WRONG.values(), ids=WRONG.keys())
def test_wrong_input_is_named(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


# --- On a device


@pytest.mark.gpu
@pytest.mark.usefixtures("unchecked")
def test_nothing_waits_for_the_device() -> None:
    at = torch.tensor(31, device="cuda")
    x = torch.randn(2, 3, 5, 8, device="cuda")
    modules = [
        SinusoidalPositions(8),
        LearnedPositions(53, 8),
        GridPositions(7, 11, SinusoidalPositions(4), SinusoidalPositions(4)),
        LearnedGridPositions(7, 11, 8),
        Concatenated(SinusoidalPositions(8)),
    ]
    modules = [module.cuda() for module in modules]
    with no_waiting():
        got = [
            (module(x, at), module(x, at + torch.arange(5, device="cuda"))) for module in modules
        ]
        rotated = RotaryEmbedding(6).rotate(x, at)
        bias = ALiBi(3).bias(5, 7, at)
    for module, (by_offset, by_position) in zip(modules, got, strict=True):
        assert torch.equal(by_offset, by_position)
        torch.testing.assert_close(by_offset.cpu(), module.cpu()(x.cpu(), 31))
    torch.testing.assert_close(rotated.cpu(), RotaryEmbedding(6).rotate(x.cpu(), 31))
    assert bias.device.type == "cuda"
    torch.testing.assert_close(bias.cpu(), ALiBi(3).bias(5, 7, 31))


@pytest.mark.gpu
def test_far_positions_are_exact_on_the_device() -> None:
    positions = torch.arange(99_900, 100_101)
    got = SinusoidalPositions(63).encoding(positions.cuda(), torch.float32)
    exact = sinusoids(positions.tolist(), 63)
    assert (got.cpu().double() - exact).abs().max() < 3.1e-8


# The kernel of a CPU

kernel = pytest.mark.skipif(
    rotation_cpu.SOURCE.library() is None, reason=rotation_cpu.SOURCE.missing()
)


@kernel
@pytest.mark.parametrize("layout", ["interleaved", "halves"])
@pytest.mark.parametrize(("width", "key_width"), [(16, 16), (10, 16), (22, 37)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_queries_rotate_in_one_pass(
    layout: Layout,
    width: int,
    key_width: int,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As without the kernel, forwards and backwards, whatever the strides."""
    torch.manual_seed(7)
    rotary, at = (
        RotaryEmbedding(width, layout=layout),
        PackedLengths([5, 0, 11, 3]).positions() * 97,
    )
    tokens = torch.randn(1, 19, 3, key_width, dtype=dtype).transpose(1, 2)
    above = torch.randn(1, 3, 19, key_width, dtype=dtype)
    found = []
    for there in (True, False):
        if not there:
            monkeypatch.setattr(rotation_cpu, "takes", lambda x, at: False)
        for x in (tokens, tokens.contiguous(), tokens.repeat_interleave(2, -1)[..., ::2]):
            leaf = x.detach().requires_grad_()
            out = rotary.rotate(leaf, at)
            assert out.dtype == dtype
            found.append((out.detach(), *torch.autograd.grad(out, leaf, above)))
    for have in found[:3]:
        for one, other in zip(have, found[3]):
            torch.testing.assert_close(one, other)
    assert all(torch.equal(one, other) for have in found[1:3] for one, other in zip(have, found[0]))


@kernel
def test_positions_without_a_table() -> None:
    """Those below 0 or very far are computed one by one."""
    x, rotary = torch.randn(1, 3, 2, 16), RotaryEmbedding(16)
    for at in (torch.tensor([[-4, 5]]), torch.tensor([[4, rotation_cpu.FARTHEST]])):
        assert not rotation_cpu.takes(x, at)
        torch.testing.assert_close(rotary.rotate(x, at)[0], rotary.rotate(x[0], at[0]))
    assert rotation_cpu.takes(x, torch.tensor([[4, rotation_cpu.FARTHEST - 1]]))


@kernel
def test_the_rotation_is_differentiated_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(7)
    rotary, at = RotaryEmbedding(16), torch.arange(5)[None]
    leaf = torch.randn(1, 3, 5, 16, requires_grad=True)
    found = []
    for there in (True, False):
        if not there:
            monkeypatch.setattr(rotation_cpu, "takes", lambda x, at: False)
        (slope,) = torch.autograd.grad(
            rotary.rotate(leaf, at).pow(3).sum(), leaf, create_graph=True
        )
        found += torch.autograd.grad(slope.pow(2).sum(), leaf)
    torch.testing.assert_close(*found)


@pytest.mark.parametrize(
    ("base", "name", "method", "words"),
    [
        (
            AttentionPosition,
            "bias",
            lambda self, L, S: None,
            r"Own.bias\(L, S\) must take L, S, offset=None, device=None, dtype=None; write def",
        ),
        (AttentionPosition, "rotate", lambda self, x: x, r"Own.rotate\(x\) must take x, at=0"),
        (InputPosition, "encoding", lambda self, n: n, r"Own.encoding\(n\) must take positions, d"),
    ],
)
def test_a_position_of_ones_own_has_the_signature_that_is_called(
    base: type, name: str, method: Any, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        type("Own", (base,), {name: method})


def test_a_fused_rotation_is_for_one_row_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """One row of positions serves a batch of three, which no kernel of packed rows may shorten."""
    kernel = SimpleNamespace(rotate=lambda x, *rest: x[:1])
    monkeypatch.setitem(sys.modules, "regard.attention.rotation", kernel)
    monkeypatch.setattr("regard.attention.position.fuses", lambda x: True)
    x, at = torch.randn(3, 2, 5, 8), torch.arange(5)[None]
    torch.testing.assert_close(
        RotaryEmbedding(8).rotate(x, at), RotaryEmbedding(8).rotate(x, at.expand(3, 5))
    )
