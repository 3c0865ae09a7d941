"""Which other layers self-attention can express: identity, permutation, convolution."""

import math
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.functional import jacobian

from regard import (
    Concatenated,
    MultiHeadAttention,
    SinusoidalPositions,
    attend,
    attention_weights,
    documents,
)
from regard.lab.claims.sample import SAME, D, L, alive, apart, influence, normal, orthonormal
from regard.lab.experiment import (
    Curve,
    Experiment,
    Finding,
    Plot,
    Table,
    conditional,
    corrected,
    holds,
)
from regard.lab.numbers import figure, within
from regard.lab.place import Place


def _identity() -> Finding:
    betas = (0.0, 0.5, 1.0, 2.0, 3.0, 5.0, 7.0, 10.0, 20.0, 40.0)
    sizes = (3, 5, 17)
    curves, rows, error = [], [], 0.0
    for n in sizes:
        x = orthonormal(n, n, 19)
        diagonal = [float(attention_weights(x, x, beta=b).diagonal().mean()) for b in betas]
        formula = [math.exp(b) / (math.exp(b) + n - 1) for b in betas]
        error = max(error, *(abs(have - want) for have, want in zip(diagonal, formula)))
        curves.append(Curve(f"{n} rows", betas, diagonal))
        rows.append((n, *(round(diagonal[betas.index(b)], 5) for b in (1.0, 10.0))))
    x = orthonormal(3, 3, 19)
    at_one, at_ten = (float(attention_weights(x, x, beta=b)[0, 0]) for b in (1.0, 10.0))
    hard = apart(attend(x, x, x, beta=math.inf), x)
    return Finding(
        corrected(
            taught=abs(at_one - 1) < SAME,
            correct=error < SAME and hard < SAME and at_ten > 0.9999,
        ),
        {
            "diagonal of softargmax(I), 3 rows, β = 1": at_one,
            "diagonal, 3 rows, β = 10": at_ten,
            "distance from e^β / (e^β + n − 1)": error,
            "distance of hard attention's output from its input": hard,
        },
        (Table("Diagonal", ("rows", "β = 1", "β = 10"), tuple(rows)),),
        (Plot("How close self-attention is to the identity", "β", "diagonal", tuple(curves)),),
        conclusion="The scores are I, but softargmax(I) is not: its diagonal is "
        f"{figure(at_one, 3)} for three rows at β = 1 and {figure(at_ten, 5)} at β = 10, by e^β / "
        f"(e^β + n − 1) {within(error)}. Only as β grows does it become I; at β = ∞ the output is "
        f"the input {within(hard)}.",
    )


def _permutation() -> Finding:
    n, to = 5, torch.tensor([3, 0, 4, 2, 1])
    key, value = orthonormal(0, n, n), normal(1, n, 7)
    wanted = value[to]
    flat = attend(torch.zeros(n, n, dtype=torch.float64), key, value)
    spread = (wanted - (value.sum(0) - wanted) / (n - 1)).norm(dim=-1)
    betas = (1.0, 2.0, 5.0, 10.0, 20.0, 30.0)
    errors, off = [], 0.0
    for beta in betas:
        error = (attend(beta * key[to], key, value, beta=1.0) - wanted).norm(dim=-1)
        # All of the error is the weight that falls on the others.
        off = max(off, apart(error, (n - 1) / (math.exp(beta) + n - 1) * spread))
        errors.append(float(error.max()))
    mean = apart(flat, value.mean(0).expand_as(flat))
    return Finding(
        corrected(
            taught=apart(flat, wanted) < SAME,
            correct=mean < SAME and off < SAME and errors[betas.index(20.0)] < 1e-7,
        ),
        {
            "scores of zero, distance from the permutation": apart(flat, wanted),
            "scores of zero, distance from the mean": mean,
            **{
                f"largest ‖c − v‖ of a row, β = {b:g}": e
                for b, e in zip(betas, errors)
                if b in (1, 5, 20)
            },
            "distance of the errors from the closed form": off,
        },
        plots=(
            Plot(
                "Attention as a permutation of 5 rows",
                "β",
                "largest ‖c − v‖ of a row",
                (Curve("q = β k of the wanted row", betas, errors),),
                log_y=True,
            ),
        ),
        conclusion=f"Scores of zero give every row the mean of all values, {within(mean)}, and not "
        f"0: from the permutation it differs by {figure(apart(flat, wanted), 2)}. Queries β k_π(i) "
        f"over orthonormal keys permute, with an error ‖c − v‖ of {figure(errors[0], 2)} at β = 1, "
        f"{figure(errors[2], 2)} at 5 and {figure(errors[4], 2)} at 20.",
    )


