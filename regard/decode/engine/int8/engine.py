"""Models with 8-bit weights in compiled kernels: one call for all blocks of a step.

What a block is, `model/block.py` says; here the same modules are handed to kernels.cpp as
addresses. No padding is computed, and every row has its own length.
"""

import ctypes
import math
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.attention.host import integers
from regard.attention.mask import Packed
from regard.attention.multihead import MultiHeadAttention
from regard.attention.position import Learned, Rotary, Sinusoidal
from regard.decode.engine.int8 import library as native
from regard.decode.engine.int8.cache import Buffers, Cache, Integers
from regard.decode.engine.int8.linear import Int8Linear
from regard.decode.engine.int8.structure import ACTIVATIONS, hooked, parts, unknown
from regard.decode.engine.session import Session
from regard.decode.search import topk
from regard.decode.search.constraints import Constraints
from regard.model.block import Block, GatedFeedForward, PreNorm
from regard.model.embedding import Tokens
from regard.model.language import LanguageModel
from regard.model.lengths import Lengths, places
from regard.model.stack import Stack
from regard.model.transformer import Transformer

Model = Transformer | LanguageModel


class Int8Engine:
    """A model as the kernels know it. It holds parts of the model, but not the model."""

    name = "int8"

    def __init__(self, model: Model):
        if refusal := self.refusal(model):
            raise ValueError(f"the kernels for 8-bit layers cannot run this model: {refusal}")
        self.reason = f"8-bit weights, kernels for {native.kernels().isa}"
        # What the kernels point to stays, even where a module is given other tensors.
        self._held = [x.detach() for x in (*model.parameters(), *model.buffers())]
        self._seen = _seen(model)
        self.decoder, self.encoder, self.source = Blocks(model.decoder), None, None
        if isinstance(model, Transformer):
            self.encoder = Blocks(model.encoder)
            self.source = Embedder(model.source) if type(model.source) is Tokens else None
        self.tokens = Embedder(_tokens(model))
        self.output = cast(Int8Linear, model.output).address()
        self.buffers = Buffers()

    @staticmethod
    def refusal(model: nn.Module) -> str:
        """Why the kernels cannot run it, in one line; nothing where they can."""
        if reason := native.missing():
            return reason
        if type(model) not in (Transformer, LanguageModel):
            return f"a {type(model).__name__} is neither a Transformer nor a LanguageModel"
        model, across = cast(Model, model), type(model) is Transformer
        if type(model.output) is not Int8Linear:
            return "the output layer is not of 8 bits; call int8(model) first"
        if hooked(parts(model)):
            return "a module has a forward hook"
        for name, x in (*model.named_parameters(), *model.named_buffers()):
            number = not x.is_floating_point() or x.dtype == torch.float32
            if not (number and x.is_contiguous() and x.device.type == "cpu"):
                return f"{name} is {x.dtype} on {x.device}, not contiguous float32 on the cpu"
        if across and (reason := unknown(model.encoder, Int8Linear, cross=False)):
            return f"in the encoder, {reason}"
        if reason := unknown(model.decoder, Int8Linear, cross=across):
            return f"in the decoder, {reason}"
        if type(_tokens(model)) is not Tokens:
            return f"tokens are embedded by a {type(_tokens(model)).__name__}"
        return ""

    def current(self, model: Model) -> bool:
        """Whether all that it knows of the model is still so."""
        return self._seen == _seen(model)

    @torch.no_grad()
    def open(
        self,
        model: Model,
        source: Tensor | None = None,
        lengths: Lengths = None,
        *,
        rows: int | None = None,
        beams: int = 1,
        length: int = 64,
    ) -> "Int8Session":
        """A session for the sources' rows, or for so many `rows` of a language model.

        To what `length` they will grow, and how many `beams` a source will have, are hints.
        """
        memory = None
        if isinstance(model, Transformer):
            if source is None:
                raise ValueError("a Transformer needs a source to read")
            memory = self._read(model, source, lengths)
            rows = len(memory.lengths)
        blocks, rows = self.decoder, 1 if rows is None else rows
        cache = Cache(self.buffers, blocks.count, blocks.self_width, rows)
        cache.reserve(rows * beams * min(length, 64))
        return Int8Session(self, cache, memory)

    def _read(self, model: Transformer, source: Tensor, lengths: Lengths) -> Cache:
        """The keys and values that cross-attention reads of each source."""
        assert self.encoder is not None
        at, ids = places(lengths, source), self.source is not None and source.ndim == 2
        counts, x = _end_to_end(source if ids else model.source(source, at), lengths)
        encoded = Cache(self.buffers, self.encoder.count, self.encoder.self_width, len(counts))
        row, position = encoded.places(counts)
        encoded.extend(row, position)
        if ids and self.source is not None:
            room = torch.empty(len(x), model.source.width)
            vectors = self.source.embed(x, position, room)
        else:
            # The kernels write into it. Under autocast, images and sounds come in fewer bits.
            vectors = Vectors(x.to(torch.float32, copy=True).contiguous())
        self.encoder.run(vectors, row, position, encoded, causal=False)
        blocks, memory = self.decoder, Cache(self.buffers, *self.decoder.memory, len(counts))
        memory.extend(row, position)
        tokens = blocks.tokens(Vectors(vectors.x), row, position, memory)
        _library().project_memory(blocks.array, blocks.count, tokens, torch.get_num_threads())
        return memory


