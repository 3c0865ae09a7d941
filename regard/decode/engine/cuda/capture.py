"""The CUDA engine: a step of the model's own modules, captured in a CUDA graph.

A decoding step is a hundred small kernels, which take longer to launch than to run. A graph replays
a step of the model and one of the search together. The host synchronises only every few steps, to
check whether all sentences have ended.

A graph has fixed sizes and fixed addresses: the tensors of a `Space`. Batches are padded to a
bucket of sentences, source tokens and length. A session has a space to itself until it is closed;
free spaces are reused by later sessions of similar sizes.
"""

import gc
import math
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, TypeAlias, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.attention.cache import CrossCache
from regard.attention.checks import integer_tensor
from regard.attention.mask import PackedLengths
from regard.attention.multihead import MultiHeadAttention
from regard.attention.position import LearnedPositions, SinusoidalPositions
from regard.attention.sync import on_host
from regard.decode.engine.cuda import kernels
from regard.decode.engine.cuda.twin import Joined, MemoryCache, Rows, SlotCache, twin
from regard.decode.engine.eager import EagerEngine, unpack
from regard.decode.engine.parts import (
    Model,
    has_hooks,
    modules,
    overridden,
    reads_otherwise,
    target,
)
from regard.decode.engine.session import Search, Session
from regard.decode.search import topk
from regard.decode.search.beam import Beams, power
from regard.decode.search.constraints import Constraints
from regard.decode.search.greedy import Paths
from regard.decode.search.sample import Sampled
from regard.machine.memory import shown
from regard.model.block import Block, BlockCache
from regard.model.embedding import Patches, Tokens
from regard.model.lengths import Lengths, causal_mask
from regard.model.stack import StackCache
from regard.model.transformer import Transformer, source_mask

Size: TypeAlias = tuple[int, int, int, tuple[int, ...]]
"""Number of sentences, beams per sentence, length, and the shape of a source."""

MAX_FREE_SPACES, MAX_FREE_SHARE = 12, 1 / 4
"""The maximum number of free spaces, and their maximum share of the device's memory."""
MAX_SPACE_SHARE = 1 / 8
"""The maximum share of the device's memory for one space."""
MAX_OVERSIZE = 2
"""The maximum size of a reused space, relative to the size needed, in sentences and in lengths."""
MAX_BEAMS = 32
"""The maximum beam size, for which the search kernel has registers."""
STEPS_PER_CHECK = 8
"""Steps between two checks of the host whether all sentences have ended."""

_capture_lock = threading.Lock()
"""Only one graph is captured at a time."""


