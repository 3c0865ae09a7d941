"""The rest of a block: the feed-forward network, the residual sum, the normalisation."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard import MultiHeadAttention, Transformer, TransformerConfig, causal
from regard.lab.claims import plain
from regard.lab.claims.sample import (
    DIFFERENT,
    HIDDEN,
    PLAN,
    SAME,
    D,
    L,
    S,
    alive,
    apart,
    base,
    blocks,
    influence,
    normal,
)
from regard.lab.experiment import Experiment, Finding, corrected, holds
from regard.lab.place import Place
from regard.model.baseline import Convolution
from regard.model.block import FeedForward, PostNorm


def _feed_forward() -> Finding:
    layer, x = alive(FeedForward(D, HIDDEN), 0), normal(1, 1, L, D)
    hidden = np.maximum(plain.linear(layer.expand, plain.array(x[0])), 0)
    error = plain.apart(layer(x)[0], plain.linear(layer.reduce, hidden))
    alone = max(apart(layer(x)[:, n], layer(x[:, n])) for n in range(L))
    paper = TransformerConfig.base(37_000)
    return Finding(
        holds(error < SAME and alone < SAME and paper.feed_forward > paper.width),
        {
            "distance from max(0, xW₁ + b₁)W₂ + b₂": error,
            "distance of all rows together from each alone": alone,
            "width of the paper's base model": paper.width,
            "width in between": paper.feed_forward,
        },
    )


def _neighbours() -> Finding:
    x = normal(0, 1, L, D)
    layers = {"feed-forward": FeedForward(D, HIDDEN), "convolution of 3": Convolution(D, 3)}
    by = {name: influence(alive(layer, 1), x) for name, layer in layers.items()}
    beside = {name: float((m - m.diagonal().diag()).max()) for name, m in by.items()}
    own = float(by["feed-forward"].diagonal().min())
    return Finding(
        corrected(
            taught=beside["feed-forward"] > 0,
            correct=beside["feed-forward"] == 0 and own > 0 and beside["convolution of 3"] > 0,
        ),
        {
            "feed-forward: largest entry of ∂y_i/∂x_j, i ≠ j": beside["feed-forward"],
            "feed-forward: largest entry of ∂y_i/∂x_i, least row": own,
            "convolution of 3: largest entry of ∂y_i/∂x_j, i ≠ j": beside["convolution of 3"],
        },
    )


def _residual_path() -> Finding:
    x, memory = normal(0, 1, L, D), normal(1, 1, S, D)
    left = {}
    for norm in ("pre", "post"):
        model = alive(Transformer(replace(PLAN, norm=norm, final_norm=False)), 2)
        for module in model.modules():
            match module:
                case MultiHeadAttention():
                    module.output.weight.zero_()
                    module.output.bias.zero_()
                case FeedForward():
                    module.reduce.weight.zero_()
                    module.reduce.bias.zero_()
                case nn.LayerNorm():
                    module.reset_parameters()
        wanted = x if norm == "pre" else F.layer_norm(x, (D,))
        outs = model.encoder(x), model.decoder(x, memory, mask=causal())
        left[norm] = max(apart(out, wanted) for out in outs)
    paper = base()
    counts = [len(paper.encoder.blocks), len(paper.decoder.blocks)]
    return Finding(
        holds(left["pre"] == 0 and left["post"] < 1e-4),
        {
            "pre-norm stacks whose sublayers say nothing, change of the input": left["pre"],
            "post-norm ones, distance from the normalised input (LayerNorm's ε)": left["post"],
            "blocks of the paper's encoder and decoder": counts,
        },
    )


def _post_norm() -> Finding:
    layer, x = alive(PostNorm(D, dropout=0.5), 0).train(), normal(1, 1, L, D)
    sublayer: Callable[[Tensor], Tensor] = torch.tanh
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        have = layer(x, sublayer)
        torch.manual_seed(2)
        kept = layer.dropout(torch.ones_like(x))
    inner, summed = kept * sublayer(x), kept * (x + sublayer(x))
    before = plain.apart(have, plain.layer_norm(layer.norm, plain.array(x + inner)))
    after = plain.apart(have, plain.layer_norm(layer.norm, plain.array(summed)))
    model = base()
    counts = [
        sum(isinstance(part, PostNorm) for part in block.children())
        for stack in (model.encoder, model.decoder)
        for block in blocks(stack)
    ]
    return Finding(
        holds(before < SAME and after > DIFFERENT and counts == [2] * 6 + [3] * 6),
        {
            "distance from LayerNorm(x + Dropout(Sublayer(x)))": before,
            "distance from LayerNorm(Dropout(x + Sublayer(x)))": after,
            "sublayers of each block of the base model": counts,
        },
    )


EXPERIMENTS: tuple[Experiment, ...] = (
    Experiment(
        62,
        "feed-forward",
        Place("homework", "1.4(d)"),
        "FFN(x) = max(0, xW₁ + b₁)W₂ + b₂, the same for every position, first wider, then back.",
        "The layer is compared with the formula in numpy, all rows together and one by one.",
        _feed_forward,
        (r"\mathrm{FFN}(x) = \max(0, x W_1 + b_1) W_2 + b_2",),
        correct="It is that formula, row by row, and the hidden layer is wider than the model.",
    ),
    Experiment(
        63,
        "feed-forward-neighbours",
        Place("homework", "1.4(d)"),
        "The feed-forward network captures local patterns between neighbours.",
        "Its Jacobian is computed between all pairs of rows, beside a convolution's.",
        _neighbours,
        (r"\partial y_i / \partial x_j = 0, \quad i \ne j",),
        correct="Each row depends on itself alone: ∂y_i/∂x_j is zero for i ≠ j. Neighbours meet in "
        "attention, or in a convolution.",
    ),
    Experiment(
        22,
        "residual-path",
        Place("slides", "encoder"),
        "Encoder and decoder are stacks with residual connections.",
        "Every sublayer of both stacks is silenced by zeros in its last matrix, and the result is "
        "compared with the input.",
        _residual_path,
        (r"x_{n+1} = x_n + \mathrm{Sublayer}(x_n)",),
        correct="They are: the input passes unchanged through pre-norm stacks, and normalised through "
        "post-norm ones, since sublayers only add to it.",
    ),
    Experiment(
        64,
        "post-norm",
        Place("homework", "1.4(e)"),
        "Each sublayer gives LayerNorm(x + Sublayer(x)), in 6 layers of 2 or 3 sublayers, with "
        "dropout before the sum.",
        "The residual is compared with numpy's LayerNorm under a known dropout mask, put before "
        "the sum and after it; sublayers of the base model are counted.",
        _post_norm,
        (r"\mathrm{LayerNorm}(x + \mathrm{Dropout}(\mathrm{Sublayer}(x)))",),
        correct="It is so: LayerNorm(x + Dropout(Sublayer(x))), 2 in each encoder layer and 3 in each "
        "decoder layer.",
    ),
)
