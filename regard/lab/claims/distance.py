"""What a position tells: how similar two are, and what a model can read from them."""

import math
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from regard import (
    ALiBi,
    Concatenated,
    LearnedPositions,
    MultiHeadAttention,
    RotaryEmbedding,
    SinusoidalPositions,
    attention_weights,
)
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
    estimate,
    holds,
    more_exactly,
)
from regard.lab.numbers import figure, within
from regard.lab.place import Place
from regard.model.baseline import Convolution
from regard.model.block import Block, FeedForward, PostNorm, Sublayer

P = 6
"""The width of appended positions."""


def _number_as_position() -> Finding:
    n = 20
    number = torch.arange(1, n + 1, dtype=torch.float64)
    product = torch.outer(number, number)
    r = SinusoidalPositions(64).encoding(torch.arange(n), torch.float64)
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
        plots=(
            Plot(
                "How similar every position is to the fifth",
                "position",
                "similarity, 1 at the most similar",
                tuple(
                    Curve(name, number.tolist(), (gram[4] / gram[4].max()).tolist())
                    for name, gram in (("φ(i) = i: the product 5j", product), ("sinusoids", kernel))
                ),
            ),
        ),
        conclusion=f"With φ(i) = i the product i·j is largest with the last position: {wrong} of "
        f"{n} positions is most similar to itself, and the similarity of neighbours varies by "
        f"{figure(by_distance(product))} along the sequence. With sinusoids {right} of {n} are, "
        f"and it varies by {figure(by_distance(kernel))}.",
    )


def _kernel() -> Finding:
    width, n = 64, 200
    r = SinusoidalPositions(width).encoding(torch.arange(n), torch.float64)
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
        conclusion=f"The sinusoids' kernel is Σ cos ω_k(i − j), {within(off)}: a function of the "
        "distance alone, but no truncated Gaussian. The nearest one misses it by "
        f"{float(misses.min()):.0%} of the maximum; it rises again after {rises} steps and its "
        f"lowest value is {lowest:.0%} of the maximum.",
    )


def _close_positions() -> Finding:
    n = 200
    rows = []
    for width in (16, 64, 512):
        r = SinusoidalPositions(width).encoding(torch.arange(n), torch.float64)
        similar = (r @ r.T)[0] / (width / 2)
        rising = (similar.diff() > 0).nonzero()
        rises = int(rising[0]) if len(rising) else n - 1
        beyond = float(similar[10:].max())
        rows.append((width, float(similar[1]), float(similar[2]), rises, beyond))
    return Finding(
        holds(all(first > beyond for _, first, _, _, beyond in rows)),
        {
            "widths": [row[0] for row in rows],
            "similarity at distance 1": [row[1] for row in rows],
            "largest similarity at distance 10 or more": [row[4] for row in rows],
            "distance up to which it falls": [row[3] for row in rows],
        },
        (
            Table(
                "Similarity of two positions, 1 at distance 0",
                ("width", "distance 1", "distance 2", "falls up to", "most from 10 on"),
                tuple(rows),
            ),
        ),
        conclusion="At width 64 neighbouring sinusoids have a similarity of "
        f"{figure(rows[1][1], 2)} (1 is the same position), and those of positions ten or more "
        f"apart {figure(rows[1][4], 2)} at most. The similarity falls up to a distance of "
        f"{rows[1][3]} and rises again after it.",
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
    r = SinusoidalPositions(512).encoding(torch.arange(200), torch.float64)
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
        conclusion=f"Random directions overlap by a mean |cos| of {figure(by[3], 2)} at D = 3, "
        f"{figure(by[64], 2)} at 64 and {figure(by[512], 2)} at 512, about √(2/(πD)); random "
        f"tokens and real sinusoids by {figure(overlap, 2)} at 512. So they are separate "
        "approximately, and in high dimension alone.",
    )


