"""Encoder and decoder: which part attends to what."""

from typing import Any

import torch
from torch import Tensor

from regard import (
    LanguageConfig,
    LanguageModel,
    Mask,
    MultiHeadAttention,
    Transformer,
    VisionTransformer,
    causal,
)
from regard.lab.claims.sample import (
    HIDDEN,
    PICTURE,
    PLAN,
    SAME,
    D,
    H,
    L,
    S,
    alive,
    apart,
    blocks,
    influence,
    normal,
)
from regard.lab.experiment import Experiment, Finding, holds, more_exactly
from regard.lab.numbers import figure, within
from regard.lab.place import Place
from regard.model.block import Block
from regard.model.stack import Stack

TARGET, SOURCE = torch.arange(L)[None], torch.arange(S)[None] + 5


def _shared_memory() -> Finding:
    model = alive(Transformer(PLAN), 0)
    read: list[Tensor] = []
    made: list[tuple[Tensor, Tensor]] = []
    for block in blocks(model.decoder):
        cross = block.cross
        assert isinstance(cross, MultiHeadAttention)
        cross.register_forward_pre_hook(lambda _, args: read.append(args[1]))
        cross.core.register_forward_pre_hook(lambda _, args: made.append((args[1], args[2])))
    model(SOURCE, TARGET)
    memory = model.encode(SOURCE)
    same = max(apart(source, memory) for source in read)
    keys, values = (apart(one, other) for one, other in zip(*made))
    return Finding(
        more_exactly(meant=same == 0 and len(read) == 2, literal=max(keys, values) < SAME),
        {
            "what two decoder layers read, distance from the encoder's output": same,
            "distance between their keys": keys,
            "distance between their values": values,
        },
        conclusion=f"What the decoder's {len(read)} layers share is the top encoder's output: they "
        f"read it {within(same)}. Each makes keys and values of its own from it, by its own "
        f"matrices; between the two layers keys differ by {figure(keys, 2)} and values by "
        f"{figure(values, 2)}.",
    )


def _queries_from_below() -> Finding:
    model = alive(Transformer(PLAN), 0)
    below: list[Tensor] = []
    asks: list[Tensor] = []
    for block in blocks(model.decoder):
        assert block.cross is not None
        block.add_attention.register_forward_hook(lambda _, args, out: below.append(out))
        block.cross.register_forward_pre_hook(lambda _, args: asks.append(args[0]))
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
        conclusion=f"Cross-attention's {asks[0].shape[1]} queries come from the output of the "
        f"masked self-attention below it, {within(off)}; the {S} rows of the encoder's output give "
        "keys and values.",
    )


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
            f"pairs of rows that the encoder joins, of {L * L}": int(encoder.sum()),
            f"pairs of target rows that the decoder joins, of {L * L}": int(decoder.sum()),
            "of these, pairs with a later row": int((decoder & ~before).sum()),
            f"pairs of target and source rows that the decoder joins, of {L * S}": int(
                across.sum()
            ),
        },
        conclusion=f"By the Jacobians, encoder rows depend on each other in {int(encoder.sum())} "
        f"of {L * L} pairs; decoder rows in {int(decoder.sum())} pairs, "
        f"{int((decoder & ~before).sum())} of them with a later row; and on source rows in "
        f"{int(across.sum())} of {L * S}.",
    )


def _kinds(model: Transformer) -> list[str]:
    """Each attention layer as it is called: self or cross, and the mask."""
    seen: list[str] = []

    def note(name: str, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        x, source = (*args, None)[:2]
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
                    lambda _, args, named, name=name: note(name, args, named), with_kwargs=True
                )
    model(SOURCE, TARGET)
    return seen


def _boxes() -> Finding:
    seen = _kinds(alive(Transformer(PLAN), 0))
    wanted = ["encoder: self"] * 2 + ["decoder: masked self", "decoder: cross"] * 2
    return Finding(
        holds(seen == wanted),
        {"attention in the order of its running": seen},
        conclusion=f"The {len(seen)} attention layers of a model of 2 + 2 blocks are, in the order "
        f"of running: {', '.join(dict.fromkeys(seen))}, twice each. The lower decoder box is "
        "self-attention, as the sheet has it, and masked.",
    )


