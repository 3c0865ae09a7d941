"""Whole models: what stands where in the Transformer, in ViT and in what came before them."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard import (
    AudioSource,
    ImageSource,
    LanguageConfig,
    LanguageModel,
    Mask,
    MultiHeadAttention,
    Transformer,
    TransformerConfig,
    VisionConfig,
    VisionTransformer,
    causal,
)
from regard.lab.claims import plain
from regard.lab.claims.sample import alive, apart, blocks, influence, normal, parameters, unbuilt
from regard.lab.experiment import Experiment, Finding, Table, conditional, corrected, holds
from regard.model.baseline import Convolution, Dense, Recurrent
from regard.model.block import Block, FeedForward, PostNorm, PreNorm
from regard.model.embedding import Patches, flat_patches
from regard.model.stack import Stack

D, H, HIDDEN, L, S = 12, 3, 17, 7, 11
"""Width, heads, hidden width, and the lengths of target and source."""
SAME, DIFFERENT = 1e-12, 1e-3
"""Below the first two results are one up to rounding, above the second they are two."""
PLAN = TransformerConfig(
    19, width=D, heads=H, feed_forward=HIDDEN, encoder_layers=2, decoder_layers=2, dropout=0.0
)
PICTURE = VisionConfig(5, (8, 12), 4, channels=3, width=D, heads=H, feed_forward=HIDDEN, layers=2)
TARGET, SOURCE = torch.arange(L)[None], torch.arange(S)[None] + 5
VISION = {"base": VisionConfig.base, "large": VisionConfig.large, "huge": VisionConfig.huge}
TEXT = {"base": TransformerConfig.base, "big": TransformerConfig.big}


def _base() -> Transformer:
    """The paper's base model, without its numbers."""
    return unbuilt(lambda: Transformer.base(37_000))


def _residual_path() -> Finding:
    x, memory = normal(0, 1, L, D), normal(1, 1, S, D)
    left = {}
    for norm in ("pre", "post"):
        model = alive(Transformer(replace(PLAN, norm=norm, final_norm=False)), 2)
        for module in model.modules():
            match module:
                case MultiHeadAttention():
                    module.output.weight.zero_()
                    module.output.bias.zero_()
                case FeedForward():
                    module.reduce.weight.zero_()
                    module.reduce.bias.zero_()
                case nn.LayerNorm():
                    module.reset_parameters()
        wanted = x if norm == "pre" else F.layer_norm(x, (D,))
        outs = model.encoder(x), model.decoder(x, memory, mask=causal())
        left[norm] = max(apart(out, wanted) for out in outs)
    base = _base()
    counts = [len(base.encoder.blocks), len(base.decoder.blocks)]
    return Finding(
        holds(left["pre"] == 0 and left["post"] < 1e-4),
        {
            "pre-norm stacks whose sublayers say nothing, change of the input": left["pre"],
            "post-norm ones, distance from the normalised input (LayerNorm's ε)": left["post"],
            "blocks of the paper's encoder and decoder": counts,
        },
    )


def _shared_memory() -> Finding:
    model = alive(Transformer(PLAN), 0)
    read: list[Tensor] = []
    made: list[tuple[Tensor, Tensor]] = []
    for block in blocks(model.decoder):
        cross = block.cross
        assert isinstance(cross, MultiHeadAttention)
        cross.register_forward_pre_hook(lambda _, given: read.append(given[1]))
        cross.core.register_forward_pre_hook(lambda _, given: made.append((given[1], given[2])))
    model(SOURCE, TARGET)
    memory = model.encode(SOURCE)
    same = max(apart(source, memory) for source in read)
    keys, values = (apart(one, other) for one, other in zip(*made))
    return Finding(
        corrected(
            taught=max(keys, values) < SAME,
            correct=same == 0 and min(keys, values) > DIFFERENT and len(read) == 2,
        ),
        {
            "what two decoder layers read, distance from the encoder's output": same,
            "distance between their keys": keys,
            "distance between their values": values,
        },
    )


