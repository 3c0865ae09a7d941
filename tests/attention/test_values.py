"""Values from an input of their own: what is looked for, and what is taken away, are two things."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from regard import (
    ALiBi,
    CrossCache,
    MultiHeadAttention,
    PackedLengths,
    RotaryEmbedding,
    SelfCache,
    attend,
    causal,
    packed,
    padding,
    window,
)
from regard.attention import multihead
from regard.attention.mask import Mask
from regard.attention.score import AdditiveScore
from regard.interop.keras import attention as from_keras
from regard.look.record import record

B, L, S, D, E, U = 2, 7, 5, 12, 13, 11


def build(**options: Any) -> MultiHeadAttention:
    """A module whose biases count, too: they start at zero."""
    module = MultiHeadAttention(D, options.pop("heads", 3), **options)
    with torch.no_grad():
        for linear in (module.query, module.key, module.value, module.output):
            nn.init.normal_(linear.bias)
    return module.double()


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def close(have: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(have, want, atol=1e-12, rtol=0)


def by_hand(
    module: MultiHeadAttention, x: Tensor, source: Tensor, value: Tensor, mask: Mask | None = None
) -> Tensor:
    """The projections of three inputs, cut into heads."""
    H, G = module.heads, module.key_heads
    query, key, val = module.query(x), module.key(source), module.value(value)
    heads = []
    for q, k, v in zip(
        query.chunk(H, -1),
        [k for k in key.chunk(G, -1) for _ in range(H // G)],
        [v for v in val.chunk(G, -1) for _ in range(H // G)],
    ):
        heads.append(attend(q[:, None], k[:, None], v[:, None], mask=mask)[:, 0])
    return module.output(torch.cat(heads, -1))


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "grouped": {"heads": 6, "key_heads": 2},
    "widths": {"source_width": E, "value_source_width": U, "key_width": 5, "value_width": 7},
    "values of another width": {"value_source_width": U},
}
options_ = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())


@options_
@pytest.mark.parametrize("mask", [None, causal(), padding([5, 2])], ids=str)
def test_three_inputs_forwards_and_backwards(options: dict[str, Any], mask: Mask | None) -> None:
    module = build(**options)
    x = normal(B, L, D).requires_grad_()
    source = normal(B, S, module.source_width).requires_grad_()
    value = normal(B, S, module.value_source_width).requires_grad_()
    have = module(x, source, value=value, mask=mask)
    want = by_hand(module, x, source, value, mask)
    close(have, want)
    seed, leaves = torch.randn_like(want), [x, source, value, *module.parameters()]
    for mine, other in zip(
        torch.autograd.grad(have, leaves, seed), torch.autograd.grad(want, leaves, seed)
    ):
        close(mine, other)


def test_the_source_for_values_is_the_source_itself_unless_another_is_given() -> None:
    module, x, source = build(), normal(B, L, D), normal(B, S, D)
    assert torch.equal(module(x, source, value=source), module(x, source))
    assert torch.equal(module(x, value=x), module(x))


@pytest.mark.parametrize("position", [None, RotaryEmbedding(4), ALiBi(3)], ids=str)
def test_keys_of_x_and_values_of_another_input(position: nn.Module | None) -> None:
    module = build(position=position, value_source_width=U)
    x, value = normal(B, L, D), normal(B, L, U)
    with record(module) as seen:
        whole = module(x, value=value, mask=causal())
    # The weights are those of x alone: the values have no part in them.
    with record(module) as other:
        module(x, value=normal(B, L, U), mask=causal())
    weights = seen[""].weights()
    close(weights, other[""].weights())
    heads = weights @ module.value(value).unflatten(-1, (3, 4)).transpose(1, 2)
    close(whole, module.output(heads.transpose(1, 2).flatten(2)))


@pytest.mark.parametrize("capacity", [None, 11])
@pytest.mark.parametrize("position", [None, RotaryEmbedding(4), ALiBi(3)], ids=str)
def test_a_self_cache_grows_by_both(capacity: int | None, position: nn.Module | None) -> None:
    module = build(position=position, value_source_width=U)
    x, value = normal(B, L, D), normal(B, L, U)
    for mask in (causal(), causal() & window(2)):
        cache = SelfCache(capacity)
        steps = [
            module(part, value=own, mask=mask, cache=cache)
            for part, own in zip(x.split([3, 1, 2, 1], 1), value.split([3, 1, 2, 1], 1))
        ]
        close(torch.cat(steps, 1), module(x, value=value, mask=mask))


def test_a_cross_cache_reads_both_once() -> None:
    module = build(source_width=E, value_source_width=U)
    x, source, value = normal(B, L, D), normal(B, S, E), normal(B, S, U)
    cache, want = CrossCache(), module(x, source, value=value)
    close(module(x[:, :3], source, value=value, cache=cache), want[:, :3])
    close(module(x[:, 3:], cache=cache), want[:, 3:])
    close(module(x[:, 3:], source, cache=cache), want[:, 3:])


def test_packed_is_one_by_one() -> None:
    module = build(value_source_width=U)
    lengths, sources = [3, 1, 4], [2, 6, 1]
    xs, keyed = [normal(1, n, D) for n in lengths], [normal(1, n, D) for n in sources]
    values = [normal(1, n, U) for n in sources]
    alone = [module(*pair, value=value) for pair, value in zip(zip(xs, keyed), values)]
    mask = packed(PackedLengths(lengths), PackedLengths(sources))
    tight = module(torch.cat(xs, 1), torch.cat(keyed, 1), value=torch.cat(values, 1), mask=mask)
    close(tight, torch.cat(alone, 1))


def test_other_scores_and_leading_axes() -> None:
    module = build(score=AdditiveScore(4, 4, 5).double(), value_source_width=U)
    x, source, value = normal(2, 3, L, D), normal(2, 3, S, D), normal(2, 3, S, U)
    have = module(x, source, value=value)
    assert have.shape == (2, 3, L, D)
    close(have[1, 2], module(x[1, 2], source[1, 2], value=value[1, 2]))


def test_a_matrix_product_for_each_input(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the fused kernels of mixed precision take them; here each is torch's own."""
    products: list[int] = []

    def together(x: Tensor, *linears: nn.Linear) -> list[Tensor]:
        products.append(len(linears))
        return [linear(x) for linear in linears]

    module = build()
    x, source, value = normal(B, L, D), normal(B, S, D), normal(B, S, D)
    own = normal(B, L, D)
    # How many projections each product makes; the last is the output's.
    calls: list[tuple[list[int], Callable[[], Tensor]]] = [
        ([3, 1], lambda: module(x)),
        ([1, 2, 1], lambda: module(x, source)),
        ([1, 2, 1], lambda: module(x, value=own)),
        ([1, 1, 1, 1], lambda: module(x, source, value=value)),
        ([1, 1, 1, 1], lambda: module(x, own, value=x)),
    ]
    wanted = [call() for _, call in calls]
    monkeypatch.setattr(multihead, "fuses", lambda x: True)
    monkeypatch.setattr(multihead, "_together", together)
    for (counts, call), want in zip(calls, wanted):
        products.clear()
        close(call(), want)
        assert sorted(products) == sorted(counts)


