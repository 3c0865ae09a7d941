"""The eager engine: runs the model's own modules, for every model on every device.

The reference for the other engines. It uses the model's own KV cache.
"""

import itertools
import math
from contextlib import nullcontext
from typing import cast
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.attention.checks import integer_tensor
from regard.attention.core import Inputs, Observer, check_core, observe
from regard.attention.mask import PackedLengths
from regard.attention.multihead import MultiHeadAttention
from regard.attention.sync import on_host
from regard.decode.engine.parts import Model, target
from regard.decode.engine.session import Session
from regard.machine.threads import Threads
from regard.model.block import Block
from regard.model.language import LanguageModel
from regard.model.lengths import Lengths
from regard.model.transformer import Transformer


class EagerEngine:
    """Runs any Transformer or LanguageModel in evaluation mode."""

    name = "eager"

    def __init__(self, reason: str = "the reference"):
        self.reason = reason

    def current(self, model: Model) -> bool:
        return False  # a faster engine may have become possible, and a new eager one is free

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
        attention: bool = False,
    ) -> "EagerSession":
        if isinstance(model, LanguageModel):
            return EagerSession(model, rows or 1)
        assert source is not None
        kind = AttentiveSession if attention else ReadingSession
        with threads(model).spared(source.numel()):
            return kind(model, *encode(model, source, lengths))

    def rows(self, length: int) -> int | None:
        return None


# A session is opened for every batch, but the best number of threads is measured once per model.
_threads: "WeakKeyDictionary[nn.Module, Threads]" = WeakKeyDictionary()


def threads(model: Model) -> Threads:
    if model not in _threads:
        _threads[model] = Threads(weights=sum(weight.numel() for weight in model.parameters()))
    return _threads[model]


def encode(
    model: Transformer, source: Tensor, lengths: Lengths
) -> tuple[Float[Tensor, "M S D"], Int[Tensor, "M"] | None]:
    """The memory, one row for each source, and its lengths."""
    memory = model.encode(source, lengths)
    lengths = model.memory_lengths(lengths)
    if isinstance(lengths, PackedLengths):
        return unpack(memory, lengths), lengths.lengths.to(memory.device)
    if lengths is None:
        return memory, None
    return memory, integer_tensor(lengths, "source_lengths").to(memory.device)


class EagerSession(Session):
    """A language model's rows."""

    def __init__(self, model: Model, rows: int):
        table = target(model).table.weight
        self.model, self.rows, self.device = model, rows, table.device
        self.vocabulary = model.config.vocabulary
        self.scores = torch.promote_types(table.dtype, torch.float32)
        self.cache = model.cache()
        on_cpu = table.device.type == "cpu"
        self._shared = threads(model).shared if on_cpu else lambda rows: nullcontext()

    @torch.no_grad()
    def prefill(self, tokens: Int[Tensor, "R n"], counts: Int[Tensor, "R"]) -> None:
        self._check(tokens)
        with threads(self.model).spared(tokens.numel()):
            self._states(tokens.to(self.device))
        if int(counts.min()) < tokens.shape[1]:
            self.cache.trim(counts.to(self.device))

    @torch.no_grad()
    def step(self, tokens: Int[Tensor, "R"]) -> Float[Tensor, "R N"]:
        self._check(tokens)
        with self._shared(self.rows):
            return self.model.output(self._states(tokens.to(self.device)[:, None])[:, -1])

    def select(self, rows: Int[Tensor, "R"]) -> None:
        self.cache.select(self._chosen(rows))
        self.rows = len(rows)

    def check_join(self, other: Session) -> None:
        if not isinstance(other, EagerSession) or other.model is not self.model:
            raise ValueError("only sessions of one model can be joined; open both with the same")
        for session in (self, other):
            if any(block.own.held is None for block in session.cache.blocks):
                raise ValueError("a session joins after its first step; take one with both first")

    def join(self, other: Session) -> None:
        self.check_join(other)
        self.cache.join(cast(EagerSession, other).cache)
        self.rows += other.rows

    def _states(self, tokens: Int[Tensor, "R n"]) -> Float[Tensor, "R n D"]:
        assert isinstance(self.model, LanguageModel)
        return self.model.states(tokens, cache=self.cache)


