"""The parts of multi-head attention, and what its heads compute."""

import numpy as np
import torch
from torch import nn
from torch.autograd.functional import jacobian

from regard import MultiHeadAttention, weights
from regard.lab.claims import plain
from regard.lab.claims.sample import DIFFERENT, SAME, D, H, L, S, alive, apart, normal, parameters
from regard.lab.experiment import Experiment, Finding, Table, conditional, corrected, holds
from regard.lab.place import Place
from regard.model.baseline import Convolution

K = D // H
"""The width of a head."""


def _multi_head() -> Finding:
    layer, x, source = alive(MultiHeadAttention(D, H), 0), normal(1, L, D), normal(2, S, D)
    peer = nn.MultiheadAttention(D, H, batch_first=True, dtype=torch.float64)
    parts = (layer.query, layer.key, layer.value)
    with torch.no_grad():
        peer.in_proj_weight.copy_(torch.cat([part.weight for part in parts]))
        peer.in_proj_bias.copy_(torch.cat([part.bias for part in parts]))
        peer.out_proj.load_state_dict(layer.output.state_dict())
        theirs = peer(x, source, source, need_weights=False)[0]
    by_hand = plain.multihead(layer, plain.array(x), plain.array(source))
    ours = layer(x, source)
    return Finding(
        holds(plain.apart(ours, by_hand) < SAME and apart(ours, theirs) < SAME),
        {
            "distance from plain arithmetic": plain.apart(ours, by_hand),
            "distance from torch.nn.MultiheadAttention": apart(ours, theirs),
        },
    )


def _output_projection() -> Finding:
    layer, x = alive(MultiHeadAttention(D, H), 0), normal(1, L, D)
    heads = plain.heads(layer, plain.array(x))
    stacked = plain.apart(layer(x), heads)
    projected = plain.apart(layer(x), plain.linear(layer.output, heads))

    def moved(part: MultiHeadAttention) -> int:
        """Columns of the output that change with the first head's values."""
        before = part(x)
        part.value.weight[:K] += 1
        return int(((part(x) - before).abs().amax(0) > SAME).sum())

    bare = alive(MultiHeadAttention(D, H), 0)
    bare.output.weight.copy_(torch.eye(D))
    mixed, apart_ = moved(layer), moved(bare)
    return Finding(
        corrected(taught=stacked < SAME, correct=projected < SAME and mixed == D and apart_ == K),
        {
            "distance from the stacked heads": stacked,
            "distance from the stacked heads times W_O": projected,
            "columns that one head reaches, with W_O": mixed,
            "columns that one head reaches, without": apart_,
        },
    )


def _stacked_heads() -> Finding:
    heads, own = 5, 3
    layer = alive(MultiHeadAttention(D, heads, key_width=2, value_width=own), 0)
    seen: list[tuple[int, ...]] = []
    layer.output.register_forward_pre_hook(lambda _, given: seen.append(tuple(given[0].shape)))
    out = layer(normal(1, L, D))
    (stacked,) = seen
    # The homework writes columns for tokens; here tokens are rows.
    return Finding(
        corrected(
            taught=stacked[-3:] == (heads, L, own),
            correct=stacked[-2:] == (L, heads * own) and len(stacked) == 3 and out.shape == (L, D),
        ),
        {
            "heads": heads,
            "numbers of one head": own,
            "tokens and numbers before W_O": list(stacked[-2:]),
            "tokens and numbers after W_O": list(out.shape),
        },
    )


