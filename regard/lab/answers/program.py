"""Programming exercises as answers: what a notebook's checks say of its solution, and of a slip."""

from regard.lab import exercise
from regard.lab.answers.answer import Demonstration


def solved(name: str) -> Demonstration:
    """The solved exercise, and what its checks say of it."""
    said = exercise.checked(name)
    return Demonstration(
        len(said) == 4 and all(line.startswith("✓") for line in said),
        {line.partition(":")[0].strip("✓✗… "): line for line in said},
    )


def slip(name: str, right: str, wrong: str) -> Demonstration:
    """The solution with one thing written wrongly; it stands where no check objects."""
    said = exercise.checked(name, right, wrong)
    objections = [line for line in said if not line.startswith("✓")]
    return Demonstration(
        not objections,
        {"instead of": right, "one writes": wrong, "the check says": " ".join(objections)},
    )
