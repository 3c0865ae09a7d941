"""A stack: the same block N times, each with weights of its own.

    x_0 = x,  x_{n+1} = block_n(x_n),  and a LayerNorm at the end where the blocks are pre-norm

In an encoder-decoder every block of the decoder reads the output of the *last* encoder block, each
through keys and values of its own.
"""

from collections.abc import Iterable, Sequence
from functools import partial

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from regard.attention.arguments import as_mask
from regard.attention.cache import CrossCache, SelfCache
from regard.attention.checks import shown
from regard.attention.core import recomputation
from regard.attention.fusing import has_hooks
from regard.attention.mask import Mask
from regard.attention.position import Positions
from regard.attention.state import LoadableModule
from regard.model.block import Block, BlockCache


class StackCache:
    """The KV caches of every block, as a model's `cache()` returns them.

    With a `capacity` each is allocated once, and a step can be captured in a CUDA graph. Its
    methods change all of them in place.
    """

    def __init__(self, blocks: int, capacity: int | None = None):
        self.blocks = [BlockCache(SelfCache(capacity), CrossCache()) for _ in range(blocks)]

    @property
    def length(self) -> int | Tensor:
        """The number of positions decoded so far, one or one for each row."""
        return self.blocks[0].own.length if self.blocks else 0

    def places(self, count: int) -> Positions:
        """Returns the next `count` positions."""
        return self.blocks[0].own.places(count) if self.blocks else 0

    def trim(self, lengths: Int[Tensor, "B"]) -> None:
        """Keeps the first lengths[r] positions of row r, in place."""
        for block in self.blocks:
            block.own.trim(lengths)

    def join(self, other: "StackCache") -> None:
        """Appends the rows of another cache, in place; each row then has a source of its own."""
        for block, after in zip(self.blocks, other.blocks):
            block.own.join(after.own)
            if block.cross.held is not None:
                block.cross.join(after.cross)

    def select(self, rows: Sequence[int] | Int[Tensor, "R"]) -> None:
        """Keeps, drops, repeats or reorders rows, in place: row r continues the old row rows[r]."""
        for block in self.blocks:
            block.own.select(rows)
            block.cross.select(rows)

    def share(
        self,
        rows: Sequence[int] | Int[Tensor, "R"],
        sources: Sequence[int] | Int[Tensor, "M"] | None,
        beams: int,
    ) -> None:
        """Selects rows as `select` does, where each source serves `beams` successive rows.

        `sources` are those to keep; None keeps all. The lengths of the sources are then one for
        each source instead of one for each row.
        """
        for block in self.blocks:
            block.own.select(rows)
            block.cross.share(sources, beams)


class Stack(LoadableModule):
    """Blocks one after the other.

    `checkpointing` (gradient checkpointing) keeps each block's input alone for the backward pass
    and recomputes the rest: less memory, a third more arithmetic, the same gradients.
    """

    def __init__(
        self, blocks: Iterable[Block], norm: nn.Module | None = None, checkpointing: bool = False
    ):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.norm = norm
        self.checkpointing = checkpointing

    def forward(
        self,
        x: Float[Tensor, "B L D"],
        memory: Float[Tensor, "M S E"] | None = None,
        *,
        mask: Mask | Bool[Tensor, "..."] | None = None,
        memory_mask: Mask | Bool[Tensor, "..."] | None = None,
        cache: StackCache | None = None,
        rows: int | None = None,
    ) -> Float[Tensor, "B R D"]:
        """`rows` returns the first rows of the result alone; only the last block can save on it."""
        mask, memory_mask = as_mask(mask), as_mask(memory_mask)  # once for all blocks
        if cache is not None:
            self._check_cache(cache)
        last = len(self.blocks) - 1
        defers = [_defers(block, x) for block in self.blocks]
        for n, block in enumerate(self.blocks):
            run = partial(
                block,
                mask=mask,
                memory_mask=memory_mask,
                cache=None if cache is None else cache.blocks[n],
                rows=rows if n == last else None,
            )
            if self.checkpointing and torch.is_grad_enabled():
                x = checkpoint(run, x, memory, use_reentrant=False, context_fn=recomputation())
            elif n < last and defers[n] and defers[n + 1]:
                x = run(x, memory, defer=True)
            else:
                x = run(x, memory)
        return x if self.norm is None else self.norm(x)

    def _check_cache(self, cache: StackCache) -> None:
        if not isinstance(cache, StackCache):
            raise ValueError(f"cache ({shown(cache)}) must be made by the model's cache()")
        if len(cache.blocks) != len(self.blocks):
            raise ValueError(
                f"the cache is for {len(cache.blocks)} blocks, but there are {len(self.blocks)}; "
                "use the model's own: model.cache()"
            )


def _defers(block: nn.Module, x: Tensor) -> bool:
    """True if a block can return and receive deferred sums, and has no hook that would see one."""
    return type(block) is Block and block.defers(x) and not has_hooks(block)
