"""Configs and JSON: what goes out comes back equal, and every fault is one line with its place."""

import dataclasses
import json
import math
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regard.config import LARGEST_YAML, differences, dumps, from_json, loads, plain, read, to_json

pytestmark = pytest.mark.usefixtures("unchecked")


@dataclass(frozen=True)
class Sines:
    kind: Literal["sines"] = "sines"
    base: float = 10000.0


@dataclass(frozen=True)
class Table:
    length: int
    kind: Literal["table"] = "table"


@dataclass(frozen=True)
class Block:
    heads: int = 4
    norm: Literal["pre", "post"] = "pre"

    def __post_init__(self) -> None:
        if self.heads < 1:
            raise ValueError(f"heads ({self.heads}) must be 1 or more")


@dataclass(frozen=True)
class Config:
    width: int
    dropout: float = 0.1
    tied: bool = True
    name: str = ""
    size: tuple[int, int] = (3, 5)
    layers: tuple[int, ...] = ()
    block: Block = field(default_factory=Block)
    blocks: tuple[Block, ...] = ()
    position: Sines | Table | None = None
    image: int | tuple[int, int] = 7
    share: bool | Literal["some"] = True
    rate: float | int = 1.0
    limit: int | None = None
    extra: dict[str, Block] = field(default_factory=dict)
    task: dict[str, object] = field(default_factory=dict)
    seen: int = field(default=0, init=False)


finite = st.floats(allow_nan=False, allow_infinity=False)
integers = st.integers(-(2**63), 2**63 - 1)
blocks = st.builds(Block, heads=st.integers(1, 2**63 - 1), norm=st.sampled_from(["pre", "post"]))
json_values = st.recursive(
    st.none() | st.booleans() | integers | finite | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)
configs = st.builds(
    Config,
    width=integers,
    dropout=finite,
    tied=st.booleans(),
    name=st.text(),
    size=st.tuples(integers, integers),
    layers=st.lists(integers).map(tuple),
    block=blocks,
    blocks=st.lists(blocks, max_size=3).map(tuple),
    position=st.none() | st.builds(Sines, base=finite) | st.builds(Table, length=integers),
    image=integers | st.tuples(integers, integers),
    share=st.booleans() | st.just("some"),
    rate=finite | integers,
    limit=st.none() | integers,
    extra=st.dictionaries(st.text(), blocks, max_size=3),
    task=st.dictionaries(st.text(), json_values, max_size=3),
)


@given(configs)
def test_round_trip(config: Config) -> None:
    data = loads(dumps(to_json(config)), "config.json")
    back = from_json(Config, data)
    assert back == config
    # Equal is not the same: 1 == 1.0 == True, and a list is not a tuple.
    assert repr(back) == repr(config)


@given(json_values)
def test_any_json_is_read_or_refused_in_one_line(data: Any) -> None:
    fault = None
    try:
        from_json(Config, data)
    except ValueError as error:
        fault = str(error)
    assert fault is None or re.fullmatch(r"config\.json[^\n]+", fault)


def test_defaults_stand_in() -> None:
    assert from_json(Config, {"width": 11}) == Config(11)
    assert from_json(Config, {"width": 11, "position": {"kind": "table", "length": 2}}) == Config(
        11, position=Table(2)
    )


