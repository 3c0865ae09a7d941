"""An 8-bit Transformer's step in one call, behind the same face as any other step.

What a block is, `model/block.py` says; here the same modules are handed to kernels.cpp as
addresses. No padding is computed, and reordering beams moves no keys or values: each row has a
list of the rows, among all that were ever computed, which hold its own past.
"""

import math
from collections.abc import Iterable, Iterator
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Int
from torch import Tensor, nn

from regard.attention.host import integers, shown
from regard.attention.mask import Packed
from regard.attention.multihead import Core, MultiHeadAttention
from regard.attention.position import Rotary, Sinusoidal
from regard.decode.engine.int8 import library as native
from regard.decode.engine.int8.linear import Int8Linear
from regard.model.block import Block, FeedForward, GatedFeedForward, PostNorm, PreNorm
from regard.model.embedding import Tokens
from regard.model.lengths import Lengths, places
from regard.model.stack import Stack
from regard.model.transformer import Transformer

_ACTIVATIONS: dict[type[nn.Module], int] = {nn.ReLU: 1, nn.GELU: 2, nn.SiLU: 3}
_GATED = 3


class Blocks:
    """A stack's addresses, and the tensors that have to stay where they are."""

    def __init__(self, stack: Stack):
        self.stack = stack
        self.count = len(stack.blocks)
        first = cast(MultiHeadAttention, cast(Block, stack.blocks[0]).attention)
        self.width = first.width
        self.kept = first.key_heads * (first.key_width + first.value_width)
        self.blocks = (native.Block * self.count)(*map(_block, stack.blocks))
        self.norm = _norm(stack.norm)
        rotary = first.position
        self.rotary = rotary if isinstance(rotary, Rotary) else None
        self._turns = [torch.empty(0)]

    def reach(self, length: int) -> None:
        """Have rotary positions for so many tokens."""
        if self.rotary is None or len(self._turns[-1]) >= length:
            return
        rotary, pairs = self.rotary, self.rotary.width // 2
        length = max(length, 2 * len(self._turns[-1]), 64)
        halves = rotary.layout == "halves"
        # What (1, 0) becomes is cos and sin.
        ones = torch.tensor([1.0, 0.0])
        ones = ones.repeat_interleave(pairs) if halves else ones.repeat(pairs)
        turned = rotary.rotate(ones.expand(length, -1))
        turns = turned.view(length, *((2, pairs) if halves else (pairs, 2)))
        turns = (turns if halves else turns.transpose(1, 2)).contiguous()
        # Another thread may still be reading the shorter ones.
        self._turns.append(turns)
        for block in self.blocks:
            block.own.turn = turns.data_ptr()
            block.own.turned, block.own.halves = rotary.width, halves

    def run(
        self, rows: native.Rows, output: native.Linear | None = None, to: Tensor | None = None
    ) -> None:
        library = native.library()
        assert library is not None
        given = (self.blocks, self.count, rows, self.norm, output, native.address(to))
        library.run(*given, torch.get_num_threads())


class Fused:
    """A Transformer whose stacks run in the kernels."""

    def __init__(self, model: Transformer):
        self.encoder, self.decoder = Blocks(model.encoder), Blocks(model.decoder)
        self.output = cast(Int8Linear, model.output)
        self._places = torch.empty(0)

    def encode(self, model: Transformer, source: Tensor, lengths: Lengths) -> tuple[Tensor, Tensor]:
        """The memory of all sources end to end, (T, D), and how long each is."""
        x = model.source(source, places(lengths, source))
        counts, x = _end_to_end(x, lengths)
        start = counts.cumsum(0) - counts
        of = torch.repeat_interleave(counts)  # the sequence that each token is in
        place = torch.arange(len(x)) - start[of]
        start, count = start[of], counts[of]
        self.encoder.reach(int(counts.max()) if len(counts) else 0)
        kept = torch.empty(self.encoder.count, len(x), self.encoder.kept, dtype=torch.float16)
        rows = native.Rows(
            rows=len(x),
            width=x.shape[1],
            x=x.data_ptr(),
            kept=kept.data_ptr(),
            room=len(x),
            start=start.data_ptr(),
            count=count.data_ptr(),
            place=place.data_ptr(),
        )
        self.encoder.run(rows)
        return x, counts

    def embed(self, target: Tokens, tokens: Tensor, at: int) -> Tensor:
        """(n, R, D), as `target` gives it, but with positions that were computed before."""
        n, places = tokens.shape[1], self._places
        if type(target) is not Tokens or type(target.position) is not Sinusoidal:
            return target(tokens, at).transpose(0, 1).contiguous()
        if len(places) < at + n:
            zeros = target.table.weight.new_zeros(1, max(64, 2 * (at + n)), target.width)
            self._places = places = target.placed(zeros, 0)[0]
        try:
            x = target.table(tokens.T)
        except IndexError:
            return target(tokens, at)  # says what is wrong
        return x.mul_(target.scale).add_(places[at : at + n, None])

    def remember(self, memory: Tensor) -> Tensor:
        """The keys and values that each block's cross-attention reads of it."""
        library = native.library()
        assert library is not None
        cross = self.decoder.blocks[0].cross
        size = (self.decoder.count, len(memory), cross.key.out + cross.value.out)
        held = torch.empty(size, dtype=torch.float16)
        blocks, count = self.decoder.blocks, self.decoder.count
        threads = torch.get_num_threads()
        library.remember(blocks, count, memory.data_ptr(), len(memory), held.data_ptr(), threads)
        return held

    def step(self, x: Tensor, state: "FusedReading", logits: bool) -> Tensor | None:
        """One token of every row."""
        self.decoder.reach(state.length + 1)
        state.grow(len(x))
        rows = native.Rows(
            rows=len(x),
            width=x.shape[1],
            x=x.data_ptr(),
            kept=state.kept.data_ptr(),
            room=state.kept.shape[1],
            base=state.used,
            table=state.table.data_ptr(),
            columns=state.table.shape[1],
            filled=state.length + 1,
            memory=state.memory.data_ptr(),
            places=state.memory.shape[1],
            memory_start=state.start.data_ptr(),
            memory_count=state.count.data_ptr(),
        )
        out = state.logits(len(x), self.output.out_features) if logits else None
        self.decoder.run(rows, self.output.address() if logits else None, out)
        state.used += len(x)
        state.length += 1
        return out


