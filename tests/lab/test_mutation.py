"""A broken implementation changes verdicts: each mistake, made on purpose, is found.

A mistake is put where it would be made: into the function or the layer itself. Every experiment
named beside it must come to another verdict than it does on the sound implementation.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.attention import arguments, attend, mask, multihead, position, weights
from regard.lab import run
from regard.lab.perform import Result
from regard.model import block

Break = Callable[[pytest.MonkeyPatch], None]


def wrong_distribution(monkeypatch: pytest.MonkeyPatch, wrong: Callable[..., Tensor]) -> None:
    """Another softmax, wherever there is one; no kernel steps in, since those have their own."""
    choose = attend.choose
    monkeypatch.setattr(attend, "distribution", wrong)
    monkeypatch.setattr(weights, "distribution", wrong)
    monkeypatch.setattr(attend, "choose", lambda given, *_: choose(given, 0.0, "formula"))


def no_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    """β is 1 where it should be 1/√K."""
    check = arguments.check_beta
    for module in (arguments, multihead):
        monkeypatch.setattr(
            module, "check_beta", lambda beta, *rest: check(1.0 if beta is None else beta, *rest)
        )


def inverted_beta(monkeypatch: pytest.MonkeyPatch) -> None:
    """β is taken for a temperature: scores are divided by it."""
    sound = attend.distribution

    def wrong(query: Tensor, key: Tensor, allowed: Any, beta: Any, bias: Any) -> Tensor:
        inverse = 1 / beta if isinstance(beta, Tensor) or beta else float("inf")
        return sound(query, key, allowed, inverse, bias)

    wrong_distribution(monkeypatch, wrong)


def shifted_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """The causal mask shows each position the next one."""
    sound = mask.Band.__init__

    def shifted(self: mask.Band, left: int | None, right: int, offset: Any = None) -> None:
        sound(self, left, right + (left is None), offset)

    monkeypatch.setattr(mask.Band, "__init__", shifted)


def swapped_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys are taken for values, and values for keys, where they are equally wide."""
    sound = attend.arguments

    def swapped(query: Tensor, key: Tensor, value: Tensor, *rest: Any, **more: Any) -> Any:
        if key.shape == value.shape:
            key, value = value, key
        return sound(query, key, value, *rest, **more)

    monkeypatch.setattr(attend, "arguments", swapped)


def softmax_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """The softmax runs down the columns: over the queries."""

    def wrong(query: Tensor, key: Tensor, allowed: Any, beta: Any, bias: Any) -> Tensor:
        scores = beta * query @ key.mT + (0 if bias is None else bias)
        if allowed is not None:
            scores = scores.masked_fill(~allowed, -torch.inf)
        return scores.softmax(-2)

    wrong_distribution(monkeypatch, wrong)


