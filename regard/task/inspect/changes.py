"""What is changed inside a model before it answers, and what each head does for the answer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from regard.look.effect import HeadName, changed, effect_of_heads
from regard.look.view import View

UNITS = 256
"""Parts of a source that are hidden one by one, at most."""


@dataclass(frozen=True)
class Changes:
    """What is changed inside a model before it answers."""

    off: tuple[HeadName, ...] = ()
    beta: tuple[tuple[str, int, float], ...] = ()
    """β of a head, times a factor."""
    hidden: tuple[int, ...] = ()
    """Positions of the source that nobody may attend to."""
    forced: tuple[int, ...] = ()
    """Tokens that the output begins with."""

    def made(self, model: torch.nn.Module) -> Any:
        factors = {(name, head): factor for name, head, factor in self.beta}
        return changed(model, off=self.off, beta=factors, hidden=self.hidden)


NONE = Changes()


def with_head_effects(model: torch.nn.Module, view: View, answer: Callable[[], Tensor]) -> View:
    """The same view, with how far the answer falls without each head."""
    heads = [
        (name, h) for one in view.maps for name in one.layers for h in range(one.weights.shape[1])
    ]
    falls = dict(zip(heads, effect_of_heads(model, heads, answer)))
    made = tuple(
        replace(
            one,
            falls=torch.tensor(
                [
                    [float(falls[name, h]) for h in range(one.weights.shape[1])]
                    for name in one.layers
                ]
            ),
        )
        for one in view.maps
    )
    return replace(view, maps=made)


def ids_of(tokens: Sequence[int], model: Any) -> Tensor:
    device = next(model.parameters()).device
    return torch.tensor([list(tokens)], device=device)


def with_end(numbers: Sequence[int]) -> list[int]:
    """EOS is a word of its own, so that what rests on it is seen."""
    return [*numbers, max(numbers, default=-1) + 1]


def units_of(numbers: Sequence[int]) -> list[tuple[int, ...]]:
    """The positions of each word; of each token where there is but one word."""
    if max(numbers, default=-1) < 2:
        numbers = range(len(numbers))
    places: dict[int, list[int]] = {}
    for place, word in enumerate(numbers):
        if word >= 0:
            places.setdefault(word, []).append(place)
    return [tuple(unit) for unit in places.values()][:UNITS]


def names_of(units: Sequence[Sequence[int]], pieces: Sequence[str]) -> tuple[str, ...]:
    """Words, from the pieces of each."""
    return tuple(
        "".join(pieces[place] for place in unit).replace("▁", " ").strip() for unit in units
    )
