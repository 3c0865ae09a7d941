"""A model's parts as the kernels know them: addresses of tensors, which have to stay."""

import ctypes
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.attention.multihead import MultiHeadAttention
from regard.attention.position import LearnedPositions, RotaryEmbedding, SinusoidalPositions
from regard.decode.engine.int8 import library as native
from regard.decode.engine.int8.cache import Buffers, Cache, Places
from regard.decode.engine.int8.linear import Int8Linear
from regard.decode.engine.int8.structure import ACTIVATIONS
from regard.decode.engine.parts import scale
from regard.model.block import Block, GatedFeedForward, PreNorm
from regard.model.embedding import Tokens
from regard.model.stack import Stack
from regard.native.build import address


def kernels() -> ctypes.CDLL:
    library = native.library()
    assert library is not None  # who has an engine has asked
    return library


class Vectors(NamedTuple):
    """What a stack reads: vectors that become its result, or how tokens are embedded, or both."""

    x: Float[Tensor, "T D"] | None
    embedding: native.Embedding = native.Embedding()


class Embedder:
    """Tokens by their table and the vectors of their positions, which the kernels look up."""

    def __init__(self, part: Tokens):
        self.part, self.table, kind = part, part.table.weight.detach(), type(part.position)
        self.known = kind in (type(None), SinusoidalPositions, LearnedPositions)
        self.learned = (
            cast(LearnedPositions, part.position).table.detach()
            if kind is LearnedPositions
            else None
        )
        self._sines = torch.empty(0)

    def reaches(self, longest: int) -> bool:
        """Whether the kernels know the vectors of so many positions."""
        return self.known and (self.learned is None or longest <= len(self.learned))

    def embedding(self, ids: Int[Tensor, "T"] | None, longest: int) -> native.Embedding:
        """The struct that the kernels receive."""
        places = self.learned
        if isinstance(self.part.position, SinusoidalPositions):
            places = self._sines
            if len(places) < longest:
                every = torch.arange(max(64, 2 * longest))
                self._sines = places = self.part.position.encoding(every, torch.float32)
        addresses = map(address, (ids, self.table, places))
        embedding = native.Embedding(*addresses, self.part.scale)
        embedding.held = ids, places
        return embedding

    def embed(self, ids: Int[Tensor, "T"], at: Places, x: Tensor | None = None) -> Vectors:
        ids, longest = ids.long().contiguous(), at.longest
        # Without signs, negative ones are the largest.
        inside = int(ids.numpy().view(np.uint64).max(initial=0)) < len(self.table)
        if not (inside and self.reaches(longest)):
            # The modules say what is wrong with tokens or positions that do not exist.
            return Vectors(
                self.part(ids[None], torch.from_numpy(at.position)[None])[0].contiguous()
            )
        return Vectors(x, self.embedding(ids, longest))


