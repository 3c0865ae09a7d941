"""The precision that is picked if none is requested."""

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from regard import checkpoint
from regard.cli.main import main
from regard.data.tokenizer import Tokenizer
from regard.decode.engine.int8 import library as native
from regard.decode.engine.int8.linear import Int8Linear
from regard.service.models import load_served
from regard.service.translators import ServedTranslator
from regard.task.load import load
from regard.task.precision import Choice, default, load_saved
from regard.task.search import SearchSettings
from regard.task.text import build_transformer
from regard.task.translate import HELD_OUT, Config, build
from tests.task.samples import SHAPE, TRAINING, backwards, lines, sentences, trained

TEXTS = sentences(20)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of a translator with random weights."""
    if native.library() is None:
        pytest.skip(native.missing())
    tokenizer = Tokenizer.bpe(sentences(50), 300)
    model = build_transformer(SHAPE, (tokenizer, tokenizer), seed=3)
    settings = SearchSettings.of(tokenizer, beams=2, length=20)
    task = {"name": "translate", **settings.__dict__, "banned": list(settings.banned)}
    files = {"tokenizer.json": tokenizer.to_bytes()}
    checkpoint.save(tmp_path / "model", model, files=files, task=task)
    return tmp_path / "model"


def outputs(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[str, str]:
    assert main([str(word) for word in words]) == 0
    captured = capsys.readouterr()
    return captured.out, captured.err


def test_output_does_not_depend_on_earlier_runs(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = lines(folder.with_name("line.txt"), TEXTS[:1])
    table = lines(folder.with_name("table.txt"), TEXTS)
    words = ["translate", folder, "--device", "cpu", "--scores", "--files"]
    before = outputs(capsys, *words, line)
    outputs(capsys, *words, table)
    assert outputs(capsys, *words, line) == before
    assert outputs(capsys, *words, line, "--precision", "fp32") == before
    assert outputs(capsys, *words, line, "--precision", "int8") != before


def test_verbose_shows_precision_and_engine_with_reasons(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["translate", folder, "--device", "cpu", "--verbose"]
    words += ["--files", lines(folder.with_name("table.txt"), TEXTS[:1])]
    _, shown = outputs(capsys, *words)
    assert "regard: precision: fp32 (the default on a CPU)\nregard: engine: eager (" in shown
    _, shown = outputs(capsys, *words, "--precision", "int8")
    assert "regard: precision: int8 (requested)\nregard: engine: int8 (" in shown


def test_a_folder_with_8_bit_weights_computes_in_8_bits(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table, small = lines(folder.with_name("table.txt"), TEXTS), folder.with_name("small")
    assert main(["quantize", str(folder), str(small)]) == 0
    rest = ["--files", table, "--device", "cpu"]
    capsys.readouterr()
    want, _ = outputs(capsys, "translate", folder, *rest, "--precision", "int8")
    assert outputs(capsys, "translate", small, *rest)[0] == want
    assert outputs(capsys, "translate", small, *rest, "--precision", "int8")[0] == want
    wide, _ = outputs(capsys, "translate", small, *rest, "--precision", "fp32")
    assert len(wide.splitlines()) == len(TEXTS)

    for place, precision, linear in (
        (folder, "auto", nn.Linear),
        (small, "auto", Int8Linear),
        (small, "fp32", nn.Linear),
        (folder, "int8", Int8Linear),
    ):
        served = load_served("x", place, device="cpu", precision=precision, version=1)  # type: ignore[arg-type]
        saved, choice = load_saved(place, "cpu", precision)  # type: ignore[arg-type]
        assert type(served.model.output) is type(saved.model.output) is linear
        assert choice.precision == ("int8" if linear is Int8Linear else "fp32")


def test_stored_half_precision_is_widened_on_a_cpu(folder: Path) -> None:
    saved = checkpoint.load(folder, dtype=torch.bfloat16)
    files = {"tokenizer.json": (folder / "tokenizer.json").read_bytes()}
    half = folder.with_name("half")
    checkpoint.save(half, saved.model, files=files, task=saved.task)
    for precision in ("auto", "fp32"):
        saved, _ = load_saved(half, "cpu", precision)  # type: ignore[arg-type]
        assert saved.model.output.weight.dtype == torch.float32


def test_the_default_on_a_gpu_is_bfloat16_where_it_is_multiplied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for able, want in (
        (True, Choice("bf16", "the default on cuda")),
        (False, Choice("fp32", "this GPU has no bfloat16")),
    ):
        monkeypatch.setattr("regard.task.precision.multiplies_bfloat16", lambda _, able=able: able)
        assert default(torch.device("cuda")) == want


def test_int8_is_refused_on_other_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regard.task.precision.use", torch.device)
    with pytest.raises(ValueError, match=r"precision \(int8\) .* not cuda; try bf16"):
        load_saved(tmp_path, "cuda", "int8")


OPENED: list[str] = []
"""Files that were opened while `WATCHING` is set."""
WATCHING: list[str] = []


def watch(event: str, arguments: tuple[Any, ...]) -> None:
    if WATCHING and event == "open" and isinstance(arguments[0], str | os.PathLike):
        OPENED.append(os.fspath(arguments[0]))


def test_no_file_that_a_config_names_is_opened(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Otherwise a folder from elsewhere would decide which files of this machine are read."""
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    targets = [backwards(text) for text in TEXTS]
    config = Config(
        source=(lines(foreign / "a", TEXTS),),
        target=(lines(foreign / "b", targets),),
        valid_source=(lines(foreign / "c", TEXTS[:5]),),
        valid_target=(lines(foreign / "d", targets[:5]),),
        vocabulary=280,
        cache=str(foreign / "cache"),
        model=SHAPE,
        training=replace(TRAINING, steps=1),
    )
    run = tmp_path / "run"
    trained(build(config, run), config.training, run)
    assert len((run / HELD_OUT).read_text().splitlines()) > 0
    sys.addaudithook(watch)
    WATCHING.append("")
    try:
        translator: Any = load(run)
        assert translator.find_head([]) is not None
        served: Any = load_served("x", run, device="cpu", precision="auto", version=1)
        assert isinstance(served, ServedTranslator)
        table = lines(tmp_path / "table.txt", TEXTS[:3])
        outputs(capsys, "translate", run, "--files", table, "--align", "--device", "cpu")
    finally:
        WATCHING.clear()
    assert any(name.startswith(str(run)) for name in OPENED)
    assert not [name for name in OPENED if name.startswith(str(foreign))]
