"""Image classification: the Vision Transformer on any labelled images.

    images -> folders, idx or npz -> augment, normalize -> VisionTransformer -> cross-entropy

Without user images it is trained on the 1,797 handwritten digits that come with scikit-learn.
`start` names a trained model to fine-tune: its head is replaced by one for the new classes, and its
position table is resized if the images have another size.
"""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from os import PathLike
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, overload

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from regard import checkpoint
from regard.data import image
from regard.data.batch import LabelBatch, MixedBatch, Sizes, capacity, image_batch, plan
from regard.data.image import Augmentation, Images
from regard.data.pixels import Decoding, Fit
from regard.data.seeding import seeded
from regard.data.text import OnBad
from regard.decode.search.hypothesis import check_finite
from regard.model.embedding import Size, image_size
from regard.model.vit import VisionConfig, VisionShape, VisionTransformer
from regard.task.classes import Confusion
from regard.task.folder import model_folder
from regard.task.pictures import Picture, Preparation, Single, split, told
from regard.task.precision import load_saved
from regard.task.predictor import Predictor, listed
from regard.task.settings import (
    Precision,
    Preset,
    absolute,
    check_obeyed,
    check_positive,
    check_preset,
    describe_reuse,
    recorded,
)
from regard.task.spec import Evaluation, TaskSpec
from regard.task.text import Progress
from regard.train.config import TrainingConfig


def _tiny() -> VisionShape:
    return VisionShape(
        layers=3, width=96, heads=6, feed_forward=384, position="sinusoidal", pool="mean"
    )


def _short() -> TrainingConfig:
    return TrainingConfig(
        steps=600,
        batch=128,
        lr=3e-3,
        schedule="cosine",
        warmup=60,
        weight_decay=0.05,
        evaluate_every=100,
        save_every=200,
    )


@dataclass(frozen=True)
class Config:
    """Image classification by a Vision Transformer.

    --size base is ViT-B/16 and big ViT-L/16, as in the paper: learned positions, a class token,
    patches of 16 pixels in images of 224. tiny, for small images on two cores, has sinusoidal
    positions, the mean of all patches instead of a class token, and patches from 4 pixels on; to
    have them as in the paper: --model.position learned --model.pool class.
    """

    images: str | None = None
    """A folder with one folder of images for each class, an idx file, or an npz archive; by default
    scikit-learn's handwritten digits."""
    labels: str | None = None
    """The idx file of labels, where images is one."""
    validation: str | None = None
    """Validation set, in the same form; by default some of the images are held out."""
    validation_labels: str | None = None
    """The idx file of labels, where validation is one."""
    held_out: float = 0.2
    """Fraction of each class that is held out, where there is no validation set."""
    pixels: Size | None = None
    """Image size that all images are resized to: rows and columns, or one number for a square. By
    default an archive's own, that of start, or 32."""
    channels: Literal[1, 3] | None = None
    """Colour channels: 3, or 1 for greyscale; by default an archive's own, those of start, or 3."""
    patch: int | None = None
    """Patch size in pixels; by default 4 for small images, and up to 16 for large ones."""
    fit: Fit = "crop"
    """Images of another aspect ratio: centre crop (crop), or pad with background (pad)."""
    background: int = 255
    """Grey value of padding, and behind transparent pixels: 0 black to 255 white."""
    on_bad: OnBad = "skip"
    """Bad images: count, show and leave them out (skip), or stop (refuse)."""
    cache: str | None = None
    """Cache folder for decoded images; by default in the user's own cache."""
    start: str | None = None
    """Fine-tune: a trained model's folder, or a run's; its shape counts instead of model's."""
    freeze: bool = False
    """Linear probing: train the classification head alone, and freeze the rest of start's model."""
    augmentation: Augmentation = field(
        default_factory=lambda: Augmentation(crop=(0.75, 1.0), mixup=True)
    )
    """Data augmentation."""
    model: VisionShape = field(default_factory=_tiny)
    """The Vision Transformer's shape."""
    training: TrainingConfig = field(default_factory=_short)
    """Optimizer, learning-rate schedule, evaluation, checkpoints. A batch is counted in images."""

    def __post_init__(self) -> None:
        if not 0 < self.held_out < 1:
            raise ValueError(f"held_out ({self.held_out}) must be above 0 and below 1; try 0.1")
        check_positive(self, "pixels", "patch")
        if self.freeze and self.start is None:
            raise ValueError("freeze needs start: there is no trained model to leave as it is")
        if self.images is None and (self.labels or self.validation):
            name = "labels" if self.labels else "validation"
            raise ValueError(f"{name} ({getattr(self, name)}) needs images to go with it")


