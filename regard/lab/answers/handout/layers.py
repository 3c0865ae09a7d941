"""The handout up to the idea of attention: other layers, and what they cannot do."""

from itertools import pairwise

import torch
from torch import Tensor, nn

from regard import MultiHeadAttention, attention_weights
from regard.attention.score import AdditiveScore, AlignmentScore, BilinearScore, DotScore
from regard.lab.answers.answer import Answer, Demonstration, Mistake, Point, Step
from regard.lab.claims.costs import cost
from regard.lab.claims.sample import SAME, D, L, alive, apart, normal, parameters
from regard.lab.cost.layers import Sizes
from regard.lab.experiment import Table
from regard.lab.place import Place
from regard.model.baseline import Convolution, Dense, Recurrent

# Recurrence


def _part(layer: nn.Module, output: int, x: Tensor) -> Tensor:
    """How much each token has to do with one of the outputs."""
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(layer(x)[0, output].sum(), x)
    return slope[0].norm(dim=-1)


def _limits() -> Demonstration:
    layer, x = alive(Recurrent(D), 1), normal(2, 1, 33, D)
    last = _part(layer, -1, x)
    gaps = [float(last[-1 - gap] / last[-1]) for gap in (1, 4, 16, 32)]
    later = float(_part(layer, 5, x)[6:].max())
    steps = [cost("LSTM", Sizes(n, 8, heads=1)).steps for n in (8, 16, 32)]
    return Demonstration(
        steps == [8, 16, 32] and later == 0 and gaps == sorted(gaps, reverse=True),
        {
            "steps one after the other, for 8, 16 and 32 tokens": steps,
            "what later tokens change in an earlier state": later,
            "part of the token 1, 4, 16 and 32 steps back in the last state, untrained": gaps,
        },
    )


def _past_only() -> Demonstration:
    later = float(_part(alive(Recurrent(D, both=True), 1), 2, normal(2, 1, L, D))[3:].max())
    return Demonstration(
        later == 0, {"what later tokens change in a bidirectional LSTM's earlier output": later}
    )


# Convolution


def _convolution() -> nn.Module:
    return alive(Convolution(D, 3), 1)


def _reached(layers: int) -> int:
    """How many positions the middle of 41 sees through this many layers of kernel 3."""
    made = nn.Sequential(*(_convolution() for _ in range(layers)))
    return int((_part(made, 20, normal(1, 1, 41, D)) > 0).sum())


def _deep() -> Demonstration:
    layers = (1, 2, 4, 8)
    seen = [_reached(n) for n in layers]
    lengths = [_convolution()(normal(1, 1, n, D)).shape[1] for n in (3, 11, 40)]
    return Demonstration(
        seen == [2 * n + 1 for n in layers] and lengths == [3, 11, 40],
        {
            "positions seen through 1, 2, 4 and 8 layers of kernel 3": seen,
            "rows for inputs of 3, 11 and 40 positions": lengths,
            "products one after the other in one layer": cost(
                "convolution", Sizes(32, 8, heads=1)
            ).steps,
        },
    )


def _fixed_size() -> Demonstration:
    """Do the convolutions refuse another length, or the dense layer behind them?"""
    head = alive(nn.Linear(7 * D, 2), 2)
    taken = []
    for length in (7, 11):
        features = _convolution()(normal(1, 1, length, D))
        try:
            head(features.flatten(1))
            whole = "taken"
        except RuntimeError:
            whole = "refused"
        taken.append((length, "taken", whole, list(head.weight.shape)[1], features[0].numel()))
    return Demonstration(
        all(row[1] == "refused" for row in taken[1:]),
        tables=(
            Table(
                "A network made for 7 positions",
                (
                    "positions",
                    "its convolutions",
                    "its dense layer",
                    "numbers the dense layer reads",
                    "numbers it is given",
                ),
                tuple(taken),
            ),
        ),
    )


# Fixed positions


