"""Commands that are shown can be typed where the user is."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from regard.cli.main import main
from regard.machine import extras, shell

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def env(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment that is not on PATH, in the working directory."""
    folder = tmp_path / "env" / "bin"
    folder.mkdir(parents=True)
    for name in ("python", "regard"):
        (folder / name).write_text("")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", os.defpath)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    monkeypatch.setattr(sys, "argv", [str(folder / "regard")])
    return folder


def test_what_is_not_on_path_is_shown_with_its_path(
    env: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (shell.program(), shell.python()) == ("env/bin/regard", "env/bin/python")
    monkeypatch.chdir("env/bin")
    assert shell.program() == "./regard"
    monkeypatch.chdir(ROOT)
    assert shell.python() == str(env / "python")
    monkeypatch.setenv("PATH", f"{env}{os.pathsep}{os.defpath}")
    assert (shell.program(), shell.python()) == ("regard", "python")


def test_an_interpreter_of_another_name(env: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The `python` on PATH may be any other."""
    other = env.parent.parent / "other"
    other.mkdir()
    (other / "python").write_text("")
    (other / "python").chmod(0o755)
    monkeypatch.setenv("PATH", str(other))
    assert shell.python() == "env/bin/python"
    monkeypatch.setattr(sys, "executable", "")
    assert shell.python() == "python"


def test_a_module_is_started_as_a_module(env: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [str(Path(shell.__file__).parent.parent / "__main__.py")])
    assert shell.program() == "env/bin/python -m regard"
    monkeypatch.setattr(sys, "argv", ["/somewhere/pytest/__main__.py"])
    assert shell.program() == "regard"


def test_commands_in_a_text(env: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "What regard does:\n  regard demo\necho x | regard translate regard\nregarding"
    shown = "What regard does:\n  {0} demo\necho x | {0} translate regard\nregarding"
    assert shell.typed(text) == shown.format("env/bin/regard")
    (env.parent.parent / r"a\1 b").mkdir()
    env.rename(folder := env.parent.parent / r"a\1 b" / "bin")
    monkeypatch.setattr(sys, "argv", [str(folder / "regard")])
    assert shell.typed(text) == shown.format(r"'a\1 b/bin/regard'")


@pytest.mark.usefixtures("env")
@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["recipes", "dates"], "env/bin/regard train --recipe dates RUN"),
        (["help", "8 bits"], "env/bin/regard quantize"),
        (["lab", "--find", "your own words"], "env/bin/regard lab exercise words"),
    ],
)
def test_a_command_that_is_suggested_works_from_here(
    words: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 0
    assert line in capsys.readouterr().out.splitlines()


def test_paths_are_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert shell.short(tmp_path / "a b") == "'a b'"
    assert shell.short(tmp_path) == "."
    assert shell.short(tmp_path.parent) == str(tmp_path.parent)


def test_an_extra_is_installed_for_this_interpreter(
    env: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extras, "__file__", str(env / "regard" / "extras.py"))
    assert extras.install("export") == "env/bin/python -m pip install 'regard[export]'"
    assert extras.install_package("triton") == "env/bin/python -m pip install triton"


def test_in_a_checkout_the_versions_are_those_that_were_tested(
    env: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkout = env.parent.parent / "a checkout"
    checkout.mkdir()
    (checkout / "constraints.txt").write_text("")
    monkeypatch.setattr(extras, "__file__", str(checkout / "regard" / "machine" / "extras.py"))
    assert extras.install("export") == (
        "env/bin/python -m pip install -c 'a checkout/constraints.txt' -e 'a checkout[export]'"
    )
    monkeypatch.chdir(checkout)
    assert extras.install("export").endswith("-m pip install -c constraints.txt -e '.[export]'")


def test_the_line_of_this_checkout_works_as_it_is_written() -> None:
    line = extras.install("vision").replace("install", "install --help", 1)
    shown = subprocess.run(line, shell=True, cwd=ROOT, capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
