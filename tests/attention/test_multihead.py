"""Multi-head attention against a plain loop over its heads; its caches against no cache."""

import copy
import json
import math
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from regard import (
    ALiBi,
    CrossCache,
    Mask,
    MultiHeadAttention,
    PackedLengths,
    RotaryEmbedding,
    SelfCache,
    attend,
    attention_weights,
    causal,
    documents,
    packed,
    padding,
    prefix,
    window,
)
from regard.attention.score import AdditiveScore, BilinearScore, DotScore

B, L, S, D, E = 2, 7, 5, 12, 13

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 5e-2}


def build(
    width: int = D, heads: int = 3, dtype: torch.dtype = torch.float64, **options: Any
) -> MultiHeadAttention:
    """A module whose biases count, too: they start at zero."""
    module = MultiHeadAttention(width, heads, **options)
    with torch.no_grad():
        for linear in (module.query, module.key, module.value, module.output):
            if linear.bias is not None:
                nn.init.normal_(linear.bias)
    return module.to(dtype)


def normal(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64).to(dtype)


def close(have: Tensor, want: Tensor, dtype: torch.dtype = torch.float64) -> None:
    assert have.dtype == dtype
    tolerance = TOLERANCE[dtype] * max([1.0, *want.detach().abs().flatten().tolist()])
    torch.testing.assert_close(have.double(), want.double(), atol=tolerance, rtol=0)


def rows_of(linear: nn.Linear, head: int, width: int) -> Callable[[Tensor], Tensor]:
    """x W^h + b^h: the part of a projection that belongs to one head."""
    part = slice(head * width, (head + 1) * width)

    def apply(x: Tensor) -> Tensor:
        y = x @ linear.weight[part].T
        return y if linear.bias is None else y + linear.bias[part]

    return apply


def head_by_head(
    module: MultiHeadAttention,
    x: Tensor,
    source: Tensor | None = None,
    allowed: Tensor | None = None,
    scores: Callable[[Tensor, Tensor, int], Tensor] | None = None,
) -> Tensor:
    """[head_1; ...; head_H] W_O, one head after the other."""
    source = x if source is None else source
    K, V = module.key_width, module.value_width
    heads = []
    for h in range(module.heads):
        g = h * module.key_heads // module.heads
        query = rows_of(module.query, h, K)(x)
        key, value = rows_of(module.key, g, K)(source), rows_of(module.value, g, V)(source)
        grid = query @ key.mT / math.sqrt(K) if scores is None else scores(query, key, h)
        if allowed is not None:
            grid = grid.masked_fill(~allowed, -math.inf)
        # A row of -inf sees nothing, and receives zeros.
        heads.append(grid.softmax(-1).nan_to_num(0) @ value)
    return rows_of(module.output, 0, module.output_width)(torch.cat(heads, -1))


# --- Widths and heads

WIDTHS: dict[str, dict[str, int | bool]] = {
    "plain": {},
    "one head": {"heads": 1},
    "a head for each column": {"heads": D},
    "no bias": {"bias": False},
    "key width, heads that do not divide": {"width": 11, "key_width": 5},
    "value width": {"value_width": 7},
    "key and value width": {"key_width": 5, "value_width": 7},
    "value wider than nothing else": {"key_width": 1, "value_width": 17},
    "source width": {"source_width": E},
    "output width": {"output_width": 17},
    "grouped heads": {"heads": 6, "key_heads": 2},
    "one key head": {"heads": 6, "key_heads": 1},
    "everything": {
        "width": 11,
        "heads": 6,
        "key_heads": 3,
        "key_width": 5,
        "value_width": 7,
        "source_width": E,
        "output_width": 17,
    },
}
widths = pytest.mark.parametrize("options", WIDTHS.values(), ids=WIDTHS.keys())


@widths
def test_the_loop_over_heads_gives_the_same_forwards_and_backwards(
    options: dict[str, Any],
) -> None:
    module = build(**options)
    x = normal(B, L, module.width).requires_grad_()
    source = normal(B, S, module.source_width).requires_grad_()
    cases = [(x, source), (x,)] if module.source_width == module.width else [(x, source)]
    for inputs in cases:
        have, want = module(*inputs), head_by_head(module, *inputs)
        assert have.shape == (B, L, module.output_width)
        close(have, want)
        seed = torch.randn_like(want)
        leaves = [*inputs, *module.parameters()]
        for mine, other in zip(
            torch.autograd.grad(have, leaves, seed), torch.autograd.grad(want, leaves, seed)
        ):
            close(mine, other)


