"""Hooks of a model's modules, counted on each path that may compute a module without calling it.

Hooks must fire as often as in a padded batch on the plain path, which a hook registered for all
modules switches on. Elsewhere only the hooks of modules of one kind are registered at a time.
"""

import copy
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from regard.checks import compute
from regard.checks.compute import Example, Rows
from regard.checks.finding import Measured, SkipError
from regard.checks.subject import Subject
from regard.decode.engine.pick import pick
from regard.model.language import LanguageModel
from regard.model.transformer import Transformer

Path = Callable[[nn.Module, list[Example]], object]

EXAMPLES, TOKENS = 2, 3
"""Each path runs once for every module: a few short examples are enough to see a hook fire."""


def missing(subject: Subject, quantize: Callable[[nn.Module], Any]) -> Measured:
    """The number of hooks that did not fire as often as on the plain path."""
    model = copy.deepcopy(subject.model)
    examples = [_short(example) for example in subject.examples[:EXAMPLES]]
    paths = dict(_paths(model, examples))
    groups = _groups(name for name, _ in model.named_modules())
    names = [name for group in groups for name in group]
    with plain():
        want = _counts(partial(gradient_step, compute.padded, half=False), model, examples, names)
    failures = len(_uncalled(model, want))
    for path, run in paths.items():
        for group in groups:
            have = _counts(run, model, examples, group)
            for (name, kind), count in want.items():
                if name not in group or (kind == "back" and path != "training"):
                    continue
                if path == "cached":  # token by token, and not by a call of the whole model
                    failures += bool(name) and not have[name, kind]
                else:
                    failures += have[name, kind] != count
    checked = list(paths)
    if isinstance(model, Transformer | LanguageModel):
        checked.append("engine")
        failures += _engines(model if compute.place(model).type == "cuda" else quantize(model))
    return Measured(
        float(failures), f"missing calls of hooks on {len(names)} modules: {', '.join(checked)}"
    )


def _uncalled(model: nn.Module, counts: Counter[tuple[str, str]]) -> list[str]:
    """Layers with parameters that the model reads without calling the layer, on every path."""
    parts = dict(model.named_modules())
    return [
        name
        for name, part in parts.items()
        if name and any(True for _ in part.parameters(recurse=False)) and not counts[name, ""]
    ]


@contextmanager
def plain() -> Iterator[None]:
    """Switches the plain path on, which calls every module."""
    handle = register_module_forward_hook(lambda *_: None)
    try:
        yield
    finally:
        handle.remove()


def gradient_step(
    run: Callable[..., Rows], model: Any, examples: Sequence[Example], half: bool = True
) -> None:
    """Forwards and backwards as in training, without dropout."""
    model.zero_grad()
    with (
        torch.enable_grad(),
        torch.autocast(compute.place(model).type, torch.bfloat16, enabled=half),
    ):
        loss = torch.cat(run(model, examples)).float().logsumexp(-1).sum()
        loss.backward()


def _paths(model: Any, examples: list[Example]) -> Iterator[tuple[str, Path]]:
    run = compute.padded
    yield "padded", run
    with suppress(SkipError):
        compute.packed(model, examples)
        run = compute.packed
        yield "packed", run
    half = compute.place(model).type == "cuda"  # on a CPU it takes several times as long
    yield "training", partial(gradient_step, run, half=half)
    if isinstance(model, Transformer | LanguageModel):
        yield "cached", compute.cached


def _short(example: Example) -> Example:
    def cut(part: torch.Tensor | None) -> torch.Tensor | None:
        return part if part is None or part.ndim > 1 else part[:TOKENS]

    return Example(cut(example.source), cut(example.target))


def _groups(names: Iterable[str]) -> list[list[str]]:
    """Modules whose names end in the same two words: their hooks are registered together."""
    groups: dict[str, list[str]] = {}
    for name in names:
        end = ".".join(re.sub(r"\d+", "", name).split(".")[-2:])
        groups.setdefault(end, []).append(name)
    return list(groups.values())


def _counts(
    path: Path, model: nn.Module, examples: list[Example], names: Iterable[str]
) -> Counter[tuple[str, str]]:
    counts: Counter[tuple[str, str]] = Counter()
    handles: list[Any] = []
    for name in names:
        module, keys = model.get_submodule(name), [[(name, kind)] for kind in ("pre", "", "back")]
        before, after, back = (partial(_count, counts, key[0]) for key in keys)
        handles.append(module.register_forward_pre_hook(before))
        handles.append(module.register_forward_hook(after))
        handles.append(module.register_full_backward_pre_hook(back))
    try:
        # torch warns of the first modules, whose inputs are data.
        with warnings.catch_warnings(action="ignore"):
            path(model, examples)
    finally:
        for handle in handles:
            handle.remove()
    return counts


def _count(counts: Counter[tuple[str, str]], key: tuple[str, str], *_: object) -> None:
    counts[key] += 1


def _engines(model: Any) -> int:
    """The number of engines other than the eager one that take a model with a hook."""
    handle = model.get_submodule("decoder.blocks.0").register_forward_hook(lambda *_: None)
    try:
        return int(pick(model).name != "eager")
    finally:
        handle.remove()
