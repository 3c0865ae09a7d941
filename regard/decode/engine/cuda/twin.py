"""A stack's twin: the model's own blocks, with kernels in some of their parts.

A twin shares the parameters of the original, so it follows weights that are trained on or moved in
place; joined copies, used where several matrices are multiplied as one, are refreshed. The forward
pass of a block is defined in `model/block.py` alone. A part without a kernel is left unchanged: its
cache then returns keys and values as any cache does.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from regard.attention.cache import CrossCache, Pair, SelfCache
from regard.attention.fusing import are_linear
from regard.attention.mask import Mask, Prefix, window
from regard.attention.multihead import MultiHeadAttention
from regard.attention.position import RotaryEmbedding
from regard.decode.engine.cuda import kernels
from regard.decode.engine.parts import scale, unusual
from regard.model.block import Block, FeedForward, GatedFeedForward, PostNorm
from regard.model.stack import Stack

WIDTHS = (16, 32, 64, 128)
"""Head widths for which there are kernels."""


class Rows:
    """The addresses that the rows of a step read and write; its tensors never move."""

    def __init__(self, rows: int, length: int, beams: int, device: torch.device):
        self.beams = beams
        """Number of consecutive rows that read the same source."""
        self.filled = torch.zeros(rows, dtype=torch.int64, device=device)
        """Number of positions of each row."""
        self.table = torch.zeros(rows, length, dtype=torch.int32, device=device)
        """The slot of each position."""
        self.start = torch.zeros(rows, dtype=torch.int64, device=device)
        self.count = torch.ones(rows, dtype=torch.int64, device=device)
        """The first memory position that each row reads, and the number of positions."""
        self.chosen: Tensor | None = None
        """The rows of a prefill; None at a step, which has all rows."""

    def __len__(self) -> int:
        return len(self.filled)


class SlotCache(SelfCache):
    """Keys and values of a block in slots: (slots, G (K + V))."""

    def __init__(
        self,
        rows: Rows,
        attention: MultiHeadAttention,
        dtype: torch.dtype,
        reach: int | None = None,
    ):
        super().__init__()
        self.reach = reach
        G, K, V = attention.key_heads, attention.key_width, attention.value_width
        self.rows, self.sizes = rows, (attention.heads, G, K, V)
        R, length = rows.table.shape
        device = rows.table.device
        self.slots = torch.zeros(R * length, G * (K + V), dtype=dtype, device=device)
        rotary = attention.position
        self.rotary = None
        if type(rotary) is RotaryEmbedding:
            self.rotary = rotation_factors(rotary, K, length, device)

    @property
    def length(self) -> int | Tensor:
        return self.rows.filled if self.rows.chosen is None else 0

    def extend(
        self, project: Callable[[], Pair], mask: Mask | None = None
    ) -> tuple[Tensor, Tensor, Mask | None]:
        rows, (_, G, K, V) = self.rows, self.sizes
        key, value = project()
        new = torch.cat([x.transpose(1, 2).flatten(2) for x in (key, value)], -1)  # (R, n, KV)
        if rows.chosen is not None:
            by_position = self.slots.unflatten(0, (-1, len(rows)))
            by_position[: new.shape[1], rows.chosen] = new.transpose(0, 1)
            return key, value, mask
        each = torch.arange(len(rows), device=new.device)
        at = rows.filled * len(rows) + each
        self.slots[at] = new[:, 0]
        rows.table[each, rows.filled] = at.int()
        keys, values = self.slots[rows.table.long()].split((G * K, G * V), -1)
        # A step has one query, which sees everything before it, or the positions in its window.
        visible: Mask = Prefix(rows.filled + 1)
        if self.reach is not None:
            visible = window(self.reach, 0, rows.filled) & visible
        return split(keys, G), split(values, G), visible


class MemoryCache(CrossCache):
    """Keys and values of the sources, for a block's cross-attention: (places, G (K + V))."""

    def __init__(
        self,
        rows: Rows,
        attention: MultiHeadAttention,
        sources: int,
        longest: int,
        dtype: torch.dtype,
    ):
        super().__init__()
        G, K, V = attention.key_heads, attention.key_width, attention.value_width
        self.rows, self.sizes, self.longest = rows, (attention.heads, G, K, V), longest
        device = rows.table.device
        self.memory = torch.zeros(sources * longest, G * (K + V), dtype=dtype, device=device)

    def reads(self, queries: int) -> tuple[Tensor, Tensor]:
        """The first position, and the number, that each row or token of a prefill reads."""
        start, count = self.rows.start, self.rows.count
        if self.rows.chosen is None:
            return start, count
        chosen = self.rows.chosen
        return start[chosen].repeat_interleave(queries), count[chosen].repeat_interleave(queries)

    def extend(
        self, project: Callable[[], Pair], mask: Mask | None = None
    ) -> tuple[Tensor, Tensor, Mask | None]:
        start, count = self.reads(1)
        _, G, K, V = self.sizes
        at = start[:, None] + torch.arange(self.longest, device=start.device)
        keys, values = self.memory[at.clamp(max=len(self.memory) - 1)].split((G * K, G * V), -1)
        return split(keys, G), split(values, G), Prefix(count)