class ReadingSession(EagerSession):
    """The rows of a decoder, with the encoded sources.

    The cross-attention KV cache holds each source once, however many beams attend to it: rows that
    are repeated one after the other share it from then on.
    """

    def __init__(self, model: Transformer, memory: Tensor, lengths: Tensor | None):
        super().__init__(model, len(memory))
        self.memory: Tensor | None = memory
        self.lengths = lengths
        self.sources = len(memory)
        self.beams = 1

    def _states(self, tokens: Int[Tensor, "R n"]) -> Float[Tensor, "R n D"]:
        assert isinstance(self.model, Transformer)
        states = self.model.decoder_states(
            tokens, self.memory, memory_lengths=self.lengths, cache=self.cache
        )
        self.memory = None  # its keys and values are in the cache
        return states

    def select(self, rows: Int[Tensor, "R"]) -> None:
        rows = self._chosen(rows)
        sources, beams = _sources(rows, self.sources, self.beams)
        if self.memory is not None:  # keys and values have not been computed yet
            rows = rows.to(self.memory.device)
            self.memory, sources, beams = self.memory.index_select(0, rows), rows, 1
        self.cache.share(rows, sources, beams)
        self.rows, self.beams = len(rows), beams
        if sources is not None:
            self.sources = len(sources)
            if self.lengths is not None:
                self.lengths = self.lengths.index_select(0, sources.to(self.lengths.device))

    def join(self, other: Session) -> None:
        self.check_join(other)
        sessions = [self, cast(ReadingSession, other)]
        for session in sessions:
            session._part()
        ends = [session._ends() for session in sessions]
        super().join(other)
        self.sources = self.rows
        self.lengths = torch.cat(ends)

    def _part(self) -> None:
        """Copies the sources, so that each row has its own."""
        if self.beams > 1:
            each = torch.arange(self.rows) // self.beams
            for block in self.cache.blocks:
                block.cross.share(each, 1)
            if self.lengths is not None:
                self.lengths = self.lengths[each.to(self.lengths.device)]
            self.beams, self.sources = 1, self.rows

    def _ends(self) -> Tensor:
        """The length of each row's source."""
        if self.lengths is not None:
            return self.lengths
        pair = self.cache.blocks[0].cross.held
        assert pair is not None
        return torch.full((self.rows,), pair[0].shape[-2], device=self.device)


class AttentiveSession(ReadingSession):
    """A ReadingSession with the last block's cross-attention weights, averaged over heads."""

    def __init__(self, model: Transformer, memory: Tensor, lengths: Tensor | None):
        super().__init__(model, memory, lengths)
        self.attention = memory.new_zeros(memory.shape[:2])
        layer = len(model.decoder.blocks) - 1
        cross = cast(MultiHeadAttention, cast(Block, model.decoder.blocks[layer]).cross)
        check_core(cross.core, f"decoder.blocks.{layer}.cross")
        self._core = cross.core

    @property
    def real(self) -> Tensor:
        """True for real source positions, False in padding."""
        if self.lengths is None:
            return torch.ones((), dtype=torch.bool, device=self.attention.device)
        places = torch.arange(self.attention.shape[-1], device=self.lengths.device)
        return (places < self.lengths[:, None]).repeat_interleave(self.beams, 0)

    def _states(self, tokens: Int[Tensor, "R n"]) -> Float[Tensor, "R n D"]:
        with observe({self._core: Observer(see=self._average)}):
            return super()._states(tokens)

    def _average(self, inputs: Inputs) -> None:
        query, key, _, mask, bias = inputs
        weights_MHLS = self._core.weights(query, key, mask, bias)
        # Beams of one source are queries of one row here.
        beams_RLS = weights_MHLS.mean(1).unflatten(1, (self.beams, -1)).flatten(0, 1)
        self.attention = beams_RLS[:, -1]


def unpack(x: Tensor, lengths: PackedLengths) -> Tensor:
    """(1, T, ...) as (B, S, ...): one sequence per row, padded with zeros."""
    lengths = lengths.to(x.device)
    rows = x.new_zeros(len(lengths), lengths.longest, *x.shape[2:])
    rows[lengths.sequence(), lengths.positions()[0]] = x[0]
    return rows


def _sources(rows: Tensor, sources: int, beams: int) -> tuple[Tensor | None, int]:
    """The sources that these rows read, and the number of consecutive rows that read each.

    None if the sources stay unchanged. Rows on a device are not read back: they are assumed to be
    beams that stay within their sentence, and an assertion on the device checks it.
    """
    if on_host(rows):
        of = [row // beams for row in rows.tolist()]
        beams = math.gcd(*(len(list(run)) for _, run in itertools.groupby(of))) or 1
        remaining = of[::beams]
        same = remaining == list(range(sources))
        return None if same else torch.tensor(remaining).long(), beams
    if beams == 1 or len(rows) != sources * beams:
        return rows // beams, 1
    place = torch.arange(len(rows), device=rows.device)
    torch._assert_async((rows // beams == place // beams).all())
    return None, beams