def _queries_from_below() -> Finding:
    model = alive(Transformer(PLAN), 0)
    below: list[Tensor] = []
    asks: list[Tensor] = []
    for block in blocks(model.decoder):
        assert block.cross is not None
        block.add_attention.register_forward_hook(lambda _, given, out: below.append(out))
        block.cross.register_forward_pre_hook(lambda _, given: asks.append(given[0]))
    model(SOURCE, TARGET)
    off = max(apart(one, other) for one, other in zip(asks, below))
    from_memory = [ask.shape[1] == S for ask in asks]
    return Finding(
        holds(off == 0 and len(asks) == 2 and not any(from_memory)),
        {
            "distance of the queries' source from the layer below": off,
            "rows that ask": asks[0].shape[1],
            "rows of the encoder's output": S,
        },
    )


def _kinds(model: Transformer) -> list[str]:
    """Each attention as it is called: on one source or two, and what its mask hides."""
    seen: list[str] = []

    def note(name: str, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        x, source = given
        mask: Mask | None = named["mask"]
        rows = x.shape[1]
        allowed = None if mask is None else mask.tensor(rows, rows)[0, 0]
        before = torch.ones(rows, rows, dtype=torch.bool).tril()
        hidden = allowed is not None and torch.equal(allowed, before)
        kind = "cross" if source is not None else "masked self" if hidden else "self"
        seen.append(f"{name}: {kind}")

    for name, stack in (("encoder", model.encoder), ("decoder", model.decoder)):
        for module in stack.modules():
            if isinstance(module, MultiHeadAttention):
                module.register_forward_pre_hook(
                    lambda _, given, named, name=name: note(name, given, named), with_kwargs=True
                )
    model(SOURCE, TARGET)
    return seen


def _encoder_and_decoder() -> Finding:
    model = alive(Transformer(PLAN), 0)
    memory, x = normal(1, 1, S, D), normal(2, 1, L, D)
    encoder = influence(lambda x: model.encoder(x), x) > 0
    decoder = influence(lambda x: model.decoder(x, memory, mask=causal()), x) > 0
    across = influence(lambda m: model.decoder(x, m, mask=causal()), memory) > 0
    before = torch.ones(L, L, dtype=torch.bool).tril()
    return Finding(
        holds(bool(encoder.all()) and torch.equal(decoder, before) and bool(across.all())),
        {
            "pairs of rows that the encoder joins, of 49": int(encoder.sum()),
            "pairs of target rows that the decoder joins, of 49": int(decoder.sum()),
            "of these, pairs with a later row": int((decoder & ~before).sum()),
            "pairs of target and source rows that the decoder joins, of 77": int(across.sum()),
        },
    )


def _boxes() -> Finding:
    seen = _kinds(alive(Transformer(PLAN), 0))
    wanted = ["encoder: self"] * 2 + ["decoder: masked self", "decoder: cross"] * 2
    return Finding(holds(seen == wanted), {"attention in the order of its running": seen})


def _modalities() -> Finding:
    sources: dict[str, tuple[ImageSource | AudioSource, Tensor]] = {
        "image": (ImageSource(image=(8, 12), patch=4), normal(0, 1, 3, 8, 12)),
        "audio": (AudioSource(features=5), normal(1, 1, S, 5)),
    }
    measured: dict[str, int | float] = {}
    for name, (source, data) in sources.items():
        model = alive(Transformer(replace(PLAN, source=source)), 2)
        data.requires_grad_()
        logits = model(data, TARGET)
        moved = [torch.autograd.grad(row.sum(), data, retain_graph=True)[0] for row in logits[0]]
        least = min(float((gradient != 0).double().mean()) for gradient in moved)
        measured[f"{name}: share of its numbers that every word depends on"] = least
        measured[f"{name}: rows of memory"] = model.encode(data).shape[1]
    shares = [value for name, value in measured.items() if "share" in name]
    return Finding(holds(min(shares) == 1), measured | {"words": L})


def _feed_forward() -> Finding:
    layer, x = alive(FeedForward(D, HIDDEN), 0), normal(1, 1, L, D)
    hidden = np.maximum(plain.linear(layer.expand, plain.array(x[0])), 0)
    error = plain.apart(layer(x)[0], plain.linear(layer.reduce, hidden))
    alone = max(apart(layer(x)[:, n], layer(x[:, n])) for n in range(L))
    base = TransformerConfig.base(37_000)
    return Finding(
        holds(error < SAME and alone < SAME and base.feed_forward > base.width),
        {
            "distance from max(0, xW₁ + b₁)W₂ + b₂": error,
            "distance of all rows together from each alone": alone,
            "width of the paper's base model": base.width,
            "width in between": base.feed_forward,
        },
    )


def _neighbours() -> Finding:
    x = normal(0, 1, L, D)
    layers = {"feed-forward": FeedForward(D, HIDDEN), "convolution of 3": Convolution(D, 3)}
    by = {name: influence(alive(layer, 1), x) for name, layer in layers.items()}
    beside = {name: float((m - m.diagonal().diag()).max()) for name, m in by.items()}
    own = float(by["feed-forward"].diagonal().min())
    return Finding(
        corrected(
            taught=beside["feed-forward"] > 0,
            correct=beside["feed-forward"] == 0 and own > 0 and beside["convolution of 3"] > 0,
        ),
        {
            "feed-forward: largest entry of ∂y_i/∂x_j, i ≠ j": beside["feed-forward"],
            "feed-forward: largest entry of ∂y_i/∂x_i, least row": own,
            "convolution of 3: largest entry of ∂y_i/∂x_j, i ≠ j": beside["convolution of 3"],
        },
    )


def _post_norm() -> Finding:
    layer, x = alive(PostNorm(D, dropout=0.5), 0).train(), normal(1, 1, L, D)
    sublayer: Callable[[Tensor], Tensor] = torch.tanh
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        have = layer(x, sublayer)
        torch.manual_seed(2)
        kept = layer.dropout(torch.ones_like(x))
    inner, summed = kept * sublayer(x), kept * (x + sublayer(x))
    before = plain.apart(have, plain.layer_norm(layer.norm, plain.array(x + inner)))
    after = plain.apart(have, plain.layer_norm(layer.norm, plain.array(summed)))
    base = _base()
    counts = [
        sum(isinstance(part, PostNorm) for part in block.children())
        for stack in (base.encoder, base.decoder)
        for block in blocks(stack)
    ]
    return Finding(
        holds(before < SAME and after > DIFFERENT and counts == [2] * 6 + [3] * 6),
        {
            "distance from LayerNorm(x + Dropout(Sublayer(x)))": before,
            "distance from LayerNorm(Dropout(x + Sublayer(x)))": after,
            "sublayers of each block of the base model": counts,
        },
    )


def _patch_convolution() -> Finding:
    layer, pictures = alive(Patches(32, 4, 3, D), 0), normal(1, 2, 3, 32, 32)
    kernel = layer.projection.weight.view(D, 3, 4, 4)
    convolved = F.conv2d(pictures, kernel, layer.projection.bias, stride=4).flatten(2).mT
    difference = apart(layer(pictures), convolved)
    return Finding(
        corrected(taught=difference > SAME, correct=difference < SAME),
        {
            "distance from a convolution of kernel and stride 4": difference,
            "largest number in the result": float(convolved.abs().max()),
        },
    )


def _flattened_patches() -> Finding:
    pictures, side = normal(0, 2, 3, 8, 12), 4
    have = flat_patches(pictures, side)
    numbers = plain.array(pictures)
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
            "patches of a picture of 224 pixels, patch 16": published[1],
            "numbers in each": published[2],
        },
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
    )


