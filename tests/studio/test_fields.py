"""Every field of every question is checked, and refused in one line that names it."""

import copy
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from regard.studio.ask import FIELDS, questions
from regard.studio.fields import check
from regard.studio.runs import Runs

CHANGES: dict[str, Any] = {
    "off": [["encoder.blocks.0.attention", 1]],
    "beta": [["encoder.blocks.0.attention", 1, 0.5]],
    "hidden": [0, 2],
    "forced": [3],
    "effect": False,
}
VALID: dict[str, dict[str, Any]] = {
    "training": {"runs": {"mine": 0}},
    "translate": {"run": "mine", "text": "a", "beams": 4, **CHANGES},
    "classify": {"run": "mine", "image": "iVBORw==", **CHANGES},
    "read": {"run": "mine", "image": "iVBORw==", **CHANGES},
    "text": {"run": "mine", "text": "a", **CHANGES},
    "head": {"run": "mine", "text": "a", "attention": "encoder", "head": 1, "beams": 2},
    "samples": {"kind": "digit"},
    "mask": {
        "queries": 2,
        "keys": 3,
        "mask": [
            "or",
            ["and", ["causal"], ["not", ["window", 1]], ["padding", 2], ["prefix", 1]],
            ["drawn", [[0, 1, 0], [1, 0, 1]]],
        ],
    },
    "architecture": {"model": "mine"},
    "cost": {"models": ["mine"], "length": 4},
    "answer": {"document": "exercises", "section": "99", "mistake": 0},
}
JUNK: list[Any] = [
    *(math.inf, -math.inf, math.nan, 1e300, 10**23, -(10**23), 2**63, -1, 0.5, True, None),
    *("", "x", "\ud800", "9" * 5000, [], {}, [[]], [None], {"a": []}, ["and"], ["window"]),
    *(
        ["window", 1, 2],
        ["documents", [0, math.inf]],
        ["drawn", [[1]]],
        ["not", None],
        [["causal"]],
    ),
]


def paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    if isinstance(value, dict | list):
        keys = value if isinstance(value, dict) else range(len(value))
        for key in keys:
            yield from paths(value[key], (*path, key))


def replaced(question: Any, path: tuple[Any, ...], value: Any) -> Any:
    question = copy.deepcopy(question)
    place = question
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return question


@pytest.mark.parametrize("name", VALID)
def test_junk_in_a_field_is_refused_by_its_name(name: str) -> None:
    assert check(VALID[name], FIELDS[name]).keys() >= VALID[name].keys()
    refusals = 0
    for path in paths(VALID[name]):
        for junk in JUNK:
            try:
                check(replaced(VALID[name], path, junk), FIELDS[name])
            except ValueError as error:
                message = str(error)
                assert message.startswith(path[0]), message
                assert "\n" not in message.encode().decode()
                assert len(message) < 300
                refusals += 1
    assert refusals >= 20


def test_unknown_and_missing_fields_are_named() -> None:
    with pytest.raises(ValueError, match="'colour' is not a field; there are kind"):
        check({"kind": "digit", "colour": 1}, FIELDS["samples"])
    with pytest.raises(ValueError, match="kind is missing"):
        check({}, FIELDS["samples"])


def test_questions_are_checked_before_they_are_answered() -> None:
    asks = questions(Runs([], Path("no-such-folder")))
    assert asks.keys() == FIELDS.keys()
    for name, ask in asks.items():
        with pytest.raises(ValueError, match="'colour' is not a field"):
            ask({"colour": 1})
        assert name in VALID or not FIELDS[name]