def preset(size: Preset) -> Config:
    """tiny learns digits in a minute on two cores; base and big are ViT-B/16 and ViT-L/16 of
    Dosovitskiy et al. (2021) with the augmentation of Touvron et al. (2021), which made do with
    ImageNet, for photographs and a GPU."""
    check_preset(size)
    if size == "tiny":
        return Config()
    large = VisionShape(layers=24, width=1024, heads=16, feed_forward=4096)
    return Config(
        pixels=224,
        held_out=0.1,
        augmentation=Augmentation(
            flip=True, crop=(0.08, 1.0), policy="rand", erase=0.25, mixup=True, cutmix=True
        ),
        model=VisionShape() if size == "base" else large,
        training=TrainingConfig(
            epochs=100 if size == "base" else 300,
            batch=1024,
            lr=1e-3,
            schedule="cosine",
            warmup=1000,
            betas=(0.9, 0.999),
            weight_decay=0.05,
            ema=0.9999,
        ),
    )


class Classify:
    """Images, their classes, and a model that learns them, as `fit` wants it."""

    score = "accuracy"
    unit = "images"
    signatures: Mapping[str, str] = MappingProxyType({})

    def __init__(
        self,
        model: VisionTransformer,
        train: Images,
        validation: Images,
        preparation: Preparation,
        config: Config,
    ):
        self.model: nn.Module = model
        self.train, self.validation = train, validation
        self.preparation, self.config = preparation, config
        problems = [*train.problems.lines(), *validation.problems.lines()]
        self.notes = list(dict.fromkeys(problems))
        if config.images is not None and config.validation is not None:
            self.notes += describe_reuse([config.images], [config.validation])
        """Problems of the user's images, one line for each kind."""

    def plan(self, epoch: int) -> list[np.ndarray]:
        training = self.config.training
        ones = np.ones(len(self.train), np.int64)
        return plan(ones, training.batch, training.seed, epoch)

    def batch(self, indices: np.ndarray, step: int) -> LabelBatch:
        return _batch(self.train, indices)

    def capacity(self, batches: Iterable[np.ndarray]) -> Sizes:
        return capacity((Sizes(len(indices), ()) for indices in batches), images=True)

    def prepare(self, batch: LabelBatch) -> MixedBatch:
        how, seed = self.config.augmentation, self.config.training.seed
        # The loop has seeded torch for this step, process and part: this number depends on them.
        key = int(torch.randint(2**31, ()))
        varied = image.augment(batch.inputs, how, seed, key)
        mixed = image.mix(varied, batch.labels, how, seed, key)
        x = self.preparation.normalized(mixed.images)
        return MixedBatch(x, mixed.labels, mixed.others, mixed.weight, batch.tokens)

    def loss(self, batch: MixedBatch) -> tuple[Tensor, Tensor]:
        how, smoothing = self.config.augmentation, self.config.training.smoothing
        logits = self.model(batch.inputs).float()
        entropy = partial(F.cross_entropy, logits, reduction="none", label_smoothing=smoothing)
        losses = entropy(target=batch.labels)
        if how.mixup or how.cutmix:
            losses = batch.weight * losses + (1 - batch.weight) * entropy(target=batch.others)
        return losses.sum(), batch.tokens

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return measure(model, self.validation, self.preparation)

    def files(self) -> dict[str, bytes | Path]:
        return {}

    def run_files(self) -> dict[str, bytes]:
        return {}

    def about(self) -> dict[str, Any]:
        labels = {"labels": list(self.train.classes)}
        return TASK.about(self.config, {**labels, **self.preparation.section()})


