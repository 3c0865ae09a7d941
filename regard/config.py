"""Configs as JSON: a frozen dataclass goes out, an equal one comes back, every fault is named.

    to_json(config)                 an object for json, and from_json(Config, data) is the way back
    read(path)                      what a JSON or YAML file says
    opened(path)                    the file itself, if it is small enough to be a config

A config's fields are numbers, strings, `Literal`s, tuples, dictionaries with string keys, other
configs, and unions of these; configs in one union are told apart by their field
`kind: Literal["…"]`. Reading is strict, because a config that is read wrongly builds another
model: unknown and missing keys, wrong types and values outside a `Literal` are refused in one line
that names the place, such as `config.json: model.heads ("8") must be an int`.
"""

import dataclasses
import difflib
import json
import math
import os
import re
import stat
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, BinaryIO, Literal, TypeVar, Union, cast, get_args, get_origin
from typing import get_type_hints as hints

T = TypeVar("T")

Object = dict[str, Any]
"""A JSON object."""

LARGEST = 2**26
"""Bytes of a config at most; those that people and programs write have some kilobytes."""

LARGEST_YAML = 2**20
"""The same of YAML, which is read a thousand times more slowly."""

DEEPEST = 50
"""Objects within objects, at most."""


def to_json(config: object) -> Object:
    """A config as a JSON object from which `from_json` makes an equal config."""
    cls = type(config)
    if not dataclasses.is_dataclass(cls):
        raise ValueError(f"a config ({_shown(config)}) must be a dataclass's instance")
    data = cast(Object, plain(config, cls.__name__))
    # What could not be read back should fail now, not when it is wanted again.
    back = from_json(cls, data, cls.__name__)
    for field in _fields(cls):
        was, comes = getattr(config, field.name), getattr(back, field.name)
        if was != comes:
            raise ValueError(
                f"{cls.__name__}: {field.name} ({was!r}) would come back from JSON as "
                f"{comes!r}; give it a value of the annotated type"
            )
    return data


def from_json(cls: type[T], data: object, where: str = "config.json", at: str = "") -> T:
    """The config of class `cls` that a JSON object describes.

    `where` is the file and `at` the place in it, for the words of an error.
    """
    return cast(T, _read(cls, data, _Place(where, at)))


def plain(value: object, where: str, at: str = "") -> object:
    """A value as JSON has it: configs as objects, tuples as lists; what JSON lacks is refused."""
    return _plain(value, _Place(where, at))


