"""Experiments are performed once for all tests that look at them."""

import pytest

from regard.lab import run
from regard.lab.perform import Result


class Results(dict[str, Result]):
    """What came out of each experiment, performed when it is first asked for."""

    def __missing__(self, name: str) -> Result:
        self[name] = run(name)
        return self[name]


@pytest.fixture(scope="session")
def results() -> Results:
    return Results()
