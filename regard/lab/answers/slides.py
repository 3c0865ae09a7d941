"""The slides: what attention costs, why order is needed, positions, encoder and decoder."""

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard import (
    Concatenated,
    MultiHeadAttention,
    Sinusoidal,
    Transformer,
    attend,
    causal,
)
from regard.lab.answers.answer import Answer, Demonstration, Mistake, Point, Step
from regard.lab.answers.plots import heat_map
from regard.lab.claims import find
from regard.lab.claims.costs import cost
from regard.lab.claims.sample import (
    PLAN,
    SAME,
    D,
    H,
    L,
    S,
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
from regard.model.baseline import Dense

# A dense layer, and shared weights


def _dense() -> Demonstration:
    rows = []
    for tokens, width in ((4, 6), (8, 6), (4, 12)):
        found = cost("dense over all positions", Sizes(tokens, width, heads=1))
        rows.append((tokens, width, tokens * width, found.parameters, found.multiply_adds))
    return Demonstration(
        all(row[4] == row[2] ** 2 and row[3] == row[2] ** 2 + row[2] for row in rows),
        tables=(
            Table(
                "One dense layer over all tokens, with a bias",
                ("N", "D", "numbers in and out", "parameters", "multiply-adds"),
                tuple(rows),
            ),
        ),
    )


def _another_length() -> Demonstration:
    dense = Dense(6, 4)
    try:
        taken, said = dense(torch.zeros(1, 5, 6)).shape[1] == 5, "nothing"
    except ValueError as error:
        taken, said = False, str(error)
    return Demonstration(
        taken,
        {
            "a dense layer for 4 tokens, given 5, says": said,
            "attention, given 5": MultiHeadAttention(6, 1)(torch.zeros(1, 5, 6)).shape[1],
        },
    )


def _shared() -> Demonstration:
    rows = []
    for tokens, width in ((8, 16), (16, 16), (32, 16), (16, 32)):
        pairs = cost("attention alone", Sizes(tokens, width, heads=1))
        whole = cost("attention, with projections", Sizes(tokens, width, heads=1))
        rows.append(
            (
                tokens,
                width,
                whole.parameters - 4 * width,
                pairs.multiply_adds,
                whole.multiply_adds - pairs.multiply_adds,
                tokens * width**2,
            )
        )
    return Demonstration(
        all(p == 4 * d * d and dots == 2 * n * n * d for n, d, p, dots, *_ in rows)
        and all(rest == 4 * next_ for *_, rest, next_ in rows),
        tables=(
            Table(
                "Self-attention, counted while it runs; biases left out",
                (
                    "N",
                    "D",
                    "parameters, W_O too",
                    "multiply-adds of all pairs, 2N²D",
                    "of the four projections, 4ND²",
                    "of the next layer D to D, ND²",
                ),
                tuple(rows),
            ),
        ),
    )


def _grows_with_tokens() -> Demonstration:
    counts = [
        cost("attention, with projections", Sizes(n, 16, heads=1)).parameters for n in (8, 16, 32)
    ]
    return Demonstration(
        counts[0] < counts[-1], {"parameters for 8, 16 and 32 tokens of width 16": counts}
    )


def _pairs_only() -> Demonstration:
    tokens, width = 8, 64
    whole = cost("attention, with projections", Sizes(tokens, width, heads=1)).multiply_adds
    pairs = cost("attention alone", Sizes(tokens, width, heads=1)).multiply_adds
    return Demonstration(
        whole == pairs,
        {
            "N": tokens,
            "D": width,
            "multiply-adds of the whole layer": whole,
            "of all pairs, which the O(N²D) counts": pairs,
        },
    )


# Order


ORDER = torch.tensor([3, 0, 4, 6, 1, 5, 2])


def _shuffles(function: nn.Module) -> tuple[float, float]:
    """How far a function is from f(PX) = P f(X), and from f(PX) = f(X)."""
    x = normal(1, 1, L, D)
    before, after = function(x)[0], function(x[:, ORDER])[0]
    return apart(after, before[ORDER]), apart(after, before)


def _equivariant() -> Demonstration:
    attention = alive(MultiHeadAttention(D, H), 0)
    equivariant, invariant = _shuffles(attention)
    x = normal(1, L, D)
    query = normal(2, 1, D)
    one = apart(attend(query, x, x), attend(query, x[ORDER], x[ORDER]))
    teams = {"CSK": 0, "plays": 1, "better": 2, "not": 3, "MI": 4}
    table = normal(3, len(teams), D)
    said, turned = (
        attention(table[[teams[word] for word in sentence.split()]]).mean(0)
        for sentence in ("CSK plays better not MI", "MI plays better not CSK")
    )
    return Demonstration(
        equivariant < SAME < 0.1 < invariant and one < SAME and apart(said, turned) < SAME,
        {
            "f(PX) − P f(X), largest entry": equivariant,
            "f(PX) − f(X), largest entry": invariant,
            "one query's output, when keys and values are shuffled, changes by": one,
            "the two sentences' mean outputs differ by": apart(said, turned),
        },
    )


def _invariant() -> Demonstration:
    _, invariant = _shuffles(alive(MultiHeadAttention(D, H), 0))
    return Demonstration(invariant < SAME, {"f(PX) − f(X), largest entry": invariant})


class _Convolution(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.conv1d(x.mT, normal(5, D, D, 3), padding=1).mT


def _because_shared() -> Demonstration:
    """A convolution shares its weights among all positions too."""
    equivariant, _ = _shuffles(_Convolution())
    return Demonstration(
        equivariant < SAME,
        {"a convolution's f(PX) − P f(X), largest entry": equivariant},
    )


# Positions


def _beside_or_added() -> Demonstration:
    width = 8
    x, position = normal(0, L, D), Sinusoidal(width)
    beside = Concatenated(position)(x)
    r = Sinusoidal(D).encoding(torch.arange(L), torch.float64)
    W = normal(1, 5, D)
    tied = apart((x + r) @ W.T, torch.cat((x, r), -1) @ torch.cat((W, W), -1).T)
    counts = {
        "added": parameters(MultiHeadAttention(D, 1, bias=False)),
        "beside": parameters(MultiHeadAttention(D + width, 1, bias=False)),
    }
    return Demonstration(
        beside.shape[-1] == D + width and tied < SAME and counts["beside"] > counts["added"],
        {
            "width of the tokens, with positions of 8 beside them": [D, beside.shape[-1]],
            "parameters of attention, added and beside": list(counts.values()),
            "W(x + r) − [W W][x; r], largest entry": tied,
        },
    )


def _no_more_computing() -> Demonstration:
    width = 8
    added, beside = (
        cost("attention, with projections", Sizes(L, d, heads=1)).multiply_adds
        for d in (D, D + width)
    )
    return Demonstration(
        beside <= added,
        {"multiply-adds with positions added": added, "with positions of 8 beside": beside},
    )


def _cosines(width: int) -> float:
    """The mean of |cos| between random vectors."""
    return float(F.cosine_similarity(normal(1, 2001, width), normal(2, 2001, width)).abs().mean())


def _kept_apart() -> Demonstration:
    widths = (3, 64, 512)
    found = [_cosines(width) for width in widths]
    expected = [math.sqrt(2 / (math.pi * width)) for width in widths]
    skips = find("skip-connections")[0].run()
    return Demonstration(
        all(abs(a / b - 1) < 0.15 for a, b in zip(found, expected)) and skips.verdict == "holds",
        skips.measurements,
        (
            Table(
                "How parallel two random vectors are",
                ("D", "mean |cos|", "√(2 / (πD))"),
                tuple(zip(widths, found, expected)),
            ),
        ),
        skips.plots,
    )


def _exactly_separate() -> Demonstration:
    found = _cosines(3)
    return Demonstration(
        found < 0.05,
        {"mean |cos| of two random vectors of width 3": found, "of width 512": _cosines(512)},
    )


# Sinusoids


def _written(position: int, entry: int, width: int, base: float = 10_000) -> float:
    """The slides' formula for one entry."""
    if entry % 2 == 0:
        return math.sin(position / base ** (entry / width))
    return math.cos(position / base ** ((entry - 1) / width))


def _sinusoids() -> Demonstration:
    n, width = 40, 64
    ours = Sinusoidal(width).encoding(torch.arange(n), torch.float64)
    rows = [[_written(p, i, width) for i in range(width)] for p in range(n)]
    written = torch.tensor(rows, dtype=torch.float64)
    return Demonstration(
        apart(ours, written) < SAME,
        {
            "largest difference from the formula": apart(ours, written),
            "position 1, first four entries": ours[1, :4].tolist(),
        },
        figures=(heat_map(),),
    )


def _unpaired() -> Demonstration:
    """sin and cos of one pair with two frequencies: is a shift still a rotation?"""
    n, width, base = 40, 8, 10_000

    def gap(paired: bool) -> float:
        """How much the norm of a pair varies: a rotation keeps it."""
        lowered = [i - i % 2 if paired else i for i in range(width)]
        angles = [[p / base ** (i / width) for i in lowered] for p in range(n)]
        rows = [[(math.cos if i % 2 else math.sin)(a) for i, a in enumerate(row)] for row in angles]
        r = torch.tensor(rows, dtype=torch.float64)
        return float(r.unflatten(-1, (-1, 2)).norm(dim=-1).std())

    return Demonstration(
        gap(paired=False) < SAME,
        {
            "how much the length of a pair (sin, cos) varies, with exponent i/D for odd i": gap(
                False
            ),
            "with (i − 1)/D": gap(True),
        },
    )


# Encoder and decoder


def _slope(skips: bool) -> float:
    """How strongly the output of 12 layers depends on its input."""
    x = normal(0, 1, L, D).requires_grad_()
    y: Tensor = x
    for seed in range(12):
        network = alive(nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D)), seed)
        changed = 0.3 * network(y)
        y = y + changed if skips else changed
    (slope,) = torch.autograd.grad(y.sum(), x)
    return float(slope.abs().mean())


