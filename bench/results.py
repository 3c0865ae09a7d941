"""Runs of one recipe with several seeds: their scores as a table, their curves as an SVG.

    python -m bench.results docs/curves-dates.svg RUN RUN RUN

Each run is a folder that `regard train --recipe` has scored. A line of the table is a score of a
test set: its mean over the runs, and what each run has. The curves are those of the validation set,
on which each run's model was chosen.
"""

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.figures import figure, finish, save
from regard.config import read
from regard.recipes.recipe import SCORES
from regard.train.report import METRICS, Metrics

TRAINED = ("step", "epoch", "loss", "lr", "norm", "speed", "seconds")
"""What lines of metrics have beside the scores of evaluations, the first of which decides."""


def table(runs: Sequence[dict[str, Any]]) -> list[str]:
    """Markdown."""
    lines = ["| test set | score | mean | seeds | signature |", "|---|---|---|---|---|"]
    for name, test in runs[0]["tests"].items():
        for score in test["scores"]:
            found = [run["tests"][name]["scores"][score] for run in runs]
            digits = 2 if max(found) > 1 else 4
            each = ", ".join(f"{value:.{digits}f}" for value in found)
            mean = f"**{statistics.mean(found):.{digits}f}**"
            signature = test["signatures"].get(score, "").replace("|", "\\|")
            lines.append(f"| {name} | {score} | {mean} | {each} | {signature} |")
    seconds = ", ".join(f"{run['seconds']:.0f}" for run in runs)
    first = runs[0]
    lines += ["", f"{first['recipe']}: {seconds} s of training, {first['machine']['processor']}"]
    return lines


def curves(runs: Sequence[Path], path: Path) -> None:
    """Every run's score of the validation set by its steps."""
    found = {run.name: Metrics(run / METRICS).read() for run in runs}
    names = (key for lines in found.values() for line in lines for key in line)
    score = next(name for name in names if name not in TRAINED)
    made, ((axes,),) = figure(1, 1, (5.4, 2.8))
    for name, lines in found.items():
        points = [(line["step"], line[score]) for line in lines if line.get(score) is not None]
        axes.plot(*zip(*points), marker=".", linewidth=1.2, label=name)
    recipe = read(runs[0] / SCORES)["recipe"]
    finish(axes, f"{recipe}: {score} of the validation set", "step")
    axes.legend(frameon=False, fontsize=9)
    save(made, path)


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.results", description=__doc__)
    parser.add_argument("svg", type=Path)
    parser.add_argument("runs", type=Path, nargs="+")
    chosen = parser.parse_args()
    print("\n".join(table([read(run / SCORES) for run in chosen.runs])))
    curves(chosen.runs, chosen.svg)


if __name__ == "__main__":
    main()
