"""What a position tells: how similar two are, and what a model can read from them."""

import math
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from regard import Concatenated, LinearBias, MultiHeadAttention, Rotary, Sinusoidal
from regard.attention.position import AttentionPosition
from regard.lab.claims import plain
from regard.lab.claims.sample import DIFFERENT, SAME, D, H, L, alive, apart, influence, normal
from regard.lab.experiment import (
    Curve,
    Experiment,
    Finding,
    Plot,
    Table,
    by_seeds,
    conditional,
    corrected,
    holds,
)
from regard.lab.place import Place
from regard.model.baseline import Convolution
from regard.model.block import Block, FeedForward, PostNorm, Sublayer

P = 6
"""The width of appended positions."""


def _number_as_position() -> Finding:
    n = 20
    number = torch.arange(1, n + 1, dtype=torch.float64)
    product = torch.outer(number, number)
    r = Sinusoidal(64).encoding(torch.arange(n), torch.float64)
    kernel = r @ r.T

    def by_distance(gram: Tensor) -> float:
        """How much the similarity of neighbours depends on their position."""
        return float(gram.diagonal(1).max() - gram.diagonal(1).min())

    def most_like_themselves(gram: Tensor) -> int:
        return int((gram.argmax(-1) == torch.arange(n)).sum())

    wrong, right = most_like_themselves(product), most_like_themselves(kernel)
    return Finding(
        holds(by_distance(product) > 1 and wrong < n and by_distance(kernel) < SAME and right == n),
        {
            "of 20 positions, most like themselves: φ(i) = i": wrong,
            "of 20 positions, most like themselves: sinusoids": right,
            "spread of neighbours' similarity: φ(i) = i": by_distance(product),
            "spread of neighbours' similarity: sinusoids": by_distance(kernel),
        },
    )


def _kernel() -> Finding:
    width, n = 64, 200
    r = Sinusoidal(width).encoding(torch.arange(n), torch.float64)
    gram = r @ r.T
    kernel = gram[0] / gram[0, 0]
    offsets = np.arange(n)
    frequencies = 10000 ** (-np.arange(0, width, 2) / width)
    cosines = np.cos(np.outer(offsets, frequencies)).mean(1)
    off = plain.apart(kernel, cosines)
    by_distance = max(float(d.max() - d.min()) for d in map(gram.diagonal, range(n)))
    rates = np.geomspace(1e-5, 10, 400)
    bells = np.exp(-rates[:, None] * offsets**2)
    misses = np.abs(bells - cosines).max(1)
    bell = bells[misses.argmin()]
    rises = int(np.argmax(np.diff(plain.array(kernel)) > 0))
    lowest = float(kernel.min())
    return Finding(
        corrected(
            taught=float(misses.min()) < 0.01,
            correct=off < SAME and by_distance < 1e-11 and rises < n - 1 and lowest > 0,
        ),
        {
            "distance of the sinusoids' kernel from the mean of cos ω(i − j)": off,
            "distance of the nearest Gaussian, as a share of the maximum": float(misses.min()),
            "lowest value, as a share of the maximum": lowest,
            "offset from which it rises again": rises,
            "spread among pairs of one distance": by_distance,
        },
        plots=(
            Plot(
                "How alike two positions are (64 wide)",
                "distance",
                "similarity, 1 at distance 0",
                (
                    Curve("sinusoids", offsets.tolist(), kernel.tolist()),
                    Curve("nearest Gaussian", offsets.tolist(), bell.tolist()),
                ),
            ),
        ),
    )


