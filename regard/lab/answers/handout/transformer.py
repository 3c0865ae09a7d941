"""The handout on Transformers: encoder and decoder, positions, what to remember."""

from dataclasses import replace

import torch
from torch import Tensor

from regard import (
    LanguageConfig,
    LanguageModel,
    MultiHeadAttention,
    SinusoidalPositions,
    Transformer,
    VisionTransformer,
)
from regard.lab.answers.answer import Answer, Demonstration, Mistake, Point, Step
from regard.lab.answers.architecture import architecture
from regard.lab.answers.plots import heat_map
from regard.lab.claims.sample import (
    HIDDEN,
    PICTURE,
    PLAN,
    SAME,
    D,
    H,
    alive,
    apart,
    base,
    normal,
    parameters,
)
from regard.lab.experiment import Curve, Plot
from regard.lab.place import Place
from regard.model.baseline import Recurrent
from regard.model.block import FeedForward
from regard.model.classifier import TextClassifier

# Encoder and decoder


def _stacks() -> Demonstration:
    model = alive(Transformer(PLAN), 0)
    shapes = [list(model.encode(torch.arange(n)[None])[0].shape) for n in (3, 7, 17)]
    reused = TextClassifier.of(model, 2).freeze_backbone()
    in_attention, in_networks = (
        sum(parameters(part) for part in base().modules() if isinstance(part, kind))
        for kind in (MultiHeadAttention, FeedForward)
    )
    trained = sum(p.numel() for p in reused.parameters() if p.requires_grad)
    return Demonstration(
        shapes == [[n, D] for n in (3, 7, 17)]
        and trained < parameters(reused) / 10
        and in_attention < in_networks,
        {
            "rows and columns that leave the encoder, for 3, 7 and 17 tokens": shapes,
            "parameters of a reused encoder with a new head, and those that are trained": [
                parameters(reused),
                trained,
            ],
            "base model: parameters of attention, and of feed-forward networks": [
                in_attention,
                in_networks,
            ],
        },
        figures=(architecture(),),
    )


def _compact() -> Demonstration:
    model = alive(Transformer(PLAN), 0)
    numbers = [model.encode(torch.arange(n)[None]).numel() for n in (3, 7, 17)]
    return Demonstration(
        len(set(numbers)) == 1,
        {"numbers that leave the encoder, for 3, 7 and 17 tokens": numbers},
    )


# Positions

WIDTH, PLACES = 64, 200


def _kernel() -> list[float]:
    """How similar two sinusoids are, by their distance, as a share of the most."""
    r = SinusoidalPositions(WIDTH).encoding(torch.arange(PLACES), torch.float64)
    return ((r @ r[0]) / (r[0] @ r[0])).tolist()


