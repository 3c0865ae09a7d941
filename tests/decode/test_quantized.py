"""Weights of 8 bits: what they cost in precision, and that a batch equals one by one."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from jaxtyping import TypeCheckError
from torch import Tensor, nn

from regard.attention.multihead import MultiHeadAttention
from regard.decode.engine.eager import plain_translation, translation
from regard.decode.engine.int8 import library as native
from regard.decode.engine.int8.linear import EXACT, WIDEST, Int8Linear, int8, product, rounded
from regard.decode.search import topk as choice
from regard.decode.search.beam import beam
from regard.decode.search.greedy import greedy
from regard.model.transformer import ImageSource, Transformer, TransformerConfig

N, END = 97, 2
BASE = replace(TransformerConfig.tiny(N), width=44, heads=4, feed_forward=83, encoder_layers=2)
KINDS: dict[str, dict[str, Any]] = {
    "the paper's": {},
    "pre-norm": {"norm": "pre", "activation": "gelu"},
    "silu": {"activation": "silu", "position": "learned", "output_bias": True},
    "rotary": {"position": "rotary", "width": 48},
    "gated": {"activation": "swiglu", "key_heads": 2, "norm": "pre"},
}
kernels = pytest.mark.skipif(native.library() is None, reason=native.missing())
# Where there is no compiler, the same has to hold through torch.
pytestmark = pytest.mark.filterwarnings("ignore:8-bit layers run through torch")


@pytest.fixture(params=[True, False], ids=["kernels", "torch"])
def with_kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if request.param and native.library() is None:
        pytest.skip(native.missing())
    if not request.param:
        monkeypatch.setattr(native, "library", lambda: None)
    return bool(request.param)


def made(**settings: Any) -> Transformer:
    torch.manual_seed(0)
    model = Transformer(replace(BASE, **settings)).eval()
    nn.init.normal_(model.target.table.weight, std=0.3)
    return model


# One layer


@pytest.mark.parametrize(("out", "inner"), [(97, 53), (64, 64), (1, 3), (131, 257)])
def test_products_are_exact_but_for_the_rounding_of_inputs(
    out: int, inner: int, with_kernels: bool
) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(inner, out)
    x = torch.randn(13, 2, inner) * torch.logspace(-3, 3, 13)[:, None, None]
    y = Int8Linear(linear)(x)
    (q, s), (w, t) = rounded(x.flatten(0, 1)), rounded(linear.weight.detach())
    exact = (q.double() @ w.double().T) * s.double()[:, None] * t.double() + linear.bias.double()
    torch.testing.assert_close(y.flatten(0, 1).double(), exact, rtol=1e-5, atol=1e-6)


def test_the_error_is_at_most_half_a_unit_of_each_factor(with_kernels: bool) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(59, 31)
    x = torch.randn(17, 59)
    error = (Int8Linear(linear)(x) - linear(x)).abs()
    most_x, most_w = x.abs().amax(1), linear.weight.abs().amax(1)
    bound = 59 * (most_x[:, None] * most_w) * (1 / 127 + 1 / 254**2)
    assert (error <= bound).all()
    assert error.norm() / linear(x).norm() < 0.02


def test_a_loud_neighbour_changes_nothing(with_kernels: bool) -> None:
    torch.manual_seed(0)
    layer = Int8Linear(nn.Linear(61, 37))
    x = torch.randn(29, 61) * torch.logspace(-4, 4, 29)[:, None]
    assert torch.equal(layer(x), torch.cat([layer(row[None]) for row in x]))


def test_rows_of_zeros(with_kernels: bool) -> None:
    linear = nn.Linear(7, 5)
    assert torch.equal(Int8Linear(linear)(torch.zeros(3, 7)), linear.bias.expand(3, 5))


def test_no_rows(with_kernels: bool) -> None:
    assert Int8Linear(nn.Linear(7, 5))(torch.zeros(0, 7)).shape == (0, 5)


@pytest.mark.parametrize("odd", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("place", [0, 17, 60])
def test_what_is_not_finite_spoils_its_row_alone(
    odd: float, place: int, with_kernels: bool
) -> None:
    torch.manual_seed(0)
    layer = Int8Linear(nn.Linear(61, 37))
    x = torch.randn(5, 61)
    y, x[3, place] = layer(x), odd
    found = layer(x)
    assert found[3].isnan().all()
    rest = [0, 1, 2, 4]
    assert torch.equal(found[rest], y[rest])


def test_very_large_and_very_small_rows(with_kernels: bool) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(61, 37)
    x = torch.randn(61) * torch.tensor([1e36, 1e-36, 1e-40])[:, None]
    y = Int8Linear(linear)(x)
    torch.testing.assert_close(y[1:], linear.bias.expand(2, -1), rtol=0, atol=1e-30)
    near, exact = y[0] / 1e36, linear(x[0]) / 1e36
    assert (near - exact).norm() / exact.norm() < 0.02


@pytest.mark.parametrize("inner", [1, 2, 63, EXACT, EXACT + 1, 4099])
def test_sums_are_those_of_integers_at_the_extremes(inner: int, with_kernels: bool) -> None:
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


def test_sums_do_not_overflow(with_kernels: bool) -> None:
    linear = nn.Linear(WIDEST, 2, bias=False)
    with torch.no_grad():
        linear.weight.copy_(torch.tensor([[1.0], [-1.0]]).expand(2, WIDEST))
    y = Int8Linear(linear)(torch.tensor([[1.0], [-1.0]]).expand(2, WIDEST))
    torch.testing.assert_close(y, WIDEST * torch.tensor([[1.0, -1.0], [-1.0, 1.0]]))
    with pytest.raises(ValueError, match=f"at most {WIDEST} numbers, not {WIDEST + 1}"):
        Int8Linear(nn.Linear(WIDEST + 1, 1))


@kernels
def test_kernels_and_torch_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    linear, x = nn.Linear(61, 37), torch.randn(11, 61)
    one = Int8Linear(linear)(x)
    monkeypatch.setattr(native, "library", lambda: None)
    torch.testing.assert_close(Int8Linear(linear)(x), one, rtol=1e-6, atol=1e-6)


def test_what_does_not_fit_is_refused() -> None:
    layer = Int8Linear(nn.Linear(7, 5))
    with pytest.raises(ValueError, match="must be 7 wide, float32"):
        layer(torch.zeros(3, 6))
    with pytest.raises((ValueError, TypeCheckError)):
        layer(torch.zeros(3, 7, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"float32 weights on the cpu, not of torch\.bfloat16"):
        Int8Linear(nn.Linear(7, 5).bfloat16())
    with pytest.raises(ValueError, match="cannot be trained"):
        int8(made().train())


# A model


def steps(model: Transformer, plain: bool = False) -> Tensor:
    """Logits of a search's every move: a prompt, beams, reordering, leaving."""
    torch.manual_seed(1)
    source, lengths = torch.randint(3, N, (5, 11)), torch.tensor([11, 3, 7, 1, 5])
    if plain:
        step, state = plain_translation(model, source, lengths, 7, attention=False)
    else:
        step, state = translation(model, source, lengths, capacity=7)
    found = []
    tokens = torch.randint(3, N, (7, 23))
    rows = [[0, 0, 2, 1, 4, 4, 3], [6, 5, 4, 4, 2, 1, 0], [0, 2, 5]]
    logits, state = step(tokens[:3, :5].T.contiguous(), state)
    found.append(logits.clone())
    for n, chosen in enumerate(rows):
        state.select(torch.tensor(chosen))
        logits, state = step(tokens[n, : len(chosen), None], state)
        found.append(logits.clone())
    return torch.cat(found)


