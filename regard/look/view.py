"""Views of attention weights: an HTML page, a notebook's output, a figure, or text.

    View    the input and output of a model, and its maps
    Map     the weights of one kind of attention: layers × heads × queries × keys, with their names

A page is one file that fetches nothing: the view as JSON, with view.js and view.css inside. A
notebook shows the same page in a separate frame, so that one notebook can have several, or the
terminal's heat map if it shows no HTML.
"""

import base64
import io
import json
import os
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

from regard.look.heads import Habits, habits
from regard.look.plot import cells, fill, grid, patches
from regard.look.record import AttentionCall, Recording, sampled
from regard.machine import atomic

WEIGHTS = 8_000_000
"""Maximum number of weights in a view; beyond it, maps show a sample of the rows."""

CELLS = 256
"""Maximum number of rows and of columns of a sampled map."""


@dataclass(frozen=True)
class Picture:
    """An image, and the patches it was cut into."""

    pixels: UInt8[Tensor, "C Y X"]
    rows: int
    columns: int
    first: int = 0
    """The position of the first patch: 1 after a class token."""

    def data_url(self) -> str:
        """The image as a data URL of a PNG."""
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
    """Names of the attention modules in the model."""
    weights: Float[Tensor, "layers H L S"]
    rows: tuple[str, ...]
    """The token that each query reads."""
    columns: tuple[str, ...]
    written: tuple[str, ...] | None = None
    """The token that each query's step writes: in a decoder, the next token."""
    row_words: tuple[int, ...] | None = None
    """The word of each row, for merging rows; -1 for none."""
    column_words: tuple[int, ...] | None = None
    habits: tuple[Habits, ...] = ()
    picture: bool = False
    """True if the columns are a picture's patches."""
    overview: bool = False
    """True if rows are a sample of the tokens, and each column is several tokens."""
    falls: Float[Tensor, "layers H"] | None = None
    """The fall of log p without each head."""

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
            "habits": [[layer.of(head) for head in range(heads)] for layer in self.habits],
            "picture": self.picture,
            "overview": self.overview,
            "falls": None if self.falls is None else self.falls.tolist(),
        }


@dataclass(frozen=True)
class Best:
    """The head that aligns words best, and the score of each head as a share of the maximum."""

    layer: int
    head: int
    shift: int
    shares: Float[Tensor, "layers H"]


@dataclass(frozen=True)
class Effect:
    """The fall of log p of each output token when parts of the source are hidden."""

    units: tuple[str, ...]
    places: tuple[tuple[int, ...], ...]
    """The source positions of each unit."""
    falls: Float[Tensor, "U L"]
    tokens: tuple[str, ...]


