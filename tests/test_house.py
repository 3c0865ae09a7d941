"""The package as a whole: it imports quickly, and its parts agree with each other."""

import ast
import builtins
import importlib
import importlib.metadata
import os
import re
import signal
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

import jaxtyping
import pytest
import torch
from beartype import beartype
from jaxtyping import Float
from torch import Tensor

import regard
from regard.cli import main as cli
from tests.processes import HANG

ROOT = Path(__file__).parent.parent
MODULES, OTHER_NAMES = vars(regard)["_MODULES"], vars(regard)["_OTHER_NAMES"]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def python(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words], cwd=ROOT, capture_output=True, text=True, timeout=HANG
    )


def packages_imported_by(statement: str, after: str = "pass") -> set[str]:
    """The packages outside the standard library that a statement imports in a new process."""
    script = f"import sys\n{after}\nbefore = set(sys.modules)\n{statement}\nprint()\n"
    done = python("-c", script + "print(*set(sys.modules) - before)")
    assert done.returncode == 0, done.stderr
    names = {module.split(".")[0] for module in done.stdout.splitlines()[-1].split()}
    return names - sys.stdlib_module_names


# Start: a module that is not imported costs no time (bench/start.py measures it)


def test_importing_regard_imports_nothing_else() -> None:
    assert packages_imported_by("import regard") == {"regard"}


def test_attend_wants_little_beside_torch() -> None:
    little = packages_imported_by("import regard; regard.attend", after="import torch")
    assert little <= {"regard", "jaxtyping", "numpy"}


def test_help_needs_nothing_else() -> None:
    main = "from regard.cli.main import main\ntry: main(['--help'])\nexcept SystemExit: pass"
    assert packages_imported_by(main) == {"regard"}


# The public face


@pytest.mark.parametrize("name", regard.__all__)
def test_every_public_name_resolves(name: str) -> None:
    assert getattr(regard, name) is not None


def test_dir_lists_the_public_names() -> None:
    assert dir(regard) == sorted(regard.__all__)


def test_a_star_import_shadows_nothing_of_python() -> None:
    names: dict[str, Any] = {}
    exec("from regard import *", names)
    assert set(regard.__all__) <= set(names)
    del names["__builtins__"]
    assert not set(names) & (set(dir(builtins)) | sys.stdlib_module_names)