@widths
def test_widths_are_per_head(options: dict[str, Any]) -> None:
    module = build(**options)
    H, G = module.heads, options.get("key_heads", module.heads)
    K = options.get("key_width", module.width // H)
    V = options.get("value_width", K)
    source = options.get("source_width", module.width)
    output = options.get("output_width", module.width)
    assert module.query.weight.shape == (H * K, module.width)
    assert module.key.weight.shape == (G * K, source)
    assert module.value.weight.shape == (G * V, source)
    assert module.output.weight.shape == (output, H * V)


@pytest.mark.parametrize("options", [{}, {"heads": 6, "key_heads": 2}], ids=["plain", "grouped"])
def test_gradients_reach_every_parameter(options: dict[str, Any]) -> None:
    module = build(**options)
    module(normal(B, L, D)).square().sum().backward()
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None
        if name == "key.bias":
            # It adds the same to all scores of a row, which the softmax does not see.
            assert parameter.grad.abs().max() < 1e-10
        else:
            assert parameter.grad.abs().amin() > 0, name


def test_self_attention_is_cross_attention_to_oneself() -> None:
    module = build()
    x = normal(B, L, D)
    for mask in (None, causal(), padding([7, 3])):
        assert torch.equal(module(x, mask=mask), module(x, x, mask=mask))


def test_new_biases_are_zero_and_weights_have_glorots_bound() -> None:
    module = MultiHeadAttention(D, 3, value_width=7)
    for linear in (module.query, module.key, module.value, module.output):
        assert linear.bias.abs().max() == 0
        bound = math.sqrt(6 / sum(linear.weight.shape))
        assert 0.8 * bound < linear.weight.abs().max() <= bound


@pytest.mark.parametrize("lead", [(), (1,), (2, 3), (2, 1, 3)], ids=str)
def test_leading_axes_are_free(lead: tuple[int, ...]) -> None:
    module = build()
    x, source = normal(*lead, L, D), normal(*lead, S, D)
    for mask in (None, causal()):
        allowed = None if mask is None else mask.tensor(L, S)[0, 0]
        have = module(x, source, mask=mask)
        assert have.shape == (*lead, L, D)
        close(have, head_by_head(module, x, source, allowed))


def test_leading_axes_are_the_batch_of_a_mask() -> None:
    module = build()
    x = normal(2, 3, L, D)
    varied = Mask.from_tensor(torch.arange(6 * 3 * L * L).view(6, 3, L, L) * 5 % 7 > 2)
    for mask in (varied, causal() & padding([7, 1, 2, 3, 5, 4])):
        want = module(x.flatten(0, 1), mask=mask)
        close(module(x, mask=mask), want.view(2, 3, L, D))
        allowed = mask.tensor(L, L)
        alone = module(x[1, 2], mask=Mask.from_tensor(allowed[5:]))
        close(alone, want[5])


@pytest.mark.parametrize("position", [None, RotaryEmbedding(4), ALiBi(3)], ids=str)
def test_a_single_sequence_needs_no_batch_axis(position: nn.Module | None) -> None:
    module = build(position=position)
    x = normal(L, D)
    for mask in (None, causal(), causal() & packed([4, 3])):
        close(module(x, mask=mask), module(x[None], mask=mask)[0])
    cache = SelfCache()
    steps = [module(piece, mask=causal(), cache=cache) for piece in x.split([3, 1, 3])]
    close(torch.cat(steps), module(x, mask=causal()))


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (1, 5), (5, 1), (0, 5)])
def test_short_sequences(rows: int, columns: int) -> None:
    module = build()
    x, source = normal(B, rows, D), normal(B, columns, D)
    close(module(x, source), head_by_head(module, x, source))


def test_nothing_to_attend_to_leaves_the_bias_of_the_output() -> None:
    module = build()
    nothing = module.output.bias.expand(B, L, D)
    assert torch.equal(module(normal(B, L, D), normal(B, 0, D)), nothing)
    have = module(normal(B, L, D), mask=padding([0, 3]))
    assert torch.equal(have[0], nothing[0])
    assert not torch.equal(have[1], nothing[1])


# --- Masks, scores, beta, dropout

MASKS: dict[str, Callable[[], Mask]] = {
    "causal": causal,
    "padding": lambda: padding([L, 3]),
    "causal & padding": lambda: causal() & padding([L, 3]),
    "window": lambda: window(2, 1),
    "prefix": lambda: causal() | prefix([2, 4]),
    "tensor per head": lambda: Mask.from_tensor(
        (torch.arange(3 * L * L).view(1, 3, L, L) * 5 % 7 > 2) | torch.eye(L, dtype=torch.bool)
    ),
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
def test_masks(mask: Callable[[], Mask]) -> None:
    module = build()
    x = normal(B, L, D)
    allowed = mask().tensor(L, L).expand(-1, 3, L, L)

    def scores(query: Tensor, key: Tensor, h: int) -> Tensor:
        return (query @ key.mT / 2).masked_fill(~allowed[:, h], -math.inf)

    close(module(x, mask=mask()), head_by_head(module, x, scores=scores))


def test_a_mask_shared_by_layers_is_made_once() -> None:
    asked = []

    def rule(at: Any) -> Tensor:
        allowed = (at.query - at.key) % 3 != 1
        asked.append(tuple(allowed.shape))
        return allowed

    layers = [build() for _ in range(3)]
    shared, x = Mask(rule, "own"), normal(B, L, D)
    allowed = (torch.arange(L)[:, None] - torch.arange(L)) % 3 != 1
    have = want = x
    for layer in layers:
        have, want = layer(have, mask=shared), head_by_head(layer, want, allowed=allowed)
    close(have, want)
    # For one pair, to see whether it looks at sentences or heads; then for all.
    assert asked == [(1,), (L, L)]


def test_a_rule_of_ones_own_may_look_at_heads_and_sentences() -> None:
    module, x = build(), normal(B, L, D)
    reach = torch.tensor([[1, 2, 4], [7, 3, 0]])
    own = Mask(lambda at: (at.query - at.key).abs() <= reach[at.batch, at.head], "own")
    distance = (torch.arange(L)[:, None] - torch.arange(L)).abs()
    table = Mask.from_tensor(distance <= reach[:, :, None, None])
    for extra in (None, causal(), ~window(1)):
        mine, plain = (mask if extra is None else mask & extra for mask in (own, table))
        close(module(x, mask=mine), module(x, mask=plain))


def additive(score: AdditiveScore) -> Callable[[Tensor, Tensor, int], Tensor]:
    def scores(query: Tensor, key: Tensor, h: int) -> Tensor:
        rows = []
        for i in range(query.shape[-2]):
            hidden = query[..., i, :] @ score.query_weight
            rows.append(torch.tanh(hidden[..., None, :] + key @ score.key_weight) @ score.vector)
        return torch.stack(rows, -2)

    return scores


SCORES: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], Any]]] = {
    "dot": (DotScore, lambda score: lambda q, k, h: q @ k.mT),
    "general": (lambda: BilinearScore(4, 4), lambda score: lambda q, k, h: q @ score.weight @ k.mT),
    "general per head": (
        lambda: BilinearScore(4, 4, heads=3),
        lambda score: lambda q, k, h: q @ score.weight[h] @ k.mT,
    ),
    "additive": (lambda: AdditiveScore(4, 4, 5), additive),
}


