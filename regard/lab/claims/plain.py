"""The same arithmetic in plain numpy, independent of the library: a reference for its modules."""

import math

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from regard.attention.multihead import MultiHeadAttention

Array = NDArray[np.float64]


def array(x: Tensor) -> Array:
    return np.asarray(x.detach().numpy(), dtype=np.float64)


def softmax(scores: Array) -> Array:
    """Along the last axis."""
    exponentials = np.exp(scores - scores.max(-1, keepdims=True))
    return exponentials / exponentials.sum(-1, keepdims=True)


def linear(part: nn.Linear, x: Array) -> Array:
    y = x @ array(part.weight).T
    return y if part.bias is None else y + array(part.bias)


def layer_norm(part: nn.LayerNorm, x: Array) -> Array:
    centred = x - x.mean(-1, keepdims=True)
    scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + part.eps)
    return scaled * array(part.weight) + array(part.bias)


def gelu(x: Array) -> Array:
    """x Φ(x), with Φ of the normal distribution."""
    return x * np.vectorize(lambda z: (1 + math.erf(z / math.sqrt(2))) / 2)(x)


def heads(layer: MultiHeadAttention, x: Array, source: Array | None = None) -> Array:
    """The output of the heads before W_O: H·V numbers for each row of x (L, D)."""
    read = x if source is None else source
    K, V = layer.key_width, layer.value_width
    query, key, value = (
        linear(layer.query, x),
        linear(layer.key, read),
        linear(layer.value, read),
    )
    out = []
    for h in range(layer.heads):
        own, worth = slice(h * K, (h + 1) * K), slice(h * V, (h + 1) * V)
        scores = query[:, own] @ key[:, own].T / math.sqrt(K)
        out.append(softmax(scores) @ value[:, worth])
    return np.concatenate(out, -1)


def multihead(layer: MultiHeadAttention, x: Array, source: Array | None = None) -> Array:
    return linear(layer.output, heads(layer, x, source))


def apart(one: Tensor, other: Array) -> float:
    """The largest difference between a module's result and the reference."""
    return float(np.abs(array(one) - other).max())
