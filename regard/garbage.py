"""Python's searches for garbage, each of which looks at all that lives."""

import gc

OBJECTS = 100_000
"""New objects between two searches; Python's own number is 700. Answers, and requests that wait,
are many small ones without cycles."""


def search_rarely() -> None:
    gc.set_threshold(OBJECTS)
