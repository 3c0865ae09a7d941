"""The verdicts about costs follow from what is counted: another count, another verdict."""

from typing import Any

import pytest
import torch

from regard.lab.claims import costs
from regard.lab.cost import count
from regard.lab.cost.count import Counts
from regard.lab.experiment import Verdict
from regard.model.vit import VisionConfig

EXPECTED: dict[str, Verdict] = {
    "numbers-in-out": "holds",
    "dense-parameters": "holds",
    "shared-projections": "holds",
    "dot-product-cost": "holds under conditions",
    "following-layer": "holds",
    "layer-costs": "wrong as stated",
    "sequential-steps": "holds under conditions",
    "no-recurrence": "holds",
    "crossover": "holds under conditions",
    "all-at-once": "holds",
    "longest-path": "holds",
    "model-sizes": "holds",
    "model-widths": "wrong as stated",
    "cost-of-values": "wrong as stated",
    "like-a-dense-layer": "wrong as stated",
    "cost-table": "wrong as stated",
    "window-cost": "holds",
    "parameter-table": "wrong as stated",
    "receptive-field": "holds",
}
BY_NAME = {experiment.name: experiment for experiment in costs.EXPERIMENTS}


def test_every_experiment_is_expected() -> None:
    assert list(BY_NAME) == list(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_verdicts(name: str) -> None:
    found = BY_NAME[name].run()
    assert found.verdict == EXPECTED[name]
    assert found.measurements


def test_the_sizes_that_were_computed_for_the_list() -> None:
    found = BY_NAME["model-sizes"].run().measurements
    assert [round(int(found[name]) / 1e5) / 10 for name, *_ in costs.SIZES] == [
        63.1,
        214.2,
        86.6,
        304.3,
        306.5,
        632.0,
    ]


def changed(name: str) -> bool:
    return BY_NAME[name].run().verdict != EXPECTED[name]


def test_a_counter_that_misses_attention_changes_verdicts(monkeypatch: pytest.MonkeyPatch) -> None:
    def blind(args: tuple[Any, ...], out: list[torch.Tensor]) -> Counts:
        return Counts()

    fused = "_scaled_dot_product_flash_attention_for_cpu"
    monkeypatch.setitem(count.PRODUCTS, fused, blind)
    assert changed("layer-costs")
    assert changed("cost-table")


def test_attention_that_is_local_changes_verdicts(monkeypatch: pytest.MonkeyPatch) -> None:
    from regard.attention import multihead
    from regard.attention.attend import attend
    from regard.attention.mask import window

    def near(query: Any, key: Any, value: Any, **given: Any) -> Any:
        return attend(query, key, value, mask=window(1))

    monkeypatch.setattr(multihead, "attend", near)
    assert changed("longest-path")


def test_a_wider_vit_changes_the_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = VisionConfig(10, width=2048, heads=16)
    monkeypatch.setattr(VisionConfig, "large", classmethod(lambda cls, classes: wide))
    assert changed("model-widths")