class CudaEngine:
    """A model's captured steps, and the spaces in which they run."""

    def __init__(self, model: Model):
        self.fallback = ""
        """The reason why the latest session runs in the eager engine; empty if it does not."""
        self.joined: list[Joined] = []
        """Copies of weights, which are refreshed when the weights change."""
        self.decoder = twin(model.decoder, self.joined)
        self.output, self.target = model.output, target(model)
        self.window = model.config.window
        if isinstance(model, Transformer):
            self.source: nn.Module = model.source
            self.encoder = twin(model.encoder, self.joined)
            layers = [cast(Any, block).cross for block in model.decoder.blocks]
            self.project_memory = [Joined((cross.key, cross.value)) for cross in layers]
            self.joined += self.project_memory
        weight = self.target.table.weight
        self.vocabulary, self.dtype, self.device = len(weight), weight.dtype, weight.device
        blocks = [cast(Any, block) for block in self.decoder.blocks]
        self._self_width = sum(_cache_width(block.attention) for block in blocks)
        crosses = [block.cross for block in blocks if block.cross is not None]
        self._cross_width = sum(map(_cache_width, crosses))
        self._memory = _available(self.device)
        self.lock = threading.RLock()
        self._free: OrderedDict[Size, list[Space]] = OrderedDict()
        self._snapshot = _snapshot(model)

    @property
    def name(self) -> str:
        """The engine of the latest session."""
        return EagerEngine.name if self.fallback else "cuda"

    @property
    def reason(self) -> str:
        if self.fallback:
            return f"no graph is captured: {self.fallback}"
        return "the model's own modules, captured in a graph"

    @staticmethod
    def refusal(model: Model) -> str:
        """The reason why the model cannot be captured; empty if it can."""
        if reason := reads_otherwise(model):
            return reason
        if reason := overridden(model):
            return reason
        if target(model).table.weight.dtype == torch.float64:
            return "float64 is for comparisons"
        stacks = [model.decoder, *([model.encoder] if isinstance(model, Transformer) else [])]
        for block in (block for stack in stacks for block in stack.blocks):
            if type(block) is not Block:
                return f"a {type(block).__name__} is not a Block"
            for part in (block.attention, block.cross):
                if part is not None and type(part) is not MultiHeadAttention:
                    return f"it does not know what a {type(part).__name__} keeps between steps"
                if part is not None and {type(part.key), type(part.value)} != {nn.Linear}:
                    return "keys and values are not made by linear layers"
        return ""

    def current(self, model: Model) -> bool:
        parts, addresses, versions = _snapshot(model)
        if (parts, addresses) != self._snapshot[:2] or has_hooks(parts):
            return False
        if versions != self._snapshot[2]:  # trained on: only copies of weights are out of date
            with torch.no_grad(), self.lock:
                for joined in self.joined:
                    joined.refresh()
                self._snapshot = parts, addresses, versions
        return True

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
    ) -> Session:
        size, read = self._size(source, lengths, rows or 1, beams, length)
        self.fallback = self._obstacle(size)
        if self.fallback:
            return EagerEngine().open(model, source, lengths, rows=rows)
        session = CudaSession(self, self.lease(size), rows or 1 if read is None else len(read[0]))
        if read is not None:
            session.space.encode(*read)
        return session

    def _size(
        self, source: Tensor | None, lengths: Lengths, rows: int, beams: int, length: int
    ) -> tuple[Size, tuple[Tensor, Tensor | None] | None]:
        """The size of the space needed; the source with one row for each sequence, its lengths."""
        if source is None:
            return (bucket(rows, 1), beams, bucket(length, 32), ()), None
        rows_BS, counts = _rows_and_lengths(source, lengths)
        shape = tuple(rows_BS.shape[1:])
        if not isinstance(self.source, Patches):  # a sequence, which may be of any length
            if counts is None:
                counts = torch.full((len(rows_BS),), shape[0])
            shape = (min(bucket(shape[0], 32), reach(self.source)), *shape[1:])
        return (bucket(len(rows_BS), 1), beams, bucket(length, 32), shape), (rows_BS, counts)

    def lease(self, size: Size) -> "Space":
        """A space for the caller's exclusive use until `give_back`."""
        with self.lock:
            if (near := self._nearest(size)) is not None:
                return self._free[near].pop()
            with torch.inference_mode(False):  # the space is also used outside inference mode
                return Space(self, *size)

    def _nearest(self, size: Size) -> Size | None:
        """The smallest free space that is large enough, and not much larger.

        Capturing the graphs of a new space takes longer than a few batches in a larger one.
        """

        def fits(other: Size) -> bool:
            if other[1] != size[1] or len(other[3]) != len(size[3]):  # beams, axes of a source
                return False
            needed, available = ((B, length, *shape) for B, _, length, shape in (size, other))
            return all(n <= m <= MAX_OVERSIZE * n for n, m in zip(needed, available))

        fitting = [other for other, free in self._free.items() if free and fits(other)]
        return min(fitting, key=self._bytes, default=None)

    def give_back(self, space: "Space") -> None:
        with self.lock:
            self._free.setdefault(space.size, []).append(space)
            self._free.move_to_end(space.size)
            while self._over_limit():
                oldest = next(size for size, free in self._free.items() if free)
                self._free[oldest].pop(0)

    def _over_limit(self) -> bool:
        """True if there are too many free spaces, or they take too much memory."""
        sizes = [size for size, free in self._free.items() for _ in free]
        total = sum(map(self._bytes, sizes))
        return len(sizes) > MAX_FREE_SPACES or total > MAX_FREE_SHARE * self._memory

    def places(self, shape: tuple[int, ...]) -> int:
        """The number of positions that cross-attention reads of a source of this shape."""
        if shape and isinstance(self.source, Patches):
            return math.prod(self.source.grid)
        return shape[0] if shape else 0

    def positions(self, length: int) -> Float[Tensor, "T D"] | None:
        """The vectors of all positions; None if they are not added to the token embeddings."""
        position, weight = self.target.position, self.target.table.weight
        if type(self.target) is not Tokens or type(self.target.table) is not nn.Embedding:
            return None
        if position is None:
            return weight.new_zeros(length, weight.shape[1])
        if type(position) is SinusoidalPositions:
            return position.encoding(torch.arange(length, device=weight.device), weight.dtype)
        # A learned table is read in place, since it may be trained on.
        return position.table.detach() if type(position) is LearnedPositions else None

    def rows(self, length: int) -> int:
        """The number of rows of this length that fit into a space, each with a source as long."""
        each = (self._self_width + self._cross_width) * bucket(length, 32) + self.vocabulary
        # A bucket has up to a quarter more sentences than the batch.
        return max(1, int(MAX_SPACE_SHARE * self._memory / (1.25 * each * self.dtype.itemsize)))

    def _obstacle(self, size: Size) -> str:
        """The reason why a session of this size cannot be captured; empty if it can."""
        if torch.is_autocast_enabled("cuda"):
            return "autocast is on"
        if size[1] > MAX_BEAMS:
            return f"beams ({size[1]}) must be at most {MAX_BEAMS}"
        needed, limit = self._bytes(size), int(MAX_SPACE_SHARE * self._memory)
        if needed > limit:
            return f"the KV cache needs {shown(needed)}, more than {shown(limit)}"
        return ""

    def _bytes(self, size: Size) -> int:
        """The size of a space in memory: its KV cache, and the logits of a step."""
        sentences, beams, length, shape = size
        decoder = beams * (self._self_width * length + self.vocabulary)
        source = self._cross_width * self.places(shape)
        return sentences * (decoder + source) * self.dtype.itemsize


