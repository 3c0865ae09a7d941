"""Readers and language models that are served."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
import torch

from regard.decode.engine.pick import open_session
from regard.decode.engine.session import Session
from regard.decode.search.hypothesis import Hypothesis
from regard.decode.search.rolling import Sampling
from regard.service.batch import Rules, Sentence
from regard.service.images import check_image, pixels_of
from regard.service.requests import (
    Attend,
    Attention,
    Generate,
    Limits,
    Read,
    Refused,
    TooLarge,
)
from regard.service.served import Job
from regard.service.writers import Writer, check_weights, lists, streaming
from regard.task.search import open_reading

if TYPE_CHECKING:
    from regard.task.language import Generator
    from regard.task.read import Reader


class ServedReader(Writer):
    task, predictor = "read", "Reader"
    asked = (Read, Attend)

    def __init__(self, name: str, folder: Path, predictor: "Reader", version: int):
        self.reader, self.search = predictor, predictor.search
        super().__init__(name, folder, predictor, version)

    def _open(self, sentences: Sequence[Sentence], *, beams: int, length: int) -> Session:
        pixels = torch.from_numpy(np.stack([sentence.source for sentence in sentences]))
        return open_reading(
            self.model,
            self.reader.preparation.inputs(pixels, self.model.target.table.weight),
            None,
            beams=beams,
            length=length,
        )

    def take(self, job: Job, limits: Limits) -> None:
        request = job.request
        if isinstance(request, Attend):
            if request.image is None:
                raise Refused("a reader attends to an image; give one")
            check_image(request.image, limits)
            tokens = self.reader.tokenizer.encode(request.written or "")
            check_weights(self.model, len(tokens) + 1, math.prod(self.reader.grid), limits)
            self._check_attention("text", len(tokens))
            self.calls.append((job, lambda: self._attention(request, limits)))
            return
        assert isinstance(request, Read)
        rules = self._rules(request.beams)
        texts: list[str | None] = [None] * len(request.images)

        def answer(n: int, found: list[Hypothesis]) -> None:
            texts[n] = self.reader.tokenizer.decode(found[0].tokens) if found else ""
            if all(text is not None for text in texts):
                job.answer(tuple(cast(list[str], texts)))

        self.enqueue(
            [
                Sentence(
                    pixels_of(image, self.reader.preparation, limits),
                    [self.search.start],
                    self.search.length,
                    rules,
                    lambda found, n=n: answer(n, found),  # type: ignore[misc]
                    job.fail,
                    job.wanted,
                    self._streamed(job, n),
                )
                for n, image in enumerate(request.images)
            ]
        )

    def _streamed(self, job: Job, n: int) -> Callable[[list[int]], None] | None:
        return streaming(job, n, self.reader.tokenizer.decode)

    def _attention(self, request: Attend, limits: Limits) -> Attention:
        assert request.image is not None
        looked = self.reader.attention(request.image, request.written)
        check_weights(self.model, len(looked.text), math.prod(self.reader.grid), limits)
        text = request.written or "".join(looked.text[:-1]).replace("▁", " ").strip()
        return Attention(text, (), tuple(looked.text), lists(looked.weights))


class ServedGenerator(Writer):
    task, predictor = "generate", "Generator"
    asked = (Generate,)

    def __init__(self, name: str, folder: Path, predictor: "Generator", version: int):
        self.generator, self.search = predictor, predictor.search
        super().__init__(name, folder, predictor, version)

    def _open(self, sentences: Sequence[Sentence], *, beams: int, length: int) -> Session:
        return open_session(self.model, rows=len(sentences), length=length)

    def _longest(self) -> int:
        return 1  # nothing is penalized

    def take(self, job: Job, limits: Limits) -> None:
        request = job.request
        assert isinstance(request, Generate)
        if not 1 <= request.length <= limits.tokens:
            raise TooLarge(f"length ({request.length}) must be from 1 to {limits.tokens}")
        how = Sampling(request.temperature, request.top_k, request.top_p, request.seed)
        rules = Rules(self.search.end, self.search.banned, sampling=how)
        decode = self.generator.tokenizer.decode
        texts: list[str | None] = [None] * len(request.prompts)
        before = [self.generator.tokenizer.encode(prompt) for prompt in request.prompts]

        def answer(n: int, found: list[Hypothesis]) -> None:
            texts[n] = decode([*before[n], *found[0].tokens])
            if all(text is not None for text in texts):
                job.answer(tuple(cast(list[str], texts)))

        self.enqueue(
            [
                Sentence(
                    None,
                    [self.search.start, *ids][-self.search.length :],
                    request.length,
                    rules,
                    lambda found, n=n: answer(n, found),  # type: ignore[misc]
                    job.fail,
                    job.wanted,
                    streaming(job, n, decode, ids),
                    index=n,
                )
                for n, ids in enumerate(before)
            ]
        )
