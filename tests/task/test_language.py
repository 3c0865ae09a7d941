"""A language model of any text: its windows, its measure, and what it writes."""

import math
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from regard.config import from_json, to_json
from regard.data.text import Store
from regard.model.language import LanguageShape
from regard.task import corpus, language
from regard.task.corpus import Examples, Words
from regard.task.language import Config, Generator, LanguageTask, build
from regard.task.load import load
from tests.task.samples import TRAINING, lines, sentences, trained

SHAPE = LanguageShape(width=16, heads=2, feed_forward=16, layers=1, dropout=0.0)
TEXTS = sentences(97)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config(
        text=(lines(tmp_path / "text", "\n\n".join(TEXTS).split("\n")),),
        held_out=0.2,
        context=7,
        words="characters",
        cache=str(tmp_path / "cache"),
        model=SHAPE,
        training=TRAINING,
    )


def said(task: LanguageTask, train: bool) -> list[str]:
    """What the windows predict, all of it."""
    part = task.train if train else task.held
    batch = language._batch(part, np.arange(len(part.places)), task.search)
    ids = batch.labels[0].tolist()
    return "".join("|" if i == task.search.end else task.tokenizer.decode([i]) for i in ids).split(
        "|"
    )[:-1]


@pytest.mark.parametrize("examples", ["documents", "joined"])
def test_every_document_is_trained_on_or_held_out(config: Config, examples: Examples) -> None:
    task = build(replace(config, examples=examples))
    train, held = said(task, True), said(task, False)
    assert sorted(train + held) == sorted(TEXTS)
    assert not set(train) & set(held)
    assert 5 < len(held) < 40


def test_lines_are_documents_of_their_own(tmp_path: Path, config: Config) -> None:
    path = lines(tmp_path / "lines", TEXTS)
    task = build(replace(config, text=(path,), examples="lines"))
    assert sorted(said(task, True) + said(task, False)) == sorted(TEXTS)


@settings(max_examples=40)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=12), st.integers(1, 30), st.data())
def test_joined_documents_are_read_in_slices(
    sizes: list[int], joined: int, data: st.DataObject
) -> None:
    class Documents(Store):
        def __init__(self) -> None:
            self.lengths = np.array(sizes, np.int32)[:, None]

        def tokens(self, i: int, side: int = 0) -> np.ndarray:
            return np.arange(1, 1 + sizes[i], dtype=np.uint16) + 100 * i

    order = np.array(data.draw(st.permutations(range(len(sizes)))))
    with mock.patch.object(corpus, "_JOINED", joined):
        text = corpus.Joined(Documents(), order, end=7)
    whole: list[int] = []
    for i in range(len(text.lengths)):
        stretch = text.tokens(i)
        assert len(stretch) == text.lengths[i]
        tokens = stretch[0 : len(stretch)].tolist()
        whole += [*tokens, 7]
        first, last = sorted(data.draw(st.integers(0, len(stretch))) for _ in range(2))
        assert stretch[first:last].tolist() == tokens[first:last]
        assert stretch[first : last + 1000].tolist() == tokens[first:]
    assert whole == [token for i in order for token in [*Documents().tokens(i).tolist(), 7]]


def test_of_one_long_document_the_end_is_held_out(tmp_path: Path, config: Config) -> None:
    path = lines(tmp_path / "one", [" ".join(TEXTS)])
    task = build(replace(config, text=(path,)))
    # A window's share of one document: all but the last are trained on, in order.
    assert task.train.places[:, 1].max() < task.held.places[:, 1].min()
    share = len(task.held.places) / (len(task.train.places) + len(task.held.places))
    assert share == pytest.approx(0.2, abs=0.01)


def test_windows_look_back_no_further_than_the_context(config: Config) -> None:
    task = build(config)
    batch = task.batch(np.arange(11), 1)
    assert int(batch.lengths.lengths.max()) == 7
    loss, count = task.loss(batch)
    assert count == batch.labels.numel()
    assert loss.isfinite()


