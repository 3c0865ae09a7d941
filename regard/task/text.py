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
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Int32
from torch import Tensor, nn

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
from regard.look.record import record
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
    """
    device = model.output.weight.device
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
class Written:
    """A text that was found for a source."""

    text: str
    score: float
    """By which it was ranked."""
    tokens: list[int]
    token_scores: list[float]
    """log p of each token, and of the end sign where it was reached."""


@dataclass(frozen=True)
class Attended:
    """Where a model looked in the source while it wrote each token of a target."""

    source: list[str]
    target: list[str]
    weights: Float[Tensor, "layers H L S"]
    """Row n is of the step that wrote token n."""


class Translator:
    """A trained model with its tokenizers: texts in, texts out."""

    def __init__(
        self,
        model: Transformer,
        tokenizers: tuple[AnyTokenizer, AnyTokenizer] | str,
        how: Search,
        about: Mapping[str, Any] | None = None,
    ):
        """Where there are no tokenizers, a sentence that says so."""
        self.model = model
        self._tokenizers = tokenizers
        self.how = how
        self.about = dict(about or {})

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
        return cls(saved.model, tokenizers, how, about)

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
        self, texts: Iterable[str], *, beams: int | None = None, batch: int = 64
    ) -> Iterator[str]:
        """The same for any number of texts, each as soon as it and all before it are ready.

        A text that is longer than the model is used to is cut into parts, at spaces where there
        are any, and the parts' translations are joined.
        """
        how = self.how if beams is None else replace(self.how, beams=beams)
        counts: deque[int] = deque()

        def parts() -> Iterator[list[int]]:
            for text in texts:
                cut = self._parts(self._encode(text))
                counts.append(len(cut))
                yield from cut

        def decode(sources: list[list[int]]) -> list[str]:
            return [best[0].text if best else "" for best in self._search(sources, how, 1)]

        ready: list[str] = []
        for written in in_order(parts(), decode, sentences=batch):
            ready.append(written)
            if len(ready) == counts[0]:
                yield " ".join(filter(None, ready))
                ready.clear()
                counts.popleft()

    def hypotheses(
        self, texts: Sequence[str], *, n_best: int = 1, beams: int | None = None
    ) -> list[list[Written]]:
        """The best few for each text, best first: none for an empty one; too long a one is cut."""
        how = self.how if beams is None else replace(self.how, beams=beams)
        sources = [self._encode(text)[: how.length] for text in texts]
        return list(in_order(sources, lambda some: self._search(some, how, n_best)))

    def attention(self, text: str, written: str | Sequence[int]) -> Attended:
        """The cross-attention of every layer and head while this was, or is, written."""
        source = [*self._encode(text), self.how.end]
        tokens = self.tokenizer.encode(written) if isinstance(written, str) else list(written)
        device = self.model.output.weight.device
        target = torch.tensor([[self.how.start, *tokens]], device=device)
        with (
            torch.inference_mode(),
            record(self.model, lambda name: name.endswith("cross")) as seen,
        ):
            self.model(torch.tensor([source], device=device), target)
        return Attended(
            self.source_tokenizer.pieces(source),
            self.tokenizer.pieces([*tokens, self.how.end]),
            torch.stack([asked.weights()[0] for asked in seen.values()]).float().cpu(),
        )

    def _encode(self, text: str) -> list[int]:
        return self.source_tokenizer.encode(text.strip())  # as the texts it was trained on

    def _search(self, sources: list[list[int]], how: Search, n_best: int) -> list[list[Written]]:
        real = [source for source in sources if source]
        found: Iterator[list[Hypothesis]] = iter(())
        if real:
            batch = text_batch(
                [(source, ()) for source in real], how.start, how.end, source_end=how.end
            )
            most = [longest(len(source)) for source in real]
            found = iter(
                search(
                    self.model, batch.source, batch.source_lengths, how, most=most, n_best=n_best
                )
            )
        return [[self._written(one) for one in next(found)] if source else [] for source in sources]

    def _written(self, hypothesis: Hypothesis) -> Written:
        # A model may say a line break, but a text stays one line.
        text = " ".join(self.tokenizer.decode(hypothesis.tokens).splitlines())
        return Written(text, hypothesis.score, hypothesis.tokens, hypothesis.token_scores)

    def _parts(self, ids: list[int]) -> list[list[int]]:
        """The ids in stretches of at most the model's length; each but the last ends a word."""
        most, parts = self.how.length, []
        while len(ids) > most:
            pieces = self.source_tokenizer.pieces(ids[most // 2 : most + 1])
            begins = [n for n, piece in enumerate(pieces) if piece.startswith("▁")]
            cut = most // 2 + begins[-1] if begins else most
            parts.append(ids[: max(1, cut)])
            ids = ids[max(1, cut) :]
        return [*parts, ids]


def longest(source: int) -> int:
    """The most tokens that are looked for, from the number of the source's."""
    return 3 * source + 30


# Training


class Transduction:
    """Text to text, as `train.fit` wants a task: sequence transduction, in the paper's words."""

    unit = "tokens"

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
