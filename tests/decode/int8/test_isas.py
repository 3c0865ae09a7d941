"""Every instruction set gives the same bits: integers and floats, kernels and whole models."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from regard.decode.engine.int8 import library as native
from regard.native import build
from tests.decode.int8.samples import KINDS, kernels
from tests.processes import HANG

pytestmark = kernels
DRIVER = Path(__file__).with_name("driver.cpp")
CROSS, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
STRICT = ("-Wall", "-Wextra", "-Werror")


def has(isa: str) -> bool:
    return set(build.ISAS[isa]) <= build.cpu()


def driven(folder: Path, isa: str, compiler: str = "g++", emulator: tuple[str, ...] = ()) -> bytes:
    """All that the driver writes when it is compiled for this instruction set."""
    program, given, found = folder / f"driver-{isa}-{compiler}", folder / "given", folder / "found"
    flags = [flag for flag in build.compile_flags(isa) if flag not in ("-shared", "-fPIC")]
    named = f'-DKERNELS="{native.FILE}"'
    words = [compiler, *flags, build.INCLUDE, *STRICT, named, str(DRIVER), "-o", str(program)]
    subprocess.run(words, check=True, timeout=HANG)
    torch.manual_seed(0)
    torch.randn(100_003).numpy().tofile(given)
    subprocess.run([*emulator, str(program), str(given), str(found)], check=True, timeout=HANG)
    numbers = np.fromfile(found, np.float32)
    assert len(numbers) > 100_000
    assert np.isfinite(numbers[:200_000]).all()
    numbers[np.isnan(numbers)] = np.nan  # of which there are many
    return numbers.tobytes()


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return driven(tmp_path_factory.mktemp("reference"), native.kernels().isa)


@pytest.mark.skipif(not has("avx2"), reason="this CPU has no AVX2")
def test_avx2(tmp_path: Path, reference: bytes) -> None:
    assert driven(tmp_path, "avx2") == reference


@pytest.mark.skipif(
    not shutil.which(CROSS) or not shutil.which(EMULATOR), reason=f"no {CROSS}, or no {EMULATOR}"
)
def test_neon(tmp_path: Path, reference: bytes) -> None:
    emulator = (EMULATOR, "-L", "/usr/aarch64-linux-gnu")
    assert driven(tmp_path, "neon", CROSS, emulator) == reference


@pytest.mark.skipif(not shutil.which("clang++"), reason="no clang++")
@pytest.mark.parametrize("isa", ["avx512_vnni", "avx2"])
def test_another_compiler(isa: str, tmp_path: Path, reference: bytes) -> None:
    if not has(isa):
        pytest.skip(f"this CPU has no {isa}")
    assert driven(tmp_path, isa, "clang++") == reference


WHOLE = """
import hashlib, sys, torch
from regard.decode.engine.int8 import library
from regard.decode.engine.int8.linear import int8
from tests.decode.int8.samples import KINDS, made
from tests.decode.int8.test_session import logits
assert library.kernels().isa == sys.argv[1], library.missing()
torch.set_num_threads(2)
for kind in KINDS:
    print(hashlib.sha256(logits(int8(made(kind))).numpy().tobytes()).hexdigest())
"""


@pytest.mark.skipif(not (has("avx512_vnni") and has("avx2")), reason="there is one set alone")
def test_whole_models() -> None:
    digests = []
    for isa in ("avx512_vnni", "avx2"):
        environment = {**os.environ, "REGARD_CPU_ISA": isa}
        done = subprocess.run(
            [sys.executable, "-c", WHOLE, isa],
            cwd=Path(__file__).parents[3],
            env=environment,
            capture_output=True,
            text=True,
            timeout=HANG,
        )
        assert done.returncode == 0, done.stderr
        digests.append(done.stdout.split())
    assert len(set(digests[0])) == len(KINDS)
    assert digests[0] == digests[1]
