"""The mask algebra against plain loops over pairs, in every form a backend can ask for it."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from regard import (
    Mask,
    PackedLengths,
    attend,
    attention_weights,
    causal,
    documents,
    packed,
    padding,
    prefix,
    window,
)
from regard.attention.mask import At
from tests.attention.problems import MASKS, problem

Rule = Callable[[int, int, int, int], bool]
"""May query i of sentence b (head h) attend to key j?"""


def loop(rule: Rule, B: int, H: int, L: int, S: int) -> Tensor:
    cells = [
        rule(b, h, i, j) for b in range(B) for h in range(H) for i in range(L) for j in range(S)
    ]
    return torch.tensor(cells, dtype=torch.bool).view(B, H, L, S)


def same(mask: Mask, rule: Rule, L: int, S: int) -> None:
    """`tensor` is the loop, in four axes of which the mask's own are its `batch` and `heads`."""
    have = mask.tensor(L, S)
    assert have.dtype == torch.bool
    assert have.shape == (mask.batch, mask.heads, L, S)
    assert torch.equal(have, loop(rule, mask.batch, mask.heads, L, S))


SIZES = [(5, 5), (5, 7), (7, 5), (1, 7), (7, 1), (0, 5), (5, 0), (0, 0)]
sizes = pytest.mark.parametrize(("L", "S"), SIZES)

IDS = [[0, 0, 3, 3, 3, 1, 1], [2, 1, 2, 2, 0, 1, 1]]
TABLE = torch.arange(2 * 3 * 5 * 7).view(2, 3, 5, 7) * 5 % 7 > 2


# --- Each mask is what its words say


@sizes
def test_causal_stands_at_the_bottom_right(L: int, S: int) -> None:
    same(causal(), lambda b, h, i, j: j <= i + S - L, L, S)


@sizes
@pytest.mark.parametrize("offset", [0, 2, 9, -1, -3])
def test_causal_at_an_offset(L: int, S: int, offset: int) -> None:
    for said in (offset, torch.tensor(offset), torch.tensor([offset])):
        same(causal(said), lambda b, h, i, j: j <= i + offset, L, S)


@sizes
def test_causal_at_an_offset_for_each_sentence(L: int, S: int) -> None:
    offsets = [2, 0, -1]
    same(causal(torch.tensor(offsets)), lambda b, h, i, j: j <= i + offsets[b], L, S)


@sizes
@pytest.mark.parametrize(("left", "right"), [(0, 0), (2, 1), (1, 3), (0, 9), (9, 0)])
def test_window_includes_both_ends(L: int, S: int, left: int, right: int) -> None:
    def near(position: int, j: int) -> bool:
        return position - left <= j <= position + right

    same(window(left, right), lambda b, h, i, j: near(i + S - L, j), L, S)
    same(window(left, right, 1), lambda b, h, i, j: near(i + 1, j), L, S)
    same(window(left, right, torch.tensor(-1)), lambda b, h, i, j: near(i - 1, j), L, S)
    each = torch.tensor([3, -2])
    same(window(left, right, each), lambda b, h, i, j: near(i + int(each[b]), j), L, S)


def test_window_is_as_wide_on_the_right_as_on_the_left() -> None:
    assert torch.equal(window(2).tensor(5, 7), window(2, 2).tensor(5, 7))


@sizes
def test_padding_hides_keys_and_no_query(L: int, S: int) -> None:
    lengths = [S, 0, min(S, 2)]
    for said in (lengths, torch.tensor(lengths), torch.tensor(lengths, dtype=torch.int32)):
        same(padding(said), lambda b, h, i, j: j < lengths[b], L, S)


@sizes
def test_prefix(L: int, S: int) -> None:
    for n in (0, 2, 9):
        for said in (n, torch.tensor(n)):
            same(prefix(said), lambda b, h, i, j, n=n: j < n, L, S)
    each = [3, 0, 9]
    same(prefix(each), lambda b, h, i, j: j < each[b], L, S)


