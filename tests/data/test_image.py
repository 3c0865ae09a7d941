"""Images: every format and mode, upright and of one size; what is broken is named."""

import gzip
import io
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from regard.data import image
from regard.data.image import (
    Decoding,
    Images,
    captions,
    decode,
    digits,
    folders,
    idx,
    normalize,
    npz,
    resize,
)
from regard.data.pixels import _note

Image = pytest.importorskip("PIL.Image")
SHARED = Path(__file__).parents[3] / "shared" / "data"
needs_data = pytest.mark.skipif(not SHARED.is_dir(), reason="needs the data sets")


def _picture(rows: int = 11, columns: int = 13, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (rows, columns, 3), np.uint8)


def _file(picture: Any, kind: str = "PNG", **more: Any) -> bytes:
    file = io.BytesIO()
    (Image.fromarray(picture) if isinstance(picture, np.ndarray) else picture).save(
        file, kind, **more
    )
    return file.getvalue()


# One image


def test_pixels_come_through() -> None:
    picture = _picture()
    pixels = decode(_file(picture), Decoding((11, 13)))
    assert np.array_equal(pixels, picture.transpose(2, 0, 1))
    grey = decode(_file(picture[..., 0]), Decoding((11, 13), channels=1))
    assert np.array_equal(grey, picture[None, ..., 0])
    assert np.array_equal(decode(_file(picture[..., 0]), Decoding((11, 13))), np.repeat(grey, 3, 0))


@pytest.mark.parametrize("kind", ["JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM"])
def test_formats(kind: str) -> None:
    flat = np.full((17, 19, 3), (200, 100, 40), np.uint8)
    pixels = decode(_file(flat, kind), Decoding((5, 7)))
    assert pixels.shape == (3, 5, 7)
    assert np.abs(pixels.mean((1, 2)) - (200, 100, 40)).max() < 8


def test_modes() -> None:
    how = Decoding((3, 5), background=255)
    half = Image.new("RGBA", (5, 3), (0, 0, 0, 0))
    half.putpixel((2, 1), (10, 20, 30, 255))
    for picture in (half, half.convert("LA")):
        pixels = decode(_file(picture), how)
        assert pixels[:, 0, 0].tolist() == [255] * 3
        assert pixels[0, 1, 2] < 31
    assert decode(_file(half), Decoding((3, 5), background=7))[:, 0, 0].tolist() == [7] * 3
    palette = Image.new("P", (5, 3), 1)
    palette.putpalette([0, 0, 0, 9, 8, 7, 1, 1, 1])
    assert decode(_file(palette), how)[:, 2, 4].tolist() == [9, 8, 7]
    assert decode(_file(palette, transparency=1), how)[:, 2, 4].tolist() == [255] * 3
    bits = Image.new("1", (5, 3), 1)
    assert decode(_file(bits), how).min() == 255
    ink = Image.new("CMYK", (5, 3), (0, 0, 0, 0))
    assert decode(_file(ink, "TIFF"), how).min() == 255
    with pytest.raises(
        ValueError, match=r"cannot be decoded: its pixels are of 32 bits \(mode F\)"
    ):
        decode(_file(Image.new("F", (5, 3)), "TIFF"), how)


@pytest.mark.parametrize(("brightest", "shift"), [(65535, 8), (9999, 6), (4095, 4), (200, 0)])
def test_16_bits_are_scaled_to_8(brightest: int, shift: int) -> None:
    pixels = np.linspace(0, brightest, 15).astype(np.uint16).reshape(3, 5)
    how = Decoding((3, 5), channels=1)
    for picture in (Image.fromarray(pixels), _file(Image.fromarray(pixels))):
        _note.cache_clear()
        with pytest.warns(UserWarning, match=rf"a picture of 16 bits uses {shift + 8} of them"):
            decoded = decode(picture, how)
        assert np.array_equal(decode(picture, how), decoded)  # the note is given once
        assert np.array_equal(decoded[0], pixels >> shift)


def test_upright() -> None:
    picture = Image.fromarray(_picture())
    turned = picture.transpose(Image.Transpose.ROTATE_90)
    notes = Image.Exif()
    notes[0x0112] = 6  # to be turned by 90° clockwise
    pixels = decode(_file(turned, "PNG", exif=notes), Decoding((11, 13)))
    assert np.array_equal(pixels, _picture().transpose(2, 0, 1))
    damaged = _file(turned, "PNG", exif=b"Exif\0\0MM\0*\xff\xff\xff\xff")
    assert decode(damaged, Decoding((13, 11))).shape == (3, 13, 11)


