"""A language model: one stack under a causal mask, each token from those before it.

    logits = output(stack(embed(tokens)))        p(token_{n+1} | token_0 … token_n)

The same blocks as the Transformer's, without cross-attention. The defaults are those of today's
decoder-only models: pre-norm, rotary positions, a gated feed-forward network.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.attention.state import LoadableModule, typed_as
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
from regard.model.notebook import model_html
from regard.model.stack import StackCache
from regard.synonyms import suggest_names


@dataclass(frozen=True, kw_only=True)
class LanguageShape(BlockConfig):
    """Hyperparameters that do not depend on the text."""

    layers: int = 6
    """Number of layers (blocks)."""
    activation: Activation = "swiglu"
    """Activation function of the feed-forward networks: relu, gelu, silu, or gated swiglu."""
    norm: Norm = "pre"
    """Pre-norm or post-norm: LayerNorm before each sublayer, or after each residual sum."""
    position: Position = "rotary"
    """Positional encoding."""
    length: int = 1024
    """Maximum sequence length for learned positions; the others have no limit."""
    share: bool = True
    """Weight tying: one matrix for input embeddings and output weights."""


@suggest_names
@dataclass(frozen=True)
class LanguageConfig(LanguageShape):
    """The whole config of a language model; the defaults are those of today's decoders.

    >>> from regard import LanguageConfig, LanguageModel
    >>> config = LanguageConfig.tiny(1000, layers=2, window=128)
    >>> config.width, config.layers, config.position, config.norm
    (128, 2, 'rotary', 'pre')
    >>> model = LanguageModel(config)
    """

    vocabulary: int
    """Vocabulary size."""

    @classmethod
    def tiny(cls, vocabulary: int, **overrides: Any) -> "LanguageConfig":
        """Returns a config of four layers of width 128, for experiments."""
        return replace(cls(vocabulary, width=128, heads=4, feed_forward=344, layers=4), **overrides)


@suggest_names
class LanguageModel(LoadableModule):
    """A decoder-only Transformer: logits of each next token from the tokens before it.

        logits_n = W stack(embed(tokens))_n        p(token_{n+1} | token_0 … token_n)

    Shapes: tokens (B, L) → logits (B, L, N). Radford et al. (2018); by default with rotary
    positions and a gated feed-forward network, as Llama has them (Touvron et al. 2023). Custom
    parts are passed as functions, as to `Transformer`.

    >>> import torch
    >>> from regard import LanguageModel
    >>> model = LanguageModel.tiny(1000)
    >>> tokens = torch.tensor([[5, 6, 7, 8], [9, 8, 7, 0]])  # a padded batch
    >>> model(tokens, lengths=[4, 3]).shape
    torch.Size([2, 4, 1000])
    >>> cache = model.cache()
    >>> first = model(tokens[:, :3], cache=cache)  # three tokens, then one more
    >>> model(tokens[:, 3:], cache=cache).shape
    torch.Size([2, 1, 1000])
    """

    def __init__(
        self,
        config: LanguageConfig,
        *,
        position: MakePosition | None = None,
        attention: MakeAttention | None = None,
        feed_forward: MakeFeedForward | None = None,
    ):
        super().__init__()
        custom = build.check(
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
            position=build.input_position(position),
            scale=False,
            dropout=config.dropout,
        )
        self.decoder = build.stack(
            config,
            config.layers,
            causal=True,
            position=position,
            attention=attention,
            feed_forward=feed_forward,
        )
        self.output = nn.Linear(config.width, config.vocabulary, bias=False)
        init.language(self, config.layers, custom)
        if config.share:
            if self.tokens.table.weight.shape != self.output.weight.shape:
                raise ValueError(
                    f"share (True) needs token vectors as wide as the output, but concatenated "
                    f"positions leave {self.tokens.inner} of {config.width}; use share=False"
                )
            self.output.weight = self.tokens.table.weight

    @classmethod
    def tiny(cls, vocabulary: int, **overrides: Any) -> "LanguageModel":
        """Returns a model of four layers of width 128, for experiments."""
        return cls(LanguageConfig.tiny(vocabulary, **overrides))

    def _repr_html_(self) -> str:
        return model_html(self)

    def forward(
        self,
        tokens: Int[Tensor, "B L"],
        *,
        lengths: Lengths = None,
        cache: StackCache | None = None,
    ) -> Float[Tensor, "B L N"]:
        """Returns the logits of each next token: tokens (B, L) → (B, L, N).

        `lengths` (B,) are those of a padded batch; packed tokens are (1, T) with `PackedLengths`.
        With a KV cache from `model.cache()`, which changes in place, the tokens are the new ones
        alone.
        """
        return self.output(self.states(tokens, lengths=lengths, cache=cache))

    if TYPE_CHECKING:

        @typed_as(forward)
        def __call__(self) -> None: ...

    def states(
        self,
        tokens: Int[Tensor, "B L"],
        *,
        lengths: Lengths = None,
        cache: StackCache | None = None,
    ) -> Float[Tensor, "B L D"]:
        """Returns the last hidden states, before the output layer: (B, L) → (B, L, D)."""
        at = places(lengths, tokens) if cache is None else cache.places(tokens.shape[1])
        mask = causal_mask(lengths, self.config.window)
        return self.decoder(self.tokens(tokens, at), mask=mask, cache=cache)

    def cache(self, capacity: int | None = None) -> StackCache:
        """Returns an empty KV cache for `forward`; with a capacity its shape is static."""
        return StackCache(len(self.decoder.blocks), capacity)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "LanguageModel":
        """Moves the model and ties its weights again: torch unties them to and from meta."""
        shared = getattr(self.output, "weight", None) is self.tokens.table.weight
        nn.Module._apply(self, fn, recurse)
        if shared:
            self.output.weight = self.tokens.table.weight
        return self
