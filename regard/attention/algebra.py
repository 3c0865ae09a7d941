"""The algebra of masks: rules over pairs of queries and keys, joined by `&`, `|` and `~`.

`mask.py` holds the masks there are; this module holds their common part. A `Mask` answers for
pairs, and whatever form a backend wants is derived from that: a boolean tensor, blocks of it, or,
for masks that give each query one range of neighbouring keys, the first and last key of each row.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from regard.attention.checks import (
    MAX_LENGTH,
    broadcast_shape,
    broadcasts,
    check_dense,
    check_integer,
    integer_tensor,
    shown,
)
from regard.attention.notebook import picture
from regard.attention.packed import PackedLengths
from regard.attention.sync import capturing, current_capture, on_host

if TYPE_CHECKING:
    from regard.attention.mask import Packing

T = TypeVar("T")
Span = tuple[int | Tensor, int | Tensor]


class At(NamedTuple):
    """The pairs that a rule decides: index tensors that broadcast to (B, H, L, S).

    `query` and `key` are positions in the sequence: the same in a batch, packed, alone, or in a
    decoding step that computes the last rows over a cache. The last query stands at the last key.
    """

    batch: Tensor
    head: Tensor
    row: Tensor
    """Index of the query in the tensor that `attend` receives."""
    column: Tensor
    """Index of the key in the tensor that `attend` receives."""
    query: Tensor
    """Position of the query in its own sequence."""
    key: Tensor
    """Position of the key in its own sequence (the column, unless the batch is packed)."""
    start: int | Tensor
    """Column at which the query's own source sequence begins (0, unless the batch is packed)."""
    offset: int | Tensor
    """Position of the first query of the sequence: S - L, unless the mask has another offset."""

    def stand(self, offset: int | Tensor) -> "At":
        """The same pairs with the first query at this position, or at one for each sentence."""
        if isinstance(offset, Tensor):
            offset = per_sentence(offset, self.batch)
        return self._replace(query=self.query - self.offset + offset, offset=offset)