@pytest.mark.parametrize(("make", "plain"), SCORES.values(), ids=SCORES.keys())
def test_scores(make: Callable[[], Any], plain: Callable[[Any], Any]) -> None:
    score = make().double()
    module = build(score=score)
    x, source = normal(B, L, D), normal(B, S, D)
    have = module(x, source, mask=padding([5, 2]))
    want = head_by_head(module, x, source, padding([5, 2]).tensor(L, S)[:, 0], plain(score))
    close(have, want)
    own = list(score.parameters())
    assert all(any(p is q for q in module.parameters()) for p in own)
    seed = torch.randn_like(want)
    for mine, other in zip(
        torch.autograd.grad(have, own, seed) if own else (),
        torch.autograd.grad(want, own, seed) if own else (),
    ):
        close(mine, other)
        assert mine.abs().max() > 0


BETAS = {
    "number": 0.3,
    "zero": 0,
    "tensor": torch.tensor(0.7),
    "per head": torch.tensor([0.2, 0.0, 1.7]),
}


@pytest.mark.parametrize("beta", BETAS.values(), ids=BETAS.keys())
@pytest.mark.parametrize("learned", [False, True], ids=["given", "learned"])
def test_beta(beta: float | Tensor, learned: bool) -> None:
    given = nn.Parameter(torch.as_tensor(beta, dtype=torch.float64)) if learned else beta
    module = build(beta=given)
    x = normal(B, L, D)
    per_head = given.expand(3) if isinstance(given, Tensor) else [given] * 3
    want = head_by_head(module, x, scores=lambda q, k, h: per_head[h] * (q @ k.mT))
    have = module(x)
    close(have, want)
    assert ("core.beta" in module.state_dict()) == isinstance(given, Tensor)
    assert ("core.beta" in dict(module.named_parameters())) == learned
    if learned:
        seed = torch.randn_like(want)
        (mine,) = torch.autograd.grad(have, given, seed)
        close(mine, torch.autograd.grad(want, given, seed)[0])
        assert mine.abs().min() > 0


def test_a_given_beta_moves_with_the_module() -> None:
    module = MultiHeadAttention(D, 3, beta=torch.tensor([0.2, 0.0, 1.7]))
    other = MultiHeadAttention(D, 3, beta=torch.ones(3))
    other.load_state_dict(module.state_dict())
    x = torch.randn(B, L, D)
    assert torch.equal(other(x), module(x))
    assert module.double().core.beta.dtype == torch.float64
    assert module.to("meta")(x.double().to("meta")).shape == x.shape


def test_infinite_beta_picks_one_value() -> None:
    module = build(heads=1, beta=math.inf)
    x = normal(B, L, D)
    query, key, value = module.query(x), module.key(x), module.value(x)
    best = (query @ key.mT).argmax(-1)
    picked = torch.stack([value[b, best[b]] for b in range(B)])
    close(module(x), module.output(picked))


def test_dropout_only_in_training() -> None:
    module = build(dropout=0.4)
    x = normal(1, L, D)
    expected = head_by_head(module, x)
    assert not torch.equal(module(x), module(x))
    drawn = module(x.expand(4001, L, D))
    spread = drawn.std(0, unbiased=False)
    assert (spread > 0.1 * drawn.std()).all()
    # Weights that stay are divided by 1 - p, so that nothing changes on average.
    assert ((drawn.mean(0) - expected[0]).abs() < 5 * spread / math.sqrt(4001)).all()
    module.eval()
    close(module(x), expected)
    assert torch.equal(module(x), module(x))


def test_dropout_drops_weights() -> None:
    module = build(heads=1, dropout=0.5)
    with torch.no_grad():
        for linear in (module.value, module.output):
            linear.weight.copy_(torch.eye(D))
            linear.bias.zero_()
    # With the identity for values the output is the matrix of weights itself.
    x, source = normal(1, L, D), torch.eye(D, dtype=torch.float64)[None]
    kept = module(x, source)
    whole = module.eval()(x, source)
    dropped = kept == 0
    assert 0.2 < dropped.double().mean() < 0.8
    close(kept[~dropped], 2 * whole[~dropped])