def test_shapes_are_kept() -> None:
    # Three squares side by side: red, green, blue.
    strip = np.repeat(np.eye(3, dtype=np.uint8) * 255, 20, 0)[None].repeat(20, 0)
    middle = decode(_file(strip), Decoding((8, 8)))
    assert middle[1, 4, 4] == 255
    assert middle[0].max() < 60
    whole = decode(_file(strip), Decoding((12, 12), fit="pad", background=9))
    assert whole[:, 0].tolist() == whole[:, 11].tolist() == [[9] * 12] * 3
    assert [int(whole[:, 6, x].argmax()) for x in (1, 6, 10)] == [0, 1, 2]
    thin = decode(_file(strip[:1]), Decoding((5, 5), fit="pad"))
    assert thin.shape == (3, 5, 5)
    tensor = torch.from_numpy(strip.transpose(2, 0, 1).copy())[None]
    assert resize(tensor, (8, 8))[0, 1, 4, 4] == 255
    padded = resize(tensor, (12, 12), "pad", 9)
    assert padded[0, :, 0].tolist() == [[9] * 12] * 3
    assert [int(padded[0, :, 6, x].argmax()) for x in (1, 6, 10)] == [0, 1, 2]
    assert resize(tensor, (20, 60)) is tensor


def _bomb(rows: int, columns: int) -> bytes:
    """A PNG that claims to be enormous."""
    import zlib

    def part(name: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        )

    about = struct.pack(">IIBBBBB", columns, rows, 8, 0, 0, 0, 0)
    data = zlib.compress(bytes(1000))
    return b"\x89PNG\r\n\x1a\n" + part(b"IHDR", about) + part(b"IDAT", data) + part(b"IEND", b"")


@pytest.mark.parametrize(("rows", "columns"), [(8000, 8000), (10_000, 10_000), (60_000, 60_000)])
def test_bombs_are_refused(rows: int, columns: int, tmp_path: Path) -> None:
    path = tmp_path / "bomb.png"
    path.write_bytes(_bomb(rows, columns))
    with pytest.raises(ValueError, match=r"bomb.png has .*too many pixels"):
        decode(path, Decoding((8, 8)))


def test_the_limit_can_be_set() -> None:
    with pytest.raises(ValueError, match=r"too many pixels \(11 × 13\).* the limit \(142\)"):
        decode(_file(_picture()), Decoding((8, 8), most=142))


