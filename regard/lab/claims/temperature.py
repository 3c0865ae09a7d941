"""Temperature: how sharp attention is.

    a = softmax(β s)        β → 0 spreads it over all keys, β → ∞ puts it on the best one

β is an inverse temperature: cold is a large β. Hard attention, β = ∞, copies values; soft
attention mixes them.
"""

import math
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard import attend, statistics, weights
from regard.attention.score import Dot
from regard.lab.byhand import exercise
from regard.lab.claims import plain
from regard.lab.claims.sample import SAME, apart, normal, orthonormal
from regard.lab.experiment import Curve, Experiment, Finding, Plot, Table, corrected, holds
from regard.lab.place import Place

BETAS = tuple(10 ** (n / 4) for n in range(-8, 9))
"""From 0.01 to 100."""


def sharpness() -> Finding:
    query, key, _ = exercise()
    entropy = [float(statistics(query, key, beta=beta).entropy[0]) for beta in BETAS]
    largest = [float(weights(query, key, beta=beta)[0].max()) for beta in BETAS]
    by_hand = [_entropy(plain.softmax(beta * plain.array(query @ key.T))[0]) for beta in BETAS]
    worst = max(abs(ours - theirs) for ours, theirs in zip(entropy, by_hand))
    # Beyond a β of about 30 the entropy is less than float64 can take from a weight of 1.
    falls = all(a > b for (a, b), beta in zip(pairwise(entropy), BETAS) if beta < 20)
    rises = all(a < b for (a, b), beta in zip(pairwise(largest), BETAS) if beta < 20)
    return Finding(
        holds(falls and rises and worst < SAME),
        {
            "entropy at β = 0.01, in nats": entropy[0],
            "entropy at β = 100": entropy[-1],
            "log 3": math.log(3),
            "largest weight at β = 0.01": largest[0],
            "largest weight at β = 100": largest[-1],
        },
        plots=(
            Plot(
                "first query of exercise 3",
                "β",
                "nats, or share",
                (Curve("entropy", BETAS, entropy), Curve("largest weight", BETAS, largest)),
                log_x=True,
            ),
        ),
    )


def cold_limit() -> Finding:
    scores = torch.tensor([[4, 2, 3], [1, 5, 0]])
    limit = _softargmax(scores, math.inf)
    encoded = F.one_hot(scores)
    index = F.one_hot(scores.argmax(-1), 3)
    taught = encoded.shape == limit.shape and torch.equal(encoded.double(), limit)
    # The largest score may have any value: only where it stands counts.
    shifted = apart(_softargmax(scores + 7, math.inf), limit)
    near = apart(_softargmax(scores, 50.0), limit)
    tied = _softargmax(torch.tensor([[4, 4, 3]]), math.inf)[0]
    correct = torch.equal(index.double(), limit) and shifted == 0 and near < SAME
    correct = correct and tied.tolist() == [0.5, 0.5, 0]
    return Finding(
        corrected(taught, correct),
        {
            "scores": scores.tolist(),
            "limit": limit.tolist(),
            "one-hot of the scores has shape": list(encoded.shape),
            "limit has shape": list(limit.shape),
            "limit minus that of scores larger by 7": shifted,
            "two best scores": tied.tolist(),
        },
    )


def hot_limit() -> Finding:
    query, key, value = normal(0, 3, 5), normal(1, 7, 5), normal(2, 7, 2)
    uniform = torch.full((3, 7), 1 / 7, dtype=torch.float64)
    zero = apart(weights(query, key, beta=0.0), uniform)
    mean = apart(attend(query, key, value, beta=0.0), value.mean(0).expand(3, 2))
    betas = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)
    distance = [apart(weights(query, key, beta=beta), uniform) for beta in betas]
    slope = math.log10(distance[1] / distance[0])
    return Finding(
        holds(max(zero, mean) < SAME and abs(slope - 1) < 0.01),
        {
            "β = 0, weights minus 1/7": zero,
            "β = 0, output minus the mean of the values": mean,
            "distance at β = 0.001": distance[1],
            "power of β by which it grows": slope,
        },
        plots=(
            Plot(
                "how far from uniform, 7 keys",
                "β",
                "largest |a - 1/7|",
                (Curve("distance", betas, distance),),
                log_x=True,
                log_y=True,
            ),
        ),
    )


def convenient_beta() -> Finding:
    keys, choices = 8, ("1/√d", "1/d", "1")
    rows, natural = [], True
    for d in (4, 16, 64, 256):
        query, key = normal(0, 1, 200, d), normal(1, 40, keys, d)
        # How much less than the entropy of uniform weights: 0 is no choice at all.
        decided = [
            math.log(keys) - float(statistics(query, key, beta=beta).entropy.mean())
            for beta in (d**-0.5, 1 / d, 1.0)
        ]
        ours = math.log(keys) - float(statistics(query, key).entropy.mean())
        natural &= abs(ours - decided[0]) < SAME
        rows.append((d, float(Dot()(query, key).var()) / d, *decided))
    ratios = [max(column) / min(column) for column in list(zip(*rows))[2:]]
    return Finding(
        holds(natural and ratios[0] < 1.1 and min(ratios[1:]) > 2),
        {
            "attend's own β is 1/√d": natural,
            **{f"most over least, β = {name}": ratio for name, ratio in zip(choices, ratios)},
        },
        tables=(
            Table(
                "how decided random vectors are: log 8 minus the mean entropy, in nats",
                ("d", "variance of q·k/√d", *(f"β = {name}" for name in choices)),
                (*rows,),
            ),
        ),
    )


