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

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from regard.attention.host import capturing as capturing
from regard.attention.host import integers, shown, whole
from regard.attention.host import on_host as on_host
from regard.attention.packed import Packed as Packed

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


class Mask:
    """What may be attended to: a rule over pairs, and a text that names it.

    Subclasses are the built-in kinds. What they add to the rule is structure that backends can
    use: `span`, for masks that give each query one run of neighbouring keys.
    """

    batch = 1
    """Length of the batch axis that the mask itself has; 1 where every sentence is alike."""
    heads = 1
    inner: tuple["Mask", ...] = ()
    """The masks of which this one is made."""
    runs = ""
    """"any" where each query sees one run of keys (see `span`), "start" where that run always
    begins where the sequence does, "" where neither is known."""
    own = False
    """Whether it holds a rule of one's own, which may look at the sentence and the head."""
    relative = False
    """Whether the rule asks where the query stands among the keys: `at.position`."""
    numbers: tuple[str, ...] = ()
    """Attributes with plain numbers that the rule reads."""

    def __init__(self, rule: Callable[[At], Tensor], text: str):
        if not callable(rule) or not isinstance(text, str):
            raise ValueError(
                f"Mask takes a rule and a text, got {shown(rule)} and {shown(text)}; "
                "for example Mask(lambda at: at.key <= at.position, 'causal()')"
            )
        self._rule, self._text = rule, text
        self.own = self.relative = True

    @staticmethod
    def from_tensor(allowed: Tensor) -> "Mask":
        """A mask from a boolean tensor (True = may attend) that broadcasts to (B, H, L, S).

        Two axes are (L, S), three are (B, L, S).
        """
        return Dense(allowed)

    # What a kind of mask defines.

    def rule(self, at: At) -> Tensor:
        """True where the pair may attend."""
        allowed = self._rule(at)
        if not isinstance(allowed, Tensor) or allowed.dtype != torch.bool:
            given = f"{allowed.dtype}" if isinstance(allowed, Tensor) else shown(allowed)
            raise ValueError(
                f"the rule of {self} must give a boolean tensor, got {given}; "
                "compare the indices that it receives, as in at.key <= at.position"
            )
        size = torch.broadcast_shapes(*(index.shape for index in at[:4]))
        fits = (have in (1, need) for have, need in zip(allowed.shape[::-1], size[::-1]))
        if allowed.ndim > len(size) or not all(fits):
            raise ValueError(
                f"the rule of {self} gave shape {tuple(allowed.shape)} where {tuple(size)} is "
                "asked; combine the indices that it receives and it will broadcast"
            )
        return allowed

    def span(self, at: At) -> Span | None:
        """First and past-the-last allowed column of each row, if `runs` says so; else None.

        Called with a frame that has no columns. May reach below 0 and beyond S.
        """
        return None

    def check(self, B: int, L: int, S: int) -> None:
        """Raise ValueError where the mask cannot fit B sentences of L queries and S keys."""
        for mask in self.inner:
            mask.check(B, L, S)

    @property
    def fixed(self) -> bool:
        """False where the mask reads a tensor that may change between calls (a cache's length)."""
        return all(mask.fixed for mask in self.inner)

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

    # Reached only with something that is no mask on the left.
    __rand__, __ror__ = __and__, __or__

    # The same mask, elsewhere.

    def at(self, offset: int | Tensor) -> "Mask":
        """The same mask with query i at source position i + offset, where it does not say itself.

        So a mask means the same over a cache that holds more room than keys, whose end is not
        the end of the sequence. The offset may be a tensor without axes.
        """
        return Standing(self, offset) if self.relative else self

    def sized(self, B: int, H: int, L: int, S: int, device: torch.device) -> "Mask":
        """The same mask; a rule of one's own is given B sentences and H heads if it asks for them.

        Whether it does, the shape of its answer for a single query and key tells.
        """
        if not self.own:
            return self
        sentence, head, row, column = (
            torch.arange(size, device=device) for size in (B, H, min(L, 1), min(S, 1))
        )
        at = self.frame(sentence[:, None, None, None], head[:, None, None], row, column, S - L)
        batch, heads = (1, 1, 1, 1, *self.rule(at).shape)[-4:-2]
        return self if batch == heads == 1 else self._with({"batch": batch, "heads": heads})

    def to(self, device: torch.device | str, numbers: bool = False) -> "Mask":
        """The same mask with all it reads on a device; the mask itself if it is there already.

        With `numbers`, its plain numbers become tensors too: what is compiled for one window then
        serves every other.
        """
        device = torch.device(device)
        moved = {name: _moved(value, device, numbers) for name, value in vars(self).items()}
        for name in self.numbers if numbers else ():
            if isinstance(moved[name], int):
                moved[name] = torch.full((), moved[name], device=device)
        if all(moved[name] is value for name, value in vars(self).items()):
            return self
        return self._with(moved)

    def _with(self, changes: dict[str, Any]) -> "Mask":
        """A copy with other attributes, which has nothing to remember yet."""
        other = object.__new__(type(self))
        held = {**vars(self), **changes}
        other.__dict__.update({name: value for name, value in held.items() if name != "_memory"})
        return other

    # What backends ask.

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that the rule reads."""
        read = [value for value in vars(self).values() if isinstance(value, Tensor)]
        return (*read, *(tensor for mask in self.inner for tensor in mask.tensors))

    @property
    def packing(self) -> "Packing | None":
        """The packing in whose sequences the other parts count their positions, if any."""
        return next((part for part in self.parts if isinstance(part, Packing)), None)

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
        whole("L", L, least=0)
        whole("S", S, least=0)
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
            (edge if isinstance(edge, Tensor) else torch.full((1, 1), edge, device=device))
            .clamp(0, S)
            .broadcast_to(shape)
            for edge in span
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

    def __init__(self, left: int | None, right: int, offset: Offset = None):
        self.left, self.right, self.offset = left, right, offset
        self.runs = "start" if left is None else "any"
        if isinstance(offset, Tensor):
            integers(offset, "offset", axes=(0, 1))
            self.batch = offset.numel() if offset.ndim else 1
        elif offset is not None and (isinstance(offset, bool) or not isinstance(offset, int)):
            raise ValueError(
                f"offset must be an integer or an integer tensor, got {shown(offset)}; "
                "pass the number of keys that precede the first query"
            )

    def at(self, offset: int | Tensor) -> Mask:
        return Band(self.left, self.right, offset) if self.offset is None else self

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
    def fixed(self) -> bool:
        return not isinstance(self.offset, Tensor)

    def __str__(self) -> str:
        sizes = [] if self.left is None else [shown(self.left), shown(self.right)]
        sizes += [] if self.offset is None else [shown(self.offset)]
        return f"{'causal' if self.left is None else 'window'}({', '.join(sizes)})"


class Padding(Mask):
    """Keys below each sentence's length."""

    runs = "start"

    def __init__(self, lengths: Tensor):
        self.lengths = lengths
        self.batch = len(lengths)
        # Read once: every call of `attend` compares it with the number of keys.
        self.longest = int(lengths.max()) if on_host(lengths) and lengths.numel() else 0

    def rule(self, at: At) -> Tensor:
        return at.column < per_sentence(self.lengths, at.batch)

    def span(self, at: At) -> Span:
        return 0, per_sentence(self.lengths, at.batch)

    def check(self, B: int, L: int, S: int) -> None:
        _check_batch(self, B, "lengths")
        if self.longest > S:
            raise ValueError(
                f"padding: a length ({self.longest}) is longer than the keys (S = {S}); "
                "pass the number of real keys of each sentence"
            )

    def __str__(self) -> str:
        return f"padding({shown(self.lengths)})"


