"""What helps: the short help and the long one, short names of settings, completion, the doctor."""

import argparse
import contextlib
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from regard.cli.arguments import setting_names, spelled_out
from regard.cli.completion import Flags, bash, collected, fish, zsh
from regard.cli.main import _parser, main
from regard.cli.train import COMMON, SHORT
from regard.machine.extras import EXTRAS, install
from regard.task.specs import NAMES, spec


def said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with contextlib.suppress(SystemExit):  # --help
        assert main(list(words)) == 0
    return capsys.readouterr().out


# Help


@pytest.mark.parametrize("task", NAMES)
def test_the_short_help_has_what_matters(task: str, capsys: pytest.CaptureFixture[str]) -> None:
    known = set(setting_names(spec(task).config))
    assert {*SHORT[task].split(), *(f"training.{name}" for name in COMMON.split())} <= known
    text = said(capsys, "train", task, "--help")
    flags = [line.split()[0] for line in text.splitlines() if line.startswith("  --")]
    assert len(flags) == len(SHORT[task].split()) + len(COMMON.split())
    assert f"--help-all explains all {len(known)} settings" in text
    assert all(len(line) <= 100 for line in text.splitlines())


def test_the_long_help_has_everything(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "train", "dates", "--help-all")
    for name in setting_names(spec("dates").config):
        *sections, last = name.replace("_", "-").split(".")
        # A switch is shown as --training.tensorboard, --training.no-tensorboard.
        assert f"--{'.'.join([*sections, last])}" in text


READERS = [
    *("check", "compare", "evaluate", "translate", "score", "classify"),
    *("read", "generate", "label", "look", "serve"),
]


@pytest.mark.parametrize("command", READERS)
def test_helps_are_for_readers(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, command, "--help")
    assert text.startswith(f"usage: regard {command} RUN")
    assert all(len(line) <= 100 for line in text.splitlines())
    for sign in ("None", "STR", "INT", "(default: )", "(default: False)", "│"):
        assert sign not in text


def test_every_command_has_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    lines = said(capsys, "--help").partition("\ncommands:\n")[2].splitlines()
    groups = [line for line in lines if re.fullmatch(r"  [A-Z][a-z ]+", line)]
    names = [match[1] for line in lines if (match := re.match(r"    ([a-z]+) +\w", line))]
    assert len(groups) + len(names) == len([line for line in lines if line.strip()])
    assert len(groups) > 3
    (subparsers,) = (a for a in _parser()._actions if isinstance(a, argparse._SubParsersAction))
    assert sorted(names) == sorted(subparsers.choices)


def test_flags_show_what_they_take(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "translate", "--help")
    for flag in ("[FILE ...]", "--beams N ", "--head N N N ", "--tag TAG ...", "--json  "):
        assert flag in text
    assert "-o OUT, --out OUT" in said(capsys, "look", "--help")
    text = said(capsys, "train", "translate", "--help-all")
    for flag in ("--columns COLUMN COLUMN", "--training.betas X X", "--training.no-tensorboard"):
        assert flag in text
    assert "--model.final-norm {True,False}" in text
    assert "--size {tiny,base,big}" in text


# Names


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("--minutes 3", "--training.minutes 3"),
        ("--width=64", "--model.width=64"),
        ("--no-tensorboard", "--training.no-tensorboard"),
        ("--weight_decay 0.1", "--training.weight-decay 0.1"),
        ("--training.lr 1 --lr 2", "--training.lr 1 --training.lr 2"),
        ("--source a.txt minutes", "--source a.txt minutes"),
        ("--epsilon 1", "--epsilon 1"),  # the model has one, and the optimizer
        ("--beams 3", "--beams 3"),
        ("--nonsense", "--nonsense"),
    ],
)
def test_a_clear_name_needs_no_section(given: str, meant: str) -> None:
    assert spelled_out(spec("translate").config, given.split()) == meant.split()


def test_a_setting_that_is_given_in_both_forms_is_given_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(tmp_path / "run")
    assert main(["train", "dates", run, "--minutes", "1", "--training.minutes", "2"]) == 2
    assert "--training.minutes is given twice" in capsys.readouterr().err


# Completion


@pytest.fixture(scope="module")
def flags() -> Flags:
    def run(words: list[str]) -> None:
        options = _parser().parse_args(words)
        options.run(options)

    return collected(run)


def test_completion_knows_every_command_and_task(flags: Flags) -> None:
    commands = set(_parser()._subparsers._group_actions[0].choices)  # type: ignore[union-attr, arg-type]
    assert {name for name in flags if name and " " not in name} == commands
    assert "--n-best" in flags["translate"]
    assert {"--size", "--source", "--training.lr"} <= set(flags["train translate"])
    assert {name for name in flags if " " in name} == {f"train {task}" for task in NAMES}


def test_bash_completes(flags: Flags, tmp_path: Path) -> None:
    if shutil.which("bash") is None:
        pytest.skip("bash is not installed")
    script = tmp_path / "regard.bash"
    script.write_text(bash(flags))
    typed = {
        "regard transl": "translate",
        "regard train dat": "dates",
        "regard translate RUN --n-b": "--n-best",
        "regard train dates RUN --training.warm": "--training.warmup",
    }
    for words, expected in typed.items():
        count = len(words.split()) - 1
        line = f'COMP_WORDS=({words}); COMP_CWORD={count}; _regard; echo "${{COMPREPLY[@]}}"'
        done = subprocess.run(
            ["bash", "-c", f"source {script}; {line}"], capture_output=True, text=True, check=True
        )
        assert done.stdout.strip() == expected


def test_other_shells_have_scripts(flags: Flags) -> None:
    for shell, write in (("zsh", zsh), ("fish", fish)):
        text = write(flags)
        assert "translate" in text
        assert f"regard completion {shell} wrote it" in text


def test_an_unknown_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "powershell"]) == 2
    assert "powershell" in capsys.readouterr().err


# The doctor


def test_the_doctor_looks_at_everything(capsys: pytest.CaptureFixture[str]) -> None:
    lines = said(capsys, "doctor").splitlines()
    marked = [line for line in lines if line[0] in "✓→"]
    assert len(marked) >= 9 + len(EXTRAS)
    findings = json.loads(said(capsys, "doctor", "--json"))
    assert [one["what"] for one in findings][:3] == ["Regard", "torch", "GPU"]
    assert {f"[{extra}]" for extra in EXTRAS} <= {one["what"] for one in findings}


def test_the_doctor_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    findings = {one["what"]: one for one in json.loads(said(capsys, "doctor", "--json"))}
    assert "install g++" in findings["compiler"]["remedy"]
    assert findings["[vision]"]["remedy"] == install("vision")


def test_what_a_score_is_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    """It is length-normalised in n-best lists and JSON; --scores gives log p."""
    text = " ".join(said(capsys, "translate", "--help").split())
    assert "The score, by which they are ranked, is log p / length^penalty" in text
    assert "Unlike the score of --n-best, neither is divided by a length" in text
    assert "each with text and score, which is that of --n-best. --scores adds log_p" in text
