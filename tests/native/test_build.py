"""Where compiled kernels are kept, for which CPU, and that nothing fails where there are none."""

import functools
import io
import os
import platform
import subprocess
import sys
import threading
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from regard.attention import rotation_cpu
from regard.attention.backends import sequences
from regard.decode.engine.int8 import library as native
from regard.decode.engine.int8.linear import int8
from regard.model.transformer import Transformer, TransformerConfig
from regard.native import build
from regard.train import softmax_cpu
from tests.decode.int8.samples import kernels

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="CPUs are told apart on Linux")

Compiler = Callable[[str], Path]
BEST = "neon" if platform.machine() == "aarch64" else "avx512_vnni"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty one, on a CPU that has what it needs."""
    monkeypatch.setattr(
        build, "cpu", lambda: {name for some in build.ISAS.values() for name in some}
    )
    monkeypatch.setattr(build, "_load", functools.cache(build._load.__wrapped__))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("REGARD_CPU_ISA", raising=False)
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
        native.SOURCE.open(BEST)
    finally:
        os.umask(before)
    (file,) = cache.iterdir()  # and nothing is left of the making
    assert cache.stat().st_mode & 0o777 == file.stat().st_mode & 0o777 == 0o700
    monkeypatch.setenv("PATH", "")
    native.SOURCE.open(BEST)
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
    native.SOURCE.open(BEST)
    (file,) = cache.iterdir()
    # In another folder, since a loader opens no file twice.
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    file = build._folder() / file.name
    file.write_bytes(content)
    native.SOURCE.open(BEST)
    assert calls(tmp_path) == 2
    assert file.read_bytes() == Path(MADE).read_bytes()


@kernels
def test_a_file_that_others_can_write_is_made_again(
    cache: Path, tmp_path: Path, compiler: Compiler
) -> None:
    compiler(COPY)
    native.SOURCE.open(BEST)
    (file,) = cache.iterdir()
    file.chmod(0o777)
    native.SOURCE.open(BEST)
    assert calls(tmp_path) == 2
    assert file.stat().st_mode & 0o777 == 0o700


@kernels
def test_a_compiler_may_have_arguments(
    cache: Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", f"env WHY=not {compiler(COPY)}")
    native.SOURCE.open(BEST)
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
    native.SOURCE.open(BEST)
    native.SOURCE.open(BEST)
    assert (
        shown.getvalue().count("compiling kernels of 8-bit decoding for this CPU, once") == terminal
    )
    assert len(shown.getvalue().splitlines()) == terminal


# None


def reason() -> str:
    """Why there are none; whoever asks for 8 bits gets torch instead."""
    assert native.library() is None
    said = native.missing()
    assert len(said.splitlines()) == 1
    model = Transformer(TransformerConfig.tiny(11)).eval()
    with pytest.warns(UserWarning, match="^8-bit layers run through torch, and slower: ") as warned:
        int8(model)
    assert len(warned) == 1
    assert model(*[torch.tensor([[3, 5, 7]])] * 2).isfinite().all()
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
    monkeypatch.setattr(build, "PATIENCE", 0.3 if "sleep" in script else 60)
    compiler(script)
    assert any(part in reason() for part in said.split("|"))
    assert not [path for path in cache.iterdir() if path.is_dir()]


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


@pytest.mark.parametrize("part", [native, sequences, rotation_cpu, softmax_cpu])
def test_the_sources_are_installed_with_the_package(part: Any) -> None:
    source = part.SOURCE
    root = Path(__file__).parents[2]
    about = tomllib.loads((root / "pyproject.toml").read_text())
    patterns = about["tool"]["setuptools"]["package-data"]["regard"]
    installed = {path for pattern in patterns for path in (root / "regard").glob(pattern)}
    assert {source.file, *source.headers} <= installed
    included = {line for line in source.file.read_text().splitlines() if line[:10] == '#include "'}
    assert included == {f'#include "{header.name}"' for header in source.headers}


# Instruction sets


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The instruction sets for which kernels were asked for; all of them can be had."""
    asked: list[str] = []
    monkeypatch.setattr(native.SOURCE, "open", lambda isa: asked.append(isa) or "a library")
    monkeypatch.setattr(native.SOURCE, "declare", lambda _: None)
    return asked


@pytest.mark.parametrize(
    ("machine", "lacking", "isa", "why"),
    [
        ("x86_64", set(), "avx512_vnni", ""),
        ("x86_64", {"avx512_vnni"}, "avx2", "avx512_vnni: this CPU has no avx512_vnni"),
        ("x86_64", {"avx512f", "f16c"}, "", "avx2: this CPU has no f16c"),
        ("aarch64", set(), "neon", ""),
        ("arm64", set(), "neon", ""),
        ("aarch64", {"asimddp"}, "", "neon: this CPU has no asimddp"),
        ("riscv64", set(), "", "there are no kernels for riscv64, but for x86_64 and aarch64"),
    ],
)
def test_the_best_that_the_cpu_has(
    machine: str,
    lacking: set[str],
    isa: str,
    why: str,
    opened: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    has = build.cpu() - lacking
    monkeypatch.setattr(build, "cpu", lambda: has)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    found = native.kernels()
    assert (found.isa, found.reason) == (isa, why)
    assert opened == [isa] * bool(isa)
    assert (found.library is None) == (not isa) == bool(native.missing())


@pytest.mark.parametrize(
    ("wanted", "isa", "why"),
    [
        ("avx2", "avx2", ""),
        ("neon", "neon", ""),
        ("", BEST, ""),
        ("sse", "", "REGARD_CPU_ISA (sse) is unknown; choose from avx512_vnni, avx2, neon"),
    ],
)
def test_the_one_that_is_asked_for(
    wanted: str, isa: str, why: str, opened: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REGARD_CPU_ISA", wanted)
    assert native.kernels()[1:] == (isa, why)


def test_one_that_the_cpu_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "cpu", lambda: {"avx2", "fma", "f16c"})
    monkeypatch.setenv("REGARD_CPU_ISA", "neon")
    assert reason() == "neon: this CPU has no asimddp"


def test_a_compiler_that_does_not_know_the_best(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(native.SOURCE, "declare", lambda _: None)
    said = "error: unrecognized option -mavx512vnni"
    compiler(f'case "$*" in *vnni*) echo "{said}" >&2; exit 1;; esac; {COPY}')
    if MADE:
        assert native.kernels()[1:] == ("avx2", f"avx512_vnni: {said}")


def test_this_cpu_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    words = subprocess.run(["cat", "/proc/cpuinfo"], capture_output=True, text=True).stdout.split()
    assert {name for names in build.ISAS.values() for name in names if name in words} == {
        name for names in build.ISAS.values() for name in names if name in build.cpu()
    }
