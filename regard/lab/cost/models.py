"""The cost of a whole model, part by part: by formula from its config, and counted while it runs.

    embedding · attention projections · attention products · feed-forward · norms · output

and the layers that replace attention, if there are any. Masked pairs, also those outside a window,
count as if they were computed.

The model is built and run on fake tensors, so that the cost of counting does not grow with it.
The operators are those of a CPU, fused attention included.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from regard.attention.core import Core
from regard.attention.multihead import MultiHeadAttention
from regard.lab.cost.count import Counter, saved_tensors, without_memory
from regard.model.baseline import Baseline
from regard.model.block import FeedForward, GatedFeedForward
from regard.model.classifier import ClassifierConfig, TextClassifier
from regard.model.embedding import Embedded, image_size
from regard.model.encoder import EncoderConfig, TextEncoder
from regard.model.formula import PARTS, Cached, Config, Part, cached, model_formula
from regard.model.language import LanguageConfig, LanguageModel
from regard.model.stack import StackCache
from regard.model.transformer import (
    AudioSource,
    ImageSource,
    Transformer,
    TransformerConfig,
)
from regard.model.vit import VisionConfig, VisionTransformer

PRECISIONS = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
"""Mixed precision: the dtype of products. Weights, gradients and Adam's moments stay float32."""


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
    """Additions of the forward pass, counted."""
    backward: int
    """Multiply-adds of the backward pass, counted."""
    activations: int
    """Bytes saved for the backward pass, counted without the loss, with the config's dropout."""
    cache_formula: Cached | None
    cache: Cached | None
    """The size of a KV cache, counted after a few tokens."""
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
        model = build(replace(config, window=None))
        parameters = _parameters(model)
        inputs = _inputs(config, length, batch)
        counter = Counter()
        with _parts(model.eval(), counter), torch.no_grad(), counter:
            model(*inputs)
        cache = _count_cache(model)
        backward, activations = _train(model.train(), inputs, PRECISIONS[precision])
    formula = model_formula(config, length, batch)
    counted = {
        name: Part(parameters[name], counts.multiply_adds if counts else 0)
        for name in PARTS
        for counts in [counter.parts.get(name)]
    }
    every = None
    if isinstance(config, VisionConfig) and config.pool == "class" and config.mixer == "attention":
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
        activations,
        cached(config),
        cache,
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
        case EncoderConfig():
            return TextEncoder(config)
    raise ValueError(f"config ({type(config).__name__}) is of no known model")


# Counted


def part_of(module: nn.Module, path: str) -> str | None:
    """The part of the model that a module belongs to, or None."""
    match module:
        case Embedded():
            return "embedding"
        case Core():
            return "attention products"
        case MultiHeadAttention():
            return "attention projections"
        case Baseline():
            return "recurrence or convolution"
        case FeedForward() | GatedFeedForward():
            return "feed-forward"
        case nn.LayerNorm():
            return "norms"
    # A model's output is at its top; those inside attention are projections.
    return "output" if path in ("output", "head") else None


def _parameters(model: nn.Module) -> dict[str, int]:
    """Parameters of each part, each counted once; tied weights belong to the embedding."""
    counts = dict.fromkeys(PARTS, 0)
    counted: set[int] = set()

    def visit(module: nn.Module, path: str, part: str) -> None:
        part = part_of(module, path) or part
        for parameter in module.parameters(recurse=False):
            if id(parameter) not in counted:
                counted.add(id(parameter))
                counts[part] += parameter.numel()
        # Tied weights are counted in the embedding, so the output comes last.
        for name, child in sorted(module.named_children(), key=lambda c: c[0] == "output"):
            visit(child, f"{path}.{name}".lstrip("."), part)

    visit(model, "", "embedding")  # the class token and its position belong to the model itself
    return counts


@contextmanager
def _parts(model: nn.Module, counter: Counter) -> Iterator[None]:
    """Sets the counter's current part while a part of the model runs."""
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


def _count_cache(model: nn.Module) -> Cached | None:
    """Decodes a few tokens and counts the numbers in the KV cache."""
    target, source = 3, 5

    def ids(n: int) -> Tensor:
        return torch.zeros(1, n, dtype=torch.int64)

    def numbers(of: Callable[[Any], Any], cache: StackCache) -> int:
        pairs = [of(block).held for block in cache.blocks]
        return sum(tensor.numel() for pair in pairs if pair is not None for tensor in pair)

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
                self_numbers = numbers(lambda block: block.own, cache)
                cross_numbers = numbers(lambda block: block.cross, cache)
                return Cached(self_numbers // target, cross_numbers // source)
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
