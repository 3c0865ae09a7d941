"""Multi-head attention by hand: projections, one head after the other, and the output projection.

    Q = X W_Q, K = Y W_K, V = Z W_V      C_i = softmax(β Q_i K_iᵀ) V_i      O = [C_1 … C_h] W_O

Each head has an equal part of the columns of Q, K and V. A projection that is not given is left
out. With vectors as columns all matrices are transposed: Q = W_Q X.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from regard.attention.mask import Mask
from regard.lab.matrix import Matrix
from regard.lab.scoring import Dot, Operations, Scoring, products, together
from regard.lab.stages import Convention
from regard.lab.steps import Steps, operations, steps

LETTERS = {"query": "Q", "key": "K", "value": "V"}


@dataclass(frozen=True)
class Layer:
    """Every matrix of a layer; vectors are rows."""

    inputs: Mapping[str, Matrix]
    """What queries, keys and values are made of, by "query", "key" and "value" """
    weights: Mapping[str, Matrix]
    """Those that are given of W_Q, W_K, W_V and W_O"""
    projected: Mapping[str, Matrix]
    """Q, K and V of all heads, side by side"""
    heads: tuple[Steps, ...]
    joined: Matrix
    """The heads' outputs, side by side"""
    output: Matrix

    @property
    def sources(self) -> dict[str, str]:
        """The letter of each input: X, and another one for each other matrix."""
        letters: dict[Matrix, str] = {}
        for matrix in (self.inputs[name] for name in LETTERS):
            letters.setdefault(matrix, "XYZ"[len(letters)])
        return {name: letters[matrix] for name, matrix in self.inputs.items()}


def layer(
    inputs: Mapping[str, Matrix],
    weights: Mapping[str, Matrix],
    heads: int = 1,
    mask: Mask | None = None,
    beta: Fraction | float | None = None,
    scoring: Scoring = Dot(),  # noqa: B008, it has no state
) -> Layer:
    """The layer of these inputs and weights; without W_O its output is that of the heads."""
    projected = {
        name: _times(inputs[name], weights.get(f"W_{letter}"), f"W_{letter}", name)
        for name, letter in LETTERS.items()
    }
    for name, matrix in projected.items():
        if heads < 1 or matrix.shape[1] % heads:
            fits = [str(n) for n in range(1, matrix.shape[1] + 1) if matrix.shape[1] % n == 0]
            raise ValueError(
                f"heads ({heads}) must divide the width of {LETTERS[name]} ({matrix.shape[1]}); "
                f"try {' or '.join(fits[-2:])}"
            )
    each = []
    for n in range(heads):
        query, key, value = (_part(projected[name], n, heads) for name in LETTERS)
        each.append(steps(query, key, value, mask, beta, scoring))
    outputs = (head.exactly.output.rows for head in each)
    joined = Matrix(tuple(tuple(x for part in row for x in part) for row in zip(*outputs)))
    output = _times(joined, weights.get("W_O"), "W_O", "what the heads give, side by side,")
    return Layer(inputs, weights, projected, tuple(each), joined, output)


def _part(matrix: Matrix, head: int, heads: int) -> Matrix:
    width = matrix.shape[1] // heads
    return matrix.columns(head * width, (head + 1) * width)


def _times(matrix: Matrix, weight: Matrix | None, name: str, of: str) -> Matrix:
    if weight is None:
        return matrix
    if matrix.shape[1] != weight.shape[0]:
        raise ValueError(
            f"{name} takes vectors of {weight.shape[0]} numbers, but {of} has {matrix.shape[1]}; "
            f"give {name} one row for each (with --convention columns, one column)"
        )
    return matrix.times(weight)


def layer_operations(whole: Layer) -> dict[str, Operations]:
    """The operations of the projections, of each head and of the output projection."""
    counted = {}
    for name, letter in LETTERS.items():
        if (weight := whole.weights.get(f"W_{letter}")) is not None:
            counted[letter] = products(*whole.inputs[name].shape, weight.shape[1])
    for n, head in enumerate(whole.heads, 1):
        counted[f"head {n}"] = operations(head)["total"]
    if (weight := whole.weights.get("W_O")) is not None:
        counted["O"] = products(*whole.joined.shape, weight.shape[1])
    return {**counted, "total": together(*counted.values())}


class Part(NamedTuple):
    """A matrix that is made outside the heads, and its description."""

    name: str
    equation: str
    latex: str
    figures: Matrix
    rows: str
    """The letter that names the rows, or none."""
    columns: str


def projections(whole: Layer, convention: Convention = "rows") -> list[Part]:
    """Queries, keys and values, as far as they are made by projections."""
    names = {"query": "Queries", "key": "Keys", "value": "Values"}
    return [
        _made(names[name], letter, whole.sources[name], f"W_{letter}", matrix, convention)
        for (name, letter), matrix in zip(LETTERS.items(), whole.projected.values())
        if f"W_{letter}" in whole.weights
    ]


def outputs(whole: Layer, convention: Convention = "rows") -> list[Part]:
    """The heads' outputs side by side, and the output projection."""
    letter, joint = ("C", " ") if convention == "rows" else ("H", "; ")
    numbers = range(1, len(whole.heads) + 1)
    heads = joint.join(f"{letter}{n}" for n in numbers)
    set_ = f"{joint}\\, ".join(f"{letter}_{{{n}}}" for n in numbers)
    side = _turned(whole.joined, "h", convention)
    parts = [Part("Heads", f"H = [{heads}]", f"H = [{set_}]", *side)] if len(numbers) > 1 else []
    if "W_O" in whole.weights:
        source = "H" if parts else letter
        parts.append(_made("Output projection", "O", source, "W_O", whole.output, convention))
    return parts


def _made(
    name: str, letter: str, source: str, weight: str, matrix: Matrix, convention: Convention
) -> Part:
    factors = (source, weight) if convention == "rows" else (weight, source)
    set_ = [f"W_{factor[2]}" if factor.startswith("W") else factor for factor in factors]
    return Part(
        name,
        f"{letter} = {' '.join(factors)}",
        f"{letter} = {' '.join(set_)}",
        *_turned(matrix, letter.lower(), convention),
    )


def _turned(matrix: Matrix, letter: str, convention: Convention) -> tuple[Matrix, str, str]:
    """A matrix in its convention, and the letters of its rows and columns."""
    return (matrix, letter, "") if convention == "rows" else (matrix.transposed, "", letter)
