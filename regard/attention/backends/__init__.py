"""Ways to compute attention: each takes a `Call` and gives (B, H, L, V).

`plan.py` picks one; all are tested against the formula in `attend.py`.
"""

from typing import NamedTuple

from torch import Tensor

from regard.attention.mask import Mask


class Call(NamedTuple):
    """What a kernel computes: softmax(β·Q Kᵀ + bias) V over the pairs that the mask allows."""

    query: Tensor
    """(B, H, L, K)"""
    key: Tensor
    """(B, G, S, K), where the number of key heads G divides H"""
    value: Tensor
    """(B, G, S, V)"""
    mask: Mask | None
    beta: float
    """Positive and finite, one for all heads"""
    bias: Tensor | None
    """Broadcasts to (B, H, L, S)"""
    dropout: float
