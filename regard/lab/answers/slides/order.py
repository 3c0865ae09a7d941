"""The slides on order, and on positions that tell it."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard import Concatenated, MultiHeadAttention, SinusoidalPositions, attend
from regard.lab.answers.answer import Answer, Demonstration, Mistake, Point, Step
from regard.lab.answers.plots import heat_map
from regard.lab.claims import find
from regard.lab.claims.costs import cost
from regard.lab.claims.sample import SAME, D, H, L, alive, apart, normal, parameters
from regard.lab.cost.layers import Sizes
from regard.lab.experiment import Table
from regard.lab.place import Place

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
    x, position = normal(0, L, D), SinusoidalPositions(width)
    beside = Concatenated(position)(x)
    r = SinusoidalPositions(D).encoding(torch.arange(L), torch.float64)
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
    ours = SinusoidalPositions(width).encoding(torch.arange(n), torch.float64)
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


ANSWERS: tuple[Answer, ...] = (
    Answer(
        Place("slides", "order"),
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
        Place("slides", "positions"),
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
        Place("slides", "adding"),
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
        Place("slides", "sinusoids"),
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
)