def _vit_structure() -> Finding:
    base, vit = _base(), unbuilt(lambda: VisionTransformer.base(1000))

    def all_of(model: nn.Module, kind: type[nn.Module], instead: type[nn.Module]) -> bool:
        kinds = {type(m) for m in model.modules() if isinstance(m, kind | instead)}
        return kinds == {kind}

    found = {
        "ViT has an encoder alone": all(block.cross is None for block in blocks(vit.encoder)),
        "the Transformer has cross-attention": all(
            block.cross is not None for block in blocks(base.decoder)
        ),
        "ViT is pre-norm": all_of(vit, PreNorm, PostNorm),
        "the Transformer is post-norm": all_of(base, PostNorm, PreNorm),
        "ViT has GELU": all_of(vit, nn.GELU, nn.ReLU),
        "the Transformer has ReLU": all_of(base, nn.ReLU, nn.GELU),
        "ViT has a class token": vit.class_token is not None,
    }
    return Finding(holds(all(found.values())), found)


def _class_token() -> Finding:
    model, picture = alive(VisionTransformer(PICTURE), 0), normal(1, 1, 3, 8, 12)
    x = model.embed(picture)
    for block in blocks(model.encoder):
        x = block(x)
    norm = model.encoder.norm
    assert isinstance(norm, nn.LayerNorm)
    last = plain.layer_norm(norm, plain.array(x[:, 0]))
    error = plain.apart(model.represent(picture), last)
    raw = apart(model.represent(picture), x[:, 0])
    before = apart(model.embed(picture)[:, 0], model.embed(picture + 1)[:, 0])
    picture.requires_grad_()
    (gradient,) = torch.autograd.grad(model.represent(picture).sum(), picture)
    depends = float((gradient != 0).double().mean())
    return Finding(
        holds(error < SAME and before == 0 and depends == 1 and raw > DIFFERENT),
        {
            "distance from the class token's last state after LayerNorm": error,
            "distance from the same before LayerNorm": raw,
            "share of the pixels that it depends on": depends,
            "change of the token itself with the picture": before,
        },
    )


