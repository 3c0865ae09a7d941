"""Texts in pieces, and together again."""

from hypothesis import given
from hypothesis import strategies as some

from regard.task.split import Piece, _pieces, marked_up, pieces, plain

SIGNS = some.lists(
    some.sampled_from([*"ab A.!?…\n\r\t \u2028\u3002\uff01<>/&;\"'()1é", "</b>", "<i>", "Mr. "]),
    max_size=60,
).map("".join)


def translated(text: str, **how: object) -> list[str]:
    return [piece.text for piece in pieces(text, **how) if piece.translated]  # type: ignore[arg-type]


@given(SIGNS, some.booleans(), some.integers(0, 20))
def test_pieces_are_the_text(text: str, markup: bool, long: int) -> None:
    found = pieces(text, markup=markup, long=long)
    assert "".join(piece.text for piece in found) == text
    for piece in found:
        assert piece.text
        if piece.translated:
            assert piece.text == piece.text.strip()
            assert len(piece.text.splitlines()) == 1


@given(SIGNS | some.text(max_size=12), some.booleans(), some.integers(0, 20))
def test_a_short_line_takes_a_short_way(text: str, markup: bool, long: int) -> None:
    whole = [piece for piece in _pieces(text, markup, long) if piece.text]
    assert pieces(text, markup=markup, long=long) == whole


def test_lines_and_white_space_stay() -> None:
    text = "  One.\n\n\tTwo words. \r\nThree"
    assert translated(text) == ["One.", "Two words.", "Three"]
    assert [piece.text for piece in pieces(text) if not piece.translated] == [
        "  ",
        "\n\n\t",
        " \r\n",
    ]


def test_a_short_line_is_one_piece_whatever_it_holds() -> None:
    assert translated("One sentence. Another one! And a third?") == [
        "One sentence. Another one! And a third?"
    ]


def test_a_long_line_is_cut_into_sentences() -> None:
    line = 'He said: "Go!" Then Dr. Who left at 3.5 p.m. exactly. "Why?" Nobody knew… Fin.'
    assert translated(line, long=10) == [
        'He said: "Go!"',
        "Then Dr. Who left at 3.5 p.m. exactly.",
        '"Why?"',
        "Nobody knew…",
        "Fin.",
    ]
    assert translated("das ist z. B. Unsinn. Und das?", long=5) == [
        "das ist z. B. Unsinn.",
        "Und das?",
    ]
    assert translated("我来了\u3002你呢\uff1f他说\u3002", long=2) == [
        "我来了\u3002",
        "你呢\uff1f",
        "他说\u3002",
    ]


def test_markup_stays() -> None:
    text = (
        "<p class='a > b'>One <b>two</b></p><script>var a = '<b>';</script><!-- no -->&amp; three"
    )
    found = pieces(text, markup=True)
    assert [plain(piece, True) for piece in found if piece.translated] == [
        "b'>One",
        "two",
        "& three",
    ]
    assert Piece("<script>var a = '<b>';</script>", False) in found
    assert Piece("<!-- no -->", False) in found
    assert marked_up("a < b & c", True) == "a &lt; b &amp; c"
    assert marked_up("a < b & c", False) == "a < b & c"
    assert translated("1 < 2 and 3 > 2", markup=True) == ["1 < 2 and 3 > 2"]
