"""Homework 1.1(a) to (d): the output of attention, and its temperature."""

import math

import torch
from torch import Tensor

from regard import attend, attention_statistics, attention_weights
from regard.lab.answers.answer import Answer, Demonstration, Mistake, Point, Step
from regard.lab.byhand import exercise
from regard.lab.claims.sample import SAME, apart, normal
from regard.lab.experiment import Table
from regard.lab.place import Place

d, n, m, t = 5, 3, 7, 2
"""Sizes of the homework's matrices: Q is d×n, K d×m, V t×m."""


def _columns() -> tuple[Tensor, Tensor, Tensor]:
    return normal(0, d, n), normal(1, d, m), normal(2, t, m)


# (a) The output


def _output() -> Demonstration:
    Q, K, V = _columns()
    A = torch.softmax(d**-0.5 * K.T @ Q, 0)
    H, ours = V @ A, attend(Q.T, K.T, V.T).T
    return Demonstration(
        H.shape == (t, n) and apart(H, ours) < SAME,
        {
            "rows and columns of KᵀQ": list((K.T @ Q).shape),
            "rows and columns of H": list(H.shape),
            "columns of A add up to": A.sum(0).tolist(),
            "largest difference from attend()": apart(H, ours),
        },
    )


def _along_rows() -> Demonstration:
    Q, K, V = _columns()
    A = torch.softmax(d**-0.5 * K.T @ Q, 1)
    sums = A.sum(0)
    return Demonstration(
        apart(sums, torch.ones(n)) < SAME,
        {
            "a query's weights add up to": sums.tolist(),
            "largest difference from attend()": apart(V @ A, attend(Q.T, K.T, V.T).T),
        },
    )


# (b) The scale


def _sharpness() -> Demonstration:
    query, key, _ = exercise()
    betas = (0.0, 0.1, 2**-0.5, 2.0, 10.0, math.inf)
    shares = [attention_weights(query, key, beta=beta)[0] for beta in betas]
    entropy = [float(attention_statistics(query, key, beta=beta).entropy[0]) for beta in betas]
    widths = (16, 64, 256)
    deviations = [float((normal(1, 4001, w) * normal(2, 4001, w)).sum(-1).std()) for w in widths]
    return Demonstration(
        entropy == sorted(entropy, reverse=True)
        and apart(shares[0], torch.full_like(shares[0], 1 / 3)) < SAME
        and shares[-1].tolist() == [1, 0, 0]
        and all(abs(s / w**0.5 - 1) < 0.05 for s, w in zip(deviations, widths)),
        tables=(
            Table(
                "Weights of the worked exercise's first query",
                ("β", "key 1", "key 2", "key 3", "entropy"),
                tuple((b, *a.tolist(), e) for b, a, e in zip(betas, shares, entropy)),
            ),
            Table(
                "Standard deviation of q·k in 4,001 draws",
                ("d", "q·k", "q·k / √d"),
                tuple((w, s, s / w**0.5) for w, s in zip(widths, deviations)),
            ),
        ),
    )


def _value_width() -> Demonstration:
    Q, K, _ = _columns()
    share = float(attention_weights(Q.T, K.T, beta=0)[0, 0])
    return Demonstration(
        abs(share - 1 / t) < SAME,
        {"weight at β = 0": share, "1/t, with t rows of V": 1 / t, "1/m, with m keys": 1 / m},
    )


def _divided_by_width() -> Demonstration:
    width = 256
    query, key = normal(1, 1001, width), normal(2, 16, width)
    spread = {
        name: float((beta * query @ key.T).std())
        for name, beta in (("β = 1/√d", width**-0.5), ("β = 1/d", 1 / width))
    }
    entropy = attention_statistics(query, key, beta=1 / width).entropy.mean()
    return Demonstration(
        abs(spread["β = 1/d"] - 1) < 0.1,
        {f"standard deviation of the scores, {name}": s for name, s in spread.items()}
        | {"entropy at β = 1/d, as a share of the most": float(entropy) / math.log(16)},
    )


# (c) and (d) One value, or the mean of all


def _distances(betas: tuple[float, ...], wanted: Tensor) -> list[float]:
    """How far the worked exercise's outputs are from what is wanted."""
    query, key, value = exercise()
    return [apart(attend(query, key, value, beta=b), wanted.expand(2, 3)) for b in betas]


def _preserved() -> Demonstration:
    _, _, value = exercise()
    betas = (0.01, 1.0, 10.0, 40.0, math.inf)
    errors = _distances(betas, value[0])
    dense = torch.nn.functional.linear(value.T, torch.eye(3, dtype=torch.float64)).T
    return Demonstration(
        errors == sorted(errors, reverse=True) and errors[-1] == 0 and bool((dense == value).all()),
        {"a dense layer of identity weights changes V by": apart(dense, value)},
        (
            Table(
                "Both queries of the worked exercise match key 1 best",
                ("β", "largest distance of h from the first value"),
                tuple(zip(betas, errors)),
            ),
        ),
    )


