"""The formula: the inputs of attention, its output, and the order in which they are written.

    C = softmax(Q Kᵀ / √d) V        (n_q×d_k), (n_k×d_k), (n_k×d_v) → n_q×d_v
    c_i = Σ_j a_ij v_j              a weighted mean of the values

Queries and keys are equally wide, keys and values equally many.
"""

import math

import torch
from torch import Tensor

from regard import MultiHeadAttention, attend, attention_weights
from regard.lab.claims import plain
from regard.lab.claims.exercises import by_hand
from regard.lab.claims.sample import DIFFERENT, SAME, alive, apart, normal
from regard.lab.experiment import Experiment, Finding, Table, corrected, holds
from regard.lab.numbers import figure, within
from regard.lab.place import Place

SIZES = ((2, 3, 2, 3), (5, 7, 11, 13), (7, 5, 3, 2), (1, 1, 1, 1))
"""Values of n_q, n_k, d_k and d_v."""


def attention_formula() -> Finding:
    rows, worst, fits = [], 0.0, True
    for n_q, n_k, d_k, d_v in SIZES:
        query, key, value = inputs(n_q, n_k, d_k, d_v)
        output = attend(query, key, value)
        gap = apart(output, by_hand(query, key, value, 1 / math.sqrt(d_k))[1])
        worst, fits = max(worst, gap), fits and output.shape == (n_q, d_v)
        rows.append((_by(n_q, d_k), _by(n_k, d_k), _by(n_k, d_v), _by(*output.shape), gap))
    return Finding(
        holds(fits and worst < SAME),
        {"largest difference from arithmetic": worst, "shapes fit": fits},
        tables=(Table("matrices of random numbers", ("Q", "K", "V", "C", "difference"), (*rows,)),),
        conclusion=f"For matrices of {len(SIZES)} shapes, attend() and loops over plain numbers "
        f"differ by {figure(worst)} at most. attend() scales by 1/√d_k unless told otherwise.",
    )


def output_shape() -> Finding:
    rows, taught = [], True
    for n_q, n_k, d_k, d_v in SIZES:
        query, key, value = inputs(n_q, n_k, d_k, d_v)
        A, C = attention_weights(query, key), attend(query, key, value)
        taught &= A.shape == (n_q, n_k)
        rows.append((n_q, n_k, d_v, _by(*A.shape), _by(*C.shape)))
    return Finding(
        holds(taught),
        {
            "shapes of the softmax's result": [row[3] for row in rows],
            "shapes of the output": [row[4] for row in rows],
        },
        tables=(
            Table("shapes measured", ("n_q", "n_k", "d_v", "weights A", "output C"), (*rows,)),
        ),
        conclusion=f"The weights of n_q = {rows[1][0]} queries over n_k = {rows[1][1]} keys are "
        f"{rows[1][3]}. Worth adding: the output C = A V is n_q×d_v, here {rows[1][4]}, a row for "
        "each query and as wide as the values.",
    )


def shapes() -> Finding:
    rows, fits = [], True
    for L_q, L_k, d_q, d_v in ((1, 4, 3, 3), (5, 5, 2, 7), (11, 3, 7, 2), (3, 11, 2, 5)):
        query, key, value = inputs(L_q, L_k, d_q, d_v)
        output = attend(query, key, value)
        fits &= output.shape == (L_q, d_v) and attention_weights(query, key).shape == (L_q, L_k)
        # One output for each query, whatever the others ask.
        alone = torch.cat([attend(row[None], key, value) for row in query])
        fits &= apart(output, alone) < SAME
        rows.append((_by(L_q, d_q), _by(L_k, d_q), _by(L_k, d_v), _by(*output.shape)))
    return Finding(
        holds(fits),
        {"shapes fit, and each query is answered alone": fits},
        tables=(Table("shapes tried", ("queries", "keys", "values", "output"), (*rows,)),),
        conclusion="The output has a row for each query and is as wide as the values, as in "
        f"{rows[2][0]}, {rows[2][1]}, {rows[2][2]} → {rows[2][3]}; a query "
        f"{'gets' if fits else 'does not get'} alone what it gets beside others, in all "
        f"{len(rows)} cases.",
    )


