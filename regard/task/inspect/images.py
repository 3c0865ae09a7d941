"""Views of the attention of image classifiers and of readers."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from regard.decode.search.hypothesis import Hypothesis
from regard.look.effect import changed, effect_of_units, log_p
from regard.look.record import record
from regard.look.view import Effect, Picture, View, maps
from regard.model.vit import VisionTransformer
from regard.task.inspect.changes import NONE, UNITS, Changes, ids_of, with_head_effects
from regard.task.search import find, open_reading

if TYPE_CHECKING:
    from regard.task.classify import Classifier
    from regard.task.read import Reader


@torch.inference_mode()
def inspect_classifier(
    classifier: "Classifier", image: Any, changes: Changes = NONE, *, effect: bool = False
) -> View:
    """The classes of an image, with patches hidden or heads changed, and the patches' attention."""
    model = classifier.model
    pixels = torch.tensor(classifier.preparation.pixels(image))
    weight = next(model.parameters())
    x = classifier.preparation.inputs(pixels[None], weight)
    first = 0 if model.class_token is None else 1
    patches = math.prod(model.patches.grid)
    for place in changes.hidden:
        if not first <= place < first + patches:
            raise ValueError(
                f"hidden ({place}) must be a patch, from {first} to {first + patches - 1}"
            )
    hidden = [place - first for place in changes.hidden]
    with replace(changes, hidden=()).made(model):
        p = without_patches(model, x, [hidden]).softmax(-1)[0].cpu()
        with changes.made(model), record(model) as records:
            model.features(x)
    rows, columns = model.patches.grid
    names = ["class"] * first + [
        f"{n // columns + 1},{n % columns + 1}" for n in range(rows * columns)
    ]
    order = p.argsort(descending=True).tolist()
    picture = Picture(pixels, rows, columns, first)
    view = View(
        title="What the patches attended to",
        maps=maps(records, names, picture=True),
        text=classifier.labels[order[0]],
        labels=tuple((classifier.labels[n], float(p[n])) for n in order),
        answers="The label",
        picture=picture,
        more={"positions": _position_similarity(model)},
    )
    if not effect:
        return view
    units = [[n] for n in range(rows * columns)][:UNITS]
    best = order[0]
    with replace(changes, hidden=()).made(model):
        whole = without_patches(model, x, [[]]).log_softmax(-1)[:, best]
        falls = whole - without_patches(model, x, units).log_softmax(-1)[:, best]

        def answer() -> Tensor:
            return without_patches(model, x, [hidden]).log_softmax(-1)[0, best]

        view = with_head_effects(model, view, answer)
    places = tuple((unit[0] + first,) for unit in units)
    parts = tuple(names[first:][: len(units)])
    return replace(view, effect=Effect(parts, places, falls[:, None].cpu(), (view.text,)))


def without_patches(
    model: VisionTransformer, x: Float[Tensor, "1 C Y X"], units: Sequence[Sequence[int]]
) -> Float[Tensor, "U N"]:
    """Logits of one image with each of these sets of patches hidden.

    Hidden patches receive no attention, and a mean over patches leaves them out.
    """
    first = 0 if model.class_token is None else 1
    rows, columns = model.patches.grid
    hidden = torch.zeros(len(units), first + rows * columns, dtype=torch.bool, device=x.device)
    for number, unit in enumerate(units):
        hidden[number, [first + n for n in unit]] = True
    with changed(model, hidden=hidden):
        states = model.features(x.expand(len(units), *x.shape[1:]))
    if model.config.pool == "mean":
        visible = (~hidden[:, first:, None]).to(states.dtype)
        pooled = (states[:, first:] * visible).sum(1) / visible.sum(1).clamp(min=1)
    else:
        pooled = states[:, 0]
    return model.head(pooled if model.norm is None else model.norm(pooled)).float()


def _position_similarity(model: VisionTransformer) -> list[list[float]] | None:
    """The cosine similarity of all patches' positions, if positions are added to patches."""
    position = model.patches.position
    if position is None:
        return None
    rows, columns = model.patches.grid
    weight = next(model.parameters())
    zero = torch.zeros(
        1, rows * columns, model.config.width, device=weight.device, dtype=weight.dtype
    )
    try:
        vectors = torch.nn.functional.normalize((position(zero) - zero)[0].float(), dim=-1)
    except (TypeError, ValueError):
        return None
    return (vectors @ vectors.mT).cpu().tolist()


@torch.inference_mode()
def read(reader: "Reader", image: Any, changes: Changes = NONE, *, effect: bool = False) -> View:
    """The text of an image, and the decoder's attention for each character."""
    model, settings = reader.model, reader.search
    pixels = torch.tensor(reader.preparation.pixels(image))
    x = reader.preparation.inputs(pixels[None], model.target.table.weight)
    with changes.made(model):
        hypotheses = _read_hypotheses(model, x, settings)
        tokens = hypotheses[0].tokens if hypotheses else []
        with record(model) as records:
            model(x, ids_of([settings.start, *tokens], model))
        scores = log_p(model, x, tokens, settings.start, settings.end)[0]
    rows, columns = reader.grid
    names = [f"{n // columns + 1},{n % columns + 1}" for n in range(rows * columns)]
    output = reader.tokenizer.pieces([*tokens, settings.end])
    view = View(
        title="Where it looked while it read",
        maps=maps(
            records, names, reader.tokenizer.pieces([settings.start, *tokens]), output, picture=True
        ),
        text=reader.tokenizer.decode(tokens),
        tokens=tuple(zip(output, scores.exp().tolist())),
        picture=Picture(pixels, rows, columns),
        more={"logP": float(scores.sum())},
    )
    if not effect:
        return view
    units = [(n,) for n in range(rows * columns)][:UNITS]
    with replace(changes, hidden=()).made(model):
        falls = effect_of_units(model, x, tokens, units, settings.start, settings.end)

    def answer() -> Tensor:
        return log_p(model, x, tokens, settings.start, settings.end).sum()

    with changes.made(model):
        view = with_head_effects(model, view, answer)
    return replace(
        view, effect=Effect(tuple(names[: len(units)]), tuple(units), falls, tuple(output))
    )


def _read_hypotheses(model: Any, x: Tensor, settings: Any) -> list[Hypothesis]:
    def open_session(**hints: int) -> Any:
        return open_reading(model, x, None, **hints)

    return find(open_session, 1, settings)[0]
