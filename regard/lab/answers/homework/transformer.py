"""Homework 1.4: the Transformer and its parts."""

import torch
from torch import Tensor, nn

from regard import (
    MultiHeadAttention,
    SinusoidalPositions,
    Transformer,
    TransformerConfig,
    attend,
    padding,
)
from regard.lab.answers.answer import Answer, Demonstration, Mistake, Point, Step
from regard.lab.claims.costs import cost
from regard.lab.claims.sample import (
    HIDDEN,
    PLAN,
    SAME,
    D,
    H,
    L,
    alive,
    apart,
    blocks,
    influence,
    normal,
    parameters,
)
from regard.lab.cost.layers import Sizes
from regard.lab.experiment import Table
from regard.lab.place import Place
from regard.model.block import FeedForward, PostNorm, PreNorm

LENGTHS = (8, 16, 32)


# (a) and (b) Attention beside recurrence


def _in_parallel() -> Demonstration:
    names = ("attention, with projections", "LSTM")
    rows = [
        (
            n,
            *(cost(name, Sizes(n, 8, heads=1)).steps for name in names),
            *(_path(name, n) for name in names),
        )
        for n in LENGTHS
    ]
    return Demonstration(
        len({row[1] for row in rows}) == len({row[3] for row in rows}) == 1
        and all(row[2] == row[4] == row[0] for row in rows),
        tables=(
            Table(
                "One layer over n positions, counted while it runs",
                (
                    "n",
                    "attention: products one after the other",
                    "LSTM: steps one after the other",
                    "attention: longest path",
                    "LSTM: longest path",
                ),
                tuple(rows),
            ),
        ),
    )


def _path(name: str, length: int) -> int:
    return cost(name, Sizes(length, 8, heads=1)).path or 0


def _positions_for_lengths() -> Demonstration:
    """Two sentences of 4 and 7 tokens in one batch, with positions, but without a mask."""
    attention = alive(MultiHeadAttention(D, H), 0)
    short, filler = SinusoidalPositions(D)(normal(1, 1, 4, D)), normal(2, 1, 3, D)
    alone = attention(short)
    batch = torch.cat((short, filler), 1)
    return Demonstration(
        apart(attention(batch)[:, :4], alone) < SAME,
        {
            "what padding changes, with positions and no mask": apart(
                attention(batch)[:, :4], alone
            ),
            "what padding changes, under a padding mask": apart(
                attention(batch, mask=padding([4]))[:, :4], alone
            ),
            "lengths that the layer takes without positions": [
                attention(normal(0, 1, n, D)).shape[1] for n in (3, 5, 40)
            ],
        },
    )


def _crossover() -> Demonstration:
    width = 16
    rows = [
        (
            n,
            cost("attention alone", Sizes(n, width, heads=1)).multiply_adds,
            cost("plain recurrence", Sizes(n, width, heads=1)).multiply_adds,
        )
        for n in (4, 8, 16, 32, 64)
    ]
    return Demonstration(
        all((pairs < steps) == (n < width) for n, pairs, steps in rows),
        {"width d": width, "longest path of attention alone": _path("attention alone", 32)},
        (
            Table(
                f"Multiply-adds of one layer of width {width}",
                ("n", "attention, 2n²d", "recurrence, 2nd²"),
                tuple(rows),
            ),
        ),
    )


def _always_faster() -> Demonstration:
    n, width = 64, 16
    pairs = cost("attention alone", Sizes(n, width, heads=1)).multiply_adds
    steps = cost("plain recurrence", Sizes(n, width, heads=1)).multiply_adds
    return Demonstration(
        pairs < steps,
        {"n": n, "d": width, "multiply-adds of attention": pairs, "of recurrence": steps},
    )


# (c) Heads


def _neighbours(heads: int) -> float:
    """The best error in reading both neighbours of every position.

    With two heads each reads one of them; a single head can only mix the two.
    """
    n, width = 21, 64
    x, r = normal(0, n, 3), SinusoidalPositions(width).encoding(torch.arange(n), torch.float64)
    before, after = (attend(r[1 + s : n - 1 + s], r, x, beta=100.0) for s in (-1, 1))
    read = torch.cat((before, after), -1) if heads == 2 else (before + after) / 2
    wanted = torch.cat((x[:-2], x[2:]), -1)
    return apart(read @ torch.linalg.lstsq(read, wanted).solution, wanted)


