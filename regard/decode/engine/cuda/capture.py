"""The CUDA engine: a step of the model's own modules, captured in a CUDA graph.

A step of decoding is a hundred small kernels, which take longer to launch than to run. Captured in
a graph, a step of the model and of the search are replayed together, and the host synchronises only
now and then, to see whether all sentences have ended.

A graph has fixed sizes and reads and writes where it was captured: that is a `Space`. Batches are
filled up to a bucket of sentences, source tokens and length. A session has a space to itself until
it is closed; spaces are kept for the next session of the same sizes.
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
from regard.attention.mask import Packed
from regard.attention.multihead import MultiHeadAttention
from regard.attention.position import Learned, Sinusoidal
from regard.attention.sync import on_host
from regard.decode.engine.cuda import kernels
from regard.decode.engine.cuda.twin import Joined, MemoryCache, Rows, SlotCache, twin
from regard.decode.engine.eager import EagerEngine, unpacked
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
from regard.memory import shown
from regard.model.block import Block, BlockCache
from regard.model.embedding import Patches, Tokens
from regard.model.lengths import Lengths, causal_mask
from regard.model.stack import StackCache
from regard.model.transformer import Transformer, source_mask

Size: TypeAlias = tuple[int, int, int, tuple[int, ...]]
"""Sentences, beams of each, length, and the shape of a source."""

SPACES, KEPT = 12, 1 / 4
"""Number of unused spaces that are kept, and the share of the device's memory for them."""
SHARE = 1 / 8
"""The maximum share of the device's memory for one space."""
LARGER = 2
"""How many times as large as wanted a space may be, in sentences and in lengths."""
BEAMS = 32
"""The maximum beam size, for which the search kernel has registers."""
STEPS = 8
"""Steps between two checks of the host whether all sentences have ended."""

_one_at_a_time = threading.Lock()
"""Captures."""