class Space:
    """Tensors for `sentences` sentences of `beams` rows each, and the graphs that use them."""

    def __init__(
        self, engine: CudaEngine, sentences: int, beams: int, length: int, shape: tuple[int, ...]
    ):
        self.engine, self.size = engine, (sentences, beams, length, shape)
        self.sentences, self.length = sentences, length
        device, dtype, R = engine.device, engine.dtype, sentences * beams
        self.rows = Rows(R, length, beams, device)
        self.last = torch.zeros(R, dtype=torch.int64, device=device)
        self.logits = torch.zeros(R, engine.vocabulary, dtype=dtype, device=device)
        self.longest = engine.places(shape)
        self.cache = StackCache(0)
        for block in engine.decoder.blocks:
            attention, cross = cast(Any, block).attention, cast(Any, block).cross
            memory = CrossCache()
            if cross is not None:
                memory = MemoryCache(self.rows, cross, sentences, self.longest, dtype)
            slots = SlotCache(self.rows, attention, dtype, engine.window)
            self.cache.blocks.append(BlockCache(slots, memory))
        self.source: Tensor | None = None
        self.lengths = torch.ones(sentences, dtype=torch.int64, device=device)
        self.positions = engine.positions(length)
        self.reach = reach(engine.target)
        self.searches: dict[object, StaticSearch] = {}
        self._graphs: dict[object, Callable[[], None]] = {}
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None

    @property
    def own(self) -> list[SlotCache]:
        return [cast(SlotCache, block.own) for block in self.cache.blocks]

    @property
    def memory(self) -> list[MemoryCache]:
        blocks = self.cache.blocks
        return [block.cross for block in blocks if isinstance(block.cross, MemoryCache)]

    def forward(self) -> Float[Tensor, "R N"]:
        """Logits of the next token of every row, from its last token."""
        engine, target, rows = self.engine, self.engine.target, self.rows
        if self.positions is not None:
            vectors = (target.table.weight, self.positions, rows.filled, target.scale)
            x = kernels.embed(self.last, *vectors)[:, None]
        else:
            x = target(self.last[:, None], rows.filled[:, None])
        mask = causal_mask(None, engine.window)
        states = engine.decoder(x, mask=mask, cache=self.cache)
        rows.filled += 1
        return engine.output(states[:, -1])

    def step(self) -> None:
        self.logits.copy_(self.forward())

    def encode(self, source: Tensor, lengths: Tensor | None) -> None:
        """Fills the cross-attention KV cache, in which each sentence has a range of positions."""
        if self.source is None:
            self.source = source.new_zeros(self.sentences, *self.size[3])
        B = len(source)
        self.source[:B, : source.shape[1]] = source
        self.lengths.fill_(self.longest)
        if lengths is not None:
            self.lengths[:B] = lengths
        begins = torch.arange(self.sentences, device=self.lengths.device) * self.longest
        self.rows.start.copy_(begins.repeat_interleave(self.rows.beams))
        self.rows.count.copy_(self.lengths.repeat_interleave(self.rows.beams))
        self.graph("encode", partial(self._encode, lengths is not None))()

    def _encode(self, padded: bool) -> None:
        engine = self.engine
        assert engine.encoder is not None
        mask = source_mask(engine.source, self.lengths if padded else None, engine.window)
        memory = engine.encoder(engine.source(self.source, 0), mask=mask).flatten(0, 1)
        for joined, block in zip(engine.project_memory, self.memory):
            block.memory.copy_(joined(memory))

    def graph(
        self, key: object, run: Callable[[], None], reset: Callable[[], Any] = int
    ) -> Callable[[], None]:
        """A function that replays `run`, which is captured at the first call.

        The capture runs it several times; `reset` restores the tensors that it changes.
        """
        if key not in self._graphs:
            filled = self.rows.filled.clone()

            def before() -> None:
                self.rows.filled.copy_(filled)
                reset()

            with _capture_lock:
                self._graphs[key] = capture(run, before, self._pool)
        return self._graphs[key]

    def static_search(self, search: Paths | Beams) -> "StaticSearch":
        """The static search for searches of this kind, into which this one is copied."""
        key = (type(search), *kind(search))
        if key not in self.searches:
            with torch.inference_mode(False), torch.no_grad():
                self.searches[key] = StaticSearch(self, search)
        self.searches[key].begin(search)
        return self.searches[key]

    def receive(self, other: "Space", rows: Int[Tensor, "R"], at: int) -> None:
        """Copies rows of a space, or of this one, to row `at` and those after it.

        Each row then has its own copy of its source.
        """
        theirs, ours = other.rows, self.rows
        n, R, m = int(theirs.filled.max()), len(ours), len(rows)
        here = at + torch.arange(m, device=rows.device)
        slots = theirs.table[rows, :n].long()
        to = torch.arange(n, device=rows.device) * R + here[:, None]
        for mine, its in zip(self.own, other.own):
            mine.slots[to] = its.slots[slots]
        ours.table[here, :n] = to.int()
        ours.filled[here] = theirs.filled[rows]
        if self.memory:
            places = torch.arange(other.longest, device=rows.device)
            from_ = (theirs.start[rows, None] + places).clamp(max=len(other.memory[0].memory) - 1)
            for my_memory, its_memory in zip(self.memory, other.memory):
                my_memory.memory[(here * self.longest)[:, None] + places] = its_memory.memory[from_]
            ours.start[here], ours.count[here] = here * self.longest, theirs.count[rows]


