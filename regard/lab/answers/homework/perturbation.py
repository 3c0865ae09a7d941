"""Homework 1.1(e) and (f): what a change of one key does."""

import torch

from regard import attend, attention_weights
from regard.lab.answers.answer import Answer, Demonstration, Mistake, Point, Step
from regard.lab.answers.plots import KEY, QUERY, VALUE, moved, moving_key
from regard.lab.claims.sample import SAME, apart, normal
from regard.lab.experiment import Table
from regard.lab.place import Place


def _small_change() -> Demonstration:
    a, h = attention_weights(QUERY, KEY)[0, 0], attend(QUERY, KEY, VALUE)
    rows = []
    for by in (0.001, 0.01, 0.1, 1.0, -1.0):
        change = by * (QUERY**2).sum() * 2**-0.5  # βδ
        after = a * change.exp() / (1 + a * change.expm1())
        new = attend(QUERY, moved(by), VALUE)
        exact = h + (after - a) / (1 - a) * (VALUE[0] - h)
        linear = h + a * change * (VALUE[0] - h)
        rows.append((by, apart(exact, new), apart(linear, new) / apart(new, h)))
    return Demonstration(
        max(row[1] for row in rows) < SAME and rows[0][2] < 0.001 and rows[-1][2] > 0.1,
        tables=(
            Table(
                "Key 1 of four moves along the query",
                ("by", "exact formula: error", "first order: error, relative to the move"),
                tuple(rows),
            ),
        ),
        figures=(moving_key(),),
    )


def _two_softmaxes() -> Demonstration:
    scores, change = normal(0, 5), torch.tensor([0.3, 0, 0, 0, 0], dtype=torch.float64)
    right = torch.softmax(scores + change, 0)
    added = torch.softmax(scores, 0) + torch.softmax(change, 0)
    return Demonstration(
        apart(added, right) < SAME,
        {
            "softargmax of the sum adds up to": float(right.sum()),
            "the sum of two softargmaxes adds up to": float(added.sum()),
            "largest difference between them": apart(added, right),
        },
    )


def _one_by_one() -> Demonstration:
    scores, value = normal(0, 5), normal(1, 3, 5)
    alone = torch.stack([torch.softmax(score, 0) for score in scores[:, None]])[:, 0]
    together = torch.softmax(scores, 0)
    return Demonstration(
        apart(alone, together) < SAME,
        {
            "softargmax of each score by itself": alone.tolist(),
            "softargmax of all scores together": together.tolist(),
            "numbers in V a": list((value @ together).shape),
            "numbers in V times five such weights, stacked": list(
                torch.stack([value * a for a in alone]).shape
            ),
        },
    )


DIRECTIONS = {"q·k > 0": (2, 1, 0), "q·k = 0": (2, 1, -2), "q·k < 0": (-2, 1, -1)}
ALPHAS = (1.0, 2.0, 5.0, 20.0, 100.0)


def _stretched(direction: tuple[int, ...]) -> tuple[list[float], list[float]]:
    """The weight of the longer key for each α, and the output's distance from its value."""
    query = torch.tensor([[1.0, 2.0, 2.0]], dtype=torch.float64)
    others, value = normal(1, 6, 3), normal(2, 7, 3)
    shares, distances = [], []
    for alpha in ALPHAS:
        longer = alpha * torch.tensor([direction], dtype=torch.float64)
        key = torch.cat((longer, others))
        shares.append(float(attention_weights(query, key)[0, 0]))
        distances.append(apart(attend(query, key, value)[0], value[0]))
    return shares, distances


def _longer() -> Demonstration:
    found = {name: _stretched(direction) for name, direction in DIRECTIONS.items()}
    along, across, against = (shares for shares, _ in found.values())
    return Demonstration(
        along == sorted(along)
        and along[-1] > 1 - SAME
        and max(across) - min(across) < SAME
        and against[-1] < SAME,
        {f"distance of h from v, α = {ALPHAS[-1]:g}, {n}": x[-1] for n, (_, x) in found.items()},
        (
            Table(
                "Weight of the key that is made longer",
                ("α", *found),
                tuple(zip(ALPHAS, along, across, against)),
            ),
        ),
    )


