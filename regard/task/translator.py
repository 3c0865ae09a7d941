"""Translate texts with a trained model, with scores, attention and word alignments.

text → ids, in parts where it is long → search → text, scores, attention, alignment
"""

import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, repeat
from typing import Any, TypeAlias, overload

import torch
from jaxtyping import Float
from torch import Tensor, nn

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
from regard.decode.search.hypothesis import Hypothesis, check_finite
from regard.look.align import Example, Found, Head, Links, cross, links, words
from regard.look.align import find as find_head
from regard.model.notebook import model_html
from regard.model.transformer import Transformer
from regard.task.precision import load_saved
from regard.task.predictor import Predictor
from regard.task.search import (
    SearchSettings,
    check_length,
    check_same_tokens,
    find,
    open_reading,
)
from regard.task.settings import Precision, check_texts
from regard.task.split import Piece, has_line_break, marked_up, pieces

Pair: TypeAlias = tuple[str, str]
"""A source and its target."""


@dataclass(frozen=True)
class Attended:
    """The cross-attention weights of a model for each token of a target."""

    source: list[str]
    target: list[str]
    weights: Float[Tensor, "layers H L S"]
    """Row n belongs to the step that wrote token n."""

    def __repr__(self) -> str:
        read, written = "".join(self.source), "".join(self.target)
        return f"Attended({read!r}, {written!r}, weights {tuple(self.weights.shape)})"


@dataclass(frozen=True)
class Written:
    """A translation of a source text."""

    text: str
    score: float
    """Ranking score: log p divided by the number of tokens to the power of the length penalty."""
    tokens: list[int]
    token_scores: list[float]
    """log p of each token, and of EOS if it was reached."""
    attention: Attended | None = None
    """Its attention weights, if requested; those of discarded hypotheses are not included."""
    alignment: Links | None = None
    """Pairs of source and target words, counted from 0, if requested."""

    @property
    def log_p(self) -> float:
        return math.fsum(self.token_scores)

    def __repr__(self) -> str:
        rows = [repr(self.text), f"score {self.score:.4g}", f"{len(self.tokens)} tokens"]
        if self.attention is not None:
            rows.append(f"attention {tuple(self.attention.weights.shape)}")
        if self.alignment is not None:
            rows.append("alignment " + " ".join(f"{s}-{t}" for s, t in self.alignment))
        return f"Written({', '.join(rows)})"


NOTHING = Written("", 0.0, [], [])
"""The translation of an empty text."""


@dataclass(frozen=True)
class Part:
    """The tokens of a text, or of a section of it, and the index of each token's word."""

    ids: list[int]
    words: list[int]
    others: tuple[list[int], ...] = ()
    """The tokens of the same text for each other member of an ensemble."""
    prefix: tuple[int, ...] = ()
    """Tokens that the translation must begin with."""