def test_an_int_will_do_for_a_float() -> None:
    back = from_json(Config, {"width": 3, "dropout": 0, "rate": 2})
    assert type(back.dropout) is float
    assert type(back.rate) is int


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"width": "8"}, 'config.json: model.width ("8") must be an int'),
        ({"width": True}, "config.json: model.width (true) must be an int"),
        ({"width": 8.0}, "config.json: model.width (8.0) must be an int"),
        ({"width": None}, "config.json: model.width (null) must be an int"),
        ({"dropout": True}, "config.json: model.dropout (true) must be a number"),
        ({"dropout": 10**400}, "model.dropout (1000"),
        ({"tied": 1}, "config.json: model.tied (1) must be true or false"),
        ({"name": 3}, "config.json: model.name (3) must be a string"),
        ({"size": [1, 2, 3]}, "config.json: model.size ([1, 2, 3]) must have 2 items"),
        ({"size": [1, "2"]}, 'config.json: model.size[1] ("2") must be an int'),
        ({"size": 7}, "config.json: model.size (7) must be a list"),
        ({"layers": [1, 2, 0.5]}, "config.json: model.layers[2] (0.5) must be an int"),
        ({"block": 4}, "config.json: model.block (4) must be an object"),
        ({"block": {"norm": "per"}}, 'model.block.norm ("per") must be "pre" or "post"'),
        ({"block": {"heads": 0}}, "config.json: model.block: heads (0) must be 1 or more"),
        ({"blocks": [{}, {"heads": []}]}, "config.json: model.blocks[1].heads ([]) must be an int"),
        ({"limit": "8"}, 'config.json: model.limit ("8") must be an int or null'),
        ({"image": "8"}, 'config.json: model.image ("8") must be an int or a list'),
        ({"image": [1, None]}, "config.json: model.image[1] (null) must be an int"),
        ({"share": 1}, 'config.json: model.share (1) must be true or false or "some"'),
        ({"position": 3}, "model.position (3) must be an object or null"),
        ({"position": {}}, 'model.position.kind is missing; it must be "sines" or "table"'),
        (
            {"position": {"kind": "tabel"}},
            'position.kind ("tabel") must be "sines" or "table"; did you mean "table"?',
        ),
        ({"position": {"kind": []}}, 'position.kind ([]) must be "sines" or "table"'),
        ({"position": {"kind": "table"}}, 'config.json: model.position lacks "length"'),
        ({"extra": {"a": {"heads": "x"}}}, 'model.extra.a.heads ("x") must be an int'),
        ({"extra": []}, "config.json: model.extra ([]) must be an object"),
        ({"widht": 3}, 'config.json: model has the unknown key "widht"; did you mean "width"?'),
        ({"a": 1, "b": 2}, 'config.json: model has the unknown keys "a", "b"; known: width, dr'),
        ({"seen": 1}, 'config.json: model has the unknown key "seen"'),
        ({"position": {"kind": "sines", "bas": 1}}, 'unknown key "bas"; did you mean "base"?'),
    ],
)
def test_faults_name_their_place(data: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)) as fault:
        from_json(Config, {"width": 8, **data}, at="model")
    assert "\n" not in str(fault.value)


def test_what_is_missing() -> None:
    with pytest.raises(ValueError, match=r'^run\.json: model lacks "width"'):
        from_json(Config, {}, "run.json", "model")
    with pytest.raises(ValueError, match=r"^config.json \(\[\]\) must be an object"):
        from_json(Config, [])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"dropout": math.nan}, "Config: dropout (NaN) must be a finite number"),
        ({"dropout": math.inf}, "Config: dropout (Infinity) must be a finite number"),
        ({"width": 3.0}, "Config: width (3.0) must be an int"),
        ({"width": object}, "Config: width (<class 'object'>) is a type, which JSON lacks"),
        ({"layers": [1, 2]}, "Config: layers ([1, 2]) would come back from JSON as (1, 2)"),
        ({"name": "\ud800"}, "is not UTF-8; rename a file"),
        ({"task": {"a": {1: 2}}}, "Config: task.a has the key 1; keys in JSON are strings"),
    ],
)
def test_what_would_not_come_back_does_not_go_out(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        to_json(dataclasses.replace(Config(3), **change))


def test_a_subclass_would_come_back_as_its_base() -> None:
    @dataclass(frozen=True)
    class Own(Block):
        pass

    with pytest.raises(ValueError, match=r"^Config: block .* would come back"):
        to_json(Config(3, block=Own()))


def test_only_dataclasses_are_configs() -> None:
    for value in ({"width": 3}, Config):
        with pytest.raises(ValueError, match="must be a dataclass's instance"):
            to_json(value)


def test_a_union_that_cannot_be_told_apart_is_a_programming_error() -> None:
    @dataclass(frozen=True)
    class Own:
        part: Block | Config | None = None

    Own.__annotations__["part"] = Block | Config | None
    with pytest.raises(TypeError, match="Block is in a union and needs kind"):
        from_json(Own, {"part": {}})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"", "Expecting value"),
        (b'{"a": 1', "delimiter: line 1 column"),
        (b'{"a": NaN}', "NaN is not a finite number"),
        (b'{"a": -Infinity}', "-Infinity is not a finite number"),
        (b'{"a": 1e999}', "1e999 is not a finite number"),
        (b'{"a": 1, "b": 2, "a": 3}', 'the key "a" occurs twice'),
        (b"\xff\xfe{}", "codec can't decode"),
        (b"[" * 200_000, "nested too deeply"),
        (b"[" * 60 + b"]" * 60, "nested too deeply"),
        (b'{"a": 9223372036854775808}', "9223372036854775808 does not fit into 64 bits"),
        (b'{"a": ' + b"1" * 5000 + b"}", "11111111111111111111… does not fit into 64 bits"),
    ],
)
def test_text_that_is_not_json(text: bytes, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)) as fault:
        loads(text, "config.json")
    assert re.fullmatch(r"config\.json is not JSON[^\n]+", str(fault.value))