def _always_more() -> Demonstration:
    shares, _ = _stretched(DIRECTIONS["q·k < 0"])
    return Demonstration(
        shares[-1] >= shares[0],
        {f"weight at α = {alpha:g}, q·k < 0": a for alpha, a in zip(ALPHAS, shares)},
    )


SEPARATE = Mistake(
    "The softargmax acts on each score by itself, so that $Va$ is a stack of blocks $V "
    r"\operatorname{softargmax}_\beta(k_j \cdot q)$.",
    "A softargmax compares scores; of a single number it is always 1. And the blocks do not fit: "
    "$h$ has $t$ numbers.",
    _one_by_one,
)

ANSWERS: tuple[Answer, ...] = (
    Answer(
        Place("homework", "1.1(e)"),
        question=r"One key changes by a small random $\epsilon$. How does $H$ change?",
        answer=r"To first order linearly: query $q$'s output moves by $\beta\, a_j \delta\, (v_j - "
        r"h)$ with $\delta = \epsilon \cdot q$, toward that key's value where $\delta > 0$ and "
        r"away from it where $\delta < 0$. For an $\epsilon$ of mean 0 the mean change is 0, to "
        "this order. The exact change is known too: each output slides on the straight line "
        "between $v_j$ and the mean of the others.",
        derivation=(
            Step(
                r"One score grows, and with it one exponential. With $\delta = \epsilon \cdot q$:",
                r"a_j' = \frac{a_j e^{\beta\delta}}{1 + a_j (e^{\beta\delta} - 1)}",
            ),
            Step(
                "All other weights shrink by one and the same factor.",
                r"a_l' = a_l \frac{1 - a_j'}{1 - a_j}, \qquad l \ne j",
            ),
            Step(
                "So the output moves along one line.",
                r"h' = h + \frac{a_j' - a_j}{1 - a_j} (v_j - h)",
            ),
            Step(
                r"For a small $\delta$, $a_j' - a_j \approx \beta \delta a_j (1 - a_j)$.",
                r"h' = h + \beta a_j \delta (v_j - h) + O(\delta^2)",
            ),
        ),
        run=_small_change,
        mistakes=(
            Mistake(
                r"$\operatorname{softargmax}(k \cdot q + \epsilon \cdot q)$ is split into "
                r"$\operatorname{softargmax}(k \cdot q) + \operatorname{softargmax}(\epsilon "
                r"\cdot q)$.",
                "Exponentials of a sum multiply, they do not add; and two softargmaxes add up to "
                "2.",
                _two_softmaxes,
            ),
            SEPARATE,
        ),
        points=(
            Point(1, r"only key $j$'s score changes, by $\epsilon \cdot q$, and so all weights"),
            Point(1, r"to first order the output moves linearly, by $\beta a_j \delta (v_j - h)$"),
        ),
    ),
    Answer(
        Place("homework", "1.1(f)"),
        question=r"One key is multiplied by $\alpha > 1$. How does $H$ change?",
        answer=r"That depends on the query. Where $q \cdot k > 0$ the key's weight grows, to 1 as "
        r"$\alpha \to \infty$, and the output goes to its value. Where $q \cdot k < 0$ the weight "
        r"falls to 0, and the output goes to the mean of the others. Where $q \cdot k = 0$ "
        "nothing changes.",
        derivation=(
            Step("The key's score is multiplied as well.", r"s_j' = \alpha s_j"),
            Step(
                "That is question (e) with a change that may be large.",
                r"\delta = (\alpha - 1)\, q \cdot k_j, \qquad a_j' = \frac{a_j e^{\beta\delta}}{1 "
                r"+ a_j (e^{\beta\delta} - 1)}",
            ),
            Step(
                "Its sign decides.",
                r"a_j' \to 1 \text{ if } q \cdot k_j > 0, \qquad a_j' \to 0 \text{ if } q \cdot "
                "k_j < 0",
            ),
        ),
        run=_longer,
        mistakes=(
            Mistake(
                "A longer key draws more attention.",
                "Only from queries on its side. From the others it draws less, since their scores "
                "become more negative.",
                _always_more,
            ),
            SEPARATE,
        ),
        points=(
            Point(
                1, r"the score is multiplied by $\alpha$, so that the sign of $q \cdot k$ decides"
            ),
            Point(1, "the limits: that value alone, the mean of the others, or no change"),
        ),
    ),
)
