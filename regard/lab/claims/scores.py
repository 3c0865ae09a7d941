"""Scores: how well a key matches a query, why scores are scaled, and other scores.

    s_ij = β q_i·k_j        β = 1/√d keeps the variance of the scores of random vectors at 1

Whatever rates a key, a softmax of the scores follows.
"""

import math
from collections.abc import Sequence
from itertools import combinations

import torch

from regard import MultiHeadAttention, attend, attention_weights
from regard.attention.score import (
    AdditiveScore,
    AlignmentScore,
    BilinearScore,
    DotScore,
    ScaledDotScore,
)
from regard.lab.claims import plain
from regard.lab.claims.sample import DIFFERENT, SAME, alive, apart, normal, parameters
from regard.lab.experiment import Curve, Experiment, Finding, Plot, Table, holds
from regard.lab.numbers import figure
from regard.lab.place import Place

WIDTHS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


def scale_and_gradient() -> Finding:
    keys = 16
    unscaled: list[float] = []
    scaled: list[float] = []
    for d in WIDTHS:
        query, key = normal(0, 1, 128, d), normal(1, 64, keys, d)
        for slopes, beta in ((unscaled, 1.0), (scaled, None)):
            a = attention_weights(query, key, beta=beta)
            slopes.append(float((a * (1 - a)).mean()))
    uniform = (1 / keys) * (1 - 1 / keys)
    nudge = torch.zeros(1, keys, dtype=torch.float64, requires_grad=True)
    first = attention_weights(query[0, :1], key[0], bias=nudge)[0, 0]
    (gradient,) = torch.autograd.grad(first, nudge)
    formula = apart(gradient[0, 0], (first * (1 - first)).detach())
    return Finding(
        holds(
            unscaled[-1] < 0.2 * scaled[-1]
            and unscaled[-1] < 0.2 * unscaled[0]
            and min(scaled) > 0.8 * uniform
            and formula < SAME
        ),
        {
            "mean a(1-a), unscaled, d = 512": unscaled[-1],
            "mean a(1-a), scaled, d = 512": scaled[-1],
            "most there can be, all weights alike": uniform,
            "a(1-a) minus what autograd says": formula,
        },
        plots=(
            Plot(
                "slope of the softmax, 16 keys",
                "d",
                "mean a(1-a)",
                (_curve("scaled by 1/√d", WIDTHS, scaled), _curve("unscaled", WIDTHS, unscaled)),
                log_x=True,
                log_y=True,
            ),
        ),
        conclusion=f"At d_k = 512 the slope a(1 - a) is {figure(unscaled[-1], 2)} on average "
        f"without the scale and {figure(scaled[-1], 2)} with it; the most there can be, with equal "
        f"weights, is {figure(uniform, 2)}. That is {unscaled[-1] / unscaled[0]:.0%} of the slope "
        f"at d_k = 1 without the scale, and {scaled[-1] / scaled[0]:.0%} with it.",
    )


def score_variance() -> Finding:
    draws = 2000
    measured, scaled, betas = [], [], []
    for d in WIDTHS:
        query, key = normal(0, draws, 1, d), normal(1, draws, 2, d)
        scores = DotScore()(query, key)
        measured.append(float(scores.var()))
        # The scale that attention uses, read off its weights: log a₁/a₂ = β (s₁ - s₂).
        a = attention_weights(query[:1], key[:1])[0, 0]
        difference = scores[0, 0, 0] - scores[0, 0, 1]
        betas.append(float((a[0].log() - a[1].log()) / difference))
        scaled.append(betas[-1] ** 2 * measured[-1])
    close = all(abs(variance / d - 1) < 0.1 for d, variance in zip(WIDTHS, measured))
    return Finding(
        holds(close and all(abs(variance - 1) < 0.1 for variance in scaled)),
        {
            "variance of q·k, d = 512": measured[-1],
            "variance of β q·k, d = 512": scaled[-1],
            "β that attend uses, d = 512": betas[-1],
            "1/√512": 1 / math.sqrt(512),
        },
        plots=(
            Plot(
                "variance of the scores of random vectors",
                "d",
                "variance",
                (
                    _curve("q·k", WIDTHS, measured),
                    _curve("d", WIDTHS, WIDTHS),
                    _curve("β q·k", WIDTHS, scaled),
                ),
                log_x=True,
                log_y=True,
            ),
        ),
        conclusion="q·k is a sum of d_k independent products of variance 1. At d_k = 512 its "
        f"measured variance is {figure(measured[-1], 3)}, and {figure(scaled[-1], 3)} after "
        "division by √d_k; from width 1 to 512 the scaled variance stays between "
        f"{figure(min(scaled), 3)} and {figure(max(scaled), 3)}.",
    )


