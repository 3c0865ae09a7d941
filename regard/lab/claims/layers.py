"""Which other layers self-attention can express: identity, permutation, convolution."""

import math
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.functional import jacobian

from regard import Concatenated, MultiHeadAttention, Sinusoidal, attend, weights
from regard.lab.claims.sample import SAME, D, L, alive, apart, influence, normal, orthonormal
from regard.lab.experiment import Curve, Experiment, Finding, Plot, Table, conditional, corrected
from regard.lab.place import Place


def _identity() -> Finding:
    betas = (0.0, 0.5, 1.0, 2.0, 3.0, 5.0, 7.0, 10.0, 20.0, 40.0)
    sizes = (3, 5, 17)
    curves, rows, error = [], [], 0.0
    for n in sizes:
        x = orthonormal(n, n, 19)
        diagonal = [float(weights(x, x, beta=b).diagonal().mean()) for b in betas]
        formula = [math.exp(b) / (math.exp(b) + n - 1) for b in betas]
        error = max(error, *(abs(have - want) for have, want in zip(diagonal, formula)))
        curves.append(Curve(f"{n} rows", betas, diagonal))
        rows.append((n, *(round(diagonal[betas.index(b)], 5) for b in (1.0, 10.0))))
    x = orthonormal(3, 3, 19)
    at_one, at_ten = (float(weights(x, x, beta=b)[0, 0]) for b in (1.0, 10.0))
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
            **{f"error at β = {b:g}": e for b, e in zip(betas, errors) if b in (1, 5, 20)},
            "distance of the errors from the closed form": off,
        },
        plots=(
            Plot(
                "Attention as a permutation of 5 rows",
                "β",
                "largest error",
                (Curve("q = β k of the wanted row", betas, errors),),
                log_y=True,
            ),
        ),
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
    own = int((weights(any_rows, any_rows, beta=math.inf).diagonal() == 1).sum())
    return Finding(
        conditional(inside=errors["orthonormal rows"] < SAME, outside=errors["any rows"] < SAME),
        {f"distance from a dense identity, {name}": value for name, value in errors.items()}
        | {f"of {L} rows of any kind, those that choose themselves": own},
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
        conditional(
            inside=error < SAME and by_rows < SAME and beside < SAME, outside=mixing < SAME
        ),
        {
            "with A = I, distance from a 1×1 convolution": error,
            "with A = I, what one row takes from another": beside,
            "with any A, distance from W X": mixing,
        },
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
    placed = Concatenated(Sinusoidal(width))(x)
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
    )


def _one_head() -> Finding:
    n, middle, width = 31, 15, 64
    r = Sinusoidal(width).encoding(torch.arange(n), torch.float64)
    # A query that likes the right neighbour best and dislikes the left one.
    query = (r @ (2 * _rotation(1, width) - _rotation(-1, width)).T)[[middle]]
    values = normal(0, 3, 5)
    taps_osc = jacobian(lambda x: attend(query, r, x @ values)[0], normal(1, n, 3))
    shares = weights(query, r)[0]
    off = apart(taps_osc, torch.einsum("co,s->osc", values, shares))
    lowest = float(shares.min())
    difference = torch.tensor([[[-1.0, 0.0, 1.0]]], dtype=torch.float64)
    x = normal(2, n, 1)
    two = _convolving(difference, width, 100.0)(Concatenated(Sinusoidal(width))(x))
    error = apart(two[1:-1], x[2:] - x[:-2])
    return Finding(
        corrected(taught=lowest < 0, correct=lowest > 0 and off < SAME and error < SAME),
        {
            "lowest weight of a head": lowest,
            "distance of its taps from a_δ W_V": off,
            "several heads, error for the taps −1, 0, 1": error,
        },
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
        "Self-attention over orthonormal rows is the identity, because the scores are I.",
        "Weights are computed over orthonormal rows for many β and compared with the closed form; "
        "hard attention is computed as well.",
        _identity,
        (r"A_{ii} = \frac{e^\beta}{e^\beta + n - 1}",),
        correct="softargmax(I) is not I. Its diagonal is e^β / (e^β + n − 1), and it reaches 1 only as β "
        "grows.",
    ),
    Experiment(
        50,
        "permutation",
        Place("homework", "1.3(c)"),
        "Self-attention permutes its rows when all scores are zero.",
        "Five values are attended to with scores of zero, and with queries that are β times the "
        "key of the row that is wanted. The error is compared with its closed form.",
        _permutation,
        (r"q_i = \beta k_{\pi(i)}", r"1 - a = \frac{n - 1}{e^\beta + n - 1}"),
        correct="Scores of zero give every row the mean. Queries β k_π(i) over orthonormal keys permute, "
        "with an error that falls like e^−β.",
    ),
    Experiment(
        41,
        "hard-identity",
        Place("homework", "1.1(c)"),
        "Hard attention that keeps every value is a dense layer with identity weights and no bias.",
        "Hard self-attention over orthonormal and over random rows is compared with a dense layer "
        "over the rows whose matrix is I.",
        _hard_identity,
        correct="It is, where each row's best key is its own, as among rows of one length. Among rows of "
        "any length a longer one may be chosen instead.",
    ),
    Experiment(
        51,
        "running-linear",
        Place("homework", "1.3(d)"),
        "Self-attention can act as a linear layer that runs over the rows, a 1×1 convolution.",
        "One head is given keys and queries that read positions alone, so that each row finds "
        "itself, and is compared with a 1×1 convolution; with random matrices it is compared with "
        "the same product.",
        _running_linear,
        (r"A = I \Rightarrow H = W_V X",),
        correct="It can, where A = I, and then H = W_V X. Any other weights mix the rows.",
    ),
    Experiment(
        52,
        "convolution-by-heads",
        Place("homework", "1.3(e)"),
        "Self-attention can act as a convolution with a kernel wider than 1.",
        "Head δ rotates the query's sinusoid by δ positions and attends to the row there; W_O "
        "holds the taps. The error against the real convolution is measured as β grows; one head "
        "is tried with the best matrix after it.",
        _convolution,
        (
            r"y_n = \sum_\delta W_O^\delta W_V^\delta x_{n + \delta}",
            r"r_{n+\delta} = R_\delta r_n",
        ),
        correct="It can, with one head for each tap, positions, and a large β. One head alone cannot.",
    ),
    Experiment(
        52,
        "one-head-taps",
        Place("homework", "1.3(e)"),
        "One head can have any taps.",
        "The Jacobian of one head's output gives its taps, for a query that is drawn to the right "
        "and pushed from the left. The taps −1, 0, 1 are given to several heads.",
        _one_head,
        (r"\partial y_n / \partial x_{n+\delta} = a_\delta W_V, \quad a_\delta \ge 0",),
        kind="added",
        correct="Every tap of one head is the same matrix times a weight that is never negative. A "
        "difference of neighbours takes two heads.",
    ),
)
