"""Questions of pages: what is answered, and what is refused in one line."""

import math
from pathlib import Path
from typing import Any

import pytest

from regard.model.classifier import ClassifierConfig
from regard.model.encoder import EncoderConfig
from regard.studio.ask import questions
from regard.studio.runs import Runs


def ask(name: str, **question: Any) -> Any:
    return questions(Runs([], Path("no-such-folder")))[name](question)


@pytest.mark.parametrize(
    ("said", "text", "drawn"),
    [
        (None, "no mask", ["111", "111"]),
        (["causal"], "causal()", ["110", "111"]),
        (["and", ["causal"], ["padding", 1]], "causal() & padding([1])", ["100", "100"]),
        (["or", ["not", ["causal"]], ["prefix", 1]], None, ["101", "100"]),
        (["documents", [0, 0, 1]], None, ["110", "001"]),
        (["drawn", [[0, 1, 0], [1, 0, 1]]], None, ["010", "101"]),
        (["window", 0], "window(0, 0)", ["010", "001"]),
    ],
)
def test_masks_are_composed(said: Any, text: str | None, drawn: list[str]) -> None:
    if said == ["documents", [0, 0, 1]]:  # of one sequence, so there are as many queries as keys
        found = ask("mask", queries=3, keys=3, mask=said)
        assert found["allowed"] == [[1, 1, 0], [1, 1, 0], [0, 0, 1]]
        return
    found = ask("mask", queries=2, keys=3, mask=said)
    assert ["".join(map(str, row)) for row in found["allowed"]] == drawn
    assert text is None or found["text"] == text
    assert found["reason"]


@pytest.mark.parametrize(
    ("name", "question", "message"),
    [
        ("mask", {"queries": 2, "keys": 3, "mask": ["other"]}, "'other'\\) is unknown; choose"),
        ("mask", {"queries": 0, "keys": 3, "mask": None}, "from 1 to 64"),
        ("mask", {"queries": 2, "keys": 3, "mask": ["drawn", [[1]]]}, "must have 2 × 3 cells"),
        ("mask", {"queries": 2, "keys": 3, "mask": ["and"]}, "and needs masks"),
        (
            "mask",
            {"queries": 2, "keys": 3, "mask": ["window"]},
            r"mask \(\[\]\) must be a list of 1",
        ),
        (
            "mask",
            {"queries": 2, "keys": 3, "mask": ["window", math.inf]},
            r"mask\[0\] \(inf\) must",
        ),
        ("translate", {"run": "x", "text": "a", "hidden": [10**23]}, r"hidden\[0\] \(1000000000"),
        ("translate", {"run": "../x", "text": "a"}, "is unknown; there are none"),
        ("translate", {"run": "x", "text": " "}, "must have a word in it"),
        ("translate", {"run": "x", "text": "a" * 3000}, "at most 2,000"),
        ("text", {"run": "x", "text": "a" * 100_001}, "at most 100,000"),
        ("text", {"run": "x", "text": "a"}, "is unknown; there are none"),
        ("architecture", {"model": "/etc"}, "is unknown; there are none"),
        ("cost", {"models": ["base"] * 9, "length": 4}, "at most 8"),
        ("training", {"runs": []}, "must be an object"),
        ("answer", {"document": "exercises", "section": "99"}, "is not in this document"),
        ("answer", {"document": "other", "section": "1"}, "is unknown; choose from"),
    ],
)
def test_what_is_wrong_is_one_line(name: str, question: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        ask(name, **question)
    assert "\n" not in str(raised.value)


def test_the_map_counts_every_parameter_once() -> None:
    found = ask("architecture", model="base")
    assert found["parameters"] == 63_082_496
    by_kind = {box["kind"]: box for box in found["boxes"] if box["side"] == "decoder"}
    assert by_kind["cross"]["parameters"] == 4 * (512 * 512 + 512)
    assert by_kind["masked"]["times"] == 6
    blocks = sum(box["parameters"] * box["times"] for box in found["boxes"] if box["times"] > 1)
    assert blocks + 37_000 * 512 == found["parameters"]  # all embeddings are one


@pytest.mark.parametrize("kind", ["classifier", "encoder", "lstm"])
def test_every_kind_of_text_model_has_a_map(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config: Any = EncoderConfig(31, width=24, heads=2, feed_forward=40, layers=3)
    if kind != "encoder":
        mixer = "lstm" if kind == "lstm" else "attention"
        config = ClassifierConfig(5, 31, width=24, heads=2, feed_forward=40, layers=3, mixer=mixer)
    monkeypatch.setattr("regard.studio.boxes.config_of", lambda name, folder: config)
    found = ask("architecture", model="tiny")
    titles = [box["title"] for box in found["boxes"]]
    own = "Recurrent" if kind == "lstm" else "Self-attention"
    last = "Output" if kind == "encoder" else "Head"
    assert (titles[:2], titles[-1]) == (["Embedding", own], last)
    if kind != "encoder":  # whose output is tied to its embedding
        counted = sum(box["parameters"] * box["times"] for box in found["boxes"])
        assert counted == found["parameters"]


def test_the_course_has_every_document() -> None:
    found = ask("course")
    assert [one["document"] for one in found] == [
        "exercises",
        "slides",
        "sheet",
        "homework",
        "handout",
    ]
    assert all(question["question"] for one in found for question in one["questions"])


def test_an_answer_stands_and_its_mistakes_fail() -> None:
    assert ask("answer", document="exercises", section="3")["stands"] is True
    assert ask("answer", document="exercises", section="3", mistake=0)["stands"] is False
