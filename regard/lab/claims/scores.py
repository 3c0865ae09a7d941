"""Scores: how well a key fits a query, why that is scaled, and what is done with it.

s_ij = β q_i·k_j        β = 1/√d keeps the variance of the scores of random vectors at 1
a_i  = softmax(s_i)
c_i  = Σ_j a_ij v_j     a weighted mean of the values, whoever the queries and keys are
"""

import math
from collections.abc import Callable, Sequence
from itertools import combinations

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from regard import MultiHeadAttention, attend, weights
from regard.attention.score import Additive, Dot, General, ScaledDot, Score
from regard.lab.claims import plain
from regard.lab.claims.sample import alive, apart, normal, parameters
from regard.lab.experiment import Curve, Experiment, Finding, Plot, Table, corrected, holds
from regard.model.baseline import Dense

SAME, DIFFERENT = 1e-12, 1e-3
"""Below the first two results are one up to rounding, above the second they are two."""

WIDTHS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


def scale_and_gradient() -> Finding:
    keys = 16
    unscaled: list[float] = []
    scaled: list[float] = []
    for d in WIDTHS:
        query, key = normal(0, 1, 128, d), normal(1, 64, keys, d)
        for slopes, beta in ((unscaled, 1.0), (scaled, None)):
            a = weights(query, key, beta=beta)
            slopes.append(float((a * (1 - a)).mean()))
    uniform = (1 / keys) * (1 - 1 / keys)
    nudge = torch.zeros(1, keys, dtype=torch.float64, requires_grad=True)
    first = weights(query[0, :1], key[0], bias=nudge)[0, 0]
    (gradient,) = torch.autograd.grad(first, nudge)
    formula = apart(gradient[0, 0], (first * (1 - first)).detach())
    return Finding(
        holds(
            unscaled[-1] < 0.2 * scaled[-1]
            and unscaled[-1] < 0.2 * unscaled[0]
            and min(scaled) > 0.8 * uniform
            and formula < SAME
        ),
        {
            "mean a(1-a), unscaled, d = 512": unscaled[-1],
            "mean a(1-a), scaled, d = 512": scaled[-1],
            "most there can be, all weights alike": uniform,
            "a(1-a) less what autograd says": formula,
        },
        plots=(
            Plot(
                "slope of the softmax, 16 keys",
                "d",
                "mean a(1-a)",
                (_curve("scaled by 1/√d", WIDTHS, scaled), _curve("unscaled", WIDTHS, unscaled)),
                log_x=True,
                log_y=True,
            ),
        ),
    )


def score_variance() -> Finding:
    draws = 2000
    measured, scaled, betas = [], [], []
    for d in WIDTHS:
        query, key = normal(0, draws, 1, d), normal(1, draws, 2, d)
        scores = Dot()(query, key)
        measured.append(float(scores.var()))
        # The scale that attention uses, read off its weights: log a₁/a₂ = β (s₁ - s₂).
        a = weights(query[:1], key[:1])[0, 0]
        difference = scores[0, 0, 0] - scores[0, 0, 1]
        betas.append(float((a[0].log() - a[1].log()) / difference))
        scaled.append(betas[-1] ** 2 * measured[-1])
    close = all(abs(variance / d - 1) < 0.1 for d, variance in zip(WIDTHS, measured))
    return Finding(
        holds(close and all(abs(variance - 1) < 0.1 for variance in scaled)),
        {
            "variance of q·k, d = 512": measured[-1],
            "variance of β q·k, d = 512": scaled[-1],
            "β that attend uses, d = 512": betas[-1],
            "1/√512": 1 / math.sqrt(512),
        },
        plots=(
            Plot(
                "variance of the scores of random vectors",
                "d",
                "variance",
                (
                    _curve("q·k", WIDTHS, measured),
                    _curve("d", WIDTHS, WIDTHS),
                    _curve("β q·k", WIDTHS, scaled),
                ),
                log_x=True,
                log_y=True,
            ),
        ),
    )


