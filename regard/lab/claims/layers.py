"""What multi-head attention is made of, and which other layers it can be."""

import math
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.functional import jacobian

from regard import (
    Concatenated,
    MultiHeadAttention,
    Sinusoidal,
    Transformer,
    TransformerConfig,
    attend,
    weights,
)
from regard.lab.claims import plain
from regard.lab.claims.sample import alive, apart, influence, normal, orthonormal, parameters
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
from regard.model.baseline import Convolution
from regard.model.embedding import Tokens

D, H, L, S = 12, 3, 7, 11
"""Width, heads, and the lengths of two sequences."""
K = D // H
"""Width of a head."""
SAME, DIFFERENT = 1e-12, 1e-3
"""Below the first two results are one up to rounding, above the second they are two."""


def _multi_head() -> Finding:
    layer, x, source = alive(MultiHeadAttention(D, H), 0), normal(1, L, D), normal(2, S, D)
    peer = nn.MultiheadAttention(D, H, batch_first=True, dtype=torch.float64)
    parts = (layer.query, layer.key, layer.value)
    with torch.no_grad():
        peer.in_proj_weight.copy_(torch.cat([part.weight for part in parts]))
        peer.in_proj_bias.copy_(torch.cat([part.bias for part in parts]))
        peer.out_proj.load_state_dict(layer.output.state_dict())
        theirs = peer(x, source, source, need_weights=False)[0]
    by_hand = plain.multihead(layer, plain.array(x), plain.array(source))
    ours = layer(x, source)
    return Finding(
        holds(plain.apart(ours, by_hand) < SAME and apart(ours, theirs) < SAME),
        {
            "distance from plain arithmetic": plain.apart(ours, by_hand),
            "distance from torch.nn.MultiheadAttention": apart(ours, theirs),
        },
    )


def _output_projection() -> Finding:
    layer, x = alive(MultiHeadAttention(D, H), 0), normal(1, L, D)
    heads = plain.heads(layer, plain.array(x))
    stacked = plain.apart(layer(x), heads)
    projected = plain.apart(layer(x), plain.linear(layer.output, heads))

    def moved(part: MultiHeadAttention) -> int:
        """Columns of the output that change with the first head's values."""
        before = part(x)
        part.value.weight[:K] += 1
        return int(((part(x) - before).abs().amax(0) > SAME).sum())

    bare = alive(MultiHeadAttention(D, H), 0)
    bare.output.weight.copy_(torch.eye(D))
    mixed, apart_ = moved(layer), moved(bare)
    return Finding(
        corrected(taught=stacked < SAME, correct=projected < SAME and mixed == D and apart_ == K),
        {
            "distance from the stacked heads": stacked,
            "distance from the stacked heads times W_O": projected,
            "columns that one head reaches, with W_O": mixed,
            "columns that one head reaches, without": apart_,
        },
    )


def _stacked_heads() -> Finding:
    heads, own = 5, 3
    layer = alive(MultiHeadAttention(D, heads, key_width=2, value_width=own), 0)
    seen: list[tuple[int, ...]] = []
    layer.output.register_forward_pre_hook(lambda _, given: seen.append(tuple(given[0].shape)))
    out = layer(normal(1, L, D))
    (stacked,) = seen
    # The homework writes columns for tokens; here tokens are rows.
    return Finding(
        corrected(
            taught=stacked[-3:] == (heads, L, own),
            correct=stacked[-2:] == (L, heads * own) and len(stacked) == 3 and out.shape == (L, D),
        ),
        {
            "heads": heads,
            "numbers of one head": own,
            "tokens and numbers before W_O": list(stacked[-2:]),
            "tokens and numbers after W_O": list(out.shape),
        },
    )


def _grouped_convolution() -> Finding:
    x, layer = normal(0, 1, L, D), alive(MultiHeadAttention(D, H, bias=False), 1)
    depthwise, grouped = (alive(Convolution(D, 1, groups=n), 2) for n in (D, H))

    def read(part: nn.Module, columns: int) -> int:
        """How many input channels the first columns of the output depend on."""
        gradient = jacobian(lambda row: part(row)[..., :columns].sum(), x[:, :1])
        return int((gradient != 0).sum())

    queries = layer.query
    channels = {
        "one head's queries": read(queries, K),
        "one group, groups = heads": read(grouped, K),
        "one channel, groups = channels": read(depthwise, 1),
    }
    kernel = grouped.convolution.weight[..., 0]
    whole = apart(queries(x), grouped(x) - grouped.convolution.bias)
    queries.weight.copy_(torch.block_diag(*kernel.split(K)))
    blocks = apart(queries(x), grouped(x) - grouped.convolution.bias)
    return Finding(
        corrected(
            taught=channels["one head's queries"] == channels["one channel, groups = channels"],
            correct=list(channels.values()) == [D, K, 1] and blocks < SAME and whole > DIFFERENT,
        ),
        {f"input channels read by {name}": count for name, count in channels.items()}
        | {
            "a head against a group, any weights": whole,
            "a head against a group, block-diagonal weights": blocks,
        },
    )


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


