"""What layers and models cost: multiplications counted while they run, beside what is taught."""

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from regard import (
    MultiHeadAttention,
    SelfCache,
    Transformer,
    TransformerConfig,
    VisionConfig,
    VisionTransformer,
    attend,
    causal,
    window,
)
from regard.lab.claims.sample import alive, influence, normal, parameters, unbuilt
from regard.lab.cost.count import Counter, counted
from regard.lab.cost.layers import (
    Attention,
    Measured,
    Sizes,
    layer,
    measure,
    pairs_in_window,
)
from regard.lab.cost.path import felt
from regard.lab.experiment import (
    Curve,
    Experiment,
    Finding,
    Plot,
    Table,
    conditional,
    corrected,
    holds,
)
from regard.lab.experiment import Measured as Cell
from regard.model.baseline import Convolution, Dense, Recurrent

N, D, K = 11, 14, 3
"""Positions, width and taps, of which no two are the same."""
SMALL = Sizes(N, D, K, 7)


def _cost(name: str, sizes: Sizes) -> Measured:
    found = measure(layer(name), sizes)
    assert found is not None
    return found


def _products(run: Callable[[], object]) -> int:
    with torch.no_grad():
        return counted(run).total.multiply_adds


def _growth(count: Callable[[Sizes], int], sizes: Sizes = SMALL) -> tuple[float, float]:
    """The powers of n and of d: what doubling either does, as an exponent of two."""
    at = count(sizes)
    longer = count(replace(sizes, length=2 * sizes.length))
    wider = count(replace(sizes, width=2 * sizes.width))
    return math.log2(longer / at), math.log2(wider / at)


def _numbers() -> Finding:
    x = normal(0, 1, N, D)
    layers: dict[str, nn.Module] = {
        "attention": MultiHeadAttention(D, 7),
        "convolution": Convolution(D, K),
        "LSTM": Recurrent(D),
        "dense layer": Dense(D, N),
    }
    given = {name: alive(made, 1)(x).shape for name, made in layers.items()}
    return Finding(
        holds(all(shape == x.shape for shape in given.values())),
        {"numbers in": x.numel()}
        | {f"numbers out, {name}": shape.numel() for name, shape in given.items()},
    )


def _dense() -> Finding:
    of_parameters = _growth(
        lambda s: parameters(Dense(s.width, s.length).dense) - s.length * s.width
    )
    of_cost = _growth(lambda s: _cost("dense over all positions", s).multiply_adds)
    return Finding(
        holds(of_parameters == of_cost == (2.0, 2.0)),
        {
            "power of N in the parameters": of_parameters[0],
            "power of D in the parameters": of_parameters[1],
            "power of N in the multiply-adds": of_cost[0],
            "power of D in the multiply-adds": of_cost[1],
        },
    )


def _shared() -> Finding:
    made = alive(MultiHeadAttention(D, 7, bias=False), 0)
    lengths = (1, N, 10 * N)
    ran = [made(normal(n, 1, n, D)).shape[1] for n in lengths]
    three = sum(parameters(part) for part in (made.query, made.key, made.value))
    return Finding(
        holds(three == 3 * D * D and ran == list(lengths)),
        {"weights of W_Q, W_K and W_V": three, "3 D²": 3 * D * D, "lengths it ran on": ran},
    )


def _dot_products() -> Finding:
    alone = _growth(lambda s: _cost("attention alone", s).multiply_adds)
    whole = _growth(lambda s: _cost("attention, with projections", s).multiply_adds)
    rows = []
    for n in (16, 64, 256, 1024):
        sizes = Sizes(n, 64)
        products = _cost("attention alone", sizes).multiply_adds
        everything = _cost("attention, with projections", sizes).multiply_adds
        rows.append((n, products, everything - products, (everything - products) / everything))
    head = ("N", "products 2N²D", "projections 4ND²", "their share")
    return Finding(
        conditional(inside=alone == (2.0, 1.0), outside=whole == (2.0, 1.0)),
        {
            "powers of N and D, the products alone": list(alone),
            "powers of N and D, the whole layer": list(whole),
            "share of the projections at N = D": rows[1][3],
        },
        (Table("Multiply-adds at D = 64", head, tuple(rows)),),
    )


