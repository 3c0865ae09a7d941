"""Checks for the exercise on the Vision Transformer; Regard's own result is the right one."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.lab.exercises.marking import Case, drawn, filled, mark
from regard.model.block import FeedForward
from regard.model.embedding import flat_patches
from regard.model.vit import VisionConfig, VisionTransformer

B, C, ROWS, COLUMNS, PATCH = 2, 3, 4, 6, 2
WIDTH, HEADS, HIDDEN, CLASSES, LAYERS = 12, 3, 20, 7, 2


def _images() -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(B, C, ROWS, COLUMNS, dtype=torch.float64, generator=generator)


def _model() -> VisionTransformer:
    config = VisionConfig(
        CLASSES,
        (ROWS, COLUMNS),
        PATCH,
        channels=C,
        width=WIDTH,
        heads=HEADS,
        feed_forward=HIDDEN,
        layers=LAYERS,
    )
    return drawn(VisionTransformer(config))


# Patches


def patches(answer: Callable[..., object]) -> None:
    """`patches(images, patch)`: (B, C, Y, X) to (B, N, C·P·P), row by row."""
    images, N = _images(), (ROWS // PATCH) * (COLUMNS // PATCH)
    right = flat_patches(images, PATCH)
    cut = images.unflatten(-1, (-1, PATCH)).unflatten(-3, (-1, PATCH))  # B C rows P columns P
    mistakes = [
        (
            images.reshape(B, N, -1),
            "the image is reshaped as it lies in memory, so that a patch is a piece of a row: cut "
            "both axes in two, (B, C, Y/P, P, X/P, P), and bring the two P to the end",
        ),
        (
            cut.permute(0, 4, 2, 1, 3, 5).reshape(B, N, -1),
            "the patches come column by column; they come row by row, as one reads",
        ),
        (
            cut.permute(0, 2, 4, 3, 5, 1).reshape(B, N, -1),
            "the channel comes last within a patch; it comes first: channel, row, column",
        ),
        (
            cut.permute(0, 2, 4, 1, 5, 3).reshape(B, N, -1),
            "each patch is transposed: rows and columns have changed places within it",
        ),
        (
            cut.permute(0, 1, 2, 4, 3, 5).reshape(B, N, -1),
            "the channel stands before the patches, so that a patch has one colour only: bring it "
            "behind rows and columns of patches",
        ),
        (right.mT, "(B, C·P·P, N), as unfold gives it: transpose the last two axes"),
        (right.view(B, ROWS // PATCH, COLUMNS // PATCH, -1), "rows and columns are still apart"),
    ]
    case = Case("row by row", lambda: answer(images, PATCH), right, mistakes)
    mark("patches", [case])


# Tokens


def tokens(answer: Callable[..., nn.Module]) -> None:
    """`Tokens(patches, numbers, width)`: flat patches to tokens, with a class token in front."""
    model, images = _model(), _images()
    flat = flat_patches(images, PATCH)
    weights = _token_weights(model)
    table, projection = weights["position"], model.patches.projection
    N = flat.shape[1]
    theirs = filled("Tokens", lambda: answer(N, flat.shape[2], WIDTH), weights)
    if theirs is None:
        return
    with torch.no_grad():
        right = model.embed(images)
        bare, front = projection(flat), weights["class_token"].expand(B, 1, -1)
    joined = torch.cat((front, bare), 1)
    mistakes = [
        (torch.cat((bare, front), 1) + table, "the class token is at the end; it goes in front"),
        (
            torch.cat((bare + table[1:], front + table[:1]), 1),
            "the class token is at the end; it goes in front",
        ),
        (joined, "the positions are missing: add self.position"),
        (bare + table[1:], "the class token is missing: put it in front of the patches"),
        (bare + table[:-1], "the class token is missing: put it in front of the patches"),
        (bare, "class token and positions are missing"),
        (
            torch.cat((front, bare + table[1:]), 1),
            "the class token has no position: add them after it is in front",
        ),
        (
            torch.cat((front, bare + table[:-1]), 1),
            "the class token has no position: add them after it is in front",
        ),
        (joined * table, "the positions are multiplied; add them"),
        (joined + 2 * table, "the positions are added twice"),
    ]
    mark("Tokens", [Case("class token and positions", lambda: theirs(flat), right, mistakes)])


def _token_weights(model: VisionTransformer) -> dict[str, Tensor]:
    """By the exercise's names: one table of positions for all tokens."""
    ours = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    return {
        "projection.weight": ours["patches.projection.weight"],
        "projection.bias": ours["patches.projection.bias"],
        "class_token": ours["class_token"],
        "position": torch.cat((ours["class_position"][None], ours["patches.position.table"])),
    }


# Block


@dataclass(frozen=True)
class _Parts:
    """A block's parts as functions, to be combined rightly or wrongly."""

    first: nn.Module
    attention: nn.Module
    second: nn.Module
    feed_forward: FeedForward

    def mlp(self, x: Tensor, activation: Callable[[Tensor], Tensor] = F.gelu) -> Tensor:
        hidden: Tensor = activation(self.feed_forward.expand(x))
        return self.feed_forward.reduce(hidden)