def _residual() -> Demonstration:
    with_skips, without = _slope(True), _slope(False)
    model = Transformer(PLAN)
    around = [
        sum(name.startswith("add_") for name, part in block.named_children() if part is not None)
        for stack in (model.encoder, model.decoder)
        for block in blocks(stack)[:1]
    ]
    return Demonstration(
        with_skips > 0.1 and without < 1e-3 and around == [2, 3],
        {
            "residual connections in a layer of the encoder, and of the decoder": around,
            "mean slope of 12 layers, with residual connections": with_skips,
            "without": without,
        },
    )


def _one_around_all() -> Demonstration:
    """A single residual connection around the whole stack: do the layers inside learn?"""
    inner = _slope(False)
    return Demonstration(
        inner > 1e-3, {"slope from the last to the first of 12 layers inside": inner}
    )


class _Decoder:
    """A small model's decoder, and what its layers read."""

    def __init__(self) -> None:
        self.model = alive(Transformer(PLAN), 0)
        self.memory, self.x = normal(1, 1, S, D), normal(2, 1, L, D)
        self.read: list[Tensor] = []
        self.keys: list[Tensor] = []
        for block in blocks(self.model.decoder):
            cross = block.cross
            assert isinstance(cross, MultiHeadAttention)
            cross.register_forward_pre_hook(lambda _, args: self.read.append(args[1]))
            cross.core.register_forward_pre_hook(lambda _, args: self.keys.append(args[1]))

    def __call__(self, x: Tensor, memory: Tensor) -> Tensor:
        states: Tensor = self.model.decoder(x, memory, mask=causal())
        return states


