"""Masks: which query may attend to which key.

One polarity everywhere: True means "may attend". A mask is a *rule* that answers for a pair
(query, key); it holds no L x S matrix, so it can be handed to any backend in the form that backend
likes best: a kernel flag, sequence lengths, a block mask, or, when nothing better serves, a
boolean tensor. Rules combine by `&`, `|` and `~`:

    causal() & padding(lengths)         a decoder's self-attention over a padded batch
    causal() & window(64)               the last 64 positions
    causal() | prefix(10)               a prefix language model

When L and S differ the mask is aligned at the bottom right: the last query stands at the last
source position, as decoding with a cache needs. Who attends to nothing receives zeros.

A new mask is one function that returns `Mask(rule, text)`; docs/development.md shows one.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from regard.attention.algebra import At as At
from regard.attention.algebra import Dense as Dense
from regard.attention.algebra import Mask as Mask
from regard.attention.algebra import Span, check_batch, check_offset, per_sentence
from regard.attention.algebra import four_axes as four_axes
from regard.attention.checks import MAX_LENGTH, check_integer, integer_tensor, shown
from regard.attention.packed import PackedLengths as PackedLengths
from regard.attention.sync import on_host
from regard.synonyms import suggest_names

Offset = int | Tensor | None

# The functions that make masks.


@suggest_names
def causal(offset: Offset = None) -> Mask:
    """Returns the mask that hides all keys after the query's own position.

        allowed(i, j) = j ≤ i + offset

    The offset None is S - L: the last query is aligned with the last key. An offset may be one for
    each sequence, (B,). A cache passes the number of earlier keys as a tensor, which is not read on
    the host.

    >>> from regard import causal
    >>> print(causal().draw(3, 3))
    ■··
    ■■·
    ■■■
    >>> print(causal().draw(2, 4))  # the last two of four positions
    ■■■·
    ■■■■
    """
    return Band(None, 0, offset)


@suggest_names
def window(left: int, right: int | None = None, offset: Offset = None) -> Mask:
    """Returns the mask of the keys at most `left` before and `right` after the query's position.

        allowed(i, j) = i + offset - left ≤ j ≤ i + offset + right

    `right` defaults to `left`, and `offset` to S - L, as in `causal`. Longformer, Beltagy et al.
    (2020).

    >>> from regard import causal, window
    >>> print(window(1).draw(4, 4))
    ■■··
    ■■■·
    ·■■■
    ··■■
    >>> print((causal() & window(1)).draw(2, 4))
    ·■■·
    ··■■
    """
    right = left if right is None else right
    check_integer("window: left", left, 0, MAX_LENGTH)
    check_integer("window: right", right, 0, MAX_LENGTH)
    return Band(left, right, offset)


@suggest_names
def padding(
    lengths: Sequence[int] | Sequence[Sequence[int]] | Sequence[Sequence[bool]] | Tensor,
) -> Mask:
    """Returns the mask of the first `lengths[b]` keys of sequence b, which hides padding.

        allowed(b, i, j) = j < lengths[b]

    Lengths are (B,). Padded queries are computed as well; ignore their results. A mask (B, S) of
    real tokens, boolean or the 0 and 1 of Hugging Face's `attention_mask`, must be padded on the
    right. True means a real token; `key_padding_mask` of `nn.MultiheadAttention` is the inverse:
    pass `~key_padding_mask`. On a GPU its values are not read, and any pattern is computed exactly,
    as by `Mask.from_tensor`; lengths give faster kernels.

    Values are copied: a tensor that changes later does not change the mask.

    >>> import torch
    >>> from regard import padding
    >>> print(padding([3, 1]).draw(1, 4))
    sentence 0
    ■■■·
    <BLANKLINE>
    sentence 1
    ■···
    >>> padding(torch.tensor([[True, True, True, False], [True, False, False, False]]))
    <Mask padding([3, 1])>
    """
    given = integer_tensor(lengths, "padding lengths", axes=(1, 2), booleans=2)
    if given.ndim == 1:
        return Padding(_counts(given, "padding lengths", axes=(1,)))
    return _padding_of_rows(given)


@suggest_names
def prefix(n: int | Sequence[int] | Tensor) -> Mask:
    """Returns the mask of the first n keys, for a prefix that every query may attend to.

        allowed(i, j) = j < n

    n is one number, or one for each sequence, (B,). `causal() | prefix(n)` is the mask of a prefix
    language model, Raffel et al. (2020).

    >>> from regard import causal, prefix
    >>> print((causal() | prefix(2)).draw(4, 4))
    ■■··
    ■■··
    ■■■·
    ■■■■
    """
    if isinstance(n, int) and n >= 0 and not isinstance(n, bool):
        check_integer("prefix n", n, 0, MAX_LENGTH)
        return Prefix(n)
    return Prefix(_counts(n, "prefix n", axes=(0, 1)))


@suggest_names
def documents(ids: Sequence[int] | Sequence[Sequence[int]] | Tensor) -> Mask:
    """Returns the mask that separates the documents within a sequence.

        allowed(i, j) = ids[i] equals ids[j]

    ids are integers, (S,) or (B, S), one for each key; queries are the last L positions.

    >>> from regard import causal, documents
    >>> print((causal() & documents([7, 7, 9, 9])).draw(4, 4))
    ■···
    ■■··
    ··■·
    ··■■
    """
    ids = integer_tensor(ids, "document ids", axes=(1, 2)).to(torch.int64, copy=True)
    return Documents(ids[None] if ids.ndim == 1 else ids)


@suggest_names
def packed(
    query_lengths: PackedLengths | Sequence[int] | Tensor,
    source_lengths: PackedLengths | Sequence[int] | Tensor | None = None,
) -> Mask:
    """Returns the mask of sequences laid end to end: a query attends to its own sequence.

    Lengths are (B,), of a batch (1, T). `source_lengths` are those of the keys in cross-attention.
    Combined with `causal()` or `window()`, positions count within each sequence.

    >>> from regard import causal, masks
    >>> print((causal() & masks.packed([2, 1])).draw(3, 3))
    ■··
    ■■·
    ··■
    """
    query = (
        query_lengths if isinstance(query_lengths, PackedLengths) else PackedLengths(query_lengths)
    )
    if source_lengths is None:
        return Packing(query, query)
    source = (
        source_lengths
        if isinstance(source_lengths, PackedLengths)
        else PackedLengths(source_lengths)
    )
    return Packing(query, source)


# The kinds they make: a rule, its span where it has one, and its checks.


class Band(Mask):
    """Keys from `left` before to `right` after the position at which the query stands."""

    reads = numbers = ("left", "right", "offset")

    def __init__(self, left: int | None, right: int, offset: Offset = None):
        self.left, self.right, self.offset = left, right, offset
        self.ranges = "start" if left is None else "any"
        if offset is not None:
            check_offset(offset)
        if isinstance(offset, Tensor) and offset.ndim:
            self.batch = len(offset)

    def at(self, offset: int | Tensor) -> Mask:
        return Band(self.left, self.right, offset) if self.offset is None else self

    def _position(self, at: At) -> Tensor:
        return at.query if self.offset is None else at.stand(self.offset).query

    def rule(self, at: At) -> Tensor:
        distance = at.key - self._position(at)
        if self.left is None:
            return distance <= self.right
        return (distance >= -self.left) & (distance <= self.right)

    def span(self, at: At) -> Span:
        stands = self._position(at) + at.start
        first = at.start if self.left is None else stands - self.left
        return first, stands + self.right + 1

    def check(self, B: int, L: int, S: int) -> None:
        check_batch(self, B, "offsets")

    @property
    def fixed(self) -> bool:
        return not isinstance(self.offset, Tensor)

    def __str__(self) -> str:
        sizes = [] if self.left is None else [shown(self.left), shown(self.right)]
        sizes += [] if self.offset is None else [shown(self.offset)]
        return f"{'causal' if self.left is None else 'window'}({', '.join(sizes)})"


class Padding(Mask):
    """Keys below each sentence's length."""

    ranges = "start"
    reads = ("lengths",)

    def __init__(self, lengths: Tensor, columns: int | None = None):
        self.lengths = lengths
        self.batch = len(lengths)
        self.columns = columns
        """Number of keys of the mask from which the lengths were counted, if they were."""
        # Read once: every call of `attend` compares it with the number of keys.
        self.longest = int(lengths.max()) if on_host(lengths) and lengths.numel() else 0

    def rule(self, at: At) -> Tensor:
        return at.column < per_sentence(self.lengths, at.batch)

    def span(self, at: At) -> Span:
        return 0, per_sentence(self.lengths, at.batch)

    @property
    def extent(self) -> tuple[int | None, int | None]:
        return None, self.columns or self.longest or None

    def check(self, B: int, L: int, S: int) -> None:
        check_batch(self, B, "lengths")
        if self.columns not in (None, S):
            raise ValueError(
                f"padding: the mask has {self.columns} columns for {S} keys; pass one for each key"
            )
        if self.longest > S:
            raise ValueError(
                f"padding: a length ({self.longest}) is longer than the keys (S = {S}); "
                "pass the number of real keys of each sentence"
            )

    def __str__(self) -> str:
        return f"padding({shown(self.lengths)})"


