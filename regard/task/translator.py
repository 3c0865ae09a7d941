"""Texts in, texts out: a trained model with its tokenizers, and all that is known of what it wrote.

text → ids, in parts where it is long → search → text, scores, attention, alignment
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from regard.attention.checks import check_integer, shown
from regard.attention.notebook import facts
from regard.checkpoint import CONFIG, Saved
from regard.data.batch import text_batch, text_source
from regard.data.table import tagged
from regard.data.tokenizer import AnyTokenizer, read_pair
from regard.decode.batching import FIRST, TOKENS, WINDOW, batches, in_order, usual
from regard.decode.engine.ensemble import Weights, ensemble, shares
from regard.decode.engine.pick import pick
from regard.decode.engine.session import Session
from regard.decode.search.beam import power
from regard.decode.search.hypothesis import Hypothesis
from regard.look.align import Example, Found, Head, Links, cross, links, words
from regard.look.align import find as find_head
from regard.model.notebook import model_html
from regard.model.transformer import Transformer
from regard.task.precision import load_saved
from regard.task.search import (
    SearchSettings,
    check_length,
    check_same_tokens,
    find,
    open_reading,
)
from regard.task.settings import Precision, check_texts

Pair: TypeAlias = tuple[str, str]
"""A source and its target."""


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
    """log p of each token, and of EOS where it was reached."""
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
class Part:
    """A text's tokens, or a stretch of them, and the words of the text that they belong to."""

    ids: list[int]
    words: list[int]
    others: tuple[list[int], ...] = ()
    """The same as each other member of an ensemble reads it."""
    prefix: tuple[int, ...] = ()
    """What the translation must begin with."""


