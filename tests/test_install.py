"""Installation: a small core, optional extras, a wheel that works by itself."""

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from collections.abc import Iterable
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import regard
from regard.machine.extras import EXTRAS, install
from tests.processes import HANG

ROOT = Path(__file__).parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
OPTIONAL: dict[str, list[str]] = PROJECT["optional-dependencies"]
GROUPS: dict[str, list[str]] = PYPROJECT["dependency-groups"]

MODULES = {"pillow": "PIL", "pyyaml": "yaml", "scikit-learn": "sklearn"}
"""Where a package's module has another name."""


def names(requirements: Iterable[str]) -> set[str]:
    return {canonicalize_name(Requirement(line).name) for line in requirements}


def expand(extra: str) -> set[str]:
    """The requirements of an extra, with those of the extras that it is made of."""
    requirements = set()
    for line in OPTIONAL[extra]:
        parts = Requirement(line)
        requirements |= set().union(*map(expand, parts.extras)) if parts.extras else {line}
    return requirements


def pins(file: str) -> dict[str, str]:
    lines = (ROOT / file).read_text().splitlines()
    pinned = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    return {canonicalize_name(name): version for name, version in pinned.items()}


# Extras


def test_all_is_every_extra_but_ray() -> None:
    (line,) = OPTIONAL["all"]
    assert Requirement(line).extras == set(OPTIONAL) - {"all", "ray"}


def test_no_extra_repeats_a_requirement_of_another() -> None:
    lines = [line for extra in OPTIONAL.values() for line in extra if "regard[" not in line]
    assert sorted(lines) == sorted(set(lines))
    assert names(lines).isdisjoint(names(PROJECT["dependencies"]))


def test_development_tools_are_groups_and_no_extras() -> None:
    tools = names(line for lines in GROUPS.values() for line in lines)
    assert {"pytest", "ruff", "keras", "schemathesis", "triton"} <= tools
    assert tools.isdisjoint(names(line for extra in OPTIONAL for line in expand(extra)))


def test_every_module_is_in_the_extra_that_is_named_for_it() -> None:
    for extra, modules in EXTRAS.items():
        assert set(modules) <= {MODULES.get(name, name) for name in names(OPTIONAL[extra])}
    listed = {module for modules in EXTRAS.values() for module in modules}
    assert {MODULES.get(name, name) for name in names(expand("all"))} == listed


def test_the_core_is_small() -> None:
    assert names(PROJECT["dependencies"]) == {
        *("charset-normalizer", "docstring-parser", "jaxtyping", "numpy", "rich", "sacrebleu"),
        *("safetensors", "tokenizers", "torch", "tyro"),
    }


def test_every_bound_is_met_by_what_is_pinned() -> None:
    pinned = pins("constraints.txt")
    lists = [PROJECT["dependencies"], *OPTIONAL.values(), *GROUPS.values()]
    for requirement in {Requirement(line) for lines in lists for line in lines}:
        if requirement.name != "regard":
            assert pinned[canonicalize_name(requirement.name)] in requirement.specifier


def test_the_oldest_versions_are_the_lower_bounds() -> None:
    """`make test-oldest` installs them."""
    lines = (ROOT / "constraints-oldest.txt").read_text().split("\n\n")[0].splitlines()
    oldest = dict(line.split("==") for line in lines if not line.startswith("#"))
    for line in {*PROJECT["dependencies"], *expand("all")}:
        requirement = Requirement(line)
        assert requirement.specifier, f"{line} has no lower bound"
        for bound in requirement.specifier:
            assert bound.operator == ">="
            assert Version(oldest.pop(requirement.name)) == Version(bound.version)
    assert oldest == {}


@pytest.mark.parametrize("file", ["constraints.txt", "constraints-oldest.txt"])
def test_the_pinned_pip_knows_dependency_groups(file: str) -> None:
    assert Version(pins(file)["pip"]) >= Version("25.1")


def test_everything_installed_is_pinned() -> None:
    pinned = pins("constraints.txt")
    if importlib.metadata.version("torch").split("+")[0] != pinned["torch"]:
        pytest.skip("another torch than the Makefile installs")
    lines = {*PROJECT["dependencies"], *expand("all"), *GROUPS["test"], *GROUPS["peers"]}
    packages = closure({Requirement(line).name for line in lines if applies(Requirement(line))})
    installed = {name: importlib.metadata.version(name).split("+")[0] for name in packages}
    assert installed == {name: pinned.get(name) for name in packages}


WITHOUT = """
import contextlib, io, json, sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Missing())
sys.path.insert(0, {root!r})
from regard.cli.main import main
ended = []
for words in {commands}:
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        ended.append((main(words), said.getvalue()))
print(json.dumps(ended))
"""

NEEDS = {
    "train dates run --training.steps 1": "demo",
    "train classify run --training.steps 1": "demo",
    "train --config settings.yaml run": "train",
    "train translate run --pairs table.parquet": "text",
}
"""Commands, and the extra that each needs."""


def test_a_command_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No extra is installed."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "settings.yaml").write_text("task: translate\n")
    (tmp_path / "table.parquet").write_bytes(b"PAR1")
    script = WITHOUT.format(
        blocked={module for modules in EXTRAS.values() for module in modules},
        root=str(ROOT),
        commands=[words.split() for words in NEEDS],
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=HANG
    )
    assert done.returncode == 0, done.stderr
    for (status, said), extra in zip(json.loads(done.stdout), NEEDS.values()):
        assert status == 2, said
        assert said.splitlines()[-1].endswith(install(extra))


# The wheel and the source archive


