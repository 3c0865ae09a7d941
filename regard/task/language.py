"""A language model of any text predicts each token from the tokens before it.

    text → documents → windows of tokens → LanguageModel → the next token
    bits per byte = Σ -log₂ p(token) / bytes of text          the same for every tokenizer

A model that predicts well can store the text in few bits: `compression` is the ratio of the text's
own bits to them, and the score that selects the best model.
"""

import copy
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor, nn

from regard import checkpoint
from regard.config import to_json
from regard.data.batch import LanguageBatch, Side, Sizes, capacity, language_batch, plan, rows
from regard.data.seeding import seeded
from regard.data.tokenizer import AnyTokenizer, files, read_pair
from regard.decode.batching import in_order
from regard.decode.engine.ensemble import Weights, ensemble, shares
from regard.decode.engine.pick import open_session
from regard.decode.search.greedy import greedy
from regard.decode.search.sample import sample
from regard.model.language import LanguageConfig, LanguageModel, LanguageShape
from regard.task import corpus
from regard.task.corpus import Corpus, CorpusConfig, Examples, Windows
from regard.task.folder import model_folder
from regard.task.precision import load_saved
from regard.task.predictor import Predictor
from regard.task.search import SearchSettings, check_same_tokens
from regard.task.settings import (
    Precision,
    Preset,
    absolute,
    check_obeyed,
    check_preset,
    check_texts,
    recorded,
)
from regard.task.spec import Evaluation, TaskSpec, on_gpu
from regard.task.text import About, Progress
from regard.train.config import TrainingConfig
from regard.train.loss import cross_entropy


def _tiny() -> LanguageShape:
    return LanguageShape(width=128, heads=4, feed_forward=344, layers=4, dropout=0.1)


def _short() -> TrainingConfig:
    return TrainingConfig(
        minutes=20.0,
        batch=4096,
        lr=2e-3,
        warmup=200,
        weight_decay=0.1,
        smoothing=0.0,
        evaluate_every=250,
        save_every=250,
    )


@dataclass(frozen=True)
class Config(CorpusConfig):
    """A language model of any text."""

    examples: Examples = "joined"
    """Scope of attention: all text before a token, in windows that cross document boundaries
    (joined); its document, which blank lines separate (documents); or its line (lines)."""
    context: int = 256
    """Context length in tokens, which is the sequence length of training."""
    start: str | None = None
    """Fine-tune: a trained language model's folder, or a run's."""
    model: LanguageShape = field(default_factory=_tiny)
    """The model's shape."""
    training: TrainingConfig = field(default_factory=_short)
    """Optimizer, learning-rate schedule, batches, evaluation, checkpoints."""


def preset(size: Preset = "tiny") -> Config:
    """Tiny is for two cores; base and big are as large as GPT-2's first two (Radford et al. 2019),
    for a GPU."""
    check_preset(size)
    if size == "tiny":
        return Config()
    shape = LanguageShape(width=768, heads=12, feed_forward=2048, layers=12, dropout=0.0)
    if size == "big":
        shape = replace(shape, width=1024, heads=16, feed_forward=2736, layers=24)
    return Config(
        context=1024,
        vocabulary=32_000,
        judged=1_000_000,
        model=shape,
        training=TrainingConfig(
            steps=100_000,
            batch=500_000,
            lr=6e-4 if size == "base" else 3e-4,
            schedule="cosine",
            warmup=2000,
            betas=(0.9, 0.95),
            weight_decay=0.1,
            smoothing=0.0,
            evaluate_every=1000,
            save_every=1000,
        ),
    )


# The task


def build(
    config: Config, run: Path | None = None, progress: Progress | None = None
) -> "LanguageTask":
    """Reads and tokenizes the text, holds some out, and builds the model."""
    if config.start is None:
        corpus.check_positions(config.model, config.context)
    config = absolute(config, "text", "valid", "start", "tokenizer", "cache")
    saved = None if config.start is None else checkpoint.load(model_folder(config.start))
    return LanguageTask(config, saved, corpus.read(config, run, saved, progress))