def _tied() -> Demonstration:
    x = normal(1, 1, L, D)

    def slopes(layer: nn.Module) -> list[Tensor]:
        """How the positions 2 … 5 depend on the one before."""
        y = torch.autograd.functional.jacobian(lambda x: layer(x)[0], x)
        return [y[i, :, 0, i - 1] for i in (2, 3, 4)]

    convolution, dense = slopes(_convolution()), slopes(alive(Dense(D, L), 1))
    spread = [max(apart(one, every[0]) for one in every) for every in (convolution, dense)]
    near, far = _weight_at(1), _weight_at(5)
    return Demonstration(
        spread[0] < SAME < 0.1 < spread[1] and abs(near - far) < SAME,
        {
            "a convolution's weight for the position before differs between positions by": spread[
                0
            ],
            "a dense layer's": spread[1],
            "attention's weight between two words, 1 and 5 places apart": [near, far],
        },
    )


def _weight_at(distance: int) -> float:
    """The weight between two words, in a sentence of fillers."""
    verb, subject, filler = normal(1, D), normal(2, D), normal(3, D)
    x = filler.repeat(9, 1)
    x[0], x[distance] = verb, subject
    attention = alive(MultiHeadAttention(D, 1), 4)
    return float(attention_weights(attention.query(x), attention.key(x))[0, distance])


def _dense_by_distance() -> Demonstration:
    x, dense = normal(1, 1, L, D), alive(Dense(D, L), 1)
    shifted = torch.roll(x, 1, 1)
    there, here = dense(shifted)[:, 2:], torch.roll(dense(x), 1, 1)[:, 2:]
    return Demonstration(
        apart(there, here) < SAME,
        {
            "a dense layer: shifted input against shifted output, inner rows": apart(there, here),
            "a convolution": apart(
                _convolution()(shifted)[:, 2:-1], torch.roll(_convolution()(x), 1, 1)[:, 2:-1]
            ),
        },
    )


# Larger networks


def _counts(name: str, lengths: tuple[int, ...]) -> list[int]:
    return [cost(name, Sizes(n, 8, heads=1)).parameters for n in lengths]


def _larger() -> Demonstration:
    lengths = (4, 8, 16, 32)
    dense, attention = (
        _counts(name, lengths)
        for name in ("dense over all positions", "attention, with projections")
    )
    # Each word hangs on one of the others, or on none.
    graphs = [float(n**n) for n in lengths]
    return Demonstration(
        all(big / small > 3.9 for small, big in pairwise(dense)) and len(set(attention)) == 1,
        tables=(
            Table(
                "Width 8",
                ("words", "ways to depend", "parameters of a dense layer", "of attention"),
                tuple(zip(lengths, graphs, dense, attention)),
            ),
        ),
    )


def _just_bigger() -> Demonstration:
    dense = _counts("dense over all positions", (8, 16))
    return Demonstration(
        dense[1] <= 2 * dense[0],
        {
            "parameters of a dense layer for 8 and for 16 words": dense,
            "factor": dense[1] / dense[0],
        },
    )


# History

PAPERS = {
    "translation, additive scores (Bahdanau et al.)": "1409.0473",
    "image captions (Xu et al.)": "1502.03044",
    "translation, dot products (Luong et al.)": "1508.04025",
    "the Transformer (Vaswani et al.)": "1706.03762",
}
"""arXiv numbers, which begin with year and month."""


def _scores() -> Demonstration:
    query, key, value = normal(0, 1, 4), normal(1, 5, 4), normal(2, 5, 3)
    kinds: dict[str, AlignmentScore] = {
        "dot": DotScore(),
        "general": alive(BilinearScore(4, 4), 3),
        "additive": alive(AdditiveScore(4, 4, 6), 4),
    }
    rows, errors = [], []
    for name, score in kinds.items():
        a = torch.softmax(score(query, key), -1)
        rows.append((name, *a[0].tolist(), float(a.sum())))
        errors.append(apart(score.attend(query, key, value), a @ value))
    return Demonstration(
        sorted(PAPERS.values()) == list(PAPERS.values())
        and all(abs(row[-1] - 1) < SAME for row in rows)
        and max(errors) < SAME,
        {name: f"20{number[:2]}-{number[2:4]}, arXiv {number}" for name, number in PAPERS.items()},
        (
            Table(
                "One query over five keys, by three scores",
                ("score", *(f"key {n}" for n in range(1, 6)), "sum"),
                tuple(rows),
            ),
        ),
    )


