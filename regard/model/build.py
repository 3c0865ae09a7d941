"""Builds a model's parts from its config: the only module that maps names to classes.

Leaf modules do not depend on configs. A custom part is passed as a function that makes it, and
replaces the one that the config names.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeAlias, get_args

from torch import nn

from regard.attention.checks import check_divides, check_integer, shown
from regard.attention.multihead import MultiHeadAttention
from regard.attention.position import (
    ALiBi,
    AttentionPosition,
    GridPositions,
    InputPosition,
    LearnedGridPositions,
    LearnedPositions,
    RotaryEmbedding,
    SinusoidalPositions,
)
from regard.model.baseline import Convolution, Recurrent
from regard.model.block import (
    Activation,
    Block,
    FeedForward,
    GatedFeedForward,
    Norm,
    PostNorm,
    PreNorm,
)
from regard.model.stack import Stack

Position: TypeAlias = Literal[
    "sinusoidal", "sinusoidal-halves", "learned", "rotary", "linear-bias", "none"
]
GridPosition: TypeAlias = Literal["learned", "sinusoidal", "none"]
Mixer: TypeAlias = Literal["attention", "lstm", "gru", "convolution"]
AnyPosition: TypeAlias = InputPosition | AttentionPosition | None

MakePosition: TypeAlias = Callable[[], AnyPosition]
MakeAttention: TypeAlias = Callable[[AttentionPosition | None], nn.Module]
MakeFeedForward: TypeAlias = Callable[[], nn.Module]


@dataclass(frozen=True, kw_only=True)
class BlockConfig:
    """Hyperparameters that all models share."""

    width: int = 512
    """Model width (d_model, hidden size): of the vectors between the layers."""
    heads: int = 8
    """Number of attention heads."""
    key_heads: int | None = None
    """Number of key-value heads, for grouped-query attention; by default as many as heads."""
    window: int | None = None
    """Sliding window of self-attention: a token attends to this many positions before it and, in an
    encoder, after it; patches to as many rows and columns around. By default there is no limit."""
    mixer: Mixer = "attention"
    """What mixes tokens: self-attention, or in its place a recurrent layer (lstm or gru, in an
    encoder in both directions) or a convolution, for comparison; cross-attention stays."""
    kernel: int = 5
    """Kernel size of convolutions; in a decoder they see only what came before."""
    feed_forward: int = 2048
    """Hidden width of the feed-forward networks (d_ff)."""
    activation: Activation = "relu"
    """Activation function of the feed-forward networks: relu, gelu, silu, or gated swiglu."""
    norm: Norm = "post"
    """Pre-norm or post-norm: LayerNorm before each sublayer, or after each residual sum as in the
    paper."""
    final_norm: bool | None = None
    """A final LayerNorm at the end of a stack; by default where norm is pre."""
    dropout: float = 0.1
    """Dropout on the embedded input and on every sublayer's output."""
    attention_dropout: float = 0.0
    """Dropout on attention weights; the paper has none."""
    hidden_dropout: float = 0.0
    """Dropout inside the feed-forward networks (after the activation); the paper has none."""
    epsilon: float = 1e-5
    """Epsilon of the LayerNorms, added to the variance."""


def check(config: object, kind: type, **makers: object) -> set[str]:
    """Checks the type of the config, and that custom parts are passed as functions.

    Returns the names of the custom parts, which are also the names of the model's modules.
    """
    if not isinstance(config, kind):
        raise ValueError(
            f"config ({shown(config)}) must be a {kind.__name__}; "
            f"for example {kind.__name__}.tiny(1000)"
        )
    for name, make in makers.items():
        if make is not None and (isinstance(make, nn.Module) or not callable(make)):
            raise ValueError(
                f"{name} ({shown(make)}) must be a function that makes one, since each block has "
                f"its own; for example {name}=lambda{' position' * (name == 'attention')}: …"
            )
    return {name for name, make in makers.items() if make is not None}


def stack(
    config: BlockConfig,
    blocks: int,
    *,
    cross: bool = False,
    causal: bool = False,
    position: MakePosition | None = None,
    attention: MakeAttention | None = None,
    feed_forward: MakeFeedForward | None = None,
) -> Stack:
    """A stack of blocks; a position that acts inside attention goes into each.

    In a `causal` stack no token reads later ones.
    """
    check_integer("layers", blocks, least=0)
    if config.window is not None:
        check_integer("window", config.window)
        if config.mixer != "attention":
            raise ValueError(
                f"window ({config.window}) limits self-attention, but mixer is {config.mixer}; "
                "leave it out"
            )
    if not config.epsilon > 0:
        raise ValueError(f"epsilon ({config.epsilon}) must be above 0; try 1e-5")

    def inside() -> AttentionPosition | None:
        part = None if position is None else make_position(position)
        return part if isinstance(part, AttentionPosition) else None

    def block() -> Block:
        make_mixer = attention or partial(mixer, config, causal)
        make_feed_forward = feed_forward or partial(feed_forward_of, config)
        return Block(
            attention=_module("attention", make_mixer(inside())),
            feed_forward=_module("feed_forward", make_feed_forward()),
            residual=lambda: residual(config),
            cross=multihead(config) if cross else None,
        )

    final = config.norm == "pre" if config.final_norm is None else config.final_norm
    return Stack(
        [block() for _ in range(blocks)],
        nn.LayerNorm(config.width, config.epsilon) if final else None,
    )


