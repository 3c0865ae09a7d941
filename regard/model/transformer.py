"""The Transformer: an encoder reads the source, a decoder writes the target.

    memory = encoder(embed(source))                       every source token sees all others
    logits = output(decoder(embed(target), memory))       every target token sees those before it

Vaswani et al. 2017, "Attention Is All You Need". The source may be text, the patches of an image or
the frames of a recording: the decoder reads all of them through the same cross-attention, and their
lengths are independent of the target's. The target is already shifted: its first token is BOS, and
the logits at position n are for token n + 1.
"""

from collections.abc import Callable
from dataclasses import KW_ONLY, asdict, dataclass, field, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, get_args

from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.attention.mask import Mask
from regard.attention.state import LoadableModule, typed_as
from regard.model import build, init
from regard.model.build import (
    BlockConfig,
    GridPosition,
    MakeAttention,
    MakeFeedForward,
    MakePosition,
    Position,
)
from regard.model.custom import differing_parts
from regard.model.embedding import Frames, Patches, Size, Tokens, grid, nearby_patches
from regard.model.encoder import EncoderShape, TextEncoder
from regard.model.lengths import (
    Lengths,
    causal_mask,
    check_pairs,
    checked_lengths,
    lengths_after,
    memory_and_mask,
    own_mask,
    places,
)
from regard.model.notebook import model_html
from regard.model.stack import StackCache
from regard.synonyms import suggest_names

Share = Literal["all", "target", "none"]


@suggest_names
@dataclass(frozen=True)
class TextSource:
    """A config of a source that is text: token ids (B, S).

    >>> import torch
    >>> from regard import TextSource, Transformer, TransformerConfig
    >>> config = TransformerConfig(8000, source=TextSource(vocabulary=12000), share="target")
    >>> with torch.device("meta"):
    ...     Transformer(config).source.table
    Embedding(12000, 512)
    """

    kind: Literal["text"] = "text"
    vocabulary: int | None = None
    """Vocabulary size of the source; by default the target's, with one joint tokenizer."""


@suggest_names
@dataclass(frozen=True)
class ImageSource:
    """A config of a source that is an image, (B, C, Y, X), cut into square patches.

    >>> import torch
    >>> from regard import ImageSource, Transformer, TransformerConfig
    >>> source = ImageSource(image=(32, 128), patch=8, channels=1)
    >>> model = Transformer(TransformerConfig(100, width=64, heads=4, source=source))
    >>> model.encode(torch.zeros(2, 1, 32, 128)).shape  # 4 · 16 patches
    torch.Size([2, 64, 64])
    """

    kind: Literal["image"] = "image"
    image: Size = 224
    """Image size in pixels: (rows, columns), or one number for a square."""
    patch: int = 16
    """Patch size in pixels."""
    channels: int = 3
    """Channels: 3 for colour, 1 for grey."""
    position: GridPosition = "learned"
    """Positional encoding of patches: learned, or sinusoids of row and column."""


@suggest_names
@dataclass(frozen=True)
class AudioSource:
    """A config of a source that is a spectrogram, or any other sequence of vectors, (B, S, F).

    >>> import torch
    >>> from regard import AudioSource, Transformer, TransformerConfig
    >>> config = TransformerConfig(100, width=64, heads=4, source=AudioSource(features=80))
    >>> frames, target = torch.randn(2, 500, 80), torch.zeros(2, 7, dtype=torch.long)
    >>> Transformer(config)(frames, target, source_lengths=[500, 312]).shape
    torch.Size([2, 7, 100])
    """

    kind: Literal["audio"] = "audio"
    features: int = 80
    """Features of a frame."""


@dataclass(frozen=True, kw_only=True)
class TransformerShape(BlockConfig):
    """Hyperparameters that do not depend on the data."""

    encoder_layers: int = 6
    """Number of encoder layers."""
    decoder_layers: int = 6
    """Number of decoder layers."""
    decoder_feed_forward: int | None = None
    """Hidden width of the decoder's feed-forward networks; by default the encoder's."""
    position: Position = "sinusoidal"
    """Positional encoding."""
    length: int = 1024
    """Maximum sequence length for learned positions; the others have no limit."""
    share: Share = "all"
    """Weight tying: one matrix for source embeddings, target embeddings and output weights (all),
    for target and output (target), or none."""
    scale: bool = True
    """Multiply token embeddings by √width."""
    output_bias: bool = False
    """A bias in the output layer."""


