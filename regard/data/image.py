"""Images as tensors of bytes: decoded once, cached at one size, augmented on the device.

    folders("photos", Decoding((32, 32)))       one folder for each class
    idx("images.gz", "labels.gz"), npz("a.npz"), digits()
    captions("photos", "captions.tsv", …)       images and the texts that belong to them

    normalize(augment(images, how, seed, step), mean, std)

Files are decoded by Pillow, in worker processes; those that cannot be decoded are reported.
Pixels are cached in a memory-mapped file under the folder, and the names and contents of the files.
So all images are known to be good, and how many they are, before the first step.
"""

import contextlib
import gzip
import hashlib
import math
import os
import re
import struct
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from jaxtyping import Float, Int64, Integer, Shaped, UInt8
from torch import Tensor

from regard.data.augment import Augmentation, Mixed, augment, mix
from regard.data.cache import Draft, PathLike, Progress, digest, header, keep
from regard.data.diagnosis import SEPARATORS, Separator
from regard.data.files import beginning, check_file
from regard.data.pixels import Decoding, Fit, channels_first, decode, decode_some, fitted
from regard.data.problems import Problems, reason
from regard.data.reading import Lines, Text
from regard.data.table import Table
from regard.data.text import OnBad
from regard.data.workers import processors, spread
from regard.machine.extras import install

__all__ = [
    "Augmentation",
    "Decoding",
    "Images",
    "Mixed",
    "augment",
    "captions",
    "decode",
    "digits",
    "folders",
    "idx",
    "mix",
    "normalize",
    "npz",
    "resize",
]

_TOGETHER = 16  # files of one task of a worker
_SAMPLE = 2**16  # bytes at a file's beginning, and at its end, that tell it from others
_SMALL = 2000  # files that are not worth starting workers


# Many images


@dataclass(frozen=True)
class Images:
    """Images of one size, with their classes or their texts."""

    pixels: UInt8[np.ndarray, "m C Y X"] = field(repr=False)
    """In memory, or memory-mapped."""
    labels: Int64[np.ndarray, "n"] | None = None
    """The number of each image's class."""
    classes: tuple[str, ...] = ()
    """The names of the classes."""
    texts: tuple[str, ...] | None = field(default=None, repr=False)
    problems: Problems = field(default_factory=Problems)
    """What was left out."""
    rows: Int64[np.ndarray, "n"] | None = field(default=None, repr=False)
    """Which of the pixels belong to these images; None for all."""

    def __len__(self) -> int:
        return len(self.pixels) if self.rows is None else len(self.rows)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, rows, columns."""
        C, Y, X = self.pixels.shape[1:]
        return C, Y, X

    def batch(self, indices: Integer[np.ndarray, "B"] | Sequence[int]) -> UInt8[Tensor, "B C Y X"]:
        """Some of the images, as they were decoded."""
        chosen = np.asarray(indices, np.int64)
        return torch.from_numpy(self.pixels[chosen if self.rows is None else self.rows[chosen]])

    def part(self, indices: Integer[np.ndarray, "k"] | Sequence[int]) -> "Images":
        """Only some of the images, such as those for training; no pixel is copied."""
        chosen = np.asarray(indices, np.int64)
        return Images(
            self.pixels,
            None if self.labels is None else self.labels[chosen],
            self.classes,
            None if self.texts is None else tuple(self.texts[i] for i in chosen),
            self.problems,
            chosen if self.rows is None else self.rows[chosen],
        )

    def resized(self, size: tuple[int, int], fit: Fit = "crop", background: int = 0) -> "Images":
        """The same at another size, in memory."""
        pixels = resize(self.batch(np.arange(len(self))), size, fit, background).numpy()
        return Images(pixels, self.labels, self.classes, self.texts, self.problems)

    def statistics(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Mean and standard deviation of each channel, from 0 to 1, as `normalize` takes them."""
        C = self.pixels.shape[1]
        total, squares, count = np.zeros(C), np.zeros(C), 0
        for i in range(0, len(self), 1024):
            some = self.batch(np.arange(i, min(i + 1024, len(self)))).numpy() / 255.0
            total += some.sum((0, 2, 3))
            squares += (some**2).sum((0, 2, 3))
            count += some.size // C
        mean = total / count
        deviation = np.sqrt(np.maximum(squares / count - mean**2, 0))
        # A channel that never changes is left as it is.
        deviation[deviation < 1e-6] = 1
        return tuple(mean.tolist()), tuple(deviation.tolist())


