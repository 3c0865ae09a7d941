"""Symmetries: permutations of tokens, and shifts of a pattern."""

from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard import (
    LanguageConfig,
    LanguageModel,
    MultiHeadAttention,
    Transformer,
    TransformerConfig,
    VisionConfig,
    VisionTransformer,
    causal,
)
from regard.lab.claims import plain
from regard.lab.claims.sample import (
    DIFFERENT,
    SAME,
    D,
    H,
    L,
    alive,
    apart,
    blocks,
    influence,
    normal,
    parameters,
)
from regard.lab.experiment import Experiment, Finding, Table, conditional, corrected, holds
from regard.lab.numbers import figure, within
from regard.lab.place import Place
from regard.model.baseline import Convolution, Dense, Recurrent
from regard.model.block import Block, FeedForward, PostNorm
from regard.model.stack import Stack

ORDER = torch.tensor([3, 0, 6, 2, 5, 1, 4])
"""A shuffling of L rows."""
CRICKET = ("CSK plays better , not MI", "MI plays better , not CSK")


def _encoder(seed: int) -> Stack:
    """Two blocks without positions."""
    return alive(
        Stack(
            Block(MultiHeadAttention(D, H), FeedForward(D, 17), partial(PostNorm, D))
            for _ in range(2)
        ),
        seed,
    )


def _equivariance() -> Finding:
    model, x = _encoder(0), normal(1, 1, L, D)
    y, shuffled = model(x), model(x[:, ORDER])
    layer, query, source = alive(MultiHeadAttention(D, H), 2), normal(3, 1, D), normal(4, L, D)
    one, again = layer(query, source), layer(query, source[ORDER])
    moved, changed = float((shuffled - y[:, ORDER]).norm()), float((shuffled - y).norm())
    single = float((one - again).norm())
    by_hand = plain.apart(one, plain.multihead(layer, plain.array(query), plain.array(source)))
    return Finding(
        corrected(
            taught=changed < SAME,
            correct=moved < SAME and single < SAME and by_hand < SAME and changed > DIFFERENT,
        ),
        {
            "‖f(PX) − P f(X)‖, from the output permuted": moved,
            "‖f(PX) − f(X)‖, from the same output": changed,
            "‖f(q, PK, PV) − f(q, K, V)‖, one query": single,
        },
        conclusion=f"Permuted rows give the same outputs, permuted, {within(moved)} in the "
        f"Euclidean norm, and not the same output: it differs by {figure(changed, 2)}, and its own "
        f"norm is {figure(float(y.norm()), 2)}. That is equivariance. Invariant is the output for "
        f"one query under a permutation of keys and values, {within(single)}.",
    )


def _sharing() -> Finding:
    x = normal(1, 1, L, D)
    layers: dict[str, nn.Module] = {
        "attention": MultiHeadAttention(D, H),
        "convolution of 3": Convolution(D, 3),
        "GRU": Recurrent(D, "gru"),
        "dense over all rows, not shared": Dense(D, L),
    }
    moved, size = {}, {}
    for name, layer in layers.items():
        alive(layer, 2)
        moved[name] = float((layer(x[:, ORDER]) - layer(x)[:, ORDER]).norm())
        size[name] = float(layer(x).norm())
    shared = list(moved.values())[:3]
    return Finding(
        corrected(
            taught=max(shared) < SAME,
            correct=moved["attention"] < SAME
            and min(*shared[1:], moved[list(moved)[3]]) > DIFFERENT,
        ),
        {f"‖f(PX) − P f(X)‖, {name}": value for name, value in moved.items()},
        (
            Table(
                "Permuted rows, Euclidean norm",
                ("layer", "‖f(PX) − P f(X)‖", "‖f(X)‖"),
                tuple((name, moved[name], size[name]) for name in moved),
            ),
        ),
        conclusion="A convolution and a GRU share their weights across all tokens, too, and do "
        f"not commute with a permutation: they differ by {figure(shared[1], 2)} and "
        f"{figure(shared[2], 2)}, attention by {figure(shared[0])}. Sharing is needed, as the "
        "dense layer shows, but what makes attention equivariant is that it sums over all tokens "
        "and knows no distance.",
    )


