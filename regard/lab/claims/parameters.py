"""The number of parameters of layers and models."""

from collections.abc import Callable

from torch import nn

from regard import (
    MultiHeadAttention,
    Transformer,
    TransformerConfig,
    VisionConfig,
    VisionTransformer,
)
from regard.lab.claims.sample import alive, base, normal, parameters, unbuilt
from regard.lab.experiment import Experiment, Finding, Table, conditional, corrected, holds
from regard.lab.place import Place
from regard.model.baseline import Convolution, Dense, Recurrent
from regard.model.block import FeedForward

N, D, K = 11, 14, 3
"""Positions, width and kernel size, no two the same."""
SIZES: tuple[tuple[str, Callable[[], nn.Module], float], ...] = (
    ("base", lambda: Transformer.base(37_000), 65e6),
    ("big", lambda: Transformer.big(37_000), 213e6),
    ("ViT-B/16", lambda: VisionTransformer.base(1000), 86e6),
    ("ViT-L/16", lambda: VisionTransformer.large(1000), 307e6),
    ("ViT-L/32", lambda: VisionTransformer.large(1000, patch=32), 307e6),
    ("ViT-H/14", lambda: VisionTransformer.huge(1000), 632e6),
)
"""Models, and the sizes printed in their papers."""


def _shared() -> Finding:
    made = alive(MultiHeadAttention(D, 7, bias=False), 0)
    lengths = (1, N, 10 * N)
    ran = [made(normal(n, 1, n, D)).shape[1] for n in lengths]
    three = sum(parameters(part) for part in (made.query, made.key, made.value))
    return Finding(
        holds(three == 3 * D * D and ran == list(lengths)),
        {"weights of W_Q, W_K and W_V": three, "3 D²": 3 * D * D, "lengths it ran on": ran},
    )


def _parameter_table() -> Finding:
    attention = MultiHeadAttention(D, 1, bias=False)
    three = sum(parameters(part) for part in (attention.query, attention.key, attention.value))
    convolutions = {k: Convolution(D, k).convolution.weight.numel() for k in (1, 3, 5)}
    length, d_v = 5, 3
    dense = nn.Linear(length * D, length * d_v, bias=False).weight.numel()
    rows = (
        ("attention, W_Q, W_K, W_V", three),
        *((f"convolution, k = {k}", count) for k, count in convolutions.items()),
        (f"dense, L = {length}, d_v = {d_v}", dense),
    )
    return Finding(
        corrected(
            taught=all(three < count for count in convolutions.values()),
            correct=three == convolutions[3] == 3 * D * D and dense == length**2 * D * d_v,
        ),
        {
            "attention, 3 d²": three,
            "convolution with 3 taps": convolutions[3],
            "dense layer": dense,
            "L² d d_v": length**2 * D * d_v,
        },
        (Table(f"Weights at d = {D}", ("layer", "weights"), rows),),
    )


def _fewer_parameters() -> Finding:
    width, length = 64, 50
    attention = parameters(MultiHeadAttention(width, 4, bias=False))
    others = {
        "dense over 50 rows": unbuilt(lambda: Dense(width, length)),
        "LSTM": Recurrent(width),
        "GRU": Recurrent(width, "gru"),
        "convolution of 3": Convolution(width, 3),
        "depthwise convolution of 3": Convolution(width, 3, groups=width),
    }
    counts = {
        name: sum(p.numel() for key, p in layer.named_parameters() if "bias" not in key)
        for name, layer in others.items()
    }
    block = attention + 2 * width * 4 * width
    rows = [("attention with W_O", attention), ("a block with it", block), *counts.items()]
    return Finding(
        conditional(
            inside=attention == 4 * width**2 and attention < counts["dense over 50 rows"],
            outside=attention < min(counts.values()),
        ),
        {f"parameters, {name}": count for name, count in rows},
        (
            Table(
                "Without biases, at width 64",
                ("layer", "parameters", "for each D²"),
                tuple((name, count, round(count / width**2, 2)) for name, count in rows),
            ),
        ),
    )


