"""Jupyter notebooks from Python files whose cells begin with `# %%`.

    # %% [markdown]
    # Text, behind a hash.
    # %%
    code = "as usual"
    # blank: A hint.
    answer = 42
    # end
    short = "6 * 7"  # fill: A hint.

Between `# blank:` and `# end` stands a solution, before `# fill:` a short one. An exercise keeps
the hint and drops the solution; a solved notebook does the opposite. What comes before the first
cell is left out.
"""

import json
import re
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

from regard.machine import atomic

Kind: TypeAlias = Literal["markdown", "code"]


class Cell(NamedTuple):
    kind: Kind
    text: str
    outputs: tuple[dict[str, Any], ...] | None = None
    """As the notebook keeps them; None if the cell has not been run."""


def cells(text: str, blank: bool = False) -> list[Cell]:
    """The cells of a Python file, with blanks or with the solutions."""
    made = []
    for part in re.split(r"^# %%", text, flags=re.MULTILINE)[1:]:
        head, _, body = part.partition("\n")
        kind: Kind = "markdown" if "[markdown]" in head else "code"
        if kind == "markdown":
            body = re.sub(r"^# ?", "", body, flags=re.MULTILINE)
        else:
            body = _blanked(body) if blank else _solved(body)
        made.append(Cell(kind, body.strip("\n")))
    return made


_BLANK = re.compile(r"^( *)# blank: (.*)\n((?:.*\n)*?)\1# end\n", re.MULTILINE)


_FILL = re.compile(r'^( *\w+ = )"(.*)"  # fill: (.*)$', re.MULTILINE)


def _blanked(code: str) -> str:
    """The hint in place of each solution, and an error, or "?", if it is run unchanged."""
    code = _BLANK.sub(r'\1# Your turn: \2\n\1raise NotImplementedError("still blank")\n', code)
    return _FILL.sub(r'\1"?"  # \3', code)


def _solved(code: str) -> str:
    return _FILL.sub(r'\1"\2"', _BLANK.sub(r"\3", code))


def to_json(made: list[Cell]) -> dict[str, Any]:
    """A notebook in format 4.5."""
    return {
        "cells": [_cell(number, cell, made) for number, cell in enumerate(made)],
        "metadata": {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        },
        "nbformat": 4,
        "nbformat_minor": 5,
    }


def _cell(number: int, cell: Cell, made: list[Cell]) -> dict[str, Any]:
    data: dict[str, Any] = {"cell_type": cell.kind, "id": f"cell-{number}", "metadata": {}}
    if cell.kind == "code":
        run = sum(each.outputs is not None for each in made[: number + 1])
        count = None if cell.outputs is None else run
        data |= {"execution_count": count, "outputs": list(cell.outputs or ())}
    return data | {"source": lines(cell.text)}


def lines(text: str) -> list[str]:
    """A text as a notebook keeps it."""
    return text.splitlines(keepends=True)


def write(path: Path, made: list[Cell]) -> None:
    atomic.write(path, json.dumps(to_json(made), ensure_ascii=False, indent=1) + "\n")


def read(path: Path) -> list[Cell]:
    """The cells of a notebook, with what they have put out."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    return [
        Cell(
            cell["cell_type"],
            "".join(cell["source"]),
            None if cell.get("execution_count") is None else tuple(cell["outputs"]),
        )
        for cell in notebook["cells"]
    ]
