"""What tasks that write text have in common: examples, the loss, search, and their scores.

    texts → ids, end → encoder                                      sources close with an end sign
            start, ids → decoder → ids, end → text                  targets

`translate` and `dates` train a `Transduction`; `read` writes its text with the same `search`.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Int32
from torch import Tensor, nn

from regard.attention.host import whole
from regard.attention.packed import Packed
from regard.checkpoint import CONFIG, Saved
from regard.config import from_json, to_json
from regard.data.batch import Batch, Ids, plan, text_batch
from regard.data.tokenizer import AnyTokenizer, files, read_pair
from regard.decode.beam import beam, power
from regard.decode.corpus import in_order
from regard.decode.greedy import greedy
from regard.decode.hypothesis import Hypothesis
from regard.decode.step import Step, translation
from regard.look.align import Example, Found, Head, Links, cross, find, links, words
from regard.model.transformer import TextSource, Transformer, TransformerConfig, TransformerShape
from regard.train.config import TrainingConfig
from regard.train.loss import cross_entropy

About: TypeAlias = dict[str, Any]
"""A task's section of config.json."""

Progress: TypeAlias = Callable[[str, float], None]
"""Told now and then: what is being done, and which share of it, from 0 to 1."""

Pair: TypeAlias = tuple[str, str]
"""A source and its target, as text."""

Judge: TypeAlias = Callable[[Sequence[str], Sequence[str]], dict[str, float]]
"""Scores of what was written beside what should have been."""


# Examples


@runtime_checkable
class Examples(Protocol):
    """Pairs of token ids, by number; a `data.text.Store` is one."""

    @property
    def lengths(self) -> Int32[np.ndarray, "n sides"]:
        """How many tokens each side of each example has."""

    def __len__(self) -> int: ...

    def pair(self, i: int) -> tuple[Ids, Ids]: ...


class Listed:
    """Examples in memory."""

    def __init__(self, pairs: Sequence[Pair], source: AnyTokenizer, target: AnyTokenizer):
        sides = [
            tokenizer.encode_packed([pair[side] for pair in pairs])
            for side, tokenizer in enumerate((source, target))
        ]
        self.lengths = np.stack([lengths for _, lengths in sides], 1).astype(np.int32)
        self._ids = [np.split(ids, np.cumsum(lengths)[:-1]) for ids, lengths in sides]

    def __len__(self) -> int:
        return len(self.lengths)

    def pair(self, i: int) -> tuple[Ids, Ids]:
        return self._ids[0][i], self._ids[1][i]


class Chosen:
    """Some of the examples."""

    def __init__(self, examples: Examples, indices: np.ndarray):
        self.examples, self.indices = examples, indices
        self.lengths = examples.lengths[indices]

    def __len__(self) -> int:
        return len(self.indices)

    def pair(self, i: int) -> tuple[Ids, Ids]:
        return self.examples.pair(int(self.indices[i]))


# Search


@dataclass(frozen=True)
class Search:
    """How a model is searched for what it has to say, as its folder keeps it."""

    start: int
    """The token that every target begins with."""
    end: int
    """The token that closes sources and targets."""
    pad: int
    """The token that means nothing."""
    banned: tuple[int, ...] = ()
    """Tokens that are never said."""
    beams: int = 4
    """Hypotheses that stay open; 1 is greedy."""
    length: int = 250
    """The most tokens of a target, and of a source that is not cut into parts."""
    length_penalty: float = 1.0
    """log p is divided by the number of tokens to this power."""
    renormalize: bool = False
    """Whether probabilities are those among the tokens that are not banned."""

    def __post_init__(self) -> None:
        for name in ("beams", "length"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} ({getattr(self, name)}) must be 1 or more")

    @classmethod
    def of(cls, tokenizer: AnyTokenizer, **settings: Any) -> "Search":
        """For a tokenizer's special tokens, of which only the end is ever said."""
        never = {tokenizer.pad, tokenizer.start, tokenizer.unknown} - {tokenizer.end, None}
        return cls(
            start=tokenizer.start,
            end=tokenizer.end,
            pad=tokenizer.pad,
            banned=tuple(sorted(token for token in never if token is not None)),
            **settings,
        )

    @classmethod
    def read(cls, about: Mapping[str, Any], where: str) -> "Search":
        """What a folder's task says; it may say other things as well."""
        known = {field.name for field in fields(cls)}
        said = {name: value for name, value in about.items() if name in known}
        return from_json(cls, said, where, "task")


