"""Positional encodings: fixed and learned, added or appended."""

import math
from functools import partial

import numpy as np
import torch
from torch import nn

from regard import (
    Concatenated,
    LearnedPositions,
    MultiHeadAttention,
    SinusoidalPositions,
    Transformer,
    TransformerConfig,
    VisionTransformer,
)
from regard.lab.claims import plain
from regard.lab.claims.sample import (
    HIDDEN,
    SAME,
    D,
    H,
    L,
    alive,
    apart,
    normal,
    parameters,
    unbuilt,
)
from regard.lab.cost.count import counted
from regard.lab.experiment import Experiment, Finding, Table, corrected, holds
from regard.lab.numbers import figure, within
from regard.lab.place import Place
from regard.model.embedding import Tokens

P = 6
"""The width of appended positions."""


def _sinusoids(positions: range, width: int) -> plain.Array:
    """sin and cos in turn, from the formula, entry by entry."""
    table = [
        [
            (math.cos if i % 2 else math.sin)(n / 10000 ** ((i - i % 2) / width))
            for i in range(width)
        ]
        for n in positions
    ]
    return np.array(table)


def _appended() -> Finding:
    x = normal(0, 1, L, D)
    placed = Concatenated(SinusoidalPositions(P))(x)
    beside = plain.apart(
        placed[0], np.concatenate((plain.array(x[0]), _sinusoids(range(L), P)), -1)
    )
    added, wide = (alive(MultiHeadAttention(d, H), 1) for d in (D, D + P))
    more = parameters(wide) - parameters(added)
    costs = [counted(partial(m, y)).total.multiply_adds for m, y in ((added, x), (wide, placed))]
    return Finding(
        holds(
            beside < SAME
            and placed.shape[-1] == D + P
            and more == 4 * ((D + P) ** 2 - D**2) + 4 * P
            and costs[1] > costs[0]
        ),
        {
            "width, positions added": D,
            "width, positions appended": placed.shape[-1],
            "parameters of one attention layer, added": parameters(added),
            "parameters of one attention layer, appended": parameters(wide),
            "multiplications for seven rows, added": costs[0],
            "multiplications for seven rows, appended": costs[1],
            "distance of what is appended from the formula": beside,
        },
        conclusion=f"Rows of {D} become rows of {placed.shape[-1]}; one attention layer has "
        f"{parameters(wide)} parameters instead of {parameters(added)}, 4((D + P)² − D²) + 4P "
        f"more, and takes {costs[1]:,} multiplications for {L} rows instead of {costs[0]:,}.",
    )


def _added() -> Finding:
    tokens, ids = alive(Tokens(13, D, position=SinusoidalPositions(D)), 0), torch.arange(L)[None]
    x = math.sqrt(D) * plain.array(tokens.table.weight)[:L]
    r = _sinusoids(range(L), D)
    error = plain.apart(tokens(ids)[0], x + r)
    late = plain.apart(tokens(ids, at=100)[0], x + _sinusoids(range(100, 100 + L), D))
    return Finding(
        holds(error < SAME and late < SAME and tokens(ids).shape == (1, L, D)),
        {
            "distance from x + r": error,
            "distance from x + r, from position 100 on": late,
            "width before": D,
            "width after": tokens(ids).shape[-1],
        },
        conclusion=f"The token layer gives x + r, {within(error)}, also from position 100 on "
        f"({within(late)}), and stays {tokens(ids).shape[-1]} wide.",
    )


def _tied() -> Finding:
    ids = torch.arange(L)[None]
    plan = TransformerConfig(13, width=D, heads=H, feed_forward=HIDDEN, encoder_layers=1)
    tokens = alive(Transformer(plan), 0).source
    assert isinstance(tokens, Tokens)
    x, r = (
        math.sqrt(D) * tokens.table(ids[0]),
        SinusoidalPositions(D).encoding(ids[0], torch.float64),
    )
    read = tokens(ids)[0]
    W = normal(1, HIDDEN, D)
    tied = apart((x + r) @ W.T, Concatenated(SinusoidalPositions(D))(x) @ torch.cat((W, W), 1).T)
    appended = read.shape == torch.cat((x, r), -1).shape
    added = apart(read, x + r) if not appended else math.nan
    return Finding(
        corrected(taught=appended, correct=added < SAME and tied < SAME),
        {
            "width of what the paper's model reads": read.shape[-1],
            "width with positions appended": 2 * D,
            "distance from x + r": added,
            "distance of W(x + r) from [W W][x; r]": tied,
        },
        conclusion=f"The paper adds: its model reads x + r, {within(added)}, {read.shape[-1]} "
        f"numbers for each token, where appending would make it {2 * D}. Adding is appending with "
        f"tied weights, W(x + p) = [W W][x; p] ({within(tied)}): what is lost is the freedom of a "
        "second matrix.",
    )


