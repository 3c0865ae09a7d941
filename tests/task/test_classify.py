"""Images in classes: what is read, what is held out, what is learned, and what can be used."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from regard import checkpoint
from regard.config import from_json, to_json
from regard.data.image import Augmentation
from regard.data.image import digits as all_digits
from regard.model.vit import VisionConfig, VisionShape, VisionTransformer
from regard.task import classify
from regard.task.classify import Classifier, Config
from regard.task.load import load
from regard.task.pictures import Preparation
from regard.train.config import TrainingConfig
from regard.train.fit import fit

SHAPE = VisionShape(layers=1, width=16, heads=2, feed_forward=17, pool="mean")
TRAINING = TrainingConfig(
    steps=3, batch=7, evaluate_every=2, save_every=2, tensorboard=False, device="cpu", warmup=1
)
SMALL = Config(model=SHAPE, training=TRAINING)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Dark cats, bright dogs, and a file that is no image."""
    rng = np.random.default_rng(0)
    for name, level in (("cat", 20), ("dog", 200)):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for n in range(11):
            pixels = rng.integers(level, level + 50, (13, 17, 3), np.uint8)
            Image.fromarray(pixels).save(tmp_path / "photos" / name / f"{n}.png")
    (tmp_path / "photos" / "dog" / "broken.png").write_bytes(b"none")
    return tmp_path / "photos"


def _small(photos: Path, **changed: object) -> Config:
    cache = str(photos.parent / "cache")
    return replace(SMALL, images=str(photos), cache=cache, pixels=8, **changed)


# What is read


def test_digits_are_held_out_in_every_class() -> None:
    task = classify.build(SMALL)
    assert len(task.train) + len(task.validation) == 1797
    assert task.validation.labels is not None
    counts = np.bincount(task.validation.labels)
    assert len(counts) == 10
    assert counts.min() > 30
    seen = {pixels.tobytes() for pixels in task.train.batch(np.arange(len(task.train))).numpy()}
    others = task.validation.batch(np.arange(len(task.validation))).numpy()
    assert not any(pixels.tobytes() in seen for pixels in others)


def test_a_folder_of_folders(photos: Path) -> None:
    told: list[tuple[str, float]] = []
    task = classify.build(_small(photos), progress=lambda *what: told.append(what))
    assert task.train.classes == ("cat", "dog")
    assert len(task.train) + len(task.validation) == 22
    assert len(task.validation) == 4
    assert len(task.notes) == 1
    assert "broken.png" in task.notes[0]
    assert told[-1] == ("decoding images", 1.0)
    assert task.model.config.image == (8, 8)
    assert task.model.config.channels == 3
    with pytest.raises(ValueError, match=r"broken\.png"):
        classify.build(_small(photos, on_bad="refuse"))