def _three_inputs() -> Demonstration:
    decoder = _Decoder()
    future = influence(lambda x: decoder(x, decoder.memory), decoder.x).triu(1).max()
    source = influence(lambda m: decoder(decoder.x, m), decoder.memory).min()
    decoder.read.clear()
    rows = decoder(decoder.x, decoder.memory).shape[1]
    same = max(apart(read, decoder.memory) for read in decoder.read)
    return Demonstration(
        float(future) == 0 and float(source) > 0 and same == 0 and rows == L,
        {
            "what a later position changes in an earlier one": float(future),
            "least influence of a source position on a target position": float(source),
            "difference of what every decoder layer reads from the encoder's output": same,
            "target positions, which ask, and source positions": [rows, S],
        },
    )


def _shared_keys() -> Demonstration:
    decoder = _Decoder()
    decoder(decoder.x, decoder.memory)
    first, second = decoder.keys
    return Demonstration(
        apart(first, second) < SAME,
        {"difference between the keys of two decoder layers": apart(first, second)},
    )


def _sees_the_future() -> Demonstration:
    decoder = _Decoder()
    open_ = influence(lambda x: decoder.model.decoder(x, decoder.memory), decoder.x)
    masked = influence(lambda x: decoder(x, decoder.memory), decoder.x)
    return Demonstration(
        float(masked.triu(1).max()) > 0,
        {
            "what a later position changes in an earlier one, with the mask": float(
                masked.triu(1).max()
            ),
            "without it": float(open_.triu(1).max()),
        },
    )


