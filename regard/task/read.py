"""Image to text: an encoder reads patches, a decoder writes the text in the image.

    image -> patches -> encoder -> memory
    start, characters -> decoder, cross-attending to memory -> characters, end

Without user images it reads strips of handwritten digits (digits.py), composed from those that come
with scikit-learn. User images are a folder of images with a text file of captions: a table of names
and texts, or a line for each image.
"""

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Protocol, overload, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Integer, UInt8
from torch import Tensor, nn

from regard import checkpoint
from regard.config import to_json
from regard.data import image
from regard.data.batch import Batch, Side, Sizes, capacity, image_text_batch, plan
from regard.data.diagnosis import Separator
from regard.data.image import Augmentation, Images
from regard.data.pixels import Decoding, Fit
from regard.data.reading import shown
from regard.data.seeding import seeded
from regard.data.text import OnBad
from regard.data.tokenizer import AnyTokenizer, Tokenizer, files, read_pair
from regard.look.record import record
from regard.model.build import GridPosition
from regard.model.embedding import Patches, Size, image_size
from regard.model.transformer import ImageSource, Transformer, TransformerConfig, TransformerShape
from regard.task.digits import Strip, Strips
from regard.task.folder import model_folder
from regard.task.pictures import Picture, Preparation, Single, split, told
from regard.task.precision import load_saved
from regard.task.predictor import Predictor
from regard.task.search import SearchSettings, check_length, search
from regard.task.settings import (
    Precision,
    Preset,
    absolute,
    check_obeyed,
    check_positive,
    check_preset,
    check_start,
    recorded,
)
from regard.task.spec import Evaluation, TaskSpec
from regard.task.text import Progress, compose, exact, transduction_loss
from regard.train.config import TrainingConfig

_VALIDATION = 10_000_019  # seed of the strips for validation, whatever the training seed


def _tiny() -> TransformerShape:
    return TransformerShape(
        width=64,
        heads=4,
        feed_forward=256,
        encoder_layers=3,
        decoder_layers=2,
        activation="gelu",
        norm="pre",
        position="rotary",
        dropout=0.0,
    )


def _short() -> TrainingConfig:
    return TrainingConfig(
        steps=1400,
        batch=128,
        optimizer="muon",
        lr=5e-3,
        schedule="cosine",
        warmup=100,
        smoothing=0.05,
        evaluate_every=400,
        save_every=400,
    )


@dataclass(frozen=True)
class Config:
    """Image to text (OCR, captions) by an encoder-decoder Transformer."""

    images: str | None = None
    """A folder of images; by default strips of scikit-learn's handwritten digits are composed."""
    captions: str | None = None
    """Target texts of the images: a table (name of an image, tab, text), or a text file with a line
    for each image, in the order of their names."""
    separator: Separator = "tab"
    """What separates columns: a tab, or as in CSV files, where cells may stand in quotes."""
    validation: str | None = None
    """Validation set: a folder of images; by default some of the images are held out."""
    validation_captions: str | None = None
    """Validation set: the texts of its images."""
    held_out: float = 0.2
    """Fraction of the images, or of the digits, that is held out."""
    judged: int = 500
    """Validation images that are read at each evaluation."""
    pixels: Size | None = None
    """Image size that all images are resized to: rows and columns, or one number for a square. By
    default 32 × 256, or that of start."""
    channels: Literal[1, 3] | None = None
    """Colour channels: 1 for greyscale, which is the default, or 3."""
    patch: int | None = None
    """Patch size in pixels; by default 4 for strips of digits, and 8 for images."""
    place: GridPosition = "sinusoidal"
    """Position embedding of patches: sinusoidal over rows and columns, or learned."""
    fit: Fit = "pad"
    """Images of another aspect ratio: pad with background (pad), or centre crop (crop)."""
    background: int = 255
    """Grey value of padding, and behind transparent pixels: 0 black to 255 white."""
    on_bad: OnBad = "skip"
    """Bad images and captions: count, show and leave them out (skip), or stop (refuse)."""
    words: Literal["characters", "bpe"] = "characters"
    """Tokenization: characters, or subwords (BPE) learned from the texts."""
    vocabulary: int = 8000
    """Vocabulary size of BPE; fewer where the texts have no more to learn."""
    tokenizer: str | None = None
    """A tokenizer.json to use instead."""
    longest: int = 1000
    """Maximum sequence length in tokens; images with longer texts are left out."""
    cache: str | None = None
    """Cache folder for decoded images; by default in the user's own cache."""
    beams: int = 4
    """Beam size when the trained model is used; evaluations in training are greedy."""
    start: str | None = None
    """Fine-tune: a trained reader's folder, or a run's. Its tokenizer and its shape are kept."""
    strip: Strip = field(default_factory=Strip)
    """Appearance of the strips of digits, if there are no images."""
    augmentation: Augmentation = field(default_factory=Augmentation)
    """Data augmentation; text survives neither flips nor mixing."""
    model: TransformerShape = field(default_factory=_tiny)
    """The Transformer's shape."""
    training: TrainingConfig = field(default_factory=_short)
    """Optimizer, learning-rate schedule, evaluation, checkpoints. A batch is counted in images."""

    def __post_init__(self) -> None:
        if not 0 < self.held_out < 1:
            raise ValueError(f"held_out ({self.held_out}) must be above 0 and below 1; try 0.1")
        check_positive(self, "pixels", "patch")
        for name in ("judged", "longest"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} ({getattr(self, name)}) must be 1 or more")
        check_start(self.start, self.tokenizer)
        for folder, captions in (("images", "captions"), ("validation", "validation_captions")):
            both = getattr(self, folder), getattr(self, captions)
            if (both[0] is None) != (both[1] is None):
                raise ValueError(
                    f"{folder} ({both[0]}) and {captions} ({both[1]}) belong together; name both"
                )
        if self.images is None and self.validation is not None:
            raise ValueError(f"validation ({self.validation}) needs images to go with it")
        if self.augmentation.mixup or self.augmentation.cutmix:
            raise ValueError("mixup and cutmix mix two images, whose texts cannot be mixed")


