"""What a whole model costs, part by part: by formula from its config, and counted while it runs.

    embedding · attention projections · attention products · feed-forward · norms · output

The model is built and run on fake tensors, so that the largest takes no longer than the smallest.
The operators are those of a CPU, fused attention included.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from regard.attention.multihead import Core, MultiHeadAttention
from regard.lab.cost.count import Counter, saved_tensors, without_memory
from regard.model.block import FeedForward, GatedFeedForward
from regard.model.build import BlockConfig
from regard.model.classifier import ClassifierConfig, TextClassifier
from regard.model.embedding import Embedded, grid, image_size
from regard.model.language import LanguageConfig, LanguageModel
from regard.model.stack import StackCache
from regard.model.transformer import (
    AudioSource,
    ImageSource,
    TextSource,
    Transformer,
    TransformerConfig,
)
from regard.model.vit import VisionConfig, VisionTransformer

Config: TypeAlias = TransformerConfig | VisionConfig | LanguageConfig | ClassifierConfig

PARTS = (
    "embedding",
    "attention projections",
    "attention products",
    "feed-forward",
    "norms",
    "output",
)

PRECISIONS = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
"""Mixed precision: the dtype of products. Weights, gradients and Adam's moments stay float32."""


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


@dataclass(frozen=True)
class ModelCost:
    """The cost of a model."""

    config: Config
    length: int
    batch: int
    precision: str
    formula: dict[str, Part]
    measured: dict[str, Part]
    additions: int
    """Of the forward pass, counted."""
    backward: int
    """Multiply-adds of the backward pass, counted."""
    activations: int
    """Bytes saved for the backward pass, counted without the loss, with the config's dropout."""
    cache_formula: Cached | None
    cache: Cached | None
    """Counted in a KV cache that was filled."""
    every_row: int | None
    """Multiply-adds if the last block also computed the rows that no head reads, as others do."""

    @property
    def parameters(self) -> int:
        return sum(part.parameters for part in self.measured.values())

    @property
    def multiply_adds(self) -> int:
        return sum(part.multiply_adds for part in self.measured.values())

    @property
    def training(self) -> int:
        """Multiply-adds of a training step: forward and backward pass."""
        return self.multiply_adds + self.backward

    @property
    def bytes_per_number(self) -> int:
        return PRECISIONS[self.precision].itemsize

    @property
    def memory(self) -> dict[str, int]:
        """Bytes by purpose."""
        return {
            "weights, in use": self.parameters * self.bytes_per_number,
            "weights, in training": self.parameters * 4,
            "gradients": self.parameters * 4,
            "Adam": self.parameters * 8,
            "activations": self.activations,
        }


def model_cost(
    config: Config, length: int = 512, batch: int = 1, precision: str = "fp32"
) -> ModelCost:
    """Builds the model, runs it and counts; `length` is that of source and target, if text."""
    if precision not in PRECISIONS:
        raise ValueError(
            f"precision ({precision!r}) is unknown; choose from {', '.join(PRECISIONS)}"
        )
    with without_memory():
        model = build(config)
        parameters = _parameters(model)
        inputs = _inputs(config, length, batch)
        counter = Counter()
        with _parts(model.eval(), counter), torch.no_grad(), counter:
            model(*inputs)
        cached = _cached(model, length)
        backward, kept = _train(model.train(), inputs, PRECISIONS[precision])
    formula = model_formula(config, length, batch)
    counted = {
        name: Part(parameters[name], counts.multiply_adds if counts else 0)
        for name in PARTS
        for counts in [counter.parts.get(name)]
    }
    every = None
    if isinstance(config, VisionConfig) and config.pool == "class":
        every = sum(p.multiply_adds for p in model_formula(config, length, batch, True).values())
    return ModelCost(
        config,
        length,
        batch,
        precision,
        formula,
        counted,
        counter.total.additions,
        backward,
        kept,
        _cache_formula(config),
        cached,
        every,
    )


def build(config: Config) -> nn.Module:
    """The model of a config."""
    match config:
        case TransformerConfig():
            return Transformer(config)
        case VisionConfig():
            return VisionTransformer(config)
        case LanguageConfig():
            return LanguageModel(config)
        case ClassifierConfig():
            return TextClassifier(config)
    raise ValueError(f"config ({type(config).__name__}) is of no known model")


# Counted


def part_of(module: nn.Module, path: str) -> str | None:
    """The part that a module is, if it is one."""
    match module:
        case Embedded():
            return "embedding"
        case Core():
            return "attention products"
        case MultiHeadAttention():
            return "attention projections"
        case FeedForward() | GatedFeedForward():
            return "feed-forward"
        case nn.LayerNorm():
            return "norms"
    # A model's output is at its top; those inside attention are projections.
    return "output" if path in ("output", "head") else None


