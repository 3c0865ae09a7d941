"""Dates as people write them in sixty languages, to ISO 8601."""

from regard.recipes.recipe import Folder, Recipe
from regard.task import dates


def many(data: Folder) -> Recipe:
    """Dates in sixty languages to ISO 8601, on two cores: what `make demo` learns.

    Data: none; dates are written by CLDR's rules, and the days of the test are in no training.
    Settings: 3 + 1 layers of width 128; Muon, 640 steps of 4,000 tokens.
    Reached: 99.93% of 5,000 dates (mean of three seeds) in 76 s of two cores.
    """
    return Recipe("dates", dates.preset("tiny"), {"held out": {"count": 5000}})
