"""Masks: which query may attend to which key, and rows that may attend to none.

    a_i = softmax(β s_i + m_i)        m_ij = 0 where query i may see key j, −∞ where it may not

A causal mask is n×n, with −∞ strictly above the diagonal. A padding mask hides what fills a batch
up; it, and weights shared by all positions, are what lets sentences of any length stand together.
"""

import math

import torch
from torch import Tensor, nn

from regard import (
    Mask,
    MultiHeadAttention,
    SinusoidalPositions,
    Transformer,
    attend,
    attention_weights,
    causal,
    padding,
)
from regard.lab.claims import plain
from regard.lab.claims.sample import (
    DIFFERENT,
    PLAN,
    SAME,
    D,
    H,
    L,
    S,
    alive,
    apart,
    influence,
    normal,
)
from regard.lab.experiment import (
    Curve,
    Experiment,
    Finding,
    Plot,
    Table,
    conditional,
    corrected,
    holds,
    more_exactly,
)
from regard.lab.numbers import figure, within
from regard.lab.place import Place


def causal_mask() -> Finding:
    query, key = normal(0, L, 5), normal(1, L, 5)
    shares = attention_weights(query, key, mask=causal())
    below = torch.ones(L, L).tril() > 0
    rows = [
        plain.softmax(plain.array(query[[i]] @ key[: i + 1].T) / math.sqrt(5)) for i in range(L)
    ]
    by_hand = max(plain.apart(shares[i, : i + 1], row[0]) for i, row in enumerate(rows))
    strict = torch.equal(shares > 0, below) and by_hand < SAME
    strict = strict and torch.equal(causal().tensor(L, L)[0, 0], below)
    # The other reading: the diagonal is hidden too.
    without = attention_weights(query, key, mask=Mask.from_tensor(below & ~torch.eye(L).bool()))
    empty = int((without.sum(-1) == 0).sum())
    return Finding(
        more_exactly(meant=strict, literal=empty == 0),
        {
            "mask": [L, L],
            "pairs hidden": int((~causal().tensor(L, L)).sum()),
            "weights minus a softmax over the first i keys": by_hand,
            "queries with nothing to see, diagonal kept": int((shares.sum(-1) == 0).sum()),
            "queries with nothing to see, diagonal hidden": empty,
        },
        tables=(
            Table(
                "weights under a causal mask",
                ("", *(f"k{n + 1}" for n in range(5))),
                tuple((f"q{n + 1}", *shares[n, :5].tolist()) for n in range(5)),
            ),
        ),
        conclusion=f"The matrix is {L}×{L}, n×n, with −∞ strictly above the diagonal "
        f"({int((~causal().tensor(L, L)).sum())} pairs) and 0 on it and below; row i is then a "
        f"softmax over the first i keys, {within(by_hand)}. If the diagonal were counted in, "
        f"{empty} query could attend to nothing, the first.",
    )


def masked_row() -> Finding:
    query, key, value = (
        x.requires_grad_() for x in (normal(0, 3, 5), normal(1, 4, 5), normal(2, 4, 2))
    )
    allowed = torch.tensor([[True, True, False, False], [False] * 4, [False, True, True, True]])
    output = attend(query, key, value, mask=Mask.from_tensor(allowed))
    gradients = torch.autograd.grad(output.sum(), (query, key, value))
    scores = (query @ key.T / math.sqrt(5)).masked_fill(~allowed, -math.inf)
    listing = torch.softmax(scores, -1) @ value
    some = [0, 2]
    inside = apart(listing.detach()[some], output.detach()[some])
    (lost,) = torch.autograd.grad(listing.sum(), value)
    sound = bool((output[1] == 0).all()) and bool((gradients[0][1] == 0).all())
    sound = sound and all(bool(gradient.isfinite().all()) for gradient in gradients)
    return Finding(
        conditional(inside < SAME and sound, bool(listing[1].isfinite().all())),
        {
            "rows that see something, listing and attend": inside,
            "empty row by the listing is NaN": bool(listing[1].isnan().all()),
            "gradients of all values by the listing are NaN": bool(lost.isnan().all()),
            "empty row by attend": output[1].tolist(),
            "gradient of its query by attend": gradients[0][1].tolist(),
            "all gradients of attend are finite": sound,
        },
        conclusion="In every row that keeps a key a plain softmax gives those zeros: it differs "
        f"from attend() by {figure(inside)}. A row of −∞ alone gives 0/0, which is NaN "
        f"{'and reaches' if bool(lost.isnan().all()) else 'but does not reach'} the gradients of "
        f"all values; attend() gives {figure(output[1].tolist())} there. The exercise's triangle "
        "has no such row if its diagonal is 0.",
    )


