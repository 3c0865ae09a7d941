"""The documentation is true: snippets run, commands and links exist, and no network is needed."""

import contextlib
import html.parser
import io
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
TESTED = [ROOT / "README.md", *PAGES]
BLOCK = re.compile(r"^```(\w+)( run)?\n(.*?)^```$\n?(?:```text\n(.*?)^```$)?", re.M | re.S)


def blocks(page: Path) -> list[tuple[str, bool, str, str]]:
    found = BLOCK.findall(page.read_text(encoding="utf-8"))
    return [(kind, bool(run), code, shown) for kind, run, code, shown in found if kind != "text"]


def python(code: str, names: dict[str, Any], shown: str) -> None:
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(code, names)
    if shown:
        assert without_rounding(said.getvalue()) == without_rounding(shown)


def without_rounding(text: str) -> str:
    """The text without differences of rounding, which depend on the processor."""
    return re.sub(r" +(?:0|\d(?:\.\d+)?e-0[5-9])(?= |$)", " ~", text, flags=re.M)


@pytest.mark.usefixtures("unchecked")  # readers run them without checks of annotations
@pytest.mark.parametrize("page", TESTED, ids=lambda page: page.stem)
def test_snippets_run_and_print_what_is_shown(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that need a trained run wait for the slow test."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for kind, run, code, shown in blocks(page):
        if kind == "python" and not run:
            python(code, names, shown)


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if any(run for _, run, _, _ in blocks(page))],
    ids=lambda p: p.stem,
)
def test_a_page_that_trains_runs_from_top_to_bottom(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for kind, run, code, shown in blocks(page):
        if kind == "python":
            python(code, names, shown)
        elif run:
            words = f'regard() {{ {shlex.quote(sys.executable)} -m regard "$@"; }}\nset -e\n{code}'
            environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
            done = subprocess.run(
                ["bash", "-c", words], env=environment, capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", ["index", "start"])
def test_the_line_that_installs_works(page: str) -> None:
    """All of it but the download: pip accepts the constraints and builds the metadata."""
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"^pip (install .*)$", text, re.MULTILINE)
    rehearse = f"{line} --dry-run --no-deps --no-build-isolation"
    command = [sys.executable, "-m", "pip", *shlex.split(rehearse)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Would install regard-" in done.stdout


def test_the_demo_by_hand_prints_what_the_course_shows() -> None:
    page = (DOCS / "course.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"^```text\n(4  Weights.*?)^```$", page, re.M | re.S)
    command = [sys.executable, "-m", "regard", "demo", "byhand"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, encoding="utf-8", check=True)
    assert shown in done.stdout


def test_the_files_that_development_names_exist() -> None:
    page = (DOCS / "development.md").read_text(encoding="utf-8")
    named = re.findall(r"`((?:\w+/)+(?:\w+\.\w+)?|\w+\.py)`", page)
    assert len(named) > 60
    places = (ROOT, ROOT / "regard", ROOT / "regard" / "cli")
    assert [name for name in named if not any((at / name).exists() for at in places)] == []


def commands() -> list[tuple[str, list[str]]]:
    found = []
    for page in TESTED:
        for kind, _, code, _ in blocks(page):
            for line in code.splitlines() if kind == "sh" else ():
                match = re.search(r"(?:^|\| )regard (.+)", line)
                if match:
                    found.append(
                        (page.stem, shlex.split(re.split(r" [<>] ", match[1])[0], comments=True))
                    )
    return found


@pytest.mark.parametrize(
    "words", [words for _, words in commands()], ids=lambda words: " ".join(words)[:60]
)
def test_every_command_is_understood(words: list[str]) -> None:
    """Its flags too."""
    from regard.cli.arguments import _names, parse, spelled_out
    from regard.cli.main import _parser

    options = _parser().parse_args(words)
    if words[0] != "train":
        settings = settings_of(words[0])
        if settings is not None:
            names, flags = _names(settings, options.words)
            parse(settings, settings(), flags, words[0])
            assert names or words[0] in ("studio", "lab", "attend", "cost")
        return
    from regard.cli.train import FROM_RUN
    from regard.recipes.book import RECIPES
    from regard.task.specs import spec

    if words[1] == "--recipe":
        assert words[2] in RECIPES
        return
    names = FROM_RUN[words[1]].split() if words[1] in FROM_RUN else ["RUN"]
    task = spec("translate" if words[1] in FROM_RUN else words[1])
    flags = spelled_out(task.config, words[2 + len(names) :])
    parse(task.config, task.preset("tiny"), flags, "train")


def test_every_command_is_on_a_page() -> None:
    from regard.cli.main import GROUPS

    text = "".join(page.read_text(encoding="utf-8") for page in TESTED)
    names = " ".join(GROUPS.values()).split()
    assert [name for name in names if not re.search(rf"\bregard {name}\b", text)] == []


def settings_of(command: str) -> Any:
    """The dataclass of a command's flags, where it has one."""
    from regard.cli import check, compare, evaluate, look, predict

    known: dict[str, Any] = {
        "evaluate": evaluate.Evaluate,
        "compare": compare.Compare,
        "check": check.Check,
        "look": look.Look,
        "translate": predict.Translate,
        "classify": predict.Classify,
        "read": predict.Read,
        "generate": predict.Generate,
        "label": predict.Label,
        "score": predict.Score,
    }
    return known.get(command)


class Links(html.parser.HTMLParser):
    """What a page points to, and the places in it that can be pointed at."""

    def __init__(self, text: str):
        super().__init__()
        self.to: list[str] = []
        self.places: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("href", "src") and value:
                self.to.append(value)
            if name == "id" and value:
                self.places.add(value)


def test_the_site_holds_together(tmp_path: Path) -> None:
    out = tmp_path / "site"
    command = [sys.executable, str(DOCS / "build.py"), str(out)]
    subprocess.run(command, check=True, capture_output=True, env={"PYTHONPATH": str(ROOT)})
    pages = {path.name: Links(path.read_text(encoding="utf-8")) for path in out.glob("*.html")}
    assert len(pages) > 20
    assert {f"{page.stem}.html" for page in PAGES} <= set(pages)
    for name, links in pages.items():
        for to in links.to:
            assert "//" not in to, f"{name} asks the network for {to}"
            file, _, place = to.partition("#")
            assert not file or (out / file).is_file(), f"{name} points to {to}"
            if place:
                assert place in pages[file or name].places, f"{name} points to {to}"
    reference = (out / "api-attention.html").read_text(encoding="utf-8")
    assert "scaled_dot_product_attention" in reference
    assert "may attend" in reference
    settings = (out / "api-train.html").read_text(encoding="utf-8")
    assert "weight_decay" in settings
    assert "Label smoothing" in settings
