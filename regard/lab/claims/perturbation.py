"""Perturbation: what a change of one key does to its weight and to the output.

    a'_j = a_j e^{βδ} / (1 + a_j (e^{βδ} - 1))        δ = ε·q, where key j moves by ε

The output moves along the line between that key's value and the mean of the others.
"""

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from regard import attend, weights
from regard.lab.claims.sample import SAME, apart, normal
from regard.lab.experiment import (
    Curve,
    Experiment,
    Finding,
    Plot,
    Table,
    conditional,
    corrected,
    holds,
)
from regard.lab.place import Place

SIGMAS = (0.001, 0.1, 1.0, 5.0)
"""How far a key is moved."""


def moved_key_line() -> Finding:
    worst_a, worst_h, worst_line = [], [], []
    for sigma in SIGMAS:
        case = _Moved(sigma, 401)
        a, h = case.exact()
        worst_a.append(apart(a, case.a_after))
        worst_h.append(apart(h, case.h_after))
        worst_line.append(apart(a * case.v + (1 - a) * case.others, case.h_after))
    return Finding(
        holds(max(*worst_a, *worst_h, *worst_line) < SAME),
        {
            "weight by the formula, error": max(worst_a),
            "output by the formula, error": max(worst_h),
            "distance from the line between vⱼ and the mean of the others": max(worst_line),
        },
        tables=(
            Table(
                "largest error of 401 draws",
                ("σ", "weight", "output", "line"),
                tuple(zip(SIGMAS, worst_a, worst_h, worst_line)),
            ),
        ),
    )


def moved_key_linear() -> Finding:
    sigmas = tuple(10 ** (n / 4) for n in range(-12, 4))
    cases = [_Moved(sigma, 801) for sigma in sigmas]
    medians = [float(case.linear_error().median()) for case in cases]
    expected = [float(((0.5 - case.a) * case.exponent).abs().median()) for case in cases]
    rows = []
    for sigma in SIGMAS:
        case = _Moved(sigma, 4001)
        quantiles = case.linear_error().quantile(torch.tensor([0.1, 0.5, 0.9]).double())
        exact = float((case.exact()[1] - case.h_after).norm(dim=-1).median())
        rows.append((sigma, *quantiles.tolist(), exact))
    half = [row[2] for row in rows]
    exact = apart(_Moved(5.0, 4001).exact()[1], _Moved(5.0, 4001).h_after)
    return Finding(
        corrected(max(half) < 0.01, exact < SAME and half[0] < 0.01 and half[-1] > 0.1),
        {
            "σ": list(SIGMAS),
            "relative error of the linear formula, median": half,
            "largest error of the exact formula, σ = 5": exact,
        },
        tables=(
            Table(
                "relative error of the linear formula in 4,001 draws; the exact formula's error",
                ("σ", "lowest tenth", "median", "highest tenth", "exact"),
                (*rows,),
            ),
        ),
        plots=(
            Plot(
                "median relative error of the linear formula",
                "σ",
                "relative error",
                (
                    Curve("measured", sigmas, medians),
                    Curve("|(1/2 - aⱼ) βδ|", sigmas, expected),
                ),
                log_x=True,
                log_y=True,
            ),
        ),
    )


def split_softmax() -> Finding:
    query, key, change = normal(0, 3, 5), normal(1, 7, 5), normal(2, 3, 7)
    whole = weights(query, key, bias=change)
    before, alone = weights(query, key), torch.softmax(change, -1)
    product = before * change.exp()
    product = product / product.sum(-1, keepdim=True)
    added, multiplied = apart(whole, before + alone), apart(whole, product)
    return Finding(
        corrected(added < SAME, multiplied < SAME),
        {
            "softmax of the sum minus the sum of two softmaxes": added,
            "softmax of the sum minus their normalised product": multiplied,
            "rows of the sum add up to": float((before + alone).sum(-1).mean()),
        },
    )


def longer_key() -> Finding:
    query, keys = torch.tensor([[1.0, 2.0, 2.0]]).double(), normal(1, 6, 3)
    directions = {"q·k > 0": (2, 1, 0), "q·k = 0": (2, 1, -2), "q·k < 0": (-2, 1, -1)}
    alphas = (1.0, 1.5, 2.0, 3.0, 5.0, 8.0, 12.0, 20.0)

    def weight(direction: Sequence[int], alpha: float) -> float:
        key = torch.cat((keys, alpha * torch.tensor([direction]).double()))
        return float(weights(query, key)[0, -1])

    paths = {name: [weight(d, alpha) for alpha in alphas] for name, d in directions.items()}
    limits = {name: weight(d, 1e3) for name, d in directions.items()}
    along, *others = paths
    return Finding(
        conditional(
            all(a < b for a, b in pairwise(paths[along])) and limits[along] > 1 - SAME,
            all(limits[name] > paths[name][0] for name in others),
        ),
        {name: [path[0], limits[name]] for name, path in paths.items()},
        plots=(
            Plot(
                "weight of one of seven keys as it grows longer",
                "α",
                "weight",
                tuple(Curve(name, alphas, path) for name, path in paths.items()),
                log_x=True,
            ),
        ),
    )


