"""The worked exercises: attention by hand, its formula, its cost and its mask."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from regard import attend, attention_statistics, attention_weights, causal
from regard.lab.answers.answer import Answer, Demonstration, Mistake, Point, Step
from regard.lab.byhand import exercise
from regard.lab.claims.sample import SAME, apart, normal
from regard.lab.experiment import Table
from regard.lab.place import Place
from regard.lab.steps import operations, steps

# 1. One vector over three

STATES = torch.tensor([[1, 2, 3], [1, 2, 1], [0, 1, -1]], dtype=torch.float64)
ASKING = torch.tensor([[1, 2, 1]], dtype=torch.float64)


def _context(beta: float) -> tuple[list[float], list[float]]:
    """Weights and context for a scale of the scores."""
    return (
        attention_weights(ASKING, STATES, beta=beta)[0].tolist(),
        attend(ASKING, STATES, STATES, beta=beta)[0].tolist(),
    )


def _one_vector() -> Demonstration:
    scores = (ASKING @ STATES.T)[0]
    shares, context = _context(1.0)
    exponentials = [math.exp(score) for score in scores.tolist()]
    by_hand = [e / sum(exponentials) for e in exponentials]
    return Demonstration(
        scores.tolist() == [8, 6, 1]
        and max(abs(a - b) for a, b in zip(shares, by_hand)) < SAME
        and [round(x, 3) for x in (*shares, *context)]
        == [0.880, 0.119, 0.001, 0.999, 1.999, 2.759],
        {"scores": scores.tolist(), "weights": shares, "context": context},
    )


def _scaled_by_habit() -> Demonstration:
    shares, context = _context(3**-0.5)
    right, _ = _context(1.0)
    return Demonstration(
        max(abs(a - b) for a, b in zip(shares, right)) < 0.005,
        {"weights with √3": shares, "context with √3": context, "weights as asked": right},
    )


# 2. The formula


def _formula() -> Demonstration:
    query, key, value = normal(0, 5, 3), normal(1, 7, 3), normal(2, 7, 2)
    written = torch.softmax(query @ key.T / math.sqrt(3), 1) @ value
    return Demonstration(
        apart(written, attend(query, key, value)) < SAME,
        {
            "rows and columns of Q, K, V": [list(x.shape) for x in (query, key, value)],
            "rows and columns of Q Kᵀ": list((query @ key.T).shape),
            "rows and columns of C": list(written.shape),
            "largest difference from attend()": apart(written, attend(query, key, value)),
            "from torch's function": apart(
                written, F.scaled_dot_product_attention(query[None], key[None], value[None])[0]
            ),
        },
    )


def _keys_for_values() -> Demonstration:
    query, key, value = normal(0, 5, 3), normal(1, 7, 3), normal(2, 7, 3)
    return Demonstration(
        apart(attend(query, key, key), attend(query, key, value)) < SAME,
        {
            "difference between softmax(QKᵀ/√d) K and softmax(QKᵀ/√d) V": apart(
                attend(query, key, key), attend(query, key, value)
            )
        },
    )


def _along(dim: int) -> Tensor:
    query, key, _ = exercise()
    return torch.softmax(query @ key.T / math.sqrt(2), dim)


def _row_wise() -> Demonstration:
    query, key, value = exercise()
    A = _along(1)
    return Demonstration(
        A.shape == (2, 3)
        and apart(A.sum(1), torch.ones(2, dtype=torch.float64)) < SAME
        and apart(A, attention_weights(query, key)) < SAME,
        {
            "rows and columns of the softmax, for 2 queries and 3 keys": list(A.shape),
            "its rows add up to": A.sum(1).tolist(),
            "largest difference from weights()": apart(A, attention_weights(query, key)),
            "rows and columns of C = A V": list((A @ value).shape),
        },
    )


def _column_wise() -> Demonstration:
    A = _along(0)
    return Demonstration(
        apart(A.sum(1), torch.ones(2, dtype=torch.float64)) < SAME,
        {
            "softmax along columns: weights of query 1 and 2 add up to": A.sum(1).tolist(),
            "first row of C then": (A @ exercise()[2])[0].tolist(),
            "first row of C, along rows": (_along(1) @ exercise()[2])[0].tolist(),
        },
    )


def _shape_of_the_output() -> Demonstration:
    _, _, value = exercise()
    query, key = normal(0, 2, 2), normal(1, 3, 2)
    A, C = attention_weights(query, key), attend(query, key, torch.cat((value, value), 1))
    return Demonstration(
        A.shape == C.shape,
        {
            "the softmax's result": list(A.shape),
            "the output C, for values of width 6": list(C.shape),
        },
    )


# 2(b) The scale


def _gradient(scale: float, width: int) -> float:
    """The mean of a(1 - a), the softmax's slope, over 16 keys."""
    a = attention_weights(normal(1, 501, width), normal(2, 16, width), beta=scale)
    return float((a * (1 - a)).mean())


