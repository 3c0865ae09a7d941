"""Alignment scores: how well the key of a source position answers a query.

    DotScore         q·k                   Luong et al. (2015)
    ScaledDotScore   q·k / √K              Vaswani et al. (2017), the default of `attend`
    BilinearScore    qᵀ W k                Luong et al. (2015)
    AdditiveScore    vᵀ tanh(W q + U k)    Bahdanau et al. (2015)

They are interchangeable: `MultiHeadAttention(score=…)` calls `score.attend` where it would call
`attend`. A score that is a dot product of mapped queries and keys keeps the fused kernel, since the
map is applied beforehand; an additive one builds the scores, and attention does the rest.
"""

from typing import ClassVar, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from regard.attention.attend import attend
from regard.attention.checks import broadcast_shape, broadcasts, check_vectors
from regard.attention.mask import Mask, four_axes

# The most numbers held at once inside AdditiveScore: 64 MiB in float32.
CHUNK = 1 << 24


class Projected(NamedTuple):
    """The same scores as attention computes them: beta · query·key + bias."""

    query: Float[Tensor, "... L K"]
    key: Float[Tensor, "... S K"]
    beta: float
    bias: Float[Tensor, "... L S"] | None
    """None where the scores are a dot product."""


class AlignmentScore(nn.Module):
    """A score for each pair of a query and a key; a custom score overrides `forward` alone.

    Leading axes are free. With `heads` a score has parameters for each head, and the axis before
    the rows is the head: (..., H, L, K). Keys may have fewer heads, as in `attend`.
    """

    # True if attention computes the scores from mapped queries and keys, without their matrix.
    dot_product: ClassVar[bool] = False

    def forward(
        self, query: Float[Tensor, "... L K"], key: Float[Tensor, "... S J"]
    ) -> Float[Tensor, "... L S"]:
        """The scores themselves, before the softmax."""
        raise NotImplementedError(f"{type(self).__name__} does not define forward")

    def project(self, query: Float[Tensor, "... L K"], key: Float[Tensor, "... S J"]) -> Projected:
        """Queries and keys to attend with, for `attend`, `weights`, `statistics` and `explain`."""
        scores = self(query, key)
        if scores.ndim > 4:
            scores = scores.flatten(0, -4)  # the batch, as attention lays it out
        # With beta 0 the softmax is over the bias alone; attention wants equal widths nevertheless.
        width = min(query.shape[-1], key.shape[-1])
        return Projected(query[..., :width], key[..., :width], 0.0, scores)

    def attend(
        self,
        query: Float[Tensor, "... L K"],
        key: Float[Tensor, "... S J"],
        value: Float[Tensor, "... S V"],
        *,
        mask: Mask | Bool[Tensor, "..."] | None = None,
        bias: Float[Tensor, "..."] | None = None,
        dropout: float = 0.0,
    ) -> Float[Tensor, "... L V"]:
        """`attend` with these scores in place of its own."""
        query, key, beta, bias = self.with_bias(query, key, bias)
        return attend(query, key, value, mask=mask, beta=beta, bias=bias, dropout=dropout)

    def with_bias(
        self,
        query: Float[Tensor, "... L K"],
        key: Float[Tensor, "... S J"],
        bias: Float[Tensor, "..."] | None,
    ) -> Projected:
        """`project`, with a bias added to the scores."""
        projected = self.project(query, key)
        scores = projected.bias
        if scores is not None and bias is not None:
            bias = four_axes(scores, "scores") + four_axes(bias, "bias")
        return projected._replace(bias=scores if bias is None else bias)


class DotProduct(AlignmentScore):
    """A score that is β q'·k' for mapped queries and keys; a custom one overrides `project`."""

    dot_product = True

    def forward(
        self, query: Float[Tensor, "... L K"], key: Float[Tensor, "... S J"]
    ) -> Float[Tensor, "... L S"]:
        query, key, beta, _ = self.project(query, key)
        return beta * (query @ _for_each_query_head(query, key).mT)

    def project(self, query: Float[Tensor, "... L K"], key: Float[Tensor, "... S J"]) -> Projected:
        raise NotImplementedError(f"{type(self).__name__} does not define project")


class DotScore(DotProduct):
    """q·k."""

    def project(self, query: Float[Tensor, "... L K"], key: Float[Tensor, "... S J"]) -> Projected:
        check_vectors("query", query)
        check_vectors("key", key)
        if query.shape[-1] != key.shape[-1]:
            raise ValueError(
                f"query width ({query.shape[-1]}) must be key width ({key.shape[-1]}) in a dot "
                f"product; try BilinearScore({query.shape[-1]}, {key.shape[-1]}), which maps "
                "between them"
            )
        return Projected(query, key, 1.0, None)


class ScaledDotScore(DotScore):
    """q·k / √K, so that the scores of random queries and keys of variance 1 have variance 1."""

    def project(self, query: Float[Tensor, "... L K"], key: Float[Tensor, "... S J"]) -> Projected:
        return super().project(query, key)._replace(beta=query.shape[-1] ** -0.5)


