"""A text encoder, which is trained on text alone to predict masked tokens.

    memory = encoder(embed(tokens))         some of the tokens masked
    logits = output(memory_n)               p(token_n | all tokens that are not masked)

Devlin et al. 2019, "BERT", without its second task. A trained encoder initialises other models:
`TextClassifier.of(encoder, classes)`, `Transformer.of(encoder, config)`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.attention.state import LoadableModule, typed_as
from regard.model import build, init
from regard.model.build import (
    BlockConfig,
    MakeAttention,
    MakeFeedForward,
    MakePosition,
    Position,
)
from regard.model.embedding import Tokens
from regard.model.lengths import Lengths, checked_lengths, lengths_after, own_mask, places
from regard.model.notebook import model_html
from regard.model.stack import Stack
from regard.synonyms import suggest_names


@dataclass(frozen=True, kw_only=True)
class EncoderShape(BlockConfig):
    """Hyperparameters that do not depend on the texts."""

    layers: int = 6
    """Number of layers (blocks)."""
    position: Position = "sinusoidal"
    """Positional encoding."""
    length: int = 1024
    """Maximum sequence length for learned positions; the others have no limit."""
    scale: bool = True
    """Multiply token embeddings by √width."""


@suggest_names
@dataclass(frozen=True)
class EncoderConfig(EncoderShape):
    """The whole config of a text encoder.

    >>> from regard import EncoderConfig, TextEncoder
    >>> config = EncoderConfig.tiny(1000, layers=3, norm="pre")
    >>> config.width, config.layers, config.norm
    (128, 3, 'pre')
    >>> encoder = TextEncoder(config)
    """

    vocabulary: int
    """Vocabulary size."""

    @classmethod
    def tiny(cls, vocabulary: int, **overrides: Any) -> "EncoderConfig":
        """Returns a config of two layers of width 128, for experiments."""
        return replace(cls(vocabulary, width=128, heads=4, feed_forward=256, layers=2), **overrides)


def embedding_and_encoder(
    shape: EncoderShape,
    vocabulary: int,
    *,
    position: MakePosition | None = None,
    attention: MakeAttention | None = None,
    feed_forward: MakeFeedForward | None = None,
) -> tuple[Tokens, Stack]:
    """The token embedding and the encoder of a model that reads text."""
    make = position or partial(build.position, shape.position, shape, shape.length)
    tokens = Tokens(
        vocabulary,
        shape.width,
        position=build.input_position(make),
        scale=shape.scale,
        dropout=shape.dropout,
    )
    encoder = build.stack(
        shape, shape.layers, position=make, attention=attention, feed_forward=feed_forward
    )
    return tokens, encoder


def features(
    embedding: nn.Module,
    encoder: nn.Module,
    tokens: Int[Tensor, "B S"],
    lengths: Lengths,
    window: int | None,
) -> Float[Tensor, "B R D"]:
    """The last hidden states of a model that reads text."""
    x = embedding(tokens, places(lengths, tokens))
    lengths = checked_lengths(embedding, lengths, tokens.shape[1], x)
    states = encoder(x, mask=own_mask(lengths, window))
    checked_lengths(encoder, lengths, x.shape[1], states)
    return states


@suggest_names
class TextEncoder(LoadableModule):
    """An encoder of text, which is trained to predict masked tokens.

        logits_n = W encoder(embed(tokens))_n        p(token_n | all tokens that are not masked)

    Shapes: tokens (B, S) → logits (B, S, N), features (B, S, D). BERT, Devlin et al. (2019),
    without its second task. W is the embedding table. Custom parts are passed as functions, as to
    `Transformer`. `TextClassifier.of` and `Transformer.of` start from a trained one.

    >>> import torch
    >>> from regard import TextClassifier, TextEncoder
    >>> encoder = TextEncoder.tiny(1000)
    >>> tokens = torch.tensor([[5, 6, 7], [8, 9, 0]])
    >>> encoder(tokens, lengths=[3, 2]).shape
    torch.Size([2, 3, 1000])
    >>> encoder.features(tokens, lengths=[3, 2]).shape
    torch.Size([2, 3, 128])
    >>> classifier = TextClassifier.of(encoder, classes=4)
    """

    def __init__(
        self,
        config: EncoderConfig,
        *,
        position: MakePosition | None = None,
        attention: MakeAttention | None = None,
        feed_forward: MakeFeedForward | None = None,
    ):
        super().__init__()
        custom = build.check(
            config,
            EncoderConfig,
            position=position,
            attention=attention,
            feed_forward=feed_forward,
        )
        self.config = config
        self.tokens, self.encoder = embedding_and_encoder(
            config,
            config.vocabulary,
            position=position,
            attention=attention,
            feed_forward=feed_forward,
        )
        self.output = nn.Linear(config.width, config.vocabulary)
        init.transformer(self, custom)
        if self.tokens.inner != config.width:
            raise ValueError(
                f"the output is tied to the token vectors, of which concatenated positions leave "
                f"{self.tokens.inner} of {config.width}; add positions instead"
            )
        self.output.weight = self.tokens.table.weight

    @classmethod
    def tiny(cls, vocabulary: int, **overrides: Any) -> "TextEncoder":
        """Returns an encoder of two layers of width 128, for experiments."""
        return cls(EncoderConfig.tiny(vocabulary, **overrides))

    def _repr_html_(self) -> str:
        return model_html(self)

    def forward(
        self, tokens: Int[Tensor, "B S"], *, lengths: Lengths = None
    ) -> Float[Tensor, "B S N"]:
        """Returns logits for the token at every position: tokens (B, S) → (B, S, N).

        `lengths` (B,) are those of a padded batch; packed tokens are (1, T) with `PackedLengths`.
        """
        return self.output(self.features(tokens, lengths=lengths))

    if TYPE_CHECKING:

        @typed_as(forward)
        def __call__(self) -> None: ...

    def features(
        self, tokens: Int[Tensor, "B S"], *, lengths: Lengths = None
    ) -> Float[Tensor, "B S D"]:
        """Returns the last hidden states of all tokens: (B, S) → (B, S, D)."""
        if lengths_after(self.encoder, lengths_after(self.tokens, lengths)) is not lengths:
            raise ValueError(
                "a TextEncoder gives a vector for each token, but its parts change the lengths; "
                "use them in a TextClassifier or a Transformer"
            )
        return features(self.tokens, self.encoder, tokens, lengths, self.config.window)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "TextEncoder":
        """Moves the model and ties its weights again: torch unties them to and from meta."""
        shared = getattr(self.output, "weight", None) is self.tokens.table.weight
        nn.Module._apply(self, fn, recurse)
        if shared:
            self.output.weight = self.tokens.table.weight
        return self
