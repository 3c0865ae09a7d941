"""Keras' attention layers, read by `interop.keras`, give the same results here."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from regard import causal, padding
from regard.interop.keras import attention

B, L, S, D, E = 2, 7, 5, 12, 13


@pytest.fixture(scope="module")
def keras() -> Any:
    return pytest.importorskip("keras")


def single(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


def built(layer: Any, *inputs: Tensor) -> Any:
    """With its weights, which are made at the first call; biases start at zero there."""
    layer(*inputs)
    for variable in layer.weights:
        if variable.path.endswith("bias"):
            nn.init.normal_(variable.value.detach())
    return layer


def assert_alike(ours: Tensor, theirs: Tensor, inputs: list[Tensor]) -> None:
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
    seed = torch.randn_like(ours)
    for have, want in zip(
        torch.autograd.grad(ours, inputs, seed), torch.autograd.grad(theirs, inputs, seed)
    ):
        torch.testing.assert_close(have, want, atol=1e-5, rtol=0)


@pytest.mark.parametrize("use_bias", [True, False])
@pytest.mark.parametrize(
    ("heads", "key_width", "value_width", "output"), [(2, 2, 3, None), (5, 3, 7, 17), (1, 11, 2, 1)]
)
def test_multi_head(
    keras: Any, heads: int, key_width: int, value_width: int, output: int | None, use_bias: bool
) -> None:
    layer = keras.layers.MultiHeadAttention(
        heads, key_width, value_dim=value_width, output_shape=output, use_bias=use_bias
    )
    x, source, lengths = single(B, L, D), single(B, S, E), torch.tensor([2, S])
    ours = attention(built(layer, x, source))
    assert (ours.heads, ours.key_width, ours.value_width) == (heads, key_width, value_width)
    assert (ours.query.bias is not None) == use_bias
    real = (torch.arange(S) < lengths[:, None])[:, None].expand(B, L, S)
    assert_alike(ours(x, source), layer(x, source), [x, source])
    masked = ours(x, source, mask=padding(lengths))
    assert_alike(masked, layer(x, source, attention_mask=real), [x, source])
    first = ours(x, source, mask=causal(0))
    assert_alike(first, layer(x, source, use_causal_mask=True), [x, source])


@pytest.mark.parametrize("use_bias", [True, False])
def test_grouped_heads(keras: Any, use_bias: bool) -> None:
    layer = keras.layers.GroupQueryAttention(5, 6, 2, use_bias=use_bias)
    x, source = single(B, L, D), single(B, S, E)
    ours = attention(built(layer, x, source))
    assert (ours.heads, ours.key_heads, ours.key_width) == (6, 2, 5)
    assert_alike(ours(x, source), layer(x, source), [x, source])


def arrays(layer: Any) -> dict[str, np.ndarray]:
    return {v.path.split("/", 1)[1]: v.value.detach().numpy() for v in layer.weights}


def test_weights_by_name(keras: Any) -> None:
    x = single(B, L, D)
    layer = built(keras.layers.MultiHeadAttention(3, 5, dropout=0.3), x, x)
    ours = attention(arrays(layer), dropout=0.1)
    assert_alike(ours.eval()(x), layer(x, x), [x])
    assert ours.core.dropout == 0.1
    assert attention(layer).core.dropout == 0.3


def test_another_backend(keras: Any) -> None:
    """Its variables hold something that numpy can read."""
    x = single(B, L, D)
    layer = built(keras.layers.MultiHeadAttention(3, 5), x, x)
    kind = type(layer).__name__
    variables = [SimpleNamespace(path=f"layer/{n}", value=a) for n, a in arrays(layer).items()]
    other = type(kind, (), {"weights": variables, "dropout": 0.0, "get_config": dict})()
    assert_alike(attention(other)(x), layer(x, x), [x])


def test_every_misfit_is_listed_at_once(keras: Any) -> None:
    x = single(B, L, D)
    weights = arrays(built(keras.layers.MultiHeadAttention(3, 5), x, x))
    del weights["query/bias"], weights["value/kernel"]
    weights["gate/kernel"] = np.zeros((D, 3, 5), np.float32)
    weights["key/bias"] = np.zeros((5, 3), np.float32)
    with pytest.raises(ValueError, match="missing") as caught:
        attention(weights)
    for named in (
        "query/bias",
        "value/kernel",
        "unexpected gate/kernel",
        "misshapen key/bias (5, 3) for (3, 5)",
    ):
        assert named in str(caught.value)


def test_refused(keras: Any) -> None:
    x = single(B, L, D)
    multi = keras.layers.MultiHeadAttention
    for layer, message in (
        (multi(2, 3), "has no weights yet; call it once"),
        (keras.layers.Dense(3), "a Dense is none of Keras' attentions"),
        (built(multi(2, 3, use_gate=True), x, x), "unexpected gate/kernel, gate/bias"),
        (built(multi(2, 3, sliding_window=4), x, x), r"sliding_window \(4\).*mask=window\(3\)"),
        (built(multi(2, 3, output_shape=(2, 5)), x, x), r"output_shape \(2, 5\) must be one width"),
        (built(multi(2, 3, attention_axes=(1, 2)), x[None], x[None]), r"attention_axes \(\(1, 2\)"),
    ):
        with pytest.raises(ValueError, match=message) as caught:
            attention(layer)
        assert "\n" not in str(caught.value)