def started(model: Transformer, source: Tensor, lengths: Tensor | None = None) -> Tensor:
    """The logits of every sentence's first token."""
    step, state = translation(model, source, lengths)
    return step(torch.ones(len(source), 1, dtype=torch.int64), state)[0].clone()


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_of_8_bits_is_near_the_one_of_32(kind: str, with_kernels: bool) -> None:
    model = made(**KINDS[kind])
    exact = steps(model)
    near = steps(int8(copy.deepcopy(model)))
    assert (near - exact).norm() / exact.norm() < 0.05


@kernels
@pytest.mark.parametrize("kind", KINDS)
def test_one_call_and_modules_are_equally_near(kind: str) -> None:
    model = made(**KINDS[kind])
    exact, small = steps(model), int8(copy.deepcopy(model))
    fused, modules = steps(small), steps(small, plain=True)
    assert not torch.equal(fused, modules)  # keys and values are of 16 bits in one of them
    assert (fused - modules).norm() < 1.5 * (modules - exact).norm()


@kernels
@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_equals_one_by_one(kind: str) -> None:
    model = int8(made(**KINDS[kind]))
    torch.manual_seed(2)
    source, lengths = torch.randint(3, N, (13, 11)), torch.randint(1, 12, (13,))

    def found(rows: slice) -> Any:
        ids, counts = source[rows], lengths[rows]
        limits: dict[str, Any] = {"end": END, "max_length": 17, "banned": [0]}
        prompts = [[1]] * len(ids)
        one = greedy(*translation(model, ids, counts), prompts, **limits)
        return list(zip(one, beam(*translation(model, ids, counts), prompts, **limits, n_best=2)))

    assert found(slice(None)) == [found(slice(n, n + 1))[0] for n in range(13)]


