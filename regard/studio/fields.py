"""The fields of questions: their types and limits, checked before anything is computed.

A kind maps a field's name and its JSON value to the value that the answer is computed from, or
raises a ValueError of one line that names both. JSON has no limits of its own: `1e999` is read as
an infinity, and an integer may have any number of digits.
"""

import base64
import binascii
import reprlib
from collections.abc import Callable, Mapping
from typing import Any

Question = Mapping[str, Any]

Kind = Callable[[str, Any], Any]

MAX_STRING = 1000
"""Characters of a name, if its field has no other limit."""


def field(kind: Kind) -> tuple[Kind, bool, Any]:
    return kind, True, None


def optional(kind: Kind, default: Any = None) -> tuple[Kind, bool, Any]:
    return kind, False, default


Fields = Mapping[str, tuple[Kind, bool, Any]]
"""By name, a field's kind, whether it is required, and its default otherwise."""


def check(question: Question, fields: Fields) -> dict[str, Any]:
    """The values of a question's fields, with the defaults of those that are absent."""
    for name in question:
        if name not in fields:
            raise ValueError(
                f"{name[:MAX_STRING]!r} is not a field; there are {', '.join(fields) or 'none'}"
            )
    values = {}
    for name, (kind, needed, default) in fields.items():
        if needed and name not in question:
            raise ValueError(f"{name} is missing")
        values[name] = kind(name, question[name]) if name in question else default
    return values


def refusal(name: str, value: Any, rule: str) -> ValueError:
    return ValueError(f"{name} ({reprlib.repr(value)}) must be {rule}")


def whole(least: int, most: int) -> Kind:
    def check_whole(name: str, value: Any) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise refusal(name, value, f"a whole number from {least:,} to {most:,}")
        return value

    return check_whole


def number(least: float, most: float) -> Kind:
    def check_number(name: str, value: Any) -> float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not least <= value <= most:  # nor is NaN
            raise refusal(name, value, f"a number from {least:g} to {most:g}")
        return float(value)

    return check_number


def flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise refusal(name, value, "true or false")
    return value


def string(most: int = MAX_STRING) -> Kind:
    def check_string(name: str, value: Any) -> str:
        if not isinstance(value, str):
            raise refusal(name, value, "a string")
        if len(value) > most:
            raise ValueError(f"{name} ({len(value):,} characters) must have at most {most:,}")
        try:
            value.encode()
        except UnicodeEncodeError:
            raise refusal(name, value, "Unicode, without half of a surrogate pair") from None
        return value

    return check_string


def words(most: int) -> Kind:
    """A string that is not blank."""
    check_string = string(most)

    def check_words(name: str, value: Any) -> str:
        text: str = check_string(name, value)
        if not text.strip():
            raise ValueError(f"{name} (nothing) must have a word in it")
        return text

    return check_words


def picture(most: int) -> Kind:
    """Bytes, from base64."""
    check_string = string(most)

    def check_picture(name: str, value: Any) -> bytes:
        try:
            return base64.b64decode(check_string(name, value), validate=True)
        except (binascii.Error, ValueError):
            raise refusal(name, value, "a picture in base64") from None

    return check_picture


def choice(*options: str) -> Kind:
    def check_choice(name: str, value: Any) -> str:
        if not isinstance(value, str) or value not in options:
            raise ValueError(
                f"{name} ({reprlib.repr(value)}) is unknown; choose from {', '.join(options)}"
            )
        return value

    return check_choice


def items(kind: Kind, most: int) -> Kind:
    """A list of any length up to `most`."""

    def check_items(name: str, value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list) or len(value) > most:
            raise refusal(name, value, f"a list of at most {most:,}")
        return tuple(kind(f"{name}[{n}]", item) for n, item in enumerate(value))

    return check_items


def row(*kinds: Kind) -> Kind:
    """A list with a kind for each place."""

    def check_row(name: str, value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list) or len(value) != len(kinds):
            raise refusal(name, value, f"a list of {len(kinds)}")
        return tuple(
            kind(f"{name}[{n}]", item)
            for n, (kind, item) in enumerate(zip(kinds, value, strict=True))
        )

    return check_row


def mapping(kind: Kind, most: int) -> Kind:
    def check_mapping(name: str, value: Any) -> dict[str, Any]:
        if not isinstance(value, dict) or len(value) > most:
            raise refusal(name, value, f"an object of at most {most:,} names")
        return {key: kind(f"{name}[{reprlib.repr(key)}]", item) for key, item in value.items()}

    return check_mapping
