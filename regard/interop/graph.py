"""The models once more, for programs that others run: the equations alone, tensors in and out.

    Encoder       ids (B, S), lengths (B) or images            → memory (layers, 2, B, H, S, K)
    Decoder       tokens (B, L), past, memory, lengths         → logits (B, L, N), past
    Language      tokens (B, L), past (layers, 2, B, H, P, K)  → logits (B, L, N), past
    Classifier    ids (B, S), lengths (B)                      → logits (B, N)
    Texts         ids (B, S), lengths (B)                      → logits (B, S, N), features
    Images        images (B, C, Y, X)                          → logits (B, N)

A model of ours picks kernels by sizes, hooks and devices, which a traced program could not follow.
These share its parameters and say what it computes: softmax(β q·k + mask) v, with every length free
and a KV cache that is an argument and a result. `past` grows by the tokens of each call and begins
with P = 0; `memory` holds the keys and values that each decoder layer reads of the source.

Positions are tables, gathered; a program knows as many as its table has.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from regard.attention.multihead import MultiHeadAttention
from regard.attention.position import ALiBi, RotaryEmbedding
from regard.model.block import Block, PreNorm
from regard.model.classifier import TextClassifier
from regard.model.embedding import Frames, Patches, Tokens, flat_patches
from regard.model.encoder import TextEncoder
from regard.model.language import LanguageModel
from regard.model.stack import Stack
from regard.model.transformer import Transformer
from regard.model.vit import VisionTransformer

POSITIONS = 2048
"""Rows of the tables of positions, where the model itself has no end."""


class Turning(nn.Module):
    """What a position does inside attention: it turns queries and keys, or lowers scores."""

    cos: Tensor
    sin: Tensor
    slopes: Tensor | None

    def __init__(self, position: nn.Module | None):
        super().__init__()
        self.axis = 0
        if isinstance(position, RotaryEmbedding):
            self.axis, self.pairs = position.pair_axis, position.width // 2
            # Turning (1, 0) gives (cos, sin) of every angle.
            unit = torch.zeros(2, POSITIONS, self.pairs)
            unit[0] = 1
            turned = position.rotate(self._joined(*unit))
            for name, table in zip(("cos", "sin"), self._apart(turned)):
                self.register_buffer(name, table.contiguous(), persistent=False)
        slopes = position.slopes() if isinstance(position, ALiBi) else None
        self.register_buffer("slopes", slopes, persistent=False)

    def turned(self, x: Tensor, at: Tensor) -> Tensor:
        if not self.axis:
            return x
        cos, sin = self.cos[at], self.sin[at]
        a, b = self._apart(x)
        return self._joined(a * cos - b * sin, a * sin + b * cos)

    def lowered(self, scores: Tensor, at: Tensor) -> Tensor:
        if self.slopes is None:
            return scores
        distance = at[:, None] - torch.arange(scores.shape[-1], device=at.device)
        return scores - self.slopes[:, None, None] * distance.abs()

    def _apart(self, x: Tensor) -> tuple[Tensor, ...]:
        sizes = (self.pairs, 2) if self.axis == -1 else (2, self.pairs)
        return x.unflatten(-1, sizes).unbind(self.axis)

    def _joined(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.stack((a, b), self.axis).flatten(-2)


class Attention(nn.Module):
    """A MultiHeadAttention's equation."""

    def __init__(self, inner: MultiHeadAttention, turning: Turning):
        super().__init__()
        self.inner, self.turning = inner, turning
        self.groups = inner.heads // inner.key_heads
        self.beta = 1 / math.sqrt(inner.key_width)

    def pair(self, x: Tensor, at: Tensor) -> Tensor:
        """Keys and values, (2, B, H, S, K)."""
        keys = self.turning.turned(_split(self.inner.key(x), self.inner.key_heads), at)
        return torch.stack((keys, _split(self.inner.value(x), self.inner.key_heads)))

    def forward(self, x: Tensor, pair: Tensor, at: Tensor, allowed: Tensor | None) -> Tensor:
        queries = self.turning.turned(_split(self.inner.query(x), self.inner.heads), at)
        keys, values = pair.unbind(0)
        if self.groups > 1:
            keys, values = _repeated(keys, self.groups), _repeated(values, self.groups)
        scores = self.turning.lowered(queries @ keys.transpose(-1, -2) * self.beta, at)
        if allowed is None:
            weights = scores.softmax(-1)
        else:
            # A row that may attend to nothing is zero, not NaN.
            scores = torch.where(allowed, scores, torch.finfo(scores.dtype).min)
            weights = torch.where(allowed, scores.softmax(-1), 0.0)
        return self.inner.output((weights @ values).transpose(1, 2).flatten(2))