def _module(name: str, part: object) -> nn.Module:
    if not isinstance(part, nn.Module):
        raise ValueError(f"{name} made {shown(part)}; its function must return a torch.nn.Module")
    return part


def make_position(position: MakePosition) -> AnyPosition:
    """Calls the function, and checks that it returns a position."""
    part = position()
    if part is not None and not isinstance(part, InputPosition | AttentionPosition):
        raise ValueError(
            f"position made {shown(part)}, which is none; make a SinusoidalPositions, "
            "Concatenated, RotaryEmbedding or ALiBi, or None"
        )
    return part


def input_position(position: MakePosition) -> InputPosition | None:
    """The position that the function makes, if it is added to the input."""
    part = make_position(position)
    return part if isinstance(part, InputPosition) else None


def mixer(config: BlockConfig, causal: bool, position: AttentionPosition | None) -> nn.Module:
    """The layer that mixes tokens; only attention can use a position inside it."""
    match config.mixer:
        case "attention":
            return multihead(config, position)
        case "lstm" | "gru":
            return Recurrent(config.width, config.mixer, both=not causal)
        case "convolution":
            return Convolution(config.width, config.kernel, causal=causal)
    raise _unknown("mixer", config.mixer, Mixer)


def multihead(config: BlockConfig, position: AttentionPosition | None = None) -> MultiHeadAttention:
    return MultiHeadAttention(
        config.width,
        config.heads,
        key_heads=config.key_heads,
        position=position,
        dropout=config.attention_dropout,
    )


def feed_forward_of(config: BlockConfig) -> nn.Module:
    width, hidden, dropout = config.width, config.feed_forward, config.hidden_dropout
    match config.activation:
        case "relu":
            return FeedForward(width, hidden, nn.ReLU(), dropout)
        case "gelu":
            return FeedForward(width, hidden, nn.GELU(), dropout)
        case "silu":
            return FeedForward(width, hidden, nn.SiLU(), dropout)
        case "swiglu":
            return GatedFeedForward(width, hidden, dropout)
    raise _unknown("activation", config.activation, Activation)


def residual(config: BlockConfig) -> nn.Module:
    match config.norm:
        case "post":
            return PostNorm(config.width, config.dropout, config.epsilon)
        case "pre":
            return PreNorm(config.width, config.dropout, config.epsilon)
    raise _unknown("norm", config.norm, Norm)


def position(name: Position, config: BlockConfig, length: int) -> AnyPosition:
    """The position of a sequence; `length` bounds learned ones alone."""
    match name:
        case "sinusoidal":
            return SinusoidalPositions(config.width)
        case "sinusoidal-halves":
            return SinusoidalPositions(config.width, layout="halves")
        case "learned":
            return LearnedPositions(length, config.width)
        case "rotary":
            return RotaryEmbedding(_head_width(config, each=2))
        case "linear-bias":
            _head_width(config)
            return ALiBi(config.heads)
        case "none":
            return None
    raise _unknown("position", name, Position)


def _head_width(config: BlockConfig, each: int = 1) -> int:
    """The width of a head, a multiple of `each`: rotary positions turn pairs of columns."""
    width, heads = config.width, config.heads
    check_integer("width", width)
    check_integer("heads", heads)
    if width % heads == 0 and width % (heads * each):
        raise ValueError(
            f"rotary positions turn pairs of columns, but width ({width}) / heads ({heads}) is "
            f"odd; try a width of {width + heads}"
        )
    check_divides("heads", heads, "width", width, each)
    return width // heads


def grid_position(
    name: GridPosition, config: BlockConfig, rows: int, columns: int
) -> InputPosition | None:
    """The position of an image's patches."""
    match name:
        case "learned":
            return LearnedGridPositions(rows, columns, config.width)
        case "sinusoidal":
            half = config.width // 2
            return GridPositions(
                rows, columns, SinusoidalPositions(half), SinusoidalPositions(config.width - half)
            )
        case "none":
            return None
    raise _unknown("position", name, GridPosition)


def _unknown(what: str, name: object, known: object) -> ValueError:
    return ValueError(f"{what} ({name!r}) is unknown; choose from {', '.join(get_args(known))}")
