"""A trained model looked into: what it attended to, with something changed inside if one likes.

    view(load("run"), text="A dog runs.")             a View of any task's model
    translated(translator, text, Changes(off=[…]))    a translation made again, and its beam tree

Every number is of the one text or image that is shown. Weights are those with which the text was
written: the model is given it again, all at once, which makes the same weights as the search made
step by step.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from regard.decode.search.beam import Beams, power
from regard.decode.search.constraints import Constraints
from regard.decode.search.hypothesis import Hypothesis
from regard.look.align import words
from regard.look.effect import HeadName, changed, effect_of_heads, effect_of_units, log_p
from regard.look.record import Recording, record
from regard.look.view import Best, Effect, Picture, View, maps
from regard.model.vit import VisionTransformer
from regard.task.search import open_reading
from regard.task.translator import Translator, longest

if TYPE_CHECKING:
    from regard.task.classify import Classifier
    from regard.task.label import Labeler
    from regard.task.language import Generator
    from regard.task.read import Reader

UNITS = 256
"""Parts of a source that are hidden one by one, at most."""


@dataclass(frozen=True)
class Changes:
    """What is changed inside a model before it answers."""

    off: tuple[HeadName, ...] = ()
    beta: tuple[tuple[str, int, float], ...] = ()
    """β of a head, times a factor."""
    hidden: tuple[int, ...] = ()
    """Positions of the source that nobody may attend to."""
    forced: tuple[int, ...] = ()
    """Tokens that the output begins with."""

    def made(self, model: torch.nn.Module) -> Any:
        factors = {(name, head): factor for name, head, factor in self.beta}
        return changed(model, off=self.off, beta=factors, hidden=self.hidden)


NONE = Changes()


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
    part, *rest = translator.cut(text, align=True)
    if not part.ids:
        raise ValueError("text (nothing) must have a word to translate")
    _check_forced(changes.forced, model.config.vocabulary)
    with changes.made(model):
        found, tree = _searched(translator, part, changes.forced, settings)
        tokens = [*changes.forced, *found[0].tokens] if found else list(changes.forced)
        source = _ids([*part.ids, end], model)
        with record(model) as seen:
            logits = model(source, _ids([start, *tokens], model))[0].float().log_softmax(-1)
    pieces = translator.source_tokenizer.pieces([*part.ids, end])
    output = translator.tokenizer.pieces([*tokens, end])
    before = translator.tokenizer.pieces([start, *tokens])
    scores = logits[range(len(output)), [*tokens, end]].cpu()
    written = len(tokens) + 1
    if found and len(found[0].token_scores) == len(found[0].tokens):  # it was cut before its end
        output[-1], written = "…", len(tokens)
    source_words = _with_end(part.words)
    target_words = _with_end(words(output[:-1]))
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
        view = with_effects(translator, view, part.ids, tokens, changes)
    return Translated(view, tuple(found), tuple(tree), tuple(tokens))


def with_effects(
    translator: Translator,
    view: View,
    source: Sequence[int],
    tokens: Sequence[int],
    changes: Changes,
) -> View:
    """The same view, with what each word and each head did for what was written."""
    model, start, end = translator.model, translator.search.start, translator.search.end
    ids = _ids([*source, end], model)
    one = view.map("cross")
    numbers = one.column_words or tuple(range(len(one.columns)))
    units = _units(numbers)
    names = ["".join(one.columns[n] for n in unit).replace("▁", " ").strip() for unit in units]
    with replace(changes, hidden=()).made(model):
        falls = effect_of_units(model, ids, tokens, units, start, end)

    def answer() -> Tensor:
        return log_p(model, ids, tokens, start, end).sum()

    with changes.made(model):
        view = _with_head_effects(model, view, answer)
    return replace(view, effect=Effect(tuple(names), tuple(units), falls, one.written or ()))


def _with_head_effects(model: torch.nn.Module, view: View, answer: Any) -> View:
    heads = [
        (name, h) for one in view.maps for name in one.layers for h in range(one.weights.shape[1])
    ]
    falls = dict(zip(heads, effect_of_heads(model, heads, answer)))
    made = tuple(
        replace(
            one,
            falls=torch.tensor(
                [
                    [float(falls[name, h]) for h in range(one.weights.shape[1])]
                    for name in one.layers
                ]
            ),
        )
        for one in view.maps
    )
    return replace(view, maps=made)


def _searched(
    translator: Translator, part: Any, forced: Sequence[int], settings: Any
) -> tuple[list[Hypothesis], list[Branch]]:
    """The best hypotheses after what is forced, and every one that was open on the way."""
    most = min(longest(len(part.ids)), settings.length)
    left = max(1, most - len(forced))
    width = max(2, settings.beams) if settings.beams > 1 else 1
    with translator.open([part], beams=width, length=most + 1) as session:
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
        tree = Tree(session.begin(prompt), limits, width, width, penalty, session.scores)
        session.run(tree)
    return tree.hypotheses()[0], tree.branches


def _check_forced(forced: Sequence[int], vocabulary: int) -> None:
    for token in forced:
        if not 0 <= token < vocabulary:
            raise ValueError(f"forced ({token}) must be a token, from 0 to {vocabulary - 1}")


def _best(translator: Translator) -> Best | None:
    found = translator.found
    if found is None:
        return None
    best = found.best
    return Best(best.layer, best.head, best.shift, found.shares[..., best.shift].float())


def _ids(tokens: Sequence[int], model: Any) -> Tensor:
    device = next(model.parameters()).device
    return torch.tensor([list(tokens)], device=device)


def _with_end(numbers: Sequence[int]) -> list[int]:
    """EOS is a word of its own, so that what rests on it is seen."""
    return [*numbers, max(numbers, default=-1) + 1]


def _units(numbers: Sequence[int]) -> list[tuple[int, ...]]:
    """The positions of each word; of each token where there is but one word."""
    if max(numbers, default=-1) < 2:
        numbers = range(len(numbers))
    places: dict[int, list[int]] = {}
    for place, word in enumerate(numbers):
        if word >= 0:
            places.setdefault(word, []).append(place)
    return [tuple(unit) for unit in places.values()][:UNITS]


# Images


@torch.inference_mode()
def classified(
    classifier: "Classifier", image: Any, changes: Changes = NONE, *, effect: bool = False
) -> View:
    """An image classified, with patches hidden or heads changed, and where the patches looked."""
    model = classifier.model
    pixels = torch.tensor(classifier.preparation.pixels(image))
    weight = next(model.parameters())
    x = classifier.preparation.normalized(pixels[None].to(weight.device)).to(weight.dtype)
    first = 0 if model.class_token is None else 1
    hidden = [place - first for place in changes.hidden]
    with replace(changes, hidden=()).made(model):
        p = without_patches(model, x, [hidden]).softmax(-1)[0].cpu()
        with changes.made(model), record(model) as seen:
            model.features(x)
    rows, columns = model.patches.grid
    names = ["class"] * first + [
        f"{n // columns + 1},{n % columns + 1}" for n in range(rows * columns)
    ]
    order = p.argsort(descending=True).tolist()
    picture = Picture(pixels, rows, columns, first)
    view = View(
        title="What the patches attended to",
        maps=maps(seen, names, picture=True),
        text=classifier.labels[order[0]],
        labels=tuple((classifier.labels[n], float(p[n])) for n in order),
        picture=picture,
        more={"positions": _position_similarity(model)},
    )
    if not effect:
        return view
    units = [[n] for n in range(rows * columns)][:UNITS]
    best = order[0]
    with replace(changes, hidden=()).made(model):
        whole = without_patches(model, x, [[]]).log_softmax(-1)[:, best]
        falls = whole - without_patches(model, x, units).log_softmax(-1)[:, best]

        def answer() -> Tensor:
            return without_patches(model, x, [hidden]).log_softmax(-1)[0, best]

        view = _with_head_effects(model, view, answer)
    places = tuple((unit[0] + first,) for unit in units)
    parts = tuple(names[first:][: len(units)])
    return replace(view, effect=Effect(parts, places, falls[:, None].cpu(), (view.text,)))


def without_patches(
    model: VisionTransformer, x: Float[Tensor, "1 C Y X"], units: Sequence[Sequence[int]]
) -> Float[Tensor, "U N"]:
    """Logits of one image with each of these sets of patches hidden.

    Nobody attends to a hidden patch, and where patches are averaged, it is left out of the mean.
    """
    first = 0 if model.class_token is None else 1
    rows, columns = model.patches.grid
    hidden = torch.zeros(len(units), first + rows * columns, dtype=torch.bool, device=x.device)
    for number, unit in enumerate(units):
        hidden[number, [first + n for n in unit]] = True
    with changed(model, hidden=hidden):
        states = model.features(x.expand(len(units), *x.shape[1:]))
    if model.config.pool == "mean":
        seen = (~hidden[:, first:, None]).to(states.dtype)
        pooled = (states[:, first:] * seen).sum(1) / seen.sum(1).clamp(min=1)
    else:
        pooled = states[:, 0]
    return model.head(pooled if model.norm is None else model.norm(pooled)).float()


def _position_similarity(model: VisionTransformer) -> list[list[float]] | None:
    """The cosine between the positions of all patches, where positions are added to them."""
    position = model.patches.position
    if position is None:
        return None
    rows, columns = model.patches.grid
    weight = next(model.parameters())
    zero = torch.zeros(
        1, rows * columns, model.config.width, device=weight.device, dtype=weight.dtype
    )
    try:
        vectors = torch.nn.functional.normalize((position(zero) - zero)[0].float(), dim=-1)
    except (TypeError, ValueError):
        return None
    return (vectors @ vectors.mT).cpu().tolist()


@torch.inference_mode()
def read(reader: "Reader", image: Any, changes: Changes = NONE, *, effect: bool = False) -> View:
    """An image read, and where the decoder looked for each character."""
    model, settings = reader.model, reader.search
    pixels = torch.tensor(reader.preparation.pixels(image))
    weight = model.target.table.weight
    x = reader.preparation.normalized(pixels[None].to(weight.device)).to(weight.dtype)
    with changes.made(model):
        found = _read_hypotheses(model, x, settings)
        tokens = found[0].tokens if found else []
        with record(model) as seen:
            model(x, _ids([settings.start, *tokens], model))
        scores = log_p(model, x, tokens, settings.start, settings.end)[0]
    rows, columns = reader.grid
    names = [f"{n // columns + 1},{n % columns + 1}" for n in range(rows * columns)]
    output = reader.tokenizer.pieces([*tokens, settings.end])
    view = View(
        title="Where it looked while it read",
        maps=maps(
            seen, names, reader.tokenizer.pieces([settings.start, *tokens]), output, picture=True
        ),
        text=reader.tokenizer.decode(tokens),
        tokens=tuple(zip(output, scores.exp().tolist())),
        picture=Picture(pixels, rows, columns),
        more={"logP": float(scores.sum())},
    )
    if not effect:
        return view
    units = [(n,) for n in range(rows * columns)][:UNITS]
    with replace(changes, hidden=()).made(model):
        falls = effect_of_units(model, x, tokens, units, settings.start, settings.end)
    return replace(
        view, effect=Effect(tuple(names[: len(units)]), tuple(units), falls, tuple(output))
    )


def _read_hypotheses(model: Any, x: Tensor, settings: Any) -> list[Hypothesis]:
    from regard.task.search import find

    def opened(**hints: int) -> Any:
        return open_reading(model, x, None, **hints)

    return find(opened, 1, settings)[0]


# Texts


@torch.inference_mode()
def generated(generator: "Generator", text: str, changes: Changes = NONE) -> View:
    """What a language model looked at in a text, and how likely each of its tokens was."""
    model, settings = generator.model, generator.search
    ids = generator.tokenizer.encode(text)
    if not ids:
        raise ValueError("text (nothing) must have a token to look at")
    given = [settings.start, *ids]
    with changes.made(model), record(model) as seen:
        logs = model(_ids(given, model))[0].float().log_softmax(-1).cpu()
    last = logs[-1].topk(min(10, logs.shape[-1]))
    pieces = generator.tokenizer.pieces(given)
    after = [
        *generator.tokenizer.pieces(ids),
        generator.tokenizer.pieces([int(last.indices[0])])[0],
    ]
    p = logs[range(len(ids)), ids].exp().tolist()
    return View(
        title="What it attended to",
        maps=maps(seen, pieces, pieces, after),
        source=text,
        tokens=tuple(zip(pieces[1:], p)),
        labels=tuple(
            zip(generator.tokenizer.pieces(last.indices.tolist()), last.values.exp().tolist())
        ),
    )


@torch.inference_mode()
def labelled(labeler: "Labeler", text: str, changes: Changes = NONE) -> View:
    """A text labelled, and what its tokens looked at."""
    from regard.task.label import encoded

    (ids,) = encoded(labeler.tokenizer, [text], labeler.longest)
    model = labeler.model
    with changes.made(model), record(model) as seen:
        p = model(_ids(ids, model)).float().softmax(-1)[0].cpu()
    pieces = labeler.tokenizer.pieces(ids)
    if next(iter(seen.values())).key.shape[2] > len(pieces):
        pieces = ["class", *pieces]
    order = p.argsort(descending=True).tolist()
    return View(
        title="What it attended to",
        maps=maps(_whole(seen), pieces),
        source=text,
        text=labeler.labels[order[0]],
        labels=tuple((labeler.labels[n], float(p[n])) for n in order),
    )


def _whole(seen: Recording) -> Recording:
    """Layers that computed every row; a last one that was asked for its first row alone is left."""
    kept = {name: one for name, one in seen.items() if one.query.shape[2] == one.key.shape[2]}
    return Recording(kept or seen)


def view(
    predictor: Any,
    text: str | None = None,
    image: Any = None,
    changes: Changes = NONE,
    *,
    effect: bool = False,
) -> View:
    """The view of a text or an image, by whatever a model was trained for."""
    from regard.task.classify import Classifier
    from regard.task.label import Labeler
    from regard.task.language import Generator
    from regard.task.read import Reader

    sees = isinstance(predictor, Classifier | Reader)
    if sees and image is None:
        raise ValueError("this model sees images; give one: --image picture.png")
    if not sees and text is None:
        raise ValueError('this model reads text; give some: --text "…"')
    match predictor:
        case Classifier():
            return classified(predictor, image, changes, effect=effect)
        case Reader():
            return read(predictor, image, changes, effect=effect)
        case Generator():
            return generated(predictor, str(text), changes)
        case Labeler():
            return labelled(predictor, str(text), changes)
        case Translator():
            if predictor.found is None:
                predictor.find_head([str(text)])
            return translated(predictor, str(text), changes, effect=effect).view
    raise ValueError(f"a {type(predictor).__name__} cannot be looked into")


@torch.inference_mode()
def numbers_of_head(
    translator: Translator, text: str, attention: str, head: int, changes: Changes = NONE
) -> dict[str, Any]:
    """Queries, keys and values of one head while a text was translated, for attention by hand."""
    model, end, start = translator.model, translator.search.end, translator.search.start
    found = translated(translator, text, changes)
    source = translator.cut(text)[0].ids
    with changes.made(model), record(model, lambda name: name == attention) as seen:
        model(_ids([*source, end], model), _ids([start, *found.tokens], model))
    asked = seen[attention]
    heads = asked.query.shape[1]
    if not 0 <= head < heads:
        raise ValueError(f"head ({head}) of {attention} must lie from 0 to {heads - 1}")
    one = next(one for one in found.view.maps if attention in one.layers)
    L, S, K = asked.query.shape[2], asked.key.shape[2], asked.query.shape[3]
    group = head // (heads // asked.key.shape[1])
    value = asked.value
    assert value is not None
    allowed = None
    if asked.mask is not None:
        allowed = asked.mask.tensor(L, S)[0].expand(heads, L, S)[head].int().tolist()
    beta = asked.beta[head] if isinstance(asked.beta, Tensor) else asked.beta
    return {
        "query": asked.query[0, head].double().tolist(),
        "key": asked.key[0, group].double().tolist(),
        "value": value[0, group].double().tolist(),
        "beta": K**-0.5 if beta is None else float(beta),
        "allowed": allowed,
        "rows": list(one.written or one.rows),
        "columns": list(one.columns),
        "weights": asked.weights()[0, head].double().tolist(),
    }
