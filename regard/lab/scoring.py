"""How a key is rated, by hand: the dot product, Luong's general and Bahdanau's additive score.

    dot        S = Q Kᵀ
    general    S = Q W Kᵀ                 Luong et al. (2015)
    additive   S = tanh(Q W + K U) v      Bahdanau et al. (2015), for each pair

Vectors are rows; where they are columns, matrices are transposed: W q in place of q W.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from torch import Tensor

from regard.lab.matrix import Cell, Matrix, decimal, dot, shown, signed


class Operations(NamedTuple):
    """The number of multiplications, divisions, additions and functions of single numbers."""

    multiplications: int = 0
    divisions: int = 0
    additions: int = 0
    exponentials: int = 0
    """Exponentials, and hyperbolic tangents, which are made of them."""

    @property
    def figures(self) -> dict[str, int]:
        """By short names, with the total of all but the exponentials."""
        mul, div, add, exp = self
        return {"mul": mul, "div": div, "add": add, "total": mul + div + add, "exp": exp}


def products(rows: int, inner: int, columns: int) -> Operations:
    """Those of a product of matrices: a sum of n products has n - 1 additions."""
    return Operations(rows * columns * inner, 0, rows * columns * max(0, inner - 1))


def together(*counts: Operations) -> Operations:
    return Operations(*map(sum, zip(*counts)))


class Scoring:
    """A score for each pair of a query and a key."""

    equation: ClassVar[tuple[str, str]]
    """With vectors as rows, and as columns."""
    latex: ClassVar[tuple[str, str]]
    sentence: ClassVar[str]
    scaled: ClassVar[bool] = False
    """Whether β is 1/√d by default."""

    def scores(self, query: Tensor, key: Tensor) -> Tensor:
        """Of all pairs, in float64."""
        raise NotImplementedError

    def exactly(self, query: Sequence[Cell], key: Sequence[Cell], rounded: float) -> Cell:
        """The score of one pair, or the rounded one where it is not exact."""
        return rounded

    formula: ClassVar[tuple[str, str]]
    """Of one score, with q and k for its vectors."""

    def terms(self, query: Sequence[Cell], key: Sequence[Cell], digits: int) -> list[str]:
        """What one score is the sum of, in numbers."""
        raise NotImplementedError

    def operations(self, queries: int, keys: int, width: int, key_width: int) -> Operations:
        raise NotImplementedError

    @property
    def matrices(self) -> dict[str, Matrix]:
        """Its own, by name."""
        return {}


class Dot(Scoring):
    """q·k."""

    equation = ("S = Q Kᵀ", "S = Kᵀ Q")
    formula = ("q·k", "k·q")
    latex = (r"S = Q K^\top", r"S = K^\top Q")
    sentence = "The dot product of every query and every key: how well does the key match?"
    scaled = True

    def scores(self, query: Tensor, key: Tensor) -> Tensor:
        return query @ key.T

    def exactly(self, query: Sequence[Cell], key: Sequence[Cell], rounded: float) -> Cell:
        exact = dot(query, key)
        return rounded if isinstance(exact, float) else exact

    def terms(self, query: Sequence[Cell], key: Sequence[Cell], digits: int) -> list[str]:
        return [f"{x}·{y}" for x, y in zip(_numbers(query, digits), _numbers(key, digits))]

    def operations(self, queries: int, keys: int, width: int, key_width: int) -> Operations:
        return products(queries, width, keys)


@dataclass(frozen=True)
class General(Scoring):
    """q W k: a dot product after a map."""

    weight: Matrix

    equation = ("S = Q W Kᵀ", "S = Kᵀ W Q")
    formula = ("(q W)·k", "k·(W q)")
    latex = (r"S = Q W K^\top", r"S = K^\top W Q")
    sentence = "Every query is mapped by W, and compared with every key by a dot product."

    def scores(self, query: Tensor, key: Tensor) -> Tensor:
        wanted = query.shape[1], key.shape[1]
        if self.weight.shape != wanted:
            raise ValueError(
                f"W of a general score is {size(self.weight.shape)} but must be {size(wanted)}, "
                "the widths of query and key"
            )
        return query @ self.weight.tensor() @ key.T

    def exactly(self, query: Sequence[Cell], key: Sequence[Cell], rounded: float) -> Cell:
        return Dot().exactly(_mapped(query, self.weight), key, rounded)

    def terms(self, query: Sequence[Cell], key: Sequence[Cell], digits: int) -> list[str]:
        return Dot().terms(_mapped(query, self.weight), key, digits)

    def operations(self, queries: int, keys: int, width: int, key_width: int) -> Operations:
        return together(products(queries, width, key_width), products(queries, key_width, keys))

    @property
    def matrices(self) -> dict[str, Matrix]:
        return {"W": self.weight}


@dataclass(frozen=True)
class Additive(Scoring):
    """v·tanh(q W + k U)."""

    query_weight: Matrix
    key_weight: Matrix
    vector: Matrix
    """One row."""

    equation = ("S = tanh(Q W + K U) v", "S = vᵀ tanh(W Q + U K)")
    formula = ("v·tanh(q W + k U)", "v·tanh(W q + U k)")
    latex = (
        r"S_{ij} = \tanh(q_i W + k_j U) \cdot v",
        r"S_{ji} = v^\top \tanh(W q_i + U k_j)",
    )
    sentence = "A small network with tanh looks at every pair, and v weighs what it finds."

    def scores(self, query: Tensor, key: Tensor) -> Tensor:
        hidden = self.vector.shape[1]
        for name, matrix, width in (
            ("W", self.query_weight, query.shape[1]),
            ("U", self.key_weight, key.shape[1]),
        ):
            if matrix.shape != (width, hidden):
                whose = "query" if name == "W" else "key"
                raise ValueError(
                    f"{name} of an additive score is {size(matrix.shape)} but must be "
                    f"{size((width, hidden))}: the width of {whose}, and the entries of v"
                )
        mapped = query @ self.query_weight.tensor(), key @ self.key_weight.tensor()
        return (mapped[0][:, None] + mapped[1]).tanh() @ self.vector.tensor()[0]

    def terms(self, query: Sequence[Cell], key: Sequence[Cell], digits: int) -> list[str]:
        mapped = zip(_mapped(query, self.query_weight), _mapped(key, self.key_weight))
        sums = (decimal(float(a) + float(b), digits) for a, b in mapped)
        return [f"{v}·tanh({x})" for v, x in zip(_numbers(self.vector.rows[0], digits), sums)]

    def operations(self, queries: int, keys: int, width: int, key_width: int) -> Operations:
        hidden, pairs = self.vector.shape[1], queries * keys
        maps = together(products(queries, width, hidden), products(keys, key_width, hidden))
        network = Operations(0, 0, pairs * hidden, pairs * hidden)
        return together(maps, network, products(pairs, hidden, 1))

    @property
    def matrices(self) -> dict[str, Matrix]:
        return {"W": self.query_weight, "U": self.key_weight, "v": self.vector}


def _numbers(cells: Sequence[Cell], digits: int) -> list[str]:
    """Numbers of a line of arithmetic, negative ones in parentheses."""
    return [signed(shown(cell, digits)) for cell in cells]


def size(shape: tuple[int, int]) -> str:
    return f"{shape[0]} × {shape[1]}"


def _mapped(vector: Sequence[Cell], matrix: Matrix) -> tuple[Cell, ...]:
    return Matrix((tuple(vector),)).times(matrix).rows[0]
