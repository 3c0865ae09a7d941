"""What the course documents teach, item by item: experiments in families, and what is only stated.

`experiments` imports the families' files, and with them torch. `lines`, the list that `regard lab`
prints, parses the files instead: their texts are literals, and the list appears at once rather
than seconds later, for some twenty lines of code (`_read`).
"""

import ast
import difflib
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from regard.lab.experiment import Experiment, Kind
from regard.lab.place import Place


class Family(NamedTuple):
    """Experiments on one topic, in one file."""

    name: str
    """The name of the file; what one types to run all of them."""
    title: str
    about: str


FAMILIES = (
    Family(
        "exercises",
        "Attention by hand",
        "The worked exercises, and common mistakes in them.",
    ),
    Family(
        "formula",
        "The formula",
        "The inputs of attention, its output, and the order in which they are written.",
    ),
    Family("operations", "Operations", "Every multiplication, division and addition, counted."),
    Family(
        "scores",
        "Scores and their scale",
        "How well a key matches a query, why scores are scaled, and other scores.",
    ),
    Family(
        "sources",
        "Self- and cross-attention",
        "Where queries come from, and where keys and values do.",
    ),
    Family("masks", "Masks", "Which query may attend to which key; rows that may attend to none."),
    Family(
        "temperature",
        "Temperature",
        "β, from the mean of all values to the choice of one.",
    ),
    Family("perturbation", "Perturbation", "What a change of one key does to the output."),
    Family("symmetry", "Order", "Permutations of the tokens: equivariance and invariance."),
    Family(
        "layers",
        "Self-attention as another layer",
        "Identity, permutation, convolution: what one layer of attention can express.",
    ),
    Family("heads", "Heads", "The parts of multi-head attention, and what a head computes."),
    Family("positions", "Positional encodings", "Fixed and learned positions, added or appended."),
    Family(
        "distance",
        "What a position tells",
        "How similar two positions are, and what a model can read from them.",
    ),
    Family("architecture", "Encoder and decoder", "Which part attends to what."),
    Family(
        "sublayers",
        "Around attention",
        "The feed-forward network, the residual sum and the normalisation.",
    ),
    Family("vision", "Vision Transformers", "From pixels to patches, and to the class token."),
    Family("costs", "Costs", "Formulas, and counts taken while a layer runs."),
    Family(
        "pairs",
        "The cost of all pairs",
        "The cost of attention's two products, and what a window saves.",
    ),
    Family("parameters", "Parameters", "The number of parameters of layers and models."),
    Family("reach", "Steps and reach", "Sequential steps, and the receptive field of a layer."),
    Family(
        "training",
        "What training shows",
        "Small models, each trained with five seeds or more: means and standard errors.",
    ),
    Family("ablation", "Ablations", "The same small model with a part and without it."),
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
    """One line of the list of experiments."""

    item: int
    name: str
    place: Place
    taught: str
    kind: Kind


@cache
def lines() -> dict[Family, tuple[Line, ...]]:
    """The list of experiments, parsed from the files without importing them."""
    return {family: tuple(_read(family.name)) for family in FAMILIES}


def names(word: str) -> tuple[str, ...]:
    """The experiments that a word names: one of them, an item by its number, or a family."""
    everything = [line for some in lines().values() for line in some]
    for family, some in lines().items():
        if word == family.name:
            return tuple(line.name for line in some)
    found = tuple(line.name for line in everything if word in (line.name, str(line.item)))
    if not found:
        known = [line.name for line in everything] + [family.name for family in FAMILIES]
        # Names that contain the word come first.
        near = [name for name in known if word and word in name][:5]
        near += [name for name in difflib.get_close_matches(word, known, 5) if name not in near]
        hint = f"did you mean {', '.join(near[:5])}?" if near else "no name is similar;"
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
            case ast.Call(args=positional, keywords=named):
                given = dict(zip(fields, positional)) | {word.arg: word.value for word in named}
                values = {"kind": Experiment.kind, **given}
                yield Line(*(_value(values[field]) for field in Line._fields))


def _value(node: ast.expr | str) -> Any:
    """What an expression stands for: a literal, or a place."""
    match node:
        case ast.Call(func=ast.Name("Place"), args=[document, section]):
            return Place(ast.literal_eval(document), ast.literal_eval(section))
        case str():
            return node
        case _:
            return ast.literal_eval(node)
