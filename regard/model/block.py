"""A block (layer): attention, then a position-wise feed-forward network, each with a residual.

    post-norm (Vaswani et al. 2017)    x = LayerNorm(x + Dropout(Sublayer(x)))
    pre-norm  (ViT, GPT)               x = x + Dropout(Sublayer(LayerNorm(x)))

A block with cross-attention is a decoder's: it reads the encoder's output with keys and values of
its own. The same block without it is an encoder's, or, under a causal mask, a language model's.

In half precision on a GPU a pre-norm block leaves its residual sums to the LayerNorms after them,
and its last one to the next block, so that each tensor is read once.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from regard.attention.arguments import as_mask
from regard.attention.cache import CrossCache, SelfCache
from regard.attention.checks import check_integer, shown
from regard.attention.fusing import are_linear, fuses, has_hooks, infers, infers_large
from regard.attention.mask import Mask
from regard.attention.state import LoadableModule
from regard.model.dropout import Dropout

Activation: TypeAlias = Literal["relu", "gelu", "silu", "swiglu"]
Norm: TypeAlias = Literal["post", "pre"]
Sublayer: TypeAlias = Callable[[Tensor], Tensor]

DROPOUTS = (Dropout, nn.Dropout)


class FeedForward(nn.Module):
    """y = W₂ a(W₁ x + b₁) + b₂ for each position alone, with an activation function a."""

    def __init__(
        self,
        width: int,
        hidden: int,
        activation: Callable[[Tensor], Tensor] = F.relu,
        dropout: float | int = 0.0,
    ):
        super().__init__()
        check_integer("feed_forward", hidden)
        self.expand = nn.Linear(width, hidden)
        self.activation = activation
        self.dropout = Dropout(dropout)
        self.reduce = nn.Linear(hidden, width)

    def forward(self, x: Float[Tensor, "*b D"]) -> Float[Tensor, "*b D"]:
        if fuses(x) and self._is_standard(self.expand, self.reduce):
            from regard.model import fused

            return fused.feed_forward(x, self.expand, self.reduce, self._is_gelu)
        if infers(x) and self._is_standard(self.expand) and self.expand.bias is not None:
            return self.reduce(_activate(x, self.expand, self._is_gelu))
        return self.reduce(self.dropout(self.activation(self.expand(x))))

    def extra_repr(self) -> str:
        return "" if isinstance(self.activation, nn.Module) else shown(self.activation)

    @property
    def _is_gelu(self) -> bool:
        return isinstance(self.activation, nn.GELU)

    def _is_standard(self, *linears: nn.Module) -> bool:
        """True if fused kernels compute these layers, and activation and dropout between them."""
        activation: Any = self.activation
        dropout, kind = self.dropout, type(activation)
        return (
            (kind is nn.ReLU or (kind is nn.GELU and activation.approximate == "none"))
            and type(dropout) in DROPOUTS
            and _rate(dropout) == 0
            and not has_hooks(activation, dropout)
            and are_linear(*linears)
        )


def _activate(x: Tensor, expand: nn.Linear, gelu: bool) -> Tensor:
    """a(W₁ x + b₁) by the matrix product itself, before its result is rounded.

    Its GELU on CUDA is the approximation with tanh, off by at most 4.8e-4: less than rounding to
    bfloat16 before the activation costs. Against float64 the relative error is 1.7e-3, and 2.5e-3
    in two steps with the exact one. It serves every size, so that a row's result does not depend
    on the rest of the batch. Training computes the exact one, and differs by as much.
    """
    rows = x.reshape(-1, x.shape[-1])
    hidden = torch._addmm_activation(expand.bias, rows, expand.weight.T, use_gelu=gelu)
    return hidden.view(*x.shape[:-1], hidden.shape[-1])


class GatedFeedForward(nn.Module):
    """SwiGLU: y = W₂ (silu(W₁ x) ⊙ V x), without biases (Shazeer 2020).

    With three matrices instead of two, a hidden width of 2/3 of the plain one costs the same.
    """

    def __init__(self, width: int, hidden: int, dropout: float | int = 0.0):
        super().__init__()
        check_integer("feed_forward", hidden)
        self.gate = nn.Linear(width, hidden, bias=False)
        self.expand = nn.Linear(width, hidden, bias=False)
        self.dropout = Dropout(dropout)
        self.reduce = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Float[Tensor, "*b D"]) -> Float[Tensor, "*b D"]:
        return self.reduce(self.dropout(F.silu(self.gate(x)) * self.expand(x)))


class DeferredSum(NamedTuple):
    """The residual sum x + Dropout(y), which the next LayerNorm computes."""

    x: Tensor
    y: Tensor
    dropout: float


class PostNorm(nn.Module):
    """LayerNorm(x + Dropout(Sublayer(x))): section 3.1 of Vaswani et al. (2017), 5.4 for dropout.

    `rows` computes the first rows alone, where the others are not read.
    """

    def __init__(self, width: int, dropout: float | int = 0.0, epsilon: float = 1e-5):
        super().__init__()
        self.norm = nn.LayerNorm(width, epsilon)
        self.dropout = Dropout(dropout)

    def forward(
        self, x: Float[Tensor, "B L D"], sublayer: Sublayer, rows: int | None = None
    ) -> Float[Tensor, "B R D"]:
        if rows is None and fuses(x) and _is_standard(self.norm, self.dropout):
            from regard.model import fused

            x, narrow = fused.narrow(x)
            return fused.add_norm(x, sublayer(narrow), _rate(self.dropout), self.norm)
        return self.norm(x[:, :rows] + self.dropout(sublayer(x)))


class PreNorm(nn.Module):
    """x + Dropout(Sublayer(LayerNorm(x))): residual connections all the way to the first layer."""

    def __init__(self, width: int, dropout: float | int = 0.0, epsilon: float = 1e-5):
        super().__init__()
        self.norm = nn.LayerNorm(width, epsilon)
        self.dropout = Dropout(dropout)

    def forward(
        self, x: Float[Tensor, "B L D"], sublayer: Sublayer, rows: int | None = None
    ) -> Float[Tensor, "B R D"]:
        if fuses(x) and _is_standard(self.norm, self.dropout):
            from regard.model import fused

            return fused.residual(*self.terms(x, sublayer, rows))
        return x[:, :rows] + self.dropout(sublayer(self.norm(x)))

    def terms(
        self, x: Tensor | DeferredSum, sublayer: Sublayer, rows: int | None = None
    ) -> DeferredSum:
        """The terms of the residual sum; if x is a deferred sum, the LayerNorm computes it."""
        from regard.model import fused

        x, y, dropout = x if isinstance(x, DeferredSum) else (x, None, 0.0)
        normed, total = fused.norm(x, self.norm, y, dropout)
        return DeferredSum(total[:, :rows], sublayer(normed), _rate(self.dropout))


def _is_standard(norm: nn.Module, dropout: nn.Module) -> bool:
    """True if fused kernels compute this normalisation and this dropout."""
    return (
        type(norm) is nn.LayerNorm
        and norm.bias is not None
        and type(dropout) in DROPOUTS
        and not has_hooks(norm, dropout)
    )


def _rate(dropout: nn.Dropout) -> float:
    return dropout.p if dropout.training else 0.0


class BlockCache(NamedTuple):
    """A block's KV cache."""

    own: SelfCache
    cross: CrossCache