def preserving_a_value() -> Finding:
    query, key, value = exercise()

    def lost(beta: float) -> float:
        """How far the first query's output is from the value of its best key."""
        return float((attend(query, key, value, beta=beta)[0] - value[0]).norm())

    small, large = lost(0.01), lost(50.0)
    some = (0.0, 0.1, 1 / math.sqrt(2), 2.0, 10.0)
    first = [float(weights(query, key, beta=beta)[0, 0]) for beta in some]
    # The first query's scores are 4, 3 and 2.
    by_hand = [1 / (1 + math.exp(-beta) + math.exp(-2 * beta)) for beta in some]
    agree = max(abs(a - b) for a, b in zip(first, by_hand)) < SAME
    return Finding(
        corrected(small < 1e-6, large < 1e-6 and agree),
        {
            "A₁₁ at β = 0, 0.1, 0.707, 2, 10": first,
            "distance from the value, β = 0.01": small,
            "distance from the value, β = 50": large,
        },
        plots=(
            Plot(
                "first query of exercise 3",
                "β",
                "distance of the output from the value",
                (Curve("|c₁ - v₁|", BETAS[:13], [lost(beta) for beta in BETAS[:13]]),),
                log_x=True,
                log_y=True,
            ),
        ),
    )


def one_hot_suffices() -> Finding:
    key, value = orthonormal(0, 4, 4), normal(1, 4, 3)
    wanted = torch.tensor([2, 2, 0, 3])
    shares = weights(key[wanted], key, beta=math.inf)
    output = attend(key[wanted], key, value, beta=math.inf)
    one_hot = bool(((shares == 1).sum(-1) == 1).all())
    preserved = apart(output, value[wanted])
    return Finding(
        corrected(
            preserved < SAME and torch.equal(shares, torch.eye(4).double()),
            preserved < SAME and one_hot,
        ),
        {
            "weights": shares.tolist(),
            "output minus the values that were asked for": preserved,
            "every row has one 1": one_hot,
        },
    )


def hard_attention() -> Finding:
    query, key, value = normal(0, 29, 5), normal(1, 11, 5), normal(2, 11, 3)
    scores = [[float(q @ k) for k in key] for q in query]
    best = [row.index(max(row)) for row in scores]
    hard = attend(query, key, value, beta=math.inf)
    picked = apart(hard, value[best])
    betas = (1.0, 10.0, 100.0, 1000.0, 10000.0)
    distance = [apart(attend(query, key, value, beta=beta), hard) for beta in betas]
    return Finding(
        holds(picked == 0 and all(a >= b for a, b in pairwise(distance)) and distance[-1] < 1e-6),
        {
            "hard attention minus the best keys' values": picked,
            "soft minus hard, β = 1": distance[0],
            "soft minus hard, β = 10,000": distance[-1],
        },
        tables=(
            Table(
                "soft attention on its way to hard",
                ("β", "largest difference"),
                tuple(zip(betas, distance)),
            ),
        ),
    )


def spreading() -> Finding:
    query, key, value = exercise()
    rows = [
        (beta, *weights(query, key, beta=beta)[0].tolist(), _from_mean(beta))
        for beta in (0.0, 0.01, 1.0, 50.0)
    ]
    big, small = weights(query, key, beta=50.0), weights(query, key, beta=1e-9)
    peaked = bool(((big < 1e-6) | (big > 1 - 1e-6)).all())
    uniform = apart(small, torch.full((2, 3), 1 / 3, dtype=torch.float64))
    dense = nn.Linear(3, 2, bias=False, dtype=torch.float64).requires_grad_(False)
    dense.weight.fill_(1 / 3)
    like_dense, unlike = (
        apart(attend(query, key, value, beta=beta), dense(value.T).T) for beta in (0.0, None)
    )
    return Finding(
        corrected(
            _from_mean(50.0) < 1e-6,
            max(uniform, _from_mean(1e-9)) < 1e-6 and peaked and like_dense < SAME,
        ),
        {
            "β = 50, weights are near 0 or 1": peaked,
            "β = 50, output minus the mean of the values": _from_mean(50.0),
            "β → 0, weights minus 1/3": uniform,
            "β → 0, output minus the mean of the values": _from_mean(1e-9),
            "β = 0, output minus that of a dense layer of weights 1/3": like_dense,
            "β = 1/√2, output minus that of the same layer": unlike,
        },
        tables=(
            Table(
                "first query of exercise 3",
                ("β", "a₁", "a₂", "a₃", "output minus the mean"),
                (*rows,),
            ),
        ),
    )