def _high_dimension() -> Finding:
    draws, widths = 2000, (3, 8, 16, 64, 256, 512)
    rows, worst = [], 0.0
    for width in widths:
        one, other = normal(width, draws, width), normal(width + 1, draws, width)
        measured = float(F.cosine_similarity(one, other).abs().mean())
        exact = math.exp(math.lgamma(width / 2) - math.lgamma((width + 1) / 2)) / math.sqrt(math.pi)
        rows.append((width, measured, exact, math.sqrt(2 / (math.pi * width))))
        worst = max(worst, abs(measured / exact - 1))
    # Tokens of random vectors, beside the positions that they are really given.
    r = Sinusoidal(512).encoding(torch.arange(200), torch.float64)
    overlap = float(F.cosine_similarity(normal(0, 200, 512), r).abs().mean())
    by = {row[0]: row[1] for row in rows}
    return Finding(
        conditional(
            inside=worst < 0.05 and max(by[512], overlap) < 0.05, outside=max(by.values()) < 0.05
        ),
        {
            "mean |cos| of random vectors, D = 3": by[3],
            "mean |cos| of random vectors, D = 64": by[64],
            "mean |cos| of random vectors, D = 512": by[512],
            "mean |cos| of random vectors and sinusoids, D = 512": overlap,
            "largest share by which the measured misses the exact": worst,
        },
        (Table("Mean |cos|", ("D", "measured", "exact", "√(2/(πD))"), tuple(rows)),),
        (
            Plot(
                "Random directions",
                "D",
                "mean |cos|",
                (
                    Curve("measured", widths, [row[1] for row in rows]),
                    Curve("√(2/(πD))", widths, [row[3] for row in rows]),
                ),
                log_x=True,
                log_y=True,
            ),
        ),
    )


