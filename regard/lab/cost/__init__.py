"""The cost of layers and models: by formula, and counted while they run.

count.py       counts operations beneath torch, those of fused kernels too
layers.py      attention, convolution, recurrence and a dense layer
path.py        the longest path between two positions of a layer
models.py      whole models, part by part
orders.py      formulas as polynomials: growth beside growth, counts beside counts
documents.py   the tables of the course documents, and the lengths at which two layers cost the same
show.py        all of it in tables: terminal, Markdown, JSON
"""

from regard.lab.cost.count import Counter, Counts, counted
from regard.lab.cost.layers import LAYERS, Cost, Measured, Sizes, measure
from regard.lab.cost.models import ModelCost, model_cost

__all__ = [
    "LAYERS",
    "Cost",
    "Counter",
    "Counts",
    "Measured",
    "ModelCost",
    "Sizes",
    "counted",
    "measure",
    "model_cost",
]
