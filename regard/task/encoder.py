"""Masked language modelling: an encoder learns from text alone to predict hidden tokens.

    text → lines → tokens, some hidden → TextEncoder → the hidden ones

The encoder (Devlin et al. 2019) helps tasks with few labelled texts: `regard train label` and
`regard train translate` fine-tune it by `--start`.
"""

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Literal, TypeAlias, overload

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard import checkpoint
from regard.data.batch import Hiding, MaskedBatch, Side, Sizes, capacity, masked_batch, plan
from regard.data.seeding import rng, seeded
from regard.data.tokenizer import AnyTokenizer, files, read_pair
from regard.decode.search.hypothesis import check_finite
from regard.model.classifier import mean_pool
from regard.model.encoder import EncoderConfig, EncoderShape, TextEncoder
from regard.task import corpus
from regard.task.corpus import Corpus, CorpusConfig, Windows
from regard.task.folder import model_folder
from regard.task.precision import load_saved
from regard.task.predictor import Predictor
from regard.task.settings import (
    Precision,
    Preset,
    absolute,
    check_obeyed,
    check_positive,
    check_preset,
    check_texts,
    recorded,
    section,
)
from regard.task.spec import Evaluation, TaskSpec, on_gpu
from regard.task.text import About, Progress
from regard.train.config import TrainingConfig
from regard.train.loss import cross_entropy

Examples: TypeAlias = Literal["lines", "documents"]

MASK = "[MASK]"
"""The placeholder of a hidden token in the texts of `fill`."""


def _tiny() -> EncoderShape:
    return EncoderShape(width=128, heads=4, feed_forward=256, layers=2, norm="pre", dropout=0.1)


def _short() -> TrainingConfig:
    return TrainingConfig(
        minutes=20.0,
        batch=4096,
        lr=1e-3,
        warmup=200,
        weight_decay=0.05,
        smoothing=0.0,
        evaluate_every=250,
        save_every=250,
    )


