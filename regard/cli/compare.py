"""The command `compare`: compares the translations of several runs, with significance tests.

    regard compare RUN RUN … --source test.en --target test.de

All runs translate the same lines. The test is paired bootstrap resampling (Koehn 2004), as in
sacrebleu: p is the probability that the choice of lines alone makes a difference to the first run
as large as the one observed.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from regard.cli.arguments import Progress, with_inputs
from regard.data.diagnosis import Separator
from regard.data.table import Column
from regard.machine.device import use
from regard.task.settings import Precision, check_positive
from regard.task.text import compose
from regard.task.translate import Cut, Quality, evaluate


@dataclass(frozen=True)
class Compare:
    """Compares the translations of several runs with those of the first, by paired bootstrap."""

    source: tuple[str, ...] = ()
    """Source files; by default the validation set of the first run."""
    target: tuple[str, ...] = ()
    """Reference translations."""
    pairs: tuple[str, ...] = ()
    """Instead, tables with both sides."""
    columns: tuple[Column, Column] | None = None
    """Which columns of the tables, numbers from 0 on or names, are source and target."""
    separator: Separator | None = None
    """What separates the columns of tables."""
    references: tuple[str, ...] = ()
    """Files with more reference translations, a line for each pair."""
    bleu: Cut | None = None
    """sacreBLEU's tokenizer (--tokenize)."""
    lowercase: bool = False
    """Ignore case when scoring."""
    beams: int | None = None
    """Beam size; by default that of each model's config.json."""
    samples: int = 1000
    """Bootstrap resamples."""
    precision: Precision | None = None
    """Precision of weights and activations: fp32 by default, so that scores are comparable. auto is
    bf16 on a GPU, and int8 on a cpu if the folder stores 8-bit weights; int8 is for a cpu."""
    device: str = "auto"
    """Device: auto is a GPU where there is one; or cpu, cuda, cuda:1."""
    json: bool = False
    """Print one JSON object, for programs."""

    def __post_init__(self) -> None:
        check_positive(self, "beams", "samples")


@dataclass(frozen=True)
class System:
    """The scores of a run, the half-widths of their 95% intervals, and p against the first run."""

    name: str
    scores: dict[str, float] = field(default_factory=dict)
    intervals: dict[str, float] = field(default_factory=dict)
    p: dict[str, float | None] = field(default_factory=dict)


def compare(words: Sequence[str]) -> None:
    """`regard compare RUN RUN …`."""
    first, others, options = with_inputs("compare", Compare, Compare(), words, " OTHER ...")
    if not others:
        raise ValueError(f"compare needs two runs or more: regard compare {first} OTHER …")
    systems, signatures = _compare([str(first), *others], options)
    if options.json:
        about = [asdict(system) for system in systems]
        print(json.dumps({"systems": about, "notes": signatures}, ensure_ascii=False))
        return
    width = max(len(system.name) for system in systems)
    for system in systems:
        cells = [
            f"{name} {value:.2f} ± {system.intervals[name]:.2f}{_chance(system.p[name])}"
            for name, value in system.scores.items()
        ]
        print(f"{system.name:<{width}}  {'  '.join(cells)}")
    for name, signature in signatures.items():
        print(f"{name}: {signature}")


def _chance(p: float | None) -> str:
    """Formats p and its significance; empty for the first run."""
    return "" if p is None else f" (p = {p:.3f}{', significant' if p < 0.05 else ''})"


def _compare(folders: list[str], options: Compare) -> tuple[list[System], dict[str, str]]:
    from sacrebleu.significance import PairedTest

    data_options = ("source", "target", "pairs", "columns", "separator", "references", "bleu")
    values = {name: getattr(options, name) for name in (*data_options, "lowercase", "beams")}
    values |= {"precision": options.precision or "fp32", "device": options.device}
    use(options.device)
    results = [evaluate(folder, **values, progress=Progress()) for folder in folders]
    first = results[0]
    for folder, other in zip(folders[1:], results[1:]):
        if other.references != first.references:
            raise ValueError(
                f"{folder} and {folders[0]} were validated on different lines; name a test set for "
                "both: --source and --target"
            )
    metrics: dict[str, Any] = dict(Quality(options.bleu or "13a", options.lowercase).metrics)
    written: list[tuple[str, Sequence[str]]] = [
        (folder, compose(result.translations)) for folder, result in zip(folders, results)
    ]
    test = PairedTest(written, metrics, first.references, "bs", n_samples=options.samples)
    signatures, comparisons = test()
    systems = [System(folder) for folder in folders]
    # sacrebleu names the metrics differently, in the same order: its chrF2 is our chrf.
    for name, theirs in zip(metrics, signatures):
        rows: Any = comparisons[theirs]
        for system, row, result in zip(systems, rows, results):
            system.scores[name] = float(row.score)
            system.intervals[name] = float(row.ci)
            # sacrebleu's p is small if the translations are the same.
            same = result.translations == first.translations
            system.p[name] = None if row.p_value is None else 1.0 if same else float(row.p_value)
    return systems, {name: str(text) for name, text in zip(metrics, signatures.values())}
