"""Homework 1.2: several heads, and what resembles them among convolutions."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard import MultiHeadAttention, attend
from regard.lab.answers.answer import Answer, Demonstration, Mistake, Point, Step
from regard.lab.claims.sample import SAME, alive, apart, normal
from regard.lab.experiment import Table
from regard.lab.place import Place

d, n, m, t, h = 6, 5, 7, 4, 2
"""Q is d×n, K d×m, V t×m; there are h heads."""


def _inputs() -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values as rows."""
    return normal(0, n, d), normal(1, m, d), normal(2, m, t)


def _layer(value_width: int = t) -> MultiHeadAttention:
    made = MultiHeadAttention(d, h, value_source_width=value_width, bias=False)
    return alive(made, 3)


def _by_heads(layer: MultiHeadAttention, Q: Tensor, K: Tensor, V: Tensor) -> Tensor:
    """The heads' outputs side by side, before W_O."""
    projected = layer.query(Q), layer.key(K), layer.value(V)
    return torch.cat([attend(*one) for one in zip(*(x.chunk(h, -1) for x in projected))], -1)


def _torch(layer: MultiHeadAttention) -> nn.MultiheadAttention:
    """torch's own layer, with the same matrices."""
    theirs = nn.MultiheadAttention(d, h, bias=False, kdim=d, vdim=t).double().requires_grad_(False)
    parts = layer.query, layer.key, layer.value, layer.output
    own = theirs.q_proj_weight, theirs.k_proj_weight, theirs.v_proj_weight, theirs.out_proj.weight
    for weight, part in zip(own, parts):
        weight.copy_(part.weight)
    return theirs


