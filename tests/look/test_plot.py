"""Pictures of attention in a terminal."""

import pytest
import torch

from regard.look.plot import SHADES, cells, grid, patches


def test_a_picture() -> None:
    weights = torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.5, 0.5]])
    assert grid(weights, ["x", "yz"], ["a", "年", "c"]).splitlines() == [
        "   a年c",
        "x  █",
        "yz  ▒▒▒",
    ]


def test_every_shade_and_what_lies_beyond() -> None:
    levels = torch.linspace(0, 1, len(SHADES))[None]
    assert grid(levels, [""], list("abcde")).splitlines()[1] == f" {SHADES}"
    assert grid(torch.tensor([[1.001, -0.001]]), ["r"], ["a", "b"]).splitlines()[1] == "r █"


@pytest.mark.parametrize(("text", "width"), [("a", 1), ("年", 2), ("e\u0301", 1), ("\u200f", 0)])
def test_cells(text: str, width: int) -> None:
    assert cells(text) == width


def test_as_many_names_as_weights() -> None:
    with pytest.raises(ValueError, match=r"2 × 3 need as many names, got 1 rows and 3 columns"):
        grid(torch.ones(2, 3), ["a"], ["a", "b", "c"])


def test_columns_beyond_the_width_go_on_below() -> None:
    weights = torch.tensor([[0.0, 1.0, 0.0, 1.0, 0.5]])
    names = ["aa ", "bb ", "cc ", "dd ", "e "]
    assert grid(weights, ["r"], names, indent=1, width=9).splitlines() == [
        "   aa bb",
        " r    ███",
        "",
        "   cc dd",
        " r    ███",
        "",
        "   e",
        " r ▒▒",
    ]


def test_patches_lie_where_they_are_in_the_picture() -> None:
    weights = torch.tensor([[1.0, 0.0, 0.5], [0.0, 0.25, 0.0]])
    assert patches(weights, 6) == ["██  ▒▒", "  ░░"]
    assert patches(weights, 5) == ["█ ▒", " ░"]
    assert patches(weights, 2) == ["░░"]
