"""What the configs of all tasks have in common."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeAlias, TypeVar, get_args

from regard.config import from_json

Preset: TypeAlias = Literal["tiny", "base", "big"]
"""How large a preset is: tiny is for two cores, the others for a GPU."""

Config = TypeVar("Config", bound=Any)
Kind = TypeVar("Kind")


def check_preset(size: str) -> None:
    if size not in get_args(Preset):
        raise ValueError(f"size ({size!r}) is unknown; choose from {', '.join(get_args(Preset))}")


def check_start(start: str | None, tokenizer: str | None) -> None:
    """A trained model keeps the tokenizer that it was trained with."""
    if start is not None and tokenizer is not None:
        raise ValueError(
            f"start ({start}) brings a tokenizer of its own; leave out tokenizer ({tokenizer})"
        )


def recorded(kind: type[Kind], task: Mapping[str, Any] | None, where: object) -> Kind | None:
    """The config that a model's folder keeps; None of one that was imported."""
    config = (task or {}).get("config")
    return None if config is None else from_json(kind, config, str(where), "task.config")


def check_texts(texts: object, name: str = "texts") -> None:
    """Texts are given as a list, of which every one is a string: one in, one out."""
    one = name.removesuffix("s")
    if isinstance(texts, str):
        raise ValueError(f"{name} must be a list of strings, not one string; pass [{one}]")
    if not isinstance(texts, Sequence):
        raise ValueError(f"{name} ({texts!r}) must be a list of strings, not a {_kind(texts)}")
    for n, text in enumerate(texts):
        if not isinstance(text, str):
            raise ValueError(f"{name}[{n}] ({text!r}) must be a string, not a {_kind(text)}")


def _kind(value: object) -> str:
    return type(value).__name__


def absolute(config: Config, *names: str) -> Config:
    """These paths, one or several in a field, as they hold from wherever a run is repeated."""
    paths = {name: getattr(config, name) for name in names}
    return replace(
        config,
        **{
            name: os.path.abspath(path) if isinstance(path, str) else _all(path)
            for name, path in paths.items()
            if path is not None
        },
    )


def _all(paths: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(map(os.path.abspath, paths))