def large_negative() -> Finding:
    query, key, value = normal(0, 3, 5), normal(1, 4, 5), normal(2, 4, 2)
    allowed = torch.tensor([[True, True, False, False], [False] * 4, [False, True, True, True]])
    bias = torch.zeros(3, 4, dtype=torch.float64).masked_fill(~allowed, -1e9)
    added = attend(query, key, value, bias=bias)
    output = attend(query, key, value, mask=Mask.from_tensor(allowed))
    seen = apart(added[[0, 2]], output[[0, 2]])
    # Where all are lowered alike, a softmax doesn't notice: the hidden values come out.
    leak = apart(added[1], output[1])
    unmasked = apart(added[1], attend(query, key, value)[1])
    return Finding(
        conditional(seen < SAME, leak < SAME),
        {
            "rows that see something": seen,
            "row that sees nothing": leak,
            "the same row, minus that without any mask": unmasked,
        },
        conclusion="Where a row may attend to some key, −10⁹ gives what −∞ gives (difference "
        f"{figure(seen)}). Where it may attend to none, all scores are lowered alike, to which a "
        f"softmax is invariant: the row is that without any mask, {within(unmasked)}, and "
        f"{figure(leak, 2)} from the zeros wanted.",
    )


def no_future() -> Finding:
    model, memory = alive(Transformer(PLAN), 0), normal(1, 1, S, D)
    x = normal(2, 1, L, D)
    moved = influence(lambda x: model.decoder(x, memory, mask=causal()), x)
    future = float(moved.triu(1).max())
    past = float(moved[torch.ones(L, L).tril() > 0].min())
    # And through the whole model: other words after position n change no logits up to n.
    source, target = torch.arange(S)[None], torch.arange(L)[None]
    other = target.clone()
    other[:, 4:] = torch.tensor([[11, 13, 17]])
    before, after = model(source, target), model(source, other)
    kept, changed = apart(before[:, :4], after[:, :4]), apart(before[:, 4:], after[:, 4:])
    return Finding(
        holds(future == 0 and past > 0 and kept < SAME and changed > DIFFERENT),
        {
            "largest ∂yᵢ/∂xⱼ, j > i": future,
            "least ∂yᵢ/∂xⱼ, j ≤ i": past,
            "logits before a change": kept,
            "logits from it on": changed,
        },
        tables=(
            Table(
                "how much the decoder's row i moves with its input's row j",
                ("", *(f"x{n + 1}" for n in range(L))),
                tuple((f"y{n + 1}", *row) for n, row in enumerate(moved.tolist())),
            ),
        ),
        conclusion=f"The largest ∂y_i/∂x_j with j > i is {figure(future)}, the least with j ≤ i "
        f"{figure(past, 2)}: row i depends on rows 1 to i. When words from the fifth on are "
        f"exchanged, the logits before them change by {figure(kept)} and those from there on by "
        f"{figure(changed, 2)}.",
    )


def variable_lengths() -> Finding:
    layer, lengths = alive(MultiHeadAttention(D, H), 0), (3, 7, 5)
    sentences = [normal(n, n, D) for n in lengths]
    batch = nn.utils.rnn.pad_sequence(sentences, batch_first=True)
    position = SinusoidalPositions(D)

    def worst(x: Tensor, alone: list[Tensor], mask: Mask | None) -> float:
        """How far a sentence's rows in the batch are from the same sentence alone."""
        rows = layer(x, mask=mask)
        return max(apart(rows[b, :n], layer(alone[b])) for b, n in enumerate(lengths))

    placed, places = position(batch), [position(x) for x in sentences]
    tried = {
        ("no", "no"): worst(batch, sentences, None),
        ("yes", "no"): worst(placed, places, None),
        ("no", "yes"): worst(batch, sentences, padding(lengths)),
        ("yes", "yes"): worst(placed, places, padding(lengths)),
    }
    return Finding(
        corrected(
            tried["yes", "no"] < SAME, tried["no", "yes"] < SAME and tried["yes", "yes"] < SAME
        ),
        {
            "positions without a padding mask": tried["yes", "no"],
            "a padding mask without positions": tried["no", "yes"],
        },
        tables=(
            Table(
                "sentences of 3, 7 and 5 words in a batch, minus the same sentences alone",
                ("positions", "padding mask", "largest difference"),
                tuple((*case, gap) for case, gap in tried.items()),
            ),
        ),
        conclusion="Sentences of 3, 7 and 5 words in a batch, beside the same sentences alone: "
        f"with positions and no mask they differ by {figure(tried['yes', 'no'], 2)}, with a "
        f"padding mask and no positions by {figure(tried['no', 'yes'])}. Weights shared by all "
        "positions allow any length, the mask keeps the padding out, and positions tell the "
        "order.",
    )