def plain_softmax(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exponentials of whole scores, which overflow, over a sum that may be 0."""

    def wrong(query: Tensor, key: Tensor, allowed: Any, beta: Any, bias: Any) -> Tensor:
        scores = beta * query @ key.mT + (0 if bias is None else bias)
        if allowed is not None:
            scores = scores.masked_fill(~allowed, -torch.inf)
        return scores.exp() / scores.exp().sum(-1, keepdim=True)

    wrong_distribution(monkeypatch, wrong)


def no_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sinusoids of 0, and rotations by nothing."""
    sound = position.SinusoidalPositions.encoding
    monkeypatch.setattr(
        position.SinusoidalPositions, "encoding", lambda *given, **more: 0 * sound(*given, **more)
    )
    monkeypatch.setattr(position.RotaryEmbedding, "rotate", lambda self, x, at=0: x)


def frequencies_from_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sinusoids' frequencies are counted from 1."""
    sound = position._angles
    monkeypatch.setattr(
        position,
        "_angles",
        lambda positions, width, base: sound(positions, width, base) * base ** (-2 / width),
    )


def no_output_projection(monkeypatch: pytest.MonkeyPatch) -> None:
    """The heads' results are stacked, and that is all."""

    class Forgotten(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return x if self.in_features == self.out_features else super().forward(x)

    sound = multihead.MultiHeadAttention.__init__

    def forget(self: multihead.MultiHeadAttention, *given: Any, **more: Any) -> None:
        sound(self, *given, **more)
        out = self.output
        self.output = Forgotten(out.in_features, out.out_features, out.bias is not None)

    monkeypatch.setattr(multihead.MultiHeadAttention, "__init__", forget)


def no_skip(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sublayers replace what they should be added to."""
    monkeypatch.setattr(
        block.PostNorm, "forward", lambda self, x, sublayer, rows=None: self.norm(sublayer(x))
    )
    monkeypatch.setattr(
        block.PreNorm, "forward", lambda self, x, sublayer, rows=None: sublayer(self.norm(x))
    )


def no_layer_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is normalised."""
    for kind in (block.PostNorm, block.PreNorm):
        monkeypatch.setattr(
            kind, "forward", lambda self, x, sublayer, rows=None: x[:, :rows] + sublayer(x)
        )


def neighbourly_feed_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """The feed-forward network reads the position before, too."""
    sound = block.FeedForward.forward
    monkeypatch.setattr(
        block.FeedForward, "forward", lambda self, x: sound(self, x + x.roll(1, -2))
    )


def gelu_for_relu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another activation function."""
    monkeypatch.setattr(
        block.FeedForward, "forward", lambda self, x: self.reduce(F.gelu(self.expand(x)))
    )


def mixed_up_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads are cut out of the rows' numbers by another order than they are put back."""
    monkeypatch.setattr(
        multihead,
        "_split",
        lambda x, heads: x.unflatten(-1, (x.shape[-1] // heads, heads)).permute(0, 3, 1, 2),
    )


def means_without_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Softmax without its division: weights that do not sum to 1."""
    sound = attend.distribution

    def wrong(query: Tensor, key: Tensor, allowed: Any, beta: Any, bias: Any) -> Tensor:
        found = sound(query, key, allowed, beta, bias)
        return found / found.amax(-1, keepdim=True).clamp_min(1e-300)

    wrong_distribution(monkeypatch, wrong)


BREAKS: dict[Break, tuple[str, ...]] = {
    no_scale: (
        *("exercise-3", "scale-and-gradient", "score-variance", "convenient-beta"),
        *("softmax-of-a-matrix", "moved-key-linear", "longer-key"),
    ),
    inverted_beta: (
        *("sharpness", "cold-limit", "hot-limit", "preserving-a-value", "spreading"),
        *("dictionary", "one-hot-suffices", "dependency-graphs"),
    ),
    shifted_mask: (*("causal-mask", "no-future", "which-box", "three-kinds", "counting-by-mask"),),
    swapped_pairs: (
        *("attention-formula", "argument-order", "multi-head", "shuffled-source"),
        *("audio-and-text", "operation-total"),
    ),
    softmax_down: (
        *("exercise-1", "softmax-along-rows", "weights-are-shares", "column-convention"),
        *("four-kinds", "order-under-a-mask", "split-softmax"),
    ),
    plain_softmax: ("overflow", "masked-row", "hard-attention"),
    means_without_norm: (
        *("exercise-1", "weighted-sum", "moved-key-line", "identity", "stretched-entry"),
        *("permutation", "skip-connections"),
    ),
    no_positions: (
        *("two-sentences", "sinusoid-formula", "position-kernel", "relative-positions"),
        *("close-positions", "position-as-feature", "same-words-elsewhere", "number-as-position"),
    ),
    frequencies_from_one: ("sinusoid-formula", "frequency-index", "whole-phrase"),
    no_output_projection: ("multi-head", "output-projection", "subspaces", "bias-of-one"),
    mixed_up_heads: (
        *("multi-head", "subspaces", "keras-example", "concatenated-heads", "three-inputs"),
    ),
    no_skip: ("residual-path", "post-norm", "vit-by-hand"),
    no_layer_norm: ("residual-path", "post-norm", "vit-by-hand"),
    neighbourly_feed_forward: (
        *("feed-forward-neighbours", "equivariance", "vit-locality", "blind-to-order"),
        *("solely-attention", "class-token"),
    ),
    gelu_for_relu: ("feed-forward", "non-linearity"),
}
"""What is broken, and which experiments notice."""


@pytest.mark.parametrize("broken", BREAKS, ids=lambda broken: broken.__name__)
def test_a_mistake_changes_verdicts(
    broken: Break, monkeypatch: pytest.MonkeyPatch, results: dict[str, Result]
) -> None:
    sound = {name: results[name].finding.verdict for name in BREAKS[broken]}
    with monkeypatch.context() as patch:
        broken(patch)
        found = {name: run(name).finding.verdict for name in sound}
    assert [name for name in sound if found[name] == sound[name]] == []
