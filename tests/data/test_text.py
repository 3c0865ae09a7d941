"""Text: every way of reading gives the same examples, and nothing is left out in silence."""

import bz2
import errno
import gzip
import lzma
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

from regard.data import reading, text
from regard.data.files import LINE
from regard.data.text import Documents, Lines, Pairs, Problems, Rules, Store, Table, Text, store
from regard.data.tokenizer import Tokenizer
from tests.processes import HANG, children, lives, wait_until

SHARED = Path(__file__).parents[3] / "shared" / "data"
needs_data = pytest.mark.skipif(not SHARED.is_dir(), reason="needs the data sets")

ENGLISH = [f"A man number {n} sees a dog." for n in range(23)]
GERMAN = [f"Ein Mann Nummer {n} sieht einen Hund, der schläft." for n in range(23)]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.bpe(ENGLISH + GERMAN, 331)


@pytest.fixture
def two(tmp_path: Path) -> tuple[Path, Path]:
    return _write(tmp_path / "a.en", ENGLISH), _write(tmp_path / "a.de", GERMAN)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def _write(path: Path, lines: list[str] | list[bytes], end: bytes = b"\n") -> Path:
    coded = [line if isinstance(line, bytes) else line.encode() for line in lines]
    path.write_bytes(b"".join(line + end for line in coded))
    return path


def _zstd(data: bytes) -> bytes:
    return pytest.importorskip("zstandard").ZstdCompressor().compress(data)


def _stores(cache: Path) -> list[Path]:
    return [path for path in cache.iterdir() if not path.name.startswith(".")]


# Files


@pytest.mark.parametrize(
    "squeeze", [bytes, gzip.compress, lzma.compress, bz2.compress, _zstd], ids=lambda f: f.__name__
)
def test_however_compressed(squeeze, two: tuple[Path, Path]) -> None:  # type: ignore[no-untyped-def]
    for path in two:
        data = path.read_bytes()
        # In two parts, as `cat a.gz b.gz` gives; and under a name that says nothing.
        path.write_bytes(squeeze(data[:101]) + squeeze(data[101:]))
    pairs = Pairs(*two)
    assert list(pairs) == list(zip(ENGLISH, GERMAN))
    assert not pairs.problems


