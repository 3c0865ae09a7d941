"""What commands are given to work on: files, folders, lists, with flags in any place."""

import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from regard import checkpoint
from regard.cli.arguments import with_folder, with_inputs
from regard.cli.main import main
from regard.cli.stream import Lines
from regard.model.vit import VisionConfig, VisionTransformer


@dataclass(frozen=True)
class Flags:
    """Settings of every kind."""

    top: int = 1
    json: bool = False
    head: tuple[int, int, int] | None = None
    files: tuple[str, ...] = ()


@pytest.mark.parametrize(
    ("words", "names", "flags"),
    [
        ("R a b", "R a b", Flags()),
        ("R a --top 3 b", "R a b", Flags(top=3)),
        ("--top 3 R a b", "R a b", Flags(top=3)),
        ("--top=3 R a b", "R a b", Flags(top=3)),
        ("R --json a b --top 2", "R a b", Flags(top=2, json=True)),
        ("--no-json R a", "R a", Flags()),
        ("R a --head 1 2 0 b", "R a b", Flags(head=(1, 2, 0))),
        ("R a --files b c", "R a", Flags(files=("b", "c"))),
        ("R --files b --top 2 c", "R c", Flags(files=("b",), top=2)),
        ("R -- a --top", "R a --top", Flags()),
        ("R -", "R -", Flags()),
    ],
)
def test_flags_stand_anywhere(words: str, names: str, flags: Flags) -> None:
    folder, *found = names.split()
    assert with_inputs("x", Flags, Flags(), words.split()) == (Path(folder), found, flags)


def test_a_command_of_one_folder_refuses_more() -> None:
    with pytest.raises(ValueError, match=r"x takes one folder, R, and a is another word"):
        with_folder("x", Flags, Flags(), ["R", "--top", "2", "a"])


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = VisionTransformer(
        VisionConfig(3, 8, 4, channels=1, width=8, heads=2, layers=1, feed_forward=8)
    )
    task = {"name": "classify", "labels": ["ant", "bee", "cat"], "mean": [0.5], "std": [0.5]}
    folder = tmp_path_factory.mktemp("classifier") / "model"
    checkpoint.save(folder, model, task=task)
    return folder


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    folder = tmp_path / "pictures"
    (folder / "more" / "deep").mkdir(parents=True)
    (folder / ".hidden").mkdir()
    for name in ("b.png", "a.png", "more/c.jpg", "more/deep/d.png", ".hidden/e.png"):
        pixels = np.random.default_rng(len(name)).integers(0, 255, (8, 8), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / name)
    (folder / "notes.txt").write_text("not a picture")
    return folder


def answered(capsys: pytest.CaptureFixture[str], *words: Any, status: int = 0) -> list[str]:
    assert main([*map(str, words)]) == status
    return capsys.readouterr().out.splitlines()


@pytest.mark.usefixtures("unchecked")
def test_a_folder_stands_for_its_pictures(
    classifier: Path, pictures: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = answered(capsys, "classify", "--top", 2, classifier, pictures, "--json")
    found = [json.loads(line) for line in lines]
    names = ["a.png", "b.png", "more/c.jpg", "more/deep/d.png"]
    assert [one["picture"] for one in found] == [str(pictures / name) for name in names]
    assert all(len(one["labels"]) == 2 for one in found)
    one = answered(capsys, "classify", classifier, pictures / "a.png", "--json", "--top", 2)
    assert json.loads(one[0]) == found[0]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("sign", ["\n", "\0"])
def test_names_come_on_standard_input(
    sign: str,
    classifier: Path,
    pictures: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    listed = sign.join([str(pictures / "b.png"), str(pictures / "more"), ""])
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(listed.encode())))
    lines = answered(capsys, "classify", classifier)
    assert [Path(line.split("\t")[0]).name for line in lines] == ["b.png", "c.jpg", "d.png"]


@pytest.mark.usefixtures("unchecked")
def test_no_picture_at_all_is_said(
    classifier: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"")))
    assert main(["classify", str(classifier)]) == 2
    assert "classify needs pictures, and none was named" in capsys.readouterr().err


def test_a_folder_stands_for_its_texts(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    (tmp_path / "b" / "c.txt").write_text("three\n")
    (tmp_path / ".ignored").write_text("four\n")
    assert list(Lines([str(tmp_path)])) == ["one", "two", "three"]
    with pytest.raises(ValueError, match=r"- is standard input.*name it alone"):
        Lines(["-", str(tmp_path)])
    (tmp_path / "b" / "empty").mkdir()
    with pytest.raises(ValueError, match="is a folder without files"):
        Lines([str(tmp_path / "b" / "empty")])


@pytest.mark.parametrize("name", ["x.csv", "x.csv.gz", "x.jsonl"])
def test_a_table_read_as_lines_is_noted(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / name
    path.write_text("id,text\n")
    assert list(Lines([str(path)])) == ["id,text"]
    said = capsys.readouterr().err
    assert said.startswith(f"regard: {path} is a table, of which each line is read as one text;")
    (tmp_path / "x.txt").write_text("id,text\n")
    Lines([str(tmp_path / "x.txt")])
    assert capsys.readouterr().err == ""
