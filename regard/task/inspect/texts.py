"""Texts: what a language model, a text classifier or an encoder attended to while it read one.

    language model      p of every token and of the next ones, and how it would go on
    text classifier     p of every label
    encoder             p of tokens in the place of [MASK]

Nobody attends to a word that is hidden. In a language model its own row still reads it, through the
residual connection, and predicts what follows; where a classifier averages its tokens, the word is
left out of the mean.
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
    from regard.task.encoder import TrainedEncoder
    from regard.task.label import Labeler
    from regard.task.language import Generator

LIKELY = 10
"""Tokens that are named, the likeliest first."""

WRITTEN = 12
"""Tokens with which a language model goes on."""

TOKENS = 4096
"""Tokens whose logits are in memory at a time."""

LONGEST = 1024
"""Tokens of a text whose effects are found, by a forward pass for each word and each head."""

TITLE = "What it attended to"


@torch.inference_mode()
def generated(
    generator: "Generator", text: str, changes: Changes = NONE, *, effect: bool = False
) -> View:
    """What a language model looked at in a text, how likely each token was, and how it goes on."""
    model, settings, tokenizer = generator.model, generator.search, generator.tokenizer
    ids = tokenizer.encode(text)
    if not ids:
        raise ValueError("text (nothing) must have a token to look at")
    check_length("text", len(ids), settings.length)
    given = [settings.start, *ids]
    with changes.made(model):
        with open_session(model, rows=1, length=len(given) + WRITTEN) as session:
            (written,) = greedy(
                session, [given], end=settings.end, max_length=WRITTEN, banned=settings.banned
            )
        with record(model) as seen:
            states = model.states(ids_of(given, model))
    logs = _log_p(model, states, ids_of(ids, model))[0]
    best = model.output(states[0, -1]).float().softmax(-1).cpu().topk(min(LIKELY, tokenizer.size))
    likely = best.indices.tolist()
    pieces, after = tokenizer.pieces(given), tokenizer.pieces([*ids, likely[0]])
    numbers = with_end(words(after[:-1]))
    view = View(
        title=TITLE,
        maps=maps(seen, (), pieces, after, target_words=numbers),
        source=text,
        text=_after(tokenizer.decode(ids), tokenizer.decode([*ids, *written.tokens])),
        tokens=tuple(zip(after, logs.exp().tolist())),
        labels=tuple(zip(tokenizer.pieces(likely), best.values.tolist())),
        answers="The next token",
        more={
            "logP": float(logs.sum()),
            "continued": [tokenizer.decode([*ids, token]) for token in likely],
        },
    )
    if not effect or len(ids) > LONGEST:
        return _noted(view, len(ids)) if effect else view
    wanted, units = [*ids, likely[0]], units_of(read_words(numbers) or ())

    def answer(rows: int = 1) -> Float[Tensor, "B L"]:
        states = model.states(ids_of(given, model).expand(rows, -1))
        return _log_p(model, states, ids_of(wanted, model))

    with replace(changes, hidden=()).made(model):
        falls = _falls(model, units, len(given), answer)
    with changes.made(model):
        view = with_head_effects(model, view, lambda: answer().sum())
    names = names_of(units, pieces)
    return replace(view, effect=Effect(names, tuple(units), falls, tuple(after)))


def _after(text: str, longer: str) -> str:
    """What a text goes on with, on one line."""
    return " ⏎ ".join(longer.removeprefix(text).strip().splitlines())


def _log_p(
    model: LanguageModel, states: Float[Tensor, "B L D"], labels: Int[Tensor, "1 T"]
) -> Float[Tensor, "B T"]:
    """log p of these tokens, each from the state before it; few logits in memory at a time."""
    T = labels.shape[1]
    parts = [
        -torch.nn.functional.cross_entropy(
            model.output(some).float().mT,
            labels[:, begin : begin + TOKENS].expand(len(some), -1),
            reduction="none",
        )
        for begin, some in zip(range(0, T, TOKENS), states[:, :T].split(TOKENS, 1))
    ]
    return torch.cat(parts, 1).cpu()


@torch.inference_mode()
def labelled(
    labeler: "Labeler", text: str, changes: Changes = NONE, *, effect: bool = False
) -> View:
    """A text labelled, and what its tokens looked at."""
    from regard.task.label import encoded

    model, tokenizer = labeler.model, labeler.tokenizer
    (ids,) = encoded(tokenizer, [text], labeler.longest)
    notes: tuple[str, ...] = ()
    if len(tokenizer.encode(text)) >= len(ids):
        notes = (f"The text is longer than the model reads: the first {len(ids) - 1} tokens.",)
    x = ids_of(ids, model)
    with replace(changes, hidden=()).made(model):
        p = without_words(model, x, [changes.hidden]).softmax(-1)[0].cpu()
    with changes.made(model), record(model) as seen:
        model.features(x)
    pieces = tokenizer.pieces(ids)
    numbers = with_end(words(pieces[:-1]))
    order = p.argsort(descending=True).tolist()
    view = View(
        title=TITLE,
        maps=maps(seen, pieces, source_words=numbers),
        source=text,
        text=labeler.labels[order[0]],
        labels=tuple((labeler.labels[n], float(p[n])) for n in order),
        answers="The label",
        notes=notes,
    )
    if not effect or len(ids) > LONGEST:
        return _noted(view, len(ids)) if effect else view
    units, best = units_of(numbers), order[0]

    def logs(units: Sequence[Sequence[int]]) -> Float[Tensor, "U"]:
        parts = _parts(units, max(1, TOKENS // len(ids)))
        found = [without_words(model, x, some).log_softmax(-1)[:, best] for some in parts]
        return torch.cat(found).cpu()

    with replace(changes, hidden=()).made(model):
        falls = logs([()]) - logs(units)
        view = with_head_effects(model, view, lambda: logs([changes.hidden])[0])
    effects = Effect(names_of(units, pieces), tuple(units), falls[:, None], (view.text,))
    return replace(view, effect=effects)


def without_words(
    model: TextClassifier, tokens: Int[Tensor, "1 S"], units: Sequence[Sequence[int]]
) -> Float[Tensor, "U N"]:
    """Logits of one text with each of these sets of positions hidden.

    Nobody attends to what is hidden, and where tokens are averaged, it is left out of the mean.
    """
    hidden = _hidden(units, tokens.shape[1]).to(tokens.device)
    with changed(model, hidden=hidden):
        states = model.features(tokens.expand(len(units), -1))
    if model.config.pool == "mean":
        seen = (~hidden[:, :, None]).to(states.dtype)
        return model.head((states * seen).sum(1) / seen.sum(1).clamp(min=1)).float()
    return model.head(states[:, -1]).float()


@torch.inference_mode()
def filled(
    encoder: "TrainedEncoder", text: str, changes: Changes = NONE, *, effect: bool = False
) -> View:
    """What an encoder's tokens looked at, and what might stand in the place of [MASK]."""
    model, tokenizer = encoder.model, encoder.tokenizer
    ids, place = encoder.masked(text)
    check_length("text", len(ids))
    x = ids_of(ids, model)

    def logs(rows: int = 1) -> Float[Tensor, "B N"]:
        return encoder.guesses(model.features(x.expand(rows, -1))[:, place])

    with changes.made(model), record(model) as seen:
        best = logs()[0].cpu().topk(min(LIKELY, tokenizer.size))
    pieces = tokenizer.pieces(ids)
    pieces[place] = "[MASK]"
    numbers = with_end(words(pieces[:-1]))
    likely = best.indices.tolist()
    view = View(
        title=TITLE,
        maps=maps(seen, pieces, source_words=numbers),
        source=text,
        text=tokenizer.decode(likely[:1]).strip(),
        labels=tuple(zip(tokenizer.pieces(likely), best.values.exp().tolist())),
        answers="In the place of [MASK]",
    )
    if not effect or len(ids) > LONGEST:
        return _noted(view, len(ids)) if effect else view
    units, best_one = [unit for unit in units_of(numbers) if place not in unit], likely[0]
    with replace(changes, hidden=()).made(model):
        falls = _falls(model, units, len(ids), logs)[:, best_one, None].cpu()
    with changes.made(model):
        view = with_head_effects(model, view, lambda: logs()[0, best_one])
    return replace(view, effect=Effect(names_of(units, pieces), tuple(units), falls, (view.text,)))


def _noted(view: View, tokens: int) -> View:
    """A view that says why it has no effects."""
    note = f"The text has {tokens:,} tokens: effects are found of up to {LONGEST:,}."
    return replace(view, notes=(*view.notes, note))


def _falls(
    model: LanguageModel | TextEncoder,
    units: Sequence[Sequence[int]],
    positions: int,
    answer: Callable[[int], Tensor],
) -> Tensor:
    """How far the `answer` for so many rows falls, with one of these units hidden in each."""
    whole = answer(1)
    found = [whole[:0]]
    for some in _parts(units, max(1, TOKENS // positions)):
        with changed(model, hidden=_hidden(some, positions)):
            found.append(whole - answer(len(some)))
    return torch.cat(found)


def _hidden(units: Sequence[Sequence[int]], positions: int) -> Tensor:
    hidden = torch.zeros(len(units), positions, dtype=torch.bool)
    for number, unit in enumerate(units):
        hidden[number, [place for place in unit if place < positions]] = True
    return hidden


def _parts(units: Sequence[Sequence[int]], size: int) -> list[Sequence[Sequence[int]]]:
    return [units[begin : begin + size] for begin in range(0, len(units), size)]
