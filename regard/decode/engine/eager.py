"""A step is all that search knows of a model.

    logits, state = step(tokens, state)

`tokens` (R, n) are the new ones of every row (all of the prompt at first, then one by one),
`logits` (R, N) are for the token after the last. The state holds what is kept between steps, and
has one method: `state.select(rows)` makes row r continue what row rows[r] has been. Beams are
reordered by it, repeated at first, and sentences that are finished leave by it.

Here are the steps of this package's models; a function and a class of one's own serve as well.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol, cast, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.attention.host import integers, on_host, shown
from regard.attention.mask import Packed
from regard.attention.multihead import Core, MultiHeadAttention
from regard.attention.weights import weights
from regard.decode.engine.int8 import engine as fused
from regard.model.block import Block
from regard.model.language import LanguageModel
from regard.model.lengths import Lengths
from regard.model.stack import StackCache
from regard.model.transformer import Transformer


@runtime_checkable
class State(Protocol):
    """What is kept between steps; changed in place."""

    def select(self, rows: Int[Tensor, "R"]) -> None:
        """Keep, drop, repeat or reorder rows: row r continues what row rows[r] has been.

        The rows are on the host where they change in number, normally on the device otherwise.
        """


@runtime_checkable
class Attentive(State, Protocol):
    """A state that also says what the last step looked at."""

    attention: Float[Tensor, "R S"]
    """How much each row attended to each place of its source; the rows sum to 1."""
    real: Tensor
    """Which places there are: booleans that broadcast to (R, S), False in padding."""


@runtime_checkable
class Whole(State, Protocol):
    """A state that can run plain searches as a whole, faster and with the same result.

    The limits are those of the search: no forced tokens, and few that are banned. None where this
    one has to go step by step.
    """

    def greedy(self, limits: Any) -> list[Any] | None: ...

    def beam(self, limits: Any, width: int, n_best: int, penalty: Any) -> list[Any] | None: ...


Step = Callable[[Int[Tensor, "R n"], Any], tuple[Float[Tensor, "R N"], Any]]


# Encoder and decoder: translation, reading of images, listening


class Reading:
    """A decoder's caches beside a source that was encoded once.

    Keys and values of a source are held once, however many rows read it: rows that are repeated
    one after the other share them from then on.
    """

    def __init__(self, cache: StackCache, memory: Tensor, lengths: Tensor | None):
        self.cache = cache
        self.memory: Tensor | None = memory
        self.lengths = lengths
        self.sources = len(memory)
        self.beams = 1

    def select(self, rows: Int[Tensor, "R"]) -> None:
        sources, beams = _sources(rows, self.sources, self.beams)
        if self.memory is not None:  # nothing has been computed from it yet
            rows = integers(rows, "rows").to(self.memory.device)
            self.memory, sources, beams = self.memory.index_select(0, rows), rows, 1
        self.cache.share(rows, sources, beams)
        self.beams = beams
        if sources is not None:
            self.sources = len(sources)
            if self.lengths is not None:
                self.lengths = self.lengths.index_select(0, sources.to(self.lengths.device))


class AttentiveReading(Reading):
    """The same, with the weights of the last block's cross-attention, the mean of its heads."""

    def __init__(self, cache: StackCache, memory: Tensor, lengths: Tensor | None):
        super().__init__(cache, memory, lengths)
        self.attention = memory.new_zeros(memory.shape[:2])

    @property
    def real(self) -> Tensor:
        if self.lengths is None:
            return torch.ones((), dtype=torch.bool, device=self.attention.device)
        places = torch.arange(self.attention.shape[-1], device=self.lengths.device)
        return (places < self.lengths[:, None]).repeat_interleave(self.beams, 0)


@torch.no_grad()
def translation(
    model: Transformer,
    source: Tensor,
    source_lengths: Lengths = None,
    *,
    capacity: int | None = None,
    attention: bool = False,
) -> tuple[Step, State]:
    """The step and the first state of a Transformer that has read this source: text or images.

    With a `capacity`, the most tokens that a row may come to, caches are allocated once. With
    `attention` the state says what each step looked at, as a coverage penalty wants to know.
    A model with 8-bit weights runs in kernels of its own, where nobody asks what happens inside.
    """
    _check_eval(model)
    if not attention and (found := fused.translation(model, source, source_lengths, capacity)):
        return found
    if not attention and source.is_cuda:
        from regard.decode.engine.cuda import capture as graph

        graphs = graph.captures(model, source, source_lengths)
        if graphs is not None:
            reading = graph.GraphReading(graphs, model, source, source_lengths, capacity)
            return reading.step, reading
    return plain_translation(model, source, source_lengths, capacity, attention)


