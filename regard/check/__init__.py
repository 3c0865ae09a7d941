"""The equivalence contract: what a model computes does not depend on how it is computed.

    fused = formula, packed = padded, cached = uncached, …

`regard check RUN` measures every property on the user's own model and data, and says of each the
largest difference, what is allowed, and what to do where that is exceeded. `properties.py` lists
them; `sample.py` finds the data; `compute.py` runs a model in each of its ways.
"""

from regard.check.contract import check
from regard.check.finding import Finding

__all__ = ["Finding", "check"]