def _scaled() -> Demonstration:
    rows = []
    for width in (16, 64, 512):
        query, key = normal(1, 2001, width), normal(2, 2001, width)
        variance = float((query * key).sum(-1).var())
        rows.append((width, variance, _gradient(1.0, width), _gradient(width**-0.5, width)))
    return Demonstration(
        all(abs(row[1] / row[0] - 1) < 0.1 for row in rows)
        and rows[-1][2] < 0.01 < 0.05 < rows[-1][3],
        tables=(
            Table(
                "Random queries and keys; a(1 − a) is the slope of a softmax over 16 keys",
                ("d_k", "variance of q·k", "a(1 − a), unscaled", "a(1 − a), divided by √d_k"),
                tuple(rows),
            ),
        ),
    )


def _value_width() -> Demonstration:
    query, key, value = exercise()
    wrong = attend(query, key, value, beta=3**-0.5)
    return Demonstration(
        apart(wrong, attend(query, key, value)) < SAME,
        {
            "first row of C with √d_v = √3": wrong[0].tolist(),
            "with √d_k = √2": attend(query, key, value)[0].tolist(),
            "variance of q·k / √d_v, for d_k = 64 and d_v = 16": float(
                (normal(1, 2001, 64) * normal(2, 2001, 64)).sum(-1).var() / 16
            ),
        },
    )


def _width_itself() -> Demonstration:
    width = 512
    query, key = normal(1, 501, width), normal(2, 16, width)
    flat = attention_statistics(query, key, beta=1 / width).entropy.mean() / math.log(16)
    return Demonstration(
        float(flat) < 0.99,
        {
            "entropy as a share of the most, divided by d_k = 512": float(flat),
            "divided by its root": float(
                attention_statistics(query, key).entropy.mean() / math.log(16)
            ),
        },
    )


# 2(c) Operations


def _counts() -> Demonstration:
    n_q, n_k, d_k, d_v = 2, 3, 2, 3
    counted = operations(steps(*exercise()))
    formulas = {
        "scores": (n_q * n_k * d_k, 0, n_q * n_k * (d_k - 1)),
        "scaled": (0, n_q * n_k, 0),
        "weights": (0, n_q * n_k, n_q * (n_k - 1)),
        "output": (n_q * d_v * n_k, 0, n_q * d_v * (n_k - 1)),
    }
    total = counted["total"]
    return Demonstration(
        all(counted[name][:3] == formula for name, formula in formulas.items()),
        tables=(
            Table(
                "Exercise 3: n_q = 2, n_k = 3, d_k = 2, d_v = 3",
                ("step", "multiplications", "divisions", "additions"),
                (
                    *((name, *formula) for name, formula in formulas.items()),
                    ("total", total.multiplications, total.divisions, total.additions),
                ),
            ),
        ),
    )


def _without_values() -> Demonstration:
    """Counting the first product only, while the values grow wider."""
    query, key, _ = exercise()
    counts = [
        operations(steps(query, key, normal(0, 3, width)))["total"].multiplications
        for width in (3, 30, 300)
    ]
    formula = 2 * 3 * 2
    return Demonstration(
        counts == [formula] * 3,
        {
            "multiplications for values of width 3, 30 and 300": counts,
            "n_q n_k d_k": formula,
        },
    )


# 2(d) The mask


def _triangle(n: int, diagonal: int) -> Tensor:
    """−∞ from this diagonal on, and 0 elsewhere."""
    return torch.full((n, n), -torch.inf, dtype=torch.float64).triu(diagonal)