def plain_translation(
    model: Transformer,
    source: Tensor,
    source_lengths: Lengths,
    capacity: int | None,
    attention: bool,
) -> tuple[Step, Reading]:
    """The same through the model's own modules."""
    memory = model.encode(source, source_lengths)
    device = memory.device
    lengths: Tensor | None
    if isinstance(source_lengths, Packed):
        memory, lengths = _unpacked(memory, source_lengths), source_lengths.lengths
    else:
        lengths = None if source_lengths is None else integers(source_lengths, "source_lengths")
    if lengths is not None:
        lengths = lengths.to(device)

    def step(tokens: Tensor, state: Reading) -> tuple[Tensor, Reading]:
        with _watching(model, state) if isinstance(state, AttentiveReading) else nullcontext():
            states = model.states(
                tokens.to(device),
                state.memory,
                source_lengths=state.lengths,
                cache=state.cache,
            )
        state.memory = None  # its keys and values are in the cache
        return model.output(states[:, -1]), state

    kind = AttentiveReading if attention else Reading
    return step, kind(model.cache(capacity), memory, lengths)


def _unpacked(memory: Tensor, lengths: Packed) -> Tensor:
    """(1, T, D) as (B, S, D): each source in a row of its own, and then zeros."""
    lengths = lengths.to(memory.device)
    rows = memory.new_zeros(len(lengths), lengths.longest, memory.shape[-1])
    rows[lengths.sequence(), lengths.positions()[0]] = memory[0]
    return rows


def _sources(rows: Tensor, sources: int, beams: int) -> tuple[Tensor | None, int]:
    """The sources that these rows read, each with equally many rows in turn, and how many.

    None where all sources stay as they are. What rows on a device hold is not asked for: they are
    taken for beams that stay with their sentence, and the device itself stops where they do not.
    """
    rows = integers(rows, "rows")
    if on_host(rows):
        if rows.numel() and not 0 <= int(rows.min()) <= int(rows.max()) < sources * beams:
            raise ValueError(
                f"rows ({shown(rows)}) must lie from 0 to {sources * beams - 1}: "
                f"the state holds {sources * beams} rows"
            )
        of = [row // beams for row in rows.tolist()]
        beams = math.gcd(*(len(list(run)) for _, run in itertools.groupby(of))) or 1
        kept = of[::beams]
        return None if kept == list(range(sources)) else torch.tensor(kept).long(), beams
    if beams == 1 or len(rows) != sources * beams:
        return rows // beams, 1
    place = torch.arange(len(rows), device=rows.device)
    torch._assert_async((rows // beams == place // beams).all())
    return None, beams


@contextmanager
def _watching(model: Transformer, state: AttentiveReading) -> Iterator[None]:
    """Weights are recomputed from what the last block's cross-attention is handed."""

    def keep(core: Core, given: tuple[Tensor, ...], named: dict[str, Any]) -> None:
        query, key, _ = given
        all_MHLS = weights(query, key, mask=named["mask"], beta=core.beta)
        # Beams of one source are queries of one row here.
        beams_RLS = all_MHLS.mean(1).unflatten(1, (state.beams, -1)).flatten(0, 1)
        state.attention = beams_RLS[:, -1]

    cross = cast(Block, model.decoder.blocks[-1]).cross
    handle = cast(MultiHeadAttention, cross).core.register_forward_pre_hook(keep, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


# A language model


@torch.no_grad()
def language(model: LanguageModel, *, capacity: int | None = None) -> tuple[Step, StackCache]:
    """The step and the empty state of a language model; prompts are the first tokens given."""
    _check_eval(model)

    def step(tokens: Tensor, state: StackCache) -> tuple[Tensor, StackCache]:
        states = model.states(tokens.to(model.tokens.table.weight.device), cache=state)
        return model.output(states[:, -1]), state

    return step, model.cache(capacity)


def _check_eval(model: nn.Module) -> None:
    if model.training:
        raise ValueError(
            f"the {type(model).__name__} is in training, where dropout changes every step; "
            "call model.eval() first"
        )
