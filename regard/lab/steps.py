"""The steps of attention: in float64, in exact fractions where possible, and counted.

    S = Q Kᵀ    scores, then β S    E = exp(S - max)    A = E / Σ E    C = A V

`steps` computes them from tensors, or from matrices as one writes them (matrix.py). Other scores
than the dot product are in scoring.py, and several heads with their projections in layer.py.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import NamedTuple

import torch
from jaxtyping import Float, Num
from torch import Tensor

from regard.attention.arguments import arguments
from regard.attention.mask import Mask
from regard.lab.matrix import Cell, Matrix, inverse_root, times, total
from regard.lab.scoring import Dot, Operations, Scoring, products, together

LARGE = 30_000
"""Multiplications beyond which no exact fractions are computed: nobody reads so many."""


@dataclass(frozen=True)
class Steps:
    """Every matrix from queries, keys and values to the output, in float64."""

    query: Float[Tensor, "L K"]
    key: Float[Tensor, "S J"]
    value: Float[Tensor, "S V"]
    mask: Mask | None
    beta: float
    scoring: Scoring
    """How keys are rated"""
    scores: Float[Tensor, "L S"]
    """Q Kᵀ, or what another score gives"""
    scaled: Float[Tensor, "L S"]
    """β Q Kᵀ; at β = ∞, 0 at the best allowed keys and -∞ elsewhere"""
    masked: Float[Tensor, "L S"]
    """The same with -∞ where the mask forbids"""
    exponentials: Float[Tensor, "L S"]
    """exp of `masked` minus the maximum of its row"""
    weights: Float[Tensor, "L S"]
    """A: every row of exponentials divided by its sum"""
    output: Float[Tensor, "L V"]
    """C = A V"""
    written: tuple[Matrix, Matrix, Matrix]
    """Queries, keys and values as they were given"""
    factor: Cell
    """β as it was given; by default 1/√d"""

    @cached_property
    def exactly(self) -> "Exactly":
        """The same in exact fractions, where possible."""
        return _exactly(self)

    @property
    def natural(self) -> bool:
        """Whether β is 1/√d."""
        K = self.key.shape[1]
        return self.scoring.scaled and K > 0 and math.isclose(self.beta, 1 / math.sqrt(K))

    @property
    def mask_matrix(self) -> Float[Tensor, "L S"]:
        """What the mask adds to the scores: 0, or -∞ where a query may not attend."""
        added = torch.zeros_like(self.scores)
        if self.mask is None:
            return added
        return added.masked_fill(~self.mask.tensor(*added.shape)[0, 0], -math.inf)


class Exactly(NamedTuple):
    """Every matrix of `Steps` by the same name, with fractions and roots where they are exact."""

    query: Matrix
    key: Matrix
    value: Matrix
    scores: Matrix
    scaled: Matrix
    masked: Matrix
    exponentials: Matrix
    weights: Matrix
    output: Matrix


def steps(
    query: Num[Tensor, "L K"] | Matrix,
    key: Num[Tensor, "S J"] | Matrix | None = None,
    value: Num[Tensor, "S V"] | Matrix | None = None,
    mask: Mask | None = None,
    beta: Fraction | float | None = None,
    scoring: Scoring = Dot(),  # noqa: B008, it has no state
) -> Steps:
    """softmax(β Q Kᵀ) V with every intermediate matrix; arguments as for `attend`.

    Without keys, the queries are the keys: self-attention. Without values, the keys are the values.
    """
    key = query if key is None else key
    value = key if value is None else value
    inputs = {"query": query, "key": key, "value": value}
    for name, one in inputs.items():
        if isinstance(one, Tensor) and one.ndim != 2:
            raise ValueError(
                f"{name} of shape {tuple(one.shape)} has {one.ndim} axes, but attention by hand "
                "takes matrices; pick one sentence and one head"
            )
    q, k, v = (
        one.tensor() if isinstance(one, Matrix) else one.double().detach()
        for one in inputs.values()
    )
    if beta is None and not scoring.scaled:
        beta = Fraction(1)
    as_float = float(beta) if isinstance(beta, Fraction) else beta
    # What a score other than the dot product takes may be of unequal width.
    pair = (q, k) if isinstance(scoring, Dot) else (q[:, :1], k[:, :1])
    sharpness = arguments(*pair, v, mask, as_float, None).beta
    scores = scoring.scores(q, k)
    if isinstance(sharpness, Tensor):
        raise ValueError(f"beta ({sharpness.tolist()}) must be a number; by hand there is one head")
    factor: Cell = sharpness
    if beta is None:
        factor = inverse_root(max(1, k.shape[1]))
    elif isinstance(beta, Fraction | int):
        factor = Fraction(beta)
    allowed = torch.ones_like(scores, dtype=torch.bool)
    if mask is not None:
        L, S = scores.shape
        allowed = mask.tensor(L, S, scores.device)[0, 0]
    if sharpness == math.inf:
        seen = scores.masked_fill(~allowed, -math.inf)
        best = seen.amax(-1, keepdim=True) if seen.numel() else seen
        scaled = torch.zeros_like(scores).masked_fill(scores != best, -math.inf)
    else:
        scaled = sharpness * scores
    masked = scaled.masked_fill(~allowed, -math.inf)
    # A row that may attend to nothing has no maximum: its exponentials are 0, not NaN.
    largest = masked.amax(-1, keepdim=True) if masked.numel() else masked
    exponentials = torch.exp(masked - largest.nan_to_num(neginf=0.0))
    # The maximum's exponential is 1, so only the sum of an empty row is below 1.
    weights = exponentials / exponentials.sum(-1, keepdim=True).clamp_min(1.0)
    return Steps(
        query=q,
        key=k,
        value=v,
        mask=mask,
        beta=sharpness,
        scoring=scoring,
        scores=scores,
        scaled=scaled,
        masked=masked,
        exponentials=exponentials,
        weights=weights,
        output=weights @ v,
        written=(_matrix(query), _matrix(key), _matrix(value)),
        factor=factor,
    )


def _matrix(one: Tensor | Matrix) -> Matrix:
    return one if isinstance(one, Matrix) else Matrix.of(one.detach())


def _exactly(steps: Steps) -> Exactly:
    query, key, value = steps.written
    (L, S), (K, V) = steps.scores.shape, (steps.key.shape[1], steps.value.shape[1])
    small = L * S * (K + V) <= LARGE
    scores = [
        [steps.scoring.exactly(q, k, x) if small else x for k, x in zip(key.rows, row)]
        for q, row in zip(query.rows, steps.scores.tolist())
    ]
    scaled = [
        [x if math.isinf(x) else _scaled(steps, s, x) for s, x in pairs]
        for pairs in _pairs(scores, steps.scaled)
    ]
    masked = [
        [x if math.isinf(x) else s for s, x in pairs] for pairs in _pairs(scaled, steps.masked)
    ]
    exponentials = [
        # The maximum minus itself is 0, exactly: exp(0) is 1.
        [Fraction(e == 1) if m == max(row) or m == -math.inf else e for m, e in zip(row, floats)]
        for row, floats in zip(steps.masked.tolist(), steps.exponentials.tolist())
    ]
    weights = [_shares(row, floats) for row, floats in zip(exponentials, _cells(steps.weights))]
    output = [
        [
            _dot(row, column, rounded) if small else rounded
            for column, rounded in zip(value.transposed.rows, outputs)
        ]
        for row, outputs in zip(weights, _cells(steps.output))
    ]
    made = (scores, scaled, masked, exponentials, weights, output)
    return Exactly(query, key, value, *(Matrix(tuple(map(tuple, rows))) for rows in made))


def _cells(tensor: Tensor) -> list[list[Cell]]:
    rows: list[list[Cell]] = tensor.tolist()
    return rows


def _pairs(cells: list[list[Cell]], rounded: Tensor) -> list[list[tuple[Cell, float]]]:
    return [list(zip(row, floats)) for row, floats in zip(cells, rounded.tolist())]


def _dot(a: Sequence[Cell], b: Sequence[Cell], rounded: Cell) -> Cell:
    """The exact dot product of two vectors, or the rounded one where an entry is not exact."""
    exact = Fraction(0)
    for x, y in zip(a, b):
        if x == 0:
            continue
        if not (isinstance(x, Fraction) and isinstance(y, Fraction)):
            return rounded
        exact += x * y
    return exact


def _scaled(steps: Steps, score: Cell, rounded: float) -> Cell:
    if math.isinf(steps.beta):
        return Fraction(0)
    scaled = times(score, steps.factor)
    return rounded if isinstance(scaled, float) else scaled


def _shares(exponentials: list[Cell], rounded: list[Cell]) -> list[Cell]:
    whole = total(exponentials)
    if whole is None:
        return rounded
    return [Fraction(float(e)) / max(whole, Fraction(1)) for e in exponentials]


# Costs


NOT_COUNTED = (
    "Not counted, as in the course: to find each query's maximum and to subtract it, which only "
    "prevents overflow."
)
"""What the exponentials take beside those operations."""


def operations(steps: Steps) -> dict[str, Operations]:
    """The operations of each step, by its name; "total" is their sum.

    A dot product of length d takes d multiplications and d - 1 additions; a mask is added to every
    score. What is not counted, `NOT_COUNTED` says.
    """
    (L, S), V = steps.scores.shape, steps.value.shape[1]
    match steps.beta:
        case 1.0 | math.inf:
            scaling = Operations()
        case _ if steps.natural:
            scaling = Operations(divisions=L * S)
        case _:
            scaling = Operations(multiplications=L * S)
    counted = {
        "scores": steps.scoring.operations(L, S, steps.query.shape[1], steps.key.shape[1]),
        "scaled": scaling,
        **({} if steps.mask is None else {"masked": Operations(additions=L * S)}),
        "weights": Operations(0, L * S, L * max(0, S - 1), L * S),
        "output": products(L, S, V),
    }
    return {**counted, "total": together(*counted.values())}