@pytest.mark.parametrize("words", ["pairs", "characters", "bytes"])
@pytest.mark.parametrize("examples", ["documents", "joined"])
def test_bits_per_byte_of_a_uniform_model(config: Config, words: Words, examples: Examples) -> None:
    """log₂ of the vocabulary for each token, over the bytes of the text and its ends."""
    task = build(replace(config, words=words, vocabulary=280, examples=examples))
    with torch.no_grad():
        task.model.output.weight.zero_()
        scores = task.evaluate(task.model.eval())
    assert scores["perplexity"] == pytest.approx(task.tokenizer.size, rel=1e-4)
    tokens = task.held.places[:, 2].sum()
    size = task.held.bytes(task.tokenizer)
    if words == "characters":
        assert size == sum(len(text.encode()) + 1 for text in said(task, False))
    bits = tokens * math.log2(task.tokenizer.size) / size
    assert scores["bits_per_byte"] == pytest.approx(bits, rel=1e-4)
    assert scores["compression"] == pytest.approx(8 / bits, rel=1e-4)


def test_bytes_know_every_text(config: Config) -> None:
    task = build(replace(config, words="bytes"))
    assert task.tokenizer.size == 260
    assert task.tokenizer.decode(task.tokenizer.encode("Ω€")) == "Ω€"


def test_files_to_validate_on(tmp_path: Path, config: Config) -> None:
    path = lines(tmp_path / "valid", ["ab cd"])
    task = build(replace(config, valid=(path,)))
    assert said(task, False) == ["ab cd"]
    assert sorted(said(task, True)) == sorted(TEXTS)
    assert task.notes == []
    (note,) = build(replace(config, valid=config.text)).notes
    assert note.startswith(f"{config.text[0]} is used to train and to validate")


def test_a_run_goes_on_and_writes(tmp_path: Path, config: Config) -> None:
    run = tmp_path / "run"
    trained(build(config, run), TRAINING, run)
    assert trained(build(config, run), TRAINING, run, steps=4).step == 4
    generator = load(run)
    assert isinstance(generator, Generator)
    prompts = ["ab", "", "cd ef " * 9]
    texts = generator.generate(prompts, length=5, seed=3)
    assert [text.startswith(prompt.strip()) for text, prompt in zip(texts, prompts)] == [True] * 3
    assert texts == generator.generate(prompts, length=5, seed=3, batch=1)
    assert texts != generator.generate(prompts, length=5, seed=4)
    greedy = generator.generate(prompts, length=5, temperature=0)
    assert greedy == generator.generate(prompts, length=5, temperature=0, seed=9)
    config_said = generator._about["config"]
    assert from_json(Config, {**config_said, "training": to_json(TRAINING)}) == config
    assert set(language.evaluate(run).scores) == {"compression", "bits_per_byte", "perplexity"}
    other = lines(tmp_path / "other", ["tu tu"])
    assert language.evaluate(run, texts=(other,)).scores["bits_per_byte"] > 0
    # Another training may begin with it.
    begun = build(replace(config, start=str(run)))
    for mine, its in zip(begun.model.parameters(), generator.model.parameters()):
        assert torch.equal(mine, its)


@pytest.mark.usefixtures("unchecked")
def test_one_line_says_what_is_wrong(tmp_path: Path, config: Config) -> None:
    with pytest.raises(ValueError, match="there is no text to learn from"):
        build(replace(config, text=()))
    with pytest.raises(ValueError, match=r"held_out \(1.0\) must be above 0 and below 1"):
        replace(config, held_out=1.0)
    with pytest.raises(ValueError, match=r"context \(0\) must be 1 or more"):
        replace(config, context=0)
    with pytest.raises(ValueError, match="choose from tiny, base, big"):
        language.preset("huge")  # type: ignore[arg-type]
    learned = replace(SHAPE, position="learned", length=6)
    with pytest.raises(ValueError, match=r"learned positions \(6\) must be at least context \(7\)"):
        build(replace(config, model=learned))
    short = lines(tmp_path / "short", ["a"])
    with pytest.raises(ValueError, match="too few to train"):
        build(replace(config, text=(short,)))


@pytest.mark.parametrize("size", ["tiny", "base", "big"])
def test_presets_are_whole(size: str) -> None:
    config = language.preset(size)  # type: ignore[arg-type]
    assert from_json(Config, to_json(config)) == config


def test_prompts_draw_by_their_numbers_in_any_window(tmp_path: Path, config: Config) -> None:
    run = tmp_path / "run"
    trained(build(config, run), TRAINING, run)
    generator = load(run)
    assert isinstance(generator, Generator)
    prompts = ["ab", "cd", "a", "bcd", "d"]
    together = generator.generate(prompts, length=5)
    apart = generator.generate(prompts[:2], length=5) + generator.generate(
        prompts[2:], length=5, first=2
    )
    assert together == apart
