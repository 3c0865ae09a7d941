"""What people see of a run: lines, a live display, curves, a report, TensorBoard's events."""

import io
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from rich.console import Console

from regard.train.display import Log, Progress, Terminal, default_display, described, duration
from regard.train.report import Events, Metrics, draw, write

pytestmark = pytest.mark.usefixtures("unchecked")  # StringIO is no TextIO to beartype

NOW = Progress(
    step=1200,
    total=5000,
    epoch=2,
    loss=2.3456,
    lr=8.2e-4,
    speed=12345.6,
    unit="tokens",
    left=250.0,
)
LINES = [
    {"step": 2, "loss": 3.0, "lr": 1e-3, "norm": 1.0},
    {"step": 4, "loss": 2.5, "lr": 2e-3, "norm": None},
    {"step": 4, "BLEU": 11.5, "loss": 2.25, "perplexity": None},
    {"step": 6, "loss": 2.0, "lr": 1e-3, "norm": 1.0},
]


def test_metrics_go_back_to_a_step(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path / "metrics.jsonl")
    assert metrics.read() == []
    metrics.rewind(3)
    for line in LINES:
        metrics.append(line)
    metrics.append({"step": 7, "BLEU": float("nan")})
    assert metrics.read()[-1] == {"step": 7, "BLEU": None}
    with metrics.path.open("ab") as file:
        file.write(b'{"step": 8, "lo')
    metrics.rewind(5)
    assert metrics.read() == LINES[:3]
    metrics.rewind(9)
    assert metrics.read() == LINES[:3]
    metrics.path.write_text("what?\n")
    with pytest.raises(ValueError, match="has a line that is not a run's"):
        metrics.rewind(9)


def test_half_a_line_is_dropped(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path / "metrics.jsonl")
    metrics.append(LINES[0])
    with metrics.path.open("ab") as file:
        file.write(b'{"step": 1')
    metrics.rewind(100)
    assert metrics.read() == LINES[:1]


def test_a_moment_in_words() -> None:
    assert described(NOW) == (
        "step 1,200 of 5,000 · loss 2.346 · 12,346 tokens/s · lr 0.00082 · epoch 3 · 4 min left"
    )
    assert [duration(seconds) for seconds in (7.4, 89, 600, 12_000)] == [
        "7 s",
        "89 s",
        "10 min",
        "3 h 20 min",
    ]


def test_plain_lines_without_a_terminal() -> None:
    stream = io.StringIO()
    shown = default_display(stream)
    assert isinstance(shown, Log)
    with shown:
        shown.say("It begins.")
        for _ in range(5):  # Only the first: the others come too soon after it.
            shown.progress(NOW)
        shown.scores(1200, {"BLEU": 31.234, "chrF": 55.0}, True)
        shown.scores(1300, {"BLEU": 30.0}, False)
    assert stream.getvalue().splitlines() == [
        "It begins.",
        described(NOW),
        "step 1,200: BLEU 31.23, chrF 55, the best so far",
        "step 1,300: BLEU 30",
    ]


def test_a_live_display_on_a_terminal() -> None:
    class Screen(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen = Screen()
    shown = default_display(screen)
    assert isinstance(shown, Terminal)
    shown.console = shown._bar.live.console = Console(
        file=screen, force_terminal=True, width=120, highlight=False
    )
    with shown:
        shown.say("[it] begins")
        shown.progress(NOW)
        shown.scores(1200, {"BLEU": 31.234}, True)
    seen = screen.getvalue()
    assert "[it] begins" in seen
    assert "step 1,200: BLEU 31.23  ★" in seen
    assert "loss 2.346" in seen


def test_curves(tmp_path: Path) -> None:
    assert draw(LINES, "BLEU", tmp_path / "curves.svg")
    assert ElementTree.parse(tmp_path / "curves.svg").getroot().tag.endswith("svg")
    first = (tmp_path / "curves.svg").read_bytes()
    for word in ("loss", "lr", "BLEU"):
        assert f"<!-- {word} -->" in first.decode()
    draw([], "BLEU", tmp_path / "curves.svg")
    assert [path.name for path in tmp_path.iterdir()] == ["curves.svg"]


def test_report(tmp_path: Path) -> None:
    write(
        tmp_path / "report.md",
        title="Run x",
        facts={"best": "BLEU 11.5 at step 4"},
        lines=LINES,
        settings={"steps": 6, "schedule": "cosine"},
        curves=True,
    )
    text = (tmp_path / "report.md").read_text()
    assert "# Run x\n\n- best: BLEU 11.5 at step 4\n\n![Learning curves](curves.svg)" in text
    assert "| step | BLEU | loss | perplexity |\n| --- | --- | --- | --- |\n| 4 | 11.5 |" in text
    assert '- schedule: "cosine"' in text


def test_events(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for after, lines in ((0, LINES), (2, LINES[1:2])):
        events = Events(tmp_path, after)
        for line in lines:
            events.append(line)
        events.close()
    read = EventAccumulator(str(tmp_path))
    read.Reload()
    # What came after step 2 the first time is gone.
    assert [(event.step, event.value) for event in read.Scalars("loss")] == [(2, 3.0), (4, 2.5)]