class Mask:
    """A rule over pairs of queries and keys, True where a query may attend, and its name.

    The rule receives an object `at` whose tensors broadcast to (B, H, L, S): `at.query` and
    `at.key` are positions in the sequence, `at.batch` and `at.head` indices. Masks combine by `&`,
    `|` and `~`. No method changes which pairs a mask allows. The built-in kinds are subclasses,
    which add structure that backends can use: `span`, if each query has one range of keys.

    >>> from regard import Mask, causal
    >>> even = Mask(lambda at: at.key % 2 == 0, "even keys")
    >>> mask = causal() & even
    >>> print(mask)
    causal() & even keys
    >>> print(mask.draw(4, 4))
    ■···
    ■···
    ■·■·
    ■·■·
    """

    batch = 1
    """Length of the batch axis that the mask itself has; 1 where every sentence is alike."""
    heads = 1
    packs = False
    """Whether the mask is a `Packing`, in whose sequences others count their positions."""
    inner: tuple["Mask", ...] = ()
    """The masks of which this one is made."""
    ranges = ""
    """"any" where each query sees one range of keys (see `span`), "start" where that range always
    begins where the sequence does, "" where neither is known."""
    own = False
    """Whether it holds a custom rule, which may depend on the sentence and the head."""
    relative = False
    """Whether the rule depends on the position of the query: `at.query`."""
    reads: tuple[str, ...] = ()
    """Attributes that the rule reads and that may be, or hold, tensors."""
    numbers: tuple[str, ...] = ()
    """Those of them that may be plain numbers."""

    def __init__(self, rule: Callable[[At], Tensor], text: str):
        if not callable(rule) or not isinstance(text, str):
            raise ValueError(
                f"Mask takes a rule and a text, got {shown(rule)} and {shown(text)}; "
                "for example Mask(lambda at: at.key <= at.query, 'causal()')"
            )
        code = getattr(rule, "__code__", None)
        if code is not None and code.co_argcount == 4 and not rule.__defaults__:
            raise ValueError(
                "the rule of a Mask takes one argument; a mask_mod of FlexAttention is "
                "Mask(lambda at: mask_mod(at.batch, at.head, at.query, at.key), 'name')"
            )
        self._rule, self._text = rule, text
        self.own = self.relative = True

    @staticmethod
    def from_tensor(allowed: Tensor) -> "Mask":
        """Makes a mask of a boolean tensor (True = may attend) that broadcasts to (B, H, L, S).

        Two axes are (L, S), three are (B, L, S).

        >>> import torch
        >>> from regard import Mask
        >>> print(Mask.from_tensor(torch.eye(3, dtype=torch.bool)).draw(3, 3))
        ■··
        ·■·
        ··■
        """
        return Dense(allowed)

    # The methods that a kind of mask defines.

    def rule(self, at: At) -> Tensor:
        """Returns True where the query of a pair may attend to its key."""
        try:
            allowed = self._rule(at)
        except RuntimeError as error:
            # The second is the message of tracing for a kernel.
            phrases = ("Boolean value of Tensor", "data-dependent control flow")
            if any(words in str(error) for words in phrases):
                raise ValueError(
                    f"the rule of {self} decides by and, or, not or if, which take one value, and "
                    "it receives tensors of indices; write & | ~, with each comparison in "
                    "parentheses"
                ) from None
            raise
        if not isinstance(allowed, Tensor) or allowed.dtype != torch.bool:
            result = f"{allowed.dtype}" if isinstance(allowed, Tensor) else shown(allowed)
            raise ValueError(
                f"the rule of {self} must give a boolean tensor, got {result}; "
                "compare the indices that it receives, as in at.key <= at.query, and combine "
                "comparisons by & | ~"
            )
        size = broadcast_shape(*(index.shape for index in at[:4]))
        fits = (have in (1, need) for have, need in zip(allowed.shape[::-1], size[::-1]))
        if allowed.ndim > len(size) or not all(fits):
            raise ValueError(
                f"the rule of {self} gave shape {tuple(allowed.shape)} where {tuple(size)} is "
                "expected; combine the indices that it receives and it will broadcast"
            )
        return allowed

    def span(self, at: At) -> Span | None:
        """Returns the first and past-the-last allowed column of each row; None without `ranges`.

        Called with a frame that has no columns. May reach below 0 and beyond S.
        """
        return None

    def check(self, B: int, L: int, S: int) -> None:
        """Raises ValueError if the mask cannot fit B sequences of L queries and S keys."""
        for mask in self.inner:
            mask.check(B, L, S)

    def check_beside(self, others: Sequence["Mask"]) -> None:
        """Raises ValueError if the mask cannot be combined with these others."""

    @property
    def fixed(self) -> bool:
        """False if the mask reads a tensor that may change between calls, as a cache's length."""
        return all(mask.fixed for mask in self.inner)

    @property
    def version(self) -> Hashable:
        """A value that differs after a tensor shared with the caller has changed in place."""
        if self.inner:
            return tuple(mask.version for mask in self.inner)
        if type(self).__module__.startswith("regard."):
            return _versions(_named_tensors(self._rule)) if self.own else ()
        return _versions(self.tensors)  # a class of your own, which may not copy them

    @property
    def parts(self) -> tuple["Mask", ...]:
        """The masks of which this one is the conjunction."""
        return (self,)

    def __str__(self) -> str:
        return self._text

    def __repr__(self) -> str:
        return f"<Mask {self}>"

    @property
    def extent(self) -> tuple[int | None, int | None]:
        """The numbers of queries and keys that the mask fits; None if it fits any number."""
        inner = [mask.extent for mask in self.inner]
        queries = max((L for L, _ in inner if L is not None), default=None)
        return queries, max((S for _, S in inner if S is not None), default=None)

    def _repr_html_(self) -> str:
        L, S = self.extent
        S = 8 if S is None else S
        allowed = self.tensor(S if L is None else L, S).flatten(0, 1)[:1].any(0)
        return picture(allowed.cpu(), str(self), self.batch, self.heads)

    # The algebra.

    def __and__(self, other: "Mask") -> "Mask":
        return And(self, operand(other, "&"))

    def __or__(self, other: "Mask") -> "Mask":
        return Or(self, operand(other, "|"))

    def __invert__(self) -> "Mask":
        return Not(self)

    # Reached only with something that is no mask on the left.
    __rand__, __ror__ = __and__, __or__

    def __bool__(self) -> bool:
        raise TypeError(
            f"the mask {self} has no truth value, so and, or and not would drop a mask; join masks "
            "by &, | and ~, and test for one by mask is not None"
        )

    # The same mask, shifted, sized or on another device.

    def at(self, offset: int | Tensor) -> "Mask":
        """Returns a copy with query i at source position i + offset, unless it has an offset.

        Over a cache with more room than keys, whose end is not the end of the sequence, the mask
        then keeps its meaning. The offset may be a tensor: one for all, or one for each sequence.
        """
        return Standing(self, offset) if self.relative else self

    def sized(self, B: int, H: int, L: int, S: int, device: torch.device) -> "Mask":
        """Returns the mask; a custom rule receives B sequences and H heads if it depends on them.

        The shape of its result for a single query and key shows whether it does.
        """
        if not self.own:
            return self
        sentence, head, row, column = (
            torch.arange(size, device=device) for size in (B, H, min(L, 1), min(S, 1))
        )
        at = self.frame(sentence[:, None, None, None], head[:, None, None], row, column, S - L)
        batch, heads = (1, 1, 1, 1, *self.rule(at).shape)[-4:-2]
        if batch == heads == 1:
            return self
        varying = Mask(self._rule, self._text)
        varying.batch, varying.heads = batch, heads
        return varying

    def to(self, device: torch.device | str, numbers: bool = False) -> "Mask":
        """Returns a copy whose tensors are on the device; the mask itself if they are there.

        With `numbers`, its plain numbers become tensors too: a kernel compiled for one window then
        serves every other.
        """
        device = torch.device(device)
        moved = {name: _move(getattr(self, name), device, numbers) for name in self.reads}
        for name in self.numbers if numbers else ():
            if isinstance(moved[name], int):
                moved[name] = torch.full((), moved[name], device=device)
        if all(value is getattr(self, name) for name, value in moved.items()):
            return self
        return self._with(moved)

    def _with(self, changes: dict[str, Any]) -> "Mask":
        """A copy with other attributes and an empty cache."""
        other = object.__new__(type(self))
        attributes = {**vars(self), **changes}
        other.__dict__.update(
            {name: value for name, value in attributes.items() if name != "_cache"}
        )
        return other

    # What backends ask.

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that the rule reads."""
        # By their names, since torch's compiler cannot list an object's attributes in all versions.
        values = [getattr(self, name) for name in self.reads]
        read = [value for value in values if isinstance(value, Tensor)]
        return (*read, *(tensor for mask in self.inner for tensor in mask.tensors))

    @property
    def packing(self) -> "Packing | None":
        """The packing in whose sequences the other parts count their positions, if any."""
        part: Any = next((part for part in self.parts if part.packs), None)
        packing: Packing | None = part
        return packing

    def block(self, rows: Tensor, columns: Tensor, L: int, S: int) -> Tensor:
        """Returns the rule at selected rows and columns of an L x S problem, unexpanded."""
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
        """Returns the boolean tensor with four axes, each of length 1 if the mask is constant."""
        rows = torch.arange(L, device=device)
        return self.block(rows, torch.arange(S, device=device), L, S)

    def tensor(self, L: int, S: int, device: torch.device | str | None = None) -> Tensor:
        """Returns the mask as booleans, (B, H, L, S), with B and H 1 if the mask has no such axis.

        >>> from regard import causal
        >>> causal().tensor(2, 3)
        tensor([[[[ True,  True, False],
                  [ True,  True,  True]]]])
        """
        check_integer("L", L, 0, MAX_LENGTH)
        check_integer("S", S, 0, MAX_LENGTH)
        self.check(self.batch, L, S)
        allowed = self.compact(L, S, device)
        return allowed.expand(allowed.shape[0], allowed.shape[1], L, S)

    def intervals(
        self, L: int, S: int, device: torch.device | str | None = None
    ) -> tuple[Tensor, Tensor] | None:
        """Returns the first and past-the-last column that each row may attend to, (B, L) each.

        This is the whole mask in O(L) memory; None if some row's keys are not one range. An empty
        row has equal numbers. B is 1 if the mask has no batch axis.
        """
        index = torch.arange(L, device=device)
        batch = torch.arange(self.batch, device=device)[:, None]
        zero = torch.zeros(1, dtype=torch.int64, device=device)
        there = self.to(index.device)
        span = there.span(there.frame(batch, zero, index, zero, S - L))
        if span is None:
            return None
        first, last = (
            (edge if isinstance(edge, Tensor) else torch.full((1, 1), edge, device=device))
            .long()
            .clamp(0, S)
            .broadcast_to(self.batch, L)
            for edge in span
        )
        return torch.minimum(first, last), last

    def never_empty(self, L: int, S: int) -> bool:
        """Returns True if every query sees some key, and the host can decide that."""
        if not self.ranges or not all(on_host(tensor) for tensor in self.tensors):
            return False
        edges = self.intervals(L, S, "cpu")
        assert edges is not None
        return bool((edges[0] < edges[1]).all())

    def frame(
        self, batch: Tensor, head: Tensor, row: Tensor, column: Tensor, shift: int | Tensor
    ) -> At:
        """Returns the pair (row, column) as this mask's parts receive it; `shift` is S - L."""
        packing = self.packing
        if packing is None:
            return At(batch, head, row, column, row + shift, column, 0, shift)
        return packing.localise(batch, head, row, column)

    def draw(self, L: int, S: int) -> str:
        """Draws the mask as text, a line for each query: `■` may attend, `·` may not."""
        allowed = self.tensor(L, S).cpu()
        B, H = allowed.shape[:2]
        grids = []
        for b in range(B):
            for h in range(H):
                name = [f"sentence {b}"] * (B > 1) + [f"head {h}"] * (H > 1)
                lines = ["".join("■" if a else "·" for a in row) for row in allowed[b, h].tolist()]
                grids.append("\n".join(([", ".join(name)] if name else []) + lines))
        return "\n\n".join(grids)

    def cached(self, what: str, key: Hashable, build: Callable[[], T]) -> T:
        """Returns `build()`, cached with the mask until the key changes.

        A model passes one mask to all its layers: its tensor, block mask or lengths are made once.
        """
        if torch.compiler.is_compiling() or not self.fixed:
            return build()
        cache = self.__dict__.setdefault("_cache", {})
        key = (key, self.version, current_capture())
        if what not in cache or cache[what][0] != key:
            if capturing() and current_capture() is None:
                return build()
            with torch.inference_mode(False):  # the cached value must also serve training later
                cache[what] = (key, build())
        value: T = cache[what][1]
        return value


