"""What a model takes, from its config alone: parameters, multiply-adds, caches and activations.

    model_formula(config, length)     by part; regard.lab.cost counts the same while a model runs
    parameters(config)                of all parts
    cached(config)                    numbers that a token leaves in a KV cache
    saved(config)                     numbers that a token leaves for the backward pass, at least

Nothing is built, so that a model of any size is known before memory is asked for.
"""

from dataclasses import dataclass, replace
from typing import TypeAlias

from regard.model.build import BlockConfig
from regard.model.classifier import ClassifierConfig
from regard.model.embedding import grid
from regard.model.encoder import EncoderConfig
from regard.model.language import LanguageConfig
from regard.model.transformer import (
    AudioSource,
    ImageSource,
    TextSource,
    TransformerConfig,
    decoder_shape,
)
from regard.model.vit import VisionConfig

Config: TypeAlias = (
    TransformerConfig | VisionConfig | LanguageConfig | ClassifierConfig | EncoderConfig
)

PARTS = (
    "embedding",
    "attention projections",
    "attention products",
    "recurrence or convolution",
    "feed-forward",
    "norms",
    "output",
)


@dataclass(frozen=True)
class Part:
    """All layers of one kind together."""

    parameters: int = 0
    multiply_adds: int = 0

    def __add__(self, other: "Part") -> "Part":
        return Part(self.parameters + other.parameters, self.multiply_adds + other.multiply_adds)


@dataclass(frozen=True)
class Cached:
    """Numbers in the KV cache while decoding."""

    each: int
    """For every target token, by self-attention."""
    source: int
    """For every source token, by cross-attention."""


def model_formula(
    config: Config, length: int, batch: int = 1, every_row: bool = False
) -> dict[str, Part]:
    """Parameters and multiply-adds of each part, from the config alone.

    With `every_row` a ViT's last block also computes the rows that its head does not read.
    """
    match config:
        case TransformerConfig():
            total = _transformer(config, length)
        case VisionConfig():
            total = _vision(config, every_row)
        case LanguageConfig():
            total = _language(config, length)
        case ClassifierConfig():
            total = _classifier(config, length)
        case EncoderConfig():
            total = _encoder(config, length)
    return {name: Part(total[name].parameters, batch * total[name].multiply_adds) for name in PARTS}


class _Sum(dict[str, Part]):
    """Parts to which layers are added."""

    def __init__(self) -> None:
        super().__init__(dict.fromkeys(PARTS, Part()))

    def add(self, name: str, parameters: int = 0, multiply_adds: int = 0) -> None:
        self[name] += Part(parameters, multiply_adds)

    def attention(self, config: BlockConfig, L: int, S: int, times: int = 1) -> None:
        """L queries over S keys: W_Q and W_O act on queries, W_K and W_V on keys."""
        d = config.width
        keys = _keys(config)
        own, read = d * d, d * keys
        weights = 2 * own + 2 * read + (2 * d + 2 * keys)
        self.add("attention projections", times * weights, times * 2 * (L * own + S * read))
        self.add("attention products", 0, times * 2 * L * S * d)

    def mixing(self, config: BlockConfig, L: int, times: int = 1, causal: bool = False) -> None:
        """Self-attention over all pairs, whatever a mask hides; or what stands in its place."""
        d = config.width
        match config.mixer:
            case "attention":
                self.attention(config, L, L, times)
            case "lstm" | "gru":
                gates, ways = 4 if config.mixer == "lstm" else 3, 1 if causal else 2
                hidden = d // ways
                weights = ways * gates * (d + hidden) * hidden
                biases = ways * gates * 2 * hidden
                mixed = (times * (weights + biases), times * L * weights)
                self.add("recurrence or convolution", *mixed)
            case "convolution":
                weights = config.kernel * d * d
                self.add("recurrence or convolution", times * (weights + d), times * L * weights)

    def feed_forward(self, config: BlockConfig, L: int, times: int = 1) -> None:
        d, f = config.width, config.feed_forward
        gated = config.activation == "swiglu"
        weights = (3 if gated else 2) * d * f
        self.add("feed-forward", times * (weights + (0 if gated else d + f)), times * L * weights)

    def norms(self, config: BlockConfig, layers: int, each: int) -> None:
        """Two vectors for each norm, and one more norm at the end of a pre-norm stack."""
        final = config.norm == "pre" if config.final_norm is None else config.final_norm
        self.add("norms", (layers * each + final) * 2 * config.width)


