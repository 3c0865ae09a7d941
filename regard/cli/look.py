"""`regard look`: what a model attended to, as a page, a figure, or in the terminal."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from regard.cli.arguments import with_folder


@dataclass(frozen=True, kw_only=True)
class Look:
    """Shows what a trained model attended to while it read a text or saw an image.

    A heat map in the terminal; with -o a page that opens from disk and fetches nothing, with --png
    or --svg a figure. Beside attention the page has its effect: what hiding each word or patch, and
    switching each head off, does to the output.
    """

    text: str | None = None
    """What a translator, a language model or a text classifier reads."""
    image: str | None = None
    """The picture that a classifier or a reader sees: a file."""
    out: Annotated[str | None, tyro.conf.arg(aliases=["-o"])] = None
    """Write a page into this file: all layers and heads, words, ranked heads, and effects."""
    png: str | None = None
    """Draw a figure into this file."""
    svg: str | None = None
    """The same, to be scaled and edited."""
    map: Literal["encoder", "decoder", "cross"] | None = None
    """Which attention the terminal and the figures show; by default cross-attention, where there is
    one."""
    layer: int | None = None
    """Its layer, counted from 1; by default that of the head that aligns best, or the last."""
    head: int | None = None
    """Its head, counted from 1; by default the one that aligns words best, or else the mean of
    all."""
    grid: bool = False
    """Figures show all layers and heads, small."""
    device: str = "auto"
    """Device: auto is a GPU where there is one; or cpu, cuda, cuda:1."""

    def __post_init__(self) -> None:
        if self.text is not None and not self.text.strip():
            raise ValueError('text ("") must have a word in it')
        for name in ("layer", "head"):
            number = getattr(self, name)
            if number is not None and number < 1:
                raise ValueError(f"{name} ({number}) is counted from 1")
        for name in ("png", "svg"):
            path = getattr(self, name)
            if path is not None and not path.endswith(f".{name}"):
                raise ValueError(f"{name} ({path}) must be a file that ends in .{name}")


def look(words: Sequence[str]) -> int:
    folder, options = with_folder("look", Look, Look(), words)
    from regard.machine.device import use
    from regard.task.inspect.views import view
    from regard.task.load import load

    model = load(folder, device=use(options.device))
    seen = view(model, options.text, options.image, effect=options.out is not None)
    chosen = (options.map, _from_0(options.layer), _from_0(options.head))
    drawn = seen.terminal(*chosen)  # what is wrong with these is said before anything else
    if seen.text:
        print(f"{seen.source} → {seen.text}\n" if seen.source else f"{seen.text}\n")
    if seen.labels:
        likely = ", ".join(
            f"{name.replace('▁', ' ').strip()} {p:.3f}" for name, p in seen.labels[:5]
        )
        print(f"{seen.answers}: {likely}\n")
    print(drawn)
    written = []
    if options.out is not None:
        seen.write(Path(options.out))
        written.append(options.out)
    for path in filter(None, (options.png, options.svg)):
        seen.figure(Path(path), *chosen, every=options.grid)
        written.append(path)
    if written:
        print(f"\nWritten: {', '.join(written)}")
    return 0


def _from_0(number: int | None) -> int | None:
    return None if number is None else number - 1