def _best(head: Tensor, real: Tensor) -> float:
    """The error that the best matrix after a head leaves, at inner positions."""
    head, real = head[1:-1], real[1:-1]
    return apart(head @ torch.linalg.lstsq(head, real).solution, real)


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


def _hard_identity() -> Finding:
    value = normal(0, L, D)
    dense = nn.Linear(L, L, bias=False, dtype=torch.float64).requires_grad_(False)
    dense.weight.copy_(torch.eye(L))
    through = dense(value.T).T
    found = {}
    any_rows = normal(2, L, 2)  # more of them than dimensions, of unlike lengths
    for name, x in (("orthonormal rows", orthonormal(1, L, D)), ("any rows", any_rows)):
        found[name] = apart(attend(x, x, value, beta=math.inf), through)
    own = int((weights(any_rows, any_rows, beta=math.inf).diagonal() == 1).sum())
    return Finding(
        conditional(inside=found["orthonormal rows"] < SAME, outside=found["any rows"] < SAME),
        {f"distance from a dense identity, {name}": value for name, value in found.items()}
        | {f"of {L} rows of any kind, those that choose themselves": own},
    )


def _uniform_dense() -> Finding:
    query, key, value = normal(0, L, D), normal(1, S, D), normal(2, S, 5)
    dense = nn.Linear(S, L, bias=False, dtype=torch.float64).requires_grad_(False)
    dense.weight.fill_(1 / S)
    spread = dense(value.T).T
    betas = (0.0, 0.001, 0.1, 1 / math.sqrt(D), 100.0)
    errors = {beta: apart(attend(query, key, value, beta=beta), spread) for beta in betas}
    return Finding(
        conditional(inside=errors[0.0] < SAME, outside=errors[betas[3]] < SAME),
        {f"distance from the dense layer, β = {beta:.3g}": e for beta, e in errors.items()},
    )


def _subspaces() -> Finding:
    layer, x = alive(MultiHeadAttention(D, H), 0), normal(1, L, D)
    before = layer(x)
    heads, W = plain.heads(layer, plain.array(x)), plain.array(layer.output.weight)
    parts = [heads[:, h * K : (h + 1) * K] @ W[:, h * K : (h + 1) * K].T for h in range(H)]
    summed = plain.apart(before, np.sum(parts, 0) + plain.array(layer.output.bias))
    query, key = (
        part(x).unflatten(-1, (H, K)).transpose(0, 1) for part in (layer.query, layer.key)
    )
    looks = weights(query, key)
    alike = min(apart(looks[h], looks[g]) for h in range(H) for g in range(h))
    swap = torch.arange(D).view(H, K)[[2, 0, 1]].flatten()
    for part in (layer.query, layer.key, layer.value):
        part.weight.copy_(part.weight[swap])
        part.bias.copy_(part.bias[swap])
    layer.output.weight.copy_(layer.output.weight[:, swap])
    exchanged = apart(layer(x), before)
    return Finding(
        holds(summed < SAME and exchanged < SAME and alike > DIFFERENT),
        {
            "distance from the sum of each head's own part": summed,
            "change when the heads trade places": exchanged,
            "least difference between the weights of two heads": alike,
        },
    )


def _keras_example() -> Finding:
    heads, key_width, value_width = 2, 2, 3
    layer = MultiHeadAttention(D, heads, key_width=key_width, value_width=value_width)
    alive(layer, 0)
    joined, x = heads * value_width, normal(1, L, D)
    out = layer(x)
    by_hand = plain.apart(out, plain.multihead(layer, plain.array(x)))
    # Queries and keys, values, and W_O, each with its biases.
    counted = 2 * (D + 1) * heads * key_width + (D + 1) * joined + (joined + 1) * D
    return Finding(
        corrected(
            taught=out.shape[-1] == joined,
            correct=out.shape == x.shape and by_hand < SAME and parameters(layer) == counted,
        ),
        {
            "numbers side by side for each token": joined,
            "numbers for each token after W_O": out.shape[-1],
            "width of the input": D,
            "parameters": parameters(layer),
            "parameters, counted by hand": counted,
            "parameters of W_O": parameters(layer.output),
            "distance from plain arithmetic": by_hand,
        },
    )