def _hard_identity() -> Finding:
    value = normal(0, L, D)
    dense = nn.Linear(L, L, bias=False, dtype=torch.float64).requires_grad_(False)
    dense.weight.copy_(torch.eye(L))
    through = dense(value.T).T
    errors = {}
    any_rows = normal(2, L, 2)  # more of them than dimensions, of unlike lengths
    for name, x in (("orthonormal rows", orthonormal(1, L, D)), ("any rows", any_rows)):
        errors[name] = apart(attend(x, x, value, beta=math.inf), through)
    own = int((attention_weights(any_rows, any_rows, beta=math.inf).diagonal() == 1).sum())
    return Finding(
        holds(errors["orthonormal rows"] < SAME and apart(through, value) < SAME),
        {f"distance from a dense identity, {name}": value for name, value in errors.items()}
        | {f"of {L} rows of any kind, those that choose themselves": own},
        conclusion="A linear layer with weights I and no bias gives the values back "
        f"{within(apart(through, value))}, and hard self-attention does the same over orthonormal "
        f"rows, {within(errors['orthonormal rows'])}. Worth adding: each row has to be its own "
        f"best key, as {own} of {L} rows of unequal length are.",
    )


def _running_linear() -> Finding:
    x, r = normal(0, L, D), orthonormal(1, L, L)
    seen = torch.cat((x, r), -1)  # what it says, and where it stands
    layer = alive(
        MultiHeadAttention(D + L, 1, key_width=L, value_width=D, output_width=D, bias=False), 2
    )
    place = torch.eye(L, D + L, dtype=torch.float64).roll(D, 1)
    says = torch.eye(D, D + L, dtype=torch.float64)
    mixing = apart(layer(seen), seen @ (layer.output.weight @ layer.value.weight).T)
    layer.query.weight.copy_(40 * math.sqrt(L) * place)
    layer.key.weight.copy_(place)
    layer.value.weight.copy_(says)
    kernel = layer.output.weight  # W_V, here with W_O in it
    convolution = F.conv1d(x.T[None], kernel[..., None])[0].T
    error = apart(layer(seen), convolution)
    by_rows = max(apart(layer(seen)[n], kernel @ x[n]) for n in range(L))
    touched = influence(lambda x: layer(torch.cat((x, r[None]), -1)), x[None])
    beside = float((touched - touched.diagonal().diag()).max())
    return Finding(
        holds(max(error, by_rows, beside) < SAME and mixing > SAME),
        {
            "with A = I, distance from a 1×1 convolution": error,
            "with A = I, what one row takes from another": beside,
            "with any A, distance from W X": mixing,
        },
        conclusion="Where each row attends to itself alone, A = I, the layer is H = W_V X, a 1×1 "
        f"convolution {within(error)}, and a row takes {figure(beside)} from another. With other "
        f"weights the rows mix, and it differs from that product by {figure(mixing, 2)}.",
    )


