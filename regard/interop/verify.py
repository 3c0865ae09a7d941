"""An export is compared with the model that it was made of, before it is called one.

Both compute logits of the same input: `compare` gives the largest difference, and refuses an
export that is not the same model. What is allowed is relative to the logits, which have no scale of
their own.
"""

import copy
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

TOLERANCE = 1e-4
"""Of float32, as a share of the largest logit: rounding in another order stays far below it."""

DEVIATION = 0.2
"""Of narrower weights: the root mean square of the differences, as a share of the logits' standard
deviation. int8 stays far below; a wrong layer leaves nothing of the logits, and is near 1."""

LENGTHS = (1, 2, 3, 5, 7, 11, 13, 17)
"""Tokens of the texts that are compared on."""


@dataclass(frozen=True)
class Verified:
    """How an export compares with its model."""

    engine: str
    """What computed the export's logits."""
    logits: int
    """How many were compared."""
    difference: float
    """The largest one."""
    largest: float
    """The largest logit, for comparison."""
    agreement: float
    """The share of positions where both have the same arg-max."""

    def __str__(self) -> str:
        return (
            f"in {self.engine}, the largest difference from the native model is "
            f"{self.difference:.2g} among {self.logits:,} logits of up to {self.largest:.3g}, and "
            f"the arg-max is the same at {self.agreement:.1%} of all positions"
        )


class DifferenceError(ValueError):
    """An export that computes something else than its model."""

    def __init__(self, verified: Verified):
        super().__init__(f"the export computes something else: {verified}; nothing was written")
        self.verified = verified


def compare(
    native: Sequence[Float[Tensor, "_ N"]],
    exported: Sequence[Float[Tensor, "_ N"]],
    engine: str,
    *,
    exact: bool = True,
) -> Verified:
    """The differences of both, position by position; an export beyond the tolerance is refused.

    Weights that were rounded on purpose are not `exact`.
    """
    ours, theirs = torch.cat(list(native)).double(), torch.cat(list(exported)).double()
    differences = (ours - theirs).abs()
    verified = Verified(
        engine,
        logits=ours.numel(),
        difference=float(differences.max()),
        largest=float(ours.abs().max()),
        agreement=float((ours.argmax(-1) == theirs.argmax(-1)).double().mean()),
    )
    if exact:
        same = verified.difference <= TOLERANCE * max(1.0, verified.largest)
    else:
        same = float(differences.square().mean().sqrt()) <= DEVIATION * float(ours.std())
    if not same:  # of NaN too
        raise DifferenceError(verified)
    return verified


def reference(model: nn.Module) -> nn.Module:
    """A copy of the model on the CPU, in float32 and without dropout."""
    return copy.deepcopy(model).float().cpu().eval()


def texts(vocabulary: int, specials: Collection[int] = ()) -> list[list[int]]:
    """Random ids, the same each time: they reach all of a vocabulary, and every weight counts."""
    generator = torch.Generator().manual_seed(0)
    ordinary = torch.tensor([i for i in range(vocabulary) if i not in specials] or [0])
    return [
        ordinary[torch.randint(len(ordinary), (length,), generator=generator)].tolist()
        for length in LENGTHS
    ]