def preset(size: Preset) -> Config:
    """tiny reads strips of digits after a few minutes on two cores; base and big are for lines of
    text, or captions of photographs, and a GPU."""
    check_preset(size)
    if size == "tiny":
        return Config()
    shape = TransformerShape(activation="gelu", norm="pre")
    if size == "big":
        shape = replace(shape, width=768, heads=12, feed_forward=3072, encoder_layers=12)
    training = TrainingConfig(
        epochs=100, batch=256, lr=5e-4, schedule="cosine", warmup=2000, weight_decay=0.05
    )
    return Config(model=shape, training=training, held_out=0.1)


# Examples


@runtime_checkable
class Examples(Protocol):
    """Images and their texts, by index."""

    count: int
    """Number of examples in an epoch."""

    def number(self, index: Integer[np.ndarray, "B"], epoch: int) -> Integer[np.ndarray, "B"]:
        """Maps indices within an epoch to numbers of examples."""

    def images(self, numbers: Integer[np.ndarray, "B"]) -> UInt8[np.ndarray, "B C Y X"]: ...

    def texts(self, numbers: Integer[np.ndarray, "B"]) -> list[str]: ...


class Composed:
    """Strips, different ones in each epoch; those before `first` belong to no epoch."""

    def __init__(self, strips: Strips, count: int, first: int = 0):
        self.strips, self.count, self.first = strips, count, first
        self.images, self.texts = strips.images, strips.texts

    def number(self, index: Integer[np.ndarray, "B"], epoch: int) -> Integer[np.ndarray, "B"]:
        return self.first + index + epoch * self.count


class Captioned:
    """A folder's images with their captions."""

    def __init__(self, images: Images):
        self.all = images
        self.count = len(images)

    def number(self, index: Integer[np.ndarray, "B"], epoch: int) -> Integer[np.ndarray, "B"]:
        return index

    def images(self, numbers: Integer[np.ndarray, "B"]) -> UInt8[np.ndarray, "B C Y X"]:
        return self.all.batch(numbers).numpy()

    def texts(self, numbers: Integer[np.ndarray, "B"]) -> list[str]:
        assert self.all.texts is not None
        return [self.all.texts[n] for n in numbers.tolist()]


# The task


