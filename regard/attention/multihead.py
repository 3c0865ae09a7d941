"""Multi-head attention: several attentions side by side, each in its own subspace.

    head_h = attend(x W_Q^h, s W_K^h, v W_V^h)
    output = [head_1; ...; head_H] W_O

With s = x it is self-attention, with another source s cross-attention; nothing else differs
(Vaswani et al. 2017, section 3.2.2). v is s, unless the values have a separate input: then keys and
values come from two descriptions of the same positions. W_O mixes the results of the heads: without
it the output would be H separate blocks.
"""

import math
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from regard.attention.arguments import as_mask, check_beta, check_dropout, check_input
from regard.attention.cache import Cache, Pair
from regard.attention.checks import check_divides, check_integer, shown
from regard.attention.core import Core
from regard.attention.fusing import are_linear, fuses
from regard.attention.mask import Mask
from regard.attention.position import AttentionPosition, Positions
from regard.attention.score import AlignmentScore
from regard.attention.state import LoadableModule, typed_as
from regard.synonyms import suggest_names


@suggest_names
class MultiHeadAttention(LoadableModule):
    """Attends with several heads, each in a subspace of its own, to x or to another source.

        head_h = attend(x W_Q^h, s W_K^h, s W_V^h),   output = [head_1; …; head_H] W_O

    Shapes: x (B, L, D), source s (B, S, E) → (B, L, D), or `output_width` wide. Without a source it
    is self-attention, s = x. Vaswani et al. (2017), section 3.2.2. `key_width` and `value_width`
    are per head and default to width / heads. `key_heads` fewer than `heads` are shared by groups
    of query heads. `position` is a RotaryEmbedding or an ALiBi, `score` an alignment other than the
    scaled dot product. `value_source_width` is the width of a separate input for the values, if it
    differs from the source's. The submodule `core(query, key, value)` is the operation between the
    projections.

    >>> import torch
    >>> from regard import MultiHeadAttention, RotaryEmbedding, causal
    >>> layer = MultiHeadAttention(512, heads=8, key_heads=2, position=RotaryEmbedding(64))
    >>> layer(torch.randn(2, 5, 512), mask=causal()).shape
    torch.Size([2, 5, 512])
    >>> cross = MultiHeadAttention(512, heads=8, source_width=768)
    >>> cross(torch.randn(2, 5, 512), torch.randn(2, 49, 768)).shape
    torch.Size([2, 5, 512])
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        key_heads: int | None = None,
        key_width: int | None = None,
        value_width: int | None = None,
        source_width: int | None = None,
        value_source_width: int | None = None,
        output_width: int | None = None,
        position: AttentionPosition | None = None,
        score: AlignmentScore | None = None,
        beta: float | int | Tensor | None = None,
        bias: bool = True,
        dropout: float | int = 0.0,
    ):
        super().__init__()
        key_heads = heads if key_heads is None else key_heads
        sizes = {
            "width": width,
            "heads": heads,
            "key_heads": key_heads,
            "key_width": key_width,
            "value_width": value_width,
            "source_width": source_width,
            "value_source_width": value_source_width,
            "output_width": output_width,
        }
        for name, size in sizes.items():
            if size is not None:
                check_integer(name, size)
        if key_width is None:
            check_divides("heads", heads, "width", width)
            key_width = width // heads
        check_divides("key_heads", key_heads, "heads", heads)
        check_dropout(dropout)
        check_beta(beta, heads, key_width)
        if score is not None and beta is not None:
            raise ValueError(
                f"beta ({shown(beta)}) belongs to the dot product; a score has its own scale"
            )
        if score is not None and not isinstance(score, AlignmentScore):
            raise ValueError(
                f"score ({shown(score)}) must be an AlignmentScore; for example score=DotScore()"
            )
        if position is not None and not isinstance(position, AttentionPosition):
            raise ValueError(
                f"position ({shown(position)}) must act inside attention, as RotaryEmbedding(width)"
                " and ALiBi(heads) do; one with a vector for each position is added to the input"
            )
        self.width, self.heads, self.key_heads = width, heads, key_heads
        self.key_width = key_width
        self.value_width = value_width or key_width
        self.source_width = source_width or width
        self.value_source_width = value_source_width or self.source_width
        self.output_width = output_width or width
        self.query = nn.Linear(width, heads * key_width, bias)
        self.key = nn.Linear(self.source_width, key_heads * key_width, bias)
        self.value = nn.Linear(self.value_source_width, key_heads * self.value_width, bias)
        self.output = nn.Linear(heads * self.value_width, self.output_width, bias)
        self.core = Core(score, beta, dropout)
        self.position = position
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the weights from Glorot's uniform distribution, in place; biases become 0.

        It keeps variances equal forwards and backwards (Glorot and Bengio 2010).
        """
        for linear in (self.query, self.key, self.value, self.output):
            nn.init.xavier_uniform_(linear.weight)
            if linear.bias is not None:
                nn.init.zeros_(linear.bias)

    def forward(
        self,
        x: Float[Tensor, "*b L D"],
        source: Float[Tensor, "*b S E"] | None = None,
        *,
        value: Float[Tensor, "*b S U"] | None = None,
        mask: Mask | Bool[Tensor, "..."] | None = None,
        cache: Cache | None = None,
    ) -> Float[Tensor, "*b L O"]:
        """Returns the output of attention: x (B, L, D), source (B, S, E) → (B, L, D).

        Keys and values are computed from the source, or from x without one; values from `value`,
        (B, S, E), if it is given. In a boolean `mask` True means may attend; in that of
        `nn.MultiheadAttention` it means hidden. With a cache, which changes in place, x holds the
        new positions alone; a `CrossCache` needs source and value at its first step only.
        """
        allowed = as_mask(mask)
        self._check(x, source, value, cache)
        lead = x.shape[:-2]
        x = _three_axes(x)
        keyed = x if source is None else _three_axes(source)
        valued = keyed if value is None else _three_axes(value)
        at = self._places(x, keyed, allowed, cache)
        if cache is None and fuses(x) and are_linear(self.query, self.key, self.value):
            queries, keys, values = self._project(x, keyed, valued)
            queries, keys = self._rotate(queries, at), self._rotate(keys, at)
        else:
            queries = self._rotate(_split(self.query(x), self.heads), at)

            def project() -> Pair:
                if source is None and cache is not None and cache.across:
                    raise ValueError(
                        f"an empty {type(cache).__name__} needs the source at its first step: "
                        "module(x, source, cache=cache)"
                    )
                keys = self._rotate(_split(self.key(keyed), self.key_heads), at)
                return keys, _split(self.value(valued), self.key_heads)

            if cache is None:
                keys, values = project()
            else:
                cache.check(queries, self.key_heads, self.key_width, self.value_width)
                keys, values, allowed = cache.extend(project, allowed)
        bias = None
        if self.position is not None:
            L, S = queries.shape[-2], keys.shape[-2]
            offset = None if cache is None else at
            if isinstance(offset, Tensor) and offset.ndim:
                offset = offset[:, 0]  # the rows of a cache have different lengths
            wide = torch.promote_types(x.dtype, torch.float32)
            bias = self.position.bias(L, S, offset, x.device, wide)
        out = self.core(queries, keys, values, mask=allowed, bias=bias)
        heads = out.transpose(-2, -3).flatten(-2)
        if fuses(x) and are_linear(self.output):
            (joined,) = _together(heads, self.output)
        else:
            joined = self.output(heads)
        return joined if len(lead) == 1 else joined.reshape(*lead, *joined.shape[-2:])

    if TYPE_CHECKING:

        @typed_as(forward)
        def __call__(self) -> None: ...

    def _project(self, x: Tensor, keyed: Tensor, valued: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, from one matrix product for each distinct input."""
        if keyed is x and valued is x:
            parts = _together(x, self.query, self.key, self.value)
        elif valued is keyed:
            parts = [*_together(x, self.query), *_together(keyed, self.key, self.value)]
        elif keyed is x:
            parts = [*_together(x, self.query, self.key), *_together(valued, self.value)]
        else:
            inputs = ((x, self.query), (keyed, self.key), (valued, self.value))
            parts = [part for tensor, linear in inputs for part in _together(tensor, linear)]
        heads = (self.heads, self.key_heads, self.key_heads)
        query, key, value = (_split(part, count) for part, count in zip(parts, heads))
        return query, key, value

    def _places(
        self, x: Tensor, keyed: Tensor, mask: Mask | None, cache: Cache | None
    ) -> Positions:
        """The positions of the queries: after those in a cache, or within each packed sequence."""
        packing = None if mask is None else mask.packing
        if packing is not None and cache is None:
            packing.check(len(x), x.shape[1], keyed.shape[1])
        if packing is not None and cache is not None and not cache.across:
            raise ValueError(
                f"{packing} lays whole sequences end to end, so a {type(cache).__name__} cannot "
                "grow each; decode a batch with one row for each sequence"
            )
        if self.position is None:
            return 0  # not used
        if packing is not None and mask is not None:
            positions = packing.query.to(x.device).positions
            return mask.cached("positions", x.device, positions)
        return 0 if cache is None else cache.places(x.shape[1])

    def _rotate(self, x: Tensor, at: Positions) -> Tensor:
        return x if self.position is None else self.position.rotate(x, at)

    def _check(
        self,
        x: Tensor,
        source: Tensor | None,
        value: Tensor | None,
        cache: Cache | None,
    ) -> None:
        weight = getattr(self.query, "weight", None)  # a replaced projection may have none
        dtype = weight.dtype if isinstance(weight, Tensor) else None
        check_input("x", x, "width", self.width, dtype)
        if cache is not None and not isinstance(cache, Cache):
            raise ValueError(f"cache ({shown(cache)}) must be a SelfCache() or a CrossCache()")
        across = source is not None if cache is None else cache.across
        if source is not None:
            check_input("source", source, "source_width", self.source_width, dtype)
            if not across:
                raise ValueError(
                    f"a {type(cache).__name__} holds the queries' own sequence, but a source of "
                    f"shape {tuple(source.shape)} was given; use CrossCache() for it"
                )
            if x.shape[:-2] != source.shape[:-2] and not x.ndim == source.ndim == 3:
                raise ValueError(
                    f"x of shape {tuple(x.shape)} and source of shape {tuple(source.shape)} must "
                    "have the same leading axes"
                )
        elif not across and self.source_width != self.width:
            raise ValueError(
                f"self-attention reads keys from x, but source_width ({self.source_width}) is not "
                f"width ({self.width}); pass a source"
            )
        self._check_value(x if source is None and not across else source, value, dtype, cache)
        if across and self.position is not None:
            raise ValueError(
                f"{type(self.position).__name__} measures distances within one sequence, but "
                "cross-attention has two; leave position out, and add positions to both inputs"
            )

    def _check_value(
        self,
        keyed: Tensor | None,
        value: Tensor | None,
        dtype: torch.dtype | None,
        cache: Cache | None,
    ) -> None:
        """Checks that a separate input for the values has the same positions as the keys'."""
        filled = cache is not None and cache.across and cache.held is not None
        if value is None:
            if self.value_source_width != self.source_width and keyed is not None and not filled:
                raise ValueError(
                    f"value_source_width ({self.value_source_width}) is not source_width "
                    f"({self.source_width}), so values cannot be read where keys are; pass "
                    "value=, too"
                )
            return
        check_input("value", value, "value_source_width", self.value_source_width, dtype)
        if keyed is not None and keyed.shape[:-1] != value.shape[:-1]:
            raise ValueError(
                f"value of shape {tuple(value.shape)} must have a row for each key: keys are read "
                f"from a tensor of shape {tuple(keyed.shape)}"
            )

    def extra_repr(self) -> str:
        return f"{self.width}, heads={self.heads}, key_heads={self.key_heads}"


def _together(x: Tensor, *linears: nn.Linear) -> list[Tensor]:
    """Several linear layers of one input as one matrix product."""
    from regard.attention.linear import linear, parts  # needs Triton

    if len(linears) == 1:
        return [linear(x, linears[0].weight, linears[0].bias)]
    weight = torch.cat(tuple(layer.weight for layer in linears))
    biases = tuple(layer.bias for layer in linears if layer.bias is not None)
    joint = linear(x, weight, torch.cat(biases) if biases else None)
    return list(parts(joint, tuple(layer.out_features for layer in linears)))


def _three_axes(x: Tensor) -> Tensor:
    """(..., L, D) with all leading axes folded into one."""
    return x if x.ndim == 3 else x.reshape(math.prod(x.shape[:-2]), *x.shape[-2:])


def _split(x: Tensor, heads: int) -> Tensor:
    """(B, L, H·K) to (B, H, L, K), as a view."""
    B, L, width = x.shape
    return x.view(B, L, heads, width // heads).transpose(1, 2)
