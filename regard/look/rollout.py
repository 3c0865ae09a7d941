"""Attention through all layers: rollout (Abnar and Zuidema 2020).

    R = Π_l (½ mean_h A_l^h + ½ I)

A position's state is half its own, by the residual connection, and half what its heads took from
others. The product follows both through the layers down to the inputs. It ignores values, signs and
the feed-forward networks: a picture of where information may come from, and no proof that it did.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor


def rollout(
    layers: Sequence[Float[Tensor, "H S S"]] | Float[Tensor, "layers H S S"],
    residual: float | int = 0.5,
) -> Float[Tensor, "S S"]:
    """What each position of the last layer has from each input; rows sum to 1."""
    if not 0 <= residual <= 1:
        raise ValueError(f"residual ({residual}) must be from 0 to 1; the paper has 0.5")
    if not len(layers):
        raise ValueError("layers (none) must be one at least: record(model) gives them")
    size = layers[0].shape[-1]
    own = torch.eye(size, dtype=torch.float64, device=layers[0].device)
    whole = own
    for weights in layers:
        mixed = (1 - residual) * weights.double().mean(0) + residual * own
        whole = mixed @ whole
    return whole.to(layers[0].dtype)