class Read:
    """Images, their texts, and a model that learns to read them, as `fit` wants it."""

    unit = "tokens"
    signatures: Mapping[str, str] = MappingProxyType({})

    def __init__(
        self,
        model: Transformer,
        tokenizer: AnyTokenizer,
        train: Examples,
        validation: Examples,
        preparation: Preparation,
        settings: SearchSettings,
        config: Config,
        notes: Sequence[str] = (),
    ):
        self.model: nn.Module = model
        self.tokenizer, self.train, self.validation = tokenizer, train, validation
        self.preparation, self.search, self.config = preparation, settings, config
        # Long captions are hardly ever an exact match.
        self.score = "exact_match" if config.images is None else "characters_right"
        self.notes = list(notes)
        """Notes for the user about the images and their captions, one line each."""

    def plan(self, epoch: int) -> list[np.ndarray]:
        training = self.config.training
        ones = np.ones(self.train.count, np.int64)
        batches = plan(ones, training.batch, training.seed, epoch)
        return [self.train.number(batch, epoch) for batch in batches]

    def batch(self, indices: np.ndarray, step: int) -> Batch:
        return _batch(self.train, indices, self.tokenizer, self.search)

    def capacity(self, batches: Iterable[np.ndarray]) -> Sizes:
        def size(numbers: np.ndarray) -> Sizes:
            ids = self.tokenizer.encode_batch(self.train.texts(numbers))
            return Sizes(len(ids), (Side.of(np.array([len(row) for row in ids]), 1),))

        return capacity(map(size, batches), images=True)

    def prepare(self, batch: Batch) -> Batch:
        # The loop has seeded torch for this step, process and part: this number depends on them.
        key = int(torch.randint(2**31, ()))
        seed = self.config.training.seed
        varied = image.augment(batch.source, self.config.augmentation, seed, key)
        return replace(batch, source=self.preparation.normalized(varied))

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        assert isinstance(self.model, Transformer)
        return transduction_loss(self.model, batch, self.config.training.smoothing)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        assert isinstance(model, Transformer)
        greedy = replace(self.search, beams=1)
        return measure(model, self.tokenizer, self.validation, self.preparation, greedy)

    def files(self) -> dict[str, bytes | Path]:
        return dict(files(self.tokenizer, self.tokenizer))

    def run_files(self) -> dict[str, bytes]:
        return {}

    def about(self) -> dict[str, Any]:
        return TASK.about(self.config, {**self.preparation.section(), **to_json(self.search)})


def _batch(
    examples: Examples, numbers: np.ndarray, tokenizer: AnyTokenizer, settings: SearchSettings
) -> Batch:
    ids = tokenizer.encode_batch(examples.texts(numbers))
    return image_text_batch(
        torch.from_numpy(examples.images(numbers)), ids, settings.start, settings.end
    )


@torch.no_grad()
def measure(
    model: Transformer,
    tokenizer: AnyTokenizer,
    examples: Examples,
    preparation: Preparation,
    settings: SearchSettings,
) -> dict[str, float]:
    """Computes the scores of reading these images, and the perplexity of their texts."""
    weight = model.target.table.weight
    written, references, total, count = [], [], 0.0, 0
    numbers = examples.number(np.arange(examples.count), 0)
    for begin in range(0, len(numbers), 128):
        batch_numbers = numbers[begin : begin + 128]
        batch = _batch(examples, batch_numbers, tokenizer, settings).to(weight.device)
        batch = replace(batch, source=preparation.normalized(batch.source).to(weight.dtype))
        written += _read_texts(model, tokenizer, batch.source, settings)
        references += examples.texts(batch_numbers)
        loss, tokens = transduction_loss(model, batch, 0.0)
        total, count = total + float(loss), count + int(tokens)
    return {
        **exact(written, references),
        "characters_right": characters_right(written, references),
        "perplexity": math.exp(min(total / count, 700.0)),
    }


