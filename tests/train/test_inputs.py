"""A run resumes with the data that it began with, and names what has changed."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from regard.train import inputs
from regard.train.display import Display
from regard.train.fit import fit
from tests.train.samples import Backwards, settings


class Named(Backwards):
    """A task whose settings name its data."""

    def __init__(self, **config: Any) -> None:
        super().__init__()
        self.config = config

    def about(self) -> dict[str, Any]:
        return {**super().about(), "config": self.config}


@pytest.fixture
def data(tmp_path: Path) -> dict[str, Any]:
    for name in ("source", "target", "valid"):
        (tmp_path / name).write_text(f"{name} 1\n{name} 2\n")
    folders = tmp_path / "images"
    for number, label in enumerate(("cat", "dog")):
        (folders / label).mkdir(parents=True)
        Image.fromarray(np.full((8, 8), number, np.uint8)).save(folders / label / "0.bmp")
    return {
        "source": [str(tmp_path / "source")],
        "target": [str(tmp_path / "target")],
        "valid": str(tmp_path / "valid"),
        "images": str(folders),
        "start": str(tmp_path / "start"),
        "words": "/no/file",
        "pixels": 8,
    }


class Said(Display):
    """Keeps the lines."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, line: str) -> None:
        self.lines.append(line)


def train(task: Named, folder: Path, steps: int, **changed: Any) -> str:
    display = Said()
    fit(task, settings(steps=steps, **changed), folder, display=display)
    return "\n".join(display.lines)


@pytest.mark.parametrize("name", ["source", "target", "valid", "images"])
def test_changed_data_are_named(name: str, tmp_path: Path, data: dict[str, Any]) -> None:
    """Lines or folders exchanged, in files of the same sizes."""
    run, place = tmp_path / "run", tmp_path / name
    train(Named(**data), run, 2)
    (tmp_path / "start").write_text("a model's, of which the run has its own weights")
    train(Named(**data), run, 3)
    if place.is_dir():
        (place / "cat").rename(place / "fish")
        (place / "dog").rename(place / "cat")
        (place / "fish").rename(place / "dog")
    else:
        place.write_text("".join(reversed(place.read_text().splitlines(True))))
    with pytest.raises(ValueError, match=rf"the data have changed since the run began: {place};"):
        train(Named(**data), run, 4)


def test_large_files_are_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "LIMIT", 10_000)
    monkeypatch.setattr(inputs, "BLOCKS", 7)
    monkeypatch.setattr(inputs, "BLOCK", 100)
    file = tmp_path / "large"
    content = bytearray(np.random.default_rng(0).bytes(20_000))
    file.write_bytes(content)
    named = {"text": [str(file)]}
    before, verified = inputs.fingerprints(named), inputs.fingerprints(named, verify=True)
    assert inputs.describe_samples(before)
    assert inputs.describe_samples(verified) is None
    content[1000] ^= 1  # between two samples
    file.write_bytes(content)
    assert inputs.find_changes(before, inputs.fingerprints(named)) == []
    assert inputs.find_changes(verified, inputs.fingerprints(named, verify=True)) == [str(file)]
    content[20_000 // 7 * 3 + 5] ^= 1
    file.write_bytes(content)
    assert inputs.find_changes(before, inputs.fingerprints(named)) == [str(file)]
    assert inputs.find_changes(verified, inputs.fingerprints(named)) == [str(file)]


def test_a_sampled_hash_is_noted_and_a_whole_one_kept(
    tmp_path: Path, data: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inputs, "LIMIT", 16)
    monkeypatch.setattr(inputs, "BLOCKS", 3)
    monkeypatch.setattr(inputs, "BLOCK", 1)
    run, source = tmp_path / "run", tmp_path / "source"
    assert "sampled hash:" not in train(Named(**data), run, 2, verify_data=True)
    assert f"by a sampled hash: {source} " in train(Named(**data), run, 3)
    source.write_text(source.read_text().replace("2", "3"))
    with pytest.raises(ValueError, match=rf"data have changed since the run began: {source};"):
        train(Named(**data), run, 4, verify_data=True)
