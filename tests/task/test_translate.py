"""Translation of the user's files: what is trained on, held out, searched, scored and refused."""

import gzip
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from regard import checkpoint
from regard.config import from_json, to_json
from regard.data.batch import Batch
from regard.data.tokenizer import Tokenizer
from regard.decode.engine.eager import EagerEngine
from regard.decode.engine.session import Session
from regard.model.transformer import Transformer
from regard.task import translate
from regard.task.load import load
from regard.task.search import SearchSettings, search
from regard.task.settings import check_texts
from regard.task.text import build_transformer
from regard.task.translate import Config, Translation, build
from regard.task.translator import Part, Translator
from regard.train.fit import fit
from regard.train.task import Mixed, Sampled
from tests.task.samples import SHAPE, TRAINING, backwards, lines, sentences, trained

SOURCES = sentences(211)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    source = lines(tmp_path / "train.a", SOURCES)
    target = lines(tmp_path / "train.b", [backwards(text) for text in SOURCES])
    return Config(
        source=(source,),
        target=(target,),
        held_out=17,
        vocabulary=290,
        longest=30,
        cache=str(tmp_path / "cache"),
        beams=2,
        model=SHAPE,
        training=TRAINING,
    )


def trained_on(task: translate.Translation) -> set[str]:
    tokenizer = task.tokenizers[0]
    every = (task.examples.packed(np.array([i]), 0).ids for i in range(len(task.examples)))
    return {tokenizer.decode(ids) for ids in every}


def test_what_is_held_out_is_never_trained_on(config: Config) -> None:
    task = build(config)
    held = {source for source, _ in task.held_out}
    assert len(held) == 17
    assert trained_on(task) == set(SOURCES) - held
    assert all(target == backwards(source) for source, target in task.held_out)


def test_all_translations_of_a_held_out_source_are(tmp_path: Path, config: Config) -> None:
    """By the source's hash, not by line: else a model would have seen what it is asked."""
    again = lines(tmp_path / "again.a", SOURCES * 2)
    other = lines(tmp_path / "again.b", [*map(backwards, SOURCES), *SOURCES])
    task = build(replace(config, source=(again,), target=(other,)))
    held = {source for source, _ in task.held_out}
    assert len(task.held_out) == len(held) == 17
    assert not trained_on(task) & held
    assert len(task.examples) == 2 * (len(SOURCES) - 17)


def test_another_order_of_lines_holds_out_the_same(tmp_path: Path, config: Config) -> None:
    turned = lines(tmp_path / "turned.a", SOURCES[::-1])
    other = lines(tmp_path / "turned.b", [backwards(text) for text in SOURCES[::-1]])
    task = build(replace(config, source=(turned,), target=(other,)))
    assert task.held_out == build(config).held_out


def test_a_tenth_at_most_is_held_out(config: Config) -> None:
    assert len(build(replace(config, held_out=1000, judged=1000)).held_out) == 21


def test_a_table_and_a_compressed_one_are_the_same(tmp_path: Path, config: Config) -> None:
    text = "".join(f"{n}\t{backwards(s)}\t{s}\n" for n, s in enumerate(SOURCES))
    (tmp_path / "pairs.tsv").write_text(text, encoding="utf-8")
    (tmp_path / "pairs.tsv.gz").write_bytes(gzip.compress(text.encode()))
    both = [
        build(replace(config, source=(), target=(), pairs=(str(tmp_path / name),), columns=(2, 1)))
        for name in ("pairs.tsv", "pairs.tsv.gz")
    ]
    for task in both:
        assert task.held_out == build(config).held_out
        assert trained_on(task) == trained_on(build(config))


def test_files_to_validate_on_leave_all_others_to_train_on(tmp_path: Path, config: Config) -> None:
    source = lines(tmp_path / "valid.a", ["ab cd", "tu"])
    target = lines(tmp_path / "valid.b", ["cd ab", "tu"])
    task = build(replace(config, valid_source=(source,), valid_target=(target,)))
    assert task.held_out == [("ab cd", "cd ab"), ("tu", "tu")]
    assert len(task.examples) == len(SOURCES)