def _following() -> Finding:
    def cost(s: Sizes) -> int:
        x = torch.zeros(s.length, s.width)
        return _products(lambda: nn.Linear(s.width, s.width)(x))

    power = _growth(cost)
    weights = nn.Linear(D, D).weight.numel()
    return Finding(
        holds(power == (1.0, 2.0) and weights == D * D),
        {
            "power of N in the multiply-adds": power[0],
            "power of D in the multiply-adds": power[1],
            "weights": weights,
            "D²": D * D,
        },
    )


def _per_layer() -> Finding:
    n, d, k = N, D, K
    says = {
        "convolution": ("k n d", k * n * d),
        "depthwise convolution": ("k n d", k * n * d),
        "plain recurrence": ("n d²", n * d * d),
        "attention, with projections": ("n² d", n * n * d),
    }
    is_so = {
        "convolution": ("k n d²", k * n * d * d),
        "depthwise convolution": ("k n d", k * n * d),
        "plain recurrence": ("2 n d²", 2 * n * d * d),
        "attention, with projections": ("4 n d² + 2 n² d", 4 * n * d * d + 2 * n * n * d),
    }
    found = {name: _cost(name, SMALL).multiply_adds for name in says}
    rows = tuple((name, *says[name], *is_so[name], found[name]) for name in says)
    head = ("layer", "taught", "gives", "complete", "gives", "counted")
    return Finding(
        corrected(
            taught=found["convolution"] == says["convolution"][1],
            correct=all(found[name] == is_so[name][1] for name in says),
        ),
        {
            "convolution, counted": found["convolution"],
            "k n d": k * n * d,
            "k n d²": k * n * d * d,
            "depthwise convolution, counted": found["depthwise convolution"],
        },
        (Table(f"Multiply-adds at n = {n}, d = {d}, k = {k}", head, rows),),
    )


def _chain(name: str, length: int) -> int:
    return _cost(name, replace(SMALL, length=length)).steps


def _decoded(length: int) -> int:
    """Products in a row when each position is made from the one before."""
    made, cache, x = alive(MultiHeadAttention(D, 7), 0), SelfCache(), normal(1, 1, 1, D)
    with Counter() as counter, torch.no_grad():
        for _ in range(length):
            x = made(x, mask=causal(), cache=cache)
    return counter.chain


def _parallel() -> Finding:
    lengths = (5, 10, 20)
    names = ("attention, with projections", "convolution", "LSTM")
    chains = {name: [_chain(name, n) for n in lengths] for name in names}
    decoded = [_decoded(n) for n in lengths]
    chains["attention that writes, token by token"] = decoded
    rows: tuple[tuple[Cell, ...], ...] = tuple((name, *chain) for name, chain in chains.items())
    constant = [len(set(chains[name])) == 1 for name in names]
    return Finding(
        conditional(
            inside=constant[0] and constant[1] and chains["LSTM"] == list(lengths),
            outside=len(set(decoded)) == 1,
        ),
        {f"products in a row, {name}": chain for name, chain in chains.items()},
        (Table("Products that wait for each other", ("n", *map(str, lengths)), rows),),
    )


def _whole_model() -> Finding:
    lengths = (4, 8, 16)
    config = replace(TransformerConfig.tiny(31), encoder_layers=2, decoder_layers=2)
    model = Transformer(config).eval()

    def run(n: int) -> int:
        ids = torch.zeros(1, n, dtype=torch.int64)
        with torch.no_grad():
            return counted(lambda: model(ids, ids)).chain

    def recur(n: int) -> int:
        # In float64, where torch has no kernel that hides the steps.
        stack = [Recurrent(D).double() for _ in range(2)]
        with torch.no_grad():
            return counted(lambda: stack[1](stack[0](normal(0, 1, n, D)))).chain

    attention, recurrence = [run(n) for n in lengths], [recur(n) for n in lengths]
    stacks = [type(model.encoder).__name__, type(model.decoder).__name__]
    recurrent = [m for m in model.modules() if isinstance(m, nn.RNNBase)]
    return Finding(
        holds(
            len(set(attention)) == 1
            and recurrence[0] < recurrence[1] < recurrence[2]
            and not recurrent
            and len(stacks) == 2
        ),
        {
            "tokens": list(lengths),
            "products in a row, Transformer of 2 + 2 blocks": attention,
            "products in a row, two LSTM layers": recurrence,
            "recurrent layers in the Transformer": len(recurrent),
        },
    )


