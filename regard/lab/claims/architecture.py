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
    DIFFERENT,
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
from regard.lab.experiment import Experiment, Finding, corrected, holds
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
    )


def _kinds(model: Transformer) -> list[str]:
    """Each attention layer as it is called: self or cross, and the mask."""
    seen: list[str] = []

    def note(name: str, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        x, source = args
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
    return Finding(holds(seen == wanted), {"attention in the order of its running": seen})


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
    )


EXPERIMENTS: tuple[Experiment, ...] = (
    Experiment(
        24,
        "shared-memory",
        Place("slides", "decoder"),
        "Every decoder layer uses the keys and values of the top encoder layer.",
        "What two decoder layers read is compared with the encoder's output, and the keys and "
        "values that they attend to with each other.",
        _shared_memory,
        (r"K_l = M W_K^l, \quad V_l = M W_V^l",),
        correct="They share the encoder's output. Each makes keys and values from it with matrices of its "
        "own.",
    ),
    Experiment(
        25,
        "queries-from-below",
        Place("slides", "decoder"),
        "Cross-attention takes its queries from the layer below.",
        "The input of cross-attention's queries is compared with the output of the masked "
        "self-attention below it.",
        _queries_from_below,
        correct="It does: queries come from the target, keys and values from the source.",
    ),
    Experiment(
        29,
        "encoder-and-decoder",
        Place("sheet", "6-2(a)"),
        "The encoder has self-attention, the decoder masked self-attention and cross-attention.",
        "Jacobians of both stacks say which row of the result depends on which row of the input "
        "and of the memory.",
        _encoder_and_decoder,
        correct="Encoder rows depend on all rows; decoder rows on themselves, on those before them and on "
        "the whole source.",
    ),
    Experiment(
        31,
        "which-box",
        Place("sheet", "6-2(b)"),
        "Of the three attention boxes in the paper's figure one is self, one masked self and one "
        "cross.",
        "Every attention layer of a running model reports whether it has another source and what "
        "its mask allows.",
        _boxes,
        correct="Self in the encoder; in each decoder block masked self first, then cross.",
    ),
    Experiment(
        94,
        "encoder-output",
        Place("handout", "Transformers"),
        "The encoder makes a compact representation of its input.",
        "Texts of 1 to 40 tokens are encoded, and the numbers in the output are counted.",
        _encoder_output,
        correct="The output keeps one vector for each token: L×d numbers, as many as went in.",
    ),
    Experiment(
        99,
        "three-kinds",
        Place("handout", "take-away: Transformers"),
        "The Transformer is the backbone of chat models and of models of text, image and speech.",
        "A decoder-only, an encoder-decoder and an encoder-only model are built, their blocks are "
        "compared and the first one's reach is measured.",
        _three_kinds,
        correct="All three are stacks of one kind of block. Chat models have the decoder alone, without "
        "cross-attention.",
    ),
)
