"""The pictures of docs/ and the demo's output are not older than the code that they show."""

from pathlib import Path

import pytest
from PIL import Image

from docs import pictures

DOCS = Path(__file__).parent.parent / "docs"
REMEDY = "run `make pictures`, and look at them"


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_a_picture_is_as_new_as_its_sources(name: str) -> None:
    with Image.open(DOCS / f"{name}.png") as image:
        assert image.info[pictures.KEY] == pictures.PICTURES[name].digest(), REMEDY


def test_every_picture_of_a_page_is_made_by_a_program() -> None:
    drawn = {path.stem for path in DOCS.glob("*.png")}
    assert drawn == set(pictures.PICTURES)


def test_the_demo_output_is_as_new_as_its_sources() -> None:
    match = pictures.DEMO_BLOCK.search((DOCS / "start.md").read_text(encoding="utf-8"))
    assert match[1] == pictures.demo_digest(), REMEDY
    assert "→ 1983-03-04" in match[2]


def test_a_changed_source_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "ROOT", tmp_path)
    (tmp_path / "page.js").write_text("let shown = 1;")
    before = pictures.digest("*.js", None)
    assert before == pictures.digest("*.js", None) != pictures.digest("*.js", "dates")
    (tmp_path / "page.js").write_text("let shown = 2;")
    assert before != pictures.digest("*.js", None)


def test_a_module_that_moved_makes_no_output_stale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pictures, "ROOT", tmp_path)
    (tmp_path / "demo.py").write_text("from regard.shell import typed\nprint(typed(1))\n")
    before = pictures.digest("*.py", None)
    (tmp_path / "demo.py").write_text("from regard.machine.shell import typed\nprint(typed(1))\n")
    assert before == pictures.digest("*.py", None)
    (tmp_path / "demo.py").write_text("from regard.machine.shell import typed\nprint(typed(2))\n")
    assert before != pictures.digest("*.py", None)
