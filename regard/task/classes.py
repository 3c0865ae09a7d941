"""How well classes are told apart: the confusion matrix, and the scores of each class.

row, column   how many examples of one class were taken for another; right ones on the diagonal
precision     of what was taken for a class, the share that is of it
recall        of what is of a class, the share that was taken for it
F1            their harmonic mean; over all classes alike it is macro F1
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

SHOWN = 20
"""Classes up to which the whole matrix is shown; beyond, the most frequent confusions are."""


@dataclass(frozen=True)
class Confusion:
    """What examples of each class were taken for."""

    labels: tuple[str, ...]
    counts: Int[Tensor, "N N"]
    """Row: the class that is right; column: the one that was chosen."""

    @classmethod
    def of(
        cls, labels: Sequence[str], right: Int[Tensor, "n"], chosen: Int[Tensor, "n"]
    ) -> "Confusion":
        N = len(labels)
        pairs = right.long().cpu() * N + chosen.long().cpu()
        return cls(tuple(labels), torch.bincount(pairs, minlength=N * N).view(N, N))

    def scores(self) -> list[dict[str, Any]]:
        """Of each class; 0 where there is nothing to divide by."""
        hits = self.counts.diagonal().double()
        taken, real = self.counts.sum(0).double(), self.counts.sum(1).double()
        precision, recall = hits / taken.clamp_min(1), hits / real.clamp_min(1)
        f1 = 2 * hits / (taken + real).clamp_min(1)
        columns = precision.tolist(), recall.tolist(), f1.tolist(), self.counts.sum(1).tolist()
        return [
            {"label": label, "precision": p, "recall": r, "f1": f, "examples": n}
            for label, p, r, f, n in zip(self.labels, *columns)
        ]

    @property
    def macro_f1(self) -> float:
        """The mean F1 of the classes that have examples."""
        scores = [one["f1"] for one in self.scores() if one["examples"]]
        return sum(scores) / max(1, len(scores))

    def confused(self, most: int = 10) -> list[tuple[str, str, int]]:
        """The most frequent confusions: the right class, the chosen one, and how often."""
        wrong = self.counts.clone().fill_diagonal_(0)
        values, places = wrong.flatten().sort(descending=True, stable=True)
        N = len(self.labels)
        return [
            (self.labels[place // N], self.labels[place % N], count)
            for place, count in zip(places[:most].tolist(), values[:most].tolist())
            if count
        ]

    def to_json(self) -> dict[str, Any]:
        return {"labels": list(self.labels), "counts": self.counts.tolist()}

    def lines(self) -> list[str]:
        """Scores of each class, then the matrix, or what was confused most often."""
        width = max(5, *(len(label) for label in self.labels))
        lines = [f"{'class':<{width}}  precision  recall      f1  examples"]
        for one in self.scores():
            numbers = f"{one['precision']:9.3f}  {one['recall']:6.3f}  {one['f1']:6.3f}"
            lines.append(f"{one['label']:<{width}}  {numbers}  {one['examples']:8,}")
        if len(self.labels) > SHOWN:
            lines += ["", "most often confused:"]
            return lines + [f"{right} → {chosen}: {n:,}" for right, chosen, n in self.confused()]
        cells = [[str(count) for count in row] for row in self.counts.tolist()]
        room = max(len(one) for one in (*self.labels, *(cell for row in cells for cell in row)))
        heads = "  ".join(f"{label:>{room}}" for label in self.labels)
        lines += ["", f"{'':<{width}}  {heads}   ← chosen"]
        for label, row in zip(self.labels, cells):
            lines.append(f"{label:<{width}}  " + "  ".join(f"{cell:>{room}}" for cell in row))
        return lines
