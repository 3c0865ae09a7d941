"""Runs a notebook's cells and keeps what they print and show, for notebooks that ship with outputs.

    python -m regard.lab.kernel examples/*.ipynb

Cells run in this process, one after the other, with the names of those before. Kept are what is
printed, the value of a last expression (as text, HTML or SVG) and Matplotlib's figures. Jupyter,
which would do the same, is not needed to read or run anything here, and so is no dependency.
"""

import ast
import base64
import contextlib
import io
import sys
from pathlib import Path
from typing import Any

from regard.lab import notebook
from regard.lab.notebook import Cell, lines

KINDS = {"text/html": "_repr_html_", "image/svg+xml": "_repr_svg_"}
"""The forms in which a value shows itself, beside its text."""


def run(made: list[Cell]) -> list[Cell]:
    """The cells, with the outputs of this run."""
    names: dict[str, object] = {"__name__": "__main__"}
    ran, count = [], 0
    for number, cell in enumerate(made):
        if cell.kind == "code":
            count += 1
            outputs = tuple(_outputs(cell.text, f"<cell {number}>", names, count))
            cell = cell._replace(outputs=outputs)
        ran.append(cell)
    return ran


def _outputs(code: str, file: str, names: dict[str, object], count: int) -> list[dict[str, Any]]:
    tree = ast.parse(code, file)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    printed, value = io.StringIO(), None
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, file, "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), file, "eval"), names)
    outputs: list[dict[str, Any]] = []
    if printed.getvalue():
        text = lines(printed.getvalue())
        outputs.append({"name": "stdout", "output_type": "stream", "text": text})
    outputs += _figures()
    if value is not None:
        outputs.append(
            {
                "data": _shown(value),
                "execution_count": count,
                "metadata": {},
                "output_type": "execute_result",
            }
        )
    return outputs


def _shown(value: object) -> dict[str, list[str]]:
    """A value in every form that it has."""
    forms = {kind: getattr(value, name)() for kind, name in KINDS.items() if hasattr(value, name)}
    return {kind: lines(text) for kind, text in {**forms, "text/plain": repr(value)}.items()}


def _figures() -> list[dict[str, Any]]:
    """Matplotlib's open figures, which are closed."""
    if "matplotlib.pyplot" not in sys.modules:
        return []
    from matplotlib import pyplot

    shown = []
    for number in pyplot.get_fignums():
        figure, png = pyplot.figure(number), io.BytesIO()
        figure.savefig(png, format="png", dpi=80, bbox_inches="tight", metadata={"Software": None})
        data = {
            "image/png": base64.b64encode(png.getvalue()).decode(),
            "text/plain": [repr(figure)],
        }
        shown.append({"data": data, "metadata": {}, "output_type": "display_data"})
        pyplot.close(figure)
    return shown


def main(paths: list[str]) -> None:
    """Runs notebooks, and writes them with their outputs."""
    if not paths:
        raise SystemExit("name notebooks to run: python -m regard.lab.kernel examples/*.ipynb")
    import matplotlib

    matplotlib.use("Agg")
    for path in map(Path, paths):
        notebook.write(path, run(notebook.read(path)))
        print(path)


if __name__ == "__main__":
    main(sys.argv[1:])
