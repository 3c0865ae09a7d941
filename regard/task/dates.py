"""Dates as people write them, in many languages, to ISO 8601: the task that needs no download.

    Dienstag, 5. März 2024  ·  5 mars 2024  ·  2024年3月5日  ·  tue, 5 mar 2024   →   2024-03-05

Dates are written by the rules of Unicode's CLDR, through babel. Days are split in two by a hash:
what is held out was never seen in any language or form.
"""

import datetime
import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np

from regard.data.tokenizer import Tokenizer
from regard.decode.engine.ensemble import Weights
from regard.model.transformer import TransformerShape
from regard.task.search import SearchSettings
from regard.task.settings import Precision, Preset, check_preset, recorded
from regard.task.spec import Evaluation, TaskSpec
from regard.task.text import Listed, Progress, Transduction, build_transformer, exact
from regard.task.translator import Pair, Translator, load_translators
from regard.train.config import TrainingConfig

Form: TypeAlias = Literal["full", "long", "medium", "yMMMEd"]
FORMS: tuple[Form, ...] = ("full", "long", "medium", "yMMMEd")
"""With the weekday; with the month's name; short; short, with the weekday."""

LANGUAGES = (
    *("en", "en_GB", "de", "fr", "es", "it", "pt", "nl", "sv", "da", "nb", "is", "fi", "et"),
    *("lt", "pl", "cs", "sk", "sl", "hu", "ro", "tr", "ru", "uk", "bg", "el", "ca", "he", "ar"),
    *("hi", "bn", "th", "vi", "id", "ko", "ja", "zh", "zh_Hant", "af", "az", "be", "bs", "cy"),
    *("eu", "fa", "fil", "fo", "ga", "gl", "hr", "hy", "ka", "kk", "lb", "lv", "mk", "ms", "sq"),
    *("sr", "sw", "ta", "ur"),
)
"""Names of CLDR's locales, all of which write the days of our calendar unlike any other day."""

HELD_OUT = 0.1
"""The share of days that no training sees."""

LONGEST = 64
"""Characters of a date, in any language, and some more."""

LOWER = 0.1
"""The share of dates that are written in small letters, as people in a hurry do."""

LEARNED_LOWER = 5
"""To learn from, every fifth of each kind is: a name that was never seen so can't be guessed."""


@dataclass(frozen=True)
class Config:
    """Dates in many languages to ISO 8601."""

    languages: tuple[str, ...] = LANGUAGES
    """Languages, by the names of CLDR's locales: en, de, zh_Hant."""
    first: int = 1900
    """The first year."""
    last: int = 2099
    """The last year."""
    examples: int = 50_000
    """Training examples."""
    judged: int = 1000
    """Validation examples that are translated at each evaluation."""
    model: TransformerShape = field(
        default_factory=lambda: TransformerShape(
            width=128,
            heads=4,
            feed_forward=256,
            encoder_layers=3,
            decoder_layers=1,
            norm="pre",
            position="rotary",
            dropout=0.0,
        )
    )
    """The model's shape."""
    training: TrainingConfig = field(
        default_factory=lambda: TrainingConfig(
            steps=640,
            batch=4000,
            optimizer="muon",
            lr=6e-3,
            schedule="cosine",
            warmup=60,
            smoothing=0.0,
            evaluate_every=160,
            save_every=160,
        )
    )
    """Optimizer, learning-rate schedule, batches, evaluation, checkpoints."""

    def __post_init__(self) -> None:
        if not self.languages:
            raise ValueError("languages () must name at least one; try en de fr")
        if not 1 <= self.first <= self.last <= 9999:
            raise ValueError(
                f"first ({self.first}) and last ({self.last}) must be years in order, 1 to 9999"
            )
        for name in ("examples", "judged"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} ({getattr(self, name)}) must be 1 or more")


def preset(size: Preset = "tiny") -> Config:
    """Tiny learns it in a minute and a half on two cores; the others are to see what size does."""
    check_preset(size)
    config = Config()
    match size:
        case "tiny":
            return config
        case "base":
            shape = replace(config.model, width=256, feed_forward=1024)
            shape = replace(shape, encoder_layers=4, decoder_layers=4)
        case "big":
            shape = replace(config.model, width=512, heads=8, feed_forward=2048)
            shape = replace(shape, encoder_layers=6, decoder_layers=6)
    training = replace(config.training, optimizer="adamw", lr=5e-4, warmup=150, batch=2000)
    return replace(config, model=shape, training=replace(training, steps=2000))


# The dates


@dataclass(frozen=True)
class Date:
    """A day in somebody's words."""

    text: str
    iso: str
    language: str


def say(day: datetime.date, language: str, form: Form) -> str:
    """A day as it is written in a language; odd spaces and marks nobody types are left out."""
    from babel.dates import format_date, format_skeleton

    if form == "yMMMEd":
        text = format_skeleton(form, day, locale=language)
    else:
        text = format_date(day, form, locale=language)
    return text.translate(_UNTYPED)


# No-break spaces; marks of the direction of writing.
_UNTYPED = str.maketrans({"\u202f": " ", "\xa0": " ", "\u200e": None, "\u200f": None})


def days(first: int, last: int) -> tuple[list[datetime.date], list[datetime.date]]:
    """All days of these years: those for training, and those held out."""
    begin, end = datetime.date(first, 1, 1), datetime.date(last, 12, 31)
    seen: list[datetime.date] = []
    held: list[datetime.date] = []
    for ordinal in range(begin.toordinal(), end.toordinal() + 1):
        day = datetime.date.fromordinal(ordinal)
        digest = hashlib.sha256(day.isoformat().encode()).digest()
        share = int.from_bytes(digest[:4], "big") / 2**32
        (held if share < HELD_OUT else seen).append(day)
    return seen, held