class CudaEngine:
    """A model's captured steps, and the spaces in which they run."""

    def __init__(self, model: Model):
        self.fallback = ""
        """Why the latest session runs in the eager engine; empty if it does not."""
        self.joined: list[Joined] = []
        """Copies of weights."""
        self.decoder = twin(model.decoder, self.joined)
        self.output, self.target = model.output, target(model)
        self.window = model.config.window
        if isinstance(model, Transformer):
            self.source: nn.Module = model.source
            self.encoder = twin(model.encoder, self.joined)
            crosses = [cast(Any, block).cross for block in model.decoder.blocks]
            self.project_memory = [Joined((cross.key, cross.value)) for cross in crosses]
            self.joined += self.project_memory
        weight = self.target.table.weight
        self.vocabulary, self.dtype, self.device = len(weight), weight.dtype, weight.device
        blocks = [cast(Any, block) for block in self.decoder.blocks]
        self._own = sum(_cached(block.attention) for block in blocks)
        self._read = sum(_cached(block.cross) for block in blocks if block.cross is not None)
        self._memory = _available(self.device)
        self.lock = threading.RLock()
        self._free: OrderedDict[Size, list[Space]] = OrderedDict()
        self._held = _held(model)

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
        """Why it cannot be captured; empty where it can."""
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
        parts, places, versions = _held(model)
        if (parts, places) != self._held[:2] or has_hooks(parts):
            return False
        if versions != self._held[2]:  # trained on: what is captured reads the weights themselves
            with torch.no_grad(), self.lock:
                for joined in self.joined:
                    joined.refresh()
                self._held = parts, places, versions
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
        """The space that is wanted, and the source as it is read there: in rows, with lengths."""
        if source is None:
            return (bucket(rows, 1), beams, bucket(length, 32), ()), None
        rows_BS, counts = _padded(source, lengths)
        shape = tuple(rows_BS.shape[1:])
        if not isinstance(self.source, Patches):  # a sequence, which may be of any length
            if counts is None:
                counts = torch.full((len(rows_BS),), shape[0])
            shape = (min(bucket(shape[0], 32), reach(self.source)), *shape[1:])
        return (bucket(len(rows_BS), 1), beams, bucket(length, 32), shape), (rows_BS, counts)

    def lease(self, size: Size) -> "Space":
        """A space that nobody else has until it is given back."""
        with self.lock:
            if (near := self._nearest(size)) is not None:
                return self._free[near].pop()
            with torch.inference_mode(False):  # it will serve outside of it as well
                return Space(self, *size)

    def _nearest(self, size: Size) -> Size | None:
        """The smallest of the free spaces that are large enough, and not much larger: to capture
        another takes longer than a few batches."""

        def fits(other: Size) -> bool:
            (B, beams, length, shape), (room, width, most, held) = size, other
            if width != beams or len(held) != len(shape):
                return False
            pairs = zip((B, length, *shape), (room, most, *held))
            return all(n <= m <= LARGER * n for n, m in pairs)

        fitting = [other for other, free in self._free.items() if free and fits(other)]
        return min(fitting, key=self._bytes, default=None)

    def give_back(self, space: "Space") -> None:
        with self.lock:
            self._free.setdefault(space.size, []).append(space)
            self._free.move_to_end(space.size)
            while self._crowded():
                oldest = next(size for size, free in self._free.items() if free)
                self._free[oldest].pop(0)

    def _crowded(self) -> bool:
        kept = [size for size, free in self._free.items() for _ in free]
        return len(kept) > SPACES or sum(map(self._bytes, kept)) > KEPT * self._memory

    def places(self, shape: tuple[int, ...]) -> int:
        """How many places a source of this shape has for cross-attention to read."""
        if shape and isinstance(self.source, Patches):
            return math.prod(self.source.grid)
        return shape[0] if shape else 0

    def positions(self, length: int) -> Float[Tensor, "T D"] | None:
        """The vectors of all positions, where they are added to those of tokens."""
        position, weight = self.target.position, self.target.table.weight
        if type(self.target) is not Tokens or type(self.target.table) is not nn.Embedding:
            return None
        if position is None:
            return weight.new_zeros(length, weight.shape[1])
        if type(position) is Sinusoidal:
            return position.encoding(torch.arange(length, device=weight.device), weight.dtype)
        # A learned table is read where it lies, since it may be trained on.
        return position.table.detach() if type(position) is Learned else None

    def rows(self, length: int) -> int:
        """How many rows of this length fit into a space, each with a source as long."""
        each = (self._own + self._read) * bucket(length, 32) + self.vocabulary
        # A bucket has up to a quarter more sentences than it is asked for.
        return max(1, int(SHARE * self._memory / (1.25 * each * self.dtype.itemsize)))

    def _obstacle(self, size: Size) -> str:
        """Why a session of this size cannot be captured; empty if it can."""
        if torch.is_autocast_enabled("cuda"):
            return "autocast is on"
        if size[1] > BEAMS:
            return f"beams ({size[1]}) must be at most {BEAMS}"
        needed, most = self._bytes(size), int(SHARE * self._memory)
        if needed > most:
            return f"the KV cache needs {shown(needed)}, more than {shown(most)}"
        return ""

    def _bytes(self, size: Size) -> int:
        """Of a space: the KV cache, and the logits of a step."""
        sentences, beams, length, shape = size
        each = beams * (self._own * length + self.vocabulary) + self._read * self.places(shape)
        return sentences * each * self.dtype.itemsize


