"""Data augmentation: each operation as Pillow has it, each image by a chance of its own."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from regard.data import augment as module
from regard.data.augment import COLOURS, MOVES, Augmentation, Drawn, augment, mix

Image = pytest.importorskip("PIL.Image")
ImageEnhance = pytest.importorskip("PIL.ImageEnhance")
ImageOps = pytest.importorskip("PIL.ImageOps")

HOW = Augmentation(flip=True, crop=(0.5, 1.0), policy="rand", erase=0.3)


def _pictures(count: int = 5, rows: int = 37, columns: int = 41) -> torch.Tensor:
    """Waves with some noise, some darker than others."""
    chance = np.random.default_rng(0)
    y, x = np.mgrid[:rows, :columns] / 7
    waves = np.sin(y * chance.uniform(0.5, 2, (count, 3, 1, 1)) + x) * 60
    level = chance.uniform(60, 190, (count, 3, 1, 1))
    noise = chance.normal(0, 12, (count, 3, rows, columns))
    return torch.from_numpy((waves + level + noise).clip(0, 255).astype(np.uint8))


def _by_pillow(pictures: torch.Tensor, change: Callable[[Any], Any]) -> torch.Tensor:
    turned = [Image.fromarray(one.permute(1, 2, 0).numpy()) for one in pictures]
    return torch.stack([torch.from_numpy(np.array(change(one))).permute(2, 0, 1) for one in turned])


@pytest.mark.parametrize(
    ("name", "value", "change"),
    [
        ("brightness", 1.3, lambda i: ImageEnhance.Brightness(i).enhance(1.3)),
        ("brightness", 0.4, lambda i: ImageEnhance.Brightness(i).enhance(0.4)),
        ("colour", 0.3, lambda i: ImageEnhance.Color(i).enhance(0.3)),
        ("colour", 1.9, lambda i: ImageEnhance.Color(i).enhance(1.9)),
        ("contrast", 0.5, lambda i: ImageEnhance.Contrast(i).enhance(0.5)),
        ("contrast", 1.6, lambda i: ImageEnhance.Contrast(i).enhance(1.6)),
        ("sharpness", 0.1, lambda i: ImageEnhance.Sharpness(i).enhance(0.1)),
        ("sharpness", 1.8, lambda i: ImageEnhance.Sharpness(i).enhance(1.8)),
        ("posterize", 5, lambda i: ImageOps.posterize(i, 5)),
        ("posterize", 8, lambda i: ImageOps.posterize(i, 8)),
        ("solarize", 100 / 255, lambda i: ImageOps.solarize(i, 100)),
        ("autocontrast", 0, ImageOps.autocontrast),
        ("equalize", 0, ImageOps.equalize),
    ],
)
def test_colours_beside_pillow(name: str, value: float, change: Callable[[Any], Any]) -> None:
    pictures = _pictures()
    values = torch.full((len(pictures), 1, 1, 1), value)
    ours = COLOURS[name](pictures / 255, values) * 255
    # Pillow rounds what it blends with, and its result, to whole levels.
    exact = name in ("posterize", "solarize", "equalize")
    difference = (ours - _by_pillow(pictures, change)).abs().max()
    assert difference < (0.01 if exact else 2.0)
    assert name == "posterize" or (ours - pictures).abs().max() > 20


@pytest.mark.parametrize("name", [*MOVES])
def test_moves_beside_pillow(name: str) -> None:
    rows, columns, value = 37, 41, 17.0 if name == "rotate" else 0.2
    pictures = _pictures(rows=rows, columns=columns)
    (forward,) = MOVES[name](np.array([value]), rows, columns)
    # Pillow's map is of pixels counted from the corner.
    corner = np.eye(3)
    corner[:2, 2] = columns / 2, rows / 2
    data = (corner @ forward @ np.linalg.inv(corner))[:2].ravel().tolist()

    def change(one: Any) -> Any:
        return one.transform(one.size, Image.Transform.AFFINE, data, Image.Resampling.BILINEAR)

    ours = module._warped(pictures / 255, np.tile(forward, (len(pictures), 1, 1))) * 255
    theirs = _by_pillow(pictures, change).float()
    # Where a neighbour lies outside, Pillow leaves black at once, and we fade into it.
    inside = (theirs > 0).all(1, keepdim=True) & (ours - theirs).abs().lt(30).all(1, keepdim=True)
    assert inside.float().mean() > 0.6
    assert ((ours - theirs).abs() * inside).mean() < 1.0
    assert (theirs - pictures).abs().mean() > 5
    black = (theirs == 0).all(1).float().mean()
    assert abs((ours == 0).all(1).float().mean() - black) < 0.06


def test_moves_add_up() -> None:
    """What is translated and back again is where it was, in one interpolation."""
    number = [*MOVES].index("translate x")
    drawn = Drawn(np.array([[number, number]] * 3), np.array([[0.25, -0.25]] * 3))
    maps = module._moved(drawn, 8, 12)
    assert maps is not None
    pictures = _pictures(3, 8, 12) / 255
    torch.testing.assert_close(module._warped(pictures, maps), pictures)


def test_each_image_has_operations_of_its_own() -> None:
    how = Augmentation(policy="rand")
    drawn = module._rand(how, np.random.default_rng(0), 4000)
    kinds, counts = np.unique(drawn.operations, return_counts=True)
    assert kinds.tolist() == list(range(-1, 13))
    assert counts.min() > counts.max() * 0.7
    rows = [rows for _, rows, _ in drawn.of(COLOURS)]
    assert min(map(len, rows)) < 4000 / 4
    same = torch.full((200, 3, 9, 9), 77, dtype=torch.uint8)
    same[:, 1, 4] = 200
    assert len(augment(same, how, 0, 0).unique(dim=0)) > 8


def test_strength() -> None:
    for name, least, most in (
        ("rotate", -9, 9),
        ("shear x", -0.09, 0.09),
        ("contrast", 0.73, 1.27),
    ):
        number = (*MOVES, *COLOURS).index(name)
        drawn = module._rand(Augmentation(policy="rand"), np.random.default_rng(0), 3000)
        found = drawn.values[drawn.operations == number]
        assert np.unique(found.round(6)).tolist() == pytest.approx([least, most])
    for name, value in (("posterize", 7), ("solarize", 0.7)):
        number = (*MOVES, *COLOURS).index(name)
        assert np.unique(drawn.values[drawn.operations == number]) == pytest.approx([value])


def test_crops_and_erasing() -> None:
    """Crops keep the share that is asked for; what is erased is one rectangle."""
    chance = np.random.default_rng(0)
    maps = module._framed(Augmentation(crop=(0.3, 0.6)), chance, 5000, 32, 48)
    assert maps is not None
    area = maps[:, 0, 0] * maps[:, 1, 1]
    assert 0.3 <= area.min() < 0.31
    assert 0.59 < area.max() <= 0.6
    for axis, side in ((0, 48), (1, 32)):
        assert (np.abs(maps[:, axis, 2]) <= (1 - maps[:, axis, axis]) * side / 2 + 1e-9).all()
    ones = torch.ones(600, 1, 20, 30)
    erased = augment(ones, Augmentation(erase=0.5), 0, 0)[:, 0] == 0
    share = erased.float().mean((1, 2))
    assert 240 < (share > 0).sum() < 360
    assert share.max() < 0.36
    for one in erased[share > 0][:20]:
        rows, columns = one.any(1), one.any(0)
        assert torch.equal(one, rows[:, None] & columns[None])
        assert rows.sum() == rows.nonzero().amax() - rows.nonzero().amin() + 1


def test_both_ways_of_mixing() -> None:
    images = torch.rand(64, 3, 16, 16)
    mixed = mix(images, torch.arange(64), Augmentation(mixup=True, cutmix=True), 0, 0)
    own = (mixed.images == images).all(1).float().mean((1, 2))
    pasted = (own - mixed.weight).abs() < 1e-5
    assert 16 < pasted.sum() < 48
    other = images[mixed.others]
    weight = mixed.weight[:, None, None, None]
    blended = (mixed.images - weight * images - (1 - weight) * other).abs().amax((1, 2, 3)) < 1e-5
    assert (pasted | blended).all()


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"magnitude": 30}, r"magnitude \(30\)"),
        ({"operations": 0}, r"operations \(0\)"),
        ({"erase": 1.5}, r"erase \(1.5\)"),
        ({"crop": (0.5, 0.2)}, r"crop \(0.5, 0.2\)"),
        ({"policy": "auto"}, r"policy \('auto'\) is unknown; choose from none, rand"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_settings_are_checked(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Augmentation(**wrong)


@pytest.mark.gpu
def test_a_gpu_draws_the_same() -> None:
    images = _pictures(33, 32, 32)
    ours = augment(images.cuda(), HOW, 0, 0).cpu()
    # Rounding may put a pixel on the other side of a level.
    assert ((ours - augment(images, HOW, 0, 0)).abs() > 0.02).float().mean() < 0.01


@pytest.mark.parametrize(
    ("how", "channels"),
    [
        (Augmentation(), 1),
        (Augmentation(flip=True), 1),
        (Augmentation(crop=(0.3, 0.9)), 1),
        (Augmentation(policy="rand"), 3),
        (Augmentation(policy="rand"), 1),
        (Augmentation(erase=0.5), 3),
        (HOW, 1),
    ],
)
def test_augment(how: Augmentation, channels: int) -> None:
    images = torch.randint(0, 256, (17, channels, 11, 13), dtype=torch.uint8)
    before = torch.get_rng_state()
    first = augment(images, how, 3, 5)
    assert torch.equal(torch.get_rng_state(), before)
    assert first.shape == images.shape
    assert first.dtype == torch.float32
    assert first.min() >= 0
    assert first.max() <= 1
    torch.rand(7)
    assert torch.equal(augment(images, how, 3, 5), first)
    if how != Augmentation():
        for others in (
            [augment(images, how, 3, step) for step in (6, 7)],
            [augment(images, how, 3, 5, rank=rank) for rank in (1, 2)],
        ):
            assert not all(torch.equal(other, first) for other in others)
    else:
        assert torch.equal(first, images / 255)
    assert len(augment(images[:0], how, 0, 0)) == 0


def test_a_flip_is_a_flip() -> None:
    images = torch.randint(0, 256, (29, 3, 5, 7), dtype=torch.uint8)
    flipped = augment(images, Augmentation(flip=True), 0, 0)
    plain = images / 255
    same = (flipped - plain).abs().amax((1, 2, 3)) < 1e-5
    turned = (flipped - plain.flip(-1)).abs().amax((1, 2, 3)) < 1e-5
    assert torch.equal(same, ~turned)
    assert 5 < same.sum() < 24


@pytest.mark.parametrize("way", ["mixup", "cutmix"])
def test_mixing(way: str) -> None:
    labels = torch.arange(13) * 1000
    # Each image is its number, so that its mean tells what it is made of.
    images = (torch.arange(13.0) / 13)[:, None, None, None].expand(-1, 3, 17, 19).contiguous()
    how = Augmentation(mixup=way == "mixup", cutmix=way == "cutmix")
    mixed = mix(images, labels, how, 0, 0)
    assert torch.equal(mixed.labels, labels)
    own, other = images.mean((1, 2, 3)), mixed.others / 1000 / 13
    expected = mixed.weight * own + (1 - mixed.weight) * other
    torch.testing.assert_close(mixed.images.mean((1, 2, 3)), expected, atol=1e-5, rtol=0)
    assert len(set(mixed.weight.tolist())) > 5
    assert torch.equal(mix(images, labels, how, 0, 0).images, mixed.images)
    assert not torch.equal(mix(images, labels, how, 0, 1).images, mixed.images)
    plain = mix(images, labels, Augmentation(), 0, 0)
    assert torch.equal(plain.images, images)
    assert plain.weight.tolist() == [1] * 13