def _subspaces() -> Finding:
    layer, x = alive(MultiHeadAttention(D, H), 0), normal(1, L, D)
    before = layer(x)
    heads, W = plain.heads(layer, plain.array(x)), plain.array(layer.output.weight)
    parts = [heads[:, h * K : (h + 1) * K] @ W[:, h * K : (h + 1) * K].T for h in range(H)]
    summed = plain.apart(before, np.sum(parts, 0) + plain.array(layer.output.bias))
    query, key = (
        part(x).unflatten(-1, (H, K)).transpose(0, 1) for part in (layer.query, layer.key)
    )
    looks = weights(query, key)
    alike = min(apart(looks[h], looks[g]) for h in range(H) for g in range(h))
    swap = torch.arange(D).view(H, K)[[2, 0, 1]].flatten()
    for part in (layer.query, layer.key, layer.value):
        part.weight.copy_(part.weight[swap])
        part.bias.copy_(part.bias[swap])
    layer.output.weight.copy_(layer.output.weight[:, swap])
    exchanged = apart(layer(x), before)
    return Finding(
        holds(summed < SAME and exchanged < SAME and alike > DIFFERENT),
        {
            "distance from the sum of each head's own part": summed,
            "change when the heads trade places": exchanged,
            "least difference between the weights of two heads": alike,
        },
    )


def _grouped_convolution() -> Finding:
    x, layer = normal(0, 1, L, D), alive(MultiHeadAttention(D, H, bias=False), 1)
    depthwise, grouped = (alive(Convolution(D, 1, groups=n), 2) for n in (D, H))

    def read(part: nn.Module, columns: int) -> int:
        """How many input channels the first columns of the output depend on."""
        gradient = jacobian(lambda row: part(row)[..., :columns].sum(), x[:, :1])
        return int((gradient != 0).sum())

    queries = layer.query
    channels = {
        "one head's queries": read(queries, K),
        "one group, groups = heads": read(grouped, K),
        "one channel, groups = channels": read(depthwise, 1),
    }
    kernel = grouped.convolution.weight[..., 0]
    whole = apart(queries(x), grouped(x) - grouped.convolution.bias)
    queries.weight.copy_(torch.block_diag(*kernel.split(K)))
    blocks = apart(queries(x), grouped(x) - grouped.convolution.bias)
    return Finding(
        corrected(
            taught=channels["one head's queries"] == channels["one channel, groups = channels"],
            correct=list(channels.values()) == [D, K, 1] and blocks < SAME and whole > DIFFERENT,
        ),
        {f"input channels read by {name}": count for name, count in channels.items()}
        | {
            "a head against a group, any weights": whole,
            "a head against a group, block-diagonal weights": blocks,
        },
    )


def _keras_example() -> Finding:
    heads, key_width, value_width = 2, 2, 3
    layer = MultiHeadAttention(D, heads, key_width=key_width, value_width=value_width)
    alive(layer, 0)
    joined, x = heads * value_width, normal(1, L, D)
    out = layer(x)
    by_hand = plain.apart(out, plain.multihead(layer, plain.array(x)))
    # Queries and keys, values, and W_O, each with its biases.
    counted = 2 * (D + 1) * heads * key_width + (D + 1) * joined + (joined + 1) * D
    return Finding(
        corrected(
            taught=out.shape[-1] == joined,
            correct=out.shape == x.shape and by_hand < SAME and parameters(layer) == counted,
        ),
        {
            "numbers side by side for each token": joined,
            "numbers for each token after W_O": out.shape[-1],
            "width of the input": D,
            "parameters": parameters(layer),
            "parameters, counted by hand": counted,
            "parameters of W_O": parameters(layer.output),
            "distance from plain arithmetic": by_hand,
        },
    )


def _heads_and_filters() -> Finding:
    width, taps, counts = 48, 3, (1, 2, 4, 8, 16)
    divided = [parameters(MultiHeadAttention(width, n, bias=False)) for n in counts]
    fixed = [parameters(MultiHeadAttention(width, n, key_width=6, bias=False)) for n in counts]
    filters = [parameters(nn.Conv1d(width, n, taps, bias=False)) for n in counts]

    def grows(sizes: list[int]) -> bool:
        return [size / sizes[0] for size in sizes] == list(counts)

    return Finding(
        conditional(inside=grows(filters) and grows(fixed), outside=grows(divided)),
        {
            "parameters of 16 heads for each of one, width shared": divided[-1] / divided[0],
            "parameters of 16 heads for each of one, width of a head kept": fixed[-1] / fixed[0],
            "parameters of 16 filters for each of one": filters[-1] / filters[0],
        },
        (
            Table(
                "Parameters at width 48",
                ("number", "heads that share the width", "heads of 6", "filters of 3 taps"),
                tuple(zip(counts, divided, fixed, filters)),
            ),
        ),
    )


