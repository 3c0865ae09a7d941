"""Text classification: an encoder with a linear head, from scratch or from a trained encoder.

    text → tokens → encoder → mean → head → label

`start` names an encoder that was trained on text alone, or a translator, whose encoder has learned
its source language (transfer learning). With `freeze`, only the head is trained.
"""

import hashlib
import os
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Literal, TypeAlias, overload

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from regard import checkpoint
from regard.data.batch import LabelBatch, Side, Sizes, capacity, label_batch, plan
from regard.data.diagnosis import Separator, foreign
from regard.data.files import beginning
from regard.data.problems import Problems, reason
from regard.data.reading import shown
from regard.data.seeding import seeded
from regard.data.table import Column
from regard.data.text import OnBad, Table
from regard.data.tokenizer import AnyTokenizer, Tokenizer, files, read_pair
from regard.decode.search.hypothesis import check_finite
from regard.model.classifier import ClassifierConfig, ClassifierShape, TextClassifier
from regard.model.encoder import TextEncoder
from regard.model.transformer import Transformer
from regard.task.classes import Confusion
from regard.task.folder import model_folder
from regard.task.precision import load_saved
from regard.task.predictor import Predictor, listed
from regard.task.settings import (
    Precision,
    Preset,
    absolute,
    check_obeyed,
    check_positive,
    check_preset,
    check_start,
    check_texts,
    describe_reuse,
    recorded,
    section,
)
from regard.task.spec import Evaluation, TaskSpec, on_gpu
from regard.task.text import About, Progress
from regard.train.config import TrainingConfig

Words: TypeAlias = Literal["pairs", "characters"]
Labelled: TypeAlias = tuple[str, str]
"""A label and a text."""


def _tiny() -> ClassifierShape:
    return ClassifierShape(width=128, heads=4, feed_forward=256, layers=2, norm="pre", dropout=0.2)


def _short() -> TrainingConfig:
    return TrainingConfig(
        epochs=10,
        minutes=10.0,
        batch=4096,
        lr=1e-3,
        warmup=100,
        weight_decay=0.05,
        evaluate_every=100,
        save_every=100,
        patience=10,
    )


@dataclass(frozen=True)
class Config:
    """Text classification."""

    texts: tuple[str, ...] = ()
    """Tables with a label and a text in each line: TSV or CSV, JSON lines (.jsonl),
    Parquet; or one folder with a folder of text files for each class."""
    columns: tuple[Column, Column] = (0, 1)
    """Which columns are the label and the text: numbers from 0 on, or names, which TSV and CSV have
    in their first line."""
    separator: Separator | None = None
    """Column separator. By default .csv files have commas or semicolons, as their first lines show,
    and other files tabs. Cells may stand in quotes, except between tabs."""
    valid: tuple[str, ...] = ()
    """Validation set, in the same form. Without any, some of the texts are held out."""
    held_out: float = 0.1
    """Fraction of the texts that is held out, by a hash of the text."""
    start: str | None = None
    """Fine-tune (transfer learning): the folder, or the run, of an encoder that was trained on text
    alone (regard train encoder) or of a translator, of which encoder and tokenizer are used; or of
    a text classifier."""
    freeze: bool = False
    """Linear probing: train the classification head alone, and freeze start's encoder."""
    words: Words = "pairs"
    """Tokenization: subwords (BPE) learned from the texts, or characters."""
    vocabulary: int = 8000
    """Vocabulary size of BPE; fewer where the texts have no more to learn."""
    tokenizer: str | None = None
    """A tokenizer.json to use instead of learning one."""
    longest: int = 500
    """Maximum sequence length in tokens; longer texts are truncated."""
    on_bad: OnBad | None = None
    """Bad lines: count, show and leave them out (skip), or stop (refuse). By default they are left
    out, unless more than a tenth of the lines cannot be read."""
    model: ClassifierShape = field(default_factory=_tiny)
    """The encoder's shape; start has one of its own."""
    training: TrainingConfig = field(default_factory=_short)
    """Optimizer, learning-rate schedule, batches, evaluation, checkpoints."""

    def __post_init__(self) -> None:
        if not 0 < self.held_out < 1:
            raise ValueError(f"held_out ({self.held_out}) must be above 0 and below 1; try 0.1")
        if self.longest < 1:
            raise ValueError(f"longest ({self.longest}) must be 1 or more")
        if self.freeze and self.start is None:
            raise ValueError("freeze needs start: there is no trained model to leave as it is")
        check_start(self.start, self.tokenizer)