def write(
    days: Sequence[datetime.date], languages: Sequence[str], count: int, seed: int
) -> list[Date]:
    """So many of the days, in languages and forms by chance: the same for the same seed."""
    chance = np.random.Generator(np.random.PCG64(seed))
    among: tuple[Sequence[Any], ...] = (days, languages, FORMS)
    draws = [[some[i] for i in chance.integers(0, len(some), count)] for some in among]
    written = []
    for day, language, form, small in zip(*draws, chance.random(count) < LOWER):
        text = say(day, language, form)
        written.append(Date(text.lower() if small else text, day.isoformat(), language))
    return written


def evenly(
    days: Sequence[datetime.date], languages: Sequence[str], count: int, seed: int
) -> list[Date]:
    """So many dates to learn from: each language, form and month as often as any other, and in
    small letters too, since a month's name that chance left out can't be guessed."""
    chance = np.random.Generator(np.random.PCG64(seed))
    months: dict[int, list[datetime.date]] = {}
    for day in days:
        months.setdefault(day.month, []).append(day)
    kinds = [*product(languages, FORMS, months.values())]
    written: list[Date] = []
    for turn in range(-(-count // len(kinds))):
        for i in chance.permutation(len(kinds))[: count - len(written)]:
            language, form, month = kinds[i]
            day = month[chance.integers(len(month))]
            text = say(day, language, form)
            small = (turn + i) % LEARNED_LOWER == 0
            written.append(Date(text.lower() if small else text, day.isoformat(), language))
    return written


def alphabet(languages: Sequence[str]) -> list[str]:
    """Dates with every character that any date has: each month, each weekday, each digit."""
    months = [datetime.date(2000, month, 1) for month in range(1, 13)]
    week = [datetime.date(2000, 1, day) for day in range(1, 8)]
    texts = [say(day, name, form) for day in months + week for name in languages for form in FORMS]
    return [*texts, *(text.lower() for text in texts), "0123456789-"]


def spoken(languages: Sequence[str]) -> int:
    """How many languages there are among locales: en and en_GB are one."""
    return len({name.partition("_")[0] for name in languages})


def check(languages: Sequence[str]) -> None:
    """Refuse languages that babel does not know, all at once."""
    from babel.localedata import exists

    if unknown := [name for name in languages if not exists(name)]:
        raise ValueError(
            f"languages has {', '.join(unknown)}, which CLDR does not know; "
            "write them as de, pt or zh_Hant"
        )


# The task


def build(config: Config, run: Path | None = None, progress: Progress | None = None) -> "Dates":
    """The task of this config; all of it is made here, in a few seconds."""
    check(config.languages)
    seen, held = days(config.first, config.last)
    if not seen or not held:
        raise ValueError(
            f"the years {config.first} to {config.last} have too few days to hold some out"
        )
    seed = config.training.seed
    tokenizer = Tokenizer.characters(alphabet(config.languages))
    if progress:
        progress(f"dates in {spoken(config.languages)} languages", 0.0)
    dates = evenly(seen, config.languages, config.examples, seed)
    judged = write(held, config.languages, config.judged, seed)
    if progress:
        progress(f"dates in {spoken(config.languages)} languages", 1.0)
    return Dates(config, tokenizer, dates, judged)


class Dates(Transduction):
    """The dates' transduction, whose held-out dates know their language."""

    written = "dates"

    def __init__(
        self, config: Config, tokenizer: Tokenizer, dates: Sequence[Date], judged: Sequence[Date]
    ):
        self.judged = list(judged)
        super().__init__(
            build_transformer(config.model, (tokenizer, tokenizer), config.training.seed),
            (tokenizer, tokenizer),
            Listed(_pairs(dates), tokenizer, tokenizer),
            _pairs(judged),
            score="exact_match",
            judge=exact,
            settings=SearchSettings.of(tokenizer, beams=1, length=LONGEST),
            training=config.training,
            about=TASK.about(config),
        )


def _pairs(dates: Sequence[Date]) -> list[Pair]:
    return [(date.text, date.iso) for date in dates]


def evaluate(
    folder: str | os.PathLike[str],
    *,
    count: int | None = None,
    ensemble: Sequence[str] = (),
    ensemble_weights: Weights = (),
    precision: Precision = "fp32",
    device: str = "cpu",
    progress: Progress | None = None,
) -> Evaluation:
    """How many held-out dates a model, or a run's, or an ensemble of them, translates rightly."""
    translator = load_translators((folder, *ensemble), ensemble_weights, device, precision)
    config = recorded(Config, translator._about, folder) or Config()
    _, held = days(config.first, config.last)
    if count is not None and count < 1:
        raise ValueError(f"count ({count}) must be 1 or more")
    number = config.judged if count is None else count
    dates = write(held, config.languages, number, config.training.seed)
    written = []
    for text in translator.stream((date.text for date in dates), batch=256):
        written.append(text)
        if progress:
            progress("dates", len(written) / len(dates))
    return Evaluation(exact(written, [date.iso for date in dates]))


TASK = TaskSpec(
    name="dates",
    summary="dates in many languages to ISO 8601; nothing to download",
    config=Config,
    preset=preset,
    build=build,
    predictor=Translator._of,
    evaluate=evaluate,
    example='echo "3. Oktober 1990" | regard translate {run}',
)
