"""A whole search on CUDA in captured graphs: per token nothing is launched or waited for.

A step of decoding is a hundred small kernels, which take longer to launch than to run. Captured
once in a graph, a step of the model and of the search are replayed together. Graphs have fixed
sizes: batches are filled up to a bucket of sentences, of source tokens and of length, and there is
one graph for each bucket that was met, made at the first batch of its size. Whether all sentences
are over is asked every few tokens.

What is computed is what the modules compute, in kernels of `cuda`; what is searched is what `beam`
searches, in a kernel as well; `greedy` is a beam of one.
"""

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.attention.host import integers
from regard.attention.mask import Packed
from regard.attention.multihead import MultiHeadAttention
from regard.attention.position import Learned, Rotary, Sinusoidal
from regard.decode.engine.cuda import kernels as cuda
from regard.decode.engine.eager import Step, plain_translation
from regard.decode.engine.int8.engine import heard, known, parts
from regard.decode.search import topk as choice
from regard.decode.search.beam import Beams, Penalty, hypotheses, penalties, power
from regard.decode.search.constraints import Limits
from regard.decode.search.hypothesis import Hypothesis
from regard.model.block import Block, FeedForward, GatedFeedForward, PreNorm
from regard.model.embedding import Tokens
from regard.model.lengths import Lengths
from regard.model.stack import Stack
from regard.model.transformer import Transformer

LONGEST = 256
"""Source tokens of a sentence; attention in longer ones is not for one program per token."""
GRAPHS = 12
"""How many are kept, those used last."""
SHARE = 1 / 16
"""Of the device's memory, the most that one graph may want for keys and values."""
ASK = 8
"""After how many tokens it is asked whether all sentences are over."""


def captures(model: Transformer, source: Tensor, lengths: Lengths) -> "Graphs | None":
    """The model's graphs, if there are kernels for all that it does."""
    table = model.target.table.weight
    longest = lengths.longest if isinstance(lengths, Packed) else source.shape[-1]
    if not table.is_cuda or not 0 < longest <= LONGEST or torch.is_autocast_enabled("cuda"):
        return None
    modules = parts(model)
    if heard(modules):
        return None
    now = [p for part in modules for p in part._parameters.values() if p is not None]
    # Graphs have copies of some weights, and know where the others lie.
    version = [(p.data_ptr(), 0 if p.is_inference() else p._version) for p in now]
    before, graphs = _known.get(model, ((), None))
    if before != (modules, version):
        graphs = Graphs(model) if _knows(model, modules) else None
        _known[model] = (modules, version), graphs
    return graphs


def _knows(model: Transformer, modules: list[nn.Module]) -> bool:
    text = isinstance(model.source, Tokens) and model.target.table.weight.dtype != torch.float64
    return text and known(model, nn.Linear) and all(map(_shaped, modules))


def _shaped(part: nn.Module) -> bool:
    if not isinstance(part, MultiHeadAttention):
        return not isinstance(part, GatedFeedForward)
    K = part.key_width
    turned = part.position is None or cast(Rotary, part.position).width == K
    return (
        turned
        and part.key_heads == part.heads
        and part.value_width == K
        and K in (16, 32, 64, 128)
        and part.heads * K == part.width == part.output_width
    )


