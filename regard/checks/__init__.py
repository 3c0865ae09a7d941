"""Numerical checks: all ways to compute a model give the same results.

    fused = formula, packed = padded, cached = uncached, …

`regard check RUN` and `regard.check(model, *inputs)` measure every property on a user's own model,
and show for each the largest difference, the tolerance, and a remedy where that is exceeded.
`properties.py` lists those of Regard's models, which `compute.py` runs in each of their ways on the
data that `sample.py` finds. `module.py` lists those of any other module, whose attention
`attention.py` computes by its formula.
"""

from regard.checks.contract import check
from regard.checks.finding import Finding
from regard.checks.report import Report

__all__ = ["Finding", "Report", "check"]