def _formula() -> Finding:
    width, n = 8, 50
    r = SinusoidalPositions(width).encoding(torch.arange(n), torch.float64)
    error = plain.apart(r, _sinusoids(range(n), width))
    halves = SinusoidalPositions(width, layout="halves").encoding(torch.arange(n), torch.float64)
    permuted = apart(halves, r[:, [*range(0, width, 2), *range(1, width, 2)]])
    radius = apart(r[:, 0::2] ** 2 + r[:, 1::2] ** 2, torch.ones(n, width // 2))
    slow = SinusoidalPositions(width, base=100).encoding(torch.arange(n), torch.float64)
    return Finding(
        holds(error < SAME and permuted < SAME and radius < SAME),
        {
            "distance from the formula, 50 positions": error,
            "distance of sines first, cosines after, from a permutation of it": permuted,
            "distance of each pair from the unit circle": radius,
            "change at base 100 instead of 10000": apart(slow, r),
        },
        (
            Table(
                "Position 1 at width 8",
                ("layout", *map(str, range(width))),
                tuple(
                    (name, *(round(v, 4) for v in rows[1].tolist()))
                    for name, rows in (("in turn", r), ("halves", halves))
                ),
            ),
        ),
        conclusion="Fifty positions of the layer, with L = 10000 and i from 0, are those of the "
        f"formula {within(error)}. A sine and its cosine share a frequency, so each pair moves on "
        f"the unit circle ({within(radius)}); all sines first is a permutation of the same columns "
        f"({within(permuted)}).",
    )


def _from_zero() -> Finding:
    def counted(k: tuple[int, ...]) -> plain.Array:
        return np.array([f(10000 ** (-2 * j / 4)) for j in k for f in (math.sin, math.cos)])

    place = SinusoidalPositions(4).encoding(torch.arange(2), torch.float64)
    right, wrong = counted((0, 1)), counted((1, 2))
    still = np.array([0.0, 1.0, 0.0, 1.0])
    from_zero, from_one = plain.apart(place[1], right), plain.apart(place[1], wrong)
    return Finding(
        corrected(
            taught=from_one < SAME, correct=from_zero < SAME and plain.apart(place[0], still) == 0
        ),
        {
            "position 1, k from 0": right.round(4).tolist(),
            "position 1, k from 1": wrong.round(4).tolist(),
            "distance of the layer from k from 0": from_zero,
            "distance of the layer from k from 1": from_one,
            "step from position 0 to 1, k from 0": float(np.linalg.norm(right - still)),
            "step from position 0 to 1, k from 1": float(np.linalg.norm(wrong - still)),
        },
        conclusion="In the paper k starts at 0: the layer gives "
        f"{figure(right.round(4).tolist(), 2)} for position 1 at d = 4, and differs from k = 1, 2 "
        f"by {figure(from_one, 2)}. From 1 on the fastest frequency is lost, and the step from "
        f"position 0 to 1 is {figure(float(np.linalg.norm(wrong - still)), 2)} long instead of "
        f"{figure(float(np.linalg.norm(right - still)), 2)}.",
    )


def _fixed_and_learned() -> Finding:
    base = unbuilt(lambda: Transformer.base(37_000))
    vit = unbuilt(lambda: VisionTransformer.base(1000))
    fixed = [base.source.position, base.target.position]
    learned = vit.patches.position
    counts = [parameters(part) if isinstance(part, nn.Module) else -1 for part in (*fixed, learned)]
    r = plain.apart(
        SinusoidalPositions(512).encoding(torch.arange(L), torch.float64), _sinusoids(range(L), 512)
    )
    return Finding(
        holds(
            all(isinstance(part, SinusoidalPositions) for part in fixed)
            and isinstance(learned, LearnedPositions)
            and counts == [0, 0, 14 * 14 * 768]
            and r < SAME
        ),
        {
            "position parameters at the encoder's input": counts[0],
            "position parameters at the decoder's input": counts[1],
            "position parameters of the patches of ViT-B/16": counts[2],
            "kinds": [type(part).__name__ for part in (*fixed, learned)],
        },
        conclusion="In the base Transformer, positions at the inputs of encoder and decoder have "
        f"{counts[0]} and {counts[1]} parameters; ViT-B/16 learns {counts[2]:,} for its patches, "
        f"768 for each of {14 * 14}.",
    )


def _class_position() -> Finding:
    vit = unbuilt(lambda: VisionTransformer.base(1000))
    patches = (224 // 16) ** 2
    table = vit.patches.position
    assert isinstance(table, LearnedPositions)
    own = 0 if vit.class_position is None else 1
    vectors = len(table.table) + own
    return Finding(
        holds(len(table.table) == patches),
        {
            "patches of an image": patches,
            "learned vectors for patches": len(table.table),
            "learned vectors for the class token": own,
            "learned numbers in all": vectors * vit.config.width,
        },
        conclusion=f"ViT-B/16 learns {len(table.table)} vectors for its {patches} patches, one for "
        f"each. Worth adding: the class token has {own} more, which makes {vectors}.",
    )


EXPERIMENTS: tuple[Experiment, ...] = (
    Experiment(
        17,
        "appended-positions",
        Place("slides", "positions"),
        "The obvious way to give positions to a Transformer, without changing its design, is to "
        "concatenate them to the tokens; it increases dimensions and computations.",
        "Positions of width 6 are appended to rows of width 12. Parameters of one attention layer "
        "are counted before and after, and the multiplications for seven rows.",
        _appended,
        (r"\tilde x_n = [x_n; r_n]",),
    ),
    Experiment(
        18,
        "added-positions",
        Place("slides", "positions"),
        "Instead of concatenating, positions are added to the tokens: x̃_n = x_n + r_n.",
        "The token layer's output is compared with √D times the table plus the sinusoids of the "
        "formula, from position 0 and from position 100 on.",
        _added,
        (r"\tilde x_n = x_n + r_n",),
    ),
    Experiment(
        95,
        "added-positions-are-tied",
        Place("handout", "positional encoding"),
        "Transformers encode the position as extra features, appended to the token vector, x' = "
        "[x; φ(i)]; the original paper is referred to for details.",
        "What the paper's model reads is compared with the token vectors, appended and added to. "
        "A matrix over the sum is compared with the same matrix, twice, over both side by side.",
        _tied,
        (r"W(x + p) = [W \; W][x; p]",),
    ),
    Experiment(
        21,
        "sinusoid-formula",
        Place("slides", "sinusoids"),
        "Entry i of position n is sin(n / L^(i/D)) for even i, and cos(n / L^((i−1)/D)) for odd i.",
        "Fifty positions of the layer are compared with the formula, entry by entry; the layout "
        "with all sines first is compared with a permutation of it.",
        _formula,
        (r"r_{n,2k} = \sin(n / L^{2k/D}), \quad r_{n,2k+1} = \cos(n / L^{2k/D})",),
    ),
    Experiment(
        97,
        "frequency-index",
        Place("handout", "positional encoding"),
        "The paper's encoding has sin(ω_k i) and cos(ω_k i) for ω_1 to ω_{d/2}, where ω_k = "
        "1/10000^(2k/d).",
        "Position 1 at width 4 is computed with k from 0 and with k from 1, and compared with the "
        "layer.",
        _from_zero,
        (r"\omega_k = 10000^{-2k/d}, \quad k = 0, \ldots, d/2 - 1",),
    ),
    Experiment(
        69,
        "fixed-and-learned",
        Place("homework", "1.5(b)"),
        "In the Transformer, fixed positional encodings are added to the inputs of encoder and "
        "decoder; in ViT, learned position embeddings to the projected patches.",
        "The published sizes are built on the meta device, and the parameters of their positions "
        "are counted.",
        _fixed_and_learned,
    ),
    Experiment(
        73,
        "class-position",
        Place("homework", "1.5(c)"),
        "For each patch a positional embedding is added, which is learned and tells the model "
        "where in the image the patch lies.",
        "The learned positions of ViT-B/16 are counted beside its patches.",
        _class_position,
    ),
)
