"""The commands that train, score and use models, and the demonstrations."""

import io
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image

from regard.cli import demo
from regard.cli.main import main
from regard.cli.train import _from_run, _parse_config, run_settings, run_training
from regard.task import classify, dates
from regard.task.settings import Preset
from regard.task.specs import NAMES, spec

QUICK = [
    *("--languages", "en", "de", "--examples", "60", "--judged", "20"),
    *("--model.width", "16", "--model.heads", "2", "--model.feed-forward", "24"),
    *("--model.encoder-layers", "1", "--model.decoder-layers", "1"),
    *("--training.steps", "3", "--training.batch", "300", "--training.no-tensorboard"),
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "quick"
    assert main(["train", "dates", str(folder), *QUICK]) == 0
    return folder


def said(capsys: pytest.CaptureFixture[str], *words: object, status: int = 0) -> str:
    assert main([str(word) for word in words]) == status
    captured = capsys.readouterr()
    if status:
        assert captured.err.startswith("regard: ")
        assert captured.err.count("\n") == 1
    return captured.err if status else captured.out


def test_the_overview_names_every_task(capsys: pytest.CaptureFixture[str]) -> None:
    overview = said(capsys, "train")
    assert overview == said(capsys, "train", "--help")
    for name in NAMES:
        assert spec(name).name == name
        assert f"  {name} " in overview
        assert spec(name).summary in overview


def test_the_help_has_the_words_that_users_of_other_tools_look_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = " ".join(said(capsys, "train", "translate", "--help-all").lower().split())
    missing = [term for term in TERMS if term not in text]
    assert not missing


TERMS = [
    *("learning rate", "warm-up", "schedule", "weight decay", "gradient clipping", "norm"),
    *("label smoothing", "dropout", "activation function", "attention heads", "feed-forward"),
    *("layers", "embedding", "vocabulary", "beam size", "length penalty", "bleu", "sacrebleu"),
    *("gradient accumulation", "batch", "tokens", "epoch", "checkpoint", "early stopping", "seed"),
    *("mixed precision", "bf16", "fine-tune", "validation", "tensorboard", "optimizer", "adam"),
    *("compile", "subword", "bpe", "sequence length", "position"),
]


def test_debug_shows_the_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "nowhere" in said(capsys, "evaluate", tmp_path / "nowhere", status=2)
    with pytest.raises(ValueError, match="nowhere"):
        main(["--debug", "evaluate", str(tmp_path / "nowhere")])


def test_cards_show_the_task_s_command(run: Path) -> None:
    card = (run / "best" / "README.md").read_text()
    assert 'echo "3. Oktober 1990" | regard translate best' in card


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["train", "dats", "R"], "task ('dats') is unknown; did you mean dates?"),
        (["train", "dates"], "train needs a folder for the run: regard train dates RUN"),
        (["train", "dates", "R", "--size", "huge"], "size ('huge') is unknown; choose from tiny,"),
        (["train", "dates", "R", "--lst", "3"], "--lst is unknown; did you mean --last? See"),
        (["train", "dates", "R", "--last", "x"], "--last ('x') must be a whole number"),
        (["train", "dates", "R", "--training.lr", "-1"], "lr (-1.0) must be above 0"),
        (["train", "dates", "R", "--languages", "xx"], "languages has xx, which CLDR does not"),
        (["train", "--again", "R"], "--again needs RUN and NEW"),
        (["train", "--again", "nowhere", "R"], "nowhere does not exist"),
        (["evaluate"], "evaluate needs a run's or a model's folder"),
        (["evaluate", "nowhere"], "nowhere does not exist"),
        (["translate"], "translate needs a run's or a model's folder"),
        (["classify"], "classify needs a run's or a model's folder"),
    ],
)
def test_wrong_words_get_one_line(
    words: list[str], line: str, capsys: pytest.CaptureFixture[str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert line in said(capsys, *words, status=2)


def test_help_explains_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "train", "dates", "--help-all")
    for flag in ("--languages", "--model.width", "--training.lr", "--training.precision"):
        assert flag in text
    assert "d_model" in text


@pytest.mark.usefixtures("unchecked")  # a captured stream is no TextIO to the checks
@pytest.mark.parametrize(
    ("flags", "size", "warmup"),
    [
        ([], "tiny", 100),
        (["--minutes", "60"], "tiny", 100),
        (["--minutes", "10"], "tiny", 50),
        (["--minutes", "1"], "tiny", 30),
        (["--training.steps", "40"], "tiny", 8),
        (["--steps", "40", "--warmup", "39"], "tiny", 39),
        (["--steps", "40", "--training.warmup=39"], "tiny", 39),
        (["--steps", "40"], "base", 4000),  # noam's peak depends on it
    ],
)
def test_a_short_run_has_a_short_warm_up(flags: list[str], size: Preset, warmup: int) -> None:
    flags = [*flags, "--training.device", "cpu"]
    assert _parse_config(spec("translate"), size, flags, {}).training.warmup == warmup


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("task", "flags", "lr"),
    [
        ("translate", [], 0.01),
        ("translate", ["--optimizer", "adamw"], 0.0015),
        ("translate", ["--training.optimizer=adam"], 0.0015),
        ("translate", ["--optimizer", "adamw", "--lr", "0.004"], 0.004),
        ("classify", ["--optimizer", "muon"], 0.02),
    ],
)
def test_another_optimizer_has_a_rate_that_suits_it(task: str, flags: list[str], lr: float) -> None:
    found = _parse_config(spec(task), "tiny", [*flags, "--training.device", "cpu"], {}).training
    assert found.lr == pytest.approx(lr)


