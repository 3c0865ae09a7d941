"""The Vision Transformer: from pixels to patches, and to the class token's last state."""

from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from regard import MultiHeadAttention, TransformerConfig, VisionConfig, VisionTransformer
from regard.lab.claims import plain
from regard.lab.claims.sample import (
    DIFFERENT,
    HIDDEN,
    PICTURE,
    SAME,
    D,
    alive,
    apart,
    base,
    blocks,
    normal,
    parameters,
    unbuilt,
)
from regard.lab.experiment import Experiment, Finding, Table, corrected, holds
from regard.lab.numbers import figure, within
from regard.lab.place import Place
from regard.model.block import FeedForward, PostNorm, PreNorm
from regard.model.embedding import Patches, flat_patches

VISION = {"base": VisionConfig.base, "large": VisionConfig.large, "huge": VisionConfig.huge}
TEXT = {"base": TransformerConfig.base, "big": TransformerConfig.big}


def _patch_convolution() -> Finding:
    layer, images = alive(Patches(32, 4, 3, D), 0), normal(1, 2, 3, 32, 32)
    kernel = layer.projection.weight.view(D, 3, 4, 4)
    convolved = F.conv2d(images, kernel, layer.projection.bias, stride=4).flatten(2).mT
    difference = apart(layer(images), convolved)
    return Finding(
        corrected(taught=difference > SAME, correct=difference < SAME),
        {
            "distance from a convolution of kernel and stride 4": difference,
            "largest number in the result": float(convolved.abs().max()),
        },
        conclusion="The linear projection of flattened patches is a convolution whose kernel size "
        f"and stride are the patch size: they differ by {figure(difference)}. So there is one, the "
        'first layer, and implementations use nn.Conv2d for it. "No traditional convolutional '
        'layers", with overlapping neighbourhoods, is fair.',
    )


def _flattened_patches() -> Finding:
    images, side = normal(0, 2, 3, 8, 12), 4
    have = flat_patches(images, side)
    numbers = plain.array(images)
    by_hand = [
        [
            numbers[b, :, y : y + side, x : x + side].ravel()
            for y in range(0, 8, side)
            for x in range(0, 12, side)
        ]
        for b in range(2)
    ]
    error = plain.apart(have, np.array(by_hand))
    published = flat_patches(torch.empty(1, 3, 224, 224, device="meta"), 16).shape
    return Finding(
        holds(error == 0 and tuple(published[1:]) == (196, 768)),
        {
            "distance from patches cut out one by one": error,
            "patches of an image of 224 pixels, patch 16": published[1],
            "numbers in each": published[2],
        },
        conclusion=f"An image of 224 pixels becomes {published[1]} patches of {published[2]} "
        f"numbers, HW/P² rows of P²C; cut out one by one they are the same, {within(error)}.",
    )


def _vit_by_hand() -> Finding:
    model, image = alive(VisionTransformer(PICTURE), 0), normal(1, 1, 3, 8, 12)
    numbers, side = plain.array(image[0]), PICTURE.patch
    patches = np.array(
        [
            numbers[:, y : y + side, x : x + side].ravel()
            for y in range(0, 8, side)
            for x in range(0, 12, side)
        ]
    )
    x = plain.linear(model.patches.projection, patches)
    x = x + plain.array(model.patches.get_parameter("position.table"))
    assert model.class_token is not None
    assert model.class_position is not None
    first = plain.array(model.class_token + model.class_position)
    x = np.concatenate((first[None], x))
    for block in blocks(model.encoder):
        attention, dense = block.attention, block.feed_forward
        assert isinstance(attention, MultiHeadAttention)
        assert isinstance(dense, FeedForward)
        x = x + plain.multihead(attention, plain.layer_norm(_norm(block.add_attention), x))
        inner = plain.linear(dense.expand, plain.layer_norm(_norm(block.add_feed_forward), x))
        x = x + plain.linear(dense.reduce, plain.gelu(inner))
    assert isinstance(model.encoder.norm, nn.LayerNorm)
    logits = plain.linear(model.head.output, plain.layer_norm(model.encoder.norm, x)[:1])
    error = plain.apart(model(image), logits)
    return Finding(
        holds(error < SAME),
        {
            "distance of the logits from plain arithmetic": error,
            "largest logit": float(np.abs(logits).max()),
            "parameters": parameters(model),
        },
        conclusion=f"The module and numpy give the same logits, {within(error)}, for a ViT of "
        f"{parameters(model):,} parameters.",
    )


