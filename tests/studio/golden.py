"""Numbers that Python computes, for the studio's pages to be compared with."""

import math
from typing import Any

import torch

from regard.attention.mask import Mask, causal
from regard.attention.position import SinusoidalPositions
from regard.lab.byhand import exercise
from regard.lab.cost.layers import LAYERS, Sizes
from regard.lab.steps import operations, steps
from regard.look.heads import by_words
from regard.look.rollout import rollout

CELLS = ("scores", "scaled", "masked", "exponentials", "weights", "output")


def golden() -> dict[str, Any]:
    """Inputs and results, by the name of the JavaScript function."""
    torch.manual_seed(0)
    return {
        "attention": _attention(),
        "movedKey": [_moved(scale) for scale in (0.001, 0.3, 4.0)],
        "sinusoidal": [
            {
                "length": n,
                "width": d,
                "base": base,
                "rows": SinusoidalPositions(d, base)
                .encoding(torch.arange(n), torch.float64)
                .tolist(),
            }
            for n, d, base in ((7, 6, 10000), (40, 5, 100), (130, 16, 10000))
        ],
        "layers": [
            {
                "name": layer.name,
                "sizes": {"n": n, "d": d, "k": k, "w": w},
                "parameters": cost.parameters,
                "multiplyAdds": cost.multiply_adds,
                "steps": cost.steps,
                "path": cost.path,
            }
            for layer in LAYERS
            for n, d, k, w in ((1, 8, 3, 4), (512, 512, 3, 64), (77, 24, 7, 100), (9, 8, 1, 2))
            for cost in (layer.cost(Sizes(n, d, k, 2, w)),)
        ],
        "byWords": _words(),
        "rollout": _rollout(),
        "exercise3": [one.tolist() for one in exercise()],
    }


def _plain(rows: list[list[float]]) -> list[list[float | str]]:
    """JSON has no infinity."""
    return [[x if math.isfinite(x) else ("inf" if x > 0 else "-inf") for x in row] for row in rows]


def _attention() -> list[dict[str, Any]]:
    cases = []
    some = Mask.from_tensor(
        torch.tensor([[1, 0, 1], [0, 0, 0], [0, 1, 1], [1, 1, 1], [1, 0, 0]]) > 0
    )
    for sizes in ((2, 3, 2, 3), (5, 3, 7, 2), (1, 1, 1, 1), (4, 11, 3, 5)):
        L, S, K, V = sizes
        generated = [torch.randn(*shape).double() * 2 for shape in ((L, K), (S, K), (S, V))]
        inputs = [one.tolist() for one in (exercise() if sizes == (2, 3, 2, 3) else generated)]
        masks: list[Mask | None] = [None, causal()]
        if sizes == (5, 3, 7, 2):
            masks.append(some)
        for mask in masks:
            for beta in (None, 0.0, 1.0, 3.7, math.inf):
                tensors = [torch.tensor(one, dtype=torch.float64) for one in inputs]
                made = steps(*tensors, mask, beta)
                allowed = None if mask is None else mask.tensor(L, S)[0, 0].int().tolist()
                counted = operations(made)
                cases.append(
                    {
                        "inputs": inputs,
                        "beta": "inf" if beta == math.inf else beta,
                        "allowed": allowed,
                        **{name: _plain(getattr(made, name).tolist()) for name in CELLS},
                        "operations": {name: list(count) for name, count in counted.items()},
                    }
                )
    return cases


def _moved(scale: float) -> dict[str, Any]:
    query, key, value = (
        torch.randn(3).double(),
        torch.randn(4, 3).double(),
        torch.randn(4, 2).double(),
    )
    move = scale * torch.randn(3).double()
    moved = key.clone()
    moved[2] += move
    before, after = (steps(query[None], one, value) for one in (key, moved))
    free = key.clone().requires_grad_()
    weights = (free @ query / 3**0.5).softmax(0)
    slope = torch.autograd.functional.jvp(
        lambda k: (k @ query / 3**0.5).softmax(0) @ value,
        key,
        torch.zeros_like(key).index_put((torch.tensor([2]),), move[None]),
    )[1]
    a = float(weights[2].detach())
    h = before.output[0]
    return {
        "query": query.tolist(),
        "key": key.tolist(),
        "value": value.tolist(),
        "move": move.tolist(),
        "weight": float(after.weights[0, 2]),
        "output": after.output.tolist(),
        "linear": (h + slope).tolist(),
        "others": ((h - a * value[2]) / (1 - a)).tolist(),
    }


def _words() -> dict[str, Any]:
    weights = torch.rand(5, 7).double().softmax(-1)
    rows, columns = [0, 0, -1, 1, 1], [0, 1, 1, -1, 2, 2, 2]
    return {
        "weights": weights.tolist(),
        "rows": rows,
        "columns": columns,
        "merged": by_words(weights, columns, rows).tolist(),
    }


def _rollout() -> dict[str, Any]:
    layers = torch.rand(3, 2, 5, 5).double().softmax(-1)
    return {"layers": layers.mean(1).tolist(), "whole": rollout(layers).tolist()}