def _small_for_cold() -> Demonstration:
    _, _, value = exercise()
    (from_value,), (from_mean,) = (_distances((0.01,), w) for w in (value[0], value.mean(0)))
    return Demonstration(
        from_value < from_mean,
        {
            "at β = 0.01, distance of h from the value": from_value,
            "at β = 0.01, distance of h from the mean of all values": from_mean,
        },
    )


def _spread() -> Demonstration:
    _, key, value = exercise()
    betas = (10.0, 1.0, 0.1, 0.01, 0.0)
    errors = _distances(betas, value.mean(0))
    dense = torch.full((3, 3), 1 / 3, dtype=torch.float64) @ value
    equal = attention_weights(torch.zeros(1, 2, dtype=torch.float64), key, beta=7.0)[0]
    return Demonstration(
        errors == sorted(errors, reverse=True)
        and errors[-1] < SAME
        and apart(dense, value.mean(0).expand(3, 3)) < SAME,
        {
            "weights where all scores are equal, at β = 7": equal.tolist(),
            "a dense layer of weights 1/3, distance from the mean": apart(
                dense, value.mean(0).expand(3, 3)
            ),
        },
        (
            Table(
                "The worked exercise",
                ("β", "largest distance of h from the mean of the values"),
                tuple(zip(betas, errors)),
            ),
        ),
    )


def _big_for_hot() -> Demonstration:
    query, key, value = exercise()
    betas = (0.0, 1.0, 100.0)
    entropy = [float(attention_statistics(query, key, beta=beta).entropy.mean()) for beta in betas]
    (from_mean,) = _distances((100.0,), value.mean(0))
    return Demonstration(
        entropy[-1] > entropy[0],
        {
            "entropy of the weights at β = 0, 1 and 100": entropy,
            "the most that three weights can have": math.log(3),
            "at β = 100, distance of h from the mean of the values": from_mean,
        },
    )


def _some_near_one() -> Demonstration:
    """Weights near 0 and 1 beside equal ones: which output is nearer to the mean?"""
    _, _, value = exercise()
    uneven = torch.tensor([0.98, 0.01, 0.01], dtype=torch.float64)
    even = torch.full_like(uneven, 1 / 3)
    entropy = {n: float(-(a * a.log()).sum()) for n, a in (("uneven", uneven), ("even", even))}
    return Demonstration(
        entropy["uneven"] >= entropy["even"],
        {
            "entropy of (.98, .01, .01) and of (1/3, 1/3, 1/3)": list(entropy.values()),
            "share of the output that is one value": float(uneven.max()),
            "distance of the output from the mean": apart(uneven @ value, value.mean(0)),
        },
    )