def _equivariance_causal() -> Finding:
    model, x = _encoder(0), normal(1, 1, L, D)
    free, masked = (
        float((model(x[:, ORDER], mask=mask) - model(x, mask=mask)[:, ORDER]).norm())
        for mask in (None, causal())
    )
    return Finding(
        holds(free < SAME and masked > DIFFERENT),
        {
            "‖f(PX) − P f(X)‖, without a mask": free,
            "‖f(PX) − P f(X)‖, under a causal mask": masked,
        },
        conclusion=f"Without a mask the permuted input gives the permuted output {within(free)}; "
        f"under a causal mask, which depends on the order, it differs by {figure(masked, 2)} in "
        "the Euclidean norm.",
    )


def _texts(*sentences: str) -> list[Tensor]:
    words: dict[str, int] = {}
    return [
        torch.tensor([[words.setdefault(word, len(words)) for word in sentence.split()]])
        for sentence in sentences
    ]


def _two_sentences() -> Finding:
    one, other = _texts(*CRICKET)
    plan = TransformerConfig(6, width=D, heads=H, feed_forward=17, encoder_layers=2)
    gaps: dict[str, float] = {}
    for position in ("none", "sinusoidal", "learned", "rotary", "linear-bias"):
        model = alive(Transformer(replace(plan, position=position, decoder_layers=0)), 0)
        gaps[position] = apart(model.encode(one).mean(1), model.encode(other).mean(1))
    blind = gaps["none"]
    return Finding(
        holds(
            blind < SAME and min(seen for name, seen in gaps.items() if name != "none") > DIFFERENT
        ),
        {f"distance between the two, positions: {name}": value for name, value in gaps.items()},
        conclusion=f"Without positions the two encodings differ by {figure(blind)}: one bag of "
        "words. With positions, whichever of the four kinds, they differ by "
        f"{figure(min(seen for name, seen in gaps.items() if name != 'none'), 2)} at least.",
    )


def _blind_to_order() -> Finding:
    x, encoder = normal(1, 1, L, D), _encoder(0)
    draw = torch.Generator().manual_seed(32)
    orders = [torch.randperm(L, generator=draw) for _ in range(20)]
    # Each token's own output, wherever it stands.
    own = max(apart(encoder(x[:, order]), encoder(x)[:, order]) for order in orders)
    together = max(apart(encoder(x[:, order]).mean(1), encoder(x).mean(1)) for order in orders)
    return Finding(
        holds(max(own, together) < SAME),
        {
            "orders tried": len(orders),
            "change of a token's own output, at most": own,
            "change of the mean over the tokens, at most": together,
        },
        conclusion=f"In {len(orders)} random orders of seven tokens, a token's own output changes "
        f"by {figure(own)} at most and the mean over all of them by {figure(together)}: where "
        "every sum is over all tokens, nothing depends on where a token stands. A mask, which "
        "leaves some out, is another matter.",
    )


def _order_under_a_causal_mask() -> Finding:
    one, other = _texts("a b c d e f", "b d a e c f")
    last = {}
    for layers in (1, 2, 3):
        plan = LanguageConfig(6, width=D, heads=H, feed_forward=17, layers=layers, position="none")
        model = alive(LanguageModel(plan), 2)
        last[layers] = apart(model(one)[:, -1], model(other)[:, -1])
    return Finding(
        holds(last[1] < SAME and min(last[2], last[3]) > DIFFERENT),
        {f"the last token's logits, causal layers: {n}": value for n, value in last.items()},
        conclusion=f"With one causal layer the last row differs by {figure(last[1])} between the "
        f"two orders: it sums over all tokens. From the second layer on, by {figure(last[2], 2)} "
        f"and {figure(last[3], 2)}, it reads states that depend on what came before them.",
    )


