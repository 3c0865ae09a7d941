"""Every public name has a complete docstring, whose example runs as it stands.

`python -m tests.test_docstrings` counts the docstrings and their examples.
"""

import doctest
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import regard

NAMES = [name for name in regard.__all__ if name != "__version__"]
SENTENCE = re.compile(r"(?!(?:What|Whether|Of|How|Where)\b)[A-Z].*\.")
VERB = re.compile(r"(?!This|Its|Is)[A-Z][a-z]+s\b")
TENSOR = re.compile(r"\w+\[Tensor, '[^']*[A-Z]")
SHAPE = re.compile(r"\(((?:\.\.\.|1|[A-Z])(?:, (?:\.\.\.|1|[A-Z]))*),?\)")
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def definitions(name: str) -> dict[str, Any]:
    """The public object, and the public methods that its class defines."""
    public = getattr(regard, name)
    members = {name: public}
    for attribute, value in vars(public).items() if inspect.isclass(public) else ():
        if isinstance(value, classmethod | staticmethod | property) or inspect.isfunction(value):
            members[f"{name}.{attribute}"] = getattr(value, "__func__", value)
    skipped = ("_", "extra_repr")  # torch's own docstring describes extra_repr
    return {n: value for n, value in members.items() if not n.split(".")[-1].startswith(skipped)}


def docstring(name: str, definition: Any) -> str:
    """The docstring that `help` shows, unless it is that of a class outside this package."""
    if "." not in name:
        return inspect.cleandoc(definition.__doc__ or "")
    kind, attribute = name.split(".")
    owners = [c for c in getattr(regard, kind).__mro__ if c.__module__.startswith("regard.")]
    texts = [vars(owner)[attribute].__doc__ for owner in owners if attribute in vars(owner)]
    return inspect.cleandoc(next(filter(None, texts), ""))


def examples(text: str) -> list[doctest.Example]:
    return doctest.DocTestParser().get_examples(text)


@pytest.mark.parametrize("name", NAMES)
def test_docstring_is_complete(name: str) -> None:
    legend = set(re.findall(r" {4,}([A-Z])  ", regard.__doc__ or ""))
    assert {"B", "L", "S", "D"} <= legend
    for place, definition in definitions(name).items():
        text = docstring(place, definition)
        assert SENTENCE.fullmatch(text.split("\n")[0]), f"{place} begins with no sentence: {text}"
        shapes = SHAPE.findall(text)
        letters = {letter for shape in shapes for letter in re.findall("[A-Z]", shape)}
        assert letters <= legend, f"{place}: the legend lacks {letters - legend}"
        if inspect.isfunction(definition):
            assert VERB.match(text), f"{place} begins with no verb, such as Returns: {text}"
            if TENSOR.search(str(inspect.signature(definition))):
                assert shapes, f"{place} takes tensors, but gives no shape"
        *_, end = doctest.DocTestParser().parse(text)
        assert isinstance(end, str), place
        assert not (examples(text) and end.strip()), f"{place} goes on after its example: {end}"
    assert examples(docstring(name, getattr(regard, name))), f"{name} has no example"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with small models in `runs` and two pictures, for the examples of predictors."""
    from tests.service import samples

    place = tmp_path_factory.mktemp("examples")
    for name, save, options in (
        ("en-de", samples.translator, {"beams": 4}),
        ("pets", samples.classifier, {"labels": ("cat", "dog")}),
        ("scans", samples.reader, {}),
        ("mood", samples.labeler, {}),
        ("stories", samples.generator, {}),
        ("words", samples.embedder, {}),
    ):
        save(place / "runs" / name, **options)  # type: ignore[operator]
    for name in ("cat.png", "scan.png"):
        (place / name).write_bytes(samples.picture(0))
    return place


@pytest.mark.parametrize("name", NAMES)
def test_examples_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Each docstring alone, with nothing imported, so that its example can be copied."""
    members = definitions(name).items()
    loads = any('("runs/' in docstring(*member) for member in members)
    monkeypatch.chdir(request.getfixturevalue("runs") if loads else tmp_path)
    runner = doctest.DocTestRunner(optionflags=FLAGS)
    for place, definition in members:
        torch.manual_seed(0)
        text = docstring(place, definition)
        names = {"__name__": "__main__"}
        report: list[str] = []
        runner.run(doctest.DocTest(examples(text), names, place, None, 0, text), out=report.append)
        assert runner.failures == 0, "".join(report)


if __name__ == "__main__":
    texts = [docstring(*member) for name in NAMES for member in definitions(name).items()]
    shown = [examples(text) for text in texts if examples(text)]
    print(
        f"{len(NAMES)} public names, {sum(map(bool, texts))} docstrings, {len(shown)} of them with "
        f"an example, {sum(map(len, shown))} statements in the examples"
    )
