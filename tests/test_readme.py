"""README.md is short, its links lead somewhere, and its shell lines run.

tests/test_docs.py runs its Python and parses its commands, as for every page.
"""

import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
LINKS = re.findall(r"\]\(([^)#]+)\)", README)


def test_it_is_short() -> None:
    assert len(README.splitlines()) <= 150


def test_its_links_lead_to_files() -> None:
    assert [link for link in LINKS if "//" not in link and not (ROOT / link).exists()] == []
    assert len({link for link in LINKS if re.fullmatch(r"docs/\w[\w-]*\.md", link)}) >= 10
    assert len(re.findall(r"!\[[^]]+\]\(docs/[\w-]+\.png\)", README)) == 1


def test_the_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = re.findall(r"^make (\w+)", README, re.M)
    assert {"demo", "test"} <= set(targets)
    assert [name for name in targets if not re.search(rf"^{name}:", makefile, re.M)] == []


@pytest.mark.slow
def test_the_quick_start_runs(tmp_path: Path) -> None:
    """With few steps; pages and servers are asked for an answer and stopped."""
    sentences = [f"{word} {n}" for word in ("one", "two", "red", "blue") for n in range(40)]
    for name in ("train.en", "train.de", "test.en", "test.de"):
        (tmp_path / name).write_text("".join(f"{line}\n" for line in sentences))
    block = README[README.index("## Quick start") :].partition("```sh\n")[2].partition("```")[0]
    lines = [line.partition("  #")[0].rstrip() for line in block.splitlines()]
    assert 8 <= len(lines) <= 10
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HOME": str(tmp_path)}
    for line in lines:
        line = re.sub(r"(train translate .*|train --resume .*)", r"\1 --steps 3 --device cpu", line)
        command = re.sub(r"\bregard (?=\w)", f"{sys.executable} -m regard ", line)
        if address := {"studio": "8421/", "serve": "8000/health"}.get(line.split()[1]):
            answers(f"{command}{' --no-browser' if '8421' in address else ''}", address, tmp_path)
            continue
        done = subprocess.run(
            ["bash", "-c", command], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, (line, done.stderr)
    assert (tmp_path / "look.html").stat().st_size > 10_000
    assert (tmp_path / "onnx-model").is_dir()


def answers(command: str, address: str, folder: Path) -> None:
    """A server answers at this address, and stops at SIGINT."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    server = subprocess.Popen(["bash", "-c", f"exec {command}"], cwd=folder, env=environment)
    try:
        for _ in range(300):
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{address}", timeout=5) as answer:
                    assert answer.status == 200
                    break
            except OSError:
                assert server.poll() is None
                time.sleep(0.2)
        else:
            pytest.fail(f"{command} did not answer")
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(60)
