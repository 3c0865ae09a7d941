"""Captured graphs find what the plain step finds.

The kernel of a search also runs without a GPU, where there is Triton and TRITON_INTERPRET=1.
"""

import math
import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from regard.decode.engine.eager import plain_translation, translation
from regard.decode.search import topk as choice
from regard.decode.search.beam import Beams, beam, gnmt, hypotheses, power
from regard.decode.search.constraints import Limits
from regard.decode.search.greedy import greedy
from regard.model.transformer import Transformer, TransformerConfig

interpreted = os.environ.get("TRITON_INTERPRET") == "1"
kernels = pytest.mark.skipif(
    not torch.cuda.is_available() and not interpreted, reason="needs CUDA, or Triton's interpreter"
)

END, MOST, N = 2, 19, 97
BASE = replace(TransformerConfig.tiny(N), width=64, heads=4, feed_forward=83, dropout=0.0)
KINDS: dict[str, dict[str, Any]] = {
    "the paper's": {},
    "pre-norm": {"norm": "pre", "activation": "gelu"},
    "rotary": {"position": "rotary", "activation": "silu"},
    "learned": {"position": "learned"},
}


def made(end: float = 0.0, **settings: Any) -> Transformer:
    """With so much more for the end sign than for others."""
    torch.manual_seed(0)
    model = Transformer(replace(BASE, **settings | {"output_bias": True})).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.2)
    model.output.bias.data[END] = end
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


@pytest.mark.gpu
@pytest.mark.parametrize("end", [0.0, 3.0])
@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_hypotheses(kind: str, width: int, end: float) -> None:
    model = made(end, **KINDS[kind])
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


@pytest.mark.gpu
def test_weights_that_changed_are_seen() -> None:
    model = made()
    source = torch.randint(3, N, (3, 11)).cuda(), None
    found(model, source, False, 1)
    with torch.no_grad():
        model.decoder.blocks[0].attention.query.weight.mul_(-3)
    ours, theirs = (found(model, source, plain, 1) for plain in (False, True))
    assert [one[0].tokens for one in ours] == [one[0].tokens for one in theirs]


@pytest.mark.gpu
def test_a_prompt_goes_step_by_step() -> None:
    model = made()
    ids = torch.randint(3, N, (2, 11)).cuda()
    step, state = translation(model, ids, capacity=MOST)
    one = greedy(step, state, [[1, 5], [1, 5, 6]], end=END, max_length=7)
    step, state = plain_translation(model, ids, None, MOST, attention=False)
    other = greedy(step, state, [[1, 5], [1, 5, 6]], end=END, max_length=7)
    assert [h.tokens for h in one] == [h.tokens for h in other]


# One step of the search, by the kernel and by Beams


def stable(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """`choice.best` of which all agree, also on equals."""
    found = logits.float().log_softmax(-1).sort(dim=-1, descending=True, stable=True)
    values, tokens = (x[:, :count].contiguous() for x in found)
    return values, tokens


def drawn(kind: str, rows: int, vocabulary: int) -> Tensor:
    logits = 3 * torch.randn(rows, vocabulary)
    match kind:
        case "ties":
            return logits.round()
        case "all alike":
            return torch.zeros_like(logits)
        case "impossible":
            logits[torch.rand_like(logits) < 0.4] = -math.inf
            logits[:, -1] = 0.0
        case "ends":
            logits[:, END] += 4
    return logits


@kernels
@pytest.mark.filterwarnings("ignore")  # NumPy's, where it interprets
@pytest.mark.parametrize("kind", ["usual", "ties", "all alike", "impossible", "ends"])
@pytest.mark.parametrize(
    ("width", "n_best", "vocabulary"), [(1, 1, 11), (2, 1, 3), (4, 3, 29), (5, 5, 13)]
)
def test_a_step_of_the_kernel_is_a_step_of_beams(
    kind: str, width: int, n_best: int, vocabulary: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    from regard.decode.engine.cuda import kernels as cuda

    monkeypatch.setattr(choice, "best", stable)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(width)
    B, T, banned = 3, 7, [0, 5] if vocabulary > 5 else []
    limits = Limits([[1]] * B, END, [T, 4, 1], [3, 0, 1], banned)
    limits.fit(torch.empty(B, vocabulary, device=device))
    plain, ours = (
        Beams(limits, width, n_best, gnmt(0.6), 0.0, torch.empty(B, vocabulary, device=device))
        for _ in range(2)
    )
    for beams in (plain, ours):  # as many rows at first as later
        beams.open = torch.full((B, width), -math.inf, device=device)
        beams.open[:, 0] = 0.0
    times = torch.zeros(B, dtype=torch.int64, device=device)
    table = torch.zeros(B * width, T, dtype=torch.int32, device=device)
    expected = table.clone()
    for t in range(T):
        logits = drawn(kind, B * width, vocabulary).to(device)
        table[:, t] = expected[:, t] = torch.arange(B * width) + 1000 * t
        rows = plain.advance(logits, t)
        expected = expected[rows.flatten()]
        found = stable(logits, 2 * width + len(banned) + 1)
        cuda.search(found, ours, limits._least, times, table)
        alive = (plain.open > -math.inf) & ~plain.over[:, None]
        assert torch.equal(ours.over, plain.over)
        assert torch.equal(ours.scores, plain.scores)
        assert torch.equal(ours.open[alive], plain.open[alive])
        assert torch.equal(ours.last[alive], plain.last[alive])
        assert torch.equal(table[alive.flatten()], expected[alive.flatten()])
    told = zip(*cuda.told(ours, B))
    read = [found for _, found in plain.read(torch.arange(B), T - 1)]
    assert [hypotheses(one) for one in told] == read


@kernels
@pytest.mark.filterwarnings("ignore")  # NumPy's, where it interprets
def test_what_is_not_a_number_is_not_overlooked() -> None:
    pytest.importorskip("triton")
    from regard.decode.engine.cuda import kernels as cuda

    device = "cuda" if torch.cuda.is_available() else "cpu"
    limits = Limits([[1]], END, 2)
    limits.fit(logits := torch.full((1, 11), math.nan, device=device))
    beams = Beams(limits, 2, 1, power(0), 0.0, logits)
    beams.open = torch.tensor([[0.0, -math.inf]], device=device)
    times = torch.zeros(1, dtype=torch.int64, device=device)
    for _ in range(2):
        found = stable(logits.repeat(2, 1), 4)
        cuda.search(found, beams, None, times, torch.zeros(2, 2, dtype=torch.int32, device=device))
    (one,) = zip(*cuda.told(beams, 1))
    with pytest.raises(ValueError, match="not finite"):
        hypotheses(one)


@kernels
@pytest.mark.filterwarnings("ignore")  # NumPy's, where it interprets
@pytest.mark.parametrize("kind", ["usual", "ties", "all alike", "impossible"])
@pytest.mark.parametrize(("vocabulary", "dtype"), [(5, torch.float32), (5003, torch.bfloat16)])
def test_the_best_logits(kind: str, vocabulary: int, dtype: torch.dtype) -> None:
    pytest.importorskip("triton")
    from regard.decode.engine.cuda import kernels as cuda

    torch.manual_seed(0)
    logits = drawn(kind, 2, vocabulary).to("cuda" if torch.cuda.is_available() else "cpu", dtype)
    values, tokens = cuda.best(logits, 5)
    expected, places = stable(logits, 5)
    assert torch.equal(tokens, places)
    assert torch.allclose(values, expected, atol=1e-4)