def test_archives_are_brought_to_a_size_that_patches_divide(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    pixels, labels = rng.integers(0, 256, (23, 9, 11), np.uint8), np.arange(23) % 3
    np.savez(tmp_path / "some.npz", images=pixels, labels=labels)
    task = classify.build(replace(SMALL, images=str(tmp_path / "some.npz")))
    assert task.model.config.image == (12, 12)
    assert task.model.config.channels == 1
    colour = replace(SMALL, images=str(tmp_path / "some.npz"), channels=3, pixels=(8, 4))
    task = classify.build(colour)
    assert task.train.shape == (3, 8, 4)
    assert task.model.config.patch == 4


def test_validation_of_one_s_own(photos: Path) -> None:
    task = classify.build(_small(photos, validation=str(photos)))
    assert len(task.train) == len(task.validation) == 22
    assert task.notes[-1].startswith(f"{photos} is used to train and to validate")
    (photos.parent / "other" / "bird").mkdir(parents=True)
    Image.new("L", (5, 5)).save(photos.parent / "other" / "bird" / "a.png")
    with pytest.raises(ValueError, match=r"bird.*none of the classes"):
        classify.build(_small(photos, validation=str(photos.parent / "other")))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"held_out": 1.0}, r"held_out \(1\.0\)"),
        ({"freeze": True}, "freeze needs start"),
        ({"labels": "labels.gz"}, "needs images"),
        ({"validation": "folder"}, "needs images"),
    ],
)
def test_settings_that_contradict(settings: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        replace(SMALL, **settings)


def test_paths_that_lead_nowhere(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="do not exist"):
        classify.build(replace(SMALL, images=str(tmp_path / "none")))
    (tmp_path / "file").write_bytes(b"\0\0")
    with pytest.raises(ValueError, match="labels too"):
        classify.build(replace(SMALL, images=str(tmp_path / "file")))


def test_too_few_images_to_hold_any_out(tmp_path: Path) -> None:
    pixels, labels = np.zeros((5, 8, 8), np.uint8), np.arange(5)
    np.savez(tmp_path / "some.npz", images=pixels, labels=labels)
    with pytest.raises(ValueError, match="too few"):
        classify.build(replace(SMALL, images=str(tmp_path / "some.npz")))


# What is learned


def test_the_whole_config_comes_back_from_a_run(photos: Path, tmp_path: Path) -> None:
    config = _small(photos)
    task = classify.build(config)
    said = json.loads(json.dumps(task.about()))
    settings = {**said["config"], "training": to_json(TRAINING)}
    again = from_json(Config, settings)
    assert again.images == str(photos)
    assert to_json(classify.build(again).config) == to_json(task.config)


def test_chance_is_decided_by_the_loop_s_seed() -> None:
    how = Augmentation(crop=(0.5, 1.0), mixup=True, cutmix=True)
    task = classify.build(replace(SMALL, augmentation=how))
    batch = task.batch(task.plan(0)[0], 1)
    # The head begins at zero, and all images with it at equal loss.
    torch.nn.init.normal_(task.model.get_parameter("head.output.weight"))
    losses = []
    for seed in (5, 5, 7):
        torch.manual_seed(seed)
        loss, count = task.loss(task.prepare(batch))
        losses.append(loss.item())
        assert count == 7
    assert losses[0] == losses[1]
    assert abs(losses[2] - losses[0]) > 0.01


def test_mixing_counts_both_labels() -> None:
    task = classify.build(replace(SMALL, augmentation=Augmentation(mixup=True)))
    task.config = replace(task.config, training=replace(TRAINING, smoothing=0.0))
    batch = task.batch(task.plan(0)[0], 1)
    loss, count = task.loss(task.prepare(batch))
    # Whatever the weights are, a head of zeros is equally unsure of all ten.
    torch.testing.assert_close(loss, (count * np.log(10)).float())


def test_a_run_and_its_use(photos: Path, tmp_path: Path) -> None:
    config = _small(photos, background=7)
    task = classify.build(config)
    result = fit(task, config.training, tmp_path / "run")
    assert result.best is not None
    classifier = load(tmp_path / "run")
    assert isinstance(classifier, Classifier)
    assert classifier.labels == ["cat", "dog"]
    # The same file by its name, its content, as an image, an array and a tensor.
    path = photos / "cat" / "3.png"
    with Image.open(path) as image:
        image.load()
    array = np.asarray(image)
    tensor = torch.from_numpy(array.copy()).permute(2, 0, 1)
    forms = [path, str(path), path.read_bytes(), image, array, tensor, array / 255]
    found = classifier.probabilities(forms, batch=3)
    assert found.shape == (7, 2)
    torch.testing.assert_close(found, found[:1].expand(7, 2))
    torch.testing.assert_close(found.sum(1), torch.ones(7))
    assert classifier.classify([]) == []
    other = load(tmp_path / "run")
    next(other.model.parameters()).data.fill_(torch.nan)
    with pytest.raises(ValueError, match="the logits were not finite"):
        other.classify(forms)
    # As in training: a held-out image gives the logits of its evaluation.
    pixels = task.validation.batch([0])
    logits = task.model.eval()(task.preparation.normalized(pixels))
    assert task.preparation.background == classifier.preparation.background == 7
    assert logits.shape == (1, 2)


MODES = ["1", "L", "P", "RGB", "RGBA", "CMYK", "YCbCr", "LAB", "LA", "PA", "I;16"]


@pytest.mark.filterwarnings("ignore:a picture of 16 bits")
@pytest.mark.parametrize("way", [{}, {"resize": "squash"}])
@pytest.mark.parametrize("mode", [*MODES, "HSV", "RGBX", "RGBa", "La"])
def test_images_of_every_mode(mode: str, way: dict[str, str], tmp_path: Path) -> None:
    """An image opened by the caller, turned by its EXIF orientation, gives its file's pixels."""
    levels = np.linspace(0, 255, 54).astype(np.uint8).reshape(6, 9)
    image = Image.fromarray(levels)
    if mode == "I;16":
        image = Image.fromarray(levels.astype(np.uint16) * 257)
    elif mode == "LAB":
        image = Image.merge("LAB", [image, image, image])
    elif mode in ("PA", "La", "RGBa"):
        image = image.convert({"PA": "P", "La": "LA", "RGBa": "RGBA"}[mode]).convert(mode)
    else:
        image = image.convert(mode)
    exif = Image.Exif()
    exif[0x0112] = 6
    for channels in (1, 3):
        task = {"size": [9, 6], "mean": [0.5] * channels, "std": [0.5] * channels, **way}
        how = Preparation.of(task, channels, "there")
        upright = how.pixels(image.transpose(Image.Transpose.ROTATE_270))
        assert upright.shape == (channels, 9, 6)
        if mode in MODES:
            image.save(tmp_path / "a.tiff", exif=exif)
            with open(tmp_path / "a.tiff", "rb") as file, Image.open(file) as opened:
                by_pillow = how.pixels(opened)
                assert opened.mode == mode
            np.testing.assert_array_equal(how.pixels(tmp_path / "a.tiff"), upright)
            np.testing.assert_array_equal(by_pillow, upright)


@pytest.mark.parametrize("way", [{}, {"resize": "squash"}])
def test_opened_photographs_are_turned_upright(way: dict[str, str], tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    pixels = np.random.default_rng(0).integers(0, 256, (6, 9, 3), np.uint8)
    task = {"size": [9, 6], "mean": [0.5] * 3, "std": [0.5] * 3, **way}
    how = Preparation.of(task, 3, "there")
    for kind in ("png", "jpeg", "webp", "tiff"):
        path = tmp_path / f"photo.{kind}"
        Image.fromarray(pixels).save(path, exif=exif)
        with open(path, "rb") as file, Image.open(file) as image:
            np.testing.assert_array_equal(how.pixels(image), how.pixels(path))
            assert image.getexif() == exif or kind == "tiff"  # the caller's own stays as it was


def test_what_no_picture_is(photos: Path) -> None:
    how = Preparation((8, 8), 3, (0.5,) * 3, (0.5,) * 3)
    for wrong, words in (
        (np.zeros((4, 4, 2), np.uint8), r"shape \(4, 4, 2\)"),
        (np.zeros((4, 4), np.int64), "must be bytes"),
        (torch.zeros(4), r"shape \(4,\)"),
        (torch.full((3, 4, 4), 2.0), r"2\.0\) must be bytes"),
        (str(photos / "dog" / "broken.png"), "cannot be decoded"),
        (b"none", "cannot be decoded"),
    ):
        with pytest.raises(ValueError, match=words):
            how.pixels(wrong)
    with pytest.raises(ValueError, match="a list"):
        next(how.batches("photo.jpg", 3))


@pytest.mark.parametrize(
    ("resize", "crop", "corner"), [("squash", 1.0, 0), ("shortest", 1.0, 255), ("pad", 1.0, 9)]
)
def test_pictures_of_another_shape(resize: str, crop: float, corner: int) -> None:
    """Black at the left and right ends, white in the middle: what is at the corner shows how."""
    wide = np.zeros((8, 24), np.uint8)
    wide[:, 7:17] = 255
    task = {"size": [8, 8], "mean": [0], "std": [1], "resize": resize, "crop": crop}
    how = Preparation.of({**task, "background": 9, "interpolation": "nearest"}, 1, "there")
    assert how.pixels(wide)[0, 0, 0] == corner
    usual = Preparation.of({**task, "background": 9}, 1, "there")
    assert usual.pixels(wide).shape == (1, 8, 8)


def test_files_are_prepared_as_an_imported_model_says(tmp_path: Path) -> None:
    """Pillow's own resizing, step by step, is the reference; the file is turned on its side."""
    rng = np.random.default_rng(0)
    image = Image.fromarray(rng.integers(0, 256, (40, 30, 3), np.uint8))
    exif = Image.Exif()
    exif[0x0112] = 6
    image.save(tmp_path / "turned.png", exif=exif)
    upright = image.transpose(Image.Transpose.ROTATE_270)
    task = {"size": [14, 14], "mean": [0.5] * 3, "std": [0.5] * 3, "interpolation": "bilinear"}
    how = Preparation.of({**task, "resize": "squash"}, 3, "there")
    wanted = upright.resize((14, 14), Image.Resampling.BILINEAR)
    np.testing.assert_array_equal(
        how.pixels(tmp_path / "turned.png").transpose(1, 2, 0), np.asarray(wanted)
    )
    how = Preparation.of({**task, "resize": "shortest", "crop": 0.7}, 3, "there")
    wanted = upright.resize((27, 20), Image.Resampling.BILINEAR).crop((6, 3, 20, 17))
    np.testing.assert_array_equal(
        how.pixels(tmp_path / "turned.png").transpose(1, 2, 0), np.asarray(wanted)
    )


def test_a_folder_that_cannot_classify(tmp_path: Path) -> None:
    model = VisionTransformer(VisionConfig(3, 8, 4, channels=1, **vars(SHAPE)))
    task = {"name": "classify", "labels": None, "size": [8, 8], "mean": [0.5], "std": [0.5]}
    for changed, words in (
        ({}, "has no labels"),
        ({"labels": ["a", "b"]}, r"labels \(2\).*classes \(3\)"),
        ({"labels": ["a", "b", "c"], "mean": None}, "how its pixels are scaled"),
        ({"labels": ["a", "b", "c"], "resize": "fold"}, "resize .*fold.* must be"),
    ):
        checkpoint.save(tmp_path / "model", model, task={**task, **changed})
        with pytest.raises(ValueError, match=words):
            load(tmp_path / "model")


# Going on from a trained model


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    shape = replace(SHAPE, position="learned")
    model = VisionTransformer(VisionConfig(3, 8, 4, channels=3, **vars(shape)))
    task = {
        "name": "classify",
        "labels": ["a", "b", "c"],
        "size": [8, 8],
        "mean": [0.1, 0.2, 0.3],
        "std": [0.4, 0.5, 0.6],
    }
    checkpoint.save(tmp_path / "trained", model, task=task)
    return tmp_path / "trained"


def test_another_head_and_another_size(photos: Path, trained: Path) -> None:
    task = classify.build(_small(photos, start=str(trained)))
    old = checkpoint.load(trained).model
    assert task.model.config.classes == 2
    assert task.preparation.mean == (0.1, 0.2, 0.3)
    torch.testing.assert_close(
        task.model.get_parameter("patches.projection.weight"),
        old.get_parameter("patches.projection.weight"),
    )
    task = classify.build(replace(_small(photos, start=str(trained)), pixels=(12, 16)))
    assert task.model.config.image == task.preparation.size == (12, 16)
    assert task.about()["size"] == [12, 16]
    assert classify.build(replace(_small(photos, start=str(trained)), pixels=None)).train.shape == (
        3,
        8,
        8,
    )


def test_only_the_head_is_trained_when_frozen(photos: Path, trained: Path, tmp_path: Path) -> None:
    config = _small(photos, start=str(trained), freeze=True)
    task = classify.build(config)
    fit(task, config.training, tmp_path / "run")
    old, new = checkpoint.load(trained).model, load(tmp_path / "run").model
    for name, weight in old.named_parameters():
        if not name.startswith("head"):
            torch.testing.assert_close(new.get_parameter(name), weight, rtol=0, atol=0)
    assert new.get_parameter("head.output.weight").abs().sum() > 0


def test_the_same_classes_keep_their_head(trained: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    pixels, labels = rng.integers(0, 256, (23, 8, 8), np.uint8), np.arange(23) % 3
    names = np.array(["a", "b", "c"])
    np.savez(tmp_path / "some.npz", images=pixels, labels=labels, classes=names)
    task = classify.build(replace(SMALL, images=str(tmp_path / "some.npz"), start=str(trained)))
    old = checkpoint.load(trained).model
    for name, weight in old.named_parameters():
        torch.testing.assert_close(task.model.get_parameter(name), weight, rtol=0, atol=0)
    assert task.train.shape[0] == 3


def test_what_start_does_not_go_with(photos: Path, trained: Path) -> None:
    with pytest.raises(ValueError, match=r"channels \(1\).*\(3\)"):
        classify.build(_small(photos, start=str(trained), channels=1))
    with pytest.raises(ValueError, match=r"patch \(2\).*\(4\)"):
        classify.build(_small(photos, start=str(trained), patch=2))


# In earnest


@pytest.mark.usefixtures("unchecked")
def test_sizes() -> None:
    for size in ("tiny", "base", "big"):
        config = classify.preset(size)  # type: ignore[arg-type]
        assert from_json(Config, to_json(config)) == config
    with pytest.raises(ValueError, match=r"huge.*choose from"):
        classify.preset("huge")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("size", "paper"), [("base", VisionConfig.base(7)), ("big", VisionConfig.large(7))]
)
def test_the_sizes_of_the_paper(size: Any, paper: VisionConfig) -> None:
    config = classify.preset(size)
    assert config.pixels == 224
    made = VisionConfig(7, 224, classify._patch(224, 224), **vars(config.model))
    assert made == paper


def test_how_tiny_differs_from_the_paper() -> None:
    """As its help says."""
    tiny = classify.preset("tiny").model
    assert (tiny.position, tiny.pool, tiny.class_token) == ("sinusoidal", "mean", None)
    assert classify._patch(8, 8) == 4
    said = " ".join(Config.__doc__.split()) if Config.__doc__ else ""
    for words in ("sinusoidal positions", "mean of all patches", "--model.position learned"):
        assert words in said


@pytest.mark.slow
def test_digits_are_learned(tmp_path: Path) -> None:
    config = classify.preset("tiny")
    task = classify.build(config)
    result = fit(task, config.training, tmp_path / "run")
    assert result.best is not None
    assert result.best >= 0.97


def test_scores_on_other_images(tmp_path: Path) -> None:
    config = classify.preset("tiny")
    config = replace(config, training=replace(config.training, steps=1, tensorboard=False))
    fit(classify.build(config, tmp_path / "run"), config.training, tmp_path / "run")
    held = classify.evaluate(tmp_path / "run").scores
    digits = all_digits()
    archive = tmp_path / "other.npz"
    labels = digits.labels[:37]
    np.savez(archive, images=digits.pixels[:37, 0], labels=labels)
    other = classify.evaluate(tmp_path / "run", images=str(archive)).scores
    assert held.keys() == other.keys()
    assert held != other
    classifier = load(tmp_path / "run")
    said = classifier.classify(list(torch.from_numpy(digits.pixels[:37])))
    assert other["accuracy"] == sum(map(str.__eq__, said, map(str, labels))) / 37


@pytest.mark.parametrize("name", ["pixels", "patch"])
def test_zero_is_not_unset(name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name} \(0\) must be 1 or more"):
        classify.Config(**{name: 0})


def test_labels_beside_a_folder_are_refused(photos: Path) -> None:
    with pytest.raises(ValueError, match=r"labels .* are for an idx file"):
        classify.build(_small(photos, labels="labels.idx"))


def test_classes_without_images_and_one_class_alone_are_refused(photos: Path) -> None:
    (photos / "nothing").mkdir()
    with pytest.raises(ValueError, match="class 'nothing' has no images"):
        classify.build(_small(photos))
    (photos / "nothing").rmdir()
    for other in sorted(photos.iterdir())[1:]:
        shutil.rmtree(other)
    with pytest.raises(ValueError, match="needs two or more"):
        classify.build(_small(photos))