def build(config: Config, run: Path | None = None, progress: Progress | None = None) -> Classify:
    """Reads the images, and builds the model.

    `progress` receives the number of decoded files; the task's `notes` list the files left out.
    """
    config = absolute(config, "images", "labels", "validation", "validation_labels")
    config = absolute(config, "cache", "start")
    begun = None if config.start is None else _begun(config.start)
    decoding = _decoding(config, begun)
    every = _read(config, decoding, config.images, config.labels, None, progress)
    size = every.shape[1:]
    if config.validation is None:
        train, validation = split(every, config.held_out)
    else:
        train = every
        path, labels = config.validation, config.validation_labels
        validation = _read(config, decoding, path, labels, every, progress)
    decoding = Decoding(size, _channels(every.shape[0]), config.fit, config.background)
    _check_classes(train, config.images)
    if begun is None:
        mean, std = train.statistics()
        model = _new(config, train)
        return Classify(model, train, validation, Preparation.trained(decoding, mean, std), config)
    model, task = begun
    model = _fit_model(model, task, train, config)
    preparation = Preparation.of({**task, "size": size}, every.shape[0], config.start)
    return Classify(model, train, validation, preparation, config)


def _check_classes(train: Images, path: str | None) -> None:
    assert train.labels is not None
    counts = np.bincount(train.labels, minlength=len(train.classes))
    if empty := [name for name, count in zip(train.classes, counts) if not count]:
        raise ValueError(
            f"{path}: class {empty[0]!r} has no images to train on; add some, or remove the class"
        )
    if len(train.classes) < 2:
        raise ValueError(
            f"{path} has one class ({train.classes[0]}), and a classifier needs two or more; put "
            "the images of each class into a folder of its own"
        )


def measure(model: nn.Module, images: Images, preparation: Preparation) -> dict[str, float]:
    """The accuracy and the mean loss."""
    scores, _ = judge(model, images, preparation)
    return scores


@torch.no_grad()
def judge(
    model: nn.Module, images: Images, preparation: Preparation
) -> tuple[dict[str, float], Confusion]:
    """The accuracy, the mean loss and the confusion matrix."""
    weight = next(model.parameters())
    assert images.labels is not None
    chosen = []
    loss = torch.zeros((), device=weight.device, dtype=torch.float64)
    for begin in range(0, len(images), 256):
        indices = np.arange(begin, min(begin + 256, len(images)))
        batch = _batch(images, indices).to(weight.device)
        logits = model(preparation.normalized(batch.inputs).to(weight.dtype)).float()
        chosen.append(logits.argmax(-1))
        loss += F.cross_entropy(logits, batch.labels, reduction="sum")
    confusion = Confusion.of(images.classes, torch.from_numpy(images.labels), torch.cat(chosen))
    accuracy = int(confusion.counts.trace()) / len(images)
    return {"accuracy": accuracy, "validation_loss": float(loss) / len(images)}, confusion


def evaluate(
    folder: str | os.PathLike[str],
    *,
    images: str | None = None,
    labels: str | None = None,
    precision: Precision = "fp32",
    device: str = "cpu",
    progress: Progress | None = None,
) -> Evaluation:
    """Scores a model, or a run's best model, on these images, by default its held-out images."""
    saved, _ = load_saved(folder, device, precision)
    classifier = Classifier(saved)
    config = recorded(Config, saved.task, folder)
    if images is None and config is None:
        raise ValueError(
            f"{folder} has no record of its training images; name images to score it on"
        )
    config = config or Config()
    preparation = classifier.preparation
    if images is None:
        test_images = build(config, None, progress).validation
    else:
        C, size = _channels(preparation.channels), preparation.size
        form = Images(np.empty((0, C, *size), np.uint8), classes=tuple(classifier.labels))
        decoding = Decoding(size, C, config.fit, config.background)
        test_images = _read(config, decoding, images, labels, form, progress)
    scores, confusion = judge(classifier.model, test_images, preparation)
    scores["macro_f1"] = confusion.macro_f1
    return Evaluation(scores, problems=test_images.problems.lines(), confusion=confusion)


def _batch(images: Images, indices: np.ndarray) -> LabelBatch:
    assert images.labels is not None
    return image_batch(images.batch(indices), images.labels[indices])


# Images


