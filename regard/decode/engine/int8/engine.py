"""Models with 8-bit weights in compiled kernels: one call for all blocks of a step.

What a block is, `model/block.py` says; here the same modules are handed to kernels.cpp as
addresses. No padding is computed. Keys and values lie in slots of a buffer, and each row has a list
of the slots that hold its own: beams are reordered, and rows leave, without moving any.
"""

import ctypes
import math
import weakref
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor, nn

from regard.attention.host import integers
from regard.attention.mask import Packed
from regard.attention.multihead import MultiHeadAttention
from regard.attention.position import Rotary, Sinusoidal
from regard.decode.engine.int8 import library as native
from regard.decode.engine.int8.linear import Int8Linear
from regard.decode.engine.int8.structure import ACTIVATIONS, hooked, parts, unknown
from regard.decode.engine.session import Session
from regard.decode.search import topk
from regard.decode.search.constraints import Constraints
from regard.model.block import Block, FeedForward, GatedFeedForward, PreNorm
from regard.model.embedding import Tokens
from regard.model.language import LanguageModel
from regard.model.lengths import Lengths, places
from regard.model.stack import Stack
from regard.model.transformer import Transformer

Model = Transformer | LanguageModel
Integers = NDArray[np.int64]


class Int8Engine:
    """A model's stacks as the kernels know them: parts of the model, but not the model."""

    name = "int8"

    def __init__(self, model: Model):
        if refusal := self.refusal(model):
            raise ValueError(f"the kernels for 8-bit layers cannot run this model: {refusal}")
        self.reason = f"8-bit weights, kernels for {native.kernels().isa}"
        self.encoder = Blocks(model.encoder) if isinstance(model, Transformer) else None
        self.decoder = Blocks(model.decoder)
        self.tokens = model.target if isinstance(model, Transformer) else model.tokens
        self.output = cast(Int8Linear, model.output)
        self.buffers = Buffers()
        self._sines = torch.empty(0)
        self._seen = _seen(model)

    @staticmethod
    def refusal(model: nn.Module) -> str:
        """Why the kernels cannot run it, in one line; nothing where they can."""
        if reason := native.missing():
            return reason
        if type(model) not in (Transformer, LanguageModel):
            return f"a {type(model).__name__} is neither a Transformer nor a LanguageModel"
        model = cast(Model, model)
        if type(model.output) is not Int8Linear:
            return "its output layer is not of 8 bits; call int8(model) first"
        if hooked(parts(model)):
            return "one of its modules has a forward hook"
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            number = not tensor.is_floating_point() or tensor.dtype == torch.float32
            if not (number and tensor.is_contiguous() and tensor.device.type == "cpu"):
                return f"{name} is {tensor.dtype} on {tensor.device}, not contiguous float32"
        across = isinstance(model, Transformer)
        if across and (reason := unknown(model.encoder, Int8Linear, cross=False)):
            return f"in the encoder, {reason}"
        if reason := unknown(model.decoder, Int8Linear, cross=across):
            return f"in the decoder, {reason}"
        tokens = model.target if isinstance(model, Transformer) else model.tokens
        if type(tokens) is not Tokens:
            return f"its tokens are embedded by a {type(tokens).__name__}"
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
        blocks, memory = self.decoder, None
        if isinstance(model, Transformer) and self.encoder is not None and source is not None:
            counts, x = _end_to_end(model.source(source, places(lengths, source)), lengths)
            rows, threads = len(counts), torch.get_num_threads()
            encoded = Cache(self.buffers, self.encoder.count, self.encoder.self_width, rows)
            self.encoder.run(x, *encoded.extend(counts), encoded, causal=False)
            memory = Cache(self.buffers, blocks.count, blocks.cross_width, rows)
            slots = memory.table[memory.extend(counts)]
            _library().project_memory(
                *(blocks.array, blocks.count, x.data_ptr(), len(x), memory.data.data_ptr()),
                *(memory.data.shape[1], slots.ctypes.data, threads),
            )
        if rows is None:
            raise ValueError("a session needs a source, or the number of rows of a language model")
        cache = Cache(self.buffers, blocks.count, blocks.self_width, rows)
        cache.reserve(rows * beams * min(length, 64))
        return Int8Session(self, cache, memory)

    def embed(self, tokens: Int[Tensor, "T"], position: Integers) -> Float[Tensor, "T D"]:
        """As the model does, but with sines that were computed before."""
        part, at = self.tokens, torch.from_numpy(position)
        sines = self._sines
        if type(part.position) is not Sinusoidal:
            return part(tokens[None], at[None])[0].contiguous()
        if len(sines) <= (most := int(position.max(initial=0))):
            sines = part.position.encoding(torch.arange(max(64, 2 * most)), torch.float32)
            self._sines = sines
        try:
            x = F.embedding(tokens, part.table.weight)
        except IndexError:
            return part(tokens[None], at[None])[0]  # says what is wrong
        return x.mul_(part.scale).add_(sines[at])