def _multi_head() -> Demonstration:
    Q, K, V = _inputs()
    layer = _layer()
    stacked = _by_heads(layer, Q, K, V)
    H = layer(Q, K, value=V)
    by_heads, theirs = layer.output(stacked), _torch(layer)(Q, K, V)[0]
    return Demonstration(
        apart(H, by_heads) < SAME and apart(H, theirs) < SAME,
        {
            "rows and columns of a head's Q, K and V": [[d // h, n], [d // h, m], [d // h, m]],
            "rows and columns of the stack": list(stacked.T.shape),
            "rows and columns of H": list(H.T.shape),
            "largest difference of layer(Q, K, value=V) from the heads one by one": apart(
                H, by_heads
            ),
            "largest difference from torch's multi-head attention": apart(H, theirs),
        },
    )


def _without_output() -> Demonstration:
    Q, K, V = _inputs()
    layer = _layer()
    stacked, H = _by_heads(layer, Q, K, V), layer(Q, K, value=V)
    first = d // h
    layer.value.weight[first:] += 1  # the second head's values
    moved, changed = _by_heads(layer, Q, K, V), layer(Q, K, value=V)
    return Demonstration(
        apart(stacked, H) < SAME,
        {
            "difference of the bare stack from multi-head attention": apart(stacked, H),
            "what head 2 changes in the first rows, without W_O": apart(
                stacked[:, :first], moved[:, :first]
            ),
            "what head 2 changes in the first rows, with W_O": apart(
                H[:, :first], changed[:, :first]
            ),
        },
    )


def _from_one_input() -> Demonstration:
    Q, K, V = normal(0, n, d), normal(1, n, d), normal(2, n, d)
    layer = _layer(value_width=d)
    apart_inputs, one_input = layer(Q, K, value=V), layer(Q)
    return Demonstration(
        apart(apart_inputs, one_input) < SAME,
        {"difference, where K and V are not Q": apart(apart_inputs, one_input)},
    )


# Convolutions


CHANNELS = 6


def _read(output: Tensor, x: Tensor) -> list[int]:
    """How many input channels each output channel depends on."""
    counts = []
    for channel in range(output.shape[-1]):
        (slope,) = torch.autograd.grad(output[..., channel].sum(), x, retain_graph=True)
        counts.append(int((slope.abs().amax(0) > SAME).sum()))
    return counts


def _channels(groups: int) -> list[int]:
    """Input channels that each output channel of a grouped convolution reads."""
    x = normal(0, 9, CHANNELS).requires_grad_()
    kernel = normal(1, CHANNELS, CHANNELS // groups, 3)
    return _read(F.conv1d(x.T[None], kernel, padding=1, groups=groups)[0].T, x)


def _blocks(weight: Tensor, heads: int) -> Tensor:
    return weight * torch.block_diag(*[torch.ones(CHANNELS // heads, CHANNELS // heads)] * heads)


def _head_channels(block_diagonal: bool) -> list[int]:
    """Input channels that each output of two heads reads, before W_O."""
    layer = alive(MultiHeadAttention(CHANNELS, h, bias=False), 2)
    if block_diagonal:
        for part in (layer.query, layer.key, layer.value):
            part.weight.copy_(_blocks(part.weight, h))
    x = normal(0, 9, CHANNELS).requires_grad_()
    heads: list[Tensor] = []
    layer.output.register_forward_pre_hook(lambda _, args: heads.append(args[0]))
    layer(x)
    return _read(heads[0], x)


def _grouped() -> Demonstration:
    rows = (
        ("convolution, groups = 2", _channels(2)),
        ("2 heads, block-diagonal matrices", _head_channels(block_diagonal=True)),
        ("2 heads", _head_channels(block_diagonal=False)),
    )
    grouped, blocked, full = (read for _, read in rows)
    return Demonstration(
        grouped == blocked == [CHANNELS // h] * CHANNELS and full == [CHANNELS] * CHANNELS,
        tables=(
            Table(
                f"How many of {CHANNELS} input channels each output channel reads",
                ("layer", "channels"),
                tuple((name, str(read)) for name, read in rows),
            ),
        ),
    )


def _depthwise() -> Demonstration:
    depthwise = _channels(CHANNELS)
    return Demonstration(
        depthwise == _head_channels(block_diagonal=False)
        or depthwise == _head_channels(block_diagonal=True),
        {
            "channels read, groups = in_channels": depthwise,
            "channels read by 2 heads": _head_channels(block_diagonal=False),
            "channels read by 2 heads with block-diagonal matrices": _head_channels(True),
        },
    )


ANSWERS: tuple[Answer, ...] = (
    Answer(
        Place("homework", "1.2(a)"),
        question=r"With $Q$ ($d \times n$), $K$ ($d \times m$) and $V$ ($t \times m$) given "
        "separately, what does attention with $h$ heads give?",
        answer=r"$H = W_O\,[H^1; \dots; H^h]$. Head $i$ has three matrices of its own and attends "
        "with $Q^i = W_q^i Q$, $K^i = W_k^i K$ and $V^i = W_v^i V$; the outputs are stacked, and "
        "$W_O$ mixes them. The three inputs stay separate: only in self-attention are they the "
        "same.",
        derivation=(
            Step(
                r"Each head attends in a space of its own, with $\beta = 1/\sqrt{d'}$ for keys of "
                "width $d'$.",
                r"H^i = W_v^i V \ \operatorname{softargmax}_\beta\left((W_k^i K)^\top W_q^i "
                r"Q\right)",
            ),
            Step(
                r"The stack has $h d''$ rows, and $W_O$ brings them to the width that is wanted.",
                r"H = W_O \begin{bmatrix} H^1 \\ \vdots \\ H^h \end{bmatrix}",
            ),
        ),
        run=_multi_head,
        mistakes=(
            Mistake(
                "The output is the stack of what the heads give.",
                "$W_O$ is missing. Without it each row of the output comes from one head alone, "
                "and its width is tied to that of the values.",
                _without_output,
            ),
            Mistake(
                "All three are projected from one input $x$.",
                "That is self-attention. Here $Q$, $K$ and $V$ are three inputs, and even of "
                "different lengths.",
                _from_one_input,
            ),
        ),
        points=(
            Point(0.5, "projections of its own for each head, from the three inputs"),
            Point(0.5, "the stack of all heads, multiplied by $W_O$"),
        ),
    ),
    Answer(
        Place("homework", "1.2(b)"),
        question="Which convolution resembles multi-head attention, and why?",
        answer="A grouped convolution, with as many groups as there are heads: each group has "
        "filters of its own, works without the others, and the results are put side by side; a "
        "convolution of kernel 1 after it plays the part of $W_O$. The likeness ends at the "
        "input: a group reads its own channels only, a head projects all of them. The two agree "
        "where the projections are block-diagonal.",
        derivation=(
            Step(
                "Group $g$ reads only its share of the channels.",
                r"y^g_i = \sum_\delta W^g_\delta\, x^g_{i+\delta}",
            ),
            Step(
                "A head reads all of them, unless its matrix is zero outside its block.",
                r"v^g_j = W_v^g x_j = \sum_{g'} W_v^{g g'} x^{g'}_j",
            ),
        ),
        run=_grouped,
        mistakes=(
            Mistake(
                "`groups` is the number of input channels.",
                "That is a depthwise convolution: every output reads a single channel. A head "
                "reads all channels, and even block-diagonal ones read $d/h$.",
                _depthwise,
            ),
        ),
        points=(
            Point(1, "a grouped convolution with `groups` equal to the number of heads"),
            Point(1, "why: separate filters in parallel, put side by side, then mixed"),
        ),
    ),
)