def test_links_of_the_description_work_outside_of_the_repository(tmp_path: Path) -> None:
    """A package index shows README.md without the files beside it."""
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "regard/__init__.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    picture, page = "![A picture](docs/studio-byhand.png)", "[A page](docs/start.md#train)"
    with open(tmp_path / "README.md", "a", encoding="utf-8") as readme:
        print(picture, page, "[Here](#top) [There](https://pytorch.org)", file=readme)
    script = "import setuptools.build_meta as b; b.prepare_metadata_for_build_wheel('.')"
    # As on Windows, where files are not read as UTF-8 by default.
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=HANG,
    )
    assert done.returncode == 0, done.stderr
    metadata = next(tmp_path.glob("*.dist-info")) / "METADATA"
    text = metadata.read_text(encoding="utf-8")
    home = PROJECT["urls"]["Repository"]
    assert f"\nProject-URL: Repository, {home}\n" in text
    assert f"![A picture]({home}/raw/HEAD/docs/studio-byhand.png)" in text
    assert f"[A page]({home}/blob/HEAD/docs/start.md#train)" in text
    assert "[Here](#top) [There](https://pytorch.org)" in text
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert [link for link in links if not link.startswith(("#", "https:"))] == []


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel and a source archive of this checkout, built offline."""
    place = tmp_path_factory.mktemp("built")
    copied = place / "source"
    subprocess.run(
        ["git", "clone", "--quiet", "--shared", str(ROOT), str(copied)], check=True, timeout=HANG
    )
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "CHANGELOG.md"):
        (copied / name).write_bytes((ROOT / name).read_bytes())
    for kind in ("sdist", "wheel"):
        script = f"import setuptools.build_meta as build; build.build_{kind}({str(place)!r})"
        done = subprocess.run(
            [sys.executable, "-c", script],
            cwd=copied,
            capture_output=True,
            text=True,
            timeout=HANG,
        )
        assert done.returncode == 0, done.stderr
    return place


@pytest.mark.slow
def test_the_source_archive_holds_what_a_reader_wants(built: Path) -> None:
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        held = {name.partition("/")[2] for name in tar.getnames()}
    assert {"CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "README.md", "Makefile"} <= held
    assert any(name.startswith("examples/") for name in held)
    source = built / "source"
    listed = subprocess.run(["git", "ls-files"], cwd=source, capture_output=True, text=True)
    wanted = set(listed.stdout.splitlines())
    assert wanted - held == set()


@pytest.mark.slow
def test_the_wheel_works_in_an_environment_of_its_own(built: Path, tmp_path: Path) -> None:
    """With the core's packages alone: from data to a translated file, in real commands."""
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as files:
        held = set(files.namelist())
        (metadata,) = (name for name in held if name.endswith(".dist-info/METADATA"))
        said = files.read(metadata).decode()
    assert f"\nVersion: {regard.__version__}\n" in said
    data = {
        str(path.relative_to(ROOT))
        for kind in ("*.css", "*.js", "*.html", "*.cpp", "*.h", "py.typed")
        for path in (ROOT / "regard").rglob(kind)
        if subprocess.run(
            ["git", "ls-files", "--error-unmatch", str(path)], cwd=ROOT, capture_output=True
        ).returncode
        == 0
    }
    assert data <= held

    home = tmp_path / "environment"
    venv.create(home, with_pip=False, symlinks=True)
    site = next((home / "lib").glob("python*/site-packages"))
    with zipfile.ZipFile(wheel) as files:
        files.extractall(site)
    for name in closure(names(PROJECT["dependencies"])):
        link(name, site)
    python = home / "bin" / "python"

    def command(*words: str, text: str | None = None) -> str:
        done = subprocess.run(
            [python, "-I", "-m", "regard", *words],
            cwd=tmp_path,
            input=text,
            capture_output=True,
            text=True,
            timeout=HANG,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert command("--version") == f"regard {regard.__version__}\n"
    assert "0.576" in command("demo", "byhand")
    pairs = [(f"{a} {b}", f"{b} {a}") for a in ["one", "two", "three", "four"] for b in "abcdefgh"]
    (tmp_path / "pairs.tsv").write_text("".join(f"{one}\t{two}\n" for one, two in pairs))
    settings = ["--training.steps", "2", "--training.device", "cpu", "--vocabulary", "300"]
    small = ["--model.width", "16", "--model.heads", "2", "--model.feed-forward", "16"]
    command("train", "translate", "run", "--pairs", "pairs.tsv", *settings, *small)
    (tmp_path / "text.txt").write_text("one a\ntwo b\n")
    assert command("translate", "run", "text.txt").count("\n") == 2
    scores = json.loads(command("evaluate", "run", "--json"))["scores"]
    assert set(scores) == {"bleu", "chrf"}


def applies(requirement: Requirement) -> bool:
    """True if this machine needs the requirement without any extra."""
    return requirement.marker is None or requirement.marker.evaluate({"extra": ""})


def closure(packages: set[str]) -> set[str]:
    """These packages and everything that they require."""
    waiting, complete = {canonicalize_name(name) for name in packages}, set[str]()
    while waiting:
        name = waiting.pop()
        complete.add(name)
        lines = importlib.metadata.requires(name) or ()
        waiting |= names(line for line in lines if applies(Requirement(line))) - complete
    return complete


def link(name: str, site: Path) -> None:
    """Puts an installed package into another environment."""
    home = Path(sysconfig.get_path("purelib"))
    for file in importlib.metadata.files(name) or ():
        top = file.parts[0]
        if top not in ("..", "__pycache__") and not (site / top).exists():
            (site / top).symlink_to(home / top)
