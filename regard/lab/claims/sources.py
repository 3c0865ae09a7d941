"""Self-attention and cross-attention: where queries come from, and where keys and values do."""

import math
from dataclasses import replace

import torch
from torch import Tensor

from regard import (
    AudioSource,
    ImageSource,
    MultiHeadAttention,
    Transformer,
    attend,
    statistics,
    weights,
)
from regard.lab.claims import plain
from regard.lab.claims.sample import DIFFERENT, PLAN, SAME, D, H, L, S, alive, apart, normal
from regard.lab.experiment import Experiment, Finding, Table, holds
from regard.lab.place import Place


def self_is_cross() -> Finding:
    layer, x, source = alive(MultiHeadAttention(D, H), 0), normal(1, 1, L, D), normal(2, 1, L, D)
    by_self, by_cross, other = layer(x), layer(x, x), layer(x, source)
    by_hand = plain.multihead(layer, plain.array(x[0]), plain.array(source[0]))
    return Finding(
        holds(
            apart(by_self, by_cross) < SAME
            and plain.apart(other[0], by_hand) < SAME
            and apart(by_self, other) > DIFFERENT
        ),
        {
            "self, and cross with itself as the source": apart(by_self, by_cross),
            "self, and cross with another source": apart(by_self, other),
        },
    )


def differing_lengths() -> Finding:
    layer = alive(MultiHeadAttention(D, H), 0)
    rows, worst = [], 0.0
    for queries, pairs in ((L, S), (S, L), (1, S), (L, 1)):
        x, source = normal(1, queries, D), normal(2, pairs, D)
        output = layer(x, source)
        gap = plain.apart(output, plain.multihead(layer, plain.array(x), plain.array(source)))
        worst = max(worst, gap)
        rows.append((queries, pairs, f"{output.shape[0]}×{output.shape[1]}", gap))
    return Finding(
        holds(all(row[2] == f"{row[0]}×{D}" for row in rows) and worst < SAME),
        {"largest difference from arithmetic": worst},
        tables=(
            Table(
                f"cross-attention of width {D}",
                ("queries", "pairs", "output", "difference"),
                (*rows,),
            ),
        ),
    )


def audio_and_text() -> Finding:
    text, audio = normal(0, 1, L, D), normal(1, 1, 31, 20)
    layer = alive(MultiHeadAttention(D, H, source_width=20), 2)
    order = torch.randperm(31, generator=torch.Generator().manual_seed(92))
    read = layer(text, audio)
    moved = apart(layer(text, audio[:, order]), read)
    cut = apart(layer(text, audio[:, :-1]), read)
    return Finding(
        holds(read.shape == (1, L, D) and moved < SAME and cut > DIFFERENT),
        {
            "words": L,
            "frames": 31,
            "shape of the output": list(read.shape),
            "change when the frames are shuffled": moved,
            "change when the last frame is left out": cut,
        },
    )


def _modalities() -> Finding:
    sources: dict[str, tuple[ImageSource | AudioSource, Tensor]] = {
        "image": (ImageSource(image=(8, 12), patch=4), normal(0, 1, 3, 8, 12)),
        "audio": (AudioSource(features=5), normal(1, 1, S, 5)),
    }
    measured: dict[str, int | float] = {}
    for name, (source, data) in sources.items():
        model = alive(Transformer(replace(PLAN, source=source)), 2)
        data.requires_grad_()
        logits = model(data, torch.arange(L)[None])
        moved = [torch.autograd.grad(row.sum(), data, retain_graph=True)[0] for row in logits[0]]
        least = min(float((gradient != 0).double().mean()) for gradient in moved)
        measured[f"{name}: share of its numbers that every word depends on"] = least
        measured[f"{name}: rows of memory"] = model.encode(data).shape[1]
    shares = [value for name, value in measured.items() if "share" in name]
    return Finding(holds(min(shares) == 1), measured | {"words": L})


