"""The recipes by name."""

from collections.abc import Mapping
from difflib import get_close_matches
from types import MappingProxyType

from regard.recipes import dates, europarl, images, multi30k
from regard.recipes.recipe import Make

RECIPES: Mapping[str, Make] = MappingProxyType(
    {
        "multi30k-en-de": multi30k.en_de,
        "multi30k-en-de-own": multi30k.en_de_own,
        "multi30k-en-de-minute": multi30k.en_de_minute,
        "multi30k-en-de-cpu": multi30k.en_de_cpu,
        "multi30k-en-fr": multi30k.en_fr,
        "europarl-en-de": europarl.en_de,
        "europarl-de-en": europarl.de_en,
        "europarl-language": europarl.english,
        "cifar10": images.cifar10,
        "cifar10-long": images.cifar10_long,
        "fashion-mnist": images.fashion_mnist,
        "strips": images.strips,
        "dates": dates.many,
    }
)


def recipe(name: str) -> Make:
    if name not in RECIPES:
        close = get_close_matches(name, RECIPES, n=1)
        guess = f"did you mean {close[0]}? " if close else ""
        raise ValueError(f"there is no recipe {name!r}; {guess}there are {', '.join(RECIPES)}")
    return RECIPES[name]