# --- What hooks see


@pytest.mark.parametrize("cross", [False, True], ids=["self", "cross"])
def test_the_core_receives_queries_keys_and_values_per_head(cross: bool) -> None:
    module = build(heads=6, key_heads=2, key_width=5, value_width=7)
    x, source = normal(B, L, D), normal(B, S, D) if cross else None
    mask = causal()
    seen: list[Tensor] = []

    def record(core: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        seen.extend((*inputs, output))

    handle = module.core.register_forward_hook(record)
    out = module(x, source, mask=mask)
    handle.remove()
    query, key, value, context = seen
    length = S if cross else L
    assert query.shape == (B, 6, L, 5)
    assert key.shape == (B, 2, length, 5)
    assert value.shape == (B, 2, length, 7)
    assert context.shape == (B, 6, L, 7)
    close(attention_weights(query, key, mask=mask) @ value.repeat_interleave(3, 1), context)
    close(attend(query, key, value, mask=mask), context)
    close(module.output(context.transpose(1, 2).flatten(2)), out)
    close(query[1, 4], rows_of(module.query, 4, 5)(x[1]))


def test_a_hook_may_intervene() -> None:
    module = build()
    x = normal(B, L, D)
    whole = module(x)

    def without_head_1(core: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return output * torch.tensor([1.0, 0.0, 1.0])[:, None, None]

    handle = module.core.register_forward_hook(without_head_1)
    cut = module(x)
    handle.remove()
    silenced = copy.deepcopy(module)
    with torch.no_grad():
        silenced.output.weight[:, 4:8] = 0
    close(cut, silenced(x))
    assert torch.equal(module(x), whole)


# --- Positions


def turned(x: Tensor, at: Tensor) -> Tensor:
    """Pairs of columns as complex numbers, turned by their angles."""
    angles = at[:, None].double() / 10000 ** (torch.arange(0, x.shape[-1], 2) / x.shape[-1])
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)


@pytest.mark.parametrize("options", [{}, {"heads": 6, "key_heads": 2, "key_width": 4}], ids=str)
def test_rotary(options: dict[str, Any]) -> None:
    module = build(position=RotaryEmbedding(4), **options)
    x, at = normal(B, L, D), torch.arange(L)
    want = head_by_head(module, x, scores=lambda q, k, h: turned(q, at) @ turned(k, at).mT / 2)
    close(module(x), want)
    assert (module(x) - head_by_head(module, x)).abs().max() > 0.01


def test_linear_bias() -> None:
    module = build(heads=4, position=ALiBi(4))
    x, at = normal(B, L, D), torch.arange(L)
    distance = (at[:, None] - at).abs()
    want = head_by_head(
        module, x, scores=lambda q, k, h: q @ k.mT / math.sqrt(3) - distance / 4.0 ** (h + 1)
    )
    close(module(x), want)
    allowed = causal().tensor(L, L)[:, 0]
    want = head_by_head(
        module,
        x,
        allowed=allowed,
        scores=lambda q, k, h: q @ k.mT / math.sqrt(3) - distance / 4.0 ** (h + 1),
    )
    close(module(x, mask=causal()), want)


# --- Caches

POSITIONS: dict[str, Callable[[], nn.Module | None]] = {
    "no position": lambda: None,
    "rotary": lambda: RotaryEmbedding(2),
    "linear bias": lambda: ALiBi(6),
}
positions = pytest.mark.parametrize("position", POSITIONS.values(), ids=POSITIONS.keys())
capacities = pytest.mark.parametrize("capacity", [None, 11, 17], ids=["grows", "full", "roomy"])
CHUNKS = {"one by one": [1] * 11, "prompt, then steps": [5, 1, 1, 1, 3], "chunks": [4, 2, 5]}


def in_steps(
    module: MultiHeadAttention,
    x: Tensor,
    chunks: list[int],
    cache: SelfCache,
    mask: Mask | None = None,
) -> Tensor:
    assert sum(chunks) == x.shape[-2]
    pieces = x.split(chunks, -2)
    return torch.cat([module(piece, mask=mask, cache=cache) for piece in pieces], -2)


@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS.keys())
@capacities
@positions
def test_cached_steps_are_the_causal_forward(
    position: Callable[[], nn.Module | None], capacity: int | None, chunks: list[int]
) -> None:
    module = build(heads=6, key_heads=2, position=position())
    x, cache = normal(B, 11, D), SelfCache(capacity)
    close(in_steps(module, x, chunks, cache, causal()), module(x, mask=causal()))
    assert int(cache.length) == 11
    assert isinstance(cache.length, int) == (capacity is None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("capacity", [None, 13], ids=["grows", "roomy"])
@positions
def test_cached_steps_in_lower_precision(
    position: Callable[[], nn.Module | None], capacity: int | None, dtype: torch.dtype
) -> None:
    module = build(heads=6, position=position(), dtype=dtype)
    x = normal(B, 11, D, dtype=dtype)
    with torch.no_grad():
        have = in_steps(module, x, [4, 1, 1, 5], SelfCache(capacity), causal())
        close(have, module(x, mask=causal()), dtype)


@capacities
def test_single_steps_need_no_mask(capacity: int | None) -> None:
    module = build(position=RotaryEmbedding(4))
    x = normal(B, 11, D)
    close(in_steps(module, x, [1] * 11, SelfCache(capacity)), module(x, mask=causal()))


def test_a_growing_cache_under_a_window() -> None:
    module = build()
    x, mask = normal(B, 11, D), causal() & window(2)
    close(in_steps(module, x, [4, 1, 1, 5], SelfCache(), mask), module(x, mask=mask))


WITHIN: dict[str, tuple[Callable[[int], Mask], list[int]]] = {
    # A mask over a sequence whose cache has this much room, and chunks that it does not look past.
    "window": (lambda room: window(2), [11]),
    "causal window": (lambda room: window(2, 0), [4, 1, 1, 5]),
    "causal & window": (lambda room: causal() & window(3, 1), [4, 1, 1, 5]),
    "causal & not window": (lambda room: causal() & ~window(1), [4, 1, 1, 5]),
    "causal | prefix": (lambda room: causal() | prefix(3), [5, 1, 1, 4]),
    "causal | prefixes": (lambda room: causal() | prefix([3, 5]), [5, 1, 1, 4]),
    "causal & padding": (lambda room: causal() & padding([11, 4]), [4, 1, 1, 5]),
    "not causal": (lambda room: ~causal(), [11]),
    "own rule": (
        lambda room: causal() & Mask(lambda at: (at.query - at.key) % 3 != 1, "own"),
        [4, 1, 1, 5],
    ),
    "documents": (lambda room: causal() & documents([n // 4 for n in range(room)]), [4, 1, 1, 5]),
    "offset": (lambda room: causal(2), [11]),
    "nothing": (lambda room: prefix(99), [11]),
}


@pytest.mark.parametrize("capacity", [11, 17])
@pytest.mark.parametrize(("mask", "chunks"), WITHIN.values(), ids=WITHIN.keys())
def test_masks_end_where_the_keys_do_and_not_where_the_room_does(
    mask: Callable[[int], Mask], chunks: list[int], capacity: int
) -> None:
    module, x = build(), normal(B, 11, D)
    want = module(x, mask=mask(11))
    with torch.no_grad():
        close(in_steps(module, x, chunks, SelfCache(capacity), mask(capacity)), want)
    # A cache that grows has just the keys so far, and lengths and ids must be theirs.
    if "documents" not in str(mask(11)) and "padding" not in str(mask(11)):
        close(in_steps(module, x, chunks, SelfCache(), mask(11)), want)


@pytest.mark.parametrize("capacity", [None, 13])
def test_a_first_chunk_without_a_mask_sees_itself_whole(capacity: int | None) -> None:
    module, x = build(), normal(B, 5, D)
    close(module(x, cache=SelfCache(capacity)), module(x))


@capacities
@positions
def test_an_empty_chunk_changes_nothing(
    position: Callable[[], nn.Module | None], capacity: int | None
) -> None:
    module = build(heads=6, position=position())
    x = normal(B, 11, D)
    for training in (True, False):
        with torch.set_grad_enabled(training):
            have = in_steps(module, x, [0, 4, 0, 7, 0], SelfCache(capacity), causal())
        close(have, module(x, mask=causal()))


@capacities
def test_what_was_filled_in_inference_mode_serves_outside(capacity: int | None) -> None:
    module, x = build(), normal(B, 11, D)
    want = module(x, mask=causal())
    for outside in (torch.no_grad, torch.enable_grad):
        cache = SelfCache(capacity)
        with torch.inference_mode():
            in_steps(module, x[:, :5], [4, 1], cache, causal())
            cache.select([1, 0])
            cache.select([1, 0])
        with outside():
            have = in_steps(module, x[:, 5:], [1, 5], cache, causal())
        close(have, want[:, 5:])
    torch.autograd.grad(have.sum(), list(module.parameters()))


def test_a_source_read_in_inference_mode_serves_outside() -> None:
    module, x, source, cache = build(), normal(B, L, D), normal(B, S, D), CrossCache()
    with torch.inference_mode():
        module(x, source, cache=cache)
        cache.select([1, 0])
    have = module(x, cache=cache)
    close(have, module(x, source.flip(0)))
    torch.autograd.grad(have.sum(), list(module.query.parameters()))


@capacities
@positions
def test_gradients_reach_back_through_cached_steps(
    position: Callable[[], nn.Module | None], capacity: int | None
) -> None:
    module = build(heads=6, key_heads=2, position=position())
    x = normal(B, 11, D).requires_grad_()
    leaves = [x, *module.parameters()]
    cache = SelfCache(capacity)
    have = in_steps(module, x[:, :9], [4, 1, 1, 3], cache, causal())
    with torch.no_grad():  # what comes afterwards leaves them as they are
        module(x[:, 9:], mask=causal(), cache=cache)
    want = module(x, mask=causal())[:, :9]
    seed = torch.randn_like(want)
    for mine, other in zip(
        torch.autograd.grad(have, leaves, seed), torch.autograd.grad(want, leaves, seed)
    ):
        close(mine, other)


@capacities
def test_gradients_stop_at_what_was_cached_without_them(capacity: int | None) -> None:
    module, x, cache = build(), normal(B, 11, D).requires_grad_(), SelfCache(capacity)
    with torch.no_grad():
        module(x[:, :4], mask=causal(), cache=cache)
    module.key.requires_grad_(False)
    module.value.requires_grad_(False)
    late = x.detach().requires_grad_()
    have = in_steps(module, late[:, 4:], [1, 2, 4], cache, causal())
    (mine,) = torch.autograd.grad(have.sum(), late)
    together = torch.cat([x[:, :4].detach(), late[:, 4:]], 1)
    (other,) = torch.autograd.grad(module(together, mask=causal())[:, 4:].sum(), late)
    close(mine, other)


def test_a_cache_with_capacity_keeps_its_shape_and_place() -> None:
    module = build(heads=6, key_heads=2)
    seen = []
    module.core.register_forward_hook(lambda core, inputs, output: seen.append(inputs[1:3]))
    with torch.no_grad():
        in_steps(module, normal(B, 11, D), [5, 1, 1, 4], SelfCache(13))
    for key, value in seen:
        assert key.shape == value.shape == (B, 2, 13, 2)
        assert key.data_ptr() == seen[0][0].data_ptr()
        assert value.data_ptr() == seen[0][1].data_ptr()


def test_each_position_is_projected_once() -> None:
    module, rows = build(), []
    module.key.register_forward_hook(lambda linear, inputs, output: rows.append(output.shape[-2]))
    in_steps(module, normal(B, 11, D), [5, 1, 1, 4], SelfCache(), causal())
    assert rows == [5, 1, 1, 4]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("before", [0, 3])
def test_a_full_cache_says_so(before: int) -> None:
    module, cache = build(), SelfCache(4)
    if before:
        module(normal(B, before, D), cache=cache)
    message = (
        rf"holds 4 positions, but {before + 5} are needed; make it with SelfCache\({before + 5}\)"
    )
    with pytest.raises(ValueError, match=message):
        module(normal(B, 5, D), cache=cache)
    # Nothing was written: what fits goes on.
    x = normal(B, 4 - before, D)
    assert module(x, cache=cache).shape == x.shape


def test_a_cross_cache_needs_the_source_once() -> None:
    module, calls = build(source_width=E), []
    module.key.register_forward_hook(lambda linear, inputs, output: calls.append("key"))
    module.value.register_forward_hook(lambda linear, inputs, output: calls.append("value"))
    x, source = normal(B, L, D), normal(B, S, E)
    mask, cache = padding([5, 2]), CrossCache()
    first = module(x[:, :1], source, mask=mask, cache=cache)
    others = [module(piece, mask=mask, cache=cache) for piece in x[:, 1:].split([1, 3, 2], 1)]
    assert calls == ["key", "value"]
    close(torch.cat([first, *others], 1), module(x, source, mask=mask))


@capacities
@positions
def test_beams_continue_what_they_were(
    position: Callable[[], nn.Module | None], capacity: int | None
) -> None:
    module = build(heads=6, key_heads=2, position=position())
    cache = SelfCache(capacity)
    cache.select(torch.tensor([1, 0]))  # nothing is there yet
    history = normal(3, 4, D)
    in_steps(module, history, [3, 1], cache, causal())
    # Reorder, repeat and drop; then more beams than before; then a single one.
    for rows in ([2, 0, 0], [1, 1, 0, 2], [3]):
        cache.select(rows)
        step = normal(len(rows), 2, D)
        history = torch.cat([history[rows], step], 1)
        have = module(step, mask=causal(), cache=cache)
        close(have, module(history, mask=causal())[:, -2:])


NEAR = Mask(lambda at: (at.query - at.key).abs() <= 3, "near")


@pytest.mark.parametrize(
    "mask",
    [causal, lambda: window(2, 0), lambda: causal() & NEAR, lambda: causal() & ~(NEAR | window(1))],
    ids=["causal", "window", "own rule", "own rule or window"],
)
@pytest.mark.parametrize("gradients", [False, True])
@positions
def test_rows_of_different_lengths(
    position: Callable[[], nn.Module | None], mask: Callable[[], Mask], gradients: bool
) -> None:
    """Trimmed to their own, joined by others, reordered, each goes on where it ends."""
    module = build(heads=6, key_heads=2, position=position())
    with torch.set_grad_enabled(gradients):
        cache, given = SelfCache(), normal(3, 5, D)
        module(given, mask=mask(), cache=cache)
        cache.trim(torch.tensor([2, 5, 0]))
        rows = [given[0, :2], given[1], given[2, :0]]

        def go_on(steps: int) -> None:
            new = normal(len(rows), steps, D)
            have = module(new, mask=mask(), cache=cache)
            rows[:] = [torch.cat(both) for both in zip(rows, new)]
            for row, one in zip(rows, have):
                close(one, module(row[None], mask=mask())[0, -steps:])

        go_on(1)
        go_on(3)
        other, more = SelfCache(), normal(2, 7, D)
        module(more, mask=mask(), cache=other)
        cache.join(other)
        rows += list(more)
        go_on(2)
        assert cache.length.tolist() == [8, 11, 6, 9, 9]
        cache.select([4, 0, 0])
        rows[:] = [rows[n] for n in (4, 0, 0)]
        go_on(1)


def test_what_cannot_be_trimmed_or_joined() -> None:
    with pytest.raises(ValueError, match="has one length for all rows and cannot trim"):
        SelfCache(13).trim(torch.tensor([1]))
    with pytest.raises(ValueError, match="an empty cache has no rows to join"):
        SelfCache().join(SelfCache())


def test_beams_keep_their_sources() -> None:
    module, cache = build(source_width=E), CrossCache()
    cache.select(torch.tensor([1, 0]))  # nothing is there yet
    source, lengths = normal(3, S, E), torch.tensor([5, 2, 3])
    module(normal(3, 1, D), source, mask=padding(lengths), cache=cache)
    for rows in ([2, 0, 0], [1, 1, 0, 2], [3]):
        cache.select(torch.tensor(rows))
        source, lengths = source[rows], lengths[rows]
        x = normal(len(rows), 2, D)
        mask = padding(lengths)
        close(module(x, mask=mask, cache=cache), module(x, source, mask=mask))


def test_caches_are_independent() -> None:
    module, x, y = build(), normal(B, 5, D), normal(B, 5, D)
    one, other = SelfCache(), SelfCache()
    for i in range(5):
        have = module(x[:, i : i + 1], cache=one)
        module(y[:, i : i + 1], cache=other)
    close(have, module(x, mask=causal())[:, -1:])


# --- Without padding


@pytest.mark.parametrize("extra", [None, causal, lambda: window(1)], ids=["", "causal", "window"])
@positions
def test_packed_is_padded_is_one_by_one(
    position: Callable[[], nn.Module | None], extra: Callable[[], Mask] | None
) -> None:
    module = build(heads=6, key_heads=2, position=position())
    lengths = PackedLengths([5, 0, 3, 7, 1])
    sequences = [normal(n, D).requires_grad_() for n in lengths.lengths.tolist()]
    inside = [None if extra is None else extra()] * len(sequences)
    alone = [module(x[None], mask=m)[0] for x, m in zip(sequences, inside)]

    queries: list[Tensor] = []
    module.core.register_forward_hook(lambda core, inputs, out: queries.append(inputs[0]))
    together = packed(lengths) if extra is None else extra() & packed(lengths)
    tight = module(torch.cat(sequences)[None], mask=together)[0].split(lengths.lengths.tolist())

    batch = nn.utils.rnn.pad_sequence(sequences, batch_first=True)
    loose = padding(lengths.lengths) if extra is None else extra() & padding(lengths.lengths)
    wide = [row[:n] for row, n in zip(module(batch, mask=loose), lengths.lengths.tolist())]

    seeds = [torch.randn_like(x) for x in sequences]
    leaves = [*sequences, *module.parameters()]
    expected = torch.autograd.grad(alone, leaves, seeds)
    for outputs in (tight, wide):
        close(torch.cat(outputs), torch.cat(alone))
        for mine, other in zip(torch.autograd.grad(outputs, leaves, seeds), expected):
            close(mine, other)
    # Positions start anew in each sequence: the queries are turned alike.
    starts = lengths.offsets.tolist()
    for i, n in enumerate(lengths.lengths.tolist()):
        close(queries[0][0, :, starts[i] : starts[i] + n], queries[1][i, :, :n])


@pytest.mark.parametrize("causally", [False, True], ids=["", "causal"])
def test_packed_cross_attention(causally: bool) -> None:
    module = build(source_width=E)
    lengths, source_lengths = PackedLengths([3, 1, 4, 2]), PackedLengths([5, 2, 0, 7])
    xs = [normal(n, D).requires_grad_() for n in lengths.lengths.tolist()]
    sources = [normal(n, E).requires_grad_() for n in source_lengths.lengths.tolist()]
    own = causal() if causally else None
    alone = [module(x[None], s[None], mask=own)[0] for x, s in zip(xs, sources)]

    mask = packed(lengths, source_lengths)
    tight = module(
        torch.cat(xs)[None], torch.cat(sources)[None], mask=mask if own is None else mask & own
    )[0].split(lengths.lengths.tolist())

    pad = nn.utils.rnn.pad_sequence
    x, source = pad(xs, batch_first=True), pad(sources, batch_first=True)
    loose = padding(source_lengths.lengths)
    if causally:
        # In a padded batch the last query is not at the last key: each offset must be said.
        loose = loose & causal(source_lengths.lengths - lengths.lengths)
    rows = module(x, source, mask=loose)
    wide = [row[:n] for row, n in zip(rows, lengths.lengths.tolist())]

    seeds = [torch.randn_like(x) for x in alone]
    leaves = [*xs, *sources, *module.parameters()]
    expected = torch.autograd.grad(alone, leaves, seeds, materialize_grads=True)
    for outputs in (tight, wide):
        close(torch.cat(outputs), torch.cat(alone))
        gradients = torch.autograd.grad(outputs, leaves, seeds, materialize_grads=True)
        for mine, other in zip(gradients, expected):
            close(mine, other)


# --- torch.compile, in a process of its own: it cannot see through the checks of annotations

COMPILED = """
import json, torch
from torch._dynamo.testing import CompileCounter
from regard import (
    Mask, MultiHeadAttention, PackedLengths, RotaryEmbedding, SelfCache, causal, packed, padding,
    window,
)

torch.manual_seed(0)
module = MultiHeadAttention(12, 6, key_heads=2)
randn = torch.randn

CALLS = {
    "padding": (
        lambda x, lengths: module(x, mask=causal() & padding(lengths)),
        lambda n: [randn(2, n, 12), torch.tensor([n, n - 2])],
    ),
    "packed": (
        lambda x, lengths: module(x, mask=causal() & packed(lengths)),
        lambda n: [randn(1, n, 12), PackedLengths([3, n - 3])],
    ),
    "packed cross": (
        lambda x, s, a, b: module(x, s, mask=packed(a, b)),
        lambda n: [randn(1, n, 12), randn(1, 9, 12), *map(PackedLengths, ([3, n - 3], [5, 4]))],
    ),
}

def lengths(name):
    call, inputs = CALLS[name]
    counter = CompileCounter()
    compiled = torch.compile(call, backend=counter, fullgraph=True)
    with torch.no_grad():
        for n in (7, 11, 13, 5, 17):
            given = inputs(n)
            torch.testing.assert_close(compiled(*given), call(*given))
    return counter.frame_count

def gradients(name):
    call, inputs = CALLS[name]
    given, own = inputs(7), list(module.parameters())
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    have, want = (torch.autograd.grad(f(*given).square().sum(), own) for f in (compiled, call))
    torch.testing.assert_close(have, want, atol=1e-5, rtol=1e-5)
    return 1

def steps(capacity, mask):
    turning, x = MultiHeadAttention(12, 3, position=RotaryEmbedding(4)), randn(2, 11, 12)
    counter, cache = CompileCounter(), SelfCache(capacity)
    step = torch.compile(
        lambda x, cache: turning(x, mask=mask, cache=cache), backend=counter, fullgraph=True
    )
    with torch.no_grad():
        have = torch.cat([step(x[:, i : i + 1], cache) for i in range(11)], 1)
        torch.testing.assert_close(have, turning(x, mask=causal() & mask))
    return counter.frame_count

own = Mask(lambda at: (at.head == 0) | (at.query - at.key < 3), "own")

for line in LINES:
    torch.compiler.reset()
    try:
        print(json.dumps([line, eval(line)]))
    except Exception as error:
        print(json.dumps([line, repr(error)[:700]]))
"""

# What is compiled, and how often: once for the first length, and once for any other. A cache
# allocates at its first step, and its second is every other.
TIMES = {
    "lengths('padding')": 2,
    "lengths('packed')": 2,
    "gradients('packed cross')": 1,
    "steps(13, window(2) & own)": 2,
}


@pytest.fixture(scope="module")
def compiled() -> dict[str, int | str]:
    script = COMPILED.replace("LINES", repr(list(TIMES)))
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return dict(json.loads(line) for line in run.stdout.splitlines())


@pytest.mark.parametrize("line", TIMES)
def test_compiled(compiled: dict[str, int | str], line: str) -> None:
    assert compiled[line] == TIMES[line]


# --- Living with it


@positions
def test_construction_on_the_meta_device(position: Callable[[], nn.Module | None]) -> None:
    options = {"heads": 6, "key_heads": 2, "score": None}
    with torch.device("meta"):
        module = MultiHeadAttention(D, **options, position=position())
        for mask in (None, causal()):
            assert module(torch.empty(B, L, D), mask=mask).shape == (B, L, D)
    assert all(p.is_meta for p in module.parameters())
    ready = build(**options, position=position(), dtype=torch.float32)
    module.to_empty(device="cpu").load_state_dict(ready.state_dict())
    x = torch.randn(B, L, D)
    assert torch.equal(module(x, mask=causal()), ready(x, mask=causal()))


def test_state_dict_and_deepcopy() -> None:
    def fresh() -> MultiHeadAttention:
        return build(
            score=BilinearScore(4, 4, heads=3),
            position=RotaryEmbedding(4),
            key_heads=1,
            dtype=torch.float32,
        )

    module, other = fresh(), fresh()
    x = torch.randn(B, L, D)
    linears = [f"{n}.{p}" for n in ("query", "key", "value", "output") for p in ("weight", "bias")]
    assert sorted(module.state_dict()) == sorted([*linears, "core.score.weight"])
    assert not torch.equal(module(x), other(x))
    other.load_state_dict(module.state_dict())
    assert torch.equal(module(x), other(x))
    twin = copy.deepcopy(module)
    assert torch.equal(module(x), twin(x))
    with torch.no_grad():
        twin.core.score.weight.zero_()
    assert torch.equal(module(x), other(x))
    assert not torch.equal(module(x), twin(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_lower_precision(dtype: torch.dtype) -> None:
    for position in POSITIONS.values():
        module = build(heads=6, key_heads=2, position=position(), dtype=dtype)
        exact = copy.deepcopy(module).double()
        x = normal(B, L, D, dtype=dtype)
        close(module(x, mask=causal()), exact(x.double(), mask=causal()), dtype)


def test_autocast_converts_what_would_not_fit() -> None:
    module, x, cache = MultiHeadAttention(D, 3), torch.randn(B, L, D), SelfCache()
    with torch.autocast("cpu", torch.bfloat16):
        have = in_steps(module, x.bfloat16(), [4, 3], cache, causal())
    assert have.dtype == torch.bfloat16
    torch.testing.assert_close(have.float(), module(x, mask=causal()), atol=5e-2, rtol=0)


def test_a_projection_may_be_replaced() -> None:
    module, x = build(), normal(B, L, D)
    want = module(x)
    module.query = nn.Sequential(module.query, nn.Identity())  # type: ignore[assignment]
    close(module(x), want)


def test_it_says_what_it_is() -> None:
    assert "12, heads=6, key_heads=2" in repr(MultiHeadAttention(D, 6, key_heads=2))