class FusedReading:
    """What rows have written, and the sources that they read."""

    def __init__(self, memory: Tensor, count: Tensor, blocks: int, kept: int, columns: int):
        self.memory, self.count = memory, count
        self.start = count.cumsum(0) - count
        self.length = self.used = 0
        self.kept = memory.new_empty(blocks, 0, kept)
        self.table = torch.empty(len(count), columns, dtype=torch.int32)
        self._logits: list[Tensor] = []

    def logits(self, rows: int, vocabulary: int) -> Tensor:
        """Room that is used again the time after next: fresh memory would cost too much."""
        if not self._logits or len(self._logits[0]) < rows:
            self._logits = [torch.empty(rows, vocabulary) for _ in range(2)]
        self._logits.reverse()
        return self._logits[0][:rows]

    def select(self, rows: Int[Tensor, "R"]) -> None:
        rows = integers(rows, "rows").cpu()
        held = len(self.table)
        if rows.numel() and not 0 <= int(rows.min()) <= int(rows.max()) < held:
            raise ValueError(
                f"rows ({shown(rows)}) must lie from 0 to {held - 1}: the state holds {held} rows"
            )
        self.table = self.table.index_select(0, rows)
        self.start, self.count = self.start.index_select(0, rows), self.count.index_select(0, rows)

    def grow(self, rows: int) -> None:
        """Have room for one more token of so many rows."""
        blocks, room, width = self.kept.shape
        if self.used + rows > room:
            fresh = self.kept.new_empty(blocks, max(2 * room, self.used + 16 * rows), width)
            fresh[:, : self.used] = self.kept[:, : self.used]
            self.kept = fresh
        R, columns = self.table.shape
        if self.length == columns:
            fresh = self.table.new_empty(R, 2 * columns)
            fresh[:, :columns] = self.table
            self.table = fresh


def translation(
    model: Transformer, source: Tensor, lengths: Lengths, capacity: int | None
) -> tuple[Any, FusedReading] | None:
    """As `step.translation`; None for a model that the kernels do not know."""
    fused = _fused(model)
    if fused is None:
        return None
    memory, counts = fused.encode(model, source, lengths)
    blocks, kept = fused.decoder.count, fused.decoder.kept
    state = FusedReading(fused.remember(memory), counts, blocks, kept, capacity or 32)

    def step(tokens: Tensor, state: FusedReading) -> tuple[Tensor, FusedReading]:
        R, n = tokens.shape
        if len(state.table) != R:
            raise ValueError(f"tokens of {R} rows for a state of {len(state.table)}; select() them")
        x_nRD = fused.embed(model.target, tokens, state.length)
        for m, x in enumerate(x_nRD):
            logits = fused.step(x, state, logits=m == n - 1)
        assert logits is not None
        return logits, state

    return step, state


def _end_to_end(x: Tensor, lengths: Lengths) -> tuple[Tensor, Tensor]:
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
    return counts, rows.to(torch.float32, copy=True, memory_format=torch.contiguous_format)


# Which models the kernels know

_known: "WeakKeyDictionary[Transformer, tuple[Any, Fused | None]]" = WeakKeyDictionary()


def _fused(model: Transformer) -> Fused | None:
    if not isinstance(model.output, Int8Linear) or native.library() is None:
        return None
    modules = parts(model)
    if heard(modules):
        return None
    # The kernels know where tensors lie, and are told again when they have moved.
    now = modules, [native.address(tensor) for part in modules for tensor in _held(part)]
    before, fused = _known.get(model, (None, None))
    if before != now:
        usual = all(map(_usual, (*model.parameters(), *model.buffers())))
        fused = Fused(model) if usual and known(model, Int8Linear) else None
        _known[model] = now, fused
    return fused


