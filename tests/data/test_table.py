"""Tables of every format give the same rows, by position or by name, with tags or without."""

import csv
import gzip
import json
from pathlib import Path

import pytest

from regard.data.table import Column, Table, tagged, tags_of
from regard.data.text import store
from regard.data.tokenizer import Tokenizer

parquet = pytest.importorskip("pyarrow.parquet")
pyarrow = pytest.importorskip("pyarrow")

ROWS = [("one dog", "ein Hund", "de"), ("two dogs", "deux chiens", "fr"), ("three", "drei", "de")]
NAMES = ("en", "out", "lang")


def written(folder: Path, kind: str) -> Path:
    path = folder / f"table.{kind}"
    match kind:
        case "tsv" | "csv":
            sign = "\t" if kind == "tsv" else ","
            path.write_text("".join(sign.join(row) + "\n" for row in (NAMES, *ROWS)))
        case "jsonl":
            path.write_text("".join(json.dumps(dict(zip(NAMES, row))) + "\n" for row in ROWS))
        case "jsonl.gz":
            lines = "".join(json.dumps(dict(zip(NAMES, row))) + "\n" for row in ROWS)
            path.write_bytes(gzip.compress(lines.encode()))
        case "parquet":
            columns = {name: [row[n] for row in ROWS] for n, name in enumerate(NAMES)}
            parquet.write_table(pyarrow.table(columns), path)
    return path


