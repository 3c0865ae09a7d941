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
    """
    preset = dates.preset("tiny")
    languages = (*preset.languages, *MORE)
    return Recipe("dates", replace(preset, languages=languages), {"held out": {"count": 5000}})
