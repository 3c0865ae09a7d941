"""Perturbation: what a change of one key does to its weight and to the output.

    a'_j = a_j e^{βδ} / (1 + a_j (e^{βδ} - 1))        δ = ε·q, where key j moves by ε

The output moves along the line between that key's value and the mean of the others.
"""

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from regard import attend, attention_weights
from regard.lab.claims.sample import SAME, apart, normal
from regard.lab.experiment import (
    Curve,
    Experiment,
    Finding,
    Plot,
    Table,
    corrected,
    holds,
    more_exactly,
)
from regard.lab.numbers import figure, within
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
        conclusion=f"In {401 * len(SIGMAS):,} draws, with changes of deviation {SIGMAS[0]} to "
        f"{SIGMAS[-1]:g}, the formulas give weight and output {within(max(*worst_a, *worst_h))}, "
        "and the output stays on the line between vⱼ and the mean of the others "
        f"{within(max(worst_line))}. That is exact for large changes too.",
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
    # A term of second order: a change ten times as large is ten times as far from linear.
    power = math.log10(half[1] / half[0]) / math.log10(SIGMAS[1] / SIGMAS[0])
    return Finding(
        holds(half[0] < 0.001 and abs(power - 1) < 0.05),
        {
            "σ": list(SIGMAS),
            "relative error of the linear formula, median": half,
            "power of σ by which that error grows, small changes": power,
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
        conclusion="To first order the output moves by β aⱼ δ (vⱼ - h): the median relative error "
        f"is {figure(half[0], 2)} at σ = 0.001 and {half[1]:.1%} at 0.1. For larger changes, which "
        f"the question leaves out, it is {half[2]:.0%} at σ = 1 and {half[3]:.0%} at 5.",
    )


def split_softmax() -> Finding:
    query, key, change = normal(0, 3, 5), normal(1, 7, 5), normal(2, 3, 7)
    whole = attention_weights(query, key, bias=change)
    before, alone = attention_weights(query, key), torch.softmax(change, -1)
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
        conclusion="The softmax of a sum differs from the sum of two softmaxes by "
        f"{figure(added, 2)}, whose rows add up to "
        f"{figure(float((before + alone).sum(-1).mean()))} rather than 1. It is the first softmax "
        "times the exponential of the added term, divided by the sum of the row: "
        f"{within(multiplied)}.",
    )


def column_of_softargmaxes() -> Finding:
    query, key, value = normal(0, 1, 5), normal(1, 7, 5), normal(2, 7, 3)
    output = attend(query, key, value)[0]
    # Each score by itself, as the derivation has it.
    alone = torch.cat([attention_weights(query, key[[j]]) for j in range(7)], 1)[0]
    together = attention_weights(query, key)[0]
    written = torch.outer(alone, value.sum(0))  # V times a softargmax of one number, key by key
    summed = sum((a * v for a, v in zip(together, value)), torch.zeros(3))
    return Finding(
        corrected(
            taught=written.shape == output.shape and apart(written, output) < SAME,
            correct=apart(summed, output) < SAME and apart(alone, torch.ones(7)) < SAME,
        ),
        {
            "softargmax of each score by itself": alone.tolist(),
            "softargmax of all scores": together.tolist(),
            "numbers in the output": output.numel(),
            "entries of the column that is written, one for each key": len(written),
            "output minus Σ aⱼ vⱼ": apart(summed, output),
        },
        conclusion=f"A softargmax of one number is {figure(float(alone[0]))}, whatever the score, "
        f"so that every entry would be V times 1; and the column has {len(written)} entries, one "
        f"for each key, where the output has {output.numel()} numbers, as many as a value. The "
        f"output is one sum over the keys, Σ aⱼ vⱼ, {within(apart(summed, output))}, with weights "
        "that are normalised together.",
    )


def stretched_entry() -> Finding:
    query, key, value = normal(0, 1, 5), normal(1, 7, 5), normal(2, 7, 3)
    longer = torch.cat((3 * key[:1], key[1:]))
    before, after = attention_weights(query, key)[0], attention_weights(query, longer)[0]
    others = apart(before[1:], after[1:])
    # All others give, or receive, by the same factor: what the first one leaves of 1.
    factor = (1 - after[0]) / (1 - before[0])
    same = apart(after[1:], factor * before[1:])
    moved = attend(query, longer, value)[0] - attend(query, key, value)[0]
    changed = int((moved.abs() > SAME).sum())
    return Finding(
        corrected(taught=others < SAME, correct=same < SAME and others > SAME and changed == 3),
        {
            "weight of the stretched key, before and after": [float(before[0]), float(after[0])],
            "largest change among the other weights": others,
            "factor that all of the others have in common": float(factor),
            "numbers of the output that change, of 3": changed,
        },
        conclusion="The softargmax divides by the sum over all keys, so all weights change, the "
        f"others by the common factor {figure(float(factor), 3)} ({within(same)}), by "
        f"{figure(others, 2)} at most; and {changed} of {moved.numel()} numbers of the output "
        "change. There is no entry of the output that belongs to one key.",
    )


