"""Words that make no sense: one line that names them, before anything is read or computed."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from regard.cli import errors
from regard.cli import main as cli
from regard.cli.main import main
from regard.machine import atomic
from regard.machine.command_line import Parser
from regard.task.specs import spec
from tests.processes import HANG

ROOT = Path(__file__).parents[2]
HUGE = "9" * 30


def refused(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert main([str(word) for word in words]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("regard: ")
    assert captured.err.count("\n") == 1
    return captured.err


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing that is refused leaves anything behind."""
    monkeypatch.chdir(tmp_path)
    yield
    assert not (tmp_path / "RUN").exists()


# Words


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["translte"], "COMMAND ('translte') is unknown; did you mean translate? See regard"),
        (["export", "a", "b", "--to", "x"], "--to ('x') is unknown; choose from ctranslate2, onnx"),
        (["translate", __file__], "is a file; name the folder of a run or of a model"),
        (["train", "translate", "R", "--learning-rate", "1"], "did you mean --training.lr? See"),
        (["translate", "R", "--beam_size=3"], "did you mean --beams? See"),
        (
            ["translate", "R", "--beem", "3", "x"],
            "--beem is unknown; did you mean --beams? See regard translate --help",
        ),
        (
            ["train", "translate", "R", "--minuts", "1"],
            "--minuts is unknown; did you mean --minutes? See regard train translate --help",
        ),
        (["train", "dates", "R", "--sise", "tiny"], "did you mean --size? See"),
        (["train", "dates", "R", "--no-lr"], "did you mean --training.lr? See"),
        (["train", "dates", "R", "more"], "more is one word too many, and belongs to no flag; see"),
        (["train", "--resum", "R"], "--resum is unknown; did you mean --resume? See regard train"),
        (["train", "trnslate"], "task ('trnslate') is unknown; did you mean translate?"),
        (["translate", "R", "--colour=1"], "--colour is unknown; see regard translate --help"),
        (["lab", "--repot", "x"], "--repot is unknown; did you mean --report? See regard lab --h"),
        (["attend", "--masc", "causal"], "--masc is unknown; did you mean --mask? See"),
        (["export", "a", "b", "--too", "vit"], "did you mean --to? See regard export --help"),
        (["quantize", "a", "b", "c"], "c is one word too many; see regard --help"),
        (["--debugg", "lab"], "--debugg is unknown; did you mean --debug? See regard --help"),
        (["translate", ""], "a name is empty (''), perhaps from a variable that is not set"),
        (["translate", "R", "--files", ""], "--files is empty, perhaps"),
        (["translate", "R", "--files="], "--files is empty, perhaps"),
        (["train", "--resume", ""], "--resume is empty"),
        (["export", "R", "", "--to", "vit"], "a name is empty"),
        (["lab", "--report", ""], "--report is empty"),
        (["translate", "R", "\u2014beams", "3"], "has a dash that is not a hyphen; write --beams"),
        (["lab", "-\u2010all"], "has a dash that is not a hyphen; write --all"),
        (["translate", "R\0"], "has a NUL in it"),
        (["translate", "--beams", "3"], "needs a run's or a model's folder, before any flag that"),
        (["translate", "--files", "a", "R"], "needs a run's or a model's folder, before any flag"),
        (["evaluate", "R", "more"], "evaluate takes one folder, R, and more is another word"),
        (["translate", "R", "--beams", "3", "--beams", "4"], "--beams is given twice"),
        (["translate", "R", "--n-best", "3", "--n_best=4"], "--n_best is given twice"),
        (["attend", "-q", "1 2", "--query", "3 4"], "--query is given twice"),
        (["cost", "base", "--batch", "1", "--batch=2"], "--batch is given twice"),
        (
            ["train", "dates", "RUN", "--training.tensorboard", "--training.no-tensorboard"],
            "--training.no-tensorboard is given twice",
        ),
        (["translate", "R", "--beams"], "--beams needs 1 value"),
        (["translate", "R", "--beams", "1e3"], "--beams (1e3) must be a whole number"),
        (["translate", "R", "--head", "1"], "--head (1) must be three whole numbers"),
        (["evaluate", "R", "--columns", "0"], "--columns (0) must be two numbers or names"),
        (["evaluate", "R", "--bleu", "x"], "--bleu ('x') must be one of 13a, None, char, intl,"),
        (["evaluate", "R", "--count", "0"], "count (0) must be 1 or more"),
        (["evaluate", "R", "--count", 10**15], "count (1000000000000000) is too large"),
        (["generate", "R", "--temperature", "-1"], "temperature (-1.0) must be 0 or more"),
        (["generate", "R", "--temperature", "inf"], "temperature (inf) must be a finite number"),
        (["generate", "R", "--top-p", "1.5"], "top_p (1.5) must be above 0 and at most 1"),
        (["generate", "R", "--seed", "-1"], "seed (-1) must be 0 or more"),
        (["generate", "R", "--seed", HUGE], f"seed ({HUGE}) does not fit into 64 bits"),
        (["train", "dates", "RUN", "--training.seed", 2**63], "does not fit into 64 bits"),
        (["train", "dates", "RUN", "--training.seed", -1], "training.seed (-1) must be at least 0"),
        (["train", "dates", "RUN", "--training.steps", 0], "training.steps (0) must be at least 1"),
        (["train", "dates", "RUN", "--training.epsilon", -1], "epsilon (-1.0) must be above 0"),
        (["train", "dates", "RUN", "--training.betas", 1, 2], "betas ((1.0, 2.0)) must be two"),
        (
            ["train", "dates", "RUN", "--model.dropout", "nan"],
            "model.dropout (nan) must be a finite",
        ),
        (["train", "dates", "RUN", "--model.width", 10**12], "the largest that fits is"),
        (["train", "dates", "RUN", "--model.encoder-layers", 10**12], "the largest that fits is"),
        (["train", "dates", "RUN", "--examples", 10**15], "the largest that fits is"),
        (["train", "translate", "RUN", "--length-penalty", "1e300"], "must be from -10 to 10"),
        (["train", "translate", "RUN", "--beams", "9000"], "beams (9000) must be at most 8000"),
        (["train", "translate", "RUN", "--vocabulary", 10**12], "the largest that fits is"),
        (["train", "classify", "RUN", "--pixels", 10**6], "the largest that fits is"),
        (["train", "classify", "RUN", "--pixels", "8", "8", "8"], "--pixels (8 8 8) must be a"),
        (["train", "dates", "RUN", "--training.device", "xla"], 'device ("xla") is not supported'),
        (["train", "dates", "RUN", "--training.device", "cuda:99"], 'device ("cuda:99")'),
        (["attend", "--query", "1e999 2"], "'1e999' in row 1 is not a finite number"),
        (["attend", "--query", "1e1000000000 2"], "'1e1000000000' in row 1 is not a finite"),
        (["attend", "--query", "1e300 2", "--key", "1e300 1"], "are beyond float64"),
        (["attend", "--query", "1 2", "--beta", "1e999"], "beta ('1e999') is not a number"),
        (["attend", "--query", "1 2", "--mask", f"window:{HUGE}"], "has a number beyond"),
        (["attend", "--query", "1 2", "--digits", HUGE], "must be 0 to 15"),
        (["cost", "base", "--length", 10**12], "--length (1000000000000) must be from 1 to"),
        (["cost", "base", "--batch", HUGE], f"--batch ({HUGE}) must be from 1 to"),
        (["cost", "base", "--length", 10**8, "--batch", 10**6], "too many to be counted"),
        (["cost", "layers", "--length", 10**8], "too many to be counted"),
        (["cost", "layers", "--window", 10**12], "--window (1000000000000) must be from 1 to"),
        (["cost", "layers", "--plot", "."], "--plot . is a folder; name a file"),
        (["lab", "cold-limit", "--report", "none/x"], "no folder"),
    ],
)
def test_one_line(words: list[object], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert line in refused(capsys, *words)


def flags(kind: Any, prefix: str = "--") -> Iterator[tuple[str, Any]]:
    for name, hint in get_type_hints(kind).items():
        flag = prefix + name.replace("_", "-")
        if dataclasses.is_dataclass(hint):
            yield from flags(hint, f"{flag}.")
        elif hint in (int, float, int | None, float | None):
            yield flag, hint


@pytest.mark.parametrize("task", ["translate", "classify"])
def test_every_number_of_a_task(task: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = list(flags(spec(task).config))
    assert len(found) > 30
    for n, (flag, hint) in enumerate(found):
        whole = hint in (int, int | None)
        value = (HUGE, "1e12", "nan", "-" + HUGE)[n % 4] if whole else ("nan", "inf", "-inf")[n % 3]
        line = refused(capsys, "train", task, "RUN", f"{flag}={value}")
        name = flag.removeprefix("--")
        assert name in line or name.replace("-", "_").split(".")[-1] in line


def test_a_long_value_is_not_repeated_in_full(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(refused(capsys, "translate", "x" * 100_000)) < 3000


def test_a_parser_of_ones_own_takes_a_flag_once() -> None:
    parser = Parser(prog="it")
    parser.add_argument("--one", "-o")
    assert parser.parse_args(["-o", "1"]).one == "1"
    with pytest.raises(ValueError, match="-o is given twice"):
        parser.parse_args(["--one=2", "-o", "1"])


# A config that a person wrote

OWN = """
task: dates
languages: [en, de]
examples: 60
judged: 20
model: {width: 16, heads: 2, feed_forward: 24, encoder_layers: 1, decoder_layers: 1}
training: {steps: 1, batch: 300, tensorboard: no, lr: 1e-3}
"""


@pytest.mark.usefixtures("unchecked")  # a captured stream is no TextIO to the checks
@pytest.mark.parametrize("ending", ["yaml", "json"])
def test_settings_of_a_file(
    ending: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / f"own.{ending}"
    text = OWN.replace("tensorboard: no", "tensorboard: false")
    if ending == "json":
        import yaml

        text = json.dumps({**yaml.safe_load(text), "training": {"steps": 1, "tensorboard": False}})
    path.write_text(text, encoding="utf-8")
    words = ["train", "--config", path, tmp_path / "new", "--training.batch", 200]
    assert main([str(word) for word in words]) == 0
    config = json.loads((tmp_path / "new" / "config.json").read_text())
    assert config["task"]["config"]["languages"] == ["en", "de"]
    assert (config["model"]["width"], config["model"]["position"]) == (16, "rotary")
    assert (config["training"]["batch"], config["training"]["steps"]) == (200, 1)
    capsys.readouterr()


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (OWN, 'training.tensorboard ("no") must be true or false'),
        ("task: dats", "task ('dats') is unknown"),
        ("task: dates\nsize: huge", "size ('huge') is unknown"),
        ("task: dates\nlangages: [en]", 'the unknown key "langages"; did you mean "languages"?'),
        ("tasks: dates", "is not a run's config.json, and names no task"),
        ("- 1", "is not a run's config.json, and names no task"),
        ("kind: run\ntask: {name: dates}", "is not a run's config.json, and names no task"),
        ("kind: run\ntask: {name: dates, config: {}}", "training (null) must be an object"),
    ],
)
def test_settings_that_are_none(
    text: str, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(text, encoding="utf-8")
    assert line in refused(capsys, "train", "--config", path, "RUN")


# Where things are written


def test_a_device_is_written_to_as_it_is(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No space left on device") as full:
        atomic.write(Path("/dev/full"), "text")
    assert full.value.filename == "/dev/full"
    assert Path("/dev/full").is_char_device()
    with pytest.raises(ValueError, match="is a folder; name a file"):
        atomic.write(tmp_path, "text")
    (tmp_path / "link").symlink_to("file")
    atomic.write(tmp_path / "link", "text")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_text() == "text"
    with pytest.raises(OSError, match="not written: No such file or directory") as absent:
        atomic.write(tmp_path / "none" / "file", "text")
    assert absent.value.filename == str(tmp_path / "none" / "file")


def run(words: list[str], **options: Any) -> subprocess.CompletedProcess[bytes]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        words, env=environment, stderr=subprocess.PIPE, timeout=HANG, check=False, **options
    )


ATTEND = [sys.executable, "-m", "regard", "attend", "--query", "1 2"]


def test_a_full_disk_and_closed_streams() -> None:
    with open("/dev/full", "wb") as full:
        done = run(ATTEND, stdout=full)
    assert (done.returncode, done.stderr) == (2, b"regard: No space left on device\n")
    shell = " ".join([*ATTEND[:-1], "'1 2'"])
    assert run(["sh", "-c", f"{shell} <&- >&- 2>&-"]).returncode == 0
    assert run(["sh", "-c", f"{shell} --beta x <&- >&- 2>&-"]).returncode == 2


# Interrupts and threads


@pytest.mark.parametrize("name", ["dates", "digits", "read", "byhand"])
def test_an_interrupted_demonstration_is_quiet(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*words: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("regard.cli.demo.demo", interrupt)
    monkeypatch.setattr("regard.lab.byhand.demo", interrupt)
    assert main(["demo", name]) == 130
    assert capsys.readouterr() == ("", "")


def test_an_interrupt_in_the_midst_of_an_import_waits_for_its_end() -> None:
    seen = []

    def interrupted() -> None:
        with errors.uninterrupted():
            signal.raise_signal(signal.SIGINT)
            seen.append("the end of the import")

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert seen
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_thread_that_fails_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise KeyError("pears")

    def start(options: object) -> None:
        thread = threading.Thread(target=fail)
        thread.start()
        thread.join()

    monkeypatch.setattr(cli, "_demo", start)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = threading.excepthook
    assert main(["demo"]) == 0
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    assert "a fault of Regard's own (KeyError: 'pears')" in line
    assert threading.excepthook is before


def test_a_flag_of_dashes_and_an_absurd_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "--report (--)" in refused(capsys, "lab", "--report=--")
    monkeypatch.setenv("COLUMNS", HUGE)
    assert f"COLUMNS ({HUGE}) must be below" in refused(capsys, "attend", "--query", "1 2; 3 4")