def evaluate(
    folder: str | os.PathLike[str],
    *,
    images: str | None = None,
    captions: str | None = None,
    separator: Separator | None = None,
    count: int | None = None,
    beams: int | None = None,
    precision: Precision = "fp32",
    device: str = "cpu",
    progress: Progress | None = None,
) -> Evaluation:
    """Scores a model, or a run's best model, on these images, by default its held-out images.

    With a `count`, scores it on `count` strips of held-out digits that training has not evaluated.
    """
    saved, _ = load_saved(folder, device, precision)
    reader = Reader(saved)
    config = recorded(Config, saved.task, folder)
    if (images is None) != (captions is None):
        raise ValueError(f"images ({images}) and captions ({captions}) go together; name both")
    if images is None and config is None:
        raise ValueError(
            f"{folder} has no record of its training images; name images to score it on"
        )
    config = config or Config()
    if count is not None and (images is not None or config.images is not None):
        raise ValueError(f"count ({count}) is for strips of digits; images are all read")
    if images is None:
        examples = build(config, None, progress).validation
        if count is not None:
            assert isinstance(examples, Composed)
            examples = Composed(examples.strips, count, first=examples.count)
    else:
        config = replace(config, separator=separator or config.separator)
        decoding = _decoding(replace(config, pixels=None), reader)
        named = _read_images(images, captions, "--captions", decoding, config, progress)
        examples = Captioned(_fitting(named, reader.tokenizer, config))
    search_by = reader.search if beams is None else replace(reader.search, beams=beams)
    scores = measure(reader.model, reader.tokenizer, examples, reader.preparation, search_by)
    problems = examples.all.problems.lines() if isinstance(examples, Captioned) else []
    return Evaluation(scores, problems=problems)


def characters_right(written: Sequence[str], references: Sequence[str]) -> float:
    """1 - (edit distance) / (characters of the references), or 0 if that is negative."""
    written, references = compose(written), compose(references)
    changes = sum(map(_distance, written, references))
    return max(0.0, 1 - changes / max(1, sum(map(len, references))))


def _distance(text: str, other: str) -> int:
    """Levenshtein distance: the least number of insertions, deletions and substitutions."""
    places = np.arange(len(other) + 1)
    letters = np.array(list(other), dtype="U1")
    row = places
    for n, letter in enumerate(text, 1):
        step = np.concatenate([[n], np.minimum(row[1:] + 1, row[:-1] + (letters != letter))])
        # Every insertion costs 1 from the left neighbour, in a run of several as well.
        row = np.minimum.accumulate(step - places) + places
    return int(row[-1])


# Building


def build(config: Config, run: Path | None = None, progress: Progress | None = None) -> Read:
    """Reads or composes the images, and builds the model.

    `progress` receives the number of decoded files; the task's `notes` list the files left out.
    """
    config = absolute(config, "images", "captions", "validation", "validation_captions")
    config = absolute(config, "tokenizer", "cache", "start")
    begun = None if config.start is None else Reader(checkpoint.load(model_folder(config.start)))
    if config.images is None:
        return _strips(config, begun)
    decoding = _decoding(config, begun)
    train = _read_images(config.images, config.captions, "--captions", decoding, config, progress)
    if config.validation is None:
        train, validation = split(train, config.held_out)
    else:
        path, texts = config.validation, config.validation_captions
        validation = _read_images(path, texts, "--validation-captions", decoding, config, progress)
    tokenizer = _tokenizer(config, _texts(train)) if begun is None else begun.tokenizer
    train, validation = (_fitting(part, tokenizer, config) for part in (train, validation))
    ids = tokenizer.encode_batch(_texts(train))
    notes = [*train.problems.lines(), *validation.problems.lines()]
    if unknown := sum(tokenizer.unknown in row for row in ids):
        notes.append(f"{unknown:,} of {len(ids):,} texts have characters that are not known")
    return _task(
        config,
        begun,
        tokenizer,
        Captioned(train),
        Captioned(validation.part(np.arange(min(config.judged, len(validation))))),
        Preparation.trained(decoding, *train.statistics()),
        longest=2 * max(map(len, ids)),
        notes=list(dict.fromkeys(notes)),
    )


def _decoding(config: Config, begun: "Reader | None") -> Decoding:
    size, channels = image_size(config.pixels or (32, 256)), config.channels or 1
    if begun is not None:
        preparation = begun.preparation
        size = preparation.size if config.pixels is None else size
        channels = 1 if preparation.channels == 1 else 3
    return Decoding(size, channels, config.fit, config.background)


def _read_images(
    folder: str,
    captions: str | None,
    flag: str,
    decoding: Decoding,
    config: Config,
    progress: Progress | None,
) -> Images:
    assert captions is not None
    return image.captions(
        folder,
        captions,
        decoding,
        separator=config.separator,
        on_bad=config.on_bad,
        cache=config.cache,
        progress=told(progress),
        flag=flag,
    )


