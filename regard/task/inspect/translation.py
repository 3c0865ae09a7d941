"""A translation made again, with something changed inside: its attention, and the beam tree."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.decode.search.beam import Beams, power
from regard.decode.search.constraints import Constraints
from regard.decode.search.hypothesis import Hypothesis
from regard.look.align import words
from regard.look.effect import effect_of_units, log_p
from regard.look.record import record
from regard.look.view import Best, Effect, View, maps
from regard.task.inspect.changes import (
    NONE,
    Changes,
    ids_of,
    names_of,
    units_of,
    with_end,
    with_head_effects,
)
from regard.task.translator import Translator, longest


@dataclass(frozen=True)
class Branch:
    """A hypothesis of a beam search at one step: the token it was extended by, and its parent."""

    step: int
    parent: int | None
    """The number of the branch before it in the tree."""
    token: int
    gain: float
    """log p of the token"""
    log_p: float
    """log p of all so far"""


class Tree(Beams):
    """A beam search that remembers every hypothesis that was open."""

    branches: list[Branch]

    def begin(self) -> None:
        super().begin()
        self.branches = []
        self._open: list[int | None] = [None]

    def extend(self, logits: Float[Tensor, "R N"], best: Any) -> None:
        t = self.t
        super().extend(logits, best)
        rows = zip(
            self.parents[0, t].tolist(),
            self.tokens[0, t].tolist(),
            self.gains[0, t].tolist(),
            self.open[0].tolist(),
        )
        now: list[int | None] = []
        for parent, token, gain, total in rows:
            if total == -torch.inf:
                now.append(None)
                continue
            now.append(len(self.branches))
            self.branches.append(Branch(t, self._open[parent], token, gain, total))
        self._open = now


@dataclass(frozen=True)
class Translated:
    """A translation, its view, and the tree that the search went through."""

    view: View
    hypotheses: tuple[Hypothesis, ...]
    tree: tuple[Branch, ...]
    tokens: tuple[int, ...]


@torch.inference_mode()
def translated(
    translator: Translator,
    text: str,
    changes: Changes = NONE,
    *,
    beams: int | None = None,
    effect: bool = False,
    others: int = 5,
) -> Translated:
    """Translates one text, with something changed inside the model, and looks at it.

    `effect` says what hiding each word, and switching each head off, does to what was written.
    `others` are tokens that might have been written instead, at each step.
    """
    settings = translator.search if beams is None else replace(translator.search, beams=beams)
    model, start, end = translator.model, settings.start, settings.end
    ((part, *rest),) = translator._cut_all([text], align=True)
    if not part.ids:
        raise ValueError("text (nothing) must have a word to translate")
    _check_forced(changes.forced, model.config.vocabulary)
    with changes.made(model):
        found, tree = _searched(translator, part, changes.forced, settings)
        tokens = [*changes.forced, *found[0].tokens] if found else list(changes.forced)
        source = ids_of([*part.ids, end], model)
        with record(model) as seen:
            logits = model(source, ids_of([start, *tokens], model))[0].float().log_softmax(-1)
    pieces = translator.source_tokenizer.pieces([*part.ids, end])
    output = translator.tokenizer.pieces([*tokens, end])
    before = translator.tokenizer.pieces([start, *tokens])
    scores = logits[range(len(output)), [*tokens, end]].cpu()
    written = len(tokens) + 1
    if found and len(found[0].token_scores) == len(found[0].tokens):  # it was cut before its end
        output[-1], written = "…", len(tokens)
    source_words = with_end(part.words)
    target_words = with_end(words(output[:-1]))
    made = maps(seen, pieces, before, output, source_words=source_words, target_words=target_words)
    notes: tuple[str, ...] = ()
    if rest:
        notes = (
            f"The text is longer than the model is used to: the first {len(part.ids)} tokens.",
        )
    top = logits.topk(min(others, logits.shape[-1]), -1)
    alternatives = [
        [[token, name, p] for token, name, p in zip(row, translator.tokenizer.pieces(row), ps)]
        for row, ps in zip(top.indices.tolist(), top.values.exp().tolist())
    ]
    view = View(
        title="What it attended to while it translated",
        maps=made,
        source=text.strip(),
        text=" ".join(translator.tokenizer.decode(tokens).splitlines()),
        tokens=tuple(zip(output[:written], scores.exp().tolist())),
        best=_best(translator),
        notes=notes,
        more={
            "ids": [*tokens],
            "alternatives": alternatives,
            "logP": float(scores[:written].sum()),
            "hypotheses": [
                {
                    "text": translator.tokenizer.decode([*changes.forced, *one.tokens]),
                    "score": one.score,
                    "ids": [*changes.forced, *one.tokens],
                }
                for one in found
            ],
            "tree": [
                [one.step, one.parent, one.token, name, one.gain, one.log_p]
                for one, name in zip(tree, translator.tokenizer.pieces([b.token for b in tree]))
            ],
        },
    )
    if effect:
        units = units_of(source_words)
        parts = dict(zip(units, names_of(units, pieces)))
        view = _with_effects(translator, view, source, tokens, parts, output, changes)
    return Translated(view, tuple(found), tuple(tree), tuple(tokens))


def _with_effects(
    translator: Translator,
    view: View,
    source: Int[Tensor, "1 S"],
    tokens: Sequence[int],
    parts: Mapping[tuple[int, ...], str],
    output: Sequence[str],
    changes: Changes,
) -> View:
    """The same view, with what each part of the source and each head did for what was written."""
    model, start, end = translator.model, translator.search.start, translator.search.end
    with replace(changes, hidden=()).made(model):
        falls = effect_of_units(model, source, tokens, list(parts), start, end)

    def answer() -> Tensor:
        return log_p(model, source, tokens, start, end).sum()

    with changes.made(model):
        view = with_head_effects(model, view, answer)
    effect = Effect(tuple(parts.values()), tuple(parts), falls, tuple(output))
    return replace(view, effect=effect)


def _searched(
    translator: Translator, part: Any, forced: Sequence[int], settings: Any
) -> tuple[list[Hypothesis], list[Branch]]:
    """The best hypotheses after what is forced, and every one that was open on the way."""
    most = min(longest(len(part.ids)), settings.length)
    left = max(1, most - len(forced))
    width = max(2, settings.beams) if settings.beams > 1 else 1
    with translator._open([part], beams=width, length=most + 1) as session:
        limits = Constraints(
            1,
            session.vocabulary,
            end=settings.end,
            max_length=left,
            banned=settings.banned,
            renormalize=settings.renormalize,
            device=session.device,
        )
        prompt = [[settings.start, *forced]]
        penalty = power(settings.length_penalty)
        last, kind = session.begin(prompt), session.scores
        tree = Tree(last, limits, width, width, penalty, kind, settings.horizon)
        session.run(tree)
    return tree.hypotheses()[0], tree.branches


def _check_forced(forced: Sequence[int], vocabulary: int) -> None:
    for token in forced:
        if not 0 <= token < vocabulary:
            raise ValueError(f"forced ({token}) must be a token, from 0 to {vocabulary - 1}")


def _best(translator: Translator) -> Best | None:
    found = translator._found
    if found is None:
        return None
    best = found.best
    return Best(best.layer, best.head, best.shift, found.shares[..., best.shift].float())
