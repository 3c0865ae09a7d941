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

A new mask is one function that returns `Mask(rule, text)`; CONTRIBUTING.md shows one.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
Offset = int | Tensor | None
Span = tuple[int | Tensor, int | Tensor]


class At(NamedTuple):
    """The pairs a rule is asked about: index tensors that broadcast to (B, H, L, S)."""

    batch: Tensor
    head: Tensor
    row: Tensor
    """Index of the query in the tensor that `attend` receives."""
    column: Tensor
    """Index of the key in the tensor that `attend` receives."""
    query: Tensor
    """Index of the query within its own sequence (the row, unless the batch is packed)."""
    key: Tensor
    """Index of the key within its own sequence (the column, unless the batch is packed)."""
    position: Tensor
    """Index of the key at which the query stands: query + S - L of its sequence (bottom right)."""
    start: int | Tensor
    """Column at which the query's own source sequence begins (0, unless the batch is packed)."""


class Packed:
    """The lengths of sequences laid end to end in one row of a (1, T) batch, without padding.

    `offsets` (int32, on the device) holds where each sequence begins, and the total last;
    `longest` and `total` are plain ints, because kernels need them without asking the device.
    """

    def __init__(self, lengths: Sequence[int] | Tensor, device: torch.device | str | None = None):
        if isinstance(lengths, Tensor) and device is None:
            device = lengths.device
        host = integers(lengths, "packed lengths").cpu()
        if host.numel() and int(host.min()) < 0:
            raise ValueError(f"packed lengths must not be negative, got {int(host.min())}")
        self.lengths = host
        self.longest = int(host.max()) if host.numel() else 0
        self.total = int(host.sum())
        offsets = torch.zeros(len(host) + 1, dtype=torch.int32)
        offsets[1:] = host.cumsum(0)
        self.offsets = offsets.to(device)

    def to(self, device: torch.device | str) -> "Packed":
        """The same lengths with their offsets on another device."""
        if self.offsets.device == torch.device(device):
            return self
        moved = object.__new__(Packed)
        moved.lengths, moved.longest, moved.total = self.lengths, self.longest, self.total
        moved.offsets = self.offsets.to(device, non_blocking=True)
        return moved

    def sequence(self) -> Tensor:
        """Which sequence each of the T tokens belongs to, shape (T,)."""
        tokens = torch.arange(self.total, device=self.offsets.device, dtype=torch.int32)
        return torch.bucketize(tokens, self.offsets[1:], right=True)

    def positions(self) -> Tensor:
        """Position of each token in its own sequence, shape (1, T): 0, 1, 2, 0, 1, ..."""
        tokens = torch.arange(self.total, device=self.offsets.device)
        return (tokens - self.offsets[self.sequence()])[None]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __repr__(self) -> str:
        return f"Packed({shown(self.lengths)})"


