"""Checks for the exercise on multi-head attention; Regard's own result is the right one."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from regard.attention.attend import attend
from regard.attention.mask import Mask, causal
from regard.attention.multihead import MultiHeadAttention
from regard.lab.exercises.marking import Case, drawn, filled, mark

B, H, L, S, K, V = 2, 3, 5, 7, 4, 6


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(7))


# Scaled dot products


def attention(answer: Callable[..., object]) -> None:
    """`attention(query, key, value, mask=None)`; True in the mask means: may attend."""
    query, key, value = _random(B, H, L, K), _random(B, H, S, K).flip(-1), _random(B, H, S, V)
    scores, allowed = query @ key.mT, causal().tensor(L, S)[0, 0]
    scaled = scores / K**0.5
    without = [
        (scores, f"the scores are not scaled; divide them by √d_k: {WIDTH}"),
        (scores / K, "the scores are divided by d_k; divide by its root, √d_k"),
        (scores * K**0.5, "the scores are multiplied by √d_k; divide by it"),
        (scores / V**0.5, f"the scores are divided by √d_v, the width of a value; {WIDTH}"),
        (
            scores / S**0.5,
            f"the scores are divided by the root of how many keys there are; {WIDTH}",
        ),
        (scores / L**0.5, f"the scores are divided by the root of how many queries; {WIDTH}"),
    ]
    plain = [
        *((wrong.softmax(-1) @ value, message) for wrong, message in without),
        (scaled.softmax(-2) @ value, f"the softmax runs down the queries (dim=-2); {ALONG}"),
        (scaled.softmax(1) @ value, f"the softmax runs over the heads (dim=1); {ALONG}"),
        (scaled.softmax(0) @ value, f"the softmax runs over the batch (dim=0); {ALONG}"),
        (scaled @ value, "there is no softmax: the values are multiplied by the scores"),
        (scaled.softmax(-1), "these are the weights; multiply them by the values"),
        (scaled, "these are the scores; a softmax and the values are missing"),
    ]
    inverted = scaled.masked_fill(allowed, -torch.inf).softmax(-1)
    after = scaled.softmax(-1) * allowed
    masked = [
        (scaled.softmax(-1) @ value, "the mask is ignored"),
        (
            inverted @ value,
            "the mask is inverted: True means may attend, so −∞ goes where it is False",
        ),
        (inverted.nan_to_num(0.0) @ value, "the mask is inverted: −∞ goes where it is False"),
        (
            (scaled * allowed).softmax(-1) @ value,
            "forbidden scores become 0, which is an ordinary score; they have to become −∞",
        ),
        (
            (scaled + allowed).softmax(-1) @ value,
            "the mask is added as 0 and 1; forbidden scores have to become −∞",
        ),
        (
            after @ value,
            "weights become 0 after the softmax, and the others no longer add up to 1; set the "
            "scores to −∞ before it",
        ),
    ]
    none = allowed.clone()
    none[0] = False
    empty = [
        (
            scaled.masked_fill(~none, -torch.inf).softmax(-1) @ value,
            "NaN, for the softmax of a row of −∞ is 0/0; make those weights 0, by nan_to_num(0.0) "
            "for example",
        ),
        (
            scaled.masked_fill(~none, -1e9).softmax(-1) @ value,
            "a large negative number instead of −∞ lets it attend to everything equally; use −∞ "
            "and make those weights 0",
        ),
    ]

    def right(mask: Tensor | None) -> Tensor:
        return attend(query, key, value, mask=mask)

    cases = (
        ("without a mask", None, plain),
        ("with a mask", allowed, masked),
        ("where a query may attend to nothing", none, empty),
    )
    mark(
        "attention",
        [
            Case(name, partial(_call, answer, query, key, value, mask), right(mask), mistakes)
            for name, mask, mistakes in cases
        ],
    )


WIDTH = "take the width of a key, key.shape[-1]"
ALONG = "each query's weights add up to 1 over the keys, so it runs along dim=-1"


def _call(
    answer: Callable[..., object], query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
) -> object:
    return answer(query, key, value) if mask is None else answer(query, key, value, mask)


# Heads


def split_heads(answer: Callable[..., object]) -> None:
    """`split_heads(x, heads)`: (B, L, H·d_k) to (B, H, L, d_k)."""
    x = torch.arange(float(B * L * H * K), dtype=torch.float64).view(B, L, H * K)
    cut = x.view(B, L, H, K)
    mistakes = [
        (
            x.view(B, H, L, K),
            "reshaped straight to (B, H, L, d_k), which mixes positions and heads: cut the last "
            "axis in two first, (B, L, H, d_k), then transpose axes 1 and 2",
        ),
        (
            x.view(B, L, K, H).permute(0, 3, 1, 2),
            "heads are interleaved: the last axis has head after head, so it is cut into (H, d_k), "
            "not (d_k, H)",
        ),
        (cut, "the heads' axis stands behind the positions: transpose axes 1 and 2"),
        (x, "nothing is split"),
    ]
    name = "(B, L, H·d_k) to (B, H, L, d_k)"
    mark("split_heads", [Case(name, lambda: answer(x, H), cut.transpose(1, 2), mistakes)])


def join_heads(answer: Callable[..., object]) -> None:
    """`join_heads(x)`: (B, H, L, d_k) to (B, L, H·d_k)."""
    x = torch.arange(float(B * L * H * K), dtype=torch.float64).view(B, H, L, K)
    right = x.transpose(1, 2).reshape(B, L, H * K)
    mistakes = [
        (
            x.reshape(B, L, H * K),
            "reshaped without transposing, which mixes positions and heads: transpose axes 1 and 2 "
            "first",
        ),
        (
            x.permute(0, 2, 3, 1).reshape(B, L, H * K),
            "heads are interleaved: all of the first head comes first",
        ),
        (x.transpose(1, 2), "the last two axes are still apart: flatten them"),
        (x.sum(1), "the heads are summed; put them side by side"),
        (x.mean(1), "the heads are averaged; put them side by side"),
    ]
    mark(
        "join_heads", [Case("(B, H, L, d_k) to (B, L, H·d_k)", lambda: answer(x), right, mistakes)]
    )


# All of it


def multihead(answer: Callable[..., nn.Module]) -> None:
    """`MultiHead(width, heads)`, called with (x, source=None, mask=None)."""
    layer = drawn(MultiHeadAttention(H * K, H))
    theirs = filled("MultiHead", lambda: answer(H * K, H), layer.state_dict())
    if theirs is None:
        return
    x, source = _random(B, L, H * K), _random(B, S, H * K).flip(-1)
    square = causal().tensor(L, L)[0, 0]
    own = [
        (
            _formula(layer, x, x, output=False),
            "the output projection W_O is missing: without it the heads stay separate blocks",
        ),
        (_formula(layer, x, x, scale=1.0), "the scores are not scaled"),
        (
            _formula(layer, x, x, scale=(H * K) ** -0.5),
            "the scores are divided by √D of the whole width; each head has its own d_k = D/H",
        ),
        (
            _formula(layer, x, x, heads=1),
            "there is one head as wide as all: split them before attention",
        ),
        (_formula(layer, x, x, exchanged=True), "queries and keys are exchanged"),
        (
            _formula(layer, x, x, values="key"),
            "the values are the keys: they have a projection of their own, self.value",
        ),
        (_formula(layer, x, x, values="none"), "the values are not projected by self.value"),
        (
            _formula(layer, x, x, mixed_in=True, mixed_out=True),
            "the heads are split and joined by a plain reshape: see split_heads and join_heads",
        ),
        (
            _formula(layer, x, x, mixed_in=True),
            "the heads are split by the wrong reshape: see split_heads",
        ),
        (
            _formula(layer, x, x, mixed_out=True),
            "the heads are joined without transposing: see join_heads",
        ),
        (_formula(layer, x, x, along=1), f"the softmax runs over the heads; {ALONG}"),
        (_formula(layer, x, x, along=-2), f"the softmax runs down the queries; {ALONG}"),
    ]
    across = [
        (
            _formula(layer, x, x),
            "the source is ignored: keys and values come from it, queries from x",
        ),
        (_formula(layer, source, source), "the queries come from the source too; take x"),
        (_formula(layer, source, x), "x and source have changed places: queries come from x"),
    ]
    masked = [
        (_formula(layer, x, x), "the mask is not passed on"),
        (_formula(layer, x, x, allowed=~square), "the mask is inverted"),
    ]
    with torch.no_grad():
        under = layer(x, mask=Mask.from_tensor(square))
        cases = [
            Case("self-attention", lambda: theirs(x), layer(x), own),
            Case("cross-attention", lambda: theirs(x, source), layer(x, source), across),
            Case("under a causal mask", lambda: theirs(x, mask=square), under, masked),
        ]
    mark("MultiHead", cases)


def _formula(
    layer: MultiHeadAttention,
    x: Tensor,
    source: Tensor,
    *,
    allowed: Tensor | None = None,
    heads: int = H,
    scale: float | None = None,
    along: int = -1,
    output: bool = True,
    exchanged: bool = False,
    values: str = "value",
    mixed_in: bool = False,
    mixed_out: bool = False,
) -> Tensor:
    """Multi-head attention with the common mistakes as options."""

    def split(x: Tensor) -> Tensor:
        B, L, D = x.shape
        if mixed_in:
            return x.reshape(B, heads, L, D // heads)
        return x.view(B, L, heads, D // heads).transpose(1, 2)

    projections: dict[str, Any] = {"value": layer.value, "key": layer.key, "none": nn.Identity()}
    query, key = split(layer.query(x)), split(layer.key(source))
    value = split(projections[values](source))
    if exchanged:
        query, key = key, query
    scores = query @ key.mT * (key.shape[-1] ** -0.5 if scale is None else scale)
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -torch.inf)
    heads_BHLV = scores.softmax(along).nan_to_num(0.0) @ value
    B, _, L, _ = heads_BHLV.shape
    joined = (heads_BHLV if mixed_out else heads_BHLV.transpose(1, 2)).reshape(B, L, -1)
    result: Tensor = layer.output(joined) if output else joined
    return result.detach()
