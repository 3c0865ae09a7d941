"""Which models kernels know: blocks of the usual parts, all of them alike.

What is said of others is one line that begins with the part's name, and fits after "since".
"""

from collections.abc import Iterator
from typing import cast

from torch import nn

from regard.attention.multihead import MultiHeadAttention
from regard.attention.position import RotaryEmbedding
from regard.decode.engine.parts import unusual
from regard.model.block import Block, FeedForward, GatedFeedForward, PostNorm, PreNorm
from regard.model.stack import Stack

ACTIVATIONS: dict[type[nn.Module], int] = {nn.ReLU: 0, nn.GELU: 1, nn.SiLU: 2}


def unknown(stack: nn.Module, linear: type[nn.Module], cross: bool) -> str:
    """What kernels do not know in a stack of which all linear layers should be `linear`."""
    if type(stack) is not Stack or not len(stack.blocks):
        return "a stack needs blocks"
    if stack.norm is not None and not _layer_norm(stack.norm):
        return f"the last norm is a {type(stack.norm).__name__}, not a LayerNorm with a bias"
    for n, block in enumerate(stack.blocks):
        if reason := _unknown_block(block, linear, cross):
            return f"block {n} {reason}"
    if len({_kind(cast(Block, block)) for block in stack.blocks}) > 1:
        return "blocks differ in their kinds or widths"
    return ""


def _unknown_block(block: nn.Module, linear: type[nn.Module], cross: bool) -> str:
    if type(block) is not Block:
        return f"is a {type(block).__name__}"
    if (block.cross is not None) != cross:
        return "has cross-attention" if block.cross is not None else "has no cross-attention"
    residuals = [block.add_attention, block.add_feed_forward, *filter(None, [block.add_cross])]
    kinds = set(map(type, residuals))
    if kinds not in ({PostNorm}, {PreNorm}) or not all(_layer_norm(r.norm) for r in residuals):
        return "has residuals other than PreNorm or PostNorm with a LayerNorm"
    for attention in filter(None, [block.attention, block.cross]):
        if reason := unusual(attention):
            return f"has {reason}"
        position = cast(MultiHeadAttention, attention).position
        if position is not None and type(position) is not RotaryEmbedding:
            return f"has another position, {type(position).__name__}"
    forward = block.feed_forward
    if type(forward) is FeedForward:
        activation = forward.activation
        tanh = isinstance(activation, nn.GELU) and activation.approximate != "none"
        if type(activation) not in ACTIVATIONS or tanh:
            return f"has another activation, {activation}"
    elif type(forward) is not GatedFeedForward:
        return f"has another feed-forward network, {type(forward).__name__}"
    others = {type(part).__name__ for part in linears(block) if type(part) is not linear}
    return f"has a {min(others)} where a {linear.__name__} is wanted" if others else ""


def linears(block: Block) -> Iterator[nn.Module]:
    """The linear layers of a block of the usual parts."""
    for part in (block.attention, block.cross):
        if isinstance(part, MultiHeadAttention):
            yield from (part.query, part.key, part.value, part.output)
    forward = cast(FeedForward | GatedFeedForward, block.feed_forward)
    if isinstance(forward, GatedFeedForward):
        yield forward.gate
    yield from (forward.expand, forward.reduce)


def _layer_norm(norm: object) -> bool:
    return type(norm) is nn.LayerNorm and norm.weight is not None and norm.bias is not None


def _kind(block: Block) -> tuple[object, ...]:
    """In which blocks must not differ: they share a layout of keys and values, and positions."""
    widths = [
        (part.key_heads, part.key_width, part.value_width, part.source_width)
        for part in (block.attention, block.cross)
        if isinstance(part, MultiHeadAttention)
    ]
    rotary = block.attention.position
    turns = (
        (rotary.width, rotary.base, rotary.layout) if isinstance(rotary, RotaryEmbedding) else None
    )
    return type(block.add_attention), block.attention.width, *widths, turns