def _fitting(images: Images, tokenizer: AnyTokenizer, config: Config) -> Images:
    """Drops images whose texts are too long, and counts them as problems."""
    texts = _texts(images)
    lengths = tokenizer.encode_packed(texts)[1]
    good = lengths <= config.longest
    for n in np.flatnonzero(~good).tolist():
        images.problems.add("long", f"{lengths[n]:,} tokens: {shown(texts[n])}")
    if not good.any():
        raise ValueError(
            f"all {len(texts):,} texts are longer than longest ({config.longest} tokens); raise it"
        )
    return images if good.all() else images.part(np.flatnonzero(good))


def _texts(images: Images) -> list[str]:
    return list(images.texts or ())


def _tokenizer(config: Config, texts: Sequence[str]) -> Tokenizer:
    if config.tokenizer is not None:
        return Tokenizer.read(config.tokenizer)
    if config.words == "bpe":
        return Tokenizer.bpe(texts, config.vocabulary)
    return Tokenizer.characters(texts)


def _strips(config: Config, begun: "Reader | None") -> Read:
    digits = image.digits()
    # Split by class, as in classify: both hold out the same digits.
    train, validation = split(digits, config.held_out)
    seed, whole = config.training.seed, replace(config.strip, easy=0)
    strips = Strips(train, config.strip, seed)
    others = Strips(validation, whole, _VALIDATION)
    decoding = Decoding((config.strip.rows, config.strip.columns), 1, "pad", background=0)
    sample = Images(Strips(train, whole, seed).images(np.arange(1000)))
    return _task(
        config,
        begun,
        Tokenizer.characters(digits.classes) if begun is None else begun.tokenizer,
        Composed(strips, count=50 * config.training.batch),
        Composed(others, count=config.judged),
        Preparation.trained(decoding, *sample.statistics()),
        longest=2 * config.strip.most,
    )


def _task(
    config: Config,
    begun: "Reader | None",
    tokenizer: AnyTokenizer,
    train: Examples,
    validation: Examples,
    preparation: Preparation,
    *,
    longest: int,
    notes: Sequence[str] = (),
) -> Read:
    settings = SearchSettings.of(tokenizer, beams=config.beams, length=longest)
    if begun is None:
        source = ImageSource(
            image=preparation.size,
            patch=config.patch or (4 if config.images is None else 8),
            channels=preparation.channels,
            position=config.place,
        )
        complete = TransformerConfig(tokenizer.size, source=source, **vars(config.model))
        with seeded(config.training.seed):
            model = Transformer(complete)
        return Read(model, tokenizer, train, validation, preparation, settings, config, notes)
    check_obeyed(config, preset, begun.model.config, begun._about, "words", "vocabulary")
    trained = begun.preparation
    if (trained.size, trained.channels) != (preparation.size, preparation.channels):
        sizes = [f"{p.size[0]} × {p.size[1]} × {p.channels}" for p in (preparation, trained)]
        raise ValueError(
            f"images ({sizes[0]}) must have the rows, columns and channels of {config.start}'s "
            f"({sizes[1]}); leave out pixels and channels"
        )
    # Pixels are scaled as in the model's training.
    preparation = replace(preparation, mean=trained.mean, std=trained.std)
    settings = replace(settings, length=max(settings.length, begun.search.length))
    return Read(begun.model, tokenizer, train, validation, preparation, settings, config, notes)


def _read_texts(
    model: Transformer, tokenizer: AnyTokenizer, x: Tensor, settings: SearchSettings
) -> list[str]:
    """Reads the texts of images that are ready for the model."""
    # Without autocast, whose casts cannot be captured, the search is many times faster.
    with torch.autocast(x.device.type, enabled=False):
        results = search(model, x, None, settings)
    return [tokenizer.decode(hypotheses[0].tokens) for hypotheses in results]


# Use


@dataclass(frozen=True)
class Looked:
    """The cross-attention weights of a reader for each token."""

    text: list[str]
    """The tokens of the text, and EOS."""
    weights: Float[Tensor, "layers H L rows columns"]
    """Row n belongs to the step that wrote token n; rows and columns are the image's patches."""

    def __repr__(self) -> str:
        return f"Looked({''.join(self.text)!r}, weights {tuple(self.weights.shape)})"