def _class_token() -> Finding:
    model, image = alive(VisionTransformer(PICTURE), 0), normal(1, 1, 3, 8, 12)
    x = model.embed(image)
    for block in blocks(model.encoder):
        x = block(x)
    norm = model.encoder.norm
    assert isinstance(norm, nn.LayerNorm)
    last = plain.layer_norm(norm, plain.array(x[:, 0]))
    error = plain.apart(model.represent(image), last)
    raw = apart(model.represent(image), x[:, 0])
    before = apart(model.embed(image)[:, 0], model.embed(image + 1)[:, 0])
    image.requires_grad_()
    (gradient,) = torch.autograd.grad(model.represent(image).sum(), image)
    depends = float((gradient != 0).double().mean())
    return Finding(
        holds(error < SAME and before == 0 and depends == 1 and raw > DIFFERENT),
        {
            "distance from the class token's last state after LayerNorm": error,
            "distance from the same before LayerNorm": raw,
            "share of the pixels that it depends on": depends,
            "change of the token itself with the image": before,
        },
        conclusion=f"The head reads the token's last state, {within(error)} after LayerNorm. It "
        f"depends on {depends:.0%} of the pixels, while the token that goes in changes by "
        f"{figure(before)} with the image.",
    )


def _head() -> Finding:
    before = alive(VisionTransformer(replace(PICTURE, head_width=HIDDEN)), 0)
    x = normal(1, 3, D)
    hidden = before.head.hidden
    assert hidden is not None
    inner = np.tanh(plain.linear(hidden, plain.array(x)))
    error = plain.apart(before.head(x), plain.linear(before.head.output, inner))
    after, image = before.replace_head(7), normal(3, 1, 3, 8, 12)
    alive(after.head, 2)
    straight = plain.apart(after.head(x), plain.linear(after.head.output, plain.array(x)))
    kept = apart(before.represent(image), after.represent(image))
    return Finding(
        holds(error < SAME and straight < SAME and after.head.hidden is None and kept == 0),
        {
            "pre-training: distance from W₂ tanh(W₁ x + b₁) + b₂": error,
            "fine-tuning: distance from W x + b": straight,
            "layers at pre-training": len(list(before.head.children())),
            "layers at fine-tuning": len(list(after.head.children())),
            "change of what the head reads": kept,
        },
        conclusion=f"At pre-training the head is W₂ tanh(W₁ x + b₁) + b₂, {within(error)}, at "
        f"fine-tuning W x + b, {within(straight)}; what it reads changes by {figure(kept)}.",
    )


def _vit_structure() -> Finding:
    text, vit = base(), unbuilt(lambda: VisionTransformer.base(1000))

    def all_of(model: nn.Module, kind: type[nn.Module], instead: type[nn.Module]) -> bool:
        kinds = {type(m) for m in model.modules() if isinstance(m, kind | instead)}
        return kinds == {kind}

    facts = {
        "ViT has an encoder alone": all(block.cross is None for block in blocks(vit.encoder)),
        "the Transformer has cross-attention": all(
            block.cross is not None for block in blocks(text.decoder)
        ),
        "ViT is pre-norm": all_of(vit, PreNorm, PostNorm),
        "the Transformer is post-norm": all_of(text, PostNorm, PreNorm),
        "ViT has GELU": all_of(vit, nn.GELU, nn.ReLU),
        "the Transformer has ReLU": all_of(text, nn.ReLU, nn.GELU),
        "ViT has a class token": vit.class_token is not None,
    }
    return Finding(
        holds(all(facts.values())),
        facts,
        conclusion=f"Of {len(facts)} differences looked for, {sum(facts.values())} are there: ViT "
        "has the encoder alone, norms before its sublayers, GELU instead of ReLU, and a class "
        "token.",
    )


def _vit_feed_forward() -> Finding:
    vision = [make(1000).feed_forward for make in VISION.values()]
    text = [make(37_000).feed_forward for make in TEXT.values()]
    rows = [(f"ViT {n}", w) for n, w in zip(VISION, vision)]
    rows += [(f"Transformer {n}", w) for n, w in zip(TEXT, text)]
    return Finding(
        corrected(
            taught=max(vision) < min(text),
            correct=all(v >= t for v, t in zip(vision, text)) and max(vision) > max(text),
        ),
        {"ViT base, large, huge": vision, "Transformer base, big": text},
        (Table("Hidden width of the feed-forward network", ("model", "width"), tuple(rows)),),
        conclusion=f"The hidden widths of ViT's base, large and huge are {figure(vision)}, those "
        f"of the Transformer's base and big {figure(text)}: size by size as wide or wider.",
    )