def longer_key() -> Finding:
    query, keys = torch.tensor([[1.0, 2.0, 2.0]]).double(), normal(1, 6, 3)
    directions = {"q·k > 0": (2, 1, 0), "q·k = 0": (2, 1, -2), "q·k < 0": (-2, 1, -1)}
    alphas = (1.0, 1.5, 2.0, 3.0, 5.0, 8.0, 12.0, 20.0)

    def weight(direction: Sequence[int], alpha: float) -> float:
        key = torch.cat((keys, alpha * torch.tensor([direction]).double()))
        return float(attention_weights(query, key)[0, -1])

    paths = {name: [weight(d, alpha) for alpha in alphas] for name, d in directions.items()}
    limits = {name: weight(d, 1e3) for name, d in directions.items()}
    along, across, against = paths
    return Finding(
        more_exactly(
            meant=all(a < b for a, b in pairwise(paths[along]))
            and all(a > b for a, b in pairwise(paths[against]))
            and limits[along] > 1 - SAME
            and limits[against] < SAME,
            literal=limits[across] != paths[across][0],
        ),
        {f"{name}: weight at α = 1 and 1,000": [p[0], limits[name]] for name, p in paths.items()},
        plots=(
            Plot(
                "weight of one of seven keys as it grows longer",
                "α",
                "weight",
                tuple(Curve(name, alphas, path) for name, path in paths.items()),
                log_x=True,
            ),
        ),
        conclusion="Which way depends on q·k. Where it is positive, the weight goes from "
        f"{figure(paths[along][0], 2)} to {figure(limits[along], 2)} and the output to that key's "
        f"value; where it is negative, from {figure(paths[against][0], 2)} to "
        f"{figure(limits[against], 2)}, and the key is left out; where it is 0, from "
        f"{figure(paths[across][0], 2)} to {figure(limits[across], 2)}: nothing changes.",
    )


class _Moved:
    """Many draws of a query, and what moving key j by ε of deviation σ does to its output."""

    def __init__(self, sigma: float, draws: int, S: int = 5, K: int = 4, V: int = 3):
        query, key, value = normal(0, draws, 1, K), normal(1, draws, S, K), normal(2, draws, S, V)
        epsilon = sigma * normal(3, draws, 1, K)
        moved = torch.cat((key[:, :1] + epsilon, key[:, 1:]), 1)
        before = attention_weights(query, key)
        self.a, self.a_after = before[..., 0], attention_weights(query, moved)[..., 0]
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
        "The exact change: with δ = ε·q, the key's weight changes as below, and each output "
        "slides on the straight line between that key's value and the mean of the others.",
        "One of five keys is moved by ε, of standard deviation 0.001 to 5. Weight and output are "
        "computed by attend() and by closed formulas, in 401 draws each.",
        moved_key_line,
        (
            r"a_j' = \frac{a_j e^{\beta\delta}}{1 + a_j (e^{\beta\delta} - 1)}",
            r"h' = h + \frac{a_j' - a_j}{1 - a_j} (v_j - h)",
        ),
        kind="added",
    ),
    Experiment(
        43,
        "moved-key-linear",
        Place("homework", "1.1(e)"),
        "For a small Gaussian perturbation ε of one key, the output changes linearly in ε.",
        "The error of the first-order formula, relative to how far the output moved, is measured "
        "in 4,001 draws for changes of standard deviation 0.001 to 5, beside the exact formula's.",
        moved_key_linear,
        (r"h' = h + \beta a_j \delta (v_j - h) + O(\delta^2)",),
    ),
    Experiment(
        43,
        "split-softmax",
        Place("homework", "1.1(e)"),
        "In the derivation, V softargmax of (k₁ + ε)·q₁ is split into V softargmax of k₁·q₁ plus "
        "V softargmax of ε·q₁.",
        "A term is added to the scores, and the weights are compared with the sum of two "
        "softmaxes, and with their normalised product.",
        split_softmax,
        (r"\operatorname{softmax}(s + t)_j \propto \operatorname{softmax}(s)_j \, e^{t_j}",),
    ),
    Experiment(
        43,
        "column-of-softargmaxes",
        Place("homework", "1.1(e)"),
        "In the derivation, V times the softargmax of a column of scores is written as the column "
        "of V times the softargmax of each score.",
        "The softargmax is taken of all scores of a query, and of each score by itself; shapes "
        "and numbers are compared with attend()'s output.",
        column_of_softargmaxes,
        (r"h = V \operatorname{softargmax}_\beta(K^\top q) = \sum_j a_j v_j",),
    ),
    Experiment(
        44,
        "longer-key",
        Place("homework", "1.1(f)"),
        "If one key is stretched by α > 1, the output changes with α; in which direction is not "
        "said.",
        "One of seven keys is stretched by α, for a key that points along the query, one that "
        "points away from it, and one at a right angle.",
        longer_key,
        (r"s = \alpha \, q \cdot k",),
    ),
    Experiment(
        44,
        "stretched-entry",
        Place("homework", "1.1(f)"),
        "In the derivation, stretching k₁ changes only the entry of k₁ in each column of the "
        "output; those of the other keys stay.",
        "One of seven keys is stretched threefold. The weights of the others, and the output, are "
        "compared before and after.",
        stretched_entry,
        (r"a_j' = a_j \frac{1 - a_1'}{1 - a_1}, \quad j \ne 1",),
    ),
)
