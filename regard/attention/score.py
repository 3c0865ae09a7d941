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
from regard.synonyms import suggest_names

# The most numbers held at once inside AdditiveScore: 64 MiB in float32.
CHUNK = 1 << 24


class Projected(NamedTuple):
    """Scores as attention computes them: beta · query·key + bias."""

    query: Float[Tensor, "... L K"]
    key: Float[Tensor, "... S K"]
    beta: float
    bias: Float[Tensor, "... L S"] | None
    """None where the scores are a dot product."""


class AlignmentScore(nn.Module):
    """The base class of alignment scores; a custom score overrides `forward` alone.

        A = softmax(score(q, k)),  output = A v

    Shapes: query (..., L, K), key (..., S, J) → scores (..., L, S). With `heads` a score has
    parameters for each head, and the axis before the rows is the head: (..., H, L, K). Keys may
    have fewer heads, as in `attend`. `MultiHeadAttention(score=…)` takes any score.

    >>> import torch
    >>> from regard import AlignmentScore
    >>> class Distance(AlignmentScore):
    ...     def forward(self, query, key):
    ...         return -torch.cdist(query, key)
    >>> query, key = torch.tensor([[0.0]]), torch.tensor([[3.0], [1.0]])
    >>> Distance()(query, key)
    tensor([[-3., -1.]])
    >>> Distance().attend(query, key, value=torch.eye(2))  # the weights
    tensor([[0.1192, 0.8808]])
    """

    # True if attention computes the scores from mapped queries and keys, without their matrix.
    dot_product: ClassVar[bool] = False

    def forward(
        self, query: Float[Tensor, "... L K"], key: Float[Tensor, "... S J"]
    ) -> Float[Tensor, "... L S"]:
        """Returns the scores before the softmax: (..., L, K), (..., S, J) → (..., L, S)."""
        raise NotImplementedError(f"{type(self).__name__} does not define forward")

    def project(self, query: Float[Tensor, "... L K"], key: Float[Tensor, "... S J"]) -> Projected:
        """Returns query, key, beta and bias with which `attend` computes the same scores.

        query (..., L, K), key (..., S, J) → β q'·k' + bias (..., L, S). `attention_weights`,
        `attention_statistics` and `explain_attention` take the four as well.

        >>> import torch
        >>> from regard import BilinearScore, attention_weights
        >>> query, key, score = torch.randn(2, 3), torch.randn(7, 5), BilinearScore(3, 5)
        >>> query, key, beta, bias = score.project(query, key)
        >>> attention_weights(query, key, beta=beta, bias=bias).shape
        torch.Size([2, 7])
        """
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
        """Attends with these scores in place of the scaled dot product.

        query (..., L, K), key (..., S, J), value (..., S, V) → (..., L, V), as `regard.attend`.
        """
        query, key, beta, bias = self.with_bias(query, key, bias)
        return attend(query, key, value, mask=mask, beta=beta, bias=bias, dropout=dropout)

    def with_bias(
        self,
        query: Float[Tensor, "... L K"],
        key: Float[Tensor, "... S J"],
        bias: Float[Tensor, "..."] | None,
    ) -> Projected:
        """Returns what `project` does for (..., L, K) and (..., S, J), with a bias added."""
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
    """Scores a query and a key by their dot product, q·k.

    Shapes: query (..., L, K), key (..., S, K) → (..., L, S). Luong et al. (2015).

    >>> import torch
    >>> from regard import DotScore
    >>> DotScore()(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 0.0], [0.0, 4.0]]))
    tensor([[3., 8.]])
    """

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
    """Scores a query and a key by their scaled dot product, q·k / √K, as `attend` does itself.

    Shapes: query (..., L, K), key (..., S, K) → (..., L, S). Vaswani et al. (2017). The scores of
    random queries and keys of variance 1 have variance 1.

    >>> import torch
    >>> from regard import ScaledDotScore
    >>> ScaledDotScore()(torch.tensor([[2.0, 2.0, 2.0, 2.0]]), torch.eye(4))
    tensor([[1., 1., 1., 1.]])
    """

    def project(self, query: Float[Tensor, "... L K"], key: Float[Tensor, "... S J"]) -> Projected:
        return super().project(query, key)._replace(beta=query.shape[-1] ** -0.5)


@suggest_names
class BilinearScore(DotProduct):
    """Scores a query and a key by a dot product after a trained map, qᵀ W k.

    Shapes: query (..., L, K), key (..., S, J), W (K, J) → (..., L, S); with `heads` W is (H, K, J).
    Luong et al. (2015), "general". W starts with deviation 1/√(K · J), for scores of variance 1.
    The map is applied to the queries, so the fused kernels serve.

    >>> import torch
    >>> from regard import BilinearScore, MultiHeadAttention
    >>> score = BilinearScore(query_width=3, key_width=5)
    >>> score(torch.randn(2, 3), torch.randn(7, 5)).shape
    torch.Size([2, 7])
    >>> layer = MultiHeadAttention(512, 8, score=BilinearScore(64, 64, heads=8))
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
        """Draws W anew, in place."""
        nn.init.normal_(self.weight, std=(self.query_width * self.key_width) ** -0.5)

    def project(self, query: Float[Tensor, "... L K"], key: Float[Tensor, "... S J"]) -> Projected:
        _check_shapes(query, key, self.query_width, self.key_width, self.heads)
        return Projected(query @ self.weight, key, 1.0, None)

    def extra_repr(self) -> str:
        return f"{self.query_width}, {self.key_width}, heads={self.heads}"


@suggest_names
class AdditiveScore(AlignmentScore):
    """Scores a query and a key by a network with one hidden layer, vᵀ tanh(W q + U k).

    Shapes: query (..., L, K), key (..., S, J), W (K, F), U (J, F), v (F,) → (..., L, S), where F is
    `hidden`; with `heads` the three begin with H. Bahdanau et al. (2015). This is not a dot
    product, and costs `hidden` numbers for each pair of positions; they are computed for a few
    queries at a time, so that memory is bounded where no gradient is wanted. W and U start with
    deviation 1/√(K + J), v with 1/√F.

    >>> import torch
    >>> from regard import AdditiveScore
    >>> score = AdditiveScore(query_width=3, key_width=5, hidden=16)
    >>> score(torch.randn(2, 3), torch.randn(7, 5)).shape
    torch.Size([2, 7])
    >>> score.attend(torch.randn(2, 3), torch.randn(7, 5), value=torch.randn(7, 4)).shape
    torch.Size([2, 4])
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
        """Draws W, U and v anew, in place."""
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
            raise ValueError(f"{name} ({count!r}) must be a positive integer; try 1 or more")


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
