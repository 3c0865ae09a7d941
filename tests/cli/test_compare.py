"""Runs beside each other: sacrebleu's scores, and whether their difference is chance."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from sacrebleu.metrics.bleu import BLEU

from regard import checkpoint
from regard.cli.main import main
from regard.data.tokenizer import Tokenizer
from regard.task.load import load
from regard.task.search import SearchSettings
from regard.task.text import build_transformer
from regard.task.translate import evaluate
from tests.task.samples import SHAPE, lines, sentences

TEXTS = sentences(30)


def translator(place: Path, seed: int) -> Path:
    tokenizer = Tokenizer.bpe(sentences(50), 300)
    model = build_transformer(replace(SHAPE, decoder_layers=2), (tokenizer, tokenizer), seed)
    settings = SearchSettings.of(tokenizer, beams=1, length=12)
    task = {"name": "translate", **settings.__dict__, "banned": list(settings.banned)}
    checkpoint.save(place, model, files={"tokenizer.json": tokenizer.to_bytes()}, task=task)
    return place


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("runs")
    return [translator(folder / f"run{seed}", seed) for seed in (1, 2)]


@pytest.fixture
def test_set(tmp_path: Path, runs: list[Path]) -> list[str]:
    """References that are nearly what the first run writes."""
    written = load(runs[0]).translate(TEXTS)
    rng = random.Random(0)
    wanted = [text if rng.random() < 0.7 else f"{text} ab cd" for text in written]
    source = lines(tmp_path / "test.a", TEXTS)
    return ["--source", source, "--target", lines(tmp_path / "test.b", wanted), "--device", "cpu"]


def test_the_worse_run_is_found_out(
    runs: list[Path], test_set: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["compare", *map(str, runs), *test_set, "--samples", "200"]
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    first, second = found["systems"]
    assert first["p"] == {"bleu": None, "chrf": None}
    assert second["scores"]["bleu"] < first["scores"]["bleu"]
    assert second["p"]["bleu"] < 0.05
    source, target = test_set[1], test_set[3]
    alone = evaluate(runs[1], source=[source], target=[target])
    assert second["scores"]["bleu"] == pytest.approx(alone.scores["bleu"])
    assert second["scores"]["chrf"] == pytest.approx(alone.scores["chrf"])
    assert "nrefs:1" in found["notes"]["bleu"]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "significant" in said
    assert said.splitlines()[0].startswith(str(runs[0]))


def test_a_run_beside_itself_is_no_better(
    runs: list[Path], test_set: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["compare", str(runs[0]), str(runs[0]), *test_set, "--samples", "50", "--json"]
    assert main(words) == 0
    first, second = json.loads(capsys.readouterr().out)["systems"]
    assert first["scores"] == second["scores"]
    assert second["p"] == {"bleu": 1.0, "chrf": 1.0}


def test_what_cannot_be_compared(
    runs: list[Path], capsys: pytest.CaptureFixture[str], test_set: list[str]
) -> None:
    for words, said in (
        ([str(runs[0]), *test_set], "compare needs two runs or more"),
        ([*map(str, runs)], "does not say what to translate; name files"),
        ([str(runs[0]), "none", *test_set], "none does not exist"),
        ([*map(str, runs), *test_set, "--samples", "0"], "samples (0) must be 1 or more"),
    ):
        assert main(["compare", *words]) == 2
        assert said in capsys.readouterr().err


def test_case_and_more_references(runs: list[Path], test_set: list[str], tmp_path: Path) -> None:
    source, target = test_set[1], test_set[3]
    wanted = Path(target).read_text(encoding="utf-8").splitlines()
    loud = lines(tmp_path / "loud.b", [text.upper() for text in wanted])
    files = {"source": [source], "target": [loud]}
    lowered = evaluate(runs[0], **files, lowercase=True)  # type: ignore[arg-type]
    plain = evaluate(runs[0], source=[source], target=[target])
    assert "case:lc" in lowered.signatures["bleu"]
    want = BLEU(lowercase=True).corpus_score(plain.translations, [wanted]).score
    assert lowered.scores["bleu"] == pytest.approx(want)
    more = evaluate(runs[0], **files, references=[target])  # type: ignore[arg-type]
    assert "nrefs:2" in more.signatures["bleu"]
    assert more.scores["bleu"] >= plain.scores["bleu"]
    short = lines(tmp_path / "short.b", wanted[1:])
    with pytest.raises(ValueError, match="has 29 lines for 30 pairs"):
        evaluate(runs[0], **files, references=[short])  # type: ignore[arg-type]
