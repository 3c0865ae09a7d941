"""The handout on attention itself: scores, tensors, steps, cost, self-attention, the example."""

import math
from functools import partial

import numpy as np
import torch
from torch import Tensor

from regard import MultiHeadAttention, attend, attention_weights
from regard.lab.answers.answer import Answer, Demonstration, Mistake, Point, Step
from regard.lab.claims.costs import multiply_adds
from regard.lab.claims.plain import Array, array
from regard.lab.claims.sample import SAME, apart, normal, orthonormal, parameters
from regard.lab.experiment import Table
from regard.lab.place import Place


def _tensors(queries: int = 3, keys: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    return normal(0, queries, 5), normal(1, keys, 5), normal(2, keys, 2)


# Scores


def _third_query() -> Demonstration:
    Q, K, V = _tensors()
    scores = [float(Q[2] @ K[j] / math.sqrt(5)) for j in range(4)]
    shares = [math.exp(s) / sum(map(math.exp, scores)) for s in scores]
    output = sum(w * v for w, v in zip(shares, V))
    assert isinstance(output, Tensor)
    keys = orthonormal(3, 4, 5)
    looked_up = attend(keys[[2]], keys, V, beta=math.inf)[0]
    return Demonstration(
        apart(output, attend(Q, K, V)[2]) < SAME and bool((looked_up == V[2]).all()),
        {
            "scores of query 3": scores,
            "weights": shares,
            "they add up to": sum(shares),
            "largest difference from attend()": apart(output, attend(Q, K, V)[2]),
            "a key as the query, at β = ∞: difference from its value": apart(looked_up, V[2]),
        },
    )


def _swapped() -> Demonstration:
    Q, K, V = normal(0, 4, 5), normal(1, 4, 5), normal(2, 4, 2)
    written = torch.softmax((Q @ K.T).T / math.sqrt(5), -1) @ V  # s_ij = q_j·k_i
    return Demonstration(
        apart(written, attend(Q, K, V)) < SAME,
        {
            "difference from attention, with s_ij = q_j·k_i": apart(written, attend(Q, K, V)),
            "with s_ij = q_i·k_j": apart(
                torch.softmax(Q @ K.T / math.sqrt(5), -1) @ V, attend(Q, K, V)
            ),
        },
    )


def _mixed_keys() -> Demonstration:
    Q, K, V = _tensors()
    return Demonstration(
        attend(Q, K, K).shape == attend(Q, K, V).shape,
        {
            "columns of the output, if keys are mixed": attend(Q, K, K).shape[1],
            "if values are": attend(Q, K, V).shape[1],
        },
    )


# Three tensors


def _shapes() -> Demonstration:
    rows = []
    for L_q, L_k, d_q, d_v in ((3, 4, 5, 2), (1, 9, 5, 7), (6, 2, 1, 3)):
        out = attend(normal(0, L_q, d_q), normal(1, L_k, d_q), normal(2, L_k, d_v))
        rows.append((L_q, L_k, d_q, d_v, *out.shape))
    return Demonstration(
        all(row[4:] == (row[0], row[3]) for row in rows),
        tables=(
            Table(
                "Q is L_q × d_q, K is L_k × d_q, V is L_k × d_v",
                ("L_q", "L_k", "d_q", "d_v", "rows of the output", "columns"),
                tuple(rows),
            ),
        ),
    )


def _refused(query: Tensor, key: Tensor, value: Tensor) -> Demonstration:
    """What attend() says of shapes that do not fit."""
    try:
        attend(query, key, value)
    except (ValueError, TypeError) as error:
        return Demonstration(False, {"attend() says": " ".join(str(error).split())})
    return Demonstration(True)


# Three steps


def _in_loops(Q: Array, K: Array, V: Array) -> Array:
    """The three steps, entry by entry."""
    output = np.zeros((len(Q), V.shape[1]))
    for i, q in enumerate(Q):
        scores = [float(q @ k) / math.sqrt(len(q)) for k in K]
        total = sum(math.exp(s) for s in scores)
        for score, v in zip(scores, V):
            output[i] += math.exp(score) / total * v
    return output


def _steps() -> Demonstration:
    Q, K, V = _tensors()
    w = attention_weights(Q, K)
    difference = float(np.abs(array(attend(Q, K, V)) - _in_loops(*map(array, (Q, K, V)))).max())
    return Demonstration(
        difference < SAME and float(w.min()) >= 0 and float(w.max()) <= 1,
        {
            "smallest and largest weight": [float(w.min()), float(w.max())],
            "rows add up to": w.sum(-1).tolist(),
            "largest difference between attend() and three loops": difference,
        },
    )


def _over_queries() -> Demonstration:
    Q, K, _ = _tensors()
    w = torch.softmax(Q @ K.T / math.sqrt(5), 0)
    return Demonstration(
        apart(w.sum(1), torch.ones(3, dtype=torch.float64)) < SAME,
        {"weights of each query, normalised over the queries, add up to": w.sum(1).tolist()},
    )


# Complexity


def _products(L_q: int, L_k: int, d_k: int, d_v: int) -> int:
    Q, K, V = normal(0, L_q, d_k), normal(1, L_k, d_k), normal(2, L_k, d_v)
    return multiply_adds(lambda: attend(Q, K, V, backend="formula"))


def _complexity() -> Demonstration:
    rows = []
    for sizes in ((8, 8, 4, 4), (16, 8, 4, 4), (8, 16, 4, 4), (8, 8, 8, 4), (8, 8, 4, 8)):
        L_q, L_k, d_k, d_v = sizes
        rows.append((*sizes, _products(*sizes), L_q * L_k * (d_k + d_v)))
    L, d = 16, 8
    dense = multiply_adds(lambda: normal(0, L, L) @ normal(1, L, d))
    return Demonstration(
        all(row[-1] == row[-2] for row in rows) and _products(L, L, d, d) == 2 * dense,
        {
            "attention with L = 16, d = 8": _products(L, L, d, d),
            "a dense layer over the positions, without cross-channel weights": dense,
            "parameters of attend()": 0,
        },
        (
            Table(
                "Multiply-adds, counted",
                ("L_q", "L_k", "d_k", "d_v", "counted", "L_q L_k (d_k + d_v)"),
                tuple(rows),
            ),
        ),
    )


def _values_for_free() -> Demonstration:
    counts = [_products(8, 8, 4, d_v) for d_v in (4, 40, 400)]
    return Demonstration(
        len(set(counts)) == 1,
        {"multiply-adds for d_v = 4, 40 and 400": counts, "L_q L_k d_k": 8 * 8 * 4},
    )


# Self-attention


def _projected() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return normal(0, 6, 5), normal(1, 5, 5), normal(2, 5, 5), normal(3, 5, 5)


def _one_input() -> Demonstration:
    X, W_q, W_k, W_v = _projected()
    written = torch.softmax(X @ W_q @ W_k.T @ X.T / math.sqrt(5), -1) @ X @ W_v
    ours = attend(X @ W_q, X @ W_k, X @ W_v)
    layer = MultiHeadAttention(5, 1, bias=False).double().requires_grad_(False)
    for part, W in ((layer.query, W_q), (layer.key, W_k), (layer.value, W_v)):
        part.weight.copy_(W.T)
    layer.output.weight.copy_(torch.eye(5))
    return Demonstration(
        apart(written, ours) < SAME and apart(layer(X), ours) < SAME,
        {
            "largest difference of the single equation from attend(XW_Q, XW_K, XW_V)": apart(
                written, ours
            ),
            "from the layer, with W_O = I": apart(layer(X), ours),
            "trained numbers: 3 · 5 · 5, for any length": parameters(layer) - 25,
        },
    )


def _out_of_order() -> Demonstration:
    X, W_q, W_k, W_v = _projected()
    right, wrong = attend(X @ W_q, X @ W_k, X @ W_v), attend(X @ W_v, X @ W_q, X @ W_k)
    return Demonstration(
        apart(right, wrong) < SAME,
        {"difference of Attention(XW_V, XW_Q, XW_K) from self-attention": apart(right, wrong)},
    )


# The example in Numpy

WORDS = np.array([[1, 0, 0], [0, 1, 0], [1, 1, 0], [0, 0, 1]], dtype=np.float64)


def _listing(seed: int) -> tuple[Array, Array, Array, Array]:
    """Queries, keys and values of the four words, and the scores of all."""
    random = np.random.default_rng(seed)
    Q, K, V = (WORDS @ random.standard_normal((3, 2)) for _ in range(3))
    return Q, K, V, Q @ K.T


def _four_words() -> Demonstration:
    differences, sums = [], []
    for seed in range(5):
        Q, K, V, scores = _listing(seed)
        first = np.exp(scores[0] / 2**0.5)
        attention = first / first.sum() @ V
        ours = attend(torch.from_numpy(Q), torch.from_numpy(K), torch.from_numpy(V))
        differences.append(float(np.abs(array(ours)[0] - attention).max()))
        sums.append(float(abs(scores[0, 2] - scores[0, 0] - scores[0, 1])))
    return Demonstration(
        max(*differences, *sums) < SAME,
        {
            "largest difference of the first word's vector from attend(), five draws": max(
                differences
            ),
            "s₁₃ − s₁₁ − s₁₂, five draws": max(sums),
        },
    )


def _one_sum() -> Demonstration:
    *_, scores = _listing(0)
    exponentials = np.exp(scores / 2**0.5)
    rows = (exponentials / exponentials.sum()).sum(1)
    return Demonstration(
        float(np.abs(rows - 1).max()) < SAME,
        {"rows of the listing's softmax, given all scores at once, add up to": rows.tolist()},
    )


ANSWERS: tuple[Answer, ...] = (
    Answer(
        Place("handout", "scores"),
        question="How does one query attend to four keys and their values?",
        answer=r"It has a score with each key, $s_{ij} = q_i \cdot k_j / \sqrt{d_k}$; a softmax "
        "makes weights of them that add up to 1; and the output is the mean of the values by "
        "these weights. The division is optional, but it helps training. It is a dictionary made "
        r"soft: with a query that equals a key, orthogonal keys and $\beta = \infty$ it looks up "
        "one value; softened, it mixes.",
        derivation=(
            Step(
                "Scores of query 3.",
                r"s_{3j} = \frac{q_3 \cdot k_j}{\sqrt{d_k}}, \qquad j = 1, \dots, 4",
            ),
            Step("Weights.", r"w_{3j} = \frac{e^{s_{3j}}}{\sum_{l} e^{s_{3l}}}"),
            Step("Output.", r"y_3 = w_{31} v_1 + w_{32} v_2 + w_{33} v_3 + w_{34} v_4"),
        ),
        run=_third_query,
        mistakes=(
            Mistake(
                r"$s_{ij} = q_j^\top k_i$.",
                "The indices are exchanged: row $i$ has to belong to query $i$, since the softmax "
                "runs along it.",
                _swapped,
            ),
            Mistake(
                "The keys are combined.",
                "Keys are for finding. Combined are the values, which may have another width.",
                _mixed_keys,
            ),
        ),
        points=(
            Point(1, "the score, with its indices"),
            Point(1, "softmax over the keys"),
            Point(1, "the weighted mean of the values"),
        ),
    ),
    Answer(
        Place("handout", "three tensors"),
        question="Which shapes do queries, keys, values and the output have?",
        answer=r"$Q$ is $L_q \times d_q$, $K$ is $L_k \times d_q$ and $V$ is $L_k \times d_v$: "
        r"keys are as wide as queries, values as many as keys. The output is $L_q \times d_v$. "
        "All other sizes are free.",
        derivation=(
            Step(
                "A dot product needs equal widths, a weighted mean as many weights as values.",
                r"Q K^\top \in \mathbb{R}^{L_q \times L_k}, \qquad (L_q \times L_k)(L_k \times "
                r"d_v) = L_q \times d_v",
            ),
        ),
        run=_shapes,
        mistakes=(
            Mistake(
                "There is a value for each query.",
                "There is one for each key: the weights have a column for every key.",
                partial(_refused, normal(0, 3, 5), normal(1, 4, 5), normal(2, 3, 2)),
            ),
            Mistake(
                "Queries and keys may differ in width.",
                "Not for a dot product; a matrix in between (the general score) would allow it.",
                partial(_refused, normal(0, 3, 5), normal(1, 4, 6), normal(2, 4, 2)),
            ),
        ),
        points=(Point(1, "the three shapes"), Point(1, "the output's")),
    ),
    Answer(
        Place("handout", "three steps"),
        question="What are the three steps of attention?",
        answer=r"For each query $i$: score it against every key, $s_{ij} = q_i^\top k_j / "
        r"\sqrt{d_k}$; normalise the scores over the keys by a softmax; return the mean of the "
        "values by these weights. The weights lie between 0 and 1 and add up to 1.",
        derivation=(
            Step(
                "Score, normalise, average.",
                r"s_{ij} = \frac{q_i^\top k_j}{\sqrt{d_k}}, \qquad w_{ij} = "
                r"\frac{e^{s_{ij}}}{\sum_{l} e^{s_{il}}}, \qquad y_i = \sum_j w_{ij} v_j",
            ),
        ),
        run=_steps,
        mistakes=(
            Mistake(
                "The scores are normalised over the queries.",
                "Then the weights of one query do not add up to 1.",
                _over_queries,
            ),
        ),
        points=(Point(1, "score"), Point(1, "softmax over the keys"), Point(1, "weighted mean")),
    ),
    Answer(
        Place("handout", "complexity"),
        question="What does attention cost, and how many parameters has it?",
        answer="$L_q L_k$ scores of $d_k$ multiplications each, and as many for the values: $O(L_q "
        "L_k (d_k + d_v))$. That is quadratic, as in a dense layer over the positions; without "
        "cross-channel weights such a layer costs $L^2 d$, attention $2 L^2 d$. Attention itself "
        "has no parameters: its weights are computed.",
        derivation=(
            Step("Scores, and means of the values.", r"L_q L_k d_k + L_q L_k d_v"),
            Step(
                "A dense layer with one weight for each pair of positions.",
                r"y_i = \sum_j w_{ij} x_j: \quad L^2 d",
            ),
        ),
        run=_complexity,
        mistakes=(
            Mistake(
                r"$O(L_q L_k d_k)$ is all of it.",
                "The product with the values is left out, which grows with $d_v$.",
                _values_for_free,
            ),
        ),
        points=(Point(1, "both products"), Point(1, "no parameters")),
    ),
    Answer(
        Place("handout", "self-attention"),
        question="How does self-attention get queries, keys and values from one input?",
        answer="By three matrices: $Q = X W_Q$, $K = X W_K$, $V = X W_V$, and the result is "
        r"$\operatorname{Attention}(X W_Q, X W_K, X W_V)$, in this order. The matrices are all "
        "that is trained, and they serve for any length.",
        derivation=(
            Step(
                "In one equation.",
                r"\operatorname{softmax}\left(\frac{X W_Q W_K^\top X^\top}{\sqrt{d_k}}\right) X "
                "W_V",
            ),
        ),
        run=_one_input,
        mistakes=(
            Mistake(
                r"$\operatorname{Attention}(X W_V, X W_Q, X W_K)$.",
                "The arguments are out of order: queries come first, then keys, then values.",
                _out_of_order,
            ),
        ),
        points=(Point(1, "three projections"), Point(1, "in the order queries, keys, values")),
    ),
    Answer(
        Place("handout", "Numpy example"),
        question="What does the example of four words compute, and what can be checked without its "
        "random numbers?",
        answer="The first word's output: its query against four keys, a softmax of the scores "
        r"divided by $\sqrt{2}$, and the mean of the four values. The third word is the sum of "
        "the first two, and so are its key and its score: $s_{13} = s_{11} + s_{12}$, whatever "
        "the matrices are. The listing's softmax suits one row of scores; for all words at once "
        "it has to divide each row by its own sum.",
        derivation=(
            Step("Keys are linear in the words.", r"k_3 = (x_1 + x_2) W_K = k_1 + k_2"),
            Step(
                "So are the scores.",
                r"s_{13} = q_1 \cdot k_3 = q_1 \cdot k_1 + q_1 \cdot k_2 = s_{11} + s_{12}",
            ),
        ),
        run=_four_words,
        mistakes=(
            Mistake(
                "The same softmax is given the scores of all words at once.",
                "It divides by the sum of everything: all sixteen weights together add up to 1, "
                "instead of four in each row.",
                _one_sum,
            ),
        ),
        points=(
            Point(1, "scores, softmax, mean for the first word"),
            Point(1, "$s_{13} = s_{11} + s_{12}$"),
        ),
    ),
)