class Blocks:
    """A stack, and the positions by which it rotates queries and keys."""

    def __init__(self, stack: Stack, window: int | None):
        self.window = window or 0
        self.array = (native.Block * len(stack.blocks))(*map(_block, stack.blocks))
        self.norm = _norm(stack.norm)
        self.width = self.array[0].self_attention.query.inner
        position = cast(MultiHeadAttention, cast(Block, stack.blocks[0]).attention).position
        self.rotary = position if isinstance(position, RotaryEmbedding) else None
        self._rotations = torch.empty(0)

    def cache(self, buffers: Buffers, rows: int, cross: bool = False) -> Cache:
        """For the keys and values of self-attention, or of cross-attention."""
        block = self.array[0]
        part = block.cross_attention if cross else block.self_attention
        return Cache(buffers, len(self.array), kernels().slot_width(part), rows)

    def run(
        self,
        vectors: Vectors,
        at: Places,
        cache: Cache,
        memory: Cache | None = None,
        *,
        causal: bool = True,
        output: native.Linear | None = None,
        logits: Tensor | None = None,
    ) -> None:
        """All blocks; without logits, a causal stack does no more than fill its cache."""
        tokens = self._tokens(vectors, at, cache, memory, causal)
        tokens.rotary = self._rotary(at.longest)
        arguments = (self.array, len(self.array), tokens, self.norm, output, address(logits))
        kernels().run(*arguments, torch.get_num_threads())

    def advance(
        self,
        embedder: Embedder,
        cache: Cache,
        memory: Cache | None,
        output: native.Linear,
        search: native.Search,
        steps: int,
    ) -> int:
        """So many steps of a search, or fewer where all its sentences are over; how many."""
        slots, longest = cache.ahead(steps), cache.table.shape[1]
        none = np.zeros(0, np.int64)
        vectors = Vectors(None, embedder.embedding(None, longest))
        tokens = self._tokens(vectors, Places(none, none), cache, memory, True)
        tokens.rotary = self._rotary(longest)
        model = (self.array, len(self.array), tokens, self.norm, output)
        used = ctypes.c_int64()
        taking = (search, steps, slots.ctypes.data, used, torch.get_num_threads())
        taken = kernels().advance(*model, *taking)
        cache.used(used.value)
        return int(taken)

    def project_memory(self, x: Float[Tensor, "T D"], at: Places, memory: Cache) -> None:
        """Fills a cache with what cross-attention reads of encoded tokens."""
        tokens = self._tokens(Vectors(x), at, memory, None, False)
        kernels().project_memory(self.array, len(self.array), tokens, torch.get_num_threads())

    def _tokens(
        self, vectors: Vectors, at: Places, cache: Cache, memory: Cache | None, causal: bool
    ) -> native.Tokens:
        return native.Tokens(
            *(len(at.row), self.width, causal, self.window, address(vectors.x)),
            *(at.row.ctypes.data, at.position.ctypes.data),
            *(vectors.embedding, native.RotaryEmbedding(), cache.address()),
            native.Cache() if memory is None else memory.address(),
        )

    def _rotary(self, length: int) -> native.RotaryEmbedding:
        if self.rotary is None:
            return native.RotaryEmbedding()
        halves, table = self.rotary.layout == "halves", self._rotated(length)
        return native.RotaryEmbedding(table.data_ptr(), self.rotary.width // 2, halves)

    def _rotated(self, length: int) -> Float[Tensor, "L 2 pairs"]:
        """cos and sin of at least so many positions."""
        table, rotary = self._rotations, self.rotary
        if rotary is not None and len(table) < length:
            pairs, halves = rotary.width // 2, rotary.layout == "halves"
            # What (1, 0) becomes is cos and sin.
            one = torch.tensor([1.0, 0.0])
            one = one.repeat_interleave(pairs) if halves else one.repeat(pairs)
            rotated = rotary.rotate(one.expand(max(64, 2 * length), -1))
            rotated = rotated.unflatten(1, (2, pairs) if halves else (pairs, 2))
            self._rotations = table = (rotated if halves else rotated.mT).contiguous()
        return table


def _block(block: nn.Module) -> native.Block:
    assert isinstance(block, Block)
    forward = block.feed_forward
    gated = isinstance(forward, GatedFeedForward)
    native_block = native.Block(
        self_attention=_attention(block.attention),
        expand=_linear(forward.expand),
        reduce=_linear(forward.reduce),
        self_norm=_norm(block.add_attention.norm),
        feed_forward_norm=_norm(block.add_feed_forward.norm),
        pre_norm=isinstance(block.add_attention, PreNorm),
        activation=ACTIVATIONS[nn.SiLU if gated else type(cast(nn.Module, forward.activation))],
    )
    if gated:
        native_block.gate = _linear(forward.gate)
    if block.cross is not None and block.add_cross is not None:
        native_block.cross_attention = _attention(block.cross)
        native_block.cross_norm = _norm(block.add_cross.norm)
    return native_block


def _attention(part: Any) -> native.Attention:
    return native.Attention(
        *(part.heads, part.key_heads, part.key_width, part.value_width),
        scale(part),
        *map(_linear, (part.query, part.key, part.value, part.output)),
    )


def _linear(part: Any) -> native.Linear:
    assert isinstance(part, Int8Linear)
    return part.address()


def _norm(norm: Any) -> native.Norm:
    if norm is None:
        return native.Norm()
    return native.Norm(norm.weight.data_ptr(), norm.bias.data_ptr(), norm.eps)