class LanguageTask:
    """Text for a language model, as `train.fit` wants it."""

    score = "compression"
    unit = "tokens"
    signatures: Mapping[str, str] = MappingProxyType({})

    def __init__(
        self,
        config: Config,
        saved: checkpoint.Saved | None,
        text: Corpus,
    ):
        self.config, self.tokenizer, self.train = config, text.tokenizer, text.train
        self.held = text.held
        self.model = _model(config, saved, text.tokenizer)
        self.notes = list(text.notes)
        """Notes for the user about the data, one line each."""
        self.search = SearchSettings.of(text.tokenizer, beams=1, length=config.context)
        self._judged = text.held.first(config.judged)
        self._bytes = self._judged.bytes(text.tokenizer)
        self.sample = corpus.sample(self._judged, self.held)

    def plan(self, epoch: int) -> list[np.ndarray]:
        training = self.config.training
        lengths = self.train.places[:, 2]
        if self.config.examples == "joined" and len(lengths):
            # All windows but the last of a text are full. With the same number in each, a batch is
            # a rectangular tensor, for which attention has its fastest kernels.
            lengths = np.full_like(lengths, lengths.max())
        return list(plan(lengths, training.batch, training.seed, epoch))

    def capacity(self, batches: Iterable[np.ndarray]) -> Sizes:
        lengths = self.train.places[:, 2]
        sizes = [Sizes(len(indices), (Side.of(lengths[indices]),)) for indices in batches]
        return rows(sizes) or capacity(sizes)

    def batch(self, indices: np.ndarray, step: int) -> LanguageBatch:
        return _batch(self.train, indices, self.search)

    def loss(self, batch: LanguageBatch) -> tuple[Tensor, Tensor]:
        return _loss(self.model, batch, self.config.training.smoothing)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        assert isinstance(model, LanguageModel)
        return measure(model, self._judged, self.search, self._bytes, self.config.training.batch)

    def evaluate_all(self, model: nn.Module) -> dict[str, float]:
        assert isinstance(model, LanguageModel)
        size = self.held.bytes(self.tokenizer)
        return measure(model, self.held, self.search, size, self.config.training.batch)

    def files(self) -> dict[str, bytes | Path]:
        return dict(files(self.tokenizer, self.tokenizer))

    def run_files(self) -> dict[str, bytes]:
        return {}

    def about(self) -> About:
        counts = {"tokens": int(self.train.places[:, 2].sum())}
        return TASK.about(self.config, {**counts, **to_json(self.search)})


def _model(
    config: Config, saved: checkpoint.Saved | None, tokenizer: AnyTokenizer
) -> LanguageModel:
    if saved is not None:
        if not isinstance(saved.model, LanguageModel):
            raise ValueError(
                f"start ({config.start}) holds a {type(saved.model).__name__}; name a language "
                "model's folder"
            )
        check_obeyed(config, preset, saved.model.config, saved.task, "words", "vocabulary")
        return saved.model
    with seeded(config.training.seed):
        return LanguageModel(LanguageConfig(tokenizer.size, **asdict(config.model)))


def _batch(text: Windows, indices: np.ndarray, settings: SearchSettings) -> LanguageBatch:
    return language_batch(text.text.tokens, text.places[indices], settings.start, settings.end)


def _loss(model: LanguageModel, batch: LanguageBatch, smoothing: float) -> tuple[Tensor, Tensor]:
    states = model.states(batch.inputs, lengths=batch.lengths)
    return cross_entropy(states, model.output, batch.labels, smoothing), batch.tokens


@torch.no_grad()
def measure(
    model: LanguageModel, held: Windows, settings: SearchSettings, size: int, budget: int
) -> dict[str, float]:
    """Scores the predictions of windows of text that have `size` bytes together."""
    device, total, count = model.tokens.table.weight.device, 0.0, 0
    for indices in plan(held.places[:, 2], budget, 0, 0):
        loss, tokens = _loss(model, _batch(held, indices, settings).to(device), 0.0)
        total, count = total + float(loss), count + int(tokens)
    bits = total / math.log(2) / max(1, size)
    return {
        "compression": 8 / max(bits, 1e-9),
        "bits_per_byte": bits,
        "perplexity": math.exp(min(total / count, 700.0)),
    }


def evaluate(
    folder: str | os.PathLike[str],
    *,
    texts: Sequence[str] = (),
    precision: Precision = "fp32",
    device: str = "cpu",
    progress: Progress | None = None,
) -> Evaluation:
    """Scores a model, or a run's best model, on these files, by default on all held-out text."""
    saved, _ = load_saved(folder, device, precision)
    generator = Generator(saved)
    config = recorded(Config, generator._about, folder)
    if config is None:
        raise ValueError(f"{folder} has no record of its training text; train it with regard")
    tokenizer = generator.tokenizer
    named = tuple(texts) or config.valid
    flag = "--texts" if texts else "--valid" if config.valid else "--text"
    text = corpus.named(named or config.text, config.examples, flag)
    settings = replace(config, on_bad=config.on_bad or "skip")
    read = corpus.stored(settings, text, tokenizer, progress)
    if named:
        windows = corpus.cut(config, read, tokenizer.end)
    else:
        _, windows = corpus.split(config, read, tokenizer.end)
    size = windows.bytes(tokenizer)
    scores = measure(generator.model, windows, generator.search, size, config.training.batch)
    return Evaluation(scores, problems=read.problems.lines())


# Use


