"""Splits a text into pieces to translate, and pieces that stay.

    pieces("One. \n\n  Two.")  →  "One." · " \n\n  " · "Two."

Put together again they are the text. Lines are translated one by one, so that there are as many as
before; white space around them stays. A long line is cut into sentences, of which models are
trained to translate one at a time. In HTML, tags, comments, scripts and code stay; the text
between two tags is a piece of its own.
"""

import html
import re
from collections.abc import Iterator
from dataclasses import dataclass

LONG = 400
"""Characters of a line from which it is cut into sentences. Up to that a line is translated as it
is, as `load(RUN).translate` would."""


@dataclass(frozen=True)
class Piece:
    text: str
    translated: bool


_BREAK = re.compile(r"(\s*[\r\n\v\f\x1c-\x1e\x85\u2028\u2029]\s*)")

_MARKUP = re.compile(
    r"<!--.*?-->|<(script|style|code|pre)\b[^>]*>.*?</\1\s*>|<[A-Za-z/!?][^<>]*>",
    re.DOTALL | re.IGNORECASE,
)

# The end of a sentence: its sign, whatever closes with it, and then white space and a beginning.
# Chinese and Japanese have no space there.
_CLOSING = "\"'\u201d\u2019»)\\]\u300d\u300f\uff09"
_OPENING = "\"'\u201c\u2018«(\\[¿¡"
_END = re.compile(
    rf"(?<=[.!?…])(?P<close>[{_CLOSING}]*)(?P<space>\s+)(?=[{_OPENING}]*[^\Wa-zà-öø-ÿ_])"
    rf"|(?<=[\u3002\uff01\uff1f])[{_CLOSING}]*(?=\S)"
)

_ABBREVIATION = re.compile(
    r"""(?:^|[\s("'“«])(?:[A-Za-zÀ-ž]|[Mm]rs?|[Mm]s|[DS]r|[Pp]rof|St|vs|etc|ca|bzw|usw|vgl|Nr|No|"""
    r"""[Ff]igs?|[Aa]bb|[Ss]eq|[Ii]nc|Ltd|Co|Jr|Mme|Mlle|[a-z]\.[a-z]|z\. ?B|d\. ?h|u\. ?a)\.$"""
)


def pieces(text: str, *, markup: bool = False, long: int | None = LONG) -> list[Piece]:
    """Splits a text, which is HTML if `markup` is true.

    Lines of more than `long` characters are cut into sentences; None cuts none.
    """
    short = long is None or len(text) <= long
    # Most texts are one short line: of all white space, only a plain space is printable.
    if not markup and text and short and text.isprintable() and text == text.strip():
        return [Piece(text, True)]
    return [piece for piece in _pieces(text, markup, long) if piece.text]


def _pieces(text: str, markup: bool, long: int | None) -> Iterator[Piece]:
    if not markup:
        yield from _lines(text, long)
        return
    at = 0
    for tag in _MARKUP.finditer(text):
        yield from _lines(text[at : tag.start()], long)
        yield Piece(tag[0], False)
        at = tag.end()
    yield from _lines(text[at:], long)


def _lines(text: str, long: int | None) -> Iterator[Piece]:
    for part in _BREAK.split(text):
        if part.isspace():
            yield Piece(part, False)
        else:
            yield from _line(part, long)


def _line(line: str, long: int | None) -> Iterator[Piece]:
    inner = line.strip()
    begin = line.index(inner)
    yield Piece(line[:begin], False)
    whole = long is None or len(inner) <= long
    yield from [Piece(inner, True)] if whole else _sentences(inner)
    yield Piece(line[begin + len(inner) :], False)


def _sentences(line: str) -> Iterator[Piece]:
    at = 0
    for end in _END.finditer(line):
        stop = end.end("close") if end["space"] else end.end()
        if _ABBREVIATION.search(line, max(0, end.start() - 12), end.start()):
            continue
        yield Piece(line[at:stop], True)
        yield Piece(end["space"] or "", False)
        at = end.end()
    yield Piece(line[at:], True)


def has_line_break(text: str) -> bool:
    return not text.isprintable() and _BREAK.search(text) is not None


def plain(piece: Piece, markup: bool) -> str:
    """The text that the model reads."""
    return html.unescape(piece.text) if markup else piece.text


def marked_up(translation: str, markup: bool) -> str:
    """The translation as it stands in the text."""
    return html.escape(translation, quote=False) if markup else translation
