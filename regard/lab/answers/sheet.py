"""The exercise sheet: multi-head attention, self and cross, positions, costs, long sequences."""

from functools import partial

import torch
from torch import Tensor, nn

from regard import (
    LearnedPositions,
    Mask,
    MultiHeadAttention,
    SinusoidalPositions,
    Transformer,
    attend,
    causal,
)
from regard.lab.answers.answer import Answer, Demonstration, Mistake, Point, Step
from regard.lab.answers.architecture import architecture
from regard.lab.answers.plots import heat_map
from regard.lab.answers.program import slip, solved
from regard.lab.claims.costs import cost
from regard.lab.claims.sample import PLAN, SAME, D, H, L, S, alive, apart, influence, normal
from regard.lab.cost.layers import Sizes
from regard.lab.experiment import Table
from regard.lab.place import Place
from regard.model.baseline import Recurrent

# 6-2(a) Self and cross


def _one_operation() -> Demonstration:
    attention = alive(MultiHeadAttention(D, H), 0)
    x, source = normal(1, L, D), normal(2, S, D)
    same = apart(attention(x), attention(x, x))
    return Demonstration(
        same == 0 and attention(x, source).shape == (L, D),
        {
            "self-attention minus cross-attention with x as its source": same,
            "queries, and pairs of keys and values, in self-attention": [L, L],
            "in cross-attention": [L, S],
            "rows of cross-attention's output": attention(x, source).shape[0],
        },
    )


def _as_many() -> Demonstration:
    lengths = [
        attend(normal(1, n, 4), normal(2, S, 4), normal(3, S, 4)).shape[0] for n in (1, 7, 40)
    ]
    return Demonstration(
        lengths == [S] * 3,
        {f"outputs for 1, 7 and 40 queries over {S} keys": lengths},
    )


def _asked_by_the_encoder() -> Demonstration:
    attention = alive(MultiHeadAttention(D, H), 0)
    target, memory = normal(1, L, D), normal(2, S, D)
    rows = attention(memory, target).shape[0]
    return Demonstration(
        rows == L,
        {
            "rows, if the encoder's output asks and the target answers": rows,
            "rows that the decoder needs": L,
        },
    )


# 6-2(b) The figure


def _layers(masked: bool = True) -> list[tuple[str, int, int, str]]:
    """Each attention layer: pairs of its own positions that it joins, later ones, and its kind."""
    model = alive(Transformer(PLAN), 0)
    encoder, decoder = model.encoder.blocks[0], model.decoder.blocks[0]
    x, memory = normal(1, 1, L, D), normal(2, 1, S, D)
    own, lower, upper = (
        _joined(encoder.get_submodule("attention"), x),
        _joined(decoder.get_submodule("attention"), x, mask=causal() if masked else None),
        _joined(decoder.get_submodule("cross"), x, memory),
    )
    rows = []
    for name, pairs in (("encoder", own), ("decoder, lower", lower), ("decoder, upper", upper)):
        later = int(pairs.triu(1).sum())
        alone = torch.equal(pairs, torch.eye(L, dtype=torch.bool))
        kind = "cross" if alone else "self" if later else "masked self"
        rows.append((name, int(pairs.sum()), later, kind))
    return rows


def _joined(
    attention: nn.Module, x: Tensor, source: Tensor | None = None, mask: Mask | None = None
) -> Tensor:
    """Which of the positions of x an output reads."""
    return influence(lambda x: attention(x, source, mask=mask), x) > 0


def _boxes() -> Demonstration:
    rows = _layers()
    return Demonstration(
        [row[3] for row in rows] == ["self", "masked self", "cross"],
        tables=(
            Table(
                f"Attention layers of a small Transformer, over {L} positions: which read which",
                ("layer", "pairs of its own positions", "of these, later ones", "kind"),
                tuple(rows),
            ),
        ),
        figures=(architecture(),),
    )


def _unmasked() -> Demonstration:
    (_, _, with_mask, _), (_, _, without, _) = _layers()[1], _layers(masked=False)[1]
    return Demonstration(
        with_mask == without,
        {
            "later positions read by the decoder's lower attention, as it is": with_mask,
            "as plain self-attention": without,
        },
    )


# 6-2(c) Positions


def _similarity(width: int = 64, n: int = 64) -> list[float]:
    """How similar the encodings of two positions are, by their distance."""
    r = SinusoidalPositions(width).encoding(torch.arange(n), torch.float64)
    return [float((r[0] * r[gap]).sum() / (r[0] * r[0]).sum()) for gap in (0, 1, 2, 4, 8, 32)]