KINDS = ["tsv", "csv", "jsonl", "jsonl.gz", "parquet"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("columns", [("en", "out"), ("out", "en"), (0, "out")])
def test_columns_by_name(tmp_path: Path, kind: str, columns: tuple[Column, Column]) -> None:
    path = written(tmp_path, kind)
    table = Table(path, columns=columns, separator="comma" if kind == "csv" else "tab")
    places = [NAMES.index(one) if isinstance(one, str) else one for one in columns]
    assert list(table) == [tuple(row[n] for n in places) for row in ROWS]
    assert table.problems.total == 0


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_columns_by_position(tmp_path: Path, kind: str) -> None:
    assert list(Table(written(tmp_path, kind), columns=(2, 0))) == [
        (lang, source) for source, _, lang in ROWS
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_tags_stand_before_the_source(tmp_path: Path, kind: str) -> None:
    table = Table(
        written(tmp_path, kind),
        columns=("en", "out"),
        tags=("lang",),
        separator="comma" if kind == "csv" else "tab",
    )
    found = list(table)
    assert found == [(f"<{lang}> {source}", target) for source, target, lang in ROWS]
    assert [tags_of(source) for source, _ in found] == [("de",), ("fr",), ("de",)]


@pytest.mark.parametrize("kind", KINDS)
def test_every_format_can_be_stored(tmp_path: Path, kind: str) -> None:
    """The store hashes files, reads them in chunks, and is found again."""
    tokenizer = Tokenizer.characters([text for row in ROWS for text in row])
    table = Table(
        written(tmp_path, kind),
        columns=("en", "out"),
        separator="comma" if kind == "csv" else "tab",
    )
    made = store(table, tokenizer, cache=tmp_path / "cache")
    assert [tokenizer.decode(made.tokens(n, 1).tolist()) for n in range(3)] == [
        target for _, target, _ in ROWS
    ]
    assert made.header["inputs"][0]["sha256"] is not None
    assert store(table, tokenizer, cache=tmp_path / "cache").folder == made.folder


def write_csv(path: Path, rows: list[tuple[str, ...]], sign: str = ",") -> Path:
    with path.open("w", encoding="utf-8-sig", newline="") as file:
        csv.writer(file, delimiter=sign).writerows(rows)
    return path


@pytest.mark.parametrize("sign", [",", ";"])
@pytest.mark.parametrize("columns", [("en", "de"), (0, 1)])
def test_csv_is_read_by_its_name(tmp_path: Path, sign: str, columns: tuple[Column, Column]) -> None:
    """With a byte-order mark and a header, as Excel writes it."""
    path = write_csv(tmp_path / "table.CSV", [("en", "de", "lang"), *ROWS], sign)
    table = Table(path, columns=columns)
    assert list(table) == [row[:2] for row in ROWS]
    assert table.problems.counts == ({} if columns[0] == "en" else {"header": 1})


def test_cells_with_line_breaks_and_separators(tmp_path: Path) -> None:
    rows = [(f'a, "{n}"\nb\r\n\nc' if n % 3 else f"a {n}", f'5" {n}, é') for n in range(9000)]
    path = write_csv(tmp_path / "table.csv", [NAMES[:2], *rows, ("alone",), ("", "empty")])
    table = Table(path, columns=("en", "out"))
    numbered = list(table.numbered())
    assert [row for _, row in numbered] == [
        (a.replace("\n", " ").replace("\r", "").replace("  ", " "), b) for a, b in rows
    ]
    physical = path.read_bytes().split(b"\n")
    for number, (_, target) in numbered[::100]:
        row = b"\n".join(physical[number - 1 : number + 3]).decode()
        assert target.replace('"', '""') in row
    assert table.problems.counts == {"columns": 1, "empty": 1}
    assert f"line {len(physical) - 2:,} of table.csv has 1: 'alone'" in str(table.problems)


def test_quotes_within_a_cell_are_text(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text('the 5" disk,b\na,the "b" side\n', encoding="utf-8")
    assert list(Table(path)) == [('the 5" disk', "b"), ("a", 'the "b" side')]


@pytest.mark.parametrize(
    ("header", "columns"),
    [
        ("English\tGerman\tid", (0, 1)),
        ("source_text\tout\tn", (0, 1)),
        ("Quelltext\tZieltext\tNr", (0, 1)),
        ("\tlabel\tid", (1, 2)),
    ],
)
def test_a_header_is_left_out_of_columns_by_number(
    tmp_path: Path, header: str, columns: tuple[int, int]
) -> None:
    rows = [(f"A dog {n} runs.", f"Ein Hund {n} rennt.", str(n)) for n in range(20)]
    path = tmp_path / "table.tsv"
    path.write_text("\n".join([header, *map("\t".join, rows)]), encoding="utf-8")
    table = Table(path, columns=columns)
    assert list(table) == [tuple(row[n] for n in columns) for row in rows]
    assert table.problems.lines() == [
        f"1 × a first line that names the columns: line 1 of table.tsv: {header.strip()!r}"
    ]


@pytest.mark.parametrize(
    "rows",
    [
        [("Hello", "Hallo"), ("A dog runs.", "Ein Hund rennt."), ("Two dogs.", "Zwei Hunde.")],
        [("pos", "great stuff"), ("neg", "no good"), ("pos", "I like it")],
        [("dog", "Hund"), ("cat", "Katze"), ("hello", "hallo")],
        [("label", "a text"), ("pos", "great"), ("label", "text")],
        [("1", "one"), ("2", "two")],
        [("short", "ab"), ("long", "ab cd efg hij")],
        [("Go.", "Va !"), ("Run now.", "Cours !")],
    ],
)
def test_a_first_example_is_no_header(tmp_path: Path, rows: list[tuple[str, str]]) -> None:
    path = tmp_path / "table.tsv"
    path.write_text("\n".join(map("\t".join, rows)), encoding="utf-8")
    assert list(Table(path)) == rows


def test_a_header_of_unusual_names_above_labels(tmp_path: Path) -> None:
    rows = [(f"Ein Film {n}.", "gut" if n % 2 else "schlecht") for n in range(20)]
    path = write_csv(tmp_path / "table.csv", [("Rezension", "Stimmung"), *rows], ";")
    assert list(Table(path)) == rows
    assert list(Table(write_csv(path, [("Schade", "schlecht"), *rows]))) == [
        ("Schade", "schlecht"),
        *rows,
    ]


def test_names_that_stand_between_other_separators(tmp_path: Path) -> None:
    path = tmp_path / "table.txt"
    path.write_text("en,de\na,b\n")
    with pytest.raises(ValueError, match=r"no column 'en'.*; add --separator comma"):
        Table(path, columns=("en", "de"))


def test_what_json_may_hold(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(
        "\n".join(
            [
                json.dumps({"translation": {"en": "a\nb", "de": "c"}, "n": 3}),
                json.dumps({"translation": {"en": "no German"}}),
                "not JSON",
                json.dumps(["a", "list"]),
                "",
                json.dumps({"translation": {"en": "d", "de": 5}}),
            ]
        )
    )
    table = Table(path, columns=("translation.en", "translation.de"))
    assert list(table) == [("a b", "c"), ("d", "5")]
    assert table.problems.counts == {"columns": 2, "json": 1, "empty": 1}
    assert list(Table(path, columns=(0, 1)))[:1] == [("a", "list")]


def test_names_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no column 'de'; its first line names en, out, lang"):
        Table(written(tmp_path, "tsv"), columns=("en", "de"))
    with pytest.raises(ValueError, match=r"--pairs .* has no column 'de'; it has en, out, lang"):
        list(Table(written(tmp_path, "parquet"), columns=("en", "de"), flag="--pairs"))
    with pytest.raises(ValueError, match=r"has 3 columns, of which the first is 0, and 7 is"):
        list(Table(written(tmp_path, "parquet"), columns=(0, 7)))


def test_a_damaged_parquet_file_is_said_to_be_one(tmp_path: Path) -> None:
    path = written(tmp_path, "parquet")
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"table\.parquet is damaged after row 0"):
        list(Table(path))


def test_tags_as_text() -> None:
    assert tagged(" a dog ", ("de", "", "very formal")) == "<de> <very_formal> a dog"
    assert tags_of("<de> <very_formal> a <dog>") == ("de", "very_formal")
    assert tags_of("no <tag> here") == ()


def test_deeply_nested_json_is_a_bad_line(tmp_path: Path) -> None:
    path = written(tmp_path, "jsonl")
    path.write_text(path.read_text() + "[" * 100_000 + "\n")
    table = Table(path, columns=(0, 1))
    assert len(list(table)) == len(ROWS)
    assert table.problems.counts == {"json": 1}
