"""Views: what stands in them is what the model computed, and their pages fetch nothing."""

import base64
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from regard.attention.mask import causal
from regard.look.record import AttentionCall, Recording
from regard.look.view import Map, Picture, View, maps, view_of


def recorded(length: int = 5) -> Recording:
    def asked(L: int, S: int, mask: bool = False) -> AttentionCall:
        query, key = torch.randn(1, 3, L, 4), torch.randn(1, 3, S, 4)
        return AttentionCall(query, key, causal() if mask else None, None, None)

    return Recording(
        {
            "encoder.blocks.0.attention": asked(length, length),
            "encoder.blocks.1.attention": asked(length, length),
            "decoder.blocks.0.attention": asked(2, 2, mask=True),
            "decoder.blocks.0.cross": asked(2, length),
        }
    )


def seen() -> tuple[Recording, View]:
    found = recorded()
    made = maps(
        found,
        ["▁Ein", "▁Hu", "nd", "<b>", "</s>"],
        ["<s>", "▁A"],
        ["▁A", "</s>"],
        source_words=[0, 1, 1, 2, 3],
        target_words=[0, 1],
    )
    return found, View("A </script> view", made, source="Ein Hund", text="A")


def test_maps_hold_the_weights_of_every_layer_and_head() -> None:
    found, view = seen()
    assert [one.name for one in view.maps] == ["encoder", "decoder", "cross"]
    encoder, decoder, cross = view.maps
    assert encoder.weights.shape == (2, 3, 5, 5)
    torch.testing.assert_close(encoder.weights[1], found["encoder.blocks.1.attention"].weights()[0])
    assert (cross.rows, cross.written) == (("<s>", "▁A"), ("▁A", "</s>"))
    assert decoder.columns == ("<s>", "▁A")
    assert encoder.written is None
    assert len(encoder.habits) == 2


def test_json_keeps_weights_to_five_digits() -> None:
    _, view = seen()
    data = json.loads(json.dumps(view.to_json()))
    cross = data["maps"][2]
    numbers = np.frombuffer(base64.b64decode(cross["weights"]), "<u2").reshape(cross["shape"])
    assert np.abs(numbers / 65535 - view.maps[2].weights.numpy()).max() <= 0.5 / 65535 + 1e-7


@pytest.mark.parametrize("kind", [str, Path])
def test_the_page_is_whole_and_fetches_nothing(tmp_path: Path, kind: Callable[..., Any]) -> None:
    _, view = seen()
    view.write(kind(tmp_path / "page.html"))
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert not re.search(r"""(?:src|href)\s*=\s*["']?(?:https?:)?//|@import|url\(""", page)
    assert "default-src 'none'" in page
    assert page.count("</script>") == 2  # the one in the title is not the end of anything
    assert "A &lt;/script&gt; view" in page


def test_a_notebook_shows_it_in_a_frame_and_else_as_text() -> None:
    _, view = seen()
    assert view._repr_html_().startswith('<iframe srcdoc="&lt;!doctype html&gt;')
    assert str(view).startswith("Ein Hund → A\n\nThe mean of all heads of layer 1, cross-")
    assert "▁Ein ▁Hu nd <b> ∎" in str(view)


def test_what_is_shown_first_and_what_is_not_there() -> None:
    _, view = seen()
    assert view.chosen()[1:] == (0, None)
    assert view.chosen("encoder", 1, 2)[1:] == (1, 2)
    with pytest.raises(ValueError, match=r"head \(4\) must be from 1 to 3"):
        view.chosen("cross", 0, 3)
    with pytest.raises(ValueError, match=r"'other'\) is unknown; there are encoder, decoder"):
        view.map("other")