def weights_are_shares() -> Finding:
    query, key = normal(0, 1, 3), normal(1, 4, 3)
    scores = [float(query[0] @ k) / math.sqrt(3) for k in key]
    exponentials = [math.exp(s) for s in scores]
    shares = attention_weights(query, key)
    recipe = shares.new_tensor([[e / math.fsum(exponentials) for e in exponentials]])
    many = attention_weights(30 * normal(2, 101, 17, 5), normal(3, 101, 13, 5))
    error = apart(many.sum(-1), torch.ones(101, 17))
    inside = float(many.min()) >= 0 and float(many.max()) <= 1
    return Finding(
        holds(apart(shares, recipe) < SAME and error < SAME and inside),
        {
            "furthest sum from 1": error,
            "least weight": float(many.min()),
            "largest weight": float(many.max()),
        },
        tables=(
            Table(
                "one query over four keys: score, exponential, share",
                ("key", "score", "exponential", "weight"),
                tuple(
                    (f"k{n + 1}", scores[n], exponentials[n], float(shares[0, n])) for n in range(4)
                ),
            ),
        ),
        conclusion=f"Over {many.numel():,} weights of very unequal scores, the sum of a row is "
        f"never further from 1 than {figure(error)}, and the weights lie from "
        f"{figure(float(many.min()))} to {figure(float(many.max()))}.",
    )


def weighted_sum() -> Finding:
    query, key, value = normal(0, 7, 5), normal(1, 11, 5), normal(2, 11, 3)
    output, shares = attend(query, key, value), attention_weights(query, key)
    sums = torch.stack([sum((a * v for a, v in zip(row, value)), torch.zeros(3)) for row in shares])
    most, least = value.amax(0), value.amin(0)
    between = bool(((output < most) & (output > least)).all())
    ones = apart(attend(query, key, torch.ones_like(value)), torch.ones(7, 3))
    return Finding(
        holds(apart(output, sums) < SAME and ones < SAME and between),
        {
            "output minus Σ aⱼ vⱼ": apart(output, sums),
            "equal values come out unchanged, error": ones,
            "never beyond the values": between,
        },
        conclusion=f"The output is Σ aⱼ vⱼ {within(apart(output, sums))}. As the weights are "
        "positive and sum to 1 it is a weighted mean: equal values come out unchanged (error "
        f"{figure(ones)}), and no output leaves the range of the values.",
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
        conclusion=f"H = V softargmax_β(Kᵀ Q) is {_by(*ours.shape)}, and differs from the "
        f"transpose of attend(Qᵀ, Kᵀ, Vᵀ) by {figure(right)}. The softmax runs down the columns of "
        f"Kᵀ Q, one for each query; along its rows the result would differ by {figure(wrong)}.",
    )


def argument_order() -> Finding:
    x, layer = normal(0, 1, 7, 6), alive(MultiHeadAttention(6, 1, bias=False), 1)
    layer.output.weight.copy_(torch.eye(6))
    query, key, value = layer.query(x), layer.key(x), layer.value(x)
    meant = plain.multihead(layer, plain.array(x[0]))[None]
    taught, correct = (
        plain.apart(attend(*three), meant) for three in ((value, query, key), (query, key, value))
    )
    return Finding(
        corrected(taught < SAME, correct < SAME and plain.apart(layer(x), meant) < SAME),
        {
            "values, queries, keys: error": taught,
            "queries, keys, values: error": correct,
        },
        conclusion="Called as Attention(X W_Q, X W_K, X W_V) it gives what the layer computes "
        f"(difference {figure(correct)}); as printed it differs by {figure(taught)}. Nothing warns "
        "of it, as all three have the same shape here. The single equation that follows in the "
        "handout is right.",
    )


def score_indices() -> Finding:
    query, key = normal(0, 5, 3), normal(1, 5, 3)
    # Up to a constant in each row, the logarithms of the weights are the scores.
    scores = _centred(attention_weights(query, key, beta=1.0).log())
    straight = torch.tensor([[float(q @ k) for k in key] for q in query], dtype=torch.float64)
    turned = straight.T  # row i holds q_j·k_i
    taught, correct = apart(scores, _centred(turned)), apart(scores, _centred(straight))
    fewer = attention_weights(query[:2], key)
    return Finding(
        corrected(taught < SAME, correct < SAME and fewer.shape == (2, 5)),
        {
            "scores minus qⱼ·kᵢ": taught,
            "scores minus qᵢ·kⱼ": correct,
            "two queries, five keys": list(fewer.shape),
        },
        conclusion="Row i belongs to query i and its softmax runs over the keys j, so s_ij = q_iᵀ "
        f"k_j: the logarithms of the weights differ from it by {figure(correct)}, and from q_jᵀ "
        f"k_i by {figure(taught)}. Two queries over five keys have {_by(*fewer.shape)} weights. "
        "The handout's three steps have it right.",
    )