@suggest_names
@dataclass(frozen=True)
class TransformerConfig(TransformerShape):
    """The whole config of a Transformer; the defaults are the paper's base model.

    >>> from regard import Transformer, TransformerConfig
    >>> config = TransformerConfig.base(37_000, norm="pre", position="rotary")
    >>> config.width, config.heads, config.encoder_layers, config.norm
    (512, 8, 6, 'pre')
    >>> small = Transformer(TransformerConfig(1000, width=64, heads=4, feed_forward=256))
    """

    vocabulary: int
    """Vocabulary size of the target."""
    _: KW_ONLY
    source: TextSource | ImageSource | AudioSource = field(default_factory=TextSource)
    """The source: text, an image or audio."""

    @classmethod
    def base(cls, vocabulary: int, **overrides: Any) -> "TransformerConfig":
        """Returns the base config of Vaswani et al. (2017), table 3.

        With 37,000 tokens the model has 63 million parameters.
        """
        return cls(vocabulary, **overrides)

    @classmethod
    def big(cls, vocabulary: int, **overrides: Any) -> "TransformerConfig":
        """Returns the big config of Vaswani et al. (2017), table 3.

        With 37,000 tokens the model has 214 million parameters.
        """
        return replace(
            cls(vocabulary, width=1024, heads=16, feed_forward=4096, dropout=0.3), **overrides
        )

    @classmethod
    def tiny(cls, vocabulary: int, **overrides: Any) -> "TransformerConfig":
        """Returns the config Transformer-Tiny of Wu et al. (2021), for 29,000 sentences."""
        return replace(
            cls(
                vocabulary,
                width=128,
                heads=4,
                feed_forward=256,
                encoder_layers=4,
                decoder_layers=4,
                dropout=0.3,
            ),
            **overrides,
        )


