"""What `--help` shows of settings: every field of a dataclass is a flag, its docstring the text.

tyro reads the flags (`arguments.py`). Its own help keeps the line breaks of docstrings, and shows
Python's types and defaults such as None; this one is laid out as argparse does.
"""

import dataclasses
import textwrap
from collections.abc import Iterator, Mapping
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

WIDTH, INDENT = 96, 26
"""Columns of the text, and before a flag's explanation."""


def described(kind: type[Any]) -> dict[str, str]:
    """What the docstrings of a dataclass say of its settings, inherited ones too, in one line."""
    from docstring_parser import parse_from_object

    return {
        one.arg_name: " ".join((one.description or "").split())
        for base in reversed(kind.__mro__)
        if dataclasses.is_dataclass(base)
        for one in parse_from_object(base).params
    }


def help_lines(
    kind: type[Any], default: Any, usage: str, more: Mapping[str, str] | None = None
) -> list[str]:
    """The whole help of a command whose settings are of this kind, and of `more` flags."""
    lines = [*textwrap.wrap(f"usage: {usage} [options]", WIDTH, subsequent_indent=" " * 7), ""]
    for paragraph in (kind.__doc__ or "").split("\n\n"):
        lines += [*textwrap.wrap(" ".join(paragraph.split()), WIDTH), ""]
    lines += ["options:", *flag_lines("-h, --help", "show this help message and exit")]
    for flag, text in (more or {}).items():
        lines += flag_lines(flag, text)
    return [*lines, *_settings(kind, default, "")]


def flag_lines(flag: str, text: str) -> list[str]:
    """A flag and its explanation, beside it where there is room."""
    column = f"  {flag:<{INDENT - 3}} "
    if len(column) > INDENT:
        rest = textwrap.wrap(
            text, WIDTH, initial_indent=" " * INDENT, subsequent_indent=" " * INDENT
        )
        return [column.rstrip(), *rest]
    return textwrap.wrap(text, WIDTH, initial_indent=column, subsequent_indent=" " * INDENT)


def with_default(text: str, value: object) -> str:
    """The explanation of a setting, and what it is where nobody says, if that is anything."""
    if value is None or value is False or value in ((), ""):
        return text
    shown = " ".join(map(str, value)) if isinstance(value, tuple) else value
    return f"{text} (default: {shown})"


def _settings(kind: type[Any], default: Any, section: str) -> Iterator[str]:
    texts, hints = described(kind), get_type_hints(kind, include_extras=True)
    within = []
    for field in dataclasses.fields(kind):
        hint, value = hints[field.name], getattr(default, field.name)
        if dataclasses.is_dataclass(value):
            within.append((field.name, value))
            continue
        text = with_default(texts.get(field.name, ""), value)
        yield from flag_lines(_flag(section, field.name, hint, value), text)
    for name, value in within:
        yield from ("", f"{section}{name}: {texts.get(name, '')}".rstrip(": "))
        yield from _settings(type(value), value, f"{section}{name}.")


def _flag(section: str, name: str, hint: Any, value: object) -> str:
    """A flag with what it takes: `--beams N`, `-o OUT, --out OUT`."""
    aliases: list[str] = []
    if get_origin(hint) is Annotated:
        aliases = [alias for one in hint.__metadata__ for alias in one.aliases or ()]
        hint = hint.__origin__
    dashed = name.replace("_", "-")
    flags = [*aliases, f"--{section}{dashed}"]
    if hint is bool:
        return ", ".join([*flags, *([f"--{section}no-{dashed}"] if value else [])])
    taken = _taken(hint, dashed.rpartition("-")[2].upper())
    return ", ".join(f"{flag} {taken}" for flag in flags)


def _taken(hint: Any, name: str) -> str:
    """The words that a flag takes, for a reader."""
    if hint in (int, float):
        return "N" if hint is int else "X"
    if hint is bool:
        return "{True,False}"
    if get_origin(hint) is Literal:
        return "{" + ",".join(map(str, get_args(hint))) + "}"
    kinds = [one for one in get_args(hint) if one is not NoneType]
    if isinstance(hint, UnionType) or get_origin(hint) is Union:
        if set(kinds) == {int, str}:
            return name.removesuffix("S")
        return "|".join(dict.fromkeys(_taken(one, name) for one in kinds))
    if get_origin(hint) is tuple:
        if kinds[-1] is Ellipsis:
            return f"{_taken(kinds[0], name)} ..."
        return " ".join(_taken(one, name) for one in kinds)
    return name
