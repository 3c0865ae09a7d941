"""The lab: experiments on what is taught about attention, attention by hand, costs, exercises.

    from regard.lab import experiments, run
    run("equivariance")         # in a notebook, a section of the report

`experiments` gives all of them, `run` performs one in this process.
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