def test_keras_with_a_value_of_its_own() -> None:
    keras = pytest.importorskip("keras")
    theirs = keras.layers.MultiHeadAttention(num_heads=3, key_dim=5, value_dim=7)
    x, source, value = (torch.randn(B, n, w) for n, w in ((L, D), (S, E), (S, U)))
    theirs(x, value, key=source)
    ours = from_keras(theirs)
    want = torch.as_tensor(theirs(x, value, key=source))
    torch.testing.assert_close(ours(x, source, value=value), want, atol=1e-5, rtol=1e-5)


def test_torch_with_three_inputs() -> None:
    theirs = nn.MultiheadAttention(D, 3, kdim=E, vdim=U, batch_first=True).double()
    module = build(source_width=E, value_source_width=U)
    with torch.no_grad():
        for part, weight, bias in zip(
            (module.query, module.key, module.value),
            (theirs.q_proj_weight, theirs.k_proj_weight, theirs.v_proj_weight),
            theirs.in_proj_bias.chunk(3),
        ):
            part.weight.copy_(weight)
            part.bias.copy_(bias)
        module.output.load_state_dict(theirs.out_proj.state_dict())
    x, source, value = normal(B, L, D), normal(B, S, E), normal(B, S, U)
    close(module(x, source, value=value), theirs(x, source, value)[0])


# Errors

WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "a value for each key": (
        lambda: build()(normal(B, L, D), normal(B, S, D), value=normal(B, L, D)),
        r"value of shape \(2, 7, 12\) must have a row for each key.*\(2, 5, 12\)",
    ),
    "a value for each x": (
        lambda: build()(normal(B, L, D), value=normal(B, S, D)),
        r"value of shape \(2, 5, 12\) must have a row for each key.*\(2, 7, 12\)",
    ),
    "their width": (
        lambda: build(value_source_width=U)(normal(B, L, D), value=normal(B, L, D)),
        r"value of shape \(2, 7, 12\) must be \(..., length, value_source_width = 11\)",
    ),
    "none where the widths differ": (
        lambda: build(value_source_width=U)(normal(B, L, D)),
        r"value_source_width \(11\) is not source_width \(12\).*pass value=",
    ),
    "none for an empty cache": (
        lambda: build(value_source_width=U)(normal(B, L, D), normal(B, S, D), cache=CrossCache()),
        r"value_source_width \(11\) is not source_width \(12\)",
    ),
    "a value without a source for an empty cache": (
        lambda: build()(normal(B, L, D), value=normal(B, S, D), cache=CrossCache()),
        "an empty CrossCache needs the source",
    ),
    "a mask": (
        lambda: build()(normal(B, L, D), value=causal()),
        "value is the mask causal",
    ),
    "no size": (lambda: build(value_source_width=0), r"value_source_width \(0\)"),
}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("call", "words"), WRONG.values(), ids=WRONG.keys())
def test_errors(call: Callable[[], object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()
