"""A translator that is served: texts in pieces, and together again."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

from regard.decode.engine.session import Session
from regard.decode.search.hypothesis import Hypothesis
from regard.service.batch import Rules, Sentence
from regard.service.requests import (
    Attend,
    Attention,
    Candidate,
    Delta,
    Limits,
    Refused,
    Request,
    TooLarge,
    Translate,
    Translation,
)
from regard.service.served import Job
from regard.service.writers import Writer, check_weights, lists
from regard.task.search import SearchSettings
from regard.task.split import Piece, marked_up, pieces, plain
from regard.task.translator import (
    NOTHING,
    Part,
    Translator,
    Written,
    cut_texts,
    join_parts,
    join_pieces,
    longest,
    open_parts,
    written_of,
)


class ServedTranslator(Writer):
    task, predictor = "translate", "Translator"
    asked = (Translate, Attend)

    def __init__(self, name: str, folder: Path, predictor: Translator, version: int):
        self.translator, self.search = predictor, predictor.search
        super().__init__(name, folder, predictor, version)

    def _open(self, sentences: Sequence[Sentence], *, beams: int, length: int) -> Session:
        sources = [cast(Part, sentence.source) for sentence in sentences]
        return open_parts(self.translator, sources, beams=beams, length=length)

    def before(self, request: Request) -> Callable[[], object] | None:
        """Finds the head for alignments with a copy, while this one answers other requests."""
        if not isinstance(request, Attend) or request.text is None or request.written is not None:
            return None
        text = request.text

        def find() -> None:
            if self.translator.head is None:
                copy = Translator.load(self.folder)
                copy.find_head([text])
                self.translator.head = copy.head

        return find if self.translator.head is None else None

    def check(self, request: Request, limits: Limits) -> None:
        super().check(request, limits)
        if isinstance(request, Attend) and request.text is not None:
            source = (
                sum(len(part.ids) for part in cut_texts(self.translator, [request.text])[0]) + 1
            )
            target = source
            if request.written is not None:
                target = len(self.translator.tokenizer.encode(request.written)) + 1
            check_weights(self.model, target, source, limits)
            if request.written is not None:
                self._check_attention("text", source - 1)
                self._check_attention("translation", target - 1)

    def take(self, job: Job, limits: Limits) -> None:
        request = job.request
        if isinstance(request, Attend):
            self.calls.append((job, lambda: self._attention(request, limits)))
            return
        assert isinstance(request, Translate)
        texts = [
            _Text(self, job, n, pieces(text, markup=request.markup))
            for n, text in enumerate(request.texts)
        ]
        left = len(texts)

        def ready() -> None:
            nonlocal left
            left -= 1
            if not left:
                job.answer(tuple(text.translation() for text in texts))

        sentences = [*self._sentences(request, texts, ready)]
        if len(sentences) > limits.queue:
            raise TooLarge(f"the texts have {len(sentences)} sentences, more than may wait")
        for text in texts:
            if not text.left:
                ready()
        if not texts:
            job.answer(())
        self.enqueue(sentences)

    def _sentences(
        self, request: Translate, texts: "Sequence[_Text]", ready: Callable[[], None]
    ) -> Iterator[Sentence]:
        """Those of all texts, which are tokenized together."""
        rules = self._rules(request.beams, request.n_best)
        settings = self.search
        if rules.beams != settings.beams:
            settings = replace(settings, beams=rules.beams)
        parts_to_translate = [
            (text, n, plain(piece, request.markup))
            for text in texts
            for n, piece in enumerate(text.pieces)
            if piece.translated
        ]
        cuts = cut_texts(self.translator, [words for _, _, words in parts_to_translate])
        for (text, n, _), parts in zip(parts_to_translate, cuts):
            yield from text.sentences(n, parts, rules, settings, ready)

    def _attention(self, request: Attend, limits: Limits) -> Attention:
        if request.text is None:
            raise Refused("a translator attends to a text; give one")
        translator = self.translator
        if request.written is not None:
            attended = translator.attention(request.text, request.written)
            return Attention(
                request.written,
                tuple(attended.source),
                tuple(attended.target),
                lists(attended.weights),
            )
        (best,) = translator.translations([request.text], attention=True, align=True)
        recorded = best[0].attention
        if recorded is None:
            return Attention("", (), (), ())
        check_weights(self.model, len(recorded.target), len(recorded.source), limits)
        return Attention(
            best[0].text,
            tuple(recorded.source),
            tuple(recorded.target),
            lists(recorded.weights),
            tuple(best[0].alignment or ()),
        )


class _Text:
    """A text of a request for translation, while its pieces are written."""

    def __init__(self, served: ServedTranslator, job: Job, index: int, parts: list[Piece]):
        assert isinstance(job.request, Translate)
        self.served, self.job, self.index, self.pieces = served, job, index, parts
        self.request = job.request
        self.found: dict[int, list[Written]] = {}
        """The translations of each piece, best first."""
        self.left = 0
        """Pieces that are not ready."""
        self._sent = ""
        self._so_far: dict[int, str] = {}

    def sentences(
        self,
        n: int,
        parts: list[Part],
        rules: Rules,
        settings: SearchSettings,
        ready: Callable[[], None],
    ) -> Iterator[Sentence]:
        """Those of one piece, which is cut into these parts."""
        if not any(part.ids for part in parts):
            self.found[n] = [NOTHING]
            return
        self.left += 1
        translator = self.served.translator
        written: list[list[Written] | None] = [None] * len(parts)

        def answer(place: int, found: list[Hypothesis]) -> None:
            best = [written_of(translator, hypothesis, settings) for hypothesis in found] or [
                NOTHING
            ]
            written[place] = best
            if self.job.stream is not None and len(parts) == 1:
                self._stream(n, best[0].text, True)
            if None not in written:
                whole = cast(list[list[Written]], written)
                self.found[n] = (
                    whole[0] if len(whole) == 1 else join_parts(whole, translator.search)
                )
                if self.job.stream is not None and len(parts) > 1:
                    self._stream(n, self.found[n][0].text, True)
                self.left -= 1
                if not self.left:
                    ready()

        def stream(tokens: list[int]) -> None:
            self._stream(n, " ".join(translator.tokenizer.decode(tokens).splitlines()), False)

        streams = self.job.stream is not None and len(parts) == 1
        for place, part in enumerate(parts):
            most = min(longest(len(part.ids)), settings.length)
            yield Sentence(
                part,
                [settings.start],
                most,
                rules,
                lambda found, place=place: answer(place, found),  # type: ignore[misc]
                self.job.fail,
                self.job.wanted,
                stream if streams else None,
            )

    def _stream(self, n: int, text: str, whole: bool) -> None:
        """Sends the new text, up to the first piece that is not complete."""
        if not whole:
            # The last word may go on, and the last letter may be half of one.
            text = text[: max(0, len(text.rstrip("�")) if text.endswith("�") else len(text))]
        self._so_far[n] = text
        if whole:
            self.found.setdefault(n, [replace(NOTHING, text=text)])
        ready = ""
        for place, piece in enumerate(self.pieces):
            if not piece.translated:
                ready += piece.text
            elif place in self.found:
                ready += marked_up(self.found[place][0].text, self.request.markup)
            else:
                ready += marked_up(self._so_far.get(place, ""), self.request.markup)
                break
        if self.job.stream is not None and ready.startswith(self._sent) and ready != self._sent:
            self.job.stream(Delta(self.index, ready[len(self._sent) :]))
            self._sent = ready

    def translation(self) -> Translation:
        translations = [self.found[n] for n, piece in enumerate(self.pieces) if piece.translated]
        joined = join_pieces(self.pieces, translations, self.request.markup)[: self.request.n_best]
        candidates = [Candidate(written.text, written.score) for written in joined]
        return Translation(candidates[0].text, candidates[0].score, tuple(candidates[1:]))