def _masked() -> Demonstration:
    n = 4
    query, key = normal(0, n, 3), normal(1, n, 3)
    mask = _triangle(n, 1)
    A = torch.softmax(query @ key.T / math.sqrt(3) + mask, 1)
    return Demonstration(
        apart(A, attention_weights(query, key, mask=causal())) < SAME
        and bool((A.triu(1) == 0).all()),
        {
            "rows of the mask": [[float(x) for x in row] for row in mask.tolist()],
            "largest weight above the diagonal": float(A.triu(1).max()),
            "rows of the weights add up to": A.sum(1).tolist(),
            "largest difference from causal()": apart(
                A, attention_weights(query, key, mask=causal())
            ),
        },
    )


def _own_position() -> Demonstration:
    n = 4
    query, key = normal(0, n, 3), normal(1, n, 3)
    A = torch.softmax(query @ key.T / math.sqrt(3) + _triangle(n, 0), 1)
    return Demonstration(
        bool(A.isfinite().all()),
        {"first row of weights, with −∞ on the diagonal too": A[0].tolist()},
    )


def _zeros_and_ones() -> Demonstration:
    n = 4
    query, key = normal(0, n, 3), normal(1, n, 3)
    A = torch.softmax((query @ key.T / math.sqrt(3)) * torch.ones(n, n).tril(), 1)
    return Demonstration(
        float(A.triu(1).max()) == 0,
        {
            "largest weight on a later position, if scores are multiplied by 0": float(
                A.triu(1).max()
            )
        },
    )


# 3. By hand


def _by_hand() -> Demonstration:
    query, key, value = exercise()
    A, C = attention_weights(query, key), attend(query, key, value)
    theirs = F.scaled_dot_product_attention(query[None], key[None], value[None])[0]
    exponentials = (query @ key.T / math.sqrt(2)).exp()
    by_hand = exponentials / exponentials.sum(1, keepdim=True) @ value
    rounded = torch.tensor([[0.860, 1.576, -0.724], [0.987, 1.882, -1.565]], dtype=torch.float64)
    return Demonstration(
        apart(C, theirs) < SAME and apart(C, by_hand) < SAME and apart(C, rounded) < 5e-4,
        {
            "Q Kᵀ": (query @ key.T).tolist(),
            "weights": A.tolist(),
            "C": C.tolist(),
            "largest difference from torch's function": apart(C, theirs),
        },
    )


def _first_row(output: Tensor) -> Demonstration:
    right = attend(*exercise())
    return Demonstration(
        apart(output, right) < 0.005,
        {"first row of C, so": output[0].tolist(), "first row of C": right[0].tolist()},
    )


def _unscaled() -> Demonstration:
    return _first_row(attend(*exercise(), beta=1.0))


def _down_the_columns() -> Demonstration:
    return _first_row(_along(0) @ exercise()[2])