def _frozen_encoder() -> Finding:
    trained = alive(VisionTransformer(PICTURE), 0)
    other = alive(trained.replace_head(3).head, 1)
    model = trained.replace_head(3).freeze_backbone()
    model.head.load_state_dict(other.state_dict())
    images = normal(2, 2, 3, 8, 12)
    same = apart(model.represent(images), trained.represent(images))
    model(images).square().sum().backward()
    moved = [name for name, p in model.named_parameters() if p.grad is not None]
    return Finding(
        holds(same == 0 and all(name.startswith("head.") for name in moved) and bool(moved)),
        {
            "change of the features under a new head": same,
            "what training would move": moved,
            "parameters that stay": sum(
                p.numel() for p in model.parameters() if not p.requires_grad
            ),
        },
        conclusion=f"Under a new head the encoder's features change by {figure(same)}, and in "
        f"training only {', '.join(moved)} receive gradients: "
        f"{sum(p.numel() for p in model.parameters() if not p.requires_grad):,} parameters stay as "
        "they are.",
    )


def _norm(residual: nn.Module) -> nn.LayerNorm:
    assert isinstance(residual, PreNorm)
    return residual.norm


EXPERIMENTS: tuple[Experiment, ...] = (
    Experiment(
        67,
        "patch-convolution",
        Place("homework", "1.5(a)"),
        "To the question whether a convolution can be spotted in ViT: no, it has a linear "
        "projection of flattened patches, and no traditional convolutional layers.",
        "The patch embedding is compared with torch's convolution of the same weights, with the "
        "patch size as kernel size and stride.",
        _patch_convolution,
    ),
    Experiment(
        68,
        "flattened-patches",
        Place("homework", "1.5(b)"),
        "ViT's input is a 2-D image, which is converted to flattened patches before it is fed to "
        "the Transformer.",
        "Patches are cut out of two images one by one in numpy and compared.",
        _flattened_patches,
        (r"x \in \mathbb{R}^{HW/P^2 \times P^2 C}",),
    ),
    Experiment(
        76,
        "vit-by-hand",
        Place("homework", "2"),
        "Implement a Vision Transformer.",
        "A small one is computed once more in numpy, from pixels to logits: patches, positions, "
        "class token, two pre-norm blocks, LayerNorm, head.",
        _vit_by_hand,
        kind="asked",
    ),
    Experiment(
        74,
        "class-token",
        Place("homework", "1.5(d)"),
        "A learnable embedding is prepended to the patches, as BERT's class token; its state at "
        "the encoder's output is the image's representation y.",
        "The blocks are run one by one, the token's last state is normalised in numpy, and the "
        "result is compared with what the head reads. Its gradient shows which pixels it depends "
        "on.",
        _class_token,
    ),
    Experiment(
        75,
        "vit-head",
        Place("homework", "1.5(d)"),
        "The classification head is an MLP with one hidden layer, with tanh, at pre-training, and "
        "a single linear layer at fine-tuning.",
        "Both heads are compared with their formulas; the second is put in place of the first.",
        _head,
        (r"W_2 \tanh(W_1 x + b_1) + b_2", r"W x + b"),
    ),
    Experiment(
        72,
        "vit-structure",
        Place("homework", "1.5(b)"),
        "Differences between ViT and the Transformer that the answer leaves out: encoder only, "
        "pre-norm, GELU, a class token.",
        "The modules of ViT-B/16 and of the Transformer's base model are compared.",
        _vit_structure,
        kind="added",
    ),
    Experiment(
        72,
        "vit-feed-forward",
        Place("homework", "1.5(b)"),
        "ViT uses smaller feed-forward networks than the original Transformer, because images "
        "already contain rich features.",
        "The hidden widths of the published sizes are read from their configs.",
        _vit_feed_forward,
    ),
    Experiment(
        94,
        "frozen-encoder",
        Place("handout", "Transformers"),
        "As with VGG, the idea is that the trained encoder can be reused for other tasks.",
        "A model gets a head for other classes and is frozen. Its features are compared with the "
        "old ones, and a backward pass shows which parameters receive gradients.",
        _frozen_encoder,
    ),
)