def _encoded() -> Demonstration:
    found = _kernel()
    frequencies = 10_000 ** (-2 * torch.arange(WIDTH // 2, dtype=torch.float64) / WIDTH)
    gaps = torch.arange(PLACES, dtype=torch.float64)
    formula = (gaps[:, None] * frequencies).cos().mean(-1)
    error = apart(torch.tensor(found, dtype=torch.float64), formula)
    lowest = min(found)
    W, x, r = (
        normal(0, 5, D),
        normal(1, 7, D),
        SinusoidalPositions(D).encoding(torch.arange(7), torch.float64),
    )
    tied = apart((x + r) @ W.T, torch.cat((x, r), -1) @ torch.cat((W, W), -1).T)
    return Demonstration(
        error < SAME and tied < SAME and lowest > 0,
        {
            "largest difference of r₀·r_j from the sum of cosines": error,
            "lowest similarity of 200 positions, as a share of the highest": lowest,
            "first distance at which it rises again": _first_rise(found),
            "W(x + r) − [W W][x; r], largest entry": tied,
        },
        figures=(heat_map(), kernels()),
    )


def _first_rise(values: list[float]) -> int:
    return next(n for n in range(1, len(values)) if values[n] > values[n - 1])


def kernels() -> Plot:
    """What was wanted of a position, the bare number, and sinusoids."""
    gaps = list(range(40))
    wanted = [float(torch.tensor(-0.01 * gap * gap).exp()) for gap in gaps]
    return Plot(
        "Similarity of position 20 and another",
        "the other position",
        "as a share of that with itself",
        (
            Curve("wanted, exp(−λ(i − j)²), λ = 0.01", gaps, wanted[20:0:-1] + wanted[:20]),
            Curve("φ(i) = i", gaps, [gap / 20 for gap in gaps]),
            Curve("sinusoids", gaps, _kernel()[20:0:-1] + _kernel()[:20]),
        ),
    )


def _bare_number() -> Demonstration:
    number = torch.arange(1, 21, dtype=torch.float64)
    product = torch.outer(number, number)
    own = int((product.argmax(-1) == torch.arange(20)).sum())
    return Demonstration(
        own == 20,
        {
            "of 20 positions, those most similar to themselves, with φ(i) = i": own,
            "with sinusoids": _most_like_themselves(),
        },
    )


def _most_like_themselves() -> int:
    r = SinusoidalPositions(WIDTH).encoding(torch.arange(20), torch.float64)
    return int(((r @ r.T).argmax(-1) == torch.arange(20)).sum())


def _from_one() -> Demonstration:
    d = 4

    def encoded(first: int) -> Tensor:
        frequencies = [10_000 ** (-2 * k / d) for k in range(first, first + d // 2)]
        angles = torch.tensor(frequencies, dtype=torch.float64)
        return torch.stack((angles.sin(), angles.cos()), -1).flatten()

    ours = SinusoidalPositions(d).encoding(torch.tensor([1]), torch.float64)[0]
    return Demonstration(
        apart(encoded(1), ours) < SAME,
        {
            "position 1 with k = 1, 2": encoded(1).tolist(),
            "with k = 0, 1": encoded(0).tolist(),
            "the library's": ours.tolist(),
        },
    )


def _gaussian() -> Demonstration:
    """Is there a Gaussian that the sinusoids' kernel follows?"""
    found = torch.tensor(_kernel()[:50], dtype=torch.float64)
    gaps = torch.arange(50, dtype=torch.float64)
    errors = [
        (float((found - (-width * gaps**2).exp()).abs().max()), width)
        for width in (10 ** (n / 8) for n in range(-40, 9))
    ]
    error, width = min(errors)
    return Demonstration(
        error < 0.05, {"largest error of the best Gaussian": error, "its λ": width}
    )


def _appended() -> Demonstration:
    """Does the library's Transformer, after the paper, make its tokens wider?"""
    model = alive(Transformer(PLAN), 0)
    width = model.source(torch.arange(5)[None]).shape[-1]
    return Demonstration(
        width > PLAN.width,
        {"width of the token vectors": PLAN.width, "width with their positions": width},
    )


# What to remember


def _three_kinds() -> Demonstration:
    language = LanguageConfig(19, width=D, heads=H, feed_forward=HIDDEN, layers=2)
    stacks = {
        "translator": ["encoder", "decoder"],
        "chat model": ["decoder"],
        "ViT": ["encoder"],
    }
    models = Transformer(PLAN), LanguageModel(language), VisionTransformer(PICTURE)
    found = {
        name: [part for part, _ in model.named_children() if part in ("encoder", "decoder")]
        for name, model in zip(stacks, models)
    }
    return Demonstration(
        found == stacks,
        {f"stacks of a {name}": ", ".join(parts) for name, parts in found.items()}
        | {
            "parameters at width 12: a Transformer's block, an LSTM, attention": list(
                _sizes().values()
            )
        },
    )


def _sizes() -> dict[str, int]:
    """Parameters of a block whose feed-forward network is four times as wide, and of an LSTM."""
    plan = replace(PLAN, feed_forward=4 * D)
    return {
        "a Transformer's block": parameters(Transformer(plan).encoder.blocks[0]),
        "an LSTM": parameters(Recurrent(D)),
        "attention alone": parameters(MultiHeadAttention(D, H)),
    }


def _fewer() -> Demonstration:
    sizes = _sizes()
    return Demonstration(
        sizes["a Transformer's block"] < sizes["an LSTM"],
        {f"parameters at width 12, {name}": number for name, number in sizes.items()},
    )


ANSWERS: tuple[Answer, ...] = (
    Answer(
        Place("handout", "Transformers"),
        question="How is the Transformer built, and what can its encoder be reused for?",
        answer="An encoder and a decoder, each a stack of blocks around multi-head attention; "
        "between the attention layers stand feed-forward networks, which in the base model hold "
        "more parameters than attention does. The encoder turns its input into one vector for "
        "each token, not into a single compact one. It can be trained once and reused for other "
        "tasks with a new head, as one reuses a CNN trained on images.",
        derivation=(
            Step(
                "The encoder keeps the number of rows.",
                r"\mathbb{R}^{L \times d} \to \mathbb{R}^{L \times d}",
            ),
            Step(
                "Attention and feed-forward parameters of one encoder layer, without biases.",
                r"4 d^2 \quad \text{and} \quad 2 \cdot d \cdot 4d = 8 d^2",
            ),
        ),
        run=_stacks,
        mistakes=(
            Mistake(
                "The encoder gives a compact vector of fixed size.",
                "Its output grows with the input: a row for each token.",
                _compact,
            ),
        ),
        points=(
            Point(1, "encoder and decoder stacks"),
            Point(1, "the encoder's output, and its reuse"),
        ),
    ),
    Answer(
        Place("handout", "positional encoding"),
        question="How are positions encoded, and why not by their number?",
        answer="The paper adds a vector of sines and cosines to each token; putting it beside the "
        "token is possible too, and adding is the special case in which both share a matrix. The "
        r"number itself would not do, since similarity is a dot product: $i \cdot j$ is largest "
        r"for the last position, not for the nearest. Sinusoids with $\omega_k = 10000^{-2k/d}$, "
        r"$k = 0, \dots, d/2 - 1$, have a similarity that depends on the distance alone and falls "
        "at first; it is a sum of cosines, not a Gaussian. The position is information that "
        "training may use, combine or ignore.",
        derivation=(
            Step(
                "What was wanted, and what the bare number gives.",
                r"\phi(i) \cdot \phi(j) = e^{-\lambda (i - j)^2}, \qquad \phi(i) = i: \; \phi(i) "
                r"\cdot \phi(j) = i j",
            ),
            Step(
                "What sinusoids give.",
                r"\phi(i) \cdot \phi(j) = \sum_{k=0}^{d/2 - 1} \left(\sin \omega_k i \sin \omega_k "
                r"j + \cos \omega_k i \cos \omega_k j\right) = \sum_{k=0}^{d/2 - 1} \cos \omega_k "
                "(i - j)",
            ),
            Step(
                "Adding is putting beside with tied weights.",
                r"W (x + \phi) = [W\; W] \begin{bmatrix} x \\ \phi \end{bmatrix}",
            ),
        ),
        run=_encoded,
        mistakes=(
            Mistake(
                r"The number is enough: $\phi(i) = i$.",
                "Then every position is most similar to the last one.",
                _bare_number,
            ),
            Mistake(
                r"The frequencies are $\omega_k$ for $k = 1, \dots, d/2$.",
                "$k$ begins at 0: the first pair turns by 1 for each position.",
                _from_one,
            ),
            Mistake(
                "The sinusoids are a truncated Gaussian kernel.",
                "Their kernel is a sum of cosines, which no Gaussian follows.",
                _gaussian,
            ),
            Mistake(
                "The paper appends the position to the token vector.",
                "It adds it; the width stays the same.",
                _appended,
            ),
        ),
        points=(
            Point(1, "why not the number"),
            Point(1, "sines and cosines, $k$ from 0"),
            Point(1, "added in the paper; similarity by distance"),
        ),
    ),
    Answer(
        Place("handout", "take-away: Transformers"),
        question="What should one remember of Transformers?",
        answer="They are stacks of attention and feed-forward blocks that run in parallel; "
        "translators have encoder and decoder, chat models a decoder only, ViT an encoder only. "
        "Positions are put into the input. Whether they need fewer parameters depends on what one "
        "compares: attention has fewer than an LSTM of the same width, a whole block has more. "
        "Most models of several modalities today, though not all, are built on them.",
        derivation=(
            Step(
                "At width $d$: attention, a block with a feed-forward network of $4d$, an LSTM.",
                r"4 d^2, \qquad 12 d^2, \qquad 8 d^2",
            ),
        ),
        run=_three_kinds,
        mistakes=(
            Mistake(
                "Transformers require fewer parameters.",
                "Than what? Attention has fewer than an LSTM, but a block with its feed-forward "
                "network has more.",
                _fewer,
            ),
        ),
        points=(
            Point(1, "encoder and decoder, or one of them"),
            Point(1, "parallel; positions in the input"),
        ),
    ),
)
