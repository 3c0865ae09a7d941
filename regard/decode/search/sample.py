"""Sampling: each token is drawn from what the model predicts.

    y_t ~ softmax(logits / τ), among the k likeliest, or the fewest that hold a share p

A temperature τ below 1 sharpens, above 1 flattens; top-k (Fan et al. 2018) and top-p, the nucleus
(Holtzman et al. 2020), leave the long tail out. Sentence n draws from (seed, n), one number for
each token: it finds the same whichever batch it is in.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.attention.host import whole
from regard.decode.engine.eager import State, Step
from regard.decode.search.constraints import Length, Limits
from regard.decode.search.greedy import follow
from regard.decode.search.hypothesis import Hypothesis


def sample(
    step: Step,
    state: State,
    prompts: Sequence[Sequence[int]],
    *,
    end: int,
    max_length: Length,
    min_length: Length = 0,
    banned: Sequence[int] = (),
    temperature: float | int = 1.0,
    top_k: int | None = None,
    top_p: float | int | None = None,
    seed: int = 0,
    indices: Sequence[int] | None = None,
) -> list[Hypothesis]:
    """One hypothesis for each prompt; `indices` number the sentences (by default from 0).

    Where both are given, top-p takes its share of what top-k left. Scores are log p of the model
    itself, before temperature and truncation.
    """
    if not 0 < temperature < math.inf:
        raise ValueError(
            f"temperature ({temperature}) must be above 0; for the likeliest tokens use greedy()"
        )
    if top_k is not None:
        whole("top_k", top_k)
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p ({top_p}) must be above 0 and at most 1; try 0.9")
    indices = range(len(prompts)) if indices is None else indices
    if len(indices) != len(prompts):
        raise ValueError(
            f"indices ({len(indices)}) must be as many as prompts ({len(prompts)}); "
            "give each sentence its number"
        )
    limits = Limits(prompts, end, max_length, min_length, banned)
    longest = int(limits.most.max()) if len(prompts) else 0
    dice = torch.from_numpy(uniforms(seed, indices, longest))

    def choose(logs: Tensor, rows: Tensor, found: Tensor) -> Tensor:
        nonlocal dice
        dice = dice.to(logs.device)
        at = found.clamp(0, longest - 1)  # a forced token, or one past the end, takes any
        return draw(logs, dice[rows, at], temperature, top_k, top_p)

    return follow(step, state, limits, choose)


def uniforms(seed: int, indices: Sequence[int], length: int) -> np.ndarray:
    """(B, length) numbers from 0 to 1, row b from (seed, indices[b]) alone."""
    for name, number in (("seed", seed), *(("index", index) for index in indices)):
        whole(name, number, least=0)
    rows = [
        np.random.Generator(np.random.Philox(key=np.array([seed, index], np.uint64))).random(length)
        for index in indices
    ]
    return np.stack(rows) if rows else np.zeros((0, length))


def draw(
    logs: Float[Tensor, "R N"],
    dice: Float[Tensor, "R"],
    temperature: float | int = 1.0,
    top_k: int | None = None,
    top_p: float | int | None = None,
) -> Int[Tensor, "R"]:
    """The token on which each die falls, where the likeliest lie first and widths are p."""
    N = logs.shape[-1]
    if top_k is not None and top_k < N:
        logs, tokens = logs.topk(top_k)
    else:
        logs, tokens = logs.sort(dim=-1, descending=True, stable=True)
    # In float64 neither the sum of a large vocabulary nor a die near 1 is rounded away.
    share = (logs.double() / temperature).softmax(-1)
    upto = share.cumsum(-1)
    kept = share > 0
    if top_p is not None:
        kept &= upto - share < top_p
    last = kept.sum(-1, keepdim=True) - 1
    mark = dice.double()[:, None] * upto.gather(1, last)
    place = torch.searchsorted(upto, mark, right=True).minimum(last)
    return tokens.gather(1, place)[:, 0]