def _tied_weights() -> Finding:
    n = 16
    x = F.pad(normal(0, 1, 5, D), (0, 0, 4, n - 9))  # zeros around it, so that nothing falls off
    layers = {"convolution": Convolution(D, 3), "dense": Dense(D, n)}
    rows, shifted = [], {}
    for name, layer in layers.items():
        alive(layer, 1)
        shifted[name] = apart(layer(x.roll(2, 1))[:, 3:-3], layer(x).roll(2, 1)[:, 3:-3])
        rows.append((name, parameters(layer), shifted[name]))
    convolution = layers["convolution"].get_submodule("convolution")
    assert isinstance(convolution, nn.Conv1d)
    assert convolution.bias is not None
    taps, bias = plain.array(convolution.weight), plain.array(convolution.bias)
    padded = plain.array(F.pad(x[0], (0, 0, 1, 1)))
    plainly = sum(padded[t : t + n] @ taps[:, :, t].T for t in range(3)) + bias
    by_hand = plain.apart(layers["convolution"](x)[0], plainly)
    return Finding(
        holds(shifted["convolution"] < SAME and by_hand < SAME and shifted["dense"] > DIFFERENT),
        {
            "change when a convolution's input is moved by 2": shifted["convolution"],
            "change when a dense layer's input is moved by 2": shifted["dense"],
            "convolution against plain arithmetic": by_hand,
        },
        (Table("Moving the input by 2", ("layer", "parameters", "change"), tuple(rows)),),
        conclusion="A pattern shifted by two positions comes out of the convolution shifted, "
        f"{within(shifted['convolution'])}: one weight for each distance. The dense layer, with "
        f"one for each pair of positions, gives something else, by {figure(shifted['dense'], 2)}.",
    )


def _image_model(position: str) -> VisionTransformer:
    plan = VisionConfig(
        5, (8, 12), 4, channels=1, width=D, heads=H, feed_forward=17, layers=2, position="none"
    )
    return alive(
        VisionTransformer(plan if position == "none" else replace(plan, position="learned")), 0
    )


def _vit_locality() -> Finding:
    n = 16
    x, (block, _) = normal(1, 1, n, D), blocks(_image_model("none").encoder)
    seen = {
        "convolution of 3": influence(alive(Convolution(D, 3), 2), x),
        "attention": influence(block.attention, x),
        "feed-forward": influence(block.feed_forward, x),
    }
    most = {name: int((by > 0).sum(-1).max()) for name, by in seen.items()}
    patches, image = _image_model("none").patches, normal(3, 1, 1, 8, 12)
    touched = image.clone()
    touched[..., 0, 0] += 1
    changed = (patches(touched) - patches(image)).abs().amax(-1) > SAME
    return Finding(
        holds(most == {"convolution of 3": 3, "attention": n, "feed-forward": 1}),
        {f"rows that one row depends on, {name}": count for name, count in most.items()}
        | {"patch vectors that one pixel changes": int(changed.sum())},
        conclusion=f"Of {n} rows, a row of the output depends on {most['convolution of 3']} in a "
        f"convolution of three taps, on {most['attention']} in attention and on "
        f"{most['feed-forward']} in the MLP. Worth adding: before the blocks the patch embedding "
        f"is local, too; one pixel changes {int(changed.sum())} patch vector.",
    )