def test_bad_lines_are_reported_or_refused(tmp_path: Path, config: Config) -> None:
    source = lines(tmp_path / "bad.a", [*SOURCES, "", "ab " * 70])
    target = lines(tmp_path / "bad.b", [*map(backwards, SOURCES), "cd", "ab"])
    bad = replace(config, source=(source,), target=(target,), longest=30)
    notes = build(bad).notes
    assert any("an empty side" in note and "line 212" in note for note in notes)
    assert any("too long" in note and "line 213" in note for note in notes)
    with pytest.raises(ValueError, match="an empty side"):
        build(replace(bad, on_bad="refuse"))


@pytest.mark.parametrize("words", ["joint", "separate", "characters"])
def test_every_way_of_cutting_words(config: Config, words: translate.Words) -> None:
    if words == "separate":
        with pytest.raises(ValueError, match=r"--model.share target"):
            build(replace(config, words=words))
        config = replace(config, model=replace(config.model, share="target"))
    task = build(replace(config, words=words))
    source, target = task.tokenizers
    assert (source is target) == (words != "separate")
    text = SOURCES[0]
    assert source.decode(source.encode(text)) == text
    batch = task.batch(np.arange(3), 1)
    loss, count = task.loss(batch)
    assert loss.isfinite()
    assert count == batch.labels.numel()
    names = {"tokenizer.json"} if source is target else set(task.files())
    assert set(task.files()) == names


def test_an_existing_tokenizer_is_used(tmp_path: Path, config: Config) -> None:
    path = tmp_path / "own.json"
    path.write_bytes(Tokenizer.characters(SOURCES).to_bytes())
    task = build(replace(config, tokenizer=str(path)))
    assert task.files() == {"tokenizer.json": path.read_bytes()}
    assert len(task.held_out) == 17


def test_a_run_goes_on_repeats_itself_and_translates(tmp_path: Path, config: Config) -> None:
    run = tmp_path / "run"
    task = build(config, run)
    trained(task, TRAINING, run)
    kept = (run / translate.HELD_OUT).read_text(encoding="utf-8").splitlines()
    assert [tuple(json.loads(line)) for line in kept] == task.held_out
    # It goes on with the tokenizer and the sentences that it has.
    again = build(config, run)
    assert again.held_out == task.held_out
    assert trained(again, TRAINING, run, steps=4).step == 4
    translator = load(run)
    assert isinstance(translator, Translator)
    texts = ["ab cd", "", "   ", "tu " * 70, "Ω \u200b", "ab cd"]
    written = translator.translate(texts)
    assert len(written) == len(texts)
    assert written[0] == written[5]
    assert written[1] == written[2] == ""
    assert all(len(line.splitlines()) <= 1 for line in written)
    assert list(translator.stream(iter(texts), batch=2)) == written
    # The whole of the config is in the run.
    said = translator._about["config"]
    assert from_json(Config, {**said, "training": to_json(TRAINING)}) == config
    # By itself the run is scored on what it held out.
    found = translate.evaluate(run)
    assert len(found.translations) == 17
    assert set(found.scores) == {"bleu", "chrf"}
    assert "tok:13a" in found.signatures["bleu"]
    pairs = lines(tmp_path / "test.tsv", ["ab\tab", "cd ef\tef cd"])
    evaluation = translate.evaluate(run, pairs=(pairs,), beams=1)
    assert len(evaluation.translations) == 2
    assert evaluation.problems == []
    # What is left out is counted and shown, and a missing line is no small matter.
    pairs = lines(tmp_path / "test.tsv", ["ab\tab", "cd ef\t", "ef\tfe"])
    evaluation = translate.evaluate(run, pairs=(pairs,), beams=1)
    assert len(evaluation.translations) == 2
    assert "1 × an empty side: line 2 of test.tsv" in evaluation.problems[0]
    one, two = lines(tmp_path / "one", ["ab", "cd", "ef"]), lines(tmp_path / "two", ["ab", "ef"])
    with pytest.raises(ValueError, match=r"3 lines in .* but 2 lines in"):
        translate.evaluate(run, source=(one,), target=(two,))