class Mask:
    """What may be attended to: a rule over pairs, and a text that names it.

    Subclasses are the built-in kinds. What they add to the rule is structure that backends can
    use: `span`, for masks that give each query one run of neighbouring keys.
    """

    batch = 1
    """Length of the batch axis that the mask itself has; 1 where every sentence is alike."""
    heads = 1
    runs = ""
    """"any" where each query sees one run of keys (see `span`), "start" where that run always
    begins where the sequence does, "" where neither is known."""
    numbers: tuple[str, ...] = ()
    """Attributes with plain numbers that the rule reads."""

    def __init__(self, rule: Callable[[At], Tensor], text: str):
        self._rule = rule
        self._text = text

    @staticmethod
    def from_tensor(allowed: Tensor) -> "Mask":
        """A mask from a boolean tensor (True = may attend) that broadcasts to (B, H, L, S).

        Two axes are (L, S), three are (B, L, S).
        """
        return Dense(allowed)

    # What a kind of mask defines.

    def rule(self, at: At) -> Tensor:
        """True where the pair may attend."""
        return self._rule(at)

    def span(self, at: At) -> Span | None:
        """First and past-the-last allowed column of each row, if `runs` says so; else None.

        Called with a frame that has no columns. May reach below 0 and beyond S.
        """
        return None

    def check(self, B: int, L: int, S: int) -> None:
        """Raise ValueError where the mask cannot fit B sentences of L queries and S keys."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that the rule reads."""
        return ()

    @property
    def fixed(self) -> bool:
        """False where the mask reads a tensor that may change between calls (a cache's length)."""
        return True

    @property
    def parts(self) -> tuple["Mask", ...]:
        """The masks of which this one is the conjunction."""
        return (self,)

    def __str__(self) -> str:
        return self._text

    def __repr__(self) -> str:
        return f"<Mask {self}>"

    # The algebra.

    def __and__(self, other: "Mask") -> "Mask":
        return And(self, operand(other, "&"))

    def __or__(self, other: "Mask") -> "Mask":
        return Or(self, operand(other, "|"))

    def __invert__(self) -> "Mask":
        return Not(self)

    # What backends ask.

    @property
    def packing(self) -> "Packing | None":
        """The packing in whose sequences the other parts count their positions, if any."""
        found = [part for part in self.parts if isinstance(part, Packing)]
        if len(found) > 1:
            raise ValueError(f"a mask can hold one packed(...), this one holds {len(found)}")
        return found[0] if found else None

    def to(self, device: torch.device | str, numbers: bool = False) -> "Mask":
        """The same mask with all it reads on a device; the mask itself if it is there already.

        With `numbers`, its plain numbers become tensors too: what is compiled for one window then
        serves every other.
        """
        device = torch.device(device)
        held = {k: v for k, v in vars(self).items() if k != "_memory"}
        moved = {name: _moved(value, device, numbers) for name, value in held.items()}
        for name in self.numbers if numbers else ():
            if isinstance(moved[name], int):
                moved[name] = torch.full((), moved[name], device=device)
        if all(moved[name] is value for name, value in held.items()):
            return self
        there = object.__new__(type(self))
        there.__dict__.update(moved)
        return there

    def block(self, rows: Tensor, columns: Tensor, L: int, S: int) -> Tensor:
        """The rule at chosen rows and columns of an L x S problem; four axes, unexpanded."""
        device = rows.device
        there = self.to(device)
        at = there.frame(
            torch.arange(self.batch, device=device)[:, None, None, None],
            torch.arange(self.heads, device=device)[:, None, None],
            rows[:, None],
            columns,
            S - L,
        )
        allowed = there.rule(at)
        return allowed[(None,) * (4 - allowed.ndim)]

    def compact(self, L: int, S: int, device: torch.device | str | None = None) -> Tensor:
        """The boolean tensor with four axes, each of length 1 where the mask does not vary."""
        rows = torch.arange(L, device=device)
        return self.block(rows, torch.arange(S, device=device), L, S)

    def tensor(self, L: int, S: int, device: torch.device | str | None = None) -> Tensor:
        """The boolean tensor (B or 1, H or 1, L, S); True = may attend."""
        self.check(self.batch, L, S)
        allowed = self.compact(L, S, device)
        return allowed.expand(allowed.shape[0], allowed.shape[1], L, S)

    def intervals(
        self, L: int, S: int, device: torch.device | str | None = None
    ) -> tuple[Tensor, Tensor] | None:
        """For each row the first and past-the-last column it may attend to, (B or 1, L) each.

        This is the whole mask in O(L) memory. None where some row's keys are not one run.
        An empty row has first == last.
        """
        index = torch.arange(L, device=device)
        batch = torch.arange(self.batch, device=device)[:, None]
        zero = torch.zeros(1, dtype=torch.int64, device=device)
        there = self.to(index.device)
        span = there.span(there.frame(batch, zero, index, zero, S - L))
        if span is None:
            return None
        shape = torch.broadcast_shapes(batch.shape, index.shape)
        first, last = (
            torch.as_tensor(edge, device=device).clamp(0, S).broadcast_to(shape) for edge in span
        )
        return torch.minimum(first, last), last

    def never_empty(self, L: int, S: int) -> bool:
        """Whether every query sees some key, where that is known without asking a device."""
        if not self.runs or not all(on_host(tensor) for tensor in self.tensors):
            return False
        edges = self.intervals(L, S, "cpu")
        assert edges is not None
        return bool((edges[0] < edges[1]).all())

    def frame(
        self, batch: Tensor, head: Tensor, row: Tensor, column: Tensor, shift: int | Tensor
    ) -> At:
        """The pair (row, column) as this mask's parts are to see it; `shift` is S - L."""
        packing = self.packing
        if packing is None:
            return At(batch, head, row, column, row, column, row + shift, 0)
        return packing.localise(batch, head, row, column)

    def draw(self, L: int, S: int) -> str:
        """The mask as text, a line for each query: `■` may attend, `·` may not."""
        allowed = self.tensor(L, S).cpu()
        B, H = allowed.shape[:2]
        grids = []
        for b in range(B):
            for h in range(H):
                name = [f"sentence {b}"] * (B > 1) + [f"head {h}"] * (H > 1)
                lines = ["".join("■" if a else "·" for a in row) for row in allowed[b, h].tolist()]
                grids.append("\n".join(([", ".join(name)] if name else []) + lines))
        return "\n\n".join(grids)

    def remember(self, what: str, key: Hashable, build: Callable[[], T]) -> T:
        """`build()`, kept with the mask while it is asked for the same key again.

        A model hands one mask to all its layers: its tensor, block mask or lengths are made once.
        """
        if torch.compiler.is_compiling() or not self.fixed:
            return build()
        held = self.__dict__.setdefault("_memory", {})
        if what not in held or held[what][0] != key:
            if capturing():
                return build()
            with torch.inference_mode(False):  # what is kept must also serve training later
                held[what] = (key, build())
        kept: T = held[what][1]
        return kept