def other_scores() -> Finding:
    query, key, value = normal(0, 5, 6), normal(1, 7, 6), normal(2, 7, 3)
    found, fits = {}, True
    for name, score in _scores(6).items():
        projected = score.project(query, key)
        shares = weights(
            projected.query, projected.key, beta=projected.beta, bias=projected.bias
        ).detach()
        context = score.attend(query, key, value)
        by_hand = plain.softmax(plain.array(score(query, key)))
        fits &= plain.apart(shares, by_hand) < SAME and apart(context, shares @ value) < SAME
        fits &= apart(shares.sum(-1), torch.ones(5)) < SAME and bool((shares > 0).all())
        found[name] = shares
    nearest = min(apart(a, b) for a, b in combinations(found.values(), 2))
    return Finding(
        holds(fits and nearest > DIFFERENT),
        {"each gives weights and means": fits, "least difference between two": nearest},
        tables=(
            Table(
                "weights of the first query",
                ("score", *(f"k{n + 1}" for n in range(7)), "parameters"),
                tuple(
                    (name, *found[name][0].tolist(), parameters(score))
                    for name, score in _scores(6).items()
                ),
            ),
        ),
    )


def general_is_dot() -> Finding:
    query, key, value = normal(0, 5, 6), normal(1, 7, 6), normal(2, 7, 3)
    general = General(6, 6).double().requires_grad_(False)
    one = torch.eye(6, dtype=torch.float64)
    general.weight.copy_(one)
    dot = attend(query, key, value, beta=1.0)
    identity = apart(general.attend(query, key, value), dot)
    general.weight.copy_(one / math.sqrt(6))
    scaled = apart(general.attend(query, key, value), attend(query, key, value))
    general.weight.copy_(normal(3, 6, 6))
    random = apart(general.attend(query, key, value), dot)
    # With W = W_Q W_Kᵀ it is a dot product of projected queries and keys: what a head does.
    w_q, w_k = normal(4, 6, 2), normal(5, 6, 2)
    general.weight.copy_(w_q @ w_k.T)
    head = apart(general.attend(query, key, value), attend(query @ w_q, key @ w_k, value, beta=1.0))
    return Finding(
        holds(max(identity, scaled, head) < SAME and random > DIFFERENT),
        {
            "W = I, and the dot product": identity,
            "W = I/√d, and the scaled one": scaled,
            "W of two projections, and a head's": head,
            "W random, and the dot product": random,
        },
    )


def score_indices() -> Finding:
    query, key = normal(0, 5, 3), normal(1, 5, 3)
    # Up to a constant in each row, the logarithms of the weights are the scores.
    found = _centred(weights(query, key, beta=1.0).log())
    straight = torch.tensor([[float(q @ k) for k in key] for q in query], dtype=torch.float64)
    turned = straight.T  # row i holds q_j·k_i
    taught, correct = apart(found, _centred(turned)), apart(found, _centred(straight))
    fewer = weights(query[:2], key)
    return Finding(
        corrected(taught < SAME, correct < SAME and fewer.shape == (2, 5)),
        {
            "scores less qⱼ·kᵢ": taught,
            "scores less qᵢ·kⱼ": correct,
            "two queries, five keys": list(fewer.shape),
        },
    )


def value_product() -> Finding:
    L_q, L_k, d_k = 7, 11, 8
    widths = (1, 2, 4, 8, 16, 32)

    def executed(d_v: int) -> int:
        given = normal(0, L_q, d_k), normal(1, L_k, d_k), normal(2, L_k, d_v)
        return _multiplications(lambda: attend(*given, backend="formula"))

    counts = [executed(d_v) for d_v in widths]
    taught = [L_q * L_k * d_k for _ in widths]
    correct = [L_q * L_k * (d_k + d_v) for d_v in widths]
    return Finding(
        corrected(counts == taught, counts == correct),
        {
            "executed, all 8 wide": executed(8),
            "by queries × keys × width of keys": L_q * L_k * d_k,
            "by queries × keys × both widths": L_q * L_k * (d_k + 8),
        },
        plots=(
            Plot(
                "multiplications of 7 queries over 11 keys of width 8",
                "width of the values",
                "multiplications",
                (
                    _curve("executed", widths, counts),
                    _curve("L_q L_k (d_k + d_v)", widths, correct),
                    _curve("L_q L_k d_k", widths, taught),
                ),
            ),
        ),
    )