@pytest.mark.parametrize("L", [7, 5, 1, 0])
def test_documents(L: int) -> None:
    S = 7
    same(documents(IDS[0]), lambda b, h, i, j: IDS[0][i + S - L] == IDS[0][j], L, S)
    for ids in (IDS, torch.tensor(IDS), torch.tensor(IDS).short()):
        same(documents(ids), lambda b, h, i, j: IDS[b][i + S - L] == IDS[b][j], L, S)


def test_from_tensor_broadcasts() -> None:
    for shape in [(5, 7), (1, 7), (5, 1), (7,), ()]:
        table = torch.arange(math.prod(shape)).view(shape) % 3 != 1
        wide = table.expand(5, 7)
        same(Mask.from_tensor(table), lambda b, h, i, j, t=wide: bool(t[i, j]), 5, 7)
    same(Mask.from_tensor(TABLE[:, 0]), lambda b, h, i, j: bool(TABLE[b, 0, i, j]), 5, 7)
    same(Mask.from_tensor(TABLE), lambda b, h, i, j: bool(TABLE[b, h, i, j]), 5, 7)
    heads = TABLE[:1, :, :1, :1]
    same(Mask.from_tensor(heads), lambda b, h, i, j: bool(heads[0, h, 0, 0]), 5, 7)


# --- Packed sequences: positions count within each

QUERIES, SOURCES = [3, 0, 4, 1], [2, 5, 0, 6]
INSIDE: dict[str, tuple[Callable[[], Mask | None], Callable[[int, int, int, int], bool]]] = {
    # A mask, and whether query i of m may attend to key j of n, both counted in one sequence.
    "alone": (lambda: None, lambda i, j, m, n: True),
    "causal": (causal, lambda i, j, m, n: j <= i + n - m),
    "causal at an offset": (lambda: causal(1), lambda i, j, m, n: j <= i + 1),
    "window": (lambda: window(1, 2), lambda i, j, m, n: -1 <= j - (i + n - m) <= 2),
    "prefix": (lambda: prefix(2), lambda i, j, m, n: j < 2),
    "causal | prefix": (
        lambda: causal() | prefix(2),
        lambda i, j, m, n: j <= i + n - m or j < 2,
    ),
    "not causal": (lambda: ~causal(), lambda i, j, m, n: j > i + n - m),
    "own rule": (
        lambda: Mask(lambda at: (at.query + at.key) % 2 == 0, "even"),
        lambda i, j, m, n: (i + n - m + j) % 2 == 0,
    ),
}


@pytest.mark.parametrize("sources", [None, SOURCES], ids=["self", "cross"])
@pytest.mark.parametrize(("inside", "rule"), INSIDE.values(), ids=INSIDE.keys())
def test_packed_sequences_know_only_themselves(
    inside: Callable[[], Mask | None], rule: Callable[[int, int, int, int], bool], sources: Any
) -> None:
    each, mask = inside(), packed(QUERIES, sources)
    mask = mask if each is None else mask & each
    sources = QUERIES if sources is None else sources
    want = torch.zeros(sum(QUERIES), sum(sources), dtype=torch.bool)
    row = column = 0
    for m, n in zip(QUERIES, sources):
        for i in range(m):
            for j in range(n):
                want[row + i, column + j] = rule(i, j, m, n)
        row, column = row + m, column + n
    assert torch.equal(mask.tensor(*want.shape)[0, 0], want)
    if each is not None:  # joined the other way round
        assert torch.equal((each & packed(QUERIES, sources)).tensor(*want.shape)[0, 0], want)


def test_packed_documents() -> None:
    ids = [0, 0, 1, 1, 1, 0, 0, 0]
    have = (packed([3, 5]) & documents(ids)).tensor(8, 8)[0, 0]
    for i in range(8):
        for j in range(8):
            assert have[i, j] == ((i < 3) == (j < 3) and ids[i] == ids[j])


