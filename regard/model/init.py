"""Initialisation of every model, with the reasons for it.

Three schemes, one for each family, as in its paper or its authors' code:

    transformer   Glorot's uniform matrices: the variances of activations and of gradients stay
                  equal through square layers, whose post-norm residuals would otherwise drift.
                  The token table has deviation 1/√D: times √D its vectors are as large as the
                  positions, and as output weights it gives logits of deviation 1 for a normalised
                  state. (Vaswani et al. 2017 and its tensor2tensor code.)
    vision        Glorot's matrices in the blocks; the patch map has deviation 1/√(C·P·P), since
                  its input has unit variance and no norm follows; the class token and the last
                  layer start at zero, so that training begins from equal logits and a swapped head
                  disturbs nothing; positions .02, small beside the patches. (Dosovitskiy et al.
                  2021 and its JAX code.)
    language      Normal .02 everywhere; the matrices that end a residual branch are divided by
                  √(2N), since 2N branches add up their variances. (GPT-2: Radford et al. 2019.)

Biases start at zero, LayerNorms at one and zero. A layer used alone is initialised by its class.
On the meta device these functions do nothing.

A custom part keeps its own initial values. Call one of these functions on it, or on its pieces, for
the values of a scheme: `init.transformer(part)`, `init.language(part, blocks)`.
"""

import math
from collections.abc import Collection, Iterator

from torch import nn

from regard.attention.multihead import MultiHeadAttention
from regard.attention.position import LearnedPositions
from regard.model.block import FeedForward, GatedFeedForward
from regard.model.embedding import Frames, Patches


def transformer(model: nn.Module, custom: Collection[str] = ()) -> None:
    """Initialises a Transformer; `custom` are the names of custom parts, such as `attention`."""
    for module in _modules(model, custom):
        match module:
            case nn.Linear():
                nn.init.xavier_uniform_(module.weight)
            case nn.Embedding():
                nn.init.normal_(module.weight, std=module.embedding_dim**-0.5)
        _common(module)
    for module in _modules(model, custom):
        if isinstance(module, Patches | Frames):
            _unit_variance(module.projection)


def vision(model: nn.Module, custom: Collection[str] = ()) -> None:
    for module in _modules(model, custom):
        match module:
            case nn.Linear():
                nn.init.xavier_uniform_(module.weight)
        _common(module)
    for module in _modules(model, custom):
        if isinstance(module, Patches):
            _unit_variance(module.projection)


def language(model: nn.Module, blocks: int, custom: Collection[str] = ()) -> None:
    for module in _modules(model, custom):
        match module:
            case nn.Linear() | nn.Embedding():
                nn.init.normal_(module.weight, std=0.02)
        _common(module)
    for module in _modules(model, custom):
        match module:
            case MultiHeadAttention():
                nn.init.normal_(module.output.weight, std=0.02 / math.sqrt(2 * blocks))
            case FeedForward() | GatedFeedForward():
                nn.init.normal_(module.reduce.weight, std=0.02 / math.sqrt(2 * blocks))


def classifier(head: nn.Linear) -> None:
    """Zero: every class is equally likely, and the first gradient reaches the head alone."""
    nn.init.zeros_(head.weight)
    if head.bias is not None:
        nn.init.zeros_(head.bias)


def _modules(part: nn.Module, custom: Collection[str]) -> Iterator[nn.Module]:
    """All modules except custom parts and their submodules."""
    yield part
    for name, child in part.named_children():
        if name not in custom:
            yield from _modules(child, custom)


def _common(module: nn.Module) -> None:
    match module:
        case nn.Linear() if module.bias is not None:
            nn.init.zeros_(module.bias)
        case nn.LayerNorm():
            module.reset_parameters()
        case LearnedPositions():
            nn.init.normal_(module.table, std=0.02)


def _unit_variance(projection: nn.Linear) -> None:
    nn.init.normal_(projection.weight, std=projection.in_features**-0.5)