class CudaSession(Session):
    """Rows in a space. At first row r has `each` rows of the space, which are equal."""

    shrinks = False

    def __init__(self, engine: CudaEngine, space: Space, rows: int):
        self.engine, self.space, self.rows = engine, space, rows
        self.vocabulary, self.device = engine.vocabulary, engine.device
        self.each = space.size[1]
        self.longest = 0
        """Positions of the longest row."""
        self._static: StaticSearch | None = None
        space.rows.filled.zero_()
        space.rows.beams = self.each

    @torch.no_grad()
    def prefill(self, tokens: Int[Tensor, "R n"], counts: Int[Tensor, "R"]) -> None:
        self._check(tokens)
        n, engine = tokens.shape[1], self.engine
        self._reach(n)
        rows = self.space.rows
        here = torch.arange(self.rows, device=self.device) * self.each
        rows.chosen = here
        try:
            x = engine.target(tokens.to(self.device), 0)
            mask = causal_mask(None, engine.window)
            engine.decoder(x, mask=mask, cache=self.space.cache)
        finally:
            rows.chosen = None
        slots = torch.arange(n, device=self.device) * len(rows) + here[:, None]
        used = self.rows * self.each
        rows.table[:used, :n] = slots.int().repeat_interleave(self.each, 0)
        rows.filled[:used] = counts.to(self.device).repeat_interleave(self.each)
        self.longest = int(counts.max())

    @torch.no_grad()
    def step(self, tokens: Int[Tensor, "R"]) -> Float[Tensor, "R N"]:
        self._check(tokens)
        self._reach(1)
        space, used = self.space, self.rows * self.each
        space.last[:used] = tokens.to(self.device).repeat_interleave(self.each)
        space.graph(("step", space.rows.beams), space.step)()
        self.longest += 1
        return space.logits[: used : self.each].clone()

    @torch.no_grad()
    def select(self, rows: Int[Tensor, "R"]) -> None:
        rows = self._chosen(rows)
        repeats = torch.arange(self.rows).repeat_interleave(self.each)
        if self.each > 1 and rows.device.type == "cpu" and rows.tolist() == repeats.tolist():
            self.rows, self.each = len(rows), 1
        elif self._reorders(rows):
            table, rows = self.space.rows.table[: self.rows], rows.to(self.device)
            table.copy_(table[rows])
        else:
            self._move(len(rows), [(self, rows.to(self.device))])

    def _reorders(self, rows: Int[Tensor, "R"]) -> bool:
        """True if beams only change places within their sentence: their keys and values stay.

        They have the same length, so the slot that one of them writes next is in no other's table.
        """
        beams = self.space.rows.beams
        if self.each > 1 or beams == 1 or len(rows) != self.rows:
            return False
        place = torch.arange(len(rows), device=rows.device)
        stay = (rows // beams == place // beams).all()
        if on_host(rows):
            return bool(stay)
        torch._assert_async(stay)  # true of every search; checked without synchronising
        return True

    def check_join(self, other: Session) -> None:
        if not isinstance(other, CudaSession) or other.engine is not self.engine:
            raise ValueError("only sessions of one engine can be joined; open both with the same")

    @torch.no_grad()
    def join(self, other: Session) -> None:
        self.check_join(other)
        other = cast(CudaSession, other)
        sessions = (self, other)
        all_rows = [(part, torch.arange(part.rows, device=self.device)) for part in sessions]
        longest = max(self.longest, other.longest)
        self._move(self.rows + other.rows, all_rows)
        self.longest = longest
        other.close()

    def best(
        self, logits: Float[Tensor, "R N"], count: int, rule: Constraints, t: int
    ) -> topk.Best:
        if count > 2 * MAX_BEAMS or logits.dtype == torch.float64:
            return super().best(logits, count, rule, t)
        times = torch.full((len(rule.most),), t, device=self.device)
        masks = (hidden(rule, self.vocabulary), rule.end, rule.least if rule.early else None, times)
        return kernels.best(logits, min(count, self.vocabulary), *masks, rule.renormalize)

    def _reach(self, more: int) -> None:
        """Makes room for `more` positions; raises if they exceed the learned ones."""
        if self.longest + more > self.space.reach:
            raise ValueError(
                f"position {self.longest + more - 1} is beyond the {self.space.reach} learned "
                "positions there are; ask for fewer tokens"
            )
        if self.longest + more > self.space.length:
            here = [(self, torch.arange(self.rows, device=self.device))]
            self._move(self.rows, here, 2 * (self.longest + more))

    def _move(self, count: int, parts: "list[tuple[CudaSession, Tensor]]", length: int = 0) -> None:
        """Moves these rows, one after the other, into another space with room for them."""
        spaces = [session.space for session, _ in parts]
        length = max(length, *(space.length for space in spaces))
        shape = max((space.size[3] for space in spaces), key=self.engine.places)
        size = bucket(count, 1), 1, bucket(length, 32), shape
        fresh = self.engine.lease(size)
        fresh.rows.filled.zero_()
        fresh.rows.beams, at = 1, 0
        for session, rows in parts:
            fresh.receive(session.space, rows * session.each, at)
            at += len(rows)
        self.engine.give_back(self.space)
        self.space, self.rows, self.each = fresh, count, 1

    # Searches

    def advance(self, search: Search) -> None:
        if not self._captures(search):
            return super().advance(search)
        assert isinstance(search, Paths | Beams)
        if self._static is None:
            self._static = self.space.static_search(search)
        for _ in range(min(STEPS_PER_CHECK, search.constraints.steps - search.t)):
            self._static.step()
        return None

    def _captures(self, search: Search) -> bool:
        """True if the search can run in a graph, and the space has room for all its steps."""
        if not isinstance(search, Paths | Beams):
            return False
        left = search.constraints.steps - search.t
        if self._static is None and self.longest + left > min(self.space.length, self.space.reach):
            return False
        if isinstance(search, Beams):
            return search.coverage is None and search.width == self.space.rows.beams == self.each
        return self.each == 1

    def close(self) -> None:
        if self.space is not None:
            self.engine.give_back(self.space)
            self.space = None  # type: ignore[assignment]


class StaticSearch:
    """A search with tensors at fixed addresses, for as many sentences as a space has.

    Searches of its kind run in it, one at a time: they are copied into it, and their results are
    read from it.
    """

    def __init__(self, space: Space, search: Paths | Beams):
        B, T, rule, last = space.sentences, space.length, search.constraints, space.last
        self.space = space
        self.times = torch.zeros(B, dtype=torch.int64, device=last.device)
        constraints = Constraints(
            B,
            space.engine.vocabulary,
            end=rule.end,
            max_length=T,
            min_length=min(1, rule.early),
            banned=rule.banned,
            renormalize=rule.renormalize,
            device=last.device,
        )
        self.hidden = hidden(constraints, space.engine.vocabulary)
        self.static: Paths | Beams
        match search:
            case Beams():
                self.static = Beams(last[:B], constraints, search.width, search.n_best, power(0))
                self.static.begin()
                self.static.open = torch.zeros(B, search.width, device=last.device)
                self.static.last = last
            case Sampled():
                dice = torch.zeros(B, T, dtype=search.dice.dtype)
                how = (search.temperature, search.top_k, search.top_p)
                self.static = Sampled(last, constraints, dice, *how)
                self.static.t = self.times[:1]  # type: ignore[assignment]
            case _:
                self.static = Paths(last, constraints)
        self._replay = space.graph((type(search), *kind(search)), self._run, self._restart)

    def begin(self, search: Paths | Beams) -> None:
        """Copies a search into the static tensors; its own become views of these."""
        static, rule, B = self.static, search.constraints, len(search.over)
        n, beams = rule.steps, self.space.rows.beams
        self._restart()
        self.space.last[: B * beams] = search.last.repeat_interleave(beams)
        static.over.fill_(True)
        static.over[:B] = False
        static.constraints.most[:B] = rule.most
        static.constraints.least[:B] = rule.least
        names = ["over", "tokens", "scores"]
        match static, search:
            case Beams(), Beams():
                static.open.fill_(-math.inf)
                static.open[:B, 0] = 0.0
                static.scores.fill_(-math.inf)
                static.penalty[: n + 2] = search.penalty
                static.largest[:B, : n + 2] = search.largest
                search.backtrace = lambda sentences: kernels.backtrace(static, B)  # type: ignore[method-assign]
                names = ["over"]
            case Sampled(), Sampled():
                static.dice[:B, :n] = search.dice
        for name in names:
            setattr(search, name, getattr(static, name)[:B])
        self.search = search

    def step(self) -> None:
        self._replay()
        self.search.t += 1

    def _run(self) -> None:
        """One step of model and search."""
        static, space = self.static, self.space
        logits = space.forward()
        if isinstance(static, Sampled):
            over = static.over
            static.extend(logits, topk.best)
            space.last.copy_(static.last)
            static.over = over.copy_(static.over)
            return
        rule = static.constraints
        least = rule.least if rule.early else None
        masks = (self.hidden, rule.end, least, self.times, rule.renormalize)
        count = min(2 * static.width, logits.shape[1]) if isinstance(static, Beams) else 1
        best = kernels.best(logits, count, *masks)
        if isinstance(static, Beams):
            kernels.extend(best, static, self.times, space.rows.table, space.rows.filled)
        else:
            kernels.follow(best, static, self.times)

    def _restart(self) -> None:
        self.times.zero_()


def hidden(rule: Constraints, vocabulary: int) -> Int[Tensor, "N"] | None:
    """1 for banned tokens, 0 for the others; None if no token is banned."""
    if not rule.banned:
        return None
    marks = torch.zeros(vocabulary, dtype=torch.int8, device=rule.most.device)
    marks[rule.banned] = 1
    return marks


def kind(search: Paths | Beams) -> tuple[object, ...]:
    """The settings of a search that are constants in its graph."""
    rule = search.constraints
    rules = (rule.end, tuple(rule.banned), rule.early > 0, rule.renormalize)
    match search:
        case Beams():
            return (*rules, search.width, search.n_best)
        case Sampled():
            return (*rules, search.temperature, search.top_k, search.top_p)
    return rules


def capture(run: Callable[[], None], reset: Callable[[], None], pool: Any) -> Callable[[], None]:
    """Captures `run` in a CUDA graph and returns its replay; its tensors must keep their addresses.

    Two warm-up runs come first; `reset` restores the tensors that a run changes.
    """
    if pool is None:
        return run  # only CUDA has graphs
    stream, graph = _capture_stream(torch.cuda.current_device()), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    collects = gc.isenabled()
    gc.disable()  # freeing another graph during a capture would invalidate it
    try:
        with torch.cuda.stream(stream):
            for _ in range(2):  # compilation and other one-time work happen before the capture
                reset()
                run()
            reset()
            stream.synchronize()
            # Unlike `torch.cuda.graph`, this leaves the allocator its memory for the next capture.
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                run()
            finally:
                graph.capture_end()
    finally:
        if collects:
            gc.enable()
    return graph.replay


@lru_cache
def _capture_stream(device: int) -> "torch.cuda.Stream":
    """A device's only stream for captures, so that each reuses the memory of the one before."""
    return torch.cuda.Stream(device)


def bucket(n: int, least: int) -> int:
    """n rounded up to a size of graphs: at most a quarter more, from 8 × `least` on."""
    n = max(n, least)
    step = max(least, 1 << max(0, n.bit_length() - 3))
    return -(-n // step) * step


def _available(device: torch.device) -> int:
    """Bytes of the device that this process uses or can allocate beside other processes."""
    if device.type != "cuda":
        return sys.maxsize
    free, total = torch.cuda.mem_get_info(device)
    allowed = int(torch.cuda.get_per_process_memory_fraction(device) * total)
    return min(free + torch.cuda.memory_reserved(device), allowed)


def _cache_width(attention: MultiHeadAttention) -> int:
    """Numbers in the KV cache for each token."""
    return attention.key_heads * (attention.key_width + attention.value_width)


def _snapshot(model: Model) -> tuple[list[nn.Module], list[int], list[int]]:
    """The model's parts, the addresses of its parameters, and their version counters."""
    parts = modules(model)
    weights = [p for part in parts for p in part._parameters.values() if p is not None]
    versions = [0 if p.is_inference() else p._version for p in weights]
    return parts, [p.data_ptr() for p in weights], versions


def reach(part: Any) -> int:
    """The number of positions that an embedding has."""
    position = part.position
    return sys.maxsize if position is None or position.length is None else int(position.length)


def _rows_and_lengths(source: Tensor, lengths: Lengths) -> tuple[Tensor, Tensor | None]:
    """One source per row, and their lengths; None if every source fills its row."""
    if isinstance(lengths, PackedLengths):
        return unpack(source, lengths), lengths.lengths.to(source.device)
    return source, None if lengths is None else integer_tensor(lengths, "source_lengths")
