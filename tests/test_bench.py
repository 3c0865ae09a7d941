"""What `bench.gpu` publishes is what the pages publish, and it reads what the benchmarks print."""

import json
import sys
from pathlib import Path

import pytest

from bench import gpu

ROOT = Path(__file__).parent.parent

PRINTED = {
    "decoding": """64 sentences, {search}
  ours bf16             64,000 tok/s ± 3%  100.0% as ours bf16
  HF bf16                9,000 tok/s ± 1%   99.0% as ours bf16  64.5 × the time of ours bf16
  eager bf16             9,000 tok/s ± 1%   99.0% as ours bf16  64.5 × the time of ours bf16
""",
    "steps": """Base Transformer, 256 sentences
  ours: 10.75 ms, 1.00 GiB, loss 9.7 → 9.6
  {peer}, compiled: 39.50 ms, 2.00 GiB, loss 9.7 → 9.6; ours is 3.67 × as fast, with 0.50 × its
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
  infer eager: ours 5,000/s; timm 1.40
  infer: the best peer (timm compiled) takes 1.30 × our best
""",
}


@pytest.mark.parametrize("command", gpu.COMMANDS, ids=lambda command: command.name)
def test_every_published_figure_is_on_a_page(command: gpu.Command) -> None:
    pages = "".join((ROOT / name).read_text() for name in ("README.md", "RESULTS.md"))
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
            "peer": row.name.rpartition("×")[2].removesuffix(" compiled").strip(),
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