def other_scores() -> Finding:
    query, key, value = normal(0, 5, 6), normal(1, 7, 6), normal(2, 7, 3)
    by_score, fits = {}, True
    for name, score in _scores(6).items():
        projected = score.project(query, key)
        shares = attention_weights(
            projected.query, projected.key, beta=projected.beta, bias=projected.bias
        ).detach()
        context = score.attend(query, key, value)
        by_hand = plain.softmax(plain.array(score(query, key)))
        fits &= plain.apart(shares, by_hand) < SAME and apart(context, shares @ value) < SAME
        fits &= apart(shares.sum(-1), torch.ones(5)) < SAME and bool((shares > 0).all())
        by_score[name] = shares
    nearest = min(apart(a, b) for a, b in combinations(by_score.values(), 2))
    return Finding(
        holds(fits and nearest > DIFFERENT),
        {"each gives weights and means": fits, "least difference between two": nearest},
        tables=(
            Table(
                "weights of the first query",
                ("score", *(f"k{n + 1}" for n in range(7)), "parameters"),
                tuple(
                    (name, *by_score[name][0].tolist(), parameters(score))
                    for name, score in _scores(6).items()
                ),
            ),
        ),
        conclusion="Dot product, scaled dot product, general and additive score "
        f"{'each' if fits else 'do not all'} give positive weights that sum to 1, and a weighted "
        f"mean of the values. Between two of them the weights differ by {figure(nearest, 2)} at "
        "least.",
    )


def general_is_dot() -> Finding:
    query, key, value = normal(0, 5, 6), normal(1, 7, 6), normal(2, 7, 3)
    general = BilinearScore(6, 6).double().requires_grad_(False)
    one = torch.eye(6, dtype=torch.float64)
    general.weight.copy_(one)
    dot = attend(query, key, value, beta=1.0)
    identity = apart(general.attend(query, key, value), dot)
    general.weight.copy_(one / math.sqrt(6))
    scaled = apart(general.attend(query, key, value), attend(query, key, value))
    general.weight.copy_(normal(3, 6, 6))
    random = apart(general.attend(query, key, value), dot)
    # With W = W_Q W_Kᵀ it is a dot product of projected queries and keys: what a head does.
    w_q, w_k = normal(4, 6, 2), normal(5, 6, 2)
    general.weight.copy_(w_q @ w_k.T)
    head = apart(general.attend(query, key, value), attend(query @ w_q, key @ w_k, value, beta=1.0))
    return Finding(
        holds(max(identity, scaled, head) < SAME and random > DIFFERENT),
        {
            "W = I, and the dot product": identity,
            "W = I/√d, and the scaled one": scaled,
            "W of two projections, and a head's": head,
            "W random, and the dot product": random,
        },
        conclusion="With W = I the general score qᵀ W k gives the dot product's output "
        f"(difference {figure(identity)}), with I/√d the scaled one's ({figure(scaled)}), with W_Q "
        f"W_Kᵀ that of a head ({figure(head)}), and with a random W another ({figure(random, 2)}). "
        "So a head is a general score with a matrix of low rank.",
    )