def counting_by_mask() -> Finding:
    n = 16
    nothing, first = torch.zeros(n, 1, dtype=torch.float64), torch.eye(n, 1, dtype=torch.float64)
    masked = attend(nothing, nothing, first, mask=causal())[:, 0]
    free = attend(nothing, nothing, first)[:, 0]
    places = [float(i + 1) for i in range(n)]
    error = max(abs(a - 1 / place) for a, place in zip(masked.tolist(), places))
    spread, flat = (float(output.max() - output.min()) for output in (masked, free))
    return Finding(
        holds(error < SAME and flat < SAME and spread > DIFFERENT),
        {
            "outputs, causal mask": masked.tolist(),
            "outputs minus 1/n, largest": error,
            "largest minus least output, no mask": flat,
        },
        plots=(
            Plot(
                "what attention to a sign at the start gives",
                "position",
                "output",
                (
                    Curve("causal mask", places, masked.tolist()),
                    Curve("no mask", places, free.tolist()),
                ),
            ),
        ),
        conclusion="Under a causal mask row n takes the mean of n values, so that its output is "
        f"1/n, {within(error)}: one head counts. Without a mask all rows are equal, "
        f"{within(flat)}.",
    )


EXPERIMENTS: tuple[Experiment, ...] = (
    Experiment(
        7,
        "causal-mask",
        Place("exercises", "2(d)"),
        'In the masked variant, for n_q = n_k, a triangular matrix with −∞ in its "top right '
        'half" is added before the softmax; asked were its values and its shape.',
        "The weights under causal() are compared with a softmax over the first i keys of row i. "
        "Then the diagonal is taken for a part of the half, and hidden as well.",
        causal_mask,
        (r"M_{ij} = -\infty \text{ for } j > i, \quad M_{ij} = 0 \text{ for } j \le i",),
    ),
    Experiment(
        7,
        "masked-row",
        Place("exercises", "2(d)"),
        "Adding −∞ makes the softmax weight 0 for every pair of a query and a key to which it is "
        "added.",
        "One of three queries may attend to nothing. The output and the gradients of a plain "
        "softmax are compared with those of attend().",
        masked_row,
    ),
    Experiment(
        7,
        "large-negative",
        Place("exercises", "2(d)"),
        "In place of −∞ many programs add a large negative number, such as −10⁹.",
        "−10⁹ is added to the scores of hidden pairs, with one query that may attend to nothing.",
        large_negative,
        kind="added",
    ),
    Experiment(
        23,
        "no-future",
        Place("slides", "decoder"),
        "In the decoder self-attention works slightly differently: it masks future positions.",
        "The Jacobian of a decoder of two blocks is computed, and words at the end of a target "
        "are exchanged.",
        no_future,
        (r"\frac{\partial y_i}{\partial x_j} = 0 \text{ for } j > i",),
    ),
    Experiment(
        32,
        "counting-by-mask",
        Place("sheet", "6-2(c)"),
        'What the sheet\'s "all value tokens" rules out: under a causal mask, where each sum is '
        "over the tokens so far, attention can tell where a token stands without any positional "
        "encoding.",
        "All queries and keys are zero, and only the first value is 1. The output is read with "
        "and without a causal mask.",
        counting_by_mask,
        (r"c_n = \frac{1}{n} \sum_{j \le n} v_j = \frac{1}{n}",),
        kind="added",
    ),
    Experiment(
        54,
        "variable-lengths",
        Place("homework", "1.4(a)"),
        "Besides bringing in the order of the input and its spatial dependencies, positional "
        "encodings are also used to handle inputs of variable length.",
        "Sentences of unequal length are padded to one batch, and their rows compared with the "
        "same sentences alone, with and without positions and a padding mask.",
        variable_lengths,
    ),
)
