"""Scores of given translations, and translations that begin as they must."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from regard import checkpoint
from regard.cli.main import main
from regard.data.tokenizer import Tokenizer
from regard.task.search import SearchSettings
from regard.task.settings import Precision
from regard.task.text import build_transformer
from regard.task.translate import evaluate
from regard.task.translator import Translator
from regard.train.loss import cross_entropy
from tests.task.samples import SHAPE, sentences

TEXTS = ["ab cd", "ef", "gh ij kl mn op"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A translator that has learned nothing, and writes letters alone."""
    tokenizer = Tokenizer.characters(sentences(50))
    model = build_transformer(replace(SHAPE, decoder_layers=2), (tokenizer, tokenizer), seed=3)
    settings = SearchSettings.of(tokenizer, beams=3, length=20)
    task = {"name": "translate", **settings.__dict__, "banned": list(settings.banned)}
    place = tmp_path_factory.mktemp("models") / "model"
    checkpoint.save(place, model, files={"tokenizer.json": tokenizer.to_bytes()}, task=task)
    return place


@pytest.fixture(scope="module")
def translator(folder: Path) -> Translator:
    return Translator.load(folder)


def another(translator: Translator) -> Translator:
    tokenizer = translator.tokenizer
    model = build_transformer(SHAPE, (tokenizer, tokenizer), seed=5).eval()
    return Translator(model, (tokenizer, tokenizer), translator.search)


@pytest.mark.parametrize("kind", ["one", "ensemble"])
def test_what_was_written_has_the_scores_it_was_written_with(
    translator: Translator, kind: str
) -> None:
    if kind == "ensemble":
        translator = translator.ensemble([another(translator)], [0.3, 0.7])
    best = [one[0] for one in translator.translations(TEXTS, beams=1)]
    same = 0
    # What was written is scored as text; where that is tokenized otherwise, it is another path.
    for text, one, (again,) in zip(
        TEXTS, best, ([*translator.score([(text, one.text)])] for text, one in zip(TEXTS, best))
    ):
        if again.tokens == one.tokens:
            same += 1
            written = len(one.token_scores)  # EOS is scored where the search was cut off, too
            assert again.token_scores[:written] == pytest.approx(one.token_scores, abs=1e-4), text
    assert same


def test_scores_that_are_not_finite_are_refused(folder: Path) -> None:
    translator = Translator.load(folder)
    translator.model.encoder.blocks[0].add_attention.norm.bias.data[0] = torch.nan
    with pytest.raises(ValueError, match="the logits were not finite"):
        translator.score([("ab", "cd")])


def test_scores_do_not_depend_on_the_batch(translator: Translator) -> None:
    pairs = [(text, target) for text in TEXTS for target in ("ab", "cd ef gh", "ij")]
    together = translator.score(pairs)
    alone = [translator.score([pair])[0] for pair in pairs]
    small = translator.score(pairs, batch=2)
    for one, two, three in zip(together, alone, small):
        assert one.text == two.text == three.text
        assert one.token_scores == pytest.approx(two.token_scores, abs=1e-4)
        assert one.token_scores == pytest.approx(three.token_scores, abs=1e-4)
        assert one.log_p == pytest.approx(sum(one.token_scores))
        assert len(one.token_scores) == len(one.tokens) + 1
        assert one.score == pytest.approx(one.log_p / len(one.token_scores))


@pytest.mark.parametrize("beams", [1, 3])
def test_every_translation_begins_with_its_prefix(translator: Translator, beams: int) -> None:
    prefixes = ["ab c", "", "ij"]
    found = list(
        translator.translations(TEXTS, prefix=prefixes, beams=beams, n_best=beams, align=True)
    )
    for text, prefix, best in zip(TEXTS, prefixes, found):
        assert len(best) == beams
        for one in best:
            assert one.text.startswith(prefix)
            whole = translator.score([(text, one.text)])[0]
            written = len(one.token_scores)
            assert len(one.tokens) <= written <= len(one.tokens) + 1
            if whole.tokens == one.tokens:
                assert whole.token_scores[:written] == pytest.approx(one.token_scores, abs=1e-4)
        assert [one.score for one in best] == sorted((one.score for one in best), reverse=True)


def test_one_prefix_serves_all_and_none_changes_nothing(translator: Translator) -> None:
    every = translator.translations(TEXTS, prefix="cd")
    assert all(best[0].text.startswith("cd") for best in every)
    plain = [best[0].text for best in translator.translations(TEXTS)]
    assert [best[0].text for best in translator.translations(TEXTS, prefix="")] == plain


def test_a_prefix_that_leaves_no_room_is_refused(translator: Translator) -> None:
    with pytest.raises(ValueError, match=r"has 20 tokens, and a translation at most 20; shorten"):
        list(translator.translations(["ab"], prefix="a" * 20))


@pytest.mark.usefixtures("unchecked")
def test_the_command_scores_lines(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], translator: Translator
) -> None:
    table = tmp_path / "pairs.tsv"
    table.write_text("ab cd\tef\nno tab\nef\tgh ij\n")
    assert main(["score", str(folder), str(table)]) == 1  # one line was left out
    said = capsys.readouterr()
    first, nothing, last = said.out.split("\n")[:3]
    assert nothing == ""
    expected = translator.score([("ab cd", "ef"), ("ef", "gh ij")])
    assert [float(first), float(last)] == pytest.approx([one.log_p for one in expected], rel=1e-4)
    assert "line 2 needs a source, a tab and a translation" in said.err
    tokens = sum(len(one.token_scores) for one in expected)
    mean = -torch.tensor([one.log_p for one in expected]).sum() / tokens
    assert f"perplexity {mean.exp():.4g} over {tokens} tokens" in said.err


@pytest.mark.usefixtures("unchecked")
def test_the_command_takes_prefixes(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "table.tsv"
    table.write_text("ab cd\tef\nef\tgh\n")
    assert main(["translate", str(folder), str(table), "--prefix-column"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("ef")
    assert lines[1].startswith("gh")
    assert main(["translate", str(folder), "--prefix", "x", "--prefix-column"]) == 2
    assert "give one" in capsys.readouterr().err


@pytest.mark.parametrize("precision", ["bf16", "int8", "auto"])
def test_evaluation_in_every_precision(
    folder: Path, tmp_path: Path, translator: Translator, precision: Precision
) -> None:
    """What float32 writes is the reference, so that every precision is near the best score."""
    table = tmp_path / "pairs.tsv"
    written = translator.translate(TEXTS, beams=1)
    table.write_text("".join(f"{text}\t{one}\n" for text, one in zip(TEXTS, written)))
    exact = evaluate(folder, pairs=(str(table),), beams=1).scores["chrf"]
    found = evaluate(folder, pairs=(str(table),), beams=1, precision=precision).scores["chrf"]
    assert exact == pytest.approx(100)
    assert found > 60


def test_a_quantized_output_has_the_same_loss() -> None:
    """8-bit layers have no weight to be multiplied by; their own forward pass is asked."""
    states, targets = torch.randn(7, 16), torch.tensor([0, 3, 4, -1, 2, 1, 0])
    output = torch.nn.Linear(16, 5)
    with torch.no_grad():
        plain = cross_entropy(states, output, targets, 0.1)
        other = cross_entropy(states, torch.nn.Sequential(output), targets, 0.1)
    torch.testing.assert_close(plain, other)