ANSWERS: tuple[Answer, ...] = (
    Answer(
        Place("homework", "1.1(a)"),
        question=r"With queries $Q$ ($d \times n$), keys $K$ ($d \times m$) and values $V$ ($t "
        r"\times m$) as columns: what does dot-product attention give?",
        answer=r"$H = V \ \operatorname{softargmax}_\beta(K^\top Q)$, with $t$ rows and $n$ "
        "columns: one column for each query, as wide as a value.",
        derivation=(
            Step("Query $i$ has a score for each of the $m$ keys.", r"s_i = K^\top q_i"),
            Step(
                "The softargmax makes them shares that add up to 1, column by column.",
                r"a_i = \operatorname{softargmax}_\beta(s_i), \qquad A = [a_1 \dots a_n]",
            ),
            Step(
                "The output is the mean of the values, weighted by the shares.",
                r"h_i = \sum_j a_{ji} v_j, \qquad H = V A",
            ),
        ),
        run=_output,
        mistakes=(
            Mistake(
                r"The softargmax is taken along the rows of $K^\top Q$.",
                "Then the weights of one query no longer add up to 1: queries compete for a key, "
                "instead of keys for a query.",
                _along_rows,
            ),
        ),
        points=(
            Point(0.5, r"$H = V \ \operatorname{softargmax}_\beta(K^\top Q)$, column by column"),
            Point(0.5, r"its shape, $t \times n$"),
        ),
    ),
    Answer(
        Place("homework", "1.1(b)"),
        question=r"What does $\beta$ do to the output, and which $\beta$ is convenient?",
        answer=r"$\beta$ is an inverse temperature. A small one (hot) makes the weights equal, and "
        r"at $\beta = 0$ all $m$ of them are $1/m$. A large one (cold) makes them sharp, and as "
        r"$\beta \to \infty$ the weights are one-hot at the index of the best key. $\beta = "
        r"1/\sqrt{d}$ is convenient: the scores then vary by about 1, whatever $d$ is.",
        derivation=(
            Step(
                r"$\beta$ multiplies every difference of scores.",
                r"\frac{a_j}{a_l} = e^{\beta (s_j - s_l)}",
            ),
            Step(
                "With independent entries of mean 0 and variance 1, a score's variance is the sum "
                "of $d$ variances.",
                r"\operatorname{Var}(q \cdot k) = \sum_{i=1}^{d} \operatorname{Var}(q_i k_i) = d",
            ),
            Step(
                "Dividing by the standard deviation makes it 1 again.",
                r"\operatorname{Var}(\beta\, q \cdot k) = \beta^2 d = 1 \quad \iff \quad \beta = "
                r"\frac{1}{\sqrt{d}}",
            ),
        ),
        run=_sharpness,
        mistakes=(
            Mistake(
                "The hot limit is $1/t$, with the $t$ of question (a).",
                "The weights are shared by the keys, of which there are $m$; $t$ is the number of "
                "entries of a value, and has no part in the weights.",
                _value_width,
            ),
            Mistake(
                r"$\beta = 1/d$, to divide by the width.",
                "The variance is $d$, and its root is the scale: $1/d$ makes the scores vary by "
                r"$1/\sqrt{d}$ only, and the weights are nearly equal.",
                _divided_by_width,
            ),
        ),
        points=(
            Point(1, r"a larger $\beta$ is sharper, with both limits"),
            Point(1, r"$1/\sqrt{d}$, because the variance of a score is $d$"),
        ),
    ),
    Answer(
        Place("homework", "1.1(c)"),
        question=r"When does an output equal one of the values? Which $\beta$ does that, what kind "
        "of attention is it (self or cross, hard or soft), and how would a dense layer do it?",
        answer="When a column of $A$ is one-hot: $h_i = v_j$ if all the weight is on key $j$. For "
        r"every query that is $\beta \to \infty$, the cold limit: hard attention, self or cross. "
        "The identity $A = I$ is the case in which every value also keeps its place. A dense "
        "layer over the positions does it with one-hot rows and no bias; with $I$ it keeps all of "
        "them.",
        derivation=(
            Step(
                "Let key $j$ be the best one for query $i$, and only that.",
                r"a_{ji} = \frac{1}{1 + \sum_{l \ne j} e^{-\beta (s_j - s_l)}}",
            ),
            Step(
                r"Every exponent is negative, so that a growing $\beta$ removes the sum.",
                r"\beta \to \infty: \quad a_{ji} \to 1, \qquad h_i \to v_j",
            ),
        ),
        run=_preserved,
        mistakes=(
            Mistake(
                r"$\beta$ has to be cold, that is, very small.",
                r"$\beta$ is an inverse temperature: cold is a large $\beta$. A very small one "
                "gives the mean of all values.",
                _small_for_cold,
            ),
        ),
        points=(
            Point(1, "one-hot weights; $A = I$ as one such case"),
            Point(1, r"$\beta \to \infty$, which is cold; hard attention"),
            Point(1, "a dense layer of one-hot or identity weights, without bias"),
        ),
    ),
    Answer(
        Place("homework", "1.1(d)"),
        question=r"When is an output the most even mixture of the values? Which $\beta$ does that, "
        "which type of attention is it, and how would a dense layer do it?",
        answer=r"When all weights are equal, $1/m$: then $h$ is the mean of the values. $\beta \to "
        r"0$ does it for any scores, and equal scores do it for any $\beta$. It is soft "
        "attention, in the hot limit. A dense layer over the positions does it with all weights "
        "$1/m$, and no bias.",
        derivation=(
            Step(
                r"At $\beta = 0$ every exponential is 1.",
                r"a_{ji} = \frac{e^{0}}{\sum_l e^{0}} = \frac{1}{m}, \qquad h_i = \frac{1}{m} "
                r"\sum_j v_j",
            ),
            Step(
                "No weights are spread more evenly: the entropy has its maximum there.",
                r"-\sum_j a_{ji} \ln a_{ji} \le \ln m",
            ),
        ),
        run=_spread,
        mistakes=(
            Mistake(
                r"$\beta$ has to be very big, or hot.",
                r"Hot is right, but it means a small $\beta$. A big one picks a single value.",
                _big_for_hot,
            ),
            Mistake(
                "A few weights are nearly 1, and all others nearly 0.",
                "That is nearly hard attention: one value is passed on. Spread evenly, no weight "
                "is above $1/m$.",
                _some_near_one,
            ),
        ),
        points=(
            Point(1, "equal weights $1/m$; the output is the mean"),
            Point(1, r"$\beta \to 0$, which is hot; soft attention"),
            Point(1, "a dense layer of weights $1/m$"),
        ),
    ),
)
