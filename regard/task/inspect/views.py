"""The view of a text or an image by any model, and the numbers of one of its heads."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from regard.look.effect import attentions_of, check_head
from regard.look.record import record
from regard.look.view import View
from regard.task.inspect.changes import NONE, Changes
from regard.task.inspect.images import inspect_classifier, read
from regard.task.inspect.texts import inspect_encoder, inspect_generator, inspect_labeler
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
    """The view of a text or an image, according to the model's task."""
    from regard.task.classify import Classifier
    from regard.task.encoder import TextEmbedder
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
            return inspect_classifier(predictor, image, changes, effect=effect)
        case Reader():
            return read(predictor, image, changes, effect=effect)
        case Generator():
            return inspect_generator(predictor, str(text), changes, effect=effect)
        case Labeler():
            return inspect_labeler(predictor, str(text), changes, effect=effect)
        case TextEmbedder():
            return inspect_encoder(predictor, str(text), changes, effect=effect)
        case Translator():
            if predictor.head is None:
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

    Changes are made before anything is recorded, so that the numbers are those in use.
    """
    check_head(attentions_of(predictor.model), attention, head)
    inside, forced = replace(changes, forced=()), Changes(forced=changes.forced)
    with inside.made(predictor.model), record(predictor.model, lambda n: n == attention) as records:
        if isinstance(predictor, Translator):
            whole = translated(predictor, text, forced, beams=beams).view
        else:
            whole = view(predictor, text, changes=forced)
    call = records[attention]
    heads = call.query.shape[1]
    if call.core is not None:
        raise ValueError(
            f"{attention}.core ({type(call.core).__name__}) has weights of its own, but "
            "attention by hand computes a softmax"
        )
    if call.bias is not None:
        raise ValueError(
            f"{attention} adds a bias to its scores, as linear-bias positions do, which attention "
            "by hand has no step for"
        )
    shown = next(group for group in whole.maps if attention in group.layers)
    L, S, K = call.query.shape[2], call.key.shape[2], call.query.shape[3]
    key_head = head // (heads // call.key.shape[1])
    value = call.value
    assert value is not None
    allowed = None
    if call.mask is not None:
        allowed = call.mask.tensor(L, S)[0].expand(heads, L, S)[head].int().tolist()
    beta = call.beta[head] if isinstance(call.beta, Tensor) else call.beta
    return {
        "query": call.query[0, head].double().tolist(),
        "key": call.key[0, key_head].double().tolist(),
        "value": value[0, key_head].double().tolist(),
        "beta": K**-0.5 if beta is None else float(beta),
        "allowed": allowed,
        "rows": list(shown.written or shown.rows),
        "columns": list(shown.columns),
        "weights": call.weights()[0, head].double().tolist(),
    }