@dataclass(frozen=True)
class Config(CorpusConfig):
    """An encoder of any text, for `regard train label` and `regard train translate` to start from.

    Some tokens of each text are hidden, and the model learns to predict them (masked language
    modelling, as BERT).
    """

    examples: Examples = "lines"
    """Scope of attention: lines, or documents, which blank lines separate. Choose the one that is
    more like the texts of the later task."""
    context: int = 256
    """Maximum sequence length in tokens; longer texts are cut into several."""
    hidden: float = 0.15
    """Share of the tokens that are hidden."""
    start: str | None = None
    """Fine-tune: a trained encoder's folder, or a run's."""
    vocabulary: int = 8000
    """Vocabulary size of BPE; fewer where the text has no more to learn."""
    model: EncoderShape = field(default_factory=_tiny)
    """The encoder's shape."""
    training: TrainingConfig = field(default_factory=_short)
    """Optimizer, learning-rate schedule, batches, evaluation, checkpoints."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.hidden < 1:
            raise ValueError(f"hidden ({self.hidden}) must be above 0 and below 1; try 0.15")


def preset(size: Preset = "tiny") -> Config:
    """Tiny is for two cores; base and big are as large as BERT's two (Devlin et al. 2019), for a
    GPU."""
    check_preset(size)
    if size == "tiny":
        return Config()
    shape = EncoderShape(
        width=768, heads=12, feed_forward=3072, layers=12, norm="pre", activation="gelu"
    )
    if size == "big":
        shape = replace(shape, width=1024, heads=16, feed_forward=4096, layers=24)
    return Config(
        context=512,
        vocabulary=32_000,
        judged=1_000_000,
        model=shape,
        training=TrainingConfig(
            steps=100_000,
            batch=130_000,
            lr=1e-4,
            schedule="cosine",
            warmup=10_000,
            betas=(0.9, 0.999),
            weight_decay=0.01,
            smoothing=0.0,
            evaluate_every=1000,
            save_every=1000,
        ),
    )


# The task


def build(config: Config, run: Path | None = None, progress: Progress | None = None) -> "Hidden":
    """Reads and tokenizes the text, holds some out, and builds the model."""
    if config.start is None:
        corpus.check_positions(config.model, config.context)
    config = absolute(config, "text", "valid", "start", "tokenizer", "cache")
    saved = None if config.start is None else checkpoint.load(model_folder(config.start))
    return Hidden(config, saved, corpus.read(config, run, saved, progress))


class Hidden:
    """Text with hidden tokens, as `train.fit` wants it."""

    score = "accuracy"
    unit = "hidden tokens"
    signatures: Mapping[str, str] = MappingProxyType({})

    def __init__(self, config: Config, saved: checkpoint.Saved | None, text: Corpus):
        self.config, self.tokenizer = config, text.tokenizer
        self.hiding = _hiding(text.tokenizer, config.hidden)
        self.train, self.held = (_with_tokens(part) for part in (text.train, text.held))
        self.model = _model(config, saved, text.tokenizer)
        self.notes = list(text.notes)
        """Notes for the user about the data, one line each."""
        self._judged = self.held.first(config.judged)
        self.sample = corpus.sample(self._judged, self.held)

    def plan(self, epoch: int) -> list[np.ndarray]:
        training = self.config.training
        return list(plan(self.train.places[:, 2], training.batch, training.seed, epoch))

    def capacity(self, batches: Iterable[np.ndarray]) -> Sizes:
        lengths, chosen = self.train.places[:, 2], self.hiding.counts(_tokens(self.train))
        return capacity(
            Sizes(len(rows), (Side.of(lengths[rows]), Side.of(chosen[rows]))) for rows in batches
        )

    def batch(self, indices: np.ndarray, step: int) -> MaskedBatch:
        """Each text draws from (seed, step, its index), independent of the rest of the batch."""
        return _batch(self.train, indices, self.tokenizer, self.hiding, self._seed, step)

    @property
    def _seed(self) -> int:
        return self.config.training.seed

    def loss(self, batch: MaskedBatch) -> tuple[Tensor, Tensor]:
        return _loss(self.model, batch, self.config.training.smoothing)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return self._scores(model, self._judged)

    def evaluate_all(self, model: nn.Module) -> dict[str, float]:
        return self._scores(model, self.held)

    def _scores(self, model: nn.Module, windows: Windows) -> dict[str, float]:
        assert isinstance(model, TextEncoder)
        return measure(model, windows, self.tokenizer, self.hiding, self.config.training.batch)

    def files(self) -> dict[str, bytes | Path]:
        return dict(files(self.tokenizer, self.tokenizer))

    def run_files(self) -> dict[str, bytes]:
        return {}

    def about(self) -> About:
        counts = {"tokens": int(_tokens(self.train).sum()), "length": self.config.context}
        return TASK.about(self.config, counts)


def _hiding(tokenizer: AnyTokenizer, share: float) -> Hiding:
    """Uses the padding token as the mask token: packed batches have no padding."""
    special = {tokenizer.pad, tokenizer.start, tokenizer.end, tokenizer.unknown}
    others = [token for token in range(tokenizer.size) if token not in special]
    return Hiding(share, tokenizer.pad, np.array(others, np.int64))


def _tokens(text: Windows) -> np.ndarray:
    """The number of tokens of each window that can be hidden: all but a document's end."""
    document, first, count = text.places.T
    return np.minimum(count, text.text.lengths[document] - first)


def _with_tokens(text: Windows) -> Windows:
    """Drops windows that hold only the end of a document."""
    return replace(text, places=text.places[_tokens(text) > 0])


def _batch(
    text: Windows,
    indices: np.ndarray,
    tokenizer: AnyTokenizer,
    hiding: Hiding,
    seed: int,
    step: int,
) -> MaskedBatch:
    chances = (rng(seed, step, number) for number in indices.tolist())
    return masked_batch(text.text.tokens, text.places[indices], tokenizer.end, hiding, chances)


