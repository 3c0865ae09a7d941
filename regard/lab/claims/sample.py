"""Random matrices and small modules for experiments, from fixed seeds, and how to compare them."""

from collections.abc import Callable
from typing import TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.functional import jacobian

from regard import Transformer, TransformerConfig, VisionConfig
from regard.model.block import Block
from regard.model.stack import Stack

M = TypeVar("M", bound=nn.Module)

D, H, HIDDEN, L, S = 12, 3, 17, 7, 11
"""Width, heads, hidden width, and two lengths: small, and no two the same."""
PLAN = TransformerConfig(
    19, width=D, heads=H, feed_forward=HIDDEN, encoder_layers=2, decoder_layers=2, dropout=0.0
)
"""A small encoder-decoder."""
PICTURE = VisionConfig(5, (8, 12), 4, channels=3, width=D, heads=H, feed_forward=HIDDEN, layers=2)
"""A small ViT, for images of six patches."""
SAME, DIFFERENT = 1e-12, 1e-3
"""Two results are the same, up to rounding, below the first, and different above the second."""


def normal(seed: int, *shape: int) -> Tensor:
    """Independent numbers of mean 0 and variance 1, in float64."""
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def orthonormal(seed: int, rows: int, columns: int) -> Float[Tensor, "L D"]:
    """Orthonormal rows."""
    return torch.linalg.qr(normal(seed, columns, rows))[0].mT


def alive(module: M, seed: int) -> M:
    """The module in float64 and eval mode, with random biases, norms and heads too."""
    draw = torch.Generator().manual_seed(seed)
    module = module.double().eval()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.normal_(generator=draw)
            if parameter.ndim > 1:
                parameter.mul_(parameter.shape[-1] ** -0.5)
            else:
                parameter.mul_(0.3).add_("norm" in name and "weight" in name)
    return module.requires_grad_(False)


def unbuilt(make: Callable[[], M]) -> M:
    """A model of any size, on the meta device."""
    with torch.device("meta"):
        return make()


def base() -> Transformer:
    """The paper's base model, on the meta device."""
    return unbuilt(lambda: Transformer.base(37_000))


def parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def blocks(stack: Stack) -> list[Block]:
    return [block for block in stack.blocks if isinstance(block, Block)]


def apart(one: Tensor, other: Tensor) -> float:
    """The largest difference between two results."""
    return float((one - other).abs().max())


def influence(
    function: Callable[[Tensor], Tensor], x: Float[Tensor, "1 S D"]
) -> Float[Tensor, "L S"]:
    """How much row i of the result depends on row j of x: the largest entry of ∂y_i/∂x_j."""
    return jacobian(function, x).abs().amax((0, 2, 3, 5))
