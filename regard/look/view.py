"""What a model attended to, as one view: a page, a notebook's output, a figure, or text.

    View    what was read and written, and its maps
    Map     the weights of one kind of attention: layers × heads × queries × keys, with their names

A page is one file that fetches nothing: the view as JSON, with view.js and view.css inside. A
notebook shows the same page in a frame of its own, so that many can stand in one notebook, and the
terminal's heat map where it shows no HTML.
"""

import base64
import io
import json
import shutil
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from regard import atomic
from regard.look.heads import Habits, habits
from regard.look.plot import cells, fill, grid, patches
from regard.look.record import Asked, Recording, sampled

WEIGHTS = 8_000_000
"""Weights that a view holds; beyond them, maps show a sample of the rows."""

CELLS = 256
"""Rows and columns of such a map, at most."""


@dataclass(frozen=True)
class Picture:
    """An image, and the patches it was cut into."""

    pixels: UInt8[Tensor, "C Y X"]
    rows: int
    columns: int
    first: int = 0
    """The position of the first patch: 1 after a class token."""

    def data_url(self) -> str:
        """As a PNG that a page can hold."""
        from PIL import Image

        shown = self.pixels.permute(1, 2, 0).contiguous().numpy()
        file = io.BytesIO()
        Image.fromarray(shown[..., 0] if shown.shape[-1] == 1 else shown).save(file, "png")
        return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


@dataclass(frozen=True)
class Map:
    """The weights of one kind of attention, in every layer and head."""

    name: Literal["encoder", "decoder", "cross"]
    layers: tuple[str, ...]
    """The names of its attentions in the model."""
    weights: Float[Tensor, "layers H L S"]
    rows: tuple[str, ...]
    """What each query has read."""
    columns: tuple[str, ...]
    written: tuple[str, ...] | None = None
    """What each query's step wrote: in a decoder, the next token."""
    row_words: tuple[int, ...] | None = None
    """The word of each row, to merge them by; -1 where there is none."""
    column_words: tuple[int, ...] | None = None
    habits: tuple[Habits, ...] = ()
    picture: bool = False
    """Whether the columns are a picture's patches."""
    overview: bool = False
    """Whether rows are a sample of the tokens, and columns several of them each."""
    falls: Float[Tensor, "layers H"] | None = None
    """By how much log p falls without each head."""

    def to_json(self) -> dict[str, Any]:
        layers, heads, L, S = self.weights.shape
        fixed = (self.weights.double().clamp(0, 1) * 65535).round().to(torch.int32)
        packed = fixed.numpy().astype("<u2").tobytes()
        return {
            "name": self.name,
            "layers": list(self.layers),
            "shape": [layers, heads, L, S],
            "weights": base64.b64encode(packed).decode(),
            "rows": list(self.rows),
            "columns": list(self.columns),
            "written": None if self.written is None else list(self.written),
            "rowWords": None if self.row_words is None else list(self.row_words),
            "columnWords": None if self.column_words is None else list(self.column_words),
            "habits": [[one.of(head) for head in range(heads)] for one in self.habits],
            "picture": self.picture,
            "overview": self.overview,
            "falls": None if self.falls is None else self.falls.tolist(),
        }


@dataclass(frozen=True)
class Best:
    """The head that aligns words best, and the share of what is possible that each head reaches."""

    layer: int
    head: int
    shift: int
    shares: Float[Tensor, "layers H"]


@dataclass(frozen=True)
class Effect:
    """By how much log p of each token written falls when parts of the source are hidden."""

    units: tuple[str, ...]
    places: tuple[tuple[int, ...], ...]
    """The source positions of each."""
    falls: Float[Tensor, "U L"]
    tokens: tuple[str, ...]