def _solely_attention() -> Finding:
    model = base()
    counts = {"attention": 0, "feed-forward": 0, "embedding": 0, "norms": 0}
    for module in model.modules():
        match module:
            case MultiHeadAttention():
                counts["attention"] += parameters(module)
            case FeedForward():
                counts["feed-forward"] += parameters(module)
            case nn.LayerNorm():
                counts["norms"] += parameters(module)
    total = parameters(model)
    counts["embedding"] = total - sum(counts.values())
    # Three matrices for what is read and one for what is written, in 6 + 2·6 layers.
    width, hidden, layers = 512, 2048, 18
    by_hand = layers * 4 * (width * width + width)
    dense = 12 * (2 * width * hidden + hidden + width)
    return Finding(
        corrected(
            taught=counts["attention"] > total / 2,
            correct=counts["attention"] == by_hand
            and counts["feed-forward"] == dense
            and dense > by_hand,
        ),
        {f"parameters: {name}": count for name, count in counts.items()}
        | {"attention's share of the stacks": by_hand / (by_hand + dense)},
        (
            Table(
                "Parameters of the base model",
                ("part", "millions", "share"),
                tuple((name, round(n / 1e6, 2), round(n / total, 3)) for name, n in counts.items()),
            ),
        ),
    )


def _sizes() -> Finding:
    rows = []
    for name, make, printed in SIZES:
        ours = parameters(unbuilt(make))
        rows.append((name, ours, round(printed), 100 * (ours / printed - 1)))
    off = max(abs(row[3]) for row in rows)
    return Finding(
        holds(off < 3),
        {name: ours for name, ours, *_ in rows} | {"farthest from the paper, in percent": off},
        (Table("Parameters", ("model", "ours", "the paper's", "difference in %"), tuple(rows)),),
    )


def _widths() -> Finding:
    text = [TransformerConfig.base(1).width, TransformerConfig.big(1).width]
    image = [c.width for c in (VisionConfig.base(1), VisionConfig.large(1), VisionConfig.huge(1))]
    wider = [ours > theirs for ours, theirs in zip(image, text)]
    return Finding(
        corrected(taught=all(wider), correct=text[1] == image[1]),
        {"widths, base and big": text, "widths, ViT-B, L and H": image},
    )


EXPERIMENTS: tuple[Experiment, ...] = (
    Experiment(
        12,
        "shared-projections",
        Place("slides", "shared weights"),
        "W_Q, W_K and W_V are shared by all tokens, so attention has O(D²) parameters.",
        "One layer's weights are counted, and the layer is run on sequences of three lengths.",
        _shared,
        correct="3D² weights (and D² more in W_O), whatever the length.",
    ),
    Experiment(
        91,
        "parameter-table",
        Place("handout", "parameter table"),
        "Attention has fewer parameters than even a convolution.",
        "Weights are counted: three projections, convolutions with 1, 3 and 5 taps, and a dense "
        "layer from L·d to L·d_v numbers.",
        _parameter_table,
        (r"3 d^2", r"L^2 d d_v"),
        correct="3d² weights are as many as a convolution with three taps has. A dense layer has L²·d·d_v.",
    ),
    Experiment(
        99,
        "fewer-parameters",
        Place("handout", "take-away: Transformers"),
        "Attention needs fewer parameters than the layers before it.",
        "Weights of one attention layer, W_O included, are counted beside those of a dense layer "
        "over 50 rows, recurrent layers and convolutions of one width.",
        _fewer_parameters,
        correct="Far fewer than a dense layer over the sequence, and fewer than a recurrent layer. A "
        "convolution of three taps has fewer still, and a block with its feed-forward network "
        "more than an LSTM.",
    ),
    Experiment(
        94,
        "solely-attention",
        Place("handout", "Transformers"),
        "The Transformer is built solely on attention.",
        "The parameters of the base model are counted by part, without their values, and by hand.",
        _solely_attention,
        correct="In the two stacks the feed-forward networks hold more parameters than attention does.",
    ),
    Experiment(
        70,
        "model-sizes",
        Place("homework", "1.5(b)"),
        "The Transformer has 65 and 213 million parameters, ViT 86, 307 and 632 million.",
        "The library's models are built on the meta device, for 37,000 tokens or 1,000 classes, "
        "and their parameters counted.",
        _sizes,
        correct="They do, up to a few percent: papers round, and count other vocabularies and heads.",
    ),
    Experiment(
        71,
        "model-widths",
        Place("homework", "1.5(b)"),
        "ViT is wider than the Transformer, because images contain more information.",
        "The widths of the published sizes are compared, rank by rank.",
        _widths,
        correct="The big Transformer and ViT-L are equally wide. Widths follow a model's size; nothing in "
        "them measures what images contain.",
    ),
)
