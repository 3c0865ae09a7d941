"""Orders and exact counts: what an order covers, and the documents' tables, entry by entry."""

import pytest

from regard.lab.cost.documents import ENTRIES, Entry, count, entries, widths
from regard.lab.cost.layers import Sizes
from regard.lab.cost.orders import Widths, formula
from regard.lab.place import SECTIONS, Place

pytestmark = pytest.mark.usefixtures("unchecked")

LEFT_OUT = {
    ("sheet", "6-2(d)", "convolution"): "k n d²",
    ("sheet", "6-2(d)", "attention"): "3 n d²",
    ("handout", "cost table", "attention"): "2 L d d_k + L d d_v + L² d_v",
    ("handout", "cost table", "recurrence"): "L d_v²",
    ("handout", "parameter table", "dense over all positions"): "L² d d_v",
}
"""What the documents' orders leave out; all others are complete."""


def test_an_order_covers_what_no_size_can_make_outgrow_it() -> None:
    whole = formula("2 n d d_k + n² d_k + n² d_v")
    assert whole.beyond(formula("n² d_k")).written({}) == "2 n d d_k + n² d_v"
    assert whole.beyond(formula("n² d_k + n² d_v + n d d_k")).written({}) == "nothing"
    # A constant factor makes no difference, another size does.
    assert formula("8 n d²").beyond(formula("n d²")).written({}) == "nothing"
    assert formula("n d d_v").beyond(formula("n d²")).written({}) == "n d d_v"
    assert whole.power("n") == 2
    assert whole.power("d_v") == 1


def test_a_formula_has_a_value_and_letters() -> None:
    sizes = Widths(n=5, d=7, d_k=2, d_v=3, k=11)
    whole = formula("2 n d d_k + k n² d_v²")
    assert whole.at(sizes) == 2 * 5 * 7 * 2 + 11 * 5**2 * 3**2
    assert whole.written({"n": "L"}) == "2 L d d_k + k L² d_v²"


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda e: f"{e.place}, {e.layer}, {e.what}")
def test_complete_formulas_are_what_is_counted(entry: Entry) -> None:
    if entry.place.document == "handout":
        some = (Widths(5, 16, 2, 6, 3), Widths(7, 8, 3, 5, 5))
    else:
        some = (Widths(5, 14, 14, 14, 3), Widths(11, 6, 6, 6, 5))
    for sizes in some:
        assert count(entry, sizes) == entry.complete.at(sizes)
    where = entry.place.document, entry.place.section, entry.layer
    assert entry.left_out == LEFT_OUT.get(where, "nothing")
    assert entry.whole == (where not in LEFT_OUT)


def test_the_handouts_tables_are_whole() -> None:
    assert [e.order for e in entries(Place("handout", "cost table"))] == [
        "O(L² d_k)",
        "O(L d d_v)",
        "O(k L d d_v)",
        "O(L² d d_v)",
    ]
    assert len(entries(Place("handout", "parameter table"))) == 4
    first = entries(Place("handout", "cost table"))[0]
    assert widths(first, Sizes(32, 64)) == Widths(32, 64, 8, 64, 3)


def test_a_place_is_one_of_a_document() -> None:
    assert str(Place("homework", "1.1(c)")) == "homework 1.1(c)"
    assert str(Place("handout", "cost table")) == "handout, cost table"
    assert Place("sheet", "6-2(d)").about == SECTIONS["sheet"]["6-2(d)"]
    with pytest.raises(ValueError, match=r"no '1.6\(a\)' in the homework; choose from 1.1"):
        Place("homework", "1.6(a)")