def search(
    model: Transformer,
    source: Tensor,
    lengths: Packed | None,
    how: Search,
    *,
    most: int | Sequence[int] | None = None,
    n_best: int = 1,
) -> list[list[Hypothesis]]:
    """The best hypotheses for each source, which is packed ids or a batch of images.

    `most` bounds the tokens of all of them, or of each, below the search's own bound.

    Caches are what a sentence costs in memory, for each layer of the decoder, in numbers:

        beams · (most + 1) · (K + V) · key heads        its own keys and values, allocated at once
        source · (K + V) · key heads                    those of the source, shared by its beams

    K + V is 128 in the paper's models, and there are 8 key heads in the base one, with 6 layers: a
    sentence of 20 tokens that may come to 90 takes 9.4 MB in float32 with 4 beams, and half of that
    in bfloat16. They are gone when the batch is: a corpus takes no more than its largest batch.
    """
    device = model.target.table.weight.device
    sentences = len(source) if lengths is None else len(lengths)
    bounds = [most] * sentences if isinstance(most, int | None) else list(most)
    limits = [how.length if bound is None else min(bound, how.length) for bound in bounds]
    step, state = translation(
        model,
        source.to(device),
        None if lengths is None else lengths.to(device),
        capacity=max(limits, default=0) + 1,
    )
    if how.renormalize and how.banned:
        step = _without(step, how.banned)
    prompts = [[how.start]] * sentences
    banned = how.banned
    if how.beams == 1 and n_best == 1:
        found = greedy(step, state, prompts, end=how.end, max_length=limits, banned=banned)
        return [[hypothesis] for hypothesis in found]
    return beam(
        step,
        state,
        prompts,
        end=how.end,
        max_length=limits,
        banned=banned,
        width=max(how.beams, n_best),
        n_best=n_best,
        penalty=power(how.length_penalty),
    )


def _without(step: Step, banned: Sequence[int]) -> Step:
    """A step for which some tokens do not exist, so that the others share their probability."""

    def renormalized(tokens: Tensor, state: Any) -> tuple[Tensor, Any]:
        logits, state = step(tokens, state)
        never = torch.tensor(banned, device=logits.device)
        return logits.index_fill(-1, never, -math.inf), state

    return renormalized


# Use


@dataclass(frozen=True)
class Attended:
    """Where a model looked in the source while it wrote each token of a target."""

    source: list[str]
    target: list[str]
    weights: Float[Tensor, "layers H L S"]
    """Row n is of the step that wrote token n."""


@dataclass(frozen=True)
class Written:
    """A text that was found for a source."""

    text: str
    score: float
    """By which it was ranked: log p by the number of tokens to the power of the length penalty."""
    tokens: list[int]
    token_scores: list[float]
    """log p of each token, and of the end sign where it was reached."""
    attention: Attended | None = None
    """Where it looked while it was written, if that was asked for; all of it is of this one, none
    of hypotheses that lost."""
    alignment: Links | None = None
    """Words of the source and of this, counted from 0, if they were asked for."""

    @property
    def log_p(self) -> float:
        return math.fsum(self.token_scores)


NOTHING = Written("", 0.0, [], [])
"""What is written for an empty text."""


@dataclass(frozen=True)
class _Part:
    """A text's tokens, or a stretch of them, and the words of the text that they belong to."""

    ids: list[int]
    words: list[int]


