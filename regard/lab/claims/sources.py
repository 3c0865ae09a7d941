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
    attention_statistics,
    attention_weights,
)
from regard.lab.claims import plain
from regard.lab.claims.sample import DIFFERENT, PLAN, SAME, D, H, L, S, alive, apart, normal
from regard.lab.experiment import Experiment, Finding, Table, holds
from regard.lab.numbers import figure, within
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
        conclusion="One layer gives the same for its input alone and for its input given as the "
        f"source (difference {figure(apart(by_self, by_cross))}); with another source the output "
        f"differs by {figure(apart(by_self, other), 2)}. Self-attention is the case in which both "
        "are the same tokens.",
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
        conclusion=f"The layer takes {len(rows)} combinations of lengths, and gives a row for each "
        f"query: from {rows[0][0]} queries and {rows[0][1]} pairs {rows[0][2]}, from {rows[1][0]} "
        f"and {rows[1][1]} {rows[1][2]}. Plain arithmetic differs by {figure(worst)} at most.",
    )


def audio_and_text() -> Finding:
    frames, words, d_audio, d_text = 31, L, D, 20
    audio, text = normal(0, 1, frames, d_audio), normal(1, 1, words, d_text)
    layer = alive(MultiHeadAttention(d_audio, H, source_width=d_text), 2)
    read = layer(audio, text)
    by_hand = plain.apart(
        read[0], plain.multihead(layer, plain.array(audio[0]), plain.array(text[0]))
    )
    # Not in step: other frames ask, and the words stand elsewhere.
    late = apart(layer(audio.roll(5, 1), text), read.roll(5, 1))
    moved = apart(layer(audio, text.roll(3, 1)), read)
    cut = apart(layer(audio, text[:, :-1]), read)
    return Finding(
        holds(
            read.shape == (1, frames, d_audio)
            and max(by_hand, late, moved) < SAME
            and cut > DIFFERENT
        ),
        {
            "frames that ask": frames,
            "words that answer": words,
            "shape of the output": list(read.shape),
            "change when the words are shifted": moved,
            "change beyond a shift when the frames are shifted": late,
            "change when the last word is left out": cut,
        },
        conclusion=f"{frames} frames ask, {words} words answer, and the output has {read.shape[1]} "
        f"rows, one for each frame. Shifting the words by three changes {figure(moved)}, and "
        f"shifting the frames shifts the output, {within(late)}: nothing has to be in step. "
        f"Without the last word the output differs by {figure(cut, 2)}.",
    )


def modalities() -> Finding:
    measured: dict[str, int | float] = {}
    # As in text-to-image models: patches of an image ask, words of a prompt answer.
    patches, prompt = normal(0, 1, 6, D), normal(1, 1, S, 20).requires_grad_()
    layer = alive(MultiHeadAttention(D, H, source_width=20), 2)
    measured["share of a prompt's numbers that every patch depends on"] = _share(
        layer(patches, prompt)[0], prompt
    )
    # As in captioning and speech recognition: a decoder of words reads an image, or a recording.
    sources: dict[str, tuple[ImageSource | AudioSource, Tensor]] = {
        "an image": (ImageSource(image=(8, 12), patch=4), normal(0, 1, 3, 8, 12)),
        "a recording": (AudioSource(features=5), normal(1, 1, S, 5)),
    }
    for name, (source, data) in sources.items():
        model = alive(Transformer(replace(PLAN, source=source)), 2)
        data.requires_grad_()
        logits = model(data, torch.arange(L)[None])
        measured[f"share of {name}'s numbers that every word depends on"] = _share(logits[0], data)
    prompted, seen, heard = measured.values()
    return Finding(
        holds(min(measured.values()) == 1),
        measured,
        conclusion=f"By their gradients, patches that attend to a prompt depend on {prompted:.0%} "
        f"of its numbers, each of them; the words of a decoder depend on {seen:.0%} of an image's "
        f"numbers and on {heard:.0%} of a recording's.",
    )


def _share(rows: Tensor, source: Tensor) -> float:
    """The least share of a source's numbers that one of the rows depends on."""
    moved = [torch.autograd.grad(row.sum(), source, retain_graph=True)[0] for row in rows]
    return min(float((gradient != 0).double().mean()) for gradient in moved)