def _relative() -> Finding:
    x = normal(0, 1, L, D)
    order = torch.tensor([1, 0, *range(2, L)])

    def noticed(layer: Callable[[Tensor], Tensor]) -> float:
        """How much the mean over the rows changes when two of them are exchanged."""
        return apart(layer(x[:, order]).mean(1), layer(x).mean(1))

    layer, sines, learned = (
        alive(part, 1)
        for part in (MultiHeadAttention(D, H), SinusoidalPositions(D), LearnedPositions(L, D))
    )
    inside: dict[str, AttentionPosition] = {
        "rotary": RotaryEmbedding(D // H),
        "linear bias": ALiBi(H),
    }
    told = {
        "none": noticed(layer),
        "fixed, added: sinusoids": noticed(lambda x: layer(sines(x))),
        "learned, added": noticed(lambda x: layer(learned(x))),
        **{
            f"fixed, nothing added: {name}": noticed(
                alive(MultiHeadAttention(D, H, position=kind), 1)
            )
            for name, kind in inside.items()
        },
    }
    blind, *added, rotary, bias = told.values()
    query, key, turn = normal(2, 1, 8), normal(3, 1, 8), RotaryEmbedding(8)

    def score(i: int, j: int) -> float:
        return float((turn.rotate(query, i) * turn.rotate(key, j)).sum())

    relative = max(abs(score(i, i - 3) - score(3, 0)) for i in (5, 40, 1000))
    by_distance = max(
        float((d.amax(-1) - d.amin(-1)).max())
        for d in _diagonals(ALiBi(H).bias(L, L, dtype=torch.float64)[0])
    )
    return Finding(
        more_exactly(
            meant=blind < SAME and min(added) > DIFFERENT and max(relative, by_distance) < 1e-11,
            literal=max(rotary, bias) < SAME,
        ),
        {f"change when two rows are exchanged, {name}": value for name, value in told.items()}
        | {
            "rotary: spread of the score at distance 3, up to position 1000": relative,
            "linear bias: spread among pairs of one distance": by_distance,
        },
        conclusion="Both kinds tell the order: exchanging two rows changes the mean output by "
        f"{figure(added[0], 2)} with fixed and {figure(added[1], 2)} with learned positions, and "
        f"by {figure(blind)} without. To be added: either kind can be relative, and need not be a "
        "vector that is added. RotaryEmbedding positions and a linear bias, both fixed, depend on "
        f"distances alone, and tell it too: {figure(rotary, 2)} and {figure(bias, 2)}.",
    )


def _long_range() -> Finding:
    n = 23
    x, sines = normal(0, 1, n, D), SinusoidalPositions(D)
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
        conclusion=f"One layer of attention reaches {bare} positions far without positions and "
        f"{placed} with them, a convolution of three taps {near} and {near_placed}. How far a "
        "dependency can reach is a matter of the layer; the encoding tells where a row stands.",
    )


def _optional() -> Finding:
    x, n = normal(0, 5, D), 5
    r = SinusoidalPositions(D).encoding(torch.arange(n), torch.float64)
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
    appended = apart(wide(Concatenated(SinusoidalPositions(P))(x)), before)
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
        conclusion=f"Random matrices use added positions (change {figure(change, 2)}). Others "
        f"ignore them: added ones by giving up {int(torch.linalg.matrix_rank(r))} of {D} "
        f"dimensions for five positions ({figure(added)}), appended ones by zeros for their "
        f"columns, at no cost ({figure(appended)}).",
    )


def _same_words_elsewhere() -> Finding:
    layer = alive(MultiHeadAttention(64, 1, bias=False), 0)
    words, sines = normal(1, 30, 64), SinusoidalPositions(64)
    places = [(0, 1), (3, 9), (12, 4), (60, 61), (100, 150)]

    def score(one: int, other: int, at: tuple[int, int] | None) -> float:
        """Between two words, which stand at these places where positions are added."""
        pair = words[[one, other]]
        if at is not None:
            pair = pair + sines.encoding(torch.tensor(at), torch.float64)
        return float(layer.query(pair[0]) @ layer.key(pair[1])) / 8

    def spread(values: list[float]) -> float:
        return float(torch.tensor(values, dtype=torch.float64).std())

    longer = torch.cat((words[5:9], words[[0]], words[9:12], words[[1]], words[12:]))
    alone, among = (layer.query(x) @ layer.key(x).T / 8 for x in (words[:2], longer))
    moved = abs(float(alone[0, 1] - among[4, 8]))
    by_place = spread([score(0, 1, at) for at in places])
    by_word = spread([score(0, other, None) for other in range(1, 30)])
    return Finding(
        conditional(inside=moved < SAME and by_word > DIFFERENT, outside=by_place < SAME),
        {
            "score of two words, elsewhere in a longer sentence: change": moved,
            "deviation of the score over 29 other words": by_word,
            "deviation over five pairs of places, positions added": by_place,
        },
        conclusion=f"Wherever two words stand, their score is the same ({within(moved)}), and it "
        f"varies with the words: its deviation over other words is {figure(by_word, 2)}. Once "
        "positions are added, the places count too: the deviation over five pairs of places is "
        f"{figure(by_place, 2)}.",
    )