class _Moved:
    """Many draws of a query, and what moving key j by ε of deviation σ does to its output."""

    def __init__(self, sigma: float, draws: int, S: int = 5, K: int = 4, V: int = 3):
        query, key, value = normal(0, draws, 1, K), normal(1, draws, S, K), normal(2, draws, S, V)
        epsilon = sigma * normal(3, draws, 1, K)
        moved = torch.cat((key[:, :1] + epsilon, key[:, 1:]), 1)
        before = weights(query, key)
        self.a, self.a_after = before[..., 0], weights(query, moved)[..., 0]
        self.h, self.h_after = (attend(query, k, value)[:, 0] for k in (key, moved))
        self.v = value[:, 0]
        self.others = (before[..., 1:] @ value[:, 1:])[:, 0] / (1 - self.a)
        self.exponent = (epsilon * query).sum(-1) / math.sqrt(K)  # βδ

    def exact(self) -> tuple[Tensor, Tensor]:
        """a'_j = a_j e^{βδ} / (1 + a_j (e^{βδ} - 1)), h' = h + (a'_j - a_j)/(1 - a_j) (v_j - h)"""
        a = self.a * self.exponent.exp() / (1 + self.a * self.exponent.expm1())
        return a, self.h + (a - self.a) / (1 - self.a) * (self.v - self.h)

    def linear_error(self) -> Tensor:
        """Of h + β a_j δ (v_j - h), relative to how far the output moved."""
        linear = self.h + self.exponent * self.a * (self.v - self.h)
        return (linear - self.h_after).norm(dim=-1) / (self.h_after - self.h).norm(dim=-1)


EXPERIMENTS: tuple[Experiment, ...] = (
    Experiment(
        43,
        "moved-key-line",
        Place("homework", "1.1(e)"),
        "What a small change of one key does to the output can be written down.",
        "One of five keys is moved by ε, of standard deviation 0.001 to 5. Weight and output are "
        "computed by attend() and by closed formulas, with δ = ε·q, in 401 draws each.",
        moved_key_line,
        (
            r"a_j' = \frac{a_j e^{\beta\delta}}{1 + a_j (e^{\beta\delta} - 1)}",
            r"h' = h + \frac{a_j' - a_j}{1 - a_j} (v_j - h)",
        ),
        kind="added",
        correct="Exactly: the key's weight changes as below, and the output moves on the straight line "
        "between that key's value and the mean of the others. That is so for large changes too.",
    ),
    Experiment(
        43,
        "moved-key-linear",
        Place("homework", "1.1(e)"),
        "When a key moves, the output changes linearly: by β aⱼ δ (vⱼ - h), where δ = ε·q.",
        "The linear formula's error, relative to how far the output moved, is measured in 4,001 "
        "draws for changes of standard deviation 0.001 to 5, beside the exact formula's.",
        moved_key_linear,
        (r"h' = h + \beta a_j \delta (v_j - h) + O(\delta^2)",),
        correct="That is the first term of a series. Its relative error grows with the change, about as "
        "|(1/2 - aⱼ) βδ|: it is good for small changes alone, while the exact formula has no "
        "error at all.",
    ),
    Experiment(
        43,
        "split-softmax",
        Place("homework", "1.1(e)"),
        "A softmax of a sum is the sum of the softmaxes.",
        "A term is added to the scores, and the weights are compared with the sum of two "
        "softmaxes, and with their normalised product.",
        split_softmax,
        (r"\operatorname{softmax}(s + t)_j \propto \operatorname{softmax}(s)_j \, e^{t_j}",),
        correct="It is the first softmax times the exponential of the added term, normalised along the "
        "row. A sum of two softmaxes has rows that add up to 2.",
    ),
    Experiment(
        44,
        "longer-key",
        Place("homework", "1.1(f)"),
        "A key that is made longer draws more attention.",
        "One of seven keys is stretched by α, for a key that points along the query, one that "
        "points away from it, and one at a right angle.",
        longer_key,
        (r"s = \alpha \, q \cdot k",),
        correct="Only if q·k > 0, and then its weight goes to 1. If q·k < 0 the weight goes to 0, and if "
        "q·k = 0 nothing changes.",
    ),
)
