"""Notebooks that are run here keep what they print and show, and come back as they were."""

import json
from pathlib import Path
from typing import Any

import pytest

from regard.lab import kernel, notebook
from regard.lab.answers.figure import Drawn
from regard.lab.answers.plots import moving_key
from regard.lab.notebook import Cell

CELLS = [
    Cell("markdown", "# A title\n\nwords"),
    Cell("code", "x = 2\nprint('two', x)"),
    Cell("code", "x = x + 1"),
    Cell("code", "print('three')\nx"),
]


def outputs(cell: Cell) -> tuple[dict[str, Any], ...]:
    assert cell.outputs is not None
    return cell.outputs


def test_what_is_printed_and_a_last_value_are_kept() -> None:
    title, printed, silent, both = kernel.run(CELLS)
    assert title == CELLS[0]
    (stream,) = outputs(printed)
    assert stream == {"name": "stdout", "output_type": "stream", "text": ["two 2\n"]}
    assert outputs(silent) == ()
    stream, value = outputs(both)
    assert stream["text"] == ["three\n"]
    assert value["data"] == {"text/plain": ["3"]}
    assert value["execution_count"] == 3


def test_it_comes_back_as_it_was_written(tmp_path: Path) -> None:
    ran, path = kernel.run(CELLS), tmp_path / "one.ipynb"
    notebook.write(path, ran)
    assert notebook.read(path) == ran
    said = json.loads(path.read_text())
    assert [cell.get("execution_count") for cell in said["cells"]] == [None, 1, 2, 3]
    # Once more, the outputs are those of the new run.
    assert kernel.run(notebook.read(path)) == ran


def test_a_value_shows_itself_in_its_own_forms() -> None:
    code = "from regard.lab.answers.figure import Drawn\n"
    code += "from regard.lab.answers.plots import moving_key\nDrawn(moving_key())"
    (shown,) = outputs(kernel.run([Cell("code", code)])[0])
    assert "".join(shown["data"]["image/svg+xml"]) == Drawn(moving_key())._repr_svg_()
    assert set(shown["data"]) == {"image/svg+xml", "text/plain"}


def test_figures_are_kept_and_closed() -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    code = "import matplotlib.pyplot as plt\n_ = plt.subplots(figsize=(1, 1))"
    (shown,) = outputs(kernel.run([Cell("code", code)])[0])
    assert shown["output_type"] == "display_data"
    assert shown["data"]["image/png"].startswith("iVBORw0KGgo")  # a PNG begins so
    assert pyplot.get_fignums() == []


def test_a_notebook_that_fails_is_left_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "one.ipynb"
    notebook.write(path, [Cell("code", "1 / 0")])
    before = path.read_text()
    with pytest.raises(ZeroDivisionError):
        kernel.main([str(path)])
    assert path.read_text() == before