class Generator(Predictor):
    """A trained language model with its tokenizer, which continues texts.

    `model` is the `LanguageModel`, and `search` has its special tokens and its context length.

    >>> from regard import Generator
    >>> generator = Generator.load("runs/stories")
    >>> generator("Once upon a time").startswith("Once")
    True
    """

    _call = "generate(prompts)"

    def __init__(self, saved: checkpoint.Saved):
        if not isinstance(saved.model, LanguageModel):
            raise ValueError(
                f"{saved.folder} holds a {type(saved.model).__name__}; text is generated by a "
                "LanguageModel"
            )
        self.model: LanguageModel = saved.model
        self._members = [saved.model]
        """All models of an ensemble."""
        self._weights: Weights | None = None
        self._folder = str(saved.folder)
        self.tokenizer, _ = read_pair(saved.folder)
        self._about = dict(saved.task or {})
        self.search = SearchSettings.read(self._about, str(saved.folder / checkpoint.CONFIG))

    def ensemble(
        self, others: "Sequence[Generator]", weights: Weights | None = None
    ) -> "Generator":
        """Returns an ensemble of this generator and others, which averages their probabilities.

        The members need the same tokenizer. By default all `weights` are equal.

        >>> import regard
        >>> first, second = (regard.Generator.load("runs/stories") for _ in range(2))
        >>> first.ensemble([second], [0.7, 0.3]).generate(["Once"], length=3, temperature=0)
        ['Once...']
        """
        members = [self, *others]
        if any(len(member._members) > 1 for member in members):
            raise ValueError("an ensemble is no member of another; name all generators at once")
        check_same_tokens(members)
        combined = copy.copy(self)
        combined._members = [member.model for member in members]
        combined._weights = shares(weights, len(combined._members))
        combined.search = replace(
            self.search, length=min(member.search.length for member in members)
        )
        return combined

    @overload
    def __call__(self, prompts: str, /) -> str: ...  # type: ignore[overload-overlap]
    @overload
    def __call__(self, prompts: Sequence[str], /) -> list[str]: ...
    def __call__(self, prompts: str | Sequence[str], /) -> str | list[str]:
        """Continues one prompt, or each of a list."""
        return self.generate([prompts])[0] if isinstance(prompts, str) else self.generate(prompts)

    def _models(self) -> list[LanguageModel]:
        return self._members

    def _facts(self) -> dict[str, object]:
        members = {"members": len(self._members)} if len(self._members) > 1 else {}
        vocabulary = f"{self.model.config.vocabulary:,}"
        return {**members, "vocabulary": vocabulary, "context": self.search.length}

    def generate(
        self,
        prompts: Sequence[str],
        *,
        length: int = 200,
        temperature: float | int = 0.8,
        top_k: int | None = None,
        top_p: float | int | None = 0.95,
        seed: int = 0,
        first: int = 0,
        batch: int = 64,
    ) -> list[str]:
        """Returns each prompt continued by at most `length` tokens.

        Tokens are sampled at this `temperature` from the `top_k` most probable, and from the most
        probable that together have the probability `top_p`. A temperature of 0 is greedy search.
        Prompt n, counted from `first`, draws from (seed, n), so that equal calls give equal texts.
        `batch` prompts are computed together. A long prompt is truncated at its beginning to the
        model's context length.

        >>> import regard
        >>> generator = regard.Generator.load("runs/stories")
        >>> texts = generator.generate(["Once", "Once"], length=9, seed=1)
        >>> texts == generator.generate(["Once", "Once"], length=9, seed=1)
        True
        """
        check_texts(prompts, "prompts")
        settings = self.search
        before = [self.tokenizer.encode(prompt) for prompt in prompts]

        def go_on(rows: list[tuple[int, list[int]]]) -> list[str]:
            begins = [[settings.start, *ids][-settings.length :] for _, ids in rows]
            rules: dict[str, Any] = {
                "end": settings.end,
                "max_length": length,
                "banned": settings.banned,
            }
            most = max(map(len, begins)) + length
            sessions = [open_session(model, rows=len(rows), length=most) for model in self._members]
            with ensemble(sessions, self._weights) as session:
                if temperature == 0:
                    continuations = greedy(session, begins, **rules)
                else:
                    continuations = sample(
                        session,
                        begins,
                        temperature=temperature,
                        top_k=top_k,
                        top_p=top_p,
                        seed=seed,
                        indices=[first + n for n, _ in rows],
                        **rules,
                    )
            return [
                self.tokenizer.decode([*ids, *continuation.tokens])
                for (_, ids), continuation in zip(rows, continuations)
            ]

        items = list(enumerate(before))
        return list(in_order(items, go_on, length=lambda item: len(item[1]) + 1, sentences=batch))


TASK = TaskSpec(
    name="language",
    summary="a language model of any text",
    config=Config,
    preset=preset,
    build=build,
    predictor=Generator,
    evaluate=evaluate,
    example='echo "…" | regard generate {run}',
    on_device=on_gpu(batch=32_768, evaluate_every=500, save_every=500, patience=8),
)