def _added() -> Finding:
    ids = torch.arange(L)[None]
    plan = TransformerConfig(S, width=D, heads=H, feed_forward=17, encoder_layers=1)
    tokens = alive(Transformer(plan), 0).source
    assert isinstance(tokens, Tokens)
    x, r = math.sqrt(D) * tokens.table(ids[0]), Sinusoidal(D).encoding(ids[0], torch.float64)
    read = tokens(ids)[0]
    W = normal(1, 17, D)
    tied = apart((x + r) @ W.T, Concatenated(Sinusoidal(D))(x) @ torch.cat((W, W), 1).T)
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
    )


def _heads_and_filters() -> Finding:
    width, taps, counts = 48, 3, (1, 2, 4, 8, 16)
    divided = [parameters(MultiHeadAttention(width, n, bias=False)) for n in counts]
    fixed = [parameters(MultiHeadAttention(width, n, key_width=6, bias=False)) for n in counts]
    filters = [parameters(nn.Conv1d(width, n, taps, bias=False)) for n in counts]

    def grows(sizes: list[int]) -> bool:
        return [size / sizes[0] for size in sizes] == list(counts)

    return Finding(
        conditional(inside=grows(filters) and grows(fixed), outside=grows(divided)),
        {
            "parameters of 16 heads for each of one, width shared": divided[-1] / divided[0],
            "parameters of 16 heads for each of one, width of a head kept": fixed[-1] / fixed[0],
            "parameters of 16 filters for each of one": filters[-1] / filters[0],
        },
        (
            Table(
                "Parameters at width 48",
                ("number", "heads that share the width", "heads of 6", "filters of 3 taps"),
                tuple(zip(counts, divided, fixed, filters)),
            ),
        ),
    )