def digits() -> Images:
    """The 1797 handwritten digits of scikit-learn (Alpaydin & Kaynak 1998), 8 × 8, grey."""
    try:
        from sklearn.datasets import load_digits  # type: ignore[import-untyped]
    except ImportError:
        raise ValueError(f"the digits are a part of scikit-learn: {install('demo')}") from None
    data = load_digits()
    pixels = np.round(data.images * (255 / 16)).astype(np.uint8)[:, None]
    return Images(pixels, data.target.astype(np.int64), tuple(map(str, range(10))))


def folders(
    path: PathLike,
    how: Decoding,
    *,
    classes: Sequence[str] | None = None,
    on_bad: OnBad = "skip",
    cache: PathLike | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
) -> Images:
    """Images in one folder for each class, whose name it has; folders within folders are read too.

    Classes are in alphabetical order, unless they are given: those of the training images, say.
    """
    root = Path(path)
    if not root.is_dir():
        raise ValueError(f"{root} is not a folder; it should have one folder for each class")
    found = [place for place in sorted(root.iterdir()) if place.is_dir() and place.name[0] != "."]
    names = tuple(place.name for place in found) if classes is None else tuple(classes)
    if not found:
        raise ValueError(f"{root} has no folders; put the images of each class into one")
    if unknown := [place.name for place in found if place.name not in names]:
        raise ValueError(
            f"{root} has the folder {unknown[0]!r}, which is none of the classes "
            f"({', '.join(names)}); take it away, or train with it"
        )
    problems, files, labels = Problems(), [], []
    for place in found:
        for file in images_in(place, problems):
            files.append(file)
            labels.append(names.index(place.name))
    pixels, kept = _decoded(root, files, how, problems, on_bad, cache, workers, progress)
    return Images(pixels, np.array(labels, np.int64)[kept], names, problems=problems)


def captions(
    folder: PathLike,
    file: PathLike,
    how: Decoding,
    *,
    separator: Separator = "tab",
    on_bad: OnBad = "skip",
    cache: PathLike | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
    flag: str = "",
) -> Images:
    """Images and their texts: a table of names and texts, or a line for each image, by name.

    Which of the two is known by the first line, which has a tab or not; other separators are those
    of tables. `flag` names the file in messages.
    """
    root, problems = Path(folder), Problems()
    if not root.is_dir():
        raise ValueError(f"{root} is not a folder; it should have the images")
    text: Text = Lines(file, flag=flag)
    start = beginning(Path(file), text.names[0]).lstrip(b"\r\n ")
    if b"\t" in start.partition(b"\n")[0] or separator != "tab":
        text = Table(file, separator=separator, flag=flag)
        named = []
        for number, (name, words) in text.numbered():
            if _within(root, name):
                named.append((root / name, words))
            else:
                problems.add("missing", f"line {number:,} of {Path(file).name}: {name}")
    elif other := _separator(root, start):
        raise ValueError(f"{text.names[0]} names images before a {other}; add --separator {other}")
    else:
        images = list(images_in(root, problems))
        numbered = list(text.numbered())
        count = len(numbered) + text.problems.total
        if images and count != len(images):
            raise ValueError(
                f"{count:,} lines in {text.names[0]} but {len(images):,} images in {root}: line n "
                "is the text of image n, by name; give each image a line, or name them in a table"
            )
        _check_numbering(images, text.names[0])
        named = [(images[n - 1], words) for n, (words,) in numbered] if images else []
    problems.merge(text.problems)
    if not named:
        raise ValueError(f"no line of {text.names[0]} belongs to an image in {root}{problems.why}")
    # An image may have several texts, and is decoded once.
    files = list(dict.fromkeys(image for image, _ in named))
    pixels, kept = _decoded(root, files, how, problems, on_bad, cache, workers, progress)
    place = {files[i]: row for row, i in enumerate(kept.tolist())}
    good = [(place[image], words) for image, words in named if image in place]
    return Images(
        pixels,
        texts=tuple(words for _, words in good),
        problems=problems,
        rows=np.array([row for row, _ in good], np.int64),
    )