@kernels
def test_states_refuse_rows_that_they_do_not_have() -> None:
    step, state = translation(int8(made()), torch.randint(3, N, (3, 5)))
    with pytest.raises(ValueError, match="must lie from 0 to 2"):
        state.select(torch.tensor([0, 3]))
    with pytest.raises(ValueError, match="tokens of 2 rows for a state of 3"):
        step(torch.ones(2, 1, dtype=torch.int64), state)


@kernels
def test_who_listens_gets_the_modules() -> None:
    model = int8(made())
    heard = []
    model.decoder.blocks[0].register_forward_hook(lambda *_: heard.append(1))
    step, state = translation(model, torch.randint(3, N, (3, 5)))
    step(torch.ones(3, 1, dtype=torch.int64), state)
    assert heard


@kernels
def test_learned_positions_reach_to_their_end() -> None:
    model = made(position="learned", length=17)
    exact, small = steps(model), int8(model)
    assert (steps(small) - exact).norm() / exact.norm() < 0.05
    step, state = translation(small, torch.randint(3, N, (3, 5)))
    _, state = step(torch.ones(3, 17, dtype=torch.int64), state)
    with pytest.raises(ValueError, match="17"):
        step(torch.ones(3, 1, dtype=torch.int64), state)


@kernels
@pytest.mark.parametrize("token", [-1, N])
def test_tokens_that_do_not_exist_are_refused(token: int) -> None:
    step, state = translation(int8(made()), torch.randint(3, N, (3, 5)))
    with pytest.raises(ValueError, match=f"must lie from 0 to {N - 1}"):
        step(torch.full((3, 1), token), state)


@kernels
def test_one_image() -> None:
    source = ImageSource(image=(6, 9), patch=3, channels=2)
    model = int8(made(source=source, share="target"))
    torch.manual_seed(1)
    images = torch.randn(3, 2, 6, 9)
    one_by_one = [started(model, image[None]) for image in images]
    assert torch.equal(started(model, images), torch.cat(one_by_one))


@kernels
def test_more_and_longer_than_anything_was_made_for() -> None:
    model = int8(made(position="rotary", width=48))
    torch.manual_seed(1)
    step, state = translation(model, torch.randint(3, N, (2, 701)), capacity=3)
    tokens = torch.randint(3, N, (2, 131))
    for column in tokens.split(1, dim=1):
        logits, state = step(column, state)
    assert logits.isfinite().all()

    source, lengths = torch.randint(3, N, (3001, 5)), torch.randint(1, 6, (3001,))
    logits = started(model, source, lengths)
    for n in (0, 1499, 3000):
        assert torch.equal(started(model, source[[n]], lengths[[n]])[0], logits[n])


# Weights that change


