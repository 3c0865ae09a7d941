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

from regard import attend, attention_statistics, attention_weights
from regard.attention.score import DotScore
from regard.lab.byhand import exercise
from regard.lab.claims import plain
from regard.lab.claims.sample import SAME, apart, normal, orthonormal
from regard.lab.experiment import (
    Curve,
    Experiment,
    Finding,
    Plot,
    Table,
    corrected,
    holds,
    more_exactly,
)
from regard.lab.numbers import figure, within
from regard.lab.place import Place

BETAS = tuple(10 ** (n / 4) for n in range(-8, 9))
"""From 0.01 to 100."""


def sharpness() -> Finding:
    query, key, _ = exercise()
    entropy = [float(attention_statistics(query, key, beta=beta).entropy[0]) for beta in BETAS]
    largest = [float(attention_weights(query, key, beta=beta)[0].max()) for beta in BETAS]
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
        conclusion="From β = 0.01 to 100 the entropy of the first query's weights falls from "
        f"{figure(entropy[0])} nats (log 3 is {figure(math.log(3))}) to {figure(entropy[-1])}, and "
        f"its largest weight rises from {figure(largest[0])} to {figure(largest[-1])}, "
        f"{'both' if falls and rises else 'not'} monotonically.",
    )


def cold_limit() -> Finding:
    x = normal(5, 7, 2)
    scores = x @ x.T
    limit = attention_weights(x, x, beta=math.inf)
    best = F.one_hot(scores.argmax(-1), len(x)).double()
    near = apart(attention_weights(x, x, beta=1e4), limit)
    itself = int((limit.diagonal() == 1).sum())
    tied = _softargmax(torch.tensor([[4, 4, 3]]), math.inf)[0]
    return Finding(
        more_exactly(
            meant=torch.equal(best, limit) and near < 1e-6 and tied.tolist() == [0.5, 0.5, 0],
            literal=itself == len(x),
        ),
        {
            "rows of the limit that are one-hot at the best key": int(
                (best == limit).all(-1).sum()
            ),
            "rows of the limit that are one-hot at x itself": itself,
            "rows": len(x),
            "β = 10,000, minus the limit": near,
            "two best scores": tied.tolist(),
        },
        conclusion="It is one-hot at the index of the best key, in "
        f"{int((best == limit).all(-1).sum())} of {len(x)} rows here. That is x itself in {itself} "
        "of them: among rows of unequal length a longer one can score higher. Two best keys share "
        f"the 1, {figure(tied.tolist())}.",
    )


def hot_limit() -> Finding:
    m, t = 7, 2
    query, key, value = normal(0, 3, 5), normal(1, m, 5), normal(2, m, t)
    hot = attention_weights(query, key, beta=0.0)
    by_keys, by_width = (apart(hot, torch.full_like(hot, 1 / n)) for n in (m, t))
    mean = apart(attend(query, key, value, beta=0.0), value.mean(0).expand(3, t))
    betas = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)
    distance = [
        apart(attention_weights(query, key, beta=beta), torch.full_like(hot, 1 / m))
        for beta in betas
    ]
    slope = math.log10(distance[1] / distance[0])
    return Finding(
        more_exactly(
            meant=max(by_keys, mean) < SAME and abs(slope - 1) < 0.01, literal=by_width < SAME
        ),
        {
            "β = 0, weights minus 1/7, one over the number of keys": by_keys,
            "β = 0, weights minus 1/2, one over the width of the values": by_width,
            "β = 0, output minus the mean of the values": mean,
            "power of β by which the distance from 1/7 grows": slope,
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
        conclusion=f"With m = {m} keys and values of width t = {t}, weights at β = 0 are 1/m, up "
        f"to {figure(by_keys)}, and {figure(by_width, 2)} from 1/t. Here t is the number of keys, "
        "as X is n×t; in 1.1(a) it was the width of V, and the keys were m. For small β the "
        f"distance from 1/m grows like β to the power {figure(slope, 3)}.",
    )


def convenient_beta() -> Finding:
    keys, choices = 8, ("1/√d", "1/d", "1")
    rows, natural = [], True
    for d in (4, 16, 64, 256):
        query, key = normal(0, 1, 200, d), normal(1, 40, keys, d)
        # How much less than the entropy of uniform weights: 0 is no choice at all.
        decided = [
            math.log(keys) - float(attention_statistics(query, key, beta=beta).entropy.mean())
            for beta in (d**-0.5, 1 / d, 1.0)
        ]
        ours = math.log(keys) - float(attention_statistics(query, key).entropy.mean())
        natural &= abs(ours - decided[0]) < SAME
        rows.append((d, float(DotScore()(query, key).var()) / d, *decided))
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
        conclusion="From d = 4 to 256, how decided random vectors are changes by a factor of "
        f"{figure(ratios[0], 3)} with β = 1/√d, of {figure(ratios[1], 3)} with 1/d and of "
        f"{figure(ratios[2], 3)} with 1: with 1/√d alone the weights are equally sharp at any "
        f"width. attend()'s own β {'is' if natural else 'is not'} 1/√d.",
    )


