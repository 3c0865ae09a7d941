"""Homework 1.3: multi-head self-attention, positions, and the layers that it can imitate."""

import math
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from regard import MultiHeadAttention, SinusoidalPositions, attend, attention_weights
from regard.lab.answers.answer import Answer, Demonstration, Mistake, Point, Step
from regard.lab.claims import plain
from regard.lab.claims.sample import SAME, D, H, L, alive, apart, normal, orthonormal
from regard.lab.experiment import Table
from regard.lab.place import Place

# (a) Multi-head self-attention

VALUE = 5
"""The width of a head's values."""


def _layer() -> MultiHeadAttention:
    return alive(MultiHeadAttention(D, H, key_width=4, value_width=VALUE), 1)


def _shapes() -> Demonstration:
    layer, x = _layer(), normal(0, L, D)
    stacked = plain.heads(layer, plain.array(x))
    output = plain.linear(layer.output, stacked)
    error = plain.apart(layer(x), output)
    return Demonstration(
        error < SAME and stacked.shape == (L, H * VALUE) and output.shape == (L, D),
        {"largest difference from MultiHeadAttention": error},
        (
            Table(
                f"C of {D} rows and {L} columns, {H} heads",
                ("matrix", "rows", "columns"),
                (
                    ("a head's queries and keys", layer.key_width, L),
                    ("a head's values", layer.value_width, L),
                    ("a head's weights A", L, L),
                    ("all heads, stacked", stacked.shape[1], L),
                    ("W_O", *layer.output.weight.shape),
                    ("H", output.shape[1], L),
                ),
            ),
        ),
    )


def _axis_of_heads() -> Demonstration:
    layer, x = _layer(), normal(0, L, D)
    stacked = plain.heads(layer, plain.array(x))
    axis = [VALUE, L, H]
    return Demonstration(
        axis == [D, L],
        {
            "axes of the stack as d″×n×h": axis,
            "axes of C, to which H is added by the residual connection": [D, L],
            "rows that W_O reads": layer.output.weight.shape[1],
            "rows of the heads on top of each other": int(stacked.shape[1]),
        },
    )


# (b) Positions


def _pooled(x: Tensor, positions: bool) -> Tensor:
    """The mean of what self-attention gives: what a classifier would read."""
    layer = alive(MultiHeadAttention(D, H), 1)
    return layer(SinusoidalPositions(D)(x) if positions else x).mean(0)


def _order_matters() -> Demonstration:
    x = normal(0, L, D)
    turned = x.flip(0)
    moved = {on: apart(_pooled(x, on), _pooled(turned, on)) for on in (False, True)}
    return Demonstration(
        moved[False] < SAME and moved[True] > 0.01,
        {
            "what reversing the tokens changes, without positions": moved[False],
            "what reversing the tokens changes, with positions": moved[True],
        },
    )


def _captures_range() -> Demonstration:
    """Without positions, the weight between two tokens at several distances."""
    asks, answers, filler = normal(0, 1, D), normal(1, 1, D), normal(2, 1, D)
    layer = alive(MultiHeadAttention(D, 1), 3)
    shares = []
    for distance in (1, 10, 30):
        x = filler.repeat(40, 1)
        x[0], x[distance] = asks, answers
        query, key = layer.query(x), layer.key(x)
        shares.append(float(attention_weights(query, key)[0, distance]))
    return Demonstration(
        max(shares) - min(shares) > SAME,
        {"weight on a token 1, 10 and 30 places away, without positions": shares},
    )


# (c) Identity and permutation


def _identity_and_permutation() -> Demonstration:
    n, order = 5, torch.tensor([3, 0, 4, 2, 1])
    x = orthonormal(0, n, n)
    rows = []
    for beta in (1.0, 5.0, 10.0, 20.0, math.inf):
        rows.append(
            (
                beta,
                float(attention_weights(x, x, beta=beta)[0, 0]),
                apart(attend(x, x, x, beta=beta), x),
                apart(attend(x[order], x, x, beta=beta), x[order]),
            )
        )
    return Demonstration(
        all(a[2] > b[2] for a, b in pairwise(rows))
        and rows[-1][2:] == (0, 0)
        and abs(rows[0][1] - math.e / (math.e + n - 1)) < SAME,
        tables=(
            Table(
                "Five orthonormal rows as keys and values",
                ("β", "weight on the own key", "error of the identity", "error of a permutation"),
                tuple(rows),
            ),
        ),
    )


