"""Homework 1.5 and 2: the Vision Transformer."""

from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard import (
    SinusoidalPositions,
    Transformer,
    TransformerConfig,
    VisionConfig,
    VisionTransformer,
)
from regard.lab.answers.answer import Answer, Demonstration, Mistake, Point, Step
from regard.lab.answers.program import slip, solved
from regard.lab.claims.sample import PICTURE, SAME, D, alive, apart, normal, parameters, unbuilt
from regard.lab.experiment import Measured, Table
from regard.lab.place import Place
from regard.model.embedding import Patches

IMAGES = normal(0, 2, 3, 8, 12)
"""Two images of six patches, which the small ViT reads."""
VISION = {
    "ViT-B/16": VisionConfig.base(1000),
    "ViT-L/16": VisionConfig.large(1000),
    "ViT-H/14": VisionConfig.huge(1000),
}
TEXT = {
    "Transformer base": TransformerConfig.base(37_000),
    "Transformer big": TransformerConfig.big(37_000),
}


def _vit() -> VisionTransformer:
    return alive(VisionTransformer(PICTURE), 1)


# (a) Patches


def _patch_convolution() -> Demonstration:
    side = 4
    layer, images = alive(Patches(32, side, 3, D), 0), normal(1, 2, 3, 32, 32)
    kernel = layer.projection.weight.view(D, 3, side, side)
    convolved = F.conv2d(images, kernel, layer.projection.bias, stride=side).flatten(2).mT
    return Demonstration(
        apart(layer(images), convolved) < SAME,
        {
            "patches of a 32×32 image, 4×4 pixels each": layer(images).shape[1],
            "largest difference between the patches' projection and a convolution of kernel and "
            "stride 4": apart(layer(images), convolved),
        },
    )


def _no_convolution() -> Demonstration:
    """Is there a convolution that does the same as the patches' projection?"""
    found = _patch_convolution()
    return Demonstration(not found.stands, found.measured)


def _everything_local() -> Demonstration:
    """How many of the patches one patch of a layer's output depends on."""
    block = _vit().encoder.blocks[0]
    x = normal(1, 1, 6, D)
    changed = x.clone()
    changed[0, 5] += 1
    attention = (block(x) - block(changed)).abs().amax(-1)[0]
    mlp = block.get_submodule("feed_forward")
    alone = (mlp(x) - mlp(changed)).abs().amax(-1)[0]
    return Demonstration(
        int((attention > 0).sum()) <= 3,
        {
            "patches that a change of one patch reaches, in a block": int((attention > 0).sum()),
            "in its MLP": int((alone > 0).sum()),
            "patches": 6,
        },
    )


# (b) ViT beside the Transformer


def _row(
    name: str, model: nn.Module, config: TransformerConfig | VisionConfig
) -> tuple[Measured, ...]:
    """A model's size and what it is made of."""
    stacks = [part for part, _ in model.named_children() if part in ("encoder", "decoder")]
    return (
        name,
        round(parameters(model) / 1e6, 1),
        config.width,
        config.feed_forward,
        ", ".join(stacks),
        config.norm,
        config.activation,
        config.position,
    )


def _models() -> Demonstration:
    rows = [
        _row(name, unbuilt(partial(Transformer, config)), config) for name, config in TEXT.items()
    ]
    rows += [
        _row(name, unbuilt(partial(VisionTransformer, config)), config)
        for name, config in VISION.items()
    ]
    sizes = [row[2:4] for row in rows]
    return Demonstration(
        sizes == [(512, 2048), (1024, 4096), (768, 3072), (1024, 4096), (1280, 5120)]
        and all(row[4:] == ("encoder", "pre", "gelu", "learned") for row in rows[2:])
        and all(row[5:7] == ("post", "relu") for row in rows[:2]),
        tables=(
            Table(
                "As built here: with 37,000 tokens, and with 1,000 classes",
                (
                    "model",
                    "parameters, millions",
                    "width",
                    "feed-forward",
                    "stacks",
                    "norm",
                    "activation",
                    "positions",
                ),
                tuple(rows),
            ),
        ),
    )


def _smaller_networks() -> Demonstration:
    vision, text = (
        [config.feed_forward for config in models.values()] for models in (VISION, TEXT)
    )
    return Demonstration(
        max(vision) < min(text),
        {"hidden widths of ViT's B, L, H": vision, "of the Transformer's base and big": text},
    )


def _wider_for_images() -> Demonstration:
    vision, text = ([config.width for config in models.values()] for models in (VISION, TEXT))
    return Demonstration(
        min(vision) > max(text),
        {"widths of ViT's B, L, H": vision, "of the Transformer's base and big": text},
    )


# (c) Positions


def _shuffled(images: Tensor) -> Tensor:
    """The same patches in another order: the left and the right half change places."""
    return torch.cat((images[..., 8:], images[..., 4:8], images[..., :4]), -1)