@pytest.mark.parametrize("data", [b"", b"no image", _file(_picture(), "JPEG")[:200]])
def test_broken_files(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.jpg"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"x.jpg cannot be decoded: .+") as error:
        decode(path, Decoding((8, 8)))
    assert "\n" not in str(error.value)


# Folders


@pytest.fixture
def zoo(tmp_path: Path) -> Path:
    root = tmp_path / "zoo"
    for n, name in enumerate(("cat", "dog", "emu")):
        for i in range(3):
            path = root / name / ("old" if i == 2 else "") / f"{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(_file(np.full((9, 7, 3), 60 * n + i, np.uint8)))
    (root / "cat" / "notes.txt").write_text("no image")
    (root / "cat" / ".hidden.png").write_text("x")
    (root / "dog" / "broken.png").write_text("x")
    (root / "dog" / "zz.png").write_bytes(_bomb(9000, 9000))
    (root / ".git").mkdir()
    return root


@pytest.mark.parametrize("workers", [0, 2])
def test_folders(zoo: Path, tmp_path: Path, workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image, "_TOGETHER", 2)
    told: list[tuple[int, int, int]] = []
    cache = tmp_path / "cache"

    def read(**more: Any) -> Images:
        return folders(
            zoo,
            Decoding((5, 5)),
            cache=cache,
            workers=workers,
            progress=lambda *figures: told.append(figures),
            **more,
        )

    images = read()
    assert images.classes == ("cat", "dog", "emu")
    assert images.labels is not None
    assert images.labels.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert len(images) == 9
    assert images.shape == (3, 5, 5)
    assert images.batch(np.arange(9))[:, 0, 2, 2].tolist() == [0, 1, 2, 60, 61, 62, 120, 121, 122]
    assert images.problems.counts == {"foreign": 1, "broken": 1, "large": 1}
    assert "notes.txt" in images.problems.examples["foreign"][0]
    assert "broken.png cannot be decoded" in images.problems.examples["broken"][0]
    assert told[-1] == (11, 11, 9)
    # Found again, with what was wrong.
    count = len(told)
    again = read()
    assert len(told) == count
    assert again.problems == images.problems
    with pytest.raises(ValueError, match=r"files that are no images.*--on-bad skip"):
        read(on_bad="refuse")
    (zoo / "cat" / "notes.txt").unlink()
    with pytest.raises(ValueError, match=r"cannot be decoded.*--on-bad skip"):
        read(on_bad="refuse")
    (zoo / "emu" / "3.png").write_bytes(_file(_picture()))
    assert len(read()) == 10


def test_classes_may_be_given(zoo: Path, tmp_path: Path) -> None:
    how, cache = Decoding((5, 5), channels=1), tmp_path / "cache"
    images = folders(zoo, how, classes=("ape", "emu", "dog", "cat"), cache=cache)
    assert images.labels is not None
    assert images.labels.tolist() == [3, 3, 3, 2, 2, 2, 1, 1, 1]
    assert images.shape == (1, 5, 5)
    with pytest.raises(ValueError, match=r"the folder 'dog', which is none of the classes \(cat"):
        folders(zoo, how, classes=("cat", "emu"), cache=cache)


def test_parts(zoo: Path, tmp_path: Path) -> None:
    images = folders(zoo, Decoding((5, 5)), cache=tmp_path / "cache")
    part = images.part([8, 0, 4]).part(np.array([2, 0]))
    assert part.labels is not None
    assert part.labels.tolist() == [1, 2]
    assert part.batch([1, 0])[:, 0, 0, 0].tolist() == [122, 61]
    assert part.pixels is images.pixels
    assert len(part) == 2
    larger = part.resized((7, 11))
    assert larger.shape == (3, 7, 11)
    assert larger.batch([0, 1])[:, 0, 3, 3].tolist() == [61, 122]
    mean, std = part.statistics()
    np.testing.assert_allclose(mean, [91.5 / 255] * 3)
    np.testing.assert_allclose(std, [30.5 / 255] * 3)


@pytest.fixture
def words(tmp_path: Path) -> Path:
    root = tmp_path / "words"
    root.mkdir()
    for i in range(4):
        (root / f"{i}.png").write_bytes(_file(np.full((9, 27), 50 * i, np.uint8)))
    return root


def test_captions_in_a_table(words: Path, tmp_path: Path) -> None:
    table = tmp_path / "t.tsv"
    lines = ["2.png\ttwo", "0.png\tzero", "../t.tsv\tx", "/etc/x\tx", "9.png\tnine", "1.png\t"]
    table.write_text("\n".join([*lines, "3.png\tthree", "2.png\ttwice"]))
    (words / "3.png").write_text("broken")
    how = Decoding((8, 24), channels=1, fit="pad")
    images = captions(words, table, how, cache=tmp_path / "cache")
    assert images.texts == ("two", "zero", "twice")
    assert images.batch([0, 1, 2])[:, 0, 4, 12].tolist() == [100, 0, 100]
    assert len(images.pixels) == 2
    assert images.problems.counts == {"missing": 3, "empty": 1, "broken": 1}
    assert images.part([2, 1]).texts == ("twice", "zero")


def test_captions_line_by_line(words: Path, tmp_path: Path) -> None:
    lines = tmp_path / "t.txt"
    lines.write_text("zero\n\ntwo\nthree\nfour\n")
    how = Decoding((8, 24), channels=1, fit="pad")
    with pytest.raises(ValueError, match=r"5 lines in .* but 4 images in"):
        captions(words, lines, how, cache=tmp_path / "cache")
    lines.write_text("zero\n\ntwo\nthree\n")
    images = captions(words, lines, how, cache=tmp_path / "cache")
    assert images.texts == ("zero", "two", "three")
    assert images.batch([0, 1, 2])[:, 0, 4, 12].tolist() == [0, 100, 150]
    assert images.problems.counts == {"empty": 1}
    with pytest.raises(ValueError, match="1 × "):
        captions(words, lines, how, cache=tmp_path / "cache", on_bad="refuse")


def test_captions_of_numbers_without_leading_zeros(tmp_path: Path) -> None:
    root, lines = tmp_path / "numbers", tmp_path / "numbers.txt"
    root.mkdir()
    for n in range(1, 13):
        (root / f"{n}.png").write_bytes(_file(np.full((8, 8), 20 * n, np.uint8)))
    lines.write_text("".join(f"{n}\n" for n in range(1, 13)))
    how, cache = Decoding((8, 8), 1), tmp_path / "cache"
    with pytest.raises(ValueError, match=r"12\.png is before 2\.png by name, but after it by numb"):
        captions(root, lines, how, cache=cache)
    for n in range(1, 10):
        (root / f"{n}.png").rename(root / f"0{n}.png")
    images = captions(root, lines, how, cache=cache)
    assert images.texts is not None
    assert [20 * int(text) for text in images.texts] == images.batch(range(12))[:, 0, 0, 0].tolist()


# The cache


def test_folders_with_the_same_names_sizes_and_times(tmp_path: Path) -> None:
    how, cache = Decoding((8, 8), 1), tmp_path / "cache"
    for root, level in (("a", 0), ("b", 255)):
        path = tmp_path / root / "cat" / "0.bmp"
        path.parent.mkdir(parents=True)
        path.write_bytes(_file(np.full((8, 8), level, np.uint8), "BMP"))
        os.utime(path, (1e9, 1e9))
    for root, level in (("a", 0), ("b", 255)):
        assert folders(tmp_path / root, how, cache=cache).batch([0]).unique().tolist() == [level]


@pytest.mark.parametrize("side", [8, 600])
def test_an_image_is_replaced_and_its_time_kept(side: int, tmp_path: Path) -> None:
    path = tmp_path / "animals" / "cat" / "0.bmp"
    path.parent.mkdir(parents=True)
    pixels = np.zeros((side, side), np.uint8)
    for level in (0, 255):
        # Where the file is large, neither its beginning nor its end changes.
        pixels[side // 4 : -side // 4] = level
        path.write_bytes(_file(pixels, "BMP"))
        os.utime(path, (1e9, 1e9))
        images = folders(tmp_path / "animals", Decoding((8, 8), 1), cache=tmp_path / "cache")
        assert images.batch([0])[0, 0, 4, 4] == level


# Archives


def _idx(array: np.ndarray) -> bytes:
    kinds = {"uint8": 8, "int32": 12}
    head = struct.pack(">HBB", 0, kinds[array.dtype.name], array.ndim)
    return (
        head
        + struct.pack(f">{array.ndim}I", *array.shape)
        + array.astype(array.dtype.newbyteorder(">")).tobytes()
    )


@pytest.mark.parametrize("squeeze", [bytes, gzip.compress])
def test_idx(squeeze, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    pixels = np.random.default_rng(0).integers(0, 256, (5, 7, 11), np.uint8)
    labels = np.array([0, 2, 1, 2, 0], np.uint8)
    a, b = tmp_path / "images", tmp_path / "labels"
    a.write_bytes(squeeze(_idx(pixels)))
    b.write_bytes(squeeze(_idx(labels)))
    images = idx(a, b)
    assert np.array_equal(images.pixels[:, 0], pixels)
    assert images.labels is not None
    assert images.labels.tolist() == [0, 2, 1, 2, 0]
    assert images.classes == ("0", "1", "2")
    assert idx(a, b, ["ape", "bee", "cat"]).classes[1] == "bee"
    with pytest.raises(ValueError, match="labels from 0 to 2 must be from 0 to 1"):
        idx(a, b, ["ape", "bee"])
    a.write_bytes(squeeze(_idx(pixels)[:-1]))
    with pytest.raises(ValueError, match=r"should have 401 bytes for shape \(5, 7, 11\), but has"):
        idx(a, b)
    a.write_bytes(squeeze(_idx(pixels[:3])))
    with pytest.raises(ValueError, match=r"images \(3\) in .* and labels \(5\)"):
        idx(a, b)
    a.write_bytes(b"text")
    with pytest.raises(ValueError, match="is not an idx file: it begins with 0x74657874"):
        idx(a, b)


def test_npz(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    pixels = np.random.default_rng(0).integers(0, 256, (5, 7, 11, 3), np.uint8)
    np.savez(path, images=pixels, labels=np.arange(5) % 3, classes=np.array(["a", "b", "c"]))
    images = npz(path)
    assert np.array_equal(images.pixels, pixels.transpose(0, 3, 1, 2))
    assert images.classes == ("a", "b", "c")
    np.savez(path, one=pixels[..., 0] / 255, two=np.arange(5)[:, None])
    assert np.array_equal(npz(path, images="one", labels="two").pixels[:, 0], pixels[..., 0])
    with pytest.raises(ValueError, match=r"no images: it has one, two, and none of images, x, "):
        npz(path)
    np.savez(path, x=pixels.astype(np.int32), y=np.arange(5))
    with pytest.raises(ValueError, match=r"pixels \(int32, 0 to 255\) must be bytes"):
        npz(path)
    np.savez(path, x=pixels[0], y=np.arange(7))
    assert npz(path).shape == (1, 11, 3)  # seven grey images
    np.savez(path, x=pixels, y=np.arange(5) - 1)
    with pytest.raises(ValueError, match="labels from -1 to 3"):
        npz(path)
    np.savez(path, x=pixels, y=np.array([0, 1, 2, 2, 10**9]))
    with pytest.raises(ValueError, match="labels from 0 to 1000000000, of which 4 occur"):
        npz(path)
    np.savez(path, x=pixels, y=np.arange(5) / 2)
    with pytest.raises(ValueError, match=r"labels float64 of shape \(5,\) must be whole numbers"):
        npz(path)
    np.savez(path, x=pixels.reshape(5, -1), y=np.arange(5))
    with pytest.raises(ValueError, match=r"images of shape \(5, 231\) must be"):
        npz(path)
    np.savez(path, x=np.array([{}], object), y=np.arange(1))
    with pytest.raises(ValueError, match=r"a.npz: array 'x' is damaged, or holds Python objects"):
        npz(path)
    whole = path.read_bytes()
    np.save(tmp_path / "b.npy", pixels)
    for data in (b"x", b"", whole[:-40], (tmp_path / "b.npy").read_bytes()):
        path.write_bytes(data)
        with pytest.raises(ValueError, match=r"a.npz is no .npz archive, or its end is missing"):
            npz(path)


def test_digits() -> None:
    pytest.importorskip("sklearn")
    images = digits()
    assert images.pixels.shape == (1797, 1, 8, 8)
    assert images.pixels.max() == 255
    assert images.classes[7] == "7"


@needs_data
def test_fashion_mnist() -> None:
    names = (f"t10k-{part}-ubyte.gz" for part in ("images-idx3", "labels-idx1"))
    images = idx(*(SHARED / "fashion_mnist" / name for name in names))
    assert images.pixels.shape == (10_000, 1, 28, 28)
    assert images.labels is not None
    assert np.bincount(images.labels).tolist() == [1000] * 10


@pytest.mark.usefixtures("unchecked")
def test_errors(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "classes" / "a").mkdir(parents=True)
    (tmp_path / "lines").write_text("a\n")
    how = Decoding((5, 5))
    for match, make in (
        (r"size \(5, 0\) must be rows", lambda: Decoding((5, 0))),
        (r"channels \(2\) must be 1", lambda: Decoding((5, 5), channels=2)),  # type: ignore[arg-type]
        (r"fit \('x'\) must be crop or pad", lambda: Decoding((5, 5), fit="x")),  # type: ignore[arg-type]
        (r"background \(256\)", lambda: Decoding((5, 5), background=256)),
        ("is not a folder", lambda: folders(tmp_path / "none", how)),
        ("has no folders", lambda: folders(tmp_path / "empty", how)),
        ("there is no image in", lambda: folders(tmp_path / "classes", how)),
        ("is not a folder", lambda: captions(tmp_path / "none", tmp_path / "lines", how)),
        ("no line of .* belongs", lambda: captions(tmp_path / "empty", tmp_path / "lines", how)),
        (
            r"mean \(1\) and std \(3\) must have a number for each channel \(3\)",
            lambda: normalize(torch.zeros(2, 3, 5, 7), [0.5], [1, 1, 1]),
        ),
    ):
        with pytest.raises(ValueError, match=match) as error:
            make()
        assert "\n" not in str(error.value)


# On the device


def test_normalize() -> None:
    images = torch.randint(0, 256, (5, 3, 7, 11), dtype=torch.uint8)
    mean, std = (0.5, 0.25, 0.1), (0.2, 0.5, 1)
    expected = (images / 255 - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]
    torch.testing.assert_close(normalize(images, mean, std), expected)
    torch.testing.assert_close(normalize(images / 255, mean, std), expected)
    assert normalize(images, mean, std, torch.bfloat16).dtype == torch.bfloat16
