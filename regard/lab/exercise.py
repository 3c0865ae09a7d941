"""The coding assignments of the course, and its theory, as notebooks with blanks and checks.

    regard lab exercise                what there is
    regard lab exercise multihead      writes the notebook of one

A notebook is made from a Python file that holds its solution (exercises/notebooks). Its checks
(exercises/multihead.py, vit.py and words.py) recognise common mistakes by their results.
"""

import contextlib
import io
import re
from pathlib import Path

from regard.lab import notebook
from regard.lab.notebook import Cell
from regard.machine.command_line import unknown_name

EXERCISES = {
    "multihead": "multi-head attention, in four small functions",
    "vit": "a Vision Transformer, in four parts, which then learns handwritten digits",
    "words": "attention in your own words: theory, answered by short formulas",
}
"""By name, what is to be done."""


def cells(name: str, solved: bool = False) -> list[Cell]:
    """The cells of an exercise, with blanks or with its solution."""
    if name not in EXERCISES:
        raise ValueError(unknown_name("exercise", name, tuple(EXERCISES)))
    source = Path(__file__).parent / "exercises" / "notebooks" / f"{name}.py"
    return notebook.cells(source.read_text(encoding="utf-8"), blank=not solved)


def write(name: str, folder: Path, solved: bool = False) -> Path:
    """Writes the notebook of an exercise into a folder, and gives its path."""
    made = cells(name, solved)
    path = folder / f"{name}.ipynb"
    if path.exists():
        raise ValueError(f"{path} exists, perhaps with answers in it; move it or name a new folder")
    folder.mkdir(parents=True, exist_ok=True)
    notebook.write(path, made)
    return path


def checked(name: str, right: str = "", wrong: str = "") -> list[str]:
    """What the checks say of the solution, or of it with one thing written wrongly."""
    made = cells(name, solved=True)
    if right and not any(right in cell.text for cell in made):
        raise ValueError(f"{right!r} is not in the solution of {name}")
    if right:
        made = [Cell(cell.kind, cell.text.replace(right, wrong)) for cell in made]
    return carry_out(until_checks(made)).splitlines()


def until_checks(made: list[Cell]) -> list[Cell]:
    """Without what comes after the last check, which trains or draws."""
    last = max(n for n, cell in enumerate(made) if re.search(r"^check\.", cell.text, re.MULTILINE))
    return made[: last + 1]


def carry_out(made: list[Cell]) -> str:
    """What the cells print; each is a file of its own, as in a notebook."""
    names: dict[str, object] = {"__name__": "__main__"}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        for number, cell in enumerate(made):
            if cell.kind == "code":
                exec(compile(cell.text, f"<cell {number}>", "exec"), names)
    return printed.getvalue()
