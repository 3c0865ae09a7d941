"""The notebooks in examples/ run from their first cell to their last, and show what they say; so do
the scripts."""

import contextlib
import io
import json
import re
import runpy
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
import pytest

from regard.lab import kernel, notebook
from tests import checkers
from tests.service import samples

EXAMPLES = Path(__file__).parent.parent / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))
# As readers run them: without checks of annotations, which would take most of the time.
pytestmark = pytest.mark.usefixtures("unchecked")

SMALL = {"STEPS": 2, "EXAMPLES": 100, "JUDGED": 3, "LABELLED": 90}
"""What the constants of a notebook's first cell become, so that it takes no time."""


@pytest.fixture(autouse=True)
def _drawn_nowhere() -> Any:
    matplotlib.use("Agg")
    yield
    plt.close("all")


def carried_out(path: Path, small: bool = True) -> tuple[str, dict[str, Any]]:
    """What a notebook prints, and its variables."""
    names: dict[str, Any] = {"__name__": "__main__"}
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        for number, cell in enumerate(notebook.read(path)):
            if cell.kind == "code":
                code = cell.text
                for name, number in SMALL.items() if small else ():
                    code = re.sub(rf"(?m)^{name} = \S+", f"{name} = {number}", code)
                exec(compile(code, f"<{path.name}, cell {number}>", "exec"), names)
    return said.getvalue(), names


def test_there_are_three() -> None:
    assert [path.stem for path in NOTEBOOKS] == [
        "attention-by-hand",
        "inside-a-vit",
        "train-a-translator",
    ]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_ships_with_its_outputs(path: Path) -> None:
    said = json.loads(path.read_text())
    assert (said["nbformat"], said["nbformat_minor"]) == (4, 5)
    assert said["metadata"]["kernelspec"]["name"] == "python3"
    assert said["cells"][0]["source"][0].startswith("# ")
    code = [cell for cell in said["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    for cell in code:
        assert cell["outputs"] or "print(" not in "".join(cell["source"])
        printed = "".join("".join(output.get("text", "")) for output in cell["outputs"])
        assert not re.search(r"/(?:tmp|home|root|Users)/", printed)
    # Written by our own writer: opened and saved elsewhere, it should come out the same.
    text = json.dumps(notebook.to_json(notebook.read(path)), ensure_ascii=False, indent=1)
    assert path.read_text() == text + "\n"


def test_attention_by_hand() -> None:
    said, names = carried_out(EXAMPLES / "attention-by-hand.ipynb")
    differences = [float(x) for x in re.findall(r"difference.*: (\S+)", said)]
    assert len(differences) == 2
    assert max(differences) < 1e-14
    assert "total     mul  30  div  12  add  22  total  64  exp   6" in said
    assert "β = inf   1.000 0.000 0.000" in said
    assert "3√2/2" in names["found"]._repr_html_()


def test_the_outputs_are_what_the_notebook_gives() -> None:
    path = EXAMPLES / "attention-by-hand.ipynb"
    for shipped, ran in zip(notebook.read(path), kernel.run(notebook.read(path))):
        kinds, now = ([_forms(output) for output in cell.outputs or ()] for cell in (shipped, ran))
        assert kinds == now


def _forms(output: dict[str, Any]) -> object:
    """The text that is printed, without the last digits of small numbers; otherwise the forms."""
    printed = "".join(output.get("text", ""))
    return re.sub(r"\d\.\d+e-\d+|\b0\.0$", "0", printed, flags=re.M) or sorted(output["data"])


def test_train_a_translator(capfd: pytest.CaptureFixture[str]) -> None:
    said, names = carried_out(EXAMPLES / "train-a-translator.ipynb")
    assert "parameters" in said
    assert said.count("last layer, head") == names["config"].model.heads
    assert len(names["texts"]) == 4
    assert names["found"].keys() == {"from scratch", "started"}


def test_inside_a_vit(capfd: pytest.CaptureFixture[str]) -> None:
    said, names = carried_out(EXAMPLES / "inside-a-vit.ipynb")
    (difference,) = re.findall(r"largest difference: (\S+)", said)
    assert float(difference) < 1e-5
    assert names["attended"].shape == (5, 6, 16)
    assert len(plt.get_fignums()) == 2
    assert "right without positions" in said


@pytest.mark.slow
def test_the_translator_learns(capfd: pytest.CaptureFixture[str]) -> None:
    said, names = carried_out(EXAMPLES / "train-a-translator.ipynb", small=False)
    assert names["result"].best > 0.9
    assert "1990-10-03" in said
    assert names["found"]["started"] > names["found"]["from scratch"] + 0.02


@pytest.mark.slow
def test_the_vision_transformer_learns(capfd: pytest.CaptureFixture[str]) -> None:
    said, names = carried_out(EXAMPLES / "inside-a-vit.ipynb", small=False)
    assert names["result"].best > 0.9
    without = float(re.findall(r"([\d.]+)% right without", said)[0])
    assert without < 100 * names["result"].best - 10


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("runs")
    samples.translator(place / "translator")
    samples.classifier(place / "classifier")
    (place / "picture.png").write_bytes(samples.picture(0))
    return place


@pytest.mark.parametrize(
    ("script", "words", "shown"),
    [
        ("attention_and_masks", [], r"torch.Size\(\[2, 4, 6, 8\]\) True"),
        ("record_attention", [], r"decoder\.blocks\.3\.cross \(2, 4, 5, 7\)"),
        ("train_your_module", ["run"], r"accuracy 0\.\d+"),
        (
            "use_a_run",
            ["translator", "classifier", "picture.png"],
            r"(?s)^Translator\('translator'.*\n\[.*\]\n.*Written\(.*\n[v-z] 0\.\d\d$",
        ),
        ("import_weights", [], r"True\n\d+"),
        ("check_a_model", [], r"✓ packed = padded"),
    ],
)
def test_scripts_run(
    script: str,
    words: list[str],
    shown: str,
    runs: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = EXAMPLES / f"{script}.py"
    monkeypatch.chdir(runs)
    monkeypatch.setattr("sys.argv", [str(path), *words])
    runpy.run_path(str(path), run_name="__main__")
    assert re.search(shown, capsys.readouterr().out.strip())


def test_every_script_is_tested() -> None:
    parameters = test_scripts_run.pytestmark[0].args[1]  # type: ignore[attr-defined]
    assert {script for script, _, _ in parameters} == {path.stem for path in EXAMPLES.glob("*.py")}


@pytest.mark.slow
def test_both_type_checkers_accept_the_scripts_and_find_deliberate_errors() -> None:
    """`make lint` does the same."""
    pytest.importorskip("mypy")
    pytest.importorskip("basedpyright")
    assert checkers.main() == 0