def _decoding(config: Config, begun: tuple[VisionTransformer, dict[str, Any]] | None) -> Decoding:
    """Decoding of image files; an archive has its own size and channels by default."""
    size, channels = config.pixels, config.channels
    if begun is not None:
        trained = begun[0].config
        size, channels = size or trained.image, channels or _channels(trained.channels)
        if channels != trained.channels:
            raise ValueError(
                f"channels ({channels}) must be {config.start}'s ({trained.channels}); leave it out"
            )
    return Decoding(image_size(size or 32), channels or 3, config.fit, config.background)


def _channels(number: int) -> Literal[1, 3]:
    if number not in (1, 3):
        raise ValueError(f"channels ({number}) must be 1 for grey or 3 for colour")
    return 1 if number == 1 else 3


def _read(
    config: Config,
    decoding: Decoding,
    path: str | None,
    labels: str | None,
    training: Images | None,
    progress: Progress | None,
) -> Images:
    """Reads a folder or an archive, in the form of the `training` images if they are given."""
    classes = None if training is None else training.classes
    if labels is not None and (path is None or Path(path).is_dir() or path.endswith(".npz")):
        raise ValueError(
            f"labels ({labels}) are for an idx file, and {path} has its own; leave them out"
        )
    if path is not None and Path(path).is_dir():
        return image.folders(
            path,
            decoding,
            classes=classes,
            on_bad=config.on_bad,
            cache=config.cache,
            progress=told(progress),
        )
    if path is None:
        images = image.digits()
    elif not Path(path).exists():
        raise ValueError(f"images ({path}) do not exist; name a folder, an idx file or an archive")
    elif path.endswith(".npz"):
        images = image.npz(path, classes=classes)
    elif labels is None:
        raise ValueError(
            f"{path} is no folder and no .npz archive; if it is an idx file, name that of its "
            "labels too"
        )
    else:
        images = image.idx(path, labels, classes)
    if training is not None:
        C, rows, columns = training.shape
        return _convert(images, C, (rows, columns), config)
    C, Y, X = images.shape
    fixed = config.start is not None or config.pixels is not None
    size = decoding.size if fixed else _divisible(Y, X, config.patch)
    fixed = config.start is not None or config.channels is not None
    return _convert(images, decoding.channels if fixed else C, size, config)


