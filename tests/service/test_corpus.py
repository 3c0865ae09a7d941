"""Files of any size: each line exactly once, whoever is killed when."""

import gzip
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from regard import load
from regard.service import corpus
from regard.service.corpus import JOB, SHARDS, main
from tests.processes import HANG, wait_until
from tests.service.samples import TEXTS, translator

pytestmark = pytest.mark.usefixtures("unchecked")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return translator(tmp_path_factory.mktemp("models") / "en-de")


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    path = tmp_path / "in.txt.gz"
    path.write_bytes(gzip.compress("".join(f"{text}\n" for text in (*TEXTS, "", *TEXTS)).encode()))
    return path


@pytest.mark.slow
def test_any_number_of_processes(folder: Path, lines: Path, tmp_path: Path) -> None:
    want = load(folder).translate([*TEXTS, "", *TEXTS])
    for size in (1, 3):
        out = tmp_path / f"out{size}"
        done = [
            corpus.translate(str(folder), lines, out, rank=rank, size=size, shard=7)
            for rank in range(size)
        ]
        assert sum(done) == 12
        assert corpus.join(lines, out, 7).read_text().splitlines() == want


def test_what_is_there_is_not_done_again(folder: Path, lines: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert corpus.translate(str(folder), lines, out, shard=7) == 12
    kept = {path.name: path.stat().st_mtime_ns for path in (out / SHARDS).iterdir()}
    (out / SHARDS / "00000003.txt").unlink()
    assert corpus.translate(str(folder), lines, out, shard=7) == 1
    again = {path.name: path.stat().st_mtime_ns for path in (out / SHARDS).iterdir()}
    assert {name for name in kept if kept[name] != again[name]} == {"00000003.txt"}


def test_another_job_is_refused(
    folder: Path, lines: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    words = [str(folder), str(lines), str(out), "--shard", "50"]
    assert main(words) == 0
    assert main(words) == 0
    for change in (["--shard", "9"], ["--shard", "50", "--beams", "1"]):
        assert main([*words[:3], *change]) == 2
        assert "holds another job" in capsys.readouterr().err
    lines.write_bytes(gzip.compress(b"other\n"))
    assert main(words) == 2
    assert main([str(folder), str(tmp_path / "none"), str(out)]) == 2
    assert main([*words[:3], "--shard", "0"]) == 2
    assert (out / JOB).exists()


@pytest.mark.slow
def test_a_job_that_is_killed_goes_on(folder: Path, tmp_path: Path) -> None:
    """Under torchrun, with other numbers of processes before and after."""
    path, out = tmp_path / "in.txt", tmp_path / "out"
    texts = TEXTS * 25
    path.write_text("".join(f"{text}\n" for text in texts))
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    job = ["-m", "regard.service.corpus", str(folder), str(path), str(out), "--shard", "20"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    first = subprocess.Popen([*words, "2", *job], env=env, start_new_session=True)
    wait_until(lambda: len(list(out.glob(f"{SHARDS}/*.txt"))) > 3)
    os.killpg(first.pid, signal.SIGKILL)
    first.wait(HANG)
    # torchrun starts its processes in sessions of their own, which end when they notice.
    done = subprocess.run([*words, "3", *job], env=env, timeout=HANG)
    assert done.returncode == 0
    want = load(folder).translate(texts)
    assert (out / "translations.txt").read_text().splitlines() == want
