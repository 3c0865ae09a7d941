"""Plots that more than one answer shows: positions as a heat map, and a key that moves."""

import torch
from torch import Tensor

from regard import SinusoidalPositions, attend, attention_weights
from regard.lab.answers.figure import Heat
from regard.lab.experiment import Curve, Plot

QUERY = torch.tensor([[1.0, 1.0]], dtype=torch.float64)
KEY = torch.tensor([[0.2, 0.1], [0.6, -0.4], [-0.3, 0.5], [0.1, 0.9]], dtype=torch.float64)
VALUE = torch.tensor([[3.0, 2.5], [0.0, 0.0], [1.0, 0.2], [0.2, 1.4]], dtype=torch.float64)
"""One query and four pairs of keys and values; the first key moves."""


def moved(by: float) -> Tensor:
    """The keys, when the first has moved along the query."""
    return torch.cat((KEY[:1] + by * QUERY, KEY[1:]))


def moving_key() -> Plot:
    """The output slides on a line while one key moves."""
    outputs = [attend(QUERY, moved(0.6 * step), VALUE)[0].tolist() for step in range(-8, 9)]
    before = attention_weights(QUERY, KEY)[0, 1:]
    others = (before @ VALUE[1:] / before.sum()).tolist()
    return Plot(
        "The output, while key 1 moves along the query",
        "first entry of h",
        "second entry of h",
        (
            Curve("from the mean of the others to v₁", *zip(others, VALUE[0].tolist())),
            Curve("measured", *zip(*outputs)),
            Curve("the other values", *zip(*VALUE[[1, 2, 3, 1]].tolist())),
        ),
    )


def heat_map(positions: int = 32, width: int = 64) -> Heat:
    """The encodings of the first positions."""
    return Heat(
        f"SinusoidalPositions positions, of width {width}",
        "entry",
        "position",
        SinusoidalPositions(width).encoding(torch.arange(positions), torch.float64).tolist(),
    )