def shuffled_pairs() -> Finding:
    query, key, value = normal(3, L, 5), normal(4, S, 5), normal(5, S, 5)
    output = attend(query, key, value)
    orders = {
        "reversed": torch.arange(S).flip(0),
        "shifted": torch.arange(S).roll(3),
        "shuffled": torch.randperm(S, generator=torch.Generator().manual_seed(92)),
    }
    together = {
        name: apart(attend(query, key[order], value[order]), output)
        for name, order in orders.items()
    }
    torn = apart(attend(query, key, value.flip(0)), output)
    by_hand = plain.softmax(plain.array(query @ key.T) / math.sqrt(5)) @ plain.array(value)
    return Finding(
        holds(
            max(together.values()) < SAME
            and plain.apart(output, by_hand) < SAME
            and torn > DIFFERENT
        ),
        {
            **{f"change when the pairs are {name}": gap for name, gap in together.items()},
            "change when the values are reversed and the keys are not": torn,
            "queries": L,
            "pairs": S,
        },
        conclusion="Reversed, shifted or shuffled together, keys and values give the same output, "
        f"{within(max(together.values()))}: a sum does not depend on the order of its terms. "
        "If a key loses its value, here by reversing the values alone, the output differs by "
        f"{figure(torn, 2)}.",
    )


def four_kinds() -> Finding:
    x, source = normal(0, 5, 4), normal(1, 7, 4)
    rows, fits = [], True
    for name, read in (("self", x), ("cross", source)):
        for sharpness, beta in (("soft", None), ("hard", math.inf)):
            shares, output = attention_weights(x, read, beta=beta), attend(x, read, read, beta=beta)
            fits &= shares.shape == (5, len(read)) and apart(output, shares @ read) < SAME
            fits &= bool(((shares == 0) | (shares == 1)).all()) == (sharpness == "hard")
            spent = float(attention_statistics(x, read, beta=beta).entropy.mean())
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
        conclusion=f"One function {'does' if fits else 'fails to do'} all four. Hard weights have "
        f"an entropy of {figure(rows[1][3])} nats, soft ones of {figure(rows[0][3], 3)} (self) and "
        f"{figure(rows[2][3], 3)} (cross): where queries come from, and how sharply they choose, "
        "are two independent choices.",
    )


EXPERIMENTS: tuple[Experiment, ...] = (
    Experiment(
        27,
        "self-is-cross",
        Place("sheet", "6-2(a)"),
        "Self- and cross-attention are the same mathematical operations; in self-attention "
        "queries, keys and values come from the same tokens, in cross-attention they may come "
        "from different ones.",
        "One layer with the same weights reads its own input, the same input given as a source, "
        "and another source.",
        self_is_cross,
    ),
    Experiment(
        28,
        "differing-lengths",
        Place("sheet", "6-2(a)"),
        "In self-attention queries and key-value pairs correspond one to one; in cross-attention "
        "their numbers may differ.",
        "One layer is given four combinations of lengths, and compared with plain arithmetic.",
        differing_lengths,
    ),
    Experiment(
        92,
        "audio-and-text",
        Place("handout", "multi-modal"),
        "Attention(Q_audio, K_text, V_text) fuses audio and text; they need not be synchronised, "
        "nor be of the same length.",
        "Frames of a recording are the queries, words of another width the keys and values. The "
        "words are shifted, then the frames, then a word is left out.",
        audio_and_text,
    ),
    Experiment(
        30,
        "modalities",
        Place("sheet", "6-2(a)"),
        "Cross-attention is often used to bring features of different modalities together, such "
        "as text prompts and image features.",
        "Patches of an image attend to the words of a prompt, and a text decoder reads an image's "
        "patches, then a recording's frames. The gradient of each row with respect to the source "
        "is computed.",
        modalities,
    ),
    Experiment(
        92,
        "shuffled-source",
        Place("handout", "exercise"),
        "Show that the output stays the same if keys and values are shifted or shuffled, for "
        "example reversed, both in the same way.",
        "Seven queries attend to eleven pairs of keys and values as they stand, reversed, shifted "
        "and shuffled; then the values alone are reversed.",
        shuffled_pairs,
        (r"\sum_j a_j v_j = \sum_j a_{\pi(j)} v_{\pi(j)}",),
        kind="asked",
    ),
    Experiment(
        41,
        "four-kinds",
        Place("homework", "1.1(c)"),
        "The question names four types of attention, self or cross and hard or soft, and asks "
        "which of them preserves values; the answer is the hard one.",
        "The same function is called with one or two sequences, and with β = 1/√d or β = ∞. The "
        "weights are checked for being 0 or 1.",
        four_kinds,
    ),
)
