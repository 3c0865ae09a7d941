"""Attention where every query sees one range of neighbouring keys, computing little else.

Causal masks, windows, padding, documents, packed sequences and whatever `&` makes of them give
each row a first and a last key. So the L x S problem falls apart into rectangles: a sequence with
its own keys, or a stretch of rows with the keys they see together. Rectangles of like size are
gathered into one batch and handed to SDPA; what no row sees is never computed. Runs anywhere,
backwards too; it is the way without padding for the CPU, and for CUDA in float32 and float64.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.attention.backends import Call
from regard.attention.backends.sdpa import fit, fused
from regard.attention.mask import Mask

ROWS = 128
"""Rows of a rectangle where the keys differ from row to row: fewer rows, less waste."""

UNIFORM, TRIANGLE, RAGGED = range(3)
"""All rows see the same keys; row i sees the first i + 1; or it takes a mask to say."""


Places: TypeAlias = tuple[Tensor, Tensor]
"""Which token lies at each place of a group's rectangles, (n, R), and whether for itself or to fill
its rectangle up."""


class Group(NamedTuple):
    """Rectangles of like size, computed as one batch of n."""

    rows: slice | Tensor
    """Which queries: a slice for a single rectangle, or (n, R) token indices."""
    columns: slice | Tensor
    """Which keys and values: likewise, (n, C)."""
    causal: bool
    allowed: Tensor | None
    real: Tensor | None
    """Which of the n·R results are rows of their own, where some only fill up a rectangle."""


class Move(NamedTuple):
    """Rows of one layout in another, each at most once, and the way back for their gradients.

    An index one past the last row gives zeros. Where `there` repeats a row to fill a rectangle up,
    the filling's gradient is zero, and no index of `back` asks for it.
    """

    there: Tensor
    back: Tensor
    zeros: tuple[bool, bool]
    """Whether `there`, and `back`, have an index that gives zeros."""

    def __call__(self, rows: Tensor) -> Tensor:
        moved: Tensor = _Moved.apply(rows, self)  # type: ignore[no-untyped-call]
        return moved

    def to(self, device: torch.device) -> "Move":
        return Move(self.there.to(device), self.back.to(device), self.zeros)


class _Moved(torch.autograd.Function):
    """Two look-ups, where autograd's way back would add row by row into zeros."""

    @staticmethod
    def forward(rows: Tensor, move: Move) -> Tensor:
        if move.zeros[0]:
            rows = torch.cat((rows, rows.new_zeros(1, *rows.shape[1:])))
        return rows.index_select(0, move.there)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        there, back, zeros = inputs[1]
        ctx.back = Move(back, there, zeros[::-1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.back(grads[0]), None


class Ranges(NamedTuple):
    groups: list[Group]
    rows: Move | None
    """Queries into the rectangles, group after group; and for keys and values `columns`. None where
    a key is in several rectangles, or where one rectangle is all there is."""
    columns: Move | None
    results: Move
    """What comes out of the rectangles, to where its query was; zeros for an empty row."""
    covered: float
    """Share of the L x S pairs that is computed."""


def grouped(call: Call) -> Tensor:
    query, key, value, mask, beta, bias, dropout = call
    assert mask is not None
    if torch.compiler.is_compiling():
        # The rectangles depend on values, which a compiled graph cannot branch on.
        edges = mask.intervals(query.shape[2], key.shape[2], query.device)
        assert edges is not None
        compiled: Tensor = _opaque(query, key, value, *edges, beta)
        return compiled
    ranges = divide(mask, query, key)
    return _compute(query, key, value, ranges, beta, dropout)


def divide(mask: Mask, query: Tensor, key: Tensor) -> Ranges:
    """The rectangles of a mask that has ranges, made once for each mask and shape."""
    B, L, S, device = query.shape[0], query.shape[2], key.shape[2], query.device

    def build() -> Ranges:
        edges = mask.intervals(L, S, "cpu")
        assert edges is not None
        return _divide(*edges, B, S, device)

    return mask.cached("ranges", (B, L, S, device), build)


def _compute(
    query: Tensor, key: Tensor, value: Tensor, ranges: Ranges, beta: float, dropout: float
) -> Tensor:
    B, H, L, _ = query.shape
    V = value.shape[-1]
    if not ranges.groups:  # no query sees any key: zeros, with a gradient of zero
        nothing = query.new_zeros(1, 1, 1, 1, dtype=torch.bool)
        return F.scaled_dot_product_attention(query, key[:, :1, :1], value[:, :1, :1], nothing)
    q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in fit(query, key, value))
    results = []
    for group, rows, keys, values in _rectangles_of(ranges, q, k, v):
        out = fused(rows, keys, values, group.allowed, group.causal, beta, dropout)
        results.append(out.transpose(1, 2).flatten(0, 1))
    together = ranges.results(torch.cat(results))
    return together.view(B, L, H, -1).transpose(1, 2)[..., :V]


def _rectangles_of(
    ranges: Ranges, q: Tensor, k: Tensor, v: Tensor
) -> Iterator[tuple[Group, Tensor, Tensor, Tensor]]:
    """Queries, keys and values of each group, (n, H, R, K)."""
    if ranges.rows is None or ranges.columns is None:
        for group in ranges.groups:
            columns = group.columns
            yield group, _take(q, group.rows), _take(k, columns), _take(v, columns)
        return
    heights, widths = zip(*((_size(group.rows), _size(group.columns)) for group in ranges.groups))
    parts = (ranges.rows(q), heights), (ranges.columns(k), widths), (ranges.columns(v), widths)
    split = ([size[0] * size[1] for size in sizes] for _, sizes in parts)
    pieces = (tokens.split(n) for (tokens, _), n in zip(parts, split))
    for group, height, width, rows, keys, values in zip(ranges.groups, heights, widths, *pieces):
        yield (
            group,
            rows.unflatten(0, height).transpose(1, 2),
            keys.unflatten(0, width).transpose(1, 2),
            values.unflatten(0, width).transpose(1, 2),
        )


def _size(which: slice | Tensor) -> tuple[int, int]:
    if isinstance(which, slice):
        return 1, which.stop - which.start
    return which.shape[0], which.shape[1]


def _take(tokens: Tensor, which: slice | Tensor) -> Tensor:
    """(n, H, R, K) from tokens (T, H, K)."""
    if isinstance(which, slice):
        return tokens[which][None].transpose(1, 2)
    taken = tokens.index_select(0, which.flatten())
    return taken.view(*which.shape, *tokens.shape[1:]).transpose(1, 2)


def _divide(first: Tensor, last: Tensor, B: int, S: int, device: torch.device) -> Ranges:
    """Cut rows into rectangles, and sort those of like size into groups."""
    L = first.shape[1]
    first, last = first.expand(B, L), last.expand(B, L)
    rectangles = [r for b in range(B) for r in _rectangles(first[b], last[b], b * L, b * S)]
    alike: dict[tuple[int, int, int], list[tuple[int, int, int, int, int]]] = {}
    for rectangle in rectangles:
        kind, r0, r1, c0, c1 = rectangle
        # Sizes within a factor of √2 share a batch: log2 in half steps.
        like = (kind, ((r1 - r0) ** 2).bit_length(), ((c1 - c0) ** 2).bit_length())
        alike.setdefault(like, []).append(rectangle)

    flat_first = (first + torch.arange(B)[:, None] * S).flatten()
    flat_last = (last + torch.arange(B)[:, None] * S).flatten()
    groups, rows, columns, area = [], [], [], 0
    for (kind, _, _), members in alike.items():
        group, queries, keys = _group(kind, members, flat_first, flat_last, device)
        groups.append(group)
        rows.append(queries)
        columns.append(keys)
        area += queries[0].numel() * keys[0].shape[1] // (2 if kind == TRIANGLE else 1)
    all_queries, all_keys = _Side(rows, B * L), _Side(columns, B * S)
    several = bool(all_keys.tokens[all_keys.real].bincount().gt(1).any())
    move = not several and any(isinstance(group.rows, Tensor) for group in groups)
    return Ranges(
        groups,
        all_queries.inwards().to(device) if move else None,
        all_keys.inwards().to(device) if move else None,
        all_queries.outwards().to(device),
        area / max(B * L * S, 1),
    )


class _Side:
    """Queries or keys, `total` of them, and where they lie in the rectangles of all groups."""

    def __init__(self, groups: list[Places], total: int):
        nothing = torch.zeros(0, dtype=torch.int64)
        self.tokens = torch.cat([nothing, *(tokens.flatten() for tokens, _ in groups)])
        self.real = torch.cat([nothing.bool(), *(real.flatten() for _, real in groups)])
        self.total = total

    def places(self) -> Tensor:
        """Of each token; one past the last where it has none."""
        found = torch.full((self.total,), len(self.tokens))
        found[self.tokens[self.real]] = self.real.nonzero().flatten()
        return found

    def inwards(self) -> Move:
        places = self.places()
        return Move(self.tokens, places, (False, bool((places == len(self.tokens)).any())))

    def outwards(self) -> Move:
        places = self.places()
        zeros = bool((places == len(self.tokens)).any()), not bool(self.real.all())
        return Move(places, torch.where(self.real, self.tokens, self.total), zeros)


def _rectangles(
    first: Tensor, last: Tensor, row: int, column: int
) -> list[tuple[int, int, int, int, int]]:
    """(kind, rows from, to, columns from, to) for one sentence that begins at (row, column)."""
    L = len(first)
    if L == 0:
        return []
    same = first[1:] == first[:-1]
    still = same & (last[1:] == last[:-1])
    grows = same & (last[1:] == last[:-1] + 1)
    apart = ~still & (first[1:] >= last[:-1])
    # How a row follows from the one before; a piece ends where the next follows otherwise.
    follows = torch.where(
        apart, -1, torch.where(still, UNIFORM, torch.where(grows, TRIANGLE, RAGGED))
    )
    pattern, f, t = follows.tolist(), first.tolist(), last.tolist()
    found = []
    i = 0
    while i < L:
        kind = pattern[i] if i < L - 1 and pattern[i] >= 0 else UNIFORM
        j = i + 1
        while j < L and pattern[j - 1] == kind:
            j += 1
        if kind == TRIANGLE and t[i] - f[i] != 1:
            kind = RAGGED
        step = ROWS if kind == RAGGED else j - i
        for r in range(i, j, step):
            rows = slice(r, min(r + step, j))
            c0, c1 = min(f[rows]), max(t[rows])
            if c1 > c0:
                found.append((kind, row + r, row + rows.stop, column + c0, column + c1))
        i = j
    return found


def _group(
    kind: int,
    members: list[tuple[int, int, int, int, int]],
    first: Tensor,
    last: Tensor,
    device: torch.device,
) -> tuple[Group, Places, Places]:
    """One batch of rectangles, and what lies in it of queries and of keys."""
    _, r0, r1, c0, c1 = (torch.tensor(x) for x in zip(*members))
    heights, widths = r1 - r0, c1 - c0
    R, C = int(heights.max()), int(widths.max())
    rows = (r0[:, None] + torch.arange(R)).minimum(r1[:, None] - 1)
    columns = (c0[:, None] + torch.arange(C)).minimum(c1[:, None] - 1)
    real = torch.arange(R) < heights[:, None]
    inside = torch.arange(C) < widths[:, None]
    allowed = None
    if kind == RAGGED:
        after = columns[:, None] >= first[rows][..., None]
        before = columns[:, None] < last[rows][..., None]
        allowed = (after & before & inside[:, None])[:, None]
    elif kind == UNIFORM and not bool(inside.all()):
        allowed = inside[:, None, None]
    # Of a triangle no real row sees what only fills up: it comes after the row's own position.
    whole = bool(real.all())
    one = len(members) == 1
    group = Group(
        slice(int(r0[0]), int(r1[0])) if one else rows.to(device),
        slice(int(c0[0]), int(c1[0])) if one else columns.to(device),
        kind == TRIANGLE,
        None if allowed is None else allowed.to(device),
        None if whole else real.flatten().nonzero().flatten().to(device),
    )
    return group, (rows, real), (columns, inside)


@torch.library.custom_op("regard::ranges", mutates_args=())
def _opaque(
    query: Tensor, key: Tensor, value: Tensor, first: Tensor, last: Tensor, beta: float
) -> Tensor:
    ranges = _divide(first.cpu(), last.cpu(), query.shape[0], key.shape[2], query.device)
    return _compute(query, key, value, ranges, beta, 0.0).contiguous()


@_opaque.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, first: Tensor, last: Tensor, beta: float
) -> Tensor:
    return query.new_empty(*query.shape[:3], value.shape[-1])


