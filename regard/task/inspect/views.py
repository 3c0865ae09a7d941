"""The view of a text or an image by any model, and the numbers of one of its heads."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from regard.look.effect import attentions_of, check_head
from regard.look.record import record
from regard.look.view import View
from regard.task.inspect.changes import NONE, Changes
from regard.task.inspect.images import classified, read
from regard.task.inspect.texts import filled, generated, labelled
from regard.task.inspect.translation import translated
from regard.task.translator import Translator


def view(
    predictor: Any,
    text: str | None = None,
    image: Any = None,
    changes: Changes = NONE,
    *,
    effect: bool = False,
) -> View:
    """The view of a text or an image, by whatever a model was trained for."""
    from regard.task.classify import Classifier
    from regard.task.encoder import TrainedEncoder
    from regard.task.label import Labeler
    from regard.task.language import Generator
    from regard.task.read import Reader

    sees = isinstance(predictor, Classifier | Reader)
    if sees and image is None:
        raise ValueError("this model sees images; give one: --image picture.png")
    if not sees and text is None:
        raise ValueError('this model reads text; give some: --text "…"')
    if not attentions_of(predictor.model):
        mixer = getattr(predictor.model.config, "mixer", "another")
        raise ValueError(f"this model has no attention to look at: its mixer is {mixer}")
    match predictor:
        case Classifier():
            return classified(predictor, image, changes, effect=effect)
        case Reader():
            return read(predictor, image, changes, effect=effect)
        case Generator():
            return generated(predictor, str(text), changes, effect=effect)
        case Labeler():
            return labelled(predictor, str(text), changes, effect=effect)
        case TrainedEncoder():
            return filled(predictor, str(text), changes, effect=effect)
        case Translator():
            if predictor.found is None:
                predictor.find_head([str(text)])
            return translated(predictor, str(text), changes, effect=effect).view
    raise ValueError(f"a {type(predictor).__name__} cannot be looked into")


@torch.inference_mode()
def numbers_of_head(
    predictor: Any,
    text: str,
    attention: str,
    head: int,
    changes: Changes = NONE,
    *,
    beams: int | None = None,
) -> dict[str, Any]:
    """Queries, keys and values of one head while a text was read, for attention by hand.

    What is changed is changed before anything is recorded, so that the numbers are those in use.
    """
    check_head(attentions_of(predictor.model), attention, head)
    inside, forced = replace(changes, forced=()), Changes(forced=changes.forced)
    with inside.made(predictor.model), record(predictor.model, lambda n: n == attention) as seen:
        if isinstance(predictor, Translator):
            found = translated(predictor, text, forced, beams=beams).view
        else:
            found = view(predictor, text, changes=forced)
    asked = seen[attention]
    heads = asked.query.shape[1]
    if asked.core is not None:
        raise ValueError(
            f"{attention}.core ({type(asked.core).__name__}) has weights of its own, but "
            "attention by hand computes a softmax"
        )
    if asked.bias is not None:
        raise ValueError(
            f"{attention} adds a bias to its scores, as linear-bias positions do, which attention "
            "by hand has no step for"
        )
    one = next(one for one in found.maps if attention in one.layers)
    L, S, K = asked.query.shape[2], asked.key.shape[2], asked.query.shape[3]
    group = head // (heads // asked.key.shape[1])
    value = asked.value
    assert value is not None
    allowed = None
    if asked.mask is not None:
        allowed = asked.mask.tensor(L, S)[0].expand(heads, L, S)[head].int().tolist()
    beta = asked.beta[head] if isinstance(asked.beta, Tensor) else asked.beta
    return {
        "query": asked.query[0, head].double().tolist(),
        "key": asked.key[0, group].double().tolist(),
        "value": value[0, group].double().tolist(),
        "beta": K**-0.5 if beta is None else float(beta),
        "allowed": allowed,
        "rows": list(one.written or one.rows),
        "columns": list(one.columns),
        "weights": asked.weights()[0, head].double().tolist(),
    }
