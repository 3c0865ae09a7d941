"""What does not fit is refused before memory is asked for, and the value proposed does fit."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from regard.lab.cost import model_cost
from regard.machine import memory
from regard.machine.memory import Size, check, limit, shown
from regard.model.classifier import ClassifierConfig
from regard.model.fits import TRAINING, check_cache, check_training
from regard.model.formula import Config, parameters, saved
from regard.model.language import LanguageConfig, LanguageModel
from regard.model.transformer import ImageSource, TransformerConfig
from regard.model.vit import VisionConfig
from regard.task.size import check_batches, check_held, check_settings
from regard.task.specs import NAMES, spec

GB = 10**9


@pytest.fixture
def have(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    def chosen(count: int) -> None:
        for place in ("regard.machine.memory.limit", "regard.model.fits.limit"):
            monkeypatch.setattr(place, lambda device="cpu": count)

    return chosen


# How much there is


def test_there_is_some() -> None:
    assert 10**8 < limit() < 2**60
    assert limit(torch.device("cpu")) == limit()


@pytest.mark.parametrize(
    ("groups", "files", "limits"),
    [
        ("0::/a/b\n", {"a/b/memory.max": "700", "a/memory.max": "500"}, [700, 500]),
        ("0::/\n", {"memory.max": "max"}, []),
        ("0::/seen/from/outside\n", {"memory.max": "900"}, [900]),
        ("3:cpu:/x\n2:memory:/y\n", {"memory/y/memory.limit_in_bytes": "300"}, [300]),
        ("", {}, []),
    ],
)
def test_control_groups(
    groups: str, files: dict[str, str], limits: list[int], tmp_path: Path
) -> None:
    for name, text in {"proc/self/cgroup": groups}.items() | {
        f"sys/fs/cgroup/{name}": text for name, text in files.items()
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert list(memory._cgroups(tmp_path)) == limits


def test_bytes_for_people() -> None:
    assert [shown(n) for n in (999, 25_276_518_400, 10**15, 10**20)] == [
        "999 bytes", "25.3 GB", "1 PB", "1e+05 PB",
    ]  # fmt: skip


# What fits


def test_the_largest_value_that_fits_is_named() -> None:
    size = Size("width", 1000, 100, lambda width: width**2, step=7)
    check("it", [size], 10**6)
    with pytest.raises(ValueError, match=r"^width \(1000\) is too large: it needs about 1 MB of"):
        check("it", [size], 10**5)
    assert size.largest(10**5) == 315
    assert size.largest(48) == 0
    alone = replace(size, step=1)
    assert (alone.largest(10**5), alone.largest(10**6), alone.largest(0)) == (316, 1000, 0)


def test_of_several_values_the_most_unusual_is_named() -> None:
    def bytes_of(rows: int, beams: int) -> int:
        return rows * beams

    rows = Size("rows", 64, 64, lambda rows: bytes_of(rows, 5000))
    beams = Size("beams", 5000, 4, lambda beams: bytes_of(64, beams))
    with pytest.raises(ValueError, match=r"^beams \(5000\) .* largest that fits is 1562$"):
        check("it", [rows, beams], 10**5)
    with pytest.raises(ValueError, match=r"^beams \(5000\) and rows \(64\) are too large.*both$"):
        check("it", [rows, beams], 1)


MODELS: dict[str, Config] = {
    "Transformer": TransformerConfig.tiny(311),
    "untied": TransformerConfig(101, width=12, heads=3, share="none", activation="gelu"),
    "image": TransformerConfig(101, width=12, heads=3, source=ImageSource(image=20, patch=5)),
    "language": LanguageConfig(307, width=24, heads=4, key_heads=2, layers=3, position="learned"),
    "classifier": ClassifierConfig(5, 211, width=16, heads=2, layers=2),
    "vision": VisionConfig(7, image=(24, 32), patch=8, width=24, heads=3, layers=2),
}


@pytest.mark.parametrize("name", MODELS)
def test_what_is_counted_is_what_training_saves_at_least(name: str) -> None:
    """Beside the counted ones: dropout, the embedding and the logits, which are small here."""
    config, length = MODELS[name], 97
    source, target = saved(config)
    cost = model_cost(config, length)
    assert parameters(config) == cost.parameters
    positions = length
    if isinstance(config, VisionConfig):
        positions = 12
    elif isinstance(getattr(config, "source", None), ImageSource):
        positions = 16
    least = 4 * (positions * source + length * target)
    assert least <= cost.activations <= 5 * least


SHAPES = [
    *((name, "model.width") for name in NAMES),
    *((name, "model.feed_forward") for name in NAMES),
    *((name, "model.encoder_layers") for name in ("translate", "dates", "read")),
    *((name, "model.decoder_layers") for name in ("translate", "dates", "read")),
    *((name, "model.layers") for name in ("language", "label", "classify")),
    *((name, "vocabulary") for name in ("translate", "language", "label")),
    *((name, "pixels") for name in ("classify", "read")),
]


def changed(config: Any, setting: str, value: int) -> Any:
    name, _, inner = setting.partition(".")
    if inner:
        return replace(config, **{name: replace(getattr(config, name), **{inner: value})})
    return replace(config, **{name: value})


@pytest.mark.parametrize(("task", "setting"), SHAPES)
@pytest.mark.parametrize("value", [10**7, 10**12, 2**63 - 1])
def test_every_size_of_every_task(
    task: str, setting: str, value: int, have: Callable[[int], None]
) -> None:
    have(4 * GB)
    config = spec(task).preset("tiny")
    check_settings(config)
    with pytest.raises(ValueError, match=r"needs about .* and there are 4 GB") as refused:
        check_settings(changed(config, setting, value))
    named = re.match(r"(\S+) \(\d+\) is too large.* fits is (\d+)$", str(refused.value))
    assert named is not None
    assert named[1] == setting
    check_settings(changed(config, setting, int(named[2])))


@pytest.mark.parametrize("task", NAMES)
def test_shapes_that_do_not_fit_together_are_refused_before_any_data_are_read(task: str) -> None:
    config = spec(task).preset("tiny")
    check_settings(config)
    with pytest.raises(ValueError, match=r"heads \(3\) must divide width \(100\)"):
        check_settings(changed(changed(config, "model.width", 100), "model.heads", 3))


def test_images_and_patches_without_bounds(have: Callable[[int], None]) -> None:
    have(4 * GB)
    config = replace(spec("classify").preset("tiny"), pixels=10**6, patch=10**6)
    with pytest.raises(ValueError, match=r"^patch \(1000000\) and pixels \(1000000\) are too"):
        check_settings(config)


def test_presets_fit_where_they_are_meant_to_run(have: Callable[[int], None]) -> None:
    for name in NAMES:
        for size, count in (("tiny", 2 * GB), ("base", 16 * GB), ("big", 80 * GB)):
            have(count)
            check_settings(spec(name).preset(size))  # type: ignore[arg-type]


def test_the_optimizers_state_counts(have: Callable[[int], None]) -> None:
    config = LanguageConfig.tiny(311)
    enough = TRAINING * parameters(config) + 4 * saved(config)[0]
    have(enough)
    check_training(config, 1, "cpu")
    have(enough - 1)
    with pytest.raises(ValueError, match="too large"):
        check_training(config, 1, "cpu")


class Planned:
    """As much of a task as is asked for its batches."""

    def __init__(self, examples: int):
        self.model = LanguageModel.tiny(311)
        self.examples = examples

    def plan(self, epoch: int) -> list[range]:
        return [range(self.examples), range(2)]


@pytest.mark.usefixtures("unchecked")
def test_batches(have: Callable[[int], None]) -> None:
    have(GB)
    config = spec("language").preset("tiny")
    task: Any = Planned(7)
    check_batches(config, task)

    def training(**settings: int) -> Any:
        return replace(config, training=replace(config.training, **settings))

    # Seven examples are few, however large a batch may be.
    check_batches(training(batch=10**12), task)
    with pytest.raises(ValueError, match=r"training.accumulate \(8\) must be at most 7"):
        check_batches(training(accumulate=8), task)
    check_batches(training(accumulate=7), task)
    many: Any = Planned(10**9)
    with pytest.raises(ValueError, match=r"^training.batch \(\d+\) is too large") as refused:
        check_batches(training(batch=10**9), many)
    check_batches(training(batch=int(str(refused.value).rsplit(" ", 1)[1])), many)
    check_batches(training(batch=10**9, accumulate=10**5), many)


def test_examples_that_are_held(have: Callable[[int], None]) -> None:
    have(GB)
    check_held(count=10**6)
    with pytest.raises(ValueError, match=r"count \(1000000001\) .* largest that fits is 1000000$"):
        check_held(count=10**9 + 1)


def test_caches(have: Callable[[int], None]) -> None:
    have(GB)
    config = TransformerConfig.base(32_000)
    check_cache(config, 64, 4, 50, "cpu")
    for beams, length, name in ((5000, 90, "beams"), (4, 10**9, "length")):
        with pytest.raises(ValueError, match=rf"^{name} \(\d+\) is too large") as refused:
            check_cache(config, 1, beams, length, "cpu")
        fits = int(str(refused.value).rsplit(" ", 1)[1])
        sizes = {"beams": beams, "length": length, name: fits}
        check_cache(config, 1, **sizes, device="cpu")