def beside_a_dense_layer() -> Finding:
    L, widths = 5, (2, 4, 8, 16, 32, 64)

    def ratio(d: int) -> float:
        x, layer = normal(0, 1, L, d), Dense(d, L).double()
        dense = _multiplications(lambda: layer(x))
        attention = _multiplications(lambda: attend(x, x, x, backend="formula"))
        return dense / attention

    ratios = [ratio(d) for d in widths]
    return Finding(
        corrected(
            all(0.5 <= r <= 2 for r in ratios),
            all(abs(r / (d / 2) - 1) < 0.01 for r, d in zip(ratios, widths)),
        ),
        {
            "dense over attention, d = 64": ratios[-1],
            "the same, of the scores alone": 2 * ratios[-1],
        },
        plots=(
            Plot(
                "multiplications of a dense layer over those of attention",
                "d",
                "ratio",
                (
                    _curve("executed", widths, ratios),
                    _curve("d/2", widths, [d / 2 for d in widths]),
                    _curve("similar", widths, [1 for _ in widths]),
                ),
                log_x=True,
                log_y=True,
            ),
        ),
    )


def no_parameters() -> Finding:
    layer = MultiHeadAttention(12, 3)
    projections = sum(map(parameters, (layer.query, layer.key, layer.value, layer.output)))
    own = parameters(layer.core)
    # Nothing to learn also means nothing to remember: the same call gives the same.
    query, key, value = normal(0, 5, 4), normal(1, 7, 4), normal(2, 7, 3)
    by_hand = plain.softmax(plain.array(query @ key.T) / 2) @ plain.array(value)
    gap = plain.apart(attend(query, key, value), by_hand)
    return Finding(
        holds(own == 0 and projections == parameters(layer) and gap < SAME),
        {
            "parameters of the operation": own,
            "parameters of the projections around it": projections,
            "attend less the formula": gap,
        },
        tables=(
            Table(
                "parameters of a score of width 6",
                ("score", "parameters"),
                tuple((name, parameters(score)) for name, score in _scores(6).items()),
            ),
        ),
    )


def argument_order() -> Finding:
    x, layer = normal(0, 1, 7, 6), alive(MultiHeadAttention(6, 1, bias=False), 1)
    layer.output.weight.copy_(torch.eye(6))
    query, key, value = layer.query(x), layer.key(x), layer.value(x)
    meant = plain.multihead(layer, plain.array(x[0]))[None]
    taught, correct = (
        plain.apart(attend(*given), meant) for given in ((value, query, key), (query, key, value))
    )
    return Finding(
        corrected(taught < SAME, correct < SAME and plain.apart(layer(x), meant) < SAME),
        {
            "values, queries, keys: off by": taught,
            "queries, keys, values: off by": correct,
        },
    )


def self_is_cross() -> Finding:
    layer, x, source = alive(MultiHeadAttention(12, 3), 0), normal(1, 1, 7, 12), normal(2, 1, 7, 12)
    by_self, by_cross, other = layer(x), layer(x, x), layer(x, source)
    by_hand = plain.multihead(layer, plain.array(x[0]), plain.array(source[0]))
    return Finding(
        holds(
            apart(by_self, by_cross) < SAME
            and plain.apart(other[0], by_hand) < SAME
            and apart(by_self, other) > DIFFERENT
        ),
        {
            "self, and cross with itself as the source": apart(by_self, by_cross),
            "self, and cross with another source": apart(by_self, other),
        },
    )


def differing_lengths() -> Finding:
    layer = alive(MultiHeadAttention(12, 3), 0)
    rows, worst = [], 0.0
    for L, S in ((7, 11), (11, 7), (1, 11), (7, 1)):
        x, source = normal(1, L, 12), normal(2, S, 12)
        output = layer(x, source)
        gap = plain.apart(output, plain.multihead(layer, plain.array(x), plain.array(source)))
        worst = max(worst, gap)
        rows.append((L, S, f"{output.shape[0]}×{output.shape[1]}", gap))
    return Finding(
        holds(all(row[2] == f"{row[0]}×12" for row in rows) and worst < SAME),
        {"largest difference from arithmetic": worst},
        tables=(
            Table(
                "cross-attention of width 12",
                ("queries", "pairs", "output", "difference"),
                (*rows,),
            ),
        ),
    )