def _encoder_output() -> Finding:
    model = alive(Transformer(PLAN), 0)
    lengths = (1, 5, S, 40)
    sizes = [model.encode(torch.zeros(1, n, dtype=torch.long)).numel() for n in lengths]
    return Finding(
        more_exactly(meant=sizes == [n * D for n in lengths], literal=len(set(sizes)) == 1),
        {"tokens read": list(lengths), "numbers in the encoder's output": sizes, "width": D},
        conclusion="It is a tensor of vectors that can be used further, but it is as long as the "
        f"input: {lengths[1]} tokens give {sizes[1]} numbers, {lengths[-1]} give {sizes[-1]}, one "
        f"vector of {D} for each. VGG's 4096 numbers, which it is compared with, do not grow with "
        "the image.",
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
    leaked = apart(chat(later)[:, :-1], chat(ids)[:, :-1])
    return Finding(
        holds(
            alike == {Block}
            and list(crossing.values()) == [0, 2, 0]
            and torch.equal(reach, before)
            and leaked == 0
        ),
        {f"blocks with cross-attention, {name}": count for name, count in crossing.items()}
        | {
            "kinds of block in all three": len(alike),
            "decoder only: what earlier logits notice of the last token": leaked,
        },
        conclusion="A decoder-only, an encoder-decoder and an encoder-only model are stacks of "
        f"{len(alike)} kind of block, with {crossing['decoder only']}, "
        f"{crossing['encoder-decoder']} and {crossing['encoder only']} cross-attention layers. In "
        "the first, as chat models have it, a change of the last token changes earlier logits by "
        f"{figure(leaked)}.",
    )


EXPERIMENTS: tuple[Experiment, ...] = (
    Experiment(
        24,
        "shared-memory",
        Place("slides", "decoder"),
        "The decoder uses the K and V vectors of the top encoder for its cross-attention.",
        "What two decoder layers read is compared with the encoder's output, and the keys and "
        "values that they attend to with each other.",
        _shared_memory,
        (r"K_l = M W_K^l, \quad V_l = M W_V^l",),
    ),
    Experiment(
        25,
        "queries-from-below",
        Place("slides", "decoder"),
        "The encoder-decoder attention takes its queries from the layer below it.",
        "The input of cross-attention's queries is compared with the output of the masked "
        "self-attention below it.",
        _queries_from_below,
    ),
    Experiment(
        29,
        "encoder-and-decoder",
        Place("sheet", "6-2(a)"),
        "The encoder's layers typically use self-attention; the decoder has self-attention among "
        "the output tokens and cross-attention to the input's features.",
        "Jacobians of both stacks say which row of the result depends on which row of the input "
        "and of the memory.",
        _encoder_and_decoder,
    ),
    Experiment(
        31,
        "which-box",
        Place("sheet", "6-2(b)"),
        "Of the three attention boxes in the paper's figure, the two lower ones are "
        "self-attention; the upper one of the decoder is cross-attention, as keys and values come "
        "from the encoder.",
        "Every attention layer of a running model reports whether it has another source and what "
        "its mask allows.",
        _boxes,
    ),
    Experiment(
        94,
        "encoder-output",
        Place("handout", "Transformers"),
        "The encoder transforms its input into a meaningful, compact tensor representation, as "
        "VGG does an image into a vector of 4096.",
        "Texts of 1 to 40 tokens are encoded, and the numbers in the output are counted.",
        _encoder_output,
    ),
    Experiment(
        99,
        "three-kinds",
        Place("handout", "take-away: Transformers"),
        "The Transformer, an encoder-decoder based on blocks of attention layers, is the backbone "
        "of networks such as ChatGPT and of methods for several modalities.",
        "A decoder-only, an encoder-decoder and an encoder-only model are built, their blocks are "
        "compared and the first one's reach is measured.",
        _three_kinds,
    ),
)