@torch.library.custom_op("regard::ranges_backward", mutates_args=())
def _opaque_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    first: Tensor,
    last: Tensor,
    beta: float,
) -> tuple[Tensor, Tensor, Tensor]:
    # Autograd does not look inside an operator: these are the softmax's derivatives, by hand.
    ranges = _divide(first.cpu(), last.cpu(), query.shape[0], key.shape[2], query.device)
    wide = torch.promote_types(query.dtype, torch.float32)
    q, k, v, g = (t.to(wide).transpose(1, 2).flatten(0, 1) for t in (query, key, value, grad))
    shared = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for group in ranges.groups:
        rows, above = _take(q, group.rows), _take(g, group.rows)
        keys, values = _take(k, group.columns), _take(v, group.columns)
        if group.real is not None:
            real = above.new_zeros(above.shape[0] * above.shape[2])
            real[group.real] = 1
            above = above * real.view(above.shape[0], 1, above.shape[2], 1)
        parts = _derive(rows, keys, values, above, group, beta)
        _add(dq, group.rows, parts[0])
        _add(dk, group.columns, parts[1])
        _add(dv, group.columns, parts[2])
    return _back(dq, query), _back(dk, key), _back(dv, value)


def _add(tokens: Tensor, which: slice | Tensor, part: Tensor) -> None:
    """The opposite of `_take`."""
    flat = part.transpose(1, 2).flatten(0, 1)
    if isinstance(which, slice):
        tokens[which] += flat
    else:
        tokens.index_add_(0, which.flatten(), flat)