def test_the_lengths_of_packed_sequences() -> None:
    lengths = PackedLengths([3, 0, 4, 1])
    assert lengths.offsets.tolist() == [0, 3, 3, 7, 8]
    assert lengths.offsets.dtype == torch.int32
    assert (lengths.longest, lengths.total, len(lengths)) == (4, 8, 4)
    assert lengths.lengths.tolist() == [3, 0, 4, 1]
    assert lengths.sequence().tolist() == [0, 0, 0, 2, 2, 2, 2, 3]
    assert lengths.positions().tolist() == [[0, 1, 2, 0, 1, 2, 3, 0]]
    assert repr(lengths) == "PackedLengths([3, 0, 4, 1])"
    assert lengths.to("cpu") is lengths
    there = lengths.to("meta")
    assert there.offsets.device.type == "meta"
    assert there.offsets.shape == (5,)
    assert (there.longest, there.total, len(there)) == (4, 8, 4)
    back = there.to("cpu")  # from the lengths, which stay on the host
    assert back.offsets.tolist() == lengths.offsets.tolist()
    assert PackedLengths(torch.tensor([3, 1]), "meta").offsets.device.type == "meta"


def test_packing_nothing() -> None:
    for lengths in (PackedLengths([]), PackedLengths([0, 0])):
        assert (lengths.longest, lengths.total) == (0, 0)
        assert lengths.positions().shape == (1, 0)
        assert packed(lengths).tensor(0, 0).shape == (1, 1, 0, 0)


# --- The algebra

PIECES: dict[str, Callable[[], Mask]] = {
    "causal": causal,
    "window": lambda: window(2, 1),
    "padding": lambda: padding([7, 3]),
    "prefixes": lambda: prefix([2, 5]),
    "documents": lambda: documents(IDS[1]),
    "table": lambda: Mask.from_tensor(TABLE),
    "own": lambda: Mask(lambda at: (at.query - at.key) % 3 == 0, "own"),
}
Tree = str | tuple[str, "Tree"] | tuple[str, "Tree", "Tree"]
trees = st.recursive(
    st.sampled_from(sorted(PIECES)),
    lambda inner: st.one_of(
        st.tuples(st.sampled_from("&|"), inner, inner), st.tuples(st.just("~"), inner)
    ),
    max_leaves=4,
)


def grown(tree: Tree) -> Mask:
    match tree:
        case ("~", inner):
            return ~grown(inner)
        case ("&", one, other):
            return grown(one) & grown(other)
        case ("|", one, other):
            return grown(one) | grown(other)
    return PIECES[str(tree)]()


def full(mask: Mask, L: int = 5, S: int = 7) -> Tensor:
    return mask.tensor(L, S).expand(2, 3, L, S)


@settings(max_examples=30)
@given(trees, trees, trees)
def test_the_laws_of_joining(one: Tree, two: Tree, three: Tree) -> None:
    a, b, c = grown(one), grown(two), grown(three)
    A, B, C = full(a), full(b), full(c)
    assert torch.equal(full(a & b), A & B)
    assert torch.equal(full(a | b), A | B)
    assert torch.equal(full(~a), ~A)
    assert torch.equal(full(~~a), A)
    assert torch.equal(full(a & a), A)
    assert torch.equal(full(b & a), A & B)
    assert torch.equal(full(b | a), A | B)
    assert torch.equal(full(~(a & b)), full(~a | ~b))
    assert torch.equal(full(~(a | b)), full(~a & ~b))
    assert torch.equal(full(a & (b | c)), A & (B | C))
    assert torch.equal(full(a | (b & c)), A | (B & C))
    assert torch.equal(full((a & b) & c), full(a & (b & c)))
    assert not full(a & ~a).any()
    assert full(a | ~a).all()


@pytest.mark.parametrize("combine", [bool, lambda m: m and causal(), lambda m: m or causal()])
def test_a_mask_has_no_truth_value(combine: Callable[[Mask], object]) -> None:
    for mask in (causal(), causal() & padding([3]), ~causal(), Mask.from_tensor(TABLE)):
        with pytest.raises(TypeError, match=r"no truth value.*&, \| and ~.*mask is not None"):
            combine(mask)


def test_joined_masks_have_the_axes_of_both() -> None:
    heads = Mask.from_tensor(TABLE[:1])
    joined = padding([7, 3]) & heads | causal()
    assert (joined.batch, joined.heads) == (2, 3)
    assert joined.tensor(5, 7).shape == (2, 3, 5, 7)


