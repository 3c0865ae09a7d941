"""What `bench.gpu` publishes is what the pages publish, and it reads what the benchmarks print."""

import argparse
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from bench import decoding, gpu, steps
from bench.table import cell, markdown, ratio
from bench.timing import Run
from regard.data.batch import text_batch

ROOT = Path(__file__).parent.parent
PAGES = ("docs/benchmarks.md", "README.md", "RESULTS.md")

PRINTED = {
    "decoding": """64 sentences, {search}
  ours bf16             64,000 tok/s ± 3%  100.0% as ours bf16
  HF static bf16         9,000 tok/s ± 1%   99.0% as ours bf16  64.5 × the time of ours bf16
  eager bf16             9,000 tok/s ± 1%   99.0% as ours bf16  64.5 × the time of ours bf16
""",
    "steps": """base Transformer, 256 sentences
  {peer}, captured: 39.5 ms, 2.00 GiB, loss 9.7 → 9.6
  ours: 10.75 ms, 1.00 GiB, loss 9.7 → 9.6
  in turns with {peer}, captured: 39.4 ms, ours is 3.67 × as fast, with 0.500 × the memory
regard train translate --size tiny: 10.75 target tokens/s, of the bare step's 2 0.97
regard train translate --size base: 3.67 target tokens/s, of the bare step's 2 0.97
""",
    "serving": """
regard serve, 1 sentences a request: 13,800 sentences/s, 0.79 of the bare engine's 17,000
regard serve, 32 sentences a request: 21,400 sentences/s, 1.18 of the bare engine's 18,000
""",
    "attention": """attend: NVIDIA H200, torch 2.11.0,
{mask:17s} L {length:6d}  K   64  packed   best direct flash  graph   2.25x  call   1.10x (+1.0 us)
""",
    "statistics": "statistics {mask:8s} L  16384  K {width:4d}   1.95 x the full forward\n",
    "models": """ViT-B/16, 256 images
  infer eager: ours 5,000/s; timm 3,570/s, 1.40 ×
  infer, the best of each: ours 5,200/s, timm compiled 4,000/s, 1.30 ×
""",
}


@pytest.mark.parametrize("command", gpu.COMMANDS, ids=lambda command: command.name)
def test_every_published_figure_is_on_a_page(command: gpu.Command) -> None:
    pages = "".join((ROOT / name).read_text() for name in PAGES)
    assert command.rows
    for row in command.rows:
        assert row.quote in pages, row.quote


@pytest.mark.parametrize("command", gpu.COMMANDS, ids=lambda command: command.name)
def test_figures_are_found_in_what_a_benchmark_prints(command: gpu.Command) -> None:
    kind = command.words[2].removeprefix("bench.")
    for row in command.rows:
        if not row.pattern:
            continue
        words = {
            "search": "beam 4" if row.name.startswith("beam 4") else "greedy",
            "peer": row.name.rpartition("×")[2].removesuffix(" captured").strip(),
            "mask": row.name.partition(",")[0],
            "length": 16384 if "16384" in row.name else 1024,
            "width": 128 if "128" in row.name else 64,
        }
        text = PRINTED[kind].format(**words)
        for sentences in ("512", "64", "1"):
            if f"{sentences} sentences" in row.name or f", {sentences}," in row.name:
                text = text.replace("64 sentences", f"{sentences} sentences")
        result = gpu.Result(command.name, row.name, row.published)
        gpu.Session({}, 0.0, Path()).read(row, text, result)
        assert result.measured in (64_000, 64.5, 10.75, 3.67, 13_800, 21_400, 2.25, 1.95, 1.4, 1.3)


def test_failures_and_what_is_missing_are_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def command(name: str, script: str, *, limit: int = 60, **needs: object) -> gpu.Command:
        row = gpu.Row(name, 2.0, "", r"is ([\d.]+)")
        return gpu.Command(name, [sys.executable, "-c", script], [row], limit, **needs)  # type: ignore[arg-type]

    commands = [
        command("good", "print('it is 3.0')"),
        command("broken", "raise SystemExit('no luck')"),
        command("silent", "print('nothing')"),
        command("lacking", "", needs=["no_such_module"]),
        command("without data", "", data=True),
        command("slow", "import time; time.sleep(60)", limit=1),
    ]
    monkeypatch.setattr(gpu, "COMMANDS", commands)
    monkeypatch.setattr(gpu, "MIN_SECONDS", 0)
    monkeypatch.setattr(sys, "argv", ["gpu", "--skip-tests", "--out", str(tmp_path)])
    gpu.main()
    rows = json.loads((tmp_path / "gpu.json").read_text())["rows"]
    assert [row["measured"] for row in rows] == [3.0, None, None, None, None, None]
    assert rows[0]["better"] == 1.5
    notes = [row["note"] for row in rows]
    assert notes == [
        "",
        "exit 1: no luck",
        "no figure in the output: nothing",
        "needs no_such_module",
        "needs --data",
        "not done within 1 s",
    ]
    table = capsys.readouterr().out
    assert all(note in table for note in notes)
    assert "no luck" in (tmp_path / "gpu.log").read_text()


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.4213, "0.421"), (0.03, "0.0300"), (10.96, "11.0"), (99.96, "100"), (176_512, "177,000")],
)
def test_a_cell_has_three_digits(value: float, shown: str) -> None:
    assert cell(value) == shown


