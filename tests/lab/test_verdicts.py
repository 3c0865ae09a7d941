"""The verdict of every experiment, as it stands: whoever changes one should mean it."""

import json
import math
import re

import pytest

from regard.lab.claims import experiments
from regard.lab.commands.lab import as_text
from regard.lab.experiment import Experiment
from regard.lab.perform import Result

EXACTLY = "true in context, to be said more exactly"
EXPECTED = {
    "exercise-1": "holds",
    "exercise-1-in-torch": "holds",
    "softmax-along-rows": "holds",
    "exercise-3": "holds",
    "exercise-3-slips": "holds",
    "listing-is-the-library": "holds",
    "overflow": EXACTLY,
    "four-words": "holds",
    "softmax-of-a-matrix": EXACTLY,
    "attention-formula": "holds",
    "output-shape": "holds",
    "attention-shapes": "holds",
    "weights-are-shares": "holds",
    "weighted-sum": "holds",
    "column-convention": "holds",
    "argument-order": "wrong as stated",
    "score-indices": "wrong as stated",
    "operation-counts": "holds",
    "operation-total": EXACTLY,
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
    "causal-mask": EXACTLY,
    "masked-row": "holds under conditions",
    "large-negative": "holds under conditions",
    "no-future": "holds",
    "counting-by-mask": "holds",
    "variable-lengths": "wrong as stated",
    "sharpness": "holds",
    "cold-limit": EXACTLY,
    "hot-limit": EXACTLY,
    "convenient-beta": "holds",
    "preserving-a-value": "wrong as stated",
    "one-hot-suffices": "holds",
    "hard-attention": "holds",
    "dictionary": "holds",
    "spreading": "wrong as stated",
    "moved-key-line": "holds",
    "moved-key-linear": "holds",
    "split-softmax": "wrong as stated",
    "column-of-softargmaxes": "wrong as stated",
    "longer-key": EXACTLY,
    "stretched-entry": "wrong as stated",
    "equivariance": "wrong as stated",
    "shared-weights-and-order": "wrong as stated",
    "equivariance-causal": "holds",
    "two-sentences": "holds",
    "blind-to-order": "holds",
    "order-under-a-mask": "holds",
    "tied-weights": "holds",
    "vit-locality": "holds",
    "vit-shift": "holds under conditions",
    "identity": "wrong as stated",
    "permutation": "wrong as stated",
    "hard-identity": "holds",
    "running-linear": "holds",
    "bias-of-one": "wrong as stated",
    "convolution-by-heads": "holds under conditions",
    "whole-phrase": "wrong as stated",
    "one-head-taps": "holds",
    "multi-head": "holds",
    "output-projection": "wrong as stated",
    "three-inputs": EXACTLY,
    "stacked-heads": EXACTLY,
    "subspaces": "holds",
    "grouped-convolution": "wrong as stated",
    "keras-example": "holds",
    "concatenated-heads": "wrong as stated",
    "heads-share-width": "holds",
    "appended-positions": "holds",
    "added-positions": "holds",
    "added-positions-are-tied": "wrong as stated",
    "sinusoid-formula": "holds",
    "frequency-index": "wrong as stated",
    "fixed-and-learned": "holds",
    "class-position": "holds",
    "number-as-position": "holds",
    "position-kernel": "wrong as stated",
    "close-positions": "holds",
    "high-dimension": "holds under conditions",
    "relative-positions": EXACTLY,
    "position-and-reach": "wrong as stated",
    "optional-information": "holds",
    "same-words-elsewhere": "holds under conditions",
    "position-as-feature": "holds",
    "skip-connections": "holds",
    "shared-memory": EXACTLY,
    "queries-from-below": "holds",
    "encoder-and-decoder": "holds",
    "which-box": "holds",
    "encoder-output": EXACTLY,
    "three-kinds": "holds",
    "feed-forward": "holds",
    "non-linearity": "holds",
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
    "dot-product-cost": "holds",
    "value-product": EXACTLY,
    "like-a-dense-layer": "holds",
    "window-cost": "holds",
    "shared-projections": "holds",
    "parameter-table": "wrong as stated",
    "fewer-than-a-convolution": "holds under conditions",
    "dependency-graphs": "holds",
    "fewer-parameters": EXACTLY,
    "solely-attention": EXACTLY,
    "model-sizes": "holds",
    "model-widths": "wrong as stated",
    "sequential-steps": "holds",
    "no-recurrence": "holds",
    "all-at-once": "holds",
    "whole-sequence": "holds",
    "longest-path": "holds",
    "receptive-field": "holds",
    "both-directions": EXACTLY,
    "one-state": "holds",
    "variable-size": "wrong as stated",
    "sentence-order": "holds",
    "order-and-bag": "holds",
    "positions-and-range": "holds under conditions",
    "positions-ignored": "holds",
    "memory-and-distance": "holds",
    "reusable-encoder": "holds under conditions",
    "transfer": "holds",
    "heads-at-once": "holds under conditions",
    "heads-and-noise": "holds under conditions",
    "layer-norm": "holds under conditions",
    "scale-and-training": "holds",
    "heads-and-filters": "holds",
}


def test_every_verdict_is_expected() -> None:
    assert [experiment.name for experiment in experiments()] == [*EXPECTED]


def check(experiment: Experiment, result: Result) -> None:
    """The verdict, and what came with it: numbers that JSON can hold, tables and plots in order."""
    finding = result.finding
    assert finding.verdict == EXPECTED[experiment.name]
    assert finding.measurements
    assert re.search(r"\.$", finding.conclusion)
    assert "  " not in finding.conclusion
    assert re.search(r"\d|exactly", finding.conclusion), "written from the numbers"
    assert len(finding.conclusion) < 450
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