class Joined:
    """Weights and biases of several linear layers as one."""

    def __init__(self, linears: Sequence[nn.Linear]):
        self.linears = linears
        self.weight = torch.cat([linear.weight.detach() for linear in linears])
        biases = [linear.bias for linear in linears]
        self.bias = None if biases[0] is None else torch.cat([b.detach() for b in biases])

    def refresh(self) -> None:
        torch.cat([linear.weight.detach() for linear in self.linears], out=self.weight)
        if self.bias is not None:
            torch.cat([linear.bias.detach() for linear in self.linears], out=self.bias)

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class StepAttention(MultiHeadAttention):
    """Self-attention whose step is one product and one kernel."""

    joined: Joined

    def forward(
        self,
        x: Float[Tensor, "B L D"],
        source: Float[Tensor, "B S E"] | None = None,
        *,
        value: Float[Tensor, "B S U"] | None = None,
        mask: Mask | Bool[Tensor, "..."] | None = None,
        cache: Any = None,
    ) -> Float[Tensor, "B L O"]:
        if not isinstance(cache, SlotCache) or cache.rows.chosen is not None:
            return super().forward(x, source, value=value, mask=mask, cache=cache)
        rows = cache.rows
        heads = kernels.self_attention(
            self.joined(x[:, 0]), cache.slots, rows.table, rows.filled, cache.sizes,
            scale(self), cache.rotary, cache.reach,
        )  # fmt: skip
        return self.output(heads)[:, None]


class StepCrossAttention(MultiHeadAttention):
    """Cross-attention that reads the memory in place."""

    def forward(
        self,
        x: Float[Tensor, "B L D"],
        source: Float[Tensor, "B S E"] | None = None,
        *,
        value: Float[Tensor, "B S U"] | None = None,
        mask: Mask | Bool[Tensor, "..."] | None = None,
        cache: Any = None,
    ) -> Float[Tensor, "B L O"]:
        if not isinstance(cache, MemoryCache):
            return super().forward(x, source, value=value, mask=mask, cache=cache)
        start, count = cache.reads(x.shape[1])
        beams = cache.rows.beams if cache.rows.chosen is None else 1
        query = self.query(x.flatten(0, 1))
        heads = kernels.cross_attention(
            query, cache.memory, start, count, cache.sizes, scale(self), beams
        )
        return self.output(heads).unflatten(0, x.shape[:2])


class StepPostNorm(PostNorm):
    """The sum and its LayerNorm in one kernel."""

    def forward(
        self,
        x: Float[Tensor, "B L D"],
        sublayer: Callable[[Tensor], Tensor],
        rows: int | None = None,
    ) -> Float[Tensor, "B R D"]:
        return kernels.add_norm(x[:, :rows], sublayer(x), self.norm)


class StepFeedForward(FeedForward):
    """The product, its bias and the ReLU in one kernel."""

    def forward(self, x: Float[Tensor, "*b D"]) -> Float[Tensor, "*b D"]:
        expand, rows = self.expand, x.reshape(-1, x.shape[-1])
        hidden = torch._addmm_activation(expand.bias, rows, expand.weight.T)
        return self.reduce(hidden).view(*x.shape[:-1], -1)