@dataclass(frozen=True, repr=False)
class View:
    """All that is shown of one text or image."""

    title: str
    maps: tuple[Map, ...]
    source: str = ""
    text: str = ""
    """What was written, or the label."""
    tokens: tuple[tuple[str, float], ...] = ()
    """What was written token by token, and the probability of each."""
    labels: tuple[tuple[str, float], ...] = ()
    """Probabilities of labels, or of tokens, the likeliest first."""
    answers: str = ""
    """What those are probabilities of, as a heading."""
    picture: Picture | None = None
    best: Best | None = None
    effect: Effect | None = None
    notes: tuple[str, ...] = ()
    more: dict[str, Any] = field(default_factory=dict)
    """What a page asks for besides."""

    def to_json(self) -> dict[str, Any]:
        picture, best, effect = self.picture, self.best, self.effect
        return {
            "title": self.title,
            "source": self.source,
            "text": self.text,
            "tokens": [list(token) for token in self.tokens],
            "labels": [list(label) for label in self.labels],
            "answers": self.answers,
            "maps": [one.to_json() for one in self.maps],
            "picture": picture
            and {
                "src": picture.data_url(),
                "rows": picture.rows,
                "columns": picture.columns,
                "first": picture.first,
                "width": picture.pixels.shape[2],
                "height": picture.pixels.shape[1],
            },
            "best": best
            and {
                "layer": best.layer,
                "head": best.head,
                "shift": best.shift,
                "shares": best.shares.tolist(),
            },
            "effect": effect
            and {
                "units": list(effect.units),
                "places": [list(unit) for unit in effect.places],
                "falls": effect.falls.tolist(),
                "tokens": list(effect.tokens),
            },
            "notes": [*self.notes, *self._clipped()],
            **self.more,
        }

    def _clipped(self) -> list[str]:
        """A note if the page cannot show some weights; those of a softmax lie from 0 to 1."""
        ends = [part.weights.detach().aminmax() for part in self.maps if part.weights.numel()]
        least = min((float(low) for low, _ in ends), default=0.0)
        most = max((float(high) for _, high in ends), default=0.0)
        if least >= 0 and most < 1.001:
            return []
        return [
            f"Weights lie from {least:.3g} to {most:.3g}; the page shows 0 below 0 and 1 above 1."
        ]

    def map(self, name: str | None = None) -> Map:
        """That of this name, or the one that tells most: cross-attention where there is one."""
        known = {one.name: one for one in self.maps}
        if name is None:
            return known.get("cross") or self.maps[0]
        if name not in known:
            raise ValueError(f"map ({name!r}) is unknown; there are {', '.join(known)}")
        return known[name]

    def chosen(
        self, name: str | None = None, layer: int | None = None, head: int | None = None
    ) -> tuple[Map, int, int | None]:
        """A map, a layer and a head; by default those that align best, or else the last layer's
        mean, for which the head is None."""
        one = self.map(name)
        layers, heads = one.weights.shape[:2]
        for what, number, count in (("layer", layer, layers), ("head", head, heads)):
            if number is not None and not 0 <= number < count:
                raise ValueError(f"{what} ({number + 1}) must be from 1 to {count}")
        if layer is None and head is None and self.best is not None and one.name == "cross":
            return one, self.best.layer, self.best.head
        return one, layers - 1 if layer is None else layer, head

    def terminal(
        self, name: str | None = None, layer: int | None = None, head: int | None = None
    ) -> str:
        """A heat map no wider than the terminal: a row for each query, each shaded up to its
        largest weight, since the weights of many keys are all small.

        Over a picture's patches it is the picture: one for each token that was written, or else
        one for the class token or the mean of all queries.
        """
        one, layer, head = self.chosen(name, layer, head)
        if one.overview:
            return "Too many tokens for a terminal; a page shows a sample of them: -o page.html"
        weights = one.weights[layer].mean(0) if head is None else one.weights[layer, head]
        who = "The mean of all heads" if head is None else f"Head {head + 1}"
        rows, width = _signs(one.written or one.rows), shutil.get_terminal_size().columns
        about = ""
        if self.picture is not None and one.picture:
            about = f"; {self.picture.rows} × {self.picture.columns} patches"
            first = self.picture.first
            if one.name == "encoder":
                rows, weights = [""], weights[:1] if first else weights.mean(0, keepdim=True)
                about += ", from the class token" if first else ", the mean of all queries"
            weights = weights[:, first:]
            drawn = _patches(_scaled(weights), rows, self.picture, width)
        else:
            columns = _signs(one.columns)
            if max(map(len, columns), default=0) > 1:
                columns = [f"{name} " for name in columns]  # else long names would run together
            drawn = grid(_scaled(weights), rows, columns, indent=2, width=width)
        largest = weights.amax(-1)
        low, high = f"{float(largest.min()):.2g}", f"{float(largest.max()):.2g}"
        means = f"{high}, the largest weight"
        if low != high:
            means = f"the largest weight of each query, {low} to {high}"
        title = f"{who} of layer {layer + 1}, {TITLES[one.name]}:"
        return f"{title}\n{drawn}\n\n  █ is {means}{about}"

    def html(self, title: str | None = None) -> str:
        """The page, in one file."""
        data = json.dumps(self.to_json(), ensure_ascii=False, separators=(",", ":"))
        data = data.replace("<", "\\u003c")  # no </script> within
        return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<title>{escape(title or self.title)}</title>