EXPERIMENTS: tuple[Experiment, ...] = (
    Experiment(
        26,
        "multi-head",
        "exercise sheet",
        "Multi-head attention is a few lines of PyTorch.",
        "The module is compared with plain numpy, head by head, and with torch's own layer, for "
        "seven queries over eleven pairs.",
        "All three give the same numbers.",
        _multi_head,
        (r"[\mathrm{head}_1; \ldots; \mathrm{head}_H] W_O",),
    ),
    Experiment(
        45,
        "output-projection",
        "homework",
        "The output of multi-head attention is what its heads give, stacked.",
        "The heads are computed in numpy and compared with the module's output before and after "
        "W_O. Then one head's values are changed, and the columns that notice are counted.",
        "The stack goes through a matrix W_O, which is what lets the heads mix; without it each "
        "head would have columns of its own.",
        _output_projection,
    ),
    Experiment(
        47,
        "stacked-heads",
        "homework",
        "Multi-head self-attention gives an array with an axis for the heads, d′×n×h.",
        "What arrives at the output projection is looked at, and what leaves it; the sizes are "
        "unlike each other.",
        "The heads stand one above the other, h·d′ numbers for each token, and W_O maps them to "
        "the width. No axis is left for heads.",
        _stacked_heads,
        (r"W_O \, [H_1; \ldots; H_h], \quad H_i \in \mathbb{R}^{d' \times n}",),
    ),
    Experiment(
        46,
        "grouped-convolution",
        "homework",
        "The convolution's analogue of heads has as many groups as input channels.",
        "The Jacobian counts the input channels that a head's queries, a group and a depthwise "
        "channel read. A head is compared with a group before and after its weights are made "
        "block-diagonal.",
        "That is depthwise: one channel each. The nearest has one group for each head, and even "
        "so a head reads all channels and a group only its own; block-diagonal weights make them "
        "agree.",
        _grouped_convolution,
    ),
    Experiment(
        49,
        "identity",
        "homework",
        "Self-attention over orthogonal rows is the identity, because the scores are I.",
        "Weights are computed over orthonormal rows for many β and compared with the closed form; "
        "hard attention is computed as well.",
        "softargmax(I) is not I. Its diagonal is e^β / (e^β + n − 1), and it reaches 1 only as β "
        "grows.",
        _identity,
        (r"A_{ii} = \frac{e^\beta}{e^\beta + n - 1}",),
    ),
    Experiment(
        50,
        "permutation",
        "homework",
        "Self-attention permutes its rows when all scores are zero.",
        "Five values are attended to with scores of zero, and with queries that are β times the "
        "key of the row that is wanted. The error is compared with its closed form.",
        "Scores of zero give every row the mean. Queries β k_π(i) over orthonormal keys permute, "
        "with an error that falls like e^−β.",
        _permutation,
        (r"q_i = \beta k_{\pi(i)}", r"1 - a = \frac{n - 1}{e^\beta + n - 1}"),
    ),
    Experiment(
        51,
        "running-linear",
        "homework",
        "Self-attention can act as a linear layer that runs over the rows, a 1×1 convolution.",
        "One head is given keys and queries that read positions alone, so that each row finds "
        "itself, and is compared with a 1×1 convolution; with random matrices it is compared with "
        "the same product.",
        "It does where A = I, and then H = W_V X; the weights of other matrices mix the rows.",
        _running_linear,
        (r"A = I \Rightarrow H = W_V X",),
    ),
    Experiment(
        52,
        "convolution-by-heads",
        "homework",
        "Self-attention can act as a convolution with a kernel wider than 1.",
        "Head δ turns the query's sinusoid by δ places and finds the row that stands there; W_O "
        "holds the taps. Its error against the real convolution is measured as β grows; one head "
        "is tried with the best of matrices behind it.",
        "It takes one head for each tap, positions, and a large β. One head does not do.",
        _convolution,
        (
            r"y_n = \sum_\delta W_O^\delta W_V^\delta x_{n + \delta}",
            r"r_{n+\delta} = R_\delta r_n",
        ),
    ),
    Experiment(
        52,
        "one-head-taps",
        "homework",
        "One head can have any taps.",
        "The Jacobian of one head's output by its input rows gives its taps, for a query that is "
        "drawn to the right and pushed from the left. The taps −1, 0, 1 are given to several "
        "heads.",
        "Every tap of one head is the same matrix times a weight that is never negative. A "
        "difference of neighbours takes two heads.",
        _one_head,
        (r"\partial y_n / \partial x_{n+\delta} = a_\delta W_V, \quad a_\delta \ge 0",),
    ),
    Experiment(
        41,
        "hard-identity",
        "homework",
        "Hard attention that keeps every value is a dense layer with identity weights and no bias.",
        "Hard self-attention over orthonormal and over random rows is compared with a dense layer "
        "over the rows whose matrix is I.",
        "It is, where each row's best key is its own, as among rows of one length. Among rows of "
        "any length a longer one may be chosen instead.",
        _hard_identity,
    ),
    Experiment(
        42,
        "uniform-dense",
        "homework",
        "Attention that spreads evenly is a dense layer whose weights are all 1/m.",
        "Attention over eleven pairs is compared with such a layer over the rows, at β = 0, at "
        "small β, at the usual 1/√d and at a large one.",
        "At β = 0 it is, and a small β comes near. At any other β the weights depend on what is "
        "read, which no dense layer's do.",
        _uniform_dense,
        (r"A_{ij} = 1/m",),
    ),
    Experiment(
        59,
        "subspaces",
        "homework",
        "Heads attend in different subspaces; their results are concatenated and projected.",
        "The output is put together in numpy from each head's own part of W_O. The heads' weights "
        "are compared, and the heads trade places with all that belongs to them.",
        "They do. Concatenating and projecting is the same as adding up what each head's part of "
        "W_O makes of its result, so that the order of the heads means nothing.",
        _subspaces,
        (r"[h_1; \ldots; h_H] W_O = \sum_i h_i W_O^i",),
    ),
    Experiment(
        93,
        "keras-example",
        "handout",
        "Multi-head attention concatenates its heads: two heads with values of 3 give 6 numbers.",
        "The handout's layer, with 2 heads, keys of 2 and values of 3, is computed in numpy, and "
        "its parameters are counted by hand.",
        "The 6 numbers go through W_O, which brings them back to the width of the input. Its "
        "parameters belong in the count.",
        _keras_example,
    ),
    Experiment(
        95,
        "added-positions-are-tied",
        "handout",
        "Positions are appended to the token vectors, as in the paper.",
        "What the paper's model reads is compared with the token vectors, appended and added to. "
        "A matrix over the sum is compared with the same matrix, twice, over both side by side.",
        "The paper adds. Adding is appending with tied weights, so nothing but the freedom of a "
        "second matrix is lost.",
        _added,
        (r"W(x + p) = [W \; W][x; p]",),
    ),
    Experiment(
        101,
        "heads-share-width",
        "handout",
        "The number of heads is like the number of filters of a convolution.",
        "Parameters are counted for 1 to 16 heads that share the width, for heads of a fixed "
        "width, and for filters.",
        "It is so only if each head keeps its width. In the usual layer heads share the width, and "
        "more of them cost nothing and see less each.",
        _heads_and_filters,
    ),
)
