"""Views of the attention of language models, text classifiers and encoders of text.

    language model      p of every token and of the next ones, and a continuation
    text classifier     p of every label
    encoder             p of tokens in the place of [MASK]

A hidden word receives no attention. In a language model its own row still reads it, through the
residual connection, and predicts the next token; a classifier that averages its tokens leaves the
word out of the mean.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.decode.engine.pick import open_session
from regard.decode.search.greedy import greedy
from regard.look.align import words
from regard.look.effect import changed
from regard.look.record import record
from regard.look.view import Effect, View, maps, read_words
from regard.model.classifier import TextClassifier
from regard.model.encoder import TextEncoder
from regard.model.language import LanguageModel
from regard.task.inspect.changes import (
    NONE,
    Changes,
    ids_of,
    names_of,
    units_of,
    with_end,
    with_head_effects,
)
from regard.task.search import check_length

if TYPE_CHECKING:
    from regard.task.encoder import TextEmbedder
    from regard.task.label import Labeler
    from regard.task.language import Generator

LIKELY = 10
"""Number of most probable tokens in a view."""

WRITTEN = 12
"""Number of tokens that a language model continues with."""

TOKENS = 4096
"""Number of tokens whose logits are in memory at a time."""

LONGEST = 1024
"""Maximum length of a text for effects, which take a forward pass for each word and each head."""

TITLE = "What it attended to"


@torch.inference_mode()
def inspect_generator(
    generator: "Generator", text: str, changes: Changes = NONE, *, effect: bool = False
) -> View:
    """The attention of a language model, the probability of each token, and a continuation."""
    model, settings, tokenizer = generator.model, generator.search, generator.tokenizer
    ids = tokenizer.encode(text)
    if not ids:
        raise ValueError("text (nothing) must have a token to look at")
    check_length("text", len(ids), settings.length)
    context = [settings.start, *ids]
    with changes.made(model):
        with open_session(model, rows=1, length=len(context) + WRITTEN) as session:
            (written,) = greedy(
                session, [context], end=settings.end, max_length=WRITTEN, banned=settings.banned
            )
        with record(model) as records:
            states = model.states(ids_of(context, model))
    logs = _log_p(model, states, ids_of(ids, model))[0]
    best = model.output(states[0, -1]).float().softmax(-1).cpu().topk(min(LIKELY, tokenizer.size))
    likely = best.indices.tolist()
    pieces, after = tokenizer.pieces(context), tokenizer.pieces([*ids, likely[0]])
    numbers = with_end(words(after[:-1]))
    view = View(
        title=TITLE,
        maps=maps(records, (), pieces, after, target_words=numbers),
        source=text,
        text=_continuation(tokenizer.decode(ids), tokenizer.decode([*ids, *written.tokens])),
        tokens=tuple(zip(after, logs.exp().tolist())),
        labels=tuple(zip(tokenizer.pieces(likely), best.values.tolist())),
        answers="The next token",
        more={
            "logP": float(logs.sum()),
            "continued": [tokenizer.decode([*ids, token]) for token in likely],
        },
    )
    if not effect or len(ids) > LONGEST:
        return _without_effects(view, len(ids)) if effect else view
    labels, units = [*ids, likely[0]], units_of(read_words(numbers) or ())

    def answer(rows: int = 1) -> Float[Tensor, "B L"]:
        states = model.states(ids_of(context, model).expand(rows, -1))
        return _log_p(model, states, ids_of(labels, model))

    with replace(changes, hidden=()).made(model):
        falls = _falls(model, units, len(context), answer)
    with changes.made(model):
        view = with_head_effects(model, view, lambda: answer().sum())
    names = names_of(units, pieces)
    return replace(view, effect=Effect(names, tuple(units), falls, tuple(after)))


def _continuation(text: str, longer: str) -> str:
    """The continuation of a text, on one line."""
    return " ⏎ ".join(longer.removeprefix(text).strip().splitlines())


def _log_p(
    model: LanguageModel, states: Float[Tensor, "B L D"], labels: Int[Tensor, "1 T"]
) -> Float[Tensor, "B T"]:
    """log p of these tokens, each from the state before it, with few logits in memory at a time."""
    T = labels.shape[1]
    parts = [
        -torch.nn.functional.cross_entropy(
            model.output(chunk).float().mT,
            labels[:, begin : begin + TOKENS].expand(len(chunk), -1),
            reduction="none",
        )
        for begin, chunk in zip(range(0, T, TOKENS), states[:, :T].split(TOKENS, 1))
    ]
    return torch.cat(parts, 1).cpu()


@torch.inference_mode()
def inspect_labeler(
    labeler: "Labeler", text: str, changes: Changes = NONE, *, effect: bool = False
) -> View:
    """The labels of a text, and the attention of its tokens."""
    from regard.task.label import encode_texts

    model, tokenizer = labeler.model, labeler.tokenizer
    (ids,) = encode_texts(tokenizer, [text], labeler._longest)
    notes: tuple[str, ...] = ()
    if len(tokenizer.encode(text)) >= len(ids):
        notes = (f"The text is longer than the model reads: the first {len(ids) - 1} tokens.",)
    x = ids_of(ids, model)
    with replace(changes, hidden=()).made(model):
        p = without_words(model, x, [changes.hidden]).softmax(-1)[0].cpu()
    with changes.made(model), record(model) as records:
        model.features(x)
    pieces = tokenizer.pieces(ids)
    numbers = with_end(words(pieces[:-1]))
    order = p.argsort(descending=True).tolist()
    view = View(
        title=TITLE,
        maps=maps(records, pieces, source_words=numbers),
        source=text,
        text=labeler.labels[order[0]],
        labels=tuple((labeler.labels[n], float(p[n])) for n in order),
        answers="The label",
        notes=notes,
    )
    if not effect or len(ids) > LONGEST:
        return _without_effects(view, len(ids)) if effect else view
    units, best = units_of(numbers), order[0]

    def logs(units: Sequence[Sequence[int]]) -> Float[Tensor, "U"]:
        parts = _parts(units, max(1, TOKENS // len(ids)))
        scores = [without_words(model, x, part).log_softmax(-1)[:, best] for part in parts]
        return torch.cat(scores).cpu()

    with replace(changes, hidden=()).made(model):
        falls = logs([()]) - logs(units)
        view = with_head_effects(model, view, lambda: logs([changes.hidden])[0])
    effects = Effect(names_of(units, pieces), tuple(units), falls[:, None], (view.text,))
    return replace(view, effect=effects)


def without_words(
    model: TextClassifier, tokens: Int[Tensor, "1 S"], units: Sequence[Sequence[int]]
) -> Float[Tensor, "U N"]:
    """Logits of one text with each of these sets of positions hidden.

    Hidden positions receive no attention, and a mean over tokens leaves them out.
    """
    hidden = _hidden(units, tokens.shape[1]).to(tokens.device)
    with changed(model, hidden=hidden):
        states = model.features(tokens.expand(len(units), -1))
    if model.config.pool == "mean":
        visible = (~hidden[:, :, None]).to(states.dtype)
        return model.head((states * visible).sum(1) / visible.sum(1).clamp(min=1)).float()
    return model.head(states[:, -1]).float()


@torch.inference_mode()
def inspect_encoder(
    encoder: "TextEmbedder", text: str, changes: Changes = NONE, *, effect: bool = False
) -> View:
    """The attention of an encoder, and the most probable tokens in the place of [MASK]."""
    model, tokenizer = encoder.model, encoder.tokenizer
    ids, place = encoder._hide(text)
    check_length("text", len(ids))
    x = ids_of(ids, model)

    def logs(rows: int = 1) -> Float[Tensor, "B N"]:
        return encoder._guesses(model.features(x.expand(rows, -1))[:, place])

    with changes.made(model), record(model) as records:
        best = logs()[0].cpu().topk(min(LIKELY, tokenizer.size))
    pieces = tokenizer.pieces(ids)
    pieces[place] = "[MASK]"
    numbers = with_end(words(pieces[:-1]))
    likely = best.indices.tolist()
    view = View(
        title=TITLE,
        maps=maps(records, pieces, source_words=numbers),
        source=text,
        text=tokenizer.decode(likely[:1]).strip(),
        labels=tuple(zip(tokenizer.pieces(likely), best.values.exp().tolist())),
        answers="In the place of [MASK]",
    )
    if not effect or len(ids) > LONGEST:
        return _without_effects(view, len(ids)) if effect else view
    units, best_one = [unit for unit in units_of(numbers) if place not in unit], likely[0]
    with replace(changes, hidden=()).made(model):
        falls = _falls(model, units, len(ids), logs)[:, best_one, None].cpu()
    with changes.made(model):
        view = with_head_effects(model, view, lambda: logs()[0, best_one])
    return replace(view, effect=Effect(names_of(units, pieces), tuple(units), falls, (view.text,)))


def _without_effects(view: View, tokens: int) -> View:
    """Adds a note to a view that it has no effects, because the text is too long."""
    note = f"The text has {tokens:,} tokens: effects are found of up to {LONGEST:,}."
    return replace(view, notes=(*view.notes, note))


def _falls(
    model: LanguageModel | TextEncoder,
    units: Sequence[Sequence[int]],
    positions: int,
    answer: Callable[[int], Tensor],
) -> Tensor:
    """The fall of `answer(rows)` when each of these units is hidden, one in each row."""
    whole = answer(1)
    differences = [whole[:0]]
    for part in _parts(units, max(1, TOKENS // positions)):
        with changed(model, hidden=_hidden(part, positions)):
            differences.append(whole - answer(len(part)))
    return torch.cat(differences)


def _hidden(units: Sequence[Sequence[int]], positions: int) -> Tensor:
    hidden = torch.zeros(len(units), positions, dtype=torch.bool)
    for number, unit in enumerate(units):
        hidden[number, [place for place in unit if place < positions]] = True
    return hidden


def _parts(units: Sequence[Sequence[int]], size: int) -> list[Sequence[Sequence[int]]]:
    return [units[begin : begin + size] for begin in range(0, len(units), size)]