def preserving_a_value() -> Finding:
    query, key, value = exercise()

    def lost(beta: float) -> float:
        """How far the first query's output is from the value of its best key."""
        return float((attend(query, key, value, beta=beta)[0] - value[0]).norm())

    small, large = lost(0.01), lost(50.0)
    some = (0.0, 0.1, 1 / math.sqrt(2), 2.0, 10.0)
    first = [float(attention_weights(query, key, beta=beta)[0, 0]) for beta in some]
    # The first query's scores are 4, 3 and 2.
    by_hand = [1 / (1 + math.exp(-beta) + math.exp(-2 * beta)) for beta in some]
    agree = max(abs(a - b) for a, b in zip(first, by_hand)) < SAME
    return Finding(
        corrected(small < 1e-6, large < 1e-6 and agree),
        {
            "A₁₁ at β = 0, 0.1, 0.707, 2, 10": first,
            "‖c₁ − v₁‖, β = 0.01": small,
            "‖c₁ − v₁‖, β = 50": large,
        },
        plots=(
            Plot(
                "first query of exercise 3",
                "β",
                "distance of the output from the value",
                (Curve("‖c₁ − v₁‖", BETAS[:13], [lost(beta) for beta in BETAS[:13]]),),
                log_x=True,
                log_y=True,
            ),
        ),
        conclusion="‖c₁ − v₁‖, the distance of the output from the best key's value, is "
        f"{figure(small, 2)} at β = 0.01 and {figure(large)} at β = 50. Cold is right, but β is an "
        "inverse temperature: cold means a large β, and a very small one gives the mean of all "
        "values.",
    )


def one_hot_suffices() -> Finding:
    key, value = orthonormal(0, 4, 4), normal(1, 4, 3)
    gaps, identity = {}, {}
    for name, wanted in (("each its own", [0, 1, 2, 3]), ("two the same", [2, 2, 0, 3])):
        shares = attention_weights(key[wanted], key, beta=math.inf)
        gaps[name] = apart(attend(key[wanted], key, value, beta=math.inf), value[wanted])
        identity[name] = torch.equal(shares, torch.eye(4).double())
    own, other = gaps.values()
    return Finding(
        holds(identity["each its own"] and own < SAME),
        {
            "A is the identity: output minus the values": own,
            "A is one-hot, but not the identity: output minus the values asked for": other,
            "A is the identity in these cases": list(identity.values()),
        },
        conclusion=f"With A = I the output is V, {within(own)}. Worth adding: it is enough "
        "that each column of A is one-hot, whichever key it points to; with two queries that ask "
        f"for the same key, A {'is' if identity['two the same'] else 'is not'} the identity, and "
        f"each output is one of the values, {within(other)}.",
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
        conclusion=f"At β = ∞ the output is the value of the best key, {within(picked)}. "
        f"Soft attention comes close as β grows, {figure(distance[0], 2)} at β = 1 and "
        f"{figure(distance[-1])} at 10,000; where two keys are almost equally good it takes a "
        "large β.",
    )


def dictionary() -> Finding:
    key, value = orthonormal(0, 5, 8), normal(1, 5, 3)
    entries = dict(zip("abcde", value.tolist()))
    looked_up = attend(key, key, value, beta=math.inf)
    exact = apart(looked_up, value.new_tensor([entries[name] for name in "abcde"]))
    # A key that no entry has: the nearest one answers, or a mixture of all.
    between = (0.6 * key[0] + 0.4 * key[1])[None]
    betas = (1.0, 5.0, 20.0)
    shares = {
        beta: attention_weights(between, key, beta=beta)[0].tolist() for beta in (*betas, math.inf)
    }
    mixture = attend(between, key, value, beta=5.0)[0]
    inside = apart(mixture, sum((a * v for a, v in zip(shares[5.0], value)), torch.zeros(3)))
    return Finding(
        holds(exact == 0 and inside < SAME and shares[math.inf] == [1, 0, 0, 0, 0]),
        {
            "β = ∞, a query equal to a key: distance from the entry looked up": exact,
            "a query between two keys, weight of the first, β = 1, 5, 20, ∞": [
                shares[beta][0] for beta in shares
            ],
            "β = 5, output minus the mixture of the entries": inside,
        },
        tables=(
            Table(
                "Weights of five entries, for a query of 0.6 a and 0.4 b",
                ("β", *entries),
                tuple((beta, *share) for beta, share in shares.items()),
            ),
        ),
        conclusion="At β = ∞ and with queries equal to keys, attention looks up an entry "
        f"{within(exact)}. A query between two keys gets a mixture: the nearer entry has a weight "
        f"of {figure(shares[1.0][0], 2)} at β = 1, {figure(shares[5.0][0], 2)} at 5, "
        f"{figure(shares[20.0][0], 2)} at 20 and {figure(shares[math.inf][0])} at ∞, where the "
        "nearest key answers and none is missing.",
    )