def _head() -> Finding:
    before = alive(VisionTransformer(replace(PICTURE, head_width=HIDDEN)), 0)
    x = normal(1, 3, D)
    hidden = before.head.hidden
    assert hidden is not None
    inner = np.tanh(plain.linear(hidden, plain.array(x)))
    error = plain.apart(before.head(x), plain.linear(before.head.output, inner))
    after, picture = before.with_classes(7), normal(3, 1, 3, 8, 12)
    alive(after.head, 2)
    straight = plain.apart(after.head(x), plain.linear(after.head.output, plain.array(x)))
    kept = apart(before.represent(picture), after.represent(picture))
    return Finding(
        holds(error < SAME and straight < SAME and after.head.hidden is None and kept == 0),
        {
            "pre-training: distance from W₂ tanh(W₁ x + b₁) + b₂": error,
            "fine-tuning: distance from W x + b": straight,
            "layers at pre-training": len(list(before.head.children())),
            "layers at fine-tuning": len(list(after.head.children())),
            "change of what the head reads": kept,
        },
    )


def _vit_by_hand() -> Finding:
    model, picture = alive(VisionTransformer(PICTURE), 0), normal(1, 1, 3, 8, 12)
    numbers, side = plain.array(picture[0]), PICTURE.patch
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
    error = plain.apart(model(picture), logits)
    return Finding(
        holds(error < SAME),
        {
            "distance of the logits from plain arithmetic": error,
            "largest logit": float(np.abs(logits).max()),
            "parameters": parameters(model),
        },
    )


def _norm(residual: nn.Module) -> nn.LayerNorm:
    assert isinstance(residual, PreNorm)
    return residual.norm


def _encoder_output() -> Finding:
    model = alive(Transformer(PLAN), 0)
    lengths = (1, 5, S, 40)
    sizes = [model.encode(torch.zeros(1, n, dtype=torch.long)).numel() for n in lengths]
    return Finding(
        corrected(
            taught=len(set(sizes)) == 1 or max(sizes) < max(lengths) * D,
            correct=sizes == [n * D for n in lengths],
        ),
        {"tokens read": list(lengths), "numbers in the encoder's output": sizes, "width": D},
    )