# --- Standing elsewhere

STANDING: dict[str, Callable[[], Mask]] = {
    **{name: make for name, make in PIECES.items() if name != "table"},
    "causal | prefix": lambda: causal() | prefix(2),
    "causal & not window": lambda: causal() & ~window(1),
    "everything": lambda: (causal() & documents(IDS)) | ~(window(1) & padding([7, 3])),
}


@pytest.mark.parametrize("tensor", [False, True], ids=["int", "tensor"])
@pytest.mark.parametrize("make", STANDING.values(), ids=STANDING.keys())
def test_a_mask_can_stand_elsewhere(make: Callable[[], Mask], tensor: bool) -> None:
    # Rows 2 to 4 of seven, as a cache with room for seven asks for them.
    whole, part = make().tensor(7, 7), make().at(torch.tensor(2) if tensor else 2)
    assert torch.equal(part.tensor(3, 7), whole[:, :, 2:5])
    assert torch.equal(part.at(5).tensor(3, 7), whole[:, :, 2:5])  # it has been said already
    rows, columns = torch.tensor([2, 0]), torch.tensor([6, 1, 3])
    assert torch.equal(
        part.block(rows, columns, 3, 7).expand(-1, -1, 2, 3), whole[:, :, 2 + rows][..., columns]
    )
    if part.ranges:
        same_ranges(part, 3, 7)
    assert part.fixed == (not tensor or str(part) == str(make()))


def test_what_says_where_it_stands_stays_there() -> None:
    for mask in (causal(1), window(2, 1, 3), causal(torch.tensor([1, 2]))):
        assert mask.at(5) is mask
    for mask in (padding([2]), prefix(1), Mask.from_tensor(TABLE)):
        assert mask.at(5) is mask


# --- Ranges of keys


def same_ranges(mask: Mask, L: int, S: int) -> None:
    """`intervals` says row by row what `tensor` says pair by pair."""
    edges = mask.intervals(L, S)
    assert edges is not None
    first, last = edges
    assert first.shape == last.shape == (mask.batch, L)
    columns = torch.arange(S)
    inside = (columns >= first[..., None]) & (columns < last[..., None])
    allowed = mask.tensor(L, S)
    assert torch.equal(inside[:, None].expand(allowed.shape), allowed)
    assert bool((first <= last).all())
    assert mask.never_empty(L, S) == bool(allowed.any(-1).all())


@settings(max_examples=120)
@given(
    st.sampled_from(sorted(set(MASKS) - {"none"})),
    st.integers(1, 3),
    st.integers(1, 9),
    st.integers(1, 9),
    st.integers(0, 2**20),
)
def test_runs_are_the_tensor(name: str, B: int, L: int, S: int, seed: int) -> None:
    case = problem(name, B, 1, 2, L, S, 1, 1, seed)
    mask = case.mask
    assert mask is not None
    L, S = case.query.shape[2], case.key.shape[2]
    if mask.ranges:
        same_ranges(mask, L, S)
        if mask.ranges == "start" and "packed" not in name:
            edges = mask.intervals(L, S)
            assert edges is not None
            assert not edges[0][edges[0] < edges[1]].any()
    else:
        assert mask.intervals(L, S) is None


def test_which_masks_have_ranges() -> None:
    assert (causal() & padding([2, 0])).ranges == "start"
    assert (causal() | prefix(2)).ranges == "start"
    assert (causal() & window(2)).ranges == "any"
    assert (packed([2, 1]) & (causal() | prefix(2))).ranges == "any"
    assert documents([0, 0, 1]).ranges == "any"
    assert documents([0, 1, 0]).ranges == ""  # a document in pieces
    assert (window(2) | causal()).ranges == ""
    assert (~causal()).ranges == ""


# --- Text