def test_going_on_from_another_model(tmp_path: Path, config: Config) -> None:
    run = tmp_path / "first"
    trained(build(config, run), TRAINING, run)
    first = load(run)
    task = build(replace(config, start=str(run), beams=3))
    assert task.files() == {"tokenizer.json": first.tokenizer.to_bytes()}
    for mine, its in zip(task.model.parameters(), first.model.parameters()):
        assert torch.equal(mine, its)
    assert task.search == replace(first.search, beams=3)


def test_hypotheses_are_ranked_and_attention_is_theirs(tmp_path: Path, config: Config) -> None:
    task = build(config)
    translator = Translator(task.model.eval(), task.tokenizers, task.search)
    (found,) = translator.hypotheses(["ab cd efg"], n_best=2)
    assert found[0].score >= found[1].score
    assert translator.translate(["ab cd efg"]) == [found[0].text]
    seen = translator.attention("ab cd", found[0].tokens)
    source = task.tokenizers[0].encode("ab cd")
    assert seen.source[-1] == "</s>"
    assert seen.weights.shape == (1, 2, len(found[0].tokens) + 1, len(source) + 1)
    assert torch.allclose(seen.weights.sum(-1), torch.ones(()))


def test_a_long_text_is_cut_between_words(config: Config) -> None:
    task = build(config)
    translator = Translator(task.model, task.tokenizers, replace(task.search, length=7))
    tokenizer = task.tokenizers[0]
    text = " ".join(SOURCES[:5])
    parts = translator._parts(tokenizer.encode(text), align=True)
    assert all(len(part.ids) <= 7 for part in parts)
    assert " ".join(tokenizer.decode(part.ids) for part in parts) == text
    assert [part.ids for part in translator._parts([3] * 16)] == [[3] * 7, [3] * 7, [3] * 2]
    # Words are numbered through, and those of the parts' translations as well.
    assert max(parts[-1].words) == len(text.split()) - 1
    translator.model.eval()
    (best,) = translator.translations([text], n_best=2, align=True, attention=True)
    for one in best:
        assert one.alignment is not None
        assert one.attention is not None
        assert {target for _, target in one.alignment} == set(range(len(one.text.split())))
        assert one.attention.weights.shape[3] == sum(len(part.ids) + 1 for part in parts)
        assert torch.allclose(one.attention.weights.sum(-1), torch.ones(()))
        assert one.score == pytest.approx(one.log_p / len(one.token_scores))


@pytest.mark.usefixtures("unchecked")  # thousands of calls
def test_batches_and_order_change_nothing(config: Config) -> None:
    task = build(config)
    translator = Translator(task.model.eval(), task.tokenizers, replace(task.search, length=12))
    texts = [*SOURCES[:5], "", " ".join(SOURCES[:3]), "?"]
    for beams in (1, 3):
        together = list(translator.translations(texts, beams=beams))
        assert [best[0].text for best in together] == translator.translate(texts, beams=beams)
        backwards_ = list(translator.translations(texts[::-1], beams=beams, batch=3))[::-1]
        for n, text in enumerate(texts):
            (alone,) = translator.translations([text], beams=beams)
            for one, two in ((alone, together[n]), (backwards_[n], together[n])):
                assert one[0].tokens == two[0].tokens
                assert one[0].token_scores == pytest.approx(two[0].token_scores, abs=1e-4)


def test_what_is_there_is_translated_before_more_is_asked_for(config: Config) -> None:
    task = build(config)
    translator = Translator(task.model.eval(), task.tokenizers, task.search)
    answered: list[str] = []

    def typed() -> Iterator[str | None]:
        for n, text in enumerate(("ab", "", "cd ab")):
            assert len(answered) == n
            yield text
            yield None
            yield None

    for text in translator.stream(typed()):
        answered.append(text)
    assert len(answered) == 3