def _shuffled_pairs() -> Finding:
    audio, text, shuffle = normal(0, L, 5), normal(1, S, 3), torch.arange(S).flip(0).roll(3)
    layer = alive(MultiHeadAttention(5, 2, key_width=3, source_width=3), 2)
    whole = layer(audio, text)
    by_hand = plain.apart(whole, plain.multihead(layer, plain.array(audio), plain.array(text)))
    together = apart(layer(audio, text[shuffle]), whole)
    query, key, value = normal(3, L, 5), normal(4, S, 5), normal(5, S, 2)
    torn = apart(attend(query, key, value[shuffle]), attend(query, key, value))
    return Finding(
        holds(together < SAME and by_hand < SAME and torn > DIFFERENT),
        {
            "change when pairs are shuffled": together,
            "change when values are shuffled and keys are not": torn,
            "distance from plain arithmetic": by_hand,
            "queries": L,
            "pairs": S,
        },
    )


def four_kinds() -> Finding:
    x, source = normal(0, 5, 4), normal(1, 7, 4)
    rows, fits = [], True
    for name, read in (("self", x), ("cross", source)):
        for sharpness, beta in (("soft", None), ("hard", math.inf)):
            shares, output = weights(x, read, beta=beta), attend(x, read, read, beta=beta)
            fits &= shares.shape == (5, len(read)) and apart(output, shares @ read) < SAME
            fits &= bool(((shares == 0) | (shares == 1)).all()) == (sharpness == "hard")
            spent = float(statistics(x, read, beta=beta).entropy.mean())
            rows.append((name, sharpness, f"5×{len(read)}", spent))
    return Finding(
        holds(fits and len({row[:2] for row in rows}) == 4),
        {"all four are one function": fits},
        tables=(
            Table(
                "five queries",
                ("reads", "chooses", "weights", "mean entropy, in nats"),
                (*rows,),
            ),
        ),
    )


EXPERIMENTS: tuple[Experiment, ...] = (
    Experiment(
        27,
        "self-is-cross",
        Place("sheet", "6-2(a)"),
        "Self-attention and cross-attention are one operation, on one source or on two.",
        "One layer with the same weights reads its own input, the same input given as a source, "
        "and another source.",
        self_is_cross,
        correct="They are: self-attention is cross-attention whose source is the input itself.",
    ),
    Experiment(
        28,
        "differing-lengths",
        Place("sheet", "6-2(a)"),
        "In cross-attention there may be more queries than pairs of keys and values, or fewer.",
        "One layer is given four combinations of lengths, and compared with plain arithmetic.",
        differing_lengths,
        correct="The output has as many rows as there are queries. Only keys and values have to be equally "
        "many.",
    ),
    Experiment(
        92,
        "audio-and-text",
        Place("handout", "multi-modal"),
        "Words may attend to the frames of a recording, of which there are more.",
        "Multi-head attention reads a recording's frames, which are wider than the words; then "
        "the frames shuffled, and all but one of them.",
        audio_and_text,
        correct="There is one output for each word, whatever the number of frames. Without positions the "
        "order of the frames makes no difference, but which frames there are does.",
    ),
    Experiment(
        30,
        "modalities",
        Place("sheet", "6-2(a)"),
        "Cross-attention joins modalities.",
        "A text decoder reads an image's patches, then a recording's frames, and the gradient of "
        "each word's logits with respect to the source is computed.",
        _modalities,
        correct="Every word depends on every pixel and on every frame; the decoder is the same for both.",
    ),
    Experiment(
        92,
        "shuffled-source",
        Place("handout", "multi-modal"),
        "In cross-attention, shuffling the pairs of keys and values changes nothing.",
        "Seven frames of audio read eleven words of text through a whole module, before and after "
        "the words are shuffled; then the values alone are shuffled.",
        _shuffled_pairs,
        (r"\sum_j a_j v_j = \sum_j a_{\pi(j)} v_{\pi(j)}",),
        correct="Nothing changes, as long as every key keeps its value.",
    ),
    Experiment(
        41,
        "four-kinds",
        Place("homework", "1.1(c)"),
        "There are four types of attention: self or cross, each of them hard or soft.",
        "The same function is called with one or two sequences, and with β = 1/√d or β = ∞.",
        four_kinds,
        correct="The source and the sharpness are two independent choices, and one function does all four.",
    ),
)