def _model(config: Config, saved: checkpoint.Saved | None, tokenizer: AnyTokenizer) -> TextEncoder:
    if saved is not None:
        if not isinstance(saved.model, TextEncoder):
            raise ValueError(
                f"start ({config.start}) holds a {type(saved.model).__name__}; name the folder of "
                "an encoder, trained by regard train encoder"
            )
        check_obeyed(config, preset, saved.model.config, saved.task, "words", "vocabulary")
        return saved.model
    with seeded(config.training.seed):
        return TextEncoder(EncoderConfig(tokenizer.size, **asdict(config.model)))


def _loss(model: TextEncoder, batch: MaskedBatch, smoothing: float) -> tuple[Tensor, Tensor]:
    """The loss over hidden tokens; no other logits are computed."""
    states = model.features(batch.inputs, lengths=batch.lengths)[0, batch.hidden]
    return cross_entropy(states, model.output, batch.labels, smoothing), batch.tokens


@torch.no_grad()
def measure(
    model: TextEncoder, held: Windows, tokenizer: AnyTokenizer, hiding: Hiding, budget: int
) -> dict[str, float]:
    """The accuracy for hidden tokens, which are the same every time, and their perplexity."""
    device, right, total, count = next(model.parameters()).device, 0, 0.0, 0
    for indices in plan(held.places[:, 2], budget, 0, 0):
        batch = _batch(held, indices, tokenizer, hiding, 0, 0).to(device)
        states = model.features(batch.inputs, lengths=batch.lengths)[0, batch.hidden]
        right += int((model.output(states).argmax(-1) == batch.labels).sum())
        total += float(cross_entropy(states, model.output, batch.labels))
        count += int(batch.tokens)
    return {"accuracy": right / count, "perplexity": math.exp(min(total / count, 700.0))}


def evaluate(
    folder: str | os.PathLike[str],
    *,
    texts: Sequence[str] = (),
    precision: Precision = "fp32",
    device: str = "cpu",
    progress: Progress | None = None,
) -> Evaluation:
    """Scores a model, or a run's best model, on hidden tokens of these files, by default of all
    held-out text."""
    saved, _ = load_saved(folder, device, precision)
    encoder = TextEmbedder(saved)
    config = recorded(Config, saved.task, folder)
    if config is None:
        raise ValueError(f"{folder} has no record of its training text; train it with regard")
    tokenizer = encoder.tokenizer
    named = tuple(texts) or config.valid
    flag = "--texts" if texts else "--valid" if config.valid else "--text"
    text = corpus.named(named or config.text, config.examples, flag)
    settings = replace(config, on_bad=config.on_bad or "skip")
    read = corpus.stored(settings, text, tokenizer, progress)
    if named:
        windows = corpus.cut(config, read, tokenizer.end)
    else:
        _, windows = corpus.split(config, read, tokenizer.end)
    hiding = _hiding(tokenizer, config.hidden)
    budget = config.training.batch
    scores = measure(encoder.model, _with_tokens(windows), tokenizer, hiding, budget)
    return Evaluation(scores, problems=read.problems.lines())


# Use


@dataclass(frozen=True)
class _About:
    """The task section of a model's folder."""

    length: int = 256

    def __post_init__(self) -> None:
        check_positive(self, "length")


