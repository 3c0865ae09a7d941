"""The number of parameters of layers and models."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard import (
    MultiHeadAttention,
    Transformer,
    TransformerConfig,
    VisionConfig,
    VisionTransformer,
    attend,
)
from regard.lab.claims.costs import compared
from regard.lab.claims.sample import alive, apart, base, influence, normal, parameters, unbuilt
from regard.lab.cost.documents import Entry, entries
from regard.lab.cost.documents import parameters as count_parameters
from regard.lab.cost.orders import Widths
from regard.lab.experiment import (
    Experiment,
    Finding,
    Table,
    conditional,
    corrected,
    holds,
    more_exactly,
)
from regard.lab.numbers import figure, within
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
        conclusion=f"W_Q, W_K and W_V have {three} weights at D = {D}, 3D² = {3 * D * D}, and one "
        f"layer ran on sequences of {figure(lengths)} tokens with them.",
    )


def _parameter_table() -> Finding:
    some = entries(Place("handout", "parameter table"))
    *others, dense = some
    whole = [entry.layer for entry in some if entry.whole]
    counts, exact = compared(some, Widths(5, D, 2, 3, K), Widths(7, 8, 3, 5, 5))
    return Finding(
        corrected(
            taught=all(entry.whole for entry in some),
            correct=exact and all(entry.whole for entry in others),
        ),
        {f"left out of {entry.order}, {entry.layer}": entry.left_out for entry in some}
        | {"complete formulas equal what is counted": exact},
        (counts,),
        conclusion=f"{len(whole)} of {len(some)} entries are right: {', '.join(whole)}. A dense "
        f"layer from L·d to L·d_v numbers has {dense.exact} parameters, not {dense.order}. The "
        f"complete formulas {'are' if exact else 'are not'} what is counted.",
    )


def _fewer_than_a_convolution() -> Finding:
    attention, convolution, _, dense = entries(Place("handout", "parameter table"))
    d, taps, parts = 64, (1, 3, 5), (8, 4, 2, 1)

    def over_square(entry: Entry, part: int = 1, k: int = 3) -> float:
        """Parameters over d², with d_k a part of d."""
        return count_parameters(entry, Widths(16, d, d // part, d, k)) / d**2

    convolutions = [over_square(convolution, k=k) for k in taps]
    heads = [over_square(attention, part) for part in parts]
    far = over_square(dense)
    return Finding(
        conditional(
            inside=heads[0] < min(convolutions[1:]) and heads[0] < far,
            outside=max(heads) < min(convolutions),
        ),
        {
            "attention, d_k = d/8 and d_v = d, over d²": heads[0],
            "attention, d_k = d_v = d, over d²": heads[-1],
            "convolution, 1, 3 and 5 taps, over d²": convolutions,
            "dense layer over 16 positions, over d²": far,
        },
        (
            Table(
                f"Parameters over d², at d = {d}, d_v = d",
                ("d_k", "attention", "convolution, k = 1", "k = 3", "k = 5"),
                tuple((f"d/{part}", h, *convolutions) for part, h in zip(parts, heads)),
            ),
        ),
        conclusion=f"With the handout's d_k = d/8, and d_v = d, it has {figure(heads[0])} d², a "
        f"convolution of three taps {figure(convolutions[1])} d² and a dense layer over 16 "
        f"positions {figure(far)} d². With d_k = d_v = d it has {figure(heads[-1])} d², as many as "
        f"three taps; a convolution with one tap has {figure(convolutions[0])} d².",
    )


def _dependency_graphs() -> Finding:
    kinds, rows = 12, []
    # A recipe on words alone: a verb, kind 0, asks, and a subject, kind 1, answers.
    ask, answer = torch.eye(kinds, 2, dtype=torch.float64).unbind(1)
    for n in (4, 8, 12):
        (x, named, verb, wanted), (_, fresh, verbs, others) = (
            _verb_and_subject(n, kinds, seed) for seed in (0, 1)
        )
        found = attend((x @ ask)[..., None], (x @ answer)[..., None], named, beta=100.0)
        error = apart(found[torch.arange(len(found)), verb], wanted)
        # Weights that are tied to positions: the best for what they are fitted to, tried on more.
        fit = torch.linalg.lstsq(_by_positions(named, verb), wanted.flatten()).solution
        left = (_by_positions(fresh, verbs) @ fit - others.flatten()).square().mean()
        missed = float(left / others.square().mean())
        rows.append((n, n * (n - 1), n * n, missed, 2 * kinds, error))
    arrangements = [row[1] for row in rows]
    return Finding(
        holds(max(row[5] for row in rows) < 1e-9 and min(row[3] for row in rows) > 0.5),
        {
            "words": [row[0] for row in rows],
            "places that verb and subject can have": arrangements,
            "weights of a dense layer, each channel alone": [row[2] for row in rows],
            "share of the subject that its best weights miss": [row[3] for row in rows],
            "weights of attention's recipe": [row[4] for row in rows],
            "largest error of attention": [row[5] for row in rows],
        },
        (
            Table(
                "Give the verb its subject, wherever they stand",
                ("words", "arrangements", "dense weights", "missed", "recipe's weights", "error"),
                tuple(rows),
            ),
        ),
        conclusion=f"In {rows[0][0]} to {rows[-1][0]} words, verb and subject can stand in "
        f"{arrangements[0]} to {arrangements[-1]} ways. A dense layer's best weights, {rows[0][2]} "
        f"to {rows[-1][2]} of them, miss {rows[0][3]:.0%} to {rows[-1][3]:.0%} of the subject: it "
        f"takes a larger network, with a detector for each arrangement. A recipe of {rows[0][4]} "
        f"weights gives the verb its subject at any length, {within(max(row[5] for row in rows))}.",
    )


def _verb_and_subject(n: int, kinds: int, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sentences of n words with a verb and its subject somewhere: words, values, where, what."""
    sentences = torch.arange(900)
    draw = torch.Generator().manual_seed(1000 * seed + n)
    order = torch.rand(len(sentences), n, generator=draw).argsort(-1)
    token = torch.randint(2, kinds, (len(sentences), n), generator=draw)
    token[sentences, order[:, 0]], token[sentences, order[:, 1]] = 0, 1
    values = normal(seed, len(sentences), n, 3)
    words = F.one_hot(token, kinds).double()
    return words, values, order[:, 0], values[sentences, order[:, 1]]


