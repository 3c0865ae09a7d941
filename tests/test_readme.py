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
    for name in (
        *("attend", "causal", "explain_attention", "attention_weights", "MultiHeadAttention"),
        *("Transformer", "VisionTransformer", "PackedLengths", "attention_statistics", "record"),
    ):
        assert re.search(rf"\b{name}(\.\w+)?\(", code)
    assert re.search(r"\bcache=", code)


def test_the_picture_is_what_the_demonstration_shows(capsys: pytest.CaptureFixture[str]) -> None:
    demo()
    said = capsys.readouterr().out
    begin, end = README.index("`regard demo byhand`"), README.index("## Your own data")
    pictures = re.findall(r"^```text\n(.*?)^```$", README[begin:end], re.MULTILINE | re.DOTALL)
    assert pictures
    for picture in pictures:
        assert picture in said


def test_the_files_it_names_exist() -> None:
    named = set(re.findall(r"[\w/.]+\.(?:py|md|txt)\b", README))
    assert len(named) > 10
    known = [str(path.relative_to(ROOT)) for path in ROOT.glob("*") if path.is_file()]
    for top in ("regard", "tests", "bench"):
        known += [str(path.relative_to(ROOT)) for path in (ROOT / top).rglob("*") if path.is_file()]
    theirs = {"captions.txt", "book.txt"}
    lost = [name for name in named - theirs if not any(f"/{k}".endswith(f"/{name}") for k in known)]
    assert lost == []


def test_it_counts_the_experiments() -> None:
    from regard.lab.claims import lines

    assert f"lists {sum(map(len, lines().values()))} experiments" in README


def test_every_command_it_shows_exists() -> None:
    """Its flags too: what is in a shell block must be understood by the command line."""
    from regard.cli.main import _parser

    shown = [
        line.split("#")[0] for kind, block in BLOCKS if kind == "sh" for line in block.split("\n")
    ]
    words = [line.partition("regard ")[2].split() for line in shown if "regard " in line]
    assert len(words) > 8
    for line in words:
        _parser().parse_args(line)
        if line[0] == "train":
            from regard.cli.arguments import parse
            from regard.cli.train import FROM_RUN
            from regard.task.specs import spec

            names = FROM_RUN.get(line[1])
            task = spec("translate" if names else line[1])
            first = 2 + len(names.split()) if names else 3
            flags = [flag for flag in line[first:] if flag != "…"]
            parse(task.config, task.preset("tiny"), flags, "train")


def test_every_module_of_attention_is_on_its_map() -> None:
    attention = ROOT / "regard" / "attention"
    modules = {path.name for path in attention.rglob("*.py")} - {"__init__.py"}
    assert {name for name in modules if name not in README} == set()