class Prefix(Mask):
    """The first n keys of each sequence."""

    runs = "start"
    numbers = ("n",)

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
        _check_batch(self, B, "prefixes")

    @property
    def fixed(self) -> bool:
        return not isinstance(self.n, Tensor) or self.n.ndim > 0

    def __str__(self) -> str:
        return f"prefix({shown(self.n)})"


class Documents(Mask):
    """Keys of the query's own document."""

    relative = True

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

    def __str__(self) -> str:
        return f"from_tensor({'x'.join(map(str, self.allowed.shape))})"


class Joined(Mask):
    """A mask made of others: what holds for every way of joining them."""

    def __init__(self, *masks: Mask):
        self.inner = masks
        self.batch = _common("batch", [mask.batch for mask in masks])
        self.heads = _common("head", [mask.heads for mask in masks])
        self.own = any(mask.own for mask in masks)
        leaves = list(_leaves(masks))
        packings = [leaf for leaf in leaves if isinstance(leaf, Packing)]
        if packings and any(isinstance(leaf, Padding) for leaf in leaves):
            raise ValueError("padding(...) and packed(...) exclude each other; keep packed(...)")
        separate = any(packing.query is not packing.source for packing in packings)
        if separate and any(isinstance(leaf, Documents) for leaf in leaves):
            raise ValueError(
                "documents(...) needs self-attention: packed(lengths), not two lengths"
            )

    def made_of(self, masks: list[Mask]) -> Mask:
        """The same joining of other masks."""
        return type(self)(*masks)

    def at(self, offset: int | Tensor) -> Mask:
        return self.made_of([mask.at(offset) for mask in self.inner])

    def sized(self, B: int, H: int, L: int, S: int, device: torch.device) -> Mask:
        return self.made_of([mask.sized(B, H, L, S, device) for mask in self.inner])