<style>{_file("view.css")}</style>
</head>
<body class="regard-view page">
<main id="view"><noscript>This page needs JavaScript, which is all inside it.</noscript></main>
<script type="application/json" id="data">{data}</script>
<script type="module">{_file("view.js")}
mount(document.getElementById("view"), JSON.parse(document.getElementById("data").textContent));
</script>
</body>
</html>
"""

    def write(self, path: Path) -> None:
        atomic.write(path, self.html())

    def figure(
        self,
        path: Path,
        name: str | None = None,
        layer: int | None = None,
        head: int | None = None,
        every: bool = False,
    ) -> None:
        """Draws a head, or a whole layers × heads grid, as PNG or SVG, as the file's name ends."""
        one, layer, head = self.chosen(name, layer, head)
        atomic.write(path, _drawn(one, layer, head, every, path.suffix.lstrip(".")))

    def __str__(self) -> str:
        written = f"{self.source} → {self.text}\n\n" if self.source else f"{self.text}\n\n"
        return written + self.terminal()

    def __repr__(self) -> str:
        """What a notebook shows where it shows no HTML."""
        return str(self)

    def _repr_html_(self) -> str:
        """For notebooks: the page in a frame, which neither shares styles nor names with others."""
        return (
            f'<iframe srcdoc="{escape(self.html())}" style="width:100%;height:46rem;border:0" '
            f'sandbox="allow-scripts" title="{escape(self.title)}"></iframe>'
        )


TITLES = {
    "encoder": "the encoder's self-attention",
    "decoder": "the decoder's self-attention",
    "cross": "cross-attention from output to source",
}

POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; "
    "base-uri 'none'; form-action 'none'"
)
"""What the page may load: nothing but what is in it."""


@cache
def _file(name: str) -> str:
    return (files("regard.look") / name).read_text(encoding="utf-8")


def _signs(pieces: Sequence[str]) -> list[str]:
    """Spaces as spaces; the end, and that of a line, as one sign."""
    signs = {"▁": " ", "</s>": "∎", "<s>": "⊢"}
    return [signs.get(piece, piece).replace("\n", "⏎") for piece in pieces]


def _scaled(weights: Float[Tensor, "L S"]) -> Float[Tensor, "L S"]:
    """Each row by its largest weight; one that attends to nothing stays empty."""
    return weights / weights.amax(-1, keepdim=True).clamp(min=torch.finfo(weights.dtype).tiny)


def _patches(
    weights: Float[Tensor, "L S"], names: Sequence[str], picture: Picture, width: int
) -> str:
    """A picture of the patches for each query, beside its name."""
    side = max(map(cells, names))
    margin = 2 + side + bool(side)
    lines = []
    for name, row in zip(names, weights):
        drawn = patches(row.unflatten(0, (picture.rows, picture.columns)), width - margin)
        beside = [name, *[""] * (len(drawn) - 1)]
        lines += [f"{fill(f'  {n}', margin)}{line}" for n, line in zip(beside, drawn)]
    return "\n".join(line.rstrip() for line in lines)


def maps(
    seen: Recording,
    source: Sequence[str],
    target: Sequence[str] = (),
    written: Sequence[str] | None = None,
    *,
    source_words: Sequence[int] | None = None,
    target_words: Sequence[int] | None = None,
    picture: bool = False,
) -> tuple[Map, ...]:
    """What was recorded of one sequence, sorted into maps.

    `source` and `target` name the positions that were read; `written` what each target step wrote.
    A decoder without an encoder reads its own text, the target.
    """
    groups: dict[Any, list[str]] = {}
    for name in seen:
        kind = "encoder"
        if name.startswith("decoder."):
            kind = "cross" if name.endswith("cross") else "decoder"
        groups.setdefault(kind, []).append(name)
    made = []
    for kind, names in groups.items():
        asked = [seen[name] for name in names]
        many = _many(seen.values(), asked[0])
        mine = kind != "encoder"
        rows, columns = (target if mine else source), (target if kind == "decoder" else source)
        row_words = target_words if mine else source_words
        column_words = read_words(target_words) if kind == "decoder" else source_words
        weights = torch.stack([_weights(one, many) for one in asked]).float().cpu()
        wrote = written if mine else None
        if many:
            places = sampled(asked[0].query.shape[2], CELLS)
            rows, columns = [rows[n] for n in places], _several(columns, weights.shape[-1])
            wrote = None if wrote is None else [wrote[n] for n in places]
        made.append(
            Map(
                kind,
                tuple(names),
                weights,
                tuple(rows),
                tuple(columns),
                None if wrote is None else tuple(wrote),
                None if row_words is None or many else tuple(row_words),
                None if column_words is None or many else tuple(column_words),
                tuple(_habits(one, many) for one in asked),
                picture=picture and kind != "decoder",
                overview=many,
            )
        )
    order = ("encoder", "decoder", "cross")
    return tuple(sorted(made, key=lambda one: order.index(one.name)))


def read_words(written: Sequence[int] | None) -> list[int] | None:
    """The word of each token that a decoder reads, from those that it writes: the start, which is a
    word of its own, stands before them."""
    if written is None:
        return None
    return [0, *(word + 1 if word >= 0 else -1 for word in written[:-1])]


