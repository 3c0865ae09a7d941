"""Images read as text: strips of digits, folders with captions, and readers that were trained."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from regard import checkpoint
from regard.config import from_json, to_json
from regard.data.image import Augmentation, Images, digits
from regard.model.transformer import Transformer, TransformerShape
from regard.task import classify, read
from regard.task.digits import Strip, Strips
from regard.task.load import load
from regard.task.read import Config, Reader, characters_right
from regard.train.config import TrainingConfig
from regard.train.fit import fit

SHAPE = TransformerShape(
    width=16, heads=2, feed_forward=17, encoder_layers=1, decoder_layers=1, norm="pre", dropout=0.0
)
TRAINING = TrainingConfig(
    steps=3, batch=7, evaluate_every=2, save_every=2, tensorboard=False, device="cpu", warmup=1
)
SMALL = Config(model=SHAPE, training=TRAINING, judged=11)


@pytest.fixture(scope="module")
def some() -> Images:
    return digits()


# Strips


def test_a_strip_is_a_function_of_seed_and_number(some: Images) -> None:
    strips = Strips(some, Strip(), 5)
    numbers = np.array([3, 10**6, 7, 10**12])
    images, texts = strips.images(numbers), strips.texts(numbers)
    assert images.shape == (4, 1, 12, 44)
    for n, number in enumerate(numbers):
        np.testing.assert_array_equal(strips.images(numbers[n : n + 1])[0], images[n])
        assert strips.texts(np.array([number])) == texts[n : n + 1]
    assert strips.texts(numbers) != Strips(some, Strip(), 6).texts(numbers)
    assert (images[1] != Strips(some, Strip(), 6).images(numbers)[1]).any()


def test_strips_say_what_they_show(some: Images) -> None:
    """Without noise and with full ink, each digit is found where the text says that it is."""
    how = Strip(noise=0.0, ink=1.0, margin=3, gap=1, rise=3, easy=0)
    strips = Strips(some, how, 0)
    numbers = np.arange(53)
    assert some.labels is not None
    known = {
        pixels.tobytes(): str(label)
        for pixels, label in zip(some.batch(np.arange(len(some))).numpy()[:, 0], some.labels)
    }
    for image, text in zip(strips.images(numbers)[:, 0], strips.texts(numbers)):
        found, left, last = "", 0, how.margin
        while left <= last:
            cut = (image[top : top + 8, left : left + 8] for top in range(5))
            names = [known[part.tobytes()] for part in cut if part.tobytes() in known]
            if names:
                found += names[0]
                left, last = left + 8, left + 8 + how.gap
            else:
                left += 1
        assert found == text


def test_strips_vary(some: Images) -> None:
    how = Strip(least=2, easy=0)
    texts = Strips(some, how, 0).texts(np.arange(3000))
    lengths = np.bincount([len(text) for text in texts])
    assert not lengths[:2].any()
    assert lengths[2:].min() > 600
    counts = np.bincount([int(digit) for text in texts for digit in text])
    assert counts.min() > 0.8 * counts.max()
    noise = Strips(some, replace(how, noise=0.2), 0).images(np.arange(100)).astype(float)
    plain = Strips(some, replace(how, noise=0.0), 0).images(np.arange(100)).astype(float)
    middle = (plain > 120) & (plain < 135)  # where nothing is cut off
    assert (noise - plain)[middle].std() / 255 == pytest.approx(0.2, rel=0.1)
    assert abs((noise - plain)[middle].mean()) < 5


def test_the_first_strips_are_short(some: Images) -> None:
    strips = Strips(some, Strip(easy=100, grow=50, most=4, columns=56), 0)
    for first, most in ((0, 1), (99, 1), (100, 2), (149, 2), (150, 3), (200, 4), (900, 4)):
        assert len(strips.texts(np.array([first]))[0]) <= most
    assert {len(text) for text in strips.texts(np.arange(100))} == {1}
    assert {len(text) for text in strips.texts(np.arange(200, 400))} == {1, 2, 3, 4}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"least": 0}, r"least \(0\)"),
        ({"least": 7}, r"least \(7\)"),
        ({"columns": 40}, "12 × 40 is too small"),
        ({"rows": 9}, "9 × 44 is too small"),
        ({"gap": -1}, r"gap \(-1\)"),
        ({"ink": 0.0}, r"ink \(0\.0\)"),
        ({"noise": 1.5}, r"noise \(1\.5\)"),
    ],
)
def test_strips_that_cannot_be(settings: dict[str, float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Strip(**settings)  # type: ignore[arg-type]


def test_held_out_digits_are_classify_s_and_never_trained_on() -> None:
    task, other = read.build(SMALL), classify.build(classify.Config())
    assert isinstance(task.train, read.Composed)
    seen = {pixels.tobytes() for pixels in task.train.strips.pixels}
    held = {p.tobytes() for p in other.validation.batch(np.arange(len(other.validation))).numpy()}
    assert not seen & held
    assert isinstance(task.validation, read.Composed)
    assert {pixels.tobytes() for pixels in task.validation.strips.pixels} == held


# The task


def test_epochs_have_other_strips() -> None:
    task = read.build(SMALL)
    first, second = (np.concatenate(task.plan(epoch)) for epoch in (0, 1))
    assert len(set(first.tolist())) == len(first)
    assert not set(first.tolist()) & set(second.tolist())
    assert {len(batch) for batch in task.plan(0)} == {7}


def test_a_batch_and_its_loss() -> None:
    task = read.build(replace(SMALL, strip=Strip(easy=0)))
    numbers = np.arange(5)
    batch = task.batch(numbers, 1)
    texts = task.train.texts(numbers)
    assert batch.tokens == sum(len(text) + 1 for text in texts)
    assert task.tokenizer.decode(batch.labels[0].tolist()) == "".join(texts)
    loss, count = task.loss(task.prepare(batch))
    assert count == batch.tokens
    # One image at a time, each in a batch of its own, adds up to the same.
    single = [task.loss(task.prepare(task.batch(numbers[n : n + 1], 1)))[0] for n in range(5)]
    torch.testing.assert_close(loss, torch.stack(single).sum())


def test_a_run_and_its_use(tmp_path: Path) -> None:
    task = read.build(SMALL)
    result = fit(task, TRAINING, tmp_path / "run")
    assert result.best is not None
    reader = load(tmp_path / "run")
    assert isinstance(reader, Reader)
    images = task.validation.images(np.arange(5))
    both = reader.read(list(torch.from_numpy(images)), beams=1, batch=2)
    assert both == reader.read([image[0] for image in images], beams=1)
    assert len(reader.read(list(torch.from_numpy(images)))) == 5
    assert reader.read([]) == []
    looked = reader.attention(torch.from_numpy(images[0]), "407")
    assert looked.text[:3] == ["4", "0", "7"]
    assert looked.weights.shape == (1, 2, 4, 3, 11)
    torch.testing.assert_close(looked.weights.sum((-1, -2)), torch.ones(1, 2, 4))
    assert reader.attention(torch.from_numpy(images[0])).weights.shape[0] == 1
    scores = task.evaluate(reader.model)
    assert set(scores) == {"exact_match", "characters_right", "perplexity"}
    again = from_json(Config, {**task.about()["config"], "training": to_json(TRAINING)})
    assert again == task.config


def test_strips_that_no_evaluation_in_training_has_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fit(read.build(SMALL), TRAINING, tmp_path / "run")
    seen, images = [], Strips.images
    monkeypatch.setattr(
        Strips, "images", lambda self, numbers: (seen.extend(numbers), images(self, numbers))[1]
    )
    read.evaluate(tmp_path / "run", beams=1)
    assert seen[-11:] == [*range(11)]  # after those whose mean is taken
    found = read.evaluate(tmp_path / "run", beams=1, count=30)
    assert seen[-30:] == [*range(11, 41)]
    assert "exact_match" in found.scores
    with pytest.raises(ValueError, match=r"count \(30\) is for strips of digits"):
        read.evaluate(tmp_path / "run", images="a", captions="b", count=30)


@given(st.text("abc", max_size=7), st.text("abc", max_size=7))
def test_the_distance_is_levenshtein_s(one: str, other: str) -> None:
    def plain(a: str, b: str) -> int:
        if not a or not b:
            return len(a) + len(b)
        if a[0] == b[0]:
            return plain(a[1:], b[1:])
        return 1 + min(plain(a[1:], b), plain(a, b[1:]), plain(a[1:], b[1:]))

    wrong = plain(one, other) / max(1, len(other))
    assert characters_right([one], [other]) == pytest.approx(max(0.0, 1 - wrong))


# Images and captions


@pytest.fixture
def scans(tmp_path: Path) -> Path:
    """Eleven images, a table of what stands in them, and one line for an image that is missing."""
    (tmp_path / "scans").mkdir()
    rng = np.random.default_rng(0)
    lines = []
    for n in range(11):
        pixels = rng.integers(0, 256, (13, 29 + n), np.uint8)
        Image.fromarray(pixels).save(tmp_path / "scans" / f"{n:02}.png")
        lines.append(f"{n:02}.png\tsay {n}")
    (tmp_path / "table.tsv").write_text("\n".join([*lines, "99.png\tnone", "00.png\tagain"]))
    return tmp_path


def _small(scans: Path, **changed: object) -> Config:
    settings = {
        "images": str(scans / "scans"),
        "captions": str(scans / "table.tsv"),
        "cache": str(scans / "cache"),
        "pixels": (8, 24),
    }
    return replace(SMALL, **{**settings, **changed})


def test_a_folder_with_captions(scans: Path) -> None:
    task = read.build(_small(scans))
    assert task.score == "characters_right"
    assert task.train.count + task.validation.count == 12
    assert any("99.png" in note for note in task.notes)
    # An image with two texts is on one side.
    sides = [set(some.texts(np.arange(some.count))) for some in (task.train, task.validation)]
    assert any({"say 0", "again"} <= side for side in sides)
    assert task.train.images(np.arange(2)).shape == (2, 1, 8, 24)
    loss, count = task.loss(task.prepare(task.batch(np.arange(3), 1)))
    assert loss.isfinite()
    assert set(task.evaluate(task.model.eval())) == {
        "exact_match",
        "characters_right",
        "perplexity",
    }


def test_a_line_for_each_image(scans: Path) -> None:
    (scans / "lines.txt").write_text("".join(f"zeile {n}\n" for n in range(11)))
    config = _small(scans, captions=str(scans / "lines.txt"), words="bpe", channels=3)
    task = read.build(config)
    assert task.train.count + task.validation.count == 11
    assert task.tokenizer.size >= 260
    assert isinstance(task.model, Transformer)
    assert task.model.config.source.channels == 3  # type: ignore[union-attr]


def test_validation_of_one_s_own(scans: Path) -> None:
    task = read.build(
        _small(
            scans,
            validation=str(scans / "scans"),
            validation_captions=str(scans / "table.tsv"),
        )
    )
    assert task.train.count == 12
    assert task.validation.count == SMALL.judged


def test_going_on_from_a_reader(scans: Path, tmp_path: Path) -> None:
    first = read.build(_small(scans))
    checkpoint.save(tmp_path / "reader", first.model, files=first.files(), task=first.about())
    (scans / "lines.txt").write_text("".join(f"sage {n}\n" for n in range(11)))
    config = _small(scans, captions=str(scans / "lines.txt"), start=str(tmp_path / "reader"))
    task = read.build(replace(config, pixels=None))
    assert task.tokenizer.size == first.tokenizer.size
    assert task.preparation.mean == first.preparation.mean
    assert any("not known" in note for note in task.notes)  # there was no g
    for name, weight in first.model.named_parameters():
        torch.testing.assert_close(task.model.get_parameter(name), weight, rtol=0, atol=0)
    with pytest.raises(ValueError, match=r"8 × 32 × 1.*8 × 24 × 1"):
        read.build(replace(config, pixels=(8, 32)))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"images": "folder"}, r"images \(folder\) and captions \(None\) belong together"),
        ({"captions": "file"}, r"images \(None\) and captions \(file\)"),
        ({"validation": "a", "validation_captions": "b"}, "needs images"),
        ({"judged": 0}, r"judged \(0\)"),
        ({"held_out": 0.0}, r"held_out \(0\.0\)"),
        ({"start": "a", "tokenizer": "b"}, "tokenizer of its own"),
        ({"augmentation": Augmentation(mixup=True)}, "cannot be mixed"),
    ],
)
def test_settings_that_contradict(settings: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        replace(SMALL, **settings)  # type: ignore[arg-type]


def test_a_folder_that_cannot_read(tmp_path: Path) -> None:
    task = {"name": "read", "size": [8, 8], "mean": [0.5], "std": [0.5]}
    checkpoint.save(tmp_path / "model", Transformer.tiny(7), task=task)
    with pytest.raises(ValueError, match="does not read images"):
        load(tmp_path / "model")


@pytest.mark.usefixtures("unchecked")
def test_sizes() -> None:
    for size in ("tiny", "base", "big"):
        config = read.preset(size)  # type: ignore[arg-type]
        assert from_json(Config, to_json(config)) == config
    with pytest.raises(ValueError, match=r"huge.*choose from"):
        read.preset("huge")  # type: ignore[arg-type]


@pytest.mark.slow
def test_strips_are_learned(tmp_path: Path) -> None:
    config = read.preset("tiny")
    task = read.build(config)
    result = fit(task, config.training, tmp_path / "run")
    assert result.best is not None
    assert result.best >= 0.9