def _entropy(shares: plain.Array) -> float:
    return -math.fsum(a * math.log(a) for a in shares.tolist() if a > 0)


def _softargmax(scores: Tensor, beta: float) -> Tensor:
    """softmax(β scores): the keys are unit vectors, so that a query's entries are its scores."""
    return weights(scores.double(), torch.eye(scores.shape[-1]).double(), beta=beta)


def _from_mean(beta: float) -> float:
    """How far the first output of exercise 3 is from the mean of its values."""
    query, key, value = exercise()
    return apart(attend(query, key, value, beta=beta)[0], value.mean(0))


EXPERIMENTS: tuple[Experiment, ...] = (
    Experiment(
        37,
        "sharpness",
        Place("homework", "1.1(b)"),
        "β sets how sharp the weights are: a smaller β makes them smoother.",
        "For the first query of exercise 3, the entropy of the weights and the largest of them are "
        "followed while β grows from 0.01 to 100.",
        sharpness,
        (r"a_j = \frac{e^{\beta s_j}}{\sum_k e^{\beta s_k}}",),
        correct="The entropy falls from log m to 0 and the largest weight rises from 1/m to 1, both "
        "monotonically.",
    ),
    Experiment(
        37,
        "cold-limit",
        Place("homework", "1.1(b)"),
        "In the cold limit, the softargmax of x is the one-hot vector of x.",
        "The limit is computed for whole-number scores, which could be one-hot encoded "
        "themselves, then with 7 added to all of them, and with two equal largest ones.",
        cold_limit,
        (r"\lim_{\beta \to \infty} \operatorname{softargmax}_\beta(x) = e_{\arg\max_i x_i}",),
        correct="It is one-hot at the index of the largest entry, whatever the value of that entry is. "
        "Where several are largest, they share the 1.",
    ),
    Experiment(
        38,
        "hot-limit",
        Place("homework", "1.1(b)"),
        "In the hot limit all m weights are 1/m.",
        "Weights at β = 0 are compared with 1/m, and the output with the mean of the values. The "
        "distance from 1/m is followed while β grows.",
        hot_limit,
        (r"a_j = \frac{1}{m} + \frac{\beta}{m} (s_j - \bar{s}) + O(\beta^2)",),
        correct="They are exactly 1/m at β = 0, and differ from it in proportion to β while it is small.",
    ),
    Experiment(
        39,
        "convenient-beta",
        Place("homework", "1.1(b)"),
        "A convenient β is 1/√d.",
        "By how much the entropy of the weights falls below that of uniform ones is averaged over "
        "random vectors at four widths, with β = 1/√d, 1/d and 1, and with attend()'s default.",
        convenient_beta,
        (r"\beta = \frac{1}{\sqrt{d}}",),
        correct="With 1/√d the weights are equally sharp at any width. With 1 they become hard as vectors "
        "grow wider, with 1/d uniform.",
    ),
    Experiment(
        40,
        "preserving-a-value",
        Place("homework", "1.1(c)"),
        "To pass on one value unchanged, attention has to be cold: β has to be very small.",
        "For exercise 3, the distance of the output from the value of the best key is measured "
        "while β grows.",
        preserving_a_value,
        (r"A_{11} = \frac{1}{1 + e^{-\beta} + e^{-2\beta}}",),
        correct="Cold it is, but β is an inverse temperature: cold means a large β. At a small one the "
        "output is the mean of all values.",
    ),
    Experiment(
        40,
        "one-hot-suffices",
        Place("homework", "1.1(c)"),
        "Values are preserved only where the matrix of weights is the identity.",
        "Four queries ask for four orthonormal keys, two of them for the same one, at β = ∞.",
        one_hot_suffices,
        correct="Each output is one of the values as soon as its row of weights is one-hot, whichever key "
        "that is. The identity is the case in which each position asks for itself.",
    ),
    Experiment(
        41,
        "hard-attention",
        Place("homework", "1.1(c)"),
        "Attention that picks one value is called hard.",
        "attend() at β = ∞ is compared with picking the value of the best key, and soft attention "
        "with hard as β grows.",
        hard_attention,
        (r"\lim_{\beta \to \infty} c_i = v_{\arg\max_j q_i \cdot k_j}",),
        correct="At β = ∞ the output is exactly the best key's value. Soft attention comes arbitrarily "
        "close, but where two keys are almost equally good that takes a large β.",
    ),
    Experiment(
        42,
        "spreading",
        Place("homework", "1.1(d)"),
        "To spread attention over all values, β has to be very big, so that most weights are near "
        "0 and some near 1.",
        "The weights of exercise 3, and the distance of the output from the mean of all values, "
        "are measured at small and at large β. At β = 0 the output is also compared with that of "
        "a dense layer over the rows, whose weights are all 1/m.",
        spreading,
        (r"\beta \to 0: \quad a_j \to \frac{1}{m}, \quad c \to \frac{1}{m} \sum_j v_j",),
        correct="Attention spreads evenly as β → 0: all weights are 1/m, and it does what a dense layer "
        "with such weights does. A big β does the opposite.",
    ),
)