class Int8Session(Session):
    """Rows in the kernels, each with slots and a source of its own."""

    device = torch.device("cpu")

    def __init__(self, engine: Int8Engine, cache: "Cache", memory: "Cache | None"):
        self.engine, self.cache, self.memory = engine, cache, memory
        self.rows, self.vocabulary = len(cache.lengths), engine.output.out_features

    def prefill(self, tokens: Int[Tensor, "R n"], counts: Int[Tensor, "R"]) -> None:
        self._check(tokens)
        counts = counts.long().cpu()
        self._read(tokens.cpu()[torch.arange(tokens.shape[1]) < counts[:, None]], counts.numpy())

    def step(self, tokens: Int[Tensor, "R"]) -> Float[Tensor, "R N"]:
        self._check(tokens)
        logits = self.engine.buffers.take((self.rows, self.vocabulary), np.float32)
        self._read(tokens.cpu(), np.ones(self.rows, np.int64), logits)
        return logits

    @torch.no_grad()
    def _read(self, tokens: Tensor, counts: Integers, logits: Tensor | None = None) -> None:
        sequence, position = self.cache.places(counts)
        x = self.engine.embed(tokens, position)  # before anything changes: it may refuse tokens
        self.cache.extend(counts)
        output = None if logits is None else self.engine.output.address()
        self.engine.decoder.run(
            x, sequence, position, self.cache, self.memory, output=output, logits=logits
        )

    def select(self, rows: Int[Tensor, "R"]) -> None:
        chosen = self._chosen(rows.cpu()).numpy()
        self.rows = len(chosen)
        for cache in filter(None, (self.cache, self.memory)):
            cache.select(chosen)

    def join(self, other: Session) -> None:
        if not isinstance(other, Int8Session) or other.engine is not self.engine:
            raise ValueError("only sessions of one engine can be joined; open both with this one")
        self.rows += other.rows
        self.cache.join(other.cache)
        if self.memory is not None and other.memory is not None:
            self.memory.join(other.memory)
        other.close()

    def best(
        self, logits: Float[Tensor, "R N"], count: int, rule: Constraints, t: int
    ) -> topk.Best:
        return topk.best(logits, count, rule, t, _log_sums, _largest)

    def close(self) -> None:
        self.select(torch.empty(0, dtype=torch.int64))
        for cache in filter(None, (self.cache, self.memory)):
            cache.shrink()