class GraphReading:
    """A source that waits to be searched, as a whole in graphs, or step by step like any other."""

    def __init__(
        self,
        graphs: "Graphs",
        model: Transformer,
        source: Tensor,
        lengths: Lengths,
        capacity: int | None,
    ):
        self.graphs = graphs
        self.model, self.source, self.lengths, self.capacity = model, source, lengths, capacity
        self._plain: tuple[Step, Any] | None = None

    def plain(self) -> tuple[Step, Any]:
        if self._plain is None:
            given = (self.model, self.source, self.lengths, self.capacity)
            self._plain = plain_translation(*given, attention=False)
        return self._plain

    def step(self, tokens: Tensor, state: "GraphReading") -> tuple[Tensor, "GraphReading"]:
        step, inner = state.plain()
        logits, _ = step(tokens, inner)
        return logits, state

    def select(self, rows: Tensor) -> None:
        self.plain()[1].select(rows)

    def greedy(self, limits: Limits) -> list[Hypothesis] | None:
        if not self._room(limits, 1):
            return None
        with torch.inference_mode():
            return self.graphs.greedy(self._rows(), limits)

    def beam(
        self, limits: Limits, width: int, n_best: int, penalty: Penalty
    ) -> list[list[Hypothesis]] | None:
        if not self._room(limits, width):
            return None
        with torch.inference_mode():
            return self.graphs.beam(self._rows(), limits, width, n_best, penalty)

    def _room(self, limits: Limits, width: int) -> bool:
        """Whether keys and values of so many rows of full length are no burden to the device."""
        table = self.model.target.table.weight
        rows = bucket(len(limits.prompt), 1) * width * bucket(limits.steps, 32)
        size = 2 * rows * self.model.config.width * len(self.model.decoder.blocks)
        most = torch.cuda.get_device_properties(table.device).total_memory * SHARE
        return size * table.element_size() <= most

    def _rows(self) -> tuple[Tensor, Tensor]:
        """Ids end to end, and how many each sentence has, on the host."""
        source, lengths = self.source, self.lengths
        if isinstance(lengths, Packed):
            return source[0], lengths.lengths.long().cpu()
        B, S = source.shape
        if lengths is None:
            return source.flatten(), torch.full((B,), S)
        counts = integers(lengths, "source_lengths").long()
        real = torch.arange(S, device=source.device) < counts.to(source.device)[:, None]
        return source[real], counts.cpu()


_known: "WeakKeyDictionary[Transformer, tuple[object, Graphs | None]]" = WeakKeyDictionary()