TEXTS: dict[str, Callable[[], Mask]] = {
    "causal()": causal,
    "causal(3)": lambda: causal(3),
    "causal(4)": lambda: causal(torch.tensor(4)),
    "causal([1, 2])": lambda: causal(torch.tensor([1, 2])),
    "causal(2 on meta)": lambda: causal(torch.tensor([1, 2], device="meta")),
    "causal(one on meta)": lambda: causal(torch.tensor(1, device="meta")),
    "window(2, 2)": lambda: window(2),
    "window(2, 0, 3)": lambda: window(2, 0, 3),
    "padding([3, 0])": lambda: padding([3, 0]),
    "padding([1, 1, 1, 1, 1, 1, ... 7 in all])": lambda: padding([1] * 7),
    "prefix(2)": lambda: prefix(2),
    "prefix([2, 1])": lambda: prefix([2, 1]),
    "documents(3 ids)": lambda: documents([0, 0, 1]),
    "documents(2x7 ids)": lambda: documents(IDS),
    "packed([3, 4])": lambda: packed([3, 4]),
    "packed([3, 4], [1, 2])": lambda: packed([3, 4], [1, 2]),
    "from_tensor(2x3x5x7)": lambda: Mask.from_tensor(TABLE),
    "own": PIECES["own"],
    "causal() & window(1, 1) & prefix(2)": lambda: causal() & (window(1) & prefix(2)),
    "causal() & (window(1, 1) | prefix(2))": lambda: causal() & (window(1) | prefix(2)),
    "(causal() & window(1, 1)) | prefix(2)": lambda: causal() & window(1) | prefix(2),
    "~causal() & ~(window(1, 1) | prefix(2))": lambda: ~causal() & ~(window(1) | prefix(2)),
    "~~causal()": lambda: ~~causal(),
    "causal(2) & own.at(2)": lambda: (causal() & PIECES["own"]()).at(2),
}


@pytest.mark.parametrize("text", TEXTS)
def test_a_mask_says_what_it_is(text: str) -> None:
    mask = TEXTS[text]()
    assert str(mask) == text
    assert repr(mask) == f"<Mask {text}>"


def test_drawing() -> None:
    assert causal().draw(3, 4) == "■■··\n■■■·\n■■■■"
    assert window(1, 0).draw(2, 3) == "■■·\n·■■"
    assert padding([1, 2]).draw(1, 2) == "sentence 0\n■·\n\nsentence 1\n■■"
    heads = Mask.from_tensor(torch.eye(2, dtype=torch.bool)[None, :, None])
    assert heads.draw(1, 2) == "head 0\n■·\n\nhead 1\n·■"
    both = heads & padding([2, 0])
    assert both.draw(1, 2).split("\n\n")[3] == "sentence 1, head 1\n··"
    assert causal().draw(0, 2) == ""
    assert causal().draw(2, 0) == "\n"


# --- Memory, devices


def test_what_is_asked_again_is_remembered() -> None:
    built: list[int] = []

    def build() -> int:
        built.append(len(built))
        return built[-1]

    mask = causal()
    assert [mask.cached("it", key, build) for key in (1, 1, 2, 2, 1)] == [0, 0, 1, 1, 2]
    assert mask.cached("other", 1, build) == 3
    assert [causal().cached("it", 1, build) for _ in range(2)] == [4, 5]
    moving = causal() & prefix(torch.tensor(3))  # a cache's length changes under it
    assert not moving.fixed
    assert [moving.cached("it", 1, build) for _ in range(2)] == [6, 7]
    with torch.inference_mode():
        kept = mask.cached("tensor", 1, lambda: mask.compact(2, 3))
    assert not kept.is_inference()
    assert mask.at(2).cached("it", 1, build) == 8  # another mask has another cache


class Shared(Mask):
    """A kind of mask that does not copy its lengths."""

    reads = ("lengths",)

    def __init__(self, lengths: Tensor):
        super().__init__(lambda at: at.key < self.lengths[at.batch], "shared")
        self.lengths = lengths


def by_name(lengths: Tensor) -> Mask:
    return Mask(lambda at: at.key < lengths[at.batch], "by name")


