"""A run's logs and report: metrics.jsonl, TensorBoard's events, curves.svg and report.md.

A line of metrics.jsonl is one JSON object with its `step`: either `loss`, `lr`, `norm` and speed
since the line before, or the scores of an evaluation.
"""

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regard.config import Object
from regard.machine import atomic
from regard.train.state import State
from regard.train.task import Sampled, Task

if TYPE_CHECKING:
    from torch.utils.tensorboard.writer import SummaryWriter

METRICS, CURVES, REPORT, EVENTS = "metrics.jsonl", "curves.svg", "report.md", "events"


class Metrics:
    """metrics.jsonl: grows line by line, and is cut back to the step from which a run resumes."""

    def __init__(self, path: Path):
        self.path = path

    def append(self, line: Mapping[str, float | int | None]) -> None:
        """A score that is NaN or infinite becomes null, since JSON has neither."""
        finite = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in line.items()
        }
        with self.path.open("ab") as file:
            file.write((json.dumps(finite, allow_nan=False) + "\n").encode())

    def sync(self) -> None:
        """Syncs all lines to the disk: a checkpoint must not be ahead of them."""
        if self.path.exists():
            atomic.sync(self.path)

    def rewind(self, step: int) -> None:
        """Drops the lines after a step, and an incomplete one that a killed run has left."""
        if not self.path.exists():
            return
        kept = 0
        with self.path.open("rb") as file:
            for line in file:
                if not line.endswith(b"\n") or self._step(line) > step:
                    break
                kept += len(line)
        os.truncate(self.path, kept)

    def read(self) -> list[Object]:
        if not self.path.exists():
            return []
        with self.path.open("rb") as file:
            return [json.loads(line) for line in file]

    def _step(self, line: bytes) -> int:
        try:
            return int(json.loads(line)["step"])
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(
                f"{self.path} has a line that is not a run's ({line[:60]!r}); remove it"
            ) from error


class Events:
    """TensorBoard's files; nothing where tensorboard is not installed."""

    def __init__(self, folder: Path, after: int):
        """TensorBoard hides events after `after`, which a killed run has left."""
        self._writer: SummaryWriter | None = None
        try:
            from torch.utils import tensorboard
        except ImportError:
            return
        purge = after + 1 if after else None
        self._writer = tensorboard.SummaryWriter(str(folder), purge_step=purge)

    def append(self, line: Mapping[str, float | int | None]) -> None:
        if self._writer is not None:
            for name, value in line.items():
                if name != "step" and value is not None:
                    self._writer.add_scalar(name, value, line["step"])

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def best(task: Task, now: State) -> str | None:
    """`bleu 31.2 at step 5,000 (greedy search, all 1,000 validation sentences)`."""
    if now.best is None:
        return None
    words = f"{task.score} {now.best if now.best_on_all is None else now.best_on_all:.4g}"
    words += f" at step {now.best_step:,}"
    if not isinstance(task, Sampled):
        return words
    sample = task.sample
    if now.best_on_all is None:
        return f"{words} ({sample})"
    return (
        f"{words} ({sample.words(sample.total)}; it was chosen by {now.best:.4g} on "
        f"{sample.count:,} of them)"
    )


def draw(lines: Sequence[Object], score: str, path: Path) -> bool:
    """The learning curves as an SVG; False where matplotlib is not installed."""
    try:
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError:
        return False
    trained, scored = _apart(lines)
    curves = {
        name: [(line["step"], line[name]) for line in of if line.get(name) is not None]
        for name, of in (("loss", trained), ("lr", trained), (score, scored))
    }
    figure = Figure(figsize=(9, 2.8), layout="constrained")
    FigureCanvasSVG(figure)
    for axes, (name, points) in zip(figure.subplots(1, len(curves)), curves.items()):
        axes.set_title(name, loc="left", fontsize=10)
        axes.set_xlabel("step", fontsize=9)
        axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
        if points:
            axes.plot(*zip(*points), marker="." if len(points) < 40 else None, linewidth=1.5)
    with atomic.file(path) as draft:
        figure.savefig(draft, format="svg", metadata={"Date": None})
    return True


def write(
    path: Path,
    *,
    title: str,
    facts: Mapping[str, str],
    lines: Sequence[Object],
    settings: Mapping[str, Any],
    curves: bool,
) -> None:
    """The run's report, in Markdown."""
    _, scored = _apart(lines)
    names = list(dict.fromkeys(name for line in scored for name in line))
    parts = [f"# {title}", "\n".join(f"- {name}: {value}" for name, value in facts.items())]
    if curves:
        parts.append(f"![Learning curves]({CURVES})")
    if scored:
        rows = [names, ["---"] * len(names)]
        rows += [[_cell(line.get(name)) for name in names] for line in scored[-20:]]
        table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
        parts.append(f"## Evaluations\n\n{table}")
    changed = "\n".join(f"- {name}: {json.dumps(value)}" for name, value in settings.items())
    parts.append(f"## Settings\n\nAll of them are in config.json.\n\n{changed}")
    atomic.write(path, "\n\n".join(parts) + "\n")


def _apart(lines: Sequence[Object]) -> tuple[list[Object], list[Object]]:
    """Lines of training and lines of evaluation."""
    trained = [line for line in lines if "lr" in line]
    return trained, [line for line in lines if "lr" not in line]


def _cell(value: float | int | None) -> str:
    return "" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
