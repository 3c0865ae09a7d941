"""The command `recipes`: runs with known scores, and what each needs."""

from inspect import getdoc

from regard.recipes.book import RECIPES, recipe
from regard.recipes.recipe import summary


def recipes(name: str | None) -> None:
    """`regard recipes [NAME]`."""
    if name is not None:
        print(f"{name}\n\n{getdoc(recipe(name))}\n\n{_command(name)}")
        return
    width = max(map(len, RECIPES))
    for known, make in RECIPES.items():
        print(f"{known:<{width}}  {summary(make)}")
    print(f"\nregard recipes NAME says what one needs. Run one with:\n{_command('NAME')}")


def _command(name: str) -> str:
    return f"regard train --recipe {name} RUN --data FOLDER"