def _bias_of_one() -> Finding:
    x = normal(0, L, D)
    layer = alive(MultiHeadAttention(D, 1), 1)
    W, b = layer.output.weight @ layer.value.weight, layer.output.bias
    query, key = layer.query(x), layer.key(x)
    ones = torch.ones(L, L, dtype=torch.float64)
    # One reading: 1 is added to every score.
    unchanged = apart(attention_weights(query, key, bias=ones), attention_weights(query, key))
    # The other: the biases of the projections are 1.
    for part in (layer.query, layer.key, layer.value, layer.output):
        part.bias.fill_(1.0)
    convolution = x @ W.T + layer.output.weight @ layer.value.bias + b
    unlike = apart(layer(x), convolution)
    kernel = influence(lambda rows: rows @ W.T, x[None])
    beside = float((kernel - kernel.diagonal().diag()).max())
    own = apart(layer.output(layer.value(x)), convolution)  # with A = I
    return Finding(
        corrected(
            taught=unlike < SAME or unchanged > SAME,
            correct=unchanged < SAME and beside == 0 and own < SAME,
        ),
        {
            "1 added to all scores: change of the weights": unchanged,
            "biases of 1: difference from a 1×1 convolution": unlike,
            "A = I: difference from a 1×1 convolution": own,
            "what a kernel of size 1 takes from a neighbour": beside,
        },
        conclusion=f"A constant added to all scores changes the weights by {figure(unchanged)}: a "
        "softmax ignores it. With biases of 1 in the projections the layer differs from a 1×1 "
        f"convolution by {figure(unlike, 2)}. And such a convolution takes {figure(beside)} from a "
        f"neighbour: it needs A = I (difference {figure(own)}).",
    )


def _rotation(shift: int, width: int, base: float = 10000) -> Tensor:
    """The matrix R for which R r_n = r_{n + shift}, whatever n is."""
    pairs = []
    for i in range(0, width, 2):
        angle = shift / base ** (i / width)
        cos, sin = math.cos(angle), math.sin(angle)
        pairs.append(torch.tensor([[cos, sin], [-sin, cos]], dtype=torch.float64))
    return torch.block_diag(*pairs)