def test_type_checkers_see_the_names_of_the_running_package() -> None:
    """Three lists must agree: `__all__`, the imports for type checkers, the lazy imports."""
    (block,) = [
        node
        for node in ast.parse(Path(regard.__file__).read_text()).body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    imported = [
        (node.module, alias)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    ]
    typed = {
        (f"{module}.{alias.name}", alias.name)
        for module, alias in imported
        if alias.asname in (None, alias.name)
    }
    lazy = {
        (f"{module}.{name}", name) for module, names in MODULES.items() for name in names.split()
    }
    modules = {("regard.masks", "masks"), ("regard.checkpoint", "checkpoint")}
    assert typed == lazy | modules | {("regard.attention.mask.packed", "packed")}
    also = {"checkpoint", "packed"}
    assert {name for _, name in typed} == set(regard.__all__) - {"__version__"} | also
    short = {ast.unparse(node) for node in block.body if isinstance(node, ast.Assign)}
    short |= {
        f"{alias.asname} = {alias.name}"
        for _, alias in imported
        if alias.asname not in (None, alias.name)
    }
    assert short == {f"{name} = {public}" for name, public in OTHER_NAMES.items()}


def test_no_public_name_is_hidden_by_a_module_of_its_name() -> None:
    """An import of regard.NAME would replace the attribute of that name."""
    script = """
import importlib, pkgutil, regard
for module in pkgutil.walk_packages(regard.__path__, "regard."):
    if "__main__" not in module.name and ".notebooks." not in module.name:  # these run something
        try:
            importlib.import_module(module.name)
        except ImportError as error:
            assert not (error.name or "").startswith("regard"), error
homes = {name: module for module, names in regard._MODULES.items() for name in names.split()}
for name in [*homes, *regard._OTHER_NAMES]:
    public = regard._OTHER_NAMES.get(name, name)
    assert getattr(regard, name) is getattr(importlib.import_module(homes[public]), public), name
assert regard.packed is regard.masks.packed
"""
    done = python("-c", script)
    assert done.returncode == 0, done.stderr


def test_a_function_and_its_module_may_share_a_name() -> None:
    module = importlib.import_module("regard.attention.weights")
    assert module.attention_weights is regard.attention_weights
    assert regard.attention.weights is module


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'regard' has no attribute 'casual'"):
        _ = regard.casual


def test_one_version() -> None:
    assert "version" in PROJECT["dynamic"]  # which pyproject.toml takes from regard.__version__
    assert regard.__version__ == importlib.metadata.version("regard")
    assert f"\n## {regard.__version__}" in (ROOT / "CHANGELOG.md").read_text()


# The command line


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"regard {regard.__version__}\n"


@pytest.mark.parametrize("words", [["dmo"], [], ["demo", "--fast"], ["--versio"]])
def test_wrong_words_are_one_line(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert re.fullmatch(r"regard: [^\n]+\n", output.err)


def test_an_unknown_command_lists_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["dmo"]) == 2
    message = capsys.readouterr().err
    assert "dmo" in message
    assert "demo" in message


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (
            ValueError("heads (3) must divide width (512);\n  try 4 or 8"),
            2,
            "regard: heads (3) must divide width (512); try 4 or 8\n",
        ),
        (KeyboardInterrupt(), 130, ""),
        (
            MemoryError(),
            2,
            "regard: there is not enough memory; use a smaller model or a smaller batch "
            "(MemoryError)\n",
        ),
    ],
)
def test_what_stops_a_command(
    error: BaseException,
    status: int,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def stop(options: object) -> None:
        raise error

    monkeypatch.setattr(cli, "_demo", stop)
    assert cli.main(["demo"]) == status
    assert capsys.readouterr() == ("", message)


def test_an_internal_error_keeps_its_traceback_in_a_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def stop(options: object) -> None:
        raise KeyError("pears")

    monkeypatch.setattr(cli, "_demo", stop)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert cli.main(["demo"]) == 70
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    (report,) = tmp_path.iterdir()
    assert str(report) in line
    assert "Traceback" in report.read_text()
    with pytest.raises(KeyError):
        cli.main(["--debug", "demo"])


@pytest.mark.parametrize("encoding", ["ascii", "latin1"])
def test_terminals_that_cannot_show_a_sign(encoding: str) -> None:
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    done = subprocess.run(
        [sys.executable, "-m", "regard", "demo", "byhand"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        timeout=HANG,
    )
    assert done.returncode == 0, done.stderr
    assert b"A = E /" in done.stdout


@pytest.mark.parametrize("stream", ["<&-", ">&-", "2>&-"])
def test_streams_that_are_closed(stream: str) -> None:
    words = (
        f"{sys.executable} -m regard attend --query '1 0' --key '1 0; 0 1' --value '1; 2' {stream}"
    )
    done = subprocess.run(["sh", "-c", words], cwd=ROOT, capture_output=True, timeout=HANG)
    assert done.returncode == 0, done.stderr


def test_a_reader_that_leaves_is_no_error() -> None:
    endless = (
        "import sys; from regard.cli import main as cli; cli._demo = lambda options: "
        "[print('regard') for _ in iter(int, 1)]; sys.exit(cli.main(['demo']))"
    )
    writer = subprocess.Popen(
        [sys.executable, "-c", endless], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert writer.stdout is not None
    assert writer.stdout.readline() == b"regard\n"
    writer.stdout.close()
    assert writer.wait(HANG) == 128 + signal.SIGPIPE
    assert writer.stderr is not None
    assert writer.stderr.read() == b""
    writer.stderr.close()


# Commands and contracts


def targets(text: str) -> set[str]:
    return set(re.findall(r"\bmake ([a-z][a-z-]*)", text))


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", ".ci/run"])
def test_the_commands_a_page_names_exist(page: str) -> None:
    defined = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert targets((ROOT / page).read_text()) <= defined
    assert targets((ROOT / page).read_text())


def test_every_folder_of_modules_is_a_package() -> None:
    # import-linter passes over a folder without __init__.py in silence.
    folders = {module.parent for module in (ROOT / "regard").rglob("*.py")}
    assert [folder for folder in sorted(folders) if not (folder / "__init__.py").exists()] == []


def test_an_old_python_is_refused_in_one_line(tmp_path: Path) -> None:
    old = tmp_path / "python3"
    old.write_text("#!/bin/sh\ncase $1 in --version) echo Python 3.8.1;; esac\n")
    old.chmod(0o755)
    words = ["make", "--no-print-directory", "test", f"PYTHON={old}", f"VENV={tmp_path / 'venv'}"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=HANG)
    assert done.returncode == 2
    assert done.stdout == ""
    assert re.fullmatch(r".*needs Python 3\.11 or newer.*Python 3\.8\.1.*\n", done.stderr)


# The checks that the tests rely on


@jaxtyping.jaxtyped(typechecker=beartype)
def transpose(x: Float[Tensor, "B D"]) -> Float[Tensor, "D B"]:
    return x.mT


def test_annotations_are_checked() -> None:
    with pytest.raises(jaxtyping.TypeCheckError):
        transpose(torch.ones(2, 3, 5))


@pytest.mark.usefixtures("unchecked")
def test_unchecked_switches_the_checks_off() -> None:
    assert transpose(torch.ones(2, 3, 5)).shape == (2, 5, 3)
    compiled = torch.compile(transpose, fullgraph=True, backend="eager")
    assert compiled(torch.ones(2, 3)).shape == (3, 2)


def test_regard_is_checked_too() -> None:
    with pytest.raises(jaxtyping.TypeCheckError):
        cli.main(3)


def test_keras_computes_with_torch() -> None:
    assert importlib.import_module("keras").backend.backend() == "torch"


def test_no_module_imports_another_in_a_circle() -> None:
    """Imports within functions are counted too; those for type checkers alone are not."""
    graph = _imports()
    assert len(graph) > 150
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " → ".join((*path[path.index(module) :], module))
        if module not in done:
            for other in sorted(graph[module]):
                visit(other, (*path, module))
            done.add(module)

    for module in sorted(graph):
        visit(module, ())


def _imports() -> dict[str, set[str]]:
    """The imports of each module, except the package's own, whose names are imported at use."""
    files = {}
    for path in (ROOT / "regard").rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    graph: dict[str, set[str]] = {name: set() for name in files}
    for name, path in files.items():
        waiting: list[ast.AST] = [ast.parse(path.read_text())] if name != "regard" else []
        while waiting:
            node = waiting.pop()
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
                waiting.extend(node.orelse)
                continue
            waiting.extend(ast.iter_child_nodes(node))
            named = []
            if isinstance(node, ast.Import):
                named = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                whole = [f"{node.module}.{alias.name}" for alias in node.names]
                named = [full if full in files else node.module for full in whole]
            graph[name].update(module for module in named if module in files and module != name)
    return graph
