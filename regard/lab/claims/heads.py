"""The parts of multi-head attention, and what its heads compute."""

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.functional import jacobian

from regard import MultiHeadAttention, attend, attention_weights
from regard.lab.claims import plain
from regard.lab.claims.sample import DIFFERENT, SAME, D, H, L, S, alive, apart, normal, parameters
from regard.lab.experiment import (
    Experiment,
    Finding,
    Table,
    corrected,
    holds,
    more_exactly,
)
from regard.lab.numbers import figure, within
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
        conclusion="The module agrees with plain numpy, head by head, "
        f"{within(plain.apart(ours, by_hand))}, and with torch.nn.MultiheadAttention "
        f"{within(apart(ours, theirs))}.",
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
        conclusion="Standard multi-head attention has a matrix W_O after the stack: the output "
        f"differs from the stacked heads by {figure(stacked, 2)}, and from W_O times them by "
        f"{figure(projected)}. With it one head reaches {mixed} of {D} columns, without it "
        f"{apart_}, its own.",
    )


def _three_inputs() -> Finding:
    d, t, n, m, heads, own = 5, 3, 4, 6, 2, 2
    query, key, value = normal(0, n, d), normal(1, m, d), normal(2, m, t)

    def layer(value_width: int) -> MultiHeadAttention:
        """The homework's: W_q and W_k for what is d wide, W_v for what the values are."""
        made = MultiHeadAttention(
            d, heads, key_width=own, value_source_width=value_width, bias=False
        )
        return alive(made, 3)

    def by_hand(part: MultiHeadAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Each head's projections of its own three inputs, attended to, stacked, times W_O."""
        projected = (part.query(q), part.key(k), part.value(v))
        split = zip(*(each.split(own, -1) for each in projected))
        return part.output(torch.cat([attend(*one) for one in split], -1))

    of_one, of_three = layer(d), layer(t)
    one_x = apart(by_hand(of_one, query, query, query), of_one(query))
    three = apart(by_hand(of_three, query, key, value), of_three(query, key, value=value))
    # Values of the queries' width, so that the answer can be followed at all.
    wide = normal(6, m, d)
    from_x = apart(of_one(query, key, value=wide), of_one(query))
    return Finding(
        more_exactly(meant=max(one_x, three) < SAME, literal=from_x < SAME),
        {
            "Q = K = V = x: the module and the heads one by one, difference": one_x,
            "Q, K, V as given: the module and the heads one by one, difference": three,
            "Q, K, V as given: projected from Q alone and from all three, difference": from_x,
            "shapes given, as rows": [list(z.shape) for z in (query, key, value)],
            "shape of the output": list(of_three(query, key, value=value).shape),
        },
        conclusion="For self-attention, where all three are one x, it gives the layer's output "
        f"{within(one_x)}. With Q, K and V as the question gives them, n = {n} queries, m = {m} "
        "keys and values of another width, each has projections of its own, as in the module with "
        f"`value=` ({within(three)}); from Q alone the result would differ by {figure(from_x, 2)}.",
    )


def _stacked_heads() -> Finding:
    heads, own = 5, 3
    layer = alive(MultiHeadAttention(D, heads, key_width=2, value_width=own), 0)
    before: list[tuple[int, ...]] = []
    each: list[tuple[int, ...]] = []
    layer.output.register_forward_pre_hook(lambda _, args: before.append(tuple(args[0].shape)))
    layer.core.register_forward_hook(lambda _, args, out: each.append(tuple(out.shape)))
    out = layer(normal(1, L, D))
    (joined,), (stacked,) = before, each
    # The homework writes columns for tokens; here tokens are rows.
    return Finding(
        more_exactly(
            meant=stacked[-3:] == (heads, L, own) and joined[-2:] == (L, heads * own),
            literal=tuple(out.shape) == stacked[-3:],
        ),
        {
            "heads, tokens and numbers of each": list(stacked[-3:]),
            "tokens and numbers before W_O": list(joined[-2:]),
            "tokens and numbers after W_O": list(out.shape),
        },
        conclusion=f"The heads give {stacked[-3]} matrices of {stacked[-1]} numbers for each of "
        f"{stacked[-2]} tokens. What then follows is left out: they are concatenated, {joined[-1]} "
        f"numbers for each token, and W_O maps these to the width {out.shape[-1]}; no axis for "
        "heads is left.",
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
    looks = attention_weights(query, key)
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
        conclusion=f"Two heads' weights differ by {figure(alike, 2)} at least. Concatenating and "
        "projecting is the same as adding up each head's result times its part of W_O "
        f"({within(summed)}), so that the order of the heads means nothing ({within(exchanged)}).",
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
    of_head, of_group, of_channel = channels.values()
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
        conclusion=f"With groups = in_channels a filter reads {of_channel} channel, and a head "
        f"{of_head}: the nearest analogue has one group for each head, which reads {of_group}. "
        f"Head and group agree only for block-diagonal weights ({figure(blocks)}; any weights "
        f"{figure(whole, 2)}).",
    )


def _keras_example() -> Finding:
    heads, key_width, value_width = 2, 2, 3
    layer = MultiHeadAttention(D, heads, key_width=key_width, value_width=value_width)
    alive(layer, 0)
    x = normal(1, L, D)
    sets = {
        "W_Q": [heads, D, layer.query.out_features // heads],
        "W_K": [heads, D, layer.key.out_features // heads],
        "W_V": [heads, D, layer.value.out_features // heads],
    }
    by_hand = plain.apart(layer(x), plain.multihead(layer, plain.array(x)))
    return Finding(
        holds(
            [width for *_, width in sets.values()] == [key_width, key_width, value_width]
            and by_hand < SAME
        ),
        {f"{name}: heads, rows and columns": shape for name, shape in sets.items()}
        | {"distance from plain arithmetic": by_hand},
        conclusion=f"There are {heads} sets, with keys of {sets['W_K'][2]} and values of "
        f"{sets['W_V'][2]} numbers; the layer with them is that of plain arithmetic "
        f"{within(by_hand)}. The layer has a fourth matrix, W_O, for both heads together.",
    )


def _concatenated_heads() -> Finding:
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
        conclusion=f"Concatenated, the example's two heads give {joined} numbers for each token. "
        f"The layer gives {out.shape[-1]}, the width of its input: a linear layer W_O, with "
        f"{parameters(layer.output)} of its {parameters(layer)} parameters, follows, in Keras as "
        "in the paper.",
    )


def _heads_and_filters() -> Finding:
    width, taps, counts = 48, 3, (1, 2, 4, 8, 16)
    divided = [parameters(MultiHeadAttention(width, n, bias=False)) for n in counts]
    fixed = [parameters(MultiHeadAttention(width, n, key_width=6, bias=False)) for n in counts]
    filters = [parameters(nn.Conv1d(width, n, taps, bias=False)) for n in counts]

    def grows(sizes: list[int]) -> bool:
        return [size / sizes[0] for size in sizes] == list(counts)

    return Finding(
        holds(grows(filters) and grows(fixed) and len(set(divided)) == 1),
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
        conclusion=f"16 filters have {filters[-1] / filters[0]:g} times the parameters of one, and "
        f"so do 16 heads that keep their width ({fixed[-1] / fixed[0]:g} times). In the usual "
        f"layer the heads share the width: 16 have {divided[-1] / divided[0]:g} times the "
        "parameters of one, and each sees less.",
    )


EXPERIMENTS: tuple[Experiment, ...] = (
    Experiment(
        26,
        "multi-head",
        Place("sheet", "6-1"),
        "Implement multi-head attention in PyTorch.",
        "The module is compared with plain numpy, head by head, and with torch's own layer, for "
        "seven queries over eleven pairs.",
        _multi_head,
        (r"[\mathrm{head}_1; \ldots; \mathrm{head}_H] W_O",),
        kind="asked",
    ),
    Experiment(
        45,
        "output-projection",
        Place("homework", "1.2(a)"),
        "The output H of standard multi-head attention is the stack of the heads' results H⁽¹⁾ to "
        "H⁽ʰ⁾.",
        "The heads are computed in numpy and compared with the module's output before and after "
        "W_O. Then one head's values are changed, and the columns that change are counted.",
        _output_projection,
    ),
    Experiment(
        45,
        "three-inputs",
        Place("homework", "1.2(a)"),
        "Asked for the output given Q (d×n), K (d×m) and V (t×m), the answer projects the "
        "queries, keys and values of all heads from one x.",
        "A module with two heads is given three inputs of those shapes, and one, and is compared "
        "with its heads computed one by one. Then it reads all from Q where three were given.",
        _three_inputs,
    ),
    Experiment(
        47,
        "stacked-heads",
        Place("homework", "1.3(a)"),
        "From C (e×n), each head i has Q⁽ⁱ⁾, K⁽ⁱ⁾ of d'×n and V⁽ⁱ⁾, H⁽ⁱ⁾ of d''×n; the output H "
        "is their stack, d''×n×h.",
        "The heads' results, the input of the output projection and its output are recorded; all "
        "sizes differ.",
        _stacked_heads,
        (r"W_O \, [H_1; \ldots; H_h], \quad H_i \in \mathbb{R}^{d' \times n}",),
    ),
    Experiment(
        59,
        "subspaces",
        Place("homework", "1.4(c)"),
        "Heads attend to different representation subspaces, in parallel, each with its own "
        "projections; their outputs are concatenated and go through a linear layer.",
        "The output is assembled in numpy from each head's own part of W_O. The heads' weights "
        "are compared, and the heads are permuted with all of their parameters.",
        _subspaces,
        (r"[h_1; \ldots; h_H] W_O = \sum_i h_i W_O^i",),
    ),
    Experiment(
        46,
        "grouped-convolution",
        Place("homework", "1.2(b)"),
        "Similar to multi-head attention is a Conv1d with groups set to in_channels, so that each "
        "input is convolved with filters of its own; this captures relationships between "
        "features, as heads do between elements.",
        "The Jacobian counts the input channels that a head's queries, a group and a depthwise "
        "channel read. A head is compared with a group before and after its weights are made "
        "block-diagonal.",
        _grouped_convolution,
    ),
    Experiment(
        93,
        "keras-example",
        Place("handout", "multi-head"),
        "A Keras layer with 2 heads, key_dim 2 and value_dim 3 has two sets of W_Q, W_K and W_V, "
        "with d_K = 2 and d_V = 3.",
        "A layer of these sizes is built and computed in numpy, and the shapes of its matrices "
        "are read off.",
        _keras_example,
    ),
    Experiment(
        93,
        "concatenated-heads",
        Place("handout", "multi-head"),
        'Multi-head attention is "simply" a layer that concatenates the outputs of several '
        "attention layers.",
        "The handout's layer, with 2 heads, keys of 2 and values of 3, is computed in numpy, and "
        "its parameters are counted by hand.",
        _concatenated_heads,
    ),
    Experiment(
        101,
        "heads-share-width",
        Place("handout", "multi-head"),
        "A limit of that comparison: more filters are more parameters, while heads usually divide "
        "a fixed width among them.",
        "Parameters are counted for 1 to 16 heads that share the width, for heads of a fixed "
        "width, and for filters.",
        _heads_and_filters,
        kind="added",
    ),
)