def _check_numbering(images: list[Path], lines: str) -> None:
    """Raises if images with numbers in their names are in another order by name than by number."""
    earlier: dict[str, tuple[list[int], Path]] = {}
    for image in images:
        numbers = [int(number) for number in re.findall(r"\d+", str(image))]
        kind = re.sub(r"\d+", "0", str(image))
        if kind in earlier and earlier[kind][0] > numbers:
            raise ValueError(
                f"{earlier[kind][1].name} is before {image.name} by name, but after it by number, "
                f"so the lines of {lines} may mean either; name the images in a table (name, tab, "
                "text), or rename them with leading zeros"
            )
        earlier[kind] = numbers, image


def _separator(root: Path, start: bytes) -> Separator | None:
    """What parts the name of an image from its text in the first lines, under a title perhaps."""
    lines = start.decode(errors="replace").split("\n", 2)[:2]
    for separator, sign in SEPARATORS.items():
        if any(sign in line and _within(root, line.partition(sign)[0]) for line in lines):
            return separator
    return None


def _within(root: Path, name: str) -> bool:
    """Whether there is such a file in the folder; no name leads out of it."""
    path = Path(name)
    return not path.is_absolute() and ".." not in path.parts and os.path.isfile(root / path)


def images_in(folder: Path, problems: Problems) -> Iterator[Path]:
    """The image files under a folder, in the order of their names; others are counted."""
    from PIL import Image

    known = {name for name, kind in Image.registered_extensions().items() if kind in Image.OPEN}
    for file in sorted(folder.rglob("*")):
        if file.is_dir() or any(part.startswith(".") for part in file.relative_to(folder).parts):
            continue
        # A pipe would be waited for.
        if file.suffix.lower() in known and file.is_file():
            yield file
        else:
            problems.add("foreign", str(file))


def _decoded(
    root: Path,
    files: list[Path],
    how: Decoding,
    problems: Problems,
    on_bad: OnBad,
    cache: PathLike | None,
    workers: int | None,
    progress: Progress | None,
) -> tuple[UInt8[np.ndarray, "n C Y X"], Int64[np.ndarray, "n"]]:
    """All pixels, memory-mapped, and the index of each one's file."""
    if on_bad not in get_args(OnBad):
        raise ValueError(f"on_bad ({on_bad!r}) must be {' or '.join(get_args(OnBad))}")
    if problems and on_bad == "refuse":
        raise problems.refusal()
    if not files:
        raise ValueError(f"there is no image in {root}{problems.why}")
    known = [(str(file.relative_to(root)), *_fingerprint(file)) for file in files]
    key = digest("images", asdict(how), os.path.realpath(root), known)
    if workers is None:
        workers = 0 if len(files) < _SMALL else processors()

    def find(folder: Path) -> Path | None:
        with contextlib.suppress(ValueError):  # damaged, or not there
            header(folder / f"{key}-images", verify=True)
            return folder / f"{key}-images"
        return None

    def make(folder: Path) -> Path:
        faults, done, kept = Problems(), 0, 0
        tasks = [files[i : i + _TOGETHER] for i in range(0, len(files), _TOGETHER)]
        with (
            Draft(folder, key, ["pixels", "kept"]) as draft,
            contextlib.closing(spread(decode_some, how, tasks, workers)) as results,
        ):
            for pixels, good, wrong in results:
                faults.merge(wrong)
                if faults and on_bad == "refuse":
                    raise faults.refusal()
                draft.write("pixels", pixels)
                draft.write("kept", done + good)
                done, kept = min(done + _TOGETHER, len(files)), kept + len(good)
                if progress:
                    progress(done, len(files), kept)
            if not kept:
                raise ValueError(f"no image in {root} can be used{faults.why}")
            shape = [kept, how.channels, *how.size]
            return draft.finish(f"{key}-images", {"shape": shape, "problems": faults.to_json()})

    place = keep(cache, key, find, make)
    said = header(place)
    problems.merge(Problems(**said["problems"]))
    if problems and on_bad == "refuse":
        raise problems.refusal()
    pixels = np.memmap(place / "pixels", np.uint8, "r", shape=tuple(said["shape"]))
    return np.asarray(pixels), np.fromfile(place / "kept", "<i8").astype(np.int64)