CHANGING: dict[str, tuple[Tensor, Callable[[Tensor], Mask]]] = {
    # A tensor, and the mask made from it; later the tensor is filled with another value.
    "padding": (torch.tensor([5, 3]), padding),
    "causal & padding": (torch.tensor([5, 3]), lambda lengths: causal() & padding(lengths)),
    "prefixes": (torch.tensor([5, 3]), prefix),
    "prefix": (torch.tensor(3), prefix),
    "documents": (torch.tensor([[0, 0, 1, 1, 1, 2, 2]]), documents),
    "documents in pieces": (torch.tensor([0, 1, 0, 1, 1, 0, 0]), documents),
    "tensor": (torch.ones(7, 7) > 0, Mask.from_tensor),
    "not tensor": (torch.ones(2, 1, 7, 7) > 0, lambda allowed: ~Mask.from_tensor(allowed)),
    "offset": (torch.tensor(2), causal),
    "offsets": (torch.tensor([2, 3]), lambda offset: window(1, 2, offset)),
    "offset of an own rule": (
        torch.tensor([2, 3]),
        lambda offset: Mask(lambda at: at.key <= at.query, "own").at(offset),
    ),
    "tensor of an own rule": (torch.tensor([5, 3]), by_name),
    "causal & own rule": (torch.tensor([5, 3]), lambda lengths: causal() & by_name(lengths)),
    "tensor of an own class": (torch.tensor([5, 3]), Shared),
}
COPIED = {"padding", "causal & padding", "prefixes", "documents", "documents in pieces"}
LIVE = CHANGING.keys() - COPIED
"""Masks that share the tensor: a cache's filled length changes in place; a matrix is not copied."""


@pytest.mark.parametrize("inference", [False, True], ids=["", "inference"])
@pytest.mark.parametrize("name", CHANGING)
def test_every_path_sees_the_same_mask_after_a_change_in_place(name: str, inference: bool) -> None:
    tensor, make = CHANGING[name]
    query, value = torch.randn(2, 1, 7, 8), torch.eye(7).expand(2, 1, 7, 7)
    with torch.inference_mode(inference):
        tensor = tensor.clone()
        mask = make(tensor)
        before = mask.tensor(7, 7).clone()
        for backend in ("auto", "sdpa", "formula"):
            attend(query, query, value, mask, backend=backend)
        tensor.fill_(1 if tensor.dtype != torch.bool else False)
        after = mask.tensor(7, 7)
        assert torch.equal(before, after) == (name not in LIVE)
        want = attention_weights(query, query, mask)
        assert torch.equal(want > 0, after.expand(2, 1, 7, 7))
        for backend in ("auto", "sdpa", "formula"):
            have = attend(query, query, value, mask, backend=backend)
            torch.testing.assert_close(have, want)


def test_packed_lengths_are_copied() -> None:
    lengths = torch.tensor([3, 4])
    sequences = PackedLengths(lengths)
    lengths.fill_(1)
    assert sequences.lengths.tolist() == [3, 4]
    assert sequences.filled(11, 4, 4).lengths.tolist() == [3, 4, 4, 0]


@pytest.mark.parametrize("name", sorted(set(MASKS) - {"none"}))
def test_a_mask_moves_as_a_whole(name: str) -> None:
    case = problem(name, 2, 1, 2, 5, 7, 1, 1)
    mask = case.mask
    assert mask is not None
    L, S = case.query.shape[2], case.key.shape[2]
    assert mask.to("cpu") is mask
    there = mask.to("meta")
    assert (there.batch, there.heads, there.ranges) == (mask.batch, mask.heads, mask.ranges)
    assert all(tensor.device.type == "meta" for tensor in there.tensors)
    assert len(there.tensors) == len(mask.tensors)
    on_meta, here = mask.tensor(L, S, "meta"), mask.tensor(L, S)
    assert on_meta.device.type == "meta"
    assert on_meta.shape == here.shape
    # Numbers as tensors, which a compiled kernel takes as inputs, change nothing.
    rows = torch.arange(L)
    numbered = mask.to("cpu", numbers=True)
    assert torch.equal(numbered.block(rows, torch.arange(S), L, S).expand_as(here), here)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("name", sorted(set(MASKS) - {"none"}))