def _captions_first() -> Demonstration:
    translation, captions = list(PAPERS.values())[:2]
    return Demonstration(
        captions < translation,
        {"translation, arXiv": translation, "captions, arXiv": captions},
    )


# A recipe


def _recipe() -> Demonstration:
    attention = alive(MultiHeadAttention(D, 1), 1)
    one, other = normal(2, L, D), normal(3, L, D)

    def matrix(x: Tensor) -> Tensor:
        return attention_weights(attention.query(x), attention.key(x))

    near, far = _weight_at(2), _weight_at(7)
    return Demonstration(
        apart(matrix(one), matrix(other)) > 0.1 and abs(near - far) < SAME,
        {
            "largest difference between the weights of two sentences": apart(
                matrix(one), matrix(other)
            ),
            "weight between the same two words, 2 and 7 places apart": [near, far],
            "parameters, for any number of words": parameters(attention),
        },
    )


def _learned_weights() -> Demonstration:
    """Are the weights between positions the same for every sentence, as a dense layer's are?"""
    attention, dense = alive(MultiHeadAttention(D, 1), 1), alive(Dense(D, L), 1)
    one, other = normal(2, 1, L, D), normal(3, 1, L, D)

    def change(layer: nn.Module) -> float:
        """How much the slope from position 2 to position 5 differs between sentences."""
        slopes = [
            torch.autograd.functional.jacobian(lambda x: layer(x)[0, 4], x)[:, 0, 1]
            for x in (one, other)
        ]
        return apart(*slopes)

    return Demonstration(
        change(attention) < SAME,
        {
            "attention: what another sentence changes in ∂y₅/∂x₂": change(attention),
            "a dense layer": change(dense),
        },
    )