class BilinearScore(DotProduct):
    """qᵀ W k: a dot product after a learned map, which is applied to the queries.

    W starts with deviation 1/√(query_width · key_width), for scores of variance 1.
    """

    def __init__(self, query_width: int, key_width: int, heads: int | None = None) -> None:
        super().__init__()
        _check_counts(query_width=query_width, key_width=key_width, heads=heads)
        self.query_width = query_width
        self.key_width = key_width
        self.heads = heads
        each = () if heads is None else (heads,)
        self.weight = nn.Parameter(torch.empty(*each, query_width, key_width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=(self.query_width * self.key_width) ** -0.5)

    def project(self, query: Float[Tensor, "... L K"], key: Float[Tensor, "... S J"]) -> Projected:
        _check_shapes(query, key, self.query_width, self.key_width, self.heads)
        return Projected(query @ self.weight, key, 1.0, None)

    def extra_repr(self) -> str:
        return f"{self.query_width}, {self.key_width}, heads={self.heads}"


class AdditiveScore(AlignmentScore):
    """vᵀ tanh(W q + U k): a small network with `hidden` units looks at each pair.

    This is not a dot product, and costs `hidden` numbers for each pair of positions; they are
    computed for a few queries at a time, so that memory is bounded where no gradient is wanted.
    W and U start with deviation 1/√(query_width + key_width), v with 1/√hidden.
    """

    def __init__(
        self, query_width: int, key_width: int, hidden: int, heads: int | None = None
    ) -> None:
        super().__init__()
        _check_counts(query_width=query_width, key_width=key_width, hidden=hidden, heads=heads)
        self.query_width = query_width
        self.key_width = key_width
        self.hidden = hidden
        self.heads = heads
        each = () if heads is None else (heads,)
        self.query_weight = nn.Parameter(torch.empty(*each, query_width, hidden))
        self.key_weight = nn.Parameter(torch.empty(*each, key_width, hidden))
        self.vector = nn.Parameter(torch.empty(*each, hidden))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        deviation = (self.query_width + self.key_width) ** -0.5
        nn.init.normal_(self.query_weight, std=deviation)
        nn.init.normal_(self.key_weight, std=deviation)
        nn.init.normal_(self.vector, std=self.hidden**-0.5)

    def forward(
        self, query: Float[Tensor, "... L K"], key: Float[Tensor, "... S J"]
    ) -> Float[Tensor, "... L S"]:
        _check_shapes(query, key, self.query_width, self.key_width, self.heads)
        # The inserted axes pair every query (L) with every key (S).
        query_L1F = (query @ self.query_weight).unsqueeze(-2)
        key_1SF = (_for_each_query_head(query, key) @ self.key_weight).unsqueeze(-3)
        leading = broadcast_shape(query_L1F.shape[:-3], key_1SF.shape[:-3])
        rows = max(1, CHUNK // max(1, leading.numel() * key.shape[-2] * self.hidden))
        if query.shape[-2] <= rows:
            return self._scores(query_L1F, key_1SF)
        pieces = [self._scores(piece, key_1SF) for piece in query_L1F.split(rows, -3)]
        return torch.cat(pieces, -2)

    def _scores(self, query_L1F: Tensor, key_1SF: Tensor) -> Tensor:
        pairs_LSF = torch.tanh(query_L1F + key_1SF)
        scores_LS1 = pairs_LSF.flatten(-3, -2) @ self.vector.unsqueeze(-1)
        scores_LS: Tensor = scores_LS1.unflatten(-2, pairs_LSF.shape[-3:-1]).squeeze(-1)
        return scores_LS

    def extra_repr(self) -> str:
        return f"{self.query_width}, {self.key_width}, {self.hidden}, heads={self.heads}"


def _for_each_query_head(query: Tensor, key: Tensor) -> Tensor:
    """The keys with one head for each head of the queries: query head h reads h // group."""
    has_heads = max(query.ndim, key.ndim) > 3 and min(query.ndim, key.ndim) > 2
    if has_heads and query.shape[-3] != 1 and not broadcasts(key.shape[-3], query.shape[-3]):
        heads, key_heads = query.shape[-3], key.shape[-3]
        if heads % key_heads:
            fits = [str(n) for n in range(1, heads + 1) if heads % n == 0]
            raise ValueError(
                f"key heads ({key_heads}) must divide query heads ({heads}); "
                f"try {' or '.join(fits)}"
            )
        key = key.repeat_interleave(heads // key_heads, -3)
    for queries, keys in zip(query.shape[-3::-1], key.shape[-3::-1], strict=False):
        if queries != keys and 1 not in (queries, keys):
            raise ValueError(
                f"the leading axes of query {tuple(query.shape[:-2])} and key "
                f"{tuple(key.shape[:-2])} must broadcast, but {queries} meets {keys}; "
                "make them equal, or one of them 1"
            )
    return key


def _check_counts(**counts: int | None) -> None:
    for name, count in counts.items():
        if count is None:
            continue
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise ValueError(f"{name} ({count}) must be a positive integer; try 1 or more")


def _check_shapes(
    query: Tensor, key: Tensor, query_width: int, key_width: int, heads: int | None
) -> None:
    for name, tensor, width in (("query", query, query_width), ("key", key, key_width)):
        check_vectors(name, tensor)
        if tensor.shape[-1] != width:
            raise ValueError(
                f"{name} of shape {tuple(tensor.shape)} must be {width} wide, as the score was "
                f"built; give it (..., {width}) or build the score with another {name}_width"
            )
    if heads is not None and (query.ndim < 3 or query.shape[-3] != heads):
        raise ValueError(
            f"query of shape {tuple(query.shape)} must have {heads} heads, as the score was built; "
            f"give it (..., {heads}, L, {query_width}) or build the score without heads"
        )
