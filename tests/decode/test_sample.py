"""Sampling draws what the model predicts, and a sentence draws the same in any batch."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from regard.decode.search.greedy import greedy
from regard.decode.search.sample import draw, sample, uniforms
from tests.decode.tables import Table, logs_of

N, END = 7, 2


def shares(logs: torch.Tensor, **options: Any) -> list[float]:
    """How often each token falls, over dice spread evenly from 0 to 1."""
    count = 20_000
    dice = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    found = draw(logs.expand(count, -1), dice, **options)
    return (found.bincount(minlength=len(logs)) / count).tolist()


def test_tokens_fall_as_often_as_the_model_says() -> None:
    logs = torch.randn(N, dtype=torch.float64).log_softmax(-1)
    torch.testing.assert_close(shares(logs), logs.exp().tolist(), atol=1e-4, rtol=0)
    cool = (logs / 0.5).softmax(-1).tolist()
    torch.testing.assert_close(shares(logs, temperature=0.5), cool, atol=1e-4, rtol=0)


def test_top_k_and_top_p() -> None:
    logs = torch.tensor([0.1, 0.4, 0.0, 0.2, 0.3], dtype=torch.float64).log()

    def check(want: list[float], **options: Any) -> None:
        assert shares(logs, **options) == pytest.approx(want, abs=1e-4)

    check([0, 4 / 7, 0, 0, 3 / 7], top_k=2)
    check([0, 4 / 7, 0, 0, 3 / 7], top_p=0.5)
    check([0, 1, 0, 0, 0], top_p=0.39)
    check([0, 4 / 9, 0, 2 / 9, 3 / 9], top_p=0.8)
    check([0.1, 0.4, 0, 0.2, 0.3], top_p=1)
    check([0.1, 0.4, 0, 0.2, 0.3], top_k=99)
    # 4/7 of what top-k leaves is enough already.
    check([0, 1, 0, 0, 0], top_k=2, top_p=0.55)
    check([0, 1, 0, 0, 0], temperature=0.01)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_not_allowed_never_falls(dtype: torch.dtype) -> None:
    """Not even where the die is next to 1."""
    logs = torch.tensor([-math.inf, -0.4, -0.3, -math.inf, -5.0], dtype=dtype)
    dice = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    assert draw(logs.expand(2, -1), dice).tolist() == [2, 4]
    assert draw(logs.expand(2, -1), dice, top_k=4).tolist() == [2, 4]


@given(seed=st.integers(0, 2**64 - 1), number=st.integers(0, 10**12))
@settings(max_examples=20)
def test_dice_depend_on_seed_and_number_alone(seed: int, number: int) -> None:
    one = uniforms(seed, [number], 5)
    assert (uniforms(seed, [3, number], 9)[1, :5] == one[0]).all()
    assert (one >= 0).all()
    assert (one < 1).all()
    assert (uniforms(seed ^ 1, [number], 5) != one).all()
    assert (uniforms(seed, [number + 1], 5) != one).all()


def test_a_sentence_draws_the_same_in_any_batch() -> None:
    prompts = [[1], [1, 4, 2], [1, 3], [1]]
    options: dict[str, Any] = {"end": END, "banned": [0], "seed": 5, "temperature": 1.5}
    most = [9, 7, 5, 3]
    together = sample(Table(0, N, range(4)), prompts, max_length=most, **options)
    for n in range(4):
        alone = sample(Table(0, N, [n]), [prompts[n]], max_length=most[n], indices=[n], **options)
        assert alone == [together[n]]
    other = sample(Table(0, N, range(4)), prompts, max_length=most, **options | {"seed": 6})
    assert other != together


def test_scores_are_the_models_own() -> None:
    (found,) = sample(Table(0, N, [0]), [[1]], end=END, max_length=9, temperature=3, top_k=5)
    logs, words = logs_of(0, N, 0), [*found.tokens, END]
    want = [logs((1, *found.tokens[:n]))[words[n]] for n in range(len(found.token_scores))]
    torch.testing.assert_close(found.token_scores, want)
    assert math.isclose(found.score, sum(want))


def test_one_candidate_leaves_no_choice() -> None:
    prompts = [[1], [1, 4]]
    likeliest = greedy(Table(0, N, range(2)), prompts, end=END, max_length=9)
    drawn = sample(Table(0, N, range(2)), prompts, end=END, max_length=9, top_k=1)
    for one, two in zip(drawn, likeliest, strict=True):
        assert one.tokens == two.tokens
        assert one.token_scores == pytest.approx(two.token_scores)


def test_no_prompts_no_results() -> None:
    assert sample(Table(0, N, []), [], end=END, max_length=3) == []


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"temperature": 0}, r"temperature \(0\) must be above 0; .* use greedy search"),
        ({"top_k": 0}, r"top_k \(0\) must be 1 or more; leave it out to sample from all tokens"),
        ({"top_k": -1}, r"top_k \(-1\) must be a whole number"),
        ({"top_p": 1.5}, r"top_p \(1.5\) must be above 0 and at most 1"),
        ({"seed": -1}, r"seed \(-1\) must be a whole number, 0 or more"),
        ({"indices": [0, 1]}, r"indices \(2\) must be as many as prompts \(1\)"),
    ],
)
def test_errors(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        sample(Table(0, N, [0]), [[1]], end=END, max_length=3, **options)