def _convolving(kernel: Tensor, width: int, beta: float) -> MultiHeadAttention:
    """Attention over [x; r] with one head for each tap of the kernel (O, C, k).

    Head t turns its query's position by t − k // 2 and finds the key that stands there; its part
    of W_O is the tap.
    """
    out, channels, taps = kernel.shape
    layer = MultiHeadAttention(
        channels + width,
        taps,
        key_width=width,
        value_width=channels,
        output_width=out,
        beta=beta,
        bias=False,
    ).double()
    layer.requires_grad_(False)
    place = torch.eye(width, channels + width, dtype=torch.float64).roll(channels, 1)
    says = torch.eye(channels, channels + width, dtype=torch.float64)
    turned = [_rotation(t - taps // 2, width) @ place for t in range(taps)]
    layer.query.weight.copy_(torch.cat(turned))
    layer.key.weight.copy_(place.repeat(taps, 1))
    layer.value.weight.copy_(says.repeat(taps, 1))
    layer.output.weight.copy_(torch.cat(kernel.unbind(-1), 1))
    return layer


def _convolution() -> Finding:
    n, width = 31, 64
    x, kernel = normal(0, n, 3), normal(1, 5, 3, 3)
    real = F.conv1d(x.T[None], kernel, padding=1)[0].T
    placed = Concatenated(SinusoidalPositions(width))(x)
    betas = (1.0, 2.0, 5.0, 10.0, 15.0, 20.0, 30.0, 50.0, 100.0)
    errors = [apart(_convolving(kernel, width, beta)(placed)[1:-1], real[1:-1]) for beta in betas]
    # The nearest neighbour's score is lower by this, and its weight by the exponential of it.
    gap = sum(1 - math.cos(10000 ** (-i / width)) for i in range(0, width, 2))
    expected = [math.exp(-beta * gap) for beta in betas]
    one_head = min(_best(attend(placed[:, 3:], placed[:, 3:], x, beta=b), real) for b in betas)
    at = dict(zip(betas, errors))
    return Finding(
        conditional(
            inside=at[100.0] < SAME and all(b < a for a, b in pairwise(errors[:6])),
            outside=one_head < SAME,
        ),
        {
            "error of three heads at β = 1": at[1.0],
            "error of three heads at β = 10": at[10.0],
            "error of three heads at β = 100": at[100.0],
            "error of one head, with the best β and the best matrix behind it": one_head,
            "score by which a position leads its neighbour, at β = 1": gap,
        },
        plots=(
            Plot(
                "Three heads against the convolution of three taps",
                "β",
                "largest error, inner positions",
                (
                    Curve("measured", betas, errors),
                    Curve("weight of a neighbour, exp(−β gap)", betas, expected),
                ),
                log_x=True,
                log_y=True,
            ),
        ),
        conclusion="With one head for each tap, positions that the heads rotate, and W_O holding "
        f"the taps, the error is {figure(at[1.0], 2)} at β = 1, {figure(at[10.0], 2)} at 10 and "
        f"{figure(at[100.0], 2)} at 100. One head, with the best β and the best matrix after it, "
        f"leaves {figure(one_head, 2)}.",
    )


def _whole_phrase() -> Finding:
    phrase, phrases = 4, 5
    n = phrase * phrases
    x, kernel = normal(0, n, 3), normal(1, 5, 3, phrase)
    # Every token attends to its whole phrase, evenly, as the answer has it.
    within_phrase = documents(torch.arange(n) // phrase)

    def attended(x: Tensor) -> Tensor:
        return attend(x, x, x, mask=within_phrase, beta=0.0)

    def convolved(x: Tensor) -> Tensor:
        return F.conv1d(F.pad(x.T, (1, 2))[None], kernel)[0].T

    shuffled = x.unflatten(0, (phrases, phrase))[:, [2, 0, 3, 1]].flatten(0, 1)
    order = [apart(f(shuffled)[::phrase], f(x)[::phrase]) for f in (attended, convolved)]
    rows = attended(x).unflatten(0, (phrases, phrase))
    alike = float((rows.amax(1) - rows.amin(1)).max())
    left = _best(attended(x), convolved(x))
    taps = _convolving(kernel[..., :3], 64, 100.0)(Concatenated(SinusoidalPositions(64))(x))
    real = F.conv1d(x.T[None], kernel[..., :3], padding=1)[0].T
    return Finding(
        corrected(
            taught=left < SAME,
            correct=max(order[0], alike) < SAME
            and order[1] > SAME
            and apart(taps[1:-1], real[1:-1]) < SAME,
        ),
        {
            "attention to the phrase and a convolution, least error with any matrix after it": left,
            "tokens within the phrases shuffled, change: attention": order[0],
            "tokens within the phrases shuffled, change: convolution": order[1],
            "spread of attention's outputs within a phrase": alike,
            "heads at fixed offsets and a convolution, error": apart(taps[1:-1], real[1:-1]),
        },
        conclusion="Attending to a whole phrase averages its content: all tokens of a phrase get "
        f"the same output ({within(alike)}), and their order makes a difference of "
        f"{figure(order[0])}, in a convolution of {figure(order[1], 2)}. With the best matrix "
        f"after it, it misses the convolution by {figure(left, 2)}. Heads at fixed offsets, found "
        f"by positions, match one {within(apart(taps[1:-1], real[1:-1]))}.",
    )


def _one_head() -> Finding:
    n, middle, width = 31, 15, 64
    r = SinusoidalPositions(width).encoding(torch.arange(n), torch.float64)
    # A query that likes the right neighbour best and dislikes the left one.
    query = (r @ (2 * _rotation(1, width) - _rotation(-1, width)).T)[[middle]]
    values = normal(0, 3, 5)
    taps_osc = jacobian(lambda x: attend(query, r, x @ values)[0], normal(1, n, 3))
    shares = attention_weights(query, r)[0]
    off = apart(taps_osc, torch.einsum("co,s->osc", values, shares))
    lowest = float(shares.min())
    difference = torch.tensor([[[-1.0, 0.0, 1.0]]], dtype=torch.float64)
    x = normal(2, n, 1)
    two = _convolving(difference, width, 100.0)(Concatenated(SinusoidalPositions(width))(x))
    error = apart(two[1:-1], x[2:] - x[:-2])
    return Finding(
        holds(lowest > 0 and max(off, error) < SAME),
        {
            "lowest weight of a head": lowest,
            "distance of its taps from a_δ W_V": off,
            "several heads, error for the taps −1, 0, 1": error,
        },
        conclusion=f"Every tap of one head is its matrix W_V times a weight ({within(off)}), and "
        f"no weight is below {figure(lowest, 2)}: a difference of neighbours, with the taps −1, 0 "
        f"and 1, is out of reach for it. Several heads give it {within(error)}.",
    )


def _best(head: Tensor, real: Tensor) -> float:
    """The error that the best matrix after a head leaves, at inner positions."""
    head, real = head[1:-1], real[1:-1]
    return apart(head @ torch.linalg.lstsq(head, real).solution, real)


EXPERIMENTS: tuple[Experiment, ...] = (
    Experiment(
        49,
        "identity",
        Place("homework", "1.3(c)"),
        "With X = Q = K = V orthogonal, the product of X with its transpose is the identity; so A "
        "is the identity, and H = V A gives the input back.",
        "Weights are computed over orthonormal rows for many β and compared with the closed form; "
        "hard attention is computed as well.",
        _identity,
        (r"A_{ii} = \frac{e^\beta}{e^\beta + n - 1}",),
    ),
    Experiment(
        50,
        "permutation",
        Place("homework", "1.3(c)"),
        "The layer is a permutation when all scores are zero: then the weighted average of the "
        "tokens is zero, and the output a permutation of the input.",
        "Five values are attended to with scores of zero, and with queries that are β times the "
        "key of the row that is wanted. The error is compared with its closed form.",
        _permutation,
        (r"q_i = \beta k_{\pi(i)}", r"1 - a = \frac{n - 1}{e^\beta + n - 1}"),
    ),
    Experiment(
        41,
        "hard-identity",
        Place("homework", "1.1(c)"),
        "A fully connected architecture preserves the values by a linear layer without bias, "
        "whose weights are the identity matrix and whose input is the value.",
        "Hard self-attention over orthonormal and over random rows is compared with a dense layer "
        "over the rows whose matrix is I.",
        _hard_identity,
    ),
    Experiment(
        51,
        "running-linear",
        Place("homework", "1.3(d)"),
        "A self-attention layer acts as a running linear layer where it behaves like a "
        "convolution with a kernel of size 1; that is the name asked for.",
        "One head is given keys and queries that read positions alone, so that each row finds "
        "itself, and is compared with a 1×1 convolution; with random matrices it is compared with "
        "the same product.",
        _running_linear,
        (r"A = I \Rightarrow H = W_V X",),
    ),
    Experiment(
        51,
        "bias-of-one",
        Place("homework", "1.3(d)"),
        "The reason given: with the biases of attention all set to 1, it is influenced only by "
        "immediate neighbours and itself, which makes it a convolution of kernel 1.",
        "1 is added to all scores, or all biases of the projections are set to 1; the result is "
        "compared with a 1×1 convolution, whose Jacobian says what it takes from neighbours.",
        _bias_of_one,
        (r"\operatorname{softmax}(s + c \mathbf{1}) = \operatorname{softmax}(s)",),
    ),
    Experiment(
        52,
        "convolution-by-heads",
        Place("homework", "1.3(e)"),
        "Show a situation in which self-attention, with positional encodings, behaves like a "
        "convolution with a kernel larger than 1.",
        "Head δ rotates the query's sinusoid by δ positions and attends to the row there; W_O "
        "holds the taps. The error against the real convolution is measured as β grows; one head "
        "is tried with the best matrix after it.",
        _convolution,
        (
            r"y_n = \sum_\delta W_O^\delta W_V^\delta x_{n + \delta}",
            r"r_{n+\delta} = R_\delta r_n",
        ),
        kind="asked",
    ),
    Experiment(
        52,
        "whole-phrase",
        Place("homework", "1.3(e)"),
        "The answer given: with repeating phrases, and positions relative to a phrase's start, "
        "the layer can attend to the entire phrase, which is like a kernel that covers it.",
        "Every token attends evenly to the phrase it stands in. The result is compared with a "
        "convolution as long as a phrase, with the best matrix after it, and both with the tokens "
        "shuffled within phrases.",
        _whole_phrase,
    ),
    Experiment(
        52,
        "one-head-taps",
        Place("homework", "1.3(e)"),
        "Why it takes several heads: all taps of one head are the same matrix times weights that "
        "are never negative.",
        "The Jacobian of one head's output gives its taps, for a query that is drawn to the right "
        "and pushed from the left. The taps −1, 0, 1 are given to several heads.",
        _one_head,
        (r"\partial y_n / \partial x_{n+\delta} = a_\delta W_V, \quad a_\delta \ge 0",),
        kind="added",
    ),
)