YAML = """
width: 64           # a comment
dropout: 1e-3
compile: no
sizes: [1, .5, -2.]
first: 1990-10-03
ratio: 12:30
start:
tied: true
"""


def test_yaml_has_the_types_of_json(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(YAML, encoding="utf-8")
    assert read(path) == {
        "width": 64,
        "dropout": 0.001,
        "compile": "no",
        "sizes": [1, 0.5, -2.0],
        "first": "1990-10-03",
        "ratio": "12:30",
        "start": None,
        "tied": True,
    }


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: 1\na: 2", 'the key "a" occurs twice'),
        ("a: &x [1]\nb: *x", "aliases are not supported (line 1)"),
        ("a: !!python/name:os.system", "python/name:os.system) are not supported (line 1)"),
        ("a: !own 1", "tags (!own) are not supported"),
        ("a: 99999999999999999999", "does not fit into 64 bits"),
        ("a: 1e999", "1e999 is not a finite number"),
        ("[" * 60 + "]" * 60, "nested too deeply"),
        ("- " * 3000, "nested too deeply"),
        ("a: b: c", "mapping values are not allowed here"),
        ("a: \x00", "special characters are not allowed"),
    ],
)
def test_text_that_is_not_yaml(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "config.yml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=re.escape(said)) as fault:
        read(path)
    assert re.fullmatch(r".*config\.yml is not YAML that can be read: [^\n]+", str(fault.value))


def test_what_is_no_small_file_is_refused_before_it_is_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")  # which nobody writes to
    with (tmp_path / "huge.json").open("wb") as file:
        file.truncate(10**12)
    (tmp_path / "large.yaml").write_bytes(b"#" * (LARGEST_YAML + 1))
    for name, said in (
        ("/dev/zero", "is no ordinary file"),
        ("pipe", "is no ordinary file"),
        (".", "is a folder"),
        ("huge.json", "has 1,000,000,000,000 bytes"),
        ("large.yaml", "as JSON"),
    ):
        with pytest.raises(ValueError, match=said):
            read(tmp_path / name)


def test_numbers_beyond_64_bits_are_not_written() -> None:
    with pytest.raises(ValueError, match=r"width \(9223372036854775808\) does not fit into 64"):
        to_json(Config(2**63))


def test_text_is_for_people() -> None:
    assert dumps({"name": "für", "size": [1]}).decode() == (
        '{\n  "name": "für",\n  "size": [\n    1\n  ]\n}\n'
    )
    assert loads(b"\xef\xbb\xbf{}", "with a mark of byte order") == {}


def test_plain() -> None:
    assert plain({"a": (1, Block())}, "task") == {"a": [1, {"heads": 4, "norm": "pre"}]}


def test_differences() -> None:
    have = {"model": {"heads": 8, "width": 3, "old": 1}, "kind": "A"}
    want = {"model": {"heads": 4, "width": 3.0}, "kind": "A"}
    assert differences(have, have) == []
    assert differences(json.loads(json.dumps(have)), have) == []
    assert differences(have, want) == [
        "model.heads is 8 instead of 4",
        "model.width is 3 instead of 3.0",
        "model.old is 1 instead of absent",
    ]