class Translator:
    """A trained model with its tokenizers: texts in, texts out."""

    def __init__(
        self,
        model: Transformer,
        tokenizers: tuple[AnyTokenizer, AnyTokenizer] | str,
        how: Search,
        about: Mapping[str, Any] | None = None,
        folder: Path | None = None,
    ):
        """Where there are no tokenizers, a sentence that says so."""
        self.model = model
        self._tokenizers = tokenizers
        self.how = how
        self.about = dict(about or {})
        self.folder = folder
        self.head: Head | None = None
        """The head that word alignments are taken from; found when they are first asked for."""
        self.found: Found | None = None
        """How it was found."""

    @classmethod
    def of(cls, saved: Saved) -> "Translator":
        """What a model's folder holds, ready for use."""
        if not isinstance(saved.model, Transformer):
            raise ValueError(f"{saved.folder} holds a {type(saved.model).__name__}, no Transformer")
        about = saved.task or {}
        how = Search.read(about, str(saved.folder / CONFIG))
        tokenizers: tuple[AnyTokenizer, AnyTokenizer] | str
        try:
            tokenizers = read_pair(saved.folder)
        except ValueError as error:  # the model is of use without one
            tokenizers = str(error)
        return cls(saved.model, tokenizers, how, about, saved.folder)

    @property
    def source_tokenizer(self) -> AnyTokenizer:
        """That of the texts that are read."""
        return self._tokenizer(0)

    @property
    def tokenizer(self) -> AnyTokenizer:
        """That of the texts that are written; often the same."""
        return self._tokenizer(1)

    def _tokenizer(self, side: int) -> AnyTokenizer:
        if isinstance(self._tokenizers, str):
            raise ValueError(self._tokenizers)
        return self._tokenizers[side]

    def translate(
        self, texts: Sequence[str], *, beams: int | None = None, batch: int = 64
    ) -> list[str]:
        """A text for each text; an empty one for an empty one."""
        if isinstance(texts, str):
            raise ValueError("texts must be several strings, not one; pass [text]")
        return list(self.stream(texts, beams=beams, batch=batch))

    def stream(
        self, texts: Iterable[str | None], *, beams: int | None = None, batch: int = 64
    ) -> Iterator[str]:
        """The same for any number of texts, each as soon as it and all before it are ready."""
        for best in self.translations(texts, beams=beams, batch=batch):
            yield best[0].text

    def hypotheses(
        self, texts: Sequence[str], *, n_best: int = 1, beams: int | None = None
    ) -> list[list[Written]]:
        """The best few for each text, best first."""
        return list(self.translations(texts, n_best=n_best, beams=beams))

    def translations(
        self,
        texts: Iterable[str | None],
        *,
        n_best: int = 1,
        beams: int | None = None,
        batch: int = 64,
        attention: bool = False,
        align: bool = False,
    ) -> Iterator[list[Written]]:
        """For each text the best few, best first, with their scores and what else is asked for.

        They come as soon as they and all before them are ready; None among the texts says that no
        more are there for now. There is one for every text at least, which for an empty text is
        empty.

        A text that is longer than the model is used to is cut into parts, at spaces where there
        are any. What is found for the parts is joined, the best with the best, and so on.
        """
        for name, number in (("n_best", n_best), ("batch", batch)):
            whole(name, number)
        how = self.how if beams is None else replace(self.how, beams=beams)
        counts: deque[int] = deque()

        def parts() -> Iterator[_Part | None]:
            for text in texts:
                if text is None:
                    yield None
                    continue
                cut = self._parts(self._encode(text), align)
                counts.append(len(cut))
                yield from cut

        def decode(some: list[_Part]) -> list[list[Written]]:
            return self._decode(some, how, n_best, attention, align)

        ready: list[list[Written]] = []
        for written in in_order(
            parts(), decode, length=lambda part: len(part.ids), sentences=batch
        ):
            ready.append(written)
            if len(ready) == counts[0]:
                yield ready[0] if len(ready) == 1 else self._joined(ready)
                ready = []
                counts.popleft()

    def attention(self, text: str, written: str | Sequence[int]) -> Attended:
        """The cross-attention of every layer and head while this was, or is, written."""
        source = self._encode(text)
        tokens = self.tokenizer.encode(written) if isinstance(written, str) else list(written)
        (weights,) = cross(self.model, [(source, tokens)], self.how.start, self.how.end)
        return self._attended(source, tokens, weights)

    # Search

    def _encode(self, text: str) -> list[int]:
        return self.source_tokenizer.encode(text.strip())  # as the texts it was trained on

    def _parts(self, ids: list[int], align: bool = False) -> list[_Part]:
        """The ids in stretches of at most the model's length; each but the last ends a word."""
        most, begin, places = self.how.length, 0, [0]
        while len(ids) - begin > most:
            middle = begin + most // 2
            pieces = self.source_tokenizer.pieces(ids[middle : begin + most + 1])
            begins = [n for n, piece in enumerate(pieces) if piece.startswith("▁")]
            begin = max(begin + 1, middle + begins[-1] if begins else begin + most)
            places.append(begin)
        numbers = words(self.source_tokenizer.pieces(ids)) if align else []
        return [
            _Part(ids[one:two], numbers[one:two])
            for one, two in zip(places, [*places[1:], len(ids)])
        ]

    def _decode(
        self, parts: list[_Part], how: Search, n_best: int, attention: bool, align: bool
    ) -> list[list[Written]]:
        real = [part for part in parts if part.ids]
        found = self._search([part.ids for part in real], how, n_best)
        written = [[self._written(one, how) for one in best] or [NOTHING] for best in found]
        if attention or align:
            if align and self.head is None:
                self._find([(part, best[0]) for part, best in zip(real, written)])
            written = [
                self._looked([(part, one) for one in best], attention, align)
                for part, best in zip(real, written)
            ]
        results = iter(written)
        nothing = [replace(NOTHING, alignment=[])] if align else [NOTHING]
        return [next(results) if part.ids else nothing for part in parts]

    def _search(self, sources: list[list[int]], how: Search, n_best: int) -> list[list[Hypothesis]]:
        if not sources:
            return []
        batch = text_batch(
            [(source, ()) for source in sources], how.start, how.end, source_end=how.end
        )
        most = [longest(len(source)) for source in sources]
        return search(self.model, batch.source, batch.source_lengths, how, most=most, n_best=n_best)

    def _written(self, hypothesis: Hypothesis, how: Search) -> Written:
        tokens, scores = hypothesis.tokens, hypothesis.token_scores
        # A model may say a line break, but a text stays one line.
        text = " ".join(self.tokenizer.decode(tokens).splitlines())
        return Written(text, _ranked(scores, how), tokens, scores)

    def _joined(self, parts: list[list[Written]]) -> list[Written]:
        """Of the parts of a text, the best with the best; where one has fewer, its last again."""
        results = []
        for rank in range(max(map(len, parts))):
            chosen = [best[min(rank, len(best) - 1)] for best in parts]
            scores = [score for one in chosen for score in one.token_scores]
            alignment: Links | None = None
            if chosen[0].alignment is not None:
                counts = [len(one.text.split()) for one in chosen]
                alignment = [
                    (source, sum(counts[:n]) + target)
                    for n, one in enumerate(chosen)
                    for source, target in one.alignment or ()
                ]
            seen = [one.attention for one in chosen if one.attention is not None]
            results.append(
                Written(
                    " ".join(filter(None, (one.text for one in chosen))),
                    _ranked(scores, self.how),
                    [token for one in chosen for token in one.tokens],
                    scores,
                    _side_by_side(seen) if seen else None,
                    alignment,
                )
            )
        return results

    # Attention

    def _attended(self, source: list[int], tokens: list[int], weights: Tensor) -> Attended:
        end = self.how.end
        return Attended(
            self.source_tokenizer.pieces([*source, end]),
            self.tokenizer.pieces([*tokens, end]),
            weights,
        )

    def _looked(
        self, pairs: list[tuple[_Part, Written]], attention: bool, align: bool
    ) -> list[Written]:
        """The same texts, with where the model looked while it wrote them."""
        head = self.head or Head(len(self.model.decoder.blocks) - 1, 0)
        layer = None if attention else head.layer
        tokens = [(part.ids, one.tokens) for part, one in pairs]
        results = []
        for (part, one), weights in zip(
            pairs, cross(self.model, tokens, self.how.start, self.how.end, layer)
        ):
            linked: Links | None = None
            if align:
                rows = weights[head.layer if attention else 0, head.head, head.shift :]
                linked = self._links(rows, part.words, one)
            seen = self._attended(part.ids, one.tokens, weights) if attention else None
            results.append(replace(one, attention=seen, alignment=linked))
        return results

    def _links(self, rows: Tensor, source_words: list[int], one: Written) -> Links:
        target_words = words(self.tokenizer.pieces(one.tokens))
        last = len(one.text.split()) - 1
        # A token that the text does not show, such as an unknown one, is in no word of it.
        return [
            (source, target)
            for source, target in links(rows, source_words, target_words)
            if target <= last
        ]

    def find_head(self, texts: Sequence[str]) -> Found | None:
        """Finds the head to align words by: from what a run was validated on, or else from these.

        None where neither says anything, because no text has two words.
        """
        cut = [self._parts(self._encode(text), align=True)[0] for text in texts]
        parts = [part for part in cut if part.ids]
        found = self._search([part.ids for part in parts], replace(self.how, beams=1), 1)
        written = [self._written(best[0], self.how) for best in found]
        return self._find(list(zip(parts, written)))

    def _find(self, pairs: Sequence[tuple[_Part, Written]]) -> Found | None:
        def example(part: _Part, tokens: list[int]) -> Example:
            return Example(part.ids, tokens, part.words, words(self.tokenizer.pieces(tokens)))

        examples = [
            example(self._parts(self._encode(source), align=True)[0], self.tokenizer.encode(target))
            for source, target in self._validated()[:SAMPLE]
        ]
        if not examples:
            examples = [example(part, one.tokens) for part, one in pairs[:SAMPLE]]
        self.found = find(self.model, examples, self.how.start, self.how.end)
        self.head = None if self.found is None else self.found.best
        return self.found

    def _validated(self) -> list[Pair]:
        """What the run that this model is of was validated on; nothing where there is no run."""
        if self.folder is None or self.about.get("name") != "translate":
            return []
        from regard.task.translate import validated

        try:
            return validated(self.folder.parent, self.about, str(self.folder))
        except (ValueError, OSError):
            return []  # a model by itself, or a run whose files are gone


