"""`regard lab`: what it lists, runs, prints and writes, and what it says to wrong words."""

import json
import math
import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from regard.cli import main as cli
from regard.lab import claims, perform, run
from regard.lab.claims import FAMILIES, by_family, experiments, lines
from regard.lab.claims.stated import ITEMS, STATED
from regard.lab.commands import lab as command
from regard.lab.commands.results import perform_chosen
from regard.lab.exercise import EXERCISES
from regard.lab.experiment import Experiment, Finding
from regard.lab.perform import Result
from regard.lab.place import SECTIONS
from tests.processes import HANG, children, die, wait_until

ROOT = Path(__file__).parent.parent.parent


def regard(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "regard", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=HANG,
    )


def failing(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Makes an experiment of the list raise."""

    def broken() -> Finding:
        raise ZeroDivisionError("division by zero,\nas it happens")

    everything = tuple(replace(e, run=broken) if e.name == name else e for e in experiments())
    monkeypatch.setattr(claims, "experiments", lambda: everything)


# The experiments


def test_every_item_is_accounted_for() -> None:
    computed = {experiment.item for experiment in experiments()}
    stated = [entry.item for entry in STATED]
    assert computed | set(stated) == set(range(1, ITEMS + 1))
    assert sorted(set(stated)) == stated
    # What is stated beside experiments says which part of the item it is.
    assert {entry.item for entry in STATED if entry.part} == computed & set(stated)


def test_every_experiment_has_a_name_of_its_own() -> None:
    names = [experiment.name for experiment in experiments()]
    names += [family.name for family in FAMILIES]
    assert sorted(name for name in names if names.count(name) > 1) == []
    assert [name for name in names if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name)] == []


def test_there_are_enough_experiments() -> None:
    assert len(experiments()) >= 130


@pytest.mark.parametrize("experiment", experiments(), ids=lambda e: e.name)
def test_an_experiment_says_what_it_is_about(experiment: Experiment) -> None:
    assert experiment.place.section in SECTIONS[experiment.place.document]
    for words in (experiment.taught, experiment.method):
        assert re.search(r"[.?]$", words)
        assert len(re.findall(r"[.?!](?= [A-Z])", words)) < 3
        assert len(words) < 400


def test_the_list_read_from_files_is_that_of_the_experiments() -> None:
    for family, some in lines().items():
        found = by_family()[family.name]
        assert [(e.item, e.name, e.place, e.taught, e.kind) for e in found] == list(some)
    assert set(by_family()) == {family.name for family in FAMILIES}


# Listing


def test_the_list_has_everything(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["lab"]) == 0
    said = capsys.readouterr().out
    assert all(f" {experiment.name} " in said for experiment in experiments())
    assert all(family.title in said for family in FAMILIES)
    assert said.index("Stated, not computed") > max(said.index(e.name) for e in experiments())
    assert not re.search(r" $", said, re.MULTILINE)


def test_the_list_needs_no_torch() -> None:
    script = (
        "import sys; from regard.cli.main import main; main(['lab']); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "False", done.stderr


# Some experiments


def test_one_experiment(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["lab", "equivariance"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "item 15, slides, order" in said
    assert "permutation invariant" in said
    assert "✗ wrong as stated" in said
    assert "That is equivariance" in said


def test_an_item_and_a_family_are_all_that_belongs_to_them() -> None:
    chosen, stated = command._chosen(["15", "equivariance", "81", "symmetry"])
    names = [experiment.name for experiment in chosen]
    expected = [e.name for e in experiments() if e.item == 15]
    expected += [e.name for e in by_family()["symmetry"] if e.item != 15]
    assert names == expected
    assert [entry.item for entry in stated] == [81]


def test_an_item_may_be_computed_and_stated() -> None:
    chosen, stated = command._chosen(["77"])
    assert {experiment.item for experiment in chosen} == {77}
    assert [entry.item for entry in stated] == [77]


def test_an_item_that_is_only_stated(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["lab", "81"]) == 0
    said = capsys.readouterr().out
    assert "1409.0473" in said
    assert "stated, not computed" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["equivarianc"], r"no experiment 'equivarianc': did you mean equivariance"),
        (["zzz"], r"no experiment 'zzz': no name is similar; `regard lab` lists"),
        (["109"], r"no experiment '109'"),
        (["--all", "equivariance"], r"--all and 'equivariance'"),
        (["--plot", "x.svg"], r"--plot draws named experiments"),
        (["equivariance", "--plot", "nowhere/x.svg"], r"--plot nowhere/x.svg: no folder .*nowhere"),
        (["exercise", "vit", "a", "b"], r"regard lab exercise takes a name"),
    ],
)
def test_wrong_words_are_one_line(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["lab", *words]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert re.fullmatch(rf"regard: {said}.*\n", printed.err)


def test_an_unknown_name_is_refused_without_torch() -> None:
    script = "import sys; from regard.cli.main import main; main(['lab', 'x']); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert "torch" not in done.stdout.split()


def test_run_is_for_one() -> None:
    with pytest.raises(ValueError, match=r"'symmetry' is \d+ experiments; run one of"):
        run("symmetry")


def test_an_exercise_is_a_notebook(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["lab", "exercise", "multihead", str(tmp_path)]) == 0
    (written,) = tmp_path.iterdir()
    assert capsys.readouterr().out.startswith(f"{written}: a notebook")
    assert json.loads(written.read_text())["cells"]


# JSON


def test_json_is_all_that_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["lab", "--json", "exercise-1", "equivariance"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [*found] == ["experiments"]
    assert [entry["name"] for entry in found["experiments"]] == ["exercise-1", "equivariance"]
    for entry in found["experiments"]:
        assert [*entry] == [
            "item", "name", "place", "kind", "taught", "computed", "verdict", "true",
            "measurements",
        ]  # fmt: skip
    assert found["experiments"][0]["measurements"]["scores"] == [8, 6, 1]


def test_json_has_no_infinities(results: dict[str, Result]) -> None:
    result = results["exercise-1"]
    measured = {"a": math.inf, "b": [math.nan, 1, True], "c": -math.inf}
    odd = Finding("holds", measured, conclusion="It is so.")
    found = json.loads(command.as_text([replace(result, finding=odd)]))
    assert found["experiments"][0]["measurements"] == {
        "a": "inf",
        "b": ["nan", 1, True],
        "c": "-inf",
    }


# Files


def test_a_plot_is_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "kernel.svg"
    assert cli.main(["lab", "position-kernel", "--plot", str(path)]) == 0
    assert ElementTree.parse(path).getroot().tag == "{http://www.w3.org/2000/svg}svg"
    assert os.listdir(tmp_path) == ["kernel.svg"]
    assert f"{path}: 1 plot\n" in capsys.readouterr().out


def test_no_plot_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "none.svg"
    assert cli.main(["lab", "equivariance", "--json", "--plot", str(path)]) == 2
    assert "there is no plot in equivariance" in capsys.readouterr().err
    assert os.listdir(tmp_path) == []


def test_a_report_replaces_the_old_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "page.html"
    path.write_text("old")
    assert cli.main(["lab", "equivariance", "--report", str(path)]) == 0
    assert path.read_text().startswith("<!doctype html>")
    assert os.listdir(tmp_path) == ["page.html"]


# What goes wrong


def test_one_that_fails_is_a_line_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failing(monkeypatch, "equivariance")
    assert cli.main(["lab", "--json", "exercise-1", "equivariance"]) == 1
    said = capsys.readouterr()
    assert [e["name"] for e in json.loads(said.out)["experiments"]] == ["exercise-1"]
    assert re.fullmatch(
        r"regard: equivariance failed: ZeroDivisionError: division by zero, as it happens "
        r"\(test_command.py, line \d+\)\n",
        said.err,
    )


def test_processes_report_and_fail_alone() -> None:
    (sound,) = claims.find("exercise-1")
    unknown = replace(sound, name="unheard-of")
    found = {found.experiment.name: found for found in perform.perform_all([sound, unknown], 1)}
    assert isinstance(found["exercise-1"], Result)
    assert found["exercise-1"].finding.verdict == "holds"
    assert "ValueError: no experiment 'unheard-of'" in str(found["unheard-of"])


def test_a_process_that_ends_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(perform, "_work", die)
    (sound,) = claims.find("exercise-1")
    found = list(perform.perform_all([sound, replace(sound, name="other")], 1))
    ended = "failed: a worker process ended (exit status 7)"
    for name, failure in zip(("exercise-1", "other"), found, strict=True):
        assert str(failure).startswith(f"{name} {ended}")


@pytest.mark.slow
def test_everything(tmp_path: Path) -> None:
    done = regard("lab", "--all", "--json", "--report", str(tmp_path / "page.html"))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["experiments"]
    assert [entry["name"] for entry in found] == [e.name for e in experiments()]


@pytest.mark.slow
def test_an_interrupt_ends_everything() -> None:
    command = [sys.executable, "-m", "regard", "lab", "--all"]
    group = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    wait_until(lambda: children(group.pid))  # they perform experiments
    os.killpg(group.pid, signal.SIGINT)
    assert group.wait(HANG) == 130
    assert group.stdout is not None
    assert group.stderr is not None
    # Both ends are closed when nobody holds them any more: the processes have ended too.
    assert (group.stdout.read(), group.stderr.read()) == (b"", b"")
    group.stdout.close()
    group.stderr.close()


@pytest.mark.parametrize("names", [("exercise-1",), ("exercise-1", "output-shape")])
def test_few_experiments_have_a_progress_bar_too(
    names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = [experiment for experiment in experiments() if experiment.name in names]
    results, failures = perform_chosen(chosen)
    assert ([r.experiment.name for r in results], failures) == (list(names), [])
    assert capsys.readouterr().err == ""  # to a file or a pipe goes nothing
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal
    perform_chosen(chosen)
    said = capsys.readouterr().err
    assert names[-1] in said
    assert f"{len(names)}/{len(names)}" in said


@pytest.mark.parametrize("fails", [False, True])
def test_an_experiment_computes_with_one_thread(fails: bool) -> None:
    """On a busy machine two of them took seven times as long."""
    seen = []

    def finding() -> Finding:
        seen.append(torch.get_num_threads())
        if fails:
            raise ZeroDivisionError
        return Finding("holds", {}, conclusion="so it is")

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with suppress(ZeroDivisionError):
            perform.perform(replace(experiments()[0], run=finding))
        assert (seen, torch.get_num_threads()) == ([1], 2)
    finally:
        torch.set_num_threads(before)


# Searching


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["heads-and"], "regard lab heads-and-noise"),
        (["causal", "MASK"], "regard lab causal-mask"),
        (["top right half"], "regard lab causal-mask"),
        (["convolutions"], "regard lab answers homework 1.2b"),
        (["stable diffusion"], "regard lab 30"),
        (["your own words"], "regard lab exercise words"),
    ],
)
def test_find(words: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["lab", "--find", *words]) == 0
    assert line in capsys.readouterr().out.splitlines()


def test_find_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["lab", "--find", "colourless", "ideas"]) == 1
    captured = capsys.readouterr()
    assert (captured.out, captured.err.count("\n")) == ("", 1)
    assert captured.err.startswith("regard: nothing in the lab has to do with 'colourless ideas'")


@pytest.mark.parametrize("words", [["exercise"], ["exercise", "--help"]])
def test_exercises_are_listed(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["lab", *words]) == 0
    listed = capsys.readouterr().out
    for name, about in EXERCISES.items():
        assert re.search(rf"^  {name} +{re.escape(about)}$", listed, re.MULTILINE)
