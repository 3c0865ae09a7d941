"""Captured graphs find what the plain step finds."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from regard.decode.beam import beam, power
from regard.decode.greedy import greedy
from regard.decode.step import plain_translation, translation
from regard.model.transformer import Transformer, TransformerConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]

END, MOST, N = 2, 19, 97
BASE = replace(TransformerConfig.tiny(N), width=64, heads=4, feed_forward=83, dropout=0.0)
KINDS: dict[str, dict[str, Any]] = {
    "the paper's": {},
    "pre-norm": {"norm": "pre", "activation": "gelu"},
    "rotary": {"position": "rotary", "activation": "silu"},
    "learned": {"position": "learned", "output_bias": True},
}


def made(**settings: Any) -> Transformer:
    torch.manual_seed(0)
    model = Transformer(replace(BASE, **settings)).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.2)
    return model.cuda()


def found(model: Transformer, source: Any, plain: bool, width: int, **limits: Any) -> Any:
    ids, lengths = source
    if plain:
        step, state = plain_translation(model, ids, lengths, MOST + 1, attention=False)
    else:
        step, state = translation(model, ids, lengths, capacity=MOST + 1)
        assert type(state).__name__ == "GraphReading"
    given = {"end": END, "max_length": MOST} | limits
    prompts = [[1]] * len(ids)
    if width == 1:
        return [[one] for one in greedy(step, state, prompts, **given)]
    return beam(step, state, prompts, width=width, penalty=power(0.7), **given)


@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_hypotheses(kind: str, width: int) -> None:
    model = made(**KINDS[kind])
    for sentences in (3, 5, 3):  # two buckets, and the first one again
        lengths = torch.randint(1, 12, (sentences,))
        lengths[0] = 11
        source = torch.randint(3, N, (sentences, 11)).cuda(), lengths
        limits: dict[str, Any] = {"banned": [0, 7], "min_length": 2}
        if width > 1:
            limits["n_best"] = 2
        ours = found(model, source, False, width, **limits)
        theirs = found(model, source, True, width, **limits)
        for one, other in zip(ours, theirs):
            assert [h.tokens for h in one] == [h.tokens for h in other]
            for a, b in zip(one, other):
                assert a.score == pytest.approx(b.score, abs=1e-3)


def test_weights_that_changed_are_seen() -> None:
    model = made()
    source = torch.randint(3, N, (3, 11)).cuda(), None
    found(model, source, False, 1)
    with torch.no_grad():
        model.decoder.blocks[0].attention.query.weight.mul_(-3)
    ours, theirs = (found(model, source, plain, 1) for plain in (False, True))
    assert [one[0].tokens for one in ours] == [one[0].tokens for one in theirs]


def test_a_prompt_goes_step_by_step() -> None:
    model = made()
    ids = torch.randint(3, N, (2, 11)).cuda()
    step, state = translation(model, ids, capacity=MOST)
    one = greedy(step, state, [[1, 5], [1, 5, 6]], end=END, max_length=7)
    step, state = plain_translation(model, ids, None, MOST, attention=False)
    other = greedy(step, state, [[1, 5], [1, 5, 6]], end=END, max_length=7)
    assert [h.tokens for h in one] == [h.tokens for h in other]