@suggest_names
class Transformer(LoadableModule):
    """An encoder and a decoder; `Transformer.base(37_000)` is the model of the paper.

        memory = encoder(embed(source)),   logits = W decoder(embed(target), memory)

    Shapes: source (B, S), target (B, L) → logits (B, L, N). "Attention Is All You Need", Vaswani et
    al. (2017). The source may also be images or frames: see `ImageSource` and `AudioSource`. The
    target is already shifted: the logits at position n are those of token n + 1. Custom parts are
    passed as functions that return them: `position`, `attention` (the self-attention, called with
    the position that acts inside it, or None) and `feed_forward`.

    >>> import torch
    >>> from regard import Transformer
    >>> model = Transformer.tiny(1000, norm="pre", position="rotary")
    >>> source, target = torch.randint(1000, (2, 7)), torch.randint(1000, (2, 5))
    >>> model(source, target, source_lengths=[7, 4]).shape
    torch.Size([2, 5, 1000])
    >>> memory, cache = model.encode(source), model.cache()
    >>> model.decode(target[:, :1], memory, cache=cache).shape  # one token, then the next
    torch.Size([2, 1, 1000])
    >>> model.decode(target[:, 1:2], None, cache=cache).shape
    torch.Size([2, 1, 1000])
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        position: MakePosition | None = None,
        attention: MakeAttention | None = None,
        feed_forward: MakeFeedForward | None = None,
    ):
        super().__init__()
        custom = build.check(
            config,
            TransformerConfig,
            position=position,
            attention=attention,
            feed_forward=feed_forward,
        )
        self.config = config
        position = position or partial(build.position, config.position, config, config.length)
        image = isinstance(config.source, ImageSource)  # whose patches have rows and columns
        self.source = _source(config, position)
        self.encoder = build.stack(
            config,
            config.encoder_layers,
            position=None if image else position,
            attention=attention,
            feed_forward=feed_forward,
        )
        self.target = _tokens(config, config.vocabulary, position, "target")
        self.decoder = build.stack(
            decoder_shape(config),
            config.decoder_layers,
            cross=True,
            causal=True,
            position=position,
            attention=attention,
            feed_forward=feed_forward,
        )
        self.output = nn.Linear(config.width, config.vocabulary, bias=config.output_bias)
        init.transformer(self, custom)
        _share(self)

    @classmethod
    def base(cls, vocabulary: int, **overrides: Any) -> "Transformer":
        """Returns the model of `TransformerConfig.base`; keyword arguments change its fields."""
        return cls(TransformerConfig.base(vocabulary, **overrides))

    @classmethod
    def big(cls, vocabulary: int, **overrides: Any) -> "Transformer":
        """Returns the model of `TransformerConfig.big`; keyword arguments change its fields."""
        return cls(TransformerConfig.big(vocabulary, **overrides))

    @classmethod
    def tiny(cls, vocabulary: int, **overrides: Any) -> "Transformer":
        """Returns the model of `TransformerConfig.tiny`; keyword arguments change its fields."""
        return cls(TransformerConfig.tiny(vocabulary, **overrides))

    @classmethod
    def of(cls, encoder: TextEncoder, shape: TransformerShape) -> "Transformer":
        """Returns a model with copies of a trained encoder and its embedding, and a new decoder.

        The decoder is of this shape; source and target share the encoder's vocabulary.
        """
        config = encoder.config
        same = {field.name: getattr(config, field.name) for field in fields(EncoderShape)}
        layers = same.pop("layers")
        whole = replace(shape, encoder_layers=layers, **same)
        model = cls(TransformerConfig(config.vocabulary, **asdict(whole)))
        parts = differing_parts(encoder.tokens, model.source)
        parts |= differing_parts(encoder.encoder, model.encoder)
        if parts:
            name, text = next(iter(parts.items()))
            raise ValueError(
                f"a Transformer of the encoder's config would lack its custom parts ({name} is "
                f"{text}); build one with them, and copy the weights of its encoder"
            )
        model.source.load_state_dict(encoder.tokens.state_dict())
        model.encoder.load_state_dict(encoder.encoder.state_dict())
        return model

    def _repr_html_(self) -> str:
        return model_html(self)

    def forward(
        self,
        source: Tensor,
        target: Int[Tensor, "B L"],
        *,
        source_lengths: Lengths = None,
        target_lengths: Lengths = None,
    ) -> Float[Tensor, "B L N"]:
        """Returns the logits of each next token: source (B, S), target (B, L) → (B, L, N).

        Lengths (B,) are those of padded batches; packed batches are (1, T) with `PackedLengths`.
        The source may also be images (B, C, Y, X) or frames (B, S, F), by the config.
        """
        check_pairs("source", source, source_lengths, target, target_lengths)
        memory = self.encode(source, source_lengths)
        return self.decode(target, memory, target_lengths, source_lengths)

    if TYPE_CHECKING:

        @typed_as(forward)
        def __call__(self) -> None: ...

    @suggest_names
    def encode(self, source: Tensor, lengths: Lengths = None) -> Float[Tensor, "M S D"]:
        """Returns the memory, the encoder's output: source (B, S) → (B, S, D).

        Its lengths are `memory_lengths(lengths)`.
        """
        x = self.source(source, places(lengths, source, "source"))
        rows = None if source.ndim == 4 else source.shape[1]  # an image's rows are its patches
        lengths = checked_lengths(self.source, lengths, rows, x)
        memory = self.encoder(x, mask=source_mask(self.source, lengths, self.config.window))
        checked_lengths(self.encoder, lengths, x.shape[1], memory)
        return memory

    def memory_lengths(self, lengths: Lengths) -> Lengths:
        """Returns the memory's lengths from the source's; they differ only with custom parts."""
        return lengths_after(self.encoder, lengths_after(self.source, lengths))

    @suggest_names
    def decode(
        self,
        target: Int[Tensor, "B L"],
        memory: Float[Tensor, "M S D"] | None,
        target_lengths: Lengths = None,
        source_lengths: Lengths = None,
        cache: StackCache | None = None,
    ) -> Float[Tensor, "B L N"]:
        """Returns the logits of each next token: target (B, L), memory (B, S, D) → (B, L, N).

        With a KV cache from `model.cache()`, which changes in place, the target holds the new
        tokens alone, and the memory may be None after the first step.
        """
        states = self.states(target, memory, target_lengths, source_lengths, cache)
        return self.output(states)

    def states(
        self,
        target: Int[Tensor, "B L"],
        memory: Float[Tensor, "M S D"] | None,
        target_lengths: Lengths = None,
        source_lengths: Lengths = None,
        cache: StackCache | None = None,
    ) -> Float[Tensor, "B L D"]:
        """Returns the decoder's last hidden states, before the output layer, (B, L, D).

        With a KV cache the target holds the new tokens alone; after the first step the cache has
        the memory's keys and values, and memory may be None.
        """
        source_lengths = self.memory_lengths(source_lengths)
        return self.decoder_states(target, memory, target_lengths, source_lengths, cache)

    def decoder_states(
        self,
        target: Int[Tensor, "B L"],
        memory: Float[Tensor, "M S D"] | None,
        target_lengths: Lengths = None,
        memory_lengths: Lengths = None,
        cache: StackCache | None = None,
    ) -> Float[Tensor, "B L D"]:
        """Returns the same as `states`, (B, L, D), from the memory's lengths."""
        if memory is None and cache is None:
            raise ValueError(
                "memory (None) must be the encoder's output: decode(target, encode(source)); only "
                "a cache makes it superfluous, after the first step"
            )
        if cache is None:
            at = places(target_lengths, target, "target")
            if memory is not None:
                check_pairs("memory", memory, memory_lengths, target, target_lengths)
        else:
            at = cache.places(target.shape[1])
        memory, memory_mask = memory_and_mask(memory, target_lengths, memory_lengths)
        return self.decoder(
            self.target(target, at),
            memory,
            mask=causal_mask(target_lengths, self.config.window),
            memory_mask=memory_mask,
            cache=cache,
        )

    def cache(self, capacity: int | None = None) -> StackCache:
        """Returns an empty KV cache for `decode`; with a capacity its shape is static."""
        return StackCache(len(self.decoder.blocks), capacity)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Transformer":
        """Moves the model and ties its weights again: torch unties them to and from meta."""
        table = self.target.table
        tables = (self.output, self.source.table if isinstance(self.source, Tokens) else table)
        shared = [part for part in tables if getattr(part, "weight", None) is table.weight]
        nn.Module._apply(self, fn, recurse)
        for part in shared:
            part.weight = table.weight
        return self


