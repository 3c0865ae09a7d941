"""The lab: what the course says, computed in front of the reader's eyes.

    from regard.lab import experiments, run
    run("equivariance")         # in a notebook, a section of the report

`experiments` are all there are, `run` performs one of them here and now.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from regard.lab.experiment import Experiment
    from regard.lab.report import Shown


def experiments() -> "tuple[Experiment, ...]":
    """Every experiment, in the order in which one would read them."""
    from regard.lab import claims

    return claims.experiments()


def run(name: str) -> "Shown":
    """Performs the experiment of this name."""
    from regard.lab.claims import find
    from regard.lab.perform import perform
    from regard.lab.report import Shown

    found = find(name)
    if len(found) > 1:
        names = ", ".join(experiment.name for experiment in found)
        raise ValueError(f"{name!r} is {len(found)} experiments; run one of {names}")
    result = perform(found[0])
    return Shown(result.experiment, result.finding, result.seconds)