def dumps(data: object) -> bytes:
    """JSON as a person reads it, and the same bytes for the same data."""
    return (json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()


def read(path: Path) -> object:
    """What a file says: YAML where its name ends so, and JSON otherwise."""
    with opened(path) as file:
        text = file.read()
    if path.suffix.lower() in (".yaml", ".yml"):
        if len(text) > LARGEST_YAML:
            raise ValueError(f"{path} has {len(text):,} bytes; write so large a config as JSON")
        return _loads_yaml(text, str(path))
    return loads(text, str(path))


def opened(path: Path) -> BinaryIO:
    """A small file, open. Folders, pipes and devices, some of which never end, are refused."""
    try:
        # A pipe that nobody writes to would keep an ordinary `open` waiting.
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    about = os.fstat(descriptor)
    fault = None
    if not stat.S_ISREG(about.st_mode):
        fault = "is a folder" if stat.S_ISDIR(about.st_mode) else "is no ordinary file"
    elif about.st_size > LARGEST:
        fault = f"has {about.st_size:,} bytes, and a config at most {LARGEST:,}"
    if fault is not None:
        os.close(descriptor)
        raise ValueError(f"{path} {fault}; name a config.json")
    return os.fdopen(descriptor, "rb")


def loads(text: bytes, where: str) -> object:
    """What a JSON text says; NaN, infinities and keys that occur twice are refused."""
    try:
        data = json.loads(
            text.decode("utf-8-sig"),
            parse_float=_finite,
            parse_int=_whole,
            parse_constant=_finite,
            object_pairs_hook=_unique,
        )
    except RecursionError:
        data = _TOO_DEEP
    except ValueError as error:
        raise ValueError(f"{where} is not JSON that can be read: {error}") from None
    return _shallow(data, f"{where} is not JSON")


def _loads_yaml(text: bytes, where: str) -> object:
    """What a YAML text says, with the types of YAML 1.2, which are those of JSON.

    In YAML 1.1, as most readers have it, 1e-3 is a string, `no` is false, and 12:30 is a number.
    """
    import yaml

    seen: set[int] = set()

    def value(node: Any) -> object:
        # A few lines of aliases can stand for more data than there is memory.
        if id(node) in seen or "tag:yaml.org,2002:" not in node.tag or "python" in node.tag:
            what = "aliases" if id(node) in seen else f"tags ({node.tag})"
            raise ValueError(f"{what} are not supported (line {node.start_mark.line + 1})")
        seen.add(id(node))
        match node.id:
            case "mapping":
                return _unique([(str(value(key)), value(item)) for key, item in node.value])
            case "sequence":
                return [value(item) for item in node.value]
        return node.value if node.style else _scalar(node.value)

    try:
        root = yaml.compose(text.decode("utf-8-sig"), yaml.SafeLoader)
        data = None if root is None else value(root)
    except RecursionError:
        data = _TOO_DEEP
    except (yaml.YAMLError, ValueError) as error:
        said = " ".join(str(error).split())
        raise ValueError(f"{where} is not YAML that can be read: {said}") from None
    return _shallow(data, f"{where} is not YAML")


def _scalar(text: str) -> object:
    """What a word without quotes stands for: the core schema of YAML 1.2."""
    if text.lower() in ("", "~", "null"):
        return None
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if re.fullmatch(r"[-+]?[0-9]+", text):
        return _whole(text)
    if re.fullmatch(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", text):
        return _finite(text)
    return text


_TOO_DEEP: list[Any] = []
_TOO_DEEP.append(_TOO_DEEP)


def _shallow(data: object, what: str) -> object:
    """The same data, if it is not nested deeper than anybody writes."""
    level = [data]
    for _ in range(DEEPEST):
        inner = [
            list(value.values()) if isinstance(value, dict) else value
            for value in level
            if isinstance(value, dict | list)
        ]
        level = [item for items in inner for item in items]
    if level:
        raise ValueError(f"{what} that can be read: it is nested too deeply")
    return data


def differences(have: object, want: object, at: str = "") -> list[str]:
    """Where two JSON values differ, in words: `model.heads is 8 instead of 4`."""
    if isinstance(have, dict) and isinstance(want, dict):
        names = [*have, *(name for name in want if name not in have)]
        within = (
            differences(have.get(name, _ABSENT), want.get(name, _ABSENT), _join(at, name))
            for name in names
        )
        return [words for place in within for words in place]
    # True == 1 and 1 == 1.0 in Python; as JSON they are different values.
    if json.dumps(have, default=str) == json.dumps(want, default=str):
        return []
    return [f"{at} is {_shown(have)} instead of {_shown(want)}"]


# Reading


@dataclasses.dataclass(frozen=True)
class _Place:
    """A place in a file."""

    where: str
    at: str = ""

    def __str__(self) -> str:
        return f"{self.where}: {self.at}" if self.at else self.where

    def key(self, name: str) -> "_Place":
        return _Place(self.where, _join(self.at, name))

    def item(self, index: int) -> "_Place":
        return _Place(self.where, f"{self.at}[{index}]")


def _read(kind: Any, value: object, place: _Place) -> object:
    """`value` as the annotation `kind` asks for."""
    if dataclasses.is_dataclass(kind):
        return _read_config(cast(type, kind), value, place)
    match get_origin(kind) or kind:
        case origin if origin is Union or origin is UnionType:
            return _read_union(get_args(kind), value, place)
        case origin if origin is Literal:
            # Not `value in choices`, which takes 1 for True.
            if any(type(value) is type(choice) and value == choice for choice in get_args(kind)):
                return value
        case origin if origin is tuple:
            if isinstance(value, list):
                return _read_tuple(get_args(kind), value, place)
        case origin if origin is dict:
            if isinstance(value, dict):
                inner = get_args(kind)[1]
                return {name: _read(inner, item, place.key(name)) for name, item in value.items()}
        case origin if origin is float:
            if type(value) in (int, float):
                return _number(cast(float | int, value), place)
        case origin if origin in (bool, int, str, NoneType):
            if type(value) is origin:
                return value
        case origin if origin is object or origin is Any:
            return value
        case _:
            raise TypeError(f"{place}: a config cannot hold {kind}; annotate it otherwise")
    raise ValueError(f"{place} ({_shown(value)}) must be {_described(kind)}")


def _read_config(cls: type, value: object, place: _Place) -> object:
    if not isinstance(value, dict):
        raise ValueError(f"{place} ({_shown(value)}) must be an object")
    fields = {field.name: field for field in _fields(cls)}
    if unknown := [name for name in value if name not in fields]:
        close = difflib.get_close_matches(unknown[0], fields, n=1)
        guess = f"; did you mean {_shown(close[0])}?" if close else ";"
        many = "keys" if len(unknown) > 1 else "key"
        raise ValueError(
            f"{place} has the unknown {many} {_listed(unknown)}{guess} "
            f"known: {', '.join(fields) or 'none'}"
        )
    required = [
        name
        for name, field in fields.items()
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    ]
    if missing := [name for name in required if name not in value]:
        raise ValueError(f"{place} lacks {_listed(missing)}; add what is missing")
    kinds = hints(cls)
    arguments = {name: _read(kinds[name], item, place.key(name)) for name, item in value.items()}
    try:
        return cls(**arguments)
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error


def _read_union(kinds: tuple[Any, ...], value: object, place: _Place) -> object:
    configs: list[Any] = [kind for kind in kinds if dataclasses.is_dataclass(kind)]
    if isinstance(value, dict) and len(configs) > 1:
        return _read_config(_told_apart(configs, value, place), value, place)
    # An int stays an int in `float | int`, although it would do for a float as well.
    faults = {}
    for kind in sorted(kinds, key=lambda kind: type(value) is not kind):
        try:
            return _read(kind, value, place)
        except ValueError as fault:
            faults[kind] = fault
    # Where there is only one thing that it can have been meant to be, its own fault says more.
    meant = [kind for kind in kinds if type(value) in _forms(kind)]
    if len(meant) == 1:
        raise faults[meant[0]]
    described = _either(list(dict.fromkeys(map(_described, kinds))))
    raise ValueError(f"{place} ({_shown(value)}) must be {described}")


def _told_apart(configs: list[type], value: Object, place: _Place) -> type:
    """The config among these whose `kind` the object names."""
    named = {}
    for cls in configs:
        choices = get_args(hints(cls).get("kind"))
        if not choices:
            raise TypeError(f'{cls.__name__} is in a union and needs kind: Literal["…"] = "…"')
        named.update(dict.fromkeys(choices, cls))
    known = _either([_shown(name) for name in named])
    if "kind" not in value:
        raise ValueError(f"{place.key('kind')} is missing; it must be {known}")
    kind = value["kind"]
    if not isinstance(kind, str) or kind not in named:
        close = difflib.get_close_matches(kind, named, n=1) if isinstance(kind, str) else []
        guess = f"; did you mean {_shown(close[0])}?" if close else ""
        raise ValueError(f"{place.key('kind')} ({_shown(kind)}) must be {known}{guess}")
    return named[kind]


def _read_tuple(kinds: tuple[Any, ...], value: list[object], place: _Place) -> object:
    if kinds[1:] == (...,):
        kinds = kinds[:1] * len(value)
    if len(kinds) != len(value):
        raise ValueError(f"{place} ({_shown(value)}) must have {len(kinds)} items")
    return tuple(
        _read(kind, item, place.item(i)) for i, (kind, item) in enumerate(zip(kinds, value))
    )


def _number(value: float | int, place: _Place) -> float:
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{place} ({_shown(value)}) must be a finite number")
    return number


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text} is not a finite number")
    return number


def fits_64_bits(number: int) -> bool:
    return -(2**63) <= number < 2**63


def _whole(text: str) -> int:
    if len(text) > 20 or not fits_64_bits(number := int(text)):
        raise ValueError(f"{text[:20]}{'…' * (len(text) > 20)} does not fit into 64 bits")
    return number


def _unique(pairs: list[tuple[str, object]]) -> Object:
    data = dict(pairs)
    if len(data) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {_shown(twice)} occurs twice in one object")
    return data


# Writing


def _plain(value: object, place: _Place) -> object:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in _fields(type(value))]
        return {name: _plain(getattr(value, name), place.key(name)) for name in names}
    if isinstance(value, list | tuple):
        return [_plain(item, place.item(i)) for i, item in enumerate(value)]
    if isinstance(value, dict):
        for name in value:
            _check_text(name, place)
        return {name: _plain(item, place.key(name)) for name, item in value.items()}
    if type(value) is float:
        return _number(cast(float | int, value), place)
    if type(value) is str:
        _check_text(value, place)
        return value
    if type(value) is int and not fits_64_bits(value):
        raise ValueError(f"{place} ({_shown(value)}) does not fit into 64 bits")
    if value is None or type(value) in (bool, int):
        return value
    raise ValueError(
        f"{place} ({_shown(value)}) is a {type(value).__name__}, which JSON lacks; use a number, a "
        "string, true or false, null, a list, or an object"
    )