def _needed() -> Demonstration:
    attention, x = alive(MultiHeadAttention(D, H), 0), normal(1, L, D)
    order = torch.tensor([3, 0, 4, 6, 1, 5, 2])
    placed = SinusoidalPositions(D)

    def moved(encode: nn.Module) -> float:
        return apart(attention(encode(x[order])), attention(encode(x))[order])

    without, with_ = moved(nn.Identity()), moved(placed)
    similar = _similarity()
    return Demonstration(
        without < SAME < 0.01 < with_ and similar[:5] == sorted(similar[:5], reverse=True),
        {
            "shuffling the tokens changes their outputs, without positions, by": without,
            "with sinusoids": with_,
            "trained numbers of sinusoids, and of 64 learned positions": [
                0,
                sum(p.numel() for p in LearnedPositions(64, D).parameters()),
            ],
        },
        (
            Table(
                "Similarity of two sinusoidal positions, of width 64",
                ("positions apart", "r·r′, as a share of r·r"),
                tuple(zip((0, 1, 2, 4, 8, 32), similar)),
            ),
        ),
        (heat_map(),),
    )


def _never_any_order() -> Demonstration:
    """Under a causal mask: does attention without positions notice an order?"""
    attention, x = alive(MultiHeadAttention(D, H), 0), normal(1, L, D)
    order = torch.tensor([3, 0, 4, 6, 1, 5, 2])
    change = apart(attention(x[order], mask=causal()), attention(x, mask=causal())[order])
    return Demonstration(
        change < SAME,
        {"without positions, under a causal mask, shuffling changes outputs by": change},
    )


def _learned_and_similar() -> Demonstration:
    """Are close positions similar in a learned table that has not been trained?"""
    table = alive(LearnedPositions(64, 64), 3).encoding(torch.arange(64), torch.float64)
    table = table - table.mean(0)
    near = float(torch.cosine_similarity(table[:-1], table[1:]).mean())
    return Demonstration(
        near > 0.5,
        {
            "similarity of neighbours in a learned table before training": near,
            "in sinusoids": _similarity()[1],
        },
    )


# 6-2(d) and (e) Cost and reach


def _costs() -> Demonstration:
    n, d, k = 32, 16, 3
    formulas = {
        "convolution": ("k·n·d²", k * n * d * d),
        "depthwise convolution": ("k·n·d", k * n * d),
        "plain recurrence": ("2·n·d²", 2 * n * d * d),
        "attention alone": ("2·n²·d", 2 * n * n * d),
        "attention, with projections": ("2·n²·d + 4·n·d²", 2 * n * n * d + 4 * n * d * d),
    }
    rows = []
    for name, (formula, number) in formulas.items():
        found = cost(name, Sizes(n, d, heads=1))
        rows.append((name, formula, number, found.multiply_adds, found.steps))
    return Demonstration(
        all(row[2] == row[3] for row in rows) and rows[2][4] == n,
        tables=(
            Table(
                f"n = {n} positions of width d = {d}, kernel k = {k}",
                ("layer", "formula", "by the formula", "counted", "products one after the other"),
                tuple(rows),
            ),
        ),
    )


def _depthwise_only() -> Demonstration:
    n, d, k = 32, 16, 3
    counted = cost("convolution", Sizes(n, d, heads=1)).multiply_adds
    return Demonstration(
        counted == k * n * d,
        {"k·n·d": k * n * d, "counted for a convolution over all channels": counted},
    )


def _reach(made: nn.Module, gap: int) -> float:
    """How much the first token changes the last output, relative to the last token."""
    x = normal(1, 1, gap + 1, D).requires_grad_()
    (slope,) = torch.autograd.grad(alive(made, 2)(x)[0, -1].sum(), x)
    return float(slope[0, 0].norm() / slope[0, -1].norm())


def _long_range() -> Demonstration:
    rows = []
    for gap in (4, 16, 64):
        recurrent, attention = _reach(Recurrent(D), gap), _reach(MultiHeadAttention(D, 1), gap)
        pairs = cost("attention alone", Sizes(gap, 16, heads=1)).multiply_adds
        steps = cost("LSTM", Sizes(gap, 16, heads=1)).multiply_adds
        rows.append((gap, recurrent, attention, pairs, steps))
    return Demonstration(
        rows[-1][1] < 1e-6 < 1e-3 < rows[-1][2] and rows[2][3] == 16 * rows[1][3],
        tables=(
            Table(
                "The first token's part in the last output, relative to the last token's own",
                (
                    "tokens apart",
                    "untrained LSTM",
                    "untrained attention",
                    "multiply-adds of all pairs, width 16",
                    "of the LSTM",
                ),
                tuple(rows),
            ),
        ),
    )