def _dearer(one: list[int], other: list[int]) -> int | None:
    """The first length, counted from 1, at which one needs more than the other."""
    return next((n for n, (a, b) in enumerate(zip(one, other), 1) if a > b), None)


def _multiplied(name: str, sizes: Sizes) -> int:
    made = layer(name).make(sizes).double()
    x = torch.zeros(1, sizes.length, sizes.width, dtype=torch.float64)
    return _products(lambda: made(x))


def _crossover() -> Finding:
    d = 4
    recurrences = ("plain recurrence", "GRU", "LSTM")
    names = ("attention alone", "attention, with projections", *recurrences)
    lengths = range(1, 4 * d + 2)
    counts = {name: [_multiplied(name, Sizes(n, d, heads=1)) for n in lengths] for name in names}
    alone = {name: _dearer(counts[names[0]], counts[name]) for name in recurrences}
    whole = {name: _dearer(counts[names[1]], counts[name]) for name in recurrences}
    rows = tuple(
        (name, _equal(alone[name], 4 * d + 1, d), _equal(whole[name], 4 * d + 1, d))
        for name in recurrences
    )
    # Dearer from d + 1 on means equal at d.
    return Finding(
        conditional(
            inside=alone["plain recurrence"] == d + 1,
            outside=whole["plain recurrence"] == d + 1,
        ),
        {
            "width d": d,
            "attention's products cost as much as plain recurrence at n =": rows[0][1],
            "with projections, as much as plain recurrence at n =": rows[0][2],
            "with projections, as much as a GRU at n =": rows[1][2],
            "with projections, as much as an LSTM at n =": rows[2][2],
        },
        (
            Table(
                f"Length at which attention costs as much, at d = {d}",
                ("as", "products alone", "with projections"),
                rows,
            ),
        ),
        (_scaling(64),),
    )


def _equal(dearer: int | None, most: int, d: int) -> str:
    if dearer is None:
        return f"above {most}"
    return "dearer at any n" if dearer == 1 else f"{dearer - 1} = {(dearer - 1) / d:g} d"


def _scaling(width: int) -> Plot:
    lengths = [2**e for e in range(2, 11)]
    names = ("attention, with projections", "attention alone", "plain recurrence", "LSTM")
    curves = tuple(
        Curve(name, lengths, [layer(name).cost(Sizes(n, width)).multiply_adds for n in lengths])
        for name in names
    )
    return Plot(f"Multiply-adds at d = {width}", "positions n", "multiply-adds", curves, True, True)


def _at_once() -> Finding:
    lengths = (8, 16, 32)

    def calls(name: str, n: int) -> int:
        made = alive(layer(name).make(replace(SMALL, length=n)), 0)
        with torch.no_grad():
            return sum(counted(lambda: made(normal(1, 1, n, D))).products.values())

    found = {
        name: [calls(name, n) for n in lengths] for name in ("attention, with projections", "LSTM")
    }
    attention, recurrence = found.values()
    return Finding(
        holds(len(set(attention)) == 1 and recurrence[2] > recurrence[1] > recurrence[0]),
        {"positions": list(lengths)}
        | {f"products called, {name}": counts for name, counts in found.items()},
    )


def _longest_path() -> Finding:
    lengths = (8, 16, 32)
    names = ("attention, with projections", "LSTM", "plain recurrence", "convolution")
    paths = {name: [_cost(name, replace(SMALL, length=n)).path for n in lengths] for name in names}
    whole = influence(alive(MultiHeadAttention(D, 7), 0), normal(1, 1, N, D))
    rows = tuple((name, *(path or "none" for path in found)) for name, found in paths.items())
    return Finding(
        holds(
            len(set(paths["attention, with projections"])) == 1
            and bool((whole > 0).all())
            and paths["LSTM"] == paths["plain recurrence"] == list(lengths)
        ),
        {
            "pairs that one layer of attention joins": int((whole > 0).sum()),
            "pairs": N * N,
            **{
                f"path, {name}, n = {list(lengths)}": list(row[1:])
                for name, row in zip(names, rows)
            },
        },
        (Table("Between the first and the last of n", ("layer", *map(str, lengths)), rows),),
    )


