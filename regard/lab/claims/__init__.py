"""What the course documents teach, item by item: experiments in families, and what is only stated.

An experiment's words are literals in its family's file. `lines` reads them there, which takes no
time; `experiments` imports the files, and with them torch.
"""

import ast
import difflib
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from regard.lab.experiment import Experiment


class Family(NamedTuple):
    """Experiments about one thing, in a file of their own."""

    name: str
    """The file's, and what one types for all of them."""
    title: str
    about: str


FAMILIES = (
    Family(
        "exercises",
        "Attention by hand",
        "The worked exercises, and the slips that are easily made in them.",
    ),
    Family(
        "formula",
        "The formula",
        "What goes into attention, what comes out, and in which order it is written.",
    ),
    Family("operations", "Operations", "Every multiplication, division and addition, counted."),
    Family(
        "scores",
        "Scores and their scale",
        "How well a key fits, why that is scaled, and what else may serve as a score.",
    ),
    Family(
        "sources",
        "Self- and cross-attention",
        "Who asks, who answers, and that they need not be alike.",
    ),
    Family("masks", "Masks", "Who may attend to what, and what becomes of who may not."),
    Family("temperature", "Temperature", "From the mean of all values to the choice of one."),
    Family("perturbation", "Perturbation", "What a change of one key does to the output."),
    Family("symmetry", "Order", "What a shuffle of the tokens changes, and what it leaves alone."),
    Family(
        "layers",
        "Self-attention as another layer",
        "Identity, permutation, convolution: what one layer of attention can be.",
    ),
    Family("heads", "Heads", "What multi-head attention is made of, and what a head is like."),
    Family("positions", "Positional encodings", "In which form a token is told where it stands."),
    Family(
        "distance",
        "What a position tells",
        "How alike two positions are, what reads them, and how far they carry.",
    ),
    Family("architecture", "Encoder and decoder", "Which part reads what."),
    Family(
        "sublayers",
        "Around attention",
        "The feed-forward network, the residual sum and the normalisation.",
    ),
    Family("vision", "Vision Transformers", "From pixels to patches, and on to the class token."),
    Family("costs", "Costs", "Formulas beside what is counted while a layer runs."),
    Family(
        "pairs",
        "The price of all pairs",
        "What attention's two products cost, and what a window saves.",
    ),
    Family("parameters", "Parameters", "How many numbers layers and models learn."),
    Family("reach", "Steps and reach", "What has to wait for what, and how far a layer sees."),
    Family(
        "training", "What training shows", "Small models, three seeds or more each, and a margin."
    ),
    Family("ablation", "What a part is worth", "The same small model with it and without it."),
)
"""In the order in which one would read them."""


@cache
def by_family() -> dict[str, tuple[Experiment, ...]]:
    """The experiments of each family, by its name."""
    return {
        family.name: import_module(f"{__name__}.{family.name}").EXPERIMENTS for family in FAMILIES
    }


def experiments() -> tuple[Experiment, ...]:
    """Every experiment of every family."""
    return tuple(e for family in FAMILIES for e in by_family()[family.name])


class Line(NamedTuple):
    """What the list of experiments says of one."""

    item: int
    name: str
    taught: str


@cache
def lines() -> dict[Family, tuple[Line, ...]]:
    """The list of experiments, read from the files without importing them."""
    return {family: tuple(_read(family.name)) for family in FAMILIES}


def names(word: str) -> tuple[str, ...]:
    """The experiments that a word asks for: a name, an item's number, or a family."""
    everything = [line for some in lines().values() for line in some]
    for family, some in lines().items():
        if word == family.name:
            return tuple(line.name for line in some)
    found = tuple(line.name for line in everything if word in (line.name, str(line.item)))
    if not found:
        known = [line.name for line in everything] + [family.name for family in FAMILIES]
        # Who remembers a part of a name wants those that have it.
        near = [name for name in known if word and word in name][:5]
        near += [name for name in difflib.get_close_matches(word, known, 5) if name not in near]
        hint = f"did you mean {', '.join(near[:5])}?" if near else "no name is like it;"
        raise ValueError(f"no experiment {word!r}: {hint} `regard lab` lists all of them")
    return found


def find(word: str) -> tuple[Experiment, ...]:
    """The experiments of `names`."""
    found = names(word)
    return tuple(experiment for experiment in experiments() if experiment.name in found)


def _read(file: str) -> Iterator[Line]:
    """The lines of a file's EXPERIMENTS."""
    tree = ast.parse(Path(__file__).with_name(f"{file}.py").read_text(encoding="utf-8"))
    fields = list(Experiment.__dataclass_fields__)
    for statement in tree.body:
        match statement:
            case ast.AnnAssign(target=ast.Name("EXPERIMENTS"), value=ast.Tuple(elts=entries)):
                break
    else:
        raise ValueError(f"{file}.py has no tuple EXPERIMENTS: tuple[Experiment, ...] = (…)")
    for entry in entries:
        match entry:
            case ast.Call(args=given, keywords=named):
                values = dict(zip(fields, given)) | {word.arg: word.value for word in named}
                yield Line(*(ast.literal_eval(values[field]) for field in Line._fields))