# The kinds of mask. Each is a rule, its span where it has one, and its checks.


class Band(Mask):
    """Keys from `left` before to `right` after the position at which the query stands."""

    numbers = ("left", "right", "offset")

    def __init__(self, left: int | None, right: int, offset: Offset, text: str):
        self.left, self.right, self.offset, self._text = left, right, offset, text
        self.runs = "start" if left is None else "any"
        if isinstance(offset, Tensor):
            integers(offset, "offset", axes=(0, 1))
            self.batch = offset.numel() if offset.ndim else 1
        elif offset is not None and (isinstance(offset, bool) or not isinstance(offset, int)):
            raise ValueError(
                f"offset must be an integer or an integer tensor, got {offset!r}; "
                "pass the number of keys that precede the first query"
            )

    def _position(self, at: At) -> Tensor:
        if self.offset is None:
            return at.position
        if isinstance(self.offset, Tensor):
            return at.query + per_sentence(self.offset, at.batch)
        return at.query + self.offset

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
        _check_batch(self, B, "offsets")

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.offset,) if isinstance(self.offset, Tensor) else ()

    @property
    def fixed(self) -> bool:
        return not isinstance(self.offset, Tensor)


class Padding(Mask):
    """Keys below each sentence's length."""

    runs = "start"

    def __init__(self, lengths: Tensor):
        self.lengths = lengths
        self.batch = len(lengths)

    def rule(self, at: At) -> Tensor:
        return at.column < per_sentence(self.lengths, at.batch)

    def span(self, at: At) -> Span:
        return 0, per_sentence(self.lengths, at.batch)

    def check(self, B: int, L: int, S: int) -> None:
        _check_batch(self, B, "lengths")
        if on_host(self.lengths) and self.lengths.numel() and int(self.lengths.max()) > S:
            raise ValueError(
                f"padding: a length ({int(self.lengths.max())}) is longer than the keys (S = {S}); "
                "pass the number of real keys of each sentence"
            )

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.lengths,)

    def __str__(self) -> str:
        return f"padding({shown(self.lengths)})"


class Prefix(Mask):
    """The first n keys of each sequence."""

    runs = "start"
    numbers = ("n",)

    def __init__(self, n: int | Tensor):
        self.n = n
        self.batch = len(n) if isinstance(n, Tensor) else 1

    def _count(self, at: At) -> int | Tensor:
        if isinstance(self.n, Tensor):
            return per_sentence(self.n, at.batch)
        return self.n

    def rule(self, at: At) -> Tensor:
        return at.key < self._count(at)

    def span(self, at: At) -> Span:
        return at.start, at.start + self._count(at)

    def check(self, B: int, L: int, S: int) -> None:
        _check_batch(self, B, "prefixes")

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.n,) if isinstance(self.n, Tensor) else ()

    def __str__(self) -> str:
        return f"prefix({shown(self.n) if isinstance(self.n, Tensor) else self.n})"