def _parameters(model: nn.Module) -> dict[str, int]:
    """Parameters of each part, each counted once; tied weights belong to the embedding."""
    counts = dict.fromkeys(PARTS, 0)
    seen: set[int] = set()

    def visit(module: nn.Module, path: str, part: str) -> None:
        part = part_of(module, path) or part
        for parameter in module.parameters(recurse=False):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                counts[part] += parameter.numel()
        # Weights that the output shares are met in the embedding first.
        for name, child in sorted(module.named_children(), key=lambda c: c[0] == "output"):
            visit(child, f"{path}.{name}".lstrip("."), part)

    visit(model, "", "embedding")  # the class token and its position belong to the model itself
    return counts


@contextmanager
def _parts(model: nn.Module, counter: Counter) -> Iterator[None]:
    """Tells the counter which part of the model is running."""
    hooks = []
    for path, module in model.named_modules():
        part = part_of(module, path)
        if part is None:
            continue

        def enter(module: nn.Module, args: Any, part: str = part) -> None:
            counter.enter(part)

        def leave(module: nn.Module, args: Any, out: Any) -> None:
            counter.leave()

        hooks.append(module.register_forward_pre_hook(enter))
        hooks.append(module.register_forward_hook(leave))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _train(model: nn.Module, inputs: tuple[Tensor, ...], dtype: torch.dtype) -> tuple[int, int]:
    """Multiply-adds of the backward pass, and the bytes saved for it."""
    mixed = torch.autocast("cpu", dtype, enabled=dtype != torch.float32)
    with mixed, saved_tensors(model) as saved:
        logits = model(*inputs)
    with Counter() as counter:
        logits.sum().backward()
    return counter.total.multiply_adds, saved.bytes


def _cached(model: nn.Module, length: int) -> Cached | None:
    """Decodes a few tokens and counts the numbers in the KV cache."""
    target, source = 3, 5

    def ids(n: int) -> Tensor:
        return torch.zeros(1, n, dtype=torch.int64)

    def numbers(of: Callable[[Any], Any], cache: StackCache) -> int:
        held = [of(block).held for block in cache.blocks]
        return sum(tensor.numel() for pair in held if pair is not None for tensor in pair)

    with torch.no_grad():
        match model:
            case LanguageModel():
                cache = model.cache()
                model(ids(target), cache=cache)
                return Cached(numbers(lambda block: block.own, cache) // target, 0)
            case Transformer():
                cache = model.cache()
                memory = torch.zeros(1, source, model.config.width)
                model.decode(ids(target), memory, cache=cache)
                own = numbers(lambda block: block.own, cache)
                cross = numbers(lambda block: block.cross, cache)
                return Cached(own // target, cross // source)
    return None


def _inputs(config: Config, length: int, batch: int) -> tuple[Tensor, ...]:
    def ids() -> Tensor:
        return torch.zeros(batch, length, dtype=torch.int64)

    match config:
        case TransformerConfig(source=ImageSource() as source):
            rows, columns = image_size(source.image)
            return torch.zeros(batch, source.channels, rows, columns), ids()
        case TransformerConfig(source=AudioSource(features=features)):
            return torch.zeros(batch, length, features), ids()
        case TransformerConfig():
            return ids(), ids()
        case VisionConfig():
            return (torch.zeros(batch, config.channels, *image_size(config.image)),)
    return (ids(),)


# By formula


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
        keys = d * (config.key_heads or config.heads) // config.heads
        own, read = d * d, d * keys
        weights = 2 * own + 2 * read + (2 * d + 2 * keys)
        self.add("attention projections", times * weights, times * 2 * (L * own + S * read))
        self.add("attention products", 0, times * 2 * L * S * d)

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
    total.attention(config, S, S, config.encoder_layers)
    total.feed_forward(config, S, config.encoder_layers)
    total.norms(config, config.encoder_layers, 2)
    total.attention(config, L, L, config.decoder_layers)
    total.attention(config, L, S, config.decoder_layers)
    total.feed_forward(config, L, config.decoder_layers)
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
    last = config.pool == "class" and config.layers > 0 and not every_row
    total.attention(config, S, S, config.layers - last)
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


def _stack(config: LanguageConfig | ClassifierConfig, L: int) -> _Sum:
    """Embedding and blocks."""
    total, d = _Sum(), config.width
    learned = config.length * d if config.position == "learned" else 0
    total.add("embedding", config.vocabulary * d + learned)
    total.attention(config, L, L, config.layers)
    total.feed_forward(config, L, config.layers)
    total.norms(config, config.layers, 2)
    return total


def _cache_formula(config: Config) -> Cached | None:
    """KV cache: 2·d·(key heads / heads) numbers for each layer and token."""
    if not isinstance(config, TransformerConfig | LanguageConfig):
        return None
    keys = config.width * (config.key_heads or config.heads) // config.heads
    if isinstance(config, LanguageConfig):
        return Cached(config.layers * 2 * keys, 0)
    return Cached(config.decoder_layers * 2 * keys, config.decoder_layers * 2 * keys)