def _vit_shift() -> Finding:
    image = normal(1, 1, 1, 8, 12)

    def change(model: VisionTransformer, pixels: int) -> float:
        """Between the moved image's features and the features moved along."""
        moved, still = (
            model.features(p)[:, 1:].unflatten(1, model.patches.grid)
            for p in (image.roll(pixels, -1), image)
        )
        return apart(moved, still.roll(pixels // 4, 2))

    convolution = alive(nn.Conv2d(1, D, 3, padding=1, padding_mode="circular"), 2)
    rows = tuple(
        (
            pixels,
            apart(convolution(image.roll(pixels, -1)), convolution(image).roll(pixels, -1)),
            change(_image_model("none"), pixels),
            change(_image_model("learned"), pixels),
        )
        for pixels in (1, 4, 8)
    )
    always = max(row[1] for row in rows) < SAME
    placed = min(row[3] for row in rows) > DIFFERENT
    unplaced = min(row[2] for row in rows[1:]) > DIFFERENT
    return Finding(
        conditional(inside=always and placed, outside=always and unplaced),
        {
            "convolution, moved by one pixel": rows[0][1],
            "ViT without positions, moved by one patch": rows[1][2],
            "ViT without positions, moved by one pixel": rows[0][2],
            "ViT with learned positions, moved by one patch": rows[1][3],
        },
        (
            Table(
                "Does the result move along? (change)",
                ("pixels", "convolution", "ViT, no positions", "ViT, learned positions"),
                rows,
            ),
        ),
        conclusion="As built, with learned positions, a ViT is not: its features change by "
        f"{figure(rows[1][3], 2)} beyond a shift by one patch. Its attention without positions is, "
        f"for whole patches ({figure(rows[1][2])}), though not for a pixel "
        f"({figure(rows[0][2], 2)}): it treats patches as a set. The convolution shifts along "
        f"{within(max(row[1] for row in rows))}.",
    )


EXPERIMENTS: tuple[Experiment, ...] = (
    Experiment(
        15,
        "equivariance",
        Place("slides", "order"),
        "As the weights W_Q, W_K and W_V are shared across the tokens, the Transformer is "
        "permutation invariant; order has to be injected.",
        "Two blocks without positions read seven random rows, in order and permuted. The output "
        "is compared with the old one, and with the old one permuted in the same way.",
        _equivariance,
        (r"f(PX) = P f(X)", r"\mathrm{attend}(q, PK, PV) = \mathrm{attend}(q, K, V)"),
    ),
    Experiment(
        15,
        "shared-weights-and-order",
        Place("slides", "order"),
        "The reason given for it is that W_Q, W_K and W_V are shared across the tokens.",
        "Three layers that share their weights across tokens, and a dense one that does not, read "
        "rows in order and permuted; outputs are compared with the old ones, permuted.",
        _sharing,
    ),
    Experiment(
        15,
        "equivariance-causal",
        Place("slides", "order"),
        "A causal mask, as in the decoder, breaks this symmetry: there a Transformer without "
        "positions does notice the order.",
        "The same two blocks, once without a mask and once under a causal one, read rows in order "
        "and permuted.",
        _equivariance_causal,
        kind="added",
    ),
    Experiment(
        16,
        "two-sentences",
        Place("slides", "order"),
        "For sequences this is a strong limitation: the same words with two team names exchanged "
        "say the opposite, so order information has to be injected.",
        "Two sentences that differ in the order of two names go through an encoder without "
        "positions and with each of four kinds; the means of the outputs are compared.",
        _two_sentences,
    ),
    Experiment(
        32,
        "blind-to-order",
        Place("sheet", "6-2(c)"),
        "Attention combines tokens by a weighted sum of all value tokens, with weights from "
        "pairwise dot products; so it has no access to their order or position.",
        "An encoder of two blocks, without positions or a mask, reads seven tokens in twenty "
        "random orders. Each token's output, and their mean, are compared.",
        _blind_to_order,
    ),
    Experiment(
        32,
        "order-under-a-mask",
        Place("sheet", "6-2(c)"),
        'What the sheet\'s "all value tokens" rules out: under a causal mask, order enters from '
        "the second layer on, without any positional encoding.",
        "Language models of one to three layers, without positions, read the same tokens in two "
        "orders that end alike.",
        _order_under_a_causal_mask,
        kind="added",
    ),
    Experiment(
        79,
        "tied-weights",
        Place("handout", "fixed positions"),
        "Cross-channel interactions aside, a convolution's weight w₋₁ always belongs to the token "
        "before, and a dense layer's w_ij to the positions i and j, the same in all sentences.",
        "A pattern is shifted by two positions, and each layer's output is compared with the old "
        "one, shifted. The convolution is also computed tap by tap.",
        _tied_weights,
        (r"y_n = \sum_\delta W_\delta x_{n+\delta} + b", r"y_n = \sum_m W_{nm} x_m + b_n"),
    ),
    Experiment(
        66,
        "vit-locality",
        Place("homework", "1.5(a)"),
        "A CNN has locality and a 2-D neighbourhood structure in each layer; in ViT only the MLP "
        "layers are local, and self-attention is global.",
        "The Jacobian says which rows each row of the output depends on, for attention, the "
        "feed-forward network and a convolution; one pixel is changed before the patch embedding.",
        _vit_locality,
    ),
    Experiment(
        66,
        "vit-shift",
        Place("homework", "1.5(a)"),
        "In a CNN each layer is translation equivariant; in ViT only the MLP layers are.",
        "An image is shifted by one pixel, one patch and two patches; a ViT's features, with "
        "learned positions and without any, and a convolution's are compared with the old ones, "
        "shifted (with a wrapped border for all).",
        _vit_shift,
    ),
)
