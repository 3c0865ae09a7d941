"""What an error proposes works: every value that is to be tried is tried."""

import itertools
import re
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch

from regard.checkpoint import _Unfilled
from regard.model.build import Position
from regard.model.language import LanguageConfig, LanguageModel
from regard.model.vit import VisionConfig, VisionTransformer

pytestmark = pytest.mark.usefixtures("unchecked")

FORMS = (
    (r"try a width of (\d+)", lambda m: [{"width": int(m[1])}]),
    (r"; try width (\d+)", lambda m: [{"width": int(m[1])}]),
    (r"try an image of (\d+) × (\d+)", lambda m: [{"image": (int(m[1]), int(m[2]))}]),
    (r"try a patch of (\d+)", lambda m: [{"patch": int(m[1])}]),
    (
        r"^(heads|key_heads) \(\d+\) must divide .*; try (\d+)(?: or (\d+))?$",
        lambda m: [{m[1]: int(value)} for value in m.groups()[1:] if value],
    ),
)


def proposed(message: str) -> list[dict[str, Any]]:
    """The changes that a message proposes."""
    for pattern, read in FORMS:
        if match := re.search(pattern, message):
            return read(match)
    raise AssertionError(f"nothing is proposed: {message}")


def faulty(model: Any, config: Any) -> str | None:
    try:
        with torch.device("meta"), _Unfilled():
            model(config)
    except ValueError as error:
        return str(error)
    return None


def follow(model: Any, config: Any, most: int) -> int:
    """Takes every proposal until the model can be built; how many there were at first."""
    message = faulty(model, config)
    if message is None:
        return 0
    assert most, f"it takes too many changes: {message}"
    changes = proposed(message)
    for change in changes:
        follow(model, replace(config, **change), most - 1)
    return len(changes)


@pytest.mark.parametrize("position", get_args(Position))
def test_widths_and_heads(position: Any) -> None:
    config = LanguageConfig(11, layers=1, feed_forward=3, position=position)
    found = 0
    for width, heads in itertools.product(range(1, 27), range(1, 9)):
        found += follow(LanguageModel, replace(config, width=width, heads=heads), 1)
    assert found > 100


def test_key_heads() -> None:
    config = LanguageConfig(11, layers=1, feed_forward=3, width=24, position="none")
    for heads, key_heads in itertools.product((1, 2, 3, 4, 6, 8, 12), range(1, 15)):
        follow(LanguageModel, replace(config, heads=heads, key_heads=key_heads), 1)


def test_images_and_patches() -> None:
    config = VisionConfig(3, layers=1, width=6, heads=2, feed_forward=5)
    sides = (1, 7, 8, 15, 16, 30, 33, 64)
    for rows, columns, patch in itertools.product(sides, sides, (1, 2, 3, 4, 7, 16, 65, 10**6)):
        follow(VisionTransformer, replace(config, image=(rows, columns), patch=patch), 1)


@pytest.mark.parametrize("width", [10**12 + 1, 2**61 - 1, 10**16 + 1])
def test_numbers_beyond_reason_are_refused_at_once(width: int) -> None:
    config = LanguageConfig(11, layers=1, width=width, heads=10**9, position="linear-bias")
    message = faulty(LanguageModel, config)
    assert message is not None
    assert "must divide" in message


def test_a_negative_epsilon_is_named() -> None:
    message = faulty(LanguageModel, replace(LanguageConfig.tiny(11), epsilon=-1.0))
    assert message == "epsilon (-1.0) must be above 0; try 1e-5"