SAMPLE = 64
"""Texts that are looked at for a head, at most."""


def _ranked(token_scores: Sequence[float], how: Search) -> float:
    """log p, divided as a search divides it, greedy or not."""
    return math.fsum(token_scores) / power(how.length_penalty)(max(1, len(token_scores)))


def _side_by_side(parts: Sequence[Attended]) -> Attended:
    """A text's parts saw nothing of each other."""
    layers, heads = parts[0].weights.shape[:2]
    blocks = [
        torch.block_diag(*(part.weights[layer, head] for part in parts))
        for layer in range(layers)
        for head in range(heads)
    ]
    return Attended(
        [piece for part in parts for piece in part.source],
        [piece for part in parts for piece in part.target],
        torch.stack(blocks).unflatten(0, (layers, heads)),
    )


def longest(source: int) -> int:
    """The most tokens that are looked for, from the number of the source's."""
    return 3 * source + 30


# Training


class Transduction:
    """Text to text, as `train.fit` wants a task: sequence transduction, in the paper's words."""

    unit = "tokens"
    signatures: Mapping[str, str] = MappingProxyType({})

    def __init__(
        self,
        model: Transformer,
        tokenizers: tuple[AnyTokenizer, AnyTokenizer],
        examples: Examples,
        held_out: Sequence[Pair],
        *,
        score: str,
        judge: Judge,
        how: Search,
        training: TrainingConfig,
        about: About,
        notes: Sequence[str] = (),
    ):
        self.model, self.score = model, score
        self.tokenizers, self.examples, self.held_out = tokenizers, examples, list(held_out)
        self.judge, self.how, self.training = judge, how, training
        self.notes = list(notes)
        """What the user should know of the data, one line each."""
        self._about = about

    def plan(self, epoch: int) -> list[np.ndarray]:
        lengths = self.examples.lengths
        return list(plan(lengths, self.training.batch, self.training.seed, epoch))

    def batch(self, indices: np.ndarray, step: int) -> Batch:
        return self._batch([self.examples.pair(int(i)) for i in indices])

    def _batch(self, pairs: Sequence[tuple[Ids, Ids]]) -> Batch:
        how = self.how
        return text_batch(pairs, how.start, how.end, source_end=how.end)

    def loss(self, batch: Batch) -> tuple[Tensor, int]:
        return transduction_loss(self.model, batch, self.training.smoothing)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """The judge's scores of greedy search, and the perplexity, both on held-out examples."""
        assert isinstance(model, Transformer)
        how = replace(self.how, beams=1)
        translator = Translator(model, self.tokenizers, how)
        written = translator.translate([source for source, _ in self.held_out], batch=256)
        scores = self.judge(written, [target for _, target in self.held_out])
        return {**scores, "perplexity": self._perplexity(model)}

    @torch.no_grad()
    def _perplexity(self, model: Transformer) -> float:
        """e to the mean loss of a token, without smoothing."""
        pairs = Listed(self.held_out, *self.tokenizers)
        total, count = 0.0, 0
        for indices in plan(pairs.lengths, self.training.batch, 0, 0):
            batch = self._batch([pairs.pair(int(i)) for i in indices])
            loss, tokens = transduction_loss(model, batch.to(model.output.weight.device), 0.0)
            total, count = total + float(loss), count + tokens
        return math.exp(min(total / count, 700.0))

    def files(self) -> dict[str, bytes | Path]:
        return dict(files(*self.tokenizers))

    def about(self) -> About:
        return {**self._about, **to_json(self.how)}


def transduction_loss(model: Transformer, batch: Batch, smoothing: float) -> tuple[Tensor, int]:
    """The loss of a batch of texts, or of images and texts, summed over its labels."""
    memory = model.encode(batch.source, batch.source_lengths)
    states = model.states(batch.target, memory, batch.target_lengths, batch.source_lengths)
    return cross_entropy(states, model.output, batch.labels, smoothing), batch.tokens


def build_transformer(
    shape: TransformerShape, tokenizers: tuple[AnyTokenizer, AnyTokenizer], seed: int
) -> Transformer:
    """A new model of this shape for these tokenizers; the seed decides its first weights."""
    source, target = tokenizers
    joint = source is target
    if not joint and shape.share == "all":
        shape = replace(shape, share="target")
    config = TransformerConfig(
        target.size, source=TextSource(vocabulary=None if joint else source.size), **asdict(shape)
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Transformer(config)


def exact(written: Sequence[str], wanted: Sequence[str]) -> dict[str, float]:
    """The share of texts that are right to the last character."""
    right = sum(map(str.__eq__, written, wanted))
    return {"exact_match": right / max(1, len(wanted))}