ANSWERS: tuple[Answer, ...] = (
    Answer(
        Place("handout", "RNNs"),
        question="Which limits do recurrent networks have as models of text?",
        answer="They compute one step after the other, so that training does not run in parallel. "
        "A state has seen the past alone, unless a second network reads backwards. Near and far "
        "pass through the same state, where what is far fades. Training is delicate, since "
        "gradients are products over all steps, and transfer is less common, though ELMo did it.",
        derivation=(
            Step("Every state needs the one before.", r"h_i = f(h_{i-1}, x_i)"),
            Step(
                "The influence of a token is a product of as many derivatives as steps.",
                r"\frac{\partial h_n}{\partial x_j} = \left(\prod_{i=j+1}^{n} \frac{\partial "
                r"h_i}{\partial h_{i-1}}\right) \frac{\partial h_j}{\partial x_j}",
            ),
        ),
        run=_limits,
        mistakes=(
            Mistake(
                "A recurrent network can never use what comes later.",
                "A bidirectional one does: it reads the sequence from both ends.",
                _past_only,
            ),
        ),
        points=(
            Point(1, "sequential"),
            Point(1, "past only, unless bidirectional"),
            Point(1, "near and far through one state"),
        ),
    ),
    Answer(
        Place("handout", "CNNs"),
        question="What can convolutions do that recurrence cannot, and what are their limits?",
        answer="They run in parallel and see their neighbourhood at once; through several layers "
        "they see farther, by $k - 1$ positions for each. Inputs may have any length: it is a "
        "dense layer behind them that fixes the size. Their limit is that what they relate stands "
        "at fixed distances.",
        derivation=(Step("The receptive field of $l$ layers of kernel $k$.", r"1 + l (k - 1)"),),
        run=_deep,
        mistakes=(
            Mistake(
                "Convolutions cannot deal with inputs of variable size.",
                "They can; a dense layer on all of their outputs cannot.",
                _fixed_size,
            ),
        ),
        points=(Point(1, "parallel; far by depth"), Point(1, "fixed distances")),
    ),
    Answer(
        Place("handout", "fixed positions"),
        question="To what do convolutional and dense layers tie their weights, and why does that "
        "not suit sentences?",
        answer="A convolution has a weight for each distance, the same everywhere; a dense layer "
        "has one for each pair of absolute positions. In sentences the related words stand at "
        "distances that vary: a verb need not follow its subject at once. Attention computes the "
        "weight from the two words, wherever they stand.",
        derivation=(
            Step(
                "Convolution: a weight for a distance.",
                r"y_i = \sum_\delta w_\delta\, x_{i + \delta}",
            ),
            Step("Dense layer: a weight for a pair of positions.", r"y_i = \sum_j w_{ij}\, x_j"),
            Step("Attention: a weight for a pair of words.", r"y_i = \sum_j f(x_i, x_j)\, x_j"),
        ),
        run=_tied,
        mistakes=(
            Mistake(
                "A dense layer's weights depend on the distance, as a convolution's do.",
                "A shifted input gives another output: every pair of positions has a weight of its "
                "own.",
                _dense_by_distance,
            ),
        ),
        points=(
            Point(1, "distance, and absolute positions"),
            Point(1, "relations in text vary in distance"),
        ),
    ),
    Answer(
        Place("handout", "larger networks"),
        question="Could one not simply make the network larger?",
        answer="In principle: a large enough network can approximate any continuous function, so "
        "also one for every dependency graph. But the number of graphs explodes with the length, "
        "a dense layer's parameters grow with its square, and what it learns for one pair of "
        "positions tells it nothing about another. Attention needs the same few matrices for any "
        "length.",
        derivation=(
            Step(
                "If every word may hang on any other, or on none, there are",
                r"n^n \text{ graphs of } n \text{ words}",
            ),
            Step(
                "A dense layer has a weight for each pair of numbers; attention has four matrices.",
                r"n^2 d^2 \quad \text{against} \quad 4 d^2",
            ),
        ),
        run=_larger,
        mistakes=(
            Mistake(
                "Twice the length needs a network twice as large.",
                "Four times: there is a weight for every pair of positions.",
                _just_bigger,
            ),
        ),
        points=(
            Point(1, "possible in principle"),
            Point(1, "why not: parameters, and nothing shared"),
        ),
    ),
    Answer(
        Place("handout", "history"),
        question="Where does attention come from, and which scores are there?",
        answer="From translation: Bahdanau et al. scored words by a small network in September "
        "2014 (additive attention). Captions of images followed in February 2015, Luong's "
        "dot-product and general scores in August 2015, the Transformer in June 2017.",
        derivation=(
            Step(
                "Dot product, and with a matrix in between (general).",
                r"q^\top k, \qquad q^\top W k",
            ),
            Step("A small network (additive).", r"v^\top \tanh(W_q q + W_k k)"),
        ),
        run=_scores,
        mistakes=(
            Mistake(
                "Attention was made for captions, and translation took it over.",
                "The other way round; the papers' dates say so.",
                _captions_first,
            ),
        ),
        points=(
            Point(1, "translation first"),
            Point(1, "additive, general and dot-product scores"),
        ),
    ),
    Answer(
        Place("handout", "motivation"),
        question="What is the idea of attention, beside a dense layer?",
        answer="Not to learn every weight $w_{ij}$, but a recipe that makes it: $w_{ij} = f(x_i, "
        "x_j)$. The weights then follow from what the words mean, in every sentence anew and "
        "wherever the words stand, and the recipe has no more parameters for a long sentence than "
        "for a short one.",
        derivation=(
            Step("From learned weights …", r"y_i = \sum_{j=1}^{L} w_{ij} x_j"),
            Step("… to computed ones.", r"y_i = \sum_{j=1}^{L} f(x_i, x_j)\, x_j"),
        ),
        run=_recipe,
        mistakes=(
            Mistake(
                "The weights between positions are learned in training, and stay.",
                "The matrices are learned. The weights are computed anew for every sentence.",
                _learned_weights,
            ),
        ),
        points=(
            Point(1, "a recipe in place of weights"),
            Point(1, "from the words alone, wherever they stand"),
        ),
    ),
)
