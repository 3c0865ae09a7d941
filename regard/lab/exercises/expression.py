"""Short formulas as one types them, evaluated without `eval`: numbers, names, matrices.

    n_q n_k (d_k + d_v)      1/√d      -∞      V @ softargmax(beta * K.T @ Q)

A name stands for a number or a matrix that the caller gives. What a formula may contain is listed
in `_value`; anything else is refused by name.
"""

import ast
import math
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

LONGEST = 200
"""Characters."""

_WRITTEN = {
    "∞": "inf", "β": "beta", "δ": "delta", "α": "alpha", "π": "pi", "·": "*", "×": "*", "−": "-",
    "^": "**", "²": "**2", "³": "**3", "ᵀ": ".T", "₁": "_1", "₂": "_2",
}  # fmt: skip
_NUMBERS = {"inf": math.inf, "infinity": math.inf, "oo": math.inf, "pi": math.pi, "e": math.e}
_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
    ast.MatMult: operator.matmul,
}
_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sqrt": torch.sqrt,
    "exp": torch.exp,
    "log": torch.log,
    "sin": torch.sin,
    "cos": torch.cos,
    "softargmax": lambda x: torch.softmax(x, -2),
    "softmax": lambda x: torch.softmax(x, -1),
}
"""softargmax acts on columns, softmax on rows, as the documents have it."""


def evaluate(text: str, names: Mapping[str, Tensor]) -> Tensor:
    """The value of a formula; a ValueError says what is wrong with it."""
    if len(text) > LONGEST:
        raise ValueError(f"{len(text)} characters are too many for a short formula ({LONGEST})")
    try:
        tree = ast.parse(_spelled_out(text), mode="eval")
    except SyntaxError:
        raise ValueError(
            f"{text!r} is not a formula; write it like n_q * n_k or 1/sqrt(d)"
        ) from None
    try:
        return _value(tree.body, names)
    except (RuntimeError, IndexError):
        raise ValueError(f"the shapes in {text!r} do not fit together") from None


def _spelled_out(text: str) -> str:
    """In Python's signs, and with the multiplications that are not written."""
    for sign, word in _WRITTEN.items():
        text = text.replace(sign, word)
    text = re.sub(r"√\s*(\w+)", r"sqrt(\1)", text).replace("√", "sqrt")
    text = re.sub(r"(?<=[\w)])\s+(?=\w)", " * ", text.strip())
    return re.sub(r"(?<![\w.])(\d+(?:\.\d+)?)(?=[A-Za-z(])", r"\1*", text)


def _value(node: ast.expr, names: Mapping[str, Tensor]) -> Tensor:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return torch.tensor(float(number), dtype=torch.float64)
        case ast.Name(id=name) if name in names:
            return names[name]
        case ast.Name(id=name) if name in _NUMBERS:
            return torch.tensor(_NUMBERS[name], dtype=torch.float64)
        case ast.Name(id=name):
            raise ValueError(f"{name} is unknown here; use {', '.join(names)}")
        case ast.UnaryOp(op=ast.USub(), operand=one):
            return -_value(one, names)
        case ast.UnaryOp(op=ast.UAdd(), operand=one):
            return _value(one, names)
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _OPERATORS:
            result: Tensor = _OPERATORS[type(sign)](_value(left, names), _value(right, names))
            return result
        case ast.Attribute(value=matrix, attr="T"):
            return _value(matrix, names).mT
        case ast.Call(func=ast.Name(id=name), args=[inside], keywords=[]) if name in _FUNCTIONS:
            return _FUNCTIONS[name](_value(inside, names))
        case ast.Call(func=ast.Name(id=name)) if name not in names:
            raise ValueError(
                f"{name}(…) is unknown here; use {', '.join(_FUNCTIONS)}, of one thing"
            )
        case ast.Call(func=factor, args=[inside], keywords=[]):  # n (m - 1), a product
            return _value(factor, names) * _value(inside, names)
        case _:
            raise ValueError(f"{ast.unparse(node)!r} is more than a short formula may contain")