class StepGatedFeedForward(GatedFeedForward):
    """Gate and value in one product, and one kernel between the products."""

    joined: Joined

    def forward(self, x: Float[Tensor, "*b D"]) -> Float[Tensor, "*b D"]:
        return self.reduce(kernels.swiglu(self.joined(x)))


def twin(stack: Stack, joined: list[Joined]) -> Stack:
    """The same blocks, with kernels where there are any; copies of weights go to `joined`."""
    blocks = nn.ModuleList(_block(cast(Block, block), joined) for block in stack.blocks)
    return cast(Stack, _as(Stack, stack, blocks=blocks))


def _block(block: Block, joined: list[Joined]) -> nn.Module:
    parts: dict[str, nn.Module] = {}

    def together(kind: type[nn.Module], part: nn.Module, *linears: nn.Linear) -> nn.Module:
        copy: Any = _as(kind, part)
        copy.joined = Joined(linears)
        joined.append(copy.joined)
        return copy

    attention: Any = block.attention
    cross, forward = block.cross, block.feed_forward
    if _has_kernels(attention) and type(attention.position) in (type(None), RotaryEmbedding):
        inputs = attention.query, attention.key, attention.value
        if are_linear(*inputs):
            parts["attention"] = together(StepAttention, attention, *inputs)
    if cross is not None and _has_kernels(cross):
        parts["cross"] = _as(StepCrossAttention, cross)
    if type(forward) is GatedFeedForward and are_linear(forward.gate, forward.expand):
        gate, expand = forward.gate, forward.expand
        parts["feed_forward"] = together(StepGatedFeedForward, forward, gate, expand)
    elif (
        type(forward) is FeedForward
        and type(forward.activation) is nn.ReLU
        and are_linear(forward.expand)
        and forward.expand.bias is not None
    ):
        parts["feed_forward"] = _as(StepFeedForward, forward)
    for name in ("add_attention", "add_cross", "add_feed_forward"):
        part = getattr(block, name)
        if type(part) is not PostNorm or type(part.norm) is not nn.LayerNorm:
            continue
        if part.norm.bias is not None:
            parts[name] = _as(StepPostNorm, part)
    return _as(Block, block, **parts)


def _as(kind: type[nn.Module], module: nn.Module, **parts: nn.Module) -> nn.Module:
    """A module of another class with the same parameters; `parts` replace submodules."""
    copy = kind.__new__(kind)
    copy.__dict__ = dict(module.__dict__)
    copy._modules = {**module._modules, **parts}
    return copy


def _has_kernels(part: nn.Module) -> bool:
    """True if there are kernels for an attention."""
    if unusual(part):
        return False
    attention = cast(MultiHeadAttention, part)
    return attention.key_width in WIDTHS and attention.value_width in WIDTHS


def split(x: Float[Tensor, "R T W"], heads: int) -> Float[Tensor, "R G T K"]:
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def rotation_factors(
    rotary: RotaryEmbedding, width: int, length: int, device: torch.device
) -> tuple[Float[Tensor, "T 2 K"], Int[Tensor, "K"]]:
    """The factors of each column and of its partner, cos and ± sin; the index of the partner."""
    K, halves = rotary.width, rotary.layout == "halves"
    columns = torch.arange(K)
    partners = torch.arange(width)
    partners[:K] = (columns + K // 2) % K if halves else columns ^ 1
    first = columns < K // 2 if halves else columns % 2 == 0
    a, b = (rotary.rotate(unit.float().expand(length, -1)) for unit in (first, ~first))
    # (1, 0) becomes (cos, sin) and (0, 1) becomes (-sin, cos); other columns stay.
    factors = torch.zeros(length, 2, width)
    factors[:, 0], factors[:, 0, :K] = 1.0, torch.where(first, a, b)
    factors[:, 1, :K] = torch.where(first, b, a)
    return factors.to(device), partners.to(device)