def column_convention() -> Finding:
    d, n, m, t, beta = 3, 5, 7, 2, 0.8
    query, key, value = normal(0, d, n), normal(1, d, m), normal(2, t, m)
    ours = attend(query.T, key.T, value.T, beta=beta).T
    Q, K, V = (plain.array(matrix) for matrix in (query, key, value))
    scores = beta * K.T @ Q  # m×n: a column for each query
    columns = V @ plain.softmax(scores.T).T
    rows = V @ plain.softmax(scores)
    right, wrong = plain.apart(ours, columns), plain.apart(ours, rows)
    return Finding(
        holds(ours.shape == (t, n) and right < SAME and wrong > DIFFERENT),
        {
            "output": list(ours.shape),
            "softmax down the columns, and attend": right,
            "softmax along the rows, and attend": wrong,
        },
    )


def weighted_sum() -> Finding:
    query, key, value = normal(0, 7, 5), normal(1, 11, 5), normal(2, 11, 3)
    output, shares = attend(query, key, value), weights(query, key)
    sums = torch.stack([sum((a * v for a, v in zip(row, value)), torch.zeros(3)) for row in shares])
    most, least = value.amax(0), value.amin(0)
    between = bool(((output < most) & (output > least)).all())
    ones = apart(attend(query, key, torch.ones_like(value)), torch.ones(7, 3))
    return Finding(
        holds(apart(output, sums) < SAME and ones < SAME and between),
        {
            "output less Σ aⱼ vⱼ": apart(output, sums),
            "equal values come out unchanged, off by": ones,
            "never beyond the values": between,
        },
    )


def _scores(width: int) -> dict[str, Score]:
    return {
        "dot": Dot(),
        "scaled dot": ScaledDot(),
        "general": alive(General(width, width), 3),
        "additive": alive(Additive(width, width, 5), 4),
    }


def _curve(name: str, widths: Sequence[int], found: Sequence[float | int]) -> Curve:
    return Curve(name, [float(d) for d in widths], [float(y) for y in found])


def _centred(scores: Tensor) -> Tensor:
    """Less each row's mean: what a softmax along rows doesn't see is gone."""
    return scores - scores.mean(-1, keepdim=True)


def _multiplications(function: Callable[[], object]) -> int:
    """As executed: half of the floating-point operations that torch counts."""
    with FlopCounterMode(display=False) as counter:
        function()
    return int(counter.get_total_flops()) // 2


