"""Files that are not what a command needs: one true line each, that names flag, file and remedy."""

import bz2
import errno
import gzip
import io
import os
import signal
import struct
import tarfile
import threading
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from regard.cli.main import main
from regard.data import cache as caches
from regard.data import image as images
from regard.data import tokenizer as tokenizers
from regard.data.files import LINE, check_file
from regard.data.problems import Problems, reason
from regard.data.reading import Documents, Lines, Pairs
from regard.data.table import Table
from regard.data.text import Draft, store
from regard.data.tokenizer import Tokenizer
from regard.data.workers import interruptible
from regard.native import build
from regard.task import read, translate
from tests.processes import HANG

EN = [f"A man number {n} sees a dog." for n in range(37)]
DE = [f"Ein Mann Nummer {n} trifft Königin Änne." for n in range(37)]
ROWS = list(zip(EN, DE))
QUICK = [
    *("--model.width", "16", "--model.heads", "2", "--model.feed-forward", "24"),
    *("--training.steps", "1", "--training.evaluate-every", "1", "--training.batch", "300"),
    *("--training.save-every", "1", "--training.no-tensorboard", "--training.device", "cpu"),
]
SMALL = [*QUICK, "--model.encoder-layers", "1", "--model.decoder-layers", "1"]


def table(separator: str = "\t", end: str = "\n") -> str:
    return "".join(f"{source}{separator}{target}{end}" for source, target in ROWS)


def picture(seed: int = 0) -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (31, 29, 3), np.uint8)).save(
        file, "png"
    )
    return file.getvalue()


def archive(kind: str) -> bytes:
    file, data = io.BytesIO(), table().encode()
    if kind == "zip":
        with zipfile.ZipFile(file, "w") as packed:
            packed.writestr("pairs.tsv", data)
    else:
        with tarfile.open(fileobj=file, mode="w") as tar:
            about = tarfile.TarInfo("pairs.tsv")
            about.size = len(data)
            tar.addfile(about, io.BytesIO(data))
    return file.getvalue()


def table_file(data: bytes) -> bytes:
    file = io.BytesIO()
    np.save(file, np.frombuffer(data, np.uint8))
    return file.getvalue()


RUSSIAN = "Собака бежит\tпо улице\n"  # noqa: RUF001
POLISH = "Zażółć gęślą jaźń i kup chleb\twczoraj poszliśmy do sklepu, żeby kupić mleko\n"
FRENCH = "L'élève a été très déçu\tpar les résultats à l'école, où il était préféré\n"
LATIN = "".join(f"é{source}\tü{target}\n" for source, target in ROWS)
CONVERT = "convert it: iconv -f {} -t UTF-8"
ONE = "has one column, without a tab; put one between the columns, or name another with --separator"