def _solely_attention() -> Finding:
    base = _base()
    counts = {"attention": 0, "feed-forward": 0, "embedding": 0, "norms": 0}
    for module in base.modules():
        match module:
            case MultiHeadAttention():
                counts["attention"] += parameters(module)
            case FeedForward():
                counts["feed-forward"] += parameters(module)
            case nn.LayerNorm():
                counts["norms"] += parameters(module)
    total = parameters(base)
    counts["embedding"] = total - sum(counts.values())
    # Three matrices for what is read and one for what is written, in 6 + 2·6 layers.
    width, hidden, layers = 512, 2048, 18
    by_hand = layers * 4 * (width * width + width)
    dense = 12 * (2 * width * hidden + hidden + width)
    return Finding(
        corrected(
            taught=counts["attention"] > total / 2,
            correct=counts["attention"] == by_hand
            and counts["feed-forward"] == dense
            and dense > by_hand,
        ),
        {f"parameters: {name}": count for name, count in counts.items()}
        | {"attention's share of the stacks": by_hand / (by_hand + dense)},
        (
            Table(
                "Parameters of the base model",
                ("part", "millions", "share"),
                tuple((name, round(n / 1e6, 2), round(n / total, 3)) for name, n in counts.items()),
            ),
        ),
    )


def _frozen_encoder() -> Finding:
    trained = alive(VisionTransformer(PICTURE), 0)
    other = alive(trained.with_classes(3).head, 1)
    model = trained.with_classes(3).freeze()
    model.head.load_state_dict(other.state_dict())
    pictures = normal(2, 2, 3, 8, 12)
    same = apart(model.represent(pictures), trained.represent(pictures))
    model(pictures).square().sum().backward()
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
    )


def _taken(layer: nn.Module, x: Tensor) -> bool:
    try:
        layer(x)
    except (ValueError, RuntimeError):
        return False
    return True