def _subspaces() -> Demonstration:
    errors = {f"{heads} head{'s' * (heads > 1)}": _neighbours(heads) for heads in (1, 2)}
    return Demonstration(
        errors["1 head"] > 0.1 and errors["2 heads"] < 1e-10,
        {f"error in reading both neighbours, {name}": error for name, error in errors.items()},
    )


def _more_parameters() -> Demonstration:
    counts = [parameters(MultiHeadAttention(24, heads)) for heads in (1, 2, 4, 8)]
    return Demonstration(
        counts == sorted(set(counts)),
        {"parameters of 1, 2, 4 and 8 heads in a width of 24": counts},
    )


def _copies() -> Demonstration:
    """Two heads with the same matrices, whose results are averaged."""
    one = alive(MultiHeadAttention(D, 1, key_width=4, bias=False), 0)
    two = MultiHeadAttention(D, 2, key_width=4, bias=False).double().requires_grad_(False)
    for name in ("query", "key", "value"):
        getattr(two, name).weight.copy_(getattr(one, name).weight.repeat(2, 1))
    two.output.weight.copy_(one.output.weight.repeat(1, 2) / 2)
    x = normal(1, L, D)
    difference = apart(one(x), two(x))
    return Demonstration(
        difference > SAME, {"what a second head of the same matrices adds": difference}
    )


# (d) The feed-forward network


def _feed_forward() -> FeedForward:
    return alive(FeedForward(D, HIDDEN), 0)


def _position_wise() -> Demonstration:
    network, x = _feed_forward(), normal(1, L, D)
    W1, b1 = network.expand.weight, network.expand.bias
    W2, b2 = network.reduce.weight, network.reduce.bias
    written = (x @ W1.T + b1).clamp(min=0) @ W2.T + b2
    each = torch.stack([network(row) for row in x])
    linear = (x @ W1.T + b1) @ W2.T + b2
    one_map = x @ (W2 @ W1).T + W2 @ b1 + b2
    return Demonstration(
        apart(network(x), written) < SAME
        and apart(network(x), each) < SAME
        and apart(linear, one_map) < SAME
        and _two_bits(nn.Identity()) > 0.4 > 0.01 > _two_bits(nn.ReLU()),
        {
            "largest difference from max(0, xW₁ + b₁)W₂ + b₂": apart(network(x), written),
            "largest difference from each position by itself": apart(network(x), each),
            "widths": [D, HIDDEN, D],
            "without ReLU, largest difference from one linear map": apart(linear, one_map),
            "error in telling whether two bits differ, with ReLU": _two_bits(nn.ReLU()),
            "error in telling whether two bits differ, without": _two_bits(nn.Identity()),
        },
    )


def _two_bits(activation: nn.Module) -> float:
    """The best error in telling two bits apart, whatever the second matrix is."""
    bits = torch.tensor([[0, 0], [0, 1], [1, 0], [1, 1]], dtype=torch.float64)
    hidden = activation(bits @ torch.tensor([[1.0, -1], [-1, 1]], dtype=torch.float64))
    hidden = torch.cat((hidden, torch.ones(4, 1, dtype=torch.float64)), 1)
    differ = (bits[:, :1] != bits[:, 1:]).double()
    return apart(hidden @ (torch.linalg.pinv(hidden) @ differ), differ)


def _between_neighbours() -> Demonstration:
    touched = influence(_feed_forward(), normal(1, 1, L, D))
    beside = float((touched - touched.diagonal().diag()).max())
    return Demonstration(
        beside > 0,
        {
            "largest entry of ∂yᵢ/∂xⱼ for i = j": float(touched.diagonal().max()),
            "largest entry of ∂yᵢ/∂xⱼ for i ≠ j": beside,
        },
    )


# (e) Layer normalisation


def _sublayer(x: Tensor) -> Tensor:
    return 3 * torch.sin(x) + 5


def _post_norm() -> Demonstration:
    x = normal(0, 1, L, D)
    y = _added(PostNorm, x)
    total = x + _sublayer(x)
    centred = total - total.mean(-1, keepdim=True)
    written = centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
    config, model = TransformerConfig.base(37_000), Transformer(PLAN)
    sublayers = [
        sum(isinstance(part, PostNorm) for part in blocks(stack)[0].children())
        for stack in (model.encoder, model.decoder)
    ]
    variance = y.var(-1, correction=0)
    return Demonstration(
        apart(y, written) < SAME and sublayers == [2, 3],
        {
            "largest difference from LayerNorm(x + Sublayer(x))": apart(y, written),
            "mean of a position's entries afterwards, at most": float(y.mean(-1).abs().max()),
            "their variance, between": [float(variance.min()), float(variance.max())],
            "layers of the base model's encoder and decoder": [
                config.encoder_layers,
                config.decoder_layers,
            ],
            "norms in a layer of the encoder, and of the decoder": sublayers,
        },
    )