def no_parameters() -> Finding:
    layer = MultiHeadAttention(12, 3)
    projections = sum(map(parameters, (layer.query, layer.key, layer.value, layer.output)))
    own = parameters(layer.core)
    # Nothing to learn also means nothing to remember: the same call gives the same.
    query, key, value = normal(0, 5, 4), normal(1, 7, 4), normal(2, 7, 3)
    by_hand = plain.softmax(plain.array(query @ key.T) / 2) @ plain.array(value)
    gap = plain.apart(attend(query, key, value), by_hand)
    return Finding(
        holds(own == 0 and projections == parameters(layer) and gap < SAME),
        {
            "parameters of the operation": own,
            "parameters of the projections around it": projections,
            "attend minus the formula": gap,
        },
        tables=(
            Table(
                "parameters of a score of width 6",
                ("score", "parameters"),
                tuple((name, parameters(score)) for name, score in _scores(6).items()),
            ),
        ),
        conclusion=f"The operation has {own} parameters, the four projections around it "
        f"{projections}. Of other scores that is not so: see the table.",
    )


def _curve(name: str, widths: Sequence[int], values: Sequence[float | int]) -> Curve:
    return Curve(name, [float(d) for d in widths], [float(y) for y in values])


def _scores(width: int) -> dict[str, AlignmentScore]:
    return {
        "dot": DotScore(),
        "scaled dot": ScaledDotScore(),
        "general": alive(BilinearScore(width, width), 3),
        "additive": alive(AdditiveScore(width, width, 5), 4),
    }


EXPERIMENTS: tuple[Experiment, ...] = (
    Experiment(
        5,
        "scale-and-gradient",
        Place("exercises", "2(b)"),
        "d is d_k, the width of the keys; it scales the dot products so that the gradient of the "
        "softmax does not vanish.",
        "128 random queries attend to 64 sets of 16 random keys of growing width. The slope of "
        "the softmax, a(1 - a), is averaged, with scores scaled and not; autograd confirms it.",
        scale_and_gradient,
        (r"\frac{\partial a_j}{\partial s_j} = a_j (1 - a_j)",),
    ),
    Experiment(
        5,
        "score-variance",
        Place("exercises", "2(b)"),
        "Why √d_k: for entries of mean 0 and variance 1 the variance of q·k is d_k, so that "
        "dividing by √d_k makes it 1 at any width.",
        "The variance of q·k is measured for entries of variance 1, over growing widths. The "
        "scale that attention itself uses is read off its weights.",
        score_variance,
        (r"\operatorname{Var}(q \cdot k) = \sum_{i=1}^{d_k} \operatorname{Var}(q_i k_i) = d_k",),
        kind="added",
    ),
    Experiment(
        82,
        "other-scores",
        Place("handout", "scores"),
        "Many formulas for the score exist, and attention has taken many forms, such as "
        "Bahdanau's and Luong's; the Transformer's is the scalar product.",
        "Four scores rate the same queries and keys. Each one's weights are checked against a "
        "softmax in numpy, and compared with the others'.",
        other_scores,
        (
            r"q^\top k, \quad \frac{q^\top k}{\sqrt{d}}, \quad q^\top W k, \quad "
            r"v^\top \tanh(W q + U k)",
        ),
    ),
    Experiment(
        82,
        "general-is-dot",
        Place("handout", "scores"),
        "Luong's general score contains the dot product, and the score of a Transformer's head, "
        "as special cases.",
        "The general score's matrix is set to I, to I/√d, to W_Q W_Kᵀ and to random numbers.",
        general_is_dot,
        (r"q^\top W_Q W_K^\top k = (W_Q^\top q) \cdot (W_K^\top k)",),
        kind="added",
    ),
    Experiment(
        87,
        "no-parameters",
        Place("handout", "complexity"),
        "As a formula computes the weights, attention itself has no trainable parameter.",
        "The parameters of a multi-head layer are counted in the operation itself and in the "
        "projections around it.",
        no_parameters,
    ),
)