def block(answer: Callable[..., nn.Module]) -> None:
    """`Block(width, heads, hidden)`: a pre-norm block, (B, L, D) to (B, L, D)."""
    ours = _model().encoder.blocks[0]
    named = ours.get_submodule
    feed_forward = named("feed_forward")
    assert isinstance(feed_forward, FeedForward)
    parts = _Parts(
        named("add_attention.norm"),
        named("attention"),
        named("add_feed_forward.norm"),
        feed_forward,
    )
    theirs = filled("Block", lambda: answer(WIDTH, HEADS, HIDDEN), _block_weights(ours))
    if theirs is None:
        return
    x = torch.randn(B, 5, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        mistakes, right = _wrong_blocks(parts, x), ours(x)
    mark("Block", [Case("pre-norm, with skips", lambda: theirs(x), right, mistakes)])


def _block_weights(ours: nn.Module) -> dict[str, Tensor]:
    renamed = {"add_attention.norm": "norm1", "add_feed_forward.norm": "norm2", "feed_forward.": ""}
    weights = {}
    for name, tensor in ours.state_dict().items():
        for old, new in renamed.items():
            name = name.replace(old, new) if name.startswith(old) else name
        weights[name] = tensor
    return weights


def _wrong_blocks(p: _Parts, x: Tensor) -> list[tuple[Tensor, str]]:
    def identity(x: Tensor) -> Tensor:
        return x

    y = x + p.attention(p.first(x))
    post = p.first(x + p.attention(x))
    bare = p.attention(p.first(x))
    normed = p.first(x) + p.attention(p.first(x))
    unnormed = x + p.attention(x)
    return [
        (
            p.second(post + p.mlp(post)),
            "this is post-norm, as in the first Transformer; ViT norms before each sublayer, and "
            "leaves the sum alone",
        ),
        (bare + p.mlp(p.second(bare)), "the skip around attention is missing: x + …"),
        (p.mlp(p.second(y)), "the skip around the feed-forward network is missing: x + …"),
        (p.mlp(p.second(bare)), "both skips are missing: x + …"),
        (unnormed + p.mlp(p.second(unnormed)), "norm1 is missing: attention reads norm1(x)"),
        (y + p.mlp(y), "norm2 is missing: the feed-forward network reads norm2(x)"),
        (unnormed + p.mlp(unnormed), "both norms are missing"),
        (y + p.mlp(p.first(y)), "norm1 serves twice; the feed-forward network has norm2"),
        (y + p.mlp(p.second(y), F.relu), "the activation function is ReLU; in ViT it is GELU"),
        (y + p.mlp(p.second(y), identity), "the activation function is missing: GELU"),
        (
            y + p.mlp(p.second(x)),
            "the feed-forward network reads the input of attention; it reads the sum after it",
        ),
        (normed + p.mlp(p.second(normed)), "the skip carries norm1(x); it carries x itself"),
        (
            p.second(y) + p.mlp(p.second(y)),
            "the second skip carries norm2(x); it carries x itself",
        ),
        (y, "the feed-forward network is missing"),
    ]


# All of it


def vit(answer: Callable[..., nn.Module]) -> None:
    """`ViT(image, patch, channels, classes, width, heads, hidden, layers)`: images to logits."""
    model, images = _model(), _images()
    norm, head = model.encoder.get_submodule("norm"), model.head
    weights = {f"tokens.{name}": tensor for name, tensor in _token_weights(model).items()}
    for n, one in enumerate(model.encoder.blocks):
        weights |= {f"blocks.{n}.{name}": tensor for name, tensor in _block_weights(one).items()}
    weights |= {f"norm.{name}": tensor for name, tensor in norm.state_dict().items()}
    weights |= {f"head.{name}": tensor for name, tensor in head.output.state_dict().items()}
    theirs = filled(
        "ViT",
        lambda: answer((ROWS, COLUMNS), PATCH, C, CLASSES, WIDTH, HEADS, HIDDEN, LAYERS),
        weights,
    )
    if theirs is None:
        return
    with torch.no_grad():
        right, last = model(images), model.features(images)
        raw = model.embed(images)
        for one in model.encoder.blocks[:-1]:
            raw = one(raw)
        early, raw = raw, model.encoder.blocks[-1](raw)
        mistakes = [
            (head(last[:, -1]), "the last patch is read; the class token is the first, x[:, 0]"),
            (head(last.mean(1)), "the mean of all tokens is read; read the class token, x[:, 0]"),
            (head(last[:, 1:].mean(1)), "the mean of all patches is read; read the class token"),
            (head(raw[:, 0]), "the last LayerNorm, self.norm, is missing before the head"),
            (right.softmax(-1), "a softmax is in the model; the loss has it: give the logits"),
            (right.log_softmax(-1), "a log-softmax is in the model; the loss has it"),
            (head.output(last), "every token has logits; read the class token alone, x[:, 0]"),
            (last[:, 0], "the head is missing"),
            (head(norm(early)[:, 0]), "the last block is left out"),
            (head(norm(model.embed(images))[:, 0]), "the blocks are left out"),
        ]
    mark("ViT", [Case("images to logits", lambda: theirs(images), right, mistakes)])