def source_mask(source: nn.Module, lengths: Lengths, reach: int | None) -> Mask | None:
    """The self-attention mask of the encoder of this source."""
    if reach is not None and isinstance(source, Patches):
        return nearby_patches(*source.grid, reach)
    return own_mask(lengths, reach)


def decoder_shape(config: TransformerConfig) -> TransformerConfig:
    """The config of the decoder's blocks."""
    hidden = config.decoder_feed_forward
    return config if hidden is None else replace(config, feed_forward=hidden)


def _source(config: TransformerConfig, position: MakePosition) -> Tokens | Patches | Frames:
    match config.source:
        case TextSource(vocabulary=vocabulary):
            return _tokens(config, vocabulary or config.vocabulary, position, "source")
        case ImageSource() as source:
            size = grid(source.image, source.patch)
            return Patches(
                source.image,
                source.patch,
                source.channels,
                config.width,
                position=build.grid_position(source.position, config, *size),
                dropout=config.dropout,
            )
        case AudioSource(features=features):
            added = build.input_position(position)
            return Frames(features, config.width, position=added, dropout=config.dropout)
    raise ValueError(f"source ({config.source!r}) must be a TextSource, ImageSource or AudioSource")


def _tokens(
    config: TransformerConfig, vocabulary: int, position: MakePosition, name: str
) -> Tokens:
    return Tokens(
        vocabulary,
        config.width,
        position=build.input_position(position),
        scale=config.scale,
        dropout=config.dropout,
        name=name,
    )


def _share(model: Transformer) -> None:
    """Section 3.4 of the paper: the same matrix embeds both languages and makes the logits."""
    share = model.config.share
    if share not in get_args(Share):
        raise ValueError(f"share ({share!r}) is unknown; choose from {', '.join(get_args(Share))}")
    if share == "none":
        return
    target, source = model.target.table, model.source
    if target.weight.shape != model.output.weight.shape:
        raise ValueError(
            f"share ({share!r}) needs token vectors as wide as the output, but concatenated "
            f"positions leave {target.embedding_dim} of {model.config.width}; use share='none'"
        )
    model.output.weight = target.weight
    if share == "all" and isinstance(source, Tokens):
        if source.table.num_embeddings != target.num_embeddings:
            raise ValueError(
                f"share ('all') needs one vocabulary, but the source has "
                f"{source.table.num_embeddings} tokens and the target {target.num_embeddings}; "
                "use share='target'"
            )
        source.table.weight = target.weight
