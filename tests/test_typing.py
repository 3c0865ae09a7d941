"""Annotations of the public interface: no `Any`, and any kind of path."""

import inspect
import re
from typing import Any, get_overloads

import pytest

import regard

NAMES = [name for name in regard.__all__ if name != "__version__"]


def functions(name: str) -> dict[str, Any]:
    """A public function, or a class's own public methods and its constructor."""
    public = getattr(regard, name)
    if not inspect.isclass(public):
        return {name: public} if inspect.isfunction(public) else {}
    found = {}
    for attribute, value in vars(public).items():
        function = getattr(value, "__func__", getattr(value, "fget", value))
        if inspect.isfunction(function) and (attribute[0] != "_" or attribute == "__call__"):
            found[f"{name}.{attribute}"] = function
    return found


@pytest.mark.parametrize("name", NAMES)
def test_no_public_signature_returns_any(name: str) -> None:
    for place, function in functions(name).items():
        for each in (function, *get_overloads(function)):
            assert "return" in each.__annotations__, f"{place} has no return annotation"
            assert not re.search(r"\bAny\b", str(each.__annotations__["return"])), place


@pytest.mark.parametrize("name", NAMES)
def test_no_public_attribute_is_any(name: str) -> None:
    public = getattr(regard, name)
    for attribute, kind in getattr(public, "__annotations__", {}).items():
        if attribute[0] != "_" and inspect.isclass(public):
            assert not re.search(r"\bAny\b", str(kind)), f"{name}.{attribute}"


@pytest.mark.parametrize("name", NAMES)
def test_paths_may_be_text_or_path_objects(name: str) -> None:
    for place, function in functions(name).items():
        for parameter, kind in function.__annotations__.items():
            if parameter in ("folder", "path"):
                assert "PathLike" in str(kind), f"{place}({parameter})"
            assert "pathlib.Path" not in str(kind) or parameter == "return", f"{place}({parameter})"