class Space:
    """Room for so many sentences of `beams` rows each, and the graphs that run in it."""

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
            own, cross = cast(Any, block).attention, cast(Any, block).cross
            read = CrossCache()
            if cross is not None:
                read = MemoryCache(self.rows, cross, sentences, self.longest, dtype)
            slots = SlotCache(self.rows, own, dtype, engine.window)
            self.cache.blocks.append(BlockCache(slots, read))
        self.source: Tensor | None = None
        self.lengths = torch.ones(sentences, dtype=torch.int64, device=device)
        self.positions = engine.positions(length)
        self.reach = reach(engine.target)
        self.stills: dict[object, Still] = {}
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
        """Reads the last token of every row."""
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
        """Fills the cross-attention KV cache, in which each sentence has its own range."""
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
        """What runs it: captured at the first time, for which `reset` puts back what it changes."""
        if key not in self._graphs:
            filled = self.rows.filled.clone()

            def before() -> None:
                self.rows.filled.copy_(filled)
                reset()

            with _one_at_a_time:
                self._graphs[key] = captured(run, before, self._pool)
        return self._graphs[key]

    def still(self, search: Paths | Beams) -> "Still":
        """The one for searches of this kind, in which this one then runs."""
        key = (type(search), *kind(search))
        if key not in self.stills:
            with torch.inference_mode(False), torch.no_grad():
                self.stills[key] = Still(self, search)
        self.stills[key].begin(search)
        return self.stills[key]

    def receive(self, other: "Space", rows: Int[Tensor, "R"], at: int) -> None:
        """Rows of a space, or of this one itself, from row `at` on, each with its own source."""
        theirs, ours = other.rows, self.rows
        n, R, m = int(theirs.filled.max()), len(ours), len(rows)
        here = at + torch.arange(m, device=rows.device)
        slots = theirs.table[rows, :n].long()
        to = torch.arange(n, device=rows.device) * R + here[:, None]
        for one, two in zip(self.own, other.own):
            one.slots[to] = two.slots[slots]
        ours.table[here, :n] = to.int()
        ours.filled[here] = theirs.filled[rows]
        if self.memory:
            places = torch.arange(other.longest, device=rows.device)
            from_ = (theirs.start[rows, None] + places).clamp(max=len(other.memory[0].memory) - 1)
            for mine, its in zip(self.memory, other.memory):
                mine.memory[(here * self.longest)[:, None] + places] = its.memory[from_]
            ours.start[here], ours.count[here] = here * self.longest, theirs.count[rows]


