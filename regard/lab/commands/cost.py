"""`regard cost`: the cost of layers or of a model, by formula and counted.

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

from regard.lab.commands.parser import Parser, check_output

if TYPE_CHECKING:
    from regard.lab.cost.show import Page
    from regard.model.formula import Config

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
"""Parameters as printed in the papers: Vaswani et al. (2017), Dosovitskiy et al. (2021)."""


MOST = {
    "length": 10**8,
    "batch": 10**6,
    "vocabulary": 10**9,
    "image": 10**6,
    "classes": 10**9,
    "width": 2**16,
    "kernel": 10**5,
    "heads": 2**16,
    "window": 10**6,
}
"""Sizes that are counted; beyond them a count takes hours, or does not fit into 64 bits."""

LAYERS = 10_000
NUMBERS = 2**57
"""Of one tensor, and of all parameters together."""


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
        help="layers, to compare kinds of layers; a model: tiny, base, big, or vit-ti, vit-s, "
        "vit-b, vit-l, vit-h with /PATCH; or the folder of a run or of a model",
    )
    add("--length", type=int, help="sequence length, in tokens (512)")
    add("--batch", type=int, default=1, help="batch size (1)")
    add(
        "--precision",
        choices=("fp32", "bf16", "fp16"),
        default="fp32",
        help="mixed precision (fp32)",
    )
    add("--vocabulary", type=int, help="vocabulary size of tiny, base and big (37,000)")
    add("--image", type=int, help="image size of a ViT, in pixels (224)")
    add("--classes", type=int, help="number of classes of a ViT (1,000)")
    add("--width", type=int, help="layers: model width d (512)")
    add("--kernel", type=int, help="layers: kernel size k of a convolution (3)")
    add("--heads", type=int, help="layers: number of heads h (8)")
    add("--window", type=int, help="layers: window size w, positions to each side (64)")
    add("--plot", metavar="FILE.svg", help="write a plot of the cost over the sequence length")
    form = words.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON, with all digits")
    form.add_argument("--markdown", action="store_true", help="print Markdown")
    return words


def cost(words: Sequence[str]) -> None:
    """Runs `regard cost`."""
    options = parser().parse_args(words)
    check_output(options, "plot")
    for name, most in MOST.items():
        value = getattr(options, name)
        if value is not None and not 1 <= value <= most:
            raise ValueError(f"--{name} ({value}) must be from 1 to {most:,}")
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
        names = ("length", "width", "kernel", "heads", "window", "batch")
        chosen = {name: getattr(options, name) for name in names}
        sizes = Sizes(**{name: value for name, value in chosen.items() if value is not None})
        _check_count(
            "--length, --width and --batch", (sizes.length * sizes.width) ** 2 * sizes.batch
        )
        return layers_page(sizes, options.precision, PRECISIONS[options.precision].itemsize)
    from regard.lab.cost.models import model_cost
    from regard.lab.cost.show import model_page
    from regard.model.embedding import grid
    from regard.model.formula import parameters
    from regard.model.vit import VisionConfig

    name, config = named(options)
    if options.plot is not None and isinstance(config, VisionConfig):
        raise ValueError(
            f"--plot {options.plot}: the length of {name} follows from its image; no plot"
        )
    length = options.length or 512
    if isinstance(config, VisionConfig):
        rows, columns = grid(config.image, config.patch)
        length = rows * columns
    wide = max(4 * config.width, config.feed_forward, getattr(config, "vocabulary", 1))
    _check_count("parameters", parameters(config))
    _check_count("the length, the batch and the vocabulary", options.batch * length * wide)
    total = model_cost(config, options.length or 512, options.batch, options.precision)
    return model_page(name, total, PRINTED.get(name.partition("/")[0]))


def _check_count(what: str, count: int) -> None:
    if count > NUMBERS:
        raise ValueError(f"{what} come to {count:.1e} numbers, too many to be counted; lower them")


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
        side = int(patch) if patch else 14 if size == "h" else 16
        make = getattr(VisionConfig, VISION[size])
        config = make(options.classes or 1000, options.image or 224, side)
        return f"vit-{size}/{side}", config
    folder = Path(what)
    if not folder.exists():
        raise ValueError(
            f"{what} is neither a folder nor a known name; choose from layers, "
            f"{', '.join((*TEXT, *_VISION_NAMES))}, or the folder of a run"
        )
    return what, _config(options, folder)


_VISION_NAMES = tuple(f"vit-{size}" for size in VISION)


def _config(options: argparse.Namespace, folder: Path) -> "Config":
    """The config in a folder; the weights are not read."""
    from regard.checkpoint import CONFIG, listed_parts
    from regard.config import from_json, read
    from regard.model.classifier import ClassifierConfig
    from regard.model.encoder import EncoderConfig
    from regard.model.language import LanguageConfig
    from regard.model.transformer import TransformerConfig
    from regard.model.vit import VisionConfig
    from regard.task.folder import model_folder

    kinds: dict[str, type[Config]] = {
        "Transformer": TransformerConfig,
        "VisionTransformer": VisionConfig,
        "LanguageModel": LanguageConfig,
        "TextClassifier": ClassifierConfig,
        "TextEncoder": EncoderConfig,
    }
    path = model_folder(folder) / CONFIG
    saved = read(path)
    kind = saved.get("kind") if isinstance(saved, dict) else None
    if not isinstance(saved, dict) or kind not in kinds:
        raise ValueError(
            f"{path} is not the config of a Regard model: its kind ({kind!r}) must be "
            f"{', '.join(kinds)}; convert models of other libraries with `regard import`"
        )
    if parts := saved.get("parts"):
        raise ValueError(
            f"{path} is of a model with parts that its config does not name: {listed_parts(parts)};"
            " what they cost is not known"
        )
    config = from_json(kinds[str(kind)], saved["model"], str(path), "model")
    for name in ("layers", "encoder_layers", "decoder_layers"):
        if getattr(config, name, 0) > LAYERS:
            raise ValueError(f"{path}: {name} must be at most {LAYERS:,} to be counted")
    _allow(options, str(folder), *(() if isinstance(config, VisionConfig) else ("length",)))
    return config


def _allow(options: argparse.Namespace, what: str, *names: str) -> None:
    """Refuses options that make no difference."""
    every = ("length", "vocabulary", "image", "classes", "width", "kernel", "heads", "window")
    for name in every:
        if getattr(options, name) is not None and name not in names:
            takes = ", ".join(f"--{each}" for each in (*names, "batch", "precision"))
            raise ValueError(f"--{name} makes no difference to {what}, which takes {takes}")
