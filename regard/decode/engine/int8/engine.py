"""The int8 engine: quantized models in compiled kernels, with all blocks of a step in one call.

`model/block.py` defines a block; here the same modules are passed to kernels.cpp as addresses. No
padding is computed, and every row has its own length.
"""

from typing import Any, cast

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.attention.checks import integer_tensor
from regard.attention.mask import PackedLengths
from regard.decode.engine.int8 import library as native
from regard.decode.engine.int8 import search as searches
from regard.decode.engine.int8.cache import Buffers, Cache, Integers
from regard.decode.engine.int8.linear import Int8Linear
from regard.decode.engine.int8.stack import Blocks, Embedder, Vectors, kernels
from regard.decode.engine.int8.structure import unknown
from regard.decode.engine.parts import (
    Model,
    has_hooks,
    modules,
    overridden,
    reads_otherwise,
    target,
)
from regard.decode.engine.session import Rolling, Search, Session
from regard.decode.search import topk
from regard.decode.search.constraints import Constraints
from regard.model.embedding import Patches, Tokens
from regard.model.language import LanguageModel
from regard.model.lengths import Lengths, check_lengths, places
from regard.model.quantized import float_parts
from regard.model.transformer import Transformer

STEPS = 16
"""Steps that are taken in one call, at most; after it those who are finished can leave."""


class Int8Engine:
    """A model as the kernels know it. It holds parts of the model, but not the model."""

    name = "int8"

    def __init__(self, model: Model):
        if refusal := self.refusal(model):
            raise ValueError(f"the kernels for 8-bit layers cannot run this model: {refusal}")
        self.reason = f"8-bit weights, kernels for {native.kernels().isa}"
        # Kernels point to these tensors, even after a module is given others.
        self._held = [x.detach() for x in (*model.parameters(), *model.buffers())]
        self._identity = _identity(model)
        window = model.config.window
        self.tokens, self.decoder = Embedder(target(model)), Blocks(model.decoder, window)
        self.source = self.encoder = None
        if isinstance(model, Transformer):
            self.source = Embedder(model.source) if type(model.source) is Tokens else None
            self.encoder = Blocks(model.encoder, window)
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
        if not isinstance(model.output, Int8Linear):
            return "the output layer is not of 8 bits; call int8(model) first"
        if reason := reads_otherwise(model):
            return reason
        if reason := overridden(model):
            return reason
        for name, x in (*model.named_parameters(), *model.named_buffers()):
            number = not x.is_floating_point() or x.dtype == torch.float32
            if not (number and x.is_contiguous() and x.device.type == "cpu"):
                return f"{name} is {x.dtype} on {x.device}, not contiguous float32 on the cpu"
        if isinstance(model, Transformer) and (
            reason := unknown(model.encoder, Int8Linear, cross=False)
        ):
            return f"in the encoder, {reason}{_left(model)}"
        if reason := unknown(model.decoder, Int8Linear, cross=across):
            return f"in the decoder, {reason}{_left(model)}"
        if model.config.window is not None and isinstance(getattr(model, "source", None), Patches):
            return "the window of patches has rows and columns"
        if type(target(model)) is not Tokens:
            return f"tokens are embedded by a {type(target(model)).__name__}"
        return ""

    def current(self, model: Model) -> bool:
        """True if the model is unchanged since the engine was made."""
        return self._identity == _identity(model)

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
        """A session for the sources' rows, or for `rows` of a language model.

        To what `length` they will grow, and how many `beams` a source will have, are hints.
        """
        memory = None
        if isinstance(model, Transformer):
            if source is None:
                raise ValueError("a Transformer needs a source to read")
            memory = self._encode(model, source, lengths)
            rows = len(memory.lengths)
        cache = self.decoder.cache(self.buffers, 1 if rows is None else rows)
        cache.reserve(len(cache.lengths) * beams * min(length, 64))
        return Int8Session(self, cache, memory)

    def rows(self, length: int) -> int | None:
        return None

    def _encode(self, model: Transformer, source: Tensor, lengths: Lengths) -> Cache:
        """The keys and values that cross-attention reads of each source."""
        assert self.encoder is not None
        embedder = self.source if source.ndim == 2 and not source.is_floating_point() else None
        if embedder is None:
            source = model.source(source, places(lengths, source))
        else:
            check_lengths(lengths, source)
        counts, x = _end_to_end(source, lengths)
        encoded = self.encoder.cache(self.buffers, len(counts))
        memory = self.decoder.cache(self.buffers, len(counts), cross=True)
        at = encoded.places(counts)
        if embedder is None:
            # The kernels write into it. Under autocast, images and sounds come in fewer bits.
            vectors = Vectors(x.to(torch.float32, copy=True).contiguous())
        else:
            vectors = embedder.embed(x, at, torch.empty(len(x), self.encoder.width))
        for cache in (encoded, memory):
            cache.extend(at)
        self.encoder.run(vectors, at, encoded, causal=False)
        self.decoder.project_memory(cast(Tensor, vectors.x), at, memory)
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
        engine, at = self.engine, self.cache.places(counts)
        vectors = engine.tokens.embed(tokens, at)  # raises before anything changes
        self.cache.extend(at)
        output = None if logits is None else engine.output
        engine.decoder.run(vectors, at, self.cache, self.memory, output=output, logits=logits)

    def select(self, rows: Int[Tensor, "R"]) -> None:
        chosen = self._chosen(rows.cpu()).numpy()
        self.rows = len(chosen)
        for cache in self._caches():
            cache.select(chosen)

    def check_join(self, other: Session) -> None:
        if not isinstance(other, Int8Session) or other.engine is not self.engine:
            raise ValueError("only sessions of one engine can be joined; open both with the same")

    def join(self, other: Session) -> None:
        self.check_join(other)
        joined = cast(Int8Session, other)
        merged = [mine.merge(its) for mine, its in zip(self._caches(), joined._caches())]
        for cache, rows in zip(self._caches(), merged):
            cache.assign(rows)
        self.rows += other.rows
        other.close()

    def best(
        self, logits: Float[Tensor, "R N"], count: int, rule: Constraints, t: int
    ) -> topk.Best:
        if logits.dtype != torch.float32:
            return super().best(logits, count, rule, t)
        logits, count = logits.contiguous(), min(count, logits.shape[1])
        values = logits.new_empty(len(logits), count)
        tokens = torch.empty_like(values, dtype=torch.int64)
        each, struct = len(logits) // len(rule.most), searches.rule(rule, t)
        results = (each, t, count, values.data_ptr(), tokens.data_ptr())
        rows = (logits.data_ptr(), *logits.shape, struct)
        kernels().best_tokens(*rows, *results, torch.get_num_threads())
        return values, tokens

    @torch.no_grad()
    def advance(self, search: Search) -> None:
        """Several steps in one call, of the searches that the kernels know."""
        engine, steps = self.engine, 0
        if searches.known(search):
            steps = searches.steps_left(cast(searches.Known, search), STEPS)
        longest = int(self.cache.lengths.max(initial=0))
        if not (steps and engine.tokens.reaches(longest + steps)):
            super().advance(search)
            return
        if search.rows is not None:
            self.select(search.rows)
        self._check(search.last)
        cast(searches.Known, search).t += self._take(searches.of(cast(Any, search)), steps)

    @torch.no_grad()
    def roll(
        self, search: Rolling, places: Integers, last: Integers, steps: int = 1
    ) -> tuple[Integers, Integers]:
        longest = int(self.cache.lengths.max(initial=0))
        if not (searches.known(search) and self.engine.tokens.reaches(longest + steps)):
            return super().roll(search, places, last)
        self._check(last)
        rolling = cast(Any, search)
        read, each = np.zeros(len(places) * rolling.width, np.int64), len(last) // len(places)
        read[: len(last)] = last
        rows = np.arange(len(read)) * each // rolling.width
        self._take(searches.of_rolling(rolling, places, each, read, rows, steps), steps)
        return read, rows

    def _take(self, search: native.Search, steps: int) -> int:
        """So many steps in the kernels, or fewer where all sentences are over; how many."""
        engine = self.engine
        parts = (engine.tokens, self.cache, self.memory, engine.output)
        return engine.decoder.advance(*parts, search, steps)

    def close(self) -> None:
        self.rows = 0
        for cache in self._caches():
            cache.clear()

    def _caches(self) -> list[Cache]:
        return [self.cache] if self.memory is None else [self.cache, self.memory]


