"""The Transformer as a drawing, with its three kinds of attention marked.

After figure 1 of Vaswani et al. (2017), redrawn: encoder on the left, decoder on the right.
"""

from html import escape
from typing import NamedTuple

from regard.lab.answers.figure import Drawing


class Box(NamedTuple):
    """A layer, with a line under its name; `kind` is its CSS class."""

    y: float
    kind: str
    name: str
    note: str = ""


WIDE, TALL, GAP = 176.0, 42.0, 28.0
"""Of a box, and between two."""
TOP = 46.0
_ROWS = [TOP + n * (TALL + GAP) for n in range(5)]
COLUMNS = {
    12.0: (
        Box(_ROWS[2], "plain", "feed-forward", "each position alone"),
        Box(_ROWS[3], "self", "self-attention", "Q, K, V: the source"),
        Box(_ROWS[4], "plain", "embedding + positions"),
    ),
    212.0: (
        Box(_ROWS[0], "plain", "linear, softmax"),
        Box(_ROWS[1], "plain", "feed-forward", "each position alone"),
        Box(_ROWS[2], "cross", "cross-attention", "Q: from below; K, V: the encoder"),
        Box(_ROWS[3], "masked", "masked self-attention", "Q, K, V: the target so far"),
        Box(_ROWS[4], "plain", "embedding + positions"),
    ),
}
"""The boxes of encoder and decoder from top to bottom, by where they begin."""
ENCODER, DECODER = COLUMNS
HEIGHT = _ROWS[4] + TALL + 50

TEXT = """\
                                                  next token
                                     ┌────────────────┴─────────────────┐
                                     │         linear, softmax          │
                                     └────────────────▲─────────────────┘
                                     ┌────────────────┴─────────────────┐ ┐
                                     │           feed-forward           │ │
                                     └────────────────▲─────────────────┘ │
┌────────────────────────────┐ ┐     ┌────────────────┴─────────────────┐ │
│        feed-forward        │ │ K,V │  CROSS-ATTENTION                 │ │
└─────────────▲──────────────┘ ├────►│  Q: from below; K, V: encoder    │ ├ ×6
┌─────────────┴──────────────┐ ├ ×6  └────────────────▲─────────────────┘ │
│  SELF-ATTENTION            │ │     ┌────────────────┴─────────────────┐ │
│  Q, K, V: the source       │ │     │  MASKED SELF-ATTENTION           │ │
└─────────────▲──────────────┘ ┘     │  Q, K, V: the target so far      │ │
              │                      └────────────────▲─────────────────┘ ┘
     source + positions                      target + positions\
"""


def architecture() -> Drawing:
    """Which attention is self, which is masked, and which is cross."""
    title = "The three kinds of attention in the Transformer"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="plot" viewBox="0 0 400 {HEIGHT:g}" '
        f'role="img" aria-label="{title}"><title>{title}</title>',
        _stack(ENCODER, _ROWS[2], "encoder, ×6"),
        _stack(DECODER, _ROWS[1], "decoder, ×6"),
        _memory(),
        *(_column(x, boxes) for x, boxes in COLUMNS.items()),
        _label(ENCODER, HEIGHT - 4, "source"),
        _label(DECODER, HEIGHT - 4, "target, shifted by one"),
        _label(DECODER, 12, "next token"),
        "</svg>",
    ]
    return Drawing(title, "".join(parts), TEXT)


def _column(x: float, boxes: tuple[Box, ...]) -> str:
    """Boxes, with an arrow into each from below and one out of the topmost in the decoder."""
    arrows = [_arrow(x + WIDE / 2, box.y + TALL + GAP, box.y + TALL) for box in boxes]
    if x == DECODER:
        arrows.append(_arrow(x + WIDE / 2, boxes[0].y, boxes[0].y - GAP + 4))
    return "".join(arrows) + "".join(_box(x, box) for box in boxes)


def _box(x: float, box: Box) -> str:
    middle = x + WIDE / 2
    name = box.y + (18 if box.note else 26)
    note = f'<text class="tick" x="{middle:g}" y="{box.y + 33:g}">{escape(box.note)}</text>'
    return (
        f'<g class="box {box.kind}"><rect x="{x:g}" y="{box.y:g}" width="{WIDE:g}" '
        f'height="{TALL:g}" rx="7"/><text class="name" x="{middle:g}" y="{name:g}">'
        f"{escape(box.name)}</text>{note if box.note else ''}</g>"
    )


def _arrow(x: float, start: float, end: float) -> str:
    """Upwards."""
    return (
        f'<path class="axis" d="M{x:g} {start:g}V{end + 5:g}"/>'
        f'<path class="head" d="M{x:g} {end:g}l-4 7h8z"/>'
    )


def _memory() -> str:
    """From the top of the encoder to the side of cross-attention."""
    y, across = _ROWS[2] - GAP, (ENCODER + WIDE + DECODER) / 2
    into = _ROWS[2] + TALL / 2
    return (
        f'<path class="axis" d="M{ENCODER + WIDE / 2:g} {_ROWS[2]:g}V{y:g}H{across:g}V{into:g}'
        f'H{DECODER - 5:g}"/><path class="head" d="M{DECODER:g} {into:g}l-7 -4v8z"/>'
        f'<text class="tick" x="{across - 6:g}" y="{y - 6:g}" text-anchor="end">K, V</text>'
    )


def _stack(x: float, top: float, name: str) -> str:
    """A frame around the blocks of a stack."""
    bottom = _ROWS[3] + TALL + 8
    side, anchor = (x - 4, "start") if x == ENCODER else (x + WIDE + 4, "end")
    return (
        f'<rect class="stack" x="{x - 8:g}" y="{top - 8:g}" width="{WIDE + 16:g}" '
        f'height="{bottom - top + 8:g}" rx="12"/>'
        f'<text class="tick" x="{side:g}" y="{top - 13:g}" text-anchor="{anchor}">{name}</text>'
    )


def _label(x: float, y: float, name: str) -> str:
    return f'<text class="label" x="{x + WIDE / 2:g}" y="{y:g}" text-anchor="middle">{name}</text>'