def _check_text(text: object, place: _Place) -> None:
    if not isinstance(text, str):
        raise ValueError(f"{place} has the key {_shown(text)}; keys in JSON are strings")
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        raise ValueError(
            f"{place} ({_shown(text)}) is not UTF-8; rename a file, or set PYTHONUTF8=1 where the "
            "locale has no letters beyond ASCII"
        )


# Words

_ABSENT = type("_Absent", (), {"__repr__": lambda self: "absent"})()


def _forms(kind: Any) -> tuple[type, ...]:
    """The types that JSON gives to values of an annotation, where its type is all that counts."""
    if dataclasses.is_dataclass(kind):
        return (dict,)
    origin = get_origin(kind) or kind
    return {dict: (dict,), tuple: (list,), int: (int,), float: (int, float), str: (str,)}.get(
        origin, ()
    )


def _described(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return _either([_shown(choice) for choice in get_args(kind)])
    if get_origin(kind) in (Union, UnionType):
        return _either([_described(member) for member in get_args(kind)])
    named = {
        int: "an int",
        float: "a number",
        bool: "true or false",
        str: "a string",
        NoneType: "null",
        tuple: "a list",
    }
    return named.get(get_origin(kind) or kind, "an object")


def _either(words: list[str]) -> str:
    return f"{', '.join(words[:-1])} or {words[-1]}" if len(words) > 1 else words[0]


def _listed(names: list[str]) -> str:
    return ", ".join(map(_shown, names))


def _shown(value: object) -> str:
    """A value for one line of text, as JSON where it has it."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        text = " ".join(repr(value).split())
    return text if len(text) <= 80 else f"{text[:77]}..."


def _join(at: str, name: str) -> str:
    return f"{at}.{name}" if at else name


def _fields(cls: Any) -> list[dataclasses.Field[Any]]:
    return [field for field in dataclasses.fields(cls) if field.init]