def view_of(
    seen: Recording,
    columns: Sequence[str],
    rows: Sequence[str] | None = None,
    *,
    title: str = "What it attended to",
) -> View:
    """The view of any model that was recorded: of its attentions over these keys.

    Without `rows`, queries and keys are the same tokens. Attentions of other lengths, such as those
    of the other side of an encoder-decoder, are left out; the first sequence of a batch is shown.
    """
    size = len(columns if rows is None else rows), len(columns)
    fitting = {
        name: asked
        for name, asked in seen.items()
        if (asked.query.shape[2], asked.key.shape[2]) == size
    }
    if not fitting:
        shapes = sorted({(one.query.shape[2], one.key.shape[2]) for one in seen.values()})
        raise ValueError(
            f"no attention has {size[0]} queries and {size[1]} keys; there are "
            + (", ".join(f"{L} × {S}" for L, S in shapes) or "none")
        )
    heads = next(iter(fitting.values())).query.shape[1]
    alike = {name: one for name, one in fitting.items() if one.query.shape[1] == heads}
    many = _many(alike.values(), next(iter(alike.values())))
    weights = torch.stack([_weights(one, many) for one in alike.values()]).float().cpu()
    names = list(columns if rows is None else rows)
    if many:
        names = [names[n] for n in sampled(len(names), CELLS)]
        columns = _several(columns, weights.shape[-1])
    one = Map(
        "encoder" if rows is None else "cross",
        tuple(alike),
        weights,
        tuple(names),
        tuple(columns),
        habits=tuple(_habits(asked, many) for asked in alike.values()),
        overview=many,
    )
    return View(title, (one,))


def _many(seen: Iterable[Asked], asked: Asked) -> bool:
    """Whether there are more weights than a view holds, and so many of one attention that a sample
    of its rows would be fewer."""
    sizes = (one.query.shape[1] * one.query.shape[2] * one.key.shape[2] for one in seen)
    return max(asked.query.shape[2], asked.key.shape[2]) > CELLS and sum(sizes) > WEIGHTS


def _weights(asked: Asked, many: bool) -> Tensor:
    return (asked.sample(CELLS) if many else asked.weights())[0]


def _habits(asked: Asked, many: bool) -> Habits:
    return habits(asked, rows=sampled(asked.query.shape[2], CELLS) if many else None)


def _several(names: Sequence[str], cells: int) -> list[str]:
    """Names of cells that hold several tokens each."""
    step = -(-len(names) // cells)
    return [names[n] for n in range(0, len(names), step)]


def _fonts() -> list[str]:
    """matplotlib's own font, and those of this machine that have what it lacks."""
    from matplotlib.font_manager import fontManager

    known = {font.name for font in fontManager.ttflist}
    wanted = ("Noto Sans", "Noto Sans CJK JP", "Noto Sans Devanagari", "Noto Sans Thai")
    return ["DejaVu Sans", *(name for name in wanted if name in known)]


def _drawn(one: Map, layer: int, head: int | None, every: bool, kind: str) -> bytes:
    import matplotlib

    if kind not in ("png", "svg"):
        raise ValueError(f"a figure (.{kind}) must be a .png or a .svg")
    with matplotlib.rc_context(
        {
            "svg.fonttype": "none",
            "svg.hashsalt": "regard",
            "font.family": _fonts(),
            "font.size": 8,
        }
    ):
        from matplotlib.figure import Figure

        layers, heads, L, S = one.weights.shape
        if every:
            figure = Figure(figsize=(1.3 * heads + 0.6, 1.3 * layers + 0.6), layout="constrained")
            axes = figure.subplots(layers, heads, squeeze=False)
            full = float(one.weights.max())  # one scale for all
            for n in range(layers):
                for h in range(heads):
                    axes[n][h].imshow(one.weights[n, h].numpy(), cmap="Purples", vmin=0, vmax=full)
                    axes[n][h].set(xticks=[], yticks=[], title=f"{n + 1}.{h + 1}")
        else:
            figure = Figure(figsize=(0.24 * S + 1.2, 0.24 * L + 1), layout="constrained")
            axis = figure.subplots()
            shown = one.weights[layer].mean(0) if head is None else one.weights[layer, head]
            axis.imshow(shown.numpy(), cmap="Purples", vmin=0)
            axis.set_xticks(range(S), _signs(one.columns), rotation=90 if S > 12 else 0)
            axis.set_yticks(range(L), _signs(one.written or one.rows))
            who = "mean of heads" if head is None else f"head {head + 1}"
            axis.set_title(f"layer {layer + 1}, {who}")
            axis.xaxis.tick_top()
        file = io.BytesIO()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph")  # signs that no font here has
            meta = {"Date": None} if kind == "svg" else {"Software": None}
            figure.savefig(file, format=kind, dpi=200, metadata=meta)
    return file.getvalue()