def _fingerprint(file: Path) -> tuple[str | int, ...]:
    """Size and hash of a file's content; where the file is longer than twice `_SAMPLE`, the hash of
    its beginning and its end, with its times."""
    try:
        with open(file, "rb", buffering=0) as stream:
            state = os.fstat(stream.fileno())
            content = stream.read(_SAMPLE)
            if long := state.st_size > 2 * _SAMPLE:
                stream.seek(-_SAMPLE, os.SEEK_END)
            content += stream.read(_SAMPLE)
    except OSError as error:  # decoding it says so
        return (reason(error),)
    hashed = hashlib.sha256(content).hexdigest()
    times = (state.st_mtime_ns, state.st_ctime_ns) if long else ()
    return hashed, state.st_size, *times


def resize(
    images: UInt8[Tensor, "B C Y X"],
    size: tuple[int, int],
    fit: Fit = "crop",
    background: int = 0,
) -> UInt8[Tensor, "B C rows columns"]:
    """Images at another size, as files are decoded to it: cropped at the centre, or padded."""
    from PIL import Image

    if size == tuple(images.shape[2:]):
        return images
    resized = np.empty((*images.shape[:2], *size), np.uint8)
    for i, pixels in enumerate(images.numpy()):
        image = Image.fromarray(pixels[0] if len(pixels) == 1 else pixels.transpose(1, 2, 0))
        resized[i] = channels_first(fitted(image, size, fit, background))
    return torch.from_numpy(resized)


# Archives


def idx(images: PathLike, labels: PathLike, classes: Sequence[str] | None = None) -> Images:
    """A pair of idx files, as MNIST's are, plain or gzipped."""
    pixels, numbers = _idx(Path(images)), _idx(Path(labels))
    return _labelled(pixels, numbers, classes, f"{images}", f"{labels}")


_IDX = {8: "u1", 9: "i1", 11: ">i2", 12: ">i4", 13: ">f4", 14: ">f8"}


def _idx(path: Path) -> Shaped[np.ndarray, "..."]:
    check_file(path)
    try:
        data = path.read_bytes()
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path} cannot be read ({reason(error)}); fetch it again") from error
    if len(data) < 4 or data[:2] != b"\0\0" or data[2] not in _IDX:
        start = f"begins with 0x{data[:4].hex()}" if data else "is empty"
        raise ValueError(f"{path} is not an idx file: it {start}")
    axes, kind = data[3], np.dtype(_IDX[data[2]])
    begin = 4 + 4 * axes
    shape = struct.unpack(f">{axes}I", data[4:begin]) if len(data) >= begin else (0,)
    size = math.prod(shape) * kind.itemsize
    if len(data) != begin + size:
        raise ValueError(
            f"{path} should have {begin + size} bytes for shape {shape}, but has {len(data)}; "
            "fetch it again"
        )
    return np.frombuffer(data, kind, offset=begin).reshape(shape)


def npz(
    path: PathLike,
    *,
    images: str | None = None,
    labels: str | None = None,
    classes: Sequence[str] | None = None,
) -> Images:
    """A numpy archive with images, (n, Y, X) or (n, Y, X, C), and labels."""
    usual = {
        "images": ("images", "x", "X", "data", "x_train", "arr_0"),
        "labels": ("labels", "y", "Y", "targets", "y_train", "arr_1"),
    }
    with _archive(path) as archive:
        arrays = archive.files
        found = {}
        for role, given in (("images", images), ("labels", labels)):
            sought = usual[role] if given is None else (given,)
            name = next((name for name in sought if name in arrays), None)
            if name is None:
                raise ValueError(
                    f"{path} has no {role}: it has {', '.join(arrays) or 'no array'}, and none "
                    f"of {', '.join(sought)}; save them under one of these names"
                )
            found[role] = _array(archive, name, path)
        if classes is None and "classes" in arrays:
            classes = [str(name) for name in _array(archive, "classes", path)]
    return _labelled(found["images"], found["labels"], classes, f"{path}", f"{path}")


@contextlib.contextmanager
def _archive(path: PathLike) -> Iterator[Any]:
    """A numpy archive, of which nothing is unpickled."""
    check_file(Path(path))
    try:
        archive = np.load(path, allow_pickle=False) if zipfile.is_zipfile(path) else None
    except (OSError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} cannot be read ({reason(error)}); fetch it again") from error
    if archive is None:
        raise ValueError(
            f"{path} is no .npz archive, or its end is missing; write it with numpy's savez"
        )
    with archive:
        yield archive