class And(Joined):
    """Both."""

    def __init__(self, *masks: Mask):
        super().__init__(*(part for mask in masks for part in mask.parts))
        kinds = {part.runs for part in self.inner}
        self.runs = "" if "" in kinds else "start" if kinds == {"start"} else "any"
        packings = [str(part) for part in self.inner if isinstance(part, Packing)]
        if len(packings) > 1:
            raise ValueError(
                f"a mask can hold one packed(...), got {' and '.join(packings)}; "
                "give the lengths of queries and sources to one: packed(queries, sources)"
            )

    @property
    def parts(self) -> tuple[Mask, ...]:
        return self.inner

    def rule(self, at: At) -> Tensor:
        allowed = self.inner[0].rule(at)
        for part in self.inner[1:]:
            allowed = allowed & part.rule(at)
        return allowed

    def span(self, at: At) -> Span | None:
        first: int | Tensor = 0
        last: int | Tensor = _FAR
        for part in self.inner:
            span = part.span(at)
            if span is None:
                return None
            first, last = _largest(first, span[0]), _smallest(last, span[1])
        return first, last

    def __str__(self) -> str:
        return " & ".join(f"({m})" if isinstance(m, Or) else str(m) for m in self.inner)


class Or(Joined):
    """Either."""

    def __init__(self, *masks: Mask):
        super().__init__(*masks)
        # Two runs make one if both begin where the sequence does: causal() | prefix(n).
        self.runs = "start" if {mask.runs for mask in masks} == {"start"} else ""

    def rule(self, at: At) -> Tensor:
        allowed = self.inner[0].rule(at)
        for mask in self.inner[1:]:
            allowed = allowed | mask.rule(at)
        return allowed

    def span(self, at: At) -> Span | None:
        if not self.runs:
            return None
        last: int | Tensor = 0
        for mask in self.inner:
            span = mask.span(at)
            assert span is not None
            last = _largest(last, span[1])
        return at.start, last

    @property
    def either(self) -> tuple[Mask, ...]:
        return self.inner

    def __str__(self) -> str:
        return " | ".join(f"({m})" if isinstance(m, And) else str(m) for m in self.inner)


class Not(Joined):
    """The opposite."""

    def rule(self, at: At) -> Tensor:
        return ~self.mask.rule(at)

    @property
    def mask(self) -> Mask:
        return self.inner[0]

    def __str__(self) -> str:
        return f"~({self.mask})" if isinstance(self.mask, And | Or) else f"~{self.mask}"