class Int8Session(Session):
    """Rows in the kernels, each with a length, slots and a source of its own."""

    device = torch.device("cpu")

    def __init__(self, engine: Int8Engine, cache: Cache, memory: Cache | None):
        self.engine, self.cache, self.memory = engine, cache, memory
        self.rows, self.vocabulary = len(cache.lengths), engine.output.out

    def prefill(self, tokens: Int[Tensor, "R n"], counts: Int[Tensor, "R"]) -> None:
        self._check(tokens)
        counts = counts.long().cpu()
        real = torch.arange(tokens.shape[1]) < counts[:, None]
        self._read(tokens.cpu()[real], counts.numpy())

    def step(self, tokens: Int[Tensor, "R"]) -> Float[Tensor, "R N"]:
        self._check(tokens)
        logits = self.engine.buffers.take((self.rows, self.vocabulary))
        self._read(tokens.cpu(), None, logits)
        return logits

    @torch.no_grad()
    def _read(self, tokens: Tensor, counts: Integers | None, logits: Tensor | None = None) -> None:
        engine, (row, position) = self.engine, self.cache.places(counts)
        # What is refused here has changed nothing.
        vectors = engine.tokens.embed(tokens, position)
        self.cache.extend(row, position)
        engine.decoder.run(
            *(vectors, row, position, self.cache, self.memory),
            output=None if logits is None else engine.output,
            logits=logits,
        )

    def select(self, rows: Int[Tensor, "R"]) -> None:
        chosen = self._chosen(rows.cpu()).numpy()
        self.rows = len(chosen)
        for cache in self._caches():
            cache.select(chosen)

    def join(self, other: Session) -> None:
        if not isinstance(other, Int8Session) or other.engine is not self.engine:
            raise ValueError("only sessions of one engine can be joined; open both with the same")
        self.rows += other.rows
        for cache, joined in zip(self._caches(), other._caches()):
            cache.join(joined)
        other.close()

    def best(
        self, logits: Float[Tensor, "R N"], count: int, rule: Constraints, t: int
    ) -> topk.Best:
        return topk.best(logits, count, rule, t, _log_sums, _largest)

    def close(self) -> None:
        self.rows = 0
        for cache in self._caches():
            cache.clear()

    def _caches(self) -> list[Cache]:
        return [self.cache] if self.memory is None else [self.cache, self.memory]


class Vectors(NamedTuple):
    """What a stack reads: vectors that become its result, or how they are embedded."""

    x: Float[Tensor, "T D"] | None
    embedding: native.Embedding = native.Embedding()


class Embedder:
    """Tokens by their table and their positions' vectors, which the kernels look up."""

    def __init__(self, part: Tokens):
        self.part, self.table = part, part.table.weight.detach()
        kind = type(part.position)
        self.known = kind in (type(None), Sinusoidal, Learned)
        self.learned = cast(Learned, part.position).table.detach() if kind is Learned else None
        self._sines = torch.empty(0)

    def embed(self, ids: Int[Tensor, "T"], position: Integers, x: Tensor | None = None) -> Vectors:
        ids, most = ids.long().contiguous(), int(position.max(initial=-1))
        # Negative ones are the largest of all without a sign.
        inside = int(ids.numpy().view(np.uint64).max(initial=0)) < len(self.table)
        if not (self.known and inside and (self.learned is None or most < len(self.learned))):
            # The modules, which say what is wrong with tokens or positions that do not exist.
            at = torch.from_numpy(position)
            return Vectors(self.part(ids[None], at[None])[0].contiguous())
        places = self.learned
        if isinstance(self.part.position, Sinusoidal):
            places = self._sines
            if len(places) <= most:
                every = torch.arange(max(64, 2 * most))
                self._sines = places = self.part.position.encoding(every, torch.float32)
        embedding = native.Embedding(
            *map(native.address, (ids, self.table, places)), self.part.scale
        )
        embedding.held = ids, places
        return Vectors(x, embedding)


