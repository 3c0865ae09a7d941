"""`regard cost`: what a layer or a model costs, by formula and counted.

regard cost layers --length 512 --width 512 --kernel 3
regard cost base --length 512
regard cost vit-b/16 --image 384
regard cost RUN
"""

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regard.lab.commands.parser import Parser

if TYPE_CHECKING:
    from regard.lab.cost.models import Config
    from regard.lab.cost.show import Page

EXAMPLE = """\
For example:
  regard cost layers --length 512 --width 512 --kernel 3
  regard cost base --length 512
  regard cost big --batch 32 --precision bf16 --json
  regard cost vit-b/16 --image 384
  regard cost RUN
"""

WIDTH = 140
"""Columns of tables that go to a file."""

TEXT = ("tiny", "base", "big")
VISION = {"ti": "tiny", "s": "small", "b": "base", "l": "large", "h": "huge"}
PRINTED = {"base": 65e6, "big": 213e6, "vit-b": 86e6, "vit-l": 307e6, "vit-h": 632e6}
"""Parameters as the papers print them: Vaswani et al. (2017), Dosovitskiy et al. (2021)."""


def parser() -> argparse.ArgumentParser:
    words = Parser(
        "cost",
        "Parameters, multiply-adds, additions, memory, sequential steps and the longest path:\n"
        "by formula, and counted while the layer or the model runs, fused attention included.",
        EXAMPLE,
    )
    add = words.add_argument
    add(
        "what",
        metavar="WHAT",
        help="layers; tiny, base or big; vit-ti, vit-s, vit-b, vit-l or vit-h, with /PATCH; or the "
        "folder of a run or of a model",
    )
    add("--length", type=int, help="positions of a sequence, tokens of a text (512)")
    add("--batch", type=int, default=1, help="sequences or images at once (1)")
    add("--precision", choices=("fp32", "bf16", "fp16"), default="fp32", help="of products (fp32)")
    add("--vocabulary", type=int, help="tokens of tiny, base and big (37,000)")
    add("--image", type=int, help="pixels along the side of a ViT's image (224)")
    add("--classes", type=int, help="of a ViT (1,000)")
    add("--width", type=int, help="d, of layers (512)")
    add("--kernel", type=int, help="k, taps of a convolution, of layers (3)")
    add("--heads", type=int, help="h, of layers (8)")
    add("--window", type=int, help="w, positions to each side, of layers (64)")
    add("--plot", metavar="FILE.svg", help="draws how the cost grows with the length")
    kind = words.add_mutually_exclusive_group()
    kind.add_argument("--json", action="store_true", help="as JSON, with all digits")
    kind.add_argument("--markdown", action="store_true", help="as Markdown")
    return words


def cost(words: Sequence[str]) -> None:
    """Carries out `regard cost`."""
    options = parser().parse_args(words)
    for name in ("length", "batch", "vocabulary", "image", "classes", "width", "kernel", "heads"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name} ({value}) must be 1 or more")
    page = _page(options)
    if options.plot is not None:
        from regard.lab.report import write_plots

        written = write_plots(Path(options.plot), page.plots)
        if not options.json:
            print(written)
    if options.json:
        print(json.dumps(page.data, indent=1))
    elif options.markdown:
        from regard.lab.cost.show import markdown

        print(markdown(page))
    else:
        from regard.lab.cost.show import print_page
        from regard.lab.terminal import printing

        with printing(WIDTH) as console:
            print_page(page, console)


def _page(options: argparse.Namespace) -> "Page":
    if options.what == "layers":
        from regard.lab.cost.layers import Sizes
        from regard.lab.cost.models import PRECISIONS
        from regard.lab.cost.show import layers_page

        _allow(options, "layers", "length", "width", "kernel", "heads", "window")
        given = ("length", "width", "kernel", "heads", "window", "batch")
        chosen = {name: getattr(options, name) for name in given}
        sizes = Sizes(**{name: value for name, value in chosen.items() if value is not None})
        return layers_page(sizes, options.precision, PRECISIONS[options.precision].itemsize)
    from regard.lab.cost.models import model_cost
    from regard.lab.cost.show import model_page
    from regard.model.vit import VisionConfig

    name, config = named(options)
    if options.plot is not None and isinstance(config, VisionConfig):
        raise ValueError(
            f"--plot {options.plot}: the length of {name} follows from its image; nothing to draw"
        )
    found = model_cost(config, options.length or 512, options.batch, options.precision)
    return model_page(name, found, PRINTED.get(name.partition("/")[0]))


def named(options: argparse.Namespace) -> tuple[str, "Config"]:
    """The name to show, and the config."""
    from regard.model.transformer import TransformerConfig
    from regard.model.vit import VisionConfig

    what = options.what
    if what in TEXT:
        _allow(options, what, "length", "vocabulary")
        make: Any = getattr(TransformerConfig, what)
        return what, make(options.vocabulary or 37_000)
    if parts := re.fullmatch(r"vit-([a-z]+)(?:/(\d+))?", what):
        size, patch = parts.groups()
        if size not in VISION:
            raise ValueError(f"{what} is unknown; choose from {', '.join(_VISION_NAMES)}")
        _allow(options, what, "image", "classes")
        cut = int(patch) if patch else 14 if size == "h" else 16
        make = getattr(VisionConfig, VISION[size])
        config = make(options.classes or 1000, options.image or 224, cut)
        return f"vit-{size}/{cut}", config
    folder = Path(what)
    if not folder.exists():
        raise ValueError(
            f"{what} is no folder, and no model that is known by name: choose from layers, "
            f"{', '.join((*TEXT, *_VISION_NAMES))}, or the folder of a run"
        )
    return what, _config(options, folder)


_VISION_NAMES = tuple(f"vit-{size}" for size in VISION)


def _config(options: argparse.Namespace, folder: Path) -> "Config":
    """The config in a folder; the weights are not read."""
    from regard.checkpoint import CONFIG
    from regard.config import from_json, loads
    from regard.model.classifier import ClassifierConfig
    from regard.model.language import LanguageConfig
    from regard.model.transformer import TransformerConfig
    from regard.model.vit import VisionConfig
    from regard.task.folder import model_folder

    kinds: dict[str, type[Config]] = {
        "Transformer": TransformerConfig,
        "VisionTransformer": VisionConfig,
        "LanguageModel": LanguageConfig,
        "TextClassifier": ClassifierConfig,
    }
    path = model_folder(folder) / CONFIG
    said = loads(path.read_bytes(), str(path))
    kind = said.get("kind") if isinstance(said, dict) else None
    if not isinstance(said, dict) or kind not in kinds:
        raise ValueError(
            f"{path} is not a Regard model's: its kind ({kind!r}) must be {', '.join(kinds)}; "
            "other libraries' models come in through `regard import`"
        )
    config = from_json(kinds[str(kind)], said["model"], str(path), "model")
    _allow(options, str(folder), *(() if isinstance(config, VisionConfig) else ("length",)))
    return config


def _allow(options: argparse.Namespace, what: str, *names: str) -> None:
    """Refuses settings that have nothing to do with what is asked for."""
    every = ("length", "vocabulary", "image", "classes", "width", "kernel", "heads", "window")
    for name in every:
        if getattr(options, name) is not None and name not in names:
            takes = ", ".join(f"--{each}" for each in (*names, "batch", "precision"))
            raise ValueError(f"--{name} says nothing about {what}, which takes {takes}")