def test_renormalized_search_knows_no_banned_tokens() -> None:
    tokenizer = Tokenizer.characters(["abc"])
    model = build_transformer(SHAPE, (tokenizer, tokenizer), seed=1).eval()
    settings = SearchSettings.of(tokenizer, beams=1, length=5)
    source = torch.tensor([[4, 5, settings.end]])
    ((plain,),) = search(model, source, None, settings)
    ((shared,),) = search(model, source, None, replace(settings, renormalize=True))
    assert plain.tokens == shared.tokens
    assert shared.score > plain.score
    assert not set(plain.tokens) & set(settings.banned)


def test_a_search_is_read_from_marians_words() -> None:
    said = {
        "name": "translate",
        "start": 9,
        "end": 0,
        "pad": 9,
        "banned": [9],
        "beams": 4,
        "length": 512,
        "length_penalty": 1.0,
        "renormalize": True,
    }
    settings = SearchSettings.read(said, "config.json")
    assert (settings.start, settings.end, settings.banned, settings.renormalize) == (
        9,
        0,
        (9,),
        True,
    )
    with pytest.raises(ValueError, match=r'lacks "end"'):
        SearchSettings.read({"start": 1, "pad": 0}, "config.json")


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"source": ()}, "there is no --source"),
        ({"pairs": ("x",)}, "name one kind"),
        ({"source": ("nowhere",)}, "nowhere does not exist"),
        ({"valid_source": ("x",)}, "there is no --valid-target"),
    ],
)
def test_one_line_says_which_files_are_missing(
    config: Config, changed: dict[str, tuple[str, ...]], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        build(replace(config, **changed))  # type: ignore[arg-type]


def test_r_drop_adds_the_divergence_of_two_passes(config: Config) -> None:
    changed = replace(config, r_drop=4.0, model=replace(SHAPE, dropout=0.0))
    plain, twice = build(replace(changed, r_drop=0.0)), build(changed)
    batch = plain.batch(plain.plan(0)[0], 0)
    # Without dropout both passes are the same, and nothing is added.
    torch.testing.assert_close(plain.loss(batch)[0], twice.loss(batch)[0])
    noisy = build(replace(changed, model=replace(SHAPE, dropout=0.3)))
    less = build(replace(changed, r_drop=2.0, model=replace(SHAPE, dropout=0.3)))
    none = build(replace(changed, r_drop=1e-9, model=replace(SHAPE, dropout=0.3)))
    losses = []
    for task in (none, less, noisy):
        torch.manual_seed(3)
        losses.append(float(task.loss(batch)[0].detach()))
    assert losses[0] < losses[1] < losses[2]
    assert losses[2] - losses[1] == pytest.approx(losses[1] - losses[0], rel=1e-4)
    # What is judged is judged once.
    noisy.model.eval(), none.model.eval()
    torch.testing.assert_close(noisy.loss(batch)[0], none.loss(batch)[0])
    with pytest.raises(ValueError, match=r"r_drop \(-1.0\) must be 0"):
        replace(config, r_drop=-1.0)


@pytest.mark.parametrize("words", ["joint", "separate"])
def test_bpe_dropout_splits_tokens_anew_at_each_step(config: Config, words: str) -> None:
    changed = replace(config, words=words, vocabulary=300, longest=200)
    changed = replace(changed, model=replace(SHAPE, share="none"))
    plain, task = build(changed), build(replace(changed, bpe_dropout=0.3))
    indices = plain.plan(0)[0]
    wanted, seen = _texts(plain, plain.batch(indices, 0)), set()
    for step in range(3):
        batch = task.batch(indices, step)
        assert _texts(task, batch) == wanted
        assert batch.fill(task.capacity([indices])) is not None
        seen.add((batch.source.numel(), batch.target.numel()))
        torch.testing.assert_close(batch.source, task.batch(indices, step).source)
    assert len(seen) == 3
    # What is judged is tokenized as ever.
    assert task.evaluate(task.model.eval()) == plain.evaluate(plain.model.eval())
    with pytest.raises(ValueError, match=r"bpe_dropout \(0.6\) must be from 0 to 0.5"):
        replace(config, bpe_dropout=0.6)


def _texts(task: Translation, batch: Batch) -> list[tuple[str, ...]]:
    sides = ((batch.source, batch.source_lengths), (batch.target, batch.target_lengths))
    texts = []
    for tokenizer, (ids, lengths) in zip(task.tokenizers, sides):
        assert lengths is not None
        parts = ids[0].split(lengths.lengths.tolist())
        texts.append([tokenizer.decode(part.tolist()) for part in parts])
    return list(zip(*texts))


@pytest.mark.usefixtures("unchecked")
def test_a_batch_has_no_more_sentences_than_there_is_room_for(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = build(config)
    translator = Translator(task.model.eval(), task.tokenizers, replace(task.search, length=12))
    want = [best[0].text for best in translator.translations(SOURCES[:9], beams=3)]
    asked, opened = [], translator._open

    def counted(parts: Sequence[Part], **hints: int) -> Session:
        asked.append(len(parts))
        return opened(parts, **hints)

    monkeypatch.setattr(translator, "_open", counted)
    monkeypatch.setattr(EagerEngine, "rows", lambda self, length: {13: 8}[length])
    found = translator.translations(SOURCES[:9], beams=3, batch=500)
    assert [best[0].text for best in found] == want
    assert max(asked) == 2  # of three beams each


@pytest.mark.usefixtures("unchecked")
def test_one_line_says_what_is_wrong(tmp_path: Path, config: Config) -> None:
    with pytest.raises(ValueError, match=r"held_out \(0\) must be 1 or more"):
        replace(config, held_out=0)
    with pytest.raises(ValueError, match="brings a tokenizer of its own"):
        replace(config, start="a", tokenizer="b")
    with pytest.raises(ValueError, match="choose from tiny, base, big"):
        translate.preset("huge")  # type: ignore[arg-type]
    learned = replace(SHAPE, position="learned", length=30)
    with pytest.raises(ValueError, match=r"learned positions \(30\) must be more than longest"):
        build(replace(config, model=learned))
    one = lines(tmp_path / "one", ["ab"])
    with pytest.raises(ValueError, match="too few to train"):
        build(replace(config, source=(one,), target=(one,)))
    with pytest.raises(ValueError, match="must be a list of strings"):
        Translator(Transformer.tiny(5), build(config).tokenizers, build(config).search).translate(
            "a"
        )


def test_a_model_of_images_is_no_start(tmp_path: Path, config: Config) -> None:
    from regard.model.vit import VisionConfig, VisionTransformer

    vit = VisionTransformer(VisionConfig(3, 4, 2, width=8, heads=2, feed_forward=8, layers=1))
    tokenizer = Tokenizer.characters(["ab"])
    files = {"tokenizer.json": tokenizer.to_bytes()}
    checkpoint.save(tmp_path / "vit", vit, files=files, task={"name": "classify"})
    with pytest.raises(ValueError, match="holds a VisionTransformer that does not read text"):
        build(replace(config, start=str(tmp_path / "vit")))


@pytest.mark.parametrize("size", ["tiny", "base", "big"])
def test_presets_are_whole(size: str) -> None:
    assert translate.preset(size).model.heads  # type: ignore[arg-type]
    assert from_json(Config, to_json(translate.preset(size))) == translate.preset(size)  # type: ignore[arg-type]


@pytest.mark.slow
def test_it_learns_to_say_sentences_backwards(tmp_path: Path, config: Config) -> None:
    many = sentences(3000, seed=1)
    source = lines(tmp_path / "many.a", many)
    target = lines(tmp_path / "many.b", [backwards(text) for text in many])
    shape = replace(SHAPE, width=64, heads=4, feed_forward=128, position="rotary")
    training = replace(TRAINING, steps=500, batch=1000, lr=3e-3, warmup=50, evaluate_every=250)
    config = replace(
        config, source=(source,), target=(target,), held_out=100, model=shape, training=training
    )
    run = tmp_path / "run"
    assert (trained(build(config, run), training, run).best or 0) > 90


def test_the_report_says_how_scores_were_computed(tmp_path: Path, config: Config) -> None:
    training = replace(config.training, steps=1, minutes=None, tensorboard=False)
    run = tmp_path / "run"
    fit(build(replace(config, training=training), run), training, run)
    report = (run / "report.md").read_text(encoding="utf-8")
    assert "- bleu: nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:" in report
    assert "- chrf: nrefs:1|case:mixed|eff:yes|nc:6|nw:0|space:no|version:" in report


@pytest.mark.parametrize("wrong", [None, 3, ("a", None), [b"a"], ["a", None], [["a"]], [3.0]])
def test_one_in_one_out_or_an_error_that_names_it(wrong: Any) -> None:
    with pytest.raises(ValueError, match="texts") as error:
        check_texts(wrong)
    assert "must be a" in str(error.value)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"words": "characters"}, r"words \(characters\) cannot be changed when fine-tuning"),
        ({"vocabulary": 77}, r"vocabulary \(77\) cannot be changed"),
        ({"model": replace(SHAPE, width=99)}, r"model.width \(99\) cannot .* its own \(\d+\)"),
    ],
)
def test_what_cannot_be_obeyed_beside_start_is_refused(
    tmp_path: Path, config: Config, changed: dict[str, Any], words: str
) -> None:
    run = tmp_path / "run"
    trained(build(config, run), config.training, run)
    build(replace(config, start=str(run)))
    with pytest.raises(ValueError, match=words):
        build(replace(config, start=str(run), **changed))


