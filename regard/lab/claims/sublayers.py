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
from regard.lab.numbers import figure, within
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
        conclusion=f"The layer is max(0, xW₁ + b₁)W₂ + b₂ {within(error)}, all rows together as "
        f"each alone ({within(alone)}). In the paper's base model it goes from {paper.width} to "
        f"{paper.feed_forward} and back.",
    )


def _non_linearity() -> Finding:
    layer, x = alive(FeedForward(D, HIDDEN), 0), normal(1, 1, L, D)
    # Without ReLU the two maps are one.
    W = layer.reduce.weight @ layer.expand.weight
    b = layer.reduce.weight @ layer.expand.bias + layer.reduce.bias
    without = apart(layer.reduce(layer.expand(x)), x @ W.T + b)
    bent = apart(layer(x), x @ W.T + b)
    # A task that needs it: are two bits different?
    bits = torch.tensor([[0, 0], [0, 1], [1, 0], [1, 1]], dtype=torch.float64)
    wanted = torch.tensor([[0], [1], [1], [0]], dtype=torch.float64)
    fit = torch.linalg.lstsq(F.pad(bits, (0, 1), value=1.0), wanted).solution
    linear = float((F.pad(bits, (0, 1), value=1.0) @ fit - wanted).abs().max())
    exclusive = FeedForward(2, 2).double().requires_grad_(False)
    exclusive.expand.weight.copy_(torch.ones(2, 2))
    exclusive.expand.bias.copy_(torch.tensor([0.0, -1.0]))
    exclusive.reduce.weight.copy_(torch.tensor([[1.0, -2.0], [0.0, 0.0]]))
    exclusive.reduce.bias.zero_()
    two_units = apart(exclusive(bits)[:, :1], wanted)
    return Finding(
        holds(without < SAME and bent > DIFFERENT and linear > 0.4 and two_units < SAME),
        {
            "without ReLU, distance from one linear map": without,
            "with ReLU, distance from the same map": bent,
            "whether two bits differ, largest error of the best linear map": linear,
            "whether two bits differ, largest error of a ReLU layer of two units": two_units,
        },
        conclusion=f"Without ReLU the two maps are one linear map, {within(without)}; with it the "
        f"layer differs from that map by {figure(bent, 2)}. Whether two bits differ, the best "
        f"linear map misses by {figure(linear, 2)}, which is guessing, and a layer with two ReLU "
        f"units by {figure(two_units)}.",
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
        conclusion="It is applied to each position by itself: the largest entry of ∂y_i/∂x_j with "
        f"i ≠ j is {figure(beside['feed-forward'])}, in a convolution of three taps "
        f"{figure(beside['convolution of 3'], 2)}. Close elements meet in attention.",
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
        conclusion="With every sublayer silenced, the input comes out of pre-norm stacks changed "
        f"by {figure(left['pre'])}, and out of post-norm ones as its LayerNorm, "
        f"{within(left['post'])} (LayerNorm's ε). The paper has {counts[0]} and {counts[1]} "
        "blocks.",
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
        conclusion="The library's residual is LayerNorm(x + Dropout(Sublayer(x))) "
        f"{within(before)}; with dropout after the sum it would differ by {figure(after, 2)}. The "
        f"base model has {counts[0]} sublayers in each of 6 encoder layers and {counts[-1]} in "
        "each of 6 decoder layers.",
    )


EXPERIMENTS: tuple[Experiment, ...] = (
    Experiment(
        62,
        "feed-forward",
        Place("homework", "1.4(d)"),
        "FFN(x) = max(0, xW₁ + b₁)W₂ + b₂, applied separately and identically to each position; "
        "the first map increases the dimension, the second reduces it again.",
        "The layer is compared with the formula in numpy, all rows together and one by one.",
        _feed_forward,
        (r"\mathrm{FFN}(x) = \max(0, x W_1 + b_1) W_2 + b_2",),
    ),
    Experiment(
        62,
        "non-linearity",
        Place("homework", "1.4(d)"),
        "Purpose 1 of the feed-forward network: ReLU makes the model non-linear, so that it can "
        "capture more complex relationships.",
        "The layer without ReLU is compared with one linear map. Then the best linear map, and a "
        "layer with two hidden units, are given a task: are two bits different?",
        _non_linearity,
        (r"(x W_1 + b_1) W_2 + b_2 = x (W_1 W_2) + (b_1 W_2 + b_2)",),
    ),
    Experiment(
        63,
        "feed-forward-neighbours",
        Place("homework", "1.4(d)"),
        "Purpose 2 of the feed-forward network: its representations capture local patterns and "
        "dependencies between close elements of the sequence.",
        "Its Jacobian is computed between all pairs of rows, beside a convolution's.",
        _neighbours,
        (r"\partial y_i / \partial x_j = 0, \quad i \ne j",),
    ),
    Experiment(
        22,
        "residual-path",
        Place("slides", "encoder"),
        "There are residual connections around the encoder's sublayers; the decoder is a stack of "
        "the same kind.",
        "Every sublayer of both stacks is silenced by zeros in its last matrix, and the result is "
        "compared with the input.",
        _residual_path,
        (r"x_{n+1} = x_n + \mathrm{Sublayer}(x_n)",),
    ),
    Experiment(
        64,
        "post-norm",
        Place("homework", "1.4(e)"),
        "The encoder has 6 layers of 2 sublayers, the decoder's have 3; each gives LayerNorm(x + "
        "Sublayer(x)), with dropout on the sublayer's output before the sum.",
        "The residual is compared with numpy's LayerNorm under a known dropout mask, put before "
        "the sum and after it; sublayers of the base model are counted.",
        _post_norm,
        (r"\mathrm{LayerNorm}(x + \mathrm{Dropout}(\mathrm{Sublayer}(x)))",),
    ),
)