def preset(size: Preset = "tiny") -> Config:
    """Tiny is for two cores; base and big have the encoders of the paper's models."""
    check_preset(size)
    if size == "tiny":
        return Config()
    shape = ClassifierShape(norm="pre")
    if size == "big":
        shape = replace(shape, width=1024, heads=16, feed_forward=4096, dropout=0.3)
    training = replace(_short(), batch=25_000, lr=3e-4, warmup=1000, minutes=None, epochs=20)
    return Config(vocabulary=32_000, model=shape, training=training)


# Texts


def read(paths: Sequence[str], config: Config, flag: str) -> tuple[list[Labelled], Problems]:
    """Reads labelled texts of tables, or of a folder of classes; `flag` is the option that names
    them."""
    if not paths:
        raise ValueError(f"there are no texts; name a table, or a folder, with {flag}")
    if any(Path(path).is_dir() for path in paths):
        problems = Problems()
        rows = [row for path in paths for row in _folder(Path(path), problems)]
        if not rows:
            raise ValueError(f"there is no text in {flag} {', '.join(paths)}{problems.why}")
        return rows, problems
    table = _table(paths, config, flag)
    rows = [(label, text) for label, text in table.read()]
    return rows, table.problems


def _table(paths: Sequence[str], config: Config, flag: str) -> Table:
    return Table(*paths, columns=config.columns, separator=config.separator, flag=flag)


def _folder(folder: Path, problems: Problems) -> Iterator[Labelled]:
    """One text for each file, one class for each folder."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is a file beside folders; name tables, or folders")
    classes = sorted(path for path in folder.iterdir() if path.is_dir())
    if not classes:
        raise ValueError(f"{folder} has no folders; put the texts of each class into one")
    for place in classes:
        for path in sorted(path for path in place.rglob("*") if path.is_file()):
            if path.name.startswith("."):
                continue
            named = f"{path.parent.name}/{path.name}"
            try:
                data = path.read_bytes()
                text = " ".join(data.decode("utf-8-sig").split())
            except OSError as error:
                problems.add("unreadable", f"{named} ({reason(error)})")
                continue
            except UnicodeDecodeError as error:
                problems.add("undecodable", f"{named}, byte {error.start:,}")
                continue
            if foreign(data):
                problems.add("control", named)
            elif text:
                yield place.name, text
            else:
                problems.add("empty", named)


def _split(rows: Sequence[Labelled], share: float) -> tuple[list[Labelled], list[Labelled]]:
    """Splits rows into training and held-out ones, by a hash of the text."""
    train: list[Labelled] = []
    held_out: list[Labelled] = []
    for row in rows:
        digest = hashlib.blake2b(row[1].encode(), digest_size=8).digest()
        (held_out if int.from_bytes(digest, "big") / 2**64 < share else train).append(row)
    return train, held_out


class Texts:
    """Labelled texts in memory, as tokens."""

    def __init__(
        self,
        rows: Sequence[Labelled],
        labels: Sequence[str],
        tokenizer: AnyTokenizer,
        longest: int,
    ):
        number = {label: n for n, label in enumerate(labels)}
        if unknown := sorted({label for label, _ in rows} - number.keys()):
            raise ValueError(
                f"validation has the labels {', '.join(unknown[:5])}, which training has not; "
                f"known are {', '.join(labels[:20])}"
            )
        self.labels = np.array([number[label] for label, _ in rows], np.int64)
        self.ids = encode_texts(tokenizer, [text for _, text in rows], longest)
        self.lengths = np.array([len(row) for row in self.ids], np.int64)

    def batch(self, indices: np.ndarray) -> LabelBatch:
        return label_batch([self.ids[i] for i in indices.tolist()], self.labels[indices])


def encode_texts(tokenizer: AnyTokenizer, texts: Sequence[str], longest: int) -> list[list[int]]:
    """Encodes the first `longest` tokens of each text, and EOS, as a translator's source."""
    return [[*ids[:longest], tokenizer.end] for ids in tokenizer.encode_batch(texts)]


# The task