def _left(model: nn.Module) -> str:
    """The parts that `int8` has left as they are, for a reason."""
    parts = float_parts(model)
    more = f" and {len(parts) - 1} more" if len(parts) > 1 else ""
    return f"; float32 stays in {parts[0]}{more}" if parts else ""


def _identity(model: nn.Module) -> tuple[object, ...]:
    """Modules, hooks and addresses; a layer of 8 bits moves as a whole."""
    parts = modules(model)
    tables = [part._parameters for part in parts if part._parameters]
    tensors: list[Tensor] = [x for table in tables for x in table.values() if x is not None]
    tensors += [part.scale for part in parts if type(part) is Int8Linear]
    return has_hooks(parts), parts, [x.data_ptr() for x in tensors]


def _end_to_end(x: Tensor, lengths: Lengths) -> tuple[Integers, Tensor]:
    """The length of each sequence, and the tokens of all, one after the other without padding."""
    B, S = x.shape[:2]
    if lengths is None:
        counts, rows = torch.full((B,), S), x.flatten(0, 1)
    elif isinstance(lengths, PackedLengths):
        counts, rows = lengths.lengths.long().cpu(), x[0]
    else:
        counts = integer_tensor(lengths, "source_lengths").long().cpu()
        rows = x[torch.arange(S) < counts[:, None]]
    return counts.numpy(), rows
