"""`regard help`: commands, flags and settings by words, without importing torch."""

import subprocess
import sys

import pytest

from regard.cli.arguments import setting_names
from regard.cli.main import _parser, main
from regard.cli.search import rows
from regard.task.specs import NAMES, spec


def said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["help", *words]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["beam", "SIZE"], "regard translate --beams"),
        (["beam size"], "regard train translate RUN --beams"),
        (["learning", "rate"], "regard train TASK RUN --training.lr"),
        (["onnx"], "regard export --to"),
        (["solution sheet"], "regard lab answers --latex"),
        (["handwritten"], "regard train read RUN"),
        (["quantize"], "regard quantize"),
        (["precision", "engine"], "regard translate --verbose"),
        (["resume", "interrupted"], "regard train --resume"),
        (["fine-tune"], "regard train --from"),
        (["rotary"], "regard train translate RUN --model.position"),
    ],
)
def test_what_is_found(words: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert line in said(capsys, *words).splitlines()


def test_what_several_commands_have_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "--verbose")
    assert text.count("--verbose") == 1
    assert "(also score, classify, read, generate, label)" in " ".join(text.split())


def test_no_placeholder_is_shown() -> None:
    assert [text for _, text in rows(_parser()) if "{" in text] == []


def test_its_own_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, "--help").startswith("usage: regard help [WORD ...]")


def test_nothing_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help", "colourless", "ideas"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("regard: no command or flag has to do with 'colourless ideas';")
    assert captured.err.count("\n") == 1


def test_without_words_it_is_the_help_of_all(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys)
    with pytest.raises(SystemExit):
        main(["--help"])
    assert capsys.readouterr().out == text


def test_every_setting_can_be_found() -> None:
    """What is read from the files is what the commands take."""
    flags = {command.rpartition(" ")[2] for command, text in rows(_parser()) if text}
    for task in NAMES:
        settings = {f"--{name}".replace("_", "-") for name in setting_names(spec(task).config)}
        assert settings <= flags


def test_torch_is_not_imported() -> None:
    script = "import sys; from regard.cli.main import main; main(['help', 'lr'])"
    script += "; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.endswith("False\n"), done.stderr
