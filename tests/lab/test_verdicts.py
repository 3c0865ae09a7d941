"""The verdict of every experiment, as it stands: whoever changes one should mean it."""

import json
import math

import pytest

from regard.lab.claims import experiments
from regard.lab.commands.lab import as_text
from regard.lab.experiment import Experiment
from regard.lab.perform import Result

EXPECTED = {
    "exercise-1": "holds",
    "exercise-1-in-torch": "holds",
    "softmax-along-rows": "holds",
    "exercise-3": "holds",
    "exercise-3-slips": "holds",
    "listing-is-the-library": "holds",
    "overflow": "holds under conditions",
    "four-words": "holds",
    "attention-formula": "holds",
    "output-shape": "wrong as stated",
    "attention-shapes": "holds",
    "weights-are-shares": "holds",
    "weighted-sum": "holds",
    "column-convention": "holds",
    "argument-order": "wrong as stated",
    "score-indices": "wrong as stated",
    "operation-counts": "holds",
    "operation-total": "holds",
    "scale-and-gradient": "holds",
    "score-variance": "holds",
    "other-scores": "holds",
    "general-is-dot": "holds",
    "no-parameters": "holds",
    "self-is-cross": "holds",
    "differing-lengths": "holds",
    "audio-and-text": "holds",
    "modalities": "holds",
    "shuffled-source": "holds",
    "four-kinds": "holds",
    "causal-mask": "holds under conditions",
    "masked-row": "holds under conditions",
    "large-negative": "holds under conditions",
    "no-future": "holds",
    "counting-by-mask": "wrong as stated",
    "variable-lengths": "wrong as stated",
    "sharpness": "holds",
    "cold-limit": "wrong as stated",
    "hot-limit": "holds",
    "convenient-beta": "holds",
    "preserving-a-value": "wrong as stated",
    "one-hot-suffices": "wrong as stated",
    "hard-attention": "holds",
    "spreading": "wrong as stated",
    "moved-key-line": "holds",
    "moved-key-linear": "wrong as stated",
    "split-softmax": "wrong as stated",
    "longer-key": "holds under conditions",
    "equivariance": "wrong as stated",
    "equivariance-causal": "holds under conditions",
    "two-sentences": "holds",
    "order-under-a-mask": "holds under conditions",
    "tied-weights": "holds",
    "vit-locality": "holds under conditions",
    "vit-shift": "holds under conditions",
    "identity": "wrong as stated",
    "permutation": "wrong as stated",
    "hard-identity": "holds under conditions",
    "running-linear": "holds under conditions",
    "convolution-by-heads": "holds under conditions",
    "one-head-taps": "wrong as stated",
    "multi-head": "holds",
    "output-projection": "wrong as stated",
    "stacked-heads": "wrong as stated",
    "subspaces": "holds",
    "grouped-convolution": "wrong as stated",
    "keras-example": "wrong as stated",
    "heads-share-width": "holds under conditions",
    "appended-positions": "holds",
    "added-positions": "holds",
    "added-positions-are-tied": "wrong as stated",
    "sinusoid-formula": "holds",
    "frequency-index": "wrong as stated",
    "fixed-and-learned": "holds",
    "class-position": "wrong as stated",
    "number-as-position": "holds",
    "position-kernel": "wrong as stated",
    "high-dimension": "holds under conditions",
    "relative-positions": "wrong as stated",
    "position-and-reach": "wrong as stated",
    "optional-information": "holds",
    "skip-connections": "holds",
    "shared-memory": "wrong as stated",
    "queries-from-below": "holds",
    "encoder-and-decoder": "holds",
    "which-box": "holds",
    "encoder-output": "wrong as stated",
    "three-kinds": "holds",
    "feed-forward": "holds",
    "feed-forward-neighbours": "wrong as stated",
    "residual-path": "holds",
    "post-norm": "holds",
    "patch-convolution": "wrong as stated",
    "flattened-patches": "holds",
    "vit-by-hand": "holds",
    "class-token": "holds",
    "vit-head": "holds",
    "vit-structure": "holds",
    "vit-feed-forward": "wrong as stated",
    "frozen-encoder": "holds",
    "numbers-in-out": "holds",
    "dense-parameters": "holds",
    "following-layer": "holds",
    "layer-costs": "wrong as stated",
    "crossover": "holds under conditions",
    "cost-table": "wrong as stated",
    "dot-product-cost": "holds under conditions",
    "value-product": "wrong as stated",
    "like-a-dense-layer": "wrong as stated",
    "window-cost": "holds",
    "shared-projections": "holds",
    "parameter-table": "wrong as stated",
    "fewer-parameters": "holds under conditions",
    "solely-attention": "wrong as stated",
    "model-sizes": "holds",
    "model-widths": "wrong as stated",
    "sequential-steps": "holds under conditions",
    "no-recurrence": "holds",
    "all-at-once": "holds",
    "whole-sequence": "holds",
    "longest-path": "holds",
    "receptive-field": "holds",
    "both-directions": "wrong as stated",
    "variable-size": "wrong as stated",
    "sentence-order": "holds",
    "order-and-bag": "holds",
    "positions-and-range": "wrong as stated",
    "positions-ignored": "holds",
    "memory-and-distance": "holds",
    "reusable-encoder": "holds under conditions",
    "transfer": "holds",
    "heads-at-once": "holds under conditions",
    "heads-and-noise": "undecided",
    "layer-norm": "holds under conditions",
    "scale-and-training": "holds",
    "heads-and-filters": "holds under conditions",
}


def test_every_verdict_is_expected() -> None:
    assert [experiment.name for experiment in experiments()] == [*EXPECTED]


def check(experiment: Experiment, result: Result) -> None:
    """The verdict, and what came with it: numbers that JSON can hold, tables and plots in order."""
    finding = result.finding
    assert finding.verdict == EXPECTED[experiment.name]
    assert finding.measurements
    (entry,) = json.loads(as_text([result]))["experiments"]
    assert entry["measurements"].keys() == finding.measurements.keys()
    for table in finding.tables:
        assert table.rows
        assert {len(row) for row in table.rows} == {len(table.head)}
    for plot in finding.plots:
        assert plot.title
        for curve in plot.curves:
            assert len(curve.x) == len(curve.y) > 1
            assert all(math.isfinite(number) for number in (*curve.x, *curve.y))
            assert not plot.log_x or min(curve.x) > 0
            assert not plot.log_y or min(curve.y) > 0


@pytest.mark.parametrize(
    "experiment", [e for e in experiments() if not e.trained], ids=lambda e: e.name
)
def test_what_is_computed(experiment: Experiment, results: dict[str, Result]) -> None:
    check(experiment, results[experiment.name])


@pytest.mark.slow
@pytest.mark.parametrize(
    "experiment", [e for e in experiments() if e.trained], ids=lambda e: e.name
)
def test_what_is_learned(experiment: Experiment, results: dict[str, Result]) -> None:
    check(experiment, results[experiment.name])
