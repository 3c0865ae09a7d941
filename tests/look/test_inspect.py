"""Views of every task's model: what they show is what the model does."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from regard import checkpoint
from regard.config import to_json
from regard.data.tokenizer import Tokenizer, files
from regard.look.effect import changed, log_p
from regard.model.classifier import ClassifierConfig, TextClassifier
from regard.model.encoder import EncoderConfig, TextEncoder
from regard.model.language import LanguageConfig, LanguageModel
from regard.model.transformer import ImageSource, Transformer, TransformerConfig
from regard.model.vit import VisionConfig, VisionTransformer
from regard.task.inspect.changes import Changes
from regard.task.inspect.images import without_patches
from regard.task.inspect.translation import translated
from regard.task.inspect.views import numbers_of_head, view
from regard.task.load import load
from regard.task.search import SearchSettings

TEXTS = ["ab cd efg", "hij ab", "klm nop cd"]


def saved(folder: Path, model: torch.nn.Module, name: str, **task: Any) -> Any:
    tokenizer = Tokenizer.characters(TEXTS)
    about = {"name": name, **task}
    if name in ("translate", "read", "language"):
        about |= to_json(SearchSettings.of(tokenizer, length=10, beams=2))
    kept = {} if name == "classify" else files(tokenizer, tokenizer)
    checkpoint.save(folder, model, task=about, files=kept)
    return load(folder)


SIZES: dict[str, Any] = {"width": 16, "heads": 2, "feed_forward": 24}
SCALED: dict[str, Any] = {"mean": [0.5], "std": [0.5]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("translator")


@pytest.fixture(scope="module")
def translator(folder: Path) -> Any:
    """Random, but the same each time; what tests change inside it, they put back."""
    torch.manual_seed(0)
    vocabulary = Tokenizer.characters(TEXTS).size
    config = TransformerConfig(vocabulary, **SIZES, encoder_layers=2, decoder_layers=2)
    return saved(folder / "run", Transformer(config), "translate")


def test_a_translation_is_what_the_search_finds(translator: Any) -> None:
    found = translated(translator, "ab cd")
    best = next(iter(translator.translations(["ab cd"], attention=True)))[0]
    assert list(found.tokens) == best.tokens
    assert found.view.text == best.text
    assert found.view.more["logP"] == pytest.approx(best.log_p, abs=1e-4)
    torch.testing.assert_close(
        found.view.map("cross").weights, best.attention.weights, atol=1e-5, rtol=1e-4
    )
    p = [p for _, p in found.view.tokens]
    assert p == pytest.approx([math.exp(x) for x in best.token_scores], abs=1e-5)


def test_every_hypothesis_of_a_search_has_its_own_attention(translator: Any) -> None:
    (found,) = translator.translations(["ab cd"], n_best=2, attention=True)
    assert found[0].tokens != found[1].tokens
    for one in found:
        alone = translator.attention("ab cd", one.tokens)
        torch.testing.assert_close(one.attention.weights, alone.weights)


def test_the_tree_holds_every_step_of_the_best(translator: Any) -> None:
    found = translated(translator, "ab cd", beams=3)
    tokens, branches = list(found.hypotheses[0].tokens), found.tree
    at: int | None = None
    total = 0.0
    for step, token in enumerate(tokens):
        at = next(
            n
            for n, one in enumerate(branches)
            if (one.step, one.token, one.parent) == (step, token, at)
        )
        total += branches[at].gain
        assert branches[at].log_p == pytest.approx(total, abs=1e-4)
    assert max(sum(one.step == step for one in branches) for step in range(len(tokens))) <= 3


def test_what_is_forced_stands_at_the_beginning(translator: Any) -> None:
    forced = tuple(translator.tokenizer.encode("hij"))
    found = translated(translator, "ab cd", Changes(forced=forced))
    assert found.tokens[: len(forced)] == forced
    assert found.view.text.startswith("hij")
    with pytest.raises(ValueError, match=r"forced \(9999\) must be a token"):
        translated(translator, "ab cd", Changes(forced=(9999,)))


def test_changes_act_on_the_search_and_are_gone_afterwards(translator: Any) -> None:
    plain = translated(translator, "ab cd efg")
    name = "decoder.blocks.1.cross"
    everything = tuple((name, head) for head in range(2))
    off = translated(translator, "ab cd efg", Changes(off=everything))
    assert off.view.more["logP"] != pytest.approx(plain.view.more["logP"], abs=1e-6)
    flat = translated(translator, "ab cd efg", Changes(beta=((name, 0, 0.0),)))
    weights = flat.view.map("cross").weights[1, 0]
    torch.testing.assert_close(weights, torch.full_like(weights, 1 / weights.shape[1]))
    hidden = translated(translator, "ab cd efg", Changes(hidden=(0, 3)))
    for one in hidden.view.maps:
        if one.name != "decoder":
            assert one.weights[..., [0, 3]].eq(0).all()
    assert translated(translator, "ab cd efg").tokens == plain.tokens


def test_effects_stand_beside_weights(translator: Any) -> None:
    found = view(translator, "ab cd efg", effect=True)
    effect = found.effect
    assert effect is not None
    assert effect.units == ("ab", "cd", "efg", "</s>")
    assert effect.places[1] == (3, 4)
    one = found.map("cross")
    assert effect.falls.shape == (4, len(one.rows))
    assert one.falls is not None
    assert one.falls.shape == (2, 2)
    model, search = translator.model, translator.search
    ((part,),) = translator._cut_all(["ab cd efg"])
    asked = torch.tensor([[*part.ids, search.end]]), found.more["ids"], search.start, search.end
    whole = log_p(model, *asked)
    with changed(model, off=[("decoder.blocks.1.cross", 1)]):
        fall = whole - log_p(model, *asked)
    assert float(one.falls[1, 1]) == pytest.approx(float(fall.sum()), abs=1e-4)
    with changed(model, hidden=[3, 4]):
        torch.testing.assert_close(effect.falls[1], (whole - log_p(model, *asked))[0])
    assert found.best is not None


def test_effects_do_not_depend_on_what_a_map_shows(
    translator: Any, generator: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = [view(one, "ab cd efg", effect=True) for one in (translator, generator)]
    monkeypatch.setattr("regard.look.view.WEIGHTS", 1)
    monkeypatch.setattr("regard.look.view.CELLS", 3)
    for before, one in zip(whole, (translator, generator)):
        small = view(one, "ab cd efg", effect=True)
        assert all(found.overview for found in small.maps)
        assert small.effect is not None
        assert before.effect is not None
        assert small.effect.units == before.effect.units
        torch.testing.assert_close(small.effect.falls, before.effect.falls)


def test_the_numbers_of_a_head_make_its_weights(translator: Any) -> None:
    found = numbers_of_head(translator, "ab cd", "decoder.blocks.0.attention", 1)
    query, key = (torch.tensor(found[name]) for name in ("query", "key"))
    scores = found["beta"] * query @ key.mT
    allowed = torch.tensor(found["allowed"]) > 0
    expected = scores.masked_fill(~allowed, -math.inf).softmax(-1)
    torch.testing.assert_close(expected, torch.tensor(found["weights"]), atol=1e-6, rtol=1e-5)
    with pytest.raises(ValueError, match=r"head \(2\) of"):
        numbers_of_head(translator, "ab cd", "decoder.blocks.0.attention", 2)
    with pytest.raises(ValueError, match=r"attention \('other'\) is unknown; there are encoder"):
        numbers_of_head(translator, "ab cd", "other", 0)


# Images


@pytest.mark.parametrize("pool", ["class", "mean"])
def test_an_image_and_its_patches(tmp_path: Path, pool: Any) -> None:
    config = replace(VisionConfig(3, (8, 12), 4, channels=1, layers=2, **SIZES), pool=pool)
    model = VisionTransformer(config)
    torch.nn.init.normal_(model.head.output.weight)
    labels = ["one", "two", "three"]
    classifier = saved(tmp_path / "run", model, "classify", labels=labels, **SCALED)
    image = torch.randint(256, (1, 8, 12), dtype=torch.uint8)
    found = view(classifier, image=image, effect=True)
    p = classifier.probabilities([image])[0]
    assert dict(found.labels) == pytest.approx(dict(zip(labels, p.tolist())), abs=1e-5)
    first = int(pool == "class")
    assert found.maps[0].weights.shape == (2, 2, first + 6, first + 6)
    assert found.picture is not None
    assert (found.picture.rows, found.picture.columns, found.picture.first) == (2, 3, first)
    # A hidden patch: nobody looks at it, and the probability falls by what its effect says.
    place = 4 + first
    hidden = view(classifier, image=image, changes=Changes(hidden=(place,)))
    assert hidden.maps[0].weights[..., place].eq(0).all()
    assert found.effect is not None
    fall = math.log(dict(found.labels)[found.text]) - math.log(dict(hidden.labels)[found.text])
    assert float(found.effect.falls[4, 0]) == pytest.approx(fall, abs=1e-4)


def test_all_patches_at_once_are_as_one_by_one() -> None:
    model = VisionTransformer(VisionConfig(3, 8, 4, channels=1, layers=2, **SIZES)).eval()
    torch.nn.init.normal_(model.head.output.weight)
    x = torch.randn(1, 1, 8, 8)
    with torch.no_grad():
        together = without_patches(model, x, [[], [0], [1, 3]])
        for unit, logits in zip(([], [0], [1, 3]), together):
            torch.testing.assert_close(without_patches(model, x, [unit])[0], logits)
        torch.testing.assert_close(together[0], model(x)[0], atol=1e-5, rtol=1e-4)


def test_a_reader_looks_at_patches(tmp_path: Path) -> None:
    vocabulary = Tokenizer.characters(TEXTS).size
    source = ImageSource(image=(8, 12), patch=4, channels=1)
    config = TransformerConfig(
        vocabulary, **SIZES, encoder_layers=1, decoder_layers=2, source=source
    )
    reader = saved(tmp_path / "run", Transformer(config), "read", **SCALED)
    image = torch.randint(256, (1, 8, 12), dtype=torch.uint8)
    found = view(reader, image=image, effect=True)
    assert found.text == reader.read([image])[0]
    looked = reader.attention(image, found.text)
    torch.testing.assert_close(
        found.map("cross").weights, looked.weights.flatten(-2), atol=1e-5, rtol=1e-4
    )
    assert found.map("cross").picture
    assert not found.map("decoder").picture
    assert found.effect is not None
    assert found.effect.falls.shape == (6, len(found.tokens))


# Texts


@pytest.fixture(scope="module")
def generator(tmp_path_factory: pytest.TempPathFactory) -> Any:
    torch.manual_seed(0)
    model = LanguageModel(
        LanguageConfig(Tokenizer.characters(TEXTS).size, **SIZES, layers=2, share=False)
    )
    torch.nn.init.normal_(model.output.weight)
    return saved(tmp_path_factory.mktemp("language") / "run", model, "language")


@torch.no_grad()
def likelihood(generator: Any, ids: list[int]) -> float:
    """log p of a text."""
    logs = generator.model(torch.tensor([[generator.search.start, *ids]]))[0].log_softmax(-1)
    return float(logs[range(len(ids)), ids].sum())


def test_a_language_models_own_text(generator: Any) -> None:
    found = view(generator, "ab cd")
    (one,) = found.maps
    assert one.name == "decoder"
    assert one.weights.shape == (2, 2, 6, 6)
    assert one.weights.triu(1).eq(0).all()
    ids = generator.tokenizer.encode("ab cd")
    assert [name for name, _ in found.tokens] == generator.tokenizer.pieces(ids)
    assert sum(p for _, p in found.labels) <= 1 + 1e-6
    assert found.more["logP"] == pytest.approx(likelihood(generator, ids), abs=1e-4)
    # Words: the start stands before those that are read.
    assert one.row_words == (0, 0, -1, 1, 1, 2)
    assert one.column_words == (0, 1, 1, -1, 2, 2)
    assert found.more["continued"][0].startswith("ab cd")
    written = generator.generate(["ab cd"], temperature=0, length=12)[0]
    assert written.removeprefix("ab cd").split() == found.text.split()


def test_a_word_hidden_from_a_language_model(generator: Any) -> None:
    found = view(generator, "ab cd efg", effect=True)
    effect, (one,) = found.effect, found.maps
    assert effect is not None
    assert effect.units == ("<s>", "ab", "cd", "efg")
    assert effect.places[2] == (4, 5)
    assert effect.falls.shape == (4, 10)
    # What stands before a word, and its first letter, do not depend on it.
    assert effect.falls[2, :4].abs().max() < 1e-5
    hidden = view(generator, "ab cd efg", changes=Changes(hidden=(4, 5)))
    assert hidden.maps[0].weights[..., [4, 5]].eq(0).all()
    falls = [math.log(p / q) for (_, p), (_, q) in zip(found.tokens, hidden.tokens)]
    assert effect.falls[2, :-1].tolist() == pytest.approx(falls, abs=1e-4)
    assert one.falls is not None
    ids = generator.tokenizer.encode("ab cd efg" + found.labels[0][0])
    with changed(generator.model, off=[("decoder.blocks.1.attention", 1)]):
        without = likelihood(generator, ids)
    fall = likelihood(generator, ids) - without
    assert float(one.falls[1, 1]) == pytest.approx(fall, abs=1e-4)


def test_a_text_too_long_for_effects_says_so(generator: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("regard.task.inspect.texts.LONGEST", 8)
    found = view(generator, "ab cd efg", effect=True)
    assert found.effect is None
    assert found.notes == ("The text has 9 tokens: effects are found of up to 8.",)


@pytest.mark.parametrize("pool", ["mean", "last"])
def test_a_labelled_text(tmp_path: Path, pool: Any) -> None:
    vocabulary = Tokenizer.characters(TEXTS).size
    config = ClassifierConfig(classes=2, vocabulary=vocabulary, **SIZES, layers=2, pool=pool)
    model = TextClassifier(config)
    torch.nn.init.normal_(model.head.weight)
    labeler = saved(tmp_path / "run", model, "label", labels=["yes", "no"], length=20)
    found = view(labeler, "ab cd", effect=True)
    p = labeler.probabilities(["ab cd"])[0].tolist()
    assert dict(found.labels) == pytest.approx({"yes": p[0], "no": p[1]}, abs=1e-5)
    assert found.maps[0].name == "encoder"
    assert found.effect is not None
    assert found.effect.units == ("ab", "cd", "</s>")
    # A hidden word: nobody looks at it, and the label's log p falls by what its effect says.
    hidden = view(labeler, "ab cd", changes=Changes(hidden=(3, 4)))
    assert hidden.maps[0].weights[..., [3, 4]].eq(0).all()
    fall = math.log(dict(found.labels)[found.text]) - math.log(dict(hidden.labels)[found.text])
    assert found.notes == ()
    assert "the first 20 tokens" in view(labeler, "ab cd " * 9).notes[0]
    assert abs(fall) > 1e-4
    assert float(found.effect.falls[1, 0]) == pytest.approx(fall, abs=1e-4)


def test_an_encoder_fills_what_is_hidden(tmp_path: Path) -> None:
    config = EncoderConfig(Tokenizer.characters(TEXTS).size, **SIZES, layers=2)
    encoder = saved(tmp_path / "run", TextEncoder(config), "encoder", length=20)
    found = view(encoder, "ab [MASK]d", effect=True)
    words = encoder.fill(["ab [MASK]d"], best=1)[0]
    assert (found.text, found.labels[0][1]) == (words[0][0], pytest.approx(words[0][1], abs=1e-5))
    assert "[MASK]" in found.maps[0].rows
    assert found.effect is not None
    with pytest.raises(ValueError, match=r"must have one \[MASK\]"):
        view(encoder, "ab")


def test_a_model_without_attention_says_so(tmp_path: Path) -> None:
    vocabulary = Tokenizer.characters(TEXTS).size
    config = ClassifierConfig(classes=2, vocabulary=vocabulary, width=16, layers=1, mixer="lstm")
    labeler = saved(
        tmp_path / "run", TextClassifier(config), "label", labels=["yes", "no"], length=20
    )
    with pytest.raises(ValueError, match="no attention to look at: its mixer is lstm"):
        view(labeler, "ab")


def test_a_language_models_head_by_hand(generator: Any) -> None:
    name = "decoder.blocks.1.attention"
    found = numbers_of_head(generator, "ab cd", name, 1, Changes(beta=((name, 1, 3.0),)))
    query, key = (torch.tensor(found[part]) for part in ("query", "key"))
    allowed = torch.tensor(found["allowed"]) > 0
    scores = (found["beta"] * query @ key.mT).masked_fill(~allowed, -math.inf)
    seen = view(generator, "ab cd", changes=Changes(beta=((name, 1, 3.0),)))
    torch.testing.assert_close(scores.softmax(-1), seen.maps[0].weights[1, 1], atol=1e-5, rtol=1e-4)


@pytest.mark.usefixtures("unchecked")
def test_what_a_model_is_not_for(translator: Any) -> None:
    with pytest.raises(ValueError, match="this model reads text"):
        view(translator, image=b"x")
    with pytest.raises(ValueError, match="must have a word to translate"):
        view(translator, " ")


def test_the_command(
    translator: Any, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    from regard.cli.main import main

    monkeypatch.chdir(folder)
    run: Callable[..., int] = lambda *words: main(["look", *words])  # noqa: E731
    assert (
        run("run", "--text", "ab cd", "-o", "page.html", "--svg", "a.svg", "--device", "cpu") == 0
    )
    said = capsys.readouterr().out
    assert "cross-attention from output to source:" in said
    assert "Written: page.html, a.svg" in said
    assert "ab cd" in (folder / "page.html").read_text(encoding="utf-8")
    for words, message in (
        (("run",), 'this model reads text; give some: --text "…"'),
        (("run", "--text", "ab", "--layer", "9"), "layer (9) must be from 1 to 2"),
        (("run", "--text", "ab", "--head", "0"), "head (0) is counted from 1"),
        (("run", "--text", "ab", "--png", "a.gif"), "png (a.gif) must be a file that ends in .png"),
        (("nowhere", "--text", "ab"), "nowhere"),
    ):
        assert run(*words) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