class Block(LoadableModule):
    """Self-attention, cross-attention where there is one, and the feed-forward network.

    `residual` builds the module around each of them, for example `PreNorm(width)`.
    """

    def __init__(
        self,
        attention: nn.Module,
        feed_forward: nn.Module,
        residual: Callable[[], nn.Module],
        cross: nn.Module | None = None,
    ):
        super().__init__()
        self.attention = attention
        self.add_attention = residual()
        self.cross = cross
        self.add_cross = None if cross is None else residual()
        self.feed_forward = feed_forward
        self.add_feed_forward = residual()

    def defers(self, x: Float[Tensor, "B L D"]) -> bool:
        """True if residual sums are left to the LayerNorms after them."""
        if not (fuses(x) or infers_large(x)):
            return False
        parts: tuple[Any, ...] = (self.add_attention, self.add_cross, self.add_feed_forward)
        return all(
            type(part) is PreNorm and not has_hooks(part) and _is_standard(part.norm, part.dropout)
            for part in parts
            if part is not None
        )

    def forward(
        self,
        x: Float[Tensor, "B L D"] | DeferredSum,
        memory: Float[Tensor, "M S E"] | None = None,
        *,
        mask: Mask | Bool[Tensor, "..."] | None = None,
        memory_mask: Mask | Bool[Tensor, "..."] | None = None,
        cache: BlockCache | None = None,
        rows: int | None = None,
        defer: bool = False,
    ) -> Float[Tensor, "B R D"] | DeferredSum:
        """`rows` computes the first rows alone. `defer` leaves the last residual sum to the next
        block; only a block that `defers` can return or receive such a sum."""
        self_cache, across = cache or (None, None)
        own = as_mask(mask)

        def attend(x: Tensor) -> Tensor:
            if rows is None:
                return self.attention(x, mask=own, cache=self_cache)
            first = None if own is None else own.at(0)  # otherwise rows are the last ones
            return self.attention(x[:, :rows], x, mask=first, cache=self_cache)

        def read(x: Tensor) -> Tensor:
            assert self.cross is not None
            if across is None or across.beams == 1:
                return self.cross(x, memory, mask=memory_mask, cache=across)
            # Beams that share a source attend to it together, as more queries of one row.
            queries = x.unflatten(0, (-1, across.beams)).flatten(1, 2)
            return self.cross(queries, memory, mask=memory_mask, cache=across).view_as(x)

        if isinstance(x, DeferredSum) or self.defers(x):
            from regard.model import fused

            terms = self._terms(x, attend, read, rows)
            return terms if defer else fused.residual(*terms)
        x = self.add_attention(x, attend, rows)
        if self.add_cross is not None:
            x = self.add_cross(x, read)
        return self.add_feed_forward(x, self.feed_forward)

    def _terms(
        self, x: Tensor | DeferredSum, attend: Sublayer, read: Sublayer, rows: int | None
    ) -> DeferredSum:
        """The last residual sum; those before it are computed by the LayerNorms after them."""
        sublayers = (
            (self.add_attention, attend, rows),
            (self.add_cross, read, None),
            (self.add_feed_forward, self.feed_forward, None),
        )
        for add, sublayer, first in sublayers:
            if isinstance(add, PreNorm):
                x = add.terms(x, sublayer, first)
        assert isinstance(x, DeferredSum)
        return x