def _learned_positions() -> Demonstration:
    moved = {}
    for position in ("none", "learned"):
        model = alive(VisionTransformer(replace(PICTURE, position=position)), 1)
        moved[position] = apart(model(IMAGES), model(_shuffled(IMAGES)))
    model = _vit()
    return Demonstration(
        moved["none"] < SAME and moved["learned"] > 0.01,
        {
            "what exchanging patches changes in the logits, without positions": moved["none"],
            "with learned positions": moved["learned"],
            "numbers that are trained for positions": sum(
                parameter.numel() for name, parameter in model.named_parameters() if "posit" in name
            ),
            "numbers that are trained for sinusoids": parameters(SinusoidalPositions(D)),
        },
    )


def _without_class_position() -> Demonstration:
    model = _vit()
    trained = {
        name: parameter.numel() // D
        for name, parameter in model.named_parameters()
        if "posit" in name
    }
    return Demonstration(
        sum(trained.values()) == 6,
        {"patches": 6, "trained positions": sum(trained.values()), **trained},
    )


# (d) The class token


def _class_token() -> Demonstration:
    model = _vit()
    states = model.features(IMAGES)
    logits = model.head(states[:, 0])
    tuned = alive(VisionTransformer(replace(PICTURE, head_width=7)), 2)
    hidden = tuned.head.hidden
    assert hidden is not None
    represented = tuned.features(IMAGES)[:, 0]
    written = torch.tanh(represented @ hidden.weight.T + hidden.bias) @ tuned.head.output.weight.T
    written = written + tuned.head.output.bias
    return Demonstration(
        apart(model(IMAGES), logits) < SAME and apart(tuned(IMAGES), written) < SAME,
        {
            "rows that leave the encoder: patches and class token": states.shape[1],
            "logits minus head(class token's state)": apart(model(IMAGES), logits),
            "pre-training: logits minus W₂ tanh(W₁ y + b₁) + b₂": apart(tuned(IMAGES), written),
            "fine-tuning: layers of the head": len(list(tuned.replace_head(3).head.children())),
        },
    )


def _mean_of_patches() -> Demonstration:
    model = _vit()
    mean = model.head(model.features(IMAGES)[:, 1:].mean(1))
    return Demonstration(
        apart(model(IMAGES), mean) < SAME,
        {"logits of the class token minus those of the patches' mean": apart(model(IMAGES), mean)},
    )


def _before_the_norm() -> Demonstration:
    model = _vit()
    x = model.embed(IMAGES)
    for block in model.encoder.blocks:
        x = block(x)
    raw = model.head(x[:, 0])
    return Demonstration(
        apart(model(IMAGES), raw) < SAME,
        {"logits minus those without the last LayerNorm": apart(model(IMAGES), raw)},
    )