def _position_as_feature() -> Finding:
    n, kinds, width, beta = 24, 3, 64, 3000.0
    draw = torch.Generator().manual_seed(108)
    token, order = torch.randint(kinds, (n,), generator=draw), torch.randperm(n, generator=draw)
    places = torch.arange(n)
    r, before = (
        SinusoidalPositions(width).encoding(at, torch.float64) / width
        for at in (places, places - 1)
    )
    word, other = (F.one_hot(t, kinds).double() for t in (token, (token + 1) % kinds))

    def beside(content: Tensor, position: Tensor) -> Tensor:
        return torch.cat((content, position), -1)

    def asked(content: Tensor, position: Tensor, seen: Tensor) -> Tensor:
        return attention_weights(beside(content, position), seen, beta=beta * width)

    seen, nothing = beside(word, r), torch.zeros_like(word)
    wanted = (token[:, None] + 1) % kinds == token
    distance = (places[:, None] - places).abs() + n * ~wanted
    near = distance == distance.amin(-1, keepdim=True)
    ignored, moved = asked(other, 0 * r, seen), asked(nothing, before, seen)
    combined = asked(other, r, seen)
    rows = {
        "ignored: all words of another kind": float((ignored * wanted).sum(-1).min()),
        "transformed: the position before": float(moved[places[1:], places[:-1]].min()),
        "combined: the nearest word of another kind": float((combined * near).sum(-1).min()),
    }
    by_content, by_place, by_both = rows.values()
    shuffled = asked(other[order], 0 * r, beside(word[order], r))
    kept = apart(shuffled, ignored[order][:, order])
    return Finding(
        holds(min(rows.values()) > 0.99 and kept < SAME),
        {
            **{f"least weight where it is wanted; {name}": value for name, value in rows.items()},
            "ignored: change when the words are shuffled": kept,
        },
        conclusion="Over the same features, words beside positions, one query ignores positions, "
        f"and its weight falls on all words of another kind ({figure(by_content, 3)} at least; a "
        f"shuffle changes {figure(kept)}); one reads them rotated, and finds the position before "
        f"({figure(by_place, 3)}); one combines both, and finds the nearest word of another kind "
        f"({figure(by_both, 3)}).",
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
    x = SinusoidalPositions(width)(x)
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
    missed = {name: [_probed(kind, seed) for seed in range(1, 11)] for name, kind in kinds.items()}
    last = {name: [run[-1] for run in runs] for name, runs in missed.items()}
    margins = [no - yes for yes, no in zip(last["with skips"], last["without"])]
    layers = range(len(missed["without"][0]))
    carried, lost = (estimate(values) for values in last.values())
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
        conclusion=f"After six layers a linear probe misses {carried.level} of the position's "
        f"variance with skips and {lost.level} without (1 is guessing), mean and standard error of "
        f"{len(margins)} seeds.",
    )


def _diagonals(bias: Tensor) -> list[Tensor]:
    rows = bias.shape[-1]
    return [bias.diagonal(n, -2, -1) for n in range(1 - rows, rows)]