class Documents(Mask):
    """Keys of the query's own document."""

    def __init__(self, ids: Tensor):
        self.ids = ids
        self.batch = len(ids)
        self.edges = _edges(ids) if on_host(ids) else None
        """First and past-the-last column of each position's document, where it is one run."""
        self.runs = "any" if self.edges is not None else ""

    def rule(self, at: At) -> Tensor:
        batch = at.batch if self.batch > 1 else at.batch * 0
        return self.ids[batch, at.position + at.start] == self.ids[batch, at.column]

    def span(self, at: At) -> Span | None:
        if self.edges is None:
            return None
        batch = at.batch if self.batch > 1 else at.batch * 0
        own = at.position + at.start
        first, last = (edge[batch, own] for edge in self.edges)
        return first, last

    def check(self, B: int, L: int, S: int) -> None:
        _check_batch(self, B, "rows of ids")
        if self.ids.shape[1] != S:
            raise ValueError(
                f"documents: {self.ids.shape[1]} ids for {S} keys; pass one id for each key"
            )
        if L > S:
            raise ValueError(
                f"documents: {L} queries but only {S} keys; each query needs the id of its own key"
            )

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.ids,)

    def __str__(self) -> str:
        B, S = self.ids.shape
        return f"documents({S} ids)" if B == 1 else f"documents({B}x{S} ids)"


class Packing(Mask):
    """Keys of the query's own sequence, in a batch whose sequences are laid end to end."""

    runs = "any"

    def __init__(self, query: Packed, source: Packed):
        if len(query) != len(source):
            raise ValueError(
                f"packed: {len(query)} query lengths but {len(source)} source lengths; "
                "each sequence needs one of both"
            )
        self.query, self.source = query, source
        self._members: tuple[Tensor, Tensor] | None = None

    def localise(self, batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> At:
        queries, sources = self.query.offsets, self.source.offsets
        of_row, of_column = self._sequences(row, column)
        begin, end = sources[of_row], sources[of_row + 1]
        query, key = row - queries[of_row], column - sources[of_column]
        position = query + (end - begin) - (queries[of_row + 1] - queries[of_row])
        return At(batch, head, row, column, query, key, position, begin)

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


class Dense(Mask):
    """A boolean tensor."""

    def __init__(self, allowed: Tensor):
        if not isinstance(allowed, Tensor) or allowed.dtype != torch.bool:
            given = allowed.dtype if isinstance(allowed, Tensor) else type(allowed).__name__
            raise ValueError(
                f"a mask tensor must be boolean (True = may attend), got {given}; "
                "convert it, or pass additive values as bias"
            )
        self.allowed = four_axes(allowed, "mask")
        self.batch, self.heads = self.allowed.shape[:2]

    def rule(self, at: At) -> Tensor:
        allowed = self.allowed
        index = (at.batch, at.head, at.row, at.column)
        # A tensor is indexed, not compared, so axes of length 1 stand for every index.
        return allowed[tuple(i if n > 1 else i * 0 for i, n in zip(index, allowed.shape))]

    def check(self, B: int, L: int, S: int) -> None:
        _check_batch(self, B, "masks")
        for name, have, need in zip("LS", self.allowed.shape[2:], (L, S)):
            if have not in (1, need):
                raise ValueError(
                    f"mask of shape {tuple(self.allowed.shape)} does not broadcast to "
                    f"(B, H, L = {L}, S = {S}): its {name} is {have}"
                )

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.allowed,)

    def __str__(self) -> str:
        return f"from_tensor({'x'.join(map(str, self.allowed.shape))})"


class And(Mask):
    """Both."""

    def __init__(self, *masks: Mask):
        self._parts = tuple(part for mask in masks for part in mask.parts)
        self.batch = _common("batch", [part.batch for part in self._parts])
        self.heads = _common("head", [part.heads for part in self._parts])
        kinds = {part.runs for part in self._parts}
        self.runs = "" if "" in kinds else "start" if kinds == {"start"} else "any"

    @property
    def parts(self) -> tuple[Mask, ...]:
        return self._parts

    def rule(self, at: At) -> Tensor:
        allowed = self._parts[0].rule(at)
        for part in self._parts[1:]:
            allowed = allowed & part.rule(at)
        return allowed

    def span(self, at: At) -> Span | None:
        first: int | Tensor = 0
        last: int | Tensor = _FAR
        for part in self._parts:
            span = part.span(at)
            if span is None:
                return None
            first, last = _largest(first, span[0]), _smallest(last, span[1])
        return first, last

    def check(self, B: int, L: int, S: int) -> None:
        for part in self._parts:
            part.check(B, L, S)
        packing = self.packing
        if packing is None:
            return
        if any(isinstance(part, Padding) for part in self._parts):
            raise ValueError("padding(...) and packed(...) exclude each other; keep packed(...)")
        separate = packing.query is not packing.source
        if separate and any(isinstance(part, Documents) for part in self._parts):
            raise ValueError(
                "documents(...) needs self-attention: packed(lengths), not two lengths"
            )

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(tensor for part in self._parts for tensor in part.tensors)

    @property
    def fixed(self) -> bool:
        return all(part.fixed for part in self._parts)

    def __str__(self) -> str:
        return " & ".join(f"({p})" if isinstance(p, Or) else str(p) for p in self._parts)