def _back(tokens: Tensor, like: Tensor) -> Tensor:
    """Gradients of tokens (T, H, K), summed over the heads that share one, as (B, G, S, K)."""
    B, G, S, K = like.shape
    return tokens.view(B, S, G, -1, K).sum(3).transpose(1, 2).to(like.dtype).contiguous()


def _derive(
    rows: Tensor, keys: Tensor, values: Tensor, above: Tensor, group: Group, beta: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values of one group, some rows at a time."""
    dq, dk, dv = (torch.zeros_like(t) for t in (rows, keys, values))
    for i in range(0, rows.shape[2], ROWS):
        part = slice(i, i + ROWS)
        scores = beta * rows[:, :, part] @ keys.transpose(2, 3)
        hidden = torch.zeros((), dtype=torch.bool, device=rows.device)
        if group.causal:
            index = torch.arange(keys.shape[2], device=rows.device)
            hidden = index > index[part, None]
        elif group.allowed is not None:
            allowed = group.allowed
            hidden = ~(allowed[:, :, part] if allowed.shape[2] > 1 else allowed)
        weights = torch.softmax(scores.masked_fill(hidden, -torch.inf), -1).nan_to_num(0)
        given = above[:, :, part]
        slope = given @ values.transpose(2, 3)
        slope = weights * (slope - (weights * slope).sum(-1, keepdim=True))
        dq[:, :, part] = beta * slope @ keys
        dk += beta * slope.transpose(2, 3) @ rows[:, :, part]
        dv += weights.transpose(2, 3) @ given
    return dq, dk, dv


@_opaque_backward.register_fake
def _(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    first: Tensor,
    last: Tensor,
    beta: float,
) -> tuple[Tensor, Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.beta = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return (*_opaque_backward(grad, *ctx.saved_tensors, ctx.beta), None, None, None)


_opaque.register_autograd(_differentiate, setup_context=_keep)