def _transformer(config: TransformerConfig, length: int) -> _Sum:
    total, d = _Sum(), config.width
    S = L = length
    learned = config.length * d if config.position == "learned" else 0
    match config.source:
        case TextSource(vocabulary=vocabulary):
            own = config.share != "all"
            total.add("embedding", own * (vocabulary or config.vocabulary) * d + learned)
        case ImageSource() as source:
            rows, columns = grid(source.image, source.patch)
            S, pixels = rows * columns, source.channels * source.patch**2
            table = S * d if source.position == "learned" else 0
            total.add("embedding", (pixels + 1) * d + table, S * pixels * d)
        case AudioSource(features=features):
            total.add("embedding", (features + 1) * d + learned, S * features * d)
    total.add("embedding", config.vocabulary * d + learned)
    total.mixing(config, S, config.encoder_layers)
    total.feed_forward(config, S, config.encoder_layers)
    total.norms(config, config.encoder_layers, 2)
    total.mixing(config, L, config.decoder_layers, causal=True)
    total.attention(config, L, S, config.decoder_layers)
    total.feed_forward(decoder_shape(config), L, config.decoder_layers)
    total.norms(config, config.decoder_layers, 3)
    table = (config.share == "none") * config.vocabulary * d
    total.add("output", table + config.output_bias * config.vocabulary, L * d * config.vocabulary)
    return total


def _vision(config: VisionConfig, every_row: bool) -> _Sum:
    total, d = _Sum(), config.width
    rows, columns = grid(config.image, config.patch)
    patches, pixels = rows * columns, config.channels * config.patch**2
    token = config.pool == "class" if config.class_token is None else config.class_token
    learned = config.position == "learned"
    S = patches + token
    total.add("embedding", (pixels + 1) * d + token * d + learned * S * d, patches * pixels * d)
    # The head reads only the class token's row, so the last block computes only that.
    last = _one_row(config) and not every_row
    total.mixing(config, S, config.layers - last)
    total.feed_forward(config, S, config.layers - last)
    if last:
        total.attention(config, 1, S)
        total.feed_forward(config, 1)
    total.norms(replace(config, final_norm=True) if config.pool_norm else config, config.layers, 2)
    hidden = config.head_width
    if hidden is not None:
        total.add("output", (d + 1) * hidden, d * hidden)
    read = hidden or d
    total.add("output", (read + 1) * config.classes, read * config.classes)
    return total


def _language(config: LanguageConfig, L: int) -> _Sum:
    total, d = _stack(config, L), config.width
    total.add("output", (not config.share) * config.vocabulary * d, L * d * config.vocabulary)
    return total


def _classifier(config: ClassifierConfig, S: int) -> _Sum:
    total, d = _stack(config, S), config.width
    total.add("output", (d + 1) * config.classes, d * config.classes)
    return total


def _encoder(config: EncoderConfig, S: int) -> _Sum:
    total = _stack(config, S)
    total.add("output", config.vocabulary, S * config.width * config.vocabulary)
    return total


def _stack(config: LanguageConfig | ClassifierConfig | EncoderConfig, L: int) -> _Sum:
    """Embedding and blocks."""
    total, d = _Sum(), config.width
    learned = config.length * d if config.position == "learned" else 0
    total.add("embedding", config.vocabulary * d + learned)
    total.mixing(config, L, config.layers, causal=isinstance(config, LanguageConfig))
    total.feed_forward(config, L, config.layers)
    total.norms(config, config.layers, 2)
    return total


# In memory


def parameters(config: Config) -> int:
    return sum(part.parameters for part in model_formula(config, 1).values())


def cached(config: Config) -> Cached | None:
    """KV cache: 2·d·(key heads / heads) numbers for each layer and token.

    An LSTM leaves its output and its cell there, a GRU its output, a convolution its input.
    """
    if not isinstance(config, TransformerConfig | LanguageConfig):
        return None
    kept = {"attention": 2 * _keys(config), "lstm": 2 * config.width}
    each = kept.get(config.mixer, config.width)
    if isinstance(config, LanguageConfig):
        return Cached(config.layers * each, 0)
    return Cached(config.decoder_layers * each, config.decoder_layers * 2 * _keys(config))


def saved(config: Config) -> tuple[int, int]:
    """Numbers that a position of the source and one of the target leave for the backward pass.

    At the least: without dropout's masks, the embedding, and the logits, whose loss may be computed
    in parts. A block keeps the inputs of its norms and of its products, and the products of
    attention.
    """
    d, kept = config.width, {"relu": 1, "gelu": 2, "silu": 2, "swiglu": 3}[config.activation]
    # In attention's place: what goes in, and what comes out.
    attention = 4 * d + 2 * _keys(config) if config.mixer == "attention" else 3 * d
    block = attention + 2 * d + kept * config.feed_forward
    if isinstance(config, TransformerConfig):
        # Cross-attention's keys and values are those of the source.
        of_memory = config.decoder_layers * 2 * _keys(config)
        wider = kept * (decoder_shape(config).feed_forward - config.feed_forward)
        return (
            config.encoder_layers * block + of_memory,
            config.decoder_layers * (block + wider + 4 * d),
        )
    # The last block of a ViT computes the class token's row alone, where only that is read.
    whole = config.layers - (isinstance(config, VisionConfig) and _one_row(config))
    return max(0, whole) * block, 0


def _one_row(config: VisionConfig) -> bool:
    """Whether a ViT's last block computes the class token's row alone."""
    return config.pool == "class" and config.layers > 0 and config.mixer == "attention"


def _keys(config: BlockConfig) -> int:
    """The width of all key heads together."""
    return config.width * (config.key_heads or config.heads) // config.heads