class Translator:
    """A trained model with its tokenizers: texts in, texts out."""

    def __init__(
        self,
        model: Transformer,
        tokenizers: tuple[AnyTokenizer, AnyTokenizer] | str,
        settings: SearchSettings,
        about: Mapping[str, Any] | None = None,
        held_out: Callable[[], Sequence[Pair]] = tuple,
    ):
        """Where there are no tokenizers, a sentence that says so."""
        self.model = model
        self._tokenizers = tokenizers
        self.search = settings
        self.about = dict(about or {})
        self.held_out = held_out
        """Reads the validation pairs that are kept in the run's folder."""
        self.head: Head | None = None
        """The head that word alignments are taken from; found when they are first asked for."""
        self.found: Found | None = None
        """How it was found."""
        self.name = "a translator"
        """Its folder, where it has one."""
        known: Any = self.about.get("tags") or ()
        self.tags = tuple(map(str, known))
        """What its sources were tagged with, such as languages."""

    @classmethod
    def of(cls, saved: Saved, held_out: Callable[[], Sequence[Pair]] = tuple) -> "Translator":
        """What a model's folder holds, ready for use."""
        if not isinstance(saved.model, Transformer):
            raise ValueError(f"{saved.folder} holds a {type(saved.model).__name__}, no Transformer")
        about = saved.task or {}
        settings = SearchSettings.read(about, str(saved.folder / CONFIG))
        tokenizers: tuple[AnyTokenizer, AnyTokenizer] | str
        try:
            tokenizers = read_pair(saved.folder)
        except ValueError as error:  # the model is of use without one
            tokenizers = str(error)
        translator = cls(saved.model, tokenizers, settings, about, held_out)
        translator.name = str(saved.folder)
        return translator

    @classmethod
    def read(
        cls,
        folder: str | Path,
        others: Sequence[str | Path] = (),
        weights: Weights | None = None,
        *,
        device: str | torch.device = "cpu",
        precision: Precision = "fp32",
    ) -> "Translator":
        """That of a folder, a model's or a run's, or an ensemble with those of others."""
        first, *rest = (
            cls.of(load_saved(name, device, precision)[0]) for name in (folder, *others)
        )
        return first.ensemble(rest, weights) if rest or weights else first

    def ensemble(
        self, others: "Sequence[Translator]", weights: Weights | None = None
    ) -> "TranslatorEnsemble":
        """This and others as one, which averages their probabilities at every step."""
        return TranslatorEnsemble([self, *others], weights)

    def __repr__(self) -> str:
        config = self.model.config
        return (
            f"{type(self).__name__}({self.name!r}, width {config.width}, "
            f"{self.search.beams} beams, at most {self.search.length} tokens)"
        )

    def _repr_html_(self) -> str:
        rows: dict[str, object] = {"folder": self.name, "beams": self.search.beams}
        rows |= {"longest": f"{self.search.length} tokens"}
        if self.tags:
            rows["tags"] = ", ".join(self.tags)
        if not isinstance(self._tokenizers, str):
            reads, writes = self._tokenizers
            rows |= {"reads": repr(reads), "writes": repr(writes)}
        return facts(type(self).__name__, rows, model_html(self.model))

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
        self, texts: Sequence[str], *, beams: int | None = None, batch: int | None = None
    ) -> list[str]:
        """A text for each text; an empty one for an empty one."""
        check_texts(texts)
        best = self.translations(texts, beams=beams, batch=batch, low_latency=False)
        return [written[0].text for written in best]

    def stream(
        self, texts: Iterable[str | None], *, beams: int | None = None, batch: int | None = None
    ) -> Iterator[str]:
        """The same for any number of texts, each as soon as it and all before it are ready."""
        for best in self.translations(texts, beams=beams, batch=batch):
            yield best[0].text

    def hypotheses(
        self, texts: Sequence[str], *, n_best: int = 1, beams: int | None = None
    ) -> list[list[Written]]:
        """The best few for each text, best first."""
        check_texts(texts)
        return list(self.translations(texts, n_best=n_best, beams=beams))

    def translations(
        self,
        texts: Iterable[str | None],
        *,
        n_best: int = 1,
        beams: int | None = None,
        batch: int | None = None,
        prefix: str | Sequence[str] = "",
        tags: Sequence[str] = (),
        attention: bool = False,
        align: bool = False,
        low_latency: bool = True,
    ) -> Iterator[list[Written]]:
        """For each text the best few, best first, with their scores and what else is asked for.

        They come as soon as they and all before them are ready; None among the texts says that no
        more are there for now. There is one for every text at least, which for an empty text is
        empty. With `low_latency` the first few texts are decoded first, for somebody who waits;
        without, all of them are sorted by length, which is faster.

        `prefix` is what every translation must begin with, or there is one for each text; it is
        scored with the rest. `tags` say what is asked for, of a model that was trained with them,
        such as the language to write. A text that is longer than the model is used to is cut into
        parts, at spaces where there are any. What is found for the parts is joined, the best with
        the best, and so on. A `batch` has 64 sentences on a CPU and 512 on a GPU unless told, or as
        many as its memory has room for.
        """
        device = self.model.target.table.weight.device
        batch = usual(device) if batch is None else batch
        for name, number in (("n_best", n_best), ("batch", batch)):
            check_integer(name, number)
        settings = self.search if beams is None else replace(self.search, beams=beams)
        batch = min(batch, self._room(max(settings.beams, n_best)) or batch)
        self.check_tags(tags)
        counts: deque[int] = deque()
        prefixes = repeat(prefix) if isinstance(prefix, str) else iter(prefix)

        def parts() -> Iterator[Part | None]:
            for some in _together(texts):
                for cut in self.cuts(some, align, tags):
                    if attention:
                        check_length("text", sum(len(part.ids) for part in cut), self.search.length)
                    if forced := next(prefixes, "").strip():
                        ids = tuple(self.tokenizer.encode(forced))
                        self._check_prefix(forced, ids, settings)
                        cut[0] = replace(cut[0], prefix=ids)
                    counts.append(len(cut))
                    yield from cut
                if len(some) < FIRST:
                    yield None

        def search(some: list[Part]) -> tuple[list[Part], list[list[Hypothesis]]]:
            return some, self._search(some, settings, n_best)

        def write(found: tuple[list[Part], list[list[Hypothesis]]]) -> list[list[Written]]:
            return self._written(*found, settings)

        def looked(some: list[Part]) -> list[list[Written]]:
            return self._with_attention(some, write(search(some)), attention, align)

        # A GPU goes on with the next batch while the texts of the last are written down.
        apart = device.type == "cuda" and not (attention or align)
        found: Iterator[list[Written]] = in_order(
            parts(),
            search if apart else looked,
            length=lambda part: len(part.ids),
            sentences=batch,
            window=max(WINDOW, 32 * batch),
            low_latency=low_latency,
            finish=write if apart else None,
        )
        ready: list[list[Written]] = []
        for written in found:
            ready.append(written)
            if len(ready) == counts[0]:
                yield ready[0] if len(ready) == 1 else self.joined(ready)
                ready = []
                counts.popleft()

    def attention(self, text: str, written: str | Sequence[int]) -> Attended:
        """The cross-attention of every layer and head while this was, or is, written."""
        source = self._encode(text)
        tokens = self.tokenizer.encode(written) if isinstance(written, str) else list(written)
        check_length("text", len(source), self.search.length)
        check_length("translation", len(tokens), self.search.length)
        (weights,) = cross(self.model, [(source, tokens)], self.search.start, self.search.end)
        return self._attended(source, tokens, weights)

    # Search

    def _encode(self, text: str) -> list[int]:
        return self._encode_batch([text])[0]

    def _encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Without white space around them, as the texts it was trained on."""
        return self.source_tokenizer.encode_batch([text.strip() for text in texts])

    def check_tags(self, tags: Sequence[str]) -> None:
        """Refuses a tag that no source of its training had."""
        for tag in tags:
            if tag not in self.tags:
                known = (
                    f"known are {', '.join(self.tags)}" if self.tags else "it was trained without"
                )
                raise ValueError(f"tag ({tag}) is unknown to {self.name}; {known}")

    def cut(self, text: str, align: bool = False, tags: Sequence[str] = ()) -> list[Part]:
        """A text as the model reads it; every part of it has its tags."""
        return self.cuts([text], align, tags)[0]

    def cuts(self, texts: Sequence[str], align: bool, tags: Sequence[str]) -> list[list[Part]]:
        """The same of several texts, which are tokenized together."""
        return [
            self._cut(text, ids, align, tags) for text, ids in zip(texts, self._encode_batch(texts))
        ]

    def _cut(self, text: str, ids: list[int], align: bool, tags: Sequence[str]) -> list[Part]:
        if not ids or not tags:
            return self._parts(ids, align)
        marks = self._marks(ids, text, tags)
        parts = self._parts(ids, align, max(1, self.search.length - len(marks)))
        nowhere = [-1] * len(marks) if align else []  # a tag is no word of the text
        return [Part([*marks, *part.ids], [*nowhere, *part.words]) for part in parts]

    def _marks(self, ids: list[int], text: str, tags: Sequence[str]) -> list[int]:
        """The tokens of tags before a text of these ids, as they were in training."""
        whole = self._encode(tagged(text, tags))
        if whole[len(whole) - len(ids) :] != ids:  # a tokenizer that joins words
            return self._encode(tagged("", tags))
        return whole[: len(whole) - len(ids)]

    def _parts(self, ids: list[int], align: bool = False, most: int | None = None) -> list[Part]:
        """The ids in stretches of at most so many, by default the model's length; each but the last
        ends a word."""
        most, begin, places = most or self.search.length, 0, [0]
        while len(ids) - begin > most:
            middle = begin + most // 2
            pieces = self.source_tokenizer.pieces(ids[middle : begin + most + 1])
            begins = [n for n, piece in enumerate(pieces) if piece.startswith("▁")]
            begin = max(begin + 1, middle + begins[-1] if begins else begin + most)
            places.append(begin)
        numbers = words(self.source_tokenizer.pieces(ids)) if align else []
        return [
            Part(ids[one:two], numbers[one:two])
            for one, two in zip(places, [*places[1:], len(ids)])
        ]

    def _search(
        self, parts: Sequence[Part], settings: SearchSettings, n_best: int
    ) -> list[list[Hypothesis]]:
        """What is found for each part; nothing for those without tokens."""
        real = [part for part in parts if part.ids]
        if not real:
            return [[] for _ in parts]
        found = find(
            partial(self.open, real),
            len(real),
            settings,
            most=[longest(len(part.ids)) for part in real],
            n_best=n_best,
            prefixes=[part.prefix for part in real],
        )
        whole = iter(self._with_prefixes(real, found))
        return [next(whole) if part.ids else [] for part in parts]

    def _written(
        self, parts: Sequence[Part], found: list[list[Hypothesis]], settings: SearchSettings
    ) -> list[list[Written]]:
        """The texts of what was found, best first."""
        texts = iter(self._texts([one.tokens for best in found for one in best]))
        written = [
            [self._scored(next(texts), one, settings) for one in best] or [NOTHING]
            for best in found
        ]
        if any(part.prefix for part in parts):  # whose tokens were not ranked
            written = [sorted(best, key=lambda one: -one.score) for best in written]
        return written

    def _with_attention(
        self, parts: Sequence[Part], written: list[list[Written]], attention: bool, align: bool
    ) -> list[list[Written]]:
        """The same texts with what else is asked for."""
        if not (attention or align):
            return written
        if align and self.head is None:
            self._find([(part, best[0]) for part, best in zip(parts, written) if part.ids])
        nothing = [replace(NOTHING, alignment=[])] if align else [NOTHING]
        pairs = [(part, one) for part, best in zip(parts, written) if part.ids for one in best]
        size = max(1, FIRST * TOKENS // max((len(part.ids) for part, _ in pairs), default=1))
        looked = iter(
            [
                one
                for begin in range(0, len(pairs), size)
                for one in self._looked(pairs[begin : begin + size], attention, align)
            ]
        )
        return [
            [next(looked) for _ in best] if part.ids else nothing
            for part, best in zip(parts, written)
        ]

    def _check_prefix(self, forced: str, ids: tuple[int, ...], settings: SearchSettings) -> None:
        if len(ids) >= settings.length:
            raise ValueError(
                f"the prefix {shown(forced)} has {len(ids)} tokens, and a translation at most "
                f"{settings.length}; shorten it"
            )

    def _with_prefixes(
        self, parts: Sequence[Part], found: list[list[Hypothesis]]
    ) -> list[list[Hypothesis]]:
        """What was found, after the prefixes that were forced, with the scores of all."""
        forced = [n for n, part in enumerate(parts) if part.prefix]
        scores = self._token_scores([parts[n] for n in forced], [parts[n].prefix for n in forced])
        for n, before in zip(forced, scores):
            prefix = list(parts[n].prefix)
            begun = before[: len(prefix)]
            found[n] = [
                Hypothesis(
                    [*prefix, *one.tokens], one.score + sum(begun), [*begun, *one.token_scores]
                )
                for one in found[n]
            ]
        return found

    # Scores of given translations

    def score(self, pairs: Sequence[Pair], *, batch: int = 64) -> list[Written]:
        """Each target as if it were written for its source: log p of every token, and of EOS."""
        for texts in zip(*pairs):
            check_texts(texts)
        parts = [Part(self._encode(source), []) for source, _ in pairs]
        parts = [self.whole(part, source) for part, (source, _) in zip(parts, pairs)]
        targets = [self.tokenizer.encode(target.strip()) for _, target in pairs]
        for part, target in zip(parts, targets):
            check_length("text", max(map(len, (part.ids, *part.others))), self.search.length)
            check_length("translation", len(target), self.search.length)
        lengths = [max(len(part.ids), len(target)) for part, target in zip(parts, targets)]
        results: dict[int, Written] = {}
        for some in batches(lengths, batch, TOKENS * batch):
            scores = self._token_scores([parts[n] for n in some], [targets[n] for n in some])
            for n, one in zip(some, scores):
                ranked = _ranked(one, self.search)
                results[n] = Written(pairs[n][1], ranked, targets[n], one)
        return [results[n] for n in range(len(pairs))]

    def whole(self, part: Part, text: str) -> Part:
        """A part that is a whole text, as all who write together read it."""
        return part

    def _token_scores(
        self, parts: Sequence[Part], targets: Sequence[Sequence[int]]
    ) -> list[list[float]]:
        """log p of each token of these targets, and of EOS after them."""
        return self._log_p([part.ids for part in parts], targets)

    @torch.inference_mode()
    def _log_p(
        self, sources: Sequence[list[int]], targets: Sequence[Sequence[int]]
    ) -> list[list[float]]:
        """By this model alone, which is shown all of a target at once."""
        if not sources:
            return []
        start, end = self.search.start, self.search.end
        batch = text_batch(list(zip(sources, map(list, targets))), start, end, source_end=end)
        batch = batch.to(self.model.target.table.weight.device)
        logits = self.model(
            batch.source,
            batch.target,
            source_lengths=batch.source_lengths,
            target_lengths=batch.target_lengths,
        )[0].float()
        if self.search.renormalize:
            logits[:, list(self.search.banned)] = -math.inf
        logs = logits.log_softmax(-1).gather(1, batch.labels.view(-1, 1)).view(-1)
        return [one.tolist() for one in logs.cpu().split([len(one) + 1 for one in targets])]

    def open(self, parts: Sequence[Part], **hints: int) -> Session:
        return self._reading([part.ids for part in parts], **hints)

    def _room(self, beams: int) -> int | None:
        """Sentences of a batch for which the device has room; None for any number."""
        length = min(longest(TOKENS), self.search.length) + 1
        rows = pick(self.model).rows(length)
        return None if rows is None else max(1, rows // beams)

    def _reading(self, sources: Sequence[list[int]], **hints: int) -> Session:
        """A session of this model alone."""
        source, lengths = text_source(sources, self.search.end)
        return open_reading(self.model, source, lengths, **hints)

    def written(self, hypothesis: Hypothesis, settings: SearchSettings) -> Written:
        (text,) = self._texts([hypothesis.tokens])
        return self._scored(text, hypothesis, settings)

    def _texts(self, tokens: Sequence[list[int]]) -> list[str]:
        # A model may say a line break, but a text stays one line.
        return [" ".join(text.splitlines()) for text in self.tokenizer.decode_batch(tokens)]

    def _scored(self, text: str, one: Hypothesis, settings: SearchSettings) -> Written:
        return Written(text, _ranked(one.token_scores, settings), one.tokens, one.token_scores)

    def joined(self, parts: list[list[Written]]) -> list[Written]:
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
                    _ranked(scores, self.search),
                    [token for one in chosen for token in one.tokens],
                    scores,
                    _side_by_side(seen) if seen else None,
                    alignment,
                )
            )
        return results

    # Attention

    def _attended(self, source: list[int], tokens: list[int], weights: Tensor) -> Attended:
        end = self.search.end
        return Attended(
            self.source_tokenizer.pieces([*source, end]),
            self.tokenizer.pieces([*tokens, end]),
            weights,
        )

    def _looked(
        self, pairs: list[tuple[Part, Written]], attention: bool, align: bool
    ) -> list[Written]:
        """The same texts, with where the model looked while it wrote them."""
        head = self.head or Head(len(self.model.decoder.blocks) - 1, 0)
        layer = None if attention else head.layer
        tokens = [(part.ids, one.tokens) for part, one in pairs]
        results = []
        for (part, one), weights in zip(
            pairs, cross(self.model, tokens, self.search.start, self.search.end, layer)
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
        """Chooses the attention head for word alignments on the run's held-out pairs, if its folder
        has any, otherwise on these texts. None if no text has two words.
        """
        cut = [self.cut(text, align=True)[0] for text in texts]
        parts = [part for part in cut if part.ids]
        found = self._search(parts, replace(self.search, beams=1), 1)
        written = [self.written(best[0], self.search) for best in found]
        return self._find(list(zip(parts, written)))

    def _find(self, pairs: Sequence[tuple[Part, Written]]) -> Found | None:
        def example(part: Part, tokens: list[int]) -> Example:
            return Example(part.ids, tokens, part.words, words(self.tokenizer.pieces(tokens)))

        examples = [
            example(self.cut(source, align=True)[0], self.tokenizer.encode(target))
            for source, target in self._pairs()[:SAMPLE]
        ]
        if not examples:
            examples = [example(part, one.tokens) for part, one in pairs[:SAMPLE]]
        self.found = find_head(self.model, examples, self.search.start, self.search.end)
        self.head = None if self.found is None else self.found.best
        return self.found

    def _pairs(self) -> Sequence[Pair]:
        try:
            return self.held_out()
        except (ValueError, OSError):
            return ()  # a model without a run's folder


class TranslatorEnsemble(Translator):
    """Translators that write together: the mean of their probabilities chooses every token.

    Their sources may be tokenized differently, but what they write may not. The search is that of
    the first, and so are attention and alignments: heads of different models have no mean.
    """

    def __init__(self, members: Sequence[Translator], weights: Weights | None = None):
        first, *others = members
        if any(isinstance(member, TranslatorEnsemble) for member in members):
            raise ValueError("an ensemble is no member of another; name all translators at once")
        check_same_tokens(members)
        length = min(member.search.length for member in members)
        settings = replace(first.search, length=length)
        super().__init__(first.model, first._tokenizers, settings, first.about, first.held_out)
        self.name = first.name
        self.members, self.weights = list(members), shares(weights, len(members))
        own = first.source_tokenizer.to_bytes()
        self._alike = [other.source_tokenizer.to_bytes() == own for other in others]

    def _cut(self, text: str, ids: list[int], align: bool, tags: Sequence[str]) -> list[Part]:
        """In parts that are short enough for every member."""
        if tags:
            raise ValueError("tags are for a single translator, not for an ensemble")
        most = self.search.length
        while True:
            parts = self._parts(ids, align, most)
            if len(parts) == 1:
                read = [self._others(parts[0].ids, text)]
            else:
                decode = self.source_tokenizer.decode
                read = [self._others(part.ids, decode(part.ids)) for part in parts]
            longest = max(len(ids) for others in read for ids in (*others, ()))
            if longest <= self.search.length or most == 1:
                return [replace(part, others=others) for part, others in zip(parts, read)]
            most = max(1, most // 2)

    def _others(self, ids: list[int], text: str) -> tuple[list[int], ...]:
        """What all members but the first read of a text, of which the first reads these ids."""
        others = zip(self.members[1:], self._alike)
        return tuple(ids if alike else other._encode(text) for other, alike in others)

    def whole(self, part: Part, text: str) -> Part:
        return replace(part, others=self._others(part.ids, text))

    def _token_scores(
        self, parts: Sequence[Part], targets: Sequence[Sequence[int]]
    ) -> list[list[float]]:
        """log Σ_m w_m p_m, the mean that chooses."""
        read = zip(*((part.ids, *part.others) for part in parts))
        each = [member._log_p(list(ids), targets) for member, ids in zip(self.members, read)]
        shares = torch.tensor(self.weights, dtype=torch.float64).log()[:, None]
        return [
            torch.logsumexp(torch.tensor(logs, dtype=torch.float64) + shares, 0).tolist()
            for logs in zip(*each)
        ]

    def open(self, parts: Sequence[Part], **hints: int) -> Session:
        sources = zip(*((part.ids, *part.others) for part in parts))
        sessions = [
            member._reading(list(ids), **hints) for member, ids in zip(self.members, sources)
        ]
        return ensemble(sessions, self.weights)


SAMPLE = 64
"""Texts that are looked at for a head, at most."""


def _together(texts: Iterable[str | None]) -> Iterator[list[str]]:
    """Texts in lists that are tokenized together; a shorter one where no more are there for now."""
    held: list[str] = []
    for text in texts:
        if text is not None:
            held.append(text)
        if text is None or len(held) == FIRST:
            yield held
            held = []
    if held:
        yield held


def _ranked(token_scores: Sequence[float], settings: SearchSettings) -> float:
    """log p, divided as a search divides it, greedy or not."""
    return math.fsum(token_scores) / power(settings.length_penalty)(max(1, len(token_scores)))


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
