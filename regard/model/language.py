"""A language model: one stack under a causal mask, each token from those before it.

    logits = output(stack(embed(tokens)))        p(token_{n+1} | token_0 … token_n)

The same blocks as the Transformer's, without cross-attention. The defaults are those of today's
decoder-only models: pre-norm, rotary positions, a gated feed-forward network.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.model import build, init
from regard.model.block import Activation, Norm
from regard.model.build import (
    BlockConfig,
    MakeAttention,
    MakeFeedForward,
    MakePosition,
    Position,
)
from regard.model.embedding import Tokens
from regard.model.lengths import Lengths, causal_mask, places
from regard.model.stack import StackCache


@dataclass(frozen=True, kw_only=True)
class LanguageShape(BlockConfig):
    """What can be chosen before anything is known of the text."""

    layers: int = 6
    """Blocks."""
    activation: Activation = "swiglu"
    """What bends the feed-forward networks: relu, gelu, silu, or swiglu with its gate."""
    norm: Norm = "pre"
    """LayerNorm after each residual sum (post) or before each sublayer (pre)."""
    position: Position = "rotary"
    """How order is told."""
    length: int = 1024
    """Longest sequence for which there are learned positions; the others have no end."""
    share: bool = True
    """One table for the input and for the output's weights."""


@dataclass(frozen=True)
class LanguageConfig(LanguageShape):
    """All that it takes to build a language model."""

    vocabulary: int
    """Tokens."""

    @classmethod
    def tiny(cls, vocabulary: int) -> "LanguageConfig":
        """Four blocks of width 128, to try things out."""
        return cls(vocabulary, width=128, heads=4, feed_forward=344, layers=4)


class LanguageModel(nn.Module):
    """A decoder without a source; parts of one's own are given as functions, as to Transformer."""

    def __init__(
        self,
        config: LanguageConfig,
        *,
        position: MakePosition | None = None,
        attention: MakeAttention | None = None,
        feed_forward: MakeFeedForward | None = None,
    ):
        super().__init__()
        build.check(
            config,
            LanguageConfig,
            position=position,
            attention=attention,
            feed_forward=feed_forward,
        )
        self.config = config
        position = position or partial(build.position, config.position, config, config.length)
        self.tokens = Tokens(
            config.vocabulary,
            config.width,
            position=build.added(position),
            scale=False,
            dropout=config.dropout,
        )
        self.decoder = build.stack(
            config,
            config.layers,
            position=position,
            attention=attention,
            feed_forward=feed_forward,
        )
        self.output = nn.Linear(config.width, config.vocabulary, bias=False)
        init.language(self, config.layers)
        if config.share:
            if self.tokens.table.weight.shape != self.output.weight.shape:
                raise ValueError(
                    f"share (True) needs token vectors as wide as the output, but concatenated "
                    f"positions leave {self.tokens.inner} of {config.width}; use share=False"
                )
            self.output.weight = self.tokens.table.weight

    @classmethod
    def tiny(cls, vocabulary: int) -> "LanguageModel":
        return cls(LanguageConfig.tiny(vocabulary))

    def forward(
        self,
        tokens: Int[Tensor, "B L"],
        *,
        lengths: Lengths = None,
        cache: StackCache | None = None,
    ) -> Float[Tensor, "B L N"]:
        """With a cache the tokens are the new ones alone."""
        return self.output(self.states(tokens, lengths=lengths, cache=cache))

    def states(
        self,
        tokens: Int[Tensor, "B L"],
        *,
        lengths: Lengths = None,
        cache: StackCache | None = None,
    ) -> Float[Tensor, "B L D"]:
        """The last vectors, before they become logits."""
        at = places(lengths, tokens) if cache is None else cache.places(tokens.shape[1])
        return self.decoder(self.tokens(tokens, at), mask=causal_mask(lengths), cache=cache)

    def cache(self, capacity: int | None = None) -> StackCache:
        """An empty cache for `forward`; with a capacity it never changes its shape."""
        return StackCache(len(self.decoder.blocks), capacity)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "LanguageModel":
        """Moves the model. To and from the meta device torch makes a parameter for each name."""
        shared = getattr(self.output, "weight", None) is self.tokens.table.weight
        nn.Module._apply(self, fn, recurse)
        if shared:
            self.output.weight = self.tokens.table.weight
        return self