class Reader(Predictor):
    """A trained model with its tokenizer, which reads the text in images.

    An image is a file's name, its content in bytes, an image of Pillow's, an array (Y, X) or
    (Y, X, C), or a tensor (C, Y, X). `model` is the `Transformer`, `search` the settings of beam
    search, `grid` the rows and columns of patches, and `preparation` the scaling of images.

    >>> from regard import Reader
    >>> reader = Reader.load("runs/scans")
    >>> type(reader("scan.png")).__name__
    'str'
    >>> reader.grid
    (3, 5)
    """

    _call = "read(images)"

    def __init__(self, saved: checkpoint.Saved):
        model, task = saved.model, saved.task or {}
        if not isinstance(model, Transformer) or not isinstance(model.source, Patches):
            raise ValueError(
                f"{saved.folder} holds a {type(model).__name__} that does not read images; name a "
                "reader's folder"
            )
        self.model: Transformer = model
        self._folder = str(saved.folder)
        self._about = dict(task)
        self.tokenizer, _ = read_pair(saved.folder)
        self.search = SearchSettings.read(task, str(saved.folder / checkpoint.CONFIG))
        self.grid = model.source.grid
        """Rows and columns of patches."""
        self.preparation = Preparation.of(
            {"size": model.source.image, **task}, model.source.channels, saved.folder
        )

    def read(
        self, images: Iterable[Picture], *, beams: int | None = None, batch: int = 64
    ) -> list[str]:
        """Returns the text in each image, by beam search with this many `beams`.

        `batch` images are computed together; `beams` is by default `search.beams`.

        >>> import regard
        >>> len(regard.Reader.load("runs/scans").read(["scan.png", "scan.png"], beams=1))
        2
        """
        settings = self.search if beams is None else replace(self.search, beams=beams)
        return [
            text
            for pixels in self.preparation.batches(images, batch)
            for text in _read_texts(self.model, self.tokenizer, self._prepare(pixels), settings)
        ]

    @overload
    def __call__(self, images: Single, /) -> str: ...  # type: ignore[overload-overlap]
    @overload
    def __call__(self, images: Iterable[Picture], /) -> list[str]: ...
    def __call__(self, images: Single | Iterable[Picture], /) -> str | list[str]:
        """Reads one file or image, or each of a list."""
        if isinstance(images, Iterable) and not isinstance(images, str | bytes | PathLike):
            return self.read(images)
        return self.read([images])[0]

    def _facts(self) -> dict[str, object]:
        rows, columns = self.grid
        vocabulary = f"{self.model.config.vocabulary:,}"
        return {
            "patches": f"{rows} × {columns}",
            "vocabulary": vocabulary,
            "beams": self.search.beams,
        }

    def attention(self, picture: Picture, text: str | None = None) -> Looked:
        """Returns the cross-attention weights of all heads for this text, by default the text read.

        They are (layers, H, L, rows, columns): row n of L belongs to the step that wrote token n.

        >>> import regard
        >>> regard.Reader.load("runs/scans").attention("scan.png", "ab").weights.shape[-2:]
        torch.Size([3, 5])
        """
        if text is None:
            (text,) = self.read([picture])
        tokens = self.tokenizer.encode(text)
        check_length("text", len(tokens), self.search.length)
        x = self._prepare(next(self.preparation.batches([picture], 1)))
        target = torch.tensor([[self.search.start, *tokens]], device=x.device)
        with (
            torch.inference_mode(),
            record(self.model, lambda name: name.endswith("cross")) as records,
        ):
            self.model(x, target)
        weights = torch.stack([layer.weights()[0] for layer in records.values()]).float().cpu()
        return Looked(
            self.tokenizer.pieces([*tokens, self.search.end]), weights.unflatten(-1, self.grid)
        )

    def _prepare(self, pixels: Tensor) -> Tensor:
        return self.preparation.inputs(pixels, self.model.target.table.weight)


TASK = TaskSpec(
    name="read",
    summary="images to text (OCR, captions); by default strips of handwritten digits",
    config=Config,
    preset=preset,
    build=build,
    predictor=Reader,
    evaluate=evaluate,
    example="regard read {run} picture.png",
)
