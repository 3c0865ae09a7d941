"""The equivalence contract: all ways to compute a model give the same results.

    fused = formula, packed = padded, cached = uncached, …

`regard check RUN` measures every property on the user's own model and data, and shows for each the
largest difference, the tolerance, and a remedy where that is exceeded. `properties.py` lists
them; `sample.py` finds the data; `compute.py` runs a model in each of its ways.
"""

from regard.checks.contract import check
from regard.checks.finding import Finding

__all__ = ["Finding", "check"]
