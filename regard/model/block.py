"""A block (layer): attention, then a position-wise feed-forward network, each with a residual.

    post-norm (Vaswani et al. 2017)    x = LayerNorm(x + Dropout(Sublayer(x)))
    pre-norm  (ViT, GPT)               x = x + Dropout(Sublayer(LayerNorm(x)))

A block with cross-attention is a decoder's: it reads the encoder's output with keys and values of
its own. The same block without it is an encoder's, or, under a causal mask, a language model's.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple, TypeAlias

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from regard.attention.cache import CrossCache, SelfCache
from regard.attention.checks import check_integer
from regard.attention.fusing import fuses, plain
from regard.attention.mask import Mask
from regard.model.dropout import Dropout

Activation: TypeAlias = Literal["relu", "gelu", "silu", "swiglu"]
Norm: TypeAlias = Literal["post", "pre"]
Sublayer: TypeAlias = Callable[[Tensor], Tensor]


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
        gelu = isinstance(self.activation, nn.GELU) and self.activation.approximate == "none"
        known = (gelu or isinstance(self.activation, nn.ReLU)) and _rate(self.dropout) == 0
        if known and fuses(x) and plain(self.expand, self.reduce):
            from regard.model import fused

            return fused.feed_forward(x, self.expand, self.reduce, gelu)
        return self.reduce(self.dropout(self.activation(self.expand(x))))


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
        if rows is None and _fuses(x, self.norm, self.dropout):
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
        if rows is None and _fuses(x, self.norm, self.dropout):
            from regard.model import fused

            normed, x = fused.norm(x, self.norm)
            return fused.residual(x, sublayer(normed), _rate(self.dropout))
        return x[:, :rows] + self.dropout(sublayer(self.norm(x)))


def _fuses(x: Tensor, norm: nn.Module, dropout: nn.Module) -> bool:
    """Whether normalisation, dropout and sum are what fused kernels know."""
    usual = type(norm) is nn.LayerNorm and norm.bias is not None and isinstance(dropout, nn.Dropout)
    return usual and fuses(x)


def _rate(dropout: nn.Dropout) -> float:
    return dropout.p if dropout.training else 0.0


class BlockCache(NamedTuple):
    """A block's KV cache."""

    own: SelfCache
    cross: CrossCache


class Block(nn.Module):
    """Self-attention, cross-attention where there is one, and the feed-forward network.

    Each is a module given to it. `residual` makes what goes around them: `PreNorm(width)`, say.
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

    def forward(
        self,
        x: Float[Tensor, "B L D"],
        memory: Float[Tensor, "M S E"] | None = None,
        *,
        mask: Mask | None = None,
        memory_mask: Mask | None = None,
        cache: BlockCache | None = None,
        rows: int | None = None,
    ) -> Float[Tensor, "B R D"]:
        own, across = cache or (None, None)

        def attend(x: Tensor) -> Tensor:
            part, source = (x, None) if rows is None else (x[:, :rows], x)
            return self.attention(part, source, mask=mask, cache=own)

        x = self.add_attention(x, attend, rows)
        if self.cross is not None and self.add_cross is not None:
            cross = self.cross

            def read(x: Tensor) -> Tensor:
                if across is None or across.beams == 1:
                    return cross(x, memory, mask=memory_mask, cache=across)
                # Beams that share a source attend to it together, as more queries of one row.
                queries = x.unflatten(0, (-1, across.beams)).flatten(1, 2)
                return cross(queries, memory, mask=memory_mask, cache=across).view_as(x)

            x = self.add_cross(x, read)
        return self.add_feed_forward(x, self.feed_forward)
