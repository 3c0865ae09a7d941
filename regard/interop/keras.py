"""Keras' MultiHeadAttention and GroupQueryAttention, to be read.

Keras keeps heads as an axis of their own: kernels are (width, heads, width per head), and the
output's (heads, width per head, output width). Here they lie side by side in one matrix.

    attention(layer)                  a layer that was built or called, of any backend
    attention({"query/kernel": …})    its weights by name: query, key, value and attention_output
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.attention.multihead import MultiHeadAttention
from regard.interop.tensors import Pair, Tensors, fill, size

_LAYERS = ("MultiHeadAttention", "GroupQueryAttention", "GroupedQueryAttention")


def attention(peer: Any, *, dropout: float | int = 0.0) -> MultiHeadAttention:
    """From a layer, or from its weights by name. Dropout is a layer's own; weights don't tell it.

    Ours takes (x, source) where Keras takes (query, value), and (x, source, value=value) where it
    takes (query, value, key=source). Keras' `use_causal_mask` counts from the first key: that is
    `causal(0)` where the lengths differ.
    """
    if isinstance(peer, Mapping):
        tensors = {str(name): _tensor(value) for name, value in peer.items()}
    else:
        tensors, dropout = _weights(peer), peer.dropout
    heads = size(tensors, ("query/kernel", 1), ("query/bias", 0), ("attention_output/kernel", 0))
    read, key_heads, key_width = (
        size(tensors, ("key/kernel", 0), ("value/kernel", 0)),
        size(tensors, ("key/kernel", 1), ("value/kernel", 1), ("key/bias", 0)),
        size(tensors, ("query/kernel", 2), ("key/kernel", 2), ("key/bias", 1)),
    )
    output = tensors.get("attention_output/kernel")
    if output is not None and output.ndim != 3:
        raise ValueError(f"output_shape {tuple(output.shape[2:])} must be one width; ours is")
    with torch.device("meta"):
        module = MultiHeadAttention(
            size(tensors, ("query/kernel", 0)),
            heads,
            key_heads=key_heads,
            key_width=key_width,
            value_width=size(tensors, ("value/kernel", 2), ("attention_output/kernel", 1)),
            source_width=read,
            value_source_width=size(tensors, ("value/kernel", 0), ("key/kernel", 0)),
            output_width=size(
                tensors, ("attention_output/kernel", 2), ("attention_output/bias", 0)
            ),
            bias=any(name.endswith("/bias") for name in tensors),
            dropout=dropout,
        )
    fill(module, tensors, _pairs(module), "the Keras layer")
    return module


def _weights(layer: Any) -> Tensors:
    kind = type(layer).__name__
    if kind not in _LAYERS:
        raise ValueError(f"a {kind} is none of Keras' attentions; known are {', '.join(_LAYERS)}")
    if not layer.weights:
        raise ValueError(f"this {kind} has no weights yet; call it once, or build it")
    said = layer.get_config()
    if said.get("sliding_window"):
        raise ValueError(
            f"sliding_window ({said['sliding_window']}) is a mask here; read the layer without it, "
            f"and pass mask=window({said['sliding_window'] - 1})"
        )
    axes = said.get("attention_axes")
    if axes is not None and tuple(axes) != (1,):
        raise ValueError(f"attention_axes ({tuple(axes)}) must be (1,): sequences have one axis")
    return {v.path.split("/", 1)[1]: _tensor(v.value) for v in layer.weights}


def _tensor(value: Any) -> Tensor:
    return value.detach() if isinstance(value, Tensor) else torch.from_numpy(np.array(value))


def _pairs(module: MultiHeadAttention) -> list[Pair]:
    def apart(tensor: Tensor, width: int) -> Tensor:
        return tensor.unflatten(0, (-1, width))

    def kernel(ours: Sequence[Tensor], width: int) -> Tensor:
        return apart(ours[0], width).movedim(-1, 0)

    def bias(ours: Sequence[Tensor], width: int) -> Tensor:
        return apart(ours[0], width)

    def output(ours: Sequence[Tensor]) -> Tensor:
        return apart(ours[0].T, module.value_width)

    pairs = [Pair("attention_output/kernel", "output.weight", _transposed_heads, output)]
    for name, width in (
        ("query", module.key_width),
        ("key", module.key_width),
        ("value", module.value_width),
    ):
        join = partial(kernel, width=width)
        pairs.append(Pair(f"{name}/kernel", f"{name}.weight", _transposed, join))
        if module.query.bias is not None:
            join = partial(bias, width=width)
            pairs.append(Pair(f"{name}/bias", f"{name}.bias", _flat, join))
    if module.query.bias is not None:
        pairs.append(Pair("attention_output/bias", "output.bias"))
    return pairs


def _transposed(kernel: Tensor) -> Sequence[Tensor]:
    """(D, H, K) to (H·K, D)."""
    return (kernel.flatten(1).T,)


def _transposed_heads(kernel: Tensor) -> Sequence[Tensor]:
    """(H, V, O) to (O, H·V)."""
    return (kernel.flatten(0, 1).T,)


def _flat(bias: Tensor) -> Sequence[Tensor]:
    return (bias.flatten(),)
