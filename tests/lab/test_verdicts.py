"""The verdict of every experiment, as it stands: whoever changes one should mean it."""

import json

import pytest

from regard.lab.claims import experiments
from regard.lab.command import as_text
from regard.lab.experiment import Experiment
from regard.lab.perform import Result

EXPECTED = {
    "exercise-1": "holds",
    "exercise-1-in-torch": "holds",
    "attention-formula": "holds",
    "output-shape": "wrong as stated",
    "softmax-along-rows": "holds",
    "operation-counts": "holds",
    "operation-total": "holds",
    "exercise-3": "holds",
    "exercise-3-slips": "holds",
    "listing-is-the-library": "holds",
    "overflow": "holds under conditions",
    "weights-are-shares": "holds",
    "attention-shapes": "holds",
    "four-words": "holds",
    "audio-and-text": "holds",
    "scale-and-gradient": "holds",
    "score-variance": "holds",
    "self-is-cross": "holds",
    "differing-lengths": "holds",
    "column-convention": "holds",
    "weighted-sum": "holds",
    "other-scores": "holds",
    "general-is-dot": "holds",
    "score-indices": "wrong as stated",
    "value-product": "wrong as stated",
    "beside-a-dense-layer": "wrong as stated",
    "no-parameters": "holds",
    "argument-order": "wrong as stated",
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
    "four-kinds": "holds",
    "spreading": "wrong as stated",
    "moved-key-line": "holds",
    "moved-key-linear": "wrong as stated",
    "split-softmax": "wrong as stated",
    "longer-key": "holds under conditions",
    "equivariance": "wrong as stated",
    "equivariance-causal": "holds under conditions",
    "shuffled-source": "holds",
    "two-sentences": "holds",
    "order-under-a-mask": "holds under conditions",
    "tied-weights": "holds",
    "vit-locality": "holds under conditions",
    "vit-shift": "holds under conditions",
    "whole-sequence": "holds",
    "multi-head": "holds",
    "output-projection": "wrong as stated",
    "stacked-heads": "wrong as stated",
    "grouped-convolution": "wrong as stated",
    "identity": "wrong as stated",
    "permutation": "wrong as stated",
    "running-linear": "holds under conditions",
    "convolution-by-heads": "holds under conditions",
    "one-head-taps": "wrong as stated",
    "hard-identity": "holds under conditions",
    "uniform-dense": "holds under conditions",
    "subspaces": "holds",
    "keras-example": "wrong as stated",
    "added-positions-are-tied": "wrong as stated",
    "heads-share-width": "holds under conditions",
    "appended-positions": "holds",
    "added-positions": "holds",
    "high-dimension": "holds under conditions",
    "skip-connections": "holds",
    "sinusoid-formula": "holds",
    "fixed-and-learned": "holds",
    "class-position": "wrong as stated",
    "number-as-position": "holds",
    "position-kernel": "wrong as stated",
    "frequency-index": "wrong as stated",
    "optional-information": "holds",
    "relative-positions": "wrong as stated",
    "position-and-reach": "wrong as stated",
    "residual-path": "holds",
    "shared-memory": "wrong as stated",
    "queries-from-below": "holds",
    "encoder-and-decoder": "holds",
    "modalities": "holds",
    "which-box": "holds",
    "feed-forward": "holds",
    "feed-forward-neighbours": "wrong as stated",
    "post-norm": "holds",
    "patch-convolution": "wrong as stated",
    "flattened-patches": "holds",
    "vit-feed-forward": "wrong as stated",
    "vit-structure": "holds",
    "class-token": "holds",
    "vit-head": "holds",
    "vit-by-hand": "holds",
    "encoder-output": "wrong as stated",
    "solely-attention": "wrong as stated",
    "frozen-encoder": "holds",
    "variable-size": "wrong as stated",
    "both-directions": "wrong as stated",
    "three-kinds": "holds",
    "fewer-parameters": "holds under conditions",
    "numbers-in-out": "holds",
    "dense-parameters": "holds",
    "shared-projections": "holds",
    "dot-product-cost": "holds under conditions",
    "following-layer": "holds",
    "layer-costs": "wrong as stated",
    "sequential-steps": "holds under conditions",
    "no-recurrence": "holds",
    "crossover": "holds under conditions",
    "all-at-once": "holds",
    "longest-path": "holds",
    "model-sizes": "holds",
    "model-widths": "wrong as stated",
    "cost-of-values": "wrong as stated",
    "like-a-dense-layer": "wrong as stated",
    "cost-table": "wrong as stated",
    "window-cost": "holds",
    "parameter-table": "wrong as stated",
    "receptive-field": "holds",
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
    "scale-and-training": "holds under conditions",
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
        assert all(len(curve.x) == len(curve.y) > 0 for curve in plot.curves)


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