def test_a_ratio_follows_from_the_cells_that_are_shown() -> None:
    assert ratio(cell(61.84), cell(34.56)) == "1.79"
    assert ratio("39.5", "10.8") == "3.66"
    assert ratio("3,300", "248") == "13.3"


def test_every_ratio_of_the_tables_follows_from_their_cells() -> None:
    """Tables with the columns "ours" and "peer"; times where the peer's must be the numerator."""
    checked = 0
    lines = (ROOT / "docs/benchmarks.md").read_text().splitlines()
    head: list[str] = []
    for line in lines:
        cells = [part.strip() for part in line.strip("|").split("|")]
        if not line.startswith("|"):
            head = []
        elif not head:
            head = cells
        elif {"ours", "peer"} <= {name.partition(",")[0] for name in head} and "---" not in line:
            row = {name.partition(",")[0]: value for name, value in zip(head, cells, strict=True)}
            ours, peer = row["ours"], row["peer"]
            lower = any(name in head for name in ("ours, ms", "ours, ms of CPU time"))
            assert row["ratio"] == ratio(*((peer, ours) if lower else (ours, peer))), line
            checked += 1
    assert checked > 8


def test_a_training_step_is_compared_with_the_fastest_peer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    times = {"slow eager": 0.09, "slow captured": 0.07, "fast eager": 0.08, "fast captured": 0.0618}

    def trial(seconds: float, gigabytes: float) -> steps.Trial:
        return steps.Trial(Run(lambda: torch.zeros(())), gigabytes, [seconds])

    def start_peer(name: str, mode: str) -> steps.Trial:
        if name == "lacking":
            raise ImportError("no such package")
        return trial(times[f"{name} {mode}"], 20.0)

    def medians(trials: dict[str, steps.Trial], rounds: int) -> dict[str, float]:
        return {name: found.losses[0] for name, found in trials.items()}

    monkeypatch.setattr(steps, "start_peer", start_peer)
    monkeypatch.setattr(steps, "ours", lambda task, size: trial(0.0346, 7.4))
    monkeypatch.setattr(steps, "_medians", medians)
    options = argparse.Namespace(modes=["eager", "captured"], peers=None, rounds=1)
    subject = (None, None, {name: name for name in ("slow", "fast", "lacking")})
    row = steps.report("a step", subject, options)  # type: ignore[arg-type]
    assert row == ["a step", "34.6", "7.40", "61.8", "20.0", "fast, captured", "1.79", "0.370"]
    assert len(row) == len(steps.HEAD)
    assert "| 34.6 | 7.40 | 61.8 |" in markdown(steps.HEAD, [row])
    assert "lacking, eager, is left out: no such package" in capsys.readouterr().out


def test_peers_train_on_the_same_sentences() -> None:
    generator = np.random.default_rng(0)
    pairs = [tuple(generator.integers(4, 97, n) for n in sizes) for sizes in ((7, 3), (2, 11))]
    batch = text_batch(pairs, 1, 2)  # type: ignore[arg-type]
    source, target, labels, S, T = steps.padded(batch, torch.device("cpu")).packed()
    assert torch.equal(source, batch.source)
    assert torch.equal(target, batch.target)
    assert torch.equal(labels, batch.labels)
    assert S.lengths.tolist() == [7, 2]
    assert T.lengths.tolist() == [4, 12]


def test_a_table_has_the_fastest_settings_of_each_library() -> None:
    took = {"ours int8": 0.1, "HF fp32": 1.0, "HF bf16": 0.9, "CTranslate2 int8": 0.4}
    took["CTranslate2 workers int8"] = 0.3
    cells = {name: cell(30 / seconds) for name, seconds in took.items()}
    rows = decoding.table_rows("16 sentences, greedy", "ours int8", cells, took)
    assert [row[3:5] for row in rows] == [["CTranslate2 workers int8", "100"], ["HF bf16", "33.3"]]
    assert [row[6] for row in rows] == ["3.00", "9.01"]
    assert all(len(row) == len(decoding.HEAD) for row in rows)


def test_settings_are_compared_with_the_default_ones() -> None:
    names = ["ours bf16", "HF bf16", "HF static bf16", "HF static fp16"]
    assert decoding.default("HF static bf16", names) == "HF bf16"
    assert decoding.default("HF static fp16", names) == "HF static fp16"