@pytest.mark.parametrize(
    "squeeze", [bytes, gzip.compress, lzma.compress, bz2.compress, _zstd], ids=lambda f: f.__name__
)
@pytest.mark.parametrize("end", ["\n", ""])
def test_lines_are_counted_before_they_are_read(squeeze, end: str, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    source, target, other = (tmp_path / name for name in ("source", "target", "other"))
    rows = [f"{n}" for n in range(40_009)]
    rows[7] = "long" * 2**19  # counts as one line, though none is read that is so long
    source.write_bytes(squeeze(("\n".join(rows) + end).encode()))
    target.write_bytes(squeeze(("\r".join([*rows[:7], "short", *rows[8:]])).encode()))
    other.write_bytes(squeeze(("\n".join(rows[:-1]) + end).encode()))
    Pairs([source, target], [target, source]).check_lines()
    wrong = r"40,009 lines in .*target but 40,008 lines in .*other: line n belongs to line n"
    with pytest.raises(ValueError, match=wrong):
        Pairs([source, target], [source, other]).check_lines()
    with pytest.raises(ValueError, match=wrong):
        list(Pairs(target, other))


@pytest.mark.parametrize(
    "squeeze", [gzip.compress, lzma.compress, bz2.compress, _zstd], ids=lambda f: f.__name__
)
def test_a_file_without_its_end(squeeze, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    noise = np.random.default_rng(0).bytes(2**18).hex()
    lines = re.findall(".{1,97}", noise)
    path = tmp_path / "half"
    path.write_bytes(squeeze("\n".join(lines).encode())[:-5])
    with pytest.raises(ValueError, match=r"half is damaged after line [\d,]+ \(.+\); fetch it"):
        list(Lines(path))


def test_garbage_that_looks_compressed(tmp_path: Path) -> None:
    for name, start in (("z", b"\x28\xb5\x2f\xfd"), ("g", b"\x1f\x8b\x08"), ("x", b"\xfd7zXZ\0")):
        (tmp_path / name).write_bytes(start + b"garbage" * 9)
        with pytest.raises(ValueError, match="is damaged after line 0"):
            list(Lines(tmp_path / name))


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_ends_of_lines(end: bytes, tmp_path: Path) -> None:
    # Only a newline ends a line, whatever Unicode says of U+2028.
    path = _write(tmp_path / "t", ["\ufeffone", " two\u2028three ", "four"], end)
    assert list(Lines(path)) == [("one",), ("two\u2028three",), ("four",)]
    path.write_bytes(path.read_bytes().removesuffix(end))
    assert list(Lines(path))[-1] == ("four",)


def test_several_files(two: tuple[Path, Path]) -> None:
    once = list(zip(ENGLISH, GERMAN))
    assert list(Pairs([two[0]] * 2, [two[1]] * 2)) == once * 2
    assert [line for (line,) in Lines(*two)] == ENGLISH + GERMAN


def test_tables(tmp_path: Path) -> None:
    path = _write(tmp_path / "t.tsv", ["1\tone\teins", "2\ttwo", "3\tthree\tdrei\tmore"])
    table = Table(path, columns=(2, 1))
    assert list(table) == [("eins", "one"), ("drei", "three")]
    assert str(table.problems) == "1 × too few columns: line 2 of t.tsv has 2: '2\\ttwo'"
    assert list(Table(path, columns=(0,))) == [("1",), ("2",), ("3",)]


def test_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["One.", "Two.", "", "  ", "Three.\x0c", "", b"Fo\xffur.", "", "Fi\x00ve.", "", "Six."]
    path = _write(tmp_path / "d.txt", lines)
    documents = Documents(path, path)
    assert list(documents) == [("One.\nTwo.",), ("Three.\x0c",), ("Six.",)] * 2
    assert documents.problems.counts == {"undecodable": 2, "control": 2}
    assert "line 7 of d.txt, byte 25 (0xFF)" in documents.problems.examples["undecodable"][0]
    # Chunks end between documents, so their size does not matter.
    monkeypatch.setattr(reading, "_LINES", 1)
    assert list(documents) == [("One.\nTwo.",), ("Three.\x0c",), ("Six.",)] * 2
    monkeypatch.setattr(reading, "DOCUMENT", 1)
    assert list(Documents(path))[:2] == [("One.",), ("Two.",)]


@pytest.mark.parametrize("lines", [1, 2, 3, 5, 4096])
def test_chunks_do_not_matter(
    lines: int, two: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "_LINES", lines)
    assert list(Pairs(*two)) == list(zip(ENGLISH, GERMAN))
    two[0].write_bytes(two[0].read_bytes() + b"\xff\nmore\n")
    counts = "25 lines in {} but 23 lines in {}".format(*two)
    with pytest.raises(ValueError, match=re.escape(counts)):
        list(Pairs(*two))


# What is wrong


def test_bad_lines_are_counted_and_shown(tmp_path: Path, tokenizer: Tokenizer, cache: Path) -> None:
    good = ("A man sees a dog.", "Ein Mann sieht einen Hund.")
    rows: list[tuple[str | bytes, str | bytes]] = [
        good,
        ("", "Ein Mann"),
        ("A dog", b"Ein H\xfcnd"),
        ("A\x07dog", "Ein Hund"),
        ("A\u200bdog\t!", "Ein\u00a0Hund"),  # unusual, but not wrong
        ("dog " * 50, "Hund"),
        ("dog " * 101, "Hund " * 101),
        (b"x" * (LINE + 7), "Ein Hund"),
        good,
        (" \t ", ""),
    ]
    a = _write(tmp_path / "a", [row[0] for row in rows])
    b = _write(tmp_path / "b", [row[1] for row in rows])
    rules = Rules(longest=100, ratio=9)
    made = store(Pairs(a, b), tokenizer, cache=cache, rules=rules)
    assert len(made) == 3
    assert [tokenizer.decode(side) for side in made.pair(2)] == list(good)
    assert tokenizer.decode(made.pair(1)[1]) == "Ein\u00a0Hund"
    problems = made.problems
    assert problems.counts == {"empty": 2, "undecodable": 1, "control": 1, "long": 2, "ratio": 1}
    assert problems.total == 7
    assert problems.examples["empty"] == ["line 2 of a beside 'Ein Mann'", "line 10 of a"]
    offset = b.read_bytes().index(b"\xfc")
    (shown,) = problems.examples["undecodable"]
    assert shown == f"line 3 of b, byte {offset} (0xFC): 'Ein H\\udcfcnd'"
    assert problems.examples["control"] == ["line 4 of a has U+0007: 'A\\x07dog'"]
    assert problems.examples["long"][0].startswith("line 8 of a has 1,048,584 bytes")
    assert problems.examples["long"][1].startswith("line 7 of a (101 and 101 tokens)")
    assert "line 6 of a (50 and" in problems.examples["ratio"][0]
    # They are known when the store is found again, too.
    assert store(Pairs(a, b), tokenizer, cache=cache, rules=rules).problems == problems
    for _ in range(2):
        with pytest.raises(ValueError, match=r"2 × an empty side: line 2 .*--on-bad skip"):
            store(Pairs(a, b), tokenizer, cache=cache, rules=rules, on_bad="refuse")


def test_refusing_leaves_nothing(two: tuple[Path, Path], tokenizer: Tokenizer, cache: Path) -> None:
    two[0].write_bytes(b"\n" + two[0].read_bytes().split(b"\n", 1)[1])
    with pytest.raises(ValueError, match=r"1 × an empty side: line 1 of a.en beside"):
        store(Pairs(*two), tokenizer, cache=cache, on_bad="refuse")
    assert _stores(cache) == []


def test_many_problems_have_three_examples() -> None:
    problems, others = Problems(), Problems()
    for n in range(5):
        problems.add("empty", f"line {n}")
        others.add("empty", f"line {n + 5}")
        others.add("long", "x")
    problems.merge(others)
    assert problems.counts == {"empty": 10, "long": 5}
    assert problems.lines()[0] == "10 × an empty side: line 0; line 1; line 2; …"


def test_ratio_forgives_short_sides(tmp_path: Path, tokenizer: Tokenizer, cache: Path) -> None:
    a = _write(tmp_path / "a", ["dog " * n for n in (45, 46)])
    b = _write(tmp_path / "b", ["dog", "dog"])
    assert len(store(Pairs(a, b), tokenizer, cache=cache)) == 1
    assert len(store(Pairs(a, b), tokenizer, cache=cache, rules=Rules(ratio=None))) == 2


@pytest.mark.usefixtures("unchecked")
def test_errors(two: tuple[Path, Path], tokenizer: Tokenizer, tmp_path: Path, cache: Path) -> None:
    def refused(match: str, make: object, *args: object, **more: object) -> None:
        def read() -> None:
            made = make(*args, **more)  # type: ignore[operator]
            list(made) if isinstance(made, Text) else None

        with pytest.raises(ValueError, match=match) as error:
            read()
        assert "\n" not in str(error.value)

    pairs = Pairs(*two)
    refused("x.en does not exist", Pairs, tmp_path / "x.en", two[1])
    refused("is a folder; name a file", Lines, tmp_path)
    refused("there is no file to read", Lines)
    refused(r"source files \(2\) and target files \(1\)", Pairs, [two[0]] * 2, two[1])
    refused(r"columns \(\(-1,\)\) must be", Table, two[0], columns=(-1,))
    refused(r"ratio \(0.5\) must be 1 or more", Rules, ratio=0.5)
    refused(r"longest \(0\) must be 1 or more", Rules, longest=0)
    refused(r"on_bad \('stop'\) must be skip or refuse", store, pairs, tokenizer, on_bad="stop")
    refused(r"tokenizers \(3\) must be one", store, pairs, [tokenizer] * 3, cache=cache)
    refused(r"workers \(-1\) must be 0", store, pairs, tokenizer, cache=cache, workers=-1)
    refused("is a file; name a folder for the cache", store, pairs, tokenizer, cache=two[0])
    utf16 = tmp_path / "wide"
    utf16.write_text("one\n", encoding="utf-16")
    refused("is UTF-16; convert it", Lines, utf16)
    empty = _write(tmp_path / "empty", [])
    refused("there is no text in .*empty", store, Lines(empty), tokenizer, cache=cache)
    assert _stores(cache) == []
    one = store(Lines(two[0]), tokenizer, cache=cache)
    refused(r"have sides \(1\), not 2", one.pair, 0)
    refused("is no store", Store, tmp_path)
    with pytest.raises(IndexError):
        one.tokens(23)


# The store


def test_a_store_has_the_tokens(two: tuple[Path, Path], tokenizer: Tokenizer, cache: Path) -> None:
    letters = Tokenizer.characters(GERMAN)
    made = store(Pairs(*two), (tokenizer, letters), cache=cache)
    assert len(made) == 23
    assert made.sides == 2
    for n in range(23):
        source, target = made.pair(n)
        assert source.tolist() == tokenizer.encode(ENGLISH[n])
        assert target.tolist() == letters.encode(GERMAN[n])
        assert made.lengths[n].tolist() == [len(source), len(target)]
        assert source.dtype == np.uint16
        assert source.base is not None
    assert not made.problems
    assert repr(made).startswith("Store(23 examples, 2 sides")


def test_many_tokens_need_more_bytes(tmp_path: Path, cache: Path) -> None:
    names = ["<pad>", "<s>", "</s>", "<unk>", *(f"w{n}" for n in range(70_000))]
    model = models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>")
    inner = tokenizers.Tokenizer(model)
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    wide = Tokenizer(inner, pad=0, start=1, end=2, unknown=3)
    made = store(Lines(_write(tmp_path / "t", ["w69999 w3"])), wide, cache=cache)
    assert made.tokens(0).tolist() == [70_003, 7]
    assert made.tokens(0).dtype == np.uint32


def test_documents_may_be_long(tmp_path: Path, tokenizer: Tokenizer, cache: Path) -> None:
    path = _write(tmp_path / "d", ["A man sees a dog."] * 501)
    made = store(Documents(path), tokenizer, cache=cache)
    assert made.lengths.shape == (1, 1)
    assert tokenizer.decode(made.tokens(0)) == "\n".join(["A man sees a dog."] * 501)


def test_workers_do_not_matter(
    two: tuple[Path, Path], tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "_LINES", 2)
    two[0].write_bytes(two[0].read_bytes().replace(b"number 7", b"\x00"))
    told: list[tuple[int, int, int]] = []
    made = [
        store(
            Pairs(*two),
            tokenizer,
            cache=tmp_path / str(workers),
            workers=workers,
            progress=lambda *figures: told.append(figures),
        )
        for workers in (0, 3)
    ]
    assert made[0].header == made[1].header
    assert made[0].problems.counts == {"control": 1}
    total = sum(path.stat().st_size for path in two)
    assert len(told) == 26
    assert told[25] == told[12] == (total, total, 22)
    assert told[:13] == sorted(told[:13])


def test_found_again_by_content(
    two: tuple[Path, Path], tokenizer: Tokenizer, cache: Path, tmp_path: Path
) -> None:
    made = store(Pairs(*two), tokenizer, cache=cache)

    def again(*paths: Path, **more: object) -> bool:
        return store(Pairs(*paths), **{"tokenizers": tokenizer, "cache": cache, **more}).folder == (  # type: ignore[arg-type]
            made.folder
        )

    inode = (made.folder / "lengths").stat().st_ino
    os.utime(two[0])
    assert again(*two)
    moved = two[0].rename(tmp_path / "b.en")
    assert again(moved, two[1])
    assert (made.folder / "lengths").stat().st_ino == inode
    assert not again(moved, two[1], rules=Rules(longest=99))
    assert not again(moved, two[1], tokenizers=Tokenizer.characters(GERMAN))
    assert not again(two[1], moved)
    moved.write_bytes(moved.read_bytes().replace(b"22", b"33"))  # of the same size
    assert not again(moved, two[1])
    assert len(_stores(cache)) == 5


def test_a_damaged_store_is_made_again(
    two: tuple[Path, Path], tokenizer: Tokenizer, cache: Path
) -> None:
    made = store(Pairs(*two), tokenizer, cache=cache)
    Store(made.folder, verify=True)
    tokens = made.folder / "tokens.0"
    data = tokens.read_bytes()
    tokens.write_bytes(data[:-1] + b"\x01")
    with pytest.raises(ValueError, match=r"tokens.0 has changed since"):
        Store(made.folder, verify=True)
    store(Pairs(*two), tokenizer, cache=cache)  # of the same size, but it is noticed
    assert tokens.read_bytes() == data
    tokens.write_bytes(data[:-1])
    with pytest.raises(ValueError, match=r"tokens.0 has \d+ bytes instead of \d+"):
        Store(made.folder)
    assert store(Pairs(*two), tokenizer, cache=cache).folder == made.folder
    assert tokens.read_bytes() == data
    (made.folder / "header.json").write_text("{}")
    store(Pairs(*two), tokenizer, cache=cache)
    Store(made.folder, verify=True)


def test_a_full_disk(
    two: tuple[Path, Path], tokenizer: Tokenizer, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(text.Draft, "write", full)
        with pytest.raises(ValueError, match="No space left on device"):
            store(Pairs(*two), tokenizer, cache=cache)
    assert [path for path in cache.iterdir() if path.is_dir()] == []
    assert len(store(Pairs(*two), tokenizer, cache=cache)) == 23


def test_the_default_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert text.default_cache() == tmp_path / "regard"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert text.default_cache() == Path.home() / ".cache" / "regard"


# Several processes

MAKE = """
import sys, time
from regard.data import text
from regard.data.tokenizer import Tokenizer

write = text.Draft.write

def slowly(self, name, values):
    write(self, name, values)
    if name == "lengths":
        print("writing", flush=True)
        time.sleep(float(sys.argv[5]))

text.Draft.write = slowly
pairs, tokenizer = text.Pairs(*sys.argv[2:4]), Tokenizer.read(sys.argv[1])
made = text.store(pairs, tokenizer, cache=sys.argv[4], workers=int(sys.argv[6]))
print(len(made))
"""


def _start(
    tokenizer: Tokenizer, two: tuple[Path, Path], cache: Path, sleep: float, workers: int = 0
) -> subprocess.Popen[str]:
    path = two[0].with_name("tokenizer.json")
    path.write_bytes(tokenizer.to_bytes())
    words = [str(path), *map(str, two), str(cache), str(sleep), str(workers)]
    return subprocess.Popen([sys.executable, "-c", MAKE, *words], stdout=subprocess.PIPE, text=True)


def test_killed_half_way(two: tuple[Path, Path], tokenizer: Tokenizer, cache: Path) -> None:
    with _start(tokenizer, two, cache, HANG, workers=2) as maker:
        assert maker.stdout is not None
        assert maker.stdout.readline() == "writing\n"
        workers = children(maker.pid)
        maker.kill()
    assert len(workers) == 1  # one task needs one worker
    (draft,) = [path for path in cache.iterdir() if path.is_dir()]
    # Even a store of other texts clears it away.
    store(Lines(two[0]), tokenizer, cache=cache)
    assert not draft.exists()
    assert len(store(Pairs(*two), tokenizer, cache=cache)) == 23
    # Its workers go with it.
    wait_until(lambda: not any(map(lives, workers)))


def test_two_at_once_make_one(two: tuple[Path, Path], tokenizer: Tokenizer, cache: Path) -> None:
    makers = [_start(tokenizer, two, cache, 0.5) for _ in range(2)]
    said = sorted(maker.communicate(timeout=HANG)[0] for maker in makers)
    assert said == ["23\n", "writing\n23\n"]


def test_interrupted(two: tuple[Path, Path], tokenizer: Tokenizer, cache: Path) -> None:
    with _start(tokenizer, two, cache, HANG, workers=2) as maker:
        assert maker.stdout is not None
        maker.stdout.readline()
        workers = children(maker.pid)
        maker.send_signal(signal.SIGINT)
        assert maker.wait(HANG) != 0
    assert not any(map(lives, workers))
    assert [path for path in cache.iterdir() if path.is_dir()] == []


# Real text


@needs_data
def test_multi30k(tmp_path: Path) -> None:
    pairs = Pairs(*(SHARED / "multi30k" / f"val.{side}.gz" for side in ("en", "de")))
    tokenizer = Tokenizer.bpe((side for pair in pairs for side in pair), 1999)
    made = store(pairs, tokenizer, cache=tmp_path, on_bad="refuse")
    assert len(made) == 1014
    back = [tuple(tokenizer.decode(side) for side in made.pair(n)) for n in range(len(made))]
    assert back == list(pairs)


@needs_data
@pytest.mark.slow
def test_tatoeba(tmp_path: Path) -> None:
    table = Table(SHARED / "tatoeba" / "deu-eng.txt.xz")
    count = sum(1 for _ in table)
    assert count == 169_197
    assert not table.problems