def _cheaper_for_long() -> Demonstration:
    n, d = 256, 16
    pairs, steps = (
        cost(name, Sizes(n, d, heads=1)).multiply_adds for name in ("attention alone", "LSTM")
    )
    return Demonstration(
        pairs < steps,
        {"n": n, "d": d, "multiply-adds of attention over all pairs": pairs, "of an LSTM": steps},
    )


ANSWERS: tuple[Answer, ...] = (
    Answer(
        Place("sheet", "6-1"),
        question="Fill in the notebook: multi-head attention in PyTorch.",
        answer="`regard lab exercise multihead` writes such a notebook, with hints and checks; its "
        "solution has four parts: scaled dot-product attention with a mask, splitting into heads, "
        "joining them, and the layer with its four projections. Each check compares with the "
        "library, and with the results of common mistakes.",
        derivation=(
            Step(
                "Each head.",
                r"\text{head}_h = \operatorname{softmax}\left(\frac{x W_Q^h (s "
                r"W_K^h)^\top}{\sqrt{d_k}}\right) s W_V^h",
            ),
            Step("All of them.", r"y = [\text{head}_1; \dots; \text{head}_H]\, W_O"),
        ),
        run=partial(solved, "multihead"),
        mistakes=(
            Mistake(
                "$W_O$ is forgotten.",
                "Without it the heads stay separate blocks.",
                partial(slip, "multihead", "return self.output(join_", "return (join_"),
            ),
            Mistake(
                r"The scores are divided by $\sqrt{d_v}$.",
                "The scale belongs to queries and keys.",
                partial(slip, "multihead", "/ key.shape[-1] ** 0.5", "/ value.shape[-1] ** 0.5"),
            ),
        ),
        points=(
            Point(1, "attention: scale, mask, softmax along the keys"),
            Point(1, "heads split and joined in the right order"),
            Point(1, "projections of queries, keys and values, and $W_O$"),
        ),
    ),
    Answer(
        Place("sheet", "6-2(a)"),
        question="How are self-attention and cross-attention alike, how do they differ, and where "
        "does the Transformer use them?",
        answer="They are one operation: queries attend to pairs of keys and values. In "
        "self-attention all three are made from the same tokens, so that there are as many "
        "queries as pairs; in cross-attention queries come from one sequence, keys and values "
        "from another, and their numbers may differ. The encoder uses self-attention, the decoder "
        "masked self-attention among the target and cross-attention to the encoder's output. "
        "Cross-attention also joins modalities, such as text and images.",
        derivation=(
            Step(
                "One formula, with sources $X$ and $Y$.",
                r"\operatorname{Attention}(X W_Q,\, Y W_K,\, Y W_V)",
            ),
            Step("Self-attention is the case", r"Y = X"),
        ),
        run=_one_operation,
        mistakes=(
            Mistake(
                "There have to be as many queries as keys.",
                "Each query has its own row of weights; their number is free.",
                _as_many,
            ),
            Mistake(
                "In cross-attention the encoder's output gives the queries.",
                "Then there would be an output for each source token. The target asks.",
                _asked_by_the_encoder,
            ),
        ),
        points=(
            Point(1, "the same operation"),
            Point(1, "one source or two; lengths may differ"),
            Point(1, "where each is used"),
        ),
    ),
    Answer(
        Place("sheet", "6-2(b)"),
        question="In the figure of the original architecture, which attention layers are "
        "self-attention and which are cross-attention?",
        answer="The encoder's is self-attention. The decoder's lower one is self-attention too, "
        "masked, so that no position sees a later one. The decoder's upper one is "
        "cross-attention: its queries come from the layer below, its keys and values from the "
        "encoder's output.",
        derivation=(
            Step("Encoder.", r"\operatorname{Attention}(X, X, X)"),
            Step(
                "Decoder, lower, with the causal mask $M$.", r"\operatorname{Attention}_M(Y, Y, Y)"
            ),
            Step(
                "Decoder, upper, with the encoder's output $E$.",
                r"\operatorname{Attention}(Y, E, E)",
            ),
        ),
        run=_boxes,
        mistakes=(
            Mistake(
                "Both lower boxes are the same kind of self-attention.",
                "The decoder's is masked. Without the mask it would read the tokens that it is to "
                "predict.",
                _unmasked,
            ),
        ),
        points=(
            Point(1, "self, masked self, cross"),
            Point(1, "the reason: where keys and values come from"),
        ),
    ),
    Answer(
        Place("sheet", "6-2(c)"),
        question="What are positional encodings, why are they needed, and which two kinds are "
        "there?",
        answer="Vectors that tell the model where a token stands, added to the token's own. "
        "Attention without a mask needs them, since its weighted sum over all tokens has no "
        "access to their order. Fixed ones are mostly sinusoids, which are similar for close "
        "positions by construction; learned ones are trained like other parameters, and start out "
        "dissimilar. Both kinds can be absolute or relative: rotary encodings and linear biases "
        "are fixed and relative.",
        derivation=(
            Step("Without positions, a shuffling of the tokens passes through.", r"f(PX) = P f(X)"),
            Step("With them it does not.", r"f(PX + R) \ne P f(X + R)"),
            Step(
                "Sinusoids: similarity depends on the distance alone.",
                r"r_i \cdot r_j = \sum_k \cos \omega_k (i - j)",
            ),
        ),
        run=_needed,
        mistakes=(
            Mistake(
                "Without positions no Transformer knows anything of the order.",
                "Under a causal mask it does: each position sees another number of tokens.",
                _never_any_order,
            ),
            Mistake(
                "Close positions are similar in every encoding.",
                "In sinusoids they are. A learned table has to learn it.",
                _learned_and_similar,
            ),
        ),
        points=(
            Point(1, "what they are: vectors added to the tokens"),
            Point(1, "why: attention does not see the order"),
            Point(1, "fixed and learned"),
        ),
    ),
    Answer(
        Place("sheet", "6-2(d)"),
        question="What do layers of convolution, of recurrence and of self-attention cost, for "
        "length $n$, width $d$ and kernel $k$?",
        answer="A convolution over all channels $O(k n d^2)$, and $O(k n d)$ only if it is "
        "depthwise; a recurrent layer $O(n d^2)$; attention $O(n^2 d)$ for all pairs, and $O(n "
        "d^2)$ more with its projections. The recurrent layer needs $n$ steps one after the "
        "other; the others run in parallel.",
        derivation=(
            Step(
                "Convolution: each of $n$ outputs has $d$ entries, each a sum over $k$ taps and "
                "$d$ channels.",
                r"n \cdot d \cdot k d = k n d^2",
            ),
            Step("Recurrence: each of $n$ steps multiplies two matrices.", r"n \cdot 2 d^2"),
            Step(
                "Attention: two products over all pairs, and four projections.",
                r"2 n^2 d + 4 n d^2",
            ),
        ),
        run=_costs,
        mistakes=(
            Mistake(
                "A convolution costs $O(k n d)$.",
                "That is the depthwise one, in which channels never meet. A full convolution costs "
                "$d$ times as much.",
                _depthwise_only,
            ),
        ),
        points=(
            Point(1, "convolution, with $d^2$"),
            Point(1, "recurrence, and its $n$ steps"),
            Point(1, "attention, quadratic in $n$"),
        ),
    ),
    Answer(
        Place("sheet", "6-2(e)"),
        question="How do Transformers and RNNs cope with long sequences?",
        answer="Attention reads any token directly, however far away, so that long-range "
        "dependencies are easy to represent. A recurrent state is overwritten at every step, and "
        "what came early fades. The price is the quadratic cost of all pairs in time, and in "
        "memory if the weights are kept; a recurrent layer is linear in the length. To see it on "
        "texts of one's own, `regard train label RUN --texts FILE` trains a classifier with "
        "attention, and the same with `--model.mixer lstm` one that differs in nothing else.",
        derivation=(
            Step(
                "In attention the last output has a direct term for every token.",
                r"\frac{\partial h_n}{\partial x_1} = a_{n1} W_V + \text{(terms by way of the "
                "weights)}",
            ),
            Step(
                "In a recurrence it is a product over all steps between.",
                r"\frac{\partial h_n}{\partial x_1} = \left(\prod_{i=2}^{n} \frac{\partial "
                r"h_i}{\partial h_{i-1}}\right) \frac{\partial h_1}{\partial x_1}",
            ),
        ),
        run=_long_range,
        mistakes=(
            Mistake(
                "Transformers are also the cheaper ones for long sequences.",
                "Their cost grows with the square of the length.",
                _cheaper_for_long,
            ),
        ),
        points=(
            Point(1, "direct access against an overwritten state"),
            Point(1, "quadratic against linear cost"),
        ),
    ),
)