class Translator(Predictor):
    """A trained model with its tokenizers, which translates texts.

    A text of several lines is translated line by line, and its line breaks stay. `model` is the
    `Transformer`, `search` the settings of beam search, `tags` what its training sources began
    with, such as a language, and `head` the attention head for word alignments.

    >>> from regard import Translator
    >>> translator = Translator.load("runs/en-de")
    >>> translations = translator.translate(["A dog.", "Two cats.\\nA bird."])
    >>> [len(text.splitlines()) for text in translations]
    [1, 2]
    >>> translator.search.beams
    4
    """

    _call = "translate(texts)"

    def __init__(
        self,
        model: Transformer,
        tokenizers: tuple[AnyTokenizer, AnyTokenizer] | str,
        settings: SearchSettings,
        about: Mapping[str, Any] | None = None,
        held_out: Callable[[], Sequence[Pair]] = tuple,
    ):
        """Without tokenizers, `tokenizers` is the error message to raise when they are needed."""
        self.model: Transformer = model
        self._tokenizers = tokenizers
        self.search = settings
        """The settings of beam search: beam size, maximum length, length penalty."""
        self._about = dict(about or {})
        self._held_out = held_out
        """Reads the validation pairs from the run's folder."""
        self.head: Head | None = None
        """The attention head for word alignments; chosen when they are first requested."""
        self._found: Found | None = None
        """The scores of all heads, from which `head` was chosen."""
        trained_tags: Any = self._about.get("tags") or ()
        self.tags = tuple(map(str, trained_tags))
        """Tags of the training sources, such as languages."""

    @classmethod
    def _of(cls, saved: Saved, held_out: Callable[[], Sequence[Pair]] = tuple) -> "Translator":
        """Builds a translator from a loaded model folder."""
        if not isinstance(saved.model, Transformer):
            raise ValueError(f"{saved.folder} holds a {type(saved.model).__name__}, no Transformer")
        about = saved.task or {}
        settings = SearchSettings.read(about, str(saved.folder / CONFIG))
        tokenizers: tuple[AnyTokenizer, AnyTokenizer] | str
        try:
            tokenizers = read_pair(saved.folder)
        except ValueError as error:  # the model is useful without tokenizers
            tokenizers = str(error)
        translator = cls(saved.model, tokenizers, settings, about, held_out)
        translator._folder = str(saved.folder)
        return translator

    def ensemble(
        self, others: "Sequence[Translator]", weights: Weights | None = None
    ) -> "TranslatorEnsemble":
        """Returns an ensemble of this translator and others, which averages their probabilities.

        The members need the same target tokenizer. By default all `weights` are equal.

        >>> import regard
        >>> first, second = (regard.Translator.load("runs/en-de") for _ in range(2))
        >>> len(first.ensemble([second], [0.7, 0.3]).translate(["A dog."]))
        1
        """
        return TranslatorEnsemble([self, *others], weights)

    def _facts(self) -> dict[str, object]:
        rows: dict[str, object] = {"vocabulary": f"{self.model.config.vocabulary:,}"}
        rows |= {"beams": self.search.beams, "length": self.search.length}
        if self.tags:
            rows["tags"] = " ".join(self.tags)
        return rows

    def _repr_html_(self) -> str:
        rows = {"folder": self._folder, **self._facts()}
        if not isinstance(self._tokenizers, str):
            rows |= dict(zip(("source tokenizer", "tokenizer"), map(repr, self._tokenizers)))
        return facts(type(self).__name__, rows, model_html(self.model))

    @overload
    def __call__(self, texts: str, /) -> str: ...  # type: ignore[overload-overlap]
    @overload
    def __call__(self, texts: Sequence[str], /) -> list[str]: ...
    def __call__(self, texts: str | Sequence[str], /) -> str | list[str]:
        """Translates one text, or each of a list."""
        return self.translate([texts])[0] if isinstance(texts, str) else self.translate(texts)

    @property
    def source_tokenizer(self) -> AnyTokenizer:
        """The source tokenizer."""
        return self._tokenizer(0)

    @property
    def tokenizer(self) -> AnyTokenizer:
        """The target tokenizer; often the same as the source tokenizer."""
        return self._tokenizer(1)

    def _tokenizer(self, side: int) -> AnyTokenizer:
        if isinstance(self._tokenizers, str):
            raise ValueError(self._tokenizers)
        return self._tokenizers[side]

    def translate(
        self, texts: Sequence[str], *, beams: int | None = None, batch: int | None = None
    ) -> list[str]:
        """Returns the best translation of each text; an empty text stays empty.

        `beams` is the beam size, by default `search.beams`; 1 is greedy search. `batch` is the
        number of sentences decoded together, by default 64 on a CPU and 512 on a GPU. A text of
        several lines is translated line by line, and its line breaks stay.

        >>> import regard
        >>> len(regard.Translator.load("runs/en-de").translate(["A dog.", ""], beams=2))
        2
        """
        check_texts(texts)
        best = self.translations(texts, beams=beams, batch=batch, low_latency=False)
        return [written[0].text for written in best]

    def stream(
        self, texts: Iterable[str | None], *, beams: int | None = None, batch: int | None = None
    ) -> Iterator[str]:
        """Yields the translation of each text as soon as it and all before it are ready.

        The texts may come from any iterable, such as a file; None among them means that no more
        are available yet.

        >>> import regard
        >>> translator = regard.Translator.load("runs/en-de")
        >>> sum(1 for translation in translator.stream(iter(["A dog.", "A cat."])))
        2
        """
        for best in self.translations(texts, beams=beams, batch=batch):
            yield best[0].text

    def hypotheses(
        self, texts: Sequence[str], *, n_best: int = 1, beams: int | None = None
    ) -> list[list[Written]]:
        """Returns the `n_best` translations of each text, best first, with their scores.

        >>> import regard
        >>> translator = regard.Translator.load("runs/en-de")
        >>> (best,) = translator.hypotheses(["A dog."], n_best=2)
        >>> best[0].score >= best[1].score
        True
        """
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
        """Yields the `n_best` translations of each text, best first, with their scores.

        They are yielded as soon as they and all before them are ready. None among the texts means
        that no more are available yet. Every text has at least one translation; that of an empty
        text is empty. With `low_latency` the first few texts are decoded first; without it, all of
        them are sorted by length, which is faster.

        A text of several lines is translated line by line. The translations of rank n are joined by
        the text's own line breaks, and their score is the mean of the lines' scores. A line that
        exceeds the model's length is cut into parts, at spaces if possible, whose translations are
        joined by a space.

        Every translation begins with `prefix`, which may also be one prefix for each text; its
        tokens count in the score. `tags` select the output of a model that was trained with tags,
        such as the target language. `attention` adds the cross-attention weights, and `align` word
        alignments. The default `batch` is 64 sentences on a CPU and 512 on a GPU, or fewer if
        memory is short.

        >>> import regard
        >>> translator = regard.Translator.load("runs/en-de")
        >>> (best,) = translator.translations(["A dog."], attention=True)
        >>> layers, heads, written, read = best[0].attention.weights.shape
        >>> written == len(best[0].tokens) + 1
        True
        """
        if isinstance(texts, str):
            check_texts(texts)
        prefixes = repeat(prefix) if isinstance(prefix, str) else iter(prefix)
        line_prefixes: deque[str] = deque()
        groups: deque[list[Piece]] = deque()

        def lines() -> Iterator[str | None]:
            for text in texts:
                if text is None:
                    yield None
                    continue
                broken = has_line_break(text)
                groups.append(pieces(text, long=None) if broken else [Piece(text, True)])
                translated = [piece.text for piece in groups[-1] if piece.translated] or [""]
                line_prefixes.extend([next(prefixes, ""), *[""] * (len(translated) - 1)])
                yield from translated

        results = self._translate_lines(
            lines(),
            line_prefixes,
            n_best=n_best,
            beams=beams,
            batch=batch,
            tags=tags,
            attention=attention,
            align=align,
            low_latency=low_latency,
        )
        return _by_text(groups, results)

    def _translate_lines(
        self,
        texts: Iterable[str | None],
        prefixes: deque[str] | None = None,
        *,
        n_best: int = 1,
        beams: int | None = None,
        batch: int | None = None,
        tags: Sequence[str] = (),
        attention: bool = False,
        align: bool = False,
        low_latency: bool = True,
    ) -> Iterator[list[Written]]:
        """Yields the translations of texts that are one line each; `prefixes` grows with them."""
        device = self.device
        batch = usual(device) if batch is None else batch
        for name, number in (("n_best", n_best), ("batch", batch)):
            check_integer(name, number)
        settings = self.search if beams is None else replace(self.search, beams=beams)
        batch = min(batch, self._room(max(settings.beams, n_best)) or batch)
        check_tags(self, tags)
        counts: deque[int] = deque()

        def parts() -> Iterator[Part | None]:
            for chunk in _together(texts):
                for cut in self._cut_all(chunk, align, tags):
                    if attention:
                        check_length("text", sum(len(part.ids) for part in cut), self.search.length)
                    if prefixes and (forced := prefixes.popleft().strip()):
                        ids = tuple(self.tokenizer.encode(forced))
                        self._check_prefix(forced, ids, settings)
                        cut[0] = replace(cut[0], prefix=ids)
                    counts.append(len(cut))
                    yield from cut
                if len(chunk) < FIRST:
                    yield None

        def search(batch_parts: list[Part]) -> tuple[list[Part], list[list[Hypothesis]]]:
            return batch_parts, self._search(batch_parts, settings, n_best)

        def write(outcome: tuple[list[Part], list[list[Hypothesis]]]) -> list[list[Written]]:
            return self._write(*outcome, settings)

        def search_with_attention(batch_parts: list[Part]) -> list[list[Written]]:
            return self._with_attention(batch_parts, write(search(batch_parts)), attention, align)

        # A GPU decodes the next batch while the tokens of the last one become text.
        asynchronous = device.type == "cuda" and not (attention or align)
        results: Iterator[list[Written]] = in_order(
            parts(),
            search if asynchronous else search_with_attention,
            length=lambda part: len(part.ids),
            sentences=batch,
            window=max(WINDOW, 32 * batch),
            low_latency=low_latency,
            finish=write if asynchronous else None,
        )

        def by_line() -> Iterator[list[Written]]:
            ready: list[list[Written]] = []
            for written in results:
                ready.append(written)
                if len(ready) == counts[0]:
                    yield ready[0] if len(ready) == 1 else join_parts(ready, self.search)
                    ready = []
                    counts.popleft()

        return by_line()

    def attention(self, text: str, written: str | Sequence[int]) -> Attended:
        """Returns the cross-attention weights of every layer and head for this translation.

        `written` is its text, or its tokens. The weights are (layers, H, L, S): row n of L belongs
        to the step that wrote token n, and S are the tokens of the source with EOS.

        >>> import regard
        >>> attended = regard.Translator.load("runs/en-de").attention("A dog.", "Ein Hund.")
        >>> attended.weights.shape[2:] == (len(attended.target), len(attended.source))
        True
        """
        check_texts([text])
        source = self._encode(text)
        tokens = self.tokenizer.encode(written) if isinstance(written, str) else list(written)
        check_length("text", len(source), self.search.length)
        check_length("translation", len(tokens), self.search.length)
        (weights,) = cross(self.model, [(source, tokens)], self.search.start, self.search.end)
        return self._attention_of(source, tokens, weights)

    # Search

    def _encode(self, text: str) -> list[int]:
        return self._encode_batch([text])[0]

    def _encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Tokenizes texts without surrounding white space, as in training."""
        return self.source_tokenizer.encode_batch([text.strip() for text in texts])

    def _cut_all(
        self, texts: Sequence[str], align: bool = False, tags: Sequence[str] = ()
    ) -> list[list[Part]]:
        """Tokenizes texts together, and cuts each into parts, each with the tags."""
        return [
            self._cut(text, ids, align, tags) for text, ids in zip(texts, self._encode_batch(texts))
        ]

    def _cut(self, text: str, ids: list[int], align: bool, tags: Sequence[str]) -> list[Part]:
        if not ids or not tags:
            return self._parts(ids, align)
        marks = self._marks(ids, text, tags)
        parts = self._parts(ids, align, max(1, self.search.length - len(marks)))
        nowhere = [-1] * len(marks) if align else []  # a tag is not a word of the text
        return [Part([*marks, *part.ids], [*nowhere, *part.words]) for part in parts]

    def _marks(self, ids: list[int], text: str, tags: Sequence[str]) -> list[int]:
        """The tokens of the tags before a text with these ids, as in training."""
        whole = self._encode(tagged(text, tags))
        if whole[len(whole) - len(ids) :] != ids:  # a tokenizer that merges across words
            return self._encode(tagged("", tags))
        return whole[: len(whole) - len(ids)]

    def _parts(self, ids: list[int], align: bool = False, most: int | None = None) -> list[Part]:
        """Cuts ids into parts of at most `most` tokens; all but the last end at a word boundary."""
        most, begin, places = most or self.search.length, 0, [0]
        while len(ids) - begin > most:
            middle = begin + most // 2
            pieces = self.source_tokenizer.pieces(ids[middle : begin + most + 1])
            begins = [n for n, piece in enumerate(pieces) if piece.startswith("▁")]
            begin = max(begin + 1, middle + begins[-1] if begins else begin + most)
            places.append(begin)
        numbers = words(self.source_tokenizer.pieces(ids)) if align else []
        return [
            Part(ids[first:last], numbers[first:last])
            for first, last in zip(places, [*places[1:], len(ids)])
        ]

    def _search(
        self, parts: Sequence[Part], settings: SearchSettings, n_best: int
    ) -> list[list[Hypothesis]]:
        """The hypotheses for each part; an empty list for parts without tokens."""
        real = [part for part in parts if part.ids]
        if not real:
            return [[] for _ in parts]
        hypotheses = find(
            partial(self._open, real),
            len(real),
            settings,
            most=[longest(len(part.ids)) for part in real],
            n_best=n_best,
            prefixes=[part.prefix for part in real],
        )
        whole = iter(self._with_prefixes(real, hypotheses))
        return [next(whole) if part.ids else [] for part in parts]

    def _write(
        self, parts: Sequence[Part], hypotheses: list[list[Hypothesis]], settings: SearchSettings
    ) -> list[list[Written]]:
        """The text of each hypothesis, best first."""
        texts = iter(self._texts([hypothesis.tokens for best in hypotheses for hypothesis in best]))
        written = [
            [self._to_written(next(texts), hypothesis, settings) for hypothesis in best]
            or [NOTHING]
            for best in hypotheses
        ]
        if any(part.prefix for part in parts):  # the search ranked without their tokens
            written = [sorted(best, key=lambda candidate: -candidate.score) for best in written]
        return written

    def _with_attention(
        self, parts: Sequence[Part], written: list[list[Written]], attention: bool, align: bool
    ) -> list[list[Written]]:
        """Adds attention and alignments to the translations, if requested."""
        if not (attention or align):
            return written
        if align and self.head is None:
            self._find([(part, best[0]) for part, best in zip(parts, written) if part.ids])
        nothing = [replace(NOTHING, alignment=[])] if align else [NOTHING]
        pairs = [(part, text) for part, best in zip(parts, written) if part.ids for text in best]
        size = max(1, FIRST * TOKENS // max((len(part.ids) for part, _ in pairs), default=1))
        results = iter(
            [
                result
                for begin in range(0, len(pairs), size)
                for result in self._add_attention(pairs[begin : begin + size], attention, align)
            ]
        )
        return [
            [next(results) for _ in best] if part.ids else nothing
            for part, best in zip(parts, written)
        ]

    def _check_prefix(self, forced: str, ids: tuple[int, ...], settings: SearchSettings) -> None:
        if len(ids) >= settings.length:
            raise ValueError(
                f"the prefix {shown(forced)} has {len(ids)} tokens, and a translation at most "
                f"{settings.length}; shorten it"
            )

    def _with_prefixes(
        self, parts: Sequence[Part], hypotheses: list[list[Hypothesis]]
    ) -> list[list[Hypothesis]]:
        """Prepends the forced prefixes and their scores to the hypotheses."""
        forced = [n for n, part in enumerate(parts) if part.prefix]
        scores = self._token_scores([parts[n] for n in forced], [parts[n].prefix for n in forced])
        for n, before in zip(forced, scores):
            prefix = list(parts[n].prefix)
            prefix_scores = before[: len(prefix)]
            hypotheses[n] = [
                Hypothesis(
                    [*prefix, *hypothesis.tokens],
                    hypothesis.score + sum(prefix_scores),
                    [*prefix_scores, *hypothesis.token_scores],
                )
                for hypothesis in hypotheses[n]
            ]
        return hypotheses

    # Scores of given translations

    def score(self, pairs: Sequence[Pair], *, batch: int = 64) -> list[Written]:
        """Scores each target as a translation of its source: log p of every token and of EOS.

        `score` of a result is log p divided by the length penalty, and `log_p` its sum alone.

        >>> import regard
        >>> (scored,) = regard.Translator.load("runs/en-de").score([("A dog.", "Ein Hund.")])
        >>> scored.log_p < 0
        True
        """
        for n, pair in enumerate(pairs):
            if isinstance(pair, str) or len(pair) != 2:
                raise ValueError(f"pairs[{n}] ({pair!r}) must be a pair: (source, target)")
        for texts in zip(*pairs):
            check_texts(texts)
        parts = [Part(self._encode(source), []) for source, _ in pairs]
        parts = [self._whole(part, source) for part, (source, _) in zip(parts, pairs)]
        targets = [self.tokenizer.encode(target.strip()) for _, target in pairs]
        for part, target in zip(parts, targets):
            check_length("text", max(map(len, (part.ids, *part.others))), self.search.length)
            check_length("translation", len(target), self.search.length)
        lengths = [max(len(part.ids), len(target)) for part, target in zip(parts, targets)]
        results: dict[int, Written] = {}
        for indices in batches(lengths, batch, TOKENS * batch):
            scores = self._token_scores([parts[n] for n in indices], [targets[n] for n in indices])
            for n, token_scores in zip(indices, scores):
                ranking_score = _ranking_score(token_scores, self.search)
                check_finite(ranking_score)
                results[n] = Written(pairs[n][1], ranking_score, targets[n], token_scores)
        return [results[n] for n in range(len(pairs))]

    def _whole(self, part: Part, text: str) -> Part:
        """Adds the tokens that the other members of an ensemble read for a whole text."""
        return part

    def _token_scores(
        self, parts: Sequence[Part], targets: Sequence[Sequence[int]]
    ) -> list[list[float]]:
        """log p of each token of these targets and of EOS after them."""
        return self._log_p([part.ids for part in parts], targets)

    @torch.inference_mode()
    def _log_p(
        self, sources: Sequence[list[int]], targets: Sequence[Sequence[int]]
    ) -> list[list[float]]:
        """The same scores by this model alone, in one forward pass over the targets."""
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
        return [
            scores.tolist() for scores in logs.cpu().split([len(target) + 1 for target in targets])
        ]

    def _open(self, parts: Sequence[Part], **hints: int) -> Session:
        return self._reading([part.ids for part in parts], **hints)

    def _room(self, beams: int) -> int | None:
        """The number of sentences that fit in the device's memory; None means no limit."""
        length = min(longest(TOKENS), self.search.length) + 1
        rows = pick(self.model).rows(length)
        return None if rows is None else max(1, rows // beams)

    def _reading(self, sources: Sequence[list[int]], **hints: int) -> Session:
        """Opens a session of this model alone."""
        source, lengths = text_source(sources, self.search.end)
        return open_reading(self.model, source, lengths, **hints)

    def _decode(self, hypothesis: Hypothesis, settings: SearchSettings) -> Written:
        (text,) = self._texts([hypothesis.tokens])
        return self._to_written(text, hypothesis, settings)

    def _texts(self, tokens: Sequence[list[int]]) -> list[str]:
        # A model may generate a line break, but a text stays one line.
        return [" ".join(text.splitlines()) for text in self.tokenizer.decode_batch(tokens)]

    def _to_written(self, text: str, hypothesis: Hypothesis, settings: SearchSettings) -> Written:
        return Written(
            text,
            _ranking_score(hypothesis.token_scores, settings),
            hypothesis.tokens,
            hypothesis.token_scores,
        )

    # Attention

    def _attention_of(self, source: list[int], tokens: list[int], weights: Tensor) -> Attended:
        end = self.search.end
        return Attended(
            self.source_tokenizer.pieces([*source, end]),
            self.tokenizer.pieces([*tokens, end]),
            weights,
        )

    def _add_attention(
        self, pairs: list[tuple[Part, Written]], attention: bool, align: bool
    ) -> list[Written]:
        """Adds attention and alignments, as requested, to these translations."""
        head = self.head or Head(len(self.model.decoder.blocks) - 1, 0)
        layer = None if attention else head.layer
        tokens = [(part.ids, written.tokens) for part, written in pairs]
        results = []
        for (part, written), weights in zip(
            pairs, cross(self.model, tokens, self.search.start, self.search.end, layer)
        ):
            alignment: Links | None = None
            if align:
                rows = weights[head.layer if attention else 0, head.head, head.shift :]
                alignment = self._links(rows, part.words, written)
            attended = self._attention_of(part.ids, written.tokens, weights) if attention else None
            results.append(replace(written, attention=attended, alignment=alignment))
        return results

    def _links(self, rows: Tensor, source_words: list[int], written: Written) -> Links:
        target_words = words(self.tokenizer.pieces(written.tokens))
        last = len(written.text.split()) - 1
        # A token that the text does not show, such as an unknown one, belongs to no word.
        return [
            (source, target)
            for source, target in links(rows, source_words, target_words)
            if target <= last
        ]

    def find_head(self, texts: Sequence[str]) -> Found | None:
        """Chooses the attention head for word alignments, and sets `head`.

        It is chosen on the run's held-out pairs, if its folder has any, otherwise on these texts.
        Returns the scores of all heads, or None if no text has two words.

        >>> import regard
        >>> regard.Translator.load("runs/en-de").find_head(["A dog and a cat."]).best.layer
        0
        """
        parts = [cut[0] for cut in self._cut_all(texts, align=True) if cut[0].ids]
        hypotheses = self._search(parts, replace(self.search, beams=1), 1)
        written = [self._decode(best[0], self.search) for best in hypotheses]
        return self._find(list(zip(parts, written)))

    def _find(self, pairs: Sequence[tuple[Part, Written]]) -> Found | None:
        def example(part: Part, tokens: list[int]) -> Example:
            return Example(part.ids, tokens, part.words, words(self.tokenizer.pieces(tokens)))

        examples = [
            example(self._cut_all([source], align=True)[0][0], self.tokenizer.encode(target))
            for source, target in self._pairs()[:SAMPLE]
        ]
        if not examples:
            examples = [example(part, written.tokens) for part, written in pairs[:SAMPLE]]
        self._found = find_head(self.model, examples, self.search.start, self.search.end)
        self.head = None if self._found is None else self._found.best
        return self._found

    def _pairs(self) -> Sequence[Pair]:
        try:
            return self._held_out()
        except (ValueError, OSError):
            return ()  # a model without a run's folder


class TranslatorEnsemble(Translator):
    """Several translators that choose every token by the mean of their probabilities.

    `Translator.ensemble` and `regard.load(folder, *others)` make one. The members' source
    tokenizers may differ, but their target tokenizers may not. Search settings,
    attention and alignments come from the first member: heads of different models have no mean.
    """

    def __init__(self, members: Sequence[Translator], weights: Weights | None = None):
        first, *others = members
        if any(isinstance(member, TranslatorEnsemble) for member in members):
            raise ValueError("an ensemble is no member of another; name all translators at once")
        check_same_tokens(members)
        length = min(member.search.length for member in members)
        settings = replace(first.search, length=length)
        super().__init__(first.model, first._tokenizers, settings, first._about, first._held_out)
        self._folder = first._folder
        self._members, self._weights = list(members), shares(weights, len(members))
        first_tokenizer = first.source_tokenizer.to_bytes()
        self._alike = [other.source_tokenizer.to_bytes() == first_tokenizer for other in others]

    def _cut(self, text: str, ids: list[int], align: bool, tags: Sequence[str]) -> list[Part]:
        """Cuts a text into parts that are short enough for every member."""
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
        """The tokens of a text for all members but the first, which reads `ids`."""
        others = zip(self._members[1:], self._alike)
        return tuple(ids if alike else other._encode(text) for other, alike in others)

    def _whole(self, part: Part, text: str) -> Part:
        return replace(part, others=self._others(part.ids, text))

    def _token_scores(
        self, parts: Sequence[Part], targets: Sequence[Sequence[int]]
    ) -> list[list[float]]:
        """log Σ_m w_m p_m for each token."""
        read = zip(*((part.ids, *part.others) for part in parts))
        each = [member._log_p(list(ids), targets) for member, ids in zip(self._members, read)]
        shares = torch.tensor(self._weights, dtype=torch.float64).log()[:, None]
        return [
            torch.logsumexp(torch.tensor(logs, dtype=torch.float64) + shares, 0).tolist()
            for logs in zip(*each)
        ]

    def _open(self, parts: Sequence[Part], **hints: int) -> Session:
        sources = zip(*((part.ids, *part.others) for part in parts))
        sessions = [
            member._reading(list(ids), **hints) for member, ids in zip(self._members, sources)
        ]
        return ensemble(sessions, self._weights)

    def _facts(self) -> dict[str, object]:
        return {"members": len(self._members), **super()._facts()}

    def _models(self) -> list[nn.Module]:
        return [member.model for member in self._members]


def load_translators(
    folders: Sequence[str | os.PathLike[str]],
    weights: Weights,
    device: str,
    precision: Precision,
) -> Translator:
    """The translator of a folder in a precision, or the ensemble of several."""
    first, *others = (Translator._of(load_saved(name, device, precision)[0]) for name in folders)
    return first.ensemble(others, weights or None) if others or weights else first


# For packages that decode by themselves, such as the service


def check_tags(translator: Translator, tags: Sequence[str]) -> None:
    """Raises if no training source had one of these tags."""
    for tag in tags:
        if tag not in translator.tags:
            tags_known = ", ".join(translator.tags)
            choices = f"known are {tags_known}" if tags_known else "it was trained without"
            name = translator._folder or "this translator"
            raise ValueError(f"tag ({tag}) is unknown to {name}; {choices}")


def cut_texts(translator: Translator, texts: Sequence[str]) -> list[list[Part]]:
    """The parts of each text, short enough for the model."""
    return translator._cut_all(texts)


def open_parts(
    translator: Translator, parts: Sequence[Part], *, beams: int, length: int
) -> Session:
    """A session that translates these parts."""
    return translator._open(parts, beams=beams, length=length)


def written_of(translator: Translator, hypothesis: Hypothesis, settings: SearchSettings) -> Written:
    """The translation that a hypothesis is."""
    return translator._decode(hypothesis, settings)


def join_parts(parts: Sequence[list[Written]], settings: SearchSettings) -> list[Written]:
    """Joins the translations of a text's parts by rank, repeating a part's last if too few."""
    return [
        _join(
            chosen,
            " ".join(filter(None, (written.text for written in chosen))),
            _ranking_score([s for written in chosen for s in written.token_scores], settings),
            [0] * len(chosen),  # words are already counted in the whole text
        )
        for chosen in _by_rank(parts)
    ]


def join_pieces(
    text: Sequence[Piece], translations: Sequence[list[Written]], markup: bool = False
) -> list[Written]:
    """Joins the translations of a text's pieces by rank, with the pieces between them.

    The score is the mean of the pieces' scores.
    """
    counts = [len(piece.text.split()) for piece in text if piece.translated]
    results = []
    for chosen in _by_rank(translations):
        texts = iter(chosen)
        results.append(
            _join(
                chosen,
                "".join(
                    marked_up(next(texts).text, markup) if piece.translated else piece.text
                    for piece in text
                ),
                math.fsum(written.score for written in chosen) / max(1, len(chosen)),
                [0, *accumulate(counts)],
            )
        )
    return results or [replace(NOTHING, text="".join(piece.text for piece in text))]


def _by_rank(parts: Sequence[list[Written]]) -> Iterator[list[Written]]:
    for rank in range(max(map(len, parts), default=0)):
        yield [candidates[min(rank, len(candidates) - 1)] for candidates in parts]


def _join(
    chosen: Sequence[Written], text: str, score: float, source_words: Sequence[int]
) -> Written:
    """One translation of several; `source_words` come before each in the source."""
    alignment: Links | None = None
    if chosen[0].alignment is not None:
        counts = [0, *accumulate(len(written.text.split()) for written in chosen)]
        alignment = [
            (before + source, count + target)
            for written, before, count in zip(chosen, source_words, counts)
            for source, target in written.alignment or ()
        ]
    attentions = [written.attention for written in chosen if written.attention is not None]
    return Written(
        text,
        score,
        [token for written in chosen for token in written.tokens],
        [score for written in chosen for score in written.token_scores],
        _side_by_side(attentions) if attentions else None,
        alignment,
    )


def _by_text(groups: deque[list[Piece]], lines: Iterator[list[Written]]) -> Iterator[list[Written]]:
    """Joins the translations of lines; `groups` has the pieces of each text that was read."""
    ready: list[list[Written]] = []
    for written in lines:
        ready.append(written)
        text = groups[0]
        count = sum(piece.translated for piece in text)
        if len(ready) == max(1, count):
            yield written if len(text) == 1 == count else join_pieces(text, ready[:count])
            ready = []
            groups.popleft()


SAMPLE = 64
"""Maximum number of texts for choosing an alignment head."""


def _together(texts: Iterable[str | None]) -> Iterator[list[str]]:
    """Groups texts to tokenize together; a group is shorter if no more texts are available yet."""
    chunk: list[str] = []
    for text in texts:
        if text is not None:
            chunk.append(text)
        if text is None or len(chunk) == FIRST:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


def _ranking_score(token_scores: Sequence[float], settings: SearchSettings) -> float:
    """log p divided by the length penalty, as in beam search."""
    return math.fsum(token_scores) / power(settings.length_penalty)(max(1, len(token_scores)))


def _side_by_side(parts: Sequence[Attended]) -> Attended:
    """Joins the attention of a text's parts; parts do not attend to each other."""
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
    """The maximum number of tokens of a translation, from the number of source tokens."""
    return 3 * source + 30