class CudaSession(Session):
    """Rows in a space. At first row r has `each` of the space's rows, which are alike."""

    shrinks = False

    def __init__(self, engine: CudaEngine, space: Space, rows: int):
        self.engine, self.space, self.rows = engine, space, rows
        self.vocabulary, self.device = engine.vocabulary, engine.device
        self.each = space.size[1]
        self.longest = 0
        """Positions of the longest row."""
        self._still: Still | None = None
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
        alike = torch.arange(self.rows).repeat_interleave(self.each)
        if self.each > 1 and rows.device.type == "cpu" and rows.tolist() == alike.tolist():
            self.rows, self.each = len(rows), 1
        elif self._reorders(rows):
            table, rows = self.space.rows.table[: self.rows], rows.to(self.device)
            table.copy_(table[rows])
        else:
            self._move(len(rows), [(self, rows.to(self.device))])

    def _reorders(self, rows: Int[Tensor, "R"]) -> bool:
        """Whether beams change places among those of their sentence: their keys and values stay.

        They are of one length, so that what one of them writes next is in no other's table.
        """
        beams = self.space.rows.beams
        if self.each > 1 or beams == 1 or len(rows) != self.rows:
            return False
        place = torch.arange(len(rows), device=rows.device)
        stay = (rows // beams == place // beams).all()
        if on_host(rows):
            return bool(stay)
        torch._assert_async(stay)  # a search keeps them there; nothing waits for the device
        return True

    def check_join(self, other: Session) -> None:
        if not isinstance(other, CudaSession) or other.engine is not self.engine:
            raise ValueError("only sessions of one engine can be joined; open both with the same")

    @torch.no_grad()
    def join(self, other: Session) -> None:
        self.check_join(other)
        other = cast(CudaSession, other)
        all_rows = [(one, torch.arange(one.rows, device=self.device)) for one in (self, other)]
        longest = max(self.longest, other.longest)
        self._move(self.rows + other.rows, all_rows)
        self.longest = longest
        other.close()

    def best(
        self, logits: Float[Tensor, "R N"], count: int, rule: Constraints, t: int
    ) -> topk.Best:
        if count > 2 * BEAMS or logits.dtype == torch.float64:
            return super().best(logits, count, rule, t)
        times = torch.full((len(rule.most),), t, device=self.device)
        masks = (hidden(rule, self.vocabulary), rule.end, rule.least if rule.early else None, times)
        return kernels.best(logits, min(count, self.vocabulary), *masks, rule.renormalize)

    def _reach(self, more: int) -> None:
        """Has room for so many more positions."""
        if self.longest + more > self.space.reach:
            raise ValueError(
                f"position {self.longest + more - 1} is beyond the {self.space.reach} learned "
                "positions there are; ask for fewer tokens"
            )
        if self.longest + more > self.space.length:
            here = [(self, torch.arange(self.rows, device=self.device))]
            self._move(self.rows, here, 2 * (self.longest + more))

    def _move(self, count: int, parts: "list[tuple[CudaSession, Tensor]]", length: int = 0) -> None:
        """Has these rows alone, one after the other, in a space that has room for them."""
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
        if self._still is None:
            self._still = self.space.still(search)
        for _ in range(min(STEPS, search.constraints.steps - search.t)):
            self._still.step()
        return None

    def _captures(self, search: Search) -> bool:
        """Whether the search is one that runs in a graph, and there is room for all of it."""
        if not isinstance(search, Paths | Beams):
            return False
        left = search.constraints.steps - search.t
        if self._still is None and self.longest + left > min(self.space.length, self.space.reach):
            return False
        if isinstance(search, Beams):
            return search.coverage is None and search.width == self.space.rows.beams == self.each
        return self.each == 1

    def close(self) -> None:
        if self.space is not None:
            self.engine.give_back(self.space)
            self.space = None  # type: ignore[assignment]


class Still:
    """A search whose tensors stay where they are, for as many sentences as a space has.

    Searches of its kind run in it, one at a time: they are copied into it, and what they find is
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
        self.still: Paths | Beams
        match search:
            case Beams():
                self.still = Beams(last[:B], constraints, search.width, search.n_best, power(0))
                self.still.begin()
                self.still.open = torch.zeros(B, search.width, device=last.device)
                self.still.last = last
            case Sampled():
                dice = torch.zeros(B, T, dtype=search.dice.dtype)
                how = (search.temperature, search.top_k, search.top_p)
                self.still = Sampled(last, constraints, dice, *how)
                self.still.t = self.times[:1]  # type: ignore[assignment]
            case _:
                self.still = Paths(last, constraints)
        self._replay = space.graph((type(search), *kind(search)), self._run, self._restart)

    def begin(self, search: Paths | Beams) -> None:
        """Copies a search into the tensors that stay; of its own, it then has views of these."""
        still, rule, B, n = (
            self.still,
            search.constraints,
            len(search.over),
            search.constraints.steps,
        )
        self._restart()
        self.space.last[: B * self.space.rows.beams] = search.last.repeat_interleave(
            self.space.rows.beams
        )
        still.over.fill_(True)
        still.over[:B] = False
        still.constraints.most[:B] = rule.most
        still.constraints.least[:B] = rule.least
        names = ["over", "tokens", "scores"]
        match still, search:
            case Beams(), Beams():
                still.open.fill_(-math.inf)
                still.open[:B, 0] = 0.0
                still.scores.fill_(-math.inf)
                still.penalty[: n + 2], still.largest[:B, : n + 2] = search.penalty, search.largest
                search.backtrace = lambda some: kernels.backtrace(still, B)  # type: ignore[method-assign, assignment]
                names = ["over"]
            case Sampled(), Sampled():
                still.dice[:B, :n] = search.dice
        for name in names:
            setattr(search, name, getattr(still, name)[:B])
        self.search = search

    def step(self) -> None:
        self._replay()
        self.search.t += 1

    def _run(self) -> None:
        """A step of model and search."""
        still, space = self.still, self.space
        logits = space.forward()
        if isinstance(still, Sampled):
            over = still.over
            still.extend(logits, topk.best)
            space.last.copy_(still.last)
            still.over = over.copy_(still.over)
            return
        rule = still.constraints
        least = rule.least if rule.early else None
        masks = (self.hidden, rule.end, least, self.times, rule.renormalize)
        count = min(2 * still.width, logits.shape[1]) if isinstance(still, Beams) else 1
        found = kernels.best(logits, count, *masks)
        if isinstance(still, Beams):
            kernels.extend(found, still, self.times, space.rows.table, space.rows.filled)
        else:
            kernels.follow(found, still, self.times)

    def _restart(self) -> None:
        self.times.zero_()


def hidden(rule: Constraints, vocabulary: int) -> Int[Tensor, "N"] | None:
    """1 for tokens that are never allowed."""
    if not rule.banned:
        return None
    marks = torch.zeros(vocabulary, dtype=torch.int8, device=rule.most.device)
    marks[rule.banned] = 1
    return marks


def kind(search: Paths | Beams) -> tuple[object, ...]:
    """What differs between searches of one size but is no tensor."""
    rule = search.constraints
    rules = (rule.end, tuple(rule.banned), rule.early > 0, rule.renormalize)
    match search:
        case Beams():
            return (*rules, search.width, search.n_best)
        case Sampled():
            return (*rules, search.temperature, search.top_k, search.top_p)
    return rules


def captured(run: Callable[[], None], reset: Callable[[], None], pool: Any) -> Callable[[], None]:
    """The replay of all that `run` does to tensors that stay where they are.

    It is tried before, and `reset` puts back what it changes.
    """
    if pool is None:
        return run  # nothing is captured but on CUDA
    stream, graph = _capturing(torch.cuda.current_device()), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    collects = gc.isenabled()
    gc.disable()  # to free another graph now would spoil this one
    try:
        with torch.cuda.stream(stream):
            for _ in range(2):  # what happens once, compiling above all, is not captured
                reset()
                run()
            reset()
            stream.synchronize()
            # Unlike `torch.cuda.graph`, it leaves the allocator what it has: the next capture
            # wants it.
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
def _capturing(device: int) -> "torch.cuda.Stream":
    """A device's stream for captures, which take turns: each finds the memory of the last."""
    return torch.cuda.Stream(device)


def bucket(n: int, least: int) -> int:
    """The next size for which there is a graph: at most a quarter more, from 8 × `least` on."""
    n = max(n, least)
    step = max(least, 1 << max(0, n.bit_length() - 3))
    return -(-n // step) * step


def _available(device: torch.device) -> int:
    """Bytes of the device that this process has or can have: others may share it."""
    if device.type != "cuda":
        return sys.maxsize
    free, total = torch.cuda.mem_get_info(device)
    allowed = int(torch.cuda.get_per_process_memory_fraction(device) * total)
    return min(free + torch.cuda.memory_reserved(device), allowed)


def _cached(attention: MultiHeadAttention) -> int:
    """Numbers that are kept of a token: its keys and values."""
    return attention.key_heads * (attention.key_width + attention.value_width)


def _held(model: Model) -> tuple[list[nn.Module], list[int], list[int]]:
    """The model's parts, where its parameters lie, and how often they were written."""
    parts = modules(model)
    weights = [p for part in parts for p in part._parameters.values() if p is not None]
    versions = [0 if p.is_inference() else p._version for p in weights]
    return parts, [p.data_ptr() for p in weights], versions


def reach(part: Any) -> int:
    """How many positions an embedding has."""
    position = part.position
    return sys.maxsize if position is None or position.length is None else int(position.length)


def _padded(source: Tensor, lengths: Lengths) -> tuple[Tensor, Tensor | None]:
    """A source in each row, and how long each is where that is not all of the row."""
    if isinstance(lengths, Packed):
        return unpacked(source, lengths), lengths.lengths.to(source.device)
    return source, None if lengths is None else integer_tensor(lengths, "source_lengths")
