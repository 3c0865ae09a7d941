"""What layers and models cost: the formula, and the count of what is executed.

count.py       a counter beneath torch, which sees every product of matrices, fused ones too
layers.py      attention, convolution, recurrence, one dense layer: formula beside count
models.py      whole models, part by part
documents.py   the course documents' tables beside ours, and the lengths where lines cross
show.py        all of it in tables, for people and for other programs
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