@kernels
def test_weights_that_have_changed_or_moved_are_the_ones_used() -> None:
    model = int8(made(norm="pre", position="learned"))
    before = steps(model)
    with torch.no_grad():
        model.target.position.table.add_(1.0)
        model.decoder.norm.bias.add_(1.0)
    changed = steps(model)
    assert not torch.equal(before, changed)
    assert torch.equal(changed, steps(copy.deepcopy(model)))
    for block in model.decoder.blocks:
        block.add_attention.norm.weight = nn.Parameter(torch.full((44,), 0.5))
        block.add_cross.norm.weight.data = torch.full((44,), 2.0)
    moved = steps(model)
    assert not torch.equal(moved, changed)
    assert torch.equal(moved, steps(copy.deepcopy(model)))


@kernels
def test_layers_that_are_made_again_are_the_ones_used() -> None:
    model, other = int8(made()), made()
    before = steps(model)
    with torch.no_grad():
        other.output.weight.mul_(2.0)
    model.output = Int8Linear(other.output)
    assert not torch.equal(steps(model), before)


def test_other_numbers_are_refused(with_kernels: bool) -> None:
    model = int8(made())
    steps(model)
    with pytest.raises((ValueError, TypeCheckError, RuntimeError)):
        steps(model.double())


def test_weights_for_other_layers_are_refused(with_kernels: bool) -> None:
    model = made()
    state = model.state_dict()
    with pytest.raises(RuntimeError, match="load them first, and then call int8"):
        int8(model).load_state_dict(state, strict=False)


def test_training_is_refused(with_kernels: bool) -> None:
    model = int8(made())
    with pytest.raises(ValueError, match="8-bit layers cannot be trained"):
        model.train()


# Models that the kernels do not know


@kernels
@pytest.mark.parametrize("part", ["fewer key heads", "another norm", "no shift", "an own network"])
def test_others_run_through_their_modules(part: str) -> None:
    model = made(decoder_layers=3)
    block: Any = model.decoder.blocks[1]
    if part == "fewer key heads":
        block.attention = MultiHeadAttention(44, 4, key_heads=2)
    elif part == "another norm":
        block.add_cross.norm = nn.RMSNorm(44)
    elif part == "no shift":
        block.add_feed_forward.norm = nn.LayerNorm(44, bias=False)
    else:
        network: Any = type("Twice", (type(block.feed_forward),), {})(44, 7, nn.ReLU())
        network.forward = lambda x: x * 2.0
        block.feed_forward = network
    model = int8(model.eval())
    assert torch.equal(steps(model), steps(model, plain=True))


# What a search asks of logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 16, 101])
def test_the_best_of_each_row(dtype: torch.dtype, size: int) -> None:
    torch.manual_seed(0)
    logits = torch.randn(7, size).to(dtype) * 9
    logits[3, : size // 2] = -torch.inf
    values, tokens = choice.best(logits, 5)
    wide = logits.to(torch.promote_types(dtype, torch.float32)).log_softmax(-1)
    assert values.shape == tokens.shape == (7, min(5, size))
    torch.testing.assert_close(values, wide.topk(min(5, size)).values)
    torch.testing.assert_close(wide.gather(1, tokens), values)


@kernels
def test_of_equals_the_first() -> None:
    logits = torch.zeros(2, 37)
    logits[1, 23:25] = 1
    _, tokens = choice.best(logits, 2)
    assert tokens.tolist() == [[0, 1], [23, 24]]


def test_of_equals_the_same_whoever_else_is_there(with_kernels: bool) -> None:
    torch.manual_seed(0)
    logits = torch.randint(0, 3, (7, 101)).float()
    _, tokens = choice.best(logits, 5)
    alone = torch.cat([choice.best(row[None], 5)[1] for row in logits])
    assert torch.equal(tokens, alone)


def test_what_is_not_a_number_stays_seen() -> None:
    logits = torch.zeros(3, 37)
    logits[1, 30] = torch.nan
    logits[2, 30] = torch.inf
    values, _ = choice.best(logits, 2)
    assert values.isnan().any(1).tolist() == [False, True, True]