def _by_positions(values: Tensor, verb: Tensor) -> Tensor:
    """What a dense layer without cross-channel weights has for each pair of positions."""
    at = F.one_hot(verb, values.shape[1]).double()
    return torch.einsum("bi,bjc->bcij", at, values).flatten(2).flatten(0, 1)


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
        more_exactly(
            meant=attention == 4 * width**2 and attention < counts["dense over 50 rows"],
            literal=attention < min(counts.values()),
        ),
        {f"parameters, {name}": count for name, count in rows},
        (
            Table(
                "Without biases, at width 64",
                ("layer", "parameters", "for each D²"),
                tuple((name, count, round(count / width**2, 2)) for name, count in rows),
            ),
        ),
        conclusion="Than what, has to be said: an attention layer with W_O has "
        f"{attention / width**2:g} D², a dense layer over {length} rows "
        f"{counts['dense over 50 rows'] / width**2:g}, an LSTM {counts['LSTM'] / width**2:g}, a "
        f"GRU {counts['GRU'] / width**2:g}, a convolution of three taps "
        f"{counts['convolution of 3'] / width**2:g}. A whole block, with its feed-forward network, "
        f"has {block / width**2:g} D².",
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
    # What mixes positions: whose output at one depends on the input at another.
    x = normal(0, 1, N, D)
    parts = {
        "attention": MultiHeadAttention(D, 7),
        "feed-forward": FeedForward(D, 17),
        "norms": nn.LayerNorm(D),
    }
    mixes = {}
    for name, part in parts.items():
        by = influence(alive(part, 1), x)
        mixes[name] = bool((by - by.diagonal().diag()).max() > 0)
    stacks = counts["attention"] + counts["feed-forward"]
    return Finding(
        more_exactly(
            meant=[name for name, mixing in mixes.items() if mixing] == ["attention"],
            literal=counts["attention"] > stacks / 2,
        ),
        {
            **{f"parameters: {name}": count for name, count in counts.items()},
            **{f"mixes positions: {name}": mixing for name, mixing in mixes.items()},
        },
        (
            Table(
                "Parameters of the base model",
                ("part", "millions", "share"),
                tuple((name, round(n / 1e6, 2), round(n / total, 3)) for name, n in counts.items()),
            ),
        ),
        conclusion="It is the paper's own phrase, and right in its sense: of the parts of a "
        "block, those that mix positions are "
        f"{', '.join(n for n, mixing in mixes.items() if mixing)}. For information: the base "
        f"model's feed-forward networks hold {counts['feed-forward'] / 1e6:.1f} million "
        f"parameters, attention {counts['attention'] / 1e6:.1f}.",
    )