def _added(kind: type[PostNorm] | type[PreNorm], x: Tensor) -> Tensor:
    """A sublayer with its residual connection and its norm."""
    y: Tensor = kind(D).double().requires_grad_(False)(x, _sublayer)
    return y


def _over_the_batch() -> Demonstration:
    """Does the result for one position depend on the others?"""
    x = normal(0, 2, L, D)
    change = apart(_added(PostNorm, x[:1, :1]), _added(PostNorm, x)[:1, :1])
    return Demonstration(
        change > SAME,
        {"what the other positions and sentences change in one position": change},
    )


def _norm_first() -> Demonstration:
    x = normal(0, 1, L, D)
    post, pre = _added(PostNorm, x), _added(PreNorm, x)
    return Demonstration(
        apart(post, pre) < SAME,
        {
            "difference between norm after the sum and norm before the sublayer": apart(post, pre),
            "mean square of the entries, norm after the sum": float(post.pow(2).mean()),
            "norm before the sublayer": float(pre.pow(2).mean()),
        },
    )


ANSWERS: tuple[Answer, ...] = (
    Answer(
        Place("homework", "1.4(a)"),
        question="What are the main differences between the Transformer and what came before it, "
        "recurrent networks and LSTMs?",
        answer="Attention instead of recurrence: every position reads every other one directly. "
        "Hence training computes all positions at once, where recurrence needs one step after the "
        "other, and between any two positions there is a path of constant length. Order, which a "
        "recurrence has by itself, has to be told by positions. Encoder and decoder are not new: "
        "recurrent translators had them in 2014.",
        derivation=(
            Step(
                "A recurrent state needs the one before it.",
                r"h_i = f(h_{i-1}, x_i) \quad \Rightarrow \quad n \text{ steps}",
            ),
            Step(
                "Attention needs only the inputs.",
                r"h_i = \sum_j a_{ij} v_j, \quad a_{ij} = a(x_i, x_j) \quad \Rightarrow \quad O(1) "
                r"\text{ steps}",
            ),
        ),
        run=_in_parallel,
        mistakes=(
            Mistake(
                "Positional encodings let it handle inputs of variable length.",
                "The weights are shared by all positions, so that any length fits without them; in "
                "a batch of several lengths it is the padding mask that keeps the fillers out.",
                _positions_for_lengths,
            ),
        ),
        points=(
            Point(1, "attention in place of recurrence and convolution"),
            Point(1, "all positions at once in training; paths of constant length"),
            Point(1, "order is told by positional encodings"),
        ),
    ),
    Answer(
        Place("homework", "1.4(b)"),
        question="What is self-attention, and why does it matter in the Transformer?",
        answer="Every position asks with a query, all positions answer with keys and values, and "
        r"the output is the mean of the values, weighted by a softmax of the scores $q \cdot k / "
        r"\sqrt{d_k}$. It matters for three reasons: where the sequence is shorter than the "
        "width, it costs less than a recurrent layer; all positions are computed at once; and any "
        "two of them are one step apart.",
        derivation=(
            Step(
                "Scores and means of values are two products over all pairs.",
                r"n^2 d_k + n^2 d_v = 2 n^2 d",
            ),
            Step(
                "A recurrent layer multiplies its input and its state at each step.",
                r"n \cdot 2 d^2",
            ),
            Step("So the pairs cost less where", r"2 n^2 d < 2 n d^2 \quad \iff \quad n < d"),
        ),
        run=_crossover,
        mistakes=(
            Mistake(
                "Self-attention is faster than recurrence, whatever the length.",
                "The cost of all pairs is quadratic: beyond $n = d$ attention has more to "
                "multiply.",
                _always_faster,
            ),
        ),
        points=(
            Point(1, "queries, keys and values of one sequence; a weighted sum"),
            Point(1, "cheaper where $n < d$, and all positions at once"),
            Point(1, "paths of constant length, $O(1)$ against $O(n)$"),
        ),
    ),
    Answer(
        Place("homework", "1.4(c)"),
        question="How does multi-head attention work, and what is it good for?",
        answer="Several attentions run in parallel, each with projections of its own into a "
        "narrower space; their outputs are put side by side and projected by $W_O$. So one "
        "position can read several others for different purposes at once, where a single head "
        "gives one mixture. The width is divided among the heads, so that they cost no more "
        "parameters. Whether they resist noise is a matter of measurement: the lab trains models "
        "for it.",
        derivation=(
            Step(
                "Head $i$ has a space of its own.",
                r"\text{head}_i = \operatorname{Attention}(Q W_i^Q, K W_i^K, V W_i^V)",
            ),
            Step(
                "All of them together are projected.",
                r"\operatorname{MultiHead}(Q, K, V) = [\text{head}_1; \dots; \text{head}_h]\, W^O",
            ),
            Step(
                r"With $d_k = d_v = d / h$ the number of parameters does not depend on $h$.",
                r"h \cdot 3 d \cdot \frac{d}{h} + d^2 = 4 d^2",
            ),
        ),
        run=_subspaces,
        mistakes=(
            Mistake(
                "The heads are copies of one attention whose results are averaged.",
                "Copies add nothing: heads differ in their matrices, and they are put side by "
                "side.",
                _copies,
            ),
            Mistake(
                "More heads have more parameters.",
                "The width is divided among them.",
                _more_parameters,
            ),
        ),
        points=(
            Point(1, "projections of its own for each head, in parallel"),
            Point(1, "concatenation, and the output projection"),
            Point(1, "what for: several relations at once"),
        ),
    ),
    Answer(
        Place("homework", "1.4(d)"),
        question="What are the feed-forward networks in the model, and what is their purpose?",
        answer=r"Two linear maps with a ReLU between them, $\max(0, xW_1 + b_1)W_2 + b_2$, applied "
        "to every position by itself and with the same weights; the first widens, the second goes "
        "back. They hold the non-linear part of the work: attention mixes positions, and the "
        "feed-forward network transforms what each has gathered. Without the ReLU the two maps "
        "would be one.",
        derivation=(
            Step(
                "Without the ReLU the product is a single linear map.",
                r"(x W_1 + b_1) W_2 + b_2 = x (W_1 W_2) + (b_1 W_2 + b_2)",
            ),
            Step(
                "Every output reads its own position alone.",
                r"\frac{\partial y_i}{\partial x_j} = 0 \quad \text{for } i \ne j",
            ),
        ),
        run=_position_wise,
        mistakes=(
            Mistake(
                "It captures local patterns between neighbouring elements.",
                "It never sees a neighbour: attention is the only part that lets positions meet.",
                _between_neighbours,
            ),
        ),
        points=(
            Point(1, "the formula: two linear maps and a ReLU, wider in between"),
            Point(1, "each position by itself, with the same weights"),
            Point(1, "purpose: non-linear processing of each position"),
        ),
    ),
    Answer(
        Place("homework", "1.4(e)"),
        question="What is layer normalisation, and where does the Transformer use it?",
        answer="It shifts and scales the entries of one position to mean 0 and variance 1, then "
        "applies a learned gain and shift; no other position and no other sentence takes part. In "
        r"the original Transformer it follows every residual sum, $\operatorname{LayerNorm}(x + "
        r"\operatorname{Dropout}(\operatorname{Sublayer}(x)))$: twice in each of the 6 encoder "
        "layers, three times in each of the 6 decoder layers. It is there to make training stable "
        "and fast, which the lab measures.",
        derivation=(
            Step(
                "Over the entries of one position:",
                r"\mu = \frac{1}{d} \sum_i x_i, \qquad \sigma^2 = \frac{1}{d} \sum_i (x_i - \mu)^2",
            ),
            Step(
                "The rest is a gain and a shift.",
                r"\operatorname{LayerNorm}(x) = \gamma \odot \frac{x - \mu}{\sqrt{\sigma^2 + "
                r"\varepsilon}} + \beta",
            ),
        ),
        run=_post_norm,
        mistakes=(
            Mistake(
                "It normalises over the batch, or over the positions of a sentence.",
                "That would be batch normalisation. Here each position is normalised by itself.",
                _over_the_batch,
            ),
            Mistake(
                "The norm comes before the sublayer, and its result is added to $x$.",
                "That is pre-norm, as in ViT. The original Transformer normalises the sum.",
                _norm_first,
            ),
        ),
        points=(
            Point(1, "mean and variance over the entries of one position; gain and shift"),
            Point(1, "after each residual sum, in both stacks"),
            Point(1, "purpose: stable and faster training"),
        ),
    ),
)