EXPERIMENTS: tuple[Experiment, ...] = (
    Experiment(
        26,
        "multi-head",
        Place("sheet", "6-1"),
        "Multi-head attention is a few lines of PyTorch.",
        "The module is compared with plain numpy, head by head, and with torch's own layer, for "
        "seven queries over eleven pairs.",
        _multi_head,
        (r"[\mathrm{head}_1; \ldots; \mathrm{head}_H] W_O",),
        kind="asked",
        correct="The module, numpy and torch's own layer give the same numbers.",
    ),
    Experiment(
        45,
        "output-projection",
        Place("homework", "1.2(a)"),
        "The output of multi-head attention is what its heads give, stacked.",
        "The heads are computed in numpy and compared with the module's output before and after "
        "W_O. Then one head's values are changed, and the columns that change are counted.",
        _output_projection,
        correct="The stack goes through a matrix W_O, which is what lets the heads mix; without it each "
        "head would have columns of its own.",
    ),
    Experiment(
        47,
        "stacked-heads",
        Place("homework", "1.3(a)"),
        "Multi-head self-attention gives an array with an axis for the heads, d′×n×h.",
        "The input of the output projection is compared with its output; all sizes differ.",
        _stacked_heads,
        (r"W_O \, [H_1; \ldots; H_h], \quad H_i \in \mathbb{R}^{d' \times n}",),
        correct="The heads are concatenated, h·d′ numbers for each token, and W_O maps them to the width. "
        "No axis is left for heads.",
    ),
    Experiment(
        59,
        "subspaces",
        Place("homework", "1.4(c)"),
        "Heads attend in different subspaces; their results are concatenated and projected.",
        "The output is assembled in numpy from each head's own part of W_O. The heads' weights "
        "are compared, and the heads are permuted with all of their parameters.",
        _subspaces,
        (r"[h_1; \ldots; h_H] W_O = \sum_i h_i W_O^i",),
        correct="They do. Concatenating and projecting is the same as adding up each head's result times "
        "its part of W_O, so that the order of the heads means nothing.",
    ),
    Experiment(
        46,
        "grouped-convolution",
        Place("homework", "1.2(b)"),
        "The convolution's analogue of heads has as many groups as input channels.",
        "The Jacobian counts the input channels that a head's queries, a group and a depthwise "
        "channel read. A head is compared with a group before and after its weights are made "
        "block-diagonal.",
        _grouped_convolution,
        correct="That is a depthwise convolution, with one channel each. The nearest analogue has one "
        "group for each head; even so a head reads all channels and a group only its own, until "
        "its weights are made block-diagonal.",
    ),
    Experiment(
        93,
        "keras-example",
        Place("handout", "multi-head"),
        "Multi-head attention concatenates its heads: two heads with values of 3 give 6 numbers.",
        "The handout's layer, with 2 heads, keys of 2 and values of 3, is computed in numpy, and "
        "its parameters are counted by hand.",
        _keras_example,
        correct="The 6 numbers go through W_O, which brings them back to the width of the input. Its "
        "parameters belong in the count.",
    ),
    Experiment(
        101,
        "heads-share-width",
        Place("handout", "multi-head"),
        "The number of heads is like the number of filters of a convolution.",
        "Parameters are counted for 1 to 16 heads that share the width, for heads of a fixed "
        "width, and for filters.",
        _heads_and_filters,
        correct="It is so only if each head keeps its width. In the usual layer the heads share the "
        "width: more of them cost nothing, and each sees less.",
    ),
)