slides = partial(Place, "slides")

ANSWERS: tuple[Answer, ...] = (
    Answer(
        slides("dense layer"),
        question="A layer takes $N$ tokens of width $D$ and gives as many. What would one dense "
        "layer over all of it cost?",
        answer="There are $ND$ numbers on each side, so that the matrix has $N^2 D^2$ parameters, "
        "and one forward pass multiplies each of them once: $O(N^2 D^2)$ for both. Moreover it "
        "fits one $N$ only.",
        derivation=(
            Step(
                "Every output number has a weight for every input number.",
                r"(ND) \cdot (ND) = N^2 D^2",
            ),
        ),
        run=_dense,
        mistakes=(
            Mistake(
                "The same dense layer serves for sequences of any length.",
                "Its matrix has a row and a column for every position.",
                _another_length,
            ),
        ),
        points=(
            Point(1, "$ND$ numbers in and out"),
            Point(1, r"$O(N^2 D^2)$ parameters and operations"),
        ),
    ),
    Answer(
        slides("shared weights"),
        question="What do attention and the layer after it cost, given that all tokens share "
        "$W_Q$, $W_K$ and $W_V$?",
        answer="The parameters do not depend on $N$: $O(D^2)$. The dot products of all pairs cost "
        "$O(N^2 D)$, and so do the means of the values. The projections cost $O(N D^2)$, which is "
        "more wherever $N < D$. A following layer from $D$ to $D$ has $O(D^2)$ parameters and "
        "costs $O(N D^2)$.",
        derivation=(
            Step("Three matrices, and $W_O$.", r"3 D^2 + D^2"),
            Step("Two products over all pairs.", r"N^2 D + N^2 D"),
            Step("Every token through every matrix.", r"N \cdot 4 D^2"),
        ),
        run=_shared,
        mistakes=(
            Mistake(
                "The number of parameters grows with the number of tokens.",
                "All tokens share the matrices.",
                _grows_with_tokens,
            ),
            Mistake(
                "The whole layer costs $O(N^2 D)$.",
                "That is the part of the pairs. For short sequences most of the work is in the "
                "projections.",
                _pairs_only,
            ),
        ),
        points=(
            Point(1, r"$O(D^2)$ parameters"),
            Point(1, r"$O(N^2 D)$ for the pairs, $O(N D^2)$ for the projections"),
            Point(1, r"$O(N D^2)$ for the layer after it"),
        ),
    ),
    Answer(
        slides("order"),
        question="What does a Transformer without positions know of the order of its tokens?",
        answer="Nothing: it is permutation equivariant. Shuffled tokens give the same outputs, "
        "shuffled in the same way, and whatever is read from all of them together is invariant. "
        "So two sentences of the same words cannot be told apart. The reason is that attention "
        "sums over all pairs and that nothing in it depends on an index; shared weights alone are "
        "not enough, since convolutions share theirs too.",
        derivation=(
            Step(
                "For a permutation matrix $P$ the scores are permuted on both sides.",
                r"(PX) W (PX)^\top = P (X W X^\top) P^\top",
            ),
            Step("A softmax along rows goes along.", r"f(PX) = P A P^\top P X W_V = P f(X)"),
            Step(
                "For one query, the keys and values may be shuffled together.",
                r"\operatorname{Attention}(q, PK, PV) = \operatorname{Attention}(q, K, V)",
            ),
        ),
        run=_equivariant,
        mistakes=(
            Mistake(
                "It is permutation invariant: shuffling the input changes nothing.",
                "The outputs move with their tokens. Equivariant is the word.",
                _invariant,
            ),
            Mistake(
                "The reason is that the weights are shared by all tokens.",
                "A convolution shares its weights among all positions as well, and notices a "
                "shuffling.",
                _because_shared,
            ),
        ),
        points=(
            Point(1, "equivariant, and what that means"),
            Point(1, "why: sums over all pairs, no index"),
            Point(1, "order has to be put in"),
        ),
    ),
    Answer(
        slides("positions"),
        question="How can the order be put in without a change of the Transformer?",
        answer="With a vector $r_n$ for each position: beside the token, $[x_n; r_n]$, which makes "
        r"everything wider, or added to it, $\tilde{x}_n = x_n + r_n$, which costs nothing. "
        "Adding is the case of putting beside in which both parts share a matrix.",
        derivation=(
            Step(
                "Beside the token, each part has a matrix of its own.",
                r"[W_x\; W_r] \begin{bmatrix} x \\ r \end{bmatrix} = W_x x + W_r r",
            ),
            Step(
                "Added, they share one.",
                r"W (x + r) = [W\; W] \begin{bmatrix} x \\ r \end{bmatrix}",
            ),
        ),
        run=_beside_or_added,
        mistakes=(
            Mistake(
                "Putting positions beside the tokens costs nothing.",
                "Every matrix that reads the tokens becomes wider.",
                _no_more_computing,
            ),
        ),
        points=(Point(1, "beside: wider, more to compute"), Point(1, "added: the same width")),
    ),
    Answer(
        slides("adding"),
        question="Does adding positions spoil the tokens?",
        answer="Not much, in high dimension: two random vectors of width $D$ are nearly "
        r"orthogonal, with $\mathrm{E}|\cos| \approx \sqrt{2 / (\pi D)}$, so that a linear map "
        "can still tell token and position apart. That is approximate, and trained vectors are "
        "not random. Skip connections carry the position through the layers, so that it can still "
        "be read at the top; without them it is lost after a few.",
        derivation=(
            Step(
                r"The cosine of two random directions has variance $1/D$ and is nearly normal.",
                r"\cos \sim \mathcal{N}(0, 1/D) \quad \Rightarrow \quad \mathrm{E}|\cos| \approx "
                r"\sqrt{\frac{2}{\pi D}}",
            ),
        ),
        run=_kept_apart,
        mistakes=(
            Mistake(
                "They are orthogonal, so that nothing mixes.",
                "Only nearly, and only where $D$ is large: in three dimensions the cosine is a "
                "half on average.",
                _exactly_separate,
            ),
        ),
        points=(
            Point(1, "nearly orthogonal in high dimension"),
            Point(1, "skip connections keep the position"),
        ),
    ),
    Answer(
        slides("sinusoids"),
        question="What is the formula of the sinusoidal encodings?",
        answer="Entries come in pairs of sine and cosine with one frequency each: entry $i$ of "
        r"position $n$ is $\sin(n / L^{i/D})$ for even $i$ and $\cos(n / L^{(i-1)/D})$ for odd "
        "$i$, with $L = 10000$. The first pair turns fastest. A shift by $k$ positions rotates "
        "each pair by a fixed angle, whatever $n$ is.",
        derivation=(
            Step(
                r"With $\omega = L^{-i/D}$ for the pair:",
                r"\begin{bmatrix} \sin \omega (n + k) \\ \cos \omega (n + k) \end{bmatrix} = "
                r"\begin{bmatrix} \cos \omega k & \sin \omega k \\ -\sin \omega k & \cos \omega k "
                r"\end{bmatrix} \begin{bmatrix} \sin \omega n \\ \cos \omega n \end{bmatrix}",
            ),
        ),
        run=_sinusoids,
        mistakes=(
            Mistake(
                "The exponent is $i/D$ for odd $i$ too.",
                "Then sine and cosine of a pair have two frequencies, and a shift is no rotation "
                "any more.",
                _unpaired,
            ),
        ),
        points=(
            Point(1, "sine and cosine in pairs, with one frequency"),
            Point(1, r"frequencies $L^{-i/D}$, from fast to slow"),
        ),
    ),
    Answer(
        slides("encoder"),
        question="What are the residual connections in the encoder for?",
        answer="Each sublayer adds to its input instead of replacing it, and the sum is "
        "normalised. Each layer of the encoder has two of them, each of the decoder three. So "
        "gradients reach the first layers unweakened, and whatever a token brought along, such as "
        "its position, is still there at the top.",
        derivation=(
            Step(
                "The derivative of a sublayer with its skip has the identity in it.",
                r"\frac{\partial (x + f(x))}{\partial x} = I + \frac{\partial f}{\partial x}",
            ),
            Step(
                "Through many layers it does not vanish, where a product of small derivatives "
                "does.",
                r"\prod_l \left(I + J_l\right) \quad \text{against} \quad \prod_l J_l",
            ),
        ),
        run=_residual,
        mistakes=(
            Mistake(
                "One skip around the whole stack does the same.",
                "Inside the stack the gradient still passes through the product of all layers.",
                _one_around_all,
            ),
        ),
        points=(
            Point(1, "around every sublayer, then LayerNorm"),
            Point(1, "purpose: gradients and information pass"),
        ),
    ),
    Answer(
        slides("decoder"),
        question="What do the decoder's two kinds of attention read?",
        answer="Its self-attention reads the target up to the position itself; later positions are "
        "masked. Its cross-attention takes queries from the layer below, and keys and values from "
        "the output of the top encoder layer. All decoder layers read the same output, and each "
        "projects keys and values of its own from it.",
        derivation=(
            Step(
                "Masked self-attention.",
                r"\operatorname{softmax}\left(\frac{Q K^\top}{\sqrt{d_k}} + M\right) V, \qquad "
                r"M_{ij} = -\infty \text{ for } j > i",
            ),
            Step(
                "Cross-attention in decoder layer $l$, with the encoder's output $E$.",
                r"Q = x^l W_Q^l, \qquad K = E W_K^l, \qquad V = E W_V^l",
            ),
        ),
        run=_three_inputs,
        mistakes=(
            Mistake(
                "The top encoder layer's keys and values are used in all decoder layers.",
                "Its output is. Each decoder layer makes keys and values of its own from it.",
                _shared_keys,
            ),
            Mistake(
                "The decoder's self-attention sees the whole target.",
                "Then it would be trained to copy the next token, which is not there when it "
                "decodes.",
                _sees_the_future,
            ),
        ),
        points=(
            Point(1, "masked self-attention"),
            Point(1, "queries from below, keys and values from the encoder's output"),
        ),
    ),
)
