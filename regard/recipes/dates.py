"""Dates as people write them in sixty languages, to ISO 8601."""

from dataclasses import replace
from pathlib import Path

from regard.recipes.recipe import Recipe
from regard.task import dates

MORE = (
    *("af", "az", "be", "bs", "cy", "eu", "fa", "fil", "ga", "gl", "hr", "hy"),
    *("ka", "kk", "lv", "mk", "ms", "sq", "sr", "sw", "ta", "ur"),
)
"""Locales of CLDR beside those of the demo."""


def many(data: Path) -> Recipe:
    """Dates in sixty languages to ISO 8601, on two cores.

    Data: none; dates are written by CLDR's rules, and the days of the test are in no training.
    Settings: 3 + 1 layers of width 128; Muon, 640 steps of 4,000 tokens.
    Reached: 99.97% of 5,000 dates (mean of three seeds) in 77 s of two cores.
    """
    preset = dates.preset("tiny")
    model = replace(preset.model, encoder_layers=3, decoder_layers=1)
    training = replace(
        preset.training,
        steps=640,
        batch=4000,
        optimizer="muon",
        lr=6e-3,
        warmup=60,
        evaluate_every=320,
        save_every=320,
    )
    languages = (*preset.languages, *MORE)
    config = replace(preset, languages=languages, model=model, training=training)
    return Recipe("dates", config, {"held out": {"count": 5000}})