ANSWERS: tuple[Answer, ...] = (
    Answer(
        Place("homework", "1.5(a)"),
        question="How does ViT take in an image, compared with a CNN, and is there a convolution "
        "in it?",
        answer="A CNN slides small filters over the pixels, layer by layer, so that every layer is "
        "local and translation equivariant. ViT cuts the image into patches, flattens each, and "
        "projects it by one matrix into a token; from then on it is a Transformer, whose "
        "attention is global, and only its MLPs work on each token alone. There are no "
        "convolutional layers in the usual sense, but the projection of patches is a convolution "
        "whose kernel and stride are the patch.",
        derivation=(
            Step(
                "A patch is projected as a vector of its pixels.",
                r"x_n = W \operatorname{vec}(p_n) + b",
            ),
            Step(
                "A convolution of stride $P$ and kernel $P$ reads the same pixels with the same "
                "weights.",
                r"x_n = \sum_{c, u, v} W_{c u v}\, I_{c,\, P y_n + u,\, P x_n + v} + b",
            ),
        ),
        run=_patch_convolution,
        mistakes=(
            Mistake(
                "No: there is no convolution in ViT.",
                "The patches' projection is one, to the last digit; many programs write it as "
                "`Conv2d`.",
                _no_convolution,
            ),
            Mistake(
                "ViT is local in every layer, as a CNN is.",
                "Its attention joins all patches in the first layer; only the MLP is local.",
                _everything_local,
            ),
        ),
        points=(
            Point(1, "patches as tokens; global attention against local filters"),
            Point(1, "the patch embedding is a convolution with kernel = stride = patch"),
        ),
    ),
    Answer(
        Place("homework", "1.5(b)"),
        question="How does ViT differ from the original Transformer?",
        answer="Its tokens are patches of an image, with learned positions and a class token in "
        "front; it is an encoder alone, with a classification head; it normalises before each "
        "sublayer and uses GELU. Its widths (768, 1024, 1280) and feed-forward networks (3072, "
        "4096, 5120) are at least as large as the Transformer's (512 and 1024; 2048 and 4096), "
        "and its sizes follow BERT's.",
        derivation=(
            Step(
                "Transformer: the norm follows the sum.",
                r"x \leftarrow \operatorname{LayerNorm}(x + \operatorname{Sublayer}(x))",
            ),
            Step(
                "ViT: the norm comes first, and the sum stays.",
                r"x \leftarrow x + \operatorname{Sublayer}(\operatorname{LayerNorm}(x))",
            ),
        ),
        run=_models,
        mistakes=(
            Mistake(
                "ViT has smaller feed-forward networks, since images need less processing.",
                "They are as large or larger.",
                _smaller_networks,
            ),
            Mistake(
                "ViT is wider, since there is more in an image than in a text.",
                "The Transformer's big model and ViT-L are equally wide, and no paper gives that "
                "reason.",
                _wider_for_images,
            ),
        ),
        points=(
            Point(1, "input: patches, learned positions, class token"),
            Point(1, "encoder only, pre-norm, GELU; sizes given correctly"),
        ),
    ),
    Answer(
        Place("homework", "1.5(c)"),
        question="What are ViT's position embeddings for, and what sets them apart from the "
        "Transformer's encodings?",
        answer="They tell each patch where in the image it is, since attention would not see it. "
        "They are a table of learned vectors, one for each patch and one for the class token, "
        "added to the projected patches; the Transformer adds fixed sinusoids, which have no "
        "parameters and go on beyond the lengths of training. A learned table has to be "
        "interpolated for images of another size.",
        derivation=(
            Step(
                "The tokens, with the class token's own position.",
                r"z_0 = [x_{\text{class}};\; W p_1;\; \dots;\; W p_N] + E_{\text{pos}}, \qquad "
                r"E_{\text{pos}} \in \mathbb{R}^{(N + 1) \times D}",
            ),
        ),
        run=_learned_positions,
        mistakes=(
            Mistake(
                "There are as many position embeddings as patches.",
                "There is one more: the class token has a position too.",
                _without_class_position,
            ),
        ),
        points=(
            Point(1, "they tell where a patch is, which attention does not see"),
            Point(1, "learned in ViT, fixed sinusoids in the Transformer"),
        ),
    ),
    Answer(
        Place("homework", "1.5(d)"),
        question="How does ViT arrive at its classification?",
        answer="A learned class token is put in front of the patches and goes through the encoder "
        "with them. Its last state, after the final LayerNorm, represents the image. The head "
        "reads that state alone: at pre-training it has one hidden layer with tanh, at "
        "fine-tuning it is a single linear layer. A softmax of its logits gives the "
        "probabilities.",
        derivation=(
            Step("The image's representation.", r"y = \operatorname{LayerNorm}(z_L^0)"),
            Step(
                "At pre-training and at fine-tuning.",
                r"W_2 \tanh(W_1 y + b_1) + b_2, \qquad W y + b",
            ),
        ),
        run=_class_token,
        mistakes=(
            Mistake(
                "The mean of all patches is classified.",
                "That is another model (it works as well, if it is trained so). Here the class "
                "token is read.",
                _mean_of_patches,
            ),
            Mistake(
                "The class token's state is read as it leaves the last block.",
                "A LayerNorm comes between: in pre-norm the sum has not been normalised.",
                _before_the_norm,
            ),
        ),
        points=(
            Point(1, "class token, whose last state after LayerNorm is the image"),
            Point(1, "the head: hidden layer with tanh, then one linear layer"),
        ),
    ),
    Answer(
        Place("homework", "2"),
        question="Fill in the notebook: a Vision Transformer.",
        answer="`regard lab exercise vit` writes such a notebook, with hints and checks; its "
        "solution has four parts: patches, tokens with class token and positions, a pre-norm "
        "block, and the whole model, which reads the class token. Each check compares with the "
        "library's own ViT, and with the results of common mistakes.",
        derivation=(
            Step(
                "The tokens.",
                r"x = [x_{\text{class}};\; W p_1 + b;\; \dots;\; W p_N + b] + E_{\text{pos}}",
            ),
            Step(
                "Each block.",
                r"x \leftarrow x + \operatorname{MHA}(\operatorname{LN}(x)), \qquad x \leftarrow x "
                r"+ \operatorname{MLP}(\operatorname{LN}(x))",
            ),
            Step("The logits.", r"W \operatorname{LN}(x)_0 + b"),
        ),
        run=partial(solved, "vit"),
        mistakes=(
            Mistake(
                "The class token is appended at the end.",
                "The head reads row 0, and the positions belong to other rows then.",
                partial(slip, "vit", "torch.cat((front, x), 1)", "torch.cat((x, front), 1)"),
            ),
            Mistake(
                "The skip around attention is left out.",
                "Then the block forgets its input.",
                partial(slip, "vit", "x = x + self.attention(", "x = self.attention("),
            ),
        ),
        points=(
            Point(10, "patches in the right order"),
            Point(10, "projection, class token and positions"),
            Point(15, "the block: two norms, two skips, GELU"),
            Point(15, "the whole model, trained; class token, last norm, head"),
        ),
    ),
)
