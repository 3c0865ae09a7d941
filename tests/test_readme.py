"""README.md is true: its snippets run and print what it shows, its files and commands exist."""

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pytest

from regard.lab.byhand import demo

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
SNIPPETS = re.findall(
    r"^```python\n(.*?)^```\n(?:```text\n(.*?)^```$)?", README, re.MULTILINE | re.DOTALL
)


def test_the_snippets_run_in_order_and_print_what_is_shown() -> None:
    assert len(SNIPPETS) == sum(language == "python" for language, _ in BLOCKS) > 0
    names: dict[str, Any] = {}
    for code, shown in SNIPPETS:
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            exec(code, names)
        assert said.getvalue() == shown


def test_the_tour_meets_every_part_of_the_public_face() -> None:
    code = "\n".join(code for code, _ in SNIPPETS)
    for name in ("attend", "causal", "explain", "weights", "statistics", "MultiHeadAttention"):
        assert re.search(rf"\b{name}\(", code)
    assert re.search(r"\bcache=", code)


def test_the_picture_is_what_the_demonstration_shows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("COLUMNS", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    demo()
    said = capsys.readouterr().out
    tour = README.index("## A short tour")
    pictures = re.findall(r"^```text\n(.*?)^```$", README[:tour], re.MULTILINE | re.DOTALL)
    assert pictures
    for picture in pictures:
        assert picture in said


def test_the_files_it_names_exist() -> None:
    named = set(re.findall(r"[\w/.]+\.(?:py|md|txt)\b", README))
    assert len(named) > 10
    homes = [ROOT, *(ROOT / home for home in ("regard", "regard/attention", "tests"))]
    homes.append(ROOT / "regard/attention/backends")
    assert [name for name in named if not any((home / name).exists() for home in homes)] == []


def test_every_module_of_attention_is_on_its_map() -> None:
    attention = ROOT / "regard" / "attention"
    modules = {path.name for path in attention.rglob("*.py")} - {"__init__.py"}
    assert {name for name in modules if name not in README} == set()