@pytest.mark.usefixtures("unchecked")
def test_a_part_is_judged_while_training_and_all_at_the_end(config: Config) -> None:
    task = build(replace(config, judged=5))
    assert str(task.sample) == "greedy search, 5 of 17 validation sentences"
    assert isinstance(task, Sampled)
    assert isinstance(task, Mixed)
    assert task.bfloat16_on_cpu
    judged = list[int]()
    score = task.judge
    task.judge = lambda written, wanted: judged.append(len(written)) or score(written, wanted)  # type: ignore[func-returns-value]
    model = task.model.eval()
    with torch.no_grad():
        part, whole = task.evaluate(model), task.evaluate_all(model)
    assert judged == [5, 17]
    assert part.keys() == whole.keys()
    assert part["perplexity"] != whole["perplexity"]
    assert str(build(config).sample) == "greedy search, all 17 validation sentences"


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"model": replace(SHAPE, position="learned", length=30)}, "learned positions"),
        ({"words": "separate", "model": replace(SHAPE, share="all")}, "share"),
        ({"target": "shorter"}, "211 lines in --source .* but 210 lines in --target"),
    ],
)
def test_what_is_wrong_is_said_before_a_tokenizer_is_learned(
    tmp_path: Path,
    config: Config,
    changed: dict[str, Any],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shorter = lines(tmp_path / "shorter", SOURCES[:-1])
    changed = {name: (shorter,) if value == "shorter" else value for name, value in changed.items()}
    monkeypatch.setattr(Tokenizer, "bpe", lambda *_: pytest.fail("a tokenizer was learned"))
    with pytest.raises(ValueError, match=words):
        build(replace(config, **changed))


def test_presets_suit_the_device() -> None:
    cpu, gpu = (translate.TASK.preset_on("tiny", torch.device(kind)) for kind in ("cpu", "cuda"))
    assert cpu == translate.preset("tiny")
    assert gpu.training.batch > cpu.training.batch
    assert gpu.model.dropout > cpu.model.dropout
    assert gpu.training.patience is not None
    assert translate.TASK.preset_on("base", torch.device("cuda")) == translate.preset("base")