def _relative() -> Finding:
    x = normal(0, 1, L, D)
    order = torch.tensor([1, 0, *range(2, L)])
    kinds: dict[str, AttentionPosition | None] = {
        "none": None,
        "rotary": Rotary(D // H),
        "linear bias": LinearBias(H),
    }
    noticed = {}
    for name, kind in kinds.items():
        layer = alive(MultiHeadAttention(D, H, position=kind), 1)
        noticed[name] = apart(layer(x[:, order]).mean(1), layer(x).mean(1))
    query, key, turn = normal(2, 1, 8), normal(3, 1, 8), Rotary(8)

    def score(i: int, j: int) -> float:
        return float((turn.rotate(query, i) * turn.rotate(key, j)).sum())

    relative = max(abs(score(i, i - 3) - score(3, 0)) for i in (5, 40, 1000))
    pairs = plain.array(query)[0].reshape(-1, 2), plain.array(key)[0].reshape(-1, 2)
    (a, b), angles = (p @ [1, 1j] for p in pairs), 3 / 10000 ** (np.arange(0, 8, 2) / 8)
    by_hand = abs(score(3, 0) - float((a * np.exp(1j * angles) * b.conj()).real.sum()))
    bias = LinearBias(H).bias(L, L, dtype=torch.float64)[0]
    by_distance = max(float((d.amax(-1) - d.amin(-1)).max()) for d in _diagonals(bias))
    return Finding(
        corrected(
            taught=noticed["rotary"] < SAME and noticed["linear bias"] < SAME,
            correct=noticed["none"] < SAME
            and min(noticed["rotary"], noticed["linear bias"]) > DIFFERENT
            and max(relative, by_hand) < 1e-11
            and by_distance == 0,
        ),
        {f"change when two rows are exchanged, {name}": value for name, value in noticed.items()}
        | {
            "rotary: spread of the score at distance 3, up to position 1000": relative,
            "rotary: distance of the score from complex arithmetic": by_hand,
            "linear bias: spread among pairs of one distance": by_distance,
        },
    )


def _long_range() -> Finding:
    n = 23
    x, sines = normal(0, 1, n, D), Sinusoidal(D)
    attention, convolution = alive(MultiHeadAttention(D, H), 1), alive(Convolution(D, 3), 2)
    layers: dict[str, Callable[[Tensor], Tensor]] = {
        "attention, no positions": attention,
        "attention, positions": lambda x: attention(sines(x)),
        "convolution of 3, no positions": convolution,
        "convolution of 3, positions": lambda x: convolution(sines(x)),
    }
    far = {}
    for name, layer in layers.items():
        rows, columns = (influence(layer, x) > 0).nonzero(as_tuple=True)
        far[name] = int((rows - columns).abs().max())
    bare, placed, near, near_placed = far.values()
    return Finding(
        corrected(
            taught=placed > bare or near_placed > near,
            correct=bare == placed == n - 1 and near == near_placed == 1,
        ),
        {f"longest reach of one layer, {name}": reach for name, reach in far.items()},
    )


def _optional() -> Finding:
    x, n = normal(0, 5, D), 5
    r = Sinusoidal(D).encoding(torch.arange(n), torch.float64)
    used = alive(MultiHeadAttention(D, H), 1)
    before = used(x)
    change = apart(used(x + r), before)
    # Every matrix that reads the input is made to overlook the directions of these positions.
    aside = torch.eye(D, dtype=torch.float64) - torch.linalg.pinv(r) @ r
    ignored = alive(MultiHeadAttention(D, H), 1)
    wide = alive(MultiHeadAttention(D + P, H, key_width=D // H, output_width=D), 1)
    for part, beside, own in zip(
        (ignored.query, ignored.key, ignored.value),
        (wide.query, wide.key, wide.value),
        (used.query, used.key, used.value),
    ):
        part.weight.copy_(part.weight @ aside)
        beside.weight.copy_(F.pad(own.weight, (0, P)))
        beside.bias.copy_(own.bias)
    wide.output.load_state_dict(used.output.state_dict())
    added = apart(ignored(x + r), ignored(x))
    appended = apart(wide(Concatenated(Sinusoidal(P))(x)), before)
    return Finding(
        holds(change > DIFFERENT and added < SAME and appended < SAME),
        {
            "effect of added positions, any matrices": change,
            "effect of added positions, matrices that overlook them": added,
            "effect of appended positions, matrices with zeros for them": appended,
            "dimensions given up to overlook five added positions": int(
                torch.linalg.matrix_rank(r)
            ),
        },
    )


class _Unskipped(PostNorm):
    """The same sublayers without the residual sum."""

    def forward(self, x: Tensor, sublayer: Sublayer, rows: int | None = None) -> Tensor:
        return self.norm(sublayer(x))


def _probed(residual: type[PostNorm], seed: int) -> list[float]:
    """The share of the position's variance that a linear probe misses after each layer."""
    width, length, batch, layers = 24, 16, 64, 6
    place = torch.arange(length, dtype=torch.float64)
    wanted = ((place - place.mean()) / place.std(correction=0)).repeat(batch)[:, None]
    x = 0.3 * normal(seed, batch, length, width)
    x = Sinusoidal(width)(x)
    missed = []
    for n in range(layers + 1):
        if n:
            parts = MultiHeadAttention(width, 4), FeedForward(width, 48)
            x = alive(Block(*parts, partial(residual, width)), 100 * seed + n)(x)
        rows = F.pad(x.flatten(0, 1), (0, 1), value=1.0)
        half = len(rows) // 2
        fit, goal = rows[:half], wanted[:half]
        # A little ridge, since rows that have all become alike leave nothing to solve for.
        ridge = 1e-6 * half * torch.eye(width + 1, dtype=torch.float64)
        probe = torch.linalg.solve(fit.mT @ fit + ridge, fit.mT @ goal)
        missed.append(round(float((rows[half:] @ probe - wanted[half:]).square().mean()), 6))
    return missed


def _skip_connections() -> Finding:
    kinds: dict[str, type[PostNorm]] = {"with skips": PostNorm, "without": _Unskipped}
    missed = {name: [_probed(kind, seed) for seed in (1, 2, 3)] for name, kind in kinds.items()}
    last = {name: [run[-1] for run in runs] for name, runs in missed.items()}
    margins = [no - yes for yes, no in zip(last["with skips"], last["without"])]
    layers = range(len(missed["without"][0]))
    return Finding(
        by_seeds(margins, margin=0.3),
        {f"missed after the last layer, {name}, by seed": run for name, run in last.items()},
        plots=(
            Plot(
                "What a linear probe misses of the position",
                "layer",
                "squared error (1: it guesses)",
                tuple(
                    Curve(name, list(layers), np.mean(runs, 0).tolist())
                    for name, runs in missed.items()
                ),
            ),
        ),
    )


def _diagonals(bias: Tensor) -> list[Tensor]:
    rows = bias.shape[-1]
    return [bias.diagonal(n, -2, -1) for n in range(1 - rows, rows)]


EXPERIMENTS: tuple[Experiment, ...] = (
    Experiment(
        96,
        "number-as-position",
        Place("handout", "positional encoding"),
        "A position's bare number, φ(i) = i, does not do: similarity should fall with distance.",
        "Dot products of twenty positions are computed for φ(i) = i and for sinusoids: which "
        "position is most similar to which, and whether neighbours are similar everywhere.",
        _number_as_position,
        correct="It does not do: every position is most similar to the last one. Sinusoids are most "
        "similar to themselves, and their similarity depends on the distance alone.",
    ),
    Experiment(
        96,
        "position-kernel",
        Place("handout", "positional encoding"),
        "Sinusoids are a truncated radial basis function: φ(i)·φ(j) falls like exp(−λ(i − j)²).",
        "The dot products of 200 sinusoids of width 64 are compared with the sum of cosines and "
        "with the Gaussian of the λ that fits best.",
        _kernel,
        (r"r_i \cdot r_j = \sum_k \cos \omega_k (i - j)",),
        correct="Their kernel is Σ cos ω(i − j). It depends on the distance alone, but no Gaussian is "
        "near it: it rises again after a few steps and stays well above zero.",
    ),
    Experiment(
        19,
        "high-dimension",
        Place("slides", "adding"),
        "In high dimension an added position and a token's vector stay separate, because random "
        "vectors are nearly orthogonal.",
        "The mean |cos| of random pairs is measured at widths from 3 to 512, beside its exact "
        "value and √(2/(πD)); tokens are also compared with real sinusoids.",
        _high_dimension,
        (r"E|\cos| = \frac{\Gamma(D/2)}{\sqrt\pi\,\Gamma((D+1)/2)} \approx \sqrt{2/(\pi D)}",),
        correct="Approximately, and in high dimension alone: the overlap falls only like 1/√D, and in "
        "three dimensions it is large.",
    ),
    Experiment(
        32,
        "relative-positions",
        Place("sheet", "6-2(c)"),
        "Order is told by vectors added to the input, which are either fixed or learned.",
        "Nothing is added to the input. Two rows are exchanged under attention without positions, "
        "with rotary ones and with a linear bias; the scores are compared by distance.",
        _relative,
        (r"(R_i q) \cdot (R_j k) = q \cdot R_{j-i} k", r"s_{ij} = \beta q_i k_j - m_h |i - j|"),
        correct="Rotary positions rotate queries and keys, biases lower the scores of distant pairs; both "
        "encode the order without a vector, and both depend on distances alone.",
    ),
    Experiment(
        48,
        "position-and-reach",
        Place("homework", "1.3(b)"),
        "Positional encodings capture long-range dependencies.",
        "The Jacobian gives the longest distance over which a row of the output depends on a row "
        "of the input, for attention and for a convolution, with and without sinusoids.",
        _long_range,
        correct="They encode the position of a row. How far a layer reaches depends on the layer, with "
        "positions or without.",
    ),
    Experiment(
        98,
        "optional-information",
        Place("handout", "positional encoding"),
        "A position is information that training may use or ignore.",
        "Three attention layers read the same rows with positions: one with random matrices, one "
        "whose matrices ignore the positions' directions, and one with zeros for appended columns.",
        _optional,
        correct="Matrices exist for both. Ignoring appended positions costs nothing; ignoring added ones "
        "costs the directions that they take.",
    ),
    Experiment(
        20,
        "skip-connections",
        Place("slides", "adding"),
        "Skip connections carry the position through the layers.",
        "Stacks of six untrained blocks, with and without the residual sum, read noisy rows with "
        "sinusoids. After each layer a linear probe is fitted to the position and tested on other "
        "rows, for three seeds.",
        _skip_connections,
        correct="With skips the position can be read after every layer. Without them it is lost after a "
        "few.",
    ),
)