class Standing(Joined):
    """A mask that does not know offsets itself, with query i at source position i + offset."""

    numbers = ("offset",)

    def __init__(self, mask: Mask, offset: int | Tensor):
        super().__init__(mask)
        self.offset, self.runs = offset, mask.runs

    def made_of(self, masks: list[Mask]) -> Mask:
        return Standing(masks[0], self.offset)

    def at(self, offset: int | Tensor) -> Mask:
        return self

    def rule(self, at: At) -> Tensor:
        return self.inner[0].rule(at._replace(position=at.query + self.offset))

    def span(self, at: At) -> Span | None:
        return self.inner[0].span(at._replace(position=at.query + self.offset))

    @property
    def fixed(self) -> bool:
        return not isinstance(self.offset, Tensor)

    def __str__(self) -> str:
        return f"{self.inner[0]}.at({shown(self.offset)})"


# The functions that make them.


def causal(offset: Offset = None) -> Mask:
    """No key after the query's own position: in scores, -∞ strictly above the diagonal.

    Query i stands at source position i + offset. None aligns the last query with the last key;
    a cache passes the number of keys it held before, as a tensor, so that nothing waits for it.
    """
    return Band(None, 0, offset)


def window(left: int, right: int | None = None, offset: Offset = None) -> Mask:
    """Keys at most `left` before and `right` after the query's position, both included."""
    right = left if right is None else right
    whole("window: left", left, least=0)
    whole("window: right", right, least=0)
    return Band(left, right, offset)


def padding(lengths: Sequence[int] | Tensor) -> Mask:
    """The first `lengths[b]` keys of sentence b; queries are left alone, padded ones too."""
    return Padding(_counts(lengths, "padding lengths", axes=(1,)))


def prefix(n: int | Sequence[int] | Tensor) -> Mask:
    """The first n keys (one n for all, or one per sentence), for `causal() | prefix(n)`."""
    if isinstance(n, int) and n >= 0 and not isinstance(n, bool):
        return Prefix(n)
    return Prefix(_counts(n, "prefix n", axes=(0, 1)))


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


def _moved(value: Any, device: torch.device, numbers: bool) -> Any:
    if isinstance(value, tuple):
        moved = tuple(_moved(each, device, numbers) for each in value)
        return value if all(a is b for a, b in zip(moved, value)) else moved
    if isinstance(value, Mask):
        return value.to(device, numbers)
    return value.to(device) if isinstance(value, Tensor | Packed) else value


def four_axes(tensor: Tensor, name: str) -> Tensor:
    """A tensor that broadcasts to (B, H, L, S), with all four axes; a lone leading axis is B."""
    if not isinstance(tensor, Tensor):
        raise ValueError(
            f"{name} must be a tensor that broadcasts to (B, H, L, S), got {shown(tensor)}"
        )
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
    """What '&' or '|' joins, if it is a mask."""
    if isinstance(other, Mask):
        return other
    if isinstance(other, Tensor):
        raise ValueError(f"'{sign}' joins masks; wrap the tensor: Mask.from_tensor(tensor)")
    remedy = "did you forget to call it?" if callable(other) else "leave it out"
    raise ValueError(f"'{sign}' joins masks, got {shown(other)}; {remedy}")


def _counts(values: Any, name: str, axes: tuple[int, ...]) -> Tensor:
    counts = integers(values, name, axes)
    if on_host(counts) and counts.numel() and int(counts.min()) < 0:
        raise ValueError(f"{name} ({shown(counts)}) must not be negative; they count keys")
    return counts


def _leaves(masks: Sequence[Mask]) -> Iterator[Mask]:
    """The masks that are not made of others."""
    for mask in masks:
        yield from _leaves(mask.inner) if mask.inner else (mask,)


def _check_batch(mask: Mask, B: int, what: str) -> None:
    if mask.batch not in (1, B):
        raise ValueError(
            f"{mask}: {mask.batch} {what} for a batch of {B}; pass one for each sentence"
        )


def _common(axis: str, sizes: list[int]) -> int:
    size = max(sizes)
    for other in sizes:
        if other not in (1, size):
            raise ValueError(
                f"masks disagree on the {axis} axis: {other} and {size}; make them equal, or 1"
            )
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