def build(config: Config, run: Path | None = None, progress: Progress | None = None) -> "Labels":
    """Reads the texts, holds some out, and builds the model."""
    _check_positions(config)
    config = absolute(config, "texts", "valid", "start", "tokenizer")
    rows, problems = read(config.texts, config, "--texts")
    train, held_out = (rows, []) if config.valid else _split(rows, config.held_out)
    notes = problems.lines()
    if config.valid:
        held_out, others = read(config.valid, config, "--valid")
        notes += others.lines()
        notes += describe_reuse(config.texts, config.valid)
        problems.merge(others)
    problems.check(config.on_bad, len(rows) + len(held_out if config.valid else ()))
    labels = sorted({label for label, _ in rows})
    if not any(Path(path).is_dir() for path in config.texts):
        _check_columns(config, rows)
    notes += _similar(rows)
    if len(labels) < 2 or not held_out or not train:
        raise ValueError(
            f"--texts {', '.join(config.texts)}: usable texts ({len(rows)}) in classes "
            f"({len(labels)}) are too few to train and to validate on{problems.why}; there must be "
            "two classes, and texts of each"
        )
    saved = None if config.start is None else checkpoint.load(model_folder(config.start))
    if run is not None and (run / "last").is_dir():
        tokenizer, _ = read_pair(run / "last")
    elif saved is not None:
        tokenizer, _ = read_pair(saved.folder)
    elif config.tokenizer is not None:
        tokenizer = Tokenizer.read(config.tokenizer)
    elif config.words == "characters":
        tokenizer = Tokenizer.characters(text for _, text in train)
    else:
        tokenizer = Tokenizer.bpe((text for _, text in train), config.vocabulary)
    if progress:
        progress("tokens", 1.0)
    return Labels(
        config,
        saved,
        tokenizer,
        labels,
        Texts(train, labels, tokenizer, config.longest),
        Texts(held_out, labels, tokenizer, config.longest),
        notes,
    )


def _check_positions(config: Config) -> None:
    """Raises if a new model lacks a position for every token and for EOS."""
    shape = config.model
    if config.start is None and shape.position == "learned" and shape.length <= config.longest:
        raise ValueError(
            f"learned positions ({shape.length}) must be more than longest ({config.longest}); "
            "raise the model's length"
        )


def _check_columns(config: Config, rows: Sequence[Labelled]) -> None:
    """Raises if nearly every text has a label of its own: columns are swapped, or one is an id."""
    classes, texts = len({label for label, _ in rows}), len({text for _, text in rows})
    if len(rows) < 10 or classes <= 0.9 * len(rows):
        return
    label, text = config.columns
    if texts <= classes // 2:
        raise ValueError(
            f"--texts {', '.join(config.texts)}: {classes:,} classes for {len(rows):,} texts, of "
            f"which only {texts:,} differ; if label and text are swapped, add "
            f"--columns {text} {label}"
        )
    path, (name, example) = Path(config.texts[0]), rows[0]
    first = f"the first text, {shown(example)}, has the label {shown(name)}"
    if _table(config.texts, config, "--texts").is_text(path):
        first = (
            f"the first line is {shown(beginning(path).decode(errors='replace').splitlines()[0])}"
        )
    raise ValueError(
        f"--texts {', '.join(config.texts)}: {classes:,} classes for {len(rows):,} texts, nearly "
        f"every text has a label of its own; if column {label} is an id, name the columns of label "
        f"and text with --columns; {first}"
    )


def _similar(rows: Sequence[Labelled]) -> list[str]:
    """Notes on labels that differ only in composition (NFC), blanks or invisible characters."""
    counts = Counter(label for label, _ in rows)
    groups: dict[str, list[str]] = {}
    for label in sorted(counts):
        visible = "".join(c for c in label if unicodedata.category(c) != "Cf")
        groups.setdefault(" ".join(unicodedata.normalize("NFC", visible).split()), []).append(label)
    return [
        "labels look alike but are different classes: "
        + ", ".join(f"{label!a} ({counts[label]:,} texts)" for label in group)
        + "; write them in one way"
        for group in groups.values()
        if len(group) > 1
    ]