def _divisible(rows: int, columns: int, patch: int | None) -> tuple[int, int]:
    """Rounds a size up to multiples of the patch size."""
    side = patch or _patch(rows, columns)
    return -(-rows // side) * side, -(-columns // side) * side


def _patch(rows: int, columns: int) -> int:
    """A patch size that gives few enough patches for quick training, and enough for detail."""
    side = 4
    while side < 16 and min(rows, columns) > 8 * side:
        side *= 2
    return side


def _convert(images: Images, channels: int, size: tuple[int, int], config: Config) -> Images:
    """Converts an archive's images to the size and channels of the model."""
    if images.shape[0] == 1 and channels == 3:
        images = replace(images, pixels=np.repeat(images.pixels, 3, 1))
    elif images.shape[0] == 3 and channels == 1:
        # ITU-R 601, as Pillow converts colours to grey.
        grey = np.einsum("ncyx,c->nyx", images.pixels, np.array([0.299, 0.587, 0.114], np.float32))
        images = replace(images, pixels=np.round(grey).astype(np.uint8)[:, None])
    if images.shape[1:] == size:
        return images
    return images.resized(size, config.fit, config.background)


# Models


def _new(config: Config, train: Images) -> VisionTransformer:
    C, rows, columns = train.shape
    patch = config.patch or _patch(rows, columns)
    complete = VisionConfig(
        len(train.classes), (rows, columns), patch, channels=C, **vars(config.model)
    )
    with seeded(config.training.seed):
        return VisionTransformer(complete)


def _begun(folder: str) -> tuple[VisionTransformer, dict[str, Any]]:
    saved = checkpoint.load(model_folder(folder))
    if not isinstance(saved.model, VisionTransformer):
        raise ValueError(
            f"start ({folder}) holds a {type(saved.model).__name__}; images are classified by a "
            "VisionTransformer"
        )
    return saved.model, dict(saved.task or {})


def _fit_model(
    model: VisionTransformer, task: dict[str, Any], train: Images, config: Config
) -> VisionTransformer:
    """Adapts a trained model to these images; new classes get a new head."""
    if task.get("labels") != list(train.classes):
        with seeded(config.training.seed):
            model = model.replace_head(len(train.classes))
    if (size := train.shape[1:]) != image_size(model.config.image):
        model = model.resize_images(size)
    check_obeyed(config, preset, model.config, task)
    if config.patch not in (None, model.config.patch):
        raise ValueError(
            f"patch ({config.patch}) must be {config.start}'s ({model.config.patch}); leave it out"
        )
    return model.freeze_backbone() if config.freeze else model


# Use


class Classifier(Predictor):
    """A trained model with its labels, which classifies images.

    An image is a file's name, its content in bytes, an image of Pillow's, an array (Y, X) or
    (Y, X, C), or a tensor (C, Y, X). `model` is the `VisionTransformer`, `labels` its classes, and
    `preparation` the scaling of images.

    >>> from regard import Classifier
    >>> classifier = Classifier.load("runs/pets")
    >>> classifier.labels
    ['cat', 'dog']
    >>> classifier("cat.png") in classifier.labels
    True
    """

    _call = "classify(images)"

    def __init__(self, saved: checkpoint.Saved):
        task = saved.task or {}
        if not isinstance(saved.model, VisionTransformer):
            raise ValueError(
                f"{saved.folder} holds a {type(saved.model).__name__}; images are classified by a "
                "VisionTransformer"
            )
        self.model: VisionTransformer = saved.model
        self._folder = str(saved.folder)
        labels: list[str] | None = task.get("labels")
        if labels is None:
            raise ValueError(
                f"{saved.folder} has no labels, because its model has no head; train one: "
                f"regard train classify RUN --start {saved.folder} --images FOLDER"
            )
        if len(labels) != self.model.config.classes:
            raise ValueError(
                f"{saved.folder}: labels ({len(labels)}) must be as many as the model's classes "
                f"({self.model.config.classes})"
            )
        self.labels = labels
        self.preparation = Preparation.of(
            {"size": image_size(self.model.config.image), **task},
            self.model.config.channels,
            saved.folder,
        )

    def classify(self, images: Iterable[Picture], *, batch: int = 64) -> list[str]:
        """Returns the most probable label of each image; `batch` images are computed together.

        >>> import regard
        >>> len(regard.Classifier.load("runs/pets").classify(["cat.png", "cat.png"]))
        2
        """
        return [self.labels[n] for n in self.probabilities(images, batch=batch).argmax(-1).tolist()]

    @overload
    def __call__(self, images: Single, /) -> str: ...  # type: ignore[overload-overlap]
    @overload
    def __call__(self, images: Iterable[Picture], /) -> list[str]: ...
    def __call__(self, images: Single | Iterable[Picture], /) -> str | list[str]:
        """Classifies one file or image, or each of a list."""
        if isinstance(images, Iterable) and not isinstance(images, str | bytes | PathLike):
            return self.classify(images)
        return self.classify([images])[0]

    def _facts(self) -> dict[str, object]:
        return {"classes": listed(self.labels)}

    @torch.inference_mode()
    def probabilities(self, images: Iterable[Picture], *, batch: int = 64) -> Float[Tensor, "B N"]:
        """Returns the probability of each label for each image (B, N), in the order of `labels`.

        A model that was trained with label smoothing ε gives its best label at most about 1 - ε.

        >>> import regard
        >>> regard.Classifier.load("runs/pets").probabilities(["cat.png"]).shape
        torch.Size([1, 2])
        """
        weight = next(self.model.parameters())
        logits = [
            self.model(self.preparation.inputs(pixels, weight))
            for pixels in self.preparation.batches(images, batch)
        ]
        if not logits:
            return torch.empty(0, len(self.labels))
        results = torch.cat(logits).float().softmax(-1).cpu()
        check_finite(results)
        return results


TASK = TaskSpec(
    name="classify",
    summary="image classification (ViT), one folder for each class; by default digits",
    config=Config,
    preset=preset,
    build=build,
    predictor=Classifier,
    evaluate=evaluate,
    example="regard classify {run} picture.png",
)
