"""Sequential steps and receptive fields: attention beside recurrence and convolution."""

from dataclasses import replace

import torch
from torch import Tensor, nn

from regard import (
    LanguageConfig,
    LanguageModel,
    MultiHeadAttention,
    SelfCache,
    Transformer,
    TransformerConfig,
    causal,
)
from regard.lab.claims.costs import SMALL, cost
from regard.lab.claims.sample import HIDDEN, SAME, L, S, alive, apart, influence, normal
from regard.lab.cost.count import Counter, counted
from regard.lab.cost.layers import Attention, layer
from regard.lab.cost.path import felt
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
from regard.lab.experiment import Measured as Cell
from regard.lab.numbers import figure, within
from regard.lab.place import Place
from regard.model.baseline import Convolution, Recurrent

N, D, H = SMALL.length, SMALL.width, SMALL.heads
"""Positions, width and heads."""


def _chain(name: str, length: int) -> int:
    return cost(name, replace(SMALL, length=length)).steps


def _decoded(length: int) -> int:
    """Sequential products when each position is computed from the one before."""
    made, cache, x = alive(MultiHeadAttention(D, H), 0), SelfCache(), normal(1, 1, 1, D)
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
        holds(constant[0] and constant[1] and chains["LSTM"] == list(lengths)),
        {f"sequential products, {name}": chain for name, chain in chains.items()},
        (Table("Products that wait for each other", ("n", *map(str, lengths)), rows),),
        conclusion=f"At n = {figure(lengths)} the longest chain of products is "
        f"{figure(chains['LSTM'])} in an LSTM, {figure(chains['attention, with projections'])} in "
        f"attention and {figure(chains['convolution'])} in a convolution. Worth adding: decoding "
        f"token by token stays sequential with attention too, {figure(decoded)}, since each token "
        "is computed from the one before.",
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
            "sequential products, Transformer of 2 + 2 blocks": attention,
            "sequential products, two LSTM layers": recurrence,
            "recurrent layers in the Transformer": len(recurrent),
        },
        conclusion=f"At {figure(lengths)} tokens, the longest chain of products through a "
        f"Transformer of 2 + 2 blocks is {figure(attention)}, through two LSTM layers "
        f"{figure(recurrence)}. The Transformer has {len(recurrent)} recurrent layers.",
    )


def _at_once() -> Finding:
    lengths = (8, 16, 32)

    def calls(name: str, n: int) -> int:
        made = alive(layer(name).make(replace(SMALL, length=n)), 0)
        with torch.no_grad():
            return sum(counted(lambda: made(normal(1, 1, n, D))).products.values())

    called = {
        name: [calls(name, n) for n in lengths] for name in ("attention, with projections", "LSTM")
    }
    attention, recurrence = called.values()
    return Finding(
        holds(len(set(attention)) == 1 and recurrence[2] > recurrence[1] > recurrence[0]),
        {"positions": list(lengths)}
        | {f"products called, {name}": counts for name, counts in called.items()},
        conclusion=f"For {figure(lengths)} positions attention calls {figure(attention)} products, "
        f"an LSTM {figure(recurrence)}: one or more for each token.",
    )


def _whole_sequence() -> Finding:
    ids = torch.arange(L)[None]
    plan = LanguageConfig(S, width=D, heads=H, feed_forward=HIDDEN, layers=2)
    model = alive(LanguageModel(plan), 0)
    at_once, cache = model(ids), model.cache()
    steps = torch.cat([model(ids[:, n : n + 1], cache=cache) for n in range(L)], 1)
    layer, x = alive(MultiHeadAttention(D, H), 1), normal(2, 1, L, D)
    rows = torch.cat([layer(x[:, n : n + 1], x) for n in range(L)], 1)
    recurrent, kept = alive(Recurrent(D, "gru"), 3), SelfCache()
    stepped = torch.cat(
        [recurrent(x[:, n : n + 1], mask=causal(), cache=kept) for n in range(L)], 1
    )
    masked, own = apart(steps, at_once), apart(rows, layer(x))
    gru = apart(stepped, recurrent(x))
    return Finding(
        holds(masked < SAME and own < SAME),
        {
            "a causal model at once, against token by token": masked,
            "self-attention at once, against row by row in any order": own,
            "a recurrent layer, which has to go step by step": gru,
        },
        conclusion=f"One pass gives what single steps give: a causal model {within(masked)}, "
        f"self-attention row by row {within(own)}. So does a recurrent layer, {within(gru)}, but "
        "each of its steps has to wait for the one before.",
    )