def _array(archive: Any, name: str, path: PathLike) -> Shaped[np.ndarray, "..."]:
    try:
        array = archive[name]
    # A damaged archive may raise nearly anything, such as a MemoryError over a wrong size.
    except Exception as error:
        raise ValueError(
            f"{path}: array {name!r} is damaged, or holds Python objects, which are never loaded; "
            "save numbers with numpy's savez"
        ) from error
    if not isinstance(array, np.ndarray):
        raise ValueError(f"{path}: {name!r} is not an array; save numbers with numpy's savez")
    return array


def _labelled(
    pixels: Shaped[np.ndarray, "..."],
    numbers: Shaped[np.ndarray, "..."],
    classes: Sequence[str] | None,
    images: str,
    labels: str,
) -> Images:
    numbers = numbers[:, 0] if numbers.ndim == 2 and numbers.shape[1] == 1 else numbers
    if numbers.ndim != 1 or numbers.dtype.kind not in "iu":
        raise ValueError(
            f"{labels}: labels {numbers.dtype} of shape {numbers.shape} must be whole numbers, one "
            "for each image"
        )
    count = len(pixels) if pixels.ndim else 0
    if len(numbers) != count or not count:
        raise ValueError(
            f"images ({count}) in {images} and labels ({len(numbers)}) in {labels} must be "
            "as many, and at least one"
        )
    least, most = int(numbers.min()), int(numbers.max())
    if classes is None and most >= 1000 and most >= 10 * (count := len(np.unique(numbers))):
        raise ValueError(
            f"{labels}: labels from {least} to {most}, of which {count} occur, would need "
            f"{most + 1} classes; number them from 0 to {count - 1}"
        )
    names = tuple(map(str, range(most + 1))) if classes is None else tuple(classes)
    if least < 0 or most >= len(names):
        raise ValueError(
            f"{labels}: labels from {least} to {most} must be from 0 to {len(names) - 1}, the "
            "number of the last class"
        )
    return Images(_bytes(pixels, images), numbers.astype(np.int64), names)


def _bytes(pixels: Shaped[np.ndarray, "..."], where: str) -> UInt8[np.ndarray, "n C Y X"]:
    """Pixels of an archive as (n, C, Y, X) bytes."""
    if not pixels.size:
        raise ValueError(f"{where}: images of shape {pixels.shape} have no pixels; add some")
    if pixels.ndim == 4 and pixels.shape[3] in (1, 3, 4):
        pixels = pixels.transpose(0, 3, 1, 2)[:, :3]
    elif pixels.ndim == 3:
        pixels = pixels[:, None]
    else:
        raise ValueError(
            f"{where}: images of shape {pixels.shape} must be (n, rows, columns), or (n, rows, "
            "columns, channels) with 1, 3 or 4 channels"
        )
    if pixels.dtype.kind == "f" and pixels.min() >= 0 and pixels.max() <= 1:
        pixels = np.round(pixels * 255)
    elif pixels.dtype != np.uint8:
        raise ValueError(
            f"{where}: pixels ({pixels.dtype}, {pixels.min()} to {pixels.max()}) must be bytes, or "
            "numbers from 0 to 1; convert them"
        )
    return np.ascontiguousarray(pixels, np.uint8)


# On the device


def normalize(
    images: UInt8[Tensor, "B C Y X"] | Float[Tensor, "B C Y X"],
    mean: Sequence[float | int],
    std: Sequence[float | int],
    dtype: torch.dtype = torch.float32,
) -> Float[Tensor, "B C Y X"]:
    """(x - mean) / std for each channel, with x from 0 to 1; bytes are divided by 255."""
    C = images.shape[1]
    if len(mean) != C or len(std) != C:
        raise ValueError(
            f"mean ({len(mean)}) and std ({len(std)}) must have a number for each channel ({C})"
        )
    # One multiply-add on the device, whose factors are copied without waiting.
    scale = 255 if images.dtype == torch.uint8 else 1
    numbers = [[1 / (scale * s) for s in std], [-m / s for m, s in zip(mean, std)]]
    factor, offset = torch.tensor(numbers, dtype=torch.float32).to(
        images.device, non_blocking=True
    )[..., None, None]
    return (images.float() * factor + offset).to(dtype)