def test_a_mask_answers_for_single_pairs(name: str) -> None:
    """As FlexAttention asks: indices without axes, which vmap multiplies."""
    case = problem(name, 2, 1, 2, 5, 7, 1, 1)
    assert case.mask is not None
    (B, H, L, _), S = case.query.shape, case.key.shape[2]
    mask = case.mask.sized(B, H, L, S, torch.device("cpu"))
    mask.compact(1, S)  # what it looks up must be there beforehand

    def rule(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return mask.rule(mask.frame(b, h, i, j, S - L))

    for axis in range(3, -1, -1):
        rule = torch.vmap(rule, tuple(0 if n == axis else None for n in range(4)))
    allowed = rule(*(torch.arange(size) for size in (mask.batch, mask.heads, L, S)))
    assert torch.equal(allowed, mask.tensor(L, S))


# --- A rule of one's own


def test_a_rule_is_asked_in_every_form() -> None:
    L, S = 5, 7
    seen: list[At] = []

    def rule(at: At) -> Tensor:
        seen.append(at)
        return (at.key + 2 * at.query) % 3 != 0

    own = Mask(rule, "own")
    same(own, lambda b, h, i, j: (j + 2 * (i + 2)) % 3 != 0, L, S)
    assert seen[0].query.flatten().tolist() == [2, 3, 4, 5, 6]
    assert seen[0].start == 0
    same(own & causal(), lambda b, h, i, j: (j + 2 * (i + 2)) % 3 != 0 and j <= i + 2, L, S)
    rows, columns = torch.tensor([3, 1]), torch.tensor([0, 6])
    assert torch.equal(own.block(rows, columns, L, S), own.tensor(L, S)[:, :, rows][..., columns])


@pytest.mark.parametrize(
    "joined",
    [lambda near: near, lambda near: near & causal(), lambda near: ~near | window(1, 0)],
    ids=["alone", "causal", "or window"],
)
def test_a_rule_receives_positions_on_every_path(joined: Callable[[Mask], Mask]) -> None:
    mask = joined(Mask(lambda at: (at.query - at.key).abs() <= 3, "near"))
    whole = mask.tensor(11, 11)[0, 0]
    assert torch.equal(mask.tensor(3, 11)[0, 0], whole[-3:])
    pair = (packed([11, 7]) & mask).tensor(18, 18)[0, 0]
    assert torch.equal(pair, torch.block_diag(whole, whole[:7, :7]).bool())
    last = (packed([2, 3], [7, 11]) & mask).tensor(5, 18)[0, 0]
    assert torch.equal(last, torch.block_diag(whole[5:7, :7], whole[-3:]).bool())
    rows = mask.at(torch.tensor([4, 0, 7])).tensor(2, 11)[:, 0]
    assert torch.equal(rows, torch.stack([whole[4:6], whole[:2], whole[7:9]]))


@pytest.mark.parametrize("backend", ["auto", "formula", "sdpa"])
def test_a_rule_may_look_at_sentences_and_heads(backend: str) -> None:
    query, key, value = torch.randn(2, 3, 5, 4), torch.randn(2, 3, 7, 4), torch.randn(2, 3, 7, 4)
    reach = torch.tensor([[1, 2, 4], [7, 3, 0]])
    distance = (torch.arange(5)[:, None] + 2 - torch.arange(7)).abs()
    rules: list[tuple[Callable[[At], Tensor], Tensor]] = [
        (lambda at: (at.query - at.key).abs() <= reach[at.batch, at.head], reach),
        (lambda at: (at.query - at.key).abs() <= reach[1, at.head], reach[1:]),
        (lambda at: (at.query - at.key).abs() <= reach[at.batch, 0], reach[:, :1]),
    ]
    for rule, limits in rules:
        own, table = Mask(rule, "own"), Mask.from_tensor(distance <= limits[:, :, None, None])
        have = attend(query, key, value, own & causal(), backend=backend)
        want = attend(query, key, value, table & causal(), backend="formula")
        torch.testing.assert_close(have, want, atol=2e-6, rtol=0)
