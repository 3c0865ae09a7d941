"""Dates in many languages: what is written, what is held out, and that it can be learned."""

import datetime
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from regard.config import from_json, to_json
from regard.model.transformer import TransformerShape
from regard.task import dates
from regard.task.load import load
from regard.train.config import TrainingConfig
from regard.train.display import Display
from regard.train.fit import fit

DAY = datetime.date(2024, 3, 5)
SMALL = dates.Config(
    languages=("en", "de", "ja"),
    first=1999,
    last=2003,
    examples=211,
    judged=23,
    model=TransformerShape(
        width=16, heads=2, feed_forward=16, encoder_layers=1, decoder_layers=1, norm="pre"
    ),
    training=TrainingConfig(
        steps=3, batch=300, warmup=2, evaluate_every=2, tensorboard=False, device="cpu"
    ),
)


@pytest.mark.parametrize(
    ("language", "form", "text"),
    [
        ("en", "full", "Tuesday, March 5, 2024"),
        ("de", "medium", "05.03.2024"),
        ("ja", "long", "2024年3月5日"),
        ("el", "long", "5 Μαρτίου 2024"),
        ("uk", "long", "5 березня 2024\N{SPACE}\N{CYRILLIC SMALL LETTER ER}."),
        ("hu", "yMMMEd", "2024. márc. 5., K"),
        ("ar", "medium", "05/03/2024"),
    ],
)
def test_dates_are_written_as_people_do(language: str, form: dates.Form, text: str) -> None:
    assert dates.say(DAY, language, form) == text


def test_there_are_sixty_languages() -> None:
    assert dates.spoken(dates.LANGUAGES) == 60


def test_no_text_means_two_days() -> None:
    """In any language and form, in small letters too; else no model could be right."""
    seen: dict[str, datetime.date] = {}
    # Days whose numbers could be taken for each other, in one year and in two.
    days = [datetime.date(2011, month, day) for month in range(1, 13) for day in (1, 2, 11, 12)]
    for day in [*days, datetime.date(2002, 1, 12), datetime.date(1911, 12, 1)]:
        for language in dates.LANGUAGES:
            for form in dates.FORMS:
                text = dates.say(day, language, form)
                for said in (text, text.lower()):
                    assert seen.setdefault(said, day) == day, said


def test_no_held_out_day_is_ever_trained_on() -> None:
    seen, held = dates.days(1900, 2099)
    assert len(seen) + len(held) == 73_049
    assert not set(seen) & set(held)
    assert 0.09 < len(held) / 73_049 < 0.11
    task = dates.build(SMALL)
    trained = {
        task.tokenizers[1].decode(task.examples.packed(np.array([i]), 1).ids)
        for i in range(len(task.examples))
    }
    assert not trained & {date.iso for date in task.judged}


def test_the_same_seed_writes_the_same_dates() -> None:
    _, held = dates.days(2000, 2001)
    first = dates.write(held, ("en", "fr"), 31, seed=5)
    assert first == dates.write(held, ("en", "fr"), 31, seed=5)
    assert first != dates.write(held, ("en", "fr"), 31, seed=6)


def test_no_month_is_rare_in_training() -> None:
    seen, _ = dates.days(1990, 1999)
    languages = ("en", "eu", "fi")
    count = 2 * len(languages) * len(dates.FORMS) * 12
    written = dates.evenly(seen, languages, count + 5, seed=0)
    assert len(written) == count + 5
    months = Counter((date.language, date.iso[5:7]) for date in written[:count])
    assert len(months) == 36
    assert set(months.values()) == {2 * len(dates.FORMS)}
    assert written == dates.evenly(seen, languages, count + 5, seed=0)
    assert written != dates.evenly(seen, languages, count + 5, seed=1)


def test_every_name_is_learned_in_small_letters_too() -> None:
    seen, _ = dates.days(1990, 1999)
    turn = len(dates.FORMS) * 12
    written = dates.evenly(seen, ("en",), dates.LEARNED_LOWER * turn, seed=0)
    small = [date for date in written if date.text == date.text.lower()]
    assert len(small) == turn
    months = Counter(date.iso[5:7] for date in small)
    assert set(months.values()) == {len(dates.FORMS)}


def test_every_character_of_every_date_is_known() -> None:
    task = dates.build(replace(SMALL, languages=dates.LANGUAGES))
    tokenizer = task.tokenizers[0]
    for text, iso in task.held_out:
        assert tokenizer.unknown not in tokenizer.encode(text)
        assert tokenizer.decode(tokenizer.encode(iso)) == iso


def test_a_batch_is_sources_that_end_and_targets_that_start() -> None:
    task = dates.build(SMALL)
    batch = task.batch(np.array([0, 7]), 1)
    settings = task.search
    assert (
        batch.source[0, batch.source_lengths.offsets[1:].long() - 1].tolist() == [settings.end] * 2
    )
    assert batch.target_lengths.lengths.tolist() == [11, 11]
    assert batch.target[0, 0] == settings.start
    assert batch.labels[0, 10] == settings.end
    assert torch.equal(batch.target[0, 1:11], batch.labels[0, :10])


def test_a_run_trains_saves_and_translates(tmp_path: Path) -> None:
    task = dates.build(SMALL)
    fit(task, SMALL.training, tmp_path / "run", display=Display())
    translator = load(tmp_path / "run")
    assert translator._about["name"] == "dates"
    (written, empty) = translator.translate(["March 5, 2024", ""])
    assert len(written) <= dates.LONGEST
    assert empty == ""
    scores = task.evaluate(translator.model)
    assert set(scores) == {"exact_match", "perplexity"}
    again = dates.evaluate(tmp_path / "run").scores
    assert again["exact_match"] == scores["exact_match"]
    # The run can be repeated from what it says of itself.
    said = translator._about["config"]
    assert from_json(dates.Config, {**said, "training": to_json(SMALL.training)}) == SMALL


@pytest.mark.usefixtures("unchecked")
def test_one_line_says_what_is_wrong() -> None:
    with pytest.raises(ValueError, match="xx, yy, which CLDR does not know"):
        dates.build(replace(SMALL, languages=("xx", "de", "yy")))
    with pytest.raises(ValueError, match=r"first \(2010\) and last \(2001\)"):
        replace(SMALL, first=2010, last=2001)
    with pytest.raises(ValueError, match=r"examples \(0\) must be 1 or more"):
        replace(SMALL, examples=0)
    with pytest.raises(ValueError, match="choose from tiny, base, big"):
        dates.preset("huge")  # type: ignore[arg-type]


@pytest.mark.parametrize("size", ["tiny", "base", "big"])
def test_presets_are_whole(size: str) -> None:
    assert dates.preset(size).training.steps  # type: ignore[arg-type]


@pytest.mark.slow
def test_the_default_is_learned_almost_perfectly(tmp_path: Path) -> None:
    config = dates.preset()
    config = replace(config, training=replace(config.training, device="cpu"))
    result = fit(dates.build(config), config.training, tmp_path / "run", display=Display())
    assert result.best is not None
    assert result.best >= 0.98
    load_ = load(tmp_path / "run")
    texts = ["Dienstag, 5. März 2024", "5 mars 2024", "2024年3月5日", "tuesday, march 5, 2024"]
    assert load_.translate(texts) == ["2024-03-05"] * 4