def test_long_sequences_become_overviews(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regard.look.view.WEIGHTS", 1000)
    monkeypatch.setattr("regard.look.view.CELLS", 16)
    found = recorded(47)
    one = maps(found, [str(n) for n in range(47)], ["<s>", "a"])[0]
    assert isinstance(one, Map)
    assert one.overview
    assert one.weights.shape == (2, 3, 16, 16)
    assert one.columns[:3] == ("0", "3", "6")
    torch.testing.assert_close(one.weights.sum(-1), torch.ones(2, 3, 16))


@pytest.mark.parametrize(("name", "begins"), [("a.svg", b"<?xml"), ("a.png", b"\x89PNG")])
@pytest.mark.parametrize(("every", "kind"), [(False, str), (True, Path)])
def test_figures(
    tmp_path: Path, name: str, begins: bytes, every: bool, kind: Callable[..., Any]
) -> None:
    _, view = seen()
    view.figure(kind(tmp_path / name), "cross", every=every)
    assert (tmp_path / name).read_bytes().startswith(begins)
    if name == "a.svg" and not every:
        assert "Hu" in (tmp_path / name).read_text(encoding="utf-8")  # text stays text


def test_a_view_of_anybodys_model(monkeypatch: pytest.MonkeyPatch) -> None:
    found = recorded()
    view = view_of(found, list("abcde"))
    assert repr(view) == str(view)  # what a notebook shows without HTML
    assert "tensor" not in repr(view)
    assert view.maps[0].layers == ("encoder.blocks.0.attention", "encoder.blocks.1.attention")
    torch.testing.assert_close(
        view.maps[0].weights[1], found["encoder.blocks.1.attention"].weights()[0]
    )
    across = view_of(found, list("abcde"), ["x", "y"])
    assert (across.maps[0].name, across.maps[0].rows) == ("cross", ("x", "y"))
    with pytest.raises(
        ValueError, match=r"has 3 queries and 3 keys; there are 2 × 2, 2 × 5, 5 × 5"
    ):
        view_of(found, list("abc"))
    monkeypatch.setattr("regard.look.view.WEIGHTS", 1)
    monkeypatch.setattr("regard.look.view.CELLS", 2)
    small = view_of(found, list("abcde"))
    assert (small.maps[0].rows, small.maps[0].columns) == (("b", "e"), ("a", "d"))
    assert "-o page.html" in small.terminal()


@pytest.mark.parametrize(("first", "asking"), [(1, "the class token"), (0, "mean of all queries")])
def test_the_terminal_shows_patches_in_their_places(first: int, asking: str) -> None:
    """Weights of many patches are all small; the largest is a full block nevertheless."""
    weights = torch.full((1, 2, first + 35, first + 35), 0.01)
    weights[..., first + 7 + 2] = 0.03  # row 2, column 3 of 5 × 7
    rows = tuple(str(n) for n in range(first + 35))
    picture = Picture(torch.zeros(1, 10, 14, dtype=torch.uint8), 5, 7, first)
    drawn = View("", (Map("encoder", ("a",), weights, rows, rows, picture=True),), picture=picture)
    lines = drawn.terminal().splitlines()
    assert lines[1:6] == ["  " + "░" * 14, "  ░░░░██" + "░" * 8, *["  " + "░" * 14] * 3]
    assert lines[-1].startswith("  █ is 0.03, the largest weight; 5 × 7 patches, ")
    assert lines[-1].endswith(asking)


def test_the_terminal_shows_a_picture_for_each_token_written() -> None:
    weights = torch.zeros(1, 1, 2, 6)
    weights[0, 0, 0, 0], weights[0, 0, 1, 5] = 0.25, 0.5
    columns = tuple(str(n) for n in range(6))
    picture = Picture(torch.zeros(1, 4, 6, dtype=torch.uint8), 2, 3)
    one = Map("cross", ("a",), weights, ("<s>", "7"), columns, ("7", "</s>"), picture=True)
    lines = View("", (one,), picture=picture).terminal().splitlines()
    assert lines[1:5] == ["  7 ██", "", "  ∎", "        ██"]
    assert "largest weight of each query, 0.25 to 0.5; 2 × 3 patches" in lines[-1]


def test_the_terminal_is_wide_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "50")
    weights = torch.full((1, 1, 23, 23), 1 / 23)
    names = tuple(f"word{n}\n" for n in range(23))
    lines = View("", (Map("encoder", ("a",), weights, names, names),)).terminal().splitlines()
    assert max(map(len, lines[1:-1])) <= 50
    assert all(any(f"word{n}⏎ " in f"{line} " for line in lines) for n in range(23))
    assert "█" in lines[2]