def inputs(n_q: int, n_k: int, d_k: int, d_v: int) -> tuple[Tensor, Tensor, Tensor]:
    """Random queries, keys and values."""
    return normal(0, n_q, d_k), normal(1, n_k, d_k), normal(2, n_k, d_v)


def _by(rows: int, columns: int) -> str:
    return f"{rows}×{columns}"


def _centred(scores: Tensor) -> Tensor:
    """Minus the mean of each row, to which a softmax along rows is invariant."""
    return scores - scores.mean(-1, keepdim=True)


EXPERIMENTS: tuple[Experiment, ...] = (
    Experiment(
        3,
        "attention-formula",
        Place("exercises", "2"),
        "Attention is softmax(Q Kᵀ / √d) V, where Q is n_q×d_k, K is n_k×d_k and V is n_k×d_v.",
        "attend() is compared with loops over plain numbers, for matrices of four different "
        "shapes.",
        attention_formula,
        (r"C = \operatorname{softmax}\!\left(\frac{Q K^\top}{\sqrt{d_k}}\right) V",),
    ),
    Experiment(
        4,
        "output-shape",
        Place("exercises", "2(a)"),
        "The softmax's result is n_q×n_k, as Q Kᵀ is: one row, over all keys, for each query.",
        "The shapes of the weights, and of the output, are read off for four choices of n_q, n_k, "
        "d_k and d_v.",
        output_shape,
        (r"A \in \mathbb{R}^{n_q \times n_k}, \quad C = A V \in \mathbb{R}^{n_q \times d_v}",),
    ),
    Experiment(
        85,
        "attention-shapes",
        Place("handout", "three tensors"),
        "Queries are L_q×d_q, keys L_k×d_q and values L_k×d_v; the layer returns one weighted "
        "average of the values for each query.",
        "attend() computes four such triples, and each query alone as well.",
        shapes,
        (r"(L_q \times d_q), \ (L_k \times d_q), \ (L_k \times d_v) \mapsto L_q \times d_v",),
    ),
    Experiment(
        84,
        "weights-are-shares",
        Place("handout", "three steps"),
        "The scores of a query are normalised across the keys by a softmax: the weights sum to 1 "
        "and lie between 0 and 1.",
        "One query over four keys is taken through score, exponential and division by the sum. "
        "Then the weights of many queries, with very unequal scores, are added up row by row.",
        weights_are_shares,
        (r"a_j = \frac{e^{s_j}}{\sum_k e^{s_k}} \in [0, 1], \quad \sum_j a_j = 1",),
    ),
    Experiment(
        55,
        "weighted-sum",
        Place("homework", "1.4(b)"),
        "Attention maps a query and pairs of keys and values to an output: the sum of the values, "
        "weighted by a softmax of the query's dot products with all keys.",
        "The sum is written out for random vectors. Then all values are made equal, and outputs "
        "are compared with the largest and the smallest of the values.",
        weighted_sum,
        (r"c = \sum_j a_j v_j, \quad a_j \ge 0, \quad \sum_j a_j = 1",),
    ),
    Experiment(
        36,
        "column-convention",
        Place("homework", "1.1(a)"),
        "With vectors as columns, Q of d×n, K of d×m and V of t×m: a = softargmax_β(Kᵀ q), h = V "
        "a, and H = V A is t×n.",
        "The homework's formula is computed in numpy, and compared with attend() on the "
        "transposed matrices.",
        column_convention,
        (r"H = V \operatorname{softargmax}_\beta(K^\top Q)",),
    ),
    Experiment(
        88,
        "argument-order",
        Place("handout", "self-attention"),
        "After Attention(Q, K, V) has been defined, self-attention is given as Attention(X W_V, X "
        "W_Q, X W_K).",
        "A layer of one head with W_O = I is computed in numpy, and attend() is called with its "
        "projections in both orders.",
        argument_order,
        (r"\operatorname{Attention}(X W_Q, X W_K, X W_V)",),
    ),
    Experiment(
        83,
        "score-indices",
        Place("handout", "scores"),
        "The score is written s_ij = q_jᵀ k_i / √d_k, twice, where row i is then normalised over "
        "j; the three steps that follow have q_iᵀ k_j.",
        "The logarithms of the weights, which are the scores up to a constant in each row, are "
        "compared with q_j·k_i and with q_i·k_j.",
        score_indices,
        (r"s_{ij} = q_i^\top k_j",),
    ),
)