def _held(part: nn.Module) -> Iterable[Tensor | None]:
    """Of what the kernels know, enough to tell whether it has moved: a layer moves as a whole."""
    if type(part) is Int8Linear:
        return (part._buffers["scale"],)
    return part._parameters.values() if type(part) is nn.LayerNorm else ()


def _usual(tensor: Tensor) -> bool:
    number = not tensor.is_floating_point() or tensor.dtype == torch.float32
    return number and tensor.is_contiguous() and tensor.device.type == "cpu"


def parts(model: nn.Module) -> list[nn.Module]:
    """All modules below it, as `modules()` gives them, but ten times as fast."""
    found, waiting = [], [part for part in model._modules.values() if part is not None]
    while waiting:
        part = waiting.pop()
        found.append(part)
        waiting.extend(child for child in part._modules.values() if child is not None)
    return found


def heard(modules: list[nn.Module]) -> bool:
    """Whether somebody listens to what happens inside."""
    return any(part._forward_hooks or part._forward_pre_hooks for part in modules)


def known(model: Transformer, linear: type[nn.Module]) -> bool:
    """Whether its stacks are what kernels compute."""
    reads = [block.cross is not None for block in model.encoder.blocks if isinstance(block, Block)]
    return not any(reads) and _stack(model.encoder, linear) and _stack(model.decoder, linear)


def _stack(stack: Stack, linear: type[nn.Module]) -> bool:
    final = stack.norm is None or _known_norm(stack.norm)
    blocks = [block for block in stack.blocks if isinstance(block, Block)]
    if not final or not blocks or len(blocks) != len(stack.blocks):
        return False
    # Blocks share one layout of what is kept, and one table of turns.
    known = all(_known_block(block, linear) for block in blocks)
    return known and len(set(map(_kind, blocks))) == 1


def _kind(block: Block) -> tuple[object, ...]:
    own, cross = cast(MultiHeadAttention, block.attention), block.cross
    widths = [
        (part.key_heads, part.key_width, part.value_width, part.source_width)
        for part in (own, cross)
        if isinstance(part, MultiHeadAttention)
    ]
    turned = own.position
    turns = (turned.width, turned.base, turned.layout) if isinstance(turned, Rotary) else None
    return type(block.add_attention), own.width, *widths, turns


def _known_norm(norm: nn.Module | Tensor) -> bool:
    return type(norm) is nn.LayerNorm and norm.weight is not None and norm.bias is not None


def _known_block(block: Block, linear: type[nn.Module]) -> bool:
    cross, forward = block.cross, block.feed_forward
    around = [block.add_attention, block.add_cross, block.add_feed_forward]
    residuals = [part for part in around if part is not None]
    if type(block) is not Block or type(residuals[0]) not in (PostNorm, PreNorm):
        return False
    if len(set(map(type, residuals))) > 1 or not all(_known_norm(part.norm) for part in residuals):
        return False
    bends = type(forward) is FeedForward and type(forward.activation) in _ACTIVATIONS
    if bends and isinstance(forward.activation, nn.GELU):
        bends = forward.activation.approximate == "none"
    return (
        (bends or type(forward) is GatedFeedForward)
        and _known_attention(block.attention)
        and (cross is None or (_known_attention(cross) and cross.position is None))
        and all(type(part) is linear for part in _linears(block))
    )


def _known_attention(part: nn.Module) -> bool:
    if type(part) is not MultiHeadAttention or type(part.core) is not Core:
        return False
    beta = part.core.beta
    finite = beta is None or (isinstance(beta, float | int) and 0 <= beta < math.inf)
    where = part.position is None or type(part.position) is Rotary
    return finite and where and part.core.score is None


def _linears(block: Block) -> Iterator[nn.Module]:
    for part in (block.attention, block.cross):
        if isinstance(part, MultiHeadAttention):
            yield from (part.query, part.key, part.value, part.output)
    forward = block.feed_forward
    if isinstance(forward, FeedForward | GatedFeedForward):
        yield from (forward.expand, forward.reduce)
    if isinstance(forward, GatedFeedForward):
        yield forward.gate


def _block(block: nn.Module) -> native.Block:
    assert isinstance(block, Block)
    forward = block.feed_forward
    gated = isinstance(forward, GatedFeedForward)
    given = native.Block(
        own=_attention(cast(MultiHeadAttention, block.attention)),
        expand=_linear(forward.expand),
        reduce=_linear(forward.reduce),
        own_norm=_norm(block.add_attention.norm),
        last_norm=_norm(block.add_feed_forward.norm),
        has_cross=block.cross is not None,
        pre=isinstance(block.add_attention, PreNorm),
        activation=_GATED if gated else _ACTIVATIONS[type(cast(nn.Module, forward.activation))],
        gated=gated,
    )
    if gated:
        given.gate = _linear(forward.gate)
    if block.cross is not None and block.add_cross is not None:
        given.cross = _attention(cast(MultiHeadAttention, block.cross))
        given.cross_norm = _norm(block.add_cross.norm)
    return given


def _attention(part: MultiHeadAttention) -> native.Attention:
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