@dataclass(frozen=True, repr=False)
class View:
    """The contents of a view of one text or image."""

    title: str
    maps: tuple[Map, ...]
    source: str = ""
    text: str = ""
    """The output, or the label."""
    tokens: tuple[tuple[str, float], ...] = ()
    """The tokens of the output, and the probability of each."""
    labels: tuple[tuple[str, float], ...] = ()
    """Probabilities of labels, or of tokens, the most probable first."""
    answers: str = ""
    """The heading of `labels`."""
    picture: Picture | None = None
    best: Best | None = None
    effect: Effect | None = None
    notes: tuple[str, ...] = ()
    more: dict[str, Any] = field(default_factory=dict)
    """Further JSON for the page."""

    def to_json(self) -> dict[str, Any]:
        picture, best, effect = self.picture, self.best, self.effect
        return {
            "title": self.title,
            "source": self.source,
            "text": self.text,
            "tokens": [list(token) for token in self.tokens],
            "labels": [list(label) for label in self.labels],
            "answers": self.answers,
            "maps": [heatmap.to_json() for heatmap in self.maps],
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
            "notes": [*self.notes, *self._clip_note()],
            **self.more,
        }

    def _clip_note(self) -> list[str]:
        """A note if the page cannot show some weights; softmax weights lie from 0 to 1."""
        ends = [part.weights.detach().aminmax() for part in self.maps if part.weights.numel()]
        least = min((float(low) for low, _ in ends), default=0.0)
        most = max((float(high) for _, high in ends), default=0.0)
        if least >= 0 and most < 1.001:
            return []
        return [
            f"Weights lie from {least:.3g} to {most:.3g}; the page shows 0 below 0 and 1 above 1."
        ]

    def map(self, name: str | None = None) -> Map:
        """The map of this name; by default that of cross-attention, or else the first."""
        by_name = {heatmap.name: heatmap for heatmap in self.maps}
        if name is None:
            return by_name.get("cross") or self.maps[0]
        if name not in by_name:
            raise ValueError(f"map ({name!r}) is unknown; there are {', '.join(by_name)}")
        return by_name[name]

    def chosen(
        self, name: str | None = None, layer: int | None = None, head: int | None = None
    ) -> tuple[Map, int, int | None]:
        """A map, a layer and a head; by default those that align best, or else the mean of the last
        layer's heads, for which the head is None."""
        heatmap = self.map(name)
        layers, heads = heatmap.weights.shape[:2]
        for what, number, count in (("layer", layer, layers), ("head", head, heads)):
            if number is not None and not 0 <= number < count:
                raise ValueError(f"{what} ({number + 1}) must be from 1 to {count}")
        if layer is None and head is None and self.best is not None and heatmap.name == "cross":
            return heatmap, self.best.layer, self.best.head
        return heatmap, layers - 1 if layer is None else layer, head

    def terminal(
        self, name: str | None = None, layer: int | None = None, head: int | None = None
    ) -> str:
        """A heat map no wider than the terminal: a row for each query, each shaded up to its
        largest weight, since the weights of many keys are all small.

        Over a picture's patches the heat map is the picture: one for each output token, or else one
        for the class token or the mean of all queries.
        """
        heatmap, layer, head = self.chosen(name, layer, head)
        if heatmap.overview:
            return "Too many tokens for a terminal; a page shows a sample of them: -o page.html"
        weights = heatmap.weights[layer].mean(0) if head is None else heatmap.weights[layer, head]
        who = "The mean of all heads" if head is None else f"Head {head + 1}"
        rows, width = _signs(heatmap.written or heatmap.rows), shutil.get_terminal_size().columns
        about = ""
        if self.picture is not None and heatmap.picture:
            about = f"; {self.picture.rows} × {self.picture.columns} patches"
            first = self.picture.first
            if heatmap.name == "encoder":
                rows, weights = [""], weights[:1] if first else weights.mean(0, keepdim=True)
                about += ", from the class token" if first else ", the mean of all queries"
            weights = weights[:, first:]
            drawn = _patches(_scale_rows(weights), rows, self.picture, width)
        else:
            columns = _signs(heatmap.columns)
            if max(map(len, columns), default=0) > 1:
                columns = [f"{name} " for name in columns]  # else long names would touch
            drawn = grid(_scale_rows(weights), rows, columns, indent=2, width=width)
        largest = weights.amax(-1)
        low, high = f"{float(largest.min()):.2g}", f"{float(largest.max()):.2g}"
        means = f"{high}, the largest weight"
        if low != high:
            means = f"the largest weight of each query, {low} to {high}"
        title = f"{who} of layer {layer + 1}, {TITLES[heatmap.name]}:"
        return f"{title}\n{drawn}\n\n  █ is {means}{about}"

    def html(self, title: str | None = None) -> str:
        """The page as one HTML file."""
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

    def write(self, path: str | os.PathLike[str]) -> None:
        """Writes the view as one page of HTML that needs no other file."""
        atomic.write(Path(path), self.html())

    def figure(
        self,
        path: str | os.PathLike[str],
        name: str | None = None,
        layer: int | None = None,
        head: int | None = None,
        every: bool = False,
    ) -> None:
        """Draws a head, or a whole layers × heads grid, as PNG or SVG by the file's suffix."""
        place = Path(path)
        heatmap, layer, head = self.chosen(name, layer, head)
        atomic.write(place, _draw(heatmap, layer, head, every, place.suffix.lstrip(".")))

    def __str__(self) -> str:
        written = f"{self.source} → {self.text}\n\n" if self.source else f"{self.text}\n\n"
        return written + self.terminal()

    def __repr__(self) -> str:
        """The text for notebooks that show no HTML."""
        return str(self)

    def _repr_html_(self) -> str:
        """For notebooks: the page in a frame, which isolates its styles and names."""
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
"""Content security policy: the page may load nothing from outside."""