class Labels:
    """Labelled texts as `train.fit` wants them."""

    score = "accuracy"
    unit = "texts"
    signatures: Mapping[str, str] = MappingProxyType({})

    def __init__(
        self,
        config: Config,
        saved: checkpoint.Saved | None,
        tokenizer: AnyTokenizer,
        labels: Sequence[str],
        train: Texts,
        held: Texts,
        notes: Sequence[str],
    ):
        self.config, self.tokenizer, self.labels = config, tokenizer, list(labels)
        self.train, self.held = train, held
        self.model = _model(config, saved, tokenizer, self.labels)
        self.notes = list(notes)
        """Notes for the user about the data, one line each."""

    def plan(self, epoch: int) -> list[np.ndarray]:
        training = self.config.training
        return list(plan(self.train.lengths, training.batch, training.seed, epoch))

    def capacity(self, batches: Iterable[np.ndarray]) -> Sizes:
        lengths = self.train.lengths
        return capacity(Sizes(len(indices), (Side.of(lengths[indices]),)) for indices in batches)

    def batch(self, indices: np.ndarray, step: int) -> LabelBatch:
        return self.train.batch(indices)

    def loss(self, batch: LabelBatch) -> tuple[Tensor, Tensor]:
        logits = self.model(batch.inputs, lengths=batch.lengths).float()
        smoothing = self.config.training.smoothing
        loss = F.cross_entropy(logits, batch.labels, reduction="sum", label_smoothing=smoothing)
        return loss, batch.tokens

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        assert isinstance(model, TextClassifier)
        return measure(model, self.held, self.config.training.batch)

    def files(self) -> dict[str, bytes | Path]:
        return dict(files(self.tokenizer, self.tokenizer))

    def run_files(self) -> dict[str, bytes]:
        return {}

    def about(self) -> About:
        return TASK.about(self.config, {"labels": self.labels, "length": self.config.longest})


def _model(
    config: Config,
    saved: checkpoint.Saved | None,
    tokenizer: AnyTokenizer,
    labels: Sequence[str],
) -> TextClassifier:
    shape = config.model
    with seeded(config.training.seed):
        if saved is None:
            return TextClassifier(ClassifierConfig(len(labels), tokenizer.size, **asdict(shape)))
        match saved.model:
            case Transformer() | TextEncoder() as trained_on_text:
                model = TextClassifier.of(trained_on_text, len(labels))
            case TextClassifier() as trained:
                same = (saved.task or {}).get("labels") == list(labels)
                model = trained if same else trained.replace_head(len(labels))
            case other:
                raise ValueError(
                    f"start ({config.start}) holds a {type(other).__name__}; name the folder of an "
                    "encoder, a translator or a text classifier"
                )
        check_obeyed(config, preset, model.config, saved.task, "words", "vocabulary")
    return model.freeze_backbone() if config.freeze else model


def measure(model: TextClassifier, held: Texts, budget: int) -> dict[str, float]:
    """The accuracy and the mean loss."""
    right, chosen, loss = judge(model, held, budget)
    return {"accuracy": float((right == chosen).double().mean()), "validation_loss": loss}


@torch.no_grad()
def judge(model: TextClassifier, held: Texts, budget: int) -> tuple[Tensor, Tensor, float]:
    """The correct and the predicted label of each text, and the mean loss."""
    device, right, chosen, loss = model.head.weight.device, [], [], 0.0
    for indices in plan(held.lengths, budget, 0, 0):
        batch = held.batch(indices).to(device)
        logits = model(batch.inputs, lengths=batch.lengths).float()
        right.append(batch.labels.cpu())
        chosen.append(logits.argmax(-1).cpu())
        loss += float(F.cross_entropy(logits, batch.labels, reduction="sum"))
    return torch.cat(right), torch.cat(chosen), loss / len(held.labels)


def evaluate(
    folder: str | os.PathLike[str],
    *,
    texts: Sequence[str] = (),
    columns: tuple[Column, Column] | None = None,
    separator: Separator | None = None,
    precision: Precision = "fp32",
    device: str = "cpu",
    progress: Progress | None = None,
) -> Evaluation:
    """Scores a model, or a run's best model, on these texts, by default all held-out texts."""
    saved, _ = load_saved(folder, device, precision)
    labeler = Labeler(saved)
    config = recorded(Config, saved.task, folder) or Config()
    config = replace(
        config, columns=columns or config.columns, separator=separator or config.separator
    )
    named = tuple(texts) or config.valid
    flag = "--valid" if config.valid and not texts else "--texts"
    rows, problems = read(named or config.texts, config, flag)
    rows_to_score = rows if named else _split(rows, config.held_out)[1]
    if not rows_to_score:
        raise ValueError(f"no text of {', '.join(config.texts)} is held out; name some: --texts")
    examples = Texts(rows_to_score, labeler.labels, labeler.tokenizer, labeler._longest)
    if progress:
        progress("tokens", 1.0)
    right, chosen, loss = judge(labeler.model, examples, config.training.batch)
    confusion = Confusion.of(labeler.labels, right, chosen)
    scores = {
        "accuracy": float((right == chosen).double().mean()),
        "validation_loss": loss,
        "macro_f1": confusion.macro_f1,
    }
    return Evaluation(scores, problems=problems.lines(), confusion=confusion)


