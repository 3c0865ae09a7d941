"""Experiments are performed once for all tests that look at them."""

import jaxtyping
import pytest

from regard.lab import run
from regard.lab.claims import experiments, lines
from regard.lab.perform import Result

LONG = {
    line.name
    for family, some in lines().items()
    if family.name in ("costs", "pairs", "parameters", "reach")
    for line in some
} | {experiment.name for experiment in experiments() if experiment.trained}
"""Experiments that count each operator, or train models, under which the checks of annotations take
all the time."""


class Results(dict[str, Result]):
    """What came out of each experiment, performed when it is first asked for."""

    def __missing__(self, name: str) -> Result:
        with pytest.MonkeyPatch.context() as patch:
            if name in LONG:
                patch.setattr(jaxtyping.config, "jaxtyping_disable", True)
            self[name] = run(name)
        return self[name]


@pytest.fixture(scope="session")
def results() -> Results:
    return Results()