@cache
def _file(name: str) -> str:
    return (files("regard.look") / name).read_text(encoding="utf-8")


def _signs(pieces: Sequence[str]) -> list[str]:
    """Replaces ▁ by a space, and the start, the end and line breaks by one character each."""
    signs = {"▁": " ", "</s>": "∎", "<s>": "⊢"}
    return [signs.get(piece, piece).replace("\n", "⏎") for piece in pieces]


def _scale_rows(weights: Float[Tensor, "L S"]) -> Float[Tensor, "L S"]:
    """Divides each row by its largest weight; rows of zeros stay zero."""
    return weights / weights.amax(-1, keepdim=True).clamp(min=torch.finfo(weights.dtype).tiny)


def _patches(
    weights: Float[Tensor, "L S"], names: Sequence[str], picture: Picture, width: int
) -> str:
    """Draws the patches' weights for each query, beside its name."""
    side = max(map(cells, names))
    margin = 2 + side + bool(side)
    lines = []
    for name, row in zip(names, weights):
        drawn = patches(row.unflatten(0, (picture.rows, picture.columns)), width - margin)
        beside = [name, *[""] * (len(drawn) - 1)]
        lines += [f"{fill(f'  {n}', margin)}{line}" for n, line in zip(beside, drawn)]
    return "\n".join(line.rstrip() for line in lines)


def maps(
    records: Recording,
    source: Sequence[str],
    target: Sequence[str] = (),
    written: Sequence[str] | None = None,
    *,
    source_words: Sequence[int] | None = None,
    target_words: Sequence[int] | None = None,
    picture: bool = False,
) -> tuple[Map, ...]:
    """Sorts the recorded attention of one sequence into maps.

    `source` and `target` name the positions that the model reads; `written` names the output of
    each target step. A decoder without an encoder reads its own text, the target.
    """
    groups: dict[Any, list[str]] = {}
    for name in records:
        kind = "encoder"
        if name.startswith("decoder."):
            kind = "cross" if name.endswith("cross") else "decoder"
        groups.setdefault(kind, []).append(name)
    results = []
    for kind, names in groups.items():
        calls = [records[name] for name in names]
        many = _many(records.values(), calls[0])
        mine = kind != "encoder"
        rows, columns = (target if mine else source), (target if kind == "decoder" else source)
        row_words = target_words if mine else source_words
        column_words = read_words(target_words) if kind == "decoder" else source_words
        weights = torch.stack([_weights(call, many) for call in calls]).float().cpu()
        wrote = written if mine else None
        if many:
            places = sampled(calls[0].query.shape[2], CELLS)
            rows, columns = [rows[n] for n in places], _several(columns, weights.shape[-1])
            wrote = None if wrote is None else [wrote[n] for n in places]
        results.append(
            Map(
                kind,
                tuple(names),
                weights,
                tuple(rows),
                tuple(columns),
                None if wrote is None else tuple(wrote),
                None if row_words is None or many else tuple(row_words),
                None if column_words is None or many else tuple(column_words),
                tuple(_habits(call, many) for call in calls),
                picture=picture and kind != "decoder",
                overview=many,
            )
        )
    order = ("encoder", "decoder", "cross")
    return tuple(sorted(results, key=lambda heatmap: order.index(heatmap.name)))


def read_words(written: Sequence[int] | None) -> list[int] | None:
    """The word of each token that a decoder reads, from the words of those that it writes, which
    follow the start token; the start token is a separate word."""
    if written is None:
        return None
    return [0, *(word + 1 if word >= 0 else -1 for word in written[:-1])]