def _identity_at_once() -> Demonstration:
    x = orthonormal(0, 3, 3)
    A = attention_weights(x, x, beta=1.0)
    return Demonstration(
        apart(A, torch.eye(3, dtype=torch.float64)) < SAME,
        {
            "softargmax(I), first row, at β = 1": A[0].tolist(),
            "distance of the output from the input": apart(A @ x, x),
        },
    )


def _zero_scores() -> Demonstration:
    n, order = 5, torch.tensor([3, 0, 4, 2, 1])
    value = normal(1, n, 3)
    out = attend(torch.zeros(n, 2, dtype=torch.float64), normal(2, n, 2), value)
    return Demonstration(
        apart(out, value[order]) < SAME,
        {
            "distance of the output from a permutation of the values": apart(out, value[order]),
            "distance of every row from the mean of the values": apart(
                out, value.mean(0).expand(n, 3)
            ),
        },
    )


# (d) and (e) Convolutions


def _running() -> Demonstration:
    x, W, r = normal(0, L, D), normal(1, 5, D), orthonormal(2, L, L)
    convolution = F.conv1d(x.T[None], W[..., None])[0].T
    attended = attend(r, r, x @ W.T, beta=math.inf)
    moved = x.clone()
    moved[2] += 1
    change = (attend(r, r, moved @ W.T, beta=math.inf) - attended).abs().amax(-1)
    return Demonstration(
        apart(attended, convolution) < SAME and change.nonzero().tolist() == [[2]],
        {
            "largest difference from a convolution of kernel 1": apart(attended, convolution),
            "rows that change when row 3 does": [int(row) + 1 for row in change.nonzero()],
        },
    )


def _bias_of_one() -> Demonstration:
    x, W = normal(0, L, D), normal(1, 5, D)
    before = attention_weights(x, x)
    ones = torch.ones(L, L, dtype=torch.float64)
    after = attention_weights(x, x, bias=ones)
    convolution = F.conv1d(x.T[None], W[..., None])[0].T
    return Demonstration(
        apart(attend(x, x, x @ W.T, bias=ones), convolution) < SAME,
        {
            "what a bias of 1 on all scores changes in the weights": apart(before, after),
            "difference of the output from a convolution of kernel 1": apart(
                attend(x, x, x @ W.T, bias=ones), convolution
            ),
            "share that a row takes from other rows, at most": float(1 - after.diagonal().min()),
        },
    )


n, WIDTH = 31, 64
"""Positions, and the width of their encodings."""
R = SinusoidalPositions(WIDTH).encoding(torch.arange(-1, n + 1), torch.float64)
"""Sinusoids of the positions, and of one more at each end."""


def _heads(x: Tensor, beta: float) -> list[Tensor]:
    """What three heads read: the rows before, at and after each inner position."""
    inner, keys = range(1, n - 1), R[1:-1]
    return [attend(R[[i + 1 + shift for i in inner]], keys, x, beta=beta) for shift in (-1, 0, 1)]


def _three_taps() -> Demonstration:
    x, kernel = normal(0, n, 3), normal(1, 5, 3, 3)
    real = F.conv1d(x.T[None], kernel)[0].T
    betas = (1.0, 5.0, 10.0, 30.0, 100.0)
    errors = []
    for beta in betas:
        taps = zip(_heads(x, beta), kernel.unbind(-1))
        errors.append(apart(torch.stack([head @ W.T for head, W in taps]).sum(0), real))
    return Demonstration(
        errors == sorted(errors, reverse=True) and errors[-1] < SAME,
        tables=(
            Table(
                "Three heads against a convolution of kernel 3",
                ("β", "largest error"),
                tuple(zip(betas, errors)),
            ),
        ),
    )


