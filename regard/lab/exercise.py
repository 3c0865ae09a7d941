"""The two coding assignments of the course, as notebooks with blanks, hints and checks.

    regard lab exercise multihead      multi-head attention
    regard lab exercise vit            a Vision Transformer, which then learns digits

A notebook is made from a Python file that holds its solution (exercises/notebooks). Its checks
(exercises/multihead.py, exercises/vit.py) recognise common mistakes by their results.
"""

import contextlib
import io
from pathlib import Path

from regard.lab import notebook
from regard.lab.notebook import Cell

EXERCISES = ("multihead", "vit")


def cells(name: str, solved: bool = False) -> list[Cell]:
    """The cells of an exercise, with blanks or with its solution."""
    if name not in EXERCISES:
        raise ValueError(f"exercise ({name!r}) is unknown; choose from {', '.join(EXERCISES)}")
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
    last = max(n for n, cell in enumerate(made) if cell.text.startswith("check."))
    names: dict[str, object] = {"__name__": "__main__"}
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        for cell in made[: last + 1]:
            if cell.kind == "code":
                exec(cell.text.replace(right, wrong) if right else cell.text, names)
    return said.getvalue().splitlines()
