"""Where compiled kernels are kept, and that nothing fails where there are none."""

import functools
import io
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from regard.decode.engine.int8 import library as native
from regard.decode.engine.int8.linear import int8
from regard.decode.search import topk as choice
from regard.model.transformer import Transformer, TransformerConfig

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="kernels are for Linux")
kernels = pytest.mark.skipif(native.library() is None, reason=native.missing())

Compiler = Callable[[str], Path]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty one, on a CPU that has what it needs."""
    monkeypatch.setattr(native, "_cpu", lambda: set(native.NEEDED))
    monkeypatch.setattr(native, "_load", functools.cache(native._load.__wrapped__))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "regard" / "kernels"


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    """Puts a compiler in the place of the usual one, of which these are the words."""

    def make(script: str) -> Path:
        path = tmp_path / "compiler"
        path.write_text(f"#!/bin/sh\necho called >> {tmp_path}/calls\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setenv("CXX", str(path))
        return path

    return make


# Made elsewhere before, so that no test waits for a real compiler.
MADE = getattr(native.library(), "_name", "")
COPY = f'while [ "$1" != -o ]; do shift; done; cp {MADE} "$2"'


def calls(folder: Path) -> int:
    log = folder / "calls"
    return len(log.read_text().splitlines()) if log.exists() else 0


@kernels
def test_kernels_are_compiled_once_and_kept_where_nobody_else_can_write(
    cache: Path, tmp_path: Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler(COPY)
    before = os.umask(0)
    try:
        native._open()
    finally:
        os.umask(before)
    (file,) = cache.iterdir()  # and nothing is left of the making
    assert cache.stat().st_mode & 0o777 == file.stat().st_mode & 0o777 == 0o700
    monkeypatch.setenv("PATH", "")
    native._open()
    assert calls(tmp_path) == 1


@kernels
@pytest.mark.parametrize("content", [b"", b"no library"])
def test_a_damaged_file_is_made_again(
    content: bytes,
    cache: Path,
    tmp_path: Path,
    compiler: Compiler,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiler(COPY)
    native._open()
    (file,) = cache.iterdir()
    # In another folder, since a loader opens no file twice.
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    file = native._folder() / file.name
    file.write_bytes(content)
    native._open()
    assert calls(tmp_path) == 2
    assert file.read_bytes() == Path(MADE).read_bytes()


@kernels
def test_a_file_that_others_can_write_is_made_again(
    cache: Path, tmp_path: Path, compiler: Compiler
) -> None:
    compiler(COPY)
    native._open()
    (file,) = cache.iterdir()
    file.chmod(0o777)
    native._open()
    assert calls(tmp_path) == 2
    assert file.stat().st_mode & 0o777 == 0o700


@kernels
def test_a_compiler_may_have_arguments(
    cache: Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", f"env WHY=not {compiler(COPY)}")
    native._open()
    assert len(list(cache.iterdir())) == 1


@kernels
def test_threads_wait_for_the_one_that_compiles(tmp_path: Path, compiler: Compiler) -> None:
    compiler(f"sleep 0.2; {COPY}")
    found: list[object] = []
    threads = [threading.Thread(target=lambda: found.append(native.library())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 3
    assert len(set(map(id, found))) == calls(tmp_path) == 1


@kernels
@pytest.mark.parametrize("terminal", [True, False])
def test_a_terminal_is_told_why_it_waits(
    terminal: bool, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler(COPY)
    shown = io.StringIO()
    monkeypatch.setattr(shown, "isatty", lambda: terminal)
    monkeypatch.setattr(sys, "stderr", shown)
    native._open()
    native._open()
    assert shown.getvalue().count("compiling decoding kernels for this CPU, once") == terminal
    assert len(shown.getvalue().splitlines()) == terminal


# None


def reason() -> str:
    """Why there are none; whoever asks for a search or for 8 bits gets torch instead."""
    assert native.library() is None
    said = native.missing()
    assert len(said.splitlines()) == 1
    logits = torch.randn(3, 7)
    values, tokens = choice.best(logits, 2)
    torch.testing.assert_close(values, logits.log_softmax(-1).topk(2).values)
    model = Transformer(TransformerConfig.tiny(11)).eval()
    with pytest.warns(UserWarning, match="^8-bit layers run through torch, and slower: ") as warned:
        int8(model)
    assert len(warned) == 1
    return said


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    assert reason() == "there is no C++ compiler g++; install g++, or name one in CXX"


def test_with_another_that_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/absent/c++ -v")
    assert reason().startswith("there is no C++ compiler /absent/c++;")


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("echo 'in a.h:' >&2; echo 'a.h:1: fatal error: disk full' >&2; exit 1", "disk full"),
        ("echo >&2; exit 3", "non-zero exit status 3"),
        ("exit 0", "No such file"),
        ('while [ "$1" != -o ]; do shift; done; echo nonsense > "$2"', "nonsense|file too short"),
        ("sleep 5", "timed out after 0.3"),
        ("printf '\\377 error' >&2; exit 1", "error"),
    ],
)
def test_with_one_that_fails(
    script: str, said: str, cache: Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "PATIENCE", 0.3 if "sleep" in script else 60)
    compiler(script)
    assert any(part in reason() for part in said.split("|"))
    assert not [path for path in cache.iterdir() if path.is_dir()]


def test_on_another_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_cpu", lambda: set(native.NEEDED) - {"avx512_vnni"})
    assert reason() == "this CPU has no avx512_vnni"


def test_where_nothing_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert reason().endswith("name another folder in XDG_CACHE_HOME")


def test_in_a_folder_that_others_can_write(cache: Path) -> None:
    cache.mkdir(parents=True)
    cache.chmod(0o777)
    assert "nobody else may write there" in reason()


def test_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", home)
    assert reason().endswith("name a folder in XDG_CACHE_HOME")


def test_the_source_is_installed_with_the_package() -> None:
    import tomllib

    about = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    patterns = about["tool"]["setuptools"]["package-data"]["regard"]
    package = Path(native.__file__).parents[1]
    assert native.SOURCE in {path for pattern in patterns for path in package.glob(pattern)}