def _whole_phrase() -> Demonstration:
    """One head that attends to a phrase of three: the best that any matrix after it can do."""
    x, kernel = normal(0, n, 3), normal(1, 5, 3, 3)
    real = F.conv1d(x.T[None], kernel)[0].T
    phrase = sum(_heads(x, 100.0)) / 3
    best = phrase @ torch.linalg.lstsq(phrase, real).solution
    return Demonstration(
        apart(best, real) < SAME,
        {
            "best error of one head that averages over three neighbours": apart(best, real),
            "size of the convolution's output": float(real.abs().max()),
        },
    )


ANSWERS: tuple[Answer, ...] = (
    Answer(
        Place("homework", "1.3(a)"),
        question=r"For an input $C$ ($e \times n$): what are queries, keys, values and the output "
        "of self-attention with $h$ heads?",
        answer=r"Head $i$ has $Q^i = W_q^i C$ and $K^i = W_k^i C$ of $d' \times n$, and $V^i = "
        r"W_v^i C$ of $d'' \times n$. Its output is $H^i = V^i "
        r"\operatorname{softargmax}_\beta(K^{i\top} Q^i)$. On top of each other the heads are a "
        r"matrix of $h d'' \times n$, and $H = W_O [H^1; \dots; H^h]$ is $e \times n$ again, as "
        "the residual connection needs it.",
        derivation=(
            Step(
                "All three come from the same columns.",
                r"Q^i = W_q^i C, \qquad K^i = W_k^i C, \qquad V^i = W_v^i C",
            ),
            Step(
                "Each head attends by itself.",
                r"H^i = V^i A^i, \qquad A^i = \operatorname{softargmax}_\beta(K^{i\top} Q^i) \in "
                r"\mathbb{R}^{n \times n}",
            ),
            Step(
                r"$W_O$ has $e$ rows and $h d''$ columns.",
                r"H = W_O \begin{bmatrix} H^1 \\ \vdots \\ H^h \end{bmatrix} \in \mathbb{R}^{e "
                r"\times n}",
            ),
        ),
        run=_shapes,
        mistakes=(
            Mistake(
                r"$H$ is the heads with an axis of their own, $d'' \times n \times h$.",
                "That is where the computation stands before its last step. The heads become one "
                "axis of $h d''$ rows, and $W_O$ maps it to $e$; otherwise $H$ cannot be added to "
                "$C$.",
                _axis_of_heads,
            ),
        ),
        points=(
            Point(1, "queries, keys and values of each head, with the shapes of their matrices"),
            Point(1, "the output: attention in each head, the stack, $W_O$"),
        ),
    ),
    Answer(
        Place("homework", "1.3(b)"),
        question="When does self-attention need positional encodings, and when not?",
        answer="It needs them where the answer depends on the order of the tokens: without them, "
        "and without a mask, shuffling the input only shuffles the output. It does not where the "
        "input is a set, or where order carries no information, such as in counting words. A "
        "causal mask tells something of the order too.",
        derivation=(
            Step(
                "Shuffled inputs give shuffled outputs.",
                r"f(XP) = f(X) P \quad \text{for every permutation } P",
            ),
            Step(
                "What is read from all of them, such as their mean, is then the same for every "
                "order.",
                r"\tfrac{1}{n} f(XP) \mathbf{1} = \tfrac{1}{n} f(X) P \mathbf{1} = \tfrac{1}{n} "
                r"f(X) \mathbf{1}",
            ),
        ),
        run=_order_matters,
        mistakes=(
            Mistake(
                "Positional encodings capture long-range dependencies.",
                "Attention does that, with or without them: a weight depends on the two tokens, "
                "not on how far apart they stand. An encoding tells where a token stands.",
                _captures_range,
            ),
        ),
        points=(
            Point(1, "needed where order matters, since attention alone does not see it"),
            Point(1, "not needed for sets, with an example"),
        ),
    ),
    Answer(
        Place("homework", "1.3(c)"),
        question="Give a case in which self-attention is the identity, or a permutation.",
        answer="With orthonormal columns as keys and values. Queries equal to the keys give the "
        r"identity, queries $q_i = k_{\pi(i)}$ the permutation $\pi$: but only as $\beta \to "
        r"\infty$. At a finite $\beta$ each output still holds something of the others.",
        derivation=(
            Step(
                "Every query matches one key by 1 and all others by 0.",
                r"k_j \cdot q_i = k_j \cdot k_{\pi(i)} = \begin{cases} 1 & j = \pi(i) \\ 0 & "
                r"\text{otherwise} \end{cases}",
            ),
            Step(
                "So its weight is known.",
                r"a_{\pi(i)} = \frac{e^\beta}{e^\beta + n - 1} \to 1 \quad \text{as } \beta \to "
                r"\infty",
            ),
            Step("Then each output is one value.", r"h_i \to v_{\pi(i)}"),
        ),
        run=_identity_and_permutation,
        mistakes=(
            Mistake(
                r"$X$ is orthogonal, so $X^\top X = I$, so $A = I$.",
                r"The scores are $I$, the weights are not: $\operatorname{softargmax}(I)$ has no "
                "zeros.",
                _identity_at_once,
            ),
            Mistake(
                "All scores are zero, so that the output is a permutation of the input.",
                "Equal scores give equal weights, and every output is the mean of all values.",
                _zero_scores,
            ),
        ),
        points=(
            Point(1, "orthonormal keys, with queries that equal them or a permutation of them"),
            Point(1, r"large $\beta$, so that the weights are one-hot"),
        ),
    ),
    Answer(
        Place("homework", "1.3(d)"),
        question="Give a case in which self-attention applies one linear map at every position. "
        "What is the name of such a layer?",
        answer="Where $A = I$: every position attends to itself alone, and $H = W_V X$. Keys and "
        r"queries that are orthonormal positions, with a large $\beta$, do that. The name is a "
        "convolution of kernel 1 (a 1×1 convolution).",
        derivation=(
            Step(
                "Only the own value has weight.",
                r"h_i = \sum_j a_{ji} W_V x_j = W_V x_i \quad \text{for } A = I",
            ),
            Step(
                "A convolution with one tap is the same.",
                r"y_i = \sum_{\delta = 0}^{0} W_\delta x_{i + \delta} = W_0 x_i",
            ),
        ),
        run=_running,
        mistakes=(
            Mistake(
                "The bias of attention is set to 1 everywhere, and a position is influenced by "
                "itself and its neighbours.",
                "A softmax ignores a number that is added to all scores, so that nothing changes "
                "at all. And a kernel of 1 has no neighbours.",
                _bias_of_one,
            ),
        ),
        points=(
            Point(1, "$A = I$, and how queries and keys achieve it"),
            Point(1, "a convolution of kernel 1"),
        ),
    ),
    Answer(
        Place("homework", "1.3(e)"),
        question="With positional encodings: give a case in which self-attention is a convolution "
        "of a kernel larger than 1.",
        answer=r"With one head for each tap. Head $\delta$ turns its query's position by $\delta$ "
        r"and so finds the key at $i + \delta$; sinusoids allow it, since one matrix turns every "
        r"position by $\delta$. With a large $\beta$ it reads that position alone, and "
        r"$W_O^\delta W_V^\delta$ is the tap.",
        derivation=(
            Step(
                r"Moving by $\delta$ rotates each pair of sine and cosine by a fixed angle.",
                r"r_{i + \delta} = R_\delta r_i",
            ),
            Step(
                r"Head $\delta$ asks with $R_\delta r_i$, over the keys $r_j$.",
                r"a^\delta_{ji} \to 1 \text{ for } j = i + \delta \quad \text{as } \beta \to "
                r"\infty",
            ),
            Step(
                "The heads add up in $W_O$.",
                r"y_i = \sum_\delta W_O^\delta W_V^\delta\, x_{i + \delta}",
            ),
        ),
        run=_three_taps,
        mistakes=(
            Mistake(
                "The input repeats its phrases, and attention to a whole phrase is a convolution "
                "over its length.",
                "That is an average with one and the same matrix for all positions of the phrase. "
                "A convolution has a matrix of its own for each offset, which takes a head for "
                "each.",
                _whole_phrase,
            ),
        ),
        points=(
            Point(1, "one head for each tap"),
            Point(1, r"head $\delta$ attends to position $i + \delta$ through the positions"),
            Point(1, r"the taps are $W_O^\delta W_V^\delta$, for a large $\beta$"),
        ),
    ),
)