SIZES: tuple[tuple[str, Callable[[], nn.Module], float], ...] = (
    ("base", lambda: Transformer.base(37_000), 65e6),
    ("big", lambda: Transformer.big(37_000), 213e6),
    ("ViT-B/16", lambda: VisionTransformer.base(1000), 86e6),
    ("ViT-L/16", lambda: VisionTransformer.large(1000), 307e6),
    ("ViT-L/32", lambda: VisionTransformer.large(1000, patch=32), 307e6),
    ("ViT-H/14", lambda: VisionTransformer.huge(1000), 632e6),
)
"""Models, and the sizes that their papers print."""


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


def _value_product() -> Finding:
    L, S, key_width, value_width = 5, 7, 3, 11
    query, key, value = normal(0, L, key_width), normal(1, S, key_width), normal(2, S, value_width)
    count = _products(lambda: attend(query, key, value, backend="formula"))
    taught, complete = L * S * key_width, L * S * (key_width + value_width)
    return Finding(
        corrected(taught=count == taught, correct=count == complete),
        {"multiply-adds counted": count, "L_q L_k d_k": taught, "L_q L_k (d_k + d_v)": complete},
    )


def _like_dense() -> Finding:
    rows = []
    for d in (8, 16, 32):
        sizes = Sizes(N, d)
        attention = _cost("attention alone", sizes).multiply_adds
        dense = _cost("dense over all positions", sizes).multiply_adds
        rows.append((d, attention, dense, dense / attention))
    ratios = [row[3] for row in rows]
    head = ("d", "attention", "dense", "times as much")
    return Finding(
        corrected(
            taught=max(ratios) < 2, correct=all(r == d / 2 for r, (d, *_) in zip(ratios, rows))
        ),
        {"a dense layer costs, times attention": ratios, "at d": [row[0] for row in rows]},
        (Table(f"Multiply-adds at n = {N}", head, tuple(rows)),),
    )


def _cost_table() -> Finding:
    length, d = N, 16
    narrow, d_v = d // 8, 6
    head = MultiHeadAttention(d, 1, key_width=narrow, value_width=narrow, bias=False)
    x = torch.zeros(1, length, d)
    attention = _products(lambda: head(x))
    products = 2 * length * length * narrow
    projections = 4 * length * d * narrow
    recurrent = nn.RNN(d, d_v, batch_first=True).double()
    recurrence = _products(lambda: recurrent(x.double()))
    half = length * d * d_v
    rows = (
        ("attention, d_k = d_v = d/8", products, products + projections, attention),
        ("recurrence", half, half + length * d_v * d_v, recurrence),
    )
    names = ("layer", "taught", "complete", "counted")
    return Finding(
        corrected(
            taught=attention == products and recurrence == half,
            correct=attention == products + projections and recurrence == half + length * d_v * d_v,
        ),
        {
            "attention, left out: projections": attention - products,
            "recurrence, left out: L d_v²": recurrence - half,
        },
        (Table(f"Multiply-adds at L = {length}, d = {d}, d_v = {d_v}", names, rows),),
    )