class Or(Mask):
    """Either."""

    def __init__(self, *masks: Mask):
        self.either = masks
        self.batch = _common("batch", [mask.batch for mask in masks])
        self.heads = _common("head", [mask.heads for mask in masks])
        # Two runs make one if both begin where the sequence does: causal() | prefix(n).
        self.runs = "start" if {mask.runs for mask in masks} == {"start"} else ""

    def rule(self, at: At) -> Tensor:
        allowed = self.either[0].rule(at)
        for mask in self.either[1:]:
            allowed = allowed | mask.rule(at)
        return allowed

    def span(self, at: At) -> Span | None:
        if not self.runs:
            return None
        last: int | Tensor = 0
        for mask in self.either:
            span = mask.span(at)
            assert span is not None
            last = _largest(last, span[1])
        return at.start, last

    def check(self, B: int, L: int, S: int) -> None:
        for mask in self.either:
            mask.check(B, L, S)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(tensor for mask in self.either for tensor in mask.tensors)

    @property
    def fixed(self) -> bool:
        return all(mask.fixed for mask in self.either)

    def __str__(self) -> str:
        return " | ".join(f"({m})" if isinstance(m, And) else str(m) for m in self.either)


class Not(Mask):
    """The opposite."""

    def __init__(self, mask: Mask):
        self.mask = mask
        self.batch, self.heads = mask.batch, mask.heads

    def rule(self, at: At) -> Tensor:
        return ~self.mask.rule(at)

    def check(self, B: int, L: int, S: int) -> None:
        self.mask.check(B, L, S)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.mask.tensors

    @property
    def fixed(self) -> bool:
        return self.mask.fixed

    def __str__(self) -> str:
        return f"~({self.mask})" if isinstance(self.mask, And | Or) else f"~{self.mask}"


# The functions that make them.


def causal(offset: Offset = None) -> Mask:
    """No key after the query's own position: in scores, -∞ strictly above the diagonal.

    Query i stands at source position i + offset. None aligns the last query with the last key;
    a cache passes the number of keys it held before, as a tensor, so that nothing waits for it.
    """
    return Band(None, 0, offset, "causal()" if offset is None else f"causal({shown(offset)})")


def window(left: int, right: int | None = None, offset: Offset = None) -> Mask:
    """Keys at most `left` before and `right` after the query's position, both included."""
    right = left if right is None else right
    for name, size in (("left", left), ("right", right)):
        if isinstance(size, bool) or not isinstance(size, int) or size < 0:
            raise ValueError(f"window: {name} ({size!r}) must be a whole number of keys, 0 or more")
    sizes = f"{left}, {right}" if offset is None else f"{left}, {right}, {shown(offset)}"
    return Band(left, right, offset, f"window({sizes})")


def padding(lengths: Sequence[int] | Tensor) -> Mask:
    """The first `lengths[b]` keys of sentence b; queries are left alone, padded ones too."""
    lengths = integers(lengths, "padding lengths")
    if on_host(lengths) and lengths.numel() and int(lengths.min()) < 0:
        raise ValueError(
            f"padding: a length ({int(lengths.min())}) is negative; lengths count keys"
        )
    return Padding(lengths)


def prefix(n: int | Sequence[int] | Tensor) -> Mask:
    """The first n keys (one n for all, or one per sentence), for `causal() | prefix(n)`."""
    if isinstance(n, int) and not isinstance(n, bool):
        if n < 0:
            raise ValueError(f"prefix: n ({n}) is negative; it counts keys")
        return Prefix(n)
    return Prefix(integers(n, "prefix n"))


def documents(ids: Sequence[int] | Sequence[Sequence[int]] | Tensor) -> Mask:
    """Keys whose document id is the query's own; ids are (S,) or (B, S) integers."""
    ids = integers(ids, "document ids", axes=(1, 2))
    return Documents(ids[None] if ids.ndim == 1 else ids)


def packed(
    query_lengths: Packed | Sequence[int] | Tensor,
    source_lengths: Packed | Sequence[int] | Tensor | None = None,
) -> Mask:
    """Sequences laid end to end: each query sees only its own sequence's keys.

    Combined with `causal()` or `window()`, positions count within each sequence.
    """
    query = query_lengths if isinstance(query_lengths, Packed) else Packed(query_lengths)
    if source_lengths is None:
        return Packing(query, query)
    source = source_lengths if isinstance(source_lengths, Packed) else Packed(source_lengths)
    return Packing(query, source)