class Dense(Mask):
    """A boolean tensor."""

    reads = ("allowed",)

    def __init__(self, allowed: Tensor):
        if not isinstance(allowed, Tensor) or allowed.dtype != torch.bool:
            kind = allowed.dtype if isinstance(allowed, Tensor) else type(allowed).__name__
            raise ValueError(
                f"a mask tensor must be boolean (True = may attend), got {kind}; "
                "convert it, or pass additive values as bias"
            )
        self.allowed = four_axes(allowed, "mask")
        self.batch, self.heads = self.allowed.shape[:2]

    @property
    def fixed(self) -> bool:
        return not self.allowed.is_inference()  # whose changes are not counted

    @property
    def version(self) -> Hashable:
        return self.allowed._version

    def rule(self, at: At) -> Tensor:
        allowed = self.allowed
        index = (at.batch, at.head, at.row, at.column)
        # A tensor is indexed, not compared, so axes of length 1 stand for every index.
        return allowed[tuple(i if n > 1 else i * 0 for i, n in zip(index, allowed.shape))]

    def compact(self, L: int, S: int, device: torch.device | str | None = None) -> Tensor:
        return self.allowed if device is None else self.allowed.to(device)

    @property
    def extent(self) -> tuple[int | None, int | None]:
        L, S = (None if size == 1 else size for size in self.allowed.shape[2:])
        return L, S

    def check(self, B: int, L: int, S: int) -> None:
        check_batch(self, B, "masks")
        for name, have, need in zip("LS", self.allowed.shape[2:], (L, S)):
            if not broadcasts(have, need):
                real = "; a mask (B, S) of real tokens is padding(mask)" if name == "L" else ""
                raise ValueError(
                    f"mask of shape {tuple(self.allowed.shape)} does not broadcast to "
                    f"(B, H, L = {L}, S = {S}): its {name} is {have}{real}"
                )

    def __str__(self) -> str:
        return f"from_tensor({'x'.join(map(str, self.allowed.shape))})"


