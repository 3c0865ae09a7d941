"""Weights of 8 bits: what they cost in precision, and that a batch equals one by one."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from jaxtyping import TypeCheckError
from torch import Tensor, nn

from regard.decode import choice, native
from regard.decode.beam import beam
from regard.decode.greedy import greedy
from regard.decode.quantized import Int8Linear, int8, rounded
from regard.decode.step import plain_translation, translation
from regard.model.transformer import Transformer, TransformerConfig

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


def test_of_equals_the_first() -> None:
    logits = torch.zeros(2, 37)
    logits[1, 23:25] = 1
    _, tokens = choice.best(logits, 2)
    assert tokens[:, 0].tolist() == [0, 23]
    if native.library() is not None:
        assert tokens.tolist() == [[0, 1], [23, 24]]


def test_what_is_not_a_number_stays_seen() -> None:
    logits = torch.zeros(3, 37)
    logits[1, 30] = torch.nan
    logits[2, 30] = torch.inf
    values, _ = choice.best(logits, 2)
    assert values.isnan().any(1).tolist() == [False, True, True]
