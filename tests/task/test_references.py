"""References are compared in the form that tokenizers write."""

import unicodedata
from dataclasses import replace
from pathlib import Path

import pytest

from regard import checkpoint
from regard.cli.main import main
from regard.data.tokenizer import Tokenizer
from regard.task.read import characters_right
from regard.task.search import SearchSettings
from regard.task.text import build_transformer, describe_unwritable, exact
from regard.task.translate import Config, Quality, build, evaluate
from regard.task.translator import Translator
from tests.task.samples import SHAPE, TRAINING, lines

TEXTS = ["zéro ùn", "deûx", "tröis quàtre cïnq sîx sèpt"]


def decompose(texts: list[str]) -> list[str]:
    return [unicodedata.normalize("NFD", text) for text in texts]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = Tokenizer.characters(TEXTS)
    model = build_transformer(SHAPE, (tokenizer, tokenizer), seed=3)
    settings = SearchSettings.of(tokenizer, beams=1, length=20)
    task = {"name": "translate", **settings.__dict__, "banned": list(settings.banned)}
    place = tmp_path_factory.mktemp("models") / "model"
    checkpoint.save(place, model, files={"tokenizer.json": tokenizer.to_bytes()}, task=task)
    return place


def test_decomposed_references_score_as_composed_ones() -> None:
    for written, references in ((TEXTS, decompose(TEXTS)), (decompose(TEXTS), TEXTS)):
        assert Quality()(written, references) == pytest.approx({"bleu": 100, "chrf": 100})
        assert exact(written, references) == {"exact_match": 1}
        assert characters_right(written, references) == 1


def test_evaluation_and_comparison_compose_references(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = Translator.load(folder).translate(TEXTS)
    source = lines(tmp_path / "source", TEXTS)
    target = lines(tmp_path / "target", decompose(written))
    files = {"source": (source,), "target": (target,)}
    result = evaluate(folder, **files)
    assert result.scores["chrf"] == pytest.approx(100)
    assert result.references == [written]
    assert result.remarks == []
    words = ["--source", source, "--target", target]
    assert main(["compare", str(folder), str(folder), *words]) == 0
    assert "100" in capsys.readouterr().out


def test_references_that_no_output_can_equal_are_counted(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = lines(tmp_path / "source", TEXTS)
    target = lines(tmp_path / "target", [TEXTS[0], "deûx w", "wéro"])
    assert main(["evaluate", str(folder), "--source", source, "--target", target]) == 0
    said = capsys.readouterr().err
    assert "regard: 2 of 3 references have what the tokenizer cannot write" in said
    assert "reference 2 is 'deûx w'" in said
    assert describe_unwritable(Tokenizer.bpe(TEXTS, 270), ["deûx w", *decompose(TEXTS)]) == []


def test_training_counts_references_that_no_output_can_equal(tmp_path: Path) -> None:
    config = Config(
        source=(lines(tmp_path / "source", TEXTS * 5),),
        target=(lines(tmp_path / "target", TEXTS * 5),),
        valid_source=(lines(tmp_path / "valid.source", TEXTS),),
        valid_target=(lines(tmp_path / "valid.target", [*TEXTS[:2], "wéro"]),),
        words="characters",
        cache=str(tmp_path / "cache"),
        model=SHAPE,
        training=TRAINING,
    )
    (note,) = build(config).notes
    assert note.startswith("1 of 3 references have what the tokenizer cannot write")
    reused = replace(config, valid_source=config.source, valid_target=config.target)
    (note,) = build(reused).notes
    assert note.startswith(f"{config.source[0]} is used to train and to validate, so scores do not")
    copied = lines(tmp_path / "copy", TEXTS * 5)
    (note,) = build(replace(reused, valid_source=(copied,))).notes
    assert note.startswith(f"{copied} is used to train and to validate")
    good = replace(config, valid_target=(lines(tmp_path / "good", decompose(TEXTS)),))
    assert build(good).notes == []