def _variable_size() -> Finding:
    lengths = (3, L, S, 40)
    convolution, dense = alive(Convolution(D, 3), 0), alive(Dense(D, L), 1)
    pooled = nn.Sequential(nn.Conv2d(1, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    flat = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(4 * 6 * 6, 5))
    takes = {
        "convolution over a sequence": [_taken(convolution, normal(2, 1, n, D)) for n in lengths],
        "dense layer over a sequence": [_taken(dense, normal(2, 1, n, D)) for n in lengths],
        "CNN whose head reads the mean": [
            _taken(alive(pooled, 3), normal(4, 1, 1, n, n)) for n in (8, 9, 24)
        ],
        "CNN whose head is dense": [
            _taken(alive(flat, 3), normal(4, 1, 1, n, n)) for n in (8, 9, 24)
        ],
    }
    x = normal(5, 1, 40, D)
    same = apart(convolution(x)[:, 1:10], convolution(x[:, :11])[:, 1:10])
    return Finding(
        corrected(
            taught=not all(takes["convolution over a sequence"]),
            correct=all(takes["convolution over a sequence"])
            and all(takes["CNN whose head reads the mean"])
            and same < SAME
            and not all(takes["dense layer over a sequence"])
            and not all(takes["CNN whose head is dense"]),
        ),
        {f"sizes taken by a {name}": f"{sum(t)} of {len(t)}" for name, t in takes.items()}
        | {"a convolution's rows in a longer sequence, change": same},
    )


def _both_directions() -> Finding:
    x = normal(0, 1, L, D)
    past = torch.ones(L, L, dtype=torch.bool).tril()
    one, both = (
        influence(alive(Recurrent(D, "gru", both=both), 1), x) > 0 for both in (False, True)
    )
    return Finding(
        corrected(
            taught=not bool((both & ~past).any()),
            correct=torch.equal(one, past) and bool(both.all()),
        ),
        {
            "one way: pairs that depend on a later row": int((one & ~past).sum()),
            "both ways: pairs that depend on a later row": int((both & ~past).sum()),
            "pairs with a later row": int((~past).sum()),
        },
    )


def _three_kinds() -> Finding:
    ids, x = TARGET, normal(0, 1, L, D)
    plan = LanguageConfig(19, width=D, heads=H, feed_forward=HIDDEN, layers=2)
    chat = alive(LanguageModel(plan), 1)
    both = alive(Transformer(PLAN), 1)
    vit = alive(VisionTransformer(PICTURE), 1)
    before = torch.ones(L, L, dtype=torch.bool).tril()
    reach = influence(lambda x: chat.decoder(x, mask=causal()), x) > 0
    stacks: dict[str, list[Stack]] = {
        "decoder only": [chat.decoder],
        "encoder-decoder": [both.encoder, both.decoder],
        "encoder only": [vit.encoder],
    }
    crossing = {
        name: sum(block.cross is not None for stack in parts for block in blocks(stack))
        for name, parts in stacks.items()
    }
    alike = {type(block) for parts in stacks.values() for stack in parts for block in stack.blocks}
    later = ids.clone()
    later[:, -1] += 1
    told = apart(chat(later)[:, :-1], chat(ids)[:, :-1])
    return Finding(
        holds(
            alike == {Block}
            and list(crossing.values()) == [0, 2, 0]
            and torch.equal(reach, before)
            and told == 0
        ),
        {f"blocks with cross-attention, {name}": count for name, count in crossing.items()}
        | {
            "kinds of block in all three": len(alike),
            "decoder only: what earlier logits notice of the last token": told,
        },
    )


def _fewer_parameters() -> Finding:
    width, length = 64, 50
    attention = parameters(MultiHeadAttention(width, 4, bias=False))
    others = {
        "dense over 50 rows": unbuilt(lambda: Dense(width, length)),
        "LSTM": Recurrent(width),
        "GRU": Recurrent(width, "gru"),
        "convolution of 3": Convolution(width, 3),
        "depthwise convolution of 3": Convolution(width, 3, groups=width),
    }
    counts = {
        name: sum(p.numel() for key, p in layer.named_parameters() if "bias" not in key)
        for name, layer in others.items()
    }
    block = attention + 2 * width * 4 * width
    rows = [("attention with W_O", attention), ("a block with it", block), *counts.items()]
    return Finding(
        conditional(
            inside=attention == 4 * width**2 and attention < counts["dense over 50 rows"],
            outside=attention < min(counts.values()),
        ),
        {f"parameters, {name}": count for name, count in rows},
        (
            Table(
                "Without biases, at width 64",
                ("layer", "parameters", "for each D²"),
                tuple((name, count, round(count / width**2, 2)) for name, count in rows),
            ),
        ),
    )


EXPERIMENTS: tuple[Experiment, ...] = (
    Experiment(
        22,
        "residual-path",
        "slides",
        "Encoder and decoder are stacks with residual connections.",
        "Every sublayer of both stacks is silenced by zeros in its last matrix, and what remains "
        "is compared with the input.",
        "The input goes through untouched in pre-norm stacks, and normalised in post-norm ones: "
        "sublayers only add to it.",
        _residual_path,
        (r"x_{n+1} = x_n + \mathrm{Sublayer}(x_n)",),
    ),
    Experiment(
        24,
        "shared-memory",
        "slides",
        "Every decoder layer uses the keys and values of the top encoder layer.",
        "What two decoder layers read is compared with the encoder's output, and the keys and "
        "values that they attend to with each other.",
        "They share the encoder's output. Each makes keys and values from it with matrices of its "
        "own.",
        _shared_memory,
        (r"K_l = M W_K^l, \quad V_l = M W_V^l",),
    ),
    Experiment(
        25,
        "queries-from-below",
        "slides",
        "Cross-attention takes its queries from the layer below.",
        "What cross-attention is asked with is compared with the output of the masked "
        "self-attention under it.",
        "It does: seven target rows ask, eleven source rows answer.",
        _queries_from_below,
    ),
    Experiment(
        29,
        "encoder-and-decoder",
        "exercise sheet",
        "The encoder has self-attention, the decoder masked self-attention and cross-attention.",
        "Jacobians of both stacks say which row of the result depends on which row of the input "
        "and of the memory.",
        "Encoder rows depend on all rows; decoder rows on themselves, on those before them and on "
        "the whole source.",
        _encoder_and_decoder,
    ),
    Experiment(
        30,
        "modalities",
        "exercise sheet",
        "Cross-attention joins modalities.",
        "A decoder of text reads an image's patches, then a recording's frames, and the gradient "
        "of each word's logits by the source is looked at.",
        "Every word depends on every pixel and on every frame; the decoder is the same for both.",
        _modalities,
    ),
    Experiment(
        31,
        "which-box",
        "exercise sheet",
        "Of the figure's attention boxes one is self, one masked self and one cross.",
        "Every attention of a running model reports whether it was given another source and what "
        "its mask allows.",
        "Self in the encoder; in each decoder block masked self first, then cross.",
        _boxes,
    ),
    Experiment(
        62,
        "feed-forward",
        "homework",
        "FFN(x) = max(0, xW₁ + b₁)W₂ + b₂, the same for every position, first wider, then back.",
        "The layer is compared with the formula in numpy, all rows together and one by one.",
        "It is that formula, and in the base model it goes from 512 to 2048 and back.",
        _feed_forward,
        (r"\mathrm{FFN}(x) = \max(0, x W_1 + b_1) W_2 + b_2",),
    ),
    Experiment(
        63,
        "feed-forward-neighbours",
        "homework",
        "The feed-forward network captures local patterns between neighbours.",
        "Its Jacobian is computed between all pairs of rows, beside a convolution's.",
        "Each row depends on itself alone: ∂y_i/∂x_j is zero for i ≠ j. Neighbours meet in "
        "attention, or in a convolution.",
        _neighbours,
        (r"\partial y_i / \partial x_j = 0, \quad i \ne j",),
    ),
    Experiment(
        64,
        "post-norm",
        "homework",
        "Each sublayer gives LayerNorm(x + Sublayer(x)), in 6 layers of 2 or 3 sublayers, with "
        "dropout before the sum.",
        "The residual is compared with numpy's LayerNorm under a known dropout mask, put before "
        "the sum and after it; sublayers of the base model are counted.",
        "It is so: LayerNorm(x + Dropout(Sublayer(x))), 2 in each encoder layer and 3 in each "
        "decoder layer.",
        _post_norm,
        (r"\mathrm{LayerNorm}(x + \mathrm{Dropout}(\mathrm{Sublayer}(x)))",),
    ),
    Experiment(
        67,
        "patch-convolution",
        "homework",
        "There is no convolution in ViT.",
        "The map of patches is compared with torch's convolution of the same weights, with patch "
        "as kernel and as stride.",
        "Its first layer is one: a linear map of patches that do not overlap is a convolution "
        "whose kernel and stride are the patch.",
        _patch_convolution,
    ),
    Experiment(
        68,
        "flattened-patches",
        "homework",
        "An image becomes a sequence of flattened patches.",
        "Patches are cut out of two pictures one by one in numpy and compared.",
        "HW/P² rows of P²C numbers each: 196 of 768 for a picture of 224 pixels.",
        _flattened_patches,
        (r"x \in \mathbb{R}^{HW/P^2 \times P^2 C}",),
    ),
    Experiment(
        72,
        "vit-feed-forward",
        "homework",
        "ViT uses smaller feed-forward networks than the Transformer.",
        "The hidden widths of the published sizes are read from their configs.",
        "They are as wide or wider: 3072, 4096 and 5120 against 2048 and 4096.",
        _vit_feed_forward,
    ),
    Experiment(
        72,
        "vit-structure",
        "homework",
        "ViT is a Transformer whose parts stand in another arrangement.",
        "The modules of ViT-B/16 and of the Transformer's base model are looked through.",
        "ViT has the encoder alone, norms before its sublayers, GELU for ReLU, and a class token.",
        _vit_structure,
    ),
    Experiment(
        74,
        "class-token",
        "homework",
        "The class token's final state, after LayerNorm, represents the image.",
        "The blocks are run one by one, the token's last state is normalised in numpy, and the "
        "result is compared with what the head reads. Its gradient by the pixels is looked at.",
        "It does. The token starts the same for every picture and ends as a function of all "
        "pixels.",
        _class_token,
    ),
    Experiment(
        75,
        "vit-head",
        "homework",
        "The head has one hidden layer with tanh at pre-training and is one linear layer at "
        "fine-tuning.",
        "Both heads are compared with their formulas; the second is put in place of the first.",
        "It is so, and what the head reads stays as it was.",
        _head,
        (r"W_2 \tanh(W_1 x + b_1) + b_2", r"W x + b"),
    ),
    Experiment(
        76,
        "vit-by-hand",
        "homework",
        "A Vision Transformer can be written from its parts.",
        "A small one is computed once more in numpy, from pixels to logits: patches, positions, "
        "class token, two pre-norm blocks, LayerNorm, head.",
        "Both give the same logits.",
        _vit_by_hand,
    ),
    Experiment(
        94,
        "encoder-output",
        "handout",
        "The encoder makes a compact representation of its input.",
        "Texts of 1 to 40 tokens are encoded, and the numbers in the output are counted.",
        "The output keeps one vector for each token: L×d numbers, as many as went in.",
        _encoder_output,
    ),
    Experiment(
        94,
        "solely-attention",
        "handout",
        "The Transformer is built solely on attention.",
        "The parameters of the base model are counted by part, without their values, and by hand.",
        "In the two stacks the feed-forward networks hold more than attention does: 25.2 against "
        "18.9 million.",
        _solely_attention,
    ),
    Experiment(
        94,
        "frozen-encoder",
        "handout",
        "A trained encoder is a reusable feature extractor.",
        "A model gets a head for other classes and is frozen. Its features are compared with the "
        "old ones, and a backward pass shows what training would move.",
        "It is: the features stay, and only the new head receives gradients.",
        _frozen_encoder,
    ),
    Experiment(
        78,
        "variable-size",
        "handout",
        "Convolutional networks cannot deal with inputs of variable size.",
        "Sequences and pictures of several sizes are given to convolutions, to a dense layer, and "
        "to two small CNNs with different heads.",
        "Convolutions take any size and give each place what it had. What refuses another size is "
        "a dense layer, be it alone or a CNN's head.",
        _variable_size,
    ),
    Experiment(
        77,
        "both-directions",
        "handout",
        "A recurrent network sees the past only.",
        "Jacobians of a recurrent layer that reads one way and of one that reads both ways say "
        "which row depends on which.",
        "One way it does. A bidirectional one sees everything, in as many steps.",
        _both_directions,
    ),
    Experiment(
        99,
        "three-kinds",
        "handout",
        "The Transformer is the backbone of chat models and of models of text, image and speech.",
        "A decoder-only, an encoder-decoder and an encoder-only model are built, their blocks are "
        "compared and the first one's reach is measured.",
        "All three are stacks of one kind of block. Chat models have the decoder alone, without "
        "cross-attention.",
        _three_kinds,
    ),
    Experiment(
        99,
        "fewer-parameters",
        "handout",
        "Attention needs fewer parameters than the layers before it.",
        "Weights of one attention layer, W_O included, are counted beside those of a dense layer "
        "over 50 rows, recurrent layers and convolutions of one width.",
        "Far fewer than a dense layer over the sequence, and fewer than a recurrent layer. A "
        "convolution of three taps has fewer still, and a block with its feed-forward network "
        "more than an LSTM.",
        _fewer_parameters,
    ),
)