EXPERIMENTS: tuple[Experiment, ...] = (
    Experiment(
        96,
        "number-as-position",
        Place("handout", "positional encoding"),
        "Adding the bare number, φ(i) = i, does not do, since the similarity of i and j would be "
        "i·j; it should be large where i ≈ j, and very negative or at least about 0 where they "
        "are far apart.",
        "Dot products of twenty positions are computed for φ(i) = i and for sinusoids: which "
        "position is most similar to which, and whether neighbours are similar everywhere.",
        _number_as_position,
    ),
    Experiment(
        96,
        "position-kernel",
        Place("handout", "positional encoding"),
        "Wanted is φ(i)·φ(j) = exp(−λ(i − j)²), as of an RBF kernel with its infinite Fourier "
        "embedding; truncating that series is what the original paper does with its sinusoids.",
        "The dot products of 200 sinusoids of width 64 are compared with the sum of cosines and "
        "with the Gaussian of the λ that fits best.",
        _kernel,
        (r"r_i \cdot r_j = \sum_k \cos \omega_k (i - j)",),
    ),
    Experiment(
        32,
        "close-positions",
        Place("sheet", "6-2(c)"),
        "Positional encodings of close positions are designed to be similar, which makes it "
        "easier to exploit locality.",
        "Dot products of 200 sinusoids are computed at three widths, for neighbours and for "
        "positions far apart.",
        _close_positions,
    ),
    Experiment(
        19,
        "high-dimension",
        Place("slides", "adding"),
        "Adding positions does not corrupt the data, since high dimensionality keeps the two "
        "separate.",
        "The mean |cos| of random pairs is measured at widths from 3 to 512, beside its exact "
        "value and √(2/(πD)); tokens are also compared with real sinusoids.",
        _high_dimension,
        (r"E|\cos| = \frac{\Gamma(D/2)}{\sqrt\pi\,\Gamma((D+1)/2)} \approx \sqrt{2/(\pi D)}",),
    ),
    Experiment(
        32,
        "relative-positions",
        Place("sheet", "6-2(c)"),
        "Positional encodings are added to the token representations; they are either fixed, "
        "mostly trigonometric, or learned.",
        "Two rows are exchanged under attention without positions, with sinusoids and learned "
        "vectors added, and with rotary positions and a linear bias, where nothing is added to "
        "the input; the scores are compared by distance.",
        _relative,
        (r"(R_i q) \cdot (R_j k) = q \cdot R_{j-i} k", r"s_{ij} = \beta q_i k_j - m_h |i - j|"),
    ),
    Experiment(
        48,
        "position-and-reach",
        Place("homework", "1.3(b)"),
        'Positional encoding, needed where the order of the input matters, "captures the long '
        'range dependencies" between the elements.',
        "The Jacobian gives the longest distance over which a row of the output depends on a row "
        "of the input, for attention and for a convolution, with and without sinusoids.",
        _long_range,
    ),
    Experiment(
        98,
        "optional-information",
        Place("handout", "positional encoding"),
        "A positional encoding, unlike a convolution's fixed relationships, is information that "
        "can be transformed, combined with other features or ignored; training decides.",
        "Three attention layers read the same rows with positions: one with random matrices, one "
        "whose matrices ignore the positions' directions, and one with zeros for appended "
        "columns.",
        _optional,
    ),
    Experiment(
        106,
        "same-words-elsewhere",
        Place("handout", "take-away: attention"),
        "In attention the semantics of the words takes precedence over their absolute or relative "
        "positions.",
        "The score of two words is computed next to each other and far apart in a longer "
        "sentence; then with positions added, at five pairs of places, beside scores with other "
        "words.",
        _same_words_elsewhere,
    ),
    Experiment(
        108,
        "position-as-feature",
        Place("handout", "positional encoding"),
        "Position as an extra feature can be transformed, combined with other features, or "
        "ignored.",
        "Words and their sinusoids stand side by side. Three queries over them ask for words of "
        "another kind, for the position before, and for the nearest word of another kind; it is "
        "measured where their weights fall.",
        _position_as_feature,
    ),
    Experiment(
        20,
        "skip-connections",
        Place("slides", "adding"),
        "Skip connections retain the position r_n across the layers.",
        "Stacks of six untrained blocks, with and without the residual sum, read noisy rows with "
        "sinusoids. After each layer a linear probe is fitted to the position and tested on other "
        "rows, for ten seeds.",
        _skip_connections,
    ),
)