# What each file is told of, whichever command reads it as a table.
FILES: dict[str, tuple[bytes, str]] = {
    "latin-1": (LATIN.encode("latin-1"), "seems to be Latin-1 (Windows-1252); " + CONVERT),
    "windows": (LATIN.replace("A", "“").encode("cp1252"), "37 × bytes that are not UTF-8: line 1"),
    "cyrillic": (RUSSIAN.encode("cp1251") * 37, "seems to be CP1251; " + CONVERT.format("CP1251")),
    "japanese": (
        "犬が走る\t日本語\n".encode("shift_jis") * 37,
        "seems to be SHIFT_JIS; " + CONVERT.format("SHIFT_JIS"),
    ),
    "polish": (POLISH.encode("cp1250") * 37, "seems to be CP1250; " + CONVERT.format("CP1250")),
    "french": (FRENCH.encode("latin-1") * 37, "seems to be Latin-1 (Windows-1252); "),
    "utf-16": (table().encode("utf-16"), "is UTF-16; " + CONVERT.format("UTF-16")),
    "utf-16-le": (table().encode("utf-16-le"), "seems to be UTF-16LE, without a byte order mark; "),
    "utf-16-be": (table().encode("utf-16-be"), CONVERT.format("UTF-16BE")),
    "utf-16 russian": (RUSSIAN.encode("utf-16-le") * 9, "to be UTF-16LE"),
    "utf-32": (table().encode("utf-32"), "is UTF-32; " + CONVERT.format("UTF-32")),
    "utf-32-le": (table().encode("utf-32-le"), "seems to be UTF-32LE"),
    "semicolons": (
        table(";").encode(),
        "has 2 columns separated by ';'; add --separator semicolon",
    ),
    "commas": (table(",").encode(), "has 2 columns separated by ','; add --separator comma"),
    "bars": (table("|").encode(), "has 2 columns separated by '|'; add --separator pipe"),
    "quotes": ("".join(f'"{s};";"{t}"\n' for s, t in ROWS).encode(), "add --separator semicolon"),
    "one column": ("\n".join(EN).encode(), f"37 × too few columns: line 1 of x has 1: '{EN[0]}'"),
    "spaces": (table("    ").encode(), ONE),
    "png": (picture(), "is a PNG image; name a text file"),
    "pdf": (b"%PDF-1.4\n" + bytes(99), "is a PDF document"),
    "zip": (archive("zip"), "is a zip archive"),
    "tar": (archive("tar"), "is a tar archive"),
    "npy": (table_file(b"abc"), "is a numpy array"),
    "gzip twice": (gzip.compress(gzip.compress(table().encode())), "is compressed twice"),
    "zeros": (bytes(5000), "holds binary data, not text"),
    "noise": (np.random.default_rng(0).bytes(5000), "holds binary data, not text"),
    "empty": (b"", "there is no text in "),
    "gzip of nothing": (gzip.compress(b""), "there is no text in "),
    "half a gzip": (gzip.compress(table().encode())[:-20], "is damaged after line 0 (Compressed"),
    "broken bzip2": (bz2.compress(table().encode())[:40] + bytes(99), "is damaged after line 0 ("),
    "tabs": (b"\t\t\t\n" * 37, "37 × an empty side: line 1 of x; line 2 of x; line 3 of x; …"),
    "newlines": (b"\n" * 37, "37 × an empty side: line 1 of x"),
    "blanks": (b"   \n" * 37, "37 × an empty side: line 1 of x"),
    "nul": (table().replace(" sees", " \0sees").encode(), "control characters: line 1 of x has U+"),
    "wide": (b";".join([b"x"] * (LINE // 2 + 1)), f"1 × too long: line 1 of x has {LINE + 1:,} by"),
}


@pytest.fixture
def x(tmp_path: Path) -> Path:
    return tmp_path / "x"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def one_line(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """What a command says that refuses its data, and nothing else."""
    assert main([str(word) for word in words]) == 2
    lines = capsys.readouterr().err.splitlines()
    (said,) = [line for line in lines if line.startswith("regard: ")]
    assert all(line.endswith(" …") for line in lines if line != said)  # what is being prepared
    for leak in ("Errno", "allow_pickle", "Error:", "Error -", "None"):
        assert leak not in said
    return said


# Training


@pytest.mark.parametrize("name", FILES)
def test_tables(name: str, x: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, words = FILES[name]
    x.write_bytes(data)
    run = x.with_name("run")
    for task, flag in (("translate", "--pairs"), ("label", "--texts")):
        said = one_line(capsys, "train", task, run, flag, x)
        assert words.format("WINDOWS-1252") in said
        assert f"{flag} {x}" in said
    assert not run.exists()


@pytest.mark.parametrize(
    "name",
    [
        *("latin-1", "cyrillic", "utf-16", "utf-16-le", "utf-32-le", "png", "zip", "zeros"),
        *("noise", "empty", "gzip of nothing", "half a gzip", "nul", "wide"),
    ],
)
def test_text(name: str, x: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, words = FILES[name]
    x.write_bytes(data)
    for way in ("joined", "documents", "lines"):
        said = one_line(capsys, "train", "language", "run", "--text", x, "--examples", way)
        assert words.format("WINDOWS-1252") in said
        assert f"--text {x}" in said


@pytest.mark.parametrize("name", ["utf-16", "utf-16-le", "png", "zeros", "half a gzip"])
def test_one_of_two_sides(name: str, x: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, words = FILES[name]
    x.write_bytes(data)
    good = x.with_name("good")
    good.write_text("\n".join(EN), encoding="utf-8")
    for flags in (("--source", "--target"), ("--target", "--source")):
        said = one_line(capsys, "train", "translate", "run", flags[0], good, flags[1], x)
        assert f"{flags[1]} {x} {words}" in said
        assert str(good) not in said


def test_columns_that_are_not_there(x: Path, capsys: pytest.CaptureFixture[str]) -> None:
    x.write_text(table(), encoding="utf-8")
    said = one_line(capsys, "train", "translate", "run", "--pairs", x, "--columns", 4, 5)
    assert "x has 2 columns, of which the first is 0, and --columns 4 5 asks for 5; name" in said
    assert "37 × too few columns: line 1 of x has 2: " in said


def test_places_that_are_no_files(x: Path, capsys: pytest.CaptureFixture[str]) -> None:
    x.mkdir()
    os.mkfifo(x / "pipe")
    for path, words in (
        (x, f"--text {x} is a folder; name a file"),
        (x / "nowhere", "nowhere does not exist; check the name"),
        (x / "pipe", "pipe is a pipe or a device, which cannot be read twice; name a file"),
        (Path("/dev/null"), "is a pipe or a device"),
        (x / ("n" * 300), "cannot be read (File name too long); check the name"),
    ):
        assert words in one_line(capsys, "train", "language", "run", "--text", path)
    with pytest.raises(ValueError, match=r"cannot be read \(.*null"):
        check_file(Path("a\0b"))


def test_a_file_that_may_not_be_read(
    x: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(x))

    x.write_text(table(), encoding="utf-8")
    monkeypatch.setattr("regard.data.files.open", refused, raising=False)
    said = one_line(capsys, "train", "translate", "run", "--pairs", x)
    assert said == f"regard: --pairs {x} cannot be read (Permission denied)"


@pytest.mark.parametrize(
    ("task", "good", "flag", "also"),
    [
        ("translate", "--pairs", "--valid-pairs", ()),
        ("translate", "--pairs", "--valid-source", ("--valid-target",)),
        ("language", "--text", "--valid", ()),
        ("label", "--texts", "--valid", ()),
    ],
)
def test_validation_files_are_named(
    task: str,
    good: str,
    flag: str,
    also: tuple[str, ...],
    x: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    train = x.with_name("train")
    train.write_text(table(), encoding="utf-8")
    for data, words in ((b"", "there is no text in"), (bytes(99), "holds binary data")):
        x.write_bytes(data)
        others = [word for name in also for word in (name, x)]
        said = one_line(capsys, "train", task, "run", good, train, flag, x, *others)
        assert words in said
        assert f"{flag} {x}" in said
        assert str(train) not in said


def test_few_good_lines_are_told_of_with_the_others(
    x: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    x.write_text("a\tb\n" + "c\n" * 5, encoding="utf-8")
    for task, flag in (("translate", "--pairs"), ("label", "--texts")):
        said = one_line(capsys, "train", task, "run", flag, x)
        assert "5 of 6 lines cannot be read, which is more than a tenth: 5 × too few" in said
        said = one_line(capsys, "train", task, "run", flag, x, "--on-bad", "skip")
        assert "too few to train and to validate on: 5 × too few columns: line 2 of x" in said


@pytest.mark.usefixtures("unchecked")
def test_what_is_left_out_comes_with_the_remedy(
    x: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    some = "\n".join(EN) + "\n" + LATIN.replace("\t", " ")
    x.write_bytes(some.encode("latin-1"))
    words = ["train", "language", str(tmp_path / "run"), "--text", str(x), "--examples", "lines"]
    assert main([*words, "--on-bad", "skip", *QUICK]) == 0
    (said,) = [line for line in capsys.readouterr().err.splitlines() if "×" in line]
    assert said.startswith("regard: 37 × bytes that are not UTF-8: line 38 of x, byte ")
    assert "…; x seems to be Latin-1 (Windows-1252); convert it: iconv -f WINDOWS-1252" in said
    # A few damaged lines among others say nothing of a file's encoding.
    x.write_bytes(some.encode() + b"\xff\n")
    lines = Lines(x)
    assert len(list(lines)) == 74
    assert lines.problems.counts == {"undecodable": 1}
    assert "seems" not in str(lines.problems)


# Evaluation


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("runs")
    pairs, labelled = folder / "pairs.tsv", folder / "labelled.tsv"
    pairs.write_text(table(), encoding="utf-8")
    labelled.write_text("".join(f"{n % 2}\t{text}\n" for n, text in enumerate(EN)))
    cache = ["--cache", str(folder / "cache")]
    made = {name: folder / name for name in ("translate", "language", "label")}
    trained = {
        "translate": ["--pairs", str(pairs), *SMALL, *cache],
        "language": ["--text", str(pairs), *QUICK, *cache],
        "label": ["--texts", str(labelled), *QUICK],
    }
    for name, words in trained.items():
        assert main(["train", name, str(made[name]), *words]) == 0
    return made


@pytest.mark.parametrize("name", FILES)
def test_evaluating(
    name: str, x: Path, runs: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    data, words = FILES[name]
    x.write_bytes(data)
    for task, flag in (("translate", "--pairs"), ("label", "--texts")):
        said = one_line(capsys, "evaluate", runs[task], flag, x, "--device", "cpu")
        assert words.format("WINDOWS-1252") in said
        assert f"{flag} {x}" in said


def test_evaluating_a_language_model(
    x: Path, runs: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("empty", "zeros", "png", "latin-1", "utf-16-le", "newlines"):
        x.write_bytes(FILES[name][0])
        said = one_line(capsys, "evaluate", runs["language"], "--texts", x, "--device", "cpu")
        assert f"--texts {x}" in said
    x.write_bytes(b"Good text.\n\nB\xffd text.\n")
    assert main(["evaluate", str(runs["language"]), "--texts", str(x), "--device", "cpu"]) == 0
    assert "left out: 1 × bytes that are not UTF-8: line 3 of x" in capsys.readouterr().err


def test_a_run_whose_held_out_pairs_are_damaged(
    runs: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    held = runs["translate"] / "held_out.jsonl"
    whole = held.read_bytes()
    try:
        for data, words in ((b"[1", "held_out.jsonl is damaged ("), (b"", "is empty"), (b"7", "(")):
            held.write_bytes(data)
            assert words in one_line(capsys, "evaluate", runs["translate"], "--device", "cpu")
    finally:
        held.write_bytes(whole)


# What is read all the same


@pytest.mark.parametrize("squeeze", [bytes, gzip.compress])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_lines_may_end_with_a_carriage_return(
    squeeze: Callable[[bytes], bytes], mark: str, x: Path
) -> None:
    for end in ("\n", "\r\n", "\r"):
        x.write_bytes(squeeze((mark + table(end=end)).encode()))
        assert list(Table(x)) == ROWS
        assert len(list(Documents(x))) == 1
    x.write_bytes(("\r".join(EN)).encode())
    lines = x.with_name("lines")
    lines.write_bytes(("\n".join(DE)).encode())
    assert list(Pairs(x, lines)) == ROWS


def test_lines_that_end_in_several_ways(x: Path) -> None:
    x.write_bytes(b"one\ntwo\r\nthree\rfour\nfive\n")
    lines = Lines(x)
    assert [text for (text,) in lines] == ["one", "two", "five"]
    assert "x has lines that end with CR, others with LF; end all" in str(lines.problems)


def test_csv(x: Path) -> None:
    x.write_text('a;"b; ""c"""\r\n "d";e\r\n;f\r\n"g"\r\n', encoding="utf-8")
    rows = Table(x, separator="semicolon")
    assert list(rows) == [("a", 'b; "c"'), ("d", "e")]
    assert rows.problems.counts == {"empty": 1, "columns": 1}
    long = "word " * 40_000
    x.write_text(f'"{long}",b\n', encoding="utf-8")
    assert list(Table(x, separator="comma")) == [(long.strip(), "b")]
    assert Table(x).form() != Table(x, separator="comma").form()
    # Between tabs, quotes are text.
    x.write_text('"a\tb"\n', encoding="utf-8")
    assert list(Table(x)) == [('"a', 'b"')]


@pytest.mark.parametrize("line", ['"a;b', '"a" b;c', '"a"""b";c;"'])
def test_quotes_that_do_not_pair_up(line: str, x: Path) -> None:
    x.write_text(f"x;y\n{line}\nb;c\n", encoding="utf-8")
    with pytest.raises(ValueError, match="line 2 of x: its quotes do not pair up"):
        list(Table(x, separator="semicolon"))


def test_a_csv_is_trained_on_and_evaluated(
    x: Path, runs: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    x.write_text("".join(f'"{a}","{b}, und so"\n' for a, b in ROWS[:7]), encoding="utf-8")
    config = translate.Config(pairs=(str(x),), separator="comma", vocabulary=300, held_out=1)
    task = translate.build(config)
    assert len(task.examples) + len(task.held_out) == 7
    assert not task.notes
    test = ["--pairs", str(x), "--separator", "comma", "--beams", "1", "--device", "cpu"]
    assert main(["evaluate", str(runs["translate"]), *test]) == 0
    assert "left out" not in capsys.readouterr().err


# Captions


def captioned(folder: Path, text: bytes) -> list[str]:
    for name in "ab":
        (folder / "pictures").mkdir(exist_ok=True)
        (folder / "pictures" / f"{name}.png").write_bytes(picture())
    (folder / "x").write_bytes(text)
    return ["--images", str(folder / "pictures"), "--captions", str(folder / "x")]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"", "0 lines in --captions {} but 2 images in "),
        (bytes(99), "--captions {} holds binary data"),
        ("a.png\té\n".encode("latin-1") * 2, "2 × bytes that are not UTF-8: line 1 of x, byte 6"),
        ("one\n".encode("utf-16"), "--captions {} is UTF-16"),
        (
            b"image,text\na.png,one\nb.png,two\n",
            "names images before a comma; add --separator comma",
        ),
        (
            b"a.png|one\nb.png|two\n",
            "--captions {} names images before a pipe; add --separator pipe",
        ),
        (b"c.png\tone\n" + b"n" * 300 + b"\ttwo\n", "2 × images that are named, but not there"),
    ],
)
def test_captions(
    text: bytes, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = one_line(capsys, "train", "read", "run", *captioned(tmp_path, text))
    assert words.format(tmp_path / "x") in said
    train = captioned(tmp_path, b"one\ntwo\n")
    (tmp_path / "y").write_bytes(b"")
    valid = ["--validation", tmp_path / "pictures", "--validation-captions", tmp_path / "y"]
    said = one_line(capsys, "train", "read", "run", *train, *valid)
    assert f"0 lines in --validation-captions {tmp_path / 'y'} but 2 images" in said


def test_an_overlong_caption_is_left_out(tmp_path: Path) -> None:
    words = captioned(tmp_path, b"one\n" + b"x" * 1001 + b"\n")
    (tmp_path / "pictures" / "c.png").write_bytes(picture(1))
    (tmp_path / "x").write_bytes(b"one\n" + b"x" * 1001 + b"\nthree\n")
    files = {"images": words[1], "captions": words[3]}
    valid = {"validation": words[1], "validation_captions": words[3]}
    config = read.Config(**files, **valid, pixels=(8, 16))
    task = read.build(config)
    assert task.train.count == task.validation.count == 2
    assert task.search.length == 2 * len("three")
    assert [note for note in task.notes if "1 × too long: 1,001 tokens: 'xxx" in note]
    with pytest.raises(ValueError, match=r"all 3 texts are longer than longest \(2 tokens\)"):
        read.build(replace(config, longest=2))


def test_overlong_pairs_are_not_validated_on(x: Path) -> None:
    x.write_text(table() + "dog " * 99 + "\t" + "Hund " * 99 + "\n", encoding="utf-8")
    config = translate.Config(pairs=(str(x),), valid_pairs=(str(x),), longest=60, vocabulary=300)
    task = translate.build(config)
    assert len(task.held_out) == len(task.examples) == 37
    assert [note for note in task.notes if note.startswith("1 × too long: 'dog dog")]
    with pytest.raises(ValueError, match=r"all pairs of --valid-pairs .*x are longer than longest"):
        translate.build(replace(config, longest=2, pairs=(str(x), str(x))))


# Archives of images

PIXELS = np.random.default_rng(0).integers(0, 256, (11, 5, 7), np.uint8)
LABELS = np.arange(11) % 2


def zipped(**members: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as packed:
        for name, data in members.items():
            packed.writestr(f"{name}.npy", data)
    return file.getvalue()


def saved(**arrays: Any) -> bytes:
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def moon() -> bytes:
    """An array of more bytes than there are."""
    file = io.BytesIO()
    about = {"descr": "<f8", "fortran_order": False, "shape": (10**13,)}
    np.lib.format.write_array_header_1_0(file, about)
    return file.getvalue()


OBJECTS = np.array([{}] * 11, object)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (
            saved(images=OBJECTS, labels=LABELS),
            "array 'images' is damaged, or holds Python objects",
        ),
        (
            saved(images=PIXELS, labels=OBJECTS),
            "array 'labels' is damaged, or holds Python objects",
        ),
        (
            saved(images=PIXELS, labels=np.array(["a"] * 11)),
            "labels <U1 of shape (11,) must be who",
        ),
        (saved(images=PIXELS), "has no labels: it has images, and none of labels, y, Y"),
        (saved(), "has no images: it has no array, and none of images"),
        (saved(images=PIXELS[:0], labels=LABELS[:0]), "images (0) in "),
        (saved(images=np.uint8(3), labels=LABELS), "images (0) in "),
        (saved(images=PIXELS[:, :0], labels=LABELS), "images of shape (11, 0, 7) have no pixels"),
        (saved(images=PIXELS, labels=LABELS)[:-99], "is no .npz archive, or its end is missing"),
        (saved(images=PIXELS, labels=LABELS)[:250] + bytes(999), "is no .npz archive, or its end"),
        (zipped(images=b"hello", labels=b"x"), "'images' is not an array; save numbers"),
        (zipped(images=moon(), labels=moon()), "array 'images' is damaged"),
        (table_file(b"abc"), "is no .npz archive"),
        (b"", "is no .npz archive"),
    ],
)
def test_npz(data: bytes, words: str, x: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = x.with_suffix(".npz")
    path.write_bytes(data)
    said = one_line(capsys, "train", "classify", "run", "--images", path)
    assert words in said
    assert str(path) in said


def idx(array: np.ndarray) -> bytes:
    shape = struct.pack(f">{array.ndim}I", *array.shape)
    return bytes([0, 0, 8, array.ndim]) + shape + array.astype(np.uint8).tobytes()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "is not an idx file: it is empty"),
        (b"\x89PNG", "is not an idx file: it begins with 0x89504e47"),
        (gzip.compress(idx(PIXELS))[:-30], "cannot be read (Compressed file ended before"),
        (gzip.compress(idx(PIXELS))[:30] + bytes(50), "cannot be read ("),
        (idx(PIXELS)[:-1], "should have 401 bytes for shape (11, 5, 7), but has 400; fetch it"),
        (b"\0\0\x08\x03" + b"\xff" * 12, "but has 16; fetch it again"),
        (idx(PIXELS[:, :0]), "images of shape (11, 0, 7) have no pixels"),
    ],
    # A gzip file has the time in it, and a test's name should not.
    ids=["empty", "png", "half a gzip", "damaged gzip", "a byte less", "huge", "no pixels"],
)
def test_idx(data: bytes, words: str, x: Path, capsys: pytest.CaptureFixture[str]) -> None:
    labels = x.with_name("labels")
    labels.write_bytes(idx(LABELS))
    x.write_bytes(data)
    assert words in one_line(capsys, "train", "classify", "run", "--images", x, "--labels", labels)


def test_pipes_among_pictures_are_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.png")
    problems = Problems()
    assert list(images.images_in(tmp_path, problems)) == []
    assert problems.counts == {"foreign": 1}


def test_texts_in_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for n, data in enumerate((b"\xff", bytes(99), b" \n")):
        place = tmp_path / "texts" / str(n)
        place.mkdir(parents=True)
        (place / "a.txt").write_bytes(data)
    said = one_line(capsys, "train", "label", "run", "--texts", tmp_path / "texts")
    assert f"there is no text in --texts {tmp_path / 'texts'}: 1 × bytes that are not UTF-8" in said
    assert "1 × control characters: 1/a.txt" in said
    assert "1 × an empty side: 2/a.txt" in said


# Words that never end


def test_overlong_words_are_learned_from_in_parts() -> None:
    longest = tokenizers._LONGEST
    words = ["x" * 3001, "é" * 2500, "a" + " " * 2999 + "b", "(" * 1001, "犬" * 4999]
    for text in ("one " + word + " two" for word in words):
        parts = list(tokenizers._bounded(text))
        assert "".join(parts) == text
        pieces = [
            piece for part in parts for piece, _ in tokenizers._split().pre_tokenize_str(part)
        ]
        assert longest <= max(map(len, pieces)) <= longest + 1  # with the space before it
    # A million characters would take minutes as one word.
    assert "aaaa" in Tokenizer.bpe([*EN, "a" * 1_000_000, "b" * LINE], 421).inner.get_vocab()


def test_long_texts_of_usual_words_are_learned_from_as_they_are() -> None:
    chance = np.random.default_rng(0)
    chinese = "".join(chance.choice(list("犬走日本語的一是不了人我。"), 5003))
    for text in (chinese, "word " * 1009, "a1b2," * 1009, "x" * 1000, "\n".join(EN * 41)):
        assert list(tokenizers._bounded(text)) == [text]


def test_ctrl_c_is_heard_while_a_library_is_at_work() -> None:
    begun, released = threading.Event(), threading.Event()

    def work(items: Iterator[int]) -> int:
        begun.set()
        released.wait(HANG)
        return next(items)

    def interrupt() -> None:
        begun.wait(HANG)
        signal.raise_signal(signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        interruptible(work, [1])
    released.set()
    thread.join()


def test_interrupted_work_gets_no_more_items() -> None:
    taken, threads = count(), list[threading.Thread]()

    def work(items: Iterator[int]) -> None:
        threads.append(threading.current_thread())
        for n in items:
            if n == 7:
                signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        interruptible(work, taken)
    threads[0].join(HANG)
    assert not threads[0].is_alive()


def test_errors_and_results_of_interruptible_work() -> None:
    assert interruptible(sum, [3, 5]) == 8

    def bad() -> Iterator[str]:
        yield "one"
        raise ValueError("line 2 is bad")

    with pytest.raises(ValueError, match=r"^line 2 is bad$"):
        Tokenizer.bpe(bad(), 300)


# The cache


@pytest.fixture
def text(x: Path) -> Table:
    x.write_text(table(), encoding="utf-8")
    return Table(x)


@pytest.fixture
def bpe() -> Tokenizer:
    return Tokenizer.bpe(EN + DE, 300)


def test_without_a_usable_cache(
    text: Table,
    bpe: Tokenizer,
    x: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spare = tmp_path / "spare"
    spare.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(spare))
    usual = store(text, bpe)
    within = x / "cache"  # in a file, where no folder can be made
    for again in ("", "again"):
        made = store(text, bpe, cache=within)
        assert len(made) == len(usual) == 37
        assert made.pair(5)[0].tolist() == usual.pair(5)[0].tolist()
        assert spare in made.folder.parents
        why = f"{within} cannot be used as a cache (Not a directory); going on without one"
        assert capsys.readouterr().err == ("" if again else f"regard: {why}\n")


def test_a_full_disk(
    text: Table,
    bpe: Tokenizer,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write, full = Draft.write, tmp_path / "full"

    def written(draft: Draft, name: str, values: object) -> None:
        if draft.folder == full or not small:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(draft, name, values)

    monkeypatch.setattr(Draft, "write", written)
    small = False
    with pytest.raises(ValueError, match=r"full cannot .* a temporary folder neither .*--cache"):
        store(text, bpe, cache=full)
    capsys.readouterr()
    caches._temporary.cache_clear()
    small = True
    assert len(store(text, bpe, cache=full)) == 37
    assert "full cannot be used as a cache (No space left on device); going on" in (
        capsys.readouterr().err
    )
    assert not [path for path in full.iterdir() if path.is_dir()]


def test_a_cache_that_can_only_be_read_is_read(
    text: Table,
    bpe: Tokenizer,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = store(text, bpe, cache=tmp_path / "kept")

    def refused(path: Path, mode: str) -> object:
        if "w" in mode:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return path.open(mode)

    monkeypatch.setattr(caches, "open", refused, raising=False)
    assert store(text, bpe, cache=tmp_path / "kept").folder == made.folder
    assert capsys.readouterr().err == ""


def test_without_a_home(
    text: Table, bpe: Tokenizer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", home)
    assert len(store(text, bpe)) == 37
    assert "the default cache cannot be used as a cache (Could not" in capsys.readouterr().err


def test_reasons_have_no_numbers() -> None:
    denied = PermissionError(errno.EACCES, os.strerror(errno.EACCES), "/x")
    assert reason(denied) == "Permission denied"
    assert build._reason(denied) == "/x: Permission denied"
    assert reason(ValueError("[Errno 2] No such\n file")) == "No such file"
    assert reason(ValueError("Error -3 while decompressing data: bad block")) == "bad block"
    assert reason(KeyError()) == "KeyError"