def test_a_run_that_is_repeated_with_another_optimizer_too(run: Path, tmp_path: Path) -> None:
    _, before = run_settings(run)
    words = [str(run), str(tmp_path / "again"), "--optimizer", "adamw"]
    _, after, _ = _from_run("--again", words)
    assert before.training.optimizer == "muon"
    assert after.training.lr == pytest.approx(before.training.lr * 0.15)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("task", "flags", "limits"),
    [
        ("classify", [], (600, None, None)),
        ("classify", ["--epochs", "25"], (None, 25, None)),
        ("classify", ["--training.epochs=25", "--minutes", "3"], (None, 25, 3)),
        ("translate", ["--steps", "40"], (40, None, None)),
        ("translate", ["--lr", "0.1"], (None, None, 20)),
    ],
)
def test_limits_take_the_place_of_the_presets(
    task: str, flags: list[str], limits: tuple[float | None, ...]
) -> None:
    found = _parse_config(spec(task), "tiny", [*flags, "--training.device", "cpu"], {}).training
    assert (found.steps, found.epochs, found.minutes) == limits


def test_a_run_is_repeated_from_its_own_config(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task, config = run_settings(run)
    assert (task.name, config.languages, config.model.width) == ("dates", ("en", "de"), 16)
    said(capsys, "train", "--again", run, tmp_path / "again")
    first, second = (folder / "last" / "model.safetensors" for folder in (run, tmp_path / "again"))
    assert first.read_bytes() == second.read_bytes()


def test_scores(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = dict(line.split()[:2] for line in said(capsys, "evaluate", run).splitlines())
    assert 0 <= float(lines["exact_match"]) <= 1
    data = json.loads(said(capsys, "evaluate", run, "--json"))
    assert data["scores"].keys() == lines.keys()
    assert "--pairs is not an option of the task dates" in said(
        capsys, "evaluate", run, "--pairs", "x.tsv", status=2
    )


def test_scores_on_data_of_ones_own(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "exact_match" in said(capsys, "evaluate", run, "--count", 7)
    line = said(capsys, "evaluate", run, "--images", tmp_path, status=2)
    assert "--images is not an option of the task dates" in line


def test_a_run_is_exported_as_its_best_model(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = said(capsys, "export", run, tmp_path / "out", "--to", "vit", status=2)
    assert "Transformer" in line
    assert "does not exist" not in line


@pytest.mark.usefixtures("unchecked")  # a captured stream is no TextIO to the checks
def test_an_interrupted_demonstration_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = dates.preset("tiny")
    small = replace(config, languages=demo.SHOWN, examples=200, judged=100)
    small = replace(small, training=replace(config.training, steps=3, tensorboard=False))
    monkeypatch.setattr(dates, "preset", lambda size: small)
    run = tmp_path / "run"
    run_training(dates.TASK, small, run)
    assert demo.finished(run)
    numbers = run / "last" / "training.json"
    numbers.write_text(numbers.read_text().replace('"step": 3', '"step": 2'))
    assert (run / "report.md").is_file()
    assert not demo.finished(run)
    numbers.unlink()
    assert not demo.finished(run)


def test_a_line_for_each_line(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = b"1 May 2001\n\nno UTF-8: \xc3\xbf\n\x00\x07\nlast without an end"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(given)))
    lines = said(capsys, "translate", run, "--beams", "2").split("\n")
    assert len(lines) == 6
    assert lines[1] == ""
    assert lines[-1] == ""


def test_the_wrong_kind_of_model(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = "holds a Translator, not a Generator; its command is regard translate"
    assert wrong in said(capsys, "generate", run, status=2)


def test_a_folder_of_runs(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = f"{run.parent} is no run and no model; name one in it: {run}"
    assert wrong in said(capsys, "translate", run.parent, status=2)


@pytest.mark.usefixtures("unchecked")  # a captured stream is no TextIO to the checks
def test_the_dates_demonstration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = dates.preset("tiny")
    small = replace(config, languages=demo.SHOWN, examples=200, judged=100)
    small = replace(small, training=replace(config.training, steps=2, tensorboard=False))
    monkeypatch.setattr(dates, "preset", lambda size: small)
    demo.demo("dates", tmp_path / "run")
    shown = capsys.readouterr().out
    assert "Exact match on 100 other held-out dates:" in shown
    assert shown.count("Where head") == 2
    demo.demo("dates", tmp_path / "run")
    assert "was trained before" in capsys.readouterr().out


@pytest.mark.usefixtures("unchecked")  # a captured stream is no TextIO to the checks
def test_the_digits_demonstration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = classify.preset("tiny")
    small = replace(config, training=replace(config.training, steps=2, tensorboard=False))
    monkeypatch.setattr(classify, "preset", lambda size: small)
    demo.demo("digits", tmp_path / "run")
    shown = capsys.readouterr().out
    assert "Right on 359 held-out digits, which chose its best step:" in shown
    assert "█" in shown


def test_the_head_that_copies_is_found() -> None:
    weights = torch.zeros(2, 3, 2, 4)
    weights[..., 0] = 1
    weights[1, 2] = torch.tensor([[0.0, 0, 1, 0], [0, 1, 0, 0]])
    assert demo.copying(weights, ["a", "b", "c", "d"], ["c", "b"]) == (1, 2)


@pytest.mark.usefixtures("unchecked")  # a captured stream is no TextIO to the checks
def test_a_run_is_resumed_with_nothing_but_its_folder(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said(capsys, "train", "--config", run / "config.json", tmp_path / "new")
    assert "5 steps" in said(capsys, "train", "--resume", tmp_path / "new", "--training.steps", 5)
    assert "4 steps" in said(
        capsys, "train", "--again", run, tmp_path / "other", "--training.steps", 4
    )


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--resume"], "--resume needs RUN: regard train --resume RUN"),
        (["--again", "RUN"], "--again needs RUN and NEW"),
        (["--again", "RUN", "RUN"], "--again needs a new folder"),
        (["--from", "RUN", "RUN/../quick"], "--from needs a new folder"),
        (["--from", "RUN", "new"], "cannot be fine-tuned"),
        (["--config", "RUN/best/config.json", "new"], "is not a run's config.json"),
        (["dates", ""], "a name is empty (''), perhaps from a variable that is not set"),
    ],
)
def test_runs_that_cannot_begin(
    words: list[str], line: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(run.rglob("*"))
    words = [word.replace("RUN", str(run)) for word in words]
    assert line in said(capsys, "train", *words, status=2)
    assert sorted(run.rglob("*")) == before


def test_a_folder_of_the_user_s_is_not_written_into(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "report.md").write_text("my own")
    line = said(capsys, "train", "dates", mine, *QUICK, status=2)
    assert "not empty (it has report.md)" in line
    assert [path.name for path in mine.iterdir()] == ["report.md"]
    assert "is a file" in said(capsys, "train", "dates", mine / "report.md", *QUICK, status=2)
    assert "not a run" in said(capsys, "train", "dates", "/", *QUICK, status=2)


@pytest.mark.usefixtures("unchecked")  # a captured stream is no TextIO to the checks
def test_one_bad_picture_among_many_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = classify.preset("tiny")
    config = replace(config, training=replace(config.training, steps=1, tensorboard=False))
    run_training(classify.TASK, config, tmp_path / "run")
    capsys.readouterr()
    Image.new("L", (8, 8)).save(tmp_path / "good.png")
    (tmp_path / "bad.png").write_text("no image")
    pictures = [str(tmp_path / name) for name in ("good.png", "bad.png", "none.png", "good.png")]
    assert main(["classify", str(tmp_path / "run"), *pictures]) == 1
    captured = capsys.readouterr()
    assert [line.split("\t")[0] for line in captured.out.splitlines()] == [pictures[0]] * 2
    assert [line[:17] for line in captured.err.splitlines()] == ["regard: left out:"] * 2
