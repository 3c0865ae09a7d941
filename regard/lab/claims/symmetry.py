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
from regard.lab.place import Place
from regard.model.baseline import Convolution, Dense
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
    single = apart(one, again)
    by_hand = plain.apart(one, plain.multihead(layer, plain.array(query), plain.array(source)))
    return Finding(
        corrected(
            taught=changed < SAME,
            correct=moved < SAME and single < SAME and by_hand < SAME and changed > DIFFERENT,
        ),
        {
            "distance from the shuffled output, ‖f(PX) − P f(X)‖": moved,
            "distance from the same output, ‖f(PX) − f(X)‖": changed,
            "one query's output after shuffling what it reads": single,
        },
    )


def _equivariance_causal() -> Finding:
    model, x = _encoder(0), normal(1, 1, L, D)
    moved = {
        name: float((model(x[:, ORDER], mask=mask) - model(x, mask=mask)[:, ORDER]).norm())
        for name, mask in (("without a mask", None), ("under a causal mask", causal()))
    }
    free, masked = moved.values()
    return Finding(
        conditional(inside=free < SAME, outside=masked < SAME),
        {f"distance from the shuffled output, {name}": value for name, value in moved.items()},
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
    )


def _order_under_a_causal_mask() -> Finding:
    one, other = _texts("a b c d e f", "b d a e c f")
    encoder = _encoder(0)
    x = normal(1, 6, D)
    read = apart(encoder(x[one]).mean(1), encoder(x[other]).mean(1))
    last = {}
    for layers in (1, 2, 3):
        plan = LanguageConfig(6, width=D, heads=H, feed_forward=17, layers=layers, position="none")
        model = alive(LanguageModel(plan), 2)
        last[layers] = apart(model(one)[:, -1], model(other)[:, -1])
    return Finding(
        conditional(inside=read < SAME and last[1] < SAME, outside=max(last.values()) < SAME),
        {
            "an encoder's mean over two orders of one text": read,
            **{f"the last token's logits, causal layers: {n}": value for n, value in last.items()},
        },
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
        conditional(
            inside=most == {"convolution of 3": 3, "attention": n, "feed-forward": 1},
            outside=int(changed.sum()) > 1,
        ),
        {f"rows that one row depends on, {name}": count for name, count in most.items()}
        | {"patch vectors that one pixel changes": int(changed.sum())},
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
    )


EXPERIMENTS: tuple[Experiment, ...] = (
    Experiment(
        15,
        "equivariance",
        Place("slides", "order"),
        "The Transformer is permutation invariant.",
        "Two blocks without positions read seven random rows, in order and permuted. The output "
        "is compared with the old one, and with the old one permuted in the same way.",
        _equivariance,
        (r"f(PX) = P f(X)", r"\mathrm{attend}(q, PK, PV) = \mathrm{attend}(q, K, V)"),
        correct="It is equivariant: permuted rows give the same outputs, permuted. Invariant is the "
        "output for one query under a permutation of keys and values.",
    ),
    Experiment(
        15,
        "equivariance-causal",
        Place("slides", "order"),
        "A Transformer without positions does not notice a shuffling of its rows.",
        "The same two blocks, once without a mask and once under a causal one, read rows in order "
        "and shuffled.",
        _equivariance_causal,
        kind="added",
        correct="That is so as long as every row may attend to every other. A causal mask depends on the "
        "order, and breaks the symmetry.",
    ),
    Experiment(
        16,
        "two-sentences",
        Place("slides", "order"),
        "Order matters: the same words in another order say the opposite.",
        "Two sentences that differ in the order of two names go through an encoder without "
        "positions and with each of four kinds; the means of the outputs are compared.",
        _two_sentences,
        correct="Without positions the two sentences are one bag of words; any kind of position tells them "
        "apart.",
    ),
    Experiment(
        32,
        "order-under-a-mask",
        Place("sheet", "6-2(c)"),
        "Without positional encodings, attention has no access to the order of its inputs.",
        "An encoder and language models of one to three layers, all without positions, read the "
        "same tokens in two orders that end alike.",
        _order_under_a_causal_mask,
        correct="An unmasked encoder is blind to order. Under a causal mask one layer's last row still "
        "is, but from the second layer on it reads states that depend on what came before them.",
    ),
    Experiment(
        79,
        "tied-weights",
        Place("handout", "fixed positions"),
        "A convolution ties its weights to distances, a dense layer to absolute positions.",
        "A pattern is shifted by two positions, and each layer's output is compared with the old "
        "one, shifted. The convolution is also computed tap by tap.",
        _tied_weights,
        (r"y_n = \sum_\delta W_\delta x_{n+\delta} + b", r"y_n = \sum_m W_{nm} x_m + b_n"),
        correct="The convolution's output shifts along exactly. The dense layer has other weights at "
        "other positions, and gives something else.",
    ),
    Experiment(
        66,
        "vit-locality",
        Place("homework", "1.5(a)"),
        "In a Vision Transformer only the MLP is local; in a CNN every layer is.",
        "The Jacobian says which rows each row of the output depends on, for attention, the "
        "feed-forward network and a convolution; one pixel is changed before the patch embedding.",
        _vit_locality,
        correct="Within the blocks it is so. Before them the patch embedding is local as well: a pixel "
        "reaches one patch alone.",
    ),
    Experiment(
        66,
        "vit-shift",
        Place("homework", "1.5(a)"),
        "A CNN is translation equivariant, a Vision Transformer is not.",
        "An image is shifted by one pixel, one patch and two patches; the features are compared "
        "with the old ones, shifted (with a wrapped border for all).",
        _vit_shift,
        correct="A ViT with learned positions is not. Without them its attention treats patches as a set "
        "and shifts along with whole patches, though not with single pixels.",
    ),
)