ANSWERS: tuple[Answer, ...] = (
    Answer(
        Place("exercises", "1"),
        question="The vector $s = (1, 2, 1)$ attends to $h_1 = (1, 2, 3)$, $h_2 = (1, 2, 1)$ and "
        "$h_3 = (0, 1, -1)$ by plain dot products. What are the weights and the context vector?",
        answer="The scores are 8, 6 and 1, the weights about .880, .119 and .001, and the context "
        "about $(0.999, 1.999, 2.759)$: nearly $h_1$. There is no scale here, and keys and values "
        "are the same vectors.",
        derivation=(
            Step(
                "The scores.",
                r"s \cdot h_1 = 1 + 4 + 3 = 8, \quad s \cdot h_2 = 1 + 4 + 1 = 6, \quad s \cdot "
                "h_3 = 0 + 2 - 1 = 1",
            ),
            Step(
                "Their softmax.",
                r"a = \frac{(e^8, e^6, e^1)}{e^8 + e^6 + e^1} = \frac{(1, e^{-2}, e^{-7})}{1 + "
                "e^{-2} + e^{-7}}",
            ),
            Step("The context.", r"c = a_1 h_1 + a_2 h_2 + a_3 h_3"),
        ),
        run=_one_vector,
        mistakes=(
            Mistake(
                r"The scores are divided by $\sqrt{3}$.",
                "The exercise asks for plain dot products; scaling comes with the Transformer, in "
                "exercise 2.",
                _scaled_by_habit,
            ),
        ),
        points=(Point(1, "the scores 8, 6, 1"), Point(1, "the weights"), Point(1, "the context")),
    ),
    Answer(
        Place("exercises", "2"),
        question=r"What is scaled dot-product attention, for $Q$ ($n_q \times d_k$), $K$ ($n_k "
        r"\times d_k$) and $V$ ($n_k \times d_v$)?",
        answer=r"$C = \operatorname{softmax}(Q K^\top / \sqrt{d_k})\, V$, of $n_q \times d_v$: "
        "every query's mean of the values, by the softmax of its scores.",
        derivation=(
            Step(
                "Scores of all pairs.",
                r"S = \frac{Q K^\top}{\sqrt{d_k}} \in \mathbb{R}^{n_q \times n_k}",
            ),
            Step(
                "Weights and their means of the values.",
                r"A_{ij} = \frac{e^{S_{ij}}}{\sum_l e^{S_{il}}}, \qquad C = A V \in "
                r"\mathbb{R}^{n_q \times d_v}",
            ),
        ),
        run=_formula,
        mistakes=(
            Mistake(
                "The weights are multiplied by $K$ once more.",
                "Keys are for finding, values are what is found; they need not even be equally "
                "wide.",
                _keys_for_values,
            ),
        ),
        points=(Point(1, "the formula and the shape of $C$"),),
    ),
    Answer(
        Place("exercises", "2(a)"),
        question="Along which direction does the softmax run, and what is the shape of its result?",
        answer="Along the rows: a row has the scores of one query, and its weights have to add up "
        r"to 1. The softmax keeps the shape, $n_q \times n_k$. (The output $C$ is $n_q \times "
        "d_v$.)",
        derivation=(
            Step(
                r"Row $i$ of $Q K^\top$ belongs to query $i$.", r"(Q K^\top)_{ij} = q_i \cdot k_j"
            ),
            Step(
                "A mean needs weights that add up to 1.",
                r"\sum_{j=1}^{n_k} A_{ij} = 1 \quad \text{for every } i",
            ),
        ),
        run=_row_wise,
        mistakes=(
            Mistake(
                "Along the columns.",
                "Then the weights of a query need not add up to 1, and $C$ is no mean of the "
                "values.",
                _column_wise,
            ),
            Mistake(
                r"The softmax's result is $n_q \times d_v$.",
                "That is the shape after the product with $V$.",
                _shape_of_the_output,
            ),
        ),
        points=(Point(1, "row by row, with the reason"), Point(1, r"$n_q \times n_k$")),
    ),
    Answer(
        Place("exercises", "2(b)"),
        question="What is $d$, and why is it there?",
        answer="$d = d_k$, the width of queries and keys. For entries of variance 1 a dot product "
        "has variance $d_k$: for a large $d_k$ the scores are far apart, the softmax is nearly "
        "one-hot, and its gradient, which is $a(1 - a)$ on the diagonal, vanishes. Dividing by "
        r"the standard deviation $\sqrt{d_k}$ keeps the scores at variance 1.",
        derivation=(
            Step(
                "Independent entries of mean 0 and variance 1.",
                r"\operatorname{Var}\left(\sum_{i=1}^{d_k} q_i k_i\right) = d_k",
            ),
            Step(
                "The softmax's derivative vanishes where a weight is 0 or 1.",
                r"\frac{\partial a_i}{\partial s_j} = a_i (\delta_{ij} - a_j)",
            ),
        ),
        run=_scaled,
        mistakes=(
            Mistake(
                "$d = d_v$, the width of the values.",
                "Values have no part in the scores.",
                _value_width,
            ),
            Mistake(
                "$d$ itself divides, not its root.",
                r"The standard deviation is $\sqrt{d_k}$; dividing by $d_k$ makes the weights "
                "nearly equal.",
                _width_itself,
            ),
        ),
        points=(Point(1, "$d = d_k$"), Point(1, "the variance, and the softmax's gradient")),
    ),
    Answer(
        Place("exercises", "2(c)"),
        question="How many additions and multiplications does attention take, not counting "
        "exponentials, and what is its complexity?",
        answer="$n_q n_k (d_k + d_v)$ multiplications, $2 n_q n_k$ divisions and $n_q n_k (d_k - "
        "1) + n_q (n_k - 1) + n_q d_v (n_k - 1)$ additions: $O(n_q n_k (d_k + d_v))$.",
        derivation=(
            Step(
                r"$Q K^\top$ has $n_q n_k$ entries, each a sum of $d_k$ products.",
                r"n_q n_k d_k \text{ mul}, \quad n_q n_k (d_k - 1) \text{ add}",
            ),
            Step(
                r"Each is divided by $\sqrt{d_k}$; each row is added up, and each entry divided by "
                "the sum.",
                r"n_q n_k \text{ div}; \qquad n_q (n_k - 1) \text{ add}, \quad n_q n_k \text{ div}",
            ),
            Step(
                "$A V$ has $n_q d_v$ entries, each a sum of $n_k$ products.",
                r"n_q d_v n_k \text{ mul}, \quad n_q d_v (n_k - 1) \text{ add}",
            ),
        ),
        run=_counts,
        mistakes=(
            Mistake(
                r"The complexity is $O(n_q n_k d_k)$.",
                "The second product is left out. For wide values it is most of the work.",
                _without_values,
            ),
        ),
        points=(
            Point(1, r"$Q K^\top$"),
            Point(1, "scaling and softmax"),
            Point(1, "$A V$"),
            Point(1, "the sum, $O(n_q n_k (d_k + d_v))$"),
        ),
    ),
    Answer(
        Place("exercises", "2(d)"),
        question="What are the values and the shape of the matrix that is added before the softmax "
        "in the masked variant, for $n_q = n_k = n$?",
        answer=r"It is $n \times n$, with $-\infty$ strictly above the diagonal and 0 on it and "
        "below: position $i$ may attend to itself and to what comes before. A weight of "
        r"$e^{-\infty} = 0$ leaves the others to add up to 1.",
        derivation=(
            Step("The mask.", r"M_{ij} = \begin{cases} 0 & j \le i \\ -\infty & j > i \end{cases}"),
            Step(
                "Its effect.",
                r"A_{ij} = \frac{e^{S_{ij} + M_{ij}}}{\sum_l e^{S_{il} + M_{il}}} = 0 \quad "
                r"\text{for } j > i",
            ),
        ),
        run=_masked,
        mistakes=(
            Mistake(
                r"$-\infty$ stands on the diagonal as well.",
                "Then the first position may attend to nothing, and its weights are $0/0$.",
                _own_position,
            ),
            Mistake(
                "The scores are multiplied by a matrix of 0 and 1.",
                "A score of 0 is an ordinary score, with $e^0 = 1$: later positions keep weight.",
                _zeros_and_ones,
            ),
        ),
        points=(
            Point(1, r"$n \times n$, triangular"),
            Point(1, r"$-\infty$ strictly above the diagonal, 0 elsewhere"),
        ),
    ),
    Answer(
        Place("exercises", "3"),
        question=r"Compute $C$ by scaled dot-product attention for $Q = \begin{bmatrix} 1 & 2 \\ 3 "
        r"& 1 \end{bmatrix}$, $K = \begin{bmatrix} 2 & 1 \\ 1 & 1 \\ 0 & 1 \end{bmatrix}$ and $V "
        r"= \begin{bmatrix} 1 & 2 & -2 \\ 1 & 1 & 2 \\ 0 & 1 & -1 \end{bmatrix}$.",
        answer="The weights are about $[.576, .284, .140]$ and $[.882, .106, .013]$, and $C$ about "
        "$[.860, 1.576, -.724]$ and $[.987, 1.882, -1.565]$. `regard attend` prints every step.",
        derivation=(
            Step(
                r"The scores, to be divided by $\sqrt{2}$.",
                r"Q K^\top = \begin{bmatrix} 4 & 3 & 2 \\ 7 & 4 & 1 \end{bmatrix}",
            ),
            Step(
                "Row by row, exponentials divided by their sum.",
                r"A_{11} = \frac{1}{1 + e^{-1/\sqrt{2}} + e^{-2/\sqrt{2}}}, \qquad A_{21} = "
                r"\frac{1}{1 + e^{-3/\sqrt{2}} + e^{-6/\sqrt{2}}}",
            ),
            Step("The means of the values.", r"C = A V"),
        ),
        run=_by_hand,
        mistakes=(
            Mistake(
                "The scale is forgotten.",
                "Then the weights are sharper than they should be.",
                _unscaled,
            ),
            Mistake(
                "The softmax is taken down the columns.",
                "Then the weights of a query do not add up to 1.",
                _down_the_columns,
            ),
            Mistake(
                r"The scores are divided by $\sqrt{d_v} = \sqrt{3}$.",
                "The scale belongs to keys and queries: $d_k = 2$.",
                _value_width,
            ),
        ),
        points=(
            Point(1, r"$Q K^\top$ and the scale $\sqrt{2}$"),
            Point(1, "the weights"),
            Point(1, "$C$"),
        ),
    ),
)
