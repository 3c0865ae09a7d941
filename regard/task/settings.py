"""What the configs of all tasks have in common."""

import filecmp
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, Literal, TypeAlias, TypeVar, cast, get_args

from regard.config import from_json

Preset: TypeAlias = Literal["tiny", "base", "big"]
"""How large a preset is: tiny is for two cores, the others for a GPU."""

Precision: TypeAlias = Literal["auto", "fp32", "bf16", "fp16", "int8"]
"""What weights and activations of a model in use are computed in."""

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


def check_obeyed(
    config: Any,
    preset: Callable[[Preset], Any],
    model: Any,
    task: Mapping[str, Any] | None,
    *names: str,
) -> None:
    """Beside start, settings that are neither a preset's nor the trained model's are refused.

    `model` is the trained model's config, `task` its folder's section; `names` are settings beside
    the model's shape that it brings along.
    """
    presets = [preset(size) for size in get_args(Preset)]
    shapes = [one.model for one in presets]
    kept = (task or {}).get("config") or {}
    checks = [
        (f"model.{one.name}", one.name, config.model, shapes, getattr(model, one.name, None))
        for one in fields(config.model)
    ]
    checks += [(name, name, config, presets, kept.get(name)) for name in names]
    for label, name, chosen, defaults, own in checks:
        value = getattr(chosen, name)
        if value != own and all(value != getattr(default, name) for default in defaults):
            has = "" if own is None else f" ({own})"
            raise ValueError(
                f"{label} ({value}) cannot be changed when fine-tuning: start ({config.start}) has "
                f"its own{has}; leave it out"
            )


def check_positive(config: Any, *names: str) -> None:
    """Sizes, where they are set, are at least 1."""
    for name in names:
        value = getattr(config, name)
        sizes = value if isinstance(value, tuple) else (value,)
        if any(size is not None and size < 1 for size in sizes):
            raise ValueError(f"{name} ({value}) must be 1 or more; leave it out for the default")


def recorded(kind: type[Kind], task: Mapping[str, Any] | None, where: object) -> Kind | None:
    """The config that a model's folder keeps; None of one that was imported."""
    config = (task or {}).get("config")
    return None if config is None else from_json(kind, config, str(where), "task.config")


def section(kind: type[Kind], task: Mapping[str, Any], where: object) -> Kind:
    """What a model's folder says of its task, as far as this kind knows the words."""
    known = {field.name for field in fields(cast(Any, kind))}
    named = {name: value for name, value in task.items() if name in known}
    return from_json(kind, named, str(where), "task")


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


def describe_reuse(training: Sequence[str], validation: Sequence[str]) -> list[str]:
    """A note for each file or folder to validate on that is one of those to train on."""
    return [
        f"{path} is used to train and to validate, so scores do not tell how the model does on "
        "new data; name other data to validate on, or none, to hold some out"
        for path in validation
        if any(_is_same(path, other) for other in training)
    ]


def _is_same(path: str, other: str) -> bool:
    """True if the paths lead to the same folder, or to files of the same content."""
    if os.path.samefile(path, other):
        return True
    if not (os.path.isfile(path) and os.path.isfile(other)):
        return False
    return os.path.getsize(path) == os.path.getsize(other) and filecmp.cmp(path, other, False)


def absolute(config: Config, *names: str) -> Config:
    """These paths, one or several in a field, as they hold from wherever a run is repeated."""
    paths = {name: getattr(config, name) for name in names}
    return replace(
        config,
        **{
            name: os.path.abspath(path) if isinstance(path, str | os.PathLike) else _all(path)
            for name, path in paths.items()
            if path is not None
        },
    )


def _all(paths: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(map(os.path.abspath, paths))
