"""Translators, and language models, that write together."""

import gzip
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from regard import checkpoint
from regard.cli.main import main
from regard.data.batch import text_batch
from regard.data.seeding import seeded
from regard.data.tokenizer import Tokenizer, files
from regard.decode.engine.int8 import library as native
from regard.model.language import LanguageConfig, LanguageModel
from regard.task.language import Generator
from regard.task.load import ensemble, load
from regard.task.search import SearchSettings
from regard.task.text import build_transformer
from regard.task.translator import Translator, TranslatorEnsemble, Written
from tests.service import samples
from tests.task.samples import SHAPE, sentences

TEXTS = ["ab cd", "tu efg hij", "", "klm nop", "tu"]
CHARACTERS = Tokenizer.characters(sentences(20))
BPE = Tokenizer.bpe(sentences(50), 300)
SEPARATE = replace(SHAPE, share="target")

# Thousands of calls, whose annotations the other tests check.
often = pytest.mark.usefixtures("unchecked")


def opinionated(model: nn.Module, seed: int) -> nn.Module:
    """The same whatever was drawn before: fixtures of a module are made before a test is seeded."""
    with seeded(seed + 10):
        for parameter in model.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.5)
    return model


def saved(
    folder: Path,
    seed: int,
    source: Tokenizer = CHARACTERS,
    target: Tokenizer = CHARACTERS,
    **changed: Any,
) -> Path:
    """A translator that has learned nothing, and has opinions."""
    shape = replace(SHAPE if source is target else SEPARATE, **changed.pop("shape", {}))
    model = opinionated(build_transformer(shape, (source, target), seed), seed)
    settings = {"beams": 2, "length": 14, **changed}
    about = vars(SearchSettings.of(target, **settings))
    task = {"name": "translate", **about, "banned": list(about["banned"])}
    checkpoint.save(folder, model, files=files(source, target), task=task)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three that write the same tokens, in different sizes, one of which reads others."""
    place = tmp_path_factory.mktemp("models")
    return [
        saved(place / "one", 1),
        saved(place / "two", 2, shape={"width": 24, "heads": 3, "decoder_layers": 2}),
        saved(place / "three", 3, BPE),
    ]


def translators(folders: Sequence[Path]) -> list[Any]:
    return [load(folder, dtype=torch.float64) for folder in folders]


def log_p(translator: Any, text: str, tokens: list[int]) -> torch.Tensor:
    """log p of all tokens at every step, by the model as a whole."""
    source, settings = translator.source_tokenizer.encode(text), translator.search
    start, end = settings.start, settings.end
    batch = text_batch([(source, tokens)], start, end, source_end=end)
    with torch.no_grad():
        logits = translator.model(batch.source, batch.target)
    return logits[0].log_softmax(-1)


def same(have: list[list[Written]], want: list[list[Written]], tolerance: float = 1e-6) -> None:
    texts = [[[one.text for one in best] for best in found] for found in (have, want)]
    assert texts[0] == texts[1]
    for one, two in zip(have, want):
        for a, b in zip(one, two):
            assert a.tokens == b.tokens
            assert a.token_scores == pytest.approx(b.token_scores, abs=tolerance)
            assert a.score == pytest.approx(b.score, abs=tolerance)


@often
@pytest.mark.parametrize("weights", [None, [1.0, 2.0, 5.0]])
@pytest.mark.parametrize("beams", [1, 3])
def test_every_token_has_the_mean_probability(
    folders: list[Path], beams: int, weights: list[float] | None
) -> None:
    """Different sizes and source tokenizers; each model by itself, without a cache, agrees."""
    members = translators(folders)
    together = ensemble(members, weights)
    shares = torch.tensor(weights or [1.0, 1.0, 1.0], dtype=torch.float64)
    shares = (shares / shares.sum()).log()
    for text, best in zip(TEXTS, together.translations(TEXTS, beams=beams)):
        if not text:
            assert best[0].text == ""
            continue
        each = torch.stack([log_p(member, text, best[0].tokens) for member in members])
        mean = (each + shares[:, None, None]).logsumexp(0)
        ended = len(best[0].token_scores) > len(best[0].tokens)
        tokens = [*best[0].tokens, *[together.search.end] * ended]
        wanted = mean[range(len(tokens)), tokens]
        assert best[0].token_scores == pytest.approx(wanted.tolist(), abs=1e-9)
        if beams == 1:
            mean[:, list(together.search.banned)] = -math.inf
            assert mean[: len(tokens)].argmax(-1).tolist() == tokens


@often
def test_together_they_say_what_neither_says_alone(folders: list[Path]) -> None:
    alone = [load(folder).translate(TEXTS) for folder in folders]
    together = load(*folders).translate(TEXTS)
    assert all(together != one for one in alone)
    assert load(*folders[:2], weights=[1e-9, 1]).translate(TEXTS) == alone[1]


@often
@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_a_model_with_itself_is_itself(folders: list[Path], precision: str) -> None:
    alone: Any = load(folders[0])
    if precision == "int8":
        from regard.decode.engine.int8.linear import int8

        if native.missing():
            pytest.skip(native.missing())
        int8(alone.model)
    twice = ensemble([alone, alone], [3, 1])
    for options in ({"beams": 1}, {"beams": 3}, {"n_best": 3}):
        found = [list(one.translations(TEXTS, **options)) for one in (twice, alone)]
        same(*found, tolerance=1e-4)


@often
def test_batches_and_order_change_nothing(folders: list[Path]) -> None:
    together = ensemble(translators(folders))
    at_once = list(together.translations(TEXTS))
    same(list(together.translations(TEXTS, batch=2)), at_once)
    same(list(together.translations(TEXTS[::-1], batch=4))[::-1], at_once)
    for text, best in zip(TEXTS, at_once):
        same(list(together.translations([text])), [best])


def test_attention_and_alignments_are_the_first_s(folders: list[Path]) -> None:
    members = translators(folders)
    together = ensemble(members)
    (best,) = together.translations([TEXTS[0]], attention=True, align=True)
    assert best[0].attention is not None
    assert best[0].alignment is not None
    assert together.head is not None
    alone = members[0].attention(TEXTS[0], best[0].tokens)
    assert best[0].attention.source == alone.source
    torch.testing.assert_close(best[0].attention.weights, alone.weights)
    assert together.model is members[0].model


def test_a_long_text_is_cut_for_every_member(tmp_path: Path, folders: list[Path]) -> None:
    """By characters a text is longer: the parts fit the member that reads the most tokens."""
    short = saved(tmp_path / "short", 4, length=13)
    together: Any = load(folders[2], short, folders[1])
    assert together.search.length == 13
    text = " ".join(sentences(3, seed=9))
    (parts,) = together._cut_all([text], align=True)
    assert len(parts) > 2
    for part in parts:
        assert max(map(len, (part.ids, *part.others))) <= 13
        assert {BPE.decode(part.ids)} == set(map(CHARACTERS.decode, part.others))
    assert parts[-1].words[-1] == len(text.split()) - 1
    assert len(together.translate([text, "tu", "Ω" * 50])) == 3
    # What is not cut is read as it is, though the first does not know its letters.
    turned: Any = load(folders[0], folders[2])
    ((part,),) = turned._cut_all(["é Ω"])
    assert part.others == (BPE.encode("é Ω"),)


# Refusals


def test_other_tokens_are_refused_in_one_line(tmp_path: Path, folders: list[Path]) -> None:
    other = saved(tmp_path / "other", 5, BPE, BPE)
    with pytest.raises(ValueError, match="target tokenizers differ") as error:
        load(folders[0], folders[1], other)
    line = str(error.value)
    assert f"{folders[0]} and {other} cannot be an ensemble" in line
    assert f"{CHARACTERS} and {BPE}; train both with the same --tokenizer" in line
    turned = load(folders[0])
    assert isinstance(turned, Translator)
    turned.search = replace(turned.search, start=3)
    with pytest.raises(ValueError, match="their start tokens differ, 3 and 1"):
        ensemble([turned, load(folders[1])])


def test_what_is_no_member(tmp_path: Path, folders: list[Path]) -> None:
    one, two = load(folders[0]), load(folders[1])
    with pytest.raises(ValueError, match="an ensemble is no member of another"):
        ensemble([one, ensemble([one, two]).ensemble([two])])
    language = load(spoken(tmp_path / "language", 1))
    with pytest.raises(ValueError, match="of one kind, not of Translator, Generator"):
        ensemble([one, language])
    assert isinstance(language, Generator)
    with pytest.raises(ValueError, match="an ensemble is no member of another"):
        ensemble([language, language.ensemble([language])])
    labeler = load(samples.labeler(tmp_path / "labeler"))
    with pytest.raises(ValueError, match="a Labeler cannot be in an ensemble"):
        labeler.ensemble([labeler])
    with pytest.raises(ValueError, match="model is for one folder"):
        load(*folders, model=two.model)
    with pytest.raises(ValueError, match=r"weights \(1, 2\) must be one for each .* has 1"):
        load(folders[0], weights=[1, 2])


# Language models


def spoken(folder: Path, seed: int) -> Path:
    torch.manual_seed(seed)
    size = CHARACTERS.size
    model = LanguageModel(LanguageConfig(size, width=16, heads=2, feed_forward=8, layers=1))
    settings = vars(SearchSettings.of(CHARACTERS, beams=1, length=20))
    task = {"name": "language", **settings, "banned": list(settings["banned"])}
    checkpoint.save(
        folder, opinionated(model, seed), files=files(CHARACTERS, CHARACTERS), task=task
    )
    return folder


@often
def test_language_models_together(tmp_path: Path) -> None:
    folders = [spoken(tmp_path / str(seed), seed) for seed in (1, 2)]
    alone: list[Any] = [load(folder) for folder in folders]
    prompts = ["ab cd", "", "efg hij klm"]
    sampled = {"temperature": 1.1, "top_p": 0.9, "seed": 4}
    for options in ({"temperature": 0, "length": 9}, {**sampled, "length": 9}):
        twice = alone[0].ensemble([alone[0]])
        assert twice.generate(prompts, **options) == alone[0].generate(prompts, **options)
        together: Any = load(*folders, weights=[1, 1])
        written = together.generate(prompts, **options)
        assert all(written != one.generate(prompts, **options) for one in alone)
        for n, prompt in enumerate(prompts):
            assert together.generate([prompt], first=n, **options) == [written[n]]


# Commands


def said(capsys: pytest.CaptureFixture[str], *words: object, status: int = 0) -> tuple[str, str]:
    assert main([str(word) for word in words]) == status
    captured = capsys.readouterr()
    return captured.out, captured.err


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "text.gz"
    path.write_bytes(gzip.compress("\n".join(TEXTS).encode()))
    return path


def test_translate_and_evaluate(
    folders: list[Path], table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, *others = folders
    words = ["--ensemble", *others, "--ensemble-weights", 2, 1, 1]
    out, err = said(
        capsys, "translate", first, *words, "--files", table, "--precision", "fp32",
        "--device", "cpu", "--verbose",
    )  # fmt: skip
    wanted = load(*folders, weights=[2, 1, 1])
    assert isinstance(wanted, TranslatorEnsemble)
    assert out.splitlines() == wanted.translate(TEXTS)
    assert err.count("regard: engine: eager (") == 3
    pairs = tmp_path / "pairs.tsv"
    rows = zip(TEXTS, wanted.translate(TEXTS))
    pairs.write_text("".join(f"{text}\t{written}\n" for text, written in rows if text))
    told = ["--pairs", pairs, "--json", "--device", "cpu"]
    scores = [
        json.loads(said(capsys, "evaluate", first, *told, *more)[0])["scores"]
        for more in ([], words, ["--ensemble", first])
    ]
    assert scores[0] == scores[2]
    assert scores[0]["chrf"] < scores[1]["chrf"] == 100


def test_generate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [spoken(tmp_path / str(seed), seed) for seed in (1, 2)]
    prompts = tmp_path / "prompts"
    prompts.write_text("ab cd\nefg\n")
    words = ["--files", prompts, "--precision", "fp32", "--device", "cpu", "--length", 9]
    out, _ = said(capsys, "generate", folders[0], "--ensemble", folders[1], *words)
    together = load(*folders)
    assert isinstance(together, Generator)
    assert out.splitlines() == [
        " ".join(text.splitlines()) for text in together.generate(["ab cd", "efg"], length=9)
    ]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--ensemble", "nowhere"], "nowhere"),
        (["--ensemble-weights", "1", "2"], "weights (1.0, 2.0) must be one for each model"),
        (["--ensemble", "{1}", "--ensemble-weights", "1"], "which has 2"),
        (["--ensemble", "{1}", "--ensemble-weights", "1", "-2"], "weight (-2.0) must be above 0"),
    ],
)
def test_wrong_options_get_one_line(
    folders: list[Path],
    table: Path,
    words: list[str],
    line: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = [word.format(*folders) for word in words]
    out, err = said(capsys, "translate", folders[0], "--files", table, *words, status=2)
    assert out == ""
    assert line in err
    assert err.count("\n") == 1