# Small parts.

_FAR = 2**31 - 1
"""An edge beyond every sequence."""


def on_host(tensor: Tensor) -> bool:
    """Whether values can be looked at without waiting for a device (or for a compiler)."""
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling()


def _moved(value: Any, device: torch.device, numbers: bool) -> Any:
    if isinstance(value, tuple):
        moved = tuple(_moved(each, device, numbers) for each in value)
        return value if all(a is b for a, b in zip(moved, value)) else moved
    if isinstance(value, Mask):
        return value.to(device, numbers)
    return value.to(device) if isinstance(value, Tensor | Packed) else value


def capturing() -> bool:
    """Whether a CUDA graph is being captured: what is made now has no values until its replay."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def shown(values: Any, most: int = 6) -> str:
    """Values for a mask's text: short, and without asking a device for them."""
    if not isinstance(values, Tensor):
        return str(values)
    if not on_host(values):
        return f"{'x'.join(map(str, values.shape)) or 'one'} on {values.device.type}"
    if values.ndim == 0:
        return str(values.item())
    head = ", ".join(map(str, values[:most].tolist()))
    return f"[{head}]" if len(values) <= most else f"[{head}, ... {len(values)} in all]"


def integers(values: Any, name: str, axes: tuple[int, ...] = (1,)) -> Tensor:
    """`values` as an integer tensor of an allowed number of axes, or a ValueError."""
    try:
        tensor = values if isinstance(values, Tensor) else torch.tensor(values)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"{name} must be integers, got {values!r}") from None
    if not isinstance(values, Tensor) and tensor.numel() == 0:
        tensor = tensor.long()
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex or tensor.dtype == torch.bool:
        raise ValueError(f"{name} must be integers, got {tensor.dtype}; convert with .long()")
    if tensor.ndim not in axes:
        wanted = " or ".join(str(n) for n in axes)
        raise ValueError(f"{name} must have {wanted} axes, got shape {tuple(tensor.shape)}")
    return tensor


def four_axes(tensor: Tensor, name: str) -> Tensor:
    """A tensor that broadcasts to (B, H, L, S), with all four axes; a lone leading axis is B."""
    match tensor.ndim:
        case 4:
            return tensor
        case 3:
            return tensor[:, None]
        case n if n < 3:
            return tensor[(None,) * (4 - n)]
    raise ValueError(
        f"{name} of shape {tuple(tensor.shape)} has {tensor.ndim} axes; "
        "it must broadcast to (B, H, L, S)"
    )


def per_sentence(values: Tensor, batch: Tensor) -> Tensor:
    """One value for each index of the batch; a single value serves all."""
    return values if values.ndim == 0 else values[batch if len(values) > 1 else batch * 0]


def operand(other: object, sign: str) -> Mask:
    if isinstance(other, Mask):
        return other
    if isinstance(other, Tensor):
        raise ValueError(f"'{sign}' joins masks; wrap the tensor: Mask.from_tensor(tensor)")
    raise ValueError(
        f"'{sign}' joins masks, got {type(other).__name__}; did you forget to call it?"
    )


def _check_batch(mask: Mask, B: int, what: str) -> None:
    if mask.batch not in (1, B):
        raise ValueError(
            f"{mask}: {mask.batch} {what} for a batch of {B}; pass one for each sentence"
        )


def _common(axis: str, sizes: list[int]) -> int:
    size = max(sizes)
    for other in sizes:
        if other not in (1, size):
            raise ValueError(f"masks disagree on the {axis} axis: {other} and {size}")
    return size


def _edges(ids: Tensor) -> tuple[Tensor, Tensor] | None:
    """Where each position's document begins and ends, if no document comes in pieces."""
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


def _largest(a: int | Tensor, b: int | Tensor) -> int | Tensor:
    if isinstance(a, Tensor):
        return torch.maximum(a, b) if isinstance(b, Tensor) else a.clamp_min(b)
    return b.clamp_min(a) if isinstance(b, Tensor) else max(a, b)


def _smallest(a: int | Tensor, b: int | Tensor) -> int | Tensor:
    if isinstance(a, Tensor):
        return torch.minimum(a, b) if isinstance(b, Tensor) else a.clamp_max(b)
    return b.clamp_max(a) if isinstance(b, Tensor) else min(a, b)