class Prefix(Mask):
    """The first n keys of each sequence."""

    ranges = "start"
    reads = numbers = ("n",)

    def __init__(self, n: int | Tensor):
        self.n = n
        self.batch = len(n) if isinstance(n, Tensor) and n.ndim else 1

    def _count(self, at: At) -> int | Tensor:
        return per_sentence(self.n, at.batch) if isinstance(self.n, Tensor) else self.n

    def rule(self, at: At) -> Tensor:
        return at.key < self._count(at)

    def span(self, at: At) -> Span:
        return at.start, at.start + self._count(at)

    def check(self, B: int, L: int, S: int) -> None:
        check_batch(self, B, "prefixes")

    @property
    def fixed(self) -> bool:
        return not isinstance(self.n, Tensor) or self.n.ndim > 0

    def __str__(self) -> str:
        return f"prefix({shown(self.n)})"


class Documents(Mask):
    """Keys of the query's own document."""

    relative = True
    reads = ("ids", "edges")

    def __init__(self, ids: Tensor):
        self.ids = ids
        self.batch = len(ids)
        self.edges = _edges(ids) if on_host(ids) else None
        """First and past-the-last column of each position's document, where it is one range."""
        self.ranges = "any" if self.edges is not None else ""

    def rule(self, at: At) -> Tensor:
        batch = at.batch if self.batch > 1 else at.batch * 0
        return self.ids[batch, at.query + at.start] == self.ids[batch, at.column]

    def span(self, at: At) -> Span | None:
        if self.edges is None:
            return None
        batch = at.batch if self.batch > 1 else at.batch * 0
        column = at.query + at.start
        first, last = (edge[batch, column] for edge in self.edges)
        return first, last

    @property
    def extent(self) -> tuple[int | None, int | None]:
        return self.ids.shape[1], self.ids.shape[1]

    def check(self, B: int, L: int, S: int) -> None:
        check_batch(self, B, "rows of ids")
        if self.ids.shape[1] != S:
            raise ValueError(
                f"documents: {self.ids.shape[1]} ids for {S} keys; pass one id for each key"
            )
        if L > S:
            raise ValueError(
                f"documents: {L} queries but only {S} keys; each query needs the id of its own key"
            )

    def __str__(self) -> str:
        B, S = self.ids.shape
        return f"documents({S} ids)" if B == 1 else f"documents({B}x{S} ids)"


