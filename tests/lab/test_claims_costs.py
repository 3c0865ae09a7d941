"""The verdicts about costs follow from what is counted: another count, another verdict."""

from typing import Any

import pytest
import torch

from regard.lab import run
from regard.lab.claims import parameters
from regard.lab.cost import count
from regard.lab.cost.count import Counts
from regard.lab.perform import Result
from regard.model.vit import VisionConfig

Results = dict[str, Result]

pytestmark = pytest.mark.usefixtures("unchecked")


def test_the_sizes_that_were_computed_for_the_list(results: Results) -> None:
    found = results["model-sizes"].finding.measurements
    assert [round(int(found[name]) / 1e5) / 10 for name, *_ in parameters.SIZES] == [
        63.1,
        214.2,
        86.6,
        304.3,
        306.5,
        632.0,
    ]


def verdicts(results: Results, *names: str) -> list[str]:
    """Of the sound implementation; ask before anything is broken."""
    return [results[name].finding.verdict for name in names]


def changed(sound: list[str], *names: str) -> list[bool]:
    return [run(name).finding.verdict != verdict for verdict, name in zip(sound, names)]


def test_a_counter_that_misses_attention_changes_verdicts(
    monkeypatch: pytest.MonkeyPatch, results: Results
) -> None:
    sound = verdicts(results, "layer-costs", "cost-table")

    def blind(args: tuple[Any, ...], out: list[torch.Tensor]) -> Counts:
        return Counts()

    monkeypatch.setitem(count.PRODUCTS, "bmm", blind)
    assert changed(sound, "layer-costs", "cost-table") == [True, True]


def test_attention_that_is_local_changes_verdicts(
    monkeypatch: pytest.MonkeyPatch, results: Results
) -> None:
    sound = verdicts(results, "longest-path")

    from regard.attention import core
    from regard.attention.attend import attend
    from regard.attention.mask import window

    def near(query: Any, key: Any, value: Any, **given: Any) -> Any:
        return attend(query, key, value, mask=window(1))

    monkeypatch.setattr(core, "attend", near)
    assert changed(sound, "longest-path") == [True]


def test_a_wider_vit_changes_the_verdict(monkeypatch: pytest.MonkeyPatch, results: Results) -> None:
    sound = verdicts(results, "model-widths")
    wide = VisionConfig(10, width=2048, heads=16)
    monkeypatch.setattr(VisionConfig, "large", classmethod(lambda cls, classes: wide))
    assert changed(sound, "model-widths") == [True]
