"""The longest path between two positions, measured by gradients and in autograd's graph.

`reaches` counts the layers until one position depends on another: it sends a gradient from one end
back through the layer, again and again from wherever it is not zero. Within a layer, `shortest`
counts the products on the shortest path through autograd's graph.
"""

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor, nn

from regard.attention.cache import SelfCache
from regard.attention.mask import causal

PRODUCTS = ("Mm", "Addmm", "Bmm", "Convolution", "ScaledDotProduct")


def felt(
    layer: Callable[[Tensor], Tensor], at: Bool[Tensor, " L"], width: int
) -> Bool[Tensor, " L"]:
    """The positions on whose input some of the outputs in `at` depend."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, len(at), width, generator=generator).requires_grad_()
    y = layer(x)
    above = torch.randn(y.shape, generator=generator).abs() * at[None, :, None]
    (slope,) = torch.autograd.grad(y, x, above)
    return (slope != 0).any(-1)[0]


def reaches(layer: Callable[[Tensor], Tensor], length: int, width: int) -> int | None:
    """Layers until the ends depend on each other, both ways; None if they never do."""
    most = 0
    for start, end in ((-1, 0), (0, -1)):
        at = torch.zeros(length, dtype=torch.bool)
        at[start] = True
        layers = 0
        while not at[end] or layers == 0:
            before = at
            at = at | felt(layer, at, width)
            layers += 1
            if bool((at == before).all()) and not at[end]:
                return None
        most = max(most, layers)
    return most


def shortest(output: Tensor, leaf: Tensor, kinds: tuple[str, ...]) -> int | None:
    """The fewest nodes of these kinds on a path from a tensor back to a leaf."""
    if output.grad_fn is None:
        return None
    waiting: deque[tuple[Any, int]] = deque([(output.grad_fn, 0)])
    seen: set[Any] = set()
    while waiting:
        node, before = waiting.popleft()
        if getattr(node, "variable", None) is leaf:
            return before
        if node in seen:
            continue
        seen.add(node)
        here = before + node.name().startswith(kinds)
        for following, _ in node.next_functions:
            if following is not None:
                # Breadth first: what adds nothing to the count goes in front.
                (waiting.append if here > before else waiting.appendleft)((following, here))
    return None


def longest_path(layer: nn.Module, length: int, width: int) -> int | None:
    """Products between the first and the last position, in as many layers as it takes."""
    inner = getattr(layer, "forwards", None)
    if inner is not None:
        return _through_states(inner, length, width)
    layers = reaches(layer, length, width)
    x = torch.zeros(1, length, width, requires_grad=True)
    inside = shortest(layer(x), x, PRODUCTS)
    return None if layers is None or inside is None else layers * inside


class _Handover(torch.autograd.Function):
    """Marks in autograd's graph where a state passes from one position to the next."""

    @staticmethod
    def forward(ctx: Any, state: Tensor) -> Tensor:
        return state.clone()

    @staticmethod
    def backward(ctx: Any, *above: Tensor) -> Tensor:
        return above[0]


def _handed(state: Tensor) -> Tensor:
    return _Handover.apply(state)  # type: ignore[no-untyped-call]


def _through_states(recurrent: nn.Module, length: int, width: int) -> int | None:
    """Steps on the shortest path from the first position to the last.

    Steps are counted instead of matrix products: an LSTM's cell state meets none of them, as it is
    multiplied by a gate elementwise (Hochreiter & Schmidhuber 1997).
    """
    x = torch.zeros(1, 1, width, requires_grad=True)
    y, state = recurrent(x)
    for _ in range(length - 1):
        one = isinstance(state, Tensor)
        handed = [_handed(part) for part in ((state,) if one else state)]
        y, state = recurrent(torch.zeros(1, 1, width), handed[0] if one else tuple(handed))
    handovers = shortest(y, x, ("_Handover",))
    return None if handovers is None else handovers + 1


def cached_numbers(layer: nn.Module, length: int, width: int) -> int:
    """Numbers in attention's KV cache after `length` positions."""
    cache = SelfCache()
    with torch.no_grad():
        layer(torch.zeros(1, length, width), mask=causal(), cache=cache)
    assert cache.held is not None
    return sum(tensor.numel() for tensor in cache.held)