def _window_cost() -> Finding:
    w, d = 16, 8
    rows = []
    for n in (256, 512, 1024):
        x = normal(0, 1, 1, n, d)

        def near(x: Tensor = x) -> Tensor:
            return attend(x, x, x, mask=window(w), backend="packed")

        def everywhere(x: Tensor = x) -> Tensor:
            return attend(x, x, x)

        rows.append((n, 2 * pairs_in_window(n, w) * d, _products(near), _products(everywhere)))
    grows = [rows[i + 1][2] / rows[i][2] for i in range(2)]
    exact = int(window(w).tensor(256, 256).sum()) == pairs_in_window(256, w)
    head = ("L", "needed, 2 pairs d", "counted, in the window", "counted, without one")
    return Finding(
        holds(exact and max(grows) < 2.3 and rows[2][2] < rows[2][3] / 4),
        {
            "times as much for twice the length, in the window": grows,
            "share of the whole at L = 1024": rows[2][2] / rows[2][3],
        },
        (Table(f"Multiply-adds, {w} positions to each side, d = {d}", head, tuple(rows)),),
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


def _receptive_field() -> Finding:
    n, depth = 41, 9
    middle = torch.zeros(n, dtype=torch.bool)
    middle[n // 2] = True

    def seen(made: nn.Module, width: int) -> list[int]:
        at, counts = middle, []
        for _ in range(depth):
            at = felt(made, at, width)
            counts.append(int(at.sum()))
        return counts

    torch.manual_seed(0)
    found = {
        "convolution, 3 taps": seen(Convolution(2, 3), 2),
        "convolution, 5 taps": seen(Convolution(2, 5), 2),
        "attention": seen(Attention(1), 2),
    }
    expected = {k: [min(n, 1 + ell * (k - 1)) for ell in range(1, depth + 1)] for k in (3, 5)}
    layers = list(range(1, depth + 1))
    return Finding(
        holds(
            found["convolution, 3 taps"] == expected[3]
            and found["convolution, 5 taps"] == expected[5]
            and found["attention"] == [n] * depth
        ),
        {"positions": n}
        | {f"seen after 1 … {depth} layers, {name}": counts for name, counts in found.items()},
        plots=(
            Plot(
                "Positions that reach the middle one",
                "layers",
                "positions",
                tuple(Curve(name, layers, counts) for name, counts in found.items()),
            ),
        ),
    )


EXPERIMENTS: tuple[Experiment, ...] = (
    Experiment(
        10,
        "numbers-in-out",
        "slides",
        "A layer takes N tokens of width D and gives N tokens of width D: N·D numbers each way.",
        "One sequence goes through attention, a convolution, an LSTM and a dense layer.",
        "So it is, for each of them.",
        _numbers,
    ),
    Experiment(
        11,
        "dense-parameters",
        "slides",
        "One dense layer over all tokens has O(N²D²) parameters and costs as much.",
        "The length and the width are doubled, and weights and executed multiply-adds are counted. "
        "What doubling does, as a power of two, is the exponent.",
        "Exactly N²D² of each: both exponents are 2.",
        _dense,
        (r"N^2 D^2",),
    ),
    Experiment(
        12,
        "shared-projections",
        "slides",
        "W_Q, W_K and W_V are shared by all tokens, so attention has O(D²) parameters.",
        "One layer's weights are counted, and the layer is run on sequences of three lengths.",
        "3D² weights (and D² more in W_O), whatever the length.",
        _shared,
    ),
    Experiment(
        13,
        "dot-product-cost",
        "slides",
        "The dot products of self-attention cost O(N²D).",
        "Multiply-adds are counted while attention runs, without projections and with them, at "
        "twice the length and at twice the width.",
        "The two products cost 2N²D; the projections around them cost 4ND², which is more "
        "whenever N < 2D.",
        _dot_products,
        (r"4ND^2 + 2N^2D",),
    ),
    Experiment(
        14,
        "following-layer",
        "slides",
        "The layer from D to D that follows has O(D²) parameters and costs O(ND²).",
        "A linear layer runs on N tokens, at twice the length and at twice the width.",
        "So it is: the same D² weights for every token, ND² multiply-adds.",
        _following,
    ),
    Experiment(
        33,
        "layer-costs",
        "exercise sheet",
        "For each layer a convolution costs k·n·d, recurrence n·d² and self-attention n²·d.",
        "Each layer of the library is run on the same input, and the multiplications that are "
        "executed are counted, in fused kernels as well.",
        "k·n·d is a depthwise convolution; a full one costs k·n·d². Plain recurrence has two "
        "products, 2n·d², and attention has its projections, 4n·d² + 2n²·d.",
        _per_layer,
        (r"k n d^2", r"2 n d^2", r"4 n d^2 + 2 n^2 d"),
    ),
    Experiment(
        34,
        "sequential-steps",
        "exercise sheet",
        "Recurrence is sequential; convolution and attention are computed in parallel.",
        "While a layer runs, the longest chain of products is followed in which each waits for "
        "the one before. The same is done for attention that writes token by token.",
        "True of reading and of training. Writing stays sequential with attention too, since each "
        "token is made from the one before.",
        _parallel,
    ),
    Experiment(
        53,
        "no-recurrence",
        "homework",
        "Unlike an RNN or LSTM, a Transformer has no recurrence, and so trains in parallel.",
        "The longest chain of products is followed through an encoder-decoder and through two "
        "LSTM layers, at three lengths.",
        "The chain through a Transformer is as long as it is deep, at any length; through an "
        "LSTM it grows with every token.",
        _whole_model,
    ),
    Experiment(
        56,
        "crossover",
        "homework",
        "Self-attention is faster than recurrence where the sequence is shorter than the width.",
        "Multiply-adds are counted at every length up to four times the width, for attention "
        "with and without its projections and for three kinds of recurrence.",
        "The products alone break even with plain recurrence at n = d. With projections attention "
        "never costs less than that, but breaks even with a GRU at n = d, with an LSTM at n = 2d.",
        _crossover,
        (r"2 n^2 d = 2 n d^2 \Leftrightarrow n = d",),
    ),
    Experiment(
        57,
        "all-at-once",
        "homework",
        "The whole sequence enters at once, instead of token by token.",
        "The calls of matrix products are counted in attention and in an LSTM at three lengths.",
        "Attention calls the same few products at any length, an LSTM at least one for each token.",
        _at_once,
    ),
    Experiment(
        58,
        "longest-path",
        "homework",
        "Between two positions the path is O(1) long in self-attention and O(n) in recurrence.",
        "Gradients tell how many layers it takes from the first position to the last, and the "
        "graph of a layer how many products lie between. Recurrence is followed step by step.",
        "Attention joins every pair in one layer, through three products: value, mean and output. "
        "Recurrence takes n steps, and a convolution as many layers as its reach goes into n.",
        _longest_path,
    ),
    Experiment(
        70,
        "model-sizes",
        "homework",
        "The Transformer has 65 and 213 million parameters, ViT 86, 307 and 632 million.",
        "The library's models are built without memory, with 37,000 tokens or 1,000 classes, and "
        "their parameters counted.",
        "Within 3 %: papers round, and count other vocabularies and heads.",
        _sizes,
    ),
    Experiment(
        71,
        "model-widths",
        "homework",
        "ViT is wider than the Transformer, because images contain more information.",
        "The widths of the published sizes are compared, rank by rank.",
        "The big Transformer and ViT-L are both 1024 wide. Widths follow a model's size; nothing "
        "in them measures what images contain.",
        _widths,
    ),
    Experiment(
        86,
        "cost-of-values",
        "handout",
        "Attention costs O(L_q L_k d_k).",
        "Multiplications are counted with keys and values of different widths.",
        "The product with the values costs as much again, L_q L_k d_v.",
        _value_product,
        (r"L_q L_k (d_k + d_v)",),
    ),
    Experiment(
        86,
        "like-a-dense-layer",
        "handout",
        "The cost of attention is similar to that of a dense layer.",
        "Both run on the same sequence, at three widths.",
        "A dense layer over all positions costs d/2 times as much as attention's two products.",
        _like_dense,
        (r"\frac{n^2 d^2}{2 n^2 d} = \frac{d}{2}",),
    ),
    Experiment(
        90,
        "cost-table",
        "handout",
        "Attention costs what its two products cost, and recurrence L·d·d_v.",
        "A head of width d/8 and a plain recurrence are run, and their multiplications counted.",
        "Attention's projections cost 4L·d·d_k more, here most of it; recurrence has L·d_v² more, "
        "for the state.",
        _cost_table,
    ),
    Experiment(
        90,
        "window-cost",
        "handout",
        "A local window limits what attention costs.",
        "Attention runs in a window and without one, while the length doubles; what the kernel "
        "executes is counted, beside the pairs that the mask allows.",
        "In a window the cost grows with the length rather than with its square, if the kernel "
        "leaves out what is masked. It works in rectangles, and so does a little more than needed.",
        _window_cost,
    ),
    Experiment(
        91,
        "parameter-table",
        "handout",
        "Attention has fewer parameters than even a convolution.",
        "Weights are counted: three projections, convolutions with 1, 3 and 5 taps, and a dense "
        "layer from L·d to L·d_v numbers.",
        "3d² weights are as many as a convolution with three taps has. A dense layer has L²·d·d_v.",
        _parameter_table,
        (r"3 d^2", r"L^2 d d_v"),
    ),
    Experiment(
        102,
        "receptive-field",
        "handout",
        "Convolutions reach far through depth.",
        "Gradients at the middle position are sent back through more and more layers, and the "
        "positions at which something arrives are counted.",
        "Each layer adds k − 1 positions; attention sees all of them in its first.",
        _receptive_field,
        (r"1 + \ell (k - 1)",),
    ),
)