class Layers(nn.Module):
    """A stack's blocks, each with its attention as above."""

    def __init__(self, stack: Stack):
        super().__init__()
        self.blocks, self.norm = stack.blocks, stack.norm
        blocks = [block for block in stack.blocks if isinstance(block, Block)]
        own = [part.attention for part in blocks if isinstance(part.attention, MultiHeadAttention)]
        cross = [part.cross for part in blocks if isinstance(part.cross, MultiHeadAttention)]
        turning, still = Turning(own[0].position if own else None), Turning(None)
        self.own = nn.ModuleList(Attention(attention, turning) for attention in own)
        self.cross = nn.ModuleList(Attention(attention, still) for attention in cross)

    def forward(
        self,
        x: Tensor,
        at: Tensor,
        allowed: Tensor | None,
        past: Tensor | None = None,
        memory: Tensor | None = None,
        readable: Tensor | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """The output, and the keys and values of every block: those of the past, and the new."""
        pairs: list[Tensor] = []

        def attend(x: Tensor) -> Tensor:
            n = len(pairs)
            own: Any = self.own[n]
            pair = own.pair(x, at)
            pairs.append(pair if past is None else torch.cat((past[n], pair), -2))
            return own(x, pairs[n], at, allowed)

        def read(x: Tensor) -> Tensor:
            assert memory is not None
            n = len(pairs) - 1
            return self.cross[n](x, memory[n], at, readable)

        for block in self.blocks:
            x = _residual(block.add_attention, x, attend)
            if memory is not None:
                x = _residual(block.add_cross, x, read)
            x = _residual(block.add_feed_forward, x, block.feed_forward)
        return x if self.norm is None else self.norm(x), pairs


class Embedding(nn.Module):
    """Vectors of tokens, patches or frames, and those of their positions."""

    table: Tensor | None

    def __init__(self, inner: Tokens | Patches | Frames):
        super().__init__()
        self.inner = inner
        table = None
        if inner.position is not None:
            rows = torch.arange(inner.position.length or POSITIONS)
            table = inner.position.encoding(rows, torch.float32).detach()
        self.register_buffer("table", table, persistent=False)

    def forward(self, read: Tensor, past: int | torch.SymInt = 0) -> tuple[Tensor, Tensor]:
        """The vectors, and where they stand."""
        inner = self.inner
        if isinstance(inner, Tokens):
            x = inner.table(read) * inner.scale
        elif isinstance(inner, Patches):
            x = inner.projection(flat_patches(read, inner.patch))
        else:
            x = inner.projection(read)
        at: Tensor = torch.arange(x.shape[1], device=x.device) + past  # type: ignore[assignment]
        return (x if self.table is None else x + self.table[at]), at


class Encoder(nn.Module):
    """A source to what the decoder reads of it."""

    def __init__(self, model: Transformer):
        super().__init__()
        self.source = Embedding(model.source)
        self.layers = Layers(model.encoder)
        self.cross = Layers(model.decoder).cross

    def forward(self, source: Tensor, lengths: Tensor | None = None) -> Tensor:
        x, at = self.source(source)
        memory, _ = self.layers(x, at, _within(lengths, at))
        cross: Iterable[Any] = self.cross
        return torch.stack([attention.pair(memory, at) for attention in cross])


class Decoder(nn.Module):
    """New tokens to logits, after those of the past."""

    def __init__(self, model: Transformer):
        super().__init__()
        self.target = Embedding(model.target)
        self.layers = Layers(model.decoder)
        self.output = model.output

    def forward(
        self, tokens: Tensor, past: Tensor, memory: Tensor, lengths: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        x, at = self.target(tokens, past.shape[-2])
        readable = _within(lengths, torch.arange(memory.shape[-2], device=at.device))
        x, pairs = self.layers(x, at, _causal(at, past), past, memory, readable)
        return self.output(x), torch.stack(pairs)


class Language(nn.Module):
    """New tokens to logits, after those of the past; without a source."""

    def __init__(self, model: LanguageModel):
        super().__init__()
        self.tokens = Embedding(model.tokens)
        self.layers = Layers(model.decoder)
        self.output = model.output

    def forward(self, tokens: Tensor, past: Tensor) -> tuple[Tensor, Tensor]:
        x, at = self.tokens(tokens, past.shape[-2])
        x, pairs = self.layers(x, at, _causal(at, past), past)
        return self.output(x), torch.stack(pairs)


class Classifier(nn.Module):
    """A text to the logits of its labels."""

    def __init__(self, model: TextClassifier):
        super().__init__()
        self.tokens = Embedding(model.tokens)
        self.layers = Layers(model.encoder)
        self.head = model.head
        self.mean = model.config.pool == "mean"

    def forward(self, source: Tensor, lengths: Tensor) -> Tensor:
        x, at = self.tokens(source)
        x, _ = self.layers(x, at, _within(lengths, at))
        if self.mean:
            real = (at < lengths[:, None])[..., None]
            pooled = torch.where(real, x, 0.0).sum(1) / lengths.clamp(min=1)[:, None]
        else:
            last = (lengths - 1)[:, None, None].expand(-1, 1, x.shape[-1])
            pooled = x.gather(1, last)[:, 0]
        return self.head(pooled)


class Texts(nn.Module):
    """A text to the logits of what each token might be, and to its vectors."""

    def __init__(self, model: TextEncoder):
        super().__init__()
        self.tokens = Embedding(model.tokens)
        self.layers = Layers(model.encoder)
        self.output = model.output

    def forward(self, source: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        x, at = self.tokens(source)
        features, _ = self.layers(x, at, _within(lengths, at))
        return self.output(features), features


class Images(nn.Module):
    """An image to the logits of its classes."""

    def __init__(self, model: VisionTransformer):
        super().__init__()
        self.patches = Embedding(model.patches)
        self.layers = Layers(model.encoder)
        self.norm, self.head = model.norm, model.head
        self.mean = model.config.pool == "mean"
        self.first: nn.Parameter | None = None
        if model.class_token is not None:
            placed = 0 if model.class_position is None else model.class_position
            self.first = nn.Parameter((model.class_token + placed).detach())

    def forward(self, images: Tensor) -> Tensor:
        x, _ = self.patches(images)
        if self.first is not None:
            x = torch.cat((self.first.expand(x.shape[0], 1, -1), x), 1)
        x, _ = self.layers(x, torch.arange(x.shape[1], device=x.device), None)
        pooled = x[:, 0] if not self.mean else x[:, 0 if self.first is None else 1 :].mean(1)
        return self.head(pooled if self.norm is None else self.norm(pooled))


def empty_past(model: Transformer | LanguageModel, rows: int) -> Tensor:
    """A cache of nothing, to begin with."""
    config = model.config
    heads, width = config.key_heads or config.heads, config.width // config.heads
    return torch.zeros(len(model.decoder.blocks), 2, rows, heads, 0, width)


def _split(x: Tensor, heads: int) -> Tensor:
    """(B, L, H·K) to (B, H, L, K)."""
    return x.unflatten(-1, (heads, x.shape[-1] // heads)).transpose(1, 2)


def _repeated(x: Tensor, groups: int) -> Tensor:
    """Each key head for the query heads of its group."""
    return x[:, :, None].expand(-1, -1, groups, -1, -1).flatten(1, 2)


def _residual(add: Any, x: Tensor, sublayer: Any) -> Tensor:
    """What surrounds a sublayer, without dropout."""
    if isinstance(add, PreNorm):
        return x + sublayer(add.norm(x))
    return add.norm(x + sublayer(x))


def _within(lengths: Tensor | None, at: Tensor) -> Tensor | None:
    """(B, 1, 1, S): the keys that are no padding."""
    return None if lengths is None else (at < lengths[:, None])[:, None, None]


def _causal(at: Tensor, past: Tensor) -> Tensor:
    """(L, P + L): the keys that do not stand after the query."""
    return torch.arange(past.shape[-2] + at.shape[0], device=at.device) <= at[:, None]