class Cache:
    """Keys and values in slots, and for each row a list of the slots that hold its own.

    Rows with a common past list the same slots. Those that no row lists any more are used again.
    """

    def __init__(self, buffers: "Buffers", blocks: int, width: int, rows: int):
        self.buffers = buffers
        self.data = torch.empty(blocks, 0, width, dtype=torch.float16)
        self.table = np.zeros((rows, 32), np.int32)
        self.lengths: Integers = np.zeros(rows, np.int64)
        self._free = np.zeros(0, np.int32)

    def places(self, counts: Integers) -> tuple[Integers, Integers]:
        """The row and the position of each token, where row r goes on with counts[r] of them."""
        sequence = np.repeat(np.arange(len(counts)), counts)
        first = self.lengths - (np.cumsum(counts) - counts)
        return sequence, np.arange(len(sequence)) + first[sequence]

    def extend(self, counts: Integers) -> tuple[Integers, Integers]:
        """Lists slots for so many more tokens of each row."""
        sequence, position = self.places(counts)
        self.reserve(len(sequence))
        if (most := int(position.max(initial=0)) + 1) > self.table.shape[1]:
            self._widen(max(most, 2 * self.table.shape[1]))
        self.table[sequence, position] = self._free[: len(sequence)]
        self._free = self._free[len(sequence) :]
        self.lengths = self.lengths + counts
        return sequence, position

    def reserve(self, count: int) -> None:
        """Has so many slots free."""
        if count <= len(self._free):
            return
        blocks, slots, width = self.data.shape
        used = np.zeros(slots, bool)
        used[self.table[self._listed()]] = True
        live = int(used.sum())
        # Looking for free slots pays where there are many; otherwise there have to be more.
        if live + count > slots - slots // 4:
            data = self.buffers.take((blocks, max(2 * slots, live + count), width), np.float16)
            data[:, :slots] = self.data
            self.data = data
            used = np.pad(used, (0, data.shape[1] - slots))
        self._free = np.flatnonzero(~used).astype(np.int32)

    def select(self, rows: Integers) -> None:
        self.table, self.lengths = self.table[rows], self.lengths[rows]

    def join(self, other: "Cache") -> None:
        theirs = np.unique(other.table[other._listed()])
        self.reserve(len(theirs))
        ours, self._free = self._free[: len(theirs)], self._free[len(theirs) :]
        self.data[:, torch.from_numpy(ours).long()] = other.data[:, torch.from_numpy(theirs).long()]
        renumbered = np.zeros(other.data.shape[1] + 1, np.int32)
        renumbered[theirs] = ours
        width = max(self.table.shape[1], other.table.shape[1])
        self._widen(width)
        other._widen(width)
        table = np.where(other._listed(), renumbered[other.table], 0)
        self.table = np.concatenate((self.table, table.astype(np.int32)))
        self.lengths = np.concatenate((self.lengths, other.lengths))

    def _listed(self) -> NDArray[np.bool_]:
        return np.arange(self.table.shape[1]) < self.lengths[:, None]

    def _widen(self, width: int) -> None:
        self.table = np.pad(self.table, ((0, 0), (0, width - self.table.shape[1])))

    def shrink(self) -> None:
        self.data, self._free = self.data[:, :0].clone(), self._free[:0]

    def address(self) -> native.Cache:
        """What the kernels are told of it."""
        return native.Cache(
            *(self.data.data_ptr(), self.data.shape[1]),
            *(self.table.ctypes.data, self.table.shape[1], self.lengths.ctypes.data),
        )


class Buffers:
    """Memory for tensors, used again when nobody holds them: fresh pages cost more than a step."""

    KEPT = 4

    def __init__(self) -> None:
        self._free: list[NDArray[np.uint8]] = []

    def take(self, shape: tuple[int, ...], dtype: type[np.generic]) -> Tensor:
        """Any values; they are the caller's until the last tensor that shares them is gone."""
        size = math.prod(shape) * np.dtype(dtype).itemsize
        fits = [buffer for buffer in self._free if buffer.size >= size]
        if fits:
            buffer = min(fits, key=len)
            self._free = [one for one in self._free if one is not buffer]
        else:
            buffer = np.empty(size, np.uint8)
        view = buffer[:size].view(dtype).reshape(shape)
        weakref.finalize(view, self._give_back, buffer).atexit = False
        return torch.from_numpy(view)

    def _give_back(self, buffer: NDArray[np.uint8]) -> None:
        self._free = sorted([*self._free, buffer], key=len)[-self.KEPT :]