EXPERIMENTS: tuple[Experiment, ...] = (
    Experiment(
        5,
        "scale-and-gradient",
        "exercises",
        "Scores are divided by √d_k, because without it the softmax saturates and its gradient "
        "vanishes.",
        "128 random queries look at 64 times 16 random keys of growing width. The slope of the "
        "softmax, a(1 - a), is averaged, with scores scaled and not; autograd confirms it.",
        "Unscaled, the slope falls with the width; scaled, it stays nearly as large as it can be. "
        "The reason is the variance of q·k, which is d_k.",
        scale_and_gradient,
        (r"\frac{\partial a_j}{\partial s_j} = a_j (1 - a_j)",),
    ),
    Experiment(
        5,
        "score-variance",
        "exercises",
        "The right divisor is the root of the keys' width.",
        "The variance of q·k is measured for entries of variance 1, over growing widths. The scale "
        "that attention itself uses is read off its weights.",
        "q·k is a sum of d_k independent products of variance 1, so its variance is d_k; divided "
        "by √d_k it has variance 1 at any width.",
        score_variance,
        (r"\operatorname{Var}(q \cdot k) = \sum_{i=1}^{d_k} \operatorname{Var}(q_i k_i) = d_k",),
    ),
    Experiment(
        27,
        "self-is-cross",
        "exercise sheet",
        "Self-attention and cross-attention are one operation, on one source or on two.",
        "One layer with the same weights reads its own input, the same input given as a source, "
        "and another source.",
        "They are: self-attention is cross-attention whose source is the input itself.",
        self_is_cross,
    ),
    Experiment(
        28,
        "differing-lengths",
        "exercise sheet",
        "In cross-attention there may be more queries than pairs of keys and values, or fewer.",
        "One layer is given four combinations of lengths, and compared with plain arithmetic.",
        "The output has as many rows as there are queries. Only keys and values have to be equally "
        "many.",
        differing_lengths,
    ),
    Experiment(
        36,
        "column-convention",
        "homework",
        "With vectors as columns, H = V softargmax_β(Kᵀ Q), of t rows and n columns.",
        "The homework's formula is computed in numpy, and compared with attend() on the transposed "
        "matrices.",
        "Both conventions say the same, each the transpose of the other. With columns the softmax "
        "runs down the columns of Kᵀ Q, one for each query.",
        column_convention,
        (r"H = V \operatorname{softargmax}_\beta(K^\top Q)",),
    ),
    Experiment(
        55,
        "weighted-sum",
        "homework",
        "Attention maps a query and pairs of keys and values to a weighted sum of the values.",
        "The sum is written out for random vectors. Then all values are made equal, and outputs "
        "are compared with the largest and the least of the values.",
        "As the weights are positive and sum to 1 it is a weighted mean: it never leaves the range "
        "of the values.",
        weighted_sum,
        (r"c = \sum_j a_j v_j, \quad a_j \ge 0, \quad \sum_j a_j = 1",),
    ),
    Experiment(
        82,
        "other-scores",
        "handout",
        "Any function of two vectors may serve as a score: a dot product, one with a learned "
        "matrix, or a small network.",
        "Four scores rate the same queries and keys. Each one's weights are checked, and compared "
        "with the others'.",
        "Each gives positive weights that sum to 1, and each gives different ones. What follows "
        "the scores is the same for all.",
        other_scores,
        (
            r"q^\top k, \quad \frac{q^\top k}{\sqrt{d}}, \quad q^\top W k, \quad "
            r"v^\top \tanh(W q + U k)",
        ),
    ),
    Experiment(
        82,
        "general-is-dot",
        "handout",
        "The general score of Luong and the dot product are relatives.",
        "The general score's matrix is set to I, to I/√d, to W_Q W_Kᵀ and to random numbers.",
        "With the identity it is the dot product, and with I/√d the scaled one. A head of a "
        "Transformer is the general score with a matrix of low rank, W_Q W_Kᵀ.",
        general_is_dot,
        (r"q^\top W_Q W_K^\top k = (W_Q^\top q) \cdot (W_K^\top k)",),
    ),
    Experiment(
        83,
        "score-indices",
        "handout",
        "The score of position i for position j is the product of query j and key i.",
        "The logarithms of the weights, which are the scores up to a constant in each row, are "
        "compared with q_j·k_i and with q_i·k_j.",
        "It is query i and key j: row i belongs to the query that asks, and the softmax runs over "
        "the keys j.",
        score_indices,
        (r"s_{ij} = q_i^\top k_j",),
    ),
    Experiment(
        86,
        "value-product",
        "handout",
        "Attention costs O(L_q L_k d_k).",
        "The multiplications of the matrix products are counted while attention is executed, for "
        "values of growing width.",
        "Those are the scores alone. The weighted sum of the values takes another L_q L_k d_v.",
        value_product,
        (r"O\bigl(L_q L_k (d_k + d_v)\bigr)",),
    ),
    Experiment(
        86,
        "beside-a-dense-layer",
        "handout",
        "Attention costs about as much as a dense layer.",
        "A layer that is dense over all positions and channels, and attention, map the same "
        "sequence; the multiplications of both are counted at growing widths.",
        "The dense layer needs L²d², attention 2 L²d with the product of the values: the dense one "
        "costs d/2 times as much, and d times as much as the scores alone.",
        beside_a_dense_layer,
        (r"\frac{L^2 d^2}{2 L^2 d} = \frac{d}{2}",),
    ),
    Experiment(
        87,
        "no-parameters",
        "handout",
        "Attention itself has no parameters.",
        "The parameters of a multi-head layer are counted in the operation itself and in the "
        "projections around it.",
        "The scaled dot product has none; everything that is learned is in the projections. A "
        "general or an additive score does have some.",
        no_parameters,
    ),
    Experiment(
        88,
        "argument-order",
        "handout",
        "Self-attention is Attention(X W_V, X W_Q, X W_K).",
        "A layer of one head with W_O = I is computed in numpy, and attend() is called with its "
        "projections in both orders.",
        "Queries come first, then keys, then values: Attention(X W_Q, X W_K, X W_V). In the other "
        "order nothing warns, as all three have the same shape, and the numbers are wrong.",
        argument_order,
        (r"\operatorname{Attention}(X W_Q, X W_K, X W_V)",),
    ),
)