def _longest_path() -> Finding:
    lengths = (8, 16, 32)
    names = ("attention, with projections", "LSTM", "plain recurrence", "convolution")
    paths: dict[str, list[Cell]] = {
        name: [cost(name, replace(SMALL, length=n)).path or "none" for n in lengths]
        for name in names
    }
    whole = influence(alive(MultiHeadAttention(D, H), 0), normal(1, 1, N, D))
    rows = tuple((name, *each) for name, each in paths.items())
    return Finding(
        holds(
            len({*map(str, paths["attention, with projections"])}) == 1
            and bool((whole > 0).all())
            and paths["LSTM"] == paths["plain recurrence"] == list(lengths)
        ),
        {
            "pairs that one layer of attention joins": int((whole > 0).sum()),
            "pairs": N * N,
            **{f"path, {name}, n = {list(lengths)}": each for name, each in paths.items()},
        },
        (Table("Between the first and the last of n", ("layer", *map(str, lengths)), rows),),
        conclusion=f"Between the ends of {figure(lengths)} positions lie "
        f"{figure(paths['attention, with projections'])} products in attention, "
        f"{figure(paths['LSTM'])} steps in an LSTM and {figure(paths['convolution'])} layers of a "
        f"convolution with three taps. One layer of attention connects {int((whole > 0).sum())} of "
        f"{N * N} pairs.",
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
    fields = {
        "convolution, 3 taps": seen(Convolution(2, 3), 2),
        "convolution, 5 taps": seen(Convolution(2, 5), 2),
        "attention": seen(Attention(1), 2),
    }
    expected = {k: [min(n, 1 + ell * (k - 1)) for ell in range(1, depth + 1)] for k in (3, 5)}
    layers = list(range(1, depth + 1))
    return Finding(
        holds(
            fields["convolution, 3 taps"] == expected[3]
            and fields["convolution, 5 taps"] == expected[5]
            and fields["attention"] == [n] * depth
        ),
        {"positions": n}
        | {f"seen after 1 … {depth} layers, {name}": counts for name, counts in fields.items()},
        plots=(
            Plot(
                "Positions that reach the middle one",
                "layers",
                "positions",
                tuple(Curve(name, layers, counts) for name, counts in fields.items()),
            ),
        ),
        conclusion=f"Of {n} positions the middle one is reached by "
        f"{figure(fields['convolution, 3 taps'][:3])} after one, two and three layers with three "
        f"taps, by {figure(fields['convolution, 5 taps'][:3])} with five: each layer adds k − 1. "
        f"In attention it is {fields['attention'][0]} after the first layer.",
    )


def _both_directions() -> Finding:
    x = normal(0, 1, L, D)
    past = torch.ones(L, L, dtype=torch.bool).tril()
    one, both = (
        influence(alive(Recurrent(D, "gru", both=both), 1), x) > 0 for both in (False, True)
    )
    return Finding(
        more_exactly(meant=torch.equal(one, past), literal=not bool((both & ~past).any())),
        {
            "unidirectional: pairs that depend on a later row": int((one & ~past).sum()),
            "bidirectional: pairs that depend on a later row": int((both & ~past).sum()),
            "pairs with a later row": int((~past).sum()),
        },
        conclusion=f"In one direction it is: {int((one & ~past).sum())} of {int((~past).sum())} "
        "pairs with a later row depend on it. A bidirectional layer, which reads from the end as "
        f"well, has {int((both & ~past).sum())}.",
    )


def _one_state() -> Finding:
    n = 24
    layer, x = alive(nn.GRU(D, D, batch_first=True), 1), normal(0, 1, n, D)
    _, state = layer(x[:, :-1])
    last = layer(x)[0][:, -1]
    # What came before is known by the state alone: another past with this state changes nothing.
    kept = apart(layer(x[:, -1:], state)[0][:, -1], last)
    changes = {}
    for back in (1, 10, 20):
        other = x.clone()
        other[:, -1 - back] += 1
        moved = layer(other)[0][:, -1]
        with_old = layer(other[:, -1:], state)[0][:, -1]
        changes[back] = (apart(moved, last), apart(with_old, last))
    attention = alive(MultiHeadAttention(D, H), 2)
    felt_at = influence(attention, x)[-1, [n - 1 - back for back in changes]].tolist()
    return Finding(
        holds(kept < SAME and max(held for _, held in changes.values()) < SAME),
        {
            "numbers in the state, at any length": state.numel(),
            "the last row from the state alone, difference": kept,
            "tokens back": [*changes],
            "change of the last row": [moved for moved, _ in changes.values()],
            "the same with the old state": [held for _, held in changes.values()],
            "attention: entry of the Jacobian at these tokens": felt_at,
        },
        conclusion=f"The last row of a GRU is known from its state of {state.numel()} numbers and "
        f"the last token, {within(kept)}: whether a token stood 1 or 20 places back, it can act "
        f"through these numbers alone, and has an effect of {figure(changes[1][0], 2)} and "
        f"{figure(changes[20][0], 2)} here. Attention reads both directly, with entries of the "
        f"Jacobian of {figure(felt_at[0], 2)} and {figure(felt_at[-1], 2)}.",
    )


def _taken(layer: nn.Module, x: Tensor) -> bool:
    try:
        layer(x)
    except (ValueError, RuntimeError):
        return False
    return True


def _variable_size() -> Finding:
    lengths, sides = (3, L, S, 40), (8, 9, 24)
    convolution = alive(Convolution(D, 3), 0)
    dense = alive(nn.Sequential(nn.Flatten(), nn.Linear(L * D, L * D)), 1)
    pooled = nn.Sequential(nn.Conv2d(1, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    flat = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(4 * 6 * 6, 5))
    sequences, images = (
        [normal(2, 1, n, D) for n in lengths],
        [normal(4, 1, 1, n, n) for n in sides],
    )
    takes = {
        "convolution over a sequence": [_taken(convolution, x) for x in sequences],
        "CNN that ends in a mean": [_taken(alive(pooled, 3), x) for x in images],
        "CNN that ends in a dense layer": [_taken(alive(flat, 3), x) for x in images],
        "dense layer over a sequence": [_taken(dense, x) for x in sequences],
    }
    free, built = list(takes.values())[:2], list(takes.values())[2:]
    x = normal(5, 1, 40, D)
    same = apart(convolution(x)[:, 1:10], convolution(x[:, :11])[:, 1:10])
    return Finding(
        corrected(
            taught=not all(free[0]),
            correct=all(map(all, free)) and [sum(t) for t in built] == [1, 1] and same < SAME,
        ),
        {f"sizes taken by a {name}": f"{sum(t)} of {len(t)}" for name, t in takes.items()}
        | {"a convolution's rows in a longer sequence, change": same},
        conclusion=f"A convolution takes {sum(free[0])} of {len(lengths)} lengths, and gives the "
        f"same rows in a longer sequence ({within(same)}); a CNN that ends in a mean takes "
        f"{sum(free[1])} of {len(sides)} image sizes. A dense layer takes the one size that it was "
        f"built for, {sum(built[1])} of {len(lengths)}, and so does a CNN that ends in one, "
        f"{sum(built[0])} of {len(sides)}.",
    )


EXPERIMENTS: tuple[Experiment, ...] = (
    Experiment(
        34,
        "sequential-steps",
        Place("sheet", "6-2(d)"),
        "The operations of recurrent layers have to be computed sequentially; convolutional and "
        "attention operations can be parallelised.",
        "While a layer runs, the longest chain of products is followed in which each needs the "
        "result of the one before. The same is done for autoregressive decoding with attention.",
        _parallel,
    ),
    Experiment(
        53,
        "no-recurrence",
        Place("homework", "1.4(a)"),
        "Unlike RNNs and LSTMs, Transformers use no recurrent connections to find dependencies, "
        "and can process the input in parallel, which speeds up training.",
        "The longest chain of products is followed through an encoder-decoder and through two "
        "LSTM layers, at three lengths.",
        _whole_model,
    ),
    Experiment(
        57,
        "all-at-once",
        Place("homework", "1.4(b)"),
        "With self-attention the entire sequence can be fed at once, instead of element by "
        "element as in RNNs, which cannot be parallelised so.",
        "The calls of matrix products are counted in attention and in an LSTM at three lengths.",
        _at_once,
    ),
    Experiment(
        57,
        "whole-sequence",
        Place("homework", "1.4(b)"),
        "Feeding the entire sequence at once allows parallelisation within training examples.",
        "A causal model computes seven tokens in one pass, and token by token with a KV cache; "
        "self-attention computes its rows together and one by one. All have to be the same for "
        "training at once to be training at all.",
        _whole_sequence,
    ),
    Experiment(
        58,
        "longest-path",
        Place("homework", "1.4(b)"),
        "The maximum path length is O(1) in self-attention and O(n) in RNNs, which makes "
        "long-range dependencies easier.",
        "Gradients tell how many layers it takes from the first position to the last, and the "
        "graph of a layer how many products lie between. Recurrence is followed step by step.",
        _longest_path,
    ),
    Experiment(
        102,
        "receptive-field",
        Place("handout", "CNNs"),
        "Convolutions exploit local dependencies within the kernel, and long-range ones by "
        "multiple layers.",
        "Gradients at the middle position are propagated back through more and more layers, and "
        "the positions with a nonzero gradient are counted.",
        _receptive_field,
        (r"1 + \ell (k - 1)",),
    ),
    Experiment(
        77,
        "both-directions",
        Place("handout", "RNNs"),
        "A limit of RNNs (LSTM, GRU): the context is computed from the past only.",
        "Jacobians of a unidirectional and of a bidirectional recurrent layer say which row "
        "depends on which.",
        _both_directions,
    ),
    Experiment(
        106,
        "one-state",
        Place("handout", "RNNs"),
        "In an RNN there is no explicit distinction between short- and long-range dependencies: "
        "everything is dealt with via the context.",
        "The last row of a GRU is computed from its state and the last token alone. Tokens 1, 10 "
        "and 20 places back are changed, with the state following and with the old state; beside "
        "it, attention's Jacobian.",
        _one_state,
    ),
    Experiment(
        78,
        "variable-size",
        Place("handout", "CNNs"),
        "A limit of convolution: it cannot deal with inputs of variable size.",
        "Sequences and images of several sizes are given to a convolution, to two small CNNs with "
        "different heads, and to a dense layer.",
        _variable_size,
    ),
)
