"""The precision that is picked where none is asked for."""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from regard import checkpoint
from regard.cli.main import main
from regard.data.tokenizer import Tokenizer
from regard.decode.engine.int8 import library as native
from regard.decode.engine.int8.linear import Int8Linear, int8
from regard.model.language import LanguageConfig, LanguageModel
from regard.task import precision
from regard.task.load import load
from regard.task.precision import Compared, Writes, compare, settle
from regard.task.search import SearchSettings
from regard.task.text import build_transformer
from tests.task.samples import SHAPE, lines, sentences

TEXTS = sentences(60)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A translator with a cache of its own, but the kernels of all."""
    if native.library() is None:
        pytest.skip(native.missing())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return translator(tmp_path / "model")


def translator(place: Path) -> Path:
    tokenizer = Tokenizer.bpe(sentences(50), 300)
    model = build_transformer(SHAPE, (tokenizer, tokenizer), seed=3)
    settings = SearchSettings.of(tokenizer, beams=2, length=20)
    task = {"name": "translate", **settings.__dict__, "banned": list(settings.banned)}
    checkpoint.save(place, model, files={"tokenizer.json": tokenizer.to_bytes()}, task=task)
    return place


def agreeing(share: float) -> Any:
    def compared(ready: Writes, quantized: Any, inputs: Sequence[str]) -> Compared:
        return Compared(int(share * 1000), 1000)

    return compared


def test_tokens_are_compared_along_what_float32_writes(folder: Path) -> None:
    ready: Any = load(folder)
    compared = compare(ready, int8(copy.deepcopy(ready.model)), TEXTS)
    assert compared.tokens > precision.ENOUGH
    assert 0.8 < compared.same / compared.tokens <= 1
    assert compare(ready, ready.model, TEXTS) == Compared(compared.tokens, compared.tokens)
    other: Any = load(translator(folder.with_name("other")))
    for weight in other.model.parameters():
        torch.nn.init.normal_(weight)
    assert compare(ready, other.model, TEXTS).same < 0.5 * compared.tokens


def test_of_each_text_every_token_counts_and_its_end(folder: Path) -> None:
    ready: Any = load(folder)
    written = ready.hypotheses(TEXTS[:9], beams=1)
    chosen = ready.choices(TEXTS[:9])(ready.model)
    # A text that ended has one choice more than tokens, and so has one that was cut off.
    assert len(chosen) == sum(len(best[0].tokens) + 1 for best in written)
    assert chosen[: len(written[0][0].tokens)].tolist() == written[0][0].tokens


def test_language_models(tmp_path: Path) -> None:
    tokenizer = Tokenizer.bpe(sentences(50), 300)
    config = LanguageConfig(tokenizer.size, width=16, heads=2, feed_forward=16, layers=1)
    settings = SearchSettings.of(tokenizer, beams=1, length=20)
    task = {"name": "language", **settings.__dict__, "banned": list(settings.banned)}
    place = tmp_path / "model"
    model = LanguageModel(config).eval()
    checkpoint.save(place, model, files={"tokenizer.json": tokenizer.to_bytes()}, task=task)
    ready: Any = load(place)
    chosen = ready.choices(["ab cd", "", "efg " * 90])(ready.model)
    assert len(chosen) > 3 * precision.ENOUGH / 20
    assert compare(ready, ready.model, ["ab cd"]).agrees


@pytest.mark.parametrize(("share", "wanted"), [(0.99, "int8"), (0.989, "fp32")])
def test_99_of_100_must_be_the_same(
    folder: Path, share: float, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precision, "compare", agreeing(share))
    ready: Any = load(folder)
    choice = settle(ready, TEXTS, folder)
    assert (choice.precision, choice.worth_saying) == (wanted, True)
    assert f"{int(share * 1000)} of 1,000" in choice.reason
    assert isinstance(ready.model.output, Int8Linear) == (wanted == "int8")
    # The next time it is known, and nothing is compared.
    monkeypatch.setattr(precision, "compare", lambda *_: pytest.fail("compared again"))
    ready = load(folder)
    again = settle(ready, TEXTS[:1], folder)
    # What is slower than need be is said each time, with the remedy.
    assert (again.precision, again.worth_saying) == (wanted, wanted == "fp32")
    assert ("--precision int8" in again.reason) == (wanted == "fp32")
    assert isinstance(ready.model.output, Int8Linear) == (wanted == "int8")


def test_a_model_that_has_changed_is_compared_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precision, "compare", agreeing(1.0))
    settle(load(folder), TEXTS, folder)  # type: ignore[arg-type]
    saved = checkpoint.load(folder)
    saved.model.output.bias = None
    with torch.no_grad():
        next(saved.model.parameters()).add_(1)
    files = {"tokenizer.json": (folder / "tokenizer.json").read_bytes()}
    checkpoint.save(folder, saved.model, files=files, task=saved.task)
    assert settle(load(folder), TEXTS, folder).worth_saying  # type: ignore[arg-type]


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"version": 1, "same": 9, "tokens": 2}'])
def test_a_damaged_cache_is_no_answer(
    folder: Path, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precision, "compare", agreeing(1.0))
    settle(load(folder), TEXTS, folder)  # type: ignore[arg-type]
    (kept,) = (folder.parent / "cache/regard/precision").iterdir()
    kept.write_bytes(content)
    assert settle(load(folder), TEXTS, folder).worth_saying  # type: ignore[arg-type]


def test_few_tokens_say_nothing(folder: Path) -> None:
    ready: Any = load(folder)
    for texts in (TEXTS[:1], [""], [], [""] * 9, ["ab"] * 9):
        choice = settle(ready, texts, folder)
        assert choice.precision == "fp32"
        assert "too few" in choice.reason
    assert not (folder.parent / "cache/regard/precision").exists()


def test_one_sentence_is_answered_without_a_comparison(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precision, "compare", lambda *_: pytest.fail("compared"))
    monkeypatch.setattr(precision, "int8", lambda _: pytest.fail("quantized"))
    choice = settle(load(folder), TEXTS[:3], folder)  # type: ignore[arg-type]
    assert str(choice) == "fp32 (3 inputs are too few to compare int8 by)"


def test_without_kernels(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "missing", lambda: "no compiler")
    choice = settle(load(folder), TEXTS, folder)  # type: ignore[arg-type]
    assert str(choice) == "fp32 (there are no int8 kernels: no compiler)"


def test_a_cache_that_cannot_be_written_to(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder.parent / "cache").write_text("in the way")
    monkeypatch.setattr(precision, "compare", agreeing(1.0))
    assert settle(load(folder), TEXTS, folder).precision == "int8"  # type: ignore[arg-type]


def outputs(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[str, str]:
    assert main([str(word) for word in words]) == 0
    captured = capsys.readouterr()
    return captured.out, captured.err


def test_the_command_says_which_and_why(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    table = lines(folder.with_name("table.txt"), TEXTS)
    words = ["translate", folder, "--files", table, "--device", "cpu"]
    whole, _ = outputs(capsys, *words, "--precision", "fp32")
    rounded, _ = outputs(capsys, *words, "--precision", "int8")
    monkeypatch.setattr(precision, "compare", agreeing(0.5))
    found, said = outputs(capsys, *words)
    assert found == whole
    assert said.startswith("regard: precision: fp32 (int8 chooses the same next token")
    monkeypatch.setattr(precision, "_known", lambda _: Compared(1000, 1000))
    found, said = outputs(capsys, *words)
    assert (found, said) == (rounded, "")
    _, said = outputs(capsys, *words, "--verbose")
    assert "precision: int8 (the same next token as float32 for 1,000 of 1,000)" in said
    assert "engine: int8" in said


def test_a_quantized_folder_needs_no_comparison(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precision, "compare", lambda *_: pytest.fail("compared"))
    table, small = lines(folder.with_name("table.txt"), TEXTS), folder.with_name("small")
    assert main(["quantize", str(folder), str(small)]) == 0
    rest = ["--files", table, "--device", "cpu"]
    capsys.readouterr()
    want, _ = outputs(capsys, "translate", folder, *rest, "--precision", "int8")
    assert outputs(capsys, "translate", small, *rest)[0] == want
    assert outputs(capsys, "translate", small, *rest, "--precision", "int8")[0] == want
    wide, _ = outputs(capsys, "translate", small, *rest, "--precision", "fp32")
    assert len(wide.splitlines()) == len(TEXTS)