class TextEmbedder(Predictor):
    """A trained encoder with its tokenizer, which computes vectors of texts and fills in [MASK].

    `model` is the `TextEncoder`.

    >>> from regard import TextEmbedder
    >>> embedder = TextEmbedder.load("runs/words")
    >>> embedder("A dog.").shape, embedder(["A dog.", "A cat."]).shape
    (torch.Size([16]), torch.Size([2, 16]))
    """

    _call = "encode(texts)"

    def __init__(self, saved: checkpoint.Saved):
        if not isinstance(saved.model, TextEncoder):
            raise ValueError(
                f"{saved.folder} holds a {type(saved.model).__name__}; texts are encoded by a "
                "TextEncoder"
            )
        self.model: TextEncoder = saved.model
        self._folder = str(saved.folder)
        self.tokenizer, _ = read_pair(saved.folder)
        self._length = section(_About, saved.task or {}, saved.folder / checkpoint.CONFIG).length

    @overload
    def __call__(self, texts: str, /) -> Float[Tensor, "D"]: ...
    @overload
    def __call__(self, texts: Sequence[str], /) -> Float[Tensor, "B D"]: ...
    def __call__(self, texts: str | Sequence[str], /) -> Tensor:
        """The vector of one text, or of each of a list."""
        return self.encode([texts])[0] if isinstance(texts, str) else self.encode(texts)

    def _facts(self) -> dict[str, object]:
        return {"vocabulary": f"{self.model.config.vocabulary:,}"}

    @torch.inference_mode()
    def encode(self, texts: Sequence[str], *, batch: int = 4096) -> Float[Tensor, "B D"]:
        """Returns a vector for each text (B, D): the mean of the vectors of its tokens.

        `batch` is the number of tokens computed together.

        >>> import regard
        >>> regard.TextEmbedder.load("runs/words").encode(["A dog.", "A cat."]).shape
        torch.Size([2, 16])
        """
        check_texts(texts)
        ids = [
            [*row[: self._length], self.tokenizer.end] for row in self.tokenizer.encode_batch(texts)
        ]
        vectors = torch.zeros(len(ids), self.model.config.width)
        for indices in plan(np.array([len(row) for row in ids]), batch, 0, 0) if ids else ():
            batch_ids = [ids[i] for i in indices.tolist()]
            rows, lengths = _pad(batch_ids, self.tokenizer.pad, self.device)
            states = self.model.features(rows, lengths=lengths)
            vectors[torch.from_numpy(indices)] = mean_pool(states, lengths).float().cpu()
        return vectors

    @torch.inference_mode()
    def fill(self, texts: Sequence[str], *, best: int = 5) -> list[list[tuple[str, float]]]:
        """Returns the `best` tokens for the [MASK] of each text, with their probabilities.

        >>> import regard
        >>> (guesses,) = regard.TextEmbedder.load("runs/words").fill(["A [MASK] cat."], best=2)
        >>> [len(guess) for guess in guesses]
        [2, 2]
        """
        check_texts(texts)
        return [self._fill(text, best) for text in texts]

    def _fill(self, text: str, best: int) -> list[tuple[str, float]]:
        ids, place = self._hide(text)
        states = self.model.features(torch.tensor([ids], device=self.device))[:, place]
        logs = self._guesses(states)[0]
        check_finite(logs)
        top = logs.exp().topk(min(best, len(logs)))
        words = [self.tokenizer.decode([token]).strip() for token in top.indices.tolist()]
        return list(zip(words, top.values.tolist()))

    def _hide(self, text: str) -> tuple[list[int], int]:
        """Tokenizes a text with one [MASK]; returns its tokens and the position of [MASK]."""
        before, mask, after = text.partition(MASK)
        if not mask or MASK in after:
            raise ValueError(f"{text!r} must have one {MASK}, which stands for the hidden word")
        tokenizer = self.tokenizer
        left, right = tokenizer.encode(before.rstrip()), tokenizer.encode(after.lstrip())
        return [*left, tokenizer.pad, *right, tokenizer.end], len(left)

    def _guesses(self, states: Float[Tensor, "B D"]) -> Float[Tensor, "B N"]:
        """log p of each token at the positions of these states."""
        tokenizer, logits = self.tokenizer, self.model.output(states).float()
        logits[:, [tokenizer.pad, tokenizer.start, tokenizer.end]] = -math.inf
        return logits.log_softmax(-1)


def _pad(rows: Sequence[Sequence[int]], pad: int, device: torch.device) -> tuple[Tensor, Tensor]:
    lengths = torch.tensor([len(row) for row in rows], device=device)
    whole = torch.full((len(rows), int(lengths.max())), pad, device=device)
    for into, row in zip(whole, rows):
        into[: len(row)] = torch.tensor(row)
    return whole, lengths


TASK = TaskSpec(
    name="encoder",
    summary="an encoder of any text (masked tokens), for label and translate to start from",
    config=Config,
    preset=preset,
    build=build,
    predictor=TextEmbedder,
    evaluate=evaluate,
    example="regard train label NEW --texts labelled.tsv --start {run}",
    on_device=on_gpu(batch=32_768, evaluate_every=500, save_every=500, patience=8),
)