class Layers:
    """A stack as a few products and kernels."""

    def __init__(self, stack: Stack):
        self.stack = stack
        self.blocks = [cast(Block, block) for block in stack.blocks]
        self.pre = isinstance(self.blocks[0].add_attention, PreNorm)
        self.fused = [_joined(b.attention, ("query", "key", "value")) for b in self.blocks]
        self.sources = [
            _joined(b.cross, ("key", "value")) for b in self.blocks if b.cross is not None
        ]
        first = cast(MultiHeadAttention, self.blocks[0].attention)
        self.rotary = cast(Rotary | None, first.position)
        self.width, self.heads = first.width, first.heads

    def run(
        self,
        x: Tensor,
        own: Callable[[int, Tensor, float], Tensor],
        cross: Callable[[int, Tensor, float], Tensor] | None,
    ) -> Tensor:
        """From vectors to vectors; `own` and `cross` are told block, projections and β."""
        norms: list[nn.Module] = [norm for block in self.blocks for norm in _norms(block)]
        if self.pre:  # each sum is followed by the norm of the next sublayer
            z = norms[0](x)
            norms = [*norms[1:], self.stack.norm or nn.Identity()]
        else:
            z = x
        following = iter(norms)

        def settle(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            norm = next(following)
            if isinstance(norm, nn.Identity):
                return x + y, x + y
            summed, normed = cuda.add_norm(x, y, norm)
            return (summed, normed) if self.pre else (normed, normed)

        for n, block in enumerate(self.blocks):
            attention = cast(MultiHeadAttention, block.attention)
            seen = own(n, F.linear(z, *self.fused[n]), _beta(attention))
            x, z = settle(x, attention.output(seen))
            if block.cross is not None and cross is not None:
                attention = cast(MultiHeadAttention, block.cross)
                seen = cross(n, attention.query(z), _beta(attention))
                x, z = settle(x, attention.output(seen))
            x, z = settle(x, _forward(cast(FeedForward, block.feed_forward), z))
        if not self.pre and self.stack.norm is not None:
            return self.stack.norm(z)
        return z


class Graphs:
    """A model's graphs, one for each bucket."""

    def __init__(self, model: Transformer):
        self.encoder, self.decoder = Layers(model.encoder), Layers(model.decoder)
        # The graphs must not keep the model alive that they are kept for.
        self.source, self.target, self.output = model.source, model.target, model.output
        self.kept: OrderedDict[tuple[object, ...], Any] = OrderedDict()
        self.pool = torch.cuda.graph_pool_handle()

    def graph(self, key: tuple[object, ...], make: Callable[[], Any]) -> Any:
        if key not in self.kept:
            while len(self.kept) >= GRAPHS:
                self.kept.popitem(last=False)
            self.kept[key] = make()
        self.kept.move_to_end(key)
        return self.kept[key]

    def sources(self, rows: tuple[Tensor, Tensor], sentences: int) -> "Sources":
        ids, counts = rows
        places = bucket(len(ids), 32)
        key = ("sources", places)
        made: Sources = self.graph(key, lambda: Sources(self, places))
        made.load(ids, counts, sentences)
        return made

    def greedy(self, rows: tuple[Tensor, Tensor], limits: Limits) -> list[Hypothesis] | None:
        """A beam of one, whose score is log p; None where a sentence has nothing left to say."""
        found = self.beam(rows, limits, 1, 1, power(0))
        if not all(found):
            return None
        return [replace(one, score=math.fsum(one.token_scores)) for [one] in found]

    def beam(
        self,
        rows: tuple[Tensor, Tensor],
        limits: Limits,
        width: int,
        n_best: int,
        penalty: Penalty,
    ) -> list[list[Hypothesis]]:
        B, T = len(limits.prompt), bucket(limits.steps, 32)
        lengths = _lengths(limits, penalty)
        _go(limits, self)
        lengths = lengths.to(limits.most.device)
        sources = self.sources(rows, sentences := bucket(B, 1))
        key = ("beam", sentences, T, id(sources), width, n_best, *limits.kind)
        make = lambda: Beam(self, sources, limits, sentences, width, T, n_best)  # noqa: E731
        made: Beam = self.graph(key, make)
        return made.search(limits, lengths)


class Sources:
    """The encoder, for so many tokens of any sentences: from ids to keys and values."""

    def __init__(self, graphs: Graphs, places: int):
        self.graphs, self.places = graphs, places
        table = graphs.target.table.weight
        device, layers = table.device, graphs.decoder
        self.ids = torch.zeros(places, dtype=torch.int64, device=device)
        # Of each token: its position, and from where on it reads how many.
        self.layout = torch.zeros(3, places, dtype=torch.int64, device=device)
        self.at, self.start, self.count = self.layout
        size = (len(layers.sources), places, 2 * layers.width)
        self.memory = torch.zeros(size, dtype=table.dtype, device=device)
        self.first: Tensor
        self.many: Tensor
        self.run = captured(self._run, graphs.pool)

    def load(self, ids: Tensor, counts: Tensor, sentences: int) -> None:
        """Encode these, each from its own place on."""
        # On the host in numpy, since torch would wake its threads for so little.
        many = counts.numpy()
        first = np.cumsum(many) - many
        T, fill = int(many.sum()), sentences - len(many)
        start, count = np.repeat(first, many), np.repeat(many, many)
        layout = np.zeros((3, self.places), np.int64)
        layout[1:] = np.arange(self.places), np.ones(self.places)  # others read themselves
        layout[:, :T] = np.arange(T) - start, start, count
        self.layout.copy_(torch.from_numpy(layout))
        self.ids[:T].copy_(ids)
        both = np.stack((np.pad(first, (0, fill)), np.pad(many, (0, fill), constant_values=1)))
        self.first, self.many = torch.from_numpy(both).to(self.ids.device).unbind()
        self.run()

    def _run(self) -> None:
        graphs = self.graphs
        layers = graphs.encoder
        x = graphs.source(self.ids[None], self.at[None])[0]
        heads, D = layers.heads, layers.width

        def own(n: int, qkv: Tensor, beta: float) -> Tensor:
            if layers.rotary is not None:
                q, k = qkv[:, : 2 * D].view(len(qkv), 2 * heads, -1).transpose(0, 1).split(heads)
                turned = (layers.rotary.rotate(part[None], self.at[None])[0] for part in (q, k))
                both = [part.transpose(0, 1).flatten(1) for part in turned]
                qkv = torch.cat((*both, qkv[:, 2 * D :]), 1)
            return cuda.read_near(qkv, qkv[:, D:], self.start, self.count, heads, beta, D)

        memory = layers.run(x, own, None)
        for n, joined in enumerate(graphs.decoder.sources):
            self.memory[n].copy_(F.linear(memory, *joined))


class Loop:
    """A step of the decoder and of a search, for so many sentences of `width` rows each."""

    def __init__(self, graphs: Graphs, sources: Sources, sentences: int, width: int, length: int):
        self.graphs, self.sources, self.width, self.sentences = graphs, sources, width, sentences
        target, layers = graphs.target, graphs.decoder
        table = target.table.weight
        device, R, D = table.device, sentences * width, layers.width
        # One for each sentence, so that none waits for another; they are equal between steps.
        self.times = torch.zeros(sentences, dtype=torch.int64, device=device)
        self.time = self.times[0]
        self.last = torch.zeros(sentences, width, dtype=torch.int64, device=device)
        self.table = torch.zeros(R, length, dtype=torch.int32, device=device)
        self.first = torch.zeros(sentences, dtype=torch.int64, device=device)
        self.many = torch.ones_like(self.first)
        size = (len(layers.blocks), length * R, 2 * D)
        self.kept = torch.empty(size, dtype=table.dtype, device=device)
        zeros = table.new_zeros(1, length, target.width)
        self.places = target.placed(zeros, 0)[0].contiguous()
        self.turn, self.partner = _turns(layers.rotary, length, device)

    def logits(self) -> Tensor:
        """Of every row's next token, after its last."""
        graphs, target, layers = self.graphs, self.graphs.target, self.graphs.decoder
        heads, D = layers.heads, layers.width
        if target.position is None or type(target.position) in (Sinusoidal, Learned):
            tokens, table = self.last.flatten(), target.table.weight
            x = cuda.embed(tokens, table, self.places, self.time, target.scale)
        else:
            x = target(self.last.flatten()[:, None], self.time)[:, 0].contiguous()

        def own(n: int, qkv: Tensor, beta: float) -> Tensor:
            at = (self.kept[n], self.table, self.time)
            return cuda.own(qkv, *at, heads, beta, self.turn, self.partner)

        def cross(n: int, query: Tensor, beta: float) -> Tensor:
            memory = self.sources.memory[n]
            at = (self.first, self.many)
            return cuda.read(query, memory, *at, heads, beta, self.width, D)

        return graphs.output(layers.run(x, own, cross))

    def begin(self, limits: Limits) -> None:
        B = len(limits.prompt)
        self.times.zero_()
        self.last[:B].copy_(limits.prompt)
        self.first.copy_(self.sources.first)
        self.many.copy_(self.sources.many)


class Beam(Loop):
    def __init__(
        self,
        graphs: Graphs,
        sources: Sources,
        limits: Limits,
        sentences: int,
        width: int,
        length: int,
        n_best: int,
    ):
        super().__init__(graphs, sources, sentences, width, length)
        device = self.last.device
        still = _static(limits, sentences, device)
        still.steps = length
        still.most.fill_(length)
        self.beams = Beams(still, width, n_best, power(0), 0.0, _like(graphs, sentences))
        self.beams.open = torch.zeros(sentences, width, device=device)
        self.beams.last = self.last
        self.least = still._least if limits.kind[2] else None
        self.count = 2 * width + len(limits.banned) + (self.least is not None)
        self.first.copy_(sources.first)
        self.many.copy_(sources.many)
        self.run = captured(self._run, graphs.pool, before=self.times.zero_)

    def _run(self) -> None:
        found = choice.best(self.logits(), self.count)
        cuda.search(found, self.beams, self.least, self.times, self.table)

    def search(self, limits: Limits, lengths: Tensor) -> list[list[Hypothesis]]:
        B, beams = len(limits.prompt), self.beams
        self.begin(limits)
        _fill(beams.limits, limits)
        beams.over.fill_(True)
        beams.over[:B] = False
        beams.open.fill_(-math.inf)
        beams.open[:B, 0] = 0.0
        beams.scores.fill_(-math.inf)
        beams.lengths.zero_()
        beams.penalty[: lengths.shape[1]] = lengths[0]
        beams.largest[:B, : lengths.shape[1]] = lengths[1:]
        for t in range(limits.steps):
            self.run()
            if t % ASK == ASK - 1 and bool(beams.over.all()):
                break
        return [hypotheses(one) for one in zip(*cuda.told(beams, B))]


def captured(
    run: Callable[[], None], pool: Any, before: Callable[[], Any] = lambda: None
) -> Callable[[], None]:
    """The replay of all that `run` does to tensors that stay where they are."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):  # what happens once, compiling above all, is not captured
            before()
            run()
    torch.cuda.current_stream().wait_stream(stream)
    before()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, stream=stream):
        run()
    return graph.replay


def bucket(n: int, least: int) -> int:
    """The next size for which there is a graph: at most a quarter more, from 8 × `least` on."""
    n = max(n, least)
    step = max(least, 1 << max(0, n.bit_length() - 3))
    return -(-n // step) * step


def _go(limits: Limits, graphs: Graphs) -> None:
    """Take the limits to the device while it has nothing to do that they would wait for."""
    limits.fit(_like(graphs, len(limits.prompt)))
    limits.prompt = limits.prompt.to(limits.most.device)


def _lengths(limits: Limits, penalty: Penalty) -> Tensor:
    """`penalty` and then `largest` of `Beams`, made on the host, where the limits still are."""
    most = limits.most.numpy()
    table = np.array([1.0, *penalties(penalty, int(most.max())), 1.0], np.float32)
    n = np.arange(len(table))
    possible = np.where((n > 0) & (n <= most[:, None]), table, 0.0)
    largest = np.maximum.accumulate(possible[:, ::-1], 1)[:, ::-1]
    return torch.from_numpy(np.vstack((table, largest)).astype(np.float32))


def _static(limits: Limits, sentences: int, device: torch.device) -> Limits:
    """Limits of the same kind for a bucket, whose tensors stay where they are."""
    early = limits.kind[2]
    prompts = [[0]] * sentences
    still = Limits(prompts, limits.end, 1, int(bool(early)), limits.banned)
    for name in ("most", "_given", "_least", "_forced", "_banned"):
        setattr(still, name, getattr(still, name).to(device).clone())
    return still


def _fill(still: Limits, limits: Limits) -> None:
    B = len(limits.prompt)
    for name in ("most", "_given", "_least"):
        getattr(still, name)[:B].copy_(getattr(limits, name))


def _like(graphs: Graphs, rows: int) -> Tensor:
    """As logits are, without their numbers."""
    weight = graphs.output.weight
    return weight.new_empty(()).expand(rows, len(weight))


def _joined(part: Any, names: tuple[str, ...]) -> tuple[Tensor, Tensor | None]:
    linears = [getattr(part, name) for name in names]
    weight = torch.cat([linear.weight.detach() for linear in linears])
    if linears[0].bias is None:
        return weight, None
    return weight, torch.cat([linear.bias.detach() for linear in linears])


def _forward(part: FeedForward, z: Tensor) -> Tensor:
    if isinstance(part.activation, nn.ReLU):
        expand = part.expand
        return part.reduce(torch._addmm_activation(expand.bias, z, expand.weight.T))
    return part.reduce(part.activation(part.expand(z)))


def _norms(block: Block) -> list[nn.LayerNorm]:
    parts = (block.add_attention, block.add_cross, block.add_feed_forward)
    return [cast(nn.LayerNorm, part.norm) for part in parts if part is not None]


def _beta(part: MultiHeadAttention) -> float:
    beta = part.core.beta
    return 1 / math.sqrt(part.key_width) if beta is None else float(beta)


def _turns(rotary: Rotary | None, length: int, device: torch.device) -> tuple[Tensor | None, int]:
    """Each column's factor, and that of its partner: cos and ± sin."""
    if rotary is None:
        return None, 0
    K, halves = rotary.width, rotary.layout == "halves"
    pairs = torch.tensor([1.0, 0.0])
    first = pairs.repeat_interleave(K // 2) if halves else pairs.repeat(K // 2)
    a, b = (rotary.rotate(one.expand(length, -1)) for one in (first, 1 - first))
    # (1, 0) becomes (cos, sin) and (0, 1) becomes (-sin, cos).
    cos = torch.where(first > 0, a, b)
    sin = torch.where(first > 0, b, a)
    return torch.stack((cos, sin), 1).to(device).contiguous(), 2 if halves else 1