# Use


@dataclass(frozen=True)
class _About:
    """The task section of a model's folder."""

    labels: tuple[str, ...] = ()
    length: int = 500

    def __post_init__(self) -> None:
        check_positive(self, "length")


class Labeler(Predictor):
    """A trained classifier with its tokenizer and labels, which classifies texts.

    `model` is the `TextClassifier`, and `labels` its classes.

    >>> from regard import Labeler
    >>> labeler = Labeler.load("runs/mood")
    >>> labeler.labels
    ['bad', 'fair', 'good']
    >>> labeler("What a day!") in labeler.labels
    True
    """

    _call = "label(texts)"

    def __init__(self, saved: checkpoint.Saved):
        if not isinstance(saved.model, TextClassifier):
            raise ValueError(
                f"{saved.folder} holds a {type(saved.model).__name__}; texts are labelled by a "
                "TextClassifier"
            )
        self.model: TextClassifier = saved.model
        self._folder = str(saved.folder)
        self.tokenizer, _ = read_pair(saved.folder)
        about = section(_About, saved.task or {}, saved.folder / checkpoint.CONFIG)
        self.labels = list(about.labels)
        if len(self.labels) != self.model.config.classes:
            raise ValueError(
                f"{saved.folder}: labels ({len(self.labels)}) must be as many as the model's "
                f"classes ({self.model.config.classes})"
            )
        self._longest = about.length

    def label(self, texts: Sequence[str]) -> list[str]:
        """Returns the most probable label of each text.

        >>> import regard
        >>> len(regard.Labeler.load("runs/mood").label(["Fine.", "Oh no."]))
        2
        """
        best = self.probabilities(texts).argmax(-1)
        return [self.labels[n] for n in best.tolist()]

    @overload
    def __call__(self, texts: str, /) -> str: ...  # type: ignore[overload-overlap]
    @overload
    def __call__(self, texts: Sequence[str], /) -> list[str]: ...
    def __call__(self, texts: str | Sequence[str], /) -> str | list[str]:
        """Classifies one text, or each of a list."""
        return self.label([texts])[0] if isinstance(texts, str) else self.label(texts)

    def _facts(self) -> dict[str, object]:
        vocabulary = f"{self.model.config.vocabulary:,}"
        return {"vocabulary": vocabulary, "classes": listed(self.labels)}

    @torch.inference_mode()
    def probabilities(self, texts: Sequence[str], *, batch: int = 4096) -> Float[Tensor, "B N"]:
        """Returns the probability of each label for each text (B, N), in the order of `labels`.

        `batch` is the number of tokens computed together. A model that was trained with label
        smoothing ε gives its best label at most about 1 - ε.

        >>> import regard
        >>> regard.Labeler.load("runs/mood").probabilities(["Fine.", "Oh no."]).shape
        torch.Size([2, 3])
        """
        check_texts(texts)
        ids = encode_texts(self.tokenizer, texts, self._longest)
        results = torch.zeros(len(ids), len(self.labels))
        if not ids:
            return results
        device = self.model.head.weight.device
        for indices in plan(np.array([len(row) for row in ids]), batch, 0, 0):
            rows = label_batch([ids[i] for i in indices.tolist()], [0] * len(indices)).to(device)
            logits = self.model(rows.inputs, lengths=rows.lengths)
            results[torch.from_numpy(indices)] = logits.float().softmax(-1).cpu()
        check_finite(results)
        return results


TASK = TaskSpec(
    name="label",
    summary="text classification, from scratch or on a pretrained encoder",
    config=Config,
    preset=preset,
    build=build,
    predictor=Labeler,
    evaluate=evaluate,
    example='echo "…" | regard label {run}',
    on_device=on_gpu(batch=16_384),
)