class Blocks:
    """A stack's addresses, and the positions that its blocks rotate by."""

    def __init__(self, stack: Stack):
        self.count = len(stack.blocks)
        self.array = (native.Block * self.count)(*map(_block, stack.blocks))
        self.norm = _norm(stack.norm)
        first = self.array[0]
        self.self_width = _library().slot_width(first.self_attention)
        self.cross_width = _library().slot_width(first.cross_attention)
        position = cast(MultiHeadAttention, cast(Block, stack.blocks[0]).attention).position
        self.rotary = position if isinstance(position, Rotary) else None
        self._turns = torch.empty(0)

    def run(
        self,
        x: Float[Tensor, "T D"],
        sequence: Integers,
        position: Integers,
        cache: Cache,
        memory: Cache | None = None,
        *,
        causal: bool = True,
        output: native.Linear | None = None,
        logits: Tensor | None = None,
    ) -> None:
        turns = self._rotations(int(position.max(initial=0)) + 1)
        tokens = native.Tokens(
            count=len(x),
            width=x.shape[1],
            causal=causal,
            x=x.data_ptr(),
            sequence=sequence.ctypes.data,
            position=position.ctypes.data,
            cache=cache.address(),
        )
        if memory is not None:
            tokens.memory = memory.address()
        if self.rotary is not None:
            halves = self.rotary.layout == "halves"
            tokens.rotary = native.Rotary(turns.data_ptr(), self.rotary.width // 2, halves)
        given = (self.array, self.count, tokens, self.norm, output, native.address(logits))
        _library().run(*given, torch.get_num_threads())

    def _rotations(self, length: int) -> Tensor:
        """cos and sin of at least so many positions, (positions, 2, pairs)."""
        if self.rotary is not None and len(self._turns) < length:
            pairs, halves = self.rotary.width // 2, self.rotary.layout == "halves"
            # What (1, 0) becomes is cos and sin.
            one = torch.tensor([1.0, 0.0])
            one = one.repeat_interleave(pairs) if halves else one.repeat(pairs)
            turned = self.rotary.rotate(one.expand(max(64, 2 * length), -1))
            turned = turned.unflatten(1, (2, pairs) if halves else (pairs, 2))
            self._turns = (turned if halves else turned.transpose(1, 2)).contiguous()
        return self._turns


def _end_to_end(x: Tensor, lengths: Lengths) -> tuple[Integers, Tensor]:
    """How long each sequence is, and their real tokens as rows of one matrix of its own."""
    B, S = x.shape[:2]
    if lengths is None:
        counts, rows = torch.full((B,), S), x.flatten(0, 1)
    elif isinstance(lengths, Packed):
        counts, rows = lengths.lengths.long().cpu(), x[0]
    else:
        counts = integers(lengths, "source_lengths").long().cpu()
        rows = x[torch.arange(S) < counts[:, None]]
    # The kernels write into it. Under autocast, images and sounds come in fewer bits.
    own = rows.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    return counts.numpy(), own


def _log_sums(logits: Float[Tensor, "R N"]) -> Float[Tensor, "R"]:
    if logits.dtype != torch.float32:
        return topk.log_sums(logits)
    logits, sums = logits.contiguous(), logits.new_empty(len(logits))
    _library().log_sums(logits.data_ptr(), *logits.shape, sums.data_ptr(), torch.get_num_threads())
    return sums


def _largest(logits: Float[Tensor, "R N"], count: int) -> topk.Best:
    if logits.dtype != torch.float32:
        return topk.largest(logits, count)
    logits, values = logits.contiguous(), logits.new_empty(len(logits), count)
    tokens = torch.empty(len(logits), count, dtype=torch.int64)
    _library().largest(
        *(logits.data_ptr(), *logits.shape, count),
        *(values.data_ptr(), tokens.data_ptr(), torch.get_num_threads()),
    )
    return values, tokens


def _library() -> ctypes.CDLL:
    library = native.library()
    assert library is not None  # refusal() has asked
    return library


# What the kernels are told of a model


def _seen(model: nn.Module) -> tuple[object, ...]:
    """Modules, hooks and addresses: of a layer one is enough, since it moves as a whole."""
    modules = parts(model)
    addresses = [
        native.address(tensor)
        for part in modules
        for tensor in (
            (part._buffers["scale"],)
            if type(part) is Int8Linear
            else part._parameters.values()
            if type(part) is nn.LayerNorm
            else ()
        )
    ]
    return hooked(modules), modules, addresses


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
        gated=gated,
    )
    if gated:
        told.gate = _linear(forward.gate)
    if block.cross is not None and block.add_cross is not None:
        told.has_cross = True
        told.cross_attention = _attention(block.cross)
        told.cross_norm = _norm(block.add_cross.norm)
    return told


def _attention(part: Any) -> native.Attention:
    beta = part.core.beta
    return native.Attention(
        heads=part.heads,
        key_heads=part.key_heads,
        key_width=part.key_width,
        value_width=part.value_width,
        beta=1 / math.sqrt(part.key_width) if beta is None else float(beta),
        **{name: _linear(getattr(part, name)) for name in ("query", "key", "value", "output")},
    )


def _linear(part: Any) -> native.Linear:
    assert isinstance(part, Int8Linear)
    return part.address()


def _norm(norm: Any) -> native.Norm:
    if norm is None:
        return native.Norm(None, None, 0.0)
    return native.Norm(norm.weight.data_ptr(), norm.bias.data_ptr(), norm.eps)