def view_of(
    records: Recording,
    columns: Sequence[str],
    rows: Sequence[str] | None = None,
    *,
    title: str = "What it attended to",
) -> View:
    """The view of any recorded model: of its attention modules over these keys.

    Without `rows`, queries and keys are the same tokens. Modules with other lengths, such as those
    of the other side of an encoder-decoder, are left out; the first sequence of a batch is shown.
    """
    size = len(columns if rows is None else rows), len(columns)
    fitting = {
        name: call
        for name, call in records.items()
        if (call.query.shape[2], call.key.shape[2]) == size
    }
    if not fitting:
        shapes = sorted({(call.query.shape[2], call.key.shape[2]) for call in records.values()})
        raise ValueError(
            f"no attention has {size[0]} queries and {size[1]} keys; there are "
            + (", ".join(f"{L} × {S}" for L, S in shapes) or "none")
        )
    heads = next(iter(fitting.values())).query.shape[1]
    alike = {name: call for name, call in fitting.items() if call.query.shape[1] == heads}
    many = _many(alike.values(), next(iter(alike.values())))
    weights = torch.stack([_weights(call, many) for call in alike.values()]).float().cpu()
    names = list(columns if rows is None else rows)
    if many:
        names = [names[n] for n in sampled(len(names), CELLS)]
        columns = _several(columns, weights.shape[-1])
    heatmap = Map(
        "encoder" if rows is None else "cross",
        tuple(alike),
        weights,
        tuple(names),
        tuple(columns),
        habits=tuple(_habits(call, many) for call in alike.values()),
        overview=many,
    )
    return View(title, (heatmap,))


def _many(records: Iterable[AttentionCall], call: AttentionCall) -> bool:
    """True if all weights exceed `WEIGHTS`, and those of one module have more than `CELLS` rows or
    columns."""
    sizes = (each.query.shape[1] * each.query.shape[2] * each.key.shape[2] for each in records)
    return max(call.query.shape[2], call.key.shape[2]) > CELLS and sum(sizes) > WEIGHTS


def _weights(call: AttentionCall, many: bool) -> Tensor:
    return (call.sample(CELLS) if many else call.weights())[0]


def _habits(call: AttentionCall, many: bool) -> Habits:
    return habits(call, rows=sampled(call.query.shape[2], CELLS) if many else None)


def _several(names: Sequence[str], cells: int) -> list[str]:
    """Names of cells that each stand for several tokens."""
    step = -(-len(names) // cells)
    return [names[n] for n in range(0, len(names), step)]


def _fonts() -> list[str]:
    """matplotlib's default font, and installed fonts for the characters that it lacks."""
    from matplotlib.font_manager import fontManager

    installed = {font.name for font in fontManager.ttflist}
    fallbacks = ("Noto Sans", "Noto Sans CJK JP", "Noto Sans Devanagari", "Noto Sans Thai")
    return ["DejaVu Sans", *(name for name in fallbacks if name in installed)]


def _draw(heatmap: Map, layer: int, head: int | None, every: bool, kind: str) -> bytes:
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

        layers, heads, L, S = heatmap.weights.shape
        if every:
            figure = Figure(figsize=(1.3 * heads + 0.6, 1.3 * layers + 0.6), layout="constrained")
            axes = figure.subplots(layers, heads, squeeze=False)
            full = float(heatmap.weights.max())  # one scale for all
            for n in range(layers):
                for h in range(heads):
                    axes[n][h].imshow(
                        heatmap.weights[n, h].numpy(), cmap="Purples", vmin=0, vmax=full
                    )
                    axes[n][h].set(xticks=[], yticks=[], title=f"{n + 1}.{h + 1}")
        else:
            figure = Figure(figsize=(0.24 * S + 1.2, 0.24 * L + 1), layout="constrained")
            axis = figure.subplots()
            shown = heatmap.weights[layer].mean(0) if head is None else heatmap.weights[layer, head]
            axis.imshow(shown.numpy(), cmap="Purples", vmin=0)
            axis.set_xticks(range(S), _signs(heatmap.columns), rotation=90 if S > 12 else 0)
            axis.set_yticks(range(L), _signs(heatmap.written or heatmap.rows))
            who = "mean of heads" if head is None else f"head {head + 1}"
            axis.set_title(f"layer {layer + 1}, {who}")
            axis.xaxis.tick_top()
        file = io.BytesIO()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph")  # signs that no font here has
            meta = {"Date": None} if kind == "svg" else {"Software": None}
            figure.savefig(file, format=kind, dpi=200, metadata=meta)
    return file.getvalue()
