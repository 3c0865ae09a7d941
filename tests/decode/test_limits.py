"""Searches that memory cannot hold are refused in one line, before anything is allocated."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from regard.decode.engine.ensemble import ensemble
from regard.decode.engine.pick import open_session
from regard.decode.engine.session import Session
from regard.decode.search.beam import beam
from regard.decode.search.greedy import greedy
from regard.decode.search.sample import sample, uniforms
from regard.model.language import LanguageConfig, LanguageModel
from tests.decode.tables import Table

END, HUGE = 2, 2**31


class Untouched(Table):
    """A session in which no search must begin."""

    def begin(self, prompts: Any) -> Any:
        pytest.fail("the search has begun")


@pytest.mark.parametrize(
    ("search", "options", "name", "value"),
    [
        (greedy, {"max_length": HUGE}, "max_length", HUGE),
        (greedy, {"max_length": [5, 2**65]}, "max_length", 2**65),
        (sample, {"max_length": HUGE}, "max_length", HUGE),
        (beam, {"max_length": HUGE}, "max_length", HUGE),
        (beam, {"max_length": 7, "width": HUGE}, "width", HUGE),
        (beam, {"max_length": 7, "width": HUGE, "n_best": HUGE}, "width", HUGE),
    ],
)
def test_a_search_larger_than_memory_is_refused(
    search: Callable[..., Any],
    options: dict[str, Any],
    name: str,
    value: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("regard.decode.search.constraints.limit", lambda _: 10**9)
    start = rf"^{name} \({value}\) is too large: the search needs about [\d.e+]+ \w+ of memory, "
    with pytest.raises(ValueError, match=start + r"and there are 1 GB; .* \d+$") as refused:
        search(Untouched(0, 5, [0, 1]), [[1], [1]], end=END, **options)
    assert 0 < int(str(refused.value).rsplit(" ", 1)[1]) < value


def test_the_cache_of_every_member_counts() -> None:
    model = LanguageModel(LanguageConfig(13, width=8, heads=2, feed_forward=8, layers=3)).eval()
    sessions: list[Session] = [open_session(model, rows=1) for _ in range(2)]
    each = 3 * 2 * 8 * torch.finfo(torch.float32).bits // 8
    assert sessions[0].cache_bytes == each
    assert ensemble(sessions).cache_bytes == 2 * each


def test_seeds_have_64_bits() -> None:
    with pytest.raises(ValueError, match=rf"seed \({2**64}\) must be below 2\*\*64"):
        uniforms(2**64, [0], 3)
    with pytest.raises(ValueError, match="index"):
        uniforms(0, [2**64], 3)