def four_axes(tensor: Tensor, name: str) -> Tensor:
    """A tensor that broadcasts to (B, H, L, S), with all four axes; a lone leading axis is B."""
    if not isinstance(tensor, Tensor):
        raise ValueError(
            f"{name} must be a tensor that broadcasts to (B, H, L, S), got {shown(tensor)}"
        )
    check_dense(name, tensor)
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


def check_offset(offset: int | Tensor) -> None:
    """Raises ValueError for an offset that is not an integer, or one integer per sentence."""
    if isinstance(offset, Tensor):
        integer_tensor(offset, "offset", axes=(0, 1))
    elif isinstance(offset, bool) or not isinstance(offset, int):
        raise ValueError(
            f"offset must be an integer or an integer tensor, got {shown(offset)}; "
            "pass the number of keys that precede the first query"
        )
    else:
        check_integer("offset", offset, -MAX_LENGTH, MAX_LENGTH)


def check_batch(mask: Mask, B: int, what: str) -> None:
    if not broadcasts(mask.batch, B):
        raise ValueError(
            f"{mask}: {mask.batch} {what} for a batch of {B}; pass one for each sentence"
        )


class Joined(Mask):
    """A mask made of others: what holds for every way of joining them."""

    reads: tuple[str, ...] = ("inner",)

    def __init__(self, *masks: Mask):
        self.inner = masks
        self.batch = _common("batch", [mask.batch for mask in masks])
        self.heads = _common("head", [mask.heads for mask in masks])
        self.own = any(mask.own for mask in masks)
        leaves = list(_leaves(masks))
        for leaf in leaves:
            leaf.check_beside(leaves)

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
        kinds = {part.ranges for part in self.inner}
        self.ranges = "" if "" in kinds else "start" if kinds == {"start"} else "any"
        packings = [part for part in self.inner if part.packs]
        if len(packings) > 1:
            raise ValueError(
                f"a mask can hold one packed(...), got {' and '.join(map(str, packings))}; "
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
        last: int | Tensor = MAX_LENGTH
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
        # Two ranges make one if both begin where the sequence does: causal() | prefix(n).
        self.ranges = "start" if {mask.ranges for mask in masks} == {"start"} else ""

    def rule(self, at: At) -> Tensor:
        allowed = self.inner[0].rule(at)
        for mask in self.inner[1:]:
            allowed = allowed | mask.rule(at)
        return allowed

    def span(self, at: At) -> Span | None:
        if not self.ranges:
            return None
        last: int | Tensor = 0
        for mask in self.inner:
            span = mask.span(at)
            assert span is not None
            last = _largest(last, span[1])
        return at.start, last

    def __str__(self) -> str:
        return " | ".join(f"({m})" if isinstance(m, And) else str(m) for m in self.inner)


class Not(Joined):
    """The opposite."""

    def rule(self, at: At) -> Tensor:
        return ~self.inner[0].rule(at)

    def __str__(self) -> str:
        mask = self.inner[0]
        return f"~({mask})" if isinstance(mask, And | Or) else f"~{mask}"


class Standing(Joined):
    """A mask that has no offset itself, with query i at source position i + offset."""

    reads = ("inner", "offset")
    numbers = ("offset",)

    def __init__(self, mask: Mask, offset: int | Tensor):
        super().__init__(mask)
        check_offset(offset)
        self.offset, self.ranges = offset, mask.ranges
        if isinstance(offset, Tensor) and offset.ndim:  # one for each sentence
            self.batch = _common("batch", [mask.batch, len(offset)])

    def made_of(self, masks: list[Mask]) -> Mask:
        return Standing(masks[0], self.offset)

    def at(self, offset: int | Tensor) -> Mask:
        return self

    def rule(self, at: At) -> Tensor:
        return self.inner[0].rule(at.stand(self.offset))

    def span(self, at: At) -> Span | None:
        return self.inner[0].span(at.stand(self.offset))

    @property
    def fixed(self) -> bool:
        return not isinstance(self.offset, Tensor)

    def __str__(self) -> str:
        return f"{self.inner[0]}.at({shown(self.offset)})"


def _named_tensors(rule: Any) -> list[Tensor]:
    """The tensors that a function reads by name: of the functions around it, and globals."""
    code = getattr(rule, "__code__", None)
    if code is None:
        return []
    values = [rule.__globals__.get(name) for name in code.co_names]
    for cell in rule.__closure__ or ():
        with suppress(ValueError):  # not yet assigned
            values.append(cell.cell_contents)
    return [value for value in values if isinstance(value, Tensor)]


def _versions(tensors: Iterable[Tensor]) -> Hashable:
    # An inference tensor does not count its changes: it differs from itself, and nothing is cached.
    return tuple((id(t), object() if t.is_inference() else t._version) for t in tensors)


def _move(value: Any, device: torch.device, numbers: bool) -> Any:
    if isinstance(value, tuple):
        moved = tuple(_move(each, device, numbers) for each in value)
        return value if all(a is b for a, b in zip(moved, value)) else moved
    if isinstance(value, Mask):
        return value.to(device, numbers)
    return value.to(device) if isinstance(value, Tensor | PackedLengths) else value


def operand(other: object, sign: str) -> Mask:
    """The operand of '&' or '|'; raises ValueError if it is no mask."""
    if isinstance(other, Mask):
        return other
    if isinstance(other, Tensor):
        raise ValueError(f"'{sign}' joins masks; wrap the tensor: Mask.from_tensor(tensor)")
    remedy = "did you forget to call it?" if callable(other) else "leave it out"
    raise ValueError(f"'{sign}' joins masks, got {shown(other)}; {remedy}")


def per_sentence(values: Tensor, batch: Tensor) -> Tensor:
    """One value for each index of the batch; a single value serves all."""
    return values if values.ndim == 0 else values[batch if len(values) > 1 else batch * 0]


def _leaves(masks: Sequence[Mask]) -> Iterator[Mask]:
    """The masks that are not made of others."""
    for mask in masks:
        yield from _leaves(mask.inner) if mask.inner else (mask,)


def _common(axis: str, sizes: list[int]) -> int:
    distinct = sorted(set(sizes) - {1}) or [1]
    if len(distinct) > 1:
        disagree = " and ".join(map(str, distinct))
        raise ValueError(f"masks disagree on the {axis} axis: {disagree}; make them equal, or 1")
    return distinct[0]


def _largest(a: int | Tensor, b: int | Tensor) -> int | Tensor:
    if isinstance(a, Tensor):
        return torch.maximum(a, b) if isinstance(b, Tensor) else a.clamp_min(b)
    return b.clamp_min(a) if isinstance(b, Tensor) else max(a, b)


def _smallest(a: int | Tensor, b: int | Tensor) -> int | Tensor:
    if isinstance(a, Tensor):
        return torch.minimum(a, b) if isinstance(b, Tensor) else a.clamp_max(b)
    return b.clamp_max(a) if isinstance(b, Tensor) else min(a, b)
