"""Records a model's attention while it runs, and gives the weights on demand.

    with record(model) as seen:
        model(source, target)
    seen["decoder.blocks.3.cross"].weights()       exact, per head, (B, H, L, S)

The fused kernel still runs: only queries and keys are kept, and weights are recomputed from them on
demand, for the rows asked for.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.attention.mask import Mask
from regard.attention.multihead import Core, MultiHeadAttention
from regard.attention.score import Score
from regard.attention.weights import Statistics, statistics, weights


@dataclass(frozen=True)
class Asked:
    """One call of an attention: its queries and keys, and all else that makes its weights."""

    query: Float[Tensor, "B H L K"]
    key: Float[Tensor, "B G S K"]
    mask: Mask | None
    beta: float | int | Tensor | None
    bias: Tensor | None

    def weights(
        self, rows: int | slice | Sequence[int] | Tensor | None = None
    ) -> Float[Tensor, "B H R S"]:
        """The weights of these rows, or of all."""
        return weights(self.query, self.key, self.mask, self.beta, self.bias, rows)

    def statistics(self, topk: int = 4) -> Statistics:
        """Entropy, top weights and mass received, without the matrix of weights."""
        return statistics(self.query, self.key, self.mask, self.beta, self.bias, topk)


class Recording(dict[str, Asked]):
    """The last call of each attention, by its name in the model; one called twice is kept once."""

    def __missing__(self, name: str) -> Asked:
        raise KeyError(f"{name!r} was not recorded; there are {', '.join(self) or 'none'}")


@contextmanager
def record(
    model: nn.Module, wanted: Callable[[str], bool] = lambda name: True
) -> Iterator[Recording]:
    """Keeps queries and keys of the attentions whose names are `wanted`, while the block runs."""
    seen = Recording()
    handles = [
        module.core.register_forward_pre_hook(_keep(seen, name), with_kwargs=True)
        for name, module in model.named_modules()
        if isinstance(module, MultiHeadAttention) and wanted(name)
    ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _keep(seen: Recording, name: str) -> Callable[[Any, tuple[Any, ...], dict[str, Any]], None]:
    @torch.no_grad()
    def keep(core: Any, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        assert isinstance(core, Core)
        query, key = inputs[:2]
        beta, bias = core.beta, named.get("bias")
        if isinstance(core.score, Score):
            query, key, beta, scores = core.score.project(query, key)
            if scores is not None:
                bias = scores if bias is None else scores + bias
        seen[name] = Asked(query, key, named.get("mask"), beta, bias)

    return keep
