"""With their weights copied, the peers' attention and ours give the same, backwards too."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import regard.interop.keras as keras_layers
from regard import Mask, MultiHeadAttention, attend, attention_weights, causal, padding, window
from regard.interop import torch_nn

B, L, S, D, E = 2, 7, 5, 12, 13


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def assert_alike(ours: Tensor, theirs: Tensor, inputs: list[Tensor], tolerance: float) -> None:
    """The same results, and the same gradients for the inputs."""
    torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=0)
    seed = torch.randn_like(ours)
    mine = torch.autograd.grad(ours, inputs, seed)
    other = torch.autograd.grad(theirs, inputs, seed)
    for have, want in zip(mine, other):
        assert want.abs().max() > 0
        torch.testing.assert_close(have, want, atol=tolerance, rtol=0)


class Recorded:
    """The queries and keys that a module's core last received, and so the weights it used."""

    def __init__(self, module: MultiHeadAttention):
        module.core.register_forward_hook(self.record)

    def record(self, core: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        self.query, self.key = inputs[:2]

    def weights(self, mask: Mask | None = None) -> Tensor:
        return attention_weights(self.query, self.key, mask=mask)


# --- torch.nn.MultiheadAttention


def torch_peer(heads: int = 3, source_width: int = D) -> nn.MultiheadAttention:
    peer = nn.MultiheadAttention(
        D, heads, kdim=source_width, vdim=source_width, batch_first=True, dtype=torch.float64
    )
    for bias in (peer.in_proj_bias, peer.out_proj.bias):
        nn.init.normal_(bias)  # they start at zero, and would not be compared
    return peer


LENGTHS = torch.tensor([L, 3])

# Ours, and what torch.nn.MultiheadAttention wants instead: True there means "may not attend".
SELF: dict[str, tuple[Callable[[], Mask | None], dict[str, Any]]] = {
    "no mask": (lambda: None, {}),
    "padding": (
        lambda: padding(LENGTHS),
        {"key_padding_mask": torch.arange(L) >= LENGTHS[:, None]},
    ),
    "causal": (causal, {"attn_mask": torch.ones(L, L, dtype=torch.bool).triu(1)}),
    "causal by additive values": (
        causal,
        {"attn_mask": nn.Transformer.generate_square_subsequent_mask(L, dtype=torch.float64)},
    ),
    "causal & padding": (
        lambda: causal() & padding(LENGTHS),
        {
            "attn_mask": torch.ones(L, L, dtype=torch.bool).triu(1),
            "key_padding_mask": torch.arange(L) >= LENGTHS[:, None],
        },
    ),
    "window": (
        lambda: window(2, 1),
        {"attn_mask": ~torch.ones(L, L, dtype=torch.bool).tril(1).triu(-2)},
    ),
}


@pytest.mark.parametrize("heads", [1, 3, 4])
@pytest.mark.parametrize(("mask", "options"), SELF.values(), ids=SELF.keys())
def test_torch_self_attention(
    mask: Callable[[], Mask | None], options: dict[str, Any], heads: int
) -> None:
    peer = torch_peer(heads)
    ours = torch_nn.attention(peer)
    recorded = Recorded(ours)
    x = normal(B, L, D)
    expected, scores = peer(x, x, x, average_attn_weights=False, **options)
    assert_alike(ours(x, mask=mask()), expected, [x], 1e-12)
    torch.testing.assert_close(recorded.weights(mask()), scores, atol=1e-12, rtol=0)


@pytest.mark.parametrize("source_width", [D, E])
def test_torch_cross_attention(source_width: int) -> None:
    peer = torch_peer(source_width=source_width)
    ours = torch_nn.attention(peer)
    recorded = Recorded(ours)
    x, source, lengths = normal(B, L, D), normal(B, S, source_width), torch.tensor([2, S])
    for mask, hidden in (
        (None, None),
        (padding(lengths), torch.arange(S) >= lengths[:, None]),
    ):
        expected, scores = peer(
            x, source, source, key_padding_mask=hidden, average_attn_weights=False
        )
        assert_alike(ours(x, source, mask=mask), expected, [x, source], 1e-12)
        torch.testing.assert_close(recorded.weights(mask), scores, atol=1e-12, rtol=0)


def test_torch_without_a_batch() -> None:
    peer = torch_peer()
    x, source = normal(L, D), normal(S, D)
    expected = peer(x, source, source, need_weights=False)[0]
    assert_alike(torch_nn.attention(peer)(x, source), expected, [x, source], 1e-12)


def test_torch_parameters_receive_the_same_gradients() -> None:
    peer = torch_peer()
    ours = torch_nn.attention(peer)
    x = normal(B, L, D)
    hidden = torch.ones(L, L, dtype=torch.bool).triu(1)
    peer(x, x, x, attn_mask=hidden)[0].square().sum().backward()
    ours(x, mask=causal()).square().sum().backward()
    linears = (ours.query, ours.key, ours.value)
    for name, want in (("weight", peer.in_proj_weight.grad), ("bias", peer.in_proj_bias.grad)):
        have = torch.cat([getattr(linear, name).grad for linear in linears])
        torch.testing.assert_close(have, want, atol=1e-11, rtol=0)
        torch.testing.assert_close(
            getattr(ours.output, name).grad, getattr(peer.out_proj, name).grad, atol=1e-11, rtol=0
        )


# --- F.scaled_dot_product_attention


def triple(G: int = 6, K: int = 5, V: int = 3, rows: int = L) -> list[Tensor]:
    return [normal(B, 6, rows, K), normal(B, G, S, K), normal(B, G, S, V)]


@pytest.mark.parametrize("scale", [None, 0.3, 2.0])
def test_sdpa(scale: float | None) -> None:
    inputs = triple()
    expected = F.scaled_dot_product_attention(*inputs, scale=scale)
    assert_alike(attend(*inputs, beta=scale), expected, inputs, 1e-12)


@pytest.mark.parametrize("scale", [None, 0.3])
def test_sdpa_is_causal_where_both_lengths_agree(scale: float | None) -> None:
    inputs = triple(rows=S)
    expected = F.scaled_dot_product_attention(*inputs, is_causal=True, scale=scale)
    assert_alike(attend(*inputs, causal(), beta=scale), expected, inputs, 1e-12)


@pytest.mark.parametrize("rows", [3, S, L])
def test_sdpa_with_masks(rows: int) -> None:
    inputs = triple(rows=rows)
    lengths = torch.tensor([S, 2])
    padded = (torch.arange(S) < lengths[:, None])[:, None, None]
    corner = torch.ones(rows, S, dtype=torch.bool).tril  # its diagonal starts at the top left
    for mask, allowed in (
        (causal(), corner(S - rows)),
        (causal(0), corner(0)),
        (causal() & padding(lengths), corner(S - rows) & padded),
        (padding(lengths), padded.expand(B, 1, rows, S)),
        (window(2, 1), corner(S - rows + 1) & ~corner(S - rows - 3)),
        (Mask.from_tensor(torch.arange(rows * S).view(rows, S) % 3 > 0), None),
    ):
        allowed = mask.tensor(rows, S) if allowed is None else allowed
        # Without a key to see, torch's own result depends on its kernel; ours is zero.
        seen = allowed.any(-1, keepdim=True).expand(B, 6, rows, 1)
        expected = F.scaled_dot_product_attention(*inputs, attn_mask=allowed | ~seen) * seen
        assert_alike(attend(*inputs, mask), expected, inputs, 1e-12)


@pytest.mark.parametrize("shape", [(L, S), (B, 1, L, S), (1, 6, L, S), (B, 6, 1, S)], ids=str)
def test_sdpa_with_a_bias(shape: tuple[int, ...]) -> None:
    inputs, bias = triple(), normal(*shape)
    expected = F.scaled_dot_product_attention(*inputs, attn_mask=bias)
    assert_alike(attend(*inputs, bias=bias), expected, [*inputs, bias], 1e-12)


@pytest.mark.parametrize("key_heads", [1, 2, 3, 6])
def test_sdpa_with_grouped_heads(key_heads: int) -> None:
    inputs = triple(key_heads)
    expected = F.scaled_dot_product_attention(*inputs, enable_gqa=True)
    assert_alike(attend(*inputs), expected, inputs, 1e-12)
    inputs = triple(key_heads, rows=S)
    expected = F.scaled_dot_product_attention(*inputs, is_causal=True, enable_gqa=True)
    assert_alike(attend(*inputs, causal()), expected, inputs, 1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_sdpa_in_lower_precision(dtype: torch.dtype) -> None:
    inputs = [t.detach().to(dtype).requires_grad_() for t in triple(rows=S)]
    tolerance = 16 * torch.finfo(dtype).eps
    expected = F.scaled_dot_product_attention(*inputs)
    assert_alike(attend(*inputs), expected, inputs, tolerance)
    expected = F.scaled_dot_product_attention(*inputs, is_causal=True)
    assert_alike(attend(*inputs, causal()), expected, inputs, tolerance)


# --- Keras


@pytest.fixture(scope="module")
def keras() -> Any:
    return pytest.importorskip("keras")


def from_keras(peer: Any, x: Tensor, source: Tensor) -> MultiHeadAttention:
    peer(x, source)  # its weights are made at the first call
    for variable in peer.weights:
        if variable.path.endswith("bias"):
            nn.init.normal_(variable.value.detach())  # in place; they were zero
    return keras_layers.attention(peer)


def single(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


def test_keras_self_attention(keras: Any) -> None:
    # The handout's layer: two heads, keys of width 2, values of width 3.
    peer = keras.layers.MultiHeadAttention(num_heads=2, key_dim=2, value_dim=3)
    x, lengths = single(B, L, D), torch.tensor([L, 3])
    ours = from_keras(peer, x, x)
    assert (ours.heads, ours.key_width, ours.value_width) == (2, 2, 3)
    recorded = Recorded(ours)
    real = (torch.arange(L) < lengths[:, None])[:, None].expand(B, L, L)
    for mask, options in (
        (None, {}),
        (causal(), {"use_causal_mask": True}),
        (padding(lengths), {"attention_mask": real}),
        (causal() & padding(lengths), {"attention_mask": real, "use_causal_mask": True}),
    ):
        expected, scores = peer(x, x, return_attention_scores=True, **options)
        assert_alike(ours(x, mask=mask), expected, [x], 1e-5)
        assert scores.shape == (B, 2, L, L)
        torch.testing.assert_close(recorded.weights(mask), scores, atol=1e-6, rtol=0)


@pytest.mark.parametrize("output_width", [None, 17])
def test_keras_cross_attention(keras: Any, output_width: int | None) -> None:
    peer = keras.layers.MultiHeadAttention(2, 2, value_dim=3, output_shape=output_width)
    x, source, lengths = single(B, L, D), single(B, S, E), torch.tensor([2, S])
    ours = from_keras(peer, x, source)
    recorded = Recorded(ours)
    real = (torch.arange(S) < lengths[:, None])[:, None].expand(B, L, S)
    for mask, options in (
        (None, {}),
        (padding(lengths), {"attention_mask": real}),
        # Keras aligns at the top left: the first query stands at the first key.
        (causal(0), {"use_causal_mask": True}),
    ):
        expected, scores = peer(x, source, return_attention_scores=True, **options)
        assert_alike(ours(x, source, mask=mask), expected, [x, source], 1e-5)
        assert scores.shape == (B, 2, L, S)
        torch.testing.assert_close(recorded.weights(mask), scores, atol=1e-6, rtol=0)


def test_keras_grouped_heads(keras: Any) -> None:
    peer = keras.layers.GroupQueryAttention(head_dim=4, num_query_heads=6, num_key_value_heads=2)
    x, source = single(B, L, D), single(B, S, D)
    ours = from_keras(peer, x, source)
    assert (ours.heads, ours.key_heads) == (6, 2)
    assert_alike(ours(x, source), peer(x, source), [x, source], 1e-5)
    assert_alike(ours(x, mask=causal()), peer(x, x, use_causal_mask=True), [x], 1e-5)


def test_keras_attention_without_projections(keras: Any) -> None:
    query, key, value = single(B, L, 5), single(B, S, 5), single(B, S, 3)
    expected, scores = keras.layers.Attention()([query, value, key], return_attention_scores=True)
    assert_alike(attend(query, key, value, beta=1.0), expected, [query, key, value], 1e-5)
    have = attention_weights(query, key, beta=1.0)
    torch.testing.assert_close(have, scores, atol=1e-6, rtol=0)