class Packing(Mask):
    """Keys of the query's own sequence, in a batch whose sequences are laid end to end."""

    ranges = "any"
    packs = True
    reads = ("query", "source", "_members")

    def __init__(self, query: PackedLengths, source: PackedLengths):
        if len(query) != len(source):
            raise ValueError(
                f"packed: {len(query)} query lengths but {len(source)} source lengths; "
                "each sequence needs one of both"
            )
        self.query, self.source = query, source
        self._members: tuple[Tensor, Tensor] | None = None

    def check_beside(self, others: Sequence[Mask]) -> None:
        if any(isinstance(other, Padding) for other in others):
            raise ValueError("padding(...) and packed(...) exclude each other; keep packed(...)")
        separate = self.query is not self.source
        if separate and any(isinstance(other, Documents) for other in others):
            raise ValueError(
                "documents(...) needs self-attention: packed(lengths), not two lengths"
            )

    def localise(self, batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> At:
        queries, sources = self.query.offsets, self.source.offsets
        of_row, of_column = self._sequences(row, column)
        begin, end = sources[of_row], sources[of_row + 1]
        first = queries[of_row]
        offset = (end - begin) - (queries[of_row + 1] - first)
        query, key = row - first + offset, column - sources[of_column]
        return At(batch, head, row, column, query, key, begin, offset)

    def _sequences(self, row: Tensor, column: Tensor) -> tuple[Tensor, Tensor]:
        """The sequence to which each row and each column belongs."""
        if self._members is None:
            members = self.query.sequence(), self.source.sequence()
            if torch.compiler.is_compiling():
                return members[0][row], members[1][column]
            self._members = members
        return self._members[0][row], self._members[1][column]

    def rule(self, at: At) -> Tensor:
        of_row, of_column = self._sequences(at.row, at.column)
        return of_row == of_column

    def span(self, at: At) -> Span:
        of_row, _ = self._sequences(at.row, at.column)
        return self.source.offsets[of_row], self.source.offsets[of_row + 1]

    @property
    def extent(self) -> tuple[int | None, int | None]:
        return self.query.total, self.source.total

    def check(self, B: int, L: int, S: int) -> None:
        if B != 1:
            raise ValueError(f"packed: the batch axis must be 1, got {B}; lay sequences end to end")
        for name, lengths, size in (("query", self.query, L), ("source", self.source, S)):
            if lengths.total != size:
                raise ValueError(
                    f"packed: the {name} lengths add up to {lengths.total}, but there are {size} "
                    f"{name} positions; pass the lengths of this very batch"
                )

    def __str__(self) -> str:
        if self.query is self.source:
            return f"packed({shown(self.query.lengths)})"
        return f"packed({shown(self.query.lengths)}, {shown(self.source.lengths)})"


def _counts(values: Any, name: str, axes: tuple[int, ...]) -> Tensor:
    counts = integer_tensor(values, name, axes)
    if on_host(counts) and counts.numel() and int(counts.min()) < 0:
        raise ValueError(f"{name} ({shown(counts)}) must not be negative; they count keys")
    # A single number may be a counter that changes in place, such as the filled length of a cache.
    return counts.to(torch.int64, copy=True) if counts.ndim else counts


def _padding_of_rows(real: Tensor) -> Mask:
    """The mask of a batch whose real tokens are True or 1."""
    if not on_host(real):  # nothing waits for a device to count them
        return Mask.from_tensor((real != 0)[:, None, None])
    lengths = (real != 0).sum(1)
    right = torch.arange(real.shape[1]) < lengths[:, None]
    wrong = (real.long() != right.long()).any(1).nonzero().flatten().tolist()
    if wrong:
        row = real[wrong[0]]
        values = row.unique().tolist()
        if real.dtype != torch.bool and not set(values) <= {0, 1}:
            raise ValueError(
                f"padding: row {wrong[0]} of the mask holds {shown(row)}, but 1 is a real token "
                "and 0 is padding; pass lengths as one axis, such as [3, 5]"
            )
        raise ValueError(
            f"padding: row {wrong[0]} of the mask is {shown(row.long())}, which is not padded on "
            "the right; for any other pattern use Mask.from_tensor(mask.bool()[:, None, None, :])"
        )
    return Padding(lengths, real.shape[1])


def _edges(ids: Tensor) -> tuple[Tensor, Tensor] | None:
    """Begin and end of each position's document, if no document comes in pieces."""
    B, S = ids.shape
    if S == 0:
        return None
    starts = torch.ones(B, S, dtype=torch.bool)
    starts[:, 1:] = ids[:, 1:] != ids[:, :-1]
    distinct = 1 + ids.sort(1).values.diff(dim=1).ne(0).sum(1)
    if not torch.equal(distinct, starts.sum(1)):
        return None
    ends = torch.ones_like(starts)
    ends[:, :-1] = starts[:, 1:]
    index = torch.arange(S)
    first = torch.where(starts, index, 0).cummax(1).values
    last = torch.where(ends, index + 1, S).flip(1).cummin(1).values.flip(1)
    return first, last