def spreading() -> Finding:
    query, key, value = exercise()
    rows = [
        (beta, *attention_weights(query, key, beta=beta)[0].tolist(), _from_mean(beta))
        for beta in (0.0, 0.01, 1.0, 50.0)
    ]
    big, small = attention_weights(query, key, beta=50.0), attention_weights(query, key, beta=1e-9)
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
        conclusion="At β = 50 the weights are "
        f"{'close to 0 or 1' if peaked else 'not close to 0 or 1'} and the output is "
        f"{figure(_from_mean(50.0), 2)} from the mean of the values; as β → 0 all weights are 1/m, "
        f"{within(uniform)}, and it is {figure(_from_mean(1e-9))} from it. Hot is right and "
        "means a small β. Soft attention, and a dense layer that has the attention weights, are "
        f"right: with 1/m the layer differs by {figure(like_dense)}.",
    )


def _entropy(shares: plain.Array) -> float:
    return -math.fsum(a * math.log(a) for a in shares.tolist() if a > 0)


def _softargmax(scores: Tensor, beta: float) -> Tensor:
    """softmax(β scores): the keys are unit vectors, so that a query's entries are its scores."""
    return attention_weights(scores.double(), torch.eye(scores.shape[-1]).double(), beta=beta)


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
        "For the first query of exercise 3, the entropy of the weights and the largest of them "
        "are followed while β grows from 0.01 to 100.",
        sharpness,
        (r"a_j = \frac{e^{\beta s_j}}{\sum_k e^{\beta s_k}}",),
    ),
    Experiment(
        37,
        "cold-limit",
        Place("homework", "1.1(b)"),
        "When β is very cold, the softargmax of Xᵀ x is the one-hot encoding of x.",
        "Seven random vectors attend to themselves at β = ∞. It is counted where the 1 of each "
        "row stands: at the best key, and at the vector itself; then two keys are equally good.",
        cold_limit,
        (r"\lim_{\beta \to \infty} \operatorname{softargmax}_\beta(x) = e_{\arg\max_i x_i}",),
    ),
    Experiment(
        38,
        "hot-limit",
        Place("homework", "1.1(b)"),
        "When β is very hot the weights are 1/t, where X is n×t, since t items are compared with "
        "one; in 1.1(a), V is t×m.",
        "Weights at β = 0 are compared with one over the number of keys and with one over the "
        "width of the values, and the output with the mean of the values. The distance from "
        "uniform is followed while β grows.",
        hot_limit,
        (r"a_j = \frac{1}{m} + \frac{\beta}{m} (s_j - \bar{s}) + O(\beta^2)",),
    ),
    Experiment(
        39,
        "convenient-beta",
        Place("homework", "1.1(b)"),
        "The convenient β is 1/√d, where d is the dimension of the query.",
        "By how much the entropy of the weights falls below that of uniform ones is averaged over "
        "random vectors at four widths, with β = 1/√d, 1/d and 1, and with attend()'s default.",
        convenient_beta,
        (r"\beta = \frac{1}{\sqrt{d}}",),
    ),
    Experiment(
        40,
        "preserving-a-value",
        Place("homework", "1.1(c)"),
        'With β "very cold or a very small value" the weights become one-hot, so that A acts like '
        "the identity and the values are preserved.",
        "For exercise 3, the distance of the output from the value of the best key is measured "
        "while β grows.",
        preserving_a_value,
        (r"A_{11} = \frac{1}{1 + e^{-\beta} + e^{-2\beta}}",),
    ),
    Experiment(
        40,
        "one-hot-suffices",
        Place("homework", "1.1(c)"),
        "The values are preserved where A is the identity matrix, since H = V A.",
        "Four queries ask for four orthonormal keys at β = ∞, each for its own; then two of them "
        "ask for the same one.",
        one_hot_suffices,
    ),
    Experiment(
        41,
        "hard-attention",
        Place("homework", "1.1(c)"),
        "Attention that preserves values, with one-hot weights, is called hard attention.",
        "attend() at β = ∞ is compared with picking the value of the best key, and soft attention "
        "with hard as β grows.",
        hard_attention,
        (r"\lim_{\beta \to \infty} c_i = v_{\arg\max_j q_i \cdot k_j}",),
    ),
    Experiment(
        104,
        "dictionary",
        Place("handout", "motivation"),
        "Queries, keys and values: there is a link to dictionaries.",
        "Five orthonormal keys have values, as a dictionary has entries. Each is asked for by its "
        "own key at β = ∞; then a query between two keys asks, at several β.",
        dictionary,
        (r"\beta = \infty, \; q = k_j: \quad c = v_j",),
    ),
    Experiment(
        42,
        "spreading",
        Place("homework", "1.1(d)"),
        "The output is spread over the values when most weights are close to 0 and some close to "
        "1, with sum 1; β should be very big, or hot. This is soft attention, and a linear layer "
        "with the attention weights does the same.",
        "The weights of exercise 3, and the distance of the output from the mean of all values, "
        "are measured at small and at large β. At β = 0 the output is also compared with that of "
        "a dense layer over the rows, whose weights are all 1/m.",
        spreading,
        (r"\beta \to 0: \quad a_j \to \frac{1}{m}, \quad c \to \frac{1}{m} \sum_j v_j",),
    ),
)