def _sizes() -> Finding:
    rows = []
    for name, make, printed in SIZES:
        ours = parameters(unbuilt(make))
        rows.append((name, ours, round(printed), 100 * (ours / printed - 1)))
    off = max(abs(row[3]) for row in rows)
    millions = [f"{row[1] / 1e6:.1f}" for row in rows]
    return Finding(
        holds(off < 3),
        {name: ours for name, ours, *_ in rows} | {"farthest from the paper, in percent": off},
        (Table("Parameters", ("model", "ours", "the paper's", "difference in %"), tuple(rows)),),
        conclusion=f"Ours are {', '.join(millions)} million: base and big with a vocabulary of "
        "37,000, B/16, L/16, L/32 and H/14 with 1,000 classes. The farthest from the papers' "
        f"figure differs by {figure(off, 2)}%; papers round, and count other vocabularies and "
        "heads.",
    )


def _widths() -> Finding:
    text = [TransformerConfig.base(1).width, TransformerConfig.big(1).width]
    image = [c.width for c in (VisionConfig.base(1), VisionConfig.large(1), VisionConfig.huge(1))]
    wider = [ours > theirs for ours, theirs in zip(image, text)]
    return Finding(
        corrected(taught=all(wider), correct=text[1] == image[1]),
        {"widths, base and big": text, "widths, ViT-B, L and H": image},
        conclusion=f"Of base and big the widths are {figure(text)}, of ViT-B, L and H "
        f"{figure(image)}: beside each other, {sum(wider)} of {len(text)} ViTs are wider. That "
        "images contain more information than text is a reason that no width can show, and no "
        "paper gives.",
    )


EXPERIMENTS: tuple[Experiment, ...] = (
    Experiment(
        12,
        "shared-projections",
        Place("slides", "shared weights"),
        "W_Q, W_K and W_V are shared by all tokens, so that there are O(D²) independent "
        "parameters, for D_v ≈ D_k ≈ D.",
        "One layer's weights are counted, and the layer is run on sequences of three lengths.",
        _shared,
    ),
    Experiment(
        91,
        "parameter-table",
        Place("handout", "parameter table"),
        "In orders: self-attention d·d_k + d·d_k + d·d_v, convolution k·d·d_v, recurrent d·d_v + "
        "d_v·d_v, dense L·d·d_v.",
        "Each of the four orders is compared with the complete formula of its layer, and the "
        "formulas with the parameters of modules, at two sizes.",
        _parameter_table,
        (r"L^2 d d_v",),
    ),
    Experiment(
        91,
        "fewer-than-a-convolution",
        Place("handout", "parameter table"),
        "As attention has no parameters of its own, those of self-attention are in the input "
        "matrices alone, and are far fewer than in a dense layer or even a convolution; typically "
        "d_k is d/8.",
        "Parameters of W_Q, W_K and W_V are counted for d_k from d/8 to d, beside convolutions "
        "with 1, 3 and 5 taps and a dense layer over 16 positions.",
        _fewer_than_a_convolution,
    ),
    Experiment(
        105,
        "dependency-graphs",
        Place("handout", "larger networks"),
        "By the universal approximation theorem a larger network could learn all possible "
        "dependency graphs, but that is not optimal.",
        "In sentences of growing length a verb needs its subject, both at random places. A dense "
        "layer's best fixed weights are found by least squares; attention has a recipe on words "
        "alone. Weights, arrangements and errors are compared.",
        _dependency_graphs,
    ),
    Experiment(
        99,
        "fewer-parameters",
        Place("handout", "take-away: Transformers"),
        "Transformers benefit from attention's efficiency and require fewer parameters; than what "
        "is not said.",
        "Weights of one attention layer, W_O included, are counted beside those of a dense layer "
        "over 50 rows, recurrent layers and convolutions of one width.",
        _fewer_parameters,
    ),
    Experiment(
        94,
        "solely-attention",
        Place("handout", "Transformers"),
        "The Transformer is a relatively simple network, based solely on attention mechanisms: an "
        "encoder and a decoder of sequences of attention layers.",
        "The parameters of the base model are counted by part. The Jacobians of attention, of the "
        "feed-forward network and of LayerNorm say which of them mix positions.",
        _solely_attention,
    ),
    Experiment(
        70,
        "model-sizes",
        Place("homework", "1.5(b)"),
        "ViT has 86, 307 and 632 million parameters in its base, large and huge variants, the "
        "Transformer 65 and 213 million in base and big.",
        "The library's models are built on the meta device, for 37,000 tokens or 1,000 classes, "
        "and their parameters counted.",
        _sizes,
    ),
    Experiment(
        71,
        "model-widths",
        Place("homework", "1.5(b)"),
        "The Transformer typically uses smaller embedding sizes, such as 512 or 1024, and ViT "
        "larger ones, such as 768 or 1024, because images contain more information than text.",
        "The widths of the published sizes are compared, rank by rank.",
        _widths,
    ),
)