class Blocks:
    """A stack's addresses, and the positions that its blocks rotate by."""

    def __init__(self, stack: Stack):
        self.count = len(stack.blocks)
        self.array = (native.Block * self.count)(*map(_block, stack.blocks))
        self.norm = _norm(stack.norm)
        self.width = self.array[0].self_attention.query.inner
        self.self_width = _library().slot_width(self.array[0].self_attention)
        self.cross_width = _library().slot_width(self.array[0].cross_attention)
        position = cast(MultiHeadAttention, cast(Block, stack.blocks[0]).attention).position
        self.rotary = position if isinstance(position, Rotary) else None
        self._turns = torch.empty(0)

    def run(
        self,
        vectors: Vectors,
        row: Integers,
        position: Integers,
        cache: Cache,
        memory: Cache | None = None,
        *,
        causal: bool = True,
        output: native.Linear | None = None,
        logits: Tensor | None = None,
    ) -> None:
        """All blocks; without logits, a causal stack does no more than fill its cache."""
        tokens = native.Tokens(
            *(len(row), self.width, causal, native.address(vectors.x)),
            *(row.ctypes.data, position.ctypes.data, vectors.embedding),
            *(self._rotations(int(position.max(initial=-1)) + 1), cache.address()),
        )
        if memory is not None:
            tokens.memory = memory.address()
        given = (self.array, self.count, tokens, self.norm, output, native.address(logits))
        _library().run(*given, torch.get_num_threads())

    def _rotations(self, length: int) -> native.Rotary:
        """cos and sin of at least so many positions."""
        if self.rotary is None:
            return native.Rotary()
        pairs, halves, turns = self.rotary.width // 2, self.rotary.layout == "halves", self._turns
        if len(turns) < length:
            # What (1, 0) becomes is cos and sin.
            one = torch.tensor([1.0, 0.0])
            one = one.repeat_interleave(pairs) if halves else one.repeat(pairs)
            turned = self.rotary.rotate(one.expand(max(64, 2 * length), -1))
            turned = turned.unflatten(1, (2, pairs) if halves else (pairs, 2))
            self._turns = turns = (turned if halves else turned.transpose(1, 2)).contiguous()
        rotary = native.Rotary(turns.data_ptr(), pairs, halves)
        rotary.held = turns
        return rotary


def _tokens(model: Model) -> Tokens:
    return model.target if isinstance(model, Transformer) else model.tokens


def _end_to_end(x: Tensor, lengths: Lengths) -> tuple[Integers, Tensor]:
    """How long each sequence is, and the real tokens of all of them, one after the other."""
    B, S = x.shape[:2]
    if lengths is None:
        counts, rows = torch.full((B,), S), x.flatten(0, 1)
    elif isinstance(lengths, Packed):
        counts, rows = lengths.lengths.long().cpu(), x[0]
    else:
        counts = integers(lengths, "source_lengths").long().cpu()
        rows = x[torch.arange(S) < counts[:, None]]
    return counts.numpy(), rows


def _log_sums(logits: Float[Tensor, "R N"]) -> Float[Tensor, "R"]:
    if logits.dtype != torch.float32:
        return topk.log_sums(logits)
    logits, sums = logits.contiguous(), logits.new_empty(len(logits))
    given = (logits.data_ptr(), *logits.shape, sums.data_ptr())
    _library().log_sums(*given, torch.get_num_threads())
    return sums


def _largest(logits: Float[Tensor, "R N"], count: int) -> topk.Best:
    if logits.dtype != torch.float32:
        return topk.largest(logits, count)
    logits, values = logits.contiguous(), logits.new_empty(len(logits), count)
    tokens = torch.empty_like(values, dtype=torch.int64)
    given = (logits.data_ptr(), *logits.shape, count, values.data_ptr(), tokens.data_ptr())
    _library().largest(*given, torch.get_num_threads())
    return values, tokens


def _library() -> ctypes.CDLL:
    library = native.library()
    assert library is not None  # refusal() has asked
    return library


# What the kernels are told of a model


def _seen(model: nn.Module) -> tuple[object, ...]:
    """Modules, hooks and addresses. A layer of 8 bits moves as a whole."""
    modules = parts(model)
    addresses = [native.address(x) for part in modules for x in part._parameters.values()]
    layers = [x.scale.data_ptr() for x in modules if type(x) is Int8Linear]
    return hooked(modules), modules, addresses, layers


def _block(block: nn.Module) -> native.Block:
    assert isinstance(block, Block)
    forward = block.feed_forward
    gated = isinstance(forward, GatedFeedForward)
    told = native.Block(
        self_attention=_attention(block.attention),
        expand=_linear(forward.expand),
        reduce=_linear(forward.reduce),
        self_norm=_norm(block.add_attention.norm),
        feed_forward_norm=_norm(block.add_feed_forward.norm),
        pre_norm=isinstance(block.add_attention, PreNorm),
        activation=ACTIVATIONS[nn.SiLU if gated else type(cast(nn.Module, forward.activation))],
    )
    if gated:
        told.gate = _linear(forward.gate)
    if block.cross is not None and block.add_cross is not None:
        told.cross_attention = _attention(block.cross)
        told.cross_norm = _norm(block.add_cross.norm)
    return told


def _attention(part: Any) -> native.Attention:
    beta = part.core.beta
    return native.Attention(
        *(part.heads, part.key_heads, part.key_width, part.value_width),
        1 / math.sqrt(part.key_width) if beta is None else float(beta),
        *map(_linear, (part.query, part.key, part.value, part.output)),
    )


def _linear(part: Any) -> native.Linear:
    assert isinstance(part, Int8Linear)
    return part.address()


def _norm(norm: Any) -> native.Norm:
    return (
        native.Norm(norm.weight.data_ptr(), norm.bias.data_ptr(), norm.eps)
        if norm
        else native.Norm()
    )
