"""The command `recipes`: runs with known scores, and what each needs."""

from inspect import getdoc

from regard.machine.shell import typed
from regard.recipes.book import RECIPES, recipe
from regard.recipes.recipe import needs_data, summary


def recipes(name: str | None) -> None:
    """`regard recipes [NAME]`."""
    if name is not None:
        make = recipe(name)
        print(f"{name}\n\n{getdoc(make)}\n\n{_command(name, needs_data(make))}")
        return
    width = max(map(len, RECIPES))
    for known, make in RECIPES.items():
        print(f"{known:<{width}}  {summary(make)}")
    without = [known for known, make in RECIPES.items() if not needs_data(make)]
    print(
        typed("\nregard recipes NAME says what one needs. Run one with:\n")
        + f"{_command('NAME', True)}\n"
        f"Without --data: {', '.join(without)}."
    )


def _command(name: str, data: bool) -> str:
    return typed(f"regard train --recipe {name} RUN{' --data FOLDER' * data}")
